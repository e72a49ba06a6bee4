"""`weft bench compare A B`: what changed between two results, files or folders of --out.

A change counts if the 95 % intervals of the two medians do not touch. As the machine may be faster
in one run than in the other, --by fraction compares the fraction of its bound that each variant
reaches, both measured in the same rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from weft.bench.report.tables import TextTable, figure
from weft.bench.rows import Case, Result, median_interval
from weft.cli import Parser

By = Literal["time", "fraction"]

# Parts of the environment that make times incomparable if they differ.
_CONDITIONS = ("cpu", "cores", "gpus", "device", "ranks", "threads a rank", "torch", "triton")


@dataclass(frozen=True)
class Change:
    """One variant of one case in both results; times in us, or times in bounds.

    Attributes:
        ratio: after / before.
        real: whether the rounds tell the two apart.
        ours: whether the variant is the one that the suite is about.
    """

    suite: str
    case: str
    variant: str
    before: float
    after: float
    real: bool
    ours: bool

    @property
    def ratio(self) -> float:
        return self.after / self.before


@dataclass
class Diff:
    """What two results have in common, and what they have not.

    Attributes:
        lost: cases and variants that had a time before, and have none now.
    """

    changes: list[Change]
    lost: list[str]
    conditions: list[str]

    def regressions(self, most_percent: float) -> list[Change]:
        """Changes of ours for the worse that are real, and larger than allowed."""
        return [
            change
            for change in self.changes
            if change.ours and change.real and change.ratio > 1 + most_percent / 100
        ]


def compare(before: Sequence[Result], after: Sequence[Result], by: By = "time") -> Diff:
    """Match the cases of results by suite, name and variant."""
    later = {result.suite: result for result in after}
    comparison = Diff([], [], [])
    for old in before:
        new = later.get(old.suite)
        if new is None:
            continue
        comparison.conditions += [
            f"{old.suite}: {key} was {old.environment.get(key)}, is {new.environment.get(key)}"
            for key in _CONDITIONS
            if old.environment.get(key) != new.environment.get(key)
        ]
        cases = {case.name: case for case in new.cases}
        for case in old.cases:
            _compare_case(case, cases.get(case.name), by, comparison)
    return comparison


def _compare_case(old: Case, new: Case | None, by: By, into: Diff) -> None:
    for name in old.timed:
        ours = name == old.main
        if new is None or name not in new.timed:
            if ours:
                why = "is not in the second" if new is None else _why(new, name)
                into.lost.append(f"{old.suite} {old.name}, {name}: {why}")
            continue
        samples = [_samples(case, name, by) for case in (old, new)]
        if not all(samples):
            continue
        (before, low_before, high_before), (after, low, high) = map(median_interval, samples)
        real = low > high_before or high < low_before
        into.changes.append(Change(old.suite, old.name, name, before, after, real, ours))


def _why(case: Case, name: str) -> str:
    timing = case.variants.get(name)
    return case.failure or (timing.failure if timing is not None else "") or "was not run"


def _samples(case: Case, name: str, by: By) -> list[float]:
    rounds = case.timed[name].rounds_us
    if by == "time":
        return rounds
    bound = case.bound_rounds_us
    return [us / least for us, least in zip(rounds, bound, strict=True)] if bound else []


def main(argv: Sequence[str] | None = None) -> int:
    """Print what changed; 1 if ours got slower than --max-regression allows, or lost a case."""
    from weft.bench.report import terminal

    parser = Parser("weft bench compare", __doc__)
    parser.add_argument("before", type=Path, metavar="A", help="the earlier file or folder")
    parser.add_argument("after", type=Path, metavar="B", help="the later one")
    parser.add_argument(
        "--max-regression",
        type=float,
        default=10.0,
        metavar="PERCENT",
        help="how much slower ours may be (10)",
    )
    parser.add_argument(
        "--by",
        choices=["time", "fraction"],
        default="time",
        help="what is compared: times, or how much of the bound they reach (time)",
    )
    parser.add_argument("--all", action="store_true", help="also what did not change")
    args = parser.parse_args(argv)
    if not 0 <= args.max_regression < math.inf:
        parser.error(f"--max-regression is a percentage from 0 on, got {args.max_regression:g}")
    try:
        before, after = (_results_at(path) for path in (args.before, args.after))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    result = compare(before, after, args.by)
    if not result.changes and not result.lost:
        parser.error(f"{args.before} and {args.after} have no case in common")
    shown = [change for change in result.changes if args.all or change.real]
    if shown:
        terminal.print_table(_changes_table(shown, args.by))
    print(f"{len(result.changes)} times compared, {sum(c.real for c in result.changes)} changed")
    for line in result.conditions:
        print(f"not the same machine or versions: {line}")
    for line in result.lost:
        print(f"lost: {line}")
    worse = result.regressions(args.max_regression)
    for change in worse:
        print(
            f"regression: {change.suite} {change.case}, {change.variant}: "
            f"{change.ratio - 1:+.0%}, allowed {args.max_regression:g} %"
        )
    return int(bool(worse or result.lost))


def _results_at(path: Path) -> list[Result]:
    from weft.bench.report import report

    return report.read_results(path) if path.is_dir() else [Result.read(path)]


def _changes_table(changes: Sequence[Change], by: By) -> TextTable:
    unit = "us" if by == "time" else "x bound"
    rows = [
        [
            f"{change.suite} {change.case}",
            change.variant,
            figure(change.before),
            figure(change.after),
            f"{change.ratio - 1:+.0%}" + ("" if change.real else " ~"),
        ]
        for change in sorted(changes, key=lambda change: -change.ratio)
    ]
    return TextTable(
        "weft bench compare", ["case", "variant", f"A, {unit}", f"B, {unit}", "B"], rows
    )
