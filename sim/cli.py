"""weft sim: a script, or a function of one, on virtual ranks."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from weft import settings
from weft.collectives.prices.hardware import PRESETS
from weft.collectives.ranks import pad
from weft.sim.errors import SimError
from weft.sim.run.gpu import run_on_gpu
from weft.sim.run.runner import run
from weft.sim.run.world import Programs
from weft.sim.schedule.schedules import parse
from weft.sim.time import compiling, levels
from weft.sim.time.timeline import Timeline

_EXAMPLES = """\
examples:
  weft sim examples/sim_planted_bug.py:call --ranks 3     finds a race, and names its schedule
  weft sim mine.py:fn --ranks 3 --schedule 17:2,40:0      that schedule again
  weft sim mine.py:fn --ranks 8 --schedules 5000 --replay
  weft sim train.py --ranks 4 -- --steps 2                a script for torchrun
  weft sim mine.py:fn --ranks 8 --hardware h100 --no-numerics --compile --plot out.png
  weft sim mine.py:fn --hosts 2x2 --schedules 20          calls in two levels
  weft sim mine.py:fn --hosts 8x8 --schedules 1 --hardware h100    and what they would take
  weft sim mine.py:fn --ranks 4 --gpu                     the compiled kernels, on one GPU
docs/sim.md teaches it by one bug, from start to end.
"""
_PICTURES = (".png", ".svg", ".pdf", ".jpg")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status: 1 if something was found."""
    parser = _parser()
    given = list(sys.argv[1:] if argv is None else argv)
    end = given.index("--") if "--" in given else len(given)
    args = parser.parse_args(given[:end])
    schedules = _schedules_asked_for(parser, args)
    try:
        function = _function(args.script, given[end + 1 :])
    except (SyntaxError, ValueError) as error:
        parser.error(f"{args.script}: not read, as Python finds in it: {error}")
    start = time.perf_counter()
    if args.gpu:
        if not torch.cuda.is_available():
            parser.error("--gpu: torch sees no GPU here; without --gpu, ranks need none")
        run_on_gpu(args.ranks, function, timeout=args.timeout)
        print(f"{args.ranks} ranks on one GPU: done in {time.perf_counter() - start:.1f} s")
        return 0
    programs: Programs = "concurrent" if args.concurrent else "sequential"
    calls: dict[str, settings.Decision] = {}

    def listened(rank: int) -> object:
        if rank or not (args.hosts and args.hardware):
            return function(rank)
        with settings.listening(lambda told: calls.setdefault(f"{told.op} {told.shapes}", told)):
            return function(rank)

    try:
        results = run(
            args.ranks,
            listened,
            seed=args.seed,
            schedules=schedules,
            schedule=args.schedule,
            races=not args.no_races,
            programs=programs,
            replay=args.replay,
            timeout=args.timeout or (3600.0 if args.no_numerics else 60.0),
            hardware=None if args.hosts else args.hardware,
            numerics=not args.no_numerics,
            symmetric=args.symmetric,
            hosts=args.hosts,
        )
    except SimError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        print(f"here by {_again(given, end, error)}", file=sys.stderr)
        return 1
    tried = f"{results.schedules} schedules"
    if results.states:
        tried = f"all interleavings: {tried} through {results.states} states"
    if args.replay:
        tried += f", {results.schedules - results.played} run, {results.distinct} different"
    found = "races not looked for" if args.no_numerics else "nothing found"
    print(
        f"{args.ranks} ranks, {tried}, {results.switches} hand-overs: {found} in "
        f"{time.perf_counter() - start:.1f} s"
    )
    if results.timeline is not None:
        _show_timeline(results.timeline, args.trace, args.plot)
    if args.hosts and args.hardware:
        levels.tell_times(calls.values(), PRESETS[args.hardware], len(args.hosts), args.hosts[0])
    if args.compile:
        sys.stdout.flush()
        path = Path(args.script.partition(":")[0])
        return compiling.tell_launches(results.launched, path, PRESETS[args.hardware].chip)
    return 0


def _hosts(text: str) -> list[int]:
    """How many ranks each host has."""
    hosts, _, ranks = text.partition("x")
    if not (hosts.isdecimal() and ranks.isdecimal() and int(hosts) and int(ranks)):
        raise argparse.ArgumentTypeError(f"must be hosts x ranks on each, as 8x8, got {text!r}")
    return [int(ranks)] * int(hosts)


def _schedules_asked_for(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> int | Literal["exhaustive"]:
    """How many schedules to run; exits with an error for options that do not fit together."""
    if args.hosts:
        if args.ranks not in (None, sum(args.hosts)):
            parser.error(f"--hosts are {sum(args.hosts)} ranks: leave out --ranks {args.ranks}")
        args.ranks = sum(args.hosts)
        given = args.no_numerics, args.symmetric, args.trace, args.plot, args.compile
        if any(given):
            parser.error(
                "--hosts has times in closed form: leave out --no-numerics, --symmetric, --trace, "
                "--plot and --compile"
            )
        if args.hardware and args.hosts[0] > (most := PRESETS[args.hardware].ranks):
            parser.error(
                f"--hosts: {args.hardware} has up to {most} ranks on each, got {args.hosts[0]}"
            )
    args.ranks = 4 if args.ranks is None else args.ranks
    if args.hardware is None and (args.no_numerics or args.trace or args.plot or args.compile):
        parser.error(
            "--no-numerics, --trace, --plot and --compile are for virtual time: add --hardware"
        )
    if args.symmetric and not args.no_numerics:
        parser.error("--symmetric leaves out what other ranks compute: add --no-numerics")
    if args.compile and ":" not in args.script:
        parser.error(f"--compile is for kernels of a function: give {args.script}:FUNCTION")
    if args.gpu and (others := _options_beside_gpu(parser, args)):
        parser.error(f"--gpu runs the compiled kernels once, unchecked: leave out {others}")
    if not 1 <= args.ranks <= pad.MAX_RANKS:
        parser.error(f"--ranks must be in 1..{pad.MAX_RANKS}, got {args.ranks}")
    if args.hardware and not args.hosts and args.ranks > (most := PRESETS[args.hardware].ranks):
        parser.error(f"--ranks: {args.hardware} is a domain of {most} ranks, got {args.ranks}")
    if args.timeout is not None and not args.timeout > 0:
        parser.error(f"--timeout must be above 0 seconds, got {args.timeout:g}")
    for path in filter(None, (args.trace, args.plot)):
        if not path.parent.is_dir():
            parser.error(f"no folder {str(path.parent)!r} to write {path.name!r} to")
        if path.is_dir():
            parser.error(f"{str(path)!r} is a folder: name a file in it")
    if args.plot and args.plot.suffix not in _PICTURES:
        parser.error(f"--plot writes {', '.join(_PICTURES)}, got {args.plot.name!r}")
    try:
        if args.schedule is not None:
            parse(args.schedule)
    except ValueError as error:
        parser.error(f"--schedule: {error}")
    if args.schedule is not None and args.schedules is not None:
        parser.error("--schedule is one interleaving: leave out --schedules")
    timed = args.hardware and not args.hosts
    asked = args.schedules
    if asked is None:
        asked = "1" if timed and args.schedule is None else "100"
    if asked != "exhaustive" and not (asked.isdecimal() and int(asked)):
        parser.error(f"--schedules must be a number from 1 on or `exhaustive`, got {asked!r}")
    schedules: int | Literal["exhaustive"] = "exhaustive" if asked == "exhaustive" else int(asked)
    if args.replay and (args.no_races or args.hardware or schedules == "exhaustive"):
        parser.error("--replay is for races, in a number of --schedules, without --hardware")
    if not Path(args.script.partition(":")[0]).is_file():
        parser.error(f"no script {args.script.partition(':')[0]!r}: give FILE or FILE:FUNCTION")
    return schedules


def _again(given: list[str], end: int, error: SimError) -> str:
    """The command for the schedule of `error` alone; the script's own arguments begin at `end`."""
    others = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--schedules", "--schedule", "--seed"):
        others.add_argument(option)
    others.add_argument("--replay", action="store_true")
    kept = others.parse_known_args(given[:end])[1]
    one = ["--seed", str(error.seed), "--schedule", str(error.schedule)]
    return shlex.join(["weft", "sim", *kept, *one, *given[end:]])


def _options_beside_gpu(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """What was asked for, by its options, that is none of a run on a GPU."""
    taken = ("script", "ranks", "timeout", "gpu")
    return ", ".join(
        f"--{name.replace('_', '-')}"
        for name, value in vars(args).items()
        if name not in taken and value != parser.get_default(name)
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="weft sim",
        description="Run a script on virtual ranks in this process, under many interleavings, and\n"
        "check it for races, deadlocks and accesses out of bounds. What follows `--` is\nwhat the "
        "script finds in sys.argv.",
        epilog=_EXAMPLES,
        allow_abbrev=False,  # what `_again` leaves out must be there by name
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "script",
        metavar="FILE[:FUNCTION]",
        help="FUNCTION is called with the rank; without it, every rank runs FILE from its top",
    )
    parser.add_argument("--ranks", metavar="W", type=int, help="how many (default 4)")
    parser.add_argument(
        "--hosts", metavar="HxR", type=_hosts, help="H hosts of R ranks each, as 8x8, in two levels"
    )
    parser.add_argument(
        "--schedules",
        metavar="N",
        help="interleavings to try, or `exhaustive` (default 100; with --hardware 1)",
    )
    parser.add_argument("--schedule", metavar="S", help="only this one, as an error named it")
    parser.add_argument(
        "--seed", metavar="N", type=int, default=0, help="of the interleavings (default 0)"
    )
    parser.add_argument(
        "--replay",
        action="store_true",
        help="do not run an interleaving that must come to the same as one before: thousands in "
        "seconds, but what the script prints or keeps is that of a few",
    )
    parser.add_argument(
        "--concurrent", action="store_true", help="programs of a launch run concurrently too"
    )
    parser.add_argument("--no-races", action="store_true", help="look for deadlocks only")
    parser.add_argument(
        "--timeout",
        metavar="S",
        type=float,
        help="seconds a schedule may take (default 60; without numerics 3600; with --gpu no limit)",
    )
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="run the compiled kernels instead, all ranks at once on the current GPU: not checked",
    )
    timing = parser.add_argument_group("virtual time", "what one schedule would take on GPUs")
    timing.add_argument("--hardware", choices=PRESETS, help="whose time to keep")
    timing.add_argument(
        "--no-numerics", action="store_true", help="skip the arithmetic: real sizes in minutes"
    )
    timing.add_argument(
        "--symmetric",
        action="store_true",
        help="with --no-numerics, for one call whose ranks have equal shares: run rank 0's kernels "
        "and take the others' for the same",
    )
    timing.add_argument(
        "--trace", metavar="FILE", type=Path, help="write a Chrome trace, for ui.perfetto.dev"
    )
    timing.add_argument(
        "--plot", metavar="FILE", type=Path, help=f"draw what the cores do ({', '.join(_PICTURES)})"
    )
    timing.add_argument(
        "--compile",
        action="store_true",
        help="compile what was launched: registers, spills (then the exit status is 1), ..",
    )
    return parser


def _show_timeline(timeline: Timeline, trace: Path | None, plot: Path | None) -> None:
    from rich.console import Console

    Console().print(timeline.table())
    for path, save in ((trace, timeline.save_trace), (plot, timeline.save_plot)):
        if path is not None:
            try:
                save(path)
            except OSError as error:
                raise SystemExit(f"weft sim: {path} is not written: {error.strerror}") from error
            print(f"wrote {path}")


def _function(script: str, arguments: list[str]) -> Callable[[int], Any]:
    name, _, function = script.partition(":")
    path = Path(name)
    sys.argv = [name, *arguments]
    if not function:
        code = compile(path.read_bytes(), str(path.resolve()), "exec")
        sys.path.insert(0, str(path.resolve().parent))
        names = {"__name__": "__main__", "__file__": str(path)}
        return lambda rank: _unless_it_exits(script, lambda: exec(code, {**names}))
    module = compiling.load_script(path)
    if not callable(getattr(module, function, None)):
        raise SystemExit(f"weft sim: {path} has no function {function!r}")
    called: Callable[[int], Any] = getattr(module, function)
    return lambda rank: _unless_it_exits(script, lambda: called(rank))


def _unless_it_exits(script: str, run: Callable[[], Any]) -> Any:
    try:
        return run()
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise RuntimeError(f"{script} exits with {leaving.code!r}") from leaving
