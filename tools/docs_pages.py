"""Pages of the site that are made of the sources: the API, the environment, the project's files.

MkDocs calls the `on_*` functions (mkdocs.yml: hooks). Nothing here imports torch: names are read
from `__all__`, docstrings by mkdocstrings, both from the text of the files.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# For each page of the API: the module, and the file whose `__all__` names what is public.
MODULES = {
    "kernels": ("weft.kernels", "kernels/__init__.py"),
    "collectives": ("weft.collectives", "collectives/__init__.py"),
    "signals": ("weft.collectives.device.signals", "collectives/device/signals.py"),
    "dtensor": ("weft.dtensor", "dtensor/__init__.py"),
    "parallel": ("weft.dtensor.parallel", "dtensor/parallel.py"),
    "experimental": ("weft.dtensor.experimental", "dtensor/experimental.py"),
    "checkpoint": ("weft.dtensor.checkpoint", "dtensor/checkpoint/__init__.py"),
    "debug": ("weft.dtensor.debug", "dtensor/debug.py"),
    "notation": ("weft.dtensor.notation", "dtensor/notation.py"),
    "sim": ("weft.sim", "sim/__init__.py"),
}
_MODULE_PAGES = {f"api/{page}.md" for page in MODULES}
PROJECT = {
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
}


def public_names(tree: ast.Module) -> list[str]:
    """What `__all__` lists; without one, the functions that do not begin with an underscore."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [f.name for f in functions if not f.name.startswith("_") and ast.get_docstring(f)]


def home_of(tree: ast.Module) -> dict[str, str]:
    """The module that each imported name comes from."""
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {a.asname or a.name: node.module or "" for node in imports for a in node.names}


def module_page(module: str, file: str) -> str:
    """All public names of a module, each by its docstring; torch's own by their names alone."""
    tree = ast.parse((ROOT / file).read_text())
    names, home = public_names(tree), home_of(tree)
    theirs = [name for name in names if home.get(name, "").split(".")[0] == "torch"]
    said = (ast.get_docstring(tree) or "").split("\n\n")[0]
    page = [f"# {module}", said]
    if theirs:
        page.append(f"torch's own, for convenience: {', '.join(f'`{name}`' for name in theirs)}.")
    page += [f"::: {module}.{name}" for name in names if name not in theirs]
    return "\n\n".join(page) + "\n"


def face_page() -> str:
    """`weft` itself: the names of `weft.kernels` by links, the others by their docstrings."""
    import weft

    homes = {name: weft._HOME[name] for name in weft.__all__}
    linked = {name: home for name, home in homes.items() if f"api/{home[5:]}.md" in _MODULE_PAGES}
    lines = ["# weft", "These are in `weft`, and have their text where they are at home:"]
    lines.append("\n".join(f"- `weft.{n}`: [{home}.{n}][]" for n, home in linked.items()))
    lines += [f"::: {home}.{name}" for name, home in homes.items() if name not in linked]
    return "\n\n".join(lines) + "\n"


def variables() -> list[tuple[str, str, str]]:
    """Each environment variable, what it means, and its default, as weft.settings tells them."""
    import weft.settings

    found = re.findall(r"^    (WEFT_\w+) +(.*) \((.*)\)$", weft.settings.__doc__ or "", re.M)
    if {name for name, _, _ in found} != set(weft.settings.VARIABLES):
        raise ValueError("weft/settings.py: its docstring has a line of each of VARIABLES")
    return found


def environment_page() -> str:
    """The table of environment variables."""
    rows = [
        f"| `{name}` | {text.replace('|', '/')} | {default} |"
        for name, text, default in variables()
    ]
    head = [
        "# Environment variables",
        "",
        "Read when they are used; an empty one counts as not "
        "set. More on each: [ops.md](ops.md#environment).",
        "",
    ]
    return "\n".join([*head, "| variable | meaning | default |", "| --- | --- | --- |", *rows, ""])


def project_page(name: str) -> str:
    """A file beside README.md, whose links begin at the root: those into docs/ are the site's."""
    return (ROOT / name).read_text().replace("](docs/", "](")


def pages() -> dict[str, str]:
    """All pages that are made here, by their paths in the site."""
    made = {f"api/{page}.md": module_page(*source) for page, source in MODULES.items()}
    made |= {page: project_page(name) for page, name in PROJECT.items()}
    return made | {"api/weft.md": face_page(), "environment.md": environment_page()}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages."""
    from mkdocs.structure.files import File

    sys.path.insert(0, str(ROOT))
    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Files of the repository are no pages of the site: of a link to one, the words stay."""
    return _OUTSIDE.sub(_link_words, markdown)


# A link that leads above docs/, or to a source.
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)]*|[\w./]+\.(?:py|toml))\)")


def _link_words(link: re.Match[str]) -> str:
    text = link[1]
    is_path = "/" in text and " " not in text and "`" not in text
    return f"`{text}`" if is_path else text
