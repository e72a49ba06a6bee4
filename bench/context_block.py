"""A training step of causal attention over a sequence that the ranks share, zigzag.

    q, k, v (1, heads, S/W, E)  ->  out (1, heads, S/W, E), and the gradients of all three

Variants: `ring_attention` by the engine that auto takes, on a GPU also by the kernel, and by
"generic": the process group gathers the keys and values. The bound, "arithmetic", is torch's
attention of whole sequences by a W-th of the heads: as many multiplications, no communication.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

import weft
from weft.bench.problem import INPUTS, Options, Prepared
from weft.collectives import resolve
from weft.kernels import ring_attention, to_zigzag, zigzag_sizes

_MAIN, _PEER = "weft", "generic"
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}


def prepare(tokens: int, heads: int, kv_heads: int, head_dim: int, options: Options) -> Prepared:
    """The step of each variant on this rank."""
    group = resolve(None)
    W, rank = group.world_size, group.rank
    generator = torch.Generator().manual_seed(0)

    def drawn(count: int) -> torch.Tensor:
        values = torch.randn(1, count, tokens, head_dim, generator=generator)
        return values.to(options.device, options.dtype)

    sizes = zigzag_sizes(tokens, W)

    def mine(whole: torch.Tensor) -> torch.Tensor:
        shards: tuple[torch.Tensor, ...] = to_zigzag(whole, W, dim=2).split(sizes, 2)
        return shards[rank].contiguous()

    wholes = [(drawn(heads), drawn(kv_heads), drawn(kv_heads)) for _ in range(INPUTS)]
    dout = drawn(heads)
    inputs = [[mine(each).requires_grad_() for each in whole] for whole in wholes]
    my_dout = mine(dout)
    some = [
        [whole[:, : count // W].clone().requires_grad_() for whole, count in zip(
            each, (heads, kv_heads, kv_heads), strict=True
        )]
        for each in wholes
    ]  # fmt: skip

    def ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = ring_attention(q, k, v, causal=True, layout="zigzag", sizes=sizes)
        return out

    def step(engine: Any) -> Callable[[int], list[torch.Tensor]]:
        def call(i: int) -> list[torch.Tensor]:
            with weft.engine(engine):
                return _step(ring, inputs[i], my_dout)

        return call

    on_gpu = options.device == "cuda"

    def expected() -> list[torch.Tensor]:
        # On a GPU torch has attention without a matrix of all scores up to fp32 only.
        wide = torch.float32 if on_gpu else torch.float64
        whole = [each.to(wide).requires_grad_() for each in wholes[0]]
        return [
            mine(each) for each in _step(_ungrouped if on_gpu else _plain, whole, dout.to(wide))
        ]

    variants = {_MAIN: step("auto")} | ({"triton": step("triton")} if on_gpu else {})
    return Prepared(
        variants | {_PEER: step("generic")},
        {"arithmetic": lambda i: _step(_plain, some[i], dout[:, : heads // W])},
        expected=expected,
        tolerance=_TOLERANCE[options.dtype],
        main=_MAIN,
        peer=_PEER,
    )


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _ungrouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same with every key head repeated: not all of torch's kernels take groups."""
    group = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(group, 1) for each in (k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _step(
    attention: Callable[..., torch.Tensor], operands: list[torch.Tensor], dout: torch.Tensor
) -> list[torch.Tensor]:
    """The output and the gradients of the operands."""
    for each in operands:
        each.grad = None
    out = attention(*operands)
    out.backward(dout)
    return [out.detach(), *(each.grad for each in operands if each.grad is not None)]
