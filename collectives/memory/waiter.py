"""Signals between CPU ranks, words in shared memory that they poll, and what a wait can end in."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from weft import settings
from weft.collectives.ranks import flight, pad, waits
from weft.errors import MismatchError, PeerTimeout, WeftError

if TYPE_CHECKING:
    from weft.collectives.memory.symmetric import SymmetricBuffer


class Waiter:
    """Signals between CPU ranks: posts to peers' pads, bounded waits on this rank's own.

    A post is a release and a wait an acquire. On x86 every store and load already is; elsewhere
    a fence makes it one.

    Attributes:
        call: hash of the call that waits, which peers that make another are told; 0: they cannot
            be told on this memory.
    """

    SPIN_S = 20e-6  # after that, yield the core to a peer that may have none
    YIELD_S = 2e-3
    # A core yielded to another program comes back after milliseconds, a sleeper gets one when it
    # wakes. So once a yield has taken LOST_S, waits sleep instead for SLEEPY_S.
    LOST_S, SLEEPY_S = 200e-6, 0.1

    def __init__(self, buffer: SymmetricBuffer, timeout: float | None = None) -> None:
        self.rank, self.group = buffer.rank, buffer.group
        self.words = [buffer.words(r) for r in range(buffer.world_size)]
        self.own = self.words[buffer.rank]
        self.timeout, self.call = timeout, 0
        # With more ranks than cores, a spinning rank takes time from the one it waits for.
        crowded = buffer.world_size > (os.cpu_count() or 1)
        self.spin_s = 0.0 if crowded else self.SPIN_S
        self._sleepy_until = 0.0

    def post(self, peer: int, value: int, word: int = 0) -> None:
        """Tell `peer` that this rank has reached `value`."""
        fence()
        self.words[peer][pad.HOST_SLOTS + pad.LINE * self.rank + word] = value

    def wait(self, peer: int, value: int, op: str, word: int = 0) -> None:
        """Wait until `peer` has reached `value`.

        Raises:
            PeerTimeout: it did not come in time, its process ended, or another rank gave up on it.
            MismatchError: it waits for this rank in another call, and cannot be answered here.
        """
        slot = pad.HOST_SLOTS + pad.LINE * peer + word
        if self.own[slot] < value:
            try:
                self._wait(slot, peer, value, op)
            except WeftError:
                raise
            except BaseException:  # of a signal's handler
                self.break_off()
                raise
        fence()

    def meet(self, peers: Sequence[int], value: int, op: str) -> None:
        """`post` to each of `peers`, then `wait` for each."""
        fence()
        own, words, mine = self.own, self.words, pad.HOST_SLOTS + pad.LINE * self.rank
        for peer in peers:
            words[peer][mine] = value
        for peer in peers:
            if own[pad.HOST_SLOTS + pad.LINE * peer] < value:
                self.wait(peer, value, op)
        fence()

    def _wait(self, slot: int, peer: int, value: int, op: str) -> None:
        global _wait_seconds
        own, clock = self.own, time.perf_counter
        start = clock()
        timeout = settings.timeout_s() if self.timeout is None else self.timeout
        next_look, lasting = start + waits.LOOK_NS / 1e9, None
        try:
            while own[slot] < value:
                now = clock()
                waited = now - start
                if waited < self.spin_s:
                    continue
                if waited < self.YIELD_S and now > self._sleepy_until:
                    os.sched_yield()
                    if (back := clock()) - now > self.LOST_S:
                        self._sleepy_until = back + self.SLEEPY_S
                    continue
                time.sleep(50e-6)
                if now < next_look:
                    continue
                next_look = now + waits.LOOK_NS / 1e9
                self.check(op)
                if waited > timeout or not self.group.processes[peer].alive():
                    self.give_up(peer, value, op, waited)
                if self.group.virtual is None:
                    looked = time.monotonic_ns()
                    if lasting is None:
                        lasting = self._lasting(peer, looked - int(waited * 1e9))
                    if own[slot] < value and (stuck := lasting.stuck(looked)):
                        self._differs(stuck)
        finally:
            if lasting is not None:
                lasting.end()
        _wait_seconds += clock() - start

    def _lasting(self, peer: int, since: int) -> waits.LongWait:
        calls, pid = self.group.calls, self.group.processes[peer].pid
        return waits.LongWait(pid, calls.group, self.call or calls.last, since)

    def _differs(self, stuck: Mapping[int, waits.Waiting]) -> None:
        """Tell peers that wait for each other, in other calls, of this rank's."""
        told = self.call or self.group.calls.last
        if not self.call and waits.closes(stuck):
            self.break_off()
        waits.answer({pid: each.calls for pid, each in stuck.items()}, told)
        if not self.call and waits.closes(stuck):
            raise MismatchError(self.group.differ(stuck))

    def give_up(self, peer: int, value: int, op: str, waited: float) -> None:
        """Tell every rank that the group is broken, and raise."""
        self._tell(pad.TIMED_OUT, self.rank, peer, value)
        known = op, value, waited, self.group.calls.history()
        raise PeerTimeout(self.rank, peer, *known, ranks=self.group.ranks)

    def break_off(self) -> None:
        """Tell every rank that this one leaves a call which it has begun.

        A peer that comes to it later would take what lies there for the data of its own call.
        """
        self._tell(pad.FAILED, self.rank, self.rank, 0)

    def _tell(self, *status: int) -> None:
        for words in self.words:
            words[pad.STATUS] = pad.status_word(*status)

    def check(self, op: str) -> None:
        """Raise if a wait on this memory has timed out, here or on another rank."""
        if status := self.own[pad.STATUS]:
            raise told_by(status, self.rank, op, self.group.calls, self.group.ranks)


def told_by(
    status: int,
    rank: int,
    op: str,
    calls: flight.Calls | None = None,
    ranks: Sequence[int] = (),
) -> WeftError:
    """The error that STATUS in the pad of `rank` tells of; `calls`, `ranks`: of its group."""
    code, waiter, peer, generation = pad.status_in(status)
    if calls and calls.parting:
        return MismatchError(f"{op}: {calls.parting}{flight.UNUSABLE}")
    if code == pad.FAILED:
        return MismatchError(
            f"{op}: rank {peer} has failed or was interrupted amid a call, its own error tells "
            f"why{flight.UNUSABLE}"
        )
    if code == pad.OVERLAPPED:
        return WeftError(
            f"{op}: two calls on the same memory ran on rank {waiter} at the same time (call "
            f"{generation}), as a CUDA graph that is replayed in one stream does beside calls or "
            f"replays in another. Have one stream wait for the other (torch.cuda.Stream."
            f"wait_stream){flight.UNUSABLE}"
        )
    # Our kernels write the same words, so this rank may itself be the waiter.
    blamed = peer if peer != rank else waiter
    waited_s = settings.timeout_s() if (code, waiter) == (pad.TIMED_OUT, rank) else 0.0
    history = calls.history() if calls else ""
    return PeerTimeout(rank, blamed, op, generation, waited_s, history, ranks=ranks)


_wait_seconds = 0.0


def wait_seconds() -> float:
    """Total seconds that this process has spent waiting for peers in calls on the CPU."""
    return _wait_seconds


if os.uname().machine in ("x86_64", "i686"):

    def fence() -> None:
        """Nothing: stores become visible in order on this machine, and loads happen in order."""

else:
    import threading

    _fence_lock = threading.Lock()

    def fence() -> None:
        """Order the memory accesses before this against those after it.

        What is before the first release cannot pass it, what is after the second acquire cannot
        pass that, and a release and a later acquire keep their order.
        """
        with _fence_lock:
            pass
        with _fence_lock:
            pass
