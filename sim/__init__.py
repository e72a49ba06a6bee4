"""Virtual ranks: run kernels and collectives of any number of ranks in one process, checked.

May import `weft.collectives`, `weft.kernels` and `weft.dtensor`, none of which imports it. Read
`run` (virtual ranks, and what torch.distributed is to them), `schedule` (who runs next), `check`
(races, bounds, values), `time` (what it takes on a chip), `hooks` (how Triton's interpreter tells).
"""

if not __name__.startswith("weft."):
    raise ImportError(
        "import weft.sim: the top-level name is not ours. If another package is meant, "
        "install weft (pip install -e .) rather than have its checkout on the path"
    )

# First: it decides whether kernels are interpreted, which is settled when Triton is imported.
from weft import collectives as collectives
from weft.collectives.prices.hardware import B200, GB200_NVL72, H100, H200, MI300X, Hardware
from weft.sim.errors import (
    DeadlockError,
    DifferentCallsError,
    OutOfBoundsError,
    RaceError,
    SimError,
)
from weft.sim.run.gpu import run_on_gpu
from weft.sim.run.runner import Results, run
from weft.sim.run.world import Programs
from weft.sim.schedule.untimed import untimed
from weft.sim.time.timeline import Timeline

__all__ = [
    "B200",
    "GB200_NVL72",
    "H100",
    "H200",
    "MI300X",
    "DeadlockError",
    "DifferentCallsError",
    "Hardware",
    "OutOfBoundsError",
    "Programs",
    "RaceError",
    "Results",
    "SimError",
    "Timeline",
    "run",
    "run_on_gpu",
    "untimed",
]


def __dir__() -> list[str]:
    """What is public, for completion."""
    return sorted(__all__)
