"""Waits inside of a process group: bounded as all others are, with an error that names the absent.

A process group waits for its own time-out, half an hour, and names nobody. A rank whose call lasts
says so once a second, through the store of the group, for which no peer is needed:

    key      the rank
    value    the call, and a number that grows    it is in the call, and runs
             the call, gave up on 2,5             it has waited for these in vain

Who gives up looks twice at what the others say. Absent are those who say nothing new; to a host
that does not reach the store any more, as its link is down, all ranks elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from weft import settings
from weft.errors import PeerTimeout, WeftError

if TYPE_CHECKING:
    from weft.collectives.ranks.group import Group

_BEAT_S, _YIELD_S = 1.0, 2e-3
_STORE_S = 5.0  # until a store of another host counts as out of reach
_GAVE_UP = "gave up on "


def store_of(group: Group) -> Any:
    """The store of its process group, through which ranks meet before they know each other."""
    return dist.distributed_c10d._world.pg_map.get(group.pg, (None, None))[1]


class _OutOfReachError(Exception):
    """Not an error of a caller: the store does not answer."""


class Presence:
    """That this rank is in a call, told to the others.

    Args:
        call: a name that no other call of the group has.
    """

    def __init__(self, group: Group, call: str) -> None:
        self._group, self._store, self._told = group, store_of(group), 0
        self._call = f"{call}: "

    @staticmethod
    def now(group: Group) -> Presence:
        """In the call of the group that is under way."""
        calls = group.calls
        return Presence(group, f"{calls.group} {calls.position} {calls.last}")

    def tell(self) -> None:
        """This rank is in the call still."""
        self._told += 1
        self._say(str(self._told))

    def absent(self) -> list[int]:
        """The ranks that are not in the call, or do not run. Takes two seconds and more."""
        try:
            return self._absent()
        except _OutOfReachError:
            here = next(ranks for ranks in self._group.hosts if self._group.rank in ranks)
            return [peer for peer in self._group.peers() if peer not in here]

    def _absent(self) -> list[int]:
        self.tell()
        before = self._said()
        for _ in range(2):  # others may come to the end of their bound meanwhile, and look as well
            time.sleep(1.2 * _BEAT_S)
            self.tell()
        now = self._said()
        gave_up = {peer for peer, said in now.items() if said.startswith(_GAVE_UP)}
        absent = {peer for peer in set(now) - gave_up if now[peer] == before[peer]}
        for peer in gave_up:
            absent |= {int(each) for each in now[peer].removeprefix(_GAVE_UP).split(",")}
        absent = absent - {self._group.rank} or gave_up
        if absent:
            self.give_up(sorted(absent))
        return sorted(absent)

    def give_up(self, absent: Sequence[int]) -> None:
        """This rank has waited for these in vain."""
        with contextlib.suppress(_OutOfReachError):
            self._say(_GAVE_UP + ",".join(map(str, absent)))

    def _say(self, what: str) -> None:
        key = f"weft in a call {self._group.rank}"
        self._answered(lambda: self._store.set(key, self._call + what))

    def _said(self) -> dict[int, str]:
        """What the peers say of this call."""
        said: dict[int, str] = {}
        self._answered(lambda: said.update(self._heard()))
        return said

    def _heard(self) -> dict[int, str]:
        said = {}
        for peer in self._group.peers():
            key = f"weft in a call {peer}"
            value = self._store.get(key).decode() if self._store.check([key]) else ""
            said[peer] = value.removeprefix(self._call) if value.startswith(self._call) else ""
        return said

    def _answered(self, ask: Callable[[], object]) -> None:
        """Ask the store, which over a link that is down would never answer.

        Raises:
            _OutOfReachError: it has not.
        """
        if not self._group.hosts:
            ask()
            return
        answers: list[bool] = []

        def wait() -> None:
            with contextlib.suppress(RuntimeError):  # of a connection that was reset
                ask()
                answers.append(True)

        asking = threading.Thread(target=wait, daemon=True)
        asking.start()
        asking.join(_STORE_S)
        if not answers:
            raise _OutOfReachError

    def failed(self, op: str, number: int, waited_s: float, why: object) -> WeftError:
        """The error of a call that did not come to its end."""
        processes = self._group.processes
        dead = [peer for peer, process in enumerate(processes) if not process.alive()]
        if absent := dead or self.absent():
            group, history = self._group, self._group.calls.history()
            known = op, number, waited_s, history, absent, group.ranks
            return PeerTimeout(group.rank, absent[0], *known)
        return WeftError(
            f"{op}: not done after {waited_s:.3g} s ({why}), and all ranks are at work on it. "
            f"Raise WEFT_TIMEOUT_S if it takes longer"
        )


def finish(group: Group, op: str, work: Any) -> None:
    """Wait on the host for `work`, which a process group does for all of its ranks.

    Raises:
        PeerTimeout: it did not end in time, or a rank has died.
        WeftError: the process group has failed, though all ranks are there.
    """
    bound_s, start, presence = settings.timeout_s(), time.monotonic(), None
    number = group.calls.position
    # A core yielded to Gloo's threads comes back sooner than from a sleep: 0.4 ms and not 0.6 for a
    # small sum of two ranks on two cores.
    while not work.is_completed() and time.monotonic() - start < _YIELD_S:
        os.sched_yield()
    while True:
        left_s = start + bound_s - time.monotonic()
        try:
            work.wait(timedelta(seconds=min(_BEAT_S, max(left_s, 0.001))))
            break
        except RuntimeError as error:
            waited_s = time.monotonic() - start
            if presence is None:
                presence = Presence.now(group)
            running = all(process.alive() for process in group.processes)
            if work.is_completed() or waited_s > bound_s or not running:
                raise presence.failed(op, number, waited_s, error) from error
            with contextlib.suppress(_OutOfReachError):
                presence.tell()
