"""`DTensor.__torch_function__`: calls that are seen before autograd takes them apart.

Matmuls, attention and cross-entropy run as fused ops (the modules beside this); embedding and norms
have gradients of their own. Functions that read values or memory, which no rank has of the
whole tensor, gather them or are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.distributed.tensor import Partial
from torch.nn import functional

from weft import settings
from weft.collectives.ranks.caches import KeptDict
from weft.dtensor.dispatch import backward
from weft.dtensor.dispatch.call import map_tree
from weft.dtensor.dispatch.dispatch import dispatch, learn, outermost
from weft.dtensor.dispatch.planning import plan_of
from weft.dtensor.dispatch.pricing import tell_choice
from weft.dtensor.fused.attention import attention, stride_like
from weft.dtensor.fused.grouped import grouped_matmul, scaled_grouped_matmul
from weft.dtensor.fused.loss import cross_entropy
from weft.dtensor.fused.products import addmm, bmm, einsum, is_dtensor, linear, matmul, mm
from weft.dtensor.layout.boxes import layout_of
from weft.dtensor.layout.placements import is_shard, shard_dim
from weft.dtensor.rules.nn import embedding_weight_grad
from weft.dtensor.rules.norm import row_norm_op
from weft.dtensor.tensor import DTensor, as_global, local_part, outside_result
from weft.dtensor.tracing.exporting import is_exported
from weft.dtensor.tracing.grad_recording import apply, is_nothing
from weft.dtensor.tracing.graph_breaks import unless_traced


class _Embedding(torch.autograd.Function):
    """Lookup whose gradient is placed as the weight is."""

    @staticmethod
    def forward(ctx: Any, weight: DTensor, indices: DTensor, padding_idx: int) -> DTensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(indices)
        # Only its layout is read, so it may be written before the backward.
        ctx.weight, ctx.padding_idx = weight.detach(), padding_idx
        op = torch.ops.aten.embedding.default
        return cast(DTensor, dispatch(op, (weight, indices, padding_idx)))

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> Any:
        if is_nothing(grad):
            return None, None, None
        (indices,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            op = torch.ops.aten.embedding_dense_backward
            return op(grad, indices, ctx.weight.shape[0], ctx.padding_idx, False), None, None
        args = (grad, indices, ctx.weight, ctx.padding_idx)
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
    """`F.embedding`, of a weight sharded by rows or columns; its gradient is never sparse."""
    if not (is_dtensor(input) and is_dtensor(weight)):
        return NotImplemented
    if max_norm is not None or scale_grad_by_freq:
        return NotImplemented
    if padding_idx is None:
        return apply(_Embedding, weight, input, -1)
    rows = weight.shape[0]
    if not -rows <= padding_idx < rows:
        return NotImplemented  # torch raises the right error
    return apply(_Embedding, weight, input, padding_idx % rows)


def _row_norm(function: Any, x: Any, shape: Any, weights: tuple[Any, ...], eps: Any) -> Any:
    """A norm over the last dims, if each rank holds whole rows: it norms its own."""
    if not is_dtensor(x) or not all(w is None or is_dtensor(w) for w in weights):
        return NotImplemented
    layout = x._layout
    n_batch = len(layout.shape) - len(shape)
    if tuple(shape) != layout.shape[n_batch:] or torch.is_autocast_enabled(layout.mesh.device_type):
        return NotImplemented
    placed = [w._layout for w in weights if w is not None]
    if any(of_weight.mesh != layout.mesh for of_weight in placed):
        return NotImplemented
    if settings.tracing() and layout.index is not None:
        plan = plan_of(row_norm_op, layout, len(shape), *placed)
        tell_choice(function.__name__, plan.considered, plan.way, layout, *placed)
    # What moves nothing is the cheapest: each rank norms its own rows. Else aten's rule places all.
    for placement in layout.placements:
        if isinstance(placement, Partial) or shard_dim(placement) >= n_batch:
            return NotImplemented
    if not all(of_weight.is_replicated for of_weight in placed):
        return NotImplemented
    if layout.index is None:
        return outside_result(layout, x, *weights)
    of_weight = tuple(Partial("sum") if is_shard(p) else p for p in layout.placements)
    own = [None if w is None else local_part(w, of_weight) for w in weights]
    y = function(local_part(x, layout.placements), shape, *own, eps)
    if not layout.is_contiguous:  # nor need the result be laid out as x is
        stride = stride_like(y, layout.shape)
        layout = layout_of(layout.mesh, layout.placements, layout.shape, stride, layout.dtype)
    return as_global(y, layout if y.dtype == layout.dtype else layout.with_dtype(y.dtype))


def layer_norm(
    x: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    """`F.layer_norm`, where each row is whole on its rank."""
    return _row_norm(functional.layer_norm, x, normalized_shape, (weight, bias), eps)


def rms_norm(
    input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Any:
    """`F.rms_norm`, where each row is whole on its rank."""
    return _row_norm(functional.rms_norm, input, normalized_shape, (weight,), eps)


def instance_norm(
    x: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """`F.instance_norm`, where samples are sharded: group norm with groups of one channel."""
    given = running_mean is not None or not use_input_stats
    if not is_dtensor(x) or given or 0 not in x._layout.cut_dims:
        return NotImplemented
    if x.shape[2:].numel() < 2:
        return NotImplemented  # torch raises the right error
    return functional.group_norm(x, x.shape[1], weight, bias, eps)


def one_hot(input: Any, num_classes: int = -1) -> Any:
    """`F.one_hot`; without `num_classes` it takes the largest index of all ranks."""
    if num_classes == -1:
        num_classes = int(input.max().item()) + 1
    return dispatch(functional.one_hot, (input, num_classes))


def linear_cross_entropy(*args: Any, options: Any = None, **kwargs: Any) -> Any:
    """`F.linear_cross_entropy`, not in chunks: torch makes plain tensors to hold their results."""
    if options is None:
        return NotImplemented
    return functional.linear_cross_entropy(*args, **kwargs)


def tensor_split(input: Any, where: Any = None, dim: int = 0, **named: Any) -> Any:
    """`torch.tensor_split`, which reads the values of indices that are a tensor."""
    where = named.get("tensor_indices_or_sections", where)
    if not isinstance(where, torch.Tensor):
        return NotImplemented
    whole = where.full_tensor() if isinstance(where, DTensor) else where
    return torch.tensor_split(input, whole.tolist(), dim)


def split(x: Any, size: Any, dim: int = 0) -> Any:
    """`torch.split` and the method, without their Python code, which takes 2 us."""
    if isinstance(size, torch.Tensor):
        return NotImplemented
    functions: Any = torch._C._VariableFunctions
    with torch._C.DisableTorchFunctionSubclass():
        if isinstance(size, (list, tuple)):
            return functions.split_with_sizes(x, size, dim)
        return functions.split(x, size, dim)


def as_strided(input: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.as_strided`, refused for views: it would address the memory of the whole base."""
    if is_dtensor(input) and input._is_view():
        raise NotImplementedError(
            f"as_strided of a view, {input._layout}: a DTensor has no memory that could be read "
            f"across ranks. Index the base instead, or clone() the view first"
        )
    return NotImplemented


def to(x: Any, *args: Any, **kwargs: Any) -> Any:
    """`x.to(device or dtype)`: x itself, if it has that already."""
    if len(args) != 1 or kwargs or not is_dtensor(x):
        return NotImplemented
    wanted = args[0]
    had = {torch.device: x.device, torch.dtype: x.dtype}.get(type(wanted))
    return x if had == wanted else NotImplemented


def new(x: Any, *size: Any, **named: Any) -> Any:
    """`Tensor.new` of sizes: LBFGS makes zeros by it, for parameters without a gradient."""
    if named or not size or not all(isinstance(n, (int, torch.Size)) for n in size):
        return NotImplemented
    return x.new_empty(*size)


def is_same_size(input: Any, other: Any) -> bool:
    """`torch.is_same_size`, of whatever kind of tensor the other is."""
    return bool(input.shape == other.shape)


def no_memory(x: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse what reads or writes memory directly, which no rank has all of: numpy(), apply_()."""
    raise RuntimeError(
        f"{x._layout!r} is spread over ranks and has no memory of its own: use "
        f"full_tensor().numpy() for all of it (on every rank), to_local().numpy() for this rank's "
        f"part, to_local().apply_(f) to write that; safetensors can save full_tensor()"
    )


def share_memory_(x: Any) -> Any:
    """`Tensor.share_memory_`, of this rank's part."""
    x._local_tensor.share_memory_()
    return x


def formatted(x: Any, spec: str) -> str:
    """`f"{x:.3f}"` of one number. Collective where `item()` is."""
    return format(x.item(), spec) if spec and x.ndim == 0 else object.__format__(x, spec)


def _recurrent(function: Callable[..., Any]) -> Callable[..., Any]:
    """Handle a recurrent layer or cell: the plain zeros of its initial state become DTensors."""

    def run(input: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_dtensor(input):
            return NotImplemented
        mesh, made = input._layout.mesh, []

        def placed(a: Any) -> Any:
            if type(a) is torch.Tensor and a.dim() > 1 and is_nothing(a):
                made.append(a)
                return DTensor.from_local(a, mesh)
            return a

        args = map_tree(args, placed)
        return function(input, *args, **kwargs) if made else NotImplemented

    return run


def no_packing(input: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse packed sequences, whose kernels read lengths from memory that no DTensor has."""
    if not is_dtensor(input):
        return NotImplemented
    raise NotImplementedError(
        f"sequences of {input._layout!r} cannot be packed or unpacked: pass padded sequences, and "
        f"mask what follows their ends; or pack to_local(), if sequences are whole on their ranks"
    )


def is_complex(input: Any) -> bool:
    """`torch.is_complex`, which optimizers ask of every parameter."""
    return bool(input.dtype.is_complex)


# A handler gets a call's arguments as they were passed: its parameters have the names of torch's.
_Handler = Callable[..., Any]

_RECURRENT = (
    torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu,
    torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell,
)  # fmt: skip
_handlers: dict[Any, _Handler] = {
    functional.linear: linear,
    torch.matmul: matmul,
    torch.Tensor.matmul: matmul,
    torch.Tensor.__matmul__: matmul,
    torch.mm: mm,
    torch.Tensor.mm: mm,
    torch.bmm: bmm,
    torch.Tensor.bmm: bmm,
    torch.addmm: addmm,
    torch.Tensor.addmm: addmm,
    torch.einsum: einsum,
    functional.scaled_dot_product_attention: attention,
    functional.cross_entropy: cross_entropy,
    functional.embedding: embedding,
    torch._grouped_mm: grouped_matmul,
    torch._scaled_grouped_mm: scaled_grouped_matmul,
    functional.one_hot: one_hot,
    torch.tensor_split: tensor_split,
    torch.Tensor.tensor_split: tensor_split,
    torch.split: split,
    torch.Tensor.split: split,
    torch.as_strided: as_strided,
    torch.Tensor.as_strided: as_strided,
    functional.layer_norm: layer_norm,
    functional.rms_norm: rms_norm,
    torch.rms_norm: rms_norm,
    functional.instance_norm: instance_norm,
    torch.Tensor.to: to,
    torch.Tensor.new: new,
    torch.Tensor.numpy: no_memory,
    torch.Tensor.__array__: no_memory,
    torch.Tensor.__dlpack__: no_memory,
    torch.Tensor.storage: no_memory,
    torch.Tensor.apply_: no_memory,
    torch.Tensor.map_: no_memory,
    torch.Tensor.map2_: no_memory,
    torch.Tensor.share_memory_: share_memory_,
    torch.Tensor.__format__: formatted,
    torch.is_complex: is_complex,
    torch._VF._pack_padded_sequence: no_packing,
    torch._VF._pad_packed_sequence: no_packing,
    torch.Tensor.backward: backward.of_tensor,
    torch.autograd.backward: backward.backward,
    torch.autograd.grad: backward.grad,
    torch.is_same_size: is_same_size,
    **{function: _recurrent(function) for function in _RECURRENT},
    torch.Tensor.is_same_size: is_same_size,
}
if hasattr(functional, "linear_cross_entropy"):  # of torch 2.13
    _handlers[functional.linear_cross_entropy] = linear_cross_entropy
_UNHANDLED: Any = NotImplemented
# Runs a function without `__torch_function__`, quicker than a `with` block does.
_below_functions = torch._C._disabled_torch_function_impl
_is_grad_enabled, _grad = torch.is_grad_enabled, torch.autograd.grad
_is_compiling = torch.compiler.is_compiling
_count_modes, _is_autocast = torch._C._len_torch_dispatch_stack, torch._C._is_any_autocast_enabled
# Whether a call of the form (function, number of arguments, *keywords) is known to be one op.
_is_an_op = KeptDict[tuple[Any, ...], bool](4096, f"{__name__}._is_an_op")


def _has_functions_of_its_own(kind: Any) -> bool:
    default = getattr(torch.Tensor.__torch_function__, "__func__", None)
    own = getattr(kind.__torch_function__, "__func__", None)
    return not issubclass(kind, DTensor) and own is not default


@unless_traced
def _torch_function(
    cls: type, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
) -> Any:
    handler = _handlers.get(func)
    if handler is not None and not is_exported():
        result = handler(*args, **kwargs) if kwargs else handler(*args)
        if result is not _UNHANDLED:
            return result
    if len(types) > 1 and any(map(_has_functions_of_its_own, types)):
        return NotImplemented  # a quantized weight, say, which does the call by its own rules
    ops: list[Any] | None = None
    if not (_is_grad_enabled() or _is_compiling()):
        form = (func, len(args), *kwargs) if kwargs else (func, len(args))
        known = _is_an_op.get(form)
        # Does torch's dispatcher do more than autograd: modes, autocast, forward-mode AD?
        watched = _count_modes() > 0 or _is_autocast() or forward_ad._current_level >= 0
        if known is not False and not watched:
            result = dispatch(func, args, kwargs, known=True) if known else _UNHANDLED
            if result is not _UNHANDLED:
                return result
            ops = []
    before = outermost.call
    # Plain tensors inside of a backward, or of torch's own Python code, are not the user's mistake.
    of_torch = func is _grad or (type(func) is OpOverload and func.namespace == "prims")
    outermost.call = None if of_torch else (args, kwargs), ops
    try:
        result = _below_functions(func, types, args, kwargs or {})
        if ops is not None:
            is_an_op = learn(func, args, kwargs or {}, result)
            if form not in _is_an_op:
                _is_an_op[form] = is_an_op
        return result
    finally:
        outermost.call = before


DTensor.__torch_function__ = classmethod(_torch_function)  # type: ignore[assignment, method-assign]
