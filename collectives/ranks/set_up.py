"""How the ranks of a group tell each other objects before they share memory.

Through the store of the process group, in which they look for each other's keys; by the process
group where its ranks are on several hosts, as no store takes that in each call.
"""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from weft import settings
from weft.collectives.ranks import waits
from weft.collectives.ranks.bounds import finish
from weft.errors import MismatchError, PeerTimeout, WeftError

if TYPE_CHECKING:
    from weft.collectives.ranks.group import Group

_arrivals: Counter[str] = Counter()
_GAVE_UP = b"weft gave up on "  # no pickle begins so


def gather_by_store(group: Group, store: Any, value: Any) -> list[bytes]:
    """What every rank has put into the store of a group, pickled.

    A process group would wait for its own time-out, half an hour, and then name nobody. Keys are
    numbered, as a store outlives the groups made with it; a rank that gives up says so under its
    own, until it comes again. All ranks have read the keys before the last.
    """
    name, W = group.pg.group_name, group.world_size
    number = _arrivals[name] + 1
    keys = [f"weft {number} {rank}" for rank in range(W)]
    store.set(keys[group.rank], pickle.dumps(value))
    found: list[bytes] = []

    def come() -> bool:
        if store.check(keys):
            found[:] = store.multi_get(keys)
        return bool(found) and not any(each.startswith(_GAVE_UP) for each in found)

    try:
        _until(come, group, lambda: _absent(group, store, keys), number)
    except WeftError as error:
        gone = error.peer if isinstance(error, PeerTimeout) else _absent(group, store, keys)
        store.set(keys[group.rank], _GAVE_UP + str(gone).encode())
        raise
    if number > 1:
        store.delete_key(f"weft {number - 1} {group.rank}")
    _arrivals[name] = number
    return found


def gather_by_group(group: Group, what: str, value: Any) -> list[bytes]:
    """What every rank gives, pickled, by two collectives of its process group on the CPU."""
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = [size for (size,) in gather_words(group, what, [len(data)])]
    padded = torch.nn.functional.pad(data, (0, max(sizes) - len(data)))
    parts = _gathered(group, what, padded)
    return [bytes(part[:n].numpy()) for part, n in zip(parts, sizes, strict=True)]


def gather_words(group: Group, what: str, words: Sequence[int]) -> list[list[int]]:
    """Every rank's integers of 64 bits, as many on each, by one collective of its process group."""
    if group.virtual is not None:
        return group.virtual.gather(group.rank, list(words))
    device = "cpu" if _ranks_on_cpu(group) else torch.device("cuda", torch.cuda.current_device())
    mine = torch.tensor(words, dtype=torch.int64, device=device)
    return [part.tolist() for part in _gathered(group, what, mine)]


def _ranks_on_cpu(group: Group) -> bool:
    return torch.device("cpu") in group.pg._device_types


def _gathered(group: Group, what: str, mine: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(mine) for _ in range(group.world_size)]
    work = dist.all_gather(parts, mine, group=group.pg, async_op=True)
    if _ranks_on_cpu(group):
        finish(group, what, work)
    else:
        work.wait()
    return parts


def _until(come: Callable[[], bool], group: Group, absent: Callable[[], int], number: int) -> None:
    """Wait in a set-up until all ranks have `come`.

    Args:
        absent: a rank that has not.

    Raises:
        PeerTimeout: one did not come in time, or has died.
        MismatchError: one waits for this rank in another call.
    """
    timeout_s, start = settings.timeout_s(), time.monotonic_ns()
    pause_s, next_look, lasting = 1e-4, start + waits.LOOK_NS, None
    try:
        while True:
            looked = time.monotonic_ns()
            if come():
                return
            if (waited_s := (looked - start) / 1e9) > timeout_s:
                raise _not_come(group, absent(), number, waited_s)
            if looked > next_look and group.processes:
                next_look = looked + waits.LOOK_NS
                for peer, process in enumerate(group.processes):
                    if not process.alive():
                        raise _not_come(group, peer, number, waited_s)
                peer = absent()
                pid = group.processes[peer].pid
                if lasting is None or lasting.peer != pid:
                    lasting = waits.LongWait(pid, group.calls.group, group.calls.last, start)
                stuck = {} if peer == group.rank else lasting.stuck(looked)
                if waits.closes(stuck):
                    calls = {each: wait.calls for each, wait in stuck.items()}
                    waits.answer(calls, group.calls.last)
                    raise MismatchError(group.differ(stuck))
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.02)
    finally:
        if lasting is not None:
            lasting.end()


def _not_come(group: Group, peer: int, number: int, waited_s: float) -> PeerTimeout:
    history = group.calls.history()
    known = "set-up of the group", number, waited_s, history
    return PeerTimeout(group.rank, peer, *known, ranks=group.ranks)


def _absent(group: Group, store: Any, keys: Sequence[str]) -> int:
    """A rank that has not come: one that nobody has seen, before one that has given that up."""
    gave_up = group.rank
    for peer in group.peers():
        if not store.check([keys[peer]]):
            return peer
        if (said := store.get(keys[peer])).startswith(_GAVE_UP):
            blamed = int(said.removeprefix(_GAVE_UP))
            gave_up = peer if blamed == group.rank else blamed
    return gave_up
