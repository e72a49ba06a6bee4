"""What `torch.distributed.checkpoint.state_dict` does, for our DTensors as for torch's.

Its functions look for torch's own class: they would leave ours sharded in a "full" state dict, and
load a whole tensor as if it were a shard. Three of their helpers are therefore replaced, here and
nowhere else, by ones that see to our DTensors and leave everything else to torch:

    _iterate_state_dict      get_*_state_dict(full_state_dict=True), and staging of async_save
    _distribute_state_dict   set_*_state_dict(full_state_dict=True): every rank has whole tensors
    _broadcast_tensors       the same with broadcast_from_rank0: only the first rank has
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import _state_dict_utils

from weft.dtensor.api import distribute_tensor
from weft.dtensor.tensor import DTensor

_torch_iterate = _state_dict_utils._iterate_state_dict
_torch_distribute = _state_dict_utils._distribute_state_dict
_torch_broadcast = _state_dict_utils._broadcast_tensors


def _iterate_state_dict(
    iter_object: Any,
    sharded_tensor_func: Callable[..., Any],
    dtensor_func: Callable[..., Any],
    tensor_func: Callable[..., Any],
    **options: Any,
) -> Any:
    """torch's, where what is done with its DTensors is done with ours."""

    def either(value: torch.Tensor, *others: Any) -> Any:
        function = dtensor_func if isinstance(value, DTensor) else tensor_func
        return function(value, *others)

    return _torch_iterate(iter_object, sharded_tensor_func, dtensor_func, either, **options)


def _distribute_state_dict(
    full_state_dict: dict[str, Any], local_state_dict: dict[str, Any], *args: Any, **kwargs: Any
) -> None:
    """torch's: replace what is in `local_state_dict` by the values of `full_state_dict`."""
    ours = _dtensors(local_state_dict, full_state_dict)
    _torch_distribute(full_state_dict, local_state_dict, *args, **kwargs)
    _shard_again(ours, local_state_dict)


def _broadcast_tensors(
    full_state_dict: dict[str, Any],
    local_state_dict: dict[str, Any],
    keys: list[str],
    *args: Any,
    **kwargs: Any,
) -> None:
    """torch's: replace the `keys` of `local_state_dict` by what the first rank has."""
    ours = _dtensors(local_state_dict, keys)
    _torch_broadcast(full_state_dict, local_state_dict, keys, *args, **kwargs)
    _shard_again(ours, local_state_dict)


def _dtensors(state_dict: dict[str, Any], keys: Any) -> dict[str, DTensor]:
    values = {key: state_dict.get(key) for key in keys}
    return {key: value for key, value in values.items() if isinstance(value, DTensor)}


def _shard_again(ours: dict[str, DTensor], state_dict: dict[str, Any]) -> None:
    """Give the whole tensors of `state_dict` the layouts that `ours` have; no communication."""
    for key, tensor in ours.items():
        whole = state_dict[key]
        if isinstance(whole, torch.Tensor) and not isinstance(whole, DTensor):
            layout = tensor._layout
            state_dict[key] = distribute_tensor(
                whole.detach(), layout.mesh, layout.placements, src_data_rank=None
            )


# `torch.distributed.checkpoint.state_dict` has its own names for them, if it was imported before.
for _module in (_state_dict_utils, sys.modules.get("torch.distributed.checkpoint.state_dict")):
    for _function in (_iterate_state_dict, _distribute_state_dict, _broadcast_tensors):
        if hasattr(_module, _function.__name__):
            setattr(_module, _function.__name__, _function)
