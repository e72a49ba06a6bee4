"""Problem sizes of the suites: published models, the user's own, and their notation.

`--shapes` takes any number of

    4096,14336,4096      sizes, in the order that the suite's help says
    llama-3-8b           a model of the table below
    mine.yaml            a file with models of the same fields and lists of sizes:

        models:
          mine: {hidden: 2048, ffn: 8192, heads: 16, kv_heads: 4, head_dim: 128}
        sizes:
          - [4096, 8192, 2048]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.bench.registry import SUITES

if TYPE_CHECKING:
    from weft.bench.problem import Options

# On a CPU models are shrunk to this width, proportions kept.
_MIRRORED_HIDDEN = 512
_MIRRORED_HEAD_DIM = 32
_TOKENS, _MIRRORED_TOKENS = 4096, 1024


@dataclass(frozen=True)
class Model:
    """The sizes of a decoder layer that tensor parallelism cuts.

    Attributes:
        hidden: features of a token. ffn: features inside the feed-forward layer.
        heads, kv_heads, head_dim: of attention, whose output has heads * head_dim features.
        source: where the sizes were published.
    """

    name: str
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    source: str = ""

    def mirrored(self, ranks: int) -> Model:
        """The same proportions at a width that two cores can multiply, cut evenly by `ranks`."""
        shrink = self.hidden / _MIRRORED_HIDDEN
        if shrink <= 1:
            return self
        per_kv = self.heads // self.kv_heads
        wanted = self.heads * self.head_dim / shrink / _MIRRORED_HEAD_DIM
        kv_heads = max(1, round(wanted / per_kv / ranks)) * ranks
        return replace(
            self,
            hidden=_MIRRORED_HIDDEN,
            ffn=round(self.ffn / shrink / ranks) * ranks,
            heads=kv_heads * max(1, round(wanted / kv_heads)),
            kv_heads=kv_heads,
            head_dim=_MIRRORED_HEAD_DIM,
        )

    def for_run(self, options: Options) -> tuple[Model, int]:
        """The sizes that a run takes, and the number of tokens: mirrored on a CPU by default."""
        if options.full_size or options.device == "cuda":
            return self, _TOKENS
        return self.mirrored(options.ranks), _MIRRORED_TOKENS


MODELS = {
    model.name: model
    for model in (
        Model("llama-3-8b", 4096, 14336, 32, 8, 128, "config.json of meta-llama/Meta-Llama-3-8B"),
        Model("llama-3-70b", 8192, 28672, 64, 8, 128, "config.json of meta-llama/Meta-Llama-3-70B"),
        Model("llama-3-405b", 16384, 53248, 128, 8, 128,
              "arXiv:2407.21783, table 3; config.json of meta-llama/Llama-3.1-405B"),
        Model("qwen2-72b", 8192, 29568, 64, 8, 128,
              "arXiv:2407.10671, table 1; config.json of Qwen/Qwen2-72B"),
        # Latent attention: what is sharded are the projections from and to 128 heads of 128
        # features. The feed-forward layer is that of the first three, dense, layers.
        Model("deepseek-v3", 7168, 18432, 128, 128, 128,
              "arXiv:2412.19437, section 4.2; config.json of deepseek-ai/DeepSeek-V3"),
    )
}  # fmt: skip


def parse_shapes(text: str) -> tuple[Any, ...]:
    """The entries of one word after `--shapes`: `Model`s and tuples of sizes."""
    if text in MODELS:
        return (MODELS[text],)
    if text.endswith((".yaml", ".yml")):
        return _from_file(Path(text))
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if text in SUITES:
        raise argparse.ArgumentTypeError(f"name suites first: weft bench {text} --shapes ...")
    if not sizes or min(sizes) < 1:
        raise argparse.ArgumentTypeError(
            f"a shape is sizes with commas between them, a .yaml file, or one of "
            f"{', '.join(MODELS)}; got {text!r}"
        )
    return (sizes,)


def _from_file(path: Path) -> tuple[Any, ...]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise argparse.ArgumentTypeError(f"cannot read {path}: {error}") from None
    if not isinstance(content, dict) or not content or not content.keys() <= {"models", "sizes"}:
        raise argparse.ArgumentTypeError(f'{path} must hold "models" or "sizes", or both')
    models, rows = content.get("models") or {}, content.get("sizes") or []
    if not isinstance(models, dict) or not isinstance(rows, list):
        raise argparse.ArgumentTypeError(f'{path}: "models" are by name, "sizes" are a list')
    needed = {each.name for each in fields(Model)} - {"name", "source"}
    entries: list[Any] = []
    for name, sizes in models.items():
        if (
            not isinstance(sizes, dict)
            or not needed <= sizes.keys() <= needed | {"source"}
            or not all(isinstance(sizes[each], int) and sizes[each] > 0 for each in needed)
        ):
            raise argparse.ArgumentTypeError(
                f"{path}: a model has {', '.join(sorted(needed))}, at least 1 each; {name} has "
                f"{sizes}"
            )
        entries.append(Model(name=name, **sizes))
    for row in rows:
        entries += parse_shapes(",".join(map(str, row)) if isinstance(row, list) else str(row))
    return tuple(entries)


def sized(entry: Any, names: tuple[str, ...], suite: str) -> tuple[int, ...]:
    """A tuple of sizes, one for each of `names`.

    Raises:
        ValueError: it is of another length, or a model.
    """
    if isinstance(entry, Model) or len(entry) != len(names):
        given = entry.name if isinstance(entry, Model) else ",".join(map(str, entry))
        raise ValueError(f"a shape of {suite} is {','.join(names)}, got {given}")
    sizes: tuple[int, ...] = entry
    return sizes
