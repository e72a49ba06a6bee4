"""Ring attention over long sequences, a training step, beside scaled_dot_product_attention.

The variants, and the bound that torch's attention is: `weft.bench.context_block`. For GPUs:
`weft.bench.gpu` runs it.
"""

from __future__ import annotations

from typing import Literal

from weft.bench import context_block
from weft.bench.problem import Options, Prepared, Spec
from weft.bench.shapes import sized

NAME = "ring attention"
WORLD: Literal["ranks", "one"] = "ranks"
SIZES = ("tokens", "heads", "kv_heads", "head_dim")

# Heads of Llama 3 8B.
_SHAPES = ((4096, 32, 8, 128), (16384, 32, 8, 128))
_QUICK = ((64, 8, 4, 16),)


def cases(options: Options) -> list[Spec]:
    """Whole sequences, causal, zigzag over the ranks."""
    shapes = options.shapes or (_QUICK if options.quick else _SHAPES)
    dtype = str(options.dtype).split(".")[1]
    specs = []
    for shape in shapes:
        sizes = sized(shape, SIZES, NAME)
        params = dict(zip(SIZES, sizes, strict=True)) | {"dtype": dtype}
        specs.append(Spec(f"ring attention {'x'.join(map(str, sizes))}", params))
    return specs


def prepare(spec: Spec, options: Options) -> Prepared:
    """The step of each variant on this rank."""
    tokens, heads, kv_heads, head_dim = (spec.params[name] for name in SIZES)
    return context_block.prepare(tokens, heads, kv_heads, head_dim, options)
