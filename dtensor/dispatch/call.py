"""What a rule sees of a call, and what it answers.

A rule is a function of an `OpCall`, an op with layouts in place of its tensors. It answers with
strategies for one mesh dim (`Choices`), with a decision for all of them (`Chosen`), or with a
function of DTensors that computes the op (`Decomposed`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from weft.dtensor.layout.boxes import Layout
from weft.dtensor.layout.placements import (
    LINEAR_REDUCTIONS,
    Placements,
    distinct,
    is_inexact,
    is_shard,
    moved,
    shard_dim,
)
from weft.dtensor.layout.runs import Shape

Op = Callable[..., Any]


class Way(NamedTuple):
    """How a fused op serves a strategy along one mesh dim; `fused` has what runs it.

    Attributes:
        name: of the fused op; `PENDING` for a sum whose reduction is fused later, if it can be.
        price: us that (call, mesh dim) takes beyond its computation, or why it is impossible.
    """

    name: str
    price: Callable[[OpCall, int], float | str]


PENDING = "pending"


class Strategy(NamedTuple):
    """For one mesh dim: how each tensor argument must be placed, and how each result then is.

    Without a `way` the arguments are moved first, and the op then runs on each rank's parts.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    way: Way | None = None


Localize = Callable[["OpCall", list[Layout], list[Layout]], Op]


@dataclass(frozen=True)
class Choices:
    """What a rule offers.

    Attributes:
        strategies: alternatives for each mesh dim; the cheapest is taken, the first among equals.
        localize: makes the local op from the chosen layouts, if it is not the op itself.
        stays: position of an argument that is not moved where a fused op can do without: the weight
            of a linear, which a plan has placed.
        told: whether `weft.explain` is told of the strategies though none is a fused op.
    """

    strategies: list[Strategy]
    localize: Localize | None = None
    stays: int | None = None
    told: bool = False


@dataclass(frozen=True)
class Chosen:
    """A rule's decision for all mesh dims at once; `way` is that of mesh dim `way_dim`."""

    inputs: list[Placements]
    outputs: list[Placements]
    localize: Localize | None = None
    way: Way | None = None
    way_dim: int = 0
    considered: Sequence[Any] = ()


@dataclass(frozen=True)
class Decomposed:
    """A rule's decision to compute the op by a function of DTensors."""

    function: Op


@dataclass(frozen=True)
class Meta:
    """Shape, stride and dtype of a result."""

    shape: Shape
    stride: Shape
    dtype: torch.dtype


class OpCall:
    """An op with its arguments, a `Layout` in place of each tensor."""

    def __init__(self, op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.op, self.args, self.kwargs = op, args, kwargs
        self.inputs: list[Layout] = [
            leaf for leaf in leaves([args, kwargs]) if isinstance(leaf, Layout)
        ]
        self.mesh = self.inputs[0].mesh
        self.name: str = getattr(op, "_opname", getattr(op, "__name__", str(op)))
        self.outputs: list[Meta] = []
        self.output_tree: Any = None
        # Whether a probe found that the op raises for some values.
        self.refuses = False

    @property
    def placements(self) -> list[Placement]:
        """The placements of all tensors, each once."""
        return distinct(p for layout in self.inputs for p in layout.placements)

    @property
    def whole(self) -> Strategy:
        """All tensors replicated: right for any op."""
        return self.with_first(Replicate())

    def with_first(self, placement: Placement) -> Strategy:
        """The first tensor and the results placed as `placement`, the other tensors replicated."""
        rest = (Replicate(),) * (len(self.inputs) - 1)
        return Strategy((placement, *rest), (placement,) * len(self.outputs))

    def kept(self, dims: dict[int, int]) -> list[Strategy]:
        """Replicated, or the first tensor sharded by one of its `dims` {its dim: results' dim}."""
        present = filter(is_shard, self.inputs[0].placements)
        shards = [p for p in distinct([*present, *map(Shard, dims)]) if shard_dim(p) in dims]
        rest = (Replicate(),) * (len(self.inputs) - 1)
        return [
            self.whole,
            *(
                Strategy((p, *rest), (moved(p, dims[shard_dim(p)]),) * len(self.outputs))
                for p in shards
            ),
        ]

    def with_all(self, placement: Placement) -> Strategy:
        """All tensors and all results placed as `placement`."""
        inputs, outputs = len(self.inputs), len(self.outputs)
        return Strategy((placement,) * inputs, (placement,) * outputs)

    def sums(self, *layouts: Layout) -> list[Placement]:
        """The sums and averages among the placements of `layouts`, each once.

        If the op is linear in them, it may compute each term by itself. Not so where terms become
        integers, or integers that wrap around become something else: there are none then. Of
        integers, averages are cut to one, which is not linear. A sum of booleans is their `or`.
        """
        results = {meta.dtype for meta in self.outputs}
        found: list[Placement] = []
        for layout in layouts:
            old, inexact = layout.dtype, is_inexact(layout.dtype)
            if layout.has_partial and not all(
                is_inexact(new) if inexact else new == old for new in results
            ):
                return []
            kinds = LINEAR_REDUCTIONS if inexact else ("sum",) if old != torch.bool else ()
            found += [
                p for p in layout.placements if isinstance(p, Partial) and p.reduce_op in kinds
            ]
        return distinct(found)

    @property
    def bound(self) -> dict[str, Any]:
        """The arguments by name, defaults filled in."""
        schema = cast(Any, self.op)._schema
        values = {}
        for i, argument in enumerate(schema.arguments):
            if i < len(self.args) and not argument.kwarg_only:
                values[argument.name] = self.args[i]
            else:
                values[argument.name] = self.kwargs.get(argument.name, argument.default_value)
        return values

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.inputs))})"


Rule = Callable[[OpCall], "Choices | Chosen | Decomposed"]
rules: dict[str, Rule] = {}
# Users' rules (`experimental.register_sharding`), by overload; they take precedence over ours.
rules_of_overloads: dict[Op, Rule] = {}
_RuleT = TypeVar("_RuleT", bound=Callable[[OpCall], Any])


def rule(names: str | Iterable[str]) -> Callable[[_RuleT], _RuleT]:
    """Register the decorated function as the rule of these ops (in-place variants included).

    Args:
        names: of the ops, without their overloads; in a string separated by blanks.
    """

    def register(function: _RuleT) -> _RuleT:
        for name in names.split() if isinstance(names, str) else names:
            rules[name] = function
        return function

    return register


def leaves(tree: Any) -> Iterator[Any]:
    """The items of nested lists, tuples and dicts, in order."""
    if isinstance(tree, (list, tuple)):
        for item in tree:
            yield from leaves(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from leaves(item)
    else:
        yield tree


def map_tree(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The same nesting of lists, tuples and dicts, with `change` applied to the items."""
    if isinstance(tree, list):
        return [map_tree(item, change) for item in tree]
    if isinstance(tree, tuple):
        return tuple(map_tree(item, change) for item in tree)
    if isinstance(tree, dict):
        return {name: map_tree(item, change) for name, item in tree.items()}
    return change(tree)
