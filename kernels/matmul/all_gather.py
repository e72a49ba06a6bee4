"""all_gather_matmul: activation(cat(x over ranks) @ w), differentiable, on three engines.

W ranks; M = sum of m_r rows in all. Rank r holds m_r of them, and its own N_r columns of w:

                 x_0 (m_0, K)                         w (K, N_r)
    rank r       x_1 (m_1, K)   gathered, M rows   @               =   y (M, N_r)
                 ...

Forward, host engine. Every rank copies its shard into symmetric memory and signals; it multiplies
its own shard, then each peer's in place once that peer has signalled (on a GPU: once the copy
engines have fetched it, in a stream of their own). Nothing is gathered: y is written chunk by
chunk. Shards of few rows are gathered after all, as a small matmul wastes more than the copy costs.

Backward: dx = reduce_scatter(dy @ w^T) and dw = gather(x)^T @ dy. The shard is published first and
the partial sums next, so that peers' shards arrive during the first product and peers' partial sums
during the second. Two calls are then in flight, which takes two workspaces. If the forward has kept
the gathered x (`keep_gathered`), only the partial sums move. With an activation, dy is first turned
into the gradient of the activation's argument, which the forward has kept.

Scaled fp8 operands: the scales of x's rows travel with the rows. Forward only.

The triton engine is in `all_gather_kernel`; its backward also uses the kernel of
`reduce_scatter_kernel`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from weft.collectives import (
    Group,
    Workspace,
    all_gather,
    exchange,
    reduce_scatter,
    resolve,
    workspace,
)
from weft.collectives.collective_ops import known_sizes
from weft.collectives.ranks.chunks import offsets
from weft.collectives.ranks.group import GroupLike, group_name, is_call_traced
from weft.kernels.device import epilogues
from weft.kernels.device.epilogues import Activation
from weft.kernels.engine import shards
from weft.kernels.engine.autocast import autocast, outside_autocast
from weft.kernels.engine.chips import chip_of
from weft.kernels.engine.engines import (
    Problem,
    RunnableEngine,
    choose,
    record_backward,
    refuse_second_order,
)
from weft.kernels.engine.fp8 import Scaling, refuse_traced, scaled_products, scaling_of
from weft.kernels.engine.local_matmul import (
    WeightGrad,
    as_rows,
    check_operands,
    conjugated,
    matmul,
    mm,
    partial_matmul,
    partial_mm,
    sum_dtype,
)


@autocast
def all_gather_matmul(
    x: torch.Tensor,
    w: torch.Tensor | Sequence[torch.Tensor],
    group: GroupLike = None,
    *,
    bias: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    activation: Activation | None = None,
    gather_dim: int = 0,
    return_gathered: bool = False,
    keep_gathered: bool | None = None,
    sizes: Sequence[int] | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | Sequence[torch.Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """activation(torch.matmul(gathered, w) + bias), where gathered = cat(x over ranks, gather_dim).

    Args:
        x: (*batch, K), this rank's shard along `gather_dim`; shards may differ in length there and
            be empty, everything else is the same on every rank. Any strides.
        w: (K, N), this rank's own columns; or a list of weights that share one gather (Q, K and V,
            or gate and up), each with its own N.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        bias: (N,), or a list with one entry (or None) for each weight.
        activation: "relu", "gelu", "gelu_tanh" or "silu", applied before anything is rounded.
            "swiglu": w is the pair (gate, up) of (K, N) each, and the single output is
            silu(gathered @ gate) * (gathered @ up); on the triton engine neither product is
            written to memory unless a gradient needs it.
        gather_dim: the dim of x along which it is sharded. If it is the last one, the contraction,
            w holds the rows for all of K.
        return_gathered: also return the gathered x.
        keep_gathered: what is saved for the gradients of the weights. True: the gathered x, W times
            this rank's shard, and backward moves only the gradient of x. False: the shard, which
            backward gathers again. None: the gathered x where the engine makes it anyway
            ("generic"), else the shard.
        sizes: length of every rank's shard along `gather_dim`, if known; None: the ranks exchange
            them, which costs a few us.
        scale_a, scale_b, out_dtype: for x and w of torch.float8_e4m3fn, as in torch._scaled_mm.
            scale_a: fp32, () or (1,), or (*batch of x, 1), one for each row; scale_b: fp32, () or
            (1,), or (1, N), one for each column; a list if w is one. y = (gathered * scale_a) @
            (w * scale_b) in `out_dtype`, by default torch.bfloat16.

    Returns:
        y (*gathered batch, N), or a list of them if `w` is one (except for "swiglu"); with
        `return_gathered` the pair (gathered, y). New tensors, which may be non-contiguous if
        `gather_dim` > 0.

        Gradients: that of x is summed over ranks and scattered back to the shards; those of w and
        bias are this rank's own. Fused like the forward. With an activation other than relu, the
        forward keeps its argument.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
        MismatchError: on every rank, if the ranks' shards do not fit together.
        PeerTimeout: a rank did not come.
        NotImplementedError: an engine was forced that cannot run the call; a gradient of fp8.

    Example:
        x = [[1.], [2.]][rank] on 2 ranks, w = [[10.]] gives [[10.], [20.]] on both.
    """
    single = isinstance(w, torch.Tensor)
    weights: list[torch.Tensor] = [w] if isinstance(w, torch.Tensor) else list(w)
    biases: list[torch.Tensor | None] = (
        [bias] * len(weights) if bias is None or isinstance(bias, torch.Tensor) else list(bias)
    )
    epilogues.check_activation(activation, weights)
    scaling = scaling_of("all_gather_matmul", x, weights, biases, scale_a, scale_b, out_dtype)
    needs_w = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    saves = bool(keep_gathered) and needs_w
    if is_call_traced(x):  # see `custom_ops`
        refuse_traced(scaling)
        traced = torch.ops.weft.all_gather_matmul(
            x, weights, _listed(x, biases), group_name(group), gather_dim, sizes, return_gathered,
            saves,
        )  # fmt: skip
        ys = epilogues.activate(traced[: len(weights)], activation)
        y = ys[0] if single or activation == "swiglu" else ys
        return (traced[-1], y) if return_gathered else y
    group = resolve(group)
    if x.ndim < 2 or not -x.ndim <= gather_dim < x.ndim:
        raise ValueError(
            f"x must have at least 2 dims and gather_dim be one of them, got shape "
            f"{tuple(x.shape)}, {gather_dim=}"
        )
    gather_dim %= x.ndim
    contracted = gather_dim == x.ndim - 1
    if scaling and contracted:
        raise NotImplementedError(
            "gather_dim of fp8 operands must not be the contraction, along which each shard would "
            "have scales of its own"
        )
    lengths = known_sizes(x, group, gather_dim, sizes, "all_gather_matmul")
    K = sum(lengths) if contracted else x.shape[-1]
    check_operands(x, K, weights, biases, scaling.out_dtype if scaling else x.dtype)

    front = x.movedim(gather_dim, 0)
    batch = front.shape[1:-1]
    engine = choose(gather_problem(x, weights, gather_dim, lengths), group, x.device)
    if engine == "generic":
        if scaling:
            # Process groups do not take fp8, but they take its bytes.
            sent = x.view(torch.uint8)
            gathered = all_gather(sent, group, dim=gather_dim, sizes=lengths).view(x.dtype)
            scales = all_gather(scaling.rows, group, dim=gather_dim, sizes=lengths)
            zs = scaled_products(gathered, weights, biases, replace(scaling, rows=scales))
        else:
            keeps = needs_w and keep_gathered is not False
            gathered, *zs = _GatheredProducts.apply(
                x, group, gather_dim, lengths, keeps, *weights, *biases
            )
        ys = epilogues.activate(zs, activation)
    else:
        rows = [length * batch.numel() for length in lengths]
        flat = as_rows(front)
        if scaling:
            scaling = replace(scaling, rows=scaling.rows.movedim(gather_dim, 0).flatten()[:, None])
        told = (
            x.dtype, ("x", (*x.shape[:gather_dim], "*", *x.shape[gather_dim + 1 :])),
            ("dim", gather_dim), ("sizes", tuple(lengths)),
        )  # fmt: skip
        call = _Call(group, rows, engine, return_gathered, saves, activation, scaling, told)
        results = _AllGatherMatmul.apply(call, flat, *weights, *biases)
        whole = [r.view(sum(lengths), *batch, r.shape[1]).movedim(0, gather_dim) for r in results]
        ys, gathered = whole[: len(whole) - call.keep], whole[-1]
    y = ys[0] if single or activation == "swiglu" else ys
    return (gathered, y) if return_gathered else y


def _listed(x: torch.Tensor, biases: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Biases as a custom op takes them: torch.library cannot differentiate lists that contain None.

    One for each weight, empty where there is none; an empty list if there are none at all.
    """
    if all(bias is None for bias in biases):
        return []
    return [x.new_empty(0) if bias is None else bias for bias in biases]


def gather_problem(
    x: torch.Tensor, weights: list[torch.Tensor], gather_dim: int, sizes: list[int]
) -> Problem:
    """What the choice of engine for a call, or for its gradient, depends on."""
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
    )


class _GatheredProducts(torch.autograd.Function):
    """x -> the gathered x, and each gathered @ w + bias.

    The gradient of x is added up before it is rounded, where autograd would round each product.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        group: Group,
        dim: int,
        sizes: list[int],
        keeps: bool,
        *operands: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = _halves(operands)
        gathered = all_gather(x, group, dim=dim, sizes=sizes)
        ctx.save_for_backward(gathered if keeps else x, *weights)
        ctx.set_materialize_grads(False)
        ctx.group, ctx.dim, ctx.sizes, ctx.keeps = group, dim, sizes, keeps
        pairs = zip(weights, biases, strict=True)
        return gathered, *(matmul(gathered, *pair) for pair in pairs)

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, dgathered: torch.Tensor | None, *dys: Any) -> Any:
        x, *weights = conjugated(*ctx.saved_tensors)
        needs_x, _, _, _, _, *needs = ctx.needs_input_grad
        needs_w, needs_b = needs[: len(weights)], needs[len(weights) :]
        gathered = x if ctx.keeps else None
        given = Gradient(
            x, weights, list(dys), dgathered, ctx.group, ctx.sizes, needs_x, needs_w, gathered
        )
        dx, dws = generic_backward(given, ctx.dim)
        dbs = [
            as_rows(dy).sum(0) if need and dy is not None else None
            for dy, need in zip(dys, needs_b, strict=True)
        ]
        return dx, None, None, None, None, *dws, *dbs


def _halves(
    operands: Sequence[torch.Tensor | None],
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Weights and biases, as many of each, which autograd takes as single arguments."""
    count = len(operands) // 2
    return [w for w in operands[:count] if w is not None], list(operands[count:])


class _Call(NamedTuple):
    """One call of a fused engine, except for its tensors, which autograd must see."""

    group: Group
    rows: list[int]  # of every rank's shard
    engine: RunnableEngine
    returns: bool  # whether the gathered x is wanted
    saves: bool  # whether it is kept for the gradients
    activation: Activation | None
    scaling: Scaling | None
    told: tuple[Hashable, ...]  # what must be the same on every rank

    @property
    def keep(self) -> bool:
        """Whether it is a result: also if only saved, as second derivatives pass through it."""
        return self.returns or self.saves


class _Made(NamedTuple):
    """What an engine's forward returns."""

    ys: list[torch.Tensor]
    sums: list[torch.Tensor]  # the arguments of the activation, if they are to be kept
    gathered: torch.Tensor | None  # if it is wanted


class Gradient(NamedTuple):
    """What a backward is given: dy (M, N_i) for each y_i; dgathered (M, K) if x was returned.

    With the gathered x (M, K), if it was kept, only the gradient of x communicates.
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


# For x, and for every weight; None where it is not needed.
_Gradients = tuple[torch.Tensor | None, list[torch.Tensor | None]]


class _AllGatherMatmul(torch.autograd.Function):
    """x (m_r, K), weights (K, N_i) -> every y_i (M, N_i), then the gathered x if asked for."""

    @staticmethod
    def forward(
        ctx: Any, call: _Call, x: torch.Tensor, *operands: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = _halves(operands)
        keep_sums = any(ctx.needs_input_grad) and epilogues.keeps_sums(call.activation)
        if call.engine == "host":
            made = _host_forward(call, x, weights, biases)
        else:
            made = _triton_forward(call, x, weights, biases, keep_sums)
        kept = made.sums if keep_sums else made.ys if call.activation else []
        ctx.save_for_backward(made.gathered if call.saves else x, *weights, *kept)
        ctx.set_materialize_grads(not call.saves)
        ctx.call = call
        return tuple(made.ys) if made.gathered is None else (*made.ys, made.gathered)

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        needs_x, *needs = ctx.needs_input_grad[1:]
        count = len(needs) // 2
        needs_w, needs_b = needs[:count], needs[count:]
        x, *saved = ctx.saved_tensors
        (x, *weights), kept = conjugated(x, *saved[:count]), saved[count:]
        gathered = None
        if call.saves:
            gathered, start = x, offsets(call.rows)[call.group.rank]
            x = gathered[start : start + call.rows[call.group.rank]]
            grads = _with_zeros(call, grads, gathered, weights)
        moved = [
            needs_x and "reduce_scatter", any(needs_w) and gathered is None and "all_gather",
        ]  # fmt: skip
        record_backward("all_gather_matmul", call.engine, call.group, *filter(None, moved))
        dgathered = grads[-1] if call.keep else None
        dys = epilogues.gradients(grads[: len(grads) - call.keep], kept, call.activation)
        dys = [dy.contiguous() for dy in dys]
        given = Gradient(
            x, weights, dys, dgathered, call.group, call.rows, needs_x, needs_w, gathered, call.told
        )
        if torch.is_grad_enabled():
            if call.activation is not None:
                refuse_second_order(f"all_gather_matmul with activation={call.activation!r}")
            dx, dws = generic_backward(given)
        else:
            dx, dws = run_backward(call.engine, given)
        dbs = [dy.sum(0) if need else None for dy, need in zip(dys, needs_b, strict=True)]
        return (None, dx, *dws, *dbs)


def _with_zeros(
    call: _Call, grads: Sequence[Any], gathered: torch.Tensor, weights: list[torch.Tensor]
) -> tuple[Any, ...]:
    """`grads` with zeros for those that did not come, on ranks where others may have come.

    A gathered x that was not returned has no gradient on any rank, unless it is differentiated
    twice.
    """
    *dys, dgathered = grads
    shapes = [(len(gathered), w.shape[1]) for w in weights[: len(dys)]]
    dys = [gathered.new_zeros(s) if dy is None else dy for dy, s in zip(dys, shapes, strict=True)]
    if dgathered is None and call.returns:
        dgathered = torch.zeros_like(gathered)
    return *dys, dgathered


def run_backward(engine: RunnableEngine, given: Gradient) -> _Gradients:
    """The gradients that are needed, by a fused engine."""
    if given.gathered is not None:
        return _backward_of_gathered(engine, given, given.gathered)
    return _host_backward(given) if engine == "host" else _triton_backward(given)


def _backward_of_gathered(
    engine: RunnableEngine, given: Gradient, gathered: torch.Tensor
) -> _Gradients:
    dx = None
    if given.needs_x:
        only_x = given._replace(needs_w=[False] * len(given.weights), gathered=None)
        dx, _ = run_backward(engine, only_x)
    dws: list[torch.Tensor | None] = []
    for w, dy, need in zip(given.weights, given.dys, given.needs_w, strict=True):
        grad = WeightGrad(w)
        if need:
            grad.add(gathered, dy)
        dws.append(grad.result() if need else None)
    return dx, dws


def _host_forward(
    call: _Call,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
) -> _Made:
    group, rows, keep, scaling = call.group, call.rows, call.keep, call.scaling
    op, nbytes = "all_gather_matmul", shards.gather_bytes(x, rows)
    if scaling is not None:
        scaling = replace(scaling, rows=all_gather(scaling.rows, group, sizes=rows))
    gathered = None
    with exchange(group, nbytes, op, x.device, channel="host gather", told=call.told) as ex:
        shards.publish(ex, x, rows)
        if keep or scaling is not None or not shards.rows_in_place(x, weights, rows):
            gathered = shards.gather_shards(ex, x, rows)
            if scaling is not None:
                zs = scaled_products(gathered, weights, biases, scaling)
            else:
                zs = [mm(gathered, *pair) for pair in zip(weights, biases, strict=True)]
            gathered = gathered.clone() if keep else None
        else:
            zs = [x.new_empty(sum(rows), w.shape[1]) for w in weights]
            for start, chunk in shards.shards(ex, x, rows):
                for z, w, bias in zip(zs, weights, biases, strict=True):
                    mm(chunk, w, bias, out=z[start : start + len(chunk)])
        for made in zs if gathered is None else [*zs, gathered]:
            ex.result(made)
    return _Made(epilogues.activate(zs, call.activation), zs, gathered)


def _host_backward(given: Gradient) -> _Gradients:
    x, weights, dys, dgathered, group, rows, needs_x, needs_w, _, told = given
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
            pairs = [
                (i, WeightGrad(w, chunks), dys[i])
                for i, (w, need) in enumerate(zip(weights, needs_w, strict=True))
                if need
            ]
            for start, chunk in shards.row_chunks(gather, x, rows, in_place=in_place):
                for _, grad, dy in pairs:
                    grad.add(chunk, dy[start : start + len(chunk)])
            for i, grad, _ in pairs:
                dws[i] = gather.result(grad.result())
        if needs_x:
            start = offsets(rows)[group.rank]
            dx = shards.reduce_rows(scatter, own, start, x.dtype, overwrite=overwrite)
            scatter.result(dx)
    return dx, dws


def _triton_forward(
    call: _Call,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    keep_sums: bool,
) -> _Made:
    from weft.kernels.matmul import all_gather_launch as kernel

    group, rows, keep, scaling = call.group, call.rows, call.keep, call.scaling
    N = sum(w.shape[1] for w in weights)
    config = kernel.all_gather_config(
        sum(rows), N, x.shape[1], x.dtype, group.world_size, chip_of(x.device),
        activation=call.activation, keep=keep, keep_sums=keep_sums,
    )  # fmt: skip
    ws = gather_workspace(x, group, rows, config.copy_engines)
    with ws.call("all_gather_matmul", call.told):
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
    return _Made(made.ys, made.sums, made.matrix if keep else None)


def gather_workspace(
    x: torch.Tensor, group: Group, rows: list[int], copy_engines: bool = False
) -> Workspace:
    """The workspace through which kernels, or copy engines, gather x (rows[rank], K)."""
    from weft.kernels.device import gathers

    nbytes = gathers.workspace_bytes(max(rows), x.shape[1], x.dtype)
    channel = "gather by copy engines" if copy_engines else "gather"
    return workspace(group, nbytes, channel=channel, device=x.device)


def _triton_backward(given: Gradient) -> _Gradients:
    from weft.kernels.matmul import contract_kernel, reduce_scatter_kernel

    x, weights, dys, dgathered, group, rows, needs_x, needs_w, _, told = given
    op, dx = "all_gather_matmul backward", None
    dws: list[torch.Tensor | None] = [None] * len(weights)
    if needs_x:
        ws = reduce_scatter_kernel.workspace_for(dys[0], weights[0].t(), group, rows, x.dtype)
        with ws.call(op, told):
            dx = reduce_scatter_kernel.launch_matmul_reduce_scatter(
                dys, [w.t() for w in weights], ws, rows
            )
        if dgathered is not None:
            dx += reduce_scatter(dgathered, group, sizes=rows)
    gathered = None
    for i, (w, dy, need) in enumerate(zip(weights, dys, needs_w, strict=True)):
        if not need:
            continue
        dws[i] = dw = torch.empty_like(w)  # in w's own layout
        if gathered is None:
            ws = gather_workspace(x, group, rows)
            with ws.call(op, told):
                gathered, _ = contract_kernel.launch_all_gather_contract(
                    x, dy, ws, rows, out=dw, with_own=sum(needs_w) > 1
                )
        else:
            mm(gathered.t(), dy, out=dw)
    return dx, dws


def generic_backward(given: Gradient, dim: int = 0) -> _Gradients:
    """The same by collectives and matmuls, which are differentiable themselves.

    Args:
        given: x and its gradients may have more dims here; a dy that is None stands for 0.
        dim: along which x is gathered; `given.rows` are the lengths.
    """
    x, weights, dys, dx, group, sizes, needs_x, needs_w, gathered, _ = given
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


def all_gather_matmul_reference(
    xs: Sequence[torch.Tensor],
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    gather_dim: int = 0,
) -> torch.Tensor:
    """What one rank computes, given all ranks' shards: the oracle of the tests, in any dtype."""
    y = torch.matmul(torch.cat(list(xs), gather_dim), w)
    return y if bias is None else y + bias
