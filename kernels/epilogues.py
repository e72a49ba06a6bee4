"""What a fused matmul does to its fp32 sums before it rounds them, and the gradient of that.

    y = activation(x @ w + bias)                      "relu", "gelu", "gelu_tanh", "silu", or None
    y = silu(x @ gate + b_0) * (x @ up + b_1)         "swiglu": of two weights, one output

"gelu" is the exact one (erf), "gelu_tanh" its approximation by tanh. `z` stands for the sums that
an activation is given. Without gradients z is never written. Where a gradient is wanted the kernel
writes z beside y: computing it again would cost a third gather and a third matmul, and a layer that
calls the activation by itself keeps z as well. relu keeps nothing more: y tells the sign of z.

Here is the torch side; the kernels' own is `tiles.activated`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch.nn import functional

Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "swiglu"]

_NAMES = ("relu", "gelu", "gelu_tanh", "silu", "swiglu")


def check_activation(activation: str | None, weights: Sequence[torch.Tensor]) -> None:
    """Raise ValueError unless `activation` is one of ours, and swiglu has two weights alike."""
    if activation is not None and activation not in _NAMES:
        raise ValueError(f"activation must be None or one of {_NAMES}, got {activation!r}")
    if activation is not None and any(w.is_complex() for w in weights):
        raise ValueError(f"{activation=} is of real numbers, got {weights[0].dtype}")
    shapes = [tuple(w.shape) for w in weights]
    if activation == "swiglu" and (len(shapes) != 2 or shapes[0] != shapes[1]):
        raise ValueError(
            f'activation="swiglu" takes w as the pair (gate, up) of one shape, got {shapes}'
        )


def activate(zs: Sequence[torch.Tensor], activation: Activation | None) -> list[torch.Tensor]:
    """activation(z) for each z, or one output of two for swiglu. Differentiable."""
    if activation == "swiglu":
        gate, up = zs
        return [functional.silu(gate) * up]
    if activation is None:
        return list(zs)
    return [_plain(z, activation) for z in zs]


def _plain(z: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation == "relu":
        return torch.relu(z)
    if activation == "silu":
        return functional.silu(z)
    return functional.gelu(z, approximate="tanh" if activation == "gelu_tanh" else "none")


def keeps_sums(activation: Activation | None) -> bool:
    """Whether the gradient needs z besides y."""
    return activation not in (None, "relu")


def gradients(
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
