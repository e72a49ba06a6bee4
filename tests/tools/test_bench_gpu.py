"""`make gpu` as far as it goes without a GPU: its plan, its record, and each step interpreted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from needs import needs_interpreter
from rank_pool import PRELOADED
from triton.runtime.jit import JITFunction

from tools.gpu import __main__ as gpu
from tools.gpu import cases as gpu_cases
from tools.gpu import page as gpu_page
from tools.gpu import process as gpu_process
from tools.gpu import report as gpu_report
from tools.gpu import steps as gpu_steps
from tools.gpu.steps import STEPS
from weft.bench.rows import Case, Result, Timing
from weft.bench.solo import sweep

RUN = {"sources": "s", "cache": "c", "chip": "some-chip"}
QUICK = ["--device", "cpu", "--quick"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tools.gpu", *arguments]


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "outcomes.jsonl").read_text().splitlines()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path, capsys) -> None:
    assert gpu.main(["--out", str(tmp_path / "new")]) == 0
    assert "no GPU here" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_steps_come_in_their_order_with_minutes_of_their_own(capsys) -> None:
    assert gpu.main(["--list", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    found = [line.partition(":")[0] for line in said.splitlines() if not line.startswith(" ")]
    assert [each for each in found if each] == [
        "compile", "proof", "plain", "solo", "threads", "processes", "tune", "ranks",
    ]  # fmt: skip
    assert sum(step.minutes for step in STEPS.values() if step.name != "ranks") <= 28
    assert gpu_steps.names("proof", "cuda", quick=False)[-1] == "doctor"
    assert gpu_steps.case_s("threads", "sanitizer", "cuda") == 150
    assert gpu_steps.case_s("proof", "doctor", "cuda") == 100
    assert [gpu_steps.rank_counts(n) for n in (0, 1, 2, 6, 8)] == [
        (), (), (2,), (2, 4, 6), (2, 4, 8),
    ]  # fmt: skip
    assert not gpu_steps.names("ranks", "cpu", quick=False)


def test_cases_are_chosen_by_name_or_by_a_part_of_it() -> None:
    cases = {"proof": ["W4/plain/norm", "W4/plain/decode"], "threads": ["W2/late/norm"]}
    assert gpu._chosen(None, cases) == cases
    assert gpu._chosen(["W4/plain/norm"], cases) == {"proof": ["W4/plain/norm"], "threads": []}
    assert gpu._chosen(["norm"], cases) == {"proof": ["W4/plain/norm"], "threads": ["W2/late/norm"]}
    compiled = {"compile": ["proof", "threads", "solo"]}
    assert gpu._chosen(["norm"], compiled | cases)["compile"] == ["proof", "threads"]
    assert gpu._chosen(["W2/late/norm"], compiled | cases)["compile"] == ["threads"]


def outcomes(*entries: dict[str, Any]) -> gpu.Outcomes:
    found = gpu.Outcomes()
    for entry in ({"run": RUN}, *entries):
        found.take(entry)
    return found


@pytest.mark.parametrize(
    "outcome, step, run, settled",
    [
        ("passed", "proof", {"sources": "other"}, True),
        ("skipped", "proof", {"sources": "other"}, True),
        ("cut", "proof", {}, False),
        ("failed", "proof", {}, True),
        ("failed", "proof", {"sources": "other"}, False),
        ("passed", "compile", {}, True),
        ("passed", "compile", {"cache": "of another machine"}, False),
        ("passed", "solo", {"sources": "other"}, True),
        ("passed", "solo", {"chip": "another"}, False),
        ("failed", "solo", {}, True),
        ("passed", "proof", {"chip": "another"}, True),
    ],
)
def test_what_is_run_again(outcome: str, step: str, run: dict[str, str], settled: bool) -> None:
    """What was cut; what has failed, of other sources; what is compiled, on other machines."""
    found = outcomes(
        {"step": step, "case": "a", "begun": 1.0},
        {"step": step, "case": "a", "outcome": outcome, "seconds": 1.0, "why": ""},
    )
    assert found.settled(step, "a", RUN | run) is settled
    assert not found.settled(step, "b", RUN) and not found.begun


def test_minutes_are_of_all_slices_together() -> None:
    """And what was under way when a run was killed comes last, as it may hang."""
    found = outcomes(
        {"step": "solo", "case": "a", "outcome": "passed", "seconds": 40.0, "why": ""},
        {"step": "solo", "case": "b", "begun": 1.0},
        {"run": RUN},
        {"step": "solo", "case": "a", "outcome": "failed", "seconds": 20.0, "why": ""},
        {"run": RUN | {"chip": "another"}},
        {"step": "solo", "case": "a", "outcome": "passed", "seconds": 5.0, "why": ""},
    )
    assert found.spent == {("solo", "some-chip"): 60.0, ("solo", "another"): 5.0}
    assert found.unended == {("solo", "b")} and not found.begun


def test_sources_are_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of any kernel has failures run again."""
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    path = tmp_path / "kernels" / "norm" / "rms_norm.py"
    path.parent.mkdir(parents=True)
    path.write_text("x = 1")
    before = gpu.sources()
    path.write_text("x = 2")
    assert gpu.sources() != before


@pytest.mark.slow
def test_a_process_counts_from_its_start() -> None:
    code = """
import time
time.sleep(1)
from tools.gpu import __main__ as gpu
print(time.monotonic() - gpu._started())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 1 < float(run.stdout) < 120


def test_a_page_that_cannot_be_made_does_not_end_the_run(tmp_path, monkeypatch) -> None:
    this = gpu.Slice(
        tmp_path, "cpu", True, time.monotonic() + 60, gpu.Log(tmp_path / "log.txt", 0.0),
        {"plain": gpu_steps.names("plain", "cpu", True)}, False,
    )  # fmt: skip
    with open(this.record, "ab") as file:
        file.write(b"no line\n" + json.dumps(
            {"step": "proof", "case": "doctor", "outcome": "passed", "seconds": 1.0, "why": ""}
        ).encode() + b"\n")  # fmt: skip
    monkeypatch.setattr(gpu_page, "write_gpu_page", lambda *args: {}["a bug"])
    this._hear()
    this.write()
    assert this.outcomes.count("passed") == 1
    log = (tmp_path / "log.txt").read_text()
    assert "not a line: no line" in log and "no page" in log and "a bug" in log


def test_a_case_that_had_no_time_has_not_failed(tmp_path: Path) -> None:
    """Not even if the time was over before the first one."""
    for until in (1.0, 7.0):
        folder = tmp_path / str(until)
        folder.mkdir()
        this = gpu.Slice(
            folder, "cpu", True, time.monotonic() + 300, gpu.Log(folder / "log.txt", 0.0),
            {"plain": gpu_steps.names("plain", "cpu", True)}, False,
        )  # fmt: skip
        assert this._process("plain", this.left("plain"), time.monotonic() + until) <= 0
        assert not this.outcomes.count("failed")


def test_figures_are_of_one_chip_and_parts_stand_beside_the_whole(tmp_path: Path) -> None:
    def entry(name: str, chip: str, **times: float) -> dict[str, Any]:
        variants = {each: Timing([us], [us]) for each, us in times.items()}
        row = Case("solo", name, {"op": "norm", "ranks": 2}, variants, main="weft").as_dict()
        return {"outcome": "passed", "seconds": 1.0, "why": "", "row": row, "chip": chip}

    run = gpu_page.where("cpu") | {"chip": "h100"}
    found = {
        ("solo", "norm a"): entry("norm a", "h100", weft=5.0),
        ("solo", "norm a, without waits"): entry("norm a", "h100", **{"without waits": 4.0}),
        ("solo", "norm b"): entry("norm b", "h200", weft=3.0),
    }
    gpu_page.write_gpu_page(tmp_path, [run], found)
    (case,) = Result.read(tmp_path / "solo.json").cases
    assert case.name == "norm a" and set(case.timed) == {"weft", "without waits"}
    assert "norm b" not in (tmp_path / "page.md").read_text()


def test_attention_is_beside_the_quickest_library_and_each_figure_names_its_commit(
    tmp_path: Path,
) -> None:
    """A bound that the library is far from is left out; what is published needs no GPU."""
    times = {
        name: Timing([us], [us]) for name, us in (("weft", 8.0), ("flash", 6.0), ("cuDNN", 4.0))
    }
    attention = Case("local attention", "attention a", {}, times, main="weft", peer="flash")
    near, far = (
        Case(
            "matmul", name, {}, {each: Timing([5.0], [5.0]) for each in ("weft", "torch.mm")},
            {"memory": Timing([us], [us])}, main="weft", peer="torch.mm",
        )
        for name, us in (("matmul near", 4.0), ("matmul far", 1.0))
    )  # fmt: skip
    run = gpu_page.where("cpu") | {"chip": "h100", "cache": "c"}
    record = [{"run": run | {"commit": "aaa", "sources": "1"}}]
    record += [outcome("plain", case.name, row=case.as_dict()) for case in (attention, near, far)]
    record += [{"run": run | {"commit": "bbb", "sources": "2"}}, outcome("proof", "W4/plain/norm")]
    record += [outcome("plain", "attention a", row=attention.as_dict())]
    (tmp_path / "outcomes.jsonl").write_text("".join(f"{json.dumps(e)}\n" for e in record))
    found = gpu.read_record(tmp_path / "outcomes.jsonl")
    gpu_page.write_gpu_page(tmp_path, found.runs, found.found)
    kept = {case.name: case for case in Result.read(tmp_path / "figures.json").cases}
    assert kept["attention a"].peer == "cuDNN" and kept["attention a"].gain.median == 0.5
    assert kept["matmul near"].bound_us == 4.0 and kept["matmul far"].bound_us is None
    page = (tmp_path / "page.md").read_text()
    assert "- proof W4/plain, commit bbb: norm\n" in page
    assert "- bbb: attention a\n- aaa: matmul near, matmul far\n" in page
    for folder in ("bench/results", "docs", "kernels"):
        (tmp_path / "root" / folder).mkdir(parents=True)
    gpu_page.publish_results(tmp_path, tmp_path / "root")
    assert (tmp_path / "root" / "docs" / "gpu.md").read_text() == page


def outcome(step: str, case: str, **more: Any) -> dict[str, Any]:
    return {"step": step, "case": case, "outcome": "passed", "seconds": 1.0, "why": ""} | more


def test_ranks_are_late_before_each_launch(tmp_path, monkeypatch) -> None:
    """But not where what the host takes is measured, or kernels are compiled."""
    made: list[str] = []
    monkeypatch.setattr(JITFunction, "run", lambda *args, **options: made.append("launch"))
    monkeypatch.setattr(gpu_cases._here, "late", lambda: made.append("late"), raising=False)
    launches = gpu_report.LastLaunches(tmp_path)
    with launches.noting(lambda: 0, gpu_cases.be_late):
        JITFunction.run(SimpleNamespace(__name__="_a_kernel"), grid=(2,), warmup=False)
        with launches.unnoted():
            JITFunction.run(SimpleNamespace(__name__="_b_kernel"), grid=(2,), warmup=False)
        JITFunction.run(SimpleNamespace(__name__="_c_kernel"), grid=(2,), warmup=True)
    assert made == ["late", "launch", "launch", "launch"]
    assert launches.read() == ["rank 0: _a_kernel[2]"]


@pytest.mark.slow
def test_a_process_that_does_not_end_itself_is_ended(tmp_path, monkeypatch) -> None:
    """As where the driver holds it; what it was at has failed."""
    code = """
import json, sys, time
from tools.gpu import report as gpu_report, steps as gpu_steps
report = gpu_report.GpuReport(gpu_steps.StepPlan(**json.loads(sys.argv[-1])))
report.begin("doctor")
time.sleep(600)
"""
    popen = subprocess.Popen
    monkeypatch.setattr(
        gpu.subprocess, "Popen",
        lambda given, **more: popen([sys.executable, "-c", code, given[-1]], **more),
    )  # fmt: skip
    monkeypatch.setattr(gpu_steps, "case_s", lambda step, case, device: 0.5)
    monkeypatch.setattr(gpu, "_EXIT_S", 0.5)
    this = gpu.Slice(
        tmp_path, "cpu", True, time.monotonic() + 300, gpu.Log(tmp_path / "log.txt", 0.0),
        {"proof": ["doctor"]}, False,
    )  # fmt: skip
    this.go(["proof"])
    assert this.outcomes.found["proof", "doctor"]["outcome"] == "failed"
    assert "SIGKILL" in this.outcomes.found["proof", "doctor"]["why"]


@pytest.mark.slow
def test_a_case_that_hangs_is_ended_and_the_next_process_goes_on(tmp_path: Path) -> None:
    """Though Python hears no signal, as while it waits for a GPU."""
    code = """
import sys, threading, time
from tools.gpu import report as gpu_report, steps as gpu_steps
plan = gpu_steps.StepPlan("solo", (), sys.argv[1], sys.argv[1], "cpu", True, time.time() + 60)
report = gpu_report.GpuReport(plan)
with report.case("a", 0.5):
    report.launches.note(1, "_some_kernel[8] W=2")
    threading.Event().wait()
"""
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)])
    assert run.returncode == gpu_report.FAILED
    begun, ended = lines(tmp_path)
    assert "begun" in begun and ended["outcome"] == "failed" and "no end within" in ended["why"]
    assert ended["launches"] == ["rank 1: _some_kernel[8] W=2"]
    # If the step's time ends first, that is no failure.
    (tmp_path / "outcomes.jsonl").unlink()
    code = code.replace("time.time() + 60", "time.time() + 1").replace('"a", 0.5', '"a", 60')
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == 0
    assert [entry.get("outcome") for entry in lines(tmp_path)] == [None, "cut"]


def test_half_a_line_is_no_outcome(tmp_path: Path) -> None:
    record = tmp_path / "outcomes.jsonl"
    whole = {"step": "proof", "case": "a", "outcome": "passed", "seconds": 1.0, "why": ""}
    record.write_text(json.dumps({"run": RUN}) + "\n" + json.dumps(whole)[:40])
    assert not gpu.read_record(record).found
    record.write_text(record.read_text() + "\n" + json.dumps(whole) + "\n")
    assert gpu.read_record(record).count("passed") == 1


def test_a_failure_names_its_kernel_and_the_command_that_repeats_it(tmp_path: Path) -> None:
    launches = gpu_report.LastLaunches(tmp_path)
    for rank in range(3):
        text = gpu_report.launch_line(
            lambda: None, (132, 1), {"RANK": 0, "x": None, "num_warps": 8 if rank else 4}
        )
        launches.note(rank, text)
    assert [line.partition(": ")[0] for line in launches.read()] == ["rank 0", "rank 1, 2"]
    assert launches.read()[1].endswith("[132, 1] RANK=0 num_warps=8")
    said = gpu_page.outcome_lines(
        {"step": "proof", "case": "W4/plain/norm", "outcome": "failed", "seconds": 2.0,
         "why": "Traceback\nWrong: by 7", "launches": launches.read()},
        "cuda", False,
    )  # fmt: skip
    assert "    Wrong: by 7\n" in said and "num_warps=8" in said
    again = said.splitlines()[-1].partition("again: python -m tools.gpu ")[2].split()
    assert again[:4] == ["--only", "proof", "--case", "W4/plain/norm"]
    case = "norm 8x8192 bfloat16 8 ranks"
    again = gpu_page.repeating("solo", case, "cuda", False)
    assert again == f"python -m weft bench solo --ranks 8 --filter '{case}'"


@pytest.mark.slow
@needs_interpreter
def test_every_kernel_is_in_a_case(tmp_path: Path) -> None:
    """But the switch's sums, which one GPU has not; some are launched on a GPU only."""
    code = """
import sys
from pathlib import Path
from tools.gpu import process as gpu_process, report as gpu_report
from weft.sim.run.gpu import rank_here
seen = set()
launches = gpu_report.LastLaunches(Path(sys.argv[1]))
launches.note = lambda rank, text: seen.add(text.partition("[")[0])
import torch
from tools.gpu import cases as gpu_cases
with launches.noting(rank_here):
    for call in gpu_cases.CALLS:
        W = 4 if call == "matmul_all_reduce" else 2  # two ranks need one exchange only
        place = lambda rank: gpu_cases.Place(rank, W, torch.device("cpu"), True)
        gpu_process.on_ranks(
            "cpu",
            W,
            lambda rank: gpu_cases.run_case_on_rank(f"W{W}/plain/{call}", place(rank)),
            300,
        )
print(*seen)
"""
    variables = os.environ | {"TRITON_INTERPRET": "1"}
    said = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=variables, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    root = Path(gpu.ROOT)
    written = {
        line.split("def ")[1].split("(")[0]
        for folder in ("kernels", "collectives")
        for path in (root / folder).rglob("*.py")
        for line in path.read_text().splitlines()
        if line.startswith("def _") and line.split("(")[0].endswith("_kernel")
    }
    on_gpus = {
        "_announce_kernel",
        "_begin_kernel",
        "_end_kernel",
        "_finish_kernel",
        "_hold_kernel",
        "_merge_kernel",
        "_post_kernel",
        "_wait_kernel",
    }
    assert written - set(said) == on_gpus | {"_switched_kernel", "_by_kernel"}


@pytest.mark.slow
@needs_interpreter
def test_small_calls_for_the_sanitizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them: `test_solo.py` has a call of each kind."""
    small = gpu_process.small_cases()
    assert len(small) == 8
    monkeypatch.setattr(gpu_process, "small_cases", lambda: small[::4])
    monkeypatch.setattr(sweep, "_ROUNDS", 1)  # what they take is not looked at
    gpu_process.run_small_cases("cpu")


def test_eight_ranks_with_copy_engines_capture_no_graph() -> None:
    """Their streams are as many as there are queues."""
    name = "graph/all_gather_matmul-engines"
    device: Any = SimpleNamespace(type="cuda")
    with pytest.raises(gpu_cases.ImpossibleError, match=r"32 streams of 8 ranks .* 32 queues"):
        gpu_cases.run_case_on_rank(f"W8/{name}", gpu_cases.Place(0, 8, device))


def test_a_wrong_result_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    place = gpu_cases.Place(0, 1, torch.device("cpu"), True)
    right = [torch.ones(2)]
    work = gpu_cases.RankCall([right], lambda x: [x], lambda i: right, 1e-2)
    gpu_cases._compare_and_forget([("a", 0, [torch.ones(2) * 1.001])], {"a": [right]}, {"a": work})
    with pytest.raises(gpu_cases.WrongError, match=r"a, call 0 .*0\.5 of the largest"):
        gpu_cases._compare_and_forget(
            [("a", 0, [torch.tensor([1.0, 1.5])])], {"a": [right]}, {"a": work}
        )
    with pytest.raises(gpu_cases.WrongError, match="inf of"):
        gpu_cases._compare_and_forget(
            [("a", 0, [torch.tensor([1.0, torch.nan])])], {"a": [right]}, {"a": work}
        )
    assert place.mine(torch.arange(3)).tolist() == [0, 1, 2]


@pytest.mark.slow
@needs_interpreter
def test_a_killed_run_goes_on_from_a_copy(tmp_path: Path, capsys: Any) -> None:
    """SIGKILL in the middle: what had ended is kept, and is not run twice."""
    first, second = tmp_path / "first", tmp_path / "second"
    chosen = [*QUICK, "--only", "threads"]
    run = subprocess.Popen(command(*chosen, "--out", str(first)), stdout=subprocess.DEVNULL)
    record = first / "outcomes.jsonl"
    while not (record.exists() and '"passed"' in record.read_text()):
        assert run.poll() is None
        time.sleep(0.05)
    run.send_signal(signal.SIGKILL)
    run.wait()
    with open(record, "a") as file:
        file.write('{"step": "threads", "case": "W2/late/no')  # as if killed in a write
    shutil.copytree(first, second)
    shutil.rmtree(first)
    run2 = subprocess.run(
        command(*chosen, "--resume", str(second), "--minutes", "3"), capture_output=True, text=True
    )
    assert run2.returncode == 0, run2.stdout + run2.stderr
    ends = [(e["step"], e["case"]) for e in map(_parsed, record_lines(second)) if "outcome" in e]
    assert len(ends) == len(set(ends)) == len(gpu_steps.names("threads", "cpu", True))
    assert sorted(path.name for path in second.iterdir()) == [
        "log.txt", "outcomes.jsonl", "page.md",
    ]  # fmt: skip
    page = (second / "page.md").read_text()
    assert "on streams, mixed | 3 |" in page and "of a GPU only" in page
    # In the folder that it has, too, nothing is left to do.
    assert gpu.main([*chosen, "--resume", str(second)]) == 0
    assert "==" not in capsys.readouterr().out


def record_lines(folder: Path) -> list[str]:
    return (folder / "outcomes.jsonl").read_text().splitlines()


def _parsed(line: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(line)
    except ValueError:
        return {}
    return found


_HIDE = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("rich", "pytest_benchmark", "matplotlib", "yaml", "pytest"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])
sys.meta_path.insert(0, Hide())
"""


@pytest.mark.slow
def test_what_only_draws_may_be_missing(tmp_path: Path) -> None:
    """A machine's own torch has no rich and no pytest-benchmark with it."""
    (tmp_path / "sitecustomize.py").write_text(_HIDE)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    variables = os.environ | {"PYTHONPATH": path}
    code = """
import sys
from tools.gpu import __main__ as gpu
from weft import cli
quick = ["--quick", "--device", "cpu"]
print(gpu.main([*quick, "--only", "plain", "--case", "matmul", "--out", sys.argv[1]]))
print(cli.main(["bench", "solo", *quick, "--filter", "all_to_all"]))
"""
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "out")],
        env=variables, capture_output=True, text=True,
    )  # fmt: skip
    assert run.stdout.splitlines().count("0") == 2, run.stdout + run.stderr
    assert "without pytest_benchmark and rich" in run.stdout
    assert "torch.mm" in (tmp_path / "out" / "page.md").read_text()
    assert "| all_to_all 1024 bfloat16 2 ranks |" in run.stdout


class ForkedStep:
    """In place of the `Popen` of a step: a process that has imported torch and weft, 3 s sooner."""

    def __init__(self, command: list[str], env: dict[str, str], **_: Any) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        (hears, into), (said, tells) = context.Pipe(False), context.Pipe(False)
        self._process = context.Process(target=_step, args=(command, env, hears, tells))
        self._process.start()
        self.pid, self.stdin = self._process.pid, into
        self.stdout = os.fdopen(os.dup(said.fileno()), "rb")
        hears.close()
        tells.close()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float) -> None:
        self._process.join(timeout)


def _step(command: list[str], env: dict[str, str], hears: Any, tells: Any) -> None:
    os.setpgrp()
    for file, of in ((0, hears), (1, tells), (2, tells)):
        os.dup2(of.fileno(), file)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    os.environ.clear()
    os.environ.update(env)
    sys.argv = command[2:]
    gpu_process.main()


@pytest.mark.slow
@needs_interpreter
def test_a_rehearsal_of_each_step_and_what_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All steps in one run; of solo figures and of searches the first ones only."""
    out = tmp_path / "out"
    some = [
        "proof", "plain", "solo", "threads", "doctor", "W4/plain/all_reduce", "W2/late/norm",
        "sanitizer",
        "all_gather_matmul 32x64x64 bfloat16 2 ranks", "W2/plain/norm",
        "all_gather_matmul 32x64x64 bfloat16 2 ranks, without waits",
        *gpu_steps.names("plain", "cpu", True),
    ]  # fmt: skip
    forked = SimpleNamespace(**(vars(subprocess) | {"Popen": ForkedStep}))
    monkeypatch.setattr(gpu, "subprocess", forked)
    assert gpu.main([*QUICK, "--case", *some, "--out", str(out), "--minutes", "20"]) == 0
    ends = {(e["step"], e["case"]): e for e in lines(out) if "outcome" in e}
    assert {step for step, _ in ends} == set(STEPS) - {"ranks"}
    assert {e["outcome"] for e in ends.values()} == {"passed", "skipped"}
    assert ends["compile", "proof"]["compiled"] == 1  # of the calls, the one that is proved
    found = ends["tune", "all_gather_matmul 32x64x64 bfloat16 2 ranks"]["tuned"]
    assert found["tried"] == 3 and not found["failed"]
    assert len(list(out.iterdir())) <= 8
    (entry,) = json.loads((out / "interpreter.json").read_text())["entries"]
    assert (entry["M"], entry["N"], entry["W"]) == (32, 32, 2)
    (rate,) = json.loads((out / "interpreter.rates.json").read_text())["entries"]
    assert rate["dtype"] == "bfloat16" and rate["block_m"] == 32
    page = (out / "page.md").read_text()
    assert "## Tuned launches" in page and "without waits" in page
    assert "attention backward 64x2x1x16" in page

    root = tmp_path / "root"
    for folder in ("bench/results", "docs", "kernels"):
        (root / folder).mkdir(parents=True)
    for name in ("interpreter.json", "interpreter.rates.json"):
        (out / name).rename(out / name.replace("interpreter", "sm_90"))
    gpu_page.publish_results(out, root)
    assert [path.name for path in (root / "kernels" / "tuned").iterdir()] == ["sm_90.json"]
    assert (root / "docs" / "gpu.md").read_text() == page
