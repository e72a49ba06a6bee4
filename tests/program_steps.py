"""The steps of which random programs are made: each draws one of the ops of its kind.

A step takes a generator of its own, from which it draws what the op needs (dims, slices, numbers):
called again with the same one, it draws alike. Ops that plain torch refuses are tried, too.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from weft.dtensor import DTensor, Partial, Replicate, Shard
from weft.dtensor.placement_types import _StridedShard

Step = Callable[..., Any]


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
