"""Dispatch: what an operation on DTensors does on each rank.

The first call of an op with given layouts makes a plan (`planning.py`). Later calls cost a
dictionary lookup, the local op and a wrap.

    key = (op, layouts of its tensors, its other arguments) -> Plan(moves, local op, result)

Numbers of type float are in the key by their type only: no plan depends on their value.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Replicate

from weft.collectives.group import forget_meshes
from weft.dtensor.call import Op, leaves, map_tree
from weft.dtensor.layout import Layout, layout_of
from weft.dtensor.planning import Plan, make_plan
from weft.dtensor.redistribute import move
from weft.dtensor.tensor import DTensor, before_write, wrap
from weft.dtensor.views import CopiedView, NoViewError, as_copies

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
        if a.numel() == 1:
            key.append((a.dtype, a.dim()))
            return a
        _check_mixed(a, func)
        key.append((a.dtype, a.shape, a.stride()))
        return a
    if isinstance(a, torch.Generator):
        return a
    key.append(a)
    return a


class Outermost(threading.local):
    """The call of the user that is being run: what it was given, None below `backward`."""

    arguments: Any = None


outermost = Outermost()


def _check_mixed(tensor: torch.Tensor, func: Op) -> None:
    """A plain tensor may come from inside of torch: then all ranks have made the same."""
    for given in leaves(outermost.arguments):
        plain = isinstance(given, torch.Tensor) and not isinstance(given, DTensor)
        if plain and given.numel() != 1:
            raise RuntimeError(
                f"{func}: got mixed torch.Tensor and DTensor, the torch.Tensor of shape "
                f"{tuple(given.shape)}. Make it a DTensor first: distribute_tensor(t, mesh, "
                f"placements) if every rank holds all of it, DTensor.from_local(t, mesh, "
                f"placements) if each holds its part; or run under "
                f"experimental.implicit_replication(). (One-element tensors count as replicated.)"
            )


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
        try:
            return wrap(plan.local(*local_args, **local_kwargs), plan.result)
        except NoViewError:
            return _follow(plan, args, kwargs or {}, local_args, local_kwargs)
    if plan.writes_first:
        # In place, on the first argument or all of the first list, and nothing moves.
        targets = args[:1] if plan.result is not None else args[0]
        if all(tensor._pending is None for tensor in targets):
            for hook in before_write:
                hook()
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
    if plan.is_view:
        return _view(plan, args, local_args, local_kwargs)
    tensors: list[torch.Tensor] = []
    if plan.writes or plan.moves is not None:
        tensors = [leaf for leaf in leaves([args, kwargs]) if isinstance(leaf, torch.Tensor)]
    if plan.writes:
        for hook in before_write:
            hook()
        for position in plan.writes:
            _settle(tensors[position])
    moved: list[torch.Tensor] = []
    if plan.moves is not None:
        moved = list(_moved(plan.moves, tensors))
        each = iter(moved)
        local_args, local_kwargs = map_tree(
            [list(args), kwargs], lambda a: next(each) if isinstance(a, torch.Tensor) else a
        )
    result = plan.local(*local_args, **local_kwargs)
    for position in plan.writes:
        _store(tensors[position], moved[position] if moved else None, plan, position)
    if plan.dynamic:
        return _wrap_dynamic_tree(result, args, kwargs)
    if plan.check and not _as_expected(result, plan):
        return _wrap_dynamic_tree(result, args, kwargs)
    return _wrap_tree(result, plan.result, tensors)


def _as_expected(result: Any, plan: Plan) -> bool:
    """The first time: does what meta tensors said of the result hold of the local ones?

    Where it does not, on tensors that are whole, the local ones are right.
    """
    plan.check = False
    for value, layout in zip(leaves(result), leaves(plan.result), strict=True):
        if not isinstance(layout, Layout):
            continue
        if tuple(value.shape) != layout.local_shape or value.dtype != layout.dtype:
            if not all(o.is_replicated for o in leaves(plan.result) if isinstance(o, Layout)):
                raise RuntimeError(
                    f"{plan.title}: gives {value.dtype}{list(value.shape)} on rank {layout.index} "
                    f"of the mesh, where {layout!r} was expected. Redistribute its tensors to "
                    f"Replicate() first"
                )
            plan.dynamic = True
            return False
    plan.simple = isinstance(plan.result, Layout) and not (plan.moves or plan.writes)
    return True


def _wrap_tree(result: Any, layouts: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(layouts, Layout):
        return wrap(result, layouts)
    if isinstance(layouts, (list, tuple)):
        pairs = zip(result, layouts, strict=True)
        return type(layouts)(_wrap_tree(r, layout, tensors) for r, layout in pairs)
    if type(layouts) is int:
        return tensors[layouts]
    return result


def _view(
    plan: Plan, args: Sequence[Any], local_args: list[Any], local_kwargs: dict[str, Any]
) -> Any:
    """A view op whose result may be no alias of what this rank holds of its first argument."""
    source: DTensor = args[0]
    target = None if plan.moves is None else plan.moves[0]

    def view(local: torch.Tensor) -> Any:
        return plan.local(local, *local_args[1:], **local_kwargs)

    if target is None and not plan.inverse and not isinstance(source._pending, CopiedView):
        try:
            return _wrap_tree(view(source._local_tensor), plan.result, [])
        except NoViewError:
            target = source._layout
    return as_copies(map_tree(plan.result, _blank), source, target, view, plan.inverse)


def _blank(layout: Any) -> Any:
    # The local tensor comes later: only its device is looked at.
    device = torch.device(layout.mesh.device_type)
    return wrap(torch.empty(0, device=device), layout) if isinstance(layout, Layout) else layout


def _settle(tensor: torch.Tensor) -> None:
    """Before it is written: what was put off is computed."""
    if not isinstance(tensor, DTensor) or isinstance(tensor._pending, (CopiedView, type(None))):
        return
    tensor._local = tensor._local_tensor
    tensor._pending = None


def _store(tensor: torch.Tensor, moved: torch.Tensor | None, plan: Plan, position: int) -> None:
    """After it was written: the result goes where the tensor, and the base of a copy, lies."""
    if not isinstance(tensor, DTensor):
        return
    target = plan.moves[position] if plan.moves is not None else None
    if target is not None and moved is not None:
        tensor._local_tensor.copy_(move(moved, target, tensor._layout))
    if isinstance(tensor._pending, CopiedView):
        tensor._pending.store()


def _moved(moves: list[Layout | None], tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    for target, tensor in zip(moves, tensors, strict=True):
        if not isinstance(tensor, DTensor):
            yield tensor if target is None else move(tensor, target.replicated(), target)
        elif target is None or target is tensor._layout:
            yield tensor._local_tensor
        else:
            yield move(tensor._local_tensor, tensor._layout, target)


def _wrap_dynamic_tree(result: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Results whose shapes are known only now, and that every rank has."""
    mesh = next(t._layout.mesh for t in leaves([args, kwargs]) if isinstance(t, DTensor))
    placements = (Replicate(),) * mesh.ndim

    def wrapped(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        shape = tuple(value.shape)
        return wrap(value, layout_of(mesh, placements, shape, value.stride(), value.dtype))

    return map_tree(result, wrapped)


def _torch_dispatch(
    cls: type, func: Op, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    return dispatch(func, args, kwargs)


DTensor.__torch_dispatch__ = classmethod(_torch_dispatch)  # type: ignore[assignment]
