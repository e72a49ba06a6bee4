"""Which bytes of a step cross from host to host, each of them once.

Between hosts a step moves shares: slices of the blocks that some rank takes, as rows. A block that
no rank of a host holds comes to that host once, cut over its ranks, however many of them take it;
they then read it from each other. Where values are added up, every host adds up those that it has:

    host A: ranks 0, 1     [P, R] -> [R, R] on (2, 2), mesh dim 0 between the hosts
    host B: ranks 2, 3

    share 0   rank 0 gives, rank 2 adds for B    rank 2 sends its term, gets the sum
    share 1   rank 1 gives, rank 3 adds for B    rank 3 sends its term, gets the sum
    shares 2, 3 the other way round

The giver of a share has what its host and the others' sums amount to, and sends that to a keeper on
each host that lacks it. Of H hosts that have terms and want the sum, H - 1 sums and H - 1 results
cross, which is the least. Planning is arithmetic; all ranks arrive at the same plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from weft.collectives.ranks.group import Group
from weft.dtensor.layout.runs import Box, Shape
from weft.dtensor.move.transfers import Slices, Step, cut_box


class Share(NamedTuple):
    """Rows of a block, by the numbers of ranks in the group.

    Attributes:
        number: among all of the step.
        giver: who holds them, or adds them up for all.
        keepers: who has them afterwards, of each host whose ranks read them there.
        source, target: of a holder's and of a receiver's local tensor.
        numel: how many elements.
        terms: (who adds up a host's, of which holders), in the order of the hosts, where values are
            reduced.
    """

    number: int
    giver: int
    keepers: tuple[int, ...]
    source: Slices
    target: Slices
    numel: int
    terms: tuple[tuple[int, tuple[int, ...]], ...]


class Read(NamedTuple):
    """What a rank reads inside its host: a slice of a holder's local tensor, or a keeper's share.

    Attributes:
        of: the number of who has it, in the group.
        source: of the holder's local tensor, if that is read itself.
        share: else the share.
    """

    of: int
    source: Slices
    share: Share | None
    target: Slices


class _Block(NamedTuple):
    """What some ranks take alike: `families[i][k]` is who has the term k of it."""

    families: list[list[int]]
    source: Slices
    target: Slices
    numel: int
    receivers: list[int]


@dataclass(frozen=True, eq=False)
class HostPlan:
    """What moves in a step. Ranks are numbered as in its group.

    Attributes:
        shares: all, in the order of their numbers.
        reads: what each rank reads.
    """

    shares: list[Share]
    reads: list[list[Read]]

    @cached_property
    def kept(self) -> list[list[Share]]:
        """What each rank keeps, in the order in which it comes: by giver, then number."""
        found: list[list[Share]] = [[] for _ in self.reads]
        for share in sorted(self.shares, key=lambda each: each.giver):
            for keeper in share.keepers:
                found[keeper].append(share)
        return found

    @cached_property
    def places(self) -> list[dict[int, int]]:
        """Of each rank, where the shares that it keeps begin, by their numbers."""
        found = []
        for shares in self.kept:
            starts = itertools.accumulate((share.numel for share in shares), initial=0)
            found.append({share.number: start for share, start in zip(shares, starts)})  # noqa: B905
        return found

    @cached_property
    def room(self) -> int:
        """Elements of the most that a rank keeps."""
        return max(sum(share.numel for share in shares) for shares in self.kept)

    @cached_property
    def read_by_others(self) -> frozenset[int]:
        """Who holds what others of its host read."""
        of_terms = {
            holder
            for share in self.shares
            for rank, holders in share.terms
            for holder in holders
            if holder != rank
        }
        reads = ((by, each) for by, reads in enumerate(self.reads) for each in reads)
        return frozenset(of_terms | {r.of for by, r in reads if r.share is None and r.of != by})

    @cached_property
    def sums_cross(self) -> bool:
        """Whether sums of some host have to come to another."""
        return any(rank != share.giver for share in self.shares for rank, _ in share.terms)

    @cached_property
    def results_cross(self) -> bool:
        """Whether what givers have has to come to another host."""
        return any(keeper != share.giver for share in self.shares for keeper in share.keepers)

    @cached_property
    def entering(self) -> list[tuple[int, int]]:
        """(elements of sums, of results) that come to each rank from other hosts."""
        sums, results = ([0] * len(self.reads) for _ in range(2))
        for share in self.shares:
            sums[share.giver] += share.numel * sum(rank != share.giver for rank, _ in share.terms)
            for keeper in share.keepers:
                results[keeper] += share.numel * (keeper != share.giver)
        return list(zip(sums, results, strict=True))


def host_plan(step: Step, group: Group) -> HostPlan:
    """The plan of a step among the ranks of a group over several hosts."""
    return _Planning(step, group).done()


class _Planning:
    """The work of making a plan."""

    def __init__(self, step: Step, group: Group) -> None:
        self._step, self._hosts = step, group.hosts
        self._host_of = {rank: host for host, ranks in enumerate(group.hosts) for rank in ranks}
        self._numbers = {rank: number for number, rank in enumerate(group.ranks)}
        self._shares: list[Share] = []
        self._reads: list[list[Read]] = [[] for _ in group.ranks]
        self._widest = max(map(len, self._hosts))
        self._turn = 0  # so that small blocks are the affair of one rank after the other

    def done(self) -> HostPlan:
        for block in self._blocks():
            wanting: dict[int, list[int]] = {}
            for receiver in block.receivers:
                wanting.setdefault(self._host_of[receiver], []).append(receiver)
            if self._step.reduce_op:
                self._add_up(block, wanting)
            else:
                self._fetch(block, wanting)
        return HostPlan(self._shares, self._reads)

    def _blocks(self) -> Iterator[_Block]:
        """Along a tensor dim ranks take the same or nothing in common, so receivers of one box take
        the same blocks, and those of different ones share none.
        """
        families, target = self._step.families, self._step.target
        alike: dict[tuple[Shape, Box], list[int]] = {}
        for receiver in range(len(target.place.ranks)):
            key = families.kept(target.place.coordinate(receiver)), target.box_at(receiver)
            if families.contributes(target, receiver):
                alike.setdefault(key, []).append(receiver)
        for (_, wanted), receivers in alike.items():
            meeting = families.holding(target, receivers[0], None)
            found = families.by_box(target, receivers[0], meeting)
            numbers = [self._numbers[target.place.ranks[each]] for each in receivers]
            for box, holders in found.items():
                ranks = [[self._number_of(each) for each in members] for members in holders]
                for source, into, numel in cut_box(box, wanted):
                    yield _Block(ranks, source, into, numel, numbers)

    def _number_of(self, holder: int) -> int:
        return self._numbers[self._step.source.place.ranks[holder]]

    def _fetch(self, block: _Block, wanting: dict[int, list[int]]) -> None:
        """From the rank itself, else one of its host, else once for the host."""
        holders = [rank for (rank,) in block.families]
        for host, receivers in wanting.items():
            near = [rank for rank in holders if self._host_of[rank] == host]
            for receiver in receivers if near else ():
                of = receiver if receiver in near else near[receiver % len(near)]
                self._reads[receiver].append(Read(of, block.source, None, block.target))
            here = self._hosts[host]
            for i, part in enumerate([] if near else self._cut(block, len(here))):
                giver = holders[(self._turn + i) % len(holders)]
                keeper = self._rail(host, i, len(here))
                self._share(part, giver, {host: keeper}, (), {host: receivers})
            self._turn += 1

    def _add_up(self, block: _Block, wanting: dict[int, list[int]]) -> None:
        """Once for each host that has all terms; else once, on one that wants the result."""
        terms = [set(each) for each in zip(*block.families, strict=True)]
        full = [
            host
            for host in range(len(self._hosts))
            if all(any(self._host_of[rank] == host for rank in each) for each in terms)
        ]
        lacking = [host for host in wanting if host not in full]
        able = [host for host in full if host in wanting]
        if lacking and not full:
            self._give(block, terms, self._owners(terms, lacking), lacking, wanting)
        elif lacking:
            own = (able or full)[:1]
            self._give(block, terms, own, [*lacking, *[h for h in own if h in wanting]], wanting)
            able = [host for host in able if host not in own]
        for host in able:
            self._give(block, terms, [host], [host], wanting)

    def _give(
        self,
        block: _Block,
        terms: list[set[int]],
        owners: list[int],
        to: list[int],
        wanting: dict[int, list[int]],
    ) -> None:
        """Have some hosts add up equal shares of a block, and give them to the hosts `to`."""
        crosses = len({*owners, *to}) > 1 or len(self._covered(terms, owners[0])) > 1
        few = [wanting[h] for h in to if len(wanting[h]) == 1] if not crosses else []
        count = 1 if few else len(owners) * self._widest
        for i, part in enumerate(self._cut(block, count)):
            owner, at = owners[i % len(owners)], i // len(owners)
            giver = few[0][0] if few else self._rail(owner, at, self._widest)
            added = []
            for host, chosen in sorted(self._covered(terms, owner).items()):
                rank = giver if host == owner else self._rail(host, at, self._widest)
                holders = [
                    rank if rank in at_host else at_host[rank % len(at_host)]
                    for k in chosen
                    for at_host in [sorted(r for r in terms[k] if self._host_of[r] == host)]
                ]
                added.append((rank, tuple(holders)))
            keepers = {
                host: giver if host == owner else self._rail(host, at, self._widest) for host in to
            }
            self._share(part, giver, keepers, tuple(added), {h: wanting[h] for h in to})
        self._turn += 1

    def _owners(self, terms: list[set[int]], lacking: list[int]) -> list[int]:
        """Of the hosts that want a sum, those to which the fewest others have to send."""
        senders = {
            host: len([each for each in self._covered(terms, host) if each != host])
            for host in lacking
        }
        return [host for host in lacking if senders[host] == min(senders.values())]

    def _covered(self, terms: list[set[int]], owner: int) -> dict[int, list[int]]:
        """Which terms each host adds up: all that the owner has, then most at a time."""
        hosts_of = [{self._host_of[rank] for rank in each} for each in terms]
        left, found = set(range(len(terms))), dict[int, list[int]]()
        every = range(len(self._hosts))
        host = owner
        while left:
            if chosen := sorted(k for k in left if host in hosts_of[k]):
                found[host] = chosen
                left -= {*chosen}
            host = max(every, key=lambda each: sum(each in hosts_of[k] for k in left))
        return found

    def _rail(self, host: int, i: int, of: int) -> int:
        """The rank of a host whose affair part i is, of so many."""
        ranks = self._hosts[host]
        return ranks[(self._turn + i * len(ranks) // of) % len(ranks)]

    def _share(
        self,
        part: tuple[Slices, Slices, int],
        giver: int,
        keepers: dict[int, int],
        terms: tuple[tuple[int, tuple[int, ...]], ...],
        readers: dict[int, list[int]],
    ) -> None:
        each = Share(len(self._shares), giver, tuple(keepers.values()), *part, terms)
        self._shares.append(each)
        for host, receivers in readers.items():
            for receiver in receivers:
                self._reads[receiver].append(Read(keepers[host], (), each, each.target))

    @staticmethod
    def _cut(block: _Block, count: int) -> Iterator[tuple[Slices, Slices, int]]:
        """Its rows in up to `count` parts: along the first dim that has so many, or the longest."""
        lengths = [cut.stop - cut.start for cut in block.source]
        enough = (dim for dim, length in enumerate(lengths) if length >= count)
        dim = next(enough, lengths.index(max(lengths)) if lengths else None)
        if dim is None or count == 1:
            yield block.source, block.target, block.numel
            return
        length = lengths[dim]
        for i in range(count):
            start, stop = length * i // count, length * (i + 1) // count
            if start < stop:
                source, target = (
                    (*s[:dim], slice(s[dim].start + start, s[dim].start + stop), *s[dim + 1 :])
                    for s in (block.source, block.target)
                )
                yield source, target, block.numel // length * (stop - start)


def block_shape(slices: Slices) -> Shape:
    """The shape of what slices cut."""
    return tuple(cut.stop - cut.start for cut in slices)


def crossing(steps: Sequence[Step], group: Group) -> int:
    """Elements that come from other hosts where every rank takes what it needs by itself."""
    at = {group.ranks[rank]: host for host, ranks in enumerate(group.hosts) for rank in ranks}
    coming = 0
    for step in steps:
        of, to = step.source.place.ranks, step.target.place.ranks
        for receiver, rank in enumerate(to):
            for piece in step.pieces_of(receiver):
                far = sum(at[of[holder]] != at[rank] for holder in piece.holders)
                coming += far * piece.numel
    return coming
