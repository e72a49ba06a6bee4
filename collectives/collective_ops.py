"""The collectives: all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, barrier.

They return new tensors, are differentiable, take any strides, and treat uneven and empty shards by
the rule of torch.chunk. Reductions add in fp32 (integers: in their own type) in rank order with one
rounding at the end, so that results are bitwise the same from run to run and from rank to rank.

CPU ranks exchange through symmetric memory, in windows small enough to stay in the cache between
the rank that writes them and the ranks that read them:

    for each window:   own window -> own half   signal   wait for a peer   its half -> result

so that main memory sees each input byte read once and each result byte written once. Where
symmetric memory does not reach, and on GPUs, the process group does it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from weft import settings
from weft.collectives.exchange import Exchange, agree, check_call, exchange
from weft.collectives.group import Group, GroupLike, resolve

ReduceOp = Literal["sum", "avg", "max", "min", "product"]

_WINDOW_BYTES = 1 << 20  # half of the smallest L2 cache in use; see `weft bench collectives`
_DIST_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


def chunk_sizes(length: int, world_size: int) -> list[int]:
    """Lengths of the shards that torch.chunk cuts `length` into, 0 for the ranks that get none."""
    full = -(-length // world_size)
    return [max(0, min(full, length - rank * full)) for rank in range(world_size)]


def offsets(sizes: Sequence[int]) -> list[int]:
    """Where each shard begins."""
    return [sum(sizes[:rank]) for rank in range(len(sizes))]


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
        sizes: length of every rank's shard along `dim`, if known; None: the ranks tell each other.
        out: where the result goes; a new tensor if None. As for any op of torch, no gradient then.

    Returns:
        The whole, the same on every rank. With `dim` other than 0 it may be non-contiguous.
        Its gradient is summed over the ranks and scattered back.

    Raises:
        MismatchError: the ranks' other sizes or dtypes differ.
        PeerTimeout: a rank did not come.

    Example:
        x = [rank] on 3 ranks gives [0, 1, 2] on each.
    """
    where = resolve(group)
    dim = _checked_dim(x, dim)
    lengths = known_sizes(x, where, dim, sizes)
    if out is not None:
        _check_out(x, out, (*x.shape[:dim], sum(lengths), *x.shape[dim + 1 :]))
        _gather(x.movedim(dim, 0), where, lengths, out.movedim(dim, 0))
        return out
    result: torch.Tensor = _AllGather.apply(x, where, dim, lengths)
    return result


def known_sizes(
    x: torch.Tensor, group: Group, dim: int, sizes: Sequence[int] | None, op: str = "all_gather"
) -> list[int]:
    """Lengths of all ranks' shards of `x` along `dim`: `sizes` after a check, or exchanged."""
    others = [*x.shape[:dim], "*", *x.shape[dim + 1 :]]
    call = f"{op} of {others} {x.dtype} along dim {dim}"
    check_call(group, call)
    if sizes is None:
        if group.why:
            every: list[Any] = [None] * group.world_size
            dist.all_gather_object(every, x.shape[dim], group=group.pg)
            return every
        return agree(group, call, x.shape[dim])
    if len(sizes) != group.world_size or sizes[group.rank] != x.shape[dim]:
        raise ValueError(
            f"sizes holds the length of every rank's shard along dim {dim}: got {list(sizes)} for "
            f"{group.world_size} ranks, with {x.shape[dim]} here (rank {group.rank})"
        )
    return list(sizes)


class _AllGather(torch.autograd.Function):
    """Backward: reduce_scatter of the gradient, to the same sizes."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: Group, dim: int, sizes: list[int]
    ) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return _gather(x.movedim(dim, 0), group, sizes).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        front = grad.movedim(ctx.dim, 0)
        return _scatter(front, ctx.group, ctx.sizes, "sum").movedim(0, ctx.dim), None, None, None


def _gather(
    x: torch.Tensor, group: Group, sizes: list[int], given: torch.Tensor | None = None
) -> torch.Tensor:
    out = _result((sum(sizes), *x.shape[1:]), x, given)
    _gather_into(out, x.contiguous(), group, sizes)
    return _returned(out, given)


def _gather_into(out: torch.Tensor, x: torch.Tensor, group: Group, sizes: list[int]) -> None:
    if group.world_size == 1:
        out.copy_(x)
        return
    parts = out.split(sizes)
    if not _use_memory("all_gather", group, x):
        _process_group_gather(parts, x, group)
        return
    flat, mine = [part.view(-1) for part in parts], x.view(-1)
    for start, stop in _windows(max(part.numel() for part in flat), x.dtype):
        nbytes = (stop - start) * x.element_size()
        with exchange(group, nbytes, "all_gather", x.device) as ex:
            own = mine[start:stop]
            ex.local(tuple(own.shape), x.dtype).copy_(own)
            ex.signal_all()
            flat[group.rank][start:stop].copy_(own)
            for peer in ex.peers():
                into = flat[peer][start:stop]
                ex.wait(peer)
                into.copy_(ex.peer(peer, tuple(into.shape), x.dtype))


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
        out: where the result goes; a new tensor if None.

    Returns:
        The chunk. Gradients, for "sum" and "avg": the
        gathered (and divided) gradient of the chunks.

    Raises:
        ValueError: an unknown `reduce_op`, or "avg" of integers.
        PeerTimeout: a rank did not come.

    Example:
        x = [1, 2, 3] on each of 2 ranks gives [2, 4] on rank 0 and [6] on rank 1.
    """
    where = resolve(group)
    dim = _checked_dim(x, dim)
    _check_reduce_op(x, reduce_op)
    check_call(where, f"reduce_scatter({reduce_op}) of {list(x.shape)} {x.dtype} along dim {dim}")
    lengths = chunk_sizes(x.shape[dim], where.world_size) if sizes is None else list(sizes)
    if len(lengths) != where.world_size or min(lengths) < 0 or sum(lengths) != x.shape[dim]:
        raise ValueError(
            f"sizes must be {where.world_size} lengths that add up to the {x.shape[dim]} of dim "
            f"{dim}, got {lengths}"
        )
    if out is not None:
        _check_out(x, out, (*x.shape[:dim], lengths[where.rank], *x.shape[dim + 1 :]))
        _scatter(x.movedim(dim, 0), where, lengths, reduce_op, out.movedim(dim, 0))
        return out
    result: torch.Tensor = _ReduceScatter.apply(x, where, dim, reduce_op, lengths)
    return result


class _ReduceScatter(torch.autograd.Function):
    """Backward: all_gather of the gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: Group, dim: int, op: ReduceOp, sizes: list[int]
    ) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.op, ctx.sizes = group, dim, op, sizes
        return _scatter(x.movedim(dim, 0), group, sizes, op).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        _check_differentiable("reduce_scatter", ctx.op)
        out = _gather(grad.movedim(ctx.dim, 0), ctx.group, ctx.sizes).movedim(0, ctx.dim)
        return out / ctx.group.world_size if ctx.op == "avg" else out, None, None, None, None


def _scatter(
    x: torch.Tensor,
    group: Group,
    sizes: list[int],
    op: ReduceOp,
    given: torch.Tensor | None = None,
) -> torch.Tensor:
    out = _result((sizes[group.rank], *x.shape[1:]), x, given)
    _scatter_into(out, x.contiguous(), group, sizes, op)
    return _returned(out, given)


def _scatter_into(
    out: torch.Tensor, x: torch.Tensor, group: Group, sizes: list[int], op: ReduceOp
) -> None:
    if group.world_size == 1:
        out.copy_(x)
        return
    if not _use_memory("reduce_scatter", group, x):
        whole = _process_group_reduce(x, group, op)
        start = offsets(sizes)[group.rank]
        out.copy_(whole[start : start + sizes[group.rank]])
        return
    parts, result = [part.view(-1) for part in x.split(sizes)], out.view(-1)
    widest = max(part.numel() for part in parts)
    window = min(_window_elements(x.dtype) // (group.world_size - 1) + 1, max(widest, 1))
    slot_bytes = -(-window * x.element_size() // 64) * 64
    for start in range(0, widest, window):
        with exchange(group, group.world_size * slot_bytes, "reduce_scatter", x.device) as ex:
            for peer in ex.peers():
                part = parts[peer][start : start + window]
                ex.local(tuple(part.shape), x.dtype, peer * slot_bytes).copy_(part)
                ex.signal(peer)
            into = result[start : start + window]
            own = parts[group.rank][start : start + window]
            terms = _terms(ex, group, own, group.rank * slot_bytes)
            _reduce_into(into, terms, op)


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
        out: where the result goes, `x` itself allowed; a new contiguous tensor if None.

    Returns:
        The reduction, bitwise the same on every rank. Gradients, for "sum" and "avg": the
        gradients of all ranks, reduced likewise.

    Raises:
        ValueError: an unknown `reduce_op`, or "avg" of integers.
        PeerTimeout: a rank did not come.
    """
    where = resolve(group)
    _check_reduce_op(x, reduce_op)
    check_call(where, f"all_reduce({reduce_op}) of {list(x.shape)} {x.dtype}")
    if out is not None:
        _check_out(x, out, x.shape)
        return _all_reduce(x, where, reduce_op, out)
    result: torch.Tensor = _AllReduce.apply(x, where, reduce_op)
    return result


class _AllReduce(torch.autograd.Function):
    """Backward: all_reduce of the gradient, as every rank's result depends on every `x`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, op: ReduceOp) -> torch.Tensor:
        ctx.group, ctx.op = group, op
        return _all_reduce(x, group, op)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        _check_differentiable("all_reduce", ctx.op)
        return _all_reduce(grad, ctx.group, ctx.op), None, None


# With more ranks than this, or windows larger than this, each rank reduces its own part of a window
# and hands it on (two-shot); else each reduces all of it (one-shot).
_ONE_SHOT_RANKS = 2
_ONE_SHOT_BYTES = 32 << 10


def _all_reduce(
    x: torch.Tensor, group: Group, op: ReduceOp, given: torch.Tensor | None = None
) -> torch.Tensor:
    out = _result(x.shape, x, given)
    _all_reduce_into(out, x.contiguous(), group, op)
    return _returned(out, given)


def _all_reduce_into(out: torch.Tensor, x: torch.Tensor, group: Group, op: ReduceOp) -> None:
    if group.world_size == 1:
        out.copy_(x)
        return
    if not _use_memory("all_reduce", group, x):
        out.copy_(_process_group_reduce(x, group, op))
        return
    mine, result = x.view(-1), out.view(-1)
    for start, stop in _windows(mine.numel(), x.dtype):
        own, into = mine[start:stop], result[start:stop]
        nbytes = own.numel() * x.element_size()
        if group.world_size > _ONE_SHOT_RANKS and nbytes > _ONE_SHOT_BYTES:
            _two_shot(own, into, group, op)
            continue
        with exchange(group, nbytes, "all_reduce", x.device) as ex:
            ex.local(tuple(own.shape), x.dtype).copy_(own)
            ex.signal_all()
            # `out` may be `x`: read this rank's part where it is not overwritten.
            part = ex.local(tuple(own.shape), own.dtype)
            _reduce_into(into, _terms(ex, group, part, 0), op)


def _two_shot(own: torch.Tensor, into: torch.Tensor, group: Group, op: ReduceOp) -> None:
    sizes = chunk_sizes(own.numel(), group.world_size)
    starts = offsets(sizes)
    nbytes = own.numel() * own.element_size()
    start, size = starts[group.rank], sizes[group.rank]
    with exchange(group, nbytes, "all_reduce", own.device) as ex:
        ex.local(tuple(own.shape), own.dtype).copy_(own)
        ex.signal_all()
        offset = start * own.element_size()
        part = ex.local((size,), own.dtype, offset)
        terms = _terms(ex, group, part, offset)
        _reduce_into(into[start : start + size], terms, op)
    with exchange(group, nbytes, "all_reduce", own.device) as ex:
        ex.local((size,), own.dtype).copy_(into[start : start + size])
        ex.signal_all()
        for peer in ex.peers():
            ex.wait(peer)
            part = into[starts[peer] : starts[peer] + sizes[peer]]
            part.copy_(ex.peer(peer, (sizes[peer],), own.dtype))


def _terms(ex: Exchange, group: Group, own: torch.Tensor, offset: int) -> list[torch.Tensor]:
    """Every rank's contribution in rank order: peers' in place, after waiting for them."""
    ex.wait_all()
    shape = tuple(own.shape)
    return [
        own if rank == group.rank else ex.peer(rank, shape, own.dtype, offset)
        for rank in range(group.world_size)
    ]


_COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


def _reduce_into(out: torch.Tensor, terms: list[torch.Tensor], op: ReduceOp) -> None:
    """out = terms[0] op terms[1] op ..., in this order, rounded once."""
    combine = _COMBINE[op]
    half = out.dtype in (torch.float16, torch.bfloat16)
    if half and op in ("sum", "avg", "product"):
        acc = combine(terms[0].float(), terms[1])
    else:
        acc = combine(terms[0], terms[1], out=out)
    for term in terms[2:]:
        combine(acc, term, out=acc)
    if op == "avg":
        acc.div_(len(terms))
    if acc is not out:
        out.copy_(acc)


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
        out: where the result goes; a new tensor if None.

    Returns:
        A tensor of sum(output_split_sizes) rows. Its gradient goes the way back.

    Raises:
        ValueError: splits that do not add up to the rows of `x`, or equal shares that do not divide.
        MismatchError: on every rank, where what one sends is not what another expects.
    """
    where = resolve(group)
    if x.ndim == 0:
        raise ValueError("all_to_all cuts dim 0: x must have at least one dim")
    world_size = where.world_size
    told = input_split_sizes is not None or output_split_sizes is not None
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
        splits.append(list(given))
    if sum(splits[0]) != x.shape[0]:
        raise ValueError(f"input_split_sizes={splits[0]} must add up to the {x.shape[0]} rows of x")
    check_call(where, f"all_to_all of rows {list(x.shape[1:])} {x.dtype}")
    sends, receives = splits
    if out is not None:
        _check_out(x, out, (sum(receives), *x.shape[1:]))
        return _all_to_all(x, where, sends, receives, told, out)
    result: torch.Tensor = _AllToAll.apply(x, where, sends, receives, told)
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
        return _all_to_all(x, group, sends, receives, told)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return _all_to_all(grad, *ctx.args), None, None, None, None


def _all_to_all(
    x: torch.Tensor,
    group: Group,
    sends: list[int],
    receives: list[int],
    told: bool,
    given: torch.Tensor | None = None,
) -> torch.Tensor:
    out = _result((sum(receives), *x.shape[1:]), x, given)
    _all_to_all_into(out, x.contiguous(), group, sends, receives, told)
    return _returned(out, given)


def _all_to_all_into(
    out: torch.Tensor,
    x: torch.Tensor,
    group: Group,
    sends: list[int],
    receives: list[int],
    told: bool,
) -> None:
    if group.world_size == 1:
        out.copy_(x)
        return
    if not _use_memory("all_to_all", group, x):
        dist.all_to_all_single(out, x, receives, sends, group=group.pg)
        return
    # Equal shares are the same on every rank; told ones every rank must hear of.
    table = _split_table(group, sends, receives) if told else [sends]
    row = math.prod(x.shape[1:])
    widest = max(max(row_sizes) for row_sizes in table) * row
    outgoing = [part.view(-1) for part in x.split(sends)]
    incoming = [part.view(-1) for part in out.split(receives)]
    incoming[group.rank].copy_(outgoing[group.rank])
    window = min(_window_elements(x.dtype) // (group.world_size - 1) + 1, max(widest, 1))
    slot_bytes = -(-window * x.element_size() // 64) * 64
    for start in range(0, widest, window):
        with exchange(group, group.world_size * slot_bytes, "all_to_all", x.device) as ex:
            for peer in ex.peers():
                part = outgoing[peer][start : start + window]
                ex.local(tuple(part.shape), x.dtype, peer * slot_bytes).copy_(part)
                ex.signal(peer)
            for peer in ex.peers():
                into = incoming[peer][start : start + window]
                ex.wait(peer)
                into.copy_(ex.peer(peer, tuple(into.shape), x.dtype, group.rank * slot_bytes))


def _split_table(group: Group, sends: list[int], receives: list[int]) -> list[list[int]]:
    """What every rank sends to every rank, after checking that it is what that one expects."""
    from weft.errors import MismatchError

    shape = (2, group.world_size)
    with exchange(group, 16 * group.world_size, "all_to_all") as ex:
        ex.local(shape, torch.int64).copy_(torch.tensor([sends, receives]))
        ex.signal_all()
        ex.wait_all()
        tables = [ex.peer(r, shape, torch.int64).tolist() for r in range(group.world_size)]
    for source, (sent, _) in enumerate(tables):
        for target, (_, expected) in enumerate(tables):
            if sent[target] != expected[source]:
                raise MismatchError(
                    f"all_to_all: rank {source} sends {sent[target]} rows to rank {target}, which "
                    f"expects {expected[source]}"
                )
    return [sent for sent, _ in tables]


def broadcast(
    x: torch.Tensor, src: int = 0, group: GroupLike = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The `x` of rank `src` (its number in the group).

    Args:
        x: the same shape and dtype on every rank; its values are read on `src` only.
        out: where the result goes, `x` itself allowed; a new contiguous tensor if None.

    Returns:
        The values of `src`. The gradients of all ranks add up on `src`.

    Raises:
        ValueError: no such rank.
    """
    where = resolve(group)
    if not 0 <= src < where.world_size:
        raise ValueError(f"src must be a rank of the group, 0..{where.world_size - 1}, got {src=}")
    check_call(where, f"broadcast of {list(x.shape)} {x.dtype} from rank {src}")
    if out is not None:
        _check_out(x, out, x.shape)
        return _broadcast(x, where, src, out)
    result: torch.Tensor = _Broadcast.apply(x, where, src)
    return result


class _Broadcast(torch.autograd.Function):
    """Backward: the sum of the gradients, to `src`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, src: int) -> torch.Tensor:
        ctx.group, ctx.src = group, src
        return _broadcast(x, group, src)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        total = _all_reduce(grad, ctx.group, "sum")
        return total if ctx.group.rank == ctx.src else torch.zeros_like(total), None, None


def _broadcast(
    x: torch.Tensor, group: Group, src: int, given: torch.Tensor | None = None
) -> torch.Tensor:
    out = _result(x.shape, x, given)
    if group.rank == src and out is not x:
        out.copy_(x)
    if group.world_size > 1:
        _broadcast_into(out, group, src)
    return _returned(out, given)


def _broadcast_into(x: torch.Tensor, group: Group, src: int) -> None:
    if not _use_memory("broadcast", group, x):
        dist.broadcast(x, group.ranks[src], group=group.pg)
        return
    flat = x.view(-1)
    for start, stop in _windows(flat.numel(), x.dtype):
        part = flat[start:stop]
        with exchange(group, part.numel() * x.element_size(), "broadcast", x.device) as ex:
            if group.rank == src:
                ex.local(tuple(part.shape), x.dtype).copy_(part)
                ex.signal_all()
            else:
                ex.signal_all()
                ex.wait(src)
                part.copy_(ex.peer(src, tuple(part.shape), x.dtype))


def barrier(group: GroupLike = None) -> None:
    """Wait until every rank of the group is here.

    Raises:
        PeerTimeout: one did not come.
    """
    where = resolve(group)
    if where.why:
        dist.barrier(where.pg)
    elif where.world_size > 1:
        with exchange(where, 0, "barrier") as ex:
            ex.signal_all()


def _check_out(x: torch.Tensor, out: torch.Tensor, shape: Sequence[int]) -> None:
    if tuple(out.shape) != tuple(shape) or out.dtype != x.dtype or out.device != x.device:
        raise ValueError(
            f"out must be of shape {tuple(shape)}, {x.dtype}, on {x.device}; got "
            f"{tuple(out.shape)}, {out.dtype}, on {out.device}"
        )


def _result(shape: Sequence[int], x: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
    """A contiguous tensor to write: `given`, where it is one."""
    if given is not None and given.is_contiguous():
        return given
    return x.new_empty(shape)


def _returned(out: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
    return out if given is None or given is out else given.copy_(out)


def _use_memory(op: str, group: Group, x: torch.Tensor) -> bool:
    engine = settings.current_engine()
    if group.why:
        use, why = False, group.why
    elif engine == "generic":
        use, why = False, "asked for"
    elif x.is_cuda and engine != "host":
        use, why = False, "the process group's own collectives on GPUs"
    else:
        use, why = True, "through symmetric memory"
    if settings.tracing():
        shapes = f"{'x'.join(map(str, x.shape))}, {group.world_size} ranks"
        settings.record(op, "host" if use else "generic", why, shapes)
    return use


def _window_elements(dtype: torch.dtype) -> int:
    return _WINDOW_BYTES // dtype.itemsize


def _windows(numel: int, dtype: torch.dtype) -> list[tuple[int, int]]:
    """Equal windows of at most _WINDOW_BYTES: a short last one would cost as much as a full one."""
    if numel == 0:
        return []
    count = -(-numel // _window_elements(dtype))
    edges = [numel * i // count for i in range(count + 1)]
    return list(pairwise(edges))


def _process_group_gather(
    parts: Sequence[torch.Tensor], x: torch.Tensor, group: Group
) -> None:
    # Gloo takes equal sizes only: shorter shards travel padded.
    longest = max(len(part) for part in parts)
    even = all(len(part) == longest for part in parts)
    padded = x if even else x.new_zeros((longest, *x.shape[1:]))
    if not even:
        padded[: len(x)] = x
    received = list(parts) if even else [torch.empty_like(padded) for _ in parts]
    dist.all_gather(received, padded, group=group.pg)
    if not even:
        for part, shard in zip(parts, received, strict=True):
            part.copy_(shard[: len(part)])


def _process_group_reduce(x: torch.Tensor, group: Group, op: ReduceOp) -> torch.Tensor:
    # The sum of half-precision values is rounded at every step there; add in fp32 as we do.
    half = x.dtype in (torch.float16, torch.bfloat16) and op in ("sum", "avg", "product")
    out = x.float() if half else x.clone()
    dist.all_reduce(out, _DIST_OPS["sum" if op == "avg" else op], group=group.pg)
    if op == "avg":
        out.div_(group.world_size)
    return out.to(x.dtype)


def _checked_dim(x: torch.Tensor, dim: int) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim must be a dim of x, got {dim=} for shape {tuple(x.shape)}")
    return dim % x.ndim


def _check_reduce_op(x: torch.Tensor, op: str) -> None:
    if op not in get_args(ReduceOp):
        raise ValueError(f"reduce_op must be one of {', '.join(get_args(ReduceOp))}, got {op!r}")
    if op == "avg" and not (x.is_floating_point() or x.is_complex()):
        raise ValueError(f"an average needs a floating dtype, got {x.dtype}: sum, then divide")


def _check_differentiable(name: str, op: str) -> None:
    if op not in ("sum", "avg"):
        raise NotImplementedError(f'{name} is differentiable for "sum" and "avg", not for {op!r}')
