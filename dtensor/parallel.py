"""Parallel styles: lay out a module's parameters, inputs and outputs over a 1-D mesh.

A plan names sub-modules and gives each a style. A style shards the module's parameters once and
adds two hooks, so that the module's own code stays as it is:

    style               parameters                        input wanted       output by default
    ColwiseParallel     Linear: weight, bias Shard(0)     Replicate          Shard(-1)
                        Embedding: weight Shard(1)
    RowwiseParallel     Linear: weight Shard(1),          Shard(-1)          Replicate
                        bias Replicate
                        Embedding: weight Shard(0)        Replicate          Replicate
    SequenceParallel    any: Replicate                    Shard(sequence)    Shard(sequence)
    ExpertParallel      stacks (experts, ..): Shard(0)    Shard(0)           Shard(0)
    PrepareModule*      untouched                         as asked           as asked

Names, arguments and meaning are those of `torch.distributed.tensor.parallel`, and `ParallelStyle`
is its very class: subclass it and write `_apply` for a style of your own. Only the communication
moves: where ColwiseParallel would gather a sequence shard in front of an `nn.Linear`, the shard
goes into the linear as it is, and `all_gather_matmul` gathers it while it multiplies. Conversely,
RowwiseParallel redistributes its partial sums in the hook that receives them, where
`matmul_reduce_scatter` takes over.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from weft.dtensor.api import distribute_module, distribute_parameter, replacements
from weft.dtensor.experimental import Replicating
from weft.dtensor.expert_parallel import ExpertParallel
from weft.dtensor.fused.products import allow_in_graphs, linear_gathering_again
from weft.dtensor.layout.places import mesh_or_current
from weft.dtensor.prepare import (
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    as_dtensor,
    shown,
)
from weft.dtensor.tensor import DTensor

__all__ = [
    "ColwiseParallel",
    "ExpertParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "loss_parallel",
    "parallelize_module",
]


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelStyle | Mapping[str, Any] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Make `module`, or the sub-modules that a plan names, parallel over a 1-D mesh.

    Args:
        module: changed in place.
        device_mesh: 1-D; of an n-D mesh take one dim, `mesh["tp"]`. None: the mesh of the `with`
            block around the call.
        parallelize_plan: a style for `module` itself, or `{path: style}`. A path is a sub-module's
            dotted name; each of its parts may hold fnmatch wildcards ("layers.*.w1"); "" is
            `module` itself. A path that matches nothing is skipped with a warning.
        src_data_rank: the rank of the mesh whose parameters are scattered or broadcast to the
            others; None: every rank cuts its shard from its own copy, with no communication. It is
            set as an attribute of each style.

    Returns:
        `module`.

    Raises:
        ValueError: the mesh is not 1-D.
        TypeError: the plan is neither a style nor a mapping.
        NotImplementedError: a style does not know the module that it was given for.

    Example:
        >>> plan = {"w1": ColwiseParallel(), "w2": RowwiseParallel()}
        >>> mlp = parallelize_module(mlp, init_device_mesh("cpu", (2,)), plan)
    """
    mesh = mesh_or_current(device_mesh)
    if mesh.ndim != 1:
        raise ValueError(
            f"parallelize_module takes a 1-D mesh, got {mesh.ndim} dims ({mesh}): "
            f"slice it first, as in mesh['tp']"
        )
    if parallelize_plan is None:
        warnings.warn("parallelize_module got no plan, and does nothing", stacklevel=2)
        return module
    if isinstance(parallelize_plan, ParallelStyle):
        parallelize_plan.src_data_rank = src_data_rank
        return parallelize_plan._apply(module, mesh)
    if not isinstance(parallelize_plan, Mapping):
        raise TypeError(
            f"parallelize_plan must be a ParallelStyle or a mapping of module paths to styles, "
            f"got {type(parallelize_plan).__name__}"
        )
    for path, style in parallelize_plan.items():
        submodules = _matching(module, path)
        if not submodules:
            warnings.warn(
                f"parallelize_module: no sub-module of {type(module).__name__} matches the plan's "
                f"{path!r}, which is skipped",
                stacklevel=2,
            )
        for submodule in submodules:
            parallelize_module(submodule, mesh, style, src_data_rank=src_data_rank)
    for name, param in module.named_parameters():
        if param in replacements:
            warnings.warn(
                f"parallelize_module: {name} of {type(module).__name__} is still plain, and no "
                f"longer tied to the parameter of another module that the plan has sharded: they "
                f"will drift apart, unless {name} is parallelized as well",
                stacklevel=2,
            )
    return module


def _matching(module: nn.Module, path: str) -> list[nn.Module]:
    """The sub-modules of `module` whose dotted names match `path` part by part."""
    found = [module]
    for part in path.split(".") if path else []:
        found = [
            child
            for parent in found
            for name, child in parent.named_children()
            if fnmatch(name, part)
        ]
    return found


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Treat a plain target (and weight) of `F.cross_entropy` and `F.nll_loss` as replicated.

    Logits sharded by class are never gathered, inside the block or outside: for each row the ranks
    exchange two numbers (or three), and the gradient is sharded like the logits. It takes any
    reduction and mesh.

    Example:
        >>> with loss_parallel():
        ...     loss = F.cross_entropy(logits, target)     # logits (N, C), [Shard(1)]; target (N,)
    """
    with Replicating((nn.functional.cross_entropy, nn.functional.nll_loss)):
        yield


class _WeightSharding(ParallelStyle):
    """What ColwiseParallel and RowwiseParallel share: parameters cut by a table, and two hooks."""

    # For each kind of module: the layout of its parameters, and the layout that its input needs.
    _table: ClassVar[dict[type[nn.Module], tuple[dict[str, Placement], Placement]]]
    # The layout of a parameter that the table does not name; None: replicated.
    _other_params: ClassVar[Placement | None] = None

    # The default layouts of the input and of the output.
    _usual: ClassVar[tuple[Placement, Placement]]

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_layouts: tuple[Placement, ...] = (input_layouts or self._usual[0],)
        self.output_layouts: tuple[Placement, ...] = (output_layouts or self._usual[1],)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        entry = next((e for kind, e in self._table.items() if isinstance(module, kind)), None)
        if entry is None:
            raise NotImplementedError(
                f"{type(self).__name__} shards nn.Linear and nn.Embedding, got "
                f"{type(module).__name__}: name its linears in the plan, put an nn.Linear in its "
                f"place, or subclass ParallelStyle"
            )
        params, desired = entry
        self.desired_input_layouts: tuple[Placement, ...] = (desired,)
        src_data_rank = self.src_data_rank
        name_of_style = type(self).__name__

        def partition(name: str, submodule: nn.Module, mesh: DeviceMesh) -> None:
            if name:
                return  # parameters of submodules are replicated
            for key, _ in list(submodule.named_parameters(recurse=False)):
                placement = params.get(key, self._other_params) or Replicate()
                distribute_parameter(submodule, key, mesh, [placement], src_data_rank)

        def prepare_input(mod: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
            if not inputs:
                raise ValueError(
                    f"{name_of_style} prepares the first positional argument, and "
                    f"{type(mod).__name__} was called without one: call it as module(x)"
                )
            what = f"the input of a {name_of_style} {type(mod).__name__}"
            given = self.input_layouts[0]
            x = as_dtensor(inputs[0], mesh, given, what)
            if given != desired and not self._linear_takes(mod, x):
                x = x.redistribute(placements=(desired,))
            return (x, *inputs[1:])

        def prepare_output(mod: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
            if outputs.placements != self.output_layouts:
                outputs = outputs.redistribute(placements=self.output_layouts)
            return outputs.to_local() if self.use_local_output else outputs

        return distribute_module(module, device_mesh, partition, prepare_input, prepare_output)

    def _linear_takes(self, module: nn.Module, x: DTensor) -> bool:
        """Whether the module's own matmul takes `x` as it is, so that no hook redistributes it."""
        return False

    def __repr__(self) -> str:
        return shown(self, *_SHOWN)


_SHOWN = "input_layouts", "output_layouts", "use_local_output"


class ColwiseParallel(_WeightSharding):
    """Shard an `nn.Linear` by its output features, or an `nn.Embedding` by its embedding dim.

    Args:
        input_layouts: the layout of the module's input, read from it if it is a plain tensor.
            Default Replicate(). A Shard of any dim but the last (the sequence, the batch) is
            gathered by the linear itself, tile by tile.
        output_layouts: the layout that the output is brought to. Default Shard(-1).
        use_local_output: whether the module returns this rank's part, a plain tensor, rather than
            a DTensor. Default True.
        keep_gathered: not in torch, which always does: whether an input that a linear has gathered
            is kept for the gradient of the weight. False keeps this rank's shard, 1/W of it, and
            gathers it again in backward: 3 collectives in all rather than 2. Default True.
    """

    _table: ClassVar = {
        nn.Linear: ({"weight": Shard(0), "bias": Shard(0)}, Replicate()),
        nn.Embedding: ({"weight": Shard(1)}, Replicate()),
    }
    _other_params: ClassVar = Shard(0)
    _usual: ClassVar = Replicate(), Shard(-1)

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        keep_gathered: bool = True,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts,
            output_layouts=output_layouts,
            use_local_output=use_local_output,
        )
        self.keep_gathered = keep_gathered

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not self.keep_gathered and isinstance(module, nn.Linear) and _is_plain(module):
            vars(module)["forward"] = partial(_gathering_again, module)
        return super()._apply(module, device_mesh)

    def __repr__(self) -> str:
        return shown(self, *_SHOWN, "keep_gathered")

    def _linear_takes(self, module: nn.Module, x: DTensor) -> bool:
        # A subclass may do more with its input than multiply it.
        layout = x.placements[0]
        return _is_plain(module) and isinstance(layout, Shard) and layout.dim % x.ndim != x.ndim - 1


def _is_plain(module: nn.Module) -> bool:
    """Whether its forward is that of nn.Linear."""
    return type(module).forward is nn.Linear.forward


def _gathering_again(module: nn.Linear, x: torch.Tensor) -> Any:
    """The forward of a linear with keep_gathered=False."""
    if torch.compiler.is_compiling():
        allow_in_graphs()
    return linear_gathering_again(x, module.weight, module.bias)


class RowwiseParallel(_WeightSharding):
    """Shard an `nn.Linear` by its input features, or an `nn.Embedding` by its vocabulary.

    Args:
        input_layouts: the layout of the module's input, read from it if it is a plain tensor.
            Default Shard(-1), what ColwiseParallel returns. For an embedding give Replicate().
        output_layouts: the layout that the output is brought to. Default Replicate(), an
            all-reduce; Shard(1) makes it a reduce-scatter over the sequence.
        use_local_output: whether the module returns this rank's part, a plain tensor, rather than
            a DTensor. Default True.
    """

    _table: ClassVar = {
        nn.Linear: ({"weight": Shard(1), "bias": Replicate()}, Shard(-1)),
        nn.Embedding: ({"weight": Shard(0)}, Replicate()),
    }
    _usual: ClassVar = Shard(-1), Replicate()


class SequenceParallel(ParallelStyle):
    """Run a module (LayerNorm, RMSNorm, Dropout) on sequence shards, its parameters replicated.

    The parameters must be the same on every rank already, as they are after an initialisation with
    ones or with one seed: nothing is communicated.

    Args:
        sequence_dim: the dim of the input that is sharded. A plain tensor is read as this rank's
            shard of it; a DTensor of another layout is redistributed. Default 1.
        use_local_output: whether the module returns this rank's part, a plain tensor, rather than
            a DTensor. Default False.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_sharding = (Shard(sequence_dim),)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        sharding = self.sequence_sharding

        def replicate(name: str, submodule: nn.Module, mesh: DeviceMesh) -> None:
            for key, _ in list(submodule.named_parameters(recurse=False)):
                distribute_parameter(submodule, key, mesh, src_data_rank=None)

        def prepare_input(mod: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
            what = f"the input of a SequenceParallel {type(mod).__name__}"
            x = as_dtensor(inputs[0] if inputs else None, mesh, sharding[0], what)
            if x.placements != sharding:
                x = x.redistribute(placements=sharding)
            return (x, *inputs[1:])

        def prepare_output(mod: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
            return outputs.to_local() if self.use_local_output else outputs

        return distribute_module(module, device_mesh, replicate, prepare_input, prepare_output)

    def __repr__(self) -> str:
        return (
            f"SequenceParallel(sequence_dim={self.sequence_sharding[0].dim}, "
            f"use_local_output={self.use_local_output})"
        )
