"""A small Mixtral: attention and routers on every rank, experts spread over the ranks.

    torchrun --nproc-per-node 2 examples/mixtral.py

Each rank has sequences of its own. Their tokens go to whatever ranks have their experts, and the
results come back. A loss balances the load of the experts, as in the original. Beside it the same
model is trained by one process, on all sequences.
"""

from __future__ import annotations

import copy
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import weft

VOCABULARY, FEATURES, HIDDEN, HEADS = 32, 32, 48, 4
EXPERTS, TOP_K, LAYERS = 5, 2, 2
SEQUENCES, LENGTH, BALANCE = 12, 16, 0.02


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(FEATURES, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, FEATURES, bias=False)
        self.w3 = nn.Linear(FEATURES, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return y


class Experts(nn.ModuleList):
    """What one process computes, in the simplest way: every expert on every token."""

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for e, expert in enumerate(self):
            y = y + (topk_weights * (topk_ids == e)).sum(-1, keepdim=True) * expert(x)
        self.last_load = torch.bincount(topk_ids.flatten(), minlength=EXPERTS)
        return y


class Block(nn.Module):
    balance: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(FEATURES) for _ in range(2))
        self.qkv = nn.Linear(FEATURES, 3 * FEATURES, bias=False)
        self.out = nn.Linear(FEATURES, FEATURES, bias=False)
        self.gate = nn.Linear(FEATURES, EXPERTS, bias=False)
        self.experts: nn.Module = Experts(Expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
        seen = functional.scaled_dot_product_attention(*qkv.chunk(3, 1), is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(-2))

        tokens = self.norms[1](x)
        logits = self.gate(tokens)
        ids, weights = weft.topk_router(logits, TOP_K)
        y = self.experts(tokens, ids, weights)
        # What part of all ranks' tokens an expert gets, by how probable the router makes it.
        part = self.experts.last_load / self.experts.last_load.sum()
        self.balance = EXPERTS * (part * logits.softmax(-1).mean((0, 1))).sum()
        return x + y


class Mixtral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, FEATURES)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(FEATURES, VOCABULARY, bias=False)

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        predicted = functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())
        return predicted + BALANCE * sum(block.balance for block in self.blocks)


def batch(step: int) -> Tensor:
    """The same sequences on every rank: each token follows from the one before, or is noise."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (SEQUENCES, LENGTH), generator=generator)
    for i in range(1, LENGTH):
        noise = torch.rand(SEQUENCES, generator=generator) < 0.1
        tokens[:, i] = torch.where(noise, tokens[:, i], (5 * tokens[:, i - 1] + 3) % VOCABULARY)
    return tokens


def train(model: Mixtral, steps: int, parallel: bool) -> list[float]:
    """The losses, on all sequences, of ranks that have a part of these each, or of one process."""
    world_size = dist.get_world_size() if parallel else 1
    spread = {
        parameter
        for module in model.modules()
        if isinstance(module, weft.ExpertParallelMLP)
        for parameter in module.parameters()
    }
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(steps):
        tokens = batch(step)
        if parallel:
            tokens = tokens.chunk(world_size)[dist.get_rank()]
        loss = model.loss(tokens) / world_size
        optimizer.zero_grad()
        loss.backward()
        if parallel:
            loss = weft.collectives.all_reduce(loss.detach())
            for parameter in model.parameters():
                if parameter not in spread:  # experts have met the tokens of all ranks
                    parameter.grad = weft.collectives.all_reduce(parameter.grad)
        optimizer.step()
        losses.append(loss.item())
    return losses


def run(steps: int, tensor_parallel_size: int = 1) -> tuple[list[float], list[float], float]:
    """Losses of the ranks and of one process, and how far their weights are apart after it."""
    torch.manual_seed(0)  # the same weights on every rank
    whole = Mixtral()
    model = copy.deepcopy(whole)
    for block in model.blocks:
        block.experts = weft.ExpertParallelMLP.from_experts(
            block.experts, tensor_parallel_size=tensor_parallel_size
        )
    losses = train(model, steps, parallel=True), train(whole, steps, parallel=False)
    saved = model.state_dict()  # whole weights: of the same names as the original
    apart = max(
        (saved[name] - value).abs().max().item() for name, value in whole.state_dict().items()
    )
    if dist.get_rank() == 0:
        print(model.blocks[0].experts)
        print(f"tokens of each expert: {model.blocks[0].experts.last_load.tolist()}")
    return *losses, apart


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    ours, alone, apart = run(steps=30)
    if dist.get_rank() == 0:
        print(f"loss {ours[0]:.4f} -> {ours[-1]:.4f}")
        difference = max(abs(a - b) for a, b in zip(ours, alone, strict=True))
        print(f"largest difference from one process: {difference:.1e}, of weights: {apart:.1e}")
    weft.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
