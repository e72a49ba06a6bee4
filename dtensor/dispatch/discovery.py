"""Rule discovery: an op without a rule is tried on small random tensors.

For a candidate strategy it runs once on whole tensors and once on each part of them. If the parts'
results make up the whole result in every trial, along some dim or as a sum, the strategy is taken
to be right; if there is none, the op runs on replicas.

    linalg.inv, x (8, 4, 4) -> (8, 4, 4)      cut along dim 0: parts of 5, 2, 1 give parts of the
                                              whole result: S(0) -> S(0)
                                              cut along dim 1: raises, as parts are not square

The trials include what could be misleading: parts of length 1, which are broadcast, and of length 0
if a rank may have one; NaN and infinities. A constant result proves nothing. Tensors are small, but
keep dims of size 1, equal sizes, and remainders. Outputs are shards, replicas or sums, inputs
shards or replicas. Every rank makes the same trials on its CPU, with its own generator: nothing is
communicated, and no state changes.
"""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import _disable_current_modes

from weft.collectives.ranks.caches import KeptDict
from weft.dtensor.dispatch.call import Meta, OpCall, Strategy, leaves, map_tree
from weft.dtensor.layout.boxes import Layout
from weft.dtensor.layout.placements import is_inexact, is_shard, moved, pieces_of, shard_dim
from weft.dtensor.layout.runs import Shape

_LARGE = 16  # dims up to this size are probed as they are
_MAX_CANDIDATES = 48
_MAX_NUMEL = 1 << 16
_TOLERANCE = 1e-9
# Ops for internal use, which do not check the shapes that they are given; those of linalg do.
_TRUSTING = re.compile(r"_(?!linalg_)|native_")
asked: set[Any] = set()  # ops to try, whoever's they are: see `experimental.discover_sharding`
_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


_Kinds = tuple["int | str", ...]
# What each output is, if the inputs are cut: a dim, "same", or "sum"; whether values were refused.
_Found = tuple[_Kinds | None, bool]
_found = KeptDict[Any, _Found](4096, f"{__name__}._found")


def discovered(call: OpCall, writes: Sequence[int]) -> tuple[list[Strategy], bool]:
    """(strategies that a probe of the op has confirmed, whether it has refused some values).

    No strategies where nothing can be proven.
    """
    call = _in_numbers(call)
    if not _may_probe(call):
        return [], False
    strategies: list[Strategy] = []
    refuses = False
    for placement, dims in _cuts_to_try(call):
        outputs, refused = _probed(call, dims, writes, _leaves_empty(call, dims))
        if outputs is None:
            continue
        refuses |= refused
        inputs = tuple(Replicate() if d is None else moved(placement, d) for d in dims)
        placed = tuple(_placement(out, placement) for out in outputs)
        strategy = Strategy(inputs, placed)
        if strategy not in strategies:
            strategies.append(strategy)
    return strategies, refuses


def _in_numbers(call: OpCall) -> OpCall:
    """The call with numbers in place of symbolic sizes, as a probe needs them."""

    def settled(a: Any) -> Any:
        if isinstance(a, Layout):
            return a.closed()
        if isinstance(a, Meta):
            return Meta(tuple(map(int, a.shape)), tuple(map(int, a.stride)), a.dtype)
        return int(a) if isinstance(a, torch.SymInt) else a

    numbers = OpCall(call.op, *map_tree([list(call.args), call.kwargs], settled))
    numbers.name = call.name
    numbers.outputs = list(map(settled, call.outputs))
    numbers.output_tree = map_tree(call.output_tree, settled)
    return numbers


def _placement(found: int | str, like: Placement) -> Placement:
    if isinstance(found, int):
        return moved(like, found)
    return Partial("sum") if found == "sum" else Replicate()


def _may_probe(call: OpCall) -> bool:
    op: Any = call.op
    tags = set(getattr(op, "tags", ()))
    unfit = {
        torch.Tag.nondeterministic_seeded,
        torch.Tag.data_dependent_output,
        torch.Tag.dynamic_output_shape,
        torch.Tag.inplace_view,
    }
    if tags & unfit or not call.outputs:
        return False
    checks = not _TRUSTING.match(call.name) and not call.name.endswith("_backward")
    if op not in asked and not (getattr(op, "namespace", "") == "aten" and checks):
        return False
    if any(isinstance(a, torch.Generator) for a in leaves([call.args, call.kwargs])):
        return False
    if any(leaf is not None and not isinstance(leaf, Meta) for leaf in leaves(call.output_tree)):
        return False
    # Integers may be indices, which not every kernel checks: random ones could crash it.
    return not any(not (is_inexact(t.dtype) or t.dtype == torch.bool) for t in call.inputs)


def _cuts_to_try(call: OpCall) -> Iterator[tuple[Placement, tuple[int | None, ...]]]:
    """For each shard of a tensor: the others cut along a dim of the same size, or replicated."""
    seen: set[tuple[int | None, ...]] = set()
    count = 0
    for at, layout in enumerate(call.inputs):
        for placement in layout.placements:
            if not is_shard(placement):
                continue
            dim = shard_dim(placement)
            size, from_end = layout.shape[dim], dim - len(layout.shape)
            options: list[list[int | None]] = []
            for other, theirs in enumerate(call.inputs):
                own: list[int | None] = [None]
                for d in (dim, from_end + len(theirs.shape)):
                    if 0 <= d < len(theirs.shape) and theirs.shape[d] == size and d not in own:
                        own.insert(0, d)
                options.append([dim] if other == at else own)
            for dims in itertools.product(*options):
                if dims not in seen and count < _MAX_CANDIDATES:
                    seen.add(dims)
                    count += 1
                    yield placement, dims


def _leaves_empty(call: OpCall, dims: tuple[int | None, ...]) -> bool:
    """Whether a rank of the mesh may have nothing of a dim that is cut."""
    pieces = math.lcm(*map(pieces_of, call.placements))
    ranks = len(call.inputs[0].place.ranks) * pieces
    # Shards of shards, and strided ones, are known to be filled only if the division is even.
    nested = call.mesh.ndim > 1 or pieces > 1
    sizes = {
        layout.shape[dim] for layout, dim in zip(call.inputs, dims, strict=True) if dim is not None
    }
    return any(n % ranks and (nested or -(-n // -(-n // ranks)) < ranks) for n in sizes)


def _shrunk(call: OpCall) -> dict[int, int]:
    """A smaller size for each large one."""
    tensors = cast("list[Layout | Meta]", [*call.inputs, *call.outputs])
    # Twelve keeps what the size leaves when divided by 2, 3 and 4.
    small = {n: 12 + n % 12 for t in tensors for n in t.shape if n > _LARGE}
    used = {n for t in tensors for n in t.shape if n <= _LARGE}
    for n in sorted(small):
        while small[n] in used:
            small[n] += 12
        used.add(small[n])
    return small


def _probed(
    call: OpCall, dims: tuple[int | None, ...], writes: Sequence[int], empty: bool
) -> _Found:
    """What a probe finds of inputs that are cut along `dims`."""
    small = _shrunk(call)
    key = _key(call, dims, small, empty)
    if key not in _found:
        with _disable_current_modes(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _found[key] = _probe(call, dims, tuple(writes), small, empty)
    return _found[key]


def _key(call: OpCall, dims: Any, small: dict[int, int], empty: bool) -> Any:
    def frozen(a: Any) -> Any:
        if isinstance(a, Layout):
            return "tensor", tuple(small.get(n, n) for n in a.shape), a.dtype
        if isinstance(a, (list, tuple)):
            return tuple(map(frozen, a))
        if isinstance(a, dict):
            return tuple((name, frozen(item)) for name, item in sorted(a.items()))
        return type(a), a

    return call.op, frozen(call.args), frozen(call.kwargs), dims, empty


def _probe(
    call: OpCall,
    dims: tuple[int | None, ...],
    writes: tuple[int, ...],
    small: dict[int, int],
    empty: bool,
) -> _Found:
    shapes = [tuple(small.get(n, n) for n in t.shape) for t in call.inputs]
    lengths = {s[d] for s, d in zip(shapes, dims, strict=True) if d is not None}
    if len(lengths) != 1 or any(torch.Size(s).numel() > _MAX_NUMEL for s in shapes):
        return None, False
    length = lengths.pop()
    if length < 2:
        return None, False
    believed: list[set[int | str]] | None = None
    told, refused = False, False
    numbers, masks = [*_DRAWS, *_beyond_numbers(call)], _masks(call)
    for seed, draw in enumerate([*numbers, *masks]):
        rng = torch.Generator().manual_seed(seed)
        tensors = [draw(rng, shape, t.dtype) for shape, t in zip(shapes, call.inputs, strict=True)]
        whole = _run_copies(call, tensors, writes)
        if whole is None and seed >= len(numbers):
            return None, False  # a small `source` has too few values for the mask, say
        if whole is None:  # not every op takes NaN
            refused = True
            continue
        kinds = _compare(call, dims, tensors, writes, whole, _cuts(length, empty, seed))
        if kinds is None:
            return None, False
        believed = (
            kinds if believed is None else [a & b for a, b in zip(believed, kinds, strict=True)]
        )
        if not all(believed):
            return None, False
        # A constant proves a shard only by its shape (as a status for each matrix does).
        shaped = [all(isinstance(kind, int) for kind in kinds) for kinds in believed]
        varies = [_varies(t) for t in whole]
        told = told or (any(varies) and all(map(max, varies, shaped)))
    if believed is None or not told or not _shapes_fit(call, dims, believed):
        return None, False
    return tuple(_first_kind(kinds) for kinds in believed), refused


def _first_kind(kinds: set[int | str]) -> int | str:
    shards = sorted(kind for kind in kinds if isinstance(kind, int))
    return shards[0] if shards else ("same" if "same" in kinds else "sum")


def _shapes_fit(call: OpCall, dims: tuple[int | None, ...], believed: list[set[int | str]]) -> bool:
    """Whether the real outputs can be cut like the real inputs, by dims of the same size."""
    length = next(t.shape[d] for t, d in zip(call.inputs, dims, strict=True) if d is not None)
    for meta, kinds in zip(call.outputs, believed, strict=True):
        for kind in list(kinds):
            if isinstance(kind, int) and meta.shape[kind] != length:
                kinds.remove(kind)
    return all(believed)


def _cuts(length: int, empty: bool, seed: int) -> list[int]:
    """Lengths of the parts: one has length 1, one is empty where a rank's may be."""
    cuts = [length - 1, 1] if length < 4 or seed % 2 else [length - length // 2, length // 2 - 1, 1]
    return [*cuts, 0] if empty else cuts


def _compare(
    call: OpCall,
    dims: tuple[int | None, ...],
    tensors: list[torch.Tensor],
    writes: tuple[int, ...],
    whole: list[torch.Tensor],
    cuts: list[int],
) -> list[set[int | str]] | None:
    parts: list[list[torch.Tensor]] = []
    start = 0
    for length in cuts:
        mine = [
            t if d is None else t.narrow(d, start, length)
            for t, d in zip(tensors, dims, strict=True)
        ]
        start += length
        part = _run_copies(call, mine, writes)
        if part is None or len(part) != len(whole):
            return None
        parts.append(part)
    kinds = [
        _kinds(result, list(of_parts), cuts)
        for result, of_parts in zip(whole, zip(*parts, strict=True), strict=True)
    ]
    return kinds if all(kinds) else None


def _kinds(whole: torch.Tensor, parts: list[torch.Tensor], cuts: list[int]) -> set[int | str]:
    """All relations in which the parts may be to the whole: shards of a dim, replicas, terms."""
    kinds: set[int | str] = set()
    if any(p.dtype != whole.dtype or p.dim() != whole.dim() for p in parts):
        return kinds
    if all(p.shape == whole.shape for p in parts):
        if all(_close(p, whole) for p in parts):
            kinds.add("same")
        if is_inexact(whole.dtype):
            total = torch.stack(parts).sum(0)
            if _close(total, whole):
                kinds.add("sum")
    for d in range(whole.dim()):
        if [p.shape[d] for p in parts] == cuts:
            rest = [(*p.shape[:d], *p.shape[d + 1 :]) for p in parts]
            if len(set(rest)) == 1 and whole.shape[d] == sum(cuts):
                joined = torch.cat(parts, d)
                if joined.shape == whole.shape and _close(joined, whole):
                    kinds.add(d)
    return kinds


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not is_inexact(b.dtype):
        return torch.equal(a, b)
    finite = b[b.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 1.0
    return torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE * scale, equal_nan=True)


def _varies(result: torch.Tensor) -> bool:
    """Whether a result proves anything: a constant would fit every relation."""
    flat = result.reshape(-1)
    if flat.numel() < 2:
        return flat.numel() == 1 and bool((flat != 0).all())
    return bool((flat != flat[0]).any()) and not bool((flat != flat).all())


def _run_copies(
    call: OpCall, tensors: list[torch.Tensor], writes: tuple[int, ...]
) -> list[torch.Tensor] | None:
    """Results, or what is written, of the op on these tensors; None where it refuses them."""
    copies = [t.clone() for t in tensors]
    each = iter(copies)
    args, kwargs = map_tree(
        [list(call.args), dict(call.kwargs)], lambda a: next(each) if isinstance(a, Layout) else a
    )
    if "dtype" in kwargs:
        kwargs["dtype"] = _WIDE.get(kwargs["dtype"], kwargs["dtype"])
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    try:
        result = call.op(*args, **kwargs)
    except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
        return None
    found = [t for t in leaves([result]) if isinstance(t, torch.Tensor)]
    if len(found) != len(call.outputs):
        return None
    written = [copies[i] for i in writes]
    if written and len(written) != len(found):
        return None  # what is written, and not returned, would go unseen
    return found


_Draw = Callable[[torch.Generator, Shape, torch.dtype], torch.Tensor]


def _draw(scale: float, shift: float, spoilt: bool) -> _Draw:
    def draw(rng: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        if dtype == torch.bool:
            return torch.rand(shape, generator=rng) < 0.5
        wide = _WIDE.get(dtype, dtype)
        values = torch.rand(shape, generator=rng, dtype=torch.float64) * scale + shift
        if spoilt:
            odd = torch.rand(shape, generator=rng)
            values[odd < 0.1] = float("nan")
            values[odd > 0.9] = float("inf")
        if dtype.is_complex:
            imag = torch.rand(shape, generator=rng, dtype=torch.float64) * scale + shift
            return torch.complex(values, imag).to(wide)
        return values.to(wide)

    return draw


def _definite(rng: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Symmetric, positive definite matrices: what some ops of linear algebra ask for."""
    values = _draw(2, -1, False)(rng, shape, dtype)
    floats = is_inexact(values.dtype)
    if floats and values.dim() >= 2 and shape[-1] == shape[-2]:
        eye = torch.eye(shape[-1], dtype=values.dtype)
        return values @ values.mH + shape[-1] * eye
    return values


def _beyond_numbers(call: OpCall) -> list[_Draw]:
    """Values beyond the numbers that the op is given, where those are large: bounds, say."""
    numbers = [a for a in leaves([call.args, call.kwargs]) if type(a) in (int, float)]
    largest = max((abs(a) for a in numbers if abs(a) < 1e30), default=0)
    return [_draw(8 * largest, -4 * largest, False)] if largest > _LARGE else []


def _masks(call: OpCall) -> list[_Draw]:
    """Masks all alike, begun or ended with False, and more random ones: few small ones tell much.

    Whether a part of `masked_scatter` takes the right values shows only if one before it is False.
    """
    if all(t.dtype != torch.bool for t in call.inputs):
        return []

    def draw_like(pattern: Callable[[torch.Tensor], torch.Tensor]) -> _Draw:
        def draw(rng: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
            if dtype != torch.bool:
                return _DRAWS[0](rng, shape, dtype)
            count = math.prod(shape)
            return pattern(torch.arange(count) / max(1, count)).reshape(shape)

        return draw

    patterns = [lambda at: at < 0, lambda at: at >= 0, lambda at: at >= 0.5, lambda at: at < 0.5]
    return [*map(draw_like, patterns), *[_DRAWS[0]] * 8]


# Signed, positive, large, matrices, with NaN and infinities, zeros.
_DRAWS: list[_Draw] = [
    _draw(2, -1, False),
    _draw(0.9, 0.05, False),
    _draw(200, -100, False),
    _definite,
    _draw(2, -1, True),
    _draw(0, 0, False),
]
