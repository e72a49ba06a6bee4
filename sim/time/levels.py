"""Fused matmuls over several hosts, in closed form: the blocks of two levels, played in order.

Inside a host a block is the fused kernel of `kernels.engine.fused_times`; between hosts every rank
has a card of `Hardware.rail_bandwidth`, of which large transfers reach NCCL's share. As in
`collectives.hosts`, a gather multiplies the own host's rows while the first others cross, part by
part, and a scatter begins with those of others:

    gather, 2 hosts     card     | part 0 | part 1 | ..
                        cores    | own rows  | part 0 | part 1 | ..

    scatter, 2 hosts    cores    | part 0 | part 1 | .. | own rows | add
                        card              | part 0 | part 1 | ..

Nothing of it has been measured on GPUs; the parts are held against published times of one host and
of NCCL over several (docs/published.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

from weft import settings
from weft.collectives import protocols
from weft.collectives.hosts import parts_of
from weft.collectives.prices import library
from weft.collectives.prices.hardware import Hardware
from weft.kernels.engine import fused_times

FusedOverHosts = Literal["all_gather_matmul", "matmul_reduce_scatter"]


class OverHosts(NamedTuple):
    """Times of a call in us, and what a rank receives from other hosts, or sends, in bytes.

    Attributes:
        two_levels: fused inside each host, block by block.
        flat: a library's matmul, and NCCL's collective of all ranks.
        inside: the same work without what crosses: fused, block by block.
    """

    two_levels: float
    flat: float
    inside: float
    crosses: float


def over_hosts(
    op: FusedOverHosts, M: int, N: int, K: int, hardware: Hardware, hosts: int, ranks: int
) -> OverHosts:
    """Of (M, K) @ (K, N) in bf16, one rank's product, on `hosts` of `ranks` each.

    M are the rows of all ranks together, which all of them multiply.

    Raises:
        ValueError: more ranks on a host than the hardware has.
    """
    W, gathers = hosts * ranks, op == "all_gather_matmul"
    columns = K if gathers else N
    row_bytes = columns * 2
    own, shard = -(-M // hosts), -(-M // W)
    parts = parts_of(shard, row_bytes)
    block = -(-own // parts)

    def fused(rows: int) -> float:
        if ranks == 1:
            return library.matmul_us(hardware, rows, N, K, "bfloat16")
        return fused_times.fused_us(op, rows, N, K, "bfloat16", hardware, ranks)

    count, own_us, block_us = parts * (hosts - 1), fused(own), fused(block)
    card = protocols.PROTOCOLS[-1].share * hardware.rail_bandwidth / 1e6
    each = shard / parts * row_bytes / card
    hop = protocols.CALL_US + protocols.PROTOCOLS[-1].network_hop_us
    if gathers:
        end = own_us
        for number in range(count):
            end = max(end, hop + (number + 1) * each) + block_us
    else:
        cores = sent = 0.0
        for _ in range(count):
            cores += block_us
            sent = max(sent, cores) + each
        added = library.moved_us(hardware, shard * row_bytes * (hosts + 1))
        end = max(cores + own_us, sent + hop if count else 0.0) + (added if count else 0.0)
    collective = protocols.COLLECTIVE_OF[op]
    fabric = hardware.fabric(W, hosts)
    flat = library.matmul_us(hardware, M, N, K, "bfloat16")
    flat += protocols.nccl_us(collective, M * row_bytes, fabric)
    return OverHosts(end, flat, own_us + count * block_us, shard * row_bytes * (hosts - 1))


class LayerTimes(NamedTuple):
    """A step of training of a decoder layer's matmuls, forward and backward, in us a layer.

    Attributes:
        two_levels, flat: tensor parallelism over all ranks.
        sharded: tensor parallelism inside each host, FSDP across: weights gathered twice and their
            gradients scattered once, beside the arithmetic.
    """

    two_levels: float
    flat: float
    sharded: float


def layer_times(
    tokens: int, hidden: int, ffn: int, qkv: int, out: int, hardware: Hardware, hosts: int
) -> LayerTimes:
    """Of all `tokens`, on `hosts` of `hardware.ranks`; `qkv` and `out` are attention's features.

    Attention itself is left out: it is the same in all.
    """
    ranks = hardware.ranks
    pairs = ((qkv, hidden), (2 * ffn, hidden)), ((hidden, out), (hidden, ffn))

    def step(M: int, on: int, W: int) -> tuple[float, float]:
        """Two levels and flat, over `on` hosts of all W ranks of a group."""
        both = [0.0, 0.0]
        ups, downs = pairs
        for op, back, cut in (
            ("all_gather_matmul", "matmul_reduce_scatter", [(-(-n // W), k) for n, k in ups]),
            ("matmul_reduce_scatter", "all_gather_matmul", [(n, -(-k // W)) for n, k in downs]),
        ):
            for N, K in cut:
                forward = over_hosts(op, M, N, K, hardware, on, ranks)  # type: ignore[arg-type]
                backward = over_hosts(back, M, K, N, hardware, on, ranks)  # type: ignore[arg-type]
                weights = library.matmul_us(hardware, K, N, M, "bfloat16")
                both[0] += forward.two_levels + backward.two_levels + weights
                both[1] += forward.flat + backward.flat + weights
        return both[0], both[1]

    two_levels, flat = step(tokens, hosts, hosts * ranks)
    inside, _ = step(-(-tokens // hosts), 1, ranks)
    sharded = inside
    if hosts > 1:
        nbytes = 2 * sum(n * k for pair in pairs for n, k in pair) / ranks
        rails = hardware.fabric(hosts, hosts)  # a rank of each
        once = protocols.nccl_us("all_gather", nbytes, rails)
        back = protocols.nccl_us("reduce_scatter", nbytes, rails)
        sharded = max(inside, 2 * once + back)
    return LayerTimes(two_levels, flat, sharded)


def tell_times(
    calls: Iterable[settings.Decision], hardware: Hardware, hosts: int, ranks: int
) -> None:
    """Print what the fused matmuls of all ranks among some calls take, in two levels and flat."""
    rail = hardware.rail_bandwidth / 1e9
    print(f"bf16 on {hosts} x {ranks} {hardware.name}, {rail:g} GB/s from each to other hosts:")
    for call in calls:
        sizes = re.match(r"(\d+)x(\d+) @ \d+x(\d+)", call.shapes)
        if sizes is None or call.op not in get_args(FusedOverHosts) or call.ranks != hosts * ranks:
            continue
        M, K, N = map(int, sizes.groups())
        made = over_hosts(call.op, M, N, K, hardware, hosts, ranks)  # type: ignore[arg-type]
        print(
            f"  {call.op}({call.shapes}): {made.two_levels:,.0f} us in two levels, "
            f"{made.flat:,.0f} us flat, {made.crosses / 2**20:.3g} MiB from each to other hosts"
        )
