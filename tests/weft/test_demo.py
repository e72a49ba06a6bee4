"""The demo end to end in a tiny configuration, and its command line."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from weft import cli
from weft.collectives.cost import BUSY
from weft.demo import run as demo
from weft.demo.data import standard_library
from weft.demo.model import Llama, LlamaShape
from weft.demo.report import Comparison, print_comparison
from weft.demo.train import Run, TrainingLog, train

TINY = "--steps 4 --d-model 32 --layers 1 --heads 4 --kv-heads 2 --ffn 48 --seq-len 32 --batch 2"


@pytest.mark.slow
def test_demo_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command = ["demo", *TINY.split(), "--device", "cpu", "--out", str(tmp_path)]
    assert cli.main(command) == 0
    told = capsys.readouterr().out
    for said in ("the same training", "tokens/s", "waiting for peers", "all_gather_matmul"):
        assert said in told
    rows = told.split("explain.txt tells why")[1].split("what the trained")[0].split("──")[-1]
    for row in rows.strip(" ─\n").splitlines():
        assert re.search(r"\b(host|generic|pull)\b", row), f"folded at 80 columns: {row}"

    report = json.loads((tmp_path / "report.json").read_text())
    assert ("the machine was not quiet" in told) == (report["load"] > BUSY)
    assert report["agrees"]
    assert report["largest_difference"] < 1e-4
    assert len(report["ranks"]) == 2
    for result in (report["reference"], *report["ranks"]):
        assert len(result["losses"]) == 4
        # About log(256): it knows nothing.
        assert result["losses"][0] == pytest.approx(6.0, abs=0.6)
        assert result["tokens_per_second"] > 0
        assert 0 <= result["wait_ms"] <= result["step_ms"]
    assert report["reference"]["held_out_loss"] == pytest.approx(
        report["ranks"][0]["held_out_loss"], abs=1e-4
    )
    engines = {decision["op"]: decision["engine"] for decision in report["engines"]}
    assert engines["all_gather_matmul"] in ("host", "generic")
    assert engines["matmul_reduce_scatter"] in ("host", "generic")
    assert report["text"].startswith("    def ")

    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "all_gather_matmul" in (tmp_path / "explain.txt").read_text()
    assert (tmp_path / "text.txt").read_text().rstrip("\n") == report["text"].rstrip("\n")


@pytest.mark.parametrize("theirs, status", [([1.0, 2.0], 0), ([1.0, 2.1], 1), ([1.0, math.nan], 1)])
def test_the_exit_status_says_whether_the_losses_agree(
    theirs: list[float], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compared(run: Run, ranks: int, out: Path) -> Comparison:
        def result(losses: list[float]) -> TrainingLog:
            return TrainingLog(losses)

        return Comparison(run, 0, result([1.0, 2.0]), [result(theirs)])

    monkeypatch.setattr(demo, "run_demo", compared)
    assert cli.main(["demo", "--device", "cpu", "--out", str(tmp_path)]) == status


def test_times_beside_other_work_are_told_to_be() -> None:
    result = TrainingLog([2.0, 1.0], step_seconds=[1.0, 1.0], wait_seconds=[0.0, 0.0])
    for load in (0.0, 2.5):
        out = io.StringIO()
        comparison = Comparison(Run(LlamaShape(), 2, 1, 1e-3, 0), 0, result, [result], load)
        print_comparison(comparison, Console(file=out, width=200))
        assert ("load 2.5 a core at the start" in out.getvalue()) == (load > 0)


def trained(run: Run) -> TrainingLog:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_ENGINE", run.engine)  # which `train` sets, for good
        return train(0, lambda _: None, run)


def test_three_ranks_with_uneven_sequences_train_alike(ranks: Any) -> None:
    shape = LlamaShape(d_model=24, layers=1, heads=6, kv_heads=3, ffn=24, seq_len=16)
    run = Run(shape, steps=3, batch=2, lr=1e-3, seed=0, text_bytes=4)
    alone, results = trained(run), ranks(3, trained, run)
    for result in results:
        assert result.losses == pytest.approx(alone.losses, abs=1e-5)
        assert result.text == results[0].text


@pytest.mark.parametrize(
    "options, said",
    [
        ("--ranks 3", r"3 ranks cannot share kv_heads=4, but 1, 2, 4 can; for 3 ranks"),
        ("--ranks 8", r"8 ranks cannot share kv_heads=4, but 1, 2, 4 can"),
        ("--heads 6", r"a head takes d_model / heads features.*heads=6"),
        ("--kv-heads 3", r"heads must be a multiple of kv_heads, got heads=8, kv_heads=3"),
        ("--ranks 1", r"argument --ranks: must be at least 2, got 1"),
        ("--steps 0", r"argument --steps: must be at least 1, got 0"),
        ("--lr nan", r"--lr must be above 0 and finite, got nan"),
        ("--lr -1", r"--lr must be above 0 and finite, got -1"),
        ("--out /dev/null", r"--out /dev/null: cannot write there, "),
        ("--engine fast", r"invalid choice: 'fast' \(choose from .*host"),
    ],
)
def test_options_that_do_not_fit(
    options: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["demo", *options.split()])
    assert stop.value.code == 2
    assert re.search(said, capsys.readouterr().err.replace("\n", " "))


def test_missing_extras_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import importlib.util

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "rich" else find_spec(name)
    )
    assert cli.main(["demo"]) == 2
    said = capsys.readouterr().err
    assert "weft demo needs rich: pip install matplotlib pytest-benchmark rich pyyaml\n" in said


def test_missing_extras_are_those_of_the_distribution() -> None:
    project = (Path(cli.__file__).parent.parent / "pyproject.toml").read_text()
    (packages,) = re.findall(r"^bench = \[(.*?)\]", project, re.MULTILINE)
    assert sorted(re.findall(r'"(.*?)"', packages)) == sorted(cli.EXTRAS.values())


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (["--help"], ("demo", "bench", "aot", "weft demo --ranks 4")),
        (["demo", "--help"], ("--kv-heads", "demo.png", "examples:", "generic")),
        (["--version"], ("weft ",)),
    ):
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert stop.value.code == 0
        text = capsys.readouterr().out
        for part in said:
            assert part in text
    assert cli.main([]) == 2
    with pytest.raises(SystemExit):
        cli.main(["weave"])
    assert "invalid choice: 'weave'" in capsys.readouterr().err


def test_batches_follow_from_seed_and_step_alone() -> None:
    corpus = standard_library()
    inputs, targets = corpus.batch(3, 2, 16, seed=5)
    again, _ = standard_library().batch(3, 2, 16, seed=5)
    assert torch.equal(inputs, again)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    for other in (
        corpus.batch(4, 2, 16, seed=5),
        corpus.batch(3, 2, 16, seed=6),
        corpus.batch(3, 2, 16, seed=5, held_out=True),
    ):
        assert not torch.equal(inputs, other[0])
    assert len(corpus.held_out) == pytest.approx(0.05 * len(corpus.train), rel=0.1)


def test_model_is_causal_and_groups_its_heads() -> None:
    model = Llama(LlamaShape(d_model=32, layers=2, heads=4, kv_heads=2, ffn=48, seq_len=16))
    assert model.get_parameter("blocks.0.attention.wqkv.weight").shape == (4 * 8 + 2 * 2 * 8, 32)
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % 256
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_weights_of_other_dtypes(dtype: torch.dtype) -> None:
    model = Llama(LlamaShape(d_model=32, layers=1, heads=4, kv_heads=2, ffn=48, seq_len=16))
    tokens = torch.randint(256, (1, 16))
    expected = model(tokens)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    logits = model(tokens)
    assert logits.dtype == dtype
    torch.testing.assert_close(logits.float(), expected, rtol=0, atol=0.1)


def test_learning_rate_warms_up_and_decays() -> None:
    run = Run(LlamaShape(), steps=100, batch=1, lr=1.0, seed=0)
    rates = [run.learning_rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(0.1, abs=0.01)


def test_a_terminal_may_lack_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert cli.main([]) == 2
    print("±", flush=True)
    assert written.getvalue().endswith(b"?\n")
