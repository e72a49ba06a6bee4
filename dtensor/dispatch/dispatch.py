"""Dispatch: what an operation on DTensors does on each rank.

The first call of an op with given layouts makes a plan (`planning.py`). Later calls cost a
dictionary lookup, the local op and a wrap.

    key = (op, default dtype, layouts of its tensors, its other arguments)
    plan = (moves, local op, layouts of the results)

Only the type of a float is in the key, as no rule looks at its value. What was found by trying the
op (`discovery.py`) may depend on the value, however: keys of such plans contain the floats too.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.distributed.tensor import Replicate
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from weft.collectives.ranks.caches import KeptDict
from weft.collectives.ranks.group import forget_meshes
from weft.collectives.ranks.reports import check_all
from weft.collectives.ranks.traced import is_plain
from weft.dtensor.dispatch.call import Op, leaves, map_tree
from weft.dtensor.dispatch.local_ops import quickest
from weft.dtensor.dispatch.planning import CallPlan, make_plan
from weft.dtensor.dispatch.variants import Reshaped, keep_age, refuse_old_views
from weft.dtensor.dispatch.views import CopiedView, NoViewError, as_copies
from weft.dtensor.layout.boxes import Layout, layout_of
from weft.dtensor.layout.placements import check_dense
from weft.dtensor.move.explicit import check_explicit
from weft.dtensor.move.redistribute import move
from weft.dtensor.tensor import DTensor, before_write, local_as, wrap
from weft.dtensor.tracing.grad_recording import no_function
from weft.dtensor.tracing.graph_breaks import unless_traced

# The first entry of a key is the id of an op, or a torch function that `learn` knows; see
# `_read_arguments`.
_plans = KeptDict[tuple[Any, ...], CallPlan](8192, f"{__name__}._plans")
forget_meshes.append(_plans.clear)


def forget_plans(op: Op) -> None:
    """Drop the plans of `op`, whose rule has changed."""
    for key in [key for key, plan in _plans.items() if plan.op is op]:
        del _plans[key]


def _add(a: Any, key: list[Any], func: Op | None) -> Any:
    """Append to `key` what identifies `a`, and return its local value."""
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
        return [_add(item, key, func) for item in a]
    if isinstance(a, torch.Tensor):
        if isinstance(a, DTensor):
            key[-1] = a._layout
            return a._local_tensor
        if a.numel() == 1:
            key.append((a.dtype, a.dim()))
            return a
        if func is not None:
            _check_mixed(func)
        key.append((a.dtype, a.shape, a.stride()))
        return a
    if isinstance(a, torch.Generator):
        return a
    # Arguments of other types, which only torch functions take, get a key that matches nothing.
    key.append(a if func is not None or kind in _CONSTANTS else object())
    return a


class Outermost(threading.local):
    """The user's call that is running.

    Attributes:
        call: a pair of the arguments that the user passed, None inside of `backward`; and a list
            that collects the ops which the call runs, (op, args, kwargs, result) each, or None.
    """

    call: tuple[Any, list[tuple[Op, Sequence[Any], dict[str, Any], Any]] | None] = (None, None)


outermost = Outermost()


def _check_mixed(func: Op) -> None:
    """Raise if the user passed a plain tensor. Those made by torch are the same on all ranks."""
    for given in leaves(outermost.call[0]):
        plain = isinstance(given, torch.Tensor) and not isinstance(_unwrapped(given), DTensor)
        if plain and given.numel() != 1:
            raise mixed(func, given)


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` without the wrappers of torch.func's transforms."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def mixed(func: Op | str, plain: torch.Tensor) -> RuntimeError:
    """The error of a call that was given DTensors and a plain tensor.

    Raises:
        NotImplementedError: what a DTensor cannot be is raised at once.
    """
    check_dense(str(func), plain)
    message = (
        f"{func}: got mixed torch.Tensor and DTensor, the torch.Tensor of shape "
        f"{tuple(plain.shape)}. Make it a DTensor first: distribute_tensor(t, mesh, placements) if "
        f"every rank holds all of it, DTensor.from_local(t, mesh, placements) if each holds its "
        f"part; or take full_tensor() of the DTensors; or run under "
        f"experimental.implicit_replication(). (One-element tensors count as replicated.)"
    )
    if str(func).startswith("aten.copy_"):  # as load_state_dict does, of what one process saved
        message += (
            " A whole state dict is cut by set_model_state_dict(model, state, options="
            "StateDictOptions(full_state_dict=True)) of torch.distributed.checkpoint.state_dict."
        )
    return RuntimeError(message)


def _read_arguments(
    func: Op, args: Sequence[Any], kwargs: dict[str, Any] | None, known: bool
) -> tuple[tuple[Any, ...], list[Any], dict[str, Any], bool]:
    """(key of the plan, local arguments, local keywords, whether any is not computed yet)."""
    # By id, as an overload computes its hash in Python. The plan keeps the op alive, so no other op
    # can get the same id.
    key: list[Any] = [func if known else id(func), torch.get_default_dtype()]
    local_args: list[Any] = []
    deferred = False
    for a in args:
        kind = type(a)
        if kind is DTensor:
            key.append(a._layout)
            local = a._local
            if local is None:
                local, deferred = a._local_tensor, True
            local_args.append(local)
        elif kind is int or kind is bool:
            key.append(kind)
            key.append(a)
            local_args.append(a)
        elif kind is float:
            key.append(float)
            local_args.append(a)
        elif kind is list and (kinds := set(map(type, a))) == _DTENSORS:
            key.append(tuple(map(_layout_in, a)))
            locals_in: list[Any] = list(map(_local_in, a))
            if _NoneType in map(type, locals_in):
                locals_in, deferred = [t._local_tensor for t in a], True
            local_args.append(locals_in)
        elif kind is list and kinds == _FLOATS:
            key.append((float, len(a)))
            local_args.append(a)
        else:
            local_args.append(_add(a, key, None if known else func))
    local_kwargs: dict[str, Any] = {}
    if kwargs:
        for name, value in kwargs.items():
            key.append(name)
            local_kwargs[name] = _add(value, key, None if known else func)
    return tuple(key), local_args, local_kwargs, deferred


_DTENSORS, _FLOATS, _NoneType = {DTensor}, {float}, type(None)
_layout_in, _local_in = attrgetter("_layout"), attrgetter("_local")


def dispatch(
    func: Op, args: Sequence[Any], kwargs: dict[str, Any] | None = None, *, known: bool = False
) -> Any:
    """Run `func` (an aten overload, or an op of ours with a rule) on DTensors, below autograd.

    Args:
        known: `func` is a torch function: NotImplemented unless `learn` has seen such a call.
    """
    check_all()
    key, local_args, local_kwargs, deferred = _read_arguments(func, args, kwargs, known)
    try:
        plan = _plans.get(key)
    except TypeError:  # symbolic sizes of a graph cannot be hashed
        key, plan = (), None
    if plan is _BY_VALUE:
        plan = _plans.get((*key, *_floats_in(args, kwargs)))
    if plan is None:
        if known:
            return NotImplemented
        plan = make_plan(func, args, kwargs or {})
        plan.op = func
        if key:
            if plan.check and (floats := _floats_in(args, kwargs)):
                _plans[key] = _BY_VALUE
                key = (*key, *floats)
            _plans[key] = plan
    layout = plan.result
    if plan.is_view and _is_inference_mode() and not args[0].is_inference():
        # In inference mode, too, a view of an ordinary tensor is an ordinary tensor.
        with torch.inference_mode(False), torch.no_grad():
            return dispatch(func, args, kwargs)
    if plan.simple and not (deferred and plan.is_view):
        try:
            # No keywords rather than none of them: 0.13 us.
            run = plan.local
            result = run(*local_args, **local_kwargs) if local_kwargs else run(*local_args)
        except NoViewError:
            return _run_with_moves(plan, args, kwargs or {}, local_args, local_kwargs)
        if isinstance(layout, Layout):
            return wrap(result, layout)
        return type(layout)([wrap(*pair) for pair in zip(result, layout, strict=True)])
    if plan.writes_first and not deferred:
        # In place, on the first argument or all of the first list, and nothing moves.
        result = args[0]
        for hook in before_write:
            hook(result)
        plan.local(*local_args, **local_kwargs)
        if known or layout is None:  # autograd has not seen the write, or does not count it
            torch._C._increment_version(result if layout is None else (result,))
        return result if known or layout is not None else None
    return (
        NotImplemented
        if known
        else _run_with_moves(plan, args, kwargs or {}, local_args, local_kwargs)
    )


def run_plan(plan: CallPlan, *args: DTensor | None) -> Any:
    """Run the plan of an op of ours, as `plan_of` has made it, below autograd."""
    check_all()
    given = [a for a in args if a is not None]
    # Not `_local_tensor` at once, a property in Python.
    own = [a._local_tensor if a._local is None else a._local for a in given]
    if plan.simple:
        return wrap(plan.local(*own), plan.result)
    return _run_with_moves(plan, given, {}, own, {})


_is_inference_mode = torch.is_inference_mode_enabled
# In place of a plan: look again, with a key that contains the values of the floats.
_BY_VALUE = CallPlan(lambda: None)


def _floats_in(args: Sequence[Any], kwargs: dict[str, Any] | None) -> list[Any]:
    return [a for a in leaves([args, kwargs]) if type(a) in (float, complex)]


def learn(function: Op, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> bool:
    """Remember what a call of a torch function did, for `dispatch(..., known=True)`.

    The next such call bypasses torch's dispatcher. That is right without autograd, if the function
    ran a single op of the same name and arguments which only computes or writes. (Autograd keeps
    track of views even if nothing requires a gradient.)

    Returns:
        False if calls of this form are not of that kind, and need not be shown again.
    """
    if len(ops := outermost.call[1] or []) != 1:
        return False
    op, op_args, op_kwargs, op_result = ops[0]
    name, rest = getattr(function, "__name__", "").strip("_"), op_args[len(args) :]
    if (
        getattr(op, "_opname", "").strip("_") not in (name, _OPERATORS.get(name))
        or torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())
        or len(op_args) < len(args)
        or not all(map(_passed_on, args, op_args))
        or not all(type(a) in _CONSTANTS for a in (*rest, *kwargs.values(), *op_kwargs.values()))
        or not _passed_on(result, args[0] if op_result is None else op_result)
    ):
        return False
    plan = _plans.get(_read_arguments(op, op_args, op_kwargs, False)[0])
    if plan is None or plan.is_view:
        return False
    local, is_op = plan.local, plan.local is quickest(op)
    dims_in_list = any(
        type(a) is int and isinstance(b, list) for a, b in zip(args, op_args, strict=False)
    )
    if (plan.simple or plan.writes_first) and (is_op or not dims_in_list):

        def with_the_rest(*args: Any, **kwargs: Any) -> Any:
            return local(*args, *rest, **op_kwargs)

        known = copy.copy(plan)
        known.local = function if is_op else with_the_rest
        _plans[_read_arguments(function, args, kwargs, True)[0]] = known
    return True


# Types whose values are in a key; and operators whose op has another name.
_CONSTANTS = {int, bool, str, type(None), torch.dtype, torch.layout, torch.device}
_OPERATORS = {
    "iadd": "add",
    "isub": "sub",
    "imul": "mul",
    "truediv": "div",
    "itruediv": "div",
    "idiv": "div",
}


def _passed_on(a: Any, b: Any) -> bool:
    """Whether a function passed `a` on to its op unchanged (a dim may become a list of it)."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_passed_on, a, b))
    if type(a) is int and isinstance(b, list):
        return [a] == b
    return a is b or (type(a) is type(b) and type(a) in (int, float, bool) and bool(a == b))


def _run_with_moves(
    plan: CallPlan,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    local_args: list[Any],
    local_kwargs: dict[str, Any],
) -> Any:
    """Run a plan that needs more than its local op: moves, writes, checks, decompositions."""
    if plan.decomposed is not None:
        with no_function():  # inside of a backward, its calls would look like the user's
            return plan.decomposed(*args, **kwargs)
    if plan.is_view:
        if plan.moves is not None:
            check_explicit(lambda: plan.title, args[0]._layout, plan.moves[0])
        return _view(plan, args, local_args, local_kwargs)
    tensors: list[torch.Tensor] = []
    if plan.writes or plan.moves is not None:
        tensors = [leaf for leaf in leaves([args, kwargs]) if isinstance(leaf, torch.Tensor)]
    if plan.writes:
        written = [tensors[position] for position in plan.writes]
        for hook in before_write:
            hook(written)
        for position in plan.writes:
            _compute_now(tensors[position])
    moved: list[torch.Tensor] = []
    if plan.moves is not None:
        for target, tensor in zip(plan.moves, tensors, strict=True):
            if isinstance(tensor, DTensor):
                check_explicit(lambda: plan.title, tensor._layout, target)
        moved = list(_moved_arguments(plan.moves, tensors))
        each = iter(moved)
        local_args, local_kwargs = map_tree(
            [list(args), kwargs], lambda a: next(each) if isinstance(a, torch.Tensor) else a
        )
    result = plan.local(*local_args, **local_kwargs)
    for position in plan.writes:
        _store(tensors[position], moved[position] if moved else None, plan, position)
    if plan.dynamic:
        return _wrap_dynamic_tree(result, args, kwargs, plan.title)
    if plan.check and not _as_expected(result, plan):
        return _wrap_dynamic_tree(result, args, kwargs, plan.title)
    if plan.writes and plan.result is None:  # a list op, whose writes autograd does not count
        torch._C._increment_version([tensors[position] for position in plan.writes])
        return None  # a foreach function returns them all the same, its op does not
    return _wrap_tree(result, plan.result, tensors)


def _as_expected(result: Any, plan: CallPlan) -> bool:
    """Whether the local results have the shapes and dtypes that meta tensors predicted.

    If so, this is not checked again. If not, replicated results are taken as they are.

    Raises:
        RuntimeError: they differ, and are not replicated.
    """
    plan.result = _given(result, plan.result)
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
    plan.check = False
    plan.simple = plan.only_computes()
    return True


def _given(result: Any, layouts: Any) -> Any:
    """`layouts`, with None for results that the op did not return: gradients nobody needs."""
    if isinstance(layouts, (list, tuple)):
        return type(layouts)(map(_given, result, layouts))
    return None if result is None else layouts


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
    plan: CallPlan, args: Sequence[Any], local_args: list[Any], local_kwargs: dict[str, Any]
) -> Any:
    """Run a view op: an alias of the local tensor if possible, else a copy that writes back."""
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
    # `as_copies` replaces the local tensor; only its device matters here.
    device = torch.device(layout.mesh.device_type)
    return wrap(torch.empty(0, device=device), layout) if isinstance(layout, Layout) else layout


def _compute_now(tensor: torch.Tensor) -> None:
    """Compute a deferred local tensor before it is written."""
    if not isinstance(tensor, DTensor) or isinstance(tensor._pending, (CopiedView, type(None))):
        return
    tensor._local = tensor._local_tensor
    tensor._pending = None


def _store(tensor: torch.Tensor, moved: torch.Tensor | None, plan: CallPlan, position: int) -> None:
    """After a write, bring the result back to the tensor, and to the base of a copied view."""
    if not isinstance(tensor, DTensor):
        return
    target = plan.moves[position] if plan.moves is not None else None
    if target is not None and moved is not None:
        tensor._local_tensor.copy_(move(moved, target, tensor._layout))
    if isinstance(tensor._pending, CopiedView):
        tensor._pending.store()


def _moved_arguments(
    moves: list[Layout | None], tensors: list[torch.Tensor]
) -> Iterator[torch.Tensor]:
    for target, tensor in zip(moves, tensors, strict=True):
        if target is None or (isinstance(tensor, DTensor) and target == tensor._layout):
            yield tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        else:
            yield local_as(tensor, target)


def _wrap_dynamic_tree(result: Any, args: Sequence[Any], kwargs: dict[str, Any], title: str) -> Any:
    """Wrap replicated results, whose shapes are known only after the op has run."""
    mesh = next(t._layout.mesh for t in leaves([args, kwargs]) if isinstance(t, DTensor))
    placements = (Replicate(),) * mesh.ndim

    def wrapped(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        check_dense(f"the result of {title}", value)
        shape = tuple(value.shape)
        return wrap(value, layout_of(mesh, placements, shape, value.stride(), value.dtype))

    return map_tree(result, wrapped)


def _check_recorded(func: Op, args: Sequence[Any], kwargs: dict[str, Any] | None) -> None:
    """Refuse to be recorded by make_fx, which would take the local tensors for constants."""
    if get_proxy_mode() is None or torch.compiler.is_compiling():
        return
    for given in leaves((args, kwargs)):
        if isinstance(given, DTensor) and is_plain(given._local_tensor):
            raise NotImplementedError(
                f"{func}: make_fx, and torch.func.linearize, which uses it, cannot record what is "
                f"done with DTensors: use torch.compile, or torch.func.jvp"
            )


@unless_traced
def _torch_dispatch(
    cls: type, func: Op, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    if torch._C._len_torch_dispatch_stack():
        _check_recorded(func, args, kwargs)
    if Reshaped.any:
        refuse_old_views(func, args, kwargs or {})
    result = dispatch(func, args, kwargs)
    if Reshaped.any:
        keep_age(args, result)
    if (ops := outermost.call[1]) is not None:
        ops.append((func, args, kwargs or {}, result))
    return result


DTensor.__torch_dispatch__ = classmethod(_torch_dispatch)  # type: ignore[assignment]
