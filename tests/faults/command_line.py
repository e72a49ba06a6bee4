"""The command line on garbage: files of every format that it reads, JSON, numbers, names."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from flips import garbage
from trials import ROOT

from weft.bench.published.rows import SHIPPED
from weft.cli import main
from weft.collectives.ranks import flight
from weft.dtensor.checkpoint import save

_EACH, _SECONDS = 40, 20
_ODD = (
    "nan", "inf", "-inf", "-1", "0", "1e9", "1e400", "99999999", "9" * 5000, "٣", "", " ",
    "\x1b[31m", "../../etc/passwd", "/dev/null", "/", "x" * 300, "1x", "0x0", "8x0", "2x99999999",
    "🦆",
)  # fmt: skip


def _odd_json(chance: random.Random, depth: int = 0) -> Any:
    """A value that JSON can have."""
    how = chance.randrange(6 if depth < 3 else 4)
    if how == 0:
        return chance.choice((None, True, False, 0, -1, 1 << 80, 1e308, float("nan"), float("inf")))
    if how == 1:
        return chance.choice((*_ODD, "<script>"))
    if how in (2, 3):
        return chance.randrange(-9, 99)
    if how == 4:
        return [_odd_json(chance, depth + 1) for _ in range(chance.randrange(4))]
    names = chance.sample(("suite", "cases", "name", "variants", "rounds_us", "entries"), 3)
    return {name: _odd_json(chance, depth + 1) for name in names}


def odd_file(chance: random.Random, like: bytes) -> bytes:
    """A file like another, changed: in its bytes, in a value of its JSON, or all of it."""
    how = chance.randrange(6)
    if how == 0:
        return chance.randbytes(chance.randrange(200))
    if how == 1:
        return json.dumps(_odd_json(chance)).encode()
    if how == 2:
        return b'{"a":' * 20_000 if chance.random() < 0.5 else b"[" * 100_000
    if how < 5:
        with contextlib.suppress(ValueError):
            value = json.loads(like)
            for _ in range(chance.randint(1, 3)):
                _change(chance, value)
            return json.dumps(value).encode()
    return garbage(chance, like)


def _change(chance: random.Random, value: Any) -> None:
    """Change something deep in a JSON value."""
    while isinstance(value, (dict, list)) and value:
        key = (
            chance.choice(list(value)) if isinstance(value, dict) else chance.randrange(len(value))
        )
        below = value[key]
        if not isinstance(below, (dict, list)) or not below or chance.random() < 0.2:
            if isinstance(value, dict) and chance.random() < 0.3:
                del value[key]
            else:
                value[key] = _odd_json(chance)
            return
        value = below


def _a_command(chance: random.Random, folder: Path) -> tuple[list[str], bool]:
    """Arguments of `weft`, and whether something in them must be refused."""
    odd, file = chance.choice(_ODD), folder / "file"
    made = odd_file(chance, chance.choice(sorted(folder.glob("*.like"))).read_bytes())
    results = folder / "a.json"
    results.write_bytes((folder / "results.like").read_bytes())
    file.write_bytes(made)
    command = chance.randrange(12)
    if command == 0:
        for name in (".metadata", "__0_0.distcp"):
            (folder / name).unlink(missing_ok=True)
        checkpoint = folder / "checkpoint"
        target = chance.choice(sorted(checkpoint.iterdir()))
        kept = target.read_bytes()
        target.write_bytes(garbage(chance, kept))
        action = chance.choice(
            (["info"], ["info", "--check"], ["merge"], ["reshard", "--mesh", "2"])
        )
        out = [str(folder / f"out{chance.random()}.pt")] * (action[0] != "info")
        return ["checkpoint", action[0], str(checkpoint), *out, *action[1:]], False
    if command == 1:
        return ["checkpoint", chance.choice(("info", "merge")), odd, str(folder / "x.pt")], True
    if command == 2:
        mesh = chance.choice((["--mesh", odd], ["--mesh", "2", "--layout", f"*={odd}"]))
        return ["checkpoint", "reshard", str(folder / "sound"), str(folder / "r"), *mesh], False
    if command == 3:
        return ["bench", "compare", *chance.sample((str(results), str(file)), 2)], False
    if command == 4:
        return ["bench", "compare", str(results), str(results), "--max-regression", odd], False
    if command == 5:
        return ["bench", "compare", odd, str(file)], True
    if command == 6:
        return ["bench", "published", str(file) if chance.random() < 0.7 else odd], False
    if command == 7:
        numbers = ["8", "8", "8", "2"]
        numbers[chance.randrange(4)] = chance.choice(
            ("nan", "-1", "", "x", "1e9", "0.5", "\x1b[2J")
        )
        return ["bench", "explain", "matmul_all_reduce", *numbers], True
    if command == 8:
        option = chance.choice(("--ranks", "--schedules", "--timeout", "--schedule", "--hardware"))
        script = str(file) if chance.random() < 0.5 else f"{file}:{odd}"
        (folder / "file").write_bytes(b"\x00" + made)  # no Python that could run
        return ["sim", script, option, odd], True
    if command == 9:
        (folder / "rings" / "x.ring").write_bytes(made)
        return [
            "doctor",
            "--flight",
            str(folder / "rings") if chance.random() < 0.8 else odd,
        ], False
    if command == 10:
        option = chance.choice(("--ranks", "--steps", "--seed", "--engine"))
        return ["demo", option, chance.choice(("nan", "x", "", "1e9", "0.5", "\x1b[2J"))], True
    return ["aot", "--arch", odd], True


@contextlib.contextmanager
def _bounded(where: str) -> Iterator[None]:
    def late(*_: object) -> None:
        raise AssertionError(f"{where}: not done within {_SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def command_lines(chance: random.Random, folder: Path) -> Iterator[None]:
    for name in ("checkpoint", "sound"):
        save({"w": torch.ones(4, 6), "b": torch.ones(6), "steps": [3]}, folder / name)
    results = ROOT / "bench" / "results"
    (folder / "rings").mkdir()
    flight.FlightRecorder(folder / "rings")
    (ring,) = (folder / "rings").glob("*.ring")
    for name, like in {
        "results.like": results / "loss.json",
        "rows.like": SHIPPED,
        "ring.like": ring,
    }.items():
        (folder / name).write_bytes(like.read_bytes())
    for _ in range(_EACH):
        argv, refused = _a_command(chance, folder)
        out, err = io.StringIO(), io.StringIO()
        with _bounded(repr(argv)), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = main(argv)
            except SystemExit as end:  # argparse's
                status = end.code if isinstance(end.code, int) else 1
            except Exception as error:
                raise AssertionError(f"weft {argv!r}: {type(error).__name__}: {error}") from error
        said = err.getvalue()
        told = f"weft {argv!r}: exit status {status}\n{said}"
        assert status in (0, 1, 2) and "Traceback" not in said, told
        assert not refused or status == 2, told
        lines = [line for line in said.splitlines() if not line.startswith("  ")]  # details
        refusals = [line for line in lines if re.match(r"weft\b.*: .", line)]
        assert status != 2 or refusals == lines[-1:], told
        shown = out.getvalue() + said
        for given in argv:  # argparse shows arguments as they are
            shown = shown.replace(given, "")
        assert not re.search(r"[\x00-\x08\x0e-\x1f]", shown), told
        yield
