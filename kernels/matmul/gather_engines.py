"""all_gather_matmul on each engine, forward and backward: what `all_gather` has checked and chosen.

Host. Every rank copies its shard into symmetric memory and signals; it multiplies its own shard,
then each peer's in place once that peer has signalled (on a GPU: once the copy engines have fetched
it, in a stream of their own). Nothing is gathered: y is written chunk by chunk. Shards of few rows
are gathered after all, as a small matmul wastes more than the copy costs.

Backward publishes the shard first and the partial sums next, so that peers' shards arrive during
the first product and peers' partial sums during the second. Two calls are then in flight, which
takes two workspaces.

Triton. The kernels of `all_gather_kernel`; backward also uses those of `reduce_scatter_kernel` and
`contract_kernel`.

Hosts. One of the others inside each host, block by block (`collectives.hosts`): the own shards
first, then those of other hosts as they come, of which backward has its share kept. The gradient of
x goes back block by block, one sum a host.

Generic. Collectives and matmuls, which take x as it is. The others take matrices, whose rows run
along the gathered dim first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from weft import settings
from weft.collectives import Group, Workspace, all_gather, exchange, reduce_scatter, workspace
from weft.collectives.device.launches import layouts_of
from weft.collectives.hosts import Crossing, HostRows
from weft.collectives.ranks.chunks import offsets
from weft.kernels.engine import epilogues, shards
from weft.kernels.engine.chips import chip_of
from weft.kernels.engine.engines import Problem, RunnableEngine, choose
from weft.kernels.engine.epilogues import Activation
from weft.kernels.engine.fp8 import Scaling, scaled_products
from weft.kernels.engine.local_matmul import (
    WeightGrad,
    as_rows,
    matmul,
    mm,
    no_view,
    partial_matmul,
    partial_mm,
    sum_dtype,
)
from weft.kernels.matmul.fused_op import fused_plan

if TYPE_CHECKING:
    from weft.kernels.matmul.all_gather_launch import AllGatherConfig


@dataclass(eq=False)
class GatherPlan:
    """What calls with operands of the same layouts come to: found in 25 us, and kept.

    Attributes:
        rows: of every rank's shard as a matrix.
        told: what must be the same on every rank.
        launches: by activation, and by what is kept: the configuration, and the workspace's channel
            and bytes.
    """

    engine: RunnableEngine
    rows: list[int]
    told: tuple[Hashable, ...]
    launches: dict[tuple[Hashable, ...], tuple[AllGatherConfig, str, int]] = field(
        default_factory=dict
    )


class GatherCall(NamedTuple):
    """One call, except for its tensors, which autograd must see."""

    group: Group
    engine: RunnableEngine
    dim: int  # along which x is gathered; 0 where it is a matrix
    rows: list[int]  # lengths of every rank's shard along it
    returns: bool  # whether the gathered x is wanted
    saves: bool  # whether it is kept for the gradients
    activation: Activation | None
    scaling: Scaling | None
    told: tuple[Hashable, ...] = ()  # what must be the same on every rank
    plan: GatherPlan | None = None  # None on the generic engine, which launches nothing
    keep_sums: bool = False  # whether the activation's arguments are kept

    @property
    def keep(self) -> bool:
        """Whether it is a result: also if only saved, as second derivatives pass through it."""
        return self.returns or self.saves


class Made(NamedTuple):
    """What a forward returns."""

    ys: list[torch.Tensor]
    sums: list[torch.Tensor]  # the arguments of the activation, if they are to be kept
    gathered: torch.Tensor | None  # if it is wanted
    crossed: tuple[torch.Tensor, ...] = ()  # this rank's rows of other hosts' blocks

    @property
    def results(self) -> tuple[torch.Tensor, ...]:
        """Those that autograd is to see."""
        return tuple(self.ys) if self.gathered is None else (*self.ys, self.gathered)


class GatherGradient(NamedTuple):
    """What a backward is given: dy (M, N_i) for each y_i; dgathered (M, K) if x was returned.

    With the gathered x (M, K), if it was kept, only the gradient of x communicates, and `x` may be
    any with its dtype and columns.
    """

    x: torch.Tensor  # (m_r, K), and w_i (K, N_i): as in forward
    weights: list[torch.Tensor]
    dys: list[torch.Tensor]
    dgathered: torch.Tensor | None
    group: Group
    rows: list[int]
    needs_x: bool
    needs_w: Sequence[bool]
    gathered: torch.Tensor | None = None
    told: tuple[Hashable, ...] = ()
    crossed: tuple[torch.Tensor, ...] = ()  # as the forward made it, if it was kept
    # Where those of weights are added up block by block: who can adds to them, and returns none.
    totals: Sequence[WeightGrad | None] = ()

    def grad(self, i: int, chunks: int = 1) -> WeightGrad:
        """Where that of weight i is added up, of this call if there is no total."""
        total = self.totals[i] if self.totals else None
        return WeightGrad(self.weights[i], chunks) if total is None else total


# For x, and for every weight; None where it is not needed.
GatherGradients = tuple[torch.Tensor | None, list[torch.Tensor | None]]


def _backward(
    fused: Callable[[GatherGradient], GatherGradients], given: GatherGradient
) -> GatherGradients:
    """By an engine; where the gathered x was kept, only the gradient of x communicates."""
    if given.gathered is None:
        return fused(given)
    dx = None
    if given.needs_x:
        dx, _ = fused(given._replace(needs_w=[False] * len(given.weights), gathered=None))
    dws: list[torch.Tensor | None] = []
    for i, (dy, need) in enumerate(zip(given.dys, given.needs_w, strict=True)):
        grad = given.grad(i)
        if need:
            grad.add(given.gathered, dy)
        dws.append(grad.result() if need and not given.totals else None)
    return dx, dws


def _host_forward(
    call: GatherCall,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
) -> Made:
    group, rows, keep, scaling = call.group, call.rows, call.keep, call.scaling
    op, nbytes = "all_gather_matmul", shards.gather_bytes(x, rows)
    if scaling is not None:
        scaling = replace(scaling, rows=all_gather(scaling.rows, group, sizes=rows))
    gathered = None
    with exchange(group, nbytes, op, x.device, channel="host gather", told=call.told) as ex:
        shards.publish(ex, x, rows)
        if keep or scaling is not None or not shards.rows_in_place(x, weights, rows):
            gathered = shards.gather_shards(ex, x, rows, private=keep)
            if scaling is not None:
                zs = scaled_products(gathered, weights, biases, scaling)
            else:
                zs = [mm(gathered, *pair) for pair in zip(weights, biases, strict=True)]
            gathered = gathered if keep else None
        else:
            zs = [x.new_empty(sum(rows), w.shape[1]) for w in weights]
            for start, chunk in shards.shards(ex, x, rows):
                for z, w, bias in zip(zs, weights, biases, strict=True):
                    mm(chunk, w, bias, out=z[start : start + len(chunk)])
        for made in zs if gathered is None else [*zs, gathered]:
            ex.result(made)
    return Made(epilogues.activate(zs, call.activation), zs, gathered)


def _host_backward(given: GatherGradient) -> GatherGradients:
    x, weights, dys, dgathered, group, rows, needs_x, needs_w, _, told, *_ = given
    M, K = sum(rows), x.shape[1]
    wire = sum_dtype(x)
    op, dx = "all_gather_matmul backward", None
    dws: list[torch.Tensor | None] = [None] * len(weights)
    with ExitStack() as stack:
        if any(needs_w):
            nbytes = shards.gather_bytes(x, rows)
            gather = stack.enter_context(
                exchange(group, nbytes, op, x.device, channel="host gather", told=told)
            )
            shards.publish(gather, x, rows)
        if needs_x:
            nbytes = M * K * wire.itemsize
            scatter = stack.enter_context(
                exchange(group, nbytes, op, x.device, channel="host scatter", told=told)
            )
            plus = dgathered
            for dy, w in zip(dys[1:], weights[1:], strict=True):
                plus = partial_mm(dy, w.t(), plus=plus)
            own, overwrite = shards.publish_product(scatter, dys[0], weights[0].t(), rows, plus)
        if any(needs_w):
            in_place = shards.sums_in_place(weights, rows)
            chunks = len(rows) if in_place else 1
            pairs = [(i, given.grad(i, chunks), dys[i]) for i, need in enumerate(needs_w) if need]
            for start, chunk in shards.row_chunks(gather, x, rows, in_place=in_place):
                for _, grad, dy in pairs:
                    grad.add(chunk, dy[start : start + len(chunk)])
            for i, grad, _ in pairs:
                dw = gather.result(grad.result())
                dws[i] = None if given.totals else dw
        if needs_x:
            start = offsets(rows)[group.rank]
            dx = shards.reduce_rows(scatter, own, start, x.dtype, overwrite=overwrite)
            scatter.result(dx)
    return dx, dws


def _triton_forward(
    call: GatherCall,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
) -> Made:
    from weft.kernels.matmul import all_gather_launch as kernel

    group, rows, keep, scaling, plan = call.group, call.rows, call.keep, call.scaling, call.plan
    keep_sums = call.keep_sums
    assert plan is not None
    key = call.activation, keep, keep_sums, settings.sms()
    if key not in plan.launches:
        N = sum(w.shape[1] for w in weights)
        config = kernel.all_gather_config(
            sum(rows), N, x.shape[1], x.dtype, group.world_size, chip_of(x.device),
            activation=call.activation, keep=keep, keep_sums=keep_sums,
        )  # fmt: skip
        plan.launches[key] = config, *_channel_and_bytes(x, rows, config.copy_engines)
    config, channel, nbytes = plan.launches[key]
    ws = workspace(group, nbytes, channel=channel, device=x.device)

    def launched() -> list[torch.Tensor]:
        made = kernel.launch_all_gather_matmul(
            x,
            weights,
            ws,
            rows,
            biases=biases,
            activation=call.activation,
            keep_sums=keep_sums,
            with_own=keep,
            scaling=scaling,
            config=config,
        )
        return [*made.ys, *made.sums, *([] if made.matrix is None else [made.matrix])]

    operands = [x, *weights, *biases, *(() if scaling is None else scaling.tensors)]
    with ws.call("all_gather_matmul", call.told):
        eager = config.copy_engines and shards.is_eager(x.device)
        made = [*ws.repeat((plan, key, eager), operands, launched)]
    count = 1 if call.activation == "swiglu" else len(weights)
    sums = made[count : count + len(weights)] if keep_sums else []
    return Made(made[:count], sums, made[-1] if keep else None)


def gather_workspace(
    x: torch.Tensor, group: Group, rows: list[int], copy_engines: bool = False
) -> Workspace:
    """The workspace through which kernels, or copy engines, gather x (rows[rank], K)."""
    channel, nbytes = _channel_and_bytes(x, rows, copy_engines)
    return workspace(group, nbytes, channel=channel, device=x.device)


def _channel_and_bytes(x: torch.Tensor, rows: list[int], copy_engines: bool) -> tuple[str, int]:
    """Its channel and bytes."""
    from weft.kernels.device import gathers

    nbytes = gathers.workspace_bytes(max(rows), x.shape[1], x.dtype)
    return "gather by copy engines" if copy_engines else "gather", nbytes


def _triton_backward(given: GatherGradient) -> GatherGradients:
    from weft.kernels.matmul import contract_kernel, reduce_scatter_kernel

    x, weights, dys, dgathered, group, rows, needs_x, needs_w, _, told, *_ = given
    op, dx = "all_gather_matmul backward", None
    dws: list[torch.Tensor | None] = [None] * len(weights)
    if needs_x:
        ws = reduce_scatter_kernel.workspace_for(dys[0], weights[0].t(), group, rows, x.dtype)

        def summed() -> list[torch.Tensor]:
            transposed = [w.t() for w in weights]
            return [reduce_scatter_kernel.launch_matmul_reduce_scatter(dys, transposed, ws, rows)]

        operands = [*dys, *weights]
        with ws.call(op, told):
            (dx,) = ws.repeat((op, *rows, layouts_of(operands)), operands, summed)
        if dgathered is not None:
            dx += reduce_scatter(dgathered, group, sizes=rows)
    gathered = None
    for i, (w, dy, need) in enumerate(zip(weights, dys, needs_w, strict=True)):
        if not need:
            continue
        dws[i] = dw = torch.empty_like(w)  # in w's own layout
        if gathered is None:
            gathered = contract_kernel.call_contract(
                op, told, x, dy, gather_workspace(x, group, rows), rows, dw,
                with_own=sum(needs_w) > 1,
            )  # fmt: skip
        else:
            mm(gathered.t(), dy, out=dw)
    return dx, dws


def gather_problem(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    gather_dim: int,
    sizes: list[int],
    widest: int = 0,
) -> Problem:
    """What the choice of engine for a call, or for its gradient, depends on.

    Args:
        widest: the most columns that a rank's weights have, if all ranks know.
    """
    whole = [*x.shape]
    whole[gather_dim] = sum(sizes)
    # What the rank with the smallest shard receives: the same number on every rank.
    received = (sum(sizes) - min(sizes)) * math.prod(whole[:gather_dim] + whole[gather_dim + 1 :])
    return Problem(
        "all_gather_matmul",
        math.prod(whole[:-1]),
        sum(w.shape[1] for w in weights),
        whole[-1],
        x.dtype,
        received * x.element_size(),
        refusal="the gathered dim is the contraction" if gather_dim == x.ndim - 1 else "",
        most_own=widest,
    )


def _plan_inside(
    group: Group,
    rows: list[int],
    x: torch.Tensor,
    weights: list[torch.Tensor],
    told: tuple[Hashable, ...],
) -> GatherPlan:
    """How the ranks of one host run a block."""

    def made() -> GatherPlan:
        problem = gather_problem(x, weights, 0, rows)
        return GatherPlan(choose(problem, group, x.device), rows, told)

    return fused_plan("all_gather_matmul", group, ("inside", *rows, told), (x, *weights), made)


def _hosts_forward(
    call: GatherCall,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
) -> Made:
    crossing = Crossing(call.group, call.rows, x.shape[1] * x.element_size(), "all_gather_matmul")
    whole: list[torch.Tensor] = []
    crossed: list[torch.Tensor] = []
    count = 1 if call.activation == "swiglu" else len(weights)
    for block, shard in crossing.fetched(x):
        plan = _plan_inside(crossing.inside, block.sizes, shard, weights, call.told)
        inside = call._replace(group=crossing.inside, engine=plan.engine, rows=plan.rows, plan=plan)
        with crossing.naming():
            made = FORWARD[plan.engine](inside, shard, weights, biases)
        ys = made.ys
        if plan.engine == "generic":
            made = Made(epilogues.activate(ys, call.activation), ys, made.gathered)
        kept = [*made.ys, *(made.sums if call.keep_sums else ())]
        if call.keep:
            assert made.gathered is not None
            kept.append(made.gathered)
        if block is crossing.own:
            whole = [part.new_empty((sum(call.rows), part.shape[1])) for part in kept]
        else:
            crossed.append(shard)
        for part, into in zip(kept, whole, strict=True):
            block.put(part, into)
    sums = whole[count : count + len(weights)] if call.keep_sums else []
    return Made(whole[:count], sums, whole[-1] if call.keep else None, tuple(crossed))


def _hosts_backward(given: GatherGradient) -> GatherGradients:
    x, weights, dys, dgathered, group, rows, _, needs_w, gathered, told, crossed, _ = given
    crossing = Crossing(group, rows, x.shape[1] * x.element_size(), "all_gather_matmul backward")
    blocks: Iterable[tuple[HostRows, torch.Tensor]]
    if any(needs_w) and gathered is None and not crossed:
        blocks = crossing.fetched(x)
    else:  # those that are awaited elsewhere first
        shards_of = crossed if crossed and gathered is None else [x] * len(crossing.foreign)
        blocks = [*zip(crossing.foreign, shards_of, strict=True), (crossing.own, x)]
    own: torch.Tensor | None = None
    totals = [WeightGrad(w, 2) if n else None for w, n in zip(weights, needs_w, strict=True)]
    for block, shard in blocks:
        part = given._replace(
            x=shard,
            dys=[block.of(dy) for dy in dys],
            dgathered=None if dgathered is None else block.of(dgathered),
            group=crossing.inside,
            rows=block.sizes,
            gathered=None if gathered is None else block.of(gathered),
            crossed=(),
            totals=totals if sum_dtype(x) == x.dtype else (),  # else each is rounded by itself
        )
        engine = _plan_inside(crossing.inside, block.sizes, x, weights, told).engine
        with crossing.naming():
            dx, dws = generic_backward(part) if engine == "generic" else BACKWARD[engine](part)
        for total, dw in zip(totals, dws, strict=True):
            if total is not None and dw is not None:
                total.include(dw)
        if dx is not None and block is crossing.own:
            own = dx
        elif dx is not None:
            crossing.give_back(block, dx)
    dx = None if own is None else crossing.summed(own, sum_dtype(x)).to(x.dtype)
    return dx, [None if total is None else total.result() for total in totals]


def _generic_forward(
    call: GatherCall,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
) -> Made:
    gathered = no_view(all_gather(x, call.group, dim=call.dim, sizes=call.rows))
    pairs = zip(weights, biases, strict=True)
    return Made([matmul(gathered, *pair) for pair in pairs], [], gathered)


def generic_backward(given: GatherGradient, dim: int = 0) -> GatherGradients:
    """The same by collectives and matmuls, which are differentiable themselves.

    Args:
        given: x and its gradients may have more dims here; a dy that is None stands for 0.
        dim: along which x is gathered; `given.rows` are the lengths.
    """
    x, weights, dys, dx, group, sizes, needs_x, needs_w, gathered, *_ = given
    dws: list[torch.Tensor | None] = [None] * len(weights)
    if gathered is None and any(needs_w):
        gathered = all_gather(x, group, dim=dim, sizes=sizes)
    for i, (dy, w) in enumerate(zip(dys, weights, strict=True)):
        if dy is not None and needs_x:
            part = partial_matmul(dy, w.t())
            dx = part if dx is None else dx + part
        if dy is not None and needs_w[i]:
            assert gathered is not None
            a, b = as_rows(gathered), as_rows(dy)
            dws[i] = matmul(b.t(), a).t() if w.stride(0) == 1 else matmul(a.t(), b)
    if not needs_x or dx is None:
        return None, dws
    return reduce_scatter(dx, group, dim=dim, sizes=sizes).to(x.dtype), dws


# By engine: (call, x, weights, biases) -> what is made, and what is given -> gradients.
FORWARD: dict[str, Callable[..., Made]] = {
    "host": _host_forward, "triton": _triton_forward, "hosts": _hosts_forward,
    "generic": _generic_forward,
}  # fmt: skip
BACKWARD: dict[str, Callable[[GatherGradient], GatherGradients]] = {
    "host": partial(_backward, _host_backward), "triton": partial(_backward, _triton_backward),
    "hosts": _hosts_backward,
}  # fmt: skip
