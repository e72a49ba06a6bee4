"""`weft bench host`: what the host takes to enqueue a call of one rank of 8 H100, without a GPU.

Kernels are compiled for sm_90 and launched by Triton's own launcher into a driver that does nothing
(a C compiler is needed, as Triton needs one). Times are medians, in us:
  call        all of it
  launcher    Triton's launcher, once it has all arguments, and how often it runs
  before      the rest: checks, the choice of engine, results, autograd, finding the kernel
  torch       torch.distributed's same collective, through a process group that does nothing; for
              gradients its autograd, of an op that computes none
What CUDA takes for a launch, a copy or an event is in none of them, nor in torch's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from weft.bench.host.calls import CALLS
from weft.bench.report import terminal
from weft.bench.report.tables import TextTable, figure
from weft.cli import at_least, new_file
from weft.sim.progress_bar import progress


def main(argv: Sequence[str] | None = None) -> int:
    """Measure in a process of its own, whose kernels are compiled and whose driver does nothing."""
    from weft.bench.host import driver

    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="weft bench host",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--filter", default="", metavar="TEXT", help="only calls named like this")
    parser.add_argument(
        "--rounds", type=at_least(1), default=15, metavar="N", help="of 20 calls each (15)"
    )
    parser.add_argument(
        "--json", type=new_file, metavar="FILE", help="write the figures there, too"
    )
    parser.add_argument(
        "--profile", action="store_true", help="also tell in which functions the time goes"
    )
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(given)
    names = [name for name in CALLS if args.filter in name]
    if not names:
        parser.error(f"--filter {args.filter!r}: there are {', '.join(CALLS)}")
    if args.here:
        return _measure_calls(names, args)
    with tempfile.TemporaryDirectory(prefix="weft-driver-") as folder:
        try:
            variables = driver.build_stub(Path(folder))
        except RuntimeError as error:
            parser.error(str(error))
        command = [sys.executable, "-m", "weft", "bench", "host", "--here", *given]
        return subprocess.run(command, env=os.environ | variables).returncode


def _measure_calls(names: Sequence[str], args: argparse.Namespace) -> int:
    from weft.bench.host import driver, measure

    driver.activate_stub()
    rows = []
    with progress(len(names), "calls") as one_more:
        for name in names:
            rows.append(measure.enqueue_times(name, args.rounds, args.profile))
            one_more()
    cells = [
        [
            row.name,
            figure(row.total),
            figure(row.launching),
            str(row.launches),
            figure(row.own),
            figure(row.peer),
        ]
        for row in rows
    ]
    header = ["call", "us", "launcher, us", "times", "before, us", "torch, us"]
    launch = measure.launch_us(args.rounds)
    title = f"weft bench host: rank {measure.RANK} of {measure.WORLD_SIZE} H100"
    terminal.print_table(TextTable(title, header, cells))
    print(f"Triton itself takes {launch:.1f} us for a launch with six arguments.")
    if args.json:
        found = {"launch_us": launch, "calls": [row.told() for row in rows]}
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
