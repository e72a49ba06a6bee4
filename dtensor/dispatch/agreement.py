"""Errors that only one rank can see, such as an index out of range, are raised on all of them.

Otherwise that rank would raise alone, and the others would wait for it in their next collective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import Partial

from weft.collectives.ranks.reports import check_all
from weft.collectives.ranks.traced import is_traced
from weft.dtensor.dispatch.call import leaves
from weft.dtensor.layout.boxes import Layout, layout_of
from weft.dtensor.move.redistribute import move


def all_agree(verdict: bool, layout: Layout, device: torch.device) -> bool:
    """Whether every rank of the mesh says True. Collective."""
    one = torch.tensor([verdict], dtype=torch.uint8, device=device)
    partial = layout_of(layout.mesh, (Partial("min"),) * layout.mesh.ndim, (1,), (1,), torch.uint8)
    answer = bool(move(one, partial, partial.replicated()).item())
    check_all()  # of what the host has just waited for
    return answer


def agreed(
    local: Callable[..., Any], layout: Layout, what: str, kind: type[Exception], fault: str
) -> Callable[..., Any]:
    """Wrap `local`, so that a failure on one rank is an error of type `kind` on every rank.

    Args:
        local: runs on CPU tensors, and must not communicate.
        what: names the call in the error.
        fault: describes the failure to the ranks on which `local` succeeded.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = (a for a in leaves([args, kwargs]) if isinstance(a, torch.Tensor))
        if any(map(is_traced, tensors)):  # a traced tensor has no values to look at
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
