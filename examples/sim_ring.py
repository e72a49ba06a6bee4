"""A ring exchange written without weft's kernels, on virtual ranks: python examples/sim_ring.py

Each rank sums what all ranks hold by passing it on around the ring, one step at a time. Two slots
are used in turn, and a rank may write its neighbour's slot again only after the neighbour has said
that it has read it. Leave that wait out (CREDIT=False) and a fast rank overwrites what a slow one
still reads: `weft.sim` says where.
"""

from __future__ import annotations

import sys

import torch

from weft import collectives, sim
from weft.collectives import signals  # before triton: it makes kernels interpreted without a GPU

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def _ring_sum_kernel(
    out_ptr,  # (SIZE,)
    x_ptr,  # (SIZE,)
    buffer_ptrs,  # two slots of SIZE elements on each rank
    signal_ptrs,
    rank,
    W: tl.constexpr,
    SIZE: tl.constexpr,
    CREDIT: tl.constexpr,
) -> None:
    """out = sum of x over ranks. Grid: 1.

    Phase 0 says "step s has arrived", phase 1 "step s has been read".
    """
    offs = tl.arange(0, SIZE)
    right = (rank + 1) % W
    left = (rank + W - 1) % W
    mine = signals.peer_ptr(buffer_ptrs, rank, tl.float32)
    theirs = signals.peer_ptr(buffer_ptrs, right, tl.float32)
    own_pad = signals.peer_ptr(signal_ptrs, rank, tl.int64)
    part = tl.load(x_ptr + offs)
    total = part
    for step in range(1, W):
        slot = (step & 1) * SIZE
        if CREDIT and step > 2:
            read = signals.slot_ptr(signal_ptrs, rank, W, 1, right, 0)
            signals.wait(own_pad, read, step - 2, 1 << 30)
        tl.store(theirs + slot + offs, part)
        signals.signal(signals.slot_ptr(signal_ptrs, right, W, 0, rank, 0), step)
        arrived = signals.slot_ptr(signal_ptrs, rank, W, 0, left, 0)
        signals.wait(own_pad, arrived, step, 1 << 30)
        part = tl.load(mine + slot + offs)
        signals.signal(signals.slot_ptr(signal_ptrs, left, W, 1, rank, 0), step)
        total += part
    tl.store(out_ptr + offs, total)


def ring_sum(rank: int, world_size: int, size: int = 16, credit: bool = True) -> torch.Tensor:
    """The sum over ranks of (rank + 1)."""
    buffer = collectives.empty((2, size))
    x, out = torch.full((size,), rank + 1.0), torch.empty(size)
    _ring_sum_kernel[(1,)](
        out, x, buffer.buffer_ptrs, buffer.signal_ptrs, rank, W=world_size, SIZE=size, CREDIT=credit
    )
    return out


def main(world_size: int = 4, schedules: int = 50) -> int:
    """Run the right kernel, then the one with the fault."""
    results = sim.run(world_size, lambda rank: ring_sum(rank, world_size), schedules=schedules)
    assert all((out == world_size * (world_size + 1) / 2).all() for out in results)
    print(f"ring of {world_size}: right under {results.schedules} schedules")
    try:
        sim.run(world_size, lambda rank: ring_sum(rank, world_size, credit=False), schedules=200)
    except sim.RaceError as error:
        print(f"\nwithout credits:\n{error}")
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
