"""Random programs: chains of ops on DTensors, in random layouts, beside the same on plain tensors.

A program is a list of steps, each a function that draws what it needs (dims, slices, numbers) from
a generator of its own, so that both runs draw alike. Steps that plain torch refuses are left out
when a program is made. All values are compared, those written through views too, and all gradients,
some of them differentiated again. The ranks are virtual: a program takes 50 ms.

    python tests/test_dtensor_programs.py 1000 2000     # more of them, and what differs
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from weft import sim
from weft.dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from weft.dtensor.placement_types import _StridedShard

Step = Callable[..., Any]
MESHES = [(2,), (3,), (4,), (2, 2), (1, 3)]
_MAX_VALUE, _MAX_NUMEL = 1e4, 3000
REFUSALS = (RuntimeError, IndexError, ValueError, TypeError, AttributeError, ZeroDivisionError)


def any_dim(rng: random.Random, x: Any) -> int:
    return rng.randrange(-x.ndim, x.ndim)


def a_slice(rng: random.Random, x: Any) -> tuple[Any, ...]:
    """Some of x along one dim, as an index."""
    dim = any_dim(rng, x) % x.ndim
    start = rng.randrange(x.shape[dim] + 1)
    stop = rng.randrange(start, x.shape[dim] + 1)
    return (*[slice(None)] * dim, slice(start, stop, rng.choice([1, 1, 2])))


def whole_numbers(x: Any, below: int) -> Any:
    """Integers in [0, below) that depend on the values."""
    return (x.detach().abs() * 7 + 0.37).real.long() % below


def unary(rng: random.Random, x: Any) -> Any:
    names = ["neg", "sin", "tanh", "abs", "square", "sigmoid", "sgn", "conj", "clone", "detach"]
    if x.is_floating_point():
        names += ["relu", "floor", "erf", "sign", "frac", "isnan", "atan", "contiguous"]
    return getattr(x, rng.choice(names))()


def activation(rng: random.Random, x: Any) -> Any:
    names = ("gelu", "silu", "elu", "softplus", "leaky_relu", "hardswish", "mish", "logsigmoid")
    return getattr(functional, rng.choice(names))(x)


def binary(rng: random.Random, a: Any, b: Any) -> Any:
    names = ["add", "sub", "mul", "maximum", "eq", "lt", "logical_and", "atan2", "hypot", "rsub"]
    name = rng.choice([*names, "true_divide"])
    return (
        torch.true_divide(a, b.abs() + 1) if name == "true_divide" else getattr(torch, name)(a, b)
    )


def with_number(rng: random.Random, x: Any) -> Any:
    number = rng.choice([2, -1, 0.5, 3, 1.5, 0, True, torch.tensor(2), torch.tensor(0.5)])
    how: list[Step] = [
        lambda: x + number,
        lambda: number - x,
        lambda: x * number,
        lambda: x / (number + 4),
        lambda: x**2,
        lambda: x > number,
        lambda: x.clamp(-0.7, 0.9),
        lambda: x // (number + 4),
    ]
    return rng.choice(how)()


def chosen(rng: random.Random, a: Any, b: Any, c: Any) -> Any:
    how: list[Step] = [
        lambda: torch.where(a > 0, b, c),
        lambda: torch.addcmul(a, b, c, value=0.5),
        lambda: torch.lerp(a, b, c),
        lambda: a.masked_fill(b > 0.3, 0.5),
        lambda: torch.where(a.abs() > 0.5, a, 0.0),
    ]
    return rng.choice(how)()


def reduce(rng: random.Random, x: Any) -> Any:
    dims: Any = rng.sample(range(x.ndim), rng.randrange(1, x.ndim + 1)) if x.ndim else []
    keep = rng.random() < 0.5
    if rng.random() < 0.4:
        order = rng.choice([0, 1, 2, 3, math.inf, -math.inf])
        return torch.linalg.vector_norm(x, order, dims, keepdim=keep)
    if rng.random() < 0.5:
        name = rng.choice(["sum", "mean", "amax", "amin", "var", "std", "logsumexp", "nansum"])
        return getattr(x, name)(dims, keepdim=keep)
    if rng.random() < 0.3:
        return getattr(x, rng.choice(["sum", "mean", "max", "prod", "any", "argmax", "median"]))()
    if x.dtype == torch.bool and not x.numel():
        raise TypeError("plain torch takes the softmax of these, as there are none")
    names = ["cumsum", "prod", "all", "argmin", "softmax", "log_softmax", "logcumsumexp"]
    return getattr(x, rng.choice(names))(any_dim(rng, x))


def view(rng: random.Random, x: Any) -> Any:
    how: list[Step] = [
        lambda: x.transpose(any_dim(rng, x), any_dim(rng, x)),
        lambda: x.reshape(_other_shape(rng, x.numel())),
        lambda: x.view(_other_shape(rng, x.numel())),
        lambda: x.flatten(rng.randrange(x.ndim)),
        lambda: x.unsqueeze(rng.randrange(x.ndim + 1)),
        lambda: x.squeeze(),
        lambda: x.expand(2, *x.shape),
        lambda: x[a_slice(rng, x)],
        lambda: x.select(any_dim(rng, x), 0),
        lambda: x.chunk(2, any_dim(rng, x)),
        lambda: x.split(2, any_dim(rng, x))[:3],
        lambda: x.unbind(any_dim(rng, x))[:3],
        lambda: x.diagonal(rng.choice([0, 1, -1])),
        lambda: x.flip(any_dim(rng, x)),
        lambda: x.roll(rng.randrange(-3, 4), any_dim(rng, x)),
        lambda: x.repeat(2, *[1] * x.ndim),
        lambda: x.clone().squeeze_(),
        lambda: x.clone().unsqueeze_(0).transpose_(0, -1),
        lambda: x.unfold(any_dim(rng, x), 2, 2),
        lambda: x.triu(rng.choice([0, 1, -1])),
        lambda: functional.pad(x, (rng.randrange(3), rng.randrange(3))),
        lambda: torch.view_as_real(x),
    ]
    return rng.choice(how)()


def _other_shape(rng: random.Random, numel: int) -> list[int]:
    shape = [numel]
    for factor in (2, 3, 5, 2):
        if shape[-1] % factor == 0 and rng.random() < 0.6:
            shape[-1:] = [shape[-1] // factor, factor]
    rng.shuffle(shape)
    return shape


def join(rng: random.Random, a: Any, b: Any) -> Any:
    dim = any_dim(rng, a)
    how: list[Step] = [
        lambda: torch.cat([a, b], dim),
        lambda: torch.stack([a, b], dim),
        lambda: torch.hstack([a, b]),
        lambda: torch.block_diag(a, b),
        lambda: torch.complex(a, b),
    ]
    return rng.choice(how)()


def contract(rng: random.Random, a: Any, b: Any) -> Any:
    if a.dtype != b.dtype:
        raise TypeError("plain torch takes some of these where a dim has length 0")
    how: list[Step] = [
        lambda: a @ b,
        lambda: a @ b.mT,
        lambda: a.mT @ b,
        lambda: a @ a.mT,
        lambda: functional.linear(a, b),
        lambda: functional.linear(a, b, b.sum(-1)),
        lambda: torch.einsum("ij,kj->ik", a, b),
        lambda: torch.einsum("bij,bkj->kib", a, b),
        lambda: torch.inner(a, b),
        lambda: torch.addmm(b.sum(-1), a, b.mT, beta=2),
    ]
    return rng.choice(how)()


def normalize(rng: random.Random, x: Any) -> Any:
    how: list[Step] = [
        lambda: functional.layer_norm(x, x.shape[-1:]),
        lambda: functional.rms_norm(x, x.shape[-1:]),
        lambda: functional.group_norm(x, 2),
        lambda: functional.batch_norm(x, None, None, training=True),
        lambda: functional.normalize(x, dim=any_dim(rng, x)),
    ]
    return rng.choice(how)()


def order(rng: random.Random, x: Any) -> Any:
    dim = any_dim(rng, x)
    how: list[Step] = [
        lambda: x.sort(dim, stable=True).values,
        lambda: x.topk(min(2, x.shape[dim]), dim).values,
        lambda: x.argsort(dim, stable=True),
        lambda: x.cummax(dim).values,
        lambda: x.diff(dim=dim),
        lambda: torch.nonzero(x > 0.3),
        lambda: x[x > 0.2],
        lambda: torch.unique(x.detach().round()),
    ]
    return rng.choice(how)()


def index(rng: random.Random, x: Any) -> Any:
    dim = any_dim(rng, x)
    at = whole_numbers(x, x.shape[dim])
    row = at.reshape(-1)[:4]
    how: list[Step] = [
        lambda: x.index_select(dim, row),
        lambda: x[(*[slice(None)] * (dim % x.ndim), row)],
        lambda: x[(*[slice(None)] * (dim % x.ndim), [0, x.shape[dim] - 1, 0])],
        lambda: x.gather(dim, at),
        lambda: x.scatter_add(dim, at, x * 2),
        lambda: x.index_add(dim, row, x.index_select(dim, row)),
        lambda: x.select_scatter(x.select(dim, 0) * 2, dim, -1),
        lambda: x.slice_scatter(x.narrow(dim, 0, 1) * 2, dim, 0, 1),
    ]
    return rng.choice(how)()


def layer(rng: random.Random, a: Any, b: Any) -> Any:
    """What models are made of besides; losses of one tensor by the other."""
    dim = any_dim(rng, a)
    how: list[Step] = [
        lambda: functional.conv1d(a, b[..., :2], b[:, 0, 0], padding=rng.randrange(2)),
        lambda: functional.conv2d(a, b[..., :2], stride=rng.choice([1, 2])),
        lambda: functional.max_pool1d(a, 2),
        lambda: functional.avg_pool1d(a, 3, 1, 1),
        lambda: functional.interpolate(a, scale_factor=2.0),
        lambda: functional.scaled_dot_product_attention(a, b, b, is_causal=rng.random() < 0.5),
        lambda: functional.embedding(whole_numbers(a, b.shape[0]), b),
        lambda: functional.cross_entropy(a, whole_numbers(b.select(1, 0), a.shape[1])),
        lambda: functional.mse_loss(a, b, reduction=rng.choice(["none", "mean", "sum"])),
        lambda: functional.cosine_similarity(a, b, dim=dim),
        lambda: functional.glu(a, dim),
        lambda: functional.instance_norm(a),
        lambda: torch.cdist(a, b),
        lambda: torch.fft.fft(a, dim=dim),
        lambda: torch.linalg.inv(a @ a.mT + 9 * torch.diag_embed(torch.ones_like(a[..., 0]))),
        lambda: torch.scatter_reduce(a, dim, whole_numbers(b, a.shape[dim]), b, "amax"),
    ]
    return rng.choice(how)()


class _Doubled(torch.autograd.Function):
    """A function of a user's own, that keeps its input."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 2 * ctx.saved_tensors[0]


def differentiated(rng: random.Random, x: Any) -> Any:
    """What autograd and torch.func do with a function, beside running it.

    Not forward-mode: its levels are one for the process, and so for all virtual ranks.
    """
    dim = any_dim(rng, x)

    def function(t: Any) -> Any:
        return t.sin() * t

    def hooked() -> Any:
        y = x * 2
        if y.requires_grad:
            y.register_hook(lambda grad: grad * 0.5)
        return y

    def own_gradient() -> Any:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            y = function(leaf).sum()
        y.backward(retain_graph=True)
        y.backward()
        return leaf.grad

    def copied() -> Any:
        with torch.no_grad():
            y = torch.zeros_like(x)
            y.copy_(x)
        return y

    how: list[Step] = [
        lambda: checkpoint(function, x, use_reentrant=False),
        hooked,
        own_gradient,
        copied,
        lambda: _Doubled.apply(x),
        lambda: torch.func.grad(lambda t: function(t).sum())(x),
        lambda: torch.func.vjp(function, x)[1](x)[0],
        lambda: torch.vmap(lambda t: t * t.sum(), dim)(x),
    ]
    return rng.choice(how)()


def many(rng: random.Random, a: Any, b: Any) -> Any:
    """Lists of tensors, as optimizers have them; results put where they are told to."""
    how: list[Step] = [
        lambda: torch._foreach_add([a, b], [b, a], alpha=2),
        lambda: torch._foreach_mul([a, b], 0.5),
        lambda: torch._foreach_addcmul([a, b], [b, a], [a, b], value=0.5),
        lambda: torch._foreach_norm([a, b]),
        lambda: torch._foreach_lerp([a, b], [b, a], 0.3),
        lambda: torch.sum(a.detach(), 0, out=torch.ones_like(a.detach().sum(0))),
        lambda: torch.mul(a.detach(), b.detach(), out=torch.ones_like(a.detach() * b.detach())),
        lambda: torch.meshgrid(a, b, indexing="ij"),
        lambda: torch.broadcast_tensors(a, b),
        lambda: torch.cartesian_prod(a, b),
    ]
    return rng.choice(how)()


def convert(rng: random.Random, x: Any) -> Any:
    how: list[Step] = [
        lambda: x.double(),
        lambda: x.float(),
        lambda: whole_numbers(x, 5),
        lambda: x > 0.1,
        lambda: x.to(torch.complex128),
        lambda: x.real,
        lambda: x.detach().clone().requires_grad_(),
        lambda: torch.full_like(x, 2) * x + x.new_ones(x.shape),
        lambda: x * x.detach().sum().item() * 0.01,
    ]
    return rng.choice(how)()


def redistribute(rng: random.Random, x: Any) -> Any:
    late = rng.random() < 0.2
    if not isinstance(x, DTensor):
        return x.clone()
    placements = [any_placement(rng, x, sums=False) for _ in range(x.device_mesh.ndim)]
    return x.redistribute(placements=placements, async_op=late).clone()


def write(rng: random.Random, x: Any) -> Any:
    """In place, through views and by index."""
    dim = any_dim(rng, x)
    how: list[Step] = [
        lambda: x.mul_(2),
        lambda: x.add_(1),
        lambda: x.zero_(),
        lambda: x.masked_fill_(x.abs() > 0.5, 0),
        lambda: x[a_slice(rng, x)].mul_(3),
        lambda: x.__setitem__(a_slice(rng, x), 2),
        lambda: x.mT.mul_(2),
        lambda: x.view(-1).add_(1),
        lambda: x.diagonal().add_(1),
        lambda: x.__setitem__(x.abs() > 0.5, 0),
        lambda: [part.add_(i) for i, part in enumerate(x.chunk(2, dim))],
        lambda: x.select(dim, 0).copy_(x.select(dim, -1)),
        lambda: x.cumsum_(dim),
        lambda: x.copy_(x.flip(0)),
    ]
    rng.choice(how)()
    return x


def write_from(rng: random.Random, x: Any, y: Any) -> Any:
    """In place, from another tensor; what is read for many elements is not written meanwhile."""
    dim = any_dim(rng, x)
    y = y if y.shape == x.shape else y.clone()
    how: list[Step] = [
        lambda: x.add_(y),
        lambda: x.copy_(y),
        lambda: x.addcmul_(y, y, value=0.5),
        lambda: x.narrow(dim, 0, 1).copy_(y.narrow(dim, y.shape[dim] - 1, 1)),
        lambda: x.view(-1).mul_(y.reshape(-1)),
        lambda: torch.add(x, y, out=x),
        lambda: x.__setitem__(y.abs() > 0.5, 1),
    ]
    rng.choice(how)()
    return x


# How many tensors each takes, and how often it is taken.
STEPS: dict[Step, tuple[int, int]] = {
    unary: (1, 6), activation: (1, 3), binary: (2, 8), with_number: (1, 5), chosen: (3, 3),
    reduce: (1, 9), view: (1, 9), join: (2, 4), contract: (2, 9), normalize: (1, 4),
    order: (1, 3), index: (1, 5), convert: (1, 5), redistribute: (1, 7), write: (1, 8),
    write_from: (2, 6), layer: (2, 8), differentiated: (1, 5), many: (2, 3),
}  # fmt: skip


def any_placement(rng: random.Random, x: Any, *, sums: bool) -> Any:
    options: list[Any] = [Replicate(), *(Shard(d) for d in range(x.ndim))] * 2
    options += [_StridedShard(d, split_factor=rng.choice([2, 3])) for d in range(x.ndim)]
    if sums and x.dtype != torch.bool:
        options += [Partial(), Partial("avg" if is_inexact(x) else "sum")]
    return rng.choice(options)


def is_inexact(x: Any) -> bool:
    return bool(x.is_floating_point() or x.is_complex())


@dataclass
class Program:
    """Inputs, and steps as (function, positions of its operands, seed)."""

    inputs: list[torch.Tensor]
    steps: list[tuple[Step, list[int], int]]

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """All values, the inputs first."""
        pool = list(inputs)
        for function, operands, seed in self.steps:
            made = function(random.Random(seed), *(pool[i] for i in operands))
            pool += made if isinstance(made, (list, tuple)) else [made]
        return pool


def drawn_inputs(rng: random.Random) -> list[torch.Tensor]:
    """Tensors that fit each other more often than not."""
    draw = torch.Generator().manual_seed(rng.randrange(1 << 30))
    base = [rng.choice([0, 1, 2, 3, 4, 5, 6, 8, 8]) for _ in range(rng.choice([1, 2, 2, 3]))]
    inputs = []
    for _ in range(3):
        shape = rng.choice(
            [base, base, base[1:], [n if rng.random() < 0.5 else 1 for n in base], []]
        )
        dtype = rng.choice(
            [torch.float64] * 6 + [torch.float32, torch.complex128, torch.int64, torch.bool]
        )
        if dtype in (torch.int64, torch.bool):
            inputs.append(torch.randint(-3, 6, shape, generator=draw).to(dtype))
        else:
            x = torch.randn(shape, generator=draw, dtype=dtype)
            inputs.append(x.requires_grad_(rng.random() < 0.7))
    return inputs


def fresh(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]


def fits(made: Any) -> bool:
    values = made if isinstance(made, (list, tuple)) else [made]
    return all(
        isinstance(v, torch.Tensor)
        and v.ndim < 6
        and v.numel() < _MAX_NUMEL
        and bool((v.detach().abs() < _MAX_VALUE).all() if v.dtype != torch.bool else True)
        for v in values
    )


def drawn_program(seed: int) -> Program:
    """A program that plain torch runs."""
    rng = random.Random(seed)
    program = Program(drawn_inputs(rng), [])
    pool: list[Any] = fresh(program.inputs)
    weights = [often for _, often in STEPS.values()]
    for _ in range(rng.randrange(8, 40)):
        function = rng.choices(list(STEPS), weights)[0]
        operands = [
            rng.randrange(rng.choice([0, max(0, len(pool) - 3)]), len(pool))
            for _ in range(STEPS[function][0])
        ]
        step = function, operands, rng.randrange(1 << 30)
        try:
            made = function(random.Random(step[2]), *(pool[i] for i in operands))
        except REFUSALS:
            continue
        if fits(made):
            pool += made if isinstance(made, (list, tuple)) else [made]
            program.steps.append(step)
    return program


def spread(x: torch.Tensor, mesh: Any, rng: random.Random) -> DTensor:
    """`x` in a random layout, a leaf; the terms of a sum differ from rank to rank."""
    placements = [any_placement(rng, x, sums=True) for _ in range(mesh.ndim)]
    solid = [Replicate() if isinstance(p, Partial) else p for p in placements]
    made = distribute_tensor(x.detach(), mesh, solid, src_data_rank=None)
    local = made.to_local()
    for dim, placement in enumerate(placements):
        if isinstance(placement, Partial):
            size, here = mesh.shape[dim], mesh.get_local_rank(dim)
            total = size if placement.reduce_op == "avg" else 1
            local = local * (total - 2 * (size - 1) if here == 0 else 2)
    shape, stride = tuple(x.shape), made.stride()
    made = DTensor.from_local(local, mesh, placements, shape=shape, stride=stride)
    return made.requires_grad_(x.requires_grad)


def gradients(pool: list[Any], roots: list[int], seed: int, mesh: Any) -> list[Any]:
    """Of the values at `roots`, by all leaves; of their squares again for every fifth program."""
    leaves = [t for t in pool if t.requires_grad and t.is_leaf]
    if not roots or not leaves:
        return []
    draw, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    values = [pool[i] for i in roots]
    weights: list[Any] = [
        torch.randn(t.shape, generator=draw, dtype=torch.float64).to(t.dtype) for t in values
    ]
    if mesh is not None:
        weights = [spread(w, mesh, rng) for w in weights]
    twice = seed % 5 == 0
    found = list(
        torch.autograd.grad(
            values, leaves, weights, retain_graph=True, allow_unused=True, create_graph=twice
        )
    )
    squares = [g.abs().square().sum().double() for g in found if g is not None and g.requires_grad]
    if twice and squares:
        again = torch.autograd.grad(sum(squares), leaves, retain_graph=True, allow_unused=True)
        return found + list(again)
    return found + [None] * len(leaves) * twice


def plain_gradients_of(pool: list[Any], seed: int) -> tuple[list[int], list[Any]]:
    """The values that plain torch takes gradients of, and these."""

    def taken(roots: list[int]) -> list[Any] | None:
        try:
            return gradients(pool, roots, seed, None)
        except RuntimeError:  # a value that is needed was written, say
            return None

    roots = [i for i, t in enumerate(pool) if t.requires_grad and not t.is_leaf]
    found = taken(roots)
    if found is None:
        roots = [i for i in roots if taken([i]) is not None]
        found = taken(roots)
    return (roots, found) if found is not None else ([], [])


def differs(ours: Any, theirs: Any, tolerance: float) -> str | None:
    """Why `ours` is not `theirs`. No gradient is one of zeros."""
    if ours is None or theirs is None:
        given = theirs if ours is None else ours.detach().full_tensor()
        zero = given is None or not (given.abs() > 1e-12).any()
        return None if zero else f"{ours} is not {theirs}"
    full = ours.detach().full_tensor()
    kinds = (ours.shape, ours.dtype, full.shape, full.dtype)
    if kinds != (theirs.shape, theirs.dtype) * 2:
        return f"{kinds} is not {theirs.dtype} {list(theirs.shape)}"
    theirs = theirs.detach()
    if not is_inexact(theirs):
        return None if torch.equal(full, theirs) else f"{full} is not {theirs}"
    finite = theirs[theirs.isfinite()].abs()
    scale = max(0.1, float(finite.max()) if finite.numel() else 1.0)
    close = torch.allclose(full, theirs, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
    return None if close else f"{full} is not {theirs}"


def compare(seed: int, mesh_shape: tuple[int, ...]) -> list[str]:
    """What differs from plain torch on any rank."""
    program = drawn_program(seed)
    try:
        plain = program.run(fresh(program.inputs))
    except REFUSALS:  # a step that is left out had written something before it was refused
        return []
    roots, plain_gradients = plain_gradients_of(plain, seed)
    finite = [g for g in plain_gradients if isinstance(g, torch.Tensor)]
    if not all(bool((g.detach().abs() < _MAX_VALUE**2).all()) for g in finite):
        roots, plain_gradients = [], []  # too near to a pole
    rough = any(t.dtype in (torch.float32, torch.complex64) for t in plain)

    def body(rank: int) -> list[str]:
        mesh, rng = init_device_mesh("cpu", mesh_shape), random.Random(seed)
        ours = program.run([spread(x, mesh, rng) for x in program.inputs])
        wrong = [
            f"value {i}: {why}"
            for i, (mine, theirs) in enumerate(zip(ours, plain, strict=True))
            if (why := differs(mine, theirs, 2e-3 if rough else 1e-7))
            or (why := "grad" if mine.requires_grad != theirs.requires_grad else None)
        ]
        pairs = zip(gradients(ours, roots, seed, mesh), plain_gradients, strict=True)
        return wrong + [
            f"gradient {i}: {why}"
            for i, pair in enumerate(pairs)
            if (why := differs(*pair, 5e-3 if rough else 1e-7))
        ]

    found = sim.run(math.prod(mesh_shape), body, races=False)
    names = [f"{function.__name__}{at}" for function, at, _ in program.steps]
    wrong: list[str] = next(filter(None, found), [])
    return [f"{seed} on {mesh_shape}, {names}: {why}" for why in wrong]


def check(seeds: Sequence[int]) -> list[str]:
    wrong = []
    for seed in seeds:
        mesh_shape = MESHES[seed % len(MESHES)]
        try:
            wrong += compare(seed, mesh_shape)
        except REFUSALS as error:
            text = " ".join(str(error).split())[:400]
            wrong.append(f"{seed} on {mesh_shape}: {type(error).__name__}: {text}")
    return wrong


def test_programs() -> None:
    assert check(range(12)) == []


def second(x: Any) -> Any:
    """A second derivative, some formulas of which give plain zeros."""
    (first,) = torch.autograd.grad((x.abs() * x).sum(), x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), x, create_graph=True)[0]


def of_norm(x: Any) -> Any:
    """A gradient whose own passes plain zeros to what torch takes apart in a backward."""
    norm = torch.linalg.vector_norm(functional.mish(x), 1)
    return torch.autograd.grad(norm, x, create_graph=True)[0]


def written_later(x: Any, w: Any) -> Any:
    """What no gradient needs may be written before the gradients are taken."""
    table = w * 1
    y = functional.linear(x.detach(), table)
    rows = functional.embedding(whole_numbers(x, 6), table)
    table.mul_(2)
    return y.sum() + rows.square().sum() + x.sum()


# What random programs have found: (function, inputs); run in every layout of the first input.
def found() -> dict[str, tuple[Step, list[torch.Tensor]]]:
    torch.manual_seed(0)
    x, w = torch.randn(2, 4, 8).double(), torch.randn(6, 8).double()
    z, u = torch.complex(x, x.flip(0)), torch.complex(w, w.flip(0))
    return {
        "linear of complex numbers": (functional.linear, [z, u]),
        "matmul of complex numbers": (lambda a, b: a @ b.mT, [z[0], u]),
        "norm of complex numbers": (lambda a: torch.linalg.vector_norm(a, dim=(0, 2)), [z]),
        "mean of pieces": (lambda a: a.mean(-1), [x]),
        "weight_norm": (lambda v, g: torch._weight_norm(v, g, 0), [x[0], x[0, :, :1].abs()]),
        "weight_norm, last": (lambda v, g: torch._weight_norm(v, g, 1), [x[0], x[0, :1].abs()]),
        "second derivatives": (second, [x[0]]),
        "zeros in a backward": (of_norm, [x[0]]),
        "written later": (written_later, [x, w]),
        "of size 1": (lambda a: a.clone().squeeze_(1).add_(1), [x[:, :1].contiguous()]),
        "amin of nothing": (
            lambda a: functional.interpolate(a[:0], 9).amin(1),
            [x[:, :1].contiguous()],
        ),
        "batch_norm of nothing": (lambda a: functional.batch_norm(a[:0], None, None), [x]),
    }


@pytest.mark.parametrize("name", found())
def test_found(name: str) -> None:
    function, inputs = found()[name]
    plain = [t.clone().requires_grad_() for t in inputs]
    expected = function(*plain)
    (expected * expected.detach()).abs().sum().backward()

    def body(rank: int) -> list[Any]:
        mesh = init_device_mesh("cpu", (3,))
        wrong: list[Any] = []
        every = [
            *map(Shard, range(inputs[0].ndim)),
            _StridedShard(inputs[0].ndim - 1, split_factor=3),
        ]
        for placement in [Replicate(), *every]:
            ours = [
                distribute_tensor(t, mesh, [placement if t is inputs[0] else Replicate()])
                for t in inputs
            ]
            leaves = [t.requires_grad_() for t in ours]
            made = function(*leaves)
            (made * made.detach()).abs().sum().backward()
            pairs = [
                (made, expected),
                *((o.grad, p.grad) for o, p in zip(leaves, plain, strict=True)),
            ]
            wrong += [(placement, why) for o, p in pairs if (why := differs(o, p, 1e-9))]
        return wrong

    assert sim.run(3, body, races=False) == [[], [], []]


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(20))
def test_programs_sweep(part: int) -> None:
    assert check(range(1000 * (part + 1), 1000 * (part + 1) + 500)) == []


if __name__ == "__main__":
    for number in range(*map(int, sys.argv[1:3])):
        for line in check([number]):
            print(line)
