"""The rows of `rms_norm_kernel`: sent, added up, normalized and copied by the programs of a team.

Who waits for whom, and why nothing races, is told there; here nobody signals or waits. V is the
kernel's `NormVariant`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from weft.collectives.device import signals
from weft.collectives.device.device_math import either_ptr, fp8_bits, fp8_scale, mask_if, rounded


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


@triton.jit
def send_terms(call, x_ptr, residual_ptr, V: tl.constexpr):
    """Store the terms of this rank, and in one shot its residuals, where they are added up."""
    W: tl.constexpr = V.world_size
    rank, H, columns, inside = call.rank, call.H, call.columns, call.inside
    for i in range(call.team, call.sent, call.teams):
        slot = rank * call.sent + i
        if V.one_shot:
            term = tl.load(at(x_ptr, i, H) + columns, mask=inside)
            _send_row(call, term, inside, slot, W)
            if residual_ptr is not None and not V.whole:
                is_own = (i >= call.first) & (i < call.first + call.own_rows)
                own = mask_if(is_own, inside)
                kept = tl.load(at(residual_ptr, i - call.first, H) + columns, mask=own)
                _send_row(call, kept, own, call.rest + i, W)
        else:
            for step in range(1, W):
                peer = (rank + step) % W
                row = peer * call.share + i
                there = mask_if(row < call.T, inside)
                term = tl.load(at(x_ptr, row, H) + columns, mask=there)
                tl.store(row_ptr(call, peer, slot, term.dtype) + columns, term, mask=there)


@triton.jit
def add_ranks(
    call, sums_ptr, partial, x_ptr, weight_ptr, residual_ptr, partial_at, V: tl.constexpr
):
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
            slot = row_ptr(call, rank, r * call.sent + i, dtype)
            term = tl.multiple_of(either_ptr(rank == r, at(x_ptr, row, H), slot), ALIGN)
            h += tl.load(term + columns, mask=inside, other=0.0).to(tl.float32)
        if residual_ptr is not None:
            if V.whole:
                kept = at(residual_ptr, row, H)
            else:
                kept = at(residual_ptr, row - call.first, H)
                if V.one_shot:
                    own = (row >= call.first) & (row < call.first + call.own_rows)
                    shown = row_ptr(call, rank, call.rest + row, dtype)
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
                tl.store(row_ptr(call, peer, call.rest + row, dtype) + columns, total, mask=inside)
                shown = shown_ptr(call, peer, partial_at) + row * V.team + part
                tl.store(shown, squares)
                if partial.largest is not None:
                    tl.store(shown + call.T * V.team, signals.greatest(weighted))
        else:
            tl.store(at(sums_ptr, i, H) + columns, total, mask=inside)
            tl.store(partial.squares + i * V.team + part, squares)
            if partial.largest is not None:
                tl.store(partial.largest + i * V.team + part, signals.greatest(weighted))


@triton.jit
def shown_ptr(call, owner, partial_at):
    """Where the `Partial` of all rows lies, behind the finished rows of `owner`: squares, then the
    largest.
    """
    link = call.link
    half = signals.half_ptr(link.buffer_ptrs, owner, call.generation, link.half_bytes, tl.int8)
    return (half + partial_at).to(tl.pointer_type(tl.float32))


@triton.jit
def _weighted(h, call, weight_ptr):
    """h * weight, in fp32."""
    if weight_ptr is not None:
        h *= tl.load(weight_ptr + call.columns, mask=call.inside, other=0.0).to(tl.float32)
    return h


@triton.jit
def norm_row(
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
        tl.store(at(sums_ptr, row, H) + columns, total, mask=inside)
    inverse = tl.rsqrt(_added_up(squares) / H + eps)
    if scales_ptr is None:
        y = _weighted(total.to(tl.float32) * inverse, call, weight_ptr)
        result = rounded(y, y_ptr.dtype.element_ty)
    else:
        largest = tl.load(partial.largest + i * TEAM + tl.arange(0, TEAM))
        scale = fp8_scale(signals.greatest(largest) * inverse)
        tl.store(scales_ptr + row, scale, mask=tl.program_id(0) % TEAM == 0)
        y = _weighted(total.to(tl.float32), call, weight_ptr) * inverse
        result = fp8_bits(y / scale)
    tl.store(at(y_ptr, row, H) + columns, result, mask=inside)
    if not V.one_shot and not V.whole:
        _send_row(call, result, inside, call.rest + row, W)


@triton.jit
def copy_finished(call, y_ptr, V: tl.constexpr):
    """Bring the rows that peers have finished into y."""
    W: tl.constexpr = V.world_size
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    for i in range(call.team, call.share, call.teams):
        for step in range(1, W):
            row = (call.rank + step) % W * call.share + i
            finished = row_ptr(call, call.rank, call.rest + row, dtype)
            there = mask_if(row < call.T, call.inside)
            y = tl.load(finished + call.columns, mask=there)
            tl.store(at(y_ptr, row, call.H) + call.columns, y, mask=there)


@triton.jit
def _send_row(call, values, mask, row, WORLD_SIZE: tl.constexpr):
    """Store `values` where `mask` in the program's columns of this row of every peer's half."""
    for step in range(1, WORLD_SIZE):
        peer = (call.rank + step) % WORLD_SIZE
        tl.store(row_ptr(call, peer, row, values.dtype) + call.columns, values, mask=mask)


@triton.jit
def row_ptr(call, owner, row, dtype: tl.constexpr):
    """Where a row of `owner`'s half begins."""
    link = call.link
    half = signals.half_ptr(link.buffer_ptrs, owner, call.generation, link.half_bytes, dtype)
    return at(half, row, call.H)


@triton.jit
def at(ptr, row, H):
    """Where a row of a contiguous matrix begins."""
    return ptr + tl.cast(row, tl.int64) * H


@triton.jit
def _added_up(x):
    """The sum of a vector. Not tl.sum: see `signals.greatest`."""
    return tl.reduce(x, 0, tl.standard._sum_combine)
