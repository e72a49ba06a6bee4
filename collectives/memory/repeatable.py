"""Public functions, and gradients, that go straight to their launches, once they repeat.

    call 1    checks, plan, memory, kernels                      launches are kept: see `launches`
    call 2    the same, watched: what it agrees on with the other ranks, on which workspaces it is
              calls, which arguments the kept launches are given, what its results are made of
    call 3..  a key of the arguments, tensors like those of before --> the lengths are agreed on,
              the call is noted and checked, its launches are made, the results are returned

The first two take 40 to 100 us of Python over the launches, the others a quarter of that.

Why call 3 does what it would have done: all that a function goes by is in the key, or in what its
tensors are guarded by, but for their addresses and values. Launches take addresses; a call that is
watched is not made straight later if it copies or computes, makes launches that are not kept, or
has a tensor that no launch is given, which the host may have read. A routing counts as its numbers
and tensors, and its calls are those of its group. What is rare is left to the function itself:
forwards whose gradient is wanted, traces, profilers, modes and transforms of torch, subclasses,
WEFT_CHECK=1, `weft.explain`; tensors that begin alike, are empty, or have addresses that are no
multiples of 16.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import wraps
from operator import itemgetter
from typing import Any, NamedTuple, ParamSpec, TypeVar
from weakref import ref

import torch
from torch._C._autograd import _profiler_enabled
from torch._C._dynamo.guards import TensorGuards
from torch.autograd import forward_ad

from weft import settings
from weft.collectives.device import launches
from weft.collectives.device.launches import KeptCall, OnlyLooks, tell_written, under_way
from weft.collectives.memory.exchange import agree
from weft.collectives.memory.workspace import OneCall, Workspace
from weft.collectives.ranks.caches import KeptDict
from weft.collectives.ranks.flight import Call
from weft.collectives.ranks.group import Group, kept_by_group, resolve
from weft.collectives.ranks.reports import check_all

_P = ParamSpec("_P")
_R = TypeVar("_R")

_TENSORS = (torch.Tensor, torch.nn.Parameter)
_ROUTINGS = ("routing", "topk_ids")  # arguments that may be one, with a group and `taken_apart`
_PLAIN = frozenset((type(None), bool, int, float, str, torch.dtype))
_count_modes = torch._C._len_torch_dispatch_stack
_transformed = torch._C._are_functorch_transforms_active
_TRIES = 3  # of watching
_OTHERWISE, _OUTGROWN = object(), object()

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


class _Part(NamedTuple):
    """Launches that a call makes.

    Attributes:
        begun: the workspace on which they are a call, which may be freed or be retired since, and
            its name and words, and whether it is noted there; None if on none.
        launched: what they are.
        operands: what they are given: numbers of arguments, of what is allocated, and of what the
            parts before have made; None: none.
    """

    begun: tuple[ref[Workspace], str, Call, bool] | None
    launched: KeptCall
    operands: list[int | None]


@dataclass(frozen=True)
class Straight:
    """How a call is made again.

    Attributes:
        agreed: on what the ranks agree first: op, value and what is told, and all ranks' values.
        parts: the calls on workspaces that it is, in order.
        allocated: for the launches: shape, strides and dtype.
        results: made of arguments, what is allocated, and results of the launches, in this order.
        written: which arguments the launches write to.
    """

    agreed: tuple[tuple[tuple[str, int, Any], list[int]], ...]
    parts: list[_Part]
    allocated: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]
    results: Callable[[Sequence[Any]], Any]
    written: list[int]

    def make(self, group: Group, given: list[torch.Tensor]) -> Any:
        """The results; _OTHERWISE if the function itself must make the call, _OUTGROWN if it is to
        be watched again."""
        if not launches.suit_kept_launches(given):
            return _OTHERWISE
        used: list[Workspace | None] = []
        for begun, launched, _ in self.parts:
            ws = None if begun is None else begun[0]()
            if begun is not None and (ws is None or ws.retired or not ws.is_open):
                return _OUTGROWN
            if launched.in_graph is not None:
                on_gpu = ws is not None and not ws.on_host
                if launched.in_graph != (on_gpu and torch.cuda.is_current_stream_capturing()):
                    return _OTHERWISE
            used.append(ws)
        check_all()
        if self.agreed:
            learned = []
            for asked, expected in self.agreed:
                values = agree(group, *asked)
                learned.append((asked, values))
                if values != expected:
                    under_way.agreed = (*learned,)
                    return _OTHERWISE
        tensors, device = given, self.parts[0].launched.device
        for shape, strides, dtype in self.allocated:
            made = torch.empty_strided(shape, strides, dtype=dtype, device=device)
            tensors.append(made)
        for ws, (begun, launched, numbers) in zip(used, self.parts, strict=True):
            operands = [None if number is None else tensors[number] for number in numbers]
            if ws is None or begun is None:
                tensors += launched.make(operands)
            else:
                with OneCall(ws, *begun[1:]):
                    tensors += launched.make(operands)
        if self.written:
            tell_written(*[tensors[number] for number in self.written])
        return self.results(tensors)


@dataclass
class _Watched(OnlyLooks):
    """One call, and whether it does anything but allocate, look and launch."""

    agreed: list[Any] = field(default_factory=list)
    begun: list[tuple[Workspace, str, Call, bool]] = field(default_factory=list)
    repeated: list[tuple[KeptCall, Any, Any, int]] = field(default_factory=list)
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

    def straight(
        self,
        given: list[torch.Tensor],
        unread: list[int],
        results: Any,
        calls: int,
        written: list[int],
    ) -> Straight | None:
        """How to make the call again, of these arguments; None if it did anything else.

        Args:
            written: which of them it has written to.
            unread: which of `given` launches may do without.
            calls: that were noted meanwhile; 0 where none are.
        """
        noted = len(self.agreed) + sum(notes for *_, notes in self.begun)
        count = len(self.repeated)
        order = [before for *_, before in self.repeated]  # how many calls had begun
        in_order = order == ([*range(1, count + 1)] if self.begun else [0])
        if self.refused or not in_order or len(self.begun) > count or calls not in (0, noted):
            return None
        places = {x.data_ptr(): number for number, x in enumerate(given)}
        of_launches = {_beginning(x) for _, _, made, _ in self.repeated for x in made}
        beginnings = {_beginning(x): x for x in self.allocated if _beginning(x) not in of_launches}
        tensors, allocated, parts = [*given], list[Any](), list[_Part]()
        for operand in (x for _, operands, _, _ in self.repeated for x in operands):
            whole = None if operand is None else beginnings.get(operand.data_ptr())
            if whole is None or whole.data_ptr() in places:
                continue
            if whole.untyped_storage().nbytes() != whole.numel() * whole.element_size():
                return None
            places[whole.data_ptr()] = len(tensors)
            allocated.append((tuple(whole.shape), whole.stride(), whole.dtype))
            tensors.append(whole)
        for number, (launched, operands, made, _) in enumerate(self.repeated):
            if any(x is not None and x.data_ptr() not in places for x in operands):
                return None
            begun = None
            if self.begun:
                ws, op, call, notes = self.begun[number]
                begun = ref(ws), op, call, notes
            numbers = [None if x is None else places[x.data_ptr()] for x in operands]
            parts.append(_Part(begun, launched, numbers))
            for x in made:
                places.setdefault(x.data_ptr(), len(tensors))
                tensors.append(x)
        used = {number for part in parts for number in part.operands}
        if not {*range(len(given))} <= {*used, *unread}:
            return None  # the host reads what no launch is given
        build = _rebuilt(results, tensors)
        return build and Straight((*self.agreed,), parts, allocated, build, written)


def _beginning(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _rebuilt(
    results: Any, tensors: Sequence[torch.Tensor]
) -> Callable[[Sequence[Any]], Any] | None:
    """How `results`, tensors in tuples, lists and dataclasses, follow from others; None if they do
    not. What else a dataclass has is the same again.
    """
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
    kind = type(results)
    if is_dataclass(kind):
        values = [getattr(results, each.name) for each in fields(kind)]
        parts = [_same(x) if _is_same(x) else _rebuilt(x, tensors) for x in values]
    elif kind in (tuple, list):
        parts = [_rebuilt(each, tensors) for each in results]
    else:
        return None
    if not all(parts):
        return None
    if kind not in (tuple, list):
        return lambda tensors: kind(*[part(tensors) for part in parts])  # type: ignore[misc]
    if kind is list:
        return lambda tensors: [part(tensors) for part in parts]  # type: ignore[misc]
    return lambda tensors: tuple([part(tensors) for part in parts])  # type: ignore[misc]


def _is_same(value: Any) -> bool:
    """Whether it is a number, a group, or what else no call makes anew."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_same, value))
    return value.__class__ in _PLAIN or isinstance(value, Group)


def _same(value: Any) -> Callable[[Sequence[Any]], Any]:
    return lambda tensors: value


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
        elif not hasattr(kind, "taken_apart") or not _taken_apart(value.taken_apart(), key, given):
            return False
    return True


def repeatable(op: Callable[_P, _R]) -> Callable[_P, _R]:
    """Have calls of `op`, which takes a `group` or a `routing`, go straight to their launches once
    they repeat.

    Example:
        @repeatable
        def all_reduce(x: torch.Tensor, group: GroupLike = None) -> torch.Tensor: ...
    """
    names = [*inspect.signature(op).parameters]
    at = names.index("group") if "group" in names else len(names)
    routed_by = next((name for name in _ROUTINGS if name in names), "")
    routed_at = names.index(routed_by) if routed_by else 0

    @wraps(op)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if _is_rare():
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
        routing: Any = None
        if routed_by:
            routing = args[routed_at] if len(args) > routed_at else kwargs.get(routed_by)
            if routing.__class__ is torch.Tensor:
                routing = None
            elif asked is not None or not isinstance(getattr(routing, "group", None), Group):
                return op(*args, **kwargs)
            else:
                asked = routing.group
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
        out: Any = kwargs.get("out")
        if out is not None and any(
            x is not out and _beginning(x) == _beginning(out) for x in given
        ):
            return op(*args, **kwargs)  # where they overlap, one may have to be copied
        apart = tuple if routing is None else routing.taken_apart
        made: _R = _as_before((*parts,), group, given, lambda: op(*args, **kwargs), apart)
        return made

    return run


def repeated_gradients(
    key: tuple[Hashable, ...],
    group: Group,
    given: Sequence[torch.Tensor | None],
    make: Callable[[], _R],
) -> _R:
    """make(), or the launches of before: the backward of an autograd function.

    Args:
        key: all that `make` goes by, but for the layouts of tensors.
        given: all tensors that it takes.
    """
    absent = [x is None for x in given]
    tensors = [x for x in given if x is not None]
    rare = _is_rare() or torch.is_grad_enabled()
    if rare or any(x.__class__ not in _TENSORS for x in tensors):
        return make()
    key = "gradients", group, *settings.set_for_calls(), *key, *absent
    made: _R = _as_before(key, group, tensors, make, lambda: tensors)
    return made


def _is_rare() -> bool:
    """Whether a call is left to the function itself, whatever it is given."""
    return (
        torch.compiler.is_compiling()
        or not launches.kept_any
        or under_way.watched is not None
        or bool(_count_modes())
        or _profiler_enabled()
        or settings.tracing()
        or forward_ad._current_level >= 0
        or _transformed()
    )


def _as_before(
    key: tuple[Hashable, ...],
    group: Group,
    given: list[torch.Tensor],
    make: Callable[[], Any],
    apart: Callable[[], Sequence[Any]],
) -> Any:
    """make(), or how calls with this key and of tensors like those given go straight.

    Args:
        apart: those of which launches may do without some, as the host does not read them.
    """
    layouts, known = straight.get(key, ()), None
    for known in layouts:
        if known.alike(*given):
            break
    else:
        known = None
    how = known.how if known is not None else 0
    if isinstance(how, Straight):
        made = how.make(group, given)
        if made is _OTHERWISE:
            try:
                return make()
            finally:
                under_way.agreed = ()
        if made is not _OUTGROWN:
            return made
        how = 1
    if how is None or settings.check_calls():
        return make()
    if known is None:
        results = make()
        if given:
            straight[key] = [_Known(_guards(given), 1), *layouts[: _LAYOUTS - 1]]
        return results
    watched, before, versions = _Watched(), group.calls.position, list(map(_version_of, given))
    under_way.watched = watched
    try:
        with watched:
            results = make()
    finally:
        under_way.watched = None
    parts = apart()
    unread = [i for i, x in enumerate(given) if any(x is part for part in parts)]
    written = [i for i, x in enumerate(given) if _version_of(x) != versions[i]]
    found = watched.straight(given, unread, results, group.calls.position - before, written)
    known.how = found or (how + 1 if how < _TRIES else None)
    return results


def _version_of(x: torch.Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _guards(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Whether others are like these, in all but addresses and values."""
    sizes: Any = [[*x.shape] for x in tensors]
    strides: Any = [[*x.stride()] for x in tensors]
    guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    alike: Callable[..., bool] = guards.check
    return alike
