"""Dispatch: what an operation on DTensors does on each rank.

The first call of an op with given layouts makes a plan: the rules (`rules_*.py`) offer strategies
for one mesh dim, each mesh dim takes the one that moves the fewest bytes, the op runs once on meta
tensors to learn the global result. Later calls cost a dictionary lookup, the local op and a wrap.

    key = (op, layouts of its tensors, its other arguments) -> Plan(moves, local op, result)

Numbers of type float are in the key by their type only: no plan depends on their value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from weft import settings
from weft.dtensor.layout import (
    Layout,
    Placements,
    Shape,
    is_shard,
    layout_of,
    shard_dim,
    show,
)
from weft.dtensor.random import same_numbers
from weft.dtensor.redistribute import move, transition_bytes
from weft.dtensor.tensor import DTensor, before_write, wrap

Op = Callable[..., Any]
_MAX_PLANS = 8192


class Strategy(NamedTuple):
    """For one mesh dim: how each tensor argument must be placed, and how each result then is."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]


Localize = Callable[["Call", list[Layout], list[Layout]], Op]


@dataclass(frozen=True)
class Choices:
    """What a rule offers.

    Attributes:
        strategies: alternatives for each mesh dim; the cheapest is taken, the first among equals.
        localize: makes the local op from the chosen layouts, where it is not the op itself.
    """

    strategies: list[Strategy]
    localize: Localize | None = None


@dataclass(frozen=True)
class Chosen:
    """A rule's decision for all mesh dims at once."""

    inputs: list[Placements]
    outputs: list[Placements]
    localize: Localize | None = None


@dataclass(frozen=True)
class Decomposed:
    """A rule's decision to compute the op by a function of DTensors."""

    function: Op


@dataclass(frozen=True)
class Meta:
    """Shape, stride and dtype of a result."""

    shape: Shape
    stride: Shape
    dtype: torch.dtype


class Call:
    """An op with its arguments, a `Layout` in place of each tensor."""

    def __init__(self, op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.op, self.args, self.kwargs = op, args, kwargs
        self.inputs: list[Layout] = [
            leaf for leaf in _leaves([args, kwargs]) if isinstance(leaf, Layout)
        ]
        self.mesh = self.inputs[0].mesh
        self.name: str = getattr(op, "_opname", getattr(op, "__name__", str(op)))
        self.outputs: list[Meta] = []
        self.output_tree: Any = None

    @property
    def bound(self) -> dict[str, Any]:
        """The arguments by name, defaults filled in."""
        schema = cast(Any, self.op)._schema
        values = {}
        for i, argument in enumerate(schema.arguments):
            if i < len(self.args) and not argument.kwarg_only:
                values[argument.name] = self.args[i]
            else:
                values[argument.name] = self.kwargs.get(argument.name, argument.default_value)
        return values

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.inputs))})"


class Plan:
    """What one kind of call does on this rank.

    Attributes:
        local: the op on local tensors.
        moves: target layout of each tensor argument, None where it stays; None if all stay.
        result: the layout of the result, a tree of them, or the position of the argument that is
            written and returned.
        simple: nothing to do but run `local` and wrap its one result.
        writes_first: nothing to do but run `local`, which writes the first argument.
    """

    __slots__ = (
        "decomposed",
        "dynamic",
        "is_view",
        "local",
        "moves",
        "result",
        "simple",
        "writes",
        "writes_first",
    )

    def __init__(self, local: Op, moves: list[Layout | None] | None, result: Any) -> None:
        self.local, self.moves, self.result = local, moves, result
        self.simple = False
        self.writes_first = False
        self.is_view = False
        self.dynamic = False
        self.writes: tuple[int, ...] = ()
        self.decomposed: Op | None = None


_plans: dict[tuple[Any, ...], Plan] = {}
_rules: dict[str, Callable[[Call], Choices | Chosen | Decomposed]] = {}


_RuleT = TypeVar("_RuleT", bound=Callable[[Call], Any])


def rule(*names: str) -> Callable[[_RuleT], _RuleT]:
    """Register the decorated function as the rule of these ops (in-place variants included)."""

    def register(function: _RuleT) -> _RuleT:
        for name in names:
            _rules[name] = function
        return function

    return register


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _leaves(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _leaves(item)
    else:
        yield tree


def _map(tree: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(tree, list):
        return [_map(item, change) for item in tree]
    if isinstance(tree, tuple):
        return tuple(_map(item, change) for item in tree)
    if isinstance(tree, dict):
        return {name: _map(item, change) for name, item in tree.items()}
    return change(tree)


def _add(a: Any, key: list[Any], func: Op) -> Any:
    """Append what identifies `a` to `key`, and return its local value."""
    kind = type(a)
    if kind is DTensor:
        key.append(a._layout)
        local = a._local
        return a._local_tensor if local is None else local
    key.append(kind)
    if kind is float or kind is complex or a is None:
        return a
    if kind is list or kind is tuple:
        key.append(len(a))
        if len(a) > 1 and all(type(item) is DTensor and item._local is not None for item in a):
            key.extend([item._layout for item in a])
            return [item._local for item in a]
        return [_add(item, key, func) for item in a]
    if isinstance(a, torch.Tensor):
        if isinstance(a, DTensor):
            key[-1] = a._layout
            return a._local_tensor
        if a.numel() != 1:
            raise RuntimeError(
                f"{func}: got mixed torch.Tensor and DTensor, the torch.Tensor of shape "
                f"{tuple(a.shape)}. Make it a DTensor first: distribute_tensor(t, mesh, "
                f"placements) if every rank holds all of it, DTensor.from_local(t, mesh, "
                f"placements) if each holds its part. (One-element tensors count as replicated.)"
            )
        key.append((a.dtype, a.dim()))
        return a
    if isinstance(a, torch.Generator):
        return a
    key.append(a)
    return a


def dispatch(func: Op, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Any:
    """Run `func` (an aten overload, or an op of ours with a rule) on DTensors, below autograd."""
    key: list[Any] = [func]
    local_args: list[Any] = []
    deferred = False
    for a in args:
        if type(a) is DTensor:
            key.append(a._layout)
            local = a._local
            if local is None:
                local, deferred = a._local_tensor, True
            local_args.append(local)
        elif type(a) is int or type(a) is bool:
            key.append(type(a))
            key.append(a)
            local_args.append(a)
        else:
            local_args.append(_add(a, key, func))
    local_kwargs: dict[str, Any] = {}
    if kwargs:
        for name, value in kwargs.items():
            key.append(name)
            local_kwargs[name] = _add(value, key, func)
    plan = _plans.get(tuple(key))
    if plan is None:
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        plan = _plans[tuple(key)] = _make_plan(func, args, kwargs or {})
    if plan.simple and not (deferred and plan.is_view):
        return wrap(plan.local(*local_args, **local_kwargs), plan.result)
    if plan.writes_first:
        # In place, on the first argument or all of the first list, and nothing moves.
        for hook in before_write:
            hook()
        for tensor in args[0] if plan.result is None else args[:1]:
            if tensor._pending is not None:
                _begin_write(tensor)
        plan.local(*local_args, **local_kwargs)
        return args[0] if plan.result is not None else None
    return _follow(plan, args, kwargs or {}, local_args, local_kwargs)


def _follow(
    plan: Plan,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    local_args: list[Any],
    local_kwargs: dict[str, Any],
) -> Any:
    if plan.decomposed is not None:
        return plan.decomposed(*args, **kwargs)
    tensors: list[torch.Tensor] = []
    if plan.writes or plan.moves is not None or plan.is_view:
        tensors = [leaf for leaf in _leaves([args, kwargs]) if isinstance(leaf, torch.Tensor)]
    if plan.writes:
        for hook in before_write:
            hook()
        for position in plan.writes:
            _begin_write(tensors[position])
    if plan.moves is not None:
        moved = _moved(plan.moves, tensors)
        local_args, local_kwargs = _map(
            [list(args), kwargs], lambda a: next(moved) if isinstance(a, torch.Tensor) else a
        )
    result = plan.local(*local_args, **local_kwargs)
    if type(plan.result) is int:
        return tensors[plan.result]
    if plan.dynamic:
        return _map(result, lambda t: _wrap_dynamic(t, tensors, args, kwargs))
    if plan.is_view:
        source = cast(DTensor, tensors[0])
        return _wrap_view(result, plan, source)
    return _wrap_tree(result, plan.result, tensors)


def _wrap_tree(result: Any, layouts: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(layouts, Layout):
        return wrap(result, layouts)
    if isinstance(layouts, (list, tuple)):
        pairs = zip(result, layouts, strict=True)
        return type(layouts)(_wrap_tree(r, layout, tensors) for r, layout in pairs)
    if type(layouts) is int:
        return tensors[layouts]
    return result


def _wrap_view(result: Any, plan: Plan, source: DTensor) -> Any:
    tensors = _wrap_tree(result, plan.result, [])
    if plan.moves is not None or isinstance(source._pending, CopiedView):
        base = source._pending.base if isinstance(source._pending, CopiedView) else source
        for tensor in _leaves([tensors]):
            tensor._pending = CopiedView(tensor._local, base)
            tensor._local = None
    return tensors


class CopiedView:
    """A view whose elements other ranks hold: a copy of them, valid while the base is unchanged."""

    def __init__(self, local: torch.Tensor, base: DTensor) -> None:
        self.local, self.base = local, base
        self.version = None if base.is_inference() else base._version

    def value(self) -> torch.Tensor:
        if self.version is not None and self.base._version != self.version:
            raise RuntimeError(
                "a view of a DTensor is read after its base was written. The view had to be "
                "gathered from other ranks, and is a copy of the old values: take it again."
            )
        return self.local

    def redistribute(self, tensor: DTensor, target: Layout) -> DTensor | None:
        return None


def _begin_write(tensor: torch.Tensor) -> None:
    if not isinstance(tensor, DTensor) or tensor._pending is None:
        return
    if isinstance(tensor._pending, CopiedView):
        raise NotImplementedError(
            "writing in place through a view of a sharded dim: the view is a copy gathered from "
            "other ranks, the base would not see the write. Redistribute the base to Replicate() "
            "on that mesh dim first, or write with torch.where / slice_scatter"
        )
    tensor._local = tensor._local_tensor
    tensor._pending = None


def _moved(moves: list[Layout | None], tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    for target, tensor in zip(moves, tensors, strict=True):
        if not isinstance(tensor, DTensor):
            yield tensor
        elif target is None or target is tensor._layout:
            yield tensor._local_tensor
        else:
            yield move(tensor._local_tensor, tensor._layout, target)


def _wrap_dynamic(
    value: Any, tensors: list[torch.Tensor], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    found = [leaf for leaf in _leaves([args, kwargs]) if isinstance(leaf, DTensor)]
    mesh = found[0]._layout.mesh
    placements = (Replicate(),) * mesh.ndim
    layout = layout_of(mesh, placements, tuple(value.shape), value.stride(), value.dtype)
    return wrap(value, layout)


def _make_plan(func: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Plan:
    tensors = [leaf for leaf in _leaves([args, kwargs]) if isinstance(leaf, torch.Tensor)]
    mesh = next(t._layout.mesh for t in tensors if isinstance(t, DTensor))
    call = Call(func, *_map([list(args), kwargs], lambda a: _layout_of_argument(a, mesh)))
    plain = [not isinstance(t, DTensor) for t in tensors]
    for layout in call.inputs:
        if layout.mesh != mesh and not call.name.startswith("_foreach"):
            raise NotImplementedError(
                f"{call}: the tensors lie on different meshes. Bring them to one: "
                f"x.redistribute(mesh, placements)"
            )
    writes = _written(call)
    if call.inputs[0].index is None:
        return _outside(call, writes)
    if call.name == "masked_fill_":
        call.name = "masked_fill"
    find = _rules.get(call.name) or _rules.get(call.name.removesuffix("_"))
    tags = getattr(func, "tags", ())
    if find is None:
        if torch.Tag.pointwise in tags:
            find = _rules["pointwise"]
        elif call.name.startswith(("_foreach_", "_fused_")):
            find = _rules["foreach"]
    _learn_outputs(call)
    if find is None or call.output_tree is _DYNAMIC:
        decision: Choices | Chosen | Decomposed = _replicate_all(call, writes)
    else:
        decision = find(call)
    if isinstance(decision, Decomposed):
        plan = Plan(func, None, None)
        plan.decomposed = decision.function
        return plan
    if isinstance(decision, Choices):
        decision = _choose(call, decision, writes, plain)
    targets = [
        layout.with_placements(placements)
        for layout, placements in zip(call.inputs, decision.inputs, strict=True)
    ]
    moves = [t if t is not i else None for t, i in zip(targets, call.inputs, strict=True)]
    results = [
        layout_of(mesh, placements, meta.shape, meta.stride, meta.dtype)
        for meta, placements in zip(call.outputs, decision.outputs, strict=True)
    ]
    local = decision.localize(call, targets, results) if decision.localize else None
    if local is None:
        local = _QUICKER.get(func, func)
    if torch.Tag.nondeterministic_seeded in tags:
        where = call.inputs[writes[0]] if writes else (results or targets)[0]
        local = same_numbers(local, where)
    plan = Plan(local, moves if any(moves) else None, None)
    plan.writes = tuple(writes)
    plan.dynamic = call.output_tree is _DYNAMIC
    plan.is_view = _is_view(call)
    if plan.dynamic:
        return plan
    if writes and len(results) == 1 and _returns_argument(call):
        plan.result = writes[0]
        _check_unchanged(call, call.inputs[writes[0]], call.outputs[0])
        plan.writes_first = writes == [0] and plan.moves is None and not plain[0]
        return plan
    if writes and not results:
        first = args[0]
        plan.writes_first = (
            isinstance(first, (list, tuple))
            and plan.moves is None
            and writes == list(range(len(first)))
            and not any(plain[: len(first)])
        )
        return plan
    each = iter(results)
    plan.result = _map(call.output_tree, lambda a: next(each) if isinstance(a, Meta) else None)
    plan.simple = isinstance(plan.result, Layout) and not (plan.moves or writes)
    return plan


def _outside(call: Call, writes: list[int]) -> Plan:
    """What a process that is not in the mesh does: nothing, and gets results of global shape."""
    _learn_outputs(call)
    placements = (Replicate(),) * call.mesh.ndim
    plan = Plan(lambda *args, **kwargs: None, None, None)
    if writes:
        plan.writes = tuple(writes)
        plan.result = writes[0] if _returns_argument(call) else None
        return plan

    def result(value: Any) -> Any:
        if not isinstance(value, Meta):
            return value
        layout = layout_of(call.mesh, placements, value.shape, value.stride, value.dtype)
        return wrap(torch.empty(0, dtype=value.dtype), layout)

    plan.decomposed = lambda *args, **kwargs: _map(call.output_tree, result)
    return plan


_DYNAMIC = object()
# The same ops by torch's own parsers: 0.6 us less than calling an overload object.
_QUICKER: dict[Op, Op] = {
    torch.ops.aten.add.Tensor: torch.add,
    torch.ops.aten.sub.Tensor: torch.sub,
    torch.ops.aten.mul.Tensor: torch.mul,
    torch.ops.aten.div.Tensor: torch.div,
    torch.ops.aten.relu.default: torch.relu,
    torch.ops.aten.mm.default: torch.mm,
    torch.ops.aten.add_.Tensor: torch.Tensor.add_,
    torch.ops.aten.mul_.Tensor: torch.Tensor.mul_,
    torch.ops.aten.detach.default: torch.detach,
    torch.ops.aten.t.default: torch.t,
}


def _layout_of_argument(a: Any, mesh: Any) -> Any:
    if isinstance(a, DTensor):
        return a._layout
    if isinstance(a, torch.Tensor):
        placements = (Replicate(),) * mesh.ndim
        return layout_of(mesh, placements, tuple(a.shape), a.stride(), a.dtype)
    return a


def _written(call: Call) -> list[int]:
    """Positions, among the tensor arguments, of those that the op writes."""
    schema = getattr(call.op, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    positions: list[int] = []
    at = 0
    for argument in schema.arguments:
        value = call.bound[argument.name]
        count = sum(isinstance(leaf, Layout) for leaf in _leaves([value]))
        # A fused optimizer unscales gradients in place only when it is given a scale.
        scratch = argument.name == "grads" and call.bound.get("grad_scale") is None
        if argument.alias_info is not None and argument.alias_info.is_write and not scratch:
            positions += range(at, at + count)
        at += count
    return positions


def _returns_argument(call: Call) -> bool:
    returns = cast(Any, call.op)._schema.returns
    return len(returns) == 1 and returns[0].alias_info is not None


def _is_view(call: Call) -> bool:
    schema = getattr(call.op, "_schema", None)
    return (
        schema is not None
        and not schema.is_mutable
        and any(r.alias_info is not None for r in schema.returns)
    )


def _check_unchanged(call: Call, target: Layout, meta: Meta) -> None:
    if meta.shape != target.shape:
        raise NotImplementedError(
            f"{call} in place would change the shape {target.shape} to {meta.shape}: use the "
            f"variant that returns a new tensor"
        )


def _learn_outputs(call: Call) -> None:
    """Run the op on meta tensors: shapes, strides and dtypes of the global results.

    Where these depend on the data, the result is known only once the op has run.
    """
    kwargs = dict(call.kwargs)
    if "device" in kwargs:
        kwargs["device"] = torch.device("meta")
    args, kwargs = _map([list(call.args), kwargs], _meta_argument)
    try:
        result = call.op(*args, **kwargs)
    except RuntimeError as error:
        # Ops without a meta kernel say so in several ways, all of them RuntimeError.
        if not isinstance(error, NotImplementedError) and "meta" not in str(error).lower():
            raise
        call.output_tree = _DYNAMIC
        return
    call.output_tree = _map(result, _meta_of)
    call.outputs = list(_meta_leaves(call.output_tree))


def _meta_argument(a: Any) -> Any:
    if isinstance(a, Layout):
        return torch.empty_strided(a.shape, a.stride, dtype=a.dtype, device="meta")
    if isinstance(a, torch.Generator):
        return None
    return a


def _meta_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Meta(tuple(value.shape), value.stride(), value.dtype)
    return value


def _meta_leaves(tree: Any) -> Iterator[Meta]:
    if isinstance(tree, Meta):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _meta_leaves(item)


def _replicate_all(call: Call, writes: list[int]) -> Choices:
    """The way of an op without rule: run it whole on every rank."""
    if writes:
        raise NotImplementedError(
            f"{call} writes in place and has no sharding rule. Redistribute its tensors to "
            f"Replicate() and call it on their to_local(), or use the variant that returns a new "
            f"tensor"
        )
    if settings.tracing():
        settings.record(call.name, "replicated", "no sharding rule for it", str(call))
    n_in, n_out = len(call.inputs), len(call.outputs)
    return Choices([Strategy((Replicate(),) * n_in, (Replicate(),) * n_out)])


def _choose(call: Call, choices: Choices, writes: list[int], plain: list[bool]) -> Chosen:
    """Take the cheapest strategy for each mesh dim."""
    inputs: list[list[Placement]] = [[] for _ in call.inputs]
    outputs: list[list[Placement]] = [[] for _ in call.outputs]
    for mesh_dim in range(call.mesh.ndim):
        best: tuple[float, int] | None = None
        taken: Strategy | None = None
        for strategy in choices.strategies:
            price = _price(call, strategy, mesh_dim, writes, plain)
            if price is not None and (best is None or price < best):
                best, taken = price, strategy
        if taken is None:
            raise RuntimeError(
                f"{call}: no strategy fits mesh dim {mesh_dim}. "
                + (
                    f"An op in place cannot change the placement of its target "
                    f"{show(call.inputs[writes[0]].placements)}: redistribute it first, or use the "
                    f"variant that returns a new tensor."
                    if writes
                    else "Redistribute its tensors to Replicate() first."
                )
            )
        for per_tensor, placement in zip(inputs, taken.inputs, strict=True):
            per_tensor.append(placement)
        for per_tensor, placement in zip(outputs, taken.outputs, strict=True):
            per_tensor.append(placement)
    return Chosen(
        [tuple(placements) for placements in inputs],
        [tuple(placements) for placements in outputs],
        choices.localize,
    )


def _price(
    call: Call, strategy: Strategy, mesh_dim: int, writes: list[int], plain: list[bool]
) -> tuple[float, int] | None:
    """(bytes, tensors that change) of a strategy on one mesh dim; None where it cannot be."""
    total, changes = 0.0, 0
    for i, (layout, wanted) in enumerate(zip(call.inputs, strategy.inputs, strict=True)):
        old = layout.placements[mesh_dim]
        if old == wanted:
            continue
        if i in writes or plain[i]:
            return None
        if isinstance(wanted, Partial) and not isinstance(old, Replicate):
            return None
        if is_shard(wanted) and shard_dim(wanted) >= len(layout.shape):
            return None
        total += transition_bytes(layout, mesh_dim, wanted)
        changes += 1
    for i in writes:
        if i < len(strategy.outputs) and len(writes) == len(strategy.outputs):
            wanted_out = strategy.outputs[writes.index(i)]
            if wanted_out != call.inputs[i].placements[mesh_dim]:
                return None
    return total, changes


def _torch_dispatch(
    cls: type, func: Op, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    return dispatch(func, args, kwargs)


DTensor.__torch_dispatch__ = classmethod(_torch_dispatch)  # type: ignore[assignment]
