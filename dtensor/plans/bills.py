"""An option of a node, and the bill of what it takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from weft.collectives.protocols import Collective
from weft.dtensor.layout.placements import is_shard
from weft.dtensor.plans.prices import FusedOp

if TYPE_CHECKING:
    from weft.dtensor.plans.options import NodeOptions

# Two moments of fp32; a step reads and writes them, and the parameter, and reads the gradient.
_MOMENTS = 8
# Where no kernel does all of that, as on CPUs, torch calls an op for each part of the formula.
_LOOPED = 3


class Value(NamedTuple):
    """How a tensor is placed along the mesh dim.

    `grad`, of a replicated one: "gathered" if a hook made it of shards, so that the sum of its
    gradient is scattered; "summed" once that sum is paid for.
    """

    placement: Placement
    grad: Literal["", "gathered", "summed"] = ""


class Option(NamedTuple):
    """One way to run a node.

    Attributes:
        values: its results.
        us: computation, and communication that it waits for.
        data_us: gathers and gradients of its parameters along the data-parallel dims.
        nbytes: of parameters, gradients, moments and of what is kept for backward.
        way: of a weight: "colwise", "rowwise", "replicated"; of attention the fused op.
        ops: the fused ops and collectives of forward, then "|", then those of backward.
        paid: inputs whose value is another from here on.
        placed: the placements of the node's weights.
        found: the placement of the result before a hook changes it.
        keep_gathered: as of `ColwiseParallel`.
    """

    values: tuple[Value, ...]
    us: float
    data_us: float
    nbytes: float
    way: str = ""
    ops: tuple[str, ...] = ()
    paid: tuple[tuple[int, Value], ...] = ()
    placed: tuple[Placement, ...] = ()
    found: Placement = Replicate()
    keep_gathered: bool = True


@dataclass(frozen=True)
class DataParallel:
    """The mesh dims that the batch is cut along: how many ranks, and how far apart they are."""

    ranks: int = 1
    stride: int = 1
    sharded: bool = False  # FSDP, not replicas


@dataclass
class Bill:
    """What an option takes, added up."""

    of: NodeOptions
    us: float = 0.0
    data_us: float = 0.0
    nbytes: float = 0.0
    forward: list[str] = field(default_factory=list)
    backward: list[str] = field(default_factory=list)

    def matmul(self, M: float, N: float, K: float, dtype: torch.dtype) -> None:
        self.us += self.of.prices.matmul_us(math.ceil(M), math.ceil(N), math.ceil(K), dtype)

    def fused(
        self, op: FusedOp, M: float, N: float, K: float, dtype: torch.dtype, *, backward: bool
    ) -> None:
        sizes = math.ceil(M), math.ceil(N), math.ceil(K)
        self.us += self.of.prices.fused_us(op, *sizes, dtype, self.of.ranks)
        (self.backward if backward else self.forward).append(op)

    def collective(self, op: Collective, nbytes: float, *, backward: bool) -> None:
        self.us += self.of.prices.collective_us(op, nbytes, self.of.ranks)
        (self.backward if backward else self.forward).append(op)

    def memory(self, moved: float) -> None:
        self.us += self.of.prices.memory_us(moved)

    def weight(self, weight: torch.Tensor, placement: Placement, *, summed: bool) -> None:
        """A parameter; `summed`: its gradient is a sum over the ranks of this mesh dim."""
        data, size = self.of.data, weight.dtype.itemsize
        count = weight.numel() / (self.of.ranks if is_shard(placement) else 1)
        held = count / (data.ranks if data.sharded else 1)
        if not weight.requires_grad:
            self.nbytes += held * size
            if data.sharded:
                self.data_us += 2 * count * size * self.of.rate("all_gather", data)
            return
        self.nbytes += held * (2 * size + _MOMENTS)
        passes = 1 if self.of.prices.overlaps else _LOOPED
        self.memory(held * (3 * size + 2 * _MOMENTS) * passes)
        if summed:
            here = DataParallel(self.of.ranks)
            self.us += count * size * self.of.rate("all_reduce", here)
            self.backward.append("all_reduce")
        if data.ranks == 1:
            return
        gradient: Collective = "reduce_scatter" if data.sharded else "all_reduce"
        self.data_us += count * size * self.of.rate(gradient, data)
        if data.sharded:
            self.data_us += 2 * count * size * self.of.rate("all_gather", data)

    def option(self, *values: Value, **rest: Any) -> Option:
        ops = (*self.forward, "|", *self.backward) if self.forward or self.backward else ()
        return Option(values, self.us, self.data_us, self.nbytes, ops=ops, **rest)

    def copy(self) -> Bill:
        lists = [*self.forward], [*self.backward]
        return Bill(self.of, self.us, self.data_us, self.nbytes, *lists)
