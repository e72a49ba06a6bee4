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
_Fill = Callable[[Sequence[Any]], "tuple[Any, ...]"]  # the arguments, of the tensors of a call
_Launch = Callable[["tuple[Any, ...]"], object]

_ALIGNED = 16  # bytes: what Triton specializes addresses for


class _UnderWay(threading.local):
    recorder: _Recorder | None = None
    watched: Any = None  # a call that `weft.collectives.memory.repeatable` watches
    agreed: tuple[Any, ...] = ()  # what one that could not be repeated has learned
    doing = False  # whether what runs is a step that a repeated call makes as well


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


def doing(step: Callable[..., object], *args: Any, in_graph: bool | None = None) -> None:
    """step(*args), between launches: copies and the like, which a repeated call makes again.

    Args:
        args: as those of launches, or None.
        in_graph: whether it is right in a graph that is captured alone, or eagerly alone.
    """
    recorder, under_way.recorder = under_way.recorder, None
    try:
        _Step(step)(args)
    finally:
        under_way.recorder = recorder
    if recorder is not None:
        recorder.steps.append((_Step(step), args))
        recorder.in_graph = recorder.in_graph if in_graph is None else in_graph


@dataclass(frozen=True)
class _Step:
    """A step, which `OnlyLooks` passes."""

    step: Callable[..., object]

    def __call__(self, arguments: tuple[Any, ...]) -> None:
        under_way.doing = True
        try:
            self.step(*arguments)
        finally:
            under_way.doing = False


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
        run()  # a tenth of what Triton takes to look it up
        return
    compiled = launching(kernel, 1)(*args, **constants, num_warps=1)
    if _is_compiled(compiled):
        given = dict(zip(kernel.arg_names, args, strict=False)) | constants
        arguments = (*[given[name] for name in kernel.arg_names],)
        kept[key] = partial(_launch(compiled, 1), arguments)


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
        self.refused |= not under_way.doing and func.overloadpacket.__name__ not in LOOKS
        return func(*args, **kwargs or {})


@dataclass
class _Recorder(OnlyLooks):
    """What a call launches, and whether it does anything else."""

    steps: list[tuple[_Launch, Sequence[Any]]] = field(default_factory=list)
    in_graph: bool | None = None
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
        arguments = [given[name] for name in kernel.arg_names]
        self.steps.append((_launch(compiled, programs), arguments))


@dataclass(frozen=True)
class KeptCall:
    """A call that can be made again.

    Attributes:
        launches: what launches each kernel or makes a step between them, and what makes its
            arguments, constants or not, of operands, results and temporaries.
        made: shape, strides and dtype of what is allocated: for results, then for what is
            temporary.
        results: how each result lies in its part of `made`: shape, strides, offset; None: as it is.
        in_graph: see `doing`.
    """

    device: torch.device
    launches: list[tuple[_Launch, _Fill]]
    made: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]
    results: list[tuple[tuple[int, ...], tuple[int, ...], int] | None]
    in_graph: bool | None

    def make(self, operands: Operands) -> list[torch.Tensor]:
        """Launch all, and return the results."""
        device, tensors = self.device, list[Any](operands)
        for shape, strides, dtype in self.made:
            # Given strides, a tensor is made in 1.3 us, else in 1.9.
            tensors.append(torch.empty_strided(shape, strides, dtype=dtype, device=device))
        for launch, arguments in self.launches:
            launch(arguments(tensors))
        made = tensors[len(operands) :]
        views = zip(made, self.results, strict=False)
        return [x if view is None else x.as_strided(*view) for x, view in views]


def suit_kept_launches(operands: Sequence[torch.Tensor]) -> bool:
    """Whether launches may be made again with them: empty ones have no address, two that begin
    alike could not be told apart, and others are not what was compiled for.
    """
    places, bits = [x.data_ptr() for x in operands], 0
    for place in places:
        bits |= place
    return not (bits % _ALIGNED or 0 in places or len(set(places)) != len(places))


def tell_written(*tensors: torch.Tensor) -> None:
    """Have autograd see that bytes of these were written by address: what it saved is no more."""
    torch.autograd.graph.increment_version([x for x in tensors if not x.is_inference()])


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
        if not suit_kept_launches([x for x in operands if x is not None]):
            return make()
        if isinstance(kept, KeptCall):
            results = kept.make(operands)
            if under_way.watched is not None:
                begun = len(under_way.watched.begun)
                under_way.watched.repeated.append((kept, operands, results, begun))
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
        launches = [(step, _fill_of((*given,), places)) for step, given in recorder.steps]
        shapes, views = [], []
        for x in made:
            count = x.untyped_storage().nbytes() // x.element_size()
            whole = x.is_contiguous() and x.numel() == count
            shape, strides = (tuple(x.shape), x.stride()) if whole else ((count,), (1,))
            shapes.append((shape, strides, x.dtype))
            view = tuple(x.shape), x.stride(), int(x.storage_offset())
            views.append(None if whole else view)
        return KeptCall(self._device, launches, shapes, views[: len(results)], recorder.in_graph)


def _launch(compiled: Any, programs: int) -> _Launch:
    """compiled[(programs, 1, 1)] of arguments.

    What is done there for hooks, a third of it, is left out while nobody has set any.
    """
    from triton.knobs import HookChain, runtime
    from triton.runtime import driver

    with_hooks = compiled[programs, 1, 1]
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata

    def launch(arguments: tuple[Any, ...]) -> object:
        for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
            if hook.__class__ is not HookChain or hook.calls:
                return with_hooks(*arguments)
        active = driver.active
        stream = active.get_current_stream(active.get_current_device())
        return run(programs, 1, 1, stream, function, packed, None, None, None, *arguments)

    return launch


def _fill_of(arguments: tuple[Any, ...], places: dict[int, int | None]) -> _Fill:
    """How arguments follow from the tensors of a call. No tensor of this one stays alive.

    An expression is a fifth as long as loops over parts that vary: these are tuples in tuples.
    """
    constants: dict[str, Any] = {}
    source, _ = _expression(arguments, places, constants)
    fill: _Fill = eval(f"lambda tensors: {source}", constants)
    return fill


def _described(kind: Any, bare: dict[str, Any], base: Any) -> Any:
    """The descriptor of a tensor, of which all else was checked before."""
    made = object.__new__(kind)
    made.__dict__.update(bare, base=base)
    return made


def _expression(
    value: Any, places: dict[int, int | None], constants: dict[str, Any]
) -> tuple[str, bool]:
    """An expression of `tensors` and of `constants`, where it adds some, that is an argument; and
    whether it varies."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    if isinstance(value, torch.Tensor):
        place = value.data_ptr()  # 0, in every call, of an empty one
        if place and place not in places:
            raise _NotKeptError
        number = places[place] if place else None
        if number is not None:
            return f"tensors[{number}]", True
    elif isinstance(value, TensorDescriptor):
        base, varies = _expression(value.base, places, constants)
        if varies:
            bare = {key: each for key, each in vars(value).items() if key != "base"}
            constants[name := f"c{len(constants)}"] = partial(_described, type(value), bare)
            return f"{name}({base})", True
    elif isinstance(value, tuple):
        parts = [_expression(part, places, constants) for part in value]
        if any(varies for _, varies in parts):
            return f"({''.join(f'{part}, ' for part, _ in parts)})", True
    constants[name := f"c{len(constants)}"] = value
    return name, False
