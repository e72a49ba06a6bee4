"""The pull: every rank takes blocks of other ranks' tensors, all in one call.

Each rank has a tensor x and a list of the boxes that it wants: each a strided block of the x of one
rank, or of several to be reduced in this order (half types in fp32, one rounding), and its place in
the output.

    rank 0   x_0 --> own half of the workspace   ready -->   rank 1   box: x_0[a:b, c:d] --> out[..]
    rank 1   x_1 --> own half of the workspace   ready -->   rank 0   box: x_0 + x_1    --> out[..]

Protocol, two launches in one stream.
  1. Publish: the programs copy x into this rank's half; the last one to finish signals the word
     (0, rank, 0) of every peer: release at system scope, of what all of them stored.
  2. Pull: every program takes its blocks of the boxes that lie in x; waits for the words (0, r, 0)
     of all peers (acquire, system scope); takes its blocks of the other boxes in place from the
     peers' halves. The last one sets GENERATION.

Why it neither races nor deadlocks: publishing waits for nobody, and pulling only for publishing.
Calls alternate halves; rules 1 and 2 of `weft.collectives.device.signals` hold, because a rank
publishes call g + 1 after its pull of call g has ended, and each pull waits for every peer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.collectives.device import signals
from weft.collectives.device.device_math import cdiv, divided, either_ptr, rounded
from weft.collectives.device.launches import launching
from weft.collectives.kernels.collective_launch import REDUCED, as_words, has_nan, within_budget
from weft.collectives.kernels.pieces import combined
from weft.collectives.kernels.pull_boxes import HEAD, BoxTable
from weft.collectives.memory.workspace import Workspace, check_room, link_of

_REDUCE_OPS = ("sum", "max", "min", "product")
_ROW_HEAD = signals.Constant(HEAD)
# Four programs of copies a core. In virtual time (2 H100, rows to columns, in bf16), 128, 256
# and 512 take 42, 36, 34 us of 16 MiB and 133, 108, 97 of 64; 4 MiB has no more than 256.
_BLOCK, _PROGRAMS = 1024, 512
# Of those tried, what spills on no chip with Triton 3.6 or 3.7: 8 or 16 bytes the other way round.
_COPY_WARPS, _SUM_WARPS = 8, 4
_MOST_ELEMENTS = 2**31 - _BLOCK  # of a box: its elements are numbered in int32, by whole blocks
_INTERPRETED_BLOCK, _INTERPRETED_PROGRAMS = 64, 2


def refusal(dtype: torch.dtype, op: str | None, divisor: int, largest: int) -> str:
    """Why the kernel cannot pull from tensors like these; empty if it can.

    Args:
        dtype, op, divisor, largest: dtype, reduction, divisor and size of the largest tensor in
            elements; the same on every rank.
    """
    if largest > _MOST_ELEMENTS:
        return f"a tensor has more than {_MOST_ELEMENTS} elements"
    if op is None:
        return f"no kernel for {dtype}" if dtype.is_complex else ""
    if op not in _REDUCE_OPS or dtype not in REDUCED:
        return f"no kernel for a {op} of {dtype}"
    return "" if divisor == 1 or dtype.is_floating_point else f"no average of {dtype}"


@triton.jit(do_not_specialize=["numel", "rank"])
def _show_kernel(
    x_ptr,
    link,
    numel,
    rank,
    WORLD_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Publish x to all peers. Grid: any."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    generation = signals.begin_call(link.signal_ptrs, rank)
    shown = signals.half_ptr(link.buffer_ptrs, rank, generation, link.half_bytes, dtype)
    for block in range(program, cdiv(numel, BLOCK), programs):
        offs = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(shown + offs, tl.load(x_ptr + offs, mask=offs < numel), mask=offs < numel)
    if signals.is_last_program(link.signal_ptrs, rank, programs):
        signals.signal_peers(link.signal_ptrs, rank, WORLD_SIZE, 0, 0, generation)


@triton.jit
def _elements_of(x_ptr, link, holder, rank, generation, offs, mask):
    """Elements `offs` of the x of `holder`."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    shown = signals.half_ptr(link.buffer_ptrs, holder, generation, link.half_bytes, dtype)
    return tl.load(either_ptr(holder == rank, x_ptr, shown) + offs, mask=mask)


@triton.jit
def _take_box(
    out_ptr,
    x_ptr,
    rows_ptr,
    holders_ptr,
    box,
    link,
    generation,
    rank,
    DIMS: tl.constexpr,
    BLOCK: tl.constexpr,
    OP: tl.constexpr,
    DIVISOR: tl.constexpr,
):
    """This program's blocks of one box."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row = rows_ptr + box * (_ROW_HEAD + 3 * DIMS)
    numel = tl.load(row).to(tl.int32)
    first, count = tl.load(row + 3), tl.load(row + 4)
    # Boxes start at different programs, as there may be many small ones.
    for block in range((program + box) % programs, cdiv(numel, BLOCK), programs):
        left = block * BLOCK + tl.arange(0, BLOCK)
        mask = left < numel
        target = tl.load(row + 1) + tl.zeros_like(left).to(tl.int64)
        source = tl.load(row + 2) + tl.zeros_like(left).to(tl.int64)
        for i in tl.static_range(0, DIMS):
            dim = row + _ROW_HEAD + 3 * (DIMS - 1 - i)
            extent = tl.load(dim).to(tl.int32)
            index = (left % extent).to(tl.int64)
            left = left // extent
            target += index * tl.load(dim + 1)
            source += index * tl.load(dim + 2)
        holder = tl.load(holders_ptr + first)
        total = _elements_of(x_ptr, link, holder, rank, generation, source, mask)
        if OP != "copy":
            half: tl.constexpr = dtype == tl.float16 or dtype == tl.bfloat16
            wide: tl.constexpr = tl.float32 if half else dtype
            total = total.to(wide)
            for i in range(1, count):
                holder = tl.load(holders_ptr + first + i)
                term = _elements_of(x_ptr, link, holder, rank, generation, source, mask)
                total = combined(total, term.to(wide), OP)
            if DIVISOR != 1:
                total = divided(total, DIVISOR)
            if half:
                total = rounded(total, dtype)
        tl.store(out_ptr + target, total, mask=mask)


@triton.jit(do_not_specialize=["count", "boxes", "local_boxes", "rank"])
def _pull_kernel(
    out_ptr,
    count,  # elements of out
    x_ptr,
    rows_ptr,  # (boxes, HEAD + 3 DIMS)
    holders_ptr,
    boxes,
    local_boxes,
    link,
    rank,
    WORLD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK: tl.constexpr,
    OP: tl.constexpr,
    DIVISOR: tl.constexpr,
    SPOILS: tl.constexpr,
) -> None:
    """out = the boxes. Grid: any; ranks may differ in it.

    Example: x is (2, 4) on both of 2 ranks, the rows of a (4, 4) tensor. To turn them into its
    columns, rank 1 takes the boxes [2 elements of each of 2 rows] x_0[:, 2:] --> out[:2] and
    x_1[:, 2:] --> out[2:], the second one from itself.
    """
    generation = signals.last_generation(link.signal_ptrs, rank) + 1
    arrived = boxes >= 0
    for box in range(boxes + 1):
        if box == local_boxes:
            arrived = signals.wait_for_peers(
                link.signal_ptrs, rank, WORLD_SIZE, 0, 0, generation, link.timeout_ns
            )
        if (box < boxes) & arrived:
            _take_box(
                out_ptr, x_ptr, rows_ptr, holders_ptr, box, link, generation, rank, DIMS, BLOCK, OP,
                DIVISOR,
            )  # fmt: skip
    if signals.end_call(link.signal_ptrs, rank, generation):
        signals.spoil(out_ptr, count, SPOILS)


def word_bytes(x: torch.Tensor, out: torch.Tensor) -> int:
    """Bytes, 8 at most, of the widest words in which both tensors can be accessed."""
    places = (x.data_ptr(), out.data_ptr(), x.numel() * x.element_size(), x.storage_offset())
    return next(word for word in (8, 4, 2, 1) if all(place % word == 0 for place in places))


def launch_pull(
    x: torch.Tensor, out: torch.Tensor, ws: Workspace, table: BoxTable, *, publish: bool
) -> None:
    """Enqueue one pull. Every rank of the group must, with its own table.

    Args:
        x: contiguous; what other ranks' boxes refer to.
        out: contiguous; elements that no box covers keep their values.
        ws: room for the largest x.
        publish: whether any rank takes part of this one's x.
    """
    interpreted = not ws.group.on_gpus(x.device)
    block = _INTERPRETED_BLOCK if interpreted else _BLOCK
    most = _INTERPRETED_PROGRAMS if interpreted else within_budget(_PROGRAMS)
    given, into = x.view(-1), out.view(-1)
    if table.op == "copy":
        given, into = as_words(x, table.word), as_words(out, table.word)
    if publish:
        check_room(ws, x.numel() * x.element_size(), "the bytes of the largest x")
    shown = given.numel() if publish else 0
    link = link_of(ws)
    launching(_show_kernel, max(1, min(most, -(-shown // block))))(
        given,
        link,
        shown,
        ws.rank,
        WORLD_SIZE=ws.world_size,
        BLOCK=block,
        num_warps=_SUM_WARPS,
    )
    row = HEAD + 3 * table.dims
    launching(_pull_kernel, max(1, min(most, -(-into.numel() // block))))(
        into,
        into.numel(),
        given,
        table.rows,
        table.holders,
        table.rows.numel() // row,
        table.local,
        link,
        ws.rank,
        WORLD_SIZE=ws.world_size,
        DIMS=table.dims,
        BLOCK=block,
        OP=table.op,
        DIVISOR=table.divisor,
        SPOILS=has_nan(out.dtype),
        num_warps=_COPY_WARPS if table.op == "copy" else _SUM_WARPS,
    )
