"""A producer and a consumer with a queue of slots between them: python examples/sim_pipeline.py

Rank 0 makes items and puts them into rank 1's queue of DEPTH slots; rank 1 takes them out. Signals
are words of a symmetric buffer of their own here, and the waits are plain spin loops: `weft.sim`
needs nothing of weft's signals to check a kernel.
"""

from __future__ import annotations

import sys

import torch

from weft import collectives, sim  # before triton: kernels are interpreted where no GPU is

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def _produce_kernel(
    queue_ptrs, flag_ptrs, ITEMS: tl.constexpr, DEPTH: tl.constexpr, SIZE: tl.constexpr
) -> None:
    """Put item i, the number i SIZE times, into slot i % DEPTH of rank 1. Grid: 1."""
    offs = tl.arange(0, SIZE)
    queue = tl.load(queue_ptrs + 1).to(tl.pointer_type(tl.float32))
    filled = tl.load(flag_ptrs + 1).to(tl.pointer_type(tl.int32))  # on rank 1: items put in
    taken = tl.load(flag_ptrs).to(tl.pointer_type(tl.int32))  # on rank 0: items taken out
    for item in range(ITEMS):
        while tl.atomic_add(taken, 0, sem="acquire", scope="sys") < item + 1 - DEPTH:
            pass
        tl.store(queue + item % DEPTH * SIZE + offs, (item + offs * 0).to(tl.float32))
        tl.debug_barrier()
        tl.atomic_add(filled, 1, sem="release", scope="sys")


@triton.jit
def _consume_kernel(
    out_ptr, queue_ptrs, flag_ptrs, ITEMS: tl.constexpr, DEPTH: tl.constexpr, SIZE: tl.constexpr
) -> None:
    """out[i] = sum of item i. Grid: 1."""
    offs = tl.arange(0, SIZE)
    queue = tl.load(queue_ptrs + 1).to(tl.pointer_type(tl.float32))
    filled = tl.load(flag_ptrs + 1).to(tl.pointer_type(tl.int32))
    taken = tl.load(flag_ptrs).to(tl.pointer_type(tl.int32))
    for item in range(ITEMS):
        while tl.atomic_add(filled, 0, sem="acquire", scope="sys") < item + 1:
            pass
        value = tl.load(queue + item % DEPTH * SIZE + offs)
        tl.store(out_ptr + item, tl.sum(value, axis=0))
        tl.debug_barrier()
        tl.atomic_add(taken, 1, sem="release", scope="sys")


def pipeline(rank: int, items: int = 6, depth: int = 2, size: int = 8) -> torch.Tensor | None:
    """What rank 1 has received."""
    queue, flags = collectives.empty((depth, size)), collectives.empty((1,), torch.int32)
    flags.local.zero_()
    flags.barrier()
    tables = queue.buffer_ptrs, flags.buffer_ptrs
    if rank == 0:
        _produce_kernel[(1,)](*tables, ITEMS=items, DEPTH=depth, SIZE=size)
        return None
    out = torch.empty(items)
    _consume_kernel[(1,)](out, *tables, ITEMS=items, DEPTH=depth, SIZE=size)
    return out


def main(schedules: int = 50) -> int:
    """Run it and check what arrives."""
    results = sim.run(2, pipeline, schedules=schedules)
    assert torch.equal(results[1], torch.arange(6.0) * 8)
    print(f"queue of 2: right under {results.schedules} schedules")
    return 0


if __name__ == "__main__":
    sys.exit(main())
