"""A byte-level Llama, and the plan that makes it tensor and sequence parallel.

    B  sequences in a batch     H   query heads             E  features of a head = D / H
    S  bytes in a sequence      KV  key and value heads     F  features of the feed-forward layer
    D  features of a byte       G   heads a group = H / KV  V  values of a byte = 256

The unit of sharding is a group: one key and value head, the G query heads that it serves, and its
F / KV features of the feed-forward layer. Projections that share an input are one matrix, whose
rows are ordered by group: a rank's contiguous rows are whole groups, and one gather of the input
serves them all. Nothing else in the model knows of ranks; how many groups there are is read off the
tensor at hand. On W ranks, each holds KV / W groups, V / W rows of the embedding and of the head,
and between the layers S / W bytes of every sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.dtensor import DeviceMesh, Replicate, Shard, parallel

VOCAB = 256


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a Llama. The letters are those of the legend above."""

    d_model: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 704
    seq_len: int = 128

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
        if self.ffn % self.kv_heads:
            raise ValueError(
                f"every group takes the same part of the feed-forward layer: ffn must be a "
                f"multiple of kv_heads, got ffn={self.ffn}, kv_heads={self.kv_heads}"
            )
        if self.kv_heads % ranks:
            fits = [str(w) for w in range(1, self.kv_heads + 1) if self.kv_heads % w == 0]
            raise ValueError(
                f"each rank takes whole groups of heads: {ranks} ranks cannot share "
                f"kv_heads={self.kv_heads}, but {', '.join(fits)} can; for {ranks} ranks choose "
                f"kv_heads, heads and ffn that are multiples of {ranks}"
            )


class Llama(nn.Module):
    """Predicts, for each byte, the next one. The residual stream is normed before each layer."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, shape.d_model)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.d_model, eps=1e-5)
        self.head = nn.Linear(shape.d_model, VOCAB, bias=False)
        for name, weight in self.named_parameters():
            if name == "embedding.weight":
                nn.init.normal_(weight)
            elif weight.ndim == 2:
                # Each layer keeps its input's variance; those that the stream sums share it.
                into_stream = name.endswith(("wo.weight", "w2.weight"))
                terms = 2 * shape.layers if into_stream else 1
                nn.init.normal_(weight, std=(weight.shape[1] * terms) ** -0.5)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, S) -> (B, S, V)
        x = self.embedding(tokens)  # (B, S, D)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    """Attention, then a feed-forward layer, each added to the stream."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.d_model, eps=1e-5)
        self.attention = GroupedQueryAttention(shape)
        self.ffn_norm = nn.RMSNorm(shape.d_model, eps=1e-5)
        self.ffn = FeedForward(shape)

    def forward(self, x: Tensor) -> Tensor:  # (B, S, D)
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out


class GroupedQueryAttention(nn.Module):
    """Causal attention; the G query heads of a group share its key and value head."""

    turns: Tensor

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_dim = shape.d_model // shape.heads
        self.group = shape.heads // shape.kv_heads
        qkv_dim = (shape.heads + 2 * shape.kv_heads) * self.head_dim
        self.wqkv = nn.Linear(shape.d_model, qkv_dim, bias=False)
        self.wo = nn.Linear(shape.d_model, shape.d_model, bias=False)
        self.register_buffer("turns", turns(shape.seq_len, self.head_dim), persistent=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, S, D)
        qkv = self.wqkv(x).unflatten(-1, (-1, self.group + 2, self.head_dim))  # (B, S, KV, G+2, E)
        q, k, v = qkv.split((self.group, 1, 1), dim=3)
        q, k = rotate(q, self.turns), rotate(k, self.turns)
        q, k, v = (t.flatten(2, 3).transpose(1, 2) for t in (q, k, v))  # (B, H or KV, S, E)
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        mixed: Tensor = self.wo(out.transpose(1, 2).flatten(2))
        return mixed


class FeedForward(nn.Module):
    """SwiGLU: one half of each group's features gates the other."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.share = shape.ffn // shape.kv_heads
        self.w13 = nn.Linear(shape.d_model, 2 * shape.ffn, bias=False)
        self.w2 = nn.Linear(shape.ffn, shape.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, S, D)
        gate, up = self.w13(x).unflatten(-1, (-1, 2, self.share)).unbind(-2)  # (B, S, KV, F / KV)
        out: Tensor = self.w2((nn.functional.silu(gate) * up).flatten(2))
        return out


def turns(seq_len: int, head_dim: int) -> Tensor:
    """The rotation of each position and pair of features, as complex numbers (S, 1, 1, E / 2)."""
    frequency = 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angle = torch.outer(torch.arange(seq_len).float(), frequency)
    return torch.polar(torch.ones_like(angle), angle)[:, None, None]


def rotate(x: Tensor, turns: Tensor) -> Tensor:  # (B, S, KV, heads, E)
    """Turn each pair of features by an angle that grows with the position, in fp32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    pairs = torch.view_as_complex(wide.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


def parallelize(model: Llama, mesh: DeviceMesh, styles: Any = parallel) -> None:
    """Cut `model`, the same on every rank, for the ranks of `mesh`; no communication.

    `styles` may also be torch.distributed.tensor.parallel, which has the same names.

    The stream between layers is sharded by sequence. A column-parallel layer gathers it while it
    multiplies (all_gather_matmul), a row-parallel one sums and scatters it (matmul_reduce_scatter).
    """
    from_stream = styles.ColwiseParallel(input_layouts=Shard(1))
    to_stream = styles.RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    plan = {
        "embedding": styles.RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
        ),
        "blocks.*.*_norm": styles.SequenceParallel(),
        "blocks.*.attention.wqkv": from_stream,
        "blocks.*.attention.wo": to_stream,
        "blocks.*.ffn.w13": from_stream,
        "blocks.*.ffn.w2": to_stream,
        "norm": styles.SequenceParallel(),
        "head": styles.ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    }
    styles.parallelize_module(model, mesh, plan, src_data_rank=None)
