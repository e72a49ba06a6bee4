"""Virtual ranks: results, determinism, deadlocks, races, bounds, and what errors say."""

from __future__ import annotations

import io
import re
import runpy
import sys
import threading
from collections.abc import Callable
from functools import cached_property
from itertools import permutations
from math import comb, inf
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from needs import needs_interpreter
from triton.runtime.errors import InterpreterError

import weft
from weft import collectives, sim
from weft.collectives import exchange, resolve, workspace
from weft.collectives.device import signals
from weft.collectives.ranks.flight import call_of
from weft.dtensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from weft.errors import MismatchError
from weft.sim import cli, progress_bar
from weft.sim.hooks import interpreter_hooks
from weft.sim.run import runner
from weft.sim.schedule.scheduler import Strand

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def mean(rank: int) -> torch.Tensor:
    return collectives.all_reduce(torch.tensor([float(rank)]), reduce_op="avg")


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_results_come_in_rank_order(world_size: int) -> None:
    assert sim.run(world_size, lambda rank: rank * 10) == [10 * r for r in range(world_size)]
    want = torch.tensor([(world_size - 1) / 2])
    results = sim.run(world_size, mean, schedules=5)
    assert results.schedules == 5
    for value in results:
        torch.testing.assert_close(value, want)


def test_many_ranks() -> None:
    assert torch.stack(sim.run(72, mean)).eq(35.5).all()


def test_rings_are_of_as_many_ranks_as_a_word_has_bits() -> None:
    x = torch.zeros(1, 1, 1, 4)

    def body(rank: int) -> torch.Tensor:
        return weft.ring_attention(x, x, x, sizes=[1] * 65, key_sizes=[1] * 65)

    with weft.engine("triton"), pytest.raises(NotImplementedError, match="at most 64 ranks"):
        sim.run(65, body)


def test_the_triton_this_runs_on_has_all_that_is_hooked() -> None:
    missing = interpreter_hooks.requirements()
    assert not missing, (
        f"adapt sim/hooks/interpreter_hooks.py to Triton {triton.__version__}: {missing}"
    )


@pytest.mark.parametrize("schedule", [0, 1])
def test_a_seed_fixes_the_interleaving(schedule: int) -> None:
    def order(seed: int, races: bool = True) -> list[int]:
        seen: list[int] = []

        def body(rank: int) -> None:
            for _ in range(5):
                collectives.barrier()
                seen.append(rank)

        sim.run(4, body, seed=seed, schedule=schedule, races=races)
        return seen

    assert order(3) == order(3) == order(3, races=False)
    assert len({tuple(order(seed)) for seed in range(8)}) > 1


class Mean:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    @cached_property
    def value(self) -> float:
        return float(mean(self.rank))


def test_ranks_wait_for_each_other_inside_of_a_property() -> None:
    # Up to Python 3.11 it has a lock, which the ranks share.
    assert sim.run(3, lambda rank: Mean(rank).value, schedules=5, timeout=20) == [1.0] * 3
    assert not hasattr(cached_property, "lock")


def test_every_schedule_and_rank_starts_from_the_callers_random_state() -> None:
    drawn: list[float] = []

    def body(rank: int) -> float:
        collectives.barrier()
        drawn.append(torch.rand(()).item())
        collectives.barrier()
        return torch.rand(()).item()

    results = sim.run(3, body, schedules=4)
    assert len(set(drawn)) == len(set(results)) == 1


def test_the_engine_of_the_caller_is_the_ranks() -> None:
    with weft.engine("host"):
        engines = sim.run(2, lambda rank: weft.settings.current_engine())
    assert engines == ["host", "host"]


def test_automatic_choice_measures_nothing() -> None:
    x, w = torch.ones(4, 8), torch.ones(8, 3)
    for y in sim.run(3, lambda rank: weft.matmul_all_reduce(x, w)):
        assert (y == 24).all()


def test_what_a_rank_raises_is_raised_with_its_traceback() -> None:
    def body(rank: int) -> None:
        collectives.barrier()
        if rank == 1:
            raise KeyError("lost")
        collectives.barrier()

    with pytest.raises(KeyError, match="lost") as caught:
        sim.run(3, body, seed=5)
    assert any(entry.name == "body" for entry in caught.traceback)
    if sys.version_info >= (3, 11):
        assert "virtual rank 1" in caught.value.__notes__[0]
        assert "seed=5, schedule=0" in caught.value.__notes__[0]
    assert sim.run(2, mean, timeout=inf)[0] == 0.5  # nothing is left behind


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match=r"world_size must be in 1\.\.128, got 129"):
        sim.run(129, mean)
    for schedules in (0, "all", 2.5):
        with pytest.raises(ValueError, match="schedules must be at least 1"):
            sim.run(2, mean, schedules=schedules)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="programs must be"):
        sim.run(2, mean, programs="both")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"inside of sim\.run"):
        sim.run(2, lambda rank: sim.run(2, mean))


def test_a_schedule_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_UNWIND_S", 0.1)
    end = threading.Event()
    with pytest.raises(TimeoutError, match=r"(?s)longer than 0\.3 s.*rank 0 is at .*threading\.py"):
        sim.run(2, lambda rank: rank or end.wait(60), timeout=0.3)
    end.set()


def test_two_threads_may_wake_a_strand_at_once() -> None:
    strand = Strand(0, 0)
    baton = strand.baton

    def locked() -> bool:
        baton.release()  # by another thread, right after it was found locked
        return True

    strand.baton = SimpleNamespace(locked=locked, release=baton.release)  # type: ignore[assignment]
    strand.wake()
    assert not baton.locked()


def test_a_call_that_one_rank_leaves_out_is_a_deadlock() -> None:
    def body(rank: int) -> None:
        if rank != 2:
            mean(rank)

    with pytest.raises(sim.DeadlockError, match="rank 2 to ask for the same") as caught:
        sim.run(3, body, schedules=3)
    assert caught.value.schedule == 0
    assert re.search(r"< sim/test_sim\.py:\d+ mean, waits for rank 2", str(caught.value))
    with pytest.raises(sim.DeadlockError, match="\nRanks 0, 2 have returned: what they have not"):
        sim.run(3, lambda rank: rank == 1 and mean(rank))


def test_calls_that_differ_are_found_by_what_ranks_call() -> None:
    def other_dtype(rank: int) -> None:
        collectives.all_reduce(torch.ones(64))
        collectives.all_reduce(torch.ones(2, dtype=torch.int32 if rank else torch.float32))

    def other_length(rank: int) -> None:
        collectives.all_reduce(torch.ones(64))
        collectives.all_reduce(torch.ones(8 if rank else 4))

    def other_call(rank: int) -> None:
        if rank:
            collectives.all_reduce(torch.ones(4))
        else:
            collectives.all_gather(torch.ones(4))

    line = r" at .* < sim/test_sim\.py:\d+ other_"
    for body, theirs in ((other_dtype, "int32"), (other_length, r"\[8\]"), (other_call, "\\[4\\]")):
        for schedule in range(2):
            with pytest.raises(sim.SimError, match=f"(?s)rank 0 calls .*{line}.* {theirs}.*{line}"):
                sim.run(2, body, schedule=schedule)
    with pytest.raises(MismatchError):
        sim.run(2, other_dtype)


@needs_interpreter
def test_comparing_calls_orders_no_ranks() -> None:
    def body(rank: int) -> None:
        buffer = collectives.empty((12,))
        if rank:
            _store_kernel[(1,)](buffer.buffer_ptrs, 0, COUNT=8)
        resolve().calls.begin(call_of("a call", ()))
        if not rank:
            buffer.local.sum().item()

    for schedule in range(4):
        with pytest.raises(sim.RaceError):
            sim.run(2, body, schedule=schedule)


def test_a_signal_that_never_comes_names_who_should_have_sent_it() -> None:
    def body(rank: int) -> None:
        with exchange(None, 0, "hello") as ex:
            for peer in ex.peers():
                if (rank, peer) != (1, 2):
                    ex.signal(peer)

    with pytest.raises(sim.DeadlockError, match="which is 0: rank 1 should have signalled") as e:
        sim.run(3, body)
    assert "rank 2, host: " in str(e.value) and "waits for 1 in word" in str(e.value)


def test_host_races_show_both_accesses() -> None:
    def body(rank: int) -> None:
        buffer = collectives.empty((8,))
        buffer.local.fill_(rank)
        buffer.barrier()
        buffer.get_buffer((rank + 1) % 2, (4,), torch.float32).add_(1)
        buffer.local[2:6].sum()

    with pytest.raises(sim.RaceError, match="bytes 8 to 15") as caught:
        sim.run(2, body, schedules=3)
    text = str(caught.value)
    assert text.count("test_sim.py:") >= 2 and "released nothing" in text
    assert f"seed=0, schedule={caught.value.schedule}" in text


def test_reads_of_memory_that_nobody_wrote() -> None:
    with pytest.raises(sim.RaceError, match="nobody has written"):
        sim.run(2, lambda rank: collectives.empty((4,)).local.sum())
    sim.run(2, lambda rank: torch.empty_like(collectives.empty((4,)).local))


@triton.jit
def _store_kernel(buffer_ptrs, rank, COUNT: tl.constexpr) -> None:
    base = signals.peer_ptr(buffer_ptrs, rank, tl.float32)
    tl.store(base + tl.arange(0, COUNT), tl.arange(0, COUNT).to(tl.float32))


@triton.jit
def _store_at_kernel(buffer_ptrs, rank, AT: tl.constexpr, dtype: tl.constexpr) -> None:
    offs = tl.arange(0, 8)
    tl.store(signals.peer_ptr(buffer_ptrs, rank, dtype) + AT + offs, offs.to(dtype))


@needs_interpreter
@pytest.mark.parametrize(("at", "dtype"), [(-8, tl.float32), (-1024, tl.float32), (-4, tl.float64)])
@pytest.mark.parametrize("peer", [0, 1])
def test_stores_below_a_buffer(peer: int, at: int, dtype: tl.dtype) -> None:
    def body(rank: int) -> None:
        buffer = collectives.empty((24,))
        target = (rank + peer) % 2
        _store_at_kernel[(1,)](buffer.buffer_ptrs, target, AT=0, dtype=dtype)
        collectives.barrier()
        _store_at_kernel[(1,)](buffer.buffer_ptrs, target, AT=at, dtype=dtype)

    with pytest.raises(
        sim.OutOfBoundsError, match="below the data, in the signal pad of symmetric"
    ):
        sim.run(2, body)


@triton.jit
def _copy_kernel(out_ptr, x_ptr, COUNT: tl.constexpr) -> None:
    offs = tl.arange(0, COUNT)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs))


@needs_interpreter
def test_accesses_next_to_a_buffer() -> None:
    def symmetric(rank: int, count: int) -> None:
        _store_kernel[(1,)](collectives.empty((12,)).buffer_ptrs, rank, COUNT=count)

    sim.run(2, lambda rank: symmetric(rank, 8))
    with pytest.raises(sim.OutOfBoundsError, match="past the end of symmetric buffer"):
        sim.run(2, lambda rank: symmetric(rank, 16))
    with pytest.raises(sim.OutOfBoundsError, match="outside of its arguments"):
        sim.run(1, lambda rank: _copy_kernel[(1,)](torch.empty(12), torch.ones(16), COUNT=16))


@triton.jit
def _flag_kernel(buffer_ptrs, signal_ptrs, out_ptr, rank, FAULT: tl.constexpr) -> None:
    """Rank 0 hands a number to rank 1."""
    data = signals.peer_ptr(buffer_ptrs, 1, tl.float32)
    flag = signals.slot_ptr(signal_ptrs, 1, 2, 0, 0, 0)
    if rank == 0:
        tl.store(data, 5.0)
        if FAULT != "barrier":
            tl.debug_barrier()
        if FAULT == "relaxed":
            tl.atomic_xchg(flag, 1, sem="relaxed", scope="sys")
        elif FAULT == "device":
            tl.atomic_xchg(flag, 1, sem="release", scope="gpu")
        elif FAULT != "silent":
            tl.atomic_xchg(flag, 1, sem="release", scope="sys")
    else:
        if FAULT == "plain":
            while tl.load(flag) != 1:
                pass
        else:
            while tl.atomic_cas(flag, 1, 1, sem="acquire", scope="sys") != 1:
                pass
        tl.store(out_ptr, tl.load(data))


def hand_over(rank: int, fault: str) -> float:
    buffer, out = collectives.empty((1,)), torch.zeros(1)
    _flag_kernel[(1,)](buffer.buffer_ptrs, buffer.signal_ptrs, out, rank, FAULT=fault)
    return out.item()


@needs_interpreter
@pytest.mark.parametrize("programs", ["sequential", "concurrent"])
def test_foreign_spin_loops(programs: sim.Programs) -> None:
    assert sim.run(2, lambda r: hand_over(r, ""), schedules=10, programs=programs) == [0, 5]
    for fault in ("relaxed", "device", "barrier"):
        if fault == "barrier" and hasattr(tl, "atomic_load"):
            continue  # that Triton puts one there itself
        with pytest.raises(sim.RaceError, match="_flag_kernel"):
            sim.run(2, lambda r, fault=fault: hand_over(r, fault), schedules=10, programs=programs)
    with pytest.raises(sim.DeadlockError, match="waits for 1 in word"):
        sim.run(2, lambda r: hand_over(r, "silent"), programs=programs)


@triton.jit
def _backwards_kernel(signal_ptrs, rank) -> None:
    """Program 0 waits for program 1 of the other rank. Grid: 2."""
    if tl.program_id(0) == 0:
        slot = signals.slot_ptr(signal_ptrs, rank, 2, 0, 1 - rank, 0)
        signals.wait(signals.peer_ptr(signal_ptrs, rank, tl.int64), slot, 1, 1 << 30)
    else:
        signals.signal(signals.slot_ptr(signal_ptrs, 1 - rank, 2, 0, rank, 0), 1)


@needs_interpreter
def test_a_wait_for_a_later_program_is_told_as_such() -> None:
    def body(rank: int) -> None:
        _backwards_kernel[(2,)](collectives.empty((1,)).signal_ptrs, rank)

    with pytest.raises(sim.DeadlockError, match=r"not begun: 1 of rank 0, 1 of rank 1\. If one"):
        sim.run(2, body)
    sim.run(2, body, programs="concurrent")


@triton.jit
def _raising_kernel(rank) -> None:
    if rank == 1:
        tl.static_assert(tl.program_id(0) < 2)


@needs_interpreter
@pytest.mark.parametrize("programs", ["sequential", "concurrent"])
def test_what_a_kernel_raises(programs: sim.Programs) -> None:
    with pytest.raises((AssertionError, InterpreterError)) as caught:
        sim.run(2, lambda rank: _raising_kernel[(3,)](rank), programs=programs)
    if sys.version_info >= (3, 11):
        assert "virtual rank 1" in caught.value.__notes__[0]
    assert sim.run(2, mean)[0] == 0.5


@needs_interpreter
def test_all_interleavings_of_a_small_case() -> None:
    results = sim.run(2, lambda r: hand_over(r, ""), schedules="exhaustive")
    assert results == [0, 5] and results.schedules > 1 and results.states > 1
    with pytest.raises(sim.RaceError) as caught:
        sim.run(2, lambda r: hand_over(r, "relaxed"), schedules="exhaustive")
    assert isinstance(caught.value.schedule, str)
    with pytest.raises(sim.RaceError):
        sim.run(2, lambda r: hand_over(r, "relaxed"), schedule=caught.value.schedule)


@triton.jit
def _peek_kernel(signal_ptrs, out_ptr, rank, ROUNDS: tl.constexpr) -> None:
    """Tell the other rank a number, look what it has told so far; again with the next number."""
    mine = signals.slot_ptr(signal_ptrs, rank, 2, 0, 1 - rank, 0)
    for number in range(ROUNDS):
        signals.signal(signals.slot_ptr(signal_ptrs, 1 - rank, 2, 0, rank, 0), number + 1)
        tl.store(out_ptr + number, tl.atomic_add(mine, 0, sem="acquire", scope="sys"))


@needs_interpreter
def test_exhaustive_finds_every_outcome() -> None:
    outcomes: set[tuple[tuple[int, ...], ...]] = set()
    told: dict[int, tuple[int, ...]] = {}

    def body(rank: int) -> None:
        out = torch.empty(2, dtype=torch.int64)
        _peek_kernel[(1,)](collectives.empty((1,)).signal_ptrs, out, rank, ROUNDS=2)
        told[rank] = tuple(out.tolist())
        if len(told) == 2:
            outcomes.add((told.pop(0), told.pop(1)))

    def shuffled() -> set[tuple[tuple[int, ...], ...]]:
        """What the definition gives: all ways to shuffle two programs of four steps."""
        found = set()
        for order in set(permutations("aaaabbbb")):
            steps, has, seen = {"a": 0, "b": 0}, {"a": 0, "b": 0}, {"a": [], "b": []}
            for who in order:
                if steps[who] % 2:
                    seen[who].append(has["b" if who == "a" else "a"])
                else:
                    has[who] += 1
                steps[who] += 1
            found.add((tuple(seen["a"]), tuple(seen["b"])))
        return found

    results = sim.run(2, body, schedules="exhaustive")
    assert outcomes == shuffled()
    assert results.schedules < 70 == comb(8, 4), "ways into one state are followed once"


def test_systematic_schedules_are_shown_again_by_few_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "_ALL_RANDOM", 10)  # half of more are systematic

    def body(rank: int) -> None:
        for _ in range(2):
            mean(rank)
        order.append(rank)

    order: list[int] = []
    assert sim.run(2, body, schedules=24).schedules == 24
    orders = [tuple(order[i : i + 2]) for i in range(0, len(order), 2)]
    order.clear()

    def wrong(rank: int) -> None:
        body(rank)
        if len(order) % 2 == 0 and len(order) > 2 * 19:  # a systematic one
            raise sim.SimError("found")

    with pytest.raises(sim.SimError) as caught:
        sim.run(2, wrong, schedules=24)
    schedule = caught.value.schedule
    assert isinstance(schedule, str) and len(schedule) < 16
    assert f"seed=0, schedule={schedule!r})" in str(caught.value)
    order.clear()
    sim.run(2, body, schedule=schedule)
    assert tuple(order) == orders[19]
    with pytest.raises(ValueError, match="like '17:2,40:0'"):
        sim.run(2, body, schedule="17.2")


def test_progress_shows_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(progress_bar, "_SHOW_AFTER_S", 0.0)
    for screen, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", screen)
        sim.run(2, mean, schedules=3)
        assert ("3/3" in screen.getvalue()) == shown


def test_workspaces_are_dropped_at_the_end() -> None:
    from weft.collectives.memory.workspace import _workspaces

    before = len(_workspaces)
    sim.run(2, mean)
    assert len(_workspaces) == before

    def close_and_go_on(rank: int) -> None:
        for _ in range(2):
            mean(rank)
            weft.close()

    sim.run(2, close_and_go_on)
    assert sim.run(2, lambda rank: workspace(None, 8).world_size) == [2, 2]
    assert sim.run(2, lambda rank: resolve(None).backend) == ["virtual", "virtual"]


@needs_interpreter
@pytest.mark.parametrize("name", ["ring", "pipeline"])
def test_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(EXAMPLES / f"sim_{name}.py"))
    assert example["main"](schedules=10) == 0
    assert "right under 10 schedules" in capsys.readouterr().out


@needs_interpreter
def test_nothing_is_kept_for_ranks_that_are_no_more() -> None:
    """Plans are kept by group, and a virtual group holds the memory of its run."""
    name = "weft.kernels.matmul.fused_op._plans"

    def held() -> list[int]:
        return [each.held for each in weft.caches() if each.name == name]

    def body(rank: int) -> list[int]:
        weft.matmul_all_reduce(torch.ones(2, 3), torch.ones(3, 2))
        weft.all_gather_matmul(torch.ones(2, 3), torch.ones(3, 2))
        return held()

    sim.run(2, body)  # imports
    before = held()
    during, _ = sim.run(2, body)
    assert len(before) == 1 and held() == before
    assert all(then < now for then, now in zip(before, during, strict=True))


def over_hosts(rank: int) -> list[torch.Tensor]:
    """Calls in two levels, in float64: exact sums of small integers."""
    x = torch.arange(12.0, dtype=torch.float64).view(6, 2) + rank
    w = torch.ones(2, 3, dtype=torch.float64) * (rank + 1)
    calls: list[Callable[[], torch.Tensor]] = [
        lambda: weft.collectives.all_reduce(x),
        lambda: weft.collectives.all_gather(x[: rank + 1]),
        lambda: weft.collectives.reduce_scatter(x),
        lambda: weft.all_gather_matmul(x[: rank + 1], w),
        lambda: weft.matmul_reduce_scatter(x, w),
    ]
    results = []
    for call in calls:
        told = weft.explain(call)
        assert "hosts" in {each.engine for each in told}, told
        results.append(told.result)
    return results


@pytest.mark.parametrize("hosts", [[2, 1], [1, 2, 1]])
def test_calls_over_several_hosts(hosts: list[int]) -> None:
    W = sum(hosts)
    two_levels = sim.run(W, over_hosts, hosts=hosts, schedules=6)
    xs = [torch.arange(12.0, dtype=torch.float64).view(6, 2) + rank for rank in range(W)]
    whole, total = torch.cat([x[: r + 1] for r, x in enumerate(xs)]), torch.stack(xs).sum(0)
    sums = sum(x @ torch.ones(2, 3).double() * (r + 1) for r, x in enumerate(xs))
    for rank, (summed, gathered, part, product, chunk) in enumerate(two_levels):
        assert torch.equal(summed, total) and torch.equal(gathered, whole)
        assert torch.equal(part, total.chunk(W)[rank] if rank < len(total.chunk(W)) else total[:0])
        assert torch.equal(product, whole @ torch.ones(2, 3).double() * (rank + 1))
        chunks = sums.chunk(W)
        assert torch.equal(chunk, chunks[rank] if rank < len(chunks) else sums[:0])


def moved_over_hosts(rank: int) -> None:
    """Moves of DTensors whose shares one rank of a host fetches, or adds up, for others."""
    mesh, R, P = init_device_mesh("cpu", (2, 2)), Replicate(), Partial()
    whole, terms = torch.arange(24.0).view(4, 6), torch.full((4, 6), rank + 1.0)
    x = DTensor.from_local(whole.chunk(2)[rank // 2], mesh, [Shard(0), R], run_check=False)
    y = DTensor.from_local(terms, mesh, [P, P], run_check=False)
    for later in (False, True):
        told = weft.explain(x.redistribute, placements=[R, R], async_op=later)
        assert [each.engine for each in told] == ["hosts"]
        total = y.redistribute(placements=[Shard(1), R], async_op=later)
        assert torch.equal(told.result.to_local(), whole)
        assert torch.equal(total.to_local(), torch.full((4, 3), 10.0))


@pytest.mark.parametrize("hosts", [[2, 2], [1, 3], [1, 2, 1]])
def test_moves_over_several_hosts(hosts: list[int]) -> None:
    sim.run(4, moved_over_hosts, hosts=hosts, schedules=6)


def test_hosts_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [f"{__file__}:over_hosts", "--schedules", "2", "--hosts"]
    assert cli.main([*asked, "2x2"]) == 0
    assert "4 ranks, 2 schedules" in capsys.readouterr().out
    for wrong in ("2", "0x2", "axb"):
        with pytest.raises(SystemExit):
            cli.main([*asked, wrong])
        assert "hosts x ranks on each" in capsys.readouterr().err
    with pytest.raises(ValueError, match="add up to 3"):
        sim.run(3, over_hosts, hosts=[2, 2])
