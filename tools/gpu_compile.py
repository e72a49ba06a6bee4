"""The step `compile` of `make gpu`: what the other steps launch, into Triton's cache.

No process starts others, and no rank waits for another: kernels are compiled, not launched. Those
of ranks as processes are compiled for threads that have a whole chip each.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal
from unittest.mock import patch

import torch

from tools.gpu_report import CutError, GpuReport
from tools.gpu_steps import (
    Plan,
    names,
    options,
    solo_parts,
    solo_specs,
    suite_cases,
    suites_of,
    tune_specs,
)

_SEARCHES = 8  # the first ones, of some 30 launches each; the step compiles the others itself
_CALL_S = 240.0  # that the ranks of a call may take: some have five kernels


def run(plan: Plan, report: GpuReport) -> None:
    """Compile what each case names, as far as there is time."""
    from weft.bench.solo.compiling import Compilers, Done
    from weft.sim.unwaited import PARTS

    device = torch.device(plan.device)
    compilers = Compilers(device)
    for name in plan.cases:
        if report.left_s < 5:
            return
        with report.case(name, report.left_s + 5) as found:
            until = time.monotonic() + report.left_s - 2
            say = partial(print, "compile:", flush=True)
            done = compilers.run(units(name, plan), until, say)
            for part in PARTS if name == "solo" else ():
                some = [
                    (each, _of_solo(spec, device, alone=False))
                    for each, (spec, of) in solo_parts(plan.quick).items()
                    if of == part
                ]
                others = Compilers(device, part)
                more = others.run(some, until, say)
                others.close()
                done = Done(done.ended + more.ended, done.wrong + more.wrong, done.left + more.left)
            found |= {"compiled": done.ended, "processes": compilers.count}
            if name == "tune":  # a launch that a chip has too little for is out of the search
                found["refused"] = done.wrong
            elif done.wrong:
                raise RuntimeError("\n".join(done.wrong))
            if done.left:
                raise CutError(f"no time for {len(done.left)}, first {done.left[0]}")
    compilers.close()


def units(name: str, plan: Plan) -> list[tuple[str, Any]]:
    """What a case of the step compiles."""
    from weft.bench.solo import sweep

    device = torch.device(plan.device)
    if name == "kernels":
        return [
            *_calls(plan),
            *((f"small {s.name}", _of_solo(s, device, alone=False)) for s in _small()),
        ]
    if name == "solo":
        return [(each, _of_solo(spec, device)) for each, spec in solo_specs(plan.quick).items()]
    if name == "plain":
        return [
            (each, partial(of_suite, each, plan.device, plan.quick))
            for _, each in suite_cases("plain", plan.device, plan.quick)
        ]
    return [
        (f"{each}, {number}", partial(sweep.compile_choice, spec, choice, device))
        for each, spec in [*tune_specs(plan.quick).items()][:_SEARCHES]
        for number, choice in enumerate(sweep.choices_of(spec, device)[1])
    ]


def _of_solo(spec: Any, device: torch.device, alone: bool = True) -> partial[None]:
    from weft.bench.solo.compiling import compiled

    return partial(compiled, spec, device, alone=alone)


def _small() -> list[Any]:
    from tools.gpu_process import small_cases

    return small_cases()


def _calls(plan: Plan) -> list[tuple[str, Any]]:
    """The calls of ranks as threads and as processes: each of each number of ranks."""
    from tools.gpu_cases import calls_of, parsed

    work = dict.fromkeys(
        (step == "processes", parsed(name)[0], call)
        for step in ("proof", "threads", "processes")
        for name in names(step, plan.device, plan.quick)
        if name.startswith("W")
        for call in calls_of(name)
    )
    return [
        (f"{call}, {W} {'processes' if whole else 'threads'}",
         partial(of_call, call, W, plan.device, whole))
        for whole, W, call in work
    ]  # fmt: skip


def of_call(call: str, W: int, kind: Literal["cuda", "cpu"], whole: bool) -> None:
    """A call of W ranks; `whole`: which have a chip each."""
    from tools import gpu_cases
    from tools.gpu_process import on_ranks
    from weft.kernels.engine import chips

    def body(rank: int) -> None:
        place = gpu_cases.Place(rank, W, torch.device(kind), kind == "cpu")
        gpu_cases.make_once(f"W{W}/plain/{call}", place)

    unshared = patch.object(chips, "_share", lambda chip, ranks, sms: chip)
    with unshared if whole else nullcontext():
        on_ranks(kind, W, body, _CALL_S)


def of_suite(name: str, device: str, quick: bool) -> None:
    """Our kernel of a case of the step `plain`."""
    (given,) = options("plain", device, quick)
    suite, spec = next(
        (suite, spec)
        for suite in suites_of("plain")
        for spec in suite.cases(given)
        if spec.name == name
    )
    with torch.device(device):
        suite.prepare(spec, given).variants["weft"](0)
