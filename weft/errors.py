"""The errors that weft raises beside `ValueError` (misuse) and `NotImplementedError`."""

from __future__ import annotations


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
    """

    def __init__(
        self, rank: int, peer: int, op: str, generation: int, timeout_s: float, history: str = ""
    ) -> None:
        self.rank, self.peer, self.op, self.generation = rank, peer, op, generation
        self.timeout_s, self.history = timeout_s, history
        waited = f"waited {timeout_s:.3g} s" if timeout_s else "waited in vain"
        super().__init__(
            f"{op}: rank {rank} {waited} for rank {peer} (call {generation}). Rank "
            f"{peer} died, or did not make the same call; the group cannot be used until all of "
            f"its ranks have called weft.close(). Raise WEFT_TIMEOUT_S if it is only slow."
            + (f"\n{history}" if history else "")
        )

    def __reduce__(self) -> tuple[type[PeerTimeout], tuple[int, int, str, int, float, str]]:
        known = self.rank, self.peer, self.op, self.generation, self.timeout_s, self.history
        return PeerTimeout, known


class MismatchError(WeftError, ValueError):
    """The ranks of a group made calls that do not fit together. Raised on every rank."""
