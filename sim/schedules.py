"""Which interleaving comes next: random ones, then systematic ones with few preemptions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from weft.sim.scheduler import Strand


# Of each choice: who was chosen, among how many, and which of them ran before (-1: none).
Made = list[tuple[int, int, int]]


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
    """Follows given choices, then goes on with whoever runs; notes every choice that there was."""

    def __init__(self, choices: tuple[int, ...] = ()) -> None:
        self._given = choices
        self.made: Made = []

    def pick(self, able: list[Strand], current: Strand | None) -> Strand:
        before = able.index(current) if current in able else -1
        step = len(self.made)
        if step < len(self._given) and self._given[step] < len(able):
            chosen = self._given[step]
        else:
            chosen = max(before, 0)
        self.made.append((chosen, len(able), before))
        return able[chosen]


_TRACES = 64  # schedules with one preemption that get a second one


def _changed(made: Made, start: int) -> list[tuple[int, ...]]:
    """The choices `made` up to some step from `start` on, where another one is made instead."""
    chosen = tuple(choice for choice, _, _ in made)
    return [
        (*chosen[:step], other)
        for step in range(start, len(made))
        for other in range(made[step][1])
        if other != chosen[step]
    ]


def preempting(seed: int, budget: int) -> Iterator[tuple[tuple[int, ...], Directed]]:
    """Up to `budget` schedules in which a strand goes on until it must wait, but for one change,
    or two, at points from the whole of the run.

    Most faults of concurrent programs need two preemptions at most.
    """
    chance = random.Random(f"{seed} preemptions")
    policy = Directed()
    yield (), policy
    once = _changed(policy.made, 0)
    traces: list[tuple[int, Made]] = []
    for choices in chance.sample(once, min(len(once), budget // 2)):
        policy = Directed(choices)
        yield choices, policy
        if len(traces) < _TRACES and len(policy.made) > len(choices):
            traces.append((len(choices), policy.made))
    for _ in range(4 * budget if traces else 0):  # there may be fewer different ones
        start, made = chance.choice(traces)
        twice = _changed(made, start)
        choices = chance.choice(twice)
        yield choices, Directed(choices)


class Exhaustive:
    """All schedules, depth first."""

    def __init__(self) -> None:
        self._next: tuple[int, ...] | None = ()
        self.points = 0  # different states from which more than one could go on, so far

    def __iter__(self) -> Iterator[tuple[tuple[int, ...], Directed]]:
        while self._next is not None:
            choices = self._next
            policy = Directed(choices)
            yield choices, policy
            # Up to the choice that differs, the states are those of an earlier schedule.
            self.points += len(policy.made) - len(choices)
            self._next = self._after(policy.made)

    @staticmethod
    def _after(made: Made) -> tuple[int, ...] | None:
        """The choices of the next schedule: those made, with the last one that can be changed."""
        for step in range(len(made) - 1, -1, -1):
            chosen, count, before = made[step]
            default = max(before, 0)  # came first, then the others in order
            order = [default, *(i for i in range(count) if i != default)]
            if chosen != order[-1]:
                other = order[order.index(chosen) + 1]
                return (*(choice for choice, _, _ in made[:step]), other)
        return None
