"""Matmuls of scaled fp8: y = (x * scale_a) @ (w * scale_b), as torch._scaled_mm means it.

x (.., K) and w (K, N) are torch.float8_e4m3fn. Factors are fp32: one for all of an operand, or one
for each row of x, (.., 1), and each column of w, (1, N). Products and sums are fp32; factors come
after the sum, then the bias, then one rounding to `out_dtype`. Forward only: a gradient of fp8
numbers would itself have to be scaled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Scaling:
    """Checked factors of one call.

    Attributes:
        rows: (.., 1), one factor a row of x.
        columns: of each weight, () or (1, N).
        out_dtype: of the result.
    """

    rows: torch.Tensor
    columns: list[torch.Tensor]
    out_dtype: torch.dtype


def magnitudes(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude in each row of x (.., K): (.., 1)."""
    return x.abs().amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros(*x.shape[:-1], 1)


def quantized(x: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x in fp8, and the fp32 factors that give it back; `largest` is the magnitude that must fit.

    Example: [1., -4.] with largest 4. gives [112, -448] and 4 / 448.
    """
    factors = largest.float().clamp(min=torch.finfo(torch.float32).tiny) / torch.finfo(FP8).max
    return (x.float() / factors).to(FP8), factors


def scaling_of(
    op: str,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    others: Sequence[torch.Tensor | None],
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | Sequence[torch.Tensor] | None,
    out_dtype: torch.dtype | None,
) -> Scaling | None:
    """The factors of a call, checked; None for one that is not of fp8.

    Args:
        others: bias and residual: of `out_dtype`, and a gradient of theirs is none of ours either.

    Raises:
        ValueError: factors without fp8, fp8 without factors, or of other shapes.
        NotImplementedError: another format of fp8; a gradient is wanted.
    """
    for each in (x, *weights):
        if not isinstance(each, torch.Tensor):
            raise ValueError(f"{op} multiplies tensors, got {type(each).__name__}")
    if x.dtype != FP8:
        if x.dtype.itemsize == 1 and x.is_floating_point():
            raise NotImplementedError(f"of the fp8 formats {op} takes {FP8}, got {x.dtype}")
        if scale_a is not None or scale_b is not None or out_dtype not in (None, x.dtype):
            raise ValueError(
                f"scale_a, scale_b and out_dtype go with x and w of {FP8}, got {x.dtype}"
            )
        return None
    if scale_a is None or scale_b is None:
        raise ValueError(f"x and w of {FP8} need scale_a and scale_b")
    columns = list(scale_b) if isinstance(scale_b, Sequence) else [scale_b]
    if not all(isinstance(scale, torch.Tensor) for scale in (scale_a, *columns)):
        raise ValueError(
            "scale_a and scale_b must be tensors, torch.tensor(1.0) one factor for all"
        )
    if out_dtype not in (None, torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"out_dtype must be bfloat16, float16 or float32, got {out_dtype}")
    if len(columns) != len(weights):
        raise ValueError(
            f"scale_b must hold one entry a weight, got {len(columns)} for {len(weights)}"
        )
    if scale_a.numel() != 1 and scale_a.shape != (*x.shape[:-1], 1):
        raise ValueError(
            f"scale_a must be one factor, or {(*x.shape[:-1], 1)}, one a row of x, got "
            f"{tuple(scale_a.shape)}"
        )
    for scale, w in zip(columns, weights, strict=True):
        if scale.numel() != 1 and scale.shape != (1, w.shape[-1]):
            raise ValueError(
                f"scale_b must be one factor, or {(1, w.shape[-1])}, one a column of w, got "
                f"{tuple(scale.shape)}"
            )
    for scale in (scale_a, *columns):
        if scale.dtype != torch.float32 or scale.device != x.device:
            raise ValueError(
                f"scale_a and scale_b must be torch.float32 on {x.device}, got {scale.dtype} on "
                f"{scale.device}"
            )
    tensors = (x, *weights, scale_a, *columns, *others)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise NotImplementedError(
            f"{op} of {FP8} has no gradient: call it under torch.no_grad(), or on bfloat16"
        )
    rows = scale_a.reshape(-1)[:1].expand(*x.shape[:-1], 1) if scale_a.numel() == 1 else scale_a
    return Scaling(rows, columns, out_dtype or torch.bfloat16)


def refuse_traced(scaling: Scaling | None) -> None:
    """Raise NotImplementedError if a call that is traced has factors."""
    if scaling is not None:
        raise NotImplementedError(
            f"calls of {FP8} are not traced: take them out of what is compiled, with "
            f"torch.compiler.disable"
        )


def scaled_products(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    scaling: Scaling,
) -> list[torch.Tensor]:
    """(x * rows) @ (w * columns) + bias on one rank, for every weight."""
    return [
        _scaled_mm(x, w, scaling.rows, columns, bias, scaling.out_dtype)
        for w, columns, bias in zip(weights, scaling.columns, biases, strict=True)
    ]


def scaled_partial(x: torch.Tensor, w: torch.Tensor, scaling: Scaling) -> torch.Tensor:
    """(x * rows) @ (w * columns) in fp32, for a sum over ranks."""
    return _scaled_mm(x, w, scaling.rows, scaling.columns[0], None, torch.float32)


def _scaled_mm(
    x: torch.Tensor,
    w: torch.Tensor,
    rows: torch.Tensor,
    columns: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """By torch._scaled_mm where it takes the call, else in fp32.

    It needs a GPU with fp8, sizes that 16 divides and a w that is contiguous along K; on a CPU it
    computes number by number.
    """
    K, N = w.shape
    if (
        x.is_cuda
        and torch.cuda.get_device_capability(x.device) >= (8, 9)
        and K % 16 == N % 16 == 0
        and x.numel() > 0
        and out_dtype == torch.bfloat16
    ):
        y = torch._scaled_mm(
            x.reshape(-1, K).contiguous(),
            w if w.stride(0) == 1 else w.t().contiguous().t(),
            rows.reshape(-1, 1).contiguous(),
            columns.reshape(1, -1).expand(1, N).contiguous(),
            bias=bias,
            out_dtype=out_dtype,
        )
        return y.view(*x.shape[:-1], N)
    y = x.float() @ w.float()
    y *= rows
    y *= columns
    if bias is not None:
        y += bias
    return y.to(out_dtype)
