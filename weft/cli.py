"""The command line: `weft COMMAND ...`. Each command has its own options and help."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import weft

# For each command: the module whose `main(argv)` runs it, and what it is for.
_COMMANDS = {
    "demo": ("weft.demo.cli", "train a small Llama on local ranks, beside a one-process reference"),
    "bench": ("weft.bench.cli", "time weft beside its bounds and its peers"),
    "doctor": (
        "weft.bench.commands.doctor",
        "what this machine has, and whether weft's main job runs here",
    ),
    "sim": ("weft.sim.cli", "run a script on virtual ranks: races, deadlocks, out of bounds"),
    "checkpoint": (
        "weft.dtensor.checkpoint.cli",
        "look at a checkpoint, check it, merge it, cut it",
    ),
    "plan": (
        "weft.bench.commands.plan",
        "lay out a model on a mesh of chips: predicted step time and memory",
    ),
    "tune": (
        "weft.bench.commands.tune",
        "find the quickest launches of the fused matmuls on this machine",
    ),
    "aot": ("weft.kernels.compile.aot", "compile every kernel for named chips, with no GPU"),
}

# What the commands draw with, and the library itself does without: modules, and the packages that
# have them. weft itself is on no index, so that `pip install weft[bench]` would find nothing.
EXTRAS = {
    "matplotlib": "matplotlib",
    "pytest_benchmark": "pytest-benchmark",
    "rich": "rich",
    "yaml": "pyyaml",
}
PICTURES = (".png", ".svg", ".pdf", ".jpg")
INSTALL_EXTRAS = f"pip install {' '.join(EXTRAS.values())}"

_EPILOG = """\
examples:
  weft demo                         two minutes: train, compare, draw out/demo/demo.png
  weft demo --ranks 4 --steps 50    on four ranks, and shorter
  weft demo --engine generic        without fusion, to see what it is worth
  weft bench --quick --out report   which engine is the quickest here, and how near the limit
  weft COMMAND --help               what a command does, and its options

`python -m weft` is the same as `weft`.
"""


class Parser(argparse.ArgumentParser):
    """The options of a command, whose `about` is shown line by line."""

    def __init__(self, prog: str, about: str | None, **options: Any) -> None:
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, description=about, formatter_class=raw, **options)


def at_least(least: int, why: str = "") -> Callable[[str], int]:
    """A `type=` of argparse: integers from `least` on."""

    def number(text: str) -> int:
        try:
            if (value := int(text)) >= least:
                return value
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}{why}")

    return number


# A `type=` of --ranks, where one rank has nothing to do.
several = at_least(2, ": one rank has no peers")


def new_file(text: str) -> Path:
    """A `type=` of argparse: a file that can be written, which is told before the work."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"no folder {str(path.parent)!r} to write {path.name!r} to"
        )
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder: name a file in it")
    return path


def new_picture(text: str) -> Path:
    """A `type=` of argparse, as `new_file`, of pictures."""
    path = new_file(text)
    if path.suffix not in PICTURES:
        raise argparse.ArgumentTypeError(f"must be {', '.join(PICTURES)}, got {path.name!r}")
    return path


def device_and_ranks(
    parser: argparse.ArgumentParser, device: Literal["cpu", "cuda"] | None, ranks: int | None
) -> tuple[Literal["cpu", "cuda"], int]:
    """Where ranks compute, and how many: as given, else on all GPUs, else two on the CPU."""
    import torch

    gpus = torch.cuda.device_count()
    if device == "cuda" and not gpus:
        parser.error("--device cuda: torch sees no GPU here; leave it out to run on the CPU")
    device = device or ("cuda" if gpus else "cpu")
    return device, ranks or (max(2, gpus) if device == "cuda" else 2)


def make_folder(path: Path) -> None:
    """Make the folder of --out: now, not when hours of work are to be written there.

    Raises:
        ValueError: nothing can be written there.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(f"--out {path}: cannot write there, {error.strerror}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # of what a terminal's encoding lacks, as ASCII ±
    commands = "".join(f"  {name:<12}{purpose}\n" for name, (_, purpose) in _COMMANDS.items())
    parser = Parser(
        "weft",
        "Triton kernels that fuse computation with communication.",
        usage="weft [-h] [--version] COMMAND ...",
        epilog=f"commands:\n{commands}\n{_EPILOG}",
    )
    parser.add_argument("--version", action="version", version=f"weft {weft.__version__}")
    parser.add_argument("command", choices=_COMMANDS, metavar="COMMAND", help="one of those below")
    parser.add_argument("args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = list(sys.argv[1:] if argv is None else argv)
    if not given:
        parser.print_help()
        return 2
    parsed = parser.parse_args(given)
    module, _ = _COMMANDS[parsed.command]
    # Virtual ranks compute on the CPU unless told otherwise, even if there are GPUs.
    if parsed.command == "sim" and "--gpu" not in parsed.args:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    try:
        command: Callable[[list[str]], int | None] = importlib.import_module(module).main
        return command(parsed.args) or 0
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in EXTRAS:
            raise
        print(f"weft {parsed.command} needs {error.name}: {INSTALL_EXTRAS}", file=sys.stderr)
        return 2
