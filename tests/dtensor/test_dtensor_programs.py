"""DTensors in random programs, and in the calls that such programs have found to be wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from program_steps import Step, whole_numbers
from random_programs import check, differs
from torch.nn import functional

from weft import sim
from weft.dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from weft.dtensor.placement_types import _StridedShard


def test_programs() -> None:
    # The last two read a view that torch no longer lets be read, and pass None to a hook.
    assert check([*range(6), 1044, 1157]) == []


def second(x: Any) -> Any:
    """A second derivative, some formulas of which give plain zeros."""
    (first,) = torch.autograd.grad((x.abs() * x).sum(), x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), x, create_graph=True)[0]


def of_norm(x: Any) -> Any:
    """A gradient whose own passes plain zeros to what torch takes apart in a backward."""
    norm = torch.linalg.vector_norm(functional.mish(x), 1)
    return torch.autograd.grad(norm, x, create_graph=True)[0]


def of_rows(w: Any) -> Any:
    """The second derivative of looking rows up, one of them for nothing."""
    rows = functional.embedding(whole_numbers(w, 6), w, padding_idx=2)
    (first,) = torch.autograd.grad(rows.pow(3).sum(), w, create_graph=True)
    return torch.autograd.grad(first.square().sum(), w, create_graph=True)[0]


def written_later(x: Any, w: Any) -> Any:
    """What no gradient needs may be written before the gradients are taken."""
    table = w * 1
    y = functional.linear(x.detach(), table)
    rows = functional.embedding(whole_numbers(x, 6), table)
    table.mul_(2)
    return y.sum() + rows.square().sum() + x.sum()


# What random programs have found: (function, inputs); run in every layout of the first input.
def found() -> dict[str, tuple[Step, list[torch.Tensor]]]:
    torch.manual_seed(0)
    x, w = torch.randn(2, 4, 8).double(), torch.randn(6, 8).double()
    z, u = torch.complex(x, x.flip(0)), torch.complex(w, w.flip(0))
    return {
        "linear of complex numbers": (functional.linear, [z, u]),
        "matmul of complex numbers": (lambda a, b: a @ b.mT, [z[0], u]),
        "norm of complex numbers": (lambda a: torch.linalg.vector_norm(a, dim=(0, 2)), [z]),
        "pinv of complex numbers": (torch.linalg.pinv, [z]),
        "mean of pieces": (lambda a: a.mean(-1), [x]),
        "weight_norm": (lambda v, g: torch._weight_norm(v, g, 0), [x[0], x[0, :, :1].abs()]),
        "weight_norm, last": (lambda v, g: torch._weight_norm(v, g, 1), [x[0], x[0, :1].abs()]),
        "second derivatives": (second, [x[0]]),
        "zeros in a backward": (of_norm, [x[0]]),
        "second derivative of an embedding": (of_rows, [w]),
        "written later": (written_later, [x, w]),
        "of size 1": (lambda a: a.clone().squeeze_(1).add_(1), [x[:, :1].contiguous()]),
        "amin of nothing": (
            lambda a: functional.interpolate(a[:0], 9).amin(1),
            [x[:, :1].contiguous()],
        ),
        "batch_norm of nothing": (lambda a: functional.batch_norm(a[:0], None, None), [x]),
    }


@pytest.mark.parametrize("name", found())
def test_found(name: str) -> None:
    function, inputs = found()[name]
    plain = [t.clone().requires_grad_() for t in inputs]
    expected = function(*plain)
    (expected * expected.detach()).abs().sum().backward()

    def body(rank: int) -> list[Any]:
        mesh = init_device_mesh("cpu", (3,))
        wrong: list[Any] = []
        every = [
            *map(Shard, range(inputs[0].ndim)),
            _StridedShard(inputs[0].ndim - 1, split_factor=3),
        ]
        for placement in [Replicate(), *every]:
            ours = [
                distribute_tensor(t, mesh, [placement if t is inputs[0] else Replicate()])
                for t in inputs
            ]
            leaves = [t.requires_grad_() for t in ours]
            made = function(*leaves)
            (made * made.detach()).abs().sum().backward()
            pairs = [
                (made, expected),
                *((o.grad, p.grad) for o, p in zip(leaves, plain, strict=True)),
            ]
            wrong += [(placement, why) for o, p in pairs if (why := differs(o, p, 1e-9))]
        return wrong

    assert sim.run(3, body, races=False) == [[], [], []]


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(20))
def test_programs_sweep(part: int) -> None:
    assert check(range(1000 * (part + 1), 1000 * (part + 1) + 500)) == []
