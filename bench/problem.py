"""The interface between the runner and its suites.

A suite is a module: `cases(options)` lists its problems, in the parent process; `prepare(spec,
options)` makes one ready, on every rank; the runner checks and times what it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from weft.launch import cores

Tensors = torch.Tensor | Sequence[torch.Tensor]
Call = Callable[[int], Any]

INPUTS = 3  # sets of inputs that the rounds take in turn, so that none lies ready in a cache


@dataclass(frozen=True)
class Options:
    """Options of a run, the same for every suite.

    Attributes:
        shapes: problems of the user's own, as suites parse them; empty for the suite's.
        rounds: timed rounds a case; None: as many as `seconds` take, at least 7.
        filter: only the cases whose name has this in it.
    """

    ranks: int = 2
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: torch.dtype = torch.float32
    engines: tuple[str, ...] = ()
    shapes: tuple[Any, ...] = ()
    full_size: bool = False
    quick: bool = False
    rounds: int | None = None
    seconds: float = 1.5
    filter: str = ""

    @property
    def dtype_name(self) -> str:
        """As results have it: "float32"."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def threads(self) -> int:
        """That torch may use in each rank."""
        return max(1, cores() // self.ranks)

    @property
    def gpus_shared(self) -> bool:
        """Whether there are more ranks than GPUs: they take turns, and nothing overlaps."""
        return self.device == "cuda" and self.ranks > torch.cuda.device_count()


@dataclass(frozen=True)
class Spec:
    """A case before it has run: what a suite's `prepare` needs, as plain values."""

    name: str
    params: dict[str, Any]

    @classmethod
    def of_sizes(cls, names: tuple[str, ...], sizes: tuple[int, ...], options: Options) -> Spec:
        """A case that is told by its sizes alone."""
        params = dict(zip(names, sizes, strict=True)) | {"dtype": options.dtype_name}
        return cls("x".join(map(str, sizes)), params)


@dataclass
class Prepared:
    """A case on this rank, ready to run. Calls are given the number of the inputs to take.

    Attributes:
        variants, bounds: what `weft.bench.rows.Case` says of them, as calls.
        expected: what every variant returns for inputs 0, by the oracle in float64; None if
            `prepare` has compared them, or there is nothing to compare.
        tolerance: largest deviation, relative to the largest expected value.
        observe: the tensors to compare of a variant's value, if that is not itself a tensor.
        unchecked: variants that compute something else, for comparison of times only.
        repeats: how often a variant does its work in one call.
        virtual: calls return their time in us; they are not timed, and compute nothing to compare.
        absent: variants that cannot run here, and why.
    """

    variants: dict[str, Call]
    bounds: dict[str, Call] = field(default_factory=dict)
    bound_rule: Literal["max", "sum"] = "max"
    expected: Callable[[], Tensors] | None = None
    tolerance: float = 1e-4
    observe: Callable[[Any], Tensors] = lambda value: value
    unchecked: tuple[str, ...] = ()
    inputs: int = INPUTS
    repeats: int = 1
    virtual: bool = False
    main: str = ""
    peer: str = ""
    absent: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class Suite(Protocol):
    """What a module of a suite offers.

    WORLD says whether it runs on all ranks or in one process.
    """

    NAME: str
    WORLD: Literal["ranks", "one"]

    def cases(self, options: Options) -> list[Spec]:
        """The cases, in this process."""

    def prepare(self, spec: Spec, options: Options) -> Prepared:
        """One case, on every rank."""


def arrived(tensor: Any) -> torch.Tensor:
    """This rank's part of a tensor or DTensor, waited for: torch's collectives may return early."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    value: torch.Tensor = local.wait() if hasattr(local, "wait") else local
    return value
