"""The Triton kernel of the two ops of this room: one launch, one or two crossings.

Legend: W ranks, each with its own terms x (T, H), and the residual of its own rows, C at most, or
(WHOLE) of all of them; sums h and results y. See `rms_norm` and `all_reduce_norm`.

    two shots   x[rows of p] --> slot r of p   p: h = slot 0 + slot 1 .. + residual, normalize
                                               y[own rows] --> finished rows of every rank --> y
         WHOLE                                 p: h = slot 0 + slot 1 .. + residual
                                               h[own rows] --> finished rows of every rank, each of
                                               which keeps h and normalizes all rows
    one shot    x, residual --> slot r and residual rows of every rank: each makes all rows of y
         WHOLE  x --> slot r of every rank

One shot sends (W - 1) times the bytes, two shots about twice, but they cross the links twice.

A half of the workspace is W slots of R rows (R = C, in one shot T) and then T rows more: finished
ones, in one shot residuals. In two shots of WHOLE, what the columns of each program and finished
row come to, `Partial`, lies behind them. A row is added up in rank order in fp32, rounded once as
h, and y is made of that, so that all ranks get the same bits either way. In fp8, y is divided by
the scale of its row, the largest magnitude / 448, which its programs find as they find the squares.

Protocol. There are Q teams of S programs that add up, and as many that normalize; in two shots of
WHOLE V.spread times as many, among which the rows of all ranks are dealt. Team t has the i-th row
of each rank, in one shot of all rows, for i % Q == t, and each of its programs a part of the
columns.
  1. Program p < Q S, which adds up: store the columns in slot `rank` of each peer; signal all their
     words (0, rank, p): release at system scope. Wait for the words (0, r, p) of all peers
     (acquire, system scope). Store h, and the sum of its squares; signal the rank's own word
     (0, rank, p): release at device scope. Two shots of WHOLE: store both on every rank, signal
     the words (1, rank, p) of all ranks, its own too: release at system scope.
  2. Program Q S + p, which normalizes: wait for the own words (0, rank, q) of all programs q of
     the team; store y. Two shots: store it among the finished rows of all peers, signal their words
     (1, rank, Q S + p), wait for the words (1, r, Q S + p), and copy the finished rows. Two shots
     of WHOLE: wait for the words (1, r, q) of all ranks r and programs q of the team, all of them
     polled together; store h and y of all rows.
  3. All programs take a ticket; the last one sets GENERATION.

Why it neither races nor deadlocks: a program signals all that it has for peers before it waits, and
waits for the same program of its peers, or for smaller ones of any rank. Calls alternate
halves; rules 1 and 2 of `weft.collectives.device.signals` hold, because each program that adds up
signals every peer after this rank's last call has ended, and waits for every peer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from weft.collectives.device import signals
from weft.collectives.device.device_math import either_ptr, fp8_bits, mask_if, rounded


@dataclass(frozen=True)
class NormVariant:
    """What the kernel is compiled for.

    Attributes:
        world_size: of the group.
        team: programs that share rows, S: a power of 2.
        part: columns of a program.
        align: bytes that divide all addresses of rows, 16 at most.
        one_shot: whether every rank makes all rows.
        whole: whether every rank has the residual of all rows, and keeps all of h.
        spread: programs that normalize for each one that adds up.
    """

    world_size: int
    team: int
    part: int
    align: int
    one_shot: bool
    whole: bool
    spread: int

    @property
    def shows_sums(self) -> bool:
        """Whether finished rows are h, which all ranks normalize."""
        return self.whole and not self.one_shot


class Partial(NamedTuple):
    """What a program's columns of each row come to: (rows, team) fp32.

    Fields: `squares`, the sums of those of h; `largest`, the greatest |h * weight|, or None.
    """

    squares: Any
    largest: Any


class TeamCall(NamedTuple):
    """One call, as a program of it knows it.

    Fields: the way to the peers, this rank, the number of the call; all rows, the rows of a rank
    (the last ones may have fewer), their length; the `first` row of this rank, and how many
    `own_rows` it has; rows of a slot (`sent`), the row after the slots (`rest`), and the rows that
    this rank makes (`made`); the team of the program and how many there are; its columns, and which
    of them are inside.
    """

    link: Any
    rank: Any
    generation: Any
    T: Any
    share: Any
    H: Any
    first: Any
    own_rows: Any
    sent: Any
    rest: Any
    made: Any
    team: Any
    teams: Any
    columns: Any
    inside: Any


@triton.jit(do_not_specialize=["rank"])
def sum_rms_norm_kernel(
    y_ptr,  # (T, H), or its bytes in fp8
    scales_ptr,  # (T,) fp32 of y in fp8, or None
    sums_ptr,  # h of the rows that this rank makes: its own or, in one shot or if WHOLE, all
    partial,  # Partial of the rows that this rank adds up; unused if V.shows_sums
    x_ptr,  # (T, H)
    weight_ptr,  # (H,), or None
    residual_ptr,  # (rows of this rank, or if V.whole all, H), or None
    partial_at,  # bytes into the half, where V.shows_sums
    link,
    T,
    share,
    H,
    eps,
    rank,
    V: tl.constexpr,  # NormVariant
) -> None:
    """All tensors contiguous. Grid: (1 + V.spread) * teams * team.

    Example: 2 ranks, x = [[3 4]] on both, eps 0: h = [[6 8]] on rank 0, none on rank 1;
    y = [[.85 1.13]] on both.
    """
    W: tl.constexpr = V.world_size
    TEAM: tl.constexpr = V.team
    SHOWS: tl.constexpr = V.shows_sums
    program, adding = tl.program_id(0), tl.num_programs(0) // (1 + V.spread)
    generation = signals.begin_call(link.signal_ptrs, rank)
    team, teams = program % adding // TEAM, adding // TEAM
    columns = program % TEAM * V.part + tl.arange(0, V.part)
    first = tl.minimum(rank * share, T)
    own_rows = tl.minimum(share, T - first)
    sent = T if V.one_shot else share
    made = T if V.one_shot else own_rows
    rest = W * sent
    call = TeamCall(
        link, rank, generation, T, share, H, first, own_rows, sent, rest, made,
        team, teams, columns, columns < H,
    )  # fmt: skip
    if program < adding:
        _send_terms(call, x_ptr, residual_ptr, V)
        signals.signal_peers(link.signal_ptrs, rank, W, 0, program, generation)
        arrived = signals.wait_for_peers(
            link.signal_ptrs, rank, W, 0, program, generation, link.timeout_ns
        )
        if arrived:
            _add_up(call, sums_ptr, partial, x_ptr, weight_ptr, residual_ptr, partial_at, V)
        if SHOWS:
            if arrived:
                lanes, ranks = signals.peer_lanes(rank + 1, W)
                words = signals.slot_ptr(link.signal_ptrs, ranks, W, 1, rank, program)
                signals.signal(words, generation, lanes < W)
        elif arrived:
            own_word = signals.slot_ptr(link.signal_ptrs, rank, W, 0, rank, program)
            signals.signal_local(own_word, generation)
    elif SHOWS:
        lanes = tl.arange(0, triton.next_power_of_2(W) * TEAM)
        ranks = lanes // TEAM
        words = signals.slot_ptr(link.signal_ptrs, rank, W, 1, ranks, team * TEAM + lanes % TEAM)
        arrived = signals.wait_for_lanes(
            signals.peer_ptr(link.signal_ptrs, rank, tl.int64),
            words,
            ranks,
            ranks < W,
            rank,
            generation,
            link.timeout_ns,
            "sys",
        )
        if arrived:
            shown = _shown(call, rank, partial_at, scales_ptr, V)
            for i in range(team, share, teams):
                for step in range(program // adding - 1, W, V.spread):
                    row = (rank + step) % W * share + i
                    if row < T:
                        h = _row_ptr(call, rank, rest + row, x_ptr.dtype.element_ty)
                        _normalize(
                            call,
                            y_ptr,
                            scales_ptr,
                            h,
                            shown,
                            row,
                            row,
                            weight_ptr,
                            eps,
                            V,
                            sums_ptr,
                        )
    else:
        begin = team * TEAM
        arrived = signals.wait_for_own(
            link.signal_ptrs, rank, W, 0, rank, begin, begin + TEAM - 1, generation,
            link.timeout_ns, TEAM,
        )  # fmt: skip
        if arrived:
            for i in range(team, made, teams):
                row = i if V.one_shot else first + i
                h = _at(sums_ptr, i, H)
                _normalize(call, y_ptr, scales_ptr, h, partial, i, row, weight_ptr, eps, V)
            if not V.one_shot:
                signals.signal_peers(link.signal_ptrs, rank, W, 1, program, generation)
                arrived = signals.wait_for_peers(
                    link.signal_ptrs, rank, W, 1, program, generation, link.timeout_ns
                )
        if not V.one_shot and arrived:
            _copy_finished(call, y_ptr, V)
    if signals.end_call(link.signal_ptrs, rank, generation):
        signals.spoil(y_ptr, tl.cast(T, tl.int64) * H)
        signals.spoil(sums_ptr, tl.cast(T if V.whole else made, tl.int64) * H)
        if scales_ptr is not None:
            signals.spoil(scales_ptr, T)


@triton.jit
def _send_terms(call, x_ptr, residual_ptr, V: tl.constexpr):
    """Store the terms of this rank, and in one shot its residuals, where they are added up."""
    W: tl.constexpr = V.world_size
    rank, H, columns, inside = call.rank, call.H, call.columns, call.inside
    for i in range(call.team, call.sent, call.teams):
        slot = rank * call.sent + i
        if V.one_shot:
            term = tl.load(_at(x_ptr, i, H) + columns, mask=inside)
            _send(call, term, inside, slot, W)
            if residual_ptr is not None and not V.whole:
                is_own = (i >= call.first) & (i < call.first + call.own_rows)
                own = mask_if(is_own, inside)
                kept = tl.load(_at(residual_ptr, i - call.first, H) + columns, mask=own)
                _send(call, kept, own, call.rest + i, W)
        else:
            for step in range(1, W):
                peer = (rank + step) % W
                row = peer * call.share + i
                there = mask_if(row < call.T, inside)
                term = tl.load(_at(x_ptr, row, H) + columns, mask=there)
                tl.store(_row_ptr(call, peer, slot, term.dtype) + columns, term, mask=there)


@triton.jit
def _add_up(call, sums_ptr, partial, x_ptr, weight_ptr, residual_ptr, partial_at, V: tl.constexpr):
    """Store h, the sums of all ranks' terms in rank order, and what it comes to: `Partial`."""
    W: tl.constexpr = V.world_size
    PART: tl.constexpr = V.part
    ALIGN: tl.constexpr = V.align
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    rank, H, columns, inside = call.rank, call.H, call.columns, call.inside
    for i in range(call.team, call.made, call.teams):
        row = i if V.one_shot else call.first + i
        h = tl.zeros((PART,), tl.float32)
        for r in tl.static_range(W):
            slot = _row_ptr(call, rank, r * call.sent + i, dtype)
            term = tl.multiple_of(either_ptr(rank == r, _at(x_ptr, row, H), slot), ALIGN)
            h += tl.load(term + columns, mask=inside, other=0.0).to(tl.float32)
        if residual_ptr is not None:
            if V.whole:
                kept = _at(residual_ptr, row, H)
            else:
                kept = _at(residual_ptr, row - call.first, H)
                if V.one_shot:
                    own = (row >= call.first) & (row < call.first + call.own_rows)
                    shown = _row_ptr(call, rank, call.rest + row, dtype)
                    kept = tl.multiple_of(either_ptr(own, kept, shown), ALIGN)
            h += tl.load(kept + columns, mask=inside, other=0.0).to(tl.float32)
        total = rounded(h, dtype)
        h = total.to(tl.float32)
        weighted = h
        if partial.largest is not None:
            weighted = tl.abs(_weighted(h, call, weight_ptr))
        squares, part = _added_up(h * h), tl.program_id(0) % V.team
        if V.shows_sums:
            for step in range(1, W + 1):
                peer = (rank + step) % W
                tl.store(_row_ptr(call, peer, call.rest + row, dtype) + columns, total, mask=inside)
                shown_there = _shown(call, peer, partial_at, partial.largest, V)
                _store_partial(shown_there, row * V.team + part, squares, weighted)
        else:
            tl.store(_at(sums_ptr, i, H) + columns, total, mask=inside)
            _store_partial(partial, i * V.team + part, squares, weighted)


@triton.jit
def _store_partial(partial, place, squares, weighted):
    tl.store(partial.squares + place, squares)
    if partial.largest is not None:
        tl.store(partial.largest + place, signals.greatest(weighted))


@triton.jit
def _shown(call, owner, partial_at, quantizes, V: tl.constexpr):
    """The `Partial` of all rows behind the finished rows of `owner`."""
    link = call.link
    half = signals.half_ptr(link.buffer_ptrs, owner, call.generation, link.half_bytes, tl.int8)
    squares = (half + partial_at).to(tl.pointer_type(tl.float32))
    return Partial(squares, None if quantizes is None else squares + call.T * V.team)


@triton.jit
def _weighted(h, call, weight_ptr):
    """h * weight, in fp32."""
    if weight_ptr is not None:
        h *= tl.load(weight_ptr + call.columns, mask=call.inside, other=0.0).to(tl.float32)
    return h


@triton.jit
def _normalize(
    call,
    y_ptr,
    scales_ptr,
    h_ptr,  # of this row
    partial,
    i,  # row of `partial`
    row,  # of y
    weight_ptr,
    eps,
    V: tl.constexpr,
    sums_ptr=None,  # where h is copied to
):
    """Store y of one row; in two shots, unless V.whole, send it to all peers, too."""
    W: tl.constexpr = V.world_size
    TEAM: tl.constexpr = V.team
    H, columns, inside = call.H, call.columns, call.inside
    squares = tl.load(partial.squares + i * TEAM + tl.arange(0, TEAM))
    total = tl.load(h_ptr + columns, mask=inside, other=0.0)
    if sums_ptr is not None:
        tl.store(_at(sums_ptr, row, H) + columns, total, mask=inside)
    inverse = tl.rsqrt(_added_up(squares) / H + eps)
    if scales_ptr is None:
        y = _weighted(total.to(tl.float32) * inverse, call, weight_ptr)
        result = rounded(y, y_ptr.dtype.element_ty)
    else:
        largest = tl.load(partial.largest + i * TEAM + tl.arange(0, TEAM))
        # As `fp8.quantized`: the least divisor is that of the smallest normal number.
        scale = tl.maximum(signals.greatest(largest) * inverse, 1.1754943508222875e-38) / 448.0
        tl.store(scales_ptr + row, scale, mask=tl.program_id(0) % TEAM == 0)
        y = _weighted(total.to(tl.float32), call, weight_ptr) * inverse
        result = fp8_bits(y / scale)
    tl.store(_at(y_ptr, row, H) + columns, result, mask=inside)
    if not V.one_shot and not V.whole:
        _send(call, result, inside, call.rest + row, W)


@triton.jit
def _copy_finished(call, y_ptr, V: tl.constexpr):
    """Bring the rows that peers have finished into y."""
    W: tl.constexpr = V.world_size
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    for i in range(call.team, call.share, call.teams):
        for step in range(1, W):
            row = (call.rank + step) % W * call.share + i
            finished = _row_ptr(call, call.rank, call.rest + row, dtype)
            there = mask_if(row < call.T, call.inside)
            y = tl.load(finished + call.columns, mask=there)
            tl.store(_at(y_ptr, row, call.H) + call.columns, y, mask=there)


@triton.jit
def _send(call, values, mask, row, WORLD_SIZE: tl.constexpr):
    """Store `values` where `mask` in the program's columns of this row of every peer's half."""
    for step in range(1, WORLD_SIZE):
        peer = (call.rank + step) % WORLD_SIZE
        tl.store(_row_ptr(call, peer, row, values.dtype) + call.columns, values, mask=mask)


@triton.jit
def _row_ptr(call, owner, row, dtype: tl.constexpr):
    """Where a row of `owner`'s half begins."""
    link = call.link
    half = signals.half_ptr(link.buffer_ptrs, owner, call.generation, link.half_bytes, dtype)
    return _at(half, row, call.H)


@triton.jit
def _at(ptr, row, H):
    """Where a row of a contiguous matrix begins."""
    return ptr + tl.cast(row, tl.int64) * H


@triton.jit
def _added_up(x):
    """The sum of a vector. Not tl.sum: see `signals.greatest`."""
    return tl.reduce(x, 0, tl.standard._sum_combine)
