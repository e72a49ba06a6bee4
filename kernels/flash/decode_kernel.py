"""The Triton kernel of flash_decode.

It makes partial attention and merges that of all ranks in one launch. Legend: W ranks; B
sequences, T new tokens, H_kv key heads, G query heads for each; G * T rows that read the same keys,
in tiles of R. An *item* is one (sequence, key head, tile). See `decode`.

    program p   item p // SPLIT, part p % SPLIT of this rank's keys (SPLIT > 1: few items)
                or items p, p + programs, ..                      (SPLIT = 1)

    keys of this rank --> (max, sum, acc) of each part --> slot `rank` on every rank --> out

Protocol, in each program p
  1. Attend, by online softmax in fp32. With SPLIT > 1, all parts of an item store their result in
     scratch memory, and all but the last signal the rank's own word (0, rank, p): release at device
     scope; the last one waits for those words, of smaller-numbered programs, and merges in order.
  2. Store the item's (out, lse) in slot `rank` of every rank; signal the words (0, rank, p) of all
     peers: release at system scope.
  3. Wait for the words (0, r, p) of all peers (acquire, system scope); merge the slots of the own
     items in rank order, and store the result.
  4. All programs take a ticket; the last one sets GENERATION.

Why it neither races nor deadlocks: no program waits for a peer before it has signalled everything,
and p waits for p. Slots of two calls lie in different halves; rules 1 and 2 of
`weft.collectives.device.signals` hold because the programs of last parts, the same on every rank,
signal every peer after this rank's last call has ended, and wait for every peer. Ranks may hold
different numbers of keys: parts are cut from what there is, and an empty part has sum 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from weft.collectives import Workspace
from weft.collectives.device import signals
from weft.collectives.device.launches import launching, temporary
from weft.collectives.memory.workspace import link_of
from weft.kernels.device import tiles
from weft.kernels.engine.chips import chip_of
from weft.kernels.flash.attention_tiles import (
    LN_2,
    LOG2_E,
    heads_of,
    normalized,
    with_positive_scale,
)
from weft.kernels.flash.decode_tiles import (
    Cut,
    attend_part,
    cut_queries,
    decode_config,
    held_by,
    merge_slots,
)

if TYPE_CHECKING:
    from weft.kernels.attention.cache import Cache

CHANNEL = "decode kernel"  # of the workspace

# How many elements are merged at a time: two sums and their addresses must fit in registers.
_MERGED = 4096


@triton.jit
def _send_columns(value, lse, column, place, link, rank, generation, CUT: tl.constexpr):
    """Store columns of a result, from `column` on, in every rank's slot, the rank's own last.

    `place` is where the slot's item begins, in elements from the start of the half.
    """
    offs_r, offs_d = tl.arange(0, CUT.rows), column + tl.arange(0, value.shape[1])
    for step in range(1, CUT.world_size + 1):
        peer = (rank + step) % CUT.world_size
        half_bytes = link.half_bytes
        half = signals.half_ptr(link.buffer_ptrs, peer, generation, half_bytes, tl.float32)
        tl.store(half + place + offs_r[:, None] * CUT.block_d + offs_d[None, :], value)
        tl.store(half + place + CUT.rows * CUT.block_d + offs_r, lse)


@triton.jit(do_not_specialize=["rank", "held_rank"])
def _flash_decode_kernel(
    out_ptr,  # (B, H, T, D) contiguous
    lse_ptr,  # (B, H, T) fp32
    q,  # Heads, (B, H, T, D)
    held,  # Held
    lengths_ptr,  # (B,)
    scratch_ptr,  # (items * split, rows, block_d + 2) fp32, or None
    link,
    items,  # B * H_kv * row_tiles
    H_kv,
    T,
    scale,
    window,  # tokens before its own that a query sees, or None
    rank,
    held_rank,  # among the `world_size` ranks to which blocks of keys are dealt
    CUT: tl.constexpr,
) -> None:
    """Grid: the same on all ranks; items * split if split > 1.

    Example: 2 items, split=3, 6 programs: 0, 1 and 2 attend to a third of item 0's keys each;
    program 2 merges them, sends the result to the peers, and merges what their programs 2 send.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    generation = signals.begin_call(link.signal_ptrs, rank)
    WORLD_SIZE: tl.constexpr = CUT.world_size
    ROWS: tl.constexpr = CUT.rows
    SPLIT: tl.constexpr = CUT.split
    ACC: tl.constexpr = ROWS * CUT.block_d  # elements of an acc; tops, then totals follow it
    SIZE: tl.constexpr = ACC + 2 * ROWS
    SHOWN: tl.constexpr = ACC + ROWS
    offs_r = tl.arange(0, ROWS)
    slot_stride = tl.cast(items, tl.int64) * SHOWN
    complete = True
    whole = program % SPLIT == SPLIT - 1
    for work in range(program, items * SPLIT, programs):
        item, part = work // SPLIT, work % SPLIT
        top, total, acc = attend_part(
            q, held, held_rank, lengths_ptr, item, H_kv, part, scale * LOG2_E, T, window, CUT
        )
        place = rank * slot_stride + tl.cast(item, tl.int64) * SHOWN
        if SPLIT == 1:
            value, lse = normalized(top, total, acc)
            _send_columns(value, lse, 0, place, link, rank, generation, CUT)
        else:
            parts = scratch_ptr + tl.cast(item, tl.int64) * (SPLIT * SIZE)
            tiles.store_block(parts + part * SIZE, acc)
            tl.store(parts + part * SIZE + ACC + offs_r, top)
            tl.store(parts + part * SIZE + ACC + ROWS + offs_r, total)
            if whole:
                complete = signals.wait_for_own(
                    link.signal_ptrs, rank, WORLD_SIZE, 0, rank, program - (SPLIT - 1), program - 1,
                    generation, link.timeout_ns, triton.next_power_of_2(SPLIT - 1),
                )  # fmt: skip
                # Other threads stored this program's own part than will read it next.
                tl.debug_barrier()
                if complete:
                    for column in range(0, CUT.block_d, CUT.merge_d):
                        value, lse = merge_slots(parts, SIZE, SPLIT, column, CUT, True)
                        _send_columns(value, lse, column, place, link, rank, generation, CUT)
            else:
                signals.signal_local(
                    signals.slot_ptr(link.signal_ptrs, rank, WORLD_SIZE, 0, rank, program),
                    generation,
                )
    if whole & complete:
        signals.signal_peers(link.signal_ptrs, rank, WORLD_SIZE, 0, program, generation)
        # Other threads stored this rank's own slot than will read it next.
        tl.debug_barrier()
        complete &= signals.wait_for_peers(
            link.signal_ptrs, rank, WORLD_SIZE, 0, program, generation, link.timeout_ns
        )
    if whole & complete:
        slots = signals.half_ptr(link.buffer_ptrs, rank, generation, link.half_bytes, tl.float32)
        for work in range(program, items * SPLIT, programs):
            item = tl.cast(work // SPLIT, tl.int64)
            # Heads of one key head, and their tokens, lie together.
            inside, start = CUT.group * T, (item % CUT.row_tiles).to(tl.int32) * ROWS
            first = item // CUT.row_tiles * inside
            for column in range(0, CUT.block_d, CUT.merge_d):
                value, lse = merge_slots(
                    slots + item * SHOWN, slot_stride, WORLD_SIZE, column, CUT, False
                )
                out_rows = out_ptr + first * CUT.D
                tiles.store(out_rows, value, start, column, inside, CUT.D, CUT.D, 1)
                rows = start + offs_r
                tl.store(lse_ptr + first + rows, lse * LN_2, mask=rows < inside)
    if signals.end_call(link.signal_ptrs, rank, generation):
        tokens = tl.cast(items // CUT.row_tiles, tl.int64) * CUT.group * T
        signals.spoil(out_ptr, tokens * CUT.D)
        signals.spoil(lse_ptr, tokens)


def room_for(q: torch.Tensor, cache: Cache, world_size: int) -> int:
    """Bytes of symmetric memory for every rank's results for q (B, H, T, D)."""
    rows, block_d, _, items = cut_queries(q, cache)
    return world_size * items * rows * (block_d + 1) * 4


def launch_flash_decode(
    q: torch.Tensor,
    cache: Cache,
    lengths: torch.Tensor,
    scale: float,
    ws: Workspace,
    *,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Enqueue the attention to the keys of all ranks.

    Args:
        q: (B, H, T, D), any strides; the same on all ranks.
        ws: with room for `room_for` q, on `CHANNEL`.
        window: how many tokens before its own a query sees; None: all.

    Returns:
        out (B, H, T, D), contiguous, dtype of q, and lse (B, H, T), fp32.
    """
    (B, H, T, D), H_kv = q.shape, cache.k.shape[1]
    out, lse = q.new_empty(q.shape), q.new_empty((B, H, T), dtype=torch.float32)
    if not q.numel():
        return out, lse
    q, scale = with_positive_scale(q, scale)
    rows, block_d, row_tiles, items = cut_queries(q, cache)
    narrow = cache.k.dtype != q.dtype
    config = decode_config(items, rows, block_d, q.dtype, chip_of(q.device), narrow)
    scratch = None
    if config.split > 1:
        size = items * config.split * rows * (block_d + 2)
        scratch = temporary(torch.empty(size, dtype=torch.float32, device=q.device))
    launching(_flash_decode_kernel, config.programs)(
        out,
        lse,
        heads_of(q if q.stride(3) == 1 else q.contiguous()),
        held_by(cache),
        lengths.contiguous(),
        scratch,
        link_of(ws),
        items,
        H_kv,
        T,
        scale,
        window,
        ws.rank,
        cache.rank,
        CUT=Cut(
            H // H_kv,
            D,
            rows,
            block_d,
            row_tiles,
            config.block_n,
            config.split,
            merge_d=min(block_d, max(16, _MERGED // rows)),
            world_size=ws.world_size,
        ),
        **config.options,
    )
    return out, lse
