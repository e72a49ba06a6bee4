"""Schedules that are played instead of run: the same hand-overs, and what differs is run."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from needs import needs_interpreter
from sim_cases import COLLECTIVES, FLAGGED, HOST, KERNELS
from sweeps import HEAD, rows_of, with_rows

from weft import collectives, sim
from weft.collectives.device import signals
from weft.sim.run import runner
from weft.sim.schedule.player import outcome

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def same_hand_overs(
    world_size: int, case: Callable[[int], object], **options: object
) -> sim.Results:
    run = sim.run(world_size, case, **options)
    played = sim.run(world_size, case, replay=True, **options)
    assert (played.schedules, played.switches) == (run.schedules, run.switches)
    assert run.played == 0 < played.played
    return played


@needs_interpreter
def test_kernels() -> None:
    results = same_hand_overs(2, KERNELS["gather of the contraction"], schedules=5)
    assert results.played == 4 and results.distinct > 1


@pytest.mark.slow
@needs_interpreter
def test_kernels_with_concurrent_programs() -> None:
    """Which of a launch ends last differs: those orders are run until each has been seen."""
    case = KERNELS["gather of the contraction"]
    results = same_hand_overs(2, case, schedules=24, programs="concurrent")
    assert results.played > 4 and results.distinct > 1


@needs_interpreter
def test_the_last_of_concurrent_programs_may_be_any() -> None:
    case = COLLECTIVES["collectives that reduce, two shots"]
    results = sim.run(2, case, schedules=24, programs="concurrent", replay=True)
    assert 1 < results.schedules - results.played < 20


def test_systematic_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_ALL_RANDOM", 10)  # half of more are systematic
    same_hand_overs(2, HOST["public collectives"], schedules=24)


@needs_interpreter
def test_words_with_flags_may_be_there_at_the_first_look_or_at_a_later_one() -> None:
    case = FLAGGED["all-reduce by words, two shots"]
    assert sim.run(2, case, schedules=4, replay=True).played == 2


@needs_interpreter
def test_a_rank_may_be_one_call_ahead_of_every_wait() -> None:
    # A wait looks at a word that tells of time-outs each time: that is no spinning, and a rank that
    # did must not come last for it.
    mended = runpy.run_path(str(EXAMPLES / "sim_planted_bug.py"))["mended"]
    assert sim.run(3, mended, schedules=40, replay=True).distinct > 20


def test_exchanges_of_the_host() -> None:
    assert same_hand_overs(3, HOST["movement of bytes"], schedules=4).distinct == 4


def test_process_groups_and_messages() -> None:
    def body(rank: int) -> None:
        dist.init_process_group("gloo")
        x = torch.tensor([float(rank)])
        for _ in range(2):
            dist.all_reduce(x)
        if rank:
            dist.send(x, 0)
        else:
            for peer in (2, 1):
                dist.recv(torch.empty(1), peer)

    assert same_hand_overs(3, body, schedules=8).played == 7


@triton.jit
def _either_kernel(buffer_ptrs, signal_ptrs, out_ptr, rank, COUNT: tl.constexpr) -> None:
    """Ranks 0 and 1 tell rank 2 that their numbers are there, in one word."""
    word = signals.slot_ptr(signal_ptrs, 2, 3, 0, 0, 0)
    data = signals.peer_ptr(buffer_ptrs, 2, tl.float32)
    if rank < 2:
        tl.store(data + rank, 5.0)
        signals.signal_add(word, 1)
    else:
        signals.wait(signals.peer_ptr(signal_ptrs, rank, tl.int64), word, COUNT, 1000)
        tl.store(out_ptr, tl.load(data))


def either(rank: int, count: int) -> float:
    buffer, out = collectives.empty((2,)), torch.zeros(1)
    _either_kernel[(1,)](buffer.buffer_ptrs, buffer.signal_ptrs, out, rank, COUNT=count)
    return out.item()


@needs_interpreter
def test_a_race_of_some_orders_only_is_found_in_the_same_schedule() -> None:
    assert same_hand_overs(3, lambda rank: either(rank, 2), schedules=40)[2] == 5
    schedules = set()
    for seed in range(6):
        for replay in (False, True):
            with pytest.raises(sim.RaceError, match="_either_kernel") as caught:
                sim.run(3, lambda rank: either(rank, 1), seed=seed, schedules=40, replay=replay)
            schedules.add((seed, caught.value.schedule))
    assert len(schedules) == 6 and any(schedule != 0 for _, schedule in schedules)


@triton.jit
def _peek_kernel(buffer_ptrs, signal_ptrs, out_ptr, rank) -> None:
    """Rank 1 looks whether rank 0's number is there, and takes it if not."""
    word = signals.slot_ptr(signal_ptrs, 1, 2, 0, 0, 0)
    data = signals.peer_ptr(buffer_ptrs, 1, tl.float32)
    if rank == 0:
        tl.store(data, 5.0)
        signals.signal(word, 1)
    elif tl.atomic_add(word, 0, sem="acquire", scope="sys") == 0:
        tl.store(out_ptr, tl.load(data))


@needs_interpreter
def test_a_branch_that_no_run_has_taken_is_run() -> None:
    def body(rank: int) -> None:
        buffer = collectives.empty((1,))
        if rank:
            buffer.local.zero_()
        buffer.barrier()
        _peek_kernel[(1,)](buffer.buffer_ptrs, buffer.signal_ptrs, torch.zeros(1), rank)

    for seed in range(4):
        found = []
        for replay in (False, True):
            with pytest.raises(sim.RaceError, match="_peek_kernel") as caught:
                sim.run(2, body, seed=seed, schedules=40, replay=replay)
            found.append(caught.value.schedule)
        assert found[0] == found[1]


def test_what_atomics_leave() -> None:
    assert outcome(("load",), 3) == (3, False)
    assert outcome(("add", 2), 3) == (5, True) and outcome(("add", 0), 3) == (3, False)
    assert outcome(("set", 3), 3) == (3, True)
    assert outcome(("swap", 3, 4), 3) == (4, True) and outcome(("swap", 2, 4), 3) == (3, False)


def test_what_cannot_be_told_from_others_is_run() -> None:
    def anybody(rank: int) -> None:
        dist.init_process_group("gloo")
        if rank:
            dist.send(torch.ones(1), 0)
        else:
            for _ in range(2):
                dist.recv(torch.empty(1))

    results = sim.run(3, anybody, schedules=4, replay=True)
    assert (results.schedules, results.played) == (4, 0)
    with pytest.raises(ValueError, match="replay=True needs races"):
        sim.run(2, anybody, races=False, replay=True)


def test_rows_of_the_page_of_sweeps_are_kept() -> None:
    one, two = "| pulls of boxes | sequential | 2 |", "| ring attention | concurrent | 3 |"
    rest = " 9 | 1 | 4 | nothing | 1 |"
    rows = rows_of(f"{HEAD}\n| --- | --- |\n{two}{rest}\n{one}{rest}\n")
    page = with_rows("a\n<!-- sweeps -->\nold\n<!-- /sweeps -->\nb\n", rows)
    assert rows_of(page) == rows and "old" not in page
    assert page.index(one) < page.index(two) and page.startswith("a\n") and page.endswith("b\n")
