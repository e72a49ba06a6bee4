"""What one schedule leaves behind: for each strand, everything that others can see of it.

A tape has a track for each thread of control: a rank's host, or a program that runs concurrently.
A track is a sequence of operations, each a tuple that is the same in every schedule in which the
strand has read the same: memory is identified by names, not by addresses.

    touch    accesses to memory between two signals        wait, await    until a word has a value
    atomic, post     a word is read or changed, or both    look, put, poke    as plain memory
    barrier, fork, join, restart, place    of clocks       start          concurrent programs
    arrive, attend, send, receive  meetings and messages   progress       polls are not in vain

`weft.sim.check.replay` learns from tapes, `weft.sim.schedule.player` plays them in another order.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from weft.sim.check.races import Region
    from weft.sim.check.vector_clocks import Array
    from weft.sim.schedule.scheduler import Strand

# A rank's host, or a program of its launches: (rank, lane), lane -1 for the host.
Place = tuple[int, int]
# Region, kind, scope (of atomics), and the units of `UNIT` bytes in it, as bytes of an int64 array.
Touch = tuple[Hashable, str, str, bytes]
Op = tuple[Any, ...]

UNIT = 2  # bytes; neighbours that share one count as touched together
HOST = -1


@dataclass(eq=False)
class Track:
    """What one thread of control has done.

    Attributes:
        key: the same in every schedule.
        awaited: value of a wait that has not come to its end; `arrived`: each of its words, with
            the operation that ended it.
    """

    key: Hashable
    ops: list[Op] = field(default_factory=list)
    touched: list[tuple[Region, Array, str, str]] = field(default_factory=list)
    awaited: int | None = None
    arrived: dict[Hashable, Op | None] = field(default_factory=dict)


class Tape:
    """The tracks of one schedule.

    Attributes:
        order: (track, number of the operation) of all accesses, in an order that signals allow.
        unfit: why no other schedule can be told from this one, if so.
    """

    def __init__(self) -> None:
        self.tracks: dict[Hashable, Track] = {}
        self.order: list[tuple[Hashable, int]] = []
        self.unfit = ""
        self._places: list[Place] = []  # of each slot

    def new_slot(self, rank: int, lane: int) -> None:
        """The next slot is that of `lane` of `rank`."""
        self._places.append((rank, lane))

    def track(self, key: Hashable) -> Track:
        """A new track."""
        track = self.tracks[key] = Track(key)
        return track

    def place(self, slot: int) -> Place:
        """Whose clock `slot` is."""
        return self._places[slot]

    def touch(self, strand: Strand, region: Region, index: Array, kind: str, scope: str) -> None:
        """`strand` accesses granules `index` of `region`."""
        strand.track.touched.append((region, _units(index, region.granule), kind, scope))

    def take(self, strand: Strand) -> tuple[Touch, ...]:
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
        """A signal comes: what was accessed before it is an operation of its own."""
        if strand.track.touched:
            self._add(strand.track, ("touch", self.place(strand.slot), self.take(strand)))

    def note(self, strand: Strand, *op: Any) -> None:
        """An operation that orders nothing."""
        strand.track.ops.append(op)

    def sync(self, strand: Strand, *op: Any) -> None:
        """An operation that orders what was accessed before it."""
        self.flush(strand)
        strand.track.ops.append(op)

    def signal(self, strand: Strand, *op: Any) -> None:
        """An operation on a word, which was the last access."""
        self._add(strand.track, (*op, self.place(strand.slot), self.take(strand)))

    def places(self, slots: Sequence[int]) -> tuple[Place, ...]:
        """`place` of each."""
        return tuple(self._places[slot] for slot in slots)

    def await_value(self, strand: Strand, words: Sequence[Hashable], value: int) -> None:
        """A wait of a kernel begins: its atomics on each of `words` are one operation."""
        strand.track.awaited, strand.track.arrived = value, dict.fromkeys(words)

    def atomic(
        self,
        strand: Strand,
        word: Hashable,
        effect: tuple[Any, ...] | None,
        seen: int,
        sem: str,
        scope: str,
    ) -> None:
        """An atomic with this `effect` has found `seen` in `word`."""
        track = strand.track
        if track.awaited is not None:
            if word not in track.arrived:
                self.unfit = "a wait was given up"
            touched = self.take(strand)
            if seen >= track.awaited:
                op = "wait", word, track.awaited, sem, scope, self.place(strand.slot), touched
                track.arrived[word] = op
            ends = [op for op in track.arrived.values() if op is not None]
            if len(ends) == len(track.arrived):
                track.awaited = None
                for end in ends:  # in the order of the words, whatever came first
                    self._add(track, end)
            return
        if word is None or effect is None:
            self.unfit = f"an atomic that is not understood: {effect} of {word}"
        self.signal(strand, "atomic", word, effect, sem, scope)
        track.ops.append(("saw", seen))

    def _add(self, track: Track, op: Op) -> None:
        self.order.append((track.key, len(track.ops)))
        track.ops.append(op)


def _units(index: Array, granule: int) -> Array:
    if granule <= UNIT:
        return index * granule // UNIT
    count = granule // UNIT
    units: Array = (index[:, None] * count + np.arange(count)).reshape(-1)
    return units
