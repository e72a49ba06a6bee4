"""What is kept for later calls: plans, launches, choices. All of it is bounded, told and clearable.

Functions keep theirs by `functools.lru_cache`, and are found where they stand. Dicts are
`KeptDict`s, or registered. `weft.close` clears both, beside the memory that groups hold.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, NamedTuple, TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

_FOLDERS = ("weft.collectives.", "weft.kernels.", "weft.dtensor.")


class KeptEntries(NamedTuple):
    """What is kept in one place.

    Attributes:
        name: the function or the dict, with its module.
        held, most: how many entries there are, and may be; bytes of tables where `unit` says so.
        unit: "entries" or "bytes".
    """

    name: str
    held: int
    most: int
    unit: str = "entries"

    def __str__(self) -> str:
        return f"{self.name}: {self.held:,} of {self.most:,} {self.unit}"


_dicts: dict[str, tuple[MutableMapping[Any, Any], int, Callable[[], int] | None]] = {}


def register(
    name: str,
    kept: MutableMapping[Any, Any],
    most: int,
    nbytes: Callable[[], int] | None = None,
) -> None:
    """Have `caches` tell of a dict, and `forget` clear it.

    Args:
        most: entries that its module lets it have; bytes if `nbytes` tells how many are held.
    """
    _dicts[name] = kept, most, nbytes


class KeptDict(dict[_Key, _Value]):
    """A dict that is emptied rather than hold more than `most` entries when one is assigned.

    Args:
        name: by which `caches` tells of it, and `forget` clears it; without one neither does.
    """

    def __init__(self, most: int, name: str = "") -> None:
        super().__init__()
        self.most = most
        if name:
            register(name, self, most)

    def __setitem__(self, key: _Key, value: _Value) -> None:
        if len(self) >= self.most and key not in self:
            self.clear()
        super().__setitem__(key, value)


def _functions() -> Iterator[tuple[str, Any]]:
    for name, module in list(sys.modules.items()):
        if name.startswith(_FOLDERS):
            for function in list(vars(module).values()):
                if hasattr(function, "cache_info") and function.__module__ == name:
                    yield f"{name}.{function.__name__}", function


def caches() -> list[KeptEntries]:
    """What this process keeps for later calls, in the modules that it has imported.

    Example:
        >>> print(*weft.caches(), sep="\\n")
        weft.dtensor.dispatch.dispatch._plans: 412 of 8,192 entries
        ...
    """
    told = [
        KeptEntries(name, nbytes() if nbytes else len(kept), most, "bytes" if nbytes else "entries")
        for name, (kept, most, nbytes) in _dicts.items()
    ]
    for name, function in _functions():
        info = function.cache_info()
        told.append(KeptEntries(name, info.currsize, info.maxsize))
    return sorted(told)


def forget() -> None:
    """Clear all of them, but for single facts about the machine."""
    for kept, _, _ in _dicts.values():
        kept.clear()
    for _, function in _functions():
        if function.cache_info().maxsize != 1:
            function.cache_clear()
