"""The names of ColossalAI's `d_tensor`, as a thin reading of the same layouts.

    from weft.dtensor.interop.colossalai import DeviceMesh, DTensor, ShardingSpec

A `ShardingSpec` says for each tensor dim which mesh dims cut it, in this order: `{0: [0, 1]}` is
`[S01, R]`. Meshes have any number of dims.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

from weft.dtensor import tensor as weft_tensor
from weft.dtensor.api import distribute_tensor
from weft.dtensor.notation import format_colossalai, placements_of_cuts

__all__ = ["DTensor", "DeviceMesh", "ShardingSpec", "launch_from_torch"]


def launch_from_torch(config: Any = None, backend: str | None = None) -> None:
    """Start torch.distributed as torchrun says, if it was not started. `config` is ignored."""
    if not dist.is_initialized():
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(backend or ("nccl" if on_gpu else "gloo"))


class DeviceMesh:
    """A mesh of `mesh_shape`, of the ranks that `physical_mesh_id` lists.

    `init_process_group` is ignored: a mesh makes the groups that it needs.

    Attributes:
        mesh: the `torch.distributed.DeviceMesh` behind it.
    """

    def __init__(
        self,
        physical_mesh_id: torch.Tensor,
        mesh_shape: Sequence[int],
        init_process_group: bool = True,
        device: str | None = None,
    ) -> None:
        self.shape = tuple(mesh_shape)
        kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.mesh = TorchDeviceMesh(kind, physical_mesh_id.reshape(self.shape))


class ShardingSpec:
    """Which mesh dims cut each dim of a tensor of `dim_size` dims: `{tensor dim: [mesh dims]}`.

    Example:
        >>> ShardingSpec(2, {0: [0, 1]})
        [S01, R]
    """

    def __init__(self, dim_size: int, dim_partition_dict: Mapping[int, Sequence[int]]) -> None:
        self.dims = dim_size
        self.dim_partition_dict = {dim: list(cuts) for dim, cuts in dim_partition_dict.items()}
        if not all(0 <= dim < dim_size for dim in dim_partition_dict):
            raise ValueError(
                f"a tensor of {dim_size} dims has no dims {sorted(dim_partition_dict)}"
            )

    @property
    def cuts(self) -> list[list[int]]:
        """The mesh dims of each tensor dim."""
        return [self.dim_partition_dict.get(dim, []) for dim in range(self.dims)]

    def __repr__(self) -> str:
        return f"[{', '.join('S' + ''.join(map(str, c)) if c else 'R' for c in self.cuts)}]"


class DTensor:
    """`tensor`, the same on all ranks, cut over `device_mesh` as `sharding_spec` says.

    Attributes:
        tensor: the `weft.dtensor.DTensor`.
    """

    def __init__(
        self, tensor: torch.Tensor, device_mesh: DeviceMesh, sharding_spec: ShardingSpec
    ) -> None:
        placements = placements_of_cuts(sharding_spec.cuts, device_mesh.shape)
        self.tensor: weft_tensor.DTensor = distribute_tensor(tensor, device_mesh.mesh, placements)
        self.device_mesh = device_mesh

    @property
    def sharding_spec(self) -> str:
        """The layout, as `[S0, R]`."""
        return format_colossalai(self.tensor.placements, self.tensor.ndim, self.device_mesh.shape)

    @property
    def local_tensor(self) -> torch.Tensor:
        """This rank's part."""
        return self.tensor.to_local()

    @property
    def global_shape(self) -> torch.Size:
        """Shape of the whole tensor."""
        return self.tensor.shape

    def convert_layout(self, device_mesh: DeviceMesh, sharding_spec: ShardingSpec) -> DTensor:
        """The same tensor in another layout."""
        result = object.__new__(DTensor)
        placements = placements_of_cuts(sharding_spec.cuts, device_mesh.shape)
        result.tensor = self.tensor.redistribute(device_mesh.mesh, placements)
        result.device_mesh = device_mesh
        return result

    def to_global(self) -> torch.Tensor:
        """The whole tensor, on every rank."""
        return self.tensor.full_tensor()

    def __repr__(self) -> str:
        return (
            f"DTensor(sharding_spec={self.sharding_spec}, mesh={list(self.device_mesh.shape)}, "
            f"global_shape={tuple(self.global_shape)}, local_tensor={self.local_tensor})"
        )
