"""Every family of ops, forward and gradients, against plain torch on the global tensors.

Each case is a function of tensors; it runs on plain tensors and on DTensors, for all layouts of its
arguments or a random choice of them, on shapes that give uneven and empty shards.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dtensors import close, ints, r, tensors_of, world
from torch.nn import functional

from weft.dtensor import (
    DeviceMesh,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from weft.dtensor.debug import ExplicitRedistributionContext

MESHES = [(2,), (3,), (4,), (2, 2)]
Case = tuple[Callable[..., Any], list[torch.Tensor]]


def pointwise() -> dict[str, Case]:
    a, b, row, one = r(5, 6), r(5, 6), r(6), r(5, 1)
    mask = ints(2, 5, 6).bool()
    return {
        "add": (torch.add, [a, b]),
        "add row": (torch.add, [a, row]),
        "add column": (torch.add, [one, row]),
        "add scalar": (lambda x: x + 1, [a]),
        "add alpha": (lambda x, y: torch.add(x, y, alpha=3), [a, b]),
        "rsub": (lambda x: 1 - x, [a]),
        "mul": (torch.mul, [a, b]),
        "mul scalar": (lambda x: 2.5 * x, [a]),
        "div": (torch.div, [a, b]),
        "div floor": (lambda x, y: torch.div(x, y, rounding_mode="floor"), [a, b]),
        "pow": (lambda x: x**2, [a]),
        "exp tanh": (lambda x: x.exp().tanh(), [a]),
        "relu": (torch.relu, [a]),
        "gelu": (functional.gelu, [a]),
        "silu": (functional.silu, [a]),
        "sigmoid": (torch.sigmoid, [a]),
        "where": (torch.where, [mask, a, b]),
        "masked_fill": (lambda x, m: x.masked_fill(m, -1.5), [a, mask]),
        "clamp": (lambda x: x.clamp(-0.5, 0.5), [a]),
        "maximum": (torch.maximum, [a, b]),
        "lerp": (lambda x, y: torch.lerp(x, y, 0.3), [a, b]),
        "addcmul": (lambda x, y, z: torch.addcmul(x, y, z, value=0.5), [a, b, row]),
        "compare": (lambda x, y: (x > y).to(torch.float64), [a, b]),
        "to float32": (lambda x: x.float(), [a]),
        "abs": (torch.abs, [a]),
        "0-d": (lambda x: x + torch.tensor(2.0, dtype=torch.float64), [a]),
        "neg detach": (lambda x: (-x).detach() + x, [a]),
        "like": (
            lambda x: torch.zeros_like(x) + torch.ones_like(x) * x + torch.full_like(x, 2.0),
            [a],
        ),
        "new": (lambda x: x.new_zeros(5, 6) + x + x.new_ones(6), [a]),
        "rotary": (lambda x, c: x * c + torch.cat([-x[..., 3:], x[..., :3]], -1) * c, [a, row]),
    }


def reductions() -> dict[str, Case]:
    a, small = r(5, 6, 2), r(2, 3)
    newer: dict[str, Case] = {}
    if hasattr(torch, "_foreach_powsum"):
        newer["foreach powsum"] = (
            lambda x, y: torch._foreach_powsum([x.detach(), y.detach()], 3),
            [a, small],
        )
    return {
        **newer,
        "foreach max": (
            lambda x, y: torch._foreach_max([x.detach(), y.detach()]),
            [a, small],
        ),
        "sum": (lambda x: x.sum(), [a]),
        "sum dim": (lambda x: x.sum(1), [a]),
        "sum dims": (lambda x: x.sum((0, 2), keepdim=True), [a]),
        "mean": (lambda x: x.mean(), [a]),
        "mean dim": (lambda x: x.mean(0), [a]),
        "mean keepdim": (lambda x: x.mean(-2, keepdim=True), [a]),
        "mean small": (lambda x: x.mean(), [small]),
        "mean of nothing": (lambda x: x.mean(), [r(0, 3)]),
        "amax": (lambda x: x.amax(0), [a]),
        "amin": (lambda x: x.amin((0, 1)), [small]),
        "max": (lambda x: x.max(), [small]),
        "max dim": (lambda x: x.max(0).values, [a]),
        "max index": (lambda x: x.max(1).indices, [a]),
        "argmax": (lambda x: x.argmax(0), [small]),
        "argmax all": (lambda x: x.argmax(), [a]),
        "prod": (lambda x: x.detach().prod(0), [a]),
        "any": (lambda x: (x > 1).any(0), [a]),
        "count_nonzero": (lambda x: (x > 0).count_nonzero(0), [a]),
        "all": (lambda x: (x > -9).all(), [small]),
        "var": (lambda x: x.var(0), [a]),
        "std": (lambda x: x.std(), [a]),
        "var_mean": (lambda x: torch.var_mean(x + 100, (0, 2), correction=2, keepdim=True), [a]),
        "norm": (lambda x: torch.linalg.vector_norm(x), [a]),
        "norm 1 dim": (lambda x: torch.linalg.vector_norm(x, 1, dim=(0, 2)), [a]),
        "norm inf": (lambda x: torch.linalg.vector_norm(x, float("inf"), dim=1), [a]),
        "norm -inf": (lambda x: torch.linalg.vector_norm(x, -float("inf")), [small]),
        "norm 0": (lambda x: torch.linalg.vector_norm(x.detach(), 0), [small]),
        "norm as ever": (lambda x: torch.ops.aten.norm.ScalarOpt_dim(x, None, [0], True), [a]),
        "norm 3": (lambda x: torch.linalg.vector_norm(x, 3, dim=0, keepdim=True), [a]),
        "x.norm": (lambda x: x.norm(), [a]),
        "logsumexp": (lambda x: x.logsumexp(1), [a]),
        "mse": (functional.mse_loss, [r(7, 3), r(7, 3)]),
        "smooth l1": (functional.smooth_l1_loss, [r(5, 3), r(5, 3)]),
        "bce": (functional.binary_cross_entropy_with_logits, [r(7), torch.rand(7).double()]),
    }


def views() -> dict[str, Case]:
    a, b = r(4, 6, 5), r(4, 6)
    return {
        "view merge": (lambda x: x.view(24, 5) * 1, [a]),
        "view merge last": (lambda x: x.view(4, 30) * 1, [a]),
        "view flat": (lambda x: x.reshape(-1).cos(), [a]),
        "view split": (lambda x: x.view(2, 2, 6, 5).cos(), [a]),
        "view heads": (lambda x: x.view(4, 3, 2, 5).cos(), [a]),
        "view and back": (lambda x: x.view(24, 5).cos().view(4, 6, 5).sin(), [a]),
        "view regroup": (lambda x: x.view(6, 4).cos(), [b]),
        "transpose": (lambda x: x.transpose(0, 2).cos(), [a]),
        "permute": (lambda x: x.permute(1, 2, 0).cos(), [a]),
        "t": (lambda x: x.t().cos(), [b]),
        "unsqueeze": (lambda x: x.unsqueeze(1).cos(), [b]),
        "squeeze": (lambda x: x.squeeze(1).cos(), [r(4, 1, 3)]),
        "expand": (lambda x: x.expand(3, 4, 6).cos(), [b]),
        "expand one": (lambda x: x.expand(4, 6).cos(), [r(4, 1)]),
        "slice": (lambda x: x[1:3].cos(), [a]),
        "slice step": (lambda x: x[:, ::2].cos(), [a]),
        "select": (lambda x: x[:, 1].cos(), [a]),
        "split": (lambda x: [p.cos() for p in x.split(2, 1)], [a]),
        "chunk": (lambda x: [p.cos() for p in x.chunk(3, -1)], [a]),
        "unbind": (lambda x: [p.cos() for p in x.unbind(2)], [a]),
        "cat": (lambda x, y: torch.cat([x, y], 1).cos(), [b, r(4, 3)]),
        "stack": (lambda x, y: torch.stack([x, y], 1).cos(), [b, r(4, 6)]),
        "flatten": (lambda x: x.flatten(0, 1).cos(), [a]),
        "transpose view": (lambda x: x.transpose(0, 1).reshape(6, 20).cos(), [a]),
        "repeat": (lambda x: x.repeat(1, 2).cos(), [b]),
        "repeat_interleave": (lambda x: x.repeat_interleave(2, 1).cos(), [b]),
        "pad": (lambda x: functional.pad(x, (1, 2)).cos(), [b]),
        "flip": (lambda x: x.flip(0).cos(), [b]),
        "roll": (lambda x: x.roll(1, 1).cos(), [b]),
        "tril": (lambda x: x.tril().cos(), [a]),
        "triu": (lambda x: x.triu(1), [b]),
        "cumsum": (lambda x: x.cumsum(1).cos(), [b]),
        "sort": (lambda x: x.sort(0).values, [b]),
        "topk": (lambda x: x.topk(2, -1).values, [a]),
        "gather": (lambda x, i: x.gather(1, i).cos(), [b, ints(6, 4, 6)]),
        "gather few": (lambda x, i: x.gather(1, i).cos(), [b, ints(6, 2, 3)]),
        "index": (lambda x, i: x[i].cos(), [b, ints(4, 5)]),
        "index 2": (lambda x, i: x[:, i].cos(), [a, ints(6, 2, 5)]),
        "index_select": (lambda x, i: x.index_select(0, i).cos(), [b, ints(4, 5)]),
        "mask": (lambda x, m: x[m], [b, ints(2, 4, 6).bool()]),
        "diagonal": (lambda x: x.diagonal(0, 0, 1).cos(), [a]),
        "one_hot": (lambda i: functional.one_hot(i, 4), [ints(4, 5)]),
        "complex path": (
            lambda x: x.unflatten(-1, (2, 3)).transpose(1, 2).flatten(-2).cos().sum(0),
            [r(3, 2, 6)],
        ),
    }


def matmuls() -> dict[str, Case]:
    x, w, b = r(2, 5, 6), r(7, 6), r(7)
    m = r(5, 6)
    newer: dict[str, Case] = {}
    if hasattr(torch, "_foreach_mm"):
        newer["foreach mm"] = (
            lambda x, y: torch._foreach_mm([x, x.T], [y, x]),
            [m, r(6, 6)],
        )
    return {
        **newer,
        "mm": (torch.mm, [m, r(6, 4)]),
        "matmul @": (lambda p, q: p @ q, [x, r(6, 4)]),
        "matmul vector": (lambda p, q: p @ q, [m, r(6)]),
        "addmm": (torch.addmm, [r(4), m, r(6, 4)]),
        "addmm scaled": (lambda c, p, q: torch.addmm(c, p, q, beta=2), [r(5, 4), m, r(6, 4)]),
        "bmm": (torch.bmm, [r(3, 4, 5), r(3, 5, 2)]),
        "baddbmm": (torch.baddbmm, [r(3, 4, 2), r(3, 4, 5), r(3, 5, 2)]),
        "matmul batched": (torch.matmul, [r(2, 3, 4, 5), r(2, 3, 5, 2)]),
        "matmul broadcast": (torch.matmul, [r(2, 3, 4, 5), r(3, 5, 2)]),
        "einsum": (lambda p, q: torch.einsum("bij,bjk->bik", p, q), [r(3, 4, 5), r(3, 5, 2)]),
        "linear": (functional.linear, [x, w]),
        "linear bias": (functional.linear, [x, w, b]),
        "linear 2-d": (functional.linear, [m, w, b]),
        "linear 1-d": (functional.linear, [r(6), w, b]),
        "linear small": (functional.linear, [r(1, 6), r(2, 6)]),
        "dot": (torch.dot, [r(5), r(5)]),
        "chain": (
            lambda p, q, s: functional.linear(functional.relu(functional.linear(p, q)), s),
            [x, w, r(6, 7)],
        ),
    }


def layers() -> dict[str, Case]:
    x, w, b = r(2, 5, 6), r(6), r(6)
    table, ids = r(7, 4), ints(7, 2, 5)
    logits, labels = r(5, 7), torch.tensor([1, 6, -100, 0, 3])
    q, k, v = r(2, 4, 5, 3), r(2, 4, 6, 3), r(2, 4, 6, 3)
    return {
        "layer_norm": (lambda x, w, b: functional.layer_norm(x, (6,), w, b), [x, w, b]),
        "layer_norm plain": (lambda x: functional.layer_norm(x, (6,)), [x]),
        "layer_norm 2 dims": (lambda x: functional.layer_norm(x, (5, 6)), [x]),
        "rms_norm": (lambda x, w: functional.rms_norm(x, (6,), w), [x, w]),
        "group_norm": (lambda x, w, b: functional.group_norm(x, 3, w, b), [r(2, 6, 5), w, b]),
        "group_norm plain": (lambda x: functional.group_norm(x, 2), [r(3, 6)]),
        "batch_norm of given statistics": (
            lambda x, w, b, m, v: (
                functional.batch_norm(x, m.detach() + 0, v.detach().exp(), w, b) + 0 * (m + v).sum()
            ),
            [r(2, 6, 5), w, b, r(6), r(6)],
        ),
        "batch_norm in training": (
            lambda x, w, b: functional.batch_norm(x, None, None, w, b, training=True),
            [r(4, 6, 2), w, b],
        ),
        "instance_norm": (
            lambda x, w, b: functional.instance_norm(x, weight=w, bias=b),
            [r(5, 6, 3), w, b],
        ),
        "rfft2": (lambda x: torch.fft.rfft2(x, dim=(0, 2)).abs(), [x]),
        "irfft": (lambda x: torch.fft.irfft(torch.fft.fft(x, dim=1) ** 2, dim=1), [x]),
        "nearest exact": (lambda x: functional.interpolate(x, 9, mode="nearest-exact"), [x]),
        "safe softmax": (lambda x: torch.ops.aten._safe_softmax(x.log(), 1), [x.relu()]),
        "softmax": (lambda x: functional.softmax(x, -1), [x]),
        "softmax 1": (lambda x: functional.softmax(x, 1), [x]),
        "log_softmax": (lambda x: functional.log_softmax(x, -1), [x]),
        "embedding": (functional.embedding, [ids, table]),
        "embedding pad": (lambda i, t: functional.embedding(i, t, padding_idx=3), [ids, table]),
        "cross_entropy": (functional.cross_entropy, [logits, labels]),
        "cross_entropy sum": (
            lambda x, t: functional.cross_entropy(x, t, reduction="sum"),
            [logits, labels],
        ),
        "cross_entropy none": (
            lambda x, t: functional.cross_entropy(x, t, reduction="none"),
            [logits, labels],
        ),
        "cross_entropy weight": (
            lambda x, t, w: (
                functional.cross_entropy(x, t, w.detach() + 0 * w.detach()) + 0 * w.sum()
            ),
            [logits, labels, torch.rand(7).double()],
        ),
        "cross_entropy smooth": (
            lambda x, t: functional.cross_entropy(x, t, label_smoothing=0.1),
            [logits, labels],
        ),
        "cross_entropy nd": (functional.cross_entropy, [r(3, 7, 5), ints(7, 3, 5)]),
        "cross_entropy flat": (
            lambda x, t: functional.cross_entropy(x.view(-1, 7), t.view(-1)),
            [r(2, 5, 7), ints(7, 2, 5)],
        ),
        "nll": (lambda x, t: functional.nll_loss(x.log_softmax(1), t), [logits, labels]),
        "attention": (functional.scaled_dot_product_attention, [q, k, v]),
        "attention causal": (
            lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
            [q, q * 2, q * 3],
        ),
        "attention mask": (
            lambda q, k, v, m: functional.scaled_dot_product_attention(q, k, v, m),
            [q, k, v, r(4, 5, 6)],
        ),
        "attention gqa": (
            lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, enable_gqa=True),
            [q, r(2, 2, 6, 3), r(2, 2, 6, 3)],
        ),
    }


FAMILIES = {
    "pointwise": pointwise,
    "reductions": reductions,
    "views": views,
    "matmuls": matmuls,
    "layers": layers,
}


def choices(t: torch.Tensor, partial: bool) -> list[Any]:
    placements: list[Any] = [Replicate(), *(Shard(d) for d in range(t.ndim))]
    if partial and t.is_floating_point():
        placements.append(Partial())
    return placements


def layouts(
    args: list[torch.Tensor], mesh_ndim: int, limit: int, seed: int
) -> list[list[list[Any]]]:
    """All combinations, or `limit` random ones, the same on every rank."""
    per_tensor = [list(itertools.product(choices(t, True), repeat=mesh_ndim)) for t in args]
    every = list(itertools.product(*per_tensor))
    if len(every) > limit:
        every = random.Random(seed).sample(every, limit)
    return [[list(p) for p in combination] for combination in every]


def run_case(name: str, case: Case, mesh: Any, limit: int, seed: int = 0) -> list[str]:
    function, args = case
    wrong: list[str] = []
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in args]
    expected = tensors_of(function(*leaves))
    weights = [torch.randn_like(e) if e.is_floating_point() else None for e in expected]
    terms = [
        (e * w).sum().double() for e, w in zip(expected, weights, strict=True) if e.requires_grad
    ]
    wanted = [t for t in leaves if t.requires_grad]
    grads = torch.autograd.grad(sum(terms), wanted) if terms else ()
    for combination in layouts(args, mesh.ndim, limit, seed):
        label = f"{name} {combination}"
        ours = [
            distribute_tensor(t.detach(), mesh, p).requires_grad_(t.requires_grad)
            for t, p in zip(leaves, combination, strict=True)
        ]
        got = tensors_of(function(*ours))
        if len(got) != len(expected) or not all(map(close, got, expected)):
            wrong.append(f"{label}: forward")
            continue
        if not terms:
            continue
        roots = [g for g in got if g.requires_grad]
        seeds = [
            distribute_tensor(w, mesh)
            for e, w in zip(expected, weights, strict=True)
            if e.requires_grad and w is not None
        ]
        inputs = [t for t in ours if t.requires_grad]
        ours_grads = torch.autograd.grad(roots, inputs, seeds)
        for i, (ours_grad, grad) in enumerate(zip(ours_grads, grads, strict=True)):
            if not close(ours_grad, grad):
                wrong.append(f"{label}: gradient {i}")
    return wrong


def run_family(family: str, mesh_shape: tuple[int, ...], limit: int, seed: int = 0) -> None:
    mesh = init_device_mesh("cpu", mesh_shape)
    torch.manual_seed(0)
    cases = FAMILIES[family]().items()
    wrong = [line for name, case in cases for line in run_case(name, case, mesh, limit, seed)]
    assert wrong == []


# Two or four ranks in a row show no more than three: the sweep has them, and more layouts.
@pytest.mark.ranks
@pytest.mark.parametrize(
    "mesh",
    [(3,), pytest.param((2, 2), marks=pytest.mark.slow)],
    ids=lambda m: "x".join(map(str, m)),
)
@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str, mesh: tuple[int, ...]) -> None:
    run_family(family, mesh, 4)


@pytest.mark.ranks(2)
def test_gradients_of_weights_only() -> None:
    """The backward of a norm gives no gradient of an input that needs none."""
    mesh = world()
    x, seed = r(7, 4), r(7, 4)
    one, ours = torch.nn.BatchNorm1d(4).double(), torch.nn.BatchNorm1d(4).double()
    distribute_module(ours, mesh)
    (one(x) * seed).sum().backward()
    for placement in (Shard(0), Shard(1), Replicate()):
        ours.zero_grad()
        y = ours(distribute_tensor(x, mesh, [placement]))
        (y * distribute_tensor(seed, mesh)).sum().backward()
        for mine, theirs in zip(ours.parameters(), one.parameters(), strict=True):
            assert close(mine.grad, theirs.grad)
        # What torch saves of given statistics is nothing on a CPU: its meta kernel says otherwise.
        given = x.mean(0), x.var(0)
        wants = torch.native_batch_norm(x, None, None, *given, False, 0.1, 1e-5)
        sharded = [distribute_tensor(t, mesh) for t in given]
        z = distribute_tensor(x, mesh, [placement])
        got = torch.native_batch_norm(z, None, None, *sharded, False, 0.1, 1e-5)
        for mine, theirs in zip(got, wants, strict=True):
            assert mine.shape == theirs.shape and close(mine, theirs)


@pytest.mark.ranks(2, 3)
def test_nothing_is_gathered_to_write_by_index() -> None:
    """At indices of one dim, in tensors that are sharded along another."""
    mesh, heads, rows, whole = world(), Shard(1), Shard(0), Replicate()
    cache, new, at = r(2, 5, 6, 3), r(2, 5, 2, 3), torch.tensor([4, 1])
    x, order, weight, labels = r(7, 4), r(7, 4).argsort(1), r(7, 4), ints(9, 7, 3)

    def put(t: Any, *index_and_value: Any, dim: int = 0) -> Any:
        *index, value = index_and_value
        t[(*[slice(None)] * dim, *index)] = value
        return t

    cases: list[tuple[Callable[..., Any], list[torch.Tensor], list[Any]]] = [
        (lambda t, i, v: put(t, i, v, dim=2), [cache, at, new], [heads, whole, heads]),
        (lambda t, i, v: put(t, i, v, dim=2), [cache, at, new[0, 0]], [heads, whole, whole]),
        (lambda t, m: put(t, m, -100), [labels, labels > 4], [rows, rows]),
        (lambda t, m: put(t, m, -100), [labels, labels[:, 0] > 4], [rows, rows]),
        (lambda t, m: put(t, m, -100), [labels, labels[:, 0] > 4], [Shard(1), whole]),
        (lambda t, i, v: t.index_copy_(2, i, v), [cache, at, new], [heads, whole, heads]),
        (lambda t, i, v: t.index_add_(2, i, v), [cache, at, new], [heads, whole, heads]),
        (lambda t, i: t.index_fill_(2, i, 1.5), [cache, at], [heads, whole]),
        (lambda t, i: t.gather(1, i), [x, order], [rows, rows]),
        (lambda t, i: t.scatter(1, i, 1.5), [x, order], [rows, rows]),
        (lambda t, i, v: t.scatter_(1, i, v), [x, order, weight], [rows, rows, rows]),
        (lambda t, i, v: t.scatter_add_(1, i // 2, v), [x, order, weight], [rows, rows, rows]),
        (
            lambda t, i, v: t.scatter_reduce(1, i // 2, v, "amax"),
            [x, order, weight],
            [rows, rows, rows],
        ),
    ]
    for number, (function, args, placements) in enumerate(cases):
        ours = [distribute_tensor(t, mesh, [p]) for t, p in zip(args, placements, strict=True)]
        with ExplicitRedistributionContext():
            result = function(*ours)
        assert result.placements == (placements[0],), number
        assert close(result, function(*(t.clone() for t in args))), number
    # The gradient of rows that sharded indices pick: each rank has the terms of its own.
    table, tokens = distribute_tensor(x, mesh).requires_grad_(), ints(7, 5)
    table[distribute_tensor(tokens, mesh, [rows])].square().sum().backward()
    assert table.grad is not None and table.grad.placements == (Partial(),)
    assert close(table.grad, torch.zeros_like(x).index_add_(0, tokens, 2 * x[tokens]))


@pytest.mark.ranks(3)
def test_batch_norm_in_training() -> None:
    """All that torch makes of batch norm: each writes its running statistics, cut or not."""
    mesh = world()
    torch.manual_seed(0)
    of_channels = [r(4), r(4), r(4), torch.rand(4).double()]
    momentum, aten = (0.1, 1e-5), torch.ops.aten
    for rows, dim, stats in itertools.product((7, 2), (0, 1, 2), (Replicate(), Shard(0))):
        x, seed = r(rows, 4, 3), r(rows, 4, 3)
        wants = None
        for op in (
            aten.native_batch_norm,
            aten._native_batch_norm_legit,
            aten._batch_norm_with_update,
            aten.cudnn_batch_norm,
            aten.miopen_batch_norm,
            aten._native_batch_norm_legit_functional,
            aten._batch_norm_with_update_functional,
        ):
            plain = [t.clone() for t in (x, *of_channels)]
            ours = [
                distribute_tensor(t.clone(), mesh, [p])
                for t, p in zip(plain, [Shard(dim), *[stats] * 4], strict=True)
            ]
            for t in (*plain[:3], *ours[:3]):
                t.requires_grad_()
            flag = () if "with_update" in str(op) else (True,)
            got = op(*ours, *flag, *momentum)
            if str(op).endswith("functional"):  # no gradient, and what it would write is returned
                new = got[-2:]
                assert all(map(close, ours[3:], of_channels[2:]))
            else:
                got[0].backward(distribute_tensor(seed, mesh))
                new = [*ours[3:], *(t.grad for t in ours[:3])]
            if wants is None:
                out = op(*plain, *flag, *momentum)
                out[0].backward(seed)
                wants = [*out, *plain[3:], *(t.grad for t in plain[:3])]
            assert got[0].placements == (Shard(dim),)
            values = [t.detach() for t in (*got[:3], *new)]
            assert all(map(close, values, wants)), (str(op), rows, dim, stats)
    with pytest.raises(ValueError, match="at least one sample"):
        aten.native_batch_norm(distribute_tensor(x[:0], mesh), *[None] * 4, True, *momentum)


@pytest.mark.sweep
@pytest.mark.ranks(timeout_s=600)
@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: "x".join(map(str, m)))
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(1, 4))
def test_family_sweep(family: str, mesh: tuple[int, ...], seed: int) -> None:
    run_family(family, mesh, 40, seed)


@pytest.mark.ranks(4)
def test_meshes_list_ranks_in_any_order() -> None:
    """A process group has them in ascending order: there fused ops would take the wrong shards."""
    mesh = DeviceMesh("cpu", [[3, 1], [0, 2]])

    def attention(q: Any) -> Any:
        return functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    x, w = r(8, 6), r(4, 6)
    cases: list[tuple[Callable[..., Any], list[tuple[torch.Tensor, Any]]]] = [
        (functional.linear, [(x, Shard(0)), (w, Shard(0))]),
        (functional.linear, [(x, Shard(1)), (w, Shard(1))]),
        (attention, [(r(1, 2, 8, 4), Shard(2))]),
        (functional.cross_entropy, [(x, Shard(1)), (ints(6, 8), Replicate())]),
    ]
    for call, operands in cases:
        plain, ours = [], []
        for t, placement in operands:
            own = distribute_tensor(t, mesh, [Replicate(), placement], src_data_rank=None)
            plain.append(t.clone().requires_grad_(t.is_floating_point()))
            ours.append(own.requires_grad_(t.is_floating_point()))
        result, expected = call(*ours), call(*plain)
        assert close(result.redistribute(placements=[Replicate(), Replicate()]), expected)
        (result**2).sum().backward()
        (expected**2).sum().backward()
        for mine, theirs in zip(ours, plain, strict=True):
            if theirs.grad is not None:
                assert close(mine.grad, theirs.grad)
