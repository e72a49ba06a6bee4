"""`ExplicitRedistributionContext`: no operation moves data unless the program said so.

with ExplicitRedistributionContext():
    x + y                        x [S(0)], y [S(1)]: an error that names the op and both layouts
    x + y.redistribute(...)      runs
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any, Literal

from weft.dtensor.layout.boxes import Layout
from weft.dtensor.move.transfers import move_plan


class ExplicitRedistributionContext:
    """Inside the block, operations refuse to redistribute their arguments by themselves.

    The gather and the reduction that a matmul is fused with count as redistributions. The backward
    pass communicates as well: where it runs inside the block, it is checked like the rest.

    Args:
        enable: False: allow it again, inside an outer block.
        strict: refuse what needs no communication, too (a rank cutting its part of a replica).
        mode: "raise" a RuntimeError, the same on every rank, or "warn".
    """

    def __init__(
        self, enable: bool = True, strict: bool = False, mode: Literal["raise", "warn"] = "raise"
    ) -> None:
        if mode not in ("raise", "warn"):
            raise RuntimeError(f'mode must be "raise" or "warn", got {mode!r}')
        self._enable, self._strict, self._mode = enable, strict, mode

    def __enter__(self) -> ExplicitRedistributionContext:
        _active.contexts.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _active.contexts.pop()

    def _refuses(self, source: Layout, target: Layout) -> bool:
        if not self._enable or source == target:
            return False
        return self._strict or not all(
            step.is_local for step in move_plan(source.closed(), target.closed()).steps
        )


class _Active(threading.local):
    def __init__(self) -> None:
        self.contexts: list[ExplicitRedistributionContext] = []  # innermost last


_active = _Active()


def check_explicit(what: Callable[[], Any], source: Layout, target: Layout | None) -> None:
    """Called before the operation `what()` moves an argument to `target`; None: it stays.

    Raises:
        RuntimeError: inside a block that refuses it.
    """
    if not _active.contexts or target is None:
        return
    context = _active.contexts[-1]
    if not context._refuses(source, target):
        return
    message = (
        f"{what()} would redistribute {source!r} to {target!r}, and may not inside of "
        f"ExplicitRedistributionContext: redistribute(placements={list(target.placements)}) before"
    )
    if context._mode == "raise":
        raise RuntimeError(message)
    warnings.warn(message, stacklevel=2)
