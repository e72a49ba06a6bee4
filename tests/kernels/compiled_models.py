"""Models that do not know weft, parallel as their authors make them.

    torchrun --nproc-per-node 2 -m tests.kernels.compiled_models

prints for each its collectives, those fused, why others stay, milliseconds of a step, torch's and
rewritten, and seconds of the first step, which compiles, with empty caches. Names of models, or
shapes of torch's DTensor MLP, tokens x hidden x ffn as in 512x512x2048, take only these.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import (
    all_to_all_single,
    all_to_all_single_autograd,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

import weft
from weft.kernels.graphs.receipts import receipts_of


@dataclass(frozen=True)
class Size:
    """Of a model, and of its input."""

    layers: int = 1
    width: int = 16
    hidden: int = 48
    heads: int = 4
    kv_heads: int = 2
    vocabulary: int = 32
    batch: int = 2
    length: int = 8


class Attention(nn.Module):
    """torchtitan's: the names, and what is reshaped when."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_dim = size.width // size.heads
        kv = size.kv_heads * self.head_dim
        self.wq = nn.Linear(size.width, size.width, bias=False)
        self.wk = nn.Linear(size.width, kv, bias=False)
        self.wv = nn.Linear(size.width, kv, bias=False)
        self.wo = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        b, length, _ = x.shape
        q, k, v = (w(x).view(b, length, -1, self.head_dim) for w in (self.wq, self.wk, self.wv))
        q, k = rotated(q, rope), rotated(k, rope)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        result: torch.Tensor = self.wo(y.transpose(1, 2).contiguous().view(b, length, -1))
        return result


def rotated(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    rope = rope.view(1, x.shape[1], 1, -1)
    return torch.view_as_real(pairs * rope).flatten(3).type_as(x)


class FeedForward(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(size.width, size.hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return y


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(size), FeedForward(size)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(size.width), nn.RMSNorm(size.width)

    def forward(self, x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        h = x + self.attention(self.attention_norm(x), rope)
        y: torch.Tensor = h + self.feed_forward(self.ffn_norm(h))
        return y


class Llama(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleDict({str(i): Block(size) for i in range(size.layers)})
        self.norm = nn.RMSNorm(size.width)
        self.output = nn.Linear(size.width, size.vocabulary, bias=False)
        head_dim = size.width // size.heads
        speeds = 1 / 5e5 ** (torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.outer(torch.arange(size.length).float(), speeds)
        self.register_buffer("rope", torch.polar(torch.ones_like(angles), angles))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.rope)
        y: torch.Tensor = self.output(self.norm(h))
        return y


def torchtitan(size: Size, mesh: DeviceMesh) -> nn.Module:
    """Its plan of tensor and sequence parallelism for Llama 3, without asynchronous TP."""
    model = Llama(size)
    parallelize_module(
        model,
        mesh,
        {
            "tok_embeddings": RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(1)
            ),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )  # fmt: skip
    plan: dict[str, ParallelStyle] = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
        ),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.w3": ColwiseParallel(),
    }
    for layer in model.layers.values():
        parallelize_module(layer, mesh, plan)
    return model


def sharded_too(size: Size, mesh: DeviceMesh, backend: Any) -> nn.Module:
    """torchtitan's order: tensor parallel, each layer compiled, then FSDP2 over the other dim."""
    model = torchtitan(size, mesh["tp"])
    for layer in model.layers.values():
        layer.compile(backend=backend, fullgraph=True)
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def transformers_llama(size: Size, mesh: DeviceMesh) -> nn.Module:
    """Hugging Face's, with the plan of its own (`tp_plan="auto"` loads a checkpoint by it)."""
    # It looks for a package `kernels`: the checkout must not be on the path.
    with mock.patch("sys.path", [p for p in sys.path if not Path(p, "kernels").is_dir()]):
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    config = LlamaConfig(
        vocab_size=size.vocabulary, hidden_size=size.width, intermediate_size=size.hidden,
        num_hidden_layers=size.layers, num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    plan = model._expand_parallel_plan(dict(model._tp_plan))
    apply_tensor_parallelism(model, mesh, plan)
    return model


class ServedLayer(nn.Module):
    """A decoder layer as vLLM runs it: whole tokens, sums in place, fused_add_rms_norm."""

    def __init__(self, size: Size, parts: int) -> None:
        super().__init__()
        width, share, hidden = size.width, size.width // parts, size.hidden // parts
        self.qkv_proj = nn.Linear(width, 3 * share, bias=False)
        self.o_proj = nn.Linear(share, width, bias=False)
        self.gate_up_proj = nn.Linear(width, 2 * hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)
        self.norms = nn.ParameterList([nn.Parameter(torch.ones(width)) for _ in range(2)])
        self.head_dim = width // size.heads

    def added_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = x.float() + residual.float()
        y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return y.to(x.dtype) * weight, wide.to(x.dtype)

    def summed(self, y: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(y)
        return y

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.added_norm(x, residual, self.norms[0])
        q, k, v = (
            each.unflatten(-1, (-1, self.head_dim)).transpose(0, 1)
            for each in self.qkv_proj(x).chunk(3, -1)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.summed(self.o_proj(y.transpose(0, 1).flatten(1)))
        x, residual = self.added_norm(y, residual, self.norms[1])
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.summed(self.down_proj(functional.silu(gate) * up)), residual


class Experts(nn.Module):
    """As torchtitan has them: counts first, then rows, put in order by what was counted."""

    def __init__(self, width: int = 16, hidden: int = 24, experts: int = 4) -> None:
        super().__init__()
        self.experts, own = experts, experts // dist.get_world_size()
        up, down = (own, width, hidden), (own, hidden, width)
        sizes = {"up": up, "gate": up, "down": down}
        for name, size in sizes.items():
            setattr(self, name, nn.Parameter(torch.randn(size).bfloat16() / size[1] ** 0.5))

    def sent(self, counts: torch.Tensor) -> torch.Tensor:
        """How many rows go to each rank."""
        return counts.view(dist.get_world_size(), -1).sum(1)

    def place(self, theirs: torch.Tensor, count: int) -> torch.Tensor:
        """Where each row of the order of experts is in that of ranks."""
        parts, own = theirs.shape
        lengths = theirs.t().reshape(-1)
        starts = (theirs.view(-1).cumsum(0) - theirs.view(-1)).view(parts, -1).t().reshape(-1)
        block = torch.arange(parts * own).repeat_interleave(lengths, output_size=count)
        return torch.arange(count) - (lengths.cumsum(0) - lengths)[block] + starts[block]

    def ordered(self, rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        return rows[place]

    def restored(self, made: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        back = torch.empty_like(made)
        back[place] = made
        return back

    def forward(self, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        parts, group = dist.get_world_size(), dist.group.WORLD
        order = ids.view(-1).argsort(stable=True)
        counts = torch.zeros(self.experts, dtype=torch.int64)
        counts = counts.index_add(0, ids.view(-1), torch.ones_like(order))
        with torch.no_grad():
            theirs = all_to_all_single(counts, None, None, group)
            theirs = torch.ops._c10d_functional.wait_tensor(theirs).view(parts, -1)
            sends, receives = self.sent(counts).tolist(), theirs.sum(1).tolist()
        rows = all_to_all_single_autograd(x[order // ids.shape[1]], receives, sends, group)
        place = self.place(theirs, rows.shape[0])
        ends = theirs.sum(0).cumsum(0).int()
        rows = self.ordered(rows, place)
        given = rows.bfloat16()
        gate, up = (torch._grouped_mm(given, w, offs=ends) for w in (self.gate, self.up))
        made = torch._grouped_mm(functional.silu(gate) * up, self.down, offs=ends)
        back = self.restored(made.type_as(rows), place)
        back = all_to_all_single_autograd(back, sends, receives, group)
        back = back * scores.view(-1)[order].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, order // ids.shape[1], back)


def routed(
    tokens: int, to: int | None, width: int = 16, experts: int = 4, top_k: int = 2
) -> list[torch.Tensor]:
    """Tokens, ids and scores; all for experts `to` and behind, if there is one."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(tokens, width, generator=generator).bfloat16()
    scores = torch.rand(tokens, top_k, generator=generator).bfloat16()
    ids = torch.rand(tokens, experts, generator=generator).topk(top_k, -1)[1]
    same = torch.arange(top_k) + (to or 0)
    return [x, ids if to is None else same.repeat(tokens, 1), scores]


def made(kind: str, size: Size, backend: Any) -> tuple[nn.Module, Callable[..., Any]]:
    """A parallel model, and how it is called: compiled, unless there is no backend."""
    ranks = dist.get_world_size()
    if kind == "FSDP2 x TP":
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
        model = sharded_too(size, mesh, backend or "eager")
        return model, model
    mesh = init_device_mesh("cpu", (ranks,))
    make = {"torchtitan": torchtitan, "transformers": transformers_llama}[kind]
    model = make(size, mesh)
    return model, model if backend is None else torch.compile(model, backend=backend)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def as_one(model: nn.Module, size: Size) -> nn.Module:
    """A model with the same weights that is not parallel."""
    if isinstance(model, Llama):
        one: nn.Module = Llama(size)
    else:
        one = type(model)(model.config)
    one.load_state_dict({name: whole(each) for name, each in model.state_dict().items()})
    return one


def step(
    model: Callable[..., Any], parameters: list[nn.Parameter], tokens: torch.Tensor, amp: bool
) -> torch.Tensor:
    """Forward, backward, and a step of SGD; returns the logits."""
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        y = model(tokens)
    y = getattr(y, "logits", y)
    loss = functional.cross_entropy(y.float().flatten(0, 1), tokens.roll(-1, 1).flatten())
    loss.backward()
    torch.optim.SGD(parameters, lr=0.5).step()
    for each in parameters:
        each.grad = None
    logits: torch.Tensor = y.detach()
    return logits


def mlp(shape: str) -> tuple[nn.Module, torch.Tensor]:
    """Torch's column and row parallel styles, and this rank's shard of the tokens."""
    tokens, hidden, ffn = map(int, shape.split("x"))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(hidden, ffn), nn.ReLU(), nn.Linear(ffn, hidden))
    rows = Shard(0)
    plan = {
        "0": ColwiseParallel(input_layouts=rows),
        "2": RowwiseParallel(output_layouts=rows),
    }
    parallelize_module(model, mesh, plan)
    return model, torch.randn(tokens // dist.get_world_size(), hidden, requires_grad=True)


def slowest(seconds: list[list[float]]) -> list[float]:
    """Medians of the slower rank."""
    medians = torch.tensor([statistics.median(each) for each in seconds])
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    found: list[float] = medians.tolist()
    return found


KINDS = ("torchtitan", "FSDP2 x TP", "transformers", "served", "experts")


def runner(kind: str, backend: Any) -> tuple[Callable[[], Any], Any]:
    """A step of a model at the size that is timed, and what `weft.explain` takes of it."""
    size, parts = Size(1, 512, 1408, 8, 4, 1024, 2, 512), dist.get_world_size()
    torch.manual_seed(0)
    if kind[0].isdigit():
        styled, rows = mlp(kind)
        compiled = torch.compile(styled, backend=backend)
        leaves = [rows, *styled.parameters()]
        return lambda: differentiated(compiled(rows).sum(), leaves), compiled
    if kind == "served":
        layer = ServedLayer(size, parts).bfloat16().requires_grad_(False)
        served = torch.compile(layer, backend=backend, fullgraph=True)
        hidden, residual = (torch.randn(size.length, size.width).bfloat16() for _ in range(2))
        return lambda: served(hidden, residual), served
    if kind == "experts":
        experts = Experts(size.width, size.hidden, 8)
        given = routed(size.batch * size.length // parts, None, size.width, 8)
        x, ids, scores = (each.requires_grad_(each.is_floating_point()) for each in given)
        call = torch.compile(experts, backend=backend, fullgraph=True)
        leaves = [x, scores, *experts.parameters()]
        return lambda: differentiated(call(x, ids, scores).float().square().sum(), leaves), call
    model, run = made(kind, size, backend)
    parameters = list(model.parameters())
    tokens = torch.randint(size.vocabulary, (size.batch, size.length))
    told = model.layers["0"] if kind == "FSDP2 x TP" else run  # type: ignore[index]
    return lambda: step(run, parameters, tokens, False), told


def differentiated(loss: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    """Gradients as a step of training finds them: none is there to be added to."""
    loss.backward()
    for each in leaves:
        each.grad = None


def seconds_of(run: Callable[[], Any]) -> float:
    dist.barrier()
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def time_steps(kind: str, times: int = 9) -> None:
    """Steps as torch and as weft compile them, in turn; the slower rank's median.

    Of the first steps, the quicker of two.
    """
    from torch._inductor import utils

    empty: Any = getattr(utils, "fresh_cache", None) or utils.fresh_inductor_cache
    first: list[list[float]] = [[], []]
    told: list[Any] = []
    for _ in range(2):
        torch._dynamo.reset()
        runs = [runner(kind, backend) for backend in ("inductor", weft.compile_backend)]
        before = len(receipts_of(runs[1][1]))
        for (run, _), into in zip(runs, first, strict=True):
            with empty():
                into.append(seconds_of(run))
        told = told or [*receipts_of(runs[1][1])[before:]]
    steps = [[seconds_of(run) for run, _ in runs] for _ in range(1 + times)][1:]
    torchs, wefts, by_torch, by_weft = slowest(
        [*map(list, zip(*steps, strict=True)), *([min(f)] for f in first)]
    )
    fused, missed = sum(bool(r.fused) for r in told), sorted({r.why for r in told if not r.fused})
    cells = [kind, dist.get_world_size(), len(told), fused, "; ".join(missed)]
    cells += [f"{1e3 * torchs:.1f}", f"{1e3 * wefts:.1f}", f"{torchs / wefts:.2f}"]
    cells += [f"{by_torch:.1f}", f"{by_weft:.1f}", f"{by_weft / by_torch:.2f}"]
    if dist.get_rank() == 0:
        print("|", *(f"{cell} |" for cell in cells), flush=True)


def main() -> None:
    """As the command line asks."""
    dist.init_process_group("gloo")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    for kind in sys.argv[1:] or KINDS:
        time_steps(kind)
    weft.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
