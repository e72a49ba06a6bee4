"""matmul_reduce_scatter: this rank's rows of the sum over ranks of x @ w, on three engines.

W ranks; rank r holds K_r of the K columns of x, and those rows of w:

    rank r       x (M, K_r)  @  w (K_r, N)  =  partial_r (M, N)

                 partial_0   partial_1          y_0  = (partial_0 + partial_1)[rows of rank 0]
                                                y_1  = (partial_0 + partial_1)[rows of rank 1]

Forward, host engine. Every rank computes all of its partial product in symmetric memory and
signals; it then adds up its own rows of all partial products, in place on the peers and in rank
order. One large matmul and no copy: the sum itself moves the data.

Backward: dx = dy @ w^T and dw = x^T @ dy for the gathered gradient dy; both use one gather, as in
the forward of `all_gather`.

The triton engine is in `reduce_scatter_kernel`; its backward uses the kernels of
`all_gather_kernel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from weft.collectives import Group, all_gather, exchange, reduce_scatter, resolve
from weft.collectives.memory.exchange import check_call
from weft.collectives.ranks.chunks import chunk_sizes, offsets
from weft.collectives.ranks.group import GroupLike, group_name, is_call_traced
from weft.kernels.engine import shards
from weft.kernels.engine.autocast import autocast, outside_autocast
from weft.kernels.engine.chips import chip_of
from weft.kernels.engine.engines import Problem, RunnableEngine, choose, record_backward
from weft.kernels.engine.fp8 import Scaling, refuse_traced, scaled_partial, scaling_of
from weft.kernels.engine.local_matmul import (
    SumOp,
    WeightGrad,
    check_operands,
    check_residual,
    check_sum,
    conjugated,
    finished,
    matmul,
    mm,
    partial_matmul,
    partials_cost,
    sum_dtype,
)
from weft.kernels.engine.replicated import Spread, Summed
from weft.kernels.matmul.all_gather import gather_workspace


@autocast
def matmul_reduce_scatter(
    x: torch.Tensor,
    w: torch.Tensor,
    group: GroupLike = None,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    scatter_dim: int = 0,
    reduce_op: SumOp = "sum",
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """This rank's torch.chunk along `scatter_dim` of the sum over ranks of torch.matmul(x, w).

    Args:
        x: (*batch, K_r): this rank's columns. `batch` is the same on every rank. Any strides.
        w: (K_r, N): the rows of the weight that go with them.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        bias: (N,), added once; the same on every rank.
        residual: added to this rank's chunk of the result, whose shape and dtype it has.
        scatter_dim: dim of the result (*batch, N) that is cut; trailing ranks may get nothing.
        reduce_op: "sum", or "avg" to divide by the number of ranks (before bias and
            residual are added).
        scale_a, scale_b, out_dtype: for x and w of torch.float8_e4m3fn, as in torch._scaled_mm.
            scale_a: fp32, () or (1,), or (*batch, 1), one for each row; scale_b: fp32, () or (1,),
            or (1, N), one for each column; each rank has its own. The result has `out_dtype`, by
            default torch.bfloat16.

    Returns:
        A new tensor, added up in fp32 in rank order; it may be non-contiguous if `scatter_dim` > 0.
        Gradients: those of x and w are this rank's own; that of bias is the sum over all rows, the
        same on every rank. Fused like the forward.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
        PeerTimeout: a rank did not come.
        NotImplementedError: an engine was forced that cannot run the call; a gradient of fp8.

    Example:
        x = [[1.], [2.]] and w = [[10.]] on both of 2 ranks give [[20.]] on rank 0, [[40.]] on 1.
    """
    scaling = scaling_of(
        "matmul_reduce_scatter", x, [w], [bias, residual], scale_a, scale_b, out_dtype
    )
    dtype = scaling.out_dtype if scaling else x.dtype
    if is_call_traced(x):  # see `custom_ops`
        refuse_traced(scaling)
        traced: torch.Tensor = torch.ops.weft.matmul_reduce_scatter(
            x, w, bias, group_name(group), scatter_dim, reduce_op
        )
        return traced if residual is None else traced + residual
    group = resolve(group)
    check_call(
        group,
        lambda: (
            f"matmul_reduce_scatter({reduce_op}) of x {[*x.shape[:-1], '*']} {x.dtype}, "
            f"N = {w.shape[-1]}, along dim {scatter_dim}"
        ),
    )
    if x.ndim < 2 or not -x.ndim <= scatter_dim < x.ndim:
        raise ValueError(
            f"x must have at least 2 dims and scatter_dim be a dim of the result, got shape "
            f"{tuple(x.shape)}, {scatter_dim=}"
        )
    check_operands(x, x.shape[-1], [w], [bias], dtype)
    check_sum(reduce_op)
    scatter_dim %= x.ndim
    columns = scatter_dim == x.ndim - 1
    K, N = w.shape
    world_size = group.world_size
    shape = [*x.shape[:-1], N]
    sizes = chunk_sizes(shape[scatter_dim], world_size)
    shape[scatter_dim] = sizes[group.rank]
    check_residual(residual, shape, dtype, x.device)
    engine = choose(scatter_problem(x, w, group, scatter_dim), group, x.device)
    if engine == "generic":
        partial = scaled_partial(x, w, scaling) if scaling else partial_matmul(x, w)
        y = _ScatteredSum.apply(partial, group, scatter_dim, reduce_op, dtype)
        if bias is not None:
            bias = Spread.apply(bias, group)
            if columns:
                bias = bias.split(sizes)[group.rank]
        return finished(y, bias, residual, dtype)
    front = x.movedim(scatter_dim, 0)
    batch = front.shape[1:-1]
    rows = [size * batch.numel() for size in sizes]
    flat = front.reshape(sum(rows), K)
    if residual is not None:
        residual = residual.movedim(scatter_dim, 0).reshape(rows[group.rank], N)
    if scaling:
        scaling = replace(scaling, rows=scaling.rows.movedim(scatter_dim, 0).reshape(sum(rows), 1))
    call = _Call(group, rows, engine, reduce_op == "avg", scaling)
    made: torch.Tensor = _MatmulReduceScatter.apply(call, flat, w, bias, residual)
    return made.view(sizes[group.rank], *batch, N).movedim(0, scatter_dim)


def scatter_problem(x: torch.Tensor, w: torch.Tensor, group: Group, scatter_dim: int) -> Problem:
    """What the choice of engine for a call, or for its gradient, depends on."""
    (K, N), W = w.shape, group.world_size
    M = x.shape[:-1].numel()
    moved = M * N // W * (W - 1) * sum_dtype(x).itemsize
    columns = scatter_dim == x.ndim - 1
    return Problem(
        "matmul_reduce_scatter", M, N, K, x.dtype, moved,
        refusal="the scattered dim is that of the columns" if columns else "",
    )  # fmt: skip


class _ScatteredSum(torch.autograd.Function):
    """reduce_scatter of partial sums. The gradients are cast to `dtype` before they travel."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: Group, dim: int, op: SumOp, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.op, ctx.dtype, ctx.length = group, dim, op, dtype, x.shape[dim]
        return reduce_scatter(x, group, dim=dim, reduce_op=op)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        sizes = chunk_sizes(ctx.length, ctx.group.world_size)
        out = all_gather(grad.to(ctx.dtype), ctx.group, dim=ctx.dim, sizes=sizes)
        return out / ctx.group.world_size if ctx.op == "avg" else out, None, None, None, None


class _Call(NamedTuple):
    """One call of a fused engine, except for its tensors, which autograd must see."""

    group: Group
    rows: list[int]  # of every rank's chunk
    engine: RunnableEngine
    average: bool
    scaling: Scaling | None


class Gradient(NamedTuple):
    """What a backward is given: x (M, K_r) and w (K_r, N) as in forward, dy of this rank's rows."""

    x: torch.Tensor
    w: torch.Tensor
    dy: torch.Tensor
    group: Group
    rows: list[int]
    average: bool
    needs: Sequence[bool]  # of x, w and bias

    @property
    def divisor(self) -> int:
        """Of dy, before its gather; the bias, added after the division, needs dy undivided."""
        return self.group.world_size if self.average and any(self.needs[:2]) else 1


# For x, w and bias; None where it is not needed.
_Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class _MatmulReduceScatter(torch.autograd.Function):
    """x (M, K_r), w (K_r, N), bias (N,), residual like y -> y (rows of this rank, N)."""

    @staticmethod
    def forward(
        ctx: Any,
        call: _Call,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.call = call
        run = _host_forward if call.engine == "host" else _triton_forward
        return run(call, x, w, bias, residual)

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        x, w = conjugated(*ctx.saved_tensors)
        *needs, needs_residual = ctx.needs_input_grad[1:]
        record_backward("matmul_reduce_scatter", call.engine, call.group, "all_gather")
        given = Gradient(x, w, dy.contiguous(), call.group, call.rows, call.average, needs)
        if torch.is_grad_enabled():
            grads = _differentiable_backward(given)
        else:
            grads = run_backward(call.engine, given)
        return None, *grads, dy if needs_residual else None


def run_backward(engine: RunnableEngine, given: Gradient) -> _Gradients:
    """The gradients that are needed, by a fused engine."""
    return _host_backward(given) if engine == "host" else _triton_backward(given)


def _host_forward(
    call: _Call,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    group, rows, _, average, scaling = call
    M, N = x.shape[0], w.shape[1]
    dtype = scaling.out_dtype if scaling else x.dtype
    op, nbytes = "matmul_reduce_scatter", M * N * sum_dtype(x).itemsize
    with exchange(group, nbytes, op, x.device, channel="host scatter") as ex:
        own, overwrite = shards.publish_product(ex, x, w, rows, scaling=scaling)
        y = shards.reduce_rows(
            ex, own, offsets(rows)[group.rank], dtype, average=average, bias=bias,
            residual=residual, overwrite=overwrite,
        )  # fmt: skip
        return ex.result(y)


def _host_backward(given: Gradient) -> _Gradients:
    x, w, dy, group, rows, _, (needs_x, needs_w, needs_b) = given
    dx = None
    accumulator = sum_dtype(w)
    db = torch.zeros(w.shape[1], dtype=accumulator, device=w.device) if needs_b else None
    divisor = given.divisor
    own, nbytes = dy / divisor if divisor > 1 else dy, shards.gather_bytes(dy, rows)
    in_place = (
        shards.rows_in_place(own, [w.t()], rows) if needs_x else shards.sums_in_place([w.t()], rows)
    )
    in_place = in_place and not (needs_w and partials_cost(own))
    grad = WeightGrad(w, len(rows) if in_place else 1) if needs_w else None
    op = "matmul_reduce_scatter backward"
    with exchange(group, nbytes, op, x.device, channel="host gather") as ex:
        shards.publish(ex, own, rows)
        for start, chunk in shards.row_chunks(ex, own, rows, in_place=in_place):
            stop = start + len(chunk)
            if needs_x and len(chunk) == len(x):
                dx = mm(chunk, w.t())
            elif needs_x:
                dx = torch.empty_like(x) if dx is None else dx
                mm(chunk, w.t(), out=dx[start:stop])
            if grad is not None:
                grad.add(x[start:stop], chunk)
            if db is not None:
                db += chunk.sum(0, dtype=accumulator) * divisor
        dw = None if grad is None else grad.result()
        db = None if db is None else db.to(w.dtype)
        for gradient in (dx, dw, db):
            if gradient is not None:
                ex.result(gradient)
    return dx, dw, db


def _triton_forward(
    call: _Call,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    from weft.kernels.matmul import reduce_scatter_kernel as kernel

    group, rows, _, average, scaling = call
    out_dtype = scaling.out_dtype if scaling else x.dtype
    ws = kernel.workspace_for(x, w, group, rows, out_dtype)
    with ws.call("matmul_reduce_scatter"):
        return kernel.launch_matmul_reduce_scatter(
            [x],
            [w],
            ws,
            rows,
            bias=bias,
            residual=residual,
            scale=1 / group.world_size if average else 1.0,
            scaling=scaling,
        )


def _triton_backward(given: Gradient) -> _Gradients:
    from weft.kernels.matmul import all_gather_launch, contract_kernel

    x, w, dy, group, rows, _, (needs_x, needs_w, needs_b) = given
    op = "matmul_reduce_scatter backward"
    dx = dw = db = None
    divisor = given.divisor
    own = dy / divisor if divisor > 1 else dy
    whole = needs_w or needs_b
    config = all_gather_launch.all_gather_config(
        sum(rows), w.shape[0], w.shape[1], x.dtype, group.world_size, chip_of(x.device), keep=whole
    )
    by_engines = config.copy_engines and (needs_x or needs_b)
    ws = gather_workspace(own, group, rows, by_engines)
    dw = torch.empty_like(w) if needs_w else None
    if needs_x or needs_b:
        with ws.call(op):
            made = all_gather_launch.launch_all_gather_matmul(
                own, [w.t()], ws, rows, with_own=whole, config=config
            )
        (dx,), gathered = made.ys, made.matrix
        if dw is not None:
            assert gathered is not None
            mm(x.t(), gathered, out=dw)
    elif dw is not None:
        # dw = x^T @ gathered, as the transpose of the product that the kernel gathers for.
        with ws.call(op):
            contract_kernel.launch_all_gather_contract(own, x, ws, rows, out=dw.t())
    if needs_b:
        assert gathered is not None
        db = gathered.sum(0, dtype=torch.float32)
        db = (db * divisor).to(w.dtype)
    return dx if needs_x else None, dw, db


def _differentiable_backward(given: Gradient) -> _Gradients:
    """The same by ops that are differentiable themselves."""
    x, w, dy, group, rows, average, (needs_x, needs_w, needs_b) = given
    whole = all_gather(dy / group.world_size if average else dy, group, sizes=rows)
    dx = matmul(whole, w.t()) if needs_x else None
    dw = matmul(x.t(), whole) if needs_w else None
    return dx, dw, Summed.apply(dy.sum(0), group, "sum") if needs_b else None


def matmul_reduce_scatter_reference(
    xs: list[torch.Tensor],
    ws: list[torch.Tensor],
    rank: int,
    bias: torch.Tensor | None = None,
    scatter_dim: int = 0,
    reduce_op: SumOp = "sum",
) -> torch.Tensor:
    """What `rank` gets, given all ranks' operands: the oracle of the tests, in any dtype."""
    y = torch.stack([torch.matmul(x, w) for x, w in zip(xs, ws, strict=True)]).sum(0)
    if reduce_op == "avg":
        y = y / len(xs)
    if bias is not None:
        y = y + bias
    sizes = chunk_sizes(y.shape[scatter_dim], len(xs))
    parts: tuple[torch.Tensor, ...] = y.split(sizes, scatter_dim)
    return parts[rank]
