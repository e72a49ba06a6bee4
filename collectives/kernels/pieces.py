"""Pieces of tensors, as the programs of `kernel_collectives` send, receive and add them up.

The protocol is told there: who waits for whom, and why nothing races.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from weft.collectives.device import signals
from weft.collectives.device.device_math import cdiv, divided, either_ptr, element, rounded


class Pieces(NamedTuple):
    """One piece of a tensor for each rank: start and size, (W,) each, in elements."""

    starts: Any
    sizes: Any


@triton.jit
def piece_slot(link, owner, slot, slot_size, generation, dtype: tl.constexpr):
    """Where a slot of `owner` begins or, from slot W on, a finished piece."""
    half = signals.half_ptr(link.buffer_ptrs, owner, generation, link.half_bytes, dtype)
    return tl.multiple_of(half + slot * tl.cast(slot_size, tl.int64), 16)


@triton.jit
def piece_ptr(ptr, pieces, rank, WORLD_SIZE: tl.constexpr, ALIGN: tl.constexpr):
    """Where the piece of `rank` begins."""
    return tl.multiple_of(ptr + element(pieces.starts, rank, WORLD_SIZE), ALIGN)


@triton.jit
def vectors(size, ALIGN: tl.constexpr, ITEM_BYTES: tl.constexpr):
    """How many of `size` elements fill whole accesses of ALIGN bytes."""
    return size // (ALIGN // ITEM_BYTES) * (ALIGN // ITEM_BYTES)


@triton.jit
def copy_pieces(dst, src, sizes, BLOCK: tl.constexpr, ALIGN: tl.constexpr):
    """dst[i][:sizes[i]] = src[i][:sizes[i]] for all i, the blocks of this program.

    All begin at multiples of ALIGN bytes.
    """
    blocks = cdiv(signals.greatest(sizes), BLOCK)
    whole = vectors(sizes, ALIGN, src.dtype.element_ty.primitive_bitwidth // 8)[:, None]
    dst, src, sizes = dst[:, None], src[:, None], sizes[:, None]
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        offs = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
        # The rest of a piece, less than a vector, belongs to the block it lies in, as ranks may
        # differ in ALIGN.
        rest = tl.cast(whole, tl.int64) + tl.arange(0, 16)[None, :]
        is_rest = (rest < sizes) & (whole // BLOCK == block)
        values = tl.load(src + offs, mask=offs < whole)
        last = tl.load(src + rest, mask=is_rest)
        tl.store(dst + offs, values, mask=offs < whole)
        tl.store(dst + rest, last, mask=is_rest)


@triton.jit
def send_pieces(
    x_ptr,
    pieces,
    link,
    slot_size,
    rank,
    generation,
    WORLD_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Step 1: store each peer's piece of x in its slot `rank`, and signal all."""
    lanes, peers = signals.peer_lanes(rank + 1, WORLD_SIZE)
    slots = piece_slot(link, peers, rank, slot_size, generation, x_ptr.dtype.element_ty)
    sizes = tl.where(lanes < WORLD_SIZE - 1, element(pieces.sizes, peers, WORLD_SIZE), 0)
    copy_pieces(slots, piece_ptr(x_ptr, pieces, peers, WORLD_SIZE, ALIGN), sizes, BLOCK, ALIGN)
    signals.signal_peers(link.signal_ptrs, rank, WORLD_SIZE, 0, tl.program_id(0), generation)


@triton.jit
def receive_pieces(
    out_ptr,
    pieces,
    link,
    slot_size,
    rank,
    generation,
    PHASE: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Copy the peers' pieces to out once announced: slots in phase 0, finished pieces in 1."""
    if signals.wait_for_peers(
        link.signal_ptrs, rank, WORLD_SIZE, PHASE, tl.program_id(0), generation, link.timeout_ns
    ):
        lanes, peers = signals.peer_lanes(rank + 1, WORLD_SIZE)
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        slots = piece_slot(link, rank, PHASE * WORLD_SIZE + peers, slot_size, generation, dtype)
        sizes = tl.where(lanes < WORLD_SIZE - 1, element(pieces.sizes, peers, WORLD_SIZE), 0)
        into = piece_ptr(out_ptr, pieces, peers, WORLD_SIZE, ALIGN)
        copy_pieces(into, slots, sizes, BLOCK, ALIGN)


@triton.jit
def combined(a, b, OP: tl.constexpr):
    """a op b, NaN where either is."""
    if OP == "max":
        result = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "min":
        result = tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "product":
        result = a * b
    else:
        result = a + b
    return result


@triton.jit
def _term(own_ptr, slots, slot_size, offs, mask, rank, r, ALIGN: tl.constexpr):
    """Elements `offs` of rank r's piece for this rank."""
    slot = slots + r * tl.cast(slot_size, tl.int64)
    pointer = either_ptr(rank == r, own_ptr, slot)
    return tl.load(tl.multiple_of(pointer, ALIGN) + offs, mask=mask)


@triton.jit
def reduce_elements(
    out_ptr,  # where this rank's reduced piece begins
    own_ptr,  # where its own piece for itself begins
    offs,
    mask,
    link,
    slot_size,
    rank,
    generation,
    WORLD_SIZE: tl.constexpr,
    ALIGN: tl.constexpr,
    OP: tl.constexpr,
    TWO_SHOT: tl.constexpr,
):
    """Reduce elements `offs` of all ranks' pieces for this one, in rank order, and store them."""
    dtype: tl.constexpr = own_ptr.dtype.element_ty
    slots = piece_slot(link, rank, 0, slot_size, generation, dtype)
    half: tl.constexpr = dtype == tl.float16 or dtype == tl.bfloat16
    wide: tl.constexpr = tl.float32 if half else dtype
    total = _term(own_ptr, slots, slot_size, offs, mask, rank, 0, ALIGN).to(wide)
    for r in tl.static_range(1, WORLD_SIZE):
        term = _term(own_ptr, slots, slot_size, offs, mask, rank, r, ALIGN).to(wide)
        total = combined(total, term, OP)
    if OP == "avg":
        total = divided(total, WORLD_SIZE)
    if half:
        total = rounded(total, dtype)
    tl.store(out_ptr + offs, total, mask=mask)
    if TWO_SHOT:
        for step in range(1, WORLD_SIZE):
            peer = (rank + step) % WORLD_SIZE
            finished = piece_slot(link, peer, WORLD_SIZE + rank, slot_size, generation, dtype)
            tl.store(finished + offs, total, mask=mask)
