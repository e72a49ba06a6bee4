"""What tests of DTensors share: a mesh, random tensors, the whole of one, equality in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from weft.collectives import spanning_group
from weft.dtensor import DeviceMesh, DTensor, init_device_mesh


def world() -> DeviceMesh:
    """All ranks, along one dim."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def r(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def ints(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Those in nested lists and tuples."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def full_of(value: Any) -> Any:
    """The whole of a DTensor, sums added up; anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def close(ours: Any, theirs: torch.Tensor) -> bool:
    """Equal but for the order of some dozens of additions in float64."""
    full = full_of(ours)
    kinds = (full.dtype, full.shape), (theirs.dtype, theirs.shape)
    return kinds[0] == kinds[1] and bool(
        torch.allclose(full, theirs, rtol=1e-9, atol=1e-10, equal_nan=True)
    )


@contextmanager
def as_if_on_two_hosts(mesh: DeviceMesh) -> Iterator[None]:
    """No symmetric memory spans the mesh within."""
    group = spanning_group(mesh)
    why = group.why
    object.__setattr__(group, "why", "as if on two hosts")
    try:
        yield
    finally:
        object.__setattr__(group, "why", why)
