"""dispatch_grouped_matmul: tokens go to their experts' ranks and are multiplied there.

W ranks; rank r holds T_r tokens x_r (T_r, K) and E_r experts' weights (E_r, K, N). Each token goes
to k experts; `routing` tells in which order a rank's rows stand:

    x_0 (T_0, K)                  rows (R, K)            w (E_r, K, N)            h (R, N)
    x_1 (T_1, K)    k of them --> | expert 0 |   @   expert 0's     =   | expert 0 |
    ...                           | expert 1 |       expert 1's         | expert 1 |

Backward: with dz the gradient of rows @ w, dw[e] = rows[e]^T @ dz[e], and dx is what
`grouped_matmul_combine` does with dz, w^T and weights of 1. Rows are pulled again for dw, unless
they were kept (`keep_gathered`).

With `quantize`, rows travel in e4m3 with an fp32 scale each, and are multiplied in the dtype of w.
One scale is enough: between the largest e4m3 number and the least normal one there are 15 powers of
two, so that numbers down to 1 / 28,000 of a row's largest keep their 4 bits. The gradient of x is
that of the rows, as if they had not been rounded; that of w is of the rows as they were multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch

from weft.collectives import resolve
from weft.collectives.memory.checks import check_call
from weft.collectives.memory.repeatable import repeatable
from weft.collectives.ranks.flight import call_of
from weft.collectives.ranks.group import GroupLike, group_name
from weft.collectives.ranks.traced import is_call_traced
from weft.collectives.topology import in_two_levels
from weft.kernels.engine import epilogues
from weft.kernels.engine.autocast import autocast, outside_autocast
from weft.kernels.engine.chips import chip_of
from weft.kernels.engine.engines import (
    Problem,
    RunnableEngine,
    TokensOverHosts,
    choose,
    record_backward,
)
from weft.kernels.engine.epilogues import Activation
from weft.kernels.engine.fp8 import FP8, Quantize, check_quantize
from weft.kernels.engine.local_matmul import no_view, on_cpu
from weft.kernels.experts.across import crossings, set_refusal
from weft.kernels.experts.by_engine import engine_module
from weft.kernels.experts.calls import DispatchCall, DispatchMade
from weft.kernels.experts.grouped import grouped_matmul
from weft.kernels.experts.routing import (
    Roster,
    Routing,
    check_tokens,
    rostered,
    routed,
    routing_of,
)
from weft.kernels.experts.rows import to_experts

if TYPE_CHECKING:
    from typing_extensions import Unpack

_Ids = torch.Tensor | Routing
_Weights = Sequence[torch.Tensor]


class _Options(TypedDict, total=False):
    tensor_parallel_size: int
    keep_gathered: bool
    quantize: Quantize | None
    capacity: int | None
    sizes: Sequence[int] | None


@overload
def dispatch_grouped_matmul(
    x: torch.Tensor,
    topk_ids: _Ids,
    w: torch.Tensor,
    group: GroupLike = None,
    *,
    activation: Activation | None = None,
    **options: Unpack[_Options],
) -> tuple[torch.Tensor, Routing]: ...
@overload
def dispatch_grouped_matmul(  # type: ignore[overload-overlap]
    x: torch.Tensor,
    topk_ids: _Ids,
    w: _Weights,
    group: GroupLike = None,
    *,
    activation: Literal["swiglu"],
    **options: Unpack[_Options],
) -> tuple[torch.Tensor, Routing]: ...
@overload
def dispatch_grouped_matmul(
    x: torch.Tensor,
    topk_ids: _Ids,
    w: _Weights,
    group: GroupLike = None,
    *,
    activation: Activation | None = None,
    **options: Unpack[_Options],
) -> tuple[list[torch.Tensor], Routing]: ...


@autocast
@repeatable
def dispatch_grouped_matmul(
    x: torch.Tensor,
    topk_ids: _Ids,
    w: torch.Tensor | _Weights,
    group: GroupLike = None,
    *,
    activation: Activation | None = None,
    tensor_parallel_size: int = 1,
    keep_gathered: bool = False,
    quantize: Quantize | None = None,
    capacity: int | None = None,
    sizes: Sequence[int] | None = None,
) -> tuple[torch.Tensor | list[torch.Tensor], Routing]:
    """activation(rows @ w[expert]) for the tokens of all ranks that go to this rank's experts.

    Args:
        x: (T, K): this rank's tokens; T may differ between ranks and be 0.
        topk_ids: (T, k) integers: the experts of each token, numbered through all ranks; -1 for
            padding. Or the `Routing` of an earlier call with the same ids, which saves finding it
            and has what follows `activation` but for `keep_gathered` and `quantize`.
        w: (E_r, K, N), this rank's experts, any strides; E_r may differ between ranks and be 0. Or
            a list of weights that share the rows, each with its own N.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world, or for that of a `Routing`.
        activation: as in `all_gather_matmul`; "swiglu" takes w as the pair (gate, up).
        tensor_parallel_size: on how many consecutive ranks each expert is: w holds a part of its N.
        keep_gathered: keep the rows, k times the tokens, for the gradient of w. False: pull them
            again in backward. Not heeded for up to 256 tokens a rank on a GPU.
        quantize: "fp8": rows travel as torch.float8_e4m3fn, with an fp32 scale each, and are
            rounded so: by at most 1/16 of a number, or 2**-18.8 of the largest of its row.
        capacity: see `route`.
        sizes: T of every rank, if known.

    Returns:
        h (R, N), or a list of them if w is one (except for "swiglu"), and the routing, which
        `grouped_matmul_combine` takes. On a GPU rows beyond `routing.ends[-1]` are undefined.

        Gradients: that of x is the sum over its k experts, in the order of j; that of w is this
        rank's own. Fused like the forward.

    Raises:
        ValueError: shapes or dtypes that do not fit, ids out of range (of any rank, on every rank).
        MismatchError: on every rank, if ranks differ in K, k, dtype or the number of experts.
        PeerTimeout: a rank did not come.
        NotImplementedError: an engine was forced that cannot run the call.

    Example:
        x = [[1.]] with ids [[1]] on rank 0, x = [[2.]] with ids [[1]] on rank 1, an expert a rank:
        rank 0 gets h of no rows, rank 1, whose w is [[[10.]]], gets [[10.], [20.]].
    """
    weights = [w] if isinstance(w, torch.Tensor) else list(w)
    epilogues.check_activation(activation, weights)
    check_quantize(quantize)
    _check_dispatched(x, weights)
    tp, traced, made = tensor_parallel_size, is_call_traced(x), None
    routing: Roster | Routing
    if isinstance(topk_ids, Routing):
        routing = topk_ids
        _check_given(routing, group, tp, capacity, sizes)
    else:
        check_tokens(topk_ids, x)
        if not traced:
            group, k = resolve(group), topk_ids.shape[1]
            told = (
                x.dtype,
                ("K", x.shape[1]),
                ("k", k),
                ("tensor_parallel_size", tp),
                ("quantize", quantize),
            )
            check_call(group, lambda: call_of("dispatch_grouped_matmul", told).text.decode())
        find = routed if traced else rostered
        routing = find(topk_ids, len(weights[0]), group, tp, capacity, sizes)
    if traced and isinstance(routing, Routing):  # see `custom_ops`
        zs = traced_dispatch(x, weights, routing, keep_gathered, quantize)
        hs = epilogues.activate(zs, activation)
        return hs[0] if isinstance(w, torch.Tensor) or activation == "swiglu" else hs, routing
    if isinstance(routing, Routing):
        routing = check_routing(routing, x, weights[0])
    engine = engine_of("dispatch_grouped_matmul", x, weights, routing, quantize)
    if isinstance(routing, Roster):
        if engine == "triton" and capacity is None:
            from weft.kernels.experts import launched

            made = launched.dispatch_few(routing, x, weights, activation, quantize)
        routing = made[0] if made else routing_of(routing, capacity)
    call = DispatchCall(routing, engine, activation, keep_gathered, quantize, made and made[1])
    if engine == "generic":
        hs = generic_dispatch(call, x, weights)
    else:
        hs = list(Dispatch.apply(call, x, *weights))
    return hs[0] if isinstance(w, torch.Tensor) or activation == "swiglu" else hs, routing


@repeatable
def dispatch(
    x: torch.Tensor, routing: Routing, *, quantize: Quantize | None = None
) -> torch.Tensor:
    """The rows (R, K) of all ranks' tokens x (T, K) that go to this rank's experts.

    For those who bring their own matmul: rows of expert e end before `routing.ends[e]`. The
    gradient of x is the sum over its k experts. `quantize`: as in `dispatch_grouped_matmul`.
    """
    check_quantize(quantize)
    if is_call_traced(x):
        return traced_dispatch(x, [], routing, False, quantize)[0]
    routing = check_routing(routing, x)
    engine = engine_of("dispatch_grouped_matmul", x, [], routing, quantize)
    call = DispatchCall(routing, engine, None, False, quantize)
    if engine == "generic":
        return generic_dispatch(call, x, [])[0]
    rows: torch.Tensor = Dispatch.apply(call, x)[0]
    return rows


def traced_dispatch(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    routing: Routing,
    keep: bool,
    quantize: Quantize | None,
) -> list[torch.Tensor]:
    """Every rows @ w_i in a graph, or the rows if there is no weight."""
    op, tp = torch.ops.weft.dispatch_grouped_matmul, routing.tensor_parallel_size
    made: list[torch.Tensor] = op(x, weights, routing.tensors, routing.name, tp, keep, quantize)
    return made[: max(1, len(weights))]


def _check_dispatched(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> None:
    if x.ndim != 2 or not x.is_floating_point():
        raise ValueError(f"x must be tokens (T, K) of floats, got {tuple(x.shape)} {x.dtype}")
    if not weights:
        raise ValueError("w must be a weight or a list of at least one")
    for w in weights:
        if w.ndim != 3 or w.shape[1] != x.shape[1] or len(w) != len(weights[0]):
            raise ValueError(
                f"w must be (experts, K, N) with K = {x.shape[1]}, as x is {tuple(x.shape)}, got "
                f"{[tuple(w.shape) for w in weights]}; pass weights (experts, N, K) as "
                f"w.transpose(1, 2)"
            )
        if (w.dtype, w.device) != (x.dtype, x.device):
            raise ValueError(f"w must be {x.dtype} on {x.device}, like x, got {w.dtype} {w.device}")


def _check_given(
    routing: Routing, group: GroupLike, tp: int, capacity: int | None, sizes: object
) -> None:
    """Raise ValueError if a call with a routing asks for another one."""
    asked = {
        "group": group is not None and group_name(group) != routing.name,
        "tensor_parallel_size": tp not in (1, routing.tensor_parallel_size),
        "capacity": capacity is not None,
        "sizes": sizes is not None,
    }
    if any(asked.values()):
        names = ", ".join(name for name, wrong in asked.items() if wrong)
        raise ValueError(
            f"a routing has its own {names}: pass them to route(..), or topk_ids in its place"
        )


def check_routing(routing: Routing, x: torch.Tensor, w: torch.Tensor | None = None) -> Routing:
    """The routing, not of a graph; ValueError unless x are its tokens, and w its experts, and its
    ids as they were."""
    routing = routing.outside_graphs()
    routing.check_ids()
    check_tokens(routing.topk_ids, x)
    if w is not None:
        routing.check_experts(w)
    return routing


def engine_of(
    op: str,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    routing: Roster | Routing,
    quantize: Quantize | None = None,
) -> RunnableEngine:
    """The one asked for, or the cheapest for rows like x by `weights`; the same on every rank."""
    W, tp = routing.group.world_size, routing.tensor_parallel_size
    rows = max(1, sum(routing.tokens) * routing.top_k * tp // W)
    K, N = x.shape[1], sum(w.shape[2] for w in weights)
    moved = rows * K * (FP8 if quantize else x.dtype).itemsize * (W - tp) // W
    host = "" if on_cpu(x) else "it is for CPUs, whose host knows how many rows come"
    kernel = "" if x.element_size() > 1 else f"its kernels take no {x.dtype} without scales"
    if quantize and not (chip := chip_of(x.device)).fp8:
        kernel = f"{chip.name} has no {FP8}"
    told = Problem(
        op,
        rows,
        N,
        K,
        x.dtype,
        moved,
        host_refusal=host,
        kernel_refusal=kernel,
        tokens=_tokens_over_hosts(op, x, weights, routing, quantize),
    )
    return choose(told, routing.group, x.device)


def _tokens_over_hosts(
    op: str,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    routing: Roster | Routing,
    quantize: Quantize | None,
) -> TokensOverHosts | None:
    """What moves in two levels; None if the call cannot go host by host."""
    group, k = routing.group, routing.top_k
    if not in_two_levels(group) or not any(routing.tokens) or set_refusal(routing):
        return None
    moved_columns = sum(w.shape[2] for w in weights) if "combine" in op and weights else x.shape[1]
    T, H = sum(routing.tokens) / group.world_size, len(group.hosts)
    row = moved_columns * (FP8 if quantize else x.dtype).itemsize
    return TokensOverHosts(T * crossings(H, k) * row, T * k * (1 - 1 / H) * row)


def generic_dispatch(
    call: DispatchCall, x: torch.Tensor, weights: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The same by collectives and matmuls, which are differentiable themselves."""
    with call.routing.group.calls.noting(call_of("dispatch_grouped_matmul", call.told(x))):
        rows = to_experts(x, call.routing, call.quantize is not None)
    zs = [grouped_matmul(rows, w, call.routing.ends) for w in weights]
    return epilogues.activate(zs, call.activation) if zs else [rows]


class Dispatch(torch.autograd.Function):
    """x (T, K), weights (E_r, K, N_i) -> every h_i (R, N_i), or the rows if there is no weight."""

    @staticmethod
    def forward(
        ctx: Any, call: DispatchCall, x: torch.Tensor, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        keep = call.keep and any(ctx.needs_input_grad[2:])
        made: DispatchMade = call.made or engine_module(call.engine).dispatch_forward(
            call, x, weights, keep, any(ctx.needs_input_grad)
        )
        hs = {h: no_view(h) for h in made.hs}
        kept = [hs.get(each, each) for each in made.kept]  # so that writing to it is noticed
        # Not with results, which refer to ctx.
        ctx.call, ctx.kept = call._replace(made=None), made.rows is not None
        ctx.save_for_backward(x, *weights, *([made.rows] if ctx.kept else []), *kept)
        return tuple(hs.values())

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, *dhs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: DispatchCall = ctx.call
        call.routing.check_ids()
        _, needs_x, *needs_w = ctx.needs_input_grad
        x, *saved = ctx.saved_tensors
        weights, saved = saved[: len(needs_w)], saved[len(needs_w) :]
        if torch.is_grad_enabled():
            made = generic_dispatch(call, x, weights)
            return None, *gradients(made, [x, *weights], [needs_x, *needs_w], dhs)
        rows = saved.pop(0) if ctx.kept else None
        moved = needs_x and "all_to_all", any(needs_w) and rows is None and "all_to_all"
        record_backward(
            "dispatch_grouped_matmul", call.engine, call.routing.group, *filter(None, moved)
        )
        backward = engine_module(call.engine).dispatch_backward
        return None, *backward(call, x, weights, rows, dhs, saved, needs_x, needs_w)


def gradients(
    made: Sequence[torch.Tensor],
    operands: Sequence[torch.Tensor | None],
    needs: Sequence[bool],
    grads: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """Those of what the generic engine has made, differentiable once more."""
    wanted = [x for x, need in zip(operands, needs, strict=True) if need and x is not None]
    found = iter(torch.autograd.grad(made, wanted, grads, create_graph=True, allow_unused=True))
    return [next(found) if need else None for need in needs]


def dispatch_grouped_matmul_reference(
    xs: Sequence[torch.Tensor],
    topk_ids: Sequence[torch.Tensor],
    w: torch.Tensor,
    first: int,
) -> torch.Tensor:
    """The rows @ w of the rank with experts `first`, .., given all ranks' tokens and ids: in loops.

    In any dtype: the oracle of the tests.
    """
    made = [
        x[t] @ w[e]
        for e in range(len(w))
        for x, ids in zip(xs, topk_ids, strict=True)
        for t in range(len(ids))
        for id in ids[t].tolist()
        if id == first + e
    ]
    return torch.stack(made) if made else xs[0].new_zeros(0, w.shape[2])
