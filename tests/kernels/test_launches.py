"""Triton's own launcher hands kernels what they were given, on a driver that runs nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[1]
COMPILER = shutil.which("gcc") or shutil.which("cc")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a driver that runs nothing."""
    if COMPILER is None:
        pytest.skip("no C compiler, which Triton's launcher needs")
    folder = tmp_path_factory.mktemp("driver")
    library = str(folder / "libcuda.so.1")
    command = [COMPILER, "-shared", "-fPIC", "-o", library, str(HERE / "stub_cuda.c")]
    subprocess.run([*command, "-Wl,-soname,libcuda.so.1"], check=True)
    return folder


def launched(driver: Path, dtype: str, *cases: str) -> dict[str, str]:
    variables = {"TRITON_INTERPRET": "0", "TRITON_LIBCUDA_PATH": str(driver)}
    variables |= {"PYTHONPATH": str(HERE.parent)}
    command = [sys.executable, str(HERE / "launching.py"), str(driver), dtype, *cases]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told: dict[str, str] = json.loads(done.stdout)
    return told


# Descriptors of two weights, constants in tuples, numbers of all kinds; what is None; floats.
CASES = ("gate and up, 8 tokens", "signals of a stream", "pull", "decode, pages", "append, pages")


def test_parameters_are_the_arguments(driver: Path) -> None:
    told = launched(driver, "bfloat16", *CASES)
    assert {name.partition(": ")[2] for name in told} == set(CASES) and len(told) >= 8
    assert not any(told.values()), told


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
def test_parameters_of_every_kernel_are_the_arguments(driver: Path, dtype: str) -> None:
    told = launched(driver, dtype)
    assert len(told) > 20  # the fewest, of fp8
    assert not any(told.values()), told
