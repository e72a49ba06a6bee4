"""How the fused matmuls scale on GPUs, without having any: `python -m tools.scaling_page`.

Each op runs at real sizes, without numerics, on virtual ranks: the fused kernel with the chip's own
tiles and grid, the host engine, and a collective followed by a matmul. Rows are stored in a JSON
file one by one, from which an interrupted run resumes and the page is made.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tools import scaling_plot, scaling_tables
from weft import settings, sim
from weft.bench import shapes
from weft.bench.blocks.virtual import call, layer_timeline, share_of, timeline_of
from weft.bench.published.predict import prediction_of
from weft.bench.published.rows import SHIPPED, op_words, read_rows
from weft.collectives.prices.hardware import named
from weft.sim import H100, Hardware, Timeline

# By the names that the page has for them.
MODELS = {
    "Llama-3 8B": shapes.MODELS["llama-3-8b"],
    "Llama-3 70B": shapes.MODELS["llama-3-70b"],
    "Llama-3 405B": shapes.MODELS["llama-3-405b"],
    "Qwen2-72B": shapes.MODELS["qwen2-72b"],
}
_ROWS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# Each op with the numbers of tokens that it is looked at with; all-reduce is for decoding.
OPS = {
    "all_gather_matmul": _ROWS,
    "matmul_reduce_scatter": _ROWS,
    "matmul_all_reduce": (1, 16, 32, 64, 128, 256, 512),
}

_LAYER_ROWS = 2048  # of the picture
_ENGINES: tuple[settings.Engine, ...] = ("triton", "host", "generic")


@dataclass
class EngineTimes:
    """One problem on one domain: a rank's matmul is (M, K) @ (K, N). Times in us.

    Attributes:
        fused: the figures of the fused kernel's timeline, as `Timeline.summary` names them; empty
            if it has yet to run by today's rates.
        engines: makespan of each engine.
        slower_stores: the fused kernel where a program moves `SLOW_GBS`.
        auto: what the cost model takes.
    """

    hardware: str
    op: str
    model: str
    ranks: int
    M: int
    N: int
    K: int
    fused: dict[str, float] = field(default_factory=dict)
    engines: dict[str, float] = field(default_factory=dict)
    slower_stores: float = 0.0
    auto: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        return self.hardware, self.op, self.model, self.ranks, self.M

    @property
    def regret(self) -> float:
        """Time of the engine that is taken, over that of the best."""
        return self.engines[self.auto] / min(self.engines.values())


def rank_problem(op: str, model: str, M: int, ranks: int) -> tuple[int, int, int]:
    """(M, N, K) of a rank's matmul: the way up gathers its rows, the way down sums its results."""
    hidden, ffn = MODELS[model].hidden, MODELS[model].ffn
    N, K = (ffn, hidden) if op == "all_gather_matmul" else (hidden, ffn)
    return share_of(op, M, N, K, ranks)


class _ChosenError(Exception):
    """Not an error: it ends a call whose engine has been chosen."""


def auto_engine(op: str, M: int, N: int, K: int, ranks: int, hardware: Hardware) -> str:
    """The engine that `auto` takes."""

    def told(decision: settings.Decision) -> None:
        raise _ChosenError(decision.engine)

    def body(rank: int) -> None:
        with settings.engine("auto"), settings.listening(told):
            call(op, M, N, K, rank, ranks)

    try:
        sim.run(ranks, body, hardware=hardware, numerics=False)
    except _ChosenError as choice:
        return str(choice.args[0])
    raise RuntimeError(f"{op} chose no engine")


def engine_times(
    op: str,
    model: str,
    M: int,
    ranks: int,
    machines: Sequence[Hardware],
    say: Callable[[str], None],
    kept: Mapping[tuple[Any, ...], EngineTimes] | None = None,
) -> list[EngineTimes]:
    """The row of one problem on each of some machines with the same chip.

    Args:
        kept: rows by key; where these have the other engines' times, only the fused kernel runs.
    """
    _, N, K = rank_problem(op, model, M, ranks)
    timelines = {}
    had = [(kept or {}).get((hardware.name, op, model, ranks, M)) for hardware in machines]
    for engine in _ENGINES[:1] if all(row and row.engines for row in had) else _ENGINES:
        say(f"{op} {model} M={M} {engine}")
        timelines[engine] = timeline_of(op, M, N, K, ranks, machines[0], engine)
    rows = []
    for hardware, row in zip(machines, had, strict=True):
        played = {engine: timeline.on(hardware) for engine, timeline in timelines.items()}
        engines = row.engines if row else {}
        rows.append(
            EngineTimes(
                hardware.name,
                op,
                model,
                ranks,
                M,
                N,
                K,
                fused=played["triton"].summary(),
                engines=engines | {name: each.makespan_us for name, each in played.items()},
                slower_stores=_with_stores(timelines["triton"], hardware, SLOW_GBS),
                auto=auto_engine(op, M, N, K, ranks, hardware),
            )
        )
    return rows


def others_measured(rows: Sequence[EngineTimes]) -> list[scaling_tables.Measured]:
    """What others have published of the page's problems on H100s, beside the model.

    A fused kernel stands beside the page's own, in virtual time, where that has run and the chip is
    the same.
    """
    ours: dict[tuple[str | int, ...], EngineTimes] = {
        (row.op, row.M, row.N, row.K): row for row in rows if row.hardware == H100.name
    }
    found = []
    for published in read_rows(SHIPPED):
        if not published.gpu.startswith(H100.name) or published.unit != "us":
            continue
        made = prediction_of(published)
        if made.predicted is None or not (published.M and published.N and published.K):
            continue
        row = ours.get((op_words(published.op), *published.sizes("M", "N", "K")))
        if row is None or published.ranks != row.ranks:
            continue
        us = made.predicted
        if made.kind == "fused" and "500" not in published.gpu and row.fused:
            us = row.engines["triton"]
        found.append(scaling_tables.Measured(published, row.model, us, str(made.kind)))
    return found


# What a program moves, in GB/s: what its core could, what the model takes from an H200 (see
# `weft.collectives.prices.hardware`), less, and what was measured of one block of 128 threads that
# stores over a link (https://github.com/tile-ai/tilescale).
PROGRAM_GBS = (112, 40, 25, 12)
SLOW_GBS = 12  # of the tables' column
_STORES = (
    ("all_gather_matmul", "Llama-3 8B", 2048),
    ("matmul_reduce_scatter", "Llama-3 8B", 2048),
    ("matmul_reduce_scatter", "Llama-3 70B", 2048),
    ("matmul_all_reduce", "Llama-3 70B", 64),
)


def by_stores() -> list[dict[str, Any]]:
    """Some of the page's problems on H100s whose programs move more slowly, in us."""
    rows = []
    for op, model, M in _STORES:
        _print_progress(f"{op} {model} M={M}, programs that move more slowly")
        timeline = timeline_of(op, *rank_problem(op, model, M, 8), 8, H100, "triton")
        us = {str(rate): _with_stores(timeline, H100, rate) for rate in PROGRAM_GBS}
        rows.append({"op": op, "model": model, "M": M, "us": us})
    return rows


def _with_stores(timeline: Timeline, hardware: Hardware, rate: float) -> float:
    """Its makespan where a program moves `rate` GB/s."""
    return timeline.on(replace(hardware, program_bandwidth=rate * 1e9)).makespan_us


def read_times(path: Path) -> list[EngineTimes]:
    """The rows of a file; empty if it does not exist."""
    return [EngineTimes(**row) for row in json.loads(path.read_text())] if path.exists() else []


def write_times(path: Path, rows: Iterable[EngineTimes]) -> None:
    """Write the rows, in the order of the page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(row) for row in ordered(rows)], indent=1) + "\n")


def ordered(rows: Iterable[EngineTimes]) -> list[EngineTimes]:
    """In the order of the page: by op, hardware, model and number of tokens."""
    ops, models = [*OPS], [*MODELS]
    return sorted(rows, key=lambda r: (ops.index(r.op), r.hardware, models.index(r.model), r.M))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="tools.scaling_page", description=__doc__)
    parser.add_argument("--hardware", default="h100,h200", help="presets (default h100,h200)")
    parser.add_argument("--ops", default=",".join(OPS), help="(default all three)")
    parser.add_argument("--models", default=",".join(MODELS), help="(default all four)")
    parser.add_argument("--rows", help="M (default 128 .. 16384; all-reduce: 1 .. 512)")
    parser.add_argument("--ranks", type=int, default=8, metavar="W", help="(default 8)")
    parser.add_argument(
        "--keep", type=Path, default=Path("bench/results/scaling_page.json"), metavar="FILE",
        help="where rows are kept (default bench/results/scaling_page.json)",
    )  # fmt: skip
    parser.add_argument(
        "--page", type=Path, help="write the tables into this Markdown file, the picture beside it"
    )
    parser.add_argument(
        "--stores", action="store_true", help="try slower programs, and keep that as well"
    )
    parser.add_argument(
        "--layer", type=Path, metavar="PICTURE", help="draw the page's layer over time, no rows"
    )
    parser.add_argument("--no-run", action="store_true", help="only from rows that are kept")
    parser.add_argument("--again", action="store_true", help="first forget what all rows took")
    args = parser.parse_args(argv)
    machines = [named(name) for name in args.hardware.split(",")]
    if args.layer:
        model = MODELS["Llama-3 8B"]
        layer = layer_timeline(_LAYER_ROWS, model.hidden, model.ffn, args.ranks, machines[0])
        layer.save_plot(args.layer, ranks=(0,))
        return 0
    kept = {row.key: row for row in read_times(args.keep)}
    for row in kept.values() if args.again else ():
        row.fused, row.engines = {}, {}
    given = args.rows and tuple(map(int, args.rows.split(",")))
    wanted = [(M, op) for op in args.ops.split(",") for M in given or OPS[op]]
    for M, op in sorted(wanted):
        for model in args.models.split(","):
            keys = {(m.name, op, model, args.ranks, M): m for m in machines}
            run = [m for key, m in keys.items() if key not in kept or not kept[key].fused]
            if args.no_run or not run:
                continue
            for row in engine_times(op, model, M, args.ranks, run, _print_progress, kept):
                kept[row.key] = row
            write_times(args.keep, kept.values())
    stores = args.keep.with_name("slower_stores.json")
    if args.stores:
        stores.write_text(json.dumps(by_stores(), indent=1) + "\n")
    rows = [row for row in ordered(kept.values()) if row.ranks == args.ranks]
    if args.page:
        slower = json.loads(stores.read_text()) if stores.exists() else []
        scaling_tables.write_tables(args.page, rows, slower, others_measured(rows))
        pictured = [row for row in rows if row.hardware == machines[0].name and row.fused]
        scaling_plot.draw_scaling(pictured, args.page.with_suffix(".svg"))
    else:
        print(scaling_tables.tables_by_hardware(rows))
    return 0


def _print_progress(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
