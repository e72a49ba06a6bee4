"""Faults of many kinds, drawn at random, and what held: docs/reliability.md.

python tests/faults/campaign.py --page docs/reliability.md        (make faults)

Kinds take turns until each has had its trials, or the time is over. A seed gives the same trial
again: --only KIND --seed SEED.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":  # as for tests: one thread a rank, kernels interpreted
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path[:0] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

from command_line import command_lines
from disks import full_disks
from flips import flips, metadata
from kept_files import kept_files
from launchers import orphans
from limits import limits
from mismatches import mismatches
from ranks_lost import (
    kills,
    kills_at_set_up,
    long_stops,
    long_stops_in_steady_work,
    short_stops,
)
from saves import killed_saves
from soak import soaks
from trials import Kind, Skipped

from weft.markdown import between_marks

_NAMED = "every other rank raises `PeerTimeout` that names it"
KINDS = [
    Kind("a rank is killed", f"{_NAMED}, within 10 s, the bound being 300 s; nothing is left",
         kills, 24),
    Kind("a rank is killed during set-up", f"{_NAMED}, within the bound and 10 s",
         kills_at_set_up, 12),
    Kind("a rank is stopped for longer than the bound",
         f"{_NAMED}, within the bound (2 s) and 10 s; so does the rank itself when it goes on",
         long_stops, 12),
    Kind("the same in a steady step of an MLP, a redistribution, ring attention", "as above",
         long_stops_in_steady_work, 9),
    Kind("ranks are stopped for less than the bound", "all steps are right against float64",
         short_stops, 12),
    Kind("calls that differ between ranks",
         "every rank raises `MismatchError` with both calls within 10 s; the next call is right",
         mismatches, 240),
    Kind("a rank runs out of file descriptors or memory",
         "all ranks are right, or all raise and name the rank", limits, 24),
    Kind("a save on a full disk (8 MiB, in a namespace)",
         "the error tells bytes wanted and free; the folder is as it was, the checkpoint loads, "
         "and the next save that fits works", full_disks, 24),
    Kind("a rank is killed amid asynchronous saves",
         "every other rank raises `PeerTimeout` that names it; the last checkpoint that was "
         "finished, or the next one, loads right", killed_saves, 100),
    Kind("a bit is flipped in any file of a checkpoint", "an error, or the right state",
         flips, 500),
    Kind("metadata of a checkpoint are garbage", "`CheckpointError` that names the folder",
         metadata, 500),
    Kind("the command line gets garbage: files, JSON, numbers",
         "exit status 2 and one line of stderr, or the status of the command's own; no traceback",
         command_lines, 480),
    Kind("kept rates and tuned launches are garbage", "left out, or an error that names the file",
         kept_files, 500),
    Kind("the launcher of ranks is killed, or told to end", "no rank runs 10 s later", orphans, 8),
    Kind("calls of all kinds and sizes with ranks late at random", "right against float64",
         soaks, 800),
]  # fmt: skip


@dataclass
class Count:
    """Of one kind: trials made, those that held, and what the others came to."""

    trials: int = 0
    held: int = 0
    failures: list[str] = field(default_factory=list)
    skipped: str = ""


def run_batch(kind: Kind, seed: int, count: Count) -> None:
    """The trials of a seed, added to the count."""
    with tempfile.TemporaryDirectory(prefix="weft-faults-") as folder:
        try:
            for _ in kind.batch(random.Random(f"{kind.name} {seed}"), Path(folder)):
                count.trials += 1
                count.held += 1
        except Skipped as why:
            count.skipped = str(why)
        except Exception as error:
            count.trials += 1
            told = (
                str(error) if isinstance(error, AssertionError) else traceback.format_exc(limit=-3)
            )
            count.failures.append(f"{kind.name}, --seed {seed}: {told}")


def campaign(kinds: list[Kind], minutes: float, seed: int) -> dict[str, Count]:
    """Run kinds in turns: the one that has had the least part of its trials is next."""
    counts = {kind.name: Count() for kind in kinds}
    seeds = dict.fromkeys(counts, seed)
    start = time.monotonic()

    def part(kind: Kind) -> float:
        count = counts[kind.name]
        return 1.0 if count.skipped else count.trials / kind.trials

    while (passed := time.monotonic() - start) < 60 * minutes:
        kind = min(kinds, key=part)
        if part(kind) >= 1:
            break
        done = max(sum(map(part, kinds)) / len(kinds), passed / (60 * minutes))
        bar = "#" * int(20 * done)
        _say(f"[{bar:<20}] {passed:5.0f} s  {kind.name}, seed {seeds[kind.name]}")
        count = counts[kind.name]
        known = len(count.failures)
        run_batch(kind, seeds[kind.name], count)
        seeds[kind.name] += 1
        for failure in count.failures[known:]:
            _say("")
            print(f"\nNOT HELD: {failure}", flush=True)
    _say("")
    return counts


def _say(text: str) -> None:
    """A line that the next one replaces; in a log, one after the other."""
    if sys.stderr.isatty():
        print(f"\r{text[:100]:<100}", end="\r", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


def table(kinds: list[Kind], counts: dict[str, Count]) -> str:
    """The rows of a page."""
    lines = ["| fault | held means | trials | held |", "| --- | --- | ---: | ---: |"]
    for kind in kinds:
        count = counts[kind.name]
        trials = f"{count.trials:,}" if not count.skipped else f"skipped: {count.skipped}"
        lines.append(f"| {kind.name} | {kind.held} | {trials} | {count.held:,} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--page", type=Path, help="put the table into this page")
    parser.add_argument("--minutes", type=float, default=15, help="at most (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first batch (%(default)s)")
    parser.add_argument("--only", default="", metavar="REGEX", help="names of kinds")
    args = parser.parse_args()
    kinds = [kind for kind in KINDS if re.search(args.only, kind.name)]
    if not kinds:
        parser.error(
            f"--only {args.only}: no kind is named so, but {', '.join(k.name for k in KINDS)}"
        )
    counts = campaign(kinds, args.minutes, args.seed)
    told = table(kinds, counts)
    print(told)
    if args.page:
        day, cores = time.strftime("%Y-%m-%d"), os.cpu_count()
        seeds = f"\n\nSeeds from {args.seed}, {args.minutes:g} minutes, {day}, {cores} cores.\n"
        args.page.write_text(between_marks(args.page.read_text(), "faults", told + seeds))
    return int(any(count.failures for count in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
