"""Random ops on DTensors draw what one device draws, and leave the generator as one device does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional

from weft import dtensor
from weft.dtensor import DTensor, distribute_tensor, init_device_mesh, random

# Fewer numbers than a block of 16, a last block that is not full, and none at all.
SHAPES = [(5, 3), (7, 9), (33, 5), (3, 4, 2), (1,), (0, 3), (64, 32)]

OPS: dict[str, Callable[[Any], Any]] = {
    "uniform_": lambda x: x.uniform_(-2, 3),
    "normal_": lambda x: x.normal_(1, 2),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "bernoulli_ of tensor": lambda x: x.bernoulli_(x.sigmoid()),
    "exponential_": lambda x: x.exponential_(),
    "random_": lambda x: x.random_(17),
    "cauchy_": lambda x: x.cauchy_(),
    "log_normal_": lambda x: x.log_normal_(),
    "geometric_": lambda x: x.geometric_(0.4),
    "rand_like": torch.rand_like,
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float64),
    "randint_like": lambda x: torch.randint_like(x, 3, 50),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli p": lambda x: torch.bernoulli(x, 0.25),
    "normal": lambda x: torch.normal(x, 2.0),
    "poisson": lambda x: torch.poisson(x.abs()),
    "dropout": lambda x: functional.dropout(x, 0.4),
    "dropout on GPUs": lambda x: torch.ops.aten.native_dropout(x, 0.4, True)[0],
    "alpha_dropout": lambda x: functional.alpha_dropout(x, 0.4),
    "trunc_normal_": lambda x: torch.nn.init.trunc_normal_(x),
    "orthogonal": lambda x: torch.nn.init.xavier_uniform_(x) if x.ndim > 1 else x.normal_(),
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        ((2,), [Shard(0)]),
        ((3,), [Shard(1)]),
        ((4,), [Replicate()]),
        pytest.param((2, 2), [Shard(0), Shard(0)], marks=pytest.mark.slow),
        ((2, 2), [Shard(1), Shard(0)]),
    ],
    ids=str,
)
def test_same_as_one_device(mesh: Any, placements: list[Placement]) -> None:
    mesh = init_device_mesh("cpu", mesh)
    for seed, shape in enumerate(SHAPES):
        if any(isinstance(p, Shard) and p.dim >= len(shape) for p in placements):
            continue
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(3))
        for name, op in OPS.items():
            torch.manual_seed(seed)
            expected = op(whole.clone())
            state = torch.get_rng_state()
            torch.manual_seed(seed)
            x = distribute_tensor(whole, mesh, placements)
            result = op(x)
            assert isinstance(result, DTensor)
            assert torch.equal(result.full_tensor(), expected), (name, shape, placements)
            assert torch.equal(torch.get_rng_state(), state), (name, shape, placements)


@pytest.mark.ranks(2, 3)
def test_calls() -> None:
    """Factories, generators, strides, pieces, attention, and different seeds."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    for make, plain in ((dtensor.rand, torch.rand), (dtensor.randn, torch.randn)):
        for placements in ([Shard(0)], [Shard(1)], [Replicate()]):
            torch.manual_seed(5)
            expected, state = plain(7, 11), torch.get_rng_state()
            torch.manual_seed(5)
            x = make(7, 11, device_mesh=mesh, placements=placements)
            assert torch.equal(x.full_tensor(), expected)
            assert torch.equal(torch.get_rng_state(), state)

    # A generator of one's own; the default one stays as it is.
    before = torch.get_rng_state()
    mine, theirs = torch.Generator().manual_seed(9), torch.Generator().manual_seed(9)
    x = dtensor.zeros(9, 7, device_mesh=mesh, placements=[Shard(0)]).normal_(generator=mine)
    assert torch.equal(x.full_tensor(), torch.zeros(9, 7).normal_(generator=theirs))
    assert torch.equal(mine.get_state(), theirs.get_state())
    assert torch.equal(before, torch.get_rng_state())

    # The order is that of the memory: a transposed whole gets transposed numbers.
    torch.manual_seed(6)
    expected = torch.empty(6, 20).t().uniform_()
    torch.manual_seed(6)
    x = distribute_tensor(torch.empty(6, 20).t(), mesh, [Shard(0)]).uniform_()
    assert torch.equal(x.full_tensor(), expected)

    # Large tensors are drawn in pieces.
    whole_at_once = random._PIECE_BYTES
    random._PIECE_BYTES = 40 * 4 * 16
    try:
        for shape in ((1000, 7), (999, 5), (16 * 9 + 3, 40)):
            for fill in (torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.random_):
                torch.manual_seed(8)
                expected = fill(torch.empty(shape))
                torch.manual_seed(8)
                x = fill(dtensor.empty(shape, device_mesh=mesh, placements=[Shard(0)]))
                assert torch.equal(x.full_tensor(), expected), (shape, fill)
    finally:
        random._PIECE_BYTES = whole_at_once

    q, k, v = (torch.randn(2, 4, 6, 8) for _ in range(3))
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[2] = False  # a row that sees nothing
    seen = distribute_tensor(mask, mesh, [Replicate()])
    cases: list[tuple[dict[str, Any], ...]] = [
        ({"is_causal": True}, {"is_causal": True}),
        ({"attn_mask": mask, "scale": -0.5}, {"attn_mask": seen, "scale": -0.5}),
    ]
    attend = functional.scaled_dot_product_attention
    for placements in ([Shard(0)], [Shard(1)]):
        ours = [distribute_tensor(t, mesh, placements) for t in (q, k, v)]
        for options, our_options in cases:
            torch.manual_seed(4)
            expected = attend(q, k, v, dropout_p=0.3, **options)
            torch.manual_seed(4)
            y = attend(*ours, dropout_p=0.3, **our_options)
            torch.testing.assert_close(y.full_tensor(), expected)

    torch.manual_seed(3)
    expected = torch.multinomial(torch.ones(4, 9), 3)
    torch.manual_seed(3)
    weights = distribute_tensor(torch.ones(4, 9), mesh, [Shard(1)])
    assert torch.equal(torch.multinomial(weights, 3).full_tensor(), expected)

    torch.manual_seed(3)
    expected = torch.zeros(4).normal_()
    torch.manual_seed(3)
    terms = dtensor.zeros(4, device_mesh=mesh, placements=[Partial()]).normal_()
    assert terms.placements == (Partial(),) and torch.equal(terms.full_tensor(), expected)

    # Seeded differently: the first rank's seed counts, from the first random call on a mesh on.
    torch.manual_seed(rank)
    other = init_device_mesh("cpu", (world_size,), mesh_dim_names=("other",))
    random._agreed.clear()
    x = dtensor.randn(64, device_mesh=other, placements=[Shard(0)])
    assert torch.equal(x.full_tensor(), torch.randn(64, generator=torch.Generator().manual_seed(0)))
