"""Checkpoints with a flipped bit, and metadata that are garbage."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from weft.dtensor.checkpoint import CheckpointError, load, save

_EACH = 25


def _saved(folder: Path, chance: random.Random) -> dict[str, Any]:
    torch.manual_seed(chance.randrange(1 << 30))
    state = {
        "w": torch.randn(chance.randrange(1, 99), chance.randrange(1, 99)),
        "half": torch.randn(chance.randrange(1, 999)).bfloat16(),
        "steps": [chance.randrange(99), {"name": "x" * chance.randrange(99)}],
    }
    save(state, folder)
    return state


def _loads_right(state: dict[str, Any], folder: Path) -> bool:
    fresh = {"w": torch.zeros_like(state["w"]), "half": torch.zeros_like(state["half"]),
             "steps": [0, {"name": ""}]}  # fmt: skip
    load(fresh, folder)
    tensors = all(torch.equal(fresh[name], state[name]) for name in ("w", "half"))
    return tensors and fresh["steps"] == state["steps"]


def flips(chance: random.Random, folder: Path) -> Iterator[None]:
    state = _saved(folder, chance)
    files = {path: path.read_bytes() for path in folder.iterdir()}
    for _ in range(_EACH):
        path = chance.choice(sorted(files))
        data, at = bytearray(files[path]), chance.randrange(len(files[path]))
        bit = chance.randrange(8)
        data[at] ^= 1 << bit
        path.write_bytes(data)
        try:
            right = _loads_right(state, folder)
        except CheckpointError:
            right = True
        assert right, f"bit {bit} of byte {at} of {path.name}"
        path.write_bytes(files[path])
        yield


def garbage(chance: random.Random, data: bytes) -> bytes:
    """Bytes replaced, cut out, doubled, or made up."""
    made = bytearray(data)
    for _ in range(chance.randint(1, 6)):
        at, how = chance.randrange(len(made) + 1), chance.randrange(5)
        if how == 0:
            made[at : at + 1] = chance.randbytes(1)
        elif how == 1:
            del made[at : at + chance.randint(1, 20)]
        elif how == 2:
            made[at:at] = made[at : at + 9]
        elif how == 3:
            made[at:at] = chance.randbytes(chance.randint(1, 9))
        else:
            del made[at:]
    return bytes(made)


def metadata(chance: random.Random, folder: Path) -> Iterator[None]:
    state, file = _saved(folder, chance), folder / ".metadata"
    whole = file.read_bytes()
    for _ in range(_EACH):
        # With the check sum at the end, which tells nearly all, or without.
        made = garbage(chance, whole if chance.random() < 0.3 else whole[:-12])
        file.write_bytes(made)
        try:
            _loads_right(state, folder)  # without a check sum metadata may name other parts
        except (CheckpointError, ValueError) as error:
            assert str(folder) in str(error) or not isinstance(error, CheckpointError), error
        yield
