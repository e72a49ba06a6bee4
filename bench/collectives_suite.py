"""The collectives against Gloo and against the copy that the machine can do.

`copy` is what the result costs when its bytes lie ready in this rank's memory: it writes as many
bytes, while the other ranks do the same. All write into tensors that exist, as Gloo does.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from weft import collectives
from weft.bench.harness import Case, case, interleaved

OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
SIZES = tuple(1 << shift for shift in range(10, 27, 2))  # bytes a rank: 1 KiB to 64 MiB
RATIOS = (("gloo", "weft"), ("weft", "copy"))


def run(op: str, nbytes: int, rounds: int) -> Case:
    """One collective at one size (bytes of a rank's input), on the running process group."""
    world_size = dist.get_world_size()
    x = torch.rand(nbytes // 4)
    whole, same = torch.empty(world_size * len(x)), torch.empty(len(x))
    part = torch.empty(len(x) // world_size)
    sizes = [len(x)] * world_size
    ours, theirs, out = {
        "all_gather": (
            lambda: collectives.all_gather(x, sizes=sizes, out=whole),
            lambda: dist.all_gather_into_tensor(whole, x),
            whole,
        ),
        "reduce_scatter": (
            lambda: collectives.reduce_scatter(x, out=part),
            lambda: dist.reduce_scatter_tensor(part, x),
            part,
        ),
        "all_reduce": (
            lambda: collectives.all_reduce(x, out=same),
            lambda: dist.all_reduce(same),
            same,
        ),
        "all_to_all": (
            lambda: collectives.all_to_all(x, out=same),
            lambda: dist.all_to_all_single(same, x),
            same,
        ),
        "broadcast": (
            lambda: collectives.broadcast(x, out=same),
            lambda: dist.broadcast(same, 0),
            same,
        ),
    }[op]
    source = torch.rand(len(out))
    same.copy_(x)
    theirs()
    expected = out.clone()
    ours()
    torch.testing.assert_close(out, expected)
    same.zero_()  # Gloo's all_reduce adds in place, round after round
    table = interleaved({"weft": ours, "gloo": theirs, "copy": lambda: out.copy_(source)}, rounds)
    return case(f"{op} {nbytes >> 10} KiB", table, RATIOS)
