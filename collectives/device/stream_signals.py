"""Signals of `StreamExchange` and `SymmetricBuffer.barrier` on a GPU: one-program kernels.

Each is enqueued in the current stream and captured by CUDA graphs; generations live in device
memory and are advanced by the kernels themselves, so that a replay continues the count. Launching a
kernel takes longer than signalling peers, so one launch serves any number of consecutive ranks.

    stream of rank 0    begin | copies, kernels | post -----> | wait <----- | more | end
    stream of rank 1    begin | more            | wait <-- .. | post -----> | ..   | end

    begin   reads GENERATION and holds it for this call
    post    stores the call's number in the words of the ranks named: release at system scope
    wait    acquires the own words of the ranks named at system scope, until they have that number
    end     signals every peer's last word, waits for theirs, and sets GENERATION

Why it neither races nor deadlocks: what comes before a post in the stream is done when the word is
seen, and what comes after a wait begins later. Nobody posts in the next call before all have ended
this one, so that a word is never overwritten unread; and end waits only for peers' ends, which wait
for what they have been posted. Callers post before they wait for what peers post in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from weft import settings
from weft.collectives.device import signals
from weft.collectives.device.launches import launch_kept, launching, layouts_of
from weft.collectives.ranks import pad

if TYPE_CHECKING:
    from weft.collectives.memory.symmetric import SymmetricBuffer
    from weft.collectives.memory.workspace import Workspace

_GENERATION = signals.Constant(pad.GENERATION)
_HOST_SLOTS = signals.Constant(pad.HOST_SLOTS)
_LINE = signals.Constant(pad.LINE)
_DATA_WORD, _END_WORD = 0, 1
_BARRIER_WORDS = pad.HOST_SLOTS - 8  # generation words of the 7 barrier channels


@triton.jit(do_not_specialize=["rank"])
def _begin_kernel(signal_ptrs, rank, GENERATION_WORD: tl.constexpr) -> None:
    """Advance this rank's generation: of calls, or of a barrier's channel. Grid: 1."""
    word = signals.peer_ptr(signal_ptrs, rank, tl.int64) + GENERATION_WORD
    if GENERATION_WORD == _GENERATION:
        tl.store(word, signals.begin_call(signal_ptrs, rank))
    else:
        tl.store(word, tl.load(word) + 1)


@triton.jit
def _slot(signal_ptrs, owner, source, SLOT_WORD: tl.constexpr):
    """The word of `owner`'s pad in which rank `source` posts its generation."""
    return signals.peer_ptr(signal_ptrs, owner, tl.int64) + _HOST_SLOTS + _LINE * source + SLOT_WORD


@triton.jit(do_not_specialize=["rank", "first", "count"])
def _post_kernel(
    signal_ptrs,
    rank,
    first,
    count,
    WORLD_SIZE: tl.constexpr,
    GENERATION_WORD: tl.constexpr,
    SLOT_WORD: tl.constexpr,
) -> None:
    """Release this rank's generation to `count` ranks from `first` on. Grid: 1."""
    generation = tl.load(signals.peer_ptr(signal_ptrs, rank, tl.int64) + GENERATION_WORD)
    lanes, peers = signals.peer_lanes(first, WORLD_SIZE)
    signals.signal(_slot(signal_ptrs, peers, rank, SLOT_WORD), generation, lanes < count)


@triton.jit(do_not_specialize=["rank", "first", "count", "timeout_ns"])
def _wait_kernel(
    signal_ptrs,
    rank,
    first,
    count,
    timeout_ns,
    WORLD_SIZE: tl.constexpr,
    GENERATION_WORD: tl.constexpr,
    SLOT_WORD: tl.constexpr,
    ONE: tl.constexpr,
) -> None:
    """Hold the stream until `count` ranks from `first` on have posted this generation. ONE: `count`
    is 1. Grid: 1.
    """
    own_pad = signals.peer_ptr(signal_ptrs, rank, tl.int64)
    generation = tl.load(own_pad + GENERATION_WORD)
    if ONE:
        peer = first % WORLD_SIZE
        word = _slot(signal_ptrs, rank, peer, SLOT_WORD)
        if not signals.wait(own_pad, word, generation, timeout_ns):
            signals.record_timeout(own_pad, rank, peer, generation)
    else:
        lanes, peers = signals.peer_lanes(first, WORLD_SIZE)
        words = _slot(signal_ptrs, rank, peers, SLOT_WORD)
        signals.wait_for_lanes(
            own_pad, words, peers, lanes < count, rank, generation, timeout_ns, "sys"
        )


@triton.jit
def end_in_kernel(own_pad, results):
    """End a call of which the stream has waited for all, as `signals.end_call` does.

    `results`: tuple of (pointer to bytes, count), which are spoilt if a wait has failed.
    """
    signals.release_claim(own_pad)
    if signals.failed(own_pad):
        signals.tell_peers(own_pad)
        for i in tl.static_range(len(results)):
            signals.spoil(results[i][0], results[i][1])


@triton.jit(do_not_specialize=["rank"])
def _end_kernel(signal_ptrs, rank, results) -> None:
    """`end_in_kernel`. Grid: 1."""
    end_in_kernel(signals.peer_ptr(signal_ptrs, rank, tl.int64), results)


def spoilable_bytes(results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """All bytes of each, to be spoilt: bytes of ones are NaN in whatever type results can have."""
    return [x.as_strided((x.numel(),), (1,)).view(torch.int8) for x in results]


def begin(ws: Workspace) -> None:
    """Begin the next call on `ws`."""
    args = ws.signal_ptrs, ws.rank
    launch_kept(ws.kept_launches(), _begin_kernel, args, GENERATION_WORD=pad.GENERATION)


def post(ws: Workspace, first: int, count: int = 1, word: int = _DATA_WORD) -> None:
    """Publish to `count` ranks, from `first` on, what the stream has written so far."""
    launch_kept(
        ws.kept_launches(),
        _post_kernel,
        (ws.signal_ptrs, ws.rank, first, count),
        WORLD_SIZE=ws.world_size,
        GENERATION_WORD=pad.GENERATION,
        SLOT_WORD=word,
    )


def wait_in_stream(ws: Workspace, first: int, count: int = 1, word: int = _DATA_WORD) -> None:
    """Hold the stream until `count` ranks, from `first` on, have posted in this call."""
    launch_kept(
        ws.kept_launches(),
        _wait_kernel,
        (ws.signal_ptrs, ws.rank, first, count, ws.timeout_ns),
        WORLD_SIZE=ws.world_size,
        GENERATION_WORD=pad.GENERATION,
        SLOT_WORD=word,
        ONE=count == 1,
    )


def end_in_stream(ws: Workspace, results: Sequence[torch.Tensor] = ()) -> None:
    """Hold the stream until every rank has finished this call; spoil `results` if a wait failed."""
    post(ws, ws.rank + 1, ws.world_size - 1, _END_WORD)
    wait_in_stream(ws, ws.rank + 1, ws.world_size - 1, _END_WORD)
    flat = spoilable_bytes(results)

    def launched() -> list[torch.Tensor]:
        pairs = tuple((x, x.numel()) for x in flat)
        launching(_end_kernel, 1)(ws.signal_ptrs, ws.rank, pairs, num_warps=4)
        return []

    ws.repeat(("end of a call", layouts_of(flat)), flat, launched)


def barrier_in_stream(buffer: SymmetricBuffer, channel: int, timeout: float | None = None) -> None:
    """`SymmetricBuffer.barrier` in the current stream."""
    W, generation = buffer.world_size, _BARRIER_WORDS + channel
    peers = buffer.signal_ptrs, buffer.rank, buffer.rank + 1, W - 1
    words = {"WORLD_SIZE": W, "GENERATION_WORD": generation, "SLOT_WORD": channel, "num_warps": 1}
    timeout = settings.timeout_s() if timeout is None else timeout
    timeout_ns = signals.nanoseconds(timeout)
    launching(_begin_kernel, 1)(
        buffer.signal_ptrs, buffer.rank, GENERATION_WORD=generation, num_warps=1
    )
    launching(_post_kernel, 1)(*peers, **words)
    launching(_wait_kernel, 1)(*peers, timeout_ns, ONE=W == 2, **words)
