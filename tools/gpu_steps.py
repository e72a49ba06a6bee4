"""The steps of `make gpu`, each run by a process of its own, which the command watches.

    compile     every kernel that the other steps launch, by all cores: nothing is launched
    proof       `weft doctor`; 4 ranks as threads make every call of `tools.gpu_cases` once
    solo        `weft bench solo`: kernels of one rank of W on the whole chip
    plain       matmul and attention of one rank beside cuBLAS and torch's attention
    threads     2, 4 and 8 ranks as threads: late ranks, graphs, streams, all calls mixed; one small
                call under compute-sanitizer
    processes   2 ranks as processes that share the chip
    tune        `weft tune`: launches of the fused matmuls, into a table
    ranks       every fused op beside its unfused self, a GPU a rank: where there are several

A step is a list of cases. Its process is told which to run, and appends to a file of lines

    {"step": "proof", "case": "W4/plain/pull", "begun": 1790000000.0}
    {"step": "proof", "case": "W4/plain/pull", "outcome": "passed", "seconds": 0.21, ...}

so that whatever becomes of it, the file tells what has ended and what was under way. After a
failure it ends, as a GPU's error stays, and a new one goes on. Where the ranks were launching is in
another file, which outlives it as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch

Outcome = Literal["passed", "failed", "skipped", "cut"]

FAILED = 3  # the status of a process that a case has failed in
_WHY_CHARACTERS = 4000  # of the end of a reason
_LAUNCH_BYTES = 600


@dataclass(frozen=True)
class Step:
    """A part of the run.

    Attributes:
        minutes: that it may take.
        case_s: that a case may take, before its process is ended.
        timeout_s: WEFT_TIMEOUT_S: how long a rank waits for another.
    """

    name: str
    about: str
    minutes: float
    case_s: float = 60.0
    timeout_s: float = 15.0


STEPS = {
    step.name: step
    for step in (
        Step("compile", "kernels of the other steps, by all cores", 4, case_s=240),
        Step("proof", "4 ranks as threads: every call once", 2),
        Step("solo", "kernels of one rank of W on the whole chip", 8, case_s=600),
        Step("plain", "one rank beside cuBLAS and torch's attention", 2, case_s=90),
        Step("threads", "2, 4, 8 ranks as threads: late, in graphs, on streams, mixed", 5),
        Step("processes", "2 ranks as processes", 2),
        Step("tune", "launches of the fused matmuls", 6, case_s=600),
        Step("ranks", "a GPU a rank: fused ops beside unfused ones", 10, case_s=120),
    )
}


@dataclass(frozen=True)
class Plan:
    """What a step's process is told.

    Attributes:
        folder: where results are kept.
        scratch: a folder that goes with the run.
        left_s: until when it must have ended, from its start.
    """

    step: str
    cases: tuple[str, ...]
    folder: str
    scratch: str
    device: Literal["cuda", "cpu"]
    quick: bool
    left_s: float

    @property
    def record(self) -> Path:
        return Path(self.folder) / "outcomes.jsonl"


def names(step: str, device: str, quick: bool) -> list[str]:
    """The cases of a step, in their order."""
    from tools import gpu_cases

    few = [f"W2/plain/{call}" for call in ("all_reduce", "all_gather_matmul", "norm")]
    if step == "compile":
        return ["kernels", "solo", "tune"]
    if step == "proof":
        return ["doctor", *gpu_cases.named([4], ["plain"])]
    if step in ("solo", "tune"):
        return [step]
    if step == "plain":
        return [name for _, name in _suite_cases(step, device, quick)]
    if step == "threads":
        sanitized = ["sanitizer/W1", "sanitizer/W2"]
        if quick:
            ways = [name.replace("plain", "late") for name in few]
            return [*ways, "W2/graph/all_reduce", "W2/streams/all_gather_matmul", *sanitized]
        return [*gpu_cases.named([2, 4, 8], ["late", "streams", "graph", "mixed"]), *sanitized]
    if step == "processes":
        return few if quick else gpu_cases.named([2], ["plain"])
    return [name for _, name in _suite_cases(step, device, quick)] if step == "ranks" else []


# --- the process of a step ---------------------------------------------------------------------


def main() -> int:
    """Run the cases of the plan in argv. `FAILED` if one failed, whatever is left."""
    plan = Plan(**json.loads(sys.argv[1]))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    run = {
        "compile": _compile,
        "solo": _solo,
        "tune": _tune,
        "plain": _suites,
        "ranks": _suites,
        "processes": _processes,
    }.get(plan.step, _threads)
    report = Report(plan)
    run(plan, report)
    sys.stdout.flush()
    # Threads of ranks that have failed may be waiting yet.
    os._exit(FAILED if report.failed else 0)


def _end_with_parent() -> None:
    """End this process and all that it started when the one that started it is gone."""
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)


class Report:
    """The lines of a step's process."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.failed = plan, False
        self.launches = Launches(Path(plan.scratch))
        self._end = time.monotonic() + plan.left_s

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()

    def _write(self, case: str, **entry: Any) -> None:
        append(self.plan.record, {"step": self.plan.step, "case": case, **entry})

    def begin(self, case: str) -> None:
        """Tell that a case is under way."""
        self.launches.clear()
        self._write(case, begun=time.time())

    def end(self, case: str, outcome: Outcome, seconds: float, why: str = "", **found: Any) -> None:
        """Tell what became of it."""
        if outcome == "failed":
            self.failed = True
            found = {"launches": self.launches.read()} | found
        self._write(
            case, outcome=outcome, seconds=round(seconds, 3), why=why[-_WHY_CHARACTERS:], **found
        )

    @contextmanager
    def case(self, name: str, case_s: float) -> Iterator[None]:
        """A case that passes unless the block raises, or takes longer than `case_s`."""
        from tools.gpu_cases import ImpossibleError

        start = time.monotonic()
        self.begin(name)

        def hang() -> None:
            self.end(name, "failed", case_s, f"no end within {case_s:g} s\n{stacks()}")
            os._exit(FAILED)

        watch = threading.Timer(case_s, hang)
        watch.daemon = True
        watch.start()
        try:
            yield
        except ImpossibleError as reason:
            watch.cancel()
            self.end(name, "skipped", time.monotonic() - start, str(reason))
        except Exception as error:
            watch.cancel()
            self.end(name, "failed", time.monotonic() - start, told(error))
        else:
            watch.cancel()
            self.end(name, "passed", time.monotonic() - start)


def append(record: Path, entry: dict[str, Any]) -> None:
    """One write a line: processes may append to the file at the same time, and be killed."""
    line = json.dumps(entry) + "\n"
    file = os.open(record, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(file, line.encode())
    os.close(file)


def told(error: BaseException) -> str:
    """A traceback whose last line says what is wrong."""
    return "".join(traceback.format_exception(error)).strip()


def stacks() -> str:
    """Where the threads of this process are."""
    frames = sys._current_frames()
    return "\n".join(
        f"{thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident])[-5:])}"
        for thread in threading.enumerate()
        if thread.ident in frames and thread is not threading.current_thread()
    )


class Launches:
    """What each rank launched last, in a file that outlives the process."""

    def __init__(self, scratch: Path) -> None:
        self._path = scratch / "launches"
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT)

    def clear(self) -> None:
        os.ftruncate(self._file, 0)

    def note(self, rank: int, text: str) -> None:
        """That `rank` is about to launch this."""
        line = text.encode()[: _LAUNCH_BYTES - 1] + b"\n"
        os.pwrite(self._file, line.ljust(_LAUNCH_BYTES, b"\0"), rank * _LAUNCH_BYTES)

    def read(self) -> list[str]:
        """Each rank's last launch; those that are alike once."""
        data = self._path.read_bytes()
        parts = [data[i : i + _LAUNCH_BYTES] for i in range(0, len(data), _LAUNCH_BYTES)]
        lines = {
            rank: part.rstrip(b"\0").decode(errors="replace").strip()
            for rank, part in enumerate(parts)
        }
        by_text: dict[str, list[int]] = {}
        for rank, line in lines.items():
            if line:
                by_text.setdefault(line, []).append(rank)
        return [f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in by_text.items()]

    @contextmanager
    def noting(self, rank: Callable[[], int], *, only_compile: bool = False) -> Iterator[None]:
        """Note what is launched in the block; `only_compile`: and do not launch it."""
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction

        def noted(run: Any) -> Any:
            def run_noted(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
                if not warmup:
                    self.note(rank(), described(kernel, grid, options))
                done = run(kernel, *args, grid=grid, warmup=warmup or only_compile, **options)
                return _Compiled() if only_compile else done

            return run_noted

        with contextlib.ExitStack() as stack:
            for kind in (JITFunction, InterpretedFunction):
                stack.enter_context(patch.object(kind, "run", noted(kind.run)))
            yield


class _Compiled:
    """What `Launches.noting` returns of a launch that it does not make."""

    def _init_handles(self) -> None:
        pass


def described(kernel: Any, grid: Any, options: dict[str, Any]) -> str:
    """A launch in a line: the kernel, its grid, its constants and compile options.

    Example:
        _ag_gemm_kernel[132] RANK=0 block_m=128 num_warps=8
    """
    values: dict[str, Any] = {}
    for name, value in options.items():
        if is_dataclass(value) and not isinstance(value, type):
            values |= asdict(value)
        elif isinstance(value, (bool, int, float, str)):
            values[name] = value
    shape = grid if isinstance(grid, tuple) else (grid,)
    name = getattr(kernel, "__name__", str(kernel))
    return f"{name}[{', '.join(map(str, shape))}] " + " ".join(
        f"{key}={value}" for key, value in values.items()
    )


# --- ranks as threads: proof, threads ----------------------------------------------------------


def on_ranks(
    plan: Plan, W: int, body: Callable[[int], None], seconds: float, *, compiles: bool = False
) -> None:
    """`body(rank)` on virtual ranks, with a process group: compiled on a GPU, else interpreted."""
    import torch.distributed as dist

    from weft import sim

    def on_rank(rank: int) -> None:
        dist.init_process_group("gloo")
        body(rank)

    if plan.device == "cuda":
        sim.run_on_gpu(W, on_rank, timeout=seconds)
    else:
        sim.run(W, on_rank, races=False, timeout=seconds)


def _threads(plan: Plan, report: Report) -> None:
    from tools import gpu_cases
    from weft.sim.run.gpu import rank_here

    case_s = STEPS[plan.step].case_s
    device = torch.device(plan.device)
    for name in plan.cases:
        if report.left_s < 1 or report.failed:
            return
        with report.case(name, min(case_s, max(report.left_s, 1))):
            if name == "doctor":
                _doctor()
            elif name.startswith("sanitizer/"):
                _sanitized(int(name[-1]), plan)
            else:
                W, _, _ = gpu_cases.parsed(name)

                def body(rank: int, name: str = name, W: int = W) -> None:
                    gpu_cases.run(name, gpu_cases.Place(rank, W, device, plan.device == "cpu"))

                with report.launches.noting(rank_here):
                    on_ranks(plan, W, body, case_s - 2)


def _doctor() -> None:
    """What the machine has; a failure of its trial is one of this case."""
    done = subprocess.run(
        [sys.executable, "-m", "weft", "doctor"], stdout=subprocess.PIPE, text=True, check=False
    )
    print(done.stdout, flush=True)
    if done.returncode:
        raise RuntimeError(f"weft doctor says\n{done.stdout}")


_SANITIZED = """
import sys, torch, torch.distributed as dist
from weft import sim
from tools import gpu_cases
W = int(sys.argv[1])
def body(rank):
    dist.init_process_group("gloo")
    for call in ("all_reduce", "all_gather_matmul"):
        gpu_cases.run(f"W{W}/plain/{call}", gpu_cases.Place(rank, W, torch.device("cuda"), True))
sim.run_on_gpu(W, body, timeout=50)
"""


def _sanitized(W: int, plan: Plan) -> None:
    """Small calls under compute-sanitizer's memcheck.

    With one rank each tensor has memory of its own, whose bounds are then known. With more that
    would stop the GPU: freeing waits for all kernels.
    """
    from tools.gpu_cases import ImpossibleError

    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if plan.device == "cpu":
        raise ImpossibleError("of a GPU only")
    if not Path(tool).exists():
        raise ImpossibleError("there is no compute-sanitizer")
    variables = os.environ | ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if W == 1 else {})
    done = subprocess.run(
        [tool, "--tool", "memcheck", "--error-exitcode", "9", "--print-limit", "5",
         sys.executable, "-c", _SANITIZED, str(W)],
        env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    text = done.stdout[-_WHY_CHARACTERS:]
    if W > 1 and done.returncode not in (0, 9) and "Timeout" in text:
        raise ImpossibleError("under it one kernel runs at a time: ranks do not meet")
    if W == 1 and "not supported" in text.lower():
        raise ImpossibleError(f"it refuses this machine: {text.strip().splitlines()[-1]}")
    if done.returncode:
        raise RuntimeError(f"compute-sanitizer says\n{text}")


# --- ranks as processes ------------------------------------------------------------------------


def _processes(plan: Plan, report: Report) -> None:
    from weft.launch import RankError, launch

    step = STEPS[plan.step]
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
            2, _process, plan, time.time() + plan.left_s, device=plan.device, on_progress=hear,
            stall_s=min(step.case_s, plan.left_s),
        )  # fmt: skip
    except RankError as error:
        name, at = begun[-1] if begun else (plan.cases[0], time.monotonic())
        report.end(name, "failed", time.monotonic() - at, str(error))


def _process(rank: int, progress: Callable[[Any], None], plan: Plan, until: float) -> None:
    """One of two ranks."""
    import torch.distributed as dist

    from tools import gpu_cases

    launches, device = Launches(Path(plan.scratch)), torch.device(plan.device)
    if plan.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        torch.set_default_device(device)
    with launches.noting(lambda: rank):
        for name in plan.cases:
            left = [time.time() < until - 2]
            dist.broadcast_object_list(left)
            if not left[0]:
                return
            progress(("begin", name))
            try:
                gpu_cases.run(name, gpu_cases.Place(rank, 2, device, plan.device == "cpu"))
            except gpu_cases.ImpossibleError as reason:
                progress(("end", (name, "skipped", str(reason))))
            else:
                progress(("end", (name, "passed", "")))


# --- compilation -------------------------------------------------------------------------------


def _compile(plan: Plan, report: Report) -> None:
    for name in plan.cases:
        if report.left_s < 5 or report.failed:
            return
        start = time.monotonic()
        report.begin(name)
        run = {"kernels": _compile_kernels, "solo": _compile_solo, "tune": _compile_tune}[name]
        outcome, why, found = run(plan, report)
        report.end(name, outcome, time.monotonic() - start, why, **found)


Ended = tuple[Outcome, str, dict[str, Any]]


def _compile_kernels(plan: Plan, report: Report) -> Ended:
    """The kernels of ranks as threads and as processes: each call of each number of ranks."""
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from multiprocessing import get_context

    from tools.gpu_cases import calls_of, parsed
    from weft.launch import cores

    if plan.device == "cpu":
        return "skipped", "kernels are interpreted on a CPU", {}
    work = dict.fromkeys(
        (step, parsed(name)[0], call)
        for step in ("proof", "threads", "processes")
        for name in names(step, plan.device, plan.quick)
        if name.startswith("W")
        for call in calls_of(name)
    )
    wrong, done = [], 0
    with ProcessPoolExecutor(cores(), get_context("spawn")) as pool:
        kinds = dict.fromkeys((step == "processes", W, call) for step, W, call in work)
        futures = {pool.submit(_compile_call, plan, *kind): kind for kind in kinds}
        for future in as_completed(futures):
            _, W, call = futures[future]
            try:
                seconds = future.result()
            except Exception as error:  # one that does not compile fails in its own step as well
                wrong.append(f"{call}, {W} ranks: {told(error)}")
                print(f"compile: {call}, {W} ranks: failed", flush=True)
            else:
                done += 1
                print(f"compile: {call}, {W} ranks: {seconds:.1f} s", flush=True)
    found = {"calls": done, "processes": cores()}
    return ("failed", "\n".join(wrong), found) if wrong else ("passed", "", found)


def _compile_call(plan: Plan, as_processes: bool, W: int, call: str) -> float:
    """In a process of the pool."""
    from tools import gpu_cases
    from weft.launch import launch
    from weft.sim.run.gpu import rank_here

    start = time.monotonic()
    name = f"W{W}/plain/{call}"
    if as_processes:
        launch(W, _compile_in_process, plan, name, device=plan.device, stall_s=plan.left_s)
    else:
        device = torch.device(plan.device)

        def body(rank: int) -> None:
            gpu_cases.make_once(name, gpu_cases.Place(rank, W, device, plan.device == "cpu"))

        with Launches(Path(plan.scratch)).noting(rank_here, only_compile=True):
            on_ranks(plan, W, body, plan.left_s)
    return time.monotonic() - start


def _compile_in_process(rank: int, progress: Callable[[Any], None], plan: Plan, name: str) -> None:
    from tools import gpu_cases

    device = torch.device("cuda", torch.cuda.current_device())
    torch.set_default_device(device)
    with Launches(Path(plan.scratch)).noting(lambda: rank, only_compile=True):
        gpu_cases.make_once(name, gpu_cases.Place(rank, 2, device, plan.device == "cpu"))


def _command(plan: Plan, command: Sequence[str]) -> Ended:
    """Run a command of weft's that keeps its own results, and ends in time by itself."""
    print(f"{plan.step}: weft {' '.join(command)}", flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "weft", *command], stderr=subprocess.PIPE, text=True, check=False
    )
    print(done.stderr, end="", flush=True)
    if done.returncode == 0:
        return "passed", "", {}
    if done.returncode == 130:
        return "cut", "its time was up", {}
    return "failed", f"exit status {done.returncode}\n{done.stderr}", {}


def _there(command: str) -> bool:
    """Whether `weft bench` has the command."""
    from weft.bench.cli import _COMMANDS

    return command in _COMMANDS


def _solo_command(plan: Plan, left_s: float, *more: str) -> list[str]:
    return [
        "bench", "solo", "--out", str(Path(plan.folder) / "solo.json"), "--device", plan.device,
        "--minutes", f"{max(left_s - 5, 1) / 60:.2f}", *(["--quick"] if plan.quick else []), *more,
    ]  # fmt: skip


def _compile_solo(plan: Plan, report: Report) -> Ended:
    if not _there("solo"):
        return "skipped", "not there", {}
    return _command(plan, _solo_command(plan, report.left_s, "--precompile"))


def _solo(plan: Plan, report: Report) -> None:
    _by_command(
        report, "solo", lambda: _command(plan, _solo_command(plan, report.left_s, "--resume"))
    )


def _by_command(report: Report, name: str, run: Callable[[], Ended]) -> None:
    start = time.monotonic()
    report.begin(name)
    outcome, why, found = run() if name != "solo" or _there(name) else ("skipped", "not there", {})
    report.end(name, outcome, time.monotonic() - start, why, **found)


def _compile_tune(plan: Plan, report: Report) -> Ended:
    return "skipped", "not there", {}


def _tune(plan: Plan, report: Report) -> None:
    _by_command(report, "tune", lambda: ("skipped", "not there", {}))


# --- figures -----------------------------------------------------------------------------------


def _suites_of(step: str) -> Sequence[Any]:
    from weft.bench.suites import attention, matmul, ops

    return [matmul] if step == "plain" else [ops, attention]


def _suite_cases(step: str, device: str, quick: bool) -> list[tuple[Any, str]]:
    return [
        (suite, spec.name + _suffix(options))
        for options in _options(step, device, quick)
        for suite in _suites_of(step)
        for spec in suite.cases(options)
    ]


def _suffix(options: Any) -> str:
    return f", {options.ranks} ranks" if options.ranks > 1 else ""


def _options(step: str, device: str, quick: bool) -> list[Any]:
    """How the suites of a step are run: once for each number of ranks."""
    from weft.bench.problem import Options

    gpus = torch.cuda.device_count() if device == "cuda" else 0
    counts = (1,) if step == "plain" else rank_counts(gpus)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    kind: Any = device
    return [Options(ranks=W, device=kind, dtype=dtype, quick=quick, seconds=1.0) for W in counts]


def rank_counts(gpus: int) -> tuple[int, ...]:
    """The numbers of ranks to measure, a GPU each.

    Example:
        1 GPU: none; 6 GPUs: (2, 4, 6).
    """
    return tuple(sorted({W for W in (2, 4, 8, 16) if gpus >= W} | {gpus} - {0, 1}))


def _suites(plan: Plan, report: Report) -> None:
    """Cases of suites; each keeps its row."""
    from weft.bench import runner
    from weft.bench.cli import failed
    from weft.bench.measure import time_limit

    for options in _options(plan.step, plan.device, plan.quick):
        suffix = _suffix(options)

        def wanted(suite: Any, spec: Any, suffix: str = suffix) -> bool:
            return spec.name + suffix in plan.cases

        start = time.monotonic()

        def keep(case: Any, suffix: str = suffix) -> None:
            nonlocal start
            case.name += suffix
            kernel = case.variants.get("triton")
            wrong = failed(case) or (plan.device == "cuda" and kernel and not kernel.ok)
            whys = [
                case.failure,
                *(f"{n}: {t.failure}" for n, t in case.variants.items() if t.failure),
            ]
            report.end(
                case.name, "failed" if wrong else "passed", time.monotonic() - start,
                "\n".join(filter(None, whys)), row=case.as_dict(),
            )  # fmt: skip
            start = time.monotonic()

        with time_limit(time.monotonic() + report.left_s - 3):
            results = runner.run(_suites_of(plan.step), options, on_case=keep, wanted=wanted)
        if any(result.interrupted for result in results):
            return


if __name__ == "__main__":
    sys.exit(main())
