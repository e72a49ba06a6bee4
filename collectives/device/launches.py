"""The one door through which kernels are launched, and launches that are made again.

    first call     checks, configuration, results --> launching(kernel, ...) --> Triton specializes,
                   looks the kernel up, launches it                       --> kept, by layouts
    later calls    new results --> the same compiled kernels, with the addresses of this call

Preparing a launch takes 80 to 100 us of the host, and Triton's part of one another 20 to 40; with
all of it kept, both together take 10 (docs/bench.md has a table). Kernels of a decoding step run
for as long as that.

Why a kept launch is the one that would be made: all that goes into one, but for addresses, follows
from the key, by which the caller names the layouts of the operands and what else it goes by. Of
addresses, a kernel may be given those at which an operand, a result or a temporary tensor begins,
and those of the workspace. A call that gives it another one, or does anything but allocate, look
and launch, such as copy, is not kept. Triton compiles for addresses that are multiples of 16: calls
with others are made anew.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weft.collectives.ranks.caches import KeptDict

Operands = Sequence["torch.Tensor | None"]
_Fill = Callable[[Sequence[Any]], Any]  # an argument, of the tensors of a call

_ALIGNED = 16  # bytes: what Triton specializes addresses for


class _UnderWay(threading.local):
    recorder: _Recorder | None = None
    watched: Any = None  # a call that `weft.collectives.memory.repeatable` watches
    agreed: tuple[Any, ...] = ()  # what one that could not be repeated has learned


under_way = _UnderWay()
kept_any = False  # whether launches have been kept in this process


def launching(kernel: Any, programs: int) -> Callable[..., Any]:
    """kernel[(programs,)], which a call that is being recorded notes."""
    run: Callable[..., Any] = kernel[(programs,)]
    recorder = under_way.recorder
    if recorder is None:
        return run

    def noted(*args: Any, **options: Any) -> None:
        recorder.note(kernel, run(*args, **options), programs, args, options)

    return noted


def launch_kept(
    kept: dict[Hashable, Callable[[], object]], kernel: Any, args: Sequence[Any], **constants: Any
) -> None:
    """Launch `kernel`, of one program, for which `kept` has what it was launched with before.

    Args:
        kept: of one workspace, and of one time-out.
        args: tables of the workspace, and numbers.
    """
    key = id(kernel), *args[1:], *constants.values()
    run = kept.get(key)
    if run is not None and under_way.recorder is None:
        run()  # a fifth of what Triton takes to look it up
        return
    compiled = launching(kernel, 1)(*args, **constants, num_warps=1)
    if _is_compiled(compiled):
        given = dict(zip(kernel.arg_names, args, strict=False)) | constants
        kept[key] = partial(compiled[1, 1, 1], *[given[name] for name in kernel.arg_names])


def _is_compiled(launched: Any) -> bool:
    """Of what a launch returns: whether the kernel was not interpreted."""
    from triton.compiler import CompiledKernel

    return isinstance(launched, CompiledKernel)


def temporary(x: torch.Tensor) -> torch.Tensor:
    """x, which a call has made for its kernels and does not return: repeated calls make another."""
    if under_way.recorder is not None:
        under_way.recorder.temporaries.append(x)
    return x


def lasting(x: torch.Tensor) -> torch.Tensor:
    """x, whose contents follow from the key of the call: repeated calls are given it again."""
    if under_way.recorder is not None:
        under_way.recorder.lasting.add(x.data_ptr())
    return x


def layouts_of(operands: Operands) -> tuple[Hashable, ...]:
    """All of the operands that a launch depends on, but their addresses."""
    return tuple(
        None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.is_neg())
        for x in operands
    )


class _NotKeptError(Exception):
    """Why a call must be prepared anew each time."""


# What a call may do between its launches: nothing that reads or writes.
LOOKS = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "view", "reshape",
    "t", "transpose", "permute", "slice", "select", "narrow", "split", "split_with_sizes", "chunk",
    "as_strided", "expand", "squeeze", "unsqueeze", "detach", "alias", "resolve_neg",
    "_unsafe_view",
    "_reshape_alias",
}  # fmt: skip


class OnlyLooks(TorchDispatchMode):
    """Whether what runs inside allocates, looks and launches alone: else it is `refused`."""

    def __init__(self) -> None:
        super().__init__()
        self.refused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.refused |= func.overloadpacket.__name__ not in LOOKS
        return func(*args, **kwargs or {})


@dataclass
class _Recorder(OnlyLooks):
    """What a call launches, and whether it does anything else."""

    launches: list[tuple[Any, int, list[Any]]] = field(default_factory=list)
    temporaries: list[torch.Tensor] = field(default_factory=list)
    lasting: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def note(
        self, kernel: Any, compiled: Any, programs: int, args: Any, options: dict[str, Any]
    ) -> None:
        """A launch."""
        if not _is_compiled(compiled):
            self.refused = True
            return
        given = dict(zip(kernel.arg_names, args, strict=False)) | options
        self.launches.append((compiled, programs, [given[name] for name in kernel.arg_names]))


@dataclass(frozen=True)
class KeptCall:
    """A call that can be made again.

    Attributes:
        launches: how each kernel is run, and its arguments, constants or not.
        made: shape, strides and dtype of what is allocated: for results, then for what is
            temporary.
        results: how each result lies in its part of `made`: shape, strides, offset; None: as it is.
    """

    device: torch.device
    launches: list[tuple[Callable[..., object], list[Any], list[tuple[int, _Fill]]]]
    made: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]
    results: list[tuple[tuple[int, ...], tuple[int, ...], int] | None]

    def make(self, operands: Operands) -> list[torch.Tensor]:
        """Launch all, and return the results."""
        device = self.device
        # Given strides, a tensor is made in 1.3 us, else in 1.9.
        made = [torch.empty_strided(*at, dtype=dtype, device=device) for *at, dtype in self.made]
        tensors = [*operands, *made]
        for run, arguments, fills in self.launches:
            given = arguments.copy()
            for i, fill in fills:
                given[i] = fill(tensors)
            run(*given)
        views = zip(made, self.results, strict=False)
        return [x if view is None else x.as_strided(*view) for x, view in views]


def are_apart(operands: Sequence[torch.Tensor]) -> bool:
    """Whether launches may be made again with them: empty ones have no address, two that begin
    alike could not be told apart, and others are not what was compiled for.
    """
    places, bits = [x.data_ptr() for x in operands], 0
    for place in places:
        bits |= place
    return not (bits % _ALIGNED or 0 in places or len(set(places)) != len(places))


class Repeated:
    """The calls of one workspace, which can be made again.

    Args:
        tables: those of the workspace, whose addresses stay.
    """

    def __init__(self, device: torch.device, tables: Sequence[torch.Tensor]) -> None:
        self._device = device
        self._tables = {x.data_ptr() for x in tables}
        self._kept = KeptDict[Hashable, KeptCall | None](1024)

    def call(
        self,
        key: Hashable,
        operands: Operands,
        make: Callable[[], Sequence[torch.Tensor]],
    ) -> Sequence[torch.Tensor]:
        """make(), or the launches that it made before with the same key.

        Args:
            key: all that `make` goes by, the layouts of the operands included.
            operands: all tensors that it is given.
            make: launches kernels by `launching`, and returns new tensors.
        """
        kept = self._kept.get(key, self)
        if kept is None:
            return make()
        if not are_apart([x for x in operands if x is not None]):
            return make()
        if isinstance(kept, KeptCall):
            results = kept.make(operands)
            if under_way.watched is not None:
                under_way.watched.repeated.append((kept, operands, results))
            return results
        return self._recorded(key, operands, make)

    def _recorded(
        self, key: Hashable, operands: Operands, make: Callable[[], Sequence[torch.Tensor]]
    ) -> Sequence[torch.Tensor]:
        recorder, before = _Recorder(), under_way.recorder
        under_way.recorder = recorder
        try:
            with recorder:
                results = make()
        finally:
            under_way.recorder = before
        try:
            self._kept[key] = self._keep(recorder, operands, results)
            global kept_any
            kept_any = True
        except _NotKeptError:
            self._kept[key] = None
        return results

    def _keep(
        self, recorder: _Recorder, operands: Operands, results: Sequence[torch.Tensor]
    ) -> KeptCall:
        made = [*results, *recorder.temporaries]
        places: dict[int, int | None] = dict.fromkeys(self._tables | recorder.lasting)
        begins = [x.untyped_storage().data_ptr() for x in made]
        if recorder.refused or any(begin % _ALIGNED for begin in begins):
            raise _NotKeptError
        for i, begin in enumerate([*(x if x is None else x.data_ptr() for x in operands), *begins]):
            if begin is not None and places.setdefault(begin, i) != i:
                raise _NotKeptError
        launches = []
        for compiled, programs, arguments in recorder.launches:
            fills = enumerate(_filled(value, places) for value in arguments)
            varying = [(i, fill) for i, fill in fills if fill is not None]
            launches.append((compiled[programs, 1, 1], arguments, varying))
            for i, _ in varying:
                arguments[i] = None  # no tensor of this call stays alive
        shapes, views = [], []
        for x in made:
            count = x.untyped_storage().nbytes() // x.element_size()
            whole = x.is_contiguous() and x.numel() == count
            shape, strides = (tuple(x.shape), x.stride()) if whole else ((count,), (1,))
            shapes.append((shape, strides, x.dtype))
            view = tuple(x.shape), x.stride(), int(x.storage_offset())
            views.append(None if whole else view)
        return KeptCall(self._device, launches, shapes, views[: len(results)])


def _filled(value: Any, places: dict[int, int | None]) -> _Fill | None:
    """How an argument follows from the tensors of a call; None if it does not vary."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    if isinstance(value, torch.Tensor):
        if value.data_ptr() not in places:
            raise _NotKeptError
        number = places[value.data_ptr()]
        return None if number is None else lambda tensors: tensors[number]
    if isinstance(value, TensorDescriptor):
        base = _filled(value.base, places)
        if base is None:
            return None
        bare = {name: each for name, each in vars(value).items() if name != "base"}

        def described(tensors: Sequence[Any]) -> TensorDescriptor:
            made = object.__new__(TensorDescriptor)  # what it checks, it has checked
            made.__dict__ = bare | {"base": base(tensors)}
            return made

        return described
    if isinstance(value, tuple):
        parts = [_filled(part, places) for part in value]
        varying = [(i, part) for i, part in enumerate(parts) if part is not None]
        if not varying:
            return None
        constants = [None if part else each for each, part in zip(value, parts, strict=True)]

        def filled(tensors: Sequence[Any]) -> tuple[Any, ...]:
            given = constants.copy()
            for i, part in varying:
                given[i] = part(tensors)
            return tuple(given)

        return filled
    return None
