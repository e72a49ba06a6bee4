"""Planning: how each rank does its part of one kind of call.

The op runs once on meta tensors, which gives the global results. A rule (in `rules`) offers
strategies for one mesh dim, fused ops among them, and each mesh dim takes the cheapest
(`pricing.py`). All of this follows from the call alone, so it is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import Replicate

from weft import settings
from weft.collectives.ranks.group import unwatched
from weft.dtensor.dispatch.agreement import agreed
from weft.dtensor.dispatch.call import (
    Choices,
    Chosen,
    Decomposed,
    Meta,
    Op,
    OpCall,
    Rule,
    Strategy,
    Way,
    leaves,
    map_tree,
    rules,
    rules_of_overloads,
)
from weft.dtensor.dispatch.cross_mesh import of_one_mesh
from weft.dtensor.dispatch.discovery import discovered
from weft.dtensor.dispatch.local_ops import (
    LAZY,
    fault,
    is_faked,
    local_op,
    refuse_dtypes,
    with_conjugates,
)
from weft.dtensor.dispatch.pricing import choose_strategies
from weft.dtensor.dispatch.variants import by_functional
from weft.dtensor.layout.boxes import Layout, layout_of
from weft.dtensor.layout.placements import check_dense
from weft.dtensor.layout.symbolic import cached
from weft.dtensor.random import with_equal_state
from weft.dtensor.tensor import DTensor, wrap


@dataclass(slots=True, eq=False)
class CallPlan:
    """What one kind of call does on this rank.

    Attributes:
        local: the op on local tensors.
        moves: target layout of each tensor argument, None where it stays; None if all stay.
        result: the layout of the result, or the position of the argument that is written and
            returned; a tree of these if there are several.
        simple: nothing to do but run `local` and wrap its result, or its list of results.
        writes_first: nothing to do but run `local`, which writes the first argument, or all tensors
            of a list that comes first.
        is_view: the result shares the memory of the first argument.
        dynamic: the layout of the result is known only after the op has run.
        check: compare the first result with its layout.
        inverse: for a view that is computed (conj, neg): maps what is written to it back to the
            base.
        title: the call, for messages.
        writes: positions of the arguments that are written. If they were moved, they are stored
            back.
        decomposed: a function of DTensors that computes the op, instead of all this.
        op: the op that it is the plan of; for a torch function, the op that the function runs.
        way: the fused op that was the cheapest, along mesh dim `way_dim`, which does what is left
            after the moves; the caller runs it.
        considered: the candidates of each mesh dim, for `weft.explain`; only where some are fused.
    """

    local: Op
    moves: list[Layout | None] | None = None
    result: Any = None
    simple: bool = False
    writes_first: bool = False
    is_view: bool = False
    dynamic: bool = False
    check: bool = False
    inverse: Op | None = None
    title: str = ""
    writes: tuple[int, ...] = ()
    decomposed: Op | None = None
    op: Op | None = None
    way: Way | None = None
    way_dim: int = 0
    considered: Sequence[Any] = ()

    def only_computes(self) -> bool:
        """Whether there is nothing to do but run `local` and wrap its result(s)."""
        results = self.result if isinstance(self.result, (list, tuple)) else [self.result]
        return bool(results) and not (
            self.moves
            or self.writes
            or self.check
            or self.inverse
            or not all(isinstance(layout, Layout) for layout in results)
        )


def make_plan(func: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> CallPlan:
    """The plan of one kind of call, the same on every rank."""
    tensors = [leaf for leaf in leaves([args, kwargs]) if isinstance(leaf, torch.Tensor)]
    mesh = next(t._layout.mesh for t in tensors if isinstance(t, DTensor))
    for tensor in tensors:
        if not isinstance(tensor, DTensor):
            check_dense(str(func), tensor)
    call = OpCall(func, *map_tree([list(args), kwargs], lambda a: _layout_of_argument(a, mesh)))
    return _plan_of_call(call, [not isinstance(t, DTensor) for t in tensors])


@cached
def plan_of(op: Op, *args: Layout | int | None) -> CallPlan:
    """The plan of an op of ours, a layout in place of each DTensor; kept as the layouts are."""
    return _plan_of_call(OpCall(op, args, {}), [False] * len(args))


def _plan_of_call(call: OpCall, plain: list[bool]) -> CallPlan:
    func, mesh = call.op, call.mesh
    if any(layout.mesh != mesh for layout in call.inputs):
        return CallPlan(func, decomposed=of_one_mesh(func, call))
    writes = written(call)
    outside = call.inputs[0].index is None
    if outside and writes:
        return _outside(call, writes, [])
    other_way = by_functional(func, call)
    if other_way is not None:
        return CallPlan(func, decomposed=other_way)
    find = _rule_of(func, call.name)
    if find is None and (parts := _composite(func)):
        return CallPlan(func, decomposed=parts)
    _learn_outputs(call)
    if outside and (find is None or call.output_tree is _DYNAMIC):
        return _outside(call, writes, [])
    known = find is not None and call.output_tree is not _DYNAMIC
    decision = find(call) if find is not None and known else _unknown(call, writes)
    if isinstance(decision, Decomposed):
        if outside:
            return _outside(call, writes, [])
        return CallPlan(func, decomposed=decision.function)
    if isinstance(decision, Choices):
        decision = choose_strategies(call, decision, writes, plain)
    return _planned(call, decision, writes, plain, known)


def _planned(
    call: OpCall, decision: Chosen, writes: list[int], plain: list[bool], known: bool
) -> CallPlan:
    """The plan of a call whose placements are decided: by a rule if `known`, else by trying it."""
    targets = [
        layout.with_placements(placements)
        for layout, placements in zip(call.inputs, decision.inputs, strict=True)
    ]
    moves = [t if t is not i else None for t, i in zip(targets, call.inputs, strict=True)]
    results = [
        layout_of(call.mesh, placements, meta.shape, meta.stride, meta.dtype)
        for meta, placements in zip(call.outputs, decision.outputs, strict=True)
    ]
    if call.inputs[0].index is None:
        plan = _outside(call, writes, results)
        plan.way = decision.way
        plan.result = results[0] if decision.way else plan.result
        return plan
    if decision.localize is None:
        local = refuse_dtypes(call, targets) or local_op(call)
    else:
        local = decision.localize(call, targets, results)
    if not known and any(t.dtype.is_complex for t in call.inputs):
        local = with_conjugates(local)
    if call.mesh.device_type == "cpu" and (found := fault(call, targets)):
        local = agreed(local, call.inputs[0], str(call), *found)
    if torch.Tag.nondeterministic_seeded in getattr(call.op, "tags", ()):
        local = with_equal_state(local, call.mesh)
    plan = CallPlan(
        local,
        moves if any(moves) else None,
        title=str(call),
        writes=tuple(writes),
        dynamic=call.output_tree is _DYNAMIC,
        inverse=LAZY.get(call.op),
        is_view=_is_view(call),
        way=decision.way,
        way_dim=decision.way_dim,
        considered=decision.considered,
    )
    if plan.dynamic:
        return plan
    plan.check = not known
    returned = _returned(call, writes)
    if returned is not None:
        plan.result = returned[0] if len(returned) == 1 else tuple(returned)
        for position, meta in zip(returned, call.outputs, strict=True):
            _check_unchanged(call, call.inputs[position], meta)
        plan.writes_first = (
            returned == writes == [0] and plan.moves is None and not plain[0] and not plan.check
        )
        return plan
    if writes and not results:
        first = call.args[0]
        plan.writes_first = (
            isinstance(first, (list, tuple))
            and plan.moves is None
            and writes == list(range(len(first)))
            and not any(plain[: len(first)])
        )
        return plan
    each = iter(results)
    plan.result = map_tree(call.output_tree, lambda a: next(each) if isinstance(a, Meta) else None)
    plan.simple = plan.only_computes()
    return plan


def _rule_of(func: Op, name: str) -> Rule | None:
    """The rule of an op, or None; an in-place variant has the rule of the op."""
    found = rules_of_overloads.get(func) or rules.get(name) or rules.get(name.removesuffix("_"))
    if found is None and torch.Tag.pointwise in getattr(func, "tags", ()):
        return rules["pointwise"]
    if found is None and name.startswith(("_foreach_", "_fused_")):
        return rules["foreach"]
    return found


def _composite(func: Op) -> Op | None:
    """What decomposes a composite op; torch itself does so, except in inference mode."""
    if not isinstance(func, torch._ops.OpOverload):
        return None
    taken_apart = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE.name)
    return partial(func._op_dk, _COMPOSITE) if taken_apart else None


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def _outside(call: OpCall, writes: list[int], results: list[Layout]) -> CallPlan:
    """The plan of a process outside of the mesh: it computes nothing and gets empty results.

    They are placed as inside the mesh if that is known, so that they can be redistributed.
    """
    if not results:
        _learn_outputs(call)
        if call.output_tree is _DYNAMIC:
            raise RuntimeError(
                f"{call}: its result depends on values that only ranks "
                f"{list(call.inputs[0].place.ranks)} of the mesh have, not this process: make the "
                f"call there, or redistribute to a mesh with this process first"
            )
        results = [
            layout_of(call.mesh, (Replicate(),) * call.mesh.ndim, m.shape, m.stride, m.dtype)
            for m in call.outputs
        ]

    def nothing(*args: Any, **kwargs: Any) -> None: ...

    if writes:
        returned = _returned(call, writes)
        result = returned[0] if returned and len(returned) == 1 else returned
        return CallPlan(nothing, result=result, writes=tuple(writes))

    def empty(layout: Layout) -> Any:
        device = call.mesh.device_type
        return wrap(torch.zeros(layout.local_shape, dtype=layout.dtype, device=device), layout)

    def run(*args: Any, **kwargs: Any) -> Any:
        each = iter(results)
        return map_tree(call.output_tree, lambda a: empty(next(each)) if isinstance(a, Meta) else a)

    return CallPlan(nothing, decomposed=run)


_DYNAMIC = object()


def _layout_of_argument(a: Any, mesh: Any) -> Any:
    if isinstance(a, DTensor):
        return a._layout
    if isinstance(a, torch.Tensor):
        placements = (Replicate(),) * mesh.ndim
        return layout_of(mesh, placements, tuple(a.shape), a.stride(), a.dtype)
    return a


def written(call: OpCall) -> list[int]:
    """Positions, among the tensor arguments, of those that the op writes."""
    schema = getattr(call.op, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    positions: list[int] = []
    at = 0
    for argument in schema.arguments:
        value = call.bound[argument.name]
        count = sum(isinstance(leaf, Layout) for leaf in leaves([value]))
        # A fused optimizer unscales gradients in place only when it is given a scale.
        scratch = argument.name == "grads" and call.bound.get("grad_scale") is None
        if argument.alias_info is not None and argument.alias_info.is_write and not scratch:
            positions += range(at, at + count)
        at += count
    return positions


def _returned(call: OpCall, writes: list[int]) -> list[int] | None:
    """Which written argument each result is; None if the results are new tensors."""
    schema = getattr(call.op, "_schema", None)
    if not writes or schema is None or not schema.returns:
        return None
    infos = [a.alias_info for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    pairs = zip(infos, writes, strict=False)
    marks = {mark: position for info, position in pairs for mark in info.before_set}
    found: list[int] = []
    for result in schema.returns:
        if result.alias_info is None:
            return None
        found += [marks[mark] for mark in result.alias_info.before_set if mark in marks][:1]
    return found if len(found) == len(schema.returns) else None


def _is_view(call: OpCall) -> bool:
    schema = getattr(call.op, "_schema", None)
    return (
        schema is not None
        and not schema.is_mutable
        and any(r.alias_info is not None for r in schema.returns)
    )


def _check_unchanged(call: OpCall, target: Layout, meta: Meta) -> None:
    if meta.shape != target.shape:
        raise NotImplementedError(
            f"{call} in place would change the shape {target.shape} to {meta.shape}: use the "
            f"variant that returns a new tensor"
        )


def _learn_outputs(call: OpCall) -> None:
    """Run the op on meta tensors: shapes, strides and dtypes of the global results.

    If these depend on the data, the result is known only after the op has run.
    """
    kwargs = dict(call.kwargs)
    if "device" in kwargs:
        kwargs["device"] = torch.device("meta")
    try:
        with nullcontext() if is_faked() else unwatched():
            args, kwargs = map_tree([list(call.args), kwargs], _meta_argument)
            result = call.op(*args, **kwargs)
    except (ZeroDivisionError, TypeError):  # some meta kernels in Python fail at empty sizes
        call.output_tree = _DYNAMIC
        return
    except (RuntimeError, IndexError, ValueError) as error:
        # Ops without a meta kernel report it in several ways, all of them RuntimeErrors.
        unknown = isinstance(error, NotImplementedError) or "meta" in str(error).lower()
        # What is wrong with numbers or nothing, the op itself may word better: it runs on replicas.
        tiny = all(torch.Size(t.shape).numel() < 2 for t in call.inputs)
        if not (tiny or (isinstance(error, RuntimeError) and unknown)):
            text = str(error).partition("\nException raised from")[0]
            raise type(error)(f"{text} [in {call}]") from None
        call.output_tree = _DYNAMIC
        return
    for value in leaves(result):
        if isinstance(value, torch.Tensor):
            check_dense(f"the result of {call}", value)
    call.output_tree = map_tree(result, _meta_of)
    call.outputs = [leaf for leaf in leaves(call.output_tree) if isinstance(leaf, Meta)]


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


def _unknown(call: OpCall, writes: list[int]) -> Choices:
    """Strategies of an op without a rule: what a probe found, or all tensors replicated."""
    found: list[Strategy] = []
    if call.output_tree is not _DYNAMIC:
        found, call.refuses = discovered(call, writes)
    if settings.tracing():
        how = "a rule was found by probing it" if found else "no sharding rule for it"
        settings.record(call.name, "discovered" if found else "replicated", how, str(call))
    return Choices([call.whole, *found])
