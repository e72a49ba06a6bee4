"""What is kept for later calls is bounded, told, and cleared by `weft.close`."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import weft
from weft.collectives.ranks import caches
from weft.dtensor import Replicate, Shard, distribute_tensor, init_device_mesh

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("collectives", "dtensor", "kernels")

# Functions that keep every result, and why that has an end.
UNBOUNDED = {
    "kernels/compile/aot: _launches": "chips, times dtypes: those of one command",
}
# What else modules keep in dicts and lists at their top, and what bounds it.
STAY = {
    "collectives/cost: kept_by_rates": "made at import",
    "collectives/custom_ops: _torch_force_save": "made at import",
    "collectives/interpreted/fast_integers: _prototypes": "shapes of blocks, which kernels name",
    "collectives/memory/workspace: _last_calls": "GPUs of this process",
    "collectives/memory/workspace: _outgrown": "graphs, which still run on it; `close` clears it",
    "collectives/ranks/caches: _dicts": "made at import",
    "collectives/ranks/group: _groups": "kept by group",
    "collectives/ranks/group: _spanning": "kept by group",
    "collectives/ranks/group: _made": "a number for each set of ranks that has had a group",
    "collectives/ranks/set_up: _arrivals": "a number for each name of a group",
    "collectives/ranks/group: _described": "a number for each name of a group",
    "collectives/ranks/group: _of_parent": "what a forked child must not free",
    "collectives/ranks/group: forget_meshes": "made at import",
    "collectives/ranks/reports: _pages": "a page of pinned memory for many buffers, used again",
    "collectives/ranks/reports: _reports": "open buffers",
    "collectives/ranks/reports: _untold": "errors, until they are raised",
    "collectives/ranks/waits: _known": "processes that this one has met",
    "dtensor/checkpoint/__init__: _saves": "one save",
    "dtensor/checkpoint/steps: _over": "a number for each name of a group",
    "dtensor/dispatch/call: rules": "made at import",
    "dtensor/dispatch/call: rules_of_overloads": "made at import",
    "dtensor/dispatch/discovery: asked": "ops that the user names",
    "dtensor/dispatch/views: _writes": "a number for each world of virtual ranks",
    "dtensor/move/graph_names: named": "compiled graphs, which name layouts",
    "dtensor/tensor: _kept": "compiled graphs, which name meshes",
    "dtensor/tensor: before_write": "made at import",
}


def module_of(path: Path) -> str:
    return str(path.relative_to(ROOT).with_suffix(""))


def trees() -> Iterator[tuple[str, str, ast.Module]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            yield module_of(path), text, ast.parse(text)


def is_unbounded(decorator: ast.expr) -> bool:
    """Whether it is `cache`, or `lru_cache(maxsize=None)`."""
    if isinstance(decorator, ast.Call):
        given = [*decorator.args, *(each.value for each in decorator.keywords)]
        none = any(isinstance(each, ast.Constant) and each.value is None for each in given)
        return ast.unparse(decorator.func).endswith("lru_cache") and none
    return ast.unparse(decorator) in ("cache", "functools.cache")


def test_functions_keep_a_number_of_results() -> None:
    found = {
        f"{module}: {node.name}"
        for module, _, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and any(map(is_unbounded, node.decorator_list))
    }
    assert found == set(UNBOUNDED)


@pytest.mark.parametrize(
    ("text", "unbounded"),
    [
        ("cache", True),
        ("functools.cache", True),
        ("lru_cache(maxsize=None)", True),
        ("lru_cache(None)", True),
        ("lru_cache", False),
        ("lru_cache(maxsize=9)", False),
        ("cached_property", False),
    ],
)
def test_decorators_without_a_bound_are_seen(text: str, unbounded: bool) -> None:
    assert is_unbounded(ast.parse(text, mode="eval").body) is unbounded


def kept_in(tree: ast.Module) -> Iterator[str]:
    """Names at the top of a module that are a dict, a list or a set, and empty at first."""
    for node in tree.body:
        if isinstance(node, (ast.AnnAssign, ast.Assign)) and node.value is not None:
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            called = ast.unparse(node.value).partition("(")[0]
            empty = ast.unparse(node.value) in ("{}", "[]", "set()")
            if empty or called in ("dict", "Counter", "defaultdict", "OrderedDict", "deque"):
                yield ast.unparse(target)


def test_what_modules_keep_is_told_or_bounded_by_what_it_is_of() -> None:
    others = set()
    for module, text, tree in trees():
        for name in kept_in(tree):
            is_told = f'register(f"{{__name__}}.{name}", {name},' in " ".join(text.split()).replace(
                "( ", "("
            )
            if not (is_told or f"kept_by_group.append({name})" in text):
                others.add(f"{module}: {name}")
    assert others == set(STAY)


def test_random_shapes_stay_within_bounds_and_close_clears_all(ranks: object) -> None:
    ranks(2, random_shapes)  # type: ignore[operator]


def random_shapes() -> None:
    chance = random.Random(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    before = {each.name: each.held for each in weft.caches()}
    for _ in range(60):
        m, k, n = (chance.randrange(1, 40) for _ in range(3))
        x = distribute_tensor(torch.ones(m, k), mesh, [Shard(0)], src_data_rank=None)
        (x + x).redistribute(mesh, [Replicate()])
        weft.all_gather_matmul(torch.ones(m, k), torch.ones(k, n))
    told = {each.name: each for each in weft.caches()}
    for name in ("weft.dtensor.dispatch.dispatch._plans", "weft.dtensor.move.transfers.move_plan"):
        assert told[name].held >= before.get(name, 0) + 50
        assert str(told[name]).startswith(f"{name}: {told[name].held:,} of ")
    assert all(each.held <= each.most for each in told.values())
    weft.close()
    assert not [each for each in weft.caches() if each.held and each.most > 1]
    assert weft.all_gather_matmul(torch.ones(2, 2), torch.ones(2, 2)).tolist() == [[2.0, 2.0]] * 4


def test_a_dict_is_told_in_the_unit_of_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "_dicts", {})
    caches.register("of numbers", {1: 2}, 10)
    caches.register("of tables", {1: 2, 3: 4}, 1 << 20, lambda: 4096)
    told = [str(each) for each in weft.caches() if each.name.startswith("of ")]
    assert told == ["of numbers: 1 of 10 entries", "of tables: 4,096 of 1,048,576 bytes"]


def test_a_dict_that_is_full_is_emptied_by_the_next_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "_dicts", {})
    squares = caches.KeptDict[int, int](2, "of squares")
    squares[1] = 1
    squares[2] = 4
    squares[2] = 2 * 2
    assert squares == {1: 1, 2: 4}
    squares[3] = 9
    assert squares == {3: 9}
    assert "of squares: 1 of 2 entries" in map(str, weft.caches())
    caches.forget()
    assert squares == {}
