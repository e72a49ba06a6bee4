"""Variants of ops that write somewhere: computed by the variant that returns a new tensor.

torch.mul(x, 2, out=y)     torch.mul(x, 2), and its result is copied to y, as y is placed
x.squeeze_(0)              x.squeeze(0), and x becomes the result: shape, layout and memory
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from weft.dtensor.call import Call, Op
from weft.dtensor.tensor import DTensor, become
from weft.dtensor.views import CopiedView


def by_functional(func: Op, call: Call) -> Callable[..., Any] | None:
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
    names = [a.name for a in cast(Any, func)._schema.arguments if a.is_out]

    def run(*args: Any, **kwargs: Any) -> Any:
        outs = [kwargs.pop(name) for name in names]
        result = functional(*args, **kwargs)
        for out, value in zip(outs, [result] if len(outs) == 1 else result, strict=True):
            if out.shape != value.shape or not torch.can_cast(value.dtype, out.dtype):
                raise ValueError(
                    f"{func}: the result is {value.dtype}{list(value.shape)}, and cannot be put in "
                    f"out= of {out.dtype}{list(out.shape)}: pass one of that shape and dtype"
                )
            out.copy_(value)
        return outs[0] if len(outs) == 1 else tuple(outs)

    return run


def _view_in_place(functional: Op) -> Callable[..., Any]:
    def run(x: DTensor, *args: Any, **kwargs: Any) -> DTensor:
        # Where the result is a view of gathered shards, these need another base than the result.
        become(x, functional(x.data, *args, **kwargs))
        if isinstance(x._pending, CopiedView):
            x._pending.copy.counted = x
        return x

    return run
