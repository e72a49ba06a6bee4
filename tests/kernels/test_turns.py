"""No incast: those that send at a time, on all ranks together, send to all owners alike."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from needs import needs_interpreter

from weft.kernels.device import turns
from weft.kernels.device.summed_tiles import tile_count
from weft.kernels.engine.chips import known
from weft.kernels.matmul.reduce_scatter_kernel import reduce_scatter_config

W = 8


@triton.jit
def _follows_kernel(follows_ptr, SENDERS: tl.constexpr):
    program = tl.program_id(0)
    follows = turns.follows(program, tl.num_programs(0), SENDERS)
    tl.store(follows_ptr + program, follows.to(tl.int32))


def first_owner(program: int, rank: int, programs: int, count: int) -> int:
    """To whom a program of a rank sends its first tile, of `count` a chunk; -1: to nobody.

    Tile u of chunk d has number d * count + u, and is made by the program with number % programs.
    """
    for step in range(1, W):
        owner = (rank + step) % W
        if (program - owner * count) % programs < count:
            return owner
    return -1


def crowding(turn_of: list[int], owners: list[list[int]]) -> float:
    """The most that one owner gets at a time of first tiles, relative to an even share."""
    worst = 1.0
    for turn in range(max(turn_of) + 1):
        sent = [row for at, row in zip(turn_of, owners, strict=True) if at == turn]
        gets = Counter(owner for row in sent for owner in row if owner >= 0)
        worst = max(worst, max(gets.values()) / (sum(gets.values()) / W))
    return worst


@needs_interpreter
@pytest.mark.parametrize(("M", "N"), [(2048, 4096), (4096, 4096), (1024, 8192), (2048, 8192)])
def test_first_tiles_go_to_all_owners_alike(M: int, N: int) -> None:
    config: Any = reduce_scatter_config(M // W, N, torch.bfloat16, W, known("sm_90"))
    count, programs = tile_count(M // W, N, config.tiling), config.programs
    owners = [[first_owner(p, rank, programs, count) for rank in range(W)] for p in range(programs)]
    follows = torch.empty(programs, dtype=torch.int32)
    _follows_kernel[(programs,)](follows, config.senders)
    turn_of: list[int] = []
    for waits in follows.tolist():
        turn_of.append(turn_of[-1] + 1 if waits else 0)
    assert follows.eq(0).sum() <= config.senders
    assert crowding(turn_of, owners) <= 1.5
    # As it was: the first programs of all first, which are of one owner, the same on every rank.
    absolute = [program // config.senders for program in range(programs)]
    assert crowding(absolute, owners) > 2
