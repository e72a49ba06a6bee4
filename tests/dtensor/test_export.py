"""torch.export: what weft's ops are in an exported program, and what of DTensors can be in one."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dtensors import world
from torch import nn
from torch.export import Dim, export
from torch.nn import functional

import weft
from weft.dtensor import (
    DTensor,
    Shard,
    distribute_module,
    distribute_tensor,
    parallel,
)


def _layers() -> nn.Module:
    torch.manual_seed(dist.get_rank())
    return nn.Sequential(
        weft.ColumnParallelLinear(6, 8, sequence_dim=0),
        nn.GELU(),
        weft.RowParallelLinear(8, 6, bias=False, sequence_dim=0),
    )


def linear_layers(stricts: Sequence[bool] = (False, True)) -> None:
    layers = _layers()
    x = torch.randn(4, 6)
    for strict in stricts:
        program = export(layers, (x,), dynamic_shapes=({0: Dim.AUTO},), strict=strict)
        assert [str(node.target) for node in program.graph.nodes if "weft" in str(node.target)] == [
            "weft.all_gather_matmul.default",
            "weft.matmul_reduce_scatter.default",
        ]
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        for module in (program.module(), torch.export.load(file).module()):
            for rows in (4, 10):
                given = torch.randn(rows, 6)
                assert torch.equal(module(given), layers(given))


@pytest.mark.ranks(2)
def test_linear_layers() -> None:
    linear_layers()


def test_on_virtual_ranks(virtual_ranks) -> None:
    # Before torch 2.13 its tracer does not find the name of a virtual group.
    stricts = (False,) if torch.__version__ < "2.13" else (False, True)
    virtual_ranks(2, linear_layers, stricts)


def ahead_of_time(folder: str) -> None:
    layers, rank = _layers(), dist.get_rank()
    x = torch.randn(4, 6)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/{rank}"  # both would write the same files
    with torch.no_grad():
        program = export(layers, (x,), dynamic_shapes=({0: Dim.AUTO},))
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=f"{folder}/{rank}.pt2"
        )
        module: Any = torch._inductor.aoti_load_package(path)
        for rows in (4, 10):
            given = torch.randn(rows, 6)
            torch.testing.assert_close(module(given), layers(given))


@pytest.mark.sweep
def test_ahead_of_time(own_ranks, tmp_path: Path) -> None:
    own_ranks(2).run(ahead_of_time, str(tmp_path), timeout_s=300)


class _Sharded(nn.Module):
    """Attention of what a sharded weight makes of a DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.randn(6, 6), world(), [Shard(0)]))

    def forward(self, x: Any) -> Any:
        y = functional.layer_norm(functional.linear(x, self.weight), (6,)).relu() @ self.weight
        y = y.unflatten(0, (1, 2, -1))
        return functional.scaled_dot_product_attention(y, y, y).sum(-1)


class _Made(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mesh = world()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(x, self.mesh, [Shard(0)]).sum()


class _Moved(nn.Module):
    def forward(self, x: DTensor) -> torch.Tensor:
        return (x * 2).full_tensor()


@pytest.mark.ranks(2)
def test_dtensors() -> None:
    mesh = world()
    torch.manual_seed(0)
    whole = torch.randn(8, 6)
    x = distribute_tensor(whole, mesh, [Shard(0)])
    linears = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
    for module in (_Sharded(), distribute_module(linears, mesh)):
        for strict in (False, True):
            result = export(module, (x,), strict=strict).module()(x)
            torch.testing.assert_close(result.full_tensor(), module(x).full_tensor())
    local = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
    plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    refused = {
        "from_local": (parallel.parallelize_module(local, mesh, plan), whole),
        "distribute_tensor": (_Made(), whole),
        "redistribute": (_Moved(), x),
    }
    for what, (model, given) in refused.items():
        with pytest.raises(NotImplementedError, match=f"{what}: torch.export records ops on DT"):
            export(model, (given,))
