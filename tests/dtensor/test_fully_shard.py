"""FSDP2, `replicate` and DistributedDataParallel around modules that hold our DTensors."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy

from weft.dtensor import DTensor, Replicate, Shard, init_device_mesh
from weft.dtensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

WORDS, TOKENS = 51, 8


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return result


class Model(nn.Module):
    def __init__(self, width: int = 18, hidden: int = 46) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.Sequential(Block(width, hidden), Block(width, hidden))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.blocks(self.embed(tokens))))
        return logits


BLOCK = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}
PLAN: dict[str, Any] = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    **{f"blocks.*.{name}": style for name, style in BLOCK.items()},
}


def whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


class Trained:
    """A model beside the same one in one process, trained by the same steps.

    Attributes:
        mesh: (dp, tp), or (replicate, shard, tp).
        grad_error: the largest error of a gradient.
    """

    def __init__(self, mesh: dist.DeviceMesh, model: nn.Module, alone: nn.Module) -> None:
        self.mesh, self.model, self.alone = mesh, model, alone
        self.grad_error = 0.0
        self.optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, alone)]

    def steps(self, count: int, passes: int = 1) -> None:
        copies = self.mesh.size() // self.mesh["tp"].size()
        mine = dist.get_rank() // self.mesh["tp"].size()
        generator = torch.Generator().manual_seed(1)
        for _ in range(count):
            for last in [False] * (passes - 1) + [True]:
                tokens, targets = torch.randint(WORDS, (2, 2 * copies, TOKENS), generator=generator)
                if passes > 1:
                    self.model.set_requires_gradient_sync(last)  # type: ignore[operator]
                own = slice(2 * mine, 2 * mine + 2)
                for model, rows in [(self.model, own), (self.alone, slice(None))]:
                    logits = model(tokens[rows]).float()
                    cross_entropy(logits.flatten(0, 1), targets[rows].flatten()).backward()
            pairs = zip(self.model.parameters(), self.alone.parameters(), strict=True)
            errors = [(whole(p.grad) - q.grad).abs().max().item() for p, q in pairs]
            self.grad_error = max(self.grad_error, *errors)
            norms = [
                nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in (self.model, self.alone)
            ]
            torch.testing.assert_close(whole(norms[0]), norms[1], rtol=1e-3, atol=0.0)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def check(self, tolerance: float = 2e-6) -> None:
        """Gradients and parameters are those of the one process."""
        assert self.grad_error < tolerance
        for p, q in zip(self.model.parameters(), self.alone.parameters(), strict=True):
            torch.testing.assert_close(whole(p.detach()), q.detach(), rtol=0.0, atol=5e-4)


def trained(shape: tuple[int, ...] = (2, 2), on_meta: bool = False, **options: Any) -> Trained:
    mesh = init_device_mesh(
        "cpu", shape, mesh_dim_names=("replicate", "shard", "tp")[-len(shape) :]
    )
    dp = mesh["shard"] if len(shape) == 2 else mesh["replicate", "shard"]
    torch.manual_seed(0)
    alone = Model()
    with torch.device("meta" if on_meta else "cpu"):
        model = Model() if on_meta else copy.deepcopy(alone)
    parallelize_module(model, mesh["tp"], PLAN)
    for block in model.blocks:
        fully_shard(block, mesh=dp, **options)
    fully_shard(model, mesh=dp, **options)
    if on_meta:
        model.to_empty(device="cpu")
        whole_state = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, alone.state_dict(), options=whole_state)
    return Trained(mesh, model, alone)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("shape", "on_meta", "passes"),
    [((2, 2), False, 1), ((2, 2), True, 1), ((2, 1, 2), False, 2), ((4, 1), False, 1)],
    ids=["2x2", "made on meta", "copies, gradients of two passes", "tp of one"],
)
def test_fully_shard(shape: tuple[int, ...], on_meta: bool, passes: int) -> None:
    found = trained(shape, on_meta, reshard_after_forward=not on_meta)
    found.steps(2, passes)
    found.check()
    weight = found.model.get_parameter("head.weight")
    assert isinstance(weight, DTensor)
    # Rows 51 are cut by tp, and what a rank has of them by shard.
    ranks = shape[-1] * shape[-2]
    assert weight.to_local().shape[0] in (WORDS // ranks, WORDS // ranks + 1)


@pytest.mark.ranks(4)
def test_mixed_precision() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = trained(mp_policy=policy)
    seen = []
    found.model.get_submodule("blocks.0.up").register_forward_hook(
        lambda module, args, out: seen.append((module.weight.dtype, out.dtype))
    )
    found.steps(1)
    assert seen == [(torch.bfloat16, torch.bfloat16)]
    # Gradients of at most 0.3, computed in bf16 through five layers.
    assert 0 < found.grad_error < 0.02


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_compiled_blocks() -> None:
    found = trained()
    for block in found.model.get_submodule("blocks").children():
        block.compile(backend="aot_eager")
    found.steps(2)
    found.check()


@pytest.mark.ranks(4)
def test_checkpoint(tmp_path: Path) -> None:
    found = trained()
    found.steps(1)
    state = dict(zip("mo", get_state_dict(found.model, found.optimizers[0]), strict=True))
    dcp.save(state, checkpoint_id=tmp_path)
    with torch.no_grad():
        for parameter in found.model.parameters():
            parameter.zero_()
    state = dict(zip("mo", get_state_dict(found.model, found.optimizers[0]), strict=True))
    dcp.load(state, checkpoint_id=tmp_path)
    set_state_dict(
        found.model,
        found.optimizers[0],
        model_state_dict=state["m"],
        optim_state_dict=state["o"],
    )
    found.steps(1)
    found.check()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("how", ["replicate", "DistributedDataParallel"])
def test_replicated(how: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    alone = Model()
    model: nn.Module = copy.deepcopy(alone)
    parallelize_module(model, mesh["tp"], PLAN)
    if how == "replicate":
        replicate(model, mesh=mesh["dp"])
    else:
        model = nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    found = Trained(mesh, model, alone)
    found.steps(2)
    found.check()
