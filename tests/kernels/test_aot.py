"""Every kernel compiles for every chip, fits it, does not spill, and uses its matrix units.

What spills nevertheless is in `weft.kernels.compile.known_spills`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import triton

from weft.kernels.compile import aot, aot_loop
from weft.kernels.compile.aot import occupancy, widest_load
from weft.kernels.engine.chips import KNOWN

SHARED = {chip.name: chip.shared_bytes for chip in KNOWN}
FP8 = {chip.name: chip.fp8 for chip in KNOWN}
# The matrix instructions of tiles with as many rows as they want; others of NVIDIA have HMMA, too.
NEWEST = {
    "sm_80": ("HMMA",),
    "sm_90": ("HGMMA", "QGMMA"),
    "sm_100": ("UTCHMMA", "UTCQMMA"),
    "gfx942": ("v_mfma",),
}

NO_MATMUL = {
    "_publish_kernel", "_show_kernel", "exchange_kernel", "reduce_kernel", "_pull_kernel",
    "flagged_reduce_kernel",
    "_switched_kernel", "_begin_kernel", "_post_kernel", "_wait_kernel", "_announce_kernel",
    "_hold_kernel", "_finish_kernel", "_append_kernel", "_end_kernel", "_merge_kernel",
    "_numbers_kernel", "weigh_kernel", "experts, rows alone", "experts, rows fetched",
    "experts, fp8 rows fetched",
}  # fmt: skip

# Of each chip the cases that are nearest to spilling; with ATTENTION they have every kernel that
# multiplies. The sweep compiles all of them.
SAMPLE = {
    "sm_90": ("gate and up", "down", "experts"),
    "sm_100": (
        "weight gradient",
        "two shots",
        "decode, pages",
        "pull of sums",
        "experts' weight gradient",
    ),
    "gfx942": ("up", "one shot", "down"),
}


# Each takes tens of seconds: the sweep has all of them on every chip.
ATTENTION = {
    "sm_90": ("attention", "attention by heads, packed"),
    "sm_80": ("attention, packed",),
    "sm_100": ("attention by heads",),
}

# What dispatch, combine and their gradients launch, but for what SAMPLE has.
EXPERTS = (
    "experts, kept", "experts, rows fetched", "experts, rows alone", "d(down of experts)",
    "d(gate and up of experts)", "experts, decode", "experts, decode, fp8 rows", "experts, gelu",
    "experts' weight gradient", "experts, fp8 rows", "experts, fp8 rows fetched",
)  # fmt: skip

# Those whose tiles are wide enough for the newest matrix units.
WIDE = ("up", "gate and up", "weight gradient", "down", "two shots")


def compiled(arch: str, dtype: str, *cases: str, wide: bool = False) -> list[dict[str, Any]]:
    """In a process of its own, as kernels of this one are interpreted."""
    command = [
        sys.executable,
        "-m",
        "weft.kernels.compile.aot",
        "--json",
        "--arch",
        arch,
        "--dtype",
        dtype,
    ]
    command += ["--case", *cases] if cases else []
    command += ["--wide"] if wide else []
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def checked(arch: str, dtype: str, *cases: str, wide: bool = False) -> list[dict[str, Any]]:
    reports = compiled(arch, dtype, *cases, wide=wide)
    found = {report["case"] for report in reports}
    assert found == set(cases) if cases else len({r["kernel"] for r in reports}) >= 10
    for report in reports:
        assert not report["unknown_spills"], report
        assert report["registers"] > 0, report
        assert report["shared_bytes"] <= SHARED[arch], report
        assert report["programs_a_core"] >= 1 and 0 < report["occupancy"] <= 1, report
        assert report["widest_load"] or report["kernel"] == "_switched_kernel", report
        if not {report["kernel"], report["case"]} & NO_MATMUL and dtype != "float32":
            assert set(report["matrix_instruction"].split("+")) <= {*NEWEST[arch], "HMMA"}, report
            if report["config"].get("block_m", 0) >= 64:
                # Of one kind: that is what the loop over K issues.
                assert report["matrix_instruction"] in NEWEST[arch], report
    return reports


@pytest.mark.parametrize(
    ("arch", "matrix", "cases"),
    [
        ("sm_90", "HGMMA", SAMPLE["sm_90"][:1]),
        pytest.param("sm_90", "HGMMA", SAMPLE["sm_90"][1:], marks=pytest.mark.slow),
        pytest.param("sm_100", "UTCHMMA", SAMPLE["sm_100"], marks=pytest.mark.slow),
        pytest.param("gfx942", "v_mfma", SAMPLE["gfx942"], marks=pytest.mark.slow),
    ],
)
def test_bfloat16(arch, matrix, cases):
    """Wide tiles use the newest matrix unit, and hardware copies."""
    wide = [r for r in checked(arch, "bfloat16", *cases) if r["case"] in WIDE]
    assert wide
    for report in wide:
        if "publish" not in report["kernel"]:
            # No other kind of matrix instruction occurs, so that is what the loop over K issues.
            assert report["matrix_instruction"] == matrix, report
            widest = report["widest_load"]
            assert widest == "UTMALDG" or (arch == "gfx942" and "x4" in widest), report


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90", "sm_80", "sm_100"])
def test_attention(arch):
    checked(arch, "bfloat16", *ATTENTION[arch])


@pytest.mark.skipif(triton.__version__.startswith("3.7."), reason="test_attention compiles more")
def test_every_triton_compiles_attention():
    """What it spills may differ between them, which `test_attention` holds for one."""
    reports = compiled("sm_90", "bfloat16", "attention")
    by = {report["kernel"]: report["matrix_instruction"] for report in reports}
    for kernel in ("_ring_attention_kernel", "_ring_attention_backward_kernel"):
        assert by[kernel] == "HGMMA"


@pytest.mark.slow
def test_every_launch_of_experts_compiles():
    """Those of a step of training, forward and backward: by every Triton that this runs by."""
    checked("sm_90", "bfloat16", *EXPERTS)


def test_occupancy_is_the_scarcest_resource():
    # 65536 registers a core, in portions of 8 a lane; 4 schedulers with a quarter each.
    assert occupancy("sm_90", 128, 100 << 10, 8) == (2, 0.25)
    assert occupancy("sm_90", 255, 1 << 10, 8) == (1, 0.125)
    assert occupancy("sm_90", 32, 8, 8) == (8, 1.0)
    assert occupancy("sm_90", 16, 0, 1) == (32, 0.5)  # programs
    assert occupancy("sm_90", 255, 0, 12) == (0, 0.0)  # 8 warps of 256 registers fit
    assert occupancy("sm_100", 64, 1 << 10, 8, 128) == (4, 0.5)  # 512 columns of tensor memory
    assert occupancy("gfx942", 128, 40 << 10, 8) == (1, 0.25)
    assert occupancy("gfx942", 256, 0, 4) == (2, 0.25)


def test_the_widest_load_is_found_in_a_disassembly():
    assert widest_load("LDG.E R1, [R2]; LDGSTS.E.BYPASS.128 [R2]; LDG.E.64 R4") == (
        "LDGSTS.E.BYPASS.128"
    )
    assert widest_load("LDG.E.U16 R1; LDG.E.U8 R2") == "LDG.E.U16"
    assert widest_load("LDG.E.128 R1; LDG.E.ENL2.256 R4") == "LDG.E.ENL2.256"
    assert widest_load("global_load_short_d16 v1; global_load_dword v2") == "global_load_dword"
    assert widest_load("UTMALDG.2D [UR8]; LDG.E.128 R4") == "UTMALDG"
    assert widest_load("global_load_ushort v1; global_load_dwordx4 v[0:3]; buffer_load_dword") == (
        "global_load_dwordx4"
    )
    assert widest_load("STG.E.128") == ""


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
@pytest.mark.parametrize("arch", SHARED)
def test_the_whole_range_of_the_heuristics(arch, dtype):
    if dtype == "float8_e4m3fn" and not FP8[arch]:
        pytest.skip(f"{arch} has no fp8")
    # No heuristic tells float16 from bfloat16.
    checked(arch, dtype, wide=dtype != "float16")


@pytest.mark.parametrize("given", [[], ["--arch", "sm_90"]])
def test_another_process_gets_the_arguments(monkeypatch, given):
    commands = []

    def run(command, env):
        commands.append(command)
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(aot.subprocess, "run", run)
    assert aot.main(given) == 3
    assert commands == [[sys.executable, "-m", "weft.kernels.compile.aot", *given]]


def test_chips_have_names(monkeypatch):
    assert set(aot._CHIPS.values()) == set(aot.TARGETS)
    asked = []

    def compile_all(archs, *args, **options):
        asked.extend(archs)
        yield from ()

    monkeypatch.setattr(aot, "compile_all", compile_all)
    monkeypatch.setattr(aot, "_launches", lambda *_: [("up", None)])
    monkeypatch.setattr(aot.signals, "INTERPRETED", False)
    assert aot.main(["--arch", "h100,a100", "H200", "gfx942"]) == 0
    assert asked == ["sm_90", "sm_80", "gfx942"]


def test_an_unknown_case_is_refused_before_the_table(monkeypatch, capsys):
    monkeypatch.setattr(aot, "_launches", lambda arch, *_: [("up", None)] * (arch == "sm_90"))
    monkeypatch.setattr(aot.signals, "INTERPRETED", False)
    for given, said in (
        (["--arch", "h100", "--case", "up", "upp"], "no case 'upp': the nearest are up"),
        (["--arch", "a100", "--dtype", "float8_e4m3fn"], "sm_80: no kernels of float8_e4m3fn"),
    ):
        with pytest.raises(SystemExit):
            aot.main(given)
        told = capsys.readouterr()
        assert said in told.err and not told.out


def test_a_page_without_loops_is_refused(capsys, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"<!-- {aot_loop.MARK} -->\n<!-- /{aot_loop.MARK} -->\n")
    with pytest.raises(SystemExit):
        aot.main(["--arch", "h100", "--page", str(page)])
    assert "--loop only" in capsys.readouterr().err


@pytest.mark.parametrize(("given", "named"), [("sm_90,sm_42", "'sm_42'"), (",", "','")])
def test_an_unknown_arch_is_refused(capsys, given, named):
    with pytest.raises(SystemExit):
        aot.main(["--arch", given])
    said = capsys.readouterr().err
    assert f"no arch {named}" in said and "sm_80" in said
