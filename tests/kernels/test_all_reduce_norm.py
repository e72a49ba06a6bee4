"""all_reduce_residual_rms_norm against float64: results, gradients, fp8, all engines."""

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
from test_normalized_sum import check, numbers, operands

import weft
from weft.collectives import chunk_sizes, resolve
from weft.errors import MismatchError
from weft.kernels.engine.chips import INTERPRETER
from weft.kernels.engine.fp8 import FP8
from weft.kernels.norm import rms_norm_launch
from weft.kernels.norm.all_reduce_norm import all_reduce_residual_rms_norm_reference as reference
from weft.kernels.norm.rms_norm_launch import rms_norm_config

ENGINES = ("host", "generic", pytest.param("triton", marks=needs_interpreter))
op = weft.all_reduce_residual_rms_norm
E4M3 = 2.0**-4  # of a magnitude, at most half the distance of two numbers in fp8

CASES = {
    "uneven": {"shape": (7, 33)},
    "bf16": {"shape": (8, 64), "dtype": torch.bfloat16, "weight": torch.float32},
    "fp16, no weight": {"shape": (5, 17), "dtype": torch.float16, "weight": None},
    "no residual": {"shape": (5, 3), "residual": False},
    "fewer rows than ranks": {"shape": (1, 40)},
    "one token": {"shape": (40,)},
    "no rows": {"shape": (0, 4)},
    "batch, strided": {"shape": (3, 2, 24), "strided": True},
    "a row in parts": {"shape": (6, 130), "strided": True},
    "many rows": {"shape": (40, 6), "dtype": torch.bfloat16},
}


def same_everywhere(*results: torch.Tensor) -> None:
    mine = [x.detach().cpu().flatten().view(torch.uint8) for x in results]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    assert all(torch.equal(x, y) for theirs in every for x, y in zip(mine, theirs, strict=True))


@pytest.mark.ranks(2, pytest.param(3, marks=pytest.mark.slow))
@pytest.mark.parametrize("engine", ENGINES)
def test_results_and_gradients(engine: Any) -> None:
    with weft.engine(engine):
        for case in CASES.values():
            run_case(case)


def run_case(case: dict[str, Any]) -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    shape, dtype = case["shape"], case.get("dtype", torch.float32)
    H, rows, eps = shape[-1], max(1, torch.Size(shape[:-1]).numel()), 1e-3
    xs, x, weight = operands(case)
    kept = numbers(*shape, seed=60, dtype=dtype) if case.get("residual", True) else None
    dy, dh = (numbers(*shape, seed=seed, dtype=dtype) for seed in (70, 80))

    def leaf(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x.double().requires_grad_()

    exact = [x.double().requires_grad_() for x in xs]
    exact_kept, exact_weight = leaf(kept), leaf(weight)
    wanted = reference(exact, exact_kept, exact_weight, eps)
    torch.autograd.backward(wanted, [dy.double(), dh.double()])

    for operand in (kept, weight):
        if operand is not None:
            operand.requires_grad_()
    for _ in range(3):  # each half of the memory twice
        y, h = op(x, kept, weight, eps=eps)
    with torch.no_grad():
        small, h_too, scale = op(x, kept, weight, eps=eps, quantize="fp8")
    assert y.dtype == h.dtype == dtype and y.is_contiguous() and h.is_contiguous()
    check("y", y, wanted[0].detach(), H)
    check("h", h, wanted[1].detach(), W)
    same_everywhere(y, h, small, scale)
    assert torch.equal(h, h_too) and small.dtype == FP8 and scale.shape == (*shape[:-1], 1)
    # Of h as it is, which was rounded: the norm itself is in fp32.
    norm = reference([h.detach().double()], None, None if weight is None else weight.double(), eps)
    largest = norm[0].detach().abs().amax(-1, keepdim=True) if norm[0].numel() else scale.double()
    torch.testing.assert_close(scale.double() * 448, largest.double(), rtol=1e-5, atol=1e-30)
    off = (small.double() * scale.double() - norm[0].detach()).abs()
    near = norm[0].detach().abs() * E4M3 * 1.001 + scale.double() * 2.0**-10 * 1.001
    assert bool((off <= near).all())
    torch.autograd.backward([y, h], [dy, dh])
    assert exact[rank].grad is not None
    check("dx", x.grad, exact[rank].grad, 4 * H)
    if kept is not None and exact_kept is not None and exact_kept.grad is not None:
        check("dresidual", kept.grad, exact_kept.grad, 4 * H)
    if weight is not None and exact_weight is not None and exact_weight.grad is not None:
        check("dweight", weight.grad, exact_weight.grad, rows, dtype)


def loss(x: torch.Tensor, kept: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y, h = op(x, kept, weight, eps=1e-2)
    return (y * y.detach().cos()).sum() + (h * h).sum()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("engine", ENGINES)
def test_compiled_late_and_differentiated_twice(engine: Any) -> None:
    rank = dist.get_rank()
    xs = [numbers(4, 6, seed=r).requires_grad_() for r in range(2)]
    kept, weight = numbers(4, 6, seed=20).requires_grad_(), numbers(6, seed=9).requires_grad_()
    mine = [xs[rank], kept, weight]

    def penalty(grads: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return torch.stack([grad.square().sum() for grad in grads]).sum()

    with weft.engine(engine):
        torch._dynamo.reset()
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        for _ in range(2):
            plain = torch.autograd.grad(loss(*mine), mine)
            torch.testing.assert_close(torch.autograd.grad(compiled(*mine), mine), plain)
            if rank:
                time.sleep(0.2)
        grads = torch.autograd.grad(loss(*mine), mine, create_graph=True)
        twice = torch.autograd.grad(penalty(grads), mine)
    y, h = reference(xs, kept, weight, 1e-2)
    whole = (y * y.detach().cos()).sum() + (h * h).sum()
    every = [*xs, kept, weight]
    wanted = torch.autograd.grad(whole, every, create_graph=True)
    torch.testing.assert_close(grads, tuple(wanted[i] for i in (rank, 2, 3)))
    again = torch.autograd.grad(penalty(wanted), every)
    torch.testing.assert_close(twice, tuple(again[i] for i in (rank, 2, 3)))


@pytest.mark.ranks(2)
def test_errors_are_the_same_on_every_rank() -> None:
    x, weight = torch.ones(4, 6), torch.ones(6)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("at least one dim", {"x": torch.ones(())}),
        ("x must be float64", {"x": torch.ones(4, 6, dtype=torch.int64)}),
        (r"weight must be floating, of shape \(6,\)", {"weight": torch.ones(4)}),
        ("residual", {"residual": torch.ones(2, 6)}),
        ("residual", {"residual": x.double()}),
        ("quantize must be", {"quantize": "int8"}),
    ]
    for message, changed in wrong:
        with pytest.raises(ValueError, match=message):
            op(**{"x": x, "residual": x, "weight": weight, **changed})
    with pytest.raises(NotImplementedError, match="no gradient"):
        op(x.clone().requires_grad_(), None, None, quantize="fp8")
    with weft.engine("triton"), pytest.raises(NotImplementedError, match="up to 65536"):
        op(torch.ones(2, 65537), None, None)
    y, h = op(x.double(), None, None, eps=0.0)
    torch.testing.assert_close((y, h), (x.double(), 2 * x.double()))
    with (
        patch.dict(os.environ, WEFT_CHECK="1"),
        pytest.raises(MismatchError, match="quantize fp8"),
    ):
        op(x, None, None, quantize="fp8" if dist.get_rank() else None)


@needs_interpreter
@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("part", "one_shot", "quantizes"),
    [
        (128, False, False), (128, True, True),
        *(pytest.param(16, part, True, marks=pytest.mark.slow) for part in (False, None)),
        *(pytest.param(*rest, marks=pytest.mark.sweep) for rest in (
            (16, True, False), (16, False, False), (16, True, True), (128, True, False),
            (128, False, True), (128, None, False),
        )),
    ],
)  # fmt: skip
def test_launches_that_the_heuristic_does_not_choose_here(
    part: int, one_shot: bool | None, quantizes: bool
) -> None:
    """Either way, and by the switch (None), for which every rank's memory stands here; rows in one
    part and in eight, in memory full of NaN; a row of zeros.
    """
    rank, W, T, H = dist.get_rank(), dist.get_world_size(), 7, 72 if one_shot is None else 71
    share = chunk_sizes(T, W)[0]
    config = rms_norm_config(T, share, H, torch.bfloat16, W, INTERPRETER)
    config = replace(
        config, teams=2, part=part, one_shot=bool(one_shot), by_switch=one_shot is None
    )
    nbytes = rms_norm_launch.workspace_bytes(T, share, H, torch.bfloat16, W, config)
    ws = weft.collectives.workspace(resolve(None), nbytes, channel="norm test")
    dist.barrier()
    for half in range(2):
        ws.tensor(rank, half, (ws.half_bytes,), torch.uint8).fill_(255)
    dist.barrier()
    xs = [numbers(T, H, seed=r, dtype=torch.bfloat16) for r in range(W)]
    kept, weight = numbers(T, H, seed=20, dtype=torch.bfloat16), numbers(H, seed=9)
    for x in (*xs, kept):
        x[3] = 0
    for call in range(3):
        y, h, *scales = rms_norm_launch.launch_sum_rms_norm(
            xs[rank] * (call + 1),
            ws,
            share,
            weight=weight,
            residual=kept,
            eps=1e-3,
            whole=True,
            quantizes=quantizes,
            config=config,
        )
        exact = [(x * (call + 1)).double() for x in xs]
        wanted, total = reference(exact, kept.double(), weight.double(), 1e-3)
        check("h", h, total, W)
        same_everywhere(y, h, *scales)
        if quantizes:
            shown = y.double() * scales[0].double()
            near = wanted.abs() * (E4M3 + 0.03) + wanted.abs().amax(-1, keepdim=True) * 0.01
            assert bool(((shown - wanted).abs() <= near).all())
        else:
            check("y", y, wanted, H)
