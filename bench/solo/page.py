"""The figures of `weft bench solo` as tables, one for each kind of call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.bench.report.tables import TextTable, result_table
from weft.bench.rows import Case, Result
from weft.markdown import markdown_lines

KINDS = {
    "fused matmuls": (
        "all_gather_matmul",
        "matmul_reduce_scatter",
        "matmul_all_reduce",
        "weight gradient",
    ),
    "attention": ("ring_attention", "ulysses_attention"),
    "decoding": ("flash_decode",),
    "experts": ("experts",),
    "norm of sums": ("norm",),
    "collectives": ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"),
}
ABOUT = (
    "One rank's true kernels of a group, on a whole chip: its peers' data and signals are at hand, "
    "so that it is everything but the link. weft: from an L2 that other data has filled; warm L2: "
    "right after the same call; alone: weft's kernel for a group of one, the same arithmetic; "
    "posting: of the peers' signals, in none of the others; host_us: of the host, to enqueue a "
    "call. Every time is of a result that was right, but for kernels without waits or status."
)


def tables_by_kind(result: Result) -> list[TextTable]:
    """A table for each kind of call that `result` has cases of."""
    made = []
    for kind, ops in KINDS.items():
        cases = [case for case in result.cases if case.params["op"] in ops]
        if cases:
            table = result_table(Result("solo", result.environment, cases))
            table.title = f"weft bench solo: {kind}"
            table.notes += epilogues(cases)
            made.append(table)
    return made


def epilogues(cases: Sequence[Case]) -> list[str]:
    """What each epilogue adds to the same call without it."""
    found = []
    plain = {_case_shape(case): case for case in cases if "epilogue" not in case.params}
    for case in cases:
        other = plain.get(_case_shape(case))
        if "epilogue" not in case.params or other is None:
            continue
        if {case.main} <= case.timed.keys() and {other.main} <= other.timed.keys():
            us = case.timed[case.main].us - other.timed[other.main].us
            found.append(f"{case.name}: the epilogue adds {us:.1f} us to {other.name}")
    return found


def _case_shape(case: Case) -> tuple[Any, ...]:
    return tuple(case.params.get(name) for name in ("op", "M", "N", "K", "dtype", "ranks"))


def solo_lines(path: Path) -> list[str]:
    """The figures in a file as a section of a page in Markdown; none if there is no file."""
    if not path.exists():
        return []
    made = ["", "## One rank of a group, on a whole chip", "", ABOUT]
    for table in tables_by_kind(Result.read(path)):
        made += ["", f"### {table.title.partition(': ')[2]}", ""]
        made += [*markdown_lines(table.header, table.rows), ""]
        made += [f"- {line}" for line in (*table.summary, *table.notes)]
    return made
