"""`backward` and `torch.autograd.grad` of DTensors.

While torch runs a function that `__torch_function__` has passed on, calls inside of it do not reach
`__torch_function__` again. For these two functions that would be the whole backward pass: a
checkpointed module would be recomputed by other operations than in its forward, and hooks would
follow other rules than the rest of a script. So they are started here, in the way in which torch
starts them after its check for `__torch_function__`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import autograd
from torch.autograd.graph import _engine_run_backward

from weft.dtensor.dispatch.dispatch import mixed, outermost
from weft.dtensor.tensor import DTensor
from weft.dtensor.tracing.grad_recording import is_nothing

_torch_autograd: Any = autograd


def of_tensor(
    tensor: Any,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """`Tensor.backward`."""
    if inputs is None:
        backward((tensor,), gradient, retain_graph, create_graph)
    else:
        autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


def backward(
    tensors: Sequence[Any],
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Sequence[Any] | None = None,
) -> None:
    """`torch.autograd.backward`, with the arguments in the form in which torch passes them on."""
    _run_backward(
        autograd.backward,
        tensors,
        grad_tensors,
        retain_graph,
        create_graph,
        inputs or (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def grad(
    outputs: Sequence[Any],
    inputs: Sequence[Any],
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> Any:
    """`torch.autograd.grad`, with the arguments in the form in which torch passes them on."""
    if is_grads_batched:
        return NotImplemented
    found = _run_backward(
        autograd.grad,
        outputs,
        grad_outputs,
        retain_graph,
        create_graph,
        inputs,
        allow_unreachable=materialize_grads if allow_unused is None else allow_unused,
        accumulate_grad=False,
    )
    zeros_like = torch.zeros_like
    return tuple(
        # Formulas of second derivatives may give plain zeros.
        zeros_like(i, requires_grad=create_graph)
        if (materialize_grads if g is None else type(i) is DTensor and is_nothing(g))
        else g
        for g, i in zip(found, inputs, strict=True)
    )


def _run_backward(
    function: Any,
    tensors: Sequence[Any],
    given: Any,
    retain_graph: bool | None,
    create_graph: bool,
    inputs: Sequence[Any],
    **options: bool,
) -> tuple[Any, ...]:
    gradients = _torch_autograd._tensor_or_tensors_to_tuple(given, len(tensors))
    for tensor, gradient in zip(tensors, gradients, strict=False):
        plain = isinstance(gradient, torch.Tensor) and not isinstance(gradient, DTensor)
        if plain and isinstance(tensor, DTensor) and gradient.numel() != 1:
            raise mixed(f"torch.autograd.{function.__name__}", gradient)
    before = outermost.call
    outermost.call = None, None  # plain tensors inside of a backward are not the caller's mistake
    try:
        with torch._C.DisableTorchFunctionSubclass():
            gradients = _torch_autograd._make_grads(tensors, gradients, is_grads_batched=False)
        if retain_graph is None:
            retain_graph = create_graph
        found = _engine_run_backward(
            tensors, gradients, retain_graph, create_graph, tuple(inputs), **options
        )
        return cast(tuple[Any, ...], found)
    finally:
        outermost.call = before
