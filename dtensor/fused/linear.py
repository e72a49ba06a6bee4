"""How products run as the fused ops that their plans name (`rules.products` has the candidates).

    all_gather_matmul    at once, on local tensors under autograd: its backward is fused too
    pending              the result has no value yet. If it is redistributed before it is read, so
                         that one sum over ranks is reduced, the reduction is fused with the
                         product: matmul_all_reduce, or matmul_reduce_scatter of rows or features

Whether a pending product is fused depends on nothing that only one rank knows: a rank may read the
value (print it) and still takes part in the fused call afterwards.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from weft import settings
from weft.collectives.ranks.group import here
from weft.collectives.ranks.traced import is_traced
from weft.dtensor.dispatch.call import PENDING, Op, leaves
from weft.dtensor.dispatch.dispatch import dispatch, run_plan
from weft.dtensor.dispatch.planning import CallPlan, plan_of
from weft.dtensor.dispatch.pricing import tell_choice
from weft.dtensor.layout.boxes import Layout, layout_of
from weft.dtensor.layout.placements import Placements, is_shard, shard_dim
from weft.dtensor.layout.symbolic import cached
from weft.dtensor.move.explicit import check_explicit
from weft.dtensor.move.redistribute import move
from weft.dtensor.move.transfers import move_plan, same_shard
from weft.dtensor.rules.products import (
    linear_input_grad,
    linear_product,
    linear_weight_grad,
    reduction_us,
    stack_product,
    stacked,
)
from weft.dtensor.tensor import (
    DTensor,
    as_global,
    before_write,
    local_part,
    outside_result,
    redistributed,
    wrap,
    wrap_pending,
)
from weft.dtensor.tracing.grad_recording import apply, is_nothing, needs_grad, no_function
from weft.kernels import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter

_pending: weakref.WeakSet[PendingProduct] = weakref.WeakSet()


def _compute_written(written: Any) -> None:
    """Compute the pending products that a write concerns: gradients are accumulated often."""
    if not len(_pending):
        return
    storages = None if written is None else _storages(leaves(written))
    # Those of other virtual ranks are left alone: a rank must take the same path as its peers.
    for pending in [p for p in _pending if p.world is here.world]:
        if storages is None or not pending.is_apart_from(storages):
            pending.value()
            pending.settled = True
            _pending.discard(pending)


def _storages(tensors: Iterable[Any]) -> set[int] | None:
    """What identifies the memory of each (versions are not counted below autograd).

    None if one has none of its own: a view that is a copy, a pending result, a tensor in a graph.
    """
    found = set()
    for tensor in tensors:
        local: Any = tensor._local if isinstance(tensor, DTensor) else tensor
        if type(local) not in (torch.Tensor, torch.nn.Parameter):
            return None
        found.add(local.untyped_storage()._cdata)
    return found


before_write.append(_compute_written)


class Product(NamedTuple):
    """A kind of product.

    Attributes:
        op: its op, of `rules.products`.
        by_rows: whether the second operand is (N, K), as F.linear takes it, rather than (K, N).
    """

    op: Op
    by_rows: bool = False


LINEAR = Product(linear_product, by_rows=True)
STACK = Product(stack_product)
_INPUT_GRAD = Product(linear_input_grad)
_Operands = tuple[DTensor, DTensor, "DTensor | None"]


class PendingProduct:
    """A product that is a Partial sum, not computed yet; the plan's moves only cut replicas."""

    def __init__(self, product: Product, plan: CallPlan, operands: _Operands) -> None:
        self.product, self.plan, self.operands = product, plan, operands
        self.layout: Layout = plan.result
        # Of its own, as torch.utils.swap_tensors gives operands those of other tensors.
        given = [t for t in operands if t is not None]
        self.locals, self.layouts = [t._local_tensor for t in given], [t._layout for t in given]
        self.counted = [*self.locals, *_bases_of(given)]
        self.versions = [local._version for local in self.counted]
        self.result: torch.Tensor | None = None
        self.result_version = 0
        self.settled = False
        self.world = here.world
        _pending.add(self)

    def is_apart_from(self, storages: set[int]) -> bool:
        """Whether neither operands nor result lie in one of these."""
        own = _storages(self.locals if self.result is None else [*self.locals, self.result])
        return own is not None and own.isdisjoint(storages)

    def _unchanged(self) -> bool:
        return all(t._version == v for t, v in zip(self.counted, self.versions, strict=True))

    def value(self) -> torch.Tensor:
        """This rank's term of the sum; one rank of each mesh dim that is summed adds the bias."""
        if self.result is None:
            if not self._unchanged():
                raise RuntimeError(
                    "the local tensor of an operand was modified in place between a matmul and the "
                    "first use of its result. Modify DTensors, not their to_local(), or use the "
                    "result before."
                )
            # torch 2.11 multiplies symbolic sizes only by its Python dispatcher, which is off while
            # a tracer looks at values.
            symbolic = enable_python_dispatcher() if self._is_traced() else nullcontext()
            with torch.no_grad(), symbolic:
                self.result = self.plan.local(*self._own_operands())
            self.result_version = self.result._version
        return self.result

    def _is_traced(self) -> bool:
        return is_traced(self.locals[0])

    def _own_operands(self) -> list[torch.Tensor]:
        own = []
        for i, (local, layout) in enumerate(zip(self.locals, self.layouts, strict=True)):
            target = None if self.plan.moves is None else self.plan.moves[i]
            if target is None:
                own.append(local)
            elif i < 2:
                own.append(move(local, layout, target))
            elif not any(
                isinstance(p, Partial) and at
                for p, at in zip(target.placements, target.coordinate, strict=True)
            ):
                own.append(move(local, layout, _without_sums(target)))
        return own

    def redistribute(self, tensor: DTensor, target: Layout) -> DTensor | None:
        """The reduction and the product in one, where `target` reduces one mesh dim."""
        mesh_dim, why = _reduction(self.layout, target, self.operands[1]._layout)
        if not why:
            why = self._why_not(tensor)
        if why:
            if settings.tracing():
                shapes = f"{self.layout!r} -> {target!r}"
                settings.record(self.product.op.__name__, "shards", f"not fused: {why}", shapes)
            return None
        with torch.set_grad_enabled(torch.is_grad_enabled() and tensor.requires_grad):
            return _reduced_product(self.product, self.plan, self.operands, target, mesh_dim)

    def _why_not(self, tensor: DTensor) -> str:
        if self.settled or not self._unchanged():
            return "an operand has been written since"
        now = [t._local_tensor for t in self.operands if t is not None]
        if any(local is not own for local, own in zip(now, self.locals, strict=True)):
            return "an operand has been swapped since"
        if self.result is not None and self.result._version != self.result_version:
            return "its value has been written"
        if tensor._backward_hooks or tensor.retains_grad:
            return "its own gradient is asked for"
        bias = self.operands[2]
        if bias is not None and any(isinstance(p, Partial) for p in bias._layout.placements):
            return "its summand is a sum itself"
        return "it was detached" if tensor.requires_grad and tensor.grad_fn is None else ""


def _bases_of(tensors: Sequence[DTensor]) -> list[torch.Tensor]:
    """The local tensors of what these are views of: local views have versions of their own."""
    with no_function():
        bases = [t._base for t in tensors if t._is_view()]
    return [b._local for b in bases if isinstance(b, DTensor) and b._local is not None]


def _without_sums(layout: Layout) -> Layout:
    return layout.with_placements(layout.gradient_placements)


@cached
def _reduction(total: Layout, target: Layout, w: Layout) -> tuple[int, str]:
    """(the mesh dim that a fused op reduces, why none can)."""
    if target.mesh != total.mesh or target.dtype != total.dtype:
        return 0, "the mesh or the dtype changes"
    pairs = enumerate(zip(total.placements, target.placements, strict=True))
    changed = [dim for dim, (old, new) in pairs if old != new]
    if len(changed) != 1:
        return 0, "several mesh dims change"
    (dim,) = changed
    wanted = target.placements[dim]
    if total.placements[dim] != Partial("sum"):
        return dim, "what changes is no sum"
    if not isinstance(wanted, Replicate):
        if type(wanted) is not Shard:
            return dim, f"no fused op scatters into {wanted}"
        # The scatter cuts what a rank has: right only if later mesh dims do not cut that dim again.
        if any(same_shard(p, wanted) for p in total.placements[dim + 1 :]):
            return dim, f"a later mesh dim cuts dim {wanted.dim} again"
        if len(w.shape) > 2 and wanted.dim < len(w.shape) - 2:
            return dim, "it scatters the stack"
    if not total.place.ascends[dim]:
        return dim, "its ranks are not in the order of their group"
    count = stacked(w)
    if count != 1:
        fused, unfused = reduction_us(total, dim, wanted, count)
        if fused > unfused:
            return dim, f"{count} of them are dearer, {fused:.3g} us against {unfused:.3g}"
    return dim, ""


@cached
def gradients_of(out: Layout, *operands: Layout) -> tuple[Placements, ...]:
    """How the local gradients of the operands of a product make up the global ones."""

    def of(p: Placement, result: Placement, is_bias: bool) -> Placement:
        if is_shard(p) or isinstance(result, Replicate):
            return p if is_shard(p) else Replicate()
        # What only this rank has seen gives a term; all ranks have the gradient of a whole sum.
        whole = isinstance(p, Partial) or (is_bias and isinstance(result, Partial))
        return Replicate() if whole else Partial("sum")

    return tuple(
        tuple(of(p, r, i == 2) for p, r in zip(t.placements, out.placements, strict=True))
        for i, t in enumerate(operands)
    )


def _own_parts(plan: CallPlan, operands: _Operands, out: Layout) -> list[torch.Tensor | None]:
    """The local operands of a fused op whose result is placed as `out`; differentiable."""
    tensors = [t for t in operands if t is not None]
    moves = plan.moves or [None] * len(tensors)
    placed = [_without_sums(m) if i == 2 and m else m for i, m in enumerate(moves)]
    targets = [m or t._layout for m, t in zip(placed, tensors, strict=True)]
    grads = gradients_of(out, *targets)
    own: list[torch.Tensor | None] = [
        local_part(t, g, m) for t, g, m in zip(tensors, grads, placed, strict=True)
    ]
    return own if len(own) == 3 else [*own, None]


def _gathered_product(plan: CallPlan, product: Product, operands: _Operands, keep: bool) -> DTensor:
    target: Layout = plan.result
    x, w, bias = _own_parts(plan, operands, target)
    assert x is not None and w is not None
    moved = None if plan.moves is None else plan.moves[0]
    source, mesh_dim = moved or operands[0]._layout, plan.way_dim
    dim = shard_dim(source.placements[mesh_dim])
    whole = [Replicate() if i == mesh_dim else p for i, p in enumerate(source.placements)]
    named = f"{source!r} @ {operands[1]._layout!r}"
    check_explicit(lambda: named, source, source.with_placements(whole))
    group, sizes = source.mesh.get_group(mesh_dim), _sizes_along(source, mesh_dim, dim)

    def gather(x: torch.Tensor, w: torch.Tensor, dim: int) -> torch.Tensor:
        y: torch.Tensor = all_gather_matmul(
            x, w, group, bias=bias, gather_dim=dim, keep_gathered=keep, sizes=sizes
        )
        return y

    if product.op is stack_product:
        return as_global(_for_each_pair(lambda x, w: gather(x, w, 0), x, w, target), target)
    return as_global(gather(x, w.t() if product.by_rows else w, dim), target)


def _for_each_pair(
    run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    w: torch.Tensor,
    target: Layout,
) -> torch.Tensor:
    """`run` for each pair of two stacks of matrices."""
    batch = x.shape[:-2]
    pairs = zip(x.flatten(0, -3).unbind(), w.flatten(0, -3).unbind(), strict=True)
    found = [run(*pair) for pair in pairs]
    if not found:
        return x.new_zeros(target.local_shape) + 0 * (x.sum() + w.sum())
    whole: torch.Tensor = torch.stack(found).unflatten(0, batch)
    return whole


def _sizes_along(layout: Layout, mesh_dim: int, tensor_dim: int) -> list[int]:
    """Local sizes of `tensor_dim` on the ranks that differ from this one in `mesh_dim` only."""
    before, after = layout.coordinate[:mesh_dim], layout.coordinate[mesh_dim + 1 :]
    coordinates = [(*before, i, *after) for i in range(layout.place.sizes[mesh_dim])]
    return [layout.shape_at(layout.place.index_at(c))[tensor_dim] for c in coordinates]


def _reduced_product(
    product: Product, plan: CallPlan, operands: _Operands, target: Layout, mesh_dim: int
) -> DTensor:
    wanted, group = target.placements[mesh_dim], target.mesh.get_group(mesh_dim)
    x, w, bias = _own_parts(plan, operands, plan.result)
    assert x is not None and w is not None
    last = len(target.shape) - 1

    def reduce(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y: Any
        if not is_shard(wanted):
            y = matmul_all_reduce(x, w, group, bias=bias)
        elif shard_dim(wanted) < last:
            # Of a stack, each product is a matrix.
            dim = shard_dim(wanted) - (last + 1 - x.ndim)
            y = matmul_reduce_scatter(x, w, group, bias=bias, scatter_dim=dim)
        else:  # features are the rows of the transposed product
            rows = x.flatten(0, -2).t()
            y = matmul_reduce_scatter(w.t(), rows, group).t().unflatten(0, x.shape[:-1])
        return cast(torch.Tensor, y)

    if product.op is stack_product:
        return as_global(_for_each_pair(reduce, x, w, target), target)
    y = reduce(x, w.t() if product.by_rows else w)
    if operands[2] is not None and shard_dim(wanted) == last:
        y = y + _own_features(operands[2], target, mesh_dim)
    return as_global(y, target)


def _own_features(bias: DTensor, out: Layout, mesh_dim: int) -> torch.Tensor:
    """The part of a bias that goes with the features of `out` on this rank."""
    last = len(out.shape) - 1
    placements = [Shard(0) if shard_dim(p) == last else Replicate() for p in out.placements]
    target = bias._layout.with_placements(placements)
    return local_part(bias, gradients_of(out, target, target)[0], target)


class _Product(torch.autograd.Function):
    """A product of DTensors, without decomposing it into views and 2-d matmuls."""

    @staticmethod
    def forward(
        ctx: Any, x: DTensor, w: DTensor, bias: DTensor | None, product: Product, plan: CallPlan
    ) -> DTensor:
        ctx.set_materialize_grads(False)
        # As in torch, a frozen operand keeps no activations alive, and these may be written.
        need_x, need_w, *_ = ctx.needs_input_grad
        ctx.product = product
        ctx.by_columns = w._layout.stride[0] == 1 and w._layout.stride[1] != 1
        ctx.save_for_backward(x if need_w else None, w if need_x else None)
        return _run_below(product, plan, (x, w, bias))

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> Any:
        if is_nothing(grad):
            return None, None, None, None, None
        x, w = ctx.saved_tensors
        need_x, need_w, need_bias, *_ = ctx.needs_input_grad
        if ctx.product is STACK:
            return (
                multiply(STACK, grad, w.mT) if need_x else None,
                multiply(STACK, x.mT, grad) if need_w else None,
                None, None, None,
            )  # fmt: skip
        batch = list(range(grad.ndim - 1))
        if torch.is_grad_enabled():
            of_x = grad.matmul(w) if need_x else None
            of_w = grad.flatten(0, -2).t() @ x.flatten(0, -2) if need_w else None
            return of_x, of_w, grad.sum(batch) if need_bias else None, None, None
        return (
            multiply(_INPUT_GRAD, grad, w) if need_x else None,
            _weight_grad(grad, x, ctx.by_columns) if need_w else None,
            dispatch(torch.ops.aten.sum.dim_IntList, (grad, batch)) if need_bias else None,
            None,
            None,
        )


def _weight_grad(grad: DTensor, x: DTensor, by_columns: bool) -> DTensor:
    """grad.T @ x, laid out in memory as the weight: a copy of a sum over ranks would be reduced."""
    pair = (x, grad) if by_columns else (grad, x)
    plan = plan_of(linear_weight_grad, *[t._layout for t in pair])
    made = cast(DTensor, run_plan(plan, *pair))
    return wrap(made._local_tensor.t(), transposed(made._layout)) if by_columns else made


def _run_below(product: Product, plan: CallPlan, operands: _Operands) -> DTensor:
    """Run a product below autograd; one that is a sum is left pending."""
    if plan.way is None or plan.decomposed is not None or operands[0].is_inference():
        return cast(DTensor, run_plan(plan, *operands))
    pending = PendingProduct(product, plan, operands)
    return wrap_pending(pending, plan.result, operands[0]._local_tensor.device)


def multiply(
    product: Product, x: DTensor, w: DTensor, bias: DTensor | None = None, *, keep: bool = True
) -> DTensor:
    """The product in the way of its plan; differentiable.

    Args:
        keep: whether an x that is gathered is kept for the gradient of w; otherwise its shard is,
            and gathered again.
    """
    operands = (x, w, bias)
    given = [t for t in operands if t is not None]
    layouts = [t._layout for t in given]
    plan = plan_of(product.op, *layouts)
    tell_choice(product.op.__name__, plan.considered, plan.way, *layouts)
    if plan.way is not None:
        if x._layout.index is None:
            return outside_result(plan.result, x, w, bias)
        moves = plan.moves
        if bias is not None and moves is not None and moves[2] is not None:
            # One rank alone adds it to a sum, so that what it takes of others comes before.
            whole = _without_sums(moves[2])
            if not _only_cuts([whole], [bias]):
                return multiply(product, x, w, placed_for(plan.title, bias, whole), keep=keep)
        if moves is not None and not _only_cuts(moves[:2], given[:2]):
            # A fused op is run on what has been moved before, so that each of both is done once.
            placed_x, placed_w = (
                t if m is None else placed_for(plan.title, t, m)
                for t, m in zip((x, w), moves[:2], strict=True)
            )
            return multiply(product, placed_x, placed_w, bias, keep=keep)
        if plan.way.name != PENDING:
            if bias is not None and any(isinstance(p, Partial) for p in plan.result.placements):
                # Each rank of another mesh dim has a term of a sum, to which it is added once.
                return cast(DTensor, multiply(product, x, w, keep=keep) + bias)
            return _gathered_product(plan, product, operands, keep)
    if needs_grad(*given):
        return cast(DTensor, apply(_Product, x, w, bias, product, plan))
    return _run_below(product, plan, operands)


def _only_cuts(moves: Sequence[Layout | None], given: Sequence[DTensor]) -> bool:
    """Whether the moves communicate nothing."""
    return all(
        m is None or all(step.is_local for step in move_plan(t._layout.closed(), m.closed()).steps)
        for m, t in zip(moves, given, strict=True)
    )


def placed_for(title: str, tensor: DTensor, target: Layout) -> DTensor:
    """`tensor` in the layout that a call's plan has for it; `title` is the call, for messages."""
    check_explicit(lambda: title, tensor._layout, target)
    return redistributed(tensor, target)


@cached
def transposed(layout: Layout) -> Layout:
    """The layout of the transposed matrix."""
    placements = tuple(Shard(1 - p.dim) if type(p) is Shard else p for p in layout.placements)
    return layout_of(layout.mesh, placements, layout.shape[::-1], layout.stride[::-1], layout.dtype)
