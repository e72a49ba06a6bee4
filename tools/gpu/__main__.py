"""`make gpu`: prove and measure on GPUs what no other machine can tell, in slices that resume.

    make gpu ARGS="--minutes 9 --out DIR"        the first slice
    make gpu ARGS="--minutes 9 --resume DIR"     the next one, from DIR or a copy of it

Steps, in this order, each within its own minutes; what one had no time for comes after the last:

{steps}

All results are in DIR: `outcomes.jsonl`, a line for every case as it begins and ends, from which a
run goes on however it ended; `figures.json`, `solo.json`, tables of tuned launches, `page.md`,
`log.txt`. What has passed is kept; what has failed is run again once the sources have changed.
A failure is told with the kernel that was launched last and a command that repeats it alone.

Ranks that share a chip by turns are never timed: figures are of one rank, or of a GPU a rank.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tools.gpu import page as gpu_page
from tools.gpu import report as gpu_report
from tools.gpu import steps as gpu_steps
from tools.gpu.report import append
from tools.gpu.steps import STEPS, StepPlan
from weft.cli import Parser, make_folder

ROOT = Path(__file__).resolve().parents[2]
NOTHING_TO_DO = (
    "make gpu: skipped, torch sees no GPU here. On a machine with one or more (CUDA or ROCm build "
    "of torch >= 2.11) the same command proves and measures; --device cpu --quick rehearses it."
)
FILES = ("outcomes.jsonl", "figures.json", "solo.json", "page.md", "log.txt")

_MARGIN_S = 8.0  # before the limit, in which the page is written
_PAGE_S = 10.0  # between two pages
_EXIT_S = 15.0  # that a process may take to end
_LEAST_S = 10.0  # a step is not begun with less
_LOG_BYTES = 8 << 20
_WHY_CHARACTERS = 2000  # of what a process said before it died


@dataclass
class Outcomes:
    """What the lines of `outcomes.jsonl` say: the last word on every case.

    Attributes:
        runs: what the slices ran on.
        found: by step and case, how it ended.
        begun: cases that have begun and not ended, and when.
        unended: those that were under way when a run was ended.
        spent: by step, and what it ran on, the seconds of its cases.
    """

    runs: list[dict[str, Any]] = field(default_factory=list)
    found: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    begun: dict[tuple[str, str], float] = field(default_factory=dict)
    unended: set[tuple[str, str]] = field(default_factory=set)
    spent: dict[tuple[str, str], float] = field(default_factory=dict)

    def take(self, entry: dict[str, Any]) -> None:
        """A line."""
        if "run" in entry:
            self.runs.append(entry["run"])
            self.end()
            return
        key = entry["step"], entry["case"]
        if "begun" in entry:
            self.begun[key] = entry["begun"]
        else:
            self.begun.pop(key, None)
            (self.unended.add if entry["outcome"] == "cut" else self.unended.discard)(key)
            of = self.runs[-1] if self.runs else {}
            self.found[key] = entry | {name: of.get(name) for name in ("sources", "cache", "chip")}
            where = entry["step"], _place(entry["step"], of)
            self.spent[where] = self.spent.get(where, 0.0) + entry["seconds"]

    def end(self) -> None:
        """A run is over, whatever was under way."""
        self.unended |= self.begun.keys()
        self.begun.clear()

    def settled(self, step: str, case: str, run: dict[str, Any]) -> bool:
        """Whether a run need not make the case again."""
        entry = self.found.get((step, case))
        if entry is None or entry["outcome"] == "cut":
            return False
        if _place(step, entry) != _place(step, run):
            return False
        if step == "compile":
            return bool(entry["sources"] == run["sources"])
        return entry["outcome"] != "failed" or bool(entry["sources"] == run["sources"])

    def count(self, outcome: str) -> int:
        """How many cases ended so."""
        return sum(entry["outcome"] == outcome for entry in self.found.values())


def _place(step: str, run: Mapping[str, Any]) -> str:
    """What outcomes of a step hold for: all chips, one kind, or a machine's compiled kernels."""
    if step == "compile":
        return str(run.get("cache"))
    return str(run.get("chip")) if STEPS[step].figures else ""


def read_record(record: Path) -> Outcomes:
    """The outcomes in a file; the last line may be half written."""
    outcomes = Outcomes()
    for line in record.read_text(errors="replace").splitlines() if record.exists() else ():
        with suppress(ValueError):
            outcomes.take(json.loads(line))
    return outcomes


def sources() -> str:
    """A digest of what the kernels and these steps are made of."""
    digest = hashlib.sha256()
    for folder in ("collectives", "kernels", "sim", "bench", "dtensor", "tools"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def cache_name() -> str:
    """The name of this machine's cache of compiled kernels: a new one has a new name."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    file = folder / "weft-gpu.name"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(os.urandom(6).hex())
    return file.read_text()


class Log:
    """Lines for the terminal and the folder's log, which does not grow without end."""

    def __init__(self, path: Path, begun: float) -> None:
        self._path, self._begun = path, begun

    def __call__(self, text: str) -> None:
        self.write(f"{time.monotonic() - self._begun:4.0f} s {text}\n")

    def write(self, text: str) -> None:
        """As it is."""
        print(text, end="", flush=True)
        if not self._path.exists() or self._path.stat().st_size < _LOG_BYTES:
            with open(self._path, "a") as file:
                file.write(text)


class Said:
    """Passes on what a process says, and knows the end of it."""

    def __init__(self, log: Log) -> None:
        self._log, self.end = log, ""

    def __call__(self, news: bytes) -> None:
        text = news.decode(errors="replace")
        self._log.write(text)
        self.end = (self.end + text)[-_WHY_CHARACTERS:]


@dataclass
class Slice:
    """One run of the command."""

    folder: Path
    device: Any
    quick: bool
    until: float
    log: Log
    wanted: dict[str, list[str]]  # the cases of each step
    again: bool

    def __post_init__(self) -> None:
        self.record = self.folder / FILES[0]
        if self.record.exists() and not self.record.read_bytes().endswith(b"\n"):
            with open(self.record, "a") as file:
                file.write("\n")
        self.run = gpu_page.where(self.device) | {"sources": sources(), "cache": cache_name()}
        append(self.record, {"run": self.run})
        self.outcomes = read_record(self.record)
        self._size = self.record.stat().st_size
        self._written = time.monotonic()
        self._now: set[tuple[str, str]] = set()  # ended in this slice
        self._scratch = tempfile.mkdtemp(prefix="weft-gpu-")

    def left(self, step: str) -> list[str]:
        """The cases of a step that are to be run."""
        found = [
            case
            for case in self.wanted[step]
            if (step, case) not in self._now
            and (self.again or not self.outcomes.settled(step, case, self.run))
        ]
        # Last, what may hang: it was under way when a run was ended.
        return sorted(found, key=lambda case: (step, case) in self.outcomes.unended)

    def go(self, steps: Sequence[str]) -> None:
        """Run the steps, then what they had no time for."""
        for limited in (True, False):
            # What was not compiled in its minutes is now compiled where it is launched.
            order = steps if limited else sorted(steps, key=lambda step: step == "compile")
            for step in order:
                spent_s = self.outcomes.spent.get((step, _place(step, self.run)), 0.0)
                left_s = 60 * STEPS[step].minutes - spent_s if limited else float("inf")
                self._step(step, min(self.until, time.monotonic() + left_s))
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _step(self, step: str, until: float) -> None:
        left = self.left(step)
        if not left or until - time.monotonic() < _LEAST_S:
            return
        self.log(f"== {step}: {STEPS[step].about}; {len(left)} cases")
        started = time.monotonic()
        while left and until - time.monotonic() >= _LEAST_S:
            status = self._process(step, left, until)
            before, left = left, self.left(step)
            if left == before or status == 0:  # it could not begin, or there is too little time
                break
        self.log(f"== {step}: {time.monotonic() - started:.0f} s" + self._tally(step, left))

    def _chosen(self) -> tuple[str, ...]:
        """The cases of all steps, if the run has only some."""
        return tuple(case for cases in self.wanted.values() for case in cases) * self.again

    def _tally(self, step: str, left: list[str]) -> str:
        ends = [entry["outcome"] for (of, _), entry in self.outcomes.found.items() if of == step]
        parts = [f"{ends.count(kind)} {kind}" for kind in ("passed", "failed", "skipped", "cut")]
        told = [part for part in parts if not part.startswith("0 ")]
        return "".join(f", {part}" for part in told) + (f", {len(left)} to come" if left else "")

    def _process(self, step: str, cases: list[str], until: float) -> int:
        """One process of a step, until it ends or its time is up. Its status."""
        plan = StepPlan(
            step,
            tuple(cases),
            str(self.folder),
            self._scratch,
            self.device,
            self.quick,
            until - time.monotonic() + time.time() - 1,
            self._chosen() if step == "compile" else (),
        )
        variables = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        variables["WEFT_TIMEOUT_S"] = str(STEPS[step].timeout_s)
        variables["PYTHONUNBUFFERED"] = "1"
        variables.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        if step in ("proof", "threads"):
            # A kernel of torch's that is loaded at its first launch would wait for all that runs,
            # and so for ranks that wait for this one.
            variables.setdefault("CUDA_MODULE_LOADING", "EAGER")
        if self.device == "cpu":
            variables["TRITON_INTERPRET"] = "1"
        # A group, to be ended with all that it started.
        group: dict[str, Any] = {"process_group": 0}
        if sys.version_info < (3, 11):
            group = {"preexec_fn": os.setpgrp}
        process = subprocess.Popen(
            [sys.executable, "-m", "tools.gpu.process", json.dumps(asdict(plan))],
            stdin=subprocess.PIPE,  # its end tells the process that this one is gone
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=variables,
            **group,
        )
        said = Said(self.log)
        try:
            self._listen(process, until, said)
        finally:
            late = process.poll() is None and time.monotonic() >= until
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # a driver may not let go of it
                process.wait(_EXIT_S)
            self._hear()
        code = gpu_report.FAILED if process.returncode is None else process.returncode
        under_way = [case for of, case in self.outcomes.begun if of == step]
        self.outcomes.end()
        if late or code == 0:  # its time was up: a later run goes on with them
            self.write()
            return code
        if not under_way and code not in (0, gpu_report.FAILED, gpu_report.GO_ON):
            under_way = cases[:1]  # it could not begin
        for case in under_way:
            why = f"{said.end}the process ended with {gpu_page.status(code)}"
            launches = gpu_report.LastLaunches(Path(self._scratch)).read()
            entry = {"outcome": "failed", "seconds": 0, "why": why, "launches": launches}
            append(self.record, {"step": step, "case": case, **entry})
        self._hear()
        self.write()
        return code

    def _listen(self, process: subprocess.Popen[bytes], until: float, say: Said) -> None:
        """Pass on what a process says and records."""
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while process.poll() is None and time.monotonic() < until and not self._hangs():
                if selector.select(0.2):
                    if news := process.stdout.read():
                        say(news)
                    else:
                        time.sleep(0.05)
                self._hear()
        say(process.stdout.read() or b"")

    def _hangs(self) -> bool:
        """Whether a case takes longer than it may, and its process has not ended for that."""
        return any(
            time.time() - begun > gpu_steps.case_s(step, case, self.device) + _EXIT_S
            for (step, case), begun in self.outcomes.begun.items()
        )

    def _hear(self) -> None:
        """Take the lines that are new, tell them, and write the page."""
        with open(self.record, "rb") as file:
            file.seek(self._size)
            news = file.read()
        news = news[: news.rfind(b"\n") + 1]
        self._size += len(news)
        for line in news.splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                self.log(f"not a line: {line.decode(errors='replace')[:200]}")
                continue
            self.outcomes.take(entry)
            if "outcome" in entry:
                if entry["outcome"] != "cut":
                    self._now.add((entry["step"], entry["case"]))
                self.log.write(gpu_page.outcome_lines(entry, self.device, self.quick))
        if time.monotonic() - self._written >= _PAGE_S:
            self.write()

    def write(self) -> None:
        """The page and the figures, which follow from the record: nothing is lost here."""
        self._written = time.monotonic()
        try:
            gpu_page.write_gpu_page(self.folder, self.outcomes.runs, self.outcomes.found)
        except Exception as error:  # not the end of what is measured
            self.log(f"no page: {gpu_report.traceback_text(error)}")


def _parser() -> argparse.ArgumentParser:
    about = "\n".join(f"    {step.name:<10} {step.about}" for step in STEPS.values())
    parser = Parser("python -m tools.gpu", (__doc__ or "").format(steps=about))
    parser.add_argument("--minutes", type=float, default=30.0, metavar="N", help="end by then (30)")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where results are kept (--resume, out/gpu)"
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="DIR",
        help="go on from the results in DIR; with --out, from a copy of them there",
    )
    parser.add_argument(
        "--only", nargs="+", choices=list(STEPS), metavar="STEP", help="these steps"
    )
    parser.add_argument(
        "--skip", nargs="+", choices=list(STEPS), default=[], metavar="STEP", help="all but these"
    )
    parser.add_argument(
        "--case",
        nargs="+",
        metavar="NAME",
        help="these cases, or all whose names have this in them, again if they have passed",
    )
    parser.add_argument("--list", action="store_true", help="print the steps and their cases")
    parser.add_argument("--quick", action="store_true", help="few cases, small sizes")
    parser.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        default="cuda",
        help="cpu: a rehearsal with interpreted kernels; use with --quick",
    )
    parser.add_argument(
        "--publish",
        action="store_true",
        help="then copy figures into bench/results, tuned launches into kernels/tuned, the page to "
        "docs; without a GPU, of the results in DIR",
    )
    return parser


def main(argv: Sequence[str] | None = None, begun: float | None = None) -> int:
    """Run the steps. The exit status is 0 if all passed, 1 if a case failed, 130 if some remain.

    Its time counts from `begun`, of time.monotonic(): from now on unless given.
    """
    begun = time.monotonic() if begun is None else begun
    parser = _parser()
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    steps = [step for step in args.only or STEPS if step not in args.skip]
    every = {step: gpu_steps.names(step, args.device, args.quick, steps) for step in steps}
    wanted = _chosen(args.case, every)
    if args.case and not any(wanted.values()):
        parser.error(f"no case is named like {' or '.join(args.case)}: --list shows them")
    if args.list:
        for step, cases in wanted.items():
            print(f"{step}: {STEPS[step].about}, {STEPS[step].minutes:g} minutes")
            print("".join(f"    {case}\n" for case in cases), end="")
        return 0
    folder = args.out or args.resume or Path("out/gpu")
    nothing = args.device == "cuda" and not torch.cuda.is_available()
    if nothing:
        print(NOTHING_TO_DO)
    if nothing and not args.publish:
        return 0
    if args.resume and not (args.resume / FILES[0]).exists():
        parser.error(f"--resume {args.resume}: there is no {FILES[0]} in it")
    try:
        make_folder(folder)
    except ValueError as error:
        parser.error(str(error))
    if args.resume and args.resume.resolve() != folder.resolve():
        for path in args.resume.iterdir():
            shutil.copyfile(path, folder / path.name)  # a copy may be read-only
    elif not args.resume and (folder / FILES[0]).exists() and not args.case:
        parser.error(f"--out {folder} has results already: --resume {folder} goes on from them")
    if nothing:
        found = read_record(folder / FILES[0])
        gpu_page.write_gpu_page(folder, found.runs, found.found)
        gpu_page.publish_results(folder, ROOT)
        return 0
    # Gloo would look for the host's name in a network that there may not be.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    log = Log(folder / "log.txt", begun)
    until = begun + 60 * args.minutes - _MARGIN_S
    this = Slice(
        folder,
        args.device,
        args.quick,
        until,
        log,
        wanted,
        bool(args.case),
    )
    log(f"make gpu: {shlex.join(sys.argv[1:] if argv is None else argv)}: results in {folder}")
    if missing := [name for name in ("pytest_benchmark", "rich") if not _is_there(name)]:
        log(f"without {' and '.join(missing)}: no bars, no statistics of rounds; else the same")
    try:
        this.go(steps)
    except KeyboardInterrupt:
        log("interrupted")
    this.write()
    left = {step: len(cases) for step in steps if (cases := this.left(step))}
    ended = this.outcomes
    log(
        f"{ended.count('passed')} passed, {ended.count('failed')} failed, "
        f"{ended.count('skipped')} skipped; page: {folder / 'page.md'}"
    )
    if args.publish:
        gpu_page.publish_results(folder, ROOT)
    if left:
        told = ", ".join(f"{count} of {step}" for step, count in left.items())
        log(f"to come: {told}; --resume {folder} goes on")
    if ended.count("failed"):
        return 1
    return 130 if left else 0


def _chosen(names: Sequence[str] | None, cases: dict[str, list[str]]) -> dict[str, list[str]]:
    """The cases of each step with one of these names, else those that have one in theirs.

    Of compile, also what the chosen cases of the other steps launch.
    """
    if not names:
        return cases
    found = {step: [case for case in each if case in names] for step, each in cases.items()}
    if not any(found.values()):
        found = {
            step: [case for case in each if any(name in case for name in names)]
            for step, each in cases.items()
        }
    if compiled := cases.get("compile"):
        parts = gpu_steps.solo_parts(quick=False)
        needed = {
            "parts" if case in parts else step for step, each in found.items() for case in each
        }
        found["compile"] = [case for case in compiled if case in {*needed, *found["compile"]}]
    return found


def _is_there(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError:
        return False
    return True


def _started() -> float:
    """When this process began, of time.monotonic(): torch takes seconds to be imported."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (AttributeError, OSError):  # not Linux
        age = 0.0
    return time.monotonic() - (age if 0 < age < 120 else 0.0)


if __name__ == "__main__":
    sys.exit(main(begun=_started()))
