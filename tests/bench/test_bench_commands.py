"""The commands of docs/bench.md as they stand there, and comparing, explaining and examining."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from needs import needs_interpreter
from test_hosts import QUICK, on_hosts

from weft import settings, versions
from weft.bench import cli, rows
from weft.bench.commands import across, doctor, explain, memory, modelled_launches, trial, tune
from weft.bench.report import compare
from weft.bench.rows import Case, Result, Timing
from weft.cli import main as weft
from weft.collectives import resolve
from weft.collectives.cost import Machine

ROOT = Path(__file__).resolve().parents[2]
DOCS = (ROOT / "docs" / "bench.md").read_text()
COMMANDS = re.findall(r"^weft (.*)$", DOCS, re.MULTILINE)


@pytest.mark.slow
def test_the_commands_of_the_docs_in_their_order(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "cache"))
    answers = {}
    for command in COMMANDS:
        assert weft(command.split()) == 0, command
        answers[command.split()[-1 if command == "doctor" else 1]] = capsys.readouterr().out
    assert list(answers) == ["ops", "explain", "calibrate", "compare", "doctor"]
    assert (tmp_path / "report" / "index.html").exists()
    text = answers["explain"]
    assert re.search(r"^host: .* us predicted, .* us measured", text, re.MULTILINE)
    assert re.search(r"^generic: .*MiB at .* GB/s", text, re.MULTILINE | re.DOTALL)
    assert "64 x 64 x 32 flop" in text or "of operands at" in text
    assert re.search(r"^bound: .* us measured \(arithmetic", text, re.MULTILINE)
    assert re.search(r"^auto took \w+: \d\.\d+ of the bound", text, re.MULTILINE)
    assert "matmul float32" in answers["calibrate"]
    kept = re.search(r"^kept in (.*)$", answers["calibrate"], re.MULTILINE)
    assert kept and json.loads(Path(kept[1]).read_text())["flops"]
    assert "(was " in answers["calibrate"]  # `explain` had to measure before
    assert re.search(r"^\d+ times compared, 0 changed", answers["compare"], re.MULTILINE)
    assert "all that weft needs is here" in answers["doctor"]
    for line in ("symmetric memory  posix, 2 ranks", "all_gather_matmul host: ", "engine host"):
        assert line in answers["doctor"]


def result(times: dict[str, Sequence[float]], bound: float = 1.0, **environment: Any) -> Result:
    case = Case("ops", "case", {"op": "x"}, main="auto", peer="gloo")
    for name, us in times.items():
        case.variants[name] = Timing(list(us), [sorted(us)[len(us) // 2]])
    rounds = len(next(iter(times.values())))
    case.bounds["memory"] = Timing([bound] * rounds, [bound])
    return Result("ops", {"cpu": "c", "cores": 2} | environment, [case])


STEADY = [10.0, 10.1, 9.9, 10.0, 10.2, 9.8, 10.0, 10.1, 9.9, 10.0]


def times(value: float) -> list[float]:
    return [us * value for us in STEADY]


@pytest.mark.parametrize(
    ("after", "most", "status", "told"),
    [
        ({"auto": times(1.0), "gloo": times(1.0)}, "10", 0, "2 times compared, 0 changed"),
        ({"auto": times(1.3), "gloo": times(1.0)}, "10", 1, "auto: +30%, allowed 10 %"),
        ({"auto": times(1.3), "gloo": times(1.0)}, "40", 0, "2 times compared, 1 changed"),
        ({"auto": times(0.5), "gloo": times(3.0)}, "10", 0, "2 times compared, 2 changed"),
        ({"auto": [5.0, 30.0] * 5, "gloo": times(1)}, "10", 0, "2 times compared, 0 changed"),
        ({"gloo": times(1)}, "10", 1, "lost: ops case, auto: was not run"),
    ],
)
def test_compare_fails_past_the_regression_allowed(
    after: dict[str, list[float]], most: str, status: int, told: str, tmp_path: Path, capsys: Any
) -> None:
    result({"auto": times(1.0), "gloo": times(1.0)}).write(tmp_path / "a.json")
    result(after).write(tmp_path / "b.json")
    given = [str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--max-regression", most]
    assert compare.main(given) == status
    assert told in capsys.readouterr().out


def test_compare_by_fraction_forgives_a_slower_machine() -> None:
    before, after = result({"auto": times(1.0)}, 5.0), result({"auto": times(2.0)}, 10.0)
    assert compare.compare([before], [after]).regressions(10)
    by_fraction = compare.compare([before], [after], "fraction")
    assert not by_fraction.regressions(10) and by_fraction.changes[0].ratio == pytest.approx(1)


def test_compare_tells_other_conditions_and_refuses_what_has_nothing_in_common(
    tmp_path: Path, capsys: Any
) -> None:
    result({"auto": times(1.0)}).write(tmp_path / "a.json")
    result({"auto": times(1.0)}, cores=64).write(tmp_path / "b.json")
    assert compare.main([str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    assert "cores was 2, is 64" in capsys.readouterr().out
    (tmp_path / "c.json").write_text("{}")
    with pytest.raises(SystemExit):
        compare.main([str(tmp_path / "a.json"), str(tmp_path / "c.json")])
    assert "not a result of this weft bench" in capsys.readouterr().err


def test_where_it_cannot_write_is_told_before_the_run(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").touch()
    for main, given in (
        (cli.main, ["ops", "--quick"]),
        (tune.main, ["--shapes", "8,8,8", "--device", "cpu"]),
        (memory.main, ["--tokens", "64"]),
    ):
        with pytest.raises(SystemExit):
            main([*given, "--out", str(tmp_path / "file")])
        assert "file: cannot write there, File exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("plan --plot nowhere/x.svg", "no folder 'nowhere' to write 'x.svg' to"),
        ("plan --plot x.foo", "must be .png, .svg, .pdf, .jpg, got 'x.foo'"),
        ("bench host --json /", "'/' is a folder: name a file in it"),
        ("bench never-slower --page nowhere.md", "nowhere.md: cannot be read, No such file"),
        ("bench never-slower --page README.md", "the page must hold <!-- never-slower -->"),
        ("bench never-slower --check nan", "--check must be above 0 and finite, got nan"),
        ("bench never-slower --check 0", "--check must be above 0 and finite, got 0"),
        ("aot --loop --page nowhere.md", "nowhere.md: cannot be read, No such file"),
    ],
)
def test_files_and_limits_are_checked_before_the_work(
    command: str, text: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as left:
        weft(command.split())
    assert left.value.code == 2 and text in capsys.readouterr().err


def test_explain_tells_what_could_not_be_timed() -> None:
    price = {"us": 5.0, "rule": "r", "parts": [["matmul", 5.0, "why"]]}
    sizes = {"op": "o", "M": 1, "N": 2, "K": 3, "dtype": "float32", "ranks": 2}
    case = Case("ops", "c", sizes | {"prices": {"host": price}})
    case.variants["host"] = Timing(failure="not here")
    case.variants["auto"] = Timing([2.0], [2.0], engine="host")
    text = explain.explanation(case)
    assert "host: 5 us predicted, no time: not here; r:" in text and "why" in text
    assert "auto took host" in text


def test_doctor_says_what_is_in_the_way(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    here = {"python": "3.11.7", "torch": "2.9.1+cpu", "triton": "3.7.1"}
    monkeypatch.setattr(versions, "installed_version", here.get)
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    assert "!! torch             2.9.1+cpu" in out and "weft needs 2.11 or later" in out
    assert "trial" not in out  # it would only fail
    del here["triton"]
    assert doctor.main([]) == 1
    assert "pip install triton" in capsys.readouterr().out
    here |= {"torch": "2.99.0", "triton": "3.7.1"}
    findings = {finding.what: finding for finding in doctor._versions()}
    assert findings["torch"].mark == "--" and "tested with 2.11 to 2.15" in findings["torch"].cure


def test_doctor_doubts_rates_that_cannot_be(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    good = Machine({"torch.float32": 4e4}, 1e4, 10.0, 1e3, 200.0)
    assert trial.doubt_of(good, 4e4) == trial.doubt_of(good, 1e4) == ""
    low = replace(good, flops={"torch.float32": 1e4})
    assert trial.doubt_of(low, 4e4) == "too low: a rank multiplies at 40 GFLOP/s now"
    assert "a load of 2.1 a core" in trial.doubt_of(replace(good, load=2.1), 4e4)
    assert "process group cannot" in trial.doubt_of(replace(good, copy=100.0), 4e4)


def test_doctor_tells_what_differs_between_ranks() -> None:
    same = {"weft": "1", "python": "3.11", "torch": "2.11"}
    (alike,) = across.differences([same] * 3)
    assert str(alike) == "ok ranks             3, with the same versions"
    others = [same, same | {"NCCL_DEBUG": "INFO"}, same, same | {"torch": "2.12"}, same]
    torch_differs, setting = across.differences(others)
    assert torch_differs.mark == "!!" and torch_differs.cure
    assert torch_differs.value == "2.11 on ranks 0-2 4; 2.12 on rank 3"
    assert setting.mark == "--" and setting.value == "not set on ranks 0 2-4; INFO on rank 1"


def hosts_body() -> list[str]:
    with on_hosts("ABB", replace(QUICK, between=[[0.0, 80.0], [90.0, 0.0]])):
        told = [across._mine("cpu")] * 3
        return [
            str(each) for each in across._host_findings(resolve(None), torch.device("cpu"), told)
        ]


def test_doctor_draws_the_hosts(ranks: Any) -> None:
    for lines in ranks(3, hosts_body):
        assert "host A: rank 0, " in lines[0] and "host B: ranks 1-2, " in lines[1]
        assert lines[2].endswith("MB/s from host 0  80 to 1, for each rank there")
        assert "latency           10 us; by a flat all-gather 1,000 us, 100 MB/s" in lines[-1]


def test_doctor_does_not_send_to_what_cannot_run(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(doctor, "_trial", lambda ranks: [])
    assert doctor.main([]) == 0
    assert "try `weft demo`" in capsys.readouterr().out
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert doctor.main([]) == 0
    said = capsys.readouterr().out
    assert "try" not in said and said.endswith("bench: pip install matplotlib pytest-benchmark "
                                               "rich pyyaml\n")  # fmt: skip


def test_doctor_knows_what_weft_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    read = [(ROOT / "weft" / "settings.py").read_text().split("VARIABLES = (")[1].split(")", 1)[1]]
    read.append((ROOT / "kernels" / "engine" / "tuning.py").read_text())
    assert set(re.findall(r'"(WEFT_\w+)"', "".join(read))) == set(settings.VARIABLES)
    for name in [name for name in os.environ if name.startswith("WEFT_")]:
        monkeypatch.delenv(name)
    assert [finding.mark for finding in doctor._settings()] == ["ok"]
    monkeypatch.setenv("WEFT_ENGIN", "host")
    monkeypatch.setenv("WEFT_TIMEOUT_S", "soon")
    told = [str(finding) for finding in doctor._settings()]
    assert told[0].startswith("-- WEFT_ENGIN") and "weft does not read it" in told[0]
    assert told[1].startswith("ok WEFT_TIMEOUT_S") and told[2].startswith("!! value")


def test_doctor_tells_of_a_trial_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    from weft import launch

    def fail(*args: Any, **options: Any) -> None:
        raise launch.RankError("rank 1 failed:\nRuntimeError: planted")

    monkeypatch.setattr(launch, "launch", fail)
    (finding,) = doctor._trial(2)
    assert finding.mark == "!!" and finding.value == "RuntimeError: planted"


def test_geometric_mean_treats_twice_and_half_alike() -> None:
    assert rows.geometric_mean([0.5, 2.0]) == pytest.approx(1)


@pytest.mark.slow
def test_plan_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from weft.bench.commands import plan

    options = ["--mesh", "2x4", "--hardware", "h100", "--layers", "2", "--tokens", "512"]
    picture = tmp_path / "plan.svg"
    assert plan.main([*options, "--memory", "80GB", "--plot", str(picture)]) == 0
    told = capsys.readouterr().out
    assert told.startswith("plan for a mesh of 2x4, by rates of H100, 80 GB a rank")
    assert all(name in told for name in ("Megatron", "torch default", "FSDP alone"))
    assert "ms of a step" in picture.read_text() or picture.stat().st_size > 10_000
    assert plan.main([*options, "--model", "mixtral", "--batch", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    others = [each["step_us"] for each in found["beside"].values() if isinstance(each, dict)]
    assert found["step_us"] <= min(others) and found["rows"] and found["placements"]
    assert plan.main([*options, "--memory", "10MB"]) == 1
    assert "fits 10 MB a rank: the least is" in capsys.readouterr().err
    own = tmp_path / "own.py"
    own.write_text(
        "import torch\ndef example():\n    return torch.nn.Linear(64, 64), torch.zeros(8, 64)\n"
    )
    assert plan.main(["--model", f"{own}:example", "--mesh", "4"]) == 0
    assert "plan for a mesh of 4, by rates of cpu" in capsys.readouterr().out
    assert plan.main(["--model", f"{own}:other"]) == 1
    assert "the file has no other" in capsys.readouterr().err


@needs_interpreter
def test_tune_for_chips_that_are_not_at_hand(tmp_path: Path, capsys: Any) -> None:
    given = ["--ranks", "2", "--ops", "matmul_reduce_scatter", "--out", str(tmp_path)]
    command = ["--hardware", "h100,h200", *given, "--shapes"]
    times = {None: [10.0, 10.0], (128, 256): [8.0, 9.6], (128, 128): [9.0, 9.0]}

    def played(op: str, shape: Any, ranks: int, machines: Any, choice: Any) -> list[float]:
        tiling = choice.tiling
        return times.get(tiling and (tiling.block_m, tiling.block_n), [11.0, 11.0])

    # On H200 the wider tiles gain less than 5 %.
    with (
        patch.object(modelled_launches, "_played", played),
        patch.object(modelled_launches, "_PLAYED", 100),
    ):
        assert tune.main([*command, "4096,8192,8192"]) == 0
    assert "10.0 -> 9.0 us, 10.0 -> 9.0 us" in capsys.readouterr().out
    (entry,) = json.loads((tmp_path / "sm_90.modelled.json").read_text())["entries"]
    assert entry["modelled"] == ["H100", "H200"] and (entry["us"], entry["M"]) == (9.0, 4096)
    tiling = entry["choice"]["tiling"]
    assert (tiling["block_m"], tiling["block_n"]) == (128, 128)
    # Played for real, a layer of one tile.
    assert tune.main([*command, "32,64,64"]) == 0
    assert re.search(r"32x64x64: (the heuristic|[\d.]+ -> [\d.]+ us)", capsys.readouterr().out)
    with pytest.raises(SystemExit):
        tune.main(["--hardware", "h100,b200", *given, "--shapes", "32,64,64"])
    assert "a table is of one chip" in capsys.readouterr().err
