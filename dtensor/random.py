"""Random numbers on a mesh: replicas draw the same ones, shards draw different ones.

Every op takes one number from the default CPU generator, which all ranks advance alike; the number
and the rank's shard seed the local generator for the time of the op. Ranks may have been seeded
differently: the first random op on a mesh makes their generators equal to the first rank's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from weft.collectives import spanning_group
from weft.dtensor.layout import Layout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_agreed: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _agree(mesh: DeviceMesh) -> None:
    group = spanning_group(mesh)
    if group.world_size > 1:
        states = [torch.get_rng_state() if group.rank == 0 else None]
        dist.broadcast_object_list(states, src=group.ranks[0], group=group.pg)
        assert states[0] is not None
        torch.set_rng_state(states[0])
    _agreed[mesh] = True


@contextmanager
def seeded(layout: Layout, device: torch.device) -> Iterator[None]:
    """Seed `device`'s generator for this rank's shard of `layout`, and put it back afterwards."""
    if layout.mesh not in _agreed:
        _agree(layout.mesh)
    drawn = int(torch.randint(1 << 48, (), dtype=torch.int64))
    mine = layout.boxes[layout.index] if layout.index is not None else ()
    shard = sorted(set(layout.boxes)).index(mine) if mine else 0
    with torch.random.fork_rng([device] if device.type != "cpu" else [], device_type="cuda"):
        torch.manual_seed((drawn + shard * 0x9E3779B97F4A7C15) & (2**63 - 1))
        yield


def same_numbers(op: Callable[..., Any], layout: Layout) -> Callable[..., Any]:
    """`op` with the generator seeded for this rank's shard of `layout`."""

    @wraps(op)
    def run(*args: Any, **kwargs: Any) -> Any:
        devices = [a.device for a in args if isinstance(a, torch.Tensor)]
        with seeded(layout, devices[0] if devices else torch.device("cpu")):
            return op(*args, **kwargs)

    return run
