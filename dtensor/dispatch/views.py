"""Views that are copies: what they show lies on other ranks, and was gathered from them.

    x [S(0)]                      y = x[:2]                     y.zero_()
    rank 0: rows 0 1   gather->   buffer: rows 0 1 2 3          buffer is written through y,
    rank 1: rows 2 3              y: a view of the buffer       each rank stores its rows in x

A write through such a view is stored in its base, down to the tensor that owns its memory. A copy
that is older than a write to its base is gathered again when it is read next. Whether it is older
follows from the calls alone: all ranks gather, or none does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from weft.collectives.ranks.group import here
from weft.dtensor.dispatch.call import leaves
from weft.dtensor.layout.boxes import Layout
from weft.dtensor.move.redistribute import move
from weft.dtensor.tensor import DTensor, before_write


class NoViewError(Exception):
    """A view of the whole tensor is no view of this rank's part, whose strides are others."""


# How often anything was written, for each virtual rank of the process: their counts must not mix.
_writes: Counter[int] = Counter()


def _tick(_: Any) -> None:
    _writes[id(here.world)] += 1


before_write.append(_tick)


class Copy:
    """A moved copy of a base, and the views that one op took of it.

    Args:
        target: how the copy is placed; None where the op saw the base's own local tensor.
        view: from the local tensor of the copy to the list of views.
        inverse: back from the one view, where it is no alias of the copy (conjugation).
    """

    def __init__(
        self,
        base: DTensor,
        target: Layout | None,
        view: Callable[[torch.Tensor], list[torch.Tensor]],
        inverse: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        # An alias: views stay what they are when the shape of the base is changed in place.
        self.base, self.target, self.view, self.inverse = base.data, target, view, inverse
        # Whose version counts the writes to the base.
        self.counted = base
        self.own: torch.Tensor | None = None
        self.version: int | None = None
        self.read()

    def read(self) -> list[torch.Tensor]:
        """The views, of the base as it is now."""
        own = self.base._local_tensor
        if own is not self.own or self._is_old():
            self.own = own
            if self.target is None:
                self.local = own
            elif self.target is self.base._layout:
                self.local = own.contiguous()
            else:
                self.local = move(own, self.base._layout, self.target)
            self.views = self.view(self.local)
            self.version = None if self.counted.is_inference() else self.counted._version
            self.clock = _writes[id(here.world)]
        return self.views

    def _is_old(self) -> bool:
        # Versions are exact, but inference tensors have none.
        if self.version is None:
            return self.clock != _writes[id(here.world)]
        return self.counted._version != self.version

    def store(self) -> None:
        """Bring what was written to the copy into the base."""
        assert self.own is not None
        if self.inverse is not None:
            self.local.copy_(self.inverse(self.views[0]))
        if self.local is not self.own:
            back = self.local
            if self.target is not None and self.target is not self.base._layout:
                back = move(back, self.target, self.base._layout)
            self.own.copy_(back)
        if isinstance(self.base._pending, CopiedView):
            self.base._pending.store()
        # Autograd is about to count the version up, so the copy is old: -1 is never a version.
        self.version = -1 if self.version is not None else None


class CopiedView:
    """One view of a `Copy`, in place of a local tensor."""

    def __init__(self, copy: Copy, index: int) -> None:
        self.copy, self.index = copy, index

    def value(self) -> torch.Tensor:
        return self.copy.read()[self.index]

    def store(self) -> None:
        self.copy.store()

    def redistribute(self, tensor: DTensor, target: Layout) -> DTensor | None:
        return None


def as_copies(
    tensors: Any,
    base: DTensor,
    target: Layout | None,
    view: Callable[[torch.Tensor], Any],
    inverse: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Any:
    """Make the results of a view op, which are wrapped already, views of a copy of `base`."""
    copy = Copy(base, target, lambda local: list(leaves(view(local))), inverse)
    for index, tensor in enumerate(leaves(tensors)):
        tensor._local = None
        tensor._pending = CopiedView(copy, index)
    return tensors
