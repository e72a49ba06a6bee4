"""Rules of norms: of rows, of groups of channels, of batches.

layer_norm    each rank norms its own rows, which are whole
group_norm    each rank norms its own samples, which are whole
batch_norm    in training, the ranks that share a channel compute its statistics together, by one
              exchange of three numbers per channel; given statistics, each rank norms its part
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from weft.dtensor.dispatch.call import (
    Choices,
    Decomposed,
    Meta,
    Op,
    OpCall,
    Strategy,
    map_tree,
    rule,
)
from weft.dtensor.layout.boxes import Layout, layout_of
from weft.dtensor.layout.placements import distinct, is_shard, moved, shard_dim
from weft.dtensor.move.redistribute import move
from weft.dtensor.rules.reduce import Reduction, moments
from weft.dtensor.tensor import DTensor, local_as, wrap


def _by_samples(call: OpCall, n_samples: int, summed: int, n_batch: int = 1) -> list[Strategy]:
    """Samples are independent, gradients of weights sum over them.

    Args:
        n_samples: how many of the first tensor arguments hold samples (the others are weights).
        summed: how many of the last results are sums over samples.
        n_batch: how many of the first dims number the samples.
    """
    n_weights, n_out = len(call.inputs) - n_samples, len(call.outputs)
    strategies = [call.whole]
    for p in distinct(p for layout in call.inputs[:n_samples] for p in layout.placements):
        if is_shard(p) and shard_dim(p) < n_batch:
            inputs = (p,) * n_samples + (Replicate(),) * n_weights
            outputs = (p,) * (n_out - summed) + (Partial("sum"),) * summed
            strategies.append(Strategy(inputs, outputs))
    return strategies


@rule("native_layer_norm _fused_rms_norm")
def layer_norm_rule(call: OpCall) -> Choices:
    """(input, normalized_shape, weight, ...) -> (out, statistics of the rows)."""
    if call.name == "native_layer_norm":
        _narrow(call)
    return Choices(_by_samples(call, 1, 0, call.inputs[0].ndim - len(call.args[1])))


def row_norm_op(x: torch.Tensor, dims: int, *weights: torch.Tensor) -> torch.Tensor:
    """A norm of the rows that the last `dims` dims make up."""
    return torch.nn.functional.layer_norm(x, x.shape[x.ndim - dims :])


@rule("row_norm_op")
def _row_norm_rule(call: OpCall) -> Choices:
    """(x, dims, weights ...) -> (out): as of aten's op."""
    return Choices(_by_samples(call, 1, 0, call.inputs[0].ndim - call.args[1]), told=True)


def _narrow(call: OpCall) -> None:
    """On a CPU, statistics are no wider than all the rest, though those of meta kernels are."""
    if call.mesh.device_type == "cpu" and len(dtypes := {t.dtype for t in call.inputs}) == 1:
        call.outputs[1:3] = [Meta(m.shape, m.stride, *dtypes) for m in call.outputs[1:3]]


@rule("native_layer_norm_backward _fused_rms_norm_backward")
def layer_norm_backward(call: OpCall) -> Choices:
    """(grad, input, normalized_shape, statistics, weight, ...) -> (of input, of weight, ...)."""
    n_statistics = 2 if call.name == "native_layer_norm_backward" else 1
    mask = call.bound["output_mask"]
    summed = sum(bool(wanted) for wanted in mask[1:])
    n_batch = call.inputs[0].ndim - len(call.args[2])
    strategies = _by_samples(call, 2 + n_statistics, summed, n_batch)
    sums = call.sums(call.inputs[0])
    return Choices([*strategies, *map(call.with_first, sums)])


def _group_norm(call: OpCall, n_samples: int, summed: int) -> Choices:
    """Strategies by samples, with the number of local samples in the call; see `_by_samples`."""

    def localize(call: OpCall, inputs: list[Layout], outputs: list[Layout]) -> Any:
        at, op = list(call.bound).index("N"), call.op

        def run(*args: Any) -> Any:
            return op(*args[:at], args[0].shape[0], *args[at + 1 :])

        return _unless_empty(call, outputs, run)

    return Choices(_by_samples(call, n_samples, summed), localize)


def _unless_empty(call: OpCall, outputs: list[Layout], op: Op) -> Op:
    """`op`, or zeros if this rank has no samples: torch would divide by their number."""

    def run(*args: Any) -> Any:
        if args[0].numel():
            return op(*args)
        zeros = partial(torch.zeros, device=args[0].device)
        each = iter([zeros(o.local_shape, dtype=o.dtype) for o in outputs])
        return map_tree(call.output_tree, lambda a: None if a is None else next(each))

    return run


@rule("native_group_norm")
def group_norm(call: OpCall) -> Choices:
    """(input (N, C, ...), weight, bias, N, ...) -> (out, statistics of each sample's groups)."""
    return _group_norm(call, 1, 0)


@rule("native_group_norm_backward")
def group_norm_backward(call: OpCall) -> Choices:
    """(grad, input, statistics, weight, N, ...) -> (of input, of weight, of bias)."""
    return _group_norm(call, 4, sum(map(bool, call.bound["output_mask"][1:])))


def _fixed_norm(call: OpCall, of_samples: Placement) -> Choices:
    """Batch norm with given statistics: by samples or by channels.

    Args:
        of_samples: the placement of results with one number per channel, if samples are sharded.
    """
    channels = call.inputs[0].shape[1:2]

    def strategy(cut: Placement) -> Strategy:
        by_channel = shard_dim(cut) == 1

        def placed(t: Layout | Meta, else_: Placement) -> Placement:
            if len(t.shape) > 1:
                return cut
            if t.shape != channels:  # the saved statistics, which are empty here
                return Replicate()
            return moved(cut, 0) if by_channel else else_

        inputs = tuple(placed(t, Replicate()) for t in call.inputs)
        return Strategy(inputs, tuple(placed(t, of_samples) for t in call.outputs))

    shards = distinct(p for t in call.inputs if len(t.shape) > 1 for p in t.placements)
    return Choices([call.whole, *map(strategy, filter(is_shard, shards))], _localize_fixed)


def _localize_fixed(call: OpCall, inputs: list[Layout], outputs: list[Layout]) -> Op:
    op = _unless_empty(call, outputs, call.op)

    def run(first: torch.Tensor, *args: Any) -> Any:
        of_input, *others = op(first, *args)
        if call.name.endswith("_functional"):  # the running statistics, also where there is nothing
            others[2:] = [stat.clone() for stat in args[2:4]]
        # Its meta kernel returns a gradient of the input even if none was asked for.
        return first if of_input is None else of_input, *others

    return run


@rule(
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional "
    "_native_batch_norm_legit_no_training _batch_norm_with_update "
    "_batch_norm_with_update_functional _batch_norm_no_update cudnn_batch_norm miopen_batch_norm"
)
def batch_norm(call: OpCall) -> Choices | Decomposed:
    """(input (N, C, ...), weight, bias, running statistics, ..., momentum, eps) -> (out, saved).

    In training the statistics are those of all samples, and the running ones are written.
    """
    _narrow(call)
    if call.bound.get("training", "with_update" in call.name):
        if 0 in call.inputs[0].shape:
            raise ValueError(f"{call}: batch norm in training needs at least one sample")
        return Decomposed(partial(_train, call))
    if call.mesh.device_type == "cpu":  # there it saves no statistics, though its meta kernel does
        call.outputs[1:3] = [Meta((0,), (1,), saved.dtype) for saved in call.outputs[1:3]]
    return _fixed_norm(call, Replicate())


def _train(call: OpCall, x: DTensor, weight: Any, bias: Any, *others: Any) -> tuple[Any, ...]:
    # The running statistics are two, or none where an overload has none.
    *running, momentum, eps = (a for a in others if not isinstance(a, bool))
    if call.name.endswith("_functional"):
        running = [stat.clone() for stat in running]
    source, over = x._layout.reduced(), _not_channels(x._layout)
    local = local_as(x, source)
    mean, var = moments(local, source, over)
    each = over.layout_of(source, mean.dtype)
    count = over.count_of(source.shape)
    for stat, new in zip(running, (mean, var * count / (count - 1)), strict=False):
        if stat is not None:
            now = wrap(new, each) if isinstance(stat, DTensor) else new
            stat.mul_(1 - momentum).add_(now, alpha=momentum)
    w, b = (t if t is None else _of_channels(t, each) for t in (weight, bias))
    out = torch.empty_like(local)
    if local.numel():
        out = torch.native_batch_norm(local, w, b, mean, var, False, 0.0, eps)[0]
    saved = call.outputs[1]
    kept = [t.to(saved.dtype) for t in (mean, (var + eps).rsqrt())]
    results: list[Any] = [_wrapped_like(out, source, call.outputs[0])]
    results += [wrap(t, each.with_dtype(saved.dtype)) for t in kept]
    # Those of cuDNN and MIOpen return a reserve next, functional ones the running statistics.
    for meta in call.outputs[3:]:
        reserve = meta.dtype == torch.uint8
        results.append(x.new_empty((0,), dtype=torch.uint8) if reserve else running.pop(0))
    return tuple(results)


def _not_channels(x: Layout) -> Reduction:
    return Reduction(tuple(d for d in range(x.ndim) if d != 1))


def _of_channels(tensor: torch.Tensor, each: Layout) -> torch.Tensor:
    """This rank's part of a weight or statistic, cut and converted as `each` says."""
    return local_as(tensor, each.with_dtype(tensor.dtype)).to(each.dtype)


def _wrapped_like(local: torch.Tensor, like: Layout, meta: Layout | Meta) -> DTensor:
    lies = like.mesh, like.placements
    return wrap(local, layout_of(*lies, meta.shape, meta.stride, meta.dtype))


@rule("native_batch_norm_backward batch_norm_backward")
def batch_norm_backward(call: OpCall) -> Choices | Decomposed:
    """(grad, input, weight, running, saved statistics, ...) -> (of input, of weight, of bias)."""
    if not call.args[7]:
        return _fixed_norm(call, Partial("sum"))

    def run(grad: DTensor, x: DTensor, weight: Any, *others: Any) -> tuple[Any, ...]:
        return _train_backward(grad, x, weight, others[2], others[3], others[6])

    return Decomposed(run)


@rule("cudnn_batch_norm_backward miopen_batch_norm_backward")
def batch_norm_backward_elsewhere(call: OpCall) -> Decomposed:
    """(input, grad, weight, running, saved statistics, ...); only called after training."""

    def run(x: DTensor, grad: DTensor, weight: Any, *others: Any) -> tuple[Any, ...]:
        return _train_backward(grad, x, weight, others[2], others[3], (True, True, True))

    return Decomposed(run)


def _train_backward(
    grad: DTensor,
    x: DTensor,
    weight: torch.Tensor | None,
    mean: DTensor,
    invstd: DTensor,
    mask: tuple[bool, ...],
) -> tuple[Any, ...]:
    source, over = x._layout.reduced(), _not_channels(x._layout)
    dims = over.dims
    wide = torch.promote_types(x.dtype, torch.float32)
    each = over.layout_of(source, wide)
    scale, shift = _of_channels(invstd, each), _of_channels(mean, each)
    local, g = local_as(x, source), local_as(grad, source.with_dtype(grad.dtype)).to(wide)

    def broadcast(t: torch.Tensor) -> torch.Tensor:
        return t.view(-1, *[1] * (x.ndim - 2))

    centred = local.to(wide) - broadcast(shift)
    sums = torch.stack([g.sum(dims), (g * centred).sum(dims)], 1)
    crossed = tuple(
        Partial("sum") if shard_dim(p) in dims else q
        for p, q in zip(source.placements, each.placements, strict=True)
    )
    partial_sums = layout_of(source.mesh, crossed, (*each.shape, 2), (2, 1), wide)
    total, weighed = move(sums, partial_sums, partial_sums.reduced()).unbind(1)
    results: list[Any] = [None, None, None]
    if mask[0]:
        count = over.count_of(source.shape)
        slope = scale if weight is None else scale * _of_channels(weight, each)
        back = centred.mul_(broadcast(weighed * scale * scale / -count)).add_(g)
        back.sub_(broadcast(total / count)).mul_(broadcast(slope))
        results[0] = _wrapped_like(back.to(x.dtype), source, x._layout)
    of_weights = x.dtype if weight is None else weight.dtype
    for i, found in ((1, weighed * scale), (2, total)):
        if mask[i]:
            results[i] = wrap(found.to(of_weights), each.with_dtype(of_weights))
    return tuple(results)
