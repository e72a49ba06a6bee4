"""A predicted time, and the words that tell libraries from other kernels."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from weft.bench.published.rows import Row
from weft.collectives.prices.hardware import Hardware
from weft.collectives.protocols import Fabric

Kind = Literal["library", "fused"]


@dataclass(frozen=True)
class Time:
    """us, what it is of, and the work that rates are counted by."""

    kind: Kind
    us: float
    how: str
    flops: float = 0.0
    bus_bytes: float = 0.0
    library_us: float = 0.0  # of the same problem, for ratios


def row_fabric(row: Row, hardware: Hardware) -> Fabric:
    """The links of a row's ranks, on as few hosts as they fit on."""
    hosts = -(-row.ranks // hardware.ranks)
    return hardware.fabric(row.ranks, hosts)


def has(row: Row, pattern: str) -> bool:
    """Whether `what` has it, in lower case."""
    return re.search(pattern, row.what.lower()) is not None


_LIBRARY = (
    r"nccl|rccl|cublas|hipblas|unfused|separate|baseline|in turn|\bthen\b"
    r"|\btorch\b(?!.*\b(fused|symm))"
)


def is_library(row: Row) -> bool:
    """Whether `what` names what a user has without a fused kernel."""
    return has(row, _LIBRARY)
