"""Calls that are seen before autograd takes them apart: matmul, attention, embedding.

Along one mesh dim, with rows meaning any dim but the last:

    x Shard(row), w Shard(columns)   gathers x while multiplying: all_gather_matmul
    x Shard(last), w Shard(rows)     is a Partial sum: it stays *pending*, and is computed when
                                     somebody looks at it. Redistributed first, the reduction is
                                     fused with it: matmul_reduce_scatter, matmul_all_reduce.

The backward of these is fused too, as they run on local tensors under autograd. Whether a pending
matmul is fused depends on nothing that only one rank knows: a rank may look at the value (print it)
and still takes part in the fused call afterwards.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, cast

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional

from weft.collectives import chunk_sizes
from weft.collectives.group import forget_meshes
from weft.dtensor.dispatch import dispatch, outermost
from weft.dtensor.layout import (
    Layout,
    Placements,
    contiguous_stride,
    is_shard,
    layout_of,
    shard_dim,
)
from weft.dtensor.rules_index import one_hot as _one_hot_op
from weft.dtensor.rules_matmul import linear as _linear_op
from weft.dtensor.rules_matmul import linear_input_grad, linear_weight_grad
from weft.dtensor.rules_nn import embedding_weight_grad
from weft.dtensor.tensor import (
    DTensor,
    _FromLocal,
    _redistribute,
    _ToLocal,
    before_write,
    needs_grad,
    wrap,
    wrap_pending,
)
from weft.dtensor.transfers import same_shard
from weft.kernels import (
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
    ring_attention,
)

_pending: weakref.WeakSet[PendingMatmul] = weakref.WeakSet()


def _settle_all() -> None:
    # Which tensor is written, and who shares its memory, does not matter: writes are rare between a
    # matmul and the use of its result. Versions cannot tell: below autograd nobody counts them.
    for pending in list(_pending):
        pending.value()
        pending.settled = True
        _pending.discard(pending)


before_write.append(_settle_all)


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
        _pending.add(self)

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
            with torch.no_grad():
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


def _fused_target(layout: Layout, target: Layout, mesh_dim: int) -> Placement | None:
    """What `target` makes of the Partial mesh dim; None where no fused op gives it."""
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
            if found is not None:
                return None
            found = role, dim
    if found is not None and found[0] == "gather":
        rest = x.placements[found[1] + 1 :]
        if any(same_shard(p, x.placements[found[1]]) for p in rest):
            return None
    return found


def _gradients(x: Placements, w: Placements) -> tuple[Placements, Placements, Placements]:
    """How the local gradients of x, w and bias make up the global ones."""
    of_x: list[Placement] = []
    of_w: list[Placement] = []
    of_bias: list[Placement] = []
    for xp, wp in zip(x, w, strict=True):
        of_x.append(Partial("sum") if isinstance(xp, Replicate) and is_shard(wp) else xp)
        # Rows that only this rank has seen give a term of the weight's gradient.
        rows = is_shard(xp) and isinstance(wp, Replicate)
        of_w.append(Partial("sum") if rows else wp)
        of_bias.append(Partial("sum") if rows else (wp if wp == Shard(0) else Replicate()))
    return tuple(of_x), tuple(of_w), tuple(of_bias)


def _local(tensor: DTensor, grad_placements: Placements) -> torch.Tensor:
    if needs_grad(tensor):
        return cast(torch.Tensor, _ToLocal.apply(tensor, grad_placements))
    return tensor._local_tensor


def _global(local: torch.Tensor, layout: Layout) -> DTensor:
    if local.requires_grad:
        grad_placements = tuple(
            Replicate() if isinstance(p, Partial) else p for p in layout.placements
        )
        return cast(DTensor, _FromLocal.apply(local, local.detach(), layout, grad_placements))
    return wrap(local, layout)


def _gather_matmul(
    x: DTensor, w: DTensor, bias: DTensor | None, target: Layout, mesh_dim: int
) -> DTensor:
    source, placement = x._layout, x._layout.placements[mesh_dim]
    dim = shard_dim(placement)
    of_x, of_w, of_bias = _gradients(source.placements, w._layout.placements)
    y = all_gather_matmul(
        _local(x, of_x),
        _local(w, of_w).t(),
        source.mesh.get_group(mesh_dim),
        bias=None if bias is None else _local(bias, of_bias),
        gather_dim=dim,
        sizes=_sizes_along(source, mesh_dim, dim),
    )
    return _global(y, target)


def _sizes_along(layout: Layout, mesh_dim: int, tensor_dim: int) -> list[int]:
    """Local sizes of `tensor_dim` on the ranks that differ from this one in `mesh_dim` only."""
    before, after = layout.coordinate[:mesh_dim], layout.coordinate[mesh_dim + 1 :]
    coordinates = [(*before, i, *after) for i in range(layout.place.sizes[mesh_dim])]
    return [layout.shape_at(layout.place.index_of[c])[tensor_dim] for c in coordinates]


def _reduce_matmul(
    x: DTensor, w: DTensor, bias: DTensor | None, target: Layout, mesh_dim: int
) -> DTensor:
    source, wanted = x._layout, target.placements[mesh_dim]
    of_x, of_w, of_bias = _gradients(source.placements, w._layout.placements)
    group = source.mesh.get_group(mesh_dim)
    operands = _local(x, of_x), _local(w, of_w).t()
    own_bias = None if bias is None else _local(bias, of_bias)
    if is_shard(wanted):
        y = matmul_reduce_scatter(*operands, group, bias=own_bias, scatter_dim=shard_dim(wanted))
    else:
        y = matmul_all_reduce(*operands, group, bias=own_bias)
    return _global(y, target)


class _Linear(torch.autograd.Function):
    """`F.linear` on DTensors, without taking it apart into views and 2-d matmuls."""

    @staticmethod
    def forward(
        ctx: Any, x: DTensor, w: DTensor, bias: DTensor | None, pending: PendingMatmul | None
    ) -> DTensor:
        ctx.save_for_backward(x, w)
        ctx.bias_ndim = None if bias is None else bias.ndim
        if pending is not None:
            return wrap_pending(pending, pending.layout, x._local_tensor.device)
        return _run_linear(x, w, bias)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> Any:
        x, w = ctx.saved_tensors
        need_x, need_w, need_bias, _ = ctx.needs_input_grad
        batch = list(range(grad.ndim - 1))
        if torch.is_grad_enabled():
            of_x = grad.matmul(w) if need_x else None
            of_w = grad.flatten(0, -2).t() @ x.flatten(0, -2) if need_w else None
            return of_x, of_w, grad.sum(batch) if need_bias else None, None
        return (
            dispatch(linear_input_grad, (grad, w)) if need_x else None,
            dispatch(linear_weight_grad, (grad, x)) if need_w else None,
            dispatch(torch.ops.aten.sum.dim_IntList, (grad, batch)) if need_bias else None,
            None,
        )


def _run_linear(x: DTensor, w: DTensor, bias: DTensor | None) -> DTensor:
    args = (x, w) if bias is None else (x, w, bias)
    return cast(DTensor, dispatch(_linear_op, args))


_Fused = tuple[str, int, Layout] | None
_fused_cache: dict[tuple[Layout, Layout, Layout | None], _Fused] = {}
forget_meshes.append(_fused_cache.clear)


def _fused_kind(x: Layout, w: Layout, bias: Layout | None) -> _Fused:
    """(gather or reduce, mesh dim, layout of the result), None where the generic way is taken."""
    key = (x, w, bias)
    if key in _fused_cache:
        return _fused_cache[key]
    if len(_fused_cache) >= 1024:
        _fused_cache.clear()
    result: _Fused = None
    found = _fused_dim(x, w, bias)
    if found is not None and x.index is not None and 0 not in (*x.shape, *w.shape):
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
    _fused_cache[key] = result
    return result


def linear(x: Any, w: Any, bias: Any = None) -> Any:
    """`F.linear` of DTensors: fused with its communication where there is any."""
    if not (_is_dtensor(x) and _is_dtensor(w) and (bias is None or _is_dtensor(bias))):
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
        or torch.is_autocast_enabled(x._layout.mesh.device_type)
    ):
        return NotImplemented
    fused = _fused_kind(lx, lw, lb) if lx.dtype.is_floating_point else None
    if fused is not None and fused[0] == "gather":
        return _gather_matmul(x, w, bias, fused[2], fused[1])
    pending = None
    if fused is not None and not (x.is_inference() or w.is_inference()):
        pending = PendingMatmul(x, w, bias, fused[2], fused[1])
    if needs_grad(x) or needs_grad(w) or (bias is not None and needs_grad(bias)):
        return _Linear.apply(x, w, bias, pending)
    if pending is not None:
        return wrap_pending(pending, pending.layout, x._local_tensor.device)
    return _run_linear(x, w, bias)


def _is_dtensor(a: Any) -> bool:
    return isinstance(a, DTensor)


def matmul(x: Any, w: Any, *, out: Any = None) -> Any:
    """`torch.matmul` with a matrix on the right."""
    if out is not None or not (_is_dtensor(x) and _is_dtensor(w)) or w.ndim != 2 or x.ndim < 2:
        return NotImplemented
    if x.ndim == 2 and _fused_kind(x._layout, _transposed(w._layout), None) is None:
        return NotImplemented
    return linear(x, w.t())


@lru_cache(maxsize=1024)
def _transposed(layout: Layout) -> Layout:
    placements = tuple(Shard(1 - p.dim) if type(p) is Shard else p for p in layout.placements)
    return layout_of(layout.mesh, placements, layout.shape[::-1], layout.stride[::-1], layout.dtype)


forget_meshes.append(_transposed.cache_clear)


def addmm(bias: Any, x: Any, w: Any, *, beta: Any = 1, alpha: Any = 1, out: Any = None) -> Any:
    """`torch.addmm` with a vector as summand."""
    if out is not None or beta != 1 or alpha != 1 or not _is_dtensor(bias) or bias.ndim != 1:
        return NotImplemented
    if not (_is_dtensor(x) and _is_dtensor(w)):
        return NotImplemented
    if _fused_kind(x._layout, _transposed(w._layout), bias._layout) is None:
        return NotImplemented
    return linear(x, w.t(), bias)


def _attention_dim(
    dim: int, q: Layout, k: Layout, v: Layout, whole_rows: bool
) -> tuple[Placement, Placement]:
    """How q, and how k and v, are placed along one mesh dim."""
    n_batch = len(q.shape) - 2
    placements = [t.placements[dim] for t in (q, k, v)]
    for p in placements:
        if type(p) is Shard and p.dim < n_batch:
            heads = {t.shape[p.dim] for t in (q, k, v)}
            cuts = q.place.sizes[dim] * q.place.sizes[0] * q.place.sizes[-1]
            if len(heads) == 1 or all(n % cuts == 0 for n in heads):
                return p, p
    if whole_rows and placements[0] == Shard(n_batch):
        return Shard(n_batch), Replicate()
    return Replicate(), Replicate()


def _mask_placement(mask: Layout, q: Layout, placement: Placement) -> Placement:
    if not is_shard(placement):
        return Replicate()
    own = shard_dim(placement) - (len(q.shape) - len(mask.shape))
    return Shard(own) if own >= 0 and mask.shape[own] != 1 else Replicate()


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`F.scaled_dot_product_attention`: batch, heads, and (not causal) rows of q may be sharded."""
    if not all(map(_is_dtensor, (query, key, value))):
        return NotImplemented
    if attn_mask is not None and not _is_dtensor(attn_mask):
        return NotImplemented
    q, k, v = query._layout, key._layout, value._layout
    if not len(q.shape) == len(k.shape) == len(v.shape) or not q.mesh == k.mesh == v.mesh:
        return NotImplemented
    if dropout_p > 0:
        return _attention_step_by_step(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
    around = [d for d in range(q.mesh.ndim) if _cut_by_sequence(d, q, k, v)]
    heads_fit = q.shape[1:2] == k.shape[1:2] or enable_gqa
    if len(around) == 1 and attn_mask is None and k.shape == v.shape and heads_fit:
        return _attention_around(around[0], query, key, value, is_causal, scale)
    pairs = [_attention_dim(d, q, k, v, not is_causal) for d in range(q.mesh.ndim)]
    rows, shared = tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)
    # Rows of q that only this rank has give a term of the gradients of k and v.
    of_shared = tuple(Partial("sum") if is_shard(a) and not is_shard(b) else b for a, b in pairs)
    q_local = _local(_redistribute(query, q.with_placements(rows)), rows)
    k_local = _local(_redistribute(key, k.with_placements(shared)), of_shared)
    v_local = _local(_redistribute(value, v.with_placements(shared)), of_shared)
    mask_local = None
    if attn_mask is not None:
        mask = attn_mask._layout
        placed = tuple(_mask_placement(mask, q, p) for p in rows)
        of_mask = tuple(
            Partial("sum") if is_shard(p) and not is_shard(m) else m
            for p, m in zip(rows, placed, strict=True)
        )
        mask_local = _local(_redistribute(attn_mask, mask.with_placements(placed)), of_mask)
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    target_shape = (*q.shape[:-1], v.shape[-1])

    def run() -> torch.Tensor:
        if q_local.numel() == 0:
            # A rank without heads or rows takes part in the gradients of what it was given.
            used = [t.sum() for t in (q_local, k_local, v_local, mask_local) if t is not None]
            return q_local.new_zeros(*q_local.shape[:-1], v.shape[-1]) + 0 * sum(used)
        return functional.scaled_dot_product_attention(
            q_local, k_local, v_local, mask_local, 0.0, is_causal, **options
        )

    y = run()
    stride = stride_like(y, target_shape)
    return _global(y, layout_of(q.mesh, rows, target_shape, stride, y.dtype))


def _cut_by_sequence(dim: int, q: Layout, k: Layout, v: Layout) -> bool:
    """Whether query, key and value (batch, heads, sequence, width) share a mesh dim by sequence."""
    if len(q.shape) != 4 or q.place.sizes[dim] == 1:
        return False
    return all(t.placements[dim] == Shard(2) for t in (q, k, v))


def _attention_around(
    dim: int, query: DTensor, key: DTensor, value: DTensor, is_causal: bool, scale: float | None
) -> Any:
    """Attention to keys that lie along mesh dim `dim`: ring attention, with nothing gathered."""
    q, k, v = query._layout, key._layout, value._layout
    rows = tuple(
        Shard(2) if d == dim else _attention_dim(d, q, k, v, False)[0] for d in range(q.mesh.ndim)
    )
    parts = [
        _local(_redistribute(t, t._layout.with_placements(rows)), rows) for t in (query, key, value)
    ]
    world_size = q.place.sizes[dim]
    y = ring_attention(
        parts[0],
        parts[1],
        parts[2],
        q.mesh.get_group(dim),
        causal=is_causal,
        scale=scale,
        sizes=chunk_sizes(q.shape[2], world_size),
        key_sizes=chunk_sizes(k.shape[2], world_size),
    )
    shape = (*q.shape[:-1], v.shape[-1])
    return _global(y, layout_of(q.mesh, rows, shape, stride_like(y, shape), y.dtype))


def _attention_step_by_step(
    query: DTensor,
    key: DTensor,
    value: DTensor,
    attn_mask: DTensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Any:
    """Attention whose weights are a DTensor, so that dropout drops what one device would drop."""
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key = cast(DTensor, key.repeat_interleave(times, -3))
        value = cast(DTensor, value.repeat_interleave(times, -3))
    root = math.sqrt(query.shape[-1] ** -0.5 if scale is None else scale)
    weights: Any = (query * root) @ (key.transpose(-2, -1) * root)
    if is_causal:
        rows_and_columns = weights.shape[-2:]
        seen = torch.ones(rows_and_columns, dtype=torch.bool, device=weights.device).tril()
        attn_mask = _global(
            seen,
            layout_of(
                query._layout.mesh,
                (Replicate(),) * query._layout.mesh.ndim,
                tuple(seen.shape),
                seen.stride(),
                seen.dtype,
            ),
        )
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        weights = weights.masked_fill(attn_mask.logical_not(), -math.inf)
    elif attn_mask is not None:
        weights = weights + attn_mask
    weights = functional.dropout(weights.softmax(-1), dropout_p)
    return weights @ value


def stride_like(local: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor of `shape` whose dims lie in memory in the order of `local`'s."""
    order = sorted(range(len(shape)), key=lambda d: (local.stride(d), -d))
    stride, step = [0] * len(shape), 1
    for d in order:
        stride[d] = step
        step *= max(shape[d], 1)
    return tuple(stride)


class _Embedding(torch.autograd.Function):
    """Lookup whose gradient is placed as the weight is."""

    @staticmethod
    def forward(ctx: Any, weight: DTensor, indices: DTensor, padding_idx: int) -> DTensor:
        ctx.save_for_backward(weight, indices)
        ctx.padding_idx = padding_idx
        op = torch.ops.aten.embedding.default
        return cast(DTensor, dispatch(op, (weight, indices, padding_idx)))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: DTensor) -> Any:
        weight, indices = ctx.saved_tensors
        args = (grad, indices, weight, ctx.padding_idx)
        return dispatch(embedding_weight_grad, args), None, None


def embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """`F.embedding`, of a weight sharded by rows or columns."""
    if not (_is_dtensor(input) and _is_dtensor(weight)):
        return NotImplemented
    if max_norm is not None or scale_grad_by_freq or sparse:
        return NotImplemented
    pad = -1 if padding_idx is None else padding_idx % weight.shape[0]
    return _Embedding.apply(weight, input, pad)


def _row_norm(function: Any, x: Any, shape: Any, weights: tuple[Any, ...], eps: Any) -> Any:
    """A norm over the last dims, on each rank's rows."""
    if not _is_dtensor(x) or not all(w is None or _is_dtensor(w) for w in weights):
        return NotImplemented
    layout = x._layout
    n_batch = len(layout.shape) - len(shape)
    if tuple(shape) != layout.shape[n_batch:] or torch.is_autocast_enabled(layout.mesh.device_type):
        return NotImplemented
    for placement in layout.placements:
        if isinstance(placement, Partial) or shard_dim(placement) >= n_batch:
            return NotImplemented
    for w in weights:
        if w is not None and (w._layout.mesh != layout.mesh or not w._layout.is_replicated):
            return NotImplemented
    of_weight = tuple(Partial("sum") if is_shard(p) else p for p in layout.placements)
    own = [None if w is None else _local(w, of_weight) for w in weights]
    y = function(_local(x, layout.placements), shape, *own, eps)
    return _global(y, layout if y.dtype == layout.dtype else layout.with_dtype(y.dtype))


def layer_norm(
    x: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    """`F.layer_norm` of rows that no rank shares."""
    return _row_norm(functional.layer_norm, x, normalized_shape, (weight, bias), eps)


def rms_norm(x: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """`F.rms_norm` of rows that no rank shares."""
    return _row_norm(functional.rms_norm, x, normalized_shape, (weight,), eps)


def one_hot(tensor: Any, num_classes: int = -1) -> Any:
    """`F.one_hot`; without `num_classes` it takes the largest index of all ranks."""
    if num_classes == -1:
        num_classes = int(tensor.max().item()) + 1
    return dispatch(_one_hot_op, (tensor, num_classes))


def tensor_split(x: Any, where: Any = None, dim: int = 0, **named: Any) -> Any:
    """`torch.tensor_split`, which reads the indices that it is given as a tensor."""
    where = named.get("tensor_indices_or_sections", where)
    if not isinstance(where, torch.Tensor):
        return NotImplemented
    whole = where.full_tensor() if isinstance(where, DTensor) else where
    return torch.tensor_split(x, whole.tolist(), dim)


def as_strided(x: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.as_strided`: only of what is no view, as it addresses the memory of the base."""
    if _is_dtensor(x) and x._is_view():
        raise NotImplementedError(
            f"as_strided of a view, {x._layout}: a DTensor has no memory that could be read across "
            f"ranks. Index the base instead, or clone() the view first"
        )
    return NotImplemented


_aten = torch.ops.aten
_Handler = Callable[..., Any]

_handlers: dict[Any, _Handler] = {
    functional.linear: linear,
    torch.matmul: matmul,
    torch.Tensor.matmul: matmul,
    torch.Tensor.__matmul__: matmul,
    torch.mm: matmul,
    torch.Tensor.mm: matmul,
    torch.addmm: addmm,
    torch.Tensor.addmm: addmm,
    functional.scaled_dot_product_attention: attention,
    functional.embedding: embedding,
    functional.one_hot: one_hot,
    torch.tensor_split: tensor_split,
    torch.Tensor.tensor_split: tensor_split,
    torch.as_strided: as_strided,
    torch.Tensor.as_strided: as_strided,
    functional.layer_norm: layer_norm,
    functional.rms_norm: rms_norm,
    torch.rms_norm: rms_norm,
}
# Without autograd these functions are just the op: no need to go through torch's dispatcher.
_direct: dict[Any, Any] = {
    function: op
    for op, functions in {
        _aten.add.Tensor: (torch.add, torch.Tensor.add, torch.Tensor.__add__),
        _aten.sub.Tensor: (torch.sub, torch.Tensor.sub, torch.Tensor.__sub__),
        _aten.mul.Tensor: (torch.mul, torch.Tensor.mul, torch.Tensor.__mul__),
        _aten.div.Tensor: (torch.div, torch.Tensor.div, torch.Tensor.__truediv__),
        _aten.relu.default: (torch.relu, torch.Tensor.relu),
    }.items()
    for function in functions
}
_UNHANDLED: Any = NotImplemented


def _torch_function(
    cls: type, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
) -> Any:
    handler = _handlers.get(func)
    if handler is not None:
        result = handler(*args, **kwargs) if kwargs else handler(*args)
        if result is not _UNHANDLED:
            return result
    elif func in _direct and not kwargs and not torch.is_grad_enabled():
        return dispatch(_direct[func], args)
    before, outermost.arguments = outermost.arguments, (args, kwargs)
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs) if kwargs else func(*args)
    finally:
        outermost.arguments = before


DTensor.__torch_function__ = classmethod(_torch_function)  # type: ignore[assignment, method-assign]
