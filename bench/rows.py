"""What a benchmark run records: cases, times of their variants, and the environment.

    Result    a run of one suite: its environment and its cases
    Case      one problem: its variants, timed in the same rounds, and the machine's bounds for it
    Timing    one variant: the rounds, or why there is no time

A time is that of the slowest rank, for which all ranks wait. Two variants are compared round by
round, as the machine's speed drifts by more than the differences of interest; the 95 % confidence
interval of the median of these ratios tells whether they differ at all.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from weft.errors import printable

SCHEMA = 2


@dataclass
class Timing:
    """One variant of a case. Times in us.

    Attributes:
        rounds_us: the slowest rank's time in each round.
        ranks_us: each rank's median over the rounds.
        waited_us: of `us`, what the slowest rank spent waiting for peers, where weft can tell.
        error: largest deviation from the oracle, in units of the tolerance; at most 1.
        failure: why there is no time; empty if there is one.
        engine: what weft's cost model took, where it was asked.
    """

    rounds_us: list[float] = field(default_factory=list)
    ranks_us: list[float] = field(default_factory=list)
    waited_us: float | None = None
    error: float | None = None
    failure: str = ""
    engine: str = ""

    @property
    def ok(self) -> bool:
        return not self.failure and bool(self.rounds_us)

    @property
    def us(self) -> float:
        """The median over the rounds, of the rank where it is largest."""
        return max(self.ranks_us)

    @property
    def middle(self) -> tuple[float, float]:
        """The 10th and the 90th percentile of the rounds."""
        ordered = sorted(self.rounds_us)
        low, high = (ordered[round(q * (len(ordered) - 1))] for q in (0.1, 0.9))
        return low, high

    @property
    def spread(self) -> float:
        """(90th - 10th percentile) / median of the rounds."""
        low, high = self.middle
        return (high - low) / statistics.median(self.rounds_us)

    @cached_property
    def statistics(self) -> dict[str, Any]:
        """pytest-benchmark's statistics of the rounds, in us; empty where it is not installed."""
        try:
            from pytest_benchmark.stats import Stats
        except ModuleNotFoundError:
            return {}
        stats = Stats()
        for us in self.rounds_us:
            stats.update(us)
        return dict(stats.as_dict())


@dataclass(frozen=True)
class Ratio:
    """The median of ratios of two times, and the interval it is in with 95 % confidence."""

    median: float
    low: float
    high: float

    @property
    def told_apart(self) -> bool:
        """Whether the rounds show a difference at all."""
        return self.low > 1 or self.high < 1

    def __str__(self) -> str:
        return f"{self.median:.2f}" if self.told_apart else f"{self.median:.2f} ~"


def ratio_of(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """The ratio of two variants' times in the same rounds.

    Example:
        [2, 4, 6] against [1, 2, 3] is 2, in every round: `Ratio(2.0, 2.0, 2.0)`.
    """
    return Ratio(*median_interval([x / y for x, y in zip(a, b, strict=True)]))


def median_interval(samples: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the interval around it that holds that of more samples, at 95 %."""
    ordered, n = sorted(samples), len(samples)
    # The k-th smallest and k-th largest of n bracket the median with a chance of 95 % at this k
    # (normal approximation of the binomial).
    k = max(0, math.floor((n - 1.96 * math.sqrt(n)) / 2))
    return statistics.median(ordered), ordered[k], ordered[n - 1 - k]


@dataclass
class Case:
    """One problem.

    Attributes:
        params: what the problem is: op, M, N, K, nbytes, dtype, ranks, ...
        variants: those that ran and those that could not, in the order they are shown.
        bounds: what no variant can be quicker than, measured in the same rounds: "arithmetic", a
            rank's matmuls on inputs that are there; "memory", a copy that touches as many bytes
            as the problem must; "link", reading from peers as many bytes as it must; "signal", a
            signal to the peers and theirs back.
        bound_rule: "max" where the parts can overlap, "sum" where one follows the other.
        main, peer: the variant that is ours, and the one it is compared with.
        failure: why the case has no rows.
    """

    suite: str
    name: str
    params: dict[str, Any] = field(default_factory=dict)
    variants: dict[str, Timing] = field(default_factory=dict)
    bounds: dict[str, Timing] = field(default_factory=dict)
    bound_rule: Literal["max", "sum"] = "max"
    main: str = ""
    peer: str = ""
    notes: list[str] = field(default_factory=list)
    failure: str = ""

    @property
    def timed(self) -> dict[str, Timing]:
        """The variants that have a time."""
        return {name: each for name, each in self.variants.items() if each.ok}

    @property
    def parts_us(self) -> dict[str, float]:
        """The bound's parts."""
        return {name: each.us for name, each in self.bounds.items() if each.ok}

    @property
    def bound_us(self) -> float | None:
        """A lower bound for all variants; None if there is none."""
        parts = self.parts_us.values()
        return (max(parts) if self.bound_rule == "max" else sum(parts)) if parts else None

    @property
    def bound_by(self) -> str:
        """Which part is the largest."""
        parts = self.parts_us
        return max(parts, key=lambda name: parts[name]) if parts else ""

    @property
    def bound_rounds_us(self) -> list[float]:
        """The bound in each round; empty where nothing bounds it."""
        parts = [bound.rounds_us for bound in self.bounds.values() if bound.ok]
        combine = max if self.bound_rule == "max" else sum
        return [combine(each) for each in zip(*parts, strict=True)]

    def fraction(self, variant: str) -> float | None:
        """Bound / time: 1 is all that the machine can do. Round by round, as all ratios."""
        timing, bound = self.variants[variant], self.bound_rounds_us
        if not timing.ok or not bound:
            return None
        return ratio_of(bound, timing.rounds_us).median

    def exposed_us(self, variant: str) -> float | None:
        """What the variant takes beyond the arithmetic: the communication that is not hidden."""
        timing, arithmetic = self.variants[variant], self.bounds.get("arithmetic")
        if not timing.ok or arithmetic is None or not arithmetic.ok:
            return None
        pairs = zip(timing.rounds_us, arithmetic.rounds_us, strict=True)
        return max(0.0, statistics.median(us - least for us, least in pairs))

    def ratio(self, a: str, b: str) -> Ratio | None:
        """Time of `a` / time of `b`; None unless both have one."""
        timed = self.timed
        if a not in timed or b not in timed:
            return None
        return ratio_of(timed[a].rounds_us, timed[b].rounds_us)

    @property
    def gain(self) -> Ratio | None:
        """How many times as quick as its peer ours is."""
        return self.ratio(self.peer, self.main)

    def beside_quickest(self, peers: Sequence[str]) -> None:
        """Compare ours with the quickest of `peers` that has a time, if one has."""
        timed = {name: timing.us for name, timing in self.timed.items() if name in peers}
        self.peer = min(timed, key=lambda name: timed[name]) if timed else self.peer

    def as_dict(self) -> dict[str, Any]:
        """Plain values, with what follows from them beside them for readers of the file."""
        value = asdict(self)
        value["bound_us"], value["bound_by"] = self.bound_us, self.bound_by
        for name, timing in self.timed.items():
            value["variants"][name] |= {
                "us": timing.us,
                "spread": timing.spread,
                "fraction": self.fraction(name),
                "exposed_us": self.exposed_us(name),
                "statistics": timing.statistics,
            }
        for name, us in self.parts_us.items():
            value["bounds"][name]["us"] = us
        return value

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Case:
        """The case that `as_dict` wrote."""
        known = {name: value[name] for name in cls.__dataclass_fields__ if name in value}
        for kind in ("variants", "bounds"):
            known[kind] = {
                name: Timing(**{f: each[f] for f in Timing.__dataclass_fields__ if f in each})
                for name, each in known.get(kind, {}).items()
            }
        return cls(**known)


@dataclass
class Result:
    """One run of one suite.

    Attributes:
        environment: `weft.bench.environment.environment()` of the run.
        interrupted: whether it was stopped before all cases had run.
    """

    suite: str
    environment: dict[str, Any]
    cases: list[Case] = field(default_factory=list)
    command: str = ""
    interrupted: bool = False

    def write(self, path: Path) -> None:
        """Keep the run as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        head = {
            "schema": SCHEMA,
            "suite": self.suite,
            "command": self.command,
            "interrupted": self.interrupted,
            "environment": self.environment,
        }
        # One case per line, for short files with readable diffs.
        cases = ",\n".join(json.dumps(_rounded(case.as_dict())) for case in self.cases)
        start = json.dumps(head, indent=1).removesuffix("\n}")
        # The file is replaced as a whole, as a run may be killed at any moment.
        part = path.with_suffix(".part")
        part.write_text(f'{start},\n "cases": [\n{cases}\n]}}\n')
        part.replace(path)

    @classmethod
    def read(cls, path: Path) -> Result:
        """The run kept in a file.

        Raises:
            ValueError: it is no such file.
        """
        try:
            content = _shown(json.loads(path.read_text()))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not a result of weft bench: {error}") from None
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            raise ValueError(
                f"{path} is not a result of this weft bench (schema {SCHEMA}): run the suite again"
            )
        try:
            result = cls(
                content["suite"],
                content["environment"],
                [Case.from_dict(case) for case in content["cases"]],
                content["command"],
                content["interrupted"],
            )
            result._check()
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is damaged, or was not written by weft bench ({type(error).__name__}: "
                f"{error}): run the suite again"
            ) from error
        return result

    def _check(self) -> None:
        """Raise for what no run writes: the file may be anybody's."""
        if not (isinstance(self.suite, str) and re.fullmatch(r"[\w.-]+", self.suite)):
            raise ValueError(f"a suite named {self.suite!r}")
        if not (isinstance(self.environment, dict) and isinstance(self.command, str)):
            raise TypeError("no environment, or no command")
        for case in self.cases:
            texts = (case.suite, case.name, case.main, case.peer, case.failure, *case.notes)
            if not (isinstance(case.params, dict) and all(isinstance(each, str) for each in texts)):
                raise TypeError("a case without a name or parameters")
            rounds = set()
            for timing in (*case.variants.values(), *case.bounds.values()):
                if not isinstance(timing.failure, str):
                    raise TypeError("a failure that is no text")
                times = (*timing.rounds_us, *timing.ranks_us)
                if not all(type(us) in (int, float) and 0 < us < math.inf for us in times):
                    raise ValueError(f"a time of {case.name} that is no number above 0")
                if timing.ok:
                    rounds.add(len(timing.rounds_us))
                    timing.us  # noqa: B018 - ValueError without ranks
            if len(rounds) > 1:
                raise ValueError(f"{case.name} has variants of {sorted(rounds)} rounds")


def _shown(value: Any) -> Any:
    """A value of JSON, without what would command a terminal that shows it."""
    if isinstance(value, str):
        return "\n".join(map(printable, value.split("\n")))
    if isinstance(value, list):
        return [_shown(item) for item in value]
    if isinstance(value, dict):
        return {_shown(name): _shown(item) for name, item in value.items()}
    return value


def _rounded(value: Any) -> Any:
    """Floats to 5 digits: more are noise, and make files unreadable."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, (list, tuple)) else value


def geometric_mean(values: Sequence[float]) -> float:
    """The mean that treats twice and half alike."""
    return math.exp(sum(map(math.log, values)) / len(values))
