"""matmul_reduce_scatter: this rank's rows of the sum over ranks of x @ w.

W ranks; rank r holds K_r of the K columns of x, and those rows of w:

    rank r       x (M, K_r)  @  w (K_r, N)  =  partial_r (M, N)

                 partial_0   partial_1          y_0  = (partial_0 + partial_1)[rows of rank 0]
                                                y_1  = (partial_0 + partial_1)[rows of rank 1]

Forward, host engine. Every rank computes all of its partial product in symmetric memory and
signals; it then adds up its own rows of all partial products, in place on the peers and in rank
order. One large matmul and no copy: the sum itself moves the data.

Backward: dx = dy @ w^T and dw = x^T @ dy for the gathered gradient dy; both use one gather, as in
the forward of `all_gather`.

Over several hosts, both go block by block (`collectives.hosts`): a host adds up the rows of each
other host inside, fused, and sends its sum while it multiplies the next; its own come last. The
gradient's blocks come as those of the forward of `all_gather` do.

The triton engine is in `reduce_scatter_kernel`; its backward uses the kernels of
`all_gather_kernel`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch

from weft.collectives import Group, all_gather, exchange, reduce_scatter, workspace
from weft.collectives.device.launches import layouts_of
from weft.collectives.hosts import Crossing
from weft.collectives.memory.repeatable import repeatable
from weft.collectives.prices import between_hosts
from weft.collectives.ranks.chunks import chunk_sizes, offsets
from weft.collectives.ranks.group import GroupLike
from weft.kernels.engine import shards
from weft.kernels.engine.autocast import autocast
from weft.kernels.engine.chips import chip_of
from weft.kernels.engine.engines import choose, record_backward
from weft.kernels.engine.local_matmul import (
    SumOp,
    WeightGrad,
    finished,
    matmul,
    mm,
    partial_matmul,
    partials_cost,
    sum_dtype,
)
from weft.kernels.engine.replicated import Summed
from weft.kernels.matmul.fused_op import (
    FusedSum,
    Gradients,
    Operands,
    SumCall,
    SumFunction,
    SumPlan,
    fused_plan,
    summed_reference,
)
from weft.kernels.matmul.gather_engines import gather_workspace


@autocast
@repeatable
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
    wire_dtype: torch.dtype | None = None,
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
        wire_dtype: in which partial sums travel: torch.bfloat16 or torch.float16, as a process
            group's do, are half the bytes of torch.float32 and round each rank's term. None: the
            upper 24 bits of fp32 in kernels if the result is half precision, else fp32; between
            hosts, the dtype of the result, rounded once a host.

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
    scales = scale_a, scale_b, out_dtype
    return OP.run(x, w, group, scatter_dim, bias, residual, reduce_op, wire_dtype, *scales)


class ScatterGradient(NamedTuple):
    """What a backward is given: x (M, K_r) and w (K_r, N) as in forward, dy of this rank's rows."""

    x: torch.Tensor
    w: torch.Tensor
    dy: torch.Tensor
    group: Group
    rows: list[int]
    average: bool
    needs: Sequence[bool]  # of x, w and bias
    told: tuple[Hashable, ...] = ()  # as in `Call`
    # Where that of w is added up block by block: who can adds to it, and returns none.
    total: WeightGrad | None = None

    @property
    def divisor(self) -> int:
        """Of dy, before its gather; the bias, added after the division, needs dy undivided."""
        return self.group.world_size if self.average and any(self.needs[:2]) else 1


class _MatmulReduceScatter(SumFunction):
    """y (rows of this rank, N)."""


def _gradients(
    call: SumCall, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, needs: Sequence[bool]
) -> Gradients:
    engine = call.engine
    if engine == "hosts":  # a small sum may pay in two levels where its gather does not
        nbytes = sum(call.rows) * w.shape[1] * dy.element_size()
        engine, _ = between_hosts.choice("all_gather", call.group, dy.device, nbytes)
    record_backward(OP.name, engine, call.group, "all_gather")
    given = ScatterGradient(
        x, w, dy.contiguous(), call.group, call.rows, call.average, needs, call.told
    )
    if torch.is_grad_enabled() or engine == "generic":
        return _differentiable_backward(given)
    made: Gradients = OP.backward[engine](given)
    return made


def _host_forward(call: SumCall, given: Operands) -> torch.Tensor:
    x, w, bias, residual = given
    group, rows, wire = call.group, call.rows, call.wire_dtype or sum_dtype(x)
    nbytes = x.shape[0] * w.shape[1] * wire.itemsize
    with exchange(
        group, nbytes, OP.name, x.device, channel="host scatter", told=call.told
    ) as ex:  # fmt: skip
        own, overwrite = shards.publish_product(ex, x, w, rows, scaling=call.scaling, wire=wire)
        y = shards.reduce_rows(
            ex, own, offsets(rows)[group.rank], call.dtype, average=call.average, bias=bias,
            residual=residual, overwrite=overwrite,
        )  # fmt: skip
        return ex.result(y)


def _host_backward(given: ScatterGradient) -> Gradients:
    x, w, dy, group, rows, _, (needs_x, needs_w, needs_b), told, total = given
    dx = None
    accumulator = sum_dtype(w)
    db = torch.zeros(w.shape[1], dtype=accumulator, device=w.device) if needs_b else None
    divisor = given.divisor
    own, nbytes = dy / divisor if divisor > 1 else dy, shards.gather_bytes(dy, rows)
    in_place = (
        shards.rows_in_place(own, [w.t()], rows) if needs_x else shards.sums_in_place([w.t()], rows)
    )
    in_place = in_place and not (needs_w and partials_cost(own))
    grad = (total or WeightGrad(w, len(rows) if in_place else 1)) if needs_w else None
    op = "matmul_reduce_scatter backward"
    with exchange(group, nbytes, op, x.device, channel="host gather", told=told) as ex:
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
    return dx, None if total else dw, db


def hosts_forward(call: SumCall, given: Operands) -> torch.Tensor:
    """This rank's rows of the sum, by whichever engine inside each host."""
    x, w, bias, residual = given
    wire = call.wire_dtype or call.dtype
    crossing = Crossing(call.group, call.rows, w.shape[1] * wire.itemsize, call.op.name)
    for block in (*crossing.foreign, crossing.own):
        part = block.of(x)
        plan = _plan_inside(crossing.inside, block.sizes, part, w, call.told, call.wire_dtype)
        inside = call._replace(op=OP, group=crossing.inside, plan=plan, average=False)
        with crossing.naming():
            if plan.engine == "generic":
                total = reduce_scatter(partial_matmul(part, w), inside.group, sizes=plan.rows)
            else:
                total = inside.made_of(Operands(part, w, None, None))
        if block is not crossing.own:
            crossing.give_back(block, total.to(wire))
    total = crossing.summed(total, sum_dtype(total))
    if call.average:
        total /= call.group.world_size
    return finished(total, bias, residual, call.dtype)


def _plan_inside(
    group: Group,
    rows: list[int],
    x: torch.Tensor,
    w: torch.Tensor,
    told: tuple[Hashable, ...],
    wire_dtype: torch.dtype | None = None,
) -> SumPlan:
    """How the ranks of one host add up a block, or gather its gradient."""

    def made() -> SumPlan:
        problem = OP.problem(x, w, group, 0, wire_dtype)
        shape = [rows[group.rank], w.shape[1]]
        return SumPlan(choose(problem, group, x.device), 0, rows, rows, shape)

    return fused_plan(OP.name, group, ("inside", *rows, wire_dtype, told), (x, w), made)


def _hosts_backward(given: ScatterGradient) -> Gradients:
    x, w, dy, group, rows, average, (needs_x, needs_w, needs_b), told, _ = given
    dx = torch.empty_like(x) if needs_x else None
    total = WeightGrad(w, 2) if needs_w else None
    crossing = Crossing(group, rows, w.shape[1] * x.element_size(), f"{OP.name} backward")
    own = dy / group.world_size if average else dy
    for block, shard in crossing.fetched(own) if needs_x or needs_w else ():
        part = ScatterGradient(
            block.of(x), w, shard, crossing.inside, block.sizes, False, (needs_x, needs_w, False),
            told, total if sum_dtype(w) == w.dtype else None,  # else each is rounded by itself
        )  # fmt: skip
        engine = _plan_inside(crossing.inside, block.sizes, part.x, w, told).engine
        with crossing.naming():
            if engine == "generic":
                made, more, _ = _differentiable_backward(part)
            else:
                made, more, _ = OP.backward[engine](part)
        if dx is not None and made is not None:
            block.put(made, dx)
        if total is not None and more is not None:
            total.include(more)
    db = None
    if needs_b:  # alike on every rank: added up in their order
        sums = all_gather(dy.sum(0, keepdim=True, dtype=sum_dtype(w)), group, sizes=[1] * len(rows))
        db = sums.sum(0).to(w.dtype)
    return dx, None if total is None else total.result(), db


def _triton_forward(call: SumCall, given: Operands) -> torch.Tensor:
    from weft.kernels.matmul import reduce_scatter_kernel as kernel

    x, w, bias, residual = given
    plan = call.plan
    if plan.room < 0:
        plan.room = kernel.room_for(
            x, w, call.group.world_size, call.rows, call.dtype, call.wire_dtype
        )
    ws = workspace(call.group, plan.room, channel="scatter", device=x.device)

    def launched() -> list[torch.Tensor]:
        y = kernel.launch_matmul_reduce_scatter(
            [x], [w], ws, call.rows,
            bias=bias, residual=residual, scale=call.scale, scaling=call.scaling,
            wire_dtype=call.wire_dtype,
        )  # fmt: skip
        return [y]

    with ws.call(OP.name, call.told):
        (y,) = ws.repeat(plan, [*given, *call.scales], launched)
    return y


def _triton_backward(given: ScatterGradient) -> Gradients:
    from weft.kernels.matmul import all_gather_launch, contract_kernel

    x, w, dy, group, rows, _, (needs_x, needs_w, needs_b), told, _ = given
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
        eager = config.copy_engines and shards.is_eager(x.device)
        key = op, *rows, whole, config, eager, layouts_of((own, w))

        def launched() -> list[torch.Tensor]:
            made = all_gather_launch.launch_all_gather_matmul(
                own, [w.t()], ws, rows, with_own=whole, config=config
            )
            return made.ys if made.matrix is None else [*made.ys, made.matrix]

        with ws.call(op, told):
            dx, *gathered = ws.repeat(key, (own, w), launched)
        if dw is not None:
            mm(x.t(), gathered[0], out=dw)
    elif dw is not None:
        # dw = x^T @ gathered, as the transpose of the product that the kernel gathers for.
        contract_kernel.call_contract(op, told, own, x, ws, rows, dw.t())
    if needs_b:
        db = gathered[0].sum(0, dtype=torch.float32)
        db = (db * divisor).to(w.dtype)
    return dx if needs_x else None, dw, db


def _differentiable_backward(given: ScatterGradient) -> Gradients:
    """The same by ops that are differentiable themselves."""
    x, w, dy, group, rows, average, (needs_x, needs_w, needs_b), *_ = given
    whole = all_gather(dy / group.world_size if average else dy, group, sizes=rows)
    dx = matmul(whole, w.t()) if needs_x else None
    dw = matmul(x.t(), whole) if needs_w else None
    return dx, dw, Summed.apply(dy.sum(0), group, "sum") if needs_b else None


OP = FusedSum(
    "matmul_reduce_scatter",
    _MatmulReduceScatter,
    {"host": _host_forward, "triton": _triton_forward, "hosts": hosts_forward},
    {"host": _host_backward, "triton": _triton_backward, "hosts": _hosts_backward},
    _gradients,
)


def matmul_reduce_scatter_reference(
    xs: list[torch.Tensor],
    ws: list[torch.Tensor],
    rank: int,
    bias: torch.Tensor | None = None,
    scatter_dim: int = 0,
    reduce_op: SumOp = "sum",
) -> torch.Tensor:
    """What `rank` gets, given all ranks' operands: the oracle of the tests, in any dtype."""
    y = summed_reference(xs, ws, bias, reduce_op)
    sizes = chunk_sizes(y.shape[scatter_dim], len(xs))
    parts: tuple[torch.Tensor, ...] = y.split(sizes, scatter_dim)
    return parts[rank]
