"""Where symmetric memory comes from: shared memory of CPU ranks, torch's of GPUs, plain memory.

Virtual ranks bring their own.
"""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch

from weft.collectives.ranks.group import Group


class Memory(Protocol):
    """What a backend provides: every rank's segment, pad first, as bytes this rank can reach."""

    segments: list[torch.Tensor]  # uint8, one a rank
    multicast_ptr: int


class PosixMemory:
    """Shared memory of the CPU ranks of one host.

    Rank 0 makes an anonymous file (memfd) and the others open it through /proc. It never has a name
    in /dev/shm, so nothing can be left there, however ranks die, and the size of /dev/shm (64 MiB
    in a container by default) is no limit.
    """

    def __init__(self, nbytes: int, group: Group) -> None:
        self.multicast_ptr = 0
        total = nbytes * group.world_size
        fd, error = -1, ""
        try:
            if group.rank == 0:
                try:
                    fd = os.memfd_create("weft")
                    os.ftruncate(fd, total)
                except OSError as failure:
                    error = str(failure)
            owner_fd, error = group.gather_objects((fd, error), "shared memory")[0]
            if not error:
                try:
                    if group.rank != 0:
                        path = f"/proc/{group.processes[0].pid}/fd/{owner_fd}"
                        fd = os.open(path, os.O_RDWR)
                    # Populate: a page fault costs more than copying the page, and would happen
                    # later, during a call that may be timed.
                    populate = getattr(mmap, "MAP_POPULATE", 0)
                    memory = mmap.mmap(fd, total, mmap.MAP_SHARED | populate)
                except OSError as failure:
                    error = str(failure)
            # All ranks learn of a failure anywhere, and rank 0 keeps its file open until all have
            # it.
            errors = group.gather_objects(error, "shared memory")
        finally:  # a rank may have died meanwhile
            if fd >= 0:
                os.close(fd)
        if any(errors):
            rank = next(r for r, text in enumerate(errors) if text)
            raise RuntimeError(f"rank {rank} could not map {total} bytes: {errors[rank]}")
        everything = torch.frombuffer(memory, dtype=torch.uint8)
        self.segments = list(everything.split(nbytes))


class CudaMemory:
    """torch's symmetric memory: NVLink peers, or several ranks on one GPU.

    Each buffer is an allocation of its own. `symm_mem.empty` takes from a pool that reuses what was
    freed: ranks that have freed different things would present memory that their peers take for
    another buffer, or wait for a rendezvous that a peer believes to have had.
    """

    def __init__(self, nbytes: int, group: Group, device: torch.device) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory

        from weft.collectives.memory import rendezvous

        _allow_shared_gpus(group, device)
        counts = group.gather_objects(rendezvous.count(), "symmetric memory of GPUs")
        own = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
        own.zero_()

        def met() -> Any:
            with torch.cuda.device(device):
                return rendezvous.meet(own, group, counts)

        with ThreadPoolExecutor(max_workers=1) as beside:  # it allocates tables: see `persistent`
            self._handle = beside.submit(met).result()
        self.multicast_ptr = int(self._handle.multicast_ptr or 0)
        self.segments = [
            own if r == group.rank else self._handle.get_buffer(r, (nbytes,), torch.uint8)
            for r in range(group.world_size)
        ]
        torch.cuda.synchronize(device)
        group.gather_objects(None, "symmetric memory")  # no rank signals before all pads are zero


def _allow_shared_gpus(group: Group, device: torch.device) -> None:
    """Have torch accept ranks that share a GPU, where there are too few GPUs.

    It also takes ranks that see one GPU each for such. Ranks that forgot to set their device are
    still refused.
    """
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    gpus = set(group.gather_objects(uuid, "the GPUs of the ranks"))
    if torch.cuda.device_count() >= group.world_size:
        return
    os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    if len(gpus) < group.world_size:
        # Multicast would wait for as many GPUs as there are ranks.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")


class LocalMemory:
    """Plain memory, for a group of one rank."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.multicast_ptr = 0
        self.segments = [persistent(torch.zeros(nbytes, dtype=torch.uint8, device="cpu"), device)]


def persistent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`values` on `device`, to be kept from call to call.

    While torch.compile prepares CUDA graphs, a thread's allocations come from memory that the
    graphs reuse even if somebody keeps it. So another thread allocates.
    """
    if device.type != "cuda":
        return values.to(device)
    with ThreadPoolExecutor(max_workers=1) as beside:
        return beside.submit(values.to, device).result()
