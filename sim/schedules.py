"""Which interleaving comes next: random ones, then systematic ones with few preemptions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from weft.sim.scheduler import Strand


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
        self.made: list[tuple[int, int, int]] = []  # chosen, how many could, who ran before (or -1)

    def pick(self, able: list[Strand], current: Strand | None) -> Strand:
        before = able.index(current) if current in able else -1
        step = len(self.made)
        if step < len(self._given) and self._given[step] < len(able):
            chosen = self._given[step]
        else:
            chosen = max(before, 0)
        self.made.append((chosen, len(able), before))
        return able[chosen]


def _preemptions(made: list[tuple[int, int, int]]) -> int:
    return sum(before not in (-1, chosen) for chosen, _, before in made)


class Systematic:
    """All schedules with at most `bound` preemptions (all, if None), depth first.

    A preemption takes the baton from a strand that could go on. Most faults of concurrent programs
    need two at most, and schedules with few of them are few.
    """

    def __init__(self, bound: int | None) -> None:
        self._bound = bound
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

    def _after(self, made: list[tuple[int, int, int]]) -> tuple[int, ...] | None:
        """The choices of the next schedule: those made, with the last one that can be changed."""
        for step in range(len(made) - 1, -1, -1):
            chosen, count, before = made[step]
            # The default choice came first, then the others in order.
            default = max(before, 0)
            order = [default, *(i for i in range(count) if i != default)]
            for other in order[order.index(chosen) + 1 :]:
                prefix = [*made[:step], (other, count, before)]
                if self._bound is None or _preemptions(prefix) <= self._bound:
                    return tuple(choice for choice, _, _ in prefix)
        return None
