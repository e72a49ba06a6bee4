"""Launchers that are killed: no rank may outlive them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from trials import ROOT, until
from workloads import WORK

_CODE = """
import os, sys
from pathlib import Path
from weft.launch import launch
import torch, workloads

def body(rank, progress, name, folder):
    torch.manual_seed(0)
    os.environ["WEFT_TIMEOUT_S"] = "300"
    for step in range(1 << 30):
        workloads.make(name)
        if step == 2:
            (Path(folder) / f"{rank}.new").write_text(str(os.getpid()))
            (Path(folder) / f"{rank}.new").rename(Path(folder) / f"pid {rank}")

if __name__ == "__main__":
    launch(int(sys.argv[1]), body, sys.argv[2], sys.argv[3])
"""


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def orphans(chance: random.Random, folder: Path) -> Iterator[None]:
    world_size, name = chance.choice((2, 3)), chance.choice(list(WORK))
    how = chance.choice((signal.SIGKILL, signal.SIGTERM))
    code = folder / "job.py"
    code.write_text(_CODE)
    path = os.pathsep.join(
        [str(ROOT), str(ROOT / "tests" / "faults"), os.environ.get("PYTHONPATH", "")]
    )
    job = subprocess.Popen(
        [sys.executable, str(code), str(world_size), name, str(folder)],
        env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    pids: list[int] = []
    try:
        files = [folder / f"pid {rank}" for rank in range(world_size)]
        until(lambda: all(file.exists() for file in files), f"{name} on {world_size} ranks")
        pids = [int(file.read_text()) for file in files]
        time.sleep(chance.uniform(0, 0.3))
        job.send_signal(how)
        until(
            lambda: not any(map(_runs, pids)),
            f"{name} on {world_size} ranks, launcher ended by {how.name}: ranks have ended", 10.0,
        )  # fmt: skip
    finally:
        job.kill()
        job.wait()
        for pid in filter(_runs, pids):
            os.kill(pid, signal.SIGKILL)
    yield
