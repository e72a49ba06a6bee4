"""Where in the source an access was made, kept as a small number until somebody asks."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType

import torch
import triton

# Frames of these are machinery, not the code that is looked at.
_MACHINERY = (
    str(Path(triton.__file__).parent),
    str(Path(torch.__file__).parent),
    str(Path(__file__).parent),
    str(Path(__file__).resolve().parent),
)
_SIGNALS = "signals.py"
_DEPTH = 4

Frames = tuple[tuple[CodeType, int], ...]


class Sites:
    """Numbers the distinct call paths that it is shown."""

    def __init__(self) -> None:
        self._numbers: dict[Frames, int] = {}
        self._frames: list[Frames] = []
        self._machinery: dict[CodeType, bool] = {}

    def here(self) -> int:
        """The number of the caller's call path: the innermost frames that are not machinery."""
        frame: FrameType | None = sys._getframe(1)
        found: list[tuple[CodeType, int]] = []
        machinery = self._machinery
        while frame is not None and len(found) < _DEPTH:
            code = frame.f_code
            skip = machinery.get(code)
            if skip is None:
                skip = code.co_filename.startswith((*_MACHINERY, "<"))
                machinery[code] = skip
            if skip:
                if found and code.co_name == "run_strand":
                    break
            else:
                found.append((code, frame.f_lasti))
            frame = frame.f_back
        key = tuple(found)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._frames)
            self._frames.append(key)
        return number

    def text(self, number: int) -> str:
        """`file:line function`, innermost first; helpers of weft's signals only if all are."""
        frames = self._frames[number] if number >= 0 else ()
        if not frames:
            return "before its first signal"
        outside = [f for f in frames if not f[0].co_filename.endswith(_SIGNALS)]
        return " < ".join(_place(*frame) for frame in (outside or list(frames))[:3])


def _place(code: CodeType, instruction: int) -> str:
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
