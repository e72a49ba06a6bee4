"""Rows of other ranks' tokens, pulled by index, as tiles of `dispatch_kernel` need them.

    ranks, rows   0 2 | 1 0 | 1 4 | ..      owners' halves -> fetched | x_0[2] | x_1[0] | .. |
                                                          chunk 0           1

Copy programs take turns at chunks of rows. A chunk is announced in the rank's own word (1, 0,
chunk), of which there are `MAX_PROGRAMS` for each rank; those of all ranks follow each other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from weft.collectives.device import signals
from weft.collectives.device.device_math import rounded
from weft.collectives.ranks.pad import MAX_PROGRAMS
from weft.kernels.device import tiles
from weft.kernels.device.gathers import scales_ptr

_MAX_PROGRAMS = signals.Constant(MAX_PROGRAMS)


class PulledRows(NamedTuple):
    """Which rows a call pulls, from where, into what.

    Fields: RowTable; how many of its rows are real, and are announced together; the way to the
    peers, this rank, the number of the call; of what is published the elements from row to row, and
    the byte at which the numbers begin, or the scales of fp8 rows; Rows fetched, and their columns;
    for how many rows of each rank the own half has places, where they are delivered.
    """

    table: Any
    total: Any
    chunk_rows: Any
    link: Any
    rank: Any
    generation: Any
    pitch: Any
    numbers_at: Any
    fetched: Any
    K: Any
    most: Any


@triton.jit
def chunk_of(total, chunk_rows, V: tl.constexpr):
    """How many of `total` rows are announced together: more if there are too few words. Where no
    tile waits for them, as many as give every program one chunk.
    """
    WEIGHTS: tl.constexpr = V.weights
    rows = tl.maximum(chunk_rows, tiles.cdiv(total, V.world_size * _MAX_PROGRAMS))
    if WEIGHTS == 0:
        rows = tl.maximum(tiles.cdiv(tiles.cdiv(total, V.copies), V.copy_m), 1) * V.copy_m
    return rows


@triton.jit
def _published(pull, rows, inside):
    """The halves of the owners of `rows`, as addresses, and those among the rows `inside`."""
    source = tl.load(pull.table.ranks + rows, mask=inside, other=0)
    halves = tl.load(pull.link.buffer_ptrs + source)
    return halves + (pull.generation & 1) * pull.link.half_bytes


@triton.jit
def rows_at_owners(pull, rows, inside, dtype: tl.constexpr):
    """Pointers to the rows as their owners have published them."""
    halves = tl.multiple_of(_published(pull, rows, inside), [16])
    number = tl.load(pull.table.rows + rows, mask=inside, other=0).to(tl.int64)
    return halves.to(tl.pointer_type(dtype)) + number * pull.pitch


@triton.jit
def delivered_rows(pull, rows, inside, dtype: tl.constexpr, QUANTIZED: tl.constexpr):
    """Pointers to the rows where their owners have put them, in the rank's own half, and to their
    scales (else to the rows again: Triton 3.6 cannot return None).
    """
    link, generation = pull.link, pull.generation
    half = signals.half_ptr(link.buffer_ptrs, pull.rank, generation, link.half_bytes, dtype)
    source = tl.load(pull.table.ranks + rows, mask=inside, other=0).to(tl.int64)
    places = source * pull.most + tl.load(pull.table.rows + rows, mask=inside, other=0)
    ptrs = half + places * pull.pitch
    scales = ptrs
    if QUANTIZED:
        scales = scales_ptr(link, pull.rank, generation, pull.numbers_at) + places
    return ptrs, scales


@triton.jit
def _pulled_places(pull, number, across, V: tl.constexpr):
    """Rows and columns of a program's block `number`, through all of its chunks, a mask of what is
    inside, and the row after its chunk's last.
    """
    in_chunk = tiles.cdiv(pull.chunk_rows, V.copy_m) * across
    first = (tl.program_id(0) + number // in_chunk * V.copies) * pull.chunk_rows
    last = tl.minimum(first + pull.chunk_rows, pull.total)
    rows = first + number % in_chunk // across * V.copy_m + tl.arange(0, V.copy_m)
    columns = number % across * V.copy_n + tl.arange(0, V.copy_n)
    inside = (rows < last)[:, None] & (columns < pull.K)[None, :]
    return rows, columns, inside, last


@triton.jit
def _pulled_block(pull, number, across, dtype: tl.constexpr, V: tl.constexpr):
    rows, columns, inside, last = _pulled_places(pull, number, across, V)
    ptrs = rows_at_owners(pull, rows, rows < last, dtype)
    return tl.load(ptrs[:, None] + columns[None, :], mask=inside)


@triton.jit
def _scales_of(pull, number, across, V: tl.constexpr):
    """Those of the rows of block `number`; 1 if they have none."""
    scales = 1.0
    if V.quantized:
        rows, _, _, last = _pulled_places(pull, number, across, V)
        inside = rows < last
        shown = (_published(pull, rows, inside) + pull.numbers_at).to(tl.pointer_type(tl.float32))
        scales = tl.load(shown + tl.load(pull.table.rows + rows, mask=inside, other=0), mask=inside)
    return scales


@triton.jit
def wait_for_owners(pull, V: tl.constexpr):
    """Whether all peers have published."""
    link = pull.link
    return signals.wait_for_peers(
        link.signal_ptrs, pull.rank, V.world_size, 0, 0, pull.generation, link.timeout_ns
    )


@triton.jit
def fetch_rows(pull, V: tl.constexpr):
    """A copy program: bring its chunks of the rows, announcing each."""
    fetched, link = pull.fetched, pull.link
    dtype: tl.constexpr = fetched.ptr.dtype.element_ty
    wire: tl.constexpr = tl.float8e4nv if V.quantized else dtype
    came, first = wait_for_owners(pull, V), tl.program_id(0)
    chunks = tiles.cdiv(pull.total, pull.chunk_rows)
    across = tl.maximum(tiles.cdiv(pull.K, V.copy_n), 1)
    in_chunk = tiles.cdiv(pull.chunk_rows, V.copy_m) * across
    if came & (first < chunks):
        # The next block, if only of the next chunk, is loaded while one is stored: a link is busy.
        block = _pulled_block(pull, 0, across, wire, V)
        scales = _scales_of(pull, 0, across, V)
        for number in range(tiles.cdiv(chunks - first, V.copies) * in_chunk):
            following = _pulled_block(pull, number + 1, across, wire, V)
            following_scales = _scales_of(pull, number + 1, across, V)
            if V.quantized:
                values = rounded(tiles.widened(block) * scales[:, None], dtype)
            else:
                values = block
            rows, columns, inside, last = _pulled_places(pull, number, across, V)
            into = fetched.ptr + rows.to(tl.int64)[:, None] * pull.K
            tl.store(into + columns[None, :], values, mask=inside)
            block, scales = following, following_scales
            if number % in_chunk == in_chunk - 1:
                chunk = first + number // in_chunk * V.copies
                if fetched.scales is not None:
                    _fetch_numbers(pull, chunk * pull.chunk_rows, last, V.copy_m)
                word = signals.slot_ptr(link.signal_ptrs, pull.rank, V.world_size, 1, 0, chunk)
                signals.signal_local(word, pull.generation)


@triton.jit
def _fetch_numbers(pull, first, last, BLOCK: tl.constexpr):
    """The numbers of rows first..last-1."""
    for start in range(first, last, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        inside = rows < last
        shown = (_published(pull, rows, inside) + pull.numbers_at).to(tl.pointer_type(tl.float32))
        slots = tl.load(pull.table.slots + rows, mask=inside, other=0)
        numbers = tl.load(shown + slots, mask=inside, other=0.0)
        tl.store(pull.fetched.scales + rows, numbers, mask=inside)


@triton.jit
def wait_for_rows(pull, first, last, V: tl.constexpr):
    """Wait until rows first..last are fetched. False on a time-out."""
    link, source = pull.link, 0
    first, last = first // pull.chunk_rows, last // pull.chunk_rows
    return signals.wait_for_own(
        link.signal_ptrs,
        pull.rank,
        V.world_size,
        1,
        source,
        first,
        last,
        pull.generation,
        link.timeout_ns,
        1,
    )
