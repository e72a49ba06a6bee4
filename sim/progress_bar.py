"""A progress bar for what takes long, on an interactive terminal."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

_SHOW_AFTER_S = 1.0


@contextmanager
def progress(total: int | None, of: str = "schedules") -> Iterator[Callable[[], None]]:
    """Yields what to call after each of so many; `total` is None if their number is not known.

    Needs rich, and says nothing without it, off a terminal, and in short runs.
    """
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn(of),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = bar.add_task("", total=total)
    start, shown = time.monotonic(), False
    with ExitStack() as stack:

        def advance() -> None:
            nonlocal shown
            bar.advance(task)
            if not shown and time.monotonic() - start > _SHOW_AFTER_S:
                shown = True
                stack.enter_context(bar)

        yield advance
