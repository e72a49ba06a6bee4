"""Launch the cases of `weft aot` through Triton's own launcher, on a driver that runs nothing.

    python tests/launching.py DTYPE [CASE ...]

Where the compiled kernel has its parameters is compared with the arguments that the launch was
given: tensors in named tuples, descriptors, numbers that became constants, what is None. Prints a
JSON object: by kernel and case, what is wrong, or "".
"""

from __future__ import annotations

import ctypes
import itertools
import json
import re
import struct
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.bench.host import driver
from weft.kernels.compile.aot_cases import Launch, launches
from weft.kernels.engine.chips import known
from weft.sim.time.compiling import with_tensors

_BYTES = {"i1": 1, "u1": 1, "i32": 4, "i64": 8, "fp32": 4}
HOOK = ctypes.CFUNCTYPE(None, ctypes.c_uint64, ctypes.POINTER(ctypes.c_void_p))
_ARENA = torch.zeros(1 << 18, dtype=torch.uint8)


def placed(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments, each tensor with an address of its own, a multiple of 256."""
    starts = itertools.count(-_ARENA.data_ptr() % 256, 256)

    def place(tensor: torch.Tensor) -> torch.Tensor:
        start = next(starts)
        return _ARENA[start : start + tensor.dtype.itemsize].view(tensor.dtype)

    return with_tensors(given, place)


def leaves(value: Any, type_name: Any) -> Iterator[bytes]:
    """An argument as the kernel is to find it, parameter by parameter."""
    if isinstance(type_name, tuple):
        for each, of in zip(value, type_name, strict=True):
            yield from leaves(each, of)
    elif isinstance(value, TensorDescriptor):
        rows, columns = value.shape
        pitch = value.strides[0] * value.base.dtype.itemsize
        yield struct.pack("<4Q", value.base.data_ptr(), columns, rows, pitch).ljust(128, b"\0")
        yield from (struct.pack("<i", size) for size in value.shape)
        yield from (struct.pack("<q", stride) for stride in value.strides)
    elif type_name.startswith("*"):
        yield struct.pack("<Q", value.data_ptr())
    elif type_name == "fp32":
        yield struct.pack("<f", value)
    elif type_name != "constexpr":
        yield int(value).to_bytes(_BYTES[type_name], "little", signed=True)


def parameter_sizes(ptx: str) -> list[int]:
    """Bytes of each parameter of the kernel in this code."""
    head = ptx[ptx.index(".entry") :].partition(")")[0]
    found = re.findall(r"\.param (?:\.align \d+ )?\.[a-z](\d+)\b[^\[\n]*(?:\[(\d+)\])?", head)
    return [int(count) if count else int(bits) // 8 for bits, count in found]


def main(dtype: str, cases: Sequence[str]) -> None:
    seen: list[bytes] = []
    sizes: dict[int, list[int]] = {}

    def on_launch(function: int, parameters: Any) -> None:
        seen[:] = [ctypes.string_at(parameters[i], n) for i, n in enumerate(sizes[function])]

    def wrong(launch: Launch) -> str:
        given, kernel = placed(launch.arguments), launch.kernel
        compiled = kernel.run(**given, **launch.options, grid=launch.grid, warmup=True)
        compiled._init_handles()
        sizes[compiled.function] = parameter_sizes(compiled.asm["ptx"])
        seen.clear()
        kernel[launch.grid](**given, **launch.options)
        types = compiled.src.signature
        wanted = [leaf for name in kernel.arg_names for leaf in leaves(given[name], types[name])]
        # Two more at the end are Triton's own.
        if len(seen) != len(wanted) + 2:
            return f"{len(wanted)} arguments, {len(seen)} parameters"
        pairs = enumerate(zip(seen, wanted, strict=False))
        return next((f"parameter {i}: {got!r}, not {want!r}" for i, (got, want) in pairs
                     if got != want), "")  # fmt: skip

    library, hook = driver.activate_stub(), HOOK(on_launch)
    library.stub_on_launch(hook)
    told = {
        f"{launch.kernel.__name__}: {case}": wrong(launch)
        for case, launch in launches(known("sm_90"), getattr(torch, dtype))
        if not cases or case in cases
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
