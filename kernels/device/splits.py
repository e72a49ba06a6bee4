"""Split-K: where there are few tiles, several programs share one, each taking a part of K.

    program     0         1         2       |   3         4         5          SPLIT = 3
    tile        0         0         0       |   1         1         1
    K           0..a      a..b      b..K    |   0..a      a..b      b..K

Protocol: all programs of a tile but the last store their partial sum in scratch memory of the
device and signal the rank's own word (0 or 1, rank, program), which no peer writes: release at
device scope. The last one waits for those words (acquire) and adds in the order of K, its own part
last, which gives the same bits in every run. It waits only for programs with smaller numbers.

A program has at most one tile, since a word tells the call, but not the tile, that it is about.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.collectives.device import signals
from weft.collectives.device.launches import temporary
from weft.kernels.device import tiles
from weft.kernels.engine.chips import MOST_SPLIT, Chip, Tiling


def programs_a_tile(count: int, K: int, tiling: Tiling, chip: Chip) -> int:
    """SPLIT for `count` tiles of a matmul over K: all cores busy, at least two steps of K each."""
    return max(1, min(MOST_SPLIT, chip.programs // max(count, 1), K // (2 * tiling.block_k)))


def scratch_for(count: int, split: int, like: torch.Tensor, tiling: Tiling) -> torch.Tensor | None:
    """Memory for `split` partial tiles of each of `count` sums, or None if nothing is split."""
    if split == 1:
        return None
    size = count * split * tiling.block_m * tiling.block_n
    return temporary(torch.empty(size, dtype=torch.float32, device=like.device))


@triton.jit
def part_of(K, part, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr):
    """Where part number `part` of K begins and ends, in whole steps; the last one ends at K."""
    if SPLIT == 1:
        first, last = 0, K
    else:
        share = tiles.cdiv(tiles.cdiv(K, BLOCK_K), SPLIT) * BLOCK_K
        first = tl.minimum(part * share, K)
        last = tl.minimum(first + share, K)
    return first, last


@triton.jit
def add_up(
    acc,  # this program's part of the tile
    second,  # of a second sum, or None
    scratch_ptr,
    tile,
    part,
    program,
    link,
    rank,
    generation,
    WORLD_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """In the program of the last part, the sums of all parts and True; else nothing and False.

    Also False if a part did not arrive in time, which is then recorded. Without a second sum, the
    first is returned twice.
    """
    ROWS: tl.constexpr = acc.shape[0]
    COLUMNS: tl.constexpr = acc.shape[1]
    SUMS: tl.constexpr = 1 if second is None else 2
    BLOCK: tl.constexpr = ROWS * COLUMNS
    tile_ptr = scratch_ptr + tl.cast(tile, tl.int64) * (SPLIT * SUMS * BLOCK)
    whole = part == SPLIT - 1
    if whole:
        whole = signals.wait_for_own(
            link.signal_ptrs, rank, WORLD_SIZE, 0, rank, program - (SPLIT - 1), program - 1,
            generation, link.timeout_ns, triton.next_power_of_2(SPLIT - 1),
        )  # fmt: skip
        total = tiles.zeros(ROWS, COLUMNS)
        if second is not None:
            second_total = tiles.zeros(ROWS, COLUMNS)
        offs = tiles.block_offsets(ROWS, COLUMNS)
        for other in range(SPLIT - 1):
            part_ptr = tile_ptr + other * (SUMS * BLOCK)
            total += tl.load(part_ptr + offs)
            if second is not None:
                second_total += tl.load(part_ptr + BLOCK + offs)
        acc += total
        if second is not None:
            second += second_total
    else:
        part_ptr = tile_ptr + part * (SUMS * BLOCK)
        tiles.store_block(part_ptr, acc)
        if second is not None:
            tiles.store_block(part_ptr + BLOCK, second)
        signals.signal_local(
            signals.slot_ptr(link.signal_ptrs, rank, WORLD_SIZE, 0, rank, program), generation
        )
    return acc, acc if second is None else second, whole
