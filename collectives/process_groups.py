"""Collectives by a process group, where symmetric memory does not reach or does not pay.

What process groups do not do as our engines do is made up for: shards of any sizes, any dtype, and
half precision added in fp32. `as_is` asks for their own sums, rounded at every step, for half the
bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Literal

import torch
import torch.distributed as dist

from weft.collectives.ranks.bounds import finish
from weft.collectives.ranks.chunks import offsets
from weft.collectives.ranks.group import Group

ReduceOp = Literal["sum", "avg", "max", "min", "product"]

# What torch adds up.
REDUCIBLE = frozenset(
    {
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.complex64,
        torch.complex128,
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bool,
    }
)

# How our engines reduce.
COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


def summed_in_fp32(dtype: torch.dtype, op: ReduceOp) -> bool:
    """Whether terms of a dtype are reduced in fp32, and rounded once."""
    return dtype in (torch.float16, torch.bfloat16) and op in ("sum", "avg", "product")


_DIST_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


def sendable(x: torch.Tensor) -> torch.Tensor:
    """x as process groups take it: as bytes if they do not support its dtype."""
    if x.dtype in REDUCIBLE and x.dtype != torch.int16:
        return x
    return x.unsqueeze(-1).view(torch.uint8)


def by_group(call: Callable[..., Any], group: Group, on_gpu: bool, *args: Any) -> None:
    """Have the process group make a call of torch.distributed, within our bound.

    On a GPU it is the stream that waits, as long as NCCL does.
    """
    if group.virtual or on_gpu:
        call(*args, group=group.pg)
    else:
        op = group.calls.under_way() or call.__name__
        finish(group, op, call(*args, group=group.pg, async_op=True))


class OnTheWay:
    """An all_to_all of rows, begun when this is made.

    Args:
        x: contiguous.
        op: the call, for errors.
        out: contiguous, for what comes, with room for as many rows or more; None: a new tensor.
    """

    def __init__(
        self,
        x: torch.Tensor,
        receives: Sequence[int],
        sends: Sequence[int],
        group: Group,
        op: str,
        out: torch.Tensor | None = None,
    ) -> None:
        self._group, self._op = group, op
        self._came = x.new_empty((sum(receives), *x.shape[1:])) if out is None else out
        into = sendable(self._came[: sum(receives)])
        args = into, sendable(x), list(receives), list(sends)
        self.work: Any = dist.all_to_all_single(*args, group=group.pg, async_op=True)

    def come(self) -> torch.Tensor:
        """`out`, once all is there: on a GPU its stream waits, else the host does, within our
        bound.
        """
        if self._came.is_cuda or self._group.virtual:
            self.work.wait()
        else:
            finish(self._group, self._op, self.work)
        return self._came


def gather(parts: Sequence[torch.Tensor], x: torch.Tensor, group: Group) -> None:
    parts, x = [sendable(part) for part in parts], sendable(x)
    # Gloo takes equal sizes only, so shorter shards are padded.
    longest = max(len(part) for part in parts)
    even = all(len(part) == longest for part in parts)
    padded = x if even else x.new_zeros((longest, *x.shape[1:]))
    if not even:
        padded[: len(x)] = x
    received = list(parts) if even else [torch.empty_like(padded) for _ in parts]
    by_group(dist.all_gather, group, x.is_cuda, received, padded)
    if not even:
        for part, shard in zip(parts, received, strict=True):
            part.copy_(shard[: len(part)])


def all_reduce(x: torch.Tensor, group: Group, op: ReduceOp, as_is: bool) -> torch.Tensor:
    if x.is_complex() and op == "product":  # which torch refuses to reduce
        factors = [torch.empty_like(x) for _ in range(group.world_size)]
        by_group(dist.all_gather, group, x.is_cuda, factors, x)
        return reduce(torch.mul, factors)

    def whole(terms: torch.Tensor, how: Any) -> torch.Tensor:
        total = terms.clone() if terms is x else terms
        by_group(dist.all_reduce, group, x.is_cuda, total, how)
        return total

    return _total(whole, x, group, op, as_is)


# Named anew in torch 2.13, which warns of the old name.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def scatter(
    x: torch.Tensor, group: Group, sizes: list[int], op: ReduceOp, as_is: bool
) -> torch.Tensor:
    longest = max(sizes)
    # Gloo's own reduce-scatter is an all-reduce.
    if not group.on_gpus(x.device) or x.is_complex() or not x.numel():
        start = offsets(sizes)[group.rank]
        return all_reduce(x, group, op, as_is)[start : start + sizes[group.rank]]

    def chunk(terms: torch.Tensor, how: Any) -> torch.Tensor:
        # Process groups take equal sizes only, so shorter chunks are padded.
        if min(sizes) < longest:
            padded = terms.new_zeros((len(sizes), longest, *x.shape[1:]))
            for into, part in zip(padded, terms.split(sizes), strict=True):
                into[: len(part)] = part
            terms = padded.flatten(0, 1)
        total = terms.new_empty((longest, *x.shape[1:]))
        _reduce_scatter(total, terms.contiguous(), how, group=group.pg)
        return total.narrow(0, 0, sizes[group.rank])

    return _total(chunk, x, group, op, as_is)


def _total(
    reduced: Callable[[torch.Tensor, Any], torch.Tensor],
    x: torch.Tensor,
    group: Group,
    op: ReduceOp,
    as_is: bool,
) -> torch.Tensor:
    """What `reduced` makes of x by `op` as our engines define it, in the dtype of x."""
    # A process group rounds half-precision sums at every step: add in fp32, as our engines do.
    half = summed_in_fp32(x.dtype, op) and not as_is
    terms = x.float() if half else x.int() if x.dtype == torch.int16 else x
    out = reduced(terms, _DIST_OPS["sum" if op == "avg" else op])
    if op == "avg":
        out.div_(group.world_size)
    if op in ("max", "min") and x.is_floating_point():
        # Between a number and NaN, process groups may choose either.
        spoilt = reduced(x.isnan().to(torch.uint8), dist.ReduceOp.MAX)
        out.masked_fill_(spoilt.bool(), torch.nan)
    return out.to(x.dtype)
