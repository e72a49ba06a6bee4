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

    by the switch   x --> own half   p: h = switch's sum of [rows of p] .. + residual
         WHOLE                       h[own rows] --> finished rows of every rank, by the switch

One shot sends (W - 1) times the bytes, two shots about twice, but they cross the links twice. By
the switch (`weft.collectives.device.switch`) two shots send and receive the bytes once, whatever W.

A half of the workspace is W slots of R rows (R = C, in one shot T; by the switch, the terms of all
rows as they lie in x) and then T rows more: finished ones, in one shot residuals. In two shots of
WHOLE, what the columns of each program and finished row come to, `Partial`, lies behind them. A row
is added up in rank order in fp32, rounded once as h, and y is made of that, so that all ranks get
the same bits either way. The switch has an order of its own, and rounds the sum before the residual
is added: it must be asked for. In fp8, y is divided by the scale of its row, the largest magnitude
/ 448, which its programs find as they find the squares.

Protocol. There are Q teams of S programs that add up, and as many that normalize; in two shots of
WHOLE V.spread times as many, among which the rows of all ranks are dealt. Team t has the i-th row
of each rank, in one shot of all rows, for i % Q == t, and each of its programs a part of the
columns.
  1. Program p < Q S, which adds up: store the columns in slot `rank` of each peer, by the switch in
     the own half; signal all their words (0, rank, p): release at system scope. Wait for the words
     (0, r, p) of all peers (acquire, system scope). Store h, and the sum of its squares; signal the
     rank's own word (0, rank, p): release at device scope. Two shots of WHOLE: store both on every
     rank, signal the words (1, rank, p) of all ranks, its own too: release at system scope.
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

import triton
import triton.language as tl

from weft.collectives.device import signals
from weft.kernels.norm import switched_rows, team_rows
from weft.kernels.norm.team_rows import Partial, TeamCall


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
        by_switch: whether the switch adds up; only where `shows_sums`.
    """

    world_size: int
    team: int
    part: int
    align: int
    one_shot: bool
    whole: bool
    spread: int
    by_switch: bool = False

    @property
    def shows_sums(self) -> bool:
        """Whether finished rows are h, which all ranks normalize."""
        return self.whole and not self.one_shot


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
    multicast_ptr,  # int64: address of the data of all ranks, if V.by_switch
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
        if V.by_switch:
            switched_rows.show_terms(call, x_ptr, V)
        else:
            team_rows.send_terms(call, x_ptr, residual_ptr, V)
        signals.signal_peers(link.signal_ptrs, rank, W, 0, program, generation)
        arrived = signals.wait_for_peers(
            link.signal_ptrs, rank, W, 0, program, generation, link.timeout_ns
        )
        if V.by_switch:
            if arrived:
                switched_rows.add_up_by_switch(
                    call, partial, x_ptr, weight_ptr, residual_ptr, multicast_ptr, partial_at, V
                )
        elif arrived:
            team_rows.add_ranks(
                call, sums_ptr, partial, x_ptr, weight_ptr, residual_ptr, partial_at, V
            )
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
            squares = team_rows.shown_ptr(call, rank, partial_at)
            shown = Partial(squares, None if scales_ptr is None else squares + T * TEAM)
            for i in range(team, share, teams):
                for step in range(program // adding - 1, W, V.spread):
                    row = (rank + step) % W * share + i
                    if row < T:
                        h = team_rows.row_ptr(call, rank, rest + row, x_ptr.dtype.element_ty)
                        team_rows.norm_row(
                            call, y_ptr, scales_ptr, h, shown, row, row, weight_ptr, eps, V,
                            sums_ptr,
                        )  # fmt: skip
    else:
        begin = team * TEAM
        arrived = signals.wait_for_own(
            link.signal_ptrs, rank, W, 0, rank, begin, begin + TEAM - 1, generation,
            link.timeout_ns, TEAM,
        )  # fmt: skip
        if arrived:
            for i in range(team, made, teams):
                row = i if V.one_shot else first + i
                h = team_rows.at(sums_ptr, i, H)
                team_rows.norm_row(call, y_ptr, scales_ptr, h, partial, i, row, weight_ptr, eps, V)
            if not V.one_shot:
                signals.signal_peers(link.signal_ptrs, rank, W, 1, program, generation)
                arrived = signals.wait_for_peers(
                    link.signal_ptrs, rank, W, 1, program, generation, link.timeout_ns
                )
        if not V.one_shot and arrived:
            team_rows.copy_finished(call, y_ptr, V)
    if signals.end_call(link.signal_ptrs, rank, generation):
        signals.spoil(y_ptr, tl.cast(T, tl.int64) * H)
        signals.spoil(sums_ptr, tl.cast(T if V.whole else made, tl.int64) * H)
        if scales_ptr is not None:
            signals.spoil(scales_ptr, T)
