"""torch's rendezvous, for groups whose ranks have taken part in different numbers of them.

In a rendezvous the ranks tell each other about their memory through the store of their group. torch
(2.11 to 2.13, its issue 196082) numbers these messages by process, whatever the group: after a
rendezvous of ranks 0 and 1 alone, one of ranks 0 to 2 looks for

    rank 0   CUDASymmetricMemory/2/..        rank 2   CUDASymmetricMemory/0/..

and waits until the store gives up. Ranks whose counts differ number from 0 here.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, Store

from weft.collectives.ranks.group import Group

_count = 0


def count() -> int:
    """How many this process has taken part in, with any group."""
    return _count


class _Renumbered(Store):
    """A store as one rendezvous knows it: its first message has number 0."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._first: int | None = None

    def _own(self, key: str) -> str:
        name, number, rank = key.rsplit("/", 2)
        if self._first is None:
            self._first = int(number)
        return f"{name}/{int(number) - self._first}/{rank}"

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._own(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._own(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        wanted = [self._own(key) for key in keys]
        self._store.wait(wanted) if timeout is None else self._store.wait(wanted, timeout)


def meet(own: torch.Tensor, group: Group, counts: Sequence[int]) -> Any:
    """torch's handle on the allocations of all ranks, of which `own` is this one's. Collective.

    Args:
        counts: `count()` of each rank.
    """
    global _count
    import torch.distributed._symmetric_memory as symm_mem

    _count += 1
    if len(set(counts)) == 1:
        return symm_mem.rendezvous(own, group.pg)
    c10d: Any = dist.distributed_c10d
    # Each rendezvous of these ranks raises the count of all of them.
    name: Any = f"weft rendezvous {group.ranks} {max(counts)}"
    store = _Renumbered(PrefixStore(name, group.pg.get_group_store()))
    stand_in = ProcessGroup(store, group.rank, group.world_size)
    c10d._register_process_group(name, stand_in)
    try:
        return symm_mem.rendezvous(own, name)
    finally:
        c10d._unregister_process_group(name)
