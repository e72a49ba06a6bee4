"""A training step of a mixture of experts: a shape is tokens a rank, hidden, ffn, experts, top k.

    x (T, H) -> experts' ranks -> silu(x @ gate) * (x @ up) -> @ down -> weighted sum (T, H)

forward, and backward to the tokens, the router's weights, and the experts'. Routes are drawn
evenly, the same for all variants, and experts are cut evenly over the ranks.

Variants:

    weft                    dispatch_grouped_matmul and grouped_matmul_combine
    weft generic            the same on the generic engine
    all_to_all + loop       sort, torch's all_to_all, a matmul for each expert, all_to_all back

The bounds, one after the other: "arithmetic", the same grouped matmuls and activation of as many
local rows, forward and backward; "copies", of rows there and results back, in both directions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional

import weft
from weft.bench import bounds
from weft.bench.problem import INPUTS, Options, Prepared, Spec
from weft.bench.shapes import sized
from weft.kernels import grouped_matmul

NAME = "experts"
WORLD: Literal["ranks", "one"] = "ranks"
SIZES = ("tokens", "hidden", "ffn", "experts", "top_k")

# As Mixtral's experts are, as DeepSeek's, with wide tokens, and with narrow ones.
SHAPES = (
    (512, 512, 1792, 8, 2),
    (256, 512, 256, 32, 8),
    (1024, 1024, 512, 8, 4),
    (4096, 256, 512, 8, 2),
)


def cases(options: Options) -> list[Spec]:
    """One case a shape."""
    entries = options.shapes or (((12, 16, 24, 4, 2),) if options.quick else SHAPES)
    shapes = [sized(entry, SIZES, NAME) for entry in entries]
    for shape in shapes:
        if shape[3] % options.ranks:
            raise ValueError(f"--ranks {options.ranks} must divide the experts of {shape}")
    return [Spec.of_sizes(SIZES, shape, options) for shape in shapes]


class _Layer:
    """A rank's operands, and the layer by each variant; all gradients are results."""

    def __init__(self, spec: Spec, options: Options) -> None:
        tokens, hidden, ffn, self.experts, self.k = (spec.params[name] for name in SIZES)
        self.rank, self.ranks = dist.get_rank(), options.ranks
        # All ranks' tokens are drawn on each, for the oracle: nothing else is common.
        draw = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> torch.Tensor:
            values = torch.randn(shape, generator=draw) / math.sqrt(shape[-2])
            return values.to(options.device, options.dtype)

        self.xs = [drawn(self.ranks, tokens, hidden) * tokens**0.5 for _ in range(INPUTS)]
        self.ids = torch.rand(self.ranks, tokens, self.experts, generator=draw).topk(self.k)[1]
        self.ids = self.ids.to(options.device)
        self.scores = torch.rand(self.ranks, tokens, self.k, generator=draw).to(options.device)
        self.whole = [
            drawn(self.experts, hidden, ffn), drawn(self.experts, hidden, ffn),
            drawn(self.experts, ffn, hidden),
        ]  # fmt: skip
        self.leaves = [
            [x[self.rank].clone(), self.scores[self.rank].clone()]
            + [w.chunk(self.ranks)[self.rank].clone() for w in self.whole]
            for x in self.xs
        ]
        for leaf in (leaf for leaves in self.leaves for leaf in leaves):
            leaf.requires_grad_()

    def step(self, forward: Callable[..., torch.Tensor]) -> Callable[[int], list[torch.Tensor]]:
        """Of y and all gradients, by `forward` of x, ids, scores, gate, up and down."""

        def run(i: int) -> list[torch.Tensor]:
            x, scores, *weights = self.leaves[i]
            y = forward(x, self.ids[self.rank], scores, *weights)
            return [y.detach(), *torch.autograd.grad(y, self.leaves[i], x.detach())]

        return run

    def by_weft(self, engine: Any) -> Callable[[int], list[torch.Tensor]]:
        def forward(x: Any, ids: Any, scores: Any, gate: Any, up: Any, down: Any) -> torch.Tensor:
            with weft.engine(engine):
                h, routing = weft.dispatch_grouped_matmul(x, ids, (gate, up), activation="swiglu")
                return weft.grouped_matmul_combine(h, down, scores, routing)

        return self.step(forward)

    def by_all_to_all(self) -> Callable[[int], list[torch.Tensor]]:
        own = self.experts // self.ranks

        def forward(x: Any, ids: Any, scores: Any, gate: Any, up: Any, down: Any) -> torch.Tensor:
            flat = ids.flatten()
            order = flat.argsort(stable=True)
            sent = torch.bincount(flat, minlength=self.experts).view(self.ranks, own)
            came = torch.empty_like(sent)
            dist.all_to_all_single(came, sent)
            sends, receives = sent.sum(1).tolist(), came.sum(1).tolist()
            world = dist.group.WORLD
            assert world is not None
            rows = all_to_all_single_autograd(x[order // self.k], receives, sends, world)
            expert = torch.arange(own, device=x.device).repeat(self.ranks)
            by_expert = expert.repeat_interleave(came.flatten()).argsort(stable=True)
            parts = rows[by_expert].split(came.sum(0).tolist())
            made = torch.cat(
                [
                    functional.silu(part @ gate[e]) * (part @ up[e]) @ down[e]
                    for e, part in enumerate(parts)
                ]
            )
            results = made[by_expert.argsort()]
            back = all_to_all_single_autograd(results, sends, receives, world)
            slots = back[order.argsort()].view(len(x), self.k, -1)
            weighted: torch.Tensor = (slots * scores.unsqueeze(2)).sum(1)
            return weighted.to(x.dtype)

        return self.step(forward)

    def expected(self) -> list[torch.Tensor]:
        """By a loop over all experts in float64, of inputs 0, for all ranks' tokens."""
        leaves = [each.detach().double().cpu() for each in (self.xs[0], self.scores, *self.whole)]
        x, scores, gate, up, down = (each.requires_grad_() for each in leaves)
        y, ids = torch.zeros_like(x), self.ids.cpu()
        for e in range(self.experts):
            made = (functional.silu(x @ gate[e]) * (x @ up[e])) @ down[e]
            y = y + made * (scores * (ids == e)).sum(2, keepdim=True)
        dx, dscores, *dws = torch.autograd.grad(y, [x, scores, gate, up, down], x.detach())
        mine = [each[self.rank] for each in (y.detach(), dx, dscores)]
        return [*mine, *(dw.chunk(self.ranks)[self.rank] for dw in dws)]

    def arithmetic(self) -> Callable[[int], None]:
        """As many rows as a rank has on average, on local inputs."""
        _, _, gate, up, down = self.leaves[0]
        rows = self.ids[0].numel()
        x = self.xs[0].new_ones(rows, gate.shape[1]).requires_grad_()
        dy = torch.ones_like(x)
        steps = torch.arange(1, len(gate) + 1, device=x.device)
        ends = (steps * rows // len(gate)).int()

        def run(_: int) -> None:
            h = functional.silu(grouped_matmul(x, gate, ends)) * grouped_matmul(x, up, ends)
            y = grouped_matmul(h, down, ends)
            torch.autograd.grad(y, [x, gate, up, down], dy)

        return run


def prepare(spec: Spec, options: Options) -> Prepared:
    """One shape, on this rank."""
    layer = _Layer(spec, options)
    moved = 4 * layer.ids[0].numel() * layer.xs[0].shape[-1] * options.dtype.itemsize
    return Prepared(
        {
            "weft": layer.by_weft("auto"),
            "weft generic": layer.by_weft("generic"),
            "all_to_all + loop": layer.by_all_to_all(),
        },
        {
            "arithmetic": layer.arithmetic(),
            "copies": bounds.copy_of(moved, torch.device(options.device)),
        },
        bound_rule="sum",
        expected=layer.expected,
        tolerance={torch.bfloat16: 4e-2, torch.float16: 6e-3}.get(options.dtype, 1e-4),
        main="weft",
        peer="all_to_all + loop",
    )
