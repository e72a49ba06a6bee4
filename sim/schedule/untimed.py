"""sim.untimed: work of a rank that takes no virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from weft.sim.schedule.scheduler import local


@contextmanager
def untimed() -> Iterator[None]:
    """What this rank does inside takes no virtual time: inputs, warm-up, checks.

    Outside of a simulation, and in one without `hardware`, it does nothing.

    Example:
        >>> def fn(rank):
        ...     with weft.sim.schedule.untimed():
        ...         x = torch.randn(1024, 4096)
        ...     return weft.collectives.all_reduce(x)
    """
    strand = local.strand
    if strand is None:
        yield
        return
    before, strand.timed = strand.timed, False
    try:
        yield
    finally:
        strand.timed = before
