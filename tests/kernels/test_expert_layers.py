"""ExpertParallelMLP against the experts, in one process, that it is made from."""

from __future__ import annotations

import math
import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from needs import needs_interpreter
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from weft.dtensor import DTensor, Shard, checkpoint, init_device_mesh
from weft.kernels.engine.fp8 import magnitudes, quantized
from weft.kernels.experts import routing

H, F = 10, 14


class MLP(nn.Module):
    """An expert under the names of one of the models."""

    def __init__(self, names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")) -> None:
        super().__init__()
        self.names = names
        for name in names[:-1]:
            self.add_module(name, nn.Linear(H, F, bias=False))
        self.add_module(names[-1], nn.Linear(F, H, bias=False))

    def forward(self, x: torch.Tensor) -> Any:
        *ups, down = (getattr(self, name) for name in self.names)
        if len(ups) == 1:
            return down(functional.gelu(ups[0](x)))
        return down(functional.silu(ups[0](x)) * ups[1](x))


class Stacked(nn.Module):
    """All experts' weights in one: as transformers 5 keeps them, or under other names."""

    def __init__(self, E: int, names: tuple[str, ...] = ("gate_up_proj", "down_proj")) -> None:
        super().__init__()
        self.names = names
        for name in names[:-1]:
            rows = 2 * F if name == "gate_up_proj" else F
            self.register_parameter(name, nn.Parameter(torch.randn(E, rows, H) / H**0.5))
        self.register_parameter(names[-1], nn.Parameter(torch.randn(E, H, F) / F**0.5))
        self.act_fn = nn.GELU() if names in PLAIN else nn.SiLU()

    def expert(self, e: int, x: torch.Tensor) -> torch.Tensor:
        *ups, down = (getattr(self, name)[e] for name in self.names)
        first, *up = (x @ torch.cat(ups).t()).split(F, -1)
        h = self.act_fn(first)
        return (h * up[0] if up else h) @ down.t()


LISTED = {
    "list": ("gate_proj", "up_proj", "down_proj"),
    "mixtral": ("w1", "w3", "w2"),
    "plain": ("up_proj", "down_proj"),
}
STACKED = {
    "stacked": ("gate_up_proj", "down_proj"),
    "torchtitan": ("w1", "w3", "w2"),
    "stacked apart": ("gate_proj", "up_proj", "down_proj"),
    "stacked plain": ("w1", "w2"),
}
PLAIN = LISTED["plain"], STACKED["stacked plain"]  # without gates


def made(kind: str, E: int) -> Any:
    """The same experts on every rank."""
    torch.manual_seed(3)
    if kind in STACKED:
        return Stacked(E, STACKED[kind])
    return nn.ModuleList(MLP(LISTED[kind]) for _ in range(E))


def alone(experts: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """A loop over tokens."""
    rows = [x.new_zeros(H) + 0 * x.sum() for _ in range(len(x))]
    for t, j in torch.cartesian_prod(*(torch.arange(n) for n in ids.shape)).tolist():
        if (e := int(ids[t, j])) >= 0:
            expert = experts.expert if isinstance(experts, Stacked) else lambda e, x: experts[e](x)
            rows[t] = rows[t] + weights[t, j] * expert(e, x[t])
    return torch.stack(rows)


def problem(tokens: list[int], E: int, k: int = 2) -> tuple[torch.Tensor, ...]:
    """x, ids and weights of all ranks' tokens, in float64, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    T = sum(tokens)
    x = torch.randn(T, H, generator=generator, dtype=torch.float64)
    weights = torch.rand(T, k, generator=generator, dtype=torch.float64)
    return x, torch.randint(-1, E, (T, k), generator=generator), weights


def mine(whole: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    return whole.detach().split(tokens)[dist.get_rank()].clone()


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("kind", [*LISTED, *STACKED])
def test_a_layer_is_its_experts(kind: str) -> None:
    """Outputs, all gradients, and weights saved after a step, on whatever number of ranks; of every
    layout that docs/experts.md has, stacked ones as modules and as dicts.
    """
    W = dist.get_world_size()
    for E, tp, engine in ((5, 1, "host"), (1, 1, "generic"), (3, W, "generic"), (4, W, "host")):
        tokens = [3, 0, 4][:W]
        experts = made(kind, E).double()
        options: dict[str, Any] = {"activation": "gelu"} if kind.endswith("plain") else {}
        given = dict(experts.named_parameters()) if kind in STACKED and E < 4 else experts
        layer = weft.ExpertParallelMLP.from_experts(
            given, tensor_parallel_size=tp, keep_gathered=E > 3, **options
        )
        torch.testing.assert_close(layer.state_dict(), experts.state_dict(), rtol=0, atol=0)
        x, ids, weights = problem(tokens, E)
        own = [mine(t, tokens).requires_grad_() for t in (x, weights)]
        with weft.engine(engine):
            y = layer(own[0], mine(ids, tokens), own[1])
            whole = [t.clone().requires_grad_() for t in (x, weights)]
            expected = alone(experts, whole[0], ids, whole[1])
            torch.testing.assert_close(y, mine(expected, tokens))
            y.square().sum().backward()
        expected.square().sum().backward()
        for got, want in zip(own, whole, strict=True):
            assert want.grad is not None
            torch.testing.assert_close(got.grad, mine(want.grad, tokens))
        assert all(parameter.grad.is_contiguous() for parameter in layer.parameters())
        for model in (layer, experts):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        torch.testing.assert_close(layer.state_dict(), experts.state_dict())
        assert layer.last_load is not None
        assert layer.last_load.tolist() == [int((ids == e).sum()) for e in range(E)]


@pytest.mark.ranks(4)
def test_sets_of_ranks_that_share_experts() -> None:
    """2 and 1 of 3 experts, on two ranks each."""
    tokens, experts = [3, 0, 4, 2], made("list", 3).double()
    layer = weft.ExpertParallelMLP.from_experts(experts, tensor_parallel_size=2)
    assert len(layer.own_experts) == (2, 2, 1, 1)[dist.get_rank()]
    torch.testing.assert_close(layer.state_dict(), experts.state_dict(), rtol=0, atol=0)
    x, ids, weights = problem(tokens, 3)
    y = layer(*(mine(t, tokens) for t in (x, ids, weights)))
    torch.testing.assert_close(y, mine(alone(experts, x, ids, weights), tokens))
    y.sum().backward()
    alone(experts, x, ids, weights).sum().backward()
    for model in (layer, experts):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    torch.testing.assert_close(layer.state_dict(), experts.state_dict())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("engine", ["host", "generic"])
def test_weights_of_padding_do_not_count(engine: weft.settings.Engine) -> None:
    layer = weft.ExpertParallelMLP(4, H, F)
    x, ids = torch.randn(3, H), torch.tensor([[0, 3], [2, -1], [-1, -1]])
    weights = torch.full((3, 2), torch.nan).masked_fill(ids >= 0, 0.5).requires_grad_()
    with weft.engine(engine):
        y, expected = layer(x, ids, weights), layer(x, ids, torch.full((3, 2), 0.5))
        assert torch.equal(y, expected) and not y[2].any()
        y.sum().backward()
    assert weights.grad is not None and not weights.grad[ids < 0].any()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["list", "stacked"])
@pytest.mark.parametrize("tp", [1, 2])
def test_states_are_whole_and_load_whole_or_in_parts(kind: str, tp: int) -> None:
    experts, others = made(kind, 3), made(kind, 3)
    with torch.no_grad():
        for parameter in others.parameters():
            parameter.mul_(2)
    layer = weft.ExpertParallelMLP.from_experts(experts, tensor_parallel_size=tp)
    state = others.state_dict()
    layer.load_state_dict(state)
    torch.testing.assert_close(layer.state_dict(), state, rtol=0, atol=0)
    experts.load_state_dict(layer.state_dict())
    # Made on no device, then given storage that is drawn, or that of a state.
    with torch.device("meta"):
        bare = weft.ExpertParallelMLP.from_experts(made(kind, 3), tensor_parallel_size=tp)
    assert all(value.is_meta for value in bare.state_dict().values())
    assert bare.state_dict().keys() == state.keys()
    bare.load_state_dict(state, assign=True)
    torch.testing.assert_close(bare.state_dict(), state, rtol=0, atol=0)
    assert bare.up_proj.untyped_storage().nbytes() == bare.up_proj.numel() * 4
    # This rank's part, in the same names: half of the features, or its experts only.
    own = layer.own_experts
    if kind == "list":
        rows = slice(None) if tp == 1 else slice(7 * dist.get_rank(), 7 * dist.get_rank() + 7)
        parts = {
            f"{e}.{name}.weight": w[:, rows] if name == "down_proj" else w[rows]
            for e in own
            for name in ("gate_proj", "up_proj", "down_proj")
            for w in (experts[e].get_submodule(name).weight.detach() * 3,)
        }
    else:
        parts = {
            "gate_up_proj": torch.cat([layer.gate_proj, layer.up_proj], 1).detach() * 3,
            "down_proj": layer.down_proj.detach() * 3,
        }
    layer.load_state_dict(parts)
    for name, value in layer.state_dict().items():
        torch.testing.assert_close(value, 3 * state[name])
    missing = dict(list(state.items())[1:])
    keys = layer.load_state_dict(missing, strict=False)
    first = [next(iter(state))] if kind == "stacked" or 0 in own else []
    assert keys.missing_keys == first and not keys.unexpected_keys
    with pytest.raises(RuntimeError, match=r"down_proj.* must be whole"):
        layer.load_state_dict({name: value[..., 1:] for name, value in state.items()})
    with pytest.raises(RuntimeError, match="Unexpected"):
        layer.load_state_dict(state | {"more": torch.ones(1)})


@pytest.mark.ranks(2, 3)
def test_rows_that_a_graph_was_told_wrong_are_an_error_on_every_rank() -> None:
    """Before anything is sent: no rank waits for one that has raised."""
    W, rank = dist.get_world_size(), dist.get_rank()
    ids, name = torch.arange(W, dtype=torch.int32).view(W, 1), dist.group.WORLD.group_name
    route = partial(torch.ops.weft.route, ids, 1, name, 1, None, None, None)
    with pytest.raises(ValueError, match=rf"told that \[{W}, {W + 1}.*but \[{W}, {W}.*counts"):
        route(W + (rank == 1))
    assert route(W)[-2].tolist() == [rank] * W


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "engine", ["host", "generic", pytest.param("triton", marks=needs_interpreter)]
)
def test_misuse_is_an_error_on_every_rank(engine: weft.settings.Engine) -> None:
    """Before anything is sent: the next call works."""
    rank, layer = dist.get_rank(), weft.ExpertParallelMLP.from_experts(made("list", 5))
    x, weights = torch.randn(4, H), torch.ones(4, 2)
    ids = torch.tensor([[0, 4]] * 4)
    for message, args in (
        (r"x must be tokens \(\*, 10\)", (x[:, 1:], ids, weights)),
        (r"for the tokens of x \(4, 10\).*got \(3, 2\)", (x, ids[1:], weights[1:])),
        (r"topk_ids must be \(\*, k\)", (x, ids[:, :0], weights[:, :0])),
        (r"topk_weights must be floats .* \(4, 2\)", (x, ids, weights[:, :1])),
        (r"topk_weights must be floats", (x, ids, ids)),
        (r"must be floats .* \(4, 2\) on cpu.*on meta$", (x, ids, weights.to("meta"))),
        (r"topk_ids must be integers", (x, weights, weights)),
        (r"topk_ids must be integers", (x, ids > 0, weights)),
        (r"topk_ids must be integers.*uint16; ", (x, ids.to(torch.uint16), weights)),
        (r"floats of 16 bits or more", (x, ids, weights.to(torch.float8_e4m3fn))),
        (r"w must be torch\.float64 on cpu, like x", (x.double(), ids, weights)),
        # Of one rank, on every rank.
        (r"between 0 and 4.*got 5 on rank 1$", (x, ids + rank, weights)),
        (r"between 0 and 4.*got -2 on rank 1$", (x, ids.clamp(max=0) - 2 * rank, weights)),
        (r"got 32767 on rank 0$", (x, ids + (1 - rank) * 2**32, weights)),
    ):
        with weft.engine(engine), pytest.raises(ValueError, match=message):
            layer(*args)
    with pytest.raises(ValueError, match=r"quantize must be None .* 'int8'"):
        weft.ExpertParallelMLP(5, H, F, quantize="int8")  # type: ignore[arg-type]
    found = weft.kernels.route(ids, 5)
    own, down = len(layer.up_proj), layer.down_proj.mT
    with weft.engine(engine):
        for w in (layer.up_proj.mT[:1], torch.ones(own + 1, H, F)):
            with pytest.raises(ValueError, match=rf"of {own} experts.*but w has {len(w)}$"):
                weft.dispatch_grouped_matmul(x, found, w)
        with pytest.raises(ValueError, match=r"x has 4 tokens on cpu.*are of 4 on meta$"):
            weft.dispatch_grouped_matmul(x, ids.to("meta"), layer.up_proj.mT)
        with pytest.raises(ValueError, match=r"w must be \(experts, K, N\) with K = 10"):
            weft.dispatch_grouped_matmul(x, ids, layer.up_proj)
        h, _ = weft.dispatch_grouped_matmul(x, found, layer.up_proj.mT)
        with pytest.raises(ValueError, match=rf"of {own} experts.*but w has 1$"):
            weft.grouped_matmul_combine(h, down[:1], weights, found)
        with pytest.raises(ValueError, match=r"the routing is of .* rows, but there are"):
            weft.grouped_matmul_combine(h[1:], down, weights, found)
        with pytest.raises(ValueError, match=r"h must be .* and w .*of one dtype"):
            weft.grouped_matmul_combine(h.bfloat16(), down, weights, found)
        with pytest.raises(weft.MismatchError, match=r"(?s)bfloat16.*float32|float32.*bfloat16"):
            wire = torch.float32 if rank else torch.bfloat16
            given = [t.bfloat16() for t in (h, down)]
            weft.grouped_matmul_combine(*given, weights, found, wire_dtype=wire)
    for asked in ({"capacity": 99}, {"sizes": [4, 4]}, {"tensor_parallel_size": 2}):
        with pytest.raises(ValueError, match=f"a routing has its own {next(iter(asked))}"):
            weft.dispatch_grouped_matmul(x, found, layer.up_proj.mT, **asked)
    weft.dispatch_grouped_matmul(x, found, layer.up_proj.mT, dist.group.WORLD)
    with weft.engine(engine), pytest.raises(weft.MismatchError, match=r"quantize.*fp8"):
        weft.dispatch_grouped_matmul(x, ids, layer.up_proj.mT, quantize="fp8" if rank else None)
    layer.capacity = 7
    with pytest.raises(ValueError, match="up to 8 rows, more than capacity=7"):
        layer(x, ids, weights)
    layer.capacity = None
    y = layer(x, ids, weights)
    for check in ("0", "1"):
        with patch.dict(os.environ, WEFT_CHECK=check), weft.engine(engine):
            k = 1 + rank
            with pytest.raises(weft.MismatchError, match=r"\bk 1\b.*\bk 2\b"):
                layer(x + rank, ids[:, :k], weights[:, :k])
            with pytest.raises(weft.MismatchError, match=r"num_experts 5\b.*num_experts 6\b"):
                weft.kernels.route(ids, 5 + rank)  # of which both have 3 here
            with pytest.raises(weft.MismatchError, match=r"float32.*bfloat16|bfloat16.*float32"):
                dtype = torch.bfloat16 if rank else torch.float32
                weft.dispatch_grouped_matmul(x.to(dtype), ids, layer.up_proj.mT.to(dtype))
    with patch.dict(os.environ, WEFT_CHECK="1"):
        with pytest.raises(weft.MismatchError, match="ranks 0, 1 pass bitwise the same"):
            layer(torch.arange(4.0 * H).view(4, H), ids, weights)
        with pytest.raises(weft.MismatchError, match=r"k 1, .*test_expert_.*k 2, .*test_ex"):
            layer(x + rank, ids[:, :k], weights[:, :k])
    torch.testing.assert_close(layer(x, ids, weights), y)


@pytest.mark.ranks(2)
def test_ids_on_a_gpu_are_read_if_calls_are_checked() -> None:
    """Its tensors are played by those of a CPU. Else ids of no expert are as those of nobody."""
    ids = torch.tensor([[0, 4], [1, 4 + dist.get_rank()]])
    gpu = {"on_cpu": lambda x: False, "is_eager": lambda device: True}
    with patch.multiple(routing, **gpu), patch.dict(os.environ, WEFT_CHECK="1"):
        with pytest.raises(ValueError, match=r"between 0 and 4.*got 5 on rank 1$"):
            weft.kernels.route(ids, 5)
        gpu["is_eager"] = lambda device: False  # in the capture of a graph
        with patch.multiple(routing, **gpu):
            assert weft.kernels.route(ids, 5).load.tolist() == [2, 2, 0, 0, 3]


class _Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func.name().removeprefix("aten::"))
        return func(*args, **kwargs or {})


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("tp", [1, 2])
def test_the_host_of_a_gpu_waits_for_no_routing(tp: int) -> None:
    """Its tensors are played by those of a CPU: none comes from the host, none is read by it."""
    rank, W = dist.get_rank(), dist.get_world_size()
    tokens = [3, 0, 5, 1][:W]
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(-1, 6, (tokens[rank], 2), generator=generator)
    roster = routing.rostered(ids, 0, None, tp, num_experts=6)
    wanted = routing.routing_of(roster, None)
    every = weft.collectives.all_gather(roster.topk_ids, sizes=tokens)
    gpu = {"on_cpu": lambda x: False, "all_gather": lambda *args, **options: every}
    with patch.multiple(routing, **gpu), _Names() as names:
        found = routing.routing_of(roster, None)
    assert not names.seen & {"lift_fresh", "lift_fresh_copy", "_local_scalar_dense", "nonzero"}
    rows = len(wanted.rows)
    assert len(found.rows) == 2 * sum(tokens)  # room for all that can come
    assert found.rows_each == wanted.rows_each == max(1, 2 * sum(tokens) // 6)
    for name in ("counts", "ends", "load"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    for name in ("ranks", "rows", "slots"):
        assert torch.equal(getattr(found, name)[:rows], getattr(wanted, name)), name
    with patch.multiple(routing, **gpu):
        assert len(routing.routing_of(roster, 2 * sum(tokens)).rows) == 2 * sum(tokens)
        with pytest.raises(RuntimeError, match="more than capacity=0 rows: raise it"):
            routing.routing_of(roster, 0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("engine", ["host", "generic"])
def test_autocast_rounds_operands_but_no_weight_of_a_token(engine: weft.settings.Engine) -> None:
    layer = weft.ExpertParallelMLP.from_experts(made("stacked", 3))
    x = torch.randn(2, 3, H, requires_grad=True)  # rows, or batches of them
    ids = torch.randint(3, (2, 3, 1))
    third = torch.full((6, 1), 1 / 3, requires_grad=True)
    with weft.engine(engine), torch.autocast("cpu", torch.bfloat16):
        y, whole = layer(x, ids.view(6, 1), third), layer(x, ids, torch.ones(2, 3, 1))
    assert y.dtype == torch.bfloat16 and y.shape == x.shape
    assert torch.equal(y, (whole.float() / 3).bfloat16())
    y.float().square().sum().backward()
    assert x.grad is not None and third.grad is not None
    assert x.grad.dtype == third.grad.dtype == torch.float32
    expected = 2 * (y.detach().float() * whole.detach().float()).sum(-1).view(6, 1)
    torch.testing.assert_close(third.grad, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("tp", [1, 2])
def test_second_derivatives(tp: int) -> None:
    tokens, experts = [3, 2], made("stacked", 3).double()
    layer = weft.ExpertParallelMLP.from_experts(experts, tensor_parallel_size=tp)
    x, ids, weights = problem(tokens, 3)
    own = [mine(t, tokens).requires_grad_() for t in (x, weights)]
    whole = [t.clone().requires_grad_() for t in (x, weights)]
    for y, (x, weights), model in (
        (layer(own[0], mine(ids, tokens), own[1]), own, layer),
        (alone(experts, whole[0], ids, whole[1]), whole, experts),
    ):
        inputs = x, weights, *model.parameters()
        first = torch.autograd.grad(y.sin().sum(), inputs, create_graph=True)
        sum((grad**3).sum() for grad in first[:2]).backward()  # those of a rank's own tokens
    for got, want in zip(own, whole, strict=True):
        torch.testing.assert_close(got.grad, mine(want.grad, tokens))
    gate, up = experts.gate_up_proj.grad.chunk(2, 1)
    grads = {"gate_proj": gate, "up_proj": up, "down_proj": experts.down_proj.grad}
    for name, grad in grads.items():
        torch.testing.assert_close(getattr(layer, name).grad, layer.part(name, grad))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("engine", ["host", "generic"])
def test_gradients_pass_by_the_rounding_to_fp8(engine: weft.settings.Engine) -> None:
    """Those of a layer to which tokens come as they are, but are what fp8 makes of them."""
    tokens, experts = [3, 2], made("stacked", 3).double()
    x, ids, weights = (mine(t, tokens) for t in problem(tokens, 3))
    rounded, scales = quantized(x, magnitudes(x))
    given = {"fp8": x, None: (rounded.float() * scales).double()}
    found = []
    for quantize, tokens_of in given.items():
        layer = weft.ExpertParallelMLP.from_experts(experts, quantize=quantize)
        leaf = tokens_of.clone().requires_grad_()
        with weft.engine(engine):
            y = layer(leaf, ids, weights)
            grads = torch.autograd.grad(
                y.sin().sum(), (leaf, *layer.parameters()), create_graph=True
            )
            second = torch.autograd.grad(sum((g**3).sum() for g in grads), leaf)
        found.append([y, *grads, *second])
    for ours, want in zip(*found, strict=True):
        torch.testing.assert_close(ours, want)
    assert not torch.equal(*given.values())


@pytest.mark.ranks(2)
def test_explain_shows_both_ops() -> None:
    layer = weft.ExpertParallelMLP(4, H, F)
    x, ids, weights = torch.randn(3, H), torch.randint(4, (3, 2)), torch.ones(3, 2)
    for engine in ("host", "generic"):
        with weft.engine(engine):
            told = str(weft.explain(lambda: layer(x, ids, weights).sum().backward()))
        lines = [line for line in told.splitlines() if f": {engine}" in line]
        ops = "dispatch_grouped_matmul", "grouped_matmul_combine"
        assert [any(line.startswith(op) for line in lines) for op in ops] == [True, True], told
        if engine == "host":
            assert all(f"{op} backward" in told for op in ops), told


class Mixtral(nn.Module):
    """As Mixtral has it: a softmax over the best two, and a loss that balances the load."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(H, 5, bias=False)
        self.experts: Any = nn.ModuleList(MLP() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.gate(x)
        ids, weights = weft.topk_router(logits, 2)
        if isinstance(self.experts, nn.ModuleList):
            y, load = alone(self.experts, x, ids, weights), ids.flatten().bincount(minlength=5)
        else:
            y = self.experts(x, ids, weights)
            load = self.experts.last_load
        self.balance = (load / load.sum() * logits.softmax(-1)).sum()
        return x + y


class Mixture(nn.Module):
    """As DeepSeek has it: sigmoid scores, of 2 groups the best one, and a shared expert."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(H, 6, bias=False)
        self.bias = nn.Buffer(torch.zeros(6))
        self.shared = MLP()
        self.experts: Any = nn.ModuleList(MLP() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids, weights = weft.topk_router(
            self.gate(x), 2, scoring="sigmoid", bias=self.bias, groups=2, top_groups=1, scale=2.5
        )
        if isinstance(self.experts, nn.ModuleList):
            y = alone(self.experts, x, ids, weights) + self.shared(x)
            load = torch.bincount(ids.flatten(), minlength=6)
        else:
            y = self.experts(x, ids, weights, shared_experts=self.shared)
            load = self.experts.last_load
        self.bias += 0.01 * (load.double().mean() - load).sign()
        return x + y


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("kind", [Mixtral, Mixture])
@pytest.mark.parametrize("tp", [1, 2])
def test_training_equals_one_process(tp: int, kind: type[nn.Module]) -> None:
    """Models whose load is balanced by a loss, and by biases."""
    rank, layers = dist.get_rank(), []
    tokens = [5, 4] if dist.get_world_size() == 2 else [3, 0, 4, 2]
    for _ in range(2):
        torch.manual_seed(4)
        layers.append(nn.Sequential(kind(), kind()).double())
    model, whole = layers
    for block in model:
        block.experts = weft.ExpertParallelMLP.from_experts(block.experts, tensor_parallel_size=tp)
    cut = {getattr(block.experts, name) for block in model for name in block.experts.cut}
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in layers]
    for step in range(4):
        x = torch.randn(9, H, generator=torch.Generator().manual_seed(step)).double()
        given = (model, x.split(tokens)[rank]), (whole, x)
        losses = [(m(part) - part.roll(1, 1)).square().sum() for m, part in given]
        if kind is Mixtral:
            balances = [sum(block.balance for block in m) for m in (model, whole)]
            losses = [loss + 0.1 * each for loss, each in zip(losses, balances, strict=True)]
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
        for parameter in whole.parameters():
            if parameter.grad is None:  # an expert without tokens
                parameter.grad = torch.zeros_like(parameter)
        for parameter in model.parameters():
            if parameter not in cut:
                parameter.grad = weft.collectives.all_reduce(parameter.grad)
        total = weft.collectives.all_reduce(losses[0].detach())
        torch.testing.assert_close(total, losses[1].detach())
        for optimizer in optimizers:
            optimizer.step()
    assert kind is Mixtral or whole[0].bias.count_nonzero()
    torch.testing.assert_close(model.state_dict(), whole.state_dict())


@pytest.mark.ranks(2)
def test_experts_are_drawn_like_modules() -> None:
    for tp in (1, 2):
        torch.manual_seed(9)
        experts = nn.ModuleList(MLP() for _ in range(3))
        torch.manual_seed(9)
        layer = weft.ExpertParallelMLP(3, H, F, tensor_parallel_size=tp)
        gate, up, down = (
            torch.stack([expert.get_submodule(name).weight for expert in experts])
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        state = layer.state_dict()
        assert list(state) == ["gate_up_proj", "down_proj"]
        torch.testing.assert_close(state["gate_up_proj"], torch.cat([gate, up], 1))
        torch.testing.assert_close(state["down_proj"], down)
        torch.manual_seed(9)
        bare = weft.ExpertParallelMLP(3, H, F, "meta", tensor_parallel_size=tp)
        bare.to_empty(device="cpu")
        bare.reset_parameters()
        torch.testing.assert_close(bare.state_dict(), state)
    assert "num_experts=3, hidden_size=10" in repr(layer) and "7 of 14 features" in repr(layer)


class Clamped(Stacked):
    """As some models of transformers 5, whose weights have the usual names."""

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return functional.silu(gate.clamp(max=10)) * up.clamp(-10, 10)


@pytest.mark.ranks(2)
def test_what_cannot_be_made_parallel_is_refused() -> None:
    biased, gelu, mixed = made("list", 2), made("list", 2), made("list", 2)
    biased[1].up_proj.bias = nn.Parameter(torch.zeros(F))
    gelu[0].act_fn = nn.GELU()
    mixed[1] = made("mixtral", 1)[0]
    up, down = torch.ones(2, F, H), torch.ones(2, H, F)
    turns = Stacked(2)
    turns.is_concatenated = False
    make: Any = weft.ExpertParallelMLP.from_experts
    gpt_oss = {"gate_up_proj": torch.ones(2, H, 2 * F), "down_proj": torch.ones(2, F, H)}
    halves = {"gate_up_proj": up, "down_proj": up[0]}
    for message, call in (
        (r"no other parameters \(biases.*up_proj, up_proj.bias", lambda: make(biased)),
        (r"what MLP does with gate and up, GELU.* is not activation='swiglu'", lambda: make(gelu)),
        (r"what Clamped does with gate and up", lambda: make(Clamped(2))),
        (r"weights of the same names", lambda: make(mixed)),
        (r"keeps features of gate and up in turn", lambda: make(turns)),
        (r"gate_up_proj must be \(2, 20, 14\).*transposed.*gpt-oss", lambda: make(gpt_oss)),
        (r"other parameters.*gate_up_proj_bias", lambda: make(gpt_oss | {"gate_up_proj_bias": up})),
        (r"must be a list of at least one module.*got Tensor", lambda: make(up)),
        (
            r"have the weights up_proj and down_proj, or w1 and w2, and no",
            lambda: make(gpt_oss, activation="relu"),
        ),
        (r"got w1, w2$", lambda: make({"w1": up, "w2": down})),
        (
            r"plain tensor of floats, got Tensor of torch.int8",
            lambda: make({"w1": up.char(), "w2": down, "w3": up}),
        ),
        (r"down_proj must be \(experts, H, F\)", lambda: make(halves)),
        (r"at least one module.*got list of 0", lambda: make([])),
        (r"activation must be None or one of", lambda: make(gelu, activation="tanh")),
        (
            r"tensor_parallel_size must divide the 2 ranks.*got 3",
            lambda: make(made("list", 2), tensor_parallel_size=3),
        ),
        (r"must be at least 1, got \(0, 14, 10\)", lambda: weft.ExpertParallelMLP(0, H, F)),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_ends_of_experts_must_be_those_of_the_rows() -> None:
    x, w = torch.ones(4, 2), torch.ones(2, 2, 3)
    for ends in ([2, 9], [3, 1]):
        with pytest.raises(ValueError, match=rf"rise up to the 4 rows, got \[{ends[0]}, {ends[1]}"):
            weft.kernels.grouped_matmul(x, w, torch.tensor(ends))
    for wrong in (torch.tensor([1.0, 2.0]), torch.tensor([4])):
        with pytest.raises(ValueError, match="ends must hold an integer for each of 2 experts"):
            weft.kernels.grouped_matmul(x, w, wrong)


def routed_by_hand(logits: list[float], k: int, bias: list[float], groups: int, top: int) -> Any:
    """DeepSeek's rule for one token, in plain numbers."""
    scores = [1 / (1 + math.exp(-x)) for x in logits]
    ranked = [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(logits) // groups
    best = sorted(
        range(groups), key=lambda g: -sum(sorted(ranked[g * size : (g + 1) * size])[-2:])
    )[:top]
    ids = sorted((i for i in range(len(logits)) if i // size in best), key=lambda i: -ranked[i])[:k]
    return ids, [2.5 * scores[i] / sum(scores[j] for j in ids) for i in ids]


def test_the_router_chooses_as_models_do() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 12, generator=generator, dtype=torch.float64)
    bias = torch.randn(12, generator=generator, dtype=torch.float64)
    ids, weights = weft.topk_router(
        logits, 3, scoring="sigmoid", bias=bias, groups=4, top_groups=2, scale=2.5
    )
    for t in range(50):
        wanted = routed_by_hand(logits[t].tolist(), 3, bias.tolist(), 4, 2)
        assert ids[t].tolist() == wanted[0]
        torch.testing.assert_close(weights[t].tolist(), wanted[1])
    # Mixtral's: the softmax of the k largest logits.
    ids, weights = weft.topk_router(logits, 2)
    values, places = logits.topk(2, -1)
    assert torch.equal(ids, places)
    torch.testing.assert_close(weights, values.softmax(-1))
    _, scores = weft.topk_router(logits.bfloat16(), 2, normalize=False)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, logits.bfloat16().float().softmax(-1).topk(2).values)
    x = logits[:4].requires_grad_()
    assert torch.autograd.gradcheck(lambda x: weft.topk_router(x, 3, scoring="sigmoid")[1], x)
    wrong: list[dict[str, Any]] = [{"k": 13}, {"k": 0}, {"k": 4, "groups": 4, "top_groups": 1}]
    wrong += [{"k": 1, "groups": 5}, {"k": 1, "scoring": "relu"}, {"k": 1, "bias": bias[:11]}]
    for options in wrong:
        with pytest.raises(ValueError, match="must"):
            weft.topk_router(logits, **options)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("tp", [1, 2])
def test_experts_are_saved_in_shards(tp: int, tmp_path: Path) -> None:
    """As docs/experts.md says; and loaded as whole tensors."""
    mesh = init_device_mesh("cpu", (4 // tp, tp))

    def shards(layer: Any) -> dict[str, Any]:
        return {
            name: DTensor.from_local(
                value.detach(), mesh, [Shard(0), Shard(2 if name == "down_proj" else 1)]
            )
            for name, value in layer.named_parameters()
        }

    layer, other = (weft.ExpertParallelMLP(7, H, F, tensor_parallel_size=tp) for _ in range(2))
    checkpoint.save(shards(layer), tmp_path)
    checkpoint.load(shards(other), tmp_path)
    torch.testing.assert_close(other.state_dict(), layer.state_dict(), rtol=0, atol=0)
    whole = {name: torch.empty(shape) for name, shape in layer.whole_shapes().items()}
    checkpoint.load(whole, tmp_path)
    for name, value in whole.items():
        torch.testing.assert_close(layer.part(name, value), getattr(layer, name), rtol=0, atol=0)
