"""What `tools.scaling_page` writes: tables, crossovers, and the model's error."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from weft.bench.report.tables import markdown_lines
from weft.sim.time.hardware import named

if TYPE_CHECKING:
    from tools.scaling_page import Row

_START, _END = "<!-- scaling -->", "<!-- /scaling -->"


def tables(rows: Sequence[Row]) -> str:
    """A table for each op and hardware, as Markdown."""
    parts = []
    for op, hardware in dict.fromkeys((row.op, row.hardware) for row in rows):
        mine = [row for row in rows if (row.op, row.hardware) == (op, hardware)]
        parts += [f"### {op}, {mine[0].ranks} x {hardware}", "", *_table(mine), "", crossover(mine)]
        parts.append("")
    return "\n".join(parts)


def _table(rows: Sequence[Row]) -> list[str]:
    names = (
        *("model", "M", "N", "K", "fused us", "arithmetic", "link", "exposed", "efficiency"),
        *("of longer", "host us", "generic us", "auto", "regret"),
    )
    lines = []
    for row in rows:
        fused, hardware = row.fused, named(row.hardware)
        link_us = fused["link_bytes"] * 1e6 / hardware.link_bandwidth / hardware.link_sustained
        longer_us = max(fused["arithmetic_us"], link_us)
        lines.append([
            row.model,
            *map(str, (row.M, row.N, row.K)),
            _us(fused["makespan_us"]),
            _us(fused["arithmetic_us"]),
            _us(link_us),
            _us(fused["exposed_us"]),
            f"{fused['overlap_efficiency']:.2f}",
            f"{longer_us / fused['makespan_us']:.2f}",
            _us(row.engines["host"]),
            _us(row.engines["generic"]),
            row.auto,
            f"{row.regret:.2f}",
        ])  # fmt: skip
    return markdown_lines(names, lines)


def crossover(rows: Sequence[Row]) -> str:
    """For which M the fused kernel is the fastest, by model."""
    parts = []
    for model in dict.fromkeys(row.model for row in rows):
        mine = sorted((row for row in rows if row.model == model), key=lambda row: row.M)
        quickest = [row.engines["triton"] == min(row.engines.values()) for row in mine]
        spans = []
        for first, last in _runs(quickest):
            above = "" if first == 0 else f"above M = {mine[first - 1].M}"
            upto = "" if last == len(mine) - 1 else f"up to M = {mine[last].M}"
            spans.append(" ".join(filter(None, (above, upto))) or "always")
        parts.append(f"{model}: {' and '.join(spans) or 'never'}")
    return f"Where the fused kernel is the quickest engine: {'; '.join(parts)}."


def _runs(flags: Sequence[bool]) -> list[tuple[int, int]]:
    """First and last index of each run of true ones."""
    runs: list[tuple[int, int]] = []
    for index, flag in enumerate(flags):
        if flag and index and flags[index - 1]:
            runs[-1] = runs[-1][0], index
        elif flag:
            runs.append((index, index))
    return runs


def errors(measured: Sequence[tuple[str, float, float]]) -> str:
    """The model beside measurements, as Markdown."""
    rows = [
        (what, _us(real), _us(modelled), f"{modelled / real - 1:+.0%}")
        for what, real, modelled in measured
    ]
    return "\n".join(markdown_lines(("what", "measured us", "modelled us", "error"), rows))


def write(path: Path, rows: Sequence[Row], measured: Sequence[tuple[str, float, float]]) -> None:
    """Put tables and errors between the page's marks."""
    text = path.read_text()
    inner = f"{tables(rows)}\n### The model beside measurements\n\n{errors(measured)}"
    pattern = f"{re.escape(_START)}.*?{re.escape(_END)}"
    new, count = re.subn(pattern, lambda _: f"{_START}\n{inner}\n{_END}", text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"{path} must hold {_START} ... {_END} once, found {count}")
    path.write_text(new)


def _us(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
