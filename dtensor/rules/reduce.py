"""Rules of reductions: sums, means, extrema, norms, variances."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from weft.collectives.ranks.reports import check_all
from weft.dtensor.dispatch.agreement import all_agree
from weft.dtensor.dispatch.call import Choices, Decomposed, Op, OpCall, Strategy, rule
from weft.dtensor.dispatch.dispatch import dispatch
from weft.dtensor.layout.boxes import Layout, contiguous_layout, layout_of
from weft.dtensor.layout.placements import (
    distinct,
    from_front,
    is_shard,
    moved,
    pieces_of,
    shard_dim,
)
from weft.dtensor.layout.runs import Shape
from weft.dtensor.move.redistribute import move
from weft.dtensor.tensor import DTensor, local_as, wrap


class Reduction(NamedTuple):
    """The dims that an op reduces, counted from the front, and whether they stay, of size 1."""

    dims: tuple[int, ...]
    keepdim: bool = False

    @staticmethod
    def of(call: OpCall) -> Reduction:
        """That of an op with the arguments `dim` and `keepdim`."""
        ndim, bound = call.inputs[0].ndim, call.bound
        dims = bound.get("dim")
        if not ndim or dims is None or (isinstance(dims, (list, tuple)) and not dims):
            dims = range(ndim)
        elif isinstance(dims, int):
            dims = [dims]
        return Reduction(tuple(from_front(d, ndim) for d in dims), bool(bound.get("keepdim")))

    def place_of(self, dim: int) -> int:
        """Where a dim of the source is that is not reduced."""
        return dim if self.keepdim else dim - sum(d < dim for d in self.dims)

    def count_of(self, shape: Sequence[int]) -> int:
        """How many elements of the source make one of the result."""
        return math.prod(shape[d] for d in self.dims)

    def shape_of(self, source: Sequence[int]) -> Shape:
        """The shape of the result."""
        marked = [(n, d in self.dims) for d, n in enumerate(source)]
        return tuple(1 if gone else n for n, gone in marked if self.keepdim or not gone)

    def layout_of(self, source: Layout, dtype: torch.dtype) -> Layout:
        """The layout of the result, the ranks' results combined."""
        placements = [
            moved(p, self.place_of(shard_dim(p)))
            if is_shard(p) and shard_dim(p) not in self.dims
            else Replicate()
            for p in source.placements
        ]
        return contiguous_layout(source.mesh, placements, self.shape_of(source.shape), dtype)

    def kept_shards(self, call: OpCall) -> list[Strategy]:
        """Replicate, and every shard of a dim that is not reduced."""
        kept = [d for d in range(call.inputs[0].ndim) if d not in self.dims]
        return call.kept({d: self.place_of(d) for d in kept})

    def reduced_shards(self, call: OpCall, result: Placement) -> list[Strategy]:
        """Every shard of a dim that is reduced, which makes the result a term."""
        shards = [p for p in distinct(call.inputs[0].placements) if shard_dim(p) in self.dims]
        return [Strategy((p,), (result,)) for p in shards]


@rule("_fft_c2c _fft_r2c _fft_c2r")
def fourier(call: OpCall) -> Choices:
    """Transforms along some dims, linear, and independent along the others."""
    over = Reduction(tuple(from_front(dim, call.inputs[0].ndim) for dim in call.args[1]), True)
    sums = map(call.with_first, call.sums(call.inputs[0]))

    def localize(call: OpCall, inputs: list[Layout], outputs: list[Layout]) -> Any:
        size, op = outputs[0].local_shape, call.op

        def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if 0 in size:  # torch refuses to transform nothing
                return x.new_empty(size, dtype=call.outputs[0].dtype)
            return op(x, *args, **kwargs)

        return run

    return Choices([*over.kept_shards(call), *sums], localize)


def _may_leave_empty(layout: Layout, dims: tuple[int, ...]) -> bool:
    """Whether some rank may hold no index of these dims, however many mesh dims cut them."""
    cuts = [p for p in distinct(layout.placements) if shard_dim(p) in dims]
    ways = [layout.placements, *((p,) * len(layout.placements) for p in cuts)]
    boxes = [box for way in ways for box in layout.with_placements(way).boxes]
    return any(not box[d] for box in boxes for d in dims if layout.shape[d])


def _terms_of_kind(call: OpCall, kind: str) -> list[Strategy]:
    return [
        Strategy((p,), (p,))
        for p in distinct(call.inputs[0].placements)
        if isinstance(p, Partial) and p.reduce_op == kind
    ]


@rule("sum nansum count_nonzero")
def sum_(call: OpCall) -> Choices:
    """A sum over a sharded dim is a Partial sum."""
    over = Reduction.of(call)
    strategies = over.kept_shards(call) + over.reduced_shards(call, Partial("sum"))
    if call.name == "sum":
        strategies += map(call.with_first, call.sums(*call.inputs))
    return Choices(strategies)


@rule("mean")
def mean(call: OpCall) -> Choices:
    """The ranks' means, weighted by their shares of the elements, are a Partial sum.

    With equal shares, the plain means are a Partial average.
    """
    over = Reduction.of(call)
    source = call.inputs[0]
    ranks = len(source.place.ranks)
    # Any mesh dims may cut a dim: its shards are even if all of them together cut it evenly.
    parts = ranks * math.lcm(*map(pieces_of, source.placements))
    cut = [source.shape[d] for d in source.cut_dims if d in over.dims]
    even = all(size % parts == 0 for size in cut)
    partial = Partial("avg" if even else "sum")
    strategies = over.kept_shards(call) + over.reduced_shards(call, partial)
    if even:
        return Choices([*strategies, *map(call.with_first, call.sums(source))])

    def localize(call: OpCall, inputs: list[Layout], outputs: list[Layout]) -> Any:
        local, whole = inputs[0].local_shape, inputs[0].shape
        # The mean of no elements is NaN on every rank.
        count = over.count_of(whole)
        weight = over.count_of(local) / count if count else 1.0
        op: Any = call.op
        if all(p != partial for p in outputs[0].placements):
            return op

        def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            result: torch.Tensor = op(x, *args, **kwargs)
            return result * weight if weight else torch.zeros_like(result)

        return run

    return Choices(strategies, localize)


_UNREDUCED, _MEAN = 0, 1  # aten's numbers for reduction=


@rule(
    "mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits"
)
def elementwise_loss(call: OpCall) -> Choices | Decomposed:
    """The losses of single elements, and their sum or mean: no rank needs another's elements."""
    from weft.dtensor.rules.pointwise import pointwise

    bound = call.bound
    if bound["reduction"] == _UNREDUCED:
        call.refuses = call.name == "binary_cross_entropy"  # numbers beyond [0, 1]
        return pointwise(call)
    if not any(layout.cut_dims for layout in call.inputs):
        return Choices([call.whole])
    reduce = torch.ops.aten.mean if bound["reduction"] == _MEAN else torch.ops.aten.sum

    def run(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(bound, args, strict=False)) | kwargs | {"reduction": _UNREDUCED}
        losses = dispatch(call.op, [given.get(name, bound[name]) for name in bound])
        return dispatch(reduce.default, (losses,))

    return Decomposed(run)


_EXTREMA = {
    "amax": "max",
    "max": "max",
    "amin": "min",
    "min": "min",
    "prod": "product",
    "any": "max",
    "all": "min",
}


@rule("amax amin max min prod any all")
def extremum(call: OpCall) -> Choices:
    """Partial of the same kind, except where a rank has nothing, or the index is asked for."""
    if len(call.inputs) == 2:
        from weft.dtensor.rules.pointwise import pointwise

        return pointwise(call)
    over = Reduction.of(call)
    strategies = over.kept_shards(call)
    neutral = call.name in ("prod", "any", "all")
    if len(call.outputs) == 1 and (neutral or not _may_leave_empty(call.inputs[0], over.dims)):
        kind = _EXTREMA[call.name]
        strategies += over.reduced_shards(call, Partial(kind))
        if call.outputs[0].dtype == call.inputs[0].dtype:
            strategies += _terms_of_kind(call, kind)
    return Choices(strategies)


@rule("argmax argmin logsumexp median nanmedian mode aminmax kthvalue")
def gathered(call: OpCall) -> Choices:
    """Reduced dims are gathered, the others may be sharded."""
    over = Reduction.of(call)
    return Choices(over.kept_shards(call))


@rule("var std var_mean std_mean")
def variance(call: OpCall) -> Choices | Decomposed:
    """Over a sharded dim: one exchange of each rank's moments."""
    over = Reduction.of(call)
    layout = call.inputs[0]
    # The overloads with `unbiased` come here in inference mode only.
    unbiased = call.bound.get("unbiased")
    # Of integers torch has none, and says so.
    if not layout.dtype.is_floating_point or not any(d in over.dims for d in layout.cut_dims):
        return Choices(over.kept_shards(call))

    def run(x: DTensor, *_: Any, **kwargs: Any) -> Any:
        correction = kwargs.get("correction", unbiased)
        solid = x._layout.reduced()
        mean, var = moments(local_as(x, solid), solid, over)
        count = over.count_of(solid.shape)
        free = max(count - (1 if correction is None else correction), 0)
        var = (var * count / free).to(x.dtype)
        reduced = over.layout_of(solid, x.dtype)
        first = wrap(var.sqrt() if call.name.startswith("std") else var, reduced)
        return (first, wrap(mean.to(x.dtype), reduced)) if len(call.outputs) == 2 else first

    return Decomposed(run)


def moments(
    local: torch.Tensor, source: Layout, over: Reduction
) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean, mean square of the distance from it) of a reduction, in float32 at least. Collective.

    Each rank sends its own two and its number of elements: the difference of plain sums of squares
    would lose digits.
    """
    wide = local.to(torch.promote_types(local.dtype, torch.float32))
    count = over.count_of(local.shape)
    # Torch's own variance, in one pass, takes four times as long.
    mean = wide.sum(over.dims, keepdim=True).div_(max(count, 1))
    squares = (wide - mean).square_().sum(*over)
    mean = mean.reshape(squares.shape)
    if not any(shard_dim(p) in over.dims for p in source.placements):
        return mean, squares.div_(count)
    own = torch.stack([mean, squares, torch.full_like(mean, count)], -1)
    means, squares, counts = _of_each_rank(own, source, over).unbind(-1)
    total = counts.sum(0)
    mean = (means * counts).sum(0) / total
    return mean, (squares + counts * (means - mean).square()).sum(0) / total


@rule("linalg_vector_norm norm")
def vector_norm(call: OpCall) -> Choices | Decomposed:
    """The norm over a sharded dim is the norm of the ranks' norms."""
    over = Reduction.of(call)
    if any(d in over.dims for d in call.inputs[0].cut_dims):
        return Decomposed(_norm_of_norms(over))
    return Choices(over.kept_shards(call))


def _norm_over_ranks(every: torch.Tensor, order: Any) -> torch.Tensor:
    """(ranks, ...) norms of parts -> (...) norms. The 0-norm counts elements: counts add up."""
    return every.sum(0) if order == 0 else _local_norm(every, order, Reduction((0,)), every.dtype)


def _norm_of_norms(over: Reduction) -> Callable[..., Any]:
    def run(x: DTensor, *args: Any, **kwargs: Any) -> Any:
        solid = x._layout.reduced()  # terms of a sum have no norm
        local = local_as(x, solid)
        order = args[0] if args else kwargs.get("ord", kwargs.get("p"))
        order = 2 if order is None else order
        dtype = kwargs.get("dtype") or local.dtype
        norms = _local_norm(local, order, over, dtype)
        total = _norm_over_ranks(_of_each_rank(norms, solid, over), order)
        return wrap(total, over.layout_of(solid, total.dtype))

    return run


def _of_each_rank(part: torch.Tensor, source: Layout, over: Reduction) -> torch.Tensor:
    """(ranks, *part): the parts of the ranks that share the reduced dims of `source`. Collective.

    Args:
        part: this rank's result, of the reduced shape and any further dims.
    """
    reduced = over.layout_of(source, part.dtype)
    crossed = [shard_dim(p) in over.dims for p in source.placements]
    ranks = math.prod(n for n, c in zip(source.place.sizes, crossed, strict=True) if c)
    kept = [moved(p, shard_dim(p) + 1) if is_shard(p) else p for p in reduced.placements]
    shape = (ranks, *reduced.shape, *part.shape[reduced.ndim :])
    gathered = contiguous_layout(source.mesh, kept, shape, part.dtype)
    stacked = [Shard(0) if c else p for c, p in zip(crossed, kept, strict=True)]
    return move(part.unsqueeze(0), gathered.with_placements(stacked), gathered)


def _local_norm(x: torch.Tensor, order: Any, over: Reduction, dtype: torch.dtype) -> torch.Tensor:
    if any(x.shape[d] == 0 for d in over.dims):
        # Leaves the norm over the ranks unchanged: infinity if that is a minimum.
        neutral = math.inf if order < 0 else 0.0
        return torch.full(over.shape_of(x.shape), neutral, dtype=dtype.to_real(), device=x.device)
    result: torch.Tensor = torch.linalg.vector_norm(x, order, *over, dtype=dtype)
    return result


@rule("dist")
def distance(call: OpCall) -> Decomposed:
    """The norm of the difference."""

    def run(a: torch.Tensor, b: torch.Tensor, order: float = 2) -> torch.Tensor:
        if order == 1:  # terms of a sum
            return (a - b).abs().sum()
        norm: torch.Tensor = torch.linalg.vector_norm(a - b, order)
        return norm

    return Decomposed(run)


@rule("equal")
def equal(call: OpCall) -> Decomposed:
    """Every rank compares its part; the tensors are equal if all parts are."""

    def run(a: DTensor, b: DTensor) -> bool:
        if a._layout.shape != b._layout.shape:
            return False
        solid = a._layout.reduced()  # terms of a sum cannot be compared
        theirs = layout_of(
            solid.mesh, solid.placements, b._layout.shape, b._layout.stride, b._layout.dtype
        )
        mine, other = local_as(a, solid), local_as(b, theirs)
        return all_agree(torch.equal(mine, other), solid, mine.device)

    return Decomposed(run)


@rule("_local_scalar_dense")
def item(call: OpCall) -> Decomposed:
    """The global tensor's one element: a Partial is reduced first."""

    def run(x: DTensor) -> Any:
        number = local_as(x, x._layout.replicated()).item()
        check_all()  # of what the host has just waited for
        return number

    return Decomposed(run)


@rule("_foreach_norm")
def foreach_norm(call: OpCall) -> Decomposed:
    """The norms of all tensors: local norms first, then one exchange for the whole list."""
    layouts, mesh = call.inputs, call.mesh
    if len({(layout.mesh, layout.dtype) for layout in layouts}) != 1:
        return Decomposed(_one_by_one(torch.ops.aten.linalg_vector_norm.default))
    solid = [layout.reduced() for layout in layouts]
    crossed = [tuple(map(is_shard, layout.placements)) for layout in solid]
    count, place = len(layouts), layouts[0].place
    # By the mesh dims that cut a tensor: the ranks that found parts of it, replicas left out.
    ranks_of = {
        pattern: [
            rank
            for rank, coordinate in enumerate(place.coordinates)
            if all(cross or i == 0 for cross, i in zip(pattern, coordinate, strict=True))
        ]
        for pattern in crossed
    }

    @lru_cache
    def layouts_of_norms(dtype: torch.dtype) -> tuple[Layout, Layout]:
        # Row r: what rank r found.
        table = contiguous_layout(mesh, [Shard(0)] * mesh.ndim, (len(place.ranks), count), dtype)
        return table, contiguous_layout(mesh, [Replicate()] * mesh.ndim, (), dtype)

    def run(
        tensors: list[DTensor], order: float = 2, dtype: torch.dtype | None = None
    ) -> list[DTensor]:
        parts = [
            t._local_tensor if layout is whole else local_as(t, whole)
            for t, layout, whole in zip(tensors, layouts, solid, strict=True)
        ]
        if all(part.numel() for part in parts):
            norms = torch._foreach_norm(parts, order, dtype=dtype)
        else:
            norms = tuple(
                _local_norm(t, order, Reduction(tuple(range(t.dim()))), dtype or t.dtype)
                for t in parts
            )
        mine = torch.stack(norms)
        table, scalar = layouts_of_norms(mine.dtype)
        found = dict.fromkeys(ranks_of, norms)
        if any(map(any, ranks_of)):
            every = move(mine.unsqueeze(0), table, table.replicated())
            for pattern, ranks in ranks_of.items():
                rows = every if len(ranks) == len(every) else every[ranks]
                if any(pattern):
                    found[pattern] = _norm_over_ranks(rows, order).unbind()
        return [wrap(found[pattern][i], scalar) for i, pattern in enumerate(crossed)]

    return Decomposed(run)


@rule("_foreach_max")
def foreach_max(call: OpCall) -> Decomposed:
    """The largest element of each tensor."""
    largest = torch.ops.aten.max.default
    return Decomposed(lambda tensors: [dispatch(largest, (tensor,)) for tensor in tensors])


@rule("_foreach_powsum")
def foreach_powsum(call: OpCall) -> Decomposed:
    """The sum of the powers of each tensor's elements."""
    return Decomposed(_one_by_one(torch.ops.aten.linalg__powsum.default))


def _one_by_one(op: Op) -> Op:
    def run(
        tensors: list[DTensor], order: float = 2, dtype: torch.dtype | None = None
    ) -> list[Any]:
        return [dispatch(op, (tensor, order), {"dtype": dtype}) for tensor in tensors]

    return run
