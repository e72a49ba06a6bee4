"""Tensor and sequence parallelism of a plain module, in the way of torch.distributed.tensor.

    torchrun --nproc-per-node 2 examples/tensor_parallel_mlp.py

The model is ordinary PyTorch. A plan says how its layers lie over the ranks; the matmuls then run
as weft's fused ops, forward and backward, and every rank holds half of the weights.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

import weft
from weft.dtensor import Shard, distribute_tensor, init_device_mesh
from weft.dtensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

FEATURES, HIDDEN, SEQUENCE, BATCH = 64, 256, 128, 4


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(FEATURES)
        self.up = nn.Linear(FEATURES, HIDDEN)
        self.down = nn.Linear(HIDDEN, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    mesh = init_device_mesh("cpu", (world_size,))

    torch.manual_seed(0)  # the same weights and data on every rank
    model = MLP()
    x = torch.randn(BATCH, SEQUENCE, FEATURES)
    expected = model(x)

    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    x_sharded = distribute_tensor(x, mesh, [Shard(1)])  # each rank: SEQUENCE / W positions

    explanation = weft.explain(lambda: model(x_sharded))
    difference = (explanation.result.full_tensor() - expected).abs().max().item()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(10):
        optimizer.zero_grad()
        loss = (model(x_sharded) - x_sharded).square().mean()
        loss.backward()
        optimizer.step()
    loss_value = loss.full_tensor().item()

    if rank == 0:
        print(f"largest difference from one process: {difference:.1e}")
        print(explanation)
        print(f"loss after 10 steps: {loss_value:.4f}")
    weft.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
