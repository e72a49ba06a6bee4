"""Virtual ranks: run kernels and collectives of any number of ranks in one process, checked."""

if not __name__.startswith("weft."):
    raise ImportError("import weft.sim: the top-level name is not ours")

from weft.sim.errors import DeadlockError, OutOfBoundsError, RaceError, SimError
from weft.sim.runner import Results, run
from weft.sim.world import Programs

__all__ = [
    "DeadlockError",
    "OutOfBoundsError",
    "Programs",
    "RaceError",
    "Results",
    "SimError",
    "run",
]
