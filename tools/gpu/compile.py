"""The step `compile` of `make gpu`: what the other steps launch, into Triton's cache.

No process starts others, and no rank waits for another: kernels are compiled, not launched. Those
of ranks as processes are compiled for threads that have a whole chip each.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from unittest.mock import patch

import torch

from tools.gpu.report import CutError, GpuReport
from tools.gpu.steps import (
    StepPlan,
    names,
    options,
    solo_parts,
    solo_specs,
    suite_cases,
    suites_of,
    tune_specs,
)

if TYPE_CHECKING:
    from weft.bench.solo.compiling import Unit

_SEARCHES = 8  # the first ones, of some 30 launches each; the step compiles the others itself
_CALL_S = 240.0  # that the ranks of a call may take: some have five kernels


def compile_cases(plan: StepPlan, report: GpuReport) -> None:
    """Compile what each case names, as far as there is time."""
    from weft.bench.solo.compiling import Compilers
    from weft.sim.unwaited import PARTS

    device = torch.device(plan.device)
    whole = Compilers(device)
    for name in plan.cases:
        if report.left_s < 5:
            return
        with report.case(name, report.left_s + 5) as found:
            until = time.monotonic() + report.left_s - 2
            say = partial(print, "compile:", flush=True)
            if name == "parts":  # kernels that lack a part: in processes of their own
                each = [Compilers(device, part) for part in PARTS]
                ends = [
                    c.run(_parts(part, plan), until, say)
                    for c, part in zip(each, PARTS, strict=True)
                ]
                for compilers in each:
                    compilers.close()
            else:
                ends = [whole.run(units(name, plan), until, say)]
            wrong = [line for end in ends for line in end.wrong]
            left = [unit for end in ends for unit in end.left]
            found |= {"compiled": sum(end.ended for end in ends), "processes": whole.count}
            if name == "tune":  # a launch that a chip has too little for is out of the search
                found["refused"] = wrong
                wrong = []
            late = [f"no time for {len(left)}, first {left[0]}"] if left else []
            if wrong:
                raise RuntimeError("\n".join(wrong + late))
            if late:
                raise CutError(late[0])
    whole.close()


def units(name: str, plan: StepPlan) -> list[Unit]:
    """What a case of the step compiles."""
    from tools.gpu.figures import search_units

    device = torch.device(plan.device)
    if name == "solo":
        return [
            (each, _of_solo(spec, device))
            for each, spec in solo_specs(plan.quick).items()
            if plan.has(each)
        ]
    if name == "plain":
        return [
            (each, partial(of_suite, each, plan.device, plan.quick))
            for _, each in suite_cases("plain", plan.device, plan.quick)
            if plan.has(each)
        ]
    if name == "tune":
        return [
            unit
            for each, spec in [*tune_specs(plan.quick).items()][:_SEARCHES]
            if plan.has(each)
            for unit in search_units(each, spec, device)
        ]
    small = _small() if name == "threads" else []  # of its case with the sanitizer
    return [
        *_calls(name, plan),
        *((f"small {s.name}", _of_solo(s, device, alone=False)) for s in small),
    ]


def _parts(part: str, plan: StepPlan) -> list[Unit]:
    """The cases of the step solo whose kernels lack a part."""
    device = torch.device(plan.device)
    return [
        (each, _of_solo(spec, device, alone=False))
        for each, (spec, of) in solo_parts(plan.quick).items()
        if of == part and plan.has(each)
    ]


def _of_solo(spec: Any, device: torch.device, alone: bool = True) -> partial[None]:
    from weft.bench.solo.compiling import compiled

    return partial(compiled, spec, device, alone=alone)


def _small() -> list[Any]:
    from tools.gpu.ranks import small_cases

    return small_cases()


def _calls(step: str, plan: StepPlan) -> list[Unit]:
    """The calls of ranks as threads, or as processes: each of each number of ranks."""
    from tools.gpu.cases import calls_of, parsed

    whole = step == "processes"
    work = dict.fromkeys(
        (parsed(name)[0], call)
        for name in names(step, plan.device, plan.quick)
        if name.startswith("W") and plan.has(name)
        for call in calls_of(name)
        if not call.endswith("-host")  # torch's kernels, whose ranks wait for one another
    )
    return [
        (
            f"{call}, {W} {'processes' if whole else 'threads'}",
            partial(of_call, call, W, plan.device, whole),
        )
        for W, call in work
    ]


def of_call(call: str, W: int, kind: Literal["cuda", "cpu"], whole: bool) -> None:
    """A call of W ranks; `whole`: which have a chip each."""
    from tools.gpu import cases as gpu_cases
    from tools.gpu.ranks import on_ranks
    from weft.kernels.engine import chips

    def body(rank: int) -> None:
        place = gpu_cases.Place(rank, W, torch.device(kind), kind == "cpu")
        gpu_cases.make_once(f"W{W}/plain/{call}", place)

    unshared = patch.object(chips, "_share_of_chip", lambda chip, ranks, sms: chip)
    with unshared if whole else nullcontext():
        on_ranks(kind, W, body, _CALL_S, launches=False)


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
