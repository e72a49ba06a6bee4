"""The signal pad in front of every rank's data: int64 words, initially zero.

    word           written by        holds
    GENERATION     this rank         number of the last call begun on this workspace
    TICKET         this rank         programs of the running launch that have finished
    STATUS         any rank          0, or a failure: see below
    PADS, RANKS    the host          address of the table of all ranks' pads, and how many; or 0
    CLAIM          this rank         1 while kernels make a call
    REPORT         the host          address of a line of the host's words, or 0: see `reports`
    CLOCK          this rank         time in ns, as kernels last saw it
    HOST_SLOTS     rank s, line s    a cache line for each source rank: its generation, its call
    KERNEL_SLOTS   rank s            signals of kernels

Every slot has one writer. Signals only grow and are never reset: a waiter waits for "at least this
generation", so a call may leave slots out.

STATUS has (code, waiter, peer, generation) in one word, so that none is seen without the others.
Who fails writes it to all ranks: those who come later would take what is already there of calls
to come for the data of theirs. The memory is of no use then until all ranks have closed it.

    TIMED_OUT      `waiter` has waited in vain for `peer`
    FAILED         `peer` has left a call amid it
    OVERLAPPED     another call began while kernels of `waiter` made one
    GONE           the process of `peer` has ended
"""

from __future__ import annotations

GENERATION = 0
TICKET = 1
STATUS = 2
PADS, RANKS = 3, 4
TIMED_OUT, FAILED, OVERLAPPED, GONE = 1, 2, 3, 4
CLAIM = 6
REPORT = 7
CLOCK = 16  # not in the line of the others, as all that wait write it
MAX_RANKS = 128  # more than a rack of 72 GPUs on one switch
MAX_PROGRAMS = 256
LINE = 8  # words in a cache line
HOST_SLOTS = 64
KERNEL_SLOTS = HOST_SLOTS + LINE * MAX_RANKS
WORD_BYTES = 8


_CODE_BITS, _RANK_BITS = 8, 12


def status_word(code: int, waiter: int, peer: int, generation: int) -> int:
    """STATUS, as `signals` packs it."""
    generation &= (1 << 31) - 1
    return code | waiter << _CODE_BITS | peer << _CODE_BITS + _RANK_BITS | generation << 32


def status_in(word: int) -> tuple[int, int, int, int]:
    """(code, waiter, peer, generation) of a STATUS."""
    mask = (1 << _RANK_BITS) - 1
    waiter, peer = word >> _CODE_BITS & mask, word >> _CODE_BITS + _RANK_BITS & mask
    return word & (1 << _CODE_BITS) - 1, waiter, peer, word >> 32


def call_word(source: int, generation: int) -> int:
    """Where rank `source` tells the hash of its call: one of two words, used in turn like the
    halves. The word before it is for a value."""
    return HOST_SLOTS + LINE * source + 2 + 2 * (generation & 1)


def kernel_word(world_size: int, phase: int, source: int, program: int) -> int:
    """Where kernels of rank `source` announce a `phase`, as `slot_ptr` finds it."""
    return KERNEL_SLOTS + (phase * world_size + source) * MAX_PROGRAMS + program


def pad_bytes(world_size: int) -> int:
    """Size of a pad: two phases of signals for MAX_PROGRAMS programs of every rank."""
    words = KERNEL_SLOTS + 2 * world_size * MAX_PROGRAMS
    return -(-words * WORD_BYTES // 4096) * 4096
