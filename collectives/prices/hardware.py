"""What times are counted on: a chip, its memory, and the links between chips.

Rates are those of the data sheets, dense, in units a second; `sustained` and `link_sustained` say
how much of them long matmuls and long transfers have been measured to reach. Latencies are
published microbenchmarks where there are any, and estimates else: every preset says which.

Sources
  [H100]    NVIDIA H100 Tensor Core GPU data sheet, SXM5
  [H200]    NVIDIA H200 Tensor Core GPU data sheet, SXM
  [B200]    NVIDIA HGX B200 data sheet; SMs as the driver reports them
  [MI300X]  AMD Instinct MI300X data sheet and the CDNA 3 white paper
  [A100]    NVIDIA A100 white paper: 5120 bytes a clock between L2 and the SMs
  [H800]    the H100 of the Chinese market: NVLink of 400 GB/s both ways together
  [H20]     NVIDIA H20 data sheet, HGX: 78 SMs, 148 TFLOP/s in bf16, NVLink as the H100
  [B300]    NVIDIA HGX B300 data sheet
  [MI355X]  AMD Instinct MI355X data sheet: 256 CUs, seven links of 76.8 GB/s each way
  [MI308X]  the MI300X with 80 of its 304 CUs
  [MAMF]    S. Bekman, Machine Learning Engineering: maximum achievable matmul FLOPS, measured
  [DeepEP]  DeepEP V2: 740 of 900 GB/s received over NVLink 5 by dispatch and combine
  [CUDA]    CUDA C++ Programming Guide, throughput of arithmetic instructions: an SM makes 16
            exponentials or the like in a clock, or 128 (8.0: 64) results of fp32 arithmetic
  [CDNA3]   AMD's CDNA 3 instruction set: transcendentals at a quarter of the rate of others, which
            the data sheet's fp32 counts in pairs
  [gpu]     docs/gpu.md, one H200: of a matmul_reduce_scatter 2048 x 8192 x 28672 as one rank of 8,
            16, 33, 66 and all 132 programs that send at a time
  [Hopper]  Luo et al., arXiv 2402.13499: an L2 hit about 260 cycles, memory about 480
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from weft.collectives import cost
from weft.collectives.cost import Machine
from weft.collectives.protocols import PROTOCOLS, Fabric
from weft.collectives.ranks.group import Group, kept_by_group

Topology = Literal["switch", "mesh"]


@dataclass(frozen=True)
class Hardware:
    """A domain of equal chips.

    Attributes:
        name, chip: for people, and as `weft.kernels.engine.chips` knows it ("sm_90").
        cores: SMs or compute units.
        flops: dense matmul rate of a chip by dtype, in flop a second.
        sustained: share of `flops` that long matmuls reach.
        hbm_bandwidth: bytes a second, reads and writes together.
        l2_bytes, l2_bandwidth: the last cache before HBM.
        core_bandwidth: bytes a second that one core can move.
        program_bandwidth: of these, by a program that stores, or loads what no dots hide: measured
            on an H200 ([gpu]), in its own memory; assumed of NVIDIA's others and over links, left
            out of AMD's. `docs/scaling.md` tells what would change.
        wait_us: from a word's arrival until a program that waits for it goes on: [gpu], likewise.
        look_us: the same where words carry their data: from a norm of 8 rows by such words, [gpu],
            and a published sum of 48 KiB; docs/virtual_time.md has both.
        link_bandwidth: bytes a second and direction: of a chip's port on the switch, or of each of
            its links to a peer in a mesh.
        link_sustained: share of `link_bandwidth` that long transfers reach.
        topology: "switch": any peer at the port's full rate; "mesh": a link to each peer.
        ranks: chips in the domain.
        multicast: whether its switch adds up and copies (NVLS).
        link_reached: what libraries' collectives reach of their share of an H100's NVLink, on these
            links: fitted to published times, see `weft bench published`.
        rail_bandwidth: bytes a second of a chip's own network card, to other domains.
        l2_latency_us, hbm_latency_us: of a load.
        link_latency_us: one way to a peer; a remote load takes two and a local one.
        ahead_us: in a main loop, from where the copy of a step's operands is issued until they can
            be multiplied, while all cores load: measured on an H200 (docs/virtual_time.md), assumed
            of NVIDIA's others, left out of AMD's.
        specials: exponentials and the like, as a share of the fp32 results that the data sheet's
            multiply-adds are: [CUDA], [CDNA3].
        launch_us: from the end of a kernel to the start of the next one on its stream.
        collective_us: of a process group's collective (NCCL) that moves nothing: an estimate.
        collective_sustained: share of `link_bandwidth` that such a collective reaches in a
            timeline: by default what fits nine of NCCL's all-gathers of 32 to 512 MiB. For its
            times by size there is `weft.collectives.protocols`.
    """

    name: str
    chip: str
    cores: int
    flops: dict[str, float] = field(hash=False)
    sustained: float
    hbm_bandwidth: float
    l2_bytes: float
    l2_bandwidth: float
    core_bandwidth: float
    link_bandwidth: float
    link_sustained: float
    topology: Topology
    ranks: int
    l2_latency_us: float
    hbm_latency_us: float
    link_latency_us: float
    launch_us: float
    collective_us: float = 15.0
    collective_sustained: float = 0.68
    multicast: bool = True
    link_reached: float = 1.0
    rail_bandwidth: float = 50e9
    program_bandwidth: float = math.inf
    wait_us: float = 0.0
    look_us: float = 0.0
    ahead_us: float = 1.2
    specials: float = 1 / 8

    def core_flops_per_us(self, dtype: str) -> float:
        """Rate of one core on operands of `dtype` ("bfloat16"), sustained.

        Raises:
            ValueError: the chip has no rate for it.
        """
        if dtype not in self.flops:
            raise ValueError(f"{self.name} has no matmul rate for {dtype}, only {[*self.flops]}")
        return self.flops[dtype] * self.sustained / self.cores / 1e6

    def core_results_per_us(self) -> float:
        """fp32 results of one core outside of its matrix units, sustained as those are."""
        return self.core_flops_per_us("float32") / 2

    def rates(self) -> Machine:
        """What `weft.explain` and the choice of an engine would measure on such chips."""
        port = self.link_bandwidth * (self.ranks - 1 if self.topology == "mesh" else 1) / 1e6
        names = {dtype: dtype for dtype in ("bfloat16", "float16", "float32", "float64")}
        if self.chip != "gfx942":  # which has another float8
            names["float8"] = "float8_e4m3fn"
        flops = {
            f"torch.{names[dtype]}": rate * self.sustained / 1e6
            for dtype, rate in self.flops.items()
            if dtype in names
        }
        return Machine(
            flops,
            copy=port * self.link_sustained,
            sync_us=self.launch_us + 2 * self.link_latency_us,
            wire=port * self.collective_sustained,
            wire_us=self.collective_us,
        )

    def fabric(self, ranks: int, hosts: int = 1) -> Fabric:
        """The links of so many chips, as `weft.collectives.protocols` takes them.

        In a mesh a chip has a link to each peer that takes part.

        Raises:
            ValueError: more chips on a host than there are, or not as many on each.
        """
        here, rest = divmod(ranks, hosts)
        if rest or here > self.ranks:
            raise ValueError(
                f"{ranks} ranks on {hosts} hosts: {self.name} has up to {self.ranks} on each, and "
                f"as many on every one"
            )
        mesh = self.topology == "mesh"
        return Fabric(
            ranks,
            port=self.link_bandwidth * (max(here - 1, 1) if mesh else 1) / 1e6,
            direct=self.link_bandwidth / 1e6,
            ll=_NCCL_LL.get(self.chip, _NCCL_LL["sm_90"]),
            reached=self.link_reached,
            multicast=self.multicast,
            hosts=hosts,
            rail=self.rail_bandwidth / 1e6,
        )

    def link_rate(self, ranks: int) -> float:
        """Bytes a us that one of so many ranks on a host sends to all others, sustained."""
        return self.fabric(ranks).port * self.link_sustained

    def without_communication(self) -> Hardware:
        """The same chips, where what goes to peers or comes from them takes no time."""
        return replace(
            self,
            name=f"{self.name}, communication free",
            link_bandwidth=math.inf,
            link_latency_us=0.0,
        )


# NCCL's `llMaxBws` on one host, src/graph/tuning.cc: bytes a us.
_NCCL_LL = {"sm_80": 87.7e3, "sm_90": 141e3, "sm_100": 282e3}

_HOPPER_FLOPS = {
    "float8": 1978.9e12,
    "bfloat16": 989.4e12,
    "float16": 989.4e12,
    "tf32": 494.7e12,
    "float32": 66.9e12,
    "float64": 66.9e12,
}

# [H100], [MAMF] 794.5 of 989 TFLOP/s, [DeepEP], [A100] at 1.755 GHz, [Hopper]; 64 bytes a clock for
# an SM; the latency of the link and of a launch are estimates.
H100 = Hardware(
    name="H100",
    chip="sm_90",
    cores=132,
    flops=_HOPPER_FLOPS,
    sustained=0.803,
    hbm_bandwidth=3.35e12,
    l2_bytes=50e6,
    l2_bandwidth=5120 * 1.755e9,
    core_bandwidth=64 * 1.755e9,
    link_bandwidth=450e9,
    link_sustained=0.82,
    topology="switch",
    ranks=8,
    l2_latency_us=0.15,
    hbm_latency_us=0.3,
    link_latency_us=0.7,
    launch_us=2.0,
    program_bandwidth=40e9,
    wait_us=2.0,
    look_us=1.0,
)

# [H200]: the H100's chip with more and faster memory; [MAMF] has the same rate for it.
H200 = replace(H100, name="H200", hbm_bandwidth=4.8e12)

# [B200], [MAMF] 1745 of 2250 TFLOP/s, [DeepEP]; two dies, each taken to have the L2 bandwidth of
# [A100]; other latencies as for the H100.
B200 = replace(
    H100,
    name="B200",
    chip="sm_100",
    cores=148,
    flops={
        "float8": 4500e12,
        "bfloat16": 2250e12,
        "float16": 2250e12,
        "tf32": 1125e12,
        "float32": 75e12,
        "float64": 37e12,
    },
    sustained=0.776,
    hbm_bandwidth=7.7e12,
    l2_bytes=126e6,
    l2_bandwidth=2 * 5120 * 1.85e9,
    core_bandwidth=128 * 1.85e9,
    link_bandwidth=900e9,
    link_reached=0.62,
    hbm_latency_us=0.4,
)

# The same chips, 72 on one switch.
GB200_NVL72 = replace(B200, name="GB200 NVL72", ranks=72, hbm_bandwidth=8e12)

# [MI300X], [MAMF] 668.4 of 1307 TFLOP/s; the Infinity Cache stands for the L2; seven links of
# 64 GB/s each way; latencies are estimates.
MI300X = Hardware(
    name="MI300X",
    chip="gfx942",
    cores=304,
    flops={
        "float8": 2614.9e12,
        "bfloat16": 1307.4e12,
        "float16": 1307.4e12,
        "tf32": 653.7e12,
        "float32": 163.4e12,
        "float64": 163.4e12,
    },
    sustained=0.514,
    hbm_bandwidth=5.3e12,
    l2_bytes=256e6,
    l2_bandwidth=17.2e12,
    core_bandwidth=64 * 2.1e9,
    link_bandwidth=64e9,
    link_sustained=0.75,
    topology="mesh",
    ranks=8,
    l2_latency_us=0.25,
    hbm_latency_us=0.7,
    link_latency_us=1.0,
    launch_us=4.0,
    multicast=False,
    link_reached=0.83,
    ahead_us=0.0,
)

# [A100] of 80 GB, SXM; [MAMF] 267 of 312 TFLOP/s; NVLink 3 with 300 GB/s each way.
A100 = replace(
    H100,
    name="A100",
    chip="sm_80",
    cores=108,
    flops={
        "bfloat16": 312e12,
        "float16": 312e12,
        "tf32": 156e12,
        "float32": 19.5e12,
        "float64": 19.5e12,
    },
    sustained=0.856,
    hbm_bandwidth=2.04e12,
    l2_bytes=40e6,
    l2_bandwidth=5120 * 1.41e9,
    core_bandwidth=64 * 1.41e9,
    link_bandwidth=300e9,
    multicast=False,
    specials=1 / 4,
)

# [H800], [H20]: the latter multiplies slowly enough for its power.
H800 = replace(H100, name="H800", link_bandwidth=200e9)
H20 = replace(
    H100,
    name="H20",
    cores=78,
    flops={
        "float8": 296e12,
        "bfloat16": 148e12,
        "float16": 148e12,
        "tf32": 74e12,
        "float32": 44e12,
        "float64": 1e12,
    },
    sustained=0.93,
    hbm_bandwidth=4.0e12,
    l2_bytes=60e6,
)

# [B300]: the B200 with more memory and little fp64.
B300 = replace(B200, name="B300", flops=B200.flops | {"float64": 1.2e12}, hbm_bandwidth=8e12)

# [MI355X], sustained as on the MI300X for want of a measurement; [MI308X].
MI355X = replace(
    MI300X,
    name="MI355X",
    cores=256,
    flops={
        "float8": 5033e12,
        "bfloat16": 2516.6e12,
        "float16": 2516.6e12,
        "float32": 157.3e12,
        "float64": 78.6e12,
    },
    hbm_bandwidth=8e12,
    core_bandwidth=128 * 2.4e9,
    link_bandwidth=76.8e9,
)
MI308X = replace(
    MI300X,
    name="MI308X",
    cores=80,
    flops={dtype: rate * 80 / 304 for dtype, rate in MI300X.flops.items()},
)

PRESETS = {
    "h100": H100,
    "h200": H200,
    "b200": B200,
    "gb200-nvl72": GB200_NVL72,
    "mi300x": MI300X,
    "a100": A100,
    "h800": H800,
    "h20": H20,
    "b300": B300,
    "mi355x": MI355X,
    "mi308x": MI308X,
}


def family_of(chip: str) -> str:
    """The preset's `chip` that stands for one: "sm_80" for "sm_89", "gfx942" for "gfx90a"."""
    if chip.startswith("gfx"):
        return "gfx942"
    return {"8": "sm_80", "9": "sm_90"}.get(chip[3:-1], "sm_100")


def of_group(group: Group, device: torch.device) -> Hardware:
    """The chips that a group's ranks have, or stand for, with what was measured of them: the same
    on all ranks. Collective the first time in a process.
    """
    rates, W = cost.machine(group, device), group.world_size
    if group.virtual is not None and group.virtual.hardware is not None:
        found = group.virtual.hardware
    else:
        name, chip = "", group.virtual.chip if group.virtual is not None else ""
        if torch.cuda.is_available():
            name = torch.cuda.get_device_name(device)
            major, minor = torch.cuda.get_device_capability(device)
            chip = chip or ("gfx" if torch.version.hip else f"sm_{major}{minor}")
        found = measured(name, family_of(chip) if chip else "", rates, W)
    return found if found.ranks >= W else replace(found, ranks=W)


_fabrics: dict[tuple[Group, torch.device], Fabric] = {}
kept_by_group.append(_fabrics)
cost.kept_by_rates.append(_fabrics)


def fabric_of(group: Group, device: torch.device) -> Fabric:
    """The links between a group's ranks. Collective the first time in a process."""
    if group.virtual is not None:  # its chips may differ in the next run
        return of_group(group, device).fabric(group.world_size)
    if (group, device) not in _fabrics:
        _fabrics[group, device] = of_group(group, device).fabric(group.world_size)
    return _fabrics[group, device]


def measured(name: str, family: str, rates: Machine, ranks: int) -> Hardware:
    """The preset of a GPU, with what was measured on it in the place of what data sheets say.

    Args:
        name: the driver's ("NVIDIA H100 80GB HBM3").
        family: a preset's `chip`, which stands for chips that have no preset.
        ranks: that the rates are of.
    """
    words = re.split(r"[^a-z0-9]+", name.lower())
    like = [each for each in PRESETS.values() if each.chip == family] or [H100]
    preset = next((each for key, each in PRESETS.items() if key.split("-")[0] in words), like[0])
    sustained = rates.flops_of(torch.bfloat16) * 1e6 / preset.flops["bfloat16"]
    measured_flops = {
        dtype: rates.flops[f"torch.{dtype}"] * 1e6 / sustained
        for dtype in ("bfloat16", "float16", "float32")
        if f"torch.{dtype}" in rates.flops
    }
    links = max(ranks - 1, 1) if preset.topology == "mesh" else 1
    link = rates.copy * 1e6 / preset.link_sustained  # of which collectives' kernels have a share
    library = PROTOCOLS[-1].share * link * links / 1e6
    return replace(
        preset,
        flops=preset.flops | measured_flops,
        sustained=sustained,
        link_bandwidth=link,
        link_reached=rates.wire / library,
        link_latency_us=max(rates.sync_us - preset.launch_us, 0.2) / 2,
    )


def named(hardware: Hardware | str) -> Hardware:
    """The preset of that name ("h100"), or what is a description already.

    Raises:
        ValueError: no such preset.
    """
    if isinstance(hardware, Hardware):
        return hardware
    if hardware.lower() not in PRESETS:
        raise ValueError(f"hardware must be one of {[*PRESETS]} or a Hardware, got {hardware!r}")
    return PRESETS[hardware.lower()]
