"""`F.cross_entropy` of a DTensor whose classes are sharded, as `weft.vocab_parallel_cross_entropy`.

    x (N, C) [Shard(1)], target (N,)      each rank sends two numbers for each of its rows

torch's own two steps, log_softmax and nll_loss, exchange more often, write the log-probabilities
and read them again, which takes twice the time: `rules.loss` prices both. They remain for what is
not handled here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Partial, Shard
from torch.nn import functional

from weft import settings
from weft.collectives.ranks.chunks import chunk_sizes
from weft.collectives.ranks.traced import is_traced
from weft.dtensor.dispatch.agreement import all_agree
from weft.dtensor.dispatch.planning import plan_of
from weft.dtensor.dispatch.pricing import tell_choice
from weft.dtensor.fused.linear import placed_for
from weft.dtensor.fused.products import is_dtensor
from weft.dtensor.layout.boxes import contiguous_layout
from weft.dtensor.layout.placements import is_shard
from weft.dtensor.rules.loss import FUSED, IN_STEPS, row_losses_op
from weft.dtensor.rules.nn import LossLayout
from weft.dtensor.tensor import as_global, local_as, local_part, redistributed
from weft.kernels.layers.vocabulary import row_losses


def cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """`F.cross_entropy`, where one mesh dim cuts the classes."""
    others = weight, size_average, reduce
    if not (is_dtensor(input) and is_dtensor(target)) or any(o is not None for o in others):
        return NotImplemented
    x, rows = input._layout, target._layout
    dim = 1 if len(x.shape) > 1 else 0
    one_class_each = rows.shape == (*x.shape[:dim], *x.shape[dim + 1 :])
    if (
        is_traced(target._local_tensor)
        or x.mesh != rows.mesh
        or x.index is None
        or not (one_class_each and rows.dtype == torch.int64 and x.dtype.is_floating_point)
        or reduction not in ("none", "mean", "sum")
        or not 0.0 <= label_smoothing <= 1.0
    ):
        return NotImplemented
    if sum(p == Shard(dim) for p in x.placements) > 1:
        if settings.tracing():
            why = f"{IN_STEPS}: several mesh dims cut the classes"
            settings.record("cross_entropy", "shards", why, f"{x!r}")
        return NotImplemented
    plan = plan_of(row_losses_op, x, rows)
    tell_choice("cross_entropy", plan.considered, plan.way, x, rows)
    if plan.moves is not None and not (plan.way and plan.way.name == IN_STEPS):
        input, target = (
            t if m is None else placed_for("cross_entropy", t, m)
            for t, m in zip((input, target), plan.moves, strict=True)
        )
    if plan.way is None and plan.moves is not None:
        return functional.cross_entropy(
            input, target, None, None, ignore_index, None, reduction, label_smoothing
        )
    if plan.way is None or plan.way.name != FUSED:
        return NotImplemented
    x, rows, cut = input._layout, target._layout, plan.way_dim
    lay = LossLayout(x, rows, dim)
    logits = local_part(redistributed(input, lay.input), lay.input.placements)
    own = local_as(target, lay.target)
    _, _, unknown = lay.weights(own, None, ignore_index, logits.dtype)
    cut_rows = any(map(is_shard, lay.rows))
    if not own.is_cuda:
        known = not bool(unknown)
        lay.check(not (all_agree(known, lay.input, own.device) if cut_rows else known))
    sizes = chunk_sizes(x.shape[dim], x.mesh.size(cut))
    group = x.mesh.get_group(cut)
    losses, counted = row_losses(
        logits.movedim(dim, -1), own, group, ignore_index, label_smoothing, sizes
    )
    autocast = torch.is_autocast_enabled(own.device.type)
    dtype = losses.dtype if autocast else x.dtype
    if reduction == "none":
        return as_global(losses.to(dtype), contiguous_layout(x.mesh, lay.rows, rows.shape, dtype))
    loss, count = losses.sum(), counted.sum()
    if cut_rows:
        terms = tuple(Partial("sum") if is_shard(p) else p for p in lay.rows)
        partial = contiguous_layout(x.mesh, terms, (2,), loss.dtype)
        both = as_global(torch.stack([loss, count.to(loss.dtype)]), partial)
        whole = partial.replicated()
        loss, count = local_part(redistributed(both, whole), whole.placements)
    loss = loss / count if reduction == "mean" else loss
    return as_global(loss.to(dtype), contiguous_layout(x.mesh, lay.rows, (), dtype).replicated())
