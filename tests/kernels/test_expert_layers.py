"""ExpertParallelMLP against the experts, in one process, that it is made from."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import weft

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
    """As transformers 5 keeps them."""

    def __init__(self, E: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * F, H) / H**0.5)
        self.down_proj = nn.Parameter(torch.randn(E, H, F) / F**0.5)
        self.act_fn = nn.SiLU()

    def expert(self, e: int, x: torch.Tensor) -> torch.Tensor:
        gate, up = (x @ self.gate_up_proj[e].t()).chunk(2, -1)
        return (self.act_fn(gate) * up) @ self.down_proj[e].t()


def made(kind: str, E: int) -> Any:
    """The same experts on every rank."""
    torch.manual_seed(3)
    if kind == "stacked":
        return Stacked(E)
    names = {"list": ("gate_proj", "up_proj", "down_proj"), "mixtral": ("w1", "w3", "w2")}
    return nn.ModuleList(MLP(names.get(kind, ("up_proj", "down_proj"))) for _ in range(E))


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
@pytest.mark.parametrize("kind", ["list", "mixtral", "stacked", "plain"])
def test_a_layer_is_its_experts(kind: str) -> None:
    """Outputs, all gradients, and weights saved after a step, on whatever number of ranks."""
    W = dist.get_world_size()
    for E, tp, engine in ((5, 1, "host"), (1, 1, "generic"), (3, W, "generic"), (4, W, "host")):
        tokens = [3, 0, 4][:W]
        experts = made(kind, E).double()
        options: dict[str, Any] = {"activation": "gelu"} if kind == "plain" else {}
        layer = weft.ExpertParallelMLP.from_experts(
            experts, tensor_parallel_size=tp, keep_gathered=E > 3, **options
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
        for model in (layer, experts):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        torch.testing.assert_close(layer.state_dict(), experts.state_dict())
        assert layer.last_load is not None
        assert layer.last_load.tolist() == [int((ids == e).sum()) for e in range(E)]


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


@pytest.mark.ranks(2)
@pytest.mark.parametrize("engine", ["host", "generic"])
def test_misuse_is_an_error_on_every_rank(engine: weft.settings.Engine) -> None:
    """Before anything is sent: the next call works."""
    rank, layer = dist.get_rank(), weft.ExpertParallelMLP.from_experts(made("list", 5))
    x, weights = torch.randn(4, H), torch.ones(4, 2)
    ids = torch.tensor([[0, 4]] * 4)
    for message, args in (
        (r"x must be tokens \(\*, 10\)", (x[:, 1:], ids, weights)),
        (r"for the tokens of x \(4, 10\).*got \(3, 2\)", (x, ids[1:], weights[1:])),
        (r"topk_ids must be \(\*, k\)", (x, ids[:, :0], weights[:, :0])),
        (r"topk_weights must be floats \(4, 2\)", (x, ids, weights[:, :1])),
        (r"topk_weights must be floats", (x, ids, ids)),
        (r"topk_ids must be integers", (x, weights, weights)),
        (r"topk_ids must be integers", (x, ids > 0, weights)),
        (r"w must be torch\.float64 on cpu, like x", (x.double(), ids, weights)),
        # Of one rank, on every rank.
        (r"between 0 and 4.*got 5 on rank 1$", (x, ids + rank, weights)),
        (r"between 0 and 4.*got -2 on rank 1$", (x, ids.clamp(max=0) - 2 * rank, weights)),
        (r"got 32767 on rank 0$", (x, ids + (1 - rank) * 2**32, weights)),
    ):
        with weft.engine(engine), pytest.raises(ValueError, match=message):
            layer(*args)
    layer.capacity = 7
    with pytest.raises(ValueError, match="up to 8 rows, more than capacity=7"):
        layer(x, ids, weights)
    layer.capacity = None
    y = layer(x, ids, weights)
    for check in ("0", "1"):
        with patch.dict(os.environ, WEFT_CHECK=check), weft.engine(engine):
            k = 1 + rank
            with pytest.raises(weft.MismatchError, match=r"\bk 1|1, 1.*\b2, 1"):
                layer(x + rank, ids[:, :k], weights[:, :k])
            with pytest.raises(weft.MismatchError, match=r"float32.*bfloat16|bfloat16.*float32"):
                weft.dispatch_grouped_matmul(
                    *((x, ids, layer.up_proj.mT) if rank else
                      (x.bfloat16(), ids, layer.up_proj.mT.bfloat16()))
                )  # fmt: skip
    with patch.dict(os.environ, WEFT_CHECK="1"):
        with pytest.raises(weft.MismatchError, match="ranks 0, 1 pass bitwise the same"):
            layer(torch.arange(4.0 * H).view(4, H), ids, weights)
        with pytest.raises(weft.MismatchError, match=r"k 1, .*test_expert_.*k 2, .*test_ex"):
            layer(x + rank, ids[:, :k], weights[:, :k])
    torch.testing.assert_close(layer(x, ids, weights), y)
