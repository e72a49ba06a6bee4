"""Both ends of a language model whose vocabulary is cut over the ranks: plain modules.

A vocabulary of V; rank r has V_r of it (by torch.chunk), as rows of the embedding and the head:

    tokens (*)  -- own rows, else 0 ----------->   partial_r (*, H)  -- sum over ranks -->  (*, H)
    x (*, H)    -- ColumnParallelLinear ------->   logits_r (*, V_r) -- largest of all -->  (*)

To choose the next token, each rank sends one number and its place for each row, not the logits.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from weft.collectives import all_gather, reduce_scatter, resolve
from weft.collectives.group import GroupLike, is_call_traced
from weft.kernels.parallel_module import ParallelModule, Split
from weft.kernels.replicated import Summed


class VocabParallelEmbedding(ParallelModule):
    """nn.Embedding with its rows cut over the ranks (by torch.chunk).

    Input: tokens (*), the same on every rank. Output: (*, embedding_dim), a shard along
    `sequence_dim`, or whole on every rank with `sequence_dim=None`. State is saved and loaded
    whole, as that of ColumnParallelLinear.

    Example:
        4 rows on 2 ranks, tokens [1, 3]: rank 0 gives row 1 and 0, rank 1 gives 0 and row 3; the
        sum is rows 1 and 3.
    """

    cut: ClassVar[dict[str, int]] = {"weight": 0}
    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        group: GroupLike = None,
        sequence_dim: int | None = 0,
    ) -> None:
        """Draw the weights of an nn.Embedding and keep this rank's part.

        Args:
            num_embeddings, embedding_dim, padding_idx, device, dtype: of the whole nn.Embedding.
                With the same seed on every rank, the weights are those that it would have drawn.
            group: ProcessGroup, 1-D DeviceMesh, or None for the world.
            sequence_dim: dim of the result that is sharded over the ranks; None: it is whole.
        """
        super().__init__()
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        whole = nn.Embedding(num_embeddings, embedding_dim, padding_idx, **like)
        self._cut_out(whole, group, sequence_dim)

    @classmethod
    def from_embedding(
        cls,
        embedding: nn.Embedding,
        group: GroupLike = None,
        *,
        sequence_dim: int | None = 0,
    ) -> VocabParallelEmbedding:
        """This rank's part of `embedding`, which must hold the same values on every rank.

        Raises:
            ValueError: it is not an nn.Embedding, or has max_norm, scale_grad_by_freq or sparse.
        """
        plain = isinstance(embedding, nn.Embedding) and embedding.max_norm is None
        if not plain or embedding.scale_grad_by_freq or embedding.sparse:
            raise ValueError(
                f"from_embedding takes an nn.Embedding without max_norm, scale_grad_by_freq and "
                f"sparse, got {embedding}"
            )
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module._cut_out(embedding, group, sequence_dim)
        return module

    def _cut_out(self, whole: nn.Embedding, group: GroupLike, sequence_dim: int | None) -> None:
        self.num_embeddings, self.embedding_dim = whole.num_embeddings, whole.embedding_dim
        self.padding_idx = whole.padding_idx
        self.group, self.sequence_dim = resolve(group), sequence_dim
        self.split = Split((self.num_embeddings,), (1,), self.group.world_size)
        self.take(whole, ("weight",))

    def drawn(self) -> nn.Module:
        """An nn.Embedding with new values."""
        like: dict[str, Any] = {"device": self.weight.device, "dtype": self.weight.dtype}
        return nn.Embedding(self.num_embeddings, self.embedding_dim, self.padding_idx, **like)

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of the nn.Embedding."""
        return {"weight": (self.num_embeddings, self.embedding_dim)}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The rows of these tokens.

        Raises:
            ValueError: a token outside the vocabulary (checked on a CPU only: on a GPU the host
                would have to wait).
        """
        if tokens.device.type == "cpu" and not torch.compiler.is_compiling() and tokens.numel():
            low, high = (int(end) for end in tokens.aminmax())
            if low < 0 or high >= self.num_embeddings:
                raise ValueError(
                    f"tokens must be 0 .. {self.num_embeddings - 1}, got {low} .. {high}"
                )
        rows = len(self.weight)
        first = sum(self.split.parts[0][: self.group.rank])
        own = (tokens >= first) & (tokens < first + rows)
        padding = None if self.padding_idx is None else self.padding_idx - first
        if padding is not None and not 0 <= padding < rows:
            padding = None
        # A rank without rows must take part in backward, too.
        weight = self.weight if rows else functional.pad(self.weight, (0, 0, 0, 1))
        found = functional.embedding((tokens - first).masked_fill(~own, 0), weight, padding)
        found = found.masked_fill(~own.unsqueeze(-1), 0)
        if self.sequence_dim is not None:
            return reduce_scatter(found, self.group, dim=self.sequence_dim)
        total: torch.Tensor = Summed.apply(found, self.group, "sum")
        return total

    def extra_repr(self) -> str:
        """As nn.Embedding's, with what differs."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return (
            f"{self.num_embeddings}, {self.embedding_dim}{padding}, "
            f"sequence_dim={self.sequence_dim}, rank {self.group.rank} of {self.group.world_size}"
        )


@torch.no_grad()
def vocab_parallel_argmax(logits: torch.Tensor, group: GroupLike = None) -> torch.Tensor:
    """The index of the largest of all ranks' logits, as torch.argmax(cat(logits, -1), -1).

    To sample from softmax(logits / t) instead, pass logits / t + g, where each rank draws its own
    g = -torch.empty_like(logits).exponential_().log() (the Gumbel-max trick).

    Args:
        logits: (*, V_r), this rank's part, as a ColumnParallelLinear returns it. V_r may differ
            from rank to rank and be 0; the rest is the same on every rank.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.

    Returns:
        (*) int64, bitwise the same on every rank; the first of equal ones. The host does not wait.

    Example:
        [0., 2.] on rank 0 and [5., 1.] on rank 1 give 2 on both.
    """
    # While a graph is traced, all shards are taken to be as long as this one.
    sizes = None if is_call_traced(logits) else [1] * resolve(group).world_size
    if logits.shape[-1]:
        best, at = logits.max(-1)
    else:
        best = logits.new_full(logits.shape[:-1], -torch.inf)
        at = best.new_zeros(best.shape, dtype=torch.int64)
    width = torch.full_like(at, logits.shape[-1])
    # Exact in fp64: any logit, and any place below 2^53.
    told = torch.stack([each.double() for each in (best, at, width)]).unsqueeze(0)
    every = all_gather(told, group, sizes=sizes)  # (W, 3, *)
    bests, places, widths = every.unbind(1)
    places = places + widths.cumsum(0) - widths
    winner = bests.argmax(0, keepdim=True)
    return places.gather(0, winner).squeeze(0).long()
