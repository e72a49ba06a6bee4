"""What `torch.distributed.checkpoint` asks of a tensor: the blocks of it that this rank holds.

A rank's box is the product of its runs over the dims. Each block, one run per dim, is stored by
itself at its offset in the global tensor, and replicas only once:

    _StridedShard(0, split_factor=2), 2 ranks, 8 rows       rank 0: rows [0, 2) and [4, 6)
                                                            rank 1: rows [2, 4) and [6, 8)

So a tensor is loaded into any layout, whatever it was saved in, by intersecting the blocks of both.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from weft.dtensor.layout.boxes import Layout
from weft.dtensor.layout.placements import show

if TYPE_CHECKING:
    from weft.dtensor.tensor import DTensor

Slices = tuple[slice, ...]
# (offset in the global tensor, size, where it is in the local tensor)
Block = tuple[torch.Size, torch.Size, Slices]


def blocks(layout: Layout, index: int | None) -> list[Block]:
    """The blocks of rank `index` of the flattened mesh.

    Raises:
        ValueError: a Partial layout, whose ranks hold terms rather than blocks.
    """
    if layout.has_partial:
        raise ValueError(
            f"a DTensor that is {show(layout.placements)} cannot be saved or loaded, as its "
            f"values are not reduced yet: redistribute it to Replicate() or Shard(dim) first"
        )
    if index is None:
        return []
    if 0 in layout.shape:
        # No rank holds anything: the first one stands for all, so that the name is stored.
        sizes = torch.Size(layout.shape_at(index))
        return [(torch.Size([0] * layout.ndim), sizes, ())] if index == 0 else []
    per_dim = []
    for runs in layout.box_at(index):
        ends = itertools.accumulate(size for _, size in runs)
        pairs = zip(runs, ends, strict=True)
        per_dim.append([(start, size, slice(end - size, end)) for (start, size), end in pairs])
    return [
        (torch.Size(d[0] for d in dims), torch.Size(d[1] for d in dims), tuple(d[2] for d in dims))
        for dims in itertools.product(*per_dim)
    ]


def write_items(tensor: DTensor, fqn: str) -> list[Any]:
    """One WriteItem for each block."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties.create_from_tensor(tensor._local_tensor)
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=tensor.shape),
        )
        for chunk in chunks(tensor)
    ]


def chunks(tensor: DTensor) -> list[Any]:
    """One ChunkStorageMetadata for each block."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [
        ChunkStorageMetadata(offsets=offsets, sizes=sizes)
        for offsets, sizes, _ in blocks(tensor._layout, tensor._layout.index)
    ]


def shard_at(tensor: DTensor, index: Any) -> torch.Tensor:
    """The block at `index.offset`, in place."""
    for offsets, _, where in blocks(tensor._layout, tensor._layout.index):
        if index.offset is None or offsets == index.offset:
            return tensor._local_tensor.detach()[where]
    raise ValueError(
        f"{index.fqn}: this rank holds no block at {tuple(index.offset)} of {tensor._layout}"
    )
