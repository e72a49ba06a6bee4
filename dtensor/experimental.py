"""`local_map`, `register_sharding`, `implicit_replication` and `context_parallel`, as in torch's
`experimental`; and `discover_sharding`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from weft.dtensor.dispatch import discovery
from weft.dtensor.dispatch.call import Choices, Meta, OpCall, Strategy, rules_of_overloads
from weft.dtensor.dispatch.dispatch import forget_plans
from weft.dtensor.fused.context_parallel import context_parallel, context_parallel_unshard
from weft.dtensor.layout.boxes import Layout
from weft.dtensor.layout.placements import normalize, show
from weft.dtensor.tensor import DTensor

__all__ = [
    "context_parallel",
    "context_parallel_unshard",
    "discover_sharding",
    "implicit_replication",
    "local_map",
    "register_sharding",
]

PlacementType = Sequence[Placement] | None
InputPlacements = tuple[PlacementType, ...] | None
OutputPlacements = PlacementType | tuple[PlacementType, ...]


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: OutputPlacements = None,
    in_placements: InputPlacements = None,
    in_grad_placements: InputPlacements = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """Make a function of plain tensors one of DTensors: it runs on the local parts.

    Args:
        func: takes and returns plain tensors. None: `local_map(...)` is a decorator.
        out_placements: of each result (a tuple of placements lists, or one for a single result);
            None for a result that is not a tensor.
        in_placements: that each flattened argument must have; None for one that is not a tensor.
            Default: any.
        in_grad_placements: how each argument's local gradients make up the global one, see
            `DTensor.to_local`.
        device_mesh: of the results. Default: the first DTensor argument's.
        redistribute_inputs: bring arguments to `in_placements`, rather than raise.

    Returns:
        The function of DTensors. Without any DTensor among its arguments it is `func` itself.

    Raises:
        ValueError: an argument has other placements; not one entry for each argument or result, or
            placements for a value that is not a tensor.

    Example:
        >>> @local_map(out_placements=[Partial()], in_placements=([Shard(1)], [Shard(0)]))
        ... def partial_product(x, w):      # local: (4, 8/W) @ (8/W, 4)
        ...     return x @ w
        >>> partial_product(x, w).full_tensor()                      # (4, 4)
    """
    if func is None:
        return partial(
            local_map,
            out_placements=out_placements,
            in_placements=in_placements,
            in_grad_placements=in_grad_placements,
            device_mesh=device_mesh,
            redistribute_inputs=redistribute_inputs,
        )
    return partial(
        _run_locally,
        func,
        out_placements,
        in_placements,
        in_grad_placements,
        device_mesh,
        redistribute_inputs,
    )


def _run_locally(
    func: Callable[..., Any],
    out_placements: OutputPlacements,
    in_placements: InputPlacements,
    in_grad_placements: InputPlacements,
    device_mesh: DeviceMesh | None,
    redistribute_inputs: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    flat, tree = pytree.tree_flatten(args)
    wanted = _one_each("in_placements", in_placements, len(flat))
    gradients = _one_each("in_grad_placements", in_grad_placements, len(flat))
    local: list[Any] = []
    mesh = device_mesh
    for i, (arg, placements, of_grad) in enumerate(zip(flat, wanted, gradients, strict=True)):
        if not isinstance(arg, DTensor):
            if placements is not None and not isinstance(arg, torch.Tensor):
                raise ValueError(
                    f"local_map: argument {i} is a {type(arg).__name__}, not a tensor: its "
                    f"in_placements must be None, got {placements}"
                )
            local.append(arg)
            continue
        mesh = mesh or arg.device_mesh
        if in_placements is not None:
            arg = _placed_for_map(arg, placements, redistribute_inputs, i)
        if in_grad_placements is not None and of_grad is None:
            raise ValueError(f"local_map: in_grad_placements of the DTensor argument {i} are None")
        local.append(arg.to_local(grad_placements=of_grad))
    out = func(*pytree.tree_unflatten(local, tree), **kwargs)
    if not any(isinstance(arg, DTensor) for arg in flat):
        return out
    results, out_tree = pytree.tree_flatten(out)
    given = out_placements if isinstance(out_placements, tuple) else (out_placements,)
    placed = _one_each("out_placements", given, len(results))
    wrapped: list[Any] = []
    for i, (value, placements) in enumerate(zip(results, placed, strict=True)):
        is_tensor = isinstance(value, torch.Tensor)
        if isinstance(value, DTensor) or is_tensor == (placements is None):
            raise ValueError(
                f"local_map: result {i} is a {type(value).__name__} with out_placements "
                f"{placements}: plain tensors have placements, other values None"
            )
        wrapped.append(DTensor.from_local(value, mesh, placements) if is_tensor else value)
    return pytree.tree_unflatten(wrapped, out_tree)


def _one_each(
    name: str, placements: tuple[PlacementType, ...] | None, count: int
) -> tuple[PlacementType, ...]:
    if placements is None:
        return (None,) * count
    if len(placements) != count:
        raise ValueError(
            f"local_map needs one entry in {name} for each value, got {len(placements)} for "
            f"{count}: pass None for values that are not tensors"
        )
    return placements


def _placed_for_map(arg: DTensor, placements: PlacementType, redistribute: bool, i: int) -> DTensor:
    if placements is None:
        raise ValueError(f"local_map: in_placements of the DTensor argument {i} are None")
    if arg.placements == tuple(placements):
        return arg
    if not redistribute:
        raise ValueError(
            f"local_map: argument {i} has mismatched placements {show(arg.placements)}, expected "
            f"{show(placements)}: redistribute it, or set redistribute_inputs=True"
        )
    return arg.redistribute(placements=placements)


def register_sharding(op: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function that says how an aten or custom op may be sharded, in place of our rule.

    Args:
        op: an `OpOverload`, or a list of them.

    The function gets the op's arguments, with a layout (`.shape`, `.ndim`, `.placements`) in place
    of each tensor. It returns pairs ([placement of each result], [placement of each argument, None
    if it is not a tensor]), each a way to run the op along one mesh dim. The cheapest is used.

    Example:
        >>> @register_sharding(torch.ops.mylib.scale.default)    # scale(Tensor x, float by)
        ... def scale_sharding(x, by):
        ...     shards = [([Shard(d)], [Shard(d), None]) for d in range(x.ndim)]
        ...     return [([Replicate()], [Replicate(), None]), *shards]
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def sharding(call: OpCall) -> Choices:
            strategies = []
            for outputs, inputs in function(*call.args, **call.kwargs):
                results = [p for p in outputs if p is not None]
                if len(results) != len(call.outputs):
                    raise ValueError(
                        f"register_sharding of {call}: a strategy must place each of its "
                        f"{len(call.outputs)} results, got {list(outputs)}"
                    )
                placed = _valid(_per_tensor(call, inputs), call.inputs)
                strategies.append(Strategy(placed, _valid(results, call.outputs)))
            return Choices(strategies)

        for overload in op if isinstance(op, (list, tuple)) else [op]:
            rules_of_overloads[overload] = sharding
            forget_plans(overload)
        return function

    return register


def discover_sharding(op: Any) -> None:
    """Have weft find out by trying how an op may be sharded, as it does with torch's own ops.

    Without it, an op of another library that has no `register_sharding` runs on replicas. It is
    tried on small random tensors, on the CPU, once for each kind of arguments, before its first
    call on DTensors (`weft.explain` shows what was found): results of parts must make up the whole
    result, in every trial.

    Args:
        op: an `OpOverload`, or a list of them: deterministic, with a kernel for the CPU that
            raises where shapes do not fit, and without communication.

    Example:
        >>> discover_sharding(torch.ops.mylib.scale.default)
    """
    for overload in op if isinstance(op, (list, tuple)) else [op]:
        if not isinstance(overload, torch._ops.OpOverload):
            raise ValueError(
                f"discover_sharding takes overloads, such as torch.ops.mylib.scale.default, got "
                f"{overload!r}"
            )
        discovery.asked.add(overload)
        rules_of_overloads.pop(overload, None)
        forget_plans(overload)


def _valid(
    placements: Sequence[Placement], tensors: Sequence[Layout | Meta]
) -> tuple[Placement, ...]:
    """The placement of each tensor, normalized; ValueError if it has no such placement."""
    pairs = zip(placements, tensors, strict=True)
    return tuple(normalize([placement], len(t.shape), 1)[0] for placement, t in pairs)


def _per_tensor(call: OpCall, placements: Sequence[Placement | None]) -> list[Placement]:
    """The placements of the tensors among the flattened arguments."""
    flat, _ = pytree.tree_flatten([call.args, call.kwargs])
    positional = len(pytree.tree_flatten(list(call.args))[0])
    tensors = [i for i, leaf in enumerate(flat) if isinstance(leaf, Layout)]
    if len(placements) in (len(flat), positional):
        placements = [placements[i] for i in tensors if i < len(placements)]
    if len(placements) != len(tensors) or any(p is None for p in placements):
        raise ValueError(
            f"register_sharding of {call}: a strategy must place each of its {len(tensors)} "
            f"tensors, got {list(placements)} for {len(flat)} arguments"
        )
    return [p for p in placements if p is not None]


class Replicating(TorchFunctionMode):
    """Makes replicated DTensors of plain tensors passed with a DTensor (to `functions`, or any)."""

    def __init__(self, functions: Sequence[Callable[..., Any]] | None = None) -> None:
        super().__init__()
        self.functions = functions

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.functions is not None and func not in self.functions:
            return func(*args, **(kwargs or {}))
        flat, tree = pytree.tree_flatten([args, kwargs or {}])
        mesh = next((leaf.device_mesh for leaf in flat if isinstance(leaf, DTensor)), None)
        if mesh is not None:
            everywhere = (Replicate(),) * mesh.ndim
            flat = [
                DTensor.from_local(leaf, mesh, everywhere, run_check=False)
                if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor)
                else leaf
                for leaf in flat
            ]
            args, kwargs = pytree.tree_unflatten(flat, tree)
        return func(*args, **(kwargs or {}))


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Treat plain tensors that meet a DTensor in an operation as replicated.

    Their gradients are plain tensors. Every rank must hold the same values, which is not checked.
    """
    with Replicating():
        yield
