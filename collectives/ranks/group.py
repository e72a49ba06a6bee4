"""Groups of ranks: what `group=` may be, and whether symmetric memory reaches all of one."""

from __future__ import annotations

import os
import pickle
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from weft import settings
from weft.collectives.ranks import flight, waits
from weft.collectives.ranks.bounds import store_of
from weft.collectives.ranks.peer_access import nvlink_domain, why_gpus_do_not_reach
from weft.collectives.ranks.set_up import gather_by_group, gather_by_store
from weft.errors import MismatchError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from weft.collectives.memory.backends import Memory
    from weft.collectives.memory.symmetric import SymmetricBuffer
    from weft.collectives.memory.waiter import Waiter
    from weft.collectives.prices.hardware import Hardware

# A process group or its name, a 1-D mesh, a Group; None: the world.
GroupLike: TypeAlias = "dist.ProcessGroup | str | DeviceMesh | Group | None"


@dataclass(frozen=True)
class Process:
    """Where a rank runs: enough to map its memory and to see whether it is alive.

    Attributes:
        calls_fd: its file descriptor of the ring of its last calls: see `flight`.
        node: the host's name, as people know it.
        domain: the NVLink domain of its GPU: see `peer_access`.
    """

    host: str
    pid: int
    start_time: str
    calls_fd: int
    node: str = ""
    domain: str = ""

    @staticmethod
    def here(on_gpus: bool = False) -> Process:
        """This one. A GPU's domain is asked for only `on_gpus`, as that initializes CUDA."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # Two containers on one host cannot open each other's /proc entries: they are two hosts.
        host = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        return Process(
            host,
            os.getpid(),
            _stat("self")[1],
            flight.recorder().fd,
            os.uname().nodename,
            nvlink_domain() if on_gpus else "",
        )

    def alive(self) -> bool:
        """False once the process has ended (or is a zombie), or its pid belongs to another."""
        try:
            state, start_time = _stat(str(self.pid))
        except (FileNotFoundError, ProcessLookupError):  # the latter: it ended after the open
            return False
        return state not in "ZX" and start_time == self.start_time


def _stat(pid: str) -> tuple[str, str]:
    # The second field, the command, may hold spaces and brackets: count from its end.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


class VirtualRanks(Protocol):
    """What ranks that are not processes, as `weft.sim` runs them, must provide.

    Attributes:
        device: where memory is if nothing else is asked for.
        sharing: how many of them run at the same time on one GPU.
    """

    device: torch.device
    sharing: int

    @property
    def chip(self) -> str:
        """Name of the chip that they stand for; empty if they are CPU ranks."""

    @property
    def hardware(self) -> Hardware | None:
        """Such chips, if they stand for some."""

    def gather(self, rank: int, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order, once all have come."""

    def memory(self, rank: int, pad_bytes: int, data_bytes: int, device: torch.device) -> Memory:
        """Every rank's segment: a zeroed pad, then data. Collective."""

    def waiter(self, buffer: SymmetricBuffer) -> Waiter:
        """Host-side signals on the pads of `buffer`."""

    def share(self, x: torch.Tensor) -> None:
        """Let others `read` the private memory of `x`."""

    def read(self, address: int, out: torch.Tensor) -> None:
        """Fill the contiguous `out` from the memory at `address`, which another rank shares."""

    def beside(self, number: int) -> AbstractContextManager[None]:
        """What a rank enqueues inside runs in stream `number` beside its own."""

    def rejoin(self) -> None:
        """What a rank enqueues next waits for the streams beside its own."""


@dataclass(frozen=True, eq=False)
class Group:
    """The ranks that take part in a call. Made by `resolve`, one object for each process group.

    Attributes:
        pg: the process group; None for a process by itself (`alone`).
        rank, world_size: this rank's number in the group, and how many there are.
        ranks: the global rank of each, in group order.
        processes: where each runs; empty where symmetric memory does not reach.
        why: why symmetric memory does not reach; empty where it does.
        virtual: what runs the ranks if they are not processes.
        calls: notes the calls of this rank, and reads those of all.
        hosts: the ranks of each of several hosts, by their numbers in the group; empty if all are
            on one.
        nodes: the names of these hosts, or of the machines of one.
        apart: its ranks are on several machines that count as one host, as one NVLink domain spans
            them: their GPUs share memory, nothing else does, and `processes` are empty.
    """

    pg: Any
    rank: int
    world_size: int
    ranks: tuple[int, ...]
    processes: tuple[Process, ...]
    why: str = ""
    virtual: VirtualRanks | None = None
    calls: flight.Calls = field(default_factory=flight.Calls)
    hosts: tuple[tuple[int, ...], ...] = ()
    nodes: tuple[str, ...] = ()
    apart: bool = False

    def unreached(self, device: torch.device) -> str:
        """Why symmetric memory on `device` does not reach all ranks; empty where it does."""
        if self.apart and not self.on_gpus(device):
            return "its ranks are on several machines, whose GPUs alone share memory"
        return self.why

    @property
    def backend(self) -> Literal["posix", "cuda", "virtual"] | None:
        """The symmetric memory of the group's default device; None where it does not reach."""
        if self.why:
            return None
        if self.virtual is not None:
            return "virtual"
        return "cuda" if torch.cuda.is_available() else "posix"

    @cached_property
    def ascends(self) -> bool:
        """Whether its ranks stand in the order of their global ones."""
        return list(self.ranks) == sorted(self.ranks)

    def peers(self) -> list[int]:
        """The other ranks: rank + 1 first, so that not all ranks read from one."""
        return [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    def on_gpus(self, device: torch.device) -> bool:
        """Whether tensors on `device` are on a GPU, or stand for such in a simulation."""
        return device.type == "cuda" or bool(self.virtual is not None and self.virtual.chip)

    def gather_objects(self, value: Any, what: str) -> list[Any]:
        """Every rank's `value`, in rank order. For set-up only: it is slow.

        It goes through the group's store: other threads, such as those of asynchronous saves, may
        call collectives of the process group meanwhile, in another order on each rank.

        Raises:
            PeerTimeout: a rank did not come, or has died.
            MismatchError: on every rank, if one gathers something other than `what`.
        """
        if self.virtual is not None:
            return self.virtual.gather(self.rank, value)
        _refuse_inherited(self.pg)
        caller = self.calls.under_way()
        within = (("for", caller),) if caller else ()
        with self.calls.noting(flight.call_of("set-up", (what, *within))):
            told = self._told(what, value)
            for rank, (other, _) in enumerate(told):
                if other != told[0][0]:
                    raise MismatchError(
                        f"the ranks make different calls: {told[0][0]} on rank 0, but {other} on "
                        f"rank {rank}"
                    )
        return [value for _, value in told]

    def _told(self, what: str, value: Any) -> list[Any]:
        """(what, value) of every rank."""
        told: list[Any] = [None] * self.world_size
        store, mine = store_of(self), (what, value)
        with unwatched(self):  # set-up is no part of the program, nor of a graph that is traced
            if store is not None and not self.why:
                return [pickle.loads(each) for each in gather_by_store(self, store, mine)]
            if store is not None and _CPU in self.pg._device_types:
                # Ranks on several hosts do so in each call: no store takes that.
                return [pickle.loads(each) for each in gather_by_group(self, what, mine)]
            dist.all_gather_object(told, mine, group=self.pg)
            return told

    def differ(self, stuck: Mapping[int, waits.Waiting]) -> str:
        """What processes that wait for each other, this one among them, have called."""
        told = {
            rank: stuck[process.pid].call
            for rank, process in enumerate(self.processes)
            if process.pid in stuck
        }
        return self.calls.differ(told)

    def __deepcopy__(self, memo: Any) -> Group:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Found again by its name, so another process must have made the group, too.
        return resolve, (group_name(self),)

    def __repr__(self) -> str:
        return f"Group(rank={self.rank}, world_size={self.world_size}, ranks={self.ranks})"


def unwatched(group: Group | None = None) -> AbstractContextManager[None]:
    """For work that is done once and kept, which dispatch modes must not see.

    Selective checkpoints count ops, and expect as many when they recompute a module. The simulator,
    however, sees those of virtual ranks.
    """
    virtual = group is not None and group.virtual is not None
    watched: Any = _disable_current_modes
    return nullcontext() if virtual else watched()


_CPU = torch.device("cpu")
_described: Counter[str] = Counter()


_groups: dict[str, Group] = {}


class _Here(threading.local):
    world: Group | None = None


# The world of the virtual rank that a thread runs.
here = _Here()


@contextmanager
def virtual_rank(world: Group) -> Iterator[None]:
    """This thread is a rank of the virtual `world` inside the block."""
    here.world = world
    try:
        yield
    finally:
        here.world = None
        by_world: tuple[dict[Any, Any], ...] = _spanning, _made
        for kept in by_world:
            for key in [key for key in kept if key[0] is world]:
                del kept[key]


def resolve(group: GroupLike = None) -> Group:
    """The `Group` of a ProcessGroup or its name, a 1-D DeviceMesh, or None for the world (on a
    virtual rank, that of the virtual ranks).

    The first call for a process group is collective: its ranks exchange where they run.

    Raises:
        ValueError, RuntimeError: as `process_group`.
        PeerTimeout: a rank of a new process group did not come.
        MismatchError: a variable WEFT_* that must be the same on all ranks is not.
    """
    if isinstance(group, Group):
        return group
    if group is None and here.world is not None:
        return here.world
    pg = process_group(group)
    if here.world is not None:
        virtual: Group = pg.weft_group  # type: ignore[attr-defined]  # one of `weft.sim`
        return virtual
    known = _groups.get(pg.group_name)
    # Names are reused after destroy_process_group, so compare the object.
    if known is None or known.pg is not pg:
        _forget_destroyed()
        known = _groups[pg.group_name] = _describe(pg)
    return known


def _forget_destroyed() -> None:
    """Drop what is kept for destroyed groups, above all workspaces.

    A program that keeps making groups would otherwise hold the memory of all it ever had.
    """
    gone = {group for group in _groups.values() if _is_destroyed(group.pg)}
    for kept in kept_by_group:
        for key, value in list(kept.items()):
            if value in gone if kept is _groups else not gone.isdisjoint(_key_parts(key)):
                del kept[key]


_inherited: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
_of_parent: list[dict[Any, Any]] = []  # kept alive: GPU memory is the parent's to free


def _after_fork() -> None:
    """A forked child is not a rank: peers would take its signals for those of its parent."""
    if dist.is_initialized():
        _inherited.update(dist.distributed_c10d._world.pg_map)
    for kept in kept_by_group:
        _of_parent.append(kept.copy())
        kept.clear()


os.register_at_fork(after_in_child=_after_fork)


def _refuse_inherited(pg: dist.ProcessGroup) -> None:
    if pg in _inherited:
        raise RuntimeError(
            "this process was forked from a rank and is not one: spawn it instead, or have it "
            "call torch.distributed.destroy_process_group and init_process_group"
        )


def _key_parts(key: Any) -> tuple[Any, ...]:
    return key if isinstance(key, tuple) else (key,)


@lru_cache(maxsize=1)
def alone() -> Group:
    """A group of this process alone."""
    return Group(None, 0, 1, (0,), (Process.here(),))


def process_group(group: GroupLike) -> dist.ProcessGroup:
    """The process group behind `group`, without any communication.

    Raises:
        ValueError: an n-d mesh, or a group without this rank.
        RuntimeError: None before torch.distributed is initialised; a mesh or a name whose group was
            destroyed.
    """
    if group is None:
        if not dist.is_initialized():
            raise RuntimeError(
                "no process group: call torch.distributed.init_process_group() first (torchrun "
                "sets what it needs), or pass group="
            )
        return dist.group.WORLD  # type: ignore[return-value]
    if isinstance(group, dist.ProcessGroup):
        return group
    if isinstance(group, str):
        c10d: Any = dist.distributed_c10d
        return _existing(lambda: c10d._resolve_process_group(group))
    # Not `group.mesh`: a mesh recomputes that tensor each time, which takes 30 us.
    if hasattr(group, "get_group") and hasattr(group, "mesh_dim_names"):
        mesh = cast("DeviceMesh", group)
        if mesh.ndim != 1:
            raise ValueError(
                f"a group is 1-D, got a mesh of shape {tuple(mesh.shape)}: pass one of its "
                f"dims, mesh[{(mesh.mesh_dim_names or ('name',))[0]!r}]"
            )
        return _existing(mesh.get_group)
    other: object = group
    if other is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(_NO_MEMBER)
    raise ValueError(f"group must be a ProcessGroup, a 1-D DeviceMesh or None, got {group!r}")


_NO_MEMBER = "this rank is not in the group: only its members may make the call"


def _existing(find: Callable[[], dist.ProcessGroup]) -> dist.ProcessGroup:
    try:
        return find()
    except IndexError:  # what a mesh raises on ranks outside of it
        raise ValueError(_NO_MEMBER) from None
    except RuntimeError as error:
        raise RuntimeError(
            f"{error}: destroy_process_group() has ended it, or it was made in another process. A "
            f"mesh, and the DTensors on it, last as long as the groups that it was made with"
        ) from None


def group_name(group: GroupLike) -> str:
    """The name by which torch.ops.weft knows `group`.

    Raises:
        NotImplementedError: it has none: `alone`, or virtual ranks before init_process_group.
    """
    if isinstance(group, str):
        return group
    pg = group.pg if isinstance(group, Group) else process_group(group)
    if pg is None:
        raise NotImplementedError("a process by itself has no process group: call weft untraced")
    name: str = pg.group_name
    return name


def _describe(pg: dist.ProcessGroup) -> Group:
    rank, world_size = dist.get_rank(pg), dist.get_world_size(pg)
    ranks = tuple(dist.get_process_group_ranks(pg))
    if world_size == 1:
        return Group(pg, rank, world_size, ranks, (Process.here(),))
    if unknown := backends_of(pg) - {"gloo", "nccl", "mpi", "undefined"}:
        why = f"{', '.join(sorted(unknown))} ranks share no memory"
        return Group(pg, rank, world_size, ranks, (), why)
    unknown_yet = Group(pg, rank, world_size, ranks, ())
    on_gpus = moves_gpu_tensors(pg)
    told = unknown_yet.gather_objects(
        (Process.here(on_gpus), settings.same_on_all_ranks()), "where ranks run"
    )
    _check_settings([each for _, each in told])
    processes: list[Process] = [process for process, _ in told]
    # Every rank has come here equally often, also where names are used again or caches cleared.
    _described[pg.group_name] += 1
    first = processes[0]  # no other run, whose calls may be kept in the same folder, begins with it
    name = f"{ranks} {pg.group_name} {_described[pg.group_name]} {first.pid} {first.start_time}"
    hosts = hosts_of(processes, join=on_gpus)
    machines = hosts_of(processes, join=False)
    several, apart = len(hosts) > 1, len(hosts) == 1 < len(machines)
    readers: dict[int, flight.Reader] = {}
    for peer, process in enumerate(() if several or apart else processes):
        if reader := flight.Reader.of(process.pid, process.calls_fd):
            readers[peer] = reader
            waits.know(process, reader)
    own = flight.recorder()
    calls = flight.Calls(name, readers, own, rank)
    own.joined(calls.group, ranks, rank)
    if several:
        why = "its ranks are on several hosts (or in containers that do not share processes)"
        names = [dict.fromkeys(processes[peer].node for peer in each) for each in hosts]
        nodes = tuple(" + ".join(each) for each in names)
        return Group(pg, rank, world_size, ranks, (), why, calls=calls, hosts=hosts, nodes=nodes)
    if apart:  # within an NVLink domain there is nothing but NVLink
        nodes = tuple(processes[each[0]].node for each in machines)
        return Group(pg, rank, world_size, ranks, (), calls=calls, nodes=nodes, apart=True)
    if on_gpus and (why := why_gpus_do_not_reach(unknown_yet)):
        return Group(pg, rank, world_size, ranks, (), why, calls=calls)
    return Group(pg, rank, world_size, ranks, tuple(processes), calls=calls)


def hosts_of(processes: Sequence[Process], *, join: bool) -> tuple[tuple[int, ...], ...]:
    """The ranks of each host, which share memory; with `join`, machines that an NVLink domain spans
    are one.
    """
    machines: dict[str, list[int]] = {}
    for rank, process in enumerate(processes):
        machines.setdefault(process.host, []).append(rank)
    on: dict[str, list[int]] = {}
    for host, ranks in machines.items():
        # One GPU of a machine outside of the domain must not cut the machine in two.
        domains = {processes[rank].domain for rank in ranks}
        domain = domains.pop() if join and len(domains) == 1 else ""
        on.setdefault(f"domain {domain}" if domain else host, []).extend(ranks)
    return tuple(tuple(sorted(ranks)) for ranks in on.values())


def _check_settings(told: Sequence[Mapping[str, str]]) -> None:
    for name, first in told[0].items():
        for rank, others in enumerate(told):
            if others[name] != first:
                raise MismatchError(
                    f"{name} must be the same on every rank of a group: it is "
                    f"{first or 'not set'} on rank 0 and {others[name] or 'not set'} on rank "
                    f"{rank}. Set it alike in the environment of all, before their first call"
                )


def moves_gpu_tensors(pg: Any) -> bool:
    """Whether a process group is meant for tensors on GPUs."""
    return torch.cuda.is_available() and not backends_of(pg) <= {"gloo", "mpi"}


def backends_of(pg: Any) -> set[str]:
    """The backends of a process group, by name.

    Example:
        of "cpu:gloo,cuda:nccl": {"gloo", "nccl"}; of one made with no backend: {"undefined"}.
    """
    return {each.rpartition(":")[2] for each in str(dist.get_backend(pg)).split(",")}


# By virtual world, ranks, and the backend if it is not the world's.
_spanning: dict[tuple[Group | None, tuple[int, ...], str | None], Any] = {}
_made: dict[tuple[Group | None, tuple[int, ...]], int] = {}  # how many of them so far
# All caches whose keys are groups, which `close` empties: a process group that is still referenced
# when the interpreter ends may abort the process.
kept_by_group: list[dict[Any, Any]] = [_groups, _spanning]
# Functions that empty caches by mesh or layout. Meshes hold process groups, so `close` calls these
# as well.
forget_meshes: list[Callable[[], object]] = []


def spanning_group(mesh: DeviceMesh) -> Group:
    """One group over all ranks of an n-d mesh, in the order of `Group.ranks`.

    Collective over the mesh's ranks the first time.
    """
    return resolve(mesh) if mesh.ndim == 1 else ranks_group(_ranks_of(mesh))


@lru_cache(maxsize=64)
def _ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    with unwatched():
        return tuple(sorted(mesh.mesh.flatten().tolist()))


forget_meshes.append(_ranks_of.cache_clear)


def ranks_group(ranks: tuple[int, ...], like: Group | None = None) -> Group:
    """The group of these global ranks, in ascending order. Collective over them the first time.

    Args:
        like: whose backend it has; None: the world.
    """
    if here.world is not None and not dist.is_initialized():
        dist.init_process_group()  # of virtual ranks, who need none for calls of the whole world
    if ranks == tuple(range(dist.get_world_size())):
        return resolve(None)
    backend, own = None, like and like.virtual is None and like.pg
    if own and dist.get_backend(own) != dist.get_backend():
        backend = dist.get_backend_config(own)
    key = here.world, ranks, backend
    pg = _spanning.get(key)
    if pg is None or _is_destroyed(pg):
        pg = _spanning[key] = new_group(ranks, backend)
    return resolve(pg)


def new_group(
    ranks: tuple[int, ...], backend: str | None = None, timeout: timedelta | None = None
) -> dist.ProcessGroup:
    """A process group that only its members make; `timeout` is for its waits.

    torch would name it by the number of groups that a process knows, and members that know
    different numbers would wait for each other forever. It gets a name that they agree on.
    """
    number = _made[here.world, ranks] = _made.get((here.world, ranks), 0) + 1
    name = f"weft {ranks} {number}"
    if here.world is not None:  # virtual ranks share a process; they compare what precedes the @
        name += f"@{id(here.world)}"
    with patch.object(dist.distributed_c10d, "_process_group_name", lambda *_, **__: name):
        pg: dist.ProcessGroup = dist.new_group(
            list(ranks), timeout, backend, use_local_synchronization=True
        )
    return pg


def _is_destroyed(pg: dist.ProcessGroup) -> bool:
    return pg not in dist.distributed_c10d._world.pg_map
