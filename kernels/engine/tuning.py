"""Tuned launches of the fused matmuls: tables of chips, used before heuristics, and their search.

    kernels/tuned/<chip>.json           what `weft tune` measures; $WEFT_TUNED names another folder
    kernels/tuned/<chip>.modelled.json  what `weft tune --hardware` plays in virtual time
        {"chip": "sm_90", "entries": [
          {"op": "all_gather_matmul", "M": 8192, "N": 3584, "K": 8192, "dtype": "bfloat16", "W": 8,
           "choice": {"tiling": {"block_m": 128, ...}}, ...}]}

A measured entry goes before a modelled one, and that before the heuristic. An entry holds for all M
that round up to its power of two, and for its N, K, dtype and W alone. K is 0 for ops whose ranks
may differ in it. The heuristic derives grids and workspaces from the tiles, whoever chose them, so
that kernels can run any choice.

Ranks must arrive at the same launch: the choice depends on what every rank knows, and on the table,
which is read once. The search involves all ranks as well: the same candidates in the same order,
each run by all ranks at once and scored by the slowest. A candidate that fails on any rank, or
whose result differs from the heuristic's, is out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from weft import settings
from weft.errors import WeftError
from weft.kernels.engine.chips import MOST_STAGES, Chip, Tiling

OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
OWN_FOLDER = Path(__file__).resolve().parent.parent / "tuned"


@dataclass(frozen=True)
class Choice:
    """What a table says of one problem; None leaves it to the heuristic.

    It holds only what ranks may differ in: columns of a weight may be uneven, and a rank with N - 1
    does not find the entry for N.

    Attributes:
        copy_programs: how many programs fetch shards.
    """

    tiling: Tiling | None = None
    copy_programs: int | None = None


@dataclass(frozen=True)
class Key:
    """A problem as tables know it; M is a power of two."""

    op: str
    M: int
    N: int
    K: int
    dtype: str
    W: int


def key_of(op: str, M: int, N: int, K: int, dtype: torch.dtype, W: int) -> Key:
    """The entry that a problem falls under.

    Example:
        M from 4097 to 8192 has the key 8192.
    """
    return Key(op, 1 << max(0, M - 1).bit_length(), N, K, str(dtype).removeprefix("torch."), W)


HEURISTIC = Choice()
_tried: Choice | None = None


def choice_for(
    op: str, chip: Chip, M: int, N: int, K: int, dtype: torch.dtype, world_size: int
) -> Choice:
    """What the chip's table says of the problem; `HEURISTIC` if nothing."""
    if _tried is not None:
        return _tried
    table = load(settings.tuned(), chip.name)
    return table.get(key_of(op, M, N, K, dtype, world_size), HEURISTIC) if table else HEURISTIC


@contextmanager
def trying(choice: Choice) -> Iterator[None]:
    """Launch every fused matmul of this process by `choice`."""
    global _tried
    before, _tried = _tried, choice
    try:
        yield
    finally:
        _tried = before


def folder() -> Path:
    """Where the tables are."""
    return Path(settings.tuned() or OWN_FOLDER)


def path_of(where: Path, chip: str, *, modelled: bool = False) -> Path:
    """The file of a chip's table: of what was measured, or of what was played in virtual time."""
    return where / f"{chip}{'.modelled' if modelled else ''}.json"


@lru_cache(maxsize=64)
def load(where: str, chip: str) -> Mapping[Key, Choice]:
    """The tables of `chip` in the folder `where` ("": ours); empty if there are none. Read once.

    Raises:
        ValueError: a file is not such a table.
    """
    here = Path(where) if where else OWN_FOLDER
    return _read_table(path_of(here, chip, modelled=True)) | _read_table(path_of(here, chip))


def _read_table(path: Path) -> dict[Key, Choice]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text())
        table = {}
        for entry in content["entries"]:
            key = Key(**{field.name: entry[field.name] for field in fields(Key)})
            choice = dict(entry["choice"])
            tiling = choice.pop("tiling", None)
            for name, value in (choice | (tiling or {})).items():
                if type(value) not in (int, bool) or not 0 <= value < 1 << 20:
                    raise ValueError(f"{name} is {value!r}")
            table[key] = Choice(tiling=Tiling(**tiling) if tiling else None, **choice)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a table of tuned launches ({type(error).__name__}: {error}): make it "
            f"again with `weft tune`, or remove it"
        ) from error
    return table


def write(path: Path, chip: str, entries: Iterable[Mapping[str, Any]]) -> None:
    """Write a table, or add to one, replacing entries of the same key. One line for each entry."""
    every = {_identity(entry): entry for entry in entries}
    if path.exists():
        _read_table(path)  # ValueError if it is not a table
        kept = json.loads(path.read_text())["entries"]
        every = {_identity(entry): entry for entry in kept} | every
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(every[key]) for key in sorted(every))
    path.write_text(f'{{"chip": "{chip}", "entries": [\n{lines}\n]}}\n')
    load.cache_clear()


def _identity(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(entry[field.name] for field in fields(Key))


def candidates(
    chip: Chip, dtype: torch.dtype, start: Tiling, *, copies: bool = False
) -> list[Choice]:
    """What the search tries, the heuristic first; the same list on every rank.

    Args:
        start: the heuristic's tiles. Tiles that do not fit the chip's memory are left out.
        copies: whether programs of the kernel fetch shards.
    """
    blocks = [(start.block_m, start.block_n, start.block_k, start.num_warps)]
    if chip.name == "interpreter":
        blocks += [(16, 32, 32, 4), (32, 16, 16, 4)]
    else:
        blocks += [
            (128, 256, 64, 8), (128, 128, 64, 8), (128, 128, 64, 4), (64, 256, 64, 8),
            (128, 64, 64, 4), (64, 128, 64, 4), (64, 128, 128, 4), (64, 64, 64, 4),
            (64, 64, 128, 4), (32, 64, 128, 4), (16, 64, 128, 4), (16, 128, 64, 4),
        ]  # fmt: skip
    found = [HEURISTIC]
    for block_m, block_n, block_k, num_warps in dict.fromkeys(blocks):
        stage_bytes = (block_m + block_n) * block_k * dtype.itemsize
        # Few rows wait for loads, by how many are under way: as many as there is room for.
        deepest = min(MOST_STAGES, (chip.shared_bytes - (8 << 10)) // stage_bytes)
        for stages in sorted({3, 4, deepest, start.num_stages}):
            if stages < 2 or stages * stage_bytes + (8 << 10) > chip.shared_bytes:
                continue
            if chip.name == "interpreter" and stages != start.num_stages:
                continue
            tiling = replace(
                start, block_m=block_m, block_n=block_n, block_k=block_k, num_warps=num_warps,
                num_stages=stages,
            )  # fmt: skip
            if tiling != start:
                found.append(Choice(tiling))
    if copies:
        found += [Choice(copy_programs=count) for count in _copy_counts(chip)]
    return found


def _copy_counts(chip: Chip) -> Sequence[int]:
    counts = {chip.programs // part for part in (16, 6, 4)}
    return sorted(count for count in counts if 1 <= count < chip.programs)


@dataclass(frozen=True)
class Trial:
    """A candidate's score: us of the slowest rank, or infinity and why it failed."""

    choice: Choice
    us: float
    failure: str = ""


def search(
    choices: Sequence[Choice],
    call: Callable[[], torch.Tensor],
    measure: Callable[[Callable[[], torch.Tensor]], float],
    gather: Callable[[Any], list[Any]],
    tolerance: float,
) -> tuple[Trial, list[Trial]]:
    """Try `choices` on all ranks. Returns the best, the same on every rank, and all trials.

    Args:
        choices: the same on every rank. Results must agree with that of the first one.
        call: the op, on this rank.
        measure: us that a call takes on this rank; starts together on all ranks.
        gather: the values of all ranks.
        tolerance: largest deviation, relative to the largest expected value.

    Raises:
        RuntimeError: the first choice failed, or a choice failed on some ranks only.
        PeerTimeout, MismatchError: a rank did not come, or makes another call.
    """
    # Here, as importing Triton takes a third of a second that CPU ranks need not wait for.
    from triton.runtime.errors import OutOfResources, PTXASError

    expected: torch.Tensor | None = None
    trials: list[Trial] = []
    for choice in choices:
        us, failure = math.inf, ""
        with trying(choice):
            try:
                got = call()
                if expected is None:
                    expected = got.clone()
                scale = float(expected.abs().max()) if expected.numel() else 1.0
                off = float((got - expected).abs().max()) if got.numel() else 0.0
                wrong = not off <= tolerance * scale
            except WeftError:  # the group is broken, whatever the choice
                raise
            except (OutOfResources, PTXASError, RuntimeError) as error:  # too few resources
                failure, wrong = f"{type(error).__name__}: {error}", False
            failures = gather(failure)
            if any(failures) and not all(failures):
                raise RuntimeError(f"a launch failed on some ranks only: {choice}: {failures}")
            if not failure and any(gather(wrong)):
                failure = f"wrong: {off:.3g} away from the heuristic's result"
            if not failure:
                us = max(gather(measure(call)))
        if not trials and failure:
            raise RuntimeError(f"the heuristic's launch failed: {failure}")
        trials.append(Trial(choice, us, failure))
    return min(trials, key=lambda trial: trial.us), trials


def entry_of(key: Key, best: Trial, heuristic: Trial) -> dict[str, Any]:
    """An entry of a table, with the times that justify it."""
    return asdict(key) | {
        "choice": {name: value for name, value in asdict(best.choice).items() if value},
        "us": round(best.us, 2),
        "heuristic_us": round(heuristic.us, 2),
    }
