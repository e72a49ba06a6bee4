"""Products of DTensors as one op each, and the fused ops among their candidates.

Along one mesh dim, with rows meaning any dim of x but the last:

    x Shard(row), w Shard(columns)   gathers x while multiplying: all_gather_matmul
    any way to a Partial sum         stays pending until it is first read. If it is redistributed
                                     before, its reduction is fused with it: matmul_reduce_scatter,
                                     matmul_all_reduce

Candidates of both kinds stand beside those that move first and multiply then, with a price or with
why they are impossible (`dispatch.pricing`). A gradient is a product too, with the same candidates:
that of x where w is cut by columns is a sum, and pending like any other.
"""

from __future__ import annotations

import math
import string
from functools import partial

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from weft.collectives import cost
from weft.dtensor.dispatch.call import PENDING, Choices, OpCall, Strategy, Way, rule
from weft.dtensor.layout.boxes import Layout
from weft.dtensor.layout.placements import pieces_of
from weft.dtensor.layout.symbolic import present
from weft.dtensor.move.transfers import same_shard, transition_bytes
from weft.dtensor.rules.matmul import (
    contraction,
    grouped_product,
    scaled_grouped_product,
    summand_placement,
)
from weft.kernels.engine.engines import collective_us, exposed_us

GATHER = "all_gather_matmul"
# What a host takes to fetch a group's rows and to send its results, however few these are.
_GROUP_US = 30.0


def linear_product(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """(..., K) @ (N, K).T + (N,): `F.linear` as one op."""
    return torch.nn.functional.linear(x, w, bias)


def linear_input_grad(grad: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """(..., N) @ (N, K): gradient of `linear_product` with respect to x."""
    return grad.matmul(w)


def linear_weight_grad(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """(..., N), (..., K) -> (N, K): gradient of `linear_product` with respect to w."""
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


def stack_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """(*batch, M, K) @ (*batch, K, N): a product for each of a stack of weights."""
    return x.matmul(w)


def grouped_rows_product(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """(R, K), (G, K, N), (G,) -> (R, N): `torch._grouped_mm` of rows, as one op."""
    return torch._grouped_mm(x, w, offs=ends)


@rule("grouped_rows_product")
def _grouped_rule(call: OpCall) -> Choices:
    found, rows = grouped_product(call), Shard(0)
    fused = Strategy((rows, rows, Replicate()), (rows,), Way("dispatch_grouped_matmul", _travel_us))
    return Choices([*found.strategies, fused], found.localize)


def scaled_rows_product(
    x: torch.Tensor,
    w: torch.Tensor,
    of_rows: torch.Tensor,
    of_columns: torch.Tensor,
    ends: torch.Tensor,
) -> torch.Tensor:
    """`grouped_rows_product` of fp8 with scales (R,) and (G, N), in bf16."""
    return torch._scaled_grouped_mm(x, w, of_rows, of_columns, offs=ends, out_dtype=torch.bfloat16)


@rule("scaled_rows_product")
def _scaled_grouped_rule(call: OpCall) -> Choices:
    found, rows = scaled_grouped_product(call), Shard(0)
    way = Way("dispatch, combine", _travel_us)
    fused = Strategy((rows, rows, rows, rows, Replicate()), (rows,), way)
    return Choices([*found.strategies, fused], found.localize)


def _travel_us(call: OpCall, mesh_dim: int) -> float | str:
    """Of rows to the ranks of their weights, of results back, and of where rows go to all ranks."""
    (x, w), W = call.inputs[:2], call.inputs[0].place.sizes[mesh_dim]
    if why := _not_fused(call, mesh_dim):
        return why
    for which, layout in (("first", x), ("second", w)):
        if layout.placements[mesh_dim] != Shard(0):
            return f"dim 0 of the {which} is not cut"
    others = [*w.placements[:mesh_dim], *w.placements[mesh_dim + 1 :]]
    if any(same_shard(p, Shard(0)) for p in others) or any(pieces_of(p) > 1 for p in x.placements):
        return "another mesh dim cuts dim 0 of the second, or the first in strides"
    rates, rows = cost.typical(call.mesh.device_type), present(x.shape[0] / x.parts(0))
    share = rows * (W - 1) / W
    there = exposed_us(share * x.dtype.itemsize * present(x.shape[1]), rates)
    back = exposed_us(share * call.outputs[0].dtype.itemsize * present(w.shape[2]), rates)
    loop = _GROUP_US * present(w.shape[0]) / W if call.mesh.device_type == "cpu" else 0.0
    return there + back + collective_us(4 * present(x.shape[0]), rates) + loop


@rule("linear_product")
def _linear_rule(call: OpCall) -> Choices:
    rows = string.ascii_uppercase[: call.inputs[0].ndim - 1]
    bias = 2 if len(call.inputs) == 3 else None
    return _with_fused(call, rows + "k", "nk", rows + "n", bias)


@rule("linear_input_grad")
def _linear_input_grad_rule(call: OpCall) -> Choices:
    rows = string.ascii_uppercase[: call.inputs[0].ndim - 1]
    return _with_fused(call, rows + "n", "nk", rows + "k")


@rule("linear_weight_grad")
def _linear_weight_grad_rule(call: OpCall) -> Choices:
    # Never pending: x and grad would be kept until the optimizer reads the gradient.
    rows = string.ascii_uppercase[: call.inputs[0].ndim - 1]
    return contraction(call, rows + "n", rows + "k", "nk")


@rule("stack_product")
def _stack_rule(call: OpCall) -> Choices:
    batch = string.ascii_uppercase[: call.inputs[0].ndim - 2]
    return _with_fused(call, batch + "mk", batch + "kn", batch + "mn")


def _with_fused(
    call: OpCall, first: str, second: str, out: str, bias: int | None = None
) -> Choices:
    """The strategies of the contraction (one letter a dim), and the fused ops that it can be."""
    strategies: list[Strategy] = []
    pending = Way(PENDING, _pending_us)
    for strategy in contraction(call, first, second, out, bias=bias).strategies:
        if strategy.outputs == (Partial("sum"),):
            strategies.append(strategy._replace(way=pending))
        strategies.append(strategy)
    (column,) = (letter for letter in out if letter not in first)
    rows = [dim for dim, letter in enumerate(first) if letter in out and letter not in second]
    cut = [dim for dim in rows if Shard(dim) in call.inputs[0].placements]
    w, y = Shard(second.index(column)), Shard(out.index(column))
    for row in cut or rows[:1]:
        inputs: list[Placement] = [Shard(row), w]
        if bias is not None:
            inputs.append(summand_placement(call.inputs[bias], call.outputs[0].shape, y))
        way = Way(GATHER, partial(_gather_us, row=row, column=w.dim))
        strategies.append(Strategy(tuple(inputs), (y,), way))
    return Choices(strategies, stays=1 if len(second) == 2 else None)


def _pending_us(call: OpCall, mesh_dim: int) -> float | str:
    return _not_fused(call, mesh_dim) or 0.0


def _gather_us(call: OpCall, mesh_dim: int, row: int, column: int) -> float | str:
    x, w = call.inputs[:2]
    if why := _not_fused(call, mesh_dim):
        return why
    if x.placements[mesh_dim] != Shard(row):
        return f"dim {row} of the first is not cut"
    if w.placements[mesh_dim] != Shard(column):
        return f"dim {column} of the second is not cut"
    if any(same_shard(p, Shard(row)) for p in x.placements[mesh_dim + 1 :]):
        return f"a later mesh dim cuts dim {row} again"
    rates, hidden = cost.typical(call.mesh.device_type), 0.0
    if call.mesh.device_type != "cpu":  # a CPU's cores also copy
        columns = w.shape[column] // w.parts(column)
        M, N, K = (int(present(n)) for n in (math.prod(x.shape[:-1]), columns, x.shape[-1]))
        hidden = rates.matmul_us(M, N, K, x.dtype)
    us = exposed_us(present(transition_bytes(x, mesh_dim, Replicate())), rates, hidden)
    return us + rates.memory_us(0, 2 * (stacked(w) - 1))


def _not_fused(call: OpCall, mesh_dim: int) -> str:
    """Why no fused op can run this call along a mesh dim; empty if one can."""
    x = call.inputs[0]
    if not x.dtype.is_floating_point:
        return f"no fused op takes {x.dtype}"
    if any(0 in layout.shape for layout in call.inputs):
        return "no fused op takes a tensor without elements"
    if x.place.sizes[mesh_dim] == 1:
        return "the mesh dim has one rank"
    return "" if x.place.ascends[mesh_dim] else "its ranks are not in the order of their group"


def stacked(w: Layout) -> int:
    """How many weights the largest local part of a stack has: as many fused ops run."""
    if w.ndim == 2:
        return 1
    batch = range(w.ndim - 2)
    return max((math.prod(w.shape_at(i)[d] for d in batch) for i in range(len(w.boxes))), default=1)


def reduction_us(
    total: Layout, mesh_dim: int, wanted: Shard | Replicate, count: int
) -> tuple[float, float]:
    """us of reducing a product's sum by `count` fused ops, and by a collective of its own."""
    rates = cost.typical(total.mesh.device_type)
    nbytes = present(transition_bytes(total, mesh_dim, wanted))
    return exposed_us(nbytes, rates) + rates.memory_us(0, 2 * (count - 1)), collective_us(
        nbytes, rates
    )
