"""matmul_all_reduce: the sum over ranks of x @ w, on every rank: the op of the decode path.

W ranks; rank r holds K_r of the K columns of x, and those rows of w:

    rank r       x (M, K_r)  @  w (K_r, N)  =  partial_r (M, N)      y = partial_0 + partial_1 + ...

Forward, host engine. Every rank computes its partial product in symmetric memory and signals. For
few bytes or two ranks, each adds up all rows of all partial products (one-shot); otherwise each
adds up its own rows, publishes the sum, and copies the others' (two-shot), which reads 2 partial
products instead of W.

Whoever adds rows does so in rank order, so y is bitwise the same on every rank.

Backward: dy is the same on every rank, as y is; dx = dy @ w^T and dw = x^T @ dy move nothing.

Over several hosts, rows are scattered and gathered, both block by block: see `collectives.hosts`.

The triton engine is in `two_shot_kernel`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft import settings
from weft.collectives import all_gather, exchange, workspace
from weft.collectives.memory.repeatable import repeatable
from weft.collectives.prices.hardware import fabric_of
from weft.collectives.ranks.chunks import chunk_sizes, offsets
from weft.collectives.ranks.group import GroupLike
from weft.kernels.engine.autocast import autocast
from weft.kernels.engine.local_matmul import SumOp, WeightGrad, matmul, mm, sum_dtype
from weft.kernels.engine.replicated import Spread
from weft.kernels.engine.shards import product_into, reduce_rows
from weft.kernels.matmul.fused_op import (
    FusedSum,
    Gradients,
    Operands,
    SumCall,
    SumFunction,
    SumPlan,
    summed_reference,
)
from weft.kernels.matmul.reduce_scatter import hosts_forward

_ONE_SHOT_BYTES = 64 << 10


@autocast
@repeatable
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
    wire_dtype: torch.dtype | None = None,
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
        wire_dtype: in which partial sums travel: torch.bfloat16 or torch.float16, as a process
            group's do, are half the bytes of torch.float32 and round each rank's term. None: the
            upper 24 bits of fp32 in kernels if the result is half precision, else fp32; between
            hosts, the dtype of the result, rounded once a host.

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
    scales = scale_a, scale_b, out_dtype
    return OP.run(x, w, group, None, bias, residual, reduce_op, wire_dtype, *scales)


class _MatmulAllReduce(SumFunction):
    """y (M, N), the same on every rank."""


def _gradients(
    call: SumCall, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, needs: Sequence[bool]
) -> Gradients:
    needs_x, needs_w, needs_b = needs
    dx = dw = None
    scaled = dy * call.scale if call.average else dy
    if torch.is_grad_enabled():  # by ops that are differentiable themselves
        scaled = Spread.apply(scaled, call.group)
        dx = matmul(scaled, w.t()) if needs_x else None
        dw = matmul(x.t(), scaled) if needs_w else None
    else:
        dx = mm(scaled, w.t()) if needs_x else None
        if needs_w:
            grad = WeightGrad(w)
            grad.add(x, scaled)
            dw = grad.result()
    return dx, dw, dy.sum(0) if needs_b else None


def _host_forward(call: SumCall, given: Operands) -> torch.Tensor:
    x, w, bias, residual = given
    group, average, dtype = call.group, call.average, call.dtype
    M, N, wire = x.shape[0], w.shape[1], call.wire_dtype or sum_dtype(x)
    op, nbytes = OP.name, M * N * wire.itemsize
    one_shot = group.world_size <= 2 or nbytes <= _ONE_SHOT_BYTES
    with exchange(group, nbytes, op, x.device, channel="host scatter", told=call.told) as ex:
        shown = ex.local((M, N), wire)
        product_into(shown, x, w, scaling=call.scaling)
        ex.signal_all()
        if one_shot:
            y = reduce_rows(ex, shown, 0, dtype, average=average, bias=bias, residual=residual)
            return ex.result(y)
        rows = chunk_sizes(M, group.world_size)
        starts = offsets(rows)
        own = slice(starts[group.rank], starts[group.rank] + rows[group.rank])
        part = reduce_rows(
            ex, shown[own], own.start, dtype, average=average, bias=bias,
            residual=None if residual is None else residual[own],
        )  # fmt: skip
        ex.result(part)
    y = torch.empty(M, N, dtype=dtype, device=x.device)
    with exchange(group, nbytes, op, x.device, channel="host scatter", told=call.told) as ex:
        ex.local(tuple(part.shape), dtype).copy_(part)
        ex.signal_all()
        y[own] = part
        for peer in ex.peers():
            ex.wait(peer)
            into = y[starts[peer] : starts[peer] + rows[peer]]
            into.copy_(ex.peer(peer, tuple(into.shape), dtype))
        return ex.result(y)


def _triton_forward(call: SumCall, given: Operands) -> torch.Tensor:
    from weft.kernels.matmul import two_shot_kernel as kernel

    x, w, bias, residual = given
    plan = call.plan
    if plan.room < 0:
        plan.room = kernel.room_for(x, w, call.group.world_size, call.dtype, call.wire_dtype)
    ws = workspace(call.group, plan.room, channel="scatter", device=x.device)

    def launched() -> list[torch.Tensor]:
        switched = None
        if settings.multimem() and ws.buffer.multicast_ptr:
            links = fabric_of(call.group, x.device)
            switched = kernel.switched_config(x, w.shape[1], call.dtype, call.wire_dtype, links)
        y = kernel.launch_matmul_all_reduce(
            x, w, ws, bias=bias, residual=residual, scale=call.scale, scaling=call.scaling,
            wire_dtype=call.wire_dtype, config=switched,
        )  # fmt: skip
        return [y]

    with ws.call(OP.name, call.told):
        (y,) = ws.repeat(plan, [*given, *call.scales], launched)
    return y


def _hosts_forward(call: SumCall, given: Operands) -> torch.Tensor:
    residual = given.residual
    rows = chunk_sizes(given.x.shape[0], call.group.world_size)
    scattered = call._replace(plan=SumPlan("hosts", 0, rows, rows, [rows[call.group.rank]]))
    if residual is not None:
        residual = residual.split(rows)[call.group.rank]
    part = hosts_forward(scattered, given._replace(residual=residual))
    return all_gather(part, call.group, sizes=rows)


_WAYS = {"host": _host_forward, "triton": _triton_forward, "hosts": _hosts_forward}
OP = FusedSum("matmul_all_reduce", _MatmulAllReduce, _WAYS, {}, _gradients)
matmul_all_reduce_reference = summed_reference  # what every rank gets
