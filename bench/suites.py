"""The suites by name. Their modules import torch, so they are imported when they are asked for."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
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
    "layers": "feed-forward and attention blocks of published models, a training step",
    "attention": "ring, Ulysses and decode, beside torch's ring and gather + attention",
    "scaling": "the fused ops on 2 to 64 virtual ranks of other chips: virtual time",
    "model": "the training step of weft demo's Llama, beside torch's DTensor",
}


def suite(name: str) -> Suite:
    """The suite of this name."""
    found: Suite = importlib.import_module(f"weft.bench.{name}_suite")
    return found


def named(names: Sequence[str]) -> list[Suite]:
    """The suites of these names, each once; "all" is every one."""
    return [suite(name) for name in (SUITES if "all" in names else dict.fromkeys(names))]
