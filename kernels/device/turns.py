"""Taking turns to send, so that programs which finish tiles together do not all wait for the link.

All programs of a launch finish their first tile at the same time. If each stored it to a peer at
once, all would stall until the link had taken every tile, and again after each further tile:
arithmetic and transfers would add up. So they take turns, SENDERS at a time:

    program 0    tile ....... send | tile ....... send | tile ....... send |        SENDERS = 1
    program 1    tile ....... wait  send | tile ....... send | tile ....... send |
    program 2    tile ....... wait       wait send | tile ....... send | tile ....... send |

After the first tiles the programs are staggered, and each finishes as the link becomes free.

The n-th send of program p waits for the n-th of program p - SENDERS, which announces it in the word
(1, rank, p - SENDERS) of the rank's own pad: (generation << 32) + sends so far, and
(generation + 1) << 32 once it has no more. Turns order no data: the signals are relaxed, and a
program that has waited too long goes on.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.collectives.device import signals


@triton.jit
def wait(link, rank, program, generation, sends, WORLD_SIZE: tl.constexpr, SENDERS: tl.constexpr):
    """Wait for the turn of `program` before its send number `sends` (from 0)."""
    if program >= SENDERS:
        before = signals.slot_ptr(link.signal_ptrs, rank, WORLD_SIZE, 1, rank, program - SENDERS)
        own_pad = signals.peer_ptr(link.signal_ptrs, rank, tl.int64)
        signals.wait_local(own_pad, before, (generation << 32) + sends + 1, link.timeout_ns)


@triton.jit
def end(link, rank, program, generation, sends, WORLD_SIZE: tl.constexpr):
    """Announce that `program` has sent `sends` times in this call."""
    word = signals.slot_ptr(link.signal_ptrs, rank, WORLD_SIZE, 1, rank, program)
    signals.mark_local(word, (generation << 32) + sends)


@triton.jit
def end_all(link, rank, program, generation, WORLD_SIZE: tl.constexpr):
    """Announce that `program` sends no more in this call."""
    word = signals.slot_ptr(link.signal_ptrs, rank, WORLD_SIZE, 1, rank, program)
    signals.mark_local(word, (generation + 1) << 32)
