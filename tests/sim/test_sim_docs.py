"""The commands of docs/sim.md, as they stand there, and what they answer."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from needs import needs_interpreter

from weft.cli import main

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = re.findall(r"^weft (sim .*)$", (ROOT / "docs" / "sim.md").read_text(), re.MULTILINE)

pytestmark = needs_interpreter


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the commands of docs/ are to be run; each changes sys.path and sys.argv."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["weft"])


LONG = "exhaustive", "fully_sharded"


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(each, marks=[pytest.mark.slow] * any(word in each for word in LONG))
        for each in COMMANDS
    ],
)
def test_commands(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "--gpu" in command:  # with one: tests/sim/test_sim_gpu.py
        with pytest.raises(SystemExit):
            main(command.split())
        assert "no GPU" in capsys.readouterr().err
        return
    status = main(command.split())
    said = capsys.readouterr()
    if "--hardware" in command:
        assert status == 0 and "virtual time on 2 x H100" in said.out
        assert "all_gather_matmul_kernel" in said.out
    elif "mended" in command or "fully_sharded" in command:
        assert status == 0 and "nothing found" in said.out
        assert ("all interleavings" in said.out) == ("exhaustive" in command)
    else:
        assert status == 1
        assert "RaceError: symmetric buffer 1 of rank" in said.err
        for line in ("40 _all_reduce_kernel", "45 _all_reduce_kernel", "seed=0, schedule=0"):
            assert line in said.err
        again = "examples/sim_planted_bug.py:call --ranks 3 --seed 0 --schedule 0"
        assert said.err.endswith(f"here by weft sim {again}\n")


def test_there_are_commands() -> None:
    assert len(COMMANDS) == 8


def test_a_script_finds_its_arguments_and_its_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group()\n"
        "x = torch.tensor([int(os.environ['RANK'])])\n"
        "dist.all_reduce(x)\n"
        "sys.exit(0 if x.item() == int(sys.argv[1]) else f'got {x.item()}')\n"
    )
    command = ["sim", str(script), "--ranks", "3", "--schedules", "2", "--"]
    assert main([*command, "3"]) == 0
    assert "3 ranks, 2 schedules" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="exits with 'got 3'"):
        main([*command, "4"])


def test_a_function_that_exits(tmp_path: Path) -> None:
    script = tmp_path / "leaves.py"
    script.write_text("import sys\ndef fn(rank):\n    sys.exit(3 * rank)\n")
    with pytest.raises(RuntimeError, match=r"leaves.py:fn exits with 3"):
        main(["sim", f"{script}:fn", "--ranks", "2"])


@pytest.mark.slow
def test_a_kernel_of_ones_own_is_checked_and_compiled(capfd: pytest.CaptureFixture[str]) -> None:
    command = ["sim", "examples/own_kernel.py:check", "--ranks", "2"]
    assert main([*command, "--schedules", "200", "--replay"]) == 0
    assert main([*command, "--hardware", "h100", "--compile"]) == 0
    said = capfd.readouterr().out
    assert re.search(r"^sm_90 +float32 +_scatter_norm_kernel +ranks 0 to 1 .* 0 +\d", said, re.M)
    for line in (ROOT / "docs" / "own_kernels.md").read_text().splitlines():
        if line.startswith(("weft ", "torchrun ")):
            script, _, function = line.partition("examples/")[2].partition(" ")[0].partition(":")
            assert not function or f"def {function}(" in (ROOT / "examples" / script).read_text()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["examples/sim_ring.py", "--hardware", "h100", "--compile"], "ring.py:FUNCTION"),
        (["examples/sim_ring.py", "--hardware", "h100", "--symmetric"], "add --no-numerics"),
        (["nowhere.py:call"], "no script 'nowhere.py': give FILE or FILE:FUNCTION"),
        (["examples/sim_ring.py", "--schedules", "few"], "a number from 1 on or `exhaustive`"),
        (["examples/sim_ring.py", "--schedules", "0"], "a number from 1 on or `exhaustive`"),
        (["examples/sim_ring.py", "--timeout", "-1"], "--timeout must be above 0 seconds, got -1"),
        (["examples/sim_ring.py", "--timeout", "nan"], "--timeout must be above 0 seconds"),
        (
            ["examples/sim_ring.py", "--hardware", "h100", "--ranks", "9"],
            "h100 is a domain of 8 ranks, got 9",
        ),
        (
            ["examples/sim_ring.py", "--hardware", "h100", "--trace", "examples"],
            "'examples' is a folder",
        ),
        (
            ["examples/sim_ring.py", "--hardware", "h100", "--plot", "x.txt"],
            "--plot writes .png, .svg, .pdf, .jpg, got 'x.txt'",
        ),
        (["examples/sim_ring.py", "--plot", "x.png"], "are for virtual time: add --hardware"),
        (["examples/sim_ring.py", "--sched", "5"], "unrecognized arguments: --sched 5"),
        (["examples/sim_ring.py", "--ranks", "0"], "--ranks must be in 1..128, got 0"),
        (["examples/sim_ring.py", "--schedule", "x"], "a schedule is a number or like '17:2,40:0'"),
        (["examples/sim_ring.py", "--schedule", ""], "as an error named it, got ''"),
        (["examples/sim_ring.py", "--schedules", ""], "a number from 1 on or `exhaustive`"),
        (["examples/sim_ring.py", "--schedule", "0", "--schedules", "5"], "leave out --schedules"),
        (["examples/sim_ring.py", "--ranks", "3", "--hosts", "2x2"], "leave out --ranks 3"),
        (
            ["examples/sim_ring.py", "--hardware", "h100", "--trace", "nowhere/x.json"],
            "no folder 'nowhere' to write 'x.json' to",
        ),
    ],
)
def test_wrong_command_lines(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["sim", *arguments])
    assert stopped.value.code == 2 and text in capsys.readouterr().err
