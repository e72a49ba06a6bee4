"""How fast fused matmuls multiply by the figures of `weft bench solo`, tile by tile.

A rate is relative to the library's matmul of the same shape in the same run. That of fp8 is instead
relative to twice the best that the library did in bf16, which is what the cost model counts with:
the library's own fp8, with sums as exact as ours, is slower than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from weft.bench.rows import Case
from weft.kernels.engine import kernel_rates
from weft.kernels.engine.chips import Chip
from weft.kernels.engine.tuning import OPS

_LEAST_US = 100.0  # shorter calls do not count, as signals and launches are in their times
_FP8 = "float8_e4m3fn"


def launched_tile(case: Case, chip: Chip) -> dict[str, Any] | None:
    """The chip and the tile that a plain fused matmul is launched with; None for other calls."""
    p = case.params
    if p["op"] not in OPS or "epilogue" in p:
        return None
    W, gathers = p["ranks"], p["op"] == "all_gather_matmul"
    N, K = (p["N"] // W, p["K"]) if gathers else (p["N"], p["K"] // W)
    tile = kernel_rates.tile_of(p["op"], chip, p["M"], N, K, getattr(torch, p["dtype"]), W)
    return {"launched for": chip.name} | tile._asdict()


def rates_of(
    cases: Sequence[Case], least_us: float = _LEAST_US
) -> dict[str, list[tuple[kernel_rates.Tile, float]]]:
    """The rates of tiles, by chip."""
    made: dict[str, list[tuple[kernel_rates.Tile, float]]] = {}
    rated = [
        case
        for case in cases
        if case.params.get("rated")
        and {case.main, case.peer} <= case.timed.keys()
        and case.timed[case.main].us >= least_us
    ]
    best = max(
        (
            case.params["flop"] / case.timed[case.peer].us
            for case in rated
            if case.params["dtype"] == "bfloat16"
        ),
        default=0.0,
    )
    for case in rated:
        fields = dict(case.params["rated"])
        chip, tile = fields.pop("launched for"), kernel_rates.Tile(**fields)
        us = case.timed[case.main].us
        if tile.dtype != _FP8:
            rate = case.timed[case.peer].us / us
        elif best:
            rate = case.params["flop"] / us / (2 * best)
        else:
            continue
        made.setdefault(chip, []).append((tile, rate))
    return made


def write_rates(folder: Path, cases: Sequence[Case]) -> list[Path]:
    """Write the table of each chip into `folder`."""
    found = rates_of(cases)
    return [kernel_rates.write(folder, chip, measured) for chip, measured in found.items()]
