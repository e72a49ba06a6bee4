"""What a fused matmul would take on eight H100, on virtual ranks and without a GPU.

weft sim examples/sim_time.py:up --ranks 8 --hardware h100 --no-numerics --trace out.json
"""

from __future__ import annotations

import torch

import weft
from weft import sim
from weft.collectives import resolve


def up(rank: int, M: int = 1024, N: int = 1792, K: int = 4096) -> torch.Tensor:
    """The way up of a feed-forward layer: x gathered over the ranks, times this rank's weight."""
    W = resolve(None).world_size
    with sim.untimed():
        x = torch.full((M // W, K), 1.0, dtype=torch.bfloat16)
        w = torch.full((K, N), 0.5, dtype=torch.bfloat16)
    with weft.engine("triton"):
        y: torch.Tensor = weft.all_gather_matmul(x, w, sizes=[M // W] * W)
    return y


def up_small(rank: int) -> torch.Tensor:
    """`up`, of a size that takes seconds with numerics too."""
    return up(rank, 256, 256, 512)
