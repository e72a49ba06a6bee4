"""Attention over sharded sequences against float64, forward and every gradient, on all engines."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from needs import needs_interpreter

import weft
from weft import sim
from weft.collectives.ranks.chunks import chunk_sizes
from weft.kernels import to_zigzag, zigzag_sizes
from weft.kernels.attention.ring import attention_reference
from weft.kernels.engine.chips import KNOWN, known
from weft.kernels.flash.attention_tiles import contiguous_rows
from weft.kernels.flash.ring_grad_kernel import ring_grad_config
from weft.kernels.flash.ring_kernel import ring_config
from weft.kernels.heads.heads_grad_kernel import head_grad_config

ENGINES = ("host", "generic", "triton")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def whole(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    values = torch.randn(shape, generator=generator, device="cpu")
    return values.to(torch.get_default_device(), dtype)


def shard(x: torch.Tensor, sizes: list[int], layout: str, rank: int, strided: bool) -> torch.Tensor:
    """This rank's part of (B, H, S[, D]); if `strided`, (B, S, H, D) in memory, odd D with gaps."""
    if layout == "zigzag":
        x = to_zigzag(x, len(sizes), 2)
    part = x.split(sizes, 2)[rank].clone()
    if strided and x.ndim == 4 and x.shape[3] % 2:
        part = torch.stack([part, part + 1], -1)[..., 0]
    elif strided and x.ndim == 4:
        part = part.transpose(1, 2).contiguous().transpose(1, 2)
    return part


def check(
    name: str, actual: torch.Tensor | None, expected: torch.Tensor, case: dict[str, Any]
) -> None:
    """Outputs are averages of N(0, 1) values, gradients sums of few: errors of a handful of
    roundings, of the values and of the probabilities, at the size of the largest value.

    Gradients of queries and keys are sums of differences of two sums of D products, times the
    scale, each as large as scale * sqrt(D), whatever is left of them: nothing where there is one
    key, and torch's kernel is then as far from it as ours.

    The log-sum-exp is fp32, of fp32 scores; torch's kernel for half precision takes an exp of 20
    bits, and errors of the sum average out.
    """
    assert actual is not None, name
    assert actual.shape == expected.shape, (name, actual.shape, expected.shape)
    finite = expected[expected.isfinite()]
    largest = max(1.0, float(finite.abs().max()) if finite.numel() else 0.0)
    if name in ("dq", "dk") and case["scale"]:
        largest = max(largest, abs(case["scale"]) * case["D"] ** 0.5)
    wide = torch.promote_types(case["dtype"], torch.float32)
    eps = torch.finfo(wide if name == "lse" else case["dtype"]).eps
    atol = 4 * eps * largest * len(case["q_sizes"]) ** 0.5
    atol += (64 if case["dtype"] == wide else 1024) * torch.finfo(wide).eps * largest
    torch.testing.assert_close(
        actual.double(), expected, rtol=0, atol=atol, msg=lambda text: f"{name}: {text}"
    )


def attention_case(
    case: dict[str, Any], attention: Any = weft.ring_attention
) -> list[torch.Tensor]:
    """One call, forward and backward, on this rank; its results."""
    uses = "out and lse" if case["with_lse"] else "out"
    case = {"needs": (True, True, True), "uses": uses} | case
    rank = dist.get_rank()
    q_sizes, k_sizes, layout = case["q_sizes"], case["k_sizes"], case["layout"]
    B, H, H_kv, D, dtype = (case[key] for key in ("B", "H", "H_kv", "D", "dtype"))
    options = {key: case[key] for key in ("causal", "scale", "window", "cu_seqlens")}
    q, out_grad = (whole((B, H, sum(q_sizes), D), dtype, seed) for seed in (1, 4))
    k, v = (whole((B, H_kv, sum(k_sizes), D), dtype, seed) for seed in (2, 3))
    lse_grad = whole((B, H, sum(q_sizes)), torch.float32, 5)

    def mine(x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        return shard(x, sizes, layout, rank, case["strided"])

    ours = [mine(q, q_sizes), mine(k, k_sizes), mine(v, k_sizes)]
    for x, needed in zip(ours, case["needs"], strict=True):
        x.requires_grad_(needed)
    known = {"sizes": q_sizes, "key_sizes": k_sizes} if case["known"] else {}
    with weft.engine(case["engine"]):
        made = attention(*ours, layout=layout, return_lse=case["with_lse"], **options, **known)
        out, lse = made if case["with_lse"] else (made, None)
        roots, grads = [], []
        if "out" in case["uses"]:
            roots.append(out)
            grads.append(mine(out_grad, q_sizes))
        if "lse" in case["uses"]:
            # -inf of queries that see nothing has no gradient.
            roots.append(lse.masked_fill(lse == -torch.inf, 0.0))
            grads.append(mine(lse_grad, q_sizes))
        # On the generic engine the log-sum-exp has no gradient of v.
        kept = [pair for pair in zip(roots, grads, strict=True) if pair[0].requires_grad]
        if kept:
            torch.autograd.backward(*zip(*kept, strict=True))

    theirs = [x.double().requires_grad_() for x in (q, k, v)]
    expected, expected_lse = attention_reference(*theirs, **options)
    roots, grads = [], []
    if "out" in case["uses"]:
        roots.append(expected)
        grads.append(out_grad.double())
    if "lse" in case["uses"]:
        roots.append(expected_lse.masked_fill(expected_lse == -torch.inf, 0.0))
        grads.append(lse_grad.double())
    torch.autograd.backward(roots, grads)
    check("out", out, mine(expected.detach(), q_sizes), case)
    if lse is not None:
        check("lse", lse, mine(expected_lse.detach(), q_sizes), case)
    found = [out] if lse is None else [out, lse]
    for name, x, wanted, sizes in zip(
        ("dq", "dk", "dv"), ours, theirs, (q_sizes, k_sizes, k_sizes), strict=True
    ):
        if x.requires_grad:
            # Of the log-sum-exp alone, v has none.
            grad = torch.zeros_like(wanted) if wanted.grad is None else wanted.grad
            check(name, torch.zeros_like(x) if x.grad is None else x.grad, mine(grad, sizes), case)
            found.append(x if x.grad is None else x.grad)
    return [x.detach().clone() for x in found]


def run_cases(cases: list[dict[str, Any]]) -> None:
    for case in cases:
        try:
            attention_case(case)
        except Exception as error:  # of a peer that stays away, too
            raise AssertionError(f"{case}: {error}") from error


# Of q, k and v: what has a gradient.
NEEDS = [
    (True, True, True), (True, True, True), (False, True, True), (True, True, True),
    (True, False, False), (False, False, True), (True, True, True),
]  # fmt: skip


def used(case: dict[str, Any]) -> str:
    """What of the results the loss of a case uses, drawn without changing what else is."""
    if not case["with_lse"]:
        return "out"
    return random.Random(f"{case}").choice(["out and lse", "out and lse", "out", "lse"])


def random_cases(W: int, engine: str, count: int) -> list[dict[str, Any]]:
    """Every kind of call, with lengths from 0 up; the same for every run."""
    rng = random.Random(f"{W} {engine}")
    interpreted = engine == "triton"  # slowly
    top = 20 if interpreted else 80
    cases = []
    for number in range(count):
        size = lambda low=1: rng.choice([rng.randint(low, 6), rng.randint(low, top)])  # noqa: E731
        layout = rng.choice(["contiguous", "zigzag"])
        total, packed = size(0), rng.random() < 0.25
        if layout == "zigzag":
            q_sizes = zigzag_sizes(total * W, W)
            k_sizes = q_sizes if packed or rng.random() < 0.6 else zigzag_sizes(size(0), W)
        else:
            q_sizes = rng.choice([[total] * W, chunk_sizes(total, W), [size(0) for _ in range(W)]])
            k_sizes = q_sizes if packed or rng.random() < 0.6 else [size(0) for _ in range(W)]
        length, H_kv = sum(q_sizes), rng.choice([1, 1, 2] if interpreted else [1, 1, 2, 3])
        cuts = sorted(rng.randint(0, length) for _ in range(rng.randint(0, 4)))
        dtypes = DTYPES if interpreted else (*DTYPES, torch.float64)
        cases.append({
            "dtype": dtypes[number % len(dtypes)], "engine": engine, "layout": layout,
            "q_sizes": q_sizes, "k_sizes": k_sizes, "known": rng.random() < 0.5,
            "B": rng.choice([1, 1, 1, 2]), "H_kv": H_kv,
            "H": H_kv * rng.choice([1, 2] if interpreted else [1, 1, 2, 3]),
            "D": rng.choice([16, 8, 5, 40] if interpreted else [16, 64, 1, 40, 129]),
            "causal": rng.random() < 0.6, "scale": rng.choice([None, None, 0.3]),
            "window": rng.choice([None, None, size(0), (size(0), size(0)), (-1, size(0))]),
            "cu_seqlens": [0, *cuts, length] if packed else None,
            "strided": rng.random() < 0.3, "with_lse": rng.random() < 0.4,
            "needs": NEEDS[number % len(NEEDS)],
        })  # fmt: skip
        cases[-1]["uses"] = used(cases[-1])
        if number == 7:
            cases[-1]["B"] = 0
    return cases


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("W", [1, 2, 3, pytest.param(4, marks=pytest.mark.sweep)])
@pytest.mark.slow_where(W=3, engine="triton")
def test_random_shapes(ranks: Any, virtual_ranks: Any, W: int, engine: str) -> None:
    run = virtual_ranks if engine == "triton" and W < 3 else ranks
    run(W, run_cases, random_cases(W, engine, 3 if engine == "triton" else 20))


@pytest.mark.sweep
@pytest.mark.ranks(2, 3, 4, 8, timeout_s=1800)
@pytest.mark.parametrize("engine", ENGINES)
def test_many_random_shapes(world_size: int, engine: str) -> None:
    run_cases(random_cases(world_size, engine, 60 if engine == "triton" else 300))


def plain_case(engine: str, W: int, **changes: Any) -> dict[str, Any]:
    sizes = zigzag_sizes(16 * W + 5, W)
    return {
        "dtype": torch.float32, "engine": engine, "layout": "zigzag", "q_sizes": sizes,
        "k_sizes": sizes, "known": False, "B": 1, "H": 4, "H_kv": 2, "D": 16, "causal": True,
        "scale": None, "window": None, "cu_seqlens": None, "strided": False, "with_lse": False,
    } | changes  # fmt: skip


def edges_of_windows(dtype: torch.dtype) -> None:
    """Blocks of keys of which only some of a tile's queries see the first ones, and some all."""
    sizes = [64, 64]
    options = {"layout": "contiguous", "q_sizes": sizes, "k_sizes": sizes, "H": 1, "H_kv": 1}
    attention_case(plain_case("triton", 2, dtype=dtype, D=8, window=(80, 0), **options))


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_edges_of_windows_in_one_launch(virtual_ranks: Any, dtype: torch.dtype) -> None:
    virtual_ranks(2, edges_of_windows, dtype)


def repeated_body(engine: str, W: int) -> None:
    """The same call again, with another between: the same buffers, the same bits."""
    case = plain_case(engine, W, H=2, H_kv=1)
    first = attention_case(case)
    attention_case(plain_case(engine, W, H=1, H_kv=1, causal=False, D=8, dtype=torch.bfloat16))
    again = attention_case(case)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.ranks
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.sweep)])
@pytest.mark.slow_where(engine="triton")
def test_results_are_bitwise_the_same_again(world_size: int, engine: str) -> None:
    repeated_body(engine, world_size)


@pytest.mark.ranks(2)
def test_scales_that_are_not_above_0() -> None:
    for scale in (-0.5, 0.0):
        attention_case(plain_case("auto", 2, scale=scale, window=(7, 5)))
    with pytest.raises(NotImplementedError, match=r"needs scale > 0 for its mask, got 0\.0"):
        attention_case(plain_case("host", 2, scale=0.0))


def scales_not_above_0() -> None:
    options = {"layout": "contiguous", "q_sizes": [21, 20], "k_sizes": [21, 20], "window": (7, 5)}
    for scale in (-0.5, 0.0):
        for attention in (weft.ring_attention, weft.ulysses_attention):
            attention_case(plain_case("triton", 2, scale=scale, **options), attention)


@pytest.mark.slow
@needs_interpreter
def test_scales_that_are_not_above_0_in_one_launch(virtual_ranks: Any) -> None:
    virtual_ranks(2, scales_not_above_0)


@pytest.mark.ranks(2)
def test_one_key_for_many_queries() -> None:
    sizes = {"q_sizes": [24, 24], "k_sizes": [1, 0]}
    attention_case(plain_case("host", 2, D=129, scale=0.3, H=1, H_kv=1, B=2, **sizes))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("engine", ["host", "generic"])
def test_windows_of_one_sequence(engine: weft.settings.Engine) -> None:
    """Rows that overlap in memory, for which torch's CPU kernel writes beyond its result."""
    x = torch.randn(1, 2, 11).unfold(2, 8, 1).requires_grad_()
    y = x.detach().contiguous().requires_grad_()
    with weft.engine(engine):
        outs = [weft.ring_attention(q, q, q, causal=True) for q in (x, y)]
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(
        *(torch.autograd.grad(out.sum(), q)[0] for out, q in zip(outs, (x, y), strict=True))
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("engine", ["host", "triton"])
def test_a_late_rank(engine: str) -> None:
    """Calls in a row without a pause between, one rank late for each by turns."""
    for call in range(4):
        if dist.get_rank() == call % 2:
            time.sleep(0.05)
        attention_case(plain_case(engine, 2, causal=call % 2 == 0, H=1, H_kv=1, D=8 + 4 * call))


def link_bytes(W: int, H: int, attention: Any, **options: Any) -> float:
    """The most that crosses one link, of 512 tokens a rank and heads of 16, in fp32."""

    def body(rank: int) -> None:
        x = torch.zeros(1, H, 512, 16)
        with weft.engine("triton"):
            attention(x, x, x, sizes=[512] * W, **options)

    timeline = sim.run(W, body, hardware="h100", numerics=False).timeline
    return timeline.summary()["link_bytes"]


@needs_interpreter
def test_keys_that_no_query_sees_are_not_fetched() -> None:
    row_bytes = 2 * 16 * 4
    fetched = lambda **options: link_bytes(2, 1, weft.ring_attention, **options)  # noqa: E731
    assert fetched() == 512 * row_bytes
    assert fetched(causal=True, window=5) == 256 * row_bytes  # a chunk of copies
    assert fetched(cu_seqlens=[0, 512, 1024]) == 0


@pytest.mark.parametrize("config", [ring_config, ring_grad_config, head_grad_config])
def test_launches_of_an_empty_batch(config: Any) -> None:
    for chip in KNOWN:
        assert config(0, 0, 5, 64, torch.bfloat16, 2, chip).group_heads >= 1


@pytest.mark.parametrize("config", [ring_config, ring_grad_config])
@pytest.mark.parametrize(
    ("name", "like"),
    [("sm_86", "sm_80"), ("sm_89", "sm_80"), ("sm_103", "sm_100"), ("gfx950", "gfx942")],
)
def test_chips_of_a_family_have_the_same_tiles(config: Any, name: str, like: str) -> None:
    chip = known(like)
    for D in (64, 128, 256):
        config_on = partial(config, 64, 8, 1024, D, torch.bfloat16, 8)
        assert config_on(replace(chip, name=name)) == config_on(chip)


MISUSE = {
    "q must be": {"q": (2, 5, 4)},
    "H_kv must divide H": {"q": (1, 3, 5, 4)},
    "k must have q's B and D": {"q": (1, 2, 5, 8)},
    "v must have q's dtype": {"v_dtype": torch.float64},
    "must be of a floating-point dtype": {"dtype": torch.int64, "v_dtype": torch.int64},
    'layout must be "contiguous" or "zigzag"': {"layout": "striped"},
    "window must be": {"window": -3},
    r"window must be .* got \(1, 2, 3\)": {"window": (1, 2, 3)},
    "window must be .* got 1.5": {"window": 1.5},
    "must begin with 0 and never decrease": {"cu_seqlens": [0, 4, 3]},
    "cu_seqlens must end with the number of tokens": {"cu_seqlens": [0, 4]},
    "sizes holds the length": {"sizes": [4]},
    "key_sizes needs sizes": {"key_sizes": [5]},
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize(("message", "changes"), MISUSE.items(), ids=MISUSE)
def test_misuse(changes: dict[str, Any], message: str) -> None:
    changes = dict(changes)
    dtype = changes.pop("dtype", torch.float32)
    q = torch.zeros(changes.pop("q", (1, 2, 5, 4)), dtype=dtype)
    k = torch.zeros(1, 2, 5, 4, dtype=dtype)
    v = torch.zeros(1, 2, 5, 4, dtype=changes.pop("v_dtype", torch.float32))
    with pytest.raises(ValueError, match=message):
        weft.ring_attention(q, k, v, **changes)


def test_kernels_read_keys_and_values_by_the_same_strides() -> None:
    k = torch.arange(48.0).view(1, 2, 6, 4)
    v = (k + 1).transpose(1, 2).contiguous().transpose(1, 2)
    pairs = (k, v), (v, k), (v[..., ::2], k[..., ::2]), (k, torch._neg_view(k))
    for given in pairs:
        read = contiguous_rows(*given)
        assert read[0].stride() == read[1].stride() and read[0].stride(3) == 1
        for x, wanted in zip(read, given, strict=True):
            assert torch.equal(x, wanted) and not x.is_neg()
    assert contiguous_rows(v).data_ptr() == v.data_ptr()


@pytest.mark.ranks(2)
def test_sizes_that_are_not_zigzag_raise_on_every_rank() -> None:
    x = torch.zeros(1, 1, 5, 4)
    with pytest.raises(ValueError, match=r"lie on 2 ranks as \[4, 6\], got \[5, 5\]"):
        weft.ring_attention(x, x, x, layout="zigzag")


@pytest.mark.ranks(2)
def test_the_documented_example() -> None:
    rank = dist.get_rank()
    q = k = torch.zeros(1, 1, 2, 1)
    v = torch.tensor([[1.0, 2.0], [3.0, 6.0]][rank]).view(1, 1, 2, 1)
    assert weft.ring_attention(q, k, v).flatten().tolist() == [3.0, 3.0]
    causal = weft.ring_attention(q, k, v, causal=True).flatten().tolist()
    assert causal == [[1.0, 1.5], [2.0, 3.0]][rank]
