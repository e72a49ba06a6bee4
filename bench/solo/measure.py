"""The measuring of `weft bench solo`: case by case in this process, parts of them in others."""

from __future__ import annotations

import argparse
import gc
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

import weft
from weft.bench.cli import has_failed
from weft.bench.environment import environment
from weft.bench.measure import as_list, deviation, order, short, time_limit
from weft.bench.problem import Spec
from weft.bench.report.tables import times_of
from weft.bench.rows import Case, Result, Timing
from weft.bench.solo import cases, compiling, page, rates
from weft.cli import make_folder
from weft.kernels.engine.chips import chip_of
from weft.markdown import markdown_lines
from weft.sim import unwaited
from weft.sim.run import solo
from weft.sim.unwaited import PARTS

MAIN, COPYING = "weft", "copying inside the chip"
_WARMUP = 2
_Step = Callable[[], Any]
_MARGIN_S = 5.0  # before the limit


class Stopwatch:
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

    def host_us(self, call: Callable[[], Any], before: Callable[[], Any], calls: int) -> float:
        """What the host takes for one of `calls` calls, each after `before`, which does not count;
        the GPU need not end them.
        """
        self.synchronize()
        us = 0.0
        for _ in range(calls):
            before()
            start = time.perf_counter()
            call()
            us += (time.perf_counter() - start) * 1e6 / calls
        self.synchronize()
        # At up to 2 GHz, with a margin for a host that other work disturbs.
        self._cycles = max(self._cycles, int(3 * us * 2000))
        return us


def measured_case(
    spec: Spec,
    device: torch.device,
    quick: bool,
    part: str = "",
    *,
    profiles: bool = False,
    unobserved: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Case:
    """One case.

    Args:
        part: of `PARTS`: only the kernel itself, which lacks it, so that nothing is compared.
        profiles: whether to look, after all else, what each kernel of a call takes.
        unobserved: inside of it nobody adds to what the host does.
    """
    W = spec.params["ranks"]
    rank, case = 1 % W, Case("solo", spec.name, dict(spec.params), main=MAIN)
    case.params |= {"rank": rank}
    world = solo.SoloWorld(W, device)
    try:
        with weft.engine("triton"), own_stream(device), solo.copied_first():
            workload = cases.workload_of(spec, rank, device)
            case.params |= {"flop": workload.flop, "link_bytes": workload.nbytes}
            workload.prepare(world)
            world.learn(workload.run, workload.depth)
        with weft.engine("triton"), own_stream(device), world.at(rank):
            take = _Measurement(case, workload, world, rank, quick, unobserved)
            take.take(part, profiles)
    except Exception as error:  # whatever a case raises is its row, not the end of the run
        case.failure = f"{type(error).__name__}: {short(str(error))}"
    finally:
        workload = None  # type: ignore[assignment]  # its tensors go before the next case's come
        with suppress(RuntimeError):  # of a GPU that refuses all that follows a failure
            world.close()
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return case


def usable(device: torch.device) -> bool:
    """Whether the device still does what it is told: some errors stay until the process ends."""
    try:
        torch.ones(1, device=device).item()
    except RuntimeError:
        return False
    return True


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
        workload: cases.Workload,
        world: solo.SoloWorld,
        rank: int,
        quick: bool,
        unobserved: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.unobserved = unobserved
        self.case, self.workload, self.world, self.rank = case, workload, world, rank
        self.clock = Stopwatch(world.device)
        self.rounds = 3 if quick else 21
        self.copies = False  # whether copy engines are at work

    def run(self) -> Any:
        """The call that is measured."""
        return self.workload.run(self.rank)

    def take(self, part: str, profiles: bool) -> None:
        """Compare and time everything, or what is left without a `part`."""
        with solo.copied_first(self._copied):
            if part:
                self._time({PARTS[part]: (self.run, self._cold)})
                return
            self.expected = self.workload.expected(self.rank)
            self.world.post()
            error = self._compare(self.run())
            self.case.params["host_us"] = self._host()
            calls = {MAIN: (self.run, self._cold), "warm L2": (self.run, self._warm)}
            found = {name: self._attempt(name, f) for name, f in self.workload.libraries.items()}
            ran = [name for name, made in found.items() if made is not None]
            self.case.peer = ran[0] if ran else ""
            if self.workload.alone:
                same = found[ran[0]] if ran else None
                if self._attempt("alone", lambda: self._alone(same)) is not None:
                    calls["alone"] = self.workload.alone, self.clock.flush
            calls |= {name: (self.workload.libraries[name], self.clock.flush) for name in ran}
            del found
            calls["posting"] = self.world.post, self.clock.flush
            captures = self.clock.on_gpu and not self.copies
            if captures and (replay := self._attempt("graph", self._graph)) is not None:
                calls["graph"] = replay, self._cold
            self._time(calls)
            self.case.beside_quickest(ran)
            self.case.variants[MAIN].error = error
            self.world.post()
            self._compare(self.run())  # still
            if rated := rates.launched_tile(self.case, chip_of(self.world.device)):
                self.case.params["rated"] = rated
        if self.copies:
            self.case.notes.append(
                f"{self.case.name}: the shards lie there when the time begins, as copy engines are "
                f"the link; publishing them is not in it"
            )
            self._attempt(COPYING, self._copying)
        if profiles:
            self._profile()

    def _copying(self) -> None:
        self._host()
        self._time({COPYING: (self.run, self._cold)})

    def _copied(self) -> None:
        self.copies = True
        self.clock.restart()

    def _host(self) -> float:
        """What the host takes for a call, in us, if the GPU is not what it waits for."""
        calls = 2 if self.rounds <= 3 else 20
        with self.unobserved():
            self.clock.host_us(self.run, self.world.post, calls)
            us = self.clock.host_us(self.run, self.world.post, calls)
        self.world.check()
        return us

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
        error = deviation(as_list(made), expected) / self.workload.tolerance
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

    def _alone(self, same: Any) -> Any:
        """Its result, compared with that of a library if one ran."""
        assert self.workload.alone is not None
        made = as_list(self.workload.alone())[:1]  # libraries may have gradients for more heads
        if "epilogue" not in self.case.params and same is not None:
            self._compare(made, as_list(same)[:1])
        return made

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


def run_command(args: argparse.Namespace, command: str, parser: argparse.ArgumentParser) -> int:
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
        return compiling.precompile(args, specs, device, until)
    if args.part:
        unwaited.leave_out(args.part)
    result = Result("solo", environment(1, args.device, torch.get_num_threads()), command=command)
    if args.resume and args.out.exists():
        kept = Result.read(args.out)
        if names_of(kept.environment) == names_of(result.environment):
            result.cases = [case for case in kept.cases if not case.failure]
            broken = {case.name for case in kept.cases if case.failure}
            specs.sort(key=lambda spec: spec.name in broken)  # lest they end each run
        else:
            print(f"{args.out} has figures of another chip: all cases are measured again")
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
                case = measured_case(spec, device, args.quick, args.part, profiles=args.profile)
                longest = max(longest, time.monotonic() - start)
                result.cases.append(case)
                keep()
                times = case.failure or times_of(case)
                print(f"{time.monotonic() - began:4.0f} s {case.name}: {times}", flush=True)
                if case.failure and not usable(device):
                    print("the GPU refuses all that follows: a new run with --resume goes on")
                    return 1
            if args.parts:
                for part in PARTS:
                    _add_part(args, part, result, until)
                    keep()
    except KeyboardInterrupt:
        result.interrupted = True
        print("not all cases were measured: --resume goes on", flush=True)
    keep()
    if result.cases and not args.part:
        _print_tables(result)
    if args.rates:
        for path in rates.write_rates(args.rates, result.cases):
            print(f"wrote {path}")
    if result.interrupted:
        return 130
    return int(any(has_failed(case) for case in result.cases))


def names_of(environment: dict[str, Any]) -> list[str]:
    """The GPUs of a run."""
    return [gpu["name"] for gpu in environment["gpus"]]


def _print_tables(result: Result) -> None:
    try:
        from weft.bench.report import terminal
    except ModuleNotFoundError:  # a machine's own torch has no rich with it
        for table in page.tables_by_kind(result):
            print("\n".join([table.title, *markdown_lines(table.header, table.rows)]))
            print("\n".join([*table.summary, *table.notes]))
        return
    for table in page.tables_by_kind(result):
        terminal.print_table(table)


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
