"""Collectives as kernels, for a GPU: one launch, one or two crossings of the links.

Legend: W ranks; a *piece* is what one rank has for one other, contiguous elements of its input.
Every rank stores its pieces in the memory of the ranks they are for, so that data crosses a link
once and nobody waits for an answer; for few bytes the crossing is all the time there is.

    all_gather, all_to_all       rank r: its piece for p --> slot r of p    p: slots --> output
    reduce_scatter, all_reduce   rank r: its piece for p --> slot r of p    p: slot 0 + slot 1 ...
      of few bytes (one shot)      (each piece is the whole input if all ranks reduce everything)
    all_reduce, two shots        as reduce_scatter, then: sum --> finished area of every rank

A half of the workspace is W slots of one piece; for two shots, W finished pieces follow. Elements
are added in rank order, half types in fp32, and rounded once.

Protocol, in each program p of P; it moves the blocks b of every piece with b % P == p, for all
peers at once: a tile has a row for each.
  1. Store blocks in slot `rank` of each peer; signal all their words (0, rank, p): release at
     system scope.
  2. Wait for the words (0, r, p) of all peers (acquire, system scope); copy or add up the slots.
     Two shots: store the sums among the finished pieces of all peers, signal their words
     (1, rank, p); wait for the words (1, r, p); copy the finished pieces.
  3. Take a ticket; the last program sets GENERATION.

Why it neither races nor deadlocks: a program signals all that it has before it waits, and p waits
for p alone. Calls alternate halves; rules 1 and 2 of `weft.collectives.device.signals` hold,
because each program signals every peer after this rank's last call has ended, and waits for every
peer. The output may be the input: a program overwrites only blocks that it has read, and no other
program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.collectives.device import signals
from weft.collectives.device.device_math import cdiv, element
from weft.collectives.kernels.pieces import (
    copy_pieces,
    piece_ptr,
    receive_pieces,
    reduce_elements,
    send_pieces,
    vectors,
)


@triton.jit(do_not_specialize=["rank"])
def exchange_kernel(
    out_ptr,
    x_ptr,
    sent,  # Pieces of x, one for each rank
    received,  # Pieces of out, one from each rank
    link,
    slot_size,
    rank,
    WORLD_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
    SPOILS: tl.constexpr,  # whether words are parts of floating-point numbers
) -> None:
    """Every piece to its rank: all_gather, all_to_all. Sizes in elements. Grid: `config.programs`.

    Example: rank 0 of 2, x = [1 2 3], sent ((0, 2), (2, 1)), received sizes (2, 4): [1 2] goes to
    where received starts for rank 0, [3] to rank 1, and 4 elements come from there.
    """
    generation = signals.begin_call(link.signal_ptrs, rank)
    send_pieces(x_ptr, sent, link, slot_size, rank, generation, WORLD_SIZE, BLOCK, ALIGN)
    own = rank + tl.arange(0, 1)
    copy_pieces(
        piece_ptr(out_ptr, received, own, WORLD_SIZE, ALIGN),
        piece_ptr(x_ptr, sent, own, WORLD_SIZE, ALIGN),
        element(sent.sizes, own, WORLD_SIZE),
        BLOCK,
        ALIGN,
    )
    receive_pieces(
        out_ptr, received, link, slot_size, rank, generation, 0, WORLD_SIZE, BLOCK, ALIGN
    )
    if signals.end_call(link.signal_ptrs, rank, generation):
        for r in tl.static_range(WORLD_SIZE):
            signals.spoil(out_ptr + received.starts[r], received.sizes[r], SPOILS)


@triton.jit(do_not_specialize=["rank"])
def reduce_kernel(
    out_ptr,
    x_ptr,
    pieces,  # Pieces of x, one for each rank
    link,
    slot_size,
    rank,
    WORLD_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
    OP: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    SPOILS: tl.constexpr,
) -> None:
    """out = the pieces for this rank, reduced; if TWO_SHOT, all pieces, each reduced by its rank.

    Sizes in elements. Grid: `config.programs`.

    Example: 2 ranks, x = [1 2 3] on both, pieces ((0, 2), (2, 1)): out = [2 4] on rank 0 and [6] on
    rank 1; if TWO_SHOT, [2 4 6] on both.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    generation = signals.begin_call(link.signal_ptrs, rank)
    send_pieces(x_ptr, pieces, link, slot_size, rank, generation, WORLD_SIZE, BLOCK, ALIGN)
    arrived = signals.wait_for_peers(
        link.signal_ptrs, rank, WORLD_SIZE, 0, program, generation, link.timeout_ns
    )
    if arrived:
        into = piece_ptr(out_ptr, pieces, rank, WORLD_SIZE, ALIGN) if TWO_SHOT else out_ptr
        into = tl.multiple_of(into, ALIGN)
        own_ptr = piece_ptr(x_ptr, pieces, rank, WORLD_SIZE, ALIGN)
        size = element(pieces.sizes, rank, WORLD_SIZE)
        whole = vectors(size, ALIGN, x_ptr.dtype.element_ty.primitive_bitwidth // 8)
        for block in range(program, cdiv(whole, BLOCK), programs):
            offs = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            reduce_elements(
                into, own_ptr, offs, offs < whole, link, slot_size, rank, generation,
                WORLD_SIZE, ALIGN, OP, TWO_SHOT,
            )  # fmt: skip
        if program == whole // BLOCK % programs:
            offs = tl.cast(whole, tl.int64) + tl.arange(0, 16)
            reduce_elements(
                into, own_ptr, offs, offs < size, link, slot_size, rank, generation,
                WORLD_SIZE, ALIGN, OP, TWO_SHOT,
            )  # fmt: skip
        if TWO_SHOT:
            signals.signal_peers(link.signal_ptrs, rank, WORLD_SIZE, 1, program, generation)
            receive_pieces(
                out_ptr, pieces, link, slot_size, rank, generation, 1, WORLD_SIZE, BLOCK, ALIGN
            )
    if signals.end_call(link.signal_ptrs, rank, generation):
        if TWO_SHOT:
            for r in tl.static_range(WORLD_SIZE):
                signals.spoil(out_ptr + pieces.starts[r], pieces.sizes[r], SPOILS)
        else:
            signals.spoil(out_ptr, element(pieces.sizes, rank, WORLD_SIZE), SPOILS)
