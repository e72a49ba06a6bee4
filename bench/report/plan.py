"""Layouts along a model: what each step takes, and how its result is placed."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from torch.distributed.tensor.placement_types import Placement

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import Patch

from weft.bench.report.tables import figure
from weft.dtensor import Plan

_LEAST = 2e-3  # of the step: what takes less and moves nothing is left out


@dataclass
class _Bar:
    """Equal steps of equal layers."""

    name: str
    placement: str
    told: str
    us: float = 0.0
    count: int = 0


def bars(plan: Plan) -> list[_Bar]:
    """The steps of a plan in the order of the model; those of equal layers are one."""
    found: dict[tuple[str, ...], _Bar] = {}
    for row in plan.rows:
        name = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", row.module)
        name = name if row.way else f"{name} {row.op}"
        ops = " ".join(_counts(row.ops))
        told = ", ".join(each for each in (row.way, ops) if each)
        key = name, str(row.placement), told
        bar = found.setdefault(key, _Bar(name.strip(), legend_words(row.placement), told))
        bar.us += row.us
        bar.count += 1
    least = _LEAST * plan.step_us
    return [bar for bar in found.values() if bar.told or bar.us > least]


def legend_words(placement: Placement) -> str:
    """In the words of the legend."""
    if placement.is_replicate():
        return "whole"
    if placement.is_partial():
        return "a sum over ranks"
    return f"cut along dim {getattr(placement, 'dim', '?')}"


def draw_plan(plan: Plan, path: Path) -> None:
    """Write the picture; its format is that of the name's ending.

    Raises:
        ValueError: an ending that matplotlib does not know.
    """
    every = bars(plan)
    kinds = sorted({bar.placement for bar in every})
    colours = {kind: plt.get_cmap("tab10")(i) for i, kind in enumerate(kinds)}
    with matplotlib.rc_context({"svg.hashsalt": "weft"}):  # the same file from the same plan
        picture, axes = plt.subplots(figsize=(11, 1.4 + 0.27 * len(every)))
        for at, bar in enumerate(every):
            axes.barh(at, bar.us / 1e3, color=colours[bar.placement], height=0.7)
            times = f"{bar.count} x {figure(bar.us / bar.count)} us"
            axes.annotate(
                f" {times}{', ' if bar.told else ''}{bar.told}",
                (bar.us / 1e3, at),
                va="center",
                fontsize=7,
            )
        axes.set_yticks(range(len(every)), [bar.name for bar in every], fontsize=7)
        axes.invert_yaxis()
        longest = max((bar.us for bar in every), default=1.0) / 1e3
        mesh = "x".join(map(str, plan.mesh.shape))
        axes.set(
            xlim=(0, 2.2 * longest),
            xlabel="ms of a step, forward and backward",
            title=f"Layouts along the model, on a mesh of {mesh}: {plan.step_us / 1e3:.3g} ms, "
            f"{plan.memory_bytes / 1e9:.3g} GB",
        )
        axes.legend(
            handles=[Patch(color=colours[kind], label=f"result {kind}") for kind in kinds],
            fontsize=7,
            loc="lower right",
            frameon=False,
        )
        picture.tight_layout()
        try:
            picture.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        finally:
            plt.close(picture)


def _counts(ops: tuple[str, ...]) -> list[str]:
    """Ops of forward, then of backward, each with its number."""
    if not ops:
        return []
    cut = ops.index("|")
    parts = []
    for title, part in (("", ops[:cut]), ("backward ", ops[cut + 1 :])):
        several = [f"{n} x {op}" if n > 1 else op for op, n in Counter(part).items()]
        parts += [title + " + ".join(several)] if several else []
    return [", ".join(parts)]
