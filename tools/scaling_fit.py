"""Fits the closed forms of fused matmuls to one half of the scaling page's rows.

    python -m tools.scaling_fit    prints the constants of each way as they are, and what fits best

Each constant in turn moves for as long as the mean of |log(closed form / played)| ** 1.5 falls,
over the H100 rows of every second M. The rows between, and of other chips, are only looked at.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import fields, replace

import torch

from tools.scaling_page import KEPT, OPS, PlayedProblem, read_rows_of
from weft.collectives.prices import library
from weft.collectives.prices.hardware import Hardware, named
from weft.kernels.engine import fused_times
from weft.kernels.engine.chips import known

_STEPS = (0.2, 0.05, 0.02, 0.01)


def as_played(hardware: Hardware) -> Hardware:
    """The chip whose closed forms multiply at all that is sustained, as virtual time does."""
    rate = library.UNDER_POWER * fused_times.TRITON_RATE
    return replace(hardware, sustained=hardware.sustained / rate)


def error_of(row: PlayedProblem) -> float:
    """Closed form / played - 1."""
    sizes = row.op, *row.sizes, "bfloat16"
    return fused_times.fused_us(*sizes, as_played(named(row.hardware)), row.ranks) / row.us - 1


def is_fitted_on(row: PlayedProblem) -> bool:
    """Whether constants were fitted to it: H100, every second M from the least."""
    return row.hardware == "H100" and OPS[row.op].index(row.M) % 2 == 0


def moved_way(row: PlayedProblem) -> str:
    """In which its launch moves its data."""
    chip = known(named(row.hardware).chip)
    return fused_times.launched_way(row.op, chip, *row.sizes, torch.bfloat16, row.ranks)


def forms_loss(rows: Sequence[PlayedProblem]) -> float:
    """Mean of |log error| ** 1.5: the median counts, and so do those far off."""
    return statistics.fmean(abs(math.log1p(error_of(row))) ** 1.5 for row in rows)


def main() -> None:
    """Run the command line."""
    rows = read_rows_of(KEPT)
    for way, cost in [*fused_times._WAYS.items()]:
        mine = [row for row in rows if moved_way(row) == way]
        fitted = [row for row in mine if is_fitted_on(row)]
        if not fitted:
            continue
        print(f"{way}: {len(fitted)} rows fitted on, {len(mine) - len(fitted)} held out")
        best = forms_loss(fitted)
        for step in _STEPS:
            for _ in range(200):
                before = best
                for name in (field.name for field in fields(cost)):
                    for by in (step, -step):
                        value = getattr(cost, name) + by * (10 if name == "exchanges" else 1)
                        value = max(0.0, round(value, 2))
                        fused_times._WAYS[way] = replace(cost, **{name: value})
                        if (now := forms_loss(fitted)) < best - 1e-6:
                            best, cost = now, fused_times._WAYS[way]
                fused_times._WAYS[way] = cost
                if best == before:
                    break
        print(f"  {cost}")
        for told, of in (("fitted", fitted), ("held out", [r for r in mine if r not in fitted])):
            errors = sorted(abs(error_of(row)) for row in of)
            if errors:
                print(f"  {told}: {statistics.median(errors):.1%} at the median, {errors[-1]:.1%}")


if __name__ == "__main__":
    main()
