"""Combine of few tokens in one launch: what both kernels of `combine_kernel` do.

    rank 0   pushers | weighers        a pusher stores results in the slots of their tokens' ranks
    rank 1   pushers | weighers        (`combine_kernel`), a weigher adds up those of its own rank

Protocol, by the number of a program
  1. Pushers, the first ones: store what they make, and signal the words (0, rank, program) of all
     ranks, their own too: release at system scope.
  2. Weighers, the others: wait for the pushers of all ranks (acquire, system scope), and add up.

Why it neither races nor deadlocks: pushers wait for nobody, weighers for pushers, which have
smaller numbers. A rank signals after its last call has ended (rule 1 of
`weft.collectives.device.signals`), and each weigher waits for everyone (rule 2).
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from weft.collectives.device import signals
from weft.kernels.expert_kernels.combine_kernel import PushTiles, PushVariant, push
from weft.kernels.expert_kernels.hand_over import tell_all_ranks, wait_for_all_ranks
from weft.kernels.expert_kernels.weigh_kernel import WeighVariant, weigh


@dataclass(frozen=True)
class PushAndWeighVariant:
    """What `push_and_weigh_kernel` is compiled for: the first `pushers` programs push."""

    push: PushVariant
    weigh: WeighVariant
    pushers: int


@triton.jit(do_not_specialize=["E", "parts", "part", "rank", "T", "experts"])
def push_and_weigh_kernel(
    hs,  # of PushTiles
    h_desc,
    h2_desc,
    weights,
    w_desc,
    w2_desc,
    table,
    link,
    E,
    Ns,
    H,
    parts,
    part,
    pitch,
    rank,
    weighed,  # Weighed
    T,
    experts,
    V: tl.constexpr,  # PushAndWeighVariant
) -> None:
    """Both in one launch: the first programs push. Grid: more than those, the same on all ranks."""
    PUSH: tl.constexpr = V.push
    WEIGH: tl.constexpr = V.weigh
    PUSHERS: tl.constexpr = V.pushers
    WIRE: tl.constexpr = PUSH.wire
    W: tl.constexpr = PUSH.world_size
    generation = signals.begin_call(link.signal_ptrs, rank)
    program = tl.program_id(0)
    if program < PUSHERS:
        call = PushTiles(
            hs,
            h_desc,
            h2_desc,
            weights,
            w_desc,
            w2_desc,
            table,
            link,
            rank,
            generation,
            E,
            Ns,
            H,
            parts,
            part,
            pitch,
        )
        push(call, program, PUSHERS, PUSH)
        tell_all_ranks(link, rank, program, generation, W)
    else:
        came = wait_for_all_ranks(link, rank, generation, W, PUSHERS)
        weigh(
            weighed,
            link,
            rank,
            generation,
            tl.where(came, T, 0),
            H,
            pitch,
            experts,
            program - PUSHERS,
            tl.num_programs(0) - PUSHERS,
            WIRE,
            WEIGH,
        )
    if signals.end_call(link.signal_ptrs, rank, generation):
        signals.spoil(weighed.y, tl.cast(T, tl.int64) * H)
