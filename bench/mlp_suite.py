"""One training step of a tensor-parallel MLP with sequence-sharded input and output.

    x (S/W, H) -gather-> (S, F/W) -> ReLU -> (S, F/W) -scatter-> y (S/W, H), forward and backward

Variants:
    arithmetic      this rank's matmuls and ReLU, by the library that weft takes for its own, on
                    inputs that are there already: the bound
    torch alone     the same by nn.Linear
    weft            ColumnParallelLinear and RowParallelLinear
    weft DTensor    parallelize_module of weft.dtensor
    torch DTensor   parallelize_module of torch.distributed.tensor, on Gloo
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from weft import ColumnParallelLinear, RowParallelLinear
from weft.bench.harness import Case, case, interleaved
from weft.kernels.dense import WeightGrad, mm

SHAPES = ((512, 512, 2048), (2048, 512, 2048), (256, 2048, 4096), (4096, 256, 512))
BASELINE = "torch DTensor"
RATIOS = (
    ("weft", "arithmetic"),
    ("weft DTensor", "arithmetic"),
    ("torch DTensor", "weft"),
)


class MLP(nn.Module):
    """The two linears and the activation between them."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.act, self.down = up, nn.ReLU(), down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.act(self.up(x)))
        return y


class _Local(nn.Linear):
    """nn.Linear on the matmuls that the host engine uses, with no communication."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _LocalMatmul.apply(input, self.weight.t())
        return y


class _LocalMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return mm(x, w)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        grad = WeightGrad(w)
        grad.add(x, dy)
        return mm(dy, w.t()), grad.result()


def _parallelized(model: nn.Module, package: Any, placements: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shard = placements.Shard(0)
    plan = {
        "up": package.ColwiseParallel(input_layouts=shard),
        "down": package.RowwiseParallel(output_layouts=shard),
    }
    result: nn.Module = package.parallelize_module(model, mesh, plan)
    return result


def _step(model: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    model.zero_grad(set_to_none=True)
    x.grad = None
    y: torch.Tensor = model(x)
    y.backward(dy)
    return y


def variants(tokens: int, hidden: int, ffn: int) -> dict[str, Callable[[], torch.Tensor]]:
    """The step of each variant on this rank, checked against one process."""
    import torch.distributed.tensor.parallel as torch_parallel

    import weft.dtensor as weft_placements
    import weft.dtensor.parallel as weft_parallel

    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    x_whole = torch.randn(tokens, hidden, generator=generator)
    dy_whole = torch.randn(tokens, hidden, generator=generator)
    x = x_whole.chunk(world_size)[rank].clone().requires_grad_()
    dy = dy_whole.chunk(world_size)[rank].clone()

    up, down = nn.Linear(hidden, ffn, bias=False), nn.Linear(ffn, hidden, bias=False)
    for linear in (up, down):
        nn.init.normal_(linear.weight, std=linear.in_features**-0.5, generator=generator)
    whole = MLP(up, down)
    ours = MLP(ColumnParallelLinear.from_linear(up), RowParallelLinear.from_linear(down))
    share = ffn // world_size
    plain = MLP(nn.Linear(hidden, share, bias=False), nn.Linear(share, hidden, bias=False))
    alone = MLP(_Local(hidden, share, bias=False), _Local(share, hidden, bias=False))
    models = {
        "weft": ours,
        "weft DTensor": _parallelized(copy.deepcopy(whole), weft_parallel, weft_placements),
        "torch DTensor": _parallelized(
            copy.deepcopy(whole), torch_parallel, torch.distributed.tensor
        ),
    }
    x_alone = x_whole.clone().requires_grad_()
    x_reference = x_whole.clone().requires_grad_()
    expected = _step(whole, x_reference, dy_whole).chunk(world_size)[rank]
    assert x_reference.grad is not None
    for name, model in models.items():
        y = _step(model, x, dy)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4, msg=f"y of {name} is wrong")
        torch.testing.assert_close(
            x.grad, x_reference.grad.chunk(world_size)[rank], rtol=1e-4, atol=1e-4
        )
    steps: dict[str, Callable[[], torch.Tensor]] = {
        "arithmetic": lambda: _step(alone, x_alone, dy_whole),
        "torch alone": lambda: _step(plain, x_alone, dy_whole),
    }
    for name, model in models.items():
        steps[name] = lambda model=model: _step(model, x, dy)  # type: ignore[misc]
    return steps


def run(shape: tuple[int, int, int], rounds: int) -> Case:
    """One shape, on the ranks of the running process group."""
    table = interleaved(variants(*shape), rounds)
    return case("x".join(map(str, shape)), table, RATIOS)
