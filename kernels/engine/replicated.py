"""Values that are the same on every rank of a group, and how autograd treats them.

A replicated value has one gradient, the same on every rank. Between such a value and the ranks' own
values, forward and backward mirror each other, however often one differentiates:

               forward                     gradient
    Spread     nothing                     sum over ranks      one value -> each rank's own use
    Summed     sum over ranks              nothing             each rank's term -> one value
"""

from __future__ import annotations

from typing import Any

import torch

from weft.collectives import Group, all_reduce, movement
from weft.kernels.engine.local_matmul import SumOp


class Spread(torch.autograd.Function):
    """A replicated value that each rank uses for its own part."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return Summed.apply(grad, ctx.group, "sum"), None


class Summed(torch.autograd.Function):
    """The sum (or average) of every rank's x, a replicated value. Sent in `wire_dtype`, if any."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        group: Group,
        reduce_op: SumOp,
        wire_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        ctx.group, ctx.scale = group, 1 / group.world_size if reduce_op == "avg" else 1
        if wire_dtype is None:
            return all_reduce(x, group, reduce_op=reduce_op)
        return movement.all_reduce(x.to(wire_dtype), group, reduce_op, as_is=True).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        own: torch.Tensor = Spread.apply(grad, ctx.group)
        return own * ctx.scale, None, None, None
