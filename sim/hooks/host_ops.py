"""Ops of torch in virtual time, and what stands for them where numerics are skipped."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from weft.sim.hooks.host_access import PlainOps, op_tensors, tensors_in
from weft.sim.schedule.scheduler import local
from weft.sim.time.trace import HostOp, Tracer

# They make a tensor, or look at one, without a kernel.
_FREE = frozenset(
    (
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
        *("is_pinned", "sym_size", "sym_stride", "sym_numel", "size", "stride", "is_same_size"),
        *("_local_scalar_dense", "lift_fresh", "set_", "resize_", "_unsafe_view"),
    )
)
_LARGE = 1 << 20  # bytes from which memory is not even zeroed


class HostOps(PlainOps):
    """Notes each op that would be a kernel on the stream of the rank that calls it.

    Ops on integers and booleans alone are taken to be the host's own bookkeeping: they are free,
    and always computed. Without `numerics`, the other ops compute nothing, except for views and
    ops on single numbers, such as an optimizer's count of its steps.
    """

    def __init__(self, tracer: Tracer, numerics: bool) -> None:
        super().__init__()
        self._tracer, self._numerics = tracer, numerics

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        if func.is_view or name in _FREE:
            return func(*args, **kwargs)
        reads, writes = _operands(func, args, kwargs)
        if _on_meta_only(reads + writes, kwargs):
            return func(*args, **kwargs)
        computed = self._numerics or not (
            _makes_floats(kwargs)
            or any(t.is_floating_point() and t.numel() > 1 for t in (*reads, *writes))
        )
        op = _wide_mm if func in _WIDE_MM else func
        out = op(*args, **kwargs) if computed else _uncomputed(func, name, args, kwargs, writes)
        results = writes or [t for t in tensors_in((out,)) if not any(t is r for r in reads)]
        strand = local.strand
        if strand is not None and any(t.is_floating_point() for t in (*reads, *results)):
            self._tracer.add(strand, self._op(strand.rank, name, reads, results))
        return out

    def _op(
        self, rank: int, name: str, reads: list[torch.Tensor], writes: list[torch.Tensor]
    ) -> HostOp:
        floats = [t for t in reads if t.is_floating_point()]
        narrowest = min(floats or writes, key=lambda t: t.element_size()).dtype
        dtype = "float8" if narrowest.itemsize == 1 else str(narrowest).removeprefix("torch.")
        return HostOp(
            name,
            self._bytes(rank, reads),
            self._bytes(rank, writes),
            _matmul_sizes(name, reads),
            dtype,
        )

    def _bytes(self, rank: int, tensors: list[torch.Tensor]) -> dict[int, int]:
        total: dict[int, int] = {}
        for tensor in tensors:
            if tensor.numel():
                owner = self._tracer.owner(tensor.data_ptr(), rank)
                total[owner] = total.get(owner, 0) + tensor.numel() * tensor.element_size()
        return total


def _operands(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Tensors that `func` reads, and those of its arguments that it writes."""
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    # What has an out= or is one of these does not look at what was there.
    overwrites = any(argument.is_out for argument in func._schema.arguments)
    overwrites = overwrites or func.overloadpacket.__name__ in ("copy_", "fill_", "zero_")
    for tensor, alias in op_tensors(func, args, kwargs):
        written = alias is not None and alias.is_write
        if written:
            writes.append(tensor)
        if not written or not overwrites:
            reads.append(tensor)
    return reads, writes


def _on_meta_only(tensors: list[torch.Tensor], kwargs: dict[str, Any]) -> bool:
    """Whether an op is asked for shapes alone, as dispatchers ask."""
    device = kwargs.get("device")
    return any(t.is_meta for t in tensors) or (device is not None and device.type == "meta")


def _makes_floats(kwargs: dict[str, Any]) -> bool:
    dtype = kwargs.get("dtype")
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


def _matmul_sizes(name: str, reads: list[torch.Tensor]) -> tuple[tuple[int, ...], int, int] | None:
    """The rows M of each product (M, K) @ (K, N) of a launch, N and K."""
    if name in ("_grouped_mm", "_scaled_grouped_mm"):
        return _grouped_sizes(reads)
    if name in ("mm", "addmm", "addmm_", "_scaled_mm"):
        matrices = [t for t in reads if t.ndim == 2]
        a, b = matrices[:2] if name in ("mm", "_scaled_mm") else matrices[-2:]
        return (a.shape[0],), b.shape[1], a.shape[1]
    if name in ("bmm", "baddbmm", "baddbmm_"):
        a, b = [t for t in reads if t.ndim == 3][-2:]
        return (a.shape[1],) * a.shape[0], b.shape[2], a.shape[2]
    if name == "_linear_pointwise":
        x, w = reads[0], reads[-1] if reads[-1].ndim == 2 else reads[1]
        return (math.prod(x.shape[:-1]),), w.shape[0], w.shape[1]
    return None


def _grouped_sizes(reads: list[torch.Tensor]) -> tuple[tuple[int, ...], int, int]:
    """As `_matmul_sizes`, of groups that end where the integers among the operands say."""
    a, b = reads[:2]
    ends = next((t.tolist() for t in reads if not t.is_floating_point()), [])
    counts = tuple(stop - start for start, stop in pairwise([0, *ends]))
    if a.ndim == b.ndim == 3:
        return (a.shape[1],) * len(a), b.shape[2], a.shape[2]
    if a.ndim == 2 and b.ndim == 2:  # groups of the contraction, which count as equal
        return (a.shape[0],) * len(counts), b.shape[1], -(-sum(counts) // max(1, len(counts)))
    if a.ndim == 3:  # groups of columns: as of the transposes
        return counts, a.shape[1], a.shape[2]
    return counts, b.shape[2], a.shape[1]


_WIDE_MM = (torch.ops.aten.mm.dtype, torch.ops.aten.mm.dtype_out)


def _wide_mm(
    a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """torch.mm whose result is of a wider dtype than its operands: GPUs only have it."""
    return torch.mm(a.to(dtype), b.to(dtype), out=out)


def _uncomputed(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], writes: list[torch.Tensor]
) -> Any:
    """What `func` returns, with undefined values in new tensors."""
    returns = func._schema.returns
    if all(r.alias_info is not None and r.alias_info.is_write for r in returns):
        return None if not returns else writes[0] if len(writes) == 1 else tuple(writes)
    if name == "_linear_pointwise":
        x, w = args[0], args[2] if isinstance(args[2], torch.Tensor) else args[1]
        w = w if w.ndim == 2 else args[1]
        shapes: Any = torch.empty((*x.shape[:-1], w.shape[0]), dtype=x.dtype, device="meta")
    else:
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("meta")}
        args, kwargs = tree_map_only(torch.Tensor, _on_meta, (args, kwargs))
        shapes = func(*args, **kwargs)
    return tree_map_only(torch.Tensor, _off_meta, shapes)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _off_meta(tensor: torch.Tensor) -> torch.Tensor:
    # Large memory is not touched, so that it is never there: it may be more than the machine has.
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return made if made.numel() * made.element_size() >= _LARGE else made.zero_()
