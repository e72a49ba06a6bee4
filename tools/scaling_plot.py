"""The picture of `tools.scaling_page`: what fusion gains over the best library, by M."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

from tools import scaling_tables

matplotlib.use("Agg")
from matplotlib import pyplot as plt

if TYPE_CHECKING:
    from tools.scaling_page import PlayedProblem


def draw_scaling(rows: Sequence[PlayedProblem], path: Path) -> None:
    """A panel for each op, a line for each model; shaded down to what slower stores would leave.

    Args:
        rows: of one chip.
        path: the format is that of its ending.
    """
    ops = [*dict.fromkeys(row.op for row in rows)]
    with matplotlib.rc_context({"svg.hashsalt": "weft"}):  # the same file from the same rows
        picture, axes = plt.subplots(
            1, len(ops), figsize=(4.2 * len(ops), 3.6), sharey=True, squeeze=False
        )
        for axis, op in zip(axes[0], ops, strict=True):
            axis.axhline(1.0, color="black", linewidth=0.8)
            for model in dict.fromkeys(row.model for row in rows):
                mine = [row for row in rows if (row.op, row.model) == (op, model)]
                gains = {row.M: scaling_tables.best_library(row)[1] / row.us for row in mine}
                slower = {row.M: gains[row.M] * row.us / row.slower_stores_us for row in mine}
                (line,) = axis.plot([*gains], [*gains.values()], "o-", markersize=3, label=model)
                whole = [gains[tokens] for tokens in slower]
                axis.fill_between(
                    [*slower], [*slower.values()], whole, color=line.get_color(), alpha=0.15
                )
            axis.set_xscale("log", base=2)
            axis.set(title=f"{op}, {rows[0].ranks} x {rows[0].hardware}", xlabel="M, tokens")
        axes[0][0].set_ylabel("best library / fused, time")
        axes[0][-1].legend(frameon=False, fontsize=8)
        picture.tight_layout()
        try:
            picture.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        finally:
            plt.close(picture)
