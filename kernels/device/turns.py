"""Taking turns to send, so that programs which finish tiles together do not all wait for the link.

All programs of a launch finish their first tile at the same time. If each stored it to a peer at
once, all would stall until the link had taken every tile, and again after each further tile:
arithmetic and transfers would add up. So they stand in SENDERS lines of neighbours, and one of each
line sends at a time:

    program 0    tile ....... send | tile ....... send | tile ....... send |           first line
    program 1    tile ....... wait  send | tile ....... send | tile ....... send |
    program 2    tile ....... send | tile ....... send | tile ....... send |           second line
    program 3    tile ....... wait  send | tile ....... send | tile ....... send |

After the first tiles the programs of a line are staggered, and each finishes as the link becomes
free.

Neighbours, as programs that finish together may have tiles of several owners: of those after this
rank, each a stretch of the programs. Those that send at a time are then of all these owners evenly.
If the first programs of all sent first, they would be of one owner, and the same on many ranks.

The n-th send of a program waits for the n-th of the one before it in line, which announces it in
the word (1, rank, program - 1) of the rank's own pad: (generation << 32) + sends so far, and
(generation + 1) << 32 once it has no more. Turns order no data: the signals are relaxed, and a
program that has waited too long goes on.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.collectives.device import signals


@triton.jit
def follows(program, programs, SENDERS: tl.constexpr):
    """Whether `program` sends after the one before it, not first in its line."""
    return program % ((programs + SENDERS - 1) // SENDERS) > 0


@triton.jit
def wait_turn(
    link, rank, program, generation, sends, WORLD_SIZE: tl.constexpr, SENDERS: tl.constexpr
):
    """Wait for the turn of `program` before its send number `sends` (from 0)."""
    if follows(program, tl.num_programs(0), SENDERS):
        before = signals.slot_ptr(link.signal_ptrs, rank, WORLD_SIZE, 1, rank, program - 1)
        own_pad = signals.peer_ptr(link.signal_ptrs, rank, tl.int64)
        signals.wait_local(own_pad, before, (generation << 32) + sends + 1, link.timeout_ns)


@triton.jit
def end_turn(link, rank, program, generation, sends, WORLD_SIZE: tl.constexpr):
    """Announce that `program` has sent `sends` times in this call."""
    word = signals.slot_ptr(link.signal_ptrs, rank, WORLD_SIZE, 1, rank, program)
    signals.mark_local(word, (generation << 32) + sends)


@triton.jit
def end_all(link, rank, program, generation, WORLD_SIZE: tl.constexpr):
    """Announce that `program` sends no more in this call."""
    word = signals.slot_ptr(link.signal_ptrs, rank, WORLD_SIZE, 1, rank, program)
    signals.mark_local(word, (generation + 1) << 32)
