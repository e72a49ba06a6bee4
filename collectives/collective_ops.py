"""The collectives: all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, barrier.

They return new tensors, are differentiable, take any strides, and handle uneven and empty shards by
the rule of torch.chunk. Reductions add in fp32 (integers in their own type) in rank order and round
once at the end, so that results are bitwise the same from run to run and from rank to rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast, get_args

import torch
import torch.distributed as dist

from weft.collectives import movement
from weft.collectives.memory.checks import check_call
from weft.collectives.memory.exchange import exchange
from weft.collectives.memory.repeatable import repeatable
from weft.collectives.process_groups import REDUCIBLE, ReduceOp, by_group
from weft.collectives.ranks.chunks import chunk_sizes
from weft.collectives.ranks.flight import call_of
from weft.collectives.ranks.group import Group, GroupLike, group_name, moves_gpu_tensors, resolve
from weft.collectives.ranks.reports import check_all
from weft.collectives.ranks.traced import is_call_traced
from weft.collectives.sizes import known_sizes, plain_sizes
from weft.errors import MismatchError, PeerTimeout


@repeatable
def all_gather(
    x: torch.Tensor,
    group: GroupLike = None,
    *,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Concatenate every rank's `x` along `dim`.

    Args:
        x: this rank's shard; all sizes but that of `dim` are the same on every rank.
        sizes: length of every rank's shard along `dim`, if known; None: the ranks exchange them.
        out: where the result goes, which may be in the memory of `x`; a new tensor if None. As in
            torch, it is not differentiable.

    Returns:
        The whole, the same on every rank. With `dim` other than 0 it may be non-contiguous.
        Its gradient is summed over the ranks and scattered back.

    Raises:
        ValueError: `sizes` or `out` do not fit, or a gradient through `out` is needed.
        MismatchError: the ranks' other sizes or dtypes differ.
        PeerTimeout: a rank did not come.

    Example:
        x = [rank] on 3 ranks gives [0, 1, 2] on each.
    """
    if is_call_traced(x):
        return _into(out, torch.ops.weft.all_gather(x, group_name(group), dim, sizes))
    group = resolve(group)
    dim = _checked_dim(x, dim)
    lengths = known_sizes(x, group, dim, sizes)
    if out is not None:
        _check_out(x, out, (*x.shape[:dim], sum(lengths), *x.shape[dim + 1 :]))
        movement.gather(_in_front(x, dim), group, lengths, _in_front(out, dim), dim=dim)
        return out
    return _put_back(_apply(_AllGather, _in_front(x, dim), group, lengths, dim), dim)


class _AllGather(torch.autograd.Function):
    """Along dim 0, of what was `dim`. Backward: reduce_scatter of the gradient, to `sizes`."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: Group, sizes: list[int], dim: int
    ) -> torch.Tensor:
        ctx.group, ctx.sizes, ctx.dim = group, sizes, dim
        return movement.gather(x, group, sizes, dim=dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        dx = _apply(_ReduceScatter, grad, ctx.group, "sum", ctx.sizes, ctx.dim)
        return dx, None, None, None


@repeatable
def reduce_scatter(
    x: torch.Tensor,
    group: GroupLike = None,
    *,
    dim: int = 0,
    reduce_op: ReduceOp = "sum",
    sizes: Sequence[int] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """This rank's chunk along `dim` of the reduction of every rank's `x`.

    Args:
        x: the same shape and dtype on every rank.
        reduce_op: "sum", "avg", "max", "min" or "product".
        sizes: length of every rank's chunk; None: those of torch.chunk, so that trailing ranks may
            get none.
        out: where the result goes, which may be in the memory of `x`; a new tensor if None.

    Returns:
        The chunk. Its gradient, for "sum" and "avg", is gathered (and divided).

    Raises:
        ValueError: an unknown `reduce_op`, or "avg" of integers.
        PeerTimeout: a rank did not come.

    Example:
        x = [1, 2, 3] on each of 2 ranks gives [2, 4] on rank 0 and [6] on rank 1.
    """
    if is_call_traced(x):
        name = group_name(group)
        return _into(out, torch.ops.weft.reduce_scatter(x, name, dim, reduce_op, sizes))
    group = resolve(group)
    dim = _checked_dim(x, dim)
    _check_reduce_op(x, reduce_op)
    lengths = chunk_sizes(x.shape[dim], group.world_size) if sizes is None else plain_sizes(sizes)
    check_call(
        group,
        lambda: (
            f"reduce_scatter({reduce_op}) of {list(x.shape)} {x.dtype} along dim {dim}, {lengths}"
        ),
    )
    if len(lengths) != group.world_size or min(lengths) < 0 or sum(lengths) != x.shape[dim]:
        raise ValueError(
            f"sizes must be {group.world_size} lengths that add up to the {x.shape[dim]} of dim "
            f"{dim}, got {lengths}"
        )
    if out is not None:
        _check_out(x, out, (*x.shape[:dim], lengths[group.rank], *x.shape[dim + 1 :]))
        front = _in_front(out, dim)
        movement.scatter(_in_front(x, dim), group, lengths, reduce_op, front, dim=dim)
        return out
    front = _in_front(x, dim)
    return _put_back(_apply(_ReduceScatter, front, group, reduce_op, lengths, dim), dim)


class _ReduceScatter(torch.autograd.Function):
    """Along dim 0, of what was `dim`. Backward: all_gather of the gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: Group, op: ReduceOp, sizes: list[int], dim: int
    ) -> torch.Tensor:
        ctx.group, ctx.op, ctx.sizes, ctx.dim = group, op, sizes, dim
        return movement.scatter(x, group, sizes, op, dim=dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        check_differentiable("reduce_scatter", ctx.op)
        out = _apply(_AllGather, grad, ctx.group, ctx.sizes, ctx.dim)
        return out / ctx.group.world_size if ctx.op == "avg" else out, None, None, None, None


@repeatable
def all_reduce(
    x: torch.Tensor,
    group: GroupLike = None,
    *,
    reduce_op: ReduceOp = "sum",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The reduction of every rank's `x`.

    Args:
        x: the same shape and dtype on every rank.
        reduce_op: "sum", "avg", "max", "min" or "product".
        out: where the result goes, which may be in the memory of `x`; a new contiguous tensor if
            None.

    Returns:
        The reduction, bitwise the same on every rank. The ranks' gradients, for "sum" and "avg",
        are reduced likewise.

    Raises:
        ValueError: an unknown `reduce_op`, or "avg" of integers.
        PeerTimeout: a rank did not come.
    """
    if is_call_traced(x):
        return _into(out, torch.ops.weft.all_reduce(x, group_name(group), reduce_op))
    group = resolve(group)
    _check_reduce_op(x, reduce_op)
    check_call(group, lambda: f"all_reduce({reduce_op}) of {list(x.shape)} {x.dtype}")
    if out is not None:
        _check_out(x, out, x.shape)
        return movement.all_reduce(x, group, reduce_op, out)
    result: torch.Tensor = _apply(_AllReduce, x, group, reduce_op)
    return result


class _AllReduce(torch.autograd.Function):
    """Backward: all_reduce of the gradient, as every rank's result depends on every `x`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, op: ReduceOp) -> torch.Tensor:
        ctx.group, ctx.op = group, op
        return movement.all_reduce(x, group, op)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        check_differentiable("all_reduce", ctx.op)
        return _apply(_AllReduce, grad, ctx.group, ctx.op), None, None


@repeatable
def all_to_all(
    x: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Send piece j of `x` (cut along dim 0) to rank j; return the pieces received, in rank order.

    Args:
        x: what follows dim 0 is the same shape on every rank.
        output_split_sizes: rows that come from each rank; None: equal shares.
        input_split_sizes: rows that go to each rank; None: equal shares.
        out: where the result goes, which may be in the memory of `x`; a new tensor if None.

    Returns:
        A tensor of sum(output_split_sizes) rows. Its gradient is sent back.

    Raises:
        ValueError: splits that do not add up to the rows of `x`, or shares that do not divide.
        MismatchError: on every rank, if one rank does not send what another expects.
    """
    if is_call_traced(x):
        name = group_name(group)
        return _into(out, torch.ops.weft.all_to_all(x, output_split_sizes, input_split_sizes, name))
    group = resolve(group)
    if x.ndim == 0:
        raise ValueError("all_to_all cuts dim 0: x must have at least one dim")
    world_size = group.world_size
    explicit = input_split_sizes is not None or output_split_sizes is not None
    splits: list[list[int]] = []
    for name, given in (("input", input_split_sizes), ("output", output_split_sizes)):
        if given is None:
            if x.shape[0] % world_size:
                raise ValueError(
                    f"{x.shape[0]} rows do not divide into {world_size} equal shares: pass "
                    f"{name}_split_sizes"
                )
            given = [x.shape[0] // world_size] * world_size
        if len(given) != world_size or min(given) < 0:
            raise ValueError(f"{name}_split_sizes must be {world_size} sizes, got {list(given)}")
        splits.append(plain_sizes(given))
    if sum(splits[0]) != x.shape[0]:
        raise ValueError(f"input_split_sizes={splits[0]} must add up to the {x.shape[0]} rows of x")
    if world_size == 1 and splits[0] != splits[1]:  # several ranks compare them
        raise MismatchError(f"all_to_all: {x.shape[0]} rows are sent, but {splits[1]} expected")
    check_call(
        group,
        lambda: (
            f"all_to_all of rows {list(x.shape[1:])} {x.dtype}, "
            + ("split sizes given" if explicit else f"equal shares of {x.shape[0]}")
        ),
    )
    sends, receives = splits
    if out is not None:
        _check_out(x, out, (sum(receives), *x.shape[1:]))
        return movement.all_to_all(x, group, sends, receives, explicit, out)
    result: torch.Tensor = _apply(_AllToAll, x, group, sends, receives, explicit)
    return result


class _AllToAll(torch.autograd.Function):
    """Backward: all_to_all with the splits exchanged."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        group: Group,
        sends: list[int],
        receives: list[int],
        told: bool,
    ) -> torch.Tensor:
        ctx.args = group, receives, sends, told
        return movement.all_to_all(x, group, sends, receives, told)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return _apply(_AllToAll, grad, *ctx.args), None, None, None, None


@repeatable
def broadcast(
    x: torch.Tensor, src: int = 0, group: GroupLike = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The `x` of rank `src` (its number in the group).

    Args:
        x: the same shape and dtype on every rank; its values are read on `src` only.
        out: where the result goes, which may be in the memory of `x`; a new contiguous tensor if
            None.

    Returns:
        The values of `src`. The gradients of all ranks add up on `src`.

    Raises:
        ValueError: no such rank.
    """
    if is_call_traced(x):
        return _into(out, torch.ops.weft.broadcast(x, src, group_name(group)))
    group = resolve(group)
    if not 0 <= src < group.world_size:
        raise ValueError(f"src must be a rank of the group, 0..{group.world_size - 1}, got {src=}")
    check_call(group, lambda: f"broadcast of {list(x.shape)} {x.dtype} from rank {src}")
    if out is not None:
        _check_out(x, out, x.shape)
        return movement.broadcast(x, group, src, out)
    result: torch.Tensor = _apply(_Broadcast, x, group, src)
    return result


class _Broadcast(torch.autograd.Function):
    """Backward: the sum of the gradients, to `src`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, src: int) -> torch.Tensor:
        ctx.group, ctx.src = group, src
        return movement.broadcast(x, group, src)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        total = _apply(_AllReduce, grad, ctx.group, "sum")
        if ctx.group.rank != ctx.src:
            # Zeros that depend on the sum: differentiating them is a call of all ranks, too.
            everywhere = torch.ones((), dtype=torch.bool, device=total.device)
            total = total.masked_fill(everywhere, 0)
        return total, None, None


def barrier(group: GroupLike = None) -> None:
    """Wait until every rank of the group is here.

    Raises:
        PeerTimeout: ranks did not come; `absent` are all of them.
    """
    if torch.compiler.is_compiling():
        torch.ops.weft.barrier(group_name(group))
        return
    group = resolve(group)
    check_all()
    if group.unreached(torch.device("cpu")):
        with group.calls.noting(call_of("barrier", ())):
            by_group(dist.barrier, group, moves_gpu_tensors(group.pg))
    elif group.world_size > 1:
        waits = exchange(group, 0, "barrier")
        try:
            with waits as ex:
                ex.signal_all()
        except PeerTimeout as error:
            raise error.of(waits.absent()) from None


def _into(out: torch.Tensor | None, result: torch.Tensor) -> torch.Tensor:
    if out is None:
        return result
    _refuse_gradient(result, out)
    return out.copy_(result)


def _apply(function: type[torch.autograd.Function], x: torch.Tensor, *args: Any) -> Any:
    """`function` of `x`, or only its forward, which saves 8 us, if no gradient is needed."""
    if x.requires_grad and torch.is_grad_enabled():
        return function.apply(x, *args)
    return cast(Any, function).forward(SimpleNamespace(), x, *args)


def _in_front(x: torch.Tensor, dim: int) -> torch.Tensor:
    """`x` with `dim` moved to the front."""
    return x.movedim(dim, 0) if dim else x


def _put_back(y: torch.Tensor, dim: int) -> torch.Tensor:
    """The reverse of `_in_front`."""
    return y.movedim(0, dim) if dim else y


def _check_out(x: torch.Tensor, out: torch.Tensor, shape: tuple[int, ...]) -> None:
    if out.shape != shape or out.dtype != x.dtype or out.device != x.device:
        raise ValueError(
            f"out must be of shape {tuple(shape)}, {x.dtype}, on {x.device}; got "
            f"{tuple(out.shape)}, {out.dtype}, on {out.device}"
        )
    _refuse_gradient(x, out)


def _refuse_gradient(x: torch.Tensor, out: torch.Tensor) -> None:
    if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        raise ValueError(
            "a call with out= has no gradient, but x or out requires one: leave out= away, or call "
            "under torch.no_grad()"
        )


def _checked_dim(x: torch.Tensor, dim: int) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim must be a dim of x, got {dim=} for shape {tuple(x.shape)}")
    return dim % x.ndim


_REDUCE_OPS: tuple[str, ...] = get_args(ReduceOp)


def _check_reduce_op(x: torch.Tensor, op: str) -> None:
    if op not in _REDUCE_OPS:
        raise ValueError(f"reduce_op must be one of {', '.join(_REDUCE_OPS)}, got {op!r}")
    if x.dtype not in REDUCIBLE or (x.is_complex() and op in ("max", "min")):
        raise ValueError(f"{x.dtype} has no reduction by {op!r}: x must be of another dtype")
    if op == "avg" and not (x.is_floating_point() or x.is_complex()):
        raise ValueError(f"an average needs a floating dtype, got {x.dtype}: sum, then divide")


def check_differentiable(name: str, op: str) -> None:
    """Raise NotImplementedError unless a reduction by `op` has a gradient."""
    if op not in ("sum", "avg"):
        raise NotImplementedError(f'{name} is differentiable for "sum" and "avg", not for {op!r}')
