"""The Triton kernel of reduce_scatter_rms_norm_all_gather: one launch, one or two crossings.

Legend: W ranks, each with its own terms x (T, H) and the residual of its own rows, C at most; sums
h and results y. See `rms_norm`.

    two shots   x[rows of p] --> slot r of p   p: h = slot 0 + slot 1 .. + residual, normalize
                                               y[own rows] --> finished rows of every rank --> y
    one shot    x, residual --> slot r and residual rows of every rank: each makes all rows of y

One shot sends (W - 1) times the bytes, two shots about twice, but they cross the links twice.

A half of the workspace is W slots of R rows (R = C, in one shot T) and then T rows more: finished
ones, in one shot residuals. A row is added up in rank order in fp32, rounded once as h, and y is
made of that, so that all ranks get the same bits either way.

Protocol. There are Q teams of S programs, twice. Team t has the i-th row of each rank, in one shot
of all rows, for i % Q == t, and each of its programs a part of the columns.
  1. Program p < Q S, which adds up: store the columns in slot `rank` of each peer; signal all their
     words (0, rank, p): release at system scope. Wait for the words (0, r, p) of all peers
     (acquire, system scope). Store h, and the sum of its squares; signal the rank's own word
     (0, rank, p): release at device scope.
  2. Program Q S + p, which normalizes: wait for the own words (0, rank, q) of all programs q of
     the team; store y. Two shots: store it among the finished rows of all peers, signal their words
     (1, rank, Q S + p), wait for the words (1, r, Q S + p), and copy the finished rows.
  3. All programs take a ticket; the last one sets GENERATION.

Why it neither races nor deadlocks: a program signals all that it has for peers before it waits, and
waits for the same program of its peers, or for smaller ones of its own rank. Calls alternate
halves; rules 1 and 2 of `weft.collectives.device.signals` hold, because each program that adds up
signals every peer after this rank's last call has ended, and waits for every peer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from weft.collectives import Group, Workspace, workspace
from weft.collectives.device import signals
from weft.collectives.device.device_math import either_ptr, mask_if, rounded
from weft.collectives.kernels.kernel_collectives import alignment
from weft.collectives.memory.workspace import check_room, link_of
from weft.collectives.profiled import profiled
from weft.kernels.engine.chips import INTERPRETER, Chip, LaunchOptions, chip_of


@dataclass(frozen=True)
class Config(LaunchOptions):
    """How the kernel is launched; the same on all ranks.

    Attributes:
        teams: of programs that share rows; there are as many more to normalize.
        part: columns of a program, a power of 2.
        one_shot: whether every rank makes all rows.
    """

    teams: int
    part: int
    one_shot: bool

    def team(self, H: int) -> int:
        """Programs of a team: a power of 2."""
        return int(triton.next_power_of_2(-(-H // self.part)))


# In virtual time on 8 x H100 one shot takes as long as two here.
_ONE_SHOT_BYTES = 256 << 10
_PROGRAMS = 64
_PART = 1024  # 8 elements a lane


def config_for(
    rows: int, share: int, H: int, dtype: torch.dtype, world_size: int, chip: Chip
) -> Config:
    """The launch for `rows` rows of H elements, of which each rank keeps `share` or fewer."""
    programs, one_shot_bytes, part = min(_PROGRAMS, chip.cores // 2), _ONE_SHOT_BYTES, _PART
    if chip is INTERPRETER:
        programs, one_shot_bytes, part = 4, 256, max(16, triton.next_power_of_2(H) // 2)
    one_shot = world_size <= 2 or rows * H * dtype.itemsize <= one_shot_bytes
    config = Config(1, part, one_shot, num_warps=4)
    teams = max(1, min(rows if one_shot else share, programs // config.team(H)))
    return replace(config, teams=teams, all_registers=not (chip.is_amd or chip is INTERPRETER))


def workspace_bytes(
    rows: int, share: int, H: int, dtype: torch.dtype, world_size: int, config: Config
) -> int:
    """Symmetric memory that a call needs on each rank; arguments as of `config_for`."""
    made = rows if config.one_shot else share
    return (world_size * made + rows) * H * dtype.itemsize


@triton.jit
def _at(ptr, row, H):
    """Where a row of a contiguous matrix begins."""
    return ptr + tl.cast(row, tl.int64) * H


@triton.jit
def _row_ptr(link, owner, row, H, generation, dtype: tl.constexpr):
    """Where a row of `owner`'s half begins."""
    half = signals.half_ptr(link.buffer_ptrs, owner, generation, link.half_bytes, dtype)
    return _at(half, row, H)


@triton.jit
def _send(values, columns, mask, row, link, rank, H, generation, WORLD_SIZE: tl.constexpr):
    """Store `values` where `mask` in these columns of this row of every peer's half."""
    for step in range(1, WORLD_SIZE):
        peer = (rank + step) % WORLD_SIZE
        into = _row_ptr(link, peer, row, H, generation, values.dtype)
        tl.store(into + columns, values, mask=mask)


@triton.jit
def _added_up(x):
    """The sum of a vector. Not tl.sum: see `signals.greatest`."""
    return tl.reduce(x, 0, tl.standard._sum_combine)


@triton.jit(do_not_specialize=["rank"])
def _sum_rms_norm_kernel(
    y_ptr,  # (T, H)
    sums_ptr,  # h of the rows that this rank makes: its own or, in one shot, all
    squares_ptr,  # (these rows, TEAM) fp32
    x_ptr,  # (T, H)
    weight_ptr,  # (H,), or None
    residual_ptr,  # (rows of this rank, H), or None
    link,
    T,
    share,  # rows that a rank keeps; the last ones may have fewer
    H,
    eps,
    rank,
    WORLD_SIZE: tl.constexpr,
    TEAM: tl.constexpr,
    PART: tl.constexpr,  # columns of a program
    ALIGN: tl.constexpr,  # bytes that divide all addresses of rows, 16 at most
    ONE_SHOT: tl.constexpr,
) -> None:
    """All tensors contiguous. Grid: 2 * teams * TEAM.

    Example: 2 ranks, x = [[3 4]] on both, eps 0: h = [[6 8]] on rank 0, none on rank 1;
    y = [[.85 1.13]] on both.
    """
    program, adding = tl.program_id(0), tl.num_programs(0) // 2
    generation = signals.begin_call(link.signal_ptrs, rank)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    team, teams = program % adding // TEAM, adding // TEAM
    columns = program % TEAM * PART + tl.arange(0, PART)
    inside = columns < H
    first = tl.minimum(rank * share, T)
    own_rows = tl.minimum(share, T - first)
    sent = T if ONE_SHOT else share  # rows of a slot
    made = T if ONE_SHOT else own_rows
    rest = WORLD_SIZE * sent  # the row after the slots
    if program < adding:
        for i in range(team, sent, teams):
            slot = rank * sent + i
            if ONE_SHOT:
                term = tl.load(_at(x_ptr, i, H) + columns, mask=inside)
                _send(term, columns, inside, slot, link, rank, H, generation, WORLD_SIZE)
                if residual_ptr is not None:
                    own = mask_if((i >= first) & (i < first + own_rows), inside)
                    kept = tl.load(_at(residual_ptr, i - first, H) + columns, mask=own)
                    _send(kept, columns, own, rest + i, link, rank, H, generation, WORLD_SIZE)
            else:
                for step in range(1, WORLD_SIZE):
                    peer = (rank + step) % WORLD_SIZE
                    there = mask_if(peer * share + i < T, inside)
                    term = tl.load(_at(x_ptr, peer * share + i, H) + columns, mask=there)
                    into = _row_ptr(link, peer, slot, H, generation, dtype)
                    tl.store(into + columns, term, mask=there)
        signals.signal_peers(link.signal_ptrs, rank, WORLD_SIZE, 0, program, generation)
        arrived = signals.wait_for_peers(
            link.signal_ptrs, rank, WORLD_SIZE, 0, program, generation, link.timeout_ns
        )
        if arrived:
            for i in range(team, made, teams):
                row = i if ONE_SHOT else first + i
                h = tl.zeros((PART,), tl.float32)
                for r in tl.static_range(WORLD_SIZE):
                    slot = _row_ptr(link, rank, r * sent + i, H, generation, dtype)
                    term = tl.multiple_of(either_ptr(rank == r, _at(x_ptr, row, H), slot), ALIGN)
                    h += tl.load(term + columns, mask=inside, other=0.0).to(tl.float32)
                if residual_ptr is not None:
                    kept = _at(residual_ptr, row - first, H)
                    if ONE_SHOT:
                        own = (row >= first) & (row < first + own_rows)
                        shown = _row_ptr(link, rank, rest + row, H, generation, dtype)
                        kept = tl.multiple_of(either_ptr(own, kept, shown), ALIGN)
                    h += tl.load(kept + columns, mask=inside, other=0.0).to(tl.float32)
                total = rounded(h, dtype)
                tl.store(_at(sums_ptr, i, H) + columns, total, mask=inside)
                h = total.to(tl.float32)
                tl.store(squares_ptr + i * TEAM + program % TEAM, _added_up(h * h))
            own_word = signals.slot_ptr(link.signal_ptrs, rank, WORLD_SIZE, 0, rank, program)
            signals.signal_local(own_word, generation)
    else:
        arrived = signals.wait_for_own(
            link.signal_ptrs, rank, WORLD_SIZE, 0, rank, team * TEAM, team * TEAM + TEAM - 1,
            generation, link.timeout_ns, TEAM,
        )  # fmt: skip
        if arrived:
            for i in range(team, made, teams):
                row = i if ONE_SHOT else first + i
                squares = tl.load(squares_ptr + i * TEAM + tl.arange(0, TEAM))
                y = tl.load(_at(sums_ptr, i, H) + columns, mask=inside, other=0.0).to(tl.float32)
                y *= tl.rsqrt(_added_up(squares) / H + eps)
                if weight_ptr is not None:
                    y *= tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
                result = rounded(y, dtype)
                tl.store(_at(y_ptr, row, H) + columns, result, mask=inside)
                if not ONE_SHOT:
                    _send(
                        result, columns, inside, rest + row, link, rank, H, generation, WORLD_SIZE
                    )
            if not ONE_SHOT:
                signals.signal_peers(link.signal_ptrs, rank, WORLD_SIZE, 1, program, generation)
                arrived = signals.wait_for_peers(
                    link.signal_ptrs, rank, WORLD_SIZE, 1, program, generation, link.timeout_ns
                )
        if not ONE_SHOT and arrived:
            for i in range(team, share, teams):
                for step in range(1, WORLD_SIZE):
                    row = (rank + step) % WORLD_SIZE * share + i
                    finished = _row_ptr(link, rank, rest + row, H, generation, dtype)
                    there = mask_if(row < T, inside)
                    y = tl.load(finished + columns, mask=there)
                    tl.store(_at(y_ptr, row, H) + columns, y, mask=there)
    if signals.end_call(link.signal_ptrs, rank, generation):
        signals.spoil(y_ptr, tl.cast(T, tl.int64) * H)
        signals.spoil(sums_ptr, tl.cast(made, tl.int64) * H)


def workspace_for(x: torch.Tensor, share: int, group: Group) -> Workspace:
    """The group's workspace with room for the sums of x (T, H)."""
    T, H = x.shape
    config = config_for(T, share, H, x.dtype, group.world_size, chip_of(x.device))
    nbytes = workspace_bytes(T, share, H, x.dtype, group.world_size, config)
    return workspace(group, nbytes, channel="norm kernel", device=x.device)


@profiled("reduce_scatter_rms_norm_all_gather")
def launch_sum_rms_norm(
    x: torch.Tensor,
    ws: Workspace,
    share: int,
    *,
    weight: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Enqueue the sum of all ranks' x, and its normalization.

    Args:
        x: (T, H), fp32, bf16 or fp16, H at most 65536; the same shape and dtype on all ranks.
        ws: `workspace_for` x.
        share: rows that each rank keeps; of the last ranks fewer, or none.
        weight: (H,), of any floating dtype.
        residual: for this rank's rows, with the dtype of x.

    Returns:
        y (T, H), and h for this rank's rows: new, with the dtype of x.
    """
    T, H = x.shape
    first = min(ws.rank * share, T)
    own_rows = min(share, T - first)
    x = x.contiguous()
    y = torch.empty_like(x)
    if not x.numel():
        return y, x.new_empty(own_rows, H)
    config = config or config_for(T, share, H, x.dtype, ws.world_size, chip_of(x.device))
    needed = workspace_bytes(T, share, H, x.dtype, ws.world_size, config)
    check_room(ws, needed, "workspace_bytes(rows, share, H, dtype, world_size, config)")
    residual = None if residual is None else residual.contiguous()
    team = config.team(H)
    sums = x.new_empty(T if config.one_shot else own_rows, H)
    _sum_rms_norm_kernel[(2 * config.teams * team,)](
        y,
        sums,
        torch.empty(len(sums) * team, dtype=torch.float32, device=x.device),
        x,
        None if weight is None else weight.contiguous(),
        residual,
        link_of(ws),
        T,
        share,
        H,
        eps,
        ws.rank,
        WORLD_SIZE=ws.world_size,
        TEAM=team,
        PART=config.part,
        ALIGN=alignment(
            x.element_size(), [t.data_ptr() for t in (x, residual) if t is not None], [H]
        ),
        ONE_SHOT=config.one_shot,
        **config.options,
    )
    return y, sums[first : first + own_rows] if config.one_shot else sums
