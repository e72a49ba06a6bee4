"""The public names of `torch.distributed.tensor` are ours, with the same arguments."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

MODULES = ("", ".parallel", ".experimental", ".debug", ".placement_types", ".device_mesh")
# What torch has in modules of other names: where ours is.
ELSEWHERE = {("._utils", "ExplicitRedistributionContext"): ".debug"}
# What torch has and we have not, and what there is in its place.
ABSENT = {
    (".parallel.input_reshard", "input_reshard"): "SequenceParallel: activations that stay sharded",
    (".parallel.fsdp", "DTensorExtensions"): "a mesh dim that parameters are sharded on",
    (".experimental._tp_transform", "tensor_parallel_transformation"): "parallelize_module",
}
# Arguments that newer torch has and we have not, and what they need.
NEWER = {"local_map": {"spmd_types"}}  # another package, of that name
# Arguments of ours that torch 2.11 has not got yet.
LATER = {"from_local": {"grad_placements"}}
# Keywords of ours that torch has not got, whose defaults do what torch does.
OWN = {"ColwiseParallel": {"keep_gathered"}}


def arguments(function: Any) -> list[tuple[str, Any, Any]]:
    """Names, kinds and defaults; the order of keywords does not matter."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    ordered = [p for p in parameters if p.kind != p.KEYWORD_ONLY]
    keywords = [p for p in parameters if p.kind == p.KEYWORD_ONLY]
    ordered += sorted(keywords, key=lambda p: p.name)
    return [(p.name, p.kind, p.default) for p in ordered]


def check_arguments(name: str, ours: Any, theirs: Any) -> None:
    have = inspect.signature(theirs).parameters
    left_out = NEWER.get(name, set()) | {each for each in LATER.get(name, ()) if each not in have}
    mine, wanted = (
        [each for each in arguments(function) if each[0] not in left_out]
        for function in (ours, theirs)
    )
    assert mine == wanted, name


def public_names() -> list[tuple[str, str]]:
    names = []
    for module in MODULES:
        theirs = importlib.import_module(f"torch.distributed.tensor{module}")
        listed = getattr(theirs, "__all__", ["DeviceMesh", "init_device_mesh"])
        names += [(module, name) for name in listed]
    return names


@pytest.mark.parametrize(("module", "name"), public_names(), ids="/".join)
def test_name_and_arguments(module: str, name: str) -> None:
    theirs = getattr(importlib.import_module(f"torch.distributed.tensor{module}"), name)
    home = importlib.import_module(f"weft.dtensor{module}")
    ours = getattr(home, name)
    if ours is theirs:
        return
    assert ours.__doc__
    if inspect.isclass(theirs):
        assert inspect.isclass(ours)
        if name != "DTensor":  # made by from_local and distribute_tensor only
            mine = arguments(ours.__init__)
            more = {each for each, kind, _ in mine if kind == inspect.Parameter.KEYWORD_ONLY}
            assert OWN.get(name, set()) <= more
            mine = [each for each in mine if each[0] not in OWN.get(name, ())]
            assert mine == arguments(theirs.__init__)
        for method, of_theirs in inspect.getmembers(theirs):
            if not method.startswith("_") and method in vars(theirs):
                of_ours = getattr(ours, method)
                if callable(of_theirs) and method not in vars(ours.__mro__[1]):
                    check_arguments(method, of_ours, of_theirs)
    else:
        check_arguments(name, ours, theirs)


@pytest.mark.parametrize(("module", "name"), ELSEWHERE, ids="/".join)
def test_name_in_another_module(module: str, name: str) -> None:
    theirs = getattr(importlib.import_module(f"torch.distributed.tensor{module}"), name)
    ours = getattr(importlib.import_module(f"weft.dtensor{ELSEWHERE[module, name]}"), name)
    assert arguments(ours.__init__) == arguments(theirs.__init__)


@pytest.mark.parametrize(("module", "name"), ABSENT, ids="/".join)
def test_absent_name(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(f"torch.distributed.tensor{module}"), name)
    for ours in MODULES:
        assert not hasattr(importlib.import_module(f"weft.dtensor{ours}"), name)


def test_all_lists_what_is_there() -> None:
    for module in MODULES:
        ours = importlib.import_module(f"weft.dtensor{module}")
        assert all(hasattr(ours, name) for name in ours.__all__), module
