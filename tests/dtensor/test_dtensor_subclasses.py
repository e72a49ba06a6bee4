"""DTensors around low-precision tensors, and inside them: tensors with ops of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dtensors import world
from torch.nn import functional

from weft.dtensor import DTensor, Shard, distribute_tensor


class Scaled(torch.Tensor):
    """data * scale, which only ops that it knows may multiply: as low-precision tensors are."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: float) -> Any:
        return cls._make_wrapper_subclass(cls, data.shape, dtype=data.dtype)

    def __init__(self, data: torch.Tensor, scale: float) -> None:
        self.values, self.scale = data, scale

    def __tensor_flatten__(self) -> Any:
        return ["values"], self.scale

    @staticmethod
    def __tensor_unflatten__(inner: Any, scale: float, size: Any, stride: Any) -> Any:
        return Scaled(inner["values"], scale)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            a, b = args
            return (a.values @ b.values) * (a.scale * b.scale)
        if func in (torch.ops.aten.detach.default, torch.ops.aten.t.default):
            return Scaled(func(args[0].values), args[0].scale)
        raise NotImplementedError(f"{func} of Scaled")


class Quantized(Scaled):
    """The same with its own `F.linear`, of any kind of input."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            x, weight = args[:2]
            return functional.linear(x, weight.values) * weight.scale
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@pytest.mark.ranks(2, 3)
def test_local_tensors_with_ops_of_their_own() -> None:
    """Matmuls run by these ops, rather than fused, where a local tensor is made of others."""
    mesh, a, b = world(), torch.randn(4, 6), torch.randn(6, 6)

    def scaled(whole: torch.Tensor, dim: int) -> DTensor:
        part = Scaled(distribute_tensor(whole, mesh, [Shard(dim)]).to_local(), 0.5)
        sizes = {"shape": whole.shape, "stride": whole.stride()}
        return DTensor.from_local(part, mesh, [Shard(dim)], **sizes)

    product = torch.mm(scaled(a, 1), scaled(b, 0))
    torch.testing.assert_close(product.full_tensor(), a @ b / 4)


@pytest.mark.ranks(2, 3)
def test_other_classes_run_their_own_functions() -> None:
    """A quantized weight that is made of DTensors."""
    mesh, x, w = world(), torch.randn(4, 6), torch.randn(6, 6)
    rows = distribute_tensor(x, mesh, [Shard(0)])
    weight = Quantized(distribute_tensor(w, mesh, [Shard(0)]), 0.5)
    y = functional.linear(rows, weight)
    assert isinstance(y, DTensor)
    torch.testing.assert_close(y.full_tensor(), functional.linear(x, w) / 2)
