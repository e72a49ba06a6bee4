"""Public functions that go straight to their launches, once they repeat.

    call 1    checks, plan, memory, kernels                      launches are kept: see `launches`
    call 2    the same, watched: what it agrees on with the other ranks, on which workspace it is a
              call, which of its arguments the kept launches are given, what its results are made of
    call 3..  a key of the arguments, tensors like those of before --> the lengths are agreed on,
              the call is noted and checked, its launches are made, the results are returned

The first two take 40 to 100 us of Python over the launches, the others a quarter of that.

Why call 3 does what it would have done: all that a function goes by is in the key, or in what its
tensors are guarded by, but for their addresses and values. Launches take addresses; a call that is
watched is not made straight later if it copies or computes, makes more calls than one, or has a
tensor that no launch is given, which the host may have read. What is rare is left to the function
itself: gradients, traces, profilers, modes and transforms of torch, subclasses, WEFT_CHECK=1,
`weft.explain`; tensors that begin alike, are empty, or have addresses that are no multiples of 16.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from operator import itemgetter
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch._C._autograd import _profiler_enabled
from torch._C._dynamo.guards import TensorGuards
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

_LAYOUTS = 32  # of tensors, by key: a look at one that is another takes 0.3 us


@dataclass
class _Known:
    """What is known of calls with one key, whose tensors are alike.

    Attributes:
        alike: whether tensors are: a look of C at types, dtypes, devices, sizes, strides, pending
            negations, the need of a gradient, and modes of dispatch, for all together.
        how: they are made straight; None if they cannot be; how often they have been made.
    """

    alike: Callable[..., bool]
    how: Straight | int | None


# By all that calls go by beside their tensors; those that were met last first.
straight = KeptDict[tuple[Hashable, ...], list[_Known]](4096, f"{__name__}.straight")
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
        allocated: for the launches: shape, strides and dtype.
        operands: what the launches are given: numbers of arguments and of what is allocated, or
            None; None in all if it is these, in order.
        results: made of arguments, what is allocated, and results of the launches, in this order.
    """

    agreed: tuple[tuple[tuple[str, int, Any], list[int]], ...]
    begun: tuple[Workspace, str, Call] | None
    launched: KeptCall
    allocated: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]
    operands: list[int | None] | None
    results: Callable[[Sequence[Any]], Any]

    def make(self, group: Group, given: list[torch.Tensor]) -> Any:
        """The results; _OTHERWISE if the function itself must make the call."""
        begun = self.begun
        if begun is not None and (begun[0].retired or not begun[0].is_open):
            return _OTHERWISE
        if not launches.suit_kept_launches(given):
            return _OTHERWISE
        in_graph = self.launched.in_graph
        if in_graph is not None:
            on_gpu = begun is not None and not begun[0].on_host
            if in_graph != (on_gpu and torch.cuda.is_current_stream_capturing()):
                return _OTHERWISE
        check_all()
        if self.agreed:
            learned = []
            for asked, expected in self.agreed:
                values = agree(group, *asked)
                learned.append((asked, values))
                if values != expected:
                    under_way.agreed = (*learned,)
                    return _OTHERWISE
        launched, tensors = self.launched, given
        for shape, strides, dtype in self.allocated:
            made = torch.empty_strided(shape, strides, dtype=dtype, device=launched.device)
            tensors.append(made)
        operands: Sequence[torch.Tensor | None] = tensors
        if self.operands is not None:
            operands = [None if number is None else tensors[number] for number in self.operands]
        if begun is None:
            tensors += launched.make(operands)
        else:
            with OneCall(*begun, True):
                tensors += launched.make(operands)
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
        numbers, allocated, tensors = list[int | None](), list[Any](), [*given]
        for operand in operands:
            if operand is None:
                numbers.append(None)
            elif operand.data_ptr() in places:
                numbers.append(places[operand.data_ptr()])
            else:
                whole = beginnings.get(operand.data_ptr())
                if whole is None or not whole.is_contiguous():
                    return None
                numbers.append(len(tensors))
                allocated.append((tuple(whole.shape), whole.stride(), whole.dtype))
                tensors.append(whole)
        if not {*range(len(given))} <= {*numbers}:
            return None  # the host reads what no launch is given
        build = _rebuilt(results, [*tensors, *made])
        begun = self.begun[0] if self.begun else None
        given_as = None if numbers == [*range(len(tensors))] else numbers
        return build and Straight((*self.agreed,), begun, launched, allocated, given_as, build)


def _rebuilt(
    results: Any, tensors: Sequence[torch.Tensor]
) -> Callable[[Sequence[Any]], Any] | None:
    """How `results`, tensors in tuples and lists, follow from others; None if they do not."""
    if results is None:
        return lambda tensors: None
    if isinstance(results, torch.Tensor):
        for number, x in enumerate(tensors):
            if x is results:
                return itemgetter(number)
        begin = results.untyped_storage().data_ptr()
        for number, x in enumerate(tensors):
            if x.untyped_storage().data_ptr() == begin and x.dtype == results.dtype:
                layout, whole = _strides_key(results), _strides_key(x)
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


def _strides_key(x: torch.Tensor) -> tuple[Any, Any, int]:
    return tuple(x.shape), x.stride(), int(x.storage_offset())


def _taken_apart(values: Sequence[Any], key: list[Hashable], given: list[torch.Tensor]) -> bool:
    """Append what a call goes by to `key`, tensors to `given`; False if it is of another kind."""
    for value in values:
        kind = value.__class__
        if kind in _PLAIN:
            key.append(value)
        elif kind in _TENSORS:
            if value.requires_grad and torch.is_grad_enabled():
                return False
            given.append(value)
            key.append(torch.Tensor)
        elif kind is list or kind is tuple:
            key.append(len(value))
            if not _taken_apart(value, key, given):
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
        if not _taken_apart(values, parts, given):
            return op(*args, **kwargs)
        if named and not _taken_apart((*named.values(),), parts, given):
            return op(*args, **kwargs)
        key = (*parts,)
        layouts, known = straight.get(key, ()), None
        for known in layouts:
            if known.alike(*given):
                break
        else:
            known = None
        how = known.how if known is not None else 0
        if how.__class__ is Straight:
            made: Any = how.make(group, given)
            if made is not _OTHERWISE:
                result: _R = made
                return result
            try:
                return op(*args, **kwargs)
            finally:
                under_way.agreed = ()
        if how is None or settings.check_calls():
            return op(*args, **kwargs)
        if known is None:
            results = op(*args, **kwargs)
            if given:
                straight[key] = [_Known(_guards(given), 1), *layouts[: _LAYOUTS - 1]]
            return results
        watched, before = _Watched(), group.calls.position
        under_way.watched = watched
        try:
            with watched:
                results = op(*args, **kwargs)
        finally:
            under_way.watched = None
        found = watched.straight(given, results, group.calls.position - before)
        known.how = found or (how + 1 if how < _TRIES else None)  # type: ignore[operator]
        return results

    return run


def _guards(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Whether others are like these, in all but addresses and values."""
    sizes: Any = [[*x.shape] for x in tensors]
    strides: Any = [[*x.stride()] for x in tensors]
    guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    alike: Callable[..., bool] = guards.check
    return alike
