"""The suites by name. Their modules import torch, so they are imported only when needed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.bench.problem import Suite

# In the order in which `weft bench all` runs them.
SUITES = {
    "mlp": "a ReLU MLP's training step: Column/RowParallelLinear, DTensor, torch's DTensor",
    "ops": "each fused op: our engines, torch's, collective + matmul",
    "collectives": "1 KiB to 256 MiB: latency and bus bandwidth, beside the process group's",
    "dispatch": "host time of DTensor operations, beside torch's, in the same processes",
    "redistribute": "bytes, steps and time between all pairs of layouts, beside torch's",
    "loss": "cross-entropy of logits cut by vocabulary, and its gradient",
    "layers": "feed-forward and attention blocks of published models, a training step",
    "experts": "a mixture of experts' training step, beside all_to_all and a loop of matmuls",
    "attention": "ring, Ulysses and decode, beside torch's ring and gather + attention",
    "scaling": "the fused ops on 2 to 72 virtual ranks of other chips: virtual time",
    "model": "the training step of weft demo's Llama, beside torch's DTensor",
    "plan": "the training step by weft.dtensor.plan, beside plans that people make by hand",
}


def suite(name: str) -> Suite:
    """The suite of this name; of a name that ends in .py, the one in that file.

    Raises:
        ValueError: there is no such file, or it is no suite.
    """
    own = name.endswith(".py")
    found: Suite = (
        _suite_in_file(Path(name)) if own else importlib.import_module(f"weft.bench.suites.{name}")
    )
    return found


def _suite_in_file(path: Path) -> Suite:
    """A suite of the user's own: imported by its plain name, as the ranks will do it again."""
    if not path.is_file():
        raise ValueError(f"no file {str(path)!r}")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # last: what lies beside a suite must not hide modules of others
    module = importlib.import_module(path.stem)
    if Path(module.__file__ or "").resolve() != path.resolve():
        raise ValueError(f"{path} has the name of another module, {module.__file__}: rename it")
    wanted = ("NAME", "WORLD", "cases", "prepare")
    if missing := [each for each in wanted if not hasattr(module, each)]:
        raise ValueError(
            f"{path} is not a suite, it lacks {', '.join(missing)}: see docs/own_kernels.md"
        )
    if module.NAME in SUITES:
        raise ValueError(f"{path} has the NAME of a suite of weft's, {module.NAME!r}: take another")
    found: Suite = module
    return found


def suites_named(names: Sequence[str]) -> list[Suite]:
    """The suites of these names, each once; "all" is every one of weft's."""
    every = [each for name in names for each in (SUITES if name == "all" else (name,))]
    return [suite(name) for name in dict.fromkeys(every)]
