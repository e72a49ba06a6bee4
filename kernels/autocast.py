"""torch.autocast for the fused ops: they take their operands as torch.matmul does there.

with torch.autocast("cuda", torch.bfloat16):
    y = weft.all_gather_matmul(x, w)        x and w in fp32: y in bf16
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
    """`op` of operands in autocast's dtype, where that is on, and without it inside: the engines
    choose what they add up in. Gradients come back in the operands' own dtypes."""

    @wraps(op)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch._C._is_any_autocast_enabled():
            return op(*args, **kwargs)
        first = args[0] if args else None
        device = first.device.type if isinstance(first, torch.Tensor) else "cpu"
        if not torch.is_autocast_enabled(device):
            return op(*args, **kwargs)
        dtype = torch.get_autocast_dtype(device)

        def cast(x: torch.Tensor) -> torch.Tensor:
            return x.to(dtype) if x.dtype in _CAST else x

        # The factors of fp8 operands stay as they are.
        given: Any = (args, kwargs)
        if isinstance(first, torch.Tensor) and first.dtype in _CAST:
            given = tree_map_only(torch.Tensor, cast, given)
        with torch.autocast(device, enabled=False):
            return op(*given[0], **given[1])

    return run
