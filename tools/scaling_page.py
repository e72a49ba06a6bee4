"""How the fused matmuls scale on GPUs, without having any: `python -m tools.scaling_page`.

Each op's fused kernel runs at real sizes, without numerics, on virtual ranks, with the chip's own
tiles and grid. Rows are stored in a JSON file one by one, from which an interrupted run resumes and
the page is made: to play them all again, remove it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tools import scaling_plot, scaling_tables
from weft.bench import shapes
from weft.bench.blocks.virtual import layer_timeline, share_of, timeline_of
from weft.bench.published.predict import prediction_of
from weft.bench.published.rows import SHIPPED, op_words, read_rows
from weft.collectives.prices.hardware import named
from weft.sim import H100, Hardware

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
    "matmul_all_reduce": (1, 16, 64, 256),
}

KEPT = Path(__file__).resolve().parents[1] / "bench" / "results" / "scaling_page.json"
_RANKS = 8
_LAYER_ROWS = 2048  # of the picture
# What a program moves where no dots hide it, in GB/s, in the column of slower stores: measured of
# one block of 128 threads that stores over a link (https://github.com/tile-ai/tilescale).
SLOW_GBS = 12


@dataclass
class PlayedProblem:
    """The fused kernel of one problem on one domain, in virtual time, in us.

    Attributes:
        arithmetic_us, exposed_us, link_bytes: as `Timeline` has them.
        slower_stores_us: where a program moves `SLOW_GBS`.
    """

    hardware: str
    op: str
    model: str
    ranks: int
    M: int
    us: float
    arithmetic_us: float
    exposed_us: float
    link_bytes: float
    slower_stores_us: float

    @property
    def key(self) -> tuple[Any, ...]:
        return self.hardware, self.op, self.model, self.ranks, self.M

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(M, N, K): a rank's matmul is (M, K) @ (K, N)."""
        return rank_problem(self.op, self.model, self.M, self.ranks)


def rank_problem(op: str, model: str, M: int, ranks: int) -> tuple[int, int, int]:
    """(M, N, K) of a rank's matmul: the way up gathers its rows, the way down sums its results."""
    hidden, ffn = MODELS[model].hidden, MODELS[model].ffn
    N, K = (ffn, hidden) if op == "all_gather_matmul" else (hidden, ffn)
    return share_of(op, M, N, K, ranks)


def played_rows(
    op: str,
    model: str,
    M: int,
    ranks: int,
    machines: Sequence[Hardware],
    say: Callable[[str], None],
) -> list[PlayedProblem]:
    """The row of one problem on each of some machines with the same chip."""
    say(f"{op} {model} M={M}")
    timeline = timeline_of(op, *rank_problem(op, model, M, ranks), ranks, machines[0], "triton")
    rows = []
    for hardware in machines:
        made = timeline.on(hardware)
        slower = timeline.on(replace(hardware, program_bandwidth=SLOW_GBS * 1e9))
        rows.append(
            PlayedProblem(
                hardware.name,
                op,
                model,
                ranks,
                M,
                us=made.makespan_us,
                arithmetic_us=made.arithmetic_us,
                exposed_us=made.exposed_us,
                link_bytes=made.played.link_bytes,
                slower_stores_us=slower.makespan_us,
            )
        )
    return rows


def others_measured(rows: Sequence[PlayedProblem]) -> list[scaling_tables.Measured]:
    """What others have published of the page's problems on 8 H100s, beside the model.

    A fused kernel stands beside the page's own, in virtual time, where that has been played and the
    chip is the same.
    """
    problems: dict[tuple[str | int, ...], str] = {
        (op, *rank_problem(op, model, M, _RANKS)): model
        for op, tokens in OPS.items() for M in tokens for model in MODELS
    }  # fmt: skip
    played: dict[tuple[str | int, ...], PlayedProblem] = {
        (row.op, *row.sizes): row
        for row in rows if (row.hardware, row.ranks) == (H100.name, _RANKS)
    }  # fmt: skip
    found = []
    for published in read_rows(SHIPPED):
        if not published.gpu.startswith(H100.name) or published.unit != "us":
            continue
        made = prediction_of(published)
        if made.predicted is None or not (published.M and published.N and published.K):
            continue
        problem: tuple[str | int, ...] = (op_words(published.op), *published.sizes("M", "N", "K"))
        if problem not in problems or published.ranks != _RANKS:
            continue
        us = made.predicted
        if made.kind == "fused" and "500" not in published.gpu and problem in played:
            us = played[problem].us
        found.append(scaling_tables.Measured(published, problems[problem], us, str(made.kind)))
    return found


def read_rows_of(path: Path) -> list[PlayedProblem]:
    """The rows of a file; empty if it does not exist."""
    return [PlayedProblem(**row) for row in json.loads(path.read_text())] if path.exists() else []


def write_rows(path: Path, rows: Iterable[PlayedProblem]) -> None:
    """Write the rows, one a line, in the order of the page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(_as_line(row)) for row in ordered(rows))
    path.write_text(f"[\n{lines}\n]\n")


def _as_line(row: PlayedProblem) -> dict[str, Any]:
    """As JSON has it, to a nanosecond."""
    return {k: round(v, 3) if isinstance(v, float) else v for k, v in asdict(row).items()}


def ordered(rows: Iterable[PlayedProblem]) -> list[PlayedProblem]:
    """In the order of the page: by op, hardware, model and number of tokens."""
    ops, models = [*OPS], [*MODELS]
    return sorted(rows, key=lambda r: (ops.index(r.op), r.hardware, models.index(r.model), r.M))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="tools.scaling_page", description=__doc__)
    parser.add_argument("--hardware", default="h100", help="presets of one chip (default h100)")
    parser.add_argument("--ops", default=",".join(OPS), help="(default all three)")
    parser.add_argument("--models", default=",".join(MODELS), help="(default all four)")
    parser.add_argument("--rows", help="M (default 128 .. 16384; all-reduce: 1 .. 256)")
    parser.add_argument("--ranks", type=int, default=_RANKS, metavar="W", help="(default 8)")
    parser.add_argument(
        "--keep", type=Path, default=KEPT, metavar="FILE",
        help="where rows are kept (default bench/results/scaling_page.json)",
    )  # fmt: skip
    parser.add_argument(
        "--page", type=Path, help="write the tables into this Markdown file, the picture beside it"
    )
    parser.add_argument(
        "--layer", type=Path, metavar="PICTURE", help="draw the page's layer over time, no rows"
    )
    parser.add_argument("--no-run", action="store_true", help="only from rows that are kept")
    args = parser.parse_args(argv)
    machines = [named(name) for name in args.hardware.split(",")]
    if args.layer:
        model = MODELS["Llama-3 8B"]
        layer = layer_timeline(_LAYER_ROWS, model.hidden, model.ffn, args.ranks, machines[0])
        layer.save_plot(args.layer, ranks=(0,))
        return 0
    kept = {row.key: row for row in read_rows_of(args.keep)}
    given = args.rows and tuple(map(int, args.rows.split(",")))
    wanted = [(M, op) for op in args.ops.split(",") for M in given or OPS[op]]
    for M, op in sorted(wanted):
        for model in args.models.split(","):
            run = [m for m in machines if (m.name, op, model, args.ranks, M) not in kept]
            if args.no_run or not run:
                continue
            for row in played_rows(op, model, M, args.ranks, run, _print_progress):
                kept[row.key] = row
            write_rows(args.keep, kept.values())
    rows = [row for row in ordered(kept.values()) if row.ranks == args.ranks]
    if args.page:
        scaling_tables.write_tables(args.page, rows, others_measured(rows))
        pictured = [row for row in rows if row.hardware == machines[0].name]
        scaling_plot.draw_scaling(pictured, args.page.with_suffix(".svg"))
    else:
        print(scaling_tables.tables_by_hardware(rows))
    return 0


def _print_progress(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
