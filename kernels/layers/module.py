"""Modules whose parameters are cut over the ranks of a group, and saved and loaded whole.

Layers that are merged into one are cut one by one, some of them into fewer parts than there are
ranks: Q, K and V with 4 query heads and 2 key heads, on 4 ranks, `copies=(1, 2, 2)`:

    whole   q0 q1 q2 q3 | k0 k1 | v0 v1

    rank 0: q0 k0 v0    rank 1: q1 k0 v0    rank 2: q2 k1 v1    rank 3: q3 k1 v1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from weft.collectives import Group, all_gather, all_reduce
from weft.collectives.ranks.chunks import chunk_sizes


class _Required:
    """In place of a default, where each choice that is not meant computes something plausible."""

    def __repr__(self) -> str:
        return "<required>"


REQUIRED: Any = _Required()


def chosen(module: nn.Module, sequence_dim: int | None) -> int | None:
    """`sequence_dim`, which has no default.

    Raises:
        TypeError: it is not given, or no dim.
    """
    if sequence_dim is None or type(sequence_dim) is int:
        return sequence_dim
    given = "it is not given" if sequence_dim is REQUIRED else f"got {sequence_dim!r}"
    raise TypeError(
        f"{type(module).__name__} needs sequence_dim, as either choice computes something whatever "
        f"x is, with wrong gradients if it is not so ({given}). sequence_dim=None: x is the same "
        f"whole activation on every rank. An int: the tokens of x are cut over the ranks along "
        f"this dim (sequence parallelism: 0 for (tokens, features), 1 for (batch, tokens, "
        f"features)). Without sequence parallelism choose None; the layers of a pair choose alike"
    )


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


class ParallelModule(nn.Module):
    """Parameters cut along one dim over the ranks of a group, saved and loaded whole.

    Attributes:
        cut: the dim along which each parameter is cut over the ranks; absent: replicated.
        split: how.
    """

    cut: ClassVar[dict[str, int]]
    group: Group
    split: Split

    def take(self, whole: nn.Module, names: Sequence[str]) -> None:
        """Keep this rank's part of the parameters `names` of a whole module."""
        for name in names:
            value = getattr(whole, name)
            part = None if value is None else self.part(name, value.detach()).clone()
            self.register_parameter(
                name, None if part is None else nn.Parameter(part, value.requires_grad)
            )

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole parameter."""
        dim = self.cut.get(name)
        return whole if dim is None else self.split.own(whole, dim, self.group.rank)

    def drawn(self) -> nn.Module:
        """The whole module with new values."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Draw the parameters anew, as the constructor does, with the same seed on every rank."""
        with torch.no_grad():
            for name, value in self.drawn().named_parameters():
                getattr(self, name).copy_(self.part(name, value))

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters of the whole module."""
        raise NotImplementedError

    def loaded(self, name: str, stored: torch.Tensor) -> torch.Tensor:
        """This rank's part of a parameter that is stored whole, or already as that part.

        Raises:
            ValueError: it is stored in another shape.
        """
        mine, shape = getattr(self, name), self.whole_shapes()[name]
        if mine is None:
            return stored  # which nn.Module reports as unexpected
        if tuple(stored.shape) == shape:
            return self.part(name, stored)
        if stored.shape != mine.shape:
            raise ValueError(
                f"{name} must be whole, {shape}, or the part of rank {self.group.rank}, "
                f"{tuple(mine.shape)}, got {tuple(stored.shape)}"
            )
        return stored

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        # Collective: state_dict() must be called on every rank.
        for name in self.cut:
            if name not in self._parameters:
                raise RuntimeError(
                    f"{prefix}{name} is no parameter any more: what a parametrization, pruning or "
                    f"torch.nn.utils has put in its place is of this rank's part, and cannot be "
                    f"saved whole. Remove it first (parametrize.remove_parametrizations, "
                    f"prune.remove, ..), or use DTensors with a plan, which take them"
                )
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, dim in self.cut.items():
            part = destination.get(prefix + name)
            if part is None:
                continue
            if part.is_meta:
                whole = part.new_empty(self.whole_shapes()[name])
            else:
                whole = self.split.whole(part, dim, self.group)
            destination[prefix + name] = whole

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        state_dict = dict(state_dict)  # the caller's keeps the whole
        for name in self.whole_shapes():
            if (stored := state_dict.get(prefix + name)) is None:
                continue
            try:
                mine = self.loaded(name, stored)
            except ValueError as error:
                error_msgs.append(f"{prefix}{error}")
                continue
            if mine is not stored and local_metadata.get("assign_to_params_buffers"):
                mine = mine.clone(memory_format=torch.contiguous_format)  # no view of the whole
            state_dict[prefix + name] = mine
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
