"""All that `weft.sim` hooks in torch.distributed, and nothing else in it.

    distributed_c10d._world                     kept a rank: groups made on one are its own
    distributed_c10d.rendezvous                 gives a virtual rank its number, and meets nobody
    distributed_c10d._new_process_group_helper  makes a `VirtualProcessGroup`, whatever the backend
    distributed_c10d._process_group_name        tells groups of the same name on two ranks apart
    distributed_c10d._store_based_barrier       not needed
    distributed_c10d._unregister_all_process_groups     forgets those of one rank
    DeviceMesh.__init__                         equal meshes of two ranks are not one key of a cache
    os.environ                                  RANK and the like, as torchrun sets them

So a script that runs under torchrun runs on virtual ranks as it is: `init_process_group`,
`init_device_mesh`, `new_group` and collectives of torch.distributed mean the virtual world.
"""

from __future__ import annotations

import inspect
import itertools
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from weft.collectives.ranks.group import Group, virtual_rank
from weft.sim.run.process_group import VirtualProcessGroup

if TYPE_CHECKING:
    from weft.sim.run.gpu import ThreadWorld
    from weft.sim.run.world import World

_BACKEND = "virtual"
_numbers = itertools.count(1)


c10d: Any = distributed_c10d  # its private names


class _RankWorld(distributed_c10d._World):
    """What torch.distributed keeps of process groups, of one rank."""

    pg_map: Any = None
    pg_names: Any = None
    pg_group_ranks: Any = None
    pg_backend_config: Any = None
    tags_to_pg: Any = None
    pg_to_tag: Any = None
    group_count: int = 0

    def __init__(self, world: World | ThreadWorld, rank: int) -> None:
        super().__init__()
        self.pg_map, self.pg_names, self.pg_group_ranks = {}, {}, {}
        self.pg_backend_config, self.tags_to_pg, self.pg_to_tag = {}, {}, {}
        self.virtual, self.rank = world, rank
        self.registered: list[Any] = []  # names of groups
        # Tells meshes and groups of this rank and schedule from all others.
        self.token = next(_numbers)
        size = world.world_size
        self.environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "0",
            # torch 2.15 records calls under a name that only groups of its own backends have.
            "TORCH_FR_BUFFER_SIZE": "0",
        }
        self.everybody = VirtualProcessGroup(world.team("everybody", world.everybody), rank)
        # Known before `init_process_group`, for callers that use weft's own group.
        self.pg_map[self.everybody] = _BACKEND, None
        self.pg_group_ranks[self.everybody] = {r: r for r in world.everybody}

    def forget(self) -> None:
        """Let go of all groups: others may still hold the mesh that one was made for."""
        for pg in self.pg_names:
            del pg.weft_group
        self.unregister()

    def unregister(self) -> None:
        """Take the names of all groups back: they are kept for the whole process."""
        for name in self.registered:
            c10d._unregister_process_group(name)
        self.registered.clear()


class _RankOfThread(threading.local):
    world: _RankWorld | None = None


_local = _RankOfThread()


class _Worlds:
    """Stands for `distributed_c10d._world`: that of the rank whose thread asks."""

    def __init__(self, others: Any) -> None:
        object.__setattr__(self, "_others", others)

    def __getattr__(self, name: str) -> Any:
        return getattr(_local.world or self._others, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_local.world or self._others, name, value)


class _Environment(os._Environ):  # type: ignore[type-arg]
    """os.environ, where a virtual rank finds its own number."""

    def __getitem__(self, key: str) -> Any:
        if _local.world is not None and key in _local.world.environment:
            return _local.world.environment[key]
        return super().__getitem__(key)


@cache
def requirements() -> list[str]:
    """What is missing in this torch, in words; empty if all hooks fit."""
    missing = []
    want: dict[str, tuple[str, ...]] = {
        "rendezvous": ("url", "rank", "world_size"),
        "_new_process_group_helper": ("group_size", "group_rank", "global_ranks_in_group"),
        "_process_group_name": ("ranks", "use_hashed_name"),
        "_store_based_barrier": (),
    }
    for name, names in want.items():
        function = getattr(distributed_c10d, name, None)
        if function is None:
            missing.append(f"torch.distributed.distributed_c10d.{name} is gone")
        elif tuple(inspect.signature(function).parameters)[: len(names)] != names:
            missing.append(f"torch.distributed.distributed_c10d.{name} takes other arguments")
    if "backend" not in inspect.signature(distributed_c10d._new_process_group_helper).parameters:
        missing.append("_new_process_group_helper takes no backend")
    if "_thread_id" not in inspect.getsource(DeviceMesh.__eq__):
        missing.append("DeviceMesh.__eq__ does not compare _thread_id")
    return missing


def _make(options: Any, _: Any) -> VirtualProcessGroup:
    own = _local.world
    assert own is not None
    ranks = tuple(options.global_ranks_in_group)
    if not ranks:
        return own.everybody
    # The part that all ranks agree on.
    name = str(options.group_id).partition("@")[0]
    return VirtualProcessGroup(own.virtual.team(name, ranks), own.rank)


dist.Backend.register_backend(_BACKEND, _make, extended_api=True, devices=["cpu"])


@contextmanager
def installed() -> Iterator[None]:
    """torch.distributed means the virtual world on threads of its ranks, inside the block."""
    if missing := requirements():
        raise RuntimeError(f"weft.sim does not know this torch: {'; '.join(missing)}")
    helper, name_of = c10d._new_process_group_helper, c10d._process_group_name
    rendezvous, barrier, make_mesh = c10d.rendezvous, c10d._store_based_barrier, DeviceMesh.__init__
    signature, unregister_all = inspect.signature(helper), c10d._unregister_all_process_groups

    def new_process_group_helper(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        if _local.world is not None:
            given.arguments["backend"] = dist.Backend(_BACKEND)
            _local.world.registered.append(given.arguments["group_name"])
        return helper(*given.args, **given.kwargs)

    def process_group_name(*args: Any, **kwargs: Any) -> Any:
        name = name_of(*args, **kwargs)
        return name if _local.world is None else type(name)(f"{name}@{_local.world.token}")

    def meet(url: str, rank: int = -1, world_size: int = -1, **kwargs: Any) -> Iterator[Any]:
        own = _local.world
        if own is None:
            yield from rendezvous(url, rank, world_size, **kwargs)
            return
        for what, told, is_so in (
            ("rank", rank, own.rank),
            ("world_size", world_size, own.virtual.world_size),
        ):
            if told not in (-1, is_so):
                raise ValueError(f"init_process_group({what}={told}), but here it is {is_so}")
        store: Any = dist
        yield store.HashStore(), own.rank, own.virtual.world_size

    def store_based_barrier(*args: Any, **kwargs: Any) -> None:
        if _local.world is None:
            barrier(*args, **kwargs)

    def unregister_all_process_groups() -> None:
        if _local.world is None:
            unregister_all()
        else:
            _local.world.unregister()

    def init_mesh(self: Any, *args: Any, **kwargs: Any) -> None:
        make_mesh(self, *args, **kwargs)
        if _local.world is not None:
            # Negative, unlike a thread's: two meshes are equal only if made by the same rank.
            self._thread_id, self._hash = -_local.world.token, None

    hooks: dict[str, Any] = {
        "_world": _Worlds(c10d._world),
        "_new_process_group_helper": new_process_group_helper,
        "_process_group_name": process_group_name,
        "rendezvous": meet,
        "_store_based_barrier": store_based_barrier,
        "_unregister_all_process_groups": unregister_all_process_groups,
    }
    # `init_process_group` sets these two as well.
    also = ("_backend", "_default_pg_init_method")
    kept = {name: getattr(c10d, name) for name in also if hasattr(c10d, name)}
    environ = os.environ.__class__
    with (
        patch.multiple(c10d, **hooks, **kept),
        patch.object(DeviceMesh, "__init__", init_mesh),
        patch.object(sys, "excepthook", sys.excepthook),
    ):
        os.environ.__class__ = _Environment
        try:
            yield
        finally:
            os.environ.__class__ = environ


@contextmanager
def rank_of(world: World | ThreadWorld, rank: int) -> Iterator[Group]:
    """This thread is `rank` of `world` inside the block."""
    own = _local.world = _RankWorld(world, rank)
    try:
        with virtual_rank(own.everybody.weft_group):
            yield own.everybody.weft_group
    finally:
        own.forget()
        _local.world = None
