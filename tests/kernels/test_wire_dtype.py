"""Partial sums that travel in the dtype that a caller asks for, on all engines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from needs import needs_interpreter

import weft
from weft import sim
from weft.collectives import resolve, workspace
from weft.collectives.ranks.chunks import chunk_sizes, offsets

K, N = 48, 40  # of each rank; the kernels' tiles are wider
HALVES = (torch.bfloat16, torch.float16)


def operands(rank: int, M: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7 + rank)
    x = torch.randn(M, K, generator=generator).to(dtype)
    return x, torch.randn(K, N, generator=generator).to(dtype)


def oracle(
    W: int, M: int, dtype: torch.dtype, wire: torch.dtype, plus: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact sum in float64, and the error that rounding allows, element by element.

    Each rank's term is rounded to `wire`; a process group also rounds each sum to it, W - 1 times.
    Products of half precision are exact in fp32, and their sums lose at most K of its ulps.
    """
    terms = [x.double() @ w.double() for x, w in (operands(r, M, dtype) for r in range(W))]
    sizes = torch.stack([term.abs() for term in terms]).sum(0)
    exact = torch.stack(terms).sum(0) + plus
    unit = torch.finfo(wire).eps / 2
    widest = torch.stack(
        [x.double().abs() @ w.double().abs() for x, w in (operands(r, M, dtype) for r in range(W))]
    ).sum(0)
    error = sizes * unit * W + widest * K * 2**-24
    error += (exact.abs() + plus.abs() + sizes * unit * W) * torch.finfo(dtype).eps
    return exact, error + torch.finfo(dtype).tiny


def sums(M: int, dtype: torch.dtype, wire: torch.dtype, engine: Any) -> torch.Tensor:
    """Hold both ops to the oracle, twice on the same memory; returns the whole sum."""
    group = resolve(None)
    rank, W = group.rank, group.world_size
    (x, w), rows = operands(rank, M, dtype), chunk_sizes(M, W)
    mine = slice(offsets(rows)[rank], offsets(rows)[rank] + rows[rank])
    bias, residual = torch.linspace(-1, 1, N).to(dtype), torch.full((M, N), 0.25, dtype=dtype)
    exact, error = oracle(W, M, dtype, wire, bias.double() + residual.double())
    with weft.engine(engine):
        for _ in range(2):
            part = weft.matmul_reduce_scatter(
                x, w, bias=bias, residual=residual[mine], wire_dtype=wire
            )
            whole = weft.matmul_all_reduce(x, w, bias=bias, residual=residual, wire_dtype=wire)
            assert part.dtype == whole.dtype == dtype
            assert ((part.double() - exact[mine]).abs() <= error[mine]).all()
            assert ((whole.double() - exact).abs() <= error).all()
    return whole


@needs_interpreter
@pytest.mark.parametrize("engine", ["host", "generic", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_are_as_exact_as_what_travels(
    ranks: Any, engine: str, dtype: torch.dtype, wire: torch.dtype
) -> None:
    for W, M in (2, 37), (3, 5), (3, 0):
        first, *others = ranks(W, sums, M, dtype, wire, engine)
        assert all(torch.equal(first, other) for other in others)


@needs_interpreter
@pytest.mark.parametrize("wire", [*HALVES, torch.float32])
@pytest.mark.slow_where(wire=[torch.float16, torch.float32])
def test_the_switch_adds_up_what_travels(wire: torch.dtype) -> None:
    """Every rank's memory stands for it; tiles of several rows at a time, and of one row."""
    from weft.kernels.engine.chips import INTERPRETER
    from weft.kernels.matmul import two_shot_kernel as kernel

    def summed(rank: int, M: int) -> torch.Tensor:
        W, dtype = resolve(None).world_size, torch.bfloat16
        (x, w), plus = operands(rank, M, dtype), torch.full((M, N), 0.25, dtype=dtype)
        config = replace(kernel.two_shot_config(M, N, dtype, INTERPRETER), by_switch=True)
        nbytes = kernel.workspace_bytes(M, N, dtype, W, config, wire)
        ws = workspace(None, nbytes, channel="by the switch")
        exact, error = oracle(W, M, dtype, wire, plus.double())
        for _ in range(3):
            y = kernel.launch_matmul_all_reduce(
                x, w, ws, residual=plus, wire_dtype=wire, config=config
            )
            assert ((y.double() - exact).abs() <= error).all()
        return y

    for M in (37, 1):
        first, *others = sim.run(3, lambda rank, M=M: summed(rank, M))
        assert all(torch.equal(first, other) for other in others)


@needs_interpreter
@pytest.mark.parametrize("engine", ["host", "triton"])
def test_terms_are_rounded_to_what_travels(ranks: Any, engine: str) -> None:
    """1 + 2^-9 is 1 in bf16, so that it can be seen what has travelled."""
    for got in ranks(2, _rounded_terms, engine):
        assert got == {"default": 2 + 2**-8, "bf16": 2.0, "fp16": 2 + 2**-8}


def _rounded_terms(engine: Any) -> dict[str, float]:
    x, w = torch.ones(4, 2, dtype=torch.float16), torch.tensor([[1.0], [2**-9]]).half()
    asked = {"default": None, "bf16": torch.bfloat16, "fp16": torch.float16}
    with weft.engine(engine):
        made = {name: weft.matmul_all_reduce(x, w, wire_dtype=of) for name, of in asked.items()}
        scattered = weft.matmul_reduce_scatter(x, w, wire_dtype=torch.bfloat16)
    assert scattered[0, 0] == 2
    return {name: float(y[0, 0]) for name, y in made.items()}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("engine", ["host", "generic"])
def test_gradients_do_not_depend_on_it(engine: Any) -> None:
    rank = resolve(None).rank
    grads: list[list[torch.Tensor]] = []
    for wire in (None, torch.bfloat16):
        x, w = (t.requires_grad_() for t in operands(rank, 6, torch.float32))
        bias = torch.ones(N, requires_grad=True)
        with weft.engine(engine):
            part = weft.matmul_reduce_scatter(x, w, bias=bias, wire_dtype=wire)
            whole = weft.matmul_all_reduce(x, w, bias=bias, wire_dtype=wire)
        (part.sum() + whole.sum()).backward()
        grads.append([t.grad for t in (x, w, bias) if t.grad is not None])
    assert len(grads[0]) == 3
    torch.testing.assert_close(*grads, rtol=0, atol=0)


@pytest.mark.ranks(2)
def test_a_graph_takes_it_along() -> None:
    rank, wire = resolve(None).rank, torch.bfloat16
    x, w = operands(rank, 6, torch.float32)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def both(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        part = weft.matmul_reduce_scatter(x, w, wire_dtype=wire)
        return part, weft.matmul_all_reduce(x, w, wire_dtype=wire)

    want = weft.matmul_reduce_scatter(x, w, wire_dtype=wire)
    whole = weft.matmul_all_reduce(x, w, wire_dtype=wire)
    for got, plain in zip(both(x, w), (want, whole), strict=True):
        assert torch.equal(got, plain)
    assert not torch.equal(whole, weft.matmul_all_reduce(x, w))


@pytest.mark.ranks(2)
def test_a_layer_has_one() -> None:
    rank = resolve(None).rank
    torch.manual_seed(3)
    linear = torch.nn.Linear(2 * K, N)
    x = torch.randn(6, 2 * K)[:, rank * K : (rank + 1) * K]
    for dim in (0, None):
        layer = weft.RowParallelLinear.from_linear(
            linear, sequence_dim=dim, wire_dtype=torch.float16
        )
        args = (x, layer.weight.t())
        if dim is None:
            want = weft.matmul_all_reduce(*args, bias=linear.bias, wire_dtype=torch.float16)
        else:
            want = weft.matmul_reduce_scatter(*args, bias=linear.bias, wire_dtype=torch.float16)
        assert torch.equal(layer(x), want)
    with pytest.raises(TypeError, match=r"ColumnParallelLinear.*'wire_dtype'"):
        weft.ColumnParallelLinear.from_linear(linear, sequence_dim=0, wire_dtype=torch.float16)


@pytest.mark.ranks(2)
def test_others_are_refused() -> None:
    x, w = operands(resolve(None).rank, 6, torch.float32)
    for op in (weft.matmul_reduce_scatter, weft.matmul_all_reduce):
        with pytest.raises(ValueError, match=r"wire_dtype must be torch.float32, .*torch.int8"):
            op(x, w, wire_dtype=torch.int8)
        with pytest.raises(ValueError, match="of at most 32 bits"):
            op(x.double(), w.double(), wire_dtype=torch.float32)
        op(x, w)  # and the ranks are still in step


def _explained(_: int) -> list[float]:
    """Predicted us of the kernel for a large sum, by what travels."""
    x = torch.empty(4096, 1024, dtype=torch.bfloat16)
    w = torch.empty(1024, 8192, dtype=torch.bfloat16)
    from weft.kernels.engine.engines import predict
    from weft.kernels.matmul.reduce_scatter import OP

    group = resolve(None)
    return [
        predict(OP.problem(x, w, group, 0, wire), group, x.device)["triton"].us
        for wire in (torch.float32, None, torch.bfloat16)
    ]


def test_fewer_bytes_are_predicted_to_be_quicker() -> None:
    for whole, packed, half in sim.run(8, _explained, hardware="h100", numerics=False):
        assert half < packed < whole
