"""Tiles of flash_decode: how rows of queries are cut, what one part of an item sees, and merging.

Legend as in `decode_kernel`, whose steps 1 and 3 these are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from weft.kernels.device import tiles
from weft.kernels.engine.chips import INTERPRETER, Chip, LaunchOptions
from weft.kernels.flash.attention_tiles import empty_softmax, heads_of, normalized, softmax_step

if TYPE_CHECKING:
    from weft.kernels.attention.cache import Cache

# In virtual time (8 H100, one sequence of 8 x 4096 keys, one key head): with at most 8, 16, 32, 64
# parts 23.5, 23.6, 26.1, 32.4 us.
_MOST_PARTS = 16
# The most elements of a tile of rows, half as many in fp32: with 64 x 256, each lane of four warps
# would hold 128.
_TILE = 8192


@dataclass(frozen=True)
class DecodeConfig(LaunchOptions):
    """How the kernel is launched; the same on all ranks.

    Attributes:
        programs: grid; items * split if split > 1.
        split: programs that share an item.
        block_n: keys a step.
    """

    programs: int
    split: int
    block_n: int


@lru_cache(maxsize=1024)
def decode_config(
    items: int, rows: int, block_d: int, dtype: torch.dtype, chip: Chip, narrow: bool = False
) -> DecodeConfig:
    """The launch for `items` tiles of (rows, block_d).

    `narrow`: the keys are fp8 and converted to dtype, which takes registers for both.
    """
    split = max(1, min(_MOST_PARTS, chip.programs // max(items, 1)))
    programs = max(1, min(chip.programs, items * split))
    if chip is INTERPRETER:
        return DecodeConfig(programs, split, 16)
    # Keys in flight are what counts: 16 x 4096 of 8 heads take 168 us on an H200 with 32 keys
    # a step and 2 stages, 88 with 64 and 4. More, or half as many warps, spill on sm_90 or
    # come close to it. In fp32 there are no matrix units, so that lanes hold more in registers.
    size = rows * block_d * (4 if dtype == torch.float32 else 1)
    if size <= 32 * 128 and block_d <= 128 and not narrow and not chip.is_amd:
        return DecodeConfig(programs, split, 64, num_warps=8, num_stages=4, all_registers=True)
    block_n = 32 if size <= 32 * 256 and not narrow else 16
    num_warps = 4 if size <= 32 * 64 else 8
    if chip.is_amd:
        # Triton 3.7 cannot compile the pipelined loop for AMD; with 8 warps a lane has half the
        # registers.
        return DecodeConfig(programs, split, block_n, num_warps=4, num_stages=1)
    return DecodeConfig(
        programs, split, block_n, num_warps=num_warps, num_stages=2, all_registers=True
    )


@dataclass(frozen=True)
class Cut:
    """What the kernel is compiled for.

    Attributes:
        group: query heads for each key head. D: width of a head.
        rows, block_d: of a tile of queries; powers of two, 16 at least.
        row_tiles: tiles of rows that read the same keys.
        block_n, split: as in `DecodeConfig`.
        merge_d: columns that are merged at a time.
        world_size: W.
    """

    group: int
    D: int
    rows: int
    block_d: int
    row_tiles: int
    block_n: int
    split: int
    merge_d: int
    world_size: int


@lru_cache(maxsize=1024)
def tile_shape(rows: int, D: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """For `rows` rows, D wide, that read the same keys: rows and columns of a tile, and tiles.

    Example:
        8 heads of 8 tokens for one key head, D 192, bf16: (32, 256, 2).
    """
    block_d = max(16, triton.next_power_of_2(D))
    largest = _TILE // 2 if dtype == torch.float32 else _TILE
    tile = max(16, min(64, largest // block_d, triton.next_power_of_2(rows)))
    return tile, block_d, -(-rows // tile)


class Held(NamedTuple):
    """This rank's part of the cache, as in `cached_attention.Cache`.

    `k` and `v` (Heads) are by sequence or, with a page `table`, by page.
    """

    k: Any
    v: Any
    table: Any
    stride_table: Any
    block: Any
    world_size: Any


def held_by(cache: Cache) -> Held:
    """A cache as the kernels take it: they need the rows of a page table to be contiguous."""
    table = cache.table
    if table is not None and table.stride(1) != 1:
        table = table.contiguous()
    stride = 0 if table is None else table.stride(0)
    return Held(heads_of(cache.k), heads_of(cache.v), table, stride, cache.block, cache.world_size)


def cut_queries(q: torch.Tensor, cache: Cache) -> tuple[int, int, int, int]:
    """What `tile_shape` returns for q (B, H, T, D), and the number of items."""
    (B, H, T, D), H_kv = q.shape, cache.k.shape[1]
    rows, block_d, row_tiles = tile_shape(H // H_kv * T, D, q.dtype)
    return rows, block_d, row_tiles, B * H_kv * row_tiles


@triton.jit
def _seen(limit, held, held_rank):
    """How many of this rank's keys lie before position `limit`, int32: see `Cache.seen`."""
    cycle = held.block * held.world_size
    limit = tl.maximum(limit, 0)
    rest = limit % cycle - held_rank * held.block
    count = limit // cycle * held.block + tl.minimum(tl.maximum(rest, 0), held.block)
    return tl.cast(count, tl.int32)


@triton.jit
def _merge(top, total, acc, other_top, other_total, other_acc):
    """Merge two partial softmaxes (ROWS,), (ROWS,), (ROWS, BLOCK_D)."""
    new_top = tl.maximum(top, other_top)
    # If neither saw anything, -inf - -inf would be NaN.
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    mine, theirs = tl.exp2(top - safe), tl.exp2(other_top - safe)
    acc = acc * mine[:, None] + other_acc * theirs[:, None]
    return new_top, total * mine + other_total * theirs, acc


@triton.jit
def _load_keys(held, row, head, tokens, inside, CUT: tl.constexpr):
    """Keys and values (BLOCK_N, BLOCK_D) of these tokens of one item; 0 where not `inside`."""
    if held.table is None:
        batch, at = row, tokens.to(tl.int64)
    else:
        page = held.table + row * held.stride_table + tokens // held.block
        batch = tl.load(page, mask=inside, other=0).to(tl.int64)
        at = (tokens % held.block).to(tl.int64)
    k_rows = batch * held.k.stride_b + head * held.k.stride_h + at * held.k.stride_m
    v_rows = batch * held.v.stride_b + head * held.v.stride_h + at * held.v.stride_m
    offs_d = tl.arange(0, CUT.block_d)
    mask = inside[:, None] & (offs_d < CUT.D)[None, :]
    k = tl.load(held.k.ptr + k_rows[:, None] + offs_d[None, :], mask=mask, other=0.0)
    v = tl.load(held.v.ptr + v_rows[:, None] + offs_d[None, :], mask=mask, other=0.0)
    return k, v


@triton.jit
def attend_part(
    q, held, held_rank, lengths_ptr, item, H_kv, part, qk_scale, T, window, CUT: tl.constexpr
):
    """(top, total, acc) of one part of an item, over the keys of this rank."""
    row, head = item // CUT.row_tiles // H_kv, item // CUT.row_tiles % H_kv
    offs_r = item % CUT.row_tiles * CUT.rows + tl.arange(0, CUT.rows)
    offs_d = tl.arange(0, CUT.block_d)
    group_head, t = offs_r // T, offs_r % T
    row, head = tl.cast(row, tl.int64), tl.cast(head, tl.int64)
    q_rows = row * q.stride_b + (head * CUT.group + group_head) * q.stride_h + t * q.stride_m
    inside = (offs_r < CUT.group * T)[:, None] & (offs_d < CUT.D)[None, :]
    rows = tl.load(q.ptr + q_rows[:, None] + offs_d[None, :], mask=inside, other=0.0)
    length = tl.cast(tl.load(lengths_ptr + row), tl.int64)
    seen = _seen(length - T + 1 + t, held, held_rank)
    count, oldest = _seen(length, held, held_rank), 0
    if window is not None:
        oldest = _seen(length - T - window, held, held_rank)
        before = _seen(length - T + t - window, held, held_rank)
    share = tiles.cdiv(count - oldest, CUT.split * CUT.block_n) * CUT.block_n
    first = oldest + part * share
    last = tl.minimum(first + share, count)
    top, total, acc = empty_softmax(CUT.rows, CUT.block_d)
    for start in range(first, last, CUT.block_n):
        tokens = start + tl.arange(0, CUT.block_n)
        k, v = _load_keys(held, row, head, tokens, tokens < last, CUT)
        k, v = k.to(rows.dtype), v.to(rows.dtype)  # of fp8
        products = tiles.dot(rows, k.T, tiles.zeros(CUT.rows, CUT.block_n))
        limits = tl.minimum(seen, last)
        products = tl.where(tokens[None, :] < limits[:, None], products, float("-inf"))
        if window is not None:
            products = tl.where(tokens[None, :] >= before[:, None], products, float("-inf"))
        top, total, weights, rescale = softmax_step(top, total, products, qk_scale)
        acc = tiles.dot(tiles.rounded(weights, v.dtype), v, acc * rescale[:, None])
    return top, total, acc


@triton.jit
def merge_slots(slots_ptr, stride, COUNT, column, CUT: tl.constexpr, TOTALS: tl.constexpr):
    """Columns column .. column + merge_d - 1 of the average over COUNT partial softmaxes.

    These are `stride` elements apart and merged in order. Returns (rows, merge_d) and the
    log-sum-exp in base 2 (rows,).

    Args:
        TOTALS: whether they are (acc, top, total) or, as `_send` stores them, (average, lse).
    """
    ROWS: tl.constexpr = CUT.rows
    ACC: tl.constexpr = ROWS * CUT.block_d
    offs_r, offs_d = tl.arange(0, ROWS), column + tl.arange(0, CUT.merge_d)
    top, total, acc = empty_softmax(ROWS, CUT.merge_d)
    for i in range(COUNT):
        slot = slots_ptr + i * stride
        other = tl.load(slot + offs_r[:, None] * CUT.block_d + offs_d[None, :])
        other_total = tl.load(slot + ACC + ROWS + offs_r) if TOTALS else 1.0
        top, total, acc = _merge(top, total, acc, tl.load(slot + ACC + offs_r), other_total, other)
    return normalized(top, total, acc)
