"""Schedules whose result follows from those that were run, without running them.

What a strand does follows from what it reads: the words of signals, and memory. So a schedule in
which every strand reads what it read in a schedule that was run does the same, and only the order
of operations needs to be played:

    run, in the interpreter       ->  a tape of each strand  ->  stretches, accesses in conflict
    play, signals and clocks only <-  another schedule       <-

A play is valid if each atomic finds a value that it has found before, each wait ends, and signals
order any two conflicting accesses as in a run: then there is no race, and all values are those of a
run. (If atomics have found several values, as a ticket does, those of one run or another.)
Otherwise the schedule is run, and learnt from. Nothing is ever found by a play alone.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.sim.check.recording import Op
from weft.sim.check.replay import Recording, Stretch
from weft.sim.check.vector_clocks import Array, Clocks
from weft.sim.observer import Vain
from weft.sim.schedule.scheduler import Scheduler, Stop, Strand
from weft.sim.schedule.schedules import Directed, Policy


class DiffersError(Exception):
    """A play reaches a state that no run has recorded."""


@dataclass(frozen=True)
class Play:
    """A play that holds.

    Attributes:
        policy: as it is after it.
        seen: tells which change of each word each strand has found: equal for two schedules whose
            signals order the same.
    """

    policy: Policy
    switches: int
    seen: int


class Player:
    """Plays one schedule."""

    def __init__(self, recording: Recording, policy: Policy) -> None:
        self._recording = recording
        self._scheduler = Scheduler(policy)
        self._scheduler.explain = lambda *_: ""
        self._clocks = Clocks()
        for rank, _ in sorted(recording.places, key=recording.places.__getitem__):
            self._clocks.new_slot(rank)
        self._counts = [0] * len(recording.places)
        self._at = np.zeros(len(recording.nodes), np.int64)  # number of each node's access
        self._place_of = np.array([node.place for node in recording.nodes], np.int64)
        self._values: dict[int, int] = {}
        self._meetings: dict[Hashable, list[Any]] = {}  # how many have come, and their clocks
        self._mail: dict[Hashable, deque[Array]] = {}
        self._left: dict[Strand, int] = {}  # programs that run for a host
        self._bodies: dict[Strand, Iterator[None]] = {}
        self._seen: dict[Hashable, list[int]] = {}

    def play(self) -> Play:
        """To the end of all strands.

        Raises:
            DiffersError, Stop: not like a run.
        """
        scheduler, live = self._scheduler, self._scheduler.live
        for rank in range(self._recording.world_size):
            self._start(Strand(rank, rank), ("host", rank), None)
        current = scheduler.pick(live, None)
        while True:
            ended = False
            try:
                next(self._bodies[current])
            except StopIteration:
                ended = True
                live.remove(current)
            if not live:
                break
            chosen = scheduler.pick(live, current)
            scheduler.switches += chosen is not current and not ended
            current = chosen
        seen = hash(frozenset((key, tuple(found)) for key, found in self._seen.items()))
        return Play(scheduler.policy, scheduler.switches, seen)

    def _start(self, strand: Strand, key: Hashable, host: Strand | None) -> None:
        stretch = self._recording.stretches.get(key)
        if stretch is None:
            raise DiffersError
        self._scheduler.live.append(strand)
        self._bodies[strand] = self._body(strand, stretch, self._seen.setdefault(key, []), host)

    def _body(
        self, strand: Strand, stretch: Stretch, seen: list[int], host: Strand | None
    ) -> Iterator[None]:
        """Yields wherever another strand may go on."""
        scheduler, clocks, values = self._scheduler, self._clocks, self._values
        versions, concurrent = scheduler.versions, self._recording.concurrent
        while True:
            found: int | None = None
            for step in stretch.steps:
                kind = step[0]
                if kind == "touch":
                    self._touch(step[1])
                elif kind == "glance":
                    if step[2] or strand.vain or concurrent:
                        yield
                    scheduler.polled(strand, step[1])
                elif kind == "wait":
                    _, word, value, sem, scope, place, node = step
                    while True:
                        if scope == "sys" or strand.vain or concurrent:
                            yield
                        scheduler.polled(strand, word)
                        if values.get(word, 0) >= value:
                            break
                        yield from self._until_changed(strand, word)
                    seen.append(versions.get(word, 0))
                    self._touch(node)
                    if sem in ("acquire", "acq_rel"):
                        clocks.acquire(place, word, scope)
                elif kind == "atomic":
                    if step[4] == "sys" or strand.vain or concurrent:
                        yield
                    found = self._atomic(strand, *step[1:])
                    seen.append(versions.get(step[1], 0))
                elif kind == "look":
                    scheduler.polled(strand, step[1])
                    if strand.vain:
                        yield
                elif kind in _SLEEPING:
                    yield from self._sleep(strand, step, seen)
                else:
                    self._plainly(strand, step)
            if not stretch.branches:
                break
            if found not in stretch.branches:
                raise DiffersError
            stretch = stretch.branches[found]
        if host is not None:
            self._left[host] -= 1

    def _touch(self, node: int) -> None:
        """An access: all that it conflicts with must be ordered before it, or come later."""
        info = self._recording.nodes[node]
        place = info.place
        self._counts[place] += 1
        clock = self._clocks.clocks[place]
        clock[place] = self._at[node] = self._counts[place]
        if info.rivals:
            ordered = info.ordered
            if (self._at[ordered] > clock[self._place_of[ordered]]).any():
                raise DiffersError
            if info.others.size and self._at[info.others].any():
                raise DiffersError

    def _until_changed(self, strand: Strand, word: int) -> Iterator[None]:
        versions = self._scheduler.versions
        version = versions.get(word, 0)
        strand.blocked = lambda: versions.get(word, 0) == version
        yield
        strand.blocked = None

    def _atomic(
        self,
        strand: Strand,
        word: int,
        effect: tuple[Any, ...],
        sem: str,
        scope: str,
        place: int,
        node: int,
    ) -> int:
        value = self._values.get(word, 0)
        new, changed = outcome(effect, value)
        self._touch(node)
        if sem in ("acquire", "acq_rel"):
            self._clocks.acquire(place, word, scope)
        if not changed:
            self._scheduler.polled(strand, word)
            return value
        if sem in ("release", "acq_rel"):
            self._clocks.release(place, word, scope)
        self._values[word] = new
        self._scheduler.changed(word)
        self._scheduler.progressed(strand)
        return value

    def _sleep(self, strand: Strand, step: Op, seen: list[int]) -> Iterator[None]:
        """What others may come before, and in most cases must."""
        kind, scheduler = step[0], self._scheduler
        if kind == "post":
            _, word, value, place, node = step
            yield
            self._touch(node)
            self._clocks.release(place, word, "sys", host=True)
            self._values[word] = value
            scheduler.changed(word)
        elif kind == "await":
            _, word, value, place, node = step
            yield
            while self._values.get(word, 0) < value:
                yield from self._until_changed(strand, word)
            seen.append(scheduler.versions.get(word, 0))
            self._touch(node)
            self._clocks.acquire(place, word, "sys")
        elif kind == "flag":
            _, words, generation, place, node = step
            yield
            self._touch(node)
            for word in words:
                self._clocks.flag(place, word)
                self._values[word] = generation
                scheduler.changed(word)
            scheduler.progressed(strand)
        elif kind == "take":
            _, words, generation, site, place, node = step
            yield
            for word in words:
                while (found := self._values.get(word, 0)) != generation:
                    if Vain(site, generation, found) not in self._recording.vain:
                        raise DiffersError
                    yield from self._until_changed(strand, word)
                seen.append(scheduler.versions.get(word, 0))
            self._touch(node)
            for word in words:
                self._clocks.take(place, word)
        elif kind == "attend":
            _, key, size = step
            meeting = self._meetings[key]
            strand.blocked = lambda: meeting[0] < size
            yield
            strand.blocked = None
            self._join(strand, meeting[1])
        elif kind == "receive":
            mail = self._mail.setdefault(step[1], deque())
            strand.blocked = lambda: not mail
            yield
            strand.blocked = None
            self._join(strand, mail.popleft())
        else:
            _, keys, places = step
            self._left[strand] = len(keys)
            for key, place in zip(keys, places, strict=True):
                self._start(Strand(strand.rank, place), key, strand)
            strand.blocked = lambda: self._left[strand] > 0
            yield
            strand.blocked = None

    def _plainly(self, strand: Strand, step: Op) -> None:
        """What cannot be interrupted."""
        kind, scheduler, clocks = step[0], self._scheduler, self._clocks
        if kind == "progress":
            scheduler.progressed(strand)
        elif kind == "put":
            scheduler.progressed(strand)
            self._values[step[1]] = step[2]
            scheduler.changed(step[1])
        elif kind == "poke":
            self._values[step[1]] = step[2]
        elif kind == "barrier":
            clocks.barrier(step[1])
        elif kind == "place":
            strand.slot = step[1]
        elif kind == "fork":
            for place in step[2]:
                clocks.join(place, [step[1]])
                clocks.begin(place)
        elif kind == "restart":
            clocks.restart(step[1], step[2][0])
        elif kind == "join":
            clocks.join(step[1], step[2])
        elif kind == "arrive":
            meeting = self._meetings.setdefault(step[1], [0, 0])
            meeting[0] += 1
            meeting[1] = np.maximum(meeting[1], clocks.clocks[strand.slot])
        else:
            self._mail.setdefault(step[1], deque()).append(clocks.clocks[strand.slot].copy())

    def _join(self, strand: Strand, clock: Array) -> None:
        own = self._clocks.clocks[strand.slot]
        np.maximum(own, clock, out=own)


_SLEEPING = ("post", "await", "flag", "take", "attend", "receive", "start")


def outcome(effect: tuple[Any, ...], value: int) -> tuple[int, bool]:
    """What an atomic leaves in a word that holds `value`, and whether it counts as changed."""
    kind, *operands = effect
    if kind == "load":
        return value, False
    if kind == "add":
        return value + operands[0], operands[0] != 0
    if kind == "set":
        return operands[0], True
    wanted, new = operands
    return (new, new != value) if value == wanted else (value, False)


def schedule_of(recording: Recording, policy: Policy) -> Play | None:
    """The schedule of `policy`, which is left as it was; None if it must be run."""
    if recording.unfit or not recording.stretches:
        return None
    try:
        return Player(recording, copy.deepcopy(policy)).play()
    except (DiffersError, Stop):
        return None


def made_by(policy: Policy, played: Play) -> None:
    """Let `policy` know what was chosen."""
    if isinstance(policy, Directed) and isinstance(played.policy, Directed):
        policy.made[:] = played.policy.made
