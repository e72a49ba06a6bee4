"""`weft bench host`: what the host takes, on a driver that does nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.bench.host import command, driver


@pytest.mark.slow
def test_a_call_and_its_launches(tmp_path: Path) -> None:
    file = tmp_path / "host.json"
    assert command.main(["--filter", "all_reduce", "--rounds", "1", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    (row,) = [row for row in found["calls"] if row["name"] == "all_reduce"]
    assert row["launches"] == 1 and 0 < row["launching"] < row["total"]
    assert row["own"] == row["total"] - row["launching"] and row["peer"] > 0


def test_a_shard_is_copied_at_a_time_where_the_host_enqueues(tmp_path: Path) -> None:
    file = tmp_path / "host.json"
    given = ["--filter", "all_gather_matmul, 8192", "--rounds", "1", "--json", str(file)]
    assert command.main(given) == 0
    (row,) = json.loads(file.read_text())["calls"]
    # Seven shards are copied, and announced by words; three streams are held, and the call begins,
    # multiplies, and ends.
    assert row["launches"] == 7 + 7 + 3 + 3


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
