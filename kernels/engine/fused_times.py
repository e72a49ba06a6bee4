"""Times of weft's fused matmuls in closed form, for when playing a trace would take too long.

    all_gather_matmul, matmul_reduce_scatter     longer + 0.3 shorter + 15 us
    matmul_all_reduce                            matmul + link + 8 us

of the matmul's tiles in whole waves and the bytes on a link. The three constants are fitted to
virtual time: to `docs/scaling.md`'s rows for the H100, which a test compares.
"""

from __future__ import annotations

from weft.collectives.prices import library
from weft.collectives.prices.hardware import Hardware

# Rate of Triton's matmuls relative to the library's, over the published pairs of symm-mem-recipes
# (0.84 to 1.01) [fit], and the guess of `weft.kernels.engine.kernel_rates`.
TRITON_RATE = 0.95
# Bytes of a partial sum and of a whole one, in half precision: `weft.kernels.device.partial_sums`.
_PARTIAL, _WHOLE = 3, 2
_ONE_SHOT_BYTES = 128 << 10  # `chips.ONE_SHOT_BYTES`, of fp32 sums
_HIDDEN, _START_US, _SUM_START_US = 0.7, 15.0, 8.0


def fused_us(op: str, M: int, N: int, K: int, dtype: str, hardware: Hardware, ranks: int) -> float:
    """weft's triton engine; (M, K) @ (K, N) is one rank's product.

    Raises:
        ValueError: another op; more ranks than the hardware has.
    """
    matmul = library.matmul_us(hardware, M, N, K, dtype, TRITON_RATE, fill=0.0, saved=0.0)
    link = sent_bytes(op, M, N, K, dtype, ranks) / hardware.link_rate(ranks)
    if op == "matmul_all_reduce":
        return matmul + link + _SUM_START_US
    return max(matmul, link) + (1 - _HIDDEN) * min(matmul, link) + _START_US


def sent_bytes(op: str, M: int, N: int, K: int, dtype: str, ranks: int) -> float:
    """Through a rank's port."""
    size = {"float8": 1, "float32": 4}.get(dtype, 2)
    partial, whole = (4, 4) if dtype == "float32" else (_PARTIAL, _WHOLE)
    others = ranks - 1
    if op == "all_gather_matmul":
        return M * K * size * others / ranks
    if op == "matmul_reduce_scatter":
        return M * N * partial * others / ranks
    if op != "matmul_all_reduce":
        raise ValueError(f"fused_us is of the three fused matmuls, got {op!r}")
    if M * N * 4 <= _ONE_SHOT_BYTES or ranks == 2:
        return M * N * partial * others
    return M * N * (partial + whole) * others / ranks
