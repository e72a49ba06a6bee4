"""How fast the fused matmuls multiply: tables of chips, as `weft bench solo` has measured them.

    kernels/tuned/<chip>.rates.json     beside the tuned launches; $WEFT_TUNED names another folder
        {"chip": "sm_90", "entries": [
          {"dtype": "bfloat16", "block_m": 128, "block_n": 256, "block_k": 64, "rate": 0.93}]}

A rate is that of a rank's true kernel, which has its peers' data at hand, relative to the library's
matmul of the same shape; of fp8, to twice the library's best in bf16. Every rank must read the same
table; it is read once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from weft import settings
from weft.kernels.engine import tuning
from weft.kernels.engine.chips import (
    Chip,
    Tiling,
    chunk_tiling_for,
    gather_tiling_for,
    scatters_in_one_shot,
    sum_tiling_for,
    sums_in_one_shot,
)

GUESS = 0.95  # where nothing was measured; of plain matmuls on an H200 0.94 to 0.99 (docs/gpu.md)
# Of Triton's attention, forward, the us that the library takes and the rate relative to it: on an
# H200 4,096 and 16,384 causal tokens of 32 heads of 128 take 319 and 4,561 us, and cuDNN 263 and
# 3,380.
_ATTENTION = (263.0, 0.82), (3380.0, 0.74)


class Tile(NamedTuple):
    """What a rate is of."""

    dtype: str
    block_m: int
    block_n: int
    block_k: int


def attention_rate(chip: str, library_us: float) -> float:
    """Of Triton's attention, forward, where the library's takes so long: a short call is less at
    the library's best. Between what was measured by the logarithm of the time; on other chips that
    of the long call.

    Example: on sm_90 0.82 at 100 us, 0.78 at 940 us, 0.74 at 10 ms.
    """
    (short, of_short), (long, of_long) = _ATTENTION
    if chip != "sm_90":
        return of_long
    share = math.log(max(library_us, short) / short) / math.log(long / short)
    return of_short + (of_long - of_short) * min(share, 1.0)


def tiling_of(op: str, chip: Chip, M: int, N: int, K: int, dtype: torch.dtype, W: int) -> Tiling:
    """The tiles of a fused matmul of W ranks, each of which makes (M, K) @ (K, N).

    They are those of the plain op: some epilogues narrow them.
    """
    gathers, chunk = op == "all_gather_matmul", -(-M // W)
    if op == "matmul_reduce_scatter":
        M = chunk * W  # what its launch is for
    tuned = tuning.choice_for(op, chip, M, N, K if gathers else 0, dtype, W).tiling
    if op == "matmul_reduce_scatter" and not scatters_in_one_shot(chip, chunk, N, dtype, W, tuned):
        return tuned or chunk_tiling_for(chip, chunk, N, dtype, W)
    if gathers:
        return tuned or gather_tiling_for(chip, M, N, dtype, W)
    two_shots = op == "matmul_all_reduce" and not sums_in_one_shot(chip, M, N, W)
    return tuned or sum_tiling_for(chip, M, N, dtype, two_shots=two_shots)


def tile_of(op: str, chip: Chip, M: int, N: int, K: int, dtype: torch.dtype, W: int) -> Tile:
    """What the rate of such a matmul is kept by."""
    return tile_by(tiling_of(op, chip, M, N, K, dtype, W), dtype)


def tile_by(tiling: Tiling, dtype: torch.dtype) -> Tile:
    """The key of these tiles."""
    name = str(dtype).removeprefix("torch.")
    return Tile(name, tiling.block_m, tiling.block_n, tiling.block_k)


def rate_of(chip: Chip, tile: Tile) -> tuple[float, str]:
    """The rate of kernels with such tiles, and where it is from."""
    table = load(settings.tuned(), chip.name)
    if tile not in table:
        return GUESS, f"assumed: not measured on {chip.name}"
    block = "x".join(map(str, tile[1:]))
    return table[tile], f"measured on {chip.name}, tiles of {block}"


def path_of(folder: Path, chip: str) -> Path:
    """The file of a chip's table."""
    return folder / f"{chip}.rates.json"


@lru_cache(maxsize=64)
def load(where: str, chip: str) -> Mapping[Tile, float]:
    """The table of `chip` in the folder `where` ("": ours); empty if there is none. Read once.

    Raises:
        ValueError: the file is not such a table.
    """
    path = path_of(Path(where) if where else tuning.OWN_FOLDER, chip)
    if not path.exists():
        return {}
    try:
        table = {}
        for entry in json.loads(path.read_text())["entries"]:
            tile = Tile(*(entry[name] for name in Tile._fields))
            table[tile] = float(entry["rate"])
            if not 0 < table[tile] < math.inf:
                raise ValueError(f"a rate of {entry['rate']}")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a table of rates ({type(error).__name__}: {error}): make it again with "
            f"`weft bench solo --rates`, or remove it"
        ) from error
    return table


def write(folder: Path, chip: str, measured: Iterable[tuple[Tile, float]]) -> Path:
    """Write the table of a chip: of several rates of a tile, the geometric mean."""
    logs: dict[Tile, list[float]] = {}
    for tile, rate in measured:
        logs.setdefault(tile, []).append(math.log(rate))
    lines = ",\n".join(
        json.dumps(tile._asdict() | {"rate": round(math.exp(sum(found) / len(found)), 3)})
        for tile, found in sorted(logs.items())
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(folder, chip)
    path.write_text(f'{{"chip": "{chip}", "entries": [\n{lines}\n]}}\n')
    load.cache_clear()
    return path
