"""`weft bench`: time weft beside its bounds and its peers, on this machine's ranks."""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from weft.bench import shapes
from weft.bench.registry import SUITES
from weft.cli import Parser, at_least, device_and_ranks, make_folder, several

if TYPE_CHECKING:
    from weft.bench.problem import Options
    from weft.bench.rows import Case

_COMMANDS = {
    "compare": "weft.bench.report.compare",
    "explain": "weft.bench.commands.explain",
    "calibrate": "weft.bench.commands.calibrate",
    "memory": "weft.bench.commands.memory",
    "published": "weft.bench.published.command",
    "never-slower": "weft.bench.published.never_slower",
    "solo": "weft.bench.solo.command",
    "host": "weft.bench.host.command",
}
_WITH_ENGINES = {"ops", "scaling"}
_EPILOG = """\
suites (`all` runs every one):
{suites}
commands (each has its own --help):
  compare A B         what changed between two results; fails past --max-regression
  explain OP M N K W  the cost model's reasoning for one shape, beside the measured times
  solo                a rank's true kernels of a group of W, alone on a whole chip
  host                what the host takes to enqueue a call, on a driver that runs nothing
  memory              peak memory of a rank in attention over longer and longer sequences
  published [FILE]    the model's times beside those that others have published
  never-slower        what auto takes of the best time that the model knows of, for every size
  calibrate           measure this machine's rates again, from which auto chooses

shapes, for --shapes: a .yaml file of your own (see weft.bench.shapes), a model
({models}),
or sizes with commas:
  ops M,N,K         tokens, features out, features in of the whole linear layer
  scaling M,N,K     likewise                    mlp S,H,F         tokens, hidden, ffn
  collectives BYTES a rank                      redistribute ROWS,COLUMNS
  attention TOKENS,HEADS,KV_HEADS,HEAD_DIM of the whole sequence
  layers takes models only, dispatch and model take none

examples:
  weft bench ops --quick --out report       20 s; then open report/index.html
  weft bench ops --shapes llama-3-8b        the linears of a Llama, mirrored down to this CPU
  weft bench mlp --shapes 1024,1024,4096    a training step of your MLP
  weft bench collectives --filter all_reduce --ranks 4
  weft bench all --out report               every suite, one report
  weft bench mine.py --out report           kernels of your own: docs/own_kernels.md
  weft bench compare old/ops.json report/ops.json --max-regression 10
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the requested suites.

    The exit status is 0 if every variant that can run here was right, 1 if a case failed or a
    comparison found a regression, 2 for a wrong command line, 130 after Ctrl-C.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    if given and given[0] in _COMMANDS:
        command: Callable[[list[str]], int] = importlib.import_module(_COMMANDS[given[0]]).main
        return command(given[1:])
    return _run_and_report(given)


def _run_and_report(given: list[str]) -> int:
    from weft.bench import registry, runner
    from weft.bench.report import report, terminal
    from weft.bench.report.tables import result_table
    from weft.bench.rows import Result

    parser = _parser()
    args = parser.parse_args(given)
    options = options_of(args, parser)
    known = (*SUITES, "all")
    unknown = [name for name in args.suites if name not in known and not name.endswith(".py")]
    if unknown:
        parser.error(
            f"no suite {unknown[0]!r}: there are {', '.join(SUITES)} and all; or name a .py file "
            f"of your own"
        )
    named = args.suites or ["ops"]
    if args.engines and SUITES.keys() - _WITH_ENGINES >= set(named):
        parser.error(f"--engines is of ops and scaling: {', '.join(named)} would not heed it")
    try:
        wanted = registry.suites_named(named)
        names = [spec.name for each in wanted for spec in each.cases(options)]
        if not any(options.filter in name for name in names):
            raise ValueError(f"--filter {options.filter!r}: no case has that, but {names[0]!r} ...")
        if args.out:
            make_folder(args.out)
    except ValueError as error:
        parser.error(str(error))

    def show(result: Result) -> None:
        if result.cases:
            terminal.print_table(result_table(result))
        if result.suite == "ops":
            from weft.bench.suites import ops

            print(ops.engines_verdict(result.cases))
        if result.suite == "plan":
            from weft.bench.suites import plan

            print(plan.plan_verdict(result.cases))

    command = shlex.join(["weft", "bench", *given])
    results = runner.run_suites(wanted, options, command=command, on_result=show)
    terminal.show_legend()
    if args.out and any(result.cases for result in results):
        page = report.write_report([result for result in results if result.cases], args.out)
        print(f"wrote {args.out}: tables, plots, and the report, {page}")
    if any(result.interrupted for result in results):
        return 130
    return int(any(has_failed(case) for result in results for case in result.cases))


def has_failed(case: Case) -> bool:
    """Whether something of ours did not run or was wrong: what cannot run here is no failure."""
    return bool(case.failure) or (case.main in case.variants and not case.variants[case.main].ok)


def options_of(args: argparse.Namespace, parser: argparse.ArgumentParser) -> Options:
    """The `Options` that the command line of a suite asks for."""
    return replace(
        machine_options(args, parser),
        engines=tuple(args.engines or ()),
        shapes=tuple(entry for entries in args.shapes or () for entry in entries),
        full_size=args.full_size,
        quick=args.quick,
        rounds=args.rounds,
        seconds=args.seconds,
        filter=args.filter,
    )


def machine_options(args: argparse.Namespace, parser: argparse.ArgumentParser) -> Options:
    """The part of them that `add_machine_options` reads."""
    import torch

    from weft.bench.problem import Options

    device, ranks = device_and_ranks(parser, args.device, args.ranks)
    return Options(ranks=ranks, device=device, dtype=getattr(torch, args.dtype))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "weft bench",
        __doc__,
        epilog=_EPILOG.format(
            suites="".join(f"  {name:<14}{about}\n" for name, about in SUITES.items()),
            models=", ".join(shapes.MODELS),
        ),
    )
    parser.add_argument(
        "suites", nargs="*", metavar="SUITE", help="what to time (ops), or a .py file of your own"
    )
    add_machine_options(parser)
    parser.add_argument(
        "--shapes",
        type=shapes.parse_shapes,
        nargs="+",
        metavar="SHAPE",
        help="problems of your own",
    )
    parser.add_argument(
        "--engines",
        nargs="+",
        choices=["auto", "host", "generic", "triton", "peers"],
        help="of ops: only these (all that run well here); of scaling: triton for every size",
    )
    parser.add_argument("--filter", default="", metavar="TEXT", help="only cases named like this")
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds")
    parser.add_argument(
        "--full-size", action="store_true", help="models in their own size on a CPU, too"
    )
    parser.add_argument(
        "--rounds", type=at_least(1), metavar="N", help="timed rounds a case (as --seconds allows)"
    )
    parser.add_argument(
        "--seconds", type=float, default=1.5, help="aimed at a case, at least 7 rounds (1.5)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write tables, plots, a report")
    return parser


def add_machine_options(parser: argparse.ArgumentParser, *, ranks: bool = True) -> None:
    """What every command that runs ranks takes; without `ranks`, all but their number."""
    if ranks:
        parser.add_argument(
            "--ranks", type=several, metavar="W", help="how many (2 on a CPU, else one a GPU)"
        )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], help="where ranks compute (cuda where there is one)"
    )
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=["float64", "float32", "bfloat16", "float16"],
        help="of the operands (float32)",
    )
