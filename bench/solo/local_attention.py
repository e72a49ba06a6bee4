"""The kernels of ring_attention, and what `auto` takes, beside torch's attention: one rank, nobody
to exchange with.

    q (1, H, S, D), k and v (1, H_kv, S, D)  ->  out (1, H, S, D), or the gradients of all three

Causal, in one piece. As `local_matmul`: `tools.gpu` runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

import weft
from weft.bench.blocks.causal import causal_attention, torch_attentions
from weft.bench.blocks.context_parallel import TOLERANCE
from weft.bench.problem import INPUTS, Options, Prepared, Spec
from weft.bench.shapes import sized
from weft.collectives.ranks.group import alone

NAME = "local attention"
WORLD: Literal["ranks", "one"] = "one"
SIZES = ("tokens", "heads", "kv_heads", "head_dim")

_SHAPES = ((4096, 32, 8, 128), (16384, 32, 8, 128), (4096, 32, 32, 64))
_QUICK = ((64, 2, 1, 16),)


def cases(options: Options) -> list[Spec]:
    """Forward and backward of a layer's attention."""
    shapes = options.shapes or (_QUICK if options.quick else _SHAPES)
    found = []
    for tokens, H, H_kv, D in (sized(shape, SIZES, NAME) for shape in shapes):
        sizes = dict(zip(SIZES, (tokens, H, H_kv, D), strict=True))
        for step, share in (("forward", 1.0), ("backward", 2.5)):
            flop = share * 4 * tokens * tokens / 2 * D * H
            more = {"step": step, "dtype": options.dtype_name, "flop": flop}
            found.append(Spec(f"attention {step} {tokens}x{H}x{H_kv}x{D}", {**sizes, **more}))
    return found


def prepare(spec: Spec, options: Options) -> Prepared:
    """The kernels and torch's on the same operands; torch's backward has a head of keys a head."""
    tokens, H, H_kv, D = (spec.params[name] for name in SIZES)
    backward, device = spec.params["step"] == "backward", torch.device(options.device)

    def drawn(heads: int) -> torch.Tensor:
        x = torch.randn(1, heads, tokens, D, device=device, dtype=options.dtype)
        return x.requires_grad_(backward)

    given = [[drawn(H), drawn(H_kv), drawn(H_kv)] for _ in range(INPUTS)]
    douts = [drawn(H).detach() for _ in range(INPUTS)]

    def variant(attention: Callable[..., torch.Tensor], repeats: int) -> Callable[[int], Any]:
        made: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}

        def operands(i: int) -> list[torch.Tensor]:
            q, *others = given[i]
            return [q, *(_repeated(x, repeats) for x in others)]

        def call(i: int) -> Any:
            if i not in made:
                inputs = operands(i)
                made[i] = attention(*inputs) if backward else given[i][0], inputs
            out, inputs = made[i]
            if not backward:
                return attention(*inputs)
            return torch.autograd.grad(out, inputs, douts[i], retain_graph=True)

        return call

    def auto(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = weft.ring_attention(q, k, v, causal=True, group=alone())
        return out

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with weft.engine("triton"):
            return auto(q, k, v)

    def observed(value: Any) -> Any:
        if not backward:
            return value
        return [value[0], *(x.unflatten(1, (H_kv, -1)).sum(2) for x in value[1:])]

    def expected() -> list[torch.Tensor]:
        q, k, v = (x.detach() for x in given[0])
        found = causal_attention(q, k, v, douts[0] if backward else None)
        return found[1:] if backward else found[:1]

    libraries = torch_attentions(device)
    return Prepared(
        {"weft": variant(ours, 1), "auto": variant(auto, 1)}
        | {name: variant(way, H // H_kv) for name, way in libraries.items()},
        expected=expected,
        observe=observed,
        tolerance=TOLERANCE[options.dtype],
        main="weft",
        peer=next(iter(libraries)),
    )


def _repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    """The heads of keys, one for each head of queries."""
    if times == 1:
        return x
    return x.detach().repeat_interleave(times, 1).requires_grad_(x.requires_grad)
