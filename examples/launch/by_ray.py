"""Ranks as workers of Ray Train, which sets up the process group: `train` is a worker's program.

pip install 'ray[train]'
python examples/launch/by_ray.py 2
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

import weft


def train() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()  # Ray has set up the group
    torch.manual_seed(0)
    linear, x = nn.Linear(64, 256), torch.randn(128, 64)
    layer = weft.ColumnParallelLinear.from_linear(linear, sequence_dim=0)
    y = layer(x.chunk(world_size)[rank])
    torch.testing.assert_close(y, linear(x).chunk(world_size, 1)[rank], rtol=1e-4, atol=1e-4)
    hosts = len(weft.collectives.resolve(None).hosts) or 1
    print(f"rank {rank} of {world_size} on {hosts} hosts: as one process")
    weft.close()


def main() -> None:
    from ray.train import ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    on_gpus = torch.cuda.is_available()
    TorchTrainer(
        train,
        torch_config=TorchConfig(backend="nccl" if on_gpus else "gloo"),
        scaling_config=ScalingConfig(num_workers=int(sys.argv[1]), use_gpu=on_gpus),
    ).fit()


if __name__ == "__main__":
    main()
