"""Waits of a kernel for signals: bounded in time, and what is left where one fails.

    look at the word --not yet--> look again --64 times--> the clock, STATUS, the host's word
        |                              |                         |
        there                          there                     over, or given up: `failures`

See `signals` for what a wait makes visible.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from weft.collectives.device.addresses import (
    HAS_ATOMIC_LOAD,
    INTERPRETED,
    Constant,
    peer_lanes,
    peer_ptr,
    slot_ptr,
)
from weft.collectives.device.failures import record_failure, record_timeout
from weft.collectives.device.polling import begin_polls, pause
from weft.collectives.ranks import pad, reports

_STATUS = Constant(pad.STATUS)
_REPORT = Constant(pad.REPORT)
_CLOCK = Constant(pad.CLOCK)
_GONE = Constant(pad.GONE)
_GONE_WORD = Constant(reports.GONE_WORD)
_INTERPRETED = Constant(INTERPRETED)
_HAS_ATOMIC_LOAD = Constant(HAS_ATOMIC_LOAD)


def nanoseconds(seconds: float) -> int:
    """The bound of a kernel's waits."""
    return max(1, int(min(seconds * 1e9, 2.0**62)))


def on_nvidia(_semantic: Any = None) -> Any:
    """Whether a kernel is compiled for a chip of NVIDIA's."""
    return tl.constexpr(_semantic.builder.options.backend_name == "cuda")


setattr(on_nvidia, tl.core.TRITON_BUILTIN, True)  # else the code generator rejects it


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
    now = tl.extra.cuda.globaltimer() if on_nvidia() else _realtime() * 10
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
                record_failure(own_pad, _GONE, gone >> 32, (gone & 0xFFFFFFFF) - 1, value)
    return given_up != 0


# Looks at the clock, at STATUS and at the host's word, which is behind a slow link, take longer
# than most waits: they are for those that have lasted for so many polls, some 50 us.
POLLS_A_LOOK = Constant(64)


@triton.jit
def patience(timeout_ns, scope: tl.constexpr):
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
        left = patience(timeout_ns, scope) - (now - began)
    return began, tl.where(_given_up(own_pad, value), 0, left)


@triton.jit
def still_waits(
    own_pad, ptr, value, timeout_ns, began, left, polls, scope: tl.constexpr, missing=True
):
    """Between two loads of the words at `ptr`: (began, left, polls) as the next one wants them.

    They begin as (0, patience of that scope, 0), int64 but the last; when `left` is no more than 0,
    it is over. Scope "gpu" is for words that wait for a peer's themselves: see `patience`.
    """
    polls += 1
    if _INTERPRETED:
        left -= pause(ptr, value, missing)
    if polls == POLLS_A_LOOK:
        polls = 0
        began, left = _look(own_pad, value, timeout_ns, began, left, scope)
    return began, left, polls


@triton.jit
def _wait(own_pad, ptr, value, timeout_ns, scope: tl.constexpr):
    if _INTERPRETED:
        begin_polls(ptr, value)
    seen = _acquire(ptr, scope)
    left = patience(timeout_ns, scope)
    began, polls = left - left, 0
    while (seen < value) & (left > 0):
        began, left, polls = still_waits(own_pad, ptr, value, timeout_ns, began, left, polls, scope)
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


@triton.jit
def wait_for_lanes(own_pad, words, peers, awaited, rank, value, timeout_ns, scope: tl.constexpr):
    """Wait until the word of each `awaited` lane, written by that lane's peer, is at least `value`.

    False on a time-out, which is then recorded in STATUS of `own_pad`, that of `rank`.
    """
    missing = awaited
    if _INTERPRETED:
        begin_polls(words, value, missing)
    missing &= _acquire(words, scope, missing) < value
    left = patience(timeout_ns, scope)
    began, polls = left - left, 0
    while (greatest(missing.to(tl.int32)) > 0) & (left > 0):
        began, left, polls = still_waits(
            own_pad, words, value, timeout_ns, began, left, polls, scope, missing
        )
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
