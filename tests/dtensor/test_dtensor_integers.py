"""Partials of integers: what wraps around, is cut or saturates is what it is on one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from weft import sim
from weft.dtensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)

DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# 100 + 100 wraps around in 8 bits, the average of 3 and -4 is cut to an integer.
TERMS = ([100, -7, 3, 101], [100, 2, -4, 90])
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": torch.Tensor.sum,
    "sum, keepdim": lambda x: x.sum(0, keepdim=True),
    "sum, float": lambda x: x.sum(dtype=torch.float32),
    "mean, float": lambda x: x.mean(dtype=torch.float32),
    "prod": torch.Tensor.prod,
    "max": torch.Tensor.max,
    "any": torch.Tensor.any,
    "cumsum": lambda x: x.cumsum(0),
    "mul": lambda x: x * 3,
    "mul by -1": lambda x: x * -1,
    "mul by a fraction": lambda x: x * 1.5,
    "square": lambda x: x * x,
    "div": lambda x: x / 2,
    "div, trunc": lambda x: torch.div(x, 2, rounding_mode="trunc"),
    "floor_divide": lambda x: x // 2,
    "add": lambda x: x + x,
    "add a number": lambda x: x + 1,
    "add a wider one": lambda x: x + torch.tensor(1000),
    "abs": torch.Tensor.abs,
    "clamp": lambda x: x.clamp(0, 50),
    "greater": lambda x: x > 1,
    "long": torch.Tensor.long,
    "float": torch.Tensor.float,
    "bool": torch.Tensor.bool,
    "cat": lambda x: torch.cat([x, x]),
    "index": lambda x: x[[0, 1]],
    "flip": lambda x: x.flip(0),
    "matmul": lambda x: x.view(2, 2) @ x.view(2, 2),
    "outer": lambda x: torch.outer(x, x),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_partials_of_integers_are_what_their_whole_is(dtype: torch.dtype) -> None:
    def compare(rank: int) -> list[str]:
        mesh, local, wrong = init_device_mesh("cpu", (2,)), torch.tensor(TERMS[rank]), []
        for kind in ("sum", "avg", "max", "min")[:: 2 if dtype == torch.bool else 1]:
            x = DTensor.from_local(local.to(dtype), mesh, [Partial(kind)])
            whole = x.full_tensor()
            for name, function in FUNCTIONS.items():
                try:
                    wanted = function(whole)
                except RuntimeError:  # torch has no such op of this dtype
                    with pytest.raises(RuntimeError):
                        function(x)
                    continue
                found = function(x).full_tensor()
                if found.dtype != wanted.dtype or not torch.equal(found, wanted):
                    wrong.append(f"{name} of {kind}: {found.tolist()} for {wanted.tolist()}")
        return wrong

    assert sim.run(2, compare)[0] == []


def test_terms_do_not_outlive_a_change_of_dtype() -> None:
    """0.5 and 0.5 are no terms of 1 as integers, 100 and 100 in 8 bits none of -56 as floats."""
    fractions = [0.5, 2.0, 0.5, 300.0], [0.5, 1.5, 1.5, 100.0]
    pairs = [
        (torch.float32, torch.int64),
        (torch.float32, torch.float64),
        (torch.int8, torch.int32),
        (torch.int8, torch.float32),
        (torch.int64, torch.int8),
    ]
    functions: dict[str, Callable[[torch.Tensor, torch.dtype], torch.Tensor]] = {
        "to": lambda x, new: x.to(new),
        "sum": lambda x, new: x.sum(dtype=new),
        "cat": lambda x, new: torch.cat([x, torch.ones_like(x, dtype=new)]),
        "maximum": lambda x, new: x.amax(0).maximum(torch.ones_like(x, dtype=new)),
    }

    def compare(rank: int) -> list[str]:
        mesh, wrong = init_device_mesh("cpu", (2,)), []
        for old, new in pairs:
            values = fractions if old.is_floating_point else TERMS
            local = torch.tensor(values[rank], dtype=old)
            for kind in ("sum", "avg", "product", "max", "min"):
                x = DTensor.from_local(local, mesh, [Partial(kind)])
                whole = x.full_tensor()
                target = DTensor.from_local(torch.zeros_like(local, dtype=new), mesh, x.placements)
                results = {"copy_": (target.copy_(x), whole.to(new))}
                results |= {n: (f(x, new), f(whole, new)) for n, f in functions.items()}
                for name, (found, wanted) in results.items():
                    full = found.full_tensor()
                    if full.dtype != wanted.dtype or not torch.equal(full, wanted):
                        wrong.append(f"{name}, {kind} of {old} to {new}: {full} for {wanted}")
        return wrong

    assert sim.run(2, compare)[0] == []


def test_an_average_of_short_integers_does_not_wrap_around() -> None:
    def average(rank: int) -> list[list[int]]:
        mesh, local = init_device_mesh("cpu", (2,)), torch.tensor([[100, -100], [100, -99]][rank])
        x = DTensor.from_local(local.to(torch.int8), mesh, [Partial("avg")])
        return [t.full_tensor().tolist() for t in (x, x.clone().neg_(), x.clone().fill_(77))]

    assert sim.run(2, average)[0] == [[100, -99], [-100, 99], [77, 77]]


def test_a_softmax_over_shards_and_its_loss_refuse_integers() -> None:
    def refused(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.arange(6), mesh, [Shard(0)])
        target = distribute_tensor(torch.tensor(1), mesh)
        for call in (
            lambda: x.softmax(0),
            lambda: x.log_softmax(0),
            lambda: torch.nn.functional.nll_loss(x, target),
        ):
            with pytest.raises(NotImplementedError, match="'Long'"):
                call()
        assert x.softmax(0, dtype=torch.float32).dtype == torch.float32

    sim.run(2, refused)


def test_what_no_kernel_takes_is_refused_also_where_there_are_no_elements() -> None:
    """The last of four ranks has none of three columns."""

    def refused(rank: int) -> None:
        mesh = init_device_mesh("cpu", (4,))
        x = distribute_tensor(torch.ones(8, 3, dtype=torch.bool), mesh, [Shard(1)])
        whole = x.redistribute(placements=[Replicate()])
        for call in (lambda: x.cumsum(0, dtype=x.dtype), lambda: whole.T @ x, lambda: x.T @ x):
            with pytest.raises(NotImplementedError, match="'Bool'"):
                call()

    sim.run(4, refused)
