"""Where a process is in a mesh."""

from __future__ import annotations

import itertools
import weakref
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import _mesh_resources

from weft.dtensor.layout.extents import Integers
from weft.dtensor.layout.placements import Placements, is_shard, shard_dim
from weft.dtensor.layout.runs import Shape

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def mesh_or_current(device_mesh: DeviceMesh | None) -> DeviceMesh:
    """`device_mesh`, or that of the enclosing `with mesh:`.

    Raises:
        RuntimeError: there is none.
    """
    if device_mesh is not None:
        return device_mesh
    if not _mesh_resources.mesh_stack:
        raise RuntimeError(
            "No device mesh is currently active! Pass device_mesh=, or make the call inside of "
            "`with mesh:`"
        )
    return _mesh_resources.get_current_mesh()


class StandInMesh:
    """Stands in for a `DeviceMesh` in arithmetic: for ranks that do not run, or have no mesh."""

    def __init__(self, mesh: torch.Tensor) -> None:
        self.mesh, self.shape, self.ndim = mesh, tuple(mesh.shape), mesh.ndim


class MeshPlace:
    """Where this process is in a mesh; cached, as asking the mesh takes microseconds."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.sizes: Shape = tuple(mesh.shape)
        with unset_fake_temporarily():  # the first look at a mesh may be under a FakeTensorMode
            grid = mesh.mesh
            self.ranks: tuple[int, ...] = tuple(grid.flatten().tolist())
            # Whether ranks along each dim ascend, as those of its process group do.
            self.ascends = [bool((grid.diff(dim=dim) > 0).all()) for dim in range(grid.ndim)]
            self.grid: Integers = grid.numpy()
        here = dist.get_rank() if dist.is_initialized() else 0
        self.index: int | None = self.ranks.index(here) if here in self.ranks else None
        # Stand-ins for single ranks, so that moves from there are planned once.
        self.meshes_of_one: dict[int, Any] = {}

    @cached_property
    def coordinates(self) -> list[Shape]:
        """Of every rank; where there may be thousands, see `coordinate`."""
        return list(itertools.product(*map(range, self.sizes)))

    def coordinate(self, index: int) -> Shape:
        """Of rank `index` of the flattened mesh."""
        found = []
        for size in reversed(self.sizes):
            index, at = divmod(index, size)
            found.append(at)
        return tuple(reversed(found))

    def index_at(self, coordinate: Shape) -> int:
        """The reverse."""
        index = 0
        for at, size in zip(coordinate, self.sizes, strict=True):
            index = index * size + at
        return index


_places: weakref.WeakKeyDictionary[Any, MeshPlace] = weakref.WeakKeyDictionary()


def place_in_mesh(mesh: DeviceMesh) -> MeshPlace:
    """This process's place in `mesh`."""
    place = _places.get(mesh)
    if place is None:
        place = _places[mesh] = MeshPlace(mesh)
    return place


def parts_of_dims(mesh: DeviceMesh, placements: Placements, ndim: int) -> list[int]:
    """Into how many parts each tensor dim is cut."""
    parts = [1] * ndim
    for placement, size in zip(placements, place_in_mesh(mesh).sizes, strict=True):
        if is_shard(placement):
            parts[shard_dim(placement)] *= size
    return parts
