"""What products and attention of any layouts move, beside the least that is possible.

The least is counted from the layouts alone, element by element: who has it, who needs it, and of a
sum, how many terms there are. Nothing of the planner is asked. What would run is watched on a mesh
without processes: each redistribution, by the pieces that ranks take of others, and each fused op.
`test_dtensor_layout_pairs` and `test_dtensor_fusion` see that ranks run just that.

A result is made before it is known how it is wanted. So a product is compared with the least that
leads to the layout in which it was made, and from there to the one that is wanted.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch.nn import functional

from weft.collectives import cost
from weft.dtensor import DTensor, Partial, Replicate, Shard
from weft.dtensor.fused import attention, linear
from weft.dtensor.layout.boxes import contiguous_layout
from weft.dtensor.layout.placements import show
from weft.dtensor.move import redistribute, transfers
from weft.dtensor.plans.propagation import pretended_mesh

Placed = tuple[Any, ...]
Shape = tuple[int, ...]
R, S0, S1, S2, P = Replicate(), Shard(0), Shard(1), Shard(2), Partial()
NEVER = 1 << 50
# What one more collective costs, in elements: all that these tensors have.
STAY = 1 << 20


@cache
def held(shape: Shape, mesh: Shape, placed: Placed) -> Any:
    """(ranks, elements): which term of a sum a rank has of each element, -1 for none."""
    terms = np.full((math.prod(mesh), *shape), -1)
    for at, rank in enumerate(np.ndindex(*mesh)):
        block, term = terms[at], 0
        for size, i, p in zip(mesh, rank, placed, strict=True):
            if isinstance(p, Shard):
                block = np.array_split(block, size, p.dim)[i]
            elif isinstance(p, Partial):
                term = term * size + i
        block[...] = term
    return terms.reshape(len(terms), -1)


@cache
def least(shape: Shape, mesh: Shape, old: Placed, new: Placed) -> int:
    """The least number of elements that ranks must send to get from one layout to another."""
    for dim, (a, b) in enumerate(zip(old, new, strict=True)):
        if isinstance(b, Partial):
            # Along it nothing is summed: each part of the mesh moves terms of its own.
            rest = [(*p[:dim], *p[dim + 1 :]) for p in (mesh, old, new)]
            return mesh[dim] * least(shape, *rest) if a == b else NEVER
    has, wants = held(shape, mesh, old), held(shape, mesh, new) >= 0
    terms, needing = has.max() + 1, wants.sum(0)
    lie_right = (wants & (has >= 0)).sum(0)
    if terms == 1:
        return int((needing - lie_right).sum())
    # All other terms come to one of them, or to one that needs the sum; it is then handed on.
    return int((terms - 1 + needing - (lie_right > 0))[needing > 0].sum())


def test_the_least_is_that_of_the_textbook() -> None:
    full, W = (12, 12), (3,)
    assert least(full, W, (S0,), (R,)) == 2 * 144
    assert least(full, W, (P,), (S0,)) == 2 * 144
    assert least(full, W, (P,), (R,)) == 4 * 144
    assert least(full, W, (S0,), (S1,)) == 2 * 144 // 3
    assert least(full, (2, 2), (S0, S0), (S0, R)) == 144
    assert least(full, (2, 2), (P, S0), (P, R)) == 2 * 144
    assert least(full, (2, 2), (R, S0), (S1, S0)) == 0


# x (M, K) @ w (K, N) -> y (M, N), of what each rank has; of stacks, also one by one.
ALONE = [(R, R, R), (S0, R, S0), (R, S1, S1), (S1, S0, P), (P, R, P), (R, P, P)]
STACKED = [
    *(tuple(Shard(p.dim + 1) if isinstance(p, Shard) else p for p in each) for each in ALONE),
    (S0, S0, S0),
]


class Moved(NamedTuple):
    """By a forward, or by a backward; `floor` is in elements, with `stay` for each collective."""

    name: str
    collectives: int
    elements: int
    floor: int


class Products:
    """The least that a product and its gradients move; `stay`: what a collective costs."""

    def __init__(self, mesh: Shape, x: Shape, w: Shape, stay: int) -> None:
        self.mesh, self.stay, last = mesh, stay, len(x) - 1
        turned = [(*s[:-2], s[-1], s[-2]) for s in (x, w)]
        self.shapes = [x, w, (*x[:-1], w[-1]), *turned]
        every = itertools.product(STACKED if last == 2 else ALONE, repeat=len(mesh))
        self.alone = [tuple(zip(*each, strict=True)) for each in every]
        self.other = {Shard(last): Shard(last - 1), Shard(last - 1): Shard(last)}

    def turned(self, placed: Placed) -> Placed:
        return tuple(self.other.get(p, p) for p in placed)

    def cost(self, shape: Shape, old: Placed, new: Placed) -> int:
        moved = least(shape, self.mesh, old, new)
        return moved + self.stay * (moved > 0)

    @cache  # noqa: B019 - as many as there are tests
    def product(self, which: Shape, *placed: Placed) -> int:
        """Of one product, of factors and to a result that are placed so."""
        x, w, y = (self.shapes[i] for i in which)
        of_x, of_w, of_y = placed
        return min(
            self.cost(x, of_x, a) + self.cost(w, of_w, b) + self.cost(y, c, of_y)
            for a, b, c in self.alone
        )

    def forward(self, x: Placed, w: Placed, made: Placed, y: Placed) -> int:
        return self.product((0, 1, 2), x, w, made) + self.cost(self.shapes[2], made, y)

    def backward(self, x: Placed, w: Placed, made: Placed, y: Placed) -> int:
        grad = reduced(made)
        of_x = self.product((2, 4, 0), grad, self.turned(w), reduced(x))
        of_w = self.product((3, 2, 1), self.turned(x), grad, reduced(w))
        return self.cost(self.shapes[2], y, grad) + of_x + of_w


def reduced(placed: Placed) -> Placed:
    """How a gradient is placed."""
    return tuple(R if isinstance(p, Partial) else p for p in placed)


class Watch:
    """What has moved: the elements, and the name, of each collective."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.moved = ranks, list[tuple[int, str]]()

    def add(self, elements: int, name: str) -> None:
        self.moved.append((elements, name))

    def taken(self, name: str, floor: int) -> Moved:
        """What has moved since, beside a floor."""
        elements = sum(each for each, _ in self.moved)
        name = f"{name}: {', '.join(told for _, told in self.moved)}"
        moved, self.moved = Moved(name, len(self.moved), elements, floor), []
        return moved

    def move(self, local: torch.Tensor, source: Any, target: Any) -> torch.Tensor:
        """In place of `redistribute._move_now`."""
        for step in transfers.move_plan(source, target).steps:
            if not step.is_local:
                received = sum(
                    piece.numel * sum(holder != rank for holder in piece.holders)
                    for rank in range(self.ranks)
                    for piece in step.pieces_of(rank)
                )
                ends = step.source.placements, step.target.placements
                self.add(received, " -> ".join(map(show, ends)))
        return local.new_zeros(target.local_shape)


class Product(torch.autograd.Function):
    """A fused op of one rank's shapes: it computes nothing, and tells what it would move."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, op: str, ranks: int, dim: int, watch: Watch) -> Any:
        needs_x, needs_w, *_ = ctx.needs_input_grad
        shape, summed = [*x.shape[:-1], w.shape[-1]], x.numel() // x.shape[-1] * w.shape[-1]
        if op == "all_gather_matmul":
            shape[dim] *= ranks
            moved, again = (ranks - 1) * x.numel(), needs_x
        elif op == "matmul_reduce_scatter":
            shape[dim] //= ranks
            moved, again = summed * (ranks - 1) // ranks, needs_x or needs_w
        else:
            moved, again = 2 * summed * (ranks - 1) // ranks, False
        ctx.told = watch, op, watch.ranks * moved, again, x.shape, w.shape
        watch.add(watch.ranks * moved, op)
        return x.new_zeros(shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        watch, op, moved, again, of_x, of_w = ctx.told
        if again:
            watch.add(moved, f"{op} backward")
        return grad.new_zeros(of_x), grad.new_zeros(of_w), None, None, None, None


class Around(torch.autograd.Function):
    """Ring or Ulysses attention of one rank's shapes, likewise."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, op: str, ranks: int, watch: Watch) -> Any:
        # Ulysses swaps heads of q, k, v and the result at once there, the result on its way back.
        keys = k.numel() + v.numel()
        moved = (ranks - 1) * (keys if op == "ring" else (2 * q.numel() + keys) // ranks)
        ctx.told = watch, op, watch.ranks * moved, [t.shape for t in (q, k, v)]
        watch.add(watch.ranks * moved, op)
        return q.new_zeros(*q.shape[:-1], v.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        watch, op, moved, shapes = ctx.told
        watch.add(moved, f"{op} backward")
        if op == "ring":  # keys and values come once more, beside the sums of their gradients
            watch.add(moved, "ring backward")
        return *map(grad.new_zeros, shapes), None, None, None


@contextmanager
def dry(shape: Shape) -> Iterator[tuple[Any, Watch]]:
    """A mesh without processes, on which nothing moves but is told."""
    ranks = torch.arange(math.prod(shape)).view(shape)
    mesh: Any = pretended_mesh("cpu", ranks)
    mesh.get_group = lambda dim: shape[dim]
    watch = Watch(ranks.numel())

    def product(op: str) -> Callable[..., Any]:
        def run(x: Any, w: Any, ranks: int, bias: Any = None, **options: Any) -> Any:
            dim = options.get("gather_dim", 0) or options.get("scatter_dim", 0)
            y = Product.apply(x, w, op, ranks, dim, watch)
            return y if bias is None else y + bias

        return run

    def around(op: str) -> Callable[..., Any]:
        return lambda q, k, v, ranks, **_: Around.apply(q, k, v, op, ranks, watch)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(redistribute, "_move_now", watch.move))
        for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
            stack.enter_context(mock.patch.object(linear, op, product(op)))
        for op in ("ring", "ulysses"):
            stack.enter_context(mock.patch.object(attention, f"{op}_attention", around(op)))
        yield mesh, watch


def placed(mesh: Any, shape: Shape, of: Placed) -> Any:
    layout = contiguous_layout(mesh, of, shape, torch.float64)
    local = torch.zeros(layout.local_shape, dtype=torch.float64, requires_grad=True)
    return DTensor.from_local(local, mesh, of, shape=shape, stride=layout.stride)


SPELLINGS: dict[int, list[Callable[..., Any]]] = {
    2: [
        lambda x, w: x @ w,
        lambda x, w: torch.einsum("mk,kn->mn", x, w),
        lambda x, w: functional.linear(x, w.t()),
        lambda x, w: torch.addmm(x.new_zeros(w.shape[1]), x, w),
    ],
    3: [
        torch.bmm,
        lambda x, w: torch.einsum("bmk,bkn->bmn", x, w),
        torch.matmul,
    ],
}


def cases(ndim: int, dims: int, step: int) -> list[tuple[Placed, Placed, Placed]]:
    """Layouts of x, of w, and of the result that is wanted: each `step`th of all."""
    whole = [R, S0, S1, S2][: ndim + 1]
    kinds = [*whole, P], [*whole, P], whole
    return list(itertools.product(*(itertools.product(k, repeat=dims) for k in kinds)))[::step]


def walk(mesh_shape: Shape, ndim: int, step: int, scale: int, stay: int) -> list[Moved]:
    """Of each forward and each backward."""
    M, K, N = 24 * scale, 12 * scale, 36 * scale
    shapes = ((12, M, K), (12, K, N)) if ndim == 3 else ((M, K), (K, N))
    least_of, found = Products(mesh_shape, *shapes, stay), []
    with dry(mesh_shape) as (mesh, watch):
        for number, (x, w, y) in enumerate(cases(ndim, len(mesh_shape), step)):
            spelled = SPELLINGS[ndim][number % len(SPELLINGS[ndim])]
            made = spelled(*map(placed, (mesh, mesh), shapes, (x, w)))
            wanted, ends = made.redistribute(mesh, y), (x, w, made.placements, y)
            name = f"{show(x)} @ {show(w)} to {show(y)}"
            found.append(watch.taken(name, least_of.forward(*ends)))
            wanted.backward(placed(mesh, made.shape, y).detach())
            found.append(watch.taken(f"{name}, backward", least_of.backward(*ends)))
    return found


# Mesh, dims of x, every how manieth case, and how many collectives may be more than the least: a
# gradient of a stack may not come out as its factor is placed.
WALKS = [
    ((2,), 2, 1, 0),
    ((3,), 2, 1, 0),
    ((2, 2), 2, 31, 0),
    pytest.param((2, 2), 2, 1, 1, marks=pytest.mark.slow),  # one of 500, with factors that are sums
    ((2,), 3, 1, 1),
    ((3,), 3, 1, 1),
    ((2, 2), 3, 307, 2),
    pytest.param((2, 2), 3, 11, 2, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("mesh", "ndim", "step", "more"), WALKS)
def test_small_products_make_no_more_collectives(
    mesh: Shape, ndim: int, step: int, more: int
) -> None:
    found = walk(mesh, ndim, step, 1, STAY)
    over = [(each, each.collectives - each.floor // STAY) for each in found]
    wrong = [f"{each.name}: {n} more than the least" for each, n in over if n > more]
    assert not wrong, "\n".join(wrong)
    assert sum(n > 0 for _, n in over) <= 0.08 * len(found)


@pytest.mark.parametrize(("mesh", "ndim", "step", "more"), WALKS)
def test_large_products_move_few_bytes(mesh: Shape, ndim: int, step: int, more: int) -> None:
    """With collectives that cost nothing but their bytes. Prices are of one mesh dim at a time, and
    a pull of its own, which writes once more, is priced for that: some exceed the least.
    """
    kind = dataclasses.replace(cost._TYPICAL["cpu"], sync_us=0.0)
    priced = mock.patch.dict(cost._TYPICAL, cpu=kind)
    with priced, mock.patch.object(transfers, "STEP_BYTES", 0):
        found = walk(mesh, ndim, step, 2, 0)
    wrong = [f"{e.name}: {e.elements}, not {e.floor}" for e in found if e.elements > 1.75 * e.floor]
    assert not wrong, "\n".join(wrong)
    assert sum(each.elements > 1.05 * each.floor for each in found) <= 0.2 * len(found)


# q, k and v, and the result, where each rank can attend by itself. Of queries cut by rows (which
# are not causal) the gradients of keys and values are sums.
ATTENDED = [(S0, S0, S0), (S1, S1, S1), (S2, R, S2), (R, R, R)]


def least_attention(
    mesh: Shape, shape: Shape, q: Placed, k: Placed, made: Placed, y: Placed
) -> int:
    """Of forward and backward together of attention that is made like that."""

    def moved(old: Placed, new: Placed, tensors: int = 1) -> int:
        elements = least(shape, mesh, old, new)
        return tensors * (elements + STAY * (elements > 0))

    def both(each: tuple[Placed, ...]) -> int:
        of_q, of_k, out = zip(*each, strict=True)
        of_grad = tuple(P if a == S2 else b for a, b in zip(of_q, of_k, strict=True))
        there = moved(q, of_q) + moved(k, of_k, 2) + moved(out, made)
        return there + moved(made, out) + moved(of_q, q) + moved(of_grad, k, 2)

    every = itertools.product(ATTENDED, repeat=len(mesh))
    return min(map(both, every)) + moved(made, y) + moved(y, made)


@pytest.mark.parametrize(
    ("mesh_shape", "step", "more"),
    [
        ((2,), 1, 0),
        ((3,), 1, 0),
        ((2, 2), 61, 2),
        pytest.param((2, 2), 3, 2, marks=pytest.mark.slow),
    ],
)
def test_small_attention_makes_few_collectives(mesh_shape: Shape, step: int, more: int) -> None:
    """Two more where the least has all ranks attend to everything, to spare gradients' moves."""
    shape, every = (12, 12, 12, 1), list(itertools.product([R, S0, S1, S2], repeat=len(mesh_shape)))
    wrong: list[str] = []
    with dry(mesh_shape) as (mesh, watch):
        for number, (q, k, y) in enumerate(list(itertools.product(every, repeat=3))[::step]):
            qkv = [placed(mesh, shape, of) for of in (q, k, k)]
            made = functional.scaled_dot_product_attention(*qkv, is_causal=number % 2 == 1)
            made.redistribute(mesh, y).backward(placed(mesh, shape, y).detach())
            floor = least_attention(mesh_shape, shape, q, k, made.placements, y)
            told = watch.taken(f"q {show(q)}, kv {show(k)}, {number % 2 == 1} to {show(y)}", floor)
            if told.collectives > floor // STAY + more:
                wrong.append(f"{told.name}: {told.collectives}, not {floor // STAY}")
    assert not wrong, "\n".join(wrong)
