"""Launches of kernels by virtual ranks: programs in turn or concurrently, and their arguments.

A program has a clock of its own: it starts after all that its rank's host did, the host goes on
after all programs, and programs of one launch are in no order among each other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from weft.collectives.ranks.group import here
from weft.sim.check.regions import Region
from weft.sim.hooks.host_access import tensors_in
from weft.sim.observer import Observer
from weft.sim.schedule.scheduler import Strand, strand_here
from weft.sim.time.trace import Lane

if TYPE_CHECKING:
    from weft.sim.run.world import World

# An int64 tensor of no more elements may be a table of pointers; numbers above this, addresses.
_LARGEST_TABLE = 4096
_LOWEST_ADDRESS = 1 << 32
_LANES = 16  # clocks of a launch's programs, if these run in turn

Program = tuple[int, int, int]


@dataclass(frozen=True)
class _Launch:
    """Programs that `host` launches, each with a clock, and one of `lanes` in virtual time."""

    host: Strand
    kernel: str
    programs: list[Program]
    slots: list[int]
    lanes: list[Lane] | None
    confined: bool
    run: Callable[[Program], None]

    def lane(self, number: int) -> Lane | None:
        return self.lanes[number] if self.lanes else None

    def name(self, program: Program) -> str:
        index = program[0] if program[1:] == (0, 0) else program
        return f"kernel {self.kernel}, program {index}"


class Launches:
    """Those of one schedule."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._lanes: dict[int, list[int]] = {}  # rank -> clocks of its launches' programs
        self._counts = [0] * world.world_size  # of the launches of each rank
        self._watched: dict[int, tuple[Region, list[int]]] = {}  # arguments of those that run

    def run(
        self,
        kernel: str,
        arguments: list[Any],
        warps: int,
        stages: int,
        programs: list[Program],
        run: Callable[[Program], None],
    ) -> None:
        """`run` all `programs` of a launch, of so many warps and stages each, by this rank."""
        world, host = self._world, strand_here()
        tracer = world.tracer
        timed = tracer.launch(host, kernel, warps, stages, len(programs)) if tracer else None
        if world.symmetric and host.rank:
            return
        concurrent = world.programs == "concurrent"
        lanes = len(programs) if concurrent else min(len(programs), _LANES)
        known = self._lanes.setdefault(host.rank, [])
        while len(known) < lanes:
            known.append(world.new_slot(host.rank, len(known)))
        slots = known[:lanes]
        self._counts[host.rank] += 1
        world.tell(Observer.begin_launch, host, slots)
        with self._arguments(arguments) as confined:
            how = self._run_concurrently if concurrent else self._run_in_turn
            how(_Launch(host, kernel, programs, slots, timed, confined, run))
        world.tell(Observer.end_launch, host, slots)

    def _run_in_turn(self, launch: _Launch) -> None:
        world, host, slots = self._world, launch.host, launch.slots
        # The thread stays the host's; only the clock and the name are the program's.
        own = host.slot, host.what
        host.confined = launch.confined
        try:
            for number, program in enumerate(launch.programs):
                turn, at = divmod(number, len(slots))
                slot = slots[_order(turn, len(slots))[at]]
                if turn:
                    world.tell(Observer.reuse, host, slot, own[0])
                host.slot, host.what = slot, launch.name(program)
                host.lane = launch.lane(number)
                host.to_come = len(launch.programs) - number - 1
                world.tell(Observer.program, host)
                world.scheduler.progressed(host)
                launch.run(program)
                world.tell(Observer.flush, host)
        finally:
            host.slot, host.what = own
            host.lane, host.to_come = None, 0
            host.confined = False

    def _run_concurrently(self, launch: _Launch) -> None:
        world, host, slots = self._world, launch.host, launch.slots
        left, group = set(launch.programs), here.world
        keys: list[Hashable] = []

        def body(program: Program) -> Callable[[], None]:
            def run_program() -> None:
                here.world = group
                launch.run(program)
                world.tell(Observer.flush, strand_here())
                left.discard(program)

            return run_program

        for number, (program, slot) in enumerate(zip(launch.programs, slots, strict=True)):
            strand = Strand(host.rank, slot, launch.name(program), launch.confined)
            strand.lane, strand.timed = launch.lane(number), host.timed
            keys.append((host.rank, self._counts[host.rank], number))
            world.tell(Observer.thread, strand, keys[-1])
            world.scheduler.start(strand, body(program))
        world.tell(Observer.start, host, keys, slots)
        world.scheduler.sleep_until(
            host, lambda: not left, lambda: f"{len(left)} programs of {launch.kernel} to end"
        )

    @contextmanager
    def _arguments(self, arguments: list[Any]) -> Iterator[bool]:
        """Watch the tensors that a kernel is given, for the time of the launch.

        Gives whether the kernel can mean no other memory: no tensor holds addresses of any.
        """
        world, detector = self._world, self._world.detector
        if detector is None:
            yield False
            return
        starts = []
        tensors = list(tensors_in(arguments))
        rank = strand_here().rank
        for number, tensor in enumerate(tensors):
            storage = tensor.untyped_storage()
            start, nbytes = storage.data_ptr(), storage.nbytes()
            if start in self._watched:  # two ranks may read one tensor
                if rank not in self._watched[start][1]:
                    why = "two ranks give a kernel the same tensor"
                    world.tell(Observer.unplayable, why)
                self._watched[start][1].append(rank)
                starts.append(start)
            elif nbytes and detector.find(start) is None:
                key = "argument", rank, self._counts[rank], number
                region = Region(start, start + nbytes, f"an argument of {nbytes} bytes", key)
                detector.add(region)
                self._watched[start] = region, [rank]
                starts.append(start)
        confined = not any(self._holds_addresses(tensor) for tensor in tensors)
        try:
            yield confined
        finally:
            for start in starts:
                region, users = self._watched[start]
                users.pop()
                if not users:
                    detector.remove(region)
                    del self._watched[start]

    def _holds_addresses(self, tensor: torch.Tensor) -> bool:
        """Whether this may be a table of pointers to memory that is not known here."""
        detector = self._world.detector
        assert detector is not None
        if tensor.dtype != torch.int64 or tensor.numel() > _LARGEST_TABLE:
            return False
        values = tensor.detach().numpy().ravel().tolist()
        return any(v > _LOWEST_ADDRESS and detector.find(v) is None for v in values)


@lru_cache(maxsize=4096)
def _order(turn: int, lanes: int) -> Sequence[int]:
    """The clocks of `lanes` programs that follow each other. Those of one clock are in an order
    that no signal makes: at random, lest kernels with a period of `lanes` programs hide all their
    races so."""
    return random.Random(turn).sample(range(lanes), lanes) if turn else range(lanes)
