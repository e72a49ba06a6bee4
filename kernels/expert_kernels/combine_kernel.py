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
  2. `weigh_kernel`, all programs, in a file of its own: wait for the words of all peers (acquire,
     system scope), after which all slots are there, those of the rank itself by the order of its
     launches; add up.

Why it neither races nor deadlocks: the first launch waits for nobody, the second for the first of
each peer. Every program of it does, so that no call ends before all peers have signalled (rule 2 of
`weft.collectives.device.signals`), and they signal after their last call has ended (rule 1).

The sum is in the order of j and of parts, whenever they come: equal bits in every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from weft.collectives.device import signals
from weft.kernels.device import tiles
from weft.kernels.engine.chips import Tiling
from weft.kernels.expert_kernels.expert_tiles import (
    expert_tile,
    experts_of,
    tiles_of,
    weight_of,
    weight_place,
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


class PushTiles(NamedTuple):
    """One call, as tiles know it.

    Fields: Matrix (R, N_i) of each term, and descriptors of the first two, or None; ExpertWeights
    (E, N_i, H), and descriptors of the first two as matrices, or None; RowTable; the way to the
    peers, this rank, the number of the call; numbers.
    """

    hs: Any
    h_desc: Any
    h2_desc: Any
    weights: Any
    w_desc: Any
    w2_desc: Any
    table: Any
    link: Any
    rank: Any
    generation: Any
    E: Any
    Ns: Any
    H: Any
    parts: Any
    part: Any
    pitch: Any


@triton.jit
def push(call, program, programs, V: tl.constexpr):
    """Every `programs`-th tile from number `program` on: its results, in their slots."""
    TILES: tl.constexpr = V.tiles
    TERMS: tl.constexpr = V.terms
    dtype: tl.constexpr = V.wire
    hs, table, H = call.hs, call.table, call.H
    experts = experts_of(table.ends, call.E, V.lanes, TILES.block_m)
    tiles_n = tiles.cdiv(H, TILES.block_n)
    h_descs, w_descs = (call.h_desc, call.h2_desc), (call.w_desc, call.w2_desc)
    for number in range(program, tiles_of(experts) * tiles_n, programs):
        # Ranks begin with different owners: an expert's rows are sorted by those.
        shift = (call.rank + 1, V.world_size)
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
            N = call.Ns[i]
            desc = w_descs[i] if i < 2 else None
            row, column = weight_place(tile.expert, N, H, start_n, desc, V.w_transposed)
            acc, _ = tiles.accumulate(
                acc,
                None,
                tiles.row_ptrs(hs[i], nearby),
                hs[i].stride_n,
                h_descs[i] if i < 2 else None,
                tile.first,
                weight_of(call.weights[i], tile.expert),
                None,
                desc,
                None,
                column,
                H,
                0,
                row,
                N,
                TILES,
                V.even_k,
                False,
                V.w_transposed,
            )
        ptrs = _slot_rows(
            table,
            call.link,
            call.generation,
            rows,
            inside,
            call.parts,
            call.part,
            call.pitch,
            dtype,
        )
        _push_rows(ptrs, acc, inside, start_n, H)


@triton.jit(do_not_specialize=["E", "parts", "part", "rank"])
def push_kernel(
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
    V: tl.constexpr,  # PushVariant
) -> None:
    """Store each row's results in its slot, and tell every peer. Grid: any.

    Example: rank 0 has ends [1], ranks [1], slots [2], parts 1: what is made of its only row is
    stored in row 2 of rank 1's half.
    """
    generation = signals.begin_call(link.signal_ptrs, rank)
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
    programs = tl.num_programs(0)
    push(call, tl.program_id(0), programs, V)
    if signals.is_last_program(link.signal_ptrs, rank, programs):
        signals.set_generation(link.signal_ptrs, rank, generation)
        signals.signal_peers(link.signal_ptrs, rank, V.world_size, 0, 0, generation)
