"""reduce_scatter_rms_norm_all_gather against float64: both results, every gradient, all engines."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from needs import needs_interpreter
from torch.nn.functional import rms_norm

import weft
from weft.collectives import chunk_sizes, resolve
from weft.collectives.ranks.pad import MAX_PROGRAMS
from weft.errors import MismatchError
from weft.kernels.engine.chips import INTERPRETER, KNOWN
from weft.kernels.norm import rms_norm_launch
from weft.kernels.norm.rms_norm import WIDEST
from weft.kernels.norm.rms_norm import reduce_scatter_rms_norm_all_gather_reference as reference
from weft.kernels.norm.rms_norm_launch import rms_norm_config

ENGINES = ("host", "generic", pytest.param("triton", marks=needs_interpreter))
op = weft.reduce_scatter_rms_norm_all_gather


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    x = torch.randn(shape, generator=generator, device="cpu").to(dtype)
    return x.to(torch.get_default_device())


def shards(x: torch.Tensor, dim: int, W: int) -> list[torch.Tensor]:
    return list(x.split(chunk_sizes(x.shape[dim], W), dim))


def check(
    name: str,
    actual: torch.Tensor | None,
    wanted: torch.Tensor,
    terms: int,
    rounded_to: torch.dtype | None = None,
) -> None:
    """Up to roundings to dtype of values of this size, and sums of `terms` such values in fp32;
    or of sums of values `rounded_to` that."""
    assert actual is not None and actual.shape == wanted.shape, name
    largest = float(wanted.abs().max()) if wanted.numel() else 0.0
    eps, wide = torch.finfo(actual.dtype).eps, torch.finfo(torch.float32).eps
    wide = wide if rounded_to is None else torch.finfo(rounded_to).eps
    atol = (4 * eps + 4 * wide * terms**0.5) * max(1.0, largest)
    torch.testing.assert_close(
        actual.double(), wanted, rtol=0, atol=atol, msg=lambda text: f"{name}: {text}"
    )


CASES = {
    "uneven": {"shape": (7, 33)},
    "even, bf16": {"shape": (8, 64), "dtype": torch.bfloat16, "weight": torch.float32},
    "fp16, no weight": {"shape": (5, 16), "dtype": torch.float16, "weight": None},
    "no residual": {"shape": (5, 3), "residual": False},
    "fewer rows than ranks": {"shape": (1, 40)},
    "no rows": {"shape": (0, 4)},
    "sequence": {"shape": (2, 5, 24), "dim": 1},
    "batch": {"shape": (3, 2, 24), "dim": -3, "strided": True},
    "a row in parts": {"shape": (6, 130), "strided": True},
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.slow_where(world_size=3, engine="triton")
def test_results_and_gradients(case: dict[str, Any], engine: Any) -> None:
    with weft.engine(engine):
        run_case(case)


def operands(
    case: dict[str, Any],
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor | None]:
    """Every rank's x, this rank's as a leaf, and the weight."""
    shape, dtype = case["shape"], case.get("dtype", torch.float32)
    xs = [numbers(*shape, seed=r, dtype=dtype) for r in range(dist.get_world_size())]
    kind = case.get("weight", dtype)
    weight = None if kind is None else numbers(shape[-1], seed=50, dtype=kind)
    x = xs[dist.get_rank()]
    if case.get("strided"):
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    return xs, x.clone(memory_format=torch.preserve_format).requires_grad_(), weight


def run_cases() -> None:
    for case in CASES.values():
        run_case(case)


def run_case(case: dict[str, Any]) -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    shape, dtype, dim = case["shape"], case.get("dtype", torch.float32), case.get("dim", 0)
    eps, H = 1e-3, shape[-1]
    xs, x, weight = operands(case)
    kept = shards(numbers(*shape, seed=60, dtype=dtype), dim, W)
    kept = kept if case.get("residual", True) else None
    dys = [numbers(*shape, seed=70 + r, dtype=dtype) for r in range(W)]
    dhs = shards(numbers(*shape, seed=80, dtype=dtype), dim, W)

    exact = [x.double().requires_grad_() for x in xs]
    exact_weight = None if weight is None else weight.double().requires_grad_()
    exact_kept = None if kept is None else [x.double().requires_grad_() for x in kept]
    wanted, wanted_hs = reference(exact, exact_weight, exact_kept, eps, dim)
    torch.autograd.backward(
        [wanted, *wanted_hs], [sum(dy.double() for dy in dys), *(dh.double() for dh in dhs)]
    )
    if weight is not None:
        weight.requires_grad_()
    residual = None if kept is None else kept[rank].clone().requires_grad_()
    for _ in range(3):  # each half of the memory twice
        y, h = op(x, weight, residual=residual, eps=eps, dim=dim)
    assert y.dtype == h.dtype == dtype
    check("y", y, wanted.detach(), H)
    check("h", h, wanted_hs[rank].detach(), W)
    everywhere: list[Any] = [None] * W
    dist.all_gather_object(everywhere, y.detach().cpu())
    assert all(torch.equal(y.cpu(), other) for other in everywhere), "ranks differ"
    torch.autograd.backward([y, h], [dys[rank], dhs[rank]])
    grad = exact[rank].grad
    assert grad is not None
    check("dx", x.grad, grad, 4 * H)
    if weight is not None and exact_weight is not None and exact_weight.grad is not None:
        check("dweight", weight.grad, exact_weight.grad, x.numel() // H, dtype)
    if residual is not None and exact_kept is not None:
        wanted_grad = exact_kept[rank].grad
        assert wanted_grad is not None
        check("dresidual", residual.grad, wanted_grad, 4 * H)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow_where(engine="triton")
def test_alike_in_other_ways(engine: Any) -> None:
    """The usual eps; a gradient of the weight alone; inside torch.compile; one rank late."""
    rank = dist.get_rank()
    x, weight, kept = numbers(4, 6, seed=rank), numbers(6, seed=9), numbers(2, 6, seed=20 + rank)
    with weft.engine(engine):
        for dtype in (torch.float32, torch.bfloat16):  # both with the eps of fp32
            small = x.to(dtype) * 1e-3
            y, h = op(small, weight.to(dtype))
            wanted = rms_norm(h, (6,), weight.to(dtype), torch.finfo(torch.float32).eps)
            near = 2 * torch.finfo(dtype).eps
            mine = y.split(2)[rank]
            torch.testing.assert_close(mine, wanted, rtol=near, atol=near)

        leaf = weight.clone().requires_grad_()
        op(x, leaf)[0].sum().backward()
        rows = numbers(4, 6, seed=0) + numbers(4, 6, seed=1)
        torch.testing.assert_close(leaf.grad, 2 * rms_norm(rows, (6,)).sum(0))

        leaves = [t.clone().requires_grad_() for t in (x, weight, kept)]
        torch._dynamo.reset()
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        for _ in range(2):
            grads = torch.autograd.grad(loss(*leaves), leaves)
            torch.testing.assert_close(torch.autograd.grad(compiled(*leaves), leaves), grads)
            if rank:
                time.sleep(0.3)


def loss(x: torch.Tensor, weight: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    y, h = op(x, weight, residual=kept, eps=1e-2)
    return (y * y.detach().cos()).sum() + (h * h).sum()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("engine", ENGINES)
def test_results_may_be_written_to(engine: Any) -> None:
    for shape, dim in (((4, 6), 0), ((2, 4, 6), 1)):
        x = numbers(*shape, seed=dist.get_rank()).requires_grad_()
        with weft.engine(engine):
            (once,) = torch.autograd.grad(op(x, dim=dim)[0].square().sum(), x)
            y, h = op(x, dim=dim)
            y.mul_(2)
            (fourfold,) = torch.autograd.grad(y.square().sum(), x)
            torch.testing.assert_close(fourfold, 4 * once)
            y, h = op(x, dim=dim)
            h.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("engine", ENGINES)
def test_second_derivatives(engine: Any) -> None:
    rank = dist.get_rank()
    xs = [numbers(4, 6, seed=r).requires_grad_() for r in range(2)]
    kept = [numbers(2, 6, seed=20 + r).requires_grad_() for r in range(2)]
    weight = numbers(6, seed=9).requires_grad_()

    def penalty(grads: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return torch.stack([grad.square().sum() for grad in grads]).sum()

    mine = [xs[rank], weight, kept[rank]]
    with weft.engine(engine):
        grads = torch.autograd.grad(loss(*mine), mine, create_graph=True)
        twice = torch.autograd.grad(penalty(grads), mine)
    y, hs = reference(xs, weight, kept, 1e-2)
    whole = 2 * (y * y.detach().cos()).sum() + sum((h * h).sum() for h in hs)
    every = [*xs, weight, *kept]
    wanted = torch.autograd.grad(whole, every, create_graph=True)
    torch.testing.assert_close(grads, tuple(wanted[i] for i in (rank, 2, 3 + rank)))
    again = torch.autograd.grad(penalty(wanted), every)
    torch.testing.assert_close(twice, tuple(again[i] for i in (rank, 2, 3 + rank)))


@pytest.mark.ranks(2)
def test_errors_are_the_same_on_every_rank() -> None:
    x, weight = torch.ones(4, 6), torch.ones(6)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("at least 2 dims", {"x": torch.ones(6)}),
        ("but the last", {"dim": -1}),
        ("but the last", {"dim": 2}),
        ("x must be float64", {"x": torch.ones(4, 6, dtype=torch.int64)}),
        (r"weight must be floating, of shape \(6,\)", {"weight": torch.ones(4)}),
        ("residual", {"residual": torch.ones(4, 6)}),
        ("residual", {"residual": torch.ones(2, 6).double()}),
    ]
    for message, changed in wrong:
        with pytest.raises(ValueError, match=message):
            op(**{"x": x, "weight": weight, **changed})
    with (
        weft.engine("triton"),
        pytest.raises(NotImplementedError, match="up to 65536 elements, got 65537"),
    ):
        op(torch.ones(2, 65537))
    with weft.engine("triton"), pytest.raises(NotImplementedError, match="float64"):
        op(x.double(), weight)
    y, _ = op(x.double(), weight)
    torch.testing.assert_close(y, torch.ones(4, 6).double())


@pytest.mark.ranks(2)
def test_calls_are_compared_where_asked() -> None:
    residual = torch.ones(2, 6) if dist.get_rank() else None
    with (
        patch.dict(os.environ, WEFT_CHECK="1"),
        pytest.raises(MismatchError, match="residual False"),
    ):
        op(torch.ones(4, 6), residual=residual)


@needs_interpreter
@pytest.mark.ranks(3)
@pytest.mark.parametrize("one_shot", [True, False])
@pytest.mark.parametrize("part", [pytest.param(16, marks=pytest.mark.slow), 128])
def test_launches_that_the_heuristic_does_not_choose_here(one_shot: bool, part: int) -> None:
    """Either way, rows in one part and in eight, in memory full of NaN."""
    rank, W, (T, H) = dist.get_rank(), dist.get_world_size(), (7, 70)
    share = chunk_sizes(T, W)[0]
    config = rms_norm_config(T, share, H, torch.float32, W, INTERPRETER)
    config = replace(config, teams=2, part=part, one_shot=one_shot)
    nbytes = rms_norm_launch.workspace_bytes(T, share, H, torch.float32, W, config)
    ws = weft.collectives.workspace(resolve(None), nbytes, channel="norm test")
    dist.barrier()
    for half in range(2):
        ws.tensor(rank, half, (ws.half_bytes,), torch.uint8).fill_(255)
    dist.barrier()
    xs, weight = [numbers(T, H, seed=r) for r in range(W)], numbers(H, seed=9)
    kept = shards(numbers(T, H, seed=20), 0, W)
    for call in range(3):
        y, h = rms_norm_launch.launch_sum_rms_norm(
            xs[rank] + call, ws, share, weight=weight, residual=kept[rank], eps=1e-3, config=config
        )
        exact = [(x + call).double() for x in xs]
        wanted, hs = reference(exact, weight.double(), [x.double() for x in kept], 1e-3)
        check("y", y, wanted, H)
        check("h", h, hs[rank], W)


def test_the_launch_suits_the_chip() -> None:
    """Few rows are shared by many programs, and all have a signal slot."""
    for chip in KNOWN:
        for rows, H in ((1, 8192), (512, 8192), (3, 100), (1, WIDEST)):
            config = rms_norm_config(rows, -(-rows // 8), H, torch.bfloat16, 8, chip)
            assert config.one_shot == (rows * H <= 1 << 17)
            assert config.team(H) == {8192: 8, 100: 1}.get(H, 64)
            assert 2 * config.teams * config.team(H) <= MAX_PROGRAMS
