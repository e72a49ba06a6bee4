"""Exchange with PyTorch's own `torch.distributed.tensor.DTensor`: both share the local tensor."""

from __future__ import annotations

from torch.distributed.tensor import DTensor as TorchDTensor

from weft.dtensor.layout.boxes import layout_of_spec
from weft.dtensor.tensor import DTensor

__all__ = ["from_torch", "to_torch"]


def to_torch(tensor: DTensor) -> TorchDTensor:
    """The same tensor as a DTensor of PyTorch's. No copy, no communication; differentiable."""
    layout = tensor._layout
    return TorchDTensor.from_local(
        tensor.to_local(),
        layout.mesh,
        layout.placements,
        run_check=False,
        shape=tensor.shape,
        stride=layout.stride,
    )


def from_torch(tensor: TorchDTensor) -> DTensor:
    """A DTensor of PyTorch's as one of ours. No copy, no communication; differentiable.

    Raises:
        NotImplementedError: its mesh dims cut in an order of their own, and not evenly.
        ValueError: a Partial that torch reduces in another way than by one operation: of a norm, or
            of a lookup in an embedding that is sharded by rows.
    """
    return DTensor.from_local(
        tensor.to_local(),
        tensor.device_mesh,
        layout_of_spec(tensor._spec).placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
