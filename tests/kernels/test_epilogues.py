"""Activations, residuals and scaled fp8 of the fused matmuls, on all engines, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_matmul_ops import ENGINES, check, tensor
from torch.nn import functional

import weft
from weft.collectives.ranks.chunks import chunk_sizes

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "swiglu")


def applied(zs: list[torch.Tensor], activation: str) -> list[torch.Tensor]:
    if activation == "swiglu":
        return [functional.silu(zs[0]) * zs[1]]
    how = {
        "relu": torch.relu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda z: functional.gelu(z, approximate="tanh"),
        "silu": functional.silu,
    }[activation]
    return [how(z) for z in zs]


def activated_body(engine: Any, dtype: torch.dtype) -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    K, N, sizes = 40, 18, [7 + 3 * r for r in range(W)]  # two steps of the kernels' loops
    for activation in ACTIVATIONS:
        xs = [tensor((m, K), dtype, 10 + r, False) for r, m in enumerate(sizes)]
        # The second weight lies the other way round.
        ws = [[tensor((K, N), dtype, 100 * i + r, i == 1) / 2 for r in range(W)] for i in range(2)]
        bs = [[tensor((N,), dtype, 50 + 9 * i + r, False) for r in range(W)] for i in range(2)]
        x = xs[rank].clone().requires_grad_()
        w = [each[rank].clone().requires_grad_() for each in ws]
        b = [each[rank].clone().requires_grad_() for each in bs]
        with weft.engine(engine):
            with torch.no_grad():
                plain = weft.all_gather_matmul(x, w, bias=b, activation=activation)
            ys = weft.all_gather_matmul(x, w, bias=b, activation=activation)
            ys, plain = ([ys], [plain]) if activation == "swiglu" else (ys, plain)
            assert all(torch.equal(*pair) for pair in zip(ys, plain, strict=True))
            dys = [tensor(tuple(y.shape), dtype, 900 + i, False) for i, y in enumerate(ys)]
            torch.autograd.backward(ys, dys)
            if activation == "relu":  # lets NaN through
                spoilt = torch.where(torch.arange(len(x))[:, None] == 2, torch.nan, x.detach())
                y = weft.all_gather_matmul(spoilt, w[0].detach(), activation="relu")
                assert y.isnan().all(1).nonzero().flatten().tolist() == [2, sizes[0] + 2]
        xs64 = [each.double().requires_grad_() for each in xs]
        w64 = [[each.double().requires_grad_() for each in row] for row in ws]
        b64 = [[each.double().requires_grad_() for each in row] for row in bs]
        for r in range(W):
            zs = [torch.cat(xs64) @ w64[i][r] + b64[i][r] for i in range(2)]
            want = applied(zs, activation)
            sum((y * d.double()).sum() for y, d in zip(want, dys, strict=True)).backward()
            if r == rank:
                for y, expected in zip(ys, want, strict=True):
                    check(f"{activation} y", y, expected.detach(), K, 1)
        # dz is rounded once more on the way to the gradients.
        check(f"{activation} dx", x.grad, xs64[rank].grad, 4 * N * W, 2 * W)
        for i in range(2):
            check(f"{activation} dw{i}", w[i].grad, w64[i][rank].grad, 4 * sum(sizes), 2)
            check(f"{activation} db{i}", b[i].grad, b64[i][rank].grad, 4 * sum(sizes), 2)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.slow_where(engine="triton", dtype=torch.bfloat16)
def test_activations(ranks: Any, virtual_ranks: Any, engine: str, dtype: torch.dtype) -> None:
    run = virtual_ranks if engine == "triton" else ranks
    run(2, activated_body, engine, dtype)


def residual_body(engine: Any, dtype: torch.dtype) -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    M, K, N = 21, 12, 18
    xs = [tensor((M, K), dtype, 10 + r, False) for r in range(W)]
    ws = [tensor((K, N), dtype, 30 + r, False) for r in range(W)]
    bias, whole = tensor((N,), dtype, 50, False), tensor((M, N), dtype, 60, False)
    want = sum(x.double() @ w.double() for x, w in zip(xs, ws, strict=True))
    want = want + bias.double() + whole.double()
    parts, whole_dy = chunk_sizes(M, W), tensor((M, N), dtype, 70, False)
    want_dx = whole_dy.double() @ ws[rank].double().t()
    for op, cut in (
        (weft.matmul_reduce_scatter, lambda t: t.split(parts)[rank]),
        (weft.matmul_all_reduce, lambda t: t),
    ):
        residual = cut(whole).clone().requires_grad_()
        x = xs[rank].clone().requires_grad_()
        dy = cut(whole_dy)
        with weft.engine(engine):
            y = op(x, ws[rank], bias=bias, residual=residual)
            y.backward(dy)
        check(op.__name__, y, cut(want), W * K, W)
        assert torch.equal(residual.grad, dy)
        check(f"{op.__name__} dx", x.grad, want_dx, N, 1)
        with pytest.raises(ValueError, match="residual must be like the result"):
            op(x, ws[rank], residual=residual[:, 1:])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_residuals(ranks: Any, virtual_ranks: Any, engine: str, dtype: torch.dtype) -> None:
    run = virtual_ranks if engine == "triton" else ranks
    run(2, residual_body, engine, dtype)


def fp8_body(engine: Any, by_row: bool) -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    M, K, N, fp8 = 19, 40, 24, torch.float8_e4m3fn
    xs = [tensor((M, K), torch.float32, 10 + r, False).to(fp8) for r in range(W)]
    ws = [tensor((K, N), torch.float32, 30 + r, False).to(fp8) for r in range(W)]
    rows, columns = ((M, 1), (1, N)) if by_row else ((), ())
    sa = [tensor(rows, torch.float32, 50 + r, False).abs() + 0.5 for r in range(W)]
    sb = [tensor(columns, torch.float32, 70 + r, False).abs() + 0.5 for r in range(W)]
    wide = [x.double() * s.double() for x, s in zip(xs, sa, strict=True)]
    narrow = [w.double() * s.double() for w, s in zip(ws, sb, strict=True)]
    total = sum(x @ w for x, w in zip(wide, narrow, strict=True))
    scales = {"scale_a": sa[rank], "scale_b": sb[rank]}
    with weft.engine(engine):
        for dtype in (torch.bfloat16, torch.float32):
            bias = tensor((N,), dtype, 90, False)
            options = {**scales, "out_dtype": dtype, "bias": bias}
            y = weft.all_gather_matmul(xs[rank], ws[rank], **options)
            assert y.dtype == dtype
            first = torch.cat(wide) @ narrow[rank] + bias.double()
            check("gather", y, first, 16 * K, 1)
            # Two weights with factors and biases of their own, as two results and as one.
            pair = {
                "scale_a": sa[rank], "scale_b": [sb[rank], 0.25 * sb[1 - rank]],
                "out_dtype": dtype, "bias": [bias, -bias],
            }  # fmt: skip
            second = torch.cat(wide) @ narrow[1 - rank] * 0.25 - bias.double()
            both = [ws[rank], ws[1 - rank]]
            for got, want in zip(
                weft.all_gather_matmul(xs[rank], both, **pair), (first, second), strict=True
            ):
                check("gather of two", got, want, 16 * K, 1)
            gated = weft.all_gather_matmul(xs[rank], both, activation="swiglu", **pair)
            check("swiglu", gated, functional.silu(first) * second, 256 * K, 1)
            want = total + bias.double()
            y = weft.matmul_all_reduce(xs[rank], ws[rank], **options)
            check("all-reduce", y, want, 16 * W * K, W)
            y = weft.matmul_reduce_scatter(xs[rank], ws[rank], **options)
            check("reduce-scatter", y, want.split(chunk_sizes(M, W))[rank], 16 * W * K, W)
        spoilt = torch.where(torch.arange(M)[:, None] == 2, torch.nan, xs[rank].float()).to(fp8)
        y = weft.all_gather_matmul(spoilt, ws[rank], **scales)
        assert y.isnan().all(1).nonzero().flatten().tolist() == [2, M + 2]
        bias = torch.zeros(N, dtype=torch.bfloat16, requires_grad=True)
        with pytest.raises(NotImplementedError, match="has no gradient"):
            weft.all_gather_matmul(xs[rank], ws[rank], bias=bias, **scales)
        with pytest.raises(ValueError, match="need scale_a and scale_b"):
            weft.matmul_all_reduce(xs[rank], ws[rank])
        with pytest.raises(ValueError, match="must be tensors"):
            weft.matmul_all_reduce(xs[rank], ws[rank], scale_a=1.0, scale_b=sb[rank])  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"out_dtype must be .* got torch\.int32"):
            weft.matmul_all_reduce(xs[rank], ws[rank], **scales, out_dtype=torch.int32)
        wrong: list[tuple[str, dict[str, Any]]] = [
            ("one entry per weight, got 2", {"scale_b": [sb[rank], sb[rank]]}),
            (r"scale_a must be one scale, or \(19, 1\)", {"scale_a": torch.ones(M)}),
            (r"scale_b must be one scale, or \(1, 24\)", {"scale_b": torch.ones(N)}),
            (r"must be torch\.float32 on cpu", {"scale_b": torch.ones(1).double()}),
        ]
        for message, given in wrong:
            with pytest.raises(ValueError, match=message):
                weft.matmul_all_reduce(xs[rank], ws[rank], **(scales | given))
        with pytest.raises(ValueError, match=r"go with x and w of torch\.float8_e4m3fn"):
            weft.matmul_all_reduce(xs[rank].float(), ws[rank].float(), **scales)
        with pytest.raises(NotImplementedError, match="the only fp8 format"):
            other = xs[rank].float().to(torch.float8_e5m2)
            weft.matmul_all_reduce(other, ws[rank], **scales)
        with pytest.raises(ValueError, match="multiplies tensors, got list"):
            weft.matmul_all_reduce(xs[rank], [ws[rank]], **scales)  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("by_row", [False, True], ids=["one scale", "by row"])
@pytest.mark.slow_where(engine="triton", by_row=False)
def test_scaled_fp8(ranks: Any, virtual_ranks: Any, engine: str, by_row: bool) -> None:
    run = virtual_ranks if engine == "triton" else ranks
    run(2, fp8_body, engine, by_row)
