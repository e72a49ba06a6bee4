"""Dispatch: what an operation on DTensors does on each rank.

The first call of an op with given layouts makes a plan (`planning.py`). Later calls cost a
dictionary lookup, the local op and a wrap.

    key = (op, layouts of its tensors, its other arguments) -> Plan(moves, local op, result)

Numbers of type float are in the key by their type only: no plan depends on their value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch.distributed.tensor import Replicate

from weft.collectives.group import forget_meshes
from weft.dtensor.call import Op, leaves, map_tree
from weft.dtensor.layout import Layout, layout_of
from weft.dtensor.planning import Plan, make_plan
from weft.dtensor.redistribute import move
from weft.dtensor.tensor import DTensor, before_write, wrap

_MAX_PLANS = 8192
_plans: dict[tuple[Any, ...], Plan] = {}
forget_meshes.append(_plans.clear)


def forget_plans(op: Op) -> None:
    """Make the plans of `op` anew: its rule has changed."""
    for key in [key for key in _plans if key[0] == op]:
        del _plans[key]


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
        plan = _plans[tuple(key)] = make_plan(func, args, kwargs or {})
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
        tensors = [leaf for leaf in leaves([args, kwargs]) if isinstance(leaf, torch.Tensor)]
    if plan.writes:
        for hook in before_write:
            hook()
        for position in plan.writes:
            _begin_write(tensors[position])
    if plan.moves is not None:
        moved = _moved(plan.moves, tensors)
        local_args, local_kwargs = map_tree(
            [list(args), kwargs], lambda a: next(moved) if isinstance(a, torch.Tensor) else a
        )
    result = plan.local(*local_args, **local_kwargs)
    if type(plan.result) is int:
        return tensors[plan.result]
    if plan.dynamic:
        return map_tree(result, lambda t: _wrap_dynamic(t, tensors, args, kwargs))
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
        for tensor in leaves([tensors]):
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
    found = [leaf for leaf in leaves([args, kwargs]) if isinstance(leaf, DTensor)]
    mesh = found[0]._layout.mesh
    placements = (Replicate(),) * mesh.ndim
    layout = layout_of(mesh, placements, tuple(value.shape), value.stride(), value.dtype)
    return wrap(value, layout)


def _torch_dispatch(
    cls: type, func: Op, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    return dispatch(func, args, kwargs)


DTensor.__torch_dispatch__ = classmethod(_torch_dispatch)  # type: ignore[assignment]
