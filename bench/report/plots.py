"""Plots of a result: time against the bound over size, a speed-up map, the crossover of fusion."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.colors import TwoSlopeNorm
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from weft.bench.blocks.virtual import layer_timeline
from weft.bench.report.advice import fusion_pays
from weft.bench.report.tables import figure, time_unit, variants_of
from weft.bench.rows import Case, Result, Timing

if TYPE_CHECKING:
    from weft.sim import Timeline

CAPTIONS = {
    "time": "Time of each variant over the size of the problem, with the middle 80 % of the "
    "rounds, beside the bound (black): nothing on this machine can be below it. Two sizes alone "
    "are not joined: they show no trend.",
    "map": "How many times as quick ours (what auto chose) is as its peer, a collective and a "
    "matmul written by hand, over the rows M and columns N of the layer. Blue: ours is quicker. "
    "Red: the peer is. ~: the rounds do not tell the two apart.",
    "crossover": "Time of weft's generic engine / time of its best fused engine, over the rows M, "
    "with the interval of the median (95 %). Above 1 fusion pays; auto should change over where a "
    "line crosses 1.",
    "timeline": "A feed-forward layer by weft's kernels, in virtual time: what each core of rank 0 "
    "does. Above them the kernels; hatched in red is how much longer communication makes each.",
    "bars": "Time of each variant, a group a case, with the middle 80 % of the rounds; the line is "
    "the bound.",
}
_TITLES = {
    "time": "time over size",
    "map": "ours against its peer",
    "crossover": "with fusion against without",
    "bars": "time of each case",
}


def draw_result(result: Result, folder: Path) -> list[Path]:
    """Draw the result as `folder`/SUITE-KIND.png; returns the files."""
    cases = [case for case in result.cases if case.timed]
    if not cases:
        return []
    drawn = {}
    if result.suite in ("ops", "collectives"):
        drawn["time"] = _over_size(cases)
    else:
        drawn["bars"] = _bars(cases)
    if result.suite == "ops":
        drawn["map"] = _speedup_map(cases)
        drawn["crossover"] = _crossover(cases)
    paths = []
    if layer := _layer(cases) if result.suite == "scaling" else None:
        paths.append(folder / f"{result.suite}-timeline.png")
        layer.save_plot(paths[-1], ranks=(0,))
    for kind, picture in drawn.items():
        if picture is None:
            continue
        paths.append(folder / f"{result.suite}-{kind}.png")
        picture.suptitle(f"weft bench {result.suite}: {_TITLES[kind]}", x=0.01, ha="left")
        picture.savefig(paths[-1], dpi=110)
        plt.close(picture)
    return paths


def _layer(cases: Sequence[Case]) -> Timeline | None:
    """The timeline of a layer of the first problem that the kernels have been run for, if any."""
    for case in cases:
        p = case.params
        sizes = p["M"], p["N"], p["world_size"]
        if "triton" in case.timed and not any(size % sizes[2] for size in sizes):
            return layer_timeline(p["M"], p["K"], p["N"], p["world_size"], p["chip"])
    return None


def _by_op(cases: Sequence[Case]) -> dict[str, list[Case]]:
    ops: dict[str, list[Case]] = {}
    for case in cases:
        ops.setdefault(case.params["op"], []).append(case)
    return ops


def _panels(count: int) -> tuple[Any, list[Any]]:
    columns = min(count, 3)
    rows = -(-count // columns)
    picture, axes = plt.subplots(
        rows, columns, figsize=(5 * columns, 4 * rows), squeeze=False, layout="constrained"
    )
    flat = list(axes.flat)
    for axis in flat[count:]:
        axis.set_visible(False)
    return picture, flat[:count]


def _over_size(cases: Sequence[Case]) -> Any:
    ops = _by_op(cases)
    names = variants_of(cases)
    picture, axes = _panels(len(ops))
    for axis, (op, some) in zip(axes, ops.items(), strict=True):
        # Shapes of one size are one point, the first of them.
        ordered = list(
            {
                _problem_size(case): case for case in sorted(some, key=_problem_size, reverse=True)
            }.values()
        )
        ordered.reverse()
        for i, name in enumerate(names):
            shown = [case for case in ordered if name in case.timed]
            axis.errorbar(
                [_problem_size(case) for case in shown],
                [case.timed[name].us / 1e3 for case in shown],
                _errors([case.timed[name] for case in shown], 1e3),
                fmt=_line_style(len(shown)),
                label=name,
                color=f"C{i}",
                markersize=3,
                linewidth=1,
                capsize=2,
            )
        bounded = [(case, us) for case in ordered if (us := case.bound_us) is not None]
        axis.plot(
            [_problem_size(case) for case, _ in bounded],
            [us / 1e3 for _, us in bounded],
            "k--",
            label="bound",
            linewidth=1.5,
        )
        in_bytes = "nbytes" in some[0].params
        axis.set(
            xscale="log",
            yscale="log",
            title=op,
            ylabel="ms",
            xlabel="bytes a rank" if in_bytes else "multiply-adds of the layer, M x N x K",
        )
        _plain_numbers(axis.yaxis)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    return picture


def _line_style(points: int) -> str:
    return "o-" if points > 2 else "o"


def _errors(timings: Sequence[Timing], scale: float) -> list[list[float]]:
    """From the 10th and to the 90th percentile of the rounds, as distances from the median."""
    below, above = [], []
    for timing in timings:
        low, high = timing.middle
        below.append(max(0.0, timing.us - low) / scale)
        above.append(max(0.0, high - timing.us) / scale)
    return [below, above]


def _plain_numbers(axis: Any) -> None:
    """Logarithmic, labelled 0.5, 1, 2, 5, 10: often all lies within one power of ten."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_locator(NullLocator())


def _problem_size(case: Case) -> int:
    p = case.params
    return int(p["nbytes"]) if "nbytes" in p else math.prod(p[key] for key in ("M", "N", "K"))


def _grid(cases: Sequence[Case]) -> tuple[list[int], list[int], dict[tuple[int, int], Case]]:
    """The cases of the K that most have, by (M, N)."""
    by_k: dict[int, dict[tuple[int, int], Case]] = {}
    for case in cases:
        p = case.params
        by_k.setdefault(p["K"], {})[p["M"], p["N"]] = case
    cells = max(by_k.values(), key=len)
    return sorted({m for m, _ in cells}), sorted({n for _, n in cells}), cells


def _speedup_map(cases: Sequence[Case]) -> Any:
    ops = {op: _grid(some) for op, some in _by_op(cases).items()}
    if all(len(cells) < 4 for _, _, cells in ops.values()):
        return None
    picture, axes = _panels(len(ops))
    for axis, (op, (rows, columns, cells)) in zip(axes, ops.items(), strict=True):
        gains = {at: case.gain for at, case in cells.items() if case.gain is not None}
        values = [[gains.get((m, n)) for n in columns] for m in rows]
        logs = [[math.log2(gain.median) if gain else math.nan for gain in row] for row in values]
        axis.imshow(logs, cmap="RdBu", norm=TwoSlopeNorm(0, -2, 2), aspect="auto", origin="lower")
        for i, row in enumerate(values):
            for j, gain in enumerate(row):
                if gain is not None:
                    colour = "white" if abs(math.log2(gain.median)) > 1.4 else "black"
                    axis.text(j, i, str(gain), ha="center", va="center", color=colour)
        case = next(iter(cells.values()))
        axis.set(
            title=f"{op}\n{case.peer} / {case.main}, K = {case.params['K']}", xlabel="N", ylabel="M"
        )
        axis.set_xticks(range(len(columns)), columns)
        axis.set_yticks(range(len(rows)), rows)
    return picture


def _crossover(cases: Sequence[Case]) -> Any:
    ops = {op: _grid(some) for op, some in _by_op(cases).items()}
    if all(len(rows) < 2 for rows, _, _ in ops.values()):
        return None
    picture, axes = _panels(len(ops))
    for axis, (op, (rows, columns, cells)) in zip(axes, ops.items(), strict=True):
        for n in columns:
            points = [(m, pays) for m in rows if (pays := fusion_pays(cells.get((m, n))))]
            if points:
                medians = [pays.median for _, pays in points]
                errors = [
                    [pays.median - pays.low for _, pays in points],
                    [pays.high - pays.median for _, pays in points],
                ]
                axis.errorbar(
                    [m for m, _ in points],
                    medians,
                    errors,
                    fmt=_line_style(len(points)),
                    label=f"N = {n}",
                    capsize=3,
                )
        axis.axhline(1, color="black", linewidth=1)
        axis.set(xscale="log", yscale="log", title=op, xlabel="M", ylabel="generic / best fused")
        axis.set_xticks(rows, [str(m) for m in rows])
        axis.xaxis.set_minor_locator(NullLocator())
        _plain_numbers(axis.yaxis)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    return picture


def _bars(cases: Sequence[Case]) -> Any:
    names, (unit, scale) = variants_of(cases), time_unit(cases)
    picture, axis = plt.subplots(
        figsize=(9, 1.2 + 0.16 * len(cases) * (len(names) + 1)), layout="constrained"
    )
    step = len(names) + 1
    for i, name in enumerate(names):
        shown = [(n, case) for n, case in enumerate(cases) if name in case.timed]
        times = [case.timed[name].us / scale for _, case in shown]
        places = [n * step + i for n, _ in shown]
        errors = _errors([case.timed[name] for _, case in shown], scale)
        bar = {"elinewidth": 0.7, "ecolor": "#404040"}
        axis.barh(places, times, height=0.9, label=name, color=f"C{i}", xerr=errors, error_kw=bar)
        for place, time, above in zip(places, times, errors[1], strict=True):
            axis.text(time + above, place, f" {figure(time)}", va="center", fontsize=7)
    for n, case in enumerate(cases):
        if (least := case.bound_us) is not None:
            axis.vlines(least / scale, n * step - 0.5, n * step + step - 1.5, color="black")
    axis.set_yticks(
        [n * step + (len(names) - 1) / 2 for n in range(len(cases))], [case.name for case in cases]
    )
    axis.invert_yaxis()
    widest = [timing.us for case in cases for timing in case.timed.values()]
    spread_out = max(widest) > 30 * min(widest)
    axis.set(xlabel=unit, xscale="log" if spread_out else "linear")
    axis.legend(fontsize="small")
    return picture
