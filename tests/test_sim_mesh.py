"""torch.distributed, meshes and DTensor on virtual ranks: what torchrun runs, in one process."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from weft import sim
from weft.dtensor import (
    DTensor,
    Shard,
    distribute_tensor,
)
from weft.dtensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


def grid(world_size: int) -> tuple[int, int]:
    rows = next(r for r in (8, 2, 1) if world_size % r == 0 and r * r <= world_size)
    return rows, world_size // rows


class Block(nn.Module):
    """A normalized MLP with a residual, as a transformer has it."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


PLAN = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1)),
    "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
}


def train(hidden: int = 16) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The script: data parallel along one mesh dim, tensor and sequence parallel along the other.

    It knows nothing of where it runs. Returns the whole output and the whole gradients.
    """
    dist.init_process_group("gloo")
    assert dist.get_rank() == int(os.environ["RANK"])
    mesh = init_device_mesh("cpu", grid(dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = Block(8, hidden)
    batch = torch.randn(2 * mesh.size(0), mesh.size(1), 8)
    parallelize_module(model, mesh["tp"], PLAN)
    mine = distribute_tensor(batch, mesh, [Shard(0), Shard(1)])
    local = DTensor.from_local(mine.to_local(), mesh["tp"], [Shard(1)])
    y = model(local)
    y.to_local().square().sum().backward()
    grads = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad.full_tensor()
        dist.all_reduce(grad, group=mesh.get_group("dp"))
        grads[name] = grad
    whole = DTensor.from_local(y.to_local(), mesh, [Shard(0), Shard(1)]).full_tensor()
    dist.destroy_process_group()
    return whole.detach(), grads


def expected(world_size: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    rows, columns = grid(world_size)
    torch.manual_seed(0)
    model = Block(8, 16)
    batch = torch.randn(2 * rows, columns, 8)
    y = model(batch)
    y.square().sum().backward()
    return y.detach(), {name: p.grad for name, p in model.named_parameters()}


def check(results: list[Any], world_size: int) -> None:
    want_y, want_grads = expected(world_size)
    assert len(results) == world_size
    for y, grads in results:
        torch.testing.assert_close(y, want_y, rtol=1e-4, atol=1e-5)
        assert grads.keys() == want_grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(grad, want_grads[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("world_size, schedules", [(4, 4), (6, 1)])
def test_a_dtensor_script_is_right_under_any_schedule(world_size: int, schedules: int) -> None:
    torch.manual_seed(7)
    check(sim.run(world_size, lambda rank: train(), schedules=schedules), world_size)


def test_a_dtensor_script_on_64_ranks() -> None:
    check(sim.run(64, lambda rank: train(), timeout=300), 64)
