"""What the parts of a training step take on one rank, by rates of the machine or of a chip."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.nn import functional

from weft.collectives import all_gather, cost, spanning_group
from weft.collectives.prices.hardware import named
from weft.collectives.protocols import (
    COLLECTIVE_OF,
    Collective,
    group_passes,
    moved_bytes,
    wire_bytes,
)
from weft.collectives.ranks.group import Group, kept_by_group
from weft.dtensor.plans.chip_prices import ChipPrices
from weft.dtensor.tensor import DTensor
from weft.kernels.engine import engines

FusedOp = Literal["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]


@runtime_checkable
class Prices(Protocol):
    """Times in us, sizes in bytes; (M, K) @ (K, N) is one rank's product.

    Attributes:
        name: of the chip or the machine, for the table.
        overlaps: whether what is moved for parameters (gathers, gradients) runs beside the
            computation, as on a GPU, rather than after it, as by a CPU's cores.
        op_us: what an op on DTensors, and its gradient, take longer than on plain tensors.
        meet_us: what ranks that come from computing wait for each other in an op that moves
            something. Both are 0 where the host runs ahead of a device.
    """

    @property
    def name(self) -> str: ...

    @property
    def overlaps(self) -> bool: ...

    @property
    def op_us(self) -> float: ...

    @property
    def meet_us(self) -> float: ...

    def matmul_us(self, M: int, N: int, K: int, dtype: torch.dtype) -> float:
        """A matmul by the library."""

    def attention_us(
        self,
        sizes: tuple[int, int, int, int, int],
        dtype: torch.dtype,
        *,
        causal: bool,
        backward: bool,
    ) -> float:
        """Attention of (batch, heads, queries, keys, width of a head), one pass."""

    def memory_us(self, nbytes: float) -> float:
        """A kernel that does no more than to read and to write so many bytes together."""

    def collective_us(self, op: Collective, nbytes: float, ranks: int, stride: int = 1) -> float:
        """A collective of ranks 0, stride, 2 stride, ..; `nbytes`: its whole array on a rank."""

    def group_us(self, op: Collective, nbytes: float, ranks: int, stride: int = 1) -> float:
        """The same by the process group, as FSDP and replicas call it."""

    def fused_us(
        self, op: FusedOp, M: int, N: int, K: int, dtype: torch.dtype, ranks: int
    ) -> float:
        """A product with its collective, fused or not, whichever is quicker."""


@dataclass(frozen=True)
class MachinePrices:
    """By the rates that engines are chosen by, measured on the machine or typical of it."""

    rates: cost.Machine
    device_type: str
    op_us: float = 0.0
    meet_us: float = 0.0
    sum_rate: float = 0.0  # bytes per us that a rank receives in the group's sums; 0: as in gathers

    @property
    def name(self) -> str:
        return self.device_type

    @property
    def overlaps(self) -> bool:
        return self.device_type != "cpu"

    def matmul_us(self, M: int, N: int, K: int, dtype: torch.dtype) -> float:
        return self.rates.matmul_us(M, N, K, dtype)

    def attention_us(
        self,
        sizes: tuple[int, int, int, int, int],
        dtype: torch.dtype,
        *,
        causal: bool,
        backward: bool,
    ) -> float:
        batch, heads, queries, keys, width = sizes
        flops = 4.0 * batch * heads * queries * keys * width * (0.5 if causal else 1.0)
        # Half of a matmul's rate, as the softmax between the two takes as long again.
        return flops * (2.5 if backward else 1.0) / (0.5 * self.rates.flops_of(dtype))

    def memory_us(self, nbytes: float) -> float:
        return nbytes / (2 * self.rates.copy)  # a copy reads and writes

    def collective_us(self, op: Collective, nbytes: float, ranks: int, stride: int = 1) -> float:
        return engines.collective_us(wire_bytes(op, nbytes, ranks), self.rates)

    def group_us(self, op: Collective, nbytes: float, ranks: int, stride: int = 1) -> float:
        passes = group_passes(op, self.device_type != "cpu")
        received = passes * nbytes * (ranks - 1) / ranks
        if self.sum_rate and op in ("all_reduce", "reduce_scatter"):
            return self.rates.wire_us + received / self.sum_rate
        return self.rates.wire_time_us(received)

    def fused_us(
        self, op: FusedOp, M: int, N: int, K: int, dtype: torch.dtype, ranks: int
    ) -> float:
        matmul = self.matmul_us(M, N, K, dtype)
        moved = wire_bytes(COLLECTIVE_OF[op], moved_bytes(op, M, N, K, dtype.itemsize), ranks)
        return matmul + engines.exposed_us(moved, self.rates, matmul if self.overlaps else 0.0)


# op_us, meet_us and sum_rate of CPU ranks, measured once in a process; of those not there.
_on_cpus: dict[Group, tuple[float, float, float]] = {}
kept_by_group.append(_on_cpus)
_TYPICAL_ON_CPUS = 50.0, 100.0, 0.0


def on_cpus(mesh: DeviceMesh, group: Group) -> tuple[float, float, float]:
    """The three, of CPU ranks as they are now, the same on all. Collective once."""
    if group.virtual is not None:
        return _TYPICAL_ON_CPUS
    if group not in _on_cpus:
        measured = _measured_op_us(mesh), _measured_meet_us(group), _measured_sum_rate(group)
        ops, meets, sums = zip(*group.gather_objects(measured, "what the host takes"), strict=True)
        _on_cpus[group] = min(ops), max(meets), min(sums)
    return _on_cpus[group]


def _measured_meet_us(group: Group) -> float:
    """In the middle, not the least: others' work on the machine is a part of it."""
    a, part = torch.ones(384, 384), torch.ones(16)
    waited = []
    for _ in range(25):
        a @ a
        start = time.perf_counter()
        all_gather(part, group)
        waited.append(time.perf_counter() - start)
    return statistics.median(waited) * 1e6


def _measured_sum_rate(group: Group) -> float:
    """Gloo adds up in pieces while it sends, and is three to five times as quick as it gathers."""
    x = torch.ones(1 << 20)
    us = cost.least_us(lambda: torch.distributed.all_reduce(x, group=group.pg), 3)
    return wire_bytes("all_reduce", x.nbytes, group.world_size) / us


def _measured_op_us(mesh: DeviceMesh) -> float:
    """On this rank, without communication: the least of some rounds of ops as blocks have them."""
    plain = torch.ones(2, 8, 8, requires_grad=True)
    cut = DTensor.from_local(plain, mesh, [Shard(0)] * mesh.ndim, run_check=False)

    def ops(x: Any) -> None:
        y = x
        for _ in range(8):
            heads = y.unflatten(-1, (2, 4)).transpose(1, 2)
            y = functional.silu(heads * heads).transpose(1, 2).flatten(2) + x
        torch.autograd.grad(y, x, x.detach())

    on_cut, on_plain = (cost.least_us(partial(ops, x), 4) for x in (cut, plain))
    return max(on_cut - on_plain, 0.0) / (8 * 7)


def prices_of(hardware: Any, mesh: DeviceMesh) -> Prices:
    """The prices that `hardware` stands for.

    Args:
        hardware: None for the rates of the machine that the mesh is on (measured once, which is
            collective; typical ones of its kind where the mesh has no process groups), a chip's
            name ("h100") or a `weft.sim.Hardware`, or prices.

    Raises:
        ValueError: no such chip.
    """
    if isinstance(hardware, Prices):
        return hardware
    if hardware is None:
        kind, on_cpu = mesh.device_type, mesh.device_type == "cpu"
        if not torch.distributed.is_initialized() or not has_groups(mesh):
            return MachinePrices(cost.typical(kind), kind, *(_TYPICAL_ON_CPUS if on_cpu else ()))
        group = spanning_group(mesh)
        rates = cost.machine(group, torch.device(kind))
        return MachinePrices(rates, kind, *(on_cpus(mesh, group) if on_cpu else ()))
    return ChipPrices(named(hardware))


def has_groups(mesh: DeviceMesh) -> bool:
    """Whether the ranks of a mesh can communicate, rather than stand for ranks elsewhere."""
    return bool(getattr(mesh, "_dim_group_names", ()))
