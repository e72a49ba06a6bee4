"""All-reduce of few bytes without signals: every word carries its flag.

Legend: W ranks, each with terms x of `count` elements, cut into blocks, of which each program of P
moves every P-th one. Words and the rules of them: see `weft.collectives.device.flagged`.

    one shot    x ==> slot r of every rank             sum = slot 0 + slot 1 ..
    two shots   x[blocks of p] ==> slot r of p         p: sum = slot 0 + slot 1 ..
                                                       sum ==> shown blocks of every rank

In two shots each rank has S blocks, one behind the other, of the last ranks fewer, or none. Twice
the bytes of `kernel_collectives` cross the links (==>), but nobody waits until stores are
acknowledged, and nothing is signalled. A half of the workspace is W slots of S blocks (in one shot
of all), then for two shots the shown ones.

Protocol, in each program:
  1. Store its blocks in slot `rank` of the ranks that add them up, this one too.
  2. Load each block that this rank adds up from all slots, until all words have the flag of this
     call; add them up in rank order. One shot: store the sum. Two shots: show it to every rank.
  3. Two shots: load its blocks as all ranks show them, until all words have the flag; store them.
  4. Take a ticket; the last one sets GENERATION.

Why it neither races nor deadlocks: a program stores all that it has for others before it loads, and
waits for the same program of its peers. No rank ends a call before it has words of all peers, or of
ranks that had them, as there is one block at least: rule 2 of `signals`. The output may be the
input: a program overwrites only blocks that it has read, and no other program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.collectives.device import flagged, signals
from weft.collectives.device.device_math import cdiv, divided, rounded


@triton.jit
def _words_of(link, owner, number, generation, WORDS: tl.constexpr):
    """Where a block begins in the half of `owner`, or of several: slots', then shown ones."""
    half = signals.half_ptr(link.buffer_ptrs, owner, generation, link.half_bytes, tl.int64)
    return half + tl.cast(number, tl.int64) * WORDS


@triton.jit(do_not_specialize=["rank"])
def flagged_reduce_kernel(
    out_ptr,  # (count,)
    x_ptr,  # (count,), or out_ptr
    link,
    count,
    rank,
    WORLD_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OP: tl.constexpr,  # "sum" or "avg"
    TWO_SHOT: tl.constexpr,
) -> None:
    """out = x summed over the ranks. Contiguous fp32, bf16 or fp16. Grid: `config.programs`.

    Example: 2 ranks, x = [1 2 3] on both: out = [2 4 6] on both.
    """
    W: tl.constexpr = WORLD_SIZE
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    WORDS: tl.constexpr = BLOCK * dtype.primitive_bitwidth // 32
    program, programs = tl.program_id(0), tl.num_programs(0)
    generation = signals.begin_call(link.signal_ptrs, rank)
    own_pad = signals.peer_ptr(link.signal_ptrs, rank, tl.int64)
    blocks = cdiv(count, BLOCK)
    share = cdiv(blocks, W) if TWO_SHOT else blocks
    shown = W * share
    cleaning = flagged.is_cleaning(generation)
    if cleaning:
        used = shown + blocks if TWO_SHOT else shown
        flagged.clean(link, rank, generation, tl.cast(used, tl.int64) * WORDS)
    lanes, peers = signals.peer_lanes(rank + 1, W)
    columns = tl.arange(0, BLOCK)
    stride = tl.cast(share, tl.int64) * WORDS
    for i in range(program, share, programs):
        numbers = peers * share + i if TWO_SHOT else peers * 0 + i
        offs = tl.cast(numbers, tl.int64)[:, None] * BLOCK + columns[None, :]
        terms = tl.load(x_ptr + offs, mask=offs < count, other=0.0)
        slots = _words_of(link, peers, rank * share + i, generation, WORDS)
        wanted = tl.where(lanes < W, (numbers < blocks) | cleaning, False)
        flagged.store_flagged(slots, terms, generation, wanted)
    for i in range(program, share, programs):
        number = rank * share + i if TWO_SHOT else i
        if number < blocks:
            slots = _words_of(link, rank, i, generation, WORDS)
            total, here = flagged.sum_flagged(
                own_pad, slots, stride, generation, link.timeout_ns, rank, dtype, BLOCK, W
            )
            if here:
                if OP == "avg":
                    total = divided(total, W)
                final = rounded(total, dtype)
                if TWO_SHOT:
                    finals = tl.broadcast_to(final[None, :], (lanes.shape[0], BLOCK))
                    places = _words_of(link, peers, shown + number, generation, WORDS)
                    flagged.store_flagged(places, finals, generation, lanes < W)
                else:
                    offs = tl.cast(number, tl.int64) * BLOCK + columns
                    tl.store(out_ptr + offs, final, mask=offs < count)
    if TWO_SHOT:
        for i in range(program, share, programs):
            numbers = peers * share + i
            there = tl.where(numbers < blocks, numbers, i)  # of a rank without it: one that is
            places = _words_of(link, rank, shown + there, generation, WORDS)
            sums, here = flagged.take_flagged(
                own_pad, places, there // share, generation, link.timeout_ns, rank, dtype, BLOCK
            )
            if here:
                offs = tl.cast(numbers, tl.int64)[:, None] * BLOCK + columns[None, :]
                tl.store(out_ptr + offs, sums, mask=offs < count)
    if signals.end_call(link.signal_ptrs, rank, generation):
        signals.spoil(out_ptr, count)
