"""What a call comes to, kept by all that it follows from: a call that repeats is not checked again.

Choices of engines go by rates, and by what a rank alone may know, such as its part of an uneven
weight: where rates are forgotten, so are all of these (see `weft.collectives.cost.forget_rates`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from weft import settings
from weft.collectives import cost
from weft.collectives.ranks.caches import KeptDict
from weft.collectives.ranks.group import kept_by_group
from weft.collectives.ranks.reports import check_all

_Plan = TypeVar("_Plan")


class Plans(Generic[_Plan]):
    """Those of one kind, by keys with the group among them.

    Args:
        name: for `weft.caches`.
    """

    def __init__(self, name: str) -> None:
        self._kept = KeptDict[tuple[Any, ...], _Plan](4096, name)
        kept_by_group.append(self._kept)
        cost.kept_by_rates.append(self._kept)

    def of(self, key: tuple[Any, ...], make: Callable[[], _Plan]) -> _Plan:
        """The plan with that key: `make()` chooses an engine, as it does whenever choices are told.

        Raises:
            PeerTimeout, MismatchError: a call of this process has failed on a GPU.
        """
        key = settings.sms(), *key
        plan = None if settings.tracing() else self._kept.get(key)
        if plan is not None:
            check_all()  # as `choose` does
            return plan
        plan = make()
        self._kept[key] = plan
        return plan
