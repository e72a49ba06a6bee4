"""How the kernel of `rms_norm_kernel` is launched, and the symmetric memory that it needs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from weft.collectives import Workspace
from weft.collectives.device.launches import launching, temporary
from weft.collectives.kernels import multimem
from weft.collectives.kernels.collective_launch import alignment, within_budget
from weft.collectives.memory.workspace import check_room, link_of
from weft.collectives.protocols import Fabric, one_shot_us, switch_us, two_shot_us
from weft.kernels.engine.chips import INTERPRETER, Chip, LaunchOptions, chip_of
from weft.kernels.engine.fp8 import FP8
from weft.kernels.norm.flagged_norm_kernel import FlaggedVariant, flagged_rms_norm_kernel
from weft.kernels.norm.rms_norm_kernel import NormVariant, sum_rms_norm_kernel
from weft.kernels.norm.team_rows import Partial

CHANNEL = "norm kernel"  # of the workspace
FLAGGED_CHANNEL = "flagged norm kernel"  # in which nothing but flagged words may be stored


@dataclass(frozen=True)
class RMSNormConfig(LaunchOptions):
    """How the kernel is launched; the same on all ranks.

    Attributes:
        teams: of programs that share rows and add them up; there are as many more to normalize, or
            `NormVariant.spread` times as many.
        part: columns of a program, a power of 2.
        one_shot: whether every rank makes all rows.
        by_switch: whether the NVLink switch adds up, in an order of its own: of two shots, where
            every rank has the residual.
        flagged: whether words carry their flags, by `flagged_norm_kernel`; of one shot only where
            every rank has the residual.
    """

    teams: int
    part: int
    one_shot: bool
    by_switch: bool = False
    flagged: bool = False

    @property
    def channel(self) -> str:
        """Of the workspace."""
        return FLAGGED_CHANNEL if self.flagged else CHANNEL

    def team(self, H: int) -> int:
        """Programs of a team: a power of 2."""
        return int(triton.next_power_of_2(-(-H // self.part)))


# In virtual time on 8 x H100 one shot takes as long as two here.
_ONE_SHOT_BYTES = 256 << 10
# There 8 rows of 8192 take 3.3 and 0.9 us longer with 16 and 32 programs, and 0.7 and 0.1 us longer
# in parts of 512 and 2048.
_PROGRAMS = 64
_PART = 1024  # 8 elements a lane
# In virtual time on 8 x H100, 64 rows of 8192 take 18.7 us with 1, 16.2 with 4 and 16.3 with 8.
_SPREAD = 4
_FLAGGED_PROGRAMS = 64
# There 16 KiB of x take 6.4 us in one shot and 7.1 in two, and 128 and 512 KiB 7.5 and 11.9 in two.
# The bytes say where two shots overtake one (32 KiB), and signals both (1 MiB, half of which is
# taken): reckoned, not run.
_FLAGGED_ONE_SHOT_BYTES = 32 << 10
_FLAGGED_MOST_BYTES = 512 << 10
# Of a row, for a program. There 8 rows of 8192 in bf16 take 7.5 us, and with 2048 8.0.
_FLAGGED_BYTES = 1024


def rms_norm_config(
    rows: int, share: int, H: int, dtype: torch.dtype, world_size: int, chip: Chip
) -> RMSNormConfig:
    """The launch for `rows` rows of H elements, of which each rank keeps `share` or fewer."""
    programs, one_shot_bytes, part = min(_PROGRAMS, chip.cores // 2), _ONE_SHOT_BYTES, _PART
    if chip is INTERPRETER:
        programs, one_shot_bytes, part = 4, 256, max(16, triton.next_power_of_2(H) // 2)
    one_shot = world_size <= 2 or rows * H * dtype.itemsize <= one_shot_bytes
    config = RMSNormConfig(1, part, one_shot, num_warps=4)
    teams = max(1, min(rows if one_shot else share, programs // config.team(H)))
    return replace(config, teams=teams, all_registers=not (chip.is_amd or chip is INTERPRETER))


def quickest_norm(
    rows: int, share: int, H: int, dtype: torch.dtype, world_size: int, chip: Chip, whole: bool
) -> RMSNormConfig:
    """The launch that is predicted to take least, but for the switch; the same on all ranks."""
    nbytes = rows * H * dtype.itemsize
    # By words a program holds its columns for all ranks at once: few enough registers for 8 ranks.
    signals = chip.is_amd or chip is INTERPRETER or not 1 < world_size <= 8
    one_shot = whole and (world_size == 2 or nbytes <= _FLAGGED_ONE_SHOT_BYTES)
    words = by_words(rows, share, H, dtype, one_shot, chip)
    too_wide = 2 * words.team(H) > chip.cores  # for a budget of SMs
    if signals or too_wide or not 0 < nbytes <= _FLAGGED_MOST_BYTES:
        return rms_norm_config(rows, share, H, dtype, world_size, chip)
    return words


def by_words(
    rows: int, share: int, H: int, dtype: torch.dtype, one_shot: bool, chip: Chip
) -> RMSNormConfig:
    """The launch where words carry their flags."""
    programs, part = min(_FLAGGED_PROGRAMS, chip.cores // 2), _FLAGGED_BYTES // dtype.itemsize
    if chip is INTERPRETER:
        programs, part = 4, max(16, triton.next_power_of_2(H) // 2)
    config = RMSNormConfig(1, part, one_shot, flagged=True, num_warps=4)
    teams = max(1, min(rows if one_shot else share, programs // config.team(H)))
    return replace(config, teams=teams, all_registers=not (chip.is_amd or chip is INTERPRETER))


def by_switch(
    rows: int, share: int, H: int, dtype: torch.dtype, world_size: int, chip: Chip, links: Fabric
) -> RMSNormConfig | None:
    """The launch where the switch adds up; None if it cannot, or others are predicted quicker."""
    nbytes = rows * H * dtype.itemsize
    if not links.multicast or dtype not in multimem.DTYPES or H * dtype.itemsize % 16 or not nbytes:
        return None
    if quickest_norm(rows, share, H, dtype, world_size, chip, whole=True).flagged:
        return None
    others = one_shot_us, two_shot_us
    least = min(way(nbytes, links, in_graph=True) for way in others)
    if switch_us("all_reduce", nbytes, links, in_graph=True) >= least:
        return None
    config = rms_norm_config(rows, share, H, dtype, world_size, chip)
    teams = max(1, min(share, config.teams))
    return replace(config, teams=teams, one_shot=False, by_switch=True)


def workspace_bytes(
    rows: int, share: int, H: int, dtype: torch.dtype, world_size: int, config: RMSNormConfig
) -> int:
    """Symmetric memory that a call needs on each rank; arguments as of `rms_norm_config`."""
    made = rows if config.one_shot else share
    if config.flagged:
        row = config.team(H) * config.part * dtype.itemsize // 4  # words
        return 8 * ((world_size * made + rows) * row + 4 * rows * config.team(H))
    partial = 0 if config.one_shot else 2 * rows * config.team(H) * 4  # fp32
    return _partial_at(rows, made, H, dtype, world_size) + partial


def _partial_at(rows: int, made: int, H: int, dtype: torch.dtype, world_size: int) -> int:
    """Bytes into a half, behind the slots and the finished rows."""
    return -(-(world_size * made + rows) * H * dtype.itemsize // 16) * 16


def launch_sum_rms_norm(
    x: torch.Tensor,
    ws: Workspace,
    share: int,
    *,
    weight: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
    whole: bool = False,
    quantizes: bool = False,
    config: RMSNormConfig | None = None,
) -> tuple[torch.Tensor, ...]:
    """Enqueue the sum of all ranks' x, and its normalization.

    Args:
        x: (T, H), fp32, bf16 or fp16, H at most 65536; the same shape and dtype on all ranks.
        ws: with room for `workspace_bytes`, on the channel of `config`.
        share: rows that each rank keeps; of the last ranks fewer, or none.
        weight: (H,), of any floating dtype.
        residual: for this rank's rows, or if `whole` for all, with the dtype of x.
        whole: whether h is made for all rows on every rank.
        quantizes: whether y is in fp8; only if `whole`.

    Returns:
        y (T, H), and h for this rank's rows, or if `whole` for all: new, with the dtype of x. In
        fp8 also the scales (T, 1) of y.
    """
    T, H = x.shape
    first = min(ws.rank * share, T)
    own_rows = min(share, T - first)
    x = x.contiguous()
    kept_rows = T if whole else own_rows
    y = torch.empty_like(x, dtype=FP8 if quantizes else x.dtype)
    scales = [x.new_empty(T, 1, dtype=torch.float32)] if quantizes else []
    if not x.numel():
        return y, x.new_empty(kept_rows, H), *scales
    chip = chip_of(x.device)
    config = config or rms_norm_config(T, share, H, x.dtype, ws.world_size, chip)
    needed = workspace_bytes(T, share, H, x.dtype, ws.world_size, config)
    check_room(ws, needed, "workspace_bytes(rows, share, H, dtype, world_size, config)")
    residual = None if residual is None else residual.contiguous()
    if config.flagged:
        return _launch_flagged(x, ws, share, y, scales, weight, residual, eps, whole, config)
    team = config.team(H)
    sums = x.new_empty(T if config.one_shot else kept_rows, H)
    made, adds = (T, T) if config.one_shot else (share, own_rows)

    def partial() -> torch.Tensor:
        return temporary(torch.empty(adds * team, dtype=torch.float32, device=x.device))

    if config.by_switch and not (whole and (ws.buffer.multicast_ptr or chip is INTERPRETER)):
        raise NotImplementedError(
            "the switch adds up where every rank has all of the residual, in memory that has a "
            "multicast address"
        )
    operands = [t.data_ptr() for t in (x, residual) if t is not None]
    adding = config.teams * team
    spread = _spread(adding, ws.world_size if whole and not config.one_shot else 1)
    launching(sum_rms_norm_kernel, (1 + spread) * adding)(
        y.view(torch.int8) if quantizes else y,
        scales[0] if quantizes else None,
        sums,
        Partial(partial(), partial() if quantizes else None),
        x,
        None if weight is None else weight.contiguous(),
        residual,
        _partial_at(T, made, H, x.dtype, ws.world_size),
        ws.buffer.multicast_ptr if config.by_switch else 0,
        link_of(ws),
        T,
        share,
        H,
        eps,
        ws.rank,
        V=NormVariant(
            world_size=ws.world_size,
            team=team,
            part=config.part,
            align=alignment(x.element_size(), operands, [H]),
            one_shot=config.one_shot,
            whole=whole,
            spread=spread,
            by_switch=config.by_switch,
        ),
        **config.options,
    )
    h = sums[first : first + own_rows] if config.one_shot and not whole else sums
    return y, h, *scales


def _spread(adding: int, most: int) -> int:
    """How many times as many programs normalize as add up: `most`, if the budget of SMs allows."""
    return max(1, min(within_budget((1 + _SPREAD) * adding) // adding - 1, most))


def _launch_flagged(
    x: torch.Tensor,
    ws: Workspace,
    share: int,
    y: torch.Tensor,
    scales: list[torch.Tensor],
    weight: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
    whole: bool,
    config: RMSNormConfig,
) -> tuple[torch.Tensor, ...]:
    """`launch_sum_rms_norm` by flagged words, into y and `scales`."""
    if config.one_shot and not whole and residual is not None:
        raise NotImplementedError(
            "in one shot of flagged words every rank must have all of the residual"
        )
    T, H = x.shape
    team, first = config.team(H), min(ws.rank * share, T)
    sums = x.new_empty(T if whole else min(share, T - first), H)
    adding = config.teams * team
    spread = _spread(adding, 1 if config.one_shot else ws.world_size)
    launching(flagged_rms_norm_kernel, (1 + spread) * adding)(
        y.view(torch.int8) if scales else y,
        scales[0] if scales else None,
        sums,
        x,
        None if weight is None else weight.contiguous(),
        residual,
        link_of(ws),
        T,
        share,
        H,
        eps,
        ws.rank,
        V=FlaggedVariant(
            world_size=ws.world_size,
            team=team,
            part=config.part,
            one_shot=config.one_shot,
            whole=whole,
            spread=spread,
            quantizes=bool(scales),
        ),
        **config.options,
    )
    return y, sums, *scales
