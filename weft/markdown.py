"""Tables in pages of Markdown, which commands write between marks."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path


def markdown_lines(
    header: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1
) -> list[str]:
    """The lines of a table in Markdown; all columns but the first `texts` are of numbers."""
    rule = ["---"] * texts + ["---:"] * (len(header) - texts)
    return [f"| {' | '.join(cells)} |" for cells in (header, rule, *rows)]


def between_marks(page: str, mark: str, text: str) -> str:
    """A page of Markdown with `text` between `<!-- mark -->` and `<!-- /mark -->`.

    Raises:
        ValueError: the page does not have them, once.
    """
    begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    made, count = re.subn(f"(?s){begin}.*?{end}", lambda _: f"{begin}\n{text}\n{end}", page)
    if count != 1:
        raise ValueError(f"the page must hold {begin} ... {end} once, found {count}")
    return made


def page_with(mark: str) -> Callable[[str], Path]:
    """A `type=` of argparse: a page that has this mark, which is told before the work."""

    def page(text: str) -> Path:
        try:
            between_marks(Path(text).read_text(), mark, "")
        except OSError as error:
            raise argparse.ArgumentTypeError(f"{text}: cannot be read, {error.strerror}") from None
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text}: {error}") from None
        return Path(text)

    return page
