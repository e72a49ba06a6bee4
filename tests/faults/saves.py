"""Ranks that are killed amid asynchronous saves: what was finished stays whole."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from trials import GRACE_S, own_ranks, until

import weft
from weft.dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from weft.dtensor.checkpoint import async_save, load

_EACH = 2


def _save_until_told(folder: str, sizes: list[int]) -> tuple[str, tuple[int, ...]]:
    """Save 1, 2, ... in the same folder, and tell beside it which is finished."""
    rank, path = dist.get_rank(), Path(folder)
    mesh, number = init_device_mesh("cpu", (dist.get_world_size(),)), 0
    try:
        while True:
            number += 1
            state = {
                f"w{i}": distribute_tensor(
                    torch.full((size,), float(number)), mesh,
                    [Replicate() if i % 3 == 2 else Shard(0)], src_data_rank=None,
                )
                for i, size in enumerate(sizes)
            } | {"number": number}  # fmt: skip
            written = async_save(state, path / "checkpoint")
            weft.collectives.all_reduce(torch.ones(3))  # the step goes on meanwhile
            written.result()
            aside = path / f"{rank}.new"
            aside.write_text(str(number))
            aside.rename(path / f"finished {rank}")
    except weft.PeerTimeout as error:
        return str(error), error.absent


def killed_saves(chance: random.Random, folder: Path) -> Iterator[None]:
    for trial in range(_EACH):
        inside = folder / str(trial)
        inside.mkdir()
        world_size = chance.choice((2, 3))
        sizes = [chance.randrange(1, 300_000) for _ in range(chance.randrange(1, 6))]
        victim, pause_s = chance.randrange(world_size), chance.uniform(0, 0.2)
        where = f"rank {victim} of {world_size} killed after {pause_s:.3f} s, {sizes} elements"
        files = [inside / f"finished {rank}" for rank in range(world_size)]
        with own_ranks(world_size) as ranks:
            ranks.start(_save_until_told, str(inside), sizes)
            until(lambda files=files: all(file.exists() for file in files), where)
            time.sleep(pause_s)
            os.kill(ranks.pids[victim], signal.SIGKILL)
            replies = ranks.finish(2 * GRACE_S, dead=(victim,))
        assert len(replies) == world_size - 1, f"{where}: who is left hangs"
        for ok, value in replies.values():
            assert ok and value[1] == (victim,), f"{where}: {value}"
        finished = max(int(file.read_text()) for file in files)
        back = {f"w{i}": torch.zeros(size) for i, size in enumerate(sizes)} | {"number": 0}
        load(back, inside / "checkpoint")
        number = back["number"]
        assert number in (finished, finished + 1), f"{where}: {number}, {finished} was finished"
        for i, size in enumerate(sizes):
            assert torch.equal(back[f"w{i}"], torch.full((size,), float(number))), where
        yield
