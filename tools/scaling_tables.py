"""What `tools.scaling_page` writes: tables, and the model's error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from weft.bench.published import never_slower
from weft.bench.published.rows import Row
from weft.collectives.prices import library
from weft.collectives.prices.hardware import named
from weft.kernels.engine import fused_times
from weft.markdown import between_marks, markdown_lines

if TYPE_CHECKING:
    from tools.scaling_page import PlayedProblem


def tables_by_hardware(rows: Sequence[PlayedProblem]) -> str:
    """A table for each op and hardware, as Markdown."""
    parts = []
    for op, hardware in dict.fromkeys((row.op, row.hardware) for row in rows):
        mine = [row for row in rows if (row.op, row.hardware) == (op, hardware)]
        parts += [f"### {op}, {mine[0].ranks} x {hardware}", "", *_table_lines(mine), ""]
    return "\n".join(parts)


def _table_lines(rows: Sequence[PlayedProblem]) -> list[str]:
    names = (
        *("model", "M", "fused us", "slower stores", "arithmetic", "link", "of longer"),
        *("library us", "by", "speed-up", "auto"),
    )
    lines = []
    for row in rows:
        by, library_us = best_library(row)
        link = link_us(row)
        lines.append([
            row.model,
            str(row.M),
            *map(_us_cell, (row.us, row.slower_stores_us, row.arithmetic_us, link)),
            f"{max(row.arithmetic_us, link) / row.us:.2f}",
            _us_cell(library_us),
            by,
            f"{library_us / row.us:.2f}",
            never_slower.fused_choice(row.op, *row.sizes, named(row.hardware), row.ranks)[0],
        ])  # fmt: skip
    return markdown_lines(names, lines)


def link_us(row: PlayedProblem) -> float:
    """Of the row's bytes on the busiest link."""
    hardware = named(row.hardware)
    return row.link_bytes * 1e6 / hardware.link_bandwidth / hardware.link_sustained


# Wanted of the longer of arithmetic and link, and most of the link's time where that is the bound.
_OVERLAPPED, _OVERLAPPED_SMALL, _OF_LINK = 0.95, 0.85, 1.1
_SMALL, _LARGE_ROWS = "Llama-3 8B", 2048


def overlap_table(rows: Sequence[PlayedProblem]) -> str:
    """What is hidden of communication on 8 H100 from M = 2048 on, beside what is wanted."""
    wanted = [
        row for row in rows
        if (row.hardware, row.ranks) == ("H100", 8) and row.M >= _LARGE_ROWS
        and row.model != "Qwen2-72B" and row.op != "matmul_all_reduce"
    ]  # fmt: skip
    lines = [_overlap_line(row) for row in wanted]
    names = (
        *("op", "model", "M", "us", "arithmetic", "link", "exposed", "wanted", "had"),
        *("bf16 wire: us", "link", "had"),
    )
    return "\n".join(markdown_lines(names, lines, texts=2))


def _overlap_line(row: PlayedProblem) -> list[str]:
    """With the narrowest wire by closed forms, which are within 4 % at the median."""
    us, arithmetic, link = row.us, row.arithmetic_us, link_us(row)
    small = row.model == _SMALL
    narrow = ["", "", ""]
    least = link
    if row.op == "matmul_reduce_scatter":
        sizes = row.op, *row.sizes, "bfloat16", named(row.hardware), row.ranks
        rate = 1 / library.UNDER_POWER  # as in `best_library`
        made = fused_times.fused_time(*sizes, rate=rate, wire=torch.bfloat16)
        least = made.link_us
        narrow = [_us_cell(made.us), _us_cell(least), _share(made.us, arithmetic, least, small)]
    bound = small and least > arithmetic
    wanted = f"link x {_OF_LINK}" if bound else f"{_OVERLAPPED_SMALL if small else _OVERLAPPED}"
    return [
        row.op, row.model, str(row.M), _us_cell(us), _us_cell(arithmetic), _us_cell(link),
        _us_cell(row.exposed_us), wanted, _share(us, arithmetic, link, small), *narrow,
    ]  # fmt: skip


def _share(us: float, arithmetic: float, link: float, small: bool) -> str:
    """As the wanted figure has it."""
    if small and link > arithmetic:
        return f"link x {us / link:.2f}"
    return f"{max(arithmetic, link) / us:.2f}"


def best_library(row: PlayedProblem) -> tuple[str, float]:
    """The quickest of what a user has without weft, and its time on the same chip.

    Fused kernels multiply at all that is sustained here; so does the library.
    """
    hardware = named(row.hardware)
    same = replace(hardware, sustained=hardware.sustained / library.UNDER_POWER)
    ways = library.unfused_us(row.op, *row.sizes, "bfloat16", same, row.ranks)
    return min(ways.items(), key=lambda way: way[1])


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


def write_tables(
    path: Path,
    rows: Sequence[PlayedProblem],
    others: Sequence[Measured],
) -> None:
    """Put tables and errors between the page's marks."""
    inner = f"{tables_by_hardware(rows)}\n### The same problems, measured by others\n\n"
    inner += beside_others(others)
    text = between_marks(path.read_text(), "overlap", overlap_table(rows))
    path.write_text(between_marks(text, "scaling", inner))


def _us_cell(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
