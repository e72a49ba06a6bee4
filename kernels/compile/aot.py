"""Compile every kernel for named chips without a GPU, and report what each needs.

    weft aot --arch sm_90,gfx942 --json

The launches caught by `weft.kernels.compile.aot_cases` are given to Triton's compiler. Kernels must
be plain `JITFunction`s, so this runs in a process of its own with TRITON_INTERPRET=0.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, is_dataclass
from difflib import get_close_matches
from functools import cache
from multiprocessing import get_context
from typing import Any, TypeVar

import torch

from weft.collectives.device import signals
from weft.collectives.prices.hardware import PRESETS
from weft.kernels.compile import aot_loop
from weft.kernels.compile.aot_cases import Launch, launches
from weft.kernels.compile.known_spills import known_spills
from weft.kernels.compile.machine_code import TARGETS, compiled_launch, source
from weft.kernels.engine.chips import Chip, known
from weft.markdown import page_with

_T = TypeVar("_T")
# Chips by the names that people, and `weft sim --hardware`, call them.
_CHIPS = {name: each.chip for name, each in PRESETS.items() if each.chip in TARGETS}
# Instructions of matrix units (tcgen05, wgmma, mma, mfma), and plain multiply-adds.
_MATRIX = ("UTCHMMA", "UTCQMMA", "HGMMA", "QGMMA", "HMMA", "v_mfma")
_PLAIN = ("FFMA", "v_fma", "v_pk_fma", "v_fmac", "v_dot")
_LOAD = r"\b((?:LDGSTS|LDG)[.\w]*|(?:global|buffer)_load_(?:dword|u|s)\w*)"


@dataclass(frozen=True)
class _Core:
    """What programs share on a core (SM, CU).

    Attributes:
        registers, granule: 4-byte registers of all lanes; a lane gets a multiple of `granule`.
        warps, programs: the most that are resident.
        reserved_bytes: shared memory that each program takes besides its own.
        tensor_columns: columns of tensor memory.
    """

    registers: int
    warps: int
    programs: int
    shared_bytes: int
    lanes: int = 32
    granule: int = 8
    reserved_bytes: int = 1 << 10
    tensor_columns: int = 0


_CORES = {
    "sm_80": _Core(1 << 16, 64, 32, 164 << 10),
    "sm_90": _Core(1 << 16, 64, 32, 228 << 10),
    "sm_100": _Core(1 << 16, 64, 32, 228 << 10, tensor_columns=512),
    "gfx942": _Core(1 << 17, 32, 16, 64 << 10, lanes=64, reserved_bytes=0),
}


def occupancy(
    arch: str, registers: int, shared_bytes: int, num_warps: int, tensor_columns: int = 0
) -> tuple[int, float]:
    """Programs that fit on a core, and the fraction of its warps that they use.

    Example:
        sm_90, 128 registers, 100 KiB, 8 warps: registers allow 2 programs (65536 / 128 / 256) and
        so does shared memory (228 / 101); 16 of 64 warps: (2, 0.25).
    """
    core = _CORES[arch]
    held = -(-max(registers, 1) // core.granule) * core.granule * core.lanes
    # Warps are dealt to 4 schedulers, each with a quarter of the registers.
    by_registers = core.registers // 4 // held * 4 // num_warps
    by_shared = core.shared_bytes // max(1, shared_bytes + core.reserved_bytes)
    programs = min(by_registers, by_shared, core.warps // num_warps, core.programs)
    if tensor_columns:
        programs = min(programs, core.tensor_columns // tensor_columns)
    return programs, programs * num_warps / core.warps


def widest_load(text: str) -> str:
    """The widest global load for each lane, as the disassembly names it; UTMALDG is TMA.

    Example:
        Of "LDG.E R1", "LDGSTS.E.BYPASS.128 [R2]" and "LDG.E.64 R4": LDGSTS.E.BYPASS.128.
    """
    if re.search(r"\bUTMALDG", text):
        return "UTMALDG"
    return max(re.findall(_LOAD, text), key=lambda name: (_width(name), name), default="")


def _width(load: str) -> int:
    """Bits that a load moves for each lane."""
    if found := re.search(r"dwordx(\d)", load):
        return 32 * int(found[1])
    if found := re.search(r"\.[US]?(8|16|64|128|256)\b", load):
        return int(found[1])
    if found := re.search(r"_[us]?(byte|short)", load):
        return 8 if found[1] == "byte" else 16
    return 32


@dataclass(frozen=True)
class KernelReport:
    """What one kernel needs on one chip.

    Attributes:
        config: its constants, warps and stages.
        spills: bytes of local memory, and spilled registers on AMD.
        programs_a_core, occupancy: see `occupancy`.
        matrix_instruction: all kinds that occur, joined by +; if there are none, a multiply-add.
        widest_load: see `widest_load`.
    """

    case: str
    kernel: str
    arch: str
    dtype: str
    config: dict[str, Any]
    registers: int
    spills: int
    shared_bytes: int
    programs_a_core: int
    occupancy: float
    matrix_instruction: str
    widest_load: str

    @property
    def unknown_spills(self) -> int:
        """Bytes spilled beyond those of `known_spills`."""
        width = int(self.config.get("block_d", self.config.get("BLOCK_D", 0)))
        known = known_spills(self.arch, self.dtype, self.kernel, self.case, width)
        return max(0, self.spills - known)


def _found(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found.group(1)) if found else 0


def loop_of_launch(
    case: str, launch: Launch, chip: Chip, dtype: torch.dtype
) -> aot_loop.LoopReport | None:
    """Compile one caught launch for `chip`: its main loop, if it has one that multiplies."""
    compiled, text = compiled_launch(launch, chip)
    name, warps, ttgir = launch.kernel.__name__, compiled.metadata.num_warps, compiled.asm["ttgir"]
    return aot_loop.report(case, name, chip, dtype, warps, text, ttgir)


def compile_launch(case: str, launch: Launch, chip: Chip, dtype: torch.dtype) -> KernelReport:
    """Compile one caught launch for `chip`."""
    compiled, text = compiled_launch(launch, chip)
    if "cubin" in compiled.asm:
        registers = _found(r"REG:(\d+)", text)
        spills = _found(r"STACK:(\d+)", text) + _found(r"LOCAL:(\d+)", text)
        tensor_columns = compiled.metadata.tmem_size or 0
    else:
        registers = _found(r"\.vgpr_count:\s+(\d+)", text)
        spills = _found(r"\.vgpr_spill_count:\s+(\d+)", text)
        spills += _found(r"\.private_segment_fixed_size:\s+(\d+)", text)
        tensor_columns = 0
    kinds = [[n for n in names if re.search(rf"\b{n}", text)] for names in (_MATRIX, _PLAIN)]
    shared, num_warps = compiled.metadata.shared, compiled.metadata.num_warps
    programs, part = occupancy(chip.name, registers, shared, num_warps, tensor_columns)
    return KernelReport(
        case=case,
        kernel=launch.kernel.__name__,
        arch=chip.name,
        dtype=str(dtype).removeprefix("torch."),
        config=_constants_of(launch),
        registers=registers,
        spills=spills,
        shared_bytes=shared,
        programs_a_core=programs,
        occupancy=part,
        matrix_instruction="+".join(kinds[0] or kinds[1][:1]),
        widest_load=widest_load(text),
    )


def fields_of(constant: Any) -> dict[str, Any]:
    """The fields of a dataclass, and of those in it one by one; of two with a name the later."""
    found: dict[str, Any] = {}
    for name, value in vars(constant).items():
        found |= fields_of(value) if is_dataclass(value) else {name: value}
    return found


def _constants_of(launch: Launch) -> dict[str, Any]:
    """The constants of a launch that JSON can express; the fields of a variant one by one."""
    config: dict[str, Any] = {"programs": launch.grid[0]}
    for parameter in launch.kernel.params:
        value = launch.arguments[parameter.name]
        if not parameter.is_constexpr:
            continue
        if is_dataclass(value):
            config |= fields_of(value)
        elif value is None or isinstance(value, (bool, int, float, str)):
            config[parameter.name] = value
    return config | launch.options


def _blocks(config: Mapping[str, Any]) -> str:
    """A configuration's blocks, warps and stages in a few characters."""
    names = ("block_m", "block_n", "block_k", "BLOCK_M", "BLOCK_N", "dkv_m", "dkv_n")
    sizes = [str(config[name]) for name in names if name in config]
    return (
        f"{'x'.join(sizes) or '-'} w{config.get('num_warps', 4)} s{config.get('num_stages', '-')}"
    )


@cache
def _launches(
    arch: str, dtype: torch.dtype, wide: bool, loops: bool = False
) -> list[tuple[str, Launch]]:
    """The distinct launches: one that two sizes share belongs to the first.

    Args:
        loops: also those that the main loops of others are compared to, first of all.
    """
    chip = known(arch)
    found: dict[tuple[str, str], tuple[str, Launch]] = {}
    if dtype != torch.float8_e4m3fn or chip.fp8:
        plain = aot_loop.references(chip, dtype) if loops else []
        for case, launch in [*plain, *launches(chip, dtype, wide=wide)]:
            found.setdefault((source(launch).hash(), str(launch.options)), (case, launch))
    return list(found.values())


def _compile_number(number: int, arch: str, dtype: torch.dtype, wide: bool) -> KernelReport:
    case, launch = _launches(arch, dtype, wide)[number]
    return compile_launch(case, launch, known(arch), dtype)


def _loop_number(
    number: int, arch: str, dtype: torch.dtype, wide: bool
) -> aot_loop.LoopReport | None:
    case, launch = _launches(arch, dtype, wide, True)[number]
    return loop_of_launch(case, launch, known(arch), dtype)


def compile_all(
    archs: Sequence[str] = tuple(TARGETS),
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
    only: Sequence[str] = (),
    *,
    wide: bool = False,
    jobs: int = 1,
) -> Iterator[KernelReport]:
    """Compile the kernels for `archs`, in `jobs` processes.

    Args:
        only: the cases to compile; empty for all.
        wide: many more sizes. A launch that two sizes share is compiled once.

    Raises:
        RuntimeError: kernels are interpreted in this process.
        ValueError: an arch is not known.
    """
    yield from _for_each_launch(_compile_number, archs, dtypes, only, wide, False, jobs)


def loops_of_all(
    archs: Sequence[str] = tuple(TARGETS),
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
    only: Sequence[str] = (),
    *,
    wide: bool = False,
    jobs: int = 1,
) -> Iterator[aot_loop.LoopReport]:
    """The main loops of the same kernels, where they multiply, after those of plain ones."""
    for found in _for_each_launch(_loop_number, archs, dtypes, only, wide, True, jobs):
        if found is not None:
            yield found


def _for_each_launch(
    run: Callable[[int, str, torch.dtype, bool], _T],
    archs: Sequence[str],
    dtypes: Sequence[torch.dtype],
    only: Sequence[str],
    wide: bool,
    loops: bool,
    jobs: int,
) -> Iterator[_T]:
    """run(number, arch, dtype, wide) for each launch, in `jobs` processes."""
    if signals.INTERPRETED:
        raise RuntimeError("kernels are interpreted here: run `python -m weft.kernels.compile.aot`")
    if unknown := [arch for arch in archs if arch not in TARGETS]:
        raise ValueError(f"arch must be among {', '.join(TARGETS)}, got {', '.join(unknown)}")
    work = [
        (number, arch, dtype, wide)
        for arch in archs
        for dtype in dtypes
        for number, (case, _) in enumerate(_launches(arch, dtype, wide, loops))
        if not only or case in only or case.startswith("plain")
    ]
    if jobs == 1 or len(work) < 2:
        yield from (run(*each) for each in work)
        return
    # Forked processes have the launches; nothing here has used a GPU or started a thread.
    with ProcessPoolExecutor(min(jobs, len(work)), get_context("fork")) as pool:
        yield from pool.map(run, *zip(*work, strict=True))


HEAD = (
    f"{'arch':7} {'dtype':9} {'kernel':31} {'case':22} {'config':18} {'regs':>4} {'spills':>6} "
    f"{'shared':>7} {'occupancy':>9}  {'matrix':8} widest load"
)


def line(r: KernelReport) -> str:
    """A report as text, under HEAD."""
    spilled = f"{r.spills}*" if r.spills and not r.unknown_spills else str(r.spills)
    return (
        f"{r.arch:7} {r.dtype:9} {r.kernel:31} {r.case:22} {_blocks(r.config):18} "
        f"{r.registers:4d} {spilled:>6} {r.shared_bytes:7d} "
        f"{f'{r.programs_a_core} ({r.occupancy:.0%})':>9}  {r.matrix_instruction:8} {r.widest_load}"
    )


_EXAMPLES = """
One row for each kernel and configuration that the heuristics choose at the sizes of a 70B Llama on
8 ranks: registers per thread, bytes spilled to local memory, shared memory, programs that fit on a
core (and their fraction of its warps), the matrix instruction of the main loop, the widest load.
Takes two to twenty seconds per row and core. The exit status is 1 if a kernel spills
more than is known of it (marked *).

examples:
  weft aot --arch sm_90                        all kernels on a Hopper GPU, in bf16
  weft aot --arch sm_90,sm_100 --case up down  two of them on two chips
  weft aot --dtype float8_e4m3fn --json        for a program to read
  weft aot --loop --arch sm_90                 what one step of each main loop issues
Kernels of your own: weft sim FILE:FUNCTION --hardware h100 --compile
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns 1 if a kernel spills more than is known of it."""
    parser = argparse.ArgumentParser(
        prog="weft aot",
        description=__doc__.splitlines()[0] if __doc__ else "",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--arch",
        nargs="+",
        default=list(TARGETS),
        metavar="ARCH",
        help=f"of {', '.join(TARGETS)} (all), or of {', '.join(_CHIPS)}; commas will do as well",
    )
    parser.add_argument("--case", nargs="+", default=[], help="only these, as the table has them")
    parser.add_argument(
        "--dtype",
        nargs="+",
        default=["bfloat16"],
        metavar="DTYPE",
        choices=["bfloat16", "float16", "float32", "float8_e4m3fn"],
        help="of bfloat16 (the default), float16, float32, float8_e4m3fn",
    )
    parser.add_argument(
        "--wide", action="store_true", help="many more sizes: the heuristics' whole range"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="processes that compile (as many as there are cores)",
    )
    parser.add_argument(
        "--loop",
        action="store_true",
        help="what a step of each main loop issues, beside plain kernels (docs/virtual_time.md)",
    )
    parser.add_argument(
        "--page",
        type=page_with(aot_loop.MARK),
        metavar="PAGE",
        help="with --loop: put the table into this page",
    )
    parser.add_argument("--json", action="store_true", help="one JSON list instead of a table")
    options = parser.parse_args(arguments)
    if options.page and not options.loop:
        parser.error("--page has a place for the table of --loop only: give that as well")
    given = [arch for each in options.arch for arch in each.split(",") if arch]
    archs = list(dict.fromkeys(_CHIPS.get(arch.lower(), arch) for arch in given))
    unknown = [arch for arch in archs if arch not in TARGETS]
    if unknown or not archs:  # commas alone
        parser.error(
            f"no arch {(unknown or options.arch)[0]!r}: there are {', '.join(TARGETS)}, or by "
            f"chip {', '.join(_CHIPS)}"
        )
    if signals.INTERPRETED:
        told = sys.argv[1:] if arguments is None else arguments
        command = [sys.executable, "-m", "weft.kernels.compile.aot", *told]
        return subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "0"}).returncode
    dtypes = [getattr(torch, name) for name in options.dtype]
    cases = {
        c for arch in archs for dtype in dtypes for c, _ in _launches(arch, dtype, options.wide)
    }
    if not cases:
        parser.error(f"{', '.join(archs)}: no kernels of {', '.join(options.dtype)}")
    if absent := [case for case in options.case if case not in cases]:
        near = get_close_matches(absent[0], sorted(cases), 5, 0.0)
        parser.error(
            f"no case {absent[0]!r}: the nearest are {'; '.join(near)}; without --case, all "
            f"{len(cases)} are compiled and named"
        )
    jobs = max(1, options.jobs)
    if options.loop:
        loops = [*loops_of_all(archs, dtypes, options.case, wide=options.wide, jobs=jobs)]
        print(json.dumps([asdict(r) for r in loops]) if options.json else aot_loop.text(loops))
        if options.page:
            options.page.write_text(aot_loop.with_table(options.page.read_text(), loops))
        return 0
    reports = []
    if not options.json:
        print(HEAD)
    found = compile_all(archs, dtypes, options.case, wide=options.wide, jobs=jobs)
    for report in found:
        reports.append(report)
        if not options.json:
            print(line(report), flush=True)  # each takes seconds
    if options.json:
        rows = [asdict(r) | {"unknown_spills": r.unknown_spills} for r in reports]
        print(json.dumps(rows, default=str))  # a constant may be a dtype of Triton's
    elif any(r.spills for r in reports):
        print("*: known, see weft.kernels.compile.known_spills")
    return int(any(r.unknown_spills for r in reports))


if __name__ == "__main__":
    sys.exit(main())
