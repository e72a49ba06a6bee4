"""Names in torch.profiler for calls that are neither torch ops nor autograd functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch._C._autograd import _profiler_enabled

_P = ParamSpec("_P")
_R = TypeVar("_R")

profiler_enabled = _profiler_enabled  # whether torch's profiler is at work


def profiled(name: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Show a function's calls as `weft::name`, including waits for peers."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(function)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if not profiler_enabled():
                return function(*args, **kwargs)
            with torch.autograd.profiler.record_function(f"weft::{name}"):
                return function(*args, **kwargs)

        return run

    return decorate
