"""Predicted over published times, by op."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from weft.bench.published.predict import Prediction
from weft.bench.published.rows import op_words

_SCALES = {"us": 1.0, "ms": 1e3, "s": 1e6}
_MOST_OPS = 9  # with a colour of their own
_OTHERS = "others"


def draw_predictions(predictions: Sequence[Prediction], path: Path) -> None:
    """Write the picture; its format is that of the name's ending.

    Raises:
        ValueError: an ending that matplotlib does not know; no prediction of a time.
    """
    points = [each for each in predictions if each.expressible and each.row.unit in _SCALES]
    if not points:
        raise ValueError("there is nothing to plot: no row has a prediction in us, ms or s")
    counts = Counter(op_words(each.row.op) for each in points)
    ops = [*dict(counts.most_common(_MOST_OPS)), _OTHERS]
    colours = plt.get_cmap("tab10")
    with matplotlib.rc_context({"svg.hashsalt": "weft"}):  # the same file from the same rows
        picture, axes = plt.subplots(figsize=(9.5, 6))
        for kind, marker in (("library", "o"), ("fused", "^")):
            for index, op in enumerate(ops):
                mine = [p for p in points if p.kind == kind and _of(p, ops) == op]
                if mine:
                    axes.scatter(
                        [p.row.published * _SCALES[p.row.unit] for p in mine],
                        [(p.predicted or 0.0) * _SCALES[p.row.unit] for p in mine],
                        marker=marker, s=22, alpha=0.75, linewidths=0,
                        color=colours(index), label=f"{op}, {kind}",
                    )  # fmt: skip
        low, high = (f(p.row.published * _SCALES[p.row.unit] for p in points) for f in (min, max))
        ends = [low * 0.7, high * 1.4]
        axes.plot(ends, ends, color="black", linewidth=0.8)
        axes.fill_between(
            ends, [0.7 * end for end in ends], [1.3 * end for end in ends], color="0.9", zorder=0
        )
        axes.set(
            xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="published, us",
            ylabel="predicted, us",
            title="The model beside published times; the band is within 30 %",
        )  # fmt: skip
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
        picture.tight_layout()
        try:
            picture.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        finally:
            plt.close(picture)


def _of(prediction: Prediction, ops: Sequence[str]) -> str:
    op = op_words(prediction.row.op)
    return op if op in ops else _OTHERS
