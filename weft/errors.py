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
    ) -> None:
        self.rank, self.peer, self.op, self.generation = rank, peer, op, generation
        self.timeout_s, self.history = timeout_s, history
        self.absent = tuple(absent) or (peer,)
        waited = f"waited {timeout_s:.3g} s" if timeout_s else "waited in vain"
        ranks = f"rank{'s' * (len(self.absent) > 1)} {', '.join(map(str, self.absent))}"
        super().__init__(
            f"{op}: rank {rank} {waited} for {ranks} (call {generation}). {ranks.capitalize()} "
            f"died, or did not make the same call; the group cannot be used until all of "
            f"its ranks have called weft.close(). Raise WEFT_TIMEOUT_S if it is only slow."
            + (f"\n{history}" if history else "")
        )

    def of(self, absent: Sequence[int]) -> PeerTimeout:
        """The same error, of all ranks that had not come."""
        known = self.rank, self.peer, self.op, self.generation, self.timeout_s, self.history
        return PeerTimeout(*known, absent)

    def __reduce__(self) -> tuple[Any, ...]:
        known = self.rank, self.peer, self.op, self.generation, self.timeout_s, self.history
        return PeerTimeout, (*known, self.absent)


class MismatchError(WeftError, ValueError):
    """The ranks of a group made calls that do not fit together. Raised on every rank."""
