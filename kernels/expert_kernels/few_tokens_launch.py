"""How the kernel of `few_tokens` is launched: a grid that is the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import triton

from weft.collectives import Workspace
from weft.collectives.device.launches import launching
from weft.collectives.memory.workspace import check_room, link_of
from weft.kernels.device import gathers
from weft.kernels.device.operands import NO_SCALES, matrix
from weft.kernels.device.outputs import Outputs
from weft.kernels.engine.chips import INTERPRETER, Chip, Tiling, chip_of
from weft.kernels.engine.epilogues import Activation
from weft.kernels.engine.fp8 import FP8
from weft.kernels.expert_kernels.dispatch_kernel import DispatchVariant
from weft.kernels.expert_kernels.dispatch_launch import dispatch_config
from weft.kernels.expert_kernels.expert_tiles import (
    RowTable,
    aligned_sizes,
    described_experts,
    expert_weights,
    lanes_for,
)
from weft.kernels.expert_kernels.few_tokens import (
    ExpertRanges,
    FewVariant,
    Roles,
    Tallies,
    few_tokens_kernel,
)


@dataclass(frozen=True)
class FewConfig:
    """How the kernel of `few_tokens` is launched.

    Attributes:
        tiling: tiles of the matmul.
        programs: the grid, that of all ranks.
        roles: of the programs; senders are the same on all ranks.
        descriptors: whether weights that allow it are read by tensor descriptor.
    """

    tiling: Tiling
    programs: int
    roles: Roles
    descriptors: bool = False


def few_config(
    rows: int,
    N: int,
    dtype: torch.dtype,
    tokens: int,
    top_k: int,
    world_size: int,
    chip: Chip,
    *,
    experts: int = 1,
    aligned: bool = True,
    pair: bool = False,
    keep_sums: bool = False,
    quantize: bool = False,
) -> FewConfig:
    """The launch for at most `tokens` tokens a rank of `top_k` experts; else as `dispatch_config`.

    Beside the link, an eighth of the cores keeps up; the memory of weights wants the others.
    """
    like = dispatch_config(
        rows,
        N,
        dtype,
        world_size,
        chip,
        experts=experts,
        aligned=aligned,
        pair=pair,
        keep_sums=keep_sums,
    )
    tiling = like.tiling
    if chip is not INTERPRETER and dtype == torch.float32 and not aligned:  # else they spill
        tiling = replace(tiling, block_n=min(tiling.block_n, 16))
    if chip is not INTERPRETER and dtype == torch.float32 and quantize:  # likewise
        tiling = replace(tiling, block_m=min(tiling.block_m, 64), num_warps=8)
    programs = max(3, chip.programs)
    # In virtual time (2 H100, 64 tokens x 4096 of 8 of 32 experts): 8, 16, 32 senders take 103, 97,
    # 105 us; 4, 8, 16 clerks 98, 97, 107. A clerk polls a word of each sender of each rank at once,
    # 256 at most, two for each of 128 threads: less than an eighth of 132 from 17 ranks on.
    senders = max(1, min(tokens, programs // 8, 256 // world_size))
    ids = triton.next_power_of_2(max(1, world_size * tokens * top_k))
    roles = Roles(
        senders=senders,
        clerks=max(1, programs // 16),
        top_k=top_k,
        lanes_k=triton.next_power_of_2(top_k),
        block=8 if chip is INTERPRETER else min(ids, 1024),
        copy_n=16 if chip is INTERPRETER else 512 * tiling.num_warps // dtype.itemsize,
    )
    return FewConfig(tiling, programs, roles, like.descriptors)


def few_bytes(
    tokens: int, top_k: int, columns: int, wire: torch.dtype, world_size: int
) -> tuple[int, int]:
    """Symmetric memory of each rank, and where in it ids begin, for at most `tokens` a rank, which
    travel in `wire`, if it is fp8 with scales.
    """
    ids_at = -(-world_size * tokens * gathers.pitch_of(columns) * wire.itemsize // 16) * 16
    return ids_at + 4 * world_size * tokens * (top_k + int(wire == FP8)), ids_at


@dataclass(frozen=True)
class FewDispatched:
    """What a launch returns; of all, what begins at row table.ends[-1] is undefined.

    Attributes:
        ys, sums: as of `Dispatched`.
        table: of the rows that have come.
        counts: (W, E) int32: how many come from each rank for each expert.
        load: (experts of all ranks,) int64: how many assignments each of them got.
    """

    ys: list[torch.Tensor]
    sums: list[torch.Tensor]
    table: RowTable
    counts: torch.Tensor
    load: torch.Tensor


def launch_few_tokens(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    weights: Sequence[torch.Tensor],
    ws: Workspace,
    tokens: Sequence[int],
    experts: Sequence[int],
    *,
    activation: Activation | None = None,
    keep_sums: bool = False,
    tensor_parallel_size: int = 1,
    quantize: bool = False,
    config: FewConfig | None = None,
) -> FewDispatched:
    """Enqueue y_i = activation(rows @ w_i[expert of the row]) of ids that only their rank knows.

    Args:
        x: (T, K), this rank's tokens, any strides.
        topk_ids: (T, k) int32, contiguous.
        weights: (E, K, N_i) each, at least one, any strides, dtype of x.
        ws: room for `few_bytes(max(tokens), k, K, x.dtype, W)`; quantized, of FP8.
        tokens, experts: how many every rank has; the same lists on all ranks.
        activation, keep_sums, tensor_parallel_size: as in `launch_dispatch`.
        quantize: whether rows travel in fp8, with a scale each.
        config: default `few_config`.
    """
    (T, K), k, W, E = x.shape, topk_ids.shape[1], ws.world_size, experts[ws.rank]
    pair, Ns, most = activation == "swiglu", tuple(w.shape[2] for w in weights), max(tokens)
    R, tp = sum(tokens) * k, tensor_parallel_size
    ends = [*accumulate(experts[::tp])]
    if config is None:
        config = few_config(
            max(1, R // max(1, ends[-1])),
            sum(Ns),
            x.dtype,
            most,
            k,
            W,
            chip_of(x.device),
            experts=E,
            aligned=aligned_sizes(K, *Ns),
            pair=pair,
            keep_sums=keep_sums,
            quantize=quantize,
        )
    needed, ids_at = few_bytes(most, k, K, FP8 if quantize else x.dtype, W)
    check_room(ws, needed, "few_bytes(max(tokens), k, K, dtype in which rows travel, W)")
    afters = tuple(ends[rank // tp] for rank in range(W))
    firsts = tuple(after - own for after, own in zip(afters, experts, strict=True))
    ys = [x.new_empty(R, N) for N in (Ns[:1] if pair else Ns)]
    sums = [x.new_empty(R, N) for N in Ns] if keep_sums else []
    table = RowTable(*(topk_ids.new_empty(n) for n in (E, R, R, R)))
    tallies = Tallies(topk_ids.new_empty(W, E), topk_ids.new_empty(ends[-1], dtype=torch.int64))
    tiling = config.tiling
    describe = config.descriptors and (pair or len(weights) == 1)
    descs, w_transposed = described_experts(weights, tiling, describe)
    dispatch = DispatchVariant(
        weights=len(weights),
        activation=activation,
        tiles=tiling,
        world_size=W,
        lanes=lanes_for(E),
        copies=0,
        copy_m=1,
        copy_n=config.roles.copy_n,
        even_k=K % tiling.block_k == 0,
        w_transposed=w_transposed,
        quantized=quantize,
        delivered=True,
    )
    launching(few_tokens_kernel, config.programs)(
        Outputs(
            tuple(ys),
            tuple(sums) if keep_sums else None,
            (None,) * len(weights),
            (NO_SCALES,) * len(weights),
        ),
        matrix(x),
        topk_ids,
        tuple(map(expert_weights, weights)),
        *descs,
        table,
        tallies,
        link_of(ws),
        ExpertRanges(firsts, afters),
        T,
        R,
        E,
        Ns,
        K,
        gathers.pitch_of(K),
        most,
        ids_at,
        ws.rank,
        V=FewVariant(dispatch, config.roles),
        **tiling.options,
    )
    return FewDispatched(ys, sums, table, *tallies)
