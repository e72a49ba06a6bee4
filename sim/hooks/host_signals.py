"""Host-side signals between virtual ranks: posts and waits are the scheduler's, never time out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from weft.collectives.memory.symmetric import SymmetricBuffer
from weft.collectives.memory.waiter import Waiter
from weft.collectives.ranks import pad
from weft.sim.check.races import READ, WRITE

if TYPE_CHECKING:
    from weft.sim.run.world import World


class Words:
    """The words of a pad, as `SymmetricBuffer.words` gives them, with every access noted."""

    def __init__(self, world: World, words: memoryview, start: int) -> None:
        self.plain, self.start = words, start
        self._world = world

    def __getitem__(self, index: int | slice) -> Any:
        self._note(index, READ)
        return self.plain[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._note(index, WRITE, value)
        self.plain[index] = value

    def _note(self, index: int | slice, kind: str, value: int = 0) -> None:
        indices = range(len(self.plain))[index] if isinstance(index, slice) else (index,)
        for each in indices:
            self._world.word_access(self.start + each * pad.WORD_BYTES, kind, value)


class VirtualWaiter(Waiter):
    """`Waiter` between virtual ranks: posts and waits are the scheduler's, and never time out."""

    def __init__(self, world: World, buffer: SymmetricBuffer) -> None:
        super().__init__(buffer)
        self._world = world
        starts = buffer.signal_ptrs.tolist()
        self._pads = [Words(world, *pair) for pair in zip(self.words, starts, strict=True)]
        # What they are used for is what `Words` has of a memoryview.
        self.words = cast(Any, self._pads)
        self.own = self.words[self.rank]

    def post(self, peer: int, value: int, word: int = 0) -> None:
        """Tell `peer` that this rank has reached `value`."""
        words, index = self._pads[peer], pad.HOST_SLOTS + pad.LINE * self.rank + word
        address = words.start + index * pad.WORD_BYTES
        self._world.post(address, value, lambda: words.plain.__setitem__(index, value))

    def wait(self, peer: int, value: int, op: str, word: int = 0) -> None:
        """Wait until `peer` has reached `value`."""
        words, index = self._pads[self.rank], pad.HOST_SLOTS + pad.LINE * peer + word
        address = words.start + index * pad.WORD_BYTES
        self._world.acquire(address, lambda: words.plain[index], value)

    def meet(self, peers: Sequence[int], value: int, op: str) -> None:
        """`post` to each of `peers`, then `wait` for each."""
        for peer in peers:
            self.post(peer, value)
        for peer in peers:
            self.wait(peer, value, op)
