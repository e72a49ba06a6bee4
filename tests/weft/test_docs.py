"""The pages say what is true: links lead somewhere, quotes are the code's, every name is there."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from fast import FAST, arguments
from test_structure import FOLDERS, ROOT

from tools import docs_pages, rooms

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
SOURCE = r"\(`([\w/]+\.py)`\):\n\n```(?:python|text)\n(.*?)```"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    named = re.findall(r"`((?:[a-z_]+/)+\w+\.(?:py|md|json))`", page.read_text())
    if page.name == "architecture.md" or page.name == "CONTRIBUTING.md":
        inside = ("", "docs/", "kernels/", "dtensor/")
        missing = [n for n in named if not any((ROOT / at / n).exists() for at in inside)]
        assert not missing


def test_quotes_of_the_style_are_the_codes():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    quotes = re.findall(SOURCE, text, re.DOTALL)
    assert len(quotes) == 3
    for file, quote in quotes:
        source = (ROOT / file).read_text()
        depths = (textwrap.indent(quote, " " * depth) for depth in (0, 4, 8, 12))
        assert any(indented in source for indented in depths), (file, quote)


def test_the_drawing_is_that_of_the_rooms():
    assert rooms.DRAWING.read_text() == rooms.drawing(), "python -m tools.rooms"


def test_every_room_has_fast_tests():
    found = {path.parent for folder in FOLDERS for path in (ROOT / folder).glob("*/__init__.py")}
    names = {str(path.relative_to(ROOT)) for path in found}
    assert set(FAST) == names | set(FOLDERS) | {"weft"}, "tests/fast.py"
    for path, _, test in (argument.partition("::") for argument in arguments()):
        assert not test or f"def {test.partition('[')[0]}(" in Path(path).read_text()


@pytest.mark.slow
def test_the_fast_tests_are_found_as_make_calls_them():
    command = [sys.executable, "tests/fast.py", "-q", "--collect-only"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]


def test_the_reference_has_every_public_name():
    made = docs_pages.pages()
    for page, (module, file) in docs_pages.MODULES.items():
        imported = importlib.import_module(module)
        public = docs_pages.public_names(ast.parse((ROOT / file).read_text()))
        assert set(public) == set(getattr(imported, "__all__", public)) and public
        text = made[f"api/{page}.md"]
        assert all(f"{module}.{name}\n" in text or f"`{name}`" in text for name in public)


def test_the_environment_is_a_table():
    import weft.settings

    table = docs_pages.pages()["environment.md"]
    assert all(f"| `{name}` |" in table for name in weft.settings.VARIABLES)


def test_the_changelog_knows_this_version():
    import weft

    assert f"## [{weft.__version__}] - 20" in (ROOT / "CHANGELOG.md").read_text()
