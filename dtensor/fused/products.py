"""Products as torch spells them, each seen before autograd takes it apart, as one op of ours.

    linear, x @ w, mm, addmm, einsum of a matrix     `linear_product`
    bmm, stacks @ stacks, einsum of stacks           `stack_product`

Which way it then runs, fused or not, its plan says: `linear.multiply`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from weft.dtensor.dispatch.call import Op
from weft.dtensor.dispatch.planning import plan_of
from weft.dtensor.fused.linear import LINEAR, STACK, multiply, transposed
from weft.dtensor.layout.boxes import Layout, layout_of
from weft.dtensor.layout.placements import is_shard, moved, shard_dim
from weft.dtensor.layout.symbolic import cached
from weft.dtensor.rules.products import linear_input_grad, linear_product, stack_product
from weft.dtensor.tensor import DTensor
from weft.dtensor.tracing.grad_recording import needs_grad

_is_grad_enabled = torch.is_grad_enabled
_is_any_autocast = torch._C._is_any_autocast_enabled


def is_dtensor(a: Any) -> bool:
    """Whether it is one of ours."""
    return isinstance(a, DTensor)


def linear(
    input: Any, weight: Any, bias: Any = None, *, keep_gathered: bool = True, **out: Any
) -> Any:
    """`F.linear` of DTensors.

    Args:
        keep_gathered: whether an input that is gathered is kept for the gradient of the weight;
            otherwise its shard is, and gathered again.
    """
    x, w = input, weight
    if out or not (
        isinstance(x, DTensor)
        and isinstance(w, DTensor)
        and (bias is None or isinstance(bias, DTensor))
    ):
        return NotImplemented
    if not _fits(x._layout, w._layout, None if bias is None else bias._layout) or _is_special(x, w):
        return NotImplemented
    return multiply(LINEAR, x, w, bias, keep=keep_gathered)


@cached
def _fits(x: Layout, w: Layout, bias: Layout | None) -> bool:
    """Whether x @ w.T + bias is one op, on one mesh; if not, torch raises or takes it apart."""
    layouts = [layout for layout in (x, w, bias) if layout is not None]
    return (
        len(x.shape) > 1
        and len(w.shape) == 2
        and x.shape[-1] == w.shape[1]
        and (bias is None or bias.shape == w.shape[:1])
        and all(layout.mesh == x.mesh and layout.dtype == x.dtype for layout in layouts)
        and not x.dtype.is_complex
    )


def _is_special(x: DTensor, w: DTensor) -> bool:
    """Whether torch does more than multiply: autocast, or local tensors that are a subclass made of
    others, with ops of its own (fp8); not one that is pending: that is plain.
    """
    return (
        (_is_any_autocast() and torch.is_autocast_enabled(x._layout.mesh.device_type))
        or _is_made_of_others(x._local)
        or _is_made_of_others(w._local)
    )


def _is_made_of_others(local: torch.Tensor | None) -> bool:
    # What is a torch.Tensor needs no look for an attribute, which takes 0.2 us if there is none.
    return type(local) is not torch.Tensor and hasattr(type(local), "__tensor_flatten__")


def linear_gathering_again(input: Any, weight: Any, bias: Any = None) -> Any:
    """`F.linear` that keeps the shard of an input, not the gathered one; a node in a graph."""
    result = linear(input, weight, bias, keep_gathered=False)
    return functional.linear(input, weight, bias) if result is NotImplemented else result


def allow_in_graphs() -> None:
    """Let torch.compile put `linear_gathering_again` into its graphs as it is."""
    # Not at import: importing torch's tracer takes as long as all of weft.dtensor.
    dynamo: Any = torch._dynamo
    dynamo.allow_in_graph(linear_gathering_again)


# What torch.compiler.assume_constant_result does, without its import.
allow_in_graphs._dynamo_marked_constant = True  # type: ignore[attr-defined]


def matmul(input: Any, other: Any, *, out: Any = None) -> Any:
    """`torch.matmul`, of stacks of matrices or with a matrix on the right."""
    if out is not None or not (isinstance(input, DTensor) and isinstance(other, DTensor)):
        return NotImplemented
    if len(other._layout.shape) > 2:
        return bmm(input, other)
    return linear(input, other.t()) if _gains(input, other) else NotImplemented


def mm(input: Any, mat2: Any, out_dtype: Any = None, *, out: Any = None) -> Any:
    """`torch.mm`."""
    if out is not None or not (isinstance(input, DTensor) and isinstance(mat2, DTensor)):
        return NotImplemented
    if not _gains(input, mat2) or out_dtype is not None or len(input._layout.shape) != 2:
        return NotImplemented
    return linear(input, mat2.t())


def addmm(
    input: Any, mat1: Any, mat2: Any, out_dtype: Any = None,
    *, beta: Any = 1, alpha: Any = 1, out: Any = None,
) -> Any:  # fmt: skip
    """`torch.addmm` with a vector as summand."""
    if out is not None or out_dtype is not None or beta != 1 or alpha != 1:
        return NotImplemented
    if not all(map(is_dtensor, (input, mat1, mat2))) or input.ndim != 1:
        return NotImplemented
    if mat1.ndim != 2 or mat2.ndim != 2 or not _gains(mat1, mat2, input):
        return NotImplemented
    return linear(mat1, mat2.t(), input)


def bmm(input: Any, mat2: Any, out_dtype: Any = None, *, out: Any = None) -> Any:
    """`torch.bmm`, and `torch.matmul` of two stacks of one shape."""
    if out is not None or out_dtype is not None or not (is_dtensor(input) and is_dtensor(mat2)):
        return NotImplemented
    gain = _gain_of_stacks(input._layout, mat2._layout)
    if gain is None or (gain == "backward" and not needs_grad(input, mat2)):
        return NotImplemented
    return NotImplemented if _is_special(input, mat2) else multiply(STACK, input, mat2)


def _gains(x: DTensor, w: DTensor, bias: DTensor | None = None) -> bool:
    """Whether x @ w + bias gains from being one op: is it batched, or fused in forward or
    backward?
    """
    gain = _gain_of_matrix(x._layout, w._layout, None if bias is None else bias._layout)
    return gain == "forward" or (gain == "backward" and _is_grad_enabled() and needs_grad(x))


@cached
def _gain_of_matrix(x: Layout, w: Layout, bias: Layout | None) -> str | None:
    return _gain_of_linear(x, transposed(w), bias) if len(w.shape) == 2 else None


@cached
def _gain_of_linear(x: Layout, w: Layout, bias: Layout | None) -> str | None:
    if not _fits(x, w, bias):
        return None
    plan = plan_of(linear_product, x, w) if bias is None else plan_of(linear_product, x, w, bias)
    if len(x.shape) > 2 or plan.way is not None:
        return "forward"
    return "backward" if _is_fused(linear_input_grad, plan.result, w) else None


@cached
def _gain_of_stacks(x: Layout, w: Layout) -> str | None:
    if (
        not len(x.shape) == len(w.shape) > 2
        or (x.shape[:-2], x.shape[-1]) != (w.shape[:-2], w.shape[-2])
        or x.mesh != w.mesh
        or x.dtype != w.dtype
        or not x.dtype.is_floating_point
    ):
        return None
    plan = plan_of(stack_product, x, w)
    if plan.way is not None:
        return "forward"
    for first, second in ((plan.result, _swapped(w)), (_swapped(x), plan.result)):
        if _is_fused(stack_product, first, second):
            return "backward"
    return None


def _is_fused(op: Op, grad: Any, other: Any) -> bool:
    """Whether the plan of a gradient is; a result of several steps has no layout to tell from."""
    if not (isinstance(grad, Layout) and isinstance(other, Layout)):
        return False
    return plan_of(op, grad.reduced(), other.reduced()).way is not None


def _swapped(layout: Layout) -> Layout:
    last = layout.ndim - 1
    return _permuted(layout, (*range(last - 1), last, last - 1))


@cached
def _permuted(layout: Layout, order: tuple[int, ...]) -> Layout:
    """The layout of `permute(order)`."""
    placements = tuple(
        moved(p, order.index(shard_dim(p))) if is_shard(p) else p for p in layout.placements
    )
    shape, stride = (tuple(sizes[d] for d in order) for sizes in (layout.shape, layout.stride))
    return layout_of(layout.mesh, placements, shape, stride, layout.dtype)


class _Spelling(NamedTuple):
    """How an einsum is a product: the orders of dims that make it one, and that of its result."""

    x: tuple[int, ...]
    w: tuple[int, ...]
    out: tuple[int, ...]
    is_stack: bool


def einsum(equation: Any, *operands: Any) -> Any:
    """`torch.einsum` that is a product in any order of dims: "bsk,kn->bsn", "bmk,bkn->bnm"."""
    if not (isinstance(equation, str) and len(operands) == 2 and all(map(is_dtensor, operands))):
        return NotImplemented
    spelling = _spelling_of(equation)
    x, w = operands
    if spelling is None or (len(spelling.x), len(spelling.w)) != (x.ndim, w.ndim):
        return NotImplemented
    if spelling.is_stack:
        y = bmm(_ordered(x, spelling.x), _ordered(w, spelling.w))
    else:
        gain = _gain_of_linear(
            _permuted(x._layout, spelling.x), _permuted(w._layout, spelling.w), None
        )
        if gain is None or (gain == "backward" and not (_is_grad_enabled() and needs_grad(x))):
            return NotImplemented
        y = linear(_ordered(x, spelling.x), _ordered(w, spelling.w))
    return y if y is NotImplemented else _ordered(y, spelling.out)


def _ordered(x: DTensor, order: tuple[int, ...]) -> Any:
    return x if order == tuple(range(len(order))) else x.permute(order)


@lru_cache(maxsize=1024)
def _spelling_of(equation: str) -> _Spelling | None:
    """None for einsums that are no single product: traces, sums, several weights' columns."""
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    x, _, w = inputs.partition(",")
    if not (arrow and x.isalpha() and w.isalpha() and out.isalpha()):
        return None
    if any(len({*letters}) < len(letters) for letters in (x, w, out)) or not {*out} <= {*x, *w}:
        return None
    batch = [a for a in out if a in x and a in w]
    rows = [a for a in x if a in out and a not in w]
    columns = [a for a in w if a in out and a not in x]
    inner = [a for a in x if a in w and a not in out]
    if len(columns) != 1 or len(inner) != 1 or not rows or (batch and len(rows) != 1):
        return None
    if len(batch) + len(rows) + 1 != len(x) or len(batch) + 2 != len(w):
        return None
    first, second = [*batch, *rows, *inner], [*batch, *inner, *columns]
    if not batch:
        second.reverse()
    made = [*batch, *rows, *columns]
    return _Spelling(
        tuple(map(x.index, first)),
        tuple(map(w.index, second)),
        tuple(map(made.index, out)),
        bool(batch),
    )
