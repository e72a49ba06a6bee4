"""What the three fused matmuls have in common: their plans, engines and autograd.

    all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce     each has its spec, `OP`
        traced --> `FusedOp.traced`: the custom op of that name
        resolve the group, compare the call across ranks --> `fused_plan`: check the operands,
        choose an engine; kept
            generic --> collectives and products that are differentiable themselves
            host, triton, hosts --> operands as matrices --> `FusedOp.apply` --> the caller's shape

The two sums over ranks of x @ w differ in who gets which rows alone: each is a `FusedSum`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch

from weft import settings
from weft.collectives import Group, all_gather, movement, reduce_scatter, resolve
from weft.collectives.device.launches import layouts_of
from weft.collectives.memory.checks import check_call
from weft.collectives.memory.repeatable import repeated_gradients
from weft.collectives.profiled import profiler_enabled
from weft.collectives.ranks.chunks import chunk_sizes
from weft.collectives.ranks.flight import call_of
from weft.collectives.ranks.group import GroupLike, group_name
from weft.collectives.ranks.traced import is_call_traced
from weft.kernels.engine.autocast import outside_autocast
from weft.kernels.engine.engines import Problem, RunnableEngine, choose
from weft.kernels.engine.fp8 import Scaling, scaled_partial, scaling_of
from weft.kernels.engine.local_matmul import (
    SumOp,
    as_rows,
    check_operands,
    check_residual,
    check_sum,
    check_wire,
    conjugated,
    finished,
    needs_gradient,
    no_view,
    partial_matmul,
    sum_dtype,
)
from weft.kernels.engine.plans import Plans
from weft.kernels.engine.replicated import Spread, Summed

_Plan = TypeVar("_Plan")
_plans = Plans[Any](f"{__name__}._plans")


def fused_plan(
    op: str,
    group: Group,
    key: tuple[Hashable, ...],
    operands: Sequence[torch.Tensor | None],
    make: Callable[[], _Plan],
) -> _Plan:
    """What a call of `op` with operands of these layouts comes to: `make()`, kept."""
    plan: _Plan = _plans.of(
        (op, group, settings.current_engine(), *key, *layouts_of(operands)), make
    )
    return plan


class FusedFunction(torch.autograd.Function):
    """Of one call and its operands; its own name is what profilers show."""

    @staticmethod
    def plain(call: Any, *operands: torch.Tensor | None) -> Any:
        """What `forward` returns, where nothing is kept for gradients."""
        raise NotImplementedError


@dataclass(frozen=True)
class FusedOp:
    """What there is to know of one op.

    Attributes:
        name: of the public function, and of the custom op that it is when traced.
        function: runs the engines, and differentiates.
        forward: by engine: (call, operands) -> what is made.
        backward: by engine: what is given -> the gradients that are needed; empty if they move
            nothing.
    """

    name: str
    function: type[FusedFunction]
    forward: Mapping[str, Callable[..., Any]]
    backward: Mapping[str, Callable[..., Any]]

    def traced(self, *arguments: Any) -> Any:
        """The call as a graph has it: see `weft.kernels.custom_ops`."""
        return getattr(torch.ops.weft, self.name)(*arguments)

    def apply(self, call: Any, *operands: torch.Tensor | None) -> Any:
        """Run a fused engine on matrices."""
        if profiler_enabled() or needs_gradient(operands):
            return self.function.apply(call, *operands)
        return self.function.plain(call, *operands)  # 5 us less


# Of x, w and bias; None where it is not needed.
Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


@dataclass(eq=False)
class SumPlan:
    """What calls with operands of the same layouts come to: found in 25 us, and kept.

    Attributes:
        dim: that of the sum which is cut, from the front; None if it is not.
        sizes: of its parts.
        rows: of every rank's part of the sum as a matrix; of all of it where every rank gets it.
        shape: of this rank's part, `dim` in front.
        room: bytes of the workspace that kernels need, once that is known.
    """

    engine: RunnableEngine
    dim: int | None
    sizes: list[int]
    rows: list[int]
    shape: list[int]
    room: int = -1


class SumCall(NamedTuple):
    """One call of a fused engine, except for its tensors, which autograd must see."""

    op: FusedSum
    group: Group
    plan: SumPlan
    average: bool
    scaling: Scaling | None
    dtype: torch.dtype  # of the result
    wire_dtype: torch.dtype | None  # of partial sums while they travel; None: the engine's choice
    told: tuple[Hashable, ...]  # what must be the same on every rank

    @property
    def scale(self) -> float:
        """Of the sum."""
        return 1 / self.group.world_size if self.average else 1.0

    @property
    def rows(self) -> list[int]:
        """As in `SumPlan`."""
        return self.plan.rows

    @property
    def engine(self) -> RunnableEngine:
        """That was chosen."""
        return self.plan.engine

    def made_of(self, given: Operands) -> torch.Tensor:
        """This rank's part of the sum."""
        made: torch.Tensor = self.op.forward[self.engine](self, given)
        return made

    @property
    def scales(self) -> list[torch.Tensor]:
        """Of fp8 operands."""
        return [] if self.scaling is None else self.scaling.tensors


class Operands(NamedTuple):
    """x (M, K_r), w (K_r, N), bias (N,), and residual laid out as this rank's part of the sum."""

    x: torch.Tensor
    w: torch.Tensor
    bias: torch.Tensor | None
    residual: torch.Tensor | None


class SumFunction(FusedFunction):
    """`Operands`, one by one -> y, this rank's rows of the sum."""

    @staticmethod
    def plain(call: SumCall, *operands: Any) -> torch.Tensor:
        return call.made_of(Operands(*operands))

    @staticmethod
    def forward(ctx: Any, call: SumCall, *operands: Any) -> torch.Tensor:
        ctx.save_for_backward(*operands[:2])
        ctx.call = call
        return SumFunction.plain(call, *operands)

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: SumCall = ctx.call
        *needs, needs_residual = ctx.needs_input_grad[1:]
        saved = ctx.saved_tensors

        def made() -> Gradients:
            return call.op.gradients(call, *conjugated(*saved), dy, needs)

        key = call.plan, call.average, call.dtype, call.wire_dtype, call.scaling is None, *needs
        grads = repeated_gradients(key, call.group, (*saved, dy), made)
        return None, *grads, dy if needs_residual else None


class _ScatteredSum(torch.autograd.Function):
    """reduce_scatter of partial sums. The gradients are cast to `dtype` before they travel."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        group: Group,
        dim: int,
        op: SumOp,
        dtype: torch.dtype,
        wire_dtype: torch.dtype | None,
    ) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.op, ctx.dtype, ctx.length = group, dim, op, dtype, x.shape[dim]
        if wire_dtype is None:
            return no_view(reduce_scatter(x, group, dim=dim, reduce_op=op))
        front, sizes = x.movedim(dim, 0).to(wire_dtype), chunk_sizes(ctx.length, group.world_size)
        y = movement.scatter(front, group, sizes, op, dim=dim, as_is=True)
        return no_view(y.movedim(0, dim).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sizes = chunk_sizes(ctx.length, ctx.group.world_size)
        out = all_gather(grad.to(ctx.dtype), ctx.group, dim=ctx.dim, sizes=sizes)
        return out / ctx.group.world_size if ctx.op == "avg" else out, *[None] * 5


@dataclass(frozen=True)
class FusedSum(FusedOp):
    """One of them: forward takes (`SumCall`, `Operands`).

    Attributes:
        gradients: (call, x, w, dy, needs) -> those of x, w and bias that are needed.
    """

    gradients: Callable[..., Gradients]

    def run(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        group: GroupLike,
        dim: int | None,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        reduce_op: SumOp,
        wire_dtype: torch.dtype | None,
        *scales: Any,
    ) -> torch.Tensor:
        """This rank's part of the sum over ranks of x @ w, + bias + residual.

        Args:
            dim: of the sum (*batch, N), cut among the ranks; None: every rank gets all of it.
            scales: scale_a, scale_b and out_dtype of fp8 operands.
        """
        scaling = scaling_of(self.name, x, [w], [bias, residual], *scales)
        dtype = scaling.out_dtype if scaling else x.dtype
        if is_call_traced(x):  # see `custom_ops`
            cut = () if dim is None else (dim,)
            rest = *cut, reduce_op, wire_dtype, *scales
            traced: torch.Tensor = self.traced(x, w, bias, group_name(group), *rest)
            return traced if residual is None else traced + residual
        group = resolve(group)
        operands = ("x", (*x.shape[:-1], "*")), ("w", ("*", *w.shape[1:]))
        told = reduce_op, x.dtype, *operands, ("dim", dim), ("wire_dtype", wire_dtype)
        check_call(group, lambda: call_of(self.name, told).text.decode())
        tensors = x, w, bias, residual, *(scaling.tensors if scaling else ())
        key = dim, reduce_op, dtype, wire_dtype, settings.multimem()

        def checked() -> SumPlan:
            check_sum(reduce_op)
            check_wire(wire_dtype, dtype)
            return self._checked(x, w, group, dim, bias, residual, dtype, wire_dtype)

        plan = fused_plan(self.name, group, key, tensors, checked)
        engine, dim, sizes, shape = plan.engine, plan.dim, plan.sizes, plan.shape
        if engine == "generic":
            partial = scaled_partial(x, w, scaling) if scaling else partial_matmul(x, w, wire_dtype)
            if dim is None:
                total = Summed.apply(partial, group, reduce_op, wire_dtype)
                return finished(total, bias, residual, dtype)
            total = _ScatteredSum.apply(partial, group, dim, reduce_op, dtype, wire_dtype)
            if bias is not None:
                bias = Spread.apply(bias, group)
                bias = bias.split(sizes)[group.rank] if dim == x.ndim - 1 else bias
            return finished(total, bias, residual, dtype)

        def matrix(of: torch.Tensor) -> torch.Tensor:
            """`of` as a matrix whose rows run along `dim` first."""
            return as_rows(of.movedim(dim, 0) if dim else of)

        flat = x if x.ndim == 2 and not dim else matrix(x)
        residual = None if residual is None else matrix(residual)
        scaling = scaling and replace(scaling, rows=matrix(scaling.rows))
        average = reduce_op == "avg"
        call = SumCall(self, group, plan, average, scaling, dtype, wire_dtype, told)
        made: torch.Tensor = self.apply(call, flat, w, bias, residual)
        if made.ndim != len(shape):
            made = made.view(*shape)  # given a list, it takes 3 us longer
        return made.movedim(0, dim) if dim else made

    def _checked(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        group: Group,
        dim: int | None,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        dtype: torch.dtype,
        wire_dtype: torch.dtype | None,
    ) -> SumPlan:
        """What a call of such operands comes to.

        Raises:
            ValueError: they do not fit.
            NotImplementedError: an engine was forced that cannot run the call.
        """
        if dim is None and x.ndim == 0:
            raise ValueError("x must have at least one dim")
        if dim is not None and (x.ndim < 2 or not -x.ndim <= dim < x.ndim):
            raise ValueError(
                f"x must have at least 2 dims and scatter_dim be a dim of the result, got shape "
                f"{tuple(x.shape)}, scatter_dim={dim}"
            )
        check_operands(x, x.shape[-1], [w], [bias], dtype)
        shape, sizes = [*x.shape[:-1], w.shape[1]], list[int]()
        if dim is not None:
            dim %= x.ndim
            sizes = chunk_sizes(shape[dim], group.world_size)
            shape[dim] = sizes[group.rank]
        check_residual(residual, shape, dtype, x.device)
        problem = self.problem(x, w, group, dim, wire_dtype)
        rows = [problem.M]
        if dim is not None:
            shape.insert(0, shape.pop(dim))
            rows = [size * math.prod(shape[1:-1]) for size in sizes]
        return SumPlan(choose(problem, group, x.device), dim, sizes, rows, shape)

    def problem(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        group: Group,
        dim: int | None,
        wire_dtype: torch.dtype | None = None,
    ) -> Problem:
        """What the choice of engine for a call, or for its gradient, depends on."""
        (K, N), W, M = w.shape, group.world_size, x.shape[:-1].numel()
        moved = M * N * (W - 1) if dim is None else M * N // W * (W - 1)
        why = "the scattered dim is that of the columns" if dim == x.ndim - 1 else ""
        nbytes = moved * (wire_dtype or sum_dtype(x)).itemsize
        return Problem(self.name, M, N, K, x.dtype, nbytes, why, wire_dtype=wire_dtype)


def summed_reference(
    xs: list[torch.Tensor],
    ws: list[torch.Tensor],
    bias: torch.Tensor | None = None,
    reduce_op: SumOp = "sum",
) -> torch.Tensor:
    """The whole sum, given all ranks' operands: the oracle of the tests, in any dtype."""
    y = torch.stack([torch.matmul(x, w) for x, w in zip(xs, ws, strict=True)]).sum(0)
    if reduce_op == "avg":
        y = y / len(xs)
    return y if bias is None else y + bias
