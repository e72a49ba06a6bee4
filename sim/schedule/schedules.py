"""Which interleaving comes next: random ones, then systematic ones with few preemptions."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from weft.sim.schedule.scheduler import Strand


# Where a schedule does not continue the running strand: (number of the choice, who instead).
Changes = tuple[tuple[int, int], ...]
Schedule = int | str


def spell(changes: Changes) -> str:
    """Changes as errors print them: `17:2,40:0`; `default` if there are none."""
    return ",".join(f"{step}:{chosen}" for step, chosen in changes) or "default"


def parse(schedule: str) -> int | Changes:
    """A schedule as errors print it: a number, or changes.

    Raises:
        ValueError: it is neither.
    """
    if schedule.isdecimal():
        return int(schedule)
    if schedule == "default":
        return ()
    try:
        pairs = [tuple(map(int, part.split(":"))) for part in schedule.split(",")]
        return tuple((step, chosen) for step, chosen in pairs)
    except ValueError:
        raise ValueError(
            f"a schedule is a number or like '17:2,40:0', as an error named it, got {schedule!r}"
        ) from None


class Policy(Protocol):
    """Picks who goes on among those that can (at least two, in a fixed order)."""

    def pick(self, able: list[Strand], current: Strand | None) -> Strand: ...


class Uniform:
    """Anyone, with equal chance, at every operation."""

    def __init__(self, seed: int, schedule: int) -> None:
        self._random = random.Random(f"{seed} {schedule}")

    def pick(self, able: list[Strand], current: Strand | None) -> Strand:
        return able[int(self._random.random() * len(able))]


class Priorities:
    """The strand of highest priority, for as long as it can; now and then it becomes the lowest.

    Lets one rank run far ahead of the others, which an even choice practically never does.
    """

    _CHANGE = 0.05

    def __init__(self, seed: int, schedule: int) -> None:
        self._random = random.Random(f"{seed} {schedule}")
        self._priority: dict[int, float] = {}
        self._lowest = 0.0

    def pick(self, able: list[Strand], current: Strand | None) -> Strand:
        priority = self._priority
        for strand in able:
            if strand.slot not in priority:
                priority[strand.slot] = self._random.random()
        best = max(able, key=lambda s: priority[s.slot])
        if self._random.random() < self._CHANGE:
            self._lowest -= 1.0
            priority[best.slot] = self._lowest
            best = max(able, key=lambda s: priority[s.slot])
        return best


class Directed:
    """Continues the running strand except for given changes; records every choice."""

    def __init__(self, changes: Changes = ()) -> None:
        self._changes = dict(changes)
        self.made: list[Pick] = []

    def pick(self, able: list[Strand], current: Strand | None) -> Strand:
        default = able.index(current) if current in able else 0
        # A change of another program's schedule may not be possible here.
        chosen = min(self._changes.get(len(self.made), default), len(able) - 1)
        self.made.append(Pick(chosen, default, len(able)))
        return able[chosen]


class Pick(NamedTuple):
    """Of strands that could go on: the one chosen, the one that ran before, how many there were."""

    chosen: int
    default: int
    options: int


def _changes_of(made: Sequence[Pick]) -> Changes:
    return tuple((step, c.chosen) for step, c in enumerate(made) if c.chosen != c.default)


def _others(made: Sequence[Pick], steps: Iterable[int]) -> list[tuple[int, int]]:
    """Every choice at one of `steps` that was not `made`: (step, who instead)."""
    return [
        (step, other)
        for step in steps
        for other in range(made[step].options)
        if other != made[step].chosen
    ]


def _departing(made: Sequence[Pick], change: tuple[int, int]) -> Changes:
    """What was `made` up to a change, and the default after."""
    return (*_changes_of(made[: change[0]]), change)


_TRACES = 64  # schedules with one preemption that get a second one


def preempting(seed: int, budget: int) -> Iterator[tuple[Changes, Directed]]:
    """Up to `budget` schedules in which a strand goes on until it must wait, but for one change,
    or two: all of those with one if half the budget is enough, else some from the whole of the run.

    Most faults of concurrent programs need two preemptions at most.
    """
    chance = random.Random(f"{seed} preemptions")
    policy = Directed()
    yield (), policy
    once = _others(policy.made, range(len(policy.made)))
    traces: list[tuple[list[Pick], list[tuple[int, int]]]] = []
    for change in chance.sample(once, min(len(once), budget // 2)):
        changes: Changes = (change,)
        policy = Directed(changes)
        yield changes, policy
        after = range(change[0] + 1, len(policy.made))
        if len(traces) < _TRACES and after:
            traces.append((policy.made, _others(policy.made, after)))
    for _ in range(4 * budget if traces else 0):  # there may be fewer different ones
        made, others = chance.choice(traces)
        changes = _departing(made, chance.choice(others))
        yield changes, Directed(changes)


class Exhaustive:
    """All interleavings that can matter, depth first.

    Ranks see each other by signals alone: two ways into a state, in which every strand has seen the
    same values and every word has the same last writer, go on alike, and one of them is enough.
    """

    def __init__(self) -> None:
        self._left: list[Changes] = [()]
        self.states: set[Hashable] = set()  # from which more than one strand could go on

    def __iter__(self) -> Iterator[tuple[Changes, Visiting]]:
        while self._left:
            changes = self._left.pop()
            start = changes[-1][0] + 1 if changes else 0
            policy = Visiting(changes, start, self.states)
            yield changes, policy
            self._left += [
                _departing(policy.made, change) for change in _others(policy.made, policy.fresh)
            ]


class Visiting(Directed):
    """`Directed`, and notes the states from choice `start` on until one that was seen before.

    Attributes:
        fresh: choices that were made in states not seen before.
        state: tells the state; set by the scheduler.
    """

    def __init__(self, changes: Changes, start: int, states: set[Hashable]) -> None:
        super().__init__(changes)
        self.fresh: list[int] = []
        self.state: Callable[[], Hashable] = lambda: None
        self._start, self._states = start, states
        self._last: Hashable = None
        self._merged = False

    def pick(self, able: list[Strand], current: Strand | None) -> Strand:
        step = len(self.made)
        if step >= self._start - 1 and not self._merged:
            before, self._last = self._last, self.state()
            # The same as before: the strand reached its next operation without doing one.
            if step >= self._start and self._last != before:
                self._merged = self._last in self._states
                if not self._merged:
                    self._states.add(self._last)
                    self.fresh.append(step)
        return super().pick(able, current)
