"""Kernels compiled ahead, in parallel processes: nothing is launched, none can hold up the rest.

    units of work  -->  Compilers: a process a core  -->  Triton's cache

A unit makes the launches of some call inside `compiling()`.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

import weft
from weft.bench.measure import short
from weft.bench.problem import Spec
from weft.bench.solo import cases
from weft.launch import cores
from weft.sim import unwaited
from weft.sim.run import solo
from weft.sim.unwaited import PARTS

_WORKER_BYTES = 5 << 30  # of the GPU's memory, for a process that compiles
# What its context is to hold: one queue, as nothing waits there (ranks that
# are threads have 32), and of torch's kernels those that it uses. Contexts of many processes
# can be more than a GPU has, however little their tensors take.
_FRUGAL = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "GPU_MAX_HW_QUEUES": "1",
    "CUDA_MODULE_LOADING": "LAZY",
}
_STUCK_S = 120.0  # in which one unit at least must have ended

Unit = tuple[str, Callable[[], None]]  # a name, and what can be pickled


@contextmanager
def compiling() -> Iterator[None]:
    """Inside the block, kernels are compiled as they would be launched, and not launched."""
    run_kernel = triton.JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        made = run_kernel(kernel, *args, grid=grid, warmup=True, **options)
        made._init_handles()  # Triton 3.6 has the C compiler make what launches it
        return made

    def nothing(*args: Any, **options: Any) -> _Interpreted:
        return _Interpreted()

    with (
        patch.object(triton.JITFunction, "run", compile_only),
        patch.object(InterpretedFunction, "run", nothing),
    ):
        yield


class _Interpreted:
    """A kernel that needs no compilation."""

    def _init_handles(self) -> None:
        pass


def compiled(spec: Spec, device: torch.device, *, alone: bool = True) -> None:
    """Make the launches of a case once, inside `compiling()`; `alone`: for a group of one, too."""
    rank = 1 % spec.params["ranks"]
    world = solo.SoloWorld(spec.params["ranks"], device, hollow=True)
    try:
        with weft.engine("triton"):
            problem = cases.workload_of(spec, rank, device)
            problem.prepare(world)
            with world.at(rank):
                problem.run(rank)
            if alone and problem.alone is not None:
                problem.alone()
    finally:
        world.close()
        problem = None  # type: ignore[assignment] # its tensors go before the next case's come


def _unit(run: Callable[[], None]) -> float:
    """In a process of the pool: the seconds that it took."""
    start = time.monotonic()
    try:
        with compiling():
            run()
    finally:
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # for the other processes
    return time.monotonic() - start


@contextmanager
def _frugal() -> Iterator[None]:
    """Processes that are started in the block have `_FRUGAL` in their environment."""
    before = {name: os.environ.get(name) for name in _FRUGAL}
    os.environ.update(_FRUGAL)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _begin_worker(part: str) -> None:
    os.nice(5)
    if part:
        unwaited.leave_out(part)


@dataclass
class Done:
    """What became of units: how many ended, why some failed, and which had no time."""

    ended: int = 0
    wrong: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


class Compilers:
    """Processes that compile.

    Args:
        part: of `PARTS`: their kernels lack it.

    Attributes:
        count: how many; fewer once memory was short.
    """

    def __init__(self, device: torch.device, part: str = "") -> None:
        self.count, self._part = cores(), part
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            self.count = max(1, min(self.count, free // _WORKER_BYTES))
        self._pool: ProcessPoolExecutor | None = None

    def run(
        self, units: Sequence[Unit], until: float, say: Callable[[str], None] = lambda text: None
    ) -> Done:
        """Run all units, or what there is time for until `until` of time.monotonic().

        Where memory is short for a unit, the others under way end first. Then half as many
        processes go on, which begin with that unit: the old ones hold memory even when they are
        idle. A process that dies fails the units that were under way, as it is not known whose
        fault it was.
        """
        done, todo, again = Done(), list(units), list[Unit]()
        retried: set[str] = set()
        running: dict[Future[float], Unit] = {}
        ended_at = time.monotonic()
        while todo or running or again:
            if again and not running:
                self.close()
                self.count = max(1, self.count // 2)
                todo, again = again + todo, []
            while todo and not again and len(running) < self.count:
                unit = todo.pop(0)
                running[self._submit(unit[1])] = unit
            now = time.monotonic()
            patience = min(until, ended_at + _STUCK_S) - now
            ended, _ = wait(running, timeout=max(0.0, patience), return_when=FIRST_COMPLETED)
            if not ended:
                done.left += [name for name, _ in (*running.values(), *again, *todo)]
                self._kill()
                return done
            ended_at = time.monotonic()
            for future in ended:
                unit = running.pop(future)
                try:
                    say(f"{unit[0]}: {future.result():.1f} s")
                    done.ended += 1
                except BrokenProcessPool:
                    done.wrong.append(f"{unit[0]}: its process, or one beside it, died")
                    self._pool = None
                except Exception as error:  # whatever it is fails where it is launched as well
                    why = f"{unit[0]}: {type(error).__name__}: {short(str(error))}"
                    if "out of memory" in str(error) and unit[0] not in retried:
                        retried.add(unit[0])
                        again.append(unit)
                        say(f"{why}: again, by fewer processes")
                        continue
                    done.wrong.append(why)
                    say(why)
        return done

    def _submit(self, run: Callable[[], None]) -> Future[float]:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self.count, get_context("spawn"), _begin_worker, (self._part,)
            )
        try:
            with _frugal():  # as it may start a process, whose imports initialise the driver
                return self._pool.submit(_unit, run)
        except BrokenProcessPool:  # since the last look
            self._pool = None
            return self._submit(run)

    def close(self) -> None:
        """End the processes: nothing runs in them."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _kill(self) -> None:
        assert self._pool is not None
        processes = list((self._pool._processes or {}).values())
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()
        self._pool = None


def precompile(
    args: argparse.Namespace, specs: Sequence[Spec], device: torch.device, until: float | None
) -> int:
    """Compile the kernels of all cases: see `weft.bench.solo.command`."""
    if device.type == "cpu":
        print("kernels are interpreted on a CPU: there is nothing to compile")
        return 0
    began, status = time.monotonic(), 0
    units = [(spec.name, partial(compiled, spec, device)) for spec in specs]
    for part in ["", *PARTS] if args.parts else [""]:
        compilers = Compilers(device, part)
        done = compilers.run(
            units, began + 86400 if until is None else until, partial(print, flush=True)
        )
        compilers.close()
        print(
            f"{PARTS.get(part, 'kernels')}: {done.ended} compiled by {compilers.count} processes, "
            f"{time.monotonic() - began:.0f} s, {len(done.left)} had no time"
        )
        status = 130 if done.left or status == 130 else max(status, int(bool(done.wrong)))
    return status
