"""`prices` of a chip that is not at hand: closed forms of libraries and of weft's fused matmuls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from weft.collectives import protocols
from weft.collectives.prices import library
from weft.collectives.prices.hardware import Hardware
from weft.collectives.protocols import Collective
from weft.kernels.engine import fused_times

if TYPE_CHECKING:
    from weft.dtensor.plans.prices import FusedOp

# The attention kernel that users have on each chip.
_ATTENTION: dict[str, library.Attention] = {"sm_90": "FA3", "sm_100": "FA4"}


@dataclass(frozen=True)
class ChipPrices:
    """`weft.dtensor.plans.prices.Prices` of a chip, by libraries and by weft's fused matmuls."""

    hardware: Hardware

    @property
    def name(self) -> str:
        return self.hardware.name

    @property
    def overlaps(self) -> bool:
        return True

    @property
    def op_us(self) -> float:
        return 0.0

    @property
    def meet_us(self) -> float:
        return 0.0

    def matmul_us(self, M: int, N: int, K: int, dtype: torch.dtype) -> float:
        return library.matmul_us(self.hardware, M, N, K, fused_times.dtype_name(dtype))

    def attention_us(
        self,
        sizes: tuple[int, int, int, int, int],
        dtype: torch.dtype,
        *,
        causal: bool,
        backward: bool,
    ) -> float:
        batch, heads, queries, keys, width = sizes
        us = library.attention_us(
            self.hardware,
            _ATTENTION.get(self.hardware.chip, "FA2"),
            batch=batch,
            queries=queries,
            keys=keys,
            heads=heads,
            head_dim=width,
            causal=causal,
            backward=backward,
        )
        rates = self.hardware.flops
        return us * max(1.0, rates["bfloat16"] / rates[fused_times.dtype_name(dtype)])

    def memory_us(self, nbytes: float) -> float:
        return library.moved_us(self.hardware, nbytes)

    def collective_us(self, op: Collective, nbytes: float, ranks: int, stride: int = 1) -> float:
        on_a_host = max(self.hardware.ranks // stride, 1)
        fabric = self.hardware.fabric(ranks, max(ranks // on_a_host, 1))
        return protocols.nccl_us(op, nbytes, fabric)

    def group_us(self, op: Collective, nbytes: float, ranks: int, stride: int = 1) -> float:
        return self.collective_us(op, nbytes, ranks, stride)

    def fused_us(
        self, op: FusedOp, M: int, N: int, K: int, dtype: torch.dtype, ranks: int
    ) -> float:
        moved = protocols.moved_bytes(op, M, N, K, dtype.itemsize)
        unfused = self.matmul_us(M, N, K, dtype)
        unfused += self.collective_us(protocols.COLLECTIVE_OF[op], moved, ranks)
        if ranks > self.hardware.ranks:
            return unfused
        own = fused_times.fused_us(op, M, N, K, fused_times.dtype_name(dtype), self.hardware, ranks)
        return min(own, unfused)
