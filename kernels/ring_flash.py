"""ring_attention, forward, in one launch: softmax(q @ k^T * scale) @ v over all ranks' keys.

Legend as in `ring_keys`; rank r holds n_r rows of queries for each of B * H heads. bf16, fp16 or
fp32 in and out, fp32 scores, softmax and sums; probabilities are rounded to v's dtype.

Data, for W = 3, on rank 1 (capital: symmetric memory, half of this generation g):

    rank 0             rank 1                                             rank 2
    k v -> K_0 V_0     k v -> K_1 V_1 (peers read them)                   k v -> K_2 V_2
             |         gathered [ k_0 v_0 | (own) | k_2 v_2 ]                      |
             +------ copied once --------^            ^------ copied once ---------+
                       a tile of q: own keys first, from k and v in place; then 2's, then 0's

Protocol: copy programs publish and fetch keys as `ring_keys` says. The other programs make tiles of
BLOCK_M queries of one head, each over all keys that it sees: an online softmax, the own keys first,
then those of rank+1, rank+2, ...: as they arrive. A source that no query of the tile sees is
skipped; a wait stands before the loop over a source's keys, never in it. The last program to end
sets GENERATION.

Why it neither races nor deadlocks: copy program p waits for copy programs p of its peers, which
signal before they wait; the others wait for copy programs of their own launch, which have smaller
numbers. Every copy program waits for every peer, so that no call ends before all have published
(rule 2 of `weft.collectives.signals`), and publishes after this rank's previous launch (rule 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from weft.collectives import Group, Workspace, signals, workspace
from weft.kernels import tiles
from weft.kernels.chips import INTERPRETER, Chip, chip_of
from weft.kernels.ring_keys import (
    copy_programs,
    count_tiles,
    fetch_keys,
    having,
    key_spans,
    pitch_of,
    publish_keys,
    rows_of,
    shard_bytes,
    shard_offset,
    span_of,
    tables,
    tile_of,
    visible,
)
from weft.kernels.sharded_sequence import UNBOUNDED, Geometry

_INTERPRETED = tl.constexpr(signals.INTERPRETED)


@dataclass(frozen=True)
class Config:
    """How the kernel is launched; the same on all ranks.

    Attributes:
        block_m, block_n: queries and keys of a tile.
        group_heads: heads whose tiles run together, to share keys in L2.
        programs: grid, copy programs included.
        copy_programs: how many of them fetch keys.
        copy_m: rows that a copy moves at a time.
    """

    block_m: int
    block_n: int
    group_heads: int
    programs: int
    copy_programs: int
    copy_m: int
    num_warps: int = 8
    num_stages: int = 2


def config_for(
    heads: int, kv_heads: int, rows: int, D: int, dtype: torch.dtype, world_size: int, chip: Chip
) -> Config:
    """The launch for shards of at most `rows` queries, `heads` = B * H."""
    copies = copy_programs(chip, heads, kv_heads, rows, dtype, world_size)
    if chip is INTERPRETER:
        block = 16 if rows <= 16 else 32
        return Config(block, block, 2, chip.programs, copies, 16)
    block_m, block_n, num_warps, num_stages = _tile(D, dtype, chip)
    if rows <= 64:
        block_m, num_warps = 16 if rows <= 16 else 64, 4
    group_heads = max(1, heads // kv_heads)
    return Config(block_m, block_n, group_heads, chip.programs, copies, 32, num_warps, num_stages)


def _tile(D: int, dtype: torch.dtype, chip: Chip) -> tuple[int, int, int, int]:
    """Rows of queries, rows of keys, warps and stages: the largest tried that spill nowhere."""
    width = 64 if D <= 64 else 128 if D <= 128 else 256
    if dtype == torch.float32:
        return 32, 16, 4, 1
    family = chip.name if chip.name in ("sm_80", "sm_90", "gfx942") else "sm_100"
    return {
        "sm_80": {64: (128, 64, 8, 3), 128: (128, 32, 8, 3), 256: (32, 32, 8, 2)},
        "sm_90": {64: (128, 128, 8, 2), 128: (128, 64, 8, 3), 256: (128, 32, 8, 2)},
        "sm_100": {64: (128, 64, 8, 2), 128: (64, 64, 8, 3), 256: (64, 32, 8, 1)},
        "gfx942": {64: (128, 64, 4, 1), 128: (128, 64, 4, 1), 256: (64, 32, 4, 1)},
    }[family][width]


def workspace_for(
    k: torch.Tensor, group: Group, geometry: Geometry, extra_bytes: int = 0
) -> Workspace:
    """The group's workspace with room for the largest shard of keys and values, and some more."""
    nbytes = shard_bytes(k.shape[0] * k.shape[1], max(geometry.k_sizes), k.shape[3], k.dtype)
    return workspace(group, nbytes + extra_bytes, channel="ring", device=k.device)


# tl.max and tl.sum are kernels themselves: see `tiles`. What they are made of is not.
@triton.jit
def row_max(x):
    """The largest of each row."""
    return tl.reduce(x, 1, tl.standard._elementwise_max)


@triton.jit
def row_sum(x):
    """The sum of each row."""
    return tl.reduce(x, 1, tl.standard._sum_combine)


@triton.jit
def load_rows(
    ptr,
    start,
    stop,
    stride,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
):
    """BLOCK rows of a matrix HEAD_DIM wide, 0 beyond it, and from row `stop` on if MASKED.

    Offsets inside the block are 32 bits wide: kept through a loop, they take half the registers.
    """
    rows, columns = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    ptrs = ptr + tl.cast(start, tl.int64) * stride
    ptrs = ptrs + (rows[:, None] * stride + columns[None, :])
    if MASKED:
        inside = (rows[:, None] < stop - start) & (columns[None, :] < HEAD_DIM)
        values = tl.load(ptrs, mask=inside, other=0.0)
    elif HEAD_DIM == BLOCK_D:
        values = tl.load(ptrs)
    else:
        values = tl.load(ptrs, mask=columns[None, :] < HEAD_DIM, other=0.0)
    return values


@triton.jit
def key_ptrs(
    k_ptr,
    v_ptr,
    gathered_ptr,
    kv_strides,
    table_ptr,
    source,
    batch,
    kv_head,
    H_KV,
    heads,
    IS_OWN,
    PITCH: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    SPANS: tl.constexpr,
):
    """Where row 0 of a source's keys and of its values of one head lies, and their stride."""
    if IS_OWN:
        at = batch * kv_strides[0] + kv_head * kv_strides[1]
        k_head, v_head, stride = k_ptr + at, v_ptr + at, tl.cast(kv_strides[2], tl.int32)
    else:
        rows = tl.cast(rows_of(table_ptr, source, WORLD_SIZE, SPANS), tl.int64)
        shard = gathered_ptr + shard_offset(table_ptr, source, heads, PITCH, WORLD_SIZE, SPANS)
        k_head = shard + (batch * H_KV + kv_head) * rows * PITCH
        v_head, stride = k_head + heads * rows * PITCH, tl.cast(PITCH, tl.int32)
    return k_head, v_head, stride


@triton.jit
def seen_pairs(
    q_position,
    q_stop,
    k_position,
    k_stop,
    documents_ptr,
    before,
    after,
    keys,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(BLOCK_M, BLOCK_N): whether queries from a position on see keys from another on.

    Computed where it is used: its rows' bounds would else be live through the loops without masks.
    """
    rows, columns = q_position + tl.arange(0, BLOCK_M), k_position + tl.arange(0, BLOCK_N)
    first, last = visible(rows, documents_ptr, before, after, keys)
    last = tl.where(rows < q_stop, tl.minimum(last, k_stop), 0)
    return (columns[None, :] >= first[:, None]) & (columns[None, :] < last[:, None])


@triton.jit
def _attend(
    acc,  # (BLOCK_M, BLOCK_D) fp32
    row_top,  # (BLOCK_M,) the largest score so far, times log2(e)
    row_total,  # (BLOCK_M,)
    q,
    k_ptr,
    v_ptr,
    stride,
    begin,
    end,
    shift,  # position of row 0 of the keys
    position,  # of row 0 of q
    documents_ptr,
    before,
    after,
    keys,
    qk_scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Keys begin .. end - 1 added to the softmax; unless MASKED, whole blocks that all see."""
    BLOCK_M: tl.constexpr = q.shape[0]
    # A block or two are not worth a pipeline, nor its registers.
    for start in tl.range(begin, end, BLOCK_N, num_stages=1 if MASKED else None):
        k = load_rows(k_ptr, start, end, stride, BLOCK_N, HEAD_DIM, BLOCK_D, MASKED)
        scores = tiles.dot(q, k.T, tiles.zeros(BLOCK_M, BLOCK_N)) * qk_scale
        if MASKED:
            seen = seen_pairs(
                position,
                position + BLOCK_M,
                start + shift,
                end + shift,
                documents_ptr,
                before,
                after,
                keys,
                BLOCK_M,
                BLOCK_N,
            )
            scores = tl.where(seen, scores, float("-inf"))
        top = tl.maximum(row_top, row_max(scores))
        # A row that has seen nothing keeps -inf: -inf - -inf would be nan.
        base = tl.where(top == float("-inf"), 0.0, top) if MASKED else top
        p = tl.exp2(scores - base[:, None])
        fade = tl.exp2(row_top - base)
        row_total = row_total * fade + row_sum(p)
        v = load_rows(v_ptr, start, end, stride, BLOCK_N, HEAD_DIM, BLOCK_D, MASKED)
        acc = tiles.dot(tiles.rounded(p, v.dtype), v, acc * fade[:, None])
        row_top = top
    return acc, row_top, row_total


@triton.jit
def interval(first_a, last_a, first_b, last_b, start, stop, BLOCK: tl.constexpr):
    """Cuts a span start .. stop - 1 for a tile whose rows see first_a .. last_a - 1 at its lower
    and first_b .. last_b - 1 at its upper end: (begin, a, b, end) where begin .. end is all that
    any row sees, and a .. b, in whole blocks from begin on, what every row sees.
    """
    begin, end = tl.maximum(first_a, start), tl.minimum(last_b, stop)
    common, until = tl.maximum(first_b, begin), tl.minimum(last_a, end)
    a = begin + tiles.cdiv(common - begin, BLOCK) * BLOCK
    b = a + tl.maximum(until - a, 0) // BLOCK * BLOCK
    return begin, a, b, end


@triton.jit(do_not_specialize=["rank", "max_polls"])
def _ring_attention_kernel(
    out_ptr,  # (B, H, n, D)
    lse_ptr,  # (B, H, n) fp32
    gathered_ptr,  # all ranks' keys and values
    q_ptr,  # (B, H, n, D)
    k_ptr,  # (B, H_kv, m, D)
    v_ptr,
    table_ptr,
    documents_ptr,  # (2, keys) or None
    buffer_ptrs,
    signal_ptrs,
    q_strides,
    kv_strides,
    B,
    H,
    H_KV,
    n,
    keys,
    before,
    after,
    qk_scale,
    half_bytes,
    max_polls,
    rank,
    WORLD_SIZE: tl.constexpr,
    SPANS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PITCH: tl.constexpr,
    HAS_LEFT_EDGE: tl.constexpr,
    GROUP_HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COPY_PROGRAMS: tl.constexpr,
    COPY_M: tl.constexpr,
) -> None:
    """out and lse of the own queries. Grid: COPY_PROGRAMS and at least one more.

    Example: 2 ranks with 48 queries each and 48 keys, causal, BLOCK_M=32, one head, 3 programs of
    which 1 copies. On rank 0, program 1 makes queries 32 .. 47 and program 2 queries 0 .. 31, from
    own keys; on rank 1 both then wait for rank 0's.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    generation = signals.last_generation(signal_ptrs, rank) + 1
    kv_heads = B * H_KV
    if program < COPY_PROGRAMS:
        publish_keys(
            k_ptr,
            v_ptr,
            kv_strides,
            table_ptr,
            buffer_ptrs,
            signal_ptrs,
            kv_heads,
            H_KV,
            half_bytes,
            rank,
            generation,
            WORLD_SIZE,
            SPANS,
            HEAD_DIM,
            PITCH,
            BLOCK_D,
            COPY_PROGRAMS,
            COPY_M,
        )
        fetch_keys(
            gathered_ptr,
            table_ptr,
            buffer_ptrs,
            signal_ptrs,
            kv_heads,
            half_bytes,
            max_polls,
            rank,
            generation,
            WORLD_SIZE,
            SPANS,
            HEAD_DIM,
            PITCH,
            BLOCK_D,
            COPY_PROGRAMS,
            COPY_M,
        )
    else:
        come = tl.cast(1, tl.int64)  # bit `step`: that source's keys are here
        tiles_m = count_tiles(table_ptr, rank, SPANS, BLOCK_M)
        count = tiles_m * B * H
        for tile in range(program - COPY_PROGRAMS, count, programs - COPY_PROGRAMS):
            head, tile_m = tiles.grouped_tile(tile, B * H, tiles_m, GROUP_HEADS)
            # The last queries see the most where attention is causal: longest tiles first.
            position, q_row, q_length = tile_of(
                table_ptr, rank, tiles_m - 1 - tile_m, SPANS, BLOCK_M
            )
            batch = tl.cast(head // H, tl.int64)
            q_of = tl.cast(head % H, tl.int64)
            kv_head = q_of // (H // H_KV)
            stop = q_row + q_length
            q_head = q_ptr + batch * q_strides[0] + q_of * q_strides[1]
            q = load_rows(q_head, q_row, stop, q_strides[2], BLOCK_M, HEAD_DIM, BLOCK_D, True)
            first_a, last_a = visible(position, documents_ptr, before, after, keys)
            upper = position + q_length - 1
            first_b, last_b = visible(upper, documents_ptr, before, after, keys)
            acc = tiles.zeros(BLOCK_M, BLOCK_D)
            row_top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
            row_total = tl.full((BLOCK_M,), 0.0, dtype=tl.float32)
            for step in range(WORLD_SIZE):
                source = (rank + step) % WORLD_SIZE
                k_head, v_head, stride = key_ptrs(
                    k_ptr,
                    v_ptr,
                    gathered_ptr,
                    kv_strides,
                    table_ptr,
                    source,
                    batch,
                    kv_head,
                    H_KV,
                    kv_heads,
                    step == 0,
                    PITCH,
                    WORLD_SIZE,
                    SPANS,
                )
                for span in range(SPANS):
                    start, row, length = span_of(
                        key_spans(table_ptr, WORLD_SIZE, SPANS), source, span, SPANS
                    )
                    begin, a, b, end = interval(
                        first_a, last_a, first_b, last_b, start, start + length, BLOCK_N
                    )
                    if begin < end:
                        come = having(
                            come,
                            step,
                            signal_ptrs,
                            rank,
                            generation,
                            max_polls,
                            WORLD_SIZE,
                            COPY_PROGRAMS,
                        )
                        shift = start - row
                        begin, a, b, end = begin - shift, a - shift, b - shift, end - shift
                        if HAS_LEFT_EDGE:
                            acc, row_top, row_total = _attend(
                                acc,
                                row_top,
                                row_total,
                                q,
                                k_head,
                                v_head,
                                stride,
                                begin,
                                tl.minimum(a, end),
                                shift,
                                position,
                                documents_ptr,
                                before,
                                after,
                                keys,
                                qk_scale,
                                HEAD_DIM,
                                BLOCK_N,
                                BLOCK_D,
                                True,
                            )
                        acc, row_top, row_total = _attend(
                            acc,
                            row_top,
                            row_total,
                            q,
                            k_head,
                            v_head,
                            stride,
                            a,
                            b,
                            shift,
                            position,
                            documents_ptr,
                            before,
                            after,
                            keys,
                            qk_scale,
                            HEAD_DIM,
                            BLOCK_N,
                            BLOCK_D,
                            False,
                        )
                        acc, row_top, row_total = _attend(
                            acc,
                            row_top,
                            row_total,
                            q,
                            k_head,
                            v_head,
                            stride,
                            b,
                            end,
                            shift,
                            position,
                            documents_ptr,
                            before,
                            after,
                            keys,
                            qk_scale,
                            HEAD_DIM,
                            BLOCK_N,
                            BLOCK_D,
                            True,
                        )
            # A query that saw nothing: 0, and -inf from row_top.
            row_total = tl.where(row_total == 0, 1.0, row_total)
            at = tl.cast(head, tl.int64) * n
            # From row 0 of the head: offsets that are the same for all tiles would be kept in
            # registers through them all.
            out, out_head = acc / row_total[:, None], out_ptr + at * HEAD_DIM
            tiles.store(out_head, out, q_row, 0, stop, HEAD_DIM, HEAD_DIM, 1)
            rows = q_row + tl.arange(0, BLOCK_M)
            lse = (row_top + tl.log2(row_total)) * 0.6931471805599453
            tl.store(lse_ptr + at + rows, lse, mask=rows < stop)
    if signals.is_last_program(signal_ptrs, rank, programs):
        signals.set_generation(signal_ptrs, rank, generation)


def in_rows(*tensors: torch.Tensor) -> Any:
    """The tensors as kernels read them: rows contiguous, strides alike; copies where they are not.

    Offsets inside a block of rows, 256 at most, must fit 32 bits.
    """
    strides = tensors[0].stride()
    if all(x.stride() == strides for x in tensors) and strides[3] == 1 and strides[2] < 1 << 22:
        return tensors if len(tensors) > 1 else tensors[0]
    return in_rows(*(x.clone(memory_format=torch.contiguous_format) for x in tensors))


def launch_ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ws: Workspace,
    geometry: Geometry,
    scale: float,
    *,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Enqueue this rank's part of the attention.

    Args:
        q: (B, H, n, D), any strides; k, v: (B, H_kv, m, D).
        ws: `workspace_for` the keys.
        config: the same on all ranks; default `config_for`.

    Returns:
        out (B, H, n, D), contiguous, dtype of q, and lse (B, H, n), fp32.
    """
    B, H, n, D = q.shape
    H_kv, W, sees = k.shape[1], ws.world_size, geometry.sees
    config = config or config_for(
        B * H, B * H_kv, max(geometry.q_sizes), D, q.dtype, W, chip_of(q.device)
    )
    q, (k, v) = in_rows(q), in_rows(k, v)
    table, documents = tables(geometry, ws.rank, q.device)
    pitch = pitch_of(D, k.dtype)
    gathered = k.new_empty(2 * B * H_kv * (sees.keys if W > 1 else 0) * pitch)
    out = torch.empty((B, H, n, D), dtype=q.dtype, device=q.device)
    lse = torch.empty((B, H, n), dtype=torch.float32, device=q.device)
    _ring_attention_kernel[(config.programs,)](
        out,
        lse,
        gathered,
        q,
        k,
        v,
        table,
        documents,
        ws.buffer_ptrs,
        ws.signal_ptrs,
        q.stride()[:3],
        k.stride()[:3],
        B,
        H,
        H_kv,
        n,
        sees.keys,
        sees.before,
        sees.after,
        scale * 1.4426950408889634,
        ws.half_bytes,
        ws.timeout_polls,
        ws.rank,
        WORLD_SIZE=W,
        SPANS=len(geometry.q_spans[0]),
        HEAD_DIM=D,
        PITCH=pitch,
        HAS_LEFT_EDGE=sees.before < UNBOUNDED or documents is not None,
        GROUP_HEADS=config.group_heads,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=max(16, triton.next_power_of_2(D)),
        COPY_PROGRAMS=config.copy_programs,
        COPY_M=config.copy_m,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out, lse
