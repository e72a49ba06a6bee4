"""The host engine's attention on GPUs, by torch's kernels: stand-ins for these compute in float64
what they would and insist on what they need, and torch's shape functions take their arguments.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from needs import needs_interpreter
from test_ring_attention import attention_case, plain_case, random_cases
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from weft import sim
from weft.collectives import Group, cost
from weft.collectives.prices.hardware import H100
from weft.kernels.attention import host, library, plan
from weft.kernels.attention.merge_kernel import launch_merge
from weft.kernels.attention.ring import attention_reference
from weft.kernels.engine import chips, engines
from weft.kernels.flash.geometry import UNBOUNDED, Geometry, Visibility, rectangles_between


def fits(*operands: torch.Tensor, causal: bool) -> None:
    """What flash and cuDNN take."""
    q, k, v = operands
    assert k.shape == v.shape and q.shape[1] % k.shape[1] == 0
    assert not causal or q.shape[2] == k.shape[2], "where the diagonal ends they disagree"
    for x in operands:
        assert x.dtype in (torch.bfloat16, torch.float16) and x.shape[3] % 8 == 0
        assert x.stride(-1) == 1 and all(n % 8 == 0 for n in x.stride()[:-1])
        assert x.data_ptr() % 16 == 0 and 0 not in x.shape


def like_flash(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A result (B, H, S, D), in memory (B, S, H, D)."""
    return x.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    fits(q, k, v, causal=causal)
    out, lse = attention_reference(q.double(), k.double(), v.double(), causal=causal, scale=scale)
    return like_flash(out, q.dtype), lse.float()


def flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):  # type: ignore[no-untyped-def]
    out, lse = forward(q, k, v, is_causal, scale)
    state = torch.zeros(2, dtype=torch.uint64)
    return out, lse, None, None, q.shape[2], k.shape[2], state, state.new_empty(()), q.new_empty(0)


def cudnn(  # type: ignore[no-untyped-def]
    q, k, v, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
):
    assert attn_bias is None and compute_log_sumexp
    out, lse = forward(q, k, v, is_causal, scale)
    seed = torch.zeros((), dtype=torch.int64)
    return out, lse.unsqueeze(-1), None, None, q.shape[2], k.shape[2], seed, seed.clone(), None


def flash_backward(grad_out, q, k, v, out, lse, *rest, scale=None):  # type: ignore[no-untyped-def]
    *packed, max_q, max_k, dropout_p, is_causal, seed, offset = rest
    fits(q, k, v, causal=is_causal)
    assert torch.get_deterministic_debug_mode() == 2
    assert packed == [None, None] and (max_q, max_k) == (q.shape[2], k.shape[2])
    assert lse.shape == q.shape[:3] and lse.dtype == torch.float32 and lse.is_contiguous()
    assert seed.dtype == offset.dtype == torch.uint64 and dropout_p == 0
    assert grad_out.dtype == out.dtype == q.dtype
    share = q.shape[1] // k.shape[1]
    qs, ks, vs = q.double(), *(x.double().repeat_interleave(share, 1) for x in (k, v))
    scores = qs @ ks.mT * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:]).triu(1).bool(), -torch.inf)
    weights, grads = (scores - lse.double().unsqueeze(-1)).exp(), grad_out.double()
    delta = (grads * out.double()).sum(-1, keepdim=True)
    d_scores = weights * (grads @ vs.mT - delta) * scale
    dk, dv = (x.unflatten(1, (-1, share)).sum(2) for x in (d_scores.mT @ qs, weights.mT @ grads))
    return tuple(like_flash(x, q.dtype) for x in (d_scores @ ks, dk, dv))


@contextmanager
def gpu_kernels(by_cudnn: bool = False) -> Iterator[list[str]]:
    """The host engine calls what it calls on GPUs; yields the names of what was called."""
    called: list[str] = []

    def noted(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            called.append(name)
            return run(*args, **named)

        return call

    stand_ins = torch.library.Library("aten", "IMPL")
    for name, run in (
        ("_scaled_dot_product_flash_attention", flash),
        ("_scaled_dot_product_cudnn_attention", cudnn),
        ("_scaled_dot_product_flash_attention_backward", flash_backward),
    ):
        stand_ins.impl(name, noted(name, run), "CPU")
    try:
        with (
            patch.object(host, "kernels_for", lambda _: library.GPU),
            patch.object(library, "_by_cudnn", lambda *_: by_cudnn),
        ):
            yield called
    finally:
        stand_ins._destroy()


def library_cases(W: int, count: int) -> list[dict[str, Any]]:
    """Those of all engines, made into such as torch's kernels take on GPUs."""
    rng = random.Random(f"{W} library")
    cases = random_cases(W, "host", count)
    for case in cases:
        case["dtype"] = rng.choice([torch.bfloat16, torch.float16])
        case["D"] = rng.choice([8, 40, 64, 128])
        case["window"] = rng.choice([None, None, (-1, rng.randint(0, 9))])
    return cases


def run_cases(cases: list[dict[str, Any]], attention: Any = weft.ring_attention) -> None:
    for number, case in enumerate(cases):
        with gpu_kernels(by_cudnn=number % 2 == 1) as called:
            try:
                attention_case(case, attention)
            except Exception as error:
                raise AssertionError(f"{case}: {error}") from error
        forwards = {name for name in called if not name.endswith("backward")}
        by = "cudnn" if number % 2 else "flash"
        assert forwards <= {f"_scaled_dot_product_{by}_attention"}
        assert torch.get_deterministic_debug_mode() == 0
        assert torch.utils.deterministic.fill_uninitialized_memory


@needs_interpreter
@pytest.mark.parametrize(
    "W",
    [1, 2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.sweep)],
)
def test_random_shapes(ranks: Any, W: int) -> None:
    ranks(W, run_cases, library_cases(W, 12))


def by_heads_body(cases: list[dict[str, Any]]) -> None:
    run_cases([case | {"layout": "contiguous"} for case in cases], weft.ulysses_attention)


@needs_interpreter
@pytest.mark.ranks(2)
def test_by_heads() -> None:
    sizes = {"q_sizes": [13, 8], "k_sizes": [13, 8], "dtype": torch.bfloat16}
    options = ({}, {"causal": False, "with_lse": True, "H": 3, "H_kv": 1})
    by_heads_body([plain_case("host", 2, **sizes, **more) for more in options])


def edges_body() -> None:
    """Queries beyond the keys, the log-sum-exp's gradient alone, zigzag with many heads a key."""
    sizes = {"q_sizes": [24, 24], "k_sizes": [8, 1], "layout": "contiguous", "with_lse": True}
    half = {"dtype": torch.bfloat16, "D": 8}
    many: dict[str, Any] = {"H": 8, "H_kv": 1, "with_lse": True}
    options = (sizes, {**sizes, "uses": "lse"}, many, {"strided": True})
    run_cases([plain_case("host", 2, **half, **more) for more in options])
    case = plain_case("host", 2, **half)
    with gpu_kernels() as called:
        attention_case(case)
    # Of zigzag shards the own keys are one triangle, and a peer's are seen by half of the queries,
    # or half of them by all.
    assert called == [
        *["_scaled_dot_product_flash_attention"] * 2,
        *["_scaled_dot_product_flash_attention_backward"] * 2,
    ]


@needs_interpreter
@pytest.mark.ranks(2)
def test_edges() -> None:
    edges_body()


@needs_interpreter
@pytest.mark.parametrize(("D", "rows"), [(8, 70), (128, 40), (40, 1)])
def test_merging(D: int, rows: int) -> None:
    """Some of the rows, of results laid out in another way; -inf where nothing was seen."""
    shape, generator = (2, 3, rows + 5, D), torch.Generator().manual_seed(D)
    out = torch.randn(shape, generator=generator)
    lse = 3 * torch.randn(shape[:3], generator=generator)
    part = like_flash(torch.randn(2, 3, rows, D, generator=generator), torch.bfloat16)
    part_lse = 3 * torch.randn(2, 3, rows, generator=generator)
    lse[0, :, 2:4] = part_lse[0, :, :1] = part_lse[1, 0] = -torch.inf  # of row 2 there is neither
    out[0, :, 2:4] = 0
    scores = torch.stack([lse[:, :, 2 : rows + 2], part_lse], -1).double()
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.softmax(-1).masked_fill(blind, 0.0).unsqueeze(-2)
    values = torch.stack([out[:, :, 2 : rows + 2], part], -1).double()
    merged, merged_lse = out.clone(), lse.clone()
    launch_merge(merged[:, :, 2 : rows + 2], merged_lse[:, :, 2 : rows + 2], part, part_lse)
    for new, old in ((merged, out), (merged_lse, lse)):
        assert torch.equal(new[:, :, :2], old[:, :, :2])
        assert torch.equal(new[:, :, rows + 2 :], old[:, :, rows + 2 :])
    near: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6, "check_dtype": False}
    torch.testing.assert_close(
        merged[:, :, 2 : rows + 2], (weights * values).sum(-1).float(), **near
    )
    expected = scores.masked_fill(blind, 0.0).logsumexp(-1).masked_fill(blind[..., 0], -torch.inf)
    torch.testing.assert_close(merged_lse[:, :, 2 : rows + 2], expected.float(), **near)


class Called(TorchDispatchMode):
    """The aten ops that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name().partition("::")[2].partition(".")[0])
        return func(*args, **(kwargs or {}))


@contextmanager
def pretended(chip: str, cudnn_version: int = 91600) -> Iterator[None]:
    """A GPU without memory, in a torch that was built for it."""
    with (
        FakeTensorMode(),
        patch.object(chips, "_chip_behind", lambda _: chips.Chip(chip, 132, 227 << 10)),
        patch.object(torch.backends.cudnn, "version", lambda: cudnn_version),
        patch.object(torch.backends.cuda, "is_flash_attention_available", lambda: True),
    ):
        yield


def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


@pytest.mark.parametrize(
    ("chip", "version", "n", "D", "by"),
    [
        ("sm_90", 91600, 256, 128, "cudnn"),
        ("sm_100", 91600, 128, 64, "cudnn"),
        ("sm_80", 91600, 128, 64, "flash"),
        ("sm_90", 91000, 128, 128, "flash"),
        ("sm_90", 91600, 128, 192, "flash"),
        ("sm_90", 91600, 100, 128, "flash"),
    ],
)
def test_torchs_ops_are_called_as_they_are_declared(
    chip: str, version: int, n: int, D: int, by: str
) -> None:
    """By torch's own shape functions for these ops; GQA, and parts of larger tensors."""
    with pretended(chip, version):
        q, k = on_gpu(2, 8, 2 * n, D).narrow(2, n, n), on_gpu(2, 2, n, D)
        part = library.KeyPart(q, k, k, 0.3, True)
        with Called() as called:
            out, lse = library.GPU.forward(part)
            dq, dk, dv = library.GPU.backward(part, library.WholeResult(out, lse, out))
        assert out.shape == q.shape == dq.shape and dk.shape == dv.shape == k.shape
        assert lse.shape == (2, 8, n) and lse.dtype == torch.float32 and out.dtype == q.dtype
        attended = [name for name in called.names if "attention" in name]
        assert attended == [
            f"_scaled_dot_product_{by}_attention",
            "_scaled_dot_product_flash_attention_backward",
        ]
    assert torch.get_deterministic_debug_mode() == 0


def test_operands_begin_where_gpus_read() -> None:
    x = torch.arange(2 * 3 * 7 * 24, dtype=torch.bfloat16).view(2, 3, 7, 24)
    for fine in (x, x[:, :, 2:5], x.transpose(1, 2), x[..., 8:16]):
        assert library.GPU.operand(fine) is fine
    for odd in (
        x[..., 4:12],
        x.mT[..., :3],
        x.view(2, 3, 8, 21)[..., :8],
        x[:1].expand(2, 3, 7, 24),
    ):
        read = library.GPU.operand(odd)
        assert torch.equal(read, odd) and read.is_contiguous()


def test_another_flash_attention_comes_before_cudnn() -> None:
    with pretended("sm_90"):
        q = on_gpu(1, 2, 128, 64)
        assert library._by_cudnn(q, q)
        with patch("torch.nn.attention.current_flash_attention_impl", lambda: "FA3"):
            assert not library._by_cudnn(q, q)
        with patch.object(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False):
            assert not library._by_cudnn(q, q)


@pytest.mark.parametrize(
    ("chip", "changes", "why"),
    [
        ("sm_90", {}, ""),
        ("sm_80", {"D": 256}, ""),
        ("sm_89", {"D": 256}, "up to 192, got 256"),
        ("sm_90", {"D": 20}, "widths that 8 divides"),
        ("sm_90", {"dtype": torch.float32}, "takes bf16 and fp16 on GPUs, got torch.float32"),
        ("sm_90", {"scale": -1.0}, "needs scale > 0, got -1.0"),
        ("sm_90", {"before": 20}, "no window to the left"),
        ("sm_90", {"before": 127}, ""),
        ("sm_75", {}, "from sm_80 on, this is sm_75"),
        ("gfx942", {}, "this is gfx942"),
    ],
)
def test_what_is_refused(chip: str, changes: dict[str, Any], why: str) -> None:
    given = {"D": 64, "dtype": torch.bfloat16, "scale": 0.3, "before": UNBOUNDED} | changes
    geometry = Geometry((64, 64), (64, 64), "zigzag", Visibility(128, given["before"], 0))
    with pretended(chip):
        q = on_gpu(1, 2, 64, given["D"], dtype=given["dtype"])
        refusal = plan._host_refusal(q, given["scale"], geometry)
    assert why in refusal and bool(why) == bool(refusal)
    masks = any(
        rectangle.kind == "band"
        for rank in range(2)
        for peer in range(2)
        for rectangle in rectangles_between(geometry, rank, peer)
    )
    assert masks == ("window" in why), "torch's kernels on GPUs take no mask"


def planned(
    n: int, before: int = UNBOUNDED, W: int = 8, op: str = "ring_attention", packed: bool = False
) -> tuple[plan.AttentionPlan, str]:
    """A plan on 8 H100, n tokens a rank, and why its engine was taken."""
    group, sizes = Group(None, 0, W, tuple(range(W)), ()), (n,) * W
    with (
        pretended("sm_90"),
        patch.object(cost, "machine", lambda *_: H100.rates()),
        patch.object(engines, "hardware_of", lambda *_: H100),
        weft.settings.explaining() as decisions,
    ):
        q, k = on_gpu(1, 32, n, 128), on_gpu(1, 8, n, 128)
        documents = tuple(range(0, W * n + 1, 64)) if packed else None
        question = plan._Question((before, 0, documents), 0.1, ())
        call = plan._attention_plan(q, k, group, op, "contiguous", question, sizes, sizes)
    return call, decisions[0].why


def test_auto_takes_the_library_for_long_sequences() -> None:
    long, why = planned(8192)
    assert long.engine == "host" and "for triton" in why
    assert planned(4096)[0].engine == "host"
    assert planned(2048)[0].engine == "triton", "parts are merged, and each is enqueued by the host"
    window, why = planned(8192, before=4096)
    assert window.engine == "triton"
    assert why.endswith("; not host: torch's attention on GPUs has no window to the left")
    assert planned(8192, packed=True)[0].engine == "triton", "its documents have calls of their own"
    assert planned(8192, W=2, before=16384)[0].engine == "host", "which is no window"
    alone, why = planned(128, W=1)
    assert (alone.engine, why) == ("host", "one rank")
    for n, engine in ((8192, "host"), (4096, "host"), (2048, "triton")):
        assert planned(n, op="ulysses_attention")[0].engine == engine


def test_gradients_by_the_kernel_where_flash_attention_is_slower() -> None:
    long, _ = planned(4096)
    assert (long.engine, long.of_gradients) == ("host", "triton")
    with weft.engine("host"):
        asked, _ = planned(4096)
    assert (asked.engine, asked.of_gradients) == ("host", "host"), "as asked for"
    longest, _ = planned(1 << 18)
    assert (longest.engine, longest.of_gradients) == ("host", "host"), "of too many keys"
    short, _ = planned(128)
    assert (short.engine, short.of_gradients) == ("triton", "triton")
    alone, _ = planned(128, W=1)
    assert (alone.engine, alone.of_gradients) == ("host", "triton")


def test_which_gradients_of_the_kernel_are_quicker() -> None:
    quicker = plan.kernel_has_quicker_gradients
    assert quicker("sm_90", 128, 0) and not quicker("sm_90", 256, 0)
    assert not quicker("sm_100", 128, 0), "not measured"
    assert quicker("sm_90", 64, 2 << 30) and not quicker("sm_90", 64, (2 << 30) + 1)


@pytest.mark.parametrize("W", [1, 8])
def test_what_gradients_by_the_kernel_hold(W: int) -> None:
    from weft.kernels.flash import ring_call, ring_grad_kernel

    geometry = Geometry((96,) * W, (96,) * W, "contiguous", Visibility(96 * W, UNBOUNDED, 0, None))
    k = torch.empty(2, 4, 96, 64, dtype=torch.bfloat16)
    asked = ring_call.shard_bytes(8, 96, 64, k.dtype) + ring_grad_kernel.slots_bytes(k, geometry)
    held = plan._held_bytes(2 * 2 * 4 * 64, 96, 96 * W, W, 2)
    halves = held - (2 * 2 * 4 * 64 * 96 * W * 2 if W > 1 else 0)
    assert asked <= halves // 2 + 128 < 2 * asked + 128, "but for alignment"


def test_ranks_that_stand_for_gpus_have_no_library() -> None:
    """Nor does virtual time know what its kernels take."""

    def body(rank: int) -> str:
        q, k = (torch.zeros(1).bfloat16().expand(1, H, 8192, 128) for H in (32, 8))
        options = plan.AttentionOptions(causal=True, sizes=(8192, 8192))
        return plan.plan_attention(q, k, k, None, options).engine

    assert list(sim.run(2, body, hardware="h100", numerics=False)) == ["triton"] * 2


class Stream:
    """A stream's operations by number, and the last of every stream that must be over before."""

    def __init__(self) -> None:
        self.after: dict[Stream, int] = {self: 0}

    def run(self) -> dict[Stream, int]:
        self.after[self] += 1
        return dict(self.after)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other)

    def wait_event(self, event: Any) -> None:
        for stream, number in event.after.items():
            self.after[stream] = max(number, self.after.get(stream, 0))


class Event:
    def record(self, stream: Stream) -> None:
        self.after = dict(stream.after)


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_copies_run_beside_attention_and_never_into_it(count: int) -> None:
    """By what waits for what in the two streams; copies themselves are made at once."""
    main, side = Stream(), Stream()
    now, copies, kept = [main], [], []
    geometry = Geometry((3,) * 6, (3, 2, 3, 1, 3, 2), "contiguous", Visibility(14))
    k = torch.zeros(1, 2, 3, 4)

    class Peers:
        def wait(self, peer: int) -> None:
            assert now[-1] is side

        def peer(self, peer: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            assert now[-1] is side
            copies.append(side.run())
            return torch.full(shape, float(peer))

    @contextmanager
    def stream(of: Stream) -> Iterator[None]:
        now.append(of)
        yield
        now.pop()

    def before(earlier: dict[Stream, int], on: Stream, later: dict[Stream, int]) -> bool:
        return later.get(on, 0) >= earlier[on]

    with (
        patch.object(torch.cuda, "current_stream", lambda _: main),
        patch.object(torch.cuda, "stream", stream),
        patch.object(torch.cuda, "Event", Event),
        patch.object(host, "copy_stream", lambda _: side),
        patch.object(torch.Tensor, "record_stream", lambda x, of: kept.append(of)),
    ):
        main.run()  # publishes
        arriving = host._fetched(Peers(), k, geometry, range(1, count + 1))  # type: ignore[arg-type]
        own, reads = main.run(), []
        for peer, (keys, values) in zip(range(1, count + 1), arriving, strict=True):
            assert keys.shape == values.shape == (1, 2, geometry.k_sizes[peer], 4)
            assert (keys == peer).all() and (values == peer).all()
            reads.append(main.run())
    assert len(copies) == len(reads) == count and kept == [side] * min(count, 2)
    for i, read in enumerate(reads):
        assert before(copies[i], side, read), "attended to before it came"
        if i + 1 < count:
            assert not before(copies[i + 1], side, read), "waits for a copy that is not needed"
        if i + 2 < count:
            assert before(read, main, copies[i + 2]), "copied over what is read"
            assert not before(reads[i + 1], main, copies[i + 2]), "not beside the next"
    assert not any(before(own, main, copy) for copy in copies[:2])
