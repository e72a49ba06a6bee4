"""What a rank leaves where a wait of it has failed, and who is told.

STATUS of the own pad: (code, waiter, peer, generation), of the first failure. The host is told at
once, through the words that its reports gave to the pad; peers at the end of the call.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.collectives.device.addresses import Constant
from weft.collectives.ranks import pad, reports

_STATUS = Constant(pad.STATUS)
_PADS, _RANKS = Constant(pad.PADS), Constant(pad.RANKS)
_REPORT = Constant(pad.REPORT)
_TIMED_OUT = Constant(pad.TIMED_OUT)
_ALARM_WORD = Constant(reports.ALARM_WORD)


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
def record_failure(own_pad, code, rank, peer, generation):
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
    record_failure(own_pad, _TIMED_OUT, rank, peer, generation)
