"""What `auto` takes, beside the best that the model knows of: `weft bench never-slower`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.bench.published import never_slower
from weft.collectives.prices.hardware import named
from weft.kernels.engine import tuning

# The most of the better engine's time: sums decide without K.
LIMITS = {"h100": 1.09, "mi300x": 1.01}


@pytest.mark.parametrize("chip", ["h100", "mi300x"])
def test_auto_takes_the_quicker_engine(chip: str) -> None:
    slower = []
    grid = never_slower.compared(tuning.OPS, [chip], [2, 8], ["llama-3-8b", "llama-3-405b"])
    for each in grid:
        us = never_slower.fused_choice(each.op, each.M, each.N, each.K, named(chip), each.ranks)[1]
        assert each.ratio >= 1 and us[each.best] == each.best_us
        slower.append(us[each.auto] / min(us["triton"], us["generic"]))
    assert len(slower) == 180
    assert max(slower) < LIMITS[chip]
    assert max(slower[: len(slower) // 3]) == 1  # of gathers, whose ranks tell their columns
    assert sum(ratio > 1.05 for ratio in slower) <= len(slower) // 60


def test_the_command(capsys: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- never-slower -->\n<!-- /never-slower -->\n")
    assert never_slower.main(["--ops", "all_gather", "--json", "--page", str(page)]) == 0
    assert "| all_gather | MI300X |" in page.read_text()
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 4 * 3 * 4 * 15 and rows[0]["asked"]["ratio"] >= 1
    worst = max(row["ratio"] for row in rows)
    assert worst == max(row["auto_us"] / row["best_us"] for row in rows)
    assert never_slower.main(["--ops", "all_gather", "--check", str(worst + 0.01)]) == 0
    assert "| all_gather |" in capsys.readouterr().out
    assert never_slower.main(["--ops", "all_gather", "--check", str(worst - 0.01)]) == 1
    assert f"auto takes up to {worst:.2f} of the best" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        never_slower.main(["--ops", "matmul"])


def test_the_page_has_the_table_of_today() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "scaling.md").read_text()
    for op, chip in (("matmul_all_reduce", "h200"), ("ring_attention", "mi300x")):
        assert never_slower.choice_lines(list(never_slower.compared([op], [chip])))[-1] in page
