"""A search of tiles for the kernels of ring_attention, by a rank alone on a whole chip.

Ranks must launch alike, and a table that one of them lacks would part them: so what is found here
is read, and put into `_tile` of `ring_kernel` and `_tiles` of `ring_grad_kernel` by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from weft.bench.measure import as_list, deviation, short
from weft.bench.problem import Spec
from weft.bench.solo.measure import Stopwatch, usable
from weft.bench.solo.sweep import launch_median_us
from weft.collectives.ranks.group import alone
from weft.kernels.attention.ring import Saved
from weft.kernels.flash import ring_grad_kernel, ring_kernel
from weft.kernels.flash.geometry import UNBOUNDED, Geometry, Visibility

_TOLERANCE = 2e-2
Tiles = Mapping[str, int]  # fields of the kernel's config; none: as it is

_FORWARD: Sequence[tuple[int, ...]] = (
    (128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2), (128, 32, 8, 3), (128, 64, 4, 2),
    (64, 64, 4, 3), (64, 128, 8, 2),
)  # fmt: skip
_BACKWARD: Sequence[tuple[int, ...]] = (
    (64, 128, 128, 32, 8, 3), (64, 128, 128, 64, 8, 3), (64, 128, 128, 64, 8, 2),
    (64, 128, 128, 128, 8, 2), (32, 128, 128, 64, 8, 3), (64, 64, 128, 64, 8, 2),
    (64, 128, 128, 64, 16, 2), (32, 64, 64, 32, 8, 2), (128, 64, 128, 64, 8, 2),
)  # fmt: skip


def tile_specs(quick: bool) -> list[Spec]:
    """Causal attention of whole sequences, forward and backward."""
    sizes = (
        [(64, 2, 1, 16)] if quick else [(16384, 32, 8, 128), (4096, 32, 32, 64), (4096, 16, 8, 256)]
    )
    return [
        Spec(
            f"tiles of attention {step} " + "x".join(map(str, size)),
            {"op": "ring_attention", "step": step, "sizes": size, "dtype": "bfloat16"},
        )
        for size in sizes
        for step in ("forward", "backward")
    ]


def tile_choices(spec: Spec, device: torch.device) -> list[Tiles]:
    """What is tried: the kernel's own tiles first."""
    forward = spec.params["step"] == "forward"
    blocks = ["block_m", "block_n"] if forward else ["dkv_m", "dkv_n", "dq_m", "dq_n"]
    if device.type == "cpu":
        return [{}, {blocks[0]: 16}]
    names, every = [*blocks, "num_warps", "num_stages"], _FORWARD if forward else _BACKWARD
    return [{}, *(dict(zip(names, each, strict=True)) for each in every)]


class _Problem:
    """A case on this device."""

    def __init__(self, spec: Spec, device: torch.device) -> None:
        S, H, H_kv, D = spec.params["sizes"]
        generator = torch.Generator(device).manual_seed(0)

        def drawn(heads: int) -> torch.Tensor:
            shape = 1, heads, S, D
            return torch.randn(shape, generator=generator, device=device).to(torch.bfloat16)

        q, k, v, dout = drawn(H), drawn(H_kv), drawn(H_kv), drawn(H)
        geometry = Geometry((S,), (S,), "contiguous", Visibility(S, UNBOUNDED, 0, None))
        scale, backward = D**-0.5, spec.params["step"] == "backward"
        module = ring_grad_kernel if backward else ring_kernel
        workspace = module.workspace_for(k, alone(), geometry)

        def forward() -> Any:
            return ring_kernel.launch_ring_attention(q, k, v, workspace, geometry, scale)

        self.run: Callable[[], Any] = forward
        if backward:
            out, lse = forward()
            saved = Saved(q, k, v, out, lse, dout, None)
            self.run = lambda: ring_grad_kernel.launch_ring_attention_backward(
                saved, workspace, geometry, scale
            )


@contextmanager
def launched_by(spec: Spec, tiles: Tiles) -> Iterator[None]:
    """Inside, the kernel of `spec` is launched with these fields of its config."""
    backward = spec.params["step"] == "backward"
    module: Any = ring_grad_kernel if backward else ring_kernel
    name = "ring_grad_config" if backward else "ring_config"
    config = getattr(module, name)
    with patch.object(module, name, lambda *args: replace(config(*args), **tiles)):
        yield


def compile_tiles(spec: Spec, tiles: Tiles, device: torch.device) -> None:
    """Inside `compiling()`: the kernels of one choice."""
    problem = _Problem(spec, device)
    with launched_by(spec, tiles):
        problem.run()


def search_tiles(
    spec: Spec, device: torch.device, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """The quickest tiles of those whose results are those of the kernel's own, and all times.

    Raises:
        RuntimeError: the kernel's own tiles fail, or the GPU refuses all that follows a failure.
    """
    problem, clock = _Problem(spec, device), Stopwatch(device)
    expected = as_list(problem.run())
    trials: list[tuple[Tiles, float, str]] = []
    for tiles in tile_choices(spec, device):
        us, failure = math.inf, ""
        try:
            with launched_by(spec, tiles):
                off = deviation(as_list(problem.run()), expected) / _TOLERANCE
                if not off <= 1:
                    raise ValueError(f"{off:.3g} times the tolerance away from the kernel's own")
                us = launch_median_us(clock, problem.run, clock.flush)
        except Exception as error:  # too few resources, or whatever else there is against it
            failure = f"{type(error).__name__}: {short(str(error))}"
        trials.append((tiles, us, failure))
        say(f"{spec.name}: {failure or f'{us:.0f} us'}: {dict(tiles) or 'the own tiles'}")
        if failure and (not tiles or not usable(device)):
            raise RuntimeError(f"{tiles}: {failure}")
    best = min(trials, key=lambda trial: trial[1])
    return {
        "choice": dict(best[0]),
        "us": best[1],
        "heuristic_us": trials[0][1],
        "tried": len(trials),
        "failed": [failure for _, _, failure in trials if failure],
        "times": [[dict(tiles), us] for tiles, us, failure in trials if not failure],
    }
