"""What docs/launching.md says of launchers, as far as they are installed here."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "launching.md").read_text()
MINE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def run(command: list[str], **variables: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name not in MINE}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=kept | {"PATH": path, "PYTHONPATH": str(ROOT)} | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def of_page(start: str, **given: object) -> list[str]:
    """The command of the page that starts so, on one host of two ranks."""
    (command,) = re.findall(rf"^{re.escape(start)}.*$", PAGE, re.MULTILINE)
    for name, value in given.items():
        command = command.replace(f"${name}", str(value))
    fewer = command.replace("per-node 8", "per-node 2").replace("--nnodes 2", "--nnodes 1")
    return fewer.replace("29400", str(free_port())).split()


@pytest.mark.slow
@pytest.mark.parametrize("start", ["torchrun --nnodes 2", "torchrun --nnodes 1:2"])
def test_torchrun(start: str) -> None:
    told = run(of_page(start, HOST=0, FIRST="localhost", JOB="one"))
    assert "largest difference from one process" in told


@pytest.mark.slow
def test_slurm_by_stand_ins(tmp_path: Path) -> None:
    for name, body in {"srun": 'exec "$@"', "scontrol": "echo localhost"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    script = ["examples/launch/slurm.sbatch", "examples/drop_in_linear.py"]
    told = run(
        ["bash", "-c", f'PATH={tmp_path}:$PATH . "$@"', "", *script],
        RANKS="2",
        SLURM_JOB_NODELIST="localhost",
        SLURM_JOB_NUM_NODES="1",
        SLURM_JOB_ID=str(free_port()),
    )
    assert "largest difference from one process" in told


@pytest.mark.slow
def test_names_of_mpi() -> None:
    """Two processes with the variables of Open MPI, or by itself where it is installed."""
    program = [sys.executable, "examples/launch/by_mpi.py", "examples/drop_in_linear.py"]
    if shutil.which("mpirun"):
        more = ["--allow-run-as-root", "--oversubscribe", "-x", f"MASTER_PORT={free_port()}"]
        assert "largest difference" in run(["mpirun", "-n", "2", *more, *program])
        return
    named = " ".join(program)
    both = (
        f"OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_LOCAL_RANK=1 {named} & "
        f"OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_LOCAL_RANK=0 {named}; wait"
    )
    told = run(["bash", "-c", both], OMPI_COMM_WORLD_SIZE="2", MASTER_PORT=str(free_port()))
    assert "largest difference from one process" in told
    wrong = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    assert wrong.returncode == 1 and "start this by mpirun, mpiexec or srun" in wrong.stderr


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="weft does not depend on it")
def test_ray() -> None:
    told = run([sys.executable, "examples/launch/by_ray.py", "2"])
    assert all(f"rank {rank} of 2 on 1 hosts: as one process" in told for rank in (0, 1))
