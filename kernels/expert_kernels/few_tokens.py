"""Dispatch of few tokens, with the routing, in one launch: the decode path.

Legend: W ranks; rank r holds tokens x_r (T_r, K) with ids (T_r, k), and the experts firsts[r] ..
afters[r] - 1. What comes of it is that of `dispatch_kernel`, and the tables that it takes are made
here. The half of this generation has on every rank, for each rank, `most` rows of tokens, `pitch`
elements apart, and from byte `ids_at` on as many of ids, padded by -1:

    rank 0: x_0 (2, K), ids [[0, 3], [3, -1]]          rank 1, which has experts 2 and 3
      | token 0: to ranks 0 and 1                      tokens | 0 | 1 | of rank 0 | .. | of rank 1
      | token 1: to rank 1 --------------------------------------^
      +-- ids, to all ranks --------------------------> ids   | 0 3 | 3 -1 | ..
                                                       table  expert 3: rows 0 and 1 of rank 0

A token crosses a link once, however many experts of that rank it is for. Quantized, tokens lie
there in e4m3, and behind the ids the scale of each; tiles make the dtype of w of both.

Protocol, by the number of a program
  1. Senders, the first S: of every S-th token, store the ids on all ranks, and the row where it is
     for an expert; signal the words (0, rank, program) of all ranks, its own too: release at system
     scope.
  2. Clerks, the next C: wait for all senders of all ranks (acquire, system scope); count, for every
     C-th expert of the rank, the ids before it and its own, write its part of the table, and signal
     the rank's own word (1, 0, expert): release at device scope. Then, what no tile waits for: how
     many rows of its experts come from each rank, and the load of every C-th expert of all.
  3. The others wait for the words of all experts of the rank, and make tiles of what lies in its
     own half (`dispatch_kernel`).

Why it neither races nor deadlocks: senders wait for nobody, clerks for senders, tiles for clerks;
all of them have smaller numbers. A rank signals after its last call has ended (rule 1 of
`weft.collectives.device.signals`), and at least one clerk waits for everyone (rule 2).

The order in the table is that of ids, whenever they come: equal bits in every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from weft.collectives.device import signals
from weft.kernels.device import tiles
from weft.kernels.device.copies import copy_block, quantize_block
from weft.kernels.device.gathers import scales_ptr
from weft.kernels.device.operands import Rows
from weft.kernels.expert_kernels.dispatch_kernel import (
    DispatchTiles,
    DispatchVariant,
    make_tiles,
    spoil_results,
)
from weft.kernels.expert_kernels.expert_tiles import experts_of, total_of
from weft.kernels.expert_kernels.hand_over import tell_all_ranks, wait_for_all_ranks
from weft.kernels.expert_kernels.pulled_rows import PulledRows


@dataclass(frozen=True)
class Roles:
    """Which programs do what.

    Attributes:
        senders, clerks: how many programs; W * senders words are polled at a time.
        top_k, lanes_k: k, and a power of 2 that is no less.
        block: ids that are looked at at a time.
        copy_n: columns of a row that are sent at a time.
    """

    senders: int
    clerks: int
    top_k: int
    lanes_k: int
    block: int
    copy_n: int


@dataclass(frozen=True)
class FewVariant:
    """What `few_tokens_kernel` is compiled for."""

    dispatch: DispatchVariant
    roles: Roles


class ExpertRanges(NamedTuple):
    """Of each rank: its first expert, and the one after its last."""

    firsts: Any
    afters: Any


class Tallies(NamedTuple):
    """Rows from each rank for each expert (W, E) int32, and all experts' load, int64."""

    counts: Any
    load: Any


@triton.jit
def _ids_of(link, rank, generation, ids_at):
    """Address of the ids that have come to `rank`."""
    half = signals.half_ptr(link.buffer_ptrs, rank, generation, link.half_bytes, tl.int8)
    return (half + ids_at).to(tl.pointer_type(tl.int32))


@triton.jit
def _send_tokens(x, ids_ptr, pull, ranges, T, ids_at, V: tl.constexpr, ROLES: tl.constexpr):
    """A sender: its tokens and their ids, to the ranks that need them."""
    link, rank, generation = pull.link, pull.rank, pull.generation
    wire: tl.constexpr = tl.uint8 if V.quantized else x.ptr.dtype.element_ty
    W: tl.constexpr = V.world_size
    K: tl.constexpr = ROLES.top_k
    COPY_N: tl.constexpr = ROLES.copy_n
    lanes, program = tl.arange(0, ROLES.lanes_k), tl.program_id(0)
    for token in range(program, pull.most, ROLES.senders):
        given = tl.where(token < T, K, 0)
        ids = tl.load(ids_ptr + token * K + lanes, mask=lanes < given, other=-1)
        place = (rank * pull.most + token).to(tl.int64)
        row = x.ptr + tl.cast(token, tl.int64) * x.stride_m
        for step in tl.static_range(W):
            peer = (rank + 1 + step) % W
            shown = _ids_of(link, peer, generation, ids_at) + place * K
            tl.store(shown + lanes, ids, mask=lanes < K)
            first = tiles.element(ranges.firsts, peer, W)
            after = tiles.element(ranges.afters, peer, W)
            goes = signals.greatest(((ids >= first) & (ids < after)).to(tl.int32))
            half = signals.half_ptr(link.buffer_ptrs, peer, generation, link.half_bytes, wire)
            into = half + place * pull.pitch
            if V.quantized:
                scale = scales_ptr(link, peer, generation, pull.numbers_at) + place
                quantize_block(
                    into, scale, row, goes, pull.K, pull.pitch, x.stride_m, x.stride_n, 1, COPY_N
                )
            else:
                copy_block(into, row, goes, pull.K, pull.pitch, x.stride_m, x.stride_n, 1, COPY_N)
    tell_all_ranks(link, rank, program, generation, W)


@triton.jit
def _tabulate(pull, ids_ptr, expert, first, W: tl.constexpr, ROLES: tl.constexpr):
    """Write the part of the table that is the rank's expert number `expert`'s, and announce it."""
    table, link = pull.table, pull.link
    count, lanes = W * pull.most * ROLES.top_k, tl.arange(0, ROLES.block)
    before, mine = 0, 0
    for start in range(0, count, ROLES.block):
        ids = tl.load(ids_ptr + start + lanes, mask=start + lanes < count, other=-1) - first
        before += total_of(((ids >= 0) & (ids < expert)).to(tl.int32))
        mine += total_of((ids == expert).to(tl.int32))
    tl.store(table.ends + expert, before + mine)
    for start in range(0, count, ROLES.block):
        numbers = start + lanes
        ids = tl.load(ids_ptr + numbers, mask=numbers < count, other=-1) - first
        found = (ids == expert).to(tl.int32)
        rows = before + tl.associative_scan(found, 0, tl.standard._sum_combine) - 1
        tokens = numbers // ROLES.top_k
        tl.store(table.ranks + rows, tokens // pull.most, mask=found > 0)
        tl.store(table.rows + rows, tokens % pull.most, mask=found > 0)
        tl.store(table.slots + rows, numbers % (pull.most * ROLES.top_k), mask=found > 0)
        before += total_of(found)
    word = signals.slot_ptr(link.signal_ptrs, pull.rank, W, 1, 0, expert)
    signals.signal_local(word, pull.generation)


@triton.jit
def _count(pull, ids_ptr, tallies, E, ranges, W: tl.constexpr, ROLES: tl.constexpr):
    """A clerk: for its experts, how many rows come from each rank, and the load."""
    clerk, lanes = tl.program_id(0) - ROLES.senders, tl.arange(0, ROLES.block)
    first, each = tiles.element(ranges.firsts, pull.rank, W), pull.most * ROLES.top_k
    for item in range(clerk, W * E, ROLES.clerks):
        source, found = item // E, 0
        for start in range(0, each, ROLES.block):
            numbers = start + lanes
            ids = tl.load(ids_ptr + source * each + numbers, mask=numbers < each, other=-1)
            found += total_of((ids == first + item % E).to(tl.int32))
        tl.store(tallies.counts + item, found)
    for expert in range(clerk, ranges.afters[W - 1], ROLES.clerks):
        found = 0
        for start in range(0, W * each, ROLES.block):
            numbers = start + lanes
            ids = tl.load(ids_ptr + numbers, mask=numbers < W * each, other=-1)
            found += total_of((ids == expert).to(tl.int32))
        tl.store(tallies.load + expert, tl.cast(found, tl.int64))


@triton.jit(do_not_specialize=["T", "R", "E", "most", "ids_at", "rank"])
def few_tokens_kernel(
    out,  # Outputs
    x,  # Matrix (T, K)
    ids_ptr,  # (T, k) int32
    weights,  # ExpertWeights (E, K, N_i)
    w_desc,  # descriptors of the first two as matrices, or None
    w2_desc,
    table,  # RowTable
    tallies,  # Tallies
    link,
    ranges,  # ExpertRanges
    T,
    R,
    E,
    Ns,
    K,
    pitch,
    most,
    ids_at,
    rank,
    V: tl.constexpr,  # FewVariant
) -> None:
    """y_i = activation(rows @ w_i of each row's expert) for all i, and the table of the rows.

    Grid: senders, clerks, and at least one more; the same on all ranks.

    Example: the head of this file. Rank 1 has ends [0, 2], ranks [0, 0], rows [0, 1], slots [1, 2].
    """
    DISPATCH: tl.constexpr = V.dispatch
    ROLES: tl.constexpr = V.roles
    W: tl.constexpr = DISPATCH.world_size
    SENDERS: tl.constexpr = ROLES.senders
    CLERKS: tl.constexpr = ROLES.clerks
    TILES: tl.constexpr = DISPATCH.tiles
    generation = signals.begin_call(link.signal_ptrs, rank)
    program = tl.program_id(0)
    scales_at = ids_at + 4 * W * most * ROLES.top_k
    fetched = Rows(None, None)
    pull = PulledRows(table, 0, 0, link, rank, generation, pitch, scales_at, fetched, K, most)
    call = DispatchTiles(pull, weights, Ns, None, w_desc, w2_desc, out)
    if program < SENDERS:
        _send_tokens(x, ids_ptr, pull, ranges, T, ids_at, DISPATCH, ROLES)
    elif program < SENDERS + CLERKS:
        came = wait_for_all_ranks(link, rank, generation, W, SENDERS)
        shown = _ids_of(link, rank, generation, ids_at)
        first = tiles.element(ranges.firsts, rank, W)
        if came:
            for expert in range(program - SENDERS, E, CLERKS):
                _tabulate(pull, shown, expert, first, W, ROLES)
            _count(pull, shown, tallies, E, ranges, W, ROLES)
    else:
        came = signals.wait_for_own(
            link.signal_ptrs, rank, W, 1, 0, 0, E - 1, generation, link.timeout_ns, DISPATCH.lanes
        )
        experts = experts_of(table.ends, tl.where(came, E, 0), DISPATCH.lanes, TILES.block_m)
        programs = tl.num_programs(0) - SENDERS - CLERKS
        make_tiles(call, experts, program - SENDERS - CLERKS, programs, came, DISPATCH)
    if signals.end_call(link.signal_ptrs, rank, generation):
        spoil_results(call, tl.cast(R, tl.int64), DISPATCH)
