"""A result as a table of text, for the terminal, Markdown and the report alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from weft.bench.rows import Case, Result, geometric_mean

# Wider spreads are shown beside the time.
_SPREAD = 0.2

# Params of a case that are shown beside its name, by suite.
_COLUMNS: dict[str, tuple[str, ...]] = {
    "redistribute": ("bytes", "steps", "torch collectives"),
    "solo": ("host_us",),
}

LEGEND = (
    "Times are medians over the rounds, of the slowest rank; ± is half the distance from the 10th "
    "to the 90th percentile, where it is wide. bound: what nothing can be quicker than, measured "
    "in the same rounds, and which part of it is the largest. of bound: bound / time, 1 is the "
    "machine's limit. exposed: time beyond the rank's arithmetic. ~: the rounds do not tell the "
    "two apart."
)


@dataclass
class TextTable:
    """Cells as text. The first column is the case; `summary` and `notes` are lines below."""

    title: str
    header: list[str]
    rows: list[list[str]]
    summary: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def figure(value: float | None) -> str:
    """Three digits; empty for None."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def times_of(case: Case) -> str:
    """The times of a case in us, and what has none, in a line."""
    return ", ".join(
        f"{name} {figure(timing.us) if timing.ok else f'- ({timing.failure})'}"
        for name, timing in case.variants.items()
    )


def variants_of(cases: Sequence[Case]) -> list[str]:
    """The variants that have a time in one of the cases, ours first, in the suite's order."""
    return list(dict.fromkeys(name for case in cases for name in case.timed))


def time_unit(cases: Sequence[Case]) -> tuple[str, float]:
    """The unit that suits most times, and how many us it has."""
    times = [timing.us for case in cases for timing in case.timed.values()]
    return ("ms", 1e3) if times and statistics.median(times) >= 1e3 else ("us", 1.0)


def result_table(result: Result) -> TextTable:
    """All cases of a result."""
    cases, where = result.cases, result.environment
    params = _COLUMNS.get(result.suite, ())
    pairs = list(dict.fromkeys((case.main, case.peer) for case in cases if case.peer))
    columns = _case_columns(cases, pairs)
    header = ["case", *params, *(title for title, _ in columns)]
    rows = []
    for case in cases:
        row = [case.name, *(_param(case.params.get(key, "")) for key in params)]
        if case.failure:
            row += ["failed"] + [""] * (len(columns) - 1)
        else:
            row += [cell(case) for _, cell in columns]
        rows.append(row)
    made = (
        "virtual time" if _is_virtual(result) else f"{where['ranks']} ranks, {_machine_name(where)}"
    )
    title = f"weft bench {result.suite}: {made}"
    return TextTable(title, header, rows, _summary(cases, pairs), _notes(result))


def _case_columns(
    cases: Sequence[Case], pairs: Sequence[tuple[str, str]]
) -> list[tuple[str, Callable[[Case], str]]]:
    """The columns that these cases have anything for: (title, the cell of a case)."""
    names, (unit, scale) = variants_of(cases), time_unit(cases)
    columns: list[tuple[str, Callable[[Case], str]]] = [
        (f"{name}, {unit}", partial(_time_cell, name=name, scale=scale)) for name in names
    ]
    if any(case.bounds for case in cases):
        columns.append((f"bound, {unit}", partial(_bound_cell, scale=scale)))
        columns.append(("of bound", _fraction_cell))
    if any("arithmetic" in case.bounds for case in cases):
        columns.append((f"exposed, {unit}", partial(_exposed_cell, scale=scale)))
    if any("bus_bytes" in case.params for case in cases):
        columns.append(("bus, GB/s", partial(_rate_cell, of="bus_bytes", scale=1e3)))
    if any("flop" in case.params for case in cases):
        columns.append(("TFLOP/s", partial(_rate_cell, of="flop", scale=1e6)))
    if len(pairs) == 1:
        columns.append((f"{pairs[0][1]} / {pairs[0][0]}", _gain_cell))
    elif pairs:
        columns.append(("peer / ours", lambda case: f"{case.peer} {_gain_cell(case)}"))
    if any(case.params.get("at_most") for case in cases):
        columns.append(("wanted", _wanted_cell))
    return columns


def _param(value: Any) -> str:
    return figure(value) if isinstance(value, float) else str(value)


def _is_virtual(result: Result) -> bool:
    return any("chip" in case.params for case in result.cases)


def _machine_name(where: dict[str, Any]) -> str:
    if where["device"] == "cuda":
        return str(where["gpus"][0]["name"]) if where["gpus"] else "cuda"
    return f"{where['cores']} cores of {where['cpu']}"


def _time_cell(case: Case, name: str, scale: float) -> str:
    timing = case.timed.get(name)
    if timing is None:
        return "-"
    wide = f" ±{timing.spread * 50:.0f}%" if timing.spread > _SPREAD else ""
    return figure(timing.us / scale) + wide


def _bound_cell(case: Case, scale: float) -> str:
    """The bound, and which part sets it; of a sum, every part."""
    if case.bound_us is None:
        return ""
    parts, total = case.parts_us, figure(case.bound_us / scale)
    if case.bound_rule == "max" or len(parts) < 2:
        return f"{total} {case.bound_by}"
    return f"{total} = " + " + ".join(f"{figure(us / scale)} {name}" for name, us in parts.items())


def _fraction_cell(case: Case) -> str:
    return figure(case.fraction(case.main)) if case.main in case.variants else ""


def _exposed_cell(case: Case, scale: float) -> str:
    beyond = case.exposed_us(case.main) if case.main in case.variants else None
    return "" if beyond is None else figure(beyond / scale)


def _rate_cell(case: Case, of: str, scale: float) -> str:
    """How much of a parameter ours does in a unit of `scale` per us."""
    ours = case.timed.get(case.main)
    amount = case.params.get(of)
    return figure(amount / ours.us / scale) if ours is not None and amount else ""


def _gain_cell(case: Case) -> str:
    return "" if case.gain is None else str(case.gain)


def _wanted_cell(case: Case) -> str:
    """How many times as quick as its peer ours should be, and whether it is not."""
    at_most, gain = case.params.get("at_most"), case.gain
    if not at_most:
        return ""
    missed = gain is not None and gain.median < 1 / at_most
    return figure(1 / at_most) + (", missed" if missed else "")


def _summary(cases: Sequence[Case], pairs: Sequence[tuple[str, str]]) -> list[str]:
    lines = []
    for main, peer in pairs:
        gains = [
            case.gain
            for case in cases
            if (case.main, case.peer) == (main, peer) and case.gain is not None
        ]
        if gains:
            medians = [gain.median for gain in gains]
            close = sum(not gain.told_apart for gain in gains)
            lines.append(
                f"{main} is {geometric_mean(medians):.2f} times as quick as {peer} (geometric mean "
                f"of {len(gains)} cases, {min(medians):.2f} to {max(medians):.2f}"
                + (f"; in {close} the noise is wider than the difference)" if close else ")")
            )
    reached: dict[str, list[float]] = {}
    for case in cases:
        if case.main in case.variants and (fraction := case.fraction(case.main)) is not None:
            reached.setdefault(case.main, []).append(fraction)
    for main, fractions in reached.items():
        lines.append(
            f"{main} reaches {geometric_mean(fractions):.2f} of the machine's bound (geometric "
            f"mean, {min(fractions):.2f} to {max(fractions):.2f})"
        )
    return lines


def _notes(result: Result) -> list[str]:
    notes = []
    where = result.environment
    if not where["quiet"] and not _is_virtual(result):
        notes.append(
            f"the machine was not quiet: load {where['load']} on {where['cores']} cores at the "
            f"start. Others' work is in these times; compare ratios, not times"
        )
    if result.interrupted:
        notes.append("interrupted: the cases that were finished")
    missing: dict[tuple[str, str], list[str]] = {}
    for case in result.cases:
        if case.failure:
            missing.setdefault(("", case.failure), []).append(case.name)
        for name, timing in case.variants.items():
            if timing.failure:
                missing.setdefault((name, timing.failure), []).append(case.name)
    for (variant, why), names in missing.items():
        cases = names[0] if len(names) == 1 else f"{len(names)} cases"
        notes.append(f"no time of {variant or 'any variant'} in {cases}: {why}")
    return notes + list(dict.fromkeys(note for case in result.cases for note in case.notes))
