"""Symmetric memory, device-side signals, and collectives on them.

May import `weft.settings` and `weft.errors`: nothing of ours lies below. Read `ranks` (who takes
part, what they have called), `memory` (which all of a group see), `device` (signals between
kernels), `kernels`, then `movement` and `collective_ops`, what is public; `topology` and `hosts`
(several hosts), `cost` and `prices` (what calls take), `process_groups` (torch's).
"""

if not __name__.startswith("weft."):
    raise ImportError(
        "import weft.collectives: the top-level name is not ours. If another package is meant, "
        "install weft (pip install -e .) rather than have its checkout on the path"
    )

import os as _os
import sys as _sys
from typing import TYPE_CHECKING as _TYPE_CHECKING

import torch as _torch

# Kernels are interpreted where there is no GPU. Triton decides this when a kernel is decorated, for
# its own functions on import: hence here, before any of our modules can import it.
# `python -m weft.kernels.compile.aot` opts out with TRITON_INTERPRET=0.
if "TRITON_INTERPRET" not in _os.environ and not _torch.cuda.is_available():
    _os.environ["TRITON_INTERPRET"] = "1"
if "triton.language" in _sys.modules:
    from weft.collectives.interpreted.interpreter import (
        interpret_tritons_own as _interpret_tritons_own,
    )

    _interpret_tritons_own()

from weft import versions as _versions
from weft.collectives import custom_ops as custom_ops  # registers torch.ops.weft
from weft.collectives.collective_ops import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    reduce_scatter,
)
from weft.collectives.memory.cuda_graphs import CudaGraph, cuda_graph
from weft.collectives.memory.exchange import Exchange, agree, exchange
from weft.collectives.memory.symmetric import SymmetricBuffer, empty
from weft.collectives.memory.waiter import wait_seconds
from weft.collectives.memory.workspace import Workspace, check_peers, close, workspace
from weft.collectives.ranks.caches import caches
from weft.collectives.ranks.chunks import chunk_sizes
from weft.collectives.ranks.group import Group, ranks_group, resolve, spanning_group

__all__ = [
    "CudaGraph",
    "Exchange",
    "Group",
    "SymmetricBuffer",
    "Workspace",
    "agree",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "caches",
    "check_peers",
    "chunk_sizes",
    "close",
    "cuda_graph",
    "empty",
    "exchange",
    "ranks_group",
    "reduce_scatter",
    "resolve",
    "spanning_group",
    "wait_seconds",
    "workspace",
]

_versions.warn_if_untested()

if _TYPE_CHECKING:
    from weft.collectives.device import signals as signals


def __getattr__(name: str) -> object:
    if (
        name == "signals"
    ):  # for kernels of one's own; not before it is asked for, as it needs Triton
        import weft.collectives.device.signals

        return weft.collectives.device.signals
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """What is public, for completion."""
    return sorted([*__all__, "signals"])
