"""Mixtures of experts: dispatch and combine alone, a product with one of them, and whole layers.

A rank's M tokens go to k of E experts on W ranks, evenly. A product's work is that of all copies of
rows; its memory the weights of those experts that get any. What crosses is a row for each copy, or,
where the kernels send a row to a rank once, for each rank: W (1 - (1 - 1 / W)^k) of them.
"""

from __future__ import annotations

import re

from weft.bench.published.rows import InexpressibleError, Row
from weft.bench.published.times import Time, has, row_fabric
from weft.collectives.prices import library
from weft.collectives.prices.hardware import Hardware
from weft.collectives.protocols import KERNEL_SHARE, KERNEL_US
from weft.kernels.engine.fused_times import TRITON_RATE

# [seen]: set with all rows in sight, none held out.
# Of a network card, of rows that kernels send through it one by one. [seen]
_RAIL_SHARE = 0.85
# What unfused layers take beside their kernels: the host waits for counts. [seen]
_COUNTS_US = 110.0
# Of the shorter of matmul and transfers, what is not hidden: as of `fused_times` of copy programs.
_SHOWN = 0.25
# Of products whose operands have a scale for each 128 numbers, to the library's. [seen]
_SCALED_RATE = 0.75
_SCALES = 1 + 4 / 128  # bytes of an e4m3 number and its share of a scale


def exchange_time(row: Row, hardware: Hardware) -> Time:
    """Dispatch or combine of M tokens a rank."""
    M, H = row.sizes("M", "N")
    combine, fast = "combine" in row.op.lower(), "low latency" in row.op.lower()
    fabric, W = row_fabric(row, hardware), row.ranks
    k = _top_k(row, 8)
    each = H * (2.0 if combine or row.element != "float8" else _SCALES)
    if not fast:  # a rank gets a row once
        nbytes = M * _mean_ranks(k, W) * (W - 1) / W * each
        rate = hardware.link_rate(W)
        us, how = KERNEL_US + nbytes / rate, "a row a rank, at the rate of long transfers"
        return Time("fused", us, how, bus_bytes=nbytes)
    here = W // fabric.hosts
    near, far = (M * k * each * part / W for part in (here - 1, W - here))
    link, rail = near / (fabric.port * KERNEL_SHARE), far / (fabric.rail * _RAIL_SHARE)
    how = f"a row for each expert: links {link:.0f} us, cards {rail:.0f} us"
    return Time("library", KERNEL_US + link + rail, how)


def expert_matmul_time(row: Row, hardware: Hardware) -> Time:
    """All tokens' rows times experts that are cut over tp ranks, ep sets of them: M, N, K whole."""
    M, N, K = row.sizes("M", "N", "K")
    stated = re.search(r"tp(\d+) ep(\d+) e(\d+) top(\d+)", row.what.lower())
    if not stated:
        raise InexpressibleError("how experts are cut is not stated")
    if has(row, "not optimi[sz]ed"):
        raise InexpressibleError("torch's own code that is not shown")
    tp, ep, experts, k = map(int, stated.groups())
    rows, W = M * k // ep, row.ranks
    matmul = _grouped_us(hardware, rows, experts // ep, N // tp, K, row.element)
    # With all experts on every rank tokens are gathered, else a row is pulled for each expert.
    moved = M if ep == 1 else rows
    link = moved * K * row.itemsize * (W - 1) / W / hardware.link_rate(W)
    return _overlapped(matmul, link, "weft pulls a row for each expert" if ep > 1 else "")


def expert_layer_time(row: Row, hardware: Hardware) -> Time:
    """Dispatch, gate and up, SwiGLU, down, combine: M tokens a rank, hidden N, K outside."""
    M, F, H = row.sizes("M", "N", "K")
    W, k, E = row.ranks, _top_k(row, 6), _expert_count(row)
    rows, own = M * k, E // W
    active = own * (1 - (1 - k / E) ** (M * W))
    fused = has(row, r"mega ?(moe|kernel)")
    # weft's matmuls are of half precision; libraries' of what the row tells.
    element = "bfloat16" if fused else row.element
    rate = TRITON_RATE if fused else _SCALED_RATE if element == "float8" else 1.0
    up = _grouped_us(hardware, rows, active, 2 * F, H, element, rate)
    down = _grouped_us(hardware, rows, active, H, F, element, rate)
    copies = k if fused else _mean_ranks(k, W)
    crossing = M * copies * (W - 1) / W * H / hardware.link_rate(W)
    there, back = crossing * _SCALES, crossing * 2
    if fused:
        first, second = _overlapped(up, there), _overlapped(down, back)
        how = f"{first.how}; {second.how}; in half precision, which takes twice as long"
        return Time("fused", first.us + second.us, how)
    between = library.moved_us(hardware, rows * F * (4 + 1.0))
    apart = there + back + up + down + between
    calls = 4 * KERNEL_US + (0.0 if "graph" in row.text else _COUNTS_US)
    how = f"matmuls {up + down:.0f} us, exposed communication {there + back:.0f} us"
    return Time("library", apart + calls, f"{how}, SwiGLU {between:.0f} us, calls {calls:.0f} us")


def _overlapped(matmul: float, link: float, why: str = "") -> Time:
    """weft's kernel: the longer of both, and a share of the other."""
    us = max(matmul, link) + _SHOWN * min(matmul, link) + KERNEL_US
    how = f"matmul {matmul:.0f} us, links {link:.0f} us, exposed {us - matmul:.0f} us"
    return Time("fused", us, "; ".join(filter(None, (how, why))))


def _grouped_us(
    hardware: Hardware,
    rows: int,
    experts: float,
    N: int,
    K: int,
    dtype: str,
    rate: float = TRITON_RATE,
) -> float:
    """rows (rows, K), evenly of `experts` experts, times theirs; at least their weights' bytes."""
    size = 1 if dtype == "float8" else 2
    padded = max(experts, 1) * -(-rows / max(experts, 1) // 64) * 64
    us = library.matmul_us(hardware, int(padded), N, K, dtype, rate)
    return max(us, library.moved_us(hardware, size * (experts * K * N + rows * (K + N))))


def _mean_ranks(k: int, W: int) -> float:
    """To how many of W ranks k of their experts are, on average."""
    return W * (1 - (1 - 1 / W) ** k)


def _top_k(row: Row, usual: int) -> int:
    found = re.search(r"top-?(\d+)", row.text)
    return int(found[1]) if found else usual


def _expert_count(row: Row) -> int:
    """As stated, or those of the model that is named."""
    found = re.search(r"(\d+) experts", row.text)
    if found:
        return int(found[1])
    for name, experts in (("flash", 256), ("pro", 384)):  # DeepSeek V4
        if has(row, rf"\b{name}\b"):
            return experts
    raise InexpressibleError("the number of experts is not stated")
