"""One call of dispatch or combine, as its engines take it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from weft.kernels.engine.engines import RunnableEngine
from weft.kernels.engine.epilogues import Activation
from weft.kernels.engine.fp8 import Quantize
from weft.kernels.experts.routing import Routing


class DispatchMade(NamedTuple):
    """What a forward makes: `hs`, the rows if they are kept, and what else a gradient needs."""

    hs: list[torch.Tensor]
    rows: torch.Tensor | None
    kept: list[torch.Tensor]


class DispatchCall(NamedTuple):
    """One call, except for its tensors, which autograd must see."""

    routing: Routing
    engine: RunnableEngine
    activation: Activation | None
    keep: bool  # the rows, for the gradients of the weights
    quantize: Quantize | None
    made: DispatchMade | None = None  # what the forward has to return, if that has run

    def told(self, x: torch.Tensor) -> tuple[Any, ...]:
        """What must be the same on every rank."""
        k, quantize = ("k", self.routing.top_k), ("quantize", self.quantize)
        return x.dtype, ("K", x.shape[1]), k, quantize


class CombineCall(NamedTuple):
    """One call, except for its tensors, which autograd must see."""

    routing: Routing
    engine: RunnableEngine
    wire: torch.dtype

    def told(self, columns: int, dtype: torch.dtype) -> tuple[Any, ...]:
        """What must be the same on every rank."""
        return dtype, self.wire, ("H", columns), ("k", self.routing.top_k)
