"""What is told of a schedule while it runs, by `weft.sim.run.world`.

Detector (`sim.check.races`)    clocks and accesses: races, and bounds of buffers
Tape (`sim.check.recording`)    operations, for other schedules to be played from
Tracer (`sim.time.trace`)       what takes time, to be played on a chip
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy.typing as npt

if TYPE_CHECKING:
    from weft.sim.check.regions import Region
    from weft.sim.schedule.scheduler import Strand

Array = npt.NDArray[Any]


class Atomic(NamedTuple):
    """An atomic that has been done.

    Attributes:
        addresses: of its elements of `itemsize` bytes.
        word: what the first is called in every schedule, None if it is not shared.
        effect: what it did to one integer, None if that cannot be told.
        seen: the value it has found in the first.
        versions: how often each of the words had changed after it.
    """

    addresses: Array
    itemsize: int
    sem: str
    scope: str
    changed: bool
    word: Hashable
    effect: tuple[Any, ...] | None
    seen: int
    versions: list[int]


class HostSignal(NamedTuple):
    """`value` in a word that a host posts or awaits, which has changed `version` times."""

    address: int
    word: Hashable
    value: int
    version: int


class Flagged(NamedTuple):
    """Words of 8 bytes with the flag of `generation`, that were stored or found.

    Attributes:
        blocks: the addresses where the stores began that left them, and how often each had changed.
        names: what these are called in every schedule.
        site: where in the source they are loaded.
    """

    addresses: Array
    generation: int
    blocks: dict[int, int]
    names: list[Hashable]
    site: str = ""


class Vain(NamedTuple):
    """A load at `site` that found the flag `seen` where `wanted` should be."""

    site: str
    wanted: int
    seen: int


class HandOver(Protocol):
    """A meeting or a message: who takes it is ordered after those who gave to it."""

    clock: Array


class Observer:
    """Is told what strands do, in the order of the schedule; looks away from what it need not know.

    A word is named by (the segment, its offset), the same in every schedule: None if not shared.
    """

    # Set-up: a clock for `lane` of `rank`; a thread of control; memory of `rank` that others reach.
    def new_lane(self, rank: int, lane: int) -> None: ...
    def thread(self, strand: Strand, key: Hashable) -> None: ...
    def memory(self, start: int, end: int, rank: int, regions: Sequence[Region]) -> None: ...

    # Plain accesses: any; stores that a poll may look at; ("look" or "poke", word, value) of one.
    def access(
        self, strand: Strand, addresses: Array, itemsize: int, kind: str, scope: str = "sys"
    ) -> None: ...
    def stored(self, strand: Strand, word: Hashable, value: int | None, polled: bool) -> None: ...
    def plain(self, strand: Strand, *op: Any) -> None: ...
    def copied(self, strand: Strand, address: int, nbytes: int) -> None: ...

    # Signals. `flush` comes before one: what was accessed so far is not what it orders.
    def flush(self, strand: Strand) -> None: ...
    def atomic(self, strand: Strand, done: Atomic) -> None: ...
    def changed(self, address: int, version: int) -> None: ...
    def expect(self, strand: Strand, words: Sequence[Hashable], value: int) -> None: ...
    def post(self, strand: Strand, signal: HostSignal) -> None: ...
    def look(self, strand: Strand, signal: HostSignal, found: bool) -> None: ...
    # Words that carry their flag, after they were stored, and once all were found (`flagged`).
    def flagged(self, strand: Strand, words: Flagged) -> None: ...
    def taken(self, strand: Strand, words: Flagged) -> None: ...
    def looks_again(self, strand: Strand, found: Vain) -> None: ...  # what it took is of no use
    def threads_meet(self, strand: Strand) -> None: ...

    # Launches by a host: programs have clocks `slots`, in turn (`reuse`) or as strands (`start`).
    def begin_launch(self, host: Strand, slots: Sequence[int]) -> None: ...
    def reuse(self, host: Strand, slot: int, host_slot: int) -> None: ...
    def program(self, host: Strand) -> None: ...
    def start(self, host: Strand, keys: Sequence[Hashable], slots: Sequence[int]) -> None: ...
    def end_launch(self, host: Strand, slots: Sequence[int]) -> None: ...

    # Meetings and messages: `op` is "arrive" or "send", then "attend" or "receive".
    def give(self, strand: Strand, op: str, key: Hashable, held: HandOver) -> None: ...
    def await_others(self, strand: Strand, op: str, key: Hashable, *size: int) -> None: ...
    def take_over(self, strand: Strand, held: HandOver) -> None: ...

    # No other schedule can be told from this one, and why.
    def unplayable(self, why: str) -> None: ...
