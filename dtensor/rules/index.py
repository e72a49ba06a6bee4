"""Rules of ops that join, pick and order along some dims, and leave the others alone."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from weft.dtensor.dispatch.call import Choices, OpCall, Strategy, rule
from weft.dtensor.layout.boxes import Layout
from weft.dtensor.layout.placements import distinct, from_front, is_shard, moved, shard_dim
from weft.dtensor.rules.nn import check_range, own_run, rows_in
from weft.dtensor.rules.view import mapped


def _sharded_alike(call: OpCall, touched: Collection[int]) -> list[Strategy]:
    """All tensors have the same dims, and may be sharded alike in those that are not touched."""
    shards = [p for p in call.placements if is_shard(p) and shard_dim(p) not in touched]
    return [call.whole, *map(call.with_all, shards)]


def _terms_joined(call: OpCall) -> list[Strategy]:
    """Terms of sums, which the op joins or picks like any values."""
    return list(map(call.with_all, call.sums(*call.inputs)))


@rule("cat")
def cat(call: OpCall) -> Choices:
    """Shards of the other dims stay."""
    ndim = max(layout.ndim for layout in call.inputs)
    if any(layout.ndim != ndim for layout in call.inputs):  # torch takes empty ones of one dim
        return Choices([call.whole])
    return Choices(
        _sharded_alike(call, [from_front(call.bound["dim"], ndim)]) + _terms_joined(call)
    )


@rule("stack")
def stack(call: OpCall) -> Choices:
    """Shards stay, behind the new dim."""
    count = len(call.inputs)
    dim = from_front(call.bound["dim"], call.inputs[0].ndim + 1)
    shards = [(p, shard_dim(p)) for p in call.placements if is_shard(p)]
    alike = [Strategy((p,) * count, (moved(p, d + (d >= dim)),)) for p, d in shards]
    return Choices([call.whole, *alike, *_terms_joined(call)])


@rule("sort topk cumsum cumprod cummax cummin logcumsumexp argsort flip roll rot90")
def along_dim(call: OpCall) -> Choices:
    """The dims that are worked along are gathered, the others may be sharded."""
    ndim = call.inputs[0].ndim
    bound = call.bound
    name = "dims" if "dims" in bound else "dim"
    dims = bound.get(name, -1)
    dims = range(ndim) if dims in (None, []) else ([dims] if isinstance(dims, int) else dims)
    strategies = _sharded_alike(call, {from_front(d, ndim) for d in dims})
    if call.name in ("flip", "roll", "rot90"):  # they only put values elsewhere
        strategies += [call.with_all(p) for p in call.placements if isinstance(p, Partial)]
    elif call.name == "cumsum":
        strategies += _terms_joined(call)
    return Choices(strategies)


@rule("gather scatter scatter_add scatter_reduce")
def by_index(call: OpCall) -> Choices:
    """(x, dim, index, ...): other dims may be sharded where all tensors are equally long."""
    x = call.inputs[0]
    if any(t.ndim != x.ndim for t in call.inputs):  # an empty index may have any shape
        return Choices([call.whole])
    touched = {from_front(call.bound["dim"], x.ndim)}
    touched |= {d for d in range(x.ndim) if any(t.shape[d] != x.shape[d] for t in call.inputs)}
    linear = call.name.removesuffix("_") in ("gather", "scatter_add")
    sums = call.sums(*call.inputs) if linear else []
    strategies = _sharded_alike(call, touched) + [_but_index(call, p) for p in sums]
    if call.name != "gather":
        return Choices(strategies)
    # Each index says by itself where along `dim` to look.
    along = from_front(call.bound["dim"], x.ndim)
    own = [p for p in call.inputs[1].placements if is_shard(p) and shard_dim(p) == along]
    strategies += [Strategy((Replicate(), p), (p,)) for p in distinct(own)]
    # If few numbers are looked up, each rank finds those that it holds: terms of a sum.
    few = 2 * math.prod(call.outputs[0].shape) <= math.prod(x.shape)
    cuts = [p for p in distinct(x.placements) if few and type(p) is Shard and p.dim == along]
    strategies += [Strategy((p, Replicate()), (Partial("sum"),)) for p in cuts]
    return Choices(strategies, _look_up)


def _look_up(call: OpCall, inputs: list[Layout], outputs: list[Layout]) -> Any:
    dim = from_front(call.bound["dim"], inputs[0].ndim)
    if dim not in inputs[0].cut_dims:
        return call.op
    run, size = own_run(inputs[0], dim), inputs[0].shape[dim]

    def look_up(x: torch.Tensor, _: int, index: torch.Tensor, **__: Any) -> torch.Tensor:
        check_range(index, size, "index", RuntimeError)
        inside, rows = rows_in(index, run)
        if not run[1]:
            return x.new_zeros(index.shape)
        return x.gather(dim, rows).masked_fill_(~inside, 0)

    return look_up


def _but_index(call: OpCall, placement: Placement) -> Strategy:
    """All as `placement`, but for the index, which is the second tensor, and what has no dims."""
    inputs = tuple(
        Replicate() if i == 1 or (is_shard(placement) and not t.ndim) else placement
        for i, t in enumerate(call.inputs)
    )
    return Strategy(inputs, (placement,) * len(call.outputs))


@rule("index_add index_copy index_fill index_reduce")
def along_index(call: OpCall) -> Choices:
    """(x, dim, index, ...): the index is replicated; shards of the other dims stay."""
    dim = from_front(call.bound["dim"], call.inputs[0].ndim)
    shards = [p for p in call.placements if is_shard(p) and shard_dim(p) != dim]
    linear = call.name.removesuffix("_") in ("index_add", "index_copy")
    sums = call.sums(*call.inputs) if linear else []
    return Choices([call.whole, *(_but_index(call, p) for p in (*shards, *sums))])


@rule("_weight_norm_interface _weight_norm_interface_backward")
def weight_norm(call: OpCall) -> Choices:
    """(v, g, ..., dim) -> (g * v / norms, norms): of each slice along `dim` by itself."""
    ndim = call.inputs[0].ndim
    others = set(range(ndim)) - {from_front(call.bound["dim"], ndim)}

    def localize(call: OpCall, inputs: list[Layout], outputs: list[Layout]) -> Any:
        if all(outputs[0].local_shape):
            return call.op
        # The kernel divides by the number of slices.
        return lambda x, *_: tuple(x.new_empty(o.local_shape, dtype=o.dtype) for o in outputs)

    return Choices(_sharded_alike(call, others), localize)


@rule("tril triu")
def triangle(call: OpCall) -> Choices:
    """Batch dims may be sharded; the dims of the matrix may not, as a shard has other diagonals."""
    ndim = call.inputs[0].ndim
    return Choices(_sharded_alike(call, [ndim - 2, ndim - 1]) + _terms_joined(call))


@rule("index_select")
def index_select(call: OpCall) -> Choices:
    """The index is replicated; shards of the other dims stay."""
    ndim = call.inputs[0].ndim
    dim = from_front(call.bound["dim"], ndim)
    return mapped(call, {d: d for d in range(ndim) if d != dim})


class _Indexed:
    """The dims of x[..., indices, ...]: those of the indices replace the ones that they index.

    If these are not consecutive, they come in front.
    """

    def __init__(self, call: OpCall) -> None:
        indices = list(call.args[1])
        self.at = [d for d, i in enumerate(indices) if i is not None]
        self.tensors = [i for i in indices if isinstance(i, Layout)]
        self.ndim = max((t.ndim for t in self.tensors), default=0)
        consecutive = bool(self.at) and self.at == list(range(self.at[0], self.at[-1] + 1))
        # Where the dims of the indices are.
        self.first = self.at[0] if consecutive else 0
        self._all_behind = not consecutive
        self.has_mask = any(t.dtype.itemsize == 1 for t in self.tensors)
        self.one_shape = len({t.shape for t in self.tensors}) == 1

    def place_of(self, dim: int) -> int:
        """Where a dim is that is not indexed."""
        behind = self._all_behind or dim > self.first
        return dim - sum(i < dim for i in self.at) + (self.ndim if behind else 0)


@rule("index")
def index(call: OpCall) -> Choices:
    """x[..., indices, ...]: shards of dims that are not indexed stay, and those of the indices."""
    source, indexed = call.inputs[0], _Indexed(call)
    if indexed.has_mask:  # the result's size depends on data
        return Choices([call.whole])
    strategies = [call.whole]
    rest = len(call.inputs) - 1
    for placement in source.placements:
        if is_shard(placement) and shard_dim(placement) not in indexed.at:
            out = moved(placement, indexed.place_of(shard_dim(placement)))
            strategies.append(Strategy((placement, *(Replicate(),) * rest), (out,)))
    if indexed.one_shape:
        for placement in filter(is_shard, indexed.tensors[0].placements):
            out = moved(placement, shard_dim(placement) + indexed.first)
            strategies.append(Strategy((Replicate(), *(placement,) * rest), (out,)))
    return Choices([*strategies, *map(call.with_first, call.sums(source))])


@rule("index_put _index_put_impl")
def index_put(call: OpCall) -> Choices:
    """x[..., indices, ...] = or += values: shards of dims that are not indexed stay.

    Sharded indices say where each rank adds its values: terms of a sum. A mask is cut with x.
    """
    indexed = _Indexed(call)
    x, *tensors, values = call.inputs
    replicated = (Replicate(),) * len(tensors)
    if indexed.has_mask:
        if len(tensors) > 1 or indexed.at != [0] or math.prod(values.shape) != 1:
            return Choices([call.whole])
        shards = list(filter(is_shard, call.placements))
        cuts = [p if shard_dim(p) < tensors[0].ndim else Replicate() for p in shards]
        pairs = zip(shards, cuts, strict=True)
        return Choices([call.whole, *(Strategy((p, m, Replicate()), (p,)) for p, m in pairs)])
    strategies = [call.whole]
    shift = values.ndim - (x.ndim - len(indexed.at) + indexed.ndim)
    for dim in (d for d in range(x.ndim) if d not in indexed.at):
        own = indexed.place_of(dim) + shift
        follows = own >= 0 and values.shape[own] == x.shape[dim]
        cuts = [p for p in x.placements if is_shard(p) and shard_dim(p) == dim]
        if follows:
            cuts += [
                moved(p, dim) for p in values.placements if is_shard(p) and shard_dim(p) == own
            ]
        for cut in distinct(cuts):
            of_values = moved(cut, own) if follows else Replicate()
            strategies.append(Strategy((cut, *replicated, of_values), (cut,)))
    for sum_ in call.sums(x, values):
        strategies.append(Strategy((sum_, *replicated, sum_), (sum_,)))
    if call.bound["accumulate"] and indexed.one_shape and shift == 0:
        for cut in filter(is_shard, distinct(tensors[0].placements)):
            own = shard_dim(cut) + indexed.first
            if values.shape[own] == tensors[0].shape[shard_dim(cut)]:
                terms = (Partial("sum"), *(cut,) * len(tensors), moved(cut, own))
                strategies.append(Strategy(terms, (Partial("sum"),)))
    return Choices(strategies)


@rule("slice_backward select_backward")
def slice_backward(call: OpCall) -> Choices:
    """Zeros around a gradient: the sliced dim is gathered."""
    bound = call.bound
    sizes: Any = bound["input_sizes"]
    dim = from_front(bound["dim"], len(sizes))
    drops = call.name == "select_backward"
    dims = {d - (drops and d > dim): d for d in range(len(sizes)) if d != dim}
    position = list(bound).index("input_sizes")

    def localize(call: OpCall, inputs: list[Layout], outputs: list[Layout]) -> Any:
        size, op = list(outputs[0].local_shape), call.op
        return lambda grad, *rest: op(grad, *rest[: position - 1], size, *rest[position:])

    return mapped(call, dims, localize)


@rule("repeat")
def repeat(call: OpCall) -> Choices:
    """Dims that are repeated once may be sharded."""
    times = call.args[1]
    shift = len(times) - call.inputs[0].ndim
    return mapped(call, {d: d + shift for d in range(call.inputs[0].ndim) if times[d + shift] == 1})


@rule("constant_pad_nd")
def constant_pad(call: OpCall) -> Choices:
    """Dims without padding may be sharded. The first term of a sum takes the value of the padding.

    The others are padded with zeros.
    """
    ndim, pad = call.inputs[0].ndim, call.args[1]
    padded = {ndim - 1 - i // 2 for i, n in enumerate(pad) if n}

    def localize(call: OpCall, inputs: list[Layout], outputs: list[Layout]) -> Any:
        x, op = inputs[0], call.op
        if x.index is None or not any(
            isinstance(p, Partial) and p.reduce_op != "avg" and i != 0
            for p, i in zip(x.placements, x.coordinate, strict=True)
        ):
            return op
        return lambda x, pad, *_, **__: op(x, pad, 0)

    return Choices(_sharded_alike(call, padded) + _terms_joined(call), localize)


@rule("one_hot")
def one_hot_rule(call: OpCall) -> Choices:
    """The classes are a new last dim. Terms of an index are none."""
    return Choices(call.kept({d: d for d in range(call.inputs[0].ndim)}))
