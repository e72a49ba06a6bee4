"""What a step of each main loop issues: it is read right, and stays what it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from weft.kernels.compile.aot_loop import instructions, report, step, with_table, work_of_step
from weft.kernels.engine.chips import known

# A loop over tiles and K: what is only done between tiles stands in two branches, the second of
# which drains the matrix units; a wait that fails goes to its own place and comes back.
SASS = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;    /* 0x00000a0000017a02 */
        /*0010*/              @P0 BRA 0x40 ;
        /*0020*/                   LDG.E R4, [R2.64] ;
        /*0030*/                   FENCE.VIEW.ASYNC.G ;
        /*0040*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR17], R13 ;
        /*0050*/             @!P0 BRA 0x110 ;
        /*0060*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0070*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR28], R24, gsb0 ;
        /*0080*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0090*/             @UP2 UTMALDG.2D [UR16], [UR28] ;
        /*00a0*/              @P1 BRA 0xe0 ;
        /*00b0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*00c0*/                   FMUL R1, R2, R3 ;
        /*00d0*/                   STG.E.128 [R4.64], R8 ;
        /*00e0*/              @P0 BRA 0x10 ;
        /*00f0*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR28], R24, gsb0 ;
        /*0100*/                   EXIT ;
        /*0110*/              @P0 BRA 0x60 ;
        /*0120*/                   BRA 0x110 ;
"""
TTGIR = """
module attributes {"ttg.num-warps" = 8 : i32} {
  tt.func public @k(%a: !tt.ptr<bf16> loc("k.py":1:0), %b: i32) attributes {noinline = false} {
    %0 = scf.for %i = %c0 to %n step %c1 iter_args(%x = %y) -> (i32)  : i32 {
      %1 = scf.for %k = %c0 to %m step %c1 iter_args(%acc = %z) -> (tensor<128x256xf32>) : i32 {
        scf.if %begins {
          %2 = tt.load %far : tensor<64x64x!tt.ptr<bf16>, #blocked> loc(#loc3)
        } loc(#loc2)
        %3 = ttng.async_tma_copy_global_to_local %d[%r, %c] %s, %bar, %p : !tt.tensordesc<128x64xbf16>, !ttg.memdesc<1xi64, #s> -> !ttg.memdesc<128x64xbf16, #s>
        %4 = ttg.async_copy_global_to_local %q, %s : tensor<64x256x!tt.ptr<bf16>, #b> -> <64x256xbf16, #s> loc(#loc7)
        %5 = ttng.warp_group_dot %3, %4, %acc {isAsync = true} : !ttg.memdesc<128x64xbf16, #s> * !ttg.memdesc<64x256xbf16, #s> -> tensor<128x256xf32, #mma> loc(#loc5)
      } loc(#loc4)
      %6 = tt.dot %u, %v, %w : tensor<128x512xbf16> * tensor<512x256xbf16> -> tensor<128x256xf32>
    }
  }
} loc(#loc)
"""  # noqa: E501


def test_a_step_leaves_out_what_is_done_between_tiles():
    lines = [line.name.split()[0] for line in step(instructions(SASS))]
    assert lines[0] == "HGMMA.64x256x16.F32.BF16" and len(lines) == 9
    assert "FENCE.VIEW.ASYNC.G" not in lines and "STG.E.128" not in lines
    assert step(instructions(SASS.replace("@P0 BRA 0x10 ", "@P0 BRA 0xf0 "))) == []  # no loop


def test_work_is_that_of_the_innermost_loop():
    assert work_of_step(TTGIR) == (2 * 128 * 256 * 64, 2 * (128 * 64 + 64 * 256))
    assert work_of_step("module {\n}") == (0, 0)


def rate(text: str, warps: int = 8) -> Any:
    return report("up", "k", known("sm_90"), torch.bfloat16, warps, text, TTGIR)


DRAINED = SASS.replace("gsb0, 0x1", "gsb0, 0x0")
WAIT, AFTER = "        /*0080*/", "        /*0090*/"


def test_wgmma_runs_beside_what_does_not_wait_for_it():
    found = rate(SASS)
    assert (found.tensor_cycles, found.issue_cycles, found.rate) == (256, 18, 1.0)
    assert (found.pending, found.tma, found.barriers, found.fences) == ((1,), 1, 1, 0)
    drained = rate(DRAINED)
    assert drained.pending == (0,) and 0.85 < drained.rate < 0.95
    # Narrow ones wait for their operands, unless the rows are in registers.
    narrow = DRAINED.replace("64x256x16", "64x32x16")
    assert rate(narrow).tensor_cycles == 2 * (32 / 4 + 16)
    assert rate(narrow.replace("R24, gdesc", "R24, R8, gdesc")).tensor_cycles == 2 * 32 / 2
    # 16 exponentials take the special units 8 cycles each, for two warps a scheduler: beside the
    # matrix units before the wait that drains them, on top after it, but for the other warp's.
    busy = "".join(f"\n        /*1{i:03x}*/    MUFU.EX2 R1, R1 ;" for i in range(16))
    assert rate(DRAINED.replace(WAIT, busy + "\n" + WAIT)).cycles == drained.cycles
    assert rate(DRAINED.replace(AFTER, busy + "\n" + AFTER)).cycles > drained.cycles + 100


def test_a_warp_waits_as_its_instructions_say():
    def told(line: str, word: int) -> str:
        return f"        /*0078*/    {line} ; /* 0x{0:016x} */\n    /* 0x{word:016x} */\n"

    def cycles(*lines: str) -> int:
        return rate(DRAINED.replace(AFTER, "".join(lines) + AFTER), warps=4).cycles

    nothing, holds, waits = 7 << 46 | 7 << 49, 7 << 49, 7 << 46 | 7 << 49 | 1 << 52
    add, stalled = told("FADD R1, R2, R3", nothing), told("FADD R1, R2, R3", nothing | 11 << 41)
    assert cycles(stalled) == cycles(add) + 10
    # What is loaded is waited for where it is used: from shared memory, or from far away.
    use = told("FADD R1, R4, R4", waits)
    near, far = (cycles(told(f"{load} R4, [R2]", holds), use) for load in ("LDS", "LDG.E"))
    assert cycles(add) + 20 < near < cycles(add) + 40 and far > near + 500


def test_amd_assembly_is_read():
    text = """
.LBB0_1:                                ; =>This Loop Header
	s_waitcnt lgkmcnt(0)
	v_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], a[0:15]
	ds_read_b128 v[0:3], v9
	s_cbranch_scc1 .LBB0_1
; %bb.2:
	s_endpgm
"""
    assert [line.name.split()[0] for line in step(instructions(text))] == [
        "v_mfma_f32_32x32x8_bf16", "ds_read_b128", "s_cbranch_scc1", "s_waitcnt",
    ]  # fmt: skip


def test_the_table_of_a_page():
    found = report("up", "k", known("sm_90"), torch.bfloat16, 8, SASS, TTGIR)
    mark = f"loops, Triton {'.'.join(triton.__version__.split('.')[:2])}"
    page = with_table(f"a\n<!-- {mark} -->\nold\n<!-- /{mark} -->\nb\n", [found])
    assert "| up | k | 4.19 | 48 | 9 | 1 | 1 | 1 |" in page and "old" not in page


def loops(arch: str, *cases: str, dtype: str = "bfloat16") -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "weft.kernels.compile.aot", "--loop", "--json", "--arch", arch]
    command += ["--dtype", dtype, *(("--case", *cases) if cases else ())]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


# Whose operands all come by TMA where the chip has it, as those of the plain matmul do.
ALL_BY_TMA = (
    "up, by copy engines", "up, in halves", "up, gelu, by copy engines", "d(down)",
    "gate and up, by copy engines", "down", "d(up)", "two shots",
)  # fmt: skip


def check_sm_90(found: list[dict[str, Any]]) -> None:
    plain, *ours = (r for r in found if "attention" not in r["kernel"])
    assert plain["kernel"] == "plain_matmul_kernel" and plain["pending"] == [1]
    assert plain["copies"] == 0 and plain["tma"] == 2
    for each in ours:
        if each["case"] in ALL_BY_TMA and "contract" not in each["kernel"]:
            pair = each["case"].startswith("gate and up")
            assert (each["copies"], each["loads"], each["fences"]) == (0, 0, 0), each
            assert each["tma"] == plain["tma"] + pair, each
            assert each["barriers"] <= plain["barriers"] + pair, each
            assert each["instructions"] <= 1.2 * plain["instructions"], each
        if each["case"] in ALL_BY_TMA or each["flops"] == plain["flops"]:
            assert each["pending"] and min(each["pending"]) >= 1, each
            assert each["rate"] == 1.0, each


def check_gradients(found: list[dict[str, Any]]) -> None:
    """lse and delta come by a copy each, and tiles let the matrix units work."""
    gradients = [
        r for r in found if "attention_backward" in r["kernel"] and r["flops"] == 8 * 64 * 128**2
    ]
    assert {r["kernel"][1:5] for r in gradients} == {"ring", "head"}
    for each in gradients:
        assert each["copies"] == 10 and each["rate"] >= 0.8, each


@pytest.mark.slow
def test_operands_of_fused_matmuls_come_by_tma():
    check_sm_90(loops("sm_90", "up, by copy engines", "gate and up, by copy engines", "down"))


def test_the_page_has_the_same_loops_by_both_tritons():
    page = (Path(__file__).parents[2] / "docs" / "virtual_time.md").read_text()
    by_both = [page.split(f"loops, Triton {of} -->")[1].splitlines()[3:-1] for of in (3.6, 3.7)]
    rows = [[[c.strip() for c in line.split("|")[1:-1]] for line in table] for table in by_both]
    assert [r[:2] for r in rows[0]] == [r[:2] for r in rows[1]] and len(rows[0]) > 10
    for case, _, _, _, issued, _, pending, tma, copies, *_, rate in rows[0] + rows[1]:
        if case in ALL_BY_TMA:
            assert (int(tma) >= 2, copies, rate) == (True, "0", "100%"), case
            assert int(issued) <= 1.2 * 107 and pending in ("1", "2"), case


@pytest.mark.sweep
def test_all_loops():
    found = loops("sm_90")
    check_sm_90(found)
    check_gradients(found)
    for arch in ("sm_80", "sm_100", "gfx942"):
        found = loops(arch)
        plain = found[0]
        wide = [r for r in found if r["flops"] == plain["flops"] and "gemm" in r["kernel"]]
        # As good as the chip's plain matmul: no more than a fifth of its instructions beside them.
        for each in wide:
            assert each["instructions"] <= 1.6 * plain["instructions"], (arch, each)
            assert each["rate"] >= 0.95 * plain["rate"], (arch, each)
