"""How the kernel of `all_gather_kernel` is launched: tiles, programs, and the way shards come in.

The configuration depends on shapes, dtype and chip alone (`weft.kernels.engine.chips`), or on a
measured table (`weft.kernels.engine.tuning`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch

from weft.collectives.device import signals
from weft.collectives.device.launches import doing, launching, temporary
from weft.collectives.memory.workspace import Workspace, link_of
from weft.collectives.ranks.pad import MAX_PROGRAMS
from weft.kernels.device import gathers, splits
from weft.kernels.device.gathered_tiles import GatherVariant
from weft.kernels.device.operands import (
    Rows,
    contiguous,
    described_rows,
    described_weights,
    in_place,
    matrix,
    scales_of,
)
from weft.kernels.device.outputs import Outputs
from weft.kernels.engine import tuning
from weft.kernels.engine.chips import (
    INTERPRETER,
    Chip,
    FetchBlocks,
    Tiling,
    chip_of,
    fetch_blocks,
    gather_tiling_for,
    gathers_by_copy_engines,
)
from weft.kernels.engine.epilogues import Activation
from weft.kernels.engine.fp8 import Scaling
from weft.kernels.engine.shards import is_eager
from weft.kernels.matmul import copy_engines
from weft.kernels.matmul.all_gather_kernel import GatherSizes, all_gather_matmul_kernel

# The most that all programs together read directly over the link rather than from a copy made once:
# at 450 GB/s that takes about the 3 us that the copy costs in signals.
_DIRECT_BYTES = 1 << 20

# The least that a copy engine copies at a time, unless the shard is smaller. In virtual time on
# 8 x H100 the way up takes, with chunks of 4, 8 and 16 MiB, 408, 423 and 478 us for the 8B layer at
# M = 16384, and 679, 701 and 727 for the 70B one at M = 8192.
_CHUNK_BYTES = 4 << 20
# The same where the host enqueues each call, and the kernel last: a copy and a word for each chunk,
# of which the 70B layer at M = 8192 has 28 of 4 MiB, and 7 of these.
_EAGER_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class AllGatherConfig:
    """How the kernels of `all_gather_kernel` are launched.

    Attributes:
        tiling: tiles of the matmul.
        programs: grid of the consumer kernel, copy programs included.
        copy_programs: how many of them fetch shards; 0 if this kernel fetches nothing.
        chunk_rows: rows of a shard that are announced together.
        copy_m, copy_n: block that a copy moves at a time.
        descriptors: whether weights that allow it are read by tensor descriptor, and with them the
            rows, unless the tiles, none of which then has both own rows and others, take more waves
            of programs.
        direct: whether rows are read in place at their owners.
        split: programs that share a tile, each taking a part of K. Only without copy programs.
        copy_engines: whether the chip's copy engines fetch the shards, so that all programs make
            tiles.
        parts: into how many parts K is cut for fetching. Only with copy programs.
        halves: whether tiles that fill no wave are made in halves of their columns. Only where no
            program copies, nor several share a tile.
        flattened: whether tiles whose rows are read by descriptor are made in one loop; see
            `weft.kernels.device.flattened`.
    """

    tiling: Tiling
    programs: int
    copy_programs: int
    chunk_rows: int
    copy_m: int
    copy_n: int
    descriptors: bool = False
    direct: bool = False
    split: int = 1
    copy_engines: bool = False
    parts: int = 1
    halves: bool = False
    flattened: bool = not signals.INTERPRETED


def all_gather_config(
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    world_size: int,
    chip: Chip,
    *,
    activation: Activation | None = None,
    keep: bool = False,
    keep_sums: bool = False,
) -> AllGatherConfig:
    """The launch for an (M, K) @ (K, N), of which each rank brings 1/W of the rows.

    Args:
        activation: for "swiglu", N counts the columns of both weights.
        keep: whether the gathered matrix is wanted too.
        keep_sums: whether the activation's argument is wanted too.
    """
    choice = tuning.choice_for("all_gather_matmul", chip, M, N, K, dtype, world_size)
    return _config(choice, M, N, K, dtype, world_size, chip, activation, keep, keep_sums)


@lru_cache(maxsize=1024)
def _config(
    choice: tuning.Choice,
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    world_size: int,
    chip: Chip,
    activation: Activation | None,
    keep: bool,
    keep_sums: bool,
) -> AllGatherConfig:
    tiling = _tiling(choice, M, N, dtype, world_size, chip, activation, keep_sums)
    columns = N // 2 if activation == "swiglu" else N  # of the output
    column_tiles = -(-columns // tiling.block_n)
    count = -(-M // tiling.block_m) * column_tiles
    # A group of tiles that run together should not wait for two peers.
    tiles_a_shard = max(1, M // world_size // tiling.block_m)
    tiling = replace(tiling, group_m=min(tiling.group_m, tiles_a_shard))
    interpreted = chip is INTERPRETER
    # Past the end tiles read the last row again, over the link as well.
    rows = M if interpreted else -(-M // tiling.block_m) * tiling.block_m
    remote_bytes = column_tiles * rows * K * dtype.itemsize * (world_size - 1) // world_size
    direct = not keep and remote_bytes <= (4 << 10 if interpreted else _DIRECT_BYTES)
    descriptors = chip.descriptors and dtype != torch.float32
    # A link of 450 GB/s and 2 us latency is full with 0.9 MB in flight: a load of 64 KiB (8 warps)
    # on each of an eighth of the cores. With one rank nothing is fetched.
    copy_programs = max(1, chip.cores // 8) if world_size > 1 and not interpreted else 1
    # A table is of whole chips.
    copy_programs = min(choice.copy_programs or copy_programs, max(1, chip.programs // 2))
    blocks = fetch_blocks(M, K, dtype.itemsize, world_size, tiling, copy_programs)
    if interpreted:
        blocks = FetchBlocks(32, 32, 2 if K > 32 else 1, 16)
    config = AllGatherConfig(
        tiling, chip.programs, copy_programs, blocks.chunk_rows, blocks.rows, blocks.columns,
        descriptors, parts=blocks.parts,
    )  # fmt: skip
    # Ranks may differ in the other ways, which signal alike, but must agree on this one: it depends
    # neither on N nor on a tuned choice.
    if gathers_by_copy_engines(M, K, dtype, world_size) and not interpreted:
        if dtype.itemsize != 2 and N % 16:
            # With the registers that `beside_others` leaves, unaligned columns spill on sm_90: 216
            # bytes in fp32, 328 in fp8.
            config = replace(config, tiling=replace(tiling, block_n=min(tiling.block_n, 64)))
        config = by_copy_engines(config, M, K, dtype, world_size, chip)
        if activation == "swiglu" and dtype.itemsize == 1:  # 8 bytes spill on sm_100
            config = replace(config, halves=False)
        return config
    if not direct:
        return config
    split = splits.programs_a_tile(count, K, tiling, chip)
    programs = max(1, min(chip.programs, count * split))
    halves = world_size == 1 and split == 1 and tiling.block_n >= 128
    halves &= not (activation == "swiglu" and dtype.itemsize == 1)  # as by copy engines
    return replace(
        config, programs=programs, copy_programs=0, direct=True, split=split, halves=halves
    )


def _tiling(
    choice: tuning.Choice,
    M: int,
    N: int,
    dtype: torch.dtype,
    world_size: int,
    chip: Chip,
    activation: Activation | None,
    keep_sums: bool,
) -> Tiling:
    """The tuned or default tiles, narrowed where the epilogue would make the kernel spill."""
    pair = activation == "swiglu"
    tiling = choice.tiling or gather_tiling_for(chip, M, N, dtype, world_size, pair=pair)
    if pair and (tiling.block_m * tiling.block_n > 32 * 64 or dtype == torch.float32):
        # Two accumulators at a time.
        tiling = replace(tiling, block_n=max(16, tiling.block_n // 2))
    elif activation == "gelu" or keep_sums:  # 256 columns spill on sm_90, 8 and 24 bytes
        tiling = replace(tiling, block_n=min(tiling.block_n, 128))
    if keep_sums and (pair or N % 16) and tiling.block_m * tiling.block_n > 64 * 32:
        # Addresses of two more outputs, or of unaligned columns, spill 24 to 790 bytes there.
        tiling = replace(tiling, block_n=max(16, tiling.block_n // 2))
    return tiling


def by_copy_engines(
    config: AllGatherConfig, M: int, K: int, dtype: torch.dtype, world_size: int, chip: Chip
) -> AllGatherConfig:
    """The same launch with shards fetched by copy engines."""
    rows = -(-M // world_size)
    chunk_bytes = 1 << 10 if chip is INTERPRETER else _CHUNK_BYTES
    return replace(
        config,
        # The small kernels between the copies must find room even where another kernel has taken
        # the free core, such as a collective that waits for ranks which wait for those kernels.
        tiling=replace(config.tiling, beside_others=chip.name.startswith("sm_")),
        copy_engines=True,
        direct=False,
        split=1,
        copy_programs=0,
        # One core stays free for the small kernels between the copies.
        programs=max(1, min(chip.programs, chip.cores - 1)),
        # Narrower halves would read x too often for their arithmetic.
        halves=config.tiling.block_n >= (32 if chip is INTERPRETER else 128),
        # Several copies a shard, so that a peer's first tiles need not wait for its last rows.
        chunk_rows=max(1, -(-rows // 4), chunk_bytes // (K * dtype.itemsize)),
    )


def halved_tiles(count: int, own: int, config: AllGatherConfig) -> int:
    """How many of `count` tiles to make in halves of their columns; `own` have own rows alone.

    As many as do not fill a wave: whole, they would leave the other programs idle for the time of
    one tile. They come first, so that each program has one half of them before its whole tiles.
    Where they are too many for that, some programs have two. This gains only if the first of these
    has own rows and others do not: then it is made while others wait for theirs.

    A rank decides for itself, as only its own programs make its tiles: N may play a part.
    """
    if not config.halves:
        return 0
    partial = count % config.programs
    twice = 2 * partial - config.programs
    return partial if twice <= 0 or twice <= 2 * own < config.programs else 0


def tiles_apart(sizes: Sequence[int], rank: int, block_m: int) -> int:
    """Rows of tiles, if own rows, those after and those before them have tiles of their own."""
    begin, own = sum(sizes[:rank]), sizes[rank]
    return sum(-(-rows // block_m) for rows in (own, begin, sum(sizes) - begin - own))


@dataclass(frozen=True)
class Gathered:
    """What a launch returns.

    Attributes:
        matrix: the gathered rows (M, K), contiguous; None if they were read in place.
        ys: the outputs, (M, N_i) each.
        sums: the activation's arguments, one for each weight; empty unless asked for.
    """

    matrix: torch.Tensor | None
    ys: list[torch.Tensor]
    sums: list[torch.Tensor]


def launch_all_gather_matmul(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    ws: Workspace,
    sizes: Sequence[int],
    *,
    biases: Sequence[torch.Tensor | None] | None = None,
    activation: Activation | None = None,
    keep_sums: bool = False,
    with_own: bool = False,
    scaling: Scaling | None = None,
    config: AllGatherConfig | None = None,
) -> Gathered:
    """Enqueue y_i = activation(cat(x over ranks) @ w_i + bias_i).

    Args:
        x: (m_r, K), this rank's rows, any strides.
        weights: (K, N_i), any strides, dtype of x.
        ws: room for `gathers.workspace_bytes(max(sizes), K, x.dtype)`; on a channel of its own if
            `config.copy_engines`.
        sizes: m_r of every rank, the same list on all ranks.
        biases: (N_i,) or None for each weight.
        activation: see `weft.kernels.engine.epilogues`; "swiglu" makes one y of two weights.
        keep_sums: also return the activation's arguments.
        with_own: also copy this rank's rows into the gathered matrix, where they else are
            undefined.
        scaling: of fp8 operands.
        config: default `all_gather_config`; `copy_engines` must be the same on all ranks.
    """
    K, M, W = x.shape[1], sum(sizes), ws.world_size
    Ns, chip = tuple(w.shape[1] for w in weights), chip_of(x.device)
    config = config or all_gather_config(
        M, sum(Ns), K, x.dtype, W, chip, activation=activation, keep=with_own, keep_sums=keep_sums
    )
    row_scales = scaling.rows if scaling else None
    gathered = scales = None
    if not config.direct:
        gathered = x.new_empty(M, K)
        if scaling:
            scales = temporary(torch.empty(M, dtype=torch.float32, device=x.device))
    if config.copy_engines and not in_place(x):
        x = x.contiguous()
    # Every part of every chunk of a shard needs its own word of the pad.
    parts = config.parts if config.copy_programs else 1
    chunk_rows = max(config.chunk_rows, -(-max(sizes) // (MAX_PROGRAMS // parts)))
    eager = is_eager(x.device)
    if config.copy_engines and eager:
        chunk_rows = max(chunk_rows, _EAGER_CHUNK_BYTES // (K * x.element_size()))
    scales_at = gathers.scales_offset(max(sizes), K, x.dtype)

    def multiplied() -> list[torch.Tensor]:
        return _multiply(
            x, weights, ws, sizes, Rows(gathered, scales), biases or [None] * len(weights),
            activation, keep_sums, with_own, scaling, config, chunk_rows, scales_at,
        )  # fmt: skip

    block = config.programs, config.copy_m, config.copy_n
    if config.copy_engines:
        assert gathered is not None
        fetching = copy_engines.Fetching(
            ws, sizes, K, x.dtype, chunk_rows, None if scales is None else scales_at, eager
        )
        fetching.publish(x, row_scales, *block)
        own = x if with_own else None
        # By name, as a rank alone on its chip puts another in its place: `weft.sim.run.solo`.
        doing(lambda *to: fetching.start(*to), gathered, scales, own, in_graph=not eager)
        try:
            made = multiplied()
        except BaseException:
            fetching.rejoin()  # before anybody else has the memory that is still copied to
            raise
        fetching.finish([gathered] if scales is None else [gathered, scales])
    else:
        # A single rank need not publish rows that it does not read back itself.
        shown = x[:0] if W == 1 and in_place(x) and not with_own else x
        gathers.publish(shown, ws, gathers.pitch_of(K), *block, scales_of(row_scales), scales_at)
        made = multiplied()
    count = 1 if activation == "swiglu" else len(weights)
    return Gathered(gathered, [*made[:count]], [*made[count:]])


def _multiply(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    ws: Workspace,
    sizes: Sequence[int],
    gathered: Rows,
    biases: Sequence[torch.Tensor | None],
    activation: Activation | None,
    keep_sums: bool,
    with_own: bool,
    scaling: Scaling | None,
    config: AllGatherConfig,
    chunk_rows: int,
    scales_at: int,
) -> list[torch.Tensor]:
    """Enqueue the kernel that makes the tiles; ys, then the sums if they are kept."""
    K, M, W = x.shape[1], sum(sizes), ws.world_size
    Ns, tiling = tuple(w.shape[1] for w in weights), config.tiling
    pair = activation == "swiglu"
    out_dtype = scaling.out_dtype if scaling else x.dtype
    ys = [x.new_empty(M, N, dtype=out_dtype) for N in (Ns[:1] if pair else Ns)]
    sums = [x.new_empty(M, N, dtype=out_dtype) for N in Ns] if keep_sums else []
    # Triton's launcher takes no descriptors in a tuple.
    describe = config.descriptors and (pair or len(weights) == 1)
    descs, w_transposed = described_weights(weights, tiling, describe)
    column_tiles = sum(-(-y.shape[1] // tiling.block_n) for y in ys)
    count = -(-M // tiling.block_m) * column_tiles
    row_descs: list[Any] = [None, None]
    if gathered.ptr is not None and descs[0] is not None:
        apart = tiles_apart(sizes, ws.rank, tiling.block_m) * column_tiles
        makers = config.programs - config.copy_programs
        # A pipeline that is not drained after each tile is worth one more wave in 8, not in 3.
        waves = -(-count // makers)
        wanted = -(-apart // makers) <= waves + waves // 8
        # Beside what one loop carries, unaligned columns of fp8, or of sums, spill 8 to 40 bytes.
        wanted &= Ns[0] % 16 == 0 or (x.element_size() > 1 and not keep_sums)
        row_descs = described_rows(x, gathered.ptr, tiling, wanted)
        count = count if row_descs[0] is None else apart
    halved = halved_tiles(count, sizes[ws.rank] // tiling.block_m * column_tiles, config)
    half = replace(tiling, block_n=tiling.block_n // 2) if halved else tiling
    half_descs, _ = described_weights(weights, half, halved > 0 and describe)
    parts = config.parts if config.copy_programs else 1
    variant = GatherVariant(
        weights=len(weights),
        activation=activation,
        half_tiles=half,
        tiles=tiling,
        fetch=gathers.Fetch(
            W, config.copy_programs, config.copy_m, config.copy_n, with_own, parts, tiling.block_k
        ),
        direct=config.direct,
        split=config.split,
        halved=int(halved > 0),
        x_in_place=in_place(x),
        w_transposed=w_transposed,
        even_k=K % tiling.block_k == 0,
        described=row_descs[0] is not None,
        # ptxas makes sm_90 wait for each of two sums' matrix instructions in one loop.
        flattened=config.flattened and not pair,
    )
    launching(all_gather_matmul_kernel, config.programs)(
        Outputs(
            tuple(ys),
            tuple(sums) if keep_sums else None,
            tuple(map(contiguous, biases)),
            tuple(map(scales_of, scaling.columns if scaling else [None] * len(weights))),
        ),
        gathered,
        matrix(x),
        scales_of(scaling.rows if scaling else None),
        *row_descs,
        tuple(matrix(w) for w in weights),
        *descs,
        *half_descs,
        splits.scratch_for(count * (2 if pair else 1), config.split, x, tiling),
        link_of(ws),
        GatherSizes((0, *accumulate(sizes)), Ns, K, gathers.pitch_of(K)),
        scales_at,
        chunk_rows,
        ws.rank,
        halved,
        V=variant,
        **tiling.options,
    )
    return [*ys, *sums]
