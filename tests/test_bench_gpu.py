"""`make gpu` as far as it goes without a GPU: the skip, the plan, and all steps at tiny sizes."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from weft.bench import gpu, gpu_tests
from weft.bench.problem import Options, Spec
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


WHERE = {
    "gpus": [{"name": "G"}],
    "ranks": 2,
    "torch": "",
    "triton": "",
    "date": "",
    "commit": "",
    "device": "cuda",
    "quiet": True,
}


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(gpu, "environment", lambda *args: dict(WHERE))


def test_ranks_that_share_gpus_run_less(monkeypatch: pytest.MonkeyPatch, a_gpu: None) -> None:
    options = Options(device="cuda")
    shared = gpu.asked_of(gpu.ops_suite, 2, options)
    assert shared.gpus_shared and shared.rounds and {M for M, _, _ in shared.shapes} == {16, 2048}
    alone = gpu.asked_of(gpu.matmul_suite, 2, options)
    assert alone.rounds is None and not alone.shapes
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    own = gpu.asked_of(gpu.ops_suite, 2, options)
    assert not own.gpus_shared and own.rounds is None and len(own.shapes) == 8


@pytest.mark.parametrize("known", [True, False])
def test_gloo_does_not_look_for_the_hosts_name_in_vain(monkeypatch, known: bool) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")

    def found(*name: object) -> None:
        if not known:
            raise OSError

    monkeypatch.setattr(gpu.socket, "getaddrinfo", found)
    gpu._stay_on_this_host()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == (None if known else "lo")


def told(outcome: str) -> gpu_tests.Outcomes:
    outcomes = gpu_tests.Outcomes((2,), {2: ["a"]})
    outcomes.take(json.dumps({"ranks": 2, "test": "a", "outcome": outcome, "seconds": 1.0}))
    return outcomes


@pytest.mark.parametrize("outcome", ["passed", "failed"])
def test_what_is_wrong_fails_the_run_and_is_written(tmp_path, monkeypatch, a_gpu, outcome) -> None:
    """A kernel that auto avoids, or a test: figures are taken all the same."""
    right, wrong = Timing([1.0], [1.0]), Timing(failure="wrong: 7 times the tolerance")
    case = Case("ops", "x", {}, {"auto": right, "triton": wrong}, main="auto")

    def run(suites: object, options: object, *, on_case, **kwargs: object) -> list[Result]:
        if suites == [gpu.ops_suite]:
            on_case(case)
        return []

    monkeypatch.setattr(gpu.runner, "run", run)
    monkeypatch.setattr(gpu.gpu_tests, "run", lambda *args, **kwargs: told(outcome))
    page = tmp_path / "docs" / "gpu.md"
    arguments = ["--ranks", "2", "--results", str(tmp_path), "--page", str(page)]
    assert gpu.main(arguments) == 1
    text = page.read_text()
    assert f"Tests on this machine: {told(outcome)}." in text and f"1 {outcome}" in text
    assert "they take turns" in text and "no time of triton in x, 2 ranks: wrong: 7" in text
    assert (tmp_path / "some-gpu.json").exists()


def test_figures_end_in_time_and_go_on_where_they_were(tmp_path, monkeypatch, a_gpu) -> None:
    """Cases that are there are kept, those that were wrong or not reached are measured."""
    right, wrong = Timing([1.0], [1.0]), Timing(failure="RuntimeError: no")
    first_run, measured = True, []

    def run(suites, options, *, on_case, wanted, **kwargs: object) -> list[Result]:
        for name in ("a", "b", "c") if suites == [gpu.ops_suite] else ("m",):
            if not wanted(suites[0], Spec(name, {})):
                continue
            if first_run and (name, options.ranks) == ("c", 2):
                signal.pause()  # until time is up
            measured.append((suites[0].NAME, name, options.ranks))
            ours = wrong if first_run and name == "b" else right
            variants = {"auto": right, "triton": ours}
            on_case(Case(suites[0].NAME, name, {"ranks": options.ranks}, variants, main="auto"))
        return []

    monkeypatch.setattr(gpu.runner, "run", run)
    monkeypatch.setattr(gpu, "_MARGIN_S", 0)
    arguments = ["--no-tests", "--results", str(tmp_path), "--page", str(tmp_path / "gpu.md")]
    assert gpu.main([*arguments, "--minutes", "0.02"]) == 130
    there = Result.read(tmp_path / "some-gpu.json")
    assert there.interrupted and [case.name for case in there.cases] == [
        "m", "a, 2 ranks", "b, 2 ranks",
    ]  # fmt: skip
    first_run = False
    measured.clear()
    assert gpu.main([*arguments, "--resume"]) == 0
    there = Result.read(tmp_path / "some-gpu.json")
    assert not there.interrupted
    assert measured == [
        ("ops", "b", 2), ("ops", "c", 2), ("attention", "m", 2), ("ops", "a", 4), ("ops", "b", 4),
        ("ops", "c", 4), ("attention", "m", 4),
    ]  # fmt: skip
    assert sorted((case.suite, case.name) for case in there.cases) == [
        ("attention", "m, 2 ranks"), ("attention", "m, 4 ranks"), ("matmul", "m"),
        *[("ops", f"{name}, {ranks} ranks") for name in "abc" for ranks in (2, 4)],
    ]  # fmt: skip


@pytest.mark.parametrize("stopped", [False, True])
def test_tests_go_on_when_all_is_measured(tmp_path, monkeypatch, a_gpu, stopped: bool) -> None:
    """Not so after Ctrl-C."""
    runs = []

    def run_tests(*args: object, **kwargs: object) -> gpu_tests.Outcomes:
        runs.append(kwargs["until"])
        return gpu_tests.Outcomes((2,), {2: ["a"]}) if len(runs) == 1 else told("passed")

    def run(suites: object, options: object, **kwargs: object) -> list[Result]:
        return [Result("ops", dict(WHERE), interrupted=stopped)]

    monkeypatch.setattr(gpu.runner, "run", run)
    monkeypatch.setattr(gpu.gpu_tests, "run", run_tests)
    arguments = ["--ranks", "2", "--minutes", "100", "--results", str(tmp_path)]
    status = gpu.main([*arguments, "--page", str(tmp_path / "gpu.md")])
    assert (status, len(runs)) == ((130, 1) if stopped else (0, 2))
    assert runs == sorted(runs)  # the figures have the rest


SOME_TESTS = """
import os, pathlib, time, pytest
pytestmark = pytest.mark.gpu

def note(text):
    with open("ran", "a") as file:
        file.write(text + " ")

@pytest.mark.parametrize("engine", ["generic", "host", "triton"])
def test_engine(engine):
    note(engine)

def test_right(pytestconfig):
    note("right")
    assert not pytestconfig.pluginmanager.has_plugin("xdist")
    # Ended with the session, and as a group.
    assert os.getsid(0) == os.getsid(os.getppid()) and os.getpgid(0) != os.getpgid(os.getppid())

@pytest.mark.skip(reason="why not")
def test_skipped():
    pass

def test_wrong():
    assert pathlib.Path("mended").exists(), "as it was"

def test_long():
    while not pathlib.Path("mended").exists():
        time.sleep(0.05)
"""


def test_tests_are_kept_one_by_one_and_not_run_again(tmp_path, monkeypatch) -> None:
    """pytest is ended while a test hangs: what came before is there, and is left out next time."""
    (tmp_path / "test_some.py").write_text(SOME_TESTS)
    monkeypatch.setattr(gpu_tests, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_tests, "_FILES", ("test_some.py",))
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", f"{here}:{here.parent}")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p conftest -p no:cacheprovider")
    record, said = tmp_path / "gpu.tests.jsonl", list[str]()
    # Time is up once the test has failed after which comes one that has no end.
    clock = SimpleNamespace(sleep=time.sleep, monotonic=lambda: sum("as it was" in s for s in said))
    monkeypatch.setattr(gpu_tests, "time", clock)
    first = gpu_tests.run((3,), record, until=0.5, say=said.append)
    assert str(first) == "2 passed, 1 skipped, 1 failed, 3 not run" and first.wrong
    assert not first.finished and not first.broken
    assert gpu_tests.read(record, (3,)).found == first.found
    assert any(text.startswith("3 ranks: test_right: passed") for text in said)
    (tmp_path / "mended").touch()
    gone = {"ranks": 3, "test": "test_some.py::test_gone", "outcome": "passed", "seconds": 1.0}
    with open(record, "a") as file:
        file.write(json.dumps(gone) + "\n")
    again = gpu_tests.run((3,), record)
    assert str(again) == "6 passed, 1 skipped" and again.finished and not again.wrong
    assert (tmp_path / "ran").read_text() == "triton right host generic "
    (tmp_path / "test_some.py").write_text("nothing that Python knows")
    broken = gpu_tests.run((3,), record)
    assert broken.wrong and "SyntaxError" in broken.broken[0]
    assert gpu_tests.read(record, (5,)).found == {}
