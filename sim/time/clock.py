"""Plays a trace on a `Hardware`: events in order of time, bandwidth shared among its users.

Every core runs one program at a time (several, if the kernel has no dot), every stream one kernel.
What moves bytes is a flow on each resource that it crosses, and ends with the last of them:

    load from own memory     L2, and HBM unless the region was loaded lately
    load from a peer         its port out, the own port in (or the one link between), its HBM
    store to own memory      HBM                         store to a peer: likewise, the other way

A resource is shared evenly by the flows on it, none faster than a core can go. The model as a whole
is described in docs/virtual_time.md.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from weft.collectives.prices.hardware import Hardware
from weft.sim.time.trace import (
    Beside,
    Flag,
    HostOp,
    KernelLaunch,
    Meet,
    ProgramEvent,
    Rejoin,
    Signal,
    Store,
    StreamEvent,
    Trace,
    Update,
    Wait,
    Work,
)

_CORE_THREADS = 2048  # that fit on a core at a time
_WARP_THREADS = 32
_MOST_PROGRAMS = 8  # on a core
# Between atomics on one word: the cache takes a few of its cycles for each. An estimate.
_SAME_WORD_US = 0.002
# Tiles that a library's matmul chooses from.
_LIBRARY_TILES = ((128, 256), (128, 128), (64, 128), (64, 64))


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """A core of `rank` from `start` to `end` (us): "arithmetic", "moving", "waiting".

    `peer` is the rank whose signal was waited for; -1: none.
    """

    rank: int
    core: int
    kernel: str
    kind: str
    start: float
    end: float
    peer: int = -1


@dataclass
class Played:
    """What the clock saw.

    Attributes:
        makespan: us until the last stream ends.
        spans: of cores; `launches`: of kernels and host ops, with core -1.
        link_bytes, hbm_bytes: the most that crossed one link, and one chip's HBM.
    """

    makespan: float
    spans: list[TimeSpan]
    launches: list[TimeSpan]
    link_bytes: float
    hbm_bytes: float


class Join:
    """Done when `left` parts are; then calls those that wait for it."""

    __slots__ = ("_then", "left")

    def __init__(self, left: int) -> None:
        self.left = left
        self._then: list[Callable[[], None]] = []

    def part_done(self) -> None:
        self.left -= 1
        if not self.left:
            for then in self._then:
                then()
            self._then.clear()

    def then(self, call: Callable[[], None]) -> None:
        if self.left:
            self._then.append(call)
        else:
            call()


# What a process yields: a time until which it sleeps, or a Join that it awaits.
Process = Generator[float | Join, None, None]


class Calendar:
    """Time, and what is to happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def at(self, time: float, call: Callable[[], None]) -> None:
        """Call at `time`; in the order of asking, at the same time."""
        self._number += 1
        heapq.heappush(self._events, (time, self._number, call))

    def start(self, process: Process) -> Join:
        """Run `process`; the Join is done when it is."""
        done = Join(1)

        def step() -> None:
            for wish in process:
                if isinstance(wish, Join):
                    if wish.left:
                        wish.then(step)
                        return
                elif wish > self.now:
                    self.at(wish, step)
                    return
            done.part_done()

        step()
        return done

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._events:
            self.now, _, call = heapq.heappop(self._events)
            call()


class Resource:
    """A bandwidth (bytes a us), shared by the flows under way in proportion to their weights.

    `limit` is what a flow of weight 1 gets at most.
    """

    def __init__(self, calendar: Calendar, bandwidth: float, limit: float) -> None:
        self._calendar, self._bandwidth, self._limit = calendar, bandwidth, limit
        self._flows: list[tuple[float, int, float, Join]] = []  # by what is served when it ends
        self._weight = self._served = self._since = 0.0
        self._number = self._version = 0
        self.bytes = 0.0

    def add(self, nbytes: float, weight: float, done: Join) -> None:
        """A flow of `nbytes` begins now; it counts as a part of `done` when it ends."""
        self._advance()
        self.bytes += nbytes
        self._number += 1
        heapq.heappush(self._flows, (self._served + nbytes / weight, self._number, weight, done))
        self._weight += weight
        self._plan()

    def _rate(self) -> float:
        fair = self._bandwidth / self._weight
        return fair if fair < self._limit else self._limit

    def _advance(self) -> None:
        now = self._calendar.now
        if self._flows:
            self._served += (now - self._since) * self._rate()
        else:
            self._served = self._weight = 0.0
        self._since = now

    def _plan(self) -> None:
        self._version += 1
        if self._flows:
            version = self._version
            left = max(0.0, self._flows[0][0] - self._served)
            self._calendar.at(self._since + left / self._rate(), lambda: self._end(version))

    def _end(self, version: int) -> None:
        if version != self._version:  # others came or went since
            return
        self._advance()
        self._served = max(self._served, self._flows[0][0])
        ended = []
        while self._flows and self._flows[0][0] <= self._served * (1 + 1e-12):
            _, _, weight, done = heapq.heappop(self._flows)
            self._weight -= weight
            ended.append(done)
        self._plan()
        for done in ended:
            done.part_done()


@dataclass
class _Chip:
    """One rank's."""

    hbm: Resource
    l2: Resource
    links: dict[int, Resource]  # on a switch: port out at -1, port in at -2; in a mesh: by peer
    # Regions in L2, by address and bytes: how many programs load each now; and the others, oldest
    # first.
    live: dict[tuple[int, int], int] = field(default_factory=dict)
    cached: OrderedDict[tuple[int, int], None] = field(default_factory=OrderedDict)
    cached_bytes: int = 0


class Clock:
    """Plays one trace. Times are in us."""

    def __init__(self, trace: Trace, hardware: Hardware) -> None:
        self._hw, self._trace = hardware, trace
        self._calendar = calendar = Calendar()
        limit = hardware.core_bandwidth / 1e6
        # Of a core's rate, where no dots hide what a program moves.
        self._plainly = min(1.0, hardware.program_bandwidth / hardware.core_bandwidth)
        ranks = range(len(trace.streams))

        def resource(bandwidth: float) -> Resource:
            return Resource(calendar, bandwidth / 1e6, limit)

        link = hardware.link_bandwidth * hardware.link_sustained
        ends = (-1, -2) if hardware.topology == "switch" else ranks
        self._chips = [
            _Chip(
                resource(hardware.hbm_bandwidth),
                resource(hardware.l2_bandwidth),
                {end: resource(link) for end in ends},
            )
            for _ in ranks
        ]
        self._arrived: dict[tuple[int, int], float] = {}
        self._senders: dict[tuple[int, int], int] = {}
        self._awaited: dict[tuple[int, int], Join] = {}
        self._to_come = set(_changes(trace))
        self._meetings: dict[Hashable, Join] = {}
        self._spans: list[TimeSpan] = []
        self._launches: list[TimeSpan] = []

    def play(self) -> Played:
        """From start to end."""
        ends = [0.0] * len(self._chips)

        def stream(rank: int, events: list[StreamEvent]) -> Process:
            yield from self._stream(rank, events)
            ends[rank] = self._calendar.now

        done = [
            self._calendar.start(stream(rank, events))
            for rank, events in enumerate(self._trace.streams)
        ]
        self._calendar.run()
        if stuck := [rank for rank, end in enumerate(done) if end.left]:
            raise RuntimeError(f"virtual time stands still: ranks {stuck} wait for each other")
        links = [link.bytes for chip in self._chips for link in chip.links.values()]
        hbm = [chip.hbm.bytes for chip in self._chips]
        return Played(max(ends), self._spans, self._launches, max(links), max(hbm))

    # A rank's stream

    def _stream(self, rank: int, events: list[StreamEvent], beside: bool = False) -> Process:
        calendar, hardware = self._calendar, self._hw
        others: list[Join] = []
        before: StreamEvent | None = None
        for event in events:
            start = calendar.now
            if isinstance(event, KernelLaunch):
                yield start + hardware.launch_us
                start = calendar.now
                yield self._launch(rank, event, beside)
                self._launches.append(
                    TimeSpan(rank, -1, event.kernel, "kernel", start, calendar.now)
                )
            elif isinstance(event, HostOp):
                yield start + (hardware.collective_us if event.collective else hardware.launch_us)
                start = calendar.now
                yield from self._host_op(rank, event)
                self._launches.append(TimeSpan(rank, -1, event.name, "kernel", start, calendar.now))
            elif isinstance(event, Signal):
                # A small kernel that signals all peers.
                if not isinstance(before, Signal):
                    yield start + hardware.launch_us
                self._deliver(rank, event)
            elif isinstance(event, Wait):
                if not isinstance(before, Wait):
                    yield start + hardware.launch_us
                yield from self._arrivals(event)
                if calendar.now > start:
                    peer = self._last_to_come(event)
                    self._launches.append(
                        TimeSpan(rank, -1, "wait", "waiting", start, calendar.now, peer)
                    )
            elif isinstance(event, Meet):
                meeting = self._meetings.setdefault(event.key, Join(event.count))
                meeting.part_done()
                yield meeting
            elif isinstance(event, Beside):
                others.append(calendar.start(self._stream(rank, event.events, beside=True)))
            elif isinstance(event, Rejoin):
                yield from others
            before = event

    def _launch(self, rank: int, launch: KernelLaunch, beside: bool) -> Join:
        """All its programs, in order, on the cores that become free."""
        together = 1
        if not launch.multiplies:
            fit = _CORE_THREADS // (_WARP_THREADS * launch.warps)
            together = max(1, min(_MOST_PROGRAMS, fit))
        # Round the cores first: one program on each before any has two.
        free = [core for _ in range(together) for core in range(self._hw.cores)]
        # Cores are taken from the end: the first ones first, but by kernels of streams beside the
        # rank's own the last ones, which its large kernels leave free.
        if not beside:
            free.reverse()
        waiting = launch.programs[::-1]
        done = Join(len(launch.programs) + 1)

        def next_program() -> None:
            while waiting and free:
                core, events = free.pop(), waiting.pop()
                program = self._calendar.start(self._program(rank, core, launch, events))
                program.then(partial(ended, core))

        def ended(core: int) -> None:
            free.append(core)
            done.part_done()
            self._calendar.at(self._calendar.now, next_program)

        next_program()
        done.part_done()
        return done

    def _host_op(self, rank: int, op: HostOp) -> Process:
        """A kernel of all cores: bytes once each, tiles in waves."""
        hardware, cores = self._hw, self._hw.cores
        start = self._calendar.now
        parts = Join(1)
        latency = hardware.hbm_latency_us if op.reads else 0.0
        slower = hardware.link_sustained / hardware.collective_sustained if op.collective else 1.0
        for owner, nbytes in op.reads.items():
            self._load(rank, owner, False, round(nbytes * slower), cores, parts)
            latency = max(latency, self._load_latency(rank, owner))
        for owner, nbytes in op.writes.items():
            self._store(rank, owner, nbytes, cores, parts)
        parts.part_done()
        yield parts
        arithmetic = 0.0
        if op.matmul is not None:
            arithmetic = library_matmul_us(hardware, *op.matmul, op.dtype)
        yield max(self._calendar.now, start + arithmetic) + latency

    # A program on a core

    def _program(
        self, rank: int, core: int, launch: KernelLaunch, events: list[ProgramEvent]
    ) -> Process:
        calendar, hardware = self._calendar, self._hw
        per_core = hardware.core_bandwidth / 1e6
        step_us = hardware.ahead_us / max(launch.stages - 1, 1)
        stored, acknowledged = Join(0), [0.0]  # the last store; when all have been
        loaded: dict[int, Join] = {}  # by the number of a `Work` that stores wait for
        for number, event in enumerate(events):
            start, peer = calendar.now, -1
            if isinstance(event, Store) and event.beside:
                continue  # with the one before
            if isinstance(event, Work) and event.stored and not event.turns:
                loaded[number] = calendar.start(self._load_alone(rank, event))
                continue
            if isinstance(event, Work):
                moved = Join(1)
                latency = self._loads(rank, event, moved)
                moved.part_done()
                yield moved
                end = calendar.now + latency
                if event.turns:
                    # Dots run behind the loads: the first waits for its operands, and after the
                    # last operands have come one is left.
                    dots = arithmetic_us(hardware, event)
                    nbytes = sum(size for _, size in event.loads.values())
                    first = start + latency + nbytes / event.turns / per_core
                    last = max(end, start + latency + event.steps * step_us)
                    end = max(first + dots, last + dots / event.turns)
                yield end
                self._release(rank, event.loads)
                kind = "arithmetic" if event.turns else "moving"
            elif isinstance(event, Store):
                if event.loaded in loaded:
                    yield loaded[event.loaded]
                # One store is under way while the next one is made.
                yield stored
                stored = Join(1)
                for part in _parts_of(event, islice(events, number + 1, None)):
                    yield calendar.now + part.nbytes / per_core / self._plainly
                    there = Join(1)
                    self._store(rank, part.owner, part.nbytes, 1, there)
                    for address, version in part.flags:
                        flag = Flag(address, version, part.owner)
                        there.then(partial(self._deliver, rank, flag))
                    stored.left += 1
                    there.then(partial(self._acknowledge, rank, part.owner, acknowledged))
                    there.then(stored.part_done)
                    there.part_done()
                stored.part_done()
                kind = "moving"
            elif isinstance(event, Flag):
                stored.then(partial(self._deliver, rank, event))
                continue
            elif isinstance(event, Wait):
                yield from self._arrivals(event)
                after = hardware.look_us if event.flagged else hardware.wait_us
                yield calendar.now + hardware.l2_latency_us + after
                kind, peer = "waiting", self._last_to_come(event)
            else:
                relaxed = isinstance(event, Signal) and not event.release
                if not relaxed:
                    yield stored
                    yield max(calendar.now, acknowledged[0])
                kind = "waiting"
                if isinstance(event, Update):
                    before = self._arrival(event.address, event.version - 1)
                    before.then(partial(self._update, rank, event, calendar.now))
                    if number + 1 < len(events):
                        yield self._arrival(event.address, event.version)
                else:
                    self._deliver(rank, event)
            if calendar.now > start:
                self._spans.append(
                    TimeSpan(rank, core, launch.kernel, kind, start, calendar.now, peer)
                )
        yield stored

    def _acknowledge(self, rank: int, owner: int, latest: list[float]) -> None:
        """A store has left: when it will have been acknowledged, if that is later than `latest`."""
        latest[0] = max(latest[0], self._calendar.now + self._load_latency(rank, owner))

    # Memory

    def _load_alone(self, rank: int, work: Work) -> Process:
        """Loads that the program does not wait for."""
        moved = Join(1)
        latency = self._loads(rank, work, moved)
        moved.part_done()
        yield moved
        yield self._calendar.now + latency
        self._release(rank, work.loads)

    def _load_latency(self, rank: int, owner: int) -> float:
        remote = 2 * self._hw.link_latency_us if owner != rank else 0.0
        if remote and self._hw.link_bandwidth == math.inf:
            return 0.0
        return self._hw.hbm_latency_us + remote

    def _loads(self, rank: int, work: Work, join: Join) -> float:
        """Start the flows of what a program loads, as parts of `join`; the longest latency."""
        hardware, chip = self._hw, self._chips[rank]
        latency, total = 0.0, 0
        sizes: dict[tuple[int, bool, int], int] = {}
        for (position, owner), (address, size) in work.loads.items():
            hit = owner == rank and self._cached(chip, address, size)
            wait = hardware.l2_latency_us if hit else self._load_latency(rank, owner)
            latency, total = max(latency, wait), total + size
            flow = owner, hit, position if work.turns else 0
            sizes[flow] = sizes.get(flow, 0) + size
        for (owner, hit, _), size in sizes.items():
            # Loads that no dots hide are together at most as fast as their program moves.
            weight = 1.0 if work.turns else self._plainly * size / total
            self._load(rank, owner, hit, size, weight, join)
        return latency

    def _load(
        self, rank: int, owner: int, hit: bool, nbytes: int, weight: float, join: Join
    ) -> None:
        """Start the flows of a load as parts of `join`; `hit`: it comes from the own L2."""
        if owner != rank:
            self._to_peer(owner, rank, owner, nbytes, weight, join)
            return
        self._flow(self._chips[rank].l2, nbytes, weight, join)
        if not hit:
            self._flow(self._chips[rank].hbm, nbytes, weight, join)

    def _store(self, rank: int, owner: int, nbytes: int, weight: float, join: Join) -> None:
        if owner != rank:
            self._to_peer(rank, owner, owner, nbytes, weight, join)
        else:
            self._flow(self._chips[rank].hbm, nbytes, weight, join)

    def _to_peer(
        self, source: int, to: int, owner: int, nbytes: int, weight: float, join: Join
    ) -> None:
        """Bytes from `source` to `to`, of memory of `owner`."""
        if self._hw.link_bandwidth == math.inf:
            return
        self._flow(self._chips[owner].hbm, nbytes, weight, join)
        if self._hw.topology == "switch":
            self._flow(self._chips[source].links[-1], nbytes, weight, join)
            self._flow(self._chips[to].links[-2], nbytes, weight, join)
        else:
            self._flow(self._chips[source].links[to], nbytes, weight, join)

    @staticmethod
    def _flow(resource: Resource, nbytes: int, weight: float, join: Join) -> None:
        if nbytes:
            join.left += 1
            resource.add(nbytes, weight, join)

    def _cached(self, chip: _Chip, address: int, nbytes: int) -> bool:
        """Whether the region is in L2; it stays there until `_release`."""
        key = address, nbytes
        if key in chip.live:
            # Programs that walk through a region together share each part of it as it comes.
            chip.live[key] += 1
            return True
        chip.live[key] = 1
        if key not in chip.cached:
            return False
        del chip.cached[key]
        chip.cached_bytes -= nbytes
        return True

    def _release(self, rank: int, loads: dict[tuple[int, int], list[int]]) -> None:
        """A program has loaded these regions; those no longer loaded grow old."""
        chip = self._chips[rank]
        for (_, owner), (address, nbytes) in loads.items():
            key = address, nbytes
            if owner != rank or key not in chip.live:
                continue
            chip.live[key] -= 1
            if not chip.live[key]:
                del chip.live[key]
                chip.cached[key] = None
                chip.cached_bytes += nbytes
        while chip.cached_bytes > self._hw.l2_bytes:
            (_, gone), _ = chip.cached.popitem(last=False)
            chip.cached_bytes -= gone

    # Signals

    def _deliver(self, rank: int, signal: Signal | Flag) -> None:
        self._arrives(rank, signal, self._calendar.now + self._way_us(rank, signal.owner))

    def _update(self, rank: int, update: Update, issued: float) -> None:
        """The word's last change has come. Those that wait for it are behind it in the cache."""
        way_us = self._way_us(rank, update.owner)
        self._arrives(rank, update, max(issued + way_us, self._calendar.now + _SAME_WORD_US))

    def _way_us(self, rank: int, owner: int) -> float:
        return self._hw.link_latency_us if owner != rank else self._hw.l2_latency_us

    def _arrives(self, rank: int, change: Signal | Flag | Update, at: float) -> None:
        key = (change.address, change.version)

        def arrive() -> None:
            self._arrived[key], self._senders[key] = at, rank
            if key in self._awaited:
                self._awaited.pop(key).part_done()

        self._calendar.at(at, arrive)

    def _arrivals(self, wait: Wait) -> Process:
        for address, version in wait.versions.items():
            yield self._arrival(address, version)

    def _last_to_come(self, wait: Wait) -> int:
        """The rank whose signal was the last of those that were waited for; -1: none was."""
        came = [key for key in wait.versions.items() if key in self._arrived]
        return self._senders[max(came, key=self._arrived.__getitem__)] if came else -1

    def _arrival(self, address: int, version: int) -> Join:
        """Done once the word's `version`-th change is there; at once if it was before the trace."""
        key = (address, version)
        if key in self._arrived or key not in self._to_come:
            return Join(0)
        return self._awaited.setdefault(key, Join(1))


def arithmetic_us(hardware: Hardware, work: Work) -> float:
    """Of one core: its dots, and what they wait for, beside which its matrix units stand idle."""
    per_us = hardware.core_results_per_us()
    other = max(work.results, work.specials / hardware.specials) / per_us
    return work.flops / hardware.core_flops_per_us(work.dtype) + other


def library_matmul_us(hardware: Hardware, Ms: Sequence[int], N: int, K: int, dtype: str) -> float:
    """Products (M, K) @ (K, N) in a launch of a library: the best of its tiles, in whole waves."""
    flops_per_us = hardware.core_flops_per_us(dtype)
    itemsize = {"float64": 8, "float32": 4, "tf32": 4, "float8": 1}.get(dtype, 2)
    best = float("inf")
    for rows, columns in _LIBRARY_TILES:
        tiles = sum(-(-M // rows) for M in Ms) * -(-N // columns)
        dots = 2 * rows * columns * K / flops_per_us
        loads = (rows + columns) * K * itemsize / (hardware.core_bandwidth / 1e6)
        best = min(best, -(-tiles // hardware.cores) * max(dots, loads))
    return best


def _parts_of(store: Store, following: Iterable[ProgramEvent]) -> Iterator[Store]:
    """It, and the parts of the same instruction for other owners, which follow it."""
    yield store
    for event in following:
        if not isinstance(event, Store) or not event.beside:
            return
        yield event


def _changes(trace: Trace) -> list[tuple[int, int]]:
    """(address, version) of every change of a word in the trace."""
    found = []
    for rank in range(len(trace.streams)):
        for event in trace.events(rank):
            if isinstance(event, KernelLaunch):
                for events in event.programs:
                    found += [
                        (e.address, e.version)
                        for e in events
                        if isinstance(e, (Signal, Flag, Update))
                    ]
                    found += [each for e in events if isinstance(e, Store) for each in e.flags]
            elif isinstance(event, Signal):
                found.append((event.address, event.version))
    return found


def play(trace: Trace, hardware: Hardware) -> Played:
    """The trace on that hardware."""
    return Clock(trace, hardware).play()
