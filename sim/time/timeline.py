"""Timeline: what a run took in virtual time, and where the time went."""

from __future__ import annotations

import heapq
import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from weft.collectives.prices.hardware import Hardware, named
from weft.sim.time.clock import Played, TimeSpan, arithmetic_us, library_matmul_us, play
from weft.sim.time.trace import HostOp, KernelLaunch, Store, Trace, Work

KINDS = ("arithmetic", "moving", "waiting", "idle")


@dataclass(frozen=True)
class Occupancy:
    """Shares of the makespan that a core spent, adding up to 1 where it runs one program at a time.

    `arithmetic`: in pipelines with dots; `moving`: in loads and stores without; `waiting`: for
    signals and for stores to be acknowledged; `idle`: with no program.
    """

    rank: int
    core: int
    arithmetic: float
    moving: float
    waiting: float
    idle: float


class Timeline:
    """A run in virtual time on `hardware`; all times in us.

    Attributes:
        hardware: what it was played on.
        trace: what was played; `on` plays it on another.

    Example:
        >>> timeline = weft.sim.run(8, fn, hardware="h100", numerics=False).timeline
        >>> timeline.makespan_us, timeline.arithmetic_us, timeline.exposed_us
        (742.1, 655.0, 31.9)
    """

    def __init__(self, trace: Trace, hardware: Hardware) -> None:
        self.trace, self.hardware = trace, hardware

    def on(self, hardware: Hardware | str) -> Timeline:
        """The same events on other hardware. Its kernels' tiles and grids stay as they were."""
        return Timeline(self.trace, named(hardware))

    @cached_property
    def played(self) -> Played:
        """Spans of every core and stream."""
        return play(self.trace, self.hardware)

    @property
    def makespan_us(self) -> float:
        """From the start to the end of the last rank."""
        return self.played.makespan

    @cached_property
    def arithmetic_us(self) -> float:
        """The busiest rank's dots alone, and what they wait for, in the tiles that it made, on all
        of its cores."""
        return max(self._arithmetic(rank) for rank in range(len(self.trace.streams)))

    def _arithmetic(self, rank: int) -> float:
        hardware, total = self.hardware, 0.0
        for event in self.trace.events(rank):
            if isinstance(event, HostOp) and event.matmul is not None:
                total += library_matmul_us(hardware, *event.matmul, event.dtype)
            elif isinstance(event, KernelLaunch):
                cores = [0.0] * hardware.cores
                dots = (arithmetic_us(hardware, tile) for tile in _work_by_tile(event))
                # The longest first, as short ones then fill what these leave.
                for us in sorted(dots, reverse=True):
                    heapq.heappush(cores, heapq.heappop(cores) + us)
                total += max(cores)
        return total

    @cached_property
    def _alone(self) -> Played:
        """The same, if what goes to peers and comes from them took no time."""
        return play(self.trace, self.hardware.without_communication())

    @cached_property
    def exposed_us(self) -> float:
        """How much sooner it would end if what goes to peers and comes from them took no time."""
        # Less waiting can make programs meet less happily elsewhere: by chance, not by the links.
        return max(0.0, self.makespan_us - self._alone.makespan)

    @cached_property
    def exposed_launches(self) -> dict[TimeSpan, float]:
        """Of `played.launches`: us that each takes longer than if communication took no time."""
        left: dict[tuple[int, str], deque[TimeSpan]] = {}
        for span in _spans_in_order(self._alone.launches):
            left.setdefault((span.rank, span.kernel), deque()).append(span)
        found = {}
        for span in _spans_in_order(self.played.launches):
            same = left.get((span.rank, span.kernel))  # waits may be gone
            alone = same.popleft() if same else None
            free_us = alone.end - alone.start if alone else 0.0
            found[span] = max(0.0, span.end - span.start - free_us)
        return found

    @property
    def overlap_efficiency(self) -> float:
        """Arithmetic alone as a share of the makespan."""
        return self.arithmetic_us / self.makespan_us if self.makespan_us else 1.0

    @cached_property
    def bound_us(self) -> float:
        """What no schedule can beat: the most of a rank's dots on all cores at once, of the bytes
        over one link, and of those of one HBM."""
        hardware, played = self.hardware, self.played
        link = hardware.link_bandwidth * hardware.link_sustained / 1e6
        hbm = hardware.hbm_bandwidth / 1e6
        dots = [
            sum(_whole_chip_us(hardware, event) for event in self.trace.events(rank))
            for rank in range(len(self.trace.streams))
        ]
        return max(*dots, 0.0, played.link_bytes / link, played.hbm_bytes / hbm)

    @cached_property
    def occupancy(self) -> list[Occupancy]:
        """Of every core of every rank."""
        ranks, cores = len(self.trace.streams), self.hardware.cores
        spent = [[dict.fromkeys(KINDS, 0.0) for _ in range(cores)] for _ in range(ranks)]
        for span in self.played.spans:
            spent[span.rank][span.core][span.kind] += span.end - span.start
        rows = []
        whole = self.makespan_us or 1.0
        for rank in range(ranks):
            for core in range(cores):
                shares = {kind: us / whole for kind, us in spent[rank][core].items()}
                shares["idle"] = max(0.0, 1 - sum(shares.values()))
                rows.append(Occupancy(rank, core, **shares))
        return rows

    def summary(self) -> dict[str, float]:
        """The figures of `table`, by name."""
        rows = self.occupancy
        mean = {kind: sum(getattr(row, kind) for row in rows) / len(rows) for kind in KINDS}
        return {
            "makespan_us": self.makespan_us,
            "arithmetic_us": self.arithmetic_us,
            "exposed_us": self.exposed_us,
            "overlap_efficiency": self.overlap_efficiency,
            "bound_us": self.bound_us,
            "link_bytes": self.played.link_bytes,
            "hbm_bytes": self.played.hbm_bytes,
            **{f"cores_{kind}": share for kind, share in mean.items()},
        }

    def table(self) -> Any:
        """A rich table: totals, then rank 0's kernels by name, which may overlap in streams."""
        from rich.table import Table

        table = Table(title=f"virtual time on {len(self.trace.streams)} x {self.hardware.name}")
        table.add_column("")
        table.add_column("us", justify="right")
        table.add_column("share", justify="right")
        whole = self.makespan_us or 1.0
        for name, us in (
            ("makespan", self.makespan_us),
            ("arithmetic alone (overlap efficiency)", self.arithmetic_us),
            ("exposed communication", self.exposed_us),
            ("bound by arithmetic, links and HBM", self.bound_us),
        ):
            table.add_row(name, f"{us:.1f}", f"{us / whole:.0%}")
        table.add_section()
        summary = self.summary()
        for kind in KINDS:
            share = summary[f"cores_{kind}"]
            table.add_row(f"cores, mean: {kind}", f"{share * whole:.1f}", f"{share:.0%}")
        table.add_section()
        launches: dict[str, list[float]] = {}
        for span in self.played.launches:
            if span.rank == 0:
                launches.setdefault(span.kernel, []).append(span.end - span.start)
        for kernel, times in launches.items():
            name = kernel if len(times) == 1 else f"{len(times)} x {kernel}"
            table.add_row(name, f"{sum(times):.1f}", f"{sum(times) / whole:.0%}")
        return table

    def chrome_trace(self) -> dict[str, Any]:
        """What chrome://tracing and Perfetto open: a process a rank, a thread a core."""
        events: list[dict[str, Any]] = []
        for rank in range(len(self.trace.streams)):
            about = {"ph": "M", "pid": rank}
            events.append({**about, "name": "process_name", "args": {"name": f"rank {rank}"}})
            label = {"name": "stream"}
            events.append({**about, "tid": 0, "name": "thread_name", "args": label})
        for span in _spans_in_order((*self.played.launches, *self.played.spans)):
            told = {"args": {"waits for": f"rank {span.peer}"}} if span.peer >= 0 else {}
            events.append(
                {
                    "ph": "X",
                    "pid": span.rank,
                    "tid": span.core + 1,
                    "ts": round(span.start, 4),
                    "dur": round(span.end - span.start, 4),
                    "name": span.kernel if span.core < 0 else span.kind,
                    "cat": span.kernel,
                    **told,
                }
            )
        return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": self.summary()}

    def save_trace(self, path: str | Path) -> None:
        """Write `chrome_trace` as JSON."""
        Path(path).write_text(json.dumps(self.chrome_trace()))

    def save_plot(self, path: str | Path, ranks: Iterable[int] = (0, 1)) -> None:
        """Draw the cores of some ranks over time, in the format that the suffix of `path` names."""
        from weft.sim.time.plot import draw

        draw(self, Path(path), [rank for rank in ranks if rank < len(self.trace.streams)])

    def __repr__(self) -> str:
        return (
            f"Timeline({len(self.trace.streams)} x {self.hardware.name}: {self.makespan_us:.1f} "
            f"us, of which arithmetic {self.arithmetic_us:.1f} us)"
        )


def _work_by_tile(launch: KernelLaunch) -> Iterator[Work]:
    """The dots of each tile: what a program multiplies before it stores, with or without waits."""
    for events in launch.programs:
        tile = Work()
        for event in (*events, Store(0, 0)):
            if isinstance(event, Store) and tile.turns:
                yield tile
                tile = Work()
            elif isinstance(event, Work) and event.turns:
                tile.turns += event.turns
                tile.flops += event.flops
                tile.results += event.results
                tile.specials += event.specials
                tile.dtype = event.dtype


def _whole_chip_us(hardware: Hardware, event: object) -> float:
    """Its dots at the rate of the whole chip."""
    if isinstance(event, KernelLaunch):
        us = sum(w.flops / hardware.core_flops_per_us(w.dtype) for w in _work_by_tile(event))
        return us / hardware.cores
    if isinstance(event, HostOp) and event.matmul is not None:
        Ms, N, K = event.matmul
        rate = hardware.core_flops_per_us(event.dtype) * hardware.cores
        return 2 * sum(Ms) * N * K / rate
    return 0.0


def _spans_in_order(spans: Iterable[Any]) -> list[Any]:
    return sorted(spans, key=lambda span: (span.rank, span.core, span.start))
