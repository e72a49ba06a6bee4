"""The same ops on GPUs: a rank a GPU, or several ranks on one. `pytest -m gpu`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from rank_pool import GpuRanks
from test_attention_library import library_cases
from test_examples import serve_llama
from test_flash_decode import cases as decode_cases
from test_gpu_dtensor import gpus
from test_head_exchange import cases as head_cases
from test_head_exchange import repeated as heads_again
from test_kernel_collectives import gather_body, reduce_body, to_all_body
from test_matmul_ops import ENGINES, random_cases, run_cases
from test_matmul_ops import repeated_body as matmuls_again
from test_normalized_sum import run_cases as run_norms
from test_parallel_linear import fp8_body
from test_ring_attention import attention_case
from test_ring_attention import random_cases as random_attention
from test_ring_attention import repeated_body as ring_again
from test_ring_attention import run_cases as run_attention

import weft
from weft import collectives
from weft.dtensor import DTensor, Partial, Shard
from weft.kernels import zigzag_sizes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and -m gpu"),
]


def buffer_body() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    buffer = collectives.empty((4,), torch.float32, device="cuda")
    for call in range(3):
        buffer.local.fill_(rank + 10 * call)
        buffer.barrier()
        for peer in range(world_size):
            seen = buffer.get_buffer(peer, (4,), torch.float32)
            assert (seen == peer + 10 * call).all()
        buffer.barrier()


def test_symmetric_buffer(gpu_ranks: GpuRanks) -> None:
    gpu_ranks.run(buffer_body, timeout_s=60)


def on_gpu(kind: str, cases: list[dict[str, Any]]) -> list[torch.Tensor]:
    with torch.device("cuda"):
        return [out.cpu() for out in run_cases(kind, cases)]


def number_of_cases(engine: str, W: int) -> int:
    """Every launch of another shape of 1 to 24 rows is compiled anew: 2 s, and gradients again."""
    return (6 if W == 2 else 4) if engine == "triton" else 24


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["gather", "scatter", "reduce"])
def test_random_shapes(gpu_ranks: GpuRanks, kind: str, engine: str) -> None:
    W = gpu_ranks.world_size
    cases = random_cases(kind, W, engine, number_of_cases(engine, W))
    outs = gpu_ranks.run(on_gpu, kind, cases, timeout_s=300)
    if kind == "reduce":
        for others in outs[1:]:
            assert all(torch.equal(a, b) for a, b in zip(outs[0], others, strict=True))


def large_cases(kind: str, W: int, engine: str) -> list[dict[str, Any]]:
    """Of whole tiles: by descriptors, in many steps of K and several tiles a program, in all
    orders of the operands; the last one large enough for copy engines."""
    cases = []
    for rows, K, N, dtype, strided in (
        (16, 1024, 512, torch.bfloat16, False),
        (300, 1024, 1000, torch.float16, True),
        (1024, 512, 1536, torch.bfloat16, False),
        (512, 256, 640, torch.float32, False),
        (2048, 1280, 2048, torch.bfloat16, False),
    ):
        case = {"dtype": dtype, "engine": engine, "bias": True, "strided": strided}
        if kind == "gather":
            case |= {"K": K, "Ns": [N], "batch": [], "dim": 0, "known": True, "sizes": [rows] * W}
        else:
            dim = None if kind == "reduce" else 0
            case |= {"lead": [rows * W], "N": N, "Ks": [K] * W, "reduce_op": "sum", "dim": dim}
        cases.append(case)
    return cases


@pytest.mark.parametrize("engine", ["host", "triton"])
@pytest.mark.parametrize("kind", ["gather", "scatter", "reduce"])
def test_large_shapes(gpu_ranks: GpuRanks, kind: str, engine: str) -> None:
    cases = large_cases(kind, gpu_ranks.world_size, engine)
    if gpu_ranks.world_size > 2:
        cases = cases[1::3]  # of the rest other numbers of ranks change little
    gpu_ranks.run(on_gpu, kind, cases, timeout_s=300)


def with_gpu(body: Callable[..., Any], *args: Any) -> Any:
    with torch.device("cuda"):
        return body(*args)


# Widths of heads, rows a rank: of many tiles.
LONG = (
    (128, 512, torch.bfloat16),
    (64, 300, torch.float16),
    (256, 140, torch.bfloat16),
    (128, 90, torch.float32),
)


@pytest.mark.parametrize("engine", ["generic", "triton"])
def test_ring_attention(gpu_ranks: GpuRanks, engine: str) -> None:
    W = gpu_ranks.world_size
    cases = random_attention(W, engine, number_of_cases(engine, W))
    gpu_ranks.run(with_gpu, run_attention, cases, timeout_s=600)


@pytest.mark.parametrize("engine", ["generic", "triton"])
def test_ring_attention_of_long_sequences(gpu_ranks: GpuRanks, engine: str) -> None:
    case = random_attention(gpu_ranks.world_size, engine, 1)[0] | {
        "B": 1, "H_kv": 2, "H": 8, "causal": True, "scale": None, "window": None,
        "cu_seqlens": None, "layout": "zigzag", "strided": False, "with_lse": True, "known": True,
        "uses": "out and lse",
    }  # fmt: skip
    cases = []
    for D, rows, dtype in LONG[: None if gpu_ranks.world_size == 2 else 1]:
        sizes = zigzag_sizes(rows * gpu_ranks.world_size, gpu_ranks.world_size)
        cases.append(case | {"D": D, "dtype": dtype, "q_sizes": sizes, "k_sizes": sizes})
    gpu_ranks.run(with_gpu, run_attention, cases, timeout_s=300)


@pytest.mark.parametrize("engine", ["generic", "triton"])
def test_ulysses_attention(gpu_ranks: GpuRanks, engine: str) -> None:
    count = number_of_cases(engine, gpu_ranks.world_size)
    gpu_ranks.run(with_gpu, head_cases, 639, count, engine, timeout_s=600)


flash = pytest.mark.skipif(
    torch.cuda.is_available()
    and (bool(torch.version.hip) or torch.cuda.get_device_capability() < (8, 0)),
    reason="the host engine of attention is for NVIDIA's chips from sm_80 on",
)


def library_body(by_heads: bool) -> None:
    """What torch's kernels take, short and long."""
    W = dist.get_world_size()
    cases = library_cases(W, 12)
    for D, rows, dtype in LONG[:2]:
        sizes = zigzag_sizes(rows * W, W)
        case = {"D": D, "dtype": dtype, "q_sizes": sizes, "k_sizes": sizes, "layout": "zigzag"}
        cases.append(cases[0] | case | {"H": 8, "H_kv": 2, "cu_seqlens": None})
    for case in cases:
        if by_heads:
            attention_case(case | {"layout": "contiguous"}, weft.ulysses_attention)
        else:
            attention_case(case)
    first, again = attention_case(cases[-1]), attention_case(cases[-1])
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@flash
@pytest.mark.parametrize("by_heads", [False, True])
def test_attention_by_the_library(gpu_ranks: GpuRanks, by_heads: bool) -> None:
    gpu_ranks.run(with_gpu, library_body, by_heads, timeout_s=300)


def long_heads_body(engine: str) -> None:
    for D, rows, dtype in LONG[: None if dist.get_world_size() == 2 else 1]:
        sizes = [rows + r for r in range(dist.get_world_size())]
        case = {
            "B": 1, "H": 8, "H_kv": 2, "D": D, "dtype": dtype, "q_sizes": sizes, "k_sizes": sizes,
            "causal": True, "scale": None, "window": None, "cu_seqlens": None, "engine": engine,
            "with_lse": True, "known": True, "strided": False, "layout": "contiguous",
        }  # fmt: skip
        attention_case(case, weft.ulysses_attention)


@pytest.mark.parametrize("engine", ["generic", "triton"])
def test_ulysses_attention_of_long_sequences(gpu_ranks: GpuRanks, engine: str) -> None:
    gpu_ranks.run(with_gpu, long_heads_body, engine, timeout_s=300)


@pytest.mark.parametrize("engine", ENGINES)
def test_flash_decode(gpu_ranks: GpuRanks, engine: str) -> None:
    count = number_of_cases(engine, gpu_ranks.world_size)
    found = gpu_ranks.run(with_gpu, decode_cases, engine, 3, count, timeout_s=600)
    assert len(set(found)) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("body", [gather_body, reduce_body, to_all_body])
def test_collective_kernels(
    gpu_ranks: GpuRanks, body: Callable[..., Any], dtype: torch.dtype
) -> None:
    gpu_ranks.run(with_gpu, body, dtype, timeout_s=300)


def captured(call: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    call()  # workspaces grow, kernels are compiled
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def graph_body(engine: weft.settings.Engine) -> None:
    """Capture a forward, replay it with new inputs."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = torch.zeros(64, 128, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16)

    def forward(x: torch.Tensor = x) -> torch.Tensor:
        h = weft.all_gather_matmul(x, w, sizes=[64] * world_size)
        return weft.matmul_reduce_scatter(h, w.t())

    with weft.engine(engine):
        graph, y = captured(forward)
        ours = weft.cuda_graph(forward, x)
        for seed in range(4):
            torch.manual_seed(10 * seed + rank)
            x.copy_(torch.randn_like(x))
            graph.replay()
            replayed = y.clone()
            assert torch.equal(replayed, forward())
            assert torch.equal(ours(x), replayed)


@pytest.mark.parametrize("engine", ["triton", "host"])
def test_cuda_graph(gpu_ranks: GpuRanks, engine: str) -> None:
    gpu_ranks.run(graph_body, engine, timeout_s=120)


def collective_body(engine: weft.settings.Engine) -> None:
    """Collectives of many sizes against sums and concatenations by hand."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with weft.engine(engine):
        for count in (0, 1, 1000, 65_536, 300_001):
            for dtype in (torch.bfloat16, torch.float32, torch.int64):
                every = [torch.arange(count, device="cuda").to(dtype) % 13 + r for r in range(4)]
                every, x = every[:world_size], every[rank]
                total = torch.stack(every).sum(0, dtype=torch.float64).to(dtype)
                assert torch.equal(collectives.all_reduce(x), total)
                assert torch.equal(collectives.all_gather(x), torch.cat(every))
                sizes = weft.collectives.chunk_sizes(count, world_size)
                mine = total.split(sizes)[rank]
                assert torch.equal(collectives.reduce_scatter(x), mine)
                whole = torch.cat([x] * world_size)
                assert torch.equal(collectives.all_to_all(whole), torch.cat(every))


@pytest.mark.parametrize("engine", ["triton", "host", "auto"])
def test_collectives(gpu_ranks: GpuRanks, engine: str) -> None:
    gpu_ranks.run(collective_body, engine, timeout_s=300)


def mismatch_body() -> None:
    """Which half dtype, or which op: silent without a comparison, or a wait for each other."""
    rank, x = dist.get_rank(), torch.ones(1 << 12, device="cuda")
    halves: list[Callable[[], object]] = [
        lambda: collectives.all_reduce(x.half()),
        lambda: collectives.all_reduce(x.bfloat16()),
    ]
    ops: list[Callable[[], object]] = [
        lambda: collectives.all_reduce(x),
        lambda: collectives.all_gather(x),
    ]
    with weft.engine("triton"):
        for pair in (halves, ops):
            for call in (*pair, *pair):
                call()
            torch.cuda.synchronize()
            dist.barrier()
            with pytest.raises(weft.MismatchError, match=r"rank . called .*; rank . called"):
                for _ in range(100):
                    pair[min(rank, 1)]()
                    torch.cuda.synchronize()
            dist.barrier()
            weft.close()


def test_calls_that_differ(gpu_ranks: GpuRanks) -> None:
    gpu_ranks.run(mismatch_body, timeout_s=60)


def collective_graph_body() -> None:
    """Capture each collective, and a pull, and replay them with new inputs."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = gpus()
    x = torch.zeros(32 * world_size, 24, device="cuda", dtype=torch.bfloat16)

    def pull() -> torch.Tensor:
        partial = DTensor.from_local(x, mesh, [Partial()], run_check=False)
        local: torch.Tensor = partial.redistribute(placements=[Shard(1)]).to_local()
        return local

    calls: dict[str, Callable[[], torch.Tensor]] = {
        "all_reduce": lambda: collectives.all_reduce(x),
        "all_gather": lambda: collectives.all_gather(x, sizes=[len(x)] * world_size),
        "reduce_scatter": lambda: collectives.reduce_scatter(x),
        "all_to_all": lambda: collectives.all_to_all(x),
        "pull": pull,
    }
    with weft.engine("triton"):
        graphs = {name: captured(call) for name, call in calls.items()}
        for seed in range(4):
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(10 * seed + rank)))
            for name, (graph, result) in graphs.items():
                graph.replay()
                replayed = result.clone()
                assert torch.equal(replayed, calls[name]()), name


def test_cuda_graphs_of_collectives(gpu_ranks: GpuRanks) -> None:
    gpu_ranks.run(collective_graph_body, timeout_s=200)


def attention_graph_body(engine: weft.settings.Engine) -> None:
    """Capture attention, its gradients and a decoding step, and replay them with new inputs."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rows, generator = 64, torch.Generator().manual_seed(rank)
    q, k, v, grad = inputs = [
        torch.zeros(1, heads, rows, 64, device="cuda", dtype=torch.bfloat16)
        for heads in (4, 2, 2, 4)
    ]
    for x in inputs[:3]:
        x.requires_grad_()
    lengths = torch.zeros(1, device="cuda", dtype=torch.int32)
    sizes = [rows] * world_size

    def step(attention: Callable[..., torch.Tensor]) -> torch.Tensor:
        out = attention(q, k, v, causal=True, sizes=sizes)
        grads = torch.autograd.grad(out, [q, k, v], grad)
        return torch.cat([x.detach().flatten() for x in (out, *grads)])

    def decode() -> torch.Tensor:
        with torch.no_grad():
            out: torch.Tensor = weft.flash_decode(q[:, :, :1], k, v, lengths, block_size=1)
        return out

    calls: dict[str, Callable[[], torch.Tensor]] = {
        "ring": lambda: step(weft.ring_attention),
        "heads": lambda: step(weft.ulysses_attention),
    }
    if engine == "triton":
        calls["decode"] = decode
    with weft.engine(engine):
        graphs = {name: captured(call) for name, call in calls.items()}
        for seed in range(3):
            with torch.no_grad():
                for x in inputs:
                    x.copy_(torch.randn(x.shape, generator=generator))
                # Every rank asks the same.
                q_whole = torch.randn(q.shape, generator=torch.Generator().manual_seed(seed))
                q.copy_(q_whole)
            lengths.fill_(1 + 20 * seed)
            for name, (graph, result) in graphs.items():
                graph.replay()
                replayed = result.clone()
                assert replayed.isfinite().all(), name
                assert torch.equal(replayed, calls[name]()), name


@pytest.mark.parametrize("engine", ["triton", pytest.param("host", marks=flash)])
def test_cuda_graphs_of_attention(gpu_ranks: GpuRanks, engine: str) -> None:
    gpu_ranks.run(attention_graph_body, engine, timeout_s=300)


def serving_body(engine: weft.settings.Engine, shard: str | None) -> None:
    """Capture a whole step of decoding, which feeds itself; replay it beside the same in eager, the
    block table changed between the steps."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    B, H, H_kv, D, P, V = 3, 4 * world_size, 2 * world_size, 16, 4, 50
    by_head = shard is None
    whole: dict[str, Any] = {"sequence_dim": None, "device": "cuda"}
    torch.manual_seed(0)
    embedding = weft.VocabParallelEmbedding(V, H * D, **whole)
    layers = [H * D, H_kv * D, H_kv * D]
    qkv = weft.ColumnParallelLinear(
        H * D, sum(layers), merged_sizes=layers, gather_output=not by_head, **whole
    )
    mix = weft.RowParallelLinear(H * D, H * D, **whole)
    head = weft.ColumnParallelLinear(H * D, V, **whole)
    heads = H_kv // world_size if by_head else H_kv
    cache = torch.zeros(2, 24, heads, P, D, device="cuda")
    tokens = torch.zeros(B, 1, dtype=torch.int64, device="cuda")
    lengths = torch.zeros(B, dtype=torch.int32, device="cuda")
    table = torch.zeros(B, 9, dtype=torch.int32, device="cuda")

    def step() -> torch.Tensor:
        x = embedding(tokens)
        parts = qkv(x).split(qkv.output_sizes, -1)
        q, k, v = (part.unflatten(-1, (-1, D)).transpose(1, 2) for part in parts)
        where: dict[str, Any] = {"shard": shard, "block_table": table[:, :8]}
        weft.append_to_cache(k, v, cache[0], cache[1], lengths, **where)
        out = weft.flash_decode(q, cache[0], cache[1], lengths, **where)
        out = out if by_head else out.chunk(world_size, 1)[rank]
        said = weft.vocab_parallel_argmax(head(x + mix(out.transpose(1, 2).flatten(2))))
        tokens.copy_(said)
        lengths.add_(1)
        return said

    def begin() -> None:
        cache.fill_(torch.nan)
        tokens.copy_(torch.tensor([[1], [2], [3]]))
        lengths.copy_(torch.tensor([1, 4, 0]))
        table[:, :8] = torch.arange(24).view(B, 8)

    def said_by(run: Callable[[], torch.Tensor]) -> list[list[int]]:
        begin()
        cache.nan_to_num_(0.0)  # the tokens before the first
        said = []
        for turn in range(9):
            said.append(run().flatten().tolist())
            collectives.check_peers()
            if turn % 3 == 2:  # other pages
                moved = torch.randperm(24, generator=torch.Generator().manual_seed(turn)).cuda()
                cache[:, moved] = cache.clone()
                table[:, :8] = moved.int()[table[:, :8].long()]
        return said

    with torch.no_grad(), weft.engine(engine):
        expected = said_by(step)
        begin()
        graph, result = captured(step)

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        assert said_by(replay) == expected
        assert len({tuple(each) for each in expected}) > 1


@pytest.mark.parametrize("shard", ["sequence", None])
@pytest.mark.parametrize("engine", ["triton", "host"])
def test_cuda_graph_of_serving(gpu_ranks: GpuRanks, engine: str, shard: str | None) -> None:
    gpu_ranks.run(serving_body, engine, shard, timeout_s=300)


@pytest.mark.parametrize("engine", ["host", "triton"])
def test_results_are_bitwise_the_same_again(gpu_ranks: GpuRanks, engine: str) -> None:
    gpu_ranks.run(with_gpu, matmuls_again, engine, timeout_s=200)
    if engine == "triton":
        gpu_ranks.run(with_gpu, ring_again, engine, gpu_ranks.world_size, timeout_s=200)
        if gpu_ranks.world_size == 2:
            gpu_ranks.run(with_gpu, heads_again, timeout_s=200)


def late_body(engine: weft.settings.Engine) -> None:
    """Calls in a row with one rank's stream late for each, by turns: what they give in step."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    sizes = [32] * world_size
    xs = [torch.randn(32, 64, generator=generator).cuda().bfloat16() for _ in range(8)]

    def results(late: bool) -> list[torch.Tensor]:
        found = []
        for call, x in enumerate(xs):
            if late and rank == call % world_size:
                torch.cuda._sleep(20_000_000)  # 10 ms
            gathered = weft.all_gather_matmul(x, x.t(), sizes=sizes)
            found += [gathered, weft.matmul_reduce_scatter(gathered, x), collectives.all_reduce(x)]
            if engine == "triton":
                heads = x.view(1, 1, 32, 64)
                found.append(weft.ring_attention(heads, heads, heads, causal=True, sizes=sizes))
                found += weft.reduce_scatter_rms_norm_all_gather(gathered)
            if not late:
                torch.cuda.synchronize()
                dist.barrier()
        return found

    with weft.engine(engine):
        in_step = results(late=False)
        assert all(torch.equal(a, b) for a, b in zip(in_step, results(late=True), strict=True))


@pytest.mark.parametrize("engine", ["host", "triton"])
def test_a_late_rank(gpu_ranks: GpuRanks, engine: str) -> None:
    gpu_ranks.run(late_body, engine, timeout_s=200)


def absent_body() -> None:
    """Rank 0 makes a call that the others leave out: an error after the time-out, no hang."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
    heads = torch.randn(1, world_size, 32, 64, device="cuda", dtype=torch.bfloat16)
    lengths = torch.full((1,), 32, device="cuda")
    sizes = [32] * world_size
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "gather": lambda: weft.all_gather_matmul(x, x.t(), sizes=sizes),
        "scatter": lambda: weft.matmul_reduce_scatter(x, x.t()),
        "sum": lambda: weft.matmul_all_reduce(x, x.t()),
        "norm": lambda: weft.reduce_scatter_rms_norm_all_gather(x)[0],
        "ring": lambda: weft.ring_attention(heads, heads, heads, sizes=sizes),
        "ulysses": lambda: weft.ulysses_attention(heads, heads, heads, sizes=sizes),
        "decode": lambda: weft.flash_decode(heads, heads, heads, lengths, block_size=1),
        "collective": lambda: collectives.all_reduce(x),
    }
    engines: list[tuple[weft.settings.Engine, list[str]]] = [
        ("triton", list(calls)),
        ("host", ["gather", "scatter", "sum", "collective"]),
    ]
    patience = os.environ.get("WEFT_TIMEOUT_S", "600")
    for engine, names in engines:
        for name in names:
            with weft.engine(engine):
                before = calls[name]()  # compiled, with all ranks
                torch.cuda.synchronize()
                dist.barrier()
                if rank == 0:
                    os.environ["WEFT_TIMEOUT_S"] = "0.2"
                    made = calls[name]()
                    torch.cuda.synchronize()
                    assert made.isnan().all(), name
                    with pytest.raises(weft.PeerTimeout, match=r"rank 0 waited 0\.2 s for rank"):
                        calls[name]()
                    os.environ["WEFT_TIMEOUT_S"] = patience
                dist.barrier()
                weft.close()
                assert torch.equal(before, calls[name]()), name


def test_an_absent_peer(gpu_ranks: GpuRanks) -> None:
    gpu_ranks.run(absent_body, timeout_s=300)


def outgrown_body() -> None:
    """Replay a graph after its workspace has grown; then calls in two streams that nobody joins."""
    world_size = dist.get_world_size()
    x = torch.zeros(64, 64, device="cuda", dtype=torch.bfloat16)
    w, wide = torch.eye(64, device="cuda", dtype=x.dtype), x.new_ones(64, 1 << 12)
    with weft.engine("triton"):
        graph, result = captured(lambda: weft.matmul_all_reduce(x, w))
        for value in (1.0, 2.0):
            weft.matmul_all_reduce(x.new_ones(1 << 12, 64), wide)
            x.fill_(value)
            graph.replay()
            assert (result == value * world_size).all()
        xs = [torch.full_like(x, value) for value in range(8)]
        torch.cuda.synchronize()
        streams, ys = [torch.cuda.Stream() for _ in range(2)], []
        for i, each in enumerate(xs):
            with torch.cuda.stream(streams[i % 2]):
                ys.append(weft.matmul_all_reduce(each, w))
        torch.cuda.synchronize()
    for value, y in enumerate(ys):
        assert (y == value * world_size).all()


def test_workspaces_that_grow_and_change_streams(gpu_ranks: GpuRanks) -> None:
    gpu_ranks.run(outgrown_body, timeout_s=200)


def on_kernels(body: Callable[..., Any], *args: Any) -> Any:
    """Auto may prefer the process group where ranks share a GPU, and no graph can capture Gloo."""
    with weft.engine("triton"):
        return body(*args)


def patiently(body: Callable[..., Any], *args: Any) -> Any:
    """Ranks that call torch's compiler are apart by more than others."""
    with patch.dict(os.environ, WEFT_TIMEOUT_S="120"):
        return body(*args)


def compiled_body(mode: str | None) -> None:
    """torch.compile of a forward and backward against eager, with new inputs."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    weft.close()  # workspaces are made while the graph is
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        weft.ColumnParallelLinear(64, 32 * world_size, device="cuda", sequence_dim=0),
        torch.nn.GELU(),
        weft.RowParallelLinear(32 * world_size, 64, device="cuda", sequence_dim=0),
    )
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    for seed in range(4):
        generator = torch.Generator().manual_seed(10 * seed + rank)
        x = torch.randn(32, 64, generator=generator).cuda().requires_grad_()
        gradients = []
        for module in (compiled, model):
            y = module(x)
            gradients.append(torch.autograd.grad(y.square().sum(), [x, *model.parameters()]))
        for theirs, ours in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("sequence_dim", [None, 0])
def test_quantized_layers(gpu_ranks: GpuRanks, sequence_dim: int | None) -> None:
    gpu_ranks.run(on_kernels, with_gpu, fp8_body, sequence_dim, timeout_s=200)


def test_norms_of_sums(gpu_ranks: GpuRanks) -> None:
    gpu_ranks.run(on_kernels, with_gpu, run_norms, timeout_s=200)


@pytest.mark.parametrize("by_head", [True, False])
def test_the_example_of_serving(gpu_ranks: GpuRanks, by_head: bool) -> None:
    if 8 % gpu_ranks.world_size:
        pytest.skip("the model has 8 heads")
    told = gpu_ranks.run(on_kernels, with_gpu, serve_llama, by_head, 2, 3, timeout_s=300)
    assert len(set(told)) == 1


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled(gpu_ranks: GpuRanks, mode: str | None) -> None:
    gpu_ranks.run(on_kernels, patiently, compiled_body, mode, timeout_s=300)


def compiled_attention_body() -> None:
    """torch.compile of attention against eager: forward, gradients, a decoding step."""
    rank = dist.get_rank()

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ring = weft.ring_attention(q, k, v, causal=True)
        out: torch.Tensor = ring + weft.ulysses_attention(q, k, v, causal=True)
        return out

    def decode(q: torch.Tensor, k: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = weft.flash_decode(q, k, k, lengths, block_size=1)
        return out

    with weft.engine("triton"):
        generator = torch.Generator().manual_seed(rank)
        inputs = [torch.randn(1, h, 48, 32, generator=generator).cuda() for h in (4, 2, 2)]
        results = []
        for call in (torch.compile(step, fullgraph=True), step):
            q, k, v = (x.clone().requires_grad_() for x in inputs)
            with weft.settings.explaining() as decisions:
                out = call(q, k, v)
                results.append([out, *torch.autograd.grad(out.square().mean(), [q, k, v])])
            assert {decision.engine for decision in decisions} == {"triton"}
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
        q = torch.ones(1, 4, 1, 32, device="cuda")
        lengths = torch.full((1,), 40, device="cuda")
        with torch.no_grad():
            compiled = torch.compile(decode, fullgraph=True)
            assert torch.equal(compiled(q, inputs[1], lengths), decode(q, inputs[1], lengths))


def test_compiled_attention(gpu_ranks: GpuRanks) -> None:
    gpu_ranks.run(patiently, compiled_attention_body, timeout_s=300)


def switch_body() -> bool:
    """The switch's sums and copies, where there is one: exact for small integers."""
    from weft.collectives import workspace
    from weft.collectives.kernels import multimem

    rank, W = dist.get_rank(), dist.get_world_size()
    for dtype in multimem.DTYPES:
        for count in (1, 1000, 300_001):
            sizes = multimem.vector_shares(count, dtype.itemsize, W)
            nbytes = multimem.workspace_bytes("all_reduce", max(sizes) * dtype.itemsize, W)
            ws = workspace(None, nbytes, channel="multimem", device="cuda")
            if not ws.buffer.multicast_ptr:
                return False
            x = (torch.arange(count, device="cuda") % 5 + rank).to(dtype)
            total = sum(torch.arange(count, device="cuda") % 5 + r for r in range(W))
            expected = torch.as_tensor(total).to(dtype)
            part, out = x.new_empty(sizes[rank]), torch.empty_like(x)
            multimem.launch_switched("reduce_scatter", x, part, ws, sizes)
            ws.launched("reduce_scatter")
            assert torch.equal(part, expected.split(sizes)[rank])
            multimem.launch_switched("all_gather", part, out, ws, sizes)
            ws.launched("all_gather")
            assert torch.equal(out, expected)
            multimem.launch_switched("all_reduce", x, x, ws, sizes)
            ws.launched("all_reduce")
            assert torch.equal(x, expected)
    return True


def test_sums_by_the_switch(gpu_ranks: GpuRanks) -> None:
    if not all(gpu_ranks.run(switch_body, timeout_s=100)):
        pytest.skip("this memory has no multicast address")
