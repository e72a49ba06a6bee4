"""Ops that need nothing from other ranks: they communicate nothing, and give what torch gives."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dtensors import close, ints, r, tensors_of, world
from torch.nn import functional

import weft
from weft.dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from weft.dtensor.debug import CommDebugMode

ELEMENTWISE_LOSSES = [
    functional.mse_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    functional.soft_margin_loss,
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("loss", ELEMENTWISE_LOSSES, ids=lambda loss: loss.__name__)
def test_losses_of_single_elements_move_nothing(
    world_size: int, loss: Callable[..., torch.Tensor]
) -> None:
    x, y = r(5, 6).sigmoid(), r(5, 6).sigmoid()
    for reduction, dim in itertools.product(("mean", "sum", "none"), (0, 1)):
        plain = x.clone().requires_grad_()
        expected = loss(plain, y, reduction=reduction)
        expected.sum().backward()
        ours, target = (distribute_tensor(t, world(), [Shard(dim)]) for t in (x, y))
        ours.requires_grad_()
        with CommDebugMode() as comm:
            result = loss(ours, target, reduction=reduction)
        # Of values that a rank may refuse on its own, the ranks tell each other.
        assert comm.get_total_counts() <= (loss is functional.binary_cross_entropy)
        assert close(result, expected)
        result.sum().backward()
        assert close(ours.grad, plain.grad)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", ["max", "min"])
def test_extrema_stay_partial_where_their_order_is_kept(kind: str) -> None:
    torch.manual_seed(torch.distributed.get_rank())
    x, y = (DTensor.from_local(torch.randn(4, 3), world(), [Partial(kind)]) for _ in range(2))
    number = distribute_tensor(torch.ones(3), world(), [Replicate()])
    pair = torch.maximum if kind == "max" else torch.minimum
    turned = Partial("min" if kind == "max" else "max")
    cases: list[tuple[Callable[..., Any], tuple[Any, ...], Partial]] = [
        (torch.tanh, (x,), Partial(kind)),
        (functional.relu, (x,), Partial(kind)),
        (lambda x: x.clamp(-0.5, 0.5), (x,), Partial(kind)),
        (torch.neg, (x,), turned),
        (torch.erfc, (x,), turned),
        (pair, (x, y), Partial(kind)),
        (torch.maximum, (x, number), Partial(kind)),
        (torch.minimum, (number, x), Partial(kind)),
    ]
    for function, operands, placement in cases:
        with CommDebugMode() as comm:
            result = function(*operands)
        assert comm.get_total_counts() == 0
        assert result.placements == (placement,)
        assert close(result, function(*(t.full_tensor() for t in operands)))
    own = torch.tensor([float("nan") if torch.distributed.get_rank() else 1.0, -2.0])
    nothing = DTensor.from_local(own, world(), [Partial(kind)])
    for function in (torch.tanh, torch.sign, functional.relu):
        assert close(function(nothing), function(nothing.full_tensor()))
    other = torch.minimum if kind == "max" else torch.maximum
    assert close(other(x, y), other(x.full_tensor(), y.full_tensor()))
    assert close(torch.cos(x), torch.cos(x.full_tensor()))
    for smallest in (torch.tensor([0], dtype=torch.uint8), torch.tensor([-128], dtype=torch.int8)):
        own = smallest + torch.distributed.get_rank()
        integers = DTensor.from_local(own, world(), [Partial(kind)])  # -smallest is itself
        assert torch.equal((-integers).full_tensor(), -integers.full_tensor())


@pytest.mark.ranks(3)
def test_lookups_and_paddings_that_move_nothing() -> None:
    """An index that is cut where it looks, numbers around a sum, memory for one, linear ops."""
    x, index = r(5, 4), ints(5, 7, 4)
    whole = distribute_tensor(x, world(), [Replicate()])
    cut = distribute_tensor(index, world(), [Shard(0)])
    terms, counts = (distribute_tensor(t, world(), [Partial("sum")]) for t in (x, index))
    with CommDebugMode() as comm:
        found = torch.gather(whole, 0, cut)
        padded = functional.pad(terms, [1, 2], value=1.5)
        memory = torch.empty_like(terms)
        zeros = torch.zeros_like(terms, dtype=torch.int64)
        summed = terms.cumsum(0)
        product = counts @ whole.long().T
    # The ranks tell each other whether an index was out of range.
    assert dict(comm.get_comm_counts()) == {torch.ops.c10d_functional.all_reduce: 1}
    assert found.placements == (Shard(0),)
    assert close(found, torch.gather(x, 0, index))
    for result in (padded, memory, summed, product):
        assert result.placements == (Partial("sum"),)
    assert close(padded, functional.pad(x, [1, 2], value=1.5))
    assert close(zeros, torch.zeros_like(x, dtype=torch.int64))
    assert close(summed, x.cumsum(0))
    assert close(product, index @ x.long().T)
    assert close(functional.pad(terms, [1, 2]), functional.pad(x, [1, 2]))
    other = distribute_tensor(index[:5], world(), [Shard(1)])  # cut where it does not look
    assert close(torch.gather(whole, 0, other), torch.gather(x, 0, index[:5]))


@pytest.mark.ranks(3)
def test_few_numbers_of_any_dtype_are_looked_up() -> None:
    index = distribute_tensor(torch.tensor([[4, 0, 2]]), world())
    for dtype in (torch.bool, torch.uint8, torch.int32, torch.complex64):
        x = ints(2, 5, 4).to(dtype)
        found = torch.gather(distribute_tensor(x, world(), [Shard(0)]), 0, index)
        assert torch.equal(found.full_tensor(), torch.gather(x, 0, torch.tensor([[4, 0, 2]])))
        assert found.placements == (Partial(),)
    with pytest.raises(RuntimeError, match="out of range"):
        torch.gather(distribute_tensor(r(5, 4), world(), [Shard(0)]), 0, index + 1)


@pytest.mark.ranks(3)
def test_factors_follow_their_summand_and_moved_terms_stay_terms() -> None:
    def placed(t: torch.Tensor, placement: Any) -> DTensor:
        return distribute_tensor(t, world(), [placement])

    a, b, v = r(5, 4), r(4, 6), r(4)
    for summand, dim in ((r(6), 0), (r(5, 6), 0), (r(5, 6), 1)):
        operands = [placed(summand, Shard(dim)), placed(a, Replicate()), placed(b, Replicate())]
        with CommDebugMode() as comm:
            result = torch.addmm(*operands)
        assert comm.get_total_counts() == 0
        assert close(result, torch.addmm(summand, a, b))
        assert result.placements == (Shard(dim + 2 - summand.ndim),)
    assert torch.addmv(
        placed(r(5), Shard(0)), placed(a, Replicate()), placed(v, Replicate())
    ).placements == (Shard(0),)
    for kind in ("sum", "max"):
        x = placed(a, Partial("sum")) if kind == "sum" else placed(a, Shard(0)).amax(0, True)
        assert x.placements == (Partial(kind),)
        assert torch.flip(x, [1]).placements == torch.roll(x, 1, 1).placements == x.placements
        assert close(torch.roll(x, 1, 1), torch.roll(x.full_tensor(), 1, 1))


R, P = Replicate(), Partial()
Free = tuple[Callable[..., Any], list[tuple[torch.Tensor, Any]], Any]


def rotated(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Rotary embedding as Llama's reference has it."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2)


def free() -> dict[str, Free]:
    """Functions, their arguments with placements, and the placement of the (first) result."""
    image, row = r(6, 4, 6, 6), r(6, 8)
    volume = r(6, 4, 3, 3, 3)
    grid, deep = torch.rand(6, 5, 5, 2).double() * 2 - 1, torch.rand(6, 2, 2, 2, 3).double()
    turns = torch.polar(torch.ones(6, 4).double(), r(6, 4))

    def sampled(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return functional.grid_sample(x, grid, align_corners=False)

    def gridded(theta: torch.Tensor) -> torch.Tensor:
        return functional.affine_grid(theta, [6, 1, 4, 5], align_corners=False)

    def resized(x: torch.Tensor) -> torch.Tensor:
        return functional.interpolate(x, scale_factor=2, mode="bilinear")

    def picked(x: torch.Tensor) -> torch.Tensor:
        label = torch.arange(6).unsqueeze(1)  # every rank holds some
        where = DTensor.from_local(label, x.device_mesh) if isinstance(x, DTensor) else label
        return x.gather(1, where)

    one, four = torch.rand(1).double(), torch.rand(4).double()
    return {
        "prelu": (functional.prelu, [(image, Shard(2)), (one, R)], Shard(2)),
        "prelu by channel": (functional.prelu, [(image, Shard(1)), (four, Shard(0))], Shard(1)),
        "gather few": (picked, [(row, Shard(1))], P),
        "grid_sample": (sampled, [(image, Shard(0)), (grid, Shard(0))], Shard(0)),
        "grid_sample channels": (sampled, [(image, Shard(1)), (grid, R)], Shard(1)),
        "grid_sample rows": (sampled, [(image, R), (grid, Shard(1))], Shard(2)),
        "grid_sample deep": (sampled, [(volume, Shard(0)), (deep, Shard(0))], Shard(0)),
        "affine_grid": (gridded, [(r(6, 2, 3), Shard(0))], Shard(0)),
        "bilinear": (
            functional.bilinear, [(row, Shard(0)), (r(6, 3), Shard(0)), (r(5, 8, 3), R)], Shard(0),
        ),
        "interpolate": (resized, [(image, Shard(1))], Shard(1)),
        "adaptive_avg_pool3d": (
            lambda x: functional.adaptive_avg_pool3d(x, 2), [(volume, Shard(0))], Shard(0),
        ),
        "complex from terms": (torch.view_as_complex, [(r(6, 2), P)], P),
        "real from terms": (lambda x: torch.view_as_complex(x).real, [(r(6, 2), P)], P),
        "conj of terms": (lambda x: torch.view_as_complex(x).conj() * 2, [(r(6, 2), P)], P),
        "rotary heads": (rotated, [(r(2, 6, 6, 8), Shard(1)), (turns, R)], Shard(1)),
        "rotary positions": (rotated, [(r(2, 3, 6, 8), Shard(2)), (turns, Shard(0))], Shard(2)),
        "unsafe_split": (lambda x: torch.unsafe_split(x, 3, 1), [(row, P)], P),
        "unsafe_chunk": (lambda x: torch.unsafe_chunk(x, 2, 1), [(row, P)], P),
        "unfold": (lambda x: functional.unfold(x, 2), [(image, Shard(0))], Shard(0)),
        "complex factor": (lambda x: x * (1 - 2j), [(row, P)], P),
    }  # fmt: skip


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", free())
def test_forward_and_backward_move_nothing(name: str, world_size: int) -> None:
    torch.manual_seed(0)
    function, operands, placement = free()[name]
    plain = [t.clone().requires_grad_() for t, _ in operands]
    ours = [distribute_tensor(t, world(), [p]).requires_grad_() for t, p in operands]
    expected = tensors_of(function(*plain))
    seeds = [torch.randn_like(t) for t in expected]
    with CommDebugMode() as comm:
        results = tensors_of(function(*ours))
    assert comm.get_total_counts() == 0
    assert results[0].placements == (placement,)
    assert all(map(close, results, expected))
    target = R if isinstance(placement, Partial) else placement
    ours_seeds = [distribute_tensor(t, world(), [target]) for t in seeds]
    with CommDebugMode() as comm:
        grads = torch.autograd.grad(results, ours, ours_seeds)
    assert comm.get_total_counts() == 0
    assert all(map(close, grads, torch.autograd.grad(expected, plain, seeds)))


@pytest.mark.ranks(3)
def test_distances_exchange_one_number_a_rank() -> None:
    a, b = r(7, 5), r(7, 5)
    ours = [distribute_tensor(t, world(), [Shard(0)]) for t in (a, b)]
    for order in (2, math.inf, -math.inf, 0, 3, 1):
        with CommDebugMode() as comm:
            result = torch.dist(*ours, order)
        assert close(result, torch.dist(a, b, order))
        assert comm.get_total_counts() == (order != 1)
    redistributions = weft.explain(lambda: torch.dist(*ours))
    assert "at most 16 bytes a rank" in str(redistributions)


@pytest.mark.ranks(3)
def test_integer_sums_stay_sums_only_where_that_is_exact() -> None:
    rank = torch.distributed.get_rank()

    def terms(values: list[int], dtype: torch.dtype, kind: str = "sum") -> DTensor:
        own = torch.tensor(values, dtype=dtype) + rank
        return DTensor.from_local(own, world(), [Partial(kind)])

    # 120 + 121 + 122 wraps around in int8.
    numbers = [terms([5, -7], torch.int64), terms([120, -128], torch.int8)]
    for x in numbers:
        for function in (lambda t: t * -3, lambda t: 5 * t, lambda t: t * t.new_tensor(7)):
            with CommDebugMode() as comm:
                result = function(x)
            assert comm.get_total_counts() == 0 and result.placements == (P,)
            assert torch.equal(result.full_tensor(), function(x.full_tensor()))
    averages, either = terms([5, -7], torch.int64, "avg"), terms([-1, 0], torch.int64) > 0
    flags = DTensor.from_local(either.to_local(), world(), [P])
    every = [*numbers, averages, flags, terms([120, 3], torch.int8, "product")]
    more: list[Callable[..., Any]] = [
        lambda t: t * 3, lambda t: t * 0.5, lambda t: t / 3, lambda t: t // 2, lambda t: t + t,
        lambda t: t + 1, lambda t: t.sum(), lambda t: t * t.to(torch.int64),
    ]  # fmt: skip
    for x, function in itertools.product(every, more):
        assert torch.equal(function(x).full_tensor(), function(x.full_tensor())), x
