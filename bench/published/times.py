"""A predicted time, and the words that tell libraries from other kernels."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from weft.bench.published.rows import Row
from weft.collectives.protocols import Fabric
from weft.sim.time.hardware import Hardware

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


def fabric_of(row: Row, hardware: Hardware) -> Fabric:
    hosts = -(-row.ranks // hardware.ranks)
    return hardware.fabric(row.ranks, hosts)


def has(row: Row, pattern: str) -> bool:
    return re.search(pattern, row.what.lower()) is not None


_LIBRARY = (
    r"nccl|rccl|cublas|hipblas|unfused|separate|baseline|\btorch\b(?!.*\b(fused|symm))|in turn|then"
)


def is_library(row: Row) -> bool:
    return has(row, _LIBRARY)
