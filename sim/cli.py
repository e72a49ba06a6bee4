"""weft sim: a script, or a function of one, on virtual ranks."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from weft.sim.errors import SimError
from weft.sim.runner import run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status: 1 if something was found."""
    parser = argparse.ArgumentParser(
        prog="weft sim",
        description="Run a script on virtual ranks in this process, under many interleavings, and "
        "check it for races, deadlocks and accesses out of bounds.",
    )
    parser.add_argument(
        "script",
        metavar="FILE[:FUNCTION]",
        help="FUNCTION is called with the rank; without it, every rank runs FILE from its top",
    )
    parser.add_argument("--ranks", type=int, default=4, help="how many (default 4)")
    parser.add_argument(
        "--schedules", default="100", help="interleavings to try, or `exhaustive` (default 100)"
    )
    parser.add_argument("--schedule", help="only this one, as an error named it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--concurrent", action="store_true", help="programs of a launch run concurrently too"
    )
    parser.add_argument("--no-races", action="store_true", help="look for deadlocks only")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds a schedule may take")
    args = parser.parse_args(argv)
    schedules = "exhaustive" if args.schedules == "exhaustive" else int(args.schedules)
    start = time.perf_counter()
    try:
        results = run(
            args.ranks,
            _function(args.script),
            seed=args.seed,
            schedules=schedules,  # type: ignore[arg-type]
            schedule=args.schedule,
            races=not args.no_races,
            programs="concurrent" if args.concurrent else "sequential",
            timeout=args.timeout,
        )
    except SimError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    tried = f"{results.schedules} schedules"
    if results.states:
        tried = f"all interleavings: {tried} through {results.states} states"
    print(
        f"{args.ranks} ranks, {tried}, {results.switches} hand-overs: nothing found in "
        f"{time.perf_counter() - start:.1f} s"
    )
    return 0


def _function(script: str) -> Callable[[int], Any]:
    name, _, function = script.partition(":")
    path = Path(name)
    code = compile(path.read_text(), str(path.resolve()), "exec")
    sys.path.insert(0, str(path.resolve().parent))
    if not function:
        return lambda rank: exec(code, {"__name__": "__main__", "__file__": str(path)})
    names: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    exec(code, names)
    if function not in names:
        raise SystemExit(f"weft sim: {path} has no function {function!r}")
    return names[function]  # type: ignore[no-any-return]
