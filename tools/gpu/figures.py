"""The steps of `make gpu` that measure: solo, tune, plain, ranks. Each case keeps its row."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tools.gpu.report import GpuReport, LastLaunches
from tools.gpu.steps import (
    StepPlan,
    case_s,
    options,
    solo_parts,
    solo_specs,
    suffix,
    suites_of,
    tune_specs,
)


def _device(plan: StepPlan) -> torch.device:
    if plan.device == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class NoFigureError(RuntimeError):
    """There is no time for what is ours, and why."""


def solo(plan: StepPlan, report: GpuReport) -> None:
    """The cases, in this process as long as the GPU is fit for it."""
    from weft.bench.solo import measure
    from weft.sim import unwaited

    device = _device(plan)
    specs = {name: (spec, "") for name, spec in solo_specs(plan.quick).items()}
    specs |= solo_parts(plan.quick)
    part, longest = specs[plan.cases[0]][1], 0.0
    if part:
        unwaited.leave_out(part)
    for name in plan.cases:
        spec, of = specs[name]
        if of != part:  # its kernels need a process of their own
            report.goes_on = True
            return
        if report.left_s < max(5.0, longest) or not _goes_on(report, device):
            return
        start = time.monotonic()
        with (
            report.case(name, case_s(plan.step, name, plan.device)) as found,
            report.launches.noting(lambda: 1),
        ):
            case = measure.measured_case(
                spec, device, plan.quick, part, unobserved=report.launches.unnoted
            )
            found["row"] = case.as_dict()
            _raise_failure(case)
        longest = max(longest, time.monotonic() - start)


def _goes_on(report: GpuReport, device: torch.device) -> bool:
    """Whether the process can go on, after a failure of a case that has not broken the GPU."""
    from weft.bench.solo import measure

    return not report.failed or measure.usable(device)


def _raise_failure(case: Any) -> None:
    """Raise what a case has to tell instead of a time of ours."""
    from weft.bench.cli import has_failed

    if has_failed(case):
        whys = [case.failure, *(f"{n}: {t.failure}" for n, t in case.variants.items() if t.failure)]
        raise NoFigureError("\n".join(filter(None, whys)))


def tune(plan: StepPlan, report: GpuReport) -> None:
    """A search for each problem; its launches are compiled first, if they are not yet."""
    from weft.bench.solo import attention_tiles, sweep
    from weft.bench.solo.compiling import Compilers

    device, specs = _device(plan), tune_specs(plan.quick)
    compilers = Compilers(device)
    for name in plan.cases:
        if report.left_s < 20 or not _goes_on(report, device):
            break
        spec = specs[name]
        with (
            report.case(name, case_s(plan.step, name, plan.device)) as found,
            report.launches.noting(lambda: 1),
        ):
            if device.type == "cuda":
                compilers.run(
                    search_units(name, spec, device),
                    time.monotonic() + min(report.left_s, case_s(plan.step, name, plan.device)) / 2,
                )
            if spec.params["op"] == "ring_attention":
                found["tuned"] = attention_tiles.search_tiles(spec, device, _print_tuning)
                continue
            entry, trials = sweep.search_launches(spec, device, Path(plan.folder), _print_tuning)
            failed = [trial.failure for trial in trials if trial.failure]
            found["tuned"] = entry | {"tried": len(trials), "failed": failed}
    compilers.close()


def search_units(name: str, spec: Any, device: torch.device) -> list[Any]:
    """What a search launches, to be compiled: names, and what compiles them."""
    from weft.bench.solo import attention_tiles, sweep

    if spec.params["op"] == "ring_attention":
        tiles = attention_tiles.tile_choices(spec, device)
        units = [partial(attention_tiles.compile_tiles, spec, each, device) for each in tiles]
    else:
        _, choices = sweep.launch_choices(spec, device)
        units = [partial(sweep.compile_choice, spec, choice, device) for choice in choices]
    return [(f"{name}, {number}", unit) for number, unit in enumerate(units)]


def _print_tuning(text: str) -> None:
    print(f"tune: {text}", flush=True)


def _noting_launches(scratch: str, rank: int) -> AbstractContextManager[None]:
    """In the process of a rank of a suite."""
    return LastLaunches(Path(scratch)).noting(lambda: rank)


def suites(plan: StepPlan, report: GpuReport) -> None:
    """Cases of suites."""
    from weft.bench import runner
    from weft.bench.measure import time_limit

    for each in options(plan.step, plan.device, plan.quick):
        behind, started = suffix(each), [time.monotonic()]

        def wanted(suite: Any, spec: Any, behind: str = behind) -> bool:
            return spec.name + behind in plan.cases

        def begin(name: str, behind: str = behind, started: list[float] = started) -> None:
            started[0] = time.monotonic()
            report.begin(name + behind)

        def keep(case: Any, behind: str = behind, started: list[float] = started) -> None:
            case.name += behind
            kernel = case.variants.get("triton")
            why = ""
            try:
                _raise_failure(case)
            except NoFigureError as reason:
                why = str(reason)
            if not why and plan.device == "cuda" and kernel and not kernel.ok:
                why = f"triton: {kernel.failure}"
            report.end(
                case.name,
                "failed" if why else "passed",
                time.monotonic() - started[0],
                why,
                row=case.as_dict(),
            )

        every = suites_of(plan.step)  # imported before the time counts
        try:
            with time_limit(time.monotonic() + report.left_s - 3):
                results = runner.run_suites(
                    every,
                    each,
                    on_case=keep,
                    on_begin=begin,
                    wanted=wanted,
                    around=partial(_noting_launches, plan.scratch),
                )
        except KeyboardInterrupt:  # before the first case
            return
        if any(result.interrupted for result in results):
            return
