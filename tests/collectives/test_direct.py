"""Collectives on peers' private memory: the same results as through shared memory, and no hang."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from weft import collectives
from weft.collectives import movement
from weft.collectives.memory import direct
from weft.collectives.ranks.group import resolve

_ROWS = 9 * movement._DIRECT_BYTES // 2 // 5 + 7  # of 5 numbers: what is copied is past the bound


def results(rank: int, world_size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(_ROWS, 5, generator=generator).to(dtype)
    sizes = [_ROWS] + [0] * (world_size - 2) + [_ROWS // 2]
    sends = [[0, 0, 1, 2][(rank + peer) % 4] * (_ROWS // 8) for peer in range(world_size)]
    receives = [[0, 0, 1, 2][(rank + peer) % 4] * (_ROWS // 8) for peer in range(world_size)]
    in_place = x.clone()
    collectives.all_reduce(in_place, out=in_place)
    return [
        in_place,
        collectives.all_gather(x[: sizes[rank]], sizes=sizes),
        collectives.all_gather(x.t()[:, : sizes[rank]], dim=1),
        collectives.reduce_scatter(x),
        collectives.reduce_scatter(x, reduce_op="max"),
        collectives.all_reduce(x),
        collectives.all_reduce(x.t(), reduce_op="avg"),
        collectives.all_to_all(x[: sum(sends)], receives, sends),
        collectives.broadcast(x, src=world_size - 1),
    ]


def paths_body(dtype: torch.dtype) -> bool:
    """Whether this system lets processes read each other's memory: compared if so."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    group = resolve(None)
    if not direct.reaches(group):
        return False
    reads = direct._read_process
    count = 0

    def counted(*args: int) -> int:
        nonlocal count
        count += 1
        return reads(*args)

    direct._read_process = counted
    try:
        straight = results(rank, world_size, dtype)
        assert count >= 3 * (world_size - 1)  # two gathers and an exchange
        again = results(rank, world_size, dtype)
    finally:
        direct._read_process = reads
    direct._reaches[group] = False
    shared = results(rank, world_size, dtype)
    direct._reaches[group] = True
    for one, two, three in zip(straight, again, shared, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)
    return True


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equal_to_shared_memory(ranks, world_size: int, dtype: torch.dtype) -> None:
    if not all(ranks(world_size, paths_body, dtype)):
        pytest.skip("this system does not let processes read each other's memory")


@pytest.mark.ranks(3)
def test_inputs_are_free_after_the_call() -> None:
    """A rank that has its result may overwrite its input: nobody still reads it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = torch.empty(movement._DIRECT_BYTES)
    for call in range(6):
        x.fill_(10 * call + rank)
        if rank == call % world_size:
            time.sleep(0.01)
        out = collectives.all_gather(x, sizes=[len(x)] * world_size)
        x.fill_(torch.nan)
        wanted = torch.arange(world_size).repeat_interleave(len(x)) + 10.0 * call
        assert torch.equal(out, wanted)
