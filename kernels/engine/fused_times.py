"""Times of weft's fused matmuls in closed form: what `auto` goes by, where a trace takes too long.

    longer + share * shorter + tiles * tile + fills * fill + launch + exchanges * latency

of the matmul's tiles in whole waves, each stored by its program, and the bytes on a link; what a
program adds up is a part of its matmul's half. The constants are those of a way to
launch (`_WAYS`), not of a chip or a shape, and fitted by `tools.scaling_fit` to every second row of
`docs/scaling.md`, in virtual time on 8 H100; `tests/sim/test_closed_forms.py` holds them against
all of these, and against other ranks and chips.

Attention is priced by the library's (`weft.collectives.prices.library`): `attention_times`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from weft.collectives.prices import library
from weft.collectives.prices.hardware import Hardware
from weft.collectives.protocols import KERNEL_US, Fabric, switch_us, two_shot_us
from weft.kernels.engine import kernel_rates
from weft.kernels.engine.chips import (
    MOST_SPLIT,
    Chip,
    FetchBlocks,
    Tiling,
    chunk_tiling_for,
    fetch_blocks,
    gather_tiling_for,
    gathers_by_copy_engines,
    known,
    scatters_in_one_shot,
    senders_for,
    sum_tiling_for,
    sums_in_one_shot,
)

# Rate of Triton's matmuls relative to the library's, over the published pairs of symm-mem-recipes
# (0.84 to 1.01) [fit], and the guess of `weft.kernels.engine.kernel_rates`.
TRITON_RATE = 0.95
# Bytes of a partial sum and of a whole one, in half precision: `weft.kernels.device.partial_sums`.
_PARTIAL, _WHOLE = 3, 2
# `weft.kernels.matmul.copy_engines`: streams on a switch, and what each fetches first; a program's
_STREAMS, _FIRST_COPY = 3, 4 << 20


@dataclass(frozen=True)
class _Transport:
    """How a kernel moves its data, and what that costs apart from the longer of its two halves.

    Attributes:
        shorter: share of the shorter half that is not hidden.
        tiles: of a tile's time, at the end or while the first rows come.
        fills: of the time in which the link takes what must be moved before all programs are busy.
        exchanges: signals that are waited for, after a launch.
    """

    shorter: float
    tiles: float
    fills: float
    exchanges: float


_WAYS = {
    "copy programs": _Transport(0.38, 0.33, 0.0, 7.1),
    "copy engines": _Transport(0.12, 0.0, 0.98, 4.8),  # the first copies
    "chunks": _Transport(0.21, 0.02, 0.51, 7.1),  # a tile of each program, which take turns
    "one shot": _Transport(1.3, 0.0, 0.0, 1.6),  # all ranks played
    "two shots": _Transport(1.08, 0.05, 0.0, 3.0),  # likewise
    "by the switch": _Transport(1.08, 0.05, 0.0, 3.0),  # as two shots: virtual time has no switch
}


@dataclass(frozen=True)
class FusedTime:
    """A fused matmul's time in us: its tiles, its bytes on the link, and both with the rest.

    Attributes:
        rate, told: of the multiplications relative to the library's, and where that is from.
    """

    way: str
    matmul_us: float
    link_us: float
    us: float
    rate: float
    told: str


def fused_us(op: str, M: int, N: int, K: int, dtype: str, hardware: Hardware, ranks: int) -> float:
    """weft's triton engine as it is launched; (M, K) @ (K, N) is one rank's product.

    Raises:
        ValueError: another op; more ranks than the hardware has.
    """
    return fused_time(op, M, N, K, dtype, hardware, ranks).us


def fused_time(
    op: str,
    M: int,
    N: int,
    K: int,
    dtype: str,
    hardware: Hardware,
    ranks: int,
    way: str = "",
    tiling: Tiling | None = None,
    rate: float | None = None,
    wire: torch.dtype | None = None,
) -> FusedTime:
    """As `fused_us`, in another way to move data or other tiles than the kernel would have.

    Args:
        way: one of `ways(op, ranks)`, or "by the switch".
        rate: of Triton's matmuls, relative to the library's; None: what was measured of such tiles
            on such a chip, else a guess.
        wire: in which partial sums travel, if not in 24 bits (fp32: in its own).
    """
    chip = _chip(hardware)
    of = _torch(dtype)
    way = way or launched_way(op, chip, M, N, K, of, ranks)
    if tiling is None:
        tiling = _tiling_of(op, way, chip, M, N, K, of, ranks)
    rows, columns, wave = tiling.block_m, tiling.block_n, hardware.cores
    count = -(-M // rows) * -(-N // columns)
    if way == "chunks":
        chunk = -(-M // ranks)
        count = ranks * -(-chunk // rows) * -(-N // columns)
    elif way == "copy engines":
        wave -= 1
    elif way == "copy programs":
        wave -= wave // 8
    told = "given"
    if rate is None:
        rate, told = kernel_rates.rate_of(chip, kernel_rates.tile_by(tiling, of))
    count = max(count, 1)
    split = 1
    if way == "one shot":
        split = max(1, min(MOST_SPLIT, wave // count, K // (2 * tiling.block_k)))
    core = hardware.core_flops_per_us(dtype) * library.UNDER_POWER * rate
    read = (rows + columns) * K * of.itemsize
    dots = 2 * rows * columns * K / core
    ahead = K / tiling.block_k * hardware.ahead_us / max(tiling.num_stages - 1, 1)
    tile = max(dots, read / (hardware.core_bandwidth / 1e6), ahead) / split
    parts = _parts_us(hardware, 4 * rows * columns, count, split)
    full, partial = divmod(count * split, wave)
    waves: float = full + (partial > 0)
    if way == "copy engines" and columns >= 128 and 0 < 2 * partial <= wave:
        waves = full + 0.5  # in halves of their columns
    touched = of.itemsize * (M * K + K * N) + max(of.itemsize, 2) * M * N
    matmul = max(
        waves * tile,
        count * read / (hardware.l2_bandwidth / 1e6),
        touched / (hardware.hbm_bandwidth / 1e6),
    )
    port = hardware.link_rate(ranks)
    link = sent_bytes(op, M, N, K, dtype, ranks, way, wire)
    link /= port
    if way == "by the switch":
        most = max(of.itemsize, 2, wire.itemsize if wire else 4)
        fabric = hardware.fabric(ranks)
        link = switch_us("all_reduce", M * N * most, fabric, in_graph=True) - KERNEL_US
    latency, fill = hardware.hbm_latency_us + 2 * hardware.link_latency_us, 0.0
    alone = min(hardware.program_bandwidth, hardware.core_bandwidth) / 1e6  # a program's bytes a us
    partial_size, whole_size = (4, 4) if dtype == "float32" else (_PARTIAL, _WHOLE)
    if wire is not None:
        partial_size = wire.itemsize
    rounds = waves if split == 1 else float(-(-count // wave))
    owned, live = -(-count // (ranks * wave)), min(rows, max(M, 1)) * columns
    stored, summed = _moved_alone(op, way, live, rounds, owned, ranks, partial_size, whole_size)
    moves = (rounds * stored + summed) / alone
    if op == "all_gather_matmul":
        at_once, programs = min(_STREAMS, ranks - 1), max(1, hardware.cores // 8)
        blocks = fetch_blocks(M, K, of.itemsize, ranks, tiling, programs)
        if way == "copy programs":
            fetch = _fetching(M, K, of.itemsize, ranks, blocks, programs)
            at_once = min(ranks - 1, fetch.at_once)
        if hardware.topology == "mesh":  # of whose links those of few peers are busy
            at_once = ranks - 1 if way == "copy engines" else at_once
            peer = port / max(ranks - 1, 1)
            link = M * K * of.itemsize / ranks * -(-(ranks - 1) // max(at_once, 1)) / peer
            port = at_once * peer
        # Before, programs publish the own shard, each so many rows, block after block.
        high, shard = blocks.rows, -(-M // ranks)
        shown = min(shard, high) * -(-shard // (high * hardware.cores)) * K * of.itemsize
        parts += (shown + high * blocks.columns * of.itemsize) / alone
        if way == "copy engines":
            fill = _FIRST_COPY * at_once / port
        else:  # One block is loaded while one is stored: two take a load's latency and both.
            each = fetch.blocks * (latency / 2 + fetch.block / alone) + latency
            link = max(link, fetch.pieces * each)
    elif way == "chunks":
        sent = link * port / max(M * N, 1)  # bytes of a partial sum, but for what stays
        fill = min(count, wave) * rows * columns * sent / port
        line = min(count, wave) / senders_for(chip, count)  # each sends, and hands over
        fill = max(fill, line * (stored / alone + hardware.wait_us + hardware.l2_latency_us))
    latency += hardware.wait_us
    cost = _WAYS[way]
    busy = matmul + moves
    us = max(busy, link) + cost.shorter * min(busy, link)
    us += cost.tiles * tile + cost.fills * fill
    us += parts + hardware.launch_us + cost.exchanges * latency
    return FusedTime(way, matmul, link, us, rate, told)


def adds_by_switch(sent: float, shown: float, fabric: Fabric) -> bool:
    """Whether the switch, where it may, is predicted to add up partial sums of `sent` bytes, and to
    give sums of `shown` bytes to all, sooner than two shots: a link carries every byte of the
    larger once.
    """
    if not fabric.multicast:
        return False
    switched = switch_us("all_reduce", max(sent, shown), fabric, in_graph=True)
    return switched < two_shot_us((sent + shown) / 2, fabric, in_graph=True)


def _moved_alone(
    op: str, way: str, tile: int, rounds: float, owned: int, ranks: int, partial: float, whole: int
) -> tuple[float, float]:
    """Bytes that the busiest program stores of each of its `rounds` tiles; and all that it loads
    and stores to add up, where no dots hide it.

    Args:
        tile: elements of one, without rows that pad it.
        owned: tiles that it adds up, where each has one owner.
        partial, whole: bytes of a partial sum and of a whole one.
    """
    if op == "all_gather_matmul":
        return tile * whole, 0.0
    if way == "one shot":
        parts = ranks if op == "matmul_all_reduce" else 1  # that every rank gets, or its owner
        return parts * tile * partial, rounds * tile * parts / ranks * (ranks * partial + whole)
    if way == "chunks":
        return tile * partial, owned * tile * (ranks * partial + whole)
    added, shown = (1, 1) if way == "by the switch" else (ranks, ranks)
    sums = owned * tile * (added * partial + shown * whole)
    return tile * partial, sums + rounds * tile * 2 * whole  # and a copy of each finished one


class _Fetching(NamedTuple):
    """What a copy program fetches: so many pieces, each a chunk of rows or a half of its columns,
    of so many blocks of so many bytes; and from how many peers programs fetch at a time.
    """

    pieces: int
    blocks: int
    block: int
    at_once: int


def _fetching(
    M: int, K: int, itemsize: int, ranks: int, of: FetchBlocks, programs: int
) -> _Fetching:
    shard = -(-M // ranks)
    rows = min(shard, of.chunk_rows)
    chunks = max(1, -(-shard // max(rows, 1)))
    return _Fetching(
        of.parts * -(-(ranks - 1) * chunks // programs),
        -(-rows // of.rows) * -(-K // (of.parts * of.columns)),
        min(rows, of.rows) * min(K, of.columns) * itemsize,
        max(1, programs // chunks),
    )


def _parts_us(hardware: Hardware, nbytes: int, count: int, split: int) -> float:
    """Of `count` tiles that are split: their parts go through memory, one core, which waits for the
    others, adds up a tile's.
    """
    if split == 1:
        return 0.0
    by_core = split * nbytes / (hardware.core_bandwidth / 1e6)
    told = hardware.hbm_latency_us + hardware.wait_us
    return told + max(by_core, 2 * count * (split - 1) * nbytes / (hardware.hbm_bandwidth / 1e6))


def _chip(hardware: Hardware) -> Chip:
    return replace(known(hardware.chip), cores=hardware.cores)


def ways(op: str, ranks: int) -> tuple[str, ...]:
    """In which the kernels of an op can move data.

    Raises:
        ValueError: another op.
    """
    if op == "all_gather_matmul":
        return "copy programs", "copy engines"
    if op == "matmul_reduce_scatter":
        return "one shot", "chunks"
    if op != "matmul_all_reduce":
        raise ValueError(f"closed forms are of the three fused matmuls, got {op!r}")
    return ("one shot",) if ranks <= 2 else ("one shot", "two shots")


def launched_way(
    op: str, chip: Chip, M: int, N: int, K: int, dtype: torch.dtype, ranks: int
) -> str:
    """In which the launch moves its data."""
    small, large = (*ways(op, ranks), "")[:2]
    if op == "all_gather_matmul":
        return large if gathers_by_copy_engines(M, K, dtype, ranks) else small
    if op == "matmul_reduce_scatter":
        return small if scatters_in_one_shot(chip, -(-M // ranks), N, dtype, ranks, None) else large
    return small if sums_in_one_shot(chip, M, N, ranks) else large


def _tiling_of(
    op: str, way: str, chip: Chip, M: int, N: int, K: int, dtype: torch.dtype, ranks: int
) -> Tiling:
    if way == launched_way(op, chip, M, N, K, dtype, ranks):
        return kernel_rates.tiling_of(op, chip, M, N, K, dtype, ranks)
    if way == "chunks":
        return chunk_tiling_for(chip, -(-M // ranks), N, dtype, ranks)
    if op == "all_gather_matmul":
        return gather_tiling_for(chip, M, N, dtype, ranks)
    return sum_tiling_for(chip, M, N, dtype, two_shots=way != "one shot")


def sent_bytes(
    op: str,
    M: int,
    N: int,
    K: int,
    dtype: str,
    ranks: int,
    way: str = "",
    wire: torch.dtype | None = None,
) -> float:
    """Through a rank's port; `way` and `wire` as in `fused_time`; without `way` in two shots."""
    partial, whole = (4, 4) if dtype == "float32" else (_PARTIAL, _WHOLE)
    if wire is not None:
        partial = wire.itemsize
    others = ranks - 1
    small, *_ = ways(op, ranks)
    if op == "all_gather_matmul":
        return M * K * _torch(dtype).itemsize * others / ranks
    if op == "matmul_reduce_scatter":
        return M * N * partial * others / ranks
    if way == small or ranks == 2:
        return M * N * partial * others
    return M * N * (partial + whole) * others / ranks


class AttentionWork(NamedTuple):
    """What a rank attends to.

    Attributes:
        queries, keys: its own queries, and all keys.
        seen: keys that a query sees, where `causal` the last one; half as many on the average.
        parts: in which the keys arrive.
        documents: packed ones with queries here.
    """

    batch: int
    heads: int
    head_dim: int
    queries: int
    keys: int
    seen: int
    parts: int
    documents: int
    causal: bool


class AttentionTimes(NamedTuple):
    """us of one forward: of weft's kernel, whose rate relative to a library's is next; of a
    library's on each part, and of merging these; of a library's on all keys, under an explicit mask
    if not all are seen.
    """

    fused: float
    rate: float
    parts: float
    merges: float
    gathered: float


# Bytes that merging a part passes over for an element of the output, and what the host takes to
# enqueue a library's attention and a merge, an estimate.
_MERGE_BYTES, _CALL_HOST_US = 10, 40.0


def library_attention(chip: Hardware) -> library.Attention:
    """Whose kernels torch's attention runs on such a chip."""
    return "cuDNN" if chip.chip in ("sm_90", "sm_100") else "FA2"


def attention_times(work: AttentionWork, chip: Hardware, dtype: str) -> AttentionTimes:
    """By the rates of FlashAttention-2, or where torch has cuDNN in its place, of that."""
    own = library_attention(chip)
    half = chip.flops["bfloat16"]  # that the library's rates are of
    slower = half / chip.flops.get(dtype, half)

    def us(keys: int, *, causal: bool, kind: library.Attention = own) -> float:
        return slower * library.attention_us(
            chip,
            kind,
            batch=work.batch,
            queries=work.queries,
            keys=max(keys, 1),
            heads=work.heads,
            head_dim=work.head_dim,
            causal=causal,
        )

    whole, part = us(work.seen, causal=work.causal), min(-(-work.keys // work.parts), work.seen)
    others = (work.seen / max(part, 1) - 1) * (0.5 if work.causal else 1.0)
    elements = work.batch * work.queries * work.heads * work.head_dim
    merge = chip.launch_us + library.moved_us(chip, _MERGE_BYTES * elements)
    parts = us(part, causal=work.causal) + others * us(part, causal=False)
    rate = kernel_rates.attention_rate(chip.chip, whole)
    return AttentionTimes(
        whole / rate,
        rate,
        max(parts, (work.parts + work.documents - 1) * _CALL_HOST_US),
        others * merge,
        whole
        if work.seen == work.keys and not work.causal
        else us(work.keys, causal=False, kind="masked"),
    )


def dtype_name(dtype: torch.dtype) -> str:
    """As `Hardware.flops` has it."""
    return "float8" if dtype.itemsize == 1 else str(dtype).removeprefix("torch.")


def _torch(dtype: str) -> torch.dtype:
    names = {"float8": "float8_e4m3fn", "tf32": "float32"}
    found: torch.dtype = getattr(torch, names.get(dtype, dtype))
    return found
