"""Turns in sending: programs that finish their tiles together do not all wait for the link.

All programs of a launch finish their first tile at the same time. If each stored it to a peer at
once, all would stand until the link had taken everybody's, and again with every further tile:
arithmetic and transfers would add up. So they take turns, SENDERS at a time:

    program 0    tile ....... send | tile ....... send | tile ....... send |        SENDERS = 1
    program 1    tile ....... wait  send | tile ....... send | tile ....... send |
    program 2    tile ....... wait       wait send | tile ....... send | tile ....... send |

After the first tiles the programs are apart, and finish one after the other as the link is free.

The n-th send of program p waits for the n-th of program p - SENDERS, which says so in the word
(1, rank, p - SENDERS) of the own pad: (generation << 32) + sends so far, and (generation + 1) << 32
when it has no more. Turns order nothing: these signals are relaxed, and whoever has waited too long
goes on.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.collectives import signals


@triton.jit
def wait(link, rank, program, generation, sends, WORLD_SIZE: tl.constexpr, SENDERS: tl.constexpr):
    """Before `program` sends for the time number `sends` (from 0): is it its turn?"""
    if program >= SENDERS:
        before = signals.slot_ptr(link.signal_ptrs, rank, WORLD_SIZE, 1, rank, program - SENDERS)
        own_pad = signals.peer_ptr(link.signal_ptrs, rank, tl.int64)
        polls = signals.patience(own_pad, link.max_polls)
        signals.wait_local(before, (generation << 32) + sends + 1, polls)


@triton.jit
def end(link, rank, program, generation, sends, WORLD_SIZE: tl.constexpr):
    """`program` has sent `sends` times in this call."""
    word = signals.slot_ptr(link.signal_ptrs, rank, WORLD_SIZE, 1, rank, program)
    signals.mark_local(word, (generation << 32) + sends)


@triton.jit
def end_all(link, rank, program, generation, WORLD_SIZE: tl.constexpr):
    """`program` sends no more in this call."""
    word = signals.slot_ptr(link.signal_ptrs, rank, WORLD_SIZE, 1, rank, program)
    signals.mark_local(word, (generation + 1) << 32)
