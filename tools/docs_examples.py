"""For the site: examples in docstrings are code, not Markdown (mkdocs.yml: extensions)."""

from __future__ import annotations

import textwrap
from typing import Any

import griffe


def _escaped(text: str) -> str:
    """The star of a shape, as in (*, K), is no emphasis."""
    return text.replace("(*", "(\\*")


def fenced(text: str) -> str:
    """A docstring whose `Example:` section is a block of code."""
    before, heading, after = text.partition("\nExample:\n")
    before = _escaped(before)
    if not heading:
        return before
    lines = after.split("\n")
    end = next((i for i, line in enumerate(lines) if line and line[0] != " "), len(lines))
    code, rest = textwrap.dedent("\n".join(lines[:end])).strip(), "\n".join(lines[end:])
    language = "pycon" if ">>>" in code else "text"
    return f"{before}\n\n**Example**\n\n```{language}\n{code}\n```\n\n{rest}"


class Examples(griffe.Extension):  # type: ignore[misc]  # griffe is not there where mypy runs
    """Applies `fenced` to every docstring."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)
