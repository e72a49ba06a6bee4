"""Device-side signals: how a kernel on one rank tells a kernel on another that its data is there.

A signal slot (see `weft.collectives.pad`) has one writer and holds the generation of the last call
that its writer announced. It only grows, so nothing is ever reset; and the generation lives on the
device, so a captured CUDA graph replays correctly: each replay is a new generation.

Order. `signal` is a release at system scope, `wait` an acquire at system scope: what the writer's
program stored before its signal is visible to the waiter's program after its wait. `signal_local`
and `wait_local` do the same between programs of one device.

Why two halves are enough. Two rules hold for every kernel built on this pad:
  1. in each call, every rank signals every peer (for empty chunks too) after it has finished
     reading everything of its previous call on the channel: a stream orders the launches of a
     channel;
  2. no call ends on a rank before that rank has received the signals of all peers for that call.
When a rank starts call g + 2 it has, by 2, received everyone's signals of g + 1; those were sent,
by 1, after everyone had finished reading call g. Hence nobody still reads the half that it now
overwrites.

Why nothing hangs. Every wait is bounded; one that fails records who waited for whom, and all later
waits of the launch give up at once. A program waits for programs of its peers with the same number
or for programs of its own launch with a smaller number, never for a later one, so that any grid
makes progress when its programs run in order: non-resident grids on a GPU, and the interpreter.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy
import torch
import triton
import triton.language as tl

from weft.collectives import pad

TIMED_OUT = 1  # the code that a failed wait leaves in STATUS

INTERPRETED = bool(triton.knobs.runtime.interpret)


class Constant(tl.constexpr):  # type: ignore[misc]  # Triton ships no types
    """A constant that kernels refer to by name.

    Before every launch Triton compares all globals that a kernel and its functions refer to, ten in
    most of ours, with their values at compile time: 1 us each if the comparison makes a constexpr.
    """

    def __ne__(self, other: Any) -> bool:
        return bool(self.value != other.value)


_GENERATION = Constant(pad.GENERATION)
_TICKET = Constant(pad.TICKET)
_STATUS = Constant(pad.STATUS)
_KERNEL_SLOTS = Constant(pad.KERNEL_SLOTS)
_MAX_PROGRAMS = Constant(pad.MAX_PROGRAMS)
_TIMED_OUT = Constant(TIMED_OUT)
_INTERPRETED = Constant(INTERPRETED)
_HAS_ATOMIC_LOAD = Constant(hasattr(tl, "atomic_load"))  # Triton 3.9


def interpreter_ready() -> tuple[bool, str]:
    """Whether kernels can run on CPU in this process, and if not, why."""
    if not INTERPRETED:
        return False, (
            "kernels are compiled for a GPU in this process; set TRITON_INTERPRET=1 before Python "
            "runs"
        )
    if isinstance(tl.zeros, triton.JITFunction):
        return False, (
            "triton was imported before weft, so its own functions are compiled; import weft "
            "first, or set TRITON_INTERPRET=1 before Python runs"
        )
    if _release(triton) < (3, 7) and _release(numpy) >= (2, 4):
        return False, (
            f"the interpreter of triton {triton.__version__} converts arrays to numbers in a way "
            f"that numpy {numpy.__version__} rejects; install numpy < 2.4 or triton >= 3.7"
        )
    return True, "kernels are interpreted"


def _release(module: ModuleType) -> tuple[int, int]:
    major, minor = module.__version__.split(".")[:2]
    return int(major), int(minor)


def polls_within(seconds: float, device: torch.device) -> int:
    """How many polls take about `seconds`: the bound of a kernel's waits.

    A poll on a GPU takes some 400 cycles: an access to L2, and two barriers until all threads have
    what it read. In the interpreter it depends on who else wants the core, so polls are counted by
    the clock there: see `_sleep`.
    """
    rate = _INTERPRETED_POLLS_PER_S if device.type == "cpu" else 4_000_000
    return max(1, int(min(seconds * rate, _MOST_POLLS)))


_INTERPRETED_POLLS_PER_S = 10_000
_MOST_POLLS = 2.0**62  # of those that wait without end: kernels count in 64 bits
_last_poll = (0, 0, 0.0)  # address, value, time


def _sleep(address: int, value: int) -> int:
    global _last_poll
    time.sleep(50e-6)
    now, last = time.perf_counter(), _last_poll
    _last_poll = (address, value, now)
    waited = now - last[2] if last[:2] == (address, value) else 0.0
    return max(1, round(waited * _INTERPRETED_POLLS_PER_S))


# What an interpreted rank does between two polls of a signal, given the signal's address and the
# awaited value; returns how many polls it counts for. A scheduler of virtual ranks replaces it to
# switch to another rank.
on_poll: Callable[[int, int], int] = _sleep


# Called before the first poll of every wait, with the signals' addresses and the awaited value.
on_wait: Callable[[list[int], int], None] | None = None


def _addresses(ptr: Any, mask: Any) -> list[int]:
    places = ptr.handle.data
    if isinstance(mask, tl.tensor):
        places = places[mask.handle.data]
    found: list[int] = places.reshape(-1).tolist()
    return found


def _begin(ptr: Any, value: Any, mask: Any = True, _semantic: Any = None) -> None:
    """Report the start of a wait. Only interpreted kernels call this."""
    addresses = _addresses(ptr, mask)
    if on_wait is not None and addresses:
        on_wait(addresses, int(value))


def _pause(ptr: Any, value: Any, mask: Any = True, _semantic: Any = None) -> int:
    """Let others run before the next poll. Only interpreted kernels call this."""
    return on_poll(_addresses(ptr, mask)[0], int(value))


# Triton's code generator rejects plain functions, even in branches that it drops.
for _function in (_begin, _pause):
    setattr(_function, tl.core.TRITON_BUILTIN, True)


@triton.jit
def peer_ptr(table, rank, dtype: tl.constexpr):
    """Address of `rank`'s region in `table` (int64[W]), as a pointer to `dtype`."""
    return tl.multiple_of(tl.load(table + rank).to(tl.pointer_type(dtype)), 16)


@triton.jit
def half_ptr(buffer_ptrs, rank, generation, half_bytes, dtype: tl.constexpr):
    """Address of the half of `rank`'s data region that call `generation` uses."""
    base = tl.load(buffer_ptrs + rank) + (generation & 1) * half_bytes
    return tl.multiple_of(base.to(tl.pointer_type(dtype)), 16)


@triton.jit
def slot_ptr(signal_ptrs, owner, world_size, phase: tl.constexpr, source, program):
    """The word of `owner`'s pad where `program` (< 256) of rank `source` announces a `phase`."""
    tl.static_assert(phase == 0 or phase == 1, "a pad has words for phases 0 and 1")
    pad = peer_ptr(signal_ptrs, owner, tl.int64)
    return pad + _KERNEL_SLOTS + (phase * world_size + source) * _MAX_PROGRAMS + program


@triton.jit
def last_generation(signal_ptrs, rank):
    """Number of the last call that `rank` has begun."""
    return tl.load(peer_ptr(signal_ptrs, rank, tl.int64) + _GENERATION)


@triton.jit
def is_last_program(signal_ptrs, rank, num_programs):
    """Called once by each program of a launch, at its end: True in the last one to arrive.

    What the other programs stored before is visible to the last one after.
    """
    ticket_ptr = peer_ptr(signal_ptrs, rank, tl.int64) + _TICKET
    tl.debug_barrier()
    last = tl.atomic_add(ticket_ptr, 1, sem="acq_rel", scope="gpu") == num_programs - 1
    if last:
        tl.store(ticket_ptr, 0)
    return last


@triton.jit
def set_generation(signal_ptrs, rank, generation):
    """Begin call `generation`. Only the last program of a launch may: all others have read it."""
    tl.store(peer_ptr(signal_ptrs, rank, tl.int64) + _GENERATION, generation)


# Order of a program's own stores before its signal. One thread signals, many stored: in the PTX of
# sm_80 to sm_100 `debug_barrier` is a bar.sync, then thread 0 issues atom.release.sys.exch; release
# is cumulative, so that it covers what the other threads stored before the barrier. In the code for
# gfx942 the barrier is a bare s_barrier and the release is buffer_wbl2 sc0 sc1 + s_waitcnt vmcnt(0)
# of the signalling wave: other waves' stores are covered only if requests of one work-group stay in
# order on their way to L2, as LLVM's memory model assumes. Not tried on such a chip. Triton 3.9
# itself puts a barrier before atomics; ours then costs a second bar.sync.
@triton.jit
def signal(ptr, value, mask=None):
    """Publish all that this program has stored, to any rank: release `value`. One writer a slot.

    `ptr` may be of several slots, a lane each: stores are then waited for once.
    """
    tl.debug_barrier()
    if _HAS_ATOMIC_LOAD:
        tl.atomic_store(ptr, value, mask=mask, sem="release", scope="sys")
    else:
        tl.atomic_xchg(ptr, value, mask=mask, sem="release", scope="sys")


@triton.jit
def signal_add(ptr, n):
    """Publish all that this program has stored, to any rank: add `n`. Many writers a slot."""
    tl.debug_barrier()
    tl.atomic_add(ptr, n, sem="release", scope="sys")


@triton.jit
def signal_local(ptr, value):
    """`signal` to programs of this device only."""
    tl.debug_barrier()
    if _HAS_ATOMIC_LOAD:
        tl.atomic_store(ptr, value, sem="release", scope="gpu")
    else:
        tl.atomic_xchg(ptr, value, sem="release", scope="gpu")


@triton.jit
def mark_local(ptr, value):
    """Show `value` to programs of this device without publishing any stores.

    No store is waited for, so it costs no more than a store.
    """
    tl.debug_barrier()
    if _HAS_ATOMIC_LOAD:
        tl.atomic_store(ptr, value, sem="relaxed", scope="gpu")
    else:
        tl.atomic_xchg(ptr, value, sem="relaxed", scope="gpu")


# Adding 0 is how Triton before 3.9 spells an atomic load; the PTX of one is ld.acquire, of several
# lanes a read-modify-write, in the L2 of the own device. 3.9 also has tl.atomic_poll, but that
# waits for one value: a peer may already have announced its next call when a waiter looks.
@triton.jit
def _acquire(ptr, scope: tl.constexpr, mask=None):
    if _HAS_ATOMIC_LOAD:
        value = tl.atomic_load(ptr, mask=mask, sem="acquire", scope=scope)
    else:
        value = tl.atomic_add(ptr, 0, mask=mask, sem="acquire", scope=scope)
    return value


@triton.jit
def _wait(ptr, value, max_polls, scope: tl.constexpr):
    polls = tl.cast(max_polls, tl.int64)
    if _INTERPRETED:
        _begin(ptr, value)
    seen = _acquire(ptr, scope)
    while (seen < value) & (polls > 0):
        if _INTERPRETED:
            polls -= _pause(ptr, value)
        else:
            polls -= 1
        seen = _acquire(ptr, scope)
    return seen >= value


@triton.jit
def wait(ptr, value, max_polls):
    """Acquire `*ptr >= value` from any rank. False if it did not come within `max_polls` polls."""
    return _wait(ptr, value, max_polls, "sys")


@triton.jit
def wait_local(ptr, value, max_polls):
    """`wait` for a program of this device."""
    return _wait(ptr, value, max_polls, "gpu")


@triton.jit
def patience(own_pad, max_polls):
    """How many polls a wait may take: none once a wait of this rank has failed."""
    status = _acquire(own_pad + _STATUS, "gpu")
    return tl.where(status == 0, tl.cast(max_polls, tl.int64), 0)


@triton.jit
def record_timeout(own_pad, rank, peer, generation):
    """Leave (code, waiter, peer, generation) for the host, unless this rank has failed before."""
    status = own_pad + _STATUS
    code = tl.cast(_TIMED_OUT, tl.int64)
    if tl.atomic_cas(status, code - code, code, sem="relaxed", scope="gpu") == 0:
        tl.store(status + 1, rank)
        tl.store(status + 2, peer)
        tl.store(status + 3, generation)


@triton.jit
def wait_for(
    signal_ptrs, rank, world_size, phase: tl.constexpr, peer, program, generation, max_polls
):
    """Wait until `program` of rank `peer` has announced `phase` of call `generation` to `rank`.

    False on a time-out, which is then recorded in `rank`'s STATUS.
    """
    own_pad = peer_ptr(signal_ptrs, rank, tl.int64)
    slot = slot_ptr(signal_ptrs, rank, world_size, phase, peer, program)
    arrived = wait(slot, generation, patience(own_pad, max_polls))
    if not arrived:
        record_timeout(own_pad, rank, peer, generation)
    return arrived


@triton.jit
def greatest(x):
    """The largest element of a vector. Not tl.max, which is a jit function of Triton's own,
    interpreted only if TRITON_INTERPRET was set when triton was imported.
    """
    return tl.reduce(x, 0, tl.standard._elementwise_max)


# One lane for each peer. A release waits until this program's stores have been acknowledged, over
# the link and back: one after another, the releases and acquires of 8 ranks would take longer than
# everything else in a call of few bytes.
@triton.jit
def peer_lanes(first, WORLD_SIZE: tl.constexpr):
    """Ranks `first`, `first` + 1, ... around the world, as (number of each lane, its rank).

    There is a power of 2 of lanes: those from WORLD_SIZE on repeat ranks.
    """
    lanes = tl.arange(0, triton.next_power_of_2(WORLD_SIZE))
    return lanes, (first + lanes) % WORLD_SIZE


@triton.jit
def wait_for_lanes(own_pad, words, peers, awaited, rank, value, max_polls, scope: tl.constexpr):
    """Wait until the word of each `awaited` lane, written by that lane's peer, is at least `value`.

    False on a time-out, which is then recorded in STATUS of `own_pad`, that of `rank`.
    """
    missing = awaited
    polls = patience(own_pad, max_polls)
    if _INTERPRETED:
        _begin(words, value, missing)
    missing &= _acquire(words, scope, missing) < value
    while (greatest(missing.to(tl.int32)) > 0) & (polls > 0):
        if _INTERPRETED:
            polls -= _pause(words, value, missing)
        else:
            polls -= 1
        missing &= _acquire(words, scope, missing) < value
    late = greatest(tl.where(missing, peers, -1))
    if late >= 0:
        record_timeout(own_pad, rank, late, value)
    return late < 0


@triton.jit
def wait_for_own(
    signal_ptrs,
    rank,
    world_size,
    phase: tl.constexpr,
    source,
    first,
    last,
    generation,
    max_polls,
    LANES: tl.constexpr,
):
    """Wait until programs of this device have announced words first..last of (`phase`, `source`).

    LANES of them (a power of 2) are polled at a time. False on a time-out, which is then recorded
    as one of `source`.
    """
    arrived = True
    own_pad = peer_ptr(signal_ptrs, rank, tl.int64)
    for start in range(first, last + 1, LANES):
        programs = start + tl.arange(0, LANES)
        words = slot_ptr(signal_ptrs, rank, world_size, phase, source, programs)
        arrived &= wait_for_lanes(
            own_pad, words, source, programs <= last, rank, generation, max_polls, "gpu"
        )
    return arrived


@triton.jit
def signal_peers(
    signal_ptrs, rank, WORLD_SIZE: tl.constexpr, phase: tl.constexpr, program, generation
):
    """Announce `phase` of call `generation` to every peer."""
    lanes, peers = peer_lanes(rank + 1, WORLD_SIZE)
    words = slot_ptr(signal_ptrs, peers, WORLD_SIZE, phase, rank, program)
    signal(words, generation, lanes < WORLD_SIZE - 1)


@triton.jit
def wait_for_peers(
    signal_ptrs, rank, WORLD_SIZE: tl.constexpr, phase: tl.constexpr, program, generation, max_polls
):
    """Wait until every peer has announced `phase` of call `generation`. False on a time-out."""
    lanes, peers = peer_lanes(rank + 1, WORLD_SIZE)
    words = slot_ptr(signal_ptrs, rank, WORLD_SIZE, phase, peers, program)
    return wait_for_lanes(
        peer_ptr(signal_ptrs, rank, tl.int64), words, peers, lanes < WORLD_SIZE - 1, rank,
        generation, max_polls, "sys",
    )  # fmt: skip


@triton.jit
def barrier(
    signal_ptrs, rank, WORLD_SIZE: tl.constexpr, phase: tl.constexpr, program, generation, max_polls
):
    """Wait for the same-numbered program of every peer; what each stored before, all see after."""
    signal_peers(signal_ptrs, rank, WORLD_SIZE, phase, program, generation)
    return wait_for_peers(signal_ptrs, rank, WORLD_SIZE, phase, program, generation, max_polls)
