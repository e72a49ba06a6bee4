"""Local matmuls that the ops share: the fastest library on a CPU, weight gradients, checks.

torch.mm runs fp32 on a CPU in MKL, which does not use AVX-512 on processors of other makers. The
oneDNN that torch ships is 2.2 times as fast there (AMD Zen 5, one core: 250 against 110 GFLOP/s).
The gain is measured once and kept: with AVX2 it is 1.1, not worth oneDNN's larger errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch

from weft.collectives.cost import bfloat16_gain, onednn_is_quicker
from weft.collectives.ranks.traced import is_traced
from weft.kernels.engine.autocast import outside_autocast
from weft.kernels.engine.chips import INTERPRETER, chip_of

SumOp = Literal["sum", "avg"]

# Below this many flops oneDNN's call, 10 us against 2 us of torch.mm, costs more than it gains.
_ONEDNN_FLOPS = 4e6


def sum_dtype(x: torch.Tensor) -> torch.dtype:
    """Dtype in which values of x, or partial products that make them up, are added up."""
    narrow = x.dtype.is_floating_point and x.dtype.itemsize < 4
    return torch.float32 if narrow else x.dtype


def in_sum_dtype(x: torch.Tensor) -> torch.Tensor:
    """x in `sum_dtype`."""
    return x.to(sum_dtype(x))


def is_half(x: torch.Tensor) -> bool:
    """Whether x is of a 16-bit dtype, so that its sums are wider."""
    return x.dtype in (torch.float16, torch.bfloat16)


def on_cpu(x: torch.Tensor) -> bool:
    """Whether x is on a CPU, and of no virtual rank that stands for a GPU."""
    return x.device.type == "cpu" and chip_of(x.device) is INTERPRETER


def partials_cost(x: torch.Tensor) -> bool:
    """Whether `partial_mm` of x takes longer than `mm`, which rounds."""
    return is_half(x) and on_cpu(x)


def _is_slow(x: torch.Tensor) -> bool:
    # CPU libraries without instructions for half precision do it scalar by scalar: 400 times slower
    # than fp32 in fp16 (2048^3 on one AVX-512 core: 60 s against 0.16 s), 5 times in bf16.
    if not is_half(x) or not on_cpu(x):
        return False
    return x.dtype == torch.float16 or bfloat16_gain() < 1


def allocates(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether `mm(x, w)` allocates its result, so that `out` costs a copy."""
    return _is_slow(x) or _in_onednn(x, w)


def _in_onednn(x: torch.Tensor, w: torch.Tensor) -> bool:
    return (
        x.dtype == torch.float32
        and 2 * x.shape[0] * x.shape[1] * w.shape[1] >= _ONEDNN_FLOPS
        and on_cpu(x)  # after that: it takes a us
        # A slice of a matrix goes to oneDNN's reference implementation: 1,000 times slower on AVX2.
        and (w.is_contiguous() or w.t().is_contiguous())
        and onednn_is_quicker()
    )


def mm(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    plus: torch.Tensor | None = None,
) -> torch.Tensor:
    """x (M, K) @ w (K, N), plus bias (N,) or `plus` (M, N), into `out`, which may be `plus`.

    On a CPU without half-precision instructions, half precision is computed in fp32.
    """
    added = bias if plus is None else plus
    if _is_slow(x):
        wide = x.float(), w.float()
        value = torch.mm(*wide) if added is None else torch.addmm(added.float(), *wide)
        return value.to(x.dtype) if out is None else out.copy_(value)
    if _in_onednn(x, w):
        linear = torch.ops.mkldnn._linear_pointwise
        if plus is None:
            value = linear(x, w.t(), bias, "none", [], "")
        else:
            value = linear.binary(x, plus, w.t(), None, "add")
        return value if out is None else out.copy_(value)
    if added is not None:
        return torch.addmm(added, x, w, out=out) if out is not None else torch.addmm(added, x, w)
    return torch.mm(x, w, out=out) if out is not None else torch.mm(x, w)


def partial_mm(
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    plus: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x (M, K) @ w (K, N) (+ plus) in `sum_dtype`. `out` may be `plus`.

    Half precision is not rounded, so that a sum of such products is rounded once.
    """
    if not is_half(x):
        return mm(x, w, plus=plus, out=out)
    if plus is not None:
        return torch.add(partial_mm(x, w), plus, out=out)
    if not on_cpu(x) and torch.version.hip is None:
        product = torch.mm(x, w, out_dtype=torch.float32, out=out)
    elif on_cpu(x) and x.dtype == torch.bfloat16 and bfloat16_gain() > _TWO_HALVES:
        # A CPU's bf16 matmul adds in fp32 but rounds its result: a second one gives the remainder.
        rounded = torch.mm(x, w)
        rest = torch.addmm(rounded, x, w, beta=-1)
        # After an overflow the remainder is infinity - infinity.
        product = torch.add(rounded.float(), rest.nan_to_num_(0.0), out=out)
    else:
        product = mm(x.float(), w.float(), out=out)
    return product


# Two bf16 matmuls and their sum take as long as one fp32 matmul that is this many times slower.
_TWO_HALVES = 3.0


class _PartialMatmul(torch.autograd.Function):
    """x (*batch, K) @ w (K, N) -> (*batch, N) in `sum_dtype`; gradients are those of `matmul`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return partial_mm(as_rows(x), w).view(*x.shape[:-1], w.shape[1])

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, w = ctx.saved_tensors
        dy, (needs_x, needs_w) = dy.to(x.dtype), ctx.needs_input_grad
        dx = matmul(dy, w.t()) if needs_x else None
        dw = matmul(as_rows(x).t(), as_rows(dy)) if needs_w else None
        return dx, dw


def conjugated(*saved: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The saved factors of a product as its gradients need them: conjugated if they are complex."""
    return tuple(x.conj() for x in saved)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x (*batch, K) as (M, K); sizes may be 0 or symbolic."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def partial_matmul(
    x: torch.Tensor, w: torch.Tensor, wire_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Differentiable x (*batch, M, K) @ w (K, N), in `sum_dtype`, to travel in `wire_dtype`."""
    if not is_half(x) or (wire_dtype == x.dtype and partials_cost(x)):
        return in_sum_dtype(matmul(x, w))
    product: torch.Tensor = _PartialMatmul.apply(x, w)
    return product


def matmul(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Differentiable x (*batch, M, K) @ w (K, N) (+ bias), in fp32 where half precision is slow."""
    if _is_slow(x):
        y = torch.matmul(x.float(), w.float())
        return (y if bias is None else y + bias.float()).to(x.dtype)
    y = torch.matmul(x, w)
    return y if bias is None else y + bias


def finished(
    total: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """total + bias + residual in the dtype of `total`, then rounded to `dtype`. Differentiable."""
    if bias is not None:
        total = total + bias
    if residual is not None:
        total = total + residual
    return total.to(dtype)


class WeightGrad:
    """dw = sum over row chunks of x_chunk^T @ dy_chunk, in the memory layout of `w`.

    nn.Linear passes its weight as a transposed view, and a gradient in another layout would be
    copied when it is accumulated. Several chunks are added up in `sum_dtype`.
    """

    def __init__(self, w: torch.Tensor, chunks: int = 1) -> None:
        self._like, self._mm = w, partial_mm if chunks > 1 else mm
        self._transposed = w.stride(0) == 1 and w.stride(1) != 1
        self._sum: torch.Tensor | None = None

    def add(self, x: torch.Tensor, dy: torch.Tensor) -> None:
        """Add the rows x (m, K), dy (m, N)."""
        a, b = (dy.t(), x) if self._transposed else (x.t(), dy)
        # oneDNN allocates its result.
        into = None if self._sum is None or _in_onednn(a, b) else self._sum
        self._sum = self._mm(a, b, plus=self._sum, out=into)

    def include(self, dw: torch.Tensor) -> None:
        """Add a gradient (K, N) of other rows, whose memory may become that of the sum."""
        part = dw.t() if self._transposed else dw
        self._sum = part.to(sum_dtype(part)) if self._sum is None else self._sum.add_(part)

    def result(self) -> torch.Tensor:
        """The sum so far, (K, N)."""
        if self._sum is None:
            return torch.zeros_like(self._like)
        dw = self._sum.to(self._like.dtype)
        return dw.t() if self._transposed else dw


def needs_gradient(operands: Iterable[torch.Tensor | None]) -> bool:
    """Whether autograd is to record what is made of the operands."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands)


def no_view(x: torch.Tensor) -> torch.Tensor:
    """x in the same memory, for a function to return: autograd lets nobody write to a view."""
    if is_traced(x) or not x._is_view():
        return x
    return x.new_empty(0).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())


def check_operands(
    x: torch.Tensor,
    K: int,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    out_dtype: torch.dtype,
) -> None:
    """Raise ValueError unless x (.., K) @ each weight (+ its bias of `out_dtype`) is a matmul."""
    if not (x.is_floating_point() or x.is_complex()):
        raise ValueError(f"x and w must be of a floating-point dtype, got {x.dtype}")
    if not weights:
        raise ValueError("w must be a weight or a list of at least one")
    if len(biases) != len(weights):
        raise ValueError(f"bias must have one entry per weight: {len(biases)} for {len(weights)}")
    for weight, bias in zip(weights, biases, strict=True):
        if weight.ndim != 2 or weight.shape[0] != K:
            raise ValueError(
                f"w must be (K, N) with K = {K}, got {tuple(weight.shape)} for x "
                f"{tuple(x.shape)}; pass an nn.Linear's weight as weight.t()"
            )
        for name, other, dtype in (("w", weight, x.dtype), ("bias", bias, out_dtype)):
            if other is not None and (other.dtype, other.device) != (dtype, x.device):
                raise ValueError(
                    f"{name} must be {dtype} on {x.device}, like x, got {other.dtype} on "
                    f"{other.device}"
                )
        if bias is not None and bias.shape != weight.shape[1:]:
            raise ValueError(
                f"bias must be (N,) with N = {weight.shape[1]}, got {tuple(bias.shape)}"
            )


def check_residual(
    residual: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise ValueError unless `residual` can be added to a result of that shape and dtype."""
    if residual is not None and (
        (tuple(residual.shape), residual.dtype, residual.device) != (tuple(shape), dtype, device)
    ):
        raise ValueError(
            f"residual must be like the result, {tuple(shape)} {dtype} on {device}, got "
            f"{tuple(residual.shape)} {residual.dtype} on {residual.device}"
        )


def check_wire(wire_dtype: torch.dtype | None, dtype: torch.dtype) -> None:
    """Raise ValueError unless partial sums of a result of `dtype` can travel in `wire_dtype`."""
    if wire_dtype is not None and (
        wire_dtype not in (torch.float32, torch.bfloat16, torch.float16)
        or dtype.itemsize > 4
        or dtype.is_complex
    ):
        raise ValueError(
            f"wire_dtype must be torch.float32, torch.bfloat16 or torch.float16, for results of at "
            f"most 32 bits, got {wire_dtype} for a result of {dtype}: None lets the engine choose"
        )


def check_sum(reduce_op: str) -> None:
    """Raise ValueError unless a matmul can be fused with `reduce_op`."""
    if reduce_op not in ("sum", "avg"):
        raise ValueError(f'reduce_op must be "sum" or "avg", got {reduce_op!r}')
