"""all_gather_matmul: cat(x over ranks) @ w, differentiable, on three engines.

W ranks; M = sum of m_r rows in all. Rank r holds m_r of them, and its own N_r columns of w:

                 x_0 (m_0, K)                         w (K, N_r)
    rank r       x_1 (m_1, K)   gathered, M rows   @               =   y (M, N_r)
                 ...

Forward, host engine. Every rank copies its shard into symmetric memory and signals; it multiplies
its own shard, then each peer's in place, as that peer signals (on a GPU: as the copy engines bring
it, in a stream of their own). Nothing is gathered: y is written chunk by chunk. Shards of few rows
are gathered after all, as a small matmul wastes more than the copy costs.

Backward: dx = reduce_scatter(dy @ w^T) and dw = gather(x)^T @ dy. The shard is published first and
the partial sums next, so that peers' shards arrive under the first product, and peers' partial sums
under the second. Two workspaces, as two calls are under way at once.

The triton engine is in `all_gather_gemm`; its backward is also `gemm_reduce_scatter`'s kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

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
from weft.collectives.group import GroupLike, group_name, is_traced
from weft.collectives.movement import offsets
from weft.kernels.dense import WeightGrad, check_operands, matmul, mm, wire_dtype
from weft.kernels.engines import Problem, RunnableEngine, choose, record_backward
from weft.kernels.host import (
    gather_bytes,
    gather_shards,
    publish,
    publish_product,
    reduce_rows,
    row_chunks,
    rows_in_place,
    shards,
    sums_in_place,
)


def all_gather_matmul(
    x: torch.Tensor,
    w: torch.Tensor | Sequence[torch.Tensor],
    group: GroupLike = None,
    *,
    bias: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    gather_dim: int = 0,
    return_gathered: bool = False,
    sizes: Sequence[int] | None = None,
) -> Any:
    """torch.matmul(gathered, w) (+ bias), where gathered = cat(x over ranks, gather_dim).

    Args:
        x: (*batch, K), this rank's shard along `gather_dim`; shards may differ in length there and
            be empty, everything else is the same on every rank. Any strides.
        w: (K, N), this rank's own columns; or a list of them that share one gather (Q, K and V, or
            gate and up), each with its own N.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        bias: (N,), or a list with one or None a weight.
        gather_dim: dim along which the shards lie, any dim of x. The last one is the contraction:
            then w holds the rows for all of K.
        return_gathered: also return the gathered x.
        sizes: length of every rank's shard along `gather_dim`, where known; None: the ranks tell
            each other, which costs a few us.

    Returns:
        y (*gathered batch, N), or a list of them if `w` is one; with `return_gathered` the pair
        (gathered, y). New tensors; with `gather_dim` > 0 they may be non-contiguous.

        Gradients: of x, summed over ranks and scattered back to the shards; of w and bias, this
        rank's own. Fused like the forward.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
        MismatchError: on every rank, if the ranks' shards do not fit together.
        PeerTimeout: a rank did not come.
        NotImplementedError: an engine was forced that cannot run the call.

    Example:
        x = [[1.], [2.]][rank] on 2 ranks, w = [[10.]] gives [[10.], [20.]] on both.
    """
    single = isinstance(w, torch.Tensor)
    weights: list[torch.Tensor] = [w] if isinstance(w, torch.Tensor) else list(w)
    biases: list[torch.Tensor | None] = (
        [bias] * len(weights) if bias is None or isinstance(bias, torch.Tensor) else list(bias)
    )
    if is_traced(x):  # see `library`
        traced = torch.ops.weft.all_gather_matmul(
            x, weights, _listed(x, biases), group_name(group), gather_dim, sizes, return_gathered
        )
        y = traced[0] if single else traced[: len(weights)]
        return (traced[-1], y) if return_gathered else y
    where = resolve(group)
    if x.ndim < 2 or not -x.ndim <= gather_dim < x.ndim:
        raise ValueError(
            f"x must have at least 2 dims and gather_dim be one of them, got shape "
            f"{tuple(x.shape)}, {gather_dim=}"
        )
    gather_dim %= x.ndim
    lengths = known_sizes(x, where, gather_dim, sizes, "all_gather_matmul")
    K = sum(lengths) if gather_dim == x.ndim - 1 else x.shape[-1]
    check_operands(x, K, weights, biases)

    front = x.movedim(gather_dim, 0)
    batch = front.shape[1:-1]
    engine = choose(gather_problem(x, weights, gather_dim, lengths), where, x.device)
    if engine == "generic":
        gathered = all_gather(x, where, dim=gather_dim, sizes=lengths)
        ys = [matmul(gathered, *pair) for pair in zip(weights, biases, strict=True)]
    else:
        rows = [length * batch.numel() for length in lengths]
        results = _AllGatherMatmul.apply(
            front.reshape(-1, K), where, rows, engine, return_gathered, len(weights),
            *weights, *biases,
        )  # fmt: skip
        whole = [r.view(sum(lengths), *batch, r.shape[1]).movedim(0, gather_dim) for r in results]
        ys, gathered = whole[: len(weights)], whole[-1]
    y = ys[0] if single else ys
    return (gathered, y) if return_gathered else y


def _listed(x: torch.Tensor, biases: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Biases as an op takes them: torch.library has no gradients for lists with None in them.

    One a weight, of no elements where there is none; an empty list if there are none at all.
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


class _AllGatherMatmul(torch.autograd.Function):
    """x (m_r, K), weights (K, N_i) -> every y_i (M, N_i), then the gathered x if asked for."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        group: Group,
        rows: list[int],
        engine: RunnableEngine,
        keep: bool,
        count: int,
        *operands: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        weights = [each for each in operands[:count] if each is not None]
        biases = list(operands[count:])
        ctx.save_for_backward(x, *weights)
        ctx.group, ctx.rows, ctx.engine, ctx.keep, ctx.count = group, rows, engine, keep, count
        run = _host_forward if engine == "host" else _triton_forward
        ys, gathered = run(x, weights, biases, group, rows, keep)
        return (*ys, gathered) if gathered is not None and keep else tuple(ys)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs = ctx.needs_input_grad
        needs_w = needs[6 : 6 + ctx.count]
        dys = [grad.contiguous() for grad in grads[: ctx.count]]
        moved = [needs[0] and "reduce_scatter", any(needs_w) and "all_gather"]
        record_backward("all_gather_matmul", ctx.engine, *filter(None, moved))
        run = _host_backward if ctx.engine == "host" else _triton_backward
        dgathered = grads[-1] if ctx.keep else None
        dx, dws = run(x, weights, dys, dgathered, ctx.group, ctx.rows, needs[0], needs_w)
        dbs = [
            dy.sum(0) if need else None
            for dy, need in zip(dys, needs[6 + ctx.count :], strict=True)
        ]
        return (dx, None, None, None, None, None, *dws, *dbs)


def _host_forward(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    group: Group,
    rows: list[int],
    keep: bool,
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    pairs = list(zip(weights, biases, strict=True))
    nbytes = gather_bytes(x, rows)
    with exchange(group, nbytes, "all_gather_matmul", x.device, channel="host gather") as ex:
        publish(ex, x, rows)
        if keep or not rows_in_place(x, weights, rows):
            gathered = gather_shards(ex, x, rows)
            ys = [mm(gathered, w, bias) for w, bias in pairs]
            return ys, gathered.clone() if keep else None
        ys = [x.new_empty(sum(rows), w.shape[1]) for w in weights]
        for start, chunk in shards(ex, x, rows):
            for y, (w, bias) in zip(ys, pairs, strict=True):
                mm(chunk, w, bias, out=y[start : start + len(chunk)])
    return ys, None


def _host_backward(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    dys: list[torch.Tensor],
    dgathered: torch.Tensor | None,
    group: Group,
    rows: list[int],
    needs_x: bool,
    needs_w: Sequence[bool],
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
    M, K = sum(rows), x.shape[1]
    wire = wire_dtype(x)
    op, dx = "all_gather_matmul backward", None
    dws: list[torch.Tensor | None] = [None] * len(weights)
    with ExitStack() as stack:
        if any(needs_w):
            gather = stack.enter_context(
                exchange(group, gather_bytes(x, rows), op, x.device, channel="host gather")
            )
            publish(gather, x, rows)
        if needs_x:
            scatter = stack.enter_context(
                exchange(group, M * K * wire.itemsize, op, x.device, channel="host scatter")
            )
            plus = dgathered
            for dy, w in zip(dys[1:], weights[1:], strict=True):
                plus = mm(dy, w.t(), plus=plus, out=x.new_empty(M, K, dtype=wire))
            own = publish_product(scatter, dys[0], weights[0].t(), rows, wire, plus)
        if any(needs_w):
            in_place = sums_in_place(weights, rows)
            pairs = [
                (i, WeightGrad(w), dys[i])
                for i, (w, need) in enumerate(zip(weights, needs_w, strict=True))
                if need
            ]
            for start, chunk in row_chunks(gather, x, rows, in_place=in_place):
                for _, grad, dy in pairs:
                    grad.add(chunk, dy[start : start + len(chunk)])
            for i, grad, _ in pairs:
                dws[i] = grad.result()
        if needs_x:
            dx = reduce_rows(scatter, own, offsets(rows)[group.rank], x.dtype)
    return dx, dws


def _triton_forward(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    group: Group,
    rows: list[int],
    keep: bool,
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    from weft.kernels import all_gather_gemm as kernel

    ws = gather_workspace(x, group, rows, "all_gather_matmul")
    gathered, ys = kernel.launch_all_gather_matmul(
        x, weights, ws, rows, biases=biases, with_own=keep
    )
    ws.launched("all_gather_matmul")
    return ys, gathered


def gather_workspace(x: torch.Tensor, group: Group, rows: list[int], op: str) -> Workspace:
    """The workspace through which the kernels of `all_gather_gemm` gather x (rows[rank], K)."""
    from weft.kernels import all_gather_gemm as kernel

    nbytes = kernel.workspace_bytes(max(rows), x.shape[1], x.dtype)
    ws = workspace(group, nbytes, channel="gather", device=x.device)
    ws.check(op)
    return ws


def _triton_backward(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    dys: list[torch.Tensor],
    dgathered: torch.Tensor | None,
    group: Group,
    rows: list[int],
    needs_x: bool,
    needs_w: Sequence[bool],
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
    from weft.kernels import all_gather_gemm, gemm_reduce_scatter

    op, dx = "all_gather_matmul backward", None
    dws: list[torch.Tensor | None] = [None] * len(weights)
    if needs_x:
        ws = gemm_reduce_scatter.workspace_for(x.dtype, x.shape[1], group, rows, x.device)
        ws.check(op)
        dx = gemm_reduce_scatter.launch_matmul_reduce_scatter(
            dys, [w.t() for w in weights], ws, rows
        )
        ws.launched(op)
        if dgathered is not None:
            dx += reduce_scatter(dgathered, group, sizes=rows)
    gathered = None
    for i, (w, dy, need) in enumerate(zip(weights, dys, needs_w, strict=True)):
        if not need:
            continue
        dws[i] = dw = torch.empty_like(w)  # in w's own layout
        if gathered is None:
            ws = gather_workspace(x, group, rows, op)
            gathered, _ = all_gather_gemm.launch_all_gather_contract(
                x, dy, ws, rows, transposed=True, out=dw, with_own=sum(needs_w) > 1
            )
            ws.launched(op)
        else:
            mm(gathered.t(), dy, out=dw)
    return dx, dws


def all_gather_matmul_reference(
    xs: Sequence[torch.Tensor],
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    gather_dim: int = 0,
) -> torch.Tensor:
    """What one rank computes, given all ranks' shards: the oracle of the tests, in any dtype."""
    y = torch.matmul(torch.cat(list(xs), gather_dim), w)
    return y if bias is None else y + bias
