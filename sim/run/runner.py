"""sim.run: the ranks of one function, in one process, under any number of interleavings."""

from __future__ import annotations

import contextvars
import copy
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch

from weft.collectives.device import polling
from weft.collectives.prices.hardware import Hardware, named
from weft.collectives.ranks import pad
from weft.collectives.ranks.group import forget_meshes
from weft.sim.check.recording import Tape
from weft.sim.check.replay import Recording
from weft.sim.errors import SimError
from weft.sim.hooks import interpreter_hooks, timing_hooks
from weft.sim.hooks.host_access import python_reads
from weft.sim.observer import Observer
from weft.sim.progress_bar import progress
from weft.sim.run import distributed_hooks
from weft.sim.run.world import Programs, World
from weft.sim.schedule.player import made_by, schedule_of
from weft.sim.schedule.scheduler import Scheduler, local, positions, strand_here
from weft.sim.schedule.schedules import (
    Changes,
    Directed,
    Exhaustive,
    Policy,
    Priorities,
    Schedule,
    Uniform,
    parse,
    preempting,
    spell,
)
from weft.sim.time import rotation
from weft.sim.time.compiling import Launched
from weft.sim.time.timeline import Timeline

_ALL_RANDOM = 100  # schedules; of more, half are systematic
_UNWIND_S = 2.0  # for a strand that is in code of its own to come to a signal


class Results(list[Any]):
    """The ranks' results of the first schedule, in rank order.

    Attributes:
        schedules: how many were run.
        switches: how often one rank or program handed over to another, in all of them.
        states: after `schedules="exhaustive"`, how many different states there are from which more
            than one rank or program could go on.
        played: with `replay`, how many of `schedules` followed from others and were not run.
        distinct: with `replay`, in how many different orders the signals have come.
        timeline: of the first schedule, if `hardware` was given.
        launched: likewise, what its kernels would be compiled from (`weft.sim.time.compiling`).
    """

    schedules: int = 0
    switches: int = 0
    states: int = 0
    played: int = 0
    distinct: int = 0
    timeline: Timeline | None = None
    launched: Sequence[Launched] = ()


def run(
    world_size: int,
    fn: Callable[[int], Any],
    *,
    seed: int = 0,
    schedules: int | Literal["exhaustive"] = 1,
    schedule: Schedule | None = None,
    races: bool = True,
    programs: Programs = "sequential",
    replay: bool = False,
    timeout: float = 60.0,
    hardware: Hardware | str | None = None,
    numerics: bool = True,
    symmetric: bool = False,
    hosts: Sequence[int] | None = None,
) -> Results:
    """Run `fn(rank)` on `world_size` virtual ranks in this process, and check it.

    Inside, `group=None` is the virtual world: collectives, fused ops, and kernels of anybody on
    `weft.collectives.empty(...)` buffers work, on CPU and without torch.distributed. Ranks run one
    at a time and hand over at signal operations only, in an order that follows from `seed`.

    Args:
        fn: called once a rank and schedule, with the rank. The ranks share Python's memory: they
            must talk to each other through weft only.
        schedules: how many different interleavings to try; of more than 100, the first half are
            random and the others systematic, with one or two preemptions. "exhaustive" tries all
            that can differ: for small cases.
        schedule: try only this one, as an error named it.
        races: check every access to shared memory.
        programs: "sequential" runs the programs of a launch in turn, "concurrent" as strands of
            their own, each of which may be anywhere.
        replay: do not call `fn` for a schedule that must come to the same as one before. What the
            ranks do is recorded; where the signals of another schedule, played through without the
            kernels, put all accesses to shared memory in the same order, all values are the same.
            Ten to a hundred times faster; `Results.played` tells how often.
        timeout: seconds that one schedule may take.
        hardware: keep virtual time on this ("h100", or a `Hardware`): kernels and the choice of
            engines are those of its chip, and the results have a `timeline`.
        numerics: False skips the arithmetic and the movement of floating-point data, so that real
            sizes run in seconds to minutes: control flow, indices and signals are real, the numbers
            in results are undefined, and races are not looked for. Needs `hardware`.
        symmetric: with numerics=False, run the kernels of rank 0 only: those of the others are
            taken to be the same, turned round (`weft.sim.time.rotation`). For one call of an op
            whose ranks have equal shares.
        hosts: how many ranks each of several hosts has, in their order: memory is shared inside a
            host only, and calls go in two levels (docs/hosts.md). None: one host.

    Returns:
        fn's results of the first schedule, in rank order.

    Raises:
        DeadlockError: no rank can move.
        RaceError: two accesses that nothing orders, or a read of what was never written.
        OutOfBoundsError: an access next to a symmetric buffer.
        TimeoutError: a schedule took longer than `timeout`.
        ValueError: arguments that do not fit together.
        RuntimeError: called by a virtual rank.
        Exception: what `fn` raised, as it was raised; a note names rank, seed and schedule.

    Example:
        >>> def mean(rank):
        ...     return weft.collectives.all_reduce(torch.tensor([float(rank)]), reduce_op="avg")
        >>> weft.sim.run(3, mean, schedules=20)
        [tensor([1.]), tensor([1.]), tensor([1.])]
    """
    __tracebackhide__ = True  # for pytest, as all frames between a test and its own `fn`
    machine = None if hardware is None else named(hardware)
    _check_arguments(world_size, schedules, programs, races, replay, machine, numerics, symmetric)
    if hosts is not None and (sum(hosts) != world_size or min(hosts) < 1 or machine is not None):
        raise ValueError(
            f"hosts must be numbers of ranks that add up to {world_size}, without hardware, whose "
            f"links are those of one domain: got {list(hosts)}"
        )
    if isinstance(schedule, str) and schedule.isdecimal():
        schedule = int(schedule)
    results, orders = Results(), set[int]()
    random_state = torch.get_rng_state()
    everything = Exhaustive()
    recording = Recording(world_size, programs == "concurrent") if replay else None
    total = 1 if schedule is not None else schedules
    with progress(total if isinstance(total, int) else None) as advance:
        for name, policy in _policies(seed, schedules, schedule, everything):
            if recording and (found := schedule_of(recording, policy)):
                made_by(policy, found)
                orders.add(found.seen)
                results.played += 1
                results.switches += found.switches
            else:
                unused = copy.deepcopy(policy) if recording else policy
                tape = Tape() if recording and not recording.unfit else None
                torch.set_rng_state(random_state)
                world = World(
                    world_size,
                    Scheduler(policy),
                    tape,
                    races=races,
                    programs=programs,
                    hardware=machine,
                    numerics=numerics,
                    symmetric=symmetric,
                    hosts=[world_size] if hosts is None else hosts,
                )
                values = _run_one(world, fn, seed, name, timeout)
                if recording and tape:
                    recording.learn(tape)
                    if found := schedule_of(recording, unused):
                        orders.add(found.seen)
                if not results.schedules:
                    results.extend(values)
                    if world.tracer and machine:
                        results.timeline = Timeline(world.tracer.trace, machine)
                        results.launched = world.launched
                results.switches += world.scheduler.switches
            results.schedules += 1
            advance()
    results.states, results.distinct = len(everything.states), len(orders)
    return results


def _check_arguments(
    world_size: int,
    schedules: object,
    programs: str,
    races: bool,
    replay: bool,
    machine: Hardware | None,
    numerics: bool,
    symmetric: bool,
) -> None:
    if not 1 <= world_size <= pad.MAX_RANKS:
        raise ValueError(f"world_size must be in 1..{pad.MAX_RANKS}, got {world_size}")
    if schedules != "exhaustive" and not (isinstance(schedules, int) and schedules > 0):
        raise ValueError(f"schedules must be at least 1, or 'exhaustive', got {schedules!r}")
    if programs not in ("sequential", "concurrent"):
        raise ValueError(f"programs must be 'sequential' or 'concurrent', got {programs!r}")
    if local.strand is not None:
        raise RuntimeError("sim.run inside of sim.run: call it from outside of the ranks")
    if not numerics and machine is None:
        raise ValueError("numerics=False leaves nothing but time: it needs hardware=")
    if replay and (not races or schedules == "exhaustive" or machine is not None):
        raise ValueError(
            "replay=True needs races, a number of schedules, and no hardware: leave it out"
        )
    if symmetric and numerics:
        raise ValueError("symmetric=True leaves out what other ranks compute: pass numerics=False")
    if machine is not None and world_size > machine.ranks:
        raise ValueError(
            f"{machine.name} is a domain of {machine.ranks} ranks, got {world_size=}: "
            f"dataclasses.replace(hardware, ranks=...) makes a larger one"
        )


def _policies(
    seed: int, schedules: int | str, schedule: Schedule | None, everything: Exhaustive
) -> Iterator[tuple[Schedule, Policy]]:
    if schedule is not None:
        yield schedule, _policy(seed, schedule)
    elif isinstance(schedules, int):
        yield from _some(seed, schedules)
    else:
        for changes, policy in everything:
            yield spell(changes), policy


def _some(seed: int, schedules: int) -> Iterator[tuple[Schedule, Policy]]:
    at_random = schedules if schedules <= _ALL_RANDOM else schedules // 2
    for number in range(at_random):
        yield number, _policy(seed, number)
    seen: set[Changes] = set()
    for changes, policy in preempting(seed, schedules - at_random):
        if at_random + len(seen) == schedules:
            return
        if changes not in seen:
            seen.add(changes)
            yield spell(changes), policy
    for number in range(at_random, schedules - len(seen)):
        yield number, _policy(seed, number)


def _policy(seed: int, schedule: Schedule) -> Policy:
    known = parse(schedule) if isinstance(schedule, str) else schedule
    if isinstance(known, tuple):
        return Directed(known)
    return Priorities(seed, known) if known % 2 else Uniform(seed, known)


def _run_one(
    world: World, fn: Callable[[int], Any], seed: int, schedule: Schedule, timeout: float
) -> list[Any]:
    """One schedule."""
    __tracebackhide__ = True
    scheduler = world.scheduler
    results: list[Any] = [None] * world.world_size

    def body_of(rank: int, context: contextvars.Context) -> Callable[[], None]:
        def body() -> None:
            __tracebackhide__ = True
            strand = local.strand
            assert strand is not None
            with world.rank(strand):
                results[rank] = fn(rank)
            world.tell(Observer.flush, strand)

        return partial(context.run, body)

    with ExitStack() as stack:
        if not world.numerics:  # numbers are none: 1 / 0 is nothing to be warned of
            stack.enter_context(np.errstate(all="ignore"))
        if world.tracer:
            stack.enter_context(timing_hooks.installed(world.tracer, world.numerics))
        stack.enter_context(interpreter_hooks.installed(world))
        stack.enter_context(distributed_hooks.installed())
        stack.enter_context(python_reads(world.python_read))
        stack.enter_context(_polls(world))
        stack.enter_context(_properties_without_locks())
        stack.enter_context(_uncompiled())
        for rank in world.everybody:
            strand = world.new_strand(rank)
            strand.random_state = torch.get_rng_state()
            scheduler.start(strand, body_of(rank, contextvars.copy_context()))
        scheduler.begin()
        if not scheduler.finished.wait(min(timeout, threading.TIMEOUT_MAX)):
            stuck = positions(scheduler)
            scheduler.fail(
                TimeoutError(f"a schedule took longer than {timeout:g} s (timeout=):\n{stuck}")
            )
        scheduler.join(_UNWIND_S)
    error = scheduler.failure
    if error is not None:
        shown = f"shown again by sim.run(..., {seed=}, {schedule=})"
        if isinstance(error, SimError):
            error.seed, error.schedule = seed, schedule
            error.args = (f"{error.args[0]}\n{shown}",)
            error.__traceback__ = _to_its_cause(error.__traceback__)
        elif hasattr(error, "add_note"):  # Python 3.11
            where = scheduler.failed_rank
            error.add_note(shown if where is None else f"on virtual rank {where}; {shown}")
        raise error
    if world.symmetric and world.tracer:
        rotation.complete(world.tracer.trace, world.pads)
    return results


def _to_its_cause(traceback: TracebackType | None) -> TracebackType | None:
    """Without the last frames, of the simulator that found an error, not of those who made it."""
    frames = []
    while traceback is not None:
        frames.append((traceback.tb_frame, traceback.tb_lasti, traceback.tb_lineno))
        traceback = traceback.tb_next
    while frames and frames[-1][0].f_code.co_filename.startswith(_SIMULATOR):
        frames.pop()
    for frame in reversed(frames):
        traceback = TracebackType(traceback, *frame)
    return traceback


_SIMULATOR = str(Path(__file__).parent.parent)


@contextmanager
def _polls(world: World) -> Iterator[None]:
    """Waits of weft's own kernels hand over to other ranks."""
    poll = polling.on_poll

    def on_poll(address: int, value: int) -> int:
        return world.poll(address, value) if world.active() else poll(address, value)

    def on_wait(addresses: list[int], value: int) -> None:
        if world.active():
            world.expect(addresses, value)

    def on_flagged(generation: int) -> None:
        if world.active():
            strand_here().flagged = generation

    try:
        with patch.multiple(polling, on_poll=on_poll, on_wait=on_wait, on_flagged=on_flagged):
            yield
    finally:
        # The meshes of another schedule are others.
        for forget in forget_meshes:
            forget()


@contextmanager
def _uncompiled() -> Iterator[None]:
    """What is compiled runs as it is: accesses are seen op by op."""

    def compile(model: Any = None, **options: Any) -> Any:
        return (lambda fn: fn) if model is None else model

    # Its import takes seconds: who has compiled anything before has it.
    known = "torch._dynamo" in sys.modules
    eager = torch.compiler.set_stance("force_eager") if known else nullcontext()
    with patch.object(torch, "compile", compile), eager:
        yield


@contextmanager
def _properties_without_locks() -> Iterator[None]:
    """`cached_property` as it is from Python 3.12 on.

    Before, each has a lock. A rank that hands over while it computes the value would hold it, and
    another that asks for the same property would block, with nobody left to go on.
    """
    if sys.version_info >= (3, 12):
        yield
        return

    def keep(prop: Any, lock: Any) -> None:
        prop.__dict__["lock"] = lock

    lockable: Any = cached_property
    lockable.lock = property(lambda prop: nullcontext(), keep)
    try:
        yield
    finally:
        del lockable.lock
