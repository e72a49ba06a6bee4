"""The last grouped matmul, and its results to their tokens' ranks, added up there with weights.

Legend: W ranks; rank r has R_r rows, sorted by expert, with a `RowTable`: row p is for slot
slots[p] of rank ranks[p], whose T tokens have k slots each. Its operands are h_i (R, N_i) and
experts' weights w_i (E_r, N_i, H), one pair (term) or several, or h (R, H) alone. An expert may be
on `parts` consecutive ranks, which have parts of its N and make a result each. Sums are fp32.

    o[p] (H)  = sum over i of h_i[p] @ w_i[expert of p], rounded to the dtype in which it travels
    y[t] (H)  = sum over j of weights[t, j] * (sum over parts of o of slot (t, j)), rounded once

The half of this generation on every rank has a row of `pitch` elements for each part of each slot:

    rank 0, which has experts 0, 1                rank 1: T = 2 tokens, k = 2, ids [[1, 3], [0, -1]]
    o | expert 0 | expert 1 |                     slots | (0, 0) | (0, 1) | (1, 0) | (1, 1) |
           |          +--------------------------------------^                 ^     padding: never
           +-------------------------------------------------------------------+     written or read

Protocol
  1. `push_kernel`, all programs: make tiles of o (`expert_tiles`) and store each row in its slot at
     its token's rank. Each takes a ticket; the last one, which sees the stores of all (acquire),
     sets GENERATION and signals the word (0, rank, 0) of every peer: release at system scope.
  2. `weigh_kernel`, all programs: wait for the words of all peers (acquire, system scope), after
     which all slots are there, those of the rank itself by the order of its launches; add up.

Why it neither races nor deadlocks: the first launch waits for nobody, the second for the first of
each peer. Every program of it does, so that no call ends before all peers have signalled (rule 2 of
`weft.collectives.device.signals`), and they signal after their last call has ended (rule 1).

The sum is in the order of j and of parts, whenever they come: equal bits in every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from weft.collectives.device import signals
from weft.kernels.device import tiles
from weft.kernels.engine.chips import Tiling
from weft.kernels.expert_kernels.expert_tiles import (
    expert_tile,
    experts_of,
    place_of,
    tiles_of,
    weight_of,
)


@dataclass(frozen=True)
class PushVariant:
    """What `push_kernel` is compiled for.

    Attributes:
        terms: how many products are added up; 0: h is pushed as it is.
        wire: the dtype in which results travel.
        tiles: of the matmul.
        world_size, lanes: of the group; at least as many as experts.
        even_k: whether all N_i are whole steps of the tiles.
        w_transposed: whether descriptors are of the transposes.
    """

    terms: int
    wire: Any
    tiles: Tiling
    world_size: int
    lanes: int
    even_k: bool
    w_transposed: bool


@triton.jit
def _slot_rows(table, link, generation, numbers, inside, parts, part, pitch, dtype: tl.constexpr):
    """Pointers to the slots of the rows with these numbers, at their owners."""
    owners = tl.load(table.ranks + numbers, mask=inside, other=0)
    slots = tl.load(table.slots + numbers, mask=inside, other=0).to(tl.int64)
    halves = tl.load(link.buffer_ptrs + owners) + (generation & 1) * link.half_bytes
    halves = tl.multiple_of(halves, [16]).to(tl.pointer_type(dtype))
    return halves + (slots * parts + part) * pitch


@triton.jit
def _push_rows(row_ptrs, values, inside, start_n, N):
    """Store rows of a tile, from its column `start_n` on, at row_ptrs.

    In parts: halves of 256 columns still spill 320 bytes on sm_90.
    """
    if values.shape[1] > 64:
        left, right = tiles.halves(values)
        _push_rows(row_ptrs, left, inside, start_n, N)
        _push_rows(row_ptrs, right, inside, start_n + values.shape[1] // 2, N)
    else:
        columns = start_n + tl.arange(0, values.shape[1])
        into = row_ptrs[:, None] + columns[None, :]
        values = tiles.rounded(values, row_ptrs.dtype.element_ty)
        tl.store(into, values, mask=inside[:, None] & (columns < N)[None, :])


@triton.jit(do_not_specialize=["E", "parts", "part", "rank"])
def push_kernel(
    hs,  # Matrix (R, N_i) of each term
    h_desc,  # descriptors of the first two, or None
    h2_desc,
    weights,  # ExpertWeights (E, N_i, H)
    w_desc,  # descriptors of the first two as matrices, or None
    w2_desc,
    table,  # RowTable
    link,
    E,
    Ns,
    H,
    parts,
    part,
    pitch,
    rank,
    V: tl.constexpr,  # PushVariant
) -> None:
    """Store each row's results in its slot, and tell every peer. Grid: any.

    Example: rank 0 has ends [1], ranks [1], slots [2], parts 1: what is made of its only row is
    stored in row 2 of rank 1's half.
    """
    generation = signals.begin_call(link.signal_ptrs, rank)
    program, programs = tl.program_id(0), tl.num_programs(0)
    TILES: tl.constexpr = V.tiles
    TERMS: tl.constexpr = V.terms
    dtype: tl.constexpr = V.wire
    experts = experts_of(table.ends, E, V.lanes, TILES.block_m)
    tiles_n = tiles.cdiv(H, TILES.block_n)
    h_descs, w_descs = (h_desc, h2_desc), (w_desc, w2_desc)
    for number in range(program, tiles_of(experts) * tiles_n, programs):
        # Ranks begin with different owners: an expert's rows are sorted by those.
        shift = (rank + 1, V.world_size)
        tile = expert_tile(experts, number, tiles_n, shift, TILES.block_m, TILES.group_m)
        start_n = tile.tile_n * TILES.block_n
        rows = tile.first + tl.arange(0, TILES.block_m)
        inside = rows < tile.end
        nearby = tl.minimum(rows, tile.end - 1)
        acc = tiles.zeros(TILES.block_m, TILES.block_n)
        if TERMS == 0:
            columns = (start_n + tl.arange(0, TILES.block_n)).to(tl.int64)
            ptrs = tiles.row_ptrs(hs[0], nearby)[:, None] + columns[None, :] * hs[0].stride_n
            acc = tl.load(ptrs, mask=(columns < H)[None, :], other=0.0).to(tl.float32)
        for i in tl.static_range(TERMS):
            desc = w_descs[i] if i < 2 else None
            row, column = place_of(tile.expert, Ns[i], H, start_n, desc, V.w_transposed)
            acc, _ = tiles.accumulate(
                acc,
                None,
                tiles.row_ptrs(hs[i], nearby),
                hs[i].stride_n,
                h_descs[i] if i < 2 else None,
                tile.first,
                weight_of(weights[i], tile.expert),
                None,
                desc,
                None,
                column,
                H,
                0,
                row,
                Ns[i],
                TILES,
                V.even_k,
                False,
                V.w_transposed,
            )
        ptrs = _slot_rows(table, link, generation, rows, inside, parts, part, pitch, dtype)
        _push_rows(ptrs, acc, inside, start_n, H)
    if signals.is_last_program(link.signal_ptrs, rank, programs):
        signals.set_generation(link.signal_ptrs, rank, generation)
        signals.signal_peers(link.signal_ptrs, rank, V.world_size, 0, 0, generation)


@triton.jit(do_not_specialize=["T", "experts", "rank"])
def weigh_kernel(
    y_ptr,  # (T, H)
    ids_ptr,  # (T, TOP_K) int32
    weights,  # Matrix (T, TOP_K), or of None
    link,
    T,
    H,
    pitch,
    experts,
    rank,
    WIRE: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
) -> None:
    """y[t] = sum over j of weights[t, j] * slot (t, j), if ids[t, j] is an expert's. Grid: any.

    Example: ids [[1, -1]], weights [[0.5, nan]], slot (0, 0) of [4, 6]: y is [[2, 3]].
    """
    generation = signals.last_generation(link.signal_ptrs, rank)
    came = signals.wait_for_peers(
        link.signal_ptrs, rank, WORLD_SIZE, 0, 0, generation, link.timeout_ns
    )
    half = signals.half_ptr(link.buffer_ptrs, rank, generation, link.half_bytes, WIRE)
    across = tiles.cdiv(H, BLOCK_H)
    blocks = tl.where(came, tiles.cdiv(T, BLOCK_T) * across, 0)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        tokens = (block // across * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
        columns = block % across * BLOCK_H + tl.arange(0, BLOCK_H)
        acc = tiles.zeros(BLOCK_T, BLOCK_H)
        for j in tl.static_range(TOP_K):
            ids = tl.load(ids_ptr + tokens * TOP_K + j, mask=tokens < T, other=-1)
            used = (ids >= 0) & (ids < experts)
            inside = used[:, None] & (columns < H)[None, :]
            slot = tiles.zeros(BLOCK_T, BLOCK_H)
            for part in tl.static_range(PARTS):
                rows = half + ((tokens * TOP_K + j) * PARTS + part) * pitch
                ptrs = rows[:, None] + columns[None, :]
                slot += tl.load(ptrs, mask=inside, other=0.0).to(tl.float32)
            if weights.ptr is not None:
                ptrs = weights.ptr + tokens * weights.stride_m + j * weights.stride_n
                slot *= tl.load(ptrs, mask=used, other=0.0).to(tl.float32)[:, None]
            acc += slot
        into = y_ptr + tokens[:, None] * H + columns[None, :]
        inside = (tokens < T)[:, None] & (columns < H)[None, :]
        tl.store(into, tiles.rounded(acc, y_ptr.dtype.element_ty), mask=inside)
    if signals.end_call(link.signal_ptrs, rank, generation):
        signals.spoil(y_ptr, tl.cast(T, tl.int64) * H)
