"""The picture of a run: both loss curves, their difference, and where each rank's time went."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")  # before pyplot: no display is needed

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import MaxNLocator

from weft.demo.report import TOLERANCE, Comparison

_PAPER, _INK, _FAINT, _GRID = "#fbf9f4", "#22223b", "#a29bac", "#ece7dc"
_REFERENCE, _WEFT, _WAITING = "#f2a65a", "#3d348b", "#e63946"
_STYLE: dict[Any, Any] = {
    "figure.facecolor": _PAPER,
    "axes.facecolor": _PAPER,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlecolor": _INK,
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "font.size": 10,
}
_FLOOR = 1e-9  # equal losses have no place on a logarithmic axis
_TEXT_COLUMNS, _TEXT_LINES = 62, 16


def draw_comparison(comparison: Comparison, path: Path) -> None:
    """Write the picture as a PNG."""
    shape, ranks = comparison.run.shape, len(comparison.ranks)
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplot_mosaic(
            [["losses", "time"], ["losses", "text"], ["differences", "text"]],
            figsize=(14, 8),
            width_ratios=(1.35, 1),
            height_ratios=(2, 1.6, 1.4),
            layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12),
        )
        figure.suptitle(
            f"weft demo   {comparison.parameters / 1e6:.2g} M parameter Llama, {shape.layers} "
            f"layers of {shape.d_model}, tensor + sequence parallel on {ranks} "
            f"{comparison.run.device.upper()} ranks",
            fontsize=14,
            fontweight="bold",
            x=0.012,
            ha="left",
        )
        _draw_losses(axes["losses"], comparison)
        _draw_differences(axes["differences"], comparison)
        _draw_time(axes["time"], comparison)
        _draw_text(axes["text"], comparison)
        figure.savefig(path, dpi=130)
        plt.close(figure)


def _draw_losses(axes: Axes, comparison: Comparison) -> None:
    reference, sharded = comparison.reference, comparison.ranks[0]
    steps = range(1, len(reference.losses) + 1)
    axes.plot(steps, sharded.losses, ".", color=_WEFT, ms=3, alpha=0.3)
    axes.plot(steps, _smooth(reference.losses), color=_REFERENCE, lw=6, solid_capstyle="round")
    axes.plot(steps, _smooth(sharded.losses), color=_WEFT, lw=1.5)
    axes.plot(steps[-1], reference.held_out, "D", color=_REFERENCE, ms=12, clip_on=False)
    axes.plot(steps[-1], sharded.held_out, "D", color=_WEFT, ms=5, clip_on=False)
    for name, result, color, y in (
        ("one process", reference, _REFERENCE, 0.92),
        (f"weft, {len(comparison.ranks)} ranks", sharded, _WEFT, 0.85),
    ):
        text = f"{name}: loss {result.losses[-1]:.4f}, held-out {result.held_out:.4f}"
        axes.text(
            0.98, y, text, color=color, fontweight="bold", ha="right", transform=axes.transAxes
        )
    axes.set(title="Loss in nats a byte (dots: each step, diamonds: held-out text)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _smooth(losses: list[float]) -> list[float]:
    """The mean of each loss and those shortly before it: batches differ in how hard they are."""
    span = max(1, len(losses) // 25)
    windows = (losses[max(0, i - span + 1) : i + 1] for i in range(len(losses)))
    return [sum(window) / len(window) for window in windows]


def _draw_differences(axes: Axes, comparison: Comparison) -> None:
    differences = comparison.differences
    steps = range(1, len(differences) + 1)
    axes.fill_between(steps, _FLOOR, [max(_FLOOR, d) for d in differences], color=_WEFT, alpha=0.8)
    axes.axhline(TOLERANCE, color=_WAITING, lw=1.2, ls="--")
    axes.text(1, TOLERANCE * 1.5, "what fp32 allows", color=_WAITING, fontsize=9)
    axes.set(
        yscale="log",
        ylim=(_FLOOR, max(1e-2, 3 * max(differences))),
        xlabel="step",
        title=f"Difference of the two losses: at most {comparison.largest_difference:.1e}",
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_time(axes: Axes, comparison: Comparison) -> None:
    rows = [("one process", comparison.reference, _REFERENCE)]
    rows += [(f"rank {rank}", result, _WEFT) for rank, result in enumerate(comparison.ranks)]
    longest = max(comparison.step_ms(result) for _, result, _ in rows)
    for y, (_, result, color) in enumerate(rows):
        step, waiting = comparison.step_ms(result), comparison.wait_ms(result)
        axes.barh(y, step - waiting, color=color, height=0.6)
        axes.barh(y, waiting, left=step - waiting, color=_WAITING, height=0.6)
        note = f"{waiting / step:.1%} waiting" if y else ""
        if y < 2:  # ranks go in step: one figure stands for all
            note = f"{comparison.tokens_per_second(result):,.0f} tokens/s\n{note}".strip()
        axes.text(step + 0.02 * longest, y, note, va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    busy = f", beside other work: load {comparison.load:.1f} a core" if comparison.busy else ""
    axes.set(title="Time of a step: arithmetic, and waiting for peers (red)", xlabel=f"ms{busy}")
    axes.set_xlim(0, 1.3 * longest)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")


def _draw_text(axes: Axes, comparison: Comparison) -> None:
    lines = [
        wrapped
        for line in comparison.ranks[0].text.splitlines()
        for wrapped in textwrap.wrap(line, _TEXT_COLUMNS, drop_whitespace=False) or [""]
    ]
    axes.set(title="What the model writes", xlim=(0, 1), ylim=(0, 1), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    card = FancyBboxPatch((0.012, 0.012), 0.976, 0.976, "round,pad=0,rounding_size=0.02", fc=_INK)
    axes.add_patch(card)
    shown = "\n".join(lines[:_TEXT_LINES]).replace("$", r"\$")  # a $ would start a formula
    shown = "".join(c if c.isascii() else "\ufffd" for c in shown)  # the font may lack the others
    axes.text(
        0.04, 0.94, shown, color=_PAPER, family="monospace", fontsize=8.5, va="top", linespacing=1.4
    )
