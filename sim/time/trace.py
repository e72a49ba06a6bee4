"""The events of a run that take time, without the time they take.

A lane is a sequence of events: a rank's stream (`KernelLaunch`, `HostOp`, signals), or one program
of a launch (`Work`, `Store`, signals). `weft.sim.time.clock` plays a trace on a `Hardware`. Lengths
are in bytes and flop; nothing here depends on a chip, so that one trace can be played on several.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from weft.sim.observer import Atomic, Flagged, HostSignal, Observer, Vain

if TYPE_CHECKING:
    from weft.sim.check.regions import Region
    from weft.sim.schedule.scheduler import Strand

Array = npt.NDArray[Any]

# Loads and stores of integers up to this are words of tables and pads: they cost nothing, nor does
# a single number.
_SCALAR_BYTES = 64


@dataclass(slots=True)
class Work:
    """Loads and dots up to the next store or signal: a software pipeline.

    Attributes:
        loads: (position in its turn, owner of the memory) -> [first address, bytes].
        flops, turns: of all its dots; how many there are.
        dtype: the narrowest that the program has loaded.
        stored: what it loads goes to stores as it is: they wait for it, the program does not.
        steps: turns of a loop after its first load.
        results, specials: of other arithmetic that dots come after, as a softmax: its results, and
            how many of them are exponentials and the like.
    """

    loads: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    flops: int = 0
    turns: int = 0
    dtype: str = "float32"
    stored: bool = False
    steps: int = 0
    results: int = 0
    specials: int = 0


@dataclass(slots=True)
class Store:
    """A store to rank `owner`'s memory: of what event `loaded` brought, or (None) of results.

    `flags`: of words with their flags, which are there once it is: (address of the first of them,
    which of its changes that is). `beside`: by the same instruction as the store before.
    """

    owner: int
    nbytes: int
    loaded: int | None = None
    flags: list[tuple[int, int]] = field(default_factory=list)
    beside: bool = False


@dataclass(slots=True)
class Signal:
    """The word at `address`, of rank `owner`, changes for the `version`-th time.

    `release`: after the program's stores have been acknowledged.
    """

    address: int
    version: int
    owner: int
    release: bool = True


@dataclass(slots=True)
class Flag:
    """Words with their flags, too few to take time, reach rank `owner` with the program's store
    before: the first of them changes for the `version`-th time."""

    address: int
    version: int
    owner: int


@dataclass(slots=True)
class Wait:
    """What comes next needs changes of words, looked at together: address -> which change.

    `flagged`: they carry what comes next, so that the look that finds them has it.
    """

    versions: dict[int, int]
    flagged: bool = False


@dataclass(slots=True)
class Update:
    """An atomic that reads a word's last change and makes the next: if anything follows it in the
    program, that waits for what it read."""

    address: int
    version: int
    owner: int


@dataclass(slots=True)
class Meet:
    """`count` ranks reach meeting `key` before any goes on. Takes no time, as it is set-up."""

    key: Hashable
    count: int


@dataclass(slots=True)
class Beside:
    """From here on `events` run in a stream beside this one, until it comes to a `Rejoin`."""

    events: list[StreamEvent]


@dataclass(slots=True)
class Rejoin:
    """What comes next needs all streams beside this one to have ended."""


@dataclass(slots=True)
class HostOp:
    """An op of torch, as one kernel of all cores.

    Attributes:
        reads, writes: owner of the memory -> bytes.
        matmul: if it is one, or several: the rows M of each (M, K) @ (K, N), N and K.
        collective: whether it is a process group's, of all ranks.
    """

    name: str
    reads: dict[int, int]
    writes: dict[int, int]
    matmul: tuple[tuple[int, ...], int, int] | None = None
    dtype: str = "float32"
    collective: bool = False


ProgramEvent = Work | Store | Signal | Flag | Wait | Update


@dataclass(slots=True)
class KernelLaunch:
    """A kernel. `warps` bounds how many of its programs fit on a core together; `stages` is how
    many steps of a loop have their operands in shared memory at a time.
    """

    kernel: str
    warps: int
    stages: int
    programs: list[list[ProgramEvent]]

    @property
    def multiplies(self) -> bool:
        """Whether it has dots: then a program fills its core."""
        return any(isinstance(e, Work) and e.turns for events in self.programs for e in events)


StreamEvent = KernelLaunch | HostOp | Signal | Wait | Meet | Beside | Rejoin


@dataclass
class Trace:
    """The streams of all ranks."""

    streams: list[list[StreamEvent]]

    def events(self, rank: int) -> Iterator[StreamEvent]:
        """Those of a rank's stream and of the streams beside it, as they were enqueued."""
        for event in self.streams[rank]:
            yield event
            if isinstance(event, Beside):
                yield from event.events


class Lane:
    """Collects what one program does."""

    __slots__ = (
        "_dtype", "_look", "_position", "_results", "_specials", "_width", "_work", "events",
        "loops",
    )  # fmt: skip

    def __init__(self) -> None:
        self.events: list[ProgramEvent] = []
        self.loops = 0  # that it has begun
        self._work: Work | None = None
        self._position = 0  # loads since the last dot
        self._results = self._specials = 0  # likewise
        self._dtype, self._width = "float32", 64
        self._look: Wait | None = None  # at flagged words

    def load(self, owner: int, address: int, nbytes: int, dtype: str, width: int) -> int | None:
        """`width` is that of an element in bits; 0 if it is an integer. Number of its event."""
        if _is_scalar(nbytes, width):
            return None
        if 0 < width < self._width:
            self._dtype, self._width = dtype, width
        work = self._pipeline()
        entry = work.loads.setdefault((self._position, owner), [address, 0])
        entry[1] += nbytes
        self._position += 1
        return len(self.events) - 1

    def dot(self, flops: int, tf32: bool) -> None:
        """An (M, K) @ (K, N): 2 M N K flops; `tf32` if it may round fp32 to that."""
        work = self._pipeline()
        work.flops += flops
        work.turns += 1
        work.dtype = "tf32" if tf32 and self._dtype == "float32" else self._dtype
        work.results += self._results
        work.specials += self._specials
        self._position = self._results = self._specials = 0

    def compute(self, results: int, special: bool) -> None:
        """Elementwise arithmetic or a reduction of so many numbers; `special`: exponentials."""
        self._results += results
        self._specials += results * special

    def store(
        self, owner: int, nbytes: int, width: int, loaded: int | None, beside: bool = False
    ) -> None:
        """A store to `owner`'s memory; `loaded`: what came with that event, unchanged; `beside`:
        another part of an instruction that has stored to another owner's."""
        if not _is_scalar(nbytes, width):
            if loaded is not None:
                work = self.events[loaded]
                assert isinstance(work, Work)
                work.stored = True
            beside = beside and bool(self.events) and isinstance(self.events[-1], Store)
            self.add(Store(owner, nbytes, loaded, beside=beside))

    def add(self, event: ProgramEvent) -> None:
        """Anything that ends the pipeline."""
        self._work, self._position, self._look = None, 0, None
        self._results = self._specials = 0  # what no dot comes after is hidden by others' loads
        # Polls in vain are one wait: for what the last of them saw.
        last = self.events[-1] if self.events else None
        match event, last:
            case Wait(versions), Wait(before) if versions.keys() == before.keys():
                self.events.pop()
        self.events.append(event)

    def flag(self, address: int, version: int, owner: int) -> None:
        """What was just stored to `owner` were words with their flags."""
        for event in reversed(self.events):
            if isinstance(event, Store):
                if event.owner == owner:
                    event.flags.append((address, version))
                    return
            elif not isinstance(event, Flag):
                break
        self.add(Flag(address, version, owner))

    def take(self, versions: dict[int, int]) -> None:
        """Flagged words are loaded next; all that one look loads is under way together."""
        if self._look is None:
            look = Wait(versions, flagged=True)
            self.add(look)
            self._look = look
        else:
            self._look.versions |= versions

    def looks_again(self) -> None:
        """Words were missing: a look takes time when it has found all."""
        if self._look is not None:
            while self.events.pop() is not self._look:
                pass
            self._work, self._look = None, None

    def _pipeline(self) -> Work:
        if self._work is None:
            self._work = Work()
            self.events.append(self._work)
        return self._work

    def step(self) -> None:
        """A turn of a loop begins."""
        if self._work is not None:
            self._work.steps += 1

    def state(self) -> tuple[int, Work]:
        """Enough to see what an iteration of a loop has added: see `repeat`."""
        work = self._work or Work()
        loads = {key: list(entry) for key, entry in work.loads.items()}
        return len(self.events), replace(work, loads=loads)

    def repeat(self, before: tuple[int, Work], times: int) -> bool:
        """Add `times` more what came since `before`. False, and nothing, unless it was a turn of a
        pipeline: loads and at least one dot."""
        count, then = before
        work = self._work
        if work is None or len(self.events) != count or work.turns == then.turns or not then.turns:
            return False
        for key, entry in work.loads.items():
            entry[1] += times * (entry[1] - then.loads.get(key, (0, 0))[1])
        for name in ("flops", "turns", "steps", "results", "specials"):
            now = getattr(work, name)
            setattr(work, name, now + times * (now - getattr(then, name)))
        return True


def _is_scalar(nbytes: int, width: int) -> bool:
    """Of elements of `width` bits, 0 if integers: whether an access is free."""
    return nbytes <= (width // 8 or _SCALAR_BYTES)


class Tracer(Observer):
    """Collects the trace of a run."""

    def __init__(self, world_size: int) -> None:
        self.trace = Trace([[] for _ in range(world_size)])
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._owners: list[int] = []
        self._collectives: dict[int, HostOp] = {}  # rank -> the one that it is in
        self._values: dict[int, list[tuple[int, int]]] = {}  # word -> its versions, their values
        self._current = list(self.trace.streams)  # rank -> the stream that it enqueues in
        self._beside: dict[tuple[int, int], list[StreamEvent]] = {}  # (rank, number), not rejoined

    def memory(self, start: int, end: int, rank: int, regions: Sequence[Region] = ()) -> None:
        """`rank`'s memory that others reach; all else belongs to the rank that accesses it."""
        at = bisect_right(self._starts, start)
        if at and self._starts[at - 1] == start:
            self._ends[at - 1], self._owners[at - 1] = end, rank
            return
        self._starts.insert(at, start)
        self._ends.insert(at, end)
        self._owners.insert(at, rank)

    def owner(self, address: int, rank: int) -> int:
        """Whose memory it is, for an access by `rank`."""
        at = bisect_right(self._starts, address) - 1
        return self._owners[at] if at >= 0 and address < self._ends[at] else rank

    def owners(self, addresses: Array, rank: int) -> list[tuple[int, int, int]]:
        """(owner, first address, elements) of a block of addresses, in most cases one.

        In the order of the block: kernels store to their peers in another order on each rank.
        """
        first, last = int(addresses[0]), int(addresses[-1])
        owner = self.owner(first, rank)
        if owner == self.owner(last, rank):
            return [(owner, first, len(addresses))]
        found = np.searchsorted(np.array(self._starts, np.uint64), addresses, "right") - 1
        inside = (found >= 0) & (addresses < np.array(self._ends, np.uint64)[found])
        every = np.where(inside, np.array(self._owners)[found], rank)
        places = np.sort(np.unique(every, return_index=True)[1])
        return [
            (int(every[place]), int(addresses[place]), int((every == every[place]).sum()))
            for place in places
        ]

    def add(self, strand: Strand, event: ProgramEvent | Meet | HostOp) -> None:
        """What `strand` does next: in its program, or on its rank's stream."""
        if not strand.timed:
            return
        collective = self._collectives.get(strand.rank)
        if collective is not None and isinstance(event, HostOp):
            for mine, theirs in (
                (collective.reads, event.reads),
                (collective.writes, event.writes),
            ):
                for owner, nbytes in theirs.items():
                    mine[owner] = mine.get(owner, 0) + nbytes
        elif strand.lane is not None:
            strand.lane.add(event)  # type: ignore[arg-type]
        else:
            self._current[strand.rank].append(event)  # type: ignore[arg-type]

    def changed(self, address: int, version: int) -> None:
        """The word at `address` has changed for the `version`-th time."""
        value = ctypes.c_int64.from_address(address).value
        self._values.setdefault(address, []).append((version, value))

    def atomic(self, strand: Strand, done: Atomic) -> None:
        for address, version in zip(map(int, done.addresses), done.versions, strict=True):
            owner = self.owner(address, strand.rank)
            if not done.changed:
                self.add(strand, Wait(self._awaited(strand, address, version)))
            elif done.sem in ("acquire", "acq_rel"):
                self.add(strand, Update(address, version, owner))
            else:
                self.add(strand, Signal(address, version, owner, done.sem == "release"))

    def flagged(self, strand: Strand, words: Flagged) -> None:
        if strand.timed and strand.lane is not None:
            for address, version in words.blocks.items():
                strand.lane.flag(address, version, self.owner(address, strand.rank))

    def taken(self, strand: Strand, words: Flagged) -> None:
        if strand.timed and strand.lane is not None:
            strand.lane.take(dict(words.blocks))

    def looks_again(self, strand: Strand, found: Vain) -> None:
        if strand.lane is not None:
            strand.lane.looks_again()

    def post(self, strand: Strand, signal: HostSignal) -> None:
        owner = self.owner(signal.address, -1)
        self.add(strand, Signal(signal.address, signal.version, owner))

    def look(self, strand: Strand, signal: HostSignal, found: bool) -> None:
        if found:
            self.add(strand, Wait({signal.address: signal.version}))

    def await_others(self, strand: Strand, op: str, key: Hashable, *size: int) -> None:
        if op == "attend":
            self.add(strand, Meet(key, *size))

    def copied(self, strand: Strand, address: int, nbytes: int) -> None:
        source = self.owner(address, strand.rank)
        self.add(strand, HostOp("read", {source: nbytes}, {strand.rank: nbytes}))

    def _awaited(self, strand: Strand, address: int, last: int) -> dict[int, int]:
        """The changes that a poll waited for: the last, or earlier ones if it looks for theirs."""
        if address not in strand.looks_for:
            return {address: last}
        return {
            word: next((v for v, held in self._values.get(word, ()) if held >= value), last)
            for word, value in strand.looks_for.items()
        }

    @contextmanager
    def beside(self, rank: int, number: int) -> Iterator[None]:
        """What `rank` enqueues inside goes to stream `number` beside its own."""
        main = self._current[rank]
        events = self._beside.get((rank, number))
        if events is None:
            events = self._beside[rank, number] = []
            main.append(Beside(events))
        self._current[rank] = events
        try:
            yield
        finally:
            self._current[rank] = main

    def rejoin(self, rank: int) -> None:
        """`rank`'s stream waits for those beside it."""
        self._beside = {key: events for key, events in self._beside.items() if key[0] != rank}
        self._current[rank].append(Rejoin())

    @contextmanager
    def collective(self, strand: Strand, name: str, share: float) -> Iterator[None]:
        """The ops of `strand` inside are one collective of a process group.

        Args:
            share: of what it reads from each peer here, what a good algorithm would move.
        """
        whole = self._collectives[strand.rank] = HostOp(name, {}, {}, collective=True)
        try:
            yield
        finally:
            del self._collectives[strand.rank]
        whole.reads.pop(strand.rank, None)
        for peer in whole.reads:
            whole.reads[peer] = round(whole.reads[peer] * share)
        self.add(strand, whole)

    def launch(
        self, strand: Strand, kernel: str, warps: int, stages: int, programs: int
    ) -> list[Lane] | None:
        """A lane for each program of a kernel that `strand` launches; None if it is not timed."""
        if not strand.timed:
            return None
        lanes = [Lane() for _ in range(programs)]
        launch = KernelLaunch(kernel, warps, stages, [lane.events for lane in lanes])
        self._current[strand.rank].append(launch)
        return lanes
