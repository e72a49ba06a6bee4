"""ExpertParallel against the same module in one process: torchtitan's experts, transformers'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from dtensors import world
from torch import nn
from torch.nn import functional

from weft.dtensor import DTensor, Replicate, Shard, distribute_tensor
from weft.dtensor.parallel import ExpertParallel, parallelize_module
from weft.kernels import grouped_matmul
from weft.kernels.engine.fp8 import magnitudes, quantized

H, F = 12, 8


class SortedExperts(nn.Module):
    """Called as torchtitan's GroupedExperts: rows sorted by expert, and how many each has."""

    def __init__(self, experts: int, grouped: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_experts, self.grouped = experts, grouped
        self.w1 = nn.Parameter(torch.randn(experts, F, H, dtype=dtype))
        self.w2 = nn.Parameter(torch.randn(experts, H, F, dtype=dtype))
        self.w3 = nn.Parameter(torch.randn(experts, F, H, dtype=dtype))

    def forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        if self.grouped:
            ends = num_tokens_per_expert.cumsum(0, dtype=torch.int32)
            gate, up = (grouped_matmul(x, w.mT, ends) for w in (self.w1, self.w3))
            return grouped_matmul(functional.silu(gate) * up, self.w2.mT, ends)
        counts = num_tokens_per_expert.long().tolist()
        made = [
            (functional.silu(rows @ w1.T) * (rows @ w3.T)) @ w2.T
            for rows, w1, w2, w3 in zip(
                x[: sum(counts)].split(counts), self.w1, self.w2, self.w3, strict=True
            )
        ]
        return functional.pad(torch.cat(made), (0, 0, 0, len(x) - sum(counts)))


class RoutedExperts(nn.Module):
    """Called as transformers' experts: tokens, the experts of each, and their weights."""

    def __init__(self, experts: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_experts = experts
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * F, H, dtype=dtype))
        self.down_proj = nn.Parameter(torch.randn(experts, H, F, dtype=dtype))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        result = torch.zeros_like(hidden_states)
        mask = functional.one_hot(top_k_index, self.num_experts).permute(2, 1, 0)
        for expert in mask.sum((1, 2)).nonzero().flatten().tolist():
            slot, token = torch.where(mask[expert])
            rows = hidden_states[token]
            gate, up = functional.linear(rows, self.gate_up_proj[expert]).chunk(2, -1)
            rows = functional.linear(functional.silu(gate) * up, self.down_proj[expert])
            result.index_add_(0, token, rows * top_k_weights[token, slot, None])
        return result


def routed(tokens: int, experts: int, k: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Tokens, their experts, and their weights."""
    torch.manual_seed(seed)
    scores = torch.rand(tokens, experts)
    scores[:, -1] -= 0.5  # less is to do for the last
    weights, ids = scores.topk(k)
    return torch.randn(tokens, H, dtype=torch.float64), ids, weights.double()


def by_expert(
    x: torch.Tensor, ids: torch.Tensor, experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A row for each of a token's experts, sorted, and how many each has, as torchtitan does."""
    rows = x.index_select(0, ids.flatten().argsort(stable=True) // ids.shape[1])
    return rows, torch.histc(ids.double(), bins=experts, min=0, max=experts)


def check(module: nn.Module, whole: nn.Module) -> None:
    """The gradients are those of one process, in shards."""
    for (name, ours), theirs in zip(module.named_parameters(), whole.parameters(), strict=True):
        assert isinstance(ours, DTensor) and ours.placements == (Shard(0),)
        assert ours.grad is not None, name
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def pair(make: Any, *args: Any) -> tuple[Any, Any]:
    """A module on all ranks, and the same whole."""
    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(make(*args))
    return modules[0], modules[1]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("experts", [4, 1])
def test_rows_sorted_by_expert(experts: int) -> None:
    """Each rank has its own tokens, as many as it likes, one none; and padding."""
    rank, W = dist.get_rank(), dist.get_world_size()
    module, whole = pair(SortedExperts, experts, False, torch.float64)
    parallelize_module(module, world(), ExpertParallel())
    assert module.num_experts == len(module.w1.to_local())
    told = [routed(tokens, experts, min(2, experts), tokens) for tokens in (5, 0, 7)[:W]]
    for padding in range(2):
        for r, (x, ids, _) in enumerate(told):
            rows, counts = by_expert(x, ids, experts)
            rows = functional.pad(rows, (0, 0, 0, padding)).requires_grad_()
            expected = whole(rows, counts)
            expected.square().sum().backward()
            if r == rank:
                ours = rows.detach().clone().requires_grad_()
                y = module(ours, counts)
                torch.testing.assert_close(y, expected)
                y.square().sum().backward()
                torch.testing.assert_close(ours.grad, rows.grad)
        check(module, whole)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("form", ["own", "replicated", "DTensors", "gathered"])
def test_routed_tokens(form: str) -> None:
    """All ranks' tokens are one batch: rank r has its torch.chunk of it, or all of it."""
    rank, W, mesh = dist.get_rank(), dist.get_world_size(), world()
    module, whole = pair(RoutedExperts, 5, torch.float64)
    layouts = {
        "own": {},
        "replicated": {"input_layouts": Replicate()},
        "DTensors": {"use_local_output": False},
        "gathered": {"input_layouts": Replicate(), "output_layouts": Shard(0)},
    }[form]
    parallelize_module(module, mesh, ExpertParallel(**layouts))  # type: ignore[arg-type]
    x, ids, weights = routed(7, 5, 2, 1)
    x.requires_grad_()
    weights.requires_grad_()
    expected = whole(x, ids, weights)
    seed = torch.randn_like(expected)
    expected.backward(seed)

    def mine(t: torch.Tensor) -> torch.Tensor:
        return t.chunk(W)[rank]

    if form == "DTensors":
        given = [distribute_tensor(t.detach(), mesh, [Shard(0)]) for t in (x, ids, weights)]
    else:
        given = [t.detach().clone() for t in (x, ids, weights)]
        given = list(map(mine, given)) if form == "own" else given
    ours, _, scales = (t.requires_grad_(t.is_floating_point()) for t in given)
    y = module(ours, given[1], scales)
    for _ in range(2):  # recomputed, as checkpointing does
        y = module(ours, given[1], scales)
    cut = form in ("own", "gathered")
    if form == "DTensors":
        assert y.placements == (Shard(0),)
        torch.testing.assert_close(y.full_tensor(), expected)
        y.backward(distribute_tensor(seed, mesh, [Shard(0)]))
    else:
        torch.testing.assert_close(y, mine(expected) if cut else expected)
        y.backward(mine(seed) if cut else seed)
    for actual, exact in (ours.grad, x.grad), (scales.grad, weights.grad):
        actual = actual.full_tensor() if isinstance(actual, DTensor) else actual
        torch.testing.assert_close(actual, mine(exact) if form == "own" else exact)
    check(module, whole)


@pytest.mark.ranks(2)
def test_in_a_graph() -> None:
    rank, mesh = dist.get_rank(), world()
    module, whole = pair(SortedExperts, 4, True, torch.float64)
    parallelize_module(module, mesh, ExpertParallel())
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (6, 9):
        for r in range(2):
            x, ids, _ = routed(tokens + r, 4, 2, r)
            rows, counts = by_expert(x, ids, 4)
            rows.requires_grad_()
            expected = whole(rows, counts)
            expected.square().sum().backward()
            if r == rank:
                ours = rows.detach().clone().requires_grad_()
                y = compiled(ours, counts)
                torch.testing.assert_close(y, expected)
                y.square().sum().backward()
                torch.testing.assert_close(ours.grad, rows.grad)
        check(module, whole)


@pytest.mark.ranks(2)
def test_tokens_travel_in_fp8() -> None:
    module, whole = pair(RoutedExperts, 4, torch.float64)
    parallelize_module(module, world(), ExpertParallel(quantize="fp8"))
    x, ids, weights = routed(5, 4, 2, dist.get_rank())
    rounded, scales = quantized(x, magnitudes(x))
    y = module(x, ids, weights)
    torch.testing.assert_close(y, whole((rounded.float() * scales).double(), ids, weights))
    assert not torch.allclose(y, whole(x, ids, weights))


@pytest.mark.ranks(2)
def test_what_is_no_stack_of_experts() -> None:
    with pytest.raises(NotImplementedError, match="stacks"):
        parallelize_module(nn.Linear(4, 6), world(), ExpertParallel())
    module = parallelize_module(RoutedExperts(4, torch.float32), world(), ExpertParallel())
    with pytest.raises(TypeError, match="got 1 arguments"):
        module(torch.randn(3, H))
    with pytest.raises(ValueError, match=r"topk_weights must be floats \(3, 2\).*got \(3, 1\)"):
        module(torch.randn(3, H), torch.zeros(3, 2, dtype=torch.long), torch.ones(3, 1))
