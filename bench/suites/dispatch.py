"""Host time of DTensor operations: weft's against torch's, in the same processes, interleaved.

On tensors of 64 numbers an operation takes as long as its host code. A time is the mean of 50 calls
in a row, with one thread for each rank, on the slower rank. Rows that communicate really do so,
ours through symmetric memory, torch's through its process group; the other rows have a barrier
before the 50 calls and none among them. Every row's values are compared with those of the same
calls on whole plain tensors, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.tensor as torch_tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from weft import dtensor as weft_tensor
from weft.bench.problem import Call, Options, Prepared, Spec

NAME = "dispatch"
WORLD: Literal["ranks", "one"] = "ranks"

_REPEATS = 50
_WEFT, _TORCH = "weft", "torch"


class Operation(NamedTuple):
    """An operation.

    Attributes:
        records: whether autograd does.
        written: what it changes, where that is to be compared as well as its result.
    """

    call: Callable[[], Any]
    records: bool = False
    written: Callable[[], Any] = lambda: ()


class _Whole(torch.Tensor):
    """What the rows are compared with: a whole tensor, with the methods of a DTensor."""

    @staticmethod
    def distribute(whole: torch.Tensor, *layout: Any, **options: Any) -> Any:
        return whole.double().as_subclass(_Whole)

    @staticmethod
    def from_local(local: torch.Tensor, *layout: Any) -> Any:
        return torch.cat([local] * dist.get_world_size()).double().as_subclass(_Whole)

    def redistribute(self, *layout: Any) -> _Whole:
        return self

    def to_local(self) -> torch.Tensor:
        return self.chunk(dist.get_world_size())[dist.get_rank()] if self.dim() else self


_on_one_device = SimpleNamespace(
    DTensor=_Whole,
    distribute_tensor=_Whole.distribute,
    Replicate=torch_tensor.Replicate,
    Shard=torch_tensor.Shard,
)


def _operations(api: Any, mesh: DeviceMesh) -> Iterator[tuple[str, Operation]]:
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
    yield "add", Operation(lambda: torch.add(x, y))
    yield "x + y", Operation(lambda: x + y)
    yield "add, requires grad", Operation(lambda: x_grad + y, records=True)
    yield "add in place", Operation(lambda: z.add_(y))
    yield "mul by scalar", Operation(lambda: x * 2.0)
    yield "relu", Operation(lambda: torch.relu(x))
    yield "softmax", Operation(lambda: torch.softmax(x, -1))
    yield "sum", Operation(lambda: x.sum())
    yield "matmul R @ S(1)", Operation(lambda: torch.mm(x3_2d, w_columns))
    yield "linear 2-d", Operation(lambda: functional.linear(x3_2d, w, b))
    yield "linear 3-d", Operation(lambda: functional.linear(x3, w, b))
    yield "layer_norm", Operation(lambda: functional.layer_norm(x, (8,), scale, scale))
    yield "t", Operation(lambda: x.t())
    yield "view", Operation(lambda: x.view(2, 4, 8))
    yield "detach", Operation(lambda: x.detach())
    yield "split", Operation(lambda: x.split(4, 1))
    yield "from_local", Operation(lambda: api.DTensor.from_local(local, mesh, shard))
    yield "to_local", Operation(lambda: x_grad.to_local(), records=True)
    yield "redistribute, no change", Operation(lambda: x.redistribute(mesh, shard))
    yield "redistribute R -> S(0)", Operation(lambda: x3.redistribute(mesh, shard))
    yield "redistribute S(0) -> R", Operation(lambda: x.redistribute(mesh, replicate))

    w1 = make(16, 8, placements=shard, grad=True)
    w2 = make(8, 16, placements=columns, grad=True)

    def mlp() -> Any:
        y: Any = functional.linear(functional.relu(functional.linear(x3, w1)), w2)
        return y.redistribute(mesh, replicate)

    def step() -> None:
        mlp().sum().to_local().backward()

    yield "MLP forward", Operation(mlp)
    yield (
        "MLP forward + backward",
        Operation(step, records=True, written=lambda: [w1.grad, w2.grad]),
    )

    def parameters() -> list[torch.nn.Parameter]:
        made = [torch.nn.Parameter(make(8, 8, placements=shard)) for _ in range(20)]
        for p in made:
            p.grad = make(8, 8, placements=shard)
        return made

    for name, foreach in (("AdamW, 20 parameters", True), ("AdamW, one by one", False)):
        trained = parameters()
        step_of = torch.optim.AdamW(trained, foreach=foreach).step
        yield name, Operation(step_of, records=True, written=partial(list, trained))
    clipped = parameters()
    yield (
        "clip_grad_norm_, 20 parameters",
        Operation(
            lambda: torch.nn.utils.clip_grad_norm_(clipped, 1.0, foreach=True),
            records=True,
            written=lambda: [p.grad for p in clipped],
        ),
    )

    shapes = iter(range(10, 10**9))

    def miss() -> Any:
        n = next(shapes)
        t = api.DTensor.from_local(torch.ones(1, n), mesh, shard)
        return torch.add(t, t)

    yield "add, new shape each call", Operation(miss)


@lru_cache(maxsize=1)
def _operations_by_api(
    ranks: int,
) -> tuple[dict[str, Operation], dict[str, Operation], dict[str, Operation]]:
    """Ours, torch's, and what they are compared with: rows of the same values."""
    mesh = init_device_mesh("cpu", (ranks,))
    ours, theirs, whole = (
        dict(_operations(api, mesh)) for api in (weft_tensor, torch_tensor, _on_one_device)
    )
    return ours, theirs, whole


# Operations, and the part of torch's time that they may take; None where nothing was set.
_AT_MOST: dict[str, float | None] = {
    name: at_most
    for at_most, names in (
        (1.0, ("add", "x + y", "add, requires grad", "add in place", "mul by scalar")),
        (1.0, ("relu", "softmax", "sum")),
        (0.8, ("matmul R @ S(1)", "linear 2-d", "linear 3-d", "layer_norm")),
        (None, ("t", "view", "detach", "split")),
        (0.5, ("from_local",)),
        (None, ("to_local",)),
        (0.5, ("redistribute, no change", "redistribute R -> S(0)", "redistribute S(0) -> R")),
        (None, ("MLP forward",)),
        (0.4, ("MLP forward + backward",)),
        (0.5, ("AdamW, 20 parameters", "AdamW, one by one")),
        (None, ("clip_grad_norm_, 20 parameters",)),
        (0.2, ("add, new shape each call",)),
    )
    for name in names
}


def cases(options: Options) -> list[Spec]:
    """One case an operation."""
    if options.shapes:
        raise ValueError(f"{NAME} takes no --shapes: small tensors show what the host does")
    return [
        Spec(name, {"op": name, "repeats": _REPEATS, "at_most": at_most})
        for name, at_most in _AT_MOST.items()
    ]


def prepare(spec: Spec, options: Options) -> Prepared:
    """One operation, on this rank."""
    if options.device != "cpu":
        why = "the host's time is taken on CPU ranks, where nothing runs beside it: --device cpu"
        return Prepared({}, absent={_WEFT: why, _TORCH: why})
    ours, theirs, whole = (table[spec.name] for table in _operations_by_api(options.ranks))
    repeats = 5 if options.quick else _REPEATS

    def repeated(row: Operation) -> Call:
        def call(_: int) -> Any:
            with torch.set_grad_enabled(row.records):
                for _ in range(repeats):
                    value = row.call()
            return row, value

        return call

    return Prepared(
        {_WEFT: repeated(ours), _TORCH: repeated(theirs)},
        expected=lambda: _values(repeated(whole)(0)),
        observe=_values,
        tolerance=1e-5,
        inputs=1,
        repeats=repeats,
        main=_WEFT,
        peer=_TORCH,
    )


def _values(shown: tuple[Operation, Any]) -> list[torch.Tensor]:
    """All of the tensors that a call has returned or written."""
    row, value = shown
    found = tree_leaves([value, row.written()])
    return [_detached_whole(each) for each in found if isinstance(each, torch.Tensor)]


def _detached_whole(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().as_subclass(torch.Tensor)
