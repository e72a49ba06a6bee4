"""The fused matmuls against float64, forward and every gradient, on all engines."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import weft
import weft.settings
from weft.collectives.ranks.chunks import chunk_sizes
from weft.kernels.engine import local_matmul
from weft.kernels.matmul.all_gather import all_gather_matmul_reference
from weft.kernels.matmul.all_reduce import matmul_all_reduce_reference
from weft.kernels.matmul.reduce_scatter import matmul_reduce_scatter_reference

ENGINES = ("host", "generic", "triton")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int, strided: bool) -> torch.Tensor:
    """A leaf with values of this seed; not contiguous if `strided`."""
    generator = torch.Generator("cpu").manual_seed(seed)
    value = torch.randn(shape, generator=generator, device="cpu").to(dtype)
    if strided and len(shape) > 1:
        value = value.transpose(0, -1).contiguous().transpose(0, -1)
    return value.to(torch.get_default_device())


def leaf(value: torch.Tensor, needed: bool) -> torch.Tensor:
    return value.clone(memory_format=torch.preserve_format).requires_grad_(needed)


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


def grad_of(x: torch.Tensor) -> torch.Tensor:
    """0 where what x went into was not used."""
    return torch.zeros_like(x) if x.grad is None else x.grad


# What a case has where it says nothing else: what of x, w and bias has a gradient, whether the
# gathered x is asked for, whether the loss leaves out the last result.
USUAL = {"needs": (True, True, True), "keep": True, "unused": False}


def gather_case(case: dict[str, Any]) -> None:
    """Shards along any dim of x, the contraction too, where "dim" is its last one."""
    case = USUAL | case
    rank, W = dist.get_rank(), dist.get_world_size()
    dtype, K, dim, batch = case["dtype"], case["K"], case["dim"], case["batch"]
    shape = [*batch, K]
    sizes, (needs_x, needs_w, needs_b) = case["sizes"], case["needs"]
    if dim > len(batch):
        K = sum(sizes)
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

    x = leaf(xs[rank], needs_x)
    w = [leaf(each[rank], needs_w) for each in ws]
    b = [leaf(each[rank], needs_b) for each in bs] if case["bias"] else None
    with weft.engine(case["engine"]):
        given = None if b is None else [spread(each, case["strided"]) for each in b]
        made = weft.all_gather_matmul(
            x, w, bias=given, gather_dim=dim, return_gathered=case["keep"],
            sizes=sizes if case["known"] else None,
        )  # fmt: skip
        gathered, ys = made if case["keep"] else (None, made)
        dys = [tensor(tuple(y.shape), dtype, 900 + i, False) for i, y in enumerate(ys)]
        if case["unused"]:
            dys[-1] = torch.zeros_like(dys[-1])
        roots = list(zip(ys, dys, strict=True))[: len(ys) - case["unused"]]
        if gathered is not None:
            dgathered = tensor(tuple(gathered.shape), dtype, 990, False)
            roots.append((gathered, dgathered))
        roots = [(y, dy) for y, dy in roots if y.requires_grad]
        torch.autograd.backward(*zip(*roots, strict=True) if roots else ([], []))

    # The whole problem in float64: every rank's outputs from every rank's shards.
    xs64 = [each.double().requires_grad_() for each in xs]
    total = torch.zeros((), dtype=torch.float64)
    mine: list[torch.Tensor] = []
    w64 = [[each.double().requires_grad_() for each in row] for row in ws]
    b64 = [[each.double().requires_grad_() for each in row] for row in bs]
    for r in range(W):
        if gathered is not None:
            total = total + (torch.cat(xs64, dim) * dgathered.double()).sum()
        for i in range(len(ws)):
            bias = b64[i][r] if case["bias"] else None
            y = all_gather_matmul_reference(xs64, w64[i][r], bias, dim)
            total = total + (y * dys[i].double()).sum()
            if r == rank:
                mine.append(y.detach())
    total.backward()
    M, N = ys[0].shape[:-1].numel(), W * sum(case["Ns"])
    if gathered is not None:
        assert torch.equal(gathered.double(), torch.cat(xs64, dim).detach())
    for i, y in enumerate(ys):
        check(f"y{i}", y, mine[i], K, 1)
        if needs_w:
            check(f"dw{i}", grad_of(w[i]), grad_of(w64[i][rank]), M, 1)
        if b is not None and needs_b:
            check(f"db{i}", grad_of(b[i]), grad_of(b64[i][rank]), M, 1)
    if needs_x:
        check("dx", grad_of(x), grad_of(xs64[rank]), N + W, W * len(ws) + 1)


def sum_case(case: dict[str, Any]) -> torch.Tensor:
    """matmul_reduce_scatter where "dim" is a number, else matmul_all_reduce."""
    case = USUAL | case
    rank, W = dist.get_rank(), dist.get_world_size()
    dtype, dim, op = case["dtype"], case["dim"], case["reduce_op"]
    Ks, N, (needs_x, needs_w, needs_b) = case["Ks"], case["N"], case["needs"]
    xs = [tensor((*case["lead"], k), dtype, 10 + r, case["strided"]) for r, k in enumerate(Ks)]
    ws = [tensor((k, N), dtype, 30 + r, case["strided"]) for r, k in enumerate(Ks)]
    b = tensor((N,), dtype, 50, False) if case["bias"] else None
    x, w = leaf(xs[rank], needs_x), leaf(ws[rank], needs_w)
    bias = None if b is None else leaf(b, needs_b)
    given = None if bias is None else spread(bias, case["strided"])
    xs64 = [each.double().requires_grad_() for each in xs]
    ws64 = [each.double().requires_grad_() for each in ws]
    b64 = b.double().requires_grad_() if b is not None else None
    whole = (*case["lead"], N)
    dy_whole = tensor(whole, dtype, 900, False)
    if dim is None:
        with weft.engine(case["engine"]):
            y = weft.matmul_all_reduce(x, w, bias=given, reduce_op=op)
            if y.requires_grad:
                y.backward(dy_whole)
        expected = matmul_all_reduce_reference(xs64, ws64, b64, op)
        (expected * dy_whole.double()).sum().backward()
    else:
        parts = chunk_sizes(whole[dim], W)
        with weft.engine(case["engine"]):
            y = weft.matmul_reduce_scatter(x, w, bias=given, scatter_dim=dim, reduce_op=op)
            if y.requires_grad:
                y.backward(dy_whole.split(parts, dim)[rank])
        expected = matmul_all_reduce_reference(xs64, ws64, b64, op)
        (expected * dy_whole.double()).sum().backward()
        expected = matmul_reduce_scatter_reference(xs64, ws64, rank, b64, dim, op)
    M = math.prod(case["lead"])
    check("y", y, expected.detach(), sum(Ks) + 1, 1)
    if needs_x:
        check("dx", x.grad, xs64[rank].grad, N, 1)
    if needs_w:
        check("dw", w.grad, ws64[rank].grad, M, 1)
    if bias is not None and needs_b:
        check("db", bias.grad, b64.grad, M, W)
    return y.detach()


def run_cases(kind: str, cases: list[dict[str, Any]]) -> list[torch.Tensor]:
    outs = []
    for case in cases:
        try:
            library = case.get("onednn", local_matmul.onednn_is_quicker())
            with patch.object(local_matmul, "onednn_is_quicker", lambda told=library: told):
                if kind == "gather":
                    gather_case(case)
                else:
                    outs.append(sum_case(case))
        except Exception as error:  # of a peer that stays away, too
            raise AssertionError(f"{case}: {error}") from error
    return outs


# Of x, w and bias: what has a gradient.
NEEDS = [
    (False, True, False), (True, True, True), (True, True, True), (True, True, True),
    (True, False, True), (False, False, True),
]  # fmt: skip


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
            "strided": rng.random() < 0.3, "needs": NEEDS[number % len(NEEDS)],
        }  # fmt: skip
        # The last dim, whose shards the fused engines do not take.
        last = engine == "generic"
        batch = [[], [], [2], [3, 2]][rng.randint(0, 3)]
        if kind == "gather":
            even = size()
            case |= {
                "K": size(), "Ns": [size() for _ in range(rng.choice([1, 1, 2, 3]))],
                "batch": batch, "dim": rng.randint(0, len(batch) + last),
                "known": rng.random() < 0.5, "keep": rng.random() < 0.5,
                "sizes": rng.choice(
                    [[even] * W, chunk_sizes(size(), W), [size(0) for _ in range(W)]]
                ),
            }  # fmt: skip
            case["unused"] = len(case["Ns"]) > 1 and rng.random() < 0.5
        else:
            lead = [size(), *batch]
            rng.shuffle(lead)
            case |= {
                "lead": lead, "N": size(), "Ks": rng.choice([[size()] * W, chunk_sizes(size(), W)]),
                "reduce_op": rng.choice(["sum", "sum", "avg"]),
                "dim": None if kind == "reduce" else rng.randint(0, len(lead) - 1 + last),
            }  # fmt: skip
        if number == 1:  # nothing to contract
            case |= {"K": 0} if kind == "gather" else {"Ks": [0] * W}
        if number == 2:  # no columns
            case |= {"Ns": [0]} if kind == "gather" else {"N": 0}
        cases.append(case)
    return cases


def on_random_shapes(
    ranks: Any, kind: str, W: int, engine: str, count: int, timeout_s: float = 120
) -> None:
    outs = ranks(W, run_cases, kind, random_cases(kind, W, engine, count), timeout_s=timeout_s)
    if kind == "reduce":
        for others in outs[1:]:
            assert all(torch.equal(a, b) for a, b in zip(outs[0], others, strict=True))


# Four ranks of kernels are in test_kernels_triton.py, and in the sweep.
@pytest.mark.parametrize(
    ("W", "engine"),
    [(W, engine) for W in (1, 2, 3, 4) for engine in ENGINES if (W, engine) != (4, "triton")],
)
@pytest.mark.parametrize("kind", ["gather", "scatter", "reduce"])
@pytest.mark.slow_where(W=3, engine="triton")
def test_random_shapes(ranks: Any, kind: str, W: int, engine: str) -> None:
    on_random_shapes(ranks, kind, W, engine, 12 // max(2, W) if engine == "triton" else 24)


@pytest.mark.parametrize("W", [2, 3])
@pytest.mark.parametrize("kind", ["gather", "scatter", "reduce"])
def test_shapes_that_the_host_engine_treats_apart(ranks: Any, kind: str, W: int) -> None:
    """Shards long enough to be multiplied in place, and matmuls that go to another library."""
    cases = []
    libraries = (torch.float32, False), (torch.float32, True), (torch.bfloat16, False)
    for dtype, onednn in libraries:
        # Small and large products, thin and wide next to the rows; one weight and two.
        for K, Ns in ((24, [16]), (72, [120]), (72, [120, 40]), (24, [700]), (16, [300, 600])):
            case: dict[str, Any] = {
                "dtype": dtype, "engine": "host", "bias": True, "strided": False, "onednn": onednn,
                "keep": False,
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
@pytest.mark.slow_where(engine="triton")
def test_results_are_bitwise_the_same_again_and_on_every_rank(ranks: Any, engine: str) -> None:
    # The sum of two terms is the same in either order, that of three is not.
    first, *others = ranks(3, repeated_body, engine)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.ranks(2)
def test_misuse_is_an_error_on_every_rank() -> None:
    x, w, n = torch.ones(4, 6), torch.ones(6, 2), torch.ones(2)
    gather, scatter, reduce = (
        weft.all_gather_matmul, weft.matmul_reduce_scatter, weft.matmul_all_reduce
    )  # fmt: skip
    calls: list[tuple[str, Callable[[], Any]]] = [
        (r"w must be \(K, N\) with K = 6", lambda: gather(x, w.t())),
        ("at least one", lambda: gather(x, [])),
        ("one entry per weight: 2 for 1", lambda: gather(x, [w], bias=[n, n])),
        ("x and w must be of a floating-point", lambda: reduce(x.long(), w.long())),
        (r"w must be torch\.float32 on cpu", lambda: scatter(x, w.double())),
        (r"bias must be torch\.float32", lambda: reduce(x, w, bias=n.double())),
        (r"bias must be \(N,\) with N = 2", lambda: scatter(x, w, bias=torch.ones(3))),
        ('must be "sum" or "avg"', lambda: reduce(x, w, reduce_op="max")),  # type: ignore[arg-type]
        ("x must have at least 2 dims", lambda: gather(x[0], w)),
        ("gather_dim be one of them", lambda: gather(x, w, gather_dim=2)),
        ("gather_dim be one of them", lambda: gather(x, w, gather_dim=-3)),
        ("x must have at least 2 dims", lambda: scatter(x[0], w)),
        ("x must have at least 2 dims", lambda: scatter(torch.tensor(1.0), w)),
        ("scatter_dim be a dim", lambda: scatter(x, w, scatter_dim=-3)),
        ("x must have at least one dim", lambda: reduce(torch.tensor(1.0), w)),
        ("activation must be", lambda: gather(x, w, activation="tanh")),  # type: ignore[arg-type]
        ("pair .* of equal shapes", lambda: gather(x, [w, w[:, 1:]], activation="swiglu")),
    ]
    for message, call in calls:
        with pytest.raises(ValueError, match=message):
            call()
    assert reduce(x, w).tolist() == [[6.0 * dist.get_world_size()] * 2] * 4


@pytest.mark.ranks(2)
@pytest.mark.parametrize("engine", ["host", "generic"])
def test_gradients_of_complex_numbers(engine: str) -> None:
    """As one process has it, whose gradients are products with conjugates."""
    rank, W = dist.get_rank(), dist.get_world_size()
    draw = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.complex128)

    x, y, w, v = drawn(2 * W, 3), drawn(2 * W, W), drawn(3, W), drawn(W, 4)
    dy, dz = drawn(2 * W, W), drawn(2 * W, 4)
    for t in (x, y, w, v):
        t.requires_grad_()
    torch.autograd.backward([x @ w, y @ v], [dy, dz])
    rows, columns = slice(2 * rank, 2 * rank + 2), slice(rank, rank + 1)

    def own(t: torch.Tensor, *part: slice) -> torch.Tensor:
        return t.detach()[part].clone().requires_grad_()

    def same(*pairs: tuple[torch.Tensor | None, torch.Tensor | None]) -> None:
        for got, expected in pairs:
            torch.testing.assert_close(got, expected)

    every = slice(None)
    with weft.engine(engine):
        my_x, my_w = own(x, rows), own(w, every, columns)
        weft.all_gather_matmul(my_x, my_w).backward(dy[:, columns])
        same((my_x.grad, x.grad[rows]), (my_w.grad, w.grad[:, columns]))
        for op, part in ((weft.matmul_reduce_scatter, rows), (weft.matmul_all_reduce, every)):
            my_y, my_v = own(y, every, columns), own(v, columns)
            op(my_y, my_v).backward(dz[part])
            same((my_y.grad, y.grad[:, columns]), (my_v.grad, v.grad[columns]))
        whole = torch.nn.Linear(3, W, bias=False, dtype=x.dtype)
        whole.weight.data = w.detach().t().contiguous()
        my_x, layer = own(x), weft.ColumnParallelLinear.from_linear(whole, sequence_dim=None)
        layer(my_x).backward(dy[:, columns])
        same((my_x.grad, x.grad), (layer.weight.grad, w.grad[:, columns].t()))


@pytest.mark.sweep
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("W", [2, 3, 4])
@pytest.mark.parametrize("kind", ["gather", "scatter", "reduce"])
def test_many_random_shapes(ranks: Any, kind: str, W: int, engine: str) -> None:
    on_random_shapes(ranks, kind, W, engine, 100 if engine == "triton" else 300, timeout_s=900)


@pytest.mark.ranks(2)
def test_what_one_rank_passes_wrong_is_refused_before_it_tells_others_anything() -> None:
    x, w = torch.ones(2, 3), torch.ones(3, 4)
    for engine in ("host", "generic"):
        with weft.engine(engine):
            if dist.get_rank() == 1:
                for wrong in (w.t(), w.double(), w[0]):
                    with pytest.raises(ValueError, match="w must be"):
                        weft.all_gather_matmul(x, wrong)
                    with pytest.raises(ValueError, match="w must be"):
                        weft.matmul_reduce_scatter(x, wrong)
            torch.testing.assert_close(weft.all_gather_matmul(x, w), torch.full((4, 4), 3.0))
