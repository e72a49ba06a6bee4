"""reduce_scatter_rms_norm_all_gather: what stands between two tensor-parallel blocks, in one call.

W ranks; rank r has terms x_r (T, H), and the residual of its own rows:

    x_0 + x_1 + ..  -- rows of rank r -->  h_r = sum + residual_r   next residual, stays there
                                           y_r = rms_norm(h_r)  -- gathered -->  y on every rank

Each row is added up and normalized by one rank, and the residual is never whole anywhere; by
all_reduce and rms_norm, every rank would keep it and normalize all rows.

The host and generic engines are a reduce_scatter, torch's ops and an all_gather, on those engines.
The triton engine, for the few rows of decoding, is one launch: `rms_norm_kernel`.

Backward: dy is summed over the ranks and scattered; dh = d rms_norm(dy_r) + dh_r is the gradient of
the residual and, gathered, that of every rank's x.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from weft import settings
from weft.collectives import Group, all_gather, movement, reduce_scatter, resolve, workspace
from weft.collectives.device.launches import layouts_of
from weft.collectives.memory.checks import check_call
from weft.collectives.memory.repeatable import repeatable
from weft.collectives.prices.hardware import fabric_of
from weft.collectives.profiled import profiled, profiler_enabled
from weft.collectives.ranks.chunks import chunk_sizes
from weft.collectives.ranks.flight import call_of
from weft.collectives.ranks.group import GroupLike, group_name
from weft.collectives.ranks.traced import is_call_traced
from weft.kernels.engine.autocast import outside_autocast
from weft.kernels.engine.chips import chip_of
from weft.kernels.engine.engines import Problem, choose, is_supported
from weft.kernels.engine.local_matmul import (
    as_rows,
    check_residual,
    in_sum_dtype,
    needs_gradient,
    no_view,
    sum_dtype,
)
from weft.kernels.engine.plans import Plans
from weft.kernels.engine.replicated import Spread, Summed

if TYPE_CHECKING:
    from weft.kernels.norm.rms_norm_launch import RMSNormConfig

_OP = "reduce_scatter_rms_norm_all_gather"
# Elements of a row, as many programs share each. Beyond so many bytes of x and y the collectives
# are as fast, and leave the cores free.
WIDEST = 1 << 16
MOST_BYTES = 4 << 20


@repeatable
def reduce_scatter_rms_norm_all_gather(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    group: GroupLike = None,
    *,
    residual: torch.Tensor | None = None,
    eps: float | None = None,
    dim: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """rms_norm of the sum of every rank's x and a sharded residual; and that sum, sharded.

    As all_reduce, addition and F.rms_norm, but each row is normalized by one rank only, and the
    residual stays in shards from block to block.

    Args:
        x: (*batch, H), this rank's terms: the same shape and dtype on every rank. Any strides.
        weight: (H,) of any floating dtype, the same on every rank; None: ones.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        residual: this rank's torch.chunk along `dim` of what is added to the sum, dtype of x. All
            ranks pass one or none does.
        eps: None: that of fp32 (fp64 for fp64), which is what F.rms_norm takes.
        dim: dim of x that is cut, but not the last one; trailing ranks may get nothing.

    Returns:
        y: new, the shape and dtype of x, bitwise the same on every rank: the norm is computed in
            fp32 (fp64 for fp64) from the second result, and rounded once.
        h: new, this rank's chunk of the sum and the residual: the next residual. Added up in rank
            order in fp32, and rounded once or, by collectives, before the residual is added too.

        With `dim` > 0 they may be non-contiguous. Gradients: those of y are summed over the ranks;
        that of weight is the sum over all rows, the same on every rank.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
        PeerTimeout: a rank did not come.
        NotImplementedError: the triton engine was forced and cannot run the call.

    Example:
        x = [[3., 4.]] on both of 2 ranks, eps 0: y = [[.8485, 1.1314]] on both, h = [[6., 8.]] on
        rank 0 and of shape (0, 2) on rank 1.
    """
    if is_call_traced(x):  # see `custom_ops`
        dim, eps = _dim_and_eps(x, weight, dim, eps)
        op = torch.ops.weft.reduce_scatter_rms_norm_all_gather
        y, h = op(x, weight, residual, group_name(group), eps, dim)
        return y, h
    group = resolve(group)

    def told() -> tuple[Hashable, ...]:
        of, epsilon = _dim_and_eps(x, weight, dim, eps)
        given = ("weight", weight is not None), ("residual", residual is not None)
        return x.dtype, x.shape, ("dim", of), ("eps", epsilon), *given

    def planned() -> NormCall:
        of, epsilon = _dim_and_eps(x, weight, dim, eps)
        sizes = chunk_sizes(x.shape[of], group.world_size)
        shape = (*x.shape[:of], sizes[group.rank], *x.shape[of + 1 :])
        check_residual(residual, shape, x.dtype, x.device)
        return NormCall(group, sizes, epsilon, of, told(), fused=by_kernel(_OP, x, group))

    check_call(group, lambda: call_of(_OP, told()).text.decode())
    call = norm_plan((_OP, group, dim, eps), (x, weight, residual), planned)
    run = _kernel_forward if call.fused else _forward
    y, h = sum_and_norm(call, run, x, weight, residual)
    return y, h


def _dim_and_eps(
    x: torch.Tensor, weight: torch.Tensor | None, dim: int, eps: float | None
) -> tuple[int, float]:
    """`dim` from the front, and what `eps` is."""
    if x.ndim < 2 or not -x.ndim <= dim < x.ndim or dim % x.ndim == x.ndim - 1:
        raise ValueError(
            f"x must have at least 2 dims, and dim be one of them but the last, over which the "
            f"norm is taken: got shape {tuple(x.shape)}, {dim=}"
        )
    check(x, weight)
    wide = sum_dtype(x)
    return dim % x.ndim, torch.finfo(wide).eps if eps is None else eps


def check(x: torch.Tensor, weight: torch.Tensor | None) -> None:
    """Raise ValueError unless rows of x can be normalized, and multiplied by the weight."""
    if not x.ndim:
        raise ValueError("x must have at least one dim, over which the norm is taken")
    if not x.is_floating_point() or x.dtype.itemsize == 1:
        raise ValueError(f"x must be float64, float32, bfloat16 or float16, got {x.dtype}")
    if weight is not None and (
        weight.shape != x.shape[-1:] or not weight.is_floating_point() or weight.device != x.device
    ):
        raise ValueError(
            f"weight must be floating, of shape {tuple(x.shape[-1:])}, on {x.device}: got "
            f"{weight.dtype}, {tuple(weight.shape)}, on {weight.device}"
        )


def by_kernel(op: str, x: torch.Tensor, group: Group) -> bool:
    """Whether the kernel runs the call, from what is the same on every rank."""
    engine, H = settings.current_engine(), x.shape[-1]
    rows, nbytes = x.numel() // max(H, 1), 2 * x.numel() * x.element_size()
    refusal = f"rows may have up to {WIDEST} elements, got {H}" if H > WIDEST else ""
    problem = Problem(op, rows, H, 0, x.dtype, nbytes, kernel_refusal=refusal)
    if engine == "triton":
        return choose(problem, group, x.device) == "triton"
    if engine != "auto" or not group.on_gpus(x.device) or nbytes > MOST_BYTES:
        return False
    supported, _ = is_supported("triton", problem, group, x.device)
    if supported and settings.tracing():
        settings.record(op, "triton", "few bytes", f"{rows}x{H}", ranks=group.world_size)
    return supported


def _inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def rms_normalized(h: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """rms_norm(h) * weight in fp32, or fp64 for that."""
    wide = in_sum_dtype(h)
    y = wide * _inverse_rms(wide, eps)
    return y if weight is None else y * weight


@dataclass(eq=False)
class NormCall:
    """What calls with tensors of the same layouts come to, but for these, which autograd must see.

    Attributes:
        group: given by its name in a graph.
        sizes: of the chunks along `dim`.
        told: what must be the same on every rank.
        whole: whether every rank has the whole residual, and makes all of h.
        quantizes: whether y is in fp8.
        fused: whether the kernel runs it.
        room: bytes of the workspace that it needs, once that is known.
        config: then also how the kernel is launched.
        switched: how it is launched where the switch may add up, and can.
    """

    group: GroupLike
    sizes: list[int]
    eps: float
    dim: int
    told: tuple[Hashable, ...] = ()
    whole: bool = False
    quantizes: bool = False
    fused: bool = False
    room: int = -1
    config: RMSNormConfig | None = None
    switched: RMSNormConfig | None = None

    def gradients(
        self,
        h: torch.Tensor,
        weight: torch.Tensor | None,
        dy: torch.Tensor,
        dh: torch.Tensor,
        needs: Sequence[bool],
    ) -> tuple[torch.Tensor | None, ...]:
        """Those of x, weight and residual that are needed, by differentiable ops.

        With n = h / rms(h) and g = dy * weight: dh += (g - n mean(g n)) / rms(h), dw = sum of dy n.
        """
        if not self.whole:
            dy = reduce_scatter(dy, self.group, dim=self.dim, sizes=self.sizes)
        g, wide = in_sum_dtype(dy), in_sum_dtype(h)
        scale = _inverse_rms(wide, self.eps)
        n, dx, dw = wide * scale, None, None
        needs_x, needs_weight, needs_residual = needs
        if weight is not None:
            if needs_weight:
                of_rows = as_rows(g * n).sum(0)
                if not self.whole:
                    of_rows = Summed.apply(of_rows, resolve(self.group), "sum")
                dw = of_rows.to(weight.dtype)
            if torch.is_grad_enabled() and not self.whole:  # for the gradient of this one
                weight = Spread.apply(weight, resolve(self.group))
            g = g * weight
        grad = (scale * (g - n * (g * n).mean(-1, keepdim=True)) + dh).to(h.dtype)
        if needs_x and self.whole:
            dx = Spread.apply(grad, resolve(self.group)) if torch.is_grad_enabled() else grad
        elif needs_x:
            dx = all_gather(grad, self.group, dim=self.dim, sizes=self.sizes)
        return dx, dw, grad if needs_residual else None


_plans = Plans[NormCall](f"{__name__}._plans")


def norm_plan(
    of: tuple[Hashable, ...], operands: Sequence[torch.Tensor | None], make: Callable[[], NormCall]
) -> NormCall:
    """The call `of` tensors of these layouts: `make()`, or what that has made before."""
    asked = settings.current_engine(), settings.multimem()
    return _plans.of((*of, *asked, *layouts_of(operands)), make)


Run = Callable[
    [NormCall, torch.Tensor, torch.Tensor | None, torch.Tensor | None], tuple[torch.Tensor, ...]
]


class SumAndNorm(torch.autograd.Function):
    """x (*batch, H), weight (H,), residual like h -> y like x, h."""

    @staticmethod
    def forward(
        ctx: Any,
        call: NormCall,
        run: Run,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, h = map(no_view, run(call, x, weight, residual))
        ctx.save_for_backward(h, weight)
        ctx.call = call
        return y, h

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, dy: torch.Tensor, dh: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        h, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad[2:]
        return None, None, *ctx.call.gradients(h, weight, dy, dh, needs)


def sum_and_norm(
    call: NormCall,
    run: Run,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """y and h, by autograd if that is to record it, or a profiler to name it."""
    if profiler_enabled() or needs_gradient((x, weight, residual)):
        return cast(tuple[torch.Tensor, ...], SumAndNorm.apply(call, run, x, weight, residual))
    return run(call, x, weight, residual)  # 5 us less


def _forward(
    call: NormCall, x: torch.Tensor, weight: torch.Tensor | None, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    front, group = x.movedim(call.dim, 0), resolve(call.group)
    h = movement.scatter(front, group, call.sizes, "sum", dim=call.dim, told=(_OP, *call.told))
    h = h.movedim(0, call.dim)
    if residual is not None:
        h += residual
    y = rms_normalized(h, weight, call.eps).to(h.dtype)
    return all_gather(y, call.group, dim=call.dim, sizes=call.sizes), h


def run_kernel(
    op: str,
    call: NormCall,
    rows: torch.Tensor,
    share: int,
    weight: torch.Tensor | None,
    kept: torch.Tensor | None,
) -> Sequence[torch.Tensor]:
    """What `launch_sum_rms_norm` makes of the rows (T, H) and the residual `kept`."""
    from weft.kernels.norm import rms_norm_launch as kernel

    group = resolve(call.group)
    if call.room < 0:
        if call.whole and settings.multimem() and group.on_gpus(rows.device):
            call.switched = kernel.by_switch(
                len(rows), share, rows.shape[1], rows.dtype, group.world_size,
                chip_of(rows.device), fabric_of(group, rows.device),
            )  # fmt: skip
        of = len(rows), share, rows.shape[1], rows.dtype, group.world_size
        call.config = kernel.rms_norm_config(*of, chip_of(rows.device))
        if not call.switched:
            call.config = kernel.quickest_norm(*of, chip_of(rows.device), call.whole)
        call.room = kernel.workspace_bytes(*of, call.config)
        if call.switched:
            call.room = max(call.room, kernel.workspace_bytes(*of, call.switched))
    assert call.config is not None
    ws = workspace(group, call.room, channel=call.config.channel, device=rows.device)

    def launched() -> tuple[torch.Tensor, ...]:
        return kernel.launch_sum_rms_norm(
            rows,
            ws,
            share,
            weight=weight,
            residual=kept,
            eps=call.eps,
            whole=call.whole,
            quantizes=call.quantizes,
            config=call.switched if call.switched and ws.buffer.multicast_ptr else call.config,
        )

    with ws.call(op, call.told):
        return ws.repeat(call, (rows, weight, kept), launched)


@profiled(_OP)
def _kernel_forward(
    call: NormCall, x: torch.Tensor, weight: torch.Tensor | None, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if x.ndim == 2:
        y, h = run_kernel(_OP, call, x, call.sizes[0], weight, residual)
        return y, h
    front, group = x.movedim(call.dim, 0), resolve(call.group)
    between, H = front.shape[1:-1], x.shape[-1]
    kept = None if residual is None else as_rows(residual.movedim(call.dim, 0))
    share = call.sizes[0] * between.numel()
    y, h = run_kernel(_OP, call, as_rows(front), share, weight, kept)
    h = h.view(call.sizes[group.rank], *between, H)
    return y.view(front.shape).movedim(0, call.dim), h.movedim(0, call.dim)


def reduce_scatter_rms_norm_all_gather_reference(
    xs: list[torch.Tensor],
    weight: torch.Tensor | None = None,
    residuals: list[torch.Tensor] | None = None,
    eps: float = 0.0,
    dim: int = 0,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(y, every rank's h), given all ranks' operands: the oracle of the tests, in any dtype."""
    total = torch.stack(xs).sum(0)
    if residuals is not None:
        total = total + torch.cat(residuals, dim)
    y = torch.nn.functional.rms_norm(total, total.shape[-1:], weight, eps)
    return y, list(total.split(chunk_sizes(total.shape[dim], len(xs)), dim))
