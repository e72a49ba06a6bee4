"""torch.autocast for the fused ops, which cast their operands there as torch.matmul does.

Example:
    with torch.autocast("cuda", torch.bfloat16):
        y = weft.all_gather_matmul(x, w)        # x and w in fp32: y in bf16
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._pytree import tree_map_only

_P = ParamSpec("_P")
_R = TypeVar("_R")

_CAST = (torch.float32, torch.bfloat16, torch.float16)


def autocast(op: Callable[_P, _R]) -> Callable[_P, _R]:
    """Where autocast is on, call `op` with operands in its dtype and with autocast off, since the
    engines choose what they add up in. Gradients have the operands' original dtypes.
    """

    @wraps(op)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch._C._is_any_autocast_enabled():
            return op(*args, **kwargs)
        given = (*args, *kwargs.values())
        first = next((each for each in given if isinstance(each, torch.Tensor)), None)
        device = "cpu" if first is None else first.device.type
        if not torch.is_autocast_enabled(device):
            return op(*args, **kwargs)
        dtype = torch.get_autocast_dtype(device)

        def cast(x: torch.Tensor) -> torch.Tensor:
            return x.to(dtype) if x.dtype in _CAST else x

        # The scales of fp8 operands stay as they are.
        operands: Any = (args, kwargs)
        if first is not None and first.dtype in _CAST:
            operands = tree_map_only(torch.Tensor, cast, operands)
        with torch.autocast(device, enabled=False):
            return op(*operands[0], **operands[1])

    return run


def outside_autocast(backward: Callable[..., _R]) -> Callable[..., _R]:
    """Have `backward(ctx, *grads)` of an autograd function compute in the dtypes of the forward,
    even if it is called under autocast.
    """

    @wraps(backward)
    def run(ctx: Any, *grads: torch.Tensor | None) -> _R:
        if not torch._C._is_any_autocast_enabled():
            return backward(ctx, *grads)
        device = next((grad.device.type for grad in grads if grad is not None), "cpu")
        with torch.autocast(device, enabled=False):
            return backward(ctx, *grads)

    return run
