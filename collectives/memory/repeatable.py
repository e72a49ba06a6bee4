"""Public functions that go straight to their launches, once they repeat.

    call 1    checks, plan, memory, kernels                      launches are kept: see `launches`
    call 2    the same, watched: what it agrees on with the other ranks, on which workspace it is a
              call, which of its arguments the kept launches are given, what its results are made of
    call 3..  a key of the arguments --> the lengths are agreed on, the call is noted and checked,
              its launches are made, the results are returned

The first two take 40 to 100 us of Python over the launches, the others a third of that.

Why call 3 does what it would have done: all that a function goes by is in the key, but for the
addresses and values of tensors. Of tensors, launches take addresses; a call that is watched is not
made straight later if it copies or computes, makes more calls than one, or has a tensor that no
launch is given, which the host may have read. What is rare is left to the function itself:
gradients, traces, profilers, modes and transforms of torch, subclasses, WEFT_CHECK=1,
`weft.explain`; tensors that begin alike, are empty, or have addresses that are no multiples of 16.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch._C._autograd import _profiler_enabled
from torch.autograd import forward_ad

from weft import settings
from weft.collectives.device import launches
from weft.collectives.device.launches import KeptCall, OnlyLooks, under_way
from weft.collectives.memory.exchange import agree
from weft.collectives.memory.workspace import OneCall, Workspace
from weft.collectives.ranks.caches import KeptDict
from weft.collectives.ranks.flight import Call
from weft.collectives.ranks.group import Group, kept_by_group, resolve
from weft.collectives.ranks.reports import check_all

_P = ParamSpec("_P")
_R = TypeVar("_R")

_TENSORS = (torch.Tensor, torch.nn.Parameter)
_PLAIN = frozenset((type(None), bool, int, float, str, torch.dtype))
_count_modes = torch._C._len_torch_dispatch_stack
_transformed = torch._C._are_functorch_transforms_active
_TRIES = 3  # of watching
_OTHERWISE = object()

# By key: how a call is made straight; None if that cannot be; how often it has been made.
straight = KeptDict[tuple[Hashable, ...], "Straight | int | None"](4096, f"{__name__}.straight")
kept_by_group.append(straight)


class _View(NamedTuple):
    """A part of a tensor; `layout`: shape, strides and offset, None if it is all of it."""

    of: int
    layout: tuple[Any, Any, int] | None

    def taken(self, tensors: Sequence[Any]) -> Any:
        whole = tensors[self.of]
        return whole if self.layout is None else whole.as_strided(*self.layout)


@dataclass(frozen=True)
class Straight:
    """How a call is made again.

    Attributes:
        agreed: on what the ranks agree first: op, value and what is told, and all ranks' values.
        begun: the workspace on which it is a call, and its name and words; None if on none.
        operands: what the launches are given: an argument, by its number; what is allocated, by its
            shape, strides and dtype; or None.
        results: made of arguments, what is allocated, and results of the launches, in this order.
    """

    agreed: tuple[tuple[tuple[str, int, Any], list[int]], ...]
    begun: tuple[Workspace, str, Call] | None
    launched: KeptCall
    operands: list[Any]
    results: Callable[[Sequence[Any]], Any]

    def make(self, group: Group, given: list[torch.Tensor]) -> Any:
        """The results; _OTHERWISE if the function itself must make the call."""
        if self.begun is not None and (self.begun[0].retired or not self.begun[0].is_open):
            return _OTHERWISE
        if not launches.are_apart(given):
            return _OTHERWISE
        check_all()
        learned = []
        for asked, expected in self.agreed:
            values = agree(group, *asked)
            learned.append((asked, values))
            if values != expected:
                under_way.agreed = (*learned,)
                return _OTHERWISE
        device, tensors = self.launched.device, [*given]
        operands = list[torch.Tensor | None]()
        for operand in self.operands:
            if operand.__class__ is int:
                operands.append(given[operand])
            elif operand is None:
                operands.append(None)
            else:
                made = torch.empty_strided(*operand[0], dtype=operand[1], device=device)
                operands.append(made)
                tensors.append(made)
        if self.begun is None:
            tensors += self.launched.make(operands)
        else:
            with OneCall(*self.begun, True):
                tensors += self.launched.make(operands)
        return self.results(tensors)


@dataclass
class _Watched(OnlyLooks):
    """One call, and whether it does anything but allocate, look and launch."""

    agreed: list[Any] = field(default_factory=list)
    begun: list[tuple[Workspace, str, Call]] = field(default_factory=list)
    repeated: list[tuple[KeptCall, Any, Any]] = field(default_factory=list)
    allocated: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        if "empty" in func.overloadpacket.__name__:
            self.allocated.append(made)
        return made

    def straight(self, given: list[torch.Tensor], results: Any, calls: int) -> Straight | None:
        """How to make the call again, of these arguments; None if it did anything else.

        Args:
            calls: that were noted meanwhile; 0 where none are.
        """
        noted = len(self.agreed) + len(self.begun)
        alone = len(self.repeated) == 1 and len(self.begun) <= 1 and calls in (0, noted)
        if self.refused or not alone:
            return None
        ((launched, operands, made),) = self.repeated
        places = {x.data_ptr(): number for number, x in enumerate(given)}
        beginnings = {x.untyped_storage().data_ptr(): x for x in self.allocated}
        numbers, tensors = list[Any](), [*given]
        for operand in operands:
            if operand is None:
                numbers.append(None)
            elif operand.data_ptr() in places:
                numbers.append(places[operand.data_ptr()])
            else:
                whole = beginnings.get(operand.data_ptr())
                if whole is None or not whole.is_contiguous():
                    return None
                numbers.append(((tuple(whole.shape), whole.stride()), whole.dtype))
                tensors.append(whole)
        if not {*range(len(given))} <= {*numbers}:
            return None  # the host reads what no launch is given
        build = _rebuilt(results, [*tensors, *made])
        begun = self.begun[0] if self.begun else None
        return build and Straight((*self.agreed,), begun, launched, numbers, build)


def _rebuilt(
    results: Any, tensors: Sequence[torch.Tensor]
) -> Callable[[Sequence[Any]], Any] | None:
    """How `results`, tensors in tuples and lists, follow from others; None if they do not."""
    if results is None:
        return lambda tensors: None
    if isinstance(results, torch.Tensor):
        for number, x in enumerate(tensors):
            if x is results:
                return _View(number, None).taken
        begin = results.untyped_storage().data_ptr()
        for number, x in enumerate(tensors):
            if x.untyped_storage().data_ptr() == begin and x.dtype == results.dtype:
                layout, whole = _layout(results), _layout(x)
                return _View(number, None if layout == whole else layout).taken
        return None
    if type(results) not in (tuple, list):
        return None
    parts = [_rebuilt(each, tensors) for each in results]
    if not all(parts):
        return None
    if type(results) is list:
        return lambda tensors: [part(tensors) for part in parts]  # type: ignore[misc]
    return lambda tensors: tuple([part(tensors) for part in parts])  # type: ignore[misc]


def _layout(x: torch.Tensor) -> tuple[Any, Any, int]:
    return tuple(x.shape), x.stride(), int(x.storage_offset())


def _known(values: Sequence[Any], key: list[Hashable], given: list[torch.Tensor]) -> bool:
    """Append what a call goes by to `key`, tensors to `given`; False if it is of another kind."""
    for value in values:
        kind = value.__class__
        if kind in _PLAIN:
            key.append(value)
        elif kind in _TENSORS:
            if value.requires_grad and torch.is_grad_enabled():
                return False
            given.append(value)
            key += value.shape, value.stride(), value.dtype, value.device, value.is_neg()
        elif kind is list or kind is tuple:
            key.append(len(value))
            if not _known(value, key, given):
                return False
        else:
            return False
    return True


def repeatable(op: Callable[_P, _R]) -> Callable[_P, _R]:
    """Have calls of `op`, which takes a `group`, go straight to their launches once they repeat.

    Example:
        @repeatable
        def all_reduce(x: torch.Tensor, group: GroupLike = None) -> torch.Tensor: ...
    """
    at = [*inspect.signature(op).parameters].index("group")

    @wraps(op)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_compiling() or not launches.kept_any:
            return op(*args, **kwargs)
        if (
            under_way.watched is not None
            or _count_modes()
            or _profiler_enabled()
            or settings.tracing()
            or forward_ad._current_level >= 0
            or _transformed()
        ):
            return op(*args, **kwargs)
        named: Any = kwargs
        asked: Any = None
        if len(args) > at:
            asked, values = args[at], (*args[:at], *args[at + 1 :])
        else:
            values = args
            if "group" in kwargs:
                named = {name: value for name, value in kwargs.items() if name != "group"}
                asked = kwargs["group"]
        try:
            group = resolve(asked)
        except (RuntimeError, ValueError):
            return op(*args, **kwargs)
        parts: list[Hashable] = [op, group, *settings.set_for_calls(), len(args), *named]
        given = list[torch.Tensor]()
        if not (_known(values, parts, given) and _known((*named.values(),), parts, given)):
            return op(*args, **kwargs)
        key = (*parts,)
        known = straight.get(key, 0)
        if known.__class__ is Straight:
            made: Any = known.make(group, given)
            if made is not _OTHERWISE:
                result: _R = made
                return result
            try:
                return op(*args, **kwargs)
            finally:
                under_way.agreed = ()
        if known is None or settings.check_calls():
            return op(*args, **kwargs)
        if known == 0:
            results = op(*args, **kwargs)
            straight[key] = 1
            return results
        watched, before = _Watched(), group.calls.position
        under_way.watched = watched
        try:
            with watched:
                results = op(*args, **kwargs)
        finally:
            under_way.watched = None
        found = watched.straight(given, results, group.calls.position - before)
        later = known + 1 if known < _TRIES else None  # type: ignore[operator]
        straight[key] = found or later
        return results

    return run
