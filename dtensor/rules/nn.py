"""Rules of layers: softmax, embedding, cross-entropy. Norms are in `norm.py`."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from weft.collectives.ranks.traced import is_traced
from weft.dtensor.dispatch.agreement import all_agree
from weft.dtensor.dispatch.call import Choices, Decomposed, OpCall, Strategy, rule
from weft.dtensor.layout.boxes import Layout, contiguous_layout
from weft.dtensor.layout.placements import (
    Placements,
    distinct,
    from_front,
    is_shard,
    moved,
    shard_dim,
)
from weft.dtensor.move.redistribute import move
from weft.dtensor.rules.reduce import Reduction
from weft.dtensor.tensor import DTensor, local_as, wrap

_MEAN = 1  # aten's numbers for reduction=: none 0, mean 1, sum 2
_NONE = 0


def _replicate_sums(x: Any) -> DTensor:
    """`x` with its Partial mesh dims reduced, and its shards kept."""
    target = x._layout.reduced()
    return x if target == x._layout else wrap(local_as(x, target), target)


@rule("_softmax _log_softmax _safe_softmax")
def softmax(call: OpCall) -> Choices | Decomposed:
    """Over a sharded dim: two small reductions, the result stays sharded."""
    layout = call.inputs[0]
    dim = from_front(call.args[1], layout.ndim)
    # No elements have no maximum, and _safe_softmax gives zeros for rows of -inf. Of integers torch
    # has none, and says so.
    whole_rows = call.name == "_safe_softmax" or 0 in layout.shape
    if whole_rows or dim not in layout.cut_dims or not layout.dtype.is_floating_point:
        return Choices(Reduction((dim,), True).kept_shards(call))
    log = call.name == "_log_softmax"
    dtype = call.outputs[0].dtype

    def run(x: DTensor, *_: Any) -> torch.Tensor:
        if not layout.is_contiguous:  # the result is
            x = cast(DTensor, x.contiguous())
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        shifted = wide - _replicate_sums(wide.amax(dim, True))
        exponentials = shifted.exp()
        total = _replicate_sums(exponentials.sum(dim, True))
        return (shifted - total.log() if log else exponentials / total).to(dtype)

    return Decomposed(run)


@rule("_softmax_backward_data _log_softmax_backward_data")
def softmax_backward(call: OpCall) -> Choices | Decomposed:
    """(grad, output, dim, dtype)."""
    dim = from_front(call.args[2], call.inputs[0].ndim)
    if not any(dim in layout.cut_dims for layout in call.inputs):
        return Choices([call.whole, *map(call.with_all, filter(is_shard, call.placements))])
    log = call.name.startswith("_log")
    dtype = call.outputs[0].dtype

    def run(grad: DTensor, output: DTensor, *_: Any) -> torch.Tensor:
        g, y = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (grad, output))
        terms, scale = (g, y.exp()) if log else (g * y, y)
        return (terms - scale * _replicate_sums(terms.sum(dim, True))).to(dtype)

    return Decomposed(run)


def own_run(layout: Layout, dim: int) -> tuple[int, int]:
    """(start, length) of this rank's indices along `dim`, which is cut by plain shards."""
    assert layout.index is not None
    runs = layout.box_at(layout.index)[dim]
    return runs[0] if runs else (0, 0)


def _checked_later(x: torch.Tensor) -> bool:
    """Whether the host cannot read the values of x: on a GPU, and in a traced graph."""
    return x.is_cuda or is_traced(x)


def _out_of_range(what: str, size: int) -> str:
    return f"{what} out of range: must be in [0, {size})"


def check_range(
    indices: torch.Tensor, size: int, what: str, kind: type[Exception] = IndexError
) -> None:
    """Raise if an index is out of range: no rank holds its row, so it would read as zero."""
    if not indices.numel():
        return
    inside = (indices >= 0) & (indices < size)
    if _checked_later(indices):
        # With a message, as a graph drops the overload without one.
        torch._assert_async(inside.all(), _out_of_range(what, size))
    elif not bool(inside.all()):
        raise kind(_out_of_range(what, size))


def rows_in(indices: torch.Tensor, run: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(which indices fall into the run, indices counted from its start, 0 where outside)."""
    start, length = run
    inside = (indices >= start) & (indices < start + length)
    return inside, torch.where(inside, indices - start, 0)


@rule("embedding")
def embedding_rule(call: OpCall) -> Choices:
    """(weight, indices): rows of a weight that is sharded by rows are a Partial sum."""
    indices = call.inputs[1]
    last = len(indices.shape)
    replicate = Replicate()
    strategies = [
        Strategy((replicate, replicate), (replicate,)),
        *(Strategy((replicate, p), (p,)) for p in indices.placements if is_shard(p)),
        Strategy((Shard(1), replicate), (Shard(last),)),
        Strategy((Shard(0), replicate), (Partial("sum"),)),
    ]

    def localize(call: OpCall, inputs: list[Layout], outputs: list[Layout]) -> Any:
        if 0 not in inputs[0].cut_dims:
            return call.op
        run, size = own_run(inputs[0], 0), inputs[0].shape[0]

        def lookup(weight: torch.Tensor, indices: torch.Tensor, *_: Any) -> torch.Tensor:
            check_range(indices, size, "embedding index")
            inside, rows = rows_in(indices, run)
            if not run[1]:
                return weight.new_zeros(*indices.shape, weight.shape[1])
            found = torch.nn.functional.embedding(rows, weight)
            return found.masked_fill_(~inside.unsqueeze(-1), 0)

        return lookup

    return Choices(strategies, localize)


@rule("embedding_dense_backward")
def embedding_backward(call: OpCall) -> Choices:
    """(grad, indices, ...) -> gradient of the weight."""
    grad, indices = call.inputs
    replicate = Replicate()
    strategies = [
        Strategy((replicate, replicate), (replicate,)),
        Strategy((Shard(len(grad.shape) - 1), replicate), (Shard(1),)),
    ]
    if not call.bound["scale_grad_by_freq"]:
        shards = distinct(filter(is_shard, (*grad.placements, *indices.placements)))
        strategies += [
            Strategy((p, p), (Partial("sum"),)) for p in shards if shard_dim(p) < len(indices.shape)
        ]
        strategies += map(call.with_first, call.sums(grad))
    return Choices(strategies)


def embedding_weight_grad(
    grad: torch.Tensor, indices: torch.Tensor, weight: torch.Tensor, padding_idx: int
) -> torch.Tensor:
    """(..., D), (...) -> (V, D): gradient of the embedding, as large as this part of `weight`."""
    backward = torch.ops.aten.embedding_dense_backward
    result: torch.Tensor = backward(grad, indices, weight.shape[0], padding_idx, False)
    return result


@rule("embedding_weight_grad")
def _embedding_weight_grad(call: OpCall) -> Choices:
    """Placed as the weight is, if that costs nothing."""
    grad, indices, weight = call.inputs
    replicate = Replicate()
    shards = distinct(filter(is_shard, (*grad.placements, *indices.placements)))
    last = Shard(len(grad.shape) - 1)
    strategies = [
        Strategy((last, replicate, Shard(1)), (Shard(1),)),
        Strategy((replicate, replicate, Shard(0)), (Shard(0),)),
    ]
    for w in distinct(weight.placements):
        strategies.append(Strategy((replicate, replicate, w), (replicate,)))
        strategies += [
            Strategy((p, p, w), (Partial("sum"),))
            for p in shards
            if shard_dim(p) < len(indices.shape)
        ]

    def localize(call: OpCall, inputs: list[Layout], outputs: list[Layout]) -> Any:
        padding_idx = call.args[3]
        if 0 not in outputs[0].cut_dims:
            size = outputs[0].shape[0]
            op = torch.ops.aten.embedding_dense_backward
            return lambda grad, indices, *_: op(grad, indices, size, padding_idx, False)
        run, width = own_run(outputs[0], 0), outputs[0].local_shape[1]

        def scatter(grad: torch.Tensor, indices: torch.Tensor, *_: Any) -> torch.Tensor:
            inside, rows = rows_in(indices, run)
            # Rows of other ranks, and of the padding, go to one more row, which is cut off.
            inside &= indices != padding_idx
            rows = torch.where(inside, rows, run[1])
            flat = grad.reshape(-1, width)
            wide = torch.promote_types(grad.dtype, torch.float32)
            total = flat.new_zeros(run[1] + 1, width, dtype=wide)
            total.index_add_(0, rows.reshape(-1), flat.to(wide))
            return total[: run[1]].to(grad.dtype)

        return scatter

    return Choices(strategies, localize)


class LossLayout:
    """How one nll loss is laid out: its input by rows or classes, its target by rows."""

    def __init__(self, x: Layout, target: Layout, class_dim: int) -> None:
        # Shards of the input stay, but a strided shard of the classes is gathered.
        kept = tuple(
            p if is_shard(p) and (shard_dim(p) != class_dim or isinstance(p, Shard)) else None
            for p in x.placements
        )
        rows: list[Placement] = []
        inputs: list[Placement] = []
        self.over_classes: list[bool] = []
        for placement, of_target in zip(kept, target.placements, strict=True):
            chosen = placement
            if chosen is None and is_shard(of_target):
                # Rows of the target are sharded, the input is not: cutting it costs nothing.
                d = shard_dim(of_target)
                chosen = moved(of_target, d + (d >= class_dim))
            over_classes = chosen is not None and shard_dim(chosen) == class_dim
            self.over_classes.append(over_classes)
            inputs.append(chosen or Replicate())
            if chosen is None or over_classes:
                rows.append(Replicate())
            else:
                d = shard_dim(chosen)
                rows.append(moved(chosen, d - (d > class_dim)))
        self.input = x.with_placements(tuple(inputs))
        self.rows: Placements = tuple(rows)
        self.target = target.with_placements(self.rows)
        self.class_dim = class_dim
        self.run = own_run(self.input, class_dim)

    @property
    def counts_rows(self) -> bool:
        """Whether this rank counts its rows: one rank along the mesh dims that cut the classes."""
        pairs = zip(self.over_classes, self.input.coordinate, strict=True)
        return all(i == 0 for over, i in pairs if over)

    def weights(
        self,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        ignore_index: int,
        like: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(class of each row or 0, its weight or 0, how many classes do not exist)."""
        valid = target != ignore_index
        known = (target >= 0) & (target < self.input.shape[self.class_dim])
        if _checked_later(target):
            torch._assert_async((known | ~valid).all(), self._unknown)
        classes = torch.where(valid & known, target, 0)
        bad = (valid & ~known).sum()
        return classes, valid.to(like) if weight is None else weight[classes] * valid, bad

    def check(self, bad: Any) -> None:
        """Raise if a class does not exist: on all ranks, as `bad` is summed over them."""
        if bad:
            raise IndexError(self._unknown)

    @property
    def _unknown(self) -> str:
        return _out_of_range("target class", self.input.shape[self.class_dim])


def _whole(tensor: DTensor) -> torch.Tensor:
    return local_as(tensor, tensor._layout.replicated())


@rule("nll_loss_forward nll_loss2d_forward")
def nll_loss(call: OpCall) -> Choices | Decomposed:
    """(input, target, weight, reduction, ignore_index) -> (loss, sum of weights)."""
    if not call.inputs[0].dtype.is_floating_point:  # torch has none, and says so
        return Choices([call.whole])

    def run(
        x: DTensor, target: DTensor, weight: DTensor | None, reduction: int, ignore_index: int
    ) -> tuple[DTensor, DTensor]:
        lay = LossLayout(x._layout, target._layout, 1 if x.dim() > 1 else 0)
        local, rows = local_as(x, lay.input), local_as(target, lay.target)
        wide = torch.promote_types(x.dtype, torch.float32)
        given = None if weight is None else _whole(weight)
        classes, weights, bad = lay.weights(rows, given, ignore_index, wide)
        inside, own = rows_in(classes, lay.run)
        if lay.run[1]:
            dim = lay.class_dim
            picked = local.gather(dim, own.unsqueeze(dim)).squeeze(dim).to(wide)
            losses = torch.where(inside & (weights != 0), -picked * weights, 0)
        else:
            losses = torch.zeros(classes.shape, dtype=wide, device=local.device)
        mesh = x._layout.mesh
        scalar = contiguous_layout(mesh, [Replicate()] * mesh.ndim, (), x.dtype)
        if reduction == _NONE:
            if not _checked_later(local):
                lay.check(0.0 if all_agree(not bool(bad), lay.input, local.device) else 1.0)
            shape = target._layout.shape
            pairs = zip(lay.over_classes, lay.rows, strict=True)
            placements = [Partial("sum") if over else p for over, p in pairs]
            partial = contiguous_layout(mesh, placements, shape, wide)
            loss = _replicate_sums(wrap(losses, partial))
            zero = wrap(torch.zeros((), dtype=x.dtype, device=local.device), scalar)
            return wrap(loss._local_tensor.to(x.dtype), loss._layout.with_dtype(x.dtype)), zero
        counted = weights.sum() if lay.counts_rows else weights.new_zeros(())
        sums = torch.stack([losses.sum(), counted, bad.to(wide)])
        terms = [Partial("sum") if is_shard(p) else Replicate() for p in lay.input.placements]
        partial = contiguous_layout(mesh, terms, (3,), wide)
        total, count, bad = move(sums, partial, partial.replicated()).unbind()
        if not _checked_later(local):
            lay.check(bad)
        loss_value = total / count if reduction == _MEAN else total
        return wrap(loss_value.to(x.dtype), scalar), wrap(count.to(x.dtype), scalar)

    return Decomposed(run)


@rule("nll_loss_backward nll_loss2d_backward")
def nll_loss_backward(call: OpCall) -> Decomposed:
    """(grad, input, target, weight, reduction, ignore_index, sum of weights) -> of the input."""

    def run(
        grad: DTensor,
        x: DTensor,
        target: DTensor,
        weight: DTensor | None,
        reduction: int,
        ignore_index: int,
        total_weight: DTensor,
    ) -> DTensor:
        lay = LossLayout(x._layout, target._layout, 1 if x.dim() > 1 else 0)
        rows, given = local_as(target, lay.target), None if weight is None else _whole(weight)
        classes, weights, _ = lay.weights(rows, given, ignore_index, x.dtype)
        if reduction == _NONE:
            scale = local_as(grad, grad._layout.with_placements(lay.rows))
        else:
            scale = _whole(grad)
        if reduction == _MEAN:
            scale = scale / _whole(total_weight)
        inside, own = rows_in(classes, lay.run)
        values = torch.where(inside & (weights != 0), -weights * scale, 0).to(x.dtype)
        out = values.new_zeros(lay.input.local_shape)
        if lay.run[1]:
            dim = lay.class_dim
            out.scatter_(dim, own.unsqueeze(dim), values.unsqueeze(dim))
        return wrap(out, lay.input)

    return Decomposed(run)
