"""How the gathering kernels exchange shards: owners publish them, copy programs fetch them.

Legend: W ranks; x_r (rows, columns) is the shard of rank r. In the call of generation g every rank
publishes its shard in half g % 2 of its symmetric memory, rows `pitch` elements apart. If the shard
is scaled fp8, the fp32 scale of each row lies `scales_at` bytes into the half, behind the rows.

    rank 0           rank 1                                         rank 2
    x -> X_0         x -> X_1 (peers read it)                       x -> X_2
      |              gathered [ x_0 | (x_1) | x_2 ]                   |
      +---- copied once ---------^              ^---- copied once ----+

Each remote byte crosses the link once, however many tiles read it. The rank's own rows of
`gathered` are written only if the caller wants them.

Protocol
  1. `_publish_kernel`, all programs: copy x into the rank's own half, or quantize it to fp8 there,
     which makes the scales. Each takes a ticket; the last one, which sees the stores of all
     (acquire), sets GENERATION = g and signals the word (0, rank, 0) of every peer's pad: release
     at system scope.
  2. `fetch_shards`, in copy program c of C: for the peers rank+1, rank+2, ...: wait for the peer's
     word (acquire, system scope), after which its half may be read; copy every C-th of all peers'
     chunks of rows to `gathered`, and signal the rank's own word (1, peer, chunk): release at
     device scope. Chunks may be cut into parts by columns, each with a word of its own.
     Alternatively copy engines do this, in streams beside the consumer's: see `copy_engines`.
  3. `wait_for_rows_of`, in any later program: wait for the words of the chunks that a tile reads.

Why it neither races nor deadlocks: copy programs wait only for peers' publish kernels, which wait
for nobody; the others wait for copy programs, which have smaller numbers. Every copy program waits
for every peer, so that no call ends before all peers have published (rule 2 of
`weft.collectives.device.signals`), and the publish kernel runs after this rank's previous consumer
(rule 1: a stream orders the launches of a channel).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from weft.collectives.device import signals
from weft.collectives.device.device_math import cdiv, element
from weft.collectives.device.launches import launching
from weft.collectives.memory.workspace import Workspace, check_room, link_of
from weft.collectives.ranks.pad import MAX_PROGRAMS
from weft.kernels.device import splits
from weft.kernels.device.copies import copied_by_engine, copy_block, expect_engines, quantize_block
from weft.kernels.device.operands import NO_SCALES, Scales, matrix
from weft.kernels.engine.fp8 import FP8

_MAX_PROGRAMS = signals.Constant(MAX_PROGRAMS)
_PITCH = 16  # rows of a published shard start at multiples of this many elements


class Shards(NamedTuple):
    """The shards of one call, as kernels know them.

    Fields: the way to the peers, this rank, the number of the call; where each shard begins in the
    gathered matrix (W + 1 numbers) and the columns of that; of a published shard the elements from
    row to row and the byte of the half at which the scales begin; the rows announced together.
    """

    link: Any
    rank: Any
    generation: Any
    offsets: Any
    columns: Any
    pitch: Any
    scales_at: Any
    chunk_rows: Any


@dataclass(frozen=True)
class Fetch:
    """How shards are fetched, as a constant of a kernel.

    Attributes:
        world_size: of the group.
        programs: how many programs of the kernel copy; 0 if copy engines do it, or nobody.
        copy_m, copy_n: block that a copy moves at a time.
        with_own: whether the rank's own shard is copied, too.
        parts: into how many parts of columns a chunk is cut.
        part_k: what the columns of a part are a multiple of.
    """

    world_size: int
    programs: int
    copy_m: int
    copy_n: int
    with_own: bool = False
    parts: int = 1
    part_k: int = 1


@triton.jit(do_not_specialize=["rows", "scales_at", "rank"])
def _publish_kernel(
    x,  # Matrix (rows, columns)
    x_scales,  # of the rows
    link,
    rows,
    columns,
    pitch,
    scales_at,
    rank,
    WORLD_SIZE: tl.constexpr,
    COPY_M: tl.constexpr,
    COPY_N: tl.constexpr,
    SCALES: tl.constexpr,  # of a row
    QUANTIZE: tl.constexpr = False,  # to fp8, with a scale for each row
    BY_ENGINES: tl.constexpr = 0,  # chunks, a power of 2, in which copy engines fetch a shard
) -> None:
    """Copy x into the own half of the next generation and tell every peer. Grid: any.

    Example: rank 1 of 3, generation 6 before: x lies in half 1 (rows `pitch` apart), GENERATION is
    7, and word (0, 1, 0) of the pads of ranks 2 and 0 is 7.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    generation = signals.begin_call(link.signal_ptrs, rank)
    dtype: tl.constexpr = tl.uint8 if QUANTIZE else x.ptr.dtype.element_ty
    half = signals.half_ptr(link.buffer_ptrs, rank, generation, link.half_bytes, dtype)
    share = cdiv(rows, programs)
    first = tl.minimum(program * share, rows).to(tl.int64)
    count = tl.minimum(share, rows - first)
    into, source = half + first * pitch, x.ptr + first * x.stride_m
    if QUANTIZE:
        scales = scales_ptr(link, rank, generation, scales_at) + first
        quantize_block(
            into, scales, source, count, columns, pitch, x.stride_m, x.stride_n, COPY_M, COPY_N
        )
    else:
        copy_block(into, source, count, columns, pitch, x.stride_m, x.stride_n, COPY_M, COPY_N)
    if x_scales.ptr is not None:
        shown = scales_ptr(link, rank, generation, scales_at) + first * SCALES
        scales = x_scales.ptr + first * SCALES * x_scales.stride
        copy_block(shown, scales, count * SCALES, 1, 1, x_scales.stride, 0, COPY_M, 1)
    if signals.is_last_program(link.signal_ptrs, rank, programs):
        if BY_ENGINES > 0:
            expect_engines(link.signal_ptrs, rank, generation, WORLD_SIZE, BY_ENGINES)
        signals.set_generation(link.signal_ptrs, rank, generation)
        signals.signal_peers(link.signal_ptrs, rank, WORLD_SIZE, 0, 0, generation)


@triton.jit
def scales_ptr(link, rank, generation, scales_at):
    """Address of the scales of the rows that `rank` has published."""
    half = signals.half_ptr(link.buffer_ptrs, rank, generation, link.half_bytes, tl.int8)
    return (half + scales_at).to(tl.pointer_type(tl.float32))


@triton.jit
def fetch_shards(shards, gathered, group_rows, FETCH: tl.constexpr):
    """A copy program: bring its chunks of all peers' shards into `gathered`, announcing each.

    In more than one part they are fetched in groups of `group_rows` rows, counted from the rank's
    own first one; in each group the first part of the columns of all rows precedes the second.
    """
    W: tl.constexpr = FETCH.world_size
    PROGRAMS: tl.constexpr = FETCH.programs
    PARTS: tl.constexpr = FETCH.parts
    program = tl.program_id(0)
    link, rank, offsets = shards.link, shards.rank, shards.offsets
    generation, chunk_rows = shards.generation, shards.chunk_rows
    own_rows = element(offsets, rank + 1, W + 1)
    own_rows -= element(offsets, rank, W)
    # At least one: each program waits for all peers, also for those with empty shards.
    groups = tl.maximum(cdiv(offsets[W], group_rows), 1) if PARTS > 1 else 1
    arrived = True
    for turn in range(groups * PARTS):
        group, part = turn // PARTS, turn % PARTS
        before = 0  # chunks of the preceding peers
        row = own_rows  # where a shard begins
        for step in range(1, W + FETCH.with_own):
            # The rank's own shard is last, as nobody waits for it.
            peer = (rank + step) % W
            begin = element(offsets, peer, W).to(tl.int64)
            rows = element(offsets, peer + 1, W + 1) - begin
            chunks = cdiv(rows, chunk_rows).to(tl.int32)
            low, high = _chunks_before(group * group_rows - row, chunk_rows, chunks), chunks
            if group < groups - 1:
                high = _chunks_before((group + 1) * group_rows - row, chunk_rows, chunks)
            # Before its first chunk, or in the last group if it has none.
            begins = (low == 0) & ((high > 0) | (group == groups - 1)) & (part == 0)
            if begins & (peer != rank):
                arrived &= signals.wait_for(
                    link.signal_ptrs, rank, W, 0, peer, 0, generation, link.timeout_ns
                )
            # Chunks are dealt out in one sequence through all peers, so that shards of few chunks
            # are fetched at the same time by different programs.
            low += (program + PROGRAMS - (before + low) % PROGRAMS) % PROGRAMS
            before += chunks
            row += rows.to(tl.int32)
            if arrived & (rows > 0):
                columns = splits.part_of(shards.columns, part, FETCH.part_k, PARTS)
                for chunk in range(low, high, PROGRAMS):
                    _fetch_chunk(shards, gathered, peer, begin, rows, columns, chunk, part, FETCH)


@triton.jit
def _fetch_chunk(shards, gathered, peer, begin, rows, columns, chunk, part, FETCH: tl.constexpr):
    """Copy the columns from columns[0] to columns[1] of a chunk of `peer`'s shard of `rows` rows,
    and announce them as `part`. The scales of the rows are copied with the last part.
    """
    COPY_M: tl.constexpr = FETCH.copy_m
    COPY_N: tl.constexpr = FETCH.copy_n
    PARTS: tl.constexpr = FETCH.parts
    W: tl.constexpr = FETCH.world_size
    link, rank, generation, pitch = shards.link, shards.rank, shards.generation, shards.pitch
    dtype: tl.constexpr = gathered.ptr.dtype.element_ty
    shard_ptr = signals.half_ptr(link.buffer_ptrs, peer, generation, link.half_bytes, dtype)
    first = (chunk * shards.chunk_rows).to(tl.int64)
    count = tl.minimum(shards.chunk_rows, rows - first)
    into = gathered.ptr + (begin + first) * shards.columns + columns[0]
    source, width = shard_ptr + first * pitch + columns[0], columns[1] - columns[0]
    copy_block(into, source, count, width, shards.columns, pitch, 1, COPY_M, COPY_N)
    if gathered.scales is not None and part == PARTS - 1:
        shown = scales_ptr(link, peer, generation, shards.scales_at)
        copy_block(gathered.scales + begin + first, shown + first, count, 1, 1, 1, 0, COPY_M, 1)
    word = _part_word(chunk, part, PARTS)
    slot = signals.slot_ptr(link.signal_ptrs, rank, W, 1, peer, word)
    signals.signal_local(slot, generation)


@triton.jit
def _chunks_before(row, chunk_rows, chunks):
    """How many of a shard's chunks begin before its row number `row`."""
    return tl.minimum(cdiv(tl.maximum(row, 0), chunk_rows), chunks)


@triton.jit
def _part_word(chunk, part, PARTS: tl.constexpr):
    """The word in which a part of a chunk is announced."""
    return chunk + part * (_MAX_PROGRAMS // PARTS)


@triton.jit
def wait_for_rows_of(shards, peer, low, high, part, FETCH: tl.constexpr):
    """Wait until `part` of rows low..high-1 of `peer`'s shard is there. False on a time-out."""
    PARTS: tl.constexpr = FETCH.parts
    PROGRAMS: tl.constexpr = FETCH.programs
    link, chunk_rows = shards.link, shards.chunk_rows
    first, last = low // chunk_rows, (high - 1) // chunk_rows
    announced = shards.generation
    if PROGRAMS == 0:
        announced = copied_by_engine(announced)
    return signals.wait_for_own(
        link.signal_ptrs, shards.rank, FETCH.world_size, 1, peer, _part_word(first, part, PARTS),
        _part_word(last, part, PARTS), announced, link.timeout_ns, 1,
    )  # fmt: skip


def pitch_of(columns: int) -> int:
    """Elements from row to row of a published shard."""
    return -(-columns // _PITCH) * _PITCH


def scales_offset(rows: int, columns: int, dtype: torch.dtype) -> int:
    """Bytes into the half at which the scales begin, if the largest shard has `rows` rows."""
    return rows * pitch_of(columns) * dtype.itemsize


def workspace_bytes(rows: int, columns: int, dtype: torch.dtype) -> int:
    """Symmetric memory that each rank needs, given the largest shard's rows and columns."""
    scales = 4 * rows if dtype.itemsize == 1 else 0
    return scales_offset(rows, columns, dtype) + scales


def publish(
    x: torch.Tensor,
    ws: Workspace,
    pitch: int,
    programs: int,
    copy_m: int,
    copy_n: int,
    x_scales: Scales = NO_SCALES,
    scales_at: int = 0,
    scales_a_row: int = 1,
    quantize: bool = False,
    chunks_by_engines: int = 0,
) -> None:
    """Enqueue the start of the next call on `ws`: publish x (rows, columns) to all peers.

    `x_scales` may have several numbers for each row, in turn. `quantize`: in fp8, with scales that
    are found here. `chunks_by_engines`: a power of 2, into how many at most copy engines cut a
    shard; it lies in the first half then.

    Raises:
        ValueError: `ws` is too small.
    """
    needed = workspace_bytes(x.shape[0], pitch, FP8 if quantize else x.dtype)
    check_room(ws, needed, "workspace_bytes of the largest shard")
    blocks, link = -(-max(x.shape[0], 1) // copy_m), link_of(ws)
    if chunks_by_engines:
        link = link._replace(half_bytes=0)
    launching(_publish_kernel, min(programs, blocks))(
        matrix(x), x_scales, link, *x.shape, pitch, scales_at, ws.rank, WORLD_SIZE=ws.world_size,
        COPY_M=copy_m, COPY_N=copy_n, SCALES=scales_a_row, QUANTIZE=quantize,
        BY_ENGINES=chunks_by_engines, num_warps=8,
    )  # fmt: skip
