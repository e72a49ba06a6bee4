"""Calls that differ between ranks, in one thing or in all, drawn at random."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from trials import GRACE_S, own_ranks

import weft
from weft import collectives
from weft.dtensor import Replicate, Shard, distribute_tensor, init_device_mesh

_CALLS = 12
_DTYPES = (torch.float32, torch.float64, torch.int32, torch.bfloat16, torch.float16)
_SHAPES = ((4, 6), (6, 4), (2, 12), (12, 2), (5, 5))
Drawn = tuple[str, Callable[[], object]]  # all that ranks must agree on, and the call


def _drawn(chance: random.Random, world_size: int) -> Drawn:
    op = chance.choice(
        ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier", "move")
    )
    dtype, shape, dim = chance.choice(_DTYPES), chance.choice(_SHAPES), chance.randrange(2)
    how, source = chance.choice(("sum", "max", "min")), chance.randrange(world_size)
    x, told = torch.ones(shape, dtype=dtype), f"{op} {dtype} {shape}"
    if op == "all_reduce":
        return f"{told} {how}", partial(collectives.all_reduce, x, reduce_op=how)
    if op == "reduce_scatter":
        scatter = partial(collectives.reduce_scatter, x, dim=dim, reduce_op=how)
        return f"{told} {dim} {how}", scatter
    if op == "all_gather":
        sizes = [shape[dim]] * world_size
        return f"{told} {dim}", partial(collectives.all_gather, x, dim=dim, sizes=sizes)
    if op == "broadcast":
        return f"{told} {source}", partial(collectives.broadcast, x, source)
    if op == "barrier":
        return op, collectives.barrier
    mesh = init_device_mesh("cpu", (world_size,))
    cut = distribute_tensor(x, mesh, [Shard(dim)], src_data_rank=None)
    target = chance.choice((Replicate(), Shard(1 - dim)))
    return f"{told} {dim} {target}", partial(cut.redistribute, mesh, [target])


def _differing(seed: int) -> list[str]:
    """What went wrong, call by call."""
    os.environ["WEFT_TIMEOUT_S"] = "30"
    chance, rank, world_size = random.Random(seed), dist.get_rank(), dist.get_world_size()
    x = torch.ones(3)
    assert collectives.all_reduce(x).tolist() == [world_size] * 3
    wrong = []
    for _ in range(_CALLS):
        (usual, call), (odd, other) = _drawn(chance, world_size), _drawn(chance, world_size)
        while usual == odd:
            odd, other = _drawn(chance, world_size)
        outliers = chance.sample(range(world_size), chance.randrange(1, world_size))
        start = time.monotonic()
        try:
            (other if rank in outliers else call)()
            wrong.append(f"{usual} against {odd} on {outliers}: no error on rank {rank}")
        except weft.MismatchError as error:
            told = re.findall(r"rank (\d+) called", str(error).split("\n")[0])
            sides = {int(each) in outliers for each in told}
            if sides != {True, False} or time.monotonic() - start > GRACE_S:
                wrong.append(f"{usual} against {odd} on {outliers}, rank {rank}: {error}")
        assert collectives.all_reduce(x).tolist() == [world_size] * 3, (usual, odd)
    return wrong


def mismatches(chance: random.Random, folder: Path) -> Iterator[None]:
    with own_ranks(chance.choice((2, 3))) as ranks:
        wrong = ranks.run(_differing, chance.randrange(1 << 30), timeout_s=120)
    for told in wrong:
        assert not told, "\n".join(told)
    yield from [None] * _CALLS
