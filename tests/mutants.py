"""Copies of modules with faults planted in them: to see whether a simulation finds them.

Example:
    broken = mutant(signals, ('sem="release"', 'sem="relaxed"'))
    kernel = mutant(all_gather_kernel, signals=broken)
"""

from __future__ import annotations

import inspect
import itertools
import linecache
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_numbers = itertools.count()


def mutant(module: ModuleType, *edits: tuple[str, str], **names: Any) -> ModuleType:
    """A copy of `module` in which each edit's text is replaced by the other, and `names` are set.

    Raises:
        ValueError: a text does not occur exactly once.
    """
    source = inspect.getsource(module)
    for old, new in edits:
        if source.count(old) != 1:
            raise ValueError(
                f"the text to replace must occur once in {module.__name__}, it does "
                f"{source.count(old)} times: {old!r}"
            )
        source = source.replace(old, new)
    origin = Path(str(module.__file__))
    path = f"{origin.parent.name}-mutant-{next(_numbers)}/{origin.name}"
    # There is no such file: the lines of its functions are looked up here.
    linecache.cache[path] = len(source), None, source.splitlines(keepends=True), path
    copy = ModuleType(f"{module.__name__}_mutant")
    copy.__file__, copy.__package__ = path, module.__package__
    sys.modules[copy.__name__] = copy  # dataclasses look themselves up there
    try:
        exec(compile(source, path, "exec"), vars(copy))
    finally:
        del sys.modules[copy.__name__]
    vars(copy).update(names)
    return copy
