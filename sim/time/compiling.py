"""What the kernels launched by a run need on its chip: registers, spills, shared memory.

Kernels of a run are interpreted, so another process with TRITON_INTERPRET=0 compiles them: it
receives the launches and loads the script that they come from.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True)
class Launched:
    """A launch: the kernel by its module and name, what it was given without any memory."""

    rank: int
    module: str
    kernel: str
    grid: tuple[int, ...]
    given: dict[str, Any]


def launched(
    rank: int, fn: Callable[..., Any], grid: tuple[int, ...], given: dict[str, Any]
) -> Launched:
    """The launch of `fn` with the arguments and options `given`, to be kept."""
    with _disable_current_modes():  # it is no work of the rank's
        kept = with_tensors(given, lambda tensor: tensor.detach().to("meta"))
    return Launched(rank, str(fn.__globals__["__name__"]), fn.__name__, grid, kept)


def with_tensors(
    given: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, Any]:
    """A kernel's arguments with `change` made to their tensors, also in tuples and descriptors."""

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, TensorDescriptor):
            return replace(leaf, base=change(leaf.base))
        return change(leaf) if isinstance(leaf, torch.Tensor) else leaf

    found: dict[str, Any] = tree_map(changed, given)
    return found


def load_script(path: Path) -> ModuleType:
    """The module in a script, which may define what is looked up by its module's name."""
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    code = compile(path.read_bytes(), str(path.resolve()), "exec")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.modules[path.stem] = module
    exec(code, vars(module))
    return module


def tell_launches(launches: Sequence[Launched], script: Path, chip: str) -> int:
    """Print a line for each kernel; returns 1 if one spills, 2 if it cannot be compiled."""
    code = "import sys; from weft.sim.time.compiling import main; sys.exit(main(*sys.argv[1:]))"
    command = [sys.executable, "-c", code, str(script), chip]
    env = os.environ | {"TRITON_INTERPRET": "0"}
    return subprocess.run(command, input=pickle.dumps(list(launches)), env=env).returncode


def main(script: str, chip_name: str) -> int:
    """Compile the launches in stdin for the chip."""
    from weft.kernels.compile import aot
    from weft.kernels.compile.aot_cases import Launch
    from weft.kernels.compile.machine_code import source
    from weft.kernels.engine.chips import known

    modules, chip = {Path(script).stem: load_script(Path(script))}, known(chip_name)
    ranks: dict[str, list[int]] = {}  # by what distinguishes a launch
    found: dict[str, Launch] = {}
    for each in pickle.load(sys.stdin.buffer):
        module = modules.get(each.module) or __import__(each.module, fromlist=[each.kernel])
        kernel = getattr(module, each.kernel, None)
        while kernel is not None and not isinstance(kernel, triton.JITFunction):
            kernel = getattr(kernel, "fn", None)  # of what an autotuner or a heuristic wraps
        if kernel is None:
            print(f"{each.module}.{each.kernel}: only kernels at module level can be compiled")
            return 2
        defaults = {p.name: p.default for p in kernel.params if p.has_default}
        options = {k: v for k, v in each.given.items() if k not in kernel.arg_names}
        arguments = defaults | {k: v for k, v in each.given.items() if k not in options}
        launch = Launch(kernel, each.grid, arguments, options)
        key = f"{source(launch).hash()} {options}"
        found.setdefault(key, launch)
        ranks.setdefault(key, []).append(each.rank)
    # Ranks whose constants differ usually need the same resources, and then share a line.
    alike: dict[str, tuple[aot.KernelReport, list[int]]] = {}
    for key, launch in found.items():
        tensors = [v for v in launch.arguments.values() if isinstance(v, torch.Tensor)]
        dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
        report = aot.compile_launch("", launch, chip, dtype)
        alike.setdefault(aot.line(report), (report, []))[1].extend(ranks[key])
    print(aot.HEAD)
    for report, who in alike.values():
        print(aot.line(replace(report, case=_spelled(sorted(set(who))))))
    return int(any(report.spills for report, _ in alike.values()))


def _spelled(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == [*range(ranks[0], ranks[-1] + 1)]:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
