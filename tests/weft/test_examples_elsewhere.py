"""Examples of the DTensor RFC and of ColossalAI, as they stand there but for imports and device.

Where an example is no Python (`def MyModule(nn.Module)`, a positional argument after a keyword),
the smallest mend is made.
"""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
from torch import nn

import weft
from weft import dtensor as distributed
from weft.dtensor import (
    DeviceMesh,
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)


@pytest.mark.ranks(4)
def test_shard_a_big_tensor() -> None:
    world_size = torch.distributed.get_world_size()

    mesh = DeviceMesh("cpu", list(range(world_size)))
    big_tensor = torch.randn(100000, 88)
    x = distribute_tensor(big_tensor, mesh, [Shard(dim=0)])

    assert x.to_local().shape == (100000 // world_size, 88)


@pytest.mark.ranks(4)
def test_construct_and_reshard() -> None:
    # construct a device mesh with available devices (multi-host or single host)
    device_mesh = DeviceMesh("cpu", [0, 1, 2, 3])
    # if we want to do row-wise sharding
    rowwise_placement = [Shard(0)]
    # if we want to do col-wise sharding
    colwise_placement = [Shard(1)]
    # distributed tensor returned will be sharded across the dimension specified in placements
    a = distributed.empty((8, 12), device_mesh=device_mesh, placements=rowwise_placement)

    # if we want to do replication across a certain device list
    replica_placement = [Replicate()]
    # distributed tensor will be replicated to all four GPUs.
    b = distributed.empty((8, 12), device_mesh=device_mesh, placements=replica_placement)

    # if we want to distributed a tensor with both replication and sharding
    square = DeviceMesh("cpu", [[0, 1], [2, 3]])
    # replicate across the first dimension of device mesh, then sharding on the second dimension
    spec = [Replicate(), Shard(0)]
    c = distributed.empty((8, 8), device_mesh=square, placements=spec)
    assert [t.to_local().shape for t in (a, b, c)] == [(2, 12), (8, 12), (4, 8)]

    # create a DistributedTensor that shards on dim 0, from a local torch.Tensor
    local_tensor = torch.randn((8, 8), requires_grad=True)
    rowwise_tensor = DTensor.from_local(local_tensor, device_mesh, rowwise_placement)

    # reshard the current rowise tensor to a colwise tensor or replicate tensor
    colwise_tensor = rowwise_tensor.redistribute(device_mesh, colwise_placement)
    replica_tensor = colwise_tensor.redistribute(device_mesh, replica_placement)

    rank = torch.distributed.get_rank()
    assert torch.equal(replica_tensor.to_local()[8 * rank : 8 * rank + 8], local_tensor)
    replica_tensor.sum().backward()
    assert torch.equal(local_tensor.grad, torch.ones(8, 8))


class MyModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 8)
        self.fc2 = nn.Linear(8, 8)
        self.relu = nn.ReLU()

    def forward(self, input: Any) -> Any:
        return self.relu(self.fc1(input) + self.fc2(input))


@pytest.mark.ranks(4)
def test_distribute_modules() -> None:
    mesh = device_mesh = DeviceMesh("cpu", list(range(torch.distributed.get_world_size())))
    rowwise_placement = [Shard(0)]
    model, reference, other = MyModule(), MyModule(), MyModule()
    for copy in (reference, other):
        copy.load_state_dict(model.state_dict())

    def shard_params(mod_name: str, mod: nn.Module) -> None:
        def to_dist_tensor(t: Any) -> Any:
            return distribute_tensor(t, mesh, rowwise_placement)

        mod._apply(to_dist_tensor)

    sharded_module = distribute_module(model, device_mesh, partition_fn=shard_params)
    assert all(p.placements == (Shard(0),) for p in sharded_module.parameters())

    def shard_fc(mod_name: str, mod: Any) -> None:
        if mod_name == "fc1":
            mod.weight = torch.nn.Parameter(
                distribute_tensor(mod.weight, device_mesh, rowwise_placement)
            )

    partly = distribute_module(other, device_mesh, partition_fn=shard_fc)
    assert partly.fc1.weight.placements == (Shard(0),)
    assert partly.fc1.bias.placements == partly.fc2.weight.placements == (Replicate(),)

    x = torch.randn(4, 8)
    reference(x).sum().backward()
    for module in (sharded_module, partly):
        y = module(distribute_tensor(x, mesh, [Replicate()]))
        torch.testing.assert_close(y.full_tensor(), reference(x))
        y.sum().backward()
        for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def colossalai_usage() -> None:
    from weft.dtensor.interop import colossalai
    from weft.dtensor.interop.colossalai import DeviceMesh, DTensor, ShardingSpec

    colossalai.launch_from_torch(config={})

    # define your device mesh
    # assume you have 4 GPUs
    physical_mesh_id = torch.arange(0, 4)
    mesh_shape = (2, 2)
    device_mesh = DeviceMesh(physical_mesh_id, mesh_shape, init_process_group=True)

    # define a tensor
    a = torch.rand(16, 32)

    # create sharding spec for the tensor
    # assume the sharding spec is [S0, R]
    dim_partition_dict = {0: [0]}
    sharding_spec = ShardingSpec(a.dim(), dim_partition_dict)

    # create a distributed tensor
    d_tensor = DTensor(a, device_mesh, sharding_spec)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        print(d_tensor)

    global_tensor = d_tensor.to_global()

    assert "sharding_spec=[S0, R]" in printed.getvalue()
    assert torch.equal(global_tensor, a)
    assert d_tensor.local_tensor.shape == (8, 32)


def colossalai_pictures() -> list[list[float]]:
    """The matrix that its text draws, as [S0, R] and as [S01, R]."""
    from weft.dtensor.interop.colossalai import DeviceMesh, DTensor, ShardingSpec

    matrix = torch.tensor([[1, 2, 3, 4], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]])
    mesh = DeviceMesh(torch.arange(4), (2, 2))
    rows = DTensor(matrix, mesh, ShardingSpec(2, {0: [0]}))
    each = rows.convert_layout(mesh, ShardingSpec(2, {0: [0, 1]}))
    assert each.sharding_spec == "[S01, R]" and torch.equal(each.to_global(), matrix)
    held: list[list[float]] = [rows.local_tensor[:, 0].tolist(), each.local_tensor[:, 0].tolist()]
    return held


def colossalai_on(sizes: tuple[int, ...]) -> None:
    from weft.dtensor.interop.colossalai import DeviceMesh, DTensor, ShardingSpec

    count = torch.Size(sizes).numel()
    mesh = DeviceMesh(torch.arange(count), sizes)
    a = torch.arange(16 * 32 * 2.0).view(16, 32, 2)
    last = len(sizes) - 1
    for cuts in ({0: [0]}, {0: [0, 1]}, {1: [last, 0]}, {0: [last], 1: [0]}, {2: [1]}):
        d = DTensor(a, mesh, ShardingSpec(3, cuts))
        assert d.sharding_spec == repr(ShardingSpec(3, cuts))
        assert torch.equal(d.to_global(), a)
        e = d.convert_layout(mesh, ShardingSpec(3, {1: list(range(len(sizes)))}))
        assert e.local_tensor.shape == (16, 32 // count, 2) and torch.equal(e.to_global(), a)


def test_colossalai_usage(ranks: Any) -> None:
    ranks(4, colossalai_usage)
    held = ranks(4, colossalai_pictures)
    assert [rows for rows, _ in held] == [[1, 4], [1, 4], [8, 12], [8, 12]]
    assert [each for _, each in held] == [[1], [4], [8], [12]]


@pytest.mark.parametrize("sizes", [(2, 2), (2, 2, 2)], ids=str)
def test_colossalai_meshes_of_more_dims(sizes: tuple[int, ...]) -> None:
    weft.sim.run(torch.Size(sizes).numel(), lambda rank: colossalai_on(sizes), races=False)
