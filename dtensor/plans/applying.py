"""A plan as styles of `parallelize_module`, and as FSDP or replicas along the batch's dims."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from weft.dtensor.api import distribute_parameter, distribute_tensor
from weft.dtensor.experimental import implicit_replication
from weft.dtensor.parallel import ColwiseParallel, PrepareModuleOutput, RowwiseParallel
from weft.dtensor.plans.bills import Option
from weft.dtensor.plans.graph import Graph
from weft.dtensor.tensor import DTensor


class OnDTensors(ParallelStyle):
    """Run a whole model on DTensors: the last style of a plan, of "".

    What other styles have left of parameters and buffers is placed, tensors that the model is
    called with become DTensors, and those that it makes by itself meet them as replicas. The code
    of the model sees the shapes of one process.

    Args:
        inputs: how each tensor argument is cut, which every rank passes whole; in the order in
            which the model takes them.
        params: placements of parameters by name; the others are replicated.
        gather_output: return whole plain tensors, not DTensors as they come.
    """

    def __init__(
        self,
        inputs: Sequence[Placement] = (),
        params: Mapping[str, Placement] | None = None,
        *,
        gather_output: bool = True,
    ) -> None:
        self.inputs, self.params = tuple(inputs), dict(params or {})
        self.gather_output = gather_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mesh, source = device_mesh, self.src_data_rank
        for path, submodule in module.named_modules():
            for key, param in list(submodule.named_parameters(recurse=False)):
                if not isinstance(param, DTensor):
                    placement = self.params.get(f"{path}.{key}".removeprefix("."), Replicate())
                    distribute_parameter(submodule, key, mesh, [placement], source)
            for key, buffer in list(submodule.named_buffers(recurse=False)):
                if not isinstance(buffer, DTensor):
                    whole = distribute_tensor(buffer, mesh, src_data_rank=source)
                    submodule._buffers[key] = whole
        forward = module.forward

        def on_dtensors(*args: Any, **kwargs: Any) -> Any:
            wanted = iter(self.inputs)

            def placed(tensor: torch.Tensor) -> torch.Tensor:
                target = next(wanted, Replicate())
                if not isinstance(tensor, DTensor):
                    tensor = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
                return tensor.redistribute(placements=[target])

            args, kwargs = pytree.tree_map_only(torch.Tensor, placed, (args, kwargs))
            with implicit_replication():
                result = forward(*args, **kwargs)
            return pytree.tree_map_only(DTensor, self._returned, result)

        vars(module)["forward"] = on_dtensors
        return module

    def _returned(self, tensor: DTensor) -> torch.Tensor:
        if self.gather_output:
            return tensor.redistribute(placements=[Replicate()]).to_local()
        if tensor.placements[0].is_partial():
            return tensor.redistribute(placements=[Replicate()])
        return tensor

    def __repr__(self) -> str:
        told = f"inputs={list(self.inputs)}, params={self.params}"
        return f"OnDTensors({told}, gather_output={self.gather_output})"


def styles_of(
    graph: Graph, choices: Sequence[Option], *, gather_output: bool
) -> dict[str, ParallelStyle]:
    """The styles of a plan, by paths with wildcards where layers have the same."""
    styles: dict[str, ParallelStyle] = {}
    inputs: list[Placement] = []
    params: dict[str, Placement] = {}
    for node, option in zip(graph.nodes, choices, strict=True):
        if node.kind == "input":
            inputs.append(option.values[0].placement)
        elif node.kind == "param":
            placed = zip(node.weights, option.placed, strict=True)
            params |= {name: p for name, p in placed if p != Replicate()}
        elif option.way in ("colwise", "rowwise"):
            given = choices[node.refs[0]].values[0].placement
            last = len(graph.nodes[node.refs[0]].metas[0].shape) - 1
            layouts = {
                "input_layouts": Shard(-1) if given == Shard(last) else given,
                "output_layouts": option.values[0].placement,
            }
            if node.kind == "embedding":
                layouts["input_layouts"] = Replicate()
            if option.way == "rowwise":
                styles[node.module] = RowwiseParallel(**layouts, use_local_output=False)
            else:
                styles[node.module] = ColwiseParallel(
                    **layouts, use_local_output=False, keep_gathered=option.keep_gathered
                )
        elif node.exits and option.found != option.values[0].placement:
            styles[node.exits] = PrepareModuleOutput(
                output_layouts=option.found,
                desired_output_layouts=option.values[0].placement,
                use_local_output=False,
            )
    paths = [node.exits for node in graph.nodes if node.exits]
    return {
        **with_wildcards(styles, [*paths, *styles]),
        "": OnDTensors(inputs, params, gather_output=gather_output),
    }


def with_wildcards(values: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """One entry, "layers.*.w1", for paths that differ in numbers only and have the same value.

    Args:
        paths: all that a wildcard could match.
    """
    found: dict[str, Any] = {}
    for path, value in values.items():
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)
        alike = [p for p in dict.fromkeys(paths) if re.fullmatch(_as_regex(pattern), p)]
        same = all(p in values and repr(values[p]) == repr(value) for p in alike)
        found[pattern if same and len(alike) > 1 else path] = value
    return found


def _as_regex(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*", r"\d+")


def data_parallel(model: nn.Module, mesh: DeviceMesh, *, sharded: bool) -> None:
    """FSDP or replicas of `model` on a 1-D mesh, layer by layer."""
    make: Any = fully_shard if sharded else replicate
    for layer in layers(model):
        make(layer, mesh=mesh)
    make(model, mesh=mesh)


def layers(model: nn.Module) -> list[nn.Module]:
    """The outermost modules of lists: what FSDP gathers at a time."""
    found: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)):
            found += [layer for layer in child if any(True for _ in layer.parameters())]
        elif isinstance(child, nn.ModuleDict):
            found += [layer for layer in child.values() if any(True for _ in layer.parameters())]
        else:
            found += layers(child)
    return found
