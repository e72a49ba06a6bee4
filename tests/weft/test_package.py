"""What is built, and installed elsewhere, is whole: every module of weft, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = """
import sys
from setuptools import build_meta
getattr(build_meta, sys.argv[1])(sys.argv[2])
"""


def tracked() -> list[str]:
    """What a clone has: the build must not find what earlier ones have left behind."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout: a source distribution is not built from one")
    return [name for name in listed.stdout.split("\n") if name]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built of the source distribution, as an index would make it."""
    out = tmp_path_factory.mktemp("built")
    tree = out / "tree"
    for name in tracked():
        source, target = ROOT / name, tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(os.readlink(source))
        elif source.is_file():
            target.write_bytes(source.read_bytes())

    def build(what: str, folder: Path) -> None:
        command = [sys.executable, "-c", BUILD, what, str(out)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    build("build_sdist", tree)
    (sdist,) = out.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(out, filter="data")
        folders = {name.split("/")[1] for name in archive.getnames() if name.count("/") > 1}
    assert {"docs", "examples", "weft"} <= folders
    build("build_wheel", out / sdist.name.removesuffix(".tar.gz"))
    (found,) = out.glob("*.whl")
    return found


@pytest.mark.slow
def test_the_wheel_has_every_module(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, "--target", str(tmp_path), str(wheel)], check=True)
    assert (tmp_path / "bin/weft").exists()
    rooms = ("weft/", "bench/", "collectives/", "dtensor/", "kernels/", "sim/")
    ours = [name for name in tracked() if name.endswith(".py") and name.startswith(rooms)]
    assert {name for name in names if name.endswith(".py")} == {
        name if name.startswith("weft/") else f"weft/{name}" for name in ours
    }
    assert {"weft/py.typed", "weft/bench/published/published.csv"} <= names
    assert "weft/kernels/tuned/sm_90.modelled.json" in names
    code = """
import importlib, pkgutil, sys, weft
assert weft.__file__.startswith(sys.argv[1]), weft.__file__
for each in pkgutil.walk_packages(weft.__path__, "weft."):
    if not each.name.endswith("__main__"):
        importlib.import_module(each.name)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
