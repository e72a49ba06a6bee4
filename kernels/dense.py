"""Local matmuls that the ops share: where CPU libraries need help, and weight gradients."""

from __future__ import annotations

import torch


def wire_dtype(x: torch.Tensor) -> torch.dtype:
    """Dtype in which the host engine writes partial sums of `x @ w` for its peers."""
    return torch.float32 if _is_slow(x) else x.dtype


def _is_slow(x: torch.Tensor) -> bool:
    # CPU libraries without fp16 instructions do it scalar by scalar: 400 times slower than fp32
    # (2048^3 on one AVX-512 core: 60 s against 0.16 s).
    return x.dtype == torch.float16 and x.device.type == "cpu"


def mm(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    accumulate: bool = False,
) -> torch.Tensor:
    """x (M, K) @ w (K, N) (+ bias (N,), or + out itself with `accumulate`), into `out` if given."""
    if _is_slow(x):
        x, w = x.float(), w.float()
        added = out if accumulate else bias
        value = x @ w if added is None else torch.addmm(added.float(), x, w)
        return value.half() if out is None else out.copy_(value)
    if accumulate:
        assert out is not None
        return out.addmm_(x, w)
    if bias is not None:
        return torch.addmm(bias, x, w, out=out) if out is not None else torch.addmm(bias, x, w)
    return torch.mm(x, w, out=out) if out is not None else torch.mm(x, w)


def matmul(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Differentiable x (*batch, M, K) @ w (K, N) (+ bias), in fp32 where fp16 is slow."""
    if _is_slow(x):
        y = torch.matmul(x.float(), w.float())
        return (y if bias is None else y + bias.float()).half()
    y = torch.matmul(x, w)
    return y if bias is None else y + bias


class WeightGrad:
    """dw = sum over row chunks of x_chunk^T @ dy_chunk, in the memory layout of `w`.

    An nn.Linear hands its weight over as a transposed view; a gradient of another layout would be
    copied once more when it is accumulated.
    """

    def __init__(self, w: torch.Tensor) -> None:
        self._transposed = w.stride(0) == 1 and w.stride(1) != 1
        shape = w.shape[::-1] if self._transposed else w.shape
        self._buffer = torch.empty(shape, dtype=wire_dtype(w), device=w.device)
        self._dtype = w.dtype
        self._empty = True

    def add(self, x: torch.Tensor, dy: torch.Tensor) -> None:
        """Add the rows x (m, K), dy (m, N)."""
        a, b = (dy.t(), x) if self._transposed else (x.t(), dy)
        mm(a, b, out=self._buffer, accumulate=not self._empty)
        self._empty = False

    def result(self) -> torch.Tensor:
        """The sum so far, (K, N)."""
        if self._empty:
            self._buffer.zero_()
        dw = self._buffer.to(self._dtype)
        return dw.t() if self._transposed else dw
