"""Experts' fused ops against a loop over tokens in float64, forward and every gradient."""

from __future__ import annotations

import copy
import random
import time
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from needs import needs_interpreter
from torch.nn import functional

import weft
from weft import sim
from weft.collectives import chunk_sizes, resolve, workspace
from weft.collectives.memory import repeatable
from weft.collectives.memory.workspace import Workspace
from weft.kernels import route
from weft.kernels.expert_kernels import combine_launch, dispatch_launch, few_tokens_launch
from weft.kernels.experts import launched
from weft.kernels.experts import routing as routing_module
from weft.kernels.experts.dispatch import dispatch_grouped_matmul_reference

ENGINES = ("host", "generic", pytest.param("triton", marks=needs_interpreter))
K, N, H = 24, 20, 28  # of tokens, of an expert's hidden features, of results


def normal(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def routes(T: int, k: int, E: int, kind: str, seed: int) -> torch.Tensor:
    """Ids (T, k) of each kind that a router, or a test, may come to."""
    rand = random.Random(seed)
    if kind == "all to one":
        return torch.full((T, k), E - 1)
    if kind == "none":
        return torch.full((T, k), -1)
    ids = [[rand.randrange(E) for _ in range(k)] for _ in range(T)]  # duplicates, too
    if kind == "padding":
        ids = [[-1 if rand.random() < 0.4 else id for id in row] for row in ids]
    if kind == "few":
        ids = [[id % 2 for id in row] for row in ids]
    return torch.tensor(ids, dtype=torch.int64).reshape(T, k)


def travelled(x: torch.Tensor) -> torch.Tensor:
    """x as it arrives in fp8, within what e4m3 rounds: 4 bits, or the last one below 2**-6."""
    scale = x.float().abs().amax(1, keepdim=True) / 448
    made = ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)
    wide, eps = x.double(), torch.finfo(x.dtype).eps
    assert ((made.double() - wide).abs() <= (2**-4 + eps) * wide.abs() + 2**-10 * scale).all()
    return made


class Problem:
    """Operands of all ranks, in any dtype: `E` experts on `W // tp` sets of ranks."""

    def __init__(self, case: dict[str, Any], W: int) -> None:
        self.W, self.tp, self.dtype = W, case.get("tp", 1), case.get("dtype", torch.float32)
        self.k, self.E = case.get("k", 2), case.get("E", 5)
        tokens = case["tokens"]
        kind = case.get("kind", "random")
        self.quantize = case.get("quantize")
        self.xs = [normal((t, K), self.dtype, r) for r, t in enumerate(tokens)]
        self.ids = [routes(t, self.k, self.E, kind, r) for r, t in enumerate(tokens)]
        self.weights = [
            normal((t, self.k), torch.float32, 100 + r).abs() for r, t in enumerate(tokens)
        ]
        self.gate, self.up = (normal((self.E, K, N), self.dtype, 200 + i) / K**0.5 for i in (0, 1))
        self.down = normal((self.E, N, H), self.dtype, 300) / N**0.5
        self.dys = [normal((t, H), self.dtype, 400 + r) for r, t in enumerate(tokens)]

    def own(self, rank: int) -> tuple[slice, slice]:
        """A rank's experts, and its part of their hidden features."""
        sizes, columns = chunk_sizes(self.E, self.W // self.tp), chunk_sizes(N, self.tp)
        e, part = rank // self.tp, rank % self.tp
        first, column = sum(sizes[:e]), sum(columns[:part])
        return slice(first, first + sizes[e]), slice(column, column + columns[part])

    def exact(self) -> dict[str, list[torch.Tensor]]:
        """Results and gradients in float64, of all ranks; weights' of all experts."""
        arrived = [*map(travelled, self.xs)] if self.quantize else self.xs
        wide = [
            [x.double().requires_grad_() for x in xs]
            for xs in (arrived, self.weights, [self.gate, self.up, self.down])
        ]
        xs, weights, (gate, up, down) = wide
        ys = []
        for x, ids, weight in zip(xs, self.ids, weights, strict=True):
            rows = [x.new_zeros(H) + 0 * x.sum() for _ in range(len(x))]
            for t in range(len(x)):
                for j, e in enumerate(ids[t].tolist()):
                    if e >= 0:
                        h = functional.silu(x[t] @ gate[e]) * (x[t] @ up[e])
                        rows[t] = rows[t] + weight[t, j] * (h @ down[e])
            ys.append(torch.stack(rows) if rows else x.new_zeros(0, H) * 1)
        loss = sum((y * dy.double()).sum() for y, dy in zip(ys, self.dys, strict=True))
        loss = loss + 0 * sum(each.sum() for group in wide for each in group)
        loss.backward()
        return {
            "y": [y.detach() for y in ys],
            "dx": [x.grad for x in xs],
            "dweights": [w.grad for w in weights],
            "dw": [gate.grad, up.grad, down.grad],
        }


def close(name: str, actual: torch.Tensor | None, exact: torch.Tensor, terms: int) -> None:
    """Whether the error is what rounding of intermediate results, and of sums of `terms`, does."""
    assert actual is not None and actual.shape == exact.shape, name
    largest = max(1.0, float(exact.abs().max()) if exact.numel() else 0.0)
    eps = torch.finfo(actual.dtype).eps if actual.dtype != torch.float32 else 2e-6
    torch.testing.assert_close(
        actual.double(), exact, rtol=0, atol=eps * largest * max(4.0, terms**0.5),
        msg=lambda text: f"{name}: {text}",
    )  # fmt: skip


def layer(case: dict[str, Any]) -> list[torch.Tensor]:
    """Forward and backward on this rank, twice on the same memory, against float64."""
    group = resolve(None)
    rank, W = group.rank, group.world_size
    told, exact = Problem(case, W), None
    exact = told.exact()
    experts, columns = told.own(rank)
    time.sleep(0.02 * (rank == case.get("late")))
    results: list[list[torch.Tensor]] = []
    for again in range(2):
        x, weights, gate, up, down = (
            part.detach().clone(memory_format=torch.preserve_format).requires_grad_()
            for part in (
                told.xs[rank],
                told.weights[rank],
                told.gate[experts, :, columns],
                # As nn.Linear and Hugging Face have it: the last dims swapped.
                told.up[experts, :, columns].transpose(1, 2).contiguous().transpose(1, 2),
                told.down[experts, columns],
            )
        )
        with weft.engine(case["engine"]):
            ids = told.ids[rank]
            if again:  # few tokens are routed in the launch of their dispatch, where they can be
                ids = route(ids, told.E, tensor_parallel_size=told.tp)
            h, routing = weft.dispatch_grouped_matmul(
                x, ids, (gate, up), activation="swiglu",
                tensor_parallel_size=told.tp, keep_gathered=bool(again), quantize=told.quantize,
            )  # fmt: skip
            y = weft.grouped_matmul_combine(h, down, weights, routing)
            y.backward(told.dys[rank])
        assert y.dtype == told.dtype
        rows = max(1, len(h))
        close("y", y, exact["y"][rank], told.k)
        close("dx", x.grad, exact["dx"][rank], told.k)
        # A weight's gradient is a sum over N of products, whose terms may cancel.
        close("dweights", weights.grad, exact["dweights"][rank], N) if told.dtype in (
            torch.float32, torch.float64,
        ) else None  # fmt: skip
        for name, w, dw, cut in zip(
            ("gate", "up", "down"), (gate, up, down), exact["dw"],
            ((experts, slice(None), columns),) * 2 + ((experts, columns),), strict=True,
        ):  # fmt: skip
            close(name, w.grad, dw[cut], rows)
        results.append([y.detach(), *(each.grad for each in (x, weights, gate, up, down))])
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)
    return results[0]


CASES = {
    "random": {"tokens": (7, 5, 9, 3)},
    "padding": {"tokens": (7, 5, 9, 3), "kind": "padding", "k": 3},
    "all to one": {"tokens": (6, 1, 4, 2), "kind": "all to one"},
    "none": {"tokens": (3, 2, 4, 1), "kind": "none"},
    "a rank without tokens": {"tokens": (0, 5, 0, 3), "k": 1},
    "no tokens at all": {"tokens": (0, 0, 0, 0)},
    "fewer experts than ranks": {"tokens": (4, 3, 2, 5), "E": 1},
    "experts without rows": {"tokens": (4, 3, 2, 5), "E": 11, "kind": "few"},
    "bfloat16": {"tokens": (7, 5, 9, 3), "dtype": torch.bfloat16},
    "float16": {"tokens": (7, 5, 9, 3), "dtype": torch.float16},
    "float64": {"tokens": (7, 5, 9, 3), "dtype": torch.float64},
    "fp8": {"tokens": (7, 5, 9, 3), "quantize": "fp8", "kind": "padding"},
    "fp8 of bfloat16": {"tokens": (7, 0, 9, 3), "quantize": "fp8", "dtype": torch.bfloat16},
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow_where(engine="triton", name=list(CASES)[2:])
def test_a_layer_against_a_loop_over_tokens(ranks: Any, name: str, engine: str) -> None:
    if (name, engine) == ("float64", "triton"):
        pytest.skip("the kernels add up in float32")
    for W in (2,) if engine == "triton" else (1, 2, 3):
        case = CASES[name] | {"engine": engine, "tokens": CASES[name]["tokens"][:W]}  # type: ignore[index]
        ranks(W, layer, case)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["random", "padding", "none"])
@pytest.mark.slow_where(kind=["padding", "none"])
def test_experts_that_several_ranks_share(ranks: Any, kind: str, engine: str) -> None:
    for W, tp in (2, 2), (4, 2):
        if engine == "triton" and W == 4 and kind != "padding":
            continue  # interpreted it takes long
        tokens = (5, 0, 3, 4)[:W]
        ranks(W, layer, {"tokens": tokens, "tp": tp, "kind": kind, "engine": engine, "k": 3})


def poison() -> None:
    """NaN in all of this rank's memory that experts travel through, while nobody writes there."""
    dist.barrier()
    for channel in ("gather", "scatter", "host gather", "host scatter"):
        ws = workspace(None, 1 << 16, channel=channel)
        for parity in (0, 1):
            ws.tensor(ws.rank, parity, (ws.half_bytes,), torch.uint8).fill_(255)
    dist.barrier()


def random_layers(count: int, engine: str) -> None:
    """Any tokens, down to none, of any experts, whole or cut; one rank comes late."""
    W = resolve(None).world_size
    for index in range(count):
        rand = random.Random(100 * W + index)
        poison()
        case: dict[str, Any] = {
            "engine": engine,
            "tokens": [rand.choice([0, 1, 3, rand.randrange(12)]) for _ in range(W)],
            "kind": ("random", "padding", "all to one", "few", "none")[index % 5],
            "k": rand.randrange(1, 4),
            "E": rand.choice([1, W, 2 * W + 1]),
            "tp": rand.choice([tp for tp in (1, 1, 2, 3, 4) if W % tp == 0]),
            "dtype": rand.choice([torch.float32, torch.bfloat16, torch.float16]),
            "quantize": rand.choice([None, None, "fp8"]),
            "late": rand.randrange(2 * W),
        }
        try:
            layer(case)
        except AssertionError as error:
            error.add_note(f"case {index} of {W} ranks: {case}")
            raise


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "world_size",
    [
        *(pytest.param(W, marks=pytest.mark.sweep) for W in range(1, 8)),
        pytest.param(8, marks=pytest.mark.slow),
    ],
)
def test_random_layers(ranks: Any, world_size: int, engine: str) -> None:
    count = 10 if engine == "triton" else 40
    ranks(world_size, random_layers, count if world_size < 8 else count // 5, engine, timeout_s=900)


def compiled_layer(engine: str) -> None:
    """In one graph as eagerly, for several numbers of tokens and rows."""
    group = resolve(None)
    rank, W = group.rank, group.world_size

    def run(
        x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *parts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up, down = parts
        h, routing = weft.dispatch_grouped_matmul(
            x, ids, (gate, up), activation="swiglu", keep_gathered=True
        )
        y = weft.grouped_matmul_combine(h, down, weights, routing)
        # Those who bring their own matmul, and balance by the load.
        again = weft.kernels.route(ids, 5)
        rows = weft.kernels.dispatch(y[:, :K], again, quantize="fp8")
        out = weft.kernels.grouped_matmul(rows, gate, again.ends)
        return y, weft.kernels.combine(out, None, again) * again.load[0]

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in ((7, 5), (4, 9), (3, 2))[: 2 if engine == "triton" else 3]:
        told = Problem({"tokens": tokens}, W)
        experts, _ = told.own(rank)
        made = []
        for call in (run, compiled):
            leaves = [
                t.detach().clone().requires_grad_()
                for t in (
                    told.xs[rank],
                    told.weights[rank],
                    *(each[experts] for each in (told.gate, told.up, told.down)),
                )
            ]
            with weft.engine(engine):
                results = call(leaves[0], told.ids[rank], *leaves[1:])
                sum(y.square().sum() for y in results).backward()
            made.append([*results, *(leaf.grad for leaf in leaves)])
        for eager, traced in zip(*made, strict=True):
            torch.testing.assert_close(traced, eager, rtol=1e-5, atol=1e-4)


@pytest.mark.slow_where(engine=["host", "triton"])
@pytest.mark.parametrize("engine", ENGINES)
def test_in_a_graph_of_torch_compile(ranks: Any, engine: str) -> None:
    ranks(2, compiled_layer, engine)


def rows_alone(engine: Any) -> None:
    """Two weights that share rows, and rows without a weight: there, and back with weights of 1."""
    group = resolve(None)
    told = Problem({"tokens": (5, 0, 7)[: group.world_size], "kind": "padding"}, group.world_size)
    experts, _ = told.own(group.rank)
    x, ids = told.xs[group.rank].requires_grad_(), told.ids[group.rank]
    with weft.engine(engine):
        weights = [told.gate[experts], told.up[experts]]
        hs, routing = weft.dispatch_grouped_matmul(x, ids, weights, activation="relu")
        rows = weft.kernels.dispatch(x, routing)
        y = weft.kernels.combine(rows, None, routing)
        y.sum().backward()
    assert len(rows) == int(routing.ends[-1]) if len(routing.ends) else not len(rows)
    eye = torch.eye(K, dtype=torch.float64).expand(len(routing.ends), K, K)
    for made, w in (*zip(hs, weights, strict=True), (rows, eye)):
        wide = [each.detach().double() for each in told.xs]
        exact = dispatch_grouped_matmul_reference(wide, told.ids, w.double(), experts.start)
        close("rows", made, exact if w is eye else exact.relu(), K)
    times = (ids >= 0).sum(1, keepdim=True)
    close("y", y, x.detach().double() * times, 1)
    close("dx", x.grad, times.double().expand(-1, K), 1)


def ids_written_to(engine: Any) -> None:
    """Between a routing and what reads its ids: never a wrong result."""
    told, rank = Problem({"tokens": (5, 4), "k": 2}, 2), dist.get_rank()
    experts, _ = told.own(rank)
    leaves = [told.xs[rank], told.up[experts], told.down[experts], told.weights[rank]]
    x, up, down, weights = (each.clone().requires_grad_() for each in leaves)
    overwritten = pytest.raises(ValueError, match=r"topk_ids \(., 2\) were written to after")

    def forward(ids: torch.Tensor, changed: bool = False) -> torch.Tensor:
        h, routing = weft.dispatch_grouped_matmul(x, ids, up)
        if changed:
            ids.zero_()
        return weft.grouped_matmul_combine(h, down, weights, routing)

    with weft.engine(engine):
        wanted = forward(told.ids[rank])
        assert torch.equal(forward(told.ids[rank].clone(), changed=True), wanted)  # int64: a copy
        ids = told.ids[rank].int()
        assert torch.equal(forward(ids), wanted)
        with overwritten:
            forward(ids, changed=True)
        ids.copy_(told.ids[rank])
        y = forward(ids)
        rows = weft.kernels.dispatch(x, routing := route(ids, told.E), quantize="fp8")
        copied = copy.deepcopy(routing)
        ids.zero_()
        # The collectives of the generic engine have kept what they need.
        for late in (rows,) if engine == "generic" else (y, rows):
            with overwritten:
                late.sum().backward()
        with overwritten:
            weft.kernels.dispatch(x, routing)
        assert torch.equal(weft.kernels.dispatch(x, copied, quantize="fp8"), rows)
        forward(ids).sum().backward()


@pytest.mark.parametrize("engine", ENGINES)
def test_ids_that_were_written_to_since(ranks: Any, engine: str) -> None:
    ranks(2, ids_written_to, engine)


@pytest.mark.ranks(2)
def test_ids_of_calls_that_are_made_straight_and_of_cuda_graphs() -> None:
    ids = torch.tensor([[0], [1]], dtype=torch.int32)
    routing = route(ids, 2)
    tensors = [value for value in vars(routing).values() if isinstance(value, torch.Tensor)]
    remade = repeatable._rebuilt(routing, tensors)
    assert remade is not None
    ids.copy_(ids.flip(0))
    with pytest.raises(ValueError, match="were written to"):
        routing.taken_apart()
    again = remade(tensors)
    again.taken_apart()
    ids.copy_(ids.flip(0))
    with pytest.raises(ValueError, match="were written to"):
        again.taken_apart()
    with patch.object(routing_module, "_is_captured", lambda ids: True):
        captured = remade(tensors)
        ids.copy_(ids.flip(0))
        with pytest.raises(ValueError, match="were written to"):
            captured.check_ids()
    captured.check_ids()  # the graph was replayed


def products_beyond_half() -> None:
    """Gradients of weights are sums of products that float16 does not hold."""
    for engine in ("host", "generic"):
        with weft.engine(engine):  # type: ignore[arg-type]
            routing = route(torch.full((2, 1), dist.get_rank()), dist.get_world_size())
            rows = torch.full((routing.count, 4), 300.0, dtype=torch.float16)
            weights = torch.ones(2, 1, requires_grad=True)
            weft.kernels.combine(rows, weights, routing).backward(rows[:2])
        assert weights.grad is not None and weights.grad.tolist() == [[360000.0]] * 2, engine


def test_gradients_of_weights_are_added_up_in_fp32(ranks: Any) -> None:
    ranks(2, products_beyond_half)


def zeros_in_fp8(engine: Any) -> None:
    """Where the CPU flushes subnormal numbers, as the scale of zeros must not be one."""
    torch.set_flush_denormal(True)
    try:
        with weft.engine(engine):
            routing = route(torch.tensor([[0], [1]]), 2)
            rows = weft.kernels.dispatch(torch.zeros(2, K), routing, quantize="fp8")
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(rows, torch.zeros(2, K))


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_of_zeros_in_fp8(ranks: Any, engine: str) -> None:
    ranks(2, zeros_in_fp8, engine)


@pytest.mark.ranks(2)
def test_more_experts_than_can_be_told() -> None:
    for count in (32_768, 40_000, 140_000):
        with pytest.raises(ValueError, match=r"up to 32767 experts in all"):
            route(torch.tensor([[count - 1]]), count)
    assert int(route(torch.tensor([[32_766]]), 32_767).load.sum()) == 2


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_alone_and_weights_that_share_them(ranks: Any, engine: str) -> None:
    for W in (1, 2, 3):
        ranks(W, rows_alone, engine)


@needs_interpreter
@pytest.mark.slow
def test_rows_in_fp8_are_half_the_bytes_of_a_link() -> None:
    """Of 64 tokens a rank, each for one expert there and one at the other, so that 64 come."""
    T, K = 64, 256

    def crossed(dtype: torch.dtype, quantize: Any) -> float:
        def body(rank: int) -> None:
            x, w = torch.zeros(T, K, dtype=dtype), torch.zeros(1, K, 16, dtype=dtype)
            ids = torch.tensor([[0, 1]] * T)
            with weft.engine("triton"):
                weft.dispatch_grouped_matmul(x, ids, w, quantize=quantize, sizes=[T, T])

        timeline = sim.run(2, body, hardware="h100", numerics=False).timeline
        return timeline.summary()["link_bytes"]

    ids = crossed(torch.bfloat16, None) - 2 * T * K
    assert 0 <= ids <= 16 * T  # what the ranks tell each other
    scales = crossed(torch.bfloat16, "fp8") - ids - T * K
    assert 0 <= scales <= 16 * T
    assert crossed(torch.float32, None) == ids + 4 * T * K


def at_the_boundary() -> None:
    """Tokens of which one rank has as many as are few, then one more than these."""
    group, kernels = resolve(None), list[str]()
    told = Problem({"tokens": (5, 2)}, group.world_size)
    experts, _ = told.own(group.rank)
    gate, up, down = (w[experts] for w in (told.gate, told.up, told.down))

    def noted(kernel: Any, programs: int) -> Any:
        kernels.append(kernel.__name__)
        return kernel[(programs,)]

    made = []
    for most, wanted in (
        (5, ["few_tokens_kernel", "push_and_weigh_kernel"]),
        (4, ["dispatch_kernel", "push_kernel", "weigh_kernel"]),
    ):
        kernels.clear()
        with ExitStack() as patches:
            patches.enter_context(weft.engine("triton"))
            for module in (launched, combine_launch):
                assert module.FEW == 256
                patches.enter_context(patch.object(module, "FEW", most))
            for module in (few_tokens_launch, dispatch_launch, combine_launch):
                patches.enter_context(patch.object(module, "launching", noted))
            h, routing = weft.dispatch_grouped_matmul(
                told.xs[group.rank], told.ids[group.rank], (gate, up), activation="swiglu"
            )
            y = weft.grouped_matmul_combine(h, down, told.weights[group.rank], routing)
        assert kernels == wanted
        made.append((h, y, routing.load))
    for few, many in zip(*made, strict=True):
        assert torch.equal(few, many)
    close("y", made[0][1], told.exact()["y"][group.rank], told.k)


@needs_interpreter
def test_few_tokens_end_where_the_constant_says(ranks: Any) -> None:
    """One launch each way, and beyond several, with the same results; which, the ranks agree on."""
    ranks(2, at_the_boundary)


def kept_by() -> None:
    group, keys = resolve(None), list[list[Any]]()

    def noted(ws: Workspace, key: Any, operands: Any, make: Any) -> Any:
        keys[-1].append(key)
        return make()

    for E in (5, 6):
        told = Problem({"tokens": (2, 2), "E": E, "kind": "none"}, group.world_size)
        experts, _ = told.own(group.rank)
        keys.append([])
        with weft.engine("triton"), patch.object(Workspace, "repeat", noted):
            h, routing = weft.dispatch_grouped_matmul(
                told.xs[group.rank], told.ids[group.rank], told.up[experts]
            )
            weft.grouped_matmul_combine(h, told.down[experts], None, routing)
    assert len(keys[0]) == 2
    assert all(five != six for five, six in zip(*keys, strict=True))


@needs_interpreter
def test_kept_launches_are_told_apart_by_the_experts_of_all_ranks(ranks: Any) -> None:
    """Rank 0 has 3 of 5, and 3 of 6."""
    ranks(2, kept_by)


@needs_interpreter
@pytest.mark.slow
def test_tiles_of_experts_start_before_all_rows_are_there() -> None:
    """In virtual time, of tokens that all go to the other rank."""
    T, K = 8192, 256  # several turns of the programs that fetch rows

    def body(rank: int) -> None:
        # float16: rows in bfloat16 would come first, for torch's grouped matmul.
        x, w = (torch.empty(shape, dtype=torch.float16) for shape in ((T, K), (1, K, 64)))
        with weft.engine("triton"):
            weft.dispatch_grouped_matmul(x, torch.full((T, 1), 1 - rank), w, sizes=[T, T])

    timeline = sim.run(2, body, hardware="h100", numerics=False, symmetric=True).timeline
    spans = [s for s in timeline.played.spans if s.kernel == "dispatch_kernel" and s.rank == 0]
    tiles = [s for s in spans if s.kind == "arithmetic"]
    multiplying = {s.core for s in tiles}
    fetches = [s for s in spans if s.kind == "moving" and s.core not in multiplying]
    assert tiles and fetches
    assert min(s.start for s in tiles) < max(s.end for s in fetches)
