"""`weft bench host`: what the host takes, on a driver that does nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.bench.host import command, driver


def test_a_call_and_its_launches(tmp_path: Path) -> None:
    file = tmp_path / "host.json"
    assert command.main(["--filter", "all_reduce", "--rounds", "1", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    (row,) = [row for row in found["calls"] if row["name"] == "all_reduce"]
    assert row["launches"] == 1 and 0 < row["launching"] < row["total"]
    assert row["own"] == row["total"] - row["launching"] and row["peer"] > 0


def test_what_is_missing_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        command.main(["--filter", "nothing"])
    assert left.value.code == 2 and "there are all_gather_matmul" in capfd.readouterr().err
    monkeypatch.setattr(driver.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit) as left:
        command.main([])
    assert left.value.code == 2 and "no C compiler" in capfd.readouterr().err
