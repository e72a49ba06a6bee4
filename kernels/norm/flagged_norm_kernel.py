"""The two ops of this room without signals, for few rows: every word carries its flag.

Legend: W ranks, each with its own terms x (T, H), and the residual of its own rows, or (WHOLE) of
all; sums h and results y, as of `rms_norm_kernel`. Words and the rules of them: see
`weft.collectives.device.flagged`.

    two shots   x[rows of p] ==> slot r of p      p: h = slot 0 + slot 1 .. + residual
                                                  h, squares ==> shown rows of every rank
    one shot    x ==> slot r of every rank        h = slot 0 + slot 1 .. + residual
                                                  h, squares ==> shown rows of this rank
    both        shown rows, squares --> y of all rows, and h of those that the op keeps

Twice the bytes of `rms_norm_kernel` cross the links (==>), but nobody waits until stores are
acknowledged, and nothing is signalled. In one shot, the terms cross once, with all residuals in
every rank's hands (WHOLE only).

A half of the workspace is W slots of R rows (R = rows of a rank, in one shot T), then T shown rows,
then for each of them and each program of a team four words: the sum of its squares of h, its
largest |h * weight|, and two to fill. Each row has S parts, one of each program, and words for
whole parts, though H may end amid one.

Protocol. There are Q teams of S programs that add up, and `spread` times as many that normalize.
  1. Program p < Q S: store its columns of rows p // S, + Q, .. in the slots. Then load those of
     each row that this rank adds up, until all have the flag of this call; store h and squares.
  2. Program Q S + p: for each row that it is dealt load h and the squares of the row's programs,
     until all have the flag; store y, and h.
  3. All programs take a ticket; the last one sets GENERATION.

Why it neither races nor deadlocks: a program stores all that it has for others before it loads, and
waits for smaller numbers, or the same one, of any rank. No rank ends a call before it has words of
all peers, or of ranks that had them (an owner's h needs all ranks' terms): rule 2 of `signals`.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from weft.collectives.device import flagged, signals
from weft.collectives.device.addresses import Constant
from weft.collectives.device.device_math import fp8_bits, fp8_scale, rounded
from weft.collectives.device.failures import record_timeout
from weft.collectives.device.waits import patience, still_waits
from weft.kernels.norm import team_rows

_THREADS = Constant(flagged.THREADS)


@dataclass(frozen=True)
class FlaggedVariant:
    """What the kernel is compiled for: `world_size`, `team`, `part`, `one_shot`, `whole` and
    `spread` as of `NormVariant`, and whether y is in fp8.
    """

    world_size: int
    team: int
    part: int
    one_shot: bool
    whole: bool
    spread: int
    quantizes: bool


@triton.jit
def _send_terms(call, x_ptr, cleaning, V: tl.constexpr):
    """Store this rank's terms where they are added up, its own ones too."""
    W: tl.constexpr = V.world_size
    lanes, peers = signals.peer_lanes(call.rank + 1, W)
    for i in range(call.team, call.sent, call.teams):
        rows = peers * 0 + i if V.one_shot else peers * call.share + i
        at = team_rows.at(x_ptr, rows, call.H)[:, None] + call.columns[None, :]
        there = tl.where((rows < call.T)[:, None], call.inside[None, :], False)
        terms = tl.load(at, mask=there, other=0.0)
        words = _words(call, peers, call.rank * call.sent + i, x_ptr.dtype.element_ty, V)
        wanted = tl.where(lanes < W, (rows < call.T) | cleaning, False)
        flagged.store_flagged(words, terms, call.generation, wanted)


@triton.jit
def _words(call, owner, row, dtype: tl.constexpr, V: tl.constexpr):
    """The words of the program's columns in a row of `owner`'s half; `owner` may be several."""
    PART: tl.constexpr = V.part * dtype.primitive_bitwidth // 32
    link = call.link
    half = signals.half_ptr(link.buffer_ptrs, owner, call.generation, link.half_bytes, tl.int64)
    part = tl.program_id(0) % V.team
    return half + (tl.cast(row, tl.int64) * V.team + part) * PART


@triton.jit
def _figures(call, owner, row, dtype: tl.constexpr, V: tl.constexpr):
    """Four words for each part of a row: its squares, its largest, and nothing twice."""
    ROW: tl.constexpr = V.team * V.part * dtype.primitive_bitwidth // 32
    link = call.link
    half = signals.half_ptr(link.buffer_ptrs, owner, call.generation, link.half_bytes, tl.int64)
    return half + tl.cast(call.rest + call.T, tl.int64) * ROW + tl.cast(row, tl.int64) * 4 * V.team


@triton.jit
def _add_ranks(call, x_ptr, weight, residual_ptr, V: tl.constexpr):
    """Show h of the rows that this rank makes, but for those whose terms did not come."""
    W: tl.constexpr = V.world_size
    PART: tl.constexpr = V.part
    OWNERS: tl.constexpr = 1 if V.one_shot else W
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    link, rank, generation = call.link, call.rank, call.generation
    own_pad = signals.peer_ptr(link.signal_ptrs, rank, tl.int64)
    stride = tl.cast(call.sent, tl.int64) * (V.team * V.part * dtype.primitive_bitwidth // 32)
    lanes, ranks = signals.peer_lanes(rank, OWNERS)
    owners = ranks * 0 + rank if V.one_shot else ranks
    for i in range(call.team, call.made, call.teams):
        row = i if V.one_shot else call.first + i
        kept = tl.zeros((PART,), tl.float32)
        if residual_ptr is not None:  # on its way while peers are
            at = team_rows.at(residual_ptr, row if V.whole else i, call.H) + call.columns
            kept = tl.load(at, mask=call.inside, other=0.0).to(tl.float32)
        h, here = flagged.sum_flagged(
            own_pad, _words(call, rank, i, dtype, V), stride, generation, link.timeout_ns, rank,
            dtype, PART, W,
        )  # fmt: skip
        if here:
            if residual_ptr is not None:
                h += kept
            total = rounded(h, dtype)
            h = total.to(tl.float32)
            squares = tl.reduce(h * h, 0, tl.standard._sum_combine)
            largest = signals.greatest(tl.abs(h * weight)) if V.quantizes else squares
            figures = tl.where(tl.arange(0, 4) == 0, squares, largest)
            shown = tl.broadcast_to(total[None, :], (lanes.shape[0], PART))
            wanted = lanes < OWNERS
            words = _words(call, owners, call.rest + row, dtype, V)
            flagged.store_flagged(words, shown, generation, wanted)
            words = _figures(call, owners, row, dtype, V) + 4 * (tl.program_id(0) % V.team)
            figures = tl.broadcast_to(figures[None, :], (lanes.shape[0], 4))
            flagged.store_flagged(words, figures, generation, wanted)


@triton.jit
def _load_shown(call, row, source, dtype: tl.constexpr, V: tl.constexpr):
    """h of the program's columns, and the sum of squares and the largest of the whole row.

    False with them if rank `source` has not shown them: recorded.
    """
    TEAM: tl.constexpr = V.team
    PART: tl.constexpr = V.part
    TIMES: tl.constexpr = (_THREADS + 2 * TEAM - 1) // (2 * TEAM)  # each part, for `load_flagged`
    link, generation = call.link, call.generation
    own_pad = signals.peer_ptr(link.signal_ptrs, call.rank, tl.int64)
    shown = _words(call, call.rank, call.rest + row, dtype, V)
    figures_at = _figures(call, call.rank, row, dtype, V)
    figures_at += 4 * (tl.arange(0, TIMES * TEAM) % TEAM)
    left = patience(link.timeout_ns, "gpu")
    began, polls = left - left, 0
    h, figures = tl.zeros((1, PART), dtype), tl.zeros((TIMES * TEAM, 4), tl.float32)
    missing = tl.cast(1, tl.int32)
    while (missing > 0) & (left > 0):
        figures, later = flagged.load_flagged(figures_at, generation, tl.float32, 4)
        h, late = flagged.load_flagged(shown + tl.arange(0, 1), generation, dtype, PART)
        missing = flagged.greatest_of(late.to(tl.int32)) + flagged.greatest_of(later.to(tl.int32))
        if missing > 0:
            began, left, polls = still_waits(
                own_pad, shown, generation, link.timeout_ns, began, left, polls, "gpu"
            )
    if missing > 0:
        record_timeout(own_pad, call.rank, source, generation)
    even, odd = tl.split(tl.reshape(figures, (TIMES, TEAM, 2, 2)))
    squares, _ = tl.split(even)
    largest, _ = tl.split(odd)
    squares = tl.reduce(squares, 1, tl.standard._sum_combine)
    squares = tl.reduce(squares, 0, tl.standard._elementwise_max)  # the same ones
    largest = signals.greatest(tl.reshape(largest, (TIMES * TEAM,)))
    return tl.reshape(h, (PART,)), squares, largest, missing == 0


@triton.jit
def _norm_row(call, y_ptr, scales_ptr, sums_ptr, row, source, weight, eps, dtype: tl.constexpr,
              V: tl.constexpr):  # fmt: skip
    """Store y of one row, and h if this rank keeps it."""
    total, squares, largest, arrived = _load_shown(call, row, source, dtype, V)
    if arrived:
        kept, there = row, call.inside
        if not V.whole:
            kept = row - call.first
            there = tl.where((kept >= 0) & (kept < call.own_rows), there, False)
        tl.store(team_rows.at(sums_ptr, kept, call.H) + call.columns, total, mask=there)
        h = total.to(tl.float32)
        inverse = tl.rsqrt(squares / call.H + eps)
        if V.quantizes:
            # As `team_rows.norm_row`.
            scale = fp8_scale(largest * inverse)
            tl.store(scales_ptr + row, scale, mask=tl.program_id(0) % V.team == 0)
            result = fp8_bits(h * weight * inverse / scale)
        else:
            result = rounded(h * inverse * weight, y_ptr.dtype.element_ty)
        tl.store(team_rows.at(y_ptr, row, call.H) + call.columns, result, mask=call.inside)


@triton.jit(do_not_specialize=["rank"])
def flagged_rms_norm_kernel(
    y_ptr,  # (T, H), or its bytes in fp8
    scales_ptr,  # (T,) fp32 of y in fp8, or None
    sums_ptr,  # h of this rank's rows, or if V.whole of all
    x_ptr,  # (T, H)
    weight_ptr,  # (H,), or None
    residual_ptr,  # (rows of this rank, or if V.whole all, H), or None
    link,
    T,
    share,
    H,
    eps,
    rank,
    V: tl.constexpr,  # FlaggedVariant
) -> None:
    """All tensors contiguous. Grid: (1 + V.spread) * teams * team.

    Example: as of `sum_rms_norm_kernel`.
    """
    W: tl.constexpr = V.world_size
    TEAM: tl.constexpr = V.team
    PART: tl.constexpr = V.part
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    program, adding = tl.program_id(0), tl.num_programs(0) // (1 + V.spread)
    generation = signals.begin_call(link.signal_ptrs, rank)
    team, teams = program % adding // TEAM, adding // TEAM
    columns = program % TEAM * PART + tl.arange(0, V.part)
    first = tl.minimum(rank * share, T)
    own_rows = tl.minimum(share, T - first)
    sent = T if V.one_shot else share
    made = T if V.one_shot else own_rows
    rest = W * sent
    call = team_rows.TeamCall(
        link, rank, generation, T, share, H, first, own_rows, sent, rest, made,
        team, teams, columns, columns < H,
    )  # fmt: skip
    cleaning = flagged.is_cleaning(generation)
    if cleaning:
        ROW: tl.constexpr = TEAM * PART * dtype.primitive_bitwidth // 32
        used = tl.cast(rest + T, tl.int64) * ROW + tl.cast(T, tl.int64) * (4 * TEAM)
        flagged.clean(link, rank, generation, used)
    weight = tl.full((PART,), 1.0, tl.float32)
    if weight_ptr is not None:  # before it waits
        weight = tl.load(weight_ptr + columns, mask=call.inside, other=0.0).to(tl.float32)
    if program < adding:
        _send_terms(call, x_ptr, cleaning, V)
        _add_ranks(call, x_ptr, weight, residual_ptr, V)
    else:
        owners = 1 if V.one_shot else W
        for i in range(team, sent, teams):
            for step in range(program // adding - 1, owners, V.spread):
                source = rank if V.one_shot else (rank + step) % W
                row = i if V.one_shot else source * share + i
                if row < T:
                    _norm_row(call, y_ptr, scales_ptr, sums_ptr, row, source, weight, eps, dtype, V)
    if signals.end_call(link.signal_ptrs, rank, generation):
        signals.spoil(y_ptr, tl.cast(T, tl.int64) * H)
        signals.spoil(sums_ptr, tl.cast(T if V.whole else own_rows, tl.int64) * H)
        if scales_ptr is not None:
            signals.spoil(scales_ptr, T)
