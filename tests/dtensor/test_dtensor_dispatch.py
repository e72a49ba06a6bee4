"""The short way of calls that autograd has nothing to record of gives what the long way gives."""

from __future__ import annotations

import pytest
import torch
from dtensors import world
from torch.nn import functional

from weft.dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from weft.dtensor.debug import ExplicitRedistributionContext

CALLS = {
    "add": lambda x, y: torch.add(x, y),
    "add, alpha": lambda x, y: torch.add(x, y, alpha=0.5),
    "operators": lambda x, y: (x / y - y) * 2,
    "reversed": lambda x, y: 1 - x,
    "other number": lambda x, y: x * 3.0 + x * 4.0,
    "sum of all": lambda x, y: x.sum(),
    "sum over rows": lambda x, y: x.sum(0),
    "sum over columns": lambda x, y: x.sum(-1),
    "softmax": lambda x, y: torch.softmax(x, -1),
    "softmax over rows": lambda x, y: functional.softmax(x, 0),
    "relu": lambda x, y: functional.relu(x),
    "in place": lambda x, y: x.clone().add_(y).mul_(2),
    "operator in place": lambda x, y: x.clone().__iadd__(y),
    "lists": lambda x, y: torch._foreach_add([x, y], [y, x])[1],
    "lists in place": lambda x, y: torch._foreach_mul_([x.clone(), y.clone()], [2.0, 3.0])[1],
    "to": lambda x, y: x.to(torch.float64).to(torch.float64) + x.to("cpu"),
}


@pytest.mark.ranks(2)
def test_as_on_one_process() -> None:
    mesh = world()
    x, y = torch.randn(5, 3), torch.rand(5, 3) + 1
    for placement in (Shard(0), Shard(1), Replicate()):
        ours = [distribute_tensor(t, mesh, [placement]) for t in (x, y)]
        for name, call in CALLS.items():
            for turn in range(3):
                with torch.no_grad():
                    result = call(*ours)
                assert isinstance(result, DTensor), name
                torch.testing.assert_close(
                    result.full_tensor(), call(x, y), msg=lambda m, at=(name, turn): f"{at}: {m}"
                )


@pytest.mark.ranks(2)
def test_the_same_rules() -> None:
    mesh = world()
    x = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
    y = x.detach().clone()
    with torch.no_grad():
        for _ in range(3):
            torch.add(x, y)
            with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
                torch.add(x, torch.ones(4, 2))

        version, view = x._version, x[:3]  # a copy, as no rank has three rows
        for count in range(1, 4):
            x.add_(1)
            assert x._version == version + count
            torch.testing.assert_close(view.full_tensor(), torch.arange(6.0).view(3, 2) + count)

        half = torch.autocast("cpu", torch.bfloat16)
        for _ in range(2):
            assert torch.bmm(x[None], x.t()[None]).dtype == torch.float32
            with half:
                assert torch.bmm(x[None], x.t()[None]).dtype == torch.bfloat16

    needs = x.clone().requires_grad_()
    with torch.no_grad():
        torch.mul(needs, needs)
    torch.mul(needs, needs).sum().backward()
    torch.testing.assert_close(needs.grad.full_tensor(), 2 * x.full_tensor())
    needs.grad = None
    assert needs.grad is None


@pytest.mark.ranks(2)
def test_nothing_moves_unasked() -> None:
    mesh = world()
    whole = torch.arange(16.0).view(4, 4)
    rows, columns, same = (
        distribute_tensor(whole, mesh, [p]) for p in (Shard(0), Shard(1), Replicate())
    )
    refused = pytest.raises(RuntimeError, match=r"float32\[4, 4\] \[S\(.\)\].*may not inside")
    with ExplicitRedistributionContext():
        with refused:
            rows + columns
        with refused:
            rows @ columns.redistribute(placements=[Shard(1)])  # fused, and a gather all the same
        torch.testing.assert_close(
            (rows + columns.redistribute(placements=[Shard(0)])).full_tensor(), 2 * whole
        )
        rows + same  # cut on each rank: nothing is received
        with refused:
            rows[:3]  # a view, of what other ranks have
        assert rows[:, :3].placements == (Shard(0),)
        q, k = (distribute_tensor(torch.ones(1, n, 3, 2), mesh, [Shard(1)]) for n in (4, 2))
        functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)  # heads of one rank
        with ExplicitRedistributionContext(enable=False):
            rows + columns
        with ExplicitRedistributionContext(strict=True), refused:
            rows + same
        with ExplicitRedistributionContext(mode="warn"), pytest.warns(UserWarning, match="add"):
            rows + columns
    twice = ExplicitRedistributionContext()
    with twice, twice, refused:
        rows + columns
    rows + columns
    with pytest.raises(RuntimeError, match="mode must be"):
        ExplicitRedistributionContext(mode="ignore")
    assert (rows @ columns).placements == (Shard(1),)
    assert rows.sum().placements == (Partial("sum"),)


@pytest.mark.ranks(2)
def test_a_gradient_of_plain_tensors() -> None:
    """What autograd makes up for pieces that nobody used is no tensor that the caller has mixed."""
    mesh = world()
    local = torch.arange(8.0).view(2, 4).requires_grad_()
    first = DTensor.from_local(local, mesh, [Replicate()]).chunk(2, 1)[0]
    (grad,) = torch.autograd.grad(first.square().sum(), local)
    expected = torch.cat([2 * local[:, :2], torch.zeros(2, 2)], 1)
    torch.testing.assert_close(grad, expected.detach())


@pytest.mark.ranks(2)
def test_other_circumstances() -> None:
    """A plan holds for the number that it was found with, and for the dtype of its time."""
    mesh = world()
    plain = torch.arange(8.0).view(4, 2), torch.ones(4, 2), torch.ones(2, 4, 3), torch.ones(2, 3, 2)
    a, b, c, d = (distribute_tensor(t, mesh, [Shard(0)]) for t in plain)
    for number in (1.0, 0.0, 2.0):  # a sum of distances, how many there are, the root of a sum
        expected = torch.dist(plain[0], plain[1], number)
        torch.testing.assert_close(torch.dist(a, b, number).full_tensor(), expected)
        expected = torch.addbmm(plain[0], *plain[2:], alpha=number - 1)
        torch.testing.assert_close(torch.addbmm(a, c, d, alpha=number - 1).full_tensor(), expected)
        spread = a.var(0, correction=number).full_tensor()
        torch.testing.assert_close(spread, plain[0].var(0, correction=number))

    counts = distribute_tensor(torch.arange(4), mesh, [Shard(0)])
    try:
        for grad_mode in (torch.enable_grad, torch.no_grad):
            for dtype in (torch.float32, torch.float64):
                torch.set_default_dtype(dtype)
                with grad_mode():
                    half = counts / 2
                assert half.dtype == half.to_local().dtype == dtype
    finally:
        torch.set_default_dtype(torch.float32)
