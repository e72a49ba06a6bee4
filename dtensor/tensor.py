"""`DTensor`: a tensor that knows its global shape, and holds this rank's part of it.

It is a wrapper: shape, stride and dtype are the global tensor's, the data is a plain local tensor.
`weft.dtensor.dispatch.dispatch` runs operations on it; `weft.dtensor.fused.functional` runs calls
that are better seen before autograd decomposes them (matmul, attention). Both install themselves
here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from weft.collectives.ranks.reports import check_all
from weft.dtensor.checkpoint import items
from weft.dtensor.layout.boxes import Layout, layout_of, layout_of_spec
from weft.dtensor.layout.placements import Placements, check_dense, normalize, show
from weft.dtensor.layout.places import mesh_or_current
from weft.dtensor.layout.runs import Shape
from weft.dtensor.layout.symbolic import relate
from weft.dtensor.move.local_parts import check_parts, layout_of_parts
from weft.dtensor.move.redistribute import Arriving, move, move_async
from weft.dtensor.tracing.exporting import refuse_export
from weft.dtensor.tracing.grad_recording import (
    apply,
    check_outside_func,
    is_nothing,
    needs_grad,
    no_function,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

_make_wrapper, _strided = torch.Tensor._make_wrapper_subclass, torch.strided
_grad: Any = torch._C.TensorBase.grad
_device: Any = torch._C.TensorBase.device

# Called with the tensor, or list of them, that is about to be written (None: any), as results that
# are deferred, and depend on it, must be computed first.
before_write: list[Callable[[Any], None]] = []


class Pending(Protocol):
    """A local result that is computed when it is first read."""

    def value(self) -> torch.Tensor:
        """The local tensor."""
        ...

    def redistribute(self, tensor: DTensor, target: Layout) -> DTensor | None:
        """`tensor` in another layout without computing its value; None if that is impossible."""
        ...


def wrap(local: torch.Tensor, layout: Layout) -> DTensor:
    """The `DTensor` with `local` as this rank's part. No checks, no autograd."""
    # By position, as keywords take 0.2 us of 1.3: storage offset, memory format, dtype, layout.
    tensor: DTensor = _make_wrapper(
        DTensor, layout.shape, layout.stride, 0, None, layout.dtype, _strided, local.device
    )
    tensor._local = local
    tensor._layout = layout
    return tensor


def wrap_pending(pending: Pending, layout: Layout, device: torch.device) -> DTensor:
    """A `DTensor` whose local tensor is computed on first use."""
    tensor: DTensor = _make_wrapper(
        DTensor, layout.shape, strides=layout.stride, dtype=layout.dtype, device=device
    )
    tensor._local = None
    tensor._layout = layout
    tensor._pending = pending
    return tensor


class DTensor(torch.Tensor):
    """A tensor distributed over a `DeviceMesh`, with the API of `torch.distributed.tensor.DTensor`.

    Make one by `DTensor.from_local`, `distribute_tensor` or a factory (`zeros`, `randn`, ...).
    """

    # No __slots__: torch.utils.swap_tensors, which module._apply calls, wants equal ones.
    _local: torch.Tensor | None
    _layout: Layout
    _pending: Pending | None = None
    # How often its shape was changed in place; for a view, how often its base's had been.
    _reshapes: int = 0

    @staticmethod
    @torch._disable_dynamo  # type: ignore[attr-defined]  # it would look at what is half made
    def __new__(
        cls, local_tensor: torch.Tensor, spec: Layout | DTensorSpec, *, requires_grad: bool = False
    ) -> DTensor:
        """Wrap `local_tensor` as this rank's part of `spec`. No communication, no autograd."""
        layout = spec if isinstance(spec, Layout) else layout_of_spec(spec)
        return cast(DTensor, wrap(local_tensor, layout).requires_grad_(requires_grad))

    # torch.Tensor has no __init__ of its own: the arguments are __new__'s.
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    @staticmethod
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[Placement] | None = None,
    ) -> DTensor:
        """The DTensor whose local tensors are given. Differentiable.

        Args:
            local_tensor: this rank's part.
            device_mesh: default: the mesh of the enclosing `with mesh:`.
            placements: one per mesh dim; default: `Replicate` on all.
            run_check: compare shapes, dtypes and requires_grad across ranks, and make replicas
                equal to the first rank's. This communicates.
            shape, stride: of the global tensor, both or none. Without them the ranks exchange the
                lengths of their shards (3 us on top of waiting for the last rank; over several
                hosts a small collective); on GPUs of several hosts every shard is assumed to be as
                long as this one. A graph of torch.compile assumes so too, and raises if it is not
                the case.
            grad_placements: of the gradient that arrives here, before its local part is passed on.
                Default: `placements`, with `Replicate` for `Partial`.

        Raises:
            ValueError: `local_tensor` does not have the shape that the layout gives this rank,
                whose shards are those of `torch.chunk`.
            RuntimeError: a DTensor was given, or `shape` without `stride`.
            NotImplementedError: `local_tensor` is sparse, nested or quantized; or under a
                transform of torch.func.
        """
        given = device_mesh, placements, run_check, grad_placements
        if torch.compiler.is_compiling():
            key = _kept_for_graph(given)  # also allows the next call in the graph
            return _from_local_in_graph(local_tensor, key, shape, stride)
        return _from_local(local_tensor, *given, shape, stride)

    @property
    def _local_tensor(self) -> torch.Tensor:
        if self._local is None:
            assert self._pending is not None
            return self._pending.value()
        return self._local

    @_local_tensor.setter
    def _local_tensor(self, local: torch.Tensor) -> None:
        # Set by torch.compile, which gives a tangent the strides for which it was traced.
        self._local, self._pending = local, None

    @property
    def _spec(self) -> DTensorSpec:
        # Private in torch as well, but read by frameworks: mesh, placements, tensor_meta.
        return self._layout.spec

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's part. Differentiable; shares its memory.

        Args:
            grad_placements: how the ranks' gradients of it make up the global one. Default: the
                tensor's placements, with `Replicate` for `Partial`. Use `Partial()` if each rank
                uses a replica for something else.
        """
        check_all()
        layout = self._layout
        wanted = layout.gradient_placements
        if grad_placements is not None:
            wanted = normalize(grad_placements, len(layout.shape), layout.mesh.ndim)
        return local_part(self, wanted)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor, on every rank. Collective, differentiable."""
        whole = self._layout.replicated()
        if grad_placements is None:
            return redistributed(self, whole).to_local()
        return self.redistribute(None, whole.placements).to_local(grad_placements=grad_placements)

    def tolist(self) -> Any:
        """The numbers of the whole tensor. Collective."""
        numbers = self.full_tensor().tolist()
        check_all()  # of what the host has just waited for
        return numbers

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """The same tensor with other placements. Collective, differentiable, out of place.

        If the result of a matmul is `Partial` and still unused, its reduction is fused with it.

        Args:
            device_mesh: default: the tensor's. Another mesh may have other ranks, of any number;
                the ranks of both make the call.
            placements: one per mesh dim.
            async_op: return once this rank's part is published; the rest is fetched when the result
                is first read (by `to_local`, or an operation on it). No need to wait for it. On a
                GPU every redistribution is enqueued, and the host never waits.
            forward_dtype: the dtype to communicate in, and of the result.
            backward_dtype: the dtype in which the gradient is communicated.

        Raises:
            RuntimeError: no placements, or a new `Partial` among them.
        """
        layout = self._layout
        if placements is None:
            raise RuntimeError(
                "placements is needed for redistribute! One per mesh dim, as in "
                "redistribute(placements=[Replicate()])"
            )
        mesh = device_mesh or layout.mesh
        wanted = normalize(placements, len(layout.shape), mesh.ndim)
        for dim, placement in enumerate(wanted):
            if isinstance(placement, Partial) and (
                mesh != layout.mesh or layout.placements[dim] != placement
            ):
                raise RuntimeError(
                    f"Can not redistribute to Partial, redistributing to Partial is for internal "
                    f"use only! {show(layout.placements)} -> {show(wanted)}"
                )
        target = layout.with_placements(wanted)
        if mesh is not layout.mesh:
            target = layout_of(mesh, wanted, layout.shape, layout.stride, layout.dtype)
        if layout == target and forward_dtype in (None, layout.dtype) and needs_grad(self):
            # Nothing moves, but the gradient must get the tensor's placements, however it arrives.
            return cast(DTensor, apply(_Redistribute, self, target, backward_dtype, False))
        return redistributed(self, target, forward_dtype, backward_dtype, async_op)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh that it is placed on."""
        return self._layout.mesh

    @property
    def placements(self) -> Placements:
        """One placement per mesh dim."""
        return self._layout.placements

    # Read all the time; inherited, each would be a call of __torch_function__.
    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size(self._layout.shape)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self._layout.dtype

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self._layout.shape)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        if self._local is not None:
            return self._local.device
        with no_function():
            return cast(torch.device, _device.__get__(self))

    @property
    def is_sparse(self) -> bool:  # type: ignore[override]
        return False

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient."""
        with no_function():
            return cast("torch.Tensor | None", _grad.__get__(self))

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        with no_function():
            _grad.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        with no_function():
            _grad.__delete__(self)

    @property
    def data(self) -> DTensor:
        """The same values, detached from autograd. Setting it replaces values and layout."""
        alias = wrap(self._local_tensor, self._layout)
        # A copied view stays one, so that writes to it are stored in its base.
        if self._local is None:
            alias._local, alias._pending = None, self._pending
        return alias

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, DTensor):
            raise RuntimeError(
                f"the data of a DTensor can only be set to a DTensor, got a torch.Tensor of shape "
                f"{tuple(value.shape)}: distribute_tensor it first"
            )
        become(self, value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"DTensor(local_tensor={self._local_tensor}, device_mesh={self._layout.mesh}, "
            f"placements={self._layout.placements})"
        )

    # What torch.distributed.checkpoint asks of a tensor that it saves or loads.
    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        return items.write_items(self, fqn)

    def __create_chunk_list__(self) -> list[Any]:
        # Of loads alone, and on every rank: what follows is a write that autograd does not see.
        if hasattr(self._pending, "store"):
            raise NotImplementedError(
                "a view that is a copy of what other ranks hold cannot be loaded: load its base"
            )
        for hook in before_write:
            hook([self])
        if not self.is_inference():
            with no_function():
                torch._C._increment_version((self,))
        return items.chunks(self)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return items.shard_at(self, index)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        layout = self._layout  # a graph takes its sizes from the tensor
        return ["_local_tensor"], (layout.mesh, layout.placements, layout.dtype, self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, torch.Tensor], meta: Any, outer_size: Shape, outer_stride: Shape
    ) -> DTensor:
        mesh, placements, dtype, requires_grad = meta
        local = inner_tensors["_local_tensor"]
        relate(outer_size, local.shape, mesh, placements)
        layout = layout_of(mesh, placements, tuple(outer_size), tuple(outer_stride), dtype)
        return cast(DTensor, wrap(local, layout).requires_grad_(requires_grad))

    # A gradient that enters a compiled graph must be placed as when the graph was traced.
    def __coerce_tangent_metadata__(self) -> DTensor:
        layout = self._layout
        placements = layout.gradient_placements
        return self if placements == layout.placements else self.redistribute(None, placements)

    def __coerce_same_metadata_as_tangent__(
        self, metadata: Any, expected_type: type | None = None
    ) -> DTensor | None:
        if expected_type is not None:
            return None
        mesh, placements, dtype, _ = metadata
        layout = self._layout
        return redistributed(self, layout_of(mesh, placements, layout.shape, layout.stride, dtype))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        is_param, local = isinstance(self, torch.nn.Parameter), self._local_tensor.detach()
        return rebuild, (local, self._layout, self.requires_grad, is_param, _attributes_of(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        if id(self) in memo:
            return cast(DTensor, memo[id(self)])
        if not self.is_leaf:
            raise RuntimeError(
                "only leaf tensors can be copied by deepcopy: detach() the DTensor first"
            )
        local = copy.deepcopy(self._local_tensor.detach(), memo)
        is_param = isinstance(self, torch.nn.Parameter)
        result = rebuild(local, self._layout, self.requires_grad, is_param)
        memo[id(self)] = result
        result.__dict__.update(copy.deepcopy(_attributes_of(self), memo))
        if self.grad is not None:
            result.grad = copy.deepcopy(self.grad, memo)
        return result


def become(tensor: DTensor, other: DTensor) -> None:
    """Give `tensor` the shape, layout and memory of `other`, without autograd."""
    for hook in before_write:
        hook(None)
    with no_function():
        torch._C.TensorBase.data.__set__(tensor, other)  # type: ignore[attr-defined]
    tensor._local, tensor._layout, tensor._pending = other._local, other._layout, other._pending


def _attributes_of(tensor: DTensor) -> dict[str, Any]:
    """The attributes that the user has set on it."""
    own = (*DTensor.__annotations__, "_is_param")
    return {name: value for name, value in tensor.__dict__.items() if name not in own}


def rebuild(
    local: torch.Tensor,
    layout: Layout,
    requires_grad: bool,
    is_param: bool,
    attributes: dict[str, Any] | None = None,
) -> DTensor:
    """The DTensor of these parts, for pickle and copies."""
    tensor: Any = wrap(local, layout)
    if is_param:
        tensor = torch.nn.Parameter(tensor, requires_grad)
    tensor.__dict__.update(attributes or {})
    return cast(DTensor, tensor.requires_grad_(requires_grad))


def _from_local(
    local_tensor: torch.Tensor,
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    run_check: bool,
    grad_placements: Sequence[Placement] | None,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
) -> DTensor:
    refuse_export("from_local")
    if isinstance(local_tensor, DTensor):
        raise RuntimeError(
            "from_local takes the local torch.Tensor, got a DTensor: use redistribute"
        )
    check_dense("from_local", local_tensor)
    check_outside_func()
    if (shape is None) != (stride is None):
        raise RuntimeError("from_local: Please pass both shape and stride at the same time.")
    mesh = mesh_or_current(device_mesh)
    if placements is None:
        placements = (Replicate(),) * mesh.ndim
    placements = normalize(placements, local_tensor.ndim, mesh.ndim)
    if local_tensor.device.type != mesh.device_type and not local_tensor.is_meta:
        local_tensor = local_tensor.to(mesh.device_type)
    if shape is None or stride is None:
        layout = layout_of_parts(local_tensor, mesh, placements)
    else:
        layout = layout_of(mesh, placements, tuple(shape), tuple(stride), local_tensor.dtype)
    if layout.index is None:
        wanted_grad = local_tensor.requires_grad
        local_tensor = local_tensor.new_zeros(layout.local_shape, requires_grad=wanted_grad)
    elif shape is not None and tuple(local_tensor.shape) != layout.local_shape:
        raise ValueError(
            f"from_local: the local tensor has shape {tuple(local_tensor.shape)}, but "
            f"{layout!r} gives rank {layout.index} of the mesh {layout.local_shape} (shards "
            f"are those of torch.chunk). Pass shards of that shape, or another shape="
        )
    value = local_tensor.detach()
    if value.is_conj() or value.is_neg():
        value = value.resolve_conj().resolve_neg()
    if run_check and layout.index is not None:
        value = check_parts(value, layout, local_tensor.requires_grad)
    if grad_placements is not None:
        grad_placements = normalize(grad_placements, local_tensor.ndim, mesh.ndim)
    if needs_grad(local_tensor):
        wanted = layout.gradient_placements if grad_placements is None else grad_placements
        return cast(DTensor, apply(_FromLocal, local_tensor, value, layout, wanted))
    return wrap(value, layout)


# torch.compile puts calls with tensors, sizes and strings into its graph; the rest is kept here.
_kept: dict[str, tuple[Any, ...]] = {}


# A tuple, as a mesh that is an argument by itself is guarded by its id.
def _kept_for_graph(given: tuple[Any, ...]) -> str:
    mesh, *others = given
    # Not at import: importing torch's tracer takes as long as all of weft.dtensor.
    dynamo: Any = torch._dynamo
    dynamo.allow_in_graph(_from_local_in_graph)
    mesh = getattr(mesh, "real_obj", mesh)  # torch traces with a stand-in for the mesh
    key = f"{others} on {id(mesh)}"
    _kept[key] = (mesh, *others)
    return key


# What torch.compiler.assume_constant_result does, without its import.
_kept_for_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _from_local_in_graph(
    local: torch.Tensor, key: str, shape: Sequence[int] | None, stride: Sequence[int] | None
) -> DTensor:
    arguments = (*_kept[key], shape, stride)
    return _from_local(local, *arguments)


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        local: torch.Tensor,
        value: torch.Tensor,
        layout: Layout,
        grad_placements: Placements,
    ) -> DTensor:
        # Otherwise a missing gradient would arrive as a plain tensor of zeros.
        ctx.set_materialize_grads(False)
        ctx.grad_placements = grad_placements
        return wrap(value.view_as(value), layout)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> Any:
        if is_nothing(grad):
            return None, None, None, None
        target = grad._layout.with_placements(ctx.grad_placements)
        return redistributed(grad, target).to_local(), None, None, None


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: DTensor, grad_placements: Placements, target: Layout | None
    ) -> torch.Tensor:
        ctx.layout = tensor._layout.with_placements(grad_placements)
        if target is not None:
            return local_as(tensor, target)
        local = tensor._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return as_global(grad, ctx.layout), None, None


def local_part(
    tensor: DTensor, grad_placements: Placements, target: Layout | None = None
) -> torch.Tensor:
    """`tensor.to_local` for placements that are already normalized, as `target` places it.

    The gradient is not moved back: it is placed as `grad_placements` say.
    """
    if needs_grad(tensor):
        return cast(torch.Tensor, apply(_ToLocal, tensor, grad_placements, target))
    return tensor._local_tensor if target is None else local_as(tensor, target)


def local_as(tensor: torch.Tensor, target: Layout) -> torch.Tensor:
    """This rank's part of `tensor` as `target` places it, without autograd."""
    if not isinstance(tensor, DTensor):  # a plain one that counts as replicated
        return move(tensor, target.replicated(), target)
    return move(tensor._local_tensor, tensor._layout, target)


def as_global(local: torch.Tensor, layout: Layout) -> DTensor:
    """The DTensor whose local tensor is `local`; differentiable."""
    if local.requires_grad:
        wanted = layout.gradient_placements
        return cast(DTensor, apply(_FromLocal, local, local.detach(), layout, wanted))
    return wrap(local, layout)


def outside_result(target: Layout, *operands: DTensor | None) -> DTensor:
    """The empty result of an op in a process outside of the mesh; differentiable, as inside."""
    parts = [local_part(t, t._layout.gradient_placements) for t in operands if t is not None]
    empty = torch.zeros(target.local_shape, dtype=target.dtype, device=parts[0].device)
    return as_global(empty + 0 * sum(part.sum() for part in parts), target)


def redistributed(
    tensor: DTensor,
    target: Layout,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: bool = False,
) -> DTensor:
    """`tensor` as `target` places it; differentiable. Does nothing if nothing changes."""
    layout = tensor._layout
    if layout == target and forward_dtype in (None, layout.dtype) and backward_dtype is None:
        return tensor
    refuse_export("redistribute")
    if tensor._pending is not None and forward_dtype is None and backward_dtype is None:
        fused = tensor._pending.redistribute(tensor, target)
        if fused is not None:
            return fused
    if forward_dtype is not None:
        target = target.with_dtype(forward_dtype)
    if needs_grad(tensor):
        return cast(DTensor, apply(_Redistribute, tensor, target, backward_dtype, async_op))
    local = tensor._local_tensor.to(target.dtype)
    return _as_placed(local, layout.with_dtype(target.dtype), target, async_op)


def _as_placed(local: torch.Tensor, source: Layout, target: Layout, async_op: bool) -> DTensor:
    if source == target:
        return wrap(local, target)
    result = move_async(local, source, target) if async_op else move(local, source, target)
    if isinstance(result, Arriving):
        return wrap_pending(result, target, local.device)
    return wrap(result, target)


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: DTensor,
        target: Layout,
        backward_dtype: torch.dtype | None,
        async_op: bool,
    ) -> DTensor:
        ctx.set_materialize_grads(False)
        layout = tensor._layout
        ctx.backward_dtype, ctx.dtype, ctx.target = backward_dtype, layout.dtype, target
        ctx.source = layout.reduced()
        local = tensor._local_tensor.to(target.dtype)
        source = layout.with_dtype(target.dtype)
        return _as_placed(local.view_as(local), source, target, async_op)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> Any:
        if is_nothing(grad):
            return None, None, None, None
        source: Layout = ctx.source
        dtype = ctx.backward_dtype or grad.dtype
        if source.mesh != ctx.target.mesh:
            # Ranks outside of the target's mesh cannot know how the gradient is placed there.
            known = ctx.target.with_dtype(grad.dtype)
            inside = known.index is not None
            grad = redistributed(grad, known) if inside else wrap(grad._local_tensor, known)
        target = layout_of(
            source.mesh, source.placements, grad._layout.shape, grad._layout.stride, grad.dtype
        )
        # A Partial gradient is reduced, even if source and target are both Partial.
        back = redistributed(grad, target, forward_dtype=dtype)
        return back if back.dtype == ctx.dtype else back.to(ctx.dtype), None, None, None
