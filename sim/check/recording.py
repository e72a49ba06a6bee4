"""What one schedule leaves behind: for each strand, everything that others can see of it.

A tape has a track for each thread of control: a rank's host, or a program that runs concurrently.
A track is a sequence of operations, each a tuple that is the same in every schedule in which the
strand has read the same: memory is identified by names, not by addresses.

    touch    accesses to memory between two signals        wait, await    until a word has a value
    atomic, post     a word is read or changed, or both    look, put, poke    as plain memory
    flag, take     words that carry their flag
    barrier, fork, join, restart, place    of clocks       start          concurrent programs
    arrive, attend, send, receive  meetings and messages   progress       polls are not in vain

`weft.sim.check.replay` learns from tapes, `weft.sim.schedule.player` plays them in another order.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.sim.observer import Atomic, Flagged, HandOver, HostSignal, Observer, Vain

if TYPE_CHECKING:
    from weft.sim.check.regions import Region
    from weft.sim.check.vector_clocks import Array
    from weft.sim.schedule.scheduler import Strand

# A rank's host, or a program of its launches: (rank, lane), lane -1 for the host.
Place = tuple[int, int]
# Region, kind, scope (of atomics), and the units of `UNIT` bytes in it, as bytes of an int64 array.
Touch = tuple[Hashable, str, str, bytes]
Op = tuple[Any, ...]
_PROGRESS: Op = ("progress",)

UNIT = 2  # bytes; neighbours that share one count as touched together
HOST = -1


@dataclass(eq=False)
class Track:
    """What one thread of control has done.

    Attributes:
        key: the same in every schedule.
        look: the first of its last operations that took flagged words, and the one after the last:
            if one of the words is missing, they will all be looked at again.
        awaited: value of a wait that has not come to its end; `arrived`: each of its words, with
            the operation that ended it.
    """

    key: Hashable
    ops: list[Op] = field(default_factory=list)
    touched: list[tuple[Region, Array, str, str]] = field(default_factory=list)
    look: tuple[int, int] | None = None
    awaited: int | None = None
    arrived: dict[Hashable, Op | None] = field(default_factory=dict)


class Tape(Observer):
    """The tracks of one schedule.

    Attributes:
        order: (track, number of the operation) of all accesses, in an order that signals allow.
        vain: loads of flagged words that were made again, as they are not by a kernel that does
            not look at flags as it should.
        unfit: why no other schedule can be told from this one, if so.
    """

    def __init__(self) -> None:
        self.tracks: dict[Hashable, Track] = {}
        self.order: list[tuple[Hashable, int]] = []
        self.unfit = ""
        self.vain: set[Vain] = set()
        self._places: list[Place] = []  # of each slot

    def new_lane(self, rank: int, lane: int) -> None:
        self._places.append((rank, lane))

    def thread(self, strand: Strand, key: Hashable) -> None:
        strand.track = self.tracks[key] = Track(key)

    def unplayable(self, why: str) -> None:
        self.unfit = why

    def _place(self, strand: Strand) -> Place:
        return self._places[strand.slot]

    def _places_of(self, slots: Sequence[int]) -> tuple[Place, ...]:
        return tuple(self._places[slot] for slot in slots)

    def touch(self, strand: Strand, region: Region, index: Array, kind: str, scope: str) -> None:
        """`strand` accesses granules `index` of `region`."""
        strand.track.touched.append((region, _units(index, region.granule), kind, scope))

    def _take(self, strand: Strand) -> tuple[Touch, ...]:
        """What `strand` has accessed since it was last asked."""
        whole: dict[tuple[Hashable, str, str], list[Array]] = {}
        for region, units, kind, scope in strand.track.touched:
            if region.key is None:
                self.unfit = f"{region.name} has no name of its own"
            whole.setdefault((region.key, kind, scope), []).append(units)
        strand.track.touched.clear()
        # In order of names: one load may be of several regions, which come by address.
        return tuple(
            (*name, np.unique(np.concatenate(whole[name])).tobytes())
            for name in sorted(whole, key=repr)
        )

    def flush(self, strand: Strand) -> None:
        if strand.track.touched:
            self._add(strand.track, ("touch", self._place(strand), self._take(strand)))

    def plain(self, strand: Strand, *op: Any) -> None:
        strand.track.ops.append(op)

    def _sync(self, strand: Strand, *op: Any) -> None:
        """An operation that orders what was accessed before it."""
        self.flush(strand)
        strand.track.ops.append(op)

    def _signal(self, strand: Strand, *op: Any) -> None:
        """An operation on a word, which was the last access."""
        self._add(strand.track, (*op, self._place(strand), self._take(strand)))

    def stored(self, strand: Strand, word: Hashable, value: int | None, polled: bool) -> None:
        if word is not None:
            self.plain(strand, "put", word, value)
            return
        # Also if there is nothing to forget yet: in another schedule there may be.
        if strand.track.ops[-1:] != [_PROGRESS]:
            self.plain(strand, *_PROGRESS)
        if polled:
            self.unfit = "a store to many words, one of which is a signal"

    def post(self, strand: Strand, signal: HostSignal) -> None:
        self._signal(strand, "post", signal.word, signal.value)

    def look(self, strand: Strand, signal: HostSignal, found: bool) -> None:
        if found:
            self._signal(strand, "await", signal.word, signal.value)
        else:
            self._take(strand)  # it will look again

    def flagged(self, strand: Strand, words: Flagged) -> None:
        self._signal(strand, "flag", tuple(words.names), words.generation)

    def taken(self, strand: Strand, words: Flagged) -> None:
        track, began = strand.track, len(strand.track.ops)
        if track.look is None or track.look[1] != began:
            track.look = began, began
        self._signal(strand, "take", tuple(words.names), words.generation, words.site)
        track.look = track.look[0], len(track.ops)

    def looks_again(self, strand: Strand, found: Vain) -> None:
        track = strand.track
        self.vain.add(found)
        if track.look is not None and track.look[1] == len(track.ops):
            began = track.look[0]
            del track.ops[began:]
            late = [at for at, (key, n) in enumerate(self.order) if key == track.key and n >= began]
            for at in reversed(late):
                del self.order[at]
        track.look = None

    def threads_meet(self, strand: Strand) -> None:
        self._sync(strand, "barrier", self._place(strand))

    def begin_launch(self, host: Strand, slots: Sequence[int]) -> None:
        self._sync(host, "fork", self._place(host), self._places_of(slots))

    def reuse(self, host: Strand, slot: int, host_slot: int) -> None:
        place, *own = self._places_of((slot, host_slot))
        self._sync(host, "restart", place, tuple(own))

    def program(self, host: Strand) -> None:
        self._sync(host, "place", self._place(host))
        self.plain(host, *_PROGRESS)

    def start(self, host: Strand, keys: Sequence[Hashable], slots: Sequence[int]) -> None:
        self._sync(host, "start", tuple(keys), self._places_of(slots))

    def end_launch(self, host: Strand, slots: Sequence[int]) -> None:
        self._sync(host, "place", self._place(host))
        self._sync(host, "join", self._place(host), self._places_of(slots))

    def give(self, strand: Strand, op: str, key: Hashable, held: HandOver) -> None:
        self._sync(strand, op, key)

    def await_others(self, strand: Strand, op: str, key: Hashable, *size: int) -> None:
        self._sync(strand, op, key, *size)

    def expect(self, strand: Strand, words: Sequence[Hashable], value: int) -> None:
        self.flush(strand)
        self.plain(strand, *_PROGRESS)
        strand.track.awaited, strand.track.arrived = value, dict.fromkeys(words)

    def atomic(self, strand: Strand, done: Atomic) -> None:
        track, word = strand.track, done.word
        if track.awaited is not None:  # one of a wait's on each of its words: one operation
            if word not in track.arrived:
                self.unfit = "a wait was given up"
            touched = self._take(strand)
            if done.seen >= track.awaited:
                how = done.sem, done.scope, self._place(strand), touched
                track.arrived[word] = "wait", word, track.awaited, *how
            ends = [op for op in track.arrived.values() if op is not None]
            if len(ends) == len(track.arrived):
                track.awaited = None
                for end in ends:  # in the order of the words, whatever came first
                    self._add(track, end)
            return
        if word is None or done.effect is None:
            self.unfit = f"an atomic that is not understood: {done.effect} of {word}"
        self._signal(strand, "atomic", word, done.effect, done.sem, done.scope)
        track.ops.append(("saw", done.seen))

    def _add(self, track: Track, op: Op) -> None:
        self.order.append((track.key, len(track.ops)))
        track.ops.append(op)


def _units(index: Array, granule: int) -> Array:
    if granule <= UNIT:
        return index * granule // UNIT
    count = granule // UNIT
    units: Array = (index[:, None] * count + np.arange(count)).reshape(-1)
    return units
