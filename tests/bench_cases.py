"""A suite for the tests of the benchmark runner: right, wrong, raising, dying and slow cases."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from weft import collectives
from weft.bench.problem import Options, Prepared, Spec

NAME = "planted"
WORLD: Literal["ranks", "one"] = "ranks"


def cases(options: Options) -> list[Spec]:
    """Those that end by themselves: all but "slow"."""
    names = ("right", "wrong", "raising", "unprepared", "half raising", "dying", "last")
    return [Spec(name, {"op": name}) for name in names]


def prepare(spec: Spec, options: Options) -> Prepared:
    name = spec.name
    x = torch.ones(4)

    def call(_: int) -> Any:
        y = collectives.all_reduce(x)
        if name == "wrong":
            return y + 1e-3
        if name == "raising":
            raise ValueError("planted in the call. And more of it")
        if name == "half raising" and dist.get_rank() == 1:
            raise ValueError("planted on rank 1")
        if name == "dying" and dist.get_rank() == 1:
            os._exit(3)
        if name == "slow":
            Path(os.environ["WEFT_TEST_MARK"]).touch()
            time.sleep(60)
        return y

    if name == "unprepared":
        raise NotImplementedError("planted in prepare")
    return Prepared(
        {"weft": call, "sleep": lambda _: time.sleep(0.002) or torch.full((4,), 2.0)},
        {"memory": lambda _: x.clone()},
        expected=lambda: torch.full((4,), 2.0, dtype=torch.float64),
        tolerance=1e-6,
        main="weft",
        peer="sleep",
        absent={"elsewhere": "not on this machine"},
    )
