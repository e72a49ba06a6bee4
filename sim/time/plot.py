"""The picture of a timeline: what every core of a rank does, over time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.sim.time.timeline import Timeline

_COLOURS = {"arithmetic": "#2f6f9f", "moving": "#e0a030", "waiting": "#c04040"}


def draw(timeline: Timeline, path: Path, ranks: list[int]) -> None:
    """Write the picture: a panel a rank, a line a core, idle left white."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    figure, axes = plt.subplots(
        len(ranks), 1, figsize=(12, 1 + 3.5 * len(ranks)), sharex=True, squeeze=False
    )
    spans: dict[tuple[int, int, str], list[tuple[float, float]]] = {}
    for span in timeline.played.spans:
        spans.setdefault((span.rank, span.core, span.kind), []).append(
            (span.start, span.end - span.start)
        )
    for axis, rank in zip(axes[:, 0], ranks, strict=True):
        _draw_rank(axis, {key[1:]: bars for key, bars in spans.items() if key[0] == rank})
        axis.set_ylabel(f"rank {rank}: cores")
        axis.set_ylim(timeline.hardware.cores, 0)
        axis.set_xlim(0, timeline.makespan_us)
    axes[-1, 0].set_xlabel("us")
    figure.suptitle(
        f"{len(timeline.trace.streams)} x {timeline.hardware.name}: "
        f"{timeline.makespan_us:.0f} us, arithmetic alone {timeline.arithmetic_us:.0f} us"
    )
    handles = [Patch(color=colour, label=kind) for kind, colour in _COLOURS.items()]
    figure.legend(handles=handles, loc="upper right", ncols=len(handles), frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_rank(axis: Any, spans: dict[tuple[int, str], list[tuple[float, float]]]) -> None:
    for (core, kind), bars in spans.items():
        axis.broken_barh(bars, (core, 1), facecolors=_COLOURS[kind], linewidth=0)
