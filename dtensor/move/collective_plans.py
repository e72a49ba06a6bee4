"""The steps of a redistribution through process groups, where no symmetric memory spans the ranks.

Steps along single mesh dims are compared with one step among all ranks: hosts may be far apart
along one mesh dim and not along another.
"""

from __future__ import annotations

import heapq
import itertools
import math
import os
from collections.abc import Container, Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from weft.collectives.ranks.group import forget_meshes
from weft.dtensor.layout.boxes import Layout
from weft.dtensor.layout.extents import Cuts, Integers, extent_of, over_the_mesh
from weft.dtensor.layout.placements import check_partials, distinct, pieces_of, shard_dim
from weft.dtensor.layout.runs import Runs, Shape, runs_of
from weft.dtensor.move.transfers import STEP_BYTES, MovePlan, Step, bytes_moved, move_plan, overlap

# How much longer a byte takes between hosts than inside one.
_BETWEEN_HOSTS = 5


@lru_cache(maxsize=4096)
def collective_plan(source: Layout, target: Layout) -> MovePlan:
    """The cheapest steps through process groups, some of which may span hosts.

    A step changes one mesh dim, within that dim's groups, or all at once, among all ranks.
    """
    if source is target:
        return MovePlan(source, target, ())
    check_partials(source.placements, source.dtype)
    pairs = list(zip(source.placements, target.placements, strict=False))
    if source.mesh != target.mesh or any(isinstance(b, Partial) and a != b for a, b in pairs):
        return move_plan(source, target)
    ways = _Ways(source, target)
    order = itertools.count()  # breaks ties in the heap
    # (cost of the cheapest way through `here`, or less; order; cost up to `here`; here; before it).
    # `here` is None for the step among all ranks to the goal, whose cost is not worked out yet.
    heap: list[tuple[float, int, float, Shape | None, Shape | None]] = [
        (0.0, next(order), 0.0, ways.start, None)
    ]
    came_from: dict[Shape, Shape | None] = {}
    least = math.inf  # of the ways to the goal in the heap: no dearer way is looked at
    while ways.goal not in came_from:
        _, turn, cost, here, before = heapq.heappop(heap)
        if here is None:
            assert before is not None
            cost += ways.cost_at_once(before)
            heapq.heappush(heap, (cost, turn, cost, ways.goal, before))
            least = min(least, cost)
        elif here not in came_from:
            came_from[here] = before
            for there, step, rest in ways.onwards(here, came_from):
                through = cost + step + rest
                if through <= least:
                    heapq.heappush(heap, (through, next(order), cost + step, there, here))
                    if there == ways.goal:
                        least = through
    stops = [ways.goal]
    while (last := came_from[stops[-1]]) is not None:
        stops.append(last)
    layouts = map(ways.layout, reversed(stops))
    return MovePlan(source, target, tuple(itertools.starmap(Step, itertools.pairwise(layouts))))


forget_meshes.append(collective_plan.cache_clear)


class _Option(NamedTuple):
    """What one mesh dim may be on the way.

    Attributes:
        cut: the tensor dim that it cuts; -1 if it cuts none.
        pieces: into how many the cut first divides that dim: see `_StridedShard`.
        parts: into how many parts it cuts the tensor.
        is_sum: it is still to be reduced.
        terms: of how many.
        most_parts: the most `parts` of its options, once it is no sum.
        steps: how many steps that communicate are left to the goal, at least.
    """

    cut: int
    pieces: int
    parts: int
    is_sum: bool
    terms: int
    most_parts: int
    steps: int


class _Ways:
    """The ways from one layout to another. A layout on the way is a tuple of indices, one into the
    choices of each mesh dim, as these hash quickly.
    """

    def __init__(self, source: Layout, target: Layout) -> None:
        self.source, self.sizes = source, source.place.sizes
        shards = sorted(range(source.ndim), key=lambda dim: -source.shape[dim])[:2]
        ends = zip(source.placements, target.placements, strict=True)
        self.choices = [_choices(old, new, shards) for old, new in ends]
        self.start, self.goal = (
            tuple(map(list.index, self.choices, end.placements)) for end in (source, target)
        )
        self.options = list(map(_options_of, self.choices, target.placements, self.sizes))
        self.slowness = [_slowness(source, dim) for dim in range(len(self.sizes))]
        # Bytes that a rank holds at the goal, on average.
        self.wanted = source.global_bytes / math.prod(o.parts for o in self._at(self.goal))

    def _at(self, here: Shape) -> list[_Option]:
        return list(map(list.__getitem__, self.options, here))

    def layout(self, here: Shape) -> Layout:
        """The layout of these indices."""
        return self.source.with_placements(tuple(map(list.__getitem__, self.choices, here)))

    def onwards(
        self, here: Shape, known: Container[Shape]
    ) -> Iterator[tuple[Shape | None, float, float]]:
        """(there, cost of the step, least cost from there) of each step to a layout not `known`.

        `there` is None for the step among all ranks to the goal: its bytes are what is left.

        From anywhere to the goal it takes at least: a step for each of up to two mesh dims; the
        bytes to reduce the sums where each rank holds as little as it ever can, to a part each;
        and the bytes by which a rank then holds less than at the goal.
        """
        at, total = self._at(here), self.source.global_bytes
        parts = math.prod([o.parts for o in at])
        terms = math.prod([o.terms for o in at])
        most = math.prod([o.most_parts for o in at])
        steps = sum([o.steps for o in at])
        cuts = [o.cut for o in at]
        for dim, (size, old) in enumerate(zip(self.sizes, at, strict=True)):
            later = cuts[dim + 1 :]
            if old.cut >= 0 and old.cut in later:
                continue
            uncut = total // (parts // old.parts)
            terms_left, most_cut = terms // old.terms, most // old.most_parts
            for i, new in enumerate(self.options[dim]):
                there = (*here[:dim], i, *here[dim + 1 :])
                if there in known or new.is_sum or (new.cut >= 0 and new.cut in later):
                    continue
                cost = 1.0  # of two ways that move as much, the one with fewer steps
                if size > 1 and (old.is_sum or old.cut >= 0):
                    moved = bytes_moved(uncut * (size - 1) / size, size, old.is_sum, new.cut >= 0)
                    if old.is_sum and new.cut < 0:
                        moved *= size / 2  # all terms in one step, instead of parts in two
                    cost = STEP_BYTES + moved * self.slowness[dim]
                to_reduce = total / (most_cut * new.most_parts) * (1 - 1 / terms_left)
                to_gather = max(0.0, self.wanted - uncut / new.parts / terms_left)
                steps_left = min(2, steps - old.steps + new.steps)
                yield there, cost, STEP_BYTES * steps_left + to_reduce + to_gather
        if not any(o.is_sum for o in at):
            # Some rank receives what the ranks lack on average, or more.
            lacking = max(0.0, self.wanted - total / parts)
            yield None, 2 * STEP_BYTES, lacking * max(self.slowness)

    def cost_at_once(self, here: Shape) -> float:
        """Cost of the bytes that some rank receives if all take their part of the goal at once."""
        received = int((self._shared(self.goal) - self._shared(here)).max())
        return received * self.source.dtype.itemsize * max(self.slowness)

    def _shared(self, here: Shape) -> Integers:
        """How many of the goal's elements each rank holds."""
        dims = zip(self.source.shape, self._cuts(here), self._cuts(self.goal), strict=True)
        return over_the_mesh([_in_both(n, self.sizes, a, b) for n, a, b in dims], self.sizes)

    def _cuts(self, here: Shape) -> list[Cuts]:
        cuts: list[Cuts] = [()] * self.source.ndim
        for dim, option in enumerate(self._at(here)):
            if option.cut >= 0:
                cuts[option.cut] += ((option.pieces, dim),)
        return cuts


def _choices(old: Placement, new: Placement, shards: list[int]) -> list[Placement]:
    """Placements that a mesh dim may take on the way; sums that become replicated scatter first."""
    if isinstance(old, Partial) and isinstance(new, Replicate):
        return distinct([old, *map(Shard, shards), new])
    return [old] if old == new and isinstance(old, Partial) else distinct([old, Replicate(), new])


def _options_of(choices: list[Placement], goal: Placement, size: int) -> list[_Option]:
    """The choices of a mesh dim of `size`."""
    cuts = list(map(shard_dim, choices))
    most = size if max(cuts) >= 0 else 1
    options = []
    for placement, cut in zip(choices, cuts, strict=True):
        is_sum = isinstance(placement, Partial) and placement != goal
        options.append(
            _Option(
                cut=cut,
                pieces=pieces_of(placement),
                parts=size if cut >= 0 else 1,
                is_sum=is_sum,
                terms=size if is_sum else 1,
                most_parts=1 if is_sum else most,
                steps=int(size > 1 and placement != goal and (is_sum or cut >= 0)),
            )
        )
    return options


@lru_cache(maxsize=256)
def _held_by_each(length: int, sizes: Shape, cuts: Cuts) -> list[Runs]:
    """What each rank of a mesh of `sizes` holds of a tensor dim."""
    ranks = itertools.product(*map(range, sizes))
    return [runs_of(length, tuple([(n, sizes[dim], at[dim]) for n, dim in cuts])) for at in ranks]


@lru_cache(maxsize=256)
def _in_both(length: int, sizes: Shape, here: Cuts, there: Cuts) -> Integers:
    """How many indices of a tensor dim each rank of a mesh of `sizes` holds under both cuts."""
    one, other = (extent_of(length, sizes, cuts) for cuts in (here, there))
    if one is not None and other is not None:
        return one.shared(other)
    listed = map(overlap, _held_by_each(length, sizes, here), _held_by_each(length, sizes, there))
    return np.array(list(listed), np.int64).reshape(sizes)


def _slowness(layout: Layout, dim: int) -> int:
    """How much longer a byte takes along a mesh dim than inside one host.

    Whether it spans several hosts is known if torchrun fills them in rank order.
    """
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or len(layout.place.ranks)
    hosts = layout.place.grid // per_host
    far = (hosts.take(0, dim) != hosts.take(-1, dim)).any()
    return _BETWEEN_HOSTS if far else 1
