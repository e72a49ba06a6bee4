"""all_reduce by the switch: NVLink SHARP adds up what all ranks hold at one multicast address.

Legend: W ranks; rank r owns the r-th share of the elements. A half of the workspace is the input,
then the result.

    rank r: x --> own half         share r: sum over ranks, by the switch --> result of every rank

Each byte crosses the link of a rank once each way, whatever W, where two shots move 2 (W - 1) / W.
The switch chooses the order of the additions, the one exception to rank order, so this runs only
with WEFT_MULTIMEM=1. All ranks still get the same bits, as each element is added up once.

Protocol, in each program p of P; it moves the blocks b of every share for which b % P == p.
  1. Store the blocks of x in the rank's own half; signal the words (0, rank, p) of all peers:
     release at system scope. Wait for the words (0, r, p): acquire at system scope.
  2. Reduce its blocks of the rank's own share through the multicast address and store them there,
     which reaches all ranks. Signal the words (1, rank, p), wait for the words (1, r, p).
  3. Copy its blocks of the result out. Take a ticket; the last program sets GENERATION.
Deadlock and races: as in `kernel_collectives`.

Only GPUs with multicast run it; elsewhere nothing here is called.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.collectives.device import signals, switch
from weft.collectives.device.device_math import cdiv
from weft.collectives.device.launches import launching
from weft.collectives.kernels.collective_launch import within_budget
from weft.collectives.memory.workspace import Workspace, check_room, link_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BLOCK = 256  # vectors of 16 bytes
_NUM_WARPS = 8
_PROGRAMS = 24  # the switch does the work; more programs only compete


@triton.jit
def _copy_share(dst, src, begin, end, count, program, programs, BLOCK: tl.constexpr):
    """dst[i] = src[i], the program's blocks of begin <= i < end, in elements below `count`."""
    for block in range(program, cdiv(end - begin, BLOCK), programs):
        offs = begin + tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = (offs < end) & (offs < count)
        tl.store(dst + offs, tl.load(src + offs, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["rank"])
def _multimem_kernel(
    out_ptr,
    x_ptr,
    multicast_ptr,  # int64: address of the data of all ranks
    link,
    count,
    vectors,  # of one share
    rank,
    WORLD_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # in vectors of 16 bytes
) -> None:
    """out = sum over ranks of x, both of `count` elements. Grid: the same on all ranks."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    lanes: tl.constexpr = 128 // dtype.primitive_bitwidth
    generation = signals.begin_call(link.signal_ptrs, rank)
    share = tl.cast(vectors, tl.int64) * lanes
    half = signals.half_ptr(link.buffer_ptrs, rank, generation, link.half_bytes, dtype)
    for owner in range(WORLD_SIZE):
        begin = owner * share
        _copy_share(half, x_ptr, begin, begin + share, count, program, programs, BLOCK * lanes)
    arrived = signals.barrier(
        link.signal_ptrs, rank, WORLD_SIZE, 0, program, generation, link.timeout_ns
    )
    if arrived:
        everywhere = multicast_ptr + (generation & 1) * link.half_bytes
        result_at = WORLD_SIZE * tl.cast(vectors, tl.int64) * 16
        for block in range(program, cdiv(vectors, BLOCK), programs):
            vector = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            source = everywhere + (rank * tl.cast(vectors, tl.int64) + vector) * 16
            inside = vector < vectors
            a, b, c, d = switch.load_words(source, inside, dtype)
            switch.store_words(source + result_at, inside, a, b, c, d)
        arrived = signals.barrier(
            link.signal_ptrs, rank, WORLD_SIZE, 1, program, generation, link.timeout_ns
        )
    if arrived:
        result = half + WORLD_SIZE * share
        for owner in range(WORLD_SIZE):
            begin = owner * share
            _copy_share(
                out_ptr, result, begin, begin + share, count, program, programs, BLOCK * lanes
            )
    if signals.end_call(link.signal_ptrs, rank, generation):
        signals.spoil(out_ptr, count)


def _vectors(nbytes: int, world_size: int) -> int:
    return -(-nbytes // (16 * world_size))


def workspace_bytes(nbytes: int, world_size: int) -> int:
    """Symmetric memory that an all_reduce of `nbytes` needs on each rank."""
    return 2 * world_size * _vectors(nbytes, world_size) * 16


def launch_all_reduce(x: torch.Tensor, out: torch.Tensor, ws: Workspace) -> None:
    """Enqueue out = sum over ranks of x.

    Args:
        x: contiguous, of a dtype in DTYPES, the same shape on all ranks.
        out: like x; it may be x.
        ws: room for `workspace_bytes`, on memory with a multicast address.
    """
    nbytes = x.numel() * x.element_size()
    if not ws.buffer.multicast_ptr:
        raise NotImplementedError("this memory has no multicast address: its links cannot add")
    check_room(ws, workspace_bytes(nbytes, ws.world_size), "workspace_bytes(bytes, world_size)")
    vectors = _vectors(nbytes, ws.world_size)
    launching(_multimem_kernel, max(1, min(within_budget(_PROGRAMS), -(-vectors // _BLOCK))))(
        out,
        x,
        ws.buffer.multicast_ptr,
        link_of(ws),
        x.numel(),
        vectors,
        ws.rank,
        WORLD_SIZE=ws.world_size,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )
