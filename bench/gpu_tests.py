"""Runs the tests that need a GPU, keeping outcomes; tests that have passed are not run again.

A pytest process for each number of ranks runs at the same time: they spend most of the time in
Triton's compiler, and ranks that share a GPU take turns anyway. For each test they append a line to
one file (`tests/conftest.py`), which is complete whenever they are killed:

    {"ranks": 2, "tests": ["tests/test_gpu.py::..", ..]}      at the start: all tests
    {"ranks": 2, "test": "tests/test_gpu.py::..", "outcome": "failed", "seconds": 3.1, "why": ".."}
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
_FILES = ("tests/test_gpu.py", "tests/test_gpu_dtensor.py", "tests/test_sim_gpu.py")
_WHY_CHARACTERS = 1500  # how much of the end of a failure is shown


@dataclass
class Outcomes:
    """What became of the tests so far, by number of ranks and name.

    Attributes:
        names: the tests that there are with each number of ranks, where pytest has told.
        broken: what pytest said that could not run them.
    """

    counts: tuple[int, ...]
    names: dict[int, list[str]] = field(default_factory=dict)
    found: dict[tuple[int, str], dict[str, Any]] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def take(self, line: str) -> dict[str, Any] | None:
        """A line of the file: the outcome of a test, if it is one of these numbers of ranks."""
        entry: dict[str, Any] = json.loads(line)
        if entry["ranks"] not in self.counts:
            return None
        if "tests" in entry:
            self.names[entry["ranks"]] = entry["tests"]
            return None
        self.found[entry["ranks"], entry["test"]] = entry
        return entry

    def count(self, outcome: str | None) -> int:
        """How many of the tests that there are ended so; None: have not run."""
        ends = (self.found.get((count, name)) for count in self.names for name in self.names[count])
        return sum((end and end["outcome"]) == outcome for end in ends)

    @property
    def finished(self) -> bool:
        return len(self.names) == len(self.counts) and not self.count(None)

    @property
    def wrong(self) -> bool:
        """Whether a test failed, or tests could not be run at all."""
        return bool(self.count("failed") or self.broken)

    def __str__(self) -> str:
        if self.broken:
            return "could not be run"
        kinds = {"passed": "passed", "skipped": "skipped", "failed": "failed", None: "not run"}
        told = [f"{self.count(kind)} {text}" for kind, text in kinds.items() if self.count(kind)]
        if self.names and len(self.names) < len(self.counts):
            told.append("others not run")
        return ", ".join(told) or "not run"


def read(record: Path, counts: Sequence[int]) -> Outcomes:
    """The outcomes that a file keeps."""
    outcomes = Outcomes(tuple(counts))
    for line in record.read_text().splitlines(keepends=True) if record.exists() else ():
        if line.endswith("\n"):
            outcomes.take(line)
    return outcomes


def run(
    counts: Sequence[int],
    record: Path,
    *,
    until: float | None = None,
    say: Callable[[str], None] = print,
) -> Outcomes:
    """Run the tests that have not passed according to `record`, with each number of ranks.

    Args:
        until: of time.monotonic(); what has not run by then is left out. None: no limit.
        say: told of every test that ends.
    """
    record.parent.mkdir(parents=True, exist_ok=True)
    record.touch()
    outcomes = read(record, counts)
    outcomes.names.clear()  # they are reported again
    with open(record) as news, tempfile.TemporaryDirectory(prefix="weft-gpu-tests-") as folder:
        news.seek(0, os.SEEK_END)
        logs = {count: Path(folder) / str(count) for count in counts}
        processes = {count: _begin(count, record, logs[count]) for count in counts}
        try:
            while any(process.poll() is None for process in processes.values()):
                if until is not None and time.monotonic() > until:
                    break
                time.sleep(0.2)
                _hear(news, outcomes, say)
        finally:
            ended = [count for count, process in processes.items() if _end(process)]
        _hear(news, outcomes, say)
        for count, process in processes.items():
            # 0: all passed; 1: some failed; 5: none was left.
            if count not in ended and process.returncode not in (0, 1, 5):
                outcomes.broken.append(logs[count].read_text()[-_WHY_CHARACTERS:])
    return outcomes


def _begin(count: int, record: Path, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *_FILES]
    # No plugins but ours: they need not be there, and others may be.
    command += ["-o", "addopts=", "-p", "no:cacheprovider"]
    command.append("--maxfail=12")  # what fails here mostly fails everywhere, by its time limit
    # Kernels must be compiled, whatever the caller's shell says.
    variables = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    # Peers compile what a rank waits for, each by itself: some seconds apart. Of ranks that share a
    # GPU a wait lasts several times as long, as they poll in turns.
    variables.setdefault("WEFT_TIMEOUT_S", "20")
    variables |= {"GPU_RANKS": str(count), "GPU_RECORD": str(record.resolve())}
    variables["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    with open(log, "wb") as said:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=variables,
            stdout=said,
            stderr=subprocess.STDOUT,
            # A group, to be ended with its ranks; no session, as who ends ours ends all in it.
            preexec_fn=os.setpgrp,
        )


def _end(process: subprocess.Popen[bytes]) -> bool:
    """End pytest, and with it its ranks. False if it had ended by itself."""
    if process.poll() is not None:
        return False
    process.send_signal(signal.SIGINT)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return True


def _hear(news: IO[str], outcomes: Outcomes, say: Callable[[str], None]) -> None:
    while True:
        place = news.tell()
        line = news.readline()
        if not line.endswith("\n"):
            news.seek(place)  # none, or half of one
            return
        entry = outcomes.take(line)
        if entry is not None:
            name = entry["test"].rpartition("::")[2]
            say(f"{entry['ranks']} ranks: {name}: {entry['outcome']}, {entry['seconds']:.1f} s")
            if entry.get("why"):
                say(entry["why"][-_WHY_CHARACTERS:])
