"""The Triton kernel of flash_decode: partial attention and the merge of all ranks, in one launch.

Legend: W ranks; B sequences, T new tokens, H_kv key heads, G query heads on each; R = G * T rows
that read the same keys. An *item* is one (sequence, key head). See `cached_attention`.

    program p   item p // SPLIT, part p % SPLIT of this rank's keys (SPLIT > 1: few items)
                or items p, p + programs, ..                      (SPLIT = 1)

    keys of this rank --> (max, sum, acc) of each part --> slot `rank` on every rank --> out

Protocol, in each program p
  1. Attend, by online softmax in fp32. With SPLIT > 1, all but the last part of an item store their
     result in scratch memory and signal the own word (0, rank, p): release at device scope; the
     last one waits for those words, of smaller-numbered programs, and merges in the order of parts.
  2. Store the item's (out, lse) in slot `rank` of every rank; signal the words (0, rank, p) of all
     peers: release at system scope.
  3. Wait for the words (0, r, p) of all peers (acquire, system scope); merge the slots of the own
     items in rank order, and store the result.
  4. All programs take a ticket; the last one sets GENERATION.

Why it neither races nor deadlocks: nobody waits for a peer before it has signalled everything, and
p waits for p. Slots of two calls lie in different halves; rules 1 and 2 of
`weft.collectives.signals` hold because the programs of last parts, the same on every rank, signal
every peer after this rank's last call has ended, and wait for every peer. Ranks may hold different
numbers of keys: parts are cut from what there is, and an empty one gives sum 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from weft.collectives import Group, signals, workspace
from weft.kernels import tiles
from weft.kernels.chips import Chip, chip_of
from weft.kernels.operands import link_of

if TYPE_CHECKING:
    from weft.collectives import Workspace
    from weft.kernels.cached_attention import Cache

_MOST_PARTS = 16


@dataclass(frozen=True)
class Config:
    """How the kernel is launched; the same on all ranks.

    Attributes:
        programs: grid; items * split if split > 1.
        split: programs that share an item.
        block_n: keys a step.
    """

    programs: int
    split: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 2


def config_for(items: int, D: int, dtype: torch.dtype, chip: Chip) -> Config:
    """The launch for `items` pairs of a sequence and a key head."""
    split = max(1, min(_MOST_PARTS, chip.programs // max(items, 1)))
    # At 64 keys a kernel with pages spills on sm_90.
    block_n = 16 if chip.name == "interpreter" else 32
    # Triton 3.7 cannot translate the pipelined loop for AMD.
    num_stages = 1 if chip.name.startswith("gfx") else 2
    programs = max(1, min(chip.programs, items * split))
    return Config(programs, split, block_n, num_stages=num_stages)


@triton.jit
def _visible(limit, block_size, rank, world_size):
    """How many of this rank's keys lie before position `limit`: see `Cache.seen`."""
    cycle = block_size * world_size
    limit = tl.maximum(limit, 0)
    rest = limit % cycle - rank * block_size
    return limit // cycle * block_size + tl.minimum(tl.maximum(rest, 0), block_size)


@triton.jit
def _merge(top, total, acc, other_top, other_total, other_acc):
    """Two partial softmaxes (R,), (R,), (R, D) as one."""
    new_top = tl.maximum(top, other_top)
    # Of two that saw nothing, -inf - -inf.
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    mine, theirs = tl.exp(top - safe), tl.exp(other_top - safe)
    acc = acc * mine[:, None] + other_acc * theirs[:, None]
    return new_top, total * mine + other_total * theirs, acc


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, table_ptr, lengths_ptr, row, head, part, scale, T, BLOCK_SIZE, rank,
    world_size, stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_ks, stride_vb,
    stride_vh, stride_vs, stride_tb,
    G: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """(max, sum, acc) of one part of an item: rows (ROWS,), keys of this rank."""
    offs_r, offs_d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    group_head, t = offs_r // T, offs_r % T
    inside_d = offs_d < D
    row = tl.cast(row, tl.int64)
    q_rows = row * stride_qb + (head * G + group_head) * stride_qh + t * stride_qt
    inside_r = offs_r < G * T
    q = tl.load(
        q_ptr + q_rows[:, None] + offs_d[None, :],
        mask=inside_r[:, None] & inside_d[None, :],
        other=0.0,
    )
    length = tl.cast(tl.load(lengths_ptr + row), tl.int64)
    seen = _visible(length - T + 1 + t, BLOCK_SIZE, rank, world_size)
    count = _visible(length, BLOCK_SIZE, rank, world_size)
    share = (count + SPLIT * BLOCK_N - 1) // (SPLIT * BLOCK_N) * BLOCK_N
    first = part * share
    last = tl.minimum(first + share, count)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.full((ROWS,), 0.0, tl.float32)
    acc = tl.full((ROWS, BLOCK_D), 0.0, tl.float32)
    for start in range(first, last, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        inside_n = offs_n < last
        if PAGED:
            page = tl.load(
                table_ptr + row * stride_tb + offs_n // BLOCK_SIZE, mask=inside_n, other=0
            )
            page = tl.cast(page, tl.int64)
            k_rows = page * stride_kb + head * stride_kh + offs_n % BLOCK_SIZE * stride_ks
            v_rows = page * stride_vb + head * stride_vh + offs_n % BLOCK_SIZE * stride_vs
        else:
            k_rows = row * stride_kb + head * stride_kh + offs_n * stride_ks
            v_rows = row * stride_vb + head * stride_vh + offs_n * stride_vs
        inside = inside_n[:, None] & inside_d[None, :]
        k = tl.load(k_ptr + k_rows[:, None] + offs_d[None, :], mask=inside, other=0.0)
        v = tl.load(v_ptr + v_rows[:, None] + offs_d[None, :], mask=inside, other=0.0)
        scores = tiles.dot(q, tl.trans(k), tiles.zeros(ROWS, BLOCK_N)) * scale
        scores = tl.where(
            (offs_n[None, :] < seen[:, None]) & inside_n[None, :], scores, float("-inf")
        )
        new_top = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp(scores - safe[:, None])
        faded = tl.exp(top - safe)
        total = total * faded + tl.sum(weights, 1)
        acc = tiles.dot(weights.to(v.dtype), v, acc * faded[:, None])
        top = new_top
    return top, total, acc


@triton.jit(do_not_specialize=["rank", "block_rank"])
def _flash_decode_kernel(
    out_ptr,  # (B, H, T, D) contiguous
    lse_ptr,  # (B, H, T) fp32
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,  # (B, blocks) int32, or None
    lengths_ptr,  # (B,)
    scratch_ptr,  # (items * SPLIT, ROWS, BLOCK_D + 2) fp32, or None
    link,
    items,  # B * H_kv
    H_kv,
    T,
    BLOCK_SIZE,
    scale,
    rank,
    block_rank,  # rank and number of those among which the blocks are dealt
    block_ranks,
    stride_qb, stride_qh, stride_qt,
    stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs,
    stride_tb,
    WORLD_SIZE: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    PAGED: tl.constexpr,
) -> None:  # fmt: skip
    """Grid: the same on all ranks; items * SPLIT if SPLIT > 1.

    Example: 2 items, SPLIT=3, 6 programs: 0, 1 and 2 attend to a third of item 0's keys each;
    program 2 merges them, shows the result to the peers, and merges what their programs 2 show.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    generation = signals.last_generation(link.signal_ptrs, rank) + 1
    own_pad = signals.peer_ptr(link.signal_ptrs, rank, tl.int64)
    offs_r, offs_d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    offs = offs_r[:, None] * BLOCK_D + offs_d[None, :]
    SIZE: tl.constexpr = ROWS * (BLOCK_D + 2)
    SHOWN: tl.constexpr = ROWS * (BLOCK_D + 1)
    slot_stride = tl.cast(items, tl.int64) * SHOWN
    complete = True
    whole = program % SPLIT == SPLIT - 1
    for work in range(program, items * SPLIT, programs):
        item, part = work // SPLIT, work % SPLIT
        top, total, acc = _attend(
            q_ptr, k_ptr, v_ptr, table_ptr, lengths_ptr, item // H_kv, item % H_kv, part, scale, T,
            BLOCK_SIZE, block_rank, block_ranks, stride_qb, stride_qh, stride_qt, stride_kb,
            stride_kh, stride_ks, stride_vb, stride_vh, stride_vs, stride_tb,
            G, D, ROWS, BLOCK_D, BLOCK_N, SPLIT, PAGED,
        )  # fmt: skip
        if SPLIT > 1:
            base = scratch_ptr + tl.cast(item, tl.int64) * (SPLIT * SIZE)
            if whole:
                merged_top = tl.full((ROWS,), float("-inf"), tl.float32)
                merged_total = tl.full((ROWS,), 0.0, tl.float32)
                merged_acc = tl.full((ROWS, BLOCK_D), 0.0, tl.float32)
                for other in range(SPLIT - 1):
                    word = signals.slot_ptr(
                        link.signal_ptrs, rank, WORLD_SIZE, 0, rank, program - (SPLIT - 1) + other
                    )
                    polls = signals.patience(own_pad, link.max_polls)
                    complete &= signals.wait_local(word, generation, polls)
                    theirs = base + other * SIZE
                    merged_top, merged_total, merged_acc = _merge(
                        merged_top, merged_total, merged_acc,
                        tl.load(theirs + ROWS * BLOCK_D + offs_r),
                        tl.load(theirs + ROWS * (BLOCK_D + 1) + offs_r),
                        tl.load(theirs + offs),
                    )  # fmt: skip
                if not complete:
                    signals.record_timeout(own_pad, rank, rank, generation)
                top, total, acc = _merge(merged_top, merged_total, merged_acc, top, total, acc)
            else:
                mine = base + part * SIZE
                tl.store(mine + offs, acc)
                tl.store(mine + ROWS * BLOCK_D + offs_r, top)
                tl.store(mine + ROWS * (BLOCK_D + 1) + offs_r, total)
                signals.signal_local(
                    signals.slot_ptr(link.signal_ptrs, rank, WORLD_SIZE, 0, rank, program),
                    generation,
                )
        if whole & complete:
            some = total > 0
            value = acc / tl.where(some, total, 1.0)[:, None]
            lse = tl.where(some, top + tl.log(tl.where(some, total, 1.0)), float("-inf"))
            place = rank * slot_stride + tl.cast(item, tl.int64) * SHOWN
            for step in range(1, WORLD_SIZE + 1):
                peer = (rank + step) % WORLD_SIZE
                slot = place + signals.half_ptr(
                    link.buffer_ptrs, peer, generation, link.half_bytes, tl.float32
                )
                tl.store(slot + offs, value)
                tl.store(slot + ROWS * BLOCK_D + offs_r, lse)
    if whole & complete:
        signals.signal_peers(link.signal_ptrs, rank, WORLD_SIZE, 0, program, generation)
        # The own slot too was stored by other threads than the ones that read it next.
        tl.debug_barrier()
        complete &= signals.wait_for_peers(
            link.signal_ptrs, rank, WORLD_SIZE, 0, program, generation, link.max_polls
        )
    if whole & complete:
        slots = signals.half_ptr(link.buffer_ptrs, rank, generation, link.half_bytes, tl.float32)
        for work in range(program, items * SPLIT, programs):
            item = tl.cast(work // SPLIT, tl.int64)
            top = tl.full((ROWS,), float("-inf"), tl.float32)
            total = tl.full((ROWS,), 0.0, tl.float32)
            acc = tl.full((ROWS, BLOCK_D), 0.0, tl.float32)
            for source in range(WORLD_SIZE):
                slot = slots + source * slot_stride + item * SHOWN
                top, total, acc = _merge(
                    top, total, acc, tl.load(slot + ROWS * BLOCK_D + offs_r), 1.0,
                    tl.load(slot + offs),
                )  # fmt: skip
            some = top > float("-inf")
            total = tl.where(some, total, 1.0)
            rows = item * (G * T) + offs_r  # heads of one key head, and their tokens, lie together
            inside = offs_r < G * T
            tl.store(
                out_ptr + rows[:, None] * D + offs_d[None, :],
                (acc / total[:, None]).to(out_ptr.dtype.element_ty),
                mask=inside[:, None] & (offs_d < D)[None, :],
            )
            lse = tl.where(some, top + tl.log(total), float("-inf"))
            tl.store(lse_ptr + rows, lse, mask=inside)
    if signals.is_last_program(link.signal_ptrs, rank, programs):
        signals.set_generation(link.signal_ptrs, rank, generation)


def launch_flash_decode(
    q: torch.Tensor,
    cache: Cache,
    lengths: torch.Tensor,
    scale: float,
    group: Group,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (B, H, T, D) in q's dtype and lse (B, H, T) of the keys of all ranks of `group`."""
    B, H, T, D = q.shape
    out, lse = q.new_empty(q.shape), q.new_empty((B, H, T), dtype=torch.float32)
    items, H_kv = B * cache.k.shape[1], cache.k.shape[1]
    if not q.numel():
        return out, lse
    config = config or config_for(items, D, q.dtype, chip_of(q.device))
    rows = max(16, triton.next_power_of_2(H // H_kv * T))
    block_d = max(16, triton.next_power_of_2(D))
    ws = workspace(
        group,
        group.world_size * items * rows * (block_d + 1) * 4,
        channel="decode kernel",
        device=q.device,
    )
    ws.check("flash_decode")
    launch(out, lse, q, cache, lengths, scale, ws, config, rows, block_d)
    ws.launched("flash_decode")
    return out, lse


def launch(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    cache: Cache,
    lengths: torch.Tensor,
    scale: float,
    ws: Workspace,
    config: Config,
    rows: int,
    block_d: int,
) -> None:
    """Enqueue the kernel."""
    H_kv, T, D = cache.k.shape[1], q.shape[2], q.shape[3]
    items = q.shape[0] * H_kv
    scratch = None
    if config.split > 1:
        size = items * config.split * rows * (block_d + 2)
        scratch = torch.empty(size, dtype=torch.float32, device=q.device)
    q = q if q.stride(3) == 1 else q.contiguous()
    _flash_decode_kernel[(config.programs,)](
        out,
        lse,
        q,
        cache.k,
        cache.v,
        cache.table,
        lengths,
        scratch,
        link_of(ws),
        items,
        H_kv,
        T,
        cache.block,
        scale,
        ws.rank,
        cache.rank,
        cache.world_size,
        *q.stride()[:3],
        *cache.k.stride()[:3],
        *cache.v.stride()[:3],
        cache.table.stride(0) if cache.table is not None else 0,
        WORLD_SIZE=ws.world_size,
        G=q.shape[1] // H_kv,
        D=D,
        ROWS=rows,
        BLOCK_D=block_d,
        BLOCK_N=config.block_n,
        SPLIT=config.split,
        PAGED=cache.table is not None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
