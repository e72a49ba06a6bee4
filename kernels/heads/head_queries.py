"""Queries of attention by heads, backward: how they are published, fetched and read.

Legend as in `ring_keys` and `head_units`. With the queries of a rank's heads go dout, lse and
delta of its own tokens.

    half of s       [k | v]  [q]  [dout]  [lse]  [delta]  of its tokens, all heads: published
    `Fetched` on r  of the tokens of every other rank, the heads of r:
                    [q | dout] x [heads] x [n_s] x PITCH,  [lse | delta] x [heads] x [n_s] fp32
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from weft.kernels.device import tiles
from weft.kernels.device.copies import copy_one_block
from weft.kernels.flash.grad_tiles import HeadQueries
from weft.kernels.flash.ring_call import area_ptr
from weft.kernels.flash.ring_keys import first_chunk, publish_keys, publish_rows
from weft.kernels.flash.ring_tables import base_of, count_rows


class GradAreas(NamedTuple):
    """Where what is published and what peers store begins in a half, in bytes.

    `rows`: of the largest shard of keys; `stagger`: of units of dq, `kv_stagger`: of dk and dv, see
    `head_units`.
    """

    q: Any
    dout: Any
    lse: Any
    delta: Any
    dq: Any
    parts: Any
    rows: Any
    stagger: Any
    kv_stagger: Any


class Fetched(NamedTuple):
    """What belongs to the `count` heads of this rank, from `first` on, of all ranks' tokens.

    `rows` are those of q and dout, `numbers` those of lse and delta.
    """

    rows: Any
    numbers: Any
    first: Any
    count: Any


class GradCall(NamedTuple):
    """One backward, beside its Ring: Queries, Fetched, GradAreas and B."""

    queries: Any
    fetched: Any
    areas: Any
    B: Any


@triton.jit
def publish_all(call, ring, SHAPE: tl.constexpr):
    """Step 1 of the protocol, up to the signal."""
    dtype: tl.constexpr = ring.keys.k.dtype.element_ty
    COPY_M: tl.constexpr = SHAPE.config.copy_m
    publish_keys(ring, SHAPE)
    areas, B, rank = call.areas, call.B, ring.rank
    q, dout, lse, delta, H, n = call.queries
    publish_rows(area_ptr(ring, rank, areas.q, dtype), q, H, B * H, n, SHAPE)
    publish_rows(area_ptr(ring, rank, areas.dout, dtype), dout, H, B * H, n, SHAPE)
    to_lse = area_ptr(ring, rank, areas.lse, tl.float32)
    to_delta = area_ptr(ring, rank, areas.delta, tl.float32)
    chunks = tiles.cdiv(n, COPY_M)
    for unit in range(tl.program_id(0), B * H * chunks, SHAPE.config.copy_programs):
        rows = unit % chunks * COPY_M + tl.arange(0, COPY_M)
        at = tl.cast(unit // chunks, tl.int64) * n + rows
        tl.store(to_lse + at, tl.load(lse + at, mask=rows < n), mask=rows < n)
        tl.store(to_delta + at, tl.load(delta + at, mask=rows < n), mask=rows < n)


@triton.jit
def fetch_queries(call, ring, source, SHAPE: tl.constexpr):
    """This program's share of what belongs to the rank's heads and the tokens of `source`."""
    fetched, areas, B, H = call.fetched, call.areas, call.B, call.queries.H
    COPY_M: tl.constexpr = SHAPE.config.copy_m
    PITCH: tl.constexpr = SHAPE.pitch
    dtype: tl.constexpr = fetched.rows.dtype.element_ty
    n = count_rows(ring.table, source, SHAPE.spans)
    chunks = tiles.cdiv(n, COPY_M)
    to_q, to_lse = _fetched_ptrs(call, ring, source, SHAPE)
    size = tl.cast(B * fetched.count, tl.int64) * n
    q, dout = area_ptr(ring, source, areas.q, dtype), area_ptr(ring, source, areas.dout, dtype)
    lse = area_ptr(ring, source, areas.lse, tl.float32)
    delta = area_ptr(ring, source, areas.delta, tl.float32)
    for batch in range(B):
        first = batch * H + fetched.first
        for unit in range(
            first_chunk(first, chunks, SHAPE), fetched.count * chunks, SHAPE.config.copy_programs
        ):
            head, row = unit // chunks, unit % chunks * COPY_M
            rows = tl.minimum(COPY_M, n - row)
            to = tl.cast(batch * fetched.count + head, tl.int64) * n + row
            at = tl.cast(first + head, tl.int64) * n + row
            copy_one_block(
                to_q + to * PITCH, q + at * PITCH, rows, SHAPE.head_dim, PITCH, PITCH, 1, COPY_M,
                SHAPE.block_d,
            )  # fmt: skip
            copy_one_block(
                to_q + (size + to) * PITCH, dout + at * PITCH, rows, SHAPE.head_dim, PITCH, PITCH,
                1, COPY_M, SHAPE.block_d,
            )  # fmt: skip
            offs = tl.arange(0, COPY_M)
            inside = offs < rows
            tl.store(to_lse + to + offs, tl.load(lse + at + offs, mask=inside), mask=inside)
            to_delta = to_lse + size + to + offs
            tl.store(to_delta, tl.load(delta + at + offs, mask=inside), mask=inside)


@triton.jit
def _fetched_ptrs(call, ring, source, SHAPE: tl.constexpr):
    """Where the rows and the numbers of `source` begin in what is fetched."""
    fetched = call.fetched
    base = base_of(ring.table, source, 1, SHAPE) * 2 * call.B * fetched.count
    return fetched.rows + base * SHAPE.pitch, fetched.numbers + base


@triton.jit
def held_queries(call, ring, source, batch, head, shift, SHAPE: tl.constexpr):
    """What belongs to one of the rank's heads and the tokens of `source`, from row `shift` on.

    The rank's own tokens are read where it published them: with one layout for all sources, fewer
    addresses are kept in registers.
    """
    queries, fetched, areas, B = call
    dtype: tl.constexpr = fetched.rows.dtype.element_ty
    if source == ring.rank:
        at = (batch * queries.H + head) * queries.n + shift
        q = area_ptr(ring, source, areas.q, dtype) + at * SHAPE.pitch
        dout = area_ptr(ring, source, areas.dout, dtype) + at * SHAPE.pitch
        lse, delta = queries.lse + at, queries.delta + at
    else:
        n = tl.cast(count_rows(ring.table, source, SHAPE.spans), tl.int64)
        size = B * fetched.count * n
        at = (batch * fetched.count + head - fetched.first) * n + shift
        q, lse = _fetched_ptrs(call, ring, source, SHAPE)
        q += at * SHAPE.pitch
        lse += at
        dout, delta = q + size * SHAPE.pitch, lse + size
    return HeadQueries(q, SHAPE.pitch, dout, SHAPE.pitch, lse, delta)
