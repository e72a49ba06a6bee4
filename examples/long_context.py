"""Train a Llama on sequences of 8k bytes, each rank holding a part of every sequence.

    torchrun --nproc-per-node 2 examples/long_context.py [--seq-len 8192] [--steps 4]

The model is plain: within `context_parallel` its attention reaches the keys of all ranks, in one
ring attention a layer, and no rank ever holds a whole sequence of activations. Rank 0 trains the
same model on whole sequences beside it, and prints both losses.
"""

from __future__ import annotations

import argparse
import copy
import os

import torch
import torch.distributed as dist
from torch.nn import functional

import weft
from weft.demo.data import standard_library
from weft.demo.model import Llama, LlamaShape
from weft.dtensor import init_device_mesh
from weft.dtensor.experimental import context_parallel


def train(seq_len: int, steps: int) -> list[tuple[float, float]]:
    """(loss of the ranks together, loss of one process) of each step; the same on every rank."""
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    corpus = standard_library()
    torch.manual_seed(0)  # the same weights on every rank
    shape = LlamaShape(d_model=64, layers=2, heads=4, kv_heads=2, ffn=128, seq_len=seq_len)
    plain = Llama(shape)
    model = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, plain)]
    turns = [block.attention.turns for block in model.blocks]
    losses = []
    for step in range(steps):
        inputs, labels = (part.clone() for part in corpus.batch(step, 1, seq_len, seed=0))
        whole = _loss(plain, inputs, labels) if dist.get_rank() == 0 else torch.zeros(())

        # Every rank has its share of the bytes in the buffers, and of the sum in its loss.
        with context_parallel(
            mesh, buffers=[inputs, labels, *turns], buffer_seq_dims=[1, 1, *[0] * len(turns)]
        ):
            loss = _loss(model, inputs, labels, seq_len)
        for parameter in model.parameters():
            weft.collectives.all_reduce(parameter.grad, out=parameter.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        both = weft.collectives.all_reduce(torch.stack([loss, whole]))
        losses.append((both[0].item(), both[1].item()))
    return losses


def _loss(
    model: Llama, inputs: torch.Tensor, labels: torch.Tensor, tokens: int | None = None
) -> torch.Tensor:
    """Mean loss a token, of `tokens` in all; its gradients are added to the parameters'."""
    logits = model(inputs).flatten(0, 1)
    total = functional.cross_entropy(logits, labels.flatten(), reduction="sum")
    loss = total / (tokens or labels.numel())
    loss.backward()
    return loss.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seq-len", type=int, default=8192, help="bytes a sequence (8192)")
    parser.add_argument("--steps", type=int, default=4, help="steps of training (4)")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    losses = train(options.seq_len, options.steps)
    if rank == 0:
        for step, (ours, one_process) in enumerate(losses):
            print(f"step {step}: loss {ours:.5f} on {world_size} ranks, {one_process:.5f} on one")
        print(f"largest difference: {max(abs(a - b) for a, b in losses):.1e}")
    weft.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
