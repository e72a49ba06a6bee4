"""all_gather_matmul: activation(cat(x over ranks) @ w), differentiable.

W ranks; M = sum of m_r rows in all. Rank r holds m_r of them, and its own N_r columns of w:

                 x_0 (m_0, K)                         w (K, N_r)
    rank r       x_1 (m_1, K)   gathered, M rows   @               =   y (M, N_r)
                 ...

Here a call is checked, its engine chosen, and it is differentiated; `gather_engines` has how each
engine runs it.

Backward: dx = reduce_scatter(dy @ w^T) and dw = gather(x)^T @ dy. If the forward has kept the
gathered x (`keep_gathered`), only the partial sums move. With an activation, dy is first turned
into the gradient of the activation's argument, which the forward has kept.

Scaled fp8 operands: the scales of x's rows travel with the rows. Forward only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from weft.collectives import Group, all_gather, resolve
from weft.collectives.memory.repeatable import repeatable, repeated_gradients
from weft.collectives.ranks.group import GroupLike, group_name
from weft.collectives.ranks.traced import is_call_traced
from weft.collectives.sizes import known_parts
from weft.kernels.engine import epilogues
from weft.kernels.engine.autocast import autocast, outside_autocast
from weft.kernels.engine.engines import choose, record_backward, refuse_second_order
from weft.kernels.engine.epilogues import Activation
from weft.kernels.engine.fp8 import scaled_products, scaling_of
from weft.kernels.engine.local_matmul import (
    as_rows,
    check_operands,
    conjugated,
)
from weft.kernels.matmul.fused_op import FusedFunction, FusedOp, fused_plan
from weft.kernels.matmul.gather_engines import (
    BACKWARD,
    FORWARD,
    GatherCall,
    GatherGradient,
    GatherPlan,
    Made,
    gather_problem,
    generic_backward,
)


@autocast
@repeatable
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
            ("generic"), else the shard, with this rank's share of those from other hosts.
        sizes: length of every rank's shard along `gather_dim`, if known; None: the ranks exchange
            them, which costs a few us, and N, by which `auto` then chooses.
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
        columns = scaling and scaling.columns
        traced = OP.traced(
            x,
            weights,
            _bias_list(x, biases),
            group_name(group),
            gather_dim,
            sizes,
            return_gathered,
            saves,
            scale_a,
            columns,
            out_dtype,
        )
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
    dtype = scaling.out_dtype if scaling else x.dtype
    # Before ranks tell each other anything; where they do not, once, when the call is planned.
    first = sizes is None and not contracted
    if first:
        check_operands(x, x.shape[-1], weights, biases, dtype)
    mine = sum(weight.shape[-1] for weight in weights)
    lengths, widest = known_parts(x, group, gather_dim, sizes, mine, "all_gather_matmul")
    given = [*weights, *biases, *(scaling.tensors if scaling else ())]
    key = gather_dim, *lengths, widest, dtype, len(weights)

    def planned() -> GatherPlan:
        if not first:
            K = sum(lengths) if contracted else x.shape[-1]
            check_operands(x, K, weights, biases, dtype)
        return _gather_plan(x, weights, group, gather_dim, lengths, widest)

    plan = fused_plan(OP.name, group, key, (x, *given), planned)
    front, engine = x.movedim(gather_dim, 0) if gather_dim else x, plan.engine
    batch = front.shape[1:-1]
    if engine == "generic":
        if scaling:
            # Process groups do not take fp8, but they take its bytes.
            sent = x.view(torch.uint8)
            gathered = all_gather(sent, group, dim=gather_dim, sizes=lengths).view(x.dtype)
            scales = all_gather(scaling.rows, group, dim=gather_dim, sizes=lengths)
            zs = scaled_products(gathered, weights, biases, replace(scaling, rows=scales))
        else:
            saves = needs_w and keep_gathered is not False
            call = GatherCall(group, engine, gather_dim, lengths, True, saves, None, None)
            *zs, gathered = _AllGatherMatmul.apply(call, x, *weights, *biases)
        ys = epilogues.activate(zs, activation)
    else:
        if scaling:
            scaling = replace(scaling, rows=scaling.rows.movedim(gather_dim, 0).flatten()[:, None])
        asked = return_gathered, saves, activation
        call = GatherCall(group, engine, 0, plan.rows, *asked, scaling, plan.told, plan)
        flat = as_rows(front) if front.ndim > 2 else front
        results: Sequence[torch.Tensor] = OP.apply(call, flat, *weights, *biases)
        whole = [
            r.view(sum(lengths), *batch, r.shape[1]).movedim(0, gather_dim) if x.ndim > 2 else r
            for r in results
        ]
        ys, gathered = whole[: len(whole) - call.keep], whole[-1]
    y = ys[0] if single or activation == "swiglu" else ys
    return (gathered, y) if return_gathered else y


def _bias_list(x: torch.Tensor, biases: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Biases as a custom op takes them: torch.library cannot differentiate lists that contain None.

    One for each weight, empty where there is none; an empty list if there are none at all.
    """
    if all(bias is None for bias in biases):
        return []
    return [x.new_empty(0) if bias is None else bias for bias in biases]


def _gather_plan(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    group: Group,
    gather_dim: int,
    sizes: list[int],
    widest: int,
) -> GatherPlan:
    engine = choose(gather_problem(x, weights, gather_dim, sizes, widest), group, x.device)
    between = math.prod(x.shape[:gather_dim]) * math.prod(x.shape[gather_dim + 1 : -1])
    told = (
        x.dtype, ("x", (*x.shape[:gather_dim], "*", *x.shape[gather_dim + 1 :])),
        ("dim", gather_dim), ("sizes", tuple(sizes)),
    )  # fmt: skip
    return GatherPlan(engine, [size * between for size in sizes], told)


class _AllGatherMatmul(FusedFunction):
    """x (m_r, K), weights (K, N_i) -> every y_i (M, N_i), then the gathered x if asked for.

    On the generic engine x, and with it the results, may have more dims, and a gradient that does
    not come is left out. That of x is added up before it is rounded, where autograd would round
    each product.
    """

    @staticmethod
    def plain(call: GatherCall, *operands: Any) -> tuple[torch.Tensor, ...]:
        return _run_engine(call, *operands).results

    @staticmethod
    def forward(
        ctx: Any, call: GatherCall, x: torch.Tensor, *operands: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        count = len(operands) // 2
        weights = operands[:count]
        keep_sums = any(ctx.needs_input_grad) and epilogues.keeps_sums(call.activation)
        made = _run_engine(call._replace(keep_sums=keep_sums), x, *operands)
        kept = made.sums if keep_sums else made.ys if call.activation else []
        crossed = () if call.saves or not any(ctx.needs_input_grad[2 : 2 + count]) else made.crossed
        ctx.save_for_backward(made.gathered if call.saves else x, *weights, *kept, *crossed)
        ctx.kept = len(kept)
        ctx.set_materialize_grads(not call.saves and call.engine != "generic")
        ctx.call = call
        return made.results

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: GatherCall = ctx.call
        saved = ctx.saved_tensors  # once: a checkpoint computes them again for it
        if call.plan is None:
            return _gather_gradients(ctx, saved, grads)
        key = (
            call.plan, call.dim, call.returns, call.saves, call.activation, call.keep_sums,
            call.scaling is None, *ctx.needs_input_grad,
        )  # fmt: skip
        return repeated_gradients(
            key, call.group, (*saved, *grads), lambda: _gather_gradients(ctx, saved, grads)
        )


def _gather_gradients(
    ctx: Any, tensors: Sequence[torch.Tensor], grads: Sequence[Any]
) -> tuple[torch.Tensor | None, ...]:
    call: GatherCall = ctx.call
    needs_x, *needs = ctx.needs_input_grad[1:]
    count = len(needs) // 2
    needs_w, needs_b = needs[:count], needs[count:]
    x, *saved = tensors
    (x, *weights), kept = conjugated(x, *saved[:count]), saved[count : count + ctx.kept]
    crossed = tuple(conjugated(*saved[count + ctx.kept :]))
    gathered = x if call.saves else None
    fused = call.engine != "generic"
    if fused:
        if gathered is not None:
            grads = _with_zeros(call, grads, gathered, weights)
        moved = [
            needs_x and "reduce_scatter", any(needs_w) and gathered is None and "all_gather",
        ]  # fmt: skip
        record_backward("all_gather_matmul", call.engine, call.group, *filter(None, moved))
    dgathered = grads[-1] if call.keep else None
    dys = list(grads[: len(grads) - call.keep])
    if fused:
        dys = [dy.contiguous() for dy in epilogues.activation_gradients(dys, kept, call.activation)]
    given = GatherGradient(
        x, weights, dys, dgathered, call.group, call.rows, needs_x, needs_w, gathered, call.told
    )._replace(crossed=crossed)
    if torch.is_grad_enabled() and call.activation is not None:
        refuse_second_order(f"all_gather_matmul with activation={call.activation!r}")
    if fused and not torch.is_grad_enabled():
        dx, dws = OP.backward[call.engine](given)
    else:
        dx, dws = generic_backward(given, call.dim)
    dbs = [
        as_rows(dy).sum(0) if need and dy is not None else None
        for dy, need in zip(dys, needs_b, strict=True)
    ]
    return (None, dx, *dws, *dbs)


def _run_engine(call: GatherCall, x: torch.Tensor, *operands: Any) -> Made:
    count = len(operands) // 2
    return FORWARD[call.engine](call, x, [*operands[:count]], [*operands[count:]])


OP = FusedOp("all_gather_matmul", _AllGatherMatmul, FORWARD, BACKWARD)


def _with_zeros(
    call: GatherCall, grads: Sequence[Any], gathered: torch.Tensor, weights: list[torch.Tensor]
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


def all_gather_matmul_reference(
    xs: Sequence[torch.Tensor],
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    gather_dim: int = 0,
) -> torch.Tensor:
    """What one rank computes, given all ranks' shards: the oracle of the tests, in any dtype."""
    y = torch.matmul(torch.cat(list(xs), gather_dim), w)
    return y if bias is None else y + bias
