"""Attention by exchanging heads for sequence: float64, forward and every gradient, uneven sizes."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_hosts import on_hosts
from test_ring_attention import (
    DTYPES,
    NEEDS,
    attention_case,
    link_bytes,
    needs_interpreter,
    shard,
    used,
    whole,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import weft
from weft import sim
from weft.collectives.ranks.chunks import chunk_sizes
from weft.dtensor import init_device_mesh
from weft.kernels.attention import swaps
from weft.kernels.attention.ring import attention_reference


def draw(rng: random.Random, world_size: int, engine: str) -> dict[str, Any]:
    """A case; now and then empty shards, fewer heads than ranks, and queries unlike keys."""
    interpreted = engine == "triton"  # slowly
    H_kv = rng.choice([1, 2, 3] if interpreted else [1, 2, 3, 4])
    length = rng.choice([0, 1, 5, 13, 24, 40][: 5 if interpreted else None])
    packed = rng.random() < 0.2
    keys = length if packed or rng.random() < 0.7 else rng.choice([1, 7, 30])

    def sizes(length: int) -> list[int]:
        if rng.random() < 0.5:
            return chunk_sizes(length, world_size)
        cuts = sorted(rng.choices(range(length + 1), k=world_size - 1))
        return [b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True)]

    case = {
        "B": rng.choice([1, 2]),
        "H": H_kv * rng.choice([1, 2] if interpreted else [1, 2, 3]),
        "H_kv": H_kv,
        "D": rng.choice([5, 8, 12, 16]),
        "dtype": rng.choice(DTYPES),
        "q_sizes": sizes(length),
        "k_sizes": sizes(keys),
        "causal": rng.random() < 0.6,
        "scale": rng.choice([None, 0.3]),
        "window": rng.choice([None, None, 0, 3, (2, 5)]),
        "cu_seqlens": [0, length // 3, length] if packed else None,
        "engine": engine or rng.choice(["host", "generic"]),
        "with_lse": rng.random() < 0.4,
        "known": rng.random() < 0.5,
        "strided": rng.random() < 0.5,
        "layout": "contiguous",
    }
    return case | {"uses": used(case), "needs": random.Random(f"{case}").choice(NEEDS)}


def cases(seed: int, count: int, engine: str = "", first: int = 0) -> None:
    """The cases first .. first + count - 1 of a seed."""
    rng = random.Random(seed)
    drawn = [draw(rng, dist.get_world_size(), engine) for _ in range(first + count)]
    for number, case in enumerate(drawn[first:], first):
        try:
            attention_case(case, weft.ulysses_attention)
        except Exception as error:
            raise AssertionError(f"case {number} of seed {seed}: {case}") from error


@pytest.mark.ranks(2, 3, 4)
def test_random_cases(world_size: int) -> None:
    cases(world_size, 15)


@pytest.mark.parametrize(
    ("world_size", "seed"), [(2, 639), pytest.param(3, 2029, marks=pytest.mark.sweep)]
)
@needs_interpreter
def test_cases_in_one_launch(virtual_ranks, world_size: int, seed: int) -> None:
    """Seeds of cases with much in them: GQA, a rank without heads or rows, documents, a window."""
    virtual_ranks(world_size, cases, seed, 2, "triton")


@pytest.mark.sweep
@pytest.mark.ranks(timeout_s=1800)
@pytest.mark.parametrize(
    ("world_size", "engine"),
    [*((W, "") for W in (2, 3, 4, 8)), *((W, "triton") for W in (2, 3, 4))],
)
def test_many_random_cases(world_size: int, engine: str) -> None:
    cases(100 + world_size, 60 if engine == "triton" else 300, engine)


@pytest.mark.sweep
@pytest.mark.ranks(8, timeout_s=600)
@pytest.mark.parametrize("number", range(15))
def test_cases_on_eight_ranks(number: int) -> None:
    """Interpreted, a case takes up to half a minute."""
    cases(108, 1, "triton", number)


def repeated() -> None:
    """Parts of several ranks are added in the same order, on buffers that others have used."""
    case = draw(random.Random(0), 2, "triton") | {
        "B": 1, "H": 2, "H_kv": 1, "D": 8, "dtype": torch.bfloat16, "q_sizes": [9, 6],
        "k_sizes": [9, 6], "causal": True, "window": None, "cu_seqlens": None, "needs": NEEDS[0],
    }  # fmt: skip
    first = attention_case(case, weft.ulysses_attention)
    attention_case(case | {"causal": False, "D": 12}, weft.ulysses_attention)
    again = attention_case(case, weft.ulysses_attention)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.ranks(2)
@pytest.mark.slow
def test_one_launch_gives_the_same_bits_again() -> None:
    repeated()


@pytest.mark.ranks(2)
def test_a_rank_without_heads() -> None:
    """Its part of a backward is as many swaps as the others', also where those have no gradient of
    one, and where what was not kept is computed again."""
    x = torch.ones(1, 1, 3, 4, requires_grad=True)
    for engine in ("host", "generic"):
        with weft.engine(engine):  # type: ignore[arg-type]
            out, lse = weft.ulysses_attention(x, x, x, return_lse=True)
            lse.sum().backward()
            again = checkpoint(lambda: weft.ulysses_attention(x, x, x), use_reentrant=False)
            assert torch.equal(again, out)
            again.sum().backward()
    # Scores of 2, lse of 2 + log 6; its gradient is 1 / 2 for q, and for the keys as much. That of
    # averages of ones is 1 for the values.
    torch.testing.assert_close(x.grad, torch.full_like(x, 2 * (0.5 + 0.5 + 1.0)))


class NoHostTensors(TorchDispatchMode):
    """Refuses what a CUDA graph cannot capture: tensors made of lists, and indexing by them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in (torch.ops.aten.lift_fresh, torch.ops.aten.index), func
        return func(*args, **(kwargs or {}))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("engine", ["host", "generic"])
def test_nothing_that_a_graph_cannot_capture(engine: weft.settings.Engine) -> None:
    """The second call of ops whose heads are no run, with key heads on several ranks, documents."""
    sizes = [4] * dist.get_world_size()
    q = torch.randn(1, 6, 4, 8, requires_grad=True)
    k, v = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in "kv")
    # The host engine's local attention to documents is for CPUs alone.
    documents = [0, 5, sum(sizes)] if engine == "generic" else None
    ops = [weft.ulysses_attention, weft.ring_attention][: 2 if engine == "generic" else 1]
    with weft.engine(engine):
        for guard in (nullcontext(), NoHostTensors()):
            with guard:
                for op in ops:
                    op(q, k, v, sizes=sizes, cu_seqlens=documents).sum().backward()


def two_dims(layout: str) -> None:
    """Heads exchanged along one mesh dim, keys passed round along the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "ranks"))
    host, rank = mesh.get_coordinate()
    q, k, v, grad = (whole((2, H, 29, 8), torch.float32, H) for H in (4, 2, 2, 4))
    expected = [x.double().requires_grad_() for x in (q, k, v)]
    out, _ = attention_reference(*expected, causal=True)
    out.backward(grad.double())

    def mine(x: torch.Tensor) -> torch.Tensor:
        sizes = weft.kernels.zigzag_sizes(29, 2) if layout == "zigzag" else chunk_sizes(29, 2)
        part = shard(x, sizes, layout, host, False)
        return part.split(chunk_sizes(part.shape[2], 2), 2)[rank]

    ours = [mine(x).clone().requires_grad_() for x in (q, k, v)]
    y = weft.ulysses_attention(
        *ours, mesh["ranks"], ring_group=mesh["hosts"], causal=True, layout=layout
    )
    y.backward(mine(grad))
    torch.testing.assert_close(y, mine(out).float(), rtol=1e-5, atol=1e-5)
    for x, whole_x in zip(ours, expected, strict=True):
        torch.testing.assert_close(x.grad, mine(whole_x.grad).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_two_dims(layout: str) -> None:
    two_dims(layout)


def on_two_hosts() -> None:
    with on_hosts("AABB"):
        told = weft.explain(lambda: [two_dims(layout) for layout in ("contiguous", "zigzag")])
    ways = {(each.op, each.engine) for each in told}
    assert {("ulysses_attention", "host"), ("ring_attention", "hosts")} <= ways, ways


def test_heads_inside_hosts_and_a_ring_between(ranks: Any) -> None:
    ranks(4, on_two_hosts)


@pytest.mark.parametrize("engine", ["host", "generic"])
def test_schedules(engine: weft.settings.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """On virtual ranks, checked for races: two calls on the same buffers, one key head for all."""
    if engine == "generic":
        monkeypatch.delattr(swaps, "exchange")  # by the process group alone
    cases = []
    for seed in range(2):
        q, k, v = (whole((1, H, 9, 4), torch.float32, seed + H) for H in (3, 1, 1))
        theirs = [x.double().requires_grad_() for x in (q, k, v)]
        out, _ = attention_reference(*theirs, causal=True)
        out.sum().backward()
        cases.append(((q, k, v), [out.detach(), *(x.grad for x in theirs)]))

    def body(rank: int) -> None:
        def mine(x: torch.Tensor) -> torch.Tensor:
            return x.split(chunk_sizes(9, 3), 2)[rank]

        for inputs, expected in cases:
            parts = [mine(x).clone().requires_grad_() for x in inputs]
            out = weft.ulysses_attention(*parts, causal=True)
            out.sum().backward()
            for actual, wanted in zip((out, *(x.grad for x in parts)), expected, strict=True):
                torch.testing.assert_close(actual, mine(wanted).float(), rtol=1e-5, atol=1e-5)

    with weft.engine(engine):
        sim.run(3, body, schedules=20)


@needs_interpreter
def test_every_byte_crosses_the_link_once() -> None:
    """q, k and v of one head come, and out and lse of the other go, by way of their readers."""
    assert link_bytes(2, 2, weft.ulysses_attention) == 512 * (4 * 16 * 4 + 4)


@pytest.mark.ranks(2)
def test_errors() -> None:
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 3, 3, 8)
    with pytest.raises(ValueError, match="H_kv must divide H"):
        weft.ulysses_attention(q, k, k)
    with pytest.raises(ValueError, match="length of every rank's shard"):
        weft.ulysses_attention(q, q, q, sizes=[1, 2])
    with pytest.raises(ValueError, match="without ring_group"):
        weft.ulysses_attention(q, q, q, layout="zigzag")
