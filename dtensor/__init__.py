"""DTensor: tensors sharded over a mesh, with the meaning of `torch.distributed.tensor`."""

if not __name__.startswith("weft."):
    raise ImportError("import weft.dtensor: the top-level name is not ours")

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from weft.dtensor import (
    functional,
    rules_index,
    rules_matmul,
    rules_nn,
    rules_pointwise,
    rules_reduce,
    rules_view,
)
from weft.dtensor.api import (
    distribute_module,
    distribute_tensor,
    empty,
    full,
    ones,
    rand,
    randn,
    zeros,
)
from weft.dtensor.redistribute import redistribute_plan
from weft.dtensor.tensor import DTensor

__all__ = [
    "DTensor",
    "DeviceMesh",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "full",
    "init_device_mesh",
    "ones",
    "rand",
    "randn",
    "redistribute_plan",
    "zeros",
]
