"""`weft bench host`: what the host takes, on a driver that does nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.bench.host import command, driver


@pytest.mark.slow
def test_calls_and_their_launches(tmp_path: Path) -> None:
    file = tmp_path / "host.json"
    assert command.main(["--filter", "all_gather", "--rounds", "1", "--json", str(file)]) == 0
    rows = {row["name"]: row for row in json.loads(file.read_text())["calls"]}
    for row in rows.values():
        assert 0 < row["launching"] < row["total"]
        assert row["own"] == row["total"] - row["launching"]
    assert rows["all_gather"]["launches"] == 1 and rows["all_gather"]["peer"] > 0
    # Seven shards are copied, and announced by words; three streams are held, and the call begins,
    # multiplies, and ends.
    assert rows["all_gather_matmul, 8192 tokens"]["launches"] == 7 + 7 + 3 + 3


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
