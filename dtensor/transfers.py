"""How a redistribution works: which rank takes which blocks from whom, in which steps.

Each rank cuts its target box by the source boxes and takes every piece from the nearest rank that
holds it: itself first, else a replica that differs in the innermost mesh dims, spread over the
replicas. That is the least number of bytes, in one step, for any pair of layouts, on one mesh or
two.

A piece of a `Partial` source has several holders and is reduced. If reducing shards first and
pulling them afterwards is cheaper, there are two steps:

    [P, S(0)] -> [R, S(0)] on (2, 4)     1. [S(1), S(0)]: each rank reduces half of what it has
                                         2. [R, S(0)]: and takes the other half

If no symmetric memory spans the ranks, steps along single mesh dims are compared with one step
among all ranks: hosts may be far apart along one mesh dim and not along another. Planning is
arithmetic without communication, and all ranks arrive at the same plan.
"""

from __future__ import annotations

import heapq
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from weft.collectives.group import forget_meshes
from weft.dtensor.layout import (
    LINEAR_REDUCTIONS,
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

# What another step costs, in bytes that could be received meanwhile: 5 us at 6 GB/s.
_STEP_BYTES = 32 << 10
# How much longer a byte takes between hosts than inside one.
_BETWEEN_HOSTS = 5
_MAX_MIDDLES = 256


@dataclass(frozen=True)
class Piece:
    """A block that one rank takes: the same block of each of `holders`, reduced in this order."""

    holders: tuple[int, ...]  # indices in the flattened source mesh
    source: Slices  # of a holder's local tensor
    target: Slices  # of the receiver's local tensor
    numel: int


@dataclass(frozen=True)
class Step:
    """One pull of every rank."""

    source: Layout
    target: Layout

    @cached_property
    def pieces(self) -> list[tuple[Piece, ...]]:
        """What each rank of the flattened target mesh takes."""
        return _pieces(self.source, self.target)

    @cached_property
    def reduce_op(self) -> str | None:
        """How the holders' values are reduced; None where there is one holder."""
        ops = {op for op, _ in _reductions(self.source, self.target)}
        return None if not ops else "sum" if ops <= set(LINEAR_REDUCTIONS) else ops.pop()

    @cached_property
    def scale(self) -> int:
        """What a sum is divided by (avg)."""
        reductions = _reductions(self.source, self.target)
        return math.prod(size for op, size in reductions if op == "avg")

    @cached_property
    def mesh_dim(self) -> int | None:
        """The only mesh dim along which anything moves, if there is one."""
        if self.source.mesh != self.target.mesh:
            return None
        here = self.source.placements
        pairs = enumerate(zip(here, self.target.placements, strict=True))
        changed = [(dim, new) for dim, (old, new) in pairs if old != new]
        return changed[0][0] if len(changed) == 1 and _is_aligned(here, *changed[0]) else None

    @cached_property
    def bytes_received(self) -> list[int]:
        """Bytes that come from other ranks, for each rank of the flattened target mesh."""
        itemsize = self.source.dtype.itemsize
        return [itemsize * numel for numel in _received(self.source, self.target)]

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
    def ranks(self) -> tuple[int, ...]:
        """Global ranks that hold the source or the target, in order."""
        return tuple(sorted({*self.source.place.ranks, *self.target.place.ranks}))

    @cached_property
    def collective(self) -> str:
        """The collective that this amounts to; empty where nothing moves."""
        source, target = self.source, self.target
        if self.is_local:
            return ""
        if source.mesh != target.mesh:
            return "broadcast" if target.is_replicated else "scatter"
        changes = [
            (old, new)
            for old, new in zip(source.placements, target.placements, strict=True)
            if old != new
        ]
        gathers = any(isinstance(new, Replicate) for _, new in changes)
        if self.reduce_op:
            return "all_reduce" if gathers else "reduce_scatter"
        return "all_gather" if gathers else "all_to_all"

    @cached_property
    def tables(self) -> dict[Any, Any]:
        """Tables of the pull kernel, by device and alignment; see `weft.collectives.pull`."""
        return {}

    @cached_property
    def room(self) -> int:
        """Bytes of symmetric memory on each rank: the largest local tensor of the source."""
        ranks = range(len(self.source.boxes))
        return max(math.prod(self.source.shape_at(i)) for i in ranks) * self.source.dtype.itemsize

    def __str__(self) -> str:
        worst = max(self.bytes_received, default=0)
        kind = "local" if self.is_local else f"pull, at most {worst} bytes a rank"
        reduce = f", {self.reduce_op} in rank order" if self.reduce_op else ""
        return f"{show(self.source.placements)} -> {show(self.target.placements)}: {kind}{reduce}"


@dataclass(frozen=True)
class Plan:
    """How a redistribution would run. Printable; making it does not communicate.

    Attributes:
        steps: the pulls, in order; empty if nothing changes.
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
    """How far apart two ranks of one mesh are: outer mesh dims have the slower links."""
    if here is None:
        return 0
    return sum(1 << (len(there) - dim) for dim, i in enumerate(there) if here[dim] != i)


def _partial_dims(source: Layout, target: Layout) -> tuple[list[int], list[int], list[int]]:
    """Mesh dims (that stay Partial, that are reduced, that become Partial)."""
    same_mesh = source.mesh == target.mesh
    kept = [
        dim
        for dim, (old, new) in enumerate(zip(source.placements, target.placements, strict=False))
        if same_mesh and isinstance(old, Partial) and old == new
    ]
    before, after = (
        [dim for dim, p in enumerate(side.placements) if isinstance(p, Partial) and dim not in kept]
        for side in (source, target)
    )
    return kept, before, after


def _reductions(source: Layout, target: Layout) -> list[tuple[str, int]]:
    """(operation, number of terms) of each mesh dim that is reduced."""
    return [
        (cast(Partial, source.placements[dim]).reduce_op, source.place.sizes[dim])
        for dim in _partial_dims(source, target)[1]
    ]


def _pieces(source: Layout, target: Layout) -> list[tuple[Piece, ...]]:
    """What each rank takes in one pull; mesh dims that stay Partial are left alone."""
    kept, summed, born = _partial_dims(source, target)
    same_mesh = source.mesh == target.mesh
    # Ranks whose values add up have the same box and form a family, named by its first member.
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
    return every


def _nearest(
    holders: list[tuple[int, list[int]]], source: Layout, rank: int, receiver: int
) -> list[int]:
    """The family to take from: one that includes the receiver, else one of the nearest."""
    for _, members in holders:
        if any(source.place.ranks[m] == rank for m in members):
            return members
    least = min(distance for distance, _ in holders)
    near = [members for distance, members in holders if distance == least]
    return near[receiver % len(near)]


def _contributes(placement: Placement, index: int) -> bool:
    """Whether the rank at `index` of a new Partial dim holds the value, not a neutral element.

    One rank holds the value and the others 0 (or 1), instead of a share each: this does not round
    and also works for integers. If repeating a value changes nothing, every rank holds it.
    """
    op = placement.reduce_op if isinstance(placement, Partial) else ""
    return index == 0 or op not in ("sum", "product", "bxor")


@lru_cache(maxsize=1 << 14)
def _overlap(source: Runs, target: Runs) -> int:
    """How many indices both list."""
    return sum(max(0, min(a + m, b + n) - max(a, b)) for a, m in source for b, n in target)


def _received(source: Layout, target: Layout) -> list[int]:
    """Elements that each rank of the target mesh receives from others in one step."""
    _, summed, born = _partial_dims(source, target)
    terms = math.prod(source.place.sizes[dim] for dim in summed)
    held = dict(zip(source.place.ranks, source.boxes, strict=True))
    received = []
    for rank, box, coordinate in zip(
        target.place.ranks, target.boxes, target.place.coordinates, strict=True
    ):
        if all(_contributes(target.placements[dim], coordinate[dim]) for dim in born):
            needed = terms * math.prod(map(_overlap, box, box))
            own = math.prod(map(_overlap, held[rank], box)) if rank in held else 0
            received.append(needed - own)
        else:
            received.append(0)
    return received


def _cost(itemsize: int, *steps: list[int]) -> float:
    return len(steps) * _STEP_BYTES + itemsize * sum(map(sum, steps)) / len(steps[0])


def _middles(source: Layout, target: Layout) -> Iterator[Layout]:
    """Layouts in which to reduce first: `source` with its Partial dims turned into shards.

    Other mesh dims stay, take their final placement, or are sharded to divide the work.
    """
    same_mesh = source.mesh == target.mesh
    shards: list[Placement] = [Shard(d) for d in range(source.ndim)]
    choices: list[list[Placement]] = []
    for dim, old in enumerate(source.placements):
        new = target.placements[dim] if same_mesh else Replicate()
        if not isinstance(old, Partial):
            choices.append(distinct([old, new, *(shards if isinstance(old, Replicate) else [])]))
        elif old == new:
            choices.append([old])
        else:
            choices.append(distinct([new, *shards]) if is_shard(new) else shards)
    for placements in itertools.product(*choices):
        yield source.with_placements(placements)


@lru_cache(maxsize=4096)
def plan(source: Layout, target: Layout) -> Plan:
    """The cheapest way from `source` to `target`: one pull, or reduce shards, then pull.

    Raises:
        ValueError: Partial reductions that do not commute, or that the dtype does not have.
    """
    if source is target:
        return Plan(source, target, ())
    check_partials(source.placements, source.dtype)
    stops = [source, target]
    kept, summed, _ = _partial_dims(source, target)
    if summed and source.ndim:
        itemsize = source.dtype.itemsize
        least = _cost(itemsize, _received(source, target))
        # A lower bound: every element is reduced once, on a rank that needs it.
        terms, copies = (math.prod(source.place.sizes[d] for d in dims) for dims in (summed, kept))
        elements = copies * math.prod(source.shape)
        needed = sum(math.prod(map(_overlap, box, box)) for box in target.boxes)
        bound = _cost(itemsize, [(terms - 2) * elements + needed] + [0] * (len(target.boxes) - 1))
        middles = itertools.islice(_middles(source, target), _MAX_MIDDLES)
        for middle in middles if least > bound + _STEP_BYTES else ():
            if middle is target:
                continue
            cost = _cost(itemsize, _received(source, middle), _received(middle, target))
            if cost < least:
                stops, least = [source, middle, target], cost
                if cost <= bound + _STEP_BYTES:
                    break
    return Plan(source, target, tuple(itertools.starmap(Step, itertools.pairwise(stops))))


@lru_cache(maxsize=4096)
def collective_plan(source: Layout, target: Layout) -> Plan:
    """The cheapest steps through process groups, some of which may span hosts.

    A step changes one mesh dim, within that dim's groups, or all at once, among all ranks.
    """
    if source is target:
        return Plan(source, target, ())
    check_partials(source.placements, source.dtype)
    pairs = list(zip(source.placements, target.placements, strict=False))
    if source.mesh != target.mesh or any(isinstance(b, Partial) and a != b for a, b in pairs):
        return plan(source, target)
    shards = sorted(range(source.ndim), key=lambda dim: -source.shape[dim])[:2]
    choices = [_choices(old, new, shards) for old, new in pairs]
    far = [_between_hosts(source, dim) for dim in range(len(choices))]
    # Layouts are looked at as indices into `choices`, as these hash quickly.
    start, goal = (tuple(map(list.index, choices, end.placements)) for end in (source, target))
    cuts = [list(map(shard_dim, options)) for options in choices]
    sums = [[isinstance(p, Partial) for p in options] for options in choices]

    def placed(chosen: Shape) -> Layout:
        return source.with_placements(tuple(map(list.__getitem__, choices, chosen)))

    order = itertools.count()  # breaks ties in the heap
    heap: list[tuple[float, int, Shape, Shape | None]] = [(0.0, next(order), start, None)]
    came_from: dict[Shape, Shape | None] = {}
    least = math.inf  # of the ways to the goal in the heap: no dearer way is looked at
    while goal not in came_from:
        cost, _, here, previous = heapq.heappop(heap)
        if here in came_from:
            continue
        came_from[here] = previous
        for there, price in _along_one_dim(source, here, cuts, sums, far):
            if there not in came_from and cost + price <= least:
                heapq.heappush(heap, (cost + price, next(order), there, here))
                least = cost + price if there == goal else least
        total = cost + 2 * _STEP_BYTES
        kept = zip(sums, here, goal, strict=True)
        if total <= least and all(a == b or not is_sum[a] for is_sum, a, b in kept):
            elements = max(_received(placed(here), target))
            total += elements * source.dtype.itemsize * _slowness(any(far))
            heapq.heappush(heap, (total, next(order), goal, here))
            least = min(least, total)
    stops = [goal]
    while (before := came_from[stops[-1]]) is not None:
        stops.append(before)
    layouts = map(placed, reversed(stops))
    return Plan(source, target, tuple(itertools.starmap(Step, itertools.pairwise(layouts))))


for _cached in (plan, collective_plan):
    forget_meshes.append(_cached.cache_clear)


def _choices(old: Placement, new: Placement, shards: list[int]) -> list[Placement]:
    """Placements that a mesh dim may take on the way; sums that become replicated scatter first."""
    if isinstance(old, Partial) and isinstance(new, Replicate):
        return distinct([old, *map(Shard, shards), new])
    return [old] if old == new and isinstance(old, Partial) else distinct([old, Replicate(), new])


def _is_aligned(here: Placements, dim: int, new: Placement) -> bool:
    """Whether ranks exchange data only along mesh dim `dim`."""
    if isinstance(new, Partial):
        return False
    cut = {shard_dim(here[dim]), shard_dim(new)} - {-1}
    return not any(shard_dim(later) in cut for later in here[dim + 1 :])


def _along_one_dim(
    source: Layout, here: Shape, cuts: list[list[int]], sums: list[list[bool]], far: list[bool]
) -> Iterator[tuple[Shape, float]]:
    """(choices, cost) of each step from the choices `here` that changes one mesh dim.

    Args:
        cuts: of each choice of each mesh dim, the tensor dim that it cuts; -1 if it cuts none.
        sums: whether it is Partial.
        far: of each mesh dim, whether it spans hosts.
    """
    sizes, total = source.place.sizes, source.global_bytes
    cut = [of_dim[i] for of_dim, i in zip(cuts, here, strict=True)]
    shards = math.prod(size for size, own in zip(sizes, cut, strict=True) if own >= 0)
    for dim, (size, own) in enumerate(zip(sizes, cut, strict=True)):
        later, is_sum = cut[dim + 1 :], sums[dim][here[dim]]
        if own >= 0 and own in later:
            continue
        local = size == 1 or not (is_sum or own >= 0)
        whole = total // (shards // size if own >= 0 else shards) * (size - 1) / size
        for i, new in enumerate(cuts[dim]):
            if i == here[dim] or sums[dim][i] or (new >= 0 and new in later):
                continue
            moved = _moved(whole, size, is_sum, new >= 0)
            if is_sum and new < 0:
                moved *= size / 2  # all terms in one step, instead of parts in two
            cost = 0.0 if local else _STEP_BYTES + moved * _slowness(far[dim])
            yield (*here[:dim], i, *here[dim + 1 :]), cost


def _slowness(far: bool) -> int:
    return _BETWEEN_HOSTS if far else 1


def _between_hosts(layout: Layout, dim: int) -> bool:
    """Whether a mesh dim spans several hosts, assuming that torchrun fills them in rank order."""
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or len(layout.place.ranks)
    stride = math.prod(layout.place.sizes[dim + 1 :])
    size = layout.place.sizes[dim]
    ranks = layout.place.ranks
    return any(
        ranks[i] // per_host != ranks[i + stride * (size - 1)] // per_host
        for i in range(len(ranks))
        if (i // stride) % size == 0
    )


def redistribute_plan(
    mesh: DeviceMesh,
    shape: Sequence[int],
    dtype: torch.dtype,
    src_placements: Sequence[Placement],
    dst_placements: Sequence[Placement],
    *,
    dst_mesh: DeviceMesh | None = None,
    by_groups: bool = False,
) -> Plan:
    """How a redistribution would run, without running it.

    Args:
        mesh: where the tensor is; `dst_mesh` (default: the same) is where it goes.
        shape, dtype: of the global tensor.
        by_groups: plan as if no symmetric memory spanned the ranks.

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
    return (collective_plan if by_groups else plan)(source, target)


def transition_bytes(layout: Layout, mesh_dim: int, wanted: Placement) -> float:
    """Approximate bytes that a rank receives if one mesh dim of `layout` changes to `wanted`."""
    old, size = layout.placements[mesh_dim], layout.place.sizes[mesh_dim]
    if old == wanted or isinstance(old, Replicate) or size == 1:
        return 0.0
    pairs = enumerate(zip(layout.placements, layout.place.sizes, strict=True))
    rows = math.prod(n for dim, (p, n) in pairs if dim != mesh_dim and is_shard(p))
    whole = layout.global_bytes // rows * (size - 1) / size
    return _moved(whole, size, isinstance(old, Partial), is_shard(wanted))


def _moved(whole: float, size: int, from_sum: bool, to_shard: bool) -> float:
    if to_shard:
        return whole if from_sum else whole / size
    return 2 * whole if from_sum else whole


def same_shard(a: Placement, b: Placement) -> bool:
    """Whether both cut the same tensor dim."""
    return is_shard(a) and shard_dim(a) == shard_dim(b)
