"""One thread of control at a time: strands pass a baton at signal operations.

A strand is a rank's host code, or one program of a kernel that it has launched. Before each
operation that another strand could see (`point`), the policy picks which strand goes on, so that a
seed fixes the interleaving. A strand that polls in vain sleeps until a word that it polled changes.
If all sleep, nothing will ever wake them: a deadlock, found at once.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.collectives.ranks.flight import ranks_told
from weft.sim.check.recording import Track
from weft.sim.check.sites import Sites
from weft.sim.errors import DeadlockError
from weft.sim.observer import Vain
from weft.sim.schedule.schedules import Policy, Visiting
from weft.sim.time.trace import Lane

# Vain polls in a row after which a strand that cannot say what it waits for is taken to spin.
_VAIN_POLLS = 64


class Stop(BaseException):
    """Unwinds a strand after another one has failed. Not an Exception: kernels wrap those."""


def _held_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass(eq=False)
class Strand:
    """A thread of control.

    Attributes:
        rank, slot: the rank, and the number of this strand's clock.
        what: "host", or the kernel and its program.
        site: where it last was, as `Sites` numbers it.
        confined: runs a kernel that can only mean memory of its arguments or symmetric memory.
        waits_for: tells what it waits for, while it sleeps.
        blocked: whether it still sleeps.
        vain: polls in a row that have found no word changed.
        lane: the events of the program that it runs, where virtual time is kept.
        track: what it has done, where the schedule is recorded.
        looks_for: address -> value, of the last wait that it began.
        timed: whether what it does takes virtual time.
        to_come: programs of its launch that run in turn after this one.
        flagged: generation of the words that it loads or stores now (`flagged`), or 0.
        missing: the first word without its flag that it has seen since it last slept, and how.
        name: the same in every schedule.
    """

    rank: int
    slot: int
    what: str = "host"
    site: int = -1
    confined: bool = False
    waits_for: Callable[[], str] | None = None
    blocked: Callable[[], bool] | None = None
    words: dict[Hashable, int] = field(default_factory=dict)  # polled in vain -> their version then
    wanted: dict[Hashable, int | None] = field(default_factory=dict)  # likewise -> value, if known
    vain: int = 0
    seen_before: int = 0  # hash of all that it has seen but the last
    random_state: torch.Tensor | None = None
    lane: Lane | None = None
    looks_for: dict[int, int] = field(default_factory=dict)
    timed: bool = True
    to_come: int = 0
    flagged: int = 0
    missing: tuple[int, Vain] | None = None
    track: Track = field(default_factory=lambda: Track(None))
    name: tuple[int, str] = field(init=False)
    baton: threading.Lock = field(default_factory=_held_lock)

    def __post_init__(self) -> None:
        self.name = self.rank, self.what

    def wake(self) -> None:
        """Let this strand go on, if it waits for the baton."""
        with suppress(RuntimeError):  # it does not wait, or another thread was first
            self.baton.release()


class _OfThread(threading.local):
    strand: Strand | None = None


local = _OfThread()


def strand_here() -> Strand:
    """The strand that this thread is."""
    strand = local.strand
    assert strand is not None
    return strand


class Scheduler:
    """Runs strands one at a time in an order that `policy` picks."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.sites = policy, Sites()
        self.live: list[Strand] = []
        self._ranks: set[int] = set()  # that were ever live
        self.versions: dict[Hashable, int] = {}  # address of a signal word -> times it changed
        # Tells what a word is, given its address and the value that is wanted in it.
        self.explain: Callable[[Any, int | None], str] = lambda address, wanted: str(address)
        self.failure: BaseException | None = None
        self.failed_rank: int | None = None  # if its own code raised the failure
        self.finished = threading.Event()
        self.switches = 0
        self.tracing = isinstance(policy, Visiting)
        self._seen: dict[tuple[int, str], int] = {}  # hash of all that a strand has seen
        self._writers: dict[Hashable, tuple[int, str]] = {}  # of each word, the last one
        if isinstance(policy, Visiting):
            policy.state = self._state
        self._threads: list[threading.Thread] = []

    def start(self, strand: Strand, body: Callable[[], None]) -> None:
        """Let `body` run as `strand`, from when it is first picked."""
        self.live.append(strand)
        self._ranks.add(strand.rank)

        def run_strand() -> None:
            __tracebackhide__ = True
            local.strand = strand
            strand.baton.acquire()
            try:
                if self.failure is None:
                    body()
            except Stop:
                pass
            except BaseException as error:
                if self.failure is None:
                    self.failed_rank = strand.rank
                self.fail(error)
            self._leave(strand)

        thread = threading.Thread(target=run_strand, daemon=True, name=f"rank {strand.rank}")
        self._threads.append(thread)
        thread.start()

    def begin(self) -> None:
        """Give the baton to the first strand."""
        self.pick(self.live, None).wake()

    def join(self, timeout: float) -> None:
        """Wait for all threads to end: one that unwinds while Python exits would abort it."""
        deadline = time.monotonic() + timeout
        for thread in list(self._threads):
            thread.join(max(0.0, deadline - time.monotonic()))

    def fail(self, error: BaseException) -> None:
        """Stop everything: `error` is what the simulation found. The first one counts."""
        if self.failure is None:
            self.failure = error
        for strand in list(self.live):
            strand.wake()

    def stop(self, error: BaseException) -> Stop:
        """`fail`, and what to raise in the strand that found it."""
        self.fail(error)
        return Stop()

    def check(self) -> None:
        """Raise if the simulation has failed in the meantime."""
        if self.failure is not None:
            raise Stop()

    def point(self, strand: Strand) -> None:
        """A signal operation is about to happen: the strand that the policy picks goes first."""
        strand.site = self.sites.here()
        self._switch(strand)

    def saw(self, strand: Strand, word: Hashable, value: Hashable, wrote: bool) -> None:
        """`strand` has found `value` in `word`, and may have left another: for `tracing`."""
        if not self.tracing:
            return
        strand.seen_before = self._seen.get(strand.name, 0)
        self._seen[strand.name] = hash((strand.seen_before, word, value))
        if wrote:
            self._writers[word] = strand.name

    def looks_again(self, strand: Strand) -> None:
        """What `strand` saw last makes no difference: it will look once more."""
        if self.tracing:
            self._seen[strand.name] = strand.seen_before

    def _state(self) -> Hashable:
        """What decides how things can go on, if memory is accessed without races."""
        seen = frozenset((s.name, self._seen.get(s.name)) for s in self.live)
        return seen, frozenset(self._writers.items())

    def changed(self, address: Hashable) -> None:
        """The signal word at `address` has a new value."""
        self.versions[address] = self.versions.get(address, 0) + 1

    def progressed(self, strand: Strand) -> None:
        """`strand` has got on, by a store or to the next program: its next polls may be the same
        as its last ones, and are not in vain."""
        strand.missing = None
        if strand.words:
            strand.words.clear()
            strand.vain = 0

    def polled(self, strand: Strand, address: Hashable, wanted: int | None = None) -> None:
        """`strand` has read the word at `address`, and may do so again until it changes."""
        strand.wanted[address] = wanted
        version = self.versions.get(address, 0)
        if strand.words.get(address) == version:
            strand.vain += 1
        else:
            strand.words[address] = version
            strand.vain = 0

    def let_others(self, strand: Strand, what: str) -> None:
        """`strand` has looked in vain for `what` others bring: they go on first, if they can."""
        strand.site = self.sites.here()
        self.polled(strand, what)
        self._switch(strand)

    def sleep_until(
        self, strand: Strand, awake: Callable[[], bool], waits_for: Callable[[], str]
    ) -> None:
        """Let others run until `awake()`."""
        strand.site = self.sites.here()
        strand.blocked, strand.waits_for = (lambda: not awake()), waits_for
        self._switch(strand)
        strand.blocked = strand.waits_for = None

    def sleep_on(
        self, strand: Strand, address: int, version: int, waits_for: Callable[[], str]
    ) -> None:
        """Let others run until the word at `address` has changed more than `version` times."""
        versions = self.versions
        self.sleep_until(strand, lambda: versions.get(address, 0) != version, waits_for)

    def describe(self) -> str:
        """Where every live strand is, one line each."""
        lines = []
        for strand in self.live:
            waits = f", waits for {strand.waits_for()}" if strand.waits_for else ""
            lines.append(
                f"  rank {strand.rank}, {strand.what}: {self.sites.text(strand.site)}{waits}"
            )
        return "\n".join(lines)

    def _idle(self, strand: Strand) -> bool:
        # It polls words that have not changed since it last looked at all of them.
        versions = self.versions
        return [versions.get(word, 0) for word in strand.words] == list(strand.words.values())

    def pick(self, live: list[Strand], current: Strand | None) -> Strand:
        """Who goes on, of those that can.

        Raises:
            Stop: nobody can; `failure` says why.
        """
        able = [s for s in live if s.blocked is None or not s.blocked()]
        busy = [s for s in able if not (s.vain and self._idle(s))]
        if not busy:
            spinning = [s for s in able if s.vain <= _VAIN_POLLS]
            if not spinning:
                raise self.stop(self._deadlock())
            # Fair, and not left to the policy: it makes no difference which one spins.
            return min(spinning, key=lambda s: s.vain)
        return busy[0] if len(busy) == 1 else self.policy.pick(busy, current)

    def _deadlock(self) -> DeadlockError:
        for strand in self.live:
            if strand.waits_for is None and strand.words:
                told = [
                    word if isinstance(word, str) else self.explain(word, strand.wanted.get(word))
                    for word in strand.words
                ]
                strand.waits_for = lambda told=told: ", ".join(told)
        text = f"no rank can move:\n{self.describe()}"
        if returned := self._ranks - {strand.rank for strand in self.live}:
            who = ranks_told(sorted(returned)).capitalize()
            has, they = ("have", "they have") if len(returned) > 1 else ("has", "it has")
            text += f"\n{who} {has} returned: what {they} not signalled will never come."
        if behind := {strand.rank: strand.to_come for strand in self.live if strand.to_come}:
            counts = ", ".join(f"{count} of rank {rank}" for rank, count in behind.items())
            text += (
                f"\nPrograms that have not begun: {counts}. If one of these should signal: those "
                f"of a launch run in turn, as on a GPU without room for all, and must not wait for "
                f'a later one, of any rank. programs="concurrent" (--concurrent) runs all at once.'
            )
        return DeadlockError(text)

    def _switch(self, strand: Strand) -> None:
        self.check()
        chosen = self.pick(self.live, strand)
        if chosen is strand:
            return
        self.switches += 1
        if chosen.rank != strand.rank:
            strand.random_state = torch.get_rng_state()
        chosen.wake()
        strand.baton.acquire()
        self.check()
        if strand.random_state is not None:
            torch.set_rng_state(strand.random_state)
            strand.random_state = None

    def _leave(self, strand: Strand) -> None:
        if strand in self.live:
            self.live.remove(strand)
        if not self.live:
            self.finished.set()
        elif self.failure is None:
            try:
                chosen = self.pick(self.live, strand)
            except Stop:
                return
            chosen.wake()


def positions(scheduler: Scheduler) -> str:
    """Python's view of where strands are, for a simulation that ran out of time."""
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = [scheduler.describe()]
    for ident, frame in frames.items():
        if names.get(ident, "").startswith("rank "):
            lines.append(f"  {names[ident]} is at {frame.f_code.co_filename}:{frame.f_lineno}")
    return "\n".join(lines)
