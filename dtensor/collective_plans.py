"""The steps of a redistribution through process groups, where no symmetric memory spans the ranks.

Steps along single mesh dims are compared with one step among all ranks: hosts may be far apart
along one mesh dim and not along another.
"""

from __future__ import annotations

import heapq
import itertools
import math
import os
from collections.abc import Iterator
from functools import lru_cache

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from weft.collectives.group import forget_meshes
from weft.dtensor.layout import Layout, Shape, check_partials, distinct, shard_dim
from weft.dtensor.transfers import STEP_BYTES, Plan, Step, bytes_moved, elements_received, plan

# How much longer a byte takes between hosts than inside one.
_BETWEEN_HOSTS = 5


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

    def share(chosen: Shape) -> float:
        """Bytes that a rank holds, on average."""
        sizes = zip(source.place.sizes, cuts, chosen, strict=True)
        return source.global_bytes / math.prod(size for size, cut, i in sizes if cut[i] >= 0)

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
        kept = zip(sums, here, goal, strict=True)
        if all(a == b or not is_sum[a] for is_sum, a, b in kept):
            at_once, slowness = cost + 2 * STEP_BYTES, _slowness(any(far))
            # Some rank receives what the ranks lack on average, or more; how much takes 50 us.
            if at_once + max(0.0, share(goal) - share(here)) * slowness <= least:
                elements = max(elements_received(placed(here), target))
                at_once += elements * source.dtype.itemsize * slowness
                heapq.heappush(heap, (at_once, next(order), goal, here))
                least = min(least, at_once)
    stops = [goal]
    while (before := came_from[stops[-1]]) is not None:
        stops.append(before)
    layouts = map(placed, reversed(stops))
    return Plan(source, target, tuple(itertools.starmap(Step, itertools.pairwise(layouts))))


forget_meshes.append(collective_plan.cache_clear)


def _choices(old: Placement, new: Placement, shards: list[int]) -> list[Placement]:
    """Placements that a mesh dim may take on the way; sums that become replicated scatter first."""
    if isinstance(old, Partial) and isinstance(new, Replicate):
        return distinct([old, *map(Shard, shards), new])
    return [old] if old == new and isinstance(old, Partial) else distinct([old, Replicate(), new])


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
            moved = bytes_moved(whole, size, is_sum, new >= 0)
            if is_sum and new < 0:
                moved *= size / 2  # all terms in one step, instead of parts in two
            cost = 0.0 if local else STEP_BYTES + moved * _slowness(far[dim])
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
