"""What `tools.scaling_page` writes: tables, crossovers, and the model's error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from weft.bench.published.rows import Row
from weft.collectives.prices import library
from weft.collectives.prices.hardware import named
from weft.kernels.engine import fused_times
from weft.markdown import between_marks, markdown_lines

if TYPE_CHECKING:
    from tools.scaling_page import EngineTimes


def tables_by_hardware(rows: Sequence[EngineTimes]) -> str:
    """A table for each op and hardware, as Markdown, of rows whose fused kernel has run."""
    parts = []
    rows = [row for row in rows if row.fused]
    for op, hardware in dict.fromkeys((row.op, row.hardware) for row in rows):
        mine = [row for row in rows if (row.op, row.hardware) == (op, hardware)]
        parts += [
            f"### {op}, {mine[0].ranks} x {hardware}",
            "",
            *_table_lines(mine),
            "",
            speed_ups(mine),
            "",
        ]
        parts.append(crossover(mine))
        parts.append("")
    return "\n".join(parts)


def _table_lines(rows: Sequence[EngineTimes]) -> list[str]:
    names = (
        *("model", "M", "N", "K", "fused us", "slower stores", "arithmetic", "link", "exposed"),
        *("efficiency", "of longer", "library us", "by", "speed-up", "host us", "generic us"),
        *("auto", "regret"),
    )
    lines = []
    for row in rows:
        fused, hardware = row.fused, named(row.hardware)
        link_us = fused["link_bytes"] * 1e6 / hardware.link_bandwidth / hardware.link_sustained
        by, library_us = best_library(row)
        longer_us = max(fused["arithmetic_us"], link_us)
        lines.append([
            row.model,
            *map(str, (row.M, row.N, row.K)),
            _us_cell(fused["makespan_us"]),
            _us_cell(row.slower_stores) if row.slower_stores else "",
            _us_cell(fused["arithmetic_us"]),
            _us_cell(link_us),
            _us_cell(fused["exposed_us"]),
            f"{fused['overlap_efficiency']:.2f}",
            f"{longer_us / fused['makespan_us']:.2f}",
            _us_cell(library_us),
            by,
            f"{library_us / fused['makespan_us']:.2f}",
            _us_cell(row.engines["host"]),
            _us_cell(row.engines["generic"]),
            row.auto,
            f"{row.regret:.2f}",
        ])  # fmt: skip
    return markdown_lines(names, lines)


# Wanted of the longer of arithmetic and link, and most of the link's time where that is the bound.
_OVERLAPPED, _OVERLAPPED_SMALL, _OF_LINK = 0.95, 0.85, 1.1
_SMALL, _LARGE_ROWS = "Llama-3 8B", 2048


def overlap_table(rows: Sequence[EngineTimes]) -> str:
    """What is hidden of communication on 8 H100 from M = 2048 on, beside what is wanted."""
    wanted = [
        row for row in rows
        if (row.hardware, row.ranks) == ("H100", 8) and row.M >= _LARGE_ROWS and row.fused
        and row.model != "Qwen2-72B" and row.op != "matmul_all_reduce"
    ]  # fmt: skip
    lines = [_overlap_line(row) for row in wanted]
    names = (
        *("op", "model", "M", "us", "arithmetic", "link", "exposed", "wanted", "had"),
        *("bf16 wire: us", "link", "had"),
    )
    return "\n".join(markdown_lines(names, lines, texts=2))


def _overlap_line(row: EngineTimes) -> list[str]:
    """With the narrowest wire by closed forms, which are within 4 % at the median."""
    us, arithmetic = row.fused["makespan_us"], row.fused["arithmetic_us"]
    hardware = named(row.hardware)
    link = row.fused["link_bytes"] * 1e6 / hardware.link_bandwidth / hardware.link_sustained
    small = row.model == _SMALL
    narrow = ["", "", ""]
    least = link
    if row.op == "matmul_reduce_scatter":
        sizes = row.op, row.M, row.N, row.K, "bfloat16", hardware, row.ranks
        rate = 1 / library.UNDER_POWER  # as in `best_library`
        made = fused_times.fused_time(*sizes, rate=rate, wire=torch.bfloat16)
        least = made.link_us
        narrow = [_us_cell(made.us), _us_cell(least), _share(made.us, arithmetic, least, small)]
    bound = small and least > arithmetic
    wanted = f"link x {_OF_LINK}" if bound else f"{_OVERLAPPED_SMALL if small else _OVERLAPPED}"
    return [
        row.op, row.model, str(row.M), _us_cell(us), _us_cell(arithmetic), _us_cell(link),
        _us_cell(row.fused["exposed_us"]), wanted, _share(us, arithmetic, link, small), *narrow,
    ]  # fmt: skip


def _share(us: float, arithmetic: float, link: float, small: bool) -> str:
    """As the wanted figure has it."""
    if small and link > arithmetic:
        return f"link x {us / link:.2f}"
    return f"{max(arithmetic, link) / us:.2f}"


def best_library(row: EngineTimes) -> tuple[str, float]:
    """The quickest of what a user has without weft, and its time on the same chip.

    Fused kernels multiply at all that is sustained here; so does the library.
    """
    hardware = named(row.hardware)
    same = replace(hardware, sustained=hardware.sustained / library.UNDER_POWER)
    ways = library.unfused_us(row.op, row.M, row.N, row.K, "bfloat16", same, row.ranks)
    return min(ways.items(), key=lambda way: way[1])


def speed_ups(rows: Sequence[EngineTimes]) -> str:
    """The range of times of the best library over those of the fused kernel, by model."""
    parts = []
    for model in dict.fromkeys(row.model for row in rows):
        mine = [row for row in rows if row.model == model]
        found = sorted(best_library(row)[1] / row.fused["makespan_us"] for row in mine)
        told = " to ".join(dict.fromkeys(f"{each:.2f}" for each in (found[0], found[-1])))
        parts.append(f"{model}: {told}")
    return f"Speed-up over the best library: {'; '.join(parts)}."


def crossover(rows: Sequence[EngineTimes]) -> str:
    """For which M the fused kernel is the fastest, by model."""
    parts = []
    for model in dict.fromkeys(row.model for row in rows):
        mine = sorted((row for row in rows if row.model == model), key=lambda row: row.M)
        quickest = [row.engines["triton"] == min(row.engines.values()) for row in mine]
        spans = []
        for first, last in _true_runs(quickest):
            above = "" if first == 0 else f"above M = {mine[first - 1].M}"
            upto = "" if last == len(mine) - 1 else f"up to M = {mine[last].M}"
            spans.append(" ".join(filter(None, (above, upto))) or "at each of these M")
        parts.append(f"{model}: {' and '.join(spans) or 'never'}")
    return f"Where the fused kernel is the quickest engine: {'; '.join(parts)}."


def _true_runs(flags: Sequence[bool]) -> list[tuple[int, int]]:
    """First and last index of each run of true ones."""
    runs: list[tuple[int, int]] = []
    for index, flag in enumerate(flags):
        if flag and index and flags[index - 1]:
            runs[-1] = runs[-1][0], index
        elif flag:
            runs.append((index, index))
    return runs


class Measured(NamedTuple):
    """A published figure of a problem on the page, and the model's time in us."""

    row: Row
    model: str
    us: float
    kind: str


def beside_others(found: Sequence[Measured]) -> str:
    """Published figures, as Markdown."""
    rows = [
        (
            f"{each.row.op}, {each.model}, {each.row.what}",
            each.row.gpu,
            each.row.M,
            each.kind,
            _us_cell(each.row.published),
            _us_cell(each.us),
            f"{each.us / each.row.published - 1:+.0%}",
        )
        for each in found
    ]
    names = ("what", "chip", "M", "kind", "published us", "modelled us", "error")
    return "\n".join(markdown_lines(names, rows))


def slower_stores(found: Sequence[dict[str, Any]]) -> str:
    """Times by what a core reaches its peers with, as Markdown."""
    rates = [*found[0]["us"]]
    rows = [
        (
            f"{each['op']}, {each['model']}",
            str(each["M"]),
            *(_us_cell(each["us"][r]) for r in rates),
        )
        for each in found
    ]
    names = ("fused, 8 x H100", "M", *(f"{rate} GB/s" for rate in rates))
    return "\n".join(markdown_lines(names, rows))


def write_tables(
    path: Path,
    rows: Sequence[EngineTimes],
    slower: Sequence[dict[str, Any]],
    others: Sequence[Measured],
) -> None:
    """Put tables and errors between the page's marks."""
    inner = f"{tables_by_hardware(rows)}\n"
    if slower:
        inner += f"### If a program moved less where no dots hide it\n\n{slower_stores(slower)}\n\n"
    inner += f"### The same problems, measured by others\n\n{beside_others(others)}"
    text = between_marks(path.read_text(), "overlap", overlap_table(rows))
    path.write_text(between_marks(text, "scaling", inner))


def _us_cell(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
