"""The picture of a run: both loss curves, their difference, and where each rank's time went."""

from __future__ import annotations

import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("agg")  # before pyplot: no display is needed

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from weft.demo.report import TOLERANCE, Comparison

_PAPER, _INK, _FAINT = "#faf8f3", "#22223b", "#9a95a5"
_REFERENCE, _WEFT, _WAITING = "#f2a65a", "#3d348b", "#e63946"
_STYLE = {
    "figure.facecolor": _PAPER,
    "axes.facecolor": _PAPER,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlecolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e1d6",
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "font.size": 10,
}


def draw(comparison: Comparison, path: Path) -> None:
    """Write the picture as a PNG."""
    with plt.rc_context(_STYLE):
        figure = plt.figure(figsize=(13, 7.5), layout="constrained")
        left, right = figure.add_gridspec(1, 2, width_ratios=(1.5, 1), wspace=0.06)
        losses, differences = left.subgridspec(2, 1, height_ratios=(3, 1)).subplots(sharex=True)
        time, text = right.subgridspec(2, 1, height_ratios=(1, 1)).subplots()
        shape = comparison.run.shape
        figure.suptitle(
            f"weft demo: a Llama of {comparison.parameters / 1e6:.1f} M parameters "
            f"({shape.layers} layers of {shape.d_model}), tensor + sequence parallel on "
            f"{len(comparison.ranks)} {comparison.run.device.upper()} ranks",
            fontsize=14,
            fontweight="bold",
            x=0.01,
            ha="left",
        )
        _draw_losses(losses, comparison)
        _draw_differences(differences, comparison)
        _draw_time(time, comparison)
        _draw_text(text, comparison)
        figure.savefig(path, dpi=130)
        plt.close(figure)


def _draw_losses(axes: Axes, comparison: Comparison) -> None:
    reference, sharded = comparison.reference, comparison.ranks[0]
    steps = range(1, len(reference.losses) + 1)
    axes.plot(steps, reference.losses, color=_REFERENCE, lw=5, alpha=0.75, solid_capstyle="round")
    axes.plot(steps, sharded.losses, color=_WEFT, lw=1.4)
    axes.plot(steps[-1], reference.held_out, "D", color=_REFERENCE, ms=11)
    axes.plot(steps[-1], sharded.held_out, "D", color=_WEFT, ms=5)
    for name, result, color, y in (
        ("one process", reference, _REFERENCE, 0.93),
        (f"weft, {len(comparison.ranks)} ranks", sharded, _WEFT, 0.86),
    ):
        rate = comparison.tokens_per_second(result)
        axes.text(
            0.98,
            y,
            f"{name}:  loss {result.losses[-1]:.4f},  held-out {result.held_out:.4f},  "
            f"{rate:,.0f} tokens/s",
            color=color,
            transform=axes.transAxes,
            ha="right",
            fontweight="bold",
        )
    axes.set(title="Loss, nats a byte (diamonds: text that was held out)")


def _draw_differences(axes: Axes, comparison: Comparison) -> None:
    differences = comparison.differences
    steps = range(1, len(differences) + 1)
    floor = 1e-9  # equal losses have no place on a logarithmic axis
    axes.fill_between(steps, floor, [max(floor, d) for d in differences], color=_WEFT, alpha=0.8)
    axes.axhline(TOLERANCE, color=_WAITING, lw=1.2, ls="--")
    axes.text(1, TOLERANCE * 1.5, f"{TOLERANCE:g}", color=_WAITING, fontsize=9)
    axes.set(
        yscale="log",
        ylim=(floor, max(1e-2, 3 * max(differences))),
        xlabel="step",
        title=f"Difference of the two losses: at most {max(differences):.1e}",
    )


def _draw_time(axes: Axes, comparison: Comparison) -> None:
    rows = [("one process", comparison.reference, _REFERENCE)]
    rows += [(f"rank {rank}", result, _WEFT) for rank, result in enumerate(comparison.ranks)]
    longest = max(comparison.step_ms(result) for _, result, _ in rows)
    for y, (_, result, color) in enumerate(rows):
        step, waiting = comparison.step_ms(result), comparison.wait_ms(result)
        axes.barh(y, step - waiting, color=color, height=0.62)
        axes.barh(y, waiting, left=step - waiting, color=_WAITING, height=0.62)
        share = f"{step:.0f} ms" + (f", {waiting / step:.0%} waiting" if y else "")
        axes.text(step + 0.02 * longest, y, share, va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.set(title="Time of a step: arithmetic, and waiting for peers (red)", xlabel="ms")
    axes.set_xlim(0, 1.32 * longest)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")


def _draw_text(axes: Axes, comparison: Comparison) -> None:
    lines = [
        wrapped
        for line in comparison.ranks[0].text.splitlines()
        for wrapped in textwrap.wrap(line, 58, drop_whitespace=False) or [""]
    ]
    axes.set(title="What the model writes", xticks=[], yticks=[])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    printable = "\n".join(lines[:14]).replace("$", r"\$")  # a $ would start a formula
    axes.text(
        0.0, 0.97, printable, family="monospace", fontsize=9, va="top", transform=axes.transAxes
    )
