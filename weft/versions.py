"""The versions that weft is tested with: `make test-oldest`, `make test`, `make test-newest`."""

from __future__ import annotations

import os
import platform
import warnings
from importlib.metadata import PackageNotFoundError, version

OLDEST = {"python": (3, 10), "torch": (2, 11), "triton": (3, 6)}
NEWEST = {"python": (3, 14), "torch": (2, 15), "triton": (3, 9)}


def installed_version(name: str) -> str | None:
    """The version of Python or of a package here; None where the package is not installed."""
    try:
        return platform.python_version() if name == "python" else version(name)
    except PackageNotFoundError:
        return None


def release(text: str) -> tuple[int, int]:
    """Major and minor number of a version: (2, 11) of 2.11.0+cu130."""
    major, minor = text.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def version_words(numbers: tuple[int, int]) -> str:
    """(2, 11) as 2.11."""
    return ".".join(map(str, numbers))


def untested() -> list[str]:
    """What is older or newer here than what weft is tested with, in words; empty if nothing is."""
    found = []
    for name, oldest in OLDEST.items():
        here = installed_version(name)
        if here is not None and not oldest <= release(here) <= NEWEST[name]:
            found.append(
                f"{name} {here} (tested: {version_words(oldest)} to {version_words(NEWEST[name])})"
            )
    return found


def warn_if_untested() -> None:
    """One warning for all, by the first rank of a host alone."""
    if os.environ.get("LOCAL_RANK", "0") == "0" and (found := untested()):
        warnings.warn(
            f"weft is not tested with {', '.join(found)}; it may work. `weft doctor` tries it.",
            stacklevel=3,
        )
