"""Experts of others under the pass: with counts first, as torchtitan's, and in equal shares."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import (
    all_to_all_single_autograd,
)
from torch.utils._pytree import tree_map_only

import weft
from tests.kernels.compiled_models import Experts, routed
from tests.kernels.test_compile_models import by_pass
from weft.kernels.graphs.receipts import Receipts

H, F = 16, 24


class Shares(nn.Module):
    """An expert a rank, which takes as many tokens of each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, F), nn.Linear(F, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        group = dist.group.WORLD
        rows = all_to_all_single_autograd(x, None, None, group)
        made = self.down(torch.relu(self.up(rows)))
        y: torch.Tensor = all_to_all_single_autograd(made, None, None, group)
        return x + y


def step(call: Any, model: nn.Module, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """The result, and the gradients of what is given and of the weights."""
    leaves = [g.clone().requires_grad_(g.is_floating_point()) for g in given]
    y = call(*leaves)
    floats = [g for g in leaves if g.requires_grad]
    return [
        y.detach(),
        *torch.autograd.grad(y.float().square().sum(), [*floats, *model.parameters()]),
    ]


def in_fp32(given: torch.Tensor) -> torch.Tensor:
    return given.float() if given.is_floating_point() else given


def held(wide: bool = False, chunks: bool = False, gpus: bool = False) -> list[Any]:
    """The graphs' receipts; results are bitwise those of torch's own collectives.

    Args:
        wide: whether tokens are in fp32, and are cast to be multiplied.
        chunks: of `Chunks` alone.
        gpus: whether graphs are told that they are for GPUs.
    """
    found = []
    tokens = 9 + dist.get_rank()
    inputs: dict[type[nn.Module], list[list[torch.Tensor]]] = {
        Experts: [routed(tokens, None), routed(tokens, 2), routed(tokens, 0)],
        Shares: [[torch.randn(6, H)]],
    }
    if chunks or gpus:
        inputs = {Chunks if chunks else Experts: inputs[Experts]}
    if chunks:
        inputs = {Chunks: [[*map(in_fp32, given)] for given in inputs[Chunks]]}
    if wide:
        inputs = {Experts: [[*map(in_fp32, routed(9, None))]]}
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for kind, calls in inputs.items():
            torch.manual_seed(0)
            model, results = kind(), []
            graphs: list[Receipts] = []
            for backend in by_pass(None), by_pass(graphs, first=on_gpus if gpus else None):
                torch._dynamo.reset()
                run = torch.compile(model, backend=backend, fullgraph=True)
                results.append([step(run, model, given) for given in calls])
            plain = [step(model, model, given) for given in calls]
            for torchs, mine, eager in zip(*results, plain, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(torchs, mine, strict=True))
                if not (chunks and torch.__version__ < "2.12"):  # torch compiles them wrong
                    torch.testing.assert_close(mine, eager, rtol=3e-2, atol=3e-2)
            found.append([[(r.fused, r.why) for r in each] for each in graphs])
    return found


class Moved(torch.autograd.Function):
    """Rows into a tensor that is given, and back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, receives: list[int], sends: list[int]) -> torch.Tensor:
        ctx.sizes = receives, sends
        y = x.new_empty(sum(receives), x.shape[1])
        dist.all_to_all_single(y, x, receives, sends)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:  # type: ignore[override]
        receives, sends = ctx.sizes
        dx = dy.new_empty(sum(sends), dy.shape[1])
        dist.all_to_all_single(dx, dy.contiguous(), sends, receives)
        return dx, None, None


class Chunks(nn.Module):
    """As Megatron has them: all ranks gather counts, rows are cut by these and joined by expert.

    Each expert has layers of its own.
    """

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.experts, own = experts, experts // dist.get_world_size()
        two = nn.Linear(H, F, bias=False), nn.Linear(F, H)
        self.own = nn.ModuleList(nn.Sequential(*two) for _ in range(own))

    def joined(self, rows: torch.Tensor, sizes: list[int], order: list[int]) -> torch.Tensor:
        parts = rows.split(sizes)
        return torch.cat([parts[i] for i in order])

    def forward(self, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        (W, rank), own = (dist.get_world_size(), dist.get_rank()), len(self.own)
        order = ids.view(-1).argsort(stable=True)
        counts = torch.nn.functional.one_hot(ids.view(-1), self.experts).sum(0)
        every = counts.new_empty(W * self.experts)
        dist.all_gather_into_tensor(every, counts)
        theirs = every.view(W, -1)[:, rank * own : (rank + 1) * own].contiguous()
        sends, receives = counts.view(W, -1).sum(1).tolist(), theirs.sum(1).tolist()
        rows = Moved.apply(x[order // ids.shape[1]], receives, sends)
        by_expert = [r * own + e for e in range(own) for r in range(W)]
        by_rank = [e * W + r for r in range(W) for e in range(own)]
        rows = self.joined(rows, theirs.view(-1).tolist(), by_expert)
        tokens = rows.split(theirs.sum(0).tolist())
        made = torch.cat([one(given) for one, given in zip(self.own, tokens, strict=True)])
        made = self.joined(made, theirs.t().reshape(-1).tolist(), by_rank)
        back = Moved.apply(made, sends, receives)
        back = back * scores.view(-1)[order].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, order // ids.shape[1], back)


def on_gpus(joint: Any) -> None:
    """What a graph is told of its tensors; it still runs on those of CPUs."""
    for node in joint.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = tree_map_only(FakeTensor, moved_to_gpu, node.meta["val"])


def moved_to_gpu(fake: Any) -> Any:
    with fake.fake_mode:
        steps = fake.stride()
        return torch.empty_strided(fake.shape, steps, dtype=fake.dtype, device="cuda")


MOVED = ("all_to_all", "rows of matmuls, through shared memory")


SEND, BACK = "dispatch_grouped_matmul", "grouped_matmul_combine"
BOTH_WAYS = [
    [(SEND, "2 matmuls"), (BACK, "a matmul"), (SEND, "1 matmul"), (BACK, "rows alone")],
    [MOVED],  # counts
]


def test_rows_of_experts_become_fused_ops(ranks: Any) -> None:
    for experts, shares in ranks(2, held, timeout_s=300):
        assert [each for each in experts if each] == BOTH_WAYS
        assert shares == [[MOVED] * 2, [MOVED] * 2]


@pytest.mark.slow
def test_rows_of_experts_that_are_cast(ranks: Any) -> None:
    for count in 2, 4:  # four ranks have an expert each
        for (experts,) in ranks(count, held, True, timeout_s=300):
            assert [each for each in experts if each] == BOTH_WAYS


ALONE = [(SEND, "rows alone"), (BACK, "rows alone")]


@pytest.mark.slow
def test_rows_that_are_cut_by_counts_and_joined(ranks: Any) -> None:
    """Experts with layers of their own: both ways of the forward and of the gradient."""
    for (chunks,) in ranks(2, held, False, True, timeout_s=300):
        told = [each for graph in chunks for each in graph if each[0] in (SEND, BACK)]
        moves = 4 if torch.__version__ >= "2.12" else 3  # torch 2.11 loses the last one's gradient
        assert told == [*ALONE, *ALONE][:moves]


def test_rows_of_experts_on_gpus(ranks: Any) -> None:
    """A graph that is told so: it has room for as many rows as it is told, and no more."""
    for (experts,) in ranks(2, held, False, False, True, timeout_s=300):
        assert next(graph for graph in experts if graph) == BOTH_WAYS[0]


class ByRank(Experts):
    """Rows stay as they come, which is another order than that of two experts a rank."""

    def place(self, theirs: torch.Tensor, count: int) -> torch.Tensor:
        return torch.arange(count)


class Dropping(Experts):
    """What goes to a rank has a limit, which tables of counts need not reach."""

    def sent(self, counts: torch.Tensor) -> torch.Tensor:
        return super().sent(counts).clamp(max=1000)


class Inverse(Experts):
    """Rows are told where they go, and taken back from there."""

    def place(self, theirs: torch.Tensor, count: int) -> torch.Tensor:
        place = super().place(theirs, count)
        return torch.empty_like(place).index_put((place,), torch.arange(count))

    def ordered(self, rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(rows).index_put((place,), rows)

    def restored(self, made: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        return made[place]


def ordered_otherwise(kind: type[Experts], strict: bool = False) -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, given, graphs = kind().requires_grad_(False), routed(9, None), list[Receipts]()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        if strict:
            try:
                torch.compile(model, backend=weft.compile_backend, options={"strict": True})(*given)
            except Exception as error:
                return str(error)
        made = torch.compile(model, backend=by_pass(graphs), fullgraph=True)(*given)
    assert torch.equal(made, model(*given))
    return [[(r.fused, r.why) for r in each] for each in graphs if each]


def test_an_order_that_is_not_that_of_experts_stays(ranks: Any) -> None:
    """Rows move by themselves, and the receipt says why."""
    whys = {
        ByRank: [
            "its order is not that of experts",
            "its rows were not sent here by the same counts",
        ],
        Dropping: ["its order is made of more than counts"] * 2,
    }
    for kind, told in whys.items():
        alone = [(MOVED[0], f"{MOVED[1]}: {why}") for why in told]
        for found in ranks(2, ordered_otherwise, kind, timeout_s=300):
            assert found == [[MOVED, *alone]]


@pytest.mark.slow
def test_strict_tells_of_an_order_that_is_not_that_of_experts(ranks: Any) -> None:
    for error in ranks(2, ordered_otherwise, ByRank, True, timeout_s=300):
        assert "strict=True" in error and "its order is not that of experts" in error


@pytest.mark.slow
def test_an_order_may_be_told_by_its_inverse(ranks: Any) -> None:
    fused = [(SEND, "2 matmuls"), (BACK, "a matmul")]
    for found in ranks(2, ordered_otherwise, Inverse, timeout_s=300):
        assert found == [[*fused, MOVED]]


@pytest.mark.ranks(2)
def test_rows_that_are_not_as_counted() -> None:
    ids, route = torch.zeros(3, 1, dtype=torch.int32), torch.ops.weft.route
    with pytest.raises(ValueError, match=r"\[5, 5\] rows come to the ranks, but \[6, 0\]"):
        route(ids, 0, dist.group.WORLD.group_name, 1, None, None, 2, 5)
