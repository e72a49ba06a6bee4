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
from flag_words import calls_across_flags, fill_with_nan
from needs import needs_interpreter
from test_normalized_sum import check, numbers, operands

import weft
from weft.collectives import chunk_sizes, resolve
from weft.errors import MismatchError
from weft.kernels.engine.chips import INTERPRETER, known
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
@pytest.mark.slow_where(engine="triton")
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


@pytest.mark.ranks(2)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_eps_of_torch_and_zeros_in_fp8(engine: Any) -> None:
    x = numbers(3, 8, seed=0, dtype=torch.bfloat16) * 1e-3
    with weft.engine(engine):
        y, h = op(x, None, None, eps=None)
        wanted = torch.nn.functional.rms_norm(h.float(), (8,)).to(y.dtype)
        torch.testing.assert_close(y, wanted, rtol=2**-7, atol=0)
        compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x, None, None, eps=None)[0], y)
        torch.set_flush_denormal(True)  # the scale of zeros must not be subnormal
        try:
            made = [op(torch.zeros(T, 8), None, None, quantize="fp8") for T in (1, 3, 70)]
        finally:
            torch.set_flush_denormal(False)
    for small, _, scale in made:
        assert not small.float().any()
        assert torch.equal(scale, torch.full_like(scale, 2.0**-117 / 448))


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


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def by_words(T: int, H: int, dtype: torch.dtype, one_shot: bool, part: int = 16) -> Any:
    """A launch of flagged words on this group, as a function of this rank's x and the residual."""
    group = resolve(None)
    share = chunk_sizes(T, group.world_size)[0]
    config = rms_norm_launch.RMSNormConfig(2, part, one_shot, flagged=True)
    nbytes = rms_norm_launch.workspace_bytes(T, share, H, dtype, group.world_size, config)
    ws = weft.collectives.workspace(group, nbytes, channel=config.channel)

    def run(x: torch.Tensor, kept: torch.Tensor | None, whole: bool = True, **options: Any) -> Any:
        return rms_norm_launch.launch_sum_rms_norm(
            x, ws, share, weight=None, residual=kept, eps=1e-3, whole=whole, config=config,
            **options,
        )  # fmt: skip

    return ws, run


@needs_interpreter
@pytest.mark.slow
@pytest.mark.ranks(1, 2, 3, pytest.param(8, marks=pytest.mark.sweep))
def test_words_have_the_bits_of_signalled_rows() -> None:
    """In one shot and in two, all dtypes, rows that are odd, few, and in parts; a late rank."""
    rank, W = dist.get_rank(), dist.get_world_size()
    for dtype, T, H in ((torch.float32, 3, 33), (torch.bfloat16, 5, 71), (torch.float16, 1, 40)):
        share, part = chunk_sizes(T, W)[0], 32
        xs = [numbers(T, H, seed=r, dtype=dtype) for r in range(W)]
        kept = numbers(T, H, seed=20, dtype=dtype)
        plain = rms_norm_launch.RMSNormConfig(2, part, one_shot=True)
        nbytes = rms_norm_launch.workspace_bytes(T, share, H, dtype, W, plain)
        signalled = weft.collectives.workspace(None, nbytes, channel="norm test")
        like = rms_norm_launch.launch_sum_rms_norm(
            xs[rank] * 3, signalled, share, weight=None, residual=kept, eps=1e-3, whole=True,
            config=plain,
        )  # fmt: skip
        for one_shot in (True, False):
            ws, run = by_words(T, H, dtype, one_shot, part)
            fill_with_nan(ws)
            for call in (1, 2, 3):
                if rank and call == 2:
                    time.sleep(0.05)
                y, h = run(xs[rank] * call, kept)
                exact = [x.double() * call for x in xs]
                wanted, total = reference(exact, kept.double(), None, 1e-3)
                check("h", h, total, W)
                check("y", y, wanted, H)
                same_everywhere(y, h)
            assert all(map(torch.equal, (y, h), like))
        y, h = run(xs[rank] * 3, kept[rank * share :][:share].clone(), whole=False)
        assert torch.equal(y, like[0])
        assert torch.equal(h, like[1][rank * share :][:share])


@needs_interpreter
@pytest.mark.ranks(2)
@pytest.mark.parametrize("one_shot", [pytest.param(True, marks=pytest.mark.slow), False])
def test_flags_of_words_come_again(one_shot: bool) -> None:
    """Across the 2^32th call; and in the last calls of every 2^31 all words are stored anew."""
    rank, T, H = dist.get_rank(), 3, 37
    xs = [numbers(T, H, seed=r) for r in range(2)]
    ws, run = by_words(T, H, torch.float32, one_shot, 32)
    for call in calls_across_flags(ws):
        _, h = run(xs[rank] * call, None)
        torch.testing.assert_close(h, (xs[0] + xs[1]) * call)


@needs_interpreter
@pytest.mark.ranks(2)
@pytest.mark.parametrize("absent", [0, 1])
def test_words_of_an_absent_rank(absent: int) -> None:
    """Results are NaN, and the next call tells who was waited for."""
    rank, x = dist.get_rank(), torch.ones(3, 8)
    ws, run = by_words(3, 8, torch.float32, one_shot=bool(absent))
    dist.barrier()
    if rank != absent:
        with patch.dict(os.environ, WEFT_TIMEOUT_S="0.2"):
            y, h = run(x, None)
        assert bool(y.isnan().all() & h.isnan().all())
        with pytest.raises(weft.PeerTimeout, match=f"rank {rank} waited .* for rank {absent}"):
            ws.check("norm")
    dist.barrier()
    weft.collectives.close()


@pytest.mark.parametrize(
    ("rows", "words", "one_shot"),
    [(1, True, True), (2, True, True), (3, True, False), (8, True, False), (32, True, False),
     (33, False, False), (64, False, False)],
)  # fmt: skip
def test_few_rows_take_words(rows: int, words: bool, one_shot: bool) -> None:
    """Rows of 16 KiB: up to 32 KiB in one shot, where every rank has the residual, up to 512 KiB in
    two; never on AMD's chips, and not alone.
    """

    def chosen(chip: str = "sm_90", W: int = 8, whole: bool = True) -> tuple[bool, bool]:
        share = chunk_sizes(rows, W)[0]
        config = rms_norm_launch.quickest_norm(
            rows, share, 8192, torch.bfloat16, W, known(chip), whole
        )
        return config.flagged, config.one_shot

    assert chosen() == (words, one_shot)
    assert chosen(whole=False)[0] == words
    assert not words or not chosen(whole=False)[1]
    assert not words or chosen(W=2) == (True, True)
    assert not chosen("gfx942")[0] and not chosen(W=1)[0]


@needs_interpreter
@pytest.mark.ranks(2)
def test_words_by_the_ops() -> None:
    """Where they are predicted to be quicker, the ops take them: forward, backward, compiled."""

    def flagged(rows: int, share: int, H: int, dtype: Any, W: int, chip: Any, whole: bool) -> Any:
        return rms_norm_launch.by_words(rows, share, H, dtype, whole and rows < 4, chip)

    with patch.object(rms_norm_launch, "quickest_norm", flagged), weft.engine("triton"):
        for case in ("fewer rows than ranks", "one token", "no rows"):
            run_case(CASES[case])
        x = numbers(4, 6, seed=dist.get_rank())
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        for _ in range(2):
            torch.testing.assert_close(compiled(x, x, x[0]), loss(x, x, x[0]))
        rows = chunk_sizes(5, 2)[dist.get_rank()]
        kept = numbers(5, 6, seed=3)
        mine = kept.split(chunk_sizes(5, 2))[dist.get_rank()]
        assert len(mine) == rows
        xs = [numbers(5, 6, seed=r) for r in range(2)]
        for _ in range(3):
            y, h = weft.reduce_scatter_rms_norm_all_gather(
                xs[dist.get_rank()], None, residual=mine, eps=1e-3
            )
        wanted, total = reference([x.double() for x in xs], kept.double(), None, 1e-3)
        check("y", y, wanted, 6)
        check("h", h, total.split(chunk_sizes(5, 2))[dist.get_rank()], 2)
