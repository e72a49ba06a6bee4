"""The hosts of a group that several have: which ranks share one, and which of another they meet."""

from __future__ import annotations

from collections.abc import Sequence

from weft.collectives.ranks.group import Group, ranks_group


def in_two_levels(group: Group) -> bool:
    """Whether its calls can go host by host: groups inside of hosts have ascending ranks."""
    return bool(group.hosts) and group.ascends


def hosts_in_words(group: Group) -> str:
    """Its hosts, as in "2 + 1 ranks on 2 hosts"."""
    ranks = " + ".join(str(len(each)) for each in group.hosts)
    return f"{ranks} ranks on {len(group.hosts)} hosts"


def here(group: Group) -> tuple[int, ...]:
    """The ranks of this rank's host, by their numbers in the group."""
    return next(ranks for ranks in group.hosts if group.rank in ranks)


def inside_of(group: Group) -> Group:
    """The ranks of this host. Collective over them the first time."""
    return ranks_group(tuple(group.ranks[rank] for rank in here(group)), group)


def rails(group: Group, step: int) -> tuple[Sequence[int], Sequence[int]]:
    """Of every rank, 1 if this one sends to it, and if it receives from it, where each rank hears
    from one of the host `step` before its own: its counterpart, or who stands in for it.
    """
    hosts, ours = group.hosts, here(group)
    mine, position = hosts.index(ours), ours.index(group.rank)
    target, source = hosts[(mine + step) % len(hosts)], hosts[mine - step]
    hearing = {rank for at, rank in enumerate(target) if at % len(ours) == position}
    speaker = source[position % len(source)]
    every = range(group.world_size)
    return [int(rank in hearing) for rank in every], [int(rank == speaker) for rank in every]
