"""A new token of each of 8 sequences attends to sharded caches.

    q (8, heads, 1, E), the same on every rank; k, v (8, kv_heads, S/W, E)  ->  out (8, heads, 1, E)

Variants: `flash_decode`, on a GPU also by its kernel, whatever auto chooses; "gather + attention":
the process group gathers the caches, torch attends to them. The bound is "memory": a copy that
touches as many bytes as this rank's part of the caches.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn import functional

import weft
from weft.bench import bounds
from weft.bench.blocks.context_parallel import PEER, TOLERANCE, with_our_kernel
from weft.bench.problem import INPUTS, Call, Options, Prepared
from weft.collectives import resolve

_BATCH, _MAIN = 8, "flash_decode"


def prepare(tokens: int, heads: int, kv_heads: int, head_dim: int, options: Options) -> Prepared:
    """Each variant on this rank; the sequences are as long as the caches."""
    group, device = resolve(None), torch.device(options.device)
    W, rank = group.world_size, group.rank
    share = -(-tokens // W)
    generator = torch.Generator(device).manual_seed(0)

    def drawn(heads: int, rows: int) -> list[torch.Tensor]:
        shape = (_BATCH, heads, rows, head_dim)
        values = (torch.randn(shape, generator=generator, device=device) for _ in range(INPUTS))
        return [each.to(options.dtype) for each in values]

    def mine(whole: torch.Tensor) -> torch.Tensor:
        return whole[:, :, rank * share : (rank + 1) * share].contiguous()

    qs, k_wholes, v_wholes = drawn(heads, 1), drawn(kv_heads, W * share), drawn(kv_heads, W * share)
    ks, vs = ([mine(whole) for whole in wholes] for wholes in (k_wholes, v_wholes))
    lengths = torch.full((_BATCH,), tokens, dtype=torch.int32, device=device)

    def ours(i: int) -> torch.Tensor:
        out: torch.Tensor = weft.flash_decode(qs[i], ks[i], vs[i], lengths)
        return out

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def gathered(i: int) -> torch.Tensor:
        whole = []
        for part in (ks[i], vs[i]):
            parts = [torch.empty_like(part) for _ in range(W)]
            dist.all_gather(parts, part)
            whole.append(torch.cat(parts, 2)[:, :, :tokens])
        return attention(qs[i], *whole)

    variants: dict[str, Call] = {_MAIN: ours}
    if device.type == "cuda":
        variants["triton"] = with_our_kernel(ours)
    return Prepared(
        variants | {PEER: gathered},
        {"memory": bounds.touching(2 * ks[0].nbytes, device)},
        expected=lambda: attention(
            qs[0].double(), *(x[0][:, :, :tokens].double() for x in (k_wholes, v_wholes))
        ),
        # What the ranks exchange is fp32, of float64 as well.
        tolerance=max(TOLERANCE[options.dtype], 1e-6),
        main=_MAIN,
        peer=PEER,
    )
