"""How cross-entropy of logits and their rows' classes is placed, as one op.

Along one mesh dim, for logits (N, C) and targets (N,):

    rows cut                     each rank has the losses of its own
    classes cut                  vocab_parallel_cross_entropy: two numbers a row travel
                                 log_softmax and nll_loss, as torch takes it apart: three exchanges,
                                 and the log-probabilities are written and read again

The last is how aten's ops run on shards of classes (`rules.nn`); it is left to them.
"""

from __future__ import annotations

import math

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional

from weft.collectives import cost
from weft.dtensor.dispatch.call import Choices, OpCall, Strategy, Way, rule
from weft.dtensor.layout.boxes import Layout
from weft.dtensor.layout.placements import distinct, is_shard, moved, shard_dim
from weft.kernels.engine.engines import collective_us, exposed_us

FUSED, IN_STEPS = "vocab_parallel_cross_entropy", "log_softmax, nll_loss"
_EXCHANGES = 3  # of maxima, of sums, of the logits of targets


def row_losses_op(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """(N, C, ...), (N, ...) -> (N, ...), or (C,), () -> (): cross-entropy of each row."""
    return functional.cross_entropy(logits, target, reduction="none")


@rule("row_losses_op")
def _row_losses_rule(call: OpCall) -> Choices:
    x, target = call.inputs
    classes, replicate = class_dim(x), Replicate()
    rows: list[Placement] = [p for p in target.placements if is_shard(p)]
    for p in filter(is_shard, x.placements):
        if shard_dim(p) != classes:
            rows.append(moved(p, shard_dim(p) - (shard_dim(p) > classes)))
    strategies = [Strategy((replicate, replicate), (replicate,))]
    for p in distinct(rows):
        of_x = moved(p, shard_dim(p) + (shard_dim(p) >= classes))
        strategies.append(Strategy((of_x, p), (p,)))
    cut = Shard(classes), replicate
    strategies.append(Strategy(cut, (replicate,), Way(FUSED, _fused_us)))
    strategies.append(Strategy(cut, (replicate,), Way(IN_STEPS, _in_steps_us)))
    return Choices(strategies)


def class_dim(logits: Layout) -> int:
    """The dim of classes, as torch has it."""
    return 1 if logits.ndim > 1 else 0


def _not_cut(call: OpCall, mesh_dim: int) -> str:
    """Why the classes are not this mesh dim's; empty if they are."""
    x, classes = call.inputs[0], class_dim(call.inputs[0])
    if x.placements[mesh_dim] != Shard(classes):
        return "classes are not cut"
    others = [*x.placements[:mesh_dim], *x.placements[mesh_dim + 1 :]]
    if any(is_shard(p) and shard_dim(p) == classes for p in others):
        return "another mesh dim cuts the classes, too"
    return "the mesh dim has one rank" if x.place.sizes[mesh_dim] == 1 else ""


def _received(call: OpCall, mesh_dim: int, numbers: int) -> float:
    """Bytes of so many numbers for each row of this rank, from all others."""
    x, target = call.inputs
    rows = math.prod(target.shape) / x.parts(but=mesh_dim)
    wide = torch.promote_types(x.dtype, torch.float32).itemsize
    return numbers * wide * rows * (x.place.sizes[mesh_dim] - 1)


def _fused_us(call: OpCall, mesh_dim: int) -> float | str:
    if why := _not_cut(call, mesh_dim):
        return why
    if not call.inputs[0].place.ascends[mesh_dim]:
        return "its ranks are not in the order of their group"
    return exposed_us(_received(call, mesh_dim, 2), cost.typical(call.mesh.device_type))


def _in_steps_us(call: OpCall, mesh_dim: int) -> float | str:
    if why := _not_cut(call, mesh_dim):
        return why
    rates, x = cost.typical(call.mesh.device_type), call.inputs[0]
    again = rates.memory_us(2 * x.global_bytes / x.parts(), syncs=0)
    return _EXCHANGES * collective_us(_received(call, mesh_dim, 1), rates) + again
