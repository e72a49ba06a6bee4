"""The collectives against the process group's, and against a copy.

A size is that of a rank's input. The bound is a copy in the rank's own memory, while the others do
the same, of the larger of its input and its output (a reduce-scatter reads all of its input), after
a signal to the peers and back: no data can arrive sooner.

Bus bandwidth counts the bytes that a link must carry for each rank, as nccl-tests do:
(W-1)/W of the whole for all_gather, reduce_scatter and all_to_all, twice that for all_reduce, the
input for broadcast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist

from weft import collectives
from weft.bench import bounds
from weft.bench.problem import INPUTS, Options, Prepared, Spec
from weft.bench.shapes import sized

NAME = "collectives"
WORLD: Literal["ranks", "one"] = "ranks"
SIZES = ("bytes",)

OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
_SIZES = tuple(1 << shift for shift in range(10, 29, 2))
_ONE_INPUT = 32 << 20  # larger ones are in no cache anyway


def cases(options: Options) -> list[Spec]:
    """Every collective at every size."""
    sizes = [sized(entry, SIZES, NAME)[0] for entry in options.shapes]
    if not sizes:
        sizes = [1 << 10, 1 << 16] if options.quick else list(_SIZES)
    return [
        Spec(
            f"{op} {_size_words(nbytes)}", {"op": op, "nbytes": nbytes, "dtype": options.dtype_name}
        )
        for op in OPS
        for nbytes in sizes
    ]


def _size_words(nbytes: int) -> str:
    for unit, shift in (("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):g} {unit}"
    return f"{nbytes} B"


def prepare(spec: Spec, options: Options) -> Prepared:
    """One collective at one size, on this rank."""
    op, nbytes = spec.params["op"], spec.params["nbytes"]
    group, device = collectives.resolve(None), torch.device(options.device)
    W, rank = group.world_size, group.rank
    # A multiple of the ranks: the process group takes equal shares only.
    length = max(1, nbytes // options.dtype.itemsize // W) * W
    generator = torch.Generator().manual_seed(0)
    whole = torch.rand(W, length, generator=generator).to(device, options.dtype)
    inputs = INPUTS if nbytes <= _ONE_INPUT else 1
    xs = [whole[rank].clone(), *(torch.rand_like(whole[rank]) for _ in range(inputs - 1))]
    gathered, same, part = (whole.new_empty(n) for n in (W * length, length, length // W))
    sizes = [length] * W

    def reduced_in_place(i: int) -> torch.Tensor:
        same.copy_(xs[i])  # the process group reduces in place: the input must stay as it is
        dist.all_reduce(same)
        return same

    def sent(i: int) -> torch.Tensor:
        if rank == 0:
            same.copy_(xs[i])
        dist.broadcast(same, 0)
        return same

    def double() -> torch.Tensor:
        return whole.double()

    calls: dict[str, tuple[Callable[[int], Any], Callable[[int], Any], Callable[[], Any], int]] = {
        "all_gather": (
            lambda i: collectives.all_gather(xs[i], sizes=sizes, out=gathered),
            lambda i: (dist.all_gather_into_tensor(gathered, xs[i]), gathered)[1],
            lambda: double().flatten(),
            (W - 1) * length,
        ),
        "reduce_scatter": (
            lambda i: collectives.reduce_scatter(xs[i], out=part),
            lambda i: (dist.reduce_scatter_tensor(part, xs[i]), part)[1],
            lambda: double().sum(0).chunk(W)[rank],
            (W - 1) * length // W,
        ),
        "all_reduce": (
            lambda i: collectives.all_reduce(xs[i], out=same),
            reduced_in_place,
            lambda: double().sum(0),
            2 * (W - 1) * length // W,
        ),
        "all_to_all": (
            lambda i: collectives.all_to_all(xs[i], out=same),
            lambda i: (dist.all_to_all_single(same, xs[i]), same)[1],
            lambda: double().view(W, W, -1)[:, rank].flatten(),
            (W - 1) * length // W,
        ),
        "broadcast": (
            lambda i: collectives.broadcast(xs[i], out=same),
            sent,
            lambda: double()[0],
            length,
        ),
    }
    ours, theirs, expected, on_the_bus = calls[op]
    spec.params["bus_bytes"] = on_the_bus * options.dtype.itemsize
    copied = length * options.dtype.itemsize * (W if op == "all_gather" else 1)
    peer = dist.get_backend()
    least = {"memory": bounds.copy_of(copied, device)}
    if not group.unreached(device):
        least["signal"] = bounds.round_trip(group, device)
    return Prepared(
        {"weft": ours, peer: theirs},
        least,
        bound_rule="sum",
        expected=expected,
        tolerance={torch.bfloat16: 1e-2, torch.float16: 1e-3}.get(options.dtype, 1e-6),
        inputs=inputs,
        main="weft",
        peer=peer,
    )
