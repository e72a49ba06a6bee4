"""The norms of sums as custom ops.

torch.ops.weft.reduce_scatter_rms_norm_all_gather, all_reduce_residual_rms_norm
    the public functions, given the name of a group; their gradients are made of other ops
"""

from __future__ import annotations

from typing import Any

import torch

from weft.collectives.custom_ops import define, differentiate, planes, planes_of, resized, world_of
from weft.collectives.ranks.chunks import chunk_sizes
from weft.kernels.engine.fp8 import FP8
from weft.kernels.norm import all_reduce_norm, rms_norm


def _sum_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    residual: torch.Tensor | None,
    group_name: str,
    eps: float,
    dim: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    y, h = rms_norm.reduce_scatter_rms_norm_all_gather(
        x, weight, group_name, residual=residual, eps=eps, dim=dim
    )
    return planes_of(y, dim), planes_of(h, dim)


def _sum_rms_norm_fake(
    x: torch.Tensor, weight: Any, residual: Any, group_name: str, eps: float, dim: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    rank, world_size = world_of(group_name)
    length = chunk_sizes(x.shape[dim], world_size)[rank]
    return planes(x, x.shape, dim), planes(x, resized(x, dim, length), dim)


def _sum_rms_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, _, group_name, eps, dim = inputs
    ctx.save_for_backward(output[1], weight)
    sizes = chunk_sizes(x.shape[dim], world_of(group_name)[1])
    ctx.call = rms_norm.NormCall(group_name, sizes, eps, dim)


def _sum_rms_norm_grads(
    ctx: Any, dy: torch.Tensor, dh: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    h, weight = ctx.saved_tensors
    needs = ctx.needs_input_grad[:3]
    return *ctx.call.gradients(h, weight, dy, dh, needs), None, None, None


def _all_reduce_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    group_name: str,
    eps: float,
    quantize: Any = None,
) -> list[torch.Tensor]:
    return list(
        all_reduce_norm.all_reduce_residual_rms_norm(
            x, residual, weight, group_name, eps=eps, quantize=quantize
        )
    )


def _all_reduce_norm_fake(
    x: torch.Tensor, residual: Any, weight: Any, group_name: str, eps: float, quantize: Any = None
) -> list[torch.Tensor]:
    h = x.new_empty(x.shape)
    if quantize is None:
        return [x.new_empty(x.shape), h]
    scale = x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    return [x.new_empty(x.shape, dtype=FP8), h, scale]


def _all_reduce_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, weight, group_name, eps, _ = inputs
    ctx.save_for_backward(output[1], weight)
    ctx.call = rms_norm.NormCall(group_name, [], eps, 0, whole=True)


def _all_reduce_norm_grads(
    ctx: Any, grads: list[torch.Tensor | None]
) -> tuple[torch.Tensor | None, ...]:
    h, weight = ctx.saved_tensors
    dy, dh = (torch.zeros_like(h) if grad is None else grad for grad in grads)
    needs_x, needs_residual, needs_weight = ctx.needs_input_grad[:3]
    dx, dw, dr = ctx.call.gradients(h, weight, dy, dh, (needs_x, needs_weight, needs_residual))
    return dx, dr, dw, None, None, None


define(
    "reduce_scatter_rms_norm_all_gather(Tensor x, Tensor? weight, Tensor? residual, "
    "str group_name, float eps, int dim=0) -> (Tensor, Tensor)",
    _sum_rms_norm,
    _sum_rms_norm_fake,
)
differentiate("reduce_scatter_rms_norm_all_gather", _sum_rms_norm_setup, _sum_rms_norm_grads)
define(
    "all_reduce_residual_rms_norm(Tensor x, Tensor? residual, Tensor? weight, str group_name, "
    "float eps, str? quantize=None) -> Tensor[]",
    _all_reduce_norm,
    _all_reduce_norm_fake,
)
differentiate("all_reduce_residual_rms_norm", _all_reduce_norm_setup, _all_reduce_norm_grads)
