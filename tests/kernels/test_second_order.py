"""Gradients of gradients through what moves between ranks, against one process in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from dtensors import world
from torch.nn import functional

import weft
from weft import collectives
from weft.dtensor import DTensor, Replicate, Shard, distribute_tensor


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def own(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().requires_grad_()


def penalty(y: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gradients of the squared gradients of the cubes of y."""
    firsts = torch.autograd.grad(y.pow(3).sum(), inputs, create_graph=True)
    total: Any = sum(first.pow(2).sum() for first in firsts)
    return torch.autograd.grad(total, inputs)


def close(actual: tuple[torch.Tensor, ...], *wanted: torch.Tensor) -> None:
    for a, b in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("engine", ["host", "generic"])
def test_matmuls(engine: Any) -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    x, w, b = drawn(5, 6), drawn(6, 4), drawn(4)
    rows = slice(3 * rank, 3 * rank + 3)
    mine = own(x[rows]), own(w[:, rank::W])
    terms = own(x.chunk(W, 1)[rank]), own(w.chunk(W)[rank]), own(b)
    with weft.engine(engine):
        dx, dw = penalty(x @ w, x, w)
        close(penalty(weft.all_gather_matmul(*mine), *mine), dx[rows], dw[:, rank::W])

        dx, dw = penalty(torch.cat([x @ w, *[x] * W], 1), x, w)
        gathered, y = weft.all_gather_matmul(*mine, return_gathered=True)
        close(penalty(torch.cat([y, gathered], 1), *mine), dx[rows], dw[:, rank::W])

        dx, dw, db = penalty(x @ w + b, x, w, b)
        wanted = dx.chunk(W, 1)[rank], dw.chunk(W)[rank], db
        for op in weft.matmul_reduce_scatter, weft.matmul_all_reduce:
            close(penalty(op(*terms[:2], bias=terms[2]), *terms), *wanted)


@pytest.mark.ranks(2)
def test_collectives() -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    xs = [drawn(4, 3) for _ in range(W)]
    total: Any = sum(xs)
    mine = own(xs[rank])
    cases: Any = (
        (collectives.all_gather, [torch.cat(xs)] * W),
        (collectives.reduce_scatter, total.chunk(W)),
        (collectives.all_reduce, [total] * W),
        (collectives.all_to_all, [torch.cat([x.chunk(W)[r] for x in xs]) for r in range(W)]),
        (collectives.broadcast, [xs[0]] * W),
    )
    for op, every in cases:
        weighted = [(r + 1) * y for r, y in enumerate(every)]
        wanted = penalty(torch.cat(weighted), *xs[: 1 if op is collectives.broadcast else W])
        made: Any = op(mine) * (rank + 1)
        close(
            penalty(made, mine), wanted[rank] if rank < len(wanted) else torch.zeros(4, 3).double()
        )


@pytest.mark.ranks(2)
def test_dtensor() -> None:
    mesh = world()
    x, w = drawn(5, 6), drawn(4, 6)
    wanted = penalty(functional.linear(x, w), x, w)
    for of_x, of_w in [(Shard(0), Shard(0)), (Shard(1), Shard(1)), (Replicate(), Shard(0))]:
        operands = distribute_tensor(x, mesh, [of_x]), distribute_tensor(w, mesh, [of_w])
        placed = [own(each) for each in operands]
        made: Any = penalty(functional.linear(*placed), *placed)
        assert all(isinstance(each, DTensor) for each in made)
        close(tuple(each.full_tensor() for each in made), *wanted)


@pytest.mark.ranks(2)
def test_what_has_no_second_derivative_says_so() -> None:
    rank = dist.get_rank()
    x, w, q = drawn(4, 6), drawn(6, 4), drawn(1, 2, 3, 4)
    for op, call in (
        ("all_gather_matmul with", lambda: weft.all_gather_matmul(x, w, activation="gelu")),
        ("ring_attention", lambda: weft.ring_attention(q, q, q)),
        ("ulysses_attention", lambda: weft.ulysses_attention(q, q, q)),
    ):
        with pytest.raises(NotImplementedError, match=f"the gradient of {op}"):
            penalty(call(), q if "attention" in op else x)
    assert collectives.all_reduce(torch.tensor(rank)) == 1
