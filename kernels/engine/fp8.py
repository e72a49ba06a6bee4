"""Matmuls of scaled fp8: y = (x * scale_a) @ (w * scale_b), as in torch._scaled_mm.

x (.., K) and w (K, N) are torch.float8_e4m3fn. Scales are fp32: one for a whole operand, or one for
each row of x, (.., 1), and each column of w, (1, N). Products and sums are fp32; the scales are
applied to the sum, then the bias, then it is rounded once to `out_dtype`. Forward only: gradients
in fp8 would need scales of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from weft.kernels.engine.chips import chip_of

FP8 = torch.float8_e4m3fn
Quantize = Literal["fp8"]


@dataclass(frozen=True)
class Scaling:
    """Checked scales of one call.

    Attributes:
        rows: (.., 1), one for each row of x.
        columns: for each weight, () or (1, N).
        out_dtype: of the result.
    """

    rows: torch.Tensor
    columns: list[torch.Tensor]
    out_dtype: torch.dtype

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All scales."""
        return [self.rows, *self.columns]


def magnitudes(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude in each row of x (.., K): (.., 1)."""
    return x.abs().amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros(*x.shape[:-1], 1)


def quantized(x: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x in fp8, and the fp32 scales that undo it; `largest` is the magnitude that must fit.

    Example: [1., -4.] with largest 4. gives [112, -448] and 4 / 448.
    """
    # The scale of the least is a normal number: a subnormal one may be flushed to 0.
    scales = largest.float().clamp(min=2.0**-117) / torch.finfo(FP8).max
    return (x.float() / scales).to(FP8), scales


def check_quantize(quantize: str | None) -> None:
    """Raise ValueError unless it is None or a `Quantize`."""
    if quantize not in (None, "fp8"):
        raise ValueError(f'quantize must be None or "fp8", got {quantize!r}')


def scaling_of(
    op: str,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    others: Sequence[torch.Tensor | None],
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | Sequence[torch.Tensor] | None,
    out_dtype: torch.dtype | None,
) -> Scaling | None:
    """The scales of a call, checked; None for one that is not fp8.

    Args:
        others: bias and residual, which must not need gradients either.

    Raises:
        ValueError: scales without fp8, fp8 without scales, or scales of other shapes.
        NotImplementedError: another fp8 format, or a gradient is needed.
    """
    for each in (x, *weights):
        if not isinstance(each, torch.Tensor):
            raise ValueError(f"{op} multiplies tensors, got {type(each).__name__}")
    if x.dtype != FP8:
        if x.dtype.itemsize == 1 and x.is_floating_point():
            raise NotImplementedError(f"the only fp8 format {op} takes is {FP8}, got {x.dtype}")
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
            "scale_a and scale_b must be tensors, such as torch.tensor(1.0) for a whole operand"
        )
    if out_dtype not in (None, torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"out_dtype must be bfloat16, float16 or float32, got {out_dtype}")
    if len(columns) != len(weights):
        raise ValueError(
            f"scale_b must have one entry per weight, got {len(columns)} for {len(weights)}"
        )
    if scale_a.numel() != 1 and scale_a.shape != (*x.shape[:-1], 1):
        raise ValueError(
            f"scale_a must be one scale, or {(*x.shape[:-1], 1)}, one per row of x, got "
            f"{tuple(scale_a.shape)}"
        )
    for scale, w in zip(columns, weights, strict=True):
        if scale.numel() != 1 and scale.shape != (1, w.shape[-1]):
            raise ValueError(
                f"scale_b must be one scale, or {(1, w.shape[-1])}, one per column of w, got "
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
            f"{op} of {FP8} has no gradient: call it under torch.no_grad(), or with bfloat16"
        )
    rows = scale_a.reshape(-1)[:1].expand(*x.shape[:-1], 1) if scale_a.numel() == 1 else scale_a
    return Scaling(rows, columns, out_dtype or torch.bfloat16)


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
    """By torch._scaled_mm where it supports the call, else in fp32.

    It needs a GPU with fp8, sizes divisible by 16 and a w that is contiguous along K; its CPU
    version computes one element at a time.
    """
    K, N = w.shape
    if (
        x.is_cuda
        and chip_of(x.device).fp8
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
