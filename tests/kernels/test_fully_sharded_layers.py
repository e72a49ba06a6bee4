"""Plain layers whose parts FSDP2 cuts once more: saved, loaded and drawn as without it."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import weft

State = dict[str, torch.Tensor]


def same(state: State, expected: State) -> None:
    assert not any(isinstance(value, DTensor) for value in state.values())
    torch.testing.assert_close(state, expected, rtol=0, atol=0)


def column(tp: DeviceMesh) -> nn.Module:
    return weft.ColumnParallelLinear(6, 11, group=tp, sequence_dim=0)


def row(tp: DeviceMesh) -> nn.Module:
    return weft.RowParallelLinear(11, 6, group=tp, sequence_dim=0)


def experts(tp: DeviceMesh) -> nn.Module:
    return weft.ExpertParallelMLP(5, 4, 6, group=tp)


def features(tp: DeviceMesh) -> nn.Module:
    return weft.ExpertParallelMLP(3, 4, 6, group=tp, tensor_parallel_size=2, activation="gelu")


@pytest.mark.ranks(4)
@pytest.mark.parametrize("make", [column, row, experts, features])
def test_saved_loaded_and_drawn(make: Callable[[DeviceMesh], nn.Module]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    whole = make(mesh["tp"]).state_dict()
    with torch.device("meta"):
        layer = make(mesh["tp"])
    model = nn.Sequential(layer)
    fully_shard(model, mesh=mesh["dp"])
    assert {k: v.shape for k, v in layer.state_dict().items()} == {
        k: v.shape for k, v in whole.items()
    }
    model.to_empty(device="cpu")
    torch.manual_seed(1)
    layer.reset_parameters()
    same(layer.state_dict(), whole)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    for factor, assign in (2, False), (3, True):
        changed = {name: value * factor for name, value in whole.items()}
        layer.load_state_dict(changed, assign=assign)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        same(layer.state_dict(), changed)
    if make in (column, row):  # torch takes names of parameters only
        options = StateDictOptions(full_state_dict=True)
        named = {f"0.{name}": value for name, value in whole.items()}
        set_model_state_dict(model, dict(named), options=options)
        same(get_model_state_dict(model, options=options), named)
