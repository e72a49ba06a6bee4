"""How the kernels of `dispatch_kernel` are launched.

Configurations depend on shapes, dtype and chip alone. Ranks may differ in them: copy programs
announce rows to their own rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from weft.collectives import Workspace
from weft.collectives.device.launches import launching
from weft.collectives.memory.workspace import check_room, link_of
from weft.collectives.prices.hardware import Hardware
from weft.kernels.device import gathers
from weft.kernels.device.operands import NO_SCALES, Rows, Scales, described_rows
from weft.kernels.device.outputs import Outputs
from weft.kernels.engine.chips import INTERPRETER, Chip, Tiling, chip_of
from weft.kernels.engine.epilogues import Activation
from weft.kernels.engine.fp8 import FP8
from weft.kernels.expert_kernels.dispatch_kernel import DispatchVariant, dispatch_kernel
from weft.kernels.expert_kernels.expert_tiles import (
    RowTable,
    aligned_sizes,
    check_table,
    described_experts,
    expert_tiling,
    expert_weights,
    lanes_for,
)

# In virtual time (2 H100, 16 experts each, 8 a token, gate and up, bf16) chunks of 16, 32, 64, 128
# rows take 302, 267, 250, 259 us for 512 tokens of 4096 x 1536 and 494, 433, 403, 405 for 1024; of
# 7168 x 2048 512 tokens take -, 508, 485, 508.
_CHUNK_ROWS = 64


@dataclass(frozen=True)
class DispatchConfig:
    """How the kernels of `dispatch_kernel` are launched.

    Attributes:
        tiling: tiles of the matmul.
        programs: grid of the consumer kernel, copy programs included.
        copy_programs: how many of them fetch rows; 0: rows are read in place at their owners.
        chunk_rows: rows that are announced together, at least.
        copy_m, copy_n: block that a copy moves at a time.
        descriptors: whether weights that allow it are read by tensor descriptor, and with them the
            rows.
    """

    tiling: Tiling
    programs: int
    copy_programs: int
    chunk_rows: int
    copy_m: int
    copy_n: int
    descriptors: bool = False


def dispatch_config(
    rows: int,
    N: int,
    dtype: torch.dtype,
    world_size: int,
    chip: Chip,
    *,
    experts: int = 1,
    aligned: bool = True,
    pair: bool = False,
    keep_sums: bool = False,
) -> DispatchConfig:
    """The launch for `experts` of about `rows` rows each, and N columns of all weights.

    Args:
        aligned: as in `expert_tiling`.
        pair: whether each output is made of two sums.
        keep_sums: whether the activation's arguments are wanted too.
    """
    tiling = expert_tiling(chip, rows, N, dtype, experts, aligned)
    wide = tiling.block_m * tiling.block_n > 32 * 64 or dtype == torch.float32
    if (pair and (wide or not aligned)) or (
        keep_sums and dtype == torch.float32
    ):  # else they spill
        tiling = replace(tiling, block_n=max(16, tiling.block_n // 2))
    if chip is INTERPRETER:
        return DispatchConfig(tiling, chip.programs, 1, 16, 16, 32)
    small = rows > 64 and (tiling.block_m, tiling.num_warps) == (64, 4)
    if not N or (small and _waits_for_links(N, dtype) and chip.descriptors and aligned):
        # Copies of twice the warps keep a link busy, and few tiles follow the last rows.
        tiling = replace(tiling, block_m=128, block_n=128 >> pair, num_warps=8, num_stages=6)
    # As in `all_gather_launch`, for the same reasons, or more: links must be busy first.
    copy_programs = max(1, chip.cores // (16 if world_size == 1 else 8))
    if world_size > 1 and _waits_for_links(N, dtype):
        copy_programs = _copying(chip.cores, N)
    if not pair:
        tiling = _experts_in_few_waves(tiling, chip, chip.cores - copy_programs, experts, rows, N)
    copy_n = 512 * tiling.num_warps // dtype.itemsize
    copy_m = 8  # twice as many spill, as each row has a pointer of its own
    descriptors = chip.descriptors and dtype != torch.float32
    programs = max(chip.programs, copy_programs + 1)
    return DispatchConfig(tiling, programs, copy_programs, _CHUNK_ROWS, copy_m, copy_n, descriptors)


def _experts_in_few_waves(
    tiling: Tiling, chip: Chip, cores: int, experts: int, rows: int, N: int
) -> Tiling:
    """Wide tiles half as wide, where so many cores then make all in less time by a tenth, as fewer
    of them are idle in the last wave.
    """
    down = experts * -(-rows // tiling.block_m)
    wide, half = (-(-down * -(-N // n) // cores) for n in (256, 128))
    if tiling.block_n != 256 or half > 1.8 * wide:
        return tiling
    registers = chip.name == "sm_100"  # as in `tiling_for`
    return replace(tiling, block_n=128, num_stages=6, all_registers=registers)


def _waits_for_links(N: int, dtype: torch.dtype) -> bool:
    """Whether a row's way takes longer than its matmul: of half precision on 8 H100 its 2 K bytes
    take as long as 2 K N flop of N = 1,900, B200 2,100.
    """
    return dtype.itemsize == 2 and N <= 2048


def rows_come_first(
    rows: int, Ns: Sequence[int], K: int, world_size: int, experts: int, chip: Hardware
) -> bool:
    """Whether a launch that brings rows alone, in bf16, and torch's grouped matmul of them are
    quicker: where all tiles are made at once, those of the last rows take as long as all, and hide
    nothing; and all cores may make them in fewer waves than those beside copies.
    """
    N, moved = sum(Ns), experts * rows * K * 2 * (world_size - 1) / world_size
    tiles = experts * -(-rows // 128) * sum(-(-N // 128) for N in Ns)
    tile_us = 2 * 128 * 128 * K / chip.core_flops_per_us("bfloat16")
    link_us, makers = moved / chip.link_rate(world_size), chip.cores - _copying(chip.cores, N)
    apart = link_us + -(-tiles // chip.cores) * tile_us + chip.launch_us
    # In virtual time links are busy for 0.8 of the time, tiles take 1 us more, and begin after 5.
    fused = max(link_us / 0.8 + tile_us, -(-tiles // makers) * (tile_us + 1)) + 5
    return apart < fused


def _copying(cores: int, N: int) -> int:
    """How many cores bring rows of half precision."""
    return max(1, cores // (8 if N > 2048 else 4 if N > 512 else 2))


def numbers_offset(tokens: int, columns: int, dtype: torch.dtype) -> int:
    """Bytes into the half at which the numbers begin, if a rank has at most `tokens` tokens."""
    return tokens * gathers.pitch_of(columns) * dtype.itemsize


def dispatch_bytes(tokens: int, columns: int, dtype: torch.dtype, numbers: int = 0) -> int:
    """Symmetric memory of each rank, for at most `tokens` tokens and `numbers` for each."""
    return numbers_offset(tokens, columns, dtype) + 4 * tokens * numbers


@dataclass(frozen=True)
class Dispatched:
    """What a launch returns; of all, what begins at row table.ends[-1] is undefined.

    Attributes:
        rows: (R, K), contiguous; None if they were read in place.
        numbers: (R,) fp32: of each row's slot; None if there are none.
        ys: the outputs, (R, N_i) each.
        sums: the activation's arguments, one for each weight; empty unless asked for.
    """

    rows: torch.Tensor | None
    numbers: torch.Tensor | None
    ys: list[torch.Tensor]
    sums: list[torch.Tensor]


def launch_dispatch(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    ws: Workspace,
    table: RowTable,
    tokens: Sequence[int],
    *,
    numbers: torch.Tensor | None = None,
    activation: Activation | None = None,
    keep_sums: bool = False,
    rows_each: int = 1,
    quantize: bool = False,
    config: DispatchConfig | None = None,
) -> Dispatched:
    """Enqueue y_i = activation(rows @ w_i[expert of the row]), and the rows themselves.

    Args:
        x: (T, K), this rank's tokens, any strides.
        weights: (E, K, N_i) each, any strides, dtype of x; none: the rows are all that is wanted.
        ws: room for `dispatch_bytes(max(tokens), K, x.dtype, k if numbers are given)`; quantized,
            of FP8 and 1.
        table: of the R rows that come to this rank.
        tokens: T of every rank, the same list on all ranks.
        numbers: (T, k) fp32, for each slot of this rank's tokens; on all ranks or none.
        activation: see `weft.kernels.engine.epilogues`; "swiglu" makes one y of two weights.
        keep_sums: also return the activation's arguments.
        rows_each: about how many an expert gets, by which `config` goes.
        quantize: whether rows travel in fp8, with a scale each, and without numbers. Not without
            copy programs.
        config: default `dispatch_config`; without copy programs, neither rows nor numbers come.
    """
    K, R, W, E = x.shape[1], len(table.rows), ws.world_size, len(table.ends)
    check_table(table, E, x.device)
    pair, Ns = activation == "swiglu", tuple(w.shape[2] for w in weights)
    if config is None:
        config = dispatch_config(
            rows_each,
            sum(Ns),
            x.dtype,
            W,
            chip_of(x.device),
            experts=E,
            aligned=aligned_sizes(K, *Ns),
            pair=pair,
            keep_sums=keep_sums,
        )
    if quantize and (numbers is not None or not config.copy_programs):
        raise ValueError("quantized rows take the place of numbers, and copy programs")
    tiling, k = config.tiling, int(quantize) if numbers is None else numbers.shape[1]
    wire = FP8 if quantize else x.dtype
    needed = dispatch_bytes(max(tokens), K, wire, k)
    check_room(ws, needed, "dispatch_bytes(max(tokens), K, x.dtype, numbers a token)")
    ys = [x.new_empty(R, N) for N in (Ns[:1] if pair else Ns)]
    sums = [x.new_empty(R, N) for N in Ns] if keep_sums else []
    copies = config.copy_programs if weights else config.programs
    rows = x.new_empty(R, K) if copies else None
    fetched = numbers.new_empty(R) if copies and numbers is not None else None
    pitch, numbers_at = gathers.pitch_of(K), numbers_offset(max(tokens), K, wire)
    given = NO_SCALES if numbers is None else Scales(numbers.reshape(-1), 1)
    gathers.publish(
        x,
        ws,
        pitch,
        config.programs,
        config.copy_m,
        config.copy_n,
        given,
        numbers_at,
        max(k, 1),
        quantize,
    )
    describe = config.descriptors and (pair or len(weights) == 1)
    descs, w_transposed = described_experts(weights, tiling, describe)
    row_desc = None
    if rows is not None:
        _, row_desc = described_rows(rows, rows, tiling, descs[0] is not None)
    launching(dispatch_kernel, config.programs)(
        Outputs(
            tuple(ys),
            tuple(sums) if keep_sums else None,
            (None,) * len(weights),
            (NO_SCALES,) * len(weights),
        ),
        Rows(rows, fetched),
        row_desc,
        table,
        tuple(map(expert_weights, weights)),
        *descs,
        link_of(ws),
        R,
        E,
        Ns,
        K,
        pitch,
        numbers_at,
        config.chunk_rows,
        ws.rank,
        V=DispatchVariant(
            weights=len(weights),
            activation=activation,
            tiles=tiling,
            world_size=W,
            lanes=lanes_for(E),
            copies=copies,
            copy_m=config.copy_m,
            copy_n=config.copy_n,
            even_k=K % tiling.block_k == 0,
            w_transposed=w_transposed,
            quantized=quantize,
        ),
        **tiling.options,
    )
    return Dispatched(rows, fetched, ys, sums)
