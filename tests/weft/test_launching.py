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
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "launching.md").read_text()
MANIFESTS = ROOT / "examples" / "launch"
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


def container_of(pods: dict[str, Any]) -> dict[str, Any]:
    """The only one of a pod template, if it has what Kubernetes requires."""
    (container,) = pods["spec"]["containers"]
    assert {"name", "image", "command"} <= container.keys()
    assert all(isinstance(part, str) for part in container["command"])
    for variable in container["env"]:  # whose values may be no numbers
        assert isinstance(variable.get("value", ""), str)
        assert ("value" in variable) != ("valueFrom" in variable)
    return dict(container)


def jobset() -> tuple[dict[str, Any], list[str]]:
    """The manifest, and the command of its pods."""
    told = yaml.safe_load((MANIFESTS / "jobset.yaml").read_text())
    (job,) = told["spec"]["replicatedJobs"]
    return told, container_of(job["template"]["spec"]["template"])["command"]


def pytorchjob() -> tuple[dict[str, Any], list[str]]:
    told = yaml.safe_load((MANIFESTS / "pytorchjob.yaml").read_text())
    return told, container_of(told["spec"]["pytorchReplicaSpecs"]["Worker"]["template"])["command"]


def test_manifest_of_jobset() -> None:
    """Pods have the numbers and the name that their command counts on, and restart together."""
    told, command = jobset()
    assert (told["apiVersion"], told["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert told["spec"]["failurePolicy"]["maxRestarts"] > 0
    assert told["spec"]["network"]["enableDNSHostnames"] is True
    (job,) = told["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    options = dict(part.removeprefix("--").split("=") for part in command[1:-1])
    assert command[0] == "torchrun" and (ROOT / command[-1]).exists()
    assert job["replicas"] == 1 and spec["completionMode"] == "Indexed"
    assert spec["parallelism"] == spec["completions"] == int(options["nnodes"])
    assert spec["backoffLimit"] == 0 and spec["template"]["spec"]["restartPolicy"] == "Never"
    # Pod 0 of job 0, as JobSet names it.
    name = told["metadata"]["name"]
    assert options["master-addr"] == f"{name}-{job['name']}-0-0.{name}"
    container = container_of(spec["template"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(options["nproc-per-node"])
    (index,) = (each["valueFrom"] for each in container["env"] if "valueFrom" in each)
    assert options["node-rank"] == "$(HOST)" and container["env"][0]["name"] == "HOST"
    annotation = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert index == {"fieldRef": {"fieldPath": annotation}}


def test_manifest_of_pytorchjob() -> None:
    """The operator fills in torchrun's options; of an elastic job without a master."""
    told, command = pytorchjob()
    assert (told["apiVersion"], told["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    spec, elastic = told["spec"], told["spec"]["elasticPolicy"]
    assert spec["pytorchReplicaSpecs"].keys() == {"Worker"}
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    assert elastic["minReplicas"] <= worker["replicas"] <= elastic["maxReplicas"]
    assert elastic["rdzvBackend"] == "c10d" and elastic["maxRestarts"] > 0
    assert worker["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
    container = container_of(worker["template"])
    assert container["name"] == "pytorch"  # the one that the operator looks for
    assert isinstance(spec["nprocPerNode"], str)
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(spec["nprocPerNode"])
    assert command[0] == "torchrun" and (ROOT / command[-1]).exists()


@pytest.mark.slow
def test_kubernetes_by_stand_ins() -> None:
    """Commands of the manifests with what a cluster fills in: of one host, of two ranks."""
    _, command = jobset()
    ours = {"nnodes": 1, "nproc-per-node": 2, "node-rank": 0, "master-addr": "localhost"}
    ours["master-port"] = free_port()
    assert {part.partition("=")[0] for part in command[1:-1]} == {f"--{name}" for name in ours}
    told = run([command[0], *(f"--{name}={value}" for name, value in ours.items()), command[-1]])
    assert "largest difference from one process" in told
    job, command = pytorchjob()
    elastic = job["spec"]["elasticPolicy"]
    told = run(
        command,
        PET_NNODES="1:1",
        PET_NPROC_PER_NODE="2",
        PET_RDZV_BACKEND=elastic["rdzvBackend"],
        PET_RDZV_ENDPOINT=f"localhost:{free_port()}",
        PET_MAX_RESTARTS=str(elastic["maxRestarts"]),
    )
    assert "largest difference from one process" in told
