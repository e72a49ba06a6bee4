"""Layouts: which part of a global tensor each rank of a mesh holds.

A layout is (mesh, placements, global shape, stride, dtype). Along each tensor dim it gives a rank
its *runs*: (start, length) pairs of global indices, in the order of the rank's local tensor. A
plain `Shard` gives one run, `_StridedShard` several. The product of the runs over the dims is the
rank's box. Placements apply from left to right: a later mesh dim cuts what the earlier ones left.

    shape (5, 4), mesh (2, 2), [Shard(0), Shard(1)]      rank 0: rows [0, 3), columns [0, 2)
                                                         rank 3: rows [3, 5), columns [2, 4)

Everything here is arithmetic, without communication. Layouts are interned: equal layouts are one
object, and a dictionary key made of them is cheap. Only those of a graph that is traced for several
sizes are not: see `symbolic.py`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from weft.dtensor.layout.extents import Extent, Integers, extents_of, over_the_mesh
from weft.dtensor.layout.placements import (
    Placements,
    is_shard,
    normalize,
    pieces_of,
    shard_dim,
    show,
)
from weft.dtensor.layout.places import parts_of_dims, place_in_mesh
from weft.dtensor.layout.runs import (
    Box,
    Shape,
    contiguous_stride,
    even_runs,
    is_open,
    runs_of,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Layout:
    """How a tensor is placed on a mesh. Made by `layout_of`: equal layouts are one object."""

    mesh: DeviceMesh
    placements: Placements
    shape: Shape
    stride: Shape
    dtype: torch.dtype
    # Whether the boxes differ from those of the placements: see `with_boxes`.
    has_own_boxes = False

    def __init__(
        self,
        mesh: DeviceMesh,
        placements: Placements,
        shape: Shape,
        stride: Shape,
        dtype: torch.dtype,
    ) -> None:
        self.mesh, self.placements = mesh, placements
        self.shape, self.stride, self.dtype = shape, stride, dtype
        self.place = place_in_mesh(mesh)
        # None in a process outside of the mesh, which holds no part.
        self.index = self.place.index

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}{list(self.shape)} {show(self.placements)} on {list(self.place.sizes)}"

    def __reduce__(self) -> tuple[Any, ...]:
        return layout_of, (self.mesh, self.placements, self.shape, self.stride, self.dtype)

    @property
    def ndim(self) -> int:
        """Number of dims of the tensor."""
        return len(self.shape)

    @cached_property
    def boxes(self) -> list[Box]:
        """Each rank's box, in the order of the flattened mesh."""
        return [self.box(coordinate) for coordinate in self.place.coordinates]

    def box(self, coordinate: Shape) -> Box:
        """The box of the rank at `coordinate` of the mesh."""
        cuts: list[tuple[tuple[int, int, int], ...]] = [()] * len(self.shape)
        for placement, parts, index in zip(
            self.placements, self.place.sizes, coordinate, strict=True
        ):
            if is_shard(placement):
                cuts[shard_dim(placement)] += ((pieces_of(placement), parts, index),)
        return tuple(
            (even_runs if is_open(size) else runs_of)(size, cut)
            for size, cut in zip(self.shape, cuts, strict=True)
        )

    def box_at(self, index: int) -> Box:
        """The box of rank `index` of the flattened mesh, without those of the others."""
        given: list[Box] | None = self.__dict__.get("boxes")
        return self.box(self.place.coordinate(index)) if given is None else given[index]

    @cached_property
    def extents(self) -> tuple[Extent, ...] | None:
        """What every rank holds of each dim, as arithmetic, where it is one run."""
        return extents_of(self)

    @cached_property
    def lengths(self) -> Integers | None:
        """How many elements every rank holds; None where `extents` are."""
        if self.extents is None:
            return None
        return over_the_mesh([stop - start for start, stop in self.extents], self.place.sizes)

    def shape_at(self, index: int) -> Shape:
        """Local shape of rank `index` of the flattened mesh."""
        return tuple(sum(size for _, size in runs) for runs in self.box_at(index))

    @cached_property
    def local_shape(self) -> Shape:
        """Local shape on this process. Outside of the mesh it is empty, but that of a scalar."""
        if self.index is None:
            return (0,) if self.shape else ()
        return self.shape_at(self.index)

    @cached_property
    def offset(self) -> Shape:
        """First global index of this process's box along each dim; the dim's size if empty."""
        if self.index is None:
            return (0,) * len(self.shape)
        box = self.box_at(self.index)
        return tuple(
            runs[0][0] if runs else size for runs, size in zip(box, self.shape, strict=True)
        )

    @cached_property
    def coordinate(self) -> Shape:
        """This process's coordinate in the mesh."""
        assert self.index is not None
        return self.place.coordinate(self.index)

    @cached_property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole tensor."""
        return all(
            isinstance(placement, Replicate) or size == 1
            for placement, size in zip(self.placements, self.place.sizes, strict=True)
        )

    @cached_property
    def is_contiguous(self) -> bool:
        """Whether the strides are those of a contiguous tensor."""
        return self.stride == contiguous_stride(self.shape)

    @cached_property
    def has_partial(self) -> bool:
        """Whether the ranks' values still have to be reduced."""
        return any(isinstance(placement, Partial) for placement in self.placements)

    @cached_property
    def cut_dims(self) -> tuple[int, ...]:
        """Tensor dims that are sharded."""
        return tuple(sorted({shard_dim(p) for p in self.placements} - {-1}))

    def parts(self, dim: int | None = None, *, but: int | None = None) -> int:
        """Into how many parts mesh dims, other than `but`, cut the tensor; or its dim `dim`."""
        cuts = enumerate(zip(map(shard_dim, self.placements), self.place.sizes, strict=True))
        return math.prod(
            n for i, (d, n) in cuts if i != but and (d >= 0 if dim is None else d == dim)
        )

    @cached_property
    def gradient_placements(self) -> Placements:
        """Placements of the gradient: each term of a sum gets all of it."""
        return tuple(Replicate() if isinstance(p, Partial) else p for p in self.placements)

    @cached_property
    def global_bytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def spec(self) -> DTensorSpec:
        """The same as torch's DTensor keeps it. A new one each time, as others write to theirs."""
        meta = TensorMeta(torch.Size(self.shape), self.stride, self.dtype)
        return DTensorSpec(self.mesh, self.placements, meta)

    def with_placements(self, placements: Sequence[Placement]) -> Layout:
        """The same tensor with other placements on the same mesh."""
        if tuple(placements) == self.placements:
            return self
        return layout_of(self.mesh, tuple(placements), self.shape, self.stride, self.dtype)

    def with_dtype(self, dtype: torch.dtype) -> Layout:
        """The same placement of a tensor of `dtype`."""
        return layout_of(self.mesh, self.placements, self.shape, self.stride, dtype)

    def reduced(self) -> Layout:
        """The same with `Partial` replaced by `Replicate`."""
        return self.with_placements(self.gradient_placements)

    def replicated(self) -> Layout:
        """The whole tensor on every rank."""
        return self.with_placements((Replicate(),) * len(self.placements))

    @cached_property
    def twin(self) -> Layout:
        """The same as another object: moving to it makes a copy."""
        return Layout(self.mesh, self.placements, self.shape, self.stride, self.dtype)

    def closed(self) -> Layout:
        """The same with the present sizes, where a graph leaves some open."""
        return self


_layouts: weakref.WeakValueDictionary[tuple[Any, ...], Layout] = weakref.WeakValueDictionary()


def layout_of(
    mesh: DeviceMesh, placements: Placements, shape: Shape, stride: Shape, dtype: torch.dtype
) -> Layout:
    """The one `Layout` of these values. `placements` are normalized: see `normalize`."""
    # Meshes of the same ranks are equal, also where one's process groups have been destroyed.
    groups = getattr(mesh, "_dim_group_names", ())
    key = (mesh, placements, shape, stride, dtype, *groups)
    try:
        layout = _layouts.get(key)
    except TypeError:
        return layout_in_graph(mesh, placements, shape, stride, dtype)
    if layout is None:
        layout = _layouts[key] = Layout(mesh, placements, shape, stride, dtype)
    return layout


class OpenLayout(Layout):
    """A layout with open sizes, made only while a graph is traced.

    It has no hash: what is known of its sizes may change, and a cache would keep the graph alive.
    Equal layouts compare equal, but are not one object.
    """

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, OpenLayout)
            and (self.mesh, self.placements, self.dtype)
            == (other.mesh, other.placements, other.dtype)
            and (self.shape, self.stride) == (other.shape, other.stride)
        )

    def closed(self) -> Layout:
        shape, stride = tuple(map(int, self.shape)), tuple(map(int, self.stride))
        return layout_of(self.mesh, self.placements, shape, stride, self.dtype)


def layout_in_graph(
    mesh: DeviceMesh, placements: Placements, shape: Shape, stride: Shape, dtype: torch.dtype
) -> Layout:
    """`layout_of`, for symbolic sizes; those that cannot stay open are specialized."""
    strided = {shard_dim(p) for p in placements if is_shard(p) and pieces_of(p) > 1}
    for dim, (n, parts) in enumerate(
        zip(shape, parts_of_dims(mesh, placements, len(shape)), strict=True)
    ):
        if is_open(n) and (dim in strided or n % parts != 0):
            int(n)
    sizes, strides = tuple(map(_settled, shape)), tuple(map(_settled, stride))
    make = OpenLayout if any(map(is_open, (*sizes, *strides))) else layout_of
    return make(mesh, placements, sizes, strides, dtype)


def _settled(n: int) -> int:
    """`n`, as a number if the graph is specialized to it."""
    known = cast(Any, n).node.maybe_as_int() if is_open(n) else None
    return n if known is None else known


def contiguous_layout(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Shape, dtype: torch.dtype
) -> Layout:
    """`layout_of` a contiguous tensor."""
    return layout_of(mesh, tuple(placements), shape, contiguous_stride(shape), dtype)


def layout_of_spec(spec: DTensorSpec) -> Layout:
    """The layout of a spec of torch's DTensor.

    Raises:
        ValueError: it lacks the tensor's shape and dtype.
        NotImplementedError: its mesh dims cut in an order of their own, and not evenly.
    """
    meta = spec.tensor_meta
    if meta is None:
        raise ValueError(f"{spec} has no tensor_meta: shape, stride and dtype are needed")
    shape, stride = tuple(meta.shape), tuple(meta.stride)
    placements = normalize(_in_order(spec, shape), len(shape), spec.mesh.ndim)
    return layout_of(spec.mesh, placements, shape, stride, meta.dtype)


def _in_order(spec: DTensorSpec, shape: Shape) -> Placements:
    """The placements of a spec that also say in which order mesh dims cut a tensor dim."""
    order, placements = spec.shard_order, spec.placements
    if any(isinstance(p, _StridedShard) for p in placements) or spec.is_default_device_order(order):
        return placements
    for tensor_dim, mesh_dims in order:
        if shape[tensor_dim] % math.prod(map(spec.mesh.size, mesh_dims)):
            raise NotImplementedError(
                f"a tensor of shape {shape}, whose dim {tensor_dim} is cut by mesh dims "
                f"{mesh_dims} in this order: no placements say which parts these are where they "
                f"are not of one size. Redistribute it to {show(placements)} by torch first"
            )
    return spec._convert_shard_order_to_StridedShard(order, placements, spec.mesh)


def with_boxes(layout: Layout, boxes: list[Box]) -> Layout:
    """The same tensor, of which each rank holds the given box; boxes may overlap."""
    given = Layout(layout.mesh, layout.placements, layout.shape, layout.stride, layout.dtype)
    given.__dict__["boxes"] = boxes
    given.has_own_boxes = True
    return given
