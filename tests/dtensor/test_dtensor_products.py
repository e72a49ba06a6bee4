"""Matmuls of groups (experts) and of scaled fp8 on DTensors. Whole numbers make all sums exact."""

from __future__ import annotations

import itertools
import random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from dtensors import world
from torch.nn import functional

import weft
from weft.dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from weft.dtensor.debug import CommDebugMode
from weft.dtensor.rules import matmul, products

GROUPS, K, N = 4, 8, 16


def whole_numbers(*shape: int) -> torch.Tensor:
    """Whose products of at most 16 terms bf16 holds exactly."""
    return torch.randint(-2, 3, shape).bfloat16()


def factors(kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Two factors and the ends of groups, by the dims of the factors."""
    ends = torch.tensor([5, 5, 6, 16], dtype=torch.int32)
    return {
        "2x3": (whole_numbers(16, K), whole_numbers(GROUPS, K, N), ends),
        "2x3 transposed": (whole_numbers(16, K), whole_numbers(GROUPS, N, K).mT, ends),
        "3x2": (whole_numbers(GROUPS, 24, K), whole_numbers(K, 16), ends),
        "2x2": (whole_numbers(16, K).t(), whole_numbers(16, N), ends),
        "3x3": (whole_numbers(GROUPS, 5, K), whole_numbers(GROUPS, K, N), None),
    }[kind]


KINDS = ["2x3", "2x3 transposed", "3x2", "2x2", "3x3"]


@pytest.mark.ranks
@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_matmuls_of_groups(kind: str, mesh: Any) -> None:
    """In twelve random layouts, forward and gradients."""
    ranks = init_device_mesh("cpu", mesh)
    torch.manual_seed(0)
    a, b, ends = factors(kind)
    plain = [t.detach().requires_grad_() for t in (a, b)]
    expected = functional.grouped_mm(*plain, offs=ends)
    seed = torch.randint_like(expected, -1, 2)
    expected.backward(seed)
    every = [[Replicate(), Partial(), *map(Shard, range(t.ndim))] for t in (a, b)]
    pairs = itertools.product(*(itertools.product(p, repeat=len(mesh)) for p in every))
    for placements in random.Random(0).sample(list(pairs), 12):
        ours = [
            distribute_tensor(t, ranks, p).requires_grad_()
            for t, p in zip((a, b), placements, strict=True)
        ]
        offs = None if ends is None else distribute_tensor(ends, ranks)
        result = functional.grouped_mm(*ours, offs=offs)
        assert torch.equal(result.full_tensor(), expected), placements
        result.backward(distribute_tensor(seed, ranks))
        for mine, theirs in zip(ours, plain, strict=True):
            assert torch.equal(mine.grad.full_tensor(), theirs.grad), placements


R, P = Replicate(), Partial()
FREE = [
    ("2x3", R, Shard(2), Shard(1)),
    ("2x3", Shard(1), Shard(1), P),
    ("2x3", Shard(0), R, Shard(0)),  # tokens
    ("2x3", R, Shard(0), P),  # experts
    ("3x2", Shard(1), R, Shard(0)),
    ("3x2", R, Shard(1), Shard(1)),
    ("3x2", Shard(0), R, P),
    ("2x2", Shard(0), R, Shard(1)),
    ("2x2", Shard(1), Shard(0), P),  # the gradient of experts, whose tokens are sharded
    ("3x3", Shard(0), Shard(0), Shard(0)),
    ("3x3", Shard(2), Shard(1), P),
]


@pytest.mark.ranks(3)
def test_matmuls_of_groups_that_move_nothing() -> None:
    for kind, of_a, of_b, of_result in FREE:
        a, b, ends = factors(kind)
        ours = distribute_tensor(a, world(), [of_a]), distribute_tensor(b, world(), [of_b])
        offs = None if ends is None else distribute_tensor(ends, world())
        with CommDebugMode() as comm:
            result = functional.grouped_mm(*ours, offs=offs)
        assert comm.get_total_counts() == 0, kind
        assert result.placements == (of_result,), kind


@pytest.mark.ranks(3)
@pytest.mark.parametrize("transposed", [False, True])
def test_weights_cut_by_group_have_gradients_of_their_own_groups_alone(transposed: bool) -> None:
    """On whole rows each rank contracts its groups', and moves nothing."""
    x, w, ends = factors("2x3")
    wide = w.mT.contiguous().mT if transposed else w
    ours = distribute_tensor(wide, world(), [Shard(0)]).requires_grad_()
    rows, offs = distribute_tensor(x, world()), distribute_tensor(ends, world())
    result = functional.grouped_mm(rows, ours, offs=offs)
    seed = distribute_tensor(torch.randint(-1, 2, result.shape).bfloat16(), world())
    contract = patch.object(matmul, "grouped_weight_grad", wraps=matmul.grouped_weight_grad)
    with CommDebugMode() as comm, contract as contracted:
        (grad,) = torch.autograd.grad(result, ours, seed)
    assert comm.get_total_counts() == 0
    assert grad.placements == (Shard(0),)
    assert grad.to_local().stride() == ours.to_local().stride()
    own = ours.to_local().shape[0]
    assert [len(call.args[3]) for call in contracted.call_args_list] == [own] * (own > 0)
    plain = w.clone().requires_grad_()
    functional.grouped_mm(x, plain, offs=ends).backward(seed.to_local())
    assert torch.equal(grad.full_tensor(), plain.grad)
    second = []
    for a, b, of, dy in ((rows, ours, offs, seed), (x, plain, ends, seed.to_local())):
        a.requires_grad_()
        y = functional.grouped_mm(a, b, offs=of)
        (first,) = torch.autograd.grad(y, b, dy, create_graph=True)
        second.append(torch.autograd.grad((first * b.detach()).sum(), a)[0])
    assert torch.equal(second[0].full_tensor(), second[1])


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("last", [235, 240], ids=["rows of no group", "all rows"])
def test_rows_travel_to_weights_that_are_cut_by_group(last: int) -> None:
    """Where that is the cheapest: few rows, large weights."""
    torch.manual_seed(0)
    ones = lambda *shape: torch.randint(-1, 2, shape).bfloat16()  # noqa: E731
    x, w, seed = ones(240, 64), ones(8, 64, 512), ones(240, 512)
    ends = torch.tensor([0, 30, 90, 90, 100, 120, 180, last], dtype=torch.int32)
    plain = [t.clone().requires_grad_() for t in (x, w)]
    expected = functional.grouped_mm(*plain, offs=ends)
    expected[last:] = 0
    expected.backward(seed)
    plain[0].grad[last:] = 0  # torch leaves them undefined
    mesh, of_w = world(), [Shard(0)]
    if mesh.size() == 4:
        mesh, of_w = init_device_mesh("cpu", (2, 2)), [Replicate(), Shard(0)]
    of_x = [Shard(0)] * mesh.ndim
    ours = [distribute_tensor(t, mesh, p).requires_grad_() for t, p in ((x, of_x), (w, of_w))]
    offs = distribute_tensor(ends, mesh)
    with patch.object(products, "_GROUP_US", 0.0):  # else so few rows would not be worth it
        told = str(weft.explain(lambda: functional.grouped_mm(*ours, offs=offs)))
    assert "dispatch_grouped_matmul is the cheapest" in told, told
    dy = distribute_tensor(seed, mesh, of_x)
    with CommDebugMode() as comm:
        y = functional.grouped_mm(*ours, offs=offs)
        y.backward(dy)
    counts = {str(op).split(".")[-1]: n for op, n in comm.get_comm_counts().items()}
    assert counts["all_gather_into_tensor"] == 1, counts  # of ids
    assert {*counts} == {"all_gather_into_tensor", "all_to_all_single"} or mesh.ndim == 2, counts
    assert y.placements == tuple(of_x)
    assert torch.equal(y.full_tensor(), expected)
    for mine, theirs in zip(ours, plain, strict=True):
        assert mine.grad.placements[-1] == Shard(0)
        assert torch.equal(mine.grad.full_tensor(), theirs.grad)


def scaled_grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    of_rows: torch.Tensor,
    of_columns: torch.Tensor,
    offs: torch.Tensor,
    bias: None = None,
    scale_result: None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """The op by loops, as torch has it for GPUs alone; rows of no group are left undefined."""
    assert a.is_contiguous() and b.mT.is_contiguous() and of_rows.is_contiguous()
    made = torch.full((len(a), b.shape[2]), float("nan"))
    for e, (start, stop) in enumerate(itertools.pairwise([0, *offs.tolist()])):
        made[start:stop] = a[start:stop].float() @ b[e].float() * of_columns[e]
    return (made * of_rows[:, None]).to(out_dtype)


@pytest.mark.ranks
@pytest.mark.parametrize("mesh", [(3,), (2, 2)], ids=str)
def test_matmuls_of_groups_in_scaled_fp8(mesh: tuple[int, ...]) -> None:
    """In random layouts, and where rows travel to their weights."""
    ranks = init_device_mesh("cpu", mesh)
    torch.manual_seed(0)
    numbers = lambda *shape: torch.randint(-1, 2, shape).to(torch.float8_e4m3fn)  # noqa: E731
    a, b = numbers(23, 96), numbers(6, 192, 96).mT
    of_rows, of_columns = (2.0 ** torch.randint(-1, 2, s) for s in ((23,), (6, 192)))
    ends = torch.tensor([0, 5, 5, 12, 19, 23], dtype=torch.int32)
    expected = scaled_grouped_mm(a, b, of_rows, of_columns, ends)
    operands, rows = (a, b, of_rows, of_columns), [Shard(0)] * len(mesh)
    every = [[Replicate(), *map(Shard, range(t.ndim))] for t in operands]
    pairs = itertools.product(*(itertools.product(p, repeat=len(mesh)) for p in every[:2]))
    drawn = random.Random(0)
    cases = [
        [*pair, *([drawn.choice(p)] * len(mesh) for p in every[2:])]
        for pair in drawn.sample(list(pairs), 6)
    ]
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_scaled_grouped_mm", scaled_grouped_mm, "CPU")
        offs = distribute_tensor(ends, ranks)
        for placed in cases:
            ours = [distribute_tensor(t, ranks, p) for t, p in zip(operands, placed, strict=True)]
            result = torch._scaled_grouped_mm(*ours, offs=offs, out_dtype=torch.bfloat16)
            assert torch.equal(result.full_tensor(), expected), placed
        if len(mesh) > 1:
            return
        ours = [distribute_tensor(t, ranks, rows) for t in operands]
        with patch.object(products, "_GROUP_US", 0.0):

            def call() -> torch.Tensor:
                return torch._scaled_grouped_mm(*ours, offs=offs, out_dtype=torch.bfloat16)

            told = str(weft.explain(call))
        assert "dispatch, combine is the cheapest" in told, told
        result = call()
        assert result.placements == (Shard(0),) and torch.equal(result.full_tensor(), expected)


def fp8(*shape: int) -> torch.Tensor:
    return whole_numbers(*shape).to(torch.float8_e4m3fn)


# torch 2.11 has them on GPUs only.
scales_of_rows = pytest.param(
    True,
    id="scales of rows",
    marks=pytest.mark.skipif(
        torch.__version__ < (2, 13), reason="torch has no scales of rows on a CPU"
    ),
)


def second_version(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    kinds = functional.ScalingType
    kind = kinds.TensorWise if scale_a.numel() == 1 else kinds.RowWise
    return functional.scaled_mm(
        a, b, scale_a, kind, scale_b, kind, bias=bias, output_dtype=out_dtype
    )


versions = [
    torch._scaled_mm,
    pytest.param(
        second_version,
        marks=pytest.mark.skipif(
            torch.__version__ < (2, 13), reason="torch has scaled_mm on GPUs only"
        ),
    ),
]


@pytest.mark.ranks
@pytest.mark.parametrize("mesh", [(3,), pytest.param((2, 2), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("by_row", [pytest.param(False, id="one scale"), scales_of_rows])
@pytest.mark.parametrize("scaled_mm", versions)
def test_matmuls_of_scaled_fp8(scaled_mm: Any, by_row: bool, mesh: tuple[int, ...]) -> None:
    ranks = init_device_mesh("cpu", mesh)
    torch.manual_seed(0)
    a, b = fp8(7, 64), fp8(128, 64).t()
    scale_a = torch.tensor([0.5, 2.0])[torch.randint(2, (7, 1))] if by_row else torch.tensor(2.0)
    scale_b = torch.tensor([0.5, 2.0])[torch.randint(2, (1, 128))] if by_row else torch.tensor(0.5)
    for bias in (None, whole_numbers(128)):
        expected = scaled_mm(a, b, scale_a, scale_b, bias, out_dtype=torch.float32)
        shards = [Replicate(), Shard(0), Shard(1)]
        for p in itertools.product(itertools.product(shards, repeat=len(mesh)), repeat=2):
            x, w = (distribute_tensor(t, ranks, q) for t, q in zip((a, b), p, strict=True))
            rest = [
                t if t is None else distribute_tensor(t, ranks) for t in (scale_a, scale_b, bias)
            ]
            result = scaled_mm(x, w, *rest, out_dtype=torch.float32)
            assert torch.equal(result.full_tensor(), expected), p


@pytest.mark.ranks(2)
@pytest.mark.parametrize("by_row", [pytest.param(False, id="one scale"), scales_of_rows])
@pytest.mark.parametrize("scaled_mm", versions)
def test_matmuls_of_scaled_fp8_that_move_nothing(scaled_mm: Any, by_row: bool) -> None:
    def placed(t: torch.Tensor, placement: Any) -> DTensor:
        return distribute_tensor(t, world(), [placement])

    scales = (torch.ones(7, 1), torch.ones(1, 64)) if by_row else (torch.tensor(1.0),) * 2
    a, b = fp8(7, 64), fp8(64, 64).t()
    cases = [
        (Shard(0), R, Shard(0), Shard(0), R),
        (R, Shard(1), Shard(1), R, Shard(1)),
        (Shard(1), Shard(0), P, R, R),
    ]
    for of_a, of_b, of_result, of_rows, of_columns in cases:
        pair = (of_rows, of_columns) if by_row else (R, R)
        own = [placed(t, p) for t, p in zip(scales, pair, strict=True)]
        x, w = placed(a, of_a), placed(b, of_b)
        with CommDebugMode() as comm:
            result = scaled_mm(x, w, *own, out_dtype=torch.bfloat16)
        assert result.placements == (of_result,)
        assert comm.get_total_counts() == 0
