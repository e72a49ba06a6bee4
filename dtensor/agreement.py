"""Agreement: what only one rank can see, an index out of range say, is told to all of them.

Without it the rank would raise alone, and the others wait for it in their next collective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import Partial

from weft.collectives.group import is_traced
from weft.dtensor.call import leaves
from weft.dtensor.layout import Layout, layout_of
from weft.dtensor.redistribute import move


def all_agree(verdict: bool, layout: Layout, device: torch.device) -> bool:
    """Whether every rank of the mesh says True. Collective."""
    one = torch.tensor([verdict], dtype=torch.uint8, device=device)
    partial = layout_of(layout.mesh, (Partial("min"),) * layout.mesh.ndim, (1,), (1,), torch.uint8)
    return bool(move(one, partial, partial.replicated()).item())


def agreed(
    local: Callable[..., Any], layout: Layout, what: str, kind: type[Exception], fault: str
) -> Callable[..., Any]:
    """`local`, which raises on every rank where it raises on one: an error of this `kind`.

    It runs on a CPU, and must not communicate.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = (a for a in leaves([args, kwargs]) if isinstance(a, torch.Tensor))
        if any(map(is_traced, tensors)):  # nobody knows values while a graph is made
            return local(*args, **kwargs)
        error: Exception | None = None
        result = None
        try:
            result = local(*args, **kwargs)
        except (IndexError, RuntimeError) as raised:
            error = raised
        if not all_agree(error is None, layout, torch.device("cpu")):
            raise kind(f"{what}: {error or f'{fault} on another rank'}")
        return result

    return run
