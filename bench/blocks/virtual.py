"""A fused matmul of one layer on virtual ranks: how long it would take on GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import weft
from weft import settings
from weft.collectives import chunk_sizes
from weft.collectives.prices.hardware import named
from weft.kernels.engine import fused_times
from weft.kernels.engine.chips import known

if TYPE_CHECKING:
    from weft.sim import Hardware, Timeline


def share_of(op: str, M: int, N: int, K: int, ranks: int) -> tuple[int, int, int]:
    """(M, N, K) of a rank's matmul in a layer of M tokens, K features in and N out, in bf16."""
    return (M, -(-N // ranks), K) if op == "all_gather_matmul" else (M, N, -(-K // ranks))


def call(op: str, M: int, N: int, K: int, rank: int, ranks: int) -> None:
    """`op` on tensors without values; M, N, K are those of the rank's matmul."""
    w = torch.empty(K, N, dtype=torch.bfloat16)
    if op == "all_gather_matmul":
        sizes = chunk_sizes(M, ranks)
        weft.all_gather_matmul(torch.empty(sizes[rank], K, dtype=w.dtype), w, sizes=sizes)
    else:
        getattr(weft, op)(torch.empty(M, K, dtype=w.dtype), w)


def timeline_of(
    op: str, M: int, N: int, K: int, ranks: int, hardware: Hardware | str, engine: settings.Engine
) -> Timeline:
    """The timeline of one `call`. Where ranks have equal rows one rank's kernels stand for all, but
    for a sum that all keep, or that is scattered in one shot: tiles of other owners are added up by
    other programs there.
    """
    from weft import sim

    def body(rank: int) -> None:
        with settings.engine(engine):
            call(op, M, N, K, rank, ranks)

    chip = known((named(hardware) if isinstance(hardware, str) else hardware).chip)
    way = fused_times.launched_way(op, chip, M, N, K, torch.bfloat16, ranks)
    dealt = way in ("one shot", "two shots")
    results = sim.run(
        ranks, body, hardware=hardware, numerics=False, timeout=24 * 3600,
        symmetric=M % ranks == 0 and not (dealt and engine == "triton"),
    )  # fmt: skip
    assert results.timeline is not None  # hardware was given
    return results.timeline


def layer_timeline(
    tokens: int, hidden: int, ffn: int, ranks: int, hardware: Hardware | str
) -> Timeline:
    """The timeline of a feed-forward layer by the fused kernels: its input rows are gathered while
    they are multiplied, its results scattered while they are summed. Ranks have equal shares.
    """
    from weft import sim

    def body(rank: int) -> None:
        x = torch.empty(tokens // ranks, hidden, dtype=torch.bfloat16)
        up = torch.empty(hidden, ffn // ranks, dtype=x.dtype)
        with settings.engine("triton"):
            sizes = [len(x)] * ranks
            inner = weft.all_gather_matmul(x, up, sizes=sizes, activation="silu")
            weft.matmul_reduce_scatter(inner, torch.empty(ffn // ranks, hidden, dtype=x.dtype))

    results = sim.run(
        ranks, body, hardware=hardware, numerics=False, timeout=24 * 3600, symmetric=True
    )
    assert results.timeline is not None  # hardware was given
    return results.timeline
