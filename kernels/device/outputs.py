"""From the fp32 sums of a tile to what is stored: scales, bias, activation, each applied once.

The torch side of the activations is `weft.kernels.engine.epilogues`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from weft.kernels.device import tiles


class Outputs(NamedTuple):
    """Where the outputs of a gathered matmul go, and what is done to the sums before.

    Fields: `ys`, (M, N_i) for each weight, contiguous, a single one for swiglu; `sums`, the
    activation's arguments, for each weight, or None; `biases` (N_i,) or None, and `column_scales`
    (Scales), for each weight.
    """

    ys: Any
    sums: Any
    biases: Any
    column_scales: Any


@triton.jit
def times_rows(acc, scale_ptrs, inside_m):
    """acc with each row multiplied by the fp32 scale it has a pointer to, if there are any."""
    if scale_ptrs is not None:
        acc *= tl.load(scale_ptrs, mask=inside_m, other=0.0)[:, None]
    return acc


@triton.jit
def _times_columns(acc, scales, start_n, N):
    offs_n = start_n + tl.arange(0, acc.shape[1])
    factors = tl.load(scales.ptr + offs_n.to(tl.int64) * scales.stride, mask=offs_n < N, other=0.0)
    return acc * factors[None, :]


@triton.jit
def times_columns(acc, scales, start_n, N):
    """acc with each column multiplied by its fp32 scale, if there are any."""
    if scales.ptr is not None:
        if acc.shape[1] > 128:
            # For the reason in `halves`: a thread with a whole row would hold all scales too.
            left, right = tiles.halves(acc)
            left = _times_columns(left, scales, start_n, N)
            acc = tiles.beside(left, _times_columns(right, scales, start_n + acc.shape[1] // 2, N))
        else:
            acc = _times_columns(acc, scales, start_n, N)
    return acc


@triton.jit
def with_bias(acc, bias_ptr, start_n, N):
    """acc + bias[columns of the tile], if there is one."""
    if bias_ptr is not None:
        offs_n = start_n + tl.arange(0, acc.shape[1])
        bias = tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    return acc


@triton.jit
def finish_tile(
    out,  # Outputs
    acc,  # (BLOCK_M, ..) fp32 sums of the weight
    second,  # those of the second weight, for swiglu
    rows,  # TileRows
    start_n,
    N,
    WEIGHT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WIDEST: tl.constexpr = 128,
):
    """Store activation(acc * scales + bias) and, where wanted, its argument first."""
    if acc.shape[1] > WIDEST:
        # In quarters: with erf or exp a whole tile does not fit in registers.
        for quarter in tl.static_range(4):
            part, start = _quarter(acc, quarter), start_n + quarter * (acc.shape[1] // 4)
            other = _quarter(second, quarter) if ACTIVATION == "swiglu" else second
            _store_product(out, part, other, rows, start, N, WEIGHT, ACTIVATION)
    else:
        _store_product(out, acc, second, rows, start_n, N, WEIGHT, ACTIVATION)


@triton.jit
def _quarter(values, QUARTER: tl.constexpr):
    """That quarter of the columns."""
    left, right = tiles.halves(values)
    left, right = tiles.halves(left if QUARTER < 2 else right)
    return left if QUARTER % 2 == 0 else right


@triton.jit
def _store_product(
    out, acc, second, rows, start_n, N, WEIGHT: tl.constexpr, ACTIVATION: tl.constexpr
):
    acc = _argument(out, acc, rows, start_n, N, WEIGHT)
    if ACTIVATION == "swiglu":
        second = _argument(out, second, rows, start_n, N, 1)
    acc = activated(acc, second, ACTIVATION)
    tiles.store_rows(out.ys[WEIGHT], acc, rows.numbers, rows.inside, start_n, N, N, 1)


@triton.jit
def _argument(out, acc, rows, start_n, N, WEIGHT: tl.constexpr):
    """acc * scales + bias, stored if it is wanted."""
    if out.column_scales[WEIGHT].ptr is not None:  # then rows have scales, too
        acc = times_rows(acc, rows.scales, rows.inside)
        acc = times_columns(acc, out.column_scales[WEIGHT], start_n, N)
    acc = with_bias(acc, out.biases[WEIGHT], start_n, N)
    if out.sums is not None:
        tiles.store_rows(out.sums[WEIGHT], acc, rows.numbers, rows.inside, start_n, N, N, 1)
    return acc


@triton.jit
def _sigmoid(z):
    # Not tl.sigmoid, for the reason that `zeros` is not tl.zeros.
    return 1.0 / (1.0 + tl.exp(-z))


@triton.jit
def activated(z, second, ACTIVATION: tl.constexpr):
    """activation(z), or silu(z) * second; fp32 in and out. NaN stays NaN."""
    if ACTIVATION == "relu":
        y = tl.where(z < 0.0, 0.0, z)
    elif ACTIVATION == "gelu":
        y = 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # z (1 + tanh u) / 2 = z sigmoid(2u), with u = sqrt(2 / pi) (z + 0.044715 z^3)
        y = z * _sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
    elif ACTIVATION == "silu":
        y = z / (1.0 + tl.exp(-z))
    elif ACTIVATION == "swiglu":
        y = z / (1.0 + tl.exp(-z)) * second
    else:
        tl.static_assert(ACTIVATION is None, "an activation that the kernels do not know")
        y = z
    return y
