"""What every kind of fault has: a name, what it means to hold, and trials out of a seed."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rank_pool import RankPool

ROOT = Path(__file__).resolve().parents[2]
GRACE_S = 10.0  # beyond the bound: ranks run on a busy machine, and are interpreted
Replies = dict[int, tuple[bool, Any]]


class Skipped(Exception):  # noqa: N818 - no error
    """This machine does not allow the trial; the text says why."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        held: what it means that a trial has held.
        batch: runs trials drawn from a random generator, in an empty folder of its own. It yields
            after each that has held, and raises AssertionError at one that has not.
        trials: how many the campaign asks for.
    """

    name: str
    held: str
    batch: Callable[[random.Random, Path], Iterator[None]]
    trials: int


@contextmanager
def own_ranks(world_size: int) -> Iterator[RankPool]:
    """Ranks that a trial may break; nothing of them may be left after it."""
    before = _shared_files()
    ranks = RankPool(world_size, quick=True)
    try:
        yield ranks
    finally:
        ranks.close()
    left = [pid for pid in ranks.pids if Path(f"/proc/{pid}").exists()]
    assert not left, f"processes are left: {left}"
    assert _shared_files() <= before, f"left in /dev/shm: {_shared_files() - before}"


def _shared_files() -> set[str]:
    """All but semaphores of multiprocessing, which nobody tells from those of another worker."""
    names = {path.name for path in Path("/dev/shm").iterdir()}
    beside_others = "PYTEST_XDIST_WORKER" in os.environ
    return {name for name in names if not (beside_others and name.startswith("sem.mp-"))}


def until(true: Callable[[], bool], what: str, within_s: float = 60.0) -> None:
    """Wait until something is true.

    Raises:
        AssertionError: it is not within the time.
    """
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, f"{what}: not within {within_s:g} s"
        time.sleep(0.01)


def script(
    code: str, *args: object, before: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, which must print "held"; `before`: a command that
    runs it."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = subprocess.run(
        [*before, sys.executable, "-W", "ignore", "-c", code, *map(str, args)],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.stdout.endswith("held\n"), f"exit status {run.returncode}\n{run.stdout}{run.stderr}"
    return run
