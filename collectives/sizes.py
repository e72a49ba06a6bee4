"""The lengths of all ranks' shards along a dim: given and checked, exchanged, or assumed even."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from operator import index

import torch

from weft.collectives.memory.checks import check_call
from weft.collectives.memory.exchange import agree
from weft.collectives.ranks.group import Group, GroupLike, resolve


def known_sizes(
    x: torch.Tensor,
    group: Group,
    dim: int,
    sizes: Sequence[int] | None,
    op: str = "all_gather",
    *more: Hashable,
) -> list[int]:
    """Lengths of all ranks' shards of `x` along `dim`: `sizes`, checked, or exchanged.

    Args:
        more: what else must be the same on every rank.

    Raises:
        ValueError: `sizes` does not have one length for each rank, or this rank's is another.
    """
    return known_parts(x, group, dim, sizes, 0, op, *more)[0]


_MOST = 1 << 31  # of a length, two of which are one value


def known_parts(
    x: torch.Tensor,
    group: Group,
    dim: int,
    sizes: Sequence[int] | None,
    own: int,
    op: str,
    *more: Hashable,
) -> tuple[list[int], int]:
    """As `known_sizes`, and the most of any rank's `own`, another length, which travels with them:
    0 where nothing is exchanged, as `sizes` are given.

    Example:
        shards of 2 and 3 rows, own 8 and 7: ([2, 3], 8) on both ranks.
    """
    told = (*x.shape[:dim], "*", *x.shape[dim + 1 :]), x.dtype, ("dim", dim), *more

    def call() -> str:
        return f"{op} of {told}" + ("" if sizes is None else f", {list(sizes)}")

    check_call(group, call)
    if sizes is None:
        values = agree(group, op, own * _MOST + x.shape[dim], told)
        return [value % _MOST for value in values], max(values) // _MOST
    check_sizes("sizes", sizes, group, dim, x.shape[dim])
    return plain_sizes(sizes), 0


def even_sizes(
    x: torch.Tensor, group: GroupLike, dim: int, sizes: Sequence[int] | None
) -> list[int]:
    """`sizes`; if None, the common length that a traced graph assumed, after checking it.

    Raises:
        ValueError: on every rank, if the lengths differ.
    """
    if sizes is not None:
        return list(sizes)
    lengths = known_sizes(x, resolve(group), dim, None)
    if len(set(lengths)) > 1:
        raise ValueError(
            f"a traced graph assumes shards of equal length unless it is given sizes=: along dim "
            f"{dim} they have lengths {lengths}"
        )
    return lengths


def check_sizes(name: str, sizes: Sequence[int], group: Group, dim: int, length: int) -> None:
    """Raise ValueError unless `sizes` has a length for each rank, `length` for this one."""
    if len(sizes) != group.world_size or sizes[group.rank] != length:
        raise ValueError(
            f"{name} holds the length of every rank's shard along dim {dim}: got {list(sizes)} for "
            f"{group.world_size} ranks, with {length} here (rank {group.rank})"
        )


def plain_sizes(sizes: Sequence[int]) -> list[int]:
    """Those of numpy or a tensor as Python's integers, as addresses are computed with them."""
    return [*map(index, sizes)]
