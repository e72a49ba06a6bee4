"""What a user has without weft: matmuls, attention and norms by libraries, in closed form.

Times in us, of kernels one after another on a GPU; `weft.collectives.protocols` has the
collectives. Rates are shares of the data sheet's. Few constants, each of a library and not of a
shape; those marked [fit] are fitted by `tools.published_fit` to one half of the rows of `weft bench
published`, and held against the other.

Sources
  [MAMF]  as in `hardware`: the best that any matmul reaches, which is `Hardware.sustained`
  [FA3]   Shah et al., arXiv 2407.08608, figures 5 and 6: forward to 740, backward to 580 TFLOP/s on
          an H100 in half precision; FlashAttention-2 there to 370 and 320
  [FA2]   Dao, arXiv 2307.08691, figures 4 to 6: to 225 TFLOP/s on an A100
  [FA4]   FlashAttention-4: forward to 1613 TFLOP/s on a B200, 1.3 times cuDNN 9.13; backward rates
          there are estimates
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from weft.collectives import protocols
from weft.collectives.prices.hardware import Hardware

# Tiles that a library's matmul chooses from: rows, columns, and the rate of a core on them relative
# to the largest.
LIBRARY_TILES = ((128, 256, 1.0), (128, 128, 0.9), (64, 128, 0.75), (64, 64, 0.6))
# It splits K where tiles are fewer than this part of the cores.
_SPLITS, _SPLIT_BELOW = (1, 2, 4, 8), 3
# Of [MAMF]'s best, what matmuls of random numbers keep within the chip's power. [fit]
UNDER_POWER = 0.92
# A part held to less power multiplies slower by this power of it. [fit] on an H100's 500 of 700 W
_POWER_EXPONENT = 0.65
# Of the idle cores in a last wave, the share that a library's other tiles win back. [fit]
_WAVES_SAVED = 0.5
_FILL_US = 4.0  # the first operands come, the last tile leaves
_HBM_SHARE = (
    0.9  # of the data sheet's bandwidth, read by a kernel; the norms of TokenWeave's figures
)

Attention = Literal["FA2", "FA3", "FA4", "cuDNN", "masked"]  # masked: torch's, by a given mask
# Share of the data sheet's half-precision rate, forward and backward, of long sequences that see
# all keys, heads of 128. [FA2], [FA3], [FA4]
_ATTENTION = {
    ("FA2", "sm_80"): (0.71, 0.60),
    ("FA2", "sm_90"): (0.38, 0.33),
    ("FA3", "sm_90"): (0.67, 0.57),
    ("cuDNN", "sm_90"): (0.67, 0.57),
    ("FA4", "sm_100"): (0.70, 0.5),
    ("cuDNN", "sm_100"): (0.55, 0.42),
}
_OTHER_ATTENTION = (0.4, 0.3)
_HEAD_RATE = {64: 0.77, 128: 1.0, 256: 1.12}
# Tokens at which the rate is half of that: the ends of a sequence; a mask's diagonal as well.
_HALF_RATE, _HALF_RATE_CAUSAL = 100, 500


def held_to(hardware: Hardware, watts: float, rated: float = 700.0) -> Hardware:
    """The chip where its power is less than it is rated for."""
    slower = min(1.0, watts / rated) ** _POWER_EXPONENT
    return replace(
        hardware, name=f"{hardware.name} {watts:.0f} W", sustained=hardware.sustained * slower
    )


def matmul_us(
    hardware: Hardware,
    M: int,
    N: int,
    K: int,
    dtype: str,
    rate: float = 1.0,
    *,
    fill: float = _FILL_US,
    saved: float = _WAVES_SAVED,
) -> float:
    """(M, K) @ (K, N) by cuBLAS or hipBLASLt: the best of its tiles and splits of K, in waves.

    Args:
        rate: of another compiler's kernels, relative to the library's.
        fill: us before the first operands have come, and until the last tile has left.
        saved: of the idle cores in a last wave, the share that is used all the same.

    Raises:
        ValueError: the chip has no rate for `dtype`.
    """
    core = hardware.core_flops_per_us(dtype) * UNDER_POWER * rate
    best = float("inf")
    for rows, columns, share in LIBRARY_TILES:
        whole = -(-M // rows) * -(-N // columns)
        for split in _SPLITS if _SPLIT_BELOW * whole <= hardware.cores else (1,):
            full = split * whole / hardware.cores
            idle = math.ceil(full) - full
            waves = full + idle * (1 - saved if full > 1 else 1)
            dots = waves * 2 * rows * columns * -(-K // split) / (core * share)
            sums = 8 * M * N * (split - 1) / _hbm(hardware) if split > 1 else 0.0
            best = min(best, dots + sums)
    size = {"float8": 1, "float32": 4, "tf32": 4, "float64": 8}.get(dtype, 2)
    touched = size * (M * K + K * N) + max(size, 2) * M * N
    return fill + max(best, touched / _hbm(hardware))


def attention_us(
    hardware: Hardware,
    kind: Attention,
    *,
    batch: int,
    queries: int,
    keys: int,
    heads: int,
    head_dim: int,
    causal: bool,
    backward: bool = False,
) -> float:
    """Attention of flash-attention's or cuDNN's kernels, one pass.

    Under a causal mask with as many keys as queries half of the flops are left. Backward has 2.5
    times those of forward.
    """
    share = _ATTENTION.get((kind, hardware.chip), _OTHER_ATTENTION)[backward]
    share *= _HEAD_RATE.get(head_dim, 1.0 if head_dim > 64 else 0.77)
    half = _HALF_RATE_CAUSAL if causal else _HALF_RATE
    share *= keys / (keys + half)
    flops = attention_flops(batch, queries, keys, heads, head_dim, causal, backward)
    return _FILL_US + flops / (hardware.flops["bfloat16"] / 1e6 * share)


# Passes over the fp32 output of a step that torch's pointwise ops take to merge it.
MERGE_PASSES = 6


def zigzag_attention_us(
    hardware: Hardware,
    kind: Attention,
    fabric: protocols.Fabric,
    *,
    batch: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    backward: bool = False,
) -> dict[str, float]:
    """Causal attention over a sequence whose ranks have equal work (zigzag order), one pass of a
    library's kernels: in a ring behind its sends ("ring"), or after an all-gather of the keys.
    """
    W = fabric.ranks
    whole = attention_us(
        hardware, kind, batch=batch, queries=tokens, keys=tokens, heads=heads, head_dim=head_dim,
        causal=True, backward=backward,
    )  # fmt: skip
    merge = moved_us(hardware, 4.0 * MERGE_PASSES * batch * tokens // W * heads * head_dim)
    sent = protocols.nccl_us("all_gather", 4 * batch * tokens * kv_heads * head_dim, fabric)
    return {"ring": max(whole / W + W * merge, sent), "all-gather": whole / W + sent}


def attention_flops(
    batch: int, queries: int, keys: int, heads: int, head_dim: int, causal: bool, backward: bool
) -> float:
    """As papers count them."""
    flops = 4.0 * batch * queries * keys * heads * head_dim
    return flops * (0.5 if causal else 1.0) * (2.5 if backward else 1.0)


# What torch's async-TP takes of the host for a chunk, its copy, its barrier and its matmul. [fit]
_CHUNK_HOST_US = 31.0
_CHUNK_US = 8.0  # of the GPU, beside the matmul. [fit]


def async_tp_us(
    op: str,
    M: int,
    N: int,
    K: int,
    dtype: str,
    hardware: Hardware,
    ranks: int,
    *,
    in_graph: bool = False,
) -> float:
    """torch's fused all_gather_matmul or matmul_reduce_scatter: a chunk a rank, one after another,
    each a matmul beside a copy; of a reduce-scatter, the last copy and a sum are left.
    """
    rows = -(-M // ranks)
    chunk = matmul_us(hardware, rows, N, K, dtype) + _CHUNK_US
    copied = rows * (K if op == "all_gather_matmul" else N) * 2 / hardware.link_rate(ranks)
    us = ranks * max(chunk, copied, 0.0 if in_graph else _CHUNK_HOST_US)
    if op == "matmul_reduce_scatter":
        us += copied + moved_us(hardware, 2 * N * (M + rows))
    return us


def unfused_us(
    op: str, M: int, N: int, K: int, dtype: str, hardware: Hardware, ranks: int
) -> dict[str, float]:
    """What a user of torch has for a fused matmul, by name, in a graph or behind other work.

    A matmul of (M, K) @ (K, N) by the library, and the collective on the result or the input in
    half precision: NCCL's, the switch's where there is one, torch's one or two shots; or async-TP.
    """
    collective = protocols.COLLECTIVE_OF[op]
    fabric, matmul = hardware.fabric(ranks), matmul_us(hardware, M, N, K, dtype)
    nbytes = protocols.moved_bytes(op, M, N, K, 2)
    ways = {"NCCL": protocols.nccl_us(collective, nbytes, fabric)}
    if fabric.multicast:
        ways["NVLS"] = protocols.switch_us(collective, nbytes, fabric, in_graph=True)
    if collective == "all_reduce":
        ways["one shot"] = protocols.one_shot_us(nbytes, fabric, in_graph=True)
        ways["two shots"] = protocols.two_shot_us(nbytes, fabric, in_graph=True)
    found = {name: matmul + us for name, us in ways.items()}
    if collective != "all_reduce":
        found["async-TP"] = async_tp_us(op, M, N, K, dtype, hardware, ranks, in_graph=True)
    return found


def moved_us(hardware: Hardware, nbytes: float) -> float:
    """A pointwise kernel or a norm that reads and writes `nbytes`."""
    return nbytes / _hbm(hardware)


def _hbm(hardware: Hardware) -> float:
    return hardware.hbm_bandwidth * _HBM_SHARE / 1e6
