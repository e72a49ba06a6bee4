"""Device-side signals: how a kernel on one rank tells a kernel on another that its data is there.

A signal slot (see `weft.collectives.ranks.pad`) has one writer and holds the generation of the last
call that its writer announced. It only grows, so nothing is ever reset; and the generation lives on
the device, so a captured CUDA graph replays correctly: each replay is a new generation.

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

Why nothing hangs. Every wait is bounded in time; one that fails records who waited for whom, and
all later waits of the launch give up at once. So does the wait for a process that has ended. A
program waits for programs of its peers with the same number, for what peers announced in a launch
before theirs of this call, or for programs of its own launch with a smaller number, never for a
later one, so that any grid makes progress when its programs start in order of their numbers:
non-resident grids on a GPU, and the interpreter. Beside it may run the one-program kernels that
announce what copy engines have fetched, for which it leaves room on a core (`beside_others`).

Another kernel, such as a collective of NCCL, may hold cores that a grid counted on. Then the last
programs of some ranks start only when the first ones have ended. Let p be the smallest number that
is not finished on all ranks. On a rank where p has not started, a smaller number, or the other
kernel, holds its core. The smaller numbers have finished by the choice of p. So p starts as soon as
one core is not held by the other kernel; what p then waits for, the p of its peers and smaller
numbers of its own, has finished or runs likewise, and p finishes. All of them do, by induction,
though the other kernel may wait for ranks on which it has not started: it costs a second wave, and
no deadlock, as long as it leaves a core on each rank. WEFT_SMS spares it as many as it wants.

Two calls of a rank in two streams could hold each other's cores in opposite orders on two ranks:
all calls of a rank on a GPU run in the order of its host (`workspace`). A graph that is replayed
beside a call is not held back so; if both need more cores than there are, they may wait for each
other until the time is over. Have one stream wait for the other.

What was not computed is never taken for a result: a program that ends after a wait of its rank has
failed fills the results of the call with NaN (`end_call`, `spoil`).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy
import triton
import triton.language as tl

from weft.collectives.device.interpreter import find_builtins_once
from weft.collectives.device.polling import begin_polls, pause
from weft.collectives.ranks import pad, reports

INTERPRETED = bool(triton.knobs.runtime.interpret)
find_builtins_once()


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
_PADS, _RANKS = Constant(pad.PADS), Constant(pad.RANKS)
_CLAIM = Constant(pad.CLAIM)
_REPORT = Constant(pad.REPORT)
_CLOCK = Constant(pad.CLOCK)
_KERNEL_SLOTS = Constant(pad.KERNEL_SLOTS)
_MAX_PROGRAMS = Constant(pad.MAX_PROGRAMS)
_TIMED_OUT = Constant(pad.TIMED_OUT)
_OVERLAPPED = Constant(pad.OVERLAPPED)
_GONE = Constant(pad.GONE)
_GONE_WORD, _ALARM_WORD = Constant(reports.GONE_WORD), Constant(reports.ALARM_WORD)
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


def nanoseconds(seconds: float) -> int:
    """The bound of a kernel's waits."""
    return max(1, int(min(seconds * 1e9, 2.0**62)))


def _target(_semantic: Any = None) -> Any:
    """What a kernel is compiled for: "cuda" or "hip"."""
    return tl.constexpr(_semantic.builder.options.backend_name)


setattr(_target, tl.core.TRITON_BUILTIN, True)  # else the code generator rejects it


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
def begin_call(signal_ptrs, rank):
    """Number of the call that this launch begins. Every program of a call's first launch calls it.

    Calls of a rank on the same memory must not overlap, as those of a graph that is replayed in one
    stream beside a call in another would: that is an error, told as a wait that failed is.
    """
    own_pad = peer_ptr(signal_ptrs, rank, tl.int64)
    overlaps = tl.program_id(0) < 0
    if tl.program_id(0) == 0:  # before it looks which call this is: it acquires the last one's end
        overlaps = tl.atomic_xchg(own_pad + _CLAIM, 1, sem="acquire", scope="gpu") != 0
    generation = tl.load(own_pad + _GENERATION) + 1
    if overlaps:
        _record(own_pad, _OVERLAPPED, rank, rank, generation)
    return generation


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


@triton.jit
def release_claim(own_pad):
    """End what `begin_call` has begun."""
    tl.atomic_xchg(own_pad + _CLAIM, 0, sem="release", scope="gpu")


@triton.jit
def failed(own_pad):
    """Whether a wait of this rank has failed; then the host is told once more.

    A program's own failure is visible to it. Threads need not agree: no barrier depends on it.
    """
    status = tl.load(own_pad + _STATUS, volatile=True)
    if status != 0:
        tell_host(own_pad)
    return status != 0


@triton.jit
def end_call(signal_ptrs, rank, generation):
    """The end of a call: every program of its last launch calls it, after all else.

    True if a wait of this rank has failed. Then the program must `spoil` all results: among those
    that do is the one that should have computed what is missing.
    """
    own_pad = peer_ptr(signal_ptrs, rank, tl.int64)
    status = tl.load(own_pad + _STATUS, volatile=True)  # on its way while the ticket is
    if is_last_program(signal_ptrs, rank, tl.num_programs(0)):
        set_generation(signal_ptrs, rank, generation)
        release_claim(own_pad)
    if status != 0:
        tell_host(own_pad)
        tell_peers(own_pad)
    return status != 0


@triton.jit
def spoil(ptr, count, SPOILS: tl.constexpr = True):
    """ptr[:count] = NaN. Integers stay as they are, as an error tells; if SPOILS, words become NaN
    of whatever type they are parts of.
    """
    dtype: tl.constexpr = ptr.dtype.element_ty
    if SPOILS:
        for start in range(0, count, 1024):
            offs = tl.cast(start, tl.int64) + tl.arange(0, 1024)
            if dtype.is_floating():
                nothing = tl.full((1024,), float("nan"), tl.float32).to(dtype)
            else:
                nothing = tl.full((1024,), -1, dtype)
            tl.store(ptr + offs, nothing, mask=offs < count)


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
def _realtime():
    """AMD's clock of 100 MHz. Not Triton's memrealtime, which reads the register that the clock is
    on its way to: it waits for the vector unit's memory, and the clock comes by the scalar's.
    """
    return tl.inline_asm_elementwise(
        "s_memrealtime $0\ns_waitcnt lgkmcnt(0)", "=s", [], tl.int64, is_pure=False, pack=1
    )


@triton.jit
def _now(own_pad):
    """Time in ns, the same for all threads of a program: each would read another one, so what
    thread 0 has read goes through memory.
    """
    now = tl.extra.cuda.globaltimer() if _target() == "cuda" else _realtime() * 10
    tl.atomic_max(own_pad + _CLOCK, now, sem="relaxed", scope="gpu")
    return tl.atomic_add(own_pad + _CLOCK, 0, sem="relaxed", scope="gpu")


@triton.jit
def _given_up(own_pad, value):
    """Whether a wait of this rank has failed, or the host has told that a process is gone.

    What is recorded then on a GPU is a time-out, of which the host knows the reason: the code for
    more than that would cost the loops of large kernels registers.
    """
    given_up = _acquire(own_pad + _STATUS, "gpu")
    report = tl.load(own_pad + _REPORT)
    if report != 0:
        gone = _acquire(report.to(tl.pointer_type(tl.int64)) + _GONE_WORD, "sys")
        given_up |= gone
        if _INTERPRETED:  # noqa: SIM102  # `and` would not leave the code out
            if gone != 0:
                _record(own_pad, _GONE, gone >> 32, (gone & 0xFFFFFFFF) - 1, value)
    return given_up != 0


# Looks at the clock, at STATUS and at the host's word, which is behind a slow link, take longer
# than most waits: they are for those that have lasted for so many polls, some 50 us.
_POLLS_A_LOOK = Constant(64)


@triton.jit
def _patience(timeout_ns, scope: tl.constexpr):
    """For how many ns a wait goes on at most: for programs of this rank a quarter longer, as they
    wait for peers themselves, and should be the ones to tell for whom.
    """
    left = tl.cast(timeout_ns, tl.int64)
    if scope == "gpu":
        left += left // 4
    return left


@triton.jit
def _look(own_pad, value, timeout_ns, began, left, scope: tl.constexpr):
    """When a wait `began`, if it is not 0 (unknown), and for how many ns it goes on."""
    if not _INTERPRETED:
        now = _now(own_pad)
        began = tl.where(began == 0, now, began)
        left = _patience(timeout_ns, scope) - (now - began)
    return began, tl.where(_given_up(own_pad, value), 0, left)


@triton.jit
def _wait(own_pad, ptr, value, timeout_ns, scope: tl.constexpr):
    if _INTERPRETED:
        begin_polls(ptr, value)
    seen = _acquire(ptr, scope)
    left = _patience(timeout_ns, scope)
    began, polls = left - left, 0
    while (seen < value) & (left > 0):
        polls += 1
        if _INTERPRETED:
            left -= pause(ptr, value)
        if polls == _POLLS_A_LOOK:
            polls = 0
            began, left = _look(own_pad, value, timeout_ns, began, left, scope)
        seen = _acquire(ptr, scope)
    return seen >= value


@triton.jit
def wait(own_pad, ptr, value, timeout_ns):
    """Acquire `*ptr >= value` from any rank. False if it did not come within `timeout_ns`, or
    another wait of this rank, whose pad is `own_pad`, has failed meanwhile.
    """
    return _wait(own_pad, ptr, value, timeout_ns, "sys")


@triton.jit
def wait_local(own_pad, ptr, value, timeout_ns):
    """`wait` for a program of this device."""
    return _wait(own_pad, ptr, value, timeout_ns, "gpu")


@triton.jit
def tell_host(own_pad):
    """Show STATUS to the host, if it is to be told."""
    report = tl.load(own_pad + _REPORT)
    if report != 0:
        word = report.to(tl.pointer_type(tl.int64))
        tl.store(word, tl.load(own_pad + _STATUS, volatile=True))
        alarm = tl.load(word + _ALARM_WORD).to(tl.pointer_type(tl.int64))
        tl.store(alarm, 1)


@triton.jit
def tell_peers(own_pad):
    """Write STATUS to all ranks, before this one begins another call: who comes late to this one
    would take what is announced of later calls for that of it, and acquires STATUS with it.
    As in `failed`, no barrier: the end of the launch orders these stores before later signals.
    """
    status = tl.load(own_pad + _STATUS, volatile=True)
    table, own = tl.load(own_pad + _PADS).to(tl.pointer_type(tl.int64)), own_pad.to(tl.int64)
    for rank in range(tl.load(own_pad + _RANKS)):
        their_pad = tl.load(table + rank)
        if their_pad != own:
            tl.store(their_pad.to(tl.pointer_type(tl.int64)) + _STATUS, status)


@triton.jit
def _record(own_pad, code, rank, peer, generation):
    """Leave (code, waiter, peer, generation) in STATUS, unless this rank has failed before.

    The host is told at once, peers at the end of the call: see `tell_peers`.
    """
    code, peer = tl.cast(code, tl.int64), tl.cast(peer, tl.int64)
    generation = tl.cast(generation, tl.int64)
    generation = tl.where(generation >> 32 != 0, generation >> 32, generation)  # of a word of turns
    word = code | (tl.cast(rank, tl.int64) << 8) | (peer << 20) | ((generation & 0x7FFFFFFF) << 32)
    if tl.atomic_cas(own_pad + _STATUS, code - code, word, sem="relaxed", scope="gpu") == 0:
        tell_host(own_pad)


@triton.jit
def record_timeout(own_pad, rank, peer, generation):
    """Record that `rank` has waited in vain for `peer`, unless it has failed before."""
    _record(own_pad, _TIMED_OUT, rank, peer, generation)


@triton.jit
def wait_for(
    signal_ptrs, rank, world_size, phase: tl.constexpr, peer, program, generation, timeout_ns
):
    """Wait until `program` of rank `peer` has announced `phase` of call `generation` to `rank`.

    False on a time-out, which is then recorded in `rank`'s STATUS.
    """
    own_pad = peer_ptr(signal_ptrs, rank, tl.int64)
    slot = slot_ptr(signal_ptrs, rank, world_size, phase, peer, program)
    arrived = wait(own_pad, slot, generation, timeout_ns)
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
def wait_for_lanes(own_pad, words, peers, awaited, rank, value, timeout_ns, scope: tl.constexpr):
    """Wait until the word of each `awaited` lane, written by that lane's peer, is at least `value`.

    False on a time-out, which is then recorded in STATUS of `own_pad`, that of `rank`.
    """
    missing = awaited
    if _INTERPRETED:
        begin_polls(words, value, missing)
    missing &= _acquire(words, scope, missing) < value
    left = _patience(timeout_ns, scope)
    began, polls = left - left, 0
    while (greatest(missing.to(tl.int32)) > 0) & (left > 0):
        polls += 1
        if _INTERPRETED:
            left -= pause(words, value, missing)
        if polls == _POLLS_A_LOOK:
            polls = 0
            began, left = _look(own_pad, value, timeout_ns, began, left, scope)
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
    timeout_ns,
    LANES: tl.constexpr,
):
    """Wait until programs of this device have announced words first..last of (`phase`, `source`).

    LANES of them (a power of 2) are polled at a time. False on a time-out, which is then recorded
    as one of `source`.
    """
    arrived = True
    own_pad = peer_ptr(signal_ptrs, rank, tl.int64)
    if LANES == 1:  # by loads: several lanes are polled by read-modify-writes
        for program in range(first, last + 1):
            word = slot_ptr(signal_ptrs, rank, world_size, phase, source, program)
            here = wait_local(own_pad, word, generation, timeout_ns)
            if not here:
                record_timeout(own_pad, rank, source, generation)
            arrived &= here
    else:
        for start in range(first, last + 1, LANES):
            programs = start + tl.arange(0, LANES)
            words = slot_ptr(signal_ptrs, rank, world_size, phase, source, programs)
            arrived &= wait_for_lanes(
                own_pad, words, source, programs <= last, rank, generation, timeout_ns, "gpu"
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
    signal_ptrs,
    rank,
    WORLD_SIZE: tl.constexpr,
    phase: tl.constexpr,
    program,
    generation,
    timeout_ns,
):
    """Wait until every peer has announced `phase` of call `generation`. False on a time-out."""
    if WORLD_SIZE == 2:  # by loads: several lanes are polled by read-modify-writes
        arrived = wait_for(
            signal_ptrs, rank, WORLD_SIZE, phase, 1 - rank, program, generation, timeout_ns
        )
    else:
        lanes, peers = peer_lanes(rank + 1, WORLD_SIZE)
        words = slot_ptr(signal_ptrs, rank, WORLD_SIZE, phase, peers, program)
        arrived = wait_for_lanes(
            peer_ptr(signal_ptrs, rank, tl.int64), words, peers, lanes < WORLD_SIZE - 1, rank,
            generation, timeout_ns, "sys",
        )  # fmt: skip
    return arrived


@triton.jit
def barrier(
    signal_ptrs,
    rank,
    WORLD_SIZE: tl.constexpr,
    phase: tl.constexpr,
    program,
    generation,
    timeout_ns,
):
    """Wait for the same-numbered program of every peer; what each stored before, all see after."""
    signal_peers(signal_ptrs, rank, WORLD_SIZE, phase, program, generation)
    return wait_for_peers(signal_ptrs, rank, WORLD_SIZE, phase, program, generation, timeout_ns)
