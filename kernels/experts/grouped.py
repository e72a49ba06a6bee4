"""grouped_matmul: each expert's rows times its weight, local and differentiable.

    rows (R, K)   | expert 0 | expert 1 | ..           y[p] = rows[p] @ w[expert of p]
    ends (E,)                ^          ^

As `torch._grouped_mm`, for every dtype: on a CPU a matmul for each expert.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from weft.collectives.ranks.traced import is_call_traced
from weft.kernels.engine.autocast import outside_autocast
from weft.kernels.engine.local_matmul import mm, on_cpu


def grouped_matmul(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """y[p] = x[p] @ w[e] for the rows p of expert e, those before ends[e] and after e - 1's.

    Args:
        x: (R, K).
        w: (E, K, N), of the dtype of x, any strides.
        ends: (E,) int32, never falling.

    Returns:
        (R, N), of x's dtype. Rows from ends[-1] on are 0. Gradients of x and w, twice
        differentiable.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[1] or x.dtype != w.dtype:
        raise ValueError(
            f"grouped_matmul takes x (R, K) and w (E, K, N) of one dtype, got {tuple(x.shape)} "
            f"{x.dtype} and {tuple(w.shape)} {w.dtype}"
        )
    if not x.is_floating_point():
        raise ValueError(f"grouped_matmul takes floating-point numbers, got {x.dtype}")
    if ends.shape != w.shape[:1]:
        raise ValueError(
            f"ends must hold one number for each of {len(w)} experts, got {tuple(ends.shape)}"
        )
    if not on_cpu(x):
        return torch._grouped_mm(x, w, offs=ends)
    y: torch.Tensor
    if is_call_traced(x):  # see `custom_ops`
        y = torch.ops.weft.grouped_matmul(x, w, ends)
    else:
        y = _GroupedMatmul.apply(x, w, ends)
    return y


def contracted(
    x: torch.Tensor, dy: torch.Tensor, like: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """The gradient of grouped_matmul's weights, in the layout of `like`."""
    dw: torch.Tensor = _Contracted.apply(x, dy, like, ends)
    return dw


def slices(ends: torch.Tensor) -> list[slice]:
    """The rows of each expert, as the host knows them on a CPU."""
    return [slice(start, stop) for start, stop in pairwise([0, *ends.tolist()])]


def experts_of_rows(ends: torch.Tensor, rows: int, first: int = 0) -> torch.Tensor:
    """The experts (rows, 1) of sorted rows first, first + 1, ..: -1 from ends[-1] on."""
    at = torch.arange(first, first + rows, dtype=ends.dtype, device=ends.device)
    expert = torch.searchsorted(ends, at, right=True)
    return expert.masked_fill(expert == len(ends), -1).unsqueeze(1)


def contract(into: torch.Tensor, x: torch.Tensor, dy: torch.Tensor) -> None:
    """into (K, N) = x (m, K)^T @ dy (m, N), in whatever layout `into` has."""
    if len(x) == 0:
        into.zero_()
    elif into.stride(0) == 1 and into.stride(1) != 1:
        mm(dy.t(), x, out=into.t())
    else:
        mm(x.t(), dy, out=into)


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w, ends)
        y = x.new_empty(len(x), w.shape[2])
        parts = slices(ends)
        for weight, part in zip(w, parts, strict=True):
            if part.stop > part.start:
                mm(x[part], weight, out=y[part])
        y[parts[-1].stop if parts else 0 :] = 0
        return y

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w, ends = ctx.saved_tensors
        needs_x, needs_w, _ = ctx.needs_input_grad
        dx = _GroupedMatmul.apply(dy, w.transpose(1, 2), ends) if needs_x else None
        return dx, contracted(x, dy, w, ends) if needs_w else None, None


class _Contracted(torch.autograd.Function):
    """dw[e] = x[rows of e]^T @ dy[rows of e], in the layout of `like`."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dy: torch.Tensor, like: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, dy, ends)
        dw = torch.empty_like(like)
        for into, part in zip(dw, slices(ends), strict=True):
            contract(into, x[part], dy[part])
        return dw

    @staticmethod
    def backward(ctx: Any, ddw: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, dy, ends = ctx.saved_tensors
        dx = _GroupedMatmul.apply(dy, ddw.transpose(1, 2), ends)
        return dx, _GroupedMatmul.apply(x, ddw, ends), None, None
