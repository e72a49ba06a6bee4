"""What torch.compile does with our own code where its graph breaks off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])
_frames: Any = torch._C._dynamo.eval_frame
_LEFT_ALONE = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)


def unless_traced(function: _Function) -> _Function:
    """Where a graph of torch.compile has broken off ahead of `function`, it and all that it calls
    run as they are, and are not compiled piece by piece. A trace that meets it takes it in."""
    _frames.set_code_exec_strategy(function.__code__, _LEFT_ALONE)
    return function
