"""What this machine can do: rates by which engines are chosen, measured once and kept.

The first call that has to choose measures them, on all ranks of its group at the same time: the
least times of several rounds, as other work only adds to them. Rank 0 keeps the result in a file
(`kept_files`), and every rank uses its numbers, so that all choose alike. The load of the machine
is kept beside them: rates taken under load are measured again by later processes that find it
lower, three times in all. `weft bench calibrate` measures again in any case, as does deleting the
file.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weft import settings
from weft.collectives import kept_files
from weft.collectives.memory.exchange import exchange
from weft.collectives.memory.repeatable import straight
from weft.collectives.memory.workspace import give_back
from weft.collectives.ranks.group import (
    Group,
    backends_of,
    kept_by_group,
    new_group,
    unwatched,
)
from weft.collectives.topology import in_two_levels, inside_of, rails

_logger = logging.getLogger("weft")
_MATMUL_SIZE = {"cpu": 384, "cuda": 4096}
_COPY_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}

# A load above this part of the cores means that other work disturbs what is timed.
BUSY = 0.4
# How often rates are measured, all in all, for having been taken under load.
_MOST_TRIES = 3


@dataclass(frozen=True)
class Machine:
    """Rates of one rank while all ranks of the group work; times in us, rates in units per us.

    Attributes:
        flops: matmul rate by dtype.
        copy: bytes per us that a rank reads from a peer's memory or its own; 0 where symmetric
            memory does not reach.
        sync_us: an empty exchange.
        wire: bytes per us that a rank receives in the process group's all-gather.
        wire_us: an empty all-gather in the process group.
        between: of a group over several hosts, bytes per us that each rank of a host receives from
            another, by the hosts' numbers: [from][to]. `copy` and `sync_us` are inside a host.
        between_us: an exchange of nothing between hosts.
        load: of the machine when they were taken, as a part of its cores.
        tries: how often they have been measured.
    """

    flops: dict[str, float]
    copy: float
    sync_us: float
    wire: float
    wire_us: float
    between: list[list[float]] = field(default_factory=list)
    between_us: float = 0.0
    load: float = 0.0
    tries: int = 1

    def flops_of(self, dtype: torch.dtype) -> float:
        """Matmul rate of a dtype, in flop per us."""
        return self.flops.get(str(dtype), self.flops[str(torch.float32)])

    def flops_us(self, M: int, N: int, K: int, dtype: torch.dtype) -> float:
        """Time of the multiplications of an (M, K) @ (K, N) on one rank."""
        return 2 * M * N * K / self.flops_of(dtype)

    def matmul_us(self, M: int, N: int, K: int, dtype: torch.dtype) -> float:
        """Time of an (M, K) @ (K, N) on one rank.

        That is its multiplications or, if longer as with few rows, reading and writing its operands
        (a copy does both at once).
        """
        touched = (M * K + K * N + M * N) * dtype.itemsize
        return max(self.flops_us(M, N, K, dtype), touched / max(2 * self.copy, 1e-9))

    def memory_us(self, nbytes: float, syncs: int = 1) -> float:
        """Time to move `nbytes` through symmetric memory in `syncs` exchanges."""
        return syncs * self.sync_us + nbytes / max(self.copy, 1e-9)

    def wire_time_us(self, nbytes: float) -> float:
        """Time to receive `nbytes` in a collective of the process group."""
        return self.wire_us + nbytes / max(self.wire, 1e-9)


# For virtual ranks, whose measurements would mean nothing and who must all choose alike.
_NOMINAL = Machine({str(torch.float32): 1e5}, 1e4, 10.0, 1e3, 200.0)

# What layouts are chosen by: a node of 8 H100 on NVLink; one host whose ranks are processes.
_TYPICAL = {
    "cuda": Machine({"torch.float32": 4e8, "torch.bfloat16": 6e8}, 3e5, 4.0, 2e5, 20.0),
    "cpu": Machine({"torch.float32": 4e4}, 6e3, 5.0, 1e3, 200.0),
}


def typical(device_type: str) -> Machine:
    """Rates that are the same everywhere, for choices that all machines must make alike."""
    return _TYPICAL.get(device_type, _TYPICAL["cpu"])


_machines: dict[tuple[Group, str], Machine] = {}
kept_by_group.append(_machines)
# What was chosen by the rates, by keys with the group among them.
kept_by_rates: list[dict[Any, Any]] = []
kept_by_rates.append(straight)


def forget_rates(group: Group) -> None:
    """Forget the rates of `group` and all that was chosen by them; the file stays.

    Ranks whose weights are uneven have chosen for other shapes: if one kept a choice that another
    must make by new rates, they might not choose alike.
    """
    for kept in (_machines, *kept_by_rates):
        for key in [key for key in kept if group in key]:
            del kept[key]


def machine(group: Group, device: torch.device) -> Machine:
    """The rates for `group` on `device`. Collective the first time in a process."""
    if group.virtual is not None:
        stood_for, H = group.virtual.hardware, len(group.hosts)
        rates = stood_for.rates() if stood_for else _NOMINAL
        return replace(rates, between=[[rates.wire] * H] * H, between_us=10.0) if H else rates
    found = _machines.get((group, device.type))
    if found is None:
        fields = Machine.__dataclass_fields__
        kept = kept_files.load(_name_for(group, device), fields) if group.rank == 0 else None
        tries = kept["tries"] if kept else 0
        if kept and (_may_be_better_now(kept) or len(kept["between"]) != len(group.hosts)):
            kept = None
        if (kept := _of_first(group, kept)) is None:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "the rates of the machine are not known yet, and cannot be measured during "
                    "CUDA-graph capture: run the call once before"
                )
            return calibrate(group, device, tries + 1)
        found = _machines[group, device.type] = Machine(**kept)
    return found


def calibrate(group: Group, device: torch.device, tries: int = 1) -> Machine:
    """Measure the rates for `group` on `device` now, and keep them. Collective."""
    load, start = load_a_core(), time.monotonic()
    with unwatched(group):
        measured = replace(_measure(group, device), load=round(load, 2), tries=tries)
        rates = _of_first(group, asdict(measured))
    if group.rank == 0:
        kept_files.save(_name_for(group, device), rates)
        told = group.world_size, time.monotonic() - start, file_of(group, device) or "no file"
        _logger.info("rates of %d ranks measured in %.2f s, kept in %s", *told)
    forget_rates(group)
    found = _machines[group, device.type] = Machine(**rates)
    return found


def load_a_core() -> float:
    """The load of the last minute, as a part of the machine's cores."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def _may_be_better_now(kept: dict[str, Any]) -> bool:
    """Whether rates were taken under a load that is lower now."""
    busy: bool = kept["load"] > BUSY and kept["tries"] < _MOST_TRIES
    return busy and load_a_core() <= max(BUSY, kept["load"] / 2)


def _of_first(group: Group, value: Any) -> Any:
    """The `value` of rank 0."""
    if group.world_size == 1:
        return value
    return group.gather_objects(value, "the rates of the machine")[0]


def file_of(group: Group, device: torch.device) -> Path | None:
    """The file that keeps the rates, if there is one."""
    files = [folder / _name_for(group, device) for folder in kept_files.folders()]
    return next(filter(os.path.isfile, files), None)


def _name_for(group: Group, device: torch.device) -> str:
    conditions = kept_files.digest(
        torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        torch.__version__,
        torch.get_num_threads(),
        group.world_size,
        dist.get_backend(group.pg),
        group.why,
        group.apart,
        group.hosts,
        group.nodes,
        sorted(Machine.__dataclass_fields__),
        _METHOD,
    )
    return f"machine-{conditions}.json"


_METHOD = 2  # by which rates are measured: those of another one are not read


def _cpu_name() -> str:
    with open("/proc/cpuinfo") as info:
        told = [line.split(":")[1].strip() for line in info if line.startswith(_CPU_FIELDS)]
    # Virtual machines hide the model's name, but not these.
    return f"{sorted(set(told)) or platform.machine()} x{os.cpu_count()}"


_CPU_FIELDS = ("model name", "cpu family", "model\t", "stepping")


def onednn_is_quicker() -> bool:
    """Whether oneDNN multiplies fp32 on this CPU so much faster than what torch.mm uses that its
    errors, up to 2.3 times as large, are worth it.
    """
    return float(_compared_matmuls()["onednn_gain"]) > 1.5


def bfloat16_gain() -> float:
    """How many times as fast as fp32 torch.mm multiplies bf16 on this CPU: below 1 without
    instructions for it.
    """
    return float(_compared_matmuls()["bfloat16_gain"])


@lru_cache(maxsize=1)
def _compared_matmuls() -> dict[str, Any]:
    """Measured once on a machine and kept: the libraries that it decides on round differently, and
    results must be the same from run to run, and from rank to rank.
    """
    name = f"matmul-{kept_files.digest(_cpu_name(), torch.__version__, 'onednn_gain')}.json"
    kept = kept_files.load(name, _UNMEASURED)
    if kept is None:
        onednn = torch.backends.mkldnn.is_available()
        with unwatched():
            x = torch.ones(384, 384, device="cpu")
            halves, fp32_us = x.bfloat16(), least_us(lambda: x @ x, 9)
            measured = {
                "onednn_gain": fp32_us / least_us(lambda: _onednn_square(x), 9) if onednn else 0.0,
                "bfloat16_gain": fp32_us / least_us(lambda: halves @ halves, 9),
            }
        # Of ranks that measure at the same time, all use the results of one.
        kept_files.save(name, measured, first=True)
        kept = kept_files.load(name, measured) or _UNMEASURED
    return kept


# Where nothing can be kept: not the fastest choice, but the same on all ranks.
_UNMEASURED = {"onednn_gain": 0.0, "bfloat16_gain": 0.0}


def _onednn_square(x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, x.t(), None, "none", [], "")
    return y


def _square(x: torch.Tensor) -> torch.Tensor:
    """x @ x by the library that the ops use."""
    fp32_on_cpu = x.device.type == "cpu" and x.dtype == torch.float32
    return _onednn_square(x) if fp32_on_cpu and onednn_is_quicker() else x @ x


def least_us(
    call: Callable[[], object], rounds: int, device: torch.device | None = None, calls: int = 1
) -> float:
    """Time of a call in us: the least of `rounds`, after one that is not counted.

    Of calls in which ranks wait for each other a round has several: the last to come waits for
    none. On a GPU it is device time: what the host takes to enqueue is hidden behind earlier work,
    as in a model's step.
    """

    def several() -> None:
        for _ in range(calls):
            call()

    call()
    times = []
    for _ in range(rounds):
        if device is not None and device.type == "cuda":
            times.append(device_us(several, lead=call))  # ranks wait for each other in `lead`
            continue
        start = time.perf_counter()
        several()
        times.append((time.perf_counter() - start) * 1e6)
    return max(min(times) / calls, 1e-3)


def device_us(call: Callable[[], object], lead: Callable[[], object] | None = None) -> float:
    """What `call` takes on the current GPU, which waits until the host has enqueued it.

    `lead` is enqueued before it and does not count.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(_HEAD_START_CYCLES)
    if lead is not None:
        lead()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3


_HEAD_START_CYCLES = 1_000_000  # half a millisecond


def matmul_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Flop per us of a large matmul, now."""
    size = _MATMUL_SIZE[device.type]
    a = torch.ones(size, size, dtype=dtype, device=device)
    return 2 * size**3 / least_us(partial(_square, a), 7, device)


def _measure(group: Group, device: torch.device) -> Machine:
    def timed(call: Callable[[], object], rounds: int, calls: int = 1) -> float:
        return least_us(call, rounds, device, calls)

    if inside := _inside.pop((group, device.type), None):
        flops, copy, sync_us = inside
        return _with_wire(Machine(flops, copy, sync_us, 0.0, 0.0), group, device, timed, brief=True)
    flops = {str(dtype): matmul_rate(dtype, device) for dtype in (torch.float32, torch.bfloat16)}
    if device.type == "cuda":
        flops[str(torch.float16)] = flops[str(torch.bfloat16)]
        if torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9):
            # By the data sheets of all chips that have it.
            flops[str(torch.float8_e4m3fn)] = 2 * flops[str(torch.bfloat16)]

    nbytes = _COPY_BYTES[device.type]
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    if group.world_size == 1:
        target = torch.empty_like(source)
        return Machine(flops, nbytes / timed(lambda: target.copy_(source), 5), 0.0, 1e9, 0.0)

    copy, sync_us = 0.0, 0.0
    near = inside_of(group) if in_two_levels(group) else group
    if near.world_size == 1:
        target = torch.empty_like(source)
        copy = nbytes / timed(lambda: target.copy_(source), 5)
    elif not near.unreached(device):
        target = torch.empty_like(source)

        def nothing() -> None:
            with exchange(near, 0, "measure", device, channel="measure") as ex:
                ex.signal_all()

        def read() -> None:
            with exchange(near, nbytes, "measure", device, channel="measure") as ex:
                ex.signal_all()
                peer = ex.peers()[0]
                ex.wait(peer)
                target.copy_(ex.peer(peer, (nbytes,), torch.uint8))

        sync_us = timed(nothing, 4, 10)
        copy_us = timed(read, 4, 2)
        copy = nbytes / max(copy_us - sync_us, copy_us / 2)
        give_back(near, "measure", device)
    if near is not group and near.world_size > 1:
        _inside[near, device.type] = flops, copy, sync_us
    return _with_wire(Machine(flops, copy, sync_us, 0.0, 0.0), group, device, timed)


# Of the ranks of one host, by the device's type: flops, copy and sync_us, just measured for a group
# over several, whose first call is likely to ask for theirs next.
_inside: dict[tuple[Group, str], tuple[dict[str, float], float, float]] = {}
kept_by_group.append(_inside)


def _with_wire(
    rates: Machine,
    group: Group,
    device: torch.device,
    timed: Callable[..., float],
    brief: bool = False,
) -> Machine:
    """With those of the process group, and of what crosses between hosts.

    Args:
        brief: whether a first call has measured enough before.
    """
    nbytes, several = _COPY_BYTES[device.type], in_two_levels(group)
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    # Threads of asynchronous saves may call collectives of the user's own group meanwhile.
    on_gloo = device.type == "cpu" and bool(backends_of(group.pg) & {"gloo", "undefined"})
    bound = timedelta(seconds=settings.timeout_s())
    own = new_group(group.ranks, "gloo", bound) if on_gloo else None
    network = _Network(group, own or group.pg, source, timed)
    gather = network.gather
    # Networks may be slow, and the first call waits for all of it.
    wire_us = timed(partial(gather, 64), *((3, 4) if several or brief else (5, 8)))
    if several:
        rate = network.rate(gather, network.sizes_of(gather, _ENOUGH_US), wire_us)
    else:
        sent = nbytes // 4 if brief else nbytes
        whole_us = timed(partial(gather, sent), *((2, 1) if brief else (3, 2)))
        rate = sent / max(whole_us - wire_us, 1.0)
    rates = replace(rates, wire=rate * (group.world_size - 1), wire_us=wire_us)
    if several:
        rates = network.with_hosts(rates)
    if own is not None:
        dist.destroy_process_group(own)
    return rates


# Over networks: what is sent at first, and what takes long enough beside the start of a call.
_LEAST_BYTES, _ENOUGH_US = 64 << 10, 1e4


@dataclass(frozen=True)
class _Network:
    """Between hosts, as `pg` uses it: it sends the first bytes of `source`."""

    group: Group
    pg: Any
    source: torch.Tensor
    timed: Callable[..., float]

    def gather(self, nbytes: int) -> None:
        """From every rank."""
        part = self.source[:nbytes]
        parts = [torch.empty_like(part) for _ in range(self.group.world_size)]
        dist.all_gather(parts, part, group=self.pg)

    def shift(self, step: int, nbytes: int) -> None:
        """Every rank hears from the host `step` before its own, and from no other."""
        sends, receives = ([nbytes * n for n in each] for each in rails(self.group, step))
        hearing = sum(map(bool, sends))
        x = self.source[:nbytes] if hearing == 1 else self.source[:nbytes].repeat(hearing)
        out = self.source.new_empty(sum(receives))
        dist.all_to_all_single(out, x, receives, sends, group=self.pg)

    def sizes_of(self, call: Callable[[int], object], enough_us: float) -> tuple[int, int]:
        """Bytes of which `call` takes so long on any rank, or all; and a quarter of them, or none.

        Collective, as `call` is.
        """
        sent, all_of_it = _LEAST_BYTES, self.source.numel()
        while sent < all_of_it:
            most = torch.tensor(self.timed(partial(call, sent), 1), device=self.source.device)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.pg)
            if float(most) > enough_us:
                break
            sent *= 2
        return sent, sent // 4 if sent > 2 * _LEAST_BYTES else 0

    def rate(self, call: Callable[[int], object], sizes: tuple[int, int], start_us: float) -> float:
        """Bytes per us of those behind the fewer of two sizes: buffers take the first at once.

        Args:
            start_us: of a call of no bytes.
        """
        sent, less = sizes
        less_us = self.timed(partial(call, less), 2) if less else start_us
        us, more = self.timed(partial(call, sent), 2), sent - less
        # Whatever the noise of the fewer, no more than twice what all of them were sent at.
        return more / max(us - less_us, us * more / sent / 2, 1.0)

    def with_hosts(self, rates: Machine) -> Machine:
        """With what crosses from each host to each."""
        group = self.group
        H, us = len(group.hosts), self.timed(partial(self.shift, 1, 64), 3, 4)
        # Of many hosts there are many pairs.
        enough_us = max(_ENOUGH_US / (H - 1), _ENOUGH_US / 10)
        sizes = self.sizes_of(partial(self.shift, 1), enough_us)
        heard = [self.rate(partial(self.shift, step), sizes, us) for step in range(1, H)]
        told = group.gather_objects((heard, us, rates.copy, rates.sync_us), "rates between hosts")
        between = [[0.0] * H for _ in range(H)]
        for to, ranks in enumerate(group.hosts):
            for step in range(1, H):
                between[to - step][to] = min(told[rank][0][step - 1] for rank in ranks)
        _, apart, copies, syncs = zip(*told, strict=True)
        return replace(
            rates, copy=min(copies), sync_us=max(syncs), between=between, between_us=max(apart)
        )
