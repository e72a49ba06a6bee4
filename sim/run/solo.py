"""One rank of a group on a whole chip: its own kernels, with peers that are memory and words.

    world = SoloWorld(8, device)
    world.learn(fn)                  what the peers of every rank send, data and signals
    with world.at(3):                this thread is rank 3 of 8
        world.post(calls=1)          the peers' signals of the next call
        y = fn(3)                    as on 8 chips, all but the links

All W segments of symmetric memory lie on one device and one thread plays every rank, one after
another. A rank launches what it would launch on a chip of its own: `chip_of` is the whole chip,
peers' tables point at the other segments. So a call does all of a rank's work, and its stores to
peers go to local memory. Multicast there is none.

What peers would send is learned, not modelled:
  1. With every signal of every pad posted far ahead, nothing waits: each rank runs fn. The words
     that change are those that the ranks signal, and by how much they exceed GENERATION tells with
     what. A word of the rank's own pad is local to it: nobody posts it from then on. As signals may
     tell how much has come, ranks do so twice for every exchange of a call that needs the one
     before (`depth`), until both halves of all memory hold what peers leave there.
  2. As often with the learned signals posted, as kernels then wait for their own programs.
  3. Where no peer signals, its words carry their flags (`weft.collectives.device.flagged`): posting
     writes those of the next two calls, as memory has two halves.
A call finds data and signals as if its peers had been quicker. That they are right is not proved:
compare its result with an oracle. A signal that was not learned ends in `PeerTimeout`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from weft.collectives.device import polling
from weft.collectives.memory import repeatable
from weft.collectives.memory.symmetric import SymmetricBuffer, open_buffers
from weft.collectives.memory.waiter import Waiter, told_by
from weft.collectives.memory.workspace import forget, workspaces
from weft.collectives.prices.hardware import Hardware
from weft.collectives.ranks import pad
from weft.collectives.ranks.group import Group, here, virtual_rank
from weft.errors import MismatchError
from weft.kernels.engine.shards import copy_stream
from weft.kernels.matmul import copy_engines
from weft.sim.run.team import OneMemory, VirtualMemory

_FAR = 1 << 62  # more than any generation, and than what `kernels.turns` makes of one


_ALIGN = 4096
_DATA = (1 << 32) - 1  # of a word that carries its flag
_UNSENT = 1 << 32 | _DATA  # NaN, flagged with the first call


class _Buffer:
    """The segments of one symmetric buffer, and what was learned of its pads.

    Attributes:
        generations: int64 (W, 1), the number of each rank's last call.
        slots: int64 (W, slots), the words of each pad that are signals.
        posted: bool (W, slots): those that peers write.
        beyond: int64 (W, slots): by how much these exceed the generation before the call.
        own: bool (W, slots): those that the rank itself writes.
        data: int64 (W, 2, words): both halves of every rank's data.
        flagged: whether these are words that carry their flags.
        steps: int64 (W, 1): by how much a call raises the generation.
    """

    def __init__(
        self, world_size: int, pad_bytes: int, data_bytes: int, device: torch.device, hollow: bool
    ) -> None:
        # One allocation, for pads that are read and written together. Half of the data is NaN. The
        # segments of a hollow one begin a pad apart: the data of each lie over those of the others,
        # and over their pads, which nobody reads.
        nbytes = pad_bytes + data_bytes
        pitch = -(-(pad_bytes if hollow else nbytes) // _ALIGN) * _ALIGN
        whole = (world_size - 1) * pitch + max(pitch, nbytes)
        memory = torch.full((-(-whole // 8),), _UNSENT, device=device).view(torch.uint8)
        pads = memory[: world_size * pitch].view(world_size, pitch)[:, :pad_bytes]
        pads.zero_()
        pads = pads.view(torch.int64)
        self.segments = [memory[r * pitch :][:nbytes] for r in range(world_size)]
        if not hollow:
            data = memory.view(world_size, pitch)[:, pad_bytes : pad_bytes + data_bytes // 16 * 16]
            self.data = data.view(torch.int64).view(world_size, 2, data_bytes // 16)
        self.flagged = False
        self.generations = pads[:, pad.GENERATION : pad.GENERATION + 1]
        # On a CPU, what hosts signal is up to `_SoloWaiter`.
        first = pad.KERNEL_SLOTS if device.type == "cpu" else pad.HOST_SLOTS
        self.slots, self._of_hosts = pads[:, first:], pads[:, pad.HOST_SLOTS : first]
        self.posted = torch.zeros_like(self.slots, dtype=torch.bool)
        self.own = torch.zeros_like(self.posted)
        self.beyond = torch.zeros_like(self.slots)
        self.steps = torch.zeros_like(self.generations)

    def open(self) -> None:
        """Let nothing wait, and forget what was learned. All ranks have made as many calls."""
        self.generations.fill_(int(self.generations.max()))
        self.slots.fill_(_FAR)
        self._of_hosts.zero_()
        self.posted.fill_(False)
        self.own.fill_(False)

    def learn(self, rank: int, began: int) -> None:
        """What `rank` has written in the call before which its generation was `began`."""
        self.steps[rank] = self.generations[rank] - began
        new = (self.slots != _FAR) & ~self.posted & ~self.own
        self.own[rank] |= new[rank]
        new[rank] = False
        self.posted |= new
        self.beyond[new] = self.slots[new] - began

    def look(self) -> None:
        """After every rank's call: whether it is words with flags that they exchange."""
        most = int(self.generations.max()) + 1  # of what was posted
        flags = self.data >> 32
        self.flagged = not self.posted.any() and bool(((flags >= 0) & (flags <= most)).all())

    def post(self, ranks: slice, calls: int = 1) -> None:
        """Write the signals that the next `calls` calls of `ranks` await, in the current stream."""
        ahead = self.generations[ranks] + (calls - 1) * self.steps[ranks] + self.beyond[ranks]
        self.slots[ranks] = torch.where(self.posted[ranks], ahead, self.slots[ranks])
        if self.flagged:
            following = self.generations[ranks] + 1
            halves = torch.arange(2, device=following.device)
            flags = following + ((following & 1) != halves)
            self.data[ranks] = self.data[ranks] & _DATA | (flags << 32)[:, :, None]


class SoloTeam(OneMemory):
    """All ranks, as `collectives.ranks.group.VirtualRanks`: whichever asks, peers say the same."""

    chip, sharing = "", 1
    hardware: Hardware | None = None

    def __init__(self, world_size: int, device: torch.device, hollow: bool) -> None:
        self.world_size, self.device, self._hollow = world_size, device, hollow
        self.buffers: list[_Buffer] = []
        self.learning = hollow
        self._asked = [0] * world_size  # for how many buffers
        self._told: dict[Any, Any] = {}

    def begin(self) -> None:
        """Learn a function: forget the one before."""
        self.learning = True
        self._told.clear()
        for buffer in self.buffers:
            buffer.open()

    def gather(self, rank: int, value: Any) -> list[Any]:
        """What every rank says: the same as `rank`."""
        return [value] * self.world_size

    def memory(
        self, rank: int, pad_bytes: int, data_bytes: int, device: torch.device
    ) -> VirtualMemory:
        """Every rank's segment. Ranks ask for the same buffers in the same order."""
        number = self._asked[rank]
        self._asked[rank] += 1
        if number == len(self.buffers):
            if not self.learning:
                raise RuntimeError(
                    "symmetric memory was asked for after `learn`: what peers leave in it is not "
                    "known. A function must make the same calls each time"
                )
            buffer = _Buffer(self.world_size, pad_bytes, data_bytes, device, self._hollow)
            buffer.open()
            self.buffers.append(buffer)
        return VirtualMemory(self.buffers[number].segments)

    def agree(self, message: Any, words: list[int]) -> None:
        """Raise MismatchError unless all ranks have the same `words` in a `message`."""
        if self._told.setdefault(message, words) != words:
            raise MismatchError(
                f"a rank by itself needs peers with equal shards, that make the same calls: the "
                f"ranks tell each other {self._told[message]} and {words}"
            )

    def waiter(self, buffer: SymmetricBuffer) -> Waiter:
        """Signals between hosts."""
        return _SoloWaiter(self, buffer)


class _SoloWaiter(Waiter):
    """Each peer has told this rank what this rank tells it."""

    def __init__(self, team: SoloTeam, buffer: SymmetricBuffer) -> None:
        super().__init__(buffer)
        self._team = team
        self._name = buffer.buffer_ptrs[0].item()

    def post(self, peer: int, value: int, word: int = 0) -> None:
        """Tell `peer` that this rank has reached `value`; the peer has just told the same."""
        super().post(peer, value, word)
        mine, theirs = (pad.HOST_SLOTS + pad.LINE * rank for rank in (self.rank, peer))
        self.own[theirs : theirs + pad.LINE] = self.words[peer][mine : mine + pad.LINE]
        if self._team.learning:
            told = self.own[mine + 1 : mine + pad.LINE].tolist()
            self._team.agree((self._name, value, word), told)

    def meet(self, peers: Sequence[int], value: int, op: str) -> None:
        """`post` to each of `peers`: all have come."""
        for peer in peers:
            self.post(peer, value)

    def _wait(self, slot: int, peer: int, value: int, op: str) -> None:
        self.give_up(peer, value, op, 0.0)


class SoloWorld:
    """W ranks that one thread plays on one device.

    Args:
        hollow: nothing will be launched, kernels are compiled only: the ranks' data lie over each
            other, signals are neither learned nor looked at, and memory may be asked for any time.

    Attributes:
        groups: by rank: what `group=None` means on it.
    """

    def __init__(
        self, world_size: int, device: torch.device | str = "cpu", *, hollow: bool = False
    ) -> None:
        if not 2 <= world_size <= pad.MAX_RANKS:
            raise ValueError(f"world_size must be in 2..{pad.MAX_RANKS}, got {world_size}")
        device = torch.device(device)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        self.world_size, self.device, self._hollow = world_size, device, hollow
        self.team = SoloTeam(world_size, device, hollow)
        everybody = tuple(range(world_size))
        self.groups = [Group(None, r, world_size, everybody, (), "", self.team) for r in everybody]

    @contextmanager
    def at(self, rank: int) -> Iterator[None]:
        """This thread is `rank` inside the block; backward runs in it, too."""
        with ExitStack() as stack:
            stack.enter_context(virtual_rank(self.groups[rank]))
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            if self.device.type == "cpu":  # nobody will come
                stack.enter_context(patch.object(polling, "on_poll", lambda *_: _FAR))
            yield

    def learn(self, fn: Callable[[int], Any], depth: int = 1) -> None:
        """Run `fn(rank)` on every rank, to know what its peers send in each call of it.

        Args:
            fn: makes the same calls each time, of shards that are equal on all ranks.
            depth: how many exchanges of a call follow one from another, such as 2 for a
                reduce-scatter whose results are gathered.

        In a hollow world every rank runs `fn` once, and that is all.

        Raises:
            RuntimeError: signals do not follow the generation, or differ from call to call.
        """
        team = self.team
        team.begin()
        if self._hollow:
            for rank in range(self.world_size):
                self._run(fn, rank)
            return
        for _ in range(2 * depth):
            self._open_round(fn)
        repeatable.straight.clear()  # these calls have filled tensors: none could be made straight
        for ws in workspaces():
            ws.forget_launches()
        team.learning = False
        for buffer in team.buffers:
            buffer.slots.fill_(0)
        for _ in range(2 * depth):
            self._round(fn)

    def _open_round(self, fn: Callable[[int], Any]) -> None:
        """A call of every rank in which nothing waits, to learn what they signal."""
        for buffer in self.team.buffers:
            buffer.open()
            buffer.post(slice(None))
        # Not even for the own programs: what these leave each other must be no wild address.
        with (
            patch.object(torch, "empty", _zeroed(torch.empty)),
            patch.object(torch.Tensor, "new_empty", _zeroed(torch.Tensor.new_empty)),
        ):
            for rank in range(self.world_size):
                before = {buffer: int(buffer.generations[rank]) for buffer in self.team.buffers}
                self._run(fn, rank)
                for buffer in self.team.buffers:
                    buffer.learn(rank, before.get(buffer, 0))
        for buffer in self.team.buffers:
            buffer.look()

    def _round(self, fn: Callable[[int], Any]) -> None:
        """One more call of every rank, whose signals are compared with the learned ones."""
        for buffer in self.team.buffers:
            buffer.post(slice(None))
        told = [buffer.slots.clone() for buffer in self.team.buffers]
        for rank in range(self.world_size):
            self._run(fn, rank)
        for buffer, expected in zip(self.team.buffers, told, strict=True):
            if not torch.equal(buffer.slots.where(~buffer.own, expected), expected):
                raise RuntimeError(
                    "the signals of a later call are not those of the first one, counted from the "
                    "generation: peers cannot be posted ahead"
                )

    def _run(self, fn: Callable[[int], Any], rank: int) -> None:
        with self.at(rank):
            fn(rank)
            self.check()

    def post(self, calls: int = 1) -> None:
        """Inside `at(rank)`: the signals of the peers for the next `calls` calls of this rank.

        On a GPU they are written by the current stream, after which they are there: a graph may
        hold this.
        """
        assert here.world is not None
        rank = here.world.rank
        for buffer in self.team.buffers:
            buffer.post(slice(rank, rank + 1), calls)

    def check(self) -> None:
        """Inside `at(rank)`, after its calls: wait for the device.

        Raises:
            PeerTimeout: a signal was awaited that no peer sends.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self._hollow:
            return
        group = here.world
        for buffer in open_buffers():
            if buffer.group is group and (status := int(buffer.status_of(buffer.rank))):
                raise told_by(status, buffer.rank, "a call by itself")

    def __enter__(self) -> SoloWorld:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of all memory."""
        for rank in range(self.world_size):
            with virtual_rank(self.groups[rank]):
                forget(rank)
        self.team.buffers.clear()


def _zeroed(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`make`, whose tensors are filled with zeros."""

    def made(*args: Any, **options: Any) -> torch.Tensor:
        return make(*args, **options).zero_()

    return made


@contextmanager
def copied_first(then: Callable[[], object] = lambda: None) -> Iterator[None]:
    """What copy engines would fetch lies there before the kernel that waits for it is launched.

    They are the link of such a kernel. Copies inside of one chip take cores from it instead.
    `then` is called between the two, with the kernel's stream as the current one.
    """
    start = copy_engines.Fetching.start

    def before(fetching: copy_engines.Fetching, gathered: torch.Tensor, *more: Any) -> None:
        start(fetching, gathered, *more)
        if gathered.is_cuda:
            for number in range(fetching.streams):
                beside = copy_stream(gathered.device, number)
                torch.cuda.current_stream(gathered.device).wait_stream(beside)
        then()

    with patch.object(copy_engines.Fetching, "start", before):
        yield
