"""The training step of a model by `weft.dtensor.plan`, beside plans that people make by hand.

    Llama              the demo's
    Mixtral            the same with four experts a layer, all on all tokens

Variants: the plan by this machine's rates; Megatron's plan, torch's default, FSDP alone and data
parallelism alone, as far as the model and the ranks allow them. The bound, "arithmetic", is the
step of one process with a rank's share of the sequences.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from weft.bench.blocks.tensor_parallel import mesh_of_ranks
from weft.bench.problem import Call, Options, Prepared, Spec, arrived
from weft.bench.rows import Case
from weft.bench.suites.model import demo_sizes, demo_tokens, seeded_llama
from weft.demo.model import Block, LlamaShape

NAME = "plan"
WORLD: Literal["ranks", "one"] = "ranks"

_MAIN, _PEER, _EXPERTS = "plan", "torch default", 4


def cases(options: Options) -> list[Spec]:
    """Two models of one shape."""
    sizes, params = demo_sizes(NAME, options)
    return [
        Spec(f"{name} {sizes}", params | {"experts": experts})
        for name, experts in (("Llama", 0), ("Mixtral", _EXPERTS))
    ]


class _Experts(nn.Module):
    """Feed-forward layers, each token's results weighted by its two best."""

    def __init__(self, ffns: nn.ModuleList, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, len(ffns), bias=False)
        self.ffns = ffns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best, index = self.router(x).topk(2, dim=-1)
        weights = torch.zeros(*x.shape[:-1], len(self.ffns), dtype=x.dtype, device=x.device)
        weights = weights.scatter(-1, index, best.softmax(-1))
        y: Any = 0
        for i, ffn in enumerate(self.ffns):
            y = y + weights[..., i : i + 1] * ffn(x)
        result: torch.Tensor = y
        return result


def prepare(spec: Spec, options: Options) -> Prepared:
    """The step of each variant on this rank."""
    from weft.dtensor import Plan, plan

    tokens, targets = demo_tokens(spec, options)
    whole = _model(spec, options.dtype, options.device)
    found = plan(whole, mesh_of_ranks(options.device), tokens)
    rank, W = dist.get_rank(), dist.get_world_size()

    def applied(each: Plan) -> Call:
        parts = math.prod(each.data_dims)
        own = [t.chunk(parts)[rank * parts // W] for t in (tokens, targets)]
        return _plan_stepper(each.apply(copy.deepcopy(whole)), *own, average=parts > 1)

    by_hand = {name: each for name, each in found.beside.items() if isinstance(each, Plan)}
    share = len(tokens) // W
    oracle = _model(spec, torch.float32, options.device)
    alone = _plan_stepper(copy.deepcopy(whole), tokens[:share], targets[:share], average=False)
    return Prepared(
        {name: applied(each) for name, each in {_MAIN: found, **by_hand}.items()},
        {"arithmetic": alone},
        expected=lambda: _plan_stepper(oracle, tokens, targets, average=False)(0),
        tolerance={torch.bfloat16: 5e-2, torch.float16: 1e-2}.get(options.dtype, 1e-4),
        inputs=1,
        main=_MAIN,
        peer=_PEER,
    )


WANTED = 1.05  # of the best plan by hand


def plan_verdict(cases: Sequence[Case]) -> str:
    """The plan against the best of those by hand, in the same rounds, with the medians' intervals
    (95 %). Empty if no case has both."""
    told, holds = [], True
    for case in cases:
        by_hand = {name: t.us for name, t in case.timed.items() if name != _MAIN}
        if _MAIN not in case.timed or not by_hand:
            continue
        best = min(by_hand, key=lambda name: by_hand[name])
        ratio = case.ratio(_MAIN, best)
        assert ratio is not None
        holds &= ratio.low <= WANTED
        interval = f"{ratio.low:.2f} to {ratio.high:.2f}"
        told.append(f"{ratio.median:.2f} ({interval}) of {best} in {case.name}")
    if not told:
        return ""
    said = "holds" if holds else "DOES NOT HOLD"
    return f"the plan takes {'; '.join(told)}. Wanted {WANTED:.2f} of the best by hand: {said}."


def _model(spec: Spec, dtype: torch.dtype, device: str) -> nn.Module:
    shape, experts = LlamaShape(**spec.params["shape"]), spec.params["experts"]
    made = seeded_llama(shape, dtype, device)
    for block in made.modules():
        if experts and isinstance(block, Block):
            ffns = nn.ModuleList(copy.deepcopy(block.get_submodule("ffn")) for _ in range(experts))
            block.set_submodule("ffn", _Experts(ffns, shape.d_model).to(device, dtype))
    return made


def _plan_stepper(
    model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, *, average: bool
) -> Call:
    """A call that makes a training step; its value: the loss of all ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(_: int) -> list[torch.Tensor]:
        logits = model(inputs)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if average:
            dist.all_reduce(total)
            total /= dist.get_world_size()
        return [arrived(total)]

    return step
