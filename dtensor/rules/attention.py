"""How attention of DTensors is placed: by batch, heads or rows of q, by ring or Ulysses attention.

Along one mesh dim, for q, k, v (batch, heads, sequence, width):

    batch or heads cut alike     each rank attends for its own
    q cut by rows, not causal    each rank attends for its rows to all keys
    all cut by sequence          ring_attention: keys and values travel; where causal, the last rank
                                 has twice the average to compute
                                 ulysses_attention: heads are exchanged for sequence and back
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional

from weft.collectives import cost
from weft.dtensor.dispatch.call import Choices, Chosen, Meta, OpCall, Strategy, Way
from weft.dtensor.dispatch.pricing import choose_strategies
from weft.dtensor.layout.boxes import Layout
from weft.dtensor.layout.placements import distinct, is_shard, shard_dim
from weft.dtensor.layout.runs import contiguous_stride
from weft.dtensor.layout.symbolic import cached, present
from weft.kernels.engine.engines import exposed_us

RING, ULYSSES = "ring_attention", "ulysses_attention"
_SEQUENCE = Shard(2)


@cached
def attention_plan(
    q: Layout, k: Layout, v: Layout, mask: Layout | None, is_causal: bool, enable_gqa: bool
) -> Chosen:
    """The cheapest placements of q, k, v and the mask, and of the result, and the fused op."""
    call = OpCall(functional.scaled_dot_product_attention, (q, k, v, mask), {})
    shape = (*q.shape[:-1], v.shape[-1])
    call.outputs = [Meta(shape, contiguous_stride(shape), q.dtype)]
    rows = Shard(q.ndim - 2)

    def strategy(of_q: Placement, of_k: Placement, way: Way | None = None) -> Strategy:
        of_mask = () if mask is None else (_mask_placement(mask, q, of_q),)
        return Strategy((of_q, of_k, of_k, *of_mask), (of_q,), way)

    every = distinct(p for t in (q, k, v) for p in t.placements)
    strategies = [strategy(p, p) for p in every if type(p) is Shard and p.dim < rows.dim]
    if not is_causal and rows in q.placements:
        strategies.append(strategy(rows, Replicate()))
    strategies.append(strategy(Replicate(), Replicate()))
    if any(_SEQUENCE in t.placements for t in (q, k, v)) and q.ndim == 4:
        for name, price in ((RING, _ring_us), (ULYSSES, _ulysses_us)):
            us = partial(price, is_causal=is_causal, fits=_heads_differ(q, k, v, enable_gqa))
            strategies.append(strategy(_SEQUENCE, _SEQUENCE, Way(name, us)))
    while True:
        chosen = choose_strategies(call, Choices(strategies), [], [False] * len(call.inputs))
        uneven = _cut_unevenly(q.with_placements(chosen.outputs[0]), (q, k, v))
        if not uneven:
            return chosen
        strategies = [s for s in strategies if shard_dim(s.outputs[0]) not in uneven]


def _cut_unevenly(out: Layout, qkv: Sequence[Layout]) -> set[int]:
    """Dims of batch and heads by whose parts a rank would not have the keys of its queries.

    Where there are fewer heads of keys it has them if all are cut evenly.
    """
    return {
        dim
        for dim in range(out.ndim - 2)
        if len({t.shape[dim] for t in qkv}) > 1 and any(t.shape[dim] % out.parts(dim) for t in qkv)
    }


def _mask_placement(mask: Layout, q: Layout, placement: Placement) -> Placement:
    if not is_shard(placement):
        return Replicate()
    own = shard_dim(placement) - (len(q.shape) - len(mask.shape))
    return Shard(own) if own >= 0 and mask.shape[own] != 1 else Replicate()


def _heads_differ(q: Layout, k: Layout, v: Layout, enable_gqa: bool) -> str:
    if k.shape != v.shape:
        return "keys and values differ in shape"
    return "" if q.shape[1] == k.shape[1] or enable_gqa else "q and k differ in heads"


def _not_around(call: OpCall, mesh_dim: int, fits: str) -> str:
    """Why nothing can go around a mesh dim; empty if it can."""
    qkv = call.inputs[:3]
    if len(call.inputs) > 3:
        return "no fused op takes a mask"
    if any(t.placements[mesh_dim] != _SEQUENCE for t in qkv):
        return "q, k and v are not all cut by sequence"
    others = [p for t in qkv for d, p in enumerate(t.placements) if d != mesh_dim]
    if any(shard_dim(p) == _SEQUENCE.dim for p in others):
        return "another mesh dim cuts the sequence, too"
    if qkv[0].place.sizes[mesh_dim] == 1:
        return "the mesh dim has one rank"
    if not qkv[0].place.ascends[mesh_dim]:
        return "its ranks are not in the order of their group"
    return fits


def _own_bytes(layout: Layout, mesh_dim: int) -> float:
    """Bytes that the ranks of a mesh dim hold together."""
    return present(layout.global_bytes) / layout.parts(but=mesh_dim)


def _ring_us(call: OpCall, mesh_dim: int, is_causal: bool, fits: str) -> float | str:
    if why := _not_around(call, mesh_dim, fits):
        return why
    q, k = call.inputs[:2]
    W, rates = q.place.sizes[mesh_dim], cost.typical(call.mesh.device_type)
    us = exposed_us(2 * _own_bytes(k, mesh_dim) * (W - 1) / W, rates)
    if is_causal:
        scores = _own_bytes(q, mesh_dim) / q.dtype.itemsize * present(k.shape[2])
        even = 2 * scores / W / rates.flops_of(q.dtype)
        us += even * (1 - 1 / W)
    return us


def _ulysses_us(call: OpCall, mesh_dim: int, is_causal: bool, fits: str) -> float | str:
    if why := _not_around(call, mesh_dim, fits):
        return why
    q, k = call.inputs[:2]
    W, rates = q.place.sizes[mesh_dim], cost.typical(call.mesh.device_type)
    for t in (q, k):
        if t.shape[1] % (ranks := t.parts(1) * W):
            return f"{q.shape[1]} and {k.shape[1]} heads are not divided by {ranks} ranks"
    held = 2 * (_own_bytes(q, mesh_dim) + _own_bytes(k, mesh_dim)) / W  # q and the result, k and v
    return 2 * exposed_us(held * (W - 1) / W / 2, rates)
