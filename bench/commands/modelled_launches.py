"""`weft tune --hardware`: launches of the fused matmuls by virtual time, for chips not at hand.

Of the launches that a search would try, the few that closed forms take to be the quickest are
played on virtual ranks, and the best is kept where it gains enough on every chip that is named;
else it is kept that none does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from weft.bench.blocks.virtual import share_of, timeline_of
from weft.bench.problem import Spec
from weft.bench.suites import ops
from weft.collectives.prices.hardware import Hardware
from weft.kernels.engine import fused_times, tuning
from weft.kernels.engine.chips import Chip, known

_GAIN = 1.05  # that a modelled launch must have over the heuristic's
_PLAYED = 2  # beside the heuristic's
_DTYPE = torch.bfloat16


def chip_of_all(machines: Sequence[Hardware]) -> Chip:
    """The chip that they share.

    Raises:
        ValueError: they have several.
    """
    names = {each.chip for each in machines}
    if len(names) != 1:
        raise ValueError(
            f"a table is of one chip, and {', '.join(each.name for each in machines)} have "
            f"{', '.join(sorted(names))}: make one after the other"
        )
    return replace(known(names.pop()), cores=machines[0].cores)


def entries(
    specs: Sequence[Spec], ranks: int, machines: Sequence[Hardware], say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """What a table says of each problem: a launch that is quicker on all `machines`, or that the
    heuristic's, to which an entry without a choice leaves it, was played to be the best.
    """
    chip = chip_of_all(machines)
    for spec in specs:
        key, choices = ops.launches_of(spec.params, _DTYPE, ranks, chip)
        op, M, N, K = (spec.params[name] for name in ("op", *ops.SIZES))
        shape = share_of(op, M, N, K, ranks)
        likely = sorted(
            (choice for choice in choices if choice.tiling),
            key=lambda choice: _form_us(op, shape, ranks, machines[0], choice),
        )[:_PLAYED]
        before = _played(op, shape, ranks, machines, tuning.HEURISTIC)
        best, gain, us = tuning.HEURISTIC, _GAIN, before
        for choice in likely:
            now = _played(op, shape, ranks, machines, choice)
            least = min(a / b for a, b in zip(before, now, strict=True))
            if least > gain:
                best, gain, us = choice, least, now
        told = ", ".join(f"{a:.1f} -> {b:.1f} us" for a, b in zip(before, us, strict=True))
        say(f"{spec.name}: {told if best.tiling else 'the heuristic'}")
        found = tuning.entry_of(
            key, tuning.Trial(best, us[0]), tuning.Trial(tuning.HEURISTIC, before[0])
        )
        yield found | {"modelled": [each.name for each in machines]}


def _form_us(
    op: str, shape: tuple[int, int, int], ranks: int, hardware: Hardware, choice: tuning.Choice
) -> float:
    return fused_times.fused_time(op, *shape, "bfloat16", hardware, ranks, tiling=choice.tiling).us


def _played(
    op: str,
    shape: tuple[int, int, int],
    ranks: int,
    machines: Sequence[Hardware],
    choice: tuning.Choice,
) -> list[float]:
    """us on each of `machines`; infinity if the launch does not work."""
    with tuning.trying(choice):
        try:
            timeline = timeline_of(op, *shape, ranks, machines[0], "triton")
        except (ValueError, RuntimeError):
            return [math.inf] * len(machines)
        return [timeline.on(each).makespan_us for each in machines]
