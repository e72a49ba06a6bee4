"""DTensor: tensors sharded over a mesh, with the meaning of `torch.distributed.tensor`.

May import `weft.collectives` and `weft.kernels`. Read `layout` (who has which part), `tensor`,
`move` (from layout to layout), `dispatch` (from a call to its plan) and `rules`, `fused` (what runs
as kernels), `api` (functions on tensors), `parallel` (styles) and `plans`; `checkpoint`, `interop`.
"""

if not __name__.startswith("weft."):
    raise ImportError(
        "import weft.dtensor: the top-level name is not ours. If another package is meant, "
        "install weft (pip install -e .) rather than have its checkout on the path"
    )

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from weft.dtensor import rules as rules
from weft.dtensor.api import (
    distribute_module,
    distribute_tensor,
    empty,
    full,
    linspace,
    logspace,
    ones,
    rand,
    randn,
    zeros,
)
from weft.dtensor.fused import functional as functional

# These register themselves: the rules in `dispatch`, the functions in `DTensor`, hooks of steps.
from weft.dtensor.interop import fully_sharded as fully_sharded
from weft.dtensor.interop import optimizer_step as optimizer_step
from weft.dtensor.interop import state_dicts as state_dicts
from weft.dtensor.interop.torch_dtensor import from_torch, to_torch
from weft.dtensor.layout.boxes import layout_of
from weft.dtensor.move.redistribute import redistribute_plan
from weft.dtensor.plans.planning import Plan, plan
from weft.dtensor.tensor import DTensor, rebuild

# So that torch.load(weights_only=True) takes a DTensor.
torch.serialization.add_safe_globals([DTensor, layout_of, rebuild, DeviceMesh, _StridedShard])
torch.serialization.add_safe_globals([Partial, Replicate, Shard])

__all__ = [
    "DTensor",
    "DeviceMesh",
    "Partial",
    "Placement",
    "Plan",
    "Replicate",
    "Shard",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "from_torch",
    "full",
    "init_device_mesh",
    "linspace",
    "logspace",
    "ones",
    "plan",
    "rand",
    "randn",
    "redistribute_plan",
    "to_torch",
    "zeros",
]


def __dir__() -> list[str]:
    """What is public, for completion."""
    return sorted([*__all__, "checkpoint", "debug", "experimental", "notation", "parallel"])
