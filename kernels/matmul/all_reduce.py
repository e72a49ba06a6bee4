"""matmul_all_reduce: the sum over ranks of x @ w, on every rank: the op of the decode path.

W ranks; rank r holds K_r of the K columns of x, and those rows of w:

    rank r       x (M, K_r)  @  w (K_r, N)  =  partial_r (M, N)      y = partial_0 + partial_1 + ...

Forward, host engine. Every rank computes its partial product in symmetric memory and signals. For
few bytes or two ranks, each adds up all rows of all partial products (one-shot); otherwise each
adds up its own rows, publishes the sum, and copies the others' (two-shot), which reads 2 partial
products instead of W.

Whoever adds rows does so in rank order, so y is bitwise the same on every rank.

Backward: dy is the same on every rank, as y is; dx = dy @ w^T and dw = x^T @ dy move nothing.

The triton engine is in `two_shot_kernel`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from weft.collectives import Group, exchange, resolve
from weft.collectives.memory.exchange import check_call
from weft.collectives.ranks.chunks import chunk_sizes, offsets
from weft.collectives.ranks.group import GroupLike, group_name, is_call_traced
from weft.kernels.engine.autocast import autocast, outside_autocast
from weft.kernels.engine.engines import Problem, RunnableEngine, choose
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
    partial_mm,
    sum_dtype,
)
from weft.kernels.engine.replicated import Spread, Summed
from weft.kernels.engine.shards import reduce_rows

_ONE_SHOT_BYTES = 64 << 10


@autocast
def matmul_all_reduce(
    x: torch.Tensor,
    w: torch.Tensor,
    group: GroupLike = None,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    reduce_op: SumOp = "sum",
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The sum over ranks of torch.matmul(x, w) (+ bias), bitwise the same on every rank.

    Args:
        x: (*batch, K_r): this rank's columns. `batch` is the same on every rank. Any strides.
        w: (K_r, N): the rows of the weight that go with them.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        bias: (N,), added once; the same on every rank.
        residual: (*batch, N), dtype of the result, added once; the same on every rank.
        reduce_op: "sum", or "avg" to divide by the number of ranks (before bias and
            residual are added).
        scale_a, scale_b, out_dtype: for x and w of torch.float8_e4m3fn, as in torch._scaled_mm.
            scale_a: fp32, () or (1,), or (*batch, 1), one for each row; scale_b: fp32, () or (1,),
            or (1, N), one for each column; each rank has its own. The result has `out_dtype`, by
            default torch.bfloat16.

    Returns:
        A new tensor (*batch, N), added up in fp32 in rank order. Its gradient must be the same on
        every rank, as it is; those of x and w are this rank's own, that of bias is replicated.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
        PeerTimeout: a rank did not come.
        NotImplementedError: an engine was forced that cannot run the call; a gradient of fp8.

    Example:
        x = [[1.]], w = [[10.]] on rank 0 and [[2.]], [[10.]] on rank 1 give [[30.]] on both.
    """
    scaling = scaling_of("matmul_all_reduce", x, [w], [bias, residual], scale_a, scale_b, out_dtype)
    dtype = scaling.out_dtype if scaling else x.dtype
    if is_call_traced(x):  # see `custom_ops`
        refuse_traced(scaling)
        traced: torch.Tensor = torch.ops.weft.matmul_all_reduce(
            x, w, bias, group_name(group), reduce_op
        )
        return traced if residual is None else traced + residual
    group = resolve(group)
    check_call(
        group,
        lambda: (
            f"matmul_all_reduce({reduce_op}) of x {[*x.shape[:-1], '*']} {x.dtype}, "
            f"N = {w.shape[-1]}"
        ),
    )
    if x.ndim == 0:
        raise ValueError("x must have at least one dim")
    check_operands(x, x.shape[-1], [w], [bias], dtype)
    check_sum(reduce_op)
    K, N = w.shape
    batch = x.shape[:-1]
    M = batch.numel()
    moved = M * N * (group.world_size - 1) * sum_dtype(x).itemsize
    check_residual(residual, (*batch, N), dtype, x.device)
    engine = choose(Problem("matmul_all_reduce", M, N, K, x.dtype, moved), group, x.device)
    if engine == "generic":
        partial = scaled_partial(x, w, scaling) if scaling else partial_matmul(x, w)
        return finished(Summed.apply(partial, group, reduce_op), bias, residual, dtype)
    residual = None if residual is None else residual.reshape(M, N)
    if scaling:
        scaling = replace(scaling, rows=scaling.rows.reshape(M, 1))
    call = _Call(group, engine, reduce_op == "avg", scaling)
    made: torch.Tensor = _MatmulAllReduce.apply(call, x.reshape(M, K), w, bias, residual)
    return made.view(*batch, N)


class _Call(NamedTuple):
    """One call of a fused engine, except for its tensors, which autograd must see."""

    group: Group
    engine: RunnableEngine
    average: bool
    scaling: Scaling | None


class _MatmulAllReduce(torch.autograd.Function):
    """x (M, K_r), w (K_r, N), bias (N,), residual (M, N) -> y (M, N)."""

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
        _, needs_x, needs_w, needs_b, needs_residual = ctx.needs_input_grad
        dx = dw = None
        scaled = dy * (1 / call.group.world_size) if call.average else dy
        if torch.is_grad_enabled():  # by ops that are differentiable themselves
            scaled = Spread.apply(scaled, call.group)
            dx = matmul(scaled, w.t()) if needs_x else None
            dw = matmul(x.t(), scaled) if needs_w else None
            needs_x = needs_w = False
        if needs_x:
            dx = mm(scaled, w.t())
        if needs_w:
            grad = WeightGrad(w)
            grad.add(x, scaled)
            dw = grad.result()
        db = dy.sum(0) if needs_b else None
        return None, dx, dw, db, dy if needs_residual else None


def _host_forward(
    call: _Call,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    group, _, average, scaling = call
    M, N = x.shape[0], w.shape[1]
    wire, dtype = sum_dtype(x), scaling.out_dtype if scaling else x.dtype
    op, nbytes = "matmul_all_reduce", M * N * wire.itemsize
    rows = chunk_sizes(M, group.world_size)
    starts = offsets(rows)
    own = slice(starts[group.rank], starts[group.rank] + rows[group.rank])
    one_shot = group.world_size <= 2 or nbytes <= _ONE_SHOT_BYTES
    with exchange(group, nbytes, op, x.device, channel="host scatter") as ex:
        shown = ex.local((M, N), wire)
        if scaling:
            shown.copy_(scaled_partial(x, w, scaling))
        else:
            partial_mm(x, w, out=shown)
        ex.signal_all()
        if one_shot:
            y = reduce_rows(ex, shown, 0, dtype, average=average, bias=bias, residual=residual)
            return ex.result(y)
        part = reduce_rows(
            ex, shown[own], own.start, dtype, average=average, bias=bias,
            residual=None if residual is None else residual[own],
        )  # fmt: skip
        ex.result(part)
    y = torch.empty(M, N, dtype=dtype, device=x.device)
    with exchange(group, nbytes, op, x.device, channel="host scatter") as ex:
        ex.local(tuple(part.shape), dtype).copy_(part)
        ex.signal_all()
        y[own] = part
        for peer in ex.peers():
            ex.wait(peer)
            into = y[starts[peer] : starts[peer] + rows[peer]]
            into.copy_(ex.peer(peer, tuple(into.shape), dtype))
        return ex.result(y)


def _triton_forward(
    call: _Call,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    from weft.kernels.matmul import two_shot_kernel as kernel

    group, _, average, scaling = call
    dtype = scaling.out_dtype if scaling else x.dtype
    ws = kernel.workspace_for(x, w, group, dtype)
    with ws.call("matmul_all_reduce"):
        return kernel.launch_matmul_all_reduce(
            x,
            w,
            ws,
            bias=bias,
            residual=residual,
            scale=1 / group.world_size if average else 1.0,
            scaling=scaling,
        )


def matmul_all_reduce_reference(
    xs: list[torch.Tensor],
    ws: list[torch.Tensor],
    bias: torch.Tensor | None = None,
    reduce_op: SumOp = "sum",
) -> torch.Tensor:
    """What every rank gets, given all ranks' operands: the oracle of the tests, in any dtype."""
    y = torch.stack([torch.matmul(x, w) for x, w in zip(xs, ws, strict=True)]).sum(0)
    if reduce_op == "avg":
        y = y / len(xs)
    return y if bias is None else y + bias
