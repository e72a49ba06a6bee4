"""The examples of parallel training give the losses of one process."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.dtensor import init_device_mesh


def example(name: str) -> Any:
    path = Path(__file__).resolve().parent.parent / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def data_parallel() -> None:
    module = example("data_parallel")
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    ours, alone = module.train(module.make(), mesh), module.train(module.make(), None)
    torch.testing.assert_close(ours, alone, rtol=1e-5, atol=1e-6)
    assert ours[-1] < ours[0]


def fully_sharded(dp: int, tp: int) -> int:
    ours, alone, held = example("fully_sharded").run(dp, tp)
    torch.testing.assert_close(ours, alone, rtol=1e-5, atol=1e-6)
    assert ours[-1] < ours[0]
    return int(held)


@pytest.mark.parametrize("world_size", [2, 4])
def test_data_parallel(ranks: Any, world_size: int) -> None:
    ranks(world_size, data_parallel)


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (2, 2), (4, 1)])
def test_fully_sharded(ranks: Any, dp: int, tp: int) -> None:
    held = ranks(dp * tp, fully_sharded, dp, tp)
    assert sum(held) == 2 * 8 * 32  # no weight is anywhere twice


def long_context() -> None:
    losses = example("long_context").train(seq_len=90, steps=3)
    for ours, one_process in losses:
        assert abs(ours - one_process) < 1e-4
    assert losses[-1][0] < losses[0][0]


@pytest.mark.parametrize("world_size", [2, 3])
def test_long_context(ranks: Any, world_size: int) -> None:
    ranks(world_size, long_context)
