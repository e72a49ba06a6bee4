"""Every kernel and collective of weft under thousands of interleavings, and docs/sweeps.md of it.

python tests/sweeps.py --page docs/sweeps.md        (make sweeps)

A row that stands in the page is not run again: what was cut off goes on where it was.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from sim_cases import COLLECTIVES, CUT, FLAGGED, HOST, KERNELS, triton_attention, triton_training

from weft import sim
from weft.markdown import between_marks

CASES = (
    KERNELS
    | COLLECTIVES
    | HOST
    | CUT
    | FLAGGED
    | {
        "training on the triton engine": triton_training,
        "attention on the triton engine": triton_attention,
    }
)
PROGRAMS: tuple[sim.Programs, ...] = ("sequential", "concurrent")
# Concurrent programs of more ranks meet in more ways: a case takes minutes on 4, hours on 8.
RANKS: dict[sim.Programs, Sequence[int]] = {"sequential": (2, 3, 4, 8), "concurrent": (2, 3)}
HEAD = "| case | programs | ranks | schedules | run | orders | found | CPU s |"
Key = tuple[str, sim.Programs, int]


def rows_of(page: str) -> dict[Key, str]:
    """The rows of a page, by case, programs and ranks."""
    rows: dict[Key, str] = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 8 and cells[2].isdecimal():
            rows[cells[0], cells[1], int(cells[2])] = line
    return rows


def with_rows(page: str, rows: dict[Key, str]) -> str:
    """The page with these rows in the place of its own, smaller worlds first."""
    order = sorted(
        rows, key=lambda key: (key[2], PROGRAMS.index(key[1]), list(CASES).index(key[0]))
    )
    table = "\n".join([HEAD, "| --- | --- | ---: | ---: | ---: | ---: | --- | ---: |"])
    table = "\n".join([table, *(rows[key] for key in order)])
    return between_marks(page, "sweeps", table)


def keep(page: Path, key: Key, row: str) -> None:
    """Put a row into the page; who is killed meanwhile leaves it as it was."""
    text = page.read_text()
    fresh = page.with_suffix(".new")
    fresh.write_text(with_rows(text, rows_of(text) | {key: row}))
    fresh.replace(page)


def wanted(
    ranks: Sequence[int] = (), programs: Sequence[sim.Programs] = PROGRAMS, names: str = ""
) -> Iterator[Key]:
    """What to run, in order; `ranks`: those of RANKS unless given."""
    for how in programs:
        for world_size in ranks or RANKS[how]:
            for name in CASES:
                # The host's own exchanges launch nothing.
                if re.search(names, name) and not (name in HOST and how == "concurrent"):
                    yield name, how, world_size


def row(name: str, programs: sim.Programs, world_size: int, schedules: int, seed: int = 0) -> str:
    """Run one case."""
    start, found = time.process_time(), "nothing"
    run, orders, tried = "", "", str(schedules)
    try:
        results = sim.run(
            world_size,
            CASES[name],
            seed=seed,
            schedules=schedules,
            programs=programs,
            replay=True,
            timeout=3600,
        )
        run, orders = str(results.schedules - results.played), str(results.distinct)
    except (sim.SimError, AssertionError) as error:
        notes = "\n".join(getattr(error, "__notes__", ()))
        print(f"{name}, {world_size} ranks, {programs}: {error}\n{notes}", file=sys.stderr)
        found, tried = type(error).__name__, ""
    seconds = f"{time.process_time() - start:.0f}"
    cells = name, programs, str(world_size), tried, run, orders, found, seconds
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[], help="others than RANKS")
    parser.add_argument("--programs", choices=PROGRAMS, nargs="+", default=PROGRAMS)
    parser.add_argument("--schedules", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="REGEX", help="names of cases")
    args = parser.parse_args()
    for key in wanted(args.ranks, args.programs, args.only):
        if key not in rows_of(args.page.read_text()):
            found = row(*key, args.schedules, args.seed)
            print(found, flush=True)
            keep(args.page, key, found)


if __name__ == "__main__":
    main()
