"""torch.ops.weft: fake kernels and gradients by torch's own checks, torch.compile against eager."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

import weft
import weft.collectives as c
import weft.kernels
from weft.collectives.ranks.chunks import chunk_sizes
from weft.collectives.ranks.group import group_name

ops: Any = torch.ops.weft


def leaf(*shape: int, seed: int = 0, transposed: bool = False) -> torch.Tensor:
    """A leaf that differs from rank to rank."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    value = torch.randn(shape, generator=generator)
    value = value.t().contiguous().t() if transposed else value
    return value.requires_grad_()


def calls() -> list[tuple[Any, tuple[Any, ...]]]:
    """Every op with arguments on which its result is uneven, strided or a list."""
    rank, W, name = dist.get_rank(), dist.get_world_size(), group_name(None)
    sizes = [3, 1, 2][:W]
    x, w, b = leaf(2, sizes[rank], 8), leaf(8, 6, transposed=True), leaf(6)
    mine = chunk_sizes(5, W)
    q, k, v = leaf(2, 4, sizes[rank], 8), *(leaf(2, 2, sizes[rank], 8, seed=s) for s in (1, 2))
    documents = torch.tensor([0, 2, sum(sizes)])
    cache, lengths = torch.rand(2, 2, 4, 8), torch.tensor([4 * W, 3])
    ids = torch.tensor([[0, 3], [1, -1], [2, 0]], dtype=torch.int32)[: sizes[rank]]
    experts, routing = leaf(2, 8, 6, seed=3), weft.kernels.route(ids, 2 * W)
    rows, place = leaf(routing.count, 6), (routing.tensors, name)
    return [
        (ops.route, (ids, 2, name)),
        (ops.route, (ids, 0, name, 1, 99, sizes, 2 * W)),
        (ops.dispatch_grouped_matmul, (x[0], [experts, leaf(2, 8, 5)], *place, 1, True)),
        (ops.dispatch_grouped_matmul, (x[0], [], *place)),
        (ops.dispatch_grouped_matmul, (x[0], [experts], *place, 1, False, "fp8")),
        (ops.grouped_matmul_combine, (rows, leaf(2, 6, 8), leaf(sizes[rank], 2), *place)),
        (ops.grouped_matmul_combine, (rows, None, None, *place)),
        (ops.grouped_matmul, (leaf(9, 8), experts, torch.tensor([4, 7]).int())),
        (ops.all_gather, (x, name, 1, sizes)),
        (ops.all_gather, (leaf(3, 2), name)),
        (ops.reduce_scatter, (leaf(2, 5), name, 1, "avg")),
        (ops.reduce_scatter, (leaf(sum(sizes), 2), name, 0, "sum", sizes)),
        (ops.all_reduce, (leaf(3, 4, transposed=True), name)),
        (ops.all_to_all, (leaf(2 * W, 3), None, None, name)),
        (ops.all_to_all, (leaf(5, 3), [mine[rank]] * W, mine, name)),
        (ops.broadcast, (leaf(4), W - 1, name)),
        (ops.all_gather_matmul, (x, [w], [], name, 1, sizes)),
        (ops.all_gather_matmul, (leaf(3, 8), [w, leaf(8, 5)], [b, leaf(0)], name, 0, None, True)),
        (ops.all_gather_matmul, (leaf(3, 8), [leaf(8 * W, 6)], [], name, -1, None, True)),
        (ops.matmul_reduce_scatter, (leaf(2, 5, 8), w, b, name, 1, "avg")),
        (ops.matmul_reduce_scatter, (leaf(2, 5, 8), w, b, name, -1)),
        (ops.matmul_all_reduce, (leaf(2, 5, 8), w, b, name, "avg")),
        (
            ops.reduce_scatter_rms_norm_all_gather,
            (leaf(2, 5, 6), b, leaf(2, mine[rank], 6), name, 0.1, 1),
        ),
        (ops.all_reduce_residual_rms_norm, (leaf(2, 5, 6), leaf(2, 5, 6), b, name, 0.1)),
        (ops.all_reduce_residual_rms_norm, (torch.rand(5, 4), None, None, name, 0.1, "fp8")),
        (ops.reduce_scatter_rms_norm_all_gather, (leaf(5, 4), None, None, name, 0.1)),
        (ops.ring_attention, (q, k, v, name, True, 0.3, "contiguous", [2, -1], documents)),
        (ops.tokens_to_heads, (k, name, 4, 2, True, sizes)),
        (ops.heads_to_tokens, (leaf(2, mine[rank], 2 * W, 8), name, 5, 5, False)),
        (ops.flash_decode, (torch.rand(2, 4, 1, 8), cache, cache, lengths, name)),
        (
            ops.flash_decode,
            (
                torch.rand(3, 4, 2, 8).mT.mT,
                *(torch.rand(3, 2, 20, 8),) * 2,
                torch.tensor([20, 17, 0]),
                "",
            ),
        ),
        (
            ops.append_to_cache,
            (cache[:, :, :2], cache[:, :, 2:], cache + 1, cache + 2, lengths, name),
        ),
    ]


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_registered_as_torch_demands() -> None:
    for op, args in calls():
        torch.library.opcheck(op.default, args)
    assert torch.library.opcheck(ops.barrier.default, (group_name(None),))
    q, k, v = (leaf(1, 2, 3, 8, seed=seed).detach() for seed in range(3))
    with weft.engine("host"):
        out, lse = ops.ring_attention(q, k, v, group_name(None))
        given = (q, k, v, out, lse, out, lse, group_name(None))
        options = (True, None, "contiguous", None, None, None, None)
        torch.library.opcheck(ops.ring_attention_backward.default, (*given, *options))


def test_every_call_is_an_op() -> None:
    collectives = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
    fused = [
        n for n in weft.kernels.__all__ if n.islower() and "vocab" not in n and "zigzag" not in n
    ]
    others = {"dispatch", "combine", "topk_router"}  # fused ops without weights; what is local
    for name in {*collectives, "barrier", *fused} - others:
        assert hasattr(ops, name), name


def eager_body() -> None:
    """The ops called by hand: as the functions, gradients included."""
    name = group_name(None)
    x, w, b = leaf(3, 8), leaf(8, 6), leaf(6)
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = [
        (ops.all_gather(x, name), c.all_gather(x)),
        (
            ops.all_gather_matmul(x, [w], [b], name)[0],
            weft.all_gather_matmul(x, w, bias=b),
        ),
        (
            ops.matmul_reduce_scatter(x, w, b, name),
            weft.matmul_reduce_scatter(x, w, bias=b),
        ),
        (ops.matmul_all_reduce(x, w, b, name), weft.matmul_all_reduce(x, w, bias=b)),
    ]
    for ours, theirs in pairs:
        assert torch.equal(ours, theirs)
        inputs = (x,) if ours.shape[-1] == 8 else (x, w, b)
        grads = torch.autograd.grad(ours.square().sum(), inputs)
        for actual, expected in zip(
            grads, torch.autograd.grad(theirs.square().sum(), inputs), strict=True
        ):
            torch.testing.assert_close(actual, expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("engine", ["host", "generic", "triton"])
def test_by_hand(engine: Any) -> None:
    with weft.engine(engine):
        eager_body()


def attention_by_hand_body() -> None:
    name, documents = group_name(None), torch.tensor([0, 2, 6])
    q, k, v = (leaf(2, 4, 3, 8, seed=seed) for seed in range(3))
    pairs: list[tuple[Any, Any]] = [
        (
            ops.ring_attention(q, k, v, name, True, 0.3, "contiguous", [2, -1], documents),
            weft.ring_attention(
                q, k, v, causal=True, scale=0.3, window=2, cu_seqlens=[0, 2, 6], return_lse=True
            ),
        ),
        (
            ops.ulysses_attention(q, k, v, name, "", True, return_lse=True),
            weft.ulysses_attention(q, k, v, causal=True, return_lse=True),
        ),
        (
            ops.head_attention(q, k, v, name, window=[1, -1], sizes=[3, 3]),
            weft.ulysses_attention(q, k, v, window=(1, -1), return_lse=True),
        ),
    ]
    traced = make_fx(lambda *qkv: ops.ulysses_attention(*qkv, name)[0])(q.data, k.data, v.data)
    used = {str(node.target) for node in traced.graph.nodes if node.op == "call_function"}
    in_one = {"weft.head_attention.default"}
    assert (used & in_one == in_one) == (weft.settings.current_engine() == "triton"), used
    for ours, theirs in pairs:
        grads = []
        for out, lse in (ours, theirs):
            grads.append(torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v)))
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


@pytest.mark.ranks(2, timeout_s=600)  # interpreted, on a busy machine
@pytest.mark.parametrize(
    "engine", ["host", "generic", pytest.param("triton", marks=pytest.mark.sweep)]
)
def test_attention_by_hand(engine: Any) -> None:
    with weft.engine(engine):
        attention_by_hand_body()


@pytest.mark.ranks(2)
def test_torch_s_own_names() -> None:
    """Arguments and results of torch.ops.symm_mem, against a gather by hand."""
    W, name = dist.get_world_size(), group_name(None)
    for dim in (0, 1, -1):
        A, Bs = leaf(2, 4, 8), [leaf(8 * (W if dim == -1 else 1), n, seed=n) for n in (6, 5)]
        gathered, ys = ops.fused_all_gather_matmul(A, Bs, dim, name)
        whole = c.all_gather(A, dim=dim)
        assert torch.equal(gathered, whole)
        for y, B in zip(ys, Bs, strict=True):
            torch.testing.assert_close(y, whole @ B)
        gathered, ys = ops.fused_all_gather_matmul(A, Bs, dim, name, return_A=False)
        assert gathered is None
        assert len(ys) == 2
    for dim in (0, 1, 2):
        A, B = leaf(2 * W, 4 * W, 8), leaf(8, 6 * W, seed=1)
        for op in ("sum", "avg"):
            y = ops.fused_matmul_reduce_scatter(A, B, op, dim, name)
            torch.testing.assert_close(y, c.reduce_scatter(A @ B, dim=dim, reduce_op=op))


def everything(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Every collective and fused op, each used by the next. x (B, S, 8), w, v (8, 6), b (8,)."""
    W = dist.get_world_size()
    gathered, (y, z) = weft.all_gather_matmul(x, [w, v], gather_dim=1, return_gathered=True)
    t = y.tanh() * z.sin() / 8
    u = weft.matmul_reduce_scatter(t, v.t(), bias=b, scatter_dim=1, reduce_op="avg")
    s = weft.matmul_all_reduce(t, w.t().contiguous(), bias=b) * gathered
    q = weft.all_gather_matmul(u, v.repeat(W, 1), gather_dim=-1)
    r = weft.matmul_reduce_scatter(q, v.t(), scatter_dim=-1).tanh()
    a = c.all_gather(r, dim=1)
    a = c.reduce_scatter(a * a, dim=1) + c.all_reduce(r, reduce_op="avg")
    a = c.all_to_all(c.broadcast(a, 0).reshape(-1)).square()
    c.barrier()
    _, (f,) = ops.fused_all_gather_matmul(u, [w], 0, group_name(None))
    return s.square().mean() + a.mean() + f.square().mean()


def attentions(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Every attention, each used by the next, on 2 ranks. q (B, 4, 2, 8), k, v (B, 2, 2, 8)."""
    out, lse = weft.ring_attention(q, k, v, causal=True, layout="zigzag", return_lse=True)
    out = weft.ulysses_attention(out, k, v, window=(2, -1), cu_seqlens=[0, 3, 4])
    with torch.no_grad():
        decoded = weft.flash_decode(q[:, :, :1] * 0 + 1, k, v, torch.tensor([3] * q.shape[0]))
    return (out * decoded).square().mean() + lse.mean()


def attention_body(backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(attentions, fullgraph=True, backend=backend)
    for batch in (1, 2):
        args = leaf(batch, 4, 2, 8), leaf(batch, 2, 2, 8, seed=1), leaf(batch, 2, 2, 8, seed=2)
        expected, actual = attentions(*args), compiled(*args)
        torch.testing.assert_close(actual, expected)
        grads = torch.autograd.grad(actual, args)
        for ours, theirs in zip(grads, torch.autograd.grad(expected, args), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor",
        marks=[
            pytest.mark.sweep,
            pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler"),
        ],
    ),
]


@pytest.mark.ranks(2)
def test_attention_compiled_as_eager() -> None:
    attention_body("aot_eager")


@pytest.mark.sweep
@pytest.mark.ranks(2, timeout_s=300)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("engine", ["host", "generic", "triton"])
def test_attention_compiled_on_every_engine(engine: Any, backend: str) -> None:
    with weft.engine(engine):
        attention_body(backend)


@pytest.mark.ranks(2, timeout_s=300)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.slow
def test_compiled_as_eager(backend: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(everything, fullgraph=True, dynamic=True, backend=backend)
    W = dist.get_world_size()
    for batch in (4, 6, 10):
        args = leaf(batch, 2 * W, 8), leaf(8, 6, seed=1), leaf(8, 6, seed=2), leaf(8, seed=3)
        expected, actual = everything(*args), compiled(*args)
        torch.testing.assert_close(actual, expected)
        grads = torch.autograd.grad(actual, args)
        for ours, theirs in zip(grads, torch.autograd.grad(expected, args), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2, "recompiled for a batch"


@pytest.mark.ranks(2, pytest.param(3, marks=pytest.mark.slow))
def test_layers_compile() -> None:
    W = dist.get_world_size()
    torch.manual_seed(0)
    F, gelu = 4 * W, torch.nn.GELU
    model = torch.nn.Sequential(
        weft.ColumnParallelLinear(8, F, sequence_dim=0), gelu(),
        weft.RowParallelLinear(F, 8, sequence_dim=0), gelu(),
        weft.ColumnParallelLinear(8, F, sequence_dim=None), gelu(),
        weft.RowParallelLinear(F, 8, sequence_dim=None),
    )  # fmt: skip
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for rows in (2, 3, 5):
        x = leaf(rows, 8)
        expected, actual = model(x), compiled(x)
        torch.testing.assert_close(actual, expected)
        inputs = [x, *model.parameters()]
        for ours, theirs in zip(
            torch.autograd.grad(actual.square().sum(), inputs),
            torch.autograd.grad(expected.square().sum(), inputs),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.ranks(2, pytest.param(3, marks=pytest.mark.slow))
def test_uneven_shards_need_sizes_in_a_graph() -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    sizes = [4, 0, 3][:W]
    x, w = leaf(sizes[rank], 8), leaf(8, 6)
    compiled = torch.compile(weft.all_gather_matmul, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, w, sizes=sizes), weft.all_gather_matmul(x, w))
    for call in (compiled, torch.compile(lambda x, w: c.all_gather(x), backend="aot_eager")):
        with pytest.raises(ValueError, match="is given sizes="):
            call(x, w)
    assert torch.equal(compiled(x, w, sizes=sizes), weft.all_gather_matmul(x, w))


@pytest.mark.ranks(2)
def test_calls_are_neither_dropped_nor_merged() -> None:
    """A call whose result nobody uses is made all the same: a peer may use its own."""

    def f(x: torch.Tensor) -> torch.Tensor:
        c.all_gather(x)
        y: torch.Tensor = c.all_reduce(x) + c.all_reduce(x)
        return y

    x = torch.ones(3)
    explained = weft.explain(torch.compile(f, fullgraph=True, backend="aot_eager"), x)
    assert [decision.op for decision in explained] == ["all_gather", "all_reduce", "all_reduce"]


@pytest.mark.ranks(2)
def test_graphs_of_values_hold_the_calls() -> None:
    """make_fx traces plain tensors, in whose memory calls find their results by address."""

    def step(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = c.reduce_scatter(weft.all_gather_matmul(c.all_reduce(x), w))
        z = weft.ring_attention(x[None, None], x[None, None], x[None, None])
        return *torch.autograd.grad((y.square().sum(), z.square().sum()), (x, w)), y, z

    x, w = leaf(4, 8), leaf(8, 6, seed=1)
    graph = make_fx(step)(x, w)
    later = [t.detach() * 2 for t in (x, w)]
    torch.testing.assert_close(graph(*later), step(*(t.clone().requires_grad_() for t in later)))
    with pytest.raises(NotImplementedError, match=r"not by torch\.func"):
        make_fx(torch.func.grad(lambda x: c.all_reduce(x).sum()))(x.data)


@pytest.mark.ranks(2)
def test_tensors_without_memory_have_results_without_memory() -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    x, up = torch.randn(4, 8), weft.ColumnParallelLinear(8, 6, device="meta", sequence_dim=0)
    y = up(x.to("meta"))
    assert y.is_meta and y.shape == (8, 3)
    y.sum().backward()
    assert up.weight.grad is not None and up.weight.grad.is_meta
    with FakeTensorMode(allow_non_fake_inputs=True):
        for made in (c.all_gather(x), c.all_reduce(x), weft.matmul_all_reduce(x, x.t())):
            assert type(made) is FakeTensor


@pytest.mark.ranks(2)
def test_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    W = dist.get_world_size()
    with FakeTensorMode():
        x, w = torch.empty(4, 8), torch.empty(8, 6)
        assert weft.all_gather_matmul(x, w).shape == (4 * W, 6)
        assert weft.matmul_reduce_scatter(x, w).shape[1] == 6
        assert c.all_gather(x, dim=1).stride() == (1, 4)
