"""Experts of others under the pass: with counts first, as torchtitan's, and in equal shares."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import (
    all_to_all_single_autograd,
)

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


def held(wide: bool = False) -> list[list[list[tuple[str, str]]]]:
    """The graphs' receipts; results are bitwise those of torch's own collectives.

    Args:
        wide: whether tokens are in fp32, and are cast to be multiplied.
    """
    found = []
    tokens = 9 + dist.get_rank()
    inputs: dict[type[nn.Module], list[list[torch.Tensor]]] = {
        Experts: [routed(tokens, None), routed(tokens, 2), routed(tokens, 0)],
        Shares: [[torch.randn(6, H)]],
    }
    if wide:
        inputs = {Experts: [[g.float() if g.is_floating_point() else g for g in routed(9, None)]]}
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for kind, calls in inputs.items():
            torch.manual_seed(0)
            model, results = kind(), []
            graphs: list[Receipts] = []
            for backend in by_pass(None), by_pass(graphs):
                torch._dynamo.reset()
                run = torch.compile(model, backend=backend, fullgraph=True)
                results.append([step(run, model, given) for given in calls])
            plain = [step(model, model, given) for given in calls]
            for torchs, mine, eager in zip(*results, plain, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(torchs, mine, strict=True))
                torch.testing.assert_close(mine, eager, rtol=3e-2, atol=3e-2)
            found.append([[(r.fused, r.why) for r in each] for each in graphs])
    return found


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
