"""Causal attention on one device: the oracle, and what torch has for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.nn import functional


def torch_attentions(device: torch.device) -> dict[str, Callable[..., torch.Tensor]]:
    """torch's attention, by each of its implementations that this device has."""
    if device.type == "cpu":
        return {"SDPA": partial(_sdpa, None)}
    from torch.nn.attention import SDPBackend

    return {
        "flash": partial(_sdpa, SDPBackend.FLASH_ATTENTION),
        "cuDNN": partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
    }


def _sdpa(backend: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    from torch.nn.attention import sdpa_kernel

    call = functional.scaled_dot_product_attention
    with nullcontext() if backend is None else sdpa_kernel(backend):
        return call(q, k, v, is_causal=True)


_BLOCK = 1024  # queries at a time: all scores would take S * S * H numbers


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """out and, given its gradient, dq, dk and dv, of (1, H, S, D) in float64, causal: the oracle.

    A key head is shared by H / H_kv query heads.
    """
    S, scale, share = q.shape[2], 1 / math.sqrt(q.shape[3]), q.shape[1] // k.shape[1]
    out = torch.zeros_like(q, dtype=torch.float64)
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v))
    positions = torch.arange(S, device=q.device)
    for head, first in product(range(q.shape[1]), range(0, S, _BLOCK)):
        last = min(first + _BLOCK, S)
        rows = slice(first, last)
        queries = q[0, head, rows].double()
        keys, values = (x[0, head // share, :last].double() for x in (k, v))
        hidden = positions[:last] > positions[rows, None]
        weights = (queries @ keys.T * scale).masked_fill(hidden, -torch.inf).softmax(-1)
        out[0, head, rows] = weights @ values
        if dout is None:
            continue
        d = dout[0, head, rows].double()
        dweights = d @ values.T
        dscores = weights * (dweights - (weights * dweights).sum(-1, keepdim=True)) * scale
        dq[0, head, rows] = dscores @ keys
        dk[0, head // share, :last] += dscores.T @ queries
        dv[0, head // share, :last] += weights.T @ d
    return [out, dq, dk, dv]
