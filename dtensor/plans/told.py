"""How a plan is printed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from weft.dtensor.layout.placements import show

if TYPE_CHECKING:
    from weft.dtensor.plans.planning import Plan


def table(plan: Plan) -> str:
    """Predicted time and memory beside plans that people make by hand, then the layouts."""
    mesh = "x".join(map(str, plan.mesh.shape))
    limit = "" if plan.memory is None else f", {size(plan.memory)} a rank"
    rows = [("", "step", "memory", "", "layout")]
    for name, each in [("weft's plan", plan), *plan.beside.items()]:
        if isinstance(each, str):
            rows.append((name, "-", "-", "", each))
            continue
        over = plan.memory is not None and each.memory_bytes > plan.memory
        fits = "does not fit" if over else ""
        rows.append((name, time(each.step_us), size(each.memory_bytes), fits, layout(each)))
    lines = [f"plan for a mesh of {mesh}, by rates of {plan.hardware}{limit}", "", *_columns(rows)]
    styles = _styles_by_path({path: repr(style) for path, style in plan.styles.items()})
    if styles:
        lines += ["", "styles", *_columns([("  " + path, style) for path, style in styles])]
    params = {name: p for name, p in plan.placements.items() if not p.is_replicate()}
    if params and not styles:
        lines += ["", *(f"  {name}: {show([p])}" for name, p in params.items())]
    return "\n".join(lines)


def _styles_by_path(styles: Mapping[str, str]) -> list[tuple[str, str]]:
    """Paths that differ in one number, and have the same style, as one: "layers.[0-7,9].w1"."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for path, style in styles.items():
        parts = re.fullmatch(r"(.*?\.)(\d+)(\..*)", path)
        before, number, after = parts.groups() if parts else (path, "", "")
        found.setdefault((before, after, style), []).extend([int(number)] if number else [])
    told = []
    for (before, after, style), numbers in found.items():
        path = f"{before}[{_ranges(numbers)}]{after}" if len(numbers) > 1 else ""
        one = f"{before}{numbers[0]}{after}" if numbers else before
        told.append((path or one or "the model", style))
    return told


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] as "0-2,5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def layout(plan: Plan) -> str:
    """In one line."""
    parts = []
    if plan.data_dims and max(plan.data_dims) > 1:
        ranks = "x".join(map(str, plan.data_dims))
        parts.append(f"{'FSDP' if plan.sharded else 'replicas'} on {ranks}")
    if plan.model_dims and max(plan.model_dims) > 1:
        ranks = "x".join(map(str, plan.model_dims))
        ways = [row.way for row in plan.rows if row.way]
        counts = [(way, ways.count(way)) for way in dict.fromkeys(ways)]
        told = ", ".join(f"{count} {way}" for way, count in counts)
        parts.append(f"layers on {ranks} ({told})")
    return "; ".join(parts) or "one rank"


def time(us: float) -> str:
    """A time with its unit."""
    for unit, step in (("s", 1e6), ("ms", 1e3)):
        if us >= step:
            return f"{us / step:.3g} {unit}"
    return f"{us:.3g} us"


def size(nbytes: float) -> str:
    """Bytes with a unit."""
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= step:
            return f"{nbytes / step:.3g} {unit}"
    return f"{nbytes:.0f} B"


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
