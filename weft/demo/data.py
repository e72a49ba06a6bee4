"""Real text that every machine has: the Python standard library's own sources, as bytes."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_HELD_OUT = 0.05  # of the text, at its end
_LEAST = 100_000  # bytes


@dataclass(frozen=True)
class Corpus:
    """A training text and a held-out tail of it, uint8 each."""

    train: Tensor
    held_out: Tensor
    files: int

    def batch(
        self, step: int, batch: int, seq_len: int, *, seed: int, held_out: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The bytes of a step and the bytes that follow each, both (batch, seq_len) int64.

        They depend on the arguments alone, so that every process draws the same.
        """
        text = self.held_out if held_out else self.train
        generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 2 + held_out)
        starts = torch.randint(len(text) - seq_len, (batch, 1), generator=generator)
        window = text[starts + torch.arange(seq_len + 1)].long()
        return window[:, :-1], window[:, 1:]


def standard_library() -> Corpus:
    """The standard library's top-level modules, in the order of their names.

    Raises:
        RuntimeError: this Python has fewer than 100,000 bytes of sources (it may be zipped).
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    if len(text) < _LEAST:
        raise RuntimeError(
            f"{folder} holds {len(text)} bytes of Python sources, the demo trains on at least "
            f"{_LEAST}: run it with a Python that has its standard library as files"
        )
    cut = int(len(text) * (1 - _HELD_OUT))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return Corpus(data[:cut], data[cut:], len(files))
