"""What FSDP2's `fully_shard` does, for our DTensors as for torch's.

A module that tensor parallelism has cut over `mesh["tp"]` is cut once more over `mesh["dp"]`:

    parallelize_module(model, mesh["tp"], plan)     parameters on tp
    fully_shard(model, mesh=mesh["dp"])             on (dp, tp); along dp gathered for each layer

FSDP2 looks for torch's own class: it would take these parameters for plain tensors. Two names in
its modules are therefore replaced, here and nowhere else. All that differs is the class of what it
makes; parameters that were plain become torch's DTensors as ever.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp._fully_shard import (
    _fsdp_collectives,
    _fsdp_init,
    _fsdp_param,
    _fsdp_param_group,
)
from torch.distributed.tensor import DTensor as TorchDTensor

from weft.dtensor.layout.boxes import layout_of_spec
from weft.dtensor.tensor import DTensor, before_write, wrap


class _EitherMeta(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, (DTensor, TorchDTensor))


class _Either(metaclass=_EitherMeta):
    """For `isinstance`: our DTensor or torch's, of which FSDP2 uses what both have."""


class _FSDPParam(_fsdp_param.FSDPParam):
    """A parameter that stays of our class, if it was: whole along dp, cut, and its gradient."""

    _is_ours = False

    def _init_sharded_param(self, param: torch.nn.Parameter, *args: Any, **kwargs: Any) -> None:
        self._is_ours = isinstance(param, DTensor)
        super()._init_sharded_param(param, *args, **kwargs)

    def init_unsharded_param(self) -> None:
        is_first = not hasattr(self, "_unsharded_param")
        super().init_unsharded_param()
        if is_first and self._is_ours:
            whole: Any = self._unsharded_param
            self._unsharded_param = torch.nn.Parameter(_ours(whole), whole.requires_grad)

    def free_unsharded_param(self) -> None:
        for hook in before_write:  # a pending matmul would find no weight
            hook(None)
        super().free_unsharded_param()

    def to_sharded_dtensor(self, tensor: torch.Tensor) -> Any:
        made = super().to_sharded_dtensor(tensor)
        return _ours(made) if self._is_ours else made


def _ours(tensor: TorchDTensor) -> DTensor:
    """As `from_torch`, but without its checks and autograd: this runs for every gradient."""
    local = tensor._local_tensor.detach()
    return wrap(local, layout_of_spec(tensor._spec).with_dtype(local.dtype))


vars(_fsdp_param_group)["FSDPParam"] = _FSDPParam
for _module in (_fsdp_collectives, _fsdp_init, _fsdp_param):
    vars(_module)["DTensor"] = _Either
