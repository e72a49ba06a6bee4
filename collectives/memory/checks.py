"""What WEFT_CHECK=1 compares on all ranks before a call: the calls, and the shards of tokens."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from types import FrameType

import torch

from weft import settings
from weft.collectives.memory.exchange import agree, exchange_on
from weft.collectives.memory.workspace import workspace
from weft.collectives.ranks.flight import fitted, hash_of_words
from weft.collectives.ranks.group import Group
from weft.errors import MismatchError

_CPU = torch.device("cpu")
_RECORD_BYTES, _CALL_BYTES = 1024, 640
_NOT_THE_PROGRAM = {"weft", "torch", "contextlib"}


def check_call(group: Group, describe: Callable[[], str]) -> None:
    """With WEFT_CHECK=1, compare descriptions of the call across the ranks before anything else.

    Raises:
        MismatchError: on every rank, naming the ranks that differ and what each of them calls.
    """
    if not settings.check_calls() or group.world_size == 1 or group.unreached(_CPU):
        return
    call, asked = describe(), settings.current_engine()
    if asked != "auto":
        call += f' on the "{asked}" engine'
    # The hash is compared, the rest is to be read: of a path that is too long, the end.
    told = f"{hash_of_words(call):x}\n".encode() + fitted(call, _CALL_BYTES) + b"\n"
    told += _caller().encode(errors="replace")[len(told) - _RECORD_BYTES :]
    text = told.ljust(_RECORD_BYTES, b"\0")
    shape = (_RECORD_BYTES,)
    ws = workspace(group, _RECORD_BYTES, channel="check", device=_CPU)
    with exchange_on(ws, "the check of WEFT_CHECK=1", _CPU) as ex:
        ex.local(shape, torch.uint8).copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        ex.signal_all()
        ex.wait_all()
        records = [
            bytes(ex.peer(rank, shape, torch.uint8).tolist()).rstrip(b"\0").decode(errors="replace")
            for rank in range(ex.world_size)
        ]
    hashes, calls, lines = zip(*(record.split("\n", 2) for record in records), strict=True)
    if len(set(hashes)) > 1:
        usual = max(set(hashes), key=lambda hash: (hashes.count(hash), -hashes.index(hash)))
        at = hashes.index(usual)
        odd = [rank for rank, hash in enumerate(hashes) if hash != usual]
        raise MismatchError(
            f"the ranks make different calls: {calls[at]} on rank {at} ({lines[at]})"
            + "".join(f", but {calls[rank]} on rank {rank} ({lines[rank]})" for rank in odd)
        )


def _caller() -> str:
    """The line of the program that makes a call: the innermost of a file that is not weft's own,
    nor torch's.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame and frame.f_globals.get("__name__", "").split(".")[0] in _NOT_THE_PROGRAM:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "in backward"


def check_shards(group: Group, op: str, x: torch.Tensor, way_out: str) -> None:
    """With WEFT_CHECK=1, check that no two ranks pass the same tokens (*, features) as shards.

    Shards whose tokens are all alike, as padding is, and those of one token, tell nothing.

    Args:
        way_out: what to do, for the error.

    Raises:
        MismatchError: on every rank, naming the ranks whose shards are bitwise the same.
    """
    if not settings.check_calls() or group.world_size == 1 or group.unreached(_CPU):
        return
    tokens = x.detach().reshape(-1, x.shape[-1]).contiguous()
    raw = tokens.view(torch.uint8).cpu()
    told = bool((raw != raw[:1]).any())  # the hash, or one of no other rank's
    mine = zlib.crc32(raw.numpy().data) if told else -1 - group.rank
    ranks: dict[int, list[int]] = {}
    for rank, value in enumerate(agree(group, f"{op}, check of shards", mine)):
        ranks.setdefault(value, []).append(rank)
    if same := [alike for alike in ranks.values() if len(alike) > 1]:
        raise MismatchError(
            f"{op} takes this rank's shard of the tokens, and ranks "
            + "; ranks ".join(", ".join(map(str, alike)) for alike in same)
            + " pass bitwise the same: gradients would count these tokens once for each of them. "
            + way_out
        )
