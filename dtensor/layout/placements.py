"""Placements: what torch's `Shard`, `Replicate` and `Partial` say, read and checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

Placements = tuple[Placement, ...]
# Reductions that commute with addition and with scaling.
LINEAR_REDUCTIONS = ("sum", "avg")
# What each reduction of a Partial does to an accumulator, given another term.
REDUCE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.Tensor.add_,
    "avg": torch.Tensor.add_,  # divided at the end, by `divide_`
    "product": torch.Tensor.mul_,
    "max": lambda acc, term: torch.maximum(acc, term, out=acc),
    "min": lambda acc, term: torch.minimum(acc, term, out=acc),
    "band": torch.Tensor.bitwise_and_,
    "bor": torch.Tensor.bitwise_or_,
    "bxor": torch.Tensor.bitwise_xor_,
}


def is_inexact(dtype: torch.dtype) -> bool:
    """Whether numbers of `dtype` are floating-point or complex, not integers or booleans."""
    return dtype.is_floating_point or dtype.is_complex


def divide_(total: torch.Tensor, count: int) -> torch.Tensor:
    """The average of a sum; of integers it is cut to one."""
    if is_inexact(total.dtype):
        return total.div_(count)
    return total.div_(count, rounding_mode="trunc")


# `isinstance` takes a microsecond where the answer is no, as their metaclass has its own.
_OTHER_KINDS = (Replicate, Partial)


def is_shard(placement: Placement) -> bool:
    """Whether `placement` cuts a tensor dim: `Shard` or `_StridedShard`."""
    return type(placement) not in _OTHER_KINDS and isinstance(placement, (Shard, _StridedShard))


def shard_dim(placement: Placement) -> int:
    """The tensor dim that `placement` cuts; -1 if it cuts none."""
    return cast(Any, placement).dim if is_shard(placement) else -1


def distinct(placements: Iterable[Placement]) -> list[Placement]:
    """Each placement once, in order: the order of a set may differ from rank to rank."""
    return list(dict.fromkeys(placements))


def pieces_of(placement: Placement) -> int:
    """Into how many pieces a shard first divides its dim, taking a part of each."""
    if type(placement) is Shard or not isinstance(placement, _StridedShard):
        return 1
    return int(placement.split_factor)


def check_dense(what: str, tensor: torch.Tensor) -> None:
    """Raise for tensors that have no strides, or whose numbers are not their values.

    Raises:
        NotImplementedError: a sparse, nested or quantized tensor.
    """
    if tensor.is_nested:
        kind, way_out = "nested", "torch.nested.to_padded_tensor(t, 0.0)"
    elif tensor.is_quantized:
        kind, way_out = "quantized", "t.dequantize()"
    elif tensor.layout is not torch.strided:
        kind, way_out = f"{tensor.layout}", "t.to_dense()"
    else:
        return
    raise NotImplementedError(
        f"{what}: a DTensor is dense, and this is a {kind} tensor. Make it a dense one by "
        f"{way_out}, or compute on local tensors, as to_local() and full_tensor() return them"
    )


def normalize(placements: Sequence[Placement], ndim: int, mesh_ndim: int) -> Placements:
    """Placements with dims counted from the front.

    Raises:
        ValueError: not one placement for each mesh dim, a shard of a dim that does not exist or
            into no pieces, or an unknown reduction, as of torch for embeddings and norms.
    """
    if isinstance(placements, Placement):
        raise ValueError(f"placements is a list, one per mesh dim: pass [{placements}]")
    if len(placements) != mesh_ndim:
        raise ValueError(
            f"there must be one placement per mesh dim, got {len(placements)} placements "
            f"{tuple(placements)} for a mesh of {mesh_ndim} dims"
        )
    result: list[Placement] = []
    for placement in placements:
        if type(placement) is Replicate or (type(placement) is Shard and -1 < placement.dim < ndim):
            result.append(placement)  # the usual case
            continue
        if not isinstance(placement, Placement):
            raise ValueError(
                f"a placement is Shard(dim), Replicate() or Partial(), got {placement!r} in "
                f"{placements}: weft.dtensor.notation reads other notations"
            )
        if isinstance(placement, Partial) and type(placement) is not Partial:
            raise ValueError(
                f"{placement!r} is reduced in a way of its own, which only its maker knows: "
                f"redistribute the tensor to Replicate() or Shard(dim) there first"
            )
        if isinstance(placement, Partial) and placement.reduce_op not in REDUCE:
            raise ValueError(
                f"{placement} asks for an unknown reduction: Partial takes one of {list(REDUCE)}"
            )
        if is_shard(placement):
            dim = shard_dim(placement)
            if not -ndim <= dim < ndim:
                raise ValueError(
                    f"{placement} shards dim {dim}, but the tensor has {ndim} dims: shard a dim "
                    f"in [{-ndim}, {ndim}), or use Replicate()"
                )
            if pieces_of(placement) < 1:
                raise ValueError(
                    f"{placement} takes no part of the tensor: split_factor must be at least 1"
                )
            if dim < 0:
                placement = moved(placement, dim + ndim)
        result.append(placement)
    return tuple(result)


def from_front(dim: Any, ndim: int) -> int:
    """A dim that may be negative, counted from the front; 0 for a scalar."""
    return int(dim) % ndim if ndim else 0


def moved(placement: Placement, dim: int) -> Placement:
    """The same kind of shard, of tensor dim `dim`."""
    if isinstance(placement, _StridedShard):
        return _StridedShard(dim, split_factor=placement.split_factor)
    return Shard(dim)


def show(placements: Sequence[Placement]) -> str:
    """Placements in short: `[S(0), R, P(sum)]`."""
    return f"[{', '.join(map(_short, placements))}]"


def _short(placement: Placement) -> str:
    if isinstance(placement, _StridedShard):
        return f"_S({placement.dim}, {placement.split_factor})"
    if isinstance(placement, Shard):
        return f"S({placement.dim})"
    return f"P({placement.reduce_op})" if isinstance(placement, Partial) else "R"


@lru_cache(maxsize=1024)
def check_partials(placements: Placements, dtype: torch.dtype) -> None:
    """Raise `ValueError` if mesh dims would be reduced by operations that do not commute, or that
    torch does not have for `dtype`.

    All ranks find this before they communicate. The reduction itself runs only where there are
    terms to reduce, and would raise on some ranks while others wait for them.
    """
    kinds = {p.reduce_op for p in placements if isinstance(p, Partial)}
    if len(kinds) > 1 and not kinds <= set(LINEAR_REDUCTIONS):
        raise ValueError(
            f"Mixed Partial reduce types are not supported: {show(placements)} would be reduced by "
            f"{sorted(kinds)} in an order that matters. Redistribute one of them first."
        )
    with unset_fake_temporarily():
        for kind in sorted(kinds):
            one = torch.ones((), dtype=dtype, device="cpu")
            try:
                REDUCE[kind](one, one.clone())
                if kind == "avg":
                    divide_(one, 2)
            except (RuntimeError, TypeError) as error:  # by torch 2.15 of complex numbers
                raise ValueError(
                    f"{show(placements)} of {dtype} cannot be reduced: torch has no such {kind} "
                    f"({error}). Make it of another dtype, by to(dtype) of the local tensors"
                ) from None
