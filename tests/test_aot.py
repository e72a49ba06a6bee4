"""Every kernel compiles for every chip, fits it, does not spill, and uses its matrix units."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from weft.kernels.chips import KNOWN

SHARED = {chip.name: chip.shared_bytes for chip in KNOWN}
MATRIX = {
    "sm_80": {"HMMA"},
    "sm_90": {"HGMMA", "HMMA"},
    "sm_100": {"UTCHMMA", "HMMA"},
    "gfx942": {"v_mfma"},
}

NO_MATMUL = {
    "_publish_kernel", "_exchange_kernel", "_reduce_kernel", "_pull_kernel", "_multimem_kernel",
}  # fmt: skip


@cache
def compiled(arch: str, dtype: str) -> list[dict[str, Any]]:
    """In a process of its own, as kernels of this one are interpreted."""
    command = [sys.executable, "-m", "weft.kernels.aot", "--json", "--arch", arch, "--dtype", dtype]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def check(arch: str, dtype: str) -> None:
    reports = compiled(arch, dtype)
    assert len({report["kernel"] for report in reports}) >= 6
    for report in reports:
        assert report["spills"] == 0, report
        assert report["registers"] > 0, report
        assert report["shared_bytes"] <= SHARED[arch], report
        if report["kernel"] not in NO_MATMUL and dtype != "float32":
            assert report["matrix_instruction"] in MATRIX[arch], report


@pytest.mark.parametrize("arch", SHARED)
def test_bfloat16(arch):
    check(arch, "bfloat16")


def test_wide_tiles_use_the_newest_matrix_unit_and_hardware_copies():
    for arch, matrix in (("sm_90", "HGMMA"), ("sm_100", "UTCHMMA")):
        reports = {report["case"]: report for report in compiled(arch, "bfloat16")}
        for case in ("up", "qkv", "columns", "weight gradient", "down", "d(qkv)", "two shots"):
            assert reports[case]["matrix_instruction"] == matrix, reports[case]
        for case in ("down", "two shots"):
            assert reports[case]["copy_instruction"] == "UTMALDG", reports[case]


def test_float32_on_sm_90():
    check("sm_90", "float32")


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("arch", SHARED)
def test_other_dtypes(arch, dtype):
    check(arch, dtype)


def test_an_unknown_arch_is_refused():
    command = [sys.executable, "-m", "weft.kernels.aot", "--arch", "sm_42"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert "sm_42" in done.stderr
    assert "sm_80" in done.stderr
