"""One training step of a minimal tensor-parallel MLP: a shape is tokens, hidden, ffn.

Variants and bound: `weft.bench.blocks.tensor_parallel`.
"""

from __future__ import annotations

from typing import Literal

from weft.bench.blocks import tensor_parallel
from weft.bench.problem import Options, Prepared, Spec
from weft.bench.shapes import sized

NAME = "mlp"
WORLD: Literal["ranks", "one"] = "ranks"
SIZES = ("tokens", "hidden", "ffn")

SHAPES = ((512, 512, 2048), (2048, 512, 2048), (256, 2048, 4096), (4096, 256, 512))


def cases(options: Options) -> list[Spec]:
    """One case a shape."""
    entries = options.shapes or (((24, 16, 32),) if options.quick else SHAPES)
    shapes = [sized(entry, SIZES, NAME) for entry in entries]
    for tokens, hidden, ffn in shapes:
        if tokens % options.ranks or ffn % options.ranks:
            raise ValueError(
                f"--ranks {options.ranks} must divide the tokens and the ffn of every shape, got "
                f"{tokens},{hidden},{ffn}"
            )
    return [Spec.of_sizes(SIZES, shape, options) for shape in shapes]


def prepare(spec: Spec, options: Options) -> Prepared:
    """One shape, on this rank."""
    return tensor_parallel.prepare(
        tensor_parallel.mlp(*(spec.params[name] for name in SIZES)), options
    )
