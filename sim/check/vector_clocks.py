"""Vector clocks: what each strand is ordered after, and what has been published at each word."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import triton.language as tl

Array = npt.NDArray[Any]

BARRIER_BEFORE_ATOMICS = hasattr(tl, "atomic_load")  # Triton 3.9 puts one there


@dataclass
class Release:
    """What has been published at one word: to everybody, and within a rank."""

    everywhere: Array | None = None
    within: dict[int, Array] = field(default_factory=dict)


class Clocks:
    """A clock a slot: for each slot, the number of its last access that this one is ordered after.

    A slot is what has an order of its own: a rank's host code, or a program of its launches. The
    number of its own last access is in its own entry.
    """

    def __init__(self) -> None:
        self._capacity = 16
        self.clocks: list[Array] = []
        self.ranks: list[int] = []
        self._barriers: list[int] = []  # number of the last access before a slot's last barrier
        self._signals: dict[Hashable, Release] = {}
        self._begun: list[Array] = []  # of each slot, its clock when its launch began
        self._taken: list[Array] = []  # and what the flagged words that it took are ordered after
        self._words: dict[Hashable, Array] = {}  # published by flagged words
        self._ended: dict[int, Array] = {}  # slot -> clock of the launch's programs that had it

    def new_slot(self, rank: int) -> int:
        """A clock for one more strand of `rank`."""
        slot = len(self.clocks)
        if slot == self._capacity:
            self._widen()
        self.clocks.append(np.zeros(self._capacity, np.int32))
        self.ranks.append(rank)
        self._barriers.append(0)
        self._begun.append(np.zeros(self._capacity, np.int32))
        self._taken.append(np.zeros(self._capacity, np.int32))
        return slot

    def _widen(self) -> None:
        before, self._capacity = self._capacity, self._capacity * 2
        self.clocks = [np.pad(clock, (0, before)) for clock in self.clocks]
        self._begun = [np.pad(clock, (0, before)) for clock in self._begun]
        self._taken = [np.pad(clock, (0, before)) for clock in self._taken]
        self._words = {word: np.pad(clock, (0, before)) for word, clock in self._words.items()}
        self._ended = {slot: np.pad(clock, (0, before)) for slot, clock in self._ended.items()}
        for signal in self._signals.values():
            signal.within = {r: np.pad(c, (0, before)) for r, c in signal.within.items()}
            if signal.everywhere is not None:
                signal.everywhere = np.pad(signal.everywhere, (0, before))

    def join(self, slot: int, others: Sequence[int]) -> None:
        """Slot `slot` goes on after all that `others` have done so far."""
        clock = self.clocks[slot]
        for other in others:
            np.maximum(clock, self.clocks[other], out=clock)
            np.maximum(clock, self._taken[other], out=clock)
            ended = self._ended.pop(other, None)
            if ended is not None:
                np.maximum(clock, ended, out=clock)

    def restart(self, slot: int, host: int) -> None:
        """A program of a launch has ended, and `slot` is another one's: that comes after what
        `host` had done before the launch, whatever the one before it has waited for."""
        clock, ended = np.maximum(self.clocks[slot], self._taken[slot]), self._ended.get(slot)
        self._ended[slot] = clock if ended is None else np.maximum(ended, clock)
        fresh = self.clocks[slot] = self.clocks[host].copy()
        fresh[slot] = clock[slot]
        self.begin(slot)

    def begin(self, slot: int) -> None:
        """A program of a launch begins, whose clock is `slot`."""
        self._begun[slot] = self.clocks[slot].copy()
        self._taken[slot] = np.zeros(self._capacity, np.int32)
        self.barrier(slot)

    def flag(self, slot: int, word: Hashable) -> None:
        """Publish with flagged words, called `word`, what they are ordered after: what came before
        the launch of `slot`, whose start is a fence, and what its program had taken."""
        self._words[word] = np.maximum(self._begun[slot], self._taken[slot])

    def take(self, slot: int, word: Hashable) -> None:
        """Be ordered after what these words have published, from the next launch on, and in what
        this program flags itself."""
        if (published := self._words.get(word)) is not None:
            np.maximum(self._taken[slot], published, out=self._taken[slot])

    def ever(self, slot: int) -> Array:
        """The clock of `slot`, and of the programs that it was before in this launch."""
        ended = self._ended.get(slot)
        return self.clocks[slot] if ended is None else np.maximum(self.clocks[slot], ended)

    def barrier(self, slot: int) -> None:
        """The threads of a program have met."""
        self._barriers[slot] = int(self.clocks[slot][slot])

    def release(self, slot: int, word: Hashable, scope: str, *, host: bool = False) -> Array | None:
        """Publish at `word` what `slot` is ordered after; returns what other ranks get of it."""
        if scope == "cta":
            return None
        clock, rank = self.clocks[slot].copy(), self.ranks[slot]
        if not host and not BARRIER_BEFORE_ATOMICS:
            if self._barriers[slot] == clock[slot] - 1:
                self._barriers[slot] += 1  # nothing but the atomic itself came after the barrier
            clock[slot] = self._barriers[slot]
        signal = self._signals.get(word)
        if signal is None:
            signal = self._signals[word] = Release()
        known = signal.within.get(rank)
        signal.within[rank] = clock if known is None else np.maximum(known, clock)
        if scope != "sys":
            return None
        known = signal.everywhere
        signal.everywhere = clock if known is None else np.maximum(known, clock)
        published: Array = clock
        return published

    def acquire(self, slot: int, word: Hashable, scope: str) -> None:
        """Be ordered after what has been published at `word`."""
        signal = self._signals.get(word)
        if signal is None or scope == "cta":
            return
        clock = self.clocks[slot]
        own = signal.within.get(self.ranks[slot])
        if own is not None:
            np.maximum(clock, own, out=clock)
        if scope == "sys" and signal.everywhere is not None:
            np.maximum(clock, signal.everywhere, out=clock)
