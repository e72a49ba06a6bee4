"""Where signals and data lie in symmetric memory, as kernels reckon it; and their constants.

The words of a pad are those of `weft.collectives.ranks.pad`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from weft.collectives.ranks import pad

INTERPRETED = bool(triton.knobs.runtime.interpret)
HAS_ATOMIC_LOAD = hasattr(tl, "atomic_load")  # Triton 3.9


class Constant(tl.constexpr):  # type: ignore[misc]  # Triton ships no types
    """A constant that kernels refer to by name.

    Before every launch Triton compares all globals that a kernel and its functions refer to, ten in
    most of ours, with their values at compile time: 1 us each if the comparison makes a constexpr.
    """

    def __ne__(self, other: Any) -> bool:
        return bool(self.value != other.value)


_GENERATION = Constant(pad.GENERATION)
_KERNEL_SLOTS = Constant(pad.KERNEL_SLOTS)
_MAX_PROGRAMS = Constant(pad.MAX_PROGRAMS)


@triton.jit
def peer_ptr(table, rank, dtype: tl.constexpr):
    """Address of `rank`'s region in `table` (int64[W]), as a pointer to `dtype`."""
    return tl.multiple_of(tl.load(table + rank).to(tl.pointer_type(dtype)), 16)


@triton.jit
def half_ptr(buffer_ptrs, rank, generation, half_bytes, dtype: tl.constexpr):
    """Address of the half of `rank`'s data region that call `generation` uses."""
    base = tl.load(buffer_ptrs + rank) + (generation & 1) * half_bytes
    return tl.multiple_of(base.to(tl.pointer_type(dtype)), 16)


@triton.jit
def slot_ptr(signal_ptrs, owner, world_size, phase: tl.constexpr, source, program):
    """The word of `owner`'s pad where `program` (< 256) of rank `source` announces a `phase`."""
    tl.static_assert(phase == 0 or phase == 1, "a pad has words for phases 0 and 1")
    pad = peer_ptr(signal_ptrs, owner, tl.int64)
    return pad + _KERNEL_SLOTS + (phase * world_size + source) * _MAX_PROGRAMS + program


@triton.jit
def last_generation(signal_ptrs, rank):
    """Number of the last call that `rank` has begun."""
    return tl.load(peer_ptr(signal_ptrs, rank, tl.int64) + _GENERATION)


# One lane for each peer. A release waits until this program's stores have been acknowledged, over
# the link and back: one after another, the releases and acquires of 8 ranks would take longer than
# everything else in a call of few bytes.
@triton.jit
def peer_lanes(first, WORLD_SIZE: tl.constexpr):
    """Ranks `first`, `first` + 1, ... around the world, as (number of each lane, its rank).

    There is a power of 2 of lanes: those from WORLD_SIZE on repeat ranks.
    """
    lanes = tl.arange(0, triton.next_power_of_2(WORLD_SIZE))
    return lanes, (first + lanes) % WORLD_SIZE
