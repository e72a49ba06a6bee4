"""What libraries take to move data between GPUs: NCCL by protocol, NVLS, one and two shots.

Times in us, sizes in bytes, rates in bytes a us. A collective of W ranks on `nbytes`, its whole
array on one rank (the input of an all-reduce and a reduce-scatter, the output of an all-gather),
takes the least over the protocols of

    start + steps * hop + wire / rate       steps: W - 1, for an all-reduce 2 (W - 1)
                                            wire: steps / W of nbytes, through each rank's port

Latencies of a hop and LL's rate are those of NCCL's own model: [NCCL], `ncclTunerConstantsDefaults`
in its src/graph/tuning.cc. What a call takes apart from that, and the share of the port that a
protocol sustains, are [fit]: by `tools.published_fit` to one half of the rows of `weft bench
published`, which tells how well they hold for the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
# What each fused matmul has in the place of its other half.
COLLECTIVE_OF: dict[str, Collective] = {
    "all_gather_matmul": "all_gather",
    "matmul_reduce_scatter": "reduce_scatter",
    "matmul_all_reduce": "all_reduce",
}


def group_passes(op: str, on_gpus: bool) -> int:
    """How often a rank receives the others' parts of the array, by torch's process group.

    Gloo's reduce-scatter is its all-reduce, of a copy: on one host it took 1.2 to 1.9 of one (least
    times; 2 and 4 ranks, 64 KiB to 16 MiB, on two busy cores). The copy is not counted.
    """
    return 2 if op == "all_reduce" or (op == "reduce_scatter" and not on_gpus) else 1


def moved_bytes(op: str, M: int, N: int, K: int, itemsize: int) -> int:
    """Of the whole array that the collective in a fused (M, K) @ (K, N) moves."""
    return M * (K if op == "all_gather_matmul" else N) * itemsize


@dataclass(frozen=True)
class Fabric:
    """The links of W equal ranks.

    Attributes:
        ranks: W.
        port: what a rank sends, and receives at the same time, by the data sheet.
        direct: of `port`, what reaches one peer: all on a switch, one link's in a mesh.
        ll: what NCCL's LL protocol moves at most.
        reached: of a protocol's share of the port, what libraries reach on such links.
        multicast: whether the switch adds up and copies (NVLS).
        hosts: on how many hosts the ranks are, evenly.
        rail: what a rank's own network card sends.
    """

    ranks: int
    port: float
    direct: float
    ll: float
    reached: float = 1.0
    multicast: bool = False
    hosts: int = 1
    rail: float = math.inf


@dataclass(frozen=True)
class _Protocol:
    """Of NCCL's rings: us a hop on links and on a network, and the share of a port sustained."""

    hop_us: float
    network_hop_us: float
    share: float
    flags_half: bool = False  # of what it sends


# [NCCL] `hwLatencies` for hops: of rings, for LL128 of trees, which fits better. LL's lines are
# half flags. The other shares, of an H100's port, are [fit].
_LL = _Protocol(0.6, 2.7, 0.5, flags_half=True)
_LL128 = _Protocol(1.25, 4.0, 0.55)
_SIMPLE = _Protocol(3.4, 14.0, 0.74)
PROTOCOLS: tuple[_Protocol, ...] = (_LL, _LL128, _SIMPLE)
# What a call takes before data moves, and after. [fit]
CALL_US = 15.0
# NVLS in NCCL's all-reduce, which copies in and out: what a call takes [fit], and 470 GB/s of bus
# bandwidth on 8 x H100, which NCCL's tests report for large arrays.
_NVLS_CALL_US, _NVLS_SHARE = 80.0, 1.04

# Kernels that store in, or load from, their peers' memory, with two barriers of signals. [fit]
KERNEL_US = 7.2
# What a host adds to a kernel that it enqueues alone, outside a CUDA graph. [fit]
HOST_US = 6.2
KERNEL_SHARE = 0.56  # of a port, of loads and stores by all SMs. [fit]
SECOND_SHOT_US = 1.5  # signals cross the links once more, of two shots. [fit]
# The same in weft's kernels, in which sums are stored and waited for as terms are: in virtual time
# one and two shots take as long at 230 KiB on 8 H100, and by words, whose second takes 2.3 to 3.8
# us on H100 and B200, at 80.
OWN_SECOND_SHOT_US, OWN_SECOND_BY_WORDS_US = 4.6, 2.75
# By words in one shot, what 64 programs of a KiB at a time take for each 64 KiB after the first: a
# look at least. In virtual time 64, 128 and 192 KiB on 4 B200 take 6.2, 8.0 and 10.7 us.
_ROUND_BYTES, _ROUND_US = 64 << 10, 1.0
# What each of two barriers takes less where no store is waited for: both ways over a link.
ACKNOWLEDGED_US = 1.4
# Of multimem instructions. A rank's port carries the array once in a reduce-scatter or an
# all-gather, and in an all-reduce once each way, in turn for each element. [fit]
SWITCH_SHARE = {"all_gather": 0.81, "reduce_scatter": 0.81, "all_reduce": 0.6}


def ring_steps(op: Collective, ranks: int) -> int:
    """How often an element's neighbours in a ring are passed."""
    return (2 if op == "all_reduce" else 1) * (ranks - 1)


def wire_bytes(op: Collective, nbytes: float, ranks: int) -> float:
    """What a rank sends at least."""
    return nbytes * ring_steps(op, ranks) / ranks


def nccl_us(op: Collective, nbytes: float, fabric: Fabric) -> float:
    """NCCL, and RCCL, called from a host: the best of its protocols."""
    W = fabric.ranks
    if W == 1:
        return 0.0
    if op == "all_to_all":  # direct sends; what stays is not sent
        rate = PROTOCOLS[-1].share * fabric.reached * fabric.port
        return CALL_US + wire_bytes(op, nbytes, W) / _across(fabric, rate)
    times = []
    crossings = ring_steps(op, fabric.hosts) if fabric.hosts > 1 else 0
    for protocol in PROTOCOLS:
        rate = protocol.share * fabric.reached * fabric.port
        if protocol.flags_half:
            rate = min(rate, fabric.ll)
        latency = (ring_steps(op, W) - crossings) * protocol.hop_us
        latency += crossings * protocol.network_hop_us
        times.append(CALL_US + latency + wire_bytes(op, nbytes, W) / _across(fabric, rate))
    if fabric.multicast and fabric.hosts == 1 and op == "all_reduce" and W > 2:
        wire = wire_bytes(op, nbytes, W)
        times.append(_NVLS_CALL_US + wire / (_NVLS_SHARE * fabric.reached * fabric.port))
    return min(times)


def _across(fabric: Fabric, rate: float) -> float:
    """What rings carry that cross hosts by the cards of all ranks of one."""
    if fabric.hosts == 1:
        return rate
    return min(rate, PROTOCOLS[-1].share * fabric.rail * (fabric.ranks // fabric.hosts))


def one_shot_us(nbytes: float, fabric: Fabric, *, in_graph: bool) -> float:
    """An all-reduce in which every rank reads all of every other's array."""
    rate = KERNEL_SHARE * min(fabric.port, fabric.direct * (fabric.ranks - 1))
    return _kernel_us(in_graph) + nbytes * (fabric.ranks - 1) / rate


def two_shot_us(nbytes: float, fabric: Fabric, *, in_graph: bool) -> float:
    """An all-reduce in which every rank adds up its part, and sends it to every other."""
    rate = KERNEL_SHARE * min(fabric.port, fabric.direct * (fabric.ranks - 1))
    wire = wire_bytes("all_reduce", nbytes, fabric.ranks)
    return _kernel_us(in_graph) + SECOND_SHOT_US + wire / rate


def shots_in_words(two_shot: bool, by_words: bool) -> str:
    """Of a kernel's all_reduce: "two shots by words"."""
    return ("two shots" if two_shot else "one shot") + (" by words" if by_words else "")


def kernel_us(
    op: Collective,
    nbytes: float,
    fabric: Fabric,
    *,
    two_shot: bool = False,
    by_words: bool = False,
) -> float:
    """One of weft's kernels, behind other work: a piece comes from every peer, as in one shot.

    Args:
        by_words: of an all_reduce, whether words carry their flags: twice the bytes.
    """
    us, sent = 0.0, nbytes
    if by_words:
        us, sent = -2 * ACKNOWLEDGED_US, 2 * nbytes
        if not two_shot:
            us += (math.ceil(max(nbytes, 1) / _ROUND_BYTES) - 1) * _ROUND_US
    if op == "all_reduce" and two_shot:
        us += (OWN_SECOND_BY_WORDS_US if by_words else OWN_SECOND_SHOT_US) - SECOND_SHOT_US
        return us + two_shot_us(sent, fabric, in_graph=True)
    return us + one_shot_us(
        sent if op == "all_reduce" else sent / fabric.ranks, fabric, in_graph=True
    )


def switch_us(op: Collective, nbytes: float, fabric: Fabric, *, in_graph: bool) -> float:
    """A collective by multimem instructions: the switch adds up and copies.

    Raises:
        ValueError: these links have no such switch.
    """
    if not fabric.multicast or op == "all_to_all":
        raise ValueError(f"no switch that adds up and copies for {op} on such links")
    return _kernel_us(in_graph) + nbytes / (SWITCH_SHARE[op] * fabric.reached * fabric.port)


def _kernel_us(in_graph: bool) -> float:
    return KERNEL_US + (0.0 if in_graph else HOST_US)
