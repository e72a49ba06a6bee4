"""A training step of the blocks of published models: SwiGLU and attention, tensor parallel.

On a CPU the models are scaled down to a width of 512 in proportion (unless --full-size). Input and
output are sequence-sharded; variants and bound: `weft.bench.blocks.tensor_parallel`. Sequences too
long for one rank are in the suite "attention".
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Literal

from weft.bench.blocks import tensor_parallel
from weft.bench.problem import Options, Prepared, Spec
from weft.bench.shapes import MODELS, Model

NAME = "layers"
WORLD: Literal["ranks", "one"] = "ranks"


def cases(options: Options) -> list[Spec]:
    """Every block of each model."""
    models = list(options.shapes or MODELS.values())
    specs = []
    for model in models[:1] if options.quick else models:
        if not isinstance(model, Model):
            raise ValueError(f"a shape of {NAME} is a model's name, got {model}")
        sizes, tokens = model.for_run(options)
        if sizes.kv_heads % options.ranks or sizes.ffn % options.ranks:
            raise ValueError(
                f"--ranks {options.ranks} must divide the kv_heads={sizes.kv_heads} and the "
                f"ffn={sizes.ffn} of {model.name}"
            )
        params = asdict(sizes) | {
            "tokens": 64 if options.quick else tokens,
            "dtype": options.dtype_name,
        }
        specs += [Spec(f"{model.name} {kind}", params | {"block": kind}) for kind in _BLOCKS]
    return specs


_BLOCKS = ("mlp", "attention")


def prepare(spec: Spec, options: Options) -> Prepared:
    """One block, on this rank."""
    p = spec.params
    if p["block"] == "mlp":
        block = tensor_parallel.swiglu(p["tokens"], p["hidden"], p["ffn"], options.ranks)
    else:
        block = tensor_parallel.attention_pair(
            p["tokens"], p["hidden"], p["heads"], p["kv_heads"], p["head_dim"]
        )
    return tensor_parallel.prepare(block, options)
