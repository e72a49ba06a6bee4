"""Tables in the terminal."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from weft.bench.report.tables import LEGEND, TextTable


def console() -> Console:
    """Standard output; wide enough for a table where that is a file."""
    return Console(width=None if sys.stdout.isatty() else 180, highlight=False)


def show_legend() -> None:
    """Print how to read the tables."""
    console().print(LEGEND, style="dim", markup=False)


def print_table(table: TextTable) -> None:
    """Print a table, and what follows from it."""
    out = console()
    grid = Table(title=table.title, title_justify="left")
    for i, name in enumerate(table.header):
        grid.add_column(name, justify="right" if i else "left", overflow="fold")
    for row in table.rows:
        grid.add_row(*row)
    out.print(grid)
    for line in (*table.summary, *(f"note: {note}" for note in table.notes)):
        out.print(line, markup=False)
    out.print()
