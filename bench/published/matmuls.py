"""Matmuls, fused with a collective or before one, and feed-forward layers of them."""

from __future__ import annotations

import re
from collections.abc import Callable

from weft.bench.published.rows import InexpressibleError, Row, op_words
from weft.bench.published.sums import stated_collective
from weft.bench.published.times import Time, has, is_library, row_fabric
from weft.collectives import protocols
from weft.collectives.prices import library
from weft.collectives.prices.hardware import Hardware
from weft.collectives.protocols import HOST_US, Collective
from weft.kernels.engine.fused_times import TRITON_RATE, fused_us


def matmul_time(row: Row, hardware: Hardware) -> Time:
    """One GPU's, by the library or by Triton."""
    M, N, K = row.sizes("M", "N", "K")
    own = has(row, r"triton|weft|kraken|helion")
    rate = TRITON_RATE if own else 1.0
    us = library.matmul_us(hardware, M, N, K, row.element, rate)
    return Time("fused" if own else "library", us, f"tiles in waves at {rate:.2f} of cuBLAS",
                 flops=2.0 * M * N * K)  # fmt: skip


def fused_matmul_time(op: str) -> Callable[[Row, Hardware], Time]:
    """A matmul with a collective: apart, by async-TP, or fused."""
    collective: Collective = protocols.COLLECTIVE_OF[op]

    def time(row: Row, hardware: Hardware) -> Time:
        (M,) = row.sizes("M")
        N, K = _features(row, op)
        fabric, element = row_fabric(row, hardware), row.element
        matmul = library.matmul_us(hardware, M, N, K, element)
        nbytes = M * K * row.itemsize if op == "all_gather_matmul" else M * N * max(row.itemsize, 2)
        flops = 2.0 * M * N * K
        library_us = matmul + protocols.nccl_us(collective, nbytes, fabric)
        if has(row, r"async[- ]?tp|symm_mem fused|torch fused"):
            if op == "matmul_all_reduce":
                raise InexpressibleError("torch has no such fused op")
            us = library.async_tp_us(op, M, N, K, element, hardware, row.ranks)
            how = f"{row.ranks} chunks, each a matmul and a copy that the host enqueues"
            return Time("library", us, how, flops, 0.0, library_us)
        if is_library(row) and not has(row, r"flux|triton_dist|comet"):
            _, moved, way = stated_collective(row, collective, nbytes, fabric)
            us = matmul + moved
            how = f"matmul {matmul:.1f} us + {moved:.1f} us by {way}, or the host's time"
            us = us if "graph" in row.text else max(us, _EAGER_US)
            return Time("library", us, how, flops, 0.0, library_us)
        if fabric.hosts > 1:
            raise InexpressibleError("weft's kernels span one host")
        if has(row, r"nvls|multimem"):
            return _product_by_switch(row, op, (M, N, K), hardware, library_us)
        us = fused_us(op, M, N, K, element, hardware, row.ranks)
        return Time("fused", us, "weft's kernel, in closed form", flops, 0.0, library_us)

    return time


def _features(row: Row, op: str) -> tuple[int, int]:
    """N and K of one rank: of a model's feed-forward layer, where the note has its widths."""
    if row.N or row.K:
        N, K = row.sizes("N", "K")
        return N, K
    hidden, ffn, ranks = widths(row)
    return (2 * ffn // ranks, hidden) if op == "all_gather_matmul" else (hidden, ffn // ranks)


def widths(row: Row) -> tuple[int, int, int]:
    """Hidden and feed-forward width of a model as the note has them, and the ranks."""
    hidden, ffn = (re.search(rf"{name}\s+(\d+)", row.text) for name in ("hidden", "ffn"))
    if not hidden or not ffn:
        raise InexpressibleError("N and K are not stated")
    return int(hidden[1]), int(ffn[1]), row.ranks


def _product_by_switch(
    row: Row, op: str, sizes: tuple[int, int, int], hardware: Hardware, library_us: float
) -> Time:
    """Tiles that go to the switch as they are made: the longer of both, and a wave of tiles."""
    M, N, K = sizes
    matmul = library.matmul_us(hardware, M, N, K, row.element, TRITON_RATE)
    collective, nbytes = protocols.COLLECTIVE_OF[op], M * N * max(row.itemsize, 2)
    moved = protocols.switch_us(collective, nbytes, row_fabric(row, hardware), in_graph=True)
    us = max(matmul, moved) + 0.3 * min(matmul, moved) + HOST_US
    return Time("fused", us, "the longer of matmul and switch, and 0.3 of the other",
                 2.0 * M * N * K, 0.0, library_us)  # fmt: skip


# What torch's host takes to enqueue a matmul and a collective, outside a graph. [fit]
_EAGER_US = 81.0


def feed_forward_time(row: Row, hardware: Hardware) -> Time:
    """A feed-forward layer: up and gate, SwiGLU, down; sequence-parallel, or with an all-reduce."""
    (M,) = row.sizes("M")
    hidden, ffn, ranks = (
        (row.size("N"), row.size("K"), row.ranks) if row.N and row.K else widths(row)
    )
    share = -(-ffn // ranks)
    fabric, element = row_fabric(row, hardware), row.element
    up = library.matmul_us(hardware, M, 2 * share, hidden, element)
    down = library.matmul_us(hardware, M, hidden, share, element)
    gate = library.moved_us(hardware, 3 * M * share * 2)
    nbytes = M * hidden * 2
    if "all_reduce" in op_words(row.op):
        moved = protocols.nccl_us("all_reduce", nbytes, fabric)
        ops: tuple[tuple[str, int, int], ...] = (("matmul_all_reduce", hidden, share),)
        first = up
    else:
        moved = sum(
            protocols.nccl_us(op, nbytes, fabric) for op in ("all_gather", "reduce_scatter")
        )
        ops = (("all_gather_matmul", 2 * share, hidden), ("matmul_reduce_scatter", hidden, share))
        first = 0.0
    if is_library(row):
        return Time("library", up + gate + down + moved, f"matmuls {up + down:.0f} us, "
                     f"collectives {moved:.0f} us, SwiGLU {gate:.0f} us")  # fmt: skip
    us = sum(fused_us(op, M, N, K, element, hardware, ranks) for op, N, K in ops)
    return Time("fused", first + gate + us, "weft's kernels, in closed form")


def independent_time(row: Row, hardware: Hardware) -> Time:
    """A matmul and a collective that do not depend on each other."""
    M, N, K = row.sizes("M", "N", "K")
    stated = re.search(r"all-gather of (\d+) mib", row.text)
    if not stated:
        raise InexpressibleError("the size of the all-gather is not stated in the row")
    matmul = library.matmul_us(hardware, M, N, K, row.element)
    nbytes = int(stated[1]) * 2**20 * row.ranks
    moved = protocols.nccl_us("all_gather", nbytes, row_fabric(row, hardware))
    both = max(matmul, moved) if has(row, "overlap") else matmul + moved
    how = f"matmul {matmul:.0f} us, all-gather of as much a rank {moved:.0f} us"
    return Time("library", both, how, 2.0 * M * N * K)
