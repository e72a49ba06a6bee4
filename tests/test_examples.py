"""The examples give what one process gives."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import runpy
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool

from weft.dtensor import init_device_mesh

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def example(name: str) -> Any:
    path = EXAMPLES / f"{name}.py"
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


def scripts(ports: dict[str, int]) -> dict[str, str]:
    """What scripts print where torchrun has set the environment: the port of each is its own."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    told = {}
    for name, port in ports.items():
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        told[name] = printed.getvalue()
    return told


def test_scripts_for_torchrun(own_ranks: Callable[[int], RankPool]) -> None:
    ports = {}
    for name in ("tensor_parallel_mlp", "drop_in_linear"):
        with socket.create_server(("localhost", 0)) as free:
            ports[name] = free.getsockname()[1]
    first, second = own_ranks(2).run(scripts, ports, timeout_s=60)
    assert set(second.values()) == {""}
    for told in first.values():
        (difference,) = re.findall(r"difference from one process: (\S+)", told)
        assert float(difference) < 1e-5
