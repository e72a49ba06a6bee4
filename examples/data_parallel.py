"""Data parallelism of a plain module: parameters on every rank, each rank a part of the batch.

    torchrun --nproc-per-node 2 examples/data_parallel.py

What DistributedDataParallel does, said with layouts. The parameters are Replicate, the batch is
Shard(0), so the gradients come out as Partial sums, and are reduced where they are used: in the
optimizer's step. Nothing of the model changes.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import weft
from weft.dtensor import Shard, distribute_module, distribute_tensor, init_device_mesh

STEPS = 10


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same whole batch on every rank; of 15 rows, two ranks have 8 and 7."""
    x = torch.randn(15, 8, generator=torch.Generator().manual_seed(step))
    return x, x.sin()


def train(model: nn.Module, mesh: torch.distributed.DeviceMesh | None) -> list[float]:
    """Losses of `STEPS` steps, on a mesh or (None) on one process."""
    if mesh is not None:
        distribute_module(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        x, wanted = batch(step)
        if mesh is not None:
            x, wanted = (distribute_tensor(t, mesh, [Shard(0)]) for t in (x, wanted))
        loss = nn.functional.mse_loss(model(x), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def make() -> nn.Module:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ours, alone = train(make(), mesh), train(make(), None)
    if dist.get_rank() == 0:
        print(f"loss {ours[0]:.4f} -> {ours[-1]:.4f}")
        difference = max(abs(a - b) for a, b in zip(ours, alone, strict=True))
        print(f"largest difference from one process: {difference:.1e}")
    weft.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
