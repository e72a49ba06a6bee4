"""Races on shared memory, by vector clocks: the model's memory order, not this processor's.

Every strand (a rank's host code, each program of a launch) numbers its accesses; its clock holds,
for each strand, the last access of that strand that it is ordered after. A release publishes the
clock at the signal's address, an acquire of that address joins it; a launch and its end, and a
rendezvous, join as well. Two accesses to one granule, one of them a write, are a race unless the
later one's clock covers the earlier one's number.

Scopes: between ranks a release and its acquire count at `sys` scope only, between programs of a
rank at `gpu` or `sys`. What a program has stored since its last `tl.debug_barrier` may be on its
way in other threads than the one that signals, and is not published, where Triton puts no barrier
before an atomic itself (before 3.9). Nor is it there for loads of the program itself, whose threads
may hold other elements than in the store: only what loads the very elements of one store, and no
others, is taken to have them in the same threads.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from weft.collectives.ranks import pad
from weft.sim.check.regions import Region, untouched_zeros
from weft.sim.check.sites import Sites
from weft.sim.check.vector_clocks import BARRIER_BEFORE_ATOMICS, Array, Clocks
from weft.sim.errors import OutOfBoundsError, RaceError
from weft.sim.observer import Atomic, Flagged, HandOver, HostSignal, Observer

if TYPE_CHECKING:
    from weft.sim.check.recording import Tape
    from weft.sim.schedule.scheduler import Strand

READ, WRITE, ATOMIC_READ, ATOMIC = "reads", "writes", "polls", "updates"
FLAG, TAKE = "flags", "takes"  # words that carry their flag
WRITES = (WRITE, FLAG)
# Of a pad's words that are no signals, those that kernels store plainly.
_STORED = (pad.GENERATION, pad.TICKET, pad.STATUS)


@dataclass(frozen=True)
class Event:
    """One access of a strand, to elements of `itemsize` bytes."""

    site: int
    what: str
    kind: str
    scope: str
    itemsize: int
    granules: int


class Detector(Clocks, Observer):
    """Clocks of all strands, and the history of all memory that several of them can reach.

    Args:
        tape: where accesses are noted as well, if the schedule is recorded.
    """

    def __init__(self, sites: Sites, tape: Tape | None = None) -> None:
        super().__init__()
        self._sites, self._tape = sites, tape
        self._starts: list[int] = []
        self._regions: list[Region] = []
        self._events: list[list[Event | None]] = []
        self._releases: list[list[tuple[int, int]]] = []  # (number, site) of each release

    # Memory

    def add(self, region: Region) -> None:
        """Watch `region` from now on."""
        if not region.guard:
            region.make()
        at = bisect.bisect_left(self._starts, region.start)
        self._starts.insert(at, region.start)
        self._regions.insert(at, region)

    def remove(self, region: Region) -> None:
        """Forget `region`."""
        at = self._regions.index(region)
        del self._starts[at], self._regions[at]

    def find(self, address: int) -> Region | None:
        """The region that holds `address`, if any."""
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0 or address >= self._regions[at].end:
            return None
        return self._regions[at]

    def writers(self, region: Region, address: int) -> list[int]:
        """The ranks that have written the granule at `address`; none behind a buffer's end."""
        if region.guard:
            return []
        at = (address - region.start) // region.granule
        slots = {int(region.writer[at]) - 1} - {-1}
        if region.atomics is not None:
            slots |= set(region.slots[np.flatnonzero(region.atomics[at])].tolist())
        return sorted({self.ranks[slot] for slot in slots})

    def memory(self, start: int, end: int, rank: int, regions: Sequence[Region]) -> None:
        for region in regions:
            if region.end > region.start and self.find(region.start) is None:
                self.add(region)

    # Clocks

    def new_lane(self, rank: int, lane: int) -> None:
        self.new_slot(rank)

    def new_slot(self, rank: int) -> int:
        """A clock for one more strand of `rank`."""
        self._events.append([None])
        self._releases.append([])
        return super().new_slot(rank)

    def release(self, slot: int, word: Hashable, scope: str, *, host: bool = False) -> Array | None:
        """Publish at `word` what strand `slot` is ordered after."""
        clock = super().release(slot, word, scope, host=host)
        last = self._events[slot][-1]
        if clock is not None and last is not None:
            self._releases[slot].append((int(clock[slot]), last.site))
        return clock

    def threads_meet(self, strand: Strand) -> None:
        self.barrier(strand.slot)

    def begin_launch(self, host: Strand, slots: Sequence[int]) -> None:
        for slot in slots:
            self.join(slot, [host.slot])
            self.begin(slot)

    def reuse(self, host: Strand, slot: int, host_slot: int) -> None:
        self.restart(slot, host_slot)

    def end_launch(self, host: Strand, slots: Sequence[int]) -> None:
        self.join(host.slot, slots)

    def give(self, strand: Strand, op: str, key: Hashable, held: HandOver) -> None:
        before, held.clock = held.clock, self.clocks[strand.slot].copy()
        self._be_after(held.clock, before)

    def take_over(self, strand: Strand, held: HandOver) -> None:
        self._be_after(self.clocks[strand.slot], held.clock)

    @staticmethod
    def _be_after(clock: Array, other: Array) -> None:
        # Clocks grow as strands come: a shorter one is ordered after nothing of the later strands.
        np.maximum(clock[: len(other)], other, out=clock[: len(other)])

    # Accesses

    def atomic(self, strand: Strand, done: Atomic) -> None:
        kind = ATOMIC if done.changed else ATOMIC_READ
        self.access(strand, done.addresses, done.itemsize, kind, done.scope)
        for address in map(int, done.addresses):
            if done.sem in ("acquire", "acq_rel"):
                self.acquire(strand.slot, address, done.scope)
            if done.sem in ("release", "acq_rel") and done.changed:
                self.release(strand.slot, address, done.scope)

    def flagged(self, strand: Strand, words: Flagged) -> None:
        self.access(strand, words.addresses, pad.WORD_BYTES, FLAG, str(words.generation))
        for block in words.blocks:
            self.flag(strand.slot, block)

    def taken(self, strand: Strand, words: Flagged) -> None:
        self.access(strand, words.addresses, pad.WORD_BYTES, TAKE, str(words.generation))
        for block in words.blocks:
            self.take(strand.slot, block)

    def post(self, strand: Strand, signal: HostSignal) -> None:
        self.access(strand, np.array([signal.address], np.uint64), pad.WORD_BYTES, ATOMIC)
        self.release(strand.slot, signal.address, "sys", host=True)

    def look(self, strand: Strand, signal: HostSignal, found: bool) -> None:
        self.access(strand, np.array([signal.address], np.uint64), pad.WORD_BYTES, ATOMIC_READ)
        self.acquire(strand.slot, signal.address, "sys")

    def access(
        self, strand: Strand, addresses: Array, itemsize: int, kind: str, scope: str = "sys"
    ) -> None:
        """Check and note an access to `itemsize` bytes at each of `addresses` (at least one)."""
        low, high = int(addresses.min()), int(addresses.max())
        first = bisect.bisect_right(self._starts, low) - 1
        last = bisect.bisect_right(self._starts, high) - 1
        if first == last and first >= 0 and high + itemsize <= self._regions[first].end:
            self._access(self._regions[first], strand, addresses, itemsize, kind, scope)
            return
        at = np.searchsorted(np.asarray(self._starts, np.uint64), addresses, side="right") - 1
        known = 0
        for number in np.unique(at):
            if number < 0:
                continue
            region = self._regions[number]
            inside = addresses[(at == number) & (addresses < np.uint64(region.end))]
            known += inside.size
            if inside.size:
                over = int(inside.max()) + itemsize > region.end
                self._access(region, strand, inside, itemsize, kind, scope, over)
        if strand.confined and known < addresses.size:
            raise OutOfBoundsError(
                f"rank {strand.rank}, {strand.what}, {kind} {addresses.size - known} elements of "
                f"{itemsize} bytes outside of its arguments and of symmetric memory:\n"
                f"  {self._sites.text(self._sites.here())}"
            )

    def _access(
        self,
        region: Region,
        strand: Strand,
        addresses: Array,
        itemsize: int,
        kind: str,
        scope: str,
        over: bool = False,
    ) -> None:
        if region.guard or over:
            raise OutOfBoundsError(
                f"rank {strand.rank}, {strand.what}, {kind} {addresses.size} elements of "
                f"{itemsize} bytes {region.name}, from byte {int(addresses.min()) - region.start} "
                f"on:\n  {self._sites.text(self._sites.here())}"
            )
        offsets = addresses.astype(np.int64) - region.start
        if region.words and self._is_of_data(strand, offsets, itemsize, kind):
            raise OutOfBoundsError(
                f"rank {strand.rank}, {strand.what}, {kind} {addresses.size} elements of "
                f"{itemsize} bytes below the data, in the {region.name}, which ends "
                f"{region.end - int(addresses.min())} bytes after the first:\n"
                f"  {self._sites.text(self._sites.here())}"
            )
        smallest = itemsize
        if offsets.size < 3 or itemsize < region.granule:
            while (offsets % smallest).any():
                smallest //= 2
        if smallest < region.granule:
            region.refine(smallest)
        granule = region.granule
        index = offsets // granule
        if itemsize > granule:
            index = (index[:, None] + np.arange(itemsize // granule)).reshape(-1)
        event = Event(self._sites.here(), strand.what, kind, scope, itemsize, index.size)
        self._check(region, strand, index, event)

    def _is_of_data(self, strand: Strand, offsets: Array, itemsize: int, kind: str) -> bool:
        """Whether this access of a kernel to a pad is none to its words: the pad is what lies below
        a buffer's data. One word stored plainly where signals are is left to be a race."""
        if strand.what == "host":
            return False
        if itemsize != pad.WORD_BYTES or kind == FLAG:
            return True
        word = int(offsets[0]) // pad.WORD_BYTES
        # The line before the hosts' has the generations of barriers in streams.
        plain = offsets.size == 1 and (word in _STORED or word >= pad.HOST_SLOTS - pad.LINE)
        return kind == WRITE and not plain

    def _check(self, region: Region, strand: Strand, index: Array, event: Event) -> None:
        slot, kind = strand.slot, event.kind
        clock = self.clocks[slot]
        events = self._events[slot]
        number = len(events)
        events.append(event)
        clock[slot] = number
        region.seen[index] = True
        if self._tape:
            self._tape.touch(strand, region, index, kind, event.scope)

        writer, written = region.writer[index], region.written[index]
        late = written > clock[writer - 1]
        late &= writer != 0
        if kind == TAKE and late.any():
            late &= ~self._flagged(writer, written)
        if late.any():
            at = int(np.argmax(late))
            self._race(region, strand, event, index[late], int(writer[at]) - 1, int(written[at]))
        if kind == READ and strand.what != "host":
            mine = (writer == slot + 1) & (written > self._barriers[slot])
            if mine.any():
                self._check_own(region, strand, event, index, written, mine)
        if not region.defined and kind not in WRITES and not writer.all():
            never = writer == 0
            if region.atomics is not None:
                never &= ~region.atomics[index].any(1)
            if never.any():
                raise RaceError(
                    f"rank {strand.rank}, {strand.what}, {kind} "
                    f"{self._where(region, index[never], event)}"
                    f", which nobody has written yet: a wait for its writer is missing, or there "
                    f"is none (symmetric memory is not cleared)\n"
                    f"  {self._sites.text(event.site)}"
                )
        if region.atomics is not None:
            self._check_table(region, region.atomics, strand, event, index)
        if kind in (*WRITES, ATOMIC):
            self._check_table(region, region.reads, strand, event, index)
        if kind in WRITES:
            region.writer[index], region.written[index] = slot + 1, number
            return
        column = region.column(slot)
        if kind != ATOMIC:
            region.reads[index, column] = number
            return
        if region.atomics is None:
            region.atomics = untouched_zeros(region.reads.shape, np.int32)
        region.atomics[index, column] = number

    def _flagged(self, writer: Array, written: Array) -> Array:
        """Where the last writes, of these slots + 1 and numbers, were of words with their flags."""
        found = np.zeros(writer.shape, bool)
        for slot, number in set(zip(writer.tolist(), written.tolist(), strict=True)) - {(0, 0)}:
            event = self._events[slot - 1][number]
            if event is not None and event.kind == FLAG:
                found |= (writer == slot) & (written == number)
        return found

    def _check_own(
        self,
        region: Region,
        strand: Strand,
        event: Event,
        index: Array,
        written: Array,
        mine: Array,
    ) -> None:
        """Loads, after no barrier, of what threads of the same program have stored."""
        number = int(written[np.argmax(mine)])
        earlier = self._events[strand.slot][number]
        assert earlier is not None
        alike = mine.all() and (written == number).all() and earlier.granules == index.size
        if not alike:
            raise RaceError(
                f"{self._where(region, index[mine], event)}:\n"
                f"  rank {strand.rank}, {earlier.what}, {earlier.kind} it at "
                f"{self._sites.text(earlier.site)}\n"
                f"  and {event.kind} it at {self._sites.text(event.site)}\n"
                f"  perhaps in other threads, with no tl.debug_barrier between"
            )

    def _check_table(
        self, region: Region, table: Array, strand: Strand, event: Event, index: Array
    ) -> None:
        """The last accesses of every slot; unordered atomics of scopes that reach are no race."""
        late = table[index] > self.clocks[strand.slot][region.slots]
        if not late.any():
            return
        columns = np.flatnonzero(late.any(0))
        for column in sorted(columns, key=lambda column: region.slots[column]):
            other = int(region.slots[column])
            rows = index[late[:, column]]
            number = int(table[rows[0], column])
            earlier = self._events[other][number]
            assert earlier is not None
            if event.kind in (ATOMIC, ATOMIC_READ) and earlier.kind in (ATOMIC, ATOMIC_READ):
                near = self.ranks[other] == strand.rank
                enough = ("gpu", "sys") if near else ("sys",)
                if event.scope in enough and earlier.scope in enough:
                    continue
            self._race(region, strand, event, rows, other, number)

    def _race(
        self, region: Region, strand: Strand, event: Event, index: Array, slot: int, number: int
    ) -> None:
        earlier = self._events[slot][number]
        assert earlier is not None
        rank, atomic = self.ranks[slot], (ATOMIC, ATOMIC_READ)
        if event.kind in atomic and earlier.kind in atomic:
            why = (
                f"both are atomic, but at scope {earlier.scope} and {event.scope}: "
                f"{'programs of one rank need gpu' if rank == strand.rank else 'ranks need sys'}"
            )
        else:
            why = self._missing(slot, number, strand, earlier.kind, event.kind)
        raise RaceError(
            f"{self._where(region, index, event)}:\n"
            f"  rank {rank}, {earlier.what}, {earlier.kind} it at "
            f"{self._sites.text(earlier.site)}\n"
            f"  rank {strand.rank}, {event.what}, {event.kind} it at "
            f"{self._sites.text(event.site)}\n"
            f"  with nothing between to order them: {why}"
        )

    def _missing(self, slot: int, number: int, strand: Strand, earlier: str, later: str) -> str:
        rank = self.ranks[slot]
        after = [site for upto, site in self._releases[slot] if upto >= number]
        if rank == strand.rank:
            return "between programs of one launch only signals order, at gpu scope or wider"
        if after:
            signalled = f"rank {rank} has signalled after it, first at {self._sites.text(after[0])}"
            here = [other for other, owner in enumerate(self.ranks) if owner == strand.rank]
            if any(self.ever(other)[slot] >= number for other in here):
                return (
                    f"{signalled}, and other programs of rank {strand.rank} have waited for that, "
                    f"but this one has waited neither for that nor for a signal of theirs "
                    f"(release and acquire, scope gpu)"
                )
            not_here = f"rank {strand.rank} has not waited for that (acquire, scope sys)"
            return f"{signalled}, but {not_here}"
        early = f"; or it should not write before rank {strand.rank} has read what was there"
        return (
            f"rank {rank} has released nothing to other ranks since (sem release, scope sys"
            + ("" if BARRIER_BEFORE_ATOMICS else "; in a kernel after a tl.debug_barrier")
            + ")"
            + (early if (earlier, later) == (WRITE, READ) else "")
        )

    @staticmethod
    def _where(region: Region, index: Array, event: Event) -> str:
        low, high = int(index.min()) * region.granule, (int(index.max()) + 1) * region.granule
        if region.granule == 8:
            return f"{region.name}, words {low // 8} to {high // 8 - 1}"
        size = event.itemsize
        elements = f"elements {low // size} to {(high - 1) // size} of {size} bytes"
        return f"{region.name}, bytes {low} to {high - 1} ({elements})"
