"""Gradients of attention, tile by tile: what the backward by ring and that by heads share.

With p = exp(scores - lse), the final probabilities:

    dv = p^T @ dout    ds = p * (dout @ v^T - delta)    dq = scale * ds @ k    dk = scale * ds^T @ q
    delta (B, H, n) = sum over D of dout * out, - dlse where lse was used
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from weft.collectives.device import signals
from weft.collectives.device.launches import launching, temporary
from weft.kernels.device import tiles
from weft.kernels.engine.chips import chip_of
from weft.kernels.flash.attention_tiles import (
    LOG2_E,
    Heads,
    contiguous_rows,
    head_ptr,
    heads_of,
    load_columns,
    load_rows,
    row_sum,
    seen_pairs,
)
from weft.kernels.flash.ring_keys import head_keys, over_keys
from weft.kernels.flash.ring_tables import keys_held

if TYPE_CHECKING:
    from weft.kernels.attention.ring import Saved

_INTERPRETED = signals.Constant(signals.INTERPRETED)
_DELTA_TILE = 16384  # elements of a tile of delta: a core has 64 KiB of half precision on the way


class Queries(NamedTuple):
    """For B * H heads of n queries: `q` and `dout` (Heads), `lse` and `delta` (B, H, n) fp32.

    `lse` is times log2(e), and 0 for queries that see nothing, whose scores are masked.
    """

    q: Any
    dout: Any
    lse: Any
    delta: Any
    H: Any
    n: Any


class HeadQueries(NamedTuple):
    """Pointers to one head of each of `Queries`, and the strides of the rows of q and dout."""

    q: Any
    stride_q: Any
    dout: Any
    stride_dout: Any
    lse: Any
    delta: Any


class QueryTile(NamedTuple):
    """Rows of one head: `q` and `dout` (BLOCK_M, block_d), `lse` and `delta` as in Queries."""

    q: Any
    dout: Any
    lse: Any
    delta: Any


class KeyTile(NamedTuple):
    """Rows of one head: `k` and `v` (BLOCK_N, block_d), and the position of the first."""

    k: Any
    v: Any
    position: Any


def given_to_gradients(
    saved: Saved,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Queries]:
    """What both kernels take first: new dq, dk and dv, and Queries, whose numbers are enqueued."""
    q, k, v, out, lse, grad_out, grad_lse = saved
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    rows, grad_rows = heads_of(contiguous_rows(q)), heads_of(contiguous_rows(grad_out))
    scaled_lse, delta = (temporary(torch.empty_like(lse)) for _ in range(2))
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    _launch_numbers(scaled_lse, delta, out, lse, grad_lse, grad_rows)
    return dq, dk, dv, Queries(rows, grad_rows, scaled_lse, delta, q.shape[1], q.shape[2])


@triton.jit
def _numbers_kernel(
    scaled_lse,  # (B, H, n) fp32
    delta,  # the same
    out_ptr,  # (B, H, n, D)
    lse_ptr,  # (B, H, n) fp32
    dlse_ptr,  # (B, H, n) or None
    dout,  # Heads
    B,
    H,
    n,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """`lse` and `delta` of Queries, by tiles of BLOCK rows of a head. Grid: any."""
    chunks = tiles.cdiv(n, BLOCK)
    for unit in range(tl.program_id(0), B * H * chunks, tl.num_programs(0)):
        head, row = unit // chunks, unit % chunks * BLOCK
        first = tl.cast(head, tl.int64) * n
        dout_head = head_ptr(dout, tl.cast(head // H, tl.int64), tl.cast(head % H, tl.int64))
        out_rows = load_rows(out_ptr + first * D, row, n, D, BLOCK, D, BLOCK_D)
        dout_rows = load_rows(dout_head, row, n, dout.stride_m, BLOCK, D, BLOCK_D)
        values = row_sum(out_rows.to(tl.float32) * dout_rows.to(tl.float32))
        rows = row + tl.arange(0, BLOCK)
        if dlse_ptr is not None:
            values -= tl.load(dlse_ptr + first + rows, mask=rows < n, other=0.0)
        tl.store(delta + first + rows, values, mask=rows < n)
        lse = tl.load(lse_ptr + first + rows, mask=rows < n, other=0.0)
        lse = tl.where(lse == float("-inf"), 0.0, lse * LOG2_E)
        tl.store(scaled_lse + first + rows, lse, mask=rows < n)


def _launch_numbers(
    scaled_lse: torch.Tensor,
    delta: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad_lse: torch.Tensor | None,
    dout: Heads,
) -> None:
    """Enqueue both: by all cores, as no gradient can begin before. 32 heads of 4,096 rows took the
    copy programs of a launch 6 ms on an H200, and a kernel with 32 rows a program 20 us.
    """
    B, H, n, D = out.shape
    block_d = max(16, triton.next_power_of_2(D))
    block = max(16, _DELTA_TILE // block_d)
    programs = min(chip_of(out.device).programs, B * H * triton.cdiv(n, block))
    given = scaled_lse, delta, out, lse, grad_lse, dout, B, H, n
    launching(_numbers_kernel, programs)(*given, D=D, BLOCK=block, BLOCK_D=block_d, num_warps=8)


@triton.jit
def head_queries(queries, batch, head, shift):
    """What belongs to one head, from row `shift` on, counted as in `ring_keys.head_keys`."""
    shift = tl.cast(shift, tl.int64)
    q, dout = queries.q, queries.dout
    at = (batch * queries.H + head) * queries.n + shift
    return HeadQueries(
        head_ptr(q, batch, head) + shift * q.stride_m,
        q.stride_m,
        head_ptr(dout, batch, head) + shift * dout.stride_m,
        dout.stride_m,
        queries.lse + at,
        queries.delta + at,
    )


@triton.jit
def load_keys(ring, owner, batch, kv_head, tile, SHAPE: tl.constexpr):
    """The KeyTile of a tile of `owner`; batch and kv_head are int64."""
    BLOCK_N: tl.constexpr = SHAPE.config.dkv_n
    D: tl.constexpr = SHAPE.head_dim
    keys, stop = head_keys(ring, owner, batch, kv_head, 0, SHAPE), tile.row + tile.length
    k = load_rows(keys.k, tile.row, stop, keys.stride, BLOCK_N, D, SHAPE.block_d)
    v = load_rows(keys.v, tile.row, stop, keys.stride, BLOCK_N, D, SHAPE.block_d)
    return KeyTile(k, v, tile.position)


@triton.jit
def add_to_dkv(
    dk,  # (BLOCK_N, block_d) fp32
    dv,
    keys,  # KeyTile
    queries,  # HeadQueries, row 0 at position 0
    within,  # Interval of queries that see some of the keys
    ring,
    SHAPE: tl.constexpr,
):
    """Add what queries contribute to the gradients of a tile of keys.

    One loop with a branch: three loops, each with its addresses in registers, would spill. Where a
    tile has as many keys as wgmma needs rows, but fewer queries, scores are made keys by queries,
    the way dk and dv use them; elsewhere that spills.
    """
    k, v, position = keys
    BLOCK_M: tl.constexpr = SHAPE.config.dkv_m
    BLOCK_N: tl.constexpr = k.shape[0]
    D: tl.constexpr = SHAPE.head_dim
    BLOCK_D: tl.constexpr = SHAPE.block_d
    WARPS: tl.constexpr = SHAPE.config.num_warps
    qk_scale, end = ring.scale * LOG2_E, within.end
    KEYS_FIRST: tl.constexpr = k.dtype != tl.float32 and (BLOCK_N >= 64 or _INTERPRETED)
    for start in range(within.begin, end, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        q = load_rows(queries.q, start, end, queries.stride_q, BLOCK_M, D, BLOCK_D)
        if KEYS_FIRST:
            lse = load_columns(queries.lse, start, end, BLOCK_N, BLOCK_M, WARPS)
            scores = tiles.dot(k, q.T, tiles.zeros(BLOCK_N, BLOCK_M)) * qk_scale
            p = tl.exp2(scores - lse)
        else:
            lse = tl.load(queries.lse + rows, mask=rows < end, other=0.0)
            scores = tiles.dot(q, k.T, tiles.zeros(BLOCK_M, BLOCK_N)) * qk_scale
            p = tl.exp2(scores - lse[:, None])
        dout = load_rows(queries.dout, start, end, queries.stride_dout, BLOCK_M, D, BLOCK_D)
        if KEYS_FIRST:
            delta = load_columns(queries.delta, start, end, BLOCK_N, BLOCK_M, WARPS)
            ds = tiles.dot(v, dout.T, tiles.zeros(BLOCK_N, BLOCK_M)) - delta
        else:
            delta = tl.load(queries.delta + rows, mask=rows < end, other=0.0)
            ds = tiles.dot(dout, v.T, tiles.zeros(BLOCK_M, BLOCK_N)) - delta[:, None]
        if (start < within.full) | (start >= within.full_end):
            if KEYS_FIRST:
                seen = seen_pairs(position, start, end, ring.seen_by, BLOCK_N, BLOCK_M)
            else:
                stop = position + BLOCK_N
                seen = seen_pairs(start, position, stop, ring.sees, BLOCK_M, BLOCK_N)
                seen &= (rows < end)[:, None]
            # Keys of the tile that nobody here sees were not fetched: they may be anything, even
            # NaN, and must not be used.
            p, ds = tl.where(seen, p, 0.0), tl.where(seen, ds, 0.0)
        if KEYS_FIRST:
            dv = tiles.dot(tiles.rounded(p, dout.dtype), dout, dv)
            dk = tiles.dot(tiles.rounded(p * ds, q.dtype), q, dk)
        else:
            dv = tiles.dot(tiles.rounded(p, dout.dtype).T, dout, dv)
            dk = tiles.dot(tiles.rounded(p * ds, q.dtype).T, q, dk)
    return dk, dv


@triton.jit
def spoil_gradients(dq_ptr, dk_ptr, dv_ptr, queries, B, ring, SHAPE: tl.constexpr):
    """Spoil what a launch that timed out returns: see `signals.spoil`."""
    size = tl.cast(B, tl.int64) * SHAPE.head_dim
    signals.spoil(dq_ptr, size * queries.H * queries.n)
    of_keys = size * ring.keys.H_KV * keys_held(ring.table, ring.rank, SHAPE)
    signals.spoil(dk_ptr, of_keys)
    signals.spoil(dv_ptr, of_keys)


@triton.jit
def _add_to_dq(
    dq,  # (BLOCK_M, block_d) fp32
    tile,  # QueryTile
    position,
    keys,
    within,
    ring,
    SHAPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add what keys contribute to dq: see `over_keys`."""
    BLOCK_M: tl.constexpr = tile.q.shape[0]
    D: tl.constexpr = SHAPE.head_dim
    BLOCK_D: tl.constexpr = SHAPE.block_d
    for start in range(within.begin, within.end, BLOCK_N):
        k = load_rows(keys.k, start, within.end, keys.stride, BLOCK_N, D, BLOCK_D)
        v = load_rows(keys.v, start, within.end, keys.stride, BLOCK_N, D, BLOCK_D)
        scores = tiles.dot(tile.q, k.T, tiles.zeros(BLOCK_M, BLOCK_N)) * (ring.scale * LOG2_E)
        p = tl.exp2(scores - tile.lse[:, None])
        if (start < within.full) | (start >= within.full_end):
            seen = seen_pairs(position, start, within.end, ring.sees, BLOCK_M, BLOCK_N)
            p = tl.where(seen, p, 0.0)
        ds = p * (tiles.dot(tile.dout, v.T, tiles.zeros(BLOCK_M, BLOCK_N)) - tile.delta[:, None])
        dq = tiles.dot(tiles.rounded(ds, k.dtype), k, dq)
    return dq


@triton.jit
def sum_dq(
    arrivals,
    queries,  # HeadQueries
    tile,  # TokenTile
    head,  # Head
    ring,
    SHAPE: tl.constexpr,
):
    """A tile of dq, over all keys that its queries see, after the new `arrivals`."""
    D: tl.constexpr = SHAPE.head_dim
    BLOCK_D: tl.constexpr = SHAPE.block_d
    BLOCK_M: tl.constexpr = SHAPE.config.dq_m
    row, stop = tile.row, tile.row + tile.length
    rows = row + tl.arange(0, BLOCK_M)
    q = load_rows(queries.q, row, stop, queries.stride_q, BLOCK_M, D, BLOCK_D)
    dout = load_rows(queries.dout, row, stop, queries.stride_dout, BLOCK_M, D, BLOCK_D)
    lse = tl.load(queries.lse + rows, mask=rows < stop, other=0.0)
    delta = tl.load(queries.delta + rows, mask=rows < stop, other=0.0)
    held, dq = QueryTile(q, dout, lse, delta), tiles.zeros(BLOCK_M, BLOCK_D)
    arrivals, dq = over_keys(
        arrivals, dq, _add_to_dq, held, tile, head, ring, SHAPE, SHAPE.config.dq_n
    )
    return arrivals, dq * ring.scale
