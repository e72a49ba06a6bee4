"""Host time of DTensor operations: weft's against torch's, in one process, interleaved.

The world is a fake process group of two ranks, as the cost of dispatch, not of communication, is
measured: a time is the mean of 50 calls in a row, on one thread. Results that need no communication
are compared with torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.tensor as torch_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from weft import dtensor as weft_tensor
from weft.bench.problem import Call, Options, Prepared, Spec

NAME = "dispatch"
WORLD: Literal["ranks", "one"] = "one"

_REPEATS = 50
_WEFT, _TORCH = "weft", "torch"


class Row(NamedTuple):
    """An operation. `checked`: its result is right on one rank alone, and is compared."""

    call: Callable[[], Any]
    records: bool = False  # whether autograd does
    checked: bool = True


def _rows(api: Any) -> Iterator[tuple[str, Row]]:
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(0)
    replicate, shard, columns = [api.Replicate()], [api.Shard(0)], [api.Shard(1)]

    def make(*shape: int, placements: Any, grad: bool = False) -> Any:
        local = torch.randn(shape, generator=generator)
        return api.distribute_tensor(local, mesh, placements, src_data_rank=None).requires_grad_(
            grad
        )

    x, y, z = (make(8, 8, placements=shard) for _ in range(3))
    x_grad = make(8, 8, placements=shard, grad=True)
    x3 = make(2, 4, 8, placements=replicate)
    w, b = make(8, 8, placements=shard), make(8, placements=shard)
    scale = make(8, placements=replicate)
    local = torch.randn(4, 8, generator=generator)
    x3_2d, w_columns = make(4, 8, placements=replicate), make(8, 8, placements=columns)
    yield "add", Row(lambda: torch.add(x, y))
    yield "x + y", Row(lambda: x + y)
    yield "add, requires grad", Row(lambda: x_grad + y, records=True)
    yield "add in place", Row(lambda: z.add_(y), checked=False)
    yield "mul by scalar", Row(lambda: x * 2.0)
    yield "relu", Row(lambda: torch.relu(x))
    yield "softmax", Row(lambda: torch.softmax(x, -1))
    yield "sum", Row(lambda: x.sum())
    yield "matmul R @ S(1)", Row(lambda: torch.mm(x3_2d, w_columns))
    yield "linear 2-d", Row(lambda: functional.linear(x3_2d, w, b))
    yield "linear 3-d", Row(lambda: functional.linear(x3, w, b))
    yield "layer_norm", Row(lambda: functional.layer_norm(x, (8,), scale, scale))
    yield "t", Row(lambda: x.t())
    yield "view", Row(lambda: x.view(2, 4, 8))
    yield "detach", Row(lambda: x.detach())
    yield "split", Row(lambda: x.split(4, 1))
    yield "from_local", Row(lambda: api.DTensor.from_local(local, mesh, shard))
    yield "to_local", Row(lambda: x_grad.to_local(), records=True)
    yield "redistribute, no change", Row(lambda: x.redistribute(mesh, shard))
    yield "redistribute R -> S(0)", Row(lambda: x3.redistribute(mesh, shard))
    yield "redistribute S(0) -> R", Row(lambda: x.redistribute(mesh, replicate), checked=False)

    w1 = make(16, 8, placements=shard, grad=True)
    w2 = make(8, 16, placements=columns, grad=True)

    def mlp() -> Any:
        y: Any = functional.linear(functional.relu(functional.linear(x3, w1)), w2)
        return y.redistribute(mesh, replicate)

    def step() -> None:
        mlp().sum().to_local().backward()

    yield "MLP forward", Row(mlp, checked=False)
    yield "MLP forward + backward", Row(step, records=True, checked=False)

    sizes = [torch.nn.Parameter(make(8, 8, placements=shard)) for _ in range(20)]
    for p in sizes:
        p.grad = make(8, 8, placements=shard)
    optimizer = torch.optim.AdamW(sizes, foreach=True)
    yield "AdamW, 20 parameters", Row(optimizer.step, records=True, checked=False)
    one_by_one = torch.optim.AdamW(sizes, foreach=False)
    yield "AdamW, one by one", Row(one_by_one.step, records=True, checked=False)
    norm = torch.nn.utils.clip_grad_norm_
    yield (
        "clip_grad_norm_, 20 parameters",
        Row(lambda: norm(sizes, 1.0, foreach=True), records=True, checked=False),
    )

    shapes = iter(range(10, 10**9))

    def miss() -> Any:
        n = next(shapes)
        t = api.DTensor.from_local(torch.ones(1, n), mesh, shard)
        return torch.add(t, t)

    yield "add, new shape each call", Row(miss, checked=False)


@lru_cache(maxsize=1)
def _tables() -> tuple[dict[str, Row], dict[str, Row]]:
    """Ours and torch's rows, in a process that has no process group yet."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    return dict(_rows(weft_tensor)), dict(_rows(torch_tensor))


# Operations, and the part of torch's time that they may take; None where nothing was set.
_AT_MOST: dict[str, float | None] = {
    "add": 1.0,
    "x + y": 1.0,
    "add, requires grad": 1.0,
    "add in place": 1.0,
    "mul by scalar": 1.0,
    "relu": 1.0,
    "softmax": 1.0,
    "sum": 1.0,
    "matmul R @ S(1)": 0.8,
    "linear 2-d": 0.8,
    "linear 3-d": 0.8,
    "layer_norm": 0.8,
    "t": None,
    "view": None,
    "detach": None,
    "split": None,
    "from_local": 0.5,
    "to_local": None,
    "redistribute, no change": 0.5,
    "redistribute R -> S(0)": 0.5,
    "redistribute S(0) -> R": 0.5,
    "MLP forward": None,
    "MLP forward + backward": 0.4,
    "AdamW, 20 parameters": 0.5,
    "AdamW, one by one": 0.5,
    "clip_grad_norm_, 20 parameters": None,
    "add, new shape each call": 0.2,
}


def cases(options: Options) -> list[Spec]:
    """One case an operation."""
    return [
        Spec(name, {"op": name, "repeats": _REPEATS, "at_most": at_most})
        for name, at_most in _AT_MOST.items()
    ]


def prepare(spec: Spec, options: Options) -> Prepared:
    """One operation."""
    ours, theirs = (table[spec.name] for table in _tables())
    repeats = 5 if options.quick else _REPEATS

    def repeated(row: Row) -> Call:
        def call(_: int) -> Any:
            with torch.set_grad_enabled(row.records):
                for _ in range(repeats):
                    value = row.call()
            return value

        return call

    return Prepared(
        {_WEFT: repeated(ours), _TORCH: repeated(theirs)},
        expected=(lambda: _values(theirs.call())) if ours.checked else None,
        observe=_values,
        tolerance=1e-6,
        inputs=1,
        repeats=repeats,
        main=_WEFT,
        peer=_TORCH,
    )


def _values(value: Any) -> list[torch.Tensor]:
    """This rank's part of the tensors in a result."""
    if isinstance(value, (tuple, list)):
        return [each for item in value for each in _values(item)]
    if hasattr(value, "to_local"):
        value = value.to_local()
    return [value.detach()] if isinstance(value, torch.Tensor) else []
