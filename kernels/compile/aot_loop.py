"""The main loops of compiled kernels: what one step of each issues, and how fast that could be.

    weft aot --loop --arch sm_90

A step is read off the machine code: the shortest way from a matrix instruction back to itself, of
several such ways the one with the most arithmetic for each instruction. So what a loop over all
tiles of a program does between two of them is left out, as are waits that find what they wait for.
Work and bytes of a step are those of the compiler's own representation (TTGIR).
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.kernels.compile.aot_cases import Launch
from weft.kernels.compile.loop_clock import (
    NO_CONTROL,
    Instruction,
    left_in_flight,
    matrix_cycles,
    step_cycles,
)
from weft.kernels.compile.plain import plain_attention_kernel, plain_matmul_kernel
from weft.kernels.engine.chips import Chip, tiling_for
from weft.markdown import between_marks, markdown_lines

# Dense operations of a cycle and core in 16 bits: those of the data sheet, by its boost clock and
# the number of cores. Twice as many in 8 bits.
_FLOPS = {"sm_80": 2048, "sm_90": 4096, "sm_100": 8192, "gfx942": 2048}
_SCHEDULERS = 4  # of a core; each starts one instruction of a warp in a cycle
# Cycles in which a scheduler's warps can start no other exponential, or on AMD vector instruction.
_SPECIAL, _VECTOR = 8, 4

_KINDS = {
    "matrix": r"HGMMA|QGMMA|HMMA|IMMA|UTC\w*MMA|v_mfma",
    "tma": r"UTMALDG",
    "copies": r"LDGSTS|\w+_load_\w*lds",
    "loads": r"LDG\b|global_load(?!_lds)|buffer_load(?!.*\blds\b)",
    "shared": r"LDS|ds_read",
    "barriers": r"BAR\.|s_barrier",
    "fences": r"FENCE|MEMBAR|UFENCE",
    "fmul": r"FMUL|v_(pk_)?mul_f32",
    "fadd": r"FADD|v_(pk_)?add_f32",
    "ffma": r"FFMA|v_(pk_)?fma(c|_f32)",
    "special": r"MUFU|v_exp|v_rcp|v_log",
}
_SASS = re.compile(
    r"/\*([0-9a-f]{4,})\*/\s+([^;]*?)\s*;(?:\s*/\* 0x\w+ \*/\s*/\* 0x([0-9a-f]{16}) \*/)?"
)
_PREDICATE = re.compile(r"@!?U?P\w+\s+")
_DOT = re.compile(r"ttng\.warp_group_dot |tt\.dot |tt\.dot_scaled |ttng\.tc_gen5_mma ")
_LOADED = re.compile(r"async_tma_copy_global|async_copy_global|tt\.load|buffer_load")
_BLOCK = re.compile(r"<(\d+)x(\d+)x(?:!tt\.ptr<)?(\w+)")
_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "f8E4M3FN": 1, "i8": 1}


@dataclass(frozen=True)
class LoopReport:
    """One step of a kernel's main loop, for each warp unless said otherwise.

    Attributes:
        flops, loaded_bytes: of the whole program.
        instructions: all that are issued; those below are some of them.
        pending: how many groups of matrix instructions each wait for them leaves in flight; empty
            where these wait by themselves, or for a barrier in memory.
        copies: asynchronous, into shared memory. `loads` are those into registers.
        tensor_cycles: in which the matrix units could do the step.
        issue_cycles: in which the schedulers could start its instructions, or the special units do
            its exponentials, whichever takes longer.
        cycles: that a step takes: the longer of the two or, if instructions wait for `pending`
            groups, those of `loop_clock.step_cycles`.
        rate: of the matrix units' peak: `tensor_cycles` by `cycles`.
    """

    case: str
    kernel: str
    arch: str
    dtype: str
    warps: int
    flops: int
    loaded_bytes: int
    instructions: int
    matrix: int
    pending: tuple[int, ...]
    tma: int
    copies: int
    loads: int
    shared: int
    barriers: int
    fences: int
    fmul: int
    fadd: int
    ffma: int
    special: int
    tensor_cycles: int
    issue_cycles: int
    cycles: int
    rate: float


def instructions(text: str) -> list[Instruction]:
    """The instructions of a disassembly (SASS), or of AMD's assembly, with where each can go."""
    lines: list[tuple[str, str | None, str]] = []
    labels: dict[str, int] = {}
    sass = _SASS.findall(text)
    if sass:
        for address, line, control in sass:
            labels[hex(int(address, 16))] = len(lines)
            found = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)$", line)
            lines.append((line, hex(int(found[1], 16)) if found else None, control))
    else:
        for raw in text.splitlines():
            line = raw.split(";")[0].strip()
            if found := re.match(r"(\.?\w+):", line):
                labels[found[1]] = len(lines)
            elif line and line[0] not in ".#/":
                found = re.match(r"s_c?branch\w*\s+(\S+)", line)
                lines.append((line, found[1] if found else None, ""))
    return [
        Instruction(
            line,
            labels.get(target) if target else None,
            not _ends(line),
            int(control, 16) if control else NO_CONTROL,
        )
        for line, target, control in lines
    ]


def _ends(line: str) -> bool:
    """Whether an instruction never goes on to the next one."""
    return bool(re.match(r"(BRA\S* 0x|EXIT|RET|s_branch|s_endpgm)", line))


def step(code: Sequence[Instruction]) -> list[Instruction]:
    """The instructions of one step of the main loop; none if nothing in a loop multiplies."""
    best: tuple[float, list[int]] = 0.0, []
    seen: set[int] = set()
    for i, each in enumerate(code):
        if i not in seen and _is("matrix", each.text) and (cycle := _shortest_cycle(code, i)):
            seen.update(cycle)
            work = sum(_multiplications(code[j].text) for j in cycle) / len(cycle)
            best = max(best, (work, cycle))
    return [code[i] for i in best[1]]


def _shortest_cycle(code: Sequence[Instruction], start: int) -> list[int]:
    """The numbers of the instructions from `start` until it comes again."""
    before = dict.fromkeys(_next(code, start), start)
    queue = deque(before)
    while queue:
        i = queue.popleft()
        if i == start:
            break
        for j in _next(code, i):
            if j not in before:
                before[j] = i
                queue.append(j)
    if start not in before:
        return []
    found, i = [start], before[start]
    while i != start:
        found.append(i)
        i = before[i]
    return [start, *reversed(found[1:])]


def _next(code: Sequence[Instruction], i: int) -> Iterator[int]:
    if code[i].falls and i + 1 < len(code):
        yield i + 1
    if (target := code[i].target) is not None:
        yield target


def _is(kind: str, line: str) -> bool:
    return bool(re.match(_KINDS[kind], _PREDICATE.sub("", line)))


def _multiplications(line: str) -> int:
    """What a matrix instruction multiplies, or 1 if its name does not tell."""
    if not _is("matrix", line):
        return 0
    if found := re.search(r"\.(\d+)x(\d+)x(\d+)|_(\d+)x(\d+)x(\d+)", line):
        return prod(int(each) for each in found.groups() if each)
    if found := re.search(r"MMA\.16(8)(8|16|32)\b", line):
        return 16 * int(found[1]) * int(found[2])
    return 1


def work_of_step(ttgir: str) -> tuple[int, int]:
    """Operations and loaded bytes of a step of the innermost loop that multiplies most."""
    flops, loaded = Counter[int](), Counter[int]()
    outer: set[int] = set()  # loops with others inside that multiply
    regions: list[tuple[bool, int]] = []  # that are open: whether a loop, and its line
    for number, full in enumerate(ttgir.splitlines()):
        line = re.sub(r"\s+loc\(.*\)$", "", full)
        if line.lstrip().startswith("}"):
            regions.pop()
        loops = [each for is_loop, each in regions if is_loop]
        if loops and _DOT.search(line):
            (m, k, _), (_, n, _) = _BLOCK.findall(line)[:2]
            flops[loops[-1]] += 2 * int(m) * int(k) * int(n)
            outer.update(loops[:-1])
        elif loops and regions[-1][0] and _LOADED.search(line) and _BLOCK.search(line):
            rows, columns, dtype = _BLOCK.findall(line)[-1]
            loaded[loops[-1]] += int(rows) * int(columns) * _BYTES.get(dtype, 0)
        if line.endswith("{"):
            regions.append(("scf.for" in line or "scf.while" in line, number))
    inner = [loop for loop in flops if loop not in outer]
    if not inner:
        return 0, 0
    loop = max(inner, key=lambda each: (flops[each], each))
    return flops[loop], loaded[loop]


def report(
    case: str, kernel: str, chip: Chip, dtype: torch.dtype, warps: int, text: str, ttgir: str
) -> LoopReport | None:
    """The report of a compiled kernel, of its machine code and its TTGIR; None: no such loop."""
    found = step(instructions(text))
    lines = [each.text for each in found]
    flops, loaded = work_of_step(ttgir)
    if not lines or not flops or dtype == torch.float32:
        return None
    counts = {kind: sum(_is(kind, line) for line in lines) for kind in _KINDS}
    pending = tuple(left for left in map(left_in_flight, lines) if left is not None)
    tensor = flops / (_FLOPS[chip.name] * (2 if dtype.itemsize == 1 else 1))
    each = warps / _SCHEDULERS
    if chip.is_amd:  # other kinds are started beside the vector instructions of other warps
        busy = _VECTOR * sum(bool(re.match("v_(?!mfma)", line)) for line in lines) * each
    else:
        busy = max(len(lines), _SPECIAL * counts["special"]) * each
    if pending:  # of wgmma
        tensor = sum(matrix_cycles(line.name) for line in found) * each
        taken = max(tensor, step_cycles(found, warps))
    else:
        taken = max(tensor, busy)
    return LoopReport(
        case=case,
        kernel=kernel,
        arch=chip.name,
        dtype=str(dtype).removeprefix("torch."),
        warps=warps,
        flops=flops,
        loaded_bytes=loaded,
        instructions=len(lines),
        pending=pending,
        tensor_cycles=round(tensor),
        issue_cycles=round(busy),
        cycles=round(taken),
        rate=round(tensor / taken, 3),
        **counts,
    )


def references(chip: Chip, dtype: torch.dtype) -> list[tuple[str, Launch]]:
    """Launches of the kernels of `weft.kernels.compile.plain`."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def described(x: torch.Tensor, *block: int) -> TensorDescriptor | None:
        return TensorDescriptor.from_tensor(x, list(block)) if chip.descriptors else None

    M, N, K = 16384, 3584, 8192
    a, b = empty(M, K), empty(N, K)
    tiling = tiling_for(chip, M, N, dtype)
    out = torch.empty(M, N, dtype=torch.bfloat16 if dtype.itemsize == 1 else dtype, device="meta")
    descs = [
        described(x, rows, tiling.block_k) for x, rows in ((a, tiling.block_m), (b, tiling.block_n))
    ]
    names = plain_matmul_kernel.arg_names
    arguments = dict(zip(names, (a, b, out, *descs, M, N, K, tiling), strict=True))
    found = [("plain matmul", Launch(plain_matmul_kernel, (1,), arguments, tiling.options))]
    if dtype.itemsize == 2:
        rows, D, block = 8192, 128, (128, 64)
        q, k, v = (empty(8, rows, D) for _ in range(3))
        descs = [described(x.view(-1, D), block[1], D) for x in (k, v)]
        names = plain_attention_kernel.arg_names
        given = (q, k, v, *descs, q, rows, 0.1, D, *block)
        options = {"num_warps": 8, "num_stages": 2 if chip.is_amd else 3}
        launch = Launch(plain_attention_kernel, (1,), dict(zip(names, given, strict=True)), options)
        found.append(("plain attention", launch))
    return found


_COLUMNS = (
    "case", "kernel", "Mflop", "KiB", "instructions", "matrix", "pending", "TMA", "copies", "loads",
    "shared", "barriers", "fences", "FMUL", "FADD", "FFMA", "special", "tensor", "issue", "cycles",
    "rate",
)  # fmt: skip


def cells(r: LoopReport) -> list[str]:
    """A report as text, under the columns."""
    waits = Counter(r.pending)
    pending = ", ".join(f"{left}" if n == 1 else f"{n}x {left}" for left, n in waits.items())
    counts = (
        r.tma, r.copies, r.loads, r.shared, r.barriers, r.fences, r.fmul, r.fadd, r.ffma,
        r.special, r.tensor_cycles, r.issue_cycles, r.cycles,
    )  # fmt: skip
    return [
        r.case,
        r.kernel,
        f"{r.flops / 1e6:.2f}",
        f"{r.loaded_bytes / 1024:.0f}",
        str(r.instructions),
        str(r.matrix),
        pending or "-",
        *map(str, counts),
        f"{r.rate:.0%}",
    ]


def text(reports: Sequence[LoopReport]) -> str:
    """Reports as lines, for each chip and dtype."""
    lines: list[str] = []
    for of in dict.fromkeys((r.arch, r.dtype) for r in reports):
        rows = [[*_COLUMNS], *(cells(r) for r in reports if (r.arch, r.dtype) == of)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines.append(" ".join(of))
        for row in rows:
            pairs = enumerate(zip(row, widths, strict=True))
            lines.append("  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in pairs))
    return "\n".join(lines)


MARK = f"loops, Triton {'.'.join(triton.__version__.split('.')[:2])}"


def with_table(page: str, reports: Sequence[LoopReport]) -> str:
    """A page of Markdown with the reports as the table of this Triton between its marks."""
    table = markdown_lines(_COLUMNS, [*map(cells, reports)], texts=2)
    return between_marks(page, MARK, "\n".join(table))
