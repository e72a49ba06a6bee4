"""Errors of the fused matmuls against float64, beside those of torch.matmul on the whole operands.

Root mean squares over a result, on the same inputs. `_SLACK` is for chance, and for the order of
additions: the three engines and torch add in four different orders. oneDNN, which multiplies fp32
on the CPUs where it is quicker, adds over all of K in one go.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from needs import needs_interpreter

import weft
from weft import sim
from weft.collectives import resolve
from weft.kernels.engine import local_matmul

M, N, K = 32, 64, 2048
_SLACK = {torch.float32: 1.25, torch.bfloat16: 1.08, torch.float16: 1.08}
_ONEDNN_SLACK = 2.5  # AVX2: 2.3


def matrix(rows: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).to(dtype)


def error(y: torch.Tensor, exact: torch.Tensor) -> float:
    return float((y.double() - exact).square().mean().sqrt())


def error_ratios(engine: Any, dtype: torch.dtype) -> dict[str, float]:
    """How many times as large as that of torch.matmul the error of each op is."""
    group = resolve(None)
    rank, W = group.rank, group.world_size
    x, w = matrix(M, K, dtype, 1), matrix(K, N, dtype, 2)
    exact, plain = x.double() @ w.double(), x @ w
    rows, columns = x.chunk(W)[rank], x.chunk(W, 1)[rank].contiguous()
    part = w.chunk(W)[rank]
    mine, pair = slice(rank * M // W, (rank + 1) * M // W), slice(2 * rank, 2 * rank + 2)
    # The weights of all ranks, two each, and the gradients of what they give.
    ws, dys = matrix(N, K, dtype, 3), matrix(M, K, dtype, 4)
    own = rows[:, :N].clone().requires_grad_()
    with weft.engine(engine):
        got = {
            "all_gather_matmul": (weft.all_gather_matmul(rows, w), plain, exact),
            "matmul_reduce_scatter": (
                weft.matmul_reduce_scatter(columns, part), plain[mine], exact[mine]
            ),
            "matmul_all_reduce": (weft.matmul_all_reduce(columns, part), plain, exact),
        }  # fmt: skip
        ys = weft.all_gather_matmul(own, list(ws.chunk(2 * W, 1)[pair]))
        torch.autograd.backward(ys, dys.chunk(2 * W, 1)[pair])
    assert own.grad is not None
    exact_dx = (dys.double() @ ws.double().t())[mine]
    got["gradient of x"] = own.grad, (dys @ ws.t())[mine], exact_dx
    return {
        op: error(y, exactly) / error(plainly, exactly) for op, (y, plainly, exactly) in got.items()
    }


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("engine", ["host", "generic", "triton"])
@pytest.mark.slow_where(engine="triton", dtype=[torch.float32, torch.float16])
def test_errors_are_those_of_one_matmul(engine: str, dtype: torch.dtype) -> None:
    with patch.object(local_matmul, "onednn_is_quicker", lambda: False):
        ratios = error_ratios(engine, dtype)
    assert all(ratio <= _SLACK[dtype] for ratio in ratios.values()), ratios


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN")
@pytest.mark.ranks(2)
def test_errors_of_onednn() -> None:
    with patch.object(local_matmul, "onednn_is_quicker", lambda: True):
        ratios = error_ratios("host", torch.float32)
    assert all(ratio <= _ONEDNN_SLACK for ratio in ratios.values()), ratios


def test_slices_stay_with_the_library_that_takes_them() -> None:
    x, w = torch.ones(256, 512), torch.ones(512, 512)
    with patch.object(local_matmul, "onednn_is_quicker", lambda: True):
        assert local_matmul.allocates(x, w) and local_matmul.allocates(x, w.t())
        assert local_matmul.allocates(x[:, :256], w[:256])
        assert not local_matmul.allocates(x, w[:, :256])
        assert not local_matmul.allocates(x[:, :256], w.t()[:256])


@pytest.mark.parametrize("gain", [0.5, 2.0, 9.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_partial_sums_are_not_rounded(monkeypatch: Any, dtype: torch.dtype, gain: float) -> None:
    # The three ways in which CPUs of different speeds in bf16 make them.
    monkeypatch.setattr(local_matmul, "bfloat16_gain", lambda: gain)
    for rows, columns, inner in [(5, 3, 7), (64, 48, 1000), (0, 4, 3), (4, 3, 0)]:
        x, w = matrix(rows, inner, dtype, 1), matrix(columns, inner, dtype, 2).t()
        plus = torch.ones(rows, columns, dtype=torch.float32)
        exact = x.double() @ w.double()
        got = local_matmul.partial_mm(x, w)
        into = local_matmul.partial_mm(x, w, plus=plus, out=plus)
        assert got.dtype == into.dtype == torch.float32
        assert into is plus
        near = {"rtol": 2.0**-15, "atol": 2.0**-15 * max(inner, 1) ** 0.5}
        torch.testing.assert_close(got.double(), exact, **near)
        torch.testing.assert_close(into.double(), exact + 1, **near)
        torch.testing.assert_close(
            local_matmul.mm(x, w).double(), exact.to(dtype).double(), rtol=0.01, atol=0.01
        )


@pytest.mark.parametrize("gain", [0.5, 2.0, 9.0])
def test_overflows_are_infinite(monkeypatch: Any, gain: float) -> None:
    monkeypatch.setattr(local_matmul, "bfloat16_gain", lambda: gain)
    x, w = torch.ones(4, 3, dtype=torch.bfloat16), torch.ones(3, 2, dtype=torch.bfloat16)
    x[0, 1], x[1, 1], x[2, 1] = torch.inf, -torch.inf, torch.nan
    assert torch.equal(
        local_matmul.partial_mm(x, w).nan_to_num(7.0), (x.float() @ w.float()).nan_to_num(7.0)
    )


@needs_interpreter
@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_offsets_beyond_int32(op: str) -> None:
    # Rows so far apart that the last one lies 2^31 elements from the first: memory that is never
    # touched between them is never there.
    far, W = torch.empty((1 << 31) + (1 << 20), dtype=torch.float16), 2
    rows, K, N = 6, 16, 5

    def spread(source: torch.Tensor, start: int) -> torch.Tensor:
        count = source.shape[0]
        pitch = (1 << 31) // (count - 1) + 1
        view = far.as_strided(source.shape, (pitch, 1), start)
        assert (count - 1) * pitch >= 1 << 31
        return view.copy_(source)

    x, w = matrix(rows, K, torch.float16, 1), matrix(K, N, torch.float16, 2)

    def call(rank: int, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with weft.engine("triton"):
            return getattr(weft, op)(x, w)

    near = sim.run(W, lambda rank: call(rank, x, w))
    rows_apart = spread(x, 0), spread(w, 1 << 10)
    columns_apart = spread(x.t(), 1 << 11).t(), spread(w.t(), 1 << 12).t()
    for operands in (rows_apart, columns_apart):
        apart = sim.run(W, lambda rank, operands=operands: call(rank, *operands), races=False)
        for got, want in zip(apart, near, strict=True):
            assert torch.equal(got, want)


@needs_interpreter
def test_offsets_of_keys_beyond_int32() -> None:
    # As above: of three heads, or of six rows, the last one lies 2^31 elements from the first.
    far, D = torch.empty((1 << 31) + (1 << 20), dtype=torch.float16), 16

    def spread(x: torch.Tensor, start: int) -> torch.Tensor:
        _, heads, rows, _ = x.shape
        pitch = (1 << 31) // (heads - 1 or rows - 1) + 16
        strides = (0, pitch, D, 1) if heads > 1 else (0, 0, pitch, 1)
        return far.as_strided(x.shape, strides, start).copy_(x)

    def decode(rank: int, *qkv: torch.Tensor) -> torch.Tensor:
        with weft.engine("triton"):
            return weft.flash_decode(*qkv, torch.tensor([11]), block_size=2)

    def ring(rank: int, *qkv: torch.Tensor) -> torch.Tensor:
        with weft.engine("triton"):
            return weft.ring_attention(*qkv, sizes=[6, 6])

    for call, heads in ((decode, 3), (ring, 3), (ring, 1)):
        q, k, v = (
            matrix(heads * 6, D, torch.float16, seed).view(1, heads, 6, D) for seed in range(3)
        )
        near = sim.run(2, lambda rank, call=call, x=(q, k, v): call(rank, *x))
        x = q, spread(k, 0), spread(v, 1 << 10)
        apart = sim.run(2, lambda rank, call=call, x=x: call(rank, *x), races=False)
        for got, want in zip(apart, near, strict=True):
            assert torch.equal(got, want), (call.__name__, heads)
