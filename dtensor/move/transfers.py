"""How a redistribution works: which rank takes which blocks from whom, in which steps.

Each rank cuts its target box by the source boxes and takes every piece from the nearest rank that
holds it: itself first, else a replica that differs in the innermost mesh dims, spread over the
replicas. That is the least number of bytes, in one step, for any pair of layouts, on one mesh or
two.

A piece of a `Partial` source has several holders and is reduced. If reducing shards first and
pulling them afterwards is cheaper, there are two steps:

    [P, S(0)] -> [R, S(0)] on (2, 4)     1. [S(1), S(0)]: each rank reduces half of what it has
                                         2. [R, S(0)]: and takes the other half

Where no symmetric memory spans the ranks, `weft.dtensor.move.collective_plans` finds the steps.
Planning is arithmetic without communication, and all ranks arrive at the same plan. Of thousands of
ranks none are listed: bytes are sums over arrays (`layout.extents`), and pieces are found for one
rank, among those whose boxes meet its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, cast

import numpy as np
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from weft.collectives.ranks.group import forget_meshes
from weft.dtensor.layout.boxes import Layout
from weft.dtensor.layout.extents import Integers, over_the_mesh
from weft.dtensor.layout.placements import (
    LINEAR_REDUCTIONS,
    Placements,
    check_partials,
    distinct,
    is_shard,
    shard_dim,
    show,
)
from weft.dtensor.layout.runs import Box, Runs, Shape

Slices = tuple[slice, ...]

# What another step costs, in bytes that could be received meanwhile: 5 us at 6 GB/s.
STEP_BYTES = 32 << 10
_MAX_MIDDLES = 256


@dataclass(frozen=True)
class PulledPiece:
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

    def pieces_of(self, receiver: int) -> tuple[PulledPiece, ...]:
        """What a rank of the flattened target mesh takes."""
        if (found := self._pieces.get(receiver)) is None:
            candidates = self.families.holding(self.target, receiver, self.mesh_dim)
            found = self.families.pieces(self.target, receiver, candidates)
            self._pieces[receiver] = found
        return found

    def taken_from(self, holder: int, receiver: int) -> list[PulledPiece]:
        """Of what a rank takes, the pieces that `holder` has a part in."""
        if (known := self._pieces.get(receiver)) is None:
            if not self.families.meet(holder, self.target, receiver):
                return []
            known = self.families.pieces(self.target, receiver, self.families.like(holder))
        return [piece for piece in known if holder in piece.holders]

    @cached_property
    def _pieces(self) -> dict[int, tuple[PulledPiece, ...]]:
        return {}

    @cached_property
    def families(self) -> Families:
        """Who holds what before the step."""
        return Families(self.source, self.target)

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
        received = elements_received(self.source, self.target)
        made: list[int] = (self.source.dtype.itemsize * received).tolist()
        return made

    @cached_property
    def is_local(self) -> bool:
        """Whether every rank has all that it needs."""
        return not elements_received(self.source, self.target).any()

    @cached_property
    def senders(self) -> frozenset[int]:
        """Global ranks that others take something from."""
        source_ranks, target_ranks = self.source.place.ranks, self.target.place.ranks
        return frozenset(
            source_ranks[holder]
            for receiver in range(len(target_ranks))
            for piece in self.pieces_of(receiver)
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
    def told(self) -> tuple[str]:
        """What all ranks must know the same, for their calls to be compared."""
        return (f"{self.source} -> {self.target}",)

    @cached_property
    def tables(self) -> dict[Any, Any]:
        """Tables of the kernel in `weft.collectives.kernels.pull`, by device and alignment."""
        return {}

    @cached_property
    def room(self) -> int:
        """Bytes of symmetric memory on each rank: the largest local tensor of the source."""
        return int(held(self.source).max()) * self.source.dtype.itemsize

    def __str__(self) -> str:
        worst = max(self.bytes_received, default=0)
        kind = "local" if self.is_local else f"pull, at most {worst} bytes a rank"
        reduce = f", {self.reduce_op} in rank order" if self.reduce_op else ""
        return f"{show(self.source.placements)} -> {show(self.target.placements)}: {kind}{reduce}"


@dataclass(frozen=True)
class MovePlan:
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


class Families:
    """Who holds what before a step. Ranks whose values add up have the same box and are a family,
    named by its first member; mesh dims that stay Partial are left alone.
    """

    def __init__(self, source: Layout, target: Layout) -> None:
        self._source, self._same_mesh = source, source.mesh == target.mesh
        self._kept, self._summed, self._born = _partial_dims(source, target)
        first = [slice(0, 1) if dim in self._summed else slice(None) for dim in self._dims]
        numbers = np.arange(len(source.place.ranks)).reshape(source.place.sizes)
        self._firsts, self._first = numbers[tuple(first)], tuple(first)

    @property
    def _dims(self) -> range:
        return range(len(self._source.place.sizes))

    def holding(self, target: Layout, receiver: int, mesh_dim: int | None) -> list[int]:
        """Families whose boxes meet a rank's. If all moves along one mesh dim, the nearest holders
        differ along that alone.
        """
        here, wanted = target.place.coordinate(receiver), target.extents
        line = [
            slice(here[dim], here[dim] + 1)
            if mesh_dim is not None and dim != mesh_dim and dim not in self._summed
            else slice(None)
            for dim in self._dims
        ]
        if (extents := self._source.extents) is None or wanted is None:
            found: list[int] = self._firsts[tuple(line)].ravel().tolist()
            return found
        meets = [
            (mine.shared(theirs.at(here)) > 0) for mine, theirs in zip(extents, wanted, strict=True)
        ]
        return self._where(meets, tuple(line))

    def like(self, holder: int) -> list[int]:
        """Families that have the same box as a rank."""
        if (extents := self._source.extents) is None:
            box, boxes = self._source.boxes[holder], self._source.boxes
            return [first for first in self._firsts.ravel().tolist() if boxes[first] == box]
        here = self._source.place.coordinate(holder)
        same = [
            (each == of_holder)
            for extent in extents
            for each, of_holder in zip(extent, extent.at(here), strict=True)
        ]
        return self._where(same, ())

    def meet(self, holder: int, target: Layout, receiver: int) -> bool:
        """Whether a rank wants anything of what another one has."""
        if (extents := self._source.extents) is None or (wanted := target.extents) is None:
            return True
        there, here = self._source.place.coordinate(holder), target.place.coordinate(receiver)
        pairs = zip(extents, wanted, strict=True)
        return all(mine.at(there).shared(theirs.at(here)).all() for mine, theirs in pairs)

    def _where(self, masks: Sequence[Any], line: tuple[slice, ...]) -> list[int]:
        mask = np.ones((1,) * len(self._dims), bool)
        for each in masks:
            mask = mask & each
        whole = np.broadcast_to(mask, self._source.place.sizes)[self._first]
        found: list[int] = self._firsts[line][whole[line]].tolist()
        return found

    def by_box(
        self, target: Layout, receiver: int, families: Sequence[int]
    ) -> dict[Box, list[list[int]]]:
        """Of some families, by their boxes, the members of each that a rank may take from."""
        source, place = self._source, self._source.place
        coordinate = target.place.coordinate(receiver)
        found: dict[Box, list[list[int]]] = {}
        for first in families if self.contributes(target, receiver) else ():
            at = place.coordinate(first)
            if all(at[dim] == coordinate[dim] for dim in self._kept):
                found.setdefault(source.box(at), []).append(self._members(at))
        return found

    def contributes(self, target: Layout, receiver: int) -> bool:
        """Whether a rank takes anything: of a new Partial, one does."""
        at = target.place.coordinate(receiver)
        return all(_contributes(target.placements[dim], at[dim]) for dim in self._born)

    def kept(self, coordinate: Shape) -> Shape:
        """Where a rank is along the mesh dims that stay Partial."""
        return tuple(coordinate[dim] for dim in self._kept)

    def pieces(
        self, target: Layout, receiver: int, families: Sequence[int]
    ) -> tuple[PulledPiece, ...]:
        """What a rank takes of some families in one pull: of each box, from the nearest."""
        pieces: list[PulledPiece] = []
        source, wanted = self._source, target.box_at(receiver)
        here = target.place.coordinate(receiver) if self._same_mesh else None
        for box, holders in self.by_box(target, receiver, families).items():
            if cuts := cut_box(box, wanted):
                far = [min(_distance(here, source.place.coordinate(m)) for m in f) for f in holders]
                near = list(zip(far, holders, strict=True))
                chosen = _nearest(near, source, target.place.ranks[receiver], receiver)
                pieces += [PulledPiece(tuple(chosen), s, t, numel) for s, t, numel in cuts]
        return tuple(pieces)

    def _members(self, first: Shape) -> list[int]:
        sizes = self._source.place.sizes
        terms = [range(sizes[dim]) if dim in self._summed else (first[dim],) for dim in self._dims]
        return [self._source.place.index_at(each) for each in itertools.product(*terms)]


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
def overlap(source: Runs, target: Runs) -> int:
    """How many indices both list."""
    return sum(max(0, min(a + m, b + n) - max(a, b)) for a, m in source for b, n in target)


def held(layout: Layout) -> Integers:
    """How many elements each rank of the mesh holds."""
    if (lengths := layout.lengths) is not None:
        return lengths.reshape(-1)
    return np.array([math.prod(map(overlap, box, box)) for box in layout.boxes], np.int64)


def elements_received(source: Layout, target: Layout) -> Integers:
    """Elements that each rank of the target mesh receives from others in one step."""
    _, summed, born = _partial_dims(source, target)
    terms = math.prod(source.place.sizes[dim] for dim in summed)
    received = terms * held(target) - _held_already(source, target)
    if born:
        rows = zip(target.place.coordinates, received.tolist(), strict=True)
        received = np.array(
            [
                count if all(_contributes(target.placements[dim], at[dim]) for dim in born) else 0
                for at, count in rows
            ],
            np.int64,
        )
    return received


def _held_already(source: Layout, target: Layout) -> Integers:
    """Elements of what each rank of the target mesh wants that it holds itself."""
    there, before, after = source.place, source.extents, target.extents
    alike = there.ranks == target.place.ranks and there.sizes == target.place.sizes
    if alike and before is not None and after is not None:
        shared = [a.shared(b) for a, b in zip(before, after, strict=True)]
        return over_the_mesh(shared, there.sizes).reshape(-1)
    at = {rank: index for index, rank in enumerate(there.ranks)}
    pairs = zip(target.place.ranks, target.boxes, strict=True)
    return np.array(
        [
            math.prod(map(overlap, source.boxes[at[rank]], box)) if rank in at else 0
            for rank, box in pairs
        ],
        np.int64,
    )


def _cost(itemsize: int, *steps: Integers) -> float:
    return len(steps) * STEP_BYTES + itemsize * sum(int(step.sum()) for step in steps) / len(
        steps[0]
    )


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
def move_plan(source: Layout, target: Layout) -> MovePlan:
    """The cheapest way from `source` to `target`: one pull, or reduce shards, then pull.

    Raises:
        ValueError: Partial reductions that do not commute, or that the dtype does not have.
    """
    if source is target:
        return MovePlan(source, target, ())
    check_partials(source.placements, source.dtype)
    stops = [source, target]
    kept, summed, _ = _partial_dims(source, target)
    if summed and source.ndim:
        itemsize = source.dtype.itemsize
        least = _cost(itemsize, elements_received(source, target))
        # A lower bound: every element is reduced once, on a rank that needs it.
        terms, copies = (math.prod(source.place.sizes[d] for d in dims) for dims in (summed, kept))
        elements = copies * math.prod(source.shape)
        needed, count = int(held(target).sum()), len(target.place.ranks)
        bound = STEP_BYTES + itemsize * ((terms - 2) * elements + needed) / count
        middles = itertools.islice(_middles(source, target), _MAX_MIDDLES)
        for middle in middles if least > bound + STEP_BYTES else ():
            if middle is target:
                continue
            cost = _cost(
                itemsize, elements_received(source, middle), elements_received(middle, target)
            )
            if cost < least:
                stops, least = [source, middle, target], cost
                if cost <= bound + STEP_BYTES:
                    break
    return MovePlan(source, target, tuple(itertools.starmap(Step, itertools.pairwise(stops))))


forget_meshes.append(move_plan.cache_clear)


def _is_aligned(here: Placements, dim: int, new: Placement) -> bool:
    """Whether ranks exchange data only along mesh dim `dim`."""
    if isinstance(new, Partial):
        return False
    cut = {shard_dim(here[dim]), shard_dim(new)} - {-1}
    return not any(shard_dim(later) in cut for later in here[dim + 1 :])


def transition_bytes(layout: Layout, mesh_dim: int, wanted: Placement) -> float:
    """Approximate bytes that a rank receives if one mesh dim of `layout` changes to `wanted`."""
    old, size = layout.placements[mesh_dim], layout.place.sizes[mesh_dim]
    if old == wanted or isinstance(old, Replicate) or size == 1:
        return 0.0
    whole = layout.global_bytes // layout.parts(but=mesh_dim) * (size - 1) / size
    return bytes_moved(whole, size, isinstance(old, Partial), is_shard(wanted))


def bytes_moved(whole: float, size: int, from_sum: bool, to_shard: bool) -> float:
    """Bytes that a rank receives along a mesh dim of `size`, where a gather brings it `whole`."""
    if to_shard:
        return whole if from_sum else whole / size
    return 2 * whole if from_sum else whole


def same_shard(a: Placement, b: Placement) -> bool:
    """Whether both cut the same tensor dim."""
    return is_shard(a) and shard_dim(a) == shard_dim(b)
