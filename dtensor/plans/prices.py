"""What the parts of a training step take on one rank, by rates of the machine or of a chip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch.distributed.device_mesh import DeviceMesh

from weft.collectives import cost, spanning_group
from weft.collectives.prices.hardware import named
from weft.collectives.protocols import COLLECTIVE_OF, Collective, moved_bytes, wire_bytes
from weft.dtensor.plans.chip_prices import ChipPrices
from weft.kernels.engine import engines

FusedOp = Literal["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]


@runtime_checkable
class Prices(Protocol):
    """Times in us, sizes in bytes; (M, K) @ (K, N) is one rank's product.

    Attributes:
        name: of the chip or the machine, for the table.
        overlaps: whether what is moved for parameters (gathers, gradients) runs beside the
            computation, as on a GPU, rather than after it, as by a CPU's cores.
    """

    @property
    def name(self) -> str: ...

    @property
    def overlaps(self) -> bool: ...

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

    def fused_us(
        self, op: FusedOp, M: int, N: int, K: int, dtype: torch.dtype, ranks: int
    ) -> float:
        """A product with its collective, fused or not, whichever is quicker."""


@dataclass(frozen=True)
class MachinePrices:
    """By the rates that engines are chosen by, measured on the machine or typical of it."""

    rates: cost.Machine
    device_type: str

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

    def fused_us(
        self, op: FusedOp, M: int, N: int, K: int, dtype: torch.dtype, ranks: int
    ) -> float:
        matmul = self.matmul_us(M, N, K, dtype)
        moved = wire_bytes(COLLECTIVE_OF[op], moved_bytes(op, M, N, K, dtype.itemsize), ranks)
        return matmul + engines.exposed_us(moved, self.rates, matmul if self.overlaps else 0.0)


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
        if not torch.distributed.is_initialized() or not has_groups(mesh):
            return MachinePrices(cost.typical(mesh.device_type), mesh.device_type)
        device = torch.device(mesh.device_type)
        return MachinePrices(cost.machine(spanning_group(mesh), device), mesh.device_type)
    return ChipPrices(named(hardware))


def has_groups(mesh: DeviceMesh) -> bool:
    """Whether the ranks of a mesh can communicate, rather than stand for ranks elsewhere."""
    return bool(getattr(mesh, "_dim_group_names", ()))
