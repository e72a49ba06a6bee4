"""`weft bench published [FILE]`: the model's times beside what others have measured and published.

Library rows (cuBLAS, NCCL, NVLS, flash attention, async-TP) are held against the model of the
library, fused ones against weft's own kernel in its place. Constants are fitted to one half of the
problems; the summary tells the other half apart.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from weft.bench.published.predict import Prediction, prediction_of
from weft.bench.published.rows import SHIPPED, op_words, read_rows
from weft.bench.report.tables import figure


class Errors(NamedTuple):
    """Of a group of predictions, absolute."""

    rows: int
    median: float
    ninth: float  # decile
    worst: float


def main(argv: Sequence[str] | None = None) -> int:
    """Print predictions and their errors. Exit status 2 if the file is none of such rows."""
    parser = argparse.ArgumentParser(
        prog="weft bench published",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "file", nargs="?", type=Path, default=SHIPPED, metavar="FILE",
        help="a CSV with the columns of weft.bench.published.rows (default: the shipped one)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="the rows, as a JSON list")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw predicted over published")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page of all of it")
    args = parser.parse_args(argv)
    try:
        predictions = [prediction_of(row) for row in read_rows(args.file)]
        if args.plot:
            from weft.bench.published.plot import draw_predictions

            draw_predictions(predictions, args.plot)
        if args.html:
            args.html.write_text(html_report(predictions))
    except ValueError as error:
        print(f"weft bench published: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # of the plot, or the page
        where = args.html or args.plot
        print(f"weft bench published: cannot write {where}: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps([prediction_json(each) for each in predictions], indent=1))
        return 0
    from weft.bench.report.terminal import console

    out = console()
    for line in prediction_lines(predictions):
        out.print(line, markup=False, soft_wrap=True)
    return 0


def prediction_json(prediction: Prediction) -> dict[str, Any]:
    """The row's cells, and what is said of it."""
    row = prediction.row
    return asdict(row) | {
        "published": row.published if prediction.expressible else None,
        "predicted": prediction.predicted,
        "error": prediction.error,
        "kind": prediction.kind,
        "expressible": prediction.expressible,
        "held_out": not row.is_fitted_on,
        "how": prediction.how,
        "why": prediction.why,
    }


def prediction_lines(predictions: Sequence[Prediction]) -> Iterable[str]:
    """Rows, then why others have no prediction, then the summary."""
    yield f"{'error':>6} {'predicted':>9} {'published':>9} {'unit':<6} kind    what"
    for each in predictions:
        if each.error is None or each.predicted is None:
            continue
        row = each.row
        yield (
            f"{each.error:>+6.0%} {figure(each.predicted):>9} {figure(row.published):>9} "
            f"{row.unit[:6]:<6} {each.kind:<7} {problem_words(each)}: {row.what}"
        )
    beyond = [each for each in predictions if not each.expressible]
    if beyond:
        yield f"\n{len(beyond)} rows without a prediction:"
        for why in dict.fromkeys(each.why for each in beyond):
            yield f"  {sum(each.why == why for each in beyond):>3}  {why}"
    for title, rows in error_groups(predictions):
        yield f"\n{title:<58} rows  median     90 %    worst"
        for name, errors in rows:
            yield (
                f"  {name:<56} {errors.rows:>4} {errors.median:>7.0%} {errors.ninth:>8.0%} "
                f"{errors.worst:>8.0%}"
            )


def html_report(predictions: Sequence[Prediction]) -> str:
    """A page with the picture, the summary and every row that has a prediction.

    Raises:
        ValueError: no row has one.
    """
    from weft.bench.published.plot import draw_predictions
    from weft.bench.report.html import html_document, html_picture, html_table

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "published.png")
        draw_predictions(predictions, path)
        parts = [html_picture(path, "Times by the model over times that others have published")]
    names = ("rows", "median", "90 %", "worst")
    for title, rows in error_groups(predictions):
        cells = [
            (name, e.rows, f"{e.median:.0%}", f"{e.ninth:.0%}", f"{e.worst:.0%}")
            for name, e in rows
        ]
        parts.append(html_table((title, *names), [[*map(str, line)] for line in cells]))
    told = [
        (f"{problem_words(p)}: {p.row.what}", p.kind or "", figure(p.predicted),
         figure(p.row.published), p.row.unit, f"{p.error:+.0%}")
        for p in predictions
        if p.error is not None and p.predicted is not None
    ]  # fmt: skip
    parts.append(html_table(("what", "kind", "predicted", "published", "unit", "error"), told))
    return html_document("".join(parts))


def problem_words(prediction: Prediction) -> str:
    """Of a row: op, sizes, GPUs."""
    row = prediction.row
    sizes = " x ".join(filter(None, (row.M, row.N, row.K)))
    return f"{row.op} {sizes}, {row.world} x {row.gpu}".replace(" ,", ",")


# From which published time on a row counts as large, in us.
_SIZES = ((500.0, "from 500 us"), (50.0, "50 to 500 us"), (0.0, "below 50 us"))


def size_of(prediction: Prediction) -> str:
    """By time, where it is one."""
    scale = {"us": 1.0, "ms": 1e3, "s": 1e6}.get(prediction.row.unit.lower())
    if scale is None:
        return "a rate or a ratio"
    us = prediction.row.published * scale
    return next(name for least, name in _SIZES if us >= least)


def _gpu_name(prediction: Prediction) -> str:
    return prediction.row.gpu.split("(")[0].strip()


def _half(prediction: Prediction) -> str:
    return "fitted on" if prediction.row.is_fitted_on else "held out"


def error_groups(
    predictions: Sequence[Prediction],
) -> Iterable[tuple[str, list[tuple[str, Errors]]]]:
    """Errors by half, op, chip and size; each for library and fused rows apart."""
    groupings: tuple[tuple[str, Callable[[Prediction], str]], ...] = (
        ("absolute error, by half of the problems", _half),
        ("held out, by op", lambda each: op_words(each.row.op)),
        ("held out, by chip", _gpu_name),
        ("held out, by size", size_of),
    )
    known = [each for each in predictions if each.expressible]
    for title, name in groupings:
        mine = [e for e in known if not (title.startswith("held") and e.row.is_fitted_on)]
        keys = sorted({(str(each.kind), name(each)) for each in mine}, reverse=True)
        rows = [
            (f"{kind}, {key}", errors_of([e for e in mine if (e.kind, name(e)) == (kind, key)]))
            for kind, key in keys
        ]
        if rows:
            yield title, rows


def errors_of(predictions: Sequence[Prediction]) -> Errors:
    """Of predictions, at least one; a decile is the least error that so many rows do not exceed."""
    found = sorted(abs(each.error) for each in predictions if each.error is not None)

    def below(share: float) -> float:
        return found[max(0, -(-int(share * 100) * len(found) // 100) - 1)]

    return Errors(len(found), below(0.5), below(0.9), found[-1])
