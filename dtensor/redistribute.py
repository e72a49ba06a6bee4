"""Redistribution: from one layout to any other, in one pull.

Each rank cuts its target box by the source boxes and takes every piece from the nearest rank that
holds it: itself first, else a replica that differs in the innermost mesh dims, replicas in turn.
These are the fewest bytes that can be received, in one step, for any pair of layouts.

    1. A rank that others pull from writes its local tensor into symmetric memory.
    2. It signals all.                                      (release)
    3. It waits for each rank that it pulls from, copies the pieces in place.    (acquire)

A `Partial` source has several holders of a piece: they are added (max, ...) in rank order, half
types in fp32, so that replicas are bitwise equal. Where reducing shards first and pulling them
afterwards moves fewer bytes, that makes two steps. Where no symmetric memory spans the mesh, the
same pieces travel by one all-to-all of the process group.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from weft import settings
from weft.collectives import exchange, spanning_group
from weft.collectives.group import Group, forget_meshes
from weft.dtensor.layout import (
    Box,
    Layout,
    Placements,
    Runs,
    Shape,
    check_partials,
    contiguous_stride,
    distinct,
    is_shard,
    layout_of,
    normalize,
    shard_dim,
    show,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Slices = tuple[slice, ...]

_REDUCE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.Tensor.add_,
    "avg": torch.Tensor.add_,
    "product": torch.Tensor.mul_,
    "max": lambda acc, term: torch.maximum(acc, term, out=acc),
    "min": lambda acc, term: torch.minimum(acc, term, out=acc),
    "band": torch.Tensor.bitwise_and_,
    "bor": torch.Tensor.bitwise_or_,
    "bxor": torch.Tensor.bitwise_xor_,
}
_MAX_MIDDLES = 64
_SUMMED_IN_FP32 = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Piece:
    """A block that one rank takes: the same block of each of `holders`, reduced in this order."""

    holders: tuple[int, ...]  # indices in the flattened source mesh
    source: Slices  # of a holder's local tensor
    target: Slices  # of the receiver's local tensor
    numel: int


@dataclass(frozen=True)
class Step:
    """One pull of every rank. `pieces[i]` is what rank i of the flattened target mesh takes."""

    source: Layout
    target: Layout
    pieces: tuple[tuple[Piece, ...], ...]
    reduce_op: str | None
    scale: int  # a sum is divided by it (avg)

    @cached_property
    def bytes_received(self) -> list[int]:
        """Bytes that come from other ranks, for each rank of the flattened target mesh."""
        source_ranks, target_ranks = self.source.place.ranks, self.target.place.ranks
        return [
            self.source.dtype.itemsize
            * sum(
                piece.numel
                for piece in pieces
                for holder in piece.holders
                if source_ranks[holder] != target_ranks[receiver]
            )
            for receiver, pieces in enumerate(self.pieces)
        ]

    @cached_property
    def is_local(self) -> bool:
        """Whether every rank has all that it needs."""
        return not any(self.bytes_received)

    @cached_property
    def senders(self) -> frozenset[int]:
        """Global ranks that others take something from."""
        source_ranks, target_ranks = self.source.place.ranks, self.target.place.ranks
        return frozenset(
            source_ranks[holder]
            for receiver, pieces in enumerate(self.pieces)
            for piece in pieces
            for holder in piece.holders
            if source_ranks[holder] != target_ranks[receiver]
        )

    @cached_property
    def room(self) -> int:
        """Bytes of symmetric memory a rank: the largest local tensor of the source."""
        ranks = range(len(self.source.boxes))
        return max(math.prod(self.source.shape_at(i)) for i in ranks) * self.source.dtype.itemsize

    def __str__(self) -> str:
        worst = max(self.bytes_received, default=0)
        kind = "local" if self.is_local else f"pull, at most {worst} bytes a rank"
        reduce = f", {self.reduce_op} in rank order" if self.reduce_op else ""
        return f"{show(self.source.placements)} -> {show(self.target.placements)}: {kind}{reduce}"


@dataclass(frozen=True)
class Plan:
    """How a redistribution would go. Printable; making it communicates nothing.

    Attributes:
        steps: the pulls, in order; empty where nothing changes.
    """

    source: Layout
    target: Layout
    steps: tuple[Step, ...]

    @property
    def bytes_received(self) -> list[int]:
        """Bytes that each rank of the flattened target mesh receives from others."""
        count = len(self.target.place.ranks)
        return [sum(step.bytes_received[i] for step in self.steps) for i in range(count)]

    def __str__(self) -> str:
        head = f"{self.source} -> {self.target}: {len(self.steps)} steps"
        return "\n".join([head, *(f"  {step}" for step in self.steps)])


def _overlaps(source: Runs, target: Runs) -> list[tuple[slice, slice, int]]:
    """(source slice, target slice, length) of the indices that both list, along one dim."""
    found = []
    target_at = 0
    for target_start, target_size in target:
        source_at = 0
        for source_start, source_size in source:
            start = max(source_start, target_start)
            size = min(source_start + source_size, target_start + target_size) - start
            if size > 0:
                of_source = source_at + start - source_start
                of_target = target_at + start - target_start
                found.append(
                    (slice(of_source, of_source + size), slice(of_target, of_target + size), size)
                )
            source_at += source_size
        target_at += target_size
    return found


def cut_box(source: Box, target: Box) -> list[tuple[Slices, Slices, int]]:
    """(slices of the source, slices of the target, elements) of what two boxes share."""
    per_dim = [_overlaps(s, t) for s, t in zip(source, target, strict=True)]
    return [
        (tuple(c[0] for c in cut), tuple(c[1] for c in cut), math.prod(c[2] for c in cut))
        for cut in itertools.product(*per_dim)
    ]


def _distance(here: Shape | None, there: Shape) -> int:
    """How far apart two ranks of one mesh are: outer mesh dims are the slower links."""
    if here is None:
        return 0
    return sum(1 << (len(there) - dim) for dim, i in enumerate(there) if here[dim] != i)


def _step(source: Layout, target: Layout) -> Step:
    """One pull from `source` to `target`, mesh dims that stay Partial left as they are."""
    same_mesh = source.mesh == target.mesh
    kept = [
        dim
        for dim, (old, new) in enumerate(zip(source.placements, target.placements, strict=False))
        if same_mesh and isinstance(old, Partial) and old == new
    ]
    summed = [
        dim
        for dim, old in enumerate(source.placements)
        if isinstance(old, Partial) and dim not in kept
    ]
    born = [
        dim
        for dim, new in enumerate(target.placements)
        if isinstance(new, Partial) and dim not in kept
    ]
    # Ranks whose values add up have the same box: one family, known by its first member.
    families: dict[Shape, list[int]] = {}
    for index, coordinate in enumerate(source.place.coordinates):
        first = tuple(0 if dim in summed else i for dim, i in enumerate(coordinate))
        families.setdefault(first, []).append(index)

    every: list[tuple[Piece, ...]] = []
    for receiver, coordinate in enumerate(target.place.coordinates):
        pieces: list[Piece] = []
        if all(_contributes(target.placements[dim], coordinate[dim]) for dim in born):
            by_box: dict[Box, list[tuple[int, list[int]]]] = {}
            for first, members in families.items():
                if all(first[dim] == coordinate[dim] for dim in kept):
                    here = coordinate if same_mesh else None
                    distance = min(_distance(here, source.place.coordinates[m]) for m in members)
                    by_box.setdefault(source.boxes[members[0]], []).append((distance, members))
            for box, holders in by_box.items():
                cuts = cut_box(box, target.boxes[receiver])
                if not cuts:
                    continue
                chosen = _nearest(holders, source, target.place.ranks[receiver], receiver)
                pieces += [Piece(tuple(chosen), s, t, numel) for s, t, numel in cuts]
        every.append(tuple(pieces))

    ops = [source.placements[dim] for dim in summed]
    kinds = {op.reduce_op for op in ops if isinstance(op, Partial)}
    scale = math.prod(
        source.place.sizes[dim]
        for dim in summed
        if getattr(source.placements[dim], "reduce_op", "") == "avg"
    )
    reduce_op = None if not kinds else ("sum" if kinds <= {"sum", "avg"} else kinds.pop())
    return Step(source, target, tuple(every), reduce_op, scale)


def _nearest(
    holders: list[tuple[int, list[int]]], source: Layout, rank: int, receiver: int
) -> list[int]:
    """The family to take from: one with the receiver in it, else a nearest one, in turn."""
    for _, members in holders:
        if any(source.place.ranks[m] == rank for m in members):
            return members
    least = min(distance for distance, _ in holders)
    near = [members for distance, members in holders if distance == least]
    return near[receiver % len(near)]


def _contributes(placement: Placement, index: int) -> bool:
    """Whether the rank at `index` of a new Partial dim holds the value, not a neutral element.

    One rank holds the value and the others zero (one), rather than each its share: no rounding, and
    right for integers. Where a repeated value changes nothing, every rank holds it.
    """
    op = placement.reduce_op if isinstance(placement, Partial) else ""
    return index == 0 or op not in ("sum", "product", "bxor")


def _middles(source: Layout, target: Layout) -> list[Placements]:
    """Where to reduce first: placements with the Partial dims of `source` turned into shards.

    The other mesh dims stay, become what they are in the end, or are sharded to share the work.
    """
    choices: list[list[Placement]] = []
    for old, new in zip(source.placements, target.placements, strict=True):
        shards: list[Placement] = [Shard(d) for d in range(len(source.shape))]
        if not isinstance(old, Partial):
            extra = shards if isinstance(old, Replicate) else []
            choices.append(distinct([old, new, *extra]))
        elif old == new:
            choices.append([old])
        else:
            choices.append(distinct([new, *shards]) if is_shard(new) else shards)
    return list(itertools.islice(itertools.product(*choices), _MAX_MIDDLES))


@lru_cache(maxsize=4096)
def plan(source: Layout, target: Layout) -> Plan:
    """The cheapest way from `source` to `target`: one pull, or reduce shards, then pull.

    Raises:
        NotImplementedError: the meshes have different ranks, neither containing the other's.
        ValueError: Partial reductions that do not commute.
    """
    if source is target:
        return Plan(source, target, ())
    check_partials(source.placements)
    if source.mesh != target.mesh:
        _check_meshes(source, target)
    best = [_step(source, target)]
    if best[0].reduce_op and source.mesh == target.mesh and source.shape:
        cost = max(best[0].bytes_received)
        for placements in _middles(source, target):
            middle = source.with_placements(placements)
            two = [_step(source, middle), _step(middle, target)]
            both = max(a + b for a, b in zip(*(s.bytes_received for s in two), strict=True))
            if both < cost:
                best, cost = two, both
    return Plan(source, target, tuple(best))


forget_meshes.append(plan.cache_clear)


def _check_meshes(source: Layout, target: Layout) -> None:
    ours, theirs = set(source.place.ranks), set(target.place.ranks)
    if not (ours <= theirs or theirs <= ours):
        raise NotImplementedError(
            f"redistribute between meshes of ranks {sorted(ours)} and {sorted(theirs)}: one must "
            f"contain the other. Go over a mesh that holds both."
        )


def redistribute_plan(
    mesh: DeviceMesh,
    shape: Sequence[int],
    dtype: torch.dtype,
    src_placements: Sequence[Placement],
    dst_placements: Sequence[Placement],
    *,
    dst_mesh: DeviceMesh | None = None,
) -> Plan:
    """How a redistribution would go, without running it.

    Args:
        mesh: where the tensor lies; `dst_mesh` (default: the same) is where it goes.
        shape, dtype: of the global tensor.

    Example:
        >>> plan = redistribute_plan(mesh, (8, 8), torch.float32, [Shard(0)], [Shard(1)])
        >>> plan.bytes_received, len(plan.steps)     # 2 ranks: a quarter of the tensor each
        ([64, 64], 1)
    """
    size = tuple(shape)
    stride = contiguous_stride(size)
    onto = dst_mesh or mesh
    source = layout_of(mesh, normalize(src_placements, len(size), mesh.ndim), size, stride, dtype)
    target = layout_of(onto, normalize(dst_placements, len(size), onto.ndim), size, stride, dtype)
    return plan(source, target)


def move(local: torch.Tensor, source: Layout, target: Layout) -> torch.Tensor:
    """This rank's part in `target` of what lies as `source`. Collective; not differentiable.

    The result shares no memory with `local`, unless the layouts are the same.
    """
    if source.index is None and target.index is None:
        return local.new_empty(0, dtype=target.dtype)
    for step in plan(source, target).steps:
        if settings.tracing():
            settings.record("redistribute", "local" if step.is_local else "pull", str(step))
        local = _run(step, local)
    return local


def _group_of(step: Step) -> Group:
    wider = max(step.source, step.target, key=lambda layout: len(layout.place.ranks))
    return spanning_group(wider.mesh)


def _run(step: Step, local: torch.Tensor) -> torch.Tensor:
    target, receiver = step.target, step.target.index
    pieces = step.pieces[receiver] if receiver is not None else ()
    if step.is_local:
        return _assemble(step, local, pieces, {})
    group = _group_of(step)
    if group.backend is None:
        return _assemble_all_to_all(step, local, pieces, group)
    rank_in_group = {rank: i for i, rank in enumerate(group.ranks)}
    with exchange(group, step.room, "redistribute", local.device) as ex:
        if group.ranks[group.rank] in step.senders:
            ex.local(tuple(local.shape), local.dtype).copy_(local)
        ex.signal_all()
        remote: dict[int, torch.Tensor] = {}
        for piece in pieces:
            for holder in piece.holders:
                if holder in remote or holder == step.source.index:
                    continue
                peer = rank_in_group[step.source.place.ranks[holder]]
                ex.wait(peer)
                remote[holder] = ex.peer(peer, step.source.shape_at(holder), target.dtype)
        return _assemble(step, local, pieces, remote)


def _assemble(
    step: Step, local: torch.Tensor, pieces: tuple[Piece, ...], remote: dict[int, torch.Tensor]
) -> torch.Tensor:
    """Copy, or reduce, the pieces into a new local tensor."""
    blocks = [[remote.get(h, local)[p.source] for h in p.holders] for p in pieces]
    return _combine(step, local, pieces, blocks)


def _combine(
    step: Step,
    local: torch.Tensor,
    pieces: tuple[Piece, ...],
    blocks: list[list[torch.Tensor]],
) -> torch.Tensor:
    shape = step.target.local_shape
    out = torch.empty(shape, dtype=local.dtype, device=local.device)
    if not pieces and 0 not in shape:
        product = any(getattr(p, "reduce_op", "") == "product" for p in step.target.placements)
        return out.fill_(1 if product else 0)
    for piece, terms in zip(pieces, blocks, strict=True):
        into = out[piece.target]
        if len(terms) == 1 and step.scale == 1:
            into.copy_(terms[0])
        elif out.dtype in _SUMMED_IN_FP32:
            into.copy_(_reduced(step, terms, torch.empty_like(into, dtype=torch.float32)))
        else:
            _reduced(step, terms, into)
    return out


def _reduced(step: Step, terms: list[torch.Tensor], acc: torch.Tensor) -> torch.Tensor:
    acc.copy_(terms[0])
    for term in terms[1:]:
        _REDUCE[step.reduce_op or "sum"](acc, term.to(acc.dtype))
    if step.scale != 1:
        if acc.is_floating_point() or acc.is_complex():
            acc.div_(step.scale)
        else:
            acc.div_(step.scale, rounding_mode="trunc")
    return acc


def _assemble_all_to_all(
    step: Step, local: torch.Tensor, pieces: tuple[Piece, ...], group: Group
) -> torch.Tensor:
    """The same pieces by one all-to-all of the process group."""
    source_ranks, target_ranks = step.source.place.ranks, step.target.place.ranks
    me = group.ranks[group.rank]
    sends = {rank: [] for rank in group.ranks}  # type: dict[int, list[torch.Tensor]]
    for receiver, theirs in enumerate(step.pieces):
        if target_ranks[receiver] != me:
            sends[target_ranks[receiver]] = [
                local[piece.source].reshape(-1)
                for piece in theirs
                for holder in piece.holders
                if source_ranks[holder] == me
            ]
    receives = dict.fromkeys(group.ranks, 0)
    for piece in pieces:
        for holder in piece.holders:
            if source_ranks[holder] != me:
                receives[source_ranks[holder]] += piece.numel
    packed = [block for rank in group.ranks for block in sends[rank]]
    outgoing = torch.cat(packed) if packed else local.new_empty(0)
    incoming = local.new_empty(sum(receives.values()))
    dist.all_to_all_single(
        incoming,
        outgoing,
        [receives[rank] for rank in group.ranks],
        [sum(block.numel() for block in sends[rank]) for rank in group.ranks],
        group=group.pg,
    )
    starts = dict(
        zip(group.ranks, itertools.accumulate([0, *list(receives.values())[:-1]]), strict=True)
    )
    blocks: list[list[torch.Tensor]] = []
    for piece in pieces:
        terms = []
        for holder in piece.holders:
            rank = source_ranks[holder]
            block = local[piece.source]
            if rank != me:
                shape = tuple(part.stop - part.start for part in piece.source)
                block = incoming[starts[rank] : starts[rank] + piece.numel].view(shape)
                starts[rank] += piece.numel
            terms.append(block)
        blocks.append(terms)
    return _combine(step, local, pieces, blocks)


def transition_bytes(layout: Layout, mesh_dim: int, wanted: Placement) -> float:
    """About how many bytes a rank receives when one mesh dim of `layout` changes to `wanted`."""
    old, size = layout.placements[mesh_dim], layout.place.sizes[mesh_dim]
    if old == wanted or isinstance(old, Replicate) or size == 1:
        return 0.0
    whole = layout.bytes_across(mesh_dim) * (size - 1) / size
    if is_shard(wanted):
        return whole if isinstance(old, Partial) else whole / size
    return 2 * whole if isinstance(old, Partial) else whole


def same_shard(a: Placement, b: Placement) -> bool:
    """Whether both cut the same tensor dim."""
    return is_shard(a) and shard_dim(a) == shard_dim(b)
