"""The process of a step of `make gpu`: it runs cases, and tells of each.

It is told which, and appends to a file of lines

    {"step": "proof", "case": "W4/plain/pull", "begun": 1790000000.0}
    {"step": "proof", "case": "W4/plain/pull", "outcome": "passed", "seconds": 0.21, ...}

so that whatever becomes of it, the file tells what has ended and what was under way. After a
failure it ends, as a GPU's error stays, and a new one goes on. Where the ranks were launching is in
another file, which outlives it as well.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tools.gpu.ranks import on_ranks, small_cases
from tools.gpu.report import FAILED, GO_ON, GpuReport, LastLaunches
from tools.gpu.steps import StepPlan, case_s

_WHY_CHARACTERS = 4000  # of what a program said


def main() -> int:
    """Run the cases of the plan in argv. `FAILED` if one failed, whatever is left, else `GO_ON` if
    another process is to run the others, else 0."""
    from tools.gpu import compile as gpu_compile
    from tools.gpu import figures as gpu_figures

    plan = StepPlan(**json.loads(sys.argv[1]))
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    run = {
        "compile": gpu_compile.compile_cases,
        "solo": gpu_figures.solo,
        "tune": gpu_figures.tune,
        "plain": gpu_figures.suites,
        "ranks": gpu_figures.suites,
        "processes": _processes,
    }.get(plan.step, _threads)
    report = GpuReport(plan)
    run(plan, report)
    sys.stdout.flush()
    # Threads of ranks that have failed may be waiting yet.
    os._exit(FAILED if report.failed else GO_ON if report.goes_on else 0)


def _end_with_stdin() -> None:
    """End this process and all that it started when the one that started it is gone."""
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)


# --- ranks as threads: proof, threads ----------------------------------------------------------


def _threads(plan: StepPlan, report: GpuReport) -> None:
    from tools.gpu import cases as gpu_cases
    from weft.sim.run.gpu import rank_here

    device = torch.device(plan.device)
    for name in plan.cases:
        if report.left_s < 1 or report.failed:
            return
        limit_s = case_s(plan.step, name, plan.device)
        with report.case(name, limit_s):
            if name == "doctor":
                _doctor()
            elif name == "sanitizer":
                _sanitized(plan, limit_s - 5)
            else:
                W, _, _ = gpu_cases.parsed(name)

                def body(rank: int, name: str = name, W: int = W) -> None:
                    gpu_cases.run_case_on_rank(
                        name, gpu_cases.Place(rank, W, device, plan.device == "cpu")
                    )

                with report.launches.noting(rank_here, gpu_cases.be_late):
                    on_ranks(plan.device, W, body, limit_s - 2)


def _environment_apart() -> dict[str, str]:
    """The environment of a program whose ranks are no threads: torch's kernels need not be there
    before they are used, all of which takes seconds."""
    return {name: value for name, value in os.environ.items() if name != "CUDA_MODULE_LOADING"}


def _doctor() -> None:
    """What the machine has; a failure of its trial is one of this case."""
    done = subprocess.run(
        [sys.executable, "-m", "weft", "doctor"],
        env=_environment_apart(),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    print(done.stdout, flush=True)
    if done.returncode:
        raise RuntimeError(f"weft doctor says\n{done.stdout}")


def run_small_cases(device: str) -> None:
    """Make them, and compare their results."""
    from weft.bench.solo import sweep
    from weft.kernels.engine.tuning import HEURISTIC

    for spec in small_cases():
        trial = sweep.Search(spec, torch.device(device)).tried(HEURISTIC)
        if trial.failure:
            raise RuntimeError(f"{spec.name}: {trial.failure}")


def _sanitized(plan: StepPlan, seconds: float) -> None:
    """Small calls under compute-sanitizer's memcheck.

    It lets one kernel run at a time, so that ranks would not meet: these wait for nobody. Each
    tensor has memory of its own, whose bounds are then known.
    """
    from tools.gpu.cases import ImpossibleError

    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if plan.device == "cpu":
        raise ImpossibleError("of a GPU only")
    if not Path(tool).exists():
        raise ImpossibleError("there is no compute-sanitizer")
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", "--print-limit", "5"]
    command += [
        sys.executable,
        "-c",
        "from tools.gpu import process as p; p.run_small_cases('cuda')",
    ]
    try:
        done = subprocess.run(
            command,
            env=_environment_apart() | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise ImpossibleError(f"not done within {seconds:.0f} s") from None
    text = done.stdout[-_WHY_CHARACTERS:]
    if "not supported" in text.lower():
        raise ImpossibleError(f"it refuses this machine: {text.strip().splitlines()[-1]}")
    if done.returncode:
        raise RuntimeError(f"compute-sanitizer says\n{text}")


# --- ranks as processes ------------------------------------------------------------------------


def _processes(plan: StepPlan, report: GpuReport) -> None:
    from weft.launch import RankError, launch

    begun: list[tuple[str, float]] = []

    def hear(event: tuple[str, Any]) -> None:
        kind, value = event
        if kind == "begin":
            begun.append((value, time.monotonic()))
            report.begin(value)
        else:
            name, outcome, why = value
            report.end(name, outcome, time.monotonic() - begun[-1][1], why)

    try:
        launch(
            2,
            _process,
            plan,
            device=plan.device,
            on_progress=hear,
            stall_s=case_s(plan.step, "", plan.device),
        )
    except RankError as error:
        name, at = begun[-1] if begun else (plan.cases[0], time.monotonic())
        report.end(name, "failed", time.monotonic() - at, str(error))


def _process(rank: int, progress: Callable[[Any], None], plan: StepPlan) -> None:
    """One of two ranks."""
    import torch.distributed as dist

    from tools.gpu import cases as gpu_cases

    launches, device = LastLaunches(Path(plan.scratch)), torch.device(plan.device)
    if plan.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        torch.set_default_device(device)
    with launches.noting(lambda: rank):
        for name in plan.cases:
            left = [time.time() < plan.until - 2]
            dist.broadcast_object_list(left)
            if not left[0]:
                return
            progress(("begin", name))
            try:
                gpu_cases.run_case_on_rank(
                    name, gpu_cases.Place(rank, 2, device, plan.device == "cpu")
                )
            except gpu_cases.ImpossibleError as reason:
                progress(("end", (name, "skipped", str(reason))))
            else:
                progress(("end", (name, "passed", "")))


if __name__ == "__main__":
    sys.exit(main())
