"""Between hosts: which rows cross to which rank, and when they have come.

A group over several hosts shares memory inside each of them only. Rows cross from one host to
another once, cut among the ranks of the host that takes them (its rails), in parts: while one part
crosses, what has come before is shared inside and multiplied.

    host 0           host 1, part c of its rows         host 0 again
    rank 0     <---  rank 2: x_2[part c]                rank 0 | a gather inside, fused
    rank 1     <---  rank 3: x_3[part c]                rank 1 | with its multiplication

Sums go back the same ways: what a host has added up for the rows of another crosses once. A host of
more or fewer ranks than the other cuts what comes evenly.

The functions are collectives in two levels, of tensors that `collectives.movement` has prepared.
Their `inside` is the same collective of the ranks of one host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import torch

from weft import settings
from weft.collectives.process_groups import COMBINE, OnTheWay, ReduceOp, summed_in_fp32
from weft.collectives.ranks.bounds import Presence
from weft.collectives.ranks.caches import KeptDict
from weft.collectives.ranks.chunks import chunk_sizes, offsets
from weft.collectives.ranks.group import Group, kept_by_group
from weft.collectives.topology import here, in_two_levels, inside_of
from weft.errors import PeerTimeout

_PART_BYTES, _MOST_PARTS = 1 << 20, 8
Pairs = frozenset[tuple[int, int]]


def offered(op: str, group: Group) -> bool:
    """Whether a collective can go host by host: in an all_to_all each byte crosses once anyway."""
    possible = in_two_levels(group) and op != "all_to_all"
    return possible and settings.current_engine() != "generic"


def parts_of(rows: int, row_bytes: int) -> int:
    """In how many parts a shard crosses."""
    return max(1, min(-(-rows * row_bytes // _PART_BYTES), _MOST_PARTS))


@contextmanager
def naming(group: Group, op: str) -> Iterator[None]:
    """For what is done inside the host: who is absent there is told to the other hosts, whose ranks
    wait for all of this one's, by its number in the whole group.

    Raises:
        PeerTimeout: so named.
    """
    ours = here(group)
    try:
        yield
    except PeerTimeout as error:
        if error.ranks != tuple(group.ranks[rank] for rank in ours):
            raise  # of a wait for all, which has named them, or of an earlier call on a GPU
        absent = sorted(ours[peer] for peer in error.absent)
        Presence.now(group).give_up(absent)
        known = op, error.generation, error.timeout_s, error.history, absent, group.ranks
        raise PeerTimeout(group.rank, absent[0], *known) from error


@dataclass(frozen=True)
class HostRows:
    """Rows of one host, as the ranks of this host share them among each other.

    Attributes:
        ranks: whose they are.
        rows: where they are among those of the whole group; neighbours are joined.
        sizes: how many of them each rank of this host holds.
        mine: of another host, rows of this rank's shard that cross in the same step.
        leaves, comes: how many of `mine` go to each rank of the group, and of the block's rows that
            this rank holds, how many come from each.
    """

    ranks: tuple[int, ...]
    rows: tuple[slice, ...]
    sizes: list[int]
    mine: slice
    leaves: tuple[int, ...]
    comes: tuple[int, ...]

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Its rows of `whole`: a view where they are neighbours."""
        parts = [whole[rows] for rows in self.rows]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def put(self, made: torch.Tensor, whole: torch.Tensor) -> None:
        """Write them to their places in `whole`."""
        lengths = [rows.stop - rows.start for rows in self.rows]
        for rows, part in zip(self.rows, made.split(lengths), strict=True):
            whole[rows].copy_(part)


class Crossing:
    """The ways of the rows of one call between the hosts of a group.

    Args:
        rows: of every rank's shard; 0 among them.
        row_bytes: of what crosses; the same on every rank. 0: shards cross whole.
        op: the call, for errors.
        needed: pairs of hosts (from, to) between which anything crosses; None: all.
    """

    def __init__(
        self,
        group: Group,
        rows: Sequence[int],
        row_bytes: int,
        op: str,
        needed: Pairs | None = None,
    ) -> None:
        self._group, self._op = group, op
        self._host = group.hosts.index(here(group))
        parts = parts_of(max(rows), row_bytes)
        key = group, tuple(rows), parts, needed
        if (blocks := _blocks.get(key)) is None:
            blocks = _blocks[key] = _blocks_of(*key)
        # This host's rows, of which each rank holds its shard, and those of the other hosts, in the
        # order in which all ranks make the steps.
        self.own, self.foreign = blocks
        self._returning: list[tuple[HostRows, OnTheWay]] = []

    @cached_property
    def inside(self) -> Group:
        """The ranks of this host. Collective over them the first time."""
        return inside_of(self._group)

    def fetched(
        self, x: torch.Tensor, ahead: int | None = None
    ) -> Iterator[tuple[HostRows, torch.Tensor]]:
        """This rank's shard x of its own host's rows, then its rows of the others', as they come.

        Of them `ahead` are on their way at a time, all if None.
        """
        crossings = (
            (block, self._cross(x[block.mine], block.comes, block.leaves)) for block in self.foreign
        )
        begun = list(islice(crossings, ahead))
        yield self.own, x
        while begun:
            block, way = begun.pop(0)
            came = way.come()
            begun += islice(crossings, 1)
            yield block, came

    def give_back(self, block: HostRows, terms: torch.Tensor) -> None:
        """Send this host's sums for the rows of a block of another host, of which this rank has
        added up its own, towards the ranks whose rows they are. To be called for all `foreign` in
        order.
        """
        self._returning.append((block, self._cross(terms, block.leaves, block.comes)))

    def summed(self, own: torch.Tensor, dtype: torch.dtype, op: ReduceOp = "sum") -> torch.Tensor:
        """Of this rank's rows, what all hosts have sent, in their order, and the own one's sum.

        Reduced in `dtype`.
        """
        H, mine = len(self._group.hosts), self._host
        terms: dict[int, torch.Tensor] = {mine: own}
        for number, (block, way) in enumerate(self._returning):
            came = way.come()
            host = (mine + number % (H - 1) + 1) % H
            if len(came) and host not in terms:
                terms[host] = torch.empty_like(own, dtype=came.dtype)
            if len(came):
                terms[host][block.mine].copy_(came)
        self._returning.clear()
        first, *others = sorted(terms)
        total = terms[first].to(dtype, copy=True)
        for host in others:
            COMBINE[op](total, terms[host], out=total)
        return total

    def naming(self) -> AbstractContextManager[None]:
        """`naming` of this call."""
        return naming(self._group, self._op)

    def _cross(self, sent: torch.Tensor, receives: Sequence[int], sends: Sequence[int]) -> OnTheWay:
        return OnTheWay(sent.contiguous(), receives, sends, self._group, self._op)


# By the group, the rows of its ranks, in how many parts those cross, and between which hosts.
_Key = tuple[Group, tuple[int, ...], int, Pairs | None]
_blocks = KeptDict[_Key, tuple[HostRows, list[HostRows]]](1024, f"{__name__}._blocks")
kept_by_group.append(_blocks)


def _blocks_of(
    group: Group, rows: tuple[int, ...], parts: int, needed: Pairs | None
) -> tuple[HostRows, list[HostRows]]:
    """The blocks of this rank's host, and of the others."""
    hosts, H, ours = group.hosts, len(group.hosts), here(group)
    mine, position, W = hosts.index(ours), ours.index(group.rank), group.world_size

    def bounds(rank: int, part: int, source: int, target: int) -> tuple[int, int]:
        crosses = needed is None or (source, target) in needed
        return _bounds(rows[rank], part, parts) if crosses else (0, 0)

    def lengths(part: int, source: int, target: int) -> list[int]:
        each = [bounds(rank, part, source, target) for rank in hosts[source]]
        return [stop - start for start, stop in each]

    def block(part: int, step: int) -> HostRows:
        source, target = (mine - step) % H, (mine + step) % H
        coming, leaving = lengths(part, source, mine), lengths(part, mine, target)
        sizes = _row_shares(coming, len(ours))
        comes = dict(zip(hosts[source], _rows_in_common(sizes, position, coming), strict=True))
        to = _row_shares(leaving, len(hosts[target]))
        leaves = dict(zip(hosts[target], _rows_in_common(leaving, position, to), strict=True))
        return HostRows(
            hosts[source],
            _part_slices(rows, hosts[source], part, parts),
            sizes,
            slice(*bounds(group.rank, part, mine, target)),
            tuple(leaves.get(rank, 0) for rank in range(W)),
            tuple(comes.get(rank, 0) for rank in range(W)),
        )

    sizes = [rows[rank] for rank in ours]
    own = HostRows(ours, _part_slices(rows, ours, 0, 1), sizes, slice(0), (), ())
    return own, [block(part, step) for part in range(parts) for step in range(1, H)]


def _part_slices(
    rows: Sequence[int], ranks: Sequence[int], part: int, parts: int
) -> tuple[slice, ...]:
    starts, joined = offsets(rows), list[slice]()
    for rank in ranks:
        start, stop = (starts[rank] + b for b in _bounds(rows[rank], part, parts))
        if joined and joined[-1].stop == start:
            joined[-1] = slice(joined[-1].start, stop)
        else:
            joined.append(slice(start, stop))
    return tuple(joined)


def _bounds(length: int, part: int, parts: int) -> tuple[int, int]:
    return length * part // parts, length * (part + 1) // parts


def _row_shares(lengths: list[int], count: int) -> list[int]:
    """How `count` ranks share rows of which those of another host hold `lengths`."""
    return lengths if len(lengths) == count else chunk_sizes(sum(lengths), count)


def _rows_in_common(cut: list[int], position: int, other: list[int]) -> list[int]:
    """How many rows of the part of `cut` at a position are in each part of another cut."""
    start = offsets(cut)[position]
    stop = start + cut[position]
    return [
        max(0, min(stop, first + length) - max(start, first))
        for first, length in zip(offsets(other), other, strict=True)
    ]


def gather(
    out: torch.Tensor,
    x: torch.Tensor,
    group: Group,
    sizes: Sequence[int],
    inside: Callable[..., torch.Tensor],
) -> None:
    """Each row crosses to each other host once, and is gathered there."""
    row_bytes = math.prod(x.shape[1:]) * x.element_size()
    crossing = Crossing(group, sizes, row_bytes, "all_gather")
    for block, shard in crossing.fetched(x):
        with crossing.naming():
            block.put(inside(shard, crossing.inside, block.sizes), out)


def scatter(
    x: torch.Tensor,
    group: Group,
    sizes: Sequence[int],
    op: ReduceOp,
    as_is: bool,
    inside: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """What a host has reduced of the rows of another crosses once, in fp32 if the rows are half
    precision, unless it is `as_is` or all hosts have but one rank.
    """
    add = "sum" if op == "avg" else op
    in_fp32 = summed_in_fp32(x.dtype, op)
    wide = in_fp32 and not as_is and max(map(len, group.hosts)) > 1
    wire = torch.float32 if wide else x.dtype
    crossing = Crossing(group, sizes, math.prod(x.shape[1:]) * wire.itemsize, "reduce_scatter")
    for block in (*crossing.foreign, crossing.own):
        with crossing.naming():
            total = inside(block.of(x).to(wire), crossing.inside, block.sizes, add)
        if block is not crossing.own:
            crossing.give_back(block, total)
    total = crossing.summed(total, torch.float32 if in_fp32 else x.dtype, add)
    return (total.div_(group.world_size) if op == "avg" else total).to(x.dtype)
