"""`make gpu` as far as it goes without a GPU: the skip, the plan, and all steps at tiny sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from weft.bench import gpu
from weft.bench.rows import Case, Result, Timing


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path, capsys) -> None:
    assert gpu.main(["--results", str(tmp_path), "--page", str(tmp_path / "gpu.md")]) == 0
    assert "no GPU here" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_ranks_and_names() -> None:
    assert [gpu.rank_counts(n) for n in (1, 2, 6, 8)] == [(2, 4), (2,), (2, 4, 6), (2, 4, 8)]
    assert gpu.slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"
    with pytest.raises(SystemExit):
        gpu.main(["--device", "cpu", "--ranks", "1"])


def test_every_step_at_tiny_sizes(tmp_path: Path, capsys) -> None:
    arguments = ["--results", str(tmp_path), "--page", str(tmp_path / "gpu.md")]
    assert gpu.main(["--device", "cpu", "--quick", "--ranks", "2", *arguments]) == 0
    result = Result.read(tmp_path / "cpu.json")
    assert {case.suite for case in result.cases} == {"matmul", "ops", "attention"}
    for case in result.cases:
        assert case.main in case.timed, case
        assert case.name.endswith("2 ranks") == (case.suite != "matmul")
    assert json.loads((tmp_path / "cpu.json").read_text())["environment"]["ranks"] == 2
    page = (tmp_path / "gpu.md").read_text()
    for case in result.cases:
        assert f"| {case.name} | " in page
    assert "TFLOP/s" in page and "NotImplementedError" in page
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(result.cases)
    assert all(case.name in line for case, line in zip(result.cases, lines[1:], strict=True))


@pytest.mark.parametrize("status", [0, 3])
def test_what_is_wrong_fails_the_run_and_is_written(tmp_path, monkeypatch, status: int) -> None:
    """A kernel that auto avoids, or a test: figures are taken all the same."""
    right, wrong = Timing([1.0], [1.0]), Timing(failure="wrong: 7 times the tolerance")
    case = Case("ops", "x", {}, {"auto": right, "triton": wrong}, main="auto")
    where = {
        "gpus": [{"name": "G"}],
        "ranks": 2,
        "torch": "",
        "triton": "",
        "date": "",
        "commit": "",
    }
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")

    def measured(options: object, counts: object, command: str, on_case) -> Result:
        result = Result("gpu", where, [case])
        on_case(result)
        return result

    monkeypatch.setattr(gpu, "measure", measured)
    monkeypatch.setattr(gpu, "run_tests", lambda counts: status)
    page = tmp_path / "docs" / "gpu.md"
    arguments = ["--ranks", "2", "--results", str(tmp_path), "--page", str(page)]
    assert gpu.main(arguments) == (status or 1)
    assert f"Tests on this machine: {'failed' if status else 'passed'}." in page.read_text()
    assert (tmp_path / "some-gpu.json").exists()
    assert "they take turns" in page.read_text() and "- triton: wrong: 7" in page.read_text()
