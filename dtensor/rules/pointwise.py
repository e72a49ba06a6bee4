"""Rules of elementwise ops: also in place, with out=, on lists of tensors, and copies."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from weft.dtensor.dispatch.call import Choices, Chosen, Meta, OpCall, Strategy, leaves, rule
from weft.dtensor.dispatch.planning import written
from weft.dtensor.dispatch.pricing import choose_strategies
from weft.dtensor.layout.boxes import Layout
from weft.dtensor.layout.placements import is_inexact, is_shard, moved, shard_dim
from weft.dtensor.layout.runs import Shape

# f(sum of terms) = sum of f(term)
_LINEAR_UNARY = {"neg", "positive", "conj_physical", "_conj", "_neg_view"}
# Linear in both arguments together, and in each argument alone.
_LINEAR_IN_ALL = {"add", "sub", "rsub"}
_LINEAR_IN_EITHER = {"mul"}
_LINEAR_IN_FIRST = {"div", "true_divide"}
# max(f(terms)) = f(max(terms)), and likewise of the smallest. Not sign, which is 0 of NaN.
_RISING = {
    "asinh", "atan", "ceil", "clamp", "clamp_max", "clamp_min", "erf", "exp", "exp2", "expm1",
    "floor", "relu", "round", "sigmoid", "sinh", "tanh", "trunc",
}  # fmt: skip
_FALLING = {"neg", "erfc"}  # of floating-point numbers: -x of the smallest integer overflows
# Rising in both arguments; with extrema of the same kind in both, it is one more of that kind.
_LARGER_OR_SMALLER = {"maximum": "max", "max": "max", "minimum": "min", "min": "min"}
_OPPOSITE = {"max": Partial("min"), "min": Partial("max")}


def _dim_of(layout: Layout, out: Shape, dim: int) -> int | None:
    """The dim of `layout` that matches dim `dim` of the result; None if that is broadcast."""
    own = dim - (len(out) - len(layout.shape))
    return own if own >= 0 and layout.shape[own] == out[dim] else None


def _op_name(call: OpCall) -> str:
    return call.name.removesuffix("_")


def shard_strategies(call: OpCall, out: Shape) -> Iterator[Strategy]:
    """A strategy for each shard of an argument: all other arguments are sharded alike."""
    seen: list[Placement] = []
    for layout in call.inputs:
        shift = len(out) - len(layout.shape)
        for placement in layout.placements:
            if not is_shard(placement):
                continue
            as_output = moved(placement, shard_dim(placement) + shift)
            if as_output in seen or _dim_of(layout, out, shard_dim(as_output)) is None:
                continue
            seen.append(as_output)
            inputs: list[Placement] = []
            for other in call.inputs:
                own = _dim_of(other, out, shard_dim(as_output))
                inputs.append(Replicate() if own is None else moved(placement, own))
            yield Strategy(tuple(inputs), (as_output,) * len(call.outputs))


def _terms_kept(call: OpCall) -> Iterator[Strategy]:
    """Strategies that leave sums and averages Partial, where the op is linear in them."""
    name, count, replicate = _op_name(call), len(call.inputs), Replicate()
    numbers = any(isinstance(a, (int, float, complex)) for a in call.args[:2])
    in_all = name in _LINEAR_UNARY or (name in _LINEAR_IN_ALL and count == 2 and not numbers)
    rounds = call.kwargs.get("rounding_mode")
    in_one = name in _LINEAR_IN_EITHER | _LINEAR_IN_FIRST or name.endswith("_backward")
    for partial in call.sums(*call.inputs):
        if in_all:
            yield call.with_all(partial)
        elif name == "where" and count == 3:
            yield Strategy((replicate, partial, partial), (partial,))
        elif in_one and not rounds:
            if isinstance(call.args[0], Layout):
                yield call.with_first(partial)
            if name in _LINEAR_IN_EITHER and count == 2:
                yield Strategy((replicate, partial), (partial,))


def _extrema(call: OpCall) -> Iterator[Strategy]:
    """Strategies that leave maxima and minima Partial, where the op keeps or turns their order."""
    name, count, replicate = _op_name(call), len(call.inputs), Replicate()
    new = call.outputs[0].dtype
    # A number becomes a shorter integer beside a tensor of these.
    if not is_inexact(new) and any(t.dtype != new for t in call.inputs):
        return
    for p in call.placements:
        if not (isinstance(p, Partial) and p.reduce_op in _OPPOSITE):
            continue
        if count == 1 and name in _RISING:
            yield call.with_all(p)
        elif count == 1 and name in _FALLING and call.inputs[0].dtype.is_floating_point:
            yield Strategy((p,), (_OPPOSITE[p.reduce_op],))
        elif count == 2 and name in _LARGER_OR_SMALLER:
            if p.reduce_op == _LARGER_OR_SMALLER[name]:
                yield call.with_all(p)
            yield Strategy((p, replicate), (p,))
            yield Strategy((replicate, p), (p,))


@rule("pointwise floor_divide _conj _neg_view _prelu_kernel _prelu_kernel_backward")
def pointwise(call: OpCall) -> Choices:
    """Sharded arguments are followed by the others; Partial ones stay so where the op is linear."""
    out = call.outputs[0].shape
    if call.name == "div" and not is_inexact(call.outputs[0].dtype):
        return Choices([call.whole, *shard_strategies(call, out)])
    strategies = [*shard_strategies(call, out), *_terms_kept(call), *_extrema(call)]
    return Choices([call.whole, *strategies])


@rule("masked_fill add_ sub_")
def shift(call: OpCall) -> Choices:
    """A number that is added to a Partial sum or replaces it: the first rank's term takes it.

    The others take zero. Autograd does this in place, where the target has to stay Partial.
    """
    choices = pointwise(call)
    number = len(call.args) - 1
    value = call.args[number]
    if call.name.removesuffix("_") != "masked_fill" and isinstance(value, Layout) and value.shape:
        return choices
    choices.strategies.extend(map(call.with_first, call.sums(call.inputs[0])))

    def localize(call: OpCall, inputs: list[Layout], outputs: list[Layout]) -> Any:
        op: Any = call.op
        target = inputs[0]
        of_value = inputs[-1] if isinstance(value, Layout) else target.replicated()
        if target.index is None or not any(
            isinstance(p, Partial) and p.reduce_op != "avg" and isinstance(q, Replicate) and i != 0
            for p, q, i in zip(
                target.placements, of_value.placements, target.coordinate, strict=True
            )
        ):
            return op

        def run(*args: Any, **kwargs: Any) -> Any:
            own = list(args)
            value = own[number]
            own[number] = torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0
            return op(*own, **kwargs)

        return run

    return Choices(choices.strategies, localize)


def _placed_as_first(call: OpCall, linear: bool) -> Choices:
    strategies = [call.whole]
    for placement in call.inputs[0].placements:
        if is_shard(placement) or (
            linear and isinstance(placement, Partial) and _may_stay(call, placement)
        ):
            strategies.append(call.with_all(placement))
    return Choices(strategies)


def _may_stay(call: OpCall, placement: Partial) -> bool:
    """Whether terms that are copied, perhaps to another dtype, remain terms."""
    same = all(t.dtype == call.outputs[0].dtype for t in call.inputs)
    return same or placement in call.sums(*call.inputs)


@rule("detach alias clone _to_copy lift_fresh contiguous zero")
def keep(call: OpCall) -> Choices:
    """The same values, or zeros: every placement stays."""
    return _placed_as_first(call, linear=True)


@rule("empty_like zeros_like ones_like full_like fill")
def fill(call: OpCall) -> Choices:
    """Values that do not depend on the tensor's. Terms of a sum cannot be filled one by one."""
    if len(call.inputs) > 1:
        return pointwise(call)
    choices = _placed_as_first(call, linear=call.name in ("empty_like", "zeros_like"))
    # `*_like` reads no values: a Partial need not be reduced (for the first gradient of a loss).
    if not call.name.startswith("fill"):
        for placement in call.inputs[0].placements:
            if isinstance(placement, Partial):
                choices.strategies.append(Strategy((placement,), (Replicate(),)))
    return choices


@rule("new_empty new_zeros new_ones new_full new_empty_strided")
def new_rule(call: OpCall) -> Choices | Chosen:
    """Sharded as the source where the shape is the same, else replicated."""
    source, shape = call.inputs[0], call.outputs[0].shape
    same = shape == source.shape
    placements = tuple(p if same and is_shard(p) else Replicate() for p in source.placements)

    def localize(call: OpCall, inputs: list[Layout], outputs: list[Layout]) -> Any:
        size = outputs[0].local_shape
        packet: Any = call.op

        def run(x: torch.Tensor, _: Any, *rest: Any, **kwargs: Any) -> torch.Tensor:
            if call.name == "new_empty_strided":
                return x.new_empty(size, dtype=kwargs.get("dtype"), device=kwargs.get("device"))
            result: torch.Tensor = packet(x, size, *rest, **kwargs)
            return result

        return run

    return Chosen([source.placements], [placements], localize)


@rule("copy")
def copy(call: OpCall) -> Choices:
    """The target keeps its placement, the source comes to it."""
    target = call.inputs[0]
    partials = [p for p in target.placements if isinstance(p, Partial) and _may_stay(call, p)]
    same = map(call.with_all, partials)
    return Choices([call.whole, *same, *shard_strategies(call, target.shape)])


@rule("foreach")
def foreach(call: OpCall) -> Chosen:
    """Lists of tensors, position by position: the others follow the first list."""
    layouts = [
        [leaf for leaf in leaves(a) if isinstance(leaf, Layout)]
        for a in [*call.args, *call.kwargs.values()]
    ]
    length = len(layouts[0])
    # List(s) of results come one after another in call.outputs, or the first list is written.
    writable = set(written(call))
    linear = call.name.removeprefix("_foreach_").removesuffix("_")
    inputs: list[list[Any]] = [[None] * len(items) for items in layouts]
    outputs: list[Any] = [None] * len(call.outputs)
    starts = list(itertools.accumulate((len(items) for items in layouts), initial=0))
    for position in range(length):
        rows = [
            (number, position if len(items) == length else 0)
            for number, items in enumerate(layouts)
            if items and (len(items) == length or len(items) == 1)
        ]
        row = [layouts[number][at] for number, at in rows]
        part = _call_at(call, linear, row)
        of_written = Meta(row[0].shape, row[0].stride, row[0].dtype)
        part.outputs = call.outputs[position::length] or [of_written]
        writes = [i for i, (number, at) in enumerate(rows) if starts[number] + at in writable]
        chosen = choose_strategies(part, pointwise(part), writes, [False] * len(row))
        for (number, at), placements in zip(rows, chosen.inputs, strict=True):
            inputs[number][at] = placements
        if call.outputs:
            outputs[position::length] = chosen.outputs
    flat = [
        layout.placements if placements is None else placements
        for items, chosen_items in zip(layouts, inputs, strict=True)
        for layout, placements in zip(items, chosen_items, strict=True)
    ]
    return Chosen(flat, outputs)


def _call_at(call: OpCall, name: str, row: list[Layout]) -> OpCall:
    """The call of one position of the lists."""
    firsts = [next(leaves(a), None) for a in call.args]
    numbers = [a for a in firsts if isinstance(a, (int, float, complex))]
    part = OpCall(call.op, [*row, *numbers], {})
    part.name = name
    return part
