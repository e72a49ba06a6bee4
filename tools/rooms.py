"""The drawing of docs/architecture.md: the rooms of every folder, from LEVELS of test_structure.py.

python -m tools.rooms        writes docs/rooms.svg
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DRAWING = ROOT / "docs" / "rooms.svg"
# Columns of panels, from left to right; in each the higher panel may import the lower ones.
_COLUMNS = (("dtensor", "kernels", "collectives"), ("bench", "sim"))
_WIDTH, _LINE, _BOX, _GAP, _TITLE = 470, 30, 22, 14, 26
_FONT = 'font-family="sans-serif" font-size="12"'


class Panel(NamedTuple):
    """One folder: where its drawing is, and its rooms, the highest line first."""

    folder: str
    x: int
    y: int
    lines: list[list[str]]

    @property
    def height(self) -> int:
        return _TITLE + _LINE * len(self.lines) + 6


def levels() -> dict[str, list[list[str]]]:
    """For each folder the lines of LEVELS, from the lowest to the highest."""
    tree = ast.parse((ROOT / "tests" / "weft" / "test_structure.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LEVELS":
            texts: dict[str, str] = ast.literal_eval(node.value)
            return {
                folder: [line.split() for line in text.split("\n") if line.strip()]
                for folder, text in texts.items()
            }
    raise ValueError("tests/weft/test_structure.py has no LEVELS")


def panels() -> list[Panel]:
    """All folders, in two columns."""
    lines, found = levels(), []
    for column, folders in enumerate(_COLUMNS):
        y = _GAP
        for folder in folders:
            x = _GAP + column * (_WIDTH + _GAP)
            found.append(Panel(folder, x, y, lines[folder][::-1]))
            y += found[-1].height + _GAP
    return found


def _panel_svg(panel: Panel) -> list[str]:
    folder, x, y, lines = panel
    out = [
        f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{panel.height}" rx="6" fill="#eef0f8"/>',
        f'<text x="{x + 10}" y="{y + 18}" {_FONT} font-weight="bold">{folder}/</text>',
    ]
    for height, names in enumerate(lines):
        top, left = y + _TITLE + height * _LINE, x + 10
        for name in names:
            room = (ROOT / folder / name / "__init__.py").exists() and name != "."
            shown = "__init__" if name == "." else name
            width = 7 * len(shown) + 18
            fill = "#c5cae9" if room else "#ffffff"
            out.append(
                f'<rect x="{left}" y="{top}" width="{width}" height="{_BOX}" rx="4" '
                f'fill="{fill}" stroke="#5c6bc0"/>'
            )
            out.append(
                f'<text x="{left + width // 2}" y="{top + 15}" text-anchor="middle" {_FONT}>'
                f"{shown}</text>"
            )
            left += width + 8
    return out


def drawing() -> str:
    """The SVG."""
    found = panels()
    width = 2 * _WIDTH + 3 * _GAP
    height = max(panel.y + panel.height for panel in found) + _GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    back = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    body = [line for panel in found for line in _panel_svg(panel)]
    return "\n".join([head, "<title>Rooms of weft</title>", back, *body, "</svg>"]) + "\n"


if __name__ == "__main__":
    DRAWING.write_text(drawing())
