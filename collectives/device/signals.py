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

import triton
import triton.language as tl

from weft.collectives.device.addresses import (
    HAS_ATOMIC_LOAD,
    INTERPRETED,
    Constant,
    half_ptr,
    last_generation,
    peer_lanes,
    peer_ptr,
    slot_ptr,
)
from weft.collectives.device.failures import (
    failed,
    record_failure,
    record_timeout,
    tell_host,
    tell_peers,
)
from weft.collectives.device.waits import (
    greatest,
    nanoseconds,
    on_nvidia,
    wait,
    wait_for,
    wait_for_lanes,
    wait_for_own,
    wait_for_peers,
    wait_local,
)
from weft.collectives.interpreted.interpreter import hasten, interpreter_ready
from weft.collectives.ranks import pad

__all__ = [
    "INTERPRETED",
    "Constant",
    "barrier",
    "begin_call",
    "end_call",
    "failed",
    "greatest",
    "half_ptr",
    "interpreter_ready",
    "is_last_program",
    "last_generation",
    "mark_local",
    "nanoseconds",
    "peer_lanes",
    "peer_ptr",
    "record_timeout",
    "release_claim",
    "set_generation",
    "signal",
    "signal_add",
    "signal_local",
    "signal_peers",
    "slot_ptr",
    "spoil",
    "tell_host",
    "tell_peers",
    "wait",
    "wait_for",
    "wait_for_lanes",
    "wait_for_own",
    "wait_for_peers",
    "wait_local",
]

hasten()

_GENERATION = Constant(pad.GENERATION)
_TICKET = Constant(pad.TICKET)
_STATUS = Constant(pad.STATUS)
_CLAIM = Constant(pad.CLAIM)
_OVERLAPPED = Constant(pad.OVERLAPPED)
_HAS_ATOMIC_LOAD = Constant(HAS_ATOMIC_LOAD)
_INTERPRETED = Constant(INTERPRETED)


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
        record_failure(own_pad, _OVERLAPPED, rank, rank, generation)
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


@triton.jit
def _threads_meet():
    """`tl.debug_barrier`, with which Triton would pipeline no loads of a loop."""
    if _INTERPRETED:
        tl.debug_barrier()
    elif on_nvidia():
        tl.inline_asm_elementwise(
            "bar.sync 0; mov.b32 $0, 0;", "=r,~{memory}", [], tl.int32, is_pure=False, pack=1
        )
    else:
        tl.debug_barrier()


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
    _threads_meet()
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
    _threads_meet()
    if _HAS_ATOMIC_LOAD:
        tl.atomic_store(ptr, value, sem="relaxed", scope="gpu")
    else:
        tl.atomic_xchg(ptr, value, sem="relaxed", scope="gpu")


@triton.jit
def signal_peers(
    signal_ptrs, rank, WORLD_SIZE: tl.constexpr, phase: tl.constexpr, program, generation
):
    """Announce `phase` of call `generation` to every peer."""
    lanes, peers = peer_lanes(rank + 1, WORLD_SIZE)
    words = slot_ptr(signal_ptrs, peers, WORLD_SIZE, phase, rank, program)
    signal(words, generation, lanes < WORLD_SIZE - 1)


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
