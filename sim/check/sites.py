"""Where in the source an access was made, kept as a small number until it is needed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType

import torch
import triton

from weft.collectives.device import addresses, failures, flagged, polling, signals, waits

# Frames of these are machinery, not the code that is looked at.
_MACHINERY = (
    str(Path(triton.__file__).parent),
    str(Path(torch.__file__).parent),
    str(Path(__file__).parent.parent),  # all of sim, as it is imported and as it lies
    str(Path(__file__).resolve().parent.parent),
)
_SIGNALS = tuple(
    path
    for module in (addresses, failures, flagged, polling, signals, waits)
    for path in (str(module.__file__), str(Path(str(module.__file__)).resolve()))
)
_DEPTH = 3
_MACHINE, _HELPER, _OWN, _PROGRAM = range(4)

Frames = tuple[tuple[CodeType, int], ...]


class Sites:
    """Numbers distinct call paths."""

    def __init__(self) -> None:
        self._numbers: dict[Frames, int] = {}
        self._frames: list[Frames] = []
        self._kinds: dict[CodeType, int] = {}

    def here(self) -> int:
        """The number of the caller's call path: the innermost frames that are not machinery, and
        of weft's signals only if there is no other; then the first of the program, if none was."""
        frame: FrameType | None = sys._getframe(1)
        found: list[tuple[CodeType, int]] = []
        helper: tuple[tuple[CodeType, int], ...] = ()
        kinds = self._kinds
        seen = False  # a frame of the program
        while frame is not None and not (seen and len(found) >= _DEPTH):
            code = frame.f_code
            kind = kinds.get(code)
            if kind is None:
                kind = kinds[code] = _kind(frame)
            if kind == _PROGRAM or (kind == _OWN and len(found) < _DEPTH):
                found.append((code, frame.f_lasti))
                seen |= kind == _PROGRAM
            elif kind == _HELPER:
                helper = helper or ((code, frame.f_lasti),)
            elif code.co_name == "run_strand":
                break
            frame = frame.f_back
        key = tuple(found) or helper
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._frames)
            self._frames.append(key)
        return number

    def text(self, number: int) -> str:
        """`file:line function`, innermost first."""
        frames = self._frames[number] if number >= 0 else ()
        return " < ".join(_file_and_line(*frame) for frame in frames) or "before its first signal"


def _kind(frame: FrameType) -> int:
    filename = frame.f_code.co_filename
    if filename.startswith((*_MACHINERY, "<")):
        return _MACHINE
    if filename in _SIGNALS:
        return _HELPER
    module = frame.f_globals.get("__name__", "").partition(".")[0]
    return _OWN if module == "weft" or module in sys.stdlib_module_names else _PROGRAM


def _file_and_line(code: CodeType, instruction: int) -> str:
    line = next(
        (
            line
            for start, stop, line in code.co_lines()
            if line is not None and start <= instruction < stop
        ),
        code.co_firstlineno,
    )
    path = Path(code.co_filename)
    return f"{path.parent.name}/{path.name}:{line} {code.co_name}"
