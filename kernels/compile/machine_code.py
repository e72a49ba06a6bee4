"""A caught launch as machine code for a named chip, without one."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any, cast

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.kernels.compile.aot_cases import Launch
from weft.kernels.engine.chips import Chip

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
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


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


def compiled_launch(launch: Launch, chip: Chip) -> tuple[Any, str]:
    """A launch compiled for `chip`, and its machine code as text."""
    compiled = triton.compile(source(launch), target=TARGETS[chip.name], options=launch.options)
    if "cubin" in compiled.asm:
        return compiled, _disassembled(compiled.asm["cubin"])
    return compiled, cast(str, compiled.asm["amdgcn"])
