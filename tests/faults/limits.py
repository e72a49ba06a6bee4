"""Ranks that run out of file descriptors, or of address space, at set-up or when memory grows."""

from __future__ import annotations

import os
import random
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from trials import GRACE_S, own_ranks

from weft import collectives

_BOUND_S = 4.0
_WAYS = ("files at set-up", "files when memory grows", "memory when it grows")


def _limited(way: str, victim: int, room: int, seed: int) -> tuple[str, str, float]:
    """(what it came to on this rank, its text, s) of sums under a limit of the victim."""
    os.environ["WEFT_TIMEOUT_S"] = str(_BOUND_S)
    torch.manual_seed(seed)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = torch.ones(1 << 20)  # of more than half of the memory of an exchange
    if way != "files at set-up":
        collectives.all_reduce(torch.ones(4))
    if rank == victim:
        if way.startswith("files"):
            used = max(int(each) for each in os.listdir("/proc/self/fd")) + 1
            kind, limit = resource.RLIMIT_NOFILE, used + room
        else:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            kind, limit = resource.RLIMIT_AS, pages * resource.getpagesize() + (room << 20)
        resource.setrlimit(kind, (limit, resource.getrlimit(kind)[1]))
    dist.barrier()
    start = time.monotonic()
    try:
        os.environ["WEFT_DIRECT"] = "0"
        right = collectives.all_reduce(x)[0].item() == world_size
        return "right" if right else "wrong", "", time.monotonic() - start
    except (RuntimeError, OSError, MemoryError) as error:
        return "error", f"{type(error).__name__}: {error}", time.monotonic() - start


def limits(chance: random.Random, folder: Path) -> Iterator[None]:
    world_size, way = chance.choice((2, 3)), chance.choice(_WAYS)
    victim, room = chance.randrange(world_size), chance.randrange(8)
    where = f"{way} of rank {victim} of {world_size}, {room} left"
    with own_ranks(world_size) as ranks:
        ranks.start(_limited, way, victim, room, chance.randrange(1 << 30))
        replies = ranks.finish(_BOUND_S + GRACE_S + 5)
    assert sorted(replies) == list(range(world_size)), f"{where}: hang: {replies}"
    for rank, (ok, value) in replies.items():
        assert ok, f"{where}: rank {rank}: {value}"
        came, text, seconds = value
        assert came != "wrong" and seconds < _BOUND_S + GRACE_S, f"{where}: rank {rank}: {value}"
        # Who has no limit has an error only because of who has.
        named = f"rank {victim}" in text or f"Rank {victim}" in text
        assert came == "right" or rank == victim or named, f"{where}: rank {rank}: {text}"
    assert len({value[0] for _, value in replies.values()}) == 1, f"{where}: {replies}"
    yield
