"""Calls of all kinds and sizes, ranks late at random, against float64."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from trials import own_ranks
from workloads import WORK, make

_CALLS, _LATE_S = 40, 0.01


def _soaked(seed: int) -> None:
    os.environ["WEFT_TIMEOUT_S"] = "60"
    torch.manual_seed(seed)
    together, alone = random.Random(seed), random.Random(seed * 8 + dist.get_rank())
    for _ in range(_CALLS):
        if alone.random() < 0.3:
            time.sleep(alone.uniform(0, _LATE_S))
        make(together.choice(list(WORK)))


def soaks(chance: random.Random, folder: Path) -> Iterator[None]:
    with own_ranks(chance.choice((2, 3))) as ranks:
        ranks.run(_soaked, chance.randrange(1 << 30), timeout_s=120)
    yield from [None] * _CALLS
