"""The Triton kernel of append_to_cache: new tokens go where they belong, by the rank that holds it.

    positions 0 1 | 2 3 | 4 5 | 6 7 ..    blocks of keys, dealt to the ranks in turn
    rank      0     1     0     1         a token is on every rank, and stored by one

Nobody signals or waits: a rank stores in its own cache alone, and what reads it comes later in the
same stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from weft.collectives.device.device_math import mask_if
from weft.collectives.device.launches import launching
from weft.collectives.profiled import profiled
from weft.kernels.flash.attention_tiles import heads_of
from weft.kernels.flash.decode_tiles import held_by

if TYPE_CHECKING:
    from weft.kernels.attention.cache import Cache


@triton.jit
def _append_kernel(
    held,  # Held
    k,  # Heads, (B, H_kv, T, D)
    v,
    lengths_ptr,  # (B,)
    T,
    H_kv,
    held_rank,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
) -> None:
    """Store each token's keys and values in this rank's cache if its block is here. Grid: B * T.

    Example: T 2, length 5: program 0 stores position 3, program 1 position 4.
    """
    program = tl.program_id(0)
    row, t = tl.cast(program // T, tl.int64), program % T
    position = tl.cast(tl.load(lengths_ptr + row), tl.int64) - T + t
    turn = tl.maximum(position, 0) // held.block
    inside = (position >= 0) & (turn % held.world_size == held_rank)
    block, at = turn // held.world_size, tl.maximum(position, 0) % held.block
    if held.table is None:
        into, at = row, at + block * held.block
    else:
        page = held.table + row * held.stride_table + block
        into = tl.load(page, mask=inside, other=0).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    for start in range(0, H_kv, BLOCK_H):
        heads = start + tl.arange(0, BLOCK_H)
        mask = mask_if(inside, heads < H_kv)[:, None] & (offs_d < D)[None, :]
        heads = heads.to(tl.int64)
        k_rows = k.ptr + row * k.stride_b + t * k.stride_m + heads * k.stride_h
        v_rows = v.ptr + row * v.stride_b + t * v.stride_m + heads * v.stride_h
        new_k = tl.load(k_rows[:, None] + offs_d[None, :], mask=mask)
        new_v = tl.load(v_rows[:, None] + offs_d[None, :], mask=mask)
        k_rows = held.k.ptr + into * held.k.stride_b + at * held.k.stride_m
        v_rows = held.v.ptr + into * held.v.stride_b + at * held.v.stride_m
        tl.store((k_rows + heads * held.k.stride_h)[:, None] + offs_d[None, :], new_k, mask=mask)
        tl.store((v_rows + heads * held.v.stride_h)[:, None] + offs_d[None, :], new_v, mask=mask)


@profiled("append_to_cache")
def launch_append(k: torch.Tensor, v: torch.Tensor, cache: Cache, lengths: torch.Tensor) -> None:
    """Enqueue the kernel that stores k and v (B, H_kv, T, D)."""
    B, H_kv, T, D = k.shape
    if not k.numel():
        return
    block_d = triton.next_power_of_2(D)
    k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
    launching(_append_kernel, B * T)(
        held_by(cache),
        heads_of(k),
        heads_of(v),
        lengths.contiguous(),
        T,
        H_kv,
        cache.rank,
        D=D,
        BLOCK_D=block_d,
        BLOCK_H=min(triton.next_power_of_2(H_kv), max(1, 2048 // block_d)),
    )
