"""What a simulation finds."""

from __future__ import annotations

from weft.errors import MismatchError, WeftError


class SimError(WeftError):
    """Something that would hang or corrupt on real ranks.

    Attributes:
        seed, schedule: `sim.run(..., seed=seed, schedule=schedule)` shows it again.
    """

    seed: int | None = None
    schedule: int | str | None = None


class DifferentCallsError(SimError, MismatchError):
    """Ranks make different calls, which real ones would refuse."""


class DeadlockError(SimError):
    """No rank can go on: each waits for a signal that none is left to send."""


class RaceError(SimError):
    """Two accesses to the same memory, one of them a write, that no signal puts in order."""


class OutOfBoundsError(SimError):
    """An access outside of the buffer that it was aimed at."""
