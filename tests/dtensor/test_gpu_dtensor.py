"""DTensor on GPUs, a rank a GPU or several on one, against one device. `pytest -m gpu`."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import GpuRanks
from torch import nn
from torch.nn import functional

from weft import dtensor
from weft.collectives import resolve
from weft.dtensor import DeviceMesh, Partial, Replicate, Shard, checkpoint, parallel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and -m gpu"),
]


def gpus() -> DeviceMesh:
    """A mesh on the ranks' own group: init_device_mesh may use NCCL, which takes no shared GPU."""
    return DeviceMesh.from_group(resolve().pg, "cuda")


def whole(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).cuda()


def layouts_body() -> None:
    """Every layout into every other, uneven ones too, and ops with their gradients."""
    W = dist.get_world_size()
    mesh = gpus()
    x, w = whole(4 * W + 1, 24), whole(24, 3 * W, seed=1)
    for source in (Shard(0), Shard(1), Replicate(), Partial()):
        given = x / W if source == Partial() else x
        there = [Replicate()] if source == Partial() else [source]
        local = dtensor.distribute_tensor(given, mesh, there).to_local()
        placed = dtensor.DTensor.from_local(
            local, mesh, [source], run_check=False, shape=x.shape, stride=x.stride()
        )
        for target in (Shard(0), Shard(1), Replicate()):
            moved = placed.redistribute(placements=[target])
            expected = dtensor.distribute_tensor(x, mesh, [target]).to_local()
            torch.testing.assert_close(moved.to_local(), expected)
    for placements in ([Shard(0)], [Shard(1)]):
        theirs: list[Any] = [t.clone().requires_grad_() for t in (x, w)]
        ours: list[Any] = [
            dtensor.distribute_tensor(t, mesh, placements).requires_grad_() for t in (x, w)
        ]
        losses: list[Any] = [
            functional.cross_entropy(
                functional.layer_norm(a @ b, (3 * W,)), (a @ b).detach().argmax(-1)
            )
            for a, b in (theirs, ours)
        ]
        losses[0].backward()
        losses[1].backward()
        torch.testing.assert_close(losses[1].full_tensor(), losses[0])
        for ours_, theirs_ in zip(ours, theirs, strict=True):
            torch.testing.assert_close(ours_.grad.full_tensor(), theirs_.grad)
    logits = whole(9, 5 * W + 1, seed=2)
    labels = logits.argmin(-1)
    alone = logits.clone().requires_grad_()
    cut: Any = dtensor.distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
    functional.cross_entropy(alone, labels).backward()
    functional.cross_entropy(cut, dtensor.distribute_tensor(labels, mesh, [Replicate()])).backward()
    torch.testing.assert_close(cut.grad.full_tensor(), alone.grad)


def test_layouts(gpu_ranks: GpuRanks) -> None:
    gpu_ranks.run(layouts_body, timeout_s=200)


def random_body() -> None:
    """What one device draws, and the state that it leaves its generator in."""
    mesh = gpus()
    x = whole(37, 24)
    calls: dict[str, Callable[[Any], Any]] = {
        "normal": lambda t: t.normal_(),
        "dropout": lambda t: functional.dropout(t, 0.4),
        "bernoulli": lambda t: torch.bernoulli(t.sigmoid()),
        "rand_like": torch.rand_like,
    }
    for placements in ([Shard(0)], [Shard(1)], [Replicate()]):
        for name, call in calls.items():
            torch.manual_seed(5)
            expected, state = call(x.clone()), torch.cuda.get_rng_state()
            torch.manual_seed(5)
            drawn = call(dtensor.distribute_tensor(x.clone(), mesh, placements))
            assert torch.equal(drawn.full_tensor(), expected), (name, placements)
            assert torch.equal(torch.cuda.get_rng_state(), state), (name, placements)


def test_random_numbers(gpu_ranks: GpuRanks) -> None:
    gpu_ranks.run(random_body, timeout_s=100)


def training_body(folder: str) -> None:
    """Steps of a parallel layer, and a checkpoint of it, against one device."""
    W = dist.get_world_size()
    mesh = gpus()
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(32, 16 * W), nn.GELU(), nn.Linear(16 * W, 32)).cuda()
    shared = copy.deepcopy(alone)
    plan = {
        "0": parallel.ColwiseParallel(input_layouts=Shard(0)),
        "2": parallel.RowwiseParallel(output_layouts=Shard(0)),
    }
    parallel.parallelize_module(shared, mesh, plan)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (alone, shared)]
    for step in range(3):
        x = whole(8 * W, 32, seed=step)
        mine = x.chunk(W)[dist.get_rank()]
        alone(x).square().sum().backward()
        shared(mine).square().sum().backward()
        for model, optimizer in zip((alone, shared), optimizers, strict=True):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    theirs, ours = alone.state_dict(), shared.state_dict()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name].full_tensor(), tensor, rtol=1e-3, atol=1e-4)
    checkpoint.save(ours, folder)
    again = {
        name: dtensor.distribute_tensor(torch.zeros_like(tensor), mesh, [Shard(0)])
        for name, tensor in theirs.items()
    }
    checkpoint.load(again, folder)
    for name, tensor in ours.items():
        assert torch.equal(again[name].full_tensor(), tensor.full_tensor()), name


def test_training_and_checkpoint(gpu_ranks: GpuRanks, tmp_path: Path) -> None:
    gpu_ranks.run(training_body, str(tmp_path / "saved"), timeout_s=200)


@pytest.mark.skipif(os.environ.get("GPU_RANKS", "2")[0] != "2", reason="it is of two ranks")
def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.demo.model import LlamaShape
    from weft.demo.run import run_demo
    from weft.demo.train import Run

    # In the first step all kernels are compiled, and nobody hears of it.
    monkeypatch.setenv("WEFT_TIMEOUT_S", "120")
    shape = LlamaShape(d_model=64, layers=1, heads=4, kv_heads=2, ffn=64, seq_len=32)
    run = Run(shape, steps=3, batch=2, lr=1e-3, seed=0, device="cuda", text_bytes=4)
    found = run_demo(run, 2, tmp_path)
    assert found.agrees, found.differences
    assert (tmp_path / "demo.png").exists()
