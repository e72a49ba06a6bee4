"""`weft bench`: every suite runs and its files can be read back; rows tell what failed, and why."""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import bench_cases
import pytest
import torch
import torch.distributed as dist
from matplotlib.figure import Figure

from tools import readme
from weft.bench import bounds, cli, measure, rows, runner, shapes
from weft.bench.problem import Options
from weft.bench.published import rows as published_rows
from weft.bench.registry import SUITES, suite
from weft.bench.report import advice, compare, plots, tables
from weft.bench.suites import ops, plan
from weft.collectives import resolve

ROOT = Path(__file__).resolve().parents[2]


def weft(*args: str, status: int = 0, **env: str) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "weft", *args],
        cwd=ROOT, capture_output=True, text=True, timeout=300, env=os.environ | env,
    )  # fmt: skip
    assert run.returncode == status, run.stderr + run.stdout
    return run.stdout + run.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `weft bench all --quick --out` writes, on two ranks."""
    out = tmp_path_factory.mktemp("bench")
    text = weft("bench", "all", "--quick", "--out", str(out))
    for name in SUITES:
        assert f"weft bench {name}: " in text
    assert "auto's choice: no more than 5 % behind the best engine in" in text
    return out


MAIN = {"ops": "auto", "scaling": "host", "attention": "ring", "plan": "plan"}
PEERS = {
    "ops": "collective + matmul",
    "collectives": "gloo",
    "dispatch": "torch",
    "redistribute": "torch",
    "scaling": "generic",
    "attention": "gather + attention",
    "plan": "torch default",
    "experts": "all_to_all + loop",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SUITES)
def test_every_suite_is_read_back(name: str, folder: Path) -> None:
    result = rows.Result.read(folder / f"{name}.json")
    assert result.suite == name and not result.interrupted
    assert result.command == f"weft bench all --quick --out {folder}"
    for key in ("torch", "triton", "cpu", "cores", "commit", "cpu_mhz", "quiet", "threads a rank"):
        assert key in result.environment
    assert result.environment["ranks"] == (1 if name == "scaling" else 2)
    cases = suite(name).cases(Options(quick=True))
    assert [case.name for case in result.cases] == [spec.name for spec in cases]
    for case in result.cases:
        assert not case.failure
        decoding = case.name.startswith("decode")
        assert case.main == ("flash_decode" if decoding else MAIN.get(name, "weft"))
        assert case.peer == PEERS.get(name, "torch DTensor")
        assert {case.main, case.peer} <= set(case.timed)
        assert case.gain is not None and case.gain.low <= case.gain.median <= case.gain.high
        for timing in case.timed.values():
            assert timing.us > 0 and timing.spread >= 0
            assert len(timing.rounds_us) >= (1 if name == "scaling" else 3)
            assert timing.error is None or 0 <= timing.error <= 1
        if case.bounds:
            assert case.bound_us == (max if case.bound_rule == "max" else sum)(
                case.parts_us.values()
            )
            assert case.fraction(case.main) > 0
    again = folder / "again.json"
    result.write(again)
    assert rows.Result.read(again) == result
    again.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("name", SUITES)
def test_tables_of_every_suite(name: str, folder: Path) -> None:
    result = rows.Result.read(folder / f"{name}.json")
    with (folder / f"{name}.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == sum(len(case.variants) for case in result.cases)
    timed = [line for line in lines if line["us"]]
    assert {line["variant"] for line in timed} == set(tables.variants_of(result.cases))
    text = (folder / f"{name}.md").read_text()
    for case in result.cases:
        assert f"| {case.name} |" in text


@pytest.mark.slow
def test_the_report_stands_alone(folder: Path) -> None:
    page = (folder / "index.html").read_text()
    plots = list(folder.glob("*.png"))
    assert {path.stem for path in plots} >= {"ops-time", "ops-crossover", "collectives-time"}
    assert page.count("data:image/png;base64,") == len(plots)
    assert not re.search(r"(src|href)=['\"]?(http|/|\w+\.)", page)
    for name in SUITES:
        assert f"id='{name}'" in page
    assert page.count("<table>") == page.count("<div class='table'><table>") > len(SUITES)
    assert ".table { overflow-x: auto }" in page  # else columns beyond a narrow page are lost
    assert "the quickest engine is" in page and "no more than 5 % behind" in page


@pytest.mark.slow
def test_pytest_benchmark_reads_the_history(folder: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest_benchmark", "--storage", str(folder / "history"), "list"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert run.returncode == 0 and len(run.stdout.split()) == len(SUITES)
    kept = json.loads(next((folder / "history").glob("*_mlp.json")).read_text())
    mlp = rows.Result.read(folder / "mlp.json").cases[0]
    seconds = {b["name"]: b["stats"]["median"] for b in kept["benchmarks"]}
    expected = mlp.variants["weft"].statistics["median"] * 1e-6
    assert seconds[f"{mlp.name} [weft]"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
def test_the_table_of_the_readme_is_made_from_results(folder: Path) -> None:
    lines = readme.readme_figures(folder).splitlines()
    row = next(line for line in lines if line.startswith("| 24x16x32 | "))
    head = next(line for line in lines if line.startswith("| tokens"))
    assert row.count("|") == head.count("|") == 9
    assert re.match(r"Collectives, 1 KiB to 64 KiB a rank: \d", lines[-1])


def test_what_gpus_have_measured_is_a_line_of_the_readme(tmp_path: Path) -> None:
    """Ours beside the peer, by kind: a range where there are several."""

    def case(suite: str, name: str, us: float, peer: str, **params: Any) -> rows.Case:
        times = {"weft": rows.Timing([us], [us]), peer: rows.Timing([60.0], [60.0])}
        params = {"dtype": "bfloat16"} | params
        return rows.Case(suite, name, params, times, main="weft", peer=peer)

    gather = {"op": "all_gather_matmul", "M": 8192}
    own = [
        case("matmul", "large", 80.0, "torch.mm", M=4096),
        case("matmul", "larger", 60.0, "torch.mm", M=8192),
        case("matmul", "few", 120.0, "torch.mm", M=128),
        case("local attention", "a", 100.0, "cuDNN", step="forward"),
    ]
    solo = [
        case("solo", "b", 75.0, "cuBLAS", **gather, ranks=8),
        case("solo", "of fp8", 99.0, "cuBLAS", **gather | {"dtype": "float8_e4m3fn"}, ranks=8),
        case("solo", "of two", 99.0, "cuBLAS", **gather, ranks=2),
    ]
    where = {"gpus": [{"name": "Some GPU"}]}
    rows.Result("gpu", where, own).write(tmp_path / "some-gpu.json")
    rows.Result("solo", where, solo).write(tmp_path / "some-gpu.solo.json")
    assert readme._gpu_lines(tmp_path) == []
    (tmp_path / "some-gpu.outcomes.jsonl").write_text("")
    (line,) = readme._gpu_lines(tmp_path)
    assert (
        "one Some GPU, bf16, speed relative to the quickest library: matmuls from 4096 rows at "
        "0.75 to 1.00 of cuBLAS, matmuls of fewer rows at 0.50 of cuBLAS, attention forward at "
        "0.60 of cuDNN, fused matmuls from 8192 rows, as one rank of 8, at 0.80 of cuBLAS ("
    ) in line


@pytest.fixture(scope="module")
def planted() -> dict[str, rows.Case]:
    """The cases of the planted suite, and that of a suite in a file."""
    os.environ["WEFT_TIMEOUT_S"], before = "3", os.environ["WEFT_TIMEOUT_S"]
    try:
        own = suite(str(ROOT / "examples" / "own_kernel.py"))
        options = Options(rounds=5, shapes=((4, 16),))
        result, of_own = runner.run_suites([bench_cases, own], options)
    finally:
        os.environ["WEFT_TIMEOUT_S"] = before
    assert [case.name for case in result.cases] == [s.name for s in bench_cases.cases(options)]
    assert of_own.suite == "own_kernel" and tables.result_table(of_own).rows
    return {case.name: case for case in (*result.cases, *of_own.cases)}


def test_a_suite_of_ones_own(
    planted: dict[str, rows.Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    case = planted["scatter_norm 4x16"]
    assert case.gain is not None and case.fraction("fused") is not None
    (tmp_path / "json.py").touch()
    (tmp_path / "not_a_suite.py").write_text("NAME = 'mine'\n")
    (tmp_path / "taken.py").write_text("NAME, WORLD, cases, prepare = 'ops', 'ranks', None, None\n")
    for name, text in (
        ("json.py", "has the name of another module"),
        ("not_a_suite.py", "lacks WORLD, cases, prepare"),
        ("taken.py", "has the NAME of a suite of weft's, 'ops'"),
        ("nowhere.py", "no file"),
    ):
        with pytest.raises(ValueError, match=text):
            suite(str(tmp_path / name))


def test_what_is_wrong_has_no_time(planted: dict[str, rows.Case]) -> None:
    wrong = planted["wrong"].variants["weft"]
    assert not wrong.ok and not wrong.rounds_us and wrong.failure.startswith("wrong: 500 times")
    assert planted["wrong"].variants["sleep"].ok
    assert planted["wrong"].gain is None and planted["wrong"].fraction("weft") is None


def test_a_failure_is_a_row(planted: dict[str, rows.Case]) -> None:
    assert planted["raising"].variants["weft"].failure == "ValueError: planted in the call"
    assert planted["raising"].variants["sleep"].ok
    assert planted["unprepared"].failure == "NotImplementedError: planted in prepare"
    assert "rank 1 with ValueError: planted on rank 1" in planted["half raising"].failure
    assert planted["dying"].failure == "rank 1 was exited with 3"
    for name in ("right", "last"):  # before and after all that
        case = planted[name]
        assert case.variants["elsewhere"].failure == "not on this machine"
        assert case.variants["weft"].error == 0 and case.variants["weft"].us > 0
        assert case.variants["sleep"].us >= 2000
    result = rows.Result("planted", {"ranks": 2, "cores": 2, "cpu": "c", "device": "cpu",
                         "quiet": True}, list(planted.values()))  # fmt: skip
    table = tables.result_table(result)
    assert [row[1] for row in table.rows].count("failed") == 3
    assert "no time of weft in raising: ValueError: planted in the call" in table.notes


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_finished(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import bench_cases\n"
        "from weft.bench import problem, runner\n"
        "if __name__ == '__main__':\n"
        "    bench_cases.cases = lambda options: ["
        "problem.Spec(n, {'op': n}) for n in ('right', 'last', 'slow', 'right')]\n"
        "    (result,) = runner.run_suites([bench_cases], problem.Options(rounds=3))\n"
        "    print([case.name for case in result.cases], result.interrupted)\n"
    )
    mark = tmp_path / "slow"
    run = subprocess.Popen(
        [sys.executable, str(script), str(ROOT / "tests")],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "WEFT_TEST_MARK": str(mark)},
        # A shell has its background jobs ignore the signal, and so would all that they start.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not mark.exists() and time.monotonic() < deadline and run.poll() is None:
        time.sleep(0.1)
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does: the ranks hear it, too
    out, _ = run.communicate(timeout=60)
    assert out.strip() == "['right', 'last'] True"


@pytest.mark.ranks(2, pytest.param(3, marks=pytest.mark.slow))
def test_the_bound_of_a_link_where_ranks_read_different_amounts() -> None:
    read = bounds.read_from_peers(100 * dist.get_rank(), resolve(None), torch.device("cpu"))
    for i in range(3):
        read(i)


def test_ratios_are_taken_round_by_round() -> None:
    drifting = [1.0, 2.0, 4.0, 8.0, 16.0]
    twice = rows.ratio_of([2 * us for us in drifting], drifting)
    assert (twice.median, twice.low, twice.high) == (2, 2, 2) and twice.told_apart
    noisy = rows.ratio_of([1.0, 2.0] * 10, [2.0, 1.0] * 10)
    assert not noisy.told_apart and str(noisy).endswith("~")


@pytest.mark.parametrize("count", [1, 2, 5, 6])
def test_nobody_follows_one_and_the_same_in_every_round(count: int) -> None:
    rounds = [measure.order(count, number) for number in range(2 * count)]
    assert all(sorted(order) == list(range(count)) for order in rounds)
    followed = Counter(pair for order in rounds for pair in pairwise(order))
    assert len(followed) == count * (count - 1) and set(followed.values()) <= {2}


def test_statistics_are_of_the_slowest_rank() -> None:
    timing = rows.Timing([1.0, 2.0, 3.0, 10.0, 2.0], [2.0, 1.5])
    assert timing.us == 2 and timing.statistics["median"] == 2 and timing.statistics["max"] == 10
    case = rows.Case("s", "c", variants={"a": timing}, bounds={
        "link": rows.Timing([1.0] * 5, [1.0, 1.0]), "arithmetic": rows.Timing([0.5] * 5, [0.5])
    }, main="a")  # fmt: skip
    assert (case.bound_us, case.bound_by) == (1, "link")
    assert case.fraction("a") == 0.5 and case.exposed_us("a") == 1.5
    case.bound_rule = "sum"
    assert case.bound_us == 1.5 and case.fraction("a") == 0.75


@pytest.mark.parametrize(
    "cases",
    [
        [1], {}, [{"suite": "ops"}],
        *(
            [{"suite": "ops", "name": "a", "main": "m", "variants": {"m": timing}}]
            for timing in (
                {"rounds_us": ["x"], "ranks_us": [1]}, {"rounds_us": [1], "ranks_us": [math.nan]},
                {"rounds_us": [0], "ranks_us": [0]}, {"rounds_us": [1]}, {"failure": 3}, 3,
            )
        ),
        [{"suite": "ops", "name": ["a"], "main": "m", "variants": {}}],
    ],
)  # fmt: skip
def test_garbage_for_a_result_is_refused_by_its_name(tmp_path: Path, cases: Any) -> None:
    path = tmp_path / "ops.json"
    for name, environment in (("ops", {}), (3, {}), ("../x", {}), ("ops", [])):
        content = {"schema": rows.SCHEMA, "suite": name, "environment": environment, "cases": cases}
        path.write_text(json.dumps({**content, "command": "", "interrupted": False}))
        if (name, environment, cases) != ("ops", {}, {}):  # no cases at all
            with pytest.raises(ValueError, match=r"ops\.json is damaged"):
                rows.Result.read(path)
    for text in (b"[" * 100000, bytes(range(256)), b""):
        path.write_bytes(text)
        with pytest.raises(ValueError, match=r"ops\.json is not a result"):
            rows.Result.read(path)


def test_a_regression_is_measured_by_a_number(tmp_path: Path, capsys: Any) -> None:
    for value in ("nan", "inf", "-1"):
        with pytest.raises(SystemExit) as left:
            compare.main([str(tmp_path), str(tmp_path), f"--max-regression={value}"])
        assert left.value.code == 2
        assert "--max-regression is a percentage from 0" in capsys.readouterr().err


def test_old_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text('{"suite": "mlp", "cases": []}')
    with pytest.raises(ValueError, match="run the suite again"):
        rows.Result.read(path)


def test_files_do_not_command_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names in results and in tables of what others have published, also where they are missed."""
    kept = ROOT / "bench" / "results" / "loss.json"
    evil = json.loads(kept.read_text())
    for case in evil["cases"]:
        case["name"] += "\x1b[2J"
    evil["environment"]["torch"] = "\x1b[31m"
    (tmp_path / "evil.json").write_text(json.dumps(evil))
    for pair in ((tmp_path / "evil.json", kept), [tmp_path / "evil.json"] * 2):
        cli.main(["compare", *map(str, pair), "--all"])
    table = published_rows.SHIPPED.read_text().splitlines()
    (tmp_path / "evil.csv").write_text("\n".join([table[0], "\x1b[2J" + table[1]]))
    cli.main(["published", str(tmp_path / "evil.csv")])
    told = capsys.readouterr()
    assert r"\x1b[2J" in told.out and r"\x1b[31m" in told.out
    assert "\x1b" not in told.out + told.err


def test_shapes_are_sizes_models_and_files(tmp_path: Path) -> None:
    assert shapes.parse_shapes("3,4,5") == ((3, 4, 5),)
    (llama,) = shapes.parse_shapes("llama-3-70b")
    assert (llama.hidden, llama.ffn, llama.heads, llama.kv_heads) == (8192, 28672, 64, 8)
    file = tmp_path / "mine.yaml"
    file.write_text(
        "models:\n  mine: {hidden: 64, ffn: 96, heads: 4, kv_heads: 2, head_dim: 16}\n"
        "sizes:\n  - [4, 8, 2]\n  - 1,2,3\n"
    )
    mine, *sizes = shapes.parse_shapes(str(file))
    assert (mine.name, mine.ffn, sizes) == ("mine", 96, [(4, 8, 2), (1, 2, 3)])
    specs = ops.cases(Options(shapes=(mine,), full_size=True))
    assert [s.name for s in specs][:2] == [
        "all_gather_matmul 4096x128x64 (mine qkv)", "all_gather_matmul 4096x192x64 (mine gate+up)"
    ]  # fmt: skip
    for content, text in (
        ("models: {mine: {hidden: 64}}", "a model has ffn, head_dim"),
        ("models: {m: {hidden: x, ffn: 1, heads: 1, kv_heads: 1, head_dim: 1}}", "at least 1 each"),
        ("models: {m: {hidden: 8, ffn: 1, heads: 1, kv_heads: 0, head_dim: 1}}", "at least 1 each"),
        ("models: [mine]", '"models" are by name, "sizes" are a list'),
        ("sizes: 5", '"models" are by name, "sizes" are a list'),
    ):
        file.write_text(content)
        with pytest.raises(argparse.ArgumentTypeError, match=text):
            shapes.parse_shapes(str(file))
    file.write_bytes(b"\xff\xfe\x9d")
    with pytest.raises(argparse.ArgumentTypeError, match="cannot read"):
        shapes.parse_shapes(str(file))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_mirrored_models_keep_their_proportions(ranks: int) -> None:
    for model in shapes.MODELS.values():
        small = model.mirrored(ranks)
        assert small.hidden == 512 and small.kv_heads % ranks == 0 and small.ffn % ranks == 0
        assert small.heads % small.kv_heads == 0
        assert small.ffn / small.hidden == pytest.approx(model.ffn / model.hidden, rel=0.02)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["mlp", "--shapes", "1,x"], "a shape is sizes with commas"),
        (["mlp", "--shapes", "1,2"], "a shape of mlp is tokens,hidden,ffn, got 1,2"),
        (["mlp", "--shapes", "3,4,4"], "--ranks 2 must divide the tokens"),
        (["opts"], "no suite 'opts': there are mlp, ops"),
        (["ops", "--ranks", "1"], "--ranks: must be at least 2, got 1: one rank has no peers"),
        (["ops", "--ranks", "two"], "--ranks: must be at least 2, got two"),
        (["ops", "--filter", "nothing"], "no case has that, but 'all_gather_matmul 16x256x1024'"),
        (["--shapes", "8,8,8", "mlp"], "name suites first: weft bench mlp --shapes"),
        (["mlp", "dispatch", "--engines", "host"], "mlp, dispatch would not heed it"),
        (["model", "--shapes", "llama-3-8b"], "model takes no --shapes"),
        (["dispatch", "--shapes", "8,8"], "dispatch takes no --shapes"),
        (["layers", "--shapes", "llama-3-8b", "--ranks", "2", "--rounds", "0"], "at least 1"),
    ],
)
def test_wrong_command_lines(args: list[str], text: str, capsys: Any) -> None:
    from weft.bench.cli import main

    with pytest.raises(SystemExit) as stopped:
        main(args)
    assert stopped.value.code == 2 and text in capsys.readouterr().err


def op_case(M: int, host: float, generic: float, noise: float = 0.01) -> rows.Case:
    """A case in which `auto` takes as long as `host`, in us."""
    case = rows.Case("ops", f"{M}", {"op": ops.OPS[0], "M": M, "N": 8, "K": 8}, main="auto",
                     peer="collective + matmul")  # fmt: skip
    for name, us in {"auto": host, "host": host, "generic": generic, case.peer: generic}.items():
        # Of two variants the noise goes opposite ways.
        signs = [(-1) ** (i + (name == "generic")) for i in range(20)]
        rounds = [us * (1 + noise * sign) for sign in signs]
        case.variants[name] = rows.Timing(rounds, [us])
    return case


def test_what_fusion_is_said_to_gain_is_what_the_rounds_show() -> None:
    cases = [op_case(16, 2.0, 1.0), op_case(64, 1.0, 1.02, noise=0.3), op_case(256, 1.0, 2.0)]
    line = advice.advice(rows.Result("ops", QUIET, cases))[1]
    assert "fusion pays in 1 of 3, costs time in 1 (all at M <= 16), and the noise" in line
    assert "wider than the difference in 1" in line
    assert "fusion pays in 1 of 1. " in advice._of_op(ops.OPS[0], cases[2:])[0] + " "


def test_the_verdict_on_auto_can_be_read() -> None:
    good = ops.engines_verdict([op_case(16, 1.0, 2.0)])
    assert good.holds and str(good).endswith(
        "no more than 5 % behind the best engine in 1 of 1 cases; wanted in 95 %, and never over "
        "15 %: holds."
    )
    bad = str(ops.engines_verdict([op_case(16, 2.0, 1.0), op_case(64, 1.1, 1.0, noise=0.3)]))
    assert "DOES NOT HOLD. Behind, as the rounds prove: 16; furthest 16, by" in bad
    assert bad.endswith("Noise hides the answer in 1, which count as not behind.")


def test_a_plan_is_held_to_the_best_by_hand() -> None:
    def case(plan: float) -> rows.Case:
        names = {"plan": plan, "Megatron": 3.0, "FSDP alone": 2.0}
        timed = {name: rows.Timing([us] * 9, [us]) for name, us in names.items()}
        return rows.Case("plan", "Llama", {}, timed)

    assert plan.plan_verdict([case(2.04)]) == (
        "the plan takes 1.02 (1.02 to 1.02) of FSDP alone in Llama. Wanted 1.05 of the best by "
        "hand: holds."
    )
    assert plan.plan_verdict([case(2.0), case(2.2)]).endswith(
        "1.05 of the best by hand: DOES NOT HOLD."
    )
    assert plan.plan_verdict([]) == ""


def test_plots_have_titles_of_their_own_and_error_bars(tmp_path: Path) -> None:
    cases = [op_case(M, 1.0, 2.0) for M in (16, 64)]
    over_size, crossover = plots._over_size(cases), plots._crossover(cases)
    for picture in (over_size, crossover):
        drawn = picture.axes[0].containers[0]
        assert drawn.has_yerr and drawn.lines[0].get_linestyle() == "None"  # two points
    titles = []
    with patch.object(Figure, "suptitle", lambda _, text, **options: titles.append(text)):
        plots.draw_result(rows.Result("ops", QUIET, cases), tmp_path)
    assert len(titles) == len(set(titles)) == 2


QUIET = {"ranks": 2, "cores": 2, "cpu": "c", "device": "cpu", "quiet": True}
