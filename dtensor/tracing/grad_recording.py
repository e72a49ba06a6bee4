"""Asking autograd, and recording for it, without a detour through `__torch_function__`."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

no_function = torch._C.DisableTorchFunctionSubclass


def check_outside_func() -> None:
    """Check that no transform of torch.func is at work: its wrappers would pass for local tensors.

    Raises:
        NotImplementedError: one is.
    """
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "torch.func (grad, vjp, vmap, ..) takes functions of DTensors that are made of torch's "
            "ops, not ones that convert or redistribute (from_local, to_local, redistribute, "
            "modules with a plan): use torch.autograd.grad"
        )


def needs_grad(*tensors: torch.Tensor) -> bool:
    """Whether autograd records what is done with `tensors`, asked without __torch_function__.

    Raises:
        NotImplementedError: one has a tangent, which would get lost here.
    """
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors
    ):
        raise NotImplementedError(
            "a tangent of forward-mode differentiation does not follow a DTensor to local tensors, "
            "from them, or into another layout: use torch.autograd.grad"
        )
    if not torch.is_grad_enabled():
        return False
    with no_function():
        return any(tensor.requires_grad for tensor in tensors)


def is_nothing(grad: torch.Tensor | None) -> bool:
    """Whether no gradient came; formulas of second derivatives may give plain zeros for that."""
    return grad is None or (type(grad) is torch.Tensor and not grad.any())


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)`, 2 us quicker.

    Raises:
        NotImplementedError: under a transform of torch.func, which would look for its rule.
    """
    if torch.compiler.is_compiling():
        return function.apply(*args)
    check_outside_func()
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]
