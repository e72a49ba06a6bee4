"""ulysses_attention, backward, in one launch: each rank makes the gradients of its heads.

Legend as in `ring_keys` and `head_units`, formulas as in `grad_tiles`.

    half of s       what `head_queries` publishes
                    [dq] of its tokens, all heads: stored by peers
                    slots of parts of dk and dv, see `head_dkv`: likewise

Protocol
  1. Copy programs publish keys, queries and dout, make and publish delta, and signal. They fetch
     what belongs to their rank's heads, keys as described in `ring_keys` and the rest beside them,
     and announce each source in the rank's own words (1, source, p), their own rank first.
  2. For the owners rank+1, rank+2, .., rank, the other programs make dk and dv of the owner's keys
     from the queries of all ranks; then, for the same owners, dq of the owner's queries from the
     keys of all. They store them in the owner's areas and signal after its dq, as described in
     `head_units`. dq of the rank's own tokens goes straight to its place.
  3. They wait for what their namesakes on the peers have sent: dq is copied, dk and dv are added
     up.
  4. The last program to finish sets GENERATION.

Why it neither races nor deadlocks: as in `heads_kernel`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from weft.collectives import Group, Workspace, workspace
from weft.collectives.device import signals
from weft.collectives.device.launches import launching, temporary
from weft.collectives.memory.workspace import link_of
from weft.kernels.device import tiles
from weft.kernels.engine.chips import INTERPRETER, Chip, chip_of
from weft.kernels.flash import ring_grad_kernel
from weft.kernels.flash.attention_tiles import contiguous_rows, heads_of
from weft.kernels.flash.geometry import Geometry
from weft.kernels.flash.grad_tiles import Queries, sum_dq
from weft.kernels.flash.ring_call import (
    Ring,
    compute_program,
    count_rows,
    count_tiles,
    keys_of,
    pitch_of,
    rows_of,
    shape_for,
    shard_bytes,
    tables,
)
from weft.kernels.flash.ring_grad_kernel import RingGradConfig
from weft.kernels.flash.ring_keys import (
    announce,
    announce_results,
    await_results,
    fetch_shard,
    no_arrivals,
    signal_published,
    wait_for_source,
)
from weft.kernels.heads.head_dkv import add_parts, make_head_dkv, slots_for
from weft.kernels.heads.head_queries import Areas, Fetched, fetch_queries, held_queries, publish_all
from weft.kernels.heads.head_units import (
    area_ptr,
    collect_rows,
    first_unit,
    heads_at,
    kv_range,
    numbers_bytes,
    offsets_of,
    own_heads,
    query_tile,
    rows_bytes,
    stagger_of,
)

if TYPE_CHECKING:
    from weft.kernels.attention.ring import Saved


def head_grad_config(
    heads: int, kv_heads: int, rows: int, D: int, dtype: torch.dtype, world_size: int, chip: Chip
) -> RingGradConfig:
    """The launch for shards of at most `rows` queries, `heads` = B * H."""
    config = ring_grad_kernel.ring_grad_config(heads, kv_heads, rows, D, dtype, world_size, chip)
    if chip is INTERPRETER:
        return config
    # Nothing can begin before all is published.
    config = replace(config, copy_programs=max(1, chip.cores // 8))
    # More is kept in registers here than in `ring_grad_kernel`, whose tiles spill 8 to 72 bytes.
    if D > 128:
        config = replace(config, copy_m=16)
    if 64 < D <= 128 and dtype.itemsize == 2 and chip.name == "sm_90":
        config = replace(config, dkv_m=16) if D == 128 else replace(config, num_stages=1)
    if D > 64 and dtype == torch.float32 and chip.name.startswith("sm_10"):
        config = replace(config, num_warps=8)
    return config


def _area_bytes(q: torch.Tensor, k: torch.Tensor, geometry: Geometry) -> list[int]:
    kv_heads, m, D = k.shape[0] * k.shape[1], max(geometry.k_sizes), k.shape[3]
    slots = slots_for(q.shape[1], k.shape[1], len(geometry.k_sizes))
    rows, numbers = rows_bytes(q, geometry), numbers_bytes(q, geometry)
    parts = slots * shard_bytes(kv_heads, m, D, torch.float32)
    return [shard_bytes(kv_heads, m, D, k.dtype), rows, rows, numbers, numbers, rows, parts]


def workspace_for(q: torch.Tensor, k: torch.Tensor, group: Group, geometry: Geometry) -> Workspace:
    """The group's workspace with room for the largest shard of all."""
    nbytes = offsets_of(_area_bytes(q, k, geometry))[-1]
    return workspace(group, nbytes, channel="heads", device=q.device)


@triton.jit
def _make_dq(
    dq_ptr,
    arrivals,
    owner,
    queries,
    fetched,
    areas,
    ring,
    B,
    SHAPE: tl.constexpr,
):
    """dq of the queries of `owner`, stored where it belongs. Returns the new `arrivals`."""
    D: tl.constexpr = SHAPE.head_dim
    WORLD_SIZE: tl.constexpr = SHAPE.world_size
    BLOCK_M: tl.constexpr = SHAPE.config.dq_m
    rank, H = ring.rank, queries.H
    first, last = own_heads(rank, H, SHAPE)
    n = count_rows(ring.table, owner, SHAPE.spans)
    count = count_tiles(ring.table, owner, SHAPE.spans, BLOCK_M)
    begin = first_unit(first * B * count, owner * areas.stagger, SHAPE)
    for unit in range(begin, last * B * count, compute_program(SHAPE)[1]):
        distance = (owner - rank + WORLD_SIZE) % WORLD_SIZE
        arrivals = wait_for_source(arrivals, distance, ring, SHAPE)
        head, batch, position, row, length = query_tile(unit, owner, B, count, ring, SHAPE, BLOCK_M)
        at = tl.cast(batch * H + head, tl.int64) * n
        kv_head = tl.cast(head // (H // ring.keys.H_KV), tl.int64)
        batch, head = tl.cast(batch, tl.int64), tl.cast(head, tl.int64)
        head_q = held_queries(queries, fetched, areas, ring, owner, batch, head, B, 0, SHAPE)
        arrivals, dq = sum_dq(arrivals, head_q, position, row, length, batch, kv_head, ring, SHAPE)
        if owner == rank:
            to, pitch = dq_ptr + at * D, tl.cast(D, tl.int32)
        else:
            to = area_ptr(ring, owner, areas.dq, dq_ptr.dtype.element_ty) + at * SHAPE.pitch
            pitch = tl.cast(SHAPE.pitch, tl.int32)
        tiles.store(to, dq, row, 0, row + length, D, pitch, 1)
    return arrivals


@triton.jit(do_not_specialize=["rank"])
def _head_attention_backward_kernel(
    dq_ptr,  # (B, H, n, D)
    dk_ptr,  # (B, H_KV, m, D)
    dv_ptr,
    out_ptr,  # (B, H, n, D)
    dlse_ptr,  # (B, H, n) or None
    queries,  # Queries, of which delta is not there
    fetched,  # Fetched
    keys,  # Keys
    areas,  # Areas
    sees,  # Sight of the queries
    seen_by,  # Sight of the keys
    table_ptr,
    link,
    B,
    scale,
    rank,
    SHAPE: tl.constexpr,
) -> None:
    """dq, dk and dv of the own tokens. Grid: copy programs and at least one more.

    Example: 2 ranks, 4 heads on one head of keys. Rank 0 makes dq of heads 0 and 1 of all tokens,
    and a part of dk and dv of the head of keys, which goes to slot 0 of each owner; rank 1 fills
    slot 1. dk = slot 0 + slot 1.
    """
    generation = signals.begin_call(link.signal_ptrs, rank)
    ring = Ring(link, table_ptr, rank, generation, keys, sees, scale)
    H = queries.H
    if tl.program_id(0) < SHAPE.config.copy_programs:
        delta = area_ptr(ring, rank, areas.delta, tl.float32)
        shown = Queries(queries.q, queries.dout, queries.lse, delta, H, queries.n)
        publish_all(out_ptr, dlse_ptr, shown, areas, ring, B, SHAPE)
        signal_published(ring, SHAPE)
        announce(ring, rank, SHAPE)
        for step in range(1, SHAPE.world_size):
            source = (rank + step) % SHAPE.world_size
            if signals.wait_for(
                link.signal_ptrs, rank, SHAPE.world_size, 0, source, tl.program_id(0),
                generation, link.timeout_ns,
            ):  # fmt: skip
                fetch_shard(ring, source, SHAPE)
                fetch_queries(fetched, areas, ring, source, B, H, SHAPE)
                announce(ring, source, SHAPE)
    else:
        # Bit 0 stands for delta.
        arrivals = wait_for_source(no_arrivals(SHAPE), 0, ring, SHAPE)
        for step in range(1, SHAPE.world_size + 1):
            owner = (rank + step) % SHAPE.world_size
            arrivals = make_head_dkv(
                arrivals, owner, queries, fetched, areas, seen_by, ring, B, SHAPE
            )
        # A second loop: what is invariant in a loop stays in registers through all of it.
        for step in range(1, SHAPE.world_size + 1):
            owner = (rank + step) % SHAPE.world_size
            arrivals = _make_dq(dq_ptr, arrivals, owner, queries, fetched, areas, ring, B, SHAPE)
            if step < SHAPE.world_size:
                announce_results(arrivals, ring, owner, SHAPE)
        # Other threads stored this rank's own parts than will read them next.
        tl.debug_barrier()
        if await_results(ring, SHAPE):
            brought = area_ptr(ring, rank, areas.dq, dq_ptr.dtype.element_ty)
            collect_rows(
                dq_ptr, brought, None, None, ring, B, H, areas.stagger, SHAPE, SHAPE.config.dq_m
            )
            add_parts(dk_ptr, dv_ptr, areas, ring, B, H, SHAPE)
    if signals.end_call(link.signal_ptrs, rank, generation):
        size = tl.cast(B, tl.int64) * SHAPE.head_dim
        signals.spoil(dq_ptr, size * H * queries.n)
        m = rows_of(table_ptr, rank, SHAPE)
        signals.spoil(dk_ptr, size * keys.H_KV * m)
        signals.spoil(dv_ptr, size * keys.H_KV * m)


def launch_head_attention_backward(
    saved: Saved,
    ws: Workspace,
    geometry: Geometry,
    scale: float,
    *,
    config: RingGradConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Enqueue the gradients of `heads_flash.launch_head_attention`.

    Args:
        saved: operands and results of the forward, and gradients of the results; grad_out may have
            any strides.
        ws: `workspace_for` the tokens.
        config: the same on all ranks; default `head_grad_config`.

    Returns:
        dq (B, H, n, D), dk and dv (B, H_kv, m, D), contiguous, dtype of q.
    """
    q, k, v, out, lse, grad_out, grad_lse = saved
    B, H, n, D = q.shape
    W, H_kv = ws.world_size, k.shape[1]
    config = config or head_grad_config(
        B * H, B * H_kv, max(geometry.q_sizes), D, q.dtype, W, chip_of(q.device)
    )
    heads = heads_at(ws.rank, H, W)
    of_keys = kv_range(heads, H, H_kv)
    k, v = contiguous_rows(k, v)
    table, sees, seen_by = tables(geometry, ws.rank, q.device, all_queries=True)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.empty(k.shape, dtype=k.dtype, device=k.device) for _ in range(2))
    tokens = 2 * B * len(heads) * sum(geometry.q_sizes)
    most = range(-(-H // W))  # heads of a rank
    _, at_q, at_dout, at_lse, at_delta, at_dq, at_parts, _ = offsets_of(_area_bytes(q, k, geometry))
    launching(_head_attention_backward_kernel, config.programs)(
        dq,
        dk,
        dv,
        out,
        None if grad_lse is None else grad_lse.contiguous(),
        Queries(heads_of(contiguous_rows(q)), heads_of(contiguous_rows(grad_out)), lse, None, H, n),
        Fetched(
            temporary(q.new_empty(tokens * pitch_of(D, q.dtype))),
            temporary(lse.new_empty(tokens)),
            heads.start,
            len(heads),
        ),
        keys_of(k, v, geometry, of_keys),
        Areas(
            at_q,
            at_dout,
            at_lse,
            at_delta,
            at_dq,
            at_parts,
            max(geometry.k_sizes),
            stagger_of(geometry.q_spans, B * len(most), config.dq_m),
            stagger_of(geometry.k_spans, B * len(kv_range(most, H, H_kv)), config.dkv_n),
        ),
        sees,
        seen_by,
        table,
        link_of(ws),
        B,
        scale,
        ws.rank,
        SHAPE=shape_for(k, geometry, config),
        **config.options,
    )
    return dq, dk, dv
