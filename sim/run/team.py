"""Ranks that make calls together: the virtual world, or a group of it.

It implements `collectives.ranks.group.VirtualRanks`: values gathered from all members, symmetric
memory, host-side signals; and the messages of a process group.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from weft.collectives.memory.symmetric import SymmetricBuffer
from weft.collectives.memory.waiter import Waiter
from weft.collectives.prices.hardware import Hardware
from weft.collectives.ranks import pad
from weft.collectives.ranks.flight import Call, Calls
from weft.errors import MismatchError
from weft.sim.errors import DifferentCallsError
from weft.sim.hooks.host_signals import VirtualWaiter
from weft.sim.observer import Observer
from weft.sim.schedule.scheduler import strand_here

if TYPE_CHECKING:
    from weft.sim.run.world import World

_numbers = itertools.count()
_MEMORY = "ask for the same symmetric memory"


class VirtualMemory:
    """Every member's segment, between guards."""

    multicast_ptr = 0

    def __init__(self, segments: list[torch.Tensor]) -> None:
        self.segments = segments


class Meeting:
    """One call of all members: what each brought, and what they are all ordered after."""

    def __init__(self, key: Hashable, size: int) -> None:
        self.key = key  # the same in every schedule
        self.values: dict[int, Any] = {}
        self.clock = np.zeros(0, np.int32)
        self.number = next(_numbers)
        self._size = size

    @property
    def complete(self) -> bool:
        """Whether all have come."""
        return len(self.values) == self._size


class _Message:
    """What a member has sent, and what that is ordered after."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value, self.clock = value, np.zeros(0, np.int32)


class _Begun(NamedTuple):
    """A call that some members have begun: the first of them, where, and how many."""

    call: Call
    rank: int
    site: int
    begun: int = 1


class VirtualCalls(Calls):
    """Compares a rank's calls with those of the others, which are in this process: where it begins
    one, so that no rank waits, and what calls do not order is not ordered by that."""

    def __init__(self, team: Team) -> None:
        super().__init__()
        self._team = team

    def begin(self, call: Call) -> int:
        self.position += 1
        self._team.begin(self.position, call)
        return -1

    def words(self, rank: int, hash: int) -> str:
        return self._team.words.get(hash, "another")


class Members:
    """Ranks that make calls together. They are numbered in the order of `ranks`.

    Attributes:
        met: how many calls each member has made.
        mail: by source, target and tag: what was sent and not yet received.
        hosts: as in `Group`.
    """

    hosts: tuple[tuple[int, ...], ...] = ()

    def noting(self) -> Calls:
        """What a member notes its calls with."""
        return Calls()

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.met = [0] * len(ranks)
        self.mail: defaultdict[tuple[int, int, int], deque[Any]] = defaultdict(deque)
        self._name = name
        self._open: dict[int, Meeting] = {}  # by number of the call, until all have come

    def enter(self, member: int, value: Any, call: str) -> Meeting:
        """Bring `value` to the next call, which must be the same `call` for all.

        Raises:
            MismatchError: another member makes another call.
        """
        number = self.met[member]
        self.met[member] += 1
        meeting = self._open.get(number)
        if meeting is None:
            meeting = self._open[number] = Meeting((self._name, number), len(self.ranks))
        for other, (_, theirs) in meeting.values.items():
            if theirs != call:
                raise MismatchError(
                    f"rank {self.ranks[member]} is to {call} where rank {self.ranks[other]} is to "
                    f"{theirs}, in call {number} of ranks {_comma_joined(self.ranks)}"
                )
        meeting.values[member] = value, call
        if meeting.complete:
            del self._open[number]
        return meeting

    def arrive(self, member: int, value: Any, call: str) -> Meeting:
        """`enter`, as the others see it."""
        raise NotImplementedError

    def attend(self, meeting: Meeting, call: str) -> list[Any]:
        """What every member brought to `meeting`, once all have come."""
        raise NotImplementedError

    def complete(self, meeting: Meeting) -> bool:
        """Whether all have come to `meeting`."""
        return meeting.complete

    def senders(self, source: int | None, target: int, tag: int) -> list[int]:
        """Who has sent what `receive` would take."""
        sources = range(len(self.ranks)) if source is None else [source]
        return [s for s in sources if self.mail[s, target, tag]]

    def has_mail(self, source: int | None, target: int, tag: int) -> bool:
        """Whether `receive` would not wait."""
        return bool(self.senders(source, target, tag))

    def gather(self, member: int, value: Any) -> list[Any]:
        """Every member's `value`: nobody goes on before all have come."""
        return self.attend(self.arrive(member, value, _MEMORY), _MEMORY)


MembersT = TypeVar("MembersT", bound=Members)


class Teams(Generic[MembersT]):
    """All groups of a virtual world, by name."""

    def __init__(self) -> None:
        self._teams: dict[str, MembersT] = {}

    def new_team(self, name: str, ranks: tuple[int, ...]) -> MembersT:
        raise NotImplementedError

    def team(self, name: str, ranks: tuple[int, ...]) -> MembersT:
        """The group that its members call `name`."""
        team = self._teams.get(name)
        if team is None:
            team = self._teams[name] = self.new_team(name, ranks)
        if team.ranks != ranks:
            raise MismatchError(
                f"the ranks make different groups in one call: {team.ranks} and {ranks}"
            )
        return team


class OneMemory:
    """Ranks of one process, which has all memory: what they need not do, or do by a copy."""

    def share(self, x: torch.Tensor) -> None:
        """All ranks can read all memory."""

    def read(self, address: int, out: torch.Tensor) -> None:
        """Fill the contiguous `out`, on the CPU, from the memory at `address`."""
        ctypes.memmove(out.data_ptr(), address, out.numel() * out.element_size())

    def beside(self, number: int) -> AbstractContextManager[None]:
        """Of the CPU: what is enqueued there is done at once."""
        return nullcontext()

    def rejoin(self) -> None:
        """As `beside`."""


class Team(Members):
    """The ranks `ranks` of a virtual world that `sim.run` runs, in this order."""

    device, sharing = torch.device("cpu"), 1

    def __init__(self, world: World, name: str, ranks: tuple[int, ...]) -> None:
        super().__init__(name, ranks)
        self._world = world
        on: dict[int, list[int]] = {}
        for member, rank in enumerate(ranks):
            on.setdefault(world.host_of[rank], []).append(member)
        self.hosts = tuple(map(tuple, on.values())) if len(on) > 1 else ()
        self.words: dict[int, str] = {}  # of calls, by their hashes
        self._begun: dict[int, _Begun] = {}  # by position, until all have come

    def noting(self) -> Calls:
        """What a member tells of the calls that it begins."""
        return VirtualCalls(self)

    def begin(self, position: int, call: Call) -> None:
        """This rank makes `call`, as that of all at `position`.

        Raises:
            DifferentCallsError: another rank makes another one there. Two that compare what they
                gather do so themselves: all of their ranks raise.
        """
        scheduler, strand = self._world.scheduler, strand_here()
        self.words[call.hash] = call.text.decode()
        site = scheduler.sites.here()
        first = self._begun.get(position, _Begun(call, strand.rank, site, 0))
        if first.call.hash != call.hash and (first.call.where or call.where):
            text = "the ranks make different calls:"
            for each in sorted((first, _Begun(call, strand.rank, site)), key=lambda b: b.rank):
                text += f"\n  rank {each.rank} calls {each.call.text.decode()}"
                text += f"\n    at {scheduler.sites.text(each.site)}"
            raise scheduler.stop(DifferentCallsError(text))
        if first.begun + 1 == len(self.ranks):
            self._begun.pop(position, None)  # a rank by itself has none
        else:
            self._begun[position] = first._replace(begun=first.begun + 1)

    @property
    def chip(self) -> str:
        """Name of the chip that the ranks stand for; empty if they are CPU ranks."""
        hardware = self._world.hardware
        return hardware.chip if hardware else ""

    @property
    def hardware(self) -> Hardware | None:
        """What the choice of an engine is made from, if the ranks stand for some."""
        return self._world.hardware

    @property
    def calls(self) -> int:
        """How many calls the first member has made."""
        return self.met[0]

    def arrive(self, member: int, value: Any, call: str) -> Meeting:
        """Bring `value` to the next call of the team, which must be the same `call` for all.

        Raises:
            MismatchError: another member makes another call.
        """
        self._world.scheduler.saw(strand_here(), self.ranks, self.met[member], False)
        meeting = self.enter(member, value, call)
        self._world.bring(value)
        self._world.tell(Observer.give, strand_here(), "arrive", meeting.key, meeting)
        return meeting

    def attend(self, meeting: Meeting, call: str) -> list[Any]:
        """What every member brought to `meeting`, once all have come."""

        def waits_for() -> str:
            absent = [r for i, r in enumerate(self.ranks) if i not in meeting.values]
            return f"rank {_comma_joined(absent)} to {call}"

        strand = strand_here()
        self._world.tell(Observer.await_others, strand, "attend", meeting.key, len(self.ranks))
        self._world.scheduler.sleep_until(strand, lambda: meeting.complete, waits_for)
        self._world.tell(Observer.take_over, strand, meeting)
        return [meeting.values[i][0] for i in range(len(self.ranks))]

    def complete(self, meeting: Meeting) -> bool:
        """Whether all have come to `meeting`; if not, others go on first."""
        ranks = _comma_joined(self.ranks)
        what = f"all of ranks {ranks} to come to a call, for which it asks in a loop"
        return self._glance(lambda: meeting.complete, what)

    def _glance(self, there: Callable[[], bool], what: str) -> bool:
        """Whether `what` has come from other ranks. Who asks in a loop must let them go on."""
        strand, scheduler = strand_here(), self._world.scheduler
        self._world.tell(Observer.unplayable, "a look at whether others have come")
        if not there():
            scheduler.let_others(strand, what)
        found = there()
        if found:
            scheduler.progressed(strand)
        scheduler.saw(strand, self.ranks, found, False)
        return found

    def timed_as_one(self, name: str) -> AbstractContextManager[None]:
        """In virtual time, what this rank does inside is one collective of a process group."""
        # Every member reads all of every other here; in two steps, reduced parts and then results,
        # an all-reduce moves no more than twice what one member has.
        share = 2 / len(self.ranks) if name == "all_reduce" else 1.0
        tracer = self._world.tracer
        return tracer.collective(strand_here(), name, share) if tracer else nullcontext()

    def memory(
        self, member: int, pad_bytes: int, data_bytes: int, device: torch.device
    ) -> VirtualMemory:
        """Zeroed pads and data that holds nothing yet."""
        made = None
        if member == 0:
            made = self._world.allocate(self, pad_bytes, data_bytes)
        return VirtualMemory(self.gather(member, made)[0])

    def waiter(self, buffer: SymmetricBuffer) -> Waiter:
        """Host-side signals between members."""
        return VirtualWaiter(self._world, buffer)

    def share(self, x: torch.Tensor) -> None:
        """Let others read the private memory of `x`."""
        self._world.share(x)

    def read(self, address: int, out: torch.Tensor) -> None:
        """Fill the contiguous `out` from the memory at `address`, which another member shares."""
        self._world.read(address, out)

    def beside(self, number: int) -> AbstractContextManager[None]:
        """In virtual time, what this rank enqueues inside runs beside its stream."""
        tracer, strand = self._world.tracer, strand_here()
        return tracer.beside(strand.rank, number) if tracer and strand.timed else nullcontext()

    def rejoin(self) -> None:
        """In virtual time, this rank's stream goes on when those beside it have ended."""
        tracer, strand = self._world.tracer, strand_here()
        if tracer is not None and strand.timed:
            tracer.rejoin(strand.rank)

    def send(self, source: int, target: int, tag: int, value: torch.Tensor) -> None:
        """Leave `value` for member `target`; never waits."""
        self._world.scheduler.saw(strand_here(), (self.ranks, target, tag), None, False)
        self._world.bring(value)
        message, key = _Message(value), (self._name, source, target, tag)
        self._world.tell(Observer.give, strand_here(), "send", key, message)
        self.mail[source, target, tag].append(message)

    def receive(self, source: int | None, target: int, tag: int) -> tuple[int, torch.Tensor]:
        """The next value that `source` (None: anybody) left for `target`, and who it was."""

        def waits_for() -> str:
            return f"{self._named(source)} to send it something with tag {tag}"

        world, strand, key = self._world, strand_here(), (self._name, source, target, tag)
        world.tell(Observer.await_others, strand, "receive", key)
        if source is None:
            world.tell(Observer.unplayable, "a message from anybody")
        world.scheduler.sleep_until(
            strand, lambda: bool(self.senders(source, target, tag)), waits_for
        )
        sender = self.senders(source, target, tag)[0]
        message = self.mail[sender, target, tag].popleft()
        world.tell(Observer.take_over, strand, message)
        return sender, message.value

    def has_mail(self, source: int | None, target: int, tag: int) -> bool:
        """Whether `receive` would not wait; if not, others go on first."""
        what = f"{self._named(source)} to send it something with tag {tag}"
        return self._glance(lambda: bool(self.senders(source, target, tag)), what)

    def _named(self, source: int | None) -> str:
        return "anybody" if source is None else f"rank {self.ranks[source]}"


def _comma_joined(ranks: Any) -> str:
    return ", ".join(map(str, ranks))


def word_told(team: Team, owner: int, word: int, value: int) -> str:
    """A word of the pad of rank `owner`, the `value` in it, and who writes it."""
    if word >= pad.KERNEL_SLOTS:
        rest, program = divmod(word - pad.KERNEL_SLOTS, pad.MAX_PROGRAMS)
        phase, member = divmod(rest, len(team.ranks))
        source = team.ranks[member]
        name = f"(phase {phase}, rank {source}, program {program})"
    elif word >= pad.HOST_SLOTS:
        member, index = divmod(word - pad.HOST_SLOTS, pad.LINE)
        source = team.ranks[member]
        name = f"({source}, {index})"
    else:
        return f"word {word} of rank {owner}'s pad, which is {value}"
    return (
        f"word {name} of rank {owner}'s pad, which is {value}: rank {source} should have signalled"
    )
