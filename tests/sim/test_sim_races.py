"""Each kind of race, out-of-bounds access and deadlock, and what its message says."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from needs import needs_interpreter
from sim_cases import KERNELS

from weft import collectives, sim
from weft.collectives.device import signals


def found(
    body: Callable[[int], object], kind: type[sim.SimError] = sim.RaceError, ranks: int = 2
) -> str:
    """The message of what is found in `body`; accesses are of this file."""
    with pytest.raises(kind) as caught:
        sim.run(ranks, body, schedules=20)
    text = str(caught.value)
    assert re.search(r"seed=0, schedule=\d+\)$", text)
    return text


@triton.jit
def _hand_over_kernel(buffer_ptrs, signal_ptrs, out_ptr, rank, FAULT: tl.constexpr) -> None:
    """Rank 0 hands eight numbers to rank 1, twice."""
    offs = tl.arange(0, 8)
    data = signals.peer_ptr(buffer_ptrs, 1, tl.float32) + offs
    ready = signals.slot_ptr(signal_ptrs, 1, 2, 0, 0, 0)
    done = signals.slot_ptr(signal_ptrs, 0, 2, 0, 1, 0)
    own_pad = signals.peer_ptr(signal_ptrs, rank, tl.int64)
    for turn in range(1, 3):
        if rank == 0:
            if FAULT == "signal first":
                signals.signal(ready, turn)
            tl.store(data, offs.to(tl.float32) * turn)
            tl.debug_barrier()
            if FAULT == "relaxed":
                tl.atomic_xchg(ready, turn, sem="relaxed", scope="sys")
            elif FAULT == "gpu":
                tl.atomic_xchg(ready, turn, sem="release", scope="gpu")
            elif FAULT == "cta":
                tl.atomic_xchg(ready, turn, sem="release", scope="cta")
            elif FAULT != "no signal" and FAULT != "signal first":
                signals.signal(ready, turn)
            if FAULT != "overwrite":
                signals.wait(own_pad, done, turn, 1 << 30)
        else:
            if FAULT == "relaxed wait":
                while tl.atomic_add(ready, 0, sem="relaxed", scope="sys") < turn:
                    pass
            elif FAULT == "plain":
                while tl.load(ready) < turn:
                    pass
            elif FAULT != "no wait":
                signals.wait(own_pad, ready, turn, 1 << 30)
            tl.store(out_ptr + offs, tl.load(data))
            signals.signal(done, turn)


def hand_over(fault: str) -> Callable[[int], None]:
    def body(rank: int) -> None:
        buffer, out = collectives.empty((8,)), torch.zeros(8)
        _hand_over_kernel[(1,)](buffer.buffer_ptrs, buffer.signal_ptrs, out, rank, FAULT=fault)
        assert rank == 0 or out[7] == 14

    return body


@needs_interpreter
def test_the_right_one_is_right() -> None:
    sim.run(2, hand_over(""), schedules=50)
    sim.run(2, hand_over(""), schedules=10, programs="concurrent")


BUFFER = "symmetric buffer 1 of rank 1, bytes 0 to 31 (elements 0 to 7 of 4 bytes)"


@needs_interpreter
@pytest.mark.parametrize(
    "fault, missing",
    [
        ("signal first", r"rank 0 has released nothing to other ranks since"),
        ("no wait", r"rank 0 has .*"),
        ("relaxed", r"rank 0 has released nothing to other ranks since"),
        ("gpu", r"both are atomic, but at scope gpu and sys: ranks need sys"),
        ("cta", r"both are atomic, but at scope cta and sys: ranks need sys"),
        ("relaxed wait", r"rank 0 has signalled after it, first at .*rank 1 has not waited"),
        ("overwrite", r"rank [01] has .*"),
    ],
)
def test_a_hand_over_with_a_fault(fault: str, missing: str) -> None:
    text = found(hand_over(fault))
    if "scope" in missing:  # found at the signal itself
        assert "signal pad of symmetric buffer 1 of rank 1, words" in text, text
    elif "which nobody has written" not in text:
        assert BUFFER in text, text
        verbs = re.findall(r"rank (\d), kernel _hand_over_kernel, program 0, (\w+) it at", text)
        wanted = {("0", "writes"), ("1", "reads")}
        assert set(verbs) == wanted, text
        lines = re.findall(r"sim/test_sim_races\.py:(\d+) _hand_over_kernel", text)
        assert len(set(lines)) >= 2, text
    if "which nobody has written" not in text:
        assert re.search(f"with nothing between to order them: {missing}", text), text


@needs_interpreter
def test_a_signal_read_as_data() -> None:
    text = found(hand_over("plain"))
    assert "signal pad of symmetric buffer 1 of rank 1, words" in text
    assert "updates it at" in text and "reads it at" in text


@triton.jit
def _count_kernel(buffer_ptrs, SCOPE: tl.constexpr, PLAIN: tl.constexpr) -> None:
    """Every rank adds 1 to a number on rank 0."""
    word = signals.peer_ptr(buffer_ptrs, 0, tl.int32)
    if PLAIN:
        tl.store(word, tl.load(word) + 1)
    else:
        tl.atomic_add(word, 1, sem="relaxed", scope=SCOPE)


@triton.jit
def _read_back_kernel(x_ptr, COUNT: tl.constexpr, BARRIER: tl.constexpr) -> None:
    """Stores 64 numbers, and doubles the first COUNT of them."""
    offs = tl.arange(0, 64)
    tl.store(x_ptr + offs, offs)
    if BARRIER:
        tl.debug_barrier()
    first = tl.arange(0, COUNT)
    tl.store(x_ptr + first, 2 * tl.load(x_ptr + first))


@needs_interpreter
def test_what_other_threads_of_a_program_have_stored() -> None:
    def body(rank: int, count: int, barrier: bool) -> None:
        buffer = collectives.empty((64,), torch.int32)
        _read_back_kernel[(1,)](buffer.local, COUNT=count, BARRIER=barrier)
        assert buffer.local[count - 1] == 2 * (count - 1)

    sim.run(2, lambda rank: body(rank, 32, True))
    sim.run(2, lambda rank: body(rank, 64, False))  # each thread what it has stored itself
    text = found(lambda rank: body(rank, 32, False))
    assert "elements 0 to 31" in text and text.count("_read_back_kernel") >= 2
    assert "no tl.debug_barrier between" in text


@needs_interpreter
def test_atomics_on_data() -> None:
    def body(rank: int, scope: str, plain: bool, early: bool) -> None:
        buffer = collectives.empty((1,), torch.int32)
        buffer.local.zero_()
        buffer.barrier()
        _count_kernel[(1,)](buffer.buffer_ptrs, SCOPE=scope, PLAIN=plain)
        if not early:
            buffer.barrier()
        total = buffer.get_buffer(0, (1,), torch.int32).item()
        assert early or total == 3

    sim.run(3, lambda r: body(r, "sys", False, False), schedules=20)
    text = found(lambda r: body(r, "gpu", False, False), ranks=3)
    assert "at scope gpu and gpu: ranks need sys" in text
    text = found(lambda r: body(r, "sys", True, False), ranks=3)
    assert "elements 0 to 0 of 4 bytes" in text and text.count("_count_kernel") >= 2
    text = found(lambda r: body(r, "sys", False, True), ranks=3)  # the sum, before all have added
    assert "updates it at" in text and "host, reads it at" in text


def test_two_unordered_writes() -> None:
    def body(rank: int) -> None:
        buffer = collectives.empty((4, 4))
        buffer.get_buffer(0, (4, 4), torch.float32)[:, rank : rank + 2].fill_(rank)

    text = found(body)
    assert "symmetric buffer 1 of rank 0, bytes 4 to 55 (elements 1 to 13 of 4 bytes)" in text
    assert text.count("host, writes it at") == 2


def test_a_write_over_what_a_peer_still_reads_in_the_next_call() -> None:
    def body(rank: int, barriers: int) -> None:
        buffer = collectives.empty((2,), torch.bfloat16)
        for call in range(3):
            buffer.local.fill_(call)
            buffer.barrier()
            buffer.get_buffer(1 - rank, (2,), torch.bfloat16).sum()
            if barriers == 2:
                buffer.barrier(channel=1)

    sim.run(2, lambda r: body(r, 2), schedules=20)
    text = found(lambda r: body(r, 1))
    assert "elements 0 to 1 of 2 bytes" in text
    assert "host, reads it at" in text and "host, writes it at" in text


def test_never_written_memory() -> None:
    def body(rank: int) -> None:
        buffer = collectives.empty((4,))
        buffer.local[:3].zero_()
        buffer.barrier()
        buffer.get_buffer(1 - rank, (4,), torch.float32).clone()

    text = found(body)
    assert "bytes 12 to 15 (elements 3 to 3 of 4 bytes), which nobody has written" in text


def test_what_is_told_to_the_host_as_a_list() -> None:
    def body(rank: int) -> list[float]:
        buffer = collectives.empty((2,))
        buffer.local.fill_(rank)
        return buffer.get_buffer(0, (2,), torch.float32).tolist()

    found(body)


@triton.jit
def _spin_kernel(buffer_ptrs, signal_ptrs, rank, HOW: tl.constexpr) -> None:
    """Wait for a number that never comes; rank 1 has left another one."""
    word = signals.peer_ptr(buffer_ptrs, rank, tl.int64)
    if HOW == "cas":
        while tl.atomic_cas(word, 7, 7, sem="acquire", scope="sys") != 7:
            pass
    elif HOW == "add":
        while tl.atomic_add(word, 0, sem="acquire", scope="sys") != 7:
            pass
    else:
        slot = signals.slot_ptr(signal_ptrs, rank, 2, 1, 1 - rank, 3)
        signals.wait(signals.peer_ptr(signal_ptrs, rank, tl.int64), slot, 5, 1 << 30)


@needs_interpreter
@pytest.mark.parametrize(
    "how, wanted",
    [
        ("cas", "7 at byte 0 of symmetric buffer 1 of rank 0, written by rank 1, which is 3"),
        ("add", "another value at byte 0 of symmetric buffer 1 of rank 0, written by rank 1"),
        (
            "wait",
            "5 in word (phase 1, rank 1, program 3) of rank 0's pad, which is 0: rank 1 should",
        ),
    ],
)
def test_deadlocks_name_the_word_and_the_values(how: str, wanted: str) -> None:
    def body(rank: int) -> None:
        buffer = collectives.empty((1,), torch.int64)
        buffer.local.zero_()
        buffer.barrier()
        if rank == 1:
            buffer.get_buffer(0, (1,), torch.int64).fill_(3)
        buffer.barrier()
        if rank == 0:
            _spin_kernel[(1,)](buffer.buffer_ptrs, buffer.signal_ptrs, rank, HOW=how)
        else:
            buffer.barrier(channel=2)

    text = found(body, sim.DeadlockError)
    assert f"waits for {wanted}" in text, text
    assert re.search(r"rank 0, kernel _spin_kernel, program 0: sim/test_sim_races\.py:\d+", text)
    assert re.search(r"rank 1, host: .*/test_sim_races\.py:\d+ body, waits for 1 in word", text)


@triton.jit
def _pairs_kernel(signal_ptrs, rank, PHASE: tl.constexpr) -> None:
    """Every program tells the one of its number on the other rank that it is there."""
    program = tl.program_id(0)
    signals.signal_peers(signal_ptrs, rank, 2, PHASE, program, 1)
    signals.wait_for_peers(signal_ptrs, rank, 2, PHASE, program, 1, 1 << 30)


@pytest.mark.slow
@needs_interpreter
@pytest.mark.parametrize("phase", [0, 1])
def test_more_programs_than_a_pad_has_words_for(phase: int) -> None:
    def body(programs: int) -> Callable[[int], None]:
        def of_rank(rank: int) -> None:
            tables = collectives.empty((1,))
            _pairs_kernel[(programs,)](tables.signal_ptrs, rank, PHASE=phase)

        return of_rank

    sim.run(2, body(256))
    text = found(body(257), sim.OutOfBoundsError)
    assert "program 256, signals by a word of rank" in text
    assert "words for 256 programs of a rank, 0 to 255" in text


@triton.jit
def _sums_kernel(out_ptr, x_ptr, COUNT: tl.constexpr, TURNS: tl.constexpr) -> None:
    offs = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    acc = tl.zeros((COUNT,), tl.float32)
    for _ in range(TURNS):
        acc += tl.load(x_ptr + offs)
    tl.store(out_ptr + offs, acc)


def calls_in(body: Callable[[], object]) -> int:
    """How many functions `body` calls, on all its threads, of which one runs at a time."""
    count = 0

    def called(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    threading.setprofile(called)
    sys.setprofile(called)
    try:
        body()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return count


@pytest.mark.slow
@needs_interpreter
def test_looking_costs_less_than_the_interpreter() -> None:
    x, launches = torch.ones(128), 10

    def launch() -> None:
        for _ in range(launches):
            _sums_kernel[(2,)](torch.empty(128), x, COUNT=64, TURNS=16)

    launch()
    plain = calls_in(launch)
    assert calls_in(lambda: sim.run(1, lambda _: launch())) < 2 * plain

    case = KERNELS["gather of the contraction"]
    sim.run(2, case)  # imports, and Triton's rewriting, are not what is compared
    checked, unchecked = (
        calls_in(lambda races=races: sim.run(2, case, schedules=3, races=races))
        for races in (True, False)
    )
    assert checked < 2 * unchecked


@triton.jit
def _many_programs_kernel(
    scratch_ptr, buffer_ptrs, signal_ptrs, rank, WAITING: tl.constexpr, PERIOD: tl.constexpr
) -> None:
    """Every program reads what program 0 of the other rank has sent; the first WAITING wait."""
    program, offs = tl.program_id(0), tl.arange(0, 8)
    mine = signals.peer_ptr(buffer_ptrs, rank, tl.float32)
    if program == 0:
        tl.store(signals.peer_ptr(buffer_ptrs, 1 - rank, tl.float32) + offs, offs * 1.0)
        signals.signal(signals.slot_ptr(signal_ptrs, 1 - rank, 2, 0, rank, 0), 1)
    if program < WAITING:
        signals.wait_for(signal_ptrs, rank, 2, 0, 1 - rank, 0, 1, 1 << 30)
    tl.store(scratch_ptr + program % PERIOD * 8 + offs, tl.load(mine + offs))


@needs_interpreter
def test_programs_of_a_large_grid_order_nothing_for_each_other() -> None:
    def body(waiting: int = 24, period: int = 24) -> Callable[[int], None]:
        def of_rank(rank: int) -> None:
            tables, scratch = collectives.empty((8,)), torch.empty(24, 8)
            _many_programs_kernel[(24,)](
                scratch, tables.buffer_ptrs, tables.signal_ptrs, rank,
                WAITING=waiting, PERIOD=period,
            )  # fmt: skip

        return of_rank

    sim.run(2, body())
    sim.run(2, body(), schedules=50, replay=True)
    late = "program 23, reads it at .*has signalled after it, .*other programs of rank . have"
    assert re.search(late, found(body(waiting=23)), re.DOTALL)
    for period in (8, 16):
        assert "between programs of one launch" in found(body(period=period))


@triton.jit
def _fill_kernel(buffer_ptrs, half_bytes, rank, COUNT: tl.constexpr) -> None:
    """Fill the second half of the other rank."""
    half = signals.half_ptr(buffer_ptrs, 1 - rank, 1, half_bytes, tl.float32)
    tl.store(half + tl.arange(0, COUNT), 1.0)


@needs_interpreter
def test_a_workspace_has_no_more_room_than_was_asked_for() -> None:
    def body(count: int) -> Callable[[int], None]:
        def of_rank(rank: int) -> None:
            ws = collectives.workspace(nbytes=64)
            _fill_kernel[(1,)](ws.buffer_ptrs, ws.half_bytes, rank, COUNT=count)

        return of_rank

    sim.run(2, body(16))
    assert "past the end of symmetric buffer" in found(body(32), sim.OutOfBoundsError)


@needs_interpreter
def test_a_deadlock_shows_the_line_that_waits_and_who_has_left() -> None:
    def body(rank: int) -> None:
        buffer = collectives.empty((8,))
        if rank == 0:
            _many_programs_kernel[(1,)](
                torch.empty(8), buffer.buffer_ptrs, buffer.signal_ptrs, rank, WAITING=1, PERIOD=1
            )

    text = found(body, sim.DeadlockError)
    line = r"rank 0, kernel _many_programs_kernel, program 0: sim/test_sim_races\.py:\d+ _many"
    assert re.search(line, text) and "\nRank 1 has returned: " in text, text
