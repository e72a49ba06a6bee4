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
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, is_dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.collectives.device import signals
from weft.kernels.compile.aot_cases import Launch, launches
from weft.kernels.compile.known_spills import known_spills
from weft.kernels.engine.chips import Chip, known

_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bool: "*i1",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int64: "*i64",
}
_TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Chips by the names that people, and `weft sim --hardware`, call them.
_CHIPS = {"a100": "sm_80", "h100": "sm_90", "h200": "sm_90", "b200": "sm_100", "mi300x": "gfx942"}
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
        width = int(self.config.get("block_d", 0))
        known = known_spills(self.arch, self.dtype, self.kernel, self.case, width)
        return max(0, self.spills - known)


def source(launch: Launch) -> ASTSource:
    """What Triton's own launcher would compile, including its specialisation of arguments."""
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}

    def describe(value: Any, path: tuple[int, ...], specialize: bool) -> Any:
        if isinstance(value, tuple):  # do_not_specialize does not reach inside
            fields = [describe(v, (*path, i), True) for i, v in enumerate(value)]
            return type(value)(*fields) if hasattr(value, "_fields") else tuple(fields)
        if isinstance(value, TensorDescriptor):
            return f"tensordesc<{_TYPES[value.base.dtype][1:]}{list(value.block_shape)}>"
        if isinstance(value, torch.Tensor):
            attributes[path] = [["tt.divisibility", 16]]
            return _TYPES[value.dtype]
        if isinstance(value, bool):
            return "u1"
        if isinstance(value, float):
            return "fp32"
        if value is None or (specialize and value == 1):
            constants[path] = value
            return "constexpr"
        if specialize and value % 16 == 0:
            attributes[path] = [["tt.divisibility", 16]]
        return "i32" if -(2**31) <= value < 2**31 else "i64"

    signature: dict[str, Any] = {}
    for i, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr:
            constants[(i,)] = value
            signature[parameter.name] = "constexpr"
        else:
            signature[parameter.name] = describe(value, (i,), not parameter.do_not_specialize)
    return ASTSource(launch.kernel, signature, constants, attributes)


def _disassembled(cubin: bytes) -> str:
    """Resource usage and SASS of a binary, by the cuobjdump that comes with Triton."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", "-sass", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _found(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found.group(1)) if found else 0


def compile_launch(case: str, launch: Launch, chip: Chip, dtype: torch.dtype) -> KernelReport:
    """Compile one caught launch for `chip`."""
    compiled = triton.compile(source(launch), target=_TARGETS[chip.name], options=launch.options)
    if "cubin" in compiled.asm:
        text = _disassembled(compiled.asm["cubin"])
        registers = _found(r"REG:(\d+)", text)
        spills = _found(r"STACK:(\d+)", text) + _found(r"LOCAL:(\d+)", text)
        tensor_columns = compiled.metadata.tmem_size or 0
    else:
        text = cast(str, compiled.asm["amdgcn"])
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
        config=_config(launch),
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


def _config(launch: Launch) -> dict[str, Any]:
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
def _launches(arch: str, dtype: torch.dtype, wide: bool) -> list[tuple[str, Launch]]:
    """The distinct launches: one that two sizes share belongs to the first."""
    chip = known(arch)
    found: dict[tuple[str, str], tuple[str, Launch]] = {}
    if dtype != torch.float8_e4m3fn or chip.fp8:
        for case, launch in launches(chip, dtype, wide=wide):
            found.setdefault((source(launch).hash(), str(launch.options)), (case, launch))
    return list(found.values())


def _compile_number(number: int, arch: str, dtype: torch.dtype, wide: bool) -> KernelReport:
    case, launch = _launches(arch, dtype, wide)[number]
    return compile_launch(case, launch, known(arch), dtype)


def compile_all(
    archs: Sequence[str] = tuple(_TARGETS),
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
    if signals.INTERPRETED:
        raise RuntimeError("kernels are interpreted here: run `python -m weft.kernels.compile.aot`")
    if unknown := [arch for arch in archs if arch not in _TARGETS]:
        raise ValueError(f"arch must be among {', '.join(_TARGETS)}, got {', '.join(unknown)}")
    work = [
        (number, arch, dtype, wide)
        for arch in archs
        for dtype in dtypes
        for number, (case, _) in enumerate(_launches(arch, dtype, wide))
        if not only or case in only
    ]
    if jobs == 1 or len(work) < 2:
        yield from (_compile_number(*each) for each in work)
        return
    # Forked processes have the launches; nothing here has used a GPU or started a thread.
    with ProcessPoolExecutor(min(jobs, len(work)), get_context("fork")) as pool:
        yield from pool.map(_compile_number, *zip(*work, strict=True))


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
        "--arch", nargs="+", default=list(_TARGETS), metavar="ARCH",
        help=f"of {', '.join(_TARGETS)} (all), or of {', '.join(_CHIPS)}; commas will do as well",
    )  # fmt: skip
    parser.add_argument("--case", nargs="+", default=[], help="only these, as the table has them")
    parser.add_argument(
        "--dtype", nargs="+", default=["bfloat16"], metavar="DTYPE",
        choices=["bfloat16", "float16", "float32", "float8_e4m3fn"],
        help="of bfloat16 (the default), float16, float32, float8_e4m3fn",
    )  # fmt: skip
    parser.add_argument(
        "--wide", action="store_true", help="many more sizes: the heuristics' whole range"
    )
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N",
        help="processes that compile (as many as there are cores)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON list instead of a table")
    options = parser.parse_args(arguments)
    given = [arch for each in options.arch for arch in each.split(",") if arch]
    archs = list(dict.fromkeys(_CHIPS.get(arch.lower(), arch) for arch in given))
    unknown = [arch for arch in archs if arch not in _TARGETS]
    if unknown or not archs:  # commas alone
        parser.error(
            f"no arch {(unknown or options.arch)[0]!r}: there are {', '.join(_TARGETS)}, or by "
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
        parser.error(f"no case {absent[0]!r}: there are {'; '.join(sorted(cases))}")
    reports = []
    if not options.json:
        print(HEAD)
    found = compile_all(archs, dtypes, options.case, wide=options.wide, jobs=max(1, options.jobs))
    for report in found:
        reports.append(report)
        if not options.json:
            print(line(report), flush=True)  # each takes seconds
    if options.json:
        print(json.dumps([asdict(r) | {"unknown_spills": r.unknown_spills} for r in reports]))
    elif any(r.spills for r in reports):
        print("*: known, see weft.kernels.compile.known_spills")
    return int(any(r.unknown_spills for r in reports))


if __name__ == "__main__":
    sys.exit(main())
