"""Ops without rule: what a probe finds holds, and what it cannot prove runs whole. Errors agree."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional

import weft
from weft.dtensor import Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from weft.dtensor.dispatch import planning
from weft.dtensor.dispatch.call import Strategy
from weft.dtensor.dispatch.dispatch import forget_plans

# (function, shape, sharded dim, the result's placement; None: no rule may be found)
FOUND: dict[str, tuple[Callable[..., Any], tuple[int, ...], int, Any]] = {
    "inv of a batch": (torch.linalg.inv, (6, 3, 3), 0, Shard(0)),
    "inv of rows": (torch.linalg.inv, (6, 4, 4), 1, None),
    "matrix_exp": (torch.matrix_exp, (6, 3, 3), 0, Shard(0)),
    "max_pool of a batch": (lambda x: functional.max_pool2d(x, 2), (4, 2, 6, 6), 0, Shard(0)),
    "max_pool of channels": (lambda x: functional.max_pool2d(x, 2), (4, 2, 6, 6), 1, Shard(1)),
    "max_pool of rows": (lambda x: functional.max_pool2d(x, 3), (4, 2, 8, 6), 2, None),
    "upsample": (lambda x: functional.interpolate(x, scale_factor=2), (4, 2, 6), 0, Shard(0)),
    "pad": (lambda x: functional.pad(x, (1, 1), "reflect"), (4, 5), 0, Shard(0)),
    "unfold": (lambda x: functional.unfold(x, 2), (4, 2, 5, 5), 0, Shard(0)),
    "pixel_shuffle": (lambda x: functional.pixel_shuffle(x, 2), (4, 8, 3, 3), 0, Shard(0)),
    "trace": (torch.trace, (4, 4), 0, None),
    "renorm": (lambda x: torch.renorm(x, 2, 0, 0.5), (4, 5), 0, Shard(0)),
    "renorm across": (lambda x: torch.renorm(x, 2, 0, 0.5), (5, 4), 1, None),
    "renorm far": (lambda x: torch.renorm(x, 2, 0, 1e4), (5, 4), 1, None),
    "large": (lambda x: functional.max_pool1d(x, 2), (64, 40, 30), 0, Shard(0)),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", FOUND)
def test_rules_are_found(name: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    function, shape, dim, wanted = FOUND[name]
    whole = torch.randn(shape)
    state = torch.get_rng_state()
    expected = function(whole)
    told = weft.explain(function, distribute_tensor(whole, mesh, [Shard(dim)]))
    assert torch.equal(torch.get_rng_state(), state), "the probe drew from the user's generator"
    torch.testing.assert_close(told.result.full_tensor(), expected)
    assert told.result.placements == (wanted or Replicate(),)
    assert wanted is None or "discovered" in {decision.engine for decision in told}


@pytest.mark.ranks(2)
def test_masks_of_every_pattern() -> None:
    """What a mask takes from a part of `source` depends on the parts before."""
    mesh = init_device_mesh("cpu", (2,))
    wrong = []
    for rows, columns in ((2, 3), (3, 2), (4, 4), (2, 60)):
        x, source = torch.zeros(rows, columns), torch.arange(1.0, 1 + rows * columns)
        for picked in itertools.product([False, True], repeat=rows):
            for mask in (torch.tensor(picked).view(rows, 1), torch.tensor(picked[0])):
                expected = x.masked_scatter(mask, source)
                of_mask = [Replicate(), Shard(0)] if mask.ndim else [Replicate()]
                for shape in ((rows, columns), (rows * columns,)):
                    for p, q in itertools.product(of_mask, [Replicate(), Shard(0)]):
                        got = distribute_tensor(x, mesh, [Shard(0)]).masked_scatter(
                            distribute_tensor(mask, mesh, [p]),
                            distribute_tensor(source.view(shape), mesh, [q]),
                        )
                        if not torch.equal(got.full_tensor(), expected):
                            wrong.append((mask, shape, p, q))
    assert not wrong


def raised(function: Callable[..., Any], *args: Any) -> str:
    try:
        function(*args)
    except (RuntimeError, IndexError, ValueError, NotImplementedError) as error:
        return type(error).__name__ + ": " + str(error)
    return ""


def errors() -> list[str]:
    """What each call raises here. Only the last rank has the bad index, and the zero."""
    mesh = init_device_mesh("cpu", (2,))

    def spread(t: torch.Tensor, placement: Any) -> Any:
        return distribute_tensor(t, mesh, [placement])

    bad = spread(torch.tensor([0, 1, 2, 9]), Shard(0))
    table, rows = spread(torch.randn(4, 3), Replicate()), spread(torch.randn(4, 5), Shard(0))
    x = spread(torch.randn(4, 4), Shard(0))
    zero = spread(torch.tensor([1, 2, 3, 0]), Shard(0))
    far = spread(torch.tensor([0, 1, 2, 9]), Replicate())
    column = spread(torch.randn(4, 1), Shard(1))  # of which a rank has nothing
    matrices = spread(torch.eye(2).repeat(4, 1, 1), Shard(0))
    last = spread(torch.tensor([False, False, False, True]).view(4, 1, 1), Shard(0))
    return [
        raised(lambda: bad // zero),
        raised(lambda: bad.clone().remainder_(zero)),
        raised(torch.remainder, 5, zero),
        raised(lambda: torch.div(bad, zero, rounding_mode="trunc")),
        raised(functional.embedding, bad, table),
        raised(functional.cross_entropy, rows, bad),
        raised(lambda: functional.cross_entropy(rows, bad, reduction="none")),
        raised(lambda: table.index_select(0, bad)),
        raised(lambda: table[bad]),
        raised(lambda: functional.one_hot(bad, 4)),
        raised(lambda: x + torch.ones(4, 4)),
        raised(lambda: torch.mm(x, spread(torch.ones(3, 2), Replicate()))),
        raised(lambda: x.view(5)),
        raised(lambda: torch.add(x, x, out=spread(torch.zeros(2), Replicate()))),
        raised(lambda: x[1:].as_strided((2,), (1,))),
        raised(lambda: x.max(7)),
        raised(torch.linalg.eigvals, matrices.masked_fill(last, torch.nan)),
        raised(torch.cholesky, matrices.masked_fill(last, -1)),
        raised(functional.binary_cross_entropy, last + 0.5, last + 0.0),
        raised(torch.cholesky_inverse, matrices.masked_fill(last, 0)),
        raised(lambda: column[far]),
        raised(lambda: column.index_select(0, far)),
        raised(lambda: functional.max_unpool1d(column[:, :, None], far.view(4, 1, 1), 2)),
    ]


def test_errors_are_raised_on_every_rank(ranks: Any) -> None:
    first, second = ranks(2, errors)
    kinds = [[text.partition(":")[0] for text in texts] for texts in (first, second)]
    assert kinds[0] == kinds[1] and all(kinds[0]), [t[:50] for t in first]
    assert "mm(float32[4, 4] [S(0)] on [2], float32[3, 2] [R] on [2])" in first[11]
    assert "got mixed torch.Tensor and DTensor" in first[10] and "distribute_tensor" in first[10]


@pytest.mark.ranks(2)
def test_a_rule_that_does_not_hold_is_an_error() -> None:
    x = distribute_tensor(torch.randn(4, 6), init_device_mesh("cpu", (2,)), [Shard(1)])
    rule = Strategy((Shard(1),), (Shard(0),))
    with mock.patch.object(planning, "discovered", lambda call, writes: ([rule], False)):
        for _ in range(2):  # not the first time only
            with pytest.raises(RuntimeError, match=r"gives torch.float32\[4, 3\] on rank"):
                torch.renorm(x, 2, 0, 0.5)
    forget_plans(torch.ops.aten.renorm.default)


@pytest.mark.ranks(2)
def test_terms_of_a_sum_are_added_first() -> None:
    """Partial terms: what one of them is says nothing of the sum."""
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(5, 3)
    terms = distribute_tensor(x, mesh, [Partial()])
    for function in (torch.linalg.pinv, torch.sgn, torch.frac, torch.logit):
        torch.testing.assert_close(
            function(terms).full_tensor(), function(x), equal_nan=True, rtol=1e-4, atol=1e-5
        )
