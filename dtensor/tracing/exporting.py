"""torch.export records ops above autograd: it sees a DTensor only if an op of its graph made it."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

_is_exporting = torch.compiler.is_exporting


def is_exported() -> bool:
    """Whether torch.export records this very call, and is not inside of one that it records."""
    if not _is_exporting():
        return False
    mode = get_proxy_mode()
    return mode is not None and mode.pre_dispatch


def refuse_export(what: str) -> None:
    """Raise if torch.export records the call: its result would not be known to the graph."""
    if is_exported():
        raise NotImplementedError(
            f"{what}: torch.export records ops on DTensors that are parameters or arguments of the "
            f"module, but not how a DTensor is made or moved. Export a module of plain tensors "
            f"(weft.ColumnParallelLinear, weft.RowParallelLinear), or trace this one by "
            f"torch.compile, or by aot_export_joint_with_descriptors of torch._functorch"
        )
