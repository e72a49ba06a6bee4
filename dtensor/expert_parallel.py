"""`ExpertParallel`: a style that puts stacked experts on ranks, and sends them their tokens.

    the module's parameters   (E, ..), a plane an expert     Shard(0)
    its call                  as one process would make it: tokens of this rank, experts of all

    torchtitan      module(x, num_tokens_per_expert)    x (R, H), rows sorted by expert
    transformers    module(x, topk_ids, topk_weights)   x (T, H), each token the sum of k experts

        x --dispatch--> rows of this rank's experts --the module's own forward--> --combine--> y

Where that forward is found to be down(silu(gate(x)) * up(x)), or one of the other activations
without a gate, both ways are fused with its matmuls, and it is not called. Else it is called with
rows of this rank's experts and with plain tensors, its own parts, in place of its parameters, so
that it need not know.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from weft.collectives.ranks.group import group_name, resolve
from weft.dtensor.api import distribute_parameter
from weft.dtensor.tensor import DTensor
from weft.kernels import (
    Routing,
    combine,
    dispatch,
    dispatch_grouped_matmul,
    grouped_matmul_combine,
    route,
)
from weft.kernels.engine.fp8 import Quantize, check_quantize
from weft.kernels.experts.grouped import experts_of_rows
from weft.kernels.experts.routing import check_weights
from weft.kernels.layers.expert_code import KnownExperts, known_experts


class ExpertParallel(ParallelStyle):
    """Shard a module of stacked experts by expert; tokens travel to their experts and back.

    The module has parameters (E, ..), the same E for all, which ranks get torch.chunk's shares of,
    and is called with tokens in one of two forms:

        module(x, num_tokens_per_expert): x (R, H) sorted by expert, how many rows each of all E
            has, (E,). Returns (R, H'). Rows beyond their sum are padding, whose results are 0.
        module(x, topk_ids, topk_weights): x (T, H), ids and weights (T, k). Returns (T, H').

    Its attribute `num_experts`, if it has one, becomes the number of this rank's. Gradients of
    weights are sums over the tokens of all ranks.

    The code is tried first, with small weights: what does the same as experts of
    `ExpertParallelMLP` runs as those do, by `dispatch_grouped_matmul` and
    `grouped_matmul_combine`, in the dtype that it multiplies in. Other code is called as it is,
    between `dispatch` and `combine`.

    Args:
        input_layouts: how the tokens are placed that the module is called with: Shard(0), each rank
            has its own, as many as it likes (default), or Replicate(), all have the same, and each
            sends a part of them.
        output_layouts: how results are. Default: like the input.
        use_local_output: whether the module returns this rank's part, a plain tensor, rather than a
            DTensor. Default True.
        quantize: "fp8": tokens travel to their experts in fp8, as of `dispatch_grouped_matmul`.

    Example:
        >>> parallelize_module(model, mesh, {"layers.*.moe.experts": ExpertParallel()})
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        quantize: Quantize | None = None,
    ) -> None:
        check_quantize(quantize)
        self.input_layouts: tuple[Placement, ...] = (input_layouts or Shard(0),)
        self.output_layouts: tuple[Placement, ...] = (output_layouts or self.input_layouts[0],)
        self.use_local_output, self.quantize = use_local_output, quantize

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        dims = [len(shape) for shape in shapes.values()]
        # Matrices, and vectors of biases, of each expert.
        if len({shape[:1] for shape in shapes.values()}) != 1 or max(dims) < 3 or min(dims) < 2:
            raise NotImplementedError(
                f"ExpertParallel takes a module whose parameters are all stacks (experts, ..), got "
                f"{type(module).__name__} with {shapes}: name the module of the experts alone, and "
                f"stack their weights, or use weft.dispatch_grouped_matmul"
            )
        group = group_name(device_mesh)
        # Whatever a rank finds, they all make the same calls.
        told = resolve(group).gather_objects(known_experts(module), "what experts compute")
        known = told[0] if all(each == told[0] for each in told) else None
        for each in module.modules():
            for name, _ in list(each.named_parameters(recurse=False)):
                distribute_parameter(each, name, device_mesh, [Shard(0)], self.src_data_rank)
        if isinstance(vars(module).get("num_experts"), int):
            own: Any = next(module.parameters())
            vars(module)["num_experts"] = len(own.to_local())
        vars(module)["forward"] = partial(self._forward, module, module.forward, known, group)
        return module

    def _forward(
        self,
        module: nn.Module,
        forward: Any,
        known: KnownExperts | None,
        group: str,
        x: Any,
        *rest: torch.Tensor,
    ) -> Any:
        """The call of the module, whose own is `forward`."""
        if len(rest) not in (1, 2):
            raise TypeError(
                f"ExpertParallel takes {type(module).__name__}(x, num_tokens_per_expert) or "
                f"(x, topk_ids, topk_weights), all by position, got {1 + len(rest)} arguments"
            )
        weight: Any = next(module.parameters())
        mesh, num_experts = weight.device_mesh, len(weight)
        given = self.input_layouts[0]
        is_own = given == Shard(0) and not isinstance(x, DTensor)
        tokens = _own_tokens(x, mesh, given)
        others = Shard(0) if is_own else Replicate()
        if len(rest) == 1:
            ids = _own_tokens(experts_of_rows(_ends_of(rest[0]), len(x)), mesh, others)
            weights = None
        else:
            ids, weights = (_own_tokens(each, mesh, others) for each in rest)
            check_weights(weights, ids)
        routing = route(ids, num_experts, group)
        parts = _LocalParts(module)
        if known is not None:
            y = _fused(known, parts.named, tokens, routing, weights, self.quantize)
        else:
            rows = dispatch(tokens, routing, quantize=self.quantize)
            made = _by_module(parts, forward, rows, routing, rest[0].dtype, weights)
            y = combine(made, weights, routing)
        if is_own and self.use_local_output and self.output_layouts == (Shard(0),):
            return y
        whole: dict[str, Any] = (
            {} if is_own else {"shape": (len(x), y.shape[1]), "stride": (y.shape[1], 1)}
        )
        result = DTensor.from_local(y, mesh, (Shard(0),), **whole)
        result = result.redistribute(placements=self.output_layouts)
        return result.to_local() if self.use_local_output else result

    def __repr__(self) -> str:
        names = "input_layouts", "output_layouts", "use_local_output", "quantize"
        arguments = ", ".join(f"{name}={getattr(self, name)}" for name in names)
        return f"ExpertParallel({arguments})"


def _own_tokens(x: torch.Tensor, mesh: DeviceMesh, given: Placement) -> torch.Tensor:
    """This rank's part of the tokens, or of what goes with them, placed as `given` if plain."""
    if not isinstance(x, DTensor):
        if given == Shard(0):
            return x
        x = DTensor.from_local(x, mesh, (given,))
    return x.redistribute(placements=(Shard(0),)).to_local()


def _ends_of(num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
    """Where the rows of each expert end."""
    if isinstance(num_tokens_per_expert, DTensor):
        num_tokens_per_expert = num_tokens_per_expert.full_tensor()
    return num_tokens_per_expert.cumsum(0).to(torch.int32)


def _fused(
    known: KnownExperts,
    stored: dict[str, torch.Tensor],
    tokens: torch.Tensor,
    routing: Routing,
    weights: torch.Tensor | None,
    quantize: Quantize | None,
) -> torch.Tensor:
    """What the module's code makes of the tokens, by the fused ops."""
    layout, dtype = known.layout, known.dtype or next(iter(stored.values())).dtype
    *ups, down = (
        layout.value(role, stored[layout.keys([], role)[0]]).to(dtype).transpose(1, 2)
        for role in layout.roles
    )
    h, _ = dispatch_grouped_matmul(
        tokens.to(dtype),
        routing,
        ups if len(ups) > 1 else ups[0],
        activation=known.activation,
        quantize=quantize,
    )
    assert isinstance(h, torch.Tensor)  # of one weight, or of a pair that makes one
    return grouped_matmul_combine(h, down, weights, routing).to(tokens.dtype)


def _by_module(
    parts: _LocalParts,
    forward: Any,
    rows: torch.Tensor,
    routing: Routing,
    integers: torch.dtype,
    weights: torch.Tensor | None,
) -> torch.Tensor:
    """What the module's own code makes of rows of this rank's experts; `integers`: as it takes
    counts, or ids.
    """
    if not len(parts.tensors[0]):  # nothing to compute, but gradients of nothing
        return parts.tied_to(rows)
    rows = _used(rows, routing)
    if weights is None:
        counts = routing.counts.sum(0).to(integers)
        return _used(parts.run(forward, rows, counts), routing)
    # Those of nobody are of any.
    expert = experts_of_rows(routing.ends, len(rows)).clamp(min=0)
    ones = weights.new_ones(len(rows), 1)
    made = parts.run(forward, rows, expert.to(integers), ones)
    return _used(made, routing)


def _used(rows: torch.Tensor, routing: Routing) -> torch.Tensor:
    """The rows with 0 in those beyond what was received, as buffers of a GPU have them."""
    if rows.device.type == "cpu":
        return rows
    at = torch.arange(len(rows), device=rows.device)
    return rows.masked_fill((at >= routing.ends[-1]).unsqueeze(1), 0)


class _LocalParts:
    """This rank's parts of a module's parameters, and the module run with them in their place."""

    def __init__(self, module: nn.Module) -> None:
        self._places = [
            (each._parameters, name, param)
            for each in module.modules()
            for name, param in each._parameters.items()
            if param is not None
        ]
        self.tensors: list[torch.Tensor] = [cast(DTensor, p).to_local() for *_, p in self._places]

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """They, by the names that the module has for them."""
        return {name: own for (_, name, _), own in zip(self._places, self.tensors, strict=True)}

    def run(self, forward: Any, rows: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        """forward(rows, *rest)."""
        parameters: Any
        try:
            for (parameters, name, _), own in zip(self._places, self.tensors, strict=True):
                parameters[name] = own
            result: torch.Tensor = forward(rows, *rest)
        finally:
            for parameters, name, param in self._places:
                parameters[name] = param
        # Without rows a loop over experts touches nothing, but all ranks must have gradients. In a
        # graph the number of rows is unknown, and nothing loops.
        is_nothing = not torch.compiler.is_compiling() and not len(rows)
        return self.tied_to(result, rows) if is_nothing else result

    def tied_to(self, result: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """`result`, whose gradient gives every part, and the others, one of zeros."""
        return result + sum(t[:0].sum().to(result.dtype) for t in (*self.tensors, *others))
