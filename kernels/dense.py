"""Local matmuls that the ops share: the quickest library on a CPU, weight gradients, checks.

torch.mm runs fp32 on a CPU in MKL, which uses no AVX-512 on other makers' processors: oneDNN, which
torch brings along, is 2.2 times as quick there (AMD Zen 5, one core: 250 against 110 GFLOP/s). The
quicker of the two is measured once and kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from weft.collectives.cost import onednn_is_quicker

SumOp = Literal["sum", "avg"]

# Below this many flops the call costs more than the library gains: 10 us against 2 us for torch.mm.
_ONEDNN_FLOPS = 4e6


def wire_dtype(x: torch.Tensor) -> torch.dtype:
    """Dtype in which the host engine writes partial sums of `x @ w` for its peers."""
    return torch.float32 if _is_slow(x) or x.dtype.itemsize == 1 else x.dtype


def _is_slow(x: torch.Tensor) -> bool:
    # CPU libraries without fp16 instructions do it scalar by scalar: 400 times slower than fp32
    # (2048^3 on one AVX-512 core: 60 s against 0.16 s).
    return x.dtype == torch.float16 and x.device.type == "cpu"


def allocates(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether `mm(x, w)` makes a new tensor, so that `out` costs a copy."""
    return _is_slow(x) or _in_onednn(x, w)


def _in_onednn(x: torch.Tensor, w: torch.Tensor) -> bool:
    return (
        x.dtype == torch.float32
        and x.device.type == "cpu"
        and 2 * x.shape[0] * x.shape[1] * w.shape[1] >= _ONEDNN_FLOPS
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
    """x (M, K) @ w (K, N), + bias (N,), or + plus (M, N): into `out` if given, which may be `plus`.

    Half precision on a CPU without instructions for it is computed in fp32, and comes out in fp32
    where `out` is of that dtype.
    """
    added = bias if plus is None else plus
    if _is_slow(x):
        x, w = x.float(), w.float()
        value = x @ w if added is None else torch.addmm(added.float(), x, w)
        return value.half() if out is None else out.copy_(value)
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


def matmul(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Differentiable x (*batch, M, K) @ w (K, N) (+ bias), in fp32 where fp16 is slow."""
    if _is_slow(x):
        y = torch.matmul(x.float(), w.float())
        return (y if bias is None else y + bias.float()).half()
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


def sum_dtype(x: torch.Tensor) -> torch.dtype:
    """Dtype in which to add to a sum of values of x, before it is rounded once."""
    return torch.promote_types(x.dtype, torch.float32)


class WeightGrad:
    """dw = sum over row chunks of x_chunk^T @ dy_chunk, in the memory layout of `w`.

    An nn.Linear hands its weight over as a transposed view; a gradient of another layout would be
    copied once more when it is accumulated.
    """

    def __init__(self, w: torch.Tensor) -> None:
        self._like = w
        self._transposed = w.stride(0) == 1 and w.stride(1) != 1
        self._sum: torch.Tensor | None = None

    def add(self, x: torch.Tensor, dy: torch.Tensor) -> None:
        """Add the rows x (m, K), dy (m, N)."""
        a, b = (dy.t(), x) if self._transposed else (x.t(), dy)
        if self._sum is None:
            out = torch.empty(a.shape[0], b.shape[1], dtype=wire_dtype(x), device=x.device)
            self._sum = mm(a, b, out=out) if not _in_onednn(a, b) else mm(a, b)
        else:
            self._sum = mm(a, b, plus=self._sum, out=None if _in_onednn(a, b) else self._sum)

    def result(self) -> torch.Tensor:
        """The sum so far, (K, N)."""
        if self._sum is None:
            return torch.zeros_like(self._like)
        dw = self._sum.to(self._like.dtype)
        return dw.t() if self._transposed else dw


def check_operands(
    x: torch.Tensor,
    K: int,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    out_dtype: torch.dtype,
) -> None:
    """Raise ValueError unless x (.., K) @ each weight (+ its bias of `out_dtype`) is a matmul."""
    if not weights:
        raise ValueError("w must be a weight or a list of at least one")
    if len(biases) != len(weights):
        raise ValueError(f"bias must hold one entry a weight, got {len(biases)} for {len(weights)}")
    for weight, bias in zip(weights, biases, strict=True):
        if weight.ndim != 2 or weight.shape[0] != K:
            raise ValueError(
                f"w must be (K, N) with K = {K}, got {tuple(weight.shape)} for x "
                f"{tuple(x.shape)}; pass an nn.Linear's weight as weight.t()"
            )
        for name, other, dtype in (("w", weight, x.dtype), ("bias", bias, out_dtype)):
            if other is not None and (other.dtype, other.device) != (dtype, x.device):
                raise ValueError(
                    f"{name} must be {dtype} on {x.device}, as x is, got {other.dtype} on "
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
            f"residual must be as the result, {tuple(shape)} {dtype} on {device}, got "
            f"{tuple(residual.shape)} {residual.dtype} on {residual.device}"
        )


def check_sum(reduce_op: str) -> None:
    """Raise ValueError unless `reduce_op` is one that a matmul can be fused with."""
    if reduce_op not in ("sum", "avg"):
        raise ValueError(f'reduce_op must be "sum" or "avg", got {reduce_op!r}')
