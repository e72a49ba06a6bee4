"""How the house is built: imports run downwards, names stay ours, `import weft` is quick."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from needs import needs_interpreter

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("bench", "collectives", "dtensor", "kernels", "sim")
# What each may import of ours; the face and the tests may import everything.
GROUND = {"weft.errors", "weft.settings", "weft.versions"}
BELOW = {
    "collectives": set(),
    "kernels": {"collectives"},
    "dtensor": {"collectives", "kernels"},
    "sim": {"collectives", "kernels", "dtensor"},
    "bench": {"collectives", "kernels", "dtensor"},
}
# Modules of bench that may import sim.
ON_VIRTUAL_RANKS = (
    "virtual", "scaling_page", "scaling_tables", "gpu_steps", "solo_cases", "solo_measure",
)  # fmt: skip


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Modules of ours that a file imports, `from weft import x` as weft.x."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            module = node.module or ""
            names = [f"weft.{a.name}" for a in node.names] if module == "weft" else [module]
        else:
            continue
        yield from ((name, node.lineno) for name in names if name.split(".")[0] == "weft")


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_run_downwards(folder: str) -> None:
    allowed = BELOW[folder] | {folder}
    for path in sorted((ROOT / folder).rglob("*.py")):
        for name, line in imports(path):
            where = f"{path.relative_to(ROOT)}:{line} imports {name}"
            if folder == "bench":  # it times what users call, some of it on virtual ranks
                asks = f"{name}.".startswith("weft.sim.")
                assert not asks or path.stem in ON_VIRTUAL_RANKS, where
                continue
            below = name in GROUND or [*name.split("."), ""][1] in allowed
            assert below, f"{where}, but {folder} may import {sorted(allowed | GROUND)} only"


def test_the_ground_imports_nothing_of_ours() -> None:
    for name in ("errors", "settings", "versions"):
        assert not list(imports(ROOT / "weft" / f"{name}.py"))


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_cannot_be_imported_as_top_level(folder: str) -> None:
    # PyPI's `kernels` is another library: ours must not shadow it silently.
    run = subprocess.run(
        [sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode != 0 and f"import weft.{folder}" in run.stderr


def test_imports_bring_no_more_than_they_need() -> None:
    """Neither torch, which takes two seconds, nor its tracer, which takes one more."""
    code = """
import sys, weft
assert "torch" not in sys.modules
weft.all_gather_matmul, weft.dtensor.DTensor
assert "torch" in sys.modules and "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@needs_interpreter
@pytest.mark.parametrize("folder", ["sim", "dtensor"])
def test_kernels_are_interpreted_whatever_is_imported_first(folder: str) -> None:
    code = f"""
import weft.{folder}
from weft.collectives import signals
ready, why = signals.interpreter_ready()
assert ready, why
"""
    variables = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=variables, check=True)


def test_public_names_exist_and_are_documented() -> None:
    import weft

    for name in weft.__all__:
        assert getattr(weft, name).__doc__, name
        assert name in dir(weft)
    for folder in ("collectives", "kernels", "dtensor"):
        module = getattr(weft, folder)
        for name in module.__all__:
            assert hasattr(module, name), f"weft.{folder}.{name}"


def test_no_folder_is_nested() -> None:
    # setuptools follows the links of weft/, but finds no package below them unless it is listed.
    for folder in FOLDERS:
        assert not list((ROOT / folder).glob("*/__init__.py"))


def test_every_environment_variable_is_listed() -> None:
    def named(text: str) -> set[str]:
        return set(re.findall(r"WEFT_[A-Z_]+", text))

    import weft.settings

    folders = [ROOT / "weft", *(ROOT / folder for folder in FOLDERS)]
    used = named("".join(path.read_text() for each in folders for path in each.glob("*.py")))
    assert named(weft.settings.__doc__ or "") == used
    assert named((ROOT / "docs" / "ops.md").read_text()) == used
