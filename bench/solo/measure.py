"""The measuring of `weft bench solo`: case by case in this process, parts of them in others."""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton

import weft
from weft.bench.cli import failed
from weft.bench.environment import environment
from weft.bench.measure import deviation, listed, order, short, time_limit
from weft.bench.problem import Spec
from weft.bench.report import terminal
from weft.bench.report.tables import said
from weft.bench.rows import Case, Result, Timing
from weft.bench.solo import cases, page
from weft.cli import make_folder
from weft.kernels.engine import kernel_rates
from weft.kernels.engine.chips import chip_of
from weft.kernels.engine.tuning import OPS
from weft.launch import cores
from weft.sim import unwaited
from weft.sim.run import solo
from weft.sim.unwaited import PARTS

MAIN, COPYING = "weft", "copying inside the chip"
_WARMUP = 2
_LEAST_US = 100.0  # of calls whose rate counts
_Step = Callable[[], Any]
_MARGIN_S = 5.0  # before the limit
_WORKER_BYTES = 10 << 30  # of the GPU's memory, for a process that compiles


class Clock:
    """Times calls on a device."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self._cycles = 1_000_000  # for which the GPU waits while the host enqueues a call
        self._begin: Any = None
        if self.on_gpu:
            l2 = torch.cuda.get_device_properties(device).L2_cache_size
            self._other = torch.empty(2 * l2, dtype=torch.uint8, device=device)

    def synchronize(self) -> None:
        """Wait until all is done."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def flush(self) -> None:
        """Fill the L2 with other data."""
        if self.on_gpu:
            self._other.zero_()

    def us(self, call: Callable[[], Any], before: Callable[[], Any]) -> float:
        """What `call` takes on the device, after `before`, which does not count."""
        self.synchronize()
        before()
        if not self.on_gpu:
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e6
        self._begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(self._cycles)
        self._begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        us = float(self._begin.elapsed_time(end)) * 1e3
        self._begin = None
        return us

    def restart(self) -> None:
        """Let the call that is timed begin now."""
        if self._begin is not None:
            self._begin.record()

    def host_us(self, call: Callable[[], Any], calls: int) -> float:
        """What the host takes for one of `calls` calls in a row, which the GPU need not end."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        us = (time.perf_counter() - start) * 1e6 / calls
        self.synchronize()
        # At up to 2 GHz, with a margin for a host that other work disturbs.
        self._cycles = max(self._cycles, int(3 * us * 2000))
        return us


def measured(spec: Spec, device: torch.device, quick: bool, part: str = "") -> Case:
    """One case.

    Args:
        part: of `PARTS`: only the kernel itself, which lacks it, so that nothing is compared.
    """
    W = spec.params["ranks"]
    rank, case = 1 % W, Case("solo", spec.name, dict(spec.params), main=MAIN)
    case.params |= {"rank": rank}
    world = solo.SoloWorld(W, device)
    try:
        with weft.engine("triton"), own_stream(device), solo.copied_first():
            problem = cases.build(spec, rank, device)
            case.params |= {"flop": problem.flop, "link_bytes": problem.nbytes}
            problem.prepare(world)
            world.learn(problem.run, problem.depth)
        with weft.engine("triton"), own_stream(device), world.at(rank):
            _Measurement(case, problem, world, rank, quick).take(part)
    except Exception as error:  # whatever a case raises is its row, not the end of the run
        case.failure = f"{type(error).__name__}: {short(str(error))}"
    finally:
        world.close()
        problem = None  # type: ignore[assignment]  # its tensors go before the next case's come
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return case


def own_stream(device: torch.device) -> AbstractContextManager[object]:
    """A stream that a graph can be captured in, with gradients whose forward ran there."""
    if device.type != "cuda":
        return nullcontext()
    torch.cuda.synchronize(device)
    return torch.cuda.stream(_stream(device))


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class _Measurement:
    """The timings of one case. Inside `world.at(rank)`."""

    def __init__(
        self,
        case: Case,
        problem: cases.Problem,
        world: solo.SoloWorld,
        rank: int,
        quick: bool,
    ) -> None:
        self.case, self.problem, self.world, self.rank = case, problem, world, rank
        self.clock = Clock(world.device)
        self.rounds = 3 if quick else 21
        self.copies = False  # whether copy engines are at work

    def run(self) -> Any:
        """The call that is measured."""
        return self.problem.run(self.rank)

    def take(self, part: str) -> None:
        """Compare and time everything, or what is left without a `part`."""
        with solo.copied_first(self._copied):
            if part:
                self._time({PARTS[part]: (self.run, self._cold)})
                return
            self.expected = self.problem.expected(self.rank)
            self.world.post()
            error = self._compare(self.run())
            self._host()
            calls = {MAIN: (self.run, self._cold), "warm L2": (self.run, self._warm)}
            if self.problem.alone and (alone := self._attempt("alone", self._alone)) is not None:
                calls["alone"] = alone, self.clock.flush
            for name, library in self.problem.libraries.items():
                if self._attempt(name, library) is not None:
                    calls[name] = library, self.clock.flush
            self.case.peer = next((n for n in self.problem.libraries if n in calls), "")
            calls["posting"] = self.world.post, self.clock.flush
            captures = self.clock.on_gpu and not self.copies
            if captures and (replay := self._attempt("graph", self._graph)) is not None:
                calls["graph"] = replay, self._cold
            self._time(calls)
            self.case.variants[MAIN].error = error
            self._profile()
            self.world.post()
            self._compare(self.run())  # still
        if self.copies:
            self.case.notes.append(
                f"{self.case.name}: the shards lie there when the time begins, as copy engines are "
                f"the link; publishing them is not in it"
            )
            self._attempt(COPYING, self._copying)

    def _copying(self) -> None:
        self._host()
        self._time({COPYING: (self.run, self._cold)})

    def _copied(self) -> None:
        self.copies = True
        self.clock.restart()

    def _host(self) -> None:
        """What the host takes, if the GPU is not what it waits for."""
        calls = 2 if self.rounds <= 3 else 20
        self.world.post(2 * calls)
        self.clock.host_us(self.run, calls)
        self.case.params["host_us"] = self.clock.host_us(self.run, calls)
        self.world.check()

    def _cold(self) -> None:
        self.world.post()
        self.clock.flush()

    def _warm(self) -> None:
        self.world.post(2)
        self.run()

    def _compare(self, made: Any, expected: cases.Tensors | None = None) -> float:
        """The deviation from the oracle, or `expected`, in units of the tolerance.

        Raises:
            ValueError: it is more than that.
        """
        self.world.check()
        expected = self.expected if expected is None else expected
        error = deviation(listed(made), expected) / self.problem.tolerance
        if not error <= 1:
            raise ValueError(f"wrong: {error:.3g} times the tolerance away from the oracle")
        return error

    def _attempt(self, name: str, make: Callable[[], Any]) -> Any:
        """The value of `make()`; None, and a reason in the case, if that cannot be had here."""
        try:
            made = make()
            self.clock.synchronize()
            return made
        except Exception as error:  # a row without a time
            self.case.variants[name] = Timing(
                failure=f"{type(error).__name__}: {short(str(error))}"
            )
            return None

    def _alone(self) -> Callable[[], Any]:
        alone = self.problem.alone
        assert alone is not None
        made = listed(alone())[:1]  # libraries may return gradients for more heads of keys
        if "epilogue" not in self.case.params:
            self._compare(made, listed(next(iter(self.problem.libraries.values()))())[:1])
        return alone

    def _graph(self) -> Callable[[], Any]:
        self.world.post()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            made = self.run()
        graph.replay()
        self._compare(made)
        return graph.replay

    def _time(self, calls: dict[str, tuple[_Step, _Step]]) -> None:
        """Time all `calls`, each after the step beside it, in turn, round after round."""
        names = [*calls]
        for name in names * _WARMUP:
            self.clock.us(*calls[name])
        times: dict[str, list[float]] = {name: [] for name in names}
        for number in range(self.rounds):
            for i in order(len(names), number):
                times[names[i]].append(self.clock.us(*calls[names[i]]))
        self.world.check()
        for name in names:
            median = statistics.median(times[name])
            self.case.variants[name] = Timing(times[name], [median])

    def _profile(self) -> None:
        """What each kernel of a call takes, by name, as far as a profiler can tell here."""
        if not self.clock.on_gpu:
            return
        calls = 5
        try:
            from torch.profiler import ProfilerActivity, profile

            self.world.post(calls)
            self.clock.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as found:
                for _ in range(calls):
                    self.run()
                torch.cuda.synchronize()
            self.case.params["kernels_us"] = {
                event.key[:60]: event.self_device_time_total / calls
                for event in found.key_averages()
                if event.self_device_time_total
            }
        except Exception as error:  # for lack of a counter, a right, or a library
            self.case.notes.append(f"no profile: {short(str(error))}")


def run(args: argparse.Namespace, command: str, parser: argparse.ArgumentParser) -> int:
    """What the command line asks for: see `weft.bench.solo.command`."""
    began, device = time.monotonic(), torch.device(args.device)
    until = began + 60 * args.minutes - _MARGIN_S if args.minutes else None
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    ranks = args.ranks or ([2] if args.quick else [8, 2, 4])
    specs = [each for each in cases.cases(args.quick, ranks) if args.filter in each.name]
    if not specs:
        parser.error(f"--filter {args.filter!r}: no case has that: see --list")
    if args.list:
        print("\n".join(spec.name for spec in specs))
        return 0
    if args.precompile:
        return precompile(args, specs, device, until)
    if args.part:
        unwaited.leave_out(args.part)
    result = Result("solo", environment(1, args.device, torch.get_num_threads()), command=command)
    if args.resume and args.out.exists():
        kept = Result.read(args.out)
        result.cases = [case for case in kept.cases if not case.failure]
    if args.out:
        try:
            make_folder(args.out.parent)
        except ValueError as error:
            parser.error(str(error))

    def keep() -> None:
        if args.out:
            result.write(args.out)

    known = {case.name for case in result.cases}
    longest = 0.0
    try:
        with time_limit(until):
            for spec in specs:
                if spec.name in known:
                    continue
                start = time.monotonic()
                if until is not None and start + longest > until:
                    raise KeyboardInterrupt
                case = measured(spec, device, args.quick, args.part)
                longest = max(longest, time.monotonic() - start)
                result.cases.append(case)
                keep()
                print(f"{time.monotonic() - began:4.0f} s {said(case)}", flush=True)
            if args.parts:
                for part in PARTS:
                    _add_part(args, part, result, until)
                    keep()
    except KeyboardInterrupt:
        result.interrupted = True
        print("not all cases were measured: --resume goes on", flush=True)
    keep()
    if result.cases and not args.part:
        for table in page.tables(result):
            terminal.show(table)
    if args.rates:
        path = kernel_rates.write(args.rates, chip_of(device).name, rates_of(result, device))
        print(f"wrote {path}")
    if result.interrupted:
        return 130
    return int(any(failed(case) for case in result.cases))


def rates_of(
    result: Result, device: torch.device, least_us: float = _LEAST_US
) -> list[tuple[kernel_rates.Tile, float]]:
    """How fast the plain fused matmuls were relative to the library's, by their tiles.

    Args:
        least_us: shorter ones do not count, as signals and launches are in their times.
    """
    found, chip = [], chip_of(device)
    for case in result.cases:
        p, timed = case.params, case.timed
        plain = p["op"] in OPS and "epilogue" not in p
        if not plain or not {MAIN, case.peer} <= timed.keys() or timed[MAIN].us < least_us:
            continue
        W, gathers = p["ranks"], p["op"] == "all_gather_matmul"
        N, K = (p["N"] // W, p["K"]) if gathers else (p["N"], p["K"] // W)
        tile = kernel_rates.tile_of(p["op"], chip, p["M"], N, K, getattr(torch, p["dtype"]), W)
        found.append((tile, timed[case.peer].us / timed[MAIN].us))
    return found


def _add_part(args: argparse.Namespace, part: str, result: Result, until: float | None) -> None:
    """Time the kernels that lack `part` in a process of their own, and add them to the cases."""
    todo = [case for case in result.cases if not case.failure and PARTS[part] not in case.variants]
    if not todo:
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "part.json"
        command = [sys.executable, "-m", "weft", "bench", "solo", "--part", part, "--out", str(out)]
        command += ["--device", args.device, "--filter", args.filter]
        command += ["--quick"] * args.quick
        if args.ranks:
            command += ["--ranks", ",".join(map(str, args.ranks))]
        if until is not None:
            command += ["--minutes", str(max(0.1, (until - time.monotonic()) / 60))]
        status = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
        found = {case.name: case for case in Result.read(out).cases} if out.exists() else {}
    for case in todo:
        if case.name in found:
            other = found[case.name]
            case.variants |= other.variants or {PARTS[part]: Timing(failure=other.failure)}
    if status == 130:
        raise KeyboardInterrupt


def precompile(
    args: argparse.Namespace, specs: Sequence[Spec], device: torch.device, until: float | None
) -> int:
    """Compile the kernels of all cases into Triton's cache, in parallel processes."""
    if device.type == "cpu":
        print("kernels are interpreted on a CPU: there is nothing to compile")
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    workers = max(1, min(cores(), free // _WORKER_BYTES, len(specs)))
    parts = ["", *PARTS] if args.parts else [""]
    processes, began = [], time.monotonic()
    context = get_context("spawn")
    for i in range(workers):
        part = parts[i % len(parts)]
        share = [i // len(parts), -(-(workers - i % len(parts)) // len(parts))]
        process = context.Process(target=_compile, args=(specs[share[0] :: share[1]], part, device))
        process.start()
        processes.append(process)
    for process in processes:
        process.join(None if until is None else max(0.0, until - time.monotonic()))
    late = [process for process in processes if process.is_alive()]
    for process in late:
        process.kill()
    print(
        f"compiled in {time.monotonic() - began:.0f} s by {workers} processes"
        + (f", {len(late)} of which were cut short" if late else "")
    )
    if late:
        return 130
    return int(any(process.exitcode for process in processes))


def _compile(specs: Sequence[Spec], part: str, device: torch.device) -> None:
    """One of the processes of `precompile`."""
    os.nice(5)
    if part:
        unwaited.leave_out(part)
    failures = 0
    for spec in specs:
        with compiling():
            case = compiled(spec, device)
        if case:
            failures += 1
            print(f"{spec.name}: {case}", flush=True)
    sys.exit(failures > 0)


@contextmanager
def compiling() -> Iterator[None]:
    """Inside the block, kernels are compiled as they would be launched, and not launched."""
    run_kernel = triton.JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run_kernel(kernel, *args, grid=grid, warmup=True, **options)

    with patch.object(triton.JITFunction, "run", compile_only):
        yield


def compiled(spec: Spec, device: torch.device) -> str:
    """Make the launches of a case once; why that failed."""
    rank = 1 % spec.params["ranks"]
    world = solo.SoloWorld(spec.params["ranks"], device)
    world.team.learning = True
    try:
        with weft.engine("triton"):
            problem = cases.build(spec, rank, device)
            problem.prepare(world)
            world.team.learning = True
            with world.at(rank):
                problem.run(rank)
            if problem.alone is not None:
                problem.alone()
    except Exception as error:
        return f"{type(error).__name__}: {short(str(error))}"
    finally:
        world.close()
        problem = None  # type: ignore[assignment]
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return ""
