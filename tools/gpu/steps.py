"""The steps of `make gpu`, each a list of cases that a process of its own runs.

    compile     every kernel that the other steps launch, by all cores: nothing is launched
    proof       4 ranks as threads make every call of `tools.gpu.cases` once; `weft doctor`
    plain       matmul and attention of one rank beside cuBLAS and torch's attention
    solo        `weft bench solo`: kernels of one rank of W on the whole chip, some without waits
    threads     2, 4 and 8 ranks as threads: late ranks, graphs, streams, all calls mixed; small
                calls under compute-sanitizer
    processes   2 ranks as processes that share the chip
    tune        tiles of attention; launches of the fused matmuls, by one rank of 8 on the whole
                chip, into a table
    ranks       every fused op beside its unfused self, a GPU a rank: where there are several

What a step's process does is in `tools.gpu.process`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

_RANKS = (8, 2, 4)  # of solo figures, the first with all cases


@dataclass(frozen=True)
class GpuStep:
    """A part of the run.

    Attributes:
        minutes: that it may take, in all slices together.
        case_s: that a case may take, before its process is ended.
        timeout_s: WEFT_TIMEOUT_S: how long a rank waits for another.
        figures: whether it measures: for each chip anew.
    """

    name: str
    about: str
    minutes: float
    case_s: float = 60.0
    timeout_s: float = 15.0
    figures: bool = False


STEPS = {
    step.name: step
    for step in (
        GpuStep("compile", "kernels of the other steps, by all cores", 3, 600, 120),
        GpuStep("proof", "4 ranks as threads: every call once", 1.5),
        GpuStep("plain", "one rank beside cuBLAS and torch's attention", 1, 90, figures=True),
        # Peers' signals are there: what has not come does not come.
        GpuStep("solo", "kernels of one rank of W on the whole chip", 6, 90, 2, figures=True),
        GpuStep("threads", "2, 4, 8 ranks as threads: late, in graphs, on streams, mixed", 4),
        GpuStep("processes", "2 ranks as processes", 1.5),
        GpuStep("tune", "launches of attention and of the fused matmuls", 4, 150, 2, figures=True),
        GpuStep("ranks", "a GPU a rank: fused ops beside unfused ones", 10, 120, figures=True),
    )
}
# What the step compile compiles, in its order: for which step, and a case of its own for what only
# the figures of a few cases need.
COMPILED = {
    "proof": "proof", "plain": "plain", "solo": "solo", "threads": "threads",
    "processes": "processes", "tune": "tune", "parts": "solo",
}  # fmt: skip
_LONG_S = {"doctor": 100.0, "sanitizer": 150.0, "all": 150.0}  # all calls mixed


def case_s(step: str, case: str, device: str) -> float:
    """What a case may take; more where kernels are interpreted."""
    last = case.rpartition("/")[2]
    return _LONG_S.get(last, STEPS[step].case_s) * (4 if device == "cpu" else 1)


@dataclass(frozen=True)
class StepPlan:
    """What a step's process is told.

    Attributes:
        folder: where results are kept.
        scratch: a folder that goes with the run.
        until: when it must have ended, of time.time().
        wanted: cases of all steps that the run has, which compile is told: empty, all.
    """

    step: str
    cases: tuple[str, ...]
    folder: str
    scratch: str
    device: Literal["cuda", "cpu"]
    quick: bool
    until: float
    wanted: tuple[str, ...] = ()

    def has(self, case: str) -> bool:
        """Whether the run has a case."""
        return not self.wanted or case in self.wanted

    @property
    def record(self) -> Path:
        return Path(self.folder) / "outcomes.jsonl"


def names(step: str, device: str, quick: bool, steps: Collection[str] = STEPS) -> list[str]:
    """The cases of a step, in their order, in a run of `steps`."""
    from tools.gpu import cases as gpu_cases

    few = [f"W2/plain/{call}" for call in ("all_reduce", "all_gather_matmul", "norm")]
    if step == "compile":
        return [case for case, of in COMPILED.items() if of in steps]
    if step == "proof":
        return [*gpu_cases.case_names([4], ["plain"]), "doctor"]
    if step == "solo":
        return [*solo_specs(quick), *solo_parts(quick)]
    if step == "tune":
        return list(tune_specs(quick))
    if step in ("plain", "ranks"):
        return [name for _, name in suite_cases(step, device, quick)]
    if step == "threads":
        if quick:
            ways = [name.replace("plain", "late") for name in few]
            return [*ways, "W2/graph/all_reduce", "W2/streams/all_gather_matmul", "sanitizer"]
        return [
            *gpu_cases.case_names([2, 4, 8], ["late", "streams", "graph", "mixed"]),
            "sanitizer",
        ]
    if step == "processes":
        return few if quick else gpu_cases.case_names([2], ["plain"])
    raise ValueError(f"there is no step {step!r}")


def solo_specs(quick: bool) -> dict[str, Any]:
    """The cases of the step solo, as `weft bench solo` has them."""
    from weft.bench.solo import cases

    return {spec.name: spec for spec in cases.cases(quick, [2] if quick else _RANKS)}


def solo_parts(quick: bool) -> dict[str, tuple[Any, str]]:
    """A few of them once more, by kernels that lack a part."""
    from weft.bench.solo import cases
    from weft.sim.unwaited import PARTS

    some = cases.of_each_kind([*solo_specs(quick).values()])[: 1 if quick else None]
    return {f"{spec.name}, {PARTS[part]}": (spec, part) for part in PARTS for spec in some}


def tune_specs(quick: bool) -> dict[str, Any]:
    """The problems whose launches are searched: fused matmuls for a table, attention to be read."""
    from weft.bench.solo import attention_tiles, sweep

    matmuls = sweep.launch_specs(quick)[: 3 if quick else None]
    return {spec.name: spec for spec in (*attention_tiles.tile_specs(quick), *matmuls)}


def suites_of(step: str) -> Sequence[Any]:
    """The suites of a step."""
    from weft.bench.solo import local_attention, local_matmul
    from weft.bench.suites import attention, ops

    return [local_matmul, local_attention] if step == "plain" else [ops, attention]


def suite_cases(step: str, device: str, quick: bool) -> list[tuple[Any, str]]:
    """The cases of a step, and what they are called in it."""
    return [
        (suite, spec.name + suffix(given))
        for given in options(step, device, quick)
        for suite in suites_of(step)
        for spec in suite.cases(given)
    ]


def suffix(options: Any) -> str:
    """What is behind the names of cases that several ranks run."""
    return f", {options.ranks} ranks" if options.ranks > 1 else ""


def options(step: str, device: str, quick: bool) -> list[Any]:
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
