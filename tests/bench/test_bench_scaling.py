"""The scaling page: rows from small runs, kept and taken up again, beside others' figures."""

from __future__ import annotations

from pathlib import Path

import pytest
from needs import needs_interpreter

from tools import scaling_page, scaling_tables
from weft.bench.report import plots
from weft.bench.rows import Case, Result, Timing
from weft.bench.shapes import Model

pytestmark = needs_interpreter
ROOT = Path(__file__).resolve().parents[2]


def test_rows_are_kept_and_become_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling_page, "MODELS", {"toy": Model("toy", 256, 512, 2, 2, 128)})
    kept, page = tmp_path / "scaling.json", tmp_path / "page.md"
    marks = "<!-- overlap -->\n<!-- /overlap -->\n<!-- scaling -->\nold\n<!-- /scaling -->"
    page.write_text(f"before\n{marks}\nafter\n")
    command = ["--ops", "all_gather_matmul", "--rows", "64", "--ranks", "2", "--keep", str(kept)]
    command += ["--hardware", "h100,h200"]
    assert scaling_page.main([*command, "--page", str(page)]) == 0
    rows = scaling_page.read_rows_of(kept)
    assert {row.hardware for row in rows} == {"H100", "H200"}
    for row in rows:
        assert row.sizes == (64, 256, 256)
        assert row.slower_stores_us > row.us > row.arithmetic_us > 0
        assert row.us > scaling_tables.link_us(row) > 0
    text = page.read_text()
    assert "old" not in text and text.startswith("before") and text.endswith("after\n")
    assert "### all_gather_matmul, 2 x H200" in text and "| toy | 64 | " in text

    def never(*_: object) -> None:
        raise AssertionError("the row is there already")

    monkeypatch.setattr(scaling_page, "played_rows", never)
    assert scaling_page.main(command) == 0


def test_the_same_problems_measured_by_others() -> None:
    """A library's beside the library's model, a fused one on the same chip beside the page's."""
    rows = scaling_page.read_rows_of(scaling_page.KEPT)
    found = scaling_page.others_measured(rows)
    assert len([each for each in found if each.kind == "library"]) >= 12

    def flux() -> scaling_tables.Measured:
        found = scaling_page.others_measured(rows)
        return next(e for e in found if e.row.what == "flux fused" and e.row.M == "1024")

    same = next(r for r in rows if r.hardware == "H100" and r.sizes == (1024, 8192, 3584))
    assert flux().us == same.us
    rows.remove(same)
    assert 0 < flux().us != same.us  # the closed form's


def test_the_best_library_has_the_chip_that_the_kernel_has() -> None:
    sizes = {"ranks": 8, "M": 512, "us": 0, "arithmetic_us": 0, "exposed_us": 0}
    row = scaling_page.PlayedProblem(
        "H100", "matmul_all_reduce", "Llama-3 70B", **sizes, link_bytes=0, slower_stores_us=0
    )
    by, us = scaling_tables.best_library(row)
    # Two waves of half tiles at all that is sustained, 8 MiB by the switch at 0.6 of its port.
    assert by == "NVLS"
    assert us == pytest.approx(81.3, abs=0.1)


def test_the_page_is_made_of_the_kept_rows() -> None:
    text = (ROOT / "docs" / "scaling.md").read_text()
    rows = scaling_page.read_rows_of(scaling_page.KEPT)
    assert rows, "python -m tools.scaling_page --page docs/scaling.md makes them"
    assert scaling_tables.tables_by_hardware(rows) in text
    assert scaling_tables.overlap_table(rows) in text


def test_a_report_draws_a_layer_with_its_exposed_communication(tmp_path: Path) -> None:
    def case(triton: bool, W: int = 2) -> Case:
        params = {"op": "all_gather_matmul", "M": 64, "N": 64, "K": 64, "chip": "h100"}
        names = ("host", "generic", "triton")[: 2 + triton]
        timed = {name: Timing([1.0], [1.0]) for name in names}
        return Case("scaling", f"W={W}", params | {"world_size": W}, timed)

    assert plots.draw_result(Result("scaling", {}, [case(False)]), tmp_path) == [
        tmp_path / "scaling-bars.png"
    ]
    drawn = plots.draw_result(Result("scaling", {}, [case(False), case(True)]), tmp_path)
    assert [path.name for path in drawn] == ["scaling-timeline.png", "scaling-bars.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    assert plots.CAPTIONS["timeline"].startswith("A feed-forward layer")
