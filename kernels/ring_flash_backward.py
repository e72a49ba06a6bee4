"""ring_attention, backward, in one launch: dq stays with its rank, dk and dv go to their owners.

Legend as in `ring_keys` and `ring_flash`. With p = exp(scores - lse), the final probabilities:

    dv = p^T @ dout    ds = p * (dout @ v^T - delta)    dq = scale * ds @ k    dk = scale * ds^T @ q
    delta (B, H, n) = sum over D of dout * out, - dlse where lse was used

dk, dv are sums over the queries of all ranks. The half of this generation on every rank holds,
behind its published keys, W slots, one a source rank: its part of dk and dv of the own keys, fp32.

    rank 0 makes d(keys of 0) --> rank 0, slot 0       rank 1 makes d(keys of 1) --> rank 1, slot 1
           then  d(keys of 1) --> rank 1, slot 0              then  d(keys of 2) --> rank 2, slot 1
    rank 0: dk, dv = slot 0 + slot 1 + slot 2, in that order: bitwise the same in every run

Tiles of BLOCK_N keys of one head are numbered alike on all ranks: tile u of owner d is made by the
program with number (u + d * tiles a shard) % P among those that compute. So what program p of the
owner adds up was made by p of each peer.

Protocol
  1. Copy programs publish keys, make delta and announce it in the own words (1, rank, p), then
     fetch keys, as `ring_keys` says.
  2. The other programs, each: for the owners rank, rank+1, ...: wait for the owner's keys, make the
     tiles of dk and dv, store them in the owner's slot `rank`, signal the word (0, rank, program)
     of its pad: release at system scope. Tiles that no query here sees are left out on both sides.
  3. Tiles of dq, over all keys, which have come by now.
  4. Wait for the words (0, r, program) of all peers r (acquire, system scope); add the slots of
     those that see the tile, in rank order; store dk and dv.
  5. Take a ticket; the last program sets GENERATION.

Why it neither races nor deadlocks: as for `ring_flash`; and nobody waits in step 4 before it has
signalled everything in step 2, where it waits for copy programs only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from weft.collectives import Group, Workspace, signals
from weft.kernels import ring_flash, tiles
from weft.kernels.chips import INTERPRETER, Chip, chip_of
from weft.kernels.ring_flash import (
    in_rows,
    interval,
    key_ptrs,
    load_rows,
    row_sum,
    seen_pairs,
)
from weft.kernels.ring_keys import (
    copy_programs,
    count_tiles,
    fetch_keys,
    having,
    is_needed,
    key_spans,
    pitch_of,
    publish_keys,
    rows_of,
    shard_bytes,
    span_of,
    tables,
    tile_of,
    visible,
)
from weft.kernels.sharded_sequence import Geometry


@dataclass(frozen=True)
class Config:
    """How the kernel is launched; the same on all ranks.

    Attributes:
        dkv_m, dkv_n: queries of a step and keys of a tile of dk and dv.
        dq_m, dq_n: queries of a tile of dq and keys of a step.
        reduce_n: rows of dk and dv that are added up at a time.
        group_heads, programs, copy_programs, copy_m: as in `ring_flash.Config`.
    """

    dkv_m: int
    dkv_n: int
    dq_m: int
    dq_n: int
    reduce_n: int
    group_heads: int
    programs: int
    copy_programs: int
    copy_m: int
    num_warps: int = 8
    num_stages: int = 1


def config_for(
    heads: int, kv_heads: int, rows: int, D: int, dtype: torch.dtype, world_size: int, chip: Chip
) -> Config:
    """The launch for shards of at most `rows` queries, `heads` = B * H."""
    copies = copy_programs(chip, heads, kv_heads, rows, dtype, world_size)
    if chip is INTERPRETER:
        block = 16 if rows <= 16 else 32
        return Config(block, block, block, block, 16, 2, chip.programs, copies, 16)
    amd = chip.name.startswith("gfx")
    num_warps, num_stages = 8, 1 if amd or chip.name.startswith("sm_10") else 2
    if dtype == torch.float32:
        short, long, num_warps, num_stages = 16, 32 if D <= 128 else 16, 4, 1
    elif D <= 128:
        short, long = 32, 64
    else:
        short, long = 32 if chip.name.startswith("sm_10") else 16, 32
    if amd:
        num_warps = 4
    return Config(
        short,
        long,
        long,
        short,
        16,
        max(1, heads // kv_heads),
        chip.programs,
        copies,
        32,
        num_warps,
        num_stages,
    )


def _slots_offset(k: torch.Tensor, geometry: Geometry) -> int:
    """Bytes of a half before the slots: the published keys, in whole lines."""
    nbytes = shard_bytes(k.shape[0] * k.shape[1], max(geometry.k_sizes), k.shape[3], k.dtype)
    return -(-nbytes // 128) * 128


def workspace_for(k: torch.Tensor, group: Group, geometry: Geometry) -> Workspace:
    """The group's workspace with room for a shard of keys and W slots of their gradients."""
    slot = shard_bytes(k.shape[0] * k.shape[1], max(geometry.k_sizes), k.shape[3], torch.float32)
    return ring_flash.workspace_for(k, group, geometry, 128 + slot * group.world_size)


@triton.jit
def _make_delta(
    delta_ptr,  # (B, H, n)
    out_ptr,  # (B, H, n, D)
    dout_ptr,
    dlse_ptr,  # (B, H, n) or None
    dout_strides,
    H,
    n,
    count,  # B * H * n
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COPY_PROGRAMS: tl.constexpr,
    COPY_M: tl.constexpr,
):
    """A copy program's share of delta."""
    offs_d = tl.arange(0, BLOCK_D)
    for block in range(tl.program_id(0), tiles.cdiv(count, COPY_M), COPY_PROGRAMS):
        at = tl.cast(block, tl.int64) * COPY_M + tl.arange(0, COPY_M)
        head, row = at // n, at % n
        dout_rows = head // H * dout_strides[0] + head % H * dout_strides[1] + row * dout_strides[2]
        inside = (at[:, None] < count) & (offs_d[None, :] < HEAD_DIM)
        out = tl.load(out_ptr + at[:, None] * HEAD_DIM + offs_d[None, :], mask=inside, other=0.0)
        dout = tl.load(dout_ptr + dout_rows[:, None] + offs_d[None, :], mask=inside, other=0.0)
        delta = row_sum(out.to(tl.float32) * dout.to(tl.float32))
        if dlse_ptr is not None:
            delta -= tl.load(dlse_ptr + at, mask=at < count, other=0.0)
        tl.store(delta_ptr + at, delta, mask=at < count)


@triton.jit
def _add_to_dkv(
    dk,  # (BLOCK_N, BLOCK_D) fp32
    dv,
    k,  # (BLOCK_N, BLOCK_D)
    v,
    q_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    stride_q,
    stride_dout,
    begin,
    a,
    b,
    end,
    shift,  # position of row 0 of the queries
    position,  # of row 0 of k
    documents_ptr,
    before,
    after,
    keys,
    qk_scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """What queries begin .. end - 1 add, of which a .. b - 1 see all the keys.

    One loop with a branch: there is no pipeline that it could break, and three loops, each with its
    addresses in registers, spill.
    """
    BLOCK_N: tl.constexpr = k.shape[0]
    for start in range(begin, end, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        q = load_rows(q_ptr, start, end, stride_q, BLOCK_M, HEAD_DIM, BLOCK_D, True)
        lse = tl.load(lse_ptr + rows, mask=rows < end, other=0.0)
        delta = tl.load(delta_ptr + rows, mask=rows < end, other=0.0)
        lse = tl.where(lse == float("-inf"), 0.0, lse * 1.4426950408889634)
        scores = tiles.dot(q, k.T, tiles.zeros(BLOCK_M, BLOCK_N)) * qk_scale
        p = tl.exp2(scores - lse[:, None])
        dout = load_rows(dout_ptr, start, end, stride_dout, BLOCK_M, HEAD_DIM, BLOCK_D, True)
        ds = tiles.dot(dout, v.T, tiles.zeros(BLOCK_M, BLOCK_N)) - delta[:, None]
        if (start < a) | (start >= b):
            seen = seen_pairs(
                start + shift,
                end + shift,
                position,
                position + BLOCK_N,
                documents_ptr,
                before,
                after,
                keys,
                BLOCK_M,
                BLOCK_N,
            )
            # Keys of the tile that nobody here sees were not fetched: whatever they are, nan too,
            # must not be used.
            p, ds = tl.where(seen, p, 0.0), tl.where(seen, ds, 0.0)
        dv = tiles.dot(tiles.rounded(p, dout.dtype).T, dout, dv)
        dk = tiles.dot(tiles.rounded(p * ds, q.dtype).T, q, dk)
    return dk, dv


@triton.jit
def _add_to_dq(
    dq,  # (BLOCK_M, BLOCK_D) fp32
    q,
    dout,
    lse,  # (BLOCK_M,) times log2(e)
    delta,
    k_ptr,
    v_ptr,
    stride,
    begin,
    a,
    b,
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
):
    """What keys begin .. end - 1 add, of which all the queries see a .. b - 1."""
    BLOCK_M: tl.constexpr = q.shape[0]
    for start in range(begin, end, BLOCK_N):
        k = load_rows(k_ptr, start, end, stride, BLOCK_N, HEAD_DIM, BLOCK_D, True)
        v = load_rows(v_ptr, start, end, stride, BLOCK_N, HEAD_DIM, BLOCK_D, True)
        scores = tiles.dot(q, k.T, tiles.zeros(BLOCK_M, BLOCK_N)) * qk_scale
        p = tl.exp2(scores - lse[:, None])
        if (start < a) | (start >= b):
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
            p = tl.where(seen, p, 0.0)
        ds = p * (tiles.dot(dout, v.T, tiles.zeros(BLOCK_M, BLOCK_N)) - delta[:, None])
        dq = tiles.dot(tiles.rounded(ds, k.dtype), k, dq)
    return dq


@triton.jit
def _first_tile(program, programs, owner, stagger):
    """The first tile of an owner's keys that is this program's; it makes every programs-th."""
    return (program + programs - owner * stagger % programs) % programs


@triton.jit(do_not_specialize=["rank", "max_polls"])
def _ring_attention_backward_kernel(
    dq_ptr,  # (B, H, n, D)
    dk_ptr,  # (B, H_kv, m, D)
    dv_ptr,
    delta_ptr,  # (B, H, n)
    gathered_ptr,  # all ranks' keys and values
    q_ptr,  # (B, H, n, D)
    k_ptr,  # (B, H_kv, m, D)
    v_ptr,
    out_ptr,  # (B, H, n, D)
    dout_ptr,
    lse_ptr,  # (B, H, n)
    dlse_ptr,  # (B, H, n) or None
    table_ptr,
    documents_ptr,  # (2, keys) or None
    buffer_ptrs,
    signal_ptrs,
    q_strides,
    kv_strides,
    dout_strides,
    B,
    H,
    H_KV,
    n,
    queries,
    keys,
    before,
    after,
    scale,
    qk_scale,
    slots_offset,
    slot_rows,
    stagger,
    half_bytes,
    max_polls,
    rank,
    WORLD_SIZE: tl.constexpr,
    SPANS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PITCH: tl.constexpr,
    SLOT_PITCH: tl.constexpr,
    GROUP_HEADS: tl.constexpr,
    DKV_M: tl.constexpr,
    DKV_N: tl.constexpr,
    DQ_M: tl.constexpr,
    DQ_N: tl.constexpr,
    REDUCE_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COPY_PROGRAMS: tl.constexpr,
    COPY_M: tl.constexpr,
) -> None:
    """dq, dk and dv of the own shards. Grid: COPY_PROGRAMS and at least one more.

    Example: 2 ranks with 48 keys each, one head, DKV_N=32, 3 programs of which 1 copies, stagger 2:
    programs 1 and 2 make keys 0 .. 31 and 32 .. 47 of either owner, on both ranks; then dq.
    """
    generation = signals.last_generation(signal_ptrs, rank) + 1
    kv_heads = B * H_KV
    if tl.program_id(0) < COPY_PROGRAMS:
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
        _make_delta(
            delta_ptr,
            out_ptr,
            dout_ptr,
            dlse_ptr,
            dout_strides,
            H,
            n,
            tl.cast(B * H, tl.int64) * n,
            HEAD_DIM,
            BLOCK_D,
            COPY_PROGRAMS,
            COPY_M,
        )
        signals.signal_local(
            signals.slot_ptr(signal_ptrs, rank, WORLD_SIZE, 1, rank, tl.program_id(0)), generation
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
        program = tl.program_id(0) - COPY_PROGRAMS
        programs = tl.num_programs(0) - COPY_PROGRAMS
        come = tl.cast(0, tl.int64)  # bit `step`: that source's keys are here; bit 0: delta is
        come = having(come, 0, signal_ptrs, rank, generation, max_polls, WORLD_SIZE, COPY_PROGRAMS)
        keys_ptr = key_spans(table_ptr, WORLD_SIZE, SPANS)
        slot_stride = tl.cast(slot_rows, tl.int64) * kv_heads * SLOT_PITCH  # from dk to dv
        for step in range(WORLD_SIZE):
            owner = (rank + step) % WORLD_SIZE
            slot = signals.half_ptr(buffer_ptrs, owner, generation, half_bytes, tl.float32)
            slot += slots_offset // 4 + rank * 2 * slot_stride
            held = rows_of(table_ptr, owner, WORLD_SIZE, SPANS)
            count = count_tiles(keys_ptr, owner, SPANS, DKV_N) * kv_heads
            first_tile = _first_tile(program, programs, owner, stagger)
            if is_needed(table_ptr, rank, owner, 0, held, WORLD_SIZE, SPANS):
                come = having(
                    come, step, signal_ptrs, rank, generation, max_polls, WORLD_SIZE, COPY_PROGRAMS
                )
            if (come >> step & 1) == 0:
                count = 0  # nothing is seen of it, or it did not come in time
            for tile in range(first_tile, count, programs):
                head = tile % kv_heads
                position, row, length = tile_of(keys_ptr, owner, tile // kv_heads, SPANS, DKV_N)
                if is_needed(table_ptr, rank, owner, row, row + length, WORLD_SIZE, SPANS):
                    batch, kv_head = tl.cast(head // H_KV, tl.int64), tl.cast(head % H_KV, tl.int64)
                    k_head, v_head, stride = key_ptrs(
                        k_ptr,
                        v_ptr,
                        gathered_ptr,
                        kv_strides,
                        table_ptr,
                        owner,
                        batch,
                        kv_head,
                        H_KV,
                        kv_heads,
                        step == 0,
                        PITCH,
                        WORLD_SIZE,
                        SPANS,
                    )
                    stop = row + length
                    k = load_rows(k_head, row, stop, stride, DKV_N, HEAD_DIM, BLOCK_D, True)
                    v = load_rows(v_head, row, stop, stride, DKV_N, HEAD_DIM, BLOCK_D, True)
                    first_a, last_a = visible(position, documents_ptr, after, before, queries)
                    upper = position + length - 1
                    first_b, last_b = visible(upper, documents_ptr, after, before, queries)
                    dk, dv = tiles.zeros(DKV_N, BLOCK_D), tiles.zeros(DKV_N, BLOCK_D)
                    for shared in range(SPANS * (H // H_KV)):
                        q_start, q_row, q_length = span_of(table_ptr, rank, shared % SPANS, SPANS)
                        q_of = kv_head * (H // H_KV) + shared // SPANS
                        begin, a, b, end = interval(
                            first_a, last_a, first_b, last_b, q_start, q_start + q_length, DKV_M
                        )
                        q_head = q_ptr + batch * q_strides[0] + q_of * q_strides[1]
                        dout_head = dout_ptr + batch * dout_strides[0] + q_of * dout_strides[1]
                        of_head = (batch * H + q_of) * n
                        shift = q_start - q_row
                        dk, dv = _add_to_dkv(
                            dk,
                            dv,
                            k,
                            v,
                            q_head,
                            dout_head,
                            lse_ptr + of_head,
                            delta_ptr + of_head,
                            q_strides[2],
                            dout_strides[2],
                            begin - shift,
                            a - shift,
                            b - shift,
                            end - shift,
                            shift,
                            position,
                            documents_ptr,
                            before,
                            after,
                            keys,
                            qk_scale,
                            HEAD_DIM,
                            DKV_M,
                            BLOCK_D,
                        )
                    at = slot + tl.cast(head, tl.int64) * slot_rows * SLOT_PITCH
                    tiles.store(at, dk * scale, row, 0, stop, HEAD_DIM, SLOT_PITCH, 1)
                    tiles.store(at + slot_stride, dv, row, 0, stop, HEAD_DIM, SLOT_PITCH, 1)
            if step > 0:
                signals.signal(
                    signals.slot_ptr(
                        signal_ptrs, owner, WORLD_SIZE, 0, rank, COPY_PROGRAMS + program
                    ),
                    generation,
                )

        tiles_m = count_tiles(table_ptr, rank, SPANS, DQ_M)
        for tile in range(program, tiles_m * B * H, programs):
            head, tile_m = tiles.grouped_tile(tile, B * H, tiles_m, GROUP_HEADS)
            position, q_row, q_length = tile_of(table_ptr, rank, tiles_m - 1 - tile_m, SPANS, DQ_M)
            batch, q_of = tl.cast(head // H, tl.int64), tl.cast(head % H, tl.int64)
            rows, stop = q_row + tl.arange(0, DQ_M), q_row + q_length
            of_head = tl.cast(head, tl.int64) * n
            q_head = q_ptr + batch * q_strides[0] + q_of * q_strides[1]
            dout_head = dout_ptr + batch * dout_strides[0] + q_of * dout_strides[1]
            q = load_rows(q_head, q_row, stop, q_strides[2], DQ_M, HEAD_DIM, BLOCK_D, True)
            dout = load_rows(dout_head, q_row, stop, dout_strides[2], DQ_M, HEAD_DIM, BLOCK_D, True)
            lse = tl.load(lse_ptr + of_head + rows, mask=rows < stop, other=0.0)
            lse = tl.where(lse == float("-inf"), 0.0, lse * 1.4426950408889634)
            delta = tl.load(delta_ptr + of_head + rows, mask=rows < stop, other=0.0)
            first_a, last_a = visible(position, documents_ptr, before, after, keys)
            upper = position + q_length - 1
            first_b, last_b = visible(upper, documents_ptr, before, after, keys)
            dq = tiles.zeros(DQ_M, BLOCK_D)
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
                    q_of // (H // H_KV),
                    H_KV,
                    kv_heads,
                    step == 0,
                    PITCH,
                    WORLD_SIZE,
                    SPANS,
                )
                for span in range(SPANS):
                    start, row, length = span_of(keys_ptr, source, span, SPANS)
                    begin, a, b, end = interval(
                        first_a, last_a, first_b, last_b, start, start + length, DQ_N
                    )
                    if (begin < end) & ((come >> step & 1) == 1):
                        shift = start - row
                        dq = _add_to_dq(
                            dq,
                            q,
                            dout,
                            lse,
                            delta,
                            k_head,
                            v_head,
                            stride,
                            begin - shift,
                            a - shift,
                            b - shift,
                            end - shift,
                            shift,
                            position,
                            documents_ptr,
                            before,
                            after,
                            keys,
                            qk_scale,
                            HEAD_DIM,
                            DQ_N,
                            BLOCK_D,
                        )
            dq_head = dq_ptr + of_head * HEAD_DIM
            tiles.store(dq_head, dq * scale, q_row, 0, stop, HEAD_DIM, HEAD_DIM, 1)

        # Own tiles too were stored by other threads than the ones that read them next.
        tl.debug_barrier()
        if signals.wait_for_peers(
            signal_ptrs,
            rank,
            WORLD_SIZE,
            0,
            COPY_PROGRAMS + program,
            generation,
            max_polls,
        ):
            m = rows_of(table_ptr, rank, WORLD_SIZE, SPANS)
            slots = signals.half_ptr(buffer_ptrs, rank, generation, half_bytes, tl.float32)
            slots += slots_offset // 4
            count = count_tiles(keys_ptr, rank, SPANS, DKV_N) * kv_heads
            first_tile = _first_tile(program, programs, rank, stagger)
            for tile in range(first_tile, count, programs):
                head = tile % kv_heads
                _, row, length = tile_of(keys_ptr, rank, tile // kv_heads, SPANS, DKV_N)
                for part in range(0, length, REDUCE_N):
                    rows = row + part + tl.arange(0, REDUCE_N)
                    offs_d = tl.arange(0, BLOCK_D)
                    inside = (rows < row + length)[:, None] & (offs_d < HEAD_DIM)[None, :]
                    in_slot = tl.cast(head, tl.int64) * slot_rows + rows
                    in_slot = in_slot[:, None] * SLOT_PITCH + offs_d[None, :]
                    dk, dv = tiles.zeros(REDUCE_N, BLOCK_D), tiles.zeros(REDUCE_N, BLOCK_D)
                    for source in range(WORLD_SIZE):
                        # The tile, not the part: what was stored is a whole tile or nothing.
                        if is_needed(table_ptr, source, rank, row, row + length, WORLD_SIZE, SPANS):
                            slot = slots + source * 2 * slot_stride
                            dk += tl.load(slot + in_slot, mask=inside, other=0.0)
                            dv += tl.load(slot + slot_stride + in_slot, mask=inside, other=0.0)
                    at = (tl.cast(head, tl.int64) * m + row) * HEAD_DIM
                    tiles.store(dk_ptr + at, dk, part, 0, length, HEAD_DIM, HEAD_DIM, 1)
                    tiles.store(dv_ptr + at, dv, part, 0, length, HEAD_DIM, HEAD_DIM, 1)
    if signals.is_last_program(signal_ptrs, rank, tl.num_programs(0)):
        signals.set_generation(signal_ptrs, rank, generation)


def launch_ring_attention_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    ws: Workspace,
    geometry: Geometry,
    scale: float,
    *,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Enqueue the gradients of `ring_flash.launch_ring_attention`.

    Args:
        out, lse: what it returned; grad_out, any strides, and grad_lse: their gradients.
        ws: `workspace_for` the keys.
        config: the same on all ranks; default `config_for`.

    Returns:
        dq (B, H, n, D), dk and dv (B, H_kv, m, D), contiguous, dtype of q.
    """
    B, H, n, D = q.shape
    H_kv, W, sees = k.shape[1], ws.world_size, geometry.sees
    config = config or config_for(
        B * H, B * H_kv, max(geometry.q_sizes), D, q.dtype, W, chip_of(q.device)
    )
    q, (k, v), grad_out = in_rows(q), in_rows(k, v), in_rows(grad_out)
    table, documents = tables(geometry, ws.rank, q.device)
    pitch, slot_pitch = pitch_of(D, k.dtype), pitch_of(D, torch.float32)
    gathered = k.new_empty(2 * B * H_kv * (sees.keys if W > 1 else 0) * pitch)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.empty(k.shape, dtype=k.dtype, device=k.device) for _ in range(2))
    tiles_most = max(
        sum(-(-span.length // config.dkv_n) for span in held) for held in geometry.k_spans
    )
    _ring_attention_backward_kernel[(config.programs,)](
        dq,
        dk,
        dv,
        torch.empty_like(lse),
        gathered,
        q,
        k,
        v,
        out,
        grad_out,
        lse,
        None if grad_lse is None else grad_lse.contiguous(),
        table,
        documents,
        ws.buffer_ptrs,
        ws.signal_ptrs,
        q.stride()[:3],
        k.stride()[:3],
        grad_out.stride()[:3],
        B,
        H,
        H_kv,
        n,
        sum(geometry.q_sizes),
        sees.keys,
        sees.before,
        sees.after,
        scale,
        scale * 1.4426950408889634,
        _slots_offset(k, geometry),
        max(geometry.k_sizes),
        tiles_most * B * H_kv,
        ws.half_bytes,
        ws.timeout_polls,
        ws.rank,
        WORLD_SIZE=W,
        SPANS=len(geometry.q_spans[0]),
        HEAD_DIM=D,
        PITCH=pitch,
        SLOT_PITCH=slot_pitch,
        GROUP_HEADS=config.group_heads,
        DKV_M=config.dkv_m,
        DKV_N=config.dkv_n,
        DQ_M=config.dq_m,
        DQ_N=config.dq_n,
        REDUCE_N=config.reduce_n,
        BLOCK_D=max(16, triton.next_power_of_2(D)),
        COPY_PROGRAMS=config.copy_programs,
        COPY_M=config.copy_m,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return dq, dk, dv
