"""A training step of two linears with something between them, tensor parallel, in four ways.

    x (S/W, H) -gather-> (S, F/W) -> middle -> (S, F'/W) -scatter-> y (S/W, H), forward and backward

The feed-forward and the attention block of a decoder are of this form. Variants:

    torch alone     a rank's share of the arithmetic by nn.Linear, on local inputs
    weft            ColumnParallelLinear and RowParallelLinear
    weft DTensor    parallelize_module of weft.dtensor
    torch DTensor   parallelize_module of torch.distributed.tensor, on the process group

The bound, "arithmetic", is torch alone with the library that weft uses for its matmuls.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weft import ColumnParallelLinear, RowParallelLinear
from weft.bench.problem import INPUTS, Options, Prepared, arrived
from weft.collectives.ranks.group import process_group
from weft.kernels.engine.local_matmul import WeightGrad, mm

MAIN, PEER = "weft", "torch DTensor"
# Above this many weights the oracle is computed in fp32: in float64 it would not fit.
_LARGE = 1 << 28
# A hidden value that rounds to the other side of ReLU's kink changes a row of gradients a little.
_TOLERANCE = {torch.float64: 1e-2, torch.float32: 1e-2, torch.bfloat16: 5e-2, torch.float16: 1e-2}

Middle = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class LinearPair:
    """What the whole layer is.

    Attributes:
        up, down: (in, out) features of the two linears.
        middle: what is between them, on any number of whole groups of features.
    """

    tokens: int
    up: tuple[int, int]
    down: tuple[int, int]
    middle: Middle


def mlp(tokens: int, hidden: int, ffn: int) -> LinearPair:
    """The plainest: ReLU between the linears."""
    return LinearPair(tokens, (hidden, ffn), (ffn, hidden), torch.relu)


def swiglu(tokens: int, hidden: int, ffn: int, ranks: int) -> LinearPair:
    """One half of the first linear's features gates the other; each rank has both halves of its."""
    share = ffn // ranks

    def middle(y: torch.Tensor) -> torch.Tensor:
        gate, up = y.unflatten(-1, (-1, 2, share)).unbind(-2)
        gated: torch.Tensor = nn.functional.silu(gate) * up
        return gated.flatten(-2)

    return LinearPair(tokens, (hidden, 2 * ffn), (ffn, hidden), middle)


def attention_pair(
    tokens: int, hidden: int, heads: int, kv_heads: int, head_dim: int
) -> LinearPair:
    """Causal attention of one sequence; a key and value head and its query heads stay together."""
    queries = heads // kv_heads

    def middle(y: torch.Tensor) -> torch.Tensor:
        groups = y.unflatten(-1, (-1, queries + 2, head_dim))  # (S, KV, queries + 2, E)
        q, k, v = (
            t.flatten(1, 2).transpose(0, 1)[None] for t in groups.split((queries, 1, 1), dim=2)
        )
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)

    inner = heads * head_dim
    return LinearPair(tokens, (hidden, inner + 2 * kv_heads * head_dim), (inner, hidden), middle)


class _Module(nn.Module):
    def __init__(self, up: nn.Module, down: nn.Module, middle: Middle) -> None:
        super().__init__()
        self.up, self.down, self.middle = up, down, middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.middle(self.up(x)))
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


def mesh_of_ranks(device: str) -> DeviceMesh:
    """A mesh of the existing group: init_device_mesh may use NCCL, which takes no shared GPUs."""
    return DeviceMesh.from_group(process_group(None), device)


def _parallelized(model: nn.Module, device: str, package: Any, placements: Any) -> nn.Module:
    mesh = mesh_of_ranks(device)
    shard = placements.Shard(0)
    plan = {
        "up": package.ColwiseParallel(input_layouts=shard),
        "down": package.RowwiseParallel(output_layouts=shard),
    }
    result: nn.Module = package.parallelize_module(model, mesh, plan)
    return result


def _step(model: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """y and the gradients of x and of both weights, this rank's part."""
    model.zero_grad(set_to_none=True)
    x.grad = None
    y = model(x)
    y.backward(dy)
    grads = [x.grad, *(p.grad for p in model.parameters())]
    return [arrived(t) for t in (y, *grads)]


def prepare(block: LinearPair, options: Options) -> Prepared:
    """The step of each variant on this rank."""
    import torch.distributed.tensor.parallel as torch_parallel

    import weft.dtensor as weft_placements
    import weft.dtensor.parallel as weft_parallel

    rank, W = dist.get_rank(), dist.get_world_size()
    hidden = block.up[0]
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(options.device, options.dtype)

    def linear(kind: type[nn.Linear], features: tuple[int, int]) -> nn.Linear:
        return kind(*features, bias=False, device=options.device, dtype=options.dtype)

    def share(kind: type[nn.Linear]) -> nn.Module:
        (up_in, up_out), (down_in, down_out) = block.up, block.down
        up, down = linear(kind, (up_in, up_out // W)), linear(kind, (down_in // W, down_out))
        return _Module(up, down, block.middle)

    xs_whole = [drawn(block.tokens, hidden) for _ in range(INPUTS)]
    dy_whole = drawn(block.tokens, hidden)
    xs = [x.chunk(W)[rank].clone().requires_grad_() for x in xs_whole]
    dy = dy_whole.chunk(W)[rank].clone()
    up, down = linear(nn.Linear, block.up), linear(nn.Linear, block.down)
    for each in (up, down):
        with torch.no_grad():
            each.weight.copy_(drawn(*each.weight.shape) * each.in_features**-0.5)
    whole = _Module(up, down, block.middle)
    models = {
        MAIN: _Module(
            ColumnParallelLinear.from_linear(up, sequence_dim=0),
            RowParallelLinear.from_linear(down, sequence_dim=0),
            block.middle,
        ),
        "weft DTensor": _parallelized(
            copy.deepcopy(whole), options.device, weft_parallel, weft_placements
        ),
        PEER: _parallelized(
            copy.deepcopy(whole), options.device, torch_parallel, torch.distributed.tensor
        ),
    }

    def expected() -> list[torch.Tensor]:
        small = sum(p.numel() for p in whole.parameters()) < _LARGE
        dtype = torch.float64 if small else torch.float32
        x = xs_whole[0].detach().to(dtype).requires_grad_()
        y, dx, dup, ddown = _step(copy.deepcopy(whole).to(dtype), x, dy_whole.to(dtype))
        rows = (y, dx, dup)
        return [*(t.chunk(W)[rank] for t in rows), ddown.chunk(W, 1)[rank]]

    for x in xs_whole:
        x.requires_grad_()
    plain, alone = share(nn.Linear), share(_Local)

    def step(model: nn.Module) -> Callable[[int], list[torch.Tensor]]:
        return lambda i: _step(model, xs[i], dy)

    return Prepared(
        {name: step(model) for name, model in models.items()}
        | {"torch alone": lambda i: _step(plain, xs_whole[i], dy_whole)},
        {"arithmetic": lambda i: _step(alone, xs_whole[i], dy_whole)},
        expected=expected,
        unchecked=("torch alone",),
        tolerance=_TOLERANCE[options.dtype],
        main=MAIN,
        peer=PEER,
    )
