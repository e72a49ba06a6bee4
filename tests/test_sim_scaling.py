"""The scaling page: rows from small runs, kept and taken up again, and the model's error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from needs import needs_interpreter

from weft.sim import scaling
from weft.sim.hardware import H100

pytestmark = needs_interpreter
ROOT = Path(__file__).resolve().parent.parent


def test_rows_are_kept_and_become_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "MODELS", {"toy": (256, 512)})
    monkeypatch.setattr(scaling, "_MEASURED_US", {(4096, 1792, 4096): 230})
    kept, page = tmp_path / "scaling.json", tmp_path / "page.md"
    page.write_text("before\n<!-- scaling -->\nold\n<!-- /scaling -->\nafter\n")
    command = ["--ops", "all_gather_matmul", "--rows", "64", "--ranks", "2", "--keep", str(kept)]
    assert scaling.main([*command, "--page", str(page)]) == 0
    rows = scaling.load(kept)
    assert {row.hardware for row in rows} == {"H100", "H200"}
    for row in rows:
        assert (row.M, row.N, row.K) == (64, 256, 256)
        assert row.auto in row.engines and row.regret >= 1
        assert row.fused["makespan_us"] == row.engines["triton"] >= row.fused["bound_us"]
    text = page.read_text()
    assert "old" not in text and text.startswith("before") and text.endswith("after\n")
    assert "### all_gather_matmul, 2 x H200" in text and "| toy | 64 | 256 | 256 |" in text
    assert "quickest engine: toy" in text and "all-gather, then matmul 4096 x 1792 x 4096" in text

    def never(*_: object) -> None:
        raise AssertionError("the row is there already")

    monkeypatch.setattr(scaling, "measure", never)
    assert scaling.main(command) == 0


def test_the_model_is_near_public_measurements(tmp_path: Path) -> None:
    case = {
        "params": {"op": "all_gather_matmul", "M": 4096, "N": 1792, "K": 4096, "ranks": 8},
        "variants": {"weft generic": {"ranks_us": [200.0, 210.0]}},
    }
    (tmp_path / "h100.json").write_text(json.dumps({"cases": [case]}))
    rows = scaling.against_measurements(tmp_path)
    assert len(rows) == len(scaling._MEASURED_US) + 1
    assert rows[-1][1] == 210.0 and "8 x H100" in rows[-1][0]
    errors = [modelled / measured - 1 for _, measured, modelled in rows[:-1]]
    assert max(map(abs, errors)) < 0.05


def test_the_choice_is_told_without_a_run() -> None:
    assert scaling.chosen("matmul_reduce_scatter", 8192, 8192, 3584, 8, H100) in scaling._ENGINES


def test_the_page_is_made_of_the_kept_rows() -> None:
    kept = ROOT / "bench" / "results" / "scaling_page.json"
    text = (ROOT / "docs" / "scaling.md").read_text()
    rows = scaling.load(kept)
    assert rows, "python -m weft.sim.scaling --page docs/scaling.md makes them"
    assert scaling.page.tables(rows) in text
