"""What has come to the slots of a rank's tokens, added up with weights.

    slots | (0, 0) | (0, 1) | (1, 0) | (1, 1) |   written by the ranks of the experts, each of which
    y     | row 0, by weights | row 1         |   then signals; all programs wait for the words
                                                  (0, peer, 0) of all peers, and read

The second half of the protocol of `combine_kernel`, which tells why it neither races nor deadlocks:
it waits for first launches of peers alone, which wait for nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from weft.collectives.device import signals
from weft.kernels.device import tiles


@dataclass(frozen=True)
class WeighVariant:
    """What adding up is compiled for.

    Attributes:
        top_k, parts: slots of a token, and results in each.
        block_t, block_h: tokens and columns that are added up at a time.
    """

    top_k: int
    parts: int
    block_t: int
    block_h: int


class Weighed(NamedTuple):
    """The result (T, H), ids (T, k) int32, and the Matrix of weights (T, k), or of None."""

    y: Any
    ids: Any
    gates: Any


@triton.jit
def weigh(
    weighed,
    link,
    rank,
    generation,
    T,
    H,
    pitch,
    experts,
    program,
    programs,
    WIRE: tl.constexpr,
    W: tl.constexpr,
):
    """Add up every `programs`-th block of y from number `program` on, of slots that are there."""
    gates = weighed.gates
    TOP_K: tl.constexpr = W.top_k
    PARTS: tl.constexpr = W.parts
    BLOCK_T: tl.constexpr = W.block_t
    BLOCK_H: tl.constexpr = W.block_h
    half = signals.half_ptr(link.buffer_ptrs, rank, generation, link.half_bytes, WIRE)
    across = tiles.cdiv(H, BLOCK_H)
    for block in range(program, tiles.cdiv(T, BLOCK_T) * across, programs):
        tokens = (block // across * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
        columns = block % across * BLOCK_H + tl.arange(0, BLOCK_H)
        acc = tiles.zeros(BLOCK_T, BLOCK_H)
        for j in tl.static_range(TOP_K):
            ids = tl.load(weighed.ids + tokens * TOP_K + j, mask=tokens < T, other=-1)
            used = (ids >= 0) & (ids < experts)
            inside = used[:, None] & (columns < H)[None, :]
            slot = tiles.zeros(BLOCK_T, BLOCK_H)
            for part in tl.static_range(PARTS):
                rows = half + ((tokens * TOP_K + j) * PARTS + part) * pitch
                ptrs = rows[:, None] + columns[None, :]
                slot += tl.load(ptrs, mask=inside, other=0.0).to(tl.float32)
            if gates.ptr is not None:
                ptrs = gates.ptr + tokens * gates.stride_m + j * gates.stride_n
                slot *= tl.load(ptrs, mask=used, other=0.0).to(tl.float32)[:, None]
            acc += slot
        into = weighed.y + tokens[:, None] * H + columns[None, :]
        inside = (tokens < T)[:, None] & (columns < H)[None, :]
        tl.store(into, tiles.rounded(acc, weighed.y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T", "experts", "rank"])
def weigh_kernel(
    y_ptr,  # (T, H)
    ids_ptr,  # (T, k) int32
    weights,  # Matrix (T, k), or of None
    link,
    T,
    H,
    pitch,
    experts,
    rank,
    WIRE: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    W: tl.constexpr,  # WeighVariant
) -> None:
    """y[t] = sum over j of weights[t, j] * slot (t, j), if ids[t, j] is an expert's. Grid: any.

    Example: ids [[1, -1]], weights [[0.5, nan]], slot (0, 0) of [4, 6]: y is [[2, 3]].
    """
    generation = signals.last_generation(link.signal_ptrs, rank)
    came = signals.wait_for_peers(
        link.signal_ptrs, rank, WORLD_SIZE, 0, 0, generation, link.timeout_ns
    )
    weigh(
        Weighed(y_ptr, ids_ptr, weights),
        link,
        rank,
        generation,
        tl.where(came, T, 0),
        H,
        pitch,
        experts,
        tl.program_id(0),
        tl.num_programs(0),
        WIRE,
        W,
    )
    if signals.end_call(link.signal_ptrs, rank, generation):
        signals.spoil(y_ptr, tl.cast(T, tl.int64) * H)
