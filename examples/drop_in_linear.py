"""Swap the linear layers of a model for parallel ones, with no DTensor in sight.

    torchrun --nproc-per-node 2 examples/drop_in_linear.py

For code that keeps its tensors plain: every rank works on its part of the sequence, and the two
linears gather and scatter it while they multiply.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

import weft

FEATURES, HIDDEN, TOKENS = 64, 256, 128


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, HIDDEN)
        self.down = nn.Linear(HIDDEN, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(nn.functional.gelu(self.up(x)))
        return out


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))

    torch.manual_seed(0)  # the same weights and data on every rank
    model = MLP()
    x = torch.randn(TOKENS, FEATURES)
    expected = model(x).chunk(world_size)[rank]

    model.up = weft.ColumnParallelLinear.from_linear(model.up, sequence_dim=0)
    model.down = weft.RowParallelLinear.from_linear(model.down, sequence_dim=0)
    out = model(x.chunk(world_size)[rank])  # (TOKENS / W, FEATURES) in, and out
    out.square().mean().backward()

    difference = weft.collectives.all_reduce((out - expected).abs().max(), reduce_op="max").item()
    held = sum(p.numel() for p in model.parameters())
    if rank == 0:
        print(f"{held} parameters a rank, largest difference from one process: {difference:.1e}")
    weft.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
