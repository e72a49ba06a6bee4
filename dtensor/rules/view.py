"""Rules of views: transpose, expand, slice, split, and reshaping.

Reshaping keeps a shard if the elements that each rank holds are a shard of the result too. A shard
selects, in the flattened order of the dims that are reshaped together, a pattern that repeats:

    (4, 6) by Shard(1) over 2 ranks: rank 0 holds [0, 3) of each 6, four times
    viewed as (24,): _StridedShard(0, split_factor=4), the same pattern

so shards are compared by (period, where each rank starts and how much it takes).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from weft.dtensor.dispatch.call import Choices, Chosen, Localize, OpCall, rule
from weft.dtensor.dispatch.views import NoViewError
from weft.dtensor.layout.boxes import Layout
from weft.dtensor.layout.placements import distinct, from_front, is_shard, pieces_of, shard_dim
from weft.dtensor.layout.runs import Shape, chunk

Pattern = tuple[int, tuple[tuple[int, int], ...]]


def mapped(call: OpCall, dim_map: dict[int, int], localize: Localize | None = None) -> Choices:
    """Shards of dims that the result has as they are, {dim of the first tensor: of the result}."""
    partials = [p for p in distinct(call.inputs[0].placements) if isinstance(p, Partial)]
    return Choices([*call.kept(dim_map), *map(call.with_first, partials)], localize)


@rule("t transpose permute")
def permute(call: OpCall) -> Choices:
    """Shards move with their dims."""
    ndim = call.inputs[0].ndim
    order = list(range(ndim))
    if call.name == "permute":
        order = [from_front(d, ndim) for d in call.args[1]]
    elif ndim > 1:
        a, b = (0, 1) if call.name == "t" else (from_front(d, ndim) for d in call.args[1:3])
        order[a], order[b] = order[b], order[a]
    return mapped(call, {old: new for new, old in enumerate(order)})


@rule("unsqueeze")
def unsqueeze(call: OpCall) -> Choices:
    """A new dim of size 1."""
    ndim = call.inputs[0].ndim
    at = from_front(call.args[1], ndim + 1)
    return mapped(call, {d: d + (d >= at) for d in range(ndim)})


@rule("squeeze")
def squeeze(call: OpCall) -> Choices:
    """Dims of size 1 go, whatever their local size is."""
    shape = call.inputs[0].shape
    asked = call.args[1] if len(call.args) > 1 else range(len(shape))
    asked = [asked] if isinstance(asked, int) else asked
    gone = {d for d in (from_front(a, len(shape)) for a in asked) if shape and shape[d] == 1}
    kept = [d for d in range(len(shape)) if d not in gone]
    dims = tuple(sorted(gone))

    def localize(call: OpCall, inputs: list[Layout], outputs: list[Layout]) -> Any:
        return lambda x, *_: torch.ops.aten.squeeze.dims(x, dims)

    return mapped(call, {old: new for new, old in enumerate(kept)}, localize)


@rule("expand")
def expand(call: OpCall) -> Choices:
    """Only dims that are not expanded may be sharded."""
    shape, out = call.inputs[0].shape, call.outputs[0].shape
    shift = len(out) - len(shape)
    kept = {d: d + shift for d in range(len(shape)) if shape[d] == out[d + shift]}

    def localize(call: OpCall, inputs: list[Layout], outputs: list[Layout]) -> Any:
        size = outputs[0].local_shape
        return lambda x, *_, **__: x.expand(size)

    return mapped(call, kept, localize)


@rule(
    "select slice narrow unbind split split_with_sizes unsafe_split unsafe_split_with_sizes chunk "
    "unfold diagonal"
)
def along(call: OpCall) -> Choices:
    """Cuts along some dims; a shard of another dim stays."""
    bound = call.bound
    ndim = call.inputs[0].ndim
    if call.name == "diagonal":
        return mapped(call, _diagonal_map(bound, ndim))
    dim = from_front(bound.get("dim", bound.get("dimension", 0)), ndim)
    if len(call.outputs) == 1 and call.outputs[0].shape == call.inputs[0].shape:
        return mapped(call, {d: d for d in range(ndim)}, _all_of_it)
    drops = call.name in ("select", "unbind")
    return mapped(call, {d: d - (drops and d > dim) for d in range(ndim) if d != dim})


@rule("view_as_complex view_as_real")
def pairs_of_numbers(call: OpCall) -> Choices:
    """A last dim of two numbers becomes one complex number each, or the other way round."""
    dims = {d: d for d in range(min(call.inputs[0].ndim, len(call.outputs[0].shape)))}
    return Choices([*call.kept(dims), *map(call.with_first, call.sums(call.inputs[0]))])


def _all_of_it(call: OpCall, inputs: list[Layout], outputs: list[Layout]) -> Any:
    """A slice of everything, on each shard: its bounds, which are global, do not hold there."""
    listed = isinstance(call.output_tree, (list, tuple))
    return lambda x, *_, **__: [x.view_as(x)] if listed else x.view_as(x)


@rule("as_strided as_strided_copy as_strided_scatter")
def as_strided_rule(call: OpCall) -> Choices:
    """Reads the whole tensor's memory: replicated, with the same strides on every rank.

    With the tensor's own sizes and strides it reads nothing else, and each shard is itself.
    """
    source, bound = call.inputs[0], call.bound
    given = tuple(bound["size"]), tuple(bound["stride"]), bound.get("storage_offset") or 0
    if call.name == "as_strided" and given == (source.shape, source.stride, 0):
        return mapped(call, {d: d for d in range(source.ndim)}, _all_of_it)
    if not source.is_contiguous:
        raise NotImplementedError(
            f"{call}: of a DTensor that is not contiguous. Call contiguous() first, or index it"
        )

    def localize(call: OpCall, inputs: list[Layout], outputs: list[Layout]) -> Any:
        def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not x.is_contiguous() or x.storage_offset():
                raise NoViewError
            return call.op(x, *args, **kwargs)

        return run

    return Choices([call.whole], localize if call.name == "as_strided" else None)


def _diagonal_map(bound: dict[str, Any], ndim: int) -> dict[int, int]:
    gone = {from_front(bound["dim1"], ndim), from_front(bound["dim2"], ndim)}
    return {old: new for new, old in enumerate(d for d in range(ndim) if d not in gone)}


def _pattern(shape: Shape, dims: range, placement: Placement, parts: int) -> Pattern | None:
    """What `placement` selects in the flattened `dims`; None if it does not repeat evenly."""
    dim = shard_dim(placement)
    pieces = pieces_of(placement)
    size, inner = shape[dim], math.prod(shape[d] for d in dims if d > dim)
    if size % pieces:
        return None
    each = size // pieces
    takes = tuple(chunk(each, parts, i) for i in range(parts))
    return each * inner, tuple((start * inner, length * inner) for start, length in takes)


def _groups(old: Shape, new: Shape) -> list[tuple[range, range]]:
    """Smallest runs of old and new dims with the same number of elements."""
    groups, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        start_i, start_j = i, j
        a = b = 1
        if i < len(old):
            a, i = old[i], i + 1
        if j < len(new):
            b, j = new[j], j + 1
        while a != b:
            if (a < b and i < len(old)) or j >= len(new):
                a, i = a * old[i], i + 1
            else:
                b, j = b * new[j], j + 1
        # Trailing dims of size 1 belong to the group before them only when nothing else follows.
        groups.append((range(start_i, i), range(start_j, j)))
    return groups


def _shards_along(new: Shape, dims: range, period: int) -> Iterator[Placement]:
    yield from map(Shard, dims)
    for d in dims:
        inner = math.prod(new[e] for e in dims if e > d)
        if new[d] * inner % period == 0 and new[d] * inner > period:
            # A number that a graph must specialize on, as it is part of the placement.
            yield _StridedShard(d, split_factor=int(new[d] * inner // period))


def _viewed(
    placement: Placement, parts: int, old: Shape, new: Shape, old_dims: range, new_dims: range
) -> Placement | None:
    """The placement of a view's result on one mesh dim; None if no shard describes it."""
    pattern = _pattern(old, old_dims, placement, parts)
    if pattern is None:
        return None
    for option in _shards_along(new, new_dims, pattern[0]):
        if _pattern(new, new_dims, option, parts) == pattern:
            return option
    return None


def _divided(shape: Shape, placement: Placement, parts: int) -> Shape | None:
    """The shape of every rank after a shard, None if they differ."""
    dim = shard_dim(placement)
    pieces = pieces_of(placement)
    if shape[dim] % (parts * pieces):
        return None
    return tuple(n // parts if d == dim else n for d, n in enumerate(shape))


@rule("view _unsafe_view reshape _reshape_alias view_copy _reshape_copy")
def view(call: OpCall) -> Choices | Chosen:
    """Keep each shard that is one of the result too; gather the others."""
    source = call.inputs[0]
    if call.outputs[0].dtype != source.dtype:
        same_size = call.outputs[0].dtype.itemsize == source.dtype.itemsize
        kept = source.ndim if same_size else source.ndim - 1  # else the last dim is another
        return Choices(call.kept({d: d for d in range(kept)}))
    old, new = source.shape, call.outputs[0].shape
    inputs: list[Placement] = []
    outputs: list[Placement] = []
    for mesh_dim, placement in enumerate(source.placements):
        parts = source.place.sizes[mesh_dim]
        result: Placement | None = placement
        if is_shard(placement):
            result = _followed(placement, parts, old, new)
            rest = source.placements[mesh_dim + 1 :]
            if result is not None and any(is_shard(p) for p in rest):
                # Later mesh dims cut what is left: it must be the same on all ranks.
                local_old = _divided(old, placement, parts)
                local_new = _divided(new, result, parts)
                if local_old is None or local_new is None:
                    if _independent(source, mesh_dim, old, new):
                        local_old, local_new = old, new
                    else:
                        result = None
                if result is not None:
                    assert local_old is not None and local_new is not None
                    old, new = local_old, local_new
        inputs.append(Replicate() if result is None else placement)
        outputs.append(Replicate() if result is None else result)

    return Chosen([tuple(inputs)], [tuple(outputs)], _localize_view)


def _followed(placement: Placement, parts: int, old: Shape, new: Shape) -> Placement | None:
    if 0 in old:
        return None
    for old_dims, new_dims in _groups(old, new):
        if shard_dim(placement) in old_dims:
            if parts == 1 and new_dims:
                return Shard(new_dims[0])
            return _viewed(placement, parts, old, new, old_dims, new_dims)
    return None


def _independent(source: Layout, mesh_dim: int, old: Shape, new: Shape) -> bool:
    """Whether the later mesh dims cut dims that are not reshaped together with this one."""
    for old_dims, _ in _groups(old, new):
        if shard_dim(source.placements[mesh_dim]) in old_dims:
            return not any(shard_dim(p) in old_dims for p in source.placements[mesh_dim + 1 :])
    return False


def _localize_view(call: OpCall, inputs: list[Layout], outputs: list[Layout]) -> Any:
    size = outputs[0].local_shape

    def copied(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return x.reshape(size)

    def viewed(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        # The strides of a gathered or cut local tensor may not follow from the global ones.
        try:
            return x.view(size)
        except (RuntimeError, ValueError):  # the latter from fake tensors in a trace
            raise NoViewError from None

    return viewed if call.name in ("view", "_reshape_alias") else copied
