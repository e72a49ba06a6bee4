"""Layouts in the notations of other libraries: printed, and parsed.

    torch        [S(0), R, P(sum)]              one entry a mesh dim
    OneFlow      (split(0), broadcast, partial_sum)     one entry a mesh dim
    ColossalAI   [S01, R]                       one entry a tensor dim: the mesh dims that cut it
    JAX          P(('x', 'y'), None, unreduced={'z'})   likewise, mesh dims by name

In the last two the order counts: `S10` is cut by mesh dim 1 first, then by 0. That is one layout
with `_StridedShard`, and comes back as `S10`.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Sequence

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from weft.dtensor.layout.placements import Placements, is_shard, pieces_of, shard_dim, show

__all__ = [
    "format_colossalai",
    "format_jax",
    "format_oneflow",
    "format_torch",
    "parse_colossalai",
    "parse_jax",
    "parse_oneflow",
    "parse_torch",
]

format_torch = show


def parse_torch(text: str) -> Placements:
    """Placements from `[S(0), _S(1, 2), R, P(avg)]`; `Shard(0)`, `Replicate()` are read as well.

    Raises:
        ValueError: an entry that is none of these; all functions here raise it.
    """
    result: list[Placement] = []
    for entry in _entries(text, "[]"):
        if match := re.fullmatch(r"S(?:hard)?\((?:dim=)?(-?\d+)\)", entry):
            result.append(Shard(int(match[1])))
        elif match := re.fullmatch(
            r"_S(?:tridedShard)?\((?:dim=)?(-?\d+), *(?:sf=)?(\d+)\)", entry
        ):
            result.append(_StridedShard(int(match[1]), split_factor=int(match[2])))
        elif match := re.fullmatch(r"P(?:artial)?(?:\((\w*)\))?", entry):
            result.append(Partial(match[1] or "sum"))
        elif re.fullmatch(r"R(?:eplicate\(\))?", entry):
            result.append(Replicate())
        else:
            raise ValueError(f"{text}: {entry!r} is none of S(dim), R, P(op), _S(dim, pieces)")
    return tuple(result)


def format_oneflow(placements: Sequence[Placement]) -> str:
    """`(split(0), broadcast)`."""
    words = []
    for placement in placements:
        if type(placement) is Shard:
            words.append(f"split({placement.dim})")
        elif isinstance(placement, Replicate):
            words.append("broadcast")
        elif isinstance(placement, Partial) and placement.reduce_op == "sum":
            words.append("partial_sum")
        else:
            raise ValueError(f"{placement} has no word in OneFlow's notation")
    return f"({', '.join(words)})"


def parse_oneflow(text: str) -> Placements:
    """Placements from `(split(0), broadcast)`, with or without `oneflow.sbp.` and `dim=`."""
    result: list[Placement] = []
    for entry in _entries(text.replace("oneflow.sbp.", ""), "()"):
        if match := re.fullmatch(r"split\((?:dim=|axis=)?(-?\d+)\)", entry):
            result.append(Shard(int(match[1])))
        elif entry in ("broadcast", "broadcast()"):
            result.append(Replicate())
        elif entry in ("partial_sum", "partial_sum()"):
            result.append(Partial("sum"))
        else:
            raise ValueError(f"{text}: {entry!r} is none of split(dim), broadcast, partial_sum")
    return tuple(result)


def format_colossalai(placements: Sequence[Placement], ndim: int, sizes: Sequence[int]) -> str:
    """`[S0, R]` for a tensor of `ndim` dims on a mesh of `sizes`."""
    if any(isinstance(placement, Partial) for placement in placements):
        raise ValueError(f"{show(placements)}: ColossalAI's notation has no partial sums")
    cuts = _cutting_dims(placements, ndim, sizes)
    if len(sizes) > 10:
        raise ValueError(f"mesh dims are single digits in ColossalAI's notation, got {len(sizes)}")
    words = ["S" + "".join(map(str, dims)) if dims else "R" for dims in cuts]
    return f"[{', '.join(words)}]"


def parse_colossalai(text: str, sizes: Sequence[int]) -> Placements:
    """Placements on a mesh of `sizes` from `[S01, R]`."""
    cuts: list[list[int]] = []
    for entry in _entries(text, "[]"):
        if not re.fullmatch(r"R|S\d+", entry):
            raise ValueError(f"{text}: {entry!r} is neither R nor S with the numbers of mesh dims")
        cuts.append([int(digit) for digit in entry[1:]])
    return placements_of_cuts(cuts, sizes)


def format_jax(
    placements: Sequence[Placement], ndim: int, sizes: Sequence[int], names: Sequence[str]
) -> str:
    """`P('x', None)` on a mesh of `sizes` whose dims have `names`."""
    words = []
    for dims in _cutting_dims(placements, ndim, sizes):
        axes = tuple(names[dim] for dim in dims)
        words.append(repr(axes if len(axes) > 1 else axes[0] if axes else None))
    sums = [
        names[dim]
        for dim, placement in enumerate(placements)
        if isinstance(placement, Partial) and placement.reduce_op == "sum"
    ]
    if len(sums) < sum(isinstance(placement, Partial) for placement in placements):
        raise ValueError(f"{show(placements)}: JAX's notation has sums, no other reductions")
    if sums:
        words.append(f"unreduced={{{', '.join(map(repr, sums))}}}")
    return f"P({', '.join(words)})"


def parse_jax(text: str, sizes: Sequence[int], names: Sequence[str]) -> Placements:
    """Placements on a mesh of `sizes` whose dims have `names` from `P('x', None)`."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or ast.unparse(call.func) not in ("P", "PartitionSpec"):
            raise ValueError("it is no call of P")
        entries = [ast.literal_eval(argument) for argument in call.args]
        keywords = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        if not keywords.keys() <= {"unreduced"}:
            raise ValueError(f"keywords {sorted(map(str, keywords))}")
        axes = [() if e is None else e if isinstance(e, tuple) else (e,) for e in entries]
        sums = keywords.get("unreduced", set())
        if not all(isinstance(axis, str) for group in (*axes, sums) for axis in group):
            raise ValueError("entries are None, names, or tuples of names")
    except (SyntaxError, TypeError, ValueError) as error:
        raise ValueError(f"{text!r} is not like P('x', None): {error}") from error
    if unknown := {axis for group in (*axes, sums) for axis in group}.difference(names):
        raise ValueError(f"{text}: the mesh has dims {list(names)}, not {sorted(unknown)}")
    result = list(placements_of_cuts([[names.index(a) for a in group] for group in axes], sizes))
    for axis in sums:
        dim = names.index(axis)
        if is_shard(result[dim]):
            raise ValueError(f"{text}: {axis!r} cuts a dim, and is unreduced as well")
        result[dim] = Partial("sum")
    return tuple(result)


def placements_of_cuts(cuts: Sequence[Sequence[int]], sizes: Sequence[int]) -> Placements:
    """Placements on a mesh of `sizes` whose tensor dim d is cut by mesh dims `cuts[d]`, in order.

    Example:
        >>> placements_of_cuts([[0, 1], []], (2, 4))
        (Shard(dim=0), Shard(dim=0))
        >>> placements_of_cuts([[1, 0], []], (2, 4))
        (_StridedShard(dim=0, sf=4), Shard(dim=0))
    """
    result: list[Placement] = [Replicate()] * len(sizes)
    for tensor_dim, mesh_dims in enumerate(cuts):
        for position, mesh_dim in enumerate(mesh_dims):
            if not 0 <= mesh_dim < len(sizes) or is_shard(result[mesh_dim]):
                raise ValueError(
                    f"mesh dim {mesh_dim} in {list(map(list, cuts))} cuts two tensor dims, or is "
                    f"not one of {len(sizes)}"
                )
            # Placements apply from left to right: who comes later, but cuts first, is a factor.
            before = [sizes[other] for other in mesh_dims[:position] if other > mesh_dim]
            factor = math.prod(before)
            result[mesh_dim] = (
                _StridedShard(tensor_dim, split_factor=factor) if factor > 1 else Shard(tensor_dim)
            )
    return tuple(result)


def _cutting_dims(
    placements: Sequence[Placement], ndim: int, sizes: Sequence[int]
) -> list[list[int]]:
    """For each tensor dim the mesh dims that cut it, the first cut first."""
    cuts: list[list[int]] = [[] for _ in range(ndim)]
    for mesh_dim in reversed(range(len(sizes))):
        placement = placements[mesh_dim]
        if not is_shard(placement):
            continue
        order = cuts[shard_dim(placement) % ndim]
        factors = [math.prod(sizes[dim] for dim in order[:at]) for at in range(len(order) + 1)]
        if pieces_of(placement) not in factors:
            raise ValueError(
                f"{show(placements)}: a strided shard that is no order of mesh dims has no such "
                f"notation"
            )
        order.insert(factors.index(pieces_of(placement)), mesh_dim)
    return cuts


def _entries(text: str, brackets: str) -> list[str]:
    """The entries of a list in brackets, split at commas outside of inner brackets."""
    inner = text.strip()
    if inner.startswith(brackets[0]) and inner.endswith(brackets[1]):
        inner = inner[1:-1]
    return [entry.strip() for entry in re.split(r",(?![^()]*\))", inner) if entry.strip()]
