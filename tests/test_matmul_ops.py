"""The fused matmuls against float64, forward and every gradient, on all engines."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
import weft.settings
from weft.collectives.movement import chunk_sizes
from weft.kernels.gathered_matmul import all_gather_matmul_reference
from weft.kernels.reduced_matmul import matmul_all_reduce_reference
from weft.kernels.scattered_matmul import matmul_reduce_scatter_reference

ENGINES = ("host", "generic", "triton")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int, strided: bool) -> torch.Tensor:
    """A leaf with values of this seed; not contiguous if `strided`."""
    generator = torch.Generator("cpu").manual_seed(seed)
    value = torch.randn(shape, generator=generator, device="cpu").to(dtype)
    if strided and len(shape) > 1:
        value = value.transpose(0, -1).contiguous().transpose(0, -1)
    return value.to(torch.get_default_device())


def spread(x: torch.Tensor, strided: bool) -> torch.Tensor:
    """The same values, if `strided` two elements apart. Differentiable."""
    return torch.stack([x, x + 1], -1)[..., 0] if strided else x


def check(name: str, actual: torch.Tensor | None, expected: torch.Tensor, K: int, W: int) -> None:
    """Whether the error is what rounding does to sums of K products of N(0, 1) values.

    In `dtype`, half an eps of the largest value each: the result, a sum with the bias, and, as a
    random walk, one partial sum a rank, which may be larger than what is left of it: 2 sigma of
    sqrt(K). In fp32: sums of K products of size 1, whose error grows
    like K in the worst order of additions and like sqrt(K) in a random one; 4 sigma of sqrt(K).
    """
    assert actual is not None, name
    assert actual.shape == expected.shape, (name, actual.shape, expected.shape)
    largest = max(2 * K**0.5, float(expected.abs().max()) if expected.numel() else 0.0)
    atol = torch.finfo(actual.dtype).eps * largest * (2 + W**0.5) / 2
    atol += 4 * torch.finfo(torch.float32).eps * max(1.0, K)
    torch.testing.assert_close(
        actual.double(), expected, rtol=0, atol=atol, msg=lambda text: f"{name}: {text}"
    )


def gather_case(case: dict[str, Any]) -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    dtype, K, dim, batch = case["dtype"], case["K"], case["dim"], case["batch"]
    shape = [*batch, K]
    sizes = case["sizes"]
    xs = []
    for r in range(W):
        local = [*shape]
        local.insert(dim, sizes[r])
        xs.append(tensor(tuple(local), dtype, 10 + r, case["strided"]))
    ws = [
        [tensor((K, n), dtype, 100 * i + r, case["strided"]) for r in range(W)]
        for i, n in enumerate(case["Ns"])
    ]
    bs = [
        [tensor((n,), dtype, 50 + i + r, False) for r in range(W)] for i, n in enumerate(case["Ns"])
    ]

    x = xs[rank].clone(memory_format=torch.preserve_format).requires_grad_()
    w = [each[rank].clone(memory_format=torch.preserve_format).requires_grad_() for each in ws]
    b = [each[rank].clone().requires_grad_() for each in bs] if case["bias"] else None
    with weft.engine(case["engine"]):
        given = None if b is None else [spread(each, case["strided"]) for each in b]
        gathered, ys = weft.all_gather_matmul(
            x, w, bias=given, gather_dim=dim, return_gathered=True,
            sizes=sizes if case["known"] else None,
        )  # fmt: skip
        dys = [tensor(tuple(y.shape), dtype, 900 + i, False) for i, y in enumerate(ys)]
        dgathered = tensor(tuple(gathered.shape), dtype, 990, False)
        torch.autograd.backward([*ys, gathered], [*dys, dgathered])

    # The whole problem in float64: every rank's outputs from every rank's shards.
    xs64 = [each.double().requires_grad_() for each in xs]
    total = torch.zeros((), dtype=torch.float64)
    mine: list[torch.Tensor] = []
    w64 = [[each.double().requires_grad_() for each in row] for row in ws]
    b64 = [[each.double().requires_grad_() for each in row] for row in bs]
    for r in range(W):
        total = total + (torch.cat(xs64, dim) * dgathered.double()).sum()
        for i in range(len(ws)):
            bias = b64[i][r] if case["bias"] else None
            y = all_gather_matmul_reference(xs64, w64[i][r], bias, dim)
            total = total + (y * dys[i].double()).sum()
            if r == rank:
                mine.append(y.detach())
    total.backward()
    M, N = gathered.shape[:-1].numel(), W * sum(case["Ns"])
    assert torch.equal(gathered.double(), torch.cat(xs64, dim).detach())
    for i, y in enumerate(ys):
        check(f"y{i}", y, mine[i], K, 1)
        check(f"dw{i}", w[i].grad, w64[i][rank].grad, M, 1)
        if b is not None:
            check(f"db{i}", b[i].grad, b64[i][rank].grad, M, 1)
    check("dx", x.grad, xs64[rank].grad, N + W, W * len(ws) + 1)


def sum_case(case: dict[str, Any]) -> torch.Tensor:
    """matmul_reduce_scatter where "dim" is a number, else matmul_all_reduce."""
    rank, W = dist.get_rank(), dist.get_world_size()
    dtype, dim, op = case["dtype"], case["dim"], case["reduce_op"]
    Ks, N = case["Ks"], case["N"]
    xs = [tensor((*case["lead"], k), dtype, 10 + r, case["strided"]) for r, k in enumerate(Ks)]
    ws = [tensor((k, N), dtype, 30 + r, case["strided"]) for r, k in enumerate(Ks)]
    b = tensor((N,), dtype, 50, False) if case["bias"] else None
    x = xs[rank].clone(memory_format=torch.preserve_format).requires_grad_()
    w = ws[rank].clone(memory_format=torch.preserve_format).requires_grad_()
    bias = b.clone().requires_grad_() if b is not None else None
    given = None if bias is None else spread(bias, case["strided"])
    xs64 = [each.double().requires_grad_() for each in xs]
    ws64 = [each.double().requires_grad_() for each in ws]
    b64 = b.double().requires_grad_() if b is not None else None
    whole = (*case["lead"], N)
    dy_whole = tensor(whole, dtype, 900, False)
    if dim is None:
        with weft.engine(case["engine"]):
            y = weft.matmul_all_reduce(x, w, bias=given, reduce_op=op)
            y.backward(dy_whole)
        expected = matmul_all_reduce_reference(xs64, ws64, b64, op)
        (expected * dy_whole.double()).sum().backward()
    else:
        parts = chunk_sizes(whole[dim], W)
        with weft.engine(case["engine"]):
            y = weft.matmul_reduce_scatter(x, w, bias=given, scatter_dim=dim, reduce_op=op)
            y.backward(dy_whole.split(parts, dim)[rank])
        expected = matmul_all_reduce_reference(xs64, ws64, b64, op)
        (expected * dy_whole.double()).sum().backward()
        expected = matmul_reduce_scatter_reference(xs64, ws64, rank, b64, dim, op)
    M = math.prod(case["lead"])
    check("y", y, expected.detach(), sum(Ks) + 1, 1)
    check("dx", x.grad, xs64[rank].grad, N, 1)
    check("dw", w.grad, ws64[rank].grad, M, 1)
    if bias is not None:
        check("db", bias.grad, b64.grad, M, W)
    return y.detach()


def run_cases(kind: str, cases: list[dict[str, Any]]) -> list[torch.Tensor]:
    outs = []
    for case in cases:
        try:
            if kind == "gather":
                gather_case(case)
            else:
                outs.append(sum_case(case))
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error
    return outs


def random_cases(kind: str, W: int, engine: str, count: int) -> list[dict[str, Any]]:
    """Shapes from 1 up (and empty ones), the same for every run."""
    rng = random.Random(f"{kind} {W} {engine}")
    top = 24 if engine == "triton" else 70
    cases = []
    for number in range(count):
        dtype = DTYPES[number % 3]
        size = lambda low=1: rng.choice([rng.randint(low, 6), rng.randint(low, top)])  # noqa: E731
        case: dict[str, Any] = {
            "dtype": dtype, "engine": engine, "bias": rng.random() < 0.5,
            "strided": rng.random() < 0.3,
        }  # fmt: skip
        batch = [[], [], [2], [3, 2]][rng.randint(0, 3)]
        if kind == "gather":
            even = size()
            case |= {
                "K": size(), "Ns": [size() for _ in range(rng.choice([1, 1, 2, 3]))],
                "batch": batch, "dim": rng.randint(0, len(batch)),
                "known": rng.random() < 0.5,
                "sizes": rng.choice(
                    [[even] * W, chunk_sizes(size(), W), [size(0) for _ in range(W)]]
                ),
            }  # fmt: skip
        else:
            lead = [size(), *batch]
            rng.shuffle(lead)
            case |= {
                "lead": lead, "N": size(), "Ks": rng.choice([[size()] * W, chunk_sizes(size(), W)]),
                "reduce_op": rng.choice(["sum", "sum", "avg"]),
                "dim": None if kind == "reduce" else rng.randint(0, len(lead) - 1),
            }  # fmt: skip
        if number == 1:  # nothing to contract
            case |= {"K": 0} if kind == "gather" else {"Ks": [0] * W}
        if number == 2:  # no columns
            case |= {"Ns": [0]} if kind == "gather" else {"N": 0}
        cases.append(case)
    return cases


# Four ranks of kernels are in test_kernels_triton.py, and in the sweep.
@pytest.mark.parametrize(
    ("W", "engine"),
    [(W, engine) for W in (1, 2, 3, 4) for engine in ENGINES if (W, engine) != (4, "triton")],
)
@pytest.mark.parametrize("kind", ["gather", "scatter", "reduce"])
def test_random_shapes(ranks: Any, kind: str, W: int, engine: str) -> None:
    count = 12 // max(2, W) if engine == "triton" else 24
    outs = ranks(W, run_cases, kind, random_cases(kind, W, engine, count))
    if kind == "reduce":
        for others in outs[1:]:
            assert all(torch.equal(a, b) for a, b in zip(outs[0], others, strict=True))


@pytest.mark.parametrize("W", [2, 3])
@pytest.mark.parametrize("kind", ["gather", "scatter", "reduce"])
def test_shapes_that_the_host_engine_treats_apart(ranks: Any, kind: str, W: int) -> None:
    """Shards long enough to be multiplied in place, and matmuls that go to another library."""
    cases = []
    for dtype in (torch.float32, torch.bfloat16):
        # Small and large products, thin and wide next to the rows; one weight and two.
        for K, Ns in ((24, [16]), (72, [120]), (72, [120, 40]), (24, [700]), (16, [300, 600])):
            case: dict[str, Any] = {
                "dtype": dtype, "engine": "host", "bias": True, "strided": False,
            }  # fmt: skip
            if kind == "gather":
                sizes = [300, 257, 0][:W]
                case |= {"K": K, "Ns": Ns, "batch": [], "dim": 0, "known": True, "sizes": sizes}
            else:
                case |= {
                    "lead": [600], "N": sum(Ns), "Ks": [K] * W, "reduce_op": "sum",
                    "dim": None if kind == "reduce" else 0,
                }  # fmt: skip
            cases.append(case)
    ranks(W, run_cases, kind, cases)


def repeated_body(engine: weft.settings.Engine) -> list[torch.Tensor]:
    """Everything that a training step gives, twice, with calls of other shapes between."""
    rank = dist.get_rank()
    dtypes = (torch.float32, torch.bfloat16)
    runs: list[list[torch.Tensor]] = []
    for _ in range(2):
        values: list[torch.Tensor] = []
        for dtype in dtypes:
            x = tensor((19, 24), dtype, rank, False).requires_grad_()
            w = tensor((24, 21), dtype, 10 + rank, False).requires_grad_()
            v = tensor((21, 24), dtype, 20 + rank, False).requires_grad_()
            with weft.engine(engine):
                h = weft.all_gather_matmul(x, w)
                y = weft.matmul_reduce_scatter(h, v)
                z = weft.matmul_all_reduce(h.detach(), v.detach())
                y.backward(torch.ones_like(y))
                weft.all_gather_matmul(x[:3], w)
                # Nothing but the bias has a gradient, which an average leaves alone.
                b = torch.zeros(24, dtype=dtype, requires_grad=True)
                parts = h.detach(), v.detach()
                weft.matmul_reduce_scatter(*parts, bias=b, reduce_op="avg").sum().backward()
                assert b.grad is not None and b.grad.tolist() == [float(len(h))] * 24
            values += [h, y, z, x.grad, w.grad, v.grad]  # type: ignore[list-item]
        runs.append([value.detach().clone() for value in values])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    return runs[0][2 :: len(runs[0]) // len(dtypes)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("W", [2, 3])
def test_results_are_bitwise_the_same_again_and_on_every_rank(
    ranks: Any, W: int, engine: str
) -> None:
    first, *others = ranks(W, repeated_body, engine)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.sweep
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("W", [2, 3, 4])
@pytest.mark.parametrize("kind", ["gather", "scatter", "reduce"])
def test_many_random_shapes(ranks: Any, kind: str, W: int, engine: str) -> None:
    count = 100 if engine == "triton" else 300
    ranks(W, run_cases, kind, random_cases(kind, W, engine, count), timeout_s=900)
