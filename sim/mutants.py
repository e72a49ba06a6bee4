"""Copies of modules with faults planted in them: to see whether a simulation finds them.

broken = mutant(signals, ('sem="release"', 'sem="relaxed"'))
kernel = mutant(all_gather_gemm, signals=broken)
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from weft.collectives import signals

_numbers = itertools.count()
# Kernels are compiled from their source file when they first run: the files must stay.
_folder = tempfile.TemporaryDirectory(prefix="weft-mutants-")


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
    folder = Path(_folder.name) / f"{origin.parent.name}-mutant-{next(_numbers)}"
    folder.mkdir()
    path = folder / origin.name
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_mutant", path)
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = copy  # dataclasses look themselves up there
    try:
        spec.loader.exec_module(copy)
    finally:
        del sys.modules[spec.name]
    vars(copy).update(names)
    if "on_poll" in vars(copy):
        vars(copy)["on_poll"] = lambda address, value: signals.on_poll(address, value)
        vars(copy)["on_wait"] = lambda *wait: signals.on_wait and signals.on_wait(*wait)
    return copy
