"""Rules of contractions: everything that is an einsum of two tensors, with or without a summand."""

from __future__ import annotations

import string
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from weft.dtensor.dispatch.call import Choices, Decomposed, OpCall, Strategy, leaves, rule
from weft.dtensor.layout.boxes import Layout
from weft.dtensor.layout.placements import distinct, is_shard, moved, pieces_of, shard_dim


def contraction(
    call: OpCall, first: str, second: str, out: str, *, offset: int = 0, bias: int | None = None
) -> Choices:
    """Strategies of `out = einsum(first, second)`, plus a summand that is broadcast onto it.

    Args:
        first, second, out: one letter a dim.
        offset: position of `first` among the tensor arguments; `second` comes next.
        bias: position of the summand.
    """
    replicate = Replicate()
    count = len(call.inputs)

    def strategy(a: Placement, b: Placement, c: Placement) -> Strategy:
        inputs: list[Placement] = [replicate] * count
        inputs[offset], inputs[offset + 1] = a, b
        if bias is not None:
            inputs[bias] = summand_placement(call.inputs[bias], call.outputs[0].shape, c)
        return Strategy(tuple(inputs), (c,))

    def at(letters: str, letter: str, like: Placement) -> Placement:
        return moved(like, letters.index(letter)) if letter in letters else replicate

    strategies = [strategy(replicate, replicate, replicate)]
    present: list[tuple[str, Placement]] = []
    for position, letters in ((offset, first), (offset + 1, second)):
        for placement in call.inputs[position].placements:
            if is_shard(placement):
                present.append((letters[shard_dim(placement)], placement))
    if bias is not None:  # the factors can be cut as the summand is
        summand = call.inputs[bias]
        shift = len(out) - summand.ndim
        for placement in filter(is_shard, summand.placements):
            if (
                summand.shape[shard_dim(placement)]
                == call.outputs[0].shape[shard_dim(placement) + shift]
            ):
                present.append((out[shard_dim(placement) + shift], placement))
    for letter, like in present:
        a, b = at(first, letter, like), at(second, letter, like)
        if not _fit(call.inputs[offset], a, call.inputs[offset + 1], b):
            continue
        c: Placement = moved(like, out.index(letter)) if letter in out else Partial("sum")
        candidate = strategy(a, b, c)
        if candidate not in strategies:
            strategies.append(candidate)
    for position in (offset, offset + 1):
        for placement in call.sums(call.inputs[position]):
            pair: list[Placement] = [replicate, replicate]
            pair[position - offset] = placement
            strategies.append(strategy(pair[0], pair[1], placement))
    return Choices(strategies)


def _fit(first: Layout, a: Placement, second: Layout, b: Placement) -> bool:
    """Whether two shards cut dims of the same size: one of size 1 is broadcast, and not cut."""
    if not (is_shard(a) and is_shard(b)):
        return True
    return first.shape[shard_dim(a)] == second.shape[shard_dim(b)]


def summand_placement(summand: Layout, out: tuple[int, ...], placement: Placement) -> Placement:
    """How the summand is placed so that it can be added to each rank's part of the result."""
    if not is_shard(placement):
        return placement
    own = shard_dim(placement) - (len(out) - len(summand.shape))
    if own < 0 or summand.shape[own] == 1:
        return Replicate()
    return moved(placement, own)


_PRODUCTS = {
    "mm": ("mk", "kn", "mn"),
    "bmm": ("bmk", "bkn", "bmn"),
    "mv": ("mk", "k", "m"),
    "dot": ("k", "k", ""),
    "vdot": ("k", "k", ""),
}
_WITH_SUMMAND = {"addmm": "mm", "baddbmm": "bmm", "addmv": "mv"}


@rule(_PRODUCTS)
def product(call: OpCall) -> Choices:
    """(first, second)."""
    return contraction(call, *_PRODUCTS[call.name])


@rule("_foreach_mm")
def products(call: OpCall) -> Decomposed:
    """The product of each two matrices of two lists."""
    return Decomposed(lambda firsts, seconds: list(map(torch.mm, firsts, seconds)))


@rule(_WITH_SUMMAND)
def with_summand(call: OpCall) -> Choices:
    """(summand, first, second): where the product is Partial, one rank adds the summand."""
    letters = _PRODUCTS[_WITH_SUMMAND[call.name.removesuffix("_")]]
    return contraction(call, *letters, offset=1, bias=0)


@rule("_trilinear")
def trilinear(call: OpCall) -> Decomposed:
    """A sum of products of three tensors, of F.bilinear: each lacks some of the dims."""

    def run(a: Any, b: Any, c: Any, *lacking: list[int], unroll_dim: int = 1) -> Any:
        dims = string.ascii_lowercase[: a.ndim + len(lacking[0])]
        kept = ("".join(x for i, x in enumerate(dims) if i not in each) for each in lacking[:4])
        return torch.einsum("{},{},{}->{}".format(*kept), a, b, c)

    return Decomposed(run)


@rule("_scaled_mm _scaled_mm_v2")
def scaled_product(call: OpCall) -> Choices:
    """(first, second, their scales, ...), of fp8. A scale is a number, or one a row or column.

    Scales of blocks, and sizes that kernels do not take a part of, are not cut.
    """
    bound, (M, N) = call.bound, call.outputs[0].shape
    # Lists in the second version, together with what they are of: 0 is a whole tensor, 1 a row.
    of_first, of_second = (list(leaves(bound[name])) for name in ("scale_a", "scale_b"))
    recipes = {*bound.get("recipe_a", ()), *bound.get("recipe_b", ())}
    if not (len(of_first) == len(of_second) == 1 and recipes <= {0, 1}):
        return Choices([call.whole])
    of_rows, of_columns = of_first[0].shape, of_second[0].shape
    if of_rows not in ((), (1,), (1, 1), (M, 1)) or of_columns not in ((), (1,), (1, 1), (1, N)):
        return Choices([call.whole])
    multiple = 16 * len(call.inputs[0].place.ranks)
    as_a_sum = call.outputs[0].dtype.itemsize > 1 and bound.get("scale_result") is None
    bias = None if bound["bias"] is None else 4
    strategies: list[Strategy] = []
    for strategy in contraction(call, *_PRODUCTS["mm"], bias=bias).strategies:
        a, b, _, _, *rest = strategy.inputs
        is_sum = isinstance(strategy.outputs[0], Partial)
        size = call.inputs[1].shape[shard_dim(b)] if is_shard(b) else 0
        if size % multiple == 0 and (as_a_sum or not is_sum):
            scale_a = a if shard_dim(a) == 0 and of_rows == (M, 1) else Replicate()
            scale_b = b if shard_dim(b) == 1 and of_columns == (1, N) else Replicate()
            strategies.append(Strategy((a, b, scale_a, scale_b, *rest), strategy.outputs))

    def localize(call: OpCall, inputs: list[Layout], outputs: list[Layout]) -> Any:
        def run(a: torch.Tensor, b: torch.Tensor, *rest: Any, **kwargs: Any) -> torch.Tensor:
            if not a.numel():
                return a.new_empty(outputs[0].local_shape, dtype=outputs[0].dtype)
            # By rows and by columns, as kernels for GPUs want them: what was moved is by rows.
            result: torch.Tensor = call.op(a.contiguous(), b.t().contiguous().t(), *rest, **kwargs)
            return result

        return run

    return Choices(strategies, localize)


# By the dims of the two: their letters, those of the result, and what the offsets divide.
_GROUPED = {
    (2, 3): ("mk", "gkn", "mn", "m"),
    (3, 2): ("gmk", "kn", "mn", "n"),
    (2, 2): ("mk", "kn", "gmn", "k"),
    (3, 3): ("gmk", "gkn", "gmn", ""),
}


@rule("_grouped_mm")
def grouped_product(call: OpCall) -> Choices:
    """(first, second, offsets): a matmul for each group, of which the offsets are the ends.

    8 rows of two experts, ends [5, 8]    rows cut: rank 0 has ends [4, 4], rank 1 has [1, 4]
                                          experts cut: ends [5] and, from row 5 on, [3]; terms of
                                          a sum, zeros in the rows of other experts
    """
    first, second, out, divided = _GROUPED[call.inputs[0].ndim, call.inputs[1].ndim]
    scales = 2 if len(call.inputs) == 5 else 0  # of both factors, before the offsets
    at = 0 if divided in first else 1  # the factor that is divided; the other one has the groups

    def localize(call: OpCall, inputs: list[Layout], outputs: list[Layout]) -> Any:
        dim = (first, second)[at].find(divided)
        start, size = inputs[at].offset[dim], inputs[at].local_shape[dim]
        groups, count = inputs[1 - at].offset[0], inputs[1 - at].local_shape[0]
        by_group = divided in ("m", "n") and 0 in inputs[1 - at].cut_dims
        shape, dtype, op = outputs[0].local_shape, outputs[0].dtype, call.op

        def run(*args: Any, **kwargs: Any) -> Any:
            factors, of_factors = list(args[:2]), list(args[2 : 2 + scales])
            ends, *rest = args[2 + scales :] or (None,)  # stacks of both factors have no groups
            if not all(t.numel() for t in factors):
                return factors[0].new_zeros(shape, dtype=dtype)
            if scales:  # by rows and by columns, as kernels of fp8 want them
                factors = [factors[0].contiguous(), factors[1].mT.contiguous().mT]
            ends = (ends - start).clamp(0, size) if divided else None
            if ends is None or not by_group:
                return op(*map(_with_aligned_rows, factors), *of_factors, ends, *rest, **kwargs)
            # The rows of this rank's groups come first. The host never reads where they begin.
            before = ends[groups - 1] if groups else 0
            ends = ends[groups : groups + count] - before
            index = torch.arange(size, device=ends.device)
            rows = (index + before) % size
            if scales:
                bits = factors[at].view(torch.uint8).index_select(dim, rows)
                factors[at], of_factors[at] = bits.view(factors[at].dtype), of_factors[at][rows]
            else:
                factors[at] = factors[at].index_select(dim, rows)
            result = op(*map(_with_aligned_rows, factors), *of_factors, ends, *rest, **kwargs)
            result = result.masked_fill((index >= ends[-1]).unsqueeze(1 - dim), 0)
            return result.new_zeros(shape).index_copy_(dim, rows, result)

        return run

    strategies = contraction(call, first, second, out).strategies
    # A rank holds one run of what a plain shard cuts.
    plain = [s for s in strategies if all(pieces_of(p) == 1 for p in s.inputs)]
    return Choices(plain, localize)


@rule("_scaled_grouped_mm")
def scaled_grouped_product(call: OpCall) -> Choices:
    """(rows, weights, a scale a row, scales (G, N), offsets): `grouped_product` of fp8.

    Other scales, and sizes that kernels do not take a part of, are not cut.
    """
    x, w, *others = call.inputs
    shapes = [layout.shape for layout in others[:2]]
    plain = len(call.inputs) == 5 and (x.ndim, w.ndim) == (2, 3)
    if not plain or shapes != [x.shape[:1], (w.shape[0], w.shape[2])]:
        return Choices([call.whole])
    found, multiple = grouped_product(call), 16 * len(x.place.ranks)
    strategies: list[Strategy] = []
    for strategy in found.strategies:
        a, b = strategy.inputs[:2]
        if any(isinstance(p, Partial) for p in (a, b)):
            continue
        dim = shard_dim(b) if is_shard(b) else 0
        if dim and w.shape[dim] % multiple:
            continue
        of_rows = a if is_shard(a) and shard_dim(a) == 0 else Replicate()
        of_columns = {0: b, 1: Replicate(), 2: Shard(1)}[dim]
        strategies.append(Strategy((a, b, of_rows, of_columns, Replicate()), strategy.outputs))
    return Choices(strategies, found.localize)


def grouped_weight_grad(
    x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """(R, K), (R, N) -> (G, K, N): gradient of `_grouped_mm`'s `weight`, with strides like that."""
    x, grad = _with_aligned_rows(x), _with_aligned_rows(grad)
    if weight.stride(-2) == 1:
        return torch._grouped_mm(grad.t(), x, offs=ends).mT
    return torch._grouped_mm(x.t(), grad, offs=ends)


@rule("grouped_weight_grad")
def _grouped_weight_grad(call: OpCall) -> Choices:
    """Of whole rows, only that of the groups whose weights this rank has."""
    strategies: list[Strategy] = []
    replicate = Replicate()
    for w in distinct(call.inputs[2].placements):
        if w == Shard(0):
            strategies.append(Strategy((replicate, replicate, w, replicate), (w,)))
        strategies += [
            Strategy((*s.inputs[:2], w, replicate), s.outputs)
            for s in contraction(call, "rk", "rn", "gkn").strategies
            if all(pieces_of(p) == 1 for p in s.inputs)
        ]

    def localize(call: OpCall, inputs: list[Layout], outputs: list[Layout]) -> Any:
        (start, size), shape = (
            (inputs[0].offset[0], inputs[0].local_shape[0]),
            outputs[0].local_shape,
        )
        groups, count = outputs[0].offset[0], shape[0]

        def run(x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, ends: Any) -> Any:
            if not x.numel() or not grad.numel() or not count:
                return grad.new_zeros(shape)
            ends = (ends - start).clamp(0, size)
            if 0 in outputs[0].cut_dims:  # the rows of this rank's groups come first
                before = ends[groups - 1] if groups else 0
                ends = ends[groups : groups + count] - before
                rows = (torch.arange(size, device=ends.device) + before) % size
                x, grad = x.index_select(0, rows), grad.index_select(0, rows)
            return grouped_weight_grad(x, grad, weight, ends)

        return run

    return Choices(strategies, localize)


def _with_aligned_rows(t: torch.Tensor) -> torch.Tensor:
    """`t` with rows, or columns, that begin at multiples of 16 bytes, which parts may not."""
    step = 16 // t.element_size()
    for own in (t, t.mT):
        if own.stride(-1) == 1 and own.stride(-2) >= own.shape[-1] and not own.stride(-2) % step:
            return t
    size = t.shape[-1]
    return torch.nn.functional.pad(t.contiguous(), (0, -size % step))[..., :size]
