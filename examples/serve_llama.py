"""Serve a small Llama over ranks: requests come and go, their tokens lie in a cache of pages.

    torchrun --nproc-per-node 2 examples/serve_llama.py [--shard head|sequence] [--draft 3]

Every linear layer is cut over the ranks (all of QKV in one, gate and up in one), as is the
vocabulary. The cache is cut in one of two ways:

  head      A rank holds all tokens of its own key heads, and attends by itself. With fewer key
            heads than ranks (--kv-heads) neighbours hold the same one.
  sequence  Pages are dealt to the ranks in turn, with all heads: the longer a sequence, the more
            this pays. flash_decode merges what the ranks find in their parts.

A request is admitted as soon as there are pages for it, and its prompt is read alone; then all that
are under way step together. A step checks --draft guesses, looked up in the text so far, by asking
of several tokens at once, and keeps those that the model itself would have said. At the end one
process says the same, token by token and without a cache.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import weft

VOCAB, D_MODEL, FFN, HEADS, LAYERS, HEAD_DIM = 256, 128, 352, 8, 2, 16
PAGE = 4  # tokens

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # (layer, q, k, v), each (B, heads, T, D)


class Layer(nn.Module):
    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.sizes = [heads * HEAD_DIM for heads in (HEADS, kv_heads, kv_heads)]
        self.norms = nn.ModuleList(nn.RMSNorm(D_MODEL) for _ in range(2))
        self.qkv = nn.Linear(D_MODEL, sum(self.sizes), bias=False)
        self.mix = nn.Linear(HEADS * HEAD_DIM, D_MODEL, bias=False)
        self.gate_up = nn.Linear(D_MODEL, 2 * FFN, bias=False)
        self.down = nn.Linear(FFN, D_MODEL, bias=False)

    def forward(self, x: Tensor, turns: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        qkv = self.qkv(self.norms[0](x)).split(self.sizes, -1)
        q, k, v = (part.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for part in qkv)
        out = attend(rotate(q, turns), rotate(k, turns), v)
        x = x + self.mix(out.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, -1)
        added: Tensor = self.down(functional.silu(gate) * up)
        return x + added


class Llama(nn.Module):
    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, D_MODEL)
        self.layers = nn.ModuleList(Layer(kv_heads) for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(D_MODEL), nn.Linear(D_MODEL, VOCAB, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:  # both (B, T)
        angle = positions.unsqueeze(-1) * 10_000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        turns, x = torch.polar(torch.ones_like(angle), angle).unsqueeze(1), self.embedding(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, turns, partial(attend, i))
        logits: Tensor = self.head(self.norm(x))
        return logits


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


def parallelize(model: Any, kv_heads: int, by_head: bool) -> None:
    """Cut `model`, the same on every rank; activations between the layers are whole."""
    whole: dict[str, Any] = {"sequence_dim": None}
    world_size = dist.get_world_size()
    copies = max(1, world_size // kv_heads)
    if HEADS % kv_heads or HEADS % world_size or kv_heads * copies % world_size:
        raise ValueError(f"{world_size} ranks cannot share {HEADS} heads on {kv_heads} key heads")
    column, row = weft.ColumnParallelLinear.from_linear, weft.RowParallelLinear.from_linear
    model.embedding = weft.VocabParallelEmbedding.from_embedding(model.embedding, **whole)
    model.head = column(model.head, **whole)
    for layer in model.layers:
        # By sequence, every rank needs all heads: of the keys that it keeps, and to ask for others.
        merged = {"merged_sizes": layer.sizes, "copies": (1, copies, copies)}
        layer.qkv = column(layer.qkv, gather_output=not by_head, **merged, **whole)
        layer.sizes = layer.qkv.output_sizes
        layer.gate_up = column(layer.gate_up, merged_sizes=(FFN, FFN), **whole)
        layer.mix, layer.down = row(layer.mix, **whole), row(layer.down, **whole)


@dataclass
class Request:
    """A prompt and what followed it so far; `pages` are where its keys and values lie."""

    text: list[int]
    wanted: int  # tokens, the prompt included
    pages: list[int] = field(default_factory=list)
    steps: int = 0


class Server:
    """A model on all ranks, and this rank's part of the pages that its requests share."""

    def __init__(self, model: Any, kv_heads: int, by_head: bool, pages: int) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self.model, self.by_head = model, by_head
        self.own_heads = slice(rank * HEADS // world_size, (rank + 1) * HEADS // world_size)
        self.tokens_a_page = PAGE * (1 if by_head else world_size)  # on all ranks together
        heads = max(1, kv_heads // world_size) if by_head else kv_heads
        self.caches = model.norm.weight.new_zeros(LAYERS, 2, pages, heads, PAGE, HEAD_DIM)
        self.free = list(range(pages))

    def step(self, batch: list[Request], count: int) -> list[list[int]]:
        """What comes after each of the last `count` tokens of these requests.

        Those that were there before are stored once more; shorter texts are padded in front.
        """
        lengths = torch.tensor([len(each.text) for each in batch])
        tokens = torch.tensor([([0] * count + each.text)[-count:] for each in batch])
        positions = (lengths.unsqueeze(1) + torch.arange(-count, 0)).clamp(min=0)
        width = max(len(each.pages) for each in batch)
        table = [each.pages + [0] * (width - len(each.pages)) for each in batch]
        where: dict[str, Any] = {"shard": None if self.by_head else "sequence"}
        where["block_table"] = torch.tensor(table, dtype=torch.int32)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            weft.append_to_cache(k, v, *self.caches[layer], lengths, **where)
            out: Tensor = weft.flash_decode(q, *self.caches[layer], lengths, **where)
            return out if self.by_head else out[:, self.own_heads]

        logits = self.model(tokens, positions, attend)
        said: list[list[int]] = weft.vocab_parallel_argmax(logits).tolist()
        return said

    def serve(self, waiting: list[Request], draft: int, tell: Callable[[str], None]) -> None:
        """Until all requests have their tokens."""
        most, live = max(self.pages_for(each, draft) for each in waiting), list[Request]()
        if most > len(self.free):
            raise ValueError(f"a request needs {most} pages, there are {len(self.free)}: --pages")
        while waiting or live:
            while waiting and (pages := self.pages_for(waiting[0], draft)) <= len(self.free):
                request = waiting.pop(0)
                request.pages = [self.free.pop() for _ in range(pages)]
                live.append(request)
                tell(f"a prompt of {len(request.text)} tokens begins, {len(live)} under way")
                request.text.append(self.step([request], len(request.text))[0][-1])
            guesses = [guess(request.text, draft) for request in live]
            for request, guessed in zip(live, guesses, strict=True):
                request.text += guessed
            said = self.step(live, 1 + draft)
            for request, guessed, after in zip(live, guesses, said, strict=True):
                known, after = len(request.text) - len(guessed), after[draft - len(guessed) :]
                right = next((i for i, g in enumerate(guessed) if g != after[i]), len(guessed))
                request.text = (request.text[:known] + after[: right + 1])[: request.wanted]
                request.steps += 1
                if len(request.text) == request.wanted:
                    self.free += request.pages
                    tell(f"a text of {request.wanted} tokens ends, after {request.steps} steps")
            live = [request for request in live if len(request.text) < request.wanted]

    def pages_for(self, request: Request, draft: int) -> int:
        return -(-(request.wanted + draft) // self.tokens_a_page)


def guess(text: list[int], count: int) -> list[int]:
    """What followed the last two tokens where they stood before."""
    for i in reversed(range(len(text) - 2)):
        if text[i : i + 2] == text[-2:]:
            return text[i + 2 : i + 2 + count]
    return []


@torch.no_grad()
def run(
    by_head: bool, kv_heads: int, draft: int, lengths: list[int], new: int, pages: int,
    dtype: torch.dtype = torch.float32, tell: Callable[[str], None] = lambda _: None,
) -> tuple[list[list[int]], list[list[int]]]:  # fmt: skip
    """The texts of the ranks together, and those of one process, the same on every rank."""
    torch.manual_seed(0)  # the same weights and prompts on every rank
    plain = Llama(kv_heads).to(dtype)
    prompts = [torch.randint(VOCAB, (length,)).tolist() for length in lengths]
    model = copy.deepcopy(plain)
    parallelize(model, kv_heads, by_head)
    requests = [Request(list(prompt), len(prompt) + new) for prompt in prompts]
    started = time.perf_counter()
    Server(model, kv_heads, by_head, pages).serve(list(requests), draft, tell)
    seconds, steps = time.perf_counter() - started, sum(each.steps for each in requests)
    tell(f"{len(prompts) * new} tokens in {steps} steps of a request, {seconds:.2f} s")

    def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    for prompt in prompts:
        for _ in range(new):
            logits = plain(torch.tensor([prompt]), torch.arange(len(prompt)).unsqueeze(0), causal)
            prompt.append(int(logits[0, -1].argmax()))
    return [each.text for each in requests], prompts


def main() -> None:
    about, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shard", choices=["head", "sequence"], default="head")
    parser.add_argument("--kv-heads", type=int, default=2, help=f"1 .. {HEADS} (2)")
    parser.add_argument("--draft", type=int, default=3, help="guesses a step (3); 0: none")
    parser.add_argument("--new", type=int, default=40, help="tokens a request (40)")
    parser.add_argument("--pages", type=int, default=64, help=f"of {PAGE} tokens, a rank (64)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    tell = print if dist.get_rank() == 0 else lambda _: None
    lengths = [9, 30, 3, 17, 58, 12]
    ours, alone = run(
        options.shard == "head", options.kv_heads, options.draft, lengths, options.new,
        options.pages, getattr(torch, options.dtype), tell,
    )  # fmt: skip
    equal = sum(text == other for text, other in zip(ours, alone, strict=True))
    tell(f"{equal} of {len(ours)} texts are those of one process")
    weft.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
