"""Published figures: what rows mean, formulas by hand, and how far the model is off."""

from __future__ import annotations

import csv
import json
import random
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest

from tools import published_page
from weft.bench import cli
from weft.bench.published import command
from weft.bench.published.predict import Prediction, prediction_of
from weft.bench.published.rows import (
    COLUMNS,
    SHIPPED,
    InexpressibleError,
    Row,
    op_words,
    read_rows,
    row_bytes,
    row_hardware,
)
from weft.collectives.prices.hardware import H100, PRESETS
from weft.collectives.prices.library import matmul_us
from weft.collectives.protocols import (
    HOST_US,
    KERNEL_SHARE,
    KERNEL_US,
    SECOND_SHOT_US,
    SWITCH_SHARE,
)


def row(**cells: object) -> Row:
    plain = Row("here", "H100", "8", "all_reduce", "", "", "", "bf16", "nccl", "100", "us", "")
    return replace(plain, **{name: str(cell) for name, cell in cells.items()})


def us_of(**cells: object) -> float:
    made = prediction_of(row(**cells))
    assert made.predicted is not None, made.why
    return made.predicted


def test_experts_by_hand() -> None:
    """Of 8 ranks on one host no card takes part; on 16 half of the copies go by one."""
    cells = {"gpu": "H800", "M": 128, "N": 7168, "what": "deepep", "note": "top-8"}
    op, each = "MoE combine, low latency", 128 * 8 * 7168 * 2
    link = each / (200e3 * KERNEL_SHARE)
    one = us_of(op=op, world=8, **cells)
    assert one == pytest.approx(KERNEL_US + 7 / 8 * link)
    two = us_of(op=op, world=16, **cells)
    assert two == pytest.approx(KERNEL_US + 7 / 16 * link + each / 2 / (50e3 * 0.85))
    layer = {"op": "MoE layer, decode", "gpu": "H200", "M": 4096, "N": 2048, "K": 4096}
    layer |= {"dtype": "fp8", "note": "256 experts top-6"}
    apart = prediction_of(row(what="unfused", **layer))
    assert apart.kind == "library" and "exposed communication" in apart.how
    fused = prediction_of(row(what="mega kernel", **layer))
    assert fused.kind == "fused" and "exposed" in fused.how and "half precision" in fused.how
    assert "not stated" in prediction_of(row(what="x", **layer | {"note": ""})).why
    unshown = prediction_of(
        row(op="MoE layer0: AG", what="TP8 EP1 E8 top2 torch (not optimised)", M=8, N=8, K=8)
    )
    assert "not shown" in unshown.why


def test_words_for_ops_are_many() -> None:
    for written, meant in (
        ("AG", "all_gather"),
        ("All-Reduce", "all_reduce"),
        ("reducescatter", "reduce_scatter"),
        ("AG+GEMM", "all_gather+matmul"),
        ("gemm_rs", "matmul_reduce_scatter"),
        ("AllGather GEMM", "all_gather matmul"),
        ("RMSNorm", "rms_norm"),
    ):
        assert op_words(written) == meant


@pytest.mark.parametrize(
    ("gpu", "preset"),
    [
        ("H100 (Azure NDm v5)", "h100"), ("H800 + CX7", "h800"), ("GB200", "gb200-nvl72"),
        ("B200 (SM100)", "b200"), ("A100-SXM4-80GB", "a100"), ("mi355x", "mi355x"),
        ("8xH100-SXM5", "h100"), ("NVIDIA H200 141GB", "h200"),
    ],
)  # fmt: skip
def test_gpus_by_name(gpu: str, preset: str) -> None:
    assert row_hardware(row(gpu=gpu)) == PRESETS[preset]


@pytest.mark.parametrize("gpu", ["", "H2000", "RTX 4090", "H100 PCIe", "SM100 (chip unstated)"])
def test_other_gpus_have_no_model(gpu: str) -> None:
    with pytest.raises(InexpressibleError, match="no preset"):
        row_hardware(row(gpu=gpu))


def test_parts_held_to_less_power() -> None:
    less = row_hardware(row(gpu="H100 HBM2e 500W"))
    assert less.hbm_bandwidth == 2.0e12
    assert less.sustained == pytest.approx(H100.sustained * (500 / 700) ** 0.65)


def test_sizes_of_collectives() -> None:
    assert row_bytes(row(M=64, N=8192)) == 1 << 20
    assert row_bytes(row(what="nccl, 128 KiB")) == 128 << 10
    assert row_bytes(row(what="kernel 6, 49152 B")) == 49152
    assert row_bytes(row(op="AG", what="RCCL, 128 MB a rank")) == 8 * 128e6
    assert row_bytes(row(what="nccl, 2 MB per rank")) == 2e6  # an all-reduce's is the whole
    with pytest.raises(InexpressibleError, match="size is not stated"):
        row_bytes(row(what="nccl"))


def test_nccl_by_hand() -> None:
    """The best of three protocols, on a port of 450 GB/s."""
    # 1 KiB by LL: 14 hops of 0.6 us. 64 MiB by Simple: the wire has 14 / 8 of it, at 0.74.
    assert us_of(what="nccl, 1 KiB") == pytest.approx(15 + 8.4 + 1024 * 1.75 / 141e3)
    gather = us_of(op="all_gather", M=32768, N=8192)
    assert gather == pytest.approx(15 + 7 * 3.4 + (512 << 20) * 7 / 8 / (0.74 * 450e3))
    # 4 MiB by LL128.
    reduced = us_of(op="reduce_scatter", M=256, N=8192)
    assert reduced == pytest.approx(15 + 7 * 1.25 + (4 << 20) * 7 / 8 / (0.55 * 450e3))
    # 256 MiB by the switch, if there is one.
    assert us_of(M=16384, N=8192) == pytest.approx(80 + (256 << 20) * 1.75 / (1.04 * 450e3))
    ring = us_of(gpu="A100", M=16384, N=8192)
    assert ring == pytest.approx(15 + 14 * 3.4 + (256 << 20) * 1.75 / (0.74 * 300e3))


def test_two_hosts_are_bound_by_their_cards() -> None:
    one, two = (
        us_of(M=16384, N=8192, op="all_gather"),
        us_of(M=16384, N=8192, op="all_gather", world=16),
    )
    # Sixteen ranks on two hosts: eight cards of 50 GB/s carry less than the links do.
    assert two == pytest.approx(15 + 14 * 3.4 + 14.0 + (256 << 20) * 15 / 16 / 296e3)
    assert two > one


def test_kernels_of_collectives_by_hand() -> None:
    nbytes, host = 1 << 20, KERNEL_US + HOST_US
    shape: dict[str, Any] = {"M": 64, "N": 8192}
    assert us_of(what="torch one-shot", **shape) == pytest.approx(
        host + 7 * nbytes / (KERNEL_SHARE * 450e3)
    )
    assert us_of(what="custom two-stage", **shape) == pytest.approx(
        KERNEL_US + SECOND_SHOT_US + 1.75 * nbytes / (KERNEL_SHARE * 450e3)
    )
    assert us_of(what="NVLS multimem", **shape) == pytest.approx(
        host + nbytes / (SWITCH_SHARE["all_reduce"] * 450e3)
    )
    assert "switch" in prediction_of(row(gpu="A100", what="multimem", **shape)).why
    # Four MI300X have three links each.
    assert us_of(gpu="MI300X", world=4, what="custom one-stage", **shape) == pytest.approx(
        KERNEL_US + 3 * nbytes / (KERNEL_SHARE * 3 * 64e3)
    )


def test_a_librarys_matmul_by_hand() -> None:
    core = 989.4e6 * 0.803 / 132 * 0.92  # flop a us
    whole = 2 * 128 * 256 * 8192 / core  # a tile
    # 132 tiles fill the cores; of 110 more in a second wave, half of the idle cores are won back.
    assert matmul_us(H100, 128 * 12, 256 * 11, 8192, "bfloat16") == pytest.approx(4 + whole)
    more = matmul_us(H100, 128 * 22, 256 * 11, 8192, "bfloat16")
    assert more == pytest.approx(4 + (242 / 132 + (2 - 242 / 132) / 2) * whole)
    # One row reads its weight.
    assert matmul_us(H100, 1, 8192, 8192, "bfloat16") == pytest.approx(
        4 + 2 * (8192**2 + 2 * 8192) / (0.9 * 3.35e6), rel=0.01
    )
    assert us_of(op="gemm", M=1536, N=2816, K=8192, world=1, what="cuBLAS") == 4 + whole
    rate = us_of(op="gemm", M=1536, N=2816, K=8192, world=1, what="cuBLAS", unit="TFLOP/s")
    assert rate == pytest.approx(2 * 1536 * 2816 * 8192 / (4 + whole) / 1e6)


def test_unfused_is_the_matmul_and_the_collective() -> None:
    shape: dict[str, Any] = {"M": 8192, "N": 8192, "K": 3584}
    whole = us_of(op="gemm + rs", what="torch (cublas + nccl)", **shape)
    parts = (
        us_of(op="matmul", what="cublas", **shape),
        us_of(op="reduce_scatter", M=8192, N=8192, what="nccl"),
    )
    assert whole == pytest.approx(sum(parts))
    # Small ones wait for the host, except in a graph.
    small: dict[str, Any] = {"op": "gemm + rs", "M": 96, "N": 1024, "K": 1024}
    assert us_of(what="torch + nccl", **small) == 81
    assert us_of(what="torch + nccl, CUDA graph", **small) < 40
    # A ratio compares both.
    fused = us_of(op="gemm + rs", what="flux", **shape)
    ratio = us_of(op="gemm + rs", what="flux", unit="x of torch+nccl", **shape)
    assert ratio == pytest.approx(whole / fused)
    # By the switch, where the words say so; "unfused" has no "fused" in it.
    switch = us_of(op="gemm_ar", what="cuBLAS + NVLS", **shape)
    library = us_of(op="gemm_ar", what="unfused", **shape)
    assert switch < library == us_of(op="gemm_ar", what="torch + nccl", **shape)
    # torch's own fused op is eight small ones, each enqueued by the host.
    assert us_of(what="torch async-TP", **small) == pytest.approx(8 * 31, rel=0.01)


def test_norms_by_hand() -> None:
    us = us_of(op="rms_norm", world=1, M=1024, N=8192, what="all rows", note="with residual")
    assert us == pytest.approx(HOST_US + 2.3 + 4 * (16 << 20) / (0.9 * 3.35e6))
    part = us_of(op="rms_norm", world=1, M=1024, N=8192, what="1/8 of rows", note="residual")
    assert part == pytest.approx(HOST_US + 2.3 + 4 * (2 << 20) / (0.9 * 3.35e6))


def test_attention_by_hand() -> None:
    cells: dict[str, Any] = {
        "op": "flash attention forward", "world": 1, "M": 16384, "what": "FA3",
        "note": "heads 16 x 128, batch 1",
    }  # fmt: skip
    rate = us_of(unit="TFLOP/s", **cells)
    flops = 4 * 16384**2 * 16 * 128
    assert rate == pytest.approx(989.4 * 0.67 * 16384 / 16484, rel=0.01)
    assert us_of(**cells) == pytest.approx(flops / rate / 1e6)
    causal = cells | {"note": "heads 16 x 128, causal"}
    assert us_of(**causal) < 0.55 * us_of(**cells)
    backward = cells | {"op": "flash attention backward"}
    assert us_of(**backward) == pytest.approx(2.5 * 0.67 / 0.57 * us_of(**cells), rel=0.01)
    both = cells | {"op": "flash attention fwd+bwd"}
    assert us_of(**both) == pytest.approx(us_of(**cells) + us_of(**backward))


def test_a_ring_is_its_parts() -> None:
    cells: dict[str, Any] = {
        "gpu": "H800", "op": "ring attention forward", "M": 65536,
        "note": "heads 32/8 x 128, causal, batch 1",
    }  # fmt: skip
    ideal = us_of(what="flash_attn ideal /8", **cells)
    flops = 2 * 65536**2 * 32 * 128 / 8
    assert ideal == pytest.approx(flops / (989.4e6 * 0.38 * 65536 / 66036), rel=0.01)
    merge = 6 * 4 * 8192 * 32 * 128 / (0.9 * 3.35e6)
    assert us_of(what="zigzag", **cells) == pytest.approx(ideal + 8 * merge)
    assert us_of(what="ring", **cells) > 1.6 * us_of(what="zigzag", **cells)


def test_rows_of_other_kinds_say_why_there_is_no_prediction() -> None:
    for cells, why in (
        ({"gpu": "TPU v5"}, "no preset for TPU v5"),
        ({"op": "decode step"}, "no model of the op 'decode step'"),
        ({"M": "many", "N": 8}, "M is no count: 'many'"),
        ({"op": "matmul", "M": 8, "N": "", "K": 8}, "N is not stated"),
        ({"value": "fast"}, "the value is no positive number: 'fast'"),
        ({"value": "-1"}, "no positive number"),
        ({"value": "nan"}, "no positive number"),
        ({"M": 8, "N": 8, "unit": "furlongs"}, "no prediction in 'furlongs'"),
        ({"M": 8, "N": 8, "unit": ""}, "a unit that is not stated"),
        ({"M": 8, "N": 8, "dtype": "fp8 x fp4"}, "no rate for operands of"),
        ({"what": "triton_dist double tree, 1 KiB"}, "double tree"),
        ({"M": 8, "N": 8, "world": 9}, "9 ranks on 2 hosts"),
        ({"gpu": "B200", "op": "gemm", "M": 8, "N": 8, "K": 8, "dtype": "fp64"}, ""),
    ):
        made = prediction_of(row(**cells))
        assert why in made.why and (made.expressible != bool(made.why)), (cells, made)
        assert (made.kind is None) == (not made.expressible)


def test_garbage_never_fails() -> None:
    """Cells of the shipped rows shuffled among columns, cut, doubled, and replaced."""
    rows, draw = read_rows(SHIPPED), random.Random(3)
    words = [cell for each in rows for cell in astuple(each)]
    words += ["0", "-3", "1e99", "inf", "nan", "²", "\u0664", "9" * 400, "1/0 of rows", "%s"]
    for _ in range(4000):
        cells = list(astuple(draw.choice(rows)))
        for _ in range(draw.randint(1, 4)):
            cells[draw.randrange(len(cells))] = draw.choice(words)[: draw.randint(1, 450)]
        made = prediction_of(Row(*cells))
        assert made.expressible or made.why
        assert made.error is None or made.error >= -1
        json.dumps(command.prediction_json(made))


def written(path: Path, lines: list[list[str]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(lines)
    return path


def test_the_command_prints_rows_reasons_and_a_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reordered = [*COLUMNS[::-1], "extra"]
    cells = row(what="nccl, 1 MiB"), row(gpu="abacus", what="nccl, 1 MiB")
    lines = [[*(getattr(each, name) for name in reordered[:-1]), "?"] for each in cells]
    file = written(tmp_path / "mine.csv", [reordered, *lines, ["short"]])
    assert cli.main(["published", str(file)]) == 0
    said = capsys.readouterr().out
    assert "all_reduce, 8 x H100: nccl, 1 MiB" in said
    assert "1  no preset for abacus" in said
    assert "absolute error, by half" in said and "held out, by op" in said
    assert cli.main(["published", str(file), "--json"]) == 0
    first, second, third = json.loads(capsys.readouterr().out)
    assert first["expressible"] and first["kind"] == "library" and first["why"] == ""
    assert first["error"] == pytest.approx(first["predicted"] / 100 - 1)
    assert not second["expressible"] and second["predicted"] is None
    assert third["why"] == "the value is no positive number: ''"
    assert set(COLUMNS) | {"predicted", "error", "kind", "expressible", "why"} <= set(first)


def test_a_file_that_is_none_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x01")
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "nul.csv").write_text(",".join(COLUMNS) + "\na\0b\n")
    written(tmp_path / "other.csv", [["a", "b"], ["1", "2"]])
    for name in ("missing.csv", "binary.csv", "empty.csv", "other.csv", "."):
        assert cli.main(["published", str(tmp_path / name)]) == 2, name
        said = capsys.readouterr()
        assert said.err.count("\n") == 1 and name.rstrip(".") in said.err and not said.out
    assert cli.main(["published", str(tmp_path / "nul.csv")]) in (0, 2)


def test_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.svg", "b.svg"):
        assert cli.main(["published", "--json", "--plot", str(tmp_path / name)]) == 0
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    assert "matmul_reduce_scatter, fused" in text
    page = tmp_path / "page.html"
    assert cli.main(["published", "--json", "--html", str(page)]) == 0
    report = page.read_text()
    assert report.count("<img") == 1 and "data:image/png" in report and "held out, by op" in report
    assert report.count("<td>us</td>") > 200
    capsys.readouterr()
    assert cli.main(["published", "--plot", str(tmp_path / "none" / "a.svg")]) == 2
    assert cli.main(["published", "--plot", str(tmp_path / "a.what")]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def shipped() -> list[Prediction]:
    return [prediction_of(each) for each in read_rows(SHIPPED)]


def test_the_shipped_rows_have_sources() -> None:
    rows = read_rows(SHIPPED)
    assert len(rows) == 339
    assert all(each.source.startswith("https://") for each in rows)
    assert all(each.published > 0 for each in rows)
    fitted = sum(each.is_fitted_on for each in rows)
    assert 0.4 < fitted / len(rows) < 0.6


@pytest.mark.parametrize(
    ("kind", "median", "ninth"), [("library", 0.08, 0.24), ("fused", 0.18, 0.4)]
)
def test_errors_on_the_half_that_was_not_fitted(kind: str, median: float, ninth: float) -> None:
    held = [e for e in shipped() if e.kind == kind and not e.row.is_fitted_on]
    errors = command.errors_of(held)
    assert errors.rows >= 40
    assert errors.median < median and errors.ninth < ninth


def test_deciles() -> None:
    made = [Prediction(row(value=100), "library", 100 + e) for e in range(1, 11)]
    errors = command.errors_of(made)
    assert errors.rows == 10 and errors.median == pytest.approx(0.05)
    assert errors.ninth == pytest.approx(0.09) and errors.worst == pytest.approx(0.1)


def test_the_page_is_of_these_rows() -> None:
    text = published_page.PAGE.read_text()
    assert published_page.prediction_tables(shipped()) in text
