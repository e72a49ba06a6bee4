"""What kernels need to know of a chip, and the tiles of a matmul that suit it.

Everything here depends on shapes, dtype and chip alone, because all ranks of a call must arrive at
the same tiles. Tables of measured tiles take precedence: `weft.kernels.engine.tuning`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch

from weft import settings
from weft.collectives.prices.hardware import family_of
from weft.collectives.ranks.group import here
from weft.collectives.ranks.pad import MAX_PROGRAMS


@dataclass(frozen=True)
class Chip:
    """A GPU, or what stands for one.

    Attributes:
        name: "sm_90", "gfx942", ..., or "interpreter".
        cores: programs that run at once, one on each SM or CU.
        shared_bytes: shared memory (LDS) that one program may use.
        descriptors: whether tensor descriptors are copied by hardware (TMA).
        fp8: whether its matrix units multiply float8_e4m3fn.
    """

    name: str
    cores: int
    shared_bytes: int
    descriptors: bool = False
    fp8: bool = False

    @property
    def is_amd(self) -> bool:
        """Whether it is one of AMD's CDNA chips."""
        return self.name.startswith("gfx")

    @property
    def family(self) -> str:
        """The chip of `KNOWN` whose tiles suit it: "sm_80" for sm_89, "gfx942" for gfx90a."""
        return family_of(self.name)

    @property
    def programs(self) -> int:
        """The largest grid whose programs are all resident and have a signal slot."""
        return min(self.cores, MAX_PROGRAMS)


# The interpreter runs programs one after another, so there are few, but several.
INTERPRETER = Chip("interpreter", 3, 1 << 30, fp8=True)
KNOWN = (
    Chip("sm_80", 108, 163 << 10),
    Chip("sm_90", 132, 227 << 10, descriptors=True, fp8=True),
    Chip("sm_100", 148, 227 << 10, descriptors=True, fp8=True),
    Chip("gfx942", 304, 64 << 10),
)


def known(name: str) -> Chip:
    """The chip of `KNOWN` with that name.

    Raises:
        ValueError: there is none.
    """
    found = next((chip for chip in KNOWN if chip.name == name), None)
    if found is None:
        names = ", ".join(chip.name for chip in KNOWN)
        raise ValueError(f"the chip must be one of {names}, got {name!r}")
    return found


def chip_of(device: torch.device) -> Chip:
    """The chip behind `device`, or the one that virtual ranks stand for; a rank's share of it where
    they run on one at the same time, and no more than WEFT_SMS.

    Compute capabilities with the same major number count as one family.
    """
    ranks = here.world and here.world.virtual
    if ranks and ranks.chip:
        return known(ranks.chip)
    chip = _chip_behind(device)
    if chip is INTERPRETER:
        return chip
    return _share_of_chip(chip, ranks.sharing if ranks else 1, settings.sms())


@lru_cache(maxsize=64)
def _share_of_chip(chip: Chip, ranks: int, sms: int) -> Chip:
    """What a rank counts on of a chip that several use, or others (`sms`, if not 0)."""
    if ranks == 1 and not sms:
        return chip
    return replace(chip, cores=min(sms or chip.cores, chip.cores // ranks))


@lru_cache(maxsize=64)
def _chip_behind(device: torch.device) -> Chip:
    if device.type == "cpu":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        name = properties.gcnArchName.split(":")[0]
        return Chip(name, properties.multi_processor_count, 64 << 10)
    return Chip(
        f"sm_{properties.major}{properties.minor}",
        properties.multi_processor_count,
        # Not in torch's type stubs.
        int(getattr(properties, "shared_memory_per_block_optin", 48 << 10)),
        descriptors=properties.major >= 9,
        fp8=(properties.major, properties.minor) >= (8, 9),
    )


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How Triton compiles a kernel.

    Attributes:
        all_registers: for NVIDIA chips and at most 8 warps: let a lane use all registers there are.
            Otherwise the assembler spills a few bytes if a core can then hold another program.
        beside_others: for NVIDIA chips: leave room on a core for one more warp.
    """

    num_warps: int = 8
    num_stages: int = 3
    all_registers: bool = False
    beside_others: bool = False

    @property
    def options(self) -> dict[str, int]:
        """What a kernel is launched with."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.all_registers or self.beside_others:
            options["maxnreg"] = 240 if self.beside_others else 255
        return options


@dataclass(frozen=True)
class Tiling(LaunchOptions):
    """How a matmul is cut: see `weft.kernels.device.tiles`.

    Of 132 tiles of 128 x 256 that run together, 8 high, a step reads 5,248 rows and columns; 4 high
    8,960, and 16 high 4,160, for which twice as many gathered rows must have come.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int = 8


# Shards of at least this size are fetched by copy engines: enqueueing and announcing a copy takes 4
# us, in which a link of 450 GB/s moves 1.5 MB.
_ENGINE_BYTES = 4 << 20


def gathers_by_copy_engines(M: int, K: int, dtype: torch.dtype, world_size: int) -> bool:
    """Whether GPUs' copy engines gather an (M, K) from the shards of all ranks."""
    return world_size > 1 and M * K * dtype.itemsize >= world_size * _ENGINE_BYTES


def sums_in_one_shot(chip: Chip, M: int, N: int, world_size: int) -> bool:
    """Whether a matmul_all_reduce of (M, N) has each rank receive the partial sums of all.

    That is (W - 1) times their bytes; two shots receive 1.25 to 2 times as many, but exchange
    signals once more. In virtual time 4 H100 take 22.4 and 22.8 us at 256 KiB of fp32; B200's links
    are twice as quick: one shot takes 12.7 us, not 16.1, on 4, and 12.0, not 12.9, on 8, at 1 MiB
    18.5, not 19.9, on 4.
    """
    most = 128 << 10
    if chip is INTERPRETER:
        most = 16 << 10
    elif chip.name == "sm_90" and world_size <= 4:
        most = 256 << 10
    elif chip.name == "sm_100":
        most = (1 << 20) if world_size <= 4 else (256 << 10)
    return world_size <= 2 or most >= M * N * 4


MOST_STAGES = 8
# Programs that share a tile of a split matmul. In virtual time (one H100, 16 rows, bf16) 4, 8, 16
# take 12.0, 10.5, 11.1 us of 8192 x 256, 12.0, 11.5, 12.5 of 8192 x 512, 10.4, 10.9, 11.3 of 4096 x
# 768.
MOST_SPLIT = 8


def scatters_in_one_shot(
    chip: Chip, chunk: int, N: int, dtype: torch.dtype, world_size: int, tuned: Tiling | None
) -> bool:
    """Whether tiles of a matmul_reduce_scatter may straddle chunks of at most (chunk, N)."""
    if chip is not INTERPRETER:
        if chip.is_amd:  # chunks have tiles of 64 rows; where these are few, programs share one
            few = 2 * world_size * chunk * N <= 128 * 128 * chip.cores
            return world_size > 1 and chunk < (128 if few else 64)
        return world_size > 1 and chunk < 128
    tiling = tuned or chunk_tiling_for(chip, chunk, N, dtype, world_size)
    return world_size > 1 and chunk < tiling.block_m


def senders_for(chip: Chip, count: int) -> int:
    """How many programs of a matmul_reduce_scatter of `count` tiles send one at a time.

    A quarter of the cores. By what `Hardware` has of an H200 a tile of 98 KB leaves in 2.5 us, and
    the next program sends 2 us later: 21 GB/s a sender; 22 fill a link of 450 GB/s. There one
    rank of 8, without the link, takes 271, 214, 208 and 202 us for the way down of a 70B layer at
    M = 2048 with 16, 33, 66 and all 132 senders; in virtual time, with the link, 33 and 66 take 257
    and 267 us.

    Half of them for up to two tiles a program, whose arithmetic has little to hide: an 8B layer at
    M = 2048 takes 122 us, not 127, on 8 B200 83, not 92, and a 70B one at 1024 161, not 162, and
    106, not 112.
    """
    return max(1, chip.cores // (2 if count <= 2 * chip.cores else 4))


@lru_cache(maxsize=1024)
def tiling_for(chip: Chip, M: int, N: int, dtype: torch.dtype, pieces: int = 1) -> Tiling:
    """Tiles for `pieces` outputs of (M, N) each, made by one launch; no tile spans two of them.

    K plays no part: ranks may differ in it, but not in the tiles.
    """
    if chip is INTERPRETER:
        return Tiling(16 if M <= 16 else 32, 16 if N <= 16 else 32, 32, group_m=2)
    if dtype == torch.float32:
        # Multiply-adds without tensor cores on NVIDIA. These are the largest shapes tried that do
        # not spill in any kernel.
        if chip.is_amd:
            return Tiling(64, 64, 32, num_warps=4, num_stages=2)
        if M <= 32:
            return Tiling(32, 32, 32, num_warps=4, num_stages=3, all_registers=True)
        if not chip.descriptors:
            return Tiling(64, 64, 16, num_warps=4, num_stages=3)
        return Tiling(128, 128, 16, num_warps=8, num_stages=2)
    if M <= 64 or pieces * M * N <= 128 * 128 * chip.cores // 2:
        # Small: more and smaller tiles, so that every core has one.
        block_m = 16 if M <= 16 else 32 if M <= 32 else 64
        if chip.is_amd:
            return Tiling(block_m, 64, 64, num_warps=4, num_stages=2)
        # On an H200 a step takes 1.2 us by the number of steps that are loaded ahead, three of
        # 16 x 64 or 64 x 128 and two of 128 x 128 alike: with seven ahead, memory takes longer.
        stages = MOST_STAGES if chip.shared_bytes >= 200 << 10 else 4
        return Tiling(block_m, 64, 64, num_warps=4, num_stages=stages, all_registers=True)
    if chip.is_amd:
        return Tiling(128, 128, 64, num_warps=8, num_stages=2)
    if dtype.itemsize == 1 and chip.name == "sm_90":
        return Tiling(128, 128, 128, num_warps=8, num_stages=4)  # two sums: see `tiles.dot`
    wide = Tiling(128, 256, 64, num_warps=8, num_stages=4)
    stage_bytes = (wide.block_m + wide.block_n) * wide.block_k * dtype.itemsize
    if chip.shared_bytes >= wide.num_stages * stage_bytes + (8 << 10):
        # Half as wide if there would be fewer tiles than cores; for more stages see above.
        if pieces * -(-M // wide.block_m) * -(-N // wide.block_n) < chip.cores:
            registers = chip.name == "sm_100"  # else 8 bytes spill there
            return replace(wide, block_n=128, num_stages=6, all_registers=registers)
        return wide
    return Tiling(128, 128, 32, num_warps=8, num_stages=4)


def gather_tiling_for(
    chip: Chip, M: int, N: int, dtype: torch.dtype, world_size: int, *, pair: bool = False
) -> Tiling:
    """As `tiling_for`, where a part of the cores fetches shards, and the rest make tiles.

    Args:
        world_size: with 1 there are no shards to fetch, and all cores make tiles.
        pair: a step loads blocks of two weights.
    """
    tiling, fetching = tiling_for(chip, M, N, dtype), chip.cores // 8 if world_size > 1 else 0
    tiling = _in_few_waves(tiling, chip, M, N, dtype, fetching)
    if world_size == 1:  # where rows are yet to come, a first wave takes the time until then
        tiling = _in_one_wave(tiling, chip, M, N)
    return tiling if pair else _in_long_steps(tiling, dtype)


class FetchBlocks(NamedTuple):
    """How copy programs of a gather move shards: `rows` x `columns` are a block, of which one is
    moved at a time; `parts`, into how many K is cut; `chunk_rows`, which are announced together.
    """

    rows: int
    columns: int
    parts: int
    chunk_rows: int


def fetch_blocks(
    M: int, K: int, itemsize: int, world_size: int, tiling: Tiling, programs: int
) -> FetchBlocks:
    """Of (M, K), fetched by so many programs beside tiles of `tiling`."""
    columns = 512 * tiling.num_warps // itemsize
    # Twice as many rows spill beside 4 warps' tiles, and in fp8, whose bytes take a register each.
    rows = tiling.num_warps * min(2, itemsize)
    # Two parts if each is a copy block wide and a shard has two chunks: more or smaller ones cost
    # more in signals than tiles gain by starting early (docs/scaling.md). Two chunks a program.
    parts = 2 if min(M - 128 * world_size, K - 2 * columns) >= 0 else 1
    return FetchBlocks(rows, columns, parts, parts * min(32, max(8, M // (2 * programs))))


def chunk_tiling_for(chip: Chip, chunk: int, N: int, dtype: torch.dtype, world_size: int) -> Tiling:
    """As `tiling_for`, of a chunk of (chunk, N) for each rank, whose partial sums are sent.

    On AMD's up to four waves of large tiles are made by smaller ones, so that more than the last
    are sent behind arithmetic: in virtual time an 8B layer takes 92.8 us on 8 MI300X at M = 2048,
    not 135, on 4 105, not 134, at 1024, and on 2 225, not 252.
    """
    tiling = tiling_for(chip, chunk, N, dtype, world_size)
    few = world_size * chunk * N <= 4 * 128 * 128 * chip.cores
    if chip.is_amd and few and tiling.block_m == 128:
        return Tiling(64, 64, 64, num_warps=4, num_stages=2)
    return _in_few_waves(tiling, chip, world_size * chunk, N, dtype, 0)


def sum_tiling_for(
    chip: Chip, M: int, N: int, dtype: torch.dtype, *, two_shots: bool = False
) -> Tiling:
    """As `tiling_for`, of one output whose partial sums are sent.

    Few tiles are half as high while each has a core of its own: else two programs share one's
    contraction, or cores have none. In virtual time 64 rows of an 8B layer, scattered, take 8 H100
    14.9 us, not 18.8, and kept everywhere 4 H100 26.7, not 27.7, and 8 MI300X 30.9, not 35.8.
    """
    tiling = _in_few_waves(tiling_for(chip, M, N, dtype), chip, M, N, dtype, 0)
    few = 2 * -(-M // tiling.block_m) * -(-N // tiling.block_n) <= chip.cores
    if few and tiling.block_m in (32, 64) and tiling.block_n == 64 and dtype.itemsize == 2:
        tiling = replace(tiling, block_m=tiling.block_m // 2)
    # One program adds up a tile in two shots: a wide one takes longer than a wave of a B200.
    if not (two_shots and chip.name == "sm_100"):
        tiling = _in_one_wave(tiling, chip, M, N)
    return _in_long_steps(tiling, dtype)


def _in_one_wave(tiling: Tiling, chip: Chip, M: int, N: int) -> Tiling:
    """Tiles that `tiling_for` has narrowed are as wide again if they would make two waves, which
    are played to take 1.3 times as long as one of those.
    """
    narrowed = (tiling.block_m, tiling.block_n, tiling.num_stages) == (128, 128, 6)
    if narrowed and chip.cores < -(-M // 128) * -(-N // 128):
        return replace(tiling, block_n=256, num_stages=4, all_registers=False)
    return tiling


def _in_few_waves(
    tiling: Tiling, chip: Chip, M: int, N: int, dtype: torch.dtype, others: int
) -> Tiling:
    """Small tiles that the cores, but for `others`, would make in several waves, twice as wide: a
    wave takes a tile's loads, not its arithmetic.
    """
    small = (tiling.block_m, tiling.block_n) == (64, 64) and dtype.itemsize == 2 and not chip.is_amd
    if small and chip.cores - others < -(-M // 64) * -(-N // 64):
        return replace(tiling, block_n=128)
    return tiling


def _in_long_steps(tiling: Tiling, dtype: torch.dtype) -> Tiling:
    """Small tiles by steps that load one block of x and one of w, where memory has room: twice as
    long, as a step waits for as long whatever it loads.
    """
    if (tiling.block_n, tiling.num_stages) != (64, MOST_STAGES) or dtype.itemsize != 2:
        return tiling
    return replace(tiling, block_k=2 * tiling.block_k, num_stages=6)
