"""Ranks that wait for each other, each in another call: found while they wait, for certain.

Different calls use different memory, so that no signal comes which could be compared:

    rank 0   all_reduce   waits for rank 1  -->  rank 1   all_gather   waits for rank 0  --> rank 0

A process that has waited for LOOK_NS says so in its ring (see `flight`), and follows what the one
that it waits for says, and so on. Who comes to a circle can wait no longer. It is no guess:

1. A process signals nothing while it waits, as all its calls come from one thread. Where they do
   not, nothing is concluded.
2. Each says when it has last looked for the signal in vain. If the other one waited already then,
   and MARGIN longer than a store takes to be seen, the signal is still out when that one goes on.
3. At the end the numbers of all waits are read once more: all of them went on at the same time.

What the ring of a process holds in its first entry, beside NUMBER:

    WAIT        number of the wait that goes on; 0: none
    PEER        pid of the process that is waited for
    GROUP       as in the entries
    CALL        likewise
    SINCE       ns of the machine's clock when the wait began
    CONFIRMED   likewise, when the signal had not come
    THREADS     1 once threads other than the main one have made calls

A rank in a circle answers (see `Answering`): it takes part in what its peers wait in, and tells
them what it calls itself, for which they answer in turn. So all get an error that names both calls,
and the next one finds all in step.
"""

from __future__ import annotations

import struct
import threading
import weakref
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from weft.collectives.ranks import flight

LOOK_NS = 50_000_000  # long beside what a look costs (30 us), short for who has made a mistake
MARGIN_NS = 10_000_000
STAYS = 1 << 62  # beside the hash of a call: who tells it is in that call and may need an answer
_BODY = struct.Struct("5q")
WAIT, PEER, GROUP, CALL, SINCE, CONFIRMED = range(1, flight.THREADS)


class Waiting(NamedTuple):
    """What a process waits for.

    Attributes:
        calls: NUMBER in the ring.
        number: of the wait, among those of its process.
        peer: pid of the process that it waits for.
        group, call: hashes, as in `flight`.
        since, confirmed: when it began, and when the signal had not come yet; ns.
    """

    calls: int
    number: int
    peer: int
    group: int
    call: int
    since: int
    confirmed: int


class Alive(Protocol):
    """A process, as `weft.collectives.ranks.group.Process`."""

    def alive(self) -> bool: ...


class WaitedFor(Alive, Protocol):
    """A process that has a number."""

    @property
    def pid(self) -> int: ...


class Answering(Protocol):
    """Memory that calls meet on."""

    def lacks(self, pid: int) -> bool:
        """Whether the process `pid` has begun a call here that this one has not."""

    def answer(self, call: int, number: int) -> None:
        """Take part in the next call here by telling all ranks that this one makes `call`, and the
        NUMBER in its ring."""


_known: dict[int, tuple[WaitedFor, flight.Reader]] = {}  # by pid
_memory: weakref.WeakSet[Answering] = weakref.WeakSet()


def know(process: WaitedFor, reader: flight.Reader) -> None:
    """`reader` reads the ring of `process`."""
    _known[process.pid] = process, reader


def meet_on(memory: Answering) -> None:
    """Calls meet on `memory`."""
    _memory.add(memory)


class LongWait:
    """One wait of this process that lasts. Made after it has lasted LOOK_NS.

    Attributes:
        peer: pid of the process that is waited for.
    """

    _last = 0

    def __init__(self, peer: int, group: int, call: int, since: int) -> None:
        """
        Args:
            peer: pid of the process that is waited for.
            since: when the wait began, ns.
        """
        LongWait._last += 1
        own = flight.recorder()
        self._words = own.words
        self._words[WAIT] = 0
        _BODY.pack_into(own.ring, 8 * PEER, peer, group, call, since, 0)
        self._words[WAIT] = LongWait._last
        self.peer = peer

    def stuck(self, looked: int) -> dict[int, Waiting]:
        """By pid, who waits for whom, this process first and the last one for one of the others;
        empty if somebody may go on. The signal had not come at `looked` (ns)."""
        self._words[CONFIRMED] = looked
        if threading.current_thread() is not threading.main_thread():
            self._words[flight.THREADS] = 1
        return _circle(flight.recorder().pid)

    def end(self) -> None:
        """The wait is over."""
        self._words[WAIT] = 0


def _circle(pid: int) -> dict[int, Waiting]:
    path: dict[int, Waiting] = {}
    before: Waiting | None = None
    while True:
        shown = _shown_by(pid)
        if shown is None or (before and before.confirmed < shown.since + MARGIN_NS):
            return {}
        if pid in path:
            break
        before = path[pid] = shown
        pid = shown.peer
    for each, shown in path.items():
        again = _shown_by(each)
        if again is None or again.number != shown.number or not _known[each][0].alive():
            return {}
    return path


def _shown_by(pid: int) -> Waiting | None:
    """What a process waits for now; None where nothing can be concluded from it."""
    if pid not in _known:
        return None
    words = _known[pid][1].head()
    if not words[WAIT] or words[flight.THREADS]:
        return None
    again = _known[pid][1].head()
    shown = Waiting(*again[: flight.THREADS])
    return shown if shown.number == words[WAIT] and not again[flight.THREADS] else None


def answer(calls: Mapping[int, int], call: int) -> None:
    """Take part in all that processes have begun without this one, which makes `call`.

    Args:
        calls: by pid, the NUMBER in its ring: one that has gone on since needs no answer.
    """
    lacking = {
        memory: None
        for pid, number in calls.items()
        for memory in [each for each in list(_memory) if each.lacks(pid)]
        if _known[pid][1].head()[0] == number
    }
    own = flight.recorder().words[0]
    for memory in lacking:  # from the first on they may go on
        memory.answer(call | STAYS, own)


def closes(stuck: Mapping[int, Waiting]) -> bool:
    """Whether the process that is first in `stuck` is in the circle, not only before it."""
    return bool(stuck) and list(stuck.values())[-1].peer == next(iter(stuck))
