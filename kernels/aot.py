"""Compile every kernel for named chips with no GPU, and tell what each needs.

    python -m weft.kernels.aot --arch sm_90 gfx942 --json

The launchers themselves are run, on tensors without memory: what would be launched is caught and
given to Triton's compiler, so that the arguments, their alignment and the configuration are the
real ones. Kernels must be plain `JITFunction`s, hence a process of its own with TRITON_INTERPRET=0.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.collectives import chunk_sizes, kernel_collectives, multimem, pull, signals
from weft.kernels import (
    all_gather_contract,
    all_gather_gemm,
    gathers,
    gemm_all_reduce,
    gemm_one_shot,
    gemm_reduce_scatter,
    ring_flash,
    ring_flash_backward,
)
from weft.kernels.chips import KNOWN, Chip
from weft.kernels.sharded_sequence import Geometry, Visibility

_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
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
_MATRIX = ("UTCHMMA", "HGMMA", "HMMA", "v_mfma", "FFMA", "v_fma", "v_pk_fma", "v_fmac", "v_dot")
_COPIES = ("UTMALDG", "LDGSTS", "buffer_load", "global_load", "LDG")


@dataclass(frozen=True)
class Report:
    """What one kernel needs on one chip.

    `spills` counts bytes of local memory, and spilled registers on AMD. The instructions are the
    best that occur: of the matrix units (else plain multiply-adds), and to bring operands in.
    """

    case: str
    kernel: str
    arch: str
    dtype: str
    registers: int
    spills: int
    shared_bytes: int
    matrix_instruction: str
    copy_instruction: str


@dataclass(frozen=True)
class Launch:
    """A launch that was caught instead of made."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]


class _Catcher:
    def __init__(self, kernel: Any, caught: list[Launch]) -> None:
        self._kernel, self._caught = kernel, caught

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            names = self._kernel.arg_names
            options = {k: v for k, v in kwargs.items() if k not in names}
            named = {k: v for k, v in kwargs.items() if k in names}
            arguments = dict(zip(names, args, strict=False)) | named
            if missing := set(names) - set(arguments):
                raise TypeError(f"{self._kernel.__name__} misses {sorted(missing)}")
            self._caught.append(Launch(self._kernel, grid, arguments, options))

        return launch


@contextmanager
def catching(*modules: ModuleType) -> Iterator[list[Launch]]:
    """Collect the launches of the kernels of `modules` instead of making them."""
    kernels = [
        (module, name, value)
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, triton.JITFunction) and name.endswith("_kernel")
    ]
    caught: list[Launch] = []
    try:
        for module, name, kernel in kernels:
            setattr(module, name, _Catcher(kernel, caught))
        yield caught
    finally:
        for module, name, kernel in kernels:
            setattr(module, name, kernel)


def source(launch: Launch) -> ASTSource:
    """What Triton's own launcher would compile, its specialisation of arguments included."""
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}

    def describe(value: Any, path: tuple[int, ...], specialize: bool) -> Any:
        if isinstance(value, tuple):
            fields = [describe(v, (*path, i), specialize) for i, v in enumerate(value)]
            return type(value)(*fields) if hasattr(value, "_fields") else tuple(fields)
        if isinstance(value, TensorDescriptor):
            return f"tensordesc<{_TYPES[value.base.dtype][1:]}{list(value.block_shape)}>"
        if isinstance(value, torch.Tensor):
            attributes[path] = [["tt.divisibility", 16]]
            return _TYPES[value.dtype]
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


def _tool(name: str, *args: str) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([str(path), *args], check=True, capture_output=True, text=True).stdout


def _found(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found.group(1)) if found else 0


def compile_launch(case: str, launch: Launch, chip: Chip, dtype: torch.dtype) -> Report:
    """Compile one caught launch for `chip`."""
    compiled = triton.compile(source(launch), target=_TARGETS[chip.name], options=launch.options)
    if "cubin" in compiled.asm:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            usage = _tool("cuobjdump", "-res-usage", file.name)
            text = _tool("cuobjdump", "-sass", file.name)
        registers = _found(r"REG:(\d+)", usage)
        spills = _found(r"STACK:(\d+)", usage) + _found(r"LOCAL:(\d+)", usage)
    else:
        text = cast(str, compiled.asm["amdgcn"])
        registers = _found(r"\.vgpr_count:\s+(\d+)", text)
        spills = _found(r"\.vgpr_spill_count:\s+(\d+)", text)
        spills += _found(r"\.private_segment_fixed_size:\s+(\d+)", text)
    matrix, copy = (
        next((name for name in names if re.search(rf"\b{name}", text)), "")
        for names in (_MATRIX, _COPIES)
    )
    return Report(
        case=case,
        kernel=launch.kernel.__name__,
        arch=chip.name,
        dtype=str(dtype).removeprefix("torch."),
        registers=registers,
        spills=spills,
        shared_bytes=compiled.metadata.shared,
        matrix_instruction=matrix,
        copy_instruction=copy,
    )


def _workspace() -> Any:
    table = torch.empty(_W, dtype=torch.int64, device="meta")
    return SimpleNamespace(
        rank=0,
        world_size=_W,
        device=table.device,
        buffer_ptrs=table,
        signal_ptrs=table,
        half_bytes=1 << 36,
        timeout_polls=1 << 27,
        buffer=SimpleNamespace(multicast_ptr=1 << 40),
    )


# Widths of a 70B Llama on 8 ranks; `tokens` decides between the tiles for prefill and for decode.
_W, _HIDDEN, _FFN, _QKV = 8, 8192, 3584, (1024, 128, 128)


def _all_gather_launches(
    chip: Chip, dtype: torch.dtype, empty: Callable[[int, int], torch.Tensor]
) -> Iterator[tuple[str, Launch]]:
    op = all_gather_gemm
    scaled = dtype.itemsize == 1
    for case, tokens, widths, activation, keep in (
        ("up", 8192, (_FFN,), None, False),
        ("up, gelu", 8192, (_FFN,), "gelu", False),
        ("up, gelu, kept", 8192, (_FFN,), "gelu", not scaled),
        ("gate and up", 8192, (_FFN, _FFN), "swiglu", False),
        ("qkv", 8192, _QKV, None, False),
        ("up, 128 tokens", 128, (_FFN,), "silu", False),
        ("up, 8 tokens", 8, (_FFN,), None, False),
        ("gate and up, 8 tokens", 8, (512, 512), "swiglu", False),
    ):
        # nn.Linear holds (N, K): its transpose is contiguous along K.
        weights, share = [empty(n, _HIDDEN).T for n in widths], tokens // _W
        config = op.config_for(
            tokens, sum(widths), _HIDDEN, dtype, _W, chip,
            activation=activation, keep_sums=keep,
        )  # fmt: skip
        with catching(op, gathers) as caught:
            op.launch_all_gather_matmul(
                empty(share, _HIDDEN),
                weights,
                _workspace(),
                [share] * _W,
                activation=activation,
                keep_sums=keep,
                scale_a=_factors(share, 1) if scaled else None,
                scales_b=[_factors(1, n) for n in widths] if scaled else None,
                out_dtype=torch.bfloat16 if scaled else None,
                config=config,
            )
        # One publish kernel serves all.
        yield from ((case, launch) for launch in caught[0 if case == "up" else 1 :])
    if scaled:
        return  # weights have no gradients
    for case, x, transposed in (
        ("columns", empty(8192, _HIDDEN // _W), False),
        ("weight gradient", empty(8192 // _W, _HIDDEN), True),
    ):
        contract = all_gather_contract.config_for(8192, _FFN, dtype, _W, chip)
        with catching(all_gather_contract, gathers) as caught:
            all_gather_contract.launch_all_gather_contract(
                x,
                empty(8192, _FFN),
                _workspace(),
                [1024] * _W,
                transposed=transposed,
                config=contract,
            )
        yield case, caught[-1]


def _reduce_launches(
    chip: Chip, dtype: torch.dtype, empty: Callable[[int, int], torch.Tensor]
) -> Iterator[tuple[str, Launch]]:
    scaled = dtype.itemsize == 1
    scale_b = _factors(1, _HIDDEN) if scaled else None
    out_dtype = torch.bfloat16 if scaled else dtype
    for case, tokens, depths in (
        ("down", 8192, (_FFN,)),
        ("d(qkv)", 8192, _QKV),
        ("down, 128 tokens", 128, (_FFN,)),
        ("down, 8 tokens", 8, (_FFN,)),
    ):
        if scaled and len(depths) > 1:
            continue
        sizes = [tokens // _W] * _W
        config = gemm_reduce_scatter.config_for(sizes[0], _HIDDEN, dtype, _W, chip)
        xs, weights = [empty(tokens, k) for k in depths], [empty(_HIDDEN, k).T for k in depths]
        residual = torch.empty(sizes[0], _HIDDEN, dtype=out_dtype, device="meta")
        with catching(gemm_reduce_scatter, gemm_one_shot) as caught:
            gemm_reduce_scatter.launch_matmul_reduce_scatter(
                xs,
                weights,
                _workspace(),
                sizes,
                residual=residual,
                scale_a=_factors(tokens, 1) if scaled else None,
                scale_b=scale_b,
                out_dtype=out_dtype,
                config=config,
            )
        yield case, caught[0]
    for case, tokens, columns in (
        ("two shots", 8192, _HIDDEN),
        ("one shot", 16, _HIDDEN),
        ("one shot, narrow", 16, 1024),
    ):
        reduce = gemm_all_reduce.config_for(tokens, columns, dtype, _W, chip)
        with catching(gemm_all_reduce, gemm_one_shot) as caught:
            gemm_all_reduce.launch_matmul_all_reduce(
                empty(tokens, _FFN),
                empty(columns, _FFN).T,
                _workspace(),
                scale_a=_factors(tokens, 1) if scaled else None,
                scale_b=_factors(1, columns) if scaled else None,
                out_dtype=out_dtype,
                config=reduce,
            )
        yield case, caught[0]


def _collective_launches(chip: Chip, dtype: torch.dtype) -> Iterator[tuple[str, Launch]]:
    op, ws = kernel_collectives, _workspace()
    gpu = torch.device("cuda")
    for case, count in (("collective", 8 * 8192), ("odd sizes", 8 * 8191 + 1)):
        x = torch.empty(count, dtype=dtype, device="meta")
        sizes = [count // _W] * _W if case == "collective" else chunk_sizes(count, _W)
        nbytes = max(sizes) * dtype.itemsize
        with catching(op) as caught:
            part, whole = x[: sizes[0]], x
            config = op.config_for("all_gather", nbytes, _W, gpu)
            op.launch_all_gather(part, whole, ws, sizes, config)
            config = op.config_for("reduce_scatter", nbytes, _W, gpu)
            op.launch_reduce(x, part, ws, sizes, "sum", config)
            config = op.config_for("all_reduce", 1 << 20, _W, gpu)
            op.launch_reduce(x, torch.empty_like(x), ws, None, "avg", config)
        yield from ((case, launch) for launch in caught)
    x, everyone = torch.empty(1024, 1024, dtype=dtype, device="meta"), tuple(range(_W))
    for case, holders, reduce_op in (("pull", (1,), None), ("pull of sums", everyone, "sum")):
        box = pull.Box(holders, (1024, 128), 0, (1024, 1), 0, (128, 1))
        table = pull.table_of([box], 0, dtype, x.device, op=reduce_op)
        with catching(pull) as caught:
            pull.launch_pull(x, torch.empty_like(x[:, :128]), ws, table, publish=True)
        yield from ((case, launch) for launch in caught)
    if chip.descriptors:  # of the same generation as multicast
        with catching(multimem) as caught:
            multimem.launch_all_reduce(x, x, ws)
        yield "by the switch", caught[0]


def _factors(rows: int, columns: int) -> torch.Tensor:
    return torch.empty(rows, columns, dtype=torch.float32, device="meta")


def _attention_launches(chip: Chip, dtype: torch.dtype) -> Iterator[tuple[str, Launch]]:
    H, H_kv, n, D = 8, 2, 1024, 128
    geometry = Geometry((n,) * _W, (n,) * _W, "zigzag", Visibility(_W * n, after=0))
    q, k = (torch.empty(1, h, n, D, dtype=dtype, device="meta") for h in (H, H_kv))
    lse = torch.empty(1, H, n, device="meta")
    forward = ring_flash.config_for(H, H_kv, n, D, dtype, _W, chip)
    with catching(ring_flash) as caught:
        ring_flash.launch_ring_attention(q, k, k, _workspace(), geometry, 0.1, config=forward)
    yield "causal, D = 128", caught[0]
    backward = ring_flash_backward.config_for(H, H_kv, n, D, dtype, _W, chip)
    with catching(ring_flash_backward) as caught:
        ring_flash_backward.launch_ring_attention_backward(
            q, k, k, q, lse, q, None, _workspace(), geometry, 0.1, config=backward
        )
    yield "causal, D = 128", caught[0]


def launches(chip: Chip, dtype: torch.dtype) -> Iterator[tuple[str, Launch]]:
    """(case, launch) of every kernel, in the configurations that the heuristics choose."""

    def empty(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=dtype, device="meta")

    yield from _all_gather_launches(chip, dtype, empty)
    yield from _reduce_launches(chip, dtype, empty)
    yield from _attention_launches(chip, dtype)
    yield from _collective_launches(chip, dtype)


def compile_all(
    archs: Sequence[str] = tuple(_TARGETS), dtypes: Sequence[torch.dtype] = (torch.bfloat16,)
) -> list[Report]:
    """Compile all kernels for `archs` in this process.

    Raises:
        RuntimeError: kernels are interpreted in this process.
        ValueError: an arch is not known.
    """
    if signals.INTERPRETED:
        raise RuntimeError("kernels are interpreted here: run `python -m weft.kernels.aot`")
    chips = {chip.name: chip for chip in KNOWN}
    if unknown := [arch for arch in archs if arch not in chips]:
        raise ValueError(f"arch must be among {', '.join(chips)}, got {', '.join(unknown)}")
    return [
        compile_launch(case, launch, chips[arch], dtype)
        for arch in archs
        for dtype in dtypes
        if dtype != torch.float8_e4m3fn or chips[arch].fp8
        for case, launch in launches(chips[arch], dtype)
    ]


def table(reports: Sequence[Report]) -> str:
    """The reports as text, one line each."""
    head = (
        f"{'arch':8} {'dtype':9} {'kernel':28} {'case':22} {'regs':>4} {'spills':>6} "
        f"{'shared':>7}  {'matrix':8} copies"
    )
    lines = [
        f"{r.arch:8} {r.dtype:9} {r.kernel:28} {r.case:22} {r.registers:4d} {r.spills:6d} "
        f"{r.shared_bytes:7d}  {r.matrix_instruction:8} {r.copy_instruction}"
        for r in reports
    ]
    return "\n".join([head, *lines])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns 1 if a kernel spills."""
    parser = argparse.ArgumentParser(
        prog="weft aot", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--arch", nargs="+", default=list(_TARGETS), metavar="ARCH")
    parser.add_argument(
        "--dtype",
        nargs="+",
        default=["bfloat16"],
        choices=["bfloat16", "float16", "float32", "float8_e4m3fn"],
    )
    parser.add_argument("--json", action="store_true", help="one JSON list instead of a table")
    options = parser.parse_args(arguments)
    if signals.INTERPRETED:
        command = [sys.executable, "-m", "weft.kernels.aot", *(arguments or sys.argv[1:])]
        return subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "0"}).returncode
    reports = compile_all(options.arch, [getattr(torch, name) for name in options.dtype])
    print(json.dumps([asdict(r) for r in reports]) if options.json else table(reports))
    return int(any(r.spills for r in reports))


if __name__ == "__main__":
    sys.exit(main())
