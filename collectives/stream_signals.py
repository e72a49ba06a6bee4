"""Signals of `StreamExchange` and `SymmetricBuffer.barrier` on a GPU: one-program kernels.

Each is enqueued in the current stream and captured by CUDA graphs; generations live in device
memory and are advanced by the kernels themselves, so that a replay continues the count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from weft import settings
from weft.collectives import pad, signals

if TYPE_CHECKING:
    from weft.collectives.symmetric import SymmetricBuffer
    from weft.collectives.workspace import Workspace

_GENERATION = tl.constexpr(pad.GENERATION)
_HOST_SLOTS = tl.constexpr(pad.HOST_SLOTS)
_LINE = tl.constexpr(pad.LINE)
_DATA_WORD, _END_WORD = 0, 1
_BARRIER_WORDS = pad.HOST_SLOTS - 8  # generation words of the 7 barrier channels


@triton.jit
def _begin_kernel(signal_ptrs, rank, GENERATION_WORD: tl.constexpr) -> None:
    """Advance this rank's generation. Grid: 1."""
    word = signals.peer_ptr(signal_ptrs, rank, tl.int64) + GENERATION_WORD
    tl.store(word, tl.load(word) + 1)


@triton.jit
def _post_kernel(
    signal_ptrs, rank, peer, GENERATION_WORD: tl.constexpr, SLOT_WORD: tl.constexpr
) -> None:
    """Release this rank's generation into `peer`'s slot for it. Grid: 1."""
    generation = tl.load(signals.peer_ptr(signal_ptrs, rank, tl.int64) + GENERATION_WORD)
    slot = signals.peer_ptr(signal_ptrs, peer, tl.int64) + _HOST_SLOTS + _LINE * rank + SLOT_WORD
    signals.signal(slot, generation)


@triton.jit
def _wait_kernel(
    signal_ptrs, rank, peer, max_polls, GENERATION_WORD: tl.constexpr, SLOT_WORD: tl.constexpr
) -> None:
    """Hold the stream until `peer` has reached this rank's generation. Grid: 1."""
    own = signals.peer_ptr(signal_ptrs, rank, tl.int64)
    generation = tl.load(own + GENERATION_WORD)
    slot = own + _HOST_SLOTS + _LINE * peer + SLOT_WORD
    if not signals.wait(slot, generation, max_polls):
        signals.record_timeout(own, rank, peer, generation)


def begin(ws: Workspace) -> None:
    """Begin the next call on `ws`."""
    _begin_kernel[(1,)](ws.signal_ptrs, ws.rank, GENERATION_WORD=pad.GENERATION)


def post(ws: Workspace, peer: int, word: int = _DATA_WORD) -> None:
    """Publish to `peer` what the stream has written so far."""
    _post_kernel[(1,)](
        ws.signal_ptrs, ws.rank, peer, GENERATION_WORD=pad.GENERATION, SLOT_WORD=word
    )


def wait(ws: Workspace, peer: int, word: int = _DATA_WORD) -> None:
    """Hold the stream until `peer` has posted in this call."""
    _wait_kernel[(1,)](
        ws.signal_ptrs,
        ws.rank,
        peer,
        ws.timeout_polls,
        GENERATION_WORD=pad.GENERATION,
        SLOT_WORD=word,
    )


def end(ws: Workspace) -> None:
    """Hold the stream until every rank has finished this call."""
    peers = [(ws.rank + step) % ws.world_size for step in range(1, ws.world_size)]
    for peer in peers:
        post(ws, peer, _END_WORD)
    for peer in peers:
        wait(ws, peer, _END_WORD)


def barrier(buffer: SymmetricBuffer, channel: int) -> None:
    """`SymmetricBuffer.barrier` in the current stream."""
    generation = _BARRIER_WORDS + channel
    _begin_kernel[(1,)](buffer.signal_ptrs, buffer.rank, GENERATION_WORD=generation)
    polls = signals.polls_within(settings.timeout_s(), buffer.device)
    for peer in range(buffer.world_size):
        _post_kernel[(1,)](
            buffer.signal_ptrs, buffer.rank, peer, GENERATION_WORD=generation, SLOT_WORD=channel
        )
    for peer in range(buffer.world_size):
        _wait_kernel[(1,)](
            buffer.signal_ptrs,
            buffer.rank,
            peer,
            polls,
            GENERATION_WORD=generation,
            SLOT_WORD=channel,
        )
