"""How a dim is cut into shards: as torch.chunk cuts it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def chunk_sizes(length: int, world_size: int) -> list[int]:
    """Lengths of the shards that torch.chunk cuts `length` into, 0 for the ranks that get none."""
    full = -(-length // world_size)
    return [max(0, min(full, length - rank * full)) for rank in range(world_size)]


def offsets(sizes: Sequence[int]) -> list[int]:
    """Where each shard begins."""
    return list(accumulate(sizes, initial=0))[:-1]
