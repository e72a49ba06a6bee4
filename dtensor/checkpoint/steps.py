"""The steps that ranks take together in a save or a load.

    each rank       its part of a step  -->  store  -->  rank 0   combines all parts
    each rank       <--  store  <--  its own result, or what has failed on which rank

Through the store of the group, so that a thread may save while the program goes on with calls of
the same process group, and that who waits can tell who is absent and give up in time. torch's own
saves and loads wait as long as the process group does.
"""

from __future__ import annotations

import pickle
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from weft import settings
from weft.collectives.ranks.bounds import store_of
from weft.collectives.ranks.group import Group
from weft.errors import PeerTimeout

_CHUNK_BYTES = 4 << 20  # TCPStore refuses values of more than 8 MiB
_GAVE_UP = b"gave up on "
_LOOK_S = 0.05

_over: Counter[str] = Counter()  # saves and loads of a process group that came to their end


class Steps:
    """Those of one save or load of a group.

    Attributes:
        rank, world_size: of the group; 0 and 1 if there is none.
    """

    def __init__(self, group: Group | None, op: str) -> None:
        self._group, self._op = group, op
        self.rank, self.world_size = (group.rank, group.world_size) if group else (0, 1)
        self._several = group is not None and group.world_size > 1
        if group is not None and self._several and not group.virtual:
            self._store, self._name = store_of(group), group.pg.group_name
            self._number = _over[self._name] + 1
            self._keys = f"weft {op} {self._number}"

    def take(
        self,
        name: str,
        part: Callable[[], Any],
        combine: Callable[[list[Any]], Sequence[Any]],
    ) -> Any:
        """This rank's result of `combine`, which rank 0 makes of the `part` of every rank.

        Raises:
            CheckpointException: on all ranks, of what has been raised on any.
            PeerTimeout: a rank did not come to this step in time, or has died.
        """
        try:
            mine: Any = part()
        except BaseException as error:  # as torch does: all ranks are told
            mine = CheckpointException(name, {self.rank: _wrap_exception(error)})
        parts, results = self._gathered(name, mine), None
        if parts is not None:
            failures: dict[int, Any] = {}
            for each in parts:
                if isinstance(each, CheckpointException):
                    failures |= each.failures
            if not failures:
                try:
                    results = list(combine(parts))
                except BaseException as error:
                    failures = {0: _wrap_exception(error)}
            if failures:
                results = [CheckpointException(name, failures)] * self.world_size
        result = self._scattered(name, results)
        if isinstance(result, CheckpointException):
            raise result
        return result

    def end(self) -> None:
        """All steps are taken."""
        if self._several and self._group is not None and not self._group.virtual:
            _over[self._name] = max(_over[self._name], self._number)

    def _gathered(self, name: str, mine: Any) -> list[Any] | None:
        """All parts on rank 0."""
        if self._group is None or not self._several:
            return [mine]
        if self._group.virtual:
            parts = self._group.gather_objects(mine, f"{self._op}, {name}")
            return parts if self.rank == 0 else None
        if self.rank == 0:
            self._put(f"{name} of 0", b"")
            self._delete(f"{name} without 0")
            keys = {peer: f"{name} of {peer}" for peer in range(1, self.world_size)}
            self._wait(name, keys)
            return [mine, *(pickle.loads(self._get(key)) for key in keys.values())]
        self._delete(f"{name} for {self.rank}")  # of a save that has failed
        self._put(f"{name} of {self.rank}", pickle.dumps(mine))
        self._delete(f"{name} without {self.rank}")
        return None

    def _scattered(self, name: str, results: list[Any] | None) -> Any:
        """This rank's result of those that rank 0 has."""
        if self._group is None or not self._several:
            return results and results[0]
        if self._group.virtual:
            told = self._group.gather_objects(results, f"{self._op}, {name}")
            return told[0][self.rank]
        if results is not None:
            # What is left of a save that has failed must not be taken for parts of the next.
            token = uuid.uuid4().hex
            for peer in range(1, self.world_size):
                self._put(f"{name} for {peer}", pickle.dumps((token, results[peer])))
            for peer in range(self.world_size):
                self._delete(f"{name} of {peer}")
            result = results[0]
        else:
            key = f"{name} for {self.rank}"
            self._wait(name, {0: key})
            token, result = pickle.loads(self._get(key))
            self._delete(key)
        self._keys = f"weft {token}"
        return result

    def _put(self, key: str, value: bytes) -> None:
        chunks = [value[at : at + _CHUNK_BYTES] for at in range(0, len(value), _CHUNK_BYTES)]
        for i, chunk in enumerate(chunks[1:]):
            self._store.set(f"{self._keys} {key} {i}", chunk)
        head = b"%d " % (len(chunks) - 1 if chunks else 0)
        self._store.set(f"{self._keys} {key}", head + (chunks[0] if chunks else b""))

    def _get(self, key: str) -> bytes:
        more, _, value = self._store.get(f"{self._keys} {key}").partition(b" ")
        for i in range(int(more)):
            value += self._store.get(f"{self._keys} {key} {i}")
            self._delete(f"{key} {i}")
        return bytes(value)

    def _delete(self, key: str) -> None:
        self._store.delete_key(f"{self._keys} {key}")

    def _is_there(self, key: str) -> bool:
        return bool(self._store.check([f"{self._keys} {key}"]))

    def _wait(self, name: str, keys: dict[int, str]) -> None:
        """Wait for what ranks put under these keys."""
        assert self._group is not None
        start, bound_s, pause_s = time.monotonic(), settings.timeout_s(), 1e-4
        next_look, missing = start + _LOOK_S, dict(keys)
        try:
            while True:
                missing = self._missing(name, missing)
                if not missing:
                    return
                now = time.monotonic()
                if now > next_look:
                    next_look = now + _LOOK_S
                    processes = self._group.processes
                    dead = [p for p in missing if processes and not processes[p].alive()]
                    if dead:  # they may have ended after their part
                        dead = list(self._missing(name, {p: keys[p] for p in dead}))
                    if dead or now - start > bound_s:
                        raise self._timeout(dead or self._absent(name), now - start)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.02)
        except dist.DistError as error:  # rank 0 has the store, where ranks were not given one
            absent = [0] if self.rank else list(missing)
            raise self._timeout(absent, time.monotonic() - start) from error
        except BaseException as error:
            self._give_up(name, error.absent if isinstance(error, PeerTimeout) else (self.rank,))
            raise

    def _missing(self, name: str, keys: dict[int, str]) -> dict[int, str]:
        """Those of the keys that are not there.

        Raises:
            PeerTimeout: a rank says that it has given up.
        """
        missing = {}
        for peer, key in keys.items():
            gave_up = self.rank == 0 and self._is_there(f"{name} without {peer}")
            if gave_up or not self._is_there(key):
                missing[peer] = key
            elif self.rank:
                said = bytes(self._store.get(f"{self._keys} {key}"))
                if said.startswith(_GAVE_UP):
                    blamed = {int(each) for each in said.removeprefix(_GAVE_UP).split(b",")}
                    raise self._timeout(sorted(blamed - {self.rank}) or [peer], 0.0)
        return missing

    def _absent(self, name: str) -> list[int]:
        """Who has not come to this step; rank 0, if it has all parts."""
        told = {p: (f"{name} of {p}", f"{name} without {p}") for p in range(self.world_size)}
        del told[self.rank]
        return [p for p, keys in told.items() if not any(map(self._is_there, keys))] or [0]

    def _give_up(self, name: str, absent: Sequence[int]) -> None:
        """Tell the others; the next save begins anew."""
        self._store.set(f"{self._keys} {name} without {self.rank}", b"")
        if self.rank == 0:
            told = _GAVE_UP + ",".join(map(str, absent)).encode()
            for peer in range(1, self.world_size):
                self._store.set(f"{self._keys} {name} for {peer}", told)

    def _timeout(self, absent: Sequence[int], waited_s: float) -> PeerTimeout:
        assert self._group is not None
        history = self._group.calls.history()
        known = self._op, self._number, waited_s, history, absent, self._group.ranks
        return PeerTimeout(self.rank, absent[0], *known)
