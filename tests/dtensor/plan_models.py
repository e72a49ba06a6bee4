"""Small models that `weft.dtensor.plan` is tried on."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from weft.demo.model import Llama, LlamaShape


def llama(layers: int = 2, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The demo's, whose rotations stay complex."""
    torch.manual_seed(0)
    model = Llama(LlamaShape(32, layers, heads=8, kv_heads=4, ffn=64, seq_len=16))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


class Expert(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return y


def routed(logits: Tensor, top: int = 2) -> Tensor:
    """Each token's weights of the experts, zero but for its `top` best: (B, S, experts)."""
    best, index = logits.topk(top, dim=-1)
    return torch.zeros_like(logits).scatter(-1, index, best.softmax(-1))


class Experts(nn.Module):
    """All experts on all tokens, one by one."""

    def __init__(self, width: int, hidden: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(Expert(width, hidden) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        weights = routed(self.router(x)).unsqueeze(-1)
        terms = [weights[..., i, :] * expert(x) for i, expert in enumerate(self.experts)]
        return torch.stack(terms).sum(0)


class StackedExperts(nn.Module):
    """All experts on all tokens, by one product of stacks."""

    def __init__(self, width: int, hidden: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.up = nn.Parameter(torch.randn(count, width, hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(count, hidden, width) * hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        weights = routed(self.router(x)).movedim(-1, 0).unsqueeze(-1)  # (experts, B, S, 1)
        each = x.flatten(0, 1).unsqueeze(0).expand(len(self.up), -1, -1)
        y = functional.silu(each @ self.up) @ self.down
        return (weights * y.unflatten(1, x.shape[:2])).sum(0)


class MixtralBlock(nn.Module):
    def __init__(self, width: int, heads: int, experts: nn.Module) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        h = self.attention_norm(x)
        q, k, v = (
            w(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(mixed.transpose(1, 2).flatten(2))
        y: Tensor = x + self.experts(self.ffn_norm(x))
        return y


class Mixtral(nn.Module):
    """A Mixtral without rotations, whose experts see all tokens."""

    def __init__(
        self, kind: type[nn.Module], layers: int, width: int, heads: int, hidden: int, count: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(48, width)
        self.blocks = nn.ModuleList(
            MixtralBlock(width, heads, kind(width, hidden, count)) for _ in range(layers)
        )
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 48, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def mixtral(kind: type[nn.Module] = Experts, layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return Mixtral(kind, layers, width=16, heads=4, hidden=32, count=4).double()


class Mlp(nn.Module):
    """As small as can be: with biases, and a norm without a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.up(x)))
        return y


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return Mlp().double()


def tokens(batch: int = 4, length: int = 16, vocabulary: int = 48) -> Tensor:
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))
