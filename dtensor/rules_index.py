"""Rules of ops that join, pick and order along some dims, and leave the others alone."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.distributed.tensor import Replicate

from weft.dtensor.call import Call, Choices, Strategy, rule
from weft.dtensor.layout import Layout, from_front, is_shard, linear_sums, moved, shard_dim
from weft.dtensor.rules_view import mapped


def _together(call: Call, touched: Collection[int]) -> list[Strategy]:
    """All tensors have the same dims, and may be sharded alike in those that are not touched."""
    shards = [p for p in call.placements if is_shard(p) and shard_dim(p) not in touched]
    return [call.whole, *map(call.with_all, shards)]


def _partials(call: Call) -> list[Strategy]:
    """Terms of sums, which the op joins or picks like any values."""
    return list(map(call.with_all, linear_sums(call.placements)))


@rule("cat")
def cat(call: Call) -> Choices:
    """Shards of the other dims stay."""
    ndim = max(layout.ndim for layout in call.inputs)
    if any(layout.ndim != ndim for layout in call.inputs):  # torch takes empty ones of one dim
        return Choices([call.whole])
    return Choices(_together(call, [from_front(call.bound["dim"], ndim)]) + _partials(call))


@rule("stack")
def stack(call: Call) -> Choices:
    """Shards stay, behind the new dim."""
    count = len(call.inputs)
    dim = from_front(call.bound["dim"], call.inputs[0].ndim + 1)
    shards = [(p, shard_dim(p)) for p in call.placements if is_shard(p)]
    alike = [Strategy((p,) * count, (moved(p, d + (d >= dim)),)) for p, d in shards]
    return Choices([call.whole, *alike, *_partials(call)])


@rule(
    "sort",
    "topk",
    "cumsum",
    "cumprod",
    "cummax",
    "cummin",
    "logcumsumexp",
    "argsort",
    "flip",
    "roll",
    "gather",
    "rot90",
)
def along_dim(call: Call) -> Choices:
    """The dims that are worked along are gathered, the others may be sharded."""
    ndim = call.inputs[0].ndim
    bound = call.bound
    name = "dims" if "dims" in bound else "dim"
    dims = bound.get(name, -1)
    dims = range(ndim) if dims in (None, []) else ([dims] if isinstance(dims, int) else dims)
    touched = {from_front(d, ndim) for d in dims}
    if call.name == "gather":
        index = call.inputs[1].shape
        source = call.inputs[0].shape
        if len(index) != ndim:  # an empty index may have any shape
            return Choices([call.whole])
        touched |= {d for d in range(ndim) if index[d] != source[d]}
    return Choices(_together(call, touched))


@rule("_weight_norm_interface", "_weight_norm_interface_backward")
def weight_norm(call: Call) -> Choices:
    """(v, g, ..., dim) -> (g * v / norms, norms): of each slice along `dim` by itself."""
    ndim = call.inputs[0].ndim
    others = set(range(ndim)) - {from_front(call.bound["dim"], ndim)}

    def localize(call: Call, inputs: list[Layout], outputs: list[Layout]) -> Any:
        if all(outputs[0].local_shape):
            return call.op
        # The kernel divides by the number of slices.
        return lambda x, *_: tuple(x.new_empty(o.local_shape, dtype=o.dtype) for o in outputs)

    return Choices(_together(call, others), localize)


@rule("tril", "triu")
def triangle(call: Call) -> Choices:
    """Batch dims may be sharded; the dims of the matrix may not, as a shard has other diagonals."""
    ndim = call.inputs[0].ndim
    return Choices(_together(call, [ndim - 2, ndim - 1]) + _partials(call))


@rule("index_select")
def index_select(call: Call) -> Choices:
    """The index is replicated; shards of the other dims stay."""
    ndim = call.inputs[0].ndim
    dim = from_front(call.bound["dim"], ndim)
    return mapped(call, {d: d for d in range(ndim) if d != dim})


@rule("index")
def index(call: Call) -> Choices:
    """x[..., indices, ...]: shards of dims that are not indexed stay, and those of the indices.

    The dims of the indices replace those that they index; if these are not consecutive, in front.
    """
    source, indices = call.inputs[0], list(call.args[1])
    indices += [None] * (len(source.shape) - len(indices))
    at = [d for d, i in enumerate(indices) if i is not None]
    tensors = [i for i in indices if isinstance(i, Layout)]
    count = len(call.inputs)
    strategies = [call.whole]
    n_index = max((len(t.shape) for t in tensors), default=0)
    consecutive = bool(at) and at == list(range(at[0], at[-1] + 1))
    first = at[0] if consecutive else 0
    for placement in source.placements:
        if not is_shard(placement) or shard_dim(placement) in at:
            continue
        d = shard_dim(placement)
        before = sum(i < d for i in at)
        out = d - before + (n_index if not consecutive or d > first else 0)
        inputs = (placement, *(Replicate(),) * (count - 1))
        strategies.append(Strategy(inputs, (moved(placement, out),)))
    if len({t.shape for t in tensors}) == 1:
        for placement in tensors[0].placements:
            if is_shard(placement):
                out_placement = moved(placement, shard_dim(placement) + first)
                inputs = (Replicate(), *(placement,) * (count - 1))
                strategies.append(Strategy(inputs, (out_placement,)))
    if any(t.dtype.itemsize == 1 for t in tensors):  # a mask: the result's size depends on data
        return Choices(strategies[:1])
    return Choices([*strategies, *map(call.with_first, linear_sums(source.placements))])


@rule("slice_backward", "select_backward")
def slice_backward(call: Call) -> Choices:
    """Zeros around a gradient: the sliced dim is gathered."""
    bound = call.bound
    sizes: Any = bound["input_sizes"]
    dim = from_front(bound["dim"], len(sizes))
    drops = call.name == "select_backward"
    dims = {d - (drops and d > dim): d for d in range(len(sizes)) if d != dim}
    position = list(bound).index("input_sizes")

    def localize(call: Call, inputs: list[Layout], outputs: list[Layout]) -> Any:
        size, op = list(outputs[0].local_shape), call.op
        return lambda grad, *rest: op(grad, *rest[: position - 1], size, *rest[position:])

    return mapped(call, dims, localize)


@rule("repeat")
def repeat(call: Call) -> Choices:
    """Dims that are repeated once may be sharded."""
    times = call.args[1]
    shift = len(times) - call.inputs[0].ndim
    return mapped(call, {d: d + shift for d in range(call.inputs[0].ndim) if times[d + shift] == 1})


@rule("constant_pad_nd")
def constant_pad(call: Call) -> Choices:
    """Dims without padding may be sharded."""
    ndim, pad = call.inputs[0].ndim, call.args[1]
    padded = {ndim - 1 - i // 2 for i, n in enumerate(pad) if n}
    return Choices(_together(call, padded))


def one_hot(indices: torch.Tensor, num_classes: int) -> torch.Tensor:
    """(...) -> (..., num_classes): `F.one_hot` as one op."""
    return torch.zeros(
        *indices.shape, num_classes, dtype=torch.int64, device=indices.device
    ).scatter_(-1, indices.unsqueeze(-1), 1)


@rule("one_hot")
def _one_hot_rule(call: Call) -> Choices:
    """The classes are a new last dim."""
    return mapped(call, {d: d for d in range(call.inputs[0].ndim)})
