"""Kernels compiled without a part of their signals, to see what that part costs.

Their results are no good, and nothing stops them from being taken for such: for timing alone, in a
process of its own, before any kernel is compiled in it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.collectives.device import signals, waits

# What kernels may lack, and how figures call what is left.
PARTS = {"waits": "without waits", "status": "without status"}


@triton.jit
def _come(own_pad, ptr, value, timeout_ns, scope: tl.constexpr):
    """A signal is there."""
    return value >= value


@triton.jit
def _all_come(own_pad, words, peers, awaited, rank, value, timeout_ns, scope: tl.constexpr):
    """The signals of all lanes are there."""
    return value >= value


@triton.jit
def _never(own_pad):
    """No wait has failed."""
    return tl.program_id(0) < 0


@triton.jit
def _end(signal_ptrs, rank, generation):
    """`signals.end_call` where no wait has failed."""
    if signals.is_last_program(signal_ptrs, rank, tl.num_programs(0)):
        signals.set_generation(signal_ptrs, rank, generation)
        signals.release_claim(signals.peer_ptr(signal_ptrs, rank, tl.int64))
    return tl.program_id(0) < 0


def leave_out(part: str) -> None:
    """Have kernels lack a part of `PARTS`, and those before it."""
    waits._wait = _come
    signals.wait_for_lanes = waits.wait_for_lanes = _all_come
    if part == "status":
        signals.failed, signals.end_call = _never, _end
