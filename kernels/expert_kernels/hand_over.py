"""One launch each way: the first programs of all ranks write, and later ones wait for all of these.

    rank 0   writers 0 1 | readers 2 3 ..        a writer has a word on every rank, its own, too:
    rank 1   writers 0 1 | readers 2 3 ..        (0, rank, program)

Readers have greater numbers than writers, which wait for nobody.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.collectives.device import signals


@triton.jit
def tell_all_ranks(link, rank, program, generation, WORLD_SIZE: tl.constexpr):
    """A writer: all that it has written is there."""
    lanes, ranks = signals.peer_lanes(rank + 1, WORLD_SIZE)
    words = signals.slot_ptr(link.signal_ptrs, ranks, WORLD_SIZE, 0, rank, program)
    signals.signal(words, generation, lanes < WORLD_SIZE)


@triton.jit
def wait_for_all_ranks(link, rank, generation, WORLD_SIZE: tl.constexpr, WRITERS: tl.constexpr):
    """A reader: whether all writers of all ranks have told."""
    LANES: tl.constexpr = triton.next_power_of_2(WORLD_SIZE * WRITERS)
    lanes = tl.arange(0, LANES)
    ranks = tl.minimum(lanes // WRITERS, WORLD_SIZE - 1)
    words = signals.slot_ptr(link.signal_ptrs, rank, WORLD_SIZE, 0, ranks, lanes % WRITERS)
    own_pad, awaited = signals.peer_ptr(link.signal_ptrs, rank, tl.int64), lanes // WRITERS == ranks
    return signals.wait_for_lanes(
        own_pad, words, ranks, awaited, rank, generation, link.timeout_ns, "sys"
    )
