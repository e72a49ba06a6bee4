"""The errors that weft raises beside `ValueError` (misuse) and `NotImplementedError`.

And how errors, and all else that is shown, name what files hold: see `printable`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def printable(text: str) -> str:
    """`text` as a terminal may show it: what is no character to see is written as Python would."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )


class WeftError(RuntimeError):
    """Base class. A `RuntimeError`, because Python swallows a `TypeError` inside operators."""


class PeerTimeout(WeftError):  # noqa: N818 - the name says what happened
    """A peer did not arrive in time: it died, or it never made this call.

    Attributes:
        rank: the rank (in the group) that waited.
        peer: the rank (in the group) that it waited for.
        op: the call that waited.
        generation: the number of the call on this workspace.
        timeout_s: how long it waited; 0 if another rank has told it not to wait any longer.
        history: the last calls of all ranks side by side, where they are known.
        absent: all ranks (in the group) that had not come. A barrier tells that; other calls know
            of `peer` alone.
        ranks: the global rank of each of the group, in its order; empty where that is not known.
    """

    def __init__(
        self,
        rank: int,
        peer: int,
        op: str,
        generation: int,
        timeout_s: float,
        history: str = "",
        absent: Sequence[int] = (),
        ranks: Sequence[int] = (),
    ) -> None:
        self.rank, self.peer, self.op, self.generation = rank, peer, op, generation
        self.timeout_s, self.history = timeout_s, history
        self.absent, self.ranks = tuple(absent) or (peer,), tuple(ranks)
        waited = f"waited {timeout_s:.3g} s" if timeout_s else "waited in vain"
        named = f"rank{'s' * (len(self.absent) > 1)} {', '.join(map(str, self.absent))}"
        super().__init__(
            f"{op}: rank {rank} {waited} for {named} (call {generation}). {named.capitalize()} "
            f"died, or did not make the same call; the group cannot be used until all of "
            f"its ranks have called weft.close(). Raise WEFT_TIMEOUT_S if it is only slow."
            + (f"\n{history}" if history else "")
        )

    def of(self, absent: Sequence[int]) -> PeerTimeout:
        """The same error, of all ranks that had not come."""
        return PeerTimeout(*self._known, absent, self.ranks)

    def __reduce__(self) -> tuple[Any, ...]:
        return PeerTimeout, (*self._known, self.absent, self.ranks)

    @property
    def _known(self) -> tuple[int, int, str, int, float, str]:
        return self.rank, self.peer, self.op, self.generation, self.timeout_s, self.history


class MismatchError(WeftError, ValueError):
    """The ranks of a group made calls that do not fit together. Raised on every rank."""
