"""Making DTensors: `distribute_tensor`, `distribute_module`, and the factories."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, cast

import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.utils.weak import WeakTensorKeyDictionary

from weft.dtensor.layout.boxes import Layout, layout_of
from weft.dtensor.layout.placements import check_dense, normalize, show
from weft.dtensor.layout.places import StandInMesh, mesh_or_current
from weft.dtensor.layout.runs import contiguous_stride
from weft.dtensor.move.redistribute import move
from weft.dtensor.random import drawn
from weft.dtensor.tensor import DTensor, wrap
from weft.dtensor.tracing.exporting import refuse_export
from weft.dtensor.tracing.graph_breaks import unless_traced

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def _mesh_and_placements(
    device_mesh: DeviceMesh | None, placements: Sequence[Placement] | None, ndim: int
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    mesh = mesh_or_current(device_mesh)
    if placements is None:
        placements = (Replicate(),) * mesh.ndim
    return mesh, normalize(placements, ndim, mesh.ndim)


@unless_traced
def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Distribute a tensor over a mesh. Every rank passes one; the first rank's values are used.

    Args:
        tensor: the whole tensor, a leaf of autograd. Nothing is communicated for a meta tensor.
        device_mesh: default: the mesh of the enclosing `with mesh:`.
        placements: one per mesh dim; default: `Replicate` on all.
        src_data_rank: coordinate, along every mesh dim, of the rank whose values are used. None:
            each rank cuts its own tensor, without communication.

    Returns:
        A leaf that requires gradients if `tensor` does.

    Raises:
        RuntimeError: `tensor` is not a leaf.
        ValueError: not one placement per mesh dim, or a DTensor with other placements.
        NotImplementedError: `tensor` is sparse, nested or quantized.
    """
    mesh, wanted = _mesh_and_placements(device_mesh, placements, tensor.ndim)
    if isinstance(tensor, DTensor):
        if tensor.device_mesh != mesh:
            raise ValueError(
                f"Cannot distribute a DTensor with device mesh {tensor.device_mesh} to a different "
                f"device mesh {mesh}: use redistribute(mesh, placements)"
            )
        if tensor.placements != wanted:
            raise ValueError(
                f"Cannot distribute a DTensor with placements {show(tensor.placements)} to a "
                f"different placements {show(wanted)}: use redistribute(placements=...)"
            )
        return tensor
    refuse_export("distribute_tensor")
    check_dense("distribute_tensor", tensor)
    if not tensor.is_leaf:
        raise RuntimeError(
            "`distribute_tensor` should be used to distribute leaf tensors, but got a non-leaf "
            "tensor: use DTensor.from_local, or detach() it"
        )
    shape, stride = tuple(tensor.shape), tensor.stride()
    layout = layout_of(mesh, wanted, shape, stride, tensor.dtype)
    whole = tensor.detach()
    if whole.device.type != mesh.device_type and not whole.is_meta:
        whole = whole.to(mesh.device_type)
    if layout.index is None:
        local = whole.new_zeros(layout.local_shape)
    elif whole.is_meta:
        local = whole.new_empty(layout.local_shape)
    else:
        local = move(whole, _source_layout(layout, src_data_rank), layout)
    return cast(DTensor, wrap(local, layout).requires_grad_(tensor.requires_grad))


def _source_layout(layout: Layout, src_data_rank: int | None) -> Layout:
    if src_data_rank is None:
        return layout.replicated() if not layout.is_replicated else layout.twin
    if not all(0 <= src_data_rank < size for size in layout.place.sizes):
        raise ValueError(
            f"src_data_rank must be a coordinate of every mesh dim, got {src_data_rank} for a mesh "
            f"of shape {layout.place.sizes}"
        )
    index = layout.place.index_at((src_data_rank,) * layout.mesh.ndim)
    rank, kept = layout.place.ranks[index], layout.place.meshes_of_one
    if rank not in kept:
        kept[rank] = StandInMesh(torch.tensor([rank]))
    return layout_of(kept[rank], (Replicate(),), layout.shape, layout.stride, layout.dtype)


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: Callable[..., None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> nn.Module:
    """Turn a module's parameters and buffers into DTensors, in place.

    Args:
        partition_fn: called as (name, submodule, mesh), or (name, submodule) if it takes two, for
            every submodule; plain tensors that it leaves are replicated.
        input_fn: called as (module, inputs, mesh) before forward, returns the new inputs.
        output_fn: called as (module, outputs, mesh) after forward, returns the new outputs.

    Raises:
        RuntimeError: the module was distributed already.
    """
    mesh = mesh_or_current(device_mesh)
    if getattr(module, "_distribute_module_applied", False):
        raise RuntimeError(
            "distribute_module should only be called once on a module, but it has already been "
            "called on this module!"
        )
    if partition_fn is not None:
        takes_mesh = len(inspect.signature(partition_fn).parameters) != 2
        for name, submodule in module.named_modules():
            partition_fn(name, submodule, *([mesh] if takes_mesh else []))
    for submodule in module.modules():
        _replicate_rest(submodule, mesh)
    if input_fn is not None:
        before = _with_module("input_fn", input_fn)
        module.register_forward_pre_hook(lambda mod, inputs: before(mod, inputs, mesh))
    if output_fn is not None:
        after = _with_module("output_fn", output_fn)
        module.register_forward_hook(lambda mod, _, outputs: after(mod, outputs, mesh))
    module._distribute_module_applied = True  # type: ignore[assignment]
    return module


def _replicate_rest(module: nn.Module, mesh: DeviceMesh) -> None:
    for name, param in module._parameters.items():
        if param is not None and not isinstance(param, DTensor):
            distribute_parameter(module, name, mesh)
    for name, buffer in module._buffers.items():
        if buffer is not None and not isinstance(buffer, DTensor):
            module._buffers[name] = distribute_tensor(buffer, mesh)


# Plain parameter -> the DTensor parameter made of it, for as long as a module holds the plain one.
replacements = WeakTensorKeyDictionary()


def distribute_parameter(
    module: nn.Module,
    name: str,
    mesh: DeviceMesh,
    placements: Sequence[Placement] | None = None,
    src_data_rank: int | None = 0,
) -> None:
    """Make a parameter of a module a DTensor. Modules that share one still share it afterwards.

    Raises:
        ValueError: a module that shares it has it with other placements.
    """
    param = module._parameters[name]
    assert param is not None
    shared = replacements.get(param)
    _, wanted = _mesh_and_placements(mesh, placements, param.ndim)
    if shared is None or shared.device_mesh != mesh:
        spread = distribute_tensor(param.detach(), mesh, wanted, src_data_rank=src_data_rank)
        shared = replacements[param] = nn.Parameter(spread, param.requires_grad)
    elif shared.placements != wanted:
        raise ValueError(
            f"{type(module).__name__}.{name} of shape {tuple(param.shape)} would be placed "
            f"{show(wanted)}, but a module that shares this parameter has it as "
            f"{show(shared.placements)}: choose styles that place it alike, or untie it first "
            f"(module.{name} = nn.Parameter(module.{name}.detach().clone()))"
        )
    module.register_parameter(name, shared)


def _with_module(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` in the form (module, values, mesh); the deprecated form lacks the module."""
    n_args = len(inspect.signature(function).parameters)
    if n_args == 3:
        return function
    if n_args == 2:
        warnings.warn(
            f"Deprecating {name} that takes two arguments (inputs, device_mesh), please use "
            f"{name} that takes in (module, inputs, device_mesh) instead!",
            FutureWarning,
            stacklevel=3,
        )
        return lambda _, values, mesh: function(values, mesh)
    raise ValueError(f"{name} should take in 3 arguments, but got {n_args} arguments!")


P = ParamSpec("P")
Fill = Callable[..., torch.Tensor]
# Factories that fill a tensor with the numbers that a single device would draw.
_RANDOM = (torch.Tensor.uniform_, torch.Tensor.normal_)


@unless_traced
def _create(
    fill: Fill,
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else tuple(size)
    if layout != torch.strided:
        raise NotImplementedError(f"only torch.strided DTensors, got layout={layout}")
    mesh, wanted = _mesh_and_placements(device_mesh, placements, len(shape))
    device = torch.device(mesh.device_type)
    random = fill in _RANDOM
    if random and any(isinstance(p, Partial) for p in wanted):
        raise ValueError(
            f"random values cannot be made as terms of a sum: {show(wanted)}. Use Replicate() or "
            f"Shard(dim)"
        )
    stride = contiguous_stride(shape)
    place = layout_of(mesh, wanted, shape, stride, dtype or torch.get_default_dtype())
    if random:
        local = torch.empty(place.local_shape, dtype=place.dtype, device=device)
        if place.index is not None:
            local = drawn(fill, fill.__name__, place, local)
    else:
        local = fill(place.local_shape, dtype=dtype, device=device)
    place = place.with_dtype(local.dtype)
    if place.has_partial and place.index is not None:
        local = move(local, place.replicated(), place)
    return cast(DTensor, wrap(local, place).requires_grad_(requires_grad))


def _factory(
    create: Callable[Concatenate[Fill, P], DTensor], name: str, fill: Fill, summary: str
) -> Callable[P, DTensor]:
    """`create` with the first argument given, as a function in its own right."""

    def factory(*args: P.args, **kwargs: P.kwargs) -> DTensor:
        return create(fill, *args, **kwargs)

    signature = inspect.signature(create, eval_str=False)
    rest = list(signature.parameters.values())[1:]
    factory.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
    factory.__name__ = factory.__qualname__ = name
    factory.__doc__ = f"""{summary}, made on each rank without communication.

    Args:
        size: of the global tensor: integers, or one sequence.
        requires_grad, dtype: as in torch.{name}.
        layout: torch.strided, no other.
        device_mesh: default: the mesh of the enclosing `with mesh:`.
        placements: one per mesh dim; default: `Replicate` on all.
    """
    return factory


zeros = _factory(_create, "zeros", torch.zeros, "A DTensor of zeros")
ones = _factory(_create, "ones", torch.ones, "A DTensor of ones")
empty = _factory(_create, "empty", torch.empty, "A DTensor of unspecified values")
rand = _factory(_create, "rand", torch.Tensor.uniform_, "Uniform random values in [0, 1)")
randn = _factory(_create, "randn", torch.Tensor.normal_, "Normally distributed random values")


def full(
    size: Any,
    fill_value: float,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A DTensor of `fill_value`; the other arguments are those of `zeros`."""

    def fill(shape: tuple[int, ...], **kwargs: Any) -> torch.Tensor:
        return torch.full(shape, fill_value, **kwargs)

    return _create(
        fill,
        size,
        requires_grad=requires_grad,
        dtype=dtype,
        layout=layout,
        device_mesh=device_mesh,
        placements=placements,
    )


def linspace(
    start: float | torch.Tensor,
    end: float | torch.Tensor,
    steps: int,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """`steps` evenly spaced values from `start` to `end`, both included.

    `start` and `end` may be 0-dim tensors; the other arguments are those of `zeros`.
    """
    numbers = start, end, steps
    return _spaced(torch.linspace, numbers, dtype, layout, requires_grad, device_mesh, placements)


def logspace(
    start: float | torch.Tensor,
    end: float | torch.Tensor,
    steps: int,
    base: float = 10.0,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """`base` to the power of each value of `linspace`; the other arguments are as there."""
    numbers = start, end, steps, base
    return _spaced(torch.logspace, numbers, dtype, layout, requires_grad, device_mesh, placements)


@unless_traced
def _spaced(
    make: Callable[..., torch.Tensor],
    numbers: tuple[float | torch.Tensor, ...],
    dtype: torch.dtype | None,
    layout: torch.layout,
    requires_grad: bool,
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
) -> DTensor:
    """`make(*numbers)`, computed whole on every rank and then cut: the values of one device."""
    mesh, wanted = _mesh_and_placements(device_mesh, placements, 1)
    given = [each.item() if isinstance(each, torch.Tensor) else each for each in numbers]
    whole = make(*given, dtype=dtype, layout=layout, device=mesh.device_type)
    whole.requires_grad_(requires_grad)
    return distribute_tensor(whole, mesh, wanted, src_data_rank=None)
