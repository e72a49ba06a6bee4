"""Which tests are those of a source file: `python tests/covering.py kernels/matmul/all_gather.py`.

Told by what tests name: the file itself, in an import, or what it alone defines. Of a file that no
test names, they are those of the files that import it. Nothing is kept, so that nothing is stale.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("bench", "collectives", "dtensor", "kernels", "sim")
_AT_MOST = 4  # tests that are told
# Of files that work by being imported, or by what a command line names.
_BY_HAND = {
    "bench/blocks": "bench/test_bench",
    "bench/commands": "bench/test_bench_commands",
    "bench/solo": "sim/test_solo",
    "bench/suites": "bench/test_bench",
    "dtensor/checkpoint": "dtensor/test_checkpoint",
    "dtensor/device_mesh": "dtensor/test_dtensor_api",
    "dtensor/interop/fully_sharded": "dtensor/test_fully_shard",
    "dtensor/interop/state_dicts": "dtensor/test_state_dicts",
    "kernels/custom_ops": "kernels/test_library",
    "kernels/experts/custom_ops": "kernels/test_expert_layers",
    "kernels/norm/custom_ops": "kernels/test_all_reduce_norm",
}


def sources() -> list[str]:
    """All source files but rooms' `__init__`s, as kernels/matmul/all_gather."""
    paths = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    return [str(p.relative_to(ROOT).with_suffix("")) for p in paths if p.stem != "__init__"]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def _tree_of(file: str) -> ast.Module:
    return parsed((ROOT / file).with_suffix(".py"))


def named(file: str) -> Iterator[str]:
    """Modules and names that a file speaks of."""
    for node in ast.walk(_tree_of(file)):
        if isinstance(node, ast.ImportFrom):
            module = (node.module or "").removeprefix("weft.").replace(".", "/")
            yield from (module, *(f"{module}/{alias.name}" for alias in node.names))
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value  # of a command's line, say, or of what is patched


def defined(file: str) -> set[str]:
    """What a file alone defines on its own level, for others."""
    kinds = ast.FunctionDef, ast.ClassDef
    names = {node.name for node in _tree_of(file).body if isinstance(node, kinds)}
    return {name for name in names if not name.startswith("_")}


@cache
def covering() -> dict[str, list[str]]:
    """For each source file its tests, those first that name most of it."""
    files, definitions = sources(), {file: defined(file) for file in sources()}
    count = Counter(name for names in definitions.values() for name in names)
    own = {file: {n for n in names if count[n] == 1} for file, names in definitions.items()}
    paths = sorted((ROOT / "tests").glob("*/test_*.py"))
    tests = [str(path.relative_to(ROOT).with_suffix("")) for path in paths]
    spoken = {test: {*named(test)} for test in tests}
    imported = {file: {*named(file)} for file in files}

    def by(file: str) -> list[str]:
        near = f"tests/{file.partition('/')[0]}/"  # breaks ties
        scores = {
            test: (3 * (file in said) + len(own[file] & said), test.startswith(near))
            for test, said in spoken.items()
        }
        found = sorted(tests, key=lambda test: scores[test], reverse=True)
        return [test for test in found if scores[test][0]][:_AT_MOST]

    found = {file: by(file) for file in files}
    for file, test in _BY_HAND.items():
        for of in files:
            if of == file or of.startswith(f"{file}/"):
                found[of] = found[of] or [f"tests/{test}"]
    for _ in range(2):
        for file in files:
            if not found[file]:
                users = [user for user in files if file in imported[user]]
                found[file] = [t for user in users for t in found[user]][:_AT_MOST]
    return found


if __name__ == "__main__":
    for given in sys.argv[1:]:
        path = Path(given).resolve().relative_to(ROOT).with_suffix("")
        print(" ".join(f"{test}.py" for test in dict.fromkeys(covering()[str(path)])))
