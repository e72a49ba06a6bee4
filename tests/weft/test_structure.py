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
from covering import covering, parsed
from needs import needs_interpreter

import weft

ROOT = Path(__file__).resolve().parents[2]
Names = dict[str, list[Path]]
FOLDERS = ("bench", "collectives", "dtensor", "kernels", "sim")
OURS = ("weft", "tools")
# The face and the tests may import everything, everything may import the ground.
GROUND = {"weft.errors", "weft.markdown", "weft.settings", "weft.versions"}
BELOW = {
    "collectives": set[str](),
    "kernels": {"collectives"},
    "dtensor": {"collectives", "kernels"},
    "sim": {"collectives", "kernels", "dtensor"},
    # Virtual time is what `weft bench scaling` times; the others do without sim.
    "bench": {"collectives", "kernels", "dtensor", "sim"},
}
# Within a folder, the rooms, and the files that stand beside them, from the lowest to the highest;
# "." is the folder's own `__init__`. Each may import what stands in lines before its own.
LEVELS = {
    "collectives": """
        interpreted kept_files ranks profiled protocols
        topology
        device
        memory
        cost kernels
        prices
        process_groups
        hosts
        movement sizes
        collective_ops
        custom_ops
        .
    """,
    "kernels": """
        engine
        device norm
        expert_kernels flash matmul
        experts heads
        attention custom_ops layers
        compile graphs
        .
    """,
    "dtensor": """
        layout tracing device_mesh placement_types
        move notation
        checkpoint random
        tensor
        dispatch
        rules
        fused
        api debug experimental
        expert_parallel prepare
        interop parallel
        plans
        .
    """,
    "sim": """
        errors observer progress_bar unwaited
        check time
        schedule
        hooks
        run
        .
        cli
    """,
    "bench": """
        . problem registry rows environment
        bounds measure shapes
        blocks runner
        suites
        report
        cli
        commands published solo
        host
    """,
}
SIM_FROM_BENCH = {
    "blocks/virtual",
    "host/command", "host/measure", "solo/cases", "solo/compiling", "solo/measure", "solo/sweep",
}  # fmt: skip


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Modules of ours that a file imports when it runs, `from weft import x` as weft.x."""
    for node in running(parsed(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            module = node.module or ""
            inside = [f"{module}.{a.name}" for a in node.names]
            names = [name if is_module(name) else module for name in inside]
        elif isinstance(node, ast.Call) and called(node.func) == "import_module":
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
        else:
            continue
        yield from ((name, node.lineno) for name in names if name.split(".")[0] in OURS)


def called(function: ast.expr) -> str:
    return str(getattr(function, "attr", getattr(function, "id", "")))


def running(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those of `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield child
            yield from running(child)


def is_module(name: str) -> bool:
    first, *rest = name.split(".")
    path = (ROOT / first).joinpath(*rest)
    return path.is_dir() or path.with_suffix(".py").exists()


def test_kernels_are_launched_through_one_door() -> None:
    """Else a call that is made again would leave one out: see `collectives.device.launches`."""
    launches = re.compile(r"\b\w*_?kernel\[(?!grid)")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in ("collectives", "kernels", "dtensor")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if launches.search(line) and path.name != "launches.py"
    ]
    assert not found, f"kernel[grid](...) must be launching(kernel, programs)(...): {found}"


def test_completion_shows_what_is_public() -> None:
    for module in (weft, weft.collectives, weft.dtensor, weft.kernels, weft.sim):
        assert {*module.__all__} <= {*dir(module)} and "torch" not in dir(module)


def test_a_kernel_can_be_read_at_a_sitting() -> None:
    """Its file has at most 300 lines, and opens with what it does, and whom it waits for.

    It takes at most 20 arguments.
    """
    for folder in ("collectives", "kernels"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            if "\n@triton.jit" in text:
                lines = len(text.splitlines())
                assert lines <= 300, f"{path.relative_to(ROOT)} has {lines} lines"
                assert text.startswith('"""'), path
                for node in parsed(path).body:
                    if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                        assert len(node.args.args) <= 20, f"{node.name}: compose some, as tuples"


# Names that several modules have for one thing: each kernel, engine or hook has its own.
SHARED = {
    *("workspace_bytes", "workspace_for", "room_for", "pitch_of", "publish"),
    *("hosts_forward", "dispatch_forward", "dispatch_backward"),
    *("combine_forward", "combine_backward", "installed", "requirements", "forget"),
    *("load", "write", "path_of"),
    # Of each fused op, by engine.
    *("_host_forward", "_host_backward", "_hosts_forward", "_hosts_backward", "_plan_inside"),
    *("_triton_forward", "_triton_backward", "_gradients", "_forward", "_kernel_forward"),
    # Those of torch: the public call, and what carries it out or is called in its place.
    *("DTensor", "all_reduce", "all_to_all", "broadcast", "barrier", "gather", "scatter", "save"),
    *("matmul", "mm", "grouped_matmul", "dispatch"),
}


# Names that each suite and each command has, by which they are called.
PROTOCOL = {"cases", "prepare", "main", "_parser", "__getattr__", "__dir__"}


def test_a_name_has_one_meaning() -> None:
    """Private functions too: a reader meets them in tracebacks, and looks for them by name."""
    several = {name: paths for name, paths in defined().items() if len({*paths}) > 1}
    meanings = {name: paths for name, paths in several.items() if name not in SHARED | PROTOCOL}
    assert not meanings, "name one of them otherwise, or, if it is the same thing, add it to SHARED"
    assert set(several) == SHARED | PROTOCOL


def room_of(name: str) -> tuple[str, str]:
    """Of weft.kernels.matmul.all_gather: kernels, matmul."""
    _, folder, room, *_ = [*name.split("."), "", "."]
    return folder, room or "."


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_run_one_way(folder: str) -> None:
    """Between folders and between rooms, lazy imports included."""
    lines = [line.split() for line in LEVELS[folder].split("\n") if line.strip()]
    level = {room: height for height, line in enumerate(lines) for room in line}
    rooms = {path.parent.name for path in (ROOT / folder).glob("*/__init__.py")}
    files = {path.stem for path in (ROOT / folder).glob("*.py")} - {"__init__"}
    assert set(level) == rooms | files | {"."}, "tests/weft/test_structure.py: LEVELS"
    for path in sorted((ROOT / folder).rglob("*.py")):
        here = path.relative_to(ROOT).with_suffix("")
        _, own = room_of(".".join(("weft", *here.parts)).removesuffix(".__init__"))
        for name, line in imports(path):
            where = f"{here}.py:{line} imports {name}"
            other, room = room_of(name)
            if name in GROUND:
                continue
            if folder == "bench" and other not in FOLDERS:
                continue  # it times what users call
            if other == folder:
                below = level[room] < level[own] or room == own
                assert below, f"{where}: {folder} has {room} above {own}"
            else:
                assert other in BELOW[folder], f"{where}: {folder} is below"
                virtual = "/".join(here.parts[1:]) in SIM_FROM_BENCH
                assert (folder, other) != ("bench", "sim") or virtual, where


def test_each_file_has_tests() -> None:
    """So that who changes one knows what to run: `python tests/covering.py FILE`."""
    found = covering()
    assert not [file for file, tests in found.items() if not tests]
    assert found["kernels/matmul/all_gather"][0] == "tests/kernels/test_matmul_ops"
    assert "tests/dtensor/test_layout" in found["dtensor/layout/boxes"]
    assert all((ROOT / f"{test}.py").exists() for tests in found.values() for test in tests)


# A call on a workspace that an earlier one has failed on waits for the others by a call of its own.
IN_A_CIRCLE = [{"collectives/memory/exchange", "collectives/memory/workspace"}]


def test_files_import_one_way() -> None:
    """Within rooms, too, lazy imports included: whoever reads a file has read what it builds on."""
    below: dict[str, set[str]] = {}
    for folder in (*FOLDERS, "tools"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.stem != "__init__":
                here = str(path.relative_to(ROOT).with_suffix(""))
                names = (name for name, _ in imports(path))
                paths = {name.removeprefix("weft.").replace(".", "/") for name in names}
                below[here] = {each for each in paths if (ROOT / each).with_suffix(".py").exists()}
    reached: dict[str, set[str]] = {}
    for file in below:
        found, left = set[str](), [file]
        while left:
            new = below.get(left.pop(), set()) - found
            found |= new
            left += new
        reached[file] = found
    circles = [
        {other for other in found if file in reached[other]}
        for file, found in reached.items()
        if file in found
    ]
    assert [each for each in IN_A_CIRCLE if each in circles] == IN_A_CIRCLE
    assert all(each in IN_A_CIRCLE for each in circles), circles


@pytest.mark.parametrize("folder", FOLDERS)
def test_rooms_are_small_and_say_what_they_are_for(folder: str) -> None:
    for room in sorted(path.parent for path in (ROOT / folder).glob("*/__init__.py")):
        files = [path.stem for path in room.glob("*.py") if path.stem != "__init__"]
        assert len(files) <= 12, f"{room} has {len(files)} files"
        said = ast.get_docstring(parsed(room / "__init__.py")) or ""
        if room.name == "checkpoint":  # a public module, too: its text is for those who save
            continue
        assert "mport" in said, f"{room}/__init__.py does not say what it may import"
        missing = [name for name in files if f"`{name}`" not in said]
        assert not missing, f"{room}/__init__.py does not say when to read {missing}"


# The files that may ask what memory a tensor is in: they run what the CPU or the GPU has alone.
# Virtual ranks stand for GPUs with tensors on a CPU: launches ask `Group.on_gpus`, `chip_of` or
# `on_cpu` instead.
ASK_FOR_THE_DEVICE = {
    "collectives/cost", "collectives/memory/backends", "collectives/memory/exchange",
    "collectives/memory/symmetric", "collectives/memory/workspace", "collectives/movement",
    "collectives/process_groups", "collectives/ranks/group",
    "kernels/attention/cache", "kernels/attention/custom_ops",
    "kernels/attention/decode_host", "kernels/attention/host", "kernels/attention/library",
    "kernels/attention/plan",
    "kernels/engine/chips", "kernels/engine/engines", "kernels/engine/fp8",
    "kernels/engine/local_matmul", "kernels/engine/shards", "kernels/layers/vocabulary",
}  # fmt: skip


def asks_for_the_device(path: Path) -> bool:
    """Whether it compares `x.device.type`, or reads `x.is_cuda`."""

    def asks(node: ast.AST) -> bool:
        if isinstance(node, ast.Compare):
            return isinstance(node.left, ast.Attribute) and node.left.attr == "type"
        return isinstance(node, ast.Attribute) and node.attr == "is_cuda"

    return any(map(asks, ast.walk(parsed(path))))


def test_launches_do_not_take_virtual_gpus_for_the_interpreter() -> None:
    asking = {
        str(path.relative_to(ROOT).with_suffix(""))
        for folder in ("collectives", "kernels")
        for path in (ROOT / folder).rglob("*.py")
        if asks_for_the_device(path)
    }
    assert asking == ASK_FOR_THE_DEVICE


# Where no two functions or classes may have one name.
ONE_MEANING = ("bench", "collectives", "dtensor", "kernels", "sim", "tools", "weft")


def defined() -> Names:
    """The names that files define on their own level, each with those files."""
    found: Names = {}
    for path in sorted(path for each in ONE_MEANING for path in (ROOT / each).rglob("*.py")):
        for node in parsed(path).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.setdefault(node.name, []).append(path.relative_to(ROOT))
    return found


def test_the_ground_imports_nothing_of_ours() -> None:
    for name in GROUND:
        assert not list(imports(ROOT / "weft" / f"{name.removeprefix('weft.')}.py"))


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
@pytest.mark.parametrize("folder", ["sim", pytest.param("dtensor", marks=pytest.mark.slow)])
def test_kernels_are_interpreted_whatever_is_imported_first(folder: str) -> None:
    code = f"""
import weft.{folder}
from weft.collectives import signals
ready, why = signals.interpreter_ready()
assert ready, why
"""
    variables = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=variables, check=True)


@needs_interpreter
def test_kernels_run_if_triton_is_imported_first(tmp_path: Path) -> None:
    script = tmp_path / "own.py"  # Triton reads a kernel's source
    script.write_text("""
import triton
import triton.language as tl
import torch, torch.distributed as dist, weft
from weft.collectives import signals

dist.init_process_group("gloo", init_method=f"file://{__file__}.store", rank=0, world_size=1)

@triton.jit
def _sums_kernel(y_ptr, x_ptr, N: tl.constexpr):
    total = tl.zeros((N,), tl.float32)
    total += tl.load(x_ptr + tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]).sum(1)
    tl.store(y_ptr + tl.arange(0, N), tl.flip(tl.maximum(total, tl.max(total, 0) - 2.5), 0))

x, y = torch.arange(16.0).view(4, 4), torch.empty(4)
_sums_kernel[(1,)](y, x, 4)
assert y.tolist() == [54.0, 51.5, 51.5, 51.5], y
with weft.engine("triton"):
    torch.testing.assert_close(weft.matmul_all_reduce(x, x), x @ x)
dist.destroy_process_group()
""")
    variables = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    variables["PYTHONPATH"] = str(ROOT)
    run = subprocess.run([sys.executable, str(script)], env=variables, capture_output=True)
    assert run.returncode == 0, run.stderr.decode()


def test_public_names_exist_and_are_documented() -> None:
    import weft

    for name in weft.__all__:
        assert getattr(weft, name).__doc__, name
        assert name in dir(weft)
    for folder in ("collectives", "kernels", "dtensor"):
        module = getattr(weft, folder)
        for name in module.__all__:
            assert hasattr(module, name), f"weft.{folder}.{name}"


def test_completion_lists_what_is_public() -> None:
    import weft

    assert set(dir(weft)) == {*weft.__all__, *FOLDERS, "__version__"}


def test_a_name_of_a_folder_is_told_where_it_is() -> None:
    import weft

    for folder in ("collectives", "kernels", "dtensor", "sim"):
        for name in set(getattr(weft, folder).__all__) - set(weft.__all__):
            with pytest.raises(AttributeError, match=rf": it is weft\.\w+\.{name}$"):
                getattr(weft, name)
    with pytest.raises(AttributeError, match=r"it is weft\.collectives\.all_reduce"):
        weft.all_reduce  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'all_reduced'$"):
        weft.all_reduced  # noqa: B018


def test_every_environment_variable_is_listed() -> None:
    def named(text: str) -> set[str]:
        return set(re.findall(r"WEFT_[A-Z_]+", text))

    import weft.settings

    folders = [ROOT / "weft", *(ROOT / folder for folder in FOLDERS)]
    used = named("".join(path.read_text() for each in folders for path in each.rglob("*.py")))
    assert named(weft.settings.__doc__ or "") == used
    assert named((ROOT / "docs" / "ops.md").read_text()) == used
