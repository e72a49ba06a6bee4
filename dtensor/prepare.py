"""`PrepareModule*`: styles that lay out what goes into a module and what comes out of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement
from torch.distributed.tensor.parallel import ParallelStyle

from weft.dtensor.tensor import DTensor


def relayout(
    value: Any,
    mesh: DeviceMesh,
    given: Placement | None,
    desired: Placement | None,
    use_local: bool,
    what: str,
) -> Any:
    """`value`, read as `given` and brought to `desired`; unchanged if `given` is None."""
    if given is None:
        return value
    tensor = as_dtensor(value, mesh, given, what)
    if desired not in (None, given):
        tensor = tensor.redistribute(placements=(desired,))
    return tensor.to_local() if use_local else tensor


def as_dtensor(value: Any, mesh: DeviceMesh, given: Placement, what: str) -> DTensor:
    """`value`, read as `given` if it is a plain tensor; a DTensor keeps its layout."""
    if isinstance(value, DTensor):
        if value.device_mesh != mesh:
            raise ValueError(
                f"{what} is on the mesh {value.device_mesh}, the module on {mesh}: "
                f"bring it there first, x.redistribute(mesh, placements)"
            )
        return value
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{what} must be a tensor or a DTensor, got {type(value).__name__}")
    return DTensor.from_local(value, mesh, (given,))


def shown(style: ParallelStyle, *names: str) -> str:
    arguments = ", ".join(f"{name}={getattr(style, name)}" for name in names)
    return f"{type(style).__name__}({arguments})"


_Layouts = Placement | tuple[Placement | None, ...] | None


def _as_tuple(layouts: _Layouts) -> tuple[Placement | None, ...] | None:
    return (layouts,) if isinstance(layouts, Placement) else layouts


def _check_pair(given: Any, desired: Any, what: str) -> None:
    if desired is None or len(given) != len(desired):
        raise ValueError(
            f"{what} and desired_{what} must have the same length, "
            f"got {given} and {desired}: write None for a value to leave alone"
        )


class PrepareModuleInput(ParallelStyle):
    """Turn a module's inputs into DTensors and bring them to other layouts. Parameters stay.

    Args:
        input_layouts: the layout of each positional input, None for one to leave alone; a single
            placement stands for a single input. None: positional inputs are left alone.
        desired_input_layouts: the layouts that they are brought to; as long as `input_layouts`.
        input_kwarg_layouts: the layouts of keyword inputs, by name.
        desired_input_kwarg_layouts: the layouts that they are brought to, by name.
        use_local_output: whether the module receives plain tensors, this rank's parts, rather than
            DTensors. Default False.
    """

    def __init__(
        self,
        *,
        input_layouts: _Layouts = None,
        desired_input_layouts: _Layouts = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.input_layouts = _as_tuple(input_layouts)
        self.desired_input_layouts = _as_tuple(desired_input_layouts)
        self.use_local_output = use_local_output
        self.input_kwarg_layouts = input_kwarg_layouts or {}
        self.desired_input_kwarg_layouts = desired_input_kwarg_layouts or {}
        if self.input_layouts is not None:
            _check_pair(self.input_layouts, self.desired_input_layouts, "input_layouts")
        if self.input_kwarg_layouts.keys() != self.desired_input_kwarg_layouts.keys():
            raise ValueError(
                f"input_kwarg_layouts and desired_input_kwarg_layouts must name the same inputs, "
                f"got {sorted(self.input_kwarg_layouts)} and "
                f"{sorted(self.desired_input_kwarg_layouts)}"
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def hook(
            mod: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            owner, use_local = type(mod).__name__, self.use_local_output
            if self.input_layouts is not None:
                if len(args) != len(self.input_layouts):
                    raise ValueError(
                        f"PrepareModuleInput has {len(self.input_layouts)} input_layouts, "
                        f"{owner} was called with {len(args)} positional inputs: give one layout "
                        f"(or None) for each, and those passed by name in input_kwarg_layouts"
                    )
                pairs = zip(self.input_layouts, self.desired_input_layouts or (), strict=True)
                args = tuple(
                    relayout(arg, device_mesh, *pair, use_local, f"input {i} of {owner}")
                    for i, (arg, pair) in enumerate(zip(args, pairs, strict=True))
                )
            for key, value in kwargs.items():
                given = self.input_kwarg_layouts.get(key)
                desired = self.desired_input_kwarg_layouts.get(key)
                what = f"input {key!r} of {owner}"
                kwargs[key] = relayout(value, device_mesh, given, desired, use_local, what)
            return args, kwargs

        module.register_forward_pre_hook(hook, with_kwargs=True)
        return module

    def __repr__(self) -> str:
        inputs = ("input_layouts", "desired_input_layouts")
        by_name = ("input_kwarg_layouts", "desired_input_kwarg_layouts")
        return shown(self, *inputs, *by_name, "use_local_output")


class PrepareModuleOutput(ParallelStyle):
    """Turn a module's outputs into DTensors and bring them to other layouts. Parameters stay.

    Args:
        output_layouts: the layout of each output, None for one to leave alone; a single
            placement stands for a single output.
        desired_output_layouts: the layouts that they are brought to; as long as `output_layouts`.
        use_local_output: whether the module returns plain tensors, this rank's parts, rather than
            DTensors. Default True.
    """

    def __init__(
        self,
        *,
        output_layouts: Placement | tuple[Placement | None, ...],
        desired_output_layouts: Placement | tuple[Placement | None, ...],
        use_local_output: bool = True,
    ) -> None:
        _check_pair(_as_tuple(output_layouts), _as_tuple(desired_output_layouts), "output_layouts")
        self.output_layouts = _as_tuple(output_layouts) or ()
        self.desired_output_layouts = _as_tuple(desired_output_layouts) or ()
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def hook(mod: nn.Module, args: Any, outputs: Any) -> Any:
            owner = type(mod).__name__
            values = outputs if isinstance(outputs, tuple) else (outputs,)
            if len(values) != len(self.output_layouts):
                raise ValueError(
                    f"PrepareModuleOutput has {len(self.output_layouts)} output_layouts, {owner} "
                    f"returned {len(values)} outputs: give one layout (or None) for each"
                )
            use_local = self.use_local_output
            pairs = zip(self.output_layouts, self.desired_output_layouts, strict=True)
            prepared = tuple(
                relayout(value, device_mesh, *pair, use_local, f"output {i} of {owner}")
                for i, (value, pair) in enumerate(zip(values, pairs, strict=True))
            )
            return prepared[0] if len(prepared) == 1 else prepared

        module.register_forward_hook(hook)
        return module

    def __repr__(self) -> str:
        return shown(self, "output_layouts", "desired_output_layouts", "use_local_output")


class PrepareModuleInputOutput(ParallelStyle):
    """`PrepareModuleInput` and `PrepareModuleOutput` in one; see there for the arguments.

    `use_local_input` is the former's `use_local_output`.
    """

    def __init__(
        self,
        *,
        input_layouts: _Layouts = None,
        desired_input_layouts: _Layouts = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Placement | tuple[Placement | None, ...],
        desired_output_layouts: Placement | tuple[Placement | None, ...],
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.prepare_module_input._apply(module, device_mesh)
        return self.prepare_module_output._apply(module, device_mesh)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.prepare_module_input!r}, {self.prepare_module_output!r})"
        )
