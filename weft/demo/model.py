"""A byte-level Llama, and the plan that makes it tensor and sequence parallel.

The model knows nothing of ranks: every size that sharding changes is read off the tensor at hand.

    B  sequences in a batch      H   query heads          E  features of a head = D / H
    S  bytes in a sequence       KV  key and value heads  F  features of the feed-forward layer
    D  features of a byte        V   values of a byte = 256

On W ranks, each holds H/W query heads, KV/W key and value heads, F/W features and V/W rows of the
embedding and of the head; between those layers it holds S/W bytes of every sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from weft.dtensor import DeviceMesh, Replicate, Shard
from weft.dtensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

VOCAB = 256


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama. The letters are those of the legend above."""

    d_model: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 704
    seq_len: int = 256

    def check(self, ranks: int) -> None:
        """Raise `ValueError`, with the sizes that fit, if the model cannot be cut for `ranks`."""
        if self.d_model % (2 * self.heads):
            raise ValueError(
                f"a head takes d_model / heads features, an even number (RoPE turns pairs), "
                f"got d_model={self.d_model}, heads={self.heads}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"every key/value head serves the same number of query heads: heads must be a "
                f"multiple of kv_heads, got heads={self.heads}, kv_heads={self.kv_heads}"
            )
        sizes = {"kv_heads": self.kv_heads, "ffn": self.ffn, "seq_len": self.seq_len}
        uneven = [f"{name}={size}" for name, size in sizes.items() if size % ranks]
        if uneven or VOCAB % ranks:
            fits = [
                w
                for w in range(1, self.kv_heads + 1)
                if not any(size % w for size in (*sizes.values(), VOCAB))
            ]
            raise ValueError(
                f"{ranks} ranks cannot share {', '.join(uneven) or f'{VOCAB} byte values'} evenly: "
                f"this model fits {', '.join(map(str, fits))} ranks. Use one of them, or sizes "
                f"that are multiples of {ranks}"
            )


class Llama(nn.Module):
    """Predicts, for each byte, the next one. The residual stream is normed before each layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, shape.d_model)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.d_model, eps=1e-5)
        self.head = nn.Linear(shape.d_model, VOCAB, bias=False)
        # The residual stream sums 2 * layers outputs: scaled down, its variance starts near one's.
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                into_stream = name.endswith(("wo.weight", "w2.weight"))
                scale = 0.02 / math.sqrt(2 * shape.layers) if into_stream else 0.02
                nn.init.normal_(weight, std=scale)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, S) -> (B, S, V)
        x = self.embedding(tokens)  # (B, S, D)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    """Attention, then a feed-forward layer, each added to the stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.d_model, eps=1e-5)
        self.attention = Attention(shape)
        self.ffn_norm = nn.RMSNorm(shape.d_model, eps=1e-5)
        self.ffn = FeedForward(shape)

    def forward(self, x: Tensor) -> Tensor:  # (B, S, D)
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))


class Attention(nn.Module):
    """Causal attention; H / KV query heads share each key and value head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.d_model // shape.heads
        kv_dim = shape.kv_heads * self.head_dim
        self.wq = nn.Linear(shape.d_model, shape.d_model, bias=False)
        self.wk = nn.Linear(shape.d_model, kv_dim, bias=False)
        self.wv = nn.Linear(shape.d_model, kv_dim, bias=False)
        self.wo = nn.Linear(shape.d_model, shape.d_model, bias=False)
        cos, sin = rotary_tables(shape.seq_len, self.head_dim)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, S, D)
        q = self._heads(self.wq(x))  # (B, H, S, E)
        k = self._heads(self.wk(x))  # (B, KV, S, E)
        v = self._heads(self.wv(x))
        q, k = self._rotate(q), self._rotate(k)
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        mixed: Tensor = self.wo(out.transpose(1, 2).flatten(2))
        return mixed

    def _heads(self, x: Tensor) -> Tensor:  # (B, S, heads * E) -> (B, heads, S, E)
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _rotate(self, x: Tensor) -> Tensor:  # (B, heads, S, E)
        cos, sin = self.cos[: x.shape[2]], self.sin[: x.shape[2]]  # (S, E / 2)
        left, right = x.chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class FeedForward(nn.Module):
    """SwiGLU: one projection gates the other."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.d_model, shape.ffn, bias=False)
        self.w3 = nn.Linear(shape.d_model, shape.ffn, bias=False)
        self.w2 = nn.Linear(shape.ffn, shape.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, S, D)
        out: Tensor = self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))
        return out


def rotary_tables(seq_len: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angle of each position and pair of features, (S, E / 2) each."""
    frequency = 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angle = torch.outer(torch.arange(seq_len).float(), frequency)
    return angle.cos(), angle.sin()


def parallelize(model: Llama, mesh: DeviceMesh) -> None:
    """Cut `model`, the same on every rank, for the ranks of `mesh`; no communication.

    The stream between layers is sharded by sequence. A column-parallel layer gathers it while it
    multiplies (all_gather_matmul), a row-parallel one sums and scatters it (matmul_reduce_scatter).
    """
    from_stream = ColwiseParallel(input_layouts=Shard(1))
    to_stream = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    plan = {
        "embedding": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
        ),
        "blocks.*.*_norm": SequenceParallel(),
        "blocks.*.attention.w[qkv]": from_stream,
        "blocks.*.attention.wo": to_stream,
        "blocks.*.ffn.w[13]": from_stream,
        "blocks.*.ffn.w2": to_stream,
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan, src_data_rank=None)
