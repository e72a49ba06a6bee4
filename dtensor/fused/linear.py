"""Matmuls that are caught before autograd decomposes them, and fused with their communication.

Along one mesh dim, with rows meaning any dim but the last:

    x Shard(row), w Shard(columns)   gathers x while multiplying: all_gather_matmul
    x Shard(last), w Shard(rows)     is a Partial sum: it stays *pending* until it is first read. If
                                     it is redistributed before, the reduction is fused with it:
                                     matmul_reduce_scatter, matmul_all_reduce.

The backward of these is fused too, as they run on local tensors under autograd.

    x Replicate, w Shard(columns)    moves nothing forward. Backward dx = dy @ w is a Partial sum,
                                     and pending like any other: where the gradient is wanted whole,
                                     or as a shard of rows, its reduction is fused with it.

Whether a pending matmul is fused depends on nothing that only one rank knows: a rank may read the
value (print it) and still takes part in the fused call afterwards.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, cast

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional

from weft.collectives.ranks.group import here, is_traced
from weft.dtensor.dispatch.call import leaves
from weft.dtensor.dispatch.dispatch import dispatch
from weft.dtensor.layout.boxes import (
    Layout,
    Placements,
    contiguous_stride,
    is_shard,
    layout_of,
    shard_dim,
)
from weft.dtensor.layout.symbolic import cached
from weft.dtensor.move.explicit import check_explicit
from weft.dtensor.move.transfers import same_shard
from weft.dtensor.rules.matmul import linear as _linear_op
from weft.dtensor.rules.matmul import linear_input_grad, linear_weight_grad
from weft.dtensor.tensor import (
    DTensor,
    as_global,
    before_write,
    local_part,
    outside_result,
    wrap,
    wrap_pending,
)
from weft.dtensor.tracing.grad_recording import is_nothing, needs_grad, record
from weft.kernels import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter

_is_grad_enabled = torch.is_grad_enabled
_pending: weakref.WeakSet[PendingMatmul] = weakref.WeakSet()


def _settle(written: Any) -> None:
    """Compute the pending matmuls that a write concerns: gradients are accumulated all the time."""
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


before_write.append(_settle)


class PendingMatmul:
    """`x @ w.T`, its contraction sharded along one mesh dim: a Partial sum, not computed yet."""

    def __init__(
        self, x: DTensor, w: DTensor, bias: DTensor | None, layout: Layout, mesh_dim: int
    ) -> None:
        self.operands = (x, w, bias)
        self.layout, self.mesh_dim = layout, mesh_dim
        self.locals = tuple(None if t is None else t._local_tensor for t in self.operands)
        self.versions = [None if t is None else t._version for t in self.locals]
        self.result: torch.Tensor | None = None
        self.result_version = 0
        self.settled = False
        self.world = here.world
        _pending.add(self)

    def is_apart_from(self, storages: set[int]) -> bool:
        """Whether neither operands nor result lie in one of these."""
        own = _storages([t for t in (*self.locals, self.result) if t is not None])
        return own is not None and own.isdisjoint(storages)

    def _unchanged(self) -> bool:
        return all(
            t is None or t._version == v for t, v in zip(self.locals, self.versions, strict=True)
        )

    def value(self) -> torch.Tensor:
        """This rank's term of the sum; one rank of the mesh dim adds the bias."""
        if self.result is None:
            if not self._unchanged():
                raise RuntimeError(
                    "the local tensor of an operand was modified in place between a matmul and the "
                    "first use of its result. Modify DTensors, not their to_local(), or use the "
                    "result before."
                )
            x, w, bias = self.locals
            assert x is not None and w is not None
            # torch 2.11 multiplies symbolic sizes only by its Python dispatcher, which is off while
            # a tracer looks at values.
            symbolic = enable_python_dispatcher() if is_traced(x) else nullcontext()
            with torch.no_grad(), symbolic:
                own = bias if self.layout.coordinate[self.mesh_dim] == 0 else None
                self.result = functional.linear(x, w, own)
            self.result_version = self.result._version
        return self.result

    def redistribute(self, tensor: DTensor, target: Layout) -> DTensor | None:
        """The reduction and the matmul in one, where `target` reduces just this mesh dim."""
        x, w, bias = self.operands
        wanted = _fused_target(self.layout, target, self.mesh_dim)
        if wanted is None or self.settled or tensor._backward_hooks or tensor.retains_grad:
            return None
        if self.result is not None and self.result._version != self.result_version:
            return None
        if (tensor.requires_grad and tensor.grad_fn is None) or not self._unchanged():
            return None
        with torch.set_grad_enabled(torch.is_grad_enabled() and tensor.requires_grad):
            return _reduce_matmul(x, w, bias, target, self.mesh_dim)


@cached
def _fused_target(layout: Layout, target: Layout, mesh_dim: int) -> Placement | None:
    """The placement of the Partial mesh dim in `target`; None if no fused op can make it."""
    if target.mesh != layout.mesh or target.dtype != layout.dtype:
        return None
    for dim, (old, new) in enumerate(zip(layout.placements, target.placements, strict=True)):
        if dim != mesh_dim and old != new:
            return None
    wanted = target.placements[mesh_dim]
    if isinstance(wanted, Replicate):
        return wanted
    if type(wanted) is not Shard or wanted.dim >= len(layout.shape) - 1:
        return None
    # The scatter cuts what a rank has: right only if later mesh dims do not cut that dim again.
    later = layout.placements[mesh_dim + 1 :]
    return None if any(same_shard(p, wanted) for p in later) else wanted


def _role(x: Placement, w: Placement, n_dims: int) -> str | None:
    """What one mesh dim does in x @ w.T: gather, reduce, keep (no communication), or None."""
    if isinstance(x, Replicate):
        return "keep" if isinstance(w, Replicate) or w == Shard(0) else None
    if type(x) is not Shard:
        return None
    if x.dim == n_dims - 1:
        return "reduce" if w == Shard(1) else None
    if isinstance(w, Replicate):
        return "keep"
    return "gather" if w == Shard(0) else None


def _fused_dim(x: Layout, w: Layout, bias: Layout | None) -> tuple[str, int] | None:
    """(gather or reduce, mesh dim) if that is all the communication the matmul needs."""
    found: tuple[str, int] | None = None
    for dim, (xp, wp) in enumerate(zip(x.placements, w.placements, strict=True)):
        role = _role(xp, wp, len(x.shape))
        if role is None:
            return None
        if bias is not None:
            expected: Placement = Shard(0) if wp == Shard(0) else Replicate()
            if bias.placements[dim] != expected:
                return None
        if role != "keep":
            if found is not None or not x.place.ascends[dim]:
                return None
            found = role, dim
    if found is not None and found[0] == "gather":
        rest = x.placements[found[1] + 1 :]
        if any(same_shard(p, x.placements[found[1]]) for p in rest):
            return None
    return found


@cached
def _gradients(x: Layout, w: Layout) -> tuple[Placements, Placements, Placements]:
    """How the local gradients of x, w and bias make up the global ones."""
    of_x: list[Placement] = []
    of_w: list[Placement] = []
    of_bias: list[Placement] = []
    for xp, wp in zip(x.placements, w.placements, strict=True):
        of_x.append(Partial("sum") if isinstance(xp, Replicate) and is_shard(wp) else xp)
        # Rows that only this rank has seen give a term of the weight's gradient.
        rows = is_shard(xp) and isinstance(wp, Replicate)
        of_w.append(Partial("sum") if rows else wp)
        of_bias.append(Partial("sum") if rows else (wp if wp == Shard(0) else Replicate()))
    return tuple(of_x), tuple(of_w), tuple(of_bias)


def _gather_matmul(
    x: DTensor, w: DTensor, bias: DTensor | None, target: Layout, mesh_dim: int, keep: bool
) -> DTensor:
    source, placement = x._layout, x._layout.placements[mesh_dim]
    dim = shard_dim(placement)
    whole = [Replicate() if i == mesh_dim else p for i, p in enumerate(source.placements)]
    check_explicit(lambda: f"{source!r} @ {w._layout!r}", source, source.with_placements(whole))
    of_x, of_w, of_bias = _gradients(source, w._layout)
    y = all_gather_matmul(
        local_part(x, of_x),
        local_part(w, of_w).t(),
        source.mesh.get_group(mesh_dim),
        bias=None if bias is None else local_part(bias, of_bias),
        gather_dim=dim,
        keep_gathered=keep,
        sizes=_sizes_along(source, mesh_dim, dim),
    )
    return as_global(y, target)


def _sizes_along(layout: Layout, mesh_dim: int, tensor_dim: int) -> list[int]:
    """Local sizes of `tensor_dim` on the ranks that differ from this one in `mesh_dim` only."""
    before, after = layout.coordinate[:mesh_dim], layout.coordinate[mesh_dim + 1 :]
    coordinates = [(*before, i, *after) for i in range(layout.place.sizes[mesh_dim])]
    return [layout.shape_at(layout.place.index_of[c])[tensor_dim] for c in coordinates]


def _reduce_matmul(
    x: DTensor, w: DTensor, bias: DTensor | None, target: Layout, mesh_dim: int
) -> DTensor:
    source, wanted = x._layout, target.placements[mesh_dim]
    of_x, of_w, of_bias = _gradients(source, w._layout)
    group = source.mesh.get_group(mesh_dim)
    operands = local_part(x, of_x), local_part(w, of_w).t()
    own_bias = None if bias is None else local_part(bias, of_bias)
    if is_shard(wanted):
        y = matmul_reduce_scatter(*operands, group, bias=own_bias, scatter_dim=shard_dim(wanted))
    else:
        y = matmul_all_reduce(*operands, group, bias=own_bias)
    return as_global(y, target)


class _Linear(torch.autograd.Function):
    """`F.linear` on DTensors, without decomposing it into views and 2-d matmuls."""

    @staticmethod
    def forward(
        ctx: Any, x: DTensor, w: DTensor, bias: DTensor | None, pending: PendingMatmul | None
    ) -> DTensor:
        ctx.set_materialize_grads(False)
        # As in torch, a frozen operand keeps no activations alive, and these may be written.
        need_x, need_w, *_ = ctx.needs_input_grad
        ctx.by_columns = w._layout.stride[0] == 1 and w._layout.stride[1] != 1
        ctx.save_for_backward(x if need_w else None, w if need_x else None)
        if pending is not None:
            return wrap_pending(pending, pending.layout, x._local_tensor.device)
        return _run_linear(x, w, bias)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> Any:
        if is_nothing(grad):
            return None, None, None, None
        x, w = ctx.saved_tensors
        need_x, need_w, need_bias, _ = ctx.needs_input_grad
        batch = list(range(grad.ndim - 1))
        if torch.is_grad_enabled():
            of_x = grad.matmul(w) if need_x else None
            of_w = grad.flatten(0, -2).t() @ x.flatten(0, -2) if need_w else None
            return of_x, of_w, grad.sum(batch) if need_bias else None, None
        return (
            _input_grad(grad, w) if need_x else None,
            _weight_grad(grad, x, ctx.by_columns) if need_w else None,
            dispatch(torch.ops.aten.sum.dim_IntList, (grad, batch)) if need_bias else None,
            None,
        )


def _run_linear(x: DTensor, w: DTensor, bias: DTensor | None) -> DTensor:
    args = (x, w) if bias is None else (x, w, bias)
    return cast(DTensor, dispatch(_linear_op, args))


def _weight_grad(grad: DTensor, x: DTensor, by_columns: bool) -> DTensor:
    """grad.T @ x, laid out in memory as the weight: a copy of a sum over ranks would be reduced."""
    if not by_columns:
        return cast(DTensor, dispatch(linear_weight_grad, (grad, x)))
    transposed = cast(DTensor, dispatch(linear_weight_grad, (x, grad)))
    return wrap(transposed._local_tensor.t(), _transposed(transposed._layout))


def _input_grad(grad: DTensor, w: DTensor) -> DTensor:
    """grad @ w: pending, where it is a sum over ranks that can be fused with its reduction."""
    found = _pending_input_grad(grad._layout, w._layout)
    if found is None:
        return cast(DTensor, dispatch(linear_input_grad, (grad, w)))
    transposed, target, mesh_dim = found
    pending = PendingMatmul(grad, wrap(w._local_tensor.t(), transposed), None, target, mesh_dim)
    return wrap_pending(pending, target, grad._local_tensor.device)


@cached
def _pending_input_grad(grad: Layout, w: Layout) -> tuple[Layout, Layout, int] | None:
    """(layout of w.t(), layout of grad @ w, mesh dim of the sum), if it can be pending."""
    if grad.index is None or grad.dtype != w.dtype or not grad.dtype.is_floating_point:
        return None
    transposed = _transposed(w)
    fused = _fused_kind(grad, transposed, None)
    if fused is None or fused[0] != "reduce" or grad.place.sizes[fused[1]] == 1:
        return None
    return transposed, fused[2], fused[1]


_Fused = tuple[str, int, Layout] | None


@cached
def _fused_kind(x: Layout, w: Layout, bias: Layout | None) -> _Fused:
    """(gather or reduce, mesh dim, layout of the result); None if it takes the generic way."""
    result: _Fused = None
    found = _fused_dim(x, w, bias)
    if found is not None and 0 not in (*x.shape, *w.shape):
        last = len(x.shape) - 1
        placements: list[Placement] = []
        for dim, (xp, wp) in enumerate(zip(x.placements, w.placements, strict=True)):
            if dim == found[1]:
                placements.append(Shard(last) if found[0] == "gather" else Partial("sum"))
            else:
                placements.append(Shard(last) if is_shard(wp) else xp)
        shape = (*x.shape[:-1], w.shape[0])
        target = layout_of(x.mesh, tuple(placements), shape, contiguous_stride(shape), x.dtype)
        result = (*found, target)
    return result


def linear(
    input: Any, weight: Any, bias: Any = None, *, keep_gathered: bool = True, **out: Any
) -> Any:
    """`F.linear` of DTensors: fused with its communication where there is any.

    Args:
        keep_gathered: whether an input that is gathered is kept for the gradient of the weight;
            otherwise its shard is, and gathered again.
    """
    x, w = input, weight
    if out or not (
        isinstance(x, DTensor)
        and isinstance(w, DTensor)
        and (bias is None or isinstance(bias, DTensor))
    ):
        return NotImplemented
    lx, lw, lb = x._layout, w._layout, None if bias is None else bias._layout
    if (
        len(lx.shape) < 2
        or len(lw.shape) != 2
        or lx.shape[-1] != lw.shape[1]
        or (lb is not None and lb.shape != lw.shape[:1])
        or lx.mesh != lw.mesh
        or (lb is not None and lb.mesh != lx.mesh)
        or len({lx.dtype, lw.dtype, lx.dtype if lb is None else lb.dtype}) > 1
        or lx.dtype.is_complex
        or torch.is_autocast_enabled(x._layout.mesh.device_type)
        or _wraps_others(x)
        or _wraps_others(w)
    ):
        return NotImplemented
    fused = _fused_kind(lx, lw, lb) if lx.dtype.is_floating_point else None
    if fused is not None and lx.index is None:
        return outside_result(fused[2], x, w, bias)
    if fused is not None and fused[0] == "gather":
        return _gather_matmul(x, w, bias, fused[2], fused[1], keep_gathered)
    pending = None
    if fused is not None and not (x.is_inference() or w.is_inference()):
        pending = PendingMatmul(x, w, bias, fused[2], fused[1])
    if needs_grad(x) or needs_grad(w) or (bias is not None and needs_grad(bias)):
        return record(_Linear, x, w, bias, pending)
    if pending is not None:
        return wrap_pending(pending, pending.layout, x._local_tensor.device)
    return _run_linear(x, w, bias)


def linear_gathering_again(input: Any, weight: Any, bias: Any = None) -> Any:
    """`F.linear` that keeps the shard of an input, not the gathered one; a node in a graph."""
    result = linear(input, weight, bias, keep_gathered=False)
    return functional.linear(input, weight, bias) if result is NotImplemented else result


def allow_in_graphs() -> None:
    """Let torch.compile put `linear_gathering_again` into its graphs as it is."""
    # Not at import: importing torch's tracer takes as long as all of weft.dtensor.
    dynamo: Any = torch._dynamo
    dynamo.allow_in_graph(linear_gathering_again)


# What torch.compiler.assume_constant_result does, without its import.
allow_in_graphs._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_dtensor(a: Any) -> bool:
    return isinstance(a, DTensor)


def _wraps_others(x: DTensor) -> bool:
    """Whether the local tensor is a subclass made of other tensors, with ops of its own: fp8."""
    return hasattr(type(x._local), "__tensor_flatten__")  # not one that is pending: that is plain


def matmul(input: Any, other: Any, *, out: Any = None) -> Any:
    """`torch.matmul` with a matrix on the right."""
    if out is not None or not (isinstance(input, DTensor) and isinstance(other, DTensor)):
        return NotImplemented
    gain = _gain_as_linear(input._layout, other._layout)
    if gain is None or (gain == "backward" and not (_is_grad_enabled() and needs_grad(input))):
        return NotImplemented
    return linear(input, other.t())


def mm(input: Any, mat2: Any, out_dtype: Any = None, *, out: Any = None) -> Any:
    """`torch.mm`."""
    if out is not None or not (isinstance(input, DTensor) and isinstance(mat2, DTensor)):
        return NotImplemented
    gain = _gain_as_linear(input._layout, mat2._layout)
    if gain is None or (gain == "backward" and not (_is_grad_enabled() and needs_grad(input))):
        return NotImplemented
    if out_dtype is not None or len(input._layout.shape) != 2:
        return NotImplemented
    return linear(input, mat2.t())


def einsum(equation: Any, *operands: Any) -> Any:
    """`torch.einsum` that is a linear: "bsk,kn->bsn", and "bsk,nk->bsn"."""
    if not (isinstance(equation, str) and len(operands) == 2 and all(map(is_dtensor, operands))):
        return NotImplemented
    transposed = _as_product(equation)
    if transposed is None:
        return NotImplemented
    x, w = operands
    if not transposed:
        return matmul(x, w)
    gain = _gain_as_linear(x._layout, _transposed(w._layout)) if w.ndim == 2 else None
    if gain is None or (gain == "backward" and not (_is_grad_enabled() and needs_grad(x))):
        return NotImplemented
    return linear(x, w)


@lru_cache(maxsize=1024)
def _as_product(equation: str) -> bool | None:
    """Whether the weight is given as to `linear` (True) or to `matmul`; None for other einsums."""
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    x, _, w = inputs.partition(",")
    rows, k = x[:-1], x[-1:]
    if not (arrow and x.isalpha() and w.isalpha() and rows and len(w) == len({*w}) == 2):
        return None
    if len({*x}) < len(x) or k not in w:
        return None
    n = w.replace(k, "")
    return w[1] == k if n not in x and out == rows + n else None


@cached
def _gain_as_linear(x: Layout, w: Layout) -> str | None:
    """Where x @ w gains from being F.linear: "forward", as it is batched, or fused with
    communication; "backward", as the gradient of x is; None: nowhere.
    """
    if len(w.shape) != 2 or len(x.shape) < 2:
        return None
    as_given = _transposed(w)
    fused = _fused_kind(x, as_given, None)
    if len(x.shape) > 2 or fused is not None:
        return "forward"
    return "backward" if _sums_in_backward(x, as_given, None) else None


@cached
def _sums_in_backward(x: Layout, w: Layout, bias: Layout | None) -> bool:
    """Whether the gradient of x in x @ w.T + bias, which moves nothing, is a sum over ranks."""
    if len(x.shape) < 2 or len(w.shape) != 2 or x.mesh != w.mesh or (bias and bias.mesh != x.mesh):
        return False
    whole = False
    for dim, (xp, wp) in enumerate(zip(x.placements, w.placements, strict=True)):
        if _role(xp, wp, len(x.shape)) != "keep":
            return False
        if bias is not None and bias.placements[dim] != (wp if is_shard(wp) else Replicate()):
            return False
        whole = whole or is_shard(wp)
    return whole


@cached
def _transposed(layout: Layout) -> Layout:
    placements = tuple(Shard(1 - p.dim) if type(p) is Shard else p for p in layout.placements)
    return layout_of(layout.mesh, placements, layout.shape[::-1], layout.stride[::-1], layout.dtype)


def addmm(
    input: Any, mat1: Any, mat2: Any, out_dtype: Any = None,
    *, beta: Any = 1, alpha: Any = 1, out: Any = None,
) -> Any:  # fmt: skip
    """`torch.addmm` with a vector as summand."""
    if out is not None or out_dtype is not None or beta != 1 or alpha != 1:
        return NotImplemented
    if not all(map(is_dtensor, (input, mat1, mat2))) or input.ndim != 1:
        return NotImplemented
    if mat1.ndim != 2 or mat2.ndim != 2:
        return NotImplemented
    layouts = mat1._layout, _transposed(mat2._layout), input._layout
    if _fused_kind(*layouts) is None and not (_sums_in_backward(*layouts) and needs_grad(mat1)):
        return NotImplemented
    return linear(mat1, mat2.t(), input)
