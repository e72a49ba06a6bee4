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

Whole tiles lie in stripes of 16 rows, each a plane of its words 0, then one of words 1 and of 2. In
a plane (16, C), row 8 b + r and column 8 j + 2 q + e follow each other as j, r, q, b, e: so each
thread of NVIDIA's matrix units holds 16 bytes that lie together, and a warp 512, of its sums.

The NVLink switch can add up instead what lies at one place of every rank: in fp32, or in 16 bits,
where it adds both halves of a word, whichever numbers they are; of 24 bits it could add nothing.

Words are stored and loaded as fp32 but never computed with. Numbers a quarter of the row apart are
held by one thread: in the layout of tensor cores it has the same columns of every quarter.
"""

# mypy: disable-error-code="assignment"
# Tuples of as many parts as a wire has words.
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
def upper_bits(x):
    """fp32 as uint32, rounded to its upper 24 bits, ties away from zero; the lower 8 are noise."""
    bits = x.to(tl.uint32, bitcast=True)
    # The NaN of tensor cores, 0x7fffffff, would become -0.
    return tl.where(x == x, bits + 0x80, 0x7FC00000)


@triton.jit
def packed_word(x, last):
    """The upper 24 bits of x, fp32, below the lowest 8 bits of `last`."""
    return ((upper_bits(x) >> 8) | (last << 24)).to(tl.float32, bitcast=True)


@triton.jit
def words_unpacked(u, v, w):
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
def pair(left, right, BFLOAT16: tl.constexpr):
    """Two numbers rounded to 16 bits, in one word."""
    dtype: tl.constexpr = tl.bfloat16 if BFLOAT16 else tl.float16
    low = rounded(left, dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
    high = rounded(right, dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
    return (low | (high << 16)).to(tl.float32, bitcast=True)


@triton.jit
def parted(word, BFLOAT16: tl.constexpr):
    """The inverse of `pair`, in fp32."""
    bits = word.to(tl.uint32, bitcast=True)
    if BFLOAT16:
        left = (bits << 16).to(tl.float32, bitcast=True)
        right = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        left = (bits & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        right = (bits >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return left, right


@triton.jit
def _store_plane(plane_ptr, words, V: tl.constexpr):
    """Store the words of a tile's plane, (block_m, V.plane)."""
    PITCH: tl.constexpr = V.stripe * V.row_words
    if V.stripe == 16:
        STRIPES: tl.constexpr = V.tiles.block_m // 16
        words = words.reshape(STRIPES, 2, 8, V.plane // 8, 4, 2).permute(3, 0, 2, 4, 1, 5)
        words = words.reshape(V.plane // 8, STRIPES * 128)
        along = tl.arange(0, STRIPES * 128)
        # Two dims, of which the last is contiguous, so that its layout is that of the words.
        offs = tl.arange(0, V.plane // 8)[:, None] * 128
        offs += (along // 128 * PITCH + along % 128)[None, :]
    else:
        offs = tl.arange(0, V.tiles.block_m)[:, None] * PITCH + tl.arange(0, V.plane)[None, :]
    tl.store(plane_ptr + offs, words)


@triton.jit
def send_tile(tile_ptr, acc, V: tl.constexpr):
    """Send a whole tile of partial sums, in stripes: V is a SumVariant."""
    PLANE: tl.constexpr = V.stripe * V.plane
    if V.wire.bits == 16:
        left, right = tiles.halves(acc)
        _store_plane(tile_ptr, pair(left, right, V.wire.bfloat16), V)
    elif V.wire.bits == 24:
        left, right = tiles.halves(acc)
        a, b = tiles.halves(left)
        c, d = tiles.halves(right)
        last = upper_bits(d)
        _store_plane(tile_ptr, packed_word(a, last >> 8), V)
        _store_plane(tile_ptr + PLANE, packed_word(b, last >> 16), V)
        _store_plane(tile_ptr + 2 * PLANE, packed_word(c, last >> 24), V)
    else:
        _store_plane(tile_ptr, acc, V)


@triton.jit
def load_parts(rows_ptr, V: tl.constexpr):
    """V.reduce_m rows that `send_tile` has sent, fp32: all, halves or quarters of their columns,
    each (stripes, numbers).
    """
    PLANE: tl.constexpr = V.stripe * V.plane
    offs = tl.arange(0, V.reduce_m // V.stripe)[:, None] * (V.stripe * V.row_words)
    ptrs = rows_ptr + offs + tl.arange(0, PLANE)[None, :]
    if V.wire.bits == 16:
        parts = parted(tl.load(ptrs), V.wire.bfloat16)
    elif V.wire.bits == 24:
        parts = words_unpacked(tl.load(ptrs), tl.load(ptrs + PLANE), tl.load(ptrs + 2 * PLANE))
    else:
        parts = (tl.load(ptrs),)
    return parts


@triton.jit
def empty_parts(V: tl.constexpr):
    """Parts to which others can be added, bit by bit: -0 + x is x."""
    empty = tl.full((V.reduce_m // V.stripe, V.stripe * V.plane), -0.0, dtype=tl.float32)
    PARTS: tl.constexpr = 4 if V.wire.bits == 24 else 32 // V.wire.bits
    return (empty,) * PARTS


@triton.jit
def added(a, b):
    """Parts added up, each to each."""
    sums = a
    if len(a) == 1:
        sums = (a[0] + b[0],)
    elif len(a) == 2:
        sums = (a[0] + b[0], a[1] + b[1])
    else:
        sums = (a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3])
    return sums


@triton.jit
def parts_beside(parts):
    """Parts in the order of rows as rows."""
    rows = parts[0]
    if len(parts) == 2:
        rows = tiles.beside(parts[0], parts[1])
    elif len(parts) == 4:
        rows = tiles.beside(tiles.beside(parts[0], parts[1]), tiles.beside(parts[2], parts[3]))
    return rows


@triton.jit
def _as_rows(part, V: tl.constexpr):
    if V.stripe == 16:
        part = part.reshape(V.reduce_m // 16, V.plane // 8, 8, 4, 2, 2)
        part = part.permute(0, 4, 2, 1, 3, 5).reshape(V.reduce_m, V.plane)
    return part


@triton.jit
def joined(parts, V: tl.constexpr):
    """The rows whose parts these are: (V.reduce_m, block_n)."""
    if len(parts) == 4:
        parts = (
            _as_rows(parts[0], V), _as_rows(parts[1], V), _as_rows(parts[2], V),
            _as_rows(parts[3], V),
        )  # fmt: skip
    elif len(parts) == 2:
        parts = (_as_rows(parts[0], V), _as_rows(parts[1], V))
    else:
        parts = (_as_rows(parts[0], V),)
    return parts_beside(parts)


@triton.jit
def sum_of_ranks(link, multicast_ptr, at, V: tl.constexpr):
    """Rows that lie `at` bytes into every rank's data, as `send_tile` has stored them there, added
    up over the ranks in the switch's order: (V.reduce_m, block_n) fp32.
    """
    tl.static_assert(V.wire.bits != 24, "the switch adds up numbers of 32 and of 16 bits")
    STRIPES: tl.constexpr = V.reduce_m // V.stripe
    VECTORS: tl.constexpr = V.reduce_m * V.row_words // 4
    places = at + tl.arange(0, VECTORS).to(tl.int64) * 16
    every = tl.arange(0, VECTORS) >= 0
    if V.wire.bits == 16:
        HALF: tl.constexpr = tl.bfloat16 if V.wire.bfloat16 else tl.float16
        sums = switch.load_sums(link, multicast_ptr, places, every, HALF, V.world_size)
        parts = tl.split(tl.reshape(sums, (STRIPES, V.stripe * V.plane, 2)))
    else:
        sums = switch.load_sums(link, multicast_ptr, places, every, tl.float32, V.world_size)
        parts = (tl.reshape(sums, (STRIPES, V.stripe * V.plane)),)
    return joined(parts, V)


@triton.jit
def show_rows(link, multicast_ptr, at, rows, WORLD_SIZE: tl.constexpr):
    """Store rows, one after the other, `at` bytes into the data of all ranks."""
    LANES: tl.constexpr = 128 // rows.dtype.primitive_bitwidth
    VECTORS: tl.constexpr = rows.shape[0] * rows.shape[1] // LANES
    places = at + tl.arange(0, VECTORS).to(tl.int64) * 16
    values = tl.reshape(rows, (VECTORS, LANES))
    every = tl.arange(0, VECTORS) >= 0
    switch.store_everywhere(link, multicast_ptr, places, values, every, WORLD_SIZE)
