"""The files of `--out DIR`.

SUITE.json        all of it, read back by `weft bench compare`
SUITE.csv         a row a case and variant
SUITE.md          the table
SUITE-*.png       the plots
index.html        the report over every suite whose JSON is in the folder
history/          the same runs as pytest-benchmark keeps them, numbered:
                  `pytest-benchmark --storage DIR/history compare`
"""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

from pytest_benchmark.storage.file import FileStorage

from weft.bench.report.tables import LEGEND, TextTable, result_table
from weft.bench.rows import Result
from weft.markdown import markdown_lines


def write_report(results: list[Result], folder: Path) -> Path:
    """Write the files of these results; returns the report's path."""
    from weft.bench.report import html, plots  # matplotlib takes a second to import

    folder.mkdir(parents=True, exist_ok=True)
    for result in results:
        name = result.suite
        result.write(folder / f"{name}.json")
        _write_csv(result, folder / f"{name}.csv")
        (folder / f"{name}.md").write_text(markdown(result_table(result)))
        plots.draw_result(result, folder)
        _keep_history(result, folder / "history")
    page = folder / "index.html"
    page.write_text(html.report_page(read_results(folder), folder))
    return page


def read_results(folder: Path) -> list[Result]:
    """The results in a folder, in the order of the suites."""
    from weft.bench.registry import SUITES

    found = [Result.read(path) for path in sorted(folder.glob("*.json"))]
    order = {name: i for i, name in enumerate(SUITES)}
    return sorted(found, key=lambda result: order.get(result.suite, len(order)))


_FIELDS = (
    "suite", "case", "variant", "ranks", "us", "spread", "rounds", "waited_us", "bound_us",
    "bound_by", "fraction", "exposed_us", "engine", "error", "failure", "params",
)  # fmt: skip


def _write_csv(result: Result, path: Path) -> None:
    with path.open("w", newline="") as file:
        out = csv.DictWriter(file, _FIELDS)
        out.writeheader()
        for case in result.cases:
            common: dict[str, Any] = {
                "suite": result.suite,
                "case": case.name,
                "ranks": case.params.get("ranks"),
                "bound_us": case.bound_us,
                "bound_by": case.bound_by,
                "params": " ".join(
                    f"{key}={value}" for key, value in case.params.items() if key != "prices"
                ),
            }
            if case.failure:
                out.writerow(common | {"failure": case.failure})
            for name, timing in case.variants.items():
                row = common | {"variant": name, "engine": timing.engine, "error": timing.error}
                if timing.ok:
                    row |= {
                        "us": f"{timing.us:.5g}",
                        "spread": f"{timing.spread:.3g}",
                        "rounds": len(timing.rounds_us),
                        "waited_us": timing.waited_us,
                        "fraction": case.fraction(name),
                        "exposed_us": case.exposed_us(name),
                    }
                out.writerow(row | {"failure": timing.failure})


def markdown(table: TextTable) -> str:
    """The table, what follows from it, and how to read it."""
    lines = [
        f"# {table.title}",
        "",
        *markdown_lines(table.header, table.rows),
        "",
        *(f"- {line}" for line in (*table.summary, *table.notes)),
        "",
        LEGEND,
    ]
    return "\n".join(lines) + "\n"


def _keep_history(result: Result, folder: Path) -> None:
    """Add the run to pytest-benchmark's storage: each variant of a case is a benchmark in s."""
    where = result.environment
    benchmarks = []
    for case in result.cases:
        for name, timing in case.timed.items():
            stats = timing.statistics
            seconds = (
                "min",
                "max",
                "mean",
                "stddev",
                "median",
                "iqr",
                "q1",
                "q3",
                "ld15iqr",
                "hd15iqr",
                "total",
            )
            benchmarks.append(
                {
                    "group": f"{result.suite} {case.name}",
                    "name": f"{case.name} [{name}]",
                    "fullname": f"{result.suite}::{case.name}[{name}]",
                    "params": None,
                    "param": None,
                    "extra_info": {"bound_us": case.bound_us, "fraction": case.fraction(name)},
                    "options": {"timer": "perf_counter", "warmup": True},
                    "stats": stats
                    | {key: stats[key] * 1e-6 for key in seconds}
                    | {"ops": stats["ops"] * 1e6, "iterations": 1},
                }
            )
    if not benchmarks:
        return
    content = {
        "machine_info": where,
        "commit_info": {"id": where["commit"] or "unversioned", "dirty": "+" in where["commit"]},
        "benchmarks": benchmarks,
        "datetime": where["date"],
        "version": "5",
    }
    FileStorage(str(folder), logging.getLogger("weft")).save(content, result.suite)
