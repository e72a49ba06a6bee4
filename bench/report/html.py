"""One page for all suites of a folder: self-contained, images inline, readable by a newcomer."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
from pathlib import Path

from weft.bench.registry import SUITES
from weft.bench.report.advice import advice, best_engine, best_fraction
from weft.bench.report.plots import CAPTIONS
from weft.bench.report.tables import LEGEND, result_table
from weft.bench.rows import Case, Result
from weft.kernels.engine.tuning import OPS

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 2em auto; padding: 0 1em;
       color: #1b1f24 }
table { border-collapse: collapse; font-size: 13px }
th, td { padding: .25em .5em; border-bottom: 1px solid #ddd; text-align: right }
.table { overflow-x: auto }
th:first-child, td:first-child { text-align: left }
th { background: #f4f6f8 }
img { max-width: 100% }
figcaption, .small { color: #555; font-size: 13px }
code { background: #f4f6f8; padding: .1em .3em }
.warn { background: #fff4d6; padding: .5em 1em }
.good { background: #d9f2dd } .fair { background: #fdf3cf } .poor { background: #fbdcd8 }
"""

_INTRODUCTION = """
<p>weft runs a matmul and the communication around it as one op. It can do so in several ways
(<i>engines</i>): <b>triton</b> is the fused GPU kernel (on a CPU it is interpreted, for tests),
<b>host</b> multiplies peers' shards in place, <b>generic</b> is a collective followed by a matmul,
and <b>auto</b> asks a cost model measured on the machine which of them to take.</p>
<p>Every time stands beside a <i>bound</i>: the rank's own arithmetic, memory traffic and transfers,
measured on this machine in the same rounds. No program can be quicker than the bound, so <i>of
bound</i> tells how much there is left to gain. Results were compared with a reference
first; what was wrong has no time.</p>
"""


def report_page(results: Sequence[Result], folder: Path) -> str:
    """The report over these results; plots are taken from `folder`."""
    sections = "".join(_section(result, folder) for result in results)
    links = " · ".join(f'<a href="#{_e(r.suite)}">{_e(r.suite)}</a>' for r in results)
    return html_document(
        f"{_INTRODUCTION}<p>{links}</p>{sections}<h2>How to read the tables</h2><p>{_e(LEGEND)}</p>"
    )


def html_document(body: str) -> str:
    """A whole page around HTML."""
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>weft bench</title>"
        f"<style>{_STYLE}</style></head><body><h1>weft bench</h1>{body}</body></html>\n"
    )


def _e(text: object) -> str:
    return html.escape(str(text))


def _section(result: Result, folder: Path) -> str:
    table = result_table(result)
    about = f": {SUITES[result.suite]}" if result.suite in SUITES else ""
    parts = [
        f"<h2 id='{_e(result.suite)}'>{_e(result.suite)}{_e(about)}</h2>",
        f"<p class='small'>made by <code>{_e(result.command)}</code></p>",
        *(f"<p class='warn'>{_e(note)}</p>" for note in table.notes if "not quiet" in note),
        "<ul>" + "".join(f"<li>{_e(line)}</li>" for line in advice(result)) + "</ul>",
    ]
    if result.suite == "ops":
        parts += ["<h3>Which engine for which shape</h3>", *_engine_grids(result.cases)]
    for path in sorted(folder.glob(f"{result.suite}-*.png")):
        parts.append(html_picture(path, CAPTIONS[path.stem.partition("-")[2]]))
    cells = html_table(table.header, table.rows)
    parts.append(f"<details open><summary>All cases</summary>{cells}</details>")
    notes = [note for note in table.notes if "not quiet" not in note]
    parts.append("<ul class='small'>" + "".join(f"<li>{_e(n)}</li>" for n in notes) + "</ul>")
    parts.append(_environment(result))
    return "".join(parts)


def html_picture(path: Path, caption: str) -> str:
    """A PNG, inline, with what it shows."""
    data = base64.b64encode(path.read_bytes()).decode()
    return (
        f"<figure><img alt='{_e(caption)}' src='data:image/png;base64,{data}'>"
        f"<figcaption>{_e(caption)}</figcaption></figure>"
    )


def html_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of text, which scrolls where it is wider than the page."""
    return _scrolling(header, ("".join(f"<td>{_e(c)}</td>" for c in row) for row in rows))


def _scrolling(header: Iterable[str], rows: Iterable[str]) -> str:
    """The same of rows that are HTML."""
    head = "".join(f"<th>{_e(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<div class='table'><table><tr>{head}</tr>{body}</table></div>"


def _engine_grids(cases: Sequence[Case]) -> list[str]:
    """For each op and K: the fastest engine for M x N, coloured by its fraction of the bound."""
    grids = [
        "<p class='small'>In a cell: the quickest engine and how much of the bound it reaches. "
        "M: tokens, N: features out, K: features in, of the whole layer.</p>"
    ]
    for op in OPS:
        mine = [case for case in cases if case.params.get("op") == op and best_engine(case)]
        for K in sorted({case.params["K"] for case in mine}):
            cells = {(c.params["M"], c.params["N"]): c for c in mine if c.params["K"] == K}
            columns = sorted({n for _, n in cells})
            rows = [
                f"<td>M = {_e(m)}</td>" + "".join(_cell(cells.get((m, n))) for n in columns)
                for m in sorted({m for m, _ in cells})
            ]
            grid = _scrolling(["", *(f"N = {n}" for n in columns)], rows)
            grids.append(f"<p><b>{_e(op)}</b>, K = {_e(K)}</p>{grid}")
    return grids


def _cell(case: Case | None) -> str:
    if case is None:
        return "<td></td>"
    fraction = best_fraction(case)
    if fraction is None:
        return f"<td>{_e(best_engine(case))}</td>"
    colour = "good" if fraction >= 0.8 else "fair" if fraction >= 0.5 else "poor"
    return f"<td class='{colour}'>{_e(best_engine(case))} {fraction:.2f}</td>"


def _environment(result: Result) -> str:
    rows = [(key, str(value)) for key, value in result.environment.items() if value not in ("", [])]
    return f"<details><summary>Environment</summary>{html_table(('what', 'value'), rows)}</details>"
