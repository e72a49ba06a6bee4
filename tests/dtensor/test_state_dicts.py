"""State dicts of `torch.distributed.checkpoint.state_dict`: whole ones, to and from shards."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from weft.dtensor import (
    DTensor,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)

WHOLE = StateDictOptions(full_state_dict=True)
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
}


def model_of(seed: int, mesh: Any = None) -> nn.Module:
    """Weights sharded unevenly along both mesh dims, the rest replicated."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 5))
    model.register_buffer("shift", torch.randn(5))
    model.register_buffer("count", torch.tensor(float(seed)))

    def part(_: str, module: nn.Module, mesh: Any) -> None:
        if isinstance(module, nn.Linear):
            weight = distribute_tensor(module.weight, mesh, [Shard(0), Shard(1)])
            module.weight = nn.Parameter(weight)

    return model if mesh is None else distribute_module(model, mesh, part)


def trained(model: nn.Module, optimizer: Any, mesh: Any = None) -> None:
    x = torch.linspace(-1, 1, 18).view(3, 6)
    for _ in range(2):
        model(x if mesh is None else distribute_tensor(x, mesh)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same(found: Any, expected: Any, name: str = "") -> None:
    """Equal in structure, kinds and numbers; tensors are plain on both sides."""
    if isinstance(expected, dict):
        assert set(found) == set(expected), name
        for key in expected:
            assert_same(found[key], expected[key], f"{name}.{key}")
    elif isinstance(expected, (list, tuple)):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other, name)
    elif isinstance(expected, torch.Tensor):
        assert type(found) is torch.Tensor, (name, type(found))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    else:
        assert found == expected, name


@pytest.mark.ranks(4)
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_whole_state_dicts_and_back(make: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    reference, model = model_of(0), model_of(0, mesh)
    reference_optimizer = OPTIMIZERS[make](reference.parameters())
    optimizer = OPTIMIZERS[make](model.parameters())
    trained(reference, reference_optimizer)
    trained(model, optimizer, mesh)
    expected = get_state_dict(reference, reference_optimizer)
    found = get_state_dict(model, optimizer, options=WHOLE)
    assert_same(found, expected)

    on_first = StateDictOptions(full_state_dict=True, cpu_offload=True)
    assert_same(
        get_state_dict(model, optimizer, options=on_first),
        expected if dist.get_rank() == 0 else ({}, {}),
    )
    for broadcast in (False, True):
        given = copy.deepcopy(found) if dist.get_rank() == 0 or not broadcast else ({}, {})
        loaded = model_of(1, mesh)
        loaded_optimizer = OPTIMIZERS[make](loaded.parameters())
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        assert not any(set_model_state_dict(loaded, given[0], options=options))
        set_optimizer_state_dict(loaded, loaded_optimizer, given[1], options=options)
        assert_same(get_state_dict(loaded, loaded_optimizer, options=WHOLE), expected)
        for p, q in zip(loaded.parameters(), model.parameters(), strict=True):
            assert isinstance(p, DTensor) and p.is_leaf and p.placements == q.placements
            state = {n: v for n, v in loaded_optimizer.state[p].items() if isinstance(v, DTensor)}
            for name, value in state.items():
                assert value.placements == optimizer.state[q][name].placements
        trained(loaded, loaded_optimizer, mesh)


@pytest.mark.ranks(4)
def test_whole_state_dict_onto_meta() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    expected = model_of(0).state_dict()
    for broadcast in (False, True):
        model = model_of(1, mesh).to("meta")
        given = dict(expected) if dist.get_rank() == 0 or not broadcast else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        set_model_state_dict(model, given, options=options)
        assert isinstance(model[0].weight, DTensor) and not model[0].weight.is_meta
        assert_same(get_model_state_dict(model, options=WHOLE), expected)


@pytest.mark.ranks(4)
def test_async_save_of_a_sharded_state(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    model = model_of(0, mesh)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    trained(model, optimizer, mesh)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    expected = get_state_dict(model, optimizer, options=WHOLE)  # of which some is live
    expected = copy.deepcopy(expected)
    writing = dcp.async_save(
        {"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path
    )
    trained(model, optimizer, mesh)  # what is saved is what was
    writing.result()
    other = model_of(1, mesh)
    other_optimizer = OPTIMIZERS["momentum"](other.parameters())
    model_state, optimizer_state = get_state_dict(other, other_optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=tmp_path)
    set_model_state_dict(other, state["model"])
    set_optimizer_state_dict(other, other_optimizer, state["optimizer"])
    assert_same(get_state_dict(other, other_optimizer, options=WHOLE), expected)
