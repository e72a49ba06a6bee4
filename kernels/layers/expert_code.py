"""What the code of stacked experts computes, found by calling it with small weights.

    rows of three experts --the module's own forward--> down(silu(gate(x)) * up(x)), or not

Code that is known so may be replaced by the fused ops: names of weights alone do not tell of a
clamp, of another activation, or of weights of tokens that are multiplied elsewhere. It is called
as if it were trained, more than once, so that what it draws shows; with uneven counts, one of
none, so that what it drops does. Code that keeps buffers, or that hooks look into, is not known.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import NamedTuple, get_args

import torch
from torch import nn
from torch.func import functional_call

from weft.kernels.engine.epilogues import Activation, activate
from weft.kernels.layers.expert_weights import ExpertLayout, found

_EXPERTS, _HIDDEN, _FEATURES = 3, 16, 32  # rows of whole words, as grouped matmuls of GPUs take
_IDS = (0, 1), (2, 0), (0, 1), (1, 0), (0, 2), (0, 1)  # of tokens that are routed
_COUNTS = 4, 0, 2  # of rows that are sorted
_TIMES = 3
# Of a row of results: how far fp32 is off, if by TF32, from float64; and half precision from the
# same steps in half precision, in another order.
_EXACT, _ROUNDED = 1e-3, 6e-3


class KnownExperts(NamedTuple):
    """Where the weights are, what is done between them, and in which dtype; None: in theirs."""

    layout: ExpertLayout
    activation: Activation
    dtype: torch.dtype | None


def known_experts(module: nn.Module) -> KnownExperts | None:
    """What stacked experts compute that are called with tokens sorted by expert and how many each
    has, or with tokens, their experts and weights; None of any other code.

    Example: torchtitan's GroupedExperts, which multiply in bf16 whatever their weights are:
        KnownExperts(ExpertLayout(("w1", "w3", "w2")), "swiglu", torch.bfloat16).
    """
    if not _has_no_side_effects(module):
        return None
    tried: dict[tuple[str, ...], torch.Tensor | None] = {}
    best: tuple[float, KnownExperts] | None = None
    for activation in get_args(Activation):
        try:
            layout, weights, _ = found(module, activation)
            routed = len(inspect.signature(module.forward).parameters) == 3
        except Exception:  # the module's own code says so
            continue
        like = weights[layout.names[0]]
        whole = _drawn(layout, like)
        if layout.names not in tried:
            tried[layout.names] = _trial_output(
                module, dict(layout.state(whole)), like.dtype, routed
            )
        made = tried[layout.names]
        if made is None:
            continue
        half = like.dtype if like.dtype.itemsize == 2 else torch.bfloat16
        ways = [(half, None if half == like.dtype else half, _ROUNDED)]
        if half != like.dtype:
            ways.append((torch.float64, None, _EXACT))
        for of, dtype, limit in ways:
            wanted = _expected(whole, activation, routed, of).double()
            error = ((made.double() - wanted).norm(dim=1) / wanted.norm(dim=1)).max().item()
            if error <= limit and (best is None or error < best[0]):
                best = error, KnownExperts(layout, activation, dtype)
    return best and best[1]


def _has_no_side_effects(module: nn.Module) -> bool:
    """Whether a call does no more than return its result, as far as can be seen."""
    inside = [each for each in module.modules() if each is not module]
    hooked = any(each._forward_hooks or each._forward_pre_hooks for each in inside)
    return not hooked and next(module.buffers(), None) is None


def _drawn(layout: ExpertLayout, like: torch.Tensor) -> dict[str, torch.Tensor]:
    """Small weights of a few experts."""
    draw, device = torch.Generator().manual_seed(0), "cpu" if like.is_meta else like.device
    whole = {}
    for role in layout.roles:
        shape = (_HIDDEN, _FEATURES) if role == "down_proj" else (_FEATURES, _HIDDEN)
        values = torch.randn(_EXPERTS, *shape, generator=draw, device="cpu") / shape[1] ** 0.5
        whole[role] = values.to(device, like.dtype)
    return whole


def _trial_tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Small and large ones, their experts, and their weights."""
    draw, count = torch.Generator().manual_seed(1), len(_IDS)
    x = torch.randn(count, _HIDDEN, generator=draw, device="cpu")
    sizes = torch.tensor([1.0, 8.0, 64.0], device="cpu").repeat(count // 3)
    weights = torch.rand(count, 2, generator=draw, device="cpu") + 0.25
    ids = torch.tensor(_IDS, device="cpu")
    return (x * sizes.unsqueeze(1)).bfloat16(), ids, weights.bfloat16()


def _trial_output(
    module: nn.Module, weights: Mapping[str, torch.Tensor], dtype: torch.dtype, routed: bool
) -> torch.Tensor | None:
    """What the module makes of `_trial_tokens` with these weights, always the same; else None."""
    device = next(iter(weights.values())).device
    x, ids, scores = (t.to(device) for t in _trial_tokens())
    x = x.to(dtype)
    rest = (ids, scores.to(dtype)) if routed else (torch.tensor(_COUNTS, device=device),)
    own, state = vars(module).get("num_experts"), dict(weights)
    training = {each: each.training for each in module.modules()}
    try:
        if isinstance(own, int):
            vars(module)["num_experts"] = _EXPERTS
        module.train()
        with torch.no_grad(), torch.random.fork_rng():
            every = [functional_call(module, state, (x, *rest)) for _ in range(_TIMES)]
        first = every[0]
        fits = isinstance(first, torch.Tensor) and first.shape == x.shape and first.dtype == dtype
        return first.cpu() if fits and all(torch.equal(first, each) for each in every) else None
    except Exception:  # code that takes none such, whatever it says
        return None
    finally:
        for each, was in training.items():
            each.training = was
        if isinstance(own, int):
            vars(module)["num_experts"] = own


def _expected(
    whole: Mapping[str, torch.Tensor], activation: Activation, routed: bool, dtype: torch.dtype
) -> torch.Tensor:
    """The same by the fused ops' steps, in `dtype`."""
    x, ids, scores = (t.cpu() for t in _trial_tokens())
    ways = {role: w.cpu().to(dtype).transpose(1, 2) for role, w in whole.items()}
    zs = [x.to(dtype) @ w for role, w in ways.items() if role != "down_proj"]
    (h,) = activate(zs, activation)
    made = h @ ways["down_proj"]  # (experts, tokens, H)
    if routed:
        slots = made[ids.t(), torch.arange(len(x), device="cpu")]  # (k, tokens, H)
        return (slots.double() * scores.t().double().unsqueeze(2)).sum(0)
    owners = torch.arange(_EXPERTS, device="cpu").repeat_interleave(torch.tensor(_COUNTS))
    return made[owners, torch.arange(len(x), device="cpu")]
