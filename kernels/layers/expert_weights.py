"""Under which names, and in which shapes, models keep the weights of experts.

    each expert a module     0.gate_proj.weight (F, H), 0.up_proj.weight, 0.down_proj.weight (H, F)
                             0.w1.weight, 0.w3.weight, 0.w2.weight
    stacked                  gate_proj (E, F, H), up_proj, down_proj (E, H, F); w1, w3, w2
    gate and up in one       gate_up_proj (E, 2 F, H), the gate in front

The first are those of transformers before 5, DeepSeek's and Qwen's models and, with w1 to w3,
Mixtral's; w1 to w3 stacked are torchtitan's; the last are transformers 5's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import nn

from weft.kernels.engine.epilogues import Activation, activate, check_activation

Experts: TypeAlias = Sequence[nn.Module] | nn.Module | Mapping[str, torch.Tensor]

ROLES = ("gate_proj", "up_proj", "down_proj")
_MERGED = ("gate_up_proj", "down_proj")
_GATED = (ROLES, ("w1", "w3", "w2"), _MERGED)
_PLAIN = (ROLES[1:], ("w1", "w2"))


class ExpertLayout(NamedTuple):
    """The names of gate, up and down, and whether each expert has its own."""

    names: tuple[str, ...]
    listed: bool = False

    @property
    def roles(self) -> tuple[str, ...]:
        """What is stored: gate, up and down, or the latter two."""
        return ROLES if self.names in _GATED else ROLES[1:]

    def keys(self, experts: Iterable[int], role: str | None = None) -> list[str]:
        """Where the weights, or those of one role, are in a state dict."""
        names = self.names if role is None else [self.names[self._at(role)]]
        if not self.listed:
            return list(names)
        return [f"{expert}.{name}.weight" for expert in experts for name in names]

    def _at(self, role: str) -> int:
        return max(0, self.roles.index(role) - (self.names == _MERGED))

    def value(self, role: str, stored: torch.Tensor) -> torch.Tensor:
        """What a stored tensor holds of a role."""
        if not self._shares(role):
            return stored
        return stored.chunk(2, -2)[self.roles.index(role)]

    def _shares(self, role: str) -> bool:
        return self.names == _MERGED and role != "down_proj"

    def shape(self, role: str, of_all: Sequence[int]) -> tuple[int, ...]:
        """Of what is stored, given that of all experts in one role: (E, F, H) or (E, H, F)."""
        E, rows, columns = of_all
        own = (2 * rows if self._shares(role) else rows, columns)
        return own if self.listed else (E, *own)

    def state(self, whole: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """What all experts are stored as, given each role's (E, F, H) or (E, H, F)."""
        values = [whole[role] for role in self.roles]
        if self.names == _MERGED:
            values = [torch.cat(values[:2], 1), values[2]]
        if not self.listed:
            yield from zip(self.names, values, strict=True)
            return
        for expert in range(len(values[0])):
            for name, value in zip(self.names, values, strict=True):
                yield f"{expert}.{name}.weight", value[expert].clone()


def weights_layout(activation: Activation) -> ExpertLayout:
    """That of experts which are made here: transformers 5's."""
    _check_known(activation)
    return ExpertLayout(_MERGED if activation == "swiglu" else ROLES[1:])


def found(
    experts: Experts, activation: Activation
) -> tuple[ExpertLayout, dict[str, torch.Tensor], tuple[int, int, int]]:
    """How `experts` keep their weights, these by their keys, and E, F and H.

    Raises:
        ValueError: see `ExpertParallelMLP.from_experts`.
    """
    _check_known(activation)
    if isinstance(experts, Mapping):
        layout, weights = ExpertLayout(_names(experts, activation)), dict(experts)
    elif isinstance(experts, nn.Module) and not isinstance(experts, nn.ModuleList):
        _check_activation(experts, activation)
        weights = dict(experts.named_parameters())
        layout = ExpertLayout(_names(weights, activation))
    else:
        layout, weights = _listed_weights(experts, activation)
    E, H, F = _expert_sizes(layout, weights)
    for role in layout.roles:
        shape = layout.shape(role, (E, H, F) if role == "down_proj" else (E, F, H))
        for key in layout.keys(range(E), role):
            _check_weight(key, weights[key], shape)
    return layout, weights, (E, F, H)


def _listed_weights(
    experts: Sequence[nn.Module] | nn.ModuleList, activation: Activation
) -> tuple[ExpertLayout, dict[str, torch.Tensor]]:
    if not len(experts) or not all(isinstance(expert, nn.Module) for expert in experts):
        raise ValueError(
            f"experts must be a list of at least one module, a module of stacked weights, or a "
            f"dict of these, got {type(experts).__name__} of {len(experts)}"
        )
    weights: dict[str, torch.Tensor] = {}
    names: list[tuple[str, ...]] = []
    for i, expert in enumerate(experts):
        _check_activation(expert, activation)
        own = {name.removesuffix(".weight"): w for name, w in expert.named_parameters()}
        names.append(_names(own, activation))
        weights |= {f"{i}.{name}.weight": own[name] for name in names[-1]}
    if len(set(names)) > 1:
        raise ValueError(f"experts must have weights of the same names, got {set(names)}")
    return ExpertLayout(names[0], listed=True), weights


def _names(given: Iterable[str], activation: Activation) -> tuple[str, ...]:
    layouts = _GATED if activation == "swiglu" else _PLAIN
    for names in layouts:
        if set(names) == set(given):
            return names
    raise ValueError(
        f"experts with {activation=} must have the weights "
        + ", or ".join(" and ".join(names) for names in layouts)
        + f", and no other parameters (biases, adapters), got {', '.join(given) or 'none'}"
    )


def _check_known(activation: Activation) -> None:
    check_activation(None if activation == "swiglu" else activation, [])


def _check_activation(module: nn.Module, activation: Activation) -> None:
    """Raise ValueError if the module tells of another, in the ways of transformers.

    Some clamp gate and up in a method of their own, under the same names of weights.
    """
    kind = type(module).__name__
    if not getattr(module, "is_concatenated", True):
        raise ValueError(
            f"{kind} keeps features of gate and up in turn: pass a dict of gate_proj, up_proj and "
            f"down_proj instead"
        )
    x = torch.linspace(-99, 99, 23, device="cpu")
    gated = activation == "swiglu"
    given = [x, x.flip(0)] if gated else [x]
    (wanted,) = activate(given, activation)
    if gated and callable(own := getattr(module, "_apply_gate", None)):
        got = own(torch.cat(given).unsqueeze(0)).squeeze(0)
    elif callable(own := getattr(module, "act_fn", None)):
        got = own(x) * given[1] if gated else own(x)
    else:
        return
    if not torch.allclose(got, wanted, rtol=1e-4, atol=1e-4):
        raise ValueError(f"what {kind} does with gate and up, {own}, is not {activation=}")


def _expert_sizes(layout: ExpertLayout, weights: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
    """E, H and F."""
    (key, *_) = layout.keys([0], "down_proj")
    down = weights[key]
    if down.ndim != (2 if layout.listed else 3):
        wanted = "(H, F)" if layout.listed else "(experts, H, F)"
        raise ValueError(f"{key} must be {wanted}, got {tuple(down.shape)}")
    E = len(weights) // len(layout.names)
    return (E, *down.shape) if layout.listed else tuple(down.shape)


def _check_weight(key: str, weight: torch.Tensor, shape: tuple[int, ...]) -> None:
    if not weight.is_floating_point() or hasattr(weight, "__tensor_flatten__"):
        raise ValueError(
            f"{key} must be a plain tensor of floats, got {type(weight).__name__} of "
            f"{weight.dtype}: make experts parallel before they are quantized or sharded"
        )
    if tuple(weight.shape) != shape:
        raise ValueError(
            f"{key} must be {shape}, as down_proj (w2) has (.., H, F) and gate_proj and up_proj "
            f"(w1, w3) have (.., F, H), got {tuple(weight.shape)}; pass transposed weights (those "
            f"of gpt-oss and Llama 4 are) in a dict, by w.transpose(1, 2)"
        )
