"""Keeps torch.compile out of our own code after a graph break."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])
_frames: Any = torch._C._dynamo.eval_frame
_LEFT_ALONE = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)


def unless_traced(function: _Function) -> _Function:
    """After a graph break before `function`, run it and all that it calls without compiling them.

    Otherwise torch.compile would compile each of these frames by itself. Inside of a graph the
    function is traced as usual.
    """
    _frames.set_code_exec_strategy(function.__code__, _LEFT_ALONE)
    return function
