"""Rules of convolution and pooling: windows that slide over the last dims.

Batch and channels are shards like those of a matmul. Along a sharded dim of the image, each rank
computes its chunk of the result, and pulls the rows that its windows reach into:

    kernel 3, padding 1, rows 0..7 on 2 ranks     rank 0: result rows 0..3, reads (pad) 0..4
                                                  rank 1: result rows 4..7, reads 3..7 (pad)

    forward    pull the rows below the own result rows, convolve
    of input   pull the gradients above the own input rows, transposed convolution, cut
    of weight  the own gradients on the rows below them: a term of a sum
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from weft.dtensor.dispatch.call import Choices, OpCall, Strategy, rule
from weft.dtensor.layout.boxes import Layout, with_boxes
from weft.dtensor.layout.placements import is_shard, shard_dim
from weft.dtensor.layout.runs import Shape
from weft.dtensor.move.redistribute import move

Range = tuple[int, int]
_SPATIAL = 2  # the first dim of the image
_R, _SUM = Replicate(), Partial("sum")


class _Windows:
    """Geometry of one convolution: which rows of the input a row of the result sees."""

    def __init__(self, call: OpCall, weight: Layout) -> None:
        bound = call.bound
        n = len(weight.shape) - 2
        self.stride, self.padding, self.dilation = (
            self._each(bound[name], n) for name in ("stride", "padding", "dilation")
        )
        self.reach = [d * (k - 1) for d, k in zip(self.dilation, weight.shape[2:], strict=True)]
        self.groups: int = bound["groups"]
        self.transposed: bool = bound["transposed"]

    @staticmethod
    def _each(value: Any, n: int) -> list[int]:
        return list(value) * n if len(value) == 1 else list(value)

    def below(self, axis: int, rows: Range) -> Range:
        """Input rows [start, stop) that these result rows see; they may extend beyond the edges."""
        s, p = self.stride[axis], self.padding[axis]
        return rows[0] * s - p, (rows[1] - 1) * s - p + self.reach[axis] + 1

    def inside(self, axis: int, rows: Range, size: int) -> Range:
        """`below`, clipped to the input's `size` rows."""
        start, stop = (min(max(row, 0), size) for row in self.below(axis, rows))
        return start, max(start, stop)

    def above(self, axis: int, rows: Range, size: int) -> Range:
        """Result rows, out of `size`, that see any of these input rows."""
        s, p = self.stride[axis], self.padding[axis]
        first = max(0, -(-(rows[0] + p - self.reach[axis]) // s))
        return first, max(first, min(size, (rows[1] - 1 + p) // s + 1))


def _own(layout: Layout, rank: int, dim: int) -> Range:
    runs = layout.box_at(rank)[dim]
    return (runs[0][0], runs[0][0] + runs[0][1]) if runs else (0, 0)


def _pulled(
    layout: Layout, dims: list[int], other: Layout, wanted: Callable[[int, Range, int], Range]
) -> Layout:
    """`layout` with other rows on each rank: `wanted(axis, rows, size)`, from the rank's rows of
    `other` and the number of rows of `layout`."""
    layout = layout.closed()
    boxes = []
    for rank, box in enumerate(layout.boxes):
        new = list(box)
        for dim in dims:
            rows = _own(other, rank, dim)
            start, stop = (
                wanted(dim - _SPATIAL, rows, layout.shape[dim]) if rows[0] < rows[1] else (0, 0)
            )
            new[dim] = ((start, stop - start),) if stop > start else ()
        boxes.append(tuple(new))
    return with_boxes(layout, boxes)


def _cut_dims(layout: Layout) -> list[int]:
    """Dims of the image that some mesh dim shards."""
    return [dim for dim in layout.cut_dims if dim >= _SPATIAL]


def _strategies(call: OpCall, forward: bool) -> list[Strategy]:
    """Of the forward: (x, w, bias) -> y. Of the backward: (of y, x, w) -> (of x, of w, of bias)."""
    x, w = (call.inputs[0], call.inputs[1]) if forward else (call.inputs[1], call.inputs[2])
    windows = _Windows(call, w)
    rows, columns = (1, 0) if windows.transposed else (0, 1)  # of w: dims of outputs and inputs
    # Each line: the placements of x, w, the bias and y; those of the gradients follow.
    lines: list[tuple[Placement, Placement, Placement, Placement]] = [
        (_R, _R, _R, _R),
        (Shard(0), _R, _R, Shard(0)),
    ]
    if windows.groups == 1:
        lines.append((_R, Shard(rows), Shard(0), Shard(1)))
        lines.append((Shard(1), Shard(columns), _SUM, _SUM))
    elif windows.groups % len(x.place.ranks) == 0:
        lines.append((Shard(1), Shard(0), Shard(0), Shard(1)))
    if not windows.transposed:
        lines += [(Shard(d), _R, _R, Shard(d)) for d in range(_SPATIAL, len(x.shape))]
    if forward:
        lines += [(p, _R, p, p) for p in call.sums(x)]
        n = len(call.inputs)
        return [Strategy((px, pw, pb)[:n], (py,)) for px, pw, pb, py in lines]
    strategies = []
    mask = call.bound["output_mask"]
    for px, pw, pb, py in lines:
        of_y: Placement = _R if isinstance(py, Partial) else py
        of_x: Placement = _SUM if is_shard(py) and px == _R else px
        # Rows of the image or of the batch are summed over by the gradients of the weights.
        summed = is_shard(px) and pw == _R
        of_w: Placement = _SUM if summed else pw
        of_bias: Placement = _SUM if summed else (_R if isinstance(pb, Partial) else pb)
        wanted = [p for p, asked in zip((of_x, of_w, of_bias), mask, strict=True) if asked]
        strategies.append(Strategy((of_y, px, pw), tuple(wanted)))
    return strategies + list(map(call.with_first, call.sums(call.inputs[0])))


def _options(call: OpCall, x: Layout, tensors: int) -> list[Any]:
    """The arguments after the first ones, with this rank's number of groups."""
    groups = call.bound["groups"]
    if groups > 1:
        groups //= x.parts(1)
    return list((call.bound | {"groups": groups}).values())[tensors:]


def _convolved(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, shape: Shape, options: list[Any]
) -> torch.Tensor:
    """The local convolution; without rows or channels, which torch refuses, the bias alone."""
    if x.numel() and w.numel():
        result: torch.Tensor = torch.ops.aten.convolution(x, w, bias, *options)
        return result
    zero = x.new_zeros(shape)
    return zero if bias is None else zero + bias.view(-1, *[1] * (len(shape) - 2))


def _window_gradients(
    grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor, options: list[Any]
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The gradients of x, w and bias, None where the mask (the last option) has False."""
    if grad.numel() and x.numel() and w.numel():
        backward: Any = torch.ops.aten.convolution_backward
        return tuple(backward(grad, x, w, [grad.shape[1]], *options))
    of_x, of_w, of_bias = options[-1]
    return (
        torch.zeros_like(x) if of_x else None,
        torch.zeros_like(w) if of_w else None,
        grad.sum([0, *range(2, grad.dim())]) if of_bias else None,
    )


@rule("convolution _convolution convolution_overrideable")
def convolution(call: OpCall) -> Choices:
    """(x (N, C, ...), w, bias, stride, padding, dilation, transposed, output_padding, groups)."""

    def localize(call: OpCall, inputs: list[Layout], outputs: list[Layout]) -> Any:
        x, y = inputs[0], outputs[0]
        cut = _cut_dims(x)
        rest = _options(call, x, 3)
        if not cut:
            return lambda local, w, b, *_: _convolved(local, w, b, y.local_shape, rest)
        windows = _Windows(call, inputs[1])
        slab = _pulled(x, cut, y, windows.inside)
        options = _unpadded(windows, cut, rest[-1])

        def run(local: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, *_: Any) -> Any:
            pulled = move(local, x, slab)
            if 0 in y.local_shape:
                return local.new_zeros(y.local_shape)
            padded = _padded(pulled, y, windows, cut, slab)
            return _convolved(padded, w, b, y.local_shape, options)

        return run

    return Choices(_strategies(call, True), localize)


def _unpadded(windows: _Windows, cut: list[int], groups: int) -> list[Any]:
    """Options of the local op, without padding along `cut` dims, as `_padded` does that."""
    padding = [0 if d + _SPATIAL in cut else p for d, p in enumerate(windows.padding)]
    n = len(padding)
    return [windows.stride, padding, windows.dilation, False, [0] * n, groups]


def _padded(
    pulled: torch.Tensor, y: Layout, windows: _Windows, cut: list[int], slab: Layout
) -> torch.Tensor:
    """The pulled rows, with zeros where the windows of this rank's rows extend beyond the edges."""
    assert y.index is not None
    shape = list(pulled.shape)
    where: list[slice] = [slice(None)] * len(shape)
    for dim in cut:
        start, stop = windows.below(dim - _SPATIAL, _own(y, y.index, dim))
        first, last = _own(slab, y.index, dim)
        shape[dim] = stop - start
        where[dim] = slice(first - start, last - start) if last > first else slice(0, 0)
    if shape == list(pulled.shape):
        return pulled
    padded = pulled.new_zeros(shape)
    padded[tuple(where)] = pulled
    return padded


@rule("convolution_backward")
def convolution_backward(call: OpCall) -> Choices:
    """(of y, x, w, bias_sizes, stride, ..., groups, output_mask) -> (of x, of w, of bias)."""

    def localize(call: OpCall, inputs: list[Layout], outputs: list[Layout]) -> Any:
        of_y, x, w = inputs
        mask = list(call.bound["output_mask"])
        cut = _cut_dims(x)
        rest = _options(call, x, 4)

        if not cut:
            return lambda grad, local, weight, *_: _window_gradients(grad, local, weight, rest)
        windows = _Windows(call, w)
        slab = _pulled(x, cut, of_y, windows.inside)
        seen = _pulled(of_y, cut, x, windows.above)
        options = _unpadded(windows, cut, rest[-2])

        def of_input(grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            pulled = move(grad, of_y, seen)
            result = grad.new_zeros(x.local_shape)
            if 0 in pulled.shape or 0 in result.shape:
                return result
            # All input rows that the pulled gradients reach; this rank's are kept.
            shape, take, put = list(result.shape), [slice(None)] * 2, [slice(None)] * 2
            for dim in range(_SPATIAL, len(shape)):
                if dim not in cut:
                    take.append(slice(None))
                    put.append(slice(None))
                    continue
                assert x.index is not None
                rows = _own(seen, x.index, dim)
                start, stop = windows.below(dim - _SPATIAL, rows)
                own = _own(x, x.index, dim)
                first, last = max(start, own[0]), min(stop, own[1])
                shape[dim] = stop - start
                take.append(slice(first - start, max(first, last) - start))
                put.append(slice(first - own[0], max(first, last) - own[0]))
            like = grad.new_empty(shape)
            whole = _window_gradients(pulled, like, weight, [*options, [True, False, False]])[0]
            assert whole is not None
            result[tuple(put)] = whole[tuple(take)]
            return result

        def run(grad: torch.Tensor, local: torch.Tensor, weight: torch.Tensor, *_: Any) -> Any:
            first = of_input(grad, weight) if mask[0] else None
            if not (mask[1] or mask[2]):
                return first, None, None
            padded = move(local, x, slab)
            if grad.numel():
                padded = _padded(padded, of_y, windows, cut, slab)
            only = [False, mask[1], mask[2]]
            return first, *_window_gradients(grad, padded, weight, [*options, only])[1:]

        return run

    return Choices(_strategies(call, False), localize)


# Ops, and how many dims, the last ones, are the image. Autograd passes what was checked before.
_IMAGES = {"col2im": 2} | {
    name.replace("#", str(n)): n
    for dims, names in (
        ((1,), "upsample_linear#d_backward"),
        ((2,), "upsample_bilinear#d_backward upsample_bicubic#d_backward"),
        ((2,), "_upsample_bilinear#d_aa _upsample_bilinear#d_aa_backward"),
        ((2,), "_upsample_bicubic#d_aa _upsample_bicubic#d_aa_backward"),
        ((3,), "upsample_trilinear#d_backward"),
        ((2, 3), "max_pool#d_with_indices_backward fractional_max_pool#d_backward max_unpool#d"),
        ((2, 3), "avg_pool#d_backward adaptive_max_pool#d_backward"),
        ((2, 3), "_adaptive_avg_pool#d _adaptive_avg_pool#d_backward"),
        ((1, 2, 3), "reflection_pad#d_backward replication_pad#d_backward"),
        ((1, 2, 3), "_upsample_nearest_exact#d _upsample_nearest_exact#d_backward"),
        ((1, 2, 3), "upsample_nearest#d_backward"),
    )
    for name in names.split()
    for n in dims
}


@rule(_IMAGES)
def images(call: OpCall) -> Choices:
    """Ops that treat each image by itself."""
    batch = call.inputs[0].ndim - _IMAGES[call.name]
    shards = [p for p in call.placements if is_shard(p) and shard_dim(p) < batch]
    return Choices([call.whole, *map(call.with_all, shards)], _of_images)


@rule("affine_grid_generator affine_grid_generator_backward")
def affine_grid(call: OpCall) -> Choices:
    """(matrices or gradients of grids (N, ...), the size of the images (N, C, ...), ...)."""

    def localize(call: OpCall, inputs: list[Layout], outputs: list[Layout]) -> Any:
        return lambda x, size, *rest: call.op(x, [x.shape[0], *size[1:]], *rest)

    return Choices(call.kept({0: 0}), localize)


@rule("grid_sampler_2d_backward grid_sampler_3d_backward")
def grid_sampler_backward(call: OpCall) -> Choices:
    """(of y (N, C, ...), x (N, C, ...), grid (N, ..., 2 or 3), ...) -> (of x, of the grid)."""
    lines: list[tuple[Placement, Placement, Placement, Placement, Placement]] = [
        (_R, _R, _R, _R, _R),
        (Shard(0), Shard(0), Shard(0), Shard(0), Shard(0)),
        (Shard(1), Shard(1), _R, Shard(1), _SUM),  # each channel gives a term for the grid
        *((Shard(d), _R, Shard(d - 1), _SUM, Shard(d - 1)) for d in range(2, call.inputs[0].ndim)),
        *((p, _R, _R, p, p) for p in call.sums(call.inputs[0])),
    ]
    mask = call.bound["output_mask"]
    strategies = [
        Strategy(line[:3], tuple(p for p, asked in zip(line[3:], mask, strict=True) if asked))
        for line in lines
    ]

    def localize(call: OpCall, inputs: list[Layout], outputs: list[Layout]) -> Any:
        def run(grad: torch.Tensor, x: torch.Tensor, grid: torch.Tensor, *rest: Any) -> Any:
            if grad.numel():
                return call.op(grad, x, grid, *rest)
            pairs = zip((x, grid), mask, strict=True)
            return tuple(torch.zeros_like(t) if asked else None for t, asked in pairs)

        return run

    return Choices(strategies, localize)


def _of_images(call: OpCall, inputs: list[Layout], outputs: list[Layout]) -> Any:
    names = list(call.bound)
    at = names.index("input_size") if "input_size" in names else None
    size, op = outputs[0].local_shape, call.op

    def run(*args: Any, **kwargs: Any) -> Any:
        if 0 in size:  # not every kernel takes an empty batch
            return args[0].new_empty(size)
        own = list(args)
        if at is not None:
            own[at] = list(size)
        return op(*own, **kwargs)

    return run
