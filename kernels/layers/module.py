"""Modules whose parameters are cut over the ranks of a group, and saved and loaded whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from weft.collectives import Group
from weft.kernels.layers.split import Split


class _Required:
    """In place of a default, where each choice that is not meant computes something plausible."""

    def __repr__(self) -> str:
        return "<required>"


REQUIRED: Any = _Required()


def chosen_dim(module: nn.Module, sequence_dim: int | None) -> int | None:
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


def whole_again(part: torch.Tensor) -> torch.Tensor:
    """`part`, if it is a DTensor all of it: FSDP2 cuts a rank's part once more. Collective then."""
    whole: torch.Tensor = part.full_tensor() if hasattr(part, "full_tensor") else part
    return whole


def cut_like(held: torch.Tensor | None, part: torch.Tensor) -> torch.Tensor:
    """`part`, which every rank has that shares the parameter `held`, cut as that is by FSDP2."""
    if not hasattr(held, "full_tensor"):
        return part
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(held, DTensor)
    return distribute_tensor(part, held.device_mesh, held.placements, src_data_rank=None)


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

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """The parameter of which this rank has `part`. Collective."""
        return self.split.whole(part, self.cut[name], self.group)

    def drawn(self) -> nn.Module:
        """The whole module with new values."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Draw the parameters anew, as the constructor does, with the same seed on every rank."""
        with torch.no_grad():
            for name, value in self.drawn().named_parameters():
                mine = getattr(self, name)
                mine.copy_(cut_like(mine, self.part(name, value)))

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
        for name in self._parameters:
            part = destination.get(prefix + name)
            if part is None:
                continue
            if not part.is_meta:
                part = whole_again(part)
                part = self.whole(name, part) if name in self.cut else part
            elif name in self.cut:
                shape = self.whole_shapes()[name]
                part = torch.empty(shape, dtype=part.dtype, device="meta")
            destination[prefix + name] = part

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
            stored = whole_again(stored)
            try:
                mine = self.loaded(name, stored)
            except ValueError as error:
                error_msgs.append(f"{prefix}{error}")
                continue
            if mine is not stored and local_metadata.get("assign_to_params_buffers"):
                mine = mine.clone(memory_format=torch.contiguous_format)  # no view of the whole
            state_dict[prefix + name] = cut_like(getattr(self, name), mine)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
