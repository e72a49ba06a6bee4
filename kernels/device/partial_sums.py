"""How partial sums travel and are added up: a tile of fp32, of 24 or of 16 bits, in a slot.

A tile of rank r's x_r @ w_r travels as a block of its own, row after row, into a slot for r. The
tile's owner adds up the W slots in rank order, in fp32. `summed_tiles` has what kernels do with it.

Partial sums travel in fp32 if the result is fp32. For a result in bf16 or fp16 they are rounded to
their upper 24 bits: an error of 2^-16, against 2^-8 or 2^-11 of the result's own rounding, for a
quarter less traffic. A caller may ask for bf16 or fp16 instead, half the traffic: each partial sum
is then rounded as the result is. Two numbers, half a row apart, make a word, the left one below.
Of 24 bits, four numbers, a quarter of the row apart, make three words:

    word 0   number 3, bits  8-15 | number 0, bits 8-31         NaN stays NaN, infinity infinity;
    word 1   number 3, bits 16-23 | number 1, bits 8-31         numbers from 2^128 (1 - 2^-17) on
    word 2   number 3, bits 24-31 | number 2, bits 8-31         round to infinity

The NVLink switch can add up instead what lies at one place of every rank: in fp32, or in 16 bits,
where it adds both halves of a word, whichever numbers they are; of 24 bits it could add nothing.

Words are stored and loaded as fp32 but never computed with. Numbers a quarter of the row apart are
held by one thread: in the layout of tensor cores it has the same columns of every quarter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from weft.collectives.device import switch
from weft.collectives.device.device_math import rounded
from weft.kernels.device import tiles


@dataclass(frozen=True)
class Wire:
    """In what partial sums travel: `bits` of a number, 32, 24 or 16; of 16, whether they are a
    `bfloat16` or a float16.
    """

    bits: int
    bfloat16: bool = False

    def row_words(self, columns: int) -> int:
        """Four-byte words that a row of `columns` partial sums takes."""
        return columns * self.bits // 32


def wire_of(out_dtype: torch.dtype, wire_dtype: torch.dtype | None = None) -> Wire:
    """How partial sums of a result of `out_dtype` travel: in `wire_dtype`, if one is asked for."""
    if wire_dtype is None:
        return Wire(24 if out_dtype.itemsize == 2 else 32)
    return Wire(8 * wire_dtype.itemsize, wire_dtype == torch.bfloat16)


@triton.jit
def _bits(x):
    """fp32 as uint32, rounded to its upper 24 bits, ties away from zero; the lower 8 are noise."""
    bits = x.to(tl.uint32, bitcast=True)
    # The NaN of tensor cores, 0x7fffffff, would become -0.
    return tl.where(x == x, bits + 0x80, 0x7FC00000)


@triton.jit
def _packed_word(x, last):
    """The upper 24 bits of x, fp32, below the lowest 8 bits of `last`."""
    return ((_bits(x) >> 8) | (last << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _unpacked(u, v, w):
    """The four numbers that these three words were made of."""
    u = u.to(tl.uint32, bitcast=True)
    v = v.to(tl.uint32, bitcast=True)
    w = w.to(tl.uint32, bitcast=True)
    last = ((u >> 24) << 8) | ((v >> 24) << 16) | ((w >> 24) << 24)
    return (
        (u << 8).to(tl.float32, bitcast=True),
        (v << 8).to(tl.float32, bitcast=True),
        (w << 8).to(tl.float32, bitcast=True),
        last.to(tl.float32, bitcast=True),
    )


@triton.jit
def _pair(left, right, BFLOAT16: tl.constexpr):
    """Two numbers rounded to 16 bits, in one word."""
    dtype: tl.constexpr = tl.bfloat16 if BFLOAT16 else tl.float16
    low = rounded(left, dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
    high = rounded(right, dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
    return (low | (high << 16)).to(tl.float32, bitcast=True)


@triton.jit
def _parted(word, BFLOAT16: tl.constexpr):
    """The inverse of `_pair`, in fp32."""
    bits = word.to(tl.uint32, bitcast=True)
    if BFLOAT16:
        left = (bits << 16).to(tl.float32, bitcast=True)
        right = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        left = (bits & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        right = (bits >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return left, right


@triton.jit
def send_rows(row_ptrs, acc, inside, WIRE: tl.constexpr):
    """Send rows of partial sums to row_ptrs (ROWS, 1): those `inside` (ROWS, 1), or all if None."""
    COLUMNS: tl.constexpr = acc.shape[1]
    if WIRE.bits == 16:
        left, right = tiles.halves(acc)
        ptrs = row_ptrs + tl.arange(0, COLUMNS // 2)[None, :]
        tl.store(ptrs, _pair(left, right, WIRE.bfloat16), mask=inside)
    elif WIRE.bits == 24:
        QUARTER: tl.constexpr = COLUMNS // 4
        ptrs = row_ptrs + tl.arange(0, QUARTER)[None, :]
        left, right = tiles.halves(acc)
        a, b = tiles.halves(left)
        c, d = tiles.halves(right)
        last = _bits(d)
        # One after the other: all three at once take more registers.
        tl.store(ptrs, _packed_word(a, last >> 8), mask=inside)
        tl.store(ptrs + QUARTER, _packed_word(b, last >> 16), mask=inside)
        tl.store(ptrs + 2 * QUARTER, _packed_word(c, last >> 24), mask=inside)
    elif COLUMNS > 128:
        left, right = tiles.halves(acc)
        ptrs = row_ptrs + tl.arange(0, COLUMNS // 2)[None, :]
        tl.store(ptrs, left, mask=inside)
        tl.store(ptrs + COLUMNS // 2, right, mask=inside)
    else:
        tl.store(row_ptrs + tl.arange(0, COLUMNS)[None, :], acc, mask=inside)


@triton.jit
def send_block(block_ptr, acc, WIRE: tl.constexpr, rows_left=None):
    """Send a tile of partial sums: its first `rows_left` rows, or all."""
    rows = tl.arange(0, acc.shape[0])[:, None]
    inside = None
    if rows_left is not None:
        inside = rows < rows_left
    send_rows(block_ptr + rows * (acc.shape[1] * WIRE.bits // 32), acc, inside, WIRE)


@triton.jit
def sum_of_slots(
    part_ptr,  # of a tile in slot 0: its first row there
    slot_stride,  # words
    inside,  # (ROWS, 1), whether each row was written; None: all were
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIRE: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Rows of a tile, added up over COUNT slots in order: (ROWS, COLUMNS) fp32."""
    rows = tl.arange(0, ROWS)[:, None] * (COLUMNS * WIRE.bits // 32)
    if WIRE.bits == 16:
        offs = rows + tl.arange(0, COLUMNS // 2)[None, :]
        left, right = _parted(tl.load(part_ptr + offs, mask=inside), WIRE.bfloat16)
        for slot in tl.static_range(1, COUNT):
            word = tl.load(part_ptr + slot * slot_stride + offs, mask=inside)
            next_left, next_right = _parted(word, WIRE.bfloat16)
            left += next_left
            right += next_right
        total = tiles.beside(left, right)
    elif WIRE.bits == 24:
        offs = rows + tl.arange(0, COLUMNS // 4)[None, :]
        a, b, c, d = _load_packed(part_ptr, offs, inside)
        for slot in tl.static_range(1, COUNT):
            next_a, next_b, next_c, next_d = _load_packed(
                part_ptr + slot * slot_stride, offs, inside
            )
            a += next_a
            b += next_b
            c += next_c
            d += next_d
        total = tiles.beside(tiles.beside(a, b), tiles.beside(c, d))
    else:
        offs = rows + tl.arange(0, COLUMNS)[None, :]
        total = tl.load(part_ptr + offs, mask=inside)
        for slot in tl.static_range(1, COUNT):
            total += tl.load(part_ptr + slot * slot_stride + offs, mask=inside)
    return total


@triton.jit
def _load_packed(part_ptr, offs, inside):
    QUARTER: tl.constexpr = offs.shape[1]
    u = tl.load(part_ptr + offs, mask=inside)
    v = tl.load(part_ptr + QUARTER + offs, mask=inside)
    w = tl.load(part_ptr + 2 * QUARTER + offs, mask=inside)
    return _unpacked(u, v, w)


@triton.jit
def sum_of_ranks(
    link,
    multicast_ptr,
    at,  # bytes into every rank's data: the first of the rows
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIRE: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
):
    """Rows of a tile, added up over the ranks in the switch's order: (ROWS, COLUMNS) fp32."""
    tl.static_assert(WIRE.bits != 24, "the switch adds up numbers of 32 and of 16 bits")
    WORDS: tl.constexpr = COLUMNS * WIRE.bits // 32
    VECTORS: tl.constexpr = ROWS * WORDS // 4
    places = at + tl.arange(0, VECTORS).to(tl.int64) * 16
    every = tl.arange(0, VECTORS) >= 0
    if WIRE.bits == 16:
        HALF: tl.constexpr = tl.bfloat16 if WIRE.bfloat16 else tl.float16
        sums = switch.load_sums(link, multicast_ptr, places, every, HALF, WORLD_SIZE)
        left, right = tl.split(tl.reshape(sums, (ROWS, WORDS, 2)))
        total = tiles.beside(left, right)
    else:
        sums = switch.load_sums(link, multicast_ptr, places, every, tl.float32, WORLD_SIZE)
        total = tl.reshape(sums, (ROWS, COLUMNS))
    return total


@triton.jit
def show_rows(link, multicast_ptr, at, rows, WORLD_SIZE: tl.constexpr):
    """Store rows, one after the other, `at` bytes into the data of all ranks."""
    LANES: tl.constexpr = 128 // rows.dtype.primitive_bitwidth
    VECTORS: tl.constexpr = rows.shape[0] * rows.shape[1] // LANES
    places = at + tl.arange(0, VECTORS).to(tl.int64) * 16
    values = tl.reshape(rows, (VECTORS, LANES))
    every = tl.arange(0, VECTORS) >= 0
    switch.store_everywhere(link, multicast_ptr, places, values, every, WORLD_SIZE)
