"""Between hosts: which rows cross to which rank, and when they have come.

A group over several hosts shares memory inside each of them only. Rows cross from one host to
another once, cut among the ranks of the host that takes them (its rails), in parts: while one part
crosses, what has come before is shared inside and multiplied.

    host 0           host 1, part c of its rows         host 0 again
    rank 0     <---  rank 2: x_2[part c]                rank 0 | a gather inside, fused
    rank 1     <---  rank 3: x_3[part c]                rank 1 | with its multiplication

Sums go back the same ways: what a host has added up for the rows of another crosses once. A host of
more or fewer ranks than the other cuts what comes evenly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from weft.collectives import process_groups
from weft.collectives.ranks.bounds import Presence
from weft.collectives.ranks.chunks import chunk_sizes, offsets
from weft.collectives.ranks.group import Group, ranks_group
from weft.errors import PeerTimeout

_PART_BYTES, _MOST_PARTS = 1 << 20, 8


@dataclass(frozen=True)
class HostRows:
    """Rows of one host, as the ranks of this host share them among each other.

    Attributes:
        rows: where they are among those of the whole group; neighbours are joined.
        sizes: how many of them each rank of this host holds.
        mine: of another host, rows of this rank's shard that cross in the same step.
        leaves, comes: how many of `mine` go to each rank of the group, and of the block's rows that
            this rank holds, how many come from each.
    """

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
        row_bytes: of what crosses; the same on every rank.
        op: the call, for errors.
    """

    def __init__(self, group: Group, rows: Sequence[int], row_bytes: int, op: str) -> None:
        self._group, self._rows, self._op = group, list(rows), op
        self._host = next(i for i, ranks in enumerate(group.hosts) if group.rank in ranks)
        self._here = group.hosts[self._host]
        parts = -(-max(rows) * row_bytes // _PART_BYTES)
        self._parts = max(1, min(parts, _MOST_PARTS))
        self._returning: list[tuple[HostRows, torch.Tensor, Any]] = []

    @cached_property
    def inside(self) -> Group:
        """The ranks of this host. Collective over them the first time."""
        return ranks_group(tuple(self._group.ranks[rank] for rank in self._here))

    @cached_property
    def own(self) -> HostRows:
        """This host's rows, of which each rank holds its shard."""
        sizes = [self._rows[rank] for rank in self._here]
        return HostRows(self._places(self._here, 0, 1), sizes, slice(0), (), ())

    @cached_property
    def foreign(self) -> list[HostRows]:
        """Those of the other hosts, in the order in which all ranks make the steps."""
        hosts, H, mine = self._group.hosts, len(self._group.hosts), self._host
        return [
            self._block(part, hosts[(mine - step) % H], hosts[(mine + step) % H])
            for part in range(self._parts)
            for step in range(1, H)
        ]

    def _block(self, part: int, source: Sequence[int], target: Sequence[int]) -> HostRows:
        position, W = self._here.index(self._group.rank), self._group.world_size
        coming, leaving = self._lengths(part, source), self._lengths(part, self._here)
        sizes = _shares(coming, len(self._here))
        comes = dict(zip(source, _overlaps(sizes, position, coming), strict=True))
        to = _shares(leaving, len(target))
        leaves = dict(zip(target, _overlaps(leaving, position, to), strict=True))
        return HostRows(
            self._places(source, part, self._parts),
            sizes,
            slice(*_bounds(self._rows[self._group.rank], part, self._parts)),
            tuple(leaves.get(rank, 0) for rank in range(W)),
            tuple(comes.get(rank, 0) for rank in range(W)),
        )

    def _lengths(self, part: int, ranks: Sequence[int]) -> list[int]:
        bounds = [_bounds(self._rows[rank], part, self._parts) for rank in ranks]
        return [stop - start for start, stop in bounds]

    def _places(self, ranks: Sequence[int], part: int, parts: int) -> tuple[slice, ...]:
        starts, joined = offsets(self._rows), list[slice]()
        for rank in ranks:
            start, stop = (starts[rank] + b for b in _bounds(self._rows[rank], part, parts))
            if joined and joined[-1].stop == start:
                joined[-1] = slice(joined[-1].start, stop)
            else:
                joined.append(slice(start, stop))
        return tuple(joined)

    def fetched(self, x: torch.Tensor) -> Iterator[tuple[HostRows, torch.Tensor]]:
        """This rank's shard x of its own host's rows, then its rows of the others', as they come.

        All of them are on their way from the first one on.
        """
        begun = []
        for block in self.foreign:
            sent = x[block.mine].contiguous()
            begun.append(self._cross(sent, block.comes, block.leaves))
        yield self.own, x
        for block, (came, work) in zip(self.foreign, begun, strict=True):
            self._wait(work, came)
            yield block, came

    def give_back(self, block: HostRows, terms: torch.Tensor) -> None:
        """Send this host's sums for the rows of a block of another host, of which this rank has
        added up its own, towards the ranks whose rows they are. To be called for all `foreign` in
        order.
        """
        crossing = self._cross(terms.contiguous(), block.leaves, block.comes)
        self._returning.append((block, *crossing))

    def summed(self, own: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Of this rank's rows, what all hosts have sent, in their order, and the own one's sum.

        Added up in `dtype`.
        """
        H, mine = len(self._group.hosts), self._host
        terms: dict[int, torch.Tensor] = {mine: own}
        for number, (block, came, work) in enumerate(self._returning):
            self._wait(work, came)
            host = (mine + number % (H - 1) + 1) % H
            if host not in terms:
                terms[host] = torch.empty_like(own, dtype=came.dtype)
            terms[host][block.mine].copy_(came)
        self._returning.clear()
        total = terms[0].to(dtype, copy=True)
        for host in range(1, H):
            total += terms[host]
        return total

    @contextmanager
    def naming(self) -> Iterator[None]:
        """For what is done inside the host: who is absent there is told to the other hosts, whose
        ranks wait for all of this one's, by its number in the whole group.

        Raises:
            PeerTimeout: so named.
        """
        try:
            yield
        except PeerTimeout as error:
            group, absent = self._group, sorted(self._here[peer] for peer in error.absent)
            Presence.now(group).give_up(absent)
            known = self._op, error.generation, error.timeout_s, error.history, absent
            raise PeerTimeout(group.rank, absent[0], *known) from error

    def _cross(
        self, sent: torch.Tensor, receives: Sequence[int], sends: Sequence[int]
    ) -> tuple[torch.Tensor, Any]:
        came = sent.new_empty((sum(receives), *sent.shape[1:]))
        return came, process_groups.exchange_begun(came, sent, receives, sends, self._group)

    def _wait(self, work: Any, came: torch.Tensor) -> None:
        process_groups.wait(work, self._group, came, self._op)


def _bounds(length: int, part: int, parts: int) -> tuple[int, int]:
    return length * part // parts, length * (part + 1) // parts


def _shares(lengths: list[int], count: int) -> list[int]:
    """How `count` ranks share rows of which those of another host hold `lengths`."""
    return lengths if len(lengths) == count else chunk_sizes(sum(lengths), count)


def _overlaps(cut: list[int], position: int, other: list[int]) -> list[int]:
    """How many rows of the part of `cut` at a position are in each part of another cut."""
    start = offsets(cut)[position]
    stop = start + cut[position]
    return [
        max(0, min(stop, first + length) - max(start, first))
        for first, length in zip(offsets(other), other, strict=True)
    ]
