"""The signal pad in front of every rank's data: int64 words, initially zero.

    word           written by        holds
    GENERATION     this rank         number of the last call begun on this workspace
    TICKET         this rank         programs of the running launch that have finished
    STATUS .. +3   any rank          0, or code, waiter, peer, generation: see below
    CLAIM          this rank         1 while kernels make a call
    REPORT         this rank         address of two words of the host, or 0: see `reports`
    CLOCK          this rank         time in ns, as kernels last saw it
    HOST_SLOTS     rank s, line s    a cache line for each source rank: its generation, its message
    KERNEL_SLOTS   rank s            signals of kernels

Every slot has one writer. Signals only grow and are never reset: a waiter waits for "at least this
generation", so a call may leave slots out.

Codes in STATUS, after which the memory is of no use until all ranks have closed it:

    TIMED_OUT      `waiter` has waited in vain for `peer`
    FAILED         `peer` has left a call amid it
    OVERLAPPED     another call began while kernels of this rank made one
    GONE           the process of `peer` has ended
"""

from __future__ import annotations

GENERATION = 0
TICKET = 1
STATUS = 2
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


def pad_bytes(world_size: int) -> int:
    """Size of a pad: two phases of signals for MAX_PROGRAMS programs of every rank."""
    words = KERNEL_SLOTS + 2 * world_size * MAX_PROGRAMS
    return -(-words * WORD_BYTES // 4096) * 4096
