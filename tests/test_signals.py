"""Device-side signals, interpreted: between programs of one process, and between processes."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from needs import needs_interpreter

from weft.collectives import pad, signals

pytestmark = needs_interpreter


def pads(world_size: int) -> SimpleNamespace:
    """Pads of some ranks in this process; the owner keeps the tensors alive."""
    words = [
        torch.zeros(pad.pad_bytes(world_size) // 8, dtype=torch.int64) for _ in range(world_size)
    ]
    return SimpleNamespace(words=words, table=torch.tensor([w.data_ptr() for w in words]))


@triton.jit
def _signal_kernel(table, owner, value, N: tl.constexpr) -> None:
    signals.signal(signals.slot_ptr(table, owner, 2, 1, 0, 7), value)
    signals.signal_add(signals.slot_ptr(table, owner, 2, 1, 1, 7), N)


@triton.jit
def _wait_kernel(table, out, generation, max_polls) -> None:
    slot = signals.slot_ptr(table, 1, 2, 1, 0, 7)
    tl.store(out, signals.wait(slot, generation, max_polls).to(tl.int64))
    arrived = signals.wait_for(table, 1, 2, 1, 0, 7, generation, max_polls)
    tl.store(out + 1, arrived.to(tl.int64))


@triton.jit
def _ticket_kernel(table, out) -> None:
    program, programs = tl.program_id(0), tl.num_programs(0)
    generation = signals.last_generation(table, 0) + 1
    last = signals.is_last_program(table, 0, programs)
    tl.store(out + program, last.to(tl.int64))
    if last:
        signals.set_generation(table, 0, generation)


def test_a_signal_reaches_its_slot_and_stays():
    ranks, out = pads(2), torch.zeros(2, dtype=torch.int64)
    _signal_kernel[(1,)](ranks.table, 1, 5, N=3)
    slot = pad.KERNEL_SLOTS + 2 * pad.MAX_PROGRAMS + 7  # phase 1, source 0, program 7
    assert ranks.words[1][slot] == 5
    assert ranks.words[1][slot + pad.MAX_PROGRAMS] == 3  # source 1
    assert ranks.words[0].count_nonzero() == 0
    for generation in (3, 5):  # a later signal serves an earlier wait
        _wait_kernel[(1,)](ranks.table, out, generation, 0)
        assert out.tolist() == [1, 1]
    assert ranks.words[1][pad.STATUS] == 0


def test_a_wait_that_fails_is_recorded_once_and_ends_all_patience():
    ranks, out = pads(2), torch.zeros(2, dtype=torch.int64)
    _signal_kernel[(1,)](ranks.table, 1, 5, N=1)
    _wait_kernel[(1,)](ranks.table, out, 6, 20)
    assert out.tolist() == [0, 0]
    assert ranks.words[1][pad.STATUS : pad.STATUS + 4].tolist() == [signals.TIMED_OUT, 1, 0, 6]
    polls = []
    before = signals.on_poll
    signals.on_poll = lambda address, value: polls.append((address, value)) or 1
    try:
        _wait_kernel[(1,)](ranks.table, out, 7, 20)
    finally:
        signals.on_poll = before
    slot = pad.KERNEL_SLOTS + 2 * pad.MAX_PROGRAMS + 7
    # Of the plain wait: wait_for gives up.
    assert polls == [(ranks.words[1][slot:].data_ptr(), 7)] * 20
    assert ranks.words[1][pad.STATUS : pad.STATUS + 4].tolist() == [signals.TIMED_OUT, 1, 0, 6]


def test_the_last_program_begins_the_generation_and_resets_the_ticket():
    ranks, out = pads(1), torch.zeros(3, dtype=torch.int64)
    for generation in (1, 2):
        _ticket_kernel[(3,)](ranks.table, out)
        assert out.tolist() == [0, 0, 1]
        assert ranks.words[0][: pad.STATUS].tolist() == [generation, 0]


@triton.jit
def _exchange_kernel(
    out, buffer_ptrs, signal_ptrs, half_bytes, max_polls, rank, generation, W: tl.constexpr
) -> None:
    """Each program sends rank + 10 generation to all, and collects what all sent."""
    program = tl.program_id(0)
    for step in range(W):
        peer = (rank + step) % W
        half = signals.half_ptr(buffer_ptrs, peer, generation, half_bytes, tl.int64)
        tl.store(half + program * W + rank, rank + 10 * generation)
    if signals.barrier(signal_ptrs, rank, W, 0, program, generation, max_polls):
        half = signals.half_ptr(buffer_ptrs, rank, generation, half_bytes, tl.int64)
        for peer in range(W):
            tl.store(out + program * W + peer, tl.load(half + program * W + peer))


@pytest.mark.ranks(2, 4)
def test_calls_in_a_row_between_processes() -> None:
    from weft.collectives import workspace

    ws = workspace(None, 4096, channel="signals")
    for generation in range(1, 13):
        if generation % ws.world_size == ws.rank:
            time.sleep(0.01)
        out = torch.empty(3, ws.world_size, dtype=torch.int64)
        _exchange_kernel[(3,)](
            out,
            ws.buffer_ptrs,
            ws.signal_ptrs,
            ws.half_bytes,
            ws.timeout_polls,
            ws.rank,
            generation,
            W=ws.world_size,
        )
        assert (out == torch.arange(ws.world_size) + 10 * generation).all(), (generation, out)


def test_the_bound_of_a_wait_is_about_the_seconds_asked_for(monkeypatch):
    """Also where others want the core, and a rank that sleeps comes back late."""
    ranks, out, clock = pads(2), torch.zeros(2, dtype=torch.int64), SimpleNamespace(now=1.0)

    def sleep(seconds: float) -> None:
        clock.now += 1e-3

    fake = SimpleNamespace(sleep=sleep, perf_counter=lambda: clock.now)
    monkeypatch.setattr(signals, "time", fake)
    _wait_kernel[(1,)](ranks.table, out, 1, signals.polls_within(0.25, torch.device("cpu")))
    assert clock.now - 1 == pytest.approx(2 * 0.25, rel=0.02)  # two waits
