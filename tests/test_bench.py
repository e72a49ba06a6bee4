"""Every suite of `weft bench` runs, checks its results, and writes files that can be read back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def weft(*args: str) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "weft", *args], cwd=ROOT, capture_output=True, text=True, timeout=180
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize(
    ("suite", "options", "variants"),
    [
        ("mlp", ["--shapes", "24,16,32", "6,8,4"], {"arithmetic", "weft", "torch DTensor"}),
        ("collectives", ["--quick"], {"weft", "gloo", "copy"}),
        ("dispatch", [], {"weft", "torch"}),
    ],
)
def test_suite(suite: str, options: list[str], variants: set[str], tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    text = weft("bench", suite, "--rounds", "2", *options, "--out", str(out))
    assert f"weft bench {suite}" in text
    content = json.loads(out.read_text())
    assert content["suite"] == suite and content["environment"]["torch"]
    assert content["cases"]
    for case in content["cases"]:
        assert variants <= set(case["us"])
        assert all(us > 0 for us in case["us"].values())
        assert case["ratios"]


def test_help_teaches() -> None:
    assert "examples:" in weft("bench", "--help")
    run = subprocess.run(
        [sys.executable, "-m", "weft", "bench", "mlp", "--shapes", "1,2"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 2 and "a shape is tokens,hidden,ffn" in run.stderr
