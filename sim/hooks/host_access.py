"""Accesses of torch ops to shared memory: which of their tensors are read, which are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weft.sim.check.races import READ, WRITE

# They take a tensor for its shape and dtype alone.
_SHAPE_ONLY = frozenset(
    (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
        *("is_pinned", "_unsafe_view", "sym_size", "sym_stride", "size", "stride"),
    )
)

_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

Note = Callable[[torch.Tensor, str], None]


class PlainOps(TorchDispatchMode):
    """`run` does every op of this thread on plain tensors: those of a DTensor come back as such."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # To skip it takes longer than most ops, and seconds the first time. Nothing compiles here.
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if types and wrap_others(tuple(types)):
            return func(*args, **(kwargs or {})) if on_fakes() else NotImplemented
        return self.run(func, args, dict(kwargs or {}))

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of `func`."""
        raise NotImplementedError


class HostAccesses(PlainOps):
    """Calls `note(tensor, READ or WRITE)` for the tensors of every op of this thread."""

    def __init__(self, note: Note) -> None:
        super().__init__()
        self._note = note

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.overloadpacket.__name__ not in _SHAPE_ONLY:
            for tensor, alias in op_tensors(func, args, kwargs):
                if alias is None:
                    self._note(tensor, READ)
                elif alias.is_write:
                    self._note(tensor, WRITE)
        if func.namespace == "weft":  # Python again, whose ops are to be seen as well
            with self:
                return func.redispatch(_CPU_KEYS, *args, **kwargs)
        return func(*args, **kwargs)


def op_tensors(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[torch.Tensor, Any]]:
    """The tensors that an op of torch is given, each with what the schema says of its memory."""
    schema = func._schema.arguments
    for argument, value in zip(schema, args, strict=False):
        for tensor in tensors_in((value,)):
            yield tensor, argument.alias_info
    if kwargs:
        by_name = {argument.name: argument for argument in schema}
        for name, value in kwargs.items():
            for tensor in tensors_in((value,)):
                yield tensor, by_name[name].alias_info


def tensors_in(arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Those among the arguments, in tuples and lists of them, and under descriptors."""
    for value in arguments:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)
        elif isinstance(getattr(value, "base", None), torch.Tensor):  # a tensor descriptor
            yield value.base


@contextmanager
def python_reads(note: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Calls `note(tensor)` before `tolist`, which reads memory without an op."""
    tolist = torch.Tensor.tolist

    def noted(tensor: torch.Tensor) -> Any:
        note(tensor)
        return tolist(tensor)

    torch.Tensor.tolist = noted  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.tolist = tolist  # type: ignore[method-assign]


@lru_cache(maxsize=64)
def wrap_others(types: tuple[type, ...]) -> bool:
    """Whether one of the types has a dispatch of its own, as DTensor has."""
    plain = torch.Tensor.__torch_dispatch__
    return any(getattr(kind, "__torch_dispatch__", plain) is not plain for kind in types)


def on_fakes() -> bool:
    """Whether torch.export traces on tensors without data, which take part in no access."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def addresses(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Address of every element of `tensor`."""
    offsets: np.ndarray[Any, np.dtype[np.uint64]]
    itemsize = tensor.element_size()
    if tensor.is_contiguous():
        offsets = np.arange(tensor.numel(), dtype=np.uint64) * np.uint64(itemsize)
    else:
        offsets = np.zeros(tensor.shape, np.uint64)
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            along = np.arange(size, dtype=np.uint64) * np.uint64(stride * itemsize)
            offsets += along.reshape([-1 if d == dim else 1 for d in range(tensor.ndim)])
    offsets = offsets.reshape(-1) + np.uint64(tensor.data_ptr())
    return offsets
