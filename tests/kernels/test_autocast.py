"""torch.autocast around the fused ops: dtypes and values as of operands that are cast by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from needs import needs_interpreter
from torch import nn

import weft

HALF = torch.bfloat16


ENGINES = ["host", "generic", pytest.param("triton", marks=needs_interpreter)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_dim", [0, None])
@pytest.mark.parametrize("engine", ENGINES)
def test_layers(engine: weft.settings.Engine, sequence_dim: int | None) -> None:
    """Parallel layers in autocast: what they make of operands that are cast by hand."""
    torch.manual_seed(0)
    linears = [nn.Linear(24, 16), nn.Linear(16, 24)]
    kinds = (weft.ColumnParallelLinear, weft.RowParallelLinear)
    up, down = (
        kind.from_linear(linear, sequence_dim=sequence_dim)
        for kind, linear in zip(kinds, linears, strict=True)
    )
    by_hand = [
        kind.from_linear(linear.to(HALF), sequence_dim=sequence_dim)
        for kind, linear in zip(kinds, linears, strict=True)
    ]
    xs = [torch.randn(8, 24, requires_grad=True) for _ in range(2)]
    xs[1].data.copy_(xs[0])
    with weft.engine(engine):
        with torch.autocast("cpu", HALF):
            hidden = up(xs[0])
            y = down(torch.relu(hidden))
        expected = by_hand[1](torch.relu(by_hand[0](xs[1].to(HALF))))
        assert hidden.dtype == y.dtype == HALF
        assert torch.equal(y, expected)
        for out in (y, expected):
            out.float().square().sum().backward()
    pairs = [(xs[0].grad, xs[1].grad)]
    for ours, theirs in ((up, by_hand[0]), (down, by_hand[1])):
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert mine.grad is not None and mine.grad.dtype == torch.float32
            pairs.append((mine.grad, other.grad))
    for got, want in pairs:
        assert got is not None and want is not None
        assert torch.equal(got, want.to(got.dtype))


@pytest.mark.ranks(2)
def test_backward_in_autocast() -> None:
    """What was called outside of autocast has the same gradients inside."""
    x, w, v = torch.randn(8, 24), torch.randn(24, 16), torch.randn(24, 16)
    calls: tuple[Callable[..., torch.Tensor], ...] = (
        lambda x, w, v: torch.cat(weft.all_gather_matmul(x, [w, v], activation="gelu"), 1),
        lambda x, w, v: weft.matmul_reduce_scatter(x, w + v),
        lambda x, w, v: weft.matmul_all_reduce(x, w - v),
    )
    for call in calls:
        found = []
        for inside in (False, True):
            leaves = [each.clone().requires_grad_() for each in (x, w, v)]
            with weft.engine("host"):
                y = call(*leaves)
            with torch.autocast("cpu", HALF, enabled=inside):
                found.append(torch.autograd.grad(y.square().sum(), leaves))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.ranks(2)
def test_attention() -> None:
    rank = dist.get_rank()
    q, k, v = (torch.randn(1, 2, 6, 8) + rank for _ in range(3))
    ops: tuple[Callable[..., torch.Tensor], ...] = (weft.ring_attention, weft.ulysses_attention)
    for op in ops:
        with torch.autocast("cpu", HALF):
            out = op(q, v=v, k=k.to(HALF), causal=True)
            assert torch.equal(out, op(q=q, k=k, v=v, causal=True))
        assert out.dtype == HALF
        assert torch.equal(out, op(*(x.to(HALF) for x in (q, k, v)), causal=True))
        with torch.autocast("cpu", enabled=False):
            assert op(q, k, v).dtype == torch.float32


@pytest.mark.ranks(2)
def test_compiled() -> None:
    """Autocast is traced into one graph."""
    up = weft.ColumnParallelLinear.from_linear(nn.Linear(24, 16), sequence_dim=0)
    x = torch.randn(8, 24)

    def call(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", HALF):
            y: torch.Tensor = up(x)
        return y

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        y = compiled(x)
        assert y.dtype == HALF and torch.equal(y, call(x))
