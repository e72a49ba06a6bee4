"""An all-reduce with one planted fault, for docs/sim.md: weft sim examples/sim_planted_bug.py:call

Each rank puts its vector into a slot of every rank's buffer, signals, waits for all, and adds the
slots up. Called once it is right. Called again, a fast rank may overwrite what a slow one has not
read yet: the buffer has one half only.
"""

from __future__ import annotations

import torch

from weft import collectives
from weft.collectives import signals  # before triton: it makes kernels interpreted without a GPU

import triton  # isort: skip
import triton.language as tl  # isort: skip

SIZE = 16


@triton.jit
def _all_reduce_kernel(
    out_ptr,  # (SIZE,)
    x_ptr,  # (SIZE,)
    buffer_ptrs,  # HALVES x W slots of SIZE elements on each rank
    signal_ptrs,
    rank,
    generation,
    W: tl.constexpr,
    SIZE: tl.constexpr,
    HALVES: tl.constexpr,
) -> None:
    """out = sum of x over ranks. Grid: 1."""
    offs = tl.arange(0, SIZE)
    half = generation % HALVES * W * SIZE
    x = tl.load(x_ptr + offs)
    for step in range(W):
        peer = (rank + step) % W
        slots = signals.peer_ptr(buffer_ptrs, peer, tl.float32) + half
        tl.store(slots + rank * SIZE + offs, x)
    signals.barrier(signal_ptrs, rank, W, 0, 0, generation, 1 << 30)
    slots = signals.peer_ptr(buffer_ptrs, rank, tl.float32) + half
    total = tl.load(slots + offs)
    for source in range(1, W):
        total += tl.load(slots + source * SIZE + offs)
    tl.store(out_ptr + offs, total)


def call(rank: int, halves: int = 1, calls: int = 3) -> None:
    """Several sums in a row."""
    W = collectives.resolve().world_size
    buffer, out = collectives.empty((halves, W, SIZE)), torch.empty(SIZE)
    for generation in range(1, calls + 1):
        x = torch.full((SIZE,), float(rank * generation))
        _all_reduce_kernel[(1,)](
            out,
            x,
            buffer.buffer_ptrs,
            buffer.signal_ptrs,
            rank,
            generation,
            W=W,
            SIZE=SIZE,
            HALVES=halves,
        )
        assert (out == W * (W - 1) / 2 * generation).all(), out


def mended(rank: int) -> None:
    """The same with two halves, used in turn."""
    call(rank, halves=2)
