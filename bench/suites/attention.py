"""Attention of sequences sharded over the ranks, and of new tokens to sharded caches.

    step      forward and backward          forward      forward alone:
    `weft.bench.blocks.context_parallel` decode    a new token of each of 8 sequences to all before
    it: `weft.bench.blocks.decode`

A shape is that of the whole sequence; a model determines the heads.
"""

from __future__ import annotations

from typing import Any, Literal

from weft.bench.blocks import context_parallel, decode
from weft.bench.problem import Options, Prepared, Spec
from weft.bench.shapes import Model, sized

NAME = "attention"
WORLD: Literal["ranks", "one"] = "ranks"
SIZES = ("tokens", "heads", "kv_heads", "head_dim")

_KINDS = ("step causal", "step full", "forward causal", "decode")
# Kind and shape. On a GPU the heads of Llama 3 8B.
_QUICK = tuple((kind, (64, 8, 4, 16)) for kind in _KINDS)
_CPU = (
    ("step causal", (1024, 8, 8, 64)),
    ("step causal", (4096, 8, 8, 64)),
    ("step causal", (4096, 8, 2, 64)),
    ("step full", (4096, 8, 8, 64)),
    ("forward causal", (4096, 8, 8, 64)),
    ("forward causal", (8192, 8, 8, 64)),
    ("decode", (1024, 8, 2, 64)),
    ("decode", (8192, 8, 2, 64)),
    ("decode", (32768, 8, 2, 64)),
)
_GPU = tuple(
    (kind, (tokens, 32, 8, 128))
    for kind in ("step causal", "forward causal", "decode")
    for tokens in (4096, 16384)
)


def cases(options: Options) -> list[Spec]:
    """The suite's cases, or every kind of the user's shapes."""
    given: Any = _QUICK if options.quick else _GPU if options.device == "cuda" else _CPU
    if options.shapes:
        shapes = [
            _sizes_of_model(s, options) if isinstance(s, Model) else s for s in options.shapes
        ]
        given = [(kind, sized(shape, SIZES, NAME)) for shape in shapes for kind in _KINDS]
    return [
        Spec(
            f"{kind} {'x'.join(map(str, shape))}",
            {"kind": kind, "dtype": options.dtype_name} | dict(zip(SIZES, shape, strict=True)),
        )
        for kind, shape in given
    ]


def _sizes_of_model(model: Model, options: Options) -> tuple[int, ...]:
    sizes, tokens = model.for_run(options)
    return tokens, sizes.heads, sizes.kv_heads, sizes.head_dim


def prepare(spec: Spec, options: Options) -> Prepared:
    """One case, on this rank."""
    what, _, extent = spec.params["kind"].partition(" ")
    sizes = {name: spec.params[name] for name in SIZES}
    if what == "decode":
        return decode.prepare(**sizes, options=options)
    problem = context_parallel.AttentionTask(
        **sizes, causal=extent == "causal", backward=what == "step"
    )
    return context_parallel.prepare(problem, options)
