"""What a fused matmul does to its fp32 sums before rounding them, and the gradient of that.

    y = activation(x @ w + bias)                      "relu", "gelu", "gelu_tanh", "silu", or None
    y = silu(x @ gate + b_0) * (x @ up + b_1)         "swiglu": two weights, one output

"gelu" is the exact one (erf), "gelu_tanh" its approximation by tanh. `z` is the argument of the
activation. Without gradients it is never written. If a gradient is needed, the kernel writes z
beside y: recomputing it would cost a third gather and a third matmul, and a layer with a separate
activation keeps z as well. relu keeps nothing more: y tells the sign of z.

This is the torch side; that of the kernels is `outputs.activated`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast, get_args

import torch
from torch.nn import functional

Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "swiglu"]
_NAMES: tuple[str, ...] = get_args(Activation)


def check_activation(activation: str | None, weights: Sequence[torch.Tensor]) -> None:
    """Raise ValueError for an unknown `activation`, or swiglu without two weights alike."""
    if activation is not None and activation not in _NAMES:
        raise ValueError(f"activation must be None or one of {_NAMES}, got {activation!r}")
    if activation is not None and any(w.is_complex() for w in weights):
        raise ValueError(f"{activation=} needs real numbers, got {weights[0].dtype}")
    shapes = [tuple(w.shape) for w in weights]
    if activation == "swiglu" and (len(shapes) != 2 or shapes[0] != shapes[1]):
        raise ValueError(
            f'activation="swiglu" takes w as a pair (gate, up) of equal shapes, got {shapes}'
        )


def activate(zs: Sequence[torch.Tensor], activation: Activation | None) -> list[torch.Tensor]:
    """activation(z) for each z, or one output of two for swiglu. Differentiable."""
    if activation == "swiglu":
        gate, up = zs
        return [functional.silu(gate) * up]
    if activation is None:
        return list(zs)
    return [_one_argument(z, activation) for z in zs]


def _one_argument(z: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation == "relu":
        return torch.relu(z)
    if activation == "silu":
        return functional.silu(z)
    return functional.gelu(z, approximate="tanh" if activation == "gelu_tanh" else "none")


def keeps_sums(activation: Activation | None) -> bool:
    """Whether the gradient needs z in addition to y."""
    return activation not in (None, "relu")


def activation_gradients(
    dys: Sequence[torch.Tensor], kept: Sequence[torch.Tensor], activation: Activation | None
) -> list[torch.Tensor]:
    """dz for every z, given dy for every y; `kept` are the zs, or the ys for relu."""
    aten = torch.ops.aten
    if activation is None:
        return list(dys)
    if activation == "swiglu":
        (dy,), (gate, up) = dys, kept
        return [aten.silu_backward(dy * up, gate), dy * functional.silu(gate)]
    pairs = zip(dys, kept, strict=True)
    if activation == "relu":
        return [cast(torch.Tensor, aten.threshold_backward(dy, y, 0)) for dy, y in pairs]
    if activation == "silu":
        return [cast(torch.Tensor, aten.silu_backward(dy, z)) for dy, z in pairs]
    how = "tanh" if activation == "gelu_tanh" else "none"
    return [cast(torch.Tensor, aten.gelu_backward(dy, z, approximate=how)) for dy, z in pairs]
