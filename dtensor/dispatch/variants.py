"""Variants of ops that write somewhere: computed by the variant that returns a new tensor.

torch.mul(x, 2, out=y)     torch.mul(x, 2), and its result is copied to y, as y is placed; a y
                           without elements is resized first
x.squeeze_(0)              x.squeeze(0), and x becomes the result: shape, layout and memory

Autograd makes a view of a base that was written again, by the op that took the view. If the base's
shape has changed in place, that would be another view. So where gradients are recorded, a view that
is older than such a change is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.distributed.tensor import Replicate

from weft.dtensor.dispatch.call import Op, OpCall, leaves
from weft.dtensor.layout.boxes import contiguous_layout
from weft.dtensor.layout.placements import shard_dim
from weft.dtensor.tensor import DTensor, become, wrap
from weft.dtensor.tracing.grad_recording import no_function


class Reshaped:
    """Whether the shape of any DTensor was ever changed in place."""

    any = False


def by_functional(func: Op, call: OpCall) -> Callable[..., Any] | None:
    """How to compute a variant with out=, or one that changes a tensor's shape in place."""
    schema: Any = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return None
    if any(a.is_out for a in schema.arguments):
        given = [(a.name, str(a.type)) for a in schema.arguments if not a.is_out]
        functional = _variant(cast(Any, func)._overloadpacket, given)
        return _into_out(func, functional) if functional is not None else None
    if torch.Tag.inplace_view in cast(Any, func).tags:
        packet = getattr(torch.ops.aten, call.name.removesuffix("_"), None)
        given = [(a.name, str(a.type)) for a in schema.arguments]
        functional = _variant(packet, given) if packet is not None else None
        if functional is None:
            raise NotImplementedError(
                f"{call} changes the shape of a DTensor in place: use the variant that returns a "
                f"new tensor"
            )
        return _view_in_place(functional)
    return None


def _variant(packet: Any, arguments: list[tuple[str, str]]) -> Op | None:
    for name in packet.overloads():
        other = getattr(packet, name)
        theirs = [(a.name, str(a.type)) for a in other._schema.arguments]
        if not other._schema.is_mutable and theirs == arguments:
            return cast(Op, other)
    return None


def _into_out(func: Op, functional: Op) -> Callable[..., Any]:
    schema = cast(Any, func)._schema
    names, returns = [a.name for a in schema.arguments if a.is_out], schema.returns

    def run(*args: Any, **kwargs: Any) -> Any:
        outs = [kwargs.pop(name) for name in names]
        result = functional(*args, **kwargs)
        for out, value in zip(leaves(outs), leaves([result]), strict=True):
            if out.numel() == 0:
                _resize(out, value)
            if out.shape != value.shape or not torch.can_cast(value.dtype, out.dtype):
                raise ValueError(
                    f"{func}: the result is {value.dtype}{list(value.shape)}, and cannot be put in "
                    f"out= of {out.dtype}{list(out.shape)}: pass one of that shape and dtype"
                )
            out.copy_(value)
        if not returns:
            return None
        return outs[0] if len(outs) == 1 else tuple(outs)

    return run


def _resize(out: torch.Tensor, like: torch.Tensor) -> None:
    """Give a tensor without elements the shape of `like`; a dim that it lacks is not sharded."""
    if not isinstance(out, DTensor):  # made by torch, for results that nobody asked for
        out.resize_(like.shape)
        return
    kept = [p if shard_dim(p) < like.ndim else Replicate() for p in out.placements]
    layout = contiguous_layout(out.device_mesh, kept, tuple(like.shape), out.dtype)
    become(out, wrap(out._local_tensor.new_empty(layout.local_shape), layout))


def _view_in_place(functional: Op) -> Callable[..., Any]:
    def run(x: DTensor, *args: Any, **kwargs: Any) -> DTensor:
        become(x, functional(x, *args, **kwargs))
        with no_function():
            x._reshapes += not x._is_view()
        Reshaped.any = True
        return x

    return run


def refuse_old_views(func: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise for a view that is older than a change of its base's shape; see above."""
    if not torch.is_grad_enabled():
        return
    given = [a for a in leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
    with no_function():
        for view in given:
            base = view._base
            if not (isinstance(view, DTensor) and isinstance(base, DTensor)):
                continue
            wanted = base.requires_grad or any(t.requires_grad for t in given)
            if view._reshapes != base._reshapes and wanted:
                raise RuntimeError(
                    f"{func}: the view {list(view.shape)} was taken before the shape of its base "
                    f"changed in place, to {list(base.shape)}: autograd cannot follow. "
                    f"Take the view again, or write x = x.squeeze() for x.squeeze_()"
                )


def keep_age(args: Sequence[Any], result: Any) -> None:
    """Note, for a view of `args[0]`, after how many changes of shape it was taken."""
    source = args[0] if args else None
    if isinstance(source, DTensor):
        for tensor in leaves(result):
            if isinstance(tensor, DTensor) and tensor is not source:
                tensor._reshapes = source._reshapes
