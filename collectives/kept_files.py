"""Files of measured rates: where they are kept, and what is taken from them.

In WEFT_CACHE_DIR and nowhere else if that is set; if not, in ~/.cache/weft or, where that cannot be
written, in a folder of the user's own for temporary files.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import tempfile
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from weft import settings


def digest(*conditions: object) -> str:
    """A name for what was measured under these conditions."""
    return hashlib.sha256(repr(conditions).encode()).hexdigest()[:16]


def folders() -> list[Path]:
    """Where measurements are looked for and kept, first choice first.

    Not where others could put them; a folder that the user has named is the user's to trust.
    """
    found = []
    with suppress(RuntimeError):  # a user without a home, as in containers
        found.append(settings.cache_dir())
    if settings.cache_dir_is_set():
        return found
    with suppress(FileNotFoundError):
        found.append(Path(tempfile.gettempdir()) / f"weft-{os.getuid()}")
    return [folder for folder in found if _is_ours(folder)]


def _is_ours(folder: Path) -> bool:
    """Whether nobody else may have put there what is in a folder, or would come to be in it."""
    try:
        found = folder.lstat()  # a link, which anybody can make in /tmp, is no folder
    except OSError:
        return True  # there is none, or none to be read
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return mine and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def load(name: str, fields: Collection[str]) -> dict[str, Any] | None:
    """The rates that are kept under a name, if they have these `fields`."""
    for folder in folders():
        with suppress(OSError, ValueError, RecursionError):
            kept: Any = json.loads((folder / name).read_text())
            if isinstance(kept, dict) and kept.keys() == set(fields) and _are_rates(kept):
                return kept
    return None


def _are_rates(kept: dict[str, Any]) -> bool:
    """Whether values are what measuring could give: NaN, say, would choose any engine."""

    def is_rate(name: str, value: Any) -> bool:
        if name == "flops":
            if not isinstance(value, dict) or str(torch.float32) not in value:
                return False
            return all(is_rate("", each) and each > 0 for each in value.values())
        if name == "between":
            rows: list[Any] = value if isinstance(value, list) else [None]
            square = all(isinstance(row, list) and len(row) == len(rows) for row in rows)
            return square and all(is_rate("", each) for row in rows for each in row)
        return type(value) in (int, float) and 0 <= value < math.inf

    return all(is_rate(name, value) for name, value in kept.items())


def save(name: str, rates: dict[str, Any], *, first: bool = False) -> None:
    """Keep `rates`: with `first`, only if nothing is kept there."""
    for folder in folders():
        # Several groups may write at once; a reader sees one whole file or the other.
        part = folder / f"{name}.{os.getpid()}"
        with suppress(OSError):  # a read-only home, or a full one
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not (settings.cache_dir_is_set() or _is_ours(folder)):
                continue  # somebody has been quicker
            part.write_text(json.dumps(rates, indent=1))
            try:
                if first:
                    with suppress(FileExistsError):
                        (folder / name).hardlink_to(part)
                else:
                    part.replace(folder / name)
                return
            finally:
                part.unlink(missing_ok=True)
