"""How the fused ops scale over ranks and chips that are not available: virtual time.

One layer (M, N, K as in `ops`, bf16) on more and more ranks of a chip, by each engine. The kernels
are the real ones, run by `weft.sim` without computing values, with durations from the chip's data
sheet. Times do not vary, so each is of one run. The bounds are of the same run: its dots on all
cores, its bytes through one HBM and over one link.

The triton engine's kernels are interpreted. If all ranks have equal shares, those of one stand for
all, and gathers take up to a minute, on 72 ranks; other rows take minutes, and are run only on
request.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Literal

from weft.bench.blocks.virtual import share_of, timeline_of
from weft.bench.problem import Call, Options, Prepared, Spec
from weft.bench.shapes import sized
from weft.kernels.engine.tuning import OPS
from weft.settings import Engine

NAME = "scaling"
WORLD: Literal["ranks", "one"] = "one"
SIZES = ("M", "N", "K")

_SHAPE = (4608, 9216, 4608)  # 72 ranks have equal shares
_WORLDS = {"h100": (2, 4, 8), "mi300x": (8,), "gb200-nvl72": (8, 32, 64, 72)}
# What the interpreter runs by default: tiles of a rank, by the ranks that each has to do with.
_TRITON_TILES = 4096
_MAIN: Engine = "host"
_PEER: Engine = "generic"


def cases(options: Options) -> list[Spec]:
    """Every op on every chip and number of ranks; --ranks plays no part, --filter picks."""
    shapes = [sized(entry, SIZES, NAME) for entry in options.shapes] or [_SHAPE]
    worlds = _WORLDS
    if options.quick:
        shapes, worlds = shapes if options.shapes else [(64, 64, 64)], {"h100": (2,)}
    return [
        Spec(
            f"{op} {M}x{N}x{K} {chip} W={W}",
            {"op": op, "M": M, "N": N, "K": K, "chip": chip, "world_size": W, "dtype": "bfloat16"},
        )
        for op in OPS
        for M, N, K in shapes
        for chip, sizes in worlds.items()
        for W in sizes
    ]


def prepare(spec: Spec, options: Options) -> Prepared:
    """One op on virtual ranks of a chip; each call runs it and returns its virtual time."""
    os.environ["TRITON_INTERPRET"] = "1"
    p = spec.params
    op, W = p["op"], p["world_size"]
    M, N, K = share_of(op, p["M"], p["N"], p["K"], W)

    @cache
    def run(engine: Engine) -> dict[str, float]:
        timeline = timeline_of(op, M, N, K, W, p["chip"], engine)
        chip, summary = timeline.hardware, timeline.summary()
        return summary | {
            "memory_us": summary["hbm_bytes"] / chip.hbm_bandwidth * 1e6,
            "link_us": summary["link_bytes"] / (chip.link_bandwidth * chip.link_sustained) * 1e6,
        }

    def part(name: str) -> Call:
        return lambda _: run(_MAIN)[f"{name}_us"]

    variants: dict[str, Call] = {
        _MAIN: lambda _: run(_MAIN)["makespan_us"],
        _PEER: lambda _: run(_PEER)["makespan_us"],
    }
    absent = {}
    tiles = -(-M // 128) * -(-N // 128) * W
    tiles *= 1 if M % W == 0 else W  # one rank's kernels stand for all, or each is interpreted
    if "triton" in options.engines or tiles <= _TRITON_TILES:
        variants["triton"] = lambda _: run("triton")["makespan_us"]
    else:
        absent["triton"] = "its kernel's interpretation takes minutes; --engines triton runs it"
    return Prepared(
        variants,
        {name: part(name) for name in ("arithmetic", "memory", "link")},
        virtual=True,
        main=_MAIN,
        peer=_PEER,
        absent=absent,
        notes=["virtual time, on the chip's data sheet; no value is computed"],
    )
