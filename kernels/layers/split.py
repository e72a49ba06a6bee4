"""How features are spread over ranks, and values that are cut so: gathered, cut and added up.

Layers that are merged into one are cut one by one, some of them into fewer parts than there are
ranks: Q, K and V with 4 query heads and 2 key heads, on 4 ranks, `copies=(1, 2, 2)`:

    whole   q0 q1 q2 q3 | k0 k1 | v0 v1

    rank 0: q0 k0 v0    rank 1: q1 k0 v0    rank 2: q2 k1 v1    rank 3: q3 k1 v1
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from weft.collectives import Group, all_gather, all_reduce
from weft.collectives.ranks.chunks import chunk_sizes
from weft.kernels.engine.local_matmul import no_view


@dataclass(frozen=True)
class Split:
    """How the features of merged layers are spread over the ranks.

    Attributes:
        sizes: features of each layer.
        copies: on how many consecutive ranks each part of a layer is replicated.
        world_size: ranks.
        parts: the sizes of each layer's parts: [layer][part].
        by_rank: how many features of each layer each rank has: [rank][layer].
    """

    sizes: tuple[int, ...]
    copies: tuple[int, ...]
    world_size: int
    # Not cached properties: Dynamo refuses the lock that they have before Python 3.12.
    parts: list[list[int]] = field(init=False, repr=False, compare=False)
    by_rank: list[list[int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        W, copies = self.world_size, self.copies
        parts = [chunk_sizes(n, W // each) for n, each in zip(self.sizes, copies, strict=True)]
        layers = list(zip(parts, copies, strict=True))
        by_rank = [[own[rank // each] for own, each in layers] for rank in range(W)]
        vars(self).update(parts=parts, by_rank=by_rank)

    def own(self, whole: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
        """A rank's part of each layer, side by side."""
        layers = zip(whole.split(self.sizes, dim), self.parts, self.copies, strict=True)
        mine = [layer.split(parts, dim)[rank // copies] for layer, parts, copies in layers]
        return mine[0] if len(mine) == 1 else torch.cat(mine, dim)

    def whole(self, part: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
        """The inverse of `own`: all ranks' parts, gathered."""
        lengths = [sum(sizes) for sizes in self.by_rank]
        whole = all_gather(part, group, dim=dim, sizes=lengths)
        if len(self.sizes) > 1 or self.copies != (1,):
            pieces = whole.split([size for sizes in self.by_rank for size in sizes], dim)
            layers = len(self.sizes)
            firsts = [pieces[i::layers][::copies] for i, copies in enumerate(self.copies)]
            return torch.cat([piece for of_layer in firsts for piece in of_layer], dim)
        # In a graph of torch 2.11 a copy that is none would lose the gradient.
        return whole if whole.is_contiguous() else whole.contiguous()

    def first_copies(self, part: torch.Tensor, rank: int) -> torch.Tensor:
        """`part` (.., features), with 0 in place of copies that a lower rank has as well."""
        pieces = part.split(self.by_rank[rank], -1)
        kept = [
            torch.zeros_like(piece) if rank % copies else piece
            for piece, copies in zip(pieces, self.copies, strict=True)
        ]
        return torch.cat(kept, -1)

    def summed(self, part: torch.Tensor, group: Group) -> torch.Tensor:
        """`part`, with replicated features replaced by the sum over their copies, along dim 0."""
        pieces = list(part.split(self.by_rank[group.rank]))
        shared = [i for i, copies in enumerate(self.copies) if copies > 1]

        def own(i: int, whole: torch.Tensor) -> torch.Tensor:
            mine: torch.Tensor = whole.split(self.parts[i])[group.rank // self.copies[i]]
            return mine

        spread = [part.new_zeros(self.sizes[i], *part.shape[1:]) for i in shared]
        for i, whole in zip(shared, spread, strict=True):
            own(i, whole).copy_(pieces[i])
        total = all_reduce(torch.cat(spread), group).split([self.sizes[i] for i in shared])
        for i, whole in zip(shared, total, strict=True):
            pieces[i] = own(i, whole)
        return torch.cat(pieces)


class GatheredFeatures(torch.autograd.Function):
    """All ranks' features, for ranks that all do the same with them: gradients are not summed."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, split: Split, group: Group) -> torch.Tensor:
        ctx.where = split, group
        return no_view(split.whole(y, -1, group))

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return Scattered.apply(dy, *ctx.where), None, None


class Scattered(torch.autograd.Function):
    """This rank's features of a value that is the same on all ranks, each on one rank only."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, split: Split, group: Group) -> torch.Tensor:
        ctx.where = split, group
        return split.first_copies(split.own(x, -1, group.rank), group.rank)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return GatheredFeatures.apply(dy, *ctx.where), None, None


class Shared(torch.autograd.Function):
    """A replicated parameter: its gradient is the sum of those of its copies."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, split: Split, group: Group) -> torch.Tensor:
        ctx.where = split, group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _Summed.apply(grad, *ctx.where), None, None


class _Summed(torch.autograd.Function):
    """The sum of all copies, on each of them: its own adjoint."""

    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, split: Split, group: Group) -> torch.Tensor:
        ctx.where = split, group
        return split.summed(grad, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _Summed.apply(grad, *ctx.where), None, None
