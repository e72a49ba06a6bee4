"""Convolutions with batch, channels or the image sharded: forward and every gradient."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from dtensors import close, world
from torch.nn import functional

from weft.dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

# (input, weight, options): uneven and empty shards, strides over edges, reach beyond a neighbour.
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "3x3 pad 1": ((2, 4, 7, 8), (4, 4, 3, 3), {"padding": 1}),
    "patches": ((2, 3, 8, 8), (4, 3, 4, 4), {"stride": 4}),
    "stride 2": ((2, 2, 9, 6), (3, 2, 3, 2), {"stride": 2, "padding": 1}),
    "dilated": ((1, 2, 8, 9), (2, 2, 3, 3), {"dilation": 3, "padding": 3}),
    "far": ((1, 2, 6, 6), (2, 2, 6, 5), {"padding": (5, 3)}),
    "few rows": ((2, 2, 3, 4), (2, 2, 2, 3), {}),
    "1 row": ((2, 2, 5, 4), (2, 2, 5, 1), {"stride": (1, 3)}),
    "groups": ((2, 4, 5, 5), (8, 1, 3, 3), {"groups": 4, "padding": 1}),
    "1-d": ((2, 3, 9), (4, 3, 3), {"padding": 2, "stride": 2}),
    "3-d": ((1, 2, 4, 5, 3), (2, 2, 3, 2, 2), {"padding": 1}),
    "same": ((1, 2, 6, 5), (2, 2, 4, 3), {"padding": "same"}),
}
TRANSPOSED = {
    "transposed": ((2, 4, 4, 5), (4, 2, 3, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
    "transposed groups": ((2, 4, 4), (4, 1, 3), {"groups": 4}),
}


def convolve(shapes: Any, options: Any, transposed: bool) -> Any:
    dims = len(shapes[0]) - 2
    name = f"conv_transpose{dims}d" if transposed else f"conv{dims}d"
    return lambda *args: getattr(functional, name)(*args, **options)


@pytest.mark.ranks
@pytest.mark.slow_where(mesh=[(2,), (2, 2)])
@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)], ids=lambda m: "x".join(map(str, m)))
def test_convolutions(mesh: Any) -> None:
    mesh = init_device_mesh("cpu", mesh)
    wrong = []
    every = [(n, c, False) for n, c in CASES.items()] + [
        (n, c, True) for n, c in TRANSPOSED.items()
    ]
    for name, (x_shape, w_shape, options), transposed in every:
        x = torch.randn(x_shape, dtype=torch.float64)
        w = torch.randn(w_shape, dtype=torch.float64)
        outputs = w_shape[1] * options.get("groups", 1) if transposed else w_shape[0]
        b = torch.randn(outputs, dtype=torch.float64)
        function = convolve((x_shape, w_shape), options, transposed)
        leaves = [t.requires_grad_() for t in (x, w, b)]
        y = function(*leaves)
        weight = torch.randn_like(y)
        grads = torch.autograd.grad(y, leaves, weight)
        of_x: list[Any] = [Replicate(), *(Shard(d) for d in range(x.ndim)), Partial()]
        of_w: list[Any] = [Replicate(), Shard(0), Shard(1)]
        pairs = [(p, Replicate()) for p in of_x] + [(Replicate(), p) for p in of_w[1:]]
        pairs += [(Shard(1), Shard(1)), (Shard(1), Shard(0)), (Shard(2), Shard(0))]
        both = [(p, q) for p, q in pairs]
        if mesh.ndim == 2:
            every_two = list(itertools.product(both, both))
            both = every_two[:: len(every_two) // 8]
        for pair in both:
            px, pw = zip(*pair, strict=True) if mesh.ndim == 2 else ([pair[0]], [pair[1]])
            ours = [
                distribute_tensor(t.detach(), mesh, list(p)).requires_grad_()
                for t, p in ((x, px), (w, pw), (b, [Replicate()] * mesh.ndim))
            ]
            got = function(*ours)
            seed = distribute_tensor(weight, mesh, got.placements)
            got_grads = torch.autograd.grad(got, ours, seed)
            label = f"{name} x {px} w {pw}"
            if not close(got, y):
                wrong.append(f"{label}: forward")
            wrong += [
                f"{label}: gradient {i}"
                for i, (o, e) in enumerate(zip(got_grads, grads, strict=True))
                if not close(o, e)
            ]
    assert wrong == []


@pytest.mark.ranks(2)
def test_images_stay_sharded() -> None:
    mesh = world()
    x = distribute_tensor(torch.randn(2, 4, 8, 8), mesh, [Shard(2)])
    w = distribute_tensor(torch.randn(4, 4, 3, 3), mesh, [Replicate()])
    y = functional.conv2d(x, w, padding=1)
    assert isinstance(y, DTensor) and y.placements == (Shard(2),)
    pooled = functional.max_pool2d(distribute_tensor(torch.randn(4, 2, 6, 6), mesh, [Shard(0)]), 2)
    assert isinstance(pooled, DTensor) and pooled.placements == (Shard(0),)
