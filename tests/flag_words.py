"""Memory whose words carry the flags of calls, as tests prepare it and look at it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from weft.collectives.memory.workspace import Workspace
from weft.collectives.ranks import pad


def fill_with_nan(ws: Workspace) -> None:
    """On all ranks, with a flag that is that of no call here."""
    dist.barrier()
    for half in range(2):
        ws.tensor(ws.rank, half, (ws.half_bytes,), torch.uint8).fill_(255)
    dist.barrier()


def calls_across_flags(ws: Workspace) -> Iterator[int]:
    """Numbers 1 to 4 of calls, each to be made before the next is asked for: across the 2^31th and
    the 2^32th, in memory of flags that are to come, of which all are stored anew just before.
    """
    for before in (2**31 - 3, 2**32 - 3):
        dist.barrier()
        ws.buffer.pad_of(ws.rank)[pad.GENERATION] = before
        for words in _halves(ws):
            words.fill_(_signed(before + 4))
        dist.barrier()
        for call in range(1, 5):
            yield call
            dist.barrier()
            for half, words in enumerate(_halves(ws)) if call == 2 else ():
                assert words[:, 1].unique().tolist() == [_signed(before + 1 + half)]
            dist.barrier()


def _halves(ws: Workspace) -> list[torch.Tensor]:
    return [ws.tensor(ws.rank, half, (ws.half_bytes // 8, 2), torch.int32) for half in range(2)]


def _signed(flag: int) -> int:
    """The lower 32 bits, as an int32 has them."""
    return (flag + 2**31) % 2**32 - 2**31
