"""All tiles of a program in one loop: the operands of the next one are on their way when one ends.

A loop over K for each tile fills its pipeline anew and drains it again: the matrix units wait for
the first operands of each tile. Here the steps of all tiles follow each other,

    nested        | fill | k k k k | drain | fill | k k k k | drain |
    flattened     | fill | k k k k             k k k k             k k k k | drain |

and what happens once a tile stands in branches of the loop: at its first step the tile is looked
up, and its rows are waited for; after its last one the sums are finished. The loads of the next
tile are issued some steps before that. The interpreter has no pipeline: nested, the same sums in
the same order take it less time.

Operands are read by descriptor alone (TMA). Its copies belong to the async proxy, which no acquire
of a signal orders: `order_descriptors` does, between the wait for rows and their first load.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.collectives.device.addresses import INTERPRETED, Constant
from weft.kernels.device import tiles

_INTERPRETED = Constant(INTERPRETED)


@triton.jit
def order_descriptors(value):
    """`value`; loads by TMA that depend on it see what the acquires before it have seen."""
    if not _INTERPRETED:
        value = tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [value],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    return value


@triton.jit
def multiply_tiles(
    call,  # what BEGIN and FINISH need
    a_desc,  # a descriptor like those that BEGIN returns
    w_desc,  # of w (K, N), or of its transpose
    w2_desc,  # of a second one, or None
    K,
    first,  # this program's first item; the next ones are `stride` apart
    stride,
    ITEMS: tl.constexpr,
    BEGIN: tl.constexpr,
    FINISH: tl.constexpr,
    V: tl.constexpr,
):
    """a @ w for each item from `first` on, where K > 0.

    ITEMS(call, V) is one after the last item. BEGIN(call, item, part, until, V) -> (a's descriptor,
    row, column, ready) is called before the parts from `part` to `until` - 1 of the K of an item,
    V.parts in all, are read: from that row on, and from that column of w. FINISH(call, acc, second,
    item, ready, V) is called with the sums of an item, and whether it was ready in every part. V
    has `tiles`, `parts`, `w_transposed`, and `flattened`: whether in one loop, which is for one w.
    """
    BLOCK_M: tl.constexpr = V.tiles.block_m
    BLOCK_N: tl.constexpr = V.tiles.block_n
    BLOCK_K: tl.constexpr = V.tiles.block_k
    TILES: tl.constexpr = V.tiles
    PARTS: tl.constexpr = V.parts
    PAIR: tl.constexpr = w2_desc is not None
    W_TRANSPOSED: tl.constexpr = V.w_transposed
    items = ITEMS(call, V)
    steps = tiles.cdiv(K, BLOCK_K)
    share = tiles.cdiv(steps, PARTS)  # as `splits.part_of` has it
    if V.flattened:
        acc = tiles.zeros(BLOCK_M, BLOCK_N)
        item, step, turn = first - stride, steps - 1, 0
        row, column, ready = 0, 0, True
        for _ in range(tl.maximum(tiles.cdiv(items - first, stride), 0) * steps):
            step = tl.where(step == steps - 1, 0, step + 1)
            if step == turn:
                item += tl.where(step == 0, stride, 0)
                part = step // share
                # The last part that has steps stands for the others, too.
                until = tl.where(step + share < steps, part + 1, PARTS)
                a_desc, row, column, came = BEGIN(call, item, part, until, V)
                ready = came & (ready | (step == 0))
                turn = tl.where(step + share < steps, step + share, 0)
            a = tiles.read_described(a_desc, row, step * BLOCK_K, False)
            w = tiles.read_described(w_desc, step * BLOCK_K, column, W_TRANSPOSED)
            acc = tiles.dot(a, w, acc)
            if step == steps - 1:
                FINISH(call, acc, None, item, ready, V)
                acc = tiles.zeros(BLOCK_M, BLOCK_N)
    else:
        for item in range(first, items, stride):
            acc = tiles.zeros(BLOCK_M, BLOCK_N)
            second = acc if PAIR else None
            ready = True
            for part in range(PARTS):
                a_desc, row, column, came = BEGIN(call, item, part, part + 1, V)
                ready &= came
                begin = tl.minimum(part * share * BLOCK_K, K)
                end = tl.minimum(begin + share * BLOCK_K, K)
                acc, other = tiles.accumulate(
                    acc, second, None, 1, a_desc, row, None, None, w_desc, w2_desc, column, 0,
                    begin, 0, end, TILES, True, False, W_TRANSPOSED,
                )  # fmt: skip
                if PAIR:
                    second = other
            FINISH(call, acc, second, item, ready, V)
