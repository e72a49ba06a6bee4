"""`weft checkpoint`: look at a checkpoint folder, check it, make files of it, offline."""

from __future__ import annotations

import argparse
import fnmatch
import math
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.tensor import Replicate, Shard

from weft.dtensor.checkpoint.files import Entry, Stored, merge, reshard
from weft.dtensor.checkpoint.metadata import CheckpointError
from weft.dtensor.layout.placements import Placements
from weft.dtensor.notation import parse_colossalai, parse_torch
from weft.errors import printable

_DESCRIPTION = """\
Works on the folders that weft.dtensor.checkpoint.save and torch.distributed.checkpoint.save write,
in one process, without GPUs or a process group. Memory holds one stored piece at a time.

Loading a checkpoint needs none of this: weft.dtensor.checkpoint.load takes it into any layout, on
any number of ranks.
"""
_EPILOG = """\
examples:
  weft checkpoint info run/step-1000                 tensors, shapes, files, and what is missing
  weft checkpoint info run/step-1000 --check         read every piece, compare check sums
  weft checkpoint merge run/step-1000 model.safetensors
  weft checkpoint merge run/step-1000 model.pt       for torch.load, with what is no tensor
  weft checkpoint reshard run/step-1000 parts --mesh 8
                                                     8 files, each tensor cut along its first dim
  weft checkpoint reshard run/step-1000 parts --mesh 2x4 \\
      --layout '*.w2.weight=[R, S(1)]' --layout '*norm*=[R, R]' --layout '*=[R, S(0)]'
                                                     first match counts; [S0, R] is read as well
"""


_MOST_FILES = 1 << 16
_MOST_DIGITS = 5  # of a size of the mesh


class _ProgressLine:
    """A progress bar on a terminal; nothing elsewhere."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.done = what, max(total, 1), 0
        self._shown = 0.0
        self._on = sys.stderr.isatty()

    def __call__(self, nbytes: int) -> None:
        self.done += nbytes
        if self._on and (time.monotonic() - self._shown > 0.1 or self.done >= self.total):
            self._shown = time.monotonic()
            share = min(self.done / self.total, 1.0)
            blocks = "#" * int(30 * share)
            text = f"\r{self.what} [{blocks:<30}] {share:4.0%} of {_size(self.total)}"
            print(text, end="\n" if share == 1.0 else "", file=sys.stderr, flush=True)


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def main(argv: Sequence[str] | None = None) -> int:
    """Run `weft checkpoint`.

    Returns:
        The exit status: 1 if `info` has found damage, 2 if a command could not do its work.
    """
    parser = argparse.ArgumentParser(
        prog="weft checkpoint",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="info|merge|reshard")
    info = commands.add_parser("info", help="list what is stored, and what is missing")
    info.add_argument("path", type=Path, help="the checkpoint folder")
    info.add_argument("--check", action="store_true", help="read every piece, compare check sums")
    merging = commands.add_parser("merge", help="write whole tensors to one file")
    merging.add_argument("path", type=Path, help="the checkpoint folder")
    merging.add_argument("out", type=Path, help="a new .safetensors, .pt or .pth file")
    sharding = commands.add_parser("reshard", help="write one file for each rank of a mesh")
    sharding.add_argument("path", type=Path, help="the checkpoint folder")
    sharding.add_argument("out", type=Path, help="a new folder")
    sharding.add_argument("--mesh", required=True, help="sizes of the mesh: 8, or 2x4")
    sharding.add_argument(
        "--layout",
        action="append",
        default=[],
        metavar="PATTERN=LAYOUT",
        help="placements of the tensors whose names match, one per mesh dim: '*.bias=[R, S(0)]'; "
        "without any: cut along the first dim by the last mesh dim, replicated over the others",
    )
    sharding.add_argument(
        "--format", choices=("safetensors", "pt"), default="safetensors", help="of the files"
    )
    args = parser.parse_args(argv)
    try:
        if args.command == "info":
            return _info(args.path, args.check)
        stored = Stored(args.path)
        if args.command == "merge":
            left_out = merge(stored, args.out, _ProgressLine("merge", stored.nbytes))
            print(f"{args.out}: {len(stored.tensors)} tensors, {_size(stored.nbytes)}")
            if left_out:
                names = printable(", ".join(sorted(left_out)))
                print(f"left out, no tensors: {names} (a .pt file has them)")
        else:
            _reshard(stored, args)
    except (CheckpointError, ValueError, NotImplementedError, OSError) as error:
        for line in f"weft checkpoint: {error}".split("\n"):
            print(printable(line), file=sys.stderr)
        return 2
    return 0


def _info(path: Path, check: bool) -> int:
    stored = Stored(path)
    rows = [
        (
            printable(entry.name),
            "x".join(map(str, entry.shape)) or "scalar",
            str(entry.dtype).removeprefix("torch."),
            _size(entry.nbytes),
            str(len(entry.pieces)),
            str(len({piece.file for piece in entry.pieces})),
        )
        for entry in stored.tensors.values()
    ]
    rows.insert(0, ("tensor", "shape", "dtype", "size", "pieces", "files"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())
    print(f"{len(stored.tensors)} tensors, {_size(stored.nbytes)}")
    if stored.values:
        print(printable(f"and no tensors: {', '.join(sorted(stored.values))}"))
    problems = list(stored.problems(read=check, progress=_ProgressLine("check", stored.nbytes)))
    for problem in problems:
        print(printable(f"DAMAGED {problem}"))
    if not problems:
        print("every piece is sound" if check else "every piece is there (--check reads them)")
    if check and stored.unsummed:
        print(
            f"{stored.unsummed} items have no check sum, as torch.distributed.checkpoint.save has "
            f"written them: only what their archives tell was compared"
        )
    return 1 if problems else 0


def _reshard(stored: Stored, args: argparse.Namespace) -> None:
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", args.mesh):
        raise ValueError(f"--mesh must be sizes like 8 or 2x4, got {args.mesh!r}")
    sizes = tuple(int(size) for size in args.mesh.split("x") if len(size) <= _MOST_DIGITS)
    if len(sizes) <= args.mesh.count("x") or math.prod(sizes) > _MOST_FILES:
        raise ValueError(
            f"--mesh {args.mesh[:40]}: one file for each rank, {_MOST_FILES} at most; name a "
            f"smaller mesh, dim by dim"
        )
    layouts: list[tuple[str, str]] = []
    for given in args.layout:
        pattern, equals, layout = given.partition("=")
        if not equals:
            raise ValueError(f"--layout {given!r} is not like PATTERN=LAYOUT")
        layouts.append((pattern, layout))
        if not fnmatch.filter(stored.tensors, pattern):
            told = f"weft checkpoint: --layout {given!r} matches no tensor (info lists their names)"
            print(printable(told), file=sys.stderr)

    def placements_of(entry: Entry) -> Placements:
        for pattern, layout in layouts:
            if fnmatch.fnmatch(entry.name, pattern):
                # One entry a tensor dim, with mesh dims by number, has no brackets inside.
                if "(" not in layout and "S" in layout:
                    return parse_colossalai(layout, sizes)
                found = parse_torch(layout)
                most = max(entry.shape, default=1)
                for placement in found:
                    if (pieces := getattr(placement, "split_factor", 1)) > most:
                        raise ValueError(
                            f"--layout {layout!r}: {entry.name} has shape {entry.shape} and is "
                            f"not to be cut into {pieces} pieces; name as many as a dim has rows"
                        )
                return found
        last = Shard(0) if entry.shape else Replicate()
        return (*(Replicate() for _ in sizes[1:]), last)

    written = 0

    def count(nbytes: int) -> None:
        nonlocal written
        written += nbytes
        bar(nbytes)

    bar = _ProgressLine("reshard", stored.nbytes)
    reshard(stored, args.out, sizes, placements_of, f".{args.format}", count)
    print(f"{args.out}: {args.mesh} ranks, {len(stored.tensors)} tensors, {_size(written)} in all")
