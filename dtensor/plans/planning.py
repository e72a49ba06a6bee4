"""`plan`: how a model should be laid out on a mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from weft.collectives.protocols import Collective
from weft.dtensor.parallel import parallelize_module
from weft.dtensor.plans import told
from weft.dtensor.plans.applying import data_parallel, layers, styles_of
from weft.dtensor.plans.bills import DataParallel, Option
from weft.dtensor.plans.graph import Graph, ModelNode, recorded
from weft.dtensor.plans.options import NodeOptions
from weft.dtensor.plans.prices import Prices, has_groups, prices_of
from weft.dtensor.plans.search import Label, choices_of, search_layouts

# Linears with so small a part of the largest one's weights are replicated by hand: routers.
_SMALL = 64


@dataclass(frozen=True)
class PlannedStep:
    """What one step of the model's forward does.

    Attributes:
        module, op: where it is, and what it calls.
        way: of a weight: "colwise", "rowwise", "replicated"; of attention the fused op.
        found, placement: how the result comes out, and how a style then places it.
        us: with backward, and with the communication that it waits for.
        nbytes: of parameters, gradients, moments and activations that are kept.
        ops: fused ops and collectives of forward, then "|", then those of backward.
    """

    module: str
    op: str
    way: str
    found: Placement
    placement: Placement
    shape: tuple[int, ...]
    us: float
    nbytes: float
    ops: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """Layouts of a model on a mesh, with what they are predicted to take on a rank.

    Attributes:
        mesh: the mesh that it is for.
        model_dims, data_dims: sizes of the mesh dims that layers are cut along, and the batch.
        sharded: whether parameters are cut along the data dims too (FSDP), or replicated.
        styles: what `parallelize_module` takes, for the model dims; empty if there are none.
        placements: of parameters and of results of modules by name, along the model dims.
        rows: the steps of the forward, in order.
        step_us: a training step: forward, backward, gradients and an AdamW step.
        memory_bytes: parameters, gradients, moments and activations at their peak.
        hardware: what the prices are of.
        beside: plans that people make by hand, by the same prices; text says why one is impossible.
    """

    mesh: DeviceMesh = field(repr=False)
    model_dims: tuple[int, ...]
    data_dims: tuple[int, ...]
    sharded: bool
    styles: dict[str, ParallelStyle] = field(repr=False)
    placements: dict[str, Placement] = field(repr=False)
    rows: tuple[PlannedStep, ...] = field(repr=False)
    step_us: float
    memory_bytes: float
    hardware: str
    memory: float | None = None
    beside: dict[str, Plan | str] = field(default_factory=dict, repr=False)

    def apply(self, model: nn.Module) -> nn.Module:
        """Lay out `model`, the same on every rank, in place. Ranks do not communicate for it.

        It is then called with this rank's part of the batch along the data dims, which ranks that
        differ along the model dims only pass alike, and returns plain tensors (DTensors if the plan
        was made with gather_output=False).

        Raises:
            ValueError: the mesh has no process groups, or no names where it has several dims.
        """
        return lay_out(self, model)

    def __str__(self) -> str:
        return told.table(self)


def plan(
    model: nn.Module,
    mesh: DeviceMesh,
    sample_input: Any,
    *,
    memory: float | str | None = None,
    hardware: Any = None,
    gather_output: bool = True,
) -> Plan:
    """The layout of `model` on `mesh` whose training step is predicted to be the quickest.

    Mesh dims are used from the last one on to cut layers (tensor, sequence and context parallel),
    those before them to cut the batch (replicas, or FSDP); how many is part of the search. Nothing
    is run or allocated: the model is recorded on the meta device.

    Args:
        model: on any device; its forward has the same ops for all values.
        mesh: several dims should have names, which `Plan.apply` slices it by.
        sample_input: the tensor, or tuple of arguments, of one step of all ranks together; dim 0
            is the batch. Only shapes count.
        memory: of a rank, in bytes or as "80GB"; what does not fit is not chosen.
        hardware: a chip's name ("h100") or a `weft.sim.Hardware`. None: the machine that the mesh
            is on, by its rates: collective the first time.
        gather_output: whether the model is to return whole plain tensors. False leaves DTensors as
            they come, cheaper for logits: `loss_parallel` takes them.

    Returns:
        The plan, the same on every rank; `print` shows it beside plans that people make by hand.

    Raises:
        ValueError: no layout fits `memory` (told with the least that one takes), or the batch.
        NotImplementedError: the model cannot be recorded.

    Example:
        >>> mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))
        >>> found = plan(model, mesh, tokens, memory="80GB")
        >>> print(found)
        >>> found.apply(model)
    """
    prices, limit = prices_of(hardware, mesh), bytes_of(memory)
    sample = sample_input if isinstance(sample_input, tuple) else (sample_input,)
    splits = [*_splits(model, mesh, sample, prices, gather_output)]
    if not splits:
        raise ValueError(
            f"no rank gets a whole part of the batch: dim 0 of {_shapes_text(sample)} is cut "
            f"evenly along mesh dims {tuple(mesh.shape)}, or not at all"
        )
    every = [found for split in splits for found in split.ways()]
    fitting = [found for found in every if limit is None or found.memory_bytes <= limit]
    if not fitting:
        raise ValueError(_too_small(every, limit or 0.0, mesh))
    best = min(fitting, key=lambda found: found.step_us)
    beside: dict[str, Plan | str] = {}
    for name, (inner, sharded, by_hand) in _BY_HAND.items():
        such = [s for s in splits if (s.inner, s.data.sharded) == (inner, sharded)]
        ways = [found for split in such for found in split.ways(by_hand)]
        if ways:
            beside[name] = min(ways, key=lambda found: found.step_us).plan(mesh, limit)
        else:
            why = "the model's ops do not fit it" if such else "the batch cannot be cut so"
            beside[name] = f"not possible: {why}"
    return replace(best.plan(mesh, limit), beside=beside)


@dataclass(frozen=True)
class _Split:
    """The mesh, its last `inner` dims for layers and those before them for the batch."""

    inner: int
    options: NodeOptions
    units: int  # that FSDP gathers one at a time
    largest: float  # bytes of the largest one on a rank, gathered

    @property
    def data(self) -> DataParallel:
        return self.options.data

    def ways(self, by_hand: _ByHand | None = None) -> list[_LaidOut]:
        """All that no other way beats in time and memory; of one kind, if `by_hand` tells it."""
        weights = [w.numel() for n in self.options.graph.nodes for w in n.weights.values()]
        allows = by_hand and partial(by_hand, max(weights, default=0))
        return [_LaidOut(self, label) for label in search_layouts(self.options, allows)]


@dataclass(frozen=True)
class _LaidOut:
    """One way to lay out the model on a split of the mesh."""

    split: _Split
    label: Label

    @property
    def step_us(self) -> float:
        """What is moved for parameters runs beside the computation, but for a first and last."""
        us, data_us = self.label.us, self.label.data_us
        data, prices = self.split.data, self.split.options.prices
        if data.ranks > 1:
            op: Collective = "all_gather" if data.sharded else "all_reduce"
            starts = prices.group_us(op, 1, data.ranks, data.stride) + prices.meet_us
            data_us += starts * self.split.units * (3 if data.sharded else 1)
        if not prices.overlaps:
            return us + data_us
        return max(us, data_us) + data_us / self.split.units

    @property
    def memory_bytes(self) -> float:
        """FSDP holds two units gathered, the one that is computed and the next one."""
        return self.label.nbytes + (2 * self.split.largest if self.split.data.sharded else 0.0)

    def plan(self, mesh: DeviceMesh, limit: float | None) -> Plan:
        options, choices = self.split.options, choices_of(self.label)
        graph, inner = options.graph, self.split.inner
        placements: dict[str, Placement] = {}
        for node, option in zip(graph.nodes, choices, strict=True):
            placements |= dict(zip(node.weights, option.placed, strict=True))
            if node.exits:
                placements[node.exits] = option.values[0].placement
        cut = options.ranks > 1
        return Plan(
            mesh=mesh,
            model_dims=tuple(mesh.shape[mesh.ndim - inner :]),
            data_dims=tuple(mesh.shape[: mesh.ndim - inner]),
            sharded=self.split.data.sharded,
            styles=styles_of(graph, choices, gather_output=options.gather_output) if cut else {},
            placements=placements,
            rows=tuple(
                _row(node, option)
                for node, option in zip(graph.nodes, choices, strict=True)
                if node.kind != "constant"
            ),
            step_us=self.step_us,
            memory_bytes=self.memory_bytes,
            hardware=options.prices.name,
            memory=limit,
        )


def _row(node: ModelNode, option: Option) -> PlannedStep:
    op = node.name if node.kind == "op" else node.kind
    module = node.module or str(node.target or "")
    shape = node.meta.shape if node.metas else ()
    placement = option.values[0].placement if option.values else option.found
    return PlannedStep(
        module, op, option.way, option.found, placement, shape, option.us, option.nbytes, option.ops
    )


def _splits(
    model: nn.Module,
    mesh: DeviceMesh,
    sample: tuple[Any, ...],
    prices: Prices,
    gather_output: bool,
) -> Iterator[_Split]:
    sizes = tuple(mesh.shape)
    units = [*layers(model), model]
    weights = [sum(p.numel() * p.dtype.itemsize for p in unit.parameters()) for unit in units]
    largest = max(weights[:-1], default=weights[-1])
    graphs: dict[int, Graph] = {}
    for inner in range(len(sizes) + 1):
        outer, ranks = sizes[: len(sizes) - inner], math.prod(sizes[len(sizes) - inner :])
        parts = math.prod(outer)
        if parts == 1 and inner < len(sizes):
            continue  # the same as with one dim more
        if any(t.shape[0] % parts for t in _tensors(sample) if t.ndim):
            continue
        if parts not in graphs:
            own = pytree.tree_map_only(torch.Tensor, partial(_first_share, parts), sample)
            graphs[parts] = recorded(model, own)
        for sharded in (False, True) if parts > 1 else (False,):
            data = DataParallel(parts, ranks, sharded)
            options = NodeOptions(
                graphs[parts], ranks, prices, mesh.device_type, data, gather_output=gather_output
            )
            yield _Split(inner, options, len(units), largest / ranks)


def _tensors(sample: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(sample) if isinstance(t, torch.Tensor)]


def _first_share(parts: int, tensor: torch.Tensor) -> torch.Tensor:
    meta = tensor.detach().to("meta")
    return meta[: len(meta) // parts].clone() if meta.ndim else meta


def _shapes_text(sample: Any) -> str:
    return ", ".join(str(tuple(t.shape)) for t in _tensors(sample))


def _too_small(every: Sequence[_LaidOut], limit: float, mesh: DeviceMesh) -> str:
    if not every:
        return f"no layout of this model on {tuple(mesh.shape)} ranks can be run"
    least = min(every, key=lambda found: found.memory_bytes)
    needed = least.memory_bytes
    return (
        f"no layout of this model on a mesh of {tuple(mesh.shape)} fits {told.size(limit)} a rank: "
        f"the least is {told.size(needed)}, in {told.time(least.step_us)} a step "
        f"({told.layout(least.plan(mesh, None))}). Give memory={math.ceil(needed)}, more ranks, or "
        f"a smaller batch"
    )


# ---- plans that people make by hand

# Whether a plan of that kind has an option of a node, given the size of the largest weight.
_ByHand = Callable[[int, ModelNode, Option], bool]


def _megatron(largest: int, node: ModelNode, option: Option) -> bool:
    """Column- and row-parallel linears, and shards of the sequence between them."""
    return _usual(largest, node, option, between=lambda rank: Shard(max(rank - 2, 0)))


def _torch_default(largest: int, node: ModelNode, option: Option) -> bool:
    """Column- and row-parallel linears, and replicas between them."""
    return _usual(largest, node, option, between=lambda _: Replicate())


def _usual(
    largest: int, node: ModelNode, option: Option, between: Callable[[int], Placement]
) -> bool:
    """`between`: how a tensor of so many dims is placed between layers."""
    if node.kind == "input":
        return option.values[0].placement == Replicate()
    if node.kind not in ("linear", "embedding", "op"):
        return True
    placement = option.values[0].placement
    wanted = placement == between(len(node.meta.shape))
    if node.kind == "embedding":
        return option.way == "rowwise" and wanted
    if node.kind == "op":  # only sums that wait, as of experts, are brought there later
        return option.found == placement or (option.found == _SUM and wanted)
    if option.way == "replicated":
        return max(w.numel() for w in node.weights.values()) * _SMALL < largest
    last = placement == option.found and option.keep_gathered
    return last if option.way == "colwise" else wanted or placement == _SUM


_SUM = Partial("sum")
# (How many mesh dims layers are cut along, whether FSDP takes the others, what is allowed.)
_BY_HAND: dict[str, tuple[int, bool, _ByHand | None]] = {
    "Megatron": (1, False, _megatron),
    "torch default": (1, False, _torch_default),
    "FSDP alone": (0, True, None),
    "data parallel": (0, False, None),
}


def lay_out(found: Plan, model: nn.Module) -> nn.Module:
    """See `Plan.apply`."""
    mesh, count = found.mesh, len(found.data_dims)
    outer, inner = (
        _along(mesh, range(count)),
        _along(mesh, range(count, mesh.ndim)),
    )
    if found.styles and inner is not None:
        parallelize_module(model, inner, found.styles, src_data_rank=None)
    if outer is not None and outer.size() > 1:
        data_parallel(model, outer, sharded=found.sharded)
    return model


def _along(mesh: DeviceMesh, dims: range) -> DeviceMesh | None:
    """The 1-D mesh of some dims of `mesh`, which follow each other; None if there are none."""
    if not dims or math.prod(mesh.shape[d] for d in dims) == 1:
        return None
    if not has_groups(mesh):
        raise ValueError(
            "Plan.apply needs a mesh whose ranks can communicate, and this one has no process "
            "groups: make the plan with init_device_mesh on the ranks"
        )
    if mesh.ndim == 1:
        return mesh
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError(
            f"Plan.apply slices a mesh of {mesh.ndim} dims by name, and it has none: "
            f'init_device_mesh(.., mesh_dim_names=("dp", "tp"))'
        )
    part = mesh[tuple(names[d] for d in dims)]
    return part if part.ndim == 1 else part._flatten()


def bytes_of(memory: float | str | None) -> float | None:
    """80e9 of "80GB"; units are those of 1000 (GB) and of 1024 (GiB).

    Raises:
        ValueError: neither a number nor one with a unit, or none above 0.
    """
    if memory is None:
        return None
    found = _number_of_bytes(memory) if isinstance(memory, str) else memory
    if not found > 0:
        raise ValueError(f"memory must be above 0, got {memory!r}; leave it out for any")
    return found


def _number_of_bytes(memory: str) -> float:
    text = memory.strip().lower().removesuffix("b")
    binary = text.endswith("i")
    text = text.removesuffix("i")
    power = {"k": 1, "m": 2, "g": 3, "t": 4}.get(text[-1:], 0)
    try:
        number = float(text[:-1] if power else text)
    except ValueError:
        raise ValueError(f'memory is in bytes, or as "80GB" or "80GiB", got {memory!r}') from None
    return number * float(1024 if binary else 1000) ** power
