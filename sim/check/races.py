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
import math
import mmap
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.sim.check.sites import Sites
from weft.sim.check.vector_clocks import BARRIER_BEFORE_ATOMICS, Array, Clocks
from weft.sim.errors import OutOfBoundsError, RaceError

if TYPE_CHECKING:
    from weft.sim.check.recording import Tape
    from weft.sim.schedule.scheduler import Strand

READ, WRITE, ATOMIC_READ, ATOMIC = "reads", "writes", "polls", "updates"

_MAP_NORESERVE = 0x4000  # Linux; in `mmap` since Python 3.13
_FIRST_COLUMNS = 8  # strands whose reads of a region there is room for at first


def zeros(shape: tuple[int, ...], dtype: Any) -> Array:
    """Zeros whose pages cost nothing until touched: malloc would clear memory that it has again.

    There may be more of them than the machine has memory: real sizes are not touched.
    """
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    if nbytes < 1 << 16:
        return np.zeros(shape, dtype)
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, nbytes, flags), dtype).reshape(shape)


@dataclass
class Region:
    """Memory from `start` to `end`, whose accesses are kept by granules of `granule` bytes.

    Attributes:
        name: what it is, for messages; `guard` regions must not be touched at all.
        defined: whether what was never written may be read.
        key: the same in every schedule, as its address is not.
    """

    start: int
    end: int
    name: str
    key: Hashable = None
    granule: int = 4
    defined: bool = True
    guard: bool = False
    writer: Array = field(default_factory=lambda: np.empty(0))  # slot + 1 of the last write, or 0
    written: Array = field(default_factory=lambda: np.empty(0))  # its number there
    columns: dict[int, int] = field(default_factory=dict)  # slot -> its column of the tables below
    slots: Array = field(default_factory=lambda: np.zeros(_FIRST_COLUMNS, np.int64))  # of columns
    reads: Array = field(default_factory=lambda: np.empty((0, 0)))  # last number of each slot
    atomics: Array | None = None
    seen: Array = field(default_factory=lambda: np.empty(0))  # whether a granule has any history

    def make(self) -> None:
        """Set up an empty history."""
        count = -(-(self.end - self.start) // self.granule)
        # Fresh pages, which are zero, say "never": large buffers cost nothing.
        self.writer = zeros((count,), np.int32)
        self.written = zeros((count,), np.int32)
        self.reads = zeros((count, len(self.slots)), np.int32)
        self.atomics = None
        self.seen = zeros((count,), np.bool_)

    def refine(self, granule: int) -> None:
        """Keep the history by smaller granules from now on."""
        writer, written, reads, atomics = self.writer, self.written, self.reads, self.atomics
        old, factor = np.flatnonzero(self.seen), self.granule // granule
        new = (old[:, None] * factor + np.arange(factor)).reshape(-1)
        self.granule = granule
        self.make()
        self.seen[new] = True
        self.writer[new] = writer[old].repeat(factor)
        self.written[new] = written[old].repeat(factor)
        self.reads[new] = reads[old].repeat(factor, axis=0)
        if atomics is not None:
            self.atomics = zeros(self.reads.shape, np.int32)
            self.atomics[new] = atomics[old].repeat(factor, axis=0)

    def column(self, slot: int) -> int:
        """The column of `slot`: few of all strands reach any one region."""
        at = self.columns.get(slot)
        if at is None:
            at = self.columns[slot] = len(self.columns)
            if at == len(self.slots):
                self.slots = np.pad(self.slots, (0, at))
                self.reads = self._wider(self.reads)
                self.atomics = None if self.atomics is None else self._wider(self.atomics)
            self.slots[at] = slot
        return at

    def _wider(self, table: Array) -> Array:
        count, columns = table.shape
        wider = zeros((count, 2 * columns), np.int32)
        seen = np.flatnonzero(self.seen)
        wider[seen, :columns] = table[seen]
        return wider


@dataclass(frozen=True)
class Event:
    """One access of a strand, to elements of `itemsize` bytes."""

    site: int
    what: str
    kind: str
    scope: str
    itemsize: int
    granules: int


class Detector(Clocks):
    """Clocks of all strands, and the history of all memory that several of them can reach.

    Attributes:
        tape: where accesses are noted as well, if the schedule is recorded.
    """

    def __init__(self, sites: Sites) -> None:
        super().__init__()
        self._sites = sites
        self._starts: list[int] = []
        self._regions: list[Region] = []
        self._events: list[list[Event | None]] = []
        self._releases: list[list[tuple[int, int]]] = []  # (number, site) of each release
        self.tape: Tape | None = None

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
        """The ranks that have written the granule at `address`."""
        at = (address - region.start) // region.granule
        slots = {int(region.writer[at]) - 1} - {-1}
        if region.atomics is not None:
            slots |= set(region.slots[np.flatnonzero(region.atomics[at])].tolist())
        return sorted({self.ranks[slot] for slot in slots})

    # Clocks

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

    # Accesses

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

    def _check(self, region: Region, strand: Strand, index: Array, event: Event) -> None:
        slot, kind = strand.slot, event.kind
        clock = self.clocks[slot]
        events = self._events[slot]
        number = len(events)
        events.append(event)
        clock[slot] = number
        region.seen[index] = True
        if self.tape:
            self.tape.touch(strand, region, index, kind, event.scope)

        writer, written = region.writer[index], region.written[index]
        late = written > clock[writer - 1]
        late &= writer != 0
        if late.any():
            at = int(np.argmax(late))
            self._race(region, strand, event, index[late], int(writer[at]) - 1, int(written[at]))
        if kind == READ and strand.what != "host":
            mine = (writer == slot + 1) & (written > self._barriers[slot])
            if mine.any():
                self._check_own(region, strand, event, index, written, mine)
        if not region.defined and kind != WRITE and not writer.all():
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
        if kind in (WRITE, ATOMIC):
            self._check_table(region, region.reads, strand, event, index)
        if kind == WRITE:
            region.writer[index], region.written[index] = slot + 1, number
            return
        column = region.column(slot)
        if kind != ATOMIC:
            region.reads[index, column] = number
            return
        if region.atomics is None:
            region.atomics = zeros(region.reads.shape, np.int32)
        region.atomics[index, column] = number

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
