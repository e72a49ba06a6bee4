"""The virtual world: what ranks share in one schedule, and what happens when they access it.

The interpreter (`interpreter_hooks`), torch ops (`host_access`) and host-side signals tell it what
strands do; it tells the scheduler, and its observers (`weft.sim.observer`): the search for races,
the recording for other schedules, virtual time.
"""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec

import numpy as np
import torch

from weft.collectives.memory.workspace import forget
from weft.collectives.prices.hardware import Hardware
from weft.collectives.ranks import pad
from weft.sim.check.races import READ, WRITE, Detector
from weft.sim.check.recording import HOST, Tape
from weft.sim.check.regions import Region, untouched_zeros
from weft.sim.errors import OutOfBoundsError, SimError
from weft.sim.hooks.host_access import HostAccesses, addresses, tensors_in
from weft.sim.hooks.host_ops import HostOps
from weft.sim.hooks.interpreter_hooks import Effect
from weft.sim.observer import Array, Atomic, Flagged, HostSignal, Observer, Vain
from weft.sim.run import distributed_hooks
from weft.sim.run.launches import Launches
from weft.sim.run.team import Team, Teams, word_told
from weft.sim.schedule.scheduler import Scheduler, Strand, local, strand_here
from weft.sim.time.compiling import Launched, launched
from weft.sim.time.rotation import Pads
from weft.sim.time.trace import Tracer

Programs = Literal["sequential", "concurrent"]
P = ParamSpec("P")

_GUARD_BYTES = 1 << 20  # untouchable memory before and after each buffer
_ALIGN = 4096
_FLAG = 0xFFFFFFFF
_start = attrgetter("start")


class _Segment(NamedTuple):
    """A rank's memory of a symmetric buffer; `name` is the same in every schedule."""

    start: int
    end: int
    team: Team
    rank: int
    pad_bytes: int
    name: Hashable


def _runs(words: Array) -> list[tuple[int, int]]:
    """The first and the last of words that lie side by side, of each such run."""
    ends = np.flatnonzero(words[1:] != words[:-1] + np.uint64(pad.WORD_BYTES))
    firsts, lasts = words[np.append(0, ends + 1)], words[np.append(ends, -1)]
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


class World(Teams[Team]):
    """One schedule of `world_size` virtual ranks."""

    def __init__(
        self,
        world_size: int,
        scheduler: Scheduler,
        tape: Tape | None,
        *,
        races: bool,
        programs: Programs,
        hardware: Hardware | None,
        numerics: bool,
        symmetric: bool,
        hosts: Sequence[int],
    ) -> None:
        super().__init__()
        self.world_size, self.scheduler, self.programs = world_size, scheduler, programs
        self.detector = Detector(scheduler.sites, tape) if races and numerics else None
        self.tracer = Tracer(world_size) if hardware else None
        told: tuple[Observer | None, ...] = (self.detector, tape, self.tracer)
        self.observers = [each for each in told if each]
        self.everybody = tuple(range(world_size))
        self.host_of = [host for host, ranks in enumerate(hosts) for _ in range(ranks)]
        self.hardware, self.numerics, self.symmetric = hardware, numerics, symmetric
        self.pads = Pads()
        scheduler.explain = self._awaited
        self._segments: list[_Segment] = []  # by address
        self._values: dict[int, int] = {}  # last value seen of a polled word
        self._blocks: dict[int, int] = {}  # of flagged words stored together: from where to where
        self._awaited_words: set[int] = set()  # flagged words that were missing
        self._slots = self._buffers = 0
        self._shared = [0] * world_size  # how many tensors each rank has shared
        self.launch = Launches(self).run
        self.launched: list[Launched] = []
        self._alive: list[Any] = []

    def tell(
        self, event: Callable[Concatenate[Observer, P], None], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """All observers see `event`, one of `Observer`'s; what they find ends the schedule."""
        try:
            for each in self.observers:
                getattr(each, event.__name__)(*args, **kwargs)
        except SimError as error:
            raise self.scheduler.stop(error) from None

    def new_strand(self, rank: int) -> Strand:
        """The host of `rank`, with a clock."""
        strand = Strand(rank, self.new_slot(rank, HOST))
        self.tell(Observer.thread, strand, ("host", rank))
        return strand

    def new_slot(self, rank: int, lane: int) -> int:
        """A clock for `lane` of `rank`."""
        self.tell(Observer.new_lane, rank, lane)
        self._slots += 1
        return self._slots - 1

    @contextmanager
    def rank(self, strand: Strand) -> Iterator[None]:
        """This thread is the host of a rank inside the block."""
        with distributed_hooks.rank_of(self, strand.rank):
            try:
                with ExitStack() as stack:
                    if self.detector:
                        stack.enter_context(HostAccesses(self._host_access))
                    if self.tracer:
                        stack.enter_context(HostOps(self.tracer, self.numerics))
                    yield
            finally:
                forget(strand.rank)

    def new_team(self, name: str, ranks: tuple[int, ...]) -> Team:
        return Team(self, name, ranks)

    def allocate(self, team: Team, pad_bytes: int, data_bytes: int) -> list[torch.Tensor]:
        """A segment for each member of `team`: zeroed pads, and data that holds nothing yet."""
        self._buffers += 1
        return [
            self._allocate(team, rank, self._buffers, pad_bytes, data_bytes) for rank in team.ranks
        ]

    def _allocate(
        self, team: Team, rank: int, number: int, pad_bytes: int, data_bytes: int
    ) -> torch.Tensor:
        total = pad_bytes + data_bytes
        block = untouched_zeros((total + 2 * _GUARD_BYTES + _ALIGN,), np.uint8)
        self._alive.append(block)
        base = block.ctypes.data
        start = -(-(base + _GUARD_BYTES) // _ALIGN) * _ALIGN
        self.pads.add(start, pad_bytes, number, rank)
        data, end, last = start + pad_bytes, start + total, base + len(block)
        name = team.ranks, team.calls, rank
        bisect.insort(self._segments, _Segment(start, end, team, rank, pad_bytes, name))
        what = f"symmetric buffer {number} of rank {rank}"
        columns = np.zeros(4 * self.world_size, np.int64)  # some strands of every rank signal
        pads = f"signal pad of {what}", (*name, "pad")
        regions = (
            Region(base, start, f"before {what}", guard=True),
            Region(start, data, *pads, granule=pad.WORD_BYTES, words=True, slots=columns),
            Region(data, end, what, (*name, "data"), defined=False),
            Region(end, last, f"past the end of {what}", guard=True),
        )
        self.tell(Observer.memory, start, end, rank, regions)
        return torch.from_numpy(block)[start - base : start - base + total]

    def share(self, x: torch.Tensor) -> None:
        """Others may read the storage of `x` from now on, and for the rest of the schedule."""
        storage, rank = x.untyped_storage(), strand_here().rank
        start = storage.data_ptr()
        self._shared[rank] += 1
        name = f"a tensor of rank {rank} that others read in place"
        key = "shared", rank, self._shared[rank]
        self._keep(storage, Region(start, start + storage.nbytes(), name, key))

    def bring(self, value: Any) -> None:
        """Others will read the tensors in `value`: in virtual time, over a link."""
        if self.tracer:
            for tensor in tensors_in([value]):
                self._keep(tensor.untyped_storage())

    def _keep(self, storage: torch.UntypedStorage, *regions: Region) -> None:
        """Memory of this rank that others read: no other tensor may come to lie there."""
        start, rank = storage.data_ptr(), strand_here().rank
        self.tell(Observer.memory, start, start + storage.nbytes(), rank, regions)
        self._alive.append(storage)

    def read(self, address: int, out: torch.Tensor) -> None:
        """Copy memory that another rank shares."""
        strand, size = strand_here(), out.element_size()
        if out.numel():
            read = np.arange(out.numel(), dtype=np.uint64) * np.uint64(size) + np.uint64(address)
            self.tell(Observer.access, strand, read, size, READ)
            self._host_access(out, WRITE)
        self.tell(Observer.copied, strand, address, out.numel() * size)
        if self.numerics or not out.is_floating_point():
            ctypes.memmove(out.data_ptr(), address, out.numel() * size)

    # What the interpreter tells, by the thread that runs the kernel

    def active(self) -> bool:
        """Whether this thread is a virtual rank."""
        return local.strand is not None

    def access(
        self,
        accessed: np.ndarray[Any, Any],
        itemsize: int,
        kind: str,
        stored: int | None = None,
    ) -> None:
        """A load or store of the elements at `accessed` comes next; `stored` is the value of one
        integer that is stored."""
        strand = strand_here()
        self.scheduler.check()
        self.tell(Observer.access, strand, accessed, itemsize, kind)
        if kind == WRITE:
            self._stored(strand, accessed, stored)
        elif accessed.size == 1 and (word := self._word(int(accessed[0]))) is not None:
            # A loop may wait by plain loads: a race, but others must be able to go on.
            self.tell(Observer.plain, strand, "look", word)
            self.scheduler.polled(strand, int(accessed[0]))
            if strand.vain:
                self.scheduler.point(strand)

    def store_flagged(self, accessed: Array, generation: int, store: Callable[[], Any]) -> Any:
        """`store()` leaves words with their flags at `accessed`, each in one piece."""
        strand, scheduler = strand_here(), self.scheduler
        scheduler.point(strand)
        self.tell(Observer.flush, strand)
        out, blocks = store(), {}
        for first, last in _runs(accessed):
            self._blocks[first] = last + pad.WORD_BYTES
            scheduler.changed(first)
            blocks[first] = scheduler.versions[first]
            for address in [each for each in self._awaited_words if first < each <= last]:
                scheduler.changed(address)
        self.tell(Observer.flagged, strand, self._flagged(accessed, generation, blocks))
        scheduler.progressed(strand)
        return out

    def take_flagged(self, accessed: Array, generation: int) -> bool:
        """Words at `accessed` are loaded next: whether all have the flag of `generation`."""
        strand, scheduler = strand_here(), self.scheduler
        scheduler.point(strand)
        self.tell(Observer.flush, strand)
        words = [ctypes.c_int64.from_address(address) for address in accessed.tolist()]
        late = [at for at, word in enumerate(words) if (word.value >> 32 ^ generation) & _FLAG]
        if self.symmetric:  # the peer that would store them does not run
            for at in late:
                words[at].value = words[at].value & _FLAG | generation << 32
        elif late:
            address, seen = int(accessed[late[0]]), words[late[0]].value >> 32 & _FLAG
            self._awaited_words.add(address)
            scheduler.polled(strand, address, generation)
            if strand.missing is None:
                site = scheduler.sites.text(strand.site)
                strand.missing = address, Vain(site, generation & _FLAG, seen)
            return False
        blocks = {}
        for address, last in _runs(accessed):
            while address <= last:
                end = self._blocks.get(address)
                if end is not None:
                    blocks[address] = scheduler.versions[address]
                address = end or address + pad.WORD_BYTES
        self.tell(Observer.taken, strand, self._flagged(accessed, generation, blocks))
        return True

    def _flagged(self, accessed: Array, generation: int, blocks: dict[int, int]) -> Flagged:
        names = [self._word(address) for address in blocks]
        site = self.scheduler.sites.text(strand_here().site)
        return Flagged(accessed, generation & _FLAG, blocks, names, site)

    def _word(self, address: int) -> Hashable | None:
        """What the word at `address` is called in every schedule; None if it is not shared."""
        segment = self._segment(address)
        return None if segment is None else (segment.name, address - segment.start)

    def _segment(self, address: int) -> _Segment | None:
        at = bisect.bisect_right(self._segments, address, key=_start) - 1
        return self._segments[at] if at >= 0 and address < self._segments[at].end else None

    def _stored(self, strand: Strand, accessed: np.ndarray[Any, Any], value: int | None) -> None:
        # A plain store may be what another strand polls for: a race, but no deadlock.
        if accessed.size == 1:
            changed = [int(accessed[0])]
            self.tell(Observer.stored, strand, self._word(changed[0]), value, False)
        else:
            changed = self._polled_among(accessed)
            self.tell(Observer.stored, strand, None, value, bool(changed))
        self.scheduler.progressed(strand)
        for address in changed:
            self.scheduler.changed(address)

    def _polled_among(self, accessed: np.ndarray[Any, Any]) -> list[int]:
        """Words that atomics have seen, of those `accessed`."""
        low, high = int(accessed.min()), int(accessed.max())
        if self._word(low) is None:
            return []
        near = [address for address in self._values if low <= address <= high]
        return [address for address in near if (accessed == address).any()]

    def atomic(
        self,
        accessed: np.ndarray[Any, Any],
        itemsize: int,
        sem: str,
        scope: str,
        run: Callable[[], tuple[Any, bool, np.ndarray[Any, Any]]],
        wanted: int | None = None,
        effect: Effect | None = None,
    ) -> Any:
        """An atomic: `run()` does it and returns (what it returned, whether memory changed, the
        values seen). `wanted` is what a loop around it waits for, if that can be told, `effect`
        what it does to one integer: ("load",), ("add", n), ("set", n), ("swap", if it is, n)."""
        strand, scheduler = strand_here(), self.scheduler
        words = accessed.tolist()
        first = words[0]
        # With programs in turn, what stays within the rank concerns no other strand.
        if scope == "sys" or strand.vain or self.programs == "concurrent":
            scheduler.point(strand)
        else:
            strand.site = scheduler.sites.here()
        self.tell(Observer.flush, strand)
        if effect is not None and effect[0] == "set":
            self._check_source(strand, first)
        out, changed, seen = run()
        value = int(seen.reshape(-1)[0])
        if changed or value >= strand.looks_for.get(first, value):  # else it will look again
            self._saw(strand, first, value, changed)
        if changed:
            for address in words:
                self._changed(address)
            scheduler.progressed(strand)
        else:
            scheduler.polled(strand, first, wanted)
        word, known = self._word(first), effect if accessed.size == 1 else None
        versions = [scheduler.versions.get(address, 0) for address in words]
        done = Atomic(accessed, itemsize, sem, scope, changed, word, known, value, versions)
        self.tell(Observer.atomic, strand, done)
        return out

    def _check_source(self, strand: Strand, address: int) -> None:
        """Raise if `strand` signals by a word that is another rank's, as programs do that a pad has
        no words for."""
        segment = self._segment(address)
        if segment is None:
            return
        start, _, team, owner, nbytes, _ = segment
        word = (address - start) // pad.WORD_BYTES
        if not pad.KERNEL_SLOTS <= word < nbytes // pad.WORD_BYTES:
            return
        phase, member = divmod((word - pad.KERNEL_SLOTS) // pad.MAX_PROGRAMS, len(team.ranks))
        if phase > 1 or strand.rank not in (team.ranks[member], owner):
            whose = "nobody's" if phase > 1 else f"rank {team.ranks[member]}'s"
            sites = self.scheduler.sites
            error = OutOfBoundsError(
                f"rank {strand.rank}, {strand.what}, signals by a word of rank {owner}'s pad that "
                f"is {whose}: a pad has words for {pad.MAX_PROGRAMS} programs of a rank, 0 to "
                f"{pad.MAX_PROGRAMS - 1}, in each phase. Launch no more programs than that, or let "
                f"several share a word:\n  {sites.text(sites.here())}"
            )
            raise self.scheduler.stop(error)

    def _changed(self, address: int) -> None:
        self.scheduler.changed(address)
        if self._word(address):
            self.tell(Observer.changed, address, self.scheduler.versions[address])

    def _saw(self, strand: Strand, address: int, value: int | None, wrote: bool) -> None:
        if value is not None:
            self._values[address] = value
        if self.scheduler.tracing:
            word = self._word(address) or ("private", strand.rank)
            self.scheduler.saw(strand, word, value, wrote)

    def barrier(self) -> None:
        """tl.debug_barrier."""
        self.tell(Observer.threads_meet, strand_here())

    def expect(self, addresses: Sequence[int], value: int) -> None:
        """A kernel begins to wait for `value` at all `addresses`: what it polled before was not in
        vain.

        Words that it looks at before every wait would else make it seem to spin, and others would
        always go first.
        """
        strand = strand_here()
        strand.looks_for = dict.fromkeys(addresses, value)
        self.scheduler.progressed(strand)
        self.tell(Observer.expect, strand, list(map(self._word, addresses)), value)

    def poll(self, address: int, value: int) -> int:
        """A kernel awaits `value` at `address`: it goes on when the word changes."""
        strand = strand_here()
        if (missing := strand.missing) is not None:  # the first of flagged words that were
            strand.missing, (address, vain) = None, missing
            self.tell(Observer.looks_again, strand, vain)
        elif self.symmetric:  # the peer that would write it does not run
            ctypes.c_int64.from_address(address).value = value
            self._changed(address)
            return 0
        # Others may have come between this poll and that of another lane.
        version = strand.words[address]
        self.scheduler.sleep_on(strand, address, version, lambda: self._awaited(address, value))
        if missing is not None:
            self._awaited_words.discard(address)
        return 0

    def _awaited(self, address: int, value: int | None) -> str:
        """What a strand waits for that polls the word at `address`."""
        want = "another value" if value is None else str(value)
        seen = self._values.get(address, 0)
        segment = self._segment(address)
        if segment and address < segment.start + segment.pad_bytes:
            word = (address - segment.start) // pad.WORD_BYTES
            return f"{want} in {word_told(segment.team, segment.rank, word, seen)}"
        region = self.detector.find(address) if self.detector else None
        if self.detector is None or region is None:
            return f"{want} in the word at {address:#x}, which is {seen}"
        writers = self.detector.writers(region, address)
        who = f", written by rank {', '.join(map(str, writers))}" if writers else ", never written"
        return f"{want} at byte {address - region.start} of {region.name}{who}, which is {seen}"

    def launches(self, fn: Callable[..., Any], grid: Any, given: dict[str, Any]) -> None:
        """`fn` is about to be launched: keep what it would be compiled from for these GPUs."""
        if self.tracer:
            programs = grid(given) if callable(grid) else grid
            self.launched.append(launched(strand_here().rank, fn, programs, given))

    # What torch and the host do

    def python_read(self, tensor: torch.Tensor) -> None:
        """`tensor.tolist()` comes next."""
        if local.strand is not None:
            self._host_access(tensor, READ)

    def _host_access(self, tensor: torch.Tensor, kind: str) -> None:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.numel():
            return
        if self.detector and self.detector.find(tensor.data_ptr()):
            accessed, size = addresses(tensor), tensor.element_size()
            self.tell(Observer.access, strand_here(), accessed, size, kind)

    def post(self, address: int, value: int, write: Callable[[], None]) -> None:
        """A host-side release: `write` stores `value` in the word at `address`."""
        strand, word = strand_here(), self._word(address)
        self.scheduler.point(strand)
        self.tell(Observer.flush, strand)
        write()
        self.scheduler.changed(address)
        version = self.scheduler.versions[address]
        self.tell(Observer.post, strand, HostSignal(address, word, value, version))
        self._saw(strand, address, None, True)

    def acquire(self, address: int, read: Callable[[], int], value: int) -> None:
        """A host-side acquire: until the word at `address` is at least `value`."""
        strand, word = strand_here(), self._word(address)
        self.scheduler.point(strand)
        self.tell(Observer.flush, strand)
        while True:
            seen = read()
            self._saw(strand, address, seen, False)
            version = self.scheduler.versions.get(address, 0)
            awaited = HostSignal(address, word, value, version)
            self.tell(Observer.look, strand, awaited, seen >= value)
            if seen >= value:
                return
            self.scheduler.looks_again(strand)
            self.scheduler.sleep_on(strand, address, version, lambda: self._awaited(address, value))

    def word_access(self, address: int, kind: str, value: int = 0) -> None:
        """The host reads a word of a pad as plain memory, or writes `value` there."""
        strand, accessed = strand_here(), np.array([address], np.uint64)
        self.tell(Observer.access, strand, accessed, pad.WORD_BYTES, kind)
        if kind == WRITE:
            self.tell(Observer.plain, strand, "poke", self._word(address), value)
