"""A search of launches for the fused matmuls, by one rank of a group on a whole chip.

As `weft tune`, without the other ranks: each launch is that of the rank on a chip of its own, its
peers' data and signals are at hand. The table is written as soon as a launch is the best one, so
that a search that is ended keeps what it has found.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import weft
from weft.bench.measure import as_list, deviation, short
from weft.bench.problem import Spec
from weft.bench.solo import cases
from weft.bench.solo.compiling import compiled
from weft.bench.solo.measure import Stopwatch, own_stream, usable
from weft.bench.suites.ops import launches_of
from weft.kernels.engine import tuning
from weft.kernels.engine.chips import chip_of
from weft.kernels.engine.tuning import Choice, Trial
from weft.sim.run import solo

_WARMUP, _ROUNDS = 2, 7
_GAIN = 0.98  # of the heuristic's time, that a launch must stay below: the rest is noise


def launch_specs(quick: bool) -> list[Spec]:
    """The problems: plain fused matmuls, bf16 before fp8."""
    plain = [
        spec
        for spec in cases.cases(quick, [2 if quick else 8])
        if spec.params["op"] in tuning.OPS and "epilogue" not in spec.params
    ]
    return sorted(plain, key=lambda spec: spec.params["dtype"] != "bfloat16")


def launch_choices(spec: Spec, device: torch.device) -> tuple[tuning.Key, list[Choice]]:
    """How the table knows the problem, and what is tried for it."""
    params = spec.params
    dtype = getattr(torch, params["dtype"])
    return launches_of(params, dtype, params["ranks"], chip_of(device))


def compile_choice(spec: Spec, choice: Choice, device: torch.device) -> None:
    """Inside `compiling()`: the kernels of one launch."""
    with tuning.trying(choice):
        compiled(spec, device, alone=False)


def search_launches(
    spec: Spec,
    device: torch.device,
    folder: Path,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[dict[str, Any], list[Trial]]:
    """Try all launches of a problem, and write the best one into the table in `folder`.

    Returns:
        The table's entry, and all trials.

    Raises:
        RuntimeError: the heuristic's launch failed, or the GPU refuses all that follows a failure.
    """
    key, choices = launch_choices(spec, device)
    searched = Search(spec, device)
    trials: list[Trial] = []
    entry: dict[str, Any] = {}
    for number, choice in enumerate(choices):
        trial = searched.tried(choice)
        trials.append(trial)
        told = f"{trial.us:.0f} us" if not trial.failure else trial.failure
        say(f"{spec.name}, {number + 1} of {len(choices)}: {told}: {_choice_words(choice)}")
        if trial.failure and (number == 0 or not usable(device)):
            raise RuntimeError(f"{_choice_words(choice)}: {trial.failure}")
        best = best_of(trials)
        if trial is best or number == 0:
            entry = tuning.entry_of(key, best, trials[0])
            tuning.write(folder / f"{chip_of(device).name}.json", chip_of(device).name, [entry])
    return entry, trials


def launch_median_us(clock: Stopwatch, call: Callable[[], Any], before: Callable[[], Any]) -> float:
    """What a launch takes, after a few calls that do not count."""
    times = [clock.us(call, before) for _ in range(_WARMUP + _ROUNDS)]
    return statistics.median(times[_WARMUP:])


def best_of(trials: Sequence[Trial]) -> Trial:
    """The quickest, or the first one unless another is quicker by more than noise."""
    best = min(trials, key=lambda trial: trial.us)
    return best if best.us < _GAIN * trials[0].us else trials[0]


def _choice_words(choice: Choice) -> str:
    said = {name: value for name, value in asdict(choice).items() if value}
    return str(said) if said else "the heuristic"


class Search:
    """The trials of one problem."""

    def __init__(self, spec: Spec, device: torch.device) -> None:
        self.W, self.device, self.clock = spec.params["ranks"], device, Stopwatch(device)
        self.rank = 1 % self.W
        with own_stream(device):
            self.problem = cases.workload_of(spec, self.rank, device)
            self.expected = self.problem.expected(self.rank)

    def tried(self, choice: Choice) -> Trial:
        """Whether the launch gives the right result, and what it takes."""
        world = solo.SoloWorld(self.W, self.device)
        try:
            with (
                tuning.trying(choice),
                weft.engine("triton"),
                own_stream(self.device),
                solo.copied_first(self.clock.restart),
            ):
                world.learn(self.problem.run, self.problem.depth)
                with world.at(self.rank):
                    return self._timed(world, choice)
        except Exception as error:  # too few resources, or whatever else there is against it
            return Trial(choice, math.inf, f"{type(error).__name__}: {short(str(error))}")
        finally:
            if usable(self.device):
                world.close()

    def _timed(self, world: solo.SoloWorld, choice: Choice) -> Trial:
        def run() -> Any:
            return self.problem.run(self.rank)

        def cold() -> None:
            world.post()
            self.clock.flush()

        world.post()
        made = run()
        world.check()
        off = deviation(as_list(made), self.expected) / self.problem.tolerance
        if not off <= 1:
            return Trial(choice, math.inf, f"wrong: {off:.3g} times the tolerance")
        us = launch_median_us(self.clock, run, cold)
        world.check()
        return Trial(choice, us)
