"""ulysses_attention, backward: each rank makes the gradients of its heads.

Legend as in `ring_keys` and `head_units`, formulas as in `grad_tiles`.

    half of s       what `head_queries` publishes
                    [dq] of its tokens, all heads: stored by peers
                    slots of parts of dk and dv, see `head_dkv`: likewise

Protocol
  1. Copy programs publish keys, queries, dout, lse and delta, and signal. They fetch
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
from weft.collectives.device.launches import temporary
from weft.kernels.device import tiles
from weft.kernels.engine.chips import INTERPRETER, Chip, chip_of
from weft.kernels.flash import ring_call, ring_grad_kernel, ring_keys
from weft.kernels.flash.attention_tiles import contiguous_rows
from weft.kernels.flash.geometry import Geometry
from weft.kernels.flash.grad_tiles import given_to_gradients, spoil_gradients, sum_dq
from weft.kernels.flash.ring_grad_kernel import RingGradConfig
from weft.kernels.flash.ring_tables import count_rows, count_tiles
from weft.kernels.heads import head_units
from weft.kernels.heads.head_dkv import add_up_dkv, make_head_dkv, slots_for
from weft.kernels.heads.head_queries import (
    Fetched,
    GradAreas,
    GradCall,
    fetch_queries,
    held_queries,
    publish_all,
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
    # Nothing can begin before all is published; as many as of `AllGatherConfig`.
    config = replace(config, copy_programs=max(1, chip.cores // 8))
    # More is kept in registers here than in `ring_grad_kernel`, whose tiles spill 8 to 72 bytes.
    if D > 128:
        config = replace(config, copy_m=16)
    if D > 64 and dtype.itemsize == 2 and chip.family == "sm_80":
        config = replace(config, dkv_m=16, dq_n=32 if D <= 128 else 16)
    if D > 64 and dtype == torch.float32 and chip.name.startswith("sm_10"):
        config = replace(config, num_warps=8)
    return config


def _grad_area_bytes(q: torch.Tensor, k: torch.Tensor, geometry: Geometry) -> list[int]:
    kv_heads, m, D = k.shape[0] * k.shape[1], max(geometry.k_sizes), k.shape[3]
    slots = slots_for(q.shape[1], k.shape[1], len(geometry.k_sizes))
    rows, numbers = head_units.rows_bytes(q, geometry), head_units.numbers_bytes(q, geometry)
    parts = slots * ring_call.shard_bytes(kv_heads, m, D, torch.float32)
    keys = ring_call.shard_bytes(kv_heads, m, D, k.dtype)
    return [keys, rows, rows, numbers, numbers, rows, parts]


def workspace_for(q: torch.Tensor, k: torch.Tensor, group: Group, geometry: Geometry) -> Workspace:
    """The group's workspace with room for the largest shard of all."""
    nbytes = head_units.offsets_of(_grad_area_bytes(q, k, geometry))[-1]
    return workspace(group, nbytes, channel="heads", device=q.device)


@triton.jit
def _make_owners_dq(dq_ptr, arrivals, owner, call, ring, SHAPE: tl.constexpr):
    """dq of the queries of `owner`, stored where it belongs. Returns the new `arrivals`."""
    D: tl.constexpr = SHAPE.head_dim
    WORLD_SIZE: tl.constexpr = SHAPE.world_size
    BLOCK_M: tl.constexpr = SHAPE.config.dq_m
    rank, areas, B, H = ring.rank, call.areas, call.B, call.queries.H
    first, last = head_units.own_heads(rank, H, SHAPE)
    n = count_rows(ring.table, owner, SHAPE.spans)
    count = count_tiles(ring.table, owner, SHAPE.spans, BLOCK_M)
    begin = head_units.first_unit(first * B * count, owner * areas.stagger, SHAPE)
    for unit in range(begin, last * B * count, ring_call.compute_program(SHAPE)[1]):
        distance = (owner - rank + WORLD_SIZE) % WORLD_SIZE
        arrivals = ring_keys.wait_for_source(arrivals, distance, ring, SHAPE)
        head, tile, at = head_units.query_tile(unit, owner, B, H, n, count, ring, SHAPE, BLOCK_M)
        head_q = held_queries(call, ring, owner, head.batch, head.q, 0, SHAPE)
        arrivals, dq = sum_dq(arrivals, head_q, tile, head, ring, SHAPE)
        to, pitch = head_units.place_of_results(dq_ptr, areas.dq, owner, at, D, SHAPE.pitch, ring)
        tiles.store(to, dq, tile.row, 0, tile.row + tile.length, D, pitch, 1)
    return arrivals


@triton.jit(do_not_specialize=["rank"])
def _head_attention_backward_kernel(
    dq_ptr,  # (B, H, n, D)
    dk_ptr,  # (B, H_KV, m, D)
    dv_ptr,
    queries,  # Queries
    fetched,  # Fetched
    areas,  # GradAreas
    keys,  # Keys
    tables,  # Tables
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
    words, sees, seen_by = tables.words, tables.sees, tables.seen_by
    ring = ring_call.Ring(link, rank, generation, keys, words, sees, seen_by, scale)
    call, H = GradCall(queries, fetched, areas, B), queries.H
    if tl.program_id(0) < SHAPE.config.copy_programs:
        publish_all(call, ring, SHAPE)
        ring_keys.signal_published(ring, SHAPE)
        ring_keys.announce_source(ring, rank, SHAPE)
        for step in range(1, SHAPE.world_size):
            source = (rank + step) % SHAPE.world_size
            if signals.wait_for(
                link.signal_ptrs, rank, SHAPE.world_size, 0, source, tl.program_id(0),
                ring.generation, link.timeout_ns,
            ):  # fmt: skip
                ring_keys.fetch_shard(ring, source, SHAPE)
                fetch_queries(call, ring, source, SHAPE)
                ring_keys.announce_source(ring, source, SHAPE)
    else:
        # Bit 0 stands for the own queries, which are read where they are published.
        arrivals = ring_keys.wait_for_source(ring_keys.no_arrivals(SHAPE), 0, ring, SHAPE)
        for step in range(1, SHAPE.world_size + 1):
            owner = (rank + step) % SHAPE.world_size
            arrivals = make_head_dkv(arrivals, owner, call, ring, SHAPE)
        # A second loop: what is invariant in a loop stays in registers through all of it.
        for step in range(1, SHAPE.world_size + 1):
            owner = (rank + step) % SHAPE.world_size
            arrivals = _make_owners_dq(dq_ptr, arrivals, owner, call, ring, SHAPE)
            if step < SHAPE.world_size:
                ring_keys.announce_results(arrivals, ring, owner, SHAPE)
        # Other threads stored this rank's own parts than will read them next.
        tl.debug_barrier()
        if ring_keys.await_results(ring, SHAPE):
            brought = ring_call.area_ptr(ring, rank, areas.dq, dq_ptr.dtype.element_ty)
            head_units.collect_rows(
                dq_ptr, brought, None, None, ring, B, H, areas.stagger, SHAPE, SHAPE.config.dq_m
            )
            add_up_dkv(dk_ptr, dv_ptr, call, ring, SHAPE)
    if signals.end_call(link.signal_ptrs, rank, ring.generation):
        spoil_gradients(dq_ptr, dk_ptr, dv_ptr, queries, B, ring, SHAPE)


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
    q, k, lse = saved.q, saved.k, saved.lse
    B, H, _, D = q.shape
    W, H_kv = ws.world_size, k.shape[1]
    config = config or head_grad_config(
        B * H, B * H_kv, max(geometry.q_sizes), D, q.dtype, W, chip_of(q.device)
    )
    heads = head_units.heads_at(ws.rank, H, W)
    tokens = 2 * B * len(heads) * sum(geometry.q_sizes)
    queries = temporary(q.new_empty(tokens * ring_call.pitch_of(D, q.dtype)))
    pieces = queries, temporary(lse.new_empty(tokens))
    most = range(-(-H // W))  # heads of a rank
    offsets = head_units.offsets_of(_grad_area_bytes(q, k, geometry))
    _, at_q, at_dout, at_lse, at_delta, at_dq, at_parts, _ = offsets
    stagger = head_units.stagger_of(geometry.q_spans, B * len(most), config.dq_m)
    kv_stagger = head_units.stagger_of(
        geometry.k_spans, B * len(head_units.kv_range(most, H, H_kv)), config.dkv_n
    )
    areas = GradAreas(
        at_q, at_dout, at_lse, at_delta, at_dq, at_parts, max(geometry.k_sizes), stagger,
        kv_stagger,
    )  # fmt: skip
    given = given_to_gradients(saved)
    own = *given, Fetched(*pieces, heads.start, len(heads)), areas
    k, v = contiguous_rows(k, saved.v)
    kernel, of_keys = _head_attention_backward_kernel, head_units.kv_range(heads, H, H_kv)
    ring_call.launch_ring(kernel, config, own, k, v, ws, geometry, scale, of_keys)
    return given[:3]
