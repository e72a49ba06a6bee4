"""The picture of a timeline: what every core of a rank does, over time, and in which kernel."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.sim.time.clock import TimeSpan
    from weft.sim.time.timeline import Timeline

_COLOURS = {"arithmetic": "#2f6f9f", "moving": "#e0a030", "waiting": "#c04040"}
_IDLE = "idle (white): no program, as before a launch or after the last tile"
_WIDTH, _LETTERS = 12, 150  # of a picture, in inches and in letters of a kernel's name
_STRIP = 0.09  # of a panel's height: the line of kernels above its cores


def draw(timeline: Timeline, path: Path, ranks: list[int]) -> None:
    """Write the picture: a panel a rank, its kernels above a line a core, idle left white."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    figure, axes = plt.subplots(
        len(ranks), 1, figsize=(_WIDTH, 1.6 + 3.5 * len(ranks)), sharex=True, squeeze=False
    )
    spans, cores = timeline.played.spans, timeline.hardware.cores
    for axis, rank in zip(axes[:, 0], ranks, strict=True):
        mine = [span for span in spans if span.rank == rank]
        _draw_cores(axis, mine)
        launches = {s: us for s, us in timeline.exposed_launches.items() if s.rank == rank}
        _draw_kernels(axis, launches, timeline.makespan_us, cores)
        axis.set_ylabel(f"rank {rank}: cores")
        axis.set_ylim(cores, -_STRIP * cores)
        axis.set_xlim(0, timeline.makespan_us)
        axis.set_title(_waited(rank, [*mine, *launches]), loc="left", fontsize=9)
    axes[-1, 0].set_xlabel("us")
    world = len(timeline.trace.streams)
    shown = "" if len(ranks) == world else f"; shown: rank {', '.join(map(str, ranks))} of {world}"
    figure.suptitle(
        f"{world} x {timeline.hardware.name}: {_us(timeline.makespan_us)}, arithmetic alone "
        f"{_us(timeline.arithmetic_us)}, exposed communication {_us(timeline.exposed_us)}{shown}"
    )
    handles = [Patch(color=colour, label=kind) for kind, colour in _COLOURS.items()]
    handles.append(Patch(facecolor="white", edgecolor="#808080", label=_IDLE))
    handles.append(Patch(color=_KERNEL, label="kernel"))
    handles.append(Patch(facecolor=_KERNEL, label="exposed communication of it", **_EXPOSED))
    figure.legend(
        handles=handles, loc="lower center", ncols=len(handles), frameon=False, fontsize=8.5
    )
    figure.tight_layout(rect=(0, 0.3 / (1.6 + 3.5 * len(ranks)), 1, 1))
    figure.savefig(path, dpi=120)
    plt.close(figure)


_KERNEL = "#c9d3c0"
_EXPOSED: dict[str, Any] = {"edgecolor": "#c04040", "hatch": "////"}
_LEAST_EXPOSED = 2e-3  # of the picture's width


def _us(us: float) -> str:
    """Three digits."""
    return f"{us:.0f} us" if us >= 1000 else f"{us:.3g} us"


def _draw_cores(axis: Any, spans: list[TimeSpan]) -> None:
    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for span in spans:
        bars.setdefault((span.core, span.kind), []).append((span.start, span.end - span.start))
    for (core, kind), places in bars.items():
        axis.broken_barh(places, (core, 1), facecolors=_COLOURS[kind], linewidth=0)


def _draw_kernels(
    axis: Any, launches: dict[TimeSpan, float], makespan_us: float, cores: int
) -> None:
    """When each kernel ran, and its name as far as there is room; hatched at its end is what it
    took longer than if communication took no time.
    """
    height = _STRIP * cores
    for span, exposed in launches.items():
        colour = _COLOURS["waiting"] if span.kind == "waiting" else _KERNEL
        bar = [(span.start, span.end - span.start)]
        axis.broken_barh(bar, (-height, height), facecolors=colour, edgecolors="white")
        if exposed > _LEAST_EXPOSED * makespan_us:
            late = [(span.end - exposed, exposed)]
            axis.broken_barh(late, (-height, height), facecolors=colour, **_EXPOSED)
        room = int((span.end - span.start) / (makespan_us or 1.0) * _LETTERS)
        if room >= 3:
            name = span.kernel if len(span.kernel) <= room else span.kernel[: room - 1] + "…"
            middle = (span.start + span.end) / 2
            axis.text(middle, -height / 2, name, ha="center", va="center", fontsize=7, clip_on=True)


def _waited(rank: int, spans: list[TimeSpan]) -> str:
    """For whom the cores of `rank`, and its streams, waited."""
    waited: dict[int, float] = {}
    for span in spans:
        if span.peer >= 0:
            waited[span.peer] = waited.get(span.peer, 0.0) + span.end - span.start
    whole = sum(waited.values())
    if not whole:
        return f"rank {rank} waits for no signal"
    parts = [
        f"{us / whole:.0%} for {'its own programs' if peer == rank else f'rank {peer}'}"
        for peer, us in sorted(waited.items(), key=lambda pair: -pair[1])[:4]
    ]
    return f"rank {rank} waits for signals: {', '.join(parts)}"
