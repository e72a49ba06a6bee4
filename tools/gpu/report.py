"""What a step's process of `make gpu` keeps: lines of its cases, and what its ranks launched."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

from tools.gpu.steps import StepPlan
from weft.kernels.compile.aot import fields_of

Outcome = Literal["passed", "failed", "skipped", "cut"]

# The statuses of a process that a case has failed in, and of one whose other cases need another.
FAILED, GO_ON = 3, 4
_WHY_CHARACTERS = 4000  # of the end of a reason
_LAUNCH_BYTES = 600


class GpuReport:
    """The lines of a step's process."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan, self.failed, self.goes_on = plan, False, False
        self.launches = LastLaunches(Path(plan.scratch))

    @property
    def left_s(self) -> float:
        return self.plan.until - time.time()

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
    def case(self, name: str, case_s: float) -> Iterator[dict[str, Any]]:
        """A case that passes unless the block raises, or takes longer than `case_s`.

        It gives what is to be kept of the case beside its outcome, to be filled in. A watch of its
        own ends the process, as Python hears no signal while it waits for a GPU; also when the
        step's time is up, which is no failure.
        """
        from tools.gpu.cases import ImpossibleError

        start, found = time.monotonic(), dict[str, Any]()
        self.begin(name)

        limit_s = min(case_s, max(self.left_s, 0.0))

        def hang() -> None:
            if limit_s < case_s:
                self.end(name, "cut", limit_s, "the time was up")
                os._exit(0)
            self.end(name, "failed", case_s, f"no end within {case_s:g} s\n{stacks()}")
            os._exit(FAILED)

        watch = threading.Timer(limit_s, hang)
        watch.daemon = True
        watch.start()
        outcome: Outcome = "passed"
        why = ""
        try:
            yield found
        except ImpossibleError as reason:
            outcome, why = "skipped", str(reason)
        except CutError as reason:
            outcome, why = "cut", str(reason)
        except Exception as error:
            outcome, why = "failed", traceback_text(error)
        watch.cancel()
        self.end(name, outcome, time.monotonic() - start, why, **found)


class CutError(Exception):
    """The time of a case was up: there is more to do."""


def append(record: Path, entry: dict[str, Any]) -> None:
    """One write a line: processes may append to the file at the same time, and be killed."""
    line = json.dumps(entry) + "\n"
    file = os.open(record, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(file, line.encode())
    os.close(file)


def traceback_text(error: BaseException) -> str:
    """A traceback whose last line says what is wrong; files as from here, or as packages."""
    text = "".join(traceback.format_exception(error)).strip()
    for folder in (Path(__file__).resolve().parents[2], sysconfig.get_path("purelib")):
        text = text.replace(f"{folder}/", "")
    return text


def stacks() -> str:
    """Where the threads of this process are."""
    frames = sys._current_frames()
    return "\n".join(
        f"{thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident])[-5:])}"
        for thread in threading.enumerate()
        if thread.ident in frames and thread is not threading.current_thread()
    )


class LastLaunches:
    """What each rank launched last, in a file that outlives the process."""

    def __init__(self, scratch: Path) -> None:
        self._path = scratch / "launches"
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT)
        self._notes = True

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
    def noting(
        self, rank: Callable[[], int], before: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Note what is launched in the block, and call `before` each launch."""
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction

        def noted(run: Any) -> Any:
            def run_noted(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
                if self._notes and not warmup:
                    self.note(rank(), launch_line(kernel, grid, options))
                    before()
                return run(kernel, *args, grid=grid, warmup=warmup, **options)

            return run_noted

        with contextlib.ExitStack() as stack:
            for kind in (JITFunction, InterpretedFunction):
                stack.enter_context(patch.object(kind, "run", noted(kind.run)))
            yield

    @contextmanager
    def unnoted(self) -> Iterator[None]:
        """Launches in the block take the host as long as they do elsewhere."""
        self._notes = False
        try:
            yield
        finally:
            self._notes = True


def launch_line(kernel: Any, grid: Any, options: dict[str, Any]) -> str:
    """A launch in a line: the kernel, its grid, its constants and compile options.

    Example:
        all_gather_matmul_kernel[132] RANK=0 block_m=128 num_warps=8
    """
    values: dict[str, Any] = {}
    for name, value in options.items():
        if is_dataclass(value) and not isinstance(value, type):
            values |= fields_of(value)
        elif isinstance(value, (bool, int, float, str)):
            values[name] = value
    shape = grid if isinstance(grid, tuple) else (grid,)
    name = getattr(kernel, "__name__", str(kernel))
    return f"{name}[{', '.join(map(str, shape))}] " + " ".join(
        f"{key}={value}" for key, value in values.items()
    )
