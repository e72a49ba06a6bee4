"""`weft bench`: time weft beside its bounds and its peers, on this machine's ranks."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from weft.bench import collectives_suite, dispatch_suite, mlp_suite
from weft.bench.harness import Case, on_ranks, write_json

_EXAMPLES = """examples:
  weft bench mlp                          a tensor-parallel MLP's training step, 4 shapes
  weft bench mlp --shapes 1024,1024,4096  tokens, hidden, ffn of your own
  weft bench collectives --quick          collectives against Gloo, few rounds
  weft bench dispatch                     host time of DTensor's operations against torch's
"""


def _mlp(shapes: Sequence[tuple[int, int, int]], rounds: int) -> list[Case]:
    return [mlp_suite.run(shape, rounds) for shape in _shown(shapes)]


def _collectives(sizes: Sequence[int], rounds: int) -> list[Case]:
    todo = [(op, size) for op in collectives_suite.OPS for size in sizes]
    return [collectives_suite.run(op, size, rounds) for op, size in _shown(todo)]


def _shown(todo: Sequence[Any]) -> Iterator[Any]:
    """Iterate with a progress bar on rank 0's terminal."""
    import torch.distributed as dist
    from rich.console import Console
    from rich.progress import track

    if dist.get_rank() == 0:
        yield from track(todo, "benchmark", console=Console(stderr=True), transient=True)
    else:
        yield from todo


def print_table(title: str, cases: list[Case], unit: Literal["ms", "us"] = "ms") -> None:
    """Times, the spread where it is wide, and the ratios."""
    from rich.console import Console
    from rich.table import Table

    scale = 1e3 if unit == "ms" else 1
    table = Table(title=title, title_justify="left")
    table.add_column("case")
    for name in cases[0].us:
        table.add_column(f"{name}, {unit}", justify="right")
    for name in cases[0].ratios:
        table.add_column(name, justify="right")
    for row in cases:
        cells = [
            f"{us / scale:.3g}"
            + (f" ±{row.spread[name] * 50:.0f}%" if row.spread[name] > 0.2 else "")
            for name, us in row.us.items()
        ]
        table.add_row(row.name, *cells, *(f"{ratio:.2f}" for ratio in row.ratios.values()))
    if len(cases) > 1:
        means = [
            math.exp(sum(math.log(row.ratios[name]) for row in cases) / len(cases))
            for name in cases[0].ratios
        ]
        table.add_section()
        table.add_row("geometric mean", *[""] * len(cases[0].us), *(f"{m:.2f}" for m in means))
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.split(","))
    except ValueError:
        shape = ()
    if len(shape) != 3 or min(shape) < 1:
        raise argparse.ArgumentTypeError(f"a shape is tokens,hidden,ffn, got {text!r}")
    return shape


def main(argv: Sequence[str] | None = None) -> int:
    """Run a suite and print its table; the exit status is 0 if every case was right."""
    parser = argparse.ArgumentParser(
        prog="weft bench",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "suite", choices=["mlp", "collectives", "dispatch"], nargs="?", default="mlp"
    )
    parser.add_argument("--ranks", type=int, default=2, help="CPU ranks (2)")
    parser.add_argument("--rounds", type=int, help="timed rounds a case (21; 5 with --quick)")
    parser.add_argument("--quick", action="store_true", help="few rounds, small sizes")
    parser.add_argument(
        "--shapes", type=_shape, nargs="+", metavar="S,H,F", help="tokens,hidden,ffn for mlp"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the rows as JSON")
    args = parser.parse_args(argv)
    if args.ranks < 2:
        parser.error(f"--ranks must be at least 2, got {args.ranks}: one rank has no peers")
    rounds = args.rounds or (5 if args.quick else 21)
    if args.suite == "dispatch":
        cases = dispatch_suite.run(rounds)
        print_table(f"weft bench dispatch: median of {rounds} rounds", cases, "us")
    else:
        body: Callable[..., list[Case]] = _mlp
        todo: Sequence[Any] = args.shapes or mlp_suite.SHAPES[: 1 if args.quick else None]
        if args.suite == "collectives":
            body = _collectives
            todo = [s for s in collectives_suite.SIZES if not args.quick or s <= 1 << 20]
        if args.suite == "mlp" and any(s[0] % args.ranks or s[2] % args.ranks for s in todo):
            parser.error(f"--ranks {args.ranks} must divide the tokens and the ffn of every shape")
        cases = on_ranks(args.ranks, body, todo, rounds)
        print_table(
            f"weft bench {args.suite}: {args.ranks} ranks, median of {rounds} rounds", cases
        )
    if args.out:
        write_json(args.out, args.suite, args.ranks, cases)
        print(f"wrote {args.out}")
    return 0
