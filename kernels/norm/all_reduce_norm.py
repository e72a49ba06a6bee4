"""all_reduce_residual_rms_norm: the whole sum, the residual and the norm on every rank: decoding.

W ranks; rank r has terms x_r (T, H), all have the same residual (T, H):

    h = x_0 + x_1 + .. + residual        next residual, on every rank
    y = rms_norm(h) * weight             on every rank, in fp8 if asked for

It is what serving engines run after a row-parallel linear: all_reduce, then fused_add_rms_norm.
With few rows each of these is a launch and a round trip; here they are one launch, by the kernel of
`rms_norm`. The host and generic engines are an all_reduce and torch's ops.

Backward: dy and dh are the same on every rank, as y and h are. dh + d rms_norm(dy) is the gradient
of the residual and of every rank's x: nothing moves.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from weft.collectives import movement, resolve
from weft.collectives.memory.checks import check_call
from weft.collectives.memory.repeatable import repeatable
from weft.collectives.profiled import profiled
from weft.collectives.ranks.flight import call_of
from weft.collectives.ranks.group import GroupLike, group_name
from weft.collectives.ranks.traced import is_call_traced
from weft.kernels.engine.fp8 import Quantize, check_quantize, magnitudes, quantized
from weft.kernels.engine.local_matmul import as_rows, check_residual, needs_gradient, sum_dtype
from weft.kernels.norm.rms_norm import (
    NormCall,
    by_kernel,
    check,
    norm_plan,
    rms_normalized,
    run_kernel,
    sum_and_norm,
)

_OP = "all_reduce_residual_rms_norm"


@repeatable
def all_reduce_residual_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    group: GroupLike = None,
    *,
    eps: float | None = 1e-6,
    quantize: Quantize | None = None,
) -> tuple[torch.Tensor, ...]:
    """rms_norm of the sum of every rank's x and a residual, and that sum; all on every rank.

    As all_reduce, addition and F.rms_norm. Where the tokens may be cut among ranks,
    `reduce_scatter_rms_norm_all_gather` keeps the residual in shards, and moves no more.

    Args:
        x: (*batch, H), this rank's terms: the same shape and dtype on every rank. Any strides.
        residual: like x, the same on every rank; None: nothing is added.
        weight: (H,) of any floating dtype, the same on every rank; None: ones.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        eps: None: that of fp32 (fp64 for fp64), which is what F.rms_norm takes.
        quantize: "fp8": y in torch.float8_e4m3fn, for matmuls that take `scale_a`.

    Returns:
        (y, h), or with `quantize` (y, h, scale); new, contiguous, bitwise the same on every rank.
        h (*batch, H), the next residual: added up in rank order in fp32, and rounded once or, by
        collectives, before the residual is added too. y (*batch, H): the norm, computed in fp32
        (fp64 for fp64) from h, and rounded once. scale (*batch, 1), fp32: the largest magnitude of
        the row / 448, by which y in fp8 is to be multiplied.

        Gradients of y and h must be the same on every rank, as they are; that of x is this rank's
        own, those of residual and weight are replicated.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
        PeerTimeout: a rank did not come.
        NotImplementedError: the triton engine was forced and cannot run the call; a gradient of
            fp8.

    Example:
        x = [[3., 6.]] on both of 2 ranks, no residual, eps 0: h = [[6., 12.]] and
        y = [[.6325, 1.2649]] on both; in fp8 y = [[224., 448.]] and scale = [[.002823]].
    """
    check_quantize(quantize)
    if quantize and needs_gradient((x, residual, weight)):
        raise NotImplementedError(
            f"{_OP} with quantize={quantize!r} has no gradient: call it under torch.no_grad(), or "
            f"quantize the result of a call without"
        )
    if eps is None:
        check(x, weight)
        eps = torch.finfo(sum_dtype(x)).eps
    if is_call_traced(x):  # see `custom_ops`
        check(x, weight)
        op = torch.ops.weft.all_reduce_residual_rms_norm
        return tuple(op(x, residual, weight, group_name(group), eps, quantize))
    group = resolve(group)

    def told() -> tuple[Hashable, ...]:
        given = ("weight", weight is not None), ("residual", residual is not None)
        return x.dtype, x.shape, ("eps", eps), ("quantize", quantize), *given

    def planned() -> NormCall:
        check(x, weight)
        check_residual(residual, x.shape, x.dtype, x.device)
        return NormCall(
            group,
            [],
            eps,
            0,
            told(),
            whole=True,
            quantizes=quantize is not None,
            fused=by_kernel(_OP, x, group),
        )

    check_call(group, lambda: call_of(_OP, told()).text.decode())
    call = norm_plan((_OP, group, eps, quantize), (x, weight, residual), planned)
    run = _kernel_forward if call.fused else _forward
    if quantize:
        return run(call, x, weight, residual)
    return sum_and_norm(call, run, x, weight, residual)


def _forward(
    call: NormCall, x: torch.Tensor, weight: torch.Tensor | None, residual: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    h = movement.all_reduce(x, resolve(call.group), "sum", told=(_OP, *call.told))
    if residual is not None:
        h += residual
    y = rms_normalized(h, weight, call.eps)
    if call.quantizes:
        small, scale = quantized(y, magnitudes(y))
        return small, h, scale
    return y.to(h.dtype), h


@profiled(_OP)
def _kernel_forward(
    call: NormCall, x: torch.Tensor, weight: torch.Tensor | None, residual: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    rows, kept = x, residual
    if x.ndim != 2:
        rows, kept = as_rows(x), None if residual is None else as_rows(residual)
    share = -(-len(rows) // resolve(call.group).world_size)
    y, h, *scales = run_kernel(_OP, call, rows, share, weight, kept)
    if x.ndim == 2:
        return y, h, *scales
    scales = [scale.view(*x.shape[:-1], 1) for scale in scales]
    return y.view(x.shape), h.view(x.shape), *scales


def all_reduce_residual_rms_norm_reference(
    xs: list[torch.Tensor],
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, h), given all ranks' operands: the oracle of the tests, in any dtype."""
    total = torch.stack(xs).sum(0)
    if residual is not None:
        total = total + residual
    return torch.nn.functional.rms_norm(total, total.shape[-1:], weight, eps), total
