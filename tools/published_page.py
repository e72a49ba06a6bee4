"""The page of published figures: `python -m tools.published_page` writes its tables and picture."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from weft.bench.published.command import error_groups
from weft.bench.published.plot import draw_predictions
from weft.bench.published.predict import Prediction, prediction_of
from weft.bench.published.rows import SHIPPED, op_words, read_rows
from weft.bench.report.tables import figure
from weft.markdown import between_marks, markdown_lines

PAGE = Path(__file__).resolve().parents[1] / "docs" / "published.md"


def prediction_tables(predictions: Sequence[Prediction]) -> str:
    """Errors by group, then every row that has a prediction, by op."""
    parts = []
    for title, groups in error_groups(predictions):
        rows = [
            (name, str(e.rows), f"{e.median:.0%}", f"{e.ninth:.0%}", f"{e.worst:.0%}")
            for name, e in groups
        ]
        parts += [f"### {title[0].upper()}{title[1:]}", ""]
        parts += [*markdown_lines(("rows", "count", "median", "90 %", "worst"), rows), ""]
    parts += ["### Every row", ""]
    known = [each for each in predictions if each.expressible]
    for op in dict.fromkeys(op_words(each.row.op) for each in known):
        mine = [each for each in known if op_words(each.row.op) == op]
        head, cells = _COLUMNS, [_cells(each) for each in mine]
        if op.startswith("moe"):  # of which what is not hidden is a part
            head = *_COLUMNS, "predicted of"
            cells = [(*row, each.how) for row, each in zip(cells, mine, strict=True)]
        parts += [f"**{op}**", "", *markdown_lines(head, cells), ""]
    beyond = [each.why for each in predictions if not each.expressible]
    parts += [f"Without a prediction are {len(beyond)} rows: "]
    parts[-1] += "; ".join(f"{why} ({beyond.count(why)})" for why in dict.fromkeys(beyond)) + "."
    return "\n".join(parts)


_COLUMNS: tuple[str, ...] = (
    *("what", "GPUs", "M x N x K", "published", "predicted", "error"),
    *("kind", "half", "source"),
)


def _cells(each: Prediction) -> tuple[str, ...]:
    row = each.row
    unit = "" if row.unit == "us" else f" {row.unit}"
    return (
        row.what.replace("|", "/"),
        f"{row.world} x {row.gpu}",
        " x ".join(filter(None, (row.M, row.N, row.K))),
        f"{figure(row.published)}{unit}",
        f"{figure(each.predicted)}{unit}",
        f"{each.error:+.0%}",
        str(each.kind),
        "fitted" if row.is_fitted_on else "held out",
        re.sub(r"https://(github.com/)?", "", row.source),
    )


def main() -> None:
    """Write the page and its picture."""
    predictions = [prediction_of(row) for row in read_rows(SHIPPED)]
    draw_predictions(predictions, PAGE.with_suffix(".svg"))
    PAGE.write_text(between_marks(PAGE.read_text(), "published", prediction_tables(predictions)))


if __name__ == "__main__":
    main()
