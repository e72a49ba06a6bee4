"""Collectives by the switch: NVLink SHARP adds up what all ranks hold at one multicast address, and
stores there what all ranks get.

Legend: W ranks; piece r of the data is rank r's: its shard, or its part of the sum. A half of the
workspace is W slots of one piece, and for an all_reduce W slots of finished pieces.

    all_gather      rank r: its shard --> slot r of every rank               slots --> output
    reduce_scatter  rank r: its pieces --> own slots    r: sum over ranks of slot r --> output
    all_reduce      as reduce_scatter, then: sum --> finished slot r of every rank --> output

Each byte crosses the link of a rank once each way, whatever W, where other kernels send or receive
W - 1 copies of it, or in two shots 2 (W - 1) / W of an all_reduce. The switch chooses the order of
the additions, the one exception to rank order, so sums run like this only with WEFT_MULTIMEM=1. All
ranks still get the same bits, as each element is added up once. A gather has no order to keep.

Protocol, in each program p of P; it moves the blocks b of every piece for which b % P == p.
  1. Store its blocks of x: of a gather, through the multicast address in slot `rank` of all ranks;
     of a sum, in the rank's own slots. Signal the words (0, rank, p) of all peers: release at
     system scope. Wait for the words (0, r, p): acquire at system scope.
  2. A sum: reduce its blocks of slot `rank` through the multicast address. An all_reduce stores
     them there, in the finished slot, which reaches all ranks; signals the words (1, rank, p), and
     waits for the words (1, r, p).
  3. Copy its blocks of the result out. Take a ticket; the last program sets GENERATION.
Deadlock and races: as in `kernel_collectives`.

Only GPUs with multicast run it; in the interpreter every rank's memory stands for the switch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from weft.collectives.device import signals, switch
from weft.collectives.device.device_math import cdiv, element
from weft.collectives.device.launches import launching
from weft.collectives.kernels.collective_launch import alignment, piece_room, within_budget
from weft.collectives.kernels.pieces import Pieces, copy_pieces, piece_ptr, piece_slot
from weft.collectives.memory.workspace import Workspace, check_room, link_of
from weft.collectives.protocols import Collective
from weft.collectives.ranks.chunks import offsets

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BLOCK_BYTES = 4 << 10
_NUM_WARPS = 8
# In virtual time (8 H100, all_reduce of 1 MiB): 8, 24, 48 programs take 53, 33, 32 us.
_PROGRAMS = 24


@triton.jit
def _put_vectors(
    link,
    multicast_ptr,
    at,
    own_ptr,
    x_ptr,
    vector,
    size,
    LANES: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    SHOWN: tl.constexpr,
):
    """Store the vectors of x with elements below `size` in the data of all ranks, `at` bytes on, or
    unless SHOWN in the rank's own, at `own_ptr`. Zeros fill what of a vector lies beyond.
    """
    offs = vector[:, None] * LANES + tl.arange(0, LANES)[None, :]
    values = tl.load(x_ptr + offs, mask=offs < size, other=0.0)
    inside = vector * LANES < size
    if SHOWN:
        switch.store_everywhere(link, multicast_ptr, at + vector * 16, values, inside, WORLD_SIZE)
    else:
        tl.store(own_ptr + offs, values, mask=inside[:, None])


@triton.jit
def _put_piece(
    link,
    multicast_ptr,
    at,
    own_ptr,
    x_ptr,
    size,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    SHOWN: tl.constexpr,
):
    """Step 1: this program's blocks of a piece, as `_put_vectors` does."""
    whole = size // LANES * LANES  # so that it can load whole vectors
    for block in range(tl.program_id(0), cdiv(size, BLOCK), tl.num_programs(0)):
        vector = tl.cast(block, tl.int64) * (BLOCK // LANES) + tl.arange(0, BLOCK // LANES)
        _put_vectors(
            link, multicast_ptr, at, own_ptr, x_ptr, vector, whole, LANES, WORLD_SIZE, SHOWN
        )
        if (block + 1) * BLOCK > size:
            rest = tl.cast(whole // LANES, tl.int64) + tl.arange(0, 1)
            _put_vectors(
                link, multicast_ptr, at, own_ptr, x_ptr, rest, size, LANES, WORLD_SIZE, SHOWN
            )


@triton.jit(do_not_specialize=["rank"])
def _switched_kernel(
    out_ptr,
    x_ptr,
    pieces,  # Pieces: of x, or for a gather of out
    multicast_ptr,  # int64: address of the data of all ranks
    link,
    slot_size,
    rank,
    OP: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
) -> None:
    """all_gather, reduce_scatter or all_reduce (sum) of x. Sizes in elements; slots begin at
    multiples of 16 bytes. Grid: the same on all ranks.

    Example: 2 ranks, x = [1 2 3] on both, pieces ((0, 2), (2, 1)): a reduce_scatter makes [2 4] on
    rank 0 and [6] on rank 1.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    LANES: tl.constexpr = 128 // dtype.primitive_bitwidth
    VECTORS: tl.constexpr = BLOCK // LANES
    generation = signals.begin_call(link.signal_ptrs, rank)
    lanes, owners = signals.peer_lanes(rank, WORLD_SIZE)
    sizes = tl.where(lanes < WORLD_SIZE, element(pieces.sizes, owners, WORLD_SIZE), 0)
    size = element(pieces.sizes, rank, WORLD_SIZE)
    slots = piece_slot(link, rank, owners, slot_size, generation, dtype)
    slot = tl.cast(slot_size, tl.int64) * (16 // LANES)  # in bytes
    at = (generation & 1) * link.half_bytes + rank * slot
    if OP == "all_gather":
        shard_ptr = tl.multiple_of(x_ptr, ALIGN)
        _put_piece(link, multicast_ptr, at, x_ptr, shard_ptr, size, BLOCK, LANES, WORLD_SIZE, True)
    else:
        for owner in range(WORLD_SIZE):
            _put_piece(
                link, multicast_ptr, at,
                piece_slot(link, rank, owner, slot_size, generation, dtype),
                piece_ptr(x_ptr, pieces, owner, WORLD_SIZE, ALIGN),
                element(pieces.sizes, owner, WORLD_SIZE),
                BLOCK, LANES, WORLD_SIZE, False,
            )  # fmt: skip
    arrived = signals.barrier(
        link.signal_ptrs, rank, WORLD_SIZE, 0, program, generation, link.timeout_ns
    )
    finished = WORLD_SIZE * slot  # bytes from a slot to its finished one
    if OP != "all_gather" and arrived:
        for block in range(program, cdiv(size, BLOCK), programs):
            vector = tl.cast(block, tl.int64) * VECTORS + tl.arange(0, VECTORS)
            inside = vector * LANES < size
            sums = switch.load_sums(
                link, multicast_ptr, at + vector * 16, inside, dtype, WORLD_SIZE
            ).to(dtype)
            if OP == "all_reduce":
                switch.store_everywhere(
                    link, multicast_ptr, at + finished + vector * 16, sums, inside, WORLD_SIZE
                )
            else:
                offs = vector[:, None] * LANES + tl.arange(0, LANES)[None, :]
                tl.store(tl.multiple_of(out_ptr, ALIGN) + offs, sums, mask=offs < size)
    if OP == "all_reduce":
        slots = piece_slot(link, rank, WORLD_SIZE + owners, slot_size, generation, dtype)
        if arrived:
            arrived = signals.barrier(
                link.signal_ptrs, rank, WORLD_SIZE, 1, program, generation, link.timeout_ns
            )
    if OP != "reduce_scatter" and arrived:
        copy_pieces(
            piece_ptr(out_ptr, pieces, owners, WORLD_SIZE, ALIGN), slots, sizes, BLOCK, ALIGN
        )
    if signals.end_call(link.signal_ptrs, rank, generation):
        if OP == "reduce_scatter":
            signals.spoil(out_ptr, size)
        else:
            for r in tl.static_range(WORLD_SIZE):
                signals.spoil(out_ptr + pieces.starts[r], pieces.sizes[r])


def workspace_bytes(op: Collective, nbytes: int, world_size: int) -> int:
    """Symmetric memory that a call needs on each rank; `nbytes`: of the largest piece."""
    return (2 if op == "all_reduce" else 1) * world_size * piece_room(nbytes)


def launch_switched(
    op: Collective,
    x: torch.Tensor,
    out: torch.Tensor,
    ws: Workspace,
    sizes: Sequence[int],
    block_bytes: int = _BLOCK_BYTES,
) -> None:
    """Enqueue all_gather, reduce_scatter or all_reduce (sum) of x.

    Args:
        x, out: contiguous, of a dtype in DTYPES; of an all_reduce `out` may be x.
        ws: room for `workspace_bytes` of the largest piece, on memory with a multicast address.
        sizes: of every rank's piece, in elements, the same on all ranks; an all_reduce is cut so
            that ranks have equal work, in any way.
        block_bytes: what a program moves of a piece at a time.
    """
    if not ws.buffer.multicast_ptr and not signals.INTERPRETED:
        raise NotImplementedError("this memory has no multicast address: its links cannot add")
    itemsize, W, widest = x.element_size(), ws.world_size, max(sizes)
    check_room(
        ws, workspace_bytes(op, widest * itemsize, W),
        "workspace_bytes(op, bytes of the largest piece, world_size)",
    )  # fmt: skip
    starts, block = tuple(offsets(sizes)), block_bytes // itemsize
    programs = max(1, min(within_budget(_PROGRAMS), -(-widest // block)))
    launching(_switched_kernel, programs)(
        out,
        x,
        Pieces(starts, tuple(sizes)),
        ws.buffer.multicast_ptr,
        link_of(ws),
        piece_room(widest * itemsize) // itemsize,
        ws.rank,
        OP=op,
        WORLD_SIZE=W,
        BLOCK=block,
        ALIGN=alignment(itemsize, [x.data_ptr(), out.data_ptr()], [*starts]),
        num_warps=_NUM_WARPS,
    )


def vector_shares(count: int, itemsize: int, world_size: int) -> list[int]:
    """The pieces of an all_reduce of `count` elements: whole vectors but for the last one's."""
    vector = 16 // itemsize
    share = -(-count // (world_size * vector)) * vector
    starts = [min(rank * share, count) for rank in range(world_size)]
    return [min(start + share, count) - start for start in starts]
