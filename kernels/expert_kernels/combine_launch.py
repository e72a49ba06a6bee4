"""How the kernels of `combine_kernel` are launched.

Configurations depend on shapes, dtype and chip alone. Ranks may differ in them: slots do not lie as
tiles do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from weft.collectives import Workspace
from weft.collectives.device.launches import launching
from weft.collectives.memory.workspace import check_room, link_of
from weft.kernels.device import gathers
from weft.kernels.device.operands import Matrix, described_rows, matrix
from weft.kernels.engine.chips import INTERPRETER, Chip, Tiling, chip_of
from weft.kernels.expert_kernels.combine_kernel import PushVariant, push_kernel
from weft.kernels.expert_kernels.expert_tiles import (
    RowTable,
    aligned_sizes,
    check_table,
    described_experts,
    expert_tiling,
    expert_weights,
    lanes_for,
)
from weft.kernels.expert_kernels.push_and_weigh_kernel import (
    PushAndWeighVariant,
    push_and_weigh_kernel,
)
from weft.kernels.expert_kernels.weigh_kernel import Weighed, WeighVariant, weigh_kernel

# Tokens a rank, of which one launch each way does all. In virtual time (2 H100, 16 experts each of
# 4096 x 1536, 8 a token, bf16) both ways take 139, 195, 211 us for 64, 128, 256 tokens, and by the
# launches of many 155, 222, 216.
FEW = 256
# Tokens a rank, of which an eighth of the programs adds up, not a quarter. There, by a half, a
# quarter, an eighth, a sixteenth, combine takes -, 48, 45, - us for 16 tokens, -, 74, 70, 81 for 64
# and 112, 103, 122, 161 for 256.
_FEWER = 64


@dataclass(frozen=True)
class CombineConfig:
    """How the kernels of `combine_kernel` are launched; ranks may differ but in one launch.

    Attributes:
        tiling: tiles of the matmul, or of what is pushed without one.
        programs: grid of the kernels.
        weigh_t, weigh_h: tokens and columns that are added up at a time.
        descriptors: whether operands that allow it are read by tensor descriptor.
        weighers: how many of the programs add up what the others push; 0: another launch does.
    """

    tiling: Tiling
    programs: int
    weigh_t: int
    weigh_h: int
    descriptors: bool = False
    weighers: int = 0


def combine_config(
    rows: int,
    H: int,
    dtype: torch.dtype,
    chip: Chip,
    *,
    experts: int = 1,
    aligned: bool = True,
    tokens: int = FEW + 1,
) -> CombineConfig:
    """The launch for `experts` of about `rows` rows each, and H columns.

    Args:
        aligned: as in `expert_tiling`.
        tokens: the most that a rank has: of few, one launch does all.
    """
    tiling = expert_tiling(chip, rows, H, dtype, experts, aligned)
    programs = max(2, chip.programs)
    weighers = max(1, programs // (8 if tokens <= _FEWER else 4)) if tokens <= FEW else 0
    if chip is INTERPRETER:
        return CombineConfig(tiling, programs, 4, 32, weighers=weighers)
    if weighers and not aligned:  # else they spill
        tiling = replace(tiling, block_n=min(tiling.block_n, 32))
    weigh_h = min(triton.next_power_of_2(H), 256 * 16 // dtype.itemsize)
    weigh_t = max(1, 256 // weigh_h)  # of narrow rows, an element for each thread of 8 warps
    descriptors = chip.descriptors and dtype != torch.float32
    return CombineConfig(tiling, programs, weigh_t, weigh_h, descriptors, weighers)


def _pitch(H: int) -> int:
    """Elements from slot to slot."""
    return gathers.pitch_of(H) if H >= 16 else H


def combine_bytes(tokens: int, slots: int, H: int, wire_dtype: torch.dtype) -> int:
    """Symmetric memory of each rank, for at most `tokens` tokens of `slots` slots, all parts."""
    return tokens * slots * _pitch(H) * wire_dtype.itemsize


def launch_combine(
    hs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    ws: Workspace,
    table: RowTable,
    tokens: Sequence[int],
    topk_ids: torch.Tensor,
    experts: int,
    *,
    topk_weights: torch.Tensor | None = None,
    tensor_parallel_size: int = 1,
    rows_each: int = 1,
    wire_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    config: CombineConfig | None = None,
) -> torch.Tensor:
    """Enqueue y[t] = sum over j of topk_weights[t, j] * (sum over i of h_i @ w_i in slot (t, j)).

    Args:
        hs: (R, N_i) each, any strides, in the order of `table`.
        weights: (E, N_i, H) each, any strides, dtype of hs; none: the only h (R, H) is pushed.
        ws: room for `combine_bytes(max(tokens), k * tensor_parallel_size, H, wire_dtype)`.
        table: of this rank's rows.
        tokens: T of every rank, the same list on all ranks.
        topk_ids: (T, k) int32, contiguous, of this rank's tokens. Slots whose id is none of
            0 .. experts - 1 are left out.
        experts: of all ranks.
        topk_weights: (T, k) of any floating dtype; None: 1.
        tensor_parallel_size: how many consecutive ranks hold parts of the same experts.
        rows_each: as in `launch_dispatch`.
        wire_dtype: in which results travel, the same on all ranks; default that of hs.
        out_dtype: of y; default that of hs.
        config: default `combine_config`.

    Returns:
        (T, H), contiguous. To have what is in each slot, pass the ids as (T k, 1).
    """
    h, E, W, parts = hs[0], len(table.ends), ws.world_size, tensor_parallel_size
    (T, k), H = topk_ids.shape, weights[0].shape[2] if weights else h.shape[1]
    check_table(table, E, h.device)
    wire = wire_dtype or h.dtype
    if config is None:
        aligned = aligned_sizes(H, *(x.shape[1] for x in hs if weights))
        chip = chip_of(h.device)
        config = combine_config(
            rows_each, H, h.dtype, chip, experts=E, aligned=aligned, tokens=max(tokens)
        )
    needed = combine_bytes(max(tokens), k * parts, H, wire)
    check_room(ws, needed, "combine_bytes(max(tokens), k * parts, H, wire_dtype)")
    tiling, pitch, wired = config.tiling, _pitch(H), getattr(tl, str(wire).removeprefix("torch."))
    descs, w_transposed = described_experts(weights, tiling, config.descriptors)
    h_descs = [described_rows(x, x, tiling, descs[0] is not None)[1] for x in hs[:2]]
    if None in h_descs or len(hs) > 2:
        h_descs = [None, None]
    y = h.new_empty(T, H, dtype=out_dtype)
    gates = Matrix(None, 0, 0) if topk_weights is None else matrix(topk_weights)
    push = (
        tuple(map(matrix, hs)),
        *[*h_descs, None][:2],
        tuple(map(expert_weights, weights)),
        *descs,
        table,
        link_of(ws),
        E,
        tuple(x.shape[1] for x in hs),
        H,
        parts,
        ws.rank % parts,
        pitch,
        ws.rank,
    )
    V = PushVariant(
        terms=len(weights),
        wire=wired,
        tiles=tiling,
        world_size=W,
        lanes=lanes_for(E),
        even_k=all(x.shape[1] % tiling.block_k == 0 for x in hs),
        w_transposed=w_transposed,
    )
    weigh = WeighVariant(k, parts, config.weigh_t, config.weigh_h)
    if config.weighers:
        both = PushAndWeighVariant(V, weigh, config.programs - config.weighers)
        weighed = Weighed(y, topk_ids, gates)
        launching(push_and_weigh_kernel, config.programs)(
            *push, weighed, T, experts, V=both, **tiling.options
        )
        return y
    launching(push_kernel, config.programs)(*push, V=V, **tiling.options)
    launching(weigh_kernel, config.programs)(
        y,
        topk_ids,
        gates,
        link_of(ws),
        T,
        H,
        pitch,
        experts,
        ws.rank,
        WIRE=wired,
        WORLD_SIZE=W,
        W=weigh,
        num_warps=8,
    )
    return y
