"""A training step of the blocks of published models: SwiGLU and attention, tensor parallel.

On a CPU the models are mirrored down to a width of 512, proportions kept (--full-size: as they
are). Input and output are sequence-sharded; variants and bound: `weft.bench.blocks`. Sequences too
long for one rank are in the suite "attention".
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Literal

from weft.bench import blocks
from weft.bench.problem import Options, Prepared, Spec
from weft.bench.shapes import MODELS, TOKENS, Model

NAME = "layers"
WORLD: Literal["ranks", "one"] = "ranks"


def cases(options: Options) -> list[Spec]:
    """Every block of each model."""
    full = options.full_size or options.device == "cuda"
    tokens = TOKENS["full" if full else "mirrored"]
    models = list(options.shapes or MODELS.values())
    if options.quick:
        models, tokens = models[:1], 64
    specs = []
    for model in models:
        if not isinstance(model, Model):
            raise ValueError(f"a shape of {NAME} is a model's name, got {model}")
        sizes = model if full else model.mirrored(options.ranks)
        if sizes.kv_heads % options.ranks or sizes.ffn % options.ranks:
            raise ValueError(
                f"--ranks {options.ranks} must divide the kv_heads={sizes.kv_heads} and the "
                f"ffn={sizes.ffn} of {model.name}"
            )
        params = asdict(sizes) | {"tokens": tokens, "dtype": options.dtype_name}
        specs += [Spec(f"{model.name} {kind}", params | {"block": kind}) for kind in _BLOCKS]
    return specs


_BLOCKS = ("mlp", "attention")


def prepare(spec: Spec, options: Options) -> Prepared:
    """One block, on this rank."""
    p = spec.params
    if p["block"] == "mlp":
        block = blocks.swiglu(p["tokens"], p["hidden"], p["ffn"], options.ranks)
    else:
        block = blocks.attention(p["tokens"], p["hidden"], p["heads"], p["kv_heads"], p["head_dim"])
    return blocks.prepare(block, options)
