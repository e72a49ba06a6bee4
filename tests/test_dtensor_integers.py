"""Partials of integers: what wraps around, is cut or saturates is what it is on one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from weft import sim
from weft.dtensor import DTensor, Partial, init_device_mesh

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
