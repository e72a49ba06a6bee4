"""The placements, under the name that `torch.distributed.tensor.placement_types` has them."""

from torch.distributed.tensor.placement_types import (
    Partial,
    Placement,
    Replicate,
    Shard,
    _StridedShard,
)

__all__ = ["Partial", "Placement", "Replicate", "Shard", "_StridedShard"]
