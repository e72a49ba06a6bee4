"""A stand-in for the GPU's driver: kernels are compiled for sm_90 and launched into nothing.

    kernel[grid](...) -> Triton's own launcher, in C -> libcuda.so.1 of `build_stub`, which returns

So all of the host's part of a launch takes its time, on any machine with a C compiler.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver

CHIP = "sm_90"


def build_stub(folder: Path) -> dict[str, str]:
    """Compile the driver into `folder`.

    Returns:
        The environment variables by which a new process compiles kernels, and finds it.

    Raises:
        RuntimeError: there is no C compiler, which Triton's launcher needs as well.
    """
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise RuntimeError("no C compiler (gcc, cc), which Triton's launcher needs: install one")
    source, library = Path(__file__).with_name("stub_cuda.c"), folder / "libcuda.so.1"
    named = [str(source), f"-Wl,-soname,{library.name}"]
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), *named], check=True)
    return {"TRITON_INTERPRET": "0", "TRITON_LIBCUDA_PATH": str(folder)}


class StandIn(CudaDriver):  # type: ignore[misc]  # Triton ships no types
    """Triton's driver, for one H100 that is not there."""

    def __init__(self) -> None:
        super().__init__()
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0

    def get_current_target(self) -> GPUTarget:
        """What kernels are compiled for."""
        return GPUTarget("cuda", int(CHIP.removeprefix("sm_")), 32)

    def get_active_torch_device(self) -> torch.device:
        """Where tensors are."""
        return torch.device("cpu")


def activate_stub() -> ctypes.CDLL:
    """Have Triton launch into nothing, in a process with the variables of `build_stub`.

    Returns:
        The driver.
    """
    library = ctypes.CDLL(f"{os.environ['TRITON_LIBCUDA_PATH']}/libcuda.so.1")
    triton.runtime.driver.set_active(StandIn())
    return library
