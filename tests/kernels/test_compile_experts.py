"""Experts of others under the pass: with counts first, as torchtitan's, and in equal shares."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import (
    all_to_all_single,
    all_to_all_single_autograd,
)
from torch.nn import functional

from tests.kernels.test_compile_models import by_pass
from weft.kernels.graphs.receipts import Receipts

H, F, E, K = 16, 24, 4, 2


class Experts(nn.Module):
    """As torchtitan has them: counts first, then rows, put in order by what was counted."""

    def __init__(self) -> None:
        super().__init__()
        own = E // dist.get_world_size()
        sizes = {"up": (own, H, F), "gate": (own, H, F), "down": (own, F, H)}
        for name, size in sizes.items():
            setattr(self, name, nn.Parameter(torch.randn(size).bfloat16() / 4))

    def forward(self, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        parts, group = dist.get_world_size(), dist.group.WORLD
        order = ids.view(-1).argsort(stable=True)
        counts = torch.zeros(E, dtype=torch.int64).index_add(
            0, ids.view(-1), torch.ones_like(order)
        )
        with torch.no_grad():
            theirs = all_to_all_single(counts, None, None, group)
            theirs = torch.ops._c10d_functional.wait_tensor(theirs).view(parts, -1)
            sends = counts.view(parts, -1).sum(1).tolist()
            receives = theirs.sum(1).tolist()
        rows = all_to_all_single_autograd(x[order // K], receives, sends, group)
        lengths = theirs.t().reshape(-1)
        starts = (theirs.view(-1).cumsum(0) - theirs.view(-1)).view(parts, -1).t().reshape(-1)
        block = torch.arange(E).repeat_interleave(lengths, output_size=rows.shape[0])
        place = torch.arange(rows.shape[0]) - (lengths.cumsum(0) - lengths)[block]
        place = place + starts[block]
        ends = theirs.sum(0).cumsum(0).int()
        rows = rows[place]
        gate, up = (torch._grouped_mm(rows, w, offs=ends) for w in (self.gate, self.up))
        made = torch._grouped_mm(functional.silu(gate) * up, self.down, offs=ends)
        back = torch.empty_like(made)
        back[place] = made
        back = all_to_all_single_autograd(back, sends, receives, group)
        back = back * scores.view(-1)[order].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, order // K, back)


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


def routed(tokens: int, to: int | None) -> list[torch.Tensor]:
    """x, ids and scores; all for expert `to` and the one behind, if there is one."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(tokens, H, generator=generator).bfloat16()
    scores = torch.rand(tokens, K, generator=generator).bfloat16()
    ids = torch.rand(tokens, E, generator=generator).topk(K, -1)[1]
    return [x, ids if to is None else torch.tensor([to, to + 1]).repeat(tokens, 1), scores]


def step(call: Any, model: nn.Module, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """The result, and the gradients of what is given and of the weights."""
    leaves = [g.clone().requires_grad_(g.is_floating_point()) for g in given]
    y = call(*leaves)
    floats = [g for g in leaves if g.requires_grad]
    return [
        y.detach(),
        *torch.autograd.grad(y.float().square().sum(), [*floats, *model.parameters()]),
    ]


def held() -> list[list[list[tuple[str, str]]]]:
    """The graphs' receipts; results are bitwise those of torch's own collectives."""
    found = []
    tokens = 9 + dist.get_rank()
    inputs: dict[type[nn.Module], list[list[torch.Tensor]]] = {
        Experts: [routed(tokens, None), routed(tokens, 2), routed(tokens, 0)],
        Shares: [[torch.randn(6, H)]],
    }
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


def test_rows_of_experts_move_through_shared_memory(ranks: Any) -> None:
    moved = ("all_to_all", "rows of matmuls, through shared memory")
    for experts, shares in ranks(2, held):
        assert experts == [[moved] * 3, [moved] * 2]
        assert shares == [[moved] * 2, [moved] * 2]
