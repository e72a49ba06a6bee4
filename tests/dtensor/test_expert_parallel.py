"""ExpertParallel against the same module in one process: torchtitan's experts, transformers'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from dtensors import world
from torch import nn
from torch.nn import functional

import weft
from weft.dtensor import DTensor, Replicate, Shard, distribute_tensor
from weft.dtensor.parallel import ExpertParallel, parallelize_module
from weft.kernels import grouped_matmul
from weft.kernels.engine.fp8 import magnitudes, quantized
from weft.kernels.layers.expert_code import known_experts
from weft.kernels.layers.expert_weights import ExpertLayout

H, F = 12, 8
GATES = {"fused": functional.silu, "as it is": torch.tanh}


class SortedExperts(nn.Module):
    """Called as torchtitan's GroupedExperts: rows sorted by expert, and how many each has."""

    gate = staticmethod(functional.silu)

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
            return grouped_matmul(self.gate(gate) * up, self.w2.mT, ends)
        counts = num_tokens_per_expert.long().tolist()
        made = [
            (self.gate(rows @ w1.T) * (rows @ w3.T)) @ w2.T
            for rows, w1, w2, w3 in zip(
                x[: sum(counts)].split(counts), self.w1, self.w2, self.w3, strict=True
            )
        ]
        return functional.pad(torch.cat(made), (0, 0, 0, len(x) - sum(counts)))


class RoutedExperts(nn.Module):
    """Called as transformers' experts: tokens, the experts of each, and their weights."""

    gate = staticmethod(functional.silu)

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
            rows = functional.linear(self.gate(gate) * up, self.down_proj[expert])
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


def pair(make: Any, *args: Any, code: str = "fused") -> tuple[Any, Any]:
    """A module on all ranks, and the same whole, with code that the fused ops know, or not."""
    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(make(*args))
        modules[-1].gate = GATES[code]
    return modules[0], modules[1]


class RoundedExperts(SortedExperts):
    """In bf16 whatever the weights are, as torchtitan's GroupedExperts multiply."""

    def forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        ends = num_tokens_per_expert.cumsum(0, dtype=torch.int32)
        w1, w2, w3 = (w.bfloat16().mT for w in (self.w1, self.w2, self.w3))
        gate, up = (grouped_matmul(x.bfloat16(), w, ends) for w in (w1, w3))
        return grouped_matmul(self.gate(gate) * up, w2, ends).type_as(x)


class PlainExperts(nn.Module):
    """Without gates, and with features in the first dim of w1: what `x @ w1` takes."""

    gate = staticmethod(functional.gelu)

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.transposed = transposed
        self.w1 = nn.Parameter(torch.randn(4, *((H, F) if transposed else (F, H))))
        self.w2 = nn.Parameter(torch.randn(4, *((F, H) if transposed else (H, F))))

    def forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        ends = num_tokens_per_expert.cumsum(0, dtype=torch.int32)
        w1, w2 = (w if self.transposed else w.mT for w in (self.w1, self.w2))
        return grouped_matmul(self.gate(grouped_matmul(x, w1, ends)), w2, ends)


def _in_fewer_bits(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale.clamp(min=1e-9)).round() * scale


# Nearly silu, or silu only now and then.
OTHER_GATES = (
    torch.tanh,
    functional.gelu,
    lambda gate: functional.silu(gate.clamp(max=9)),
    lambda gate: functional.silu(gate) * 1.02,
    lambda gate: _in_fewer_bits(functional.silu(gate)),
    lambda gate: functional.dropout(functional.silu(gate), 0.05),
)


class CountingExperts(SortedExperts):
    """Of few rows each: what is over is zero."""

    def forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        most, ends = len(x) // 2, num_tokens_per_expert.cumsum(0)
        first = (ends - num_tokens_per_expert).repeat_interleave(num_tokens_per_expert)
        made = super().forward(x, num_tokens_per_expert)
        return made * (torch.arange(len(x)) - first < most).unsqueeze(1)


class WideExperts(RoundedExperts):
    """Returns bf16 whatever it is given."""

    def forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        return super().forward(x, num_tokens_per_expert).bfloat16()


def test_code_that_does_more_is_not_known() -> None:
    plain = SortedExperts(3, False, torch.float32)
    assert known_experts(plain) is not None
    assert known_experts(CountingExperts(3, False, torch.float32)) is None
    assert known_experts(WideExperts(3, False, torch.float32)) is None
    plain.register_buffer("seen", torch.zeros(3))
    assert known_experts(plain) is None
    dropping = SortedExperts(3, False, torch.float32)
    dropping.drop = nn.Dropout(0.2).eval()
    dropping.gate = lambda gate: dropping.drop(functional.silu(gate))  # type: ignore[assignment]
    assert known_experts(dropping) is None and not dropping.drop.training
    without_gates = PlainExperts(False)
    others = lambda z: z * torch.sigmoid(1.702 * z), lambda z: functional.leaky_relu(z, 0.01)
    for without_gates.gate in others:
        assert known_experts(without_gates) is None


def test_what_the_code_of_experts_computes() -> None:
    gated, merged = ("w1", "w3", "w2"), ("gate_up_proj", "down_proj")
    for dtype in torch.float64, torch.float32, torch.bfloat16:
        for experts, names in (
            (SortedExperts(3, False, dtype), gated),
            (SortedExperts(3, True, dtype), gated),
            (RoutedExperts(3, dtype), merged),
        ):
            assert known_experts(experts) == (ExpertLayout(names), "swiglu", None)
            assert experts.num_experts == 3
            for experts.gate in OTHER_GATES:
                assert known_experts(experts) is None
    with torch.device("meta"):
        rounded = RoundedExperts(3, False, torch.float32)
    assert known_experts(rounded) == (ExpertLayout(gated), "swiglu", torch.bfloat16)
    assert known_experts(PlainExperts(False)) == (ExpertLayout(("w1", "w2")), "gelu", None)
    assert known_experts(PlainExperts(True)) is None
    weights_at_the_input = RoutedExperts(3, torch.float32)
    own = weights_at_the_input.forward
    weights_at_the_input.forward = (
        lambda x, ids, weights: own(  # type: ignore[method-assign]
            x * weights[:, :1], ids, torch.ones_like(weights)
        )
    )
    assert known_experts(weights_at_the_input) is None


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_which_experts_are_fused() -> None:
    """By what is explained; and in the dtype that the code multiplies in."""
    x, ids, weights = (t.float() if t.is_floating_point() else t for t in routed(5, 4, 2, 0))
    rows, counts = by_expert(x, ids, 4)
    fused = "dispatch_grouped_matmul", "grouped_matmul_combine"
    for make, *args in (RoundedExperts, True, torch.float32), (RoutedExperts, torch.float32):
        call = (rows, counts) if make is RoundedExperts else (x, ids, weights)
        for code in GATES:
            module, whole = pair(make, 4, *args, code=code)
            parallelize_module(module, world(), ExpertParallel())
            told = weft.explain(module, *call)
            made = [each for each in told if each.op in fused]
            # Rows alone have no matmul: N is 0.
            columns = [
                int(each.shapes.split(" @ ")[1].split(",")[0].split("x")[1]) for each in made
            ]
            assert [each.op for each in made] == [*fused]
            assert columns == ([2 * F, H] if code == "fused" else [0, 0]), told
            assert told.result.dtype == torch.float32
            near = {"rtol": 2e-2, "atol": 2e-1} if make is RoundedExperts else {}
            torch.testing.assert_close(told.result, whole(*call), **near)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(("experts", "code"), [(4, "fused"), (1, "fused"), (4, "as it is")])
def test_rows_sorted_by_expert(experts: int, code: str) -> None:
    """Each rank has its own tokens, as many as it likes, one none; and padding."""
    rank, W = dist.get_rank(), dist.get_world_size()
    module, whole = pair(SortedExperts, experts, False, torch.float64, code=code)
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
@pytest.mark.parametrize("code", GATES)
@pytest.mark.parametrize("form", ["own", "replicated", "DTensors", "gathered"])
def test_routed_tokens(form: str, code: str) -> None:
    """All ranks' tokens are one batch: rank r has its torch.chunk of it, or all of it."""
    rank, W, mesh = dist.get_rank(), dist.get_world_size(), world()
    module, whole = pair(RoutedExperts, 5, torch.float64, code=code)
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
    with pytest.raises(ValueError, match=r"topk_weights must be floats .*\(3, 2\).*got \(3, 1\)"):
        module(torch.randn(3, H), torch.zeros(3, 2, dtype=torch.long), torch.ones(3, 1))
