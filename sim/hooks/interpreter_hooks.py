"""All that `weft.sim` hooks in Triton's interpreter, and nothing else in it.

    builder.create_masked_load / _store     every load and store of a kernel goes through these
    builder.create_atomic_rmw / _cas        and every atomic through these,
    builder.create_atomic_load / _store / _poll     which Triton has since 3.9
    builder.create_barrier                  tl.debug_barrier
    InterpreterBuilder.grid_idx, grid_dim   kept a thread, as several kernels run at once
    GridExecutor.__call__                   one launch
    _patch_lang                             replaces functions of tl, for all threads together

`requirements()` finds what a new version of Triton has moved.
"""

from __future__ import annotations

import inspect
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from itertools import product
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import triton.language as tl
from triton.runtime import interpreter

from weft.sim.schedule.scheduler import strand_here

if TYPE_CHECKING:
    from weft.sim.run.world import World

Array = npt.NDArray[Any]
Effect = tuple[Any, ...]


_ATOMICS = frozenset(f"create_atomic_{name}" for name in ("rmw", "cas", "load", "store", "poll"))


def moved_functions(methods: dict[str, list[str]], names: Sequence[str]) -> list[str]:
    """What is missing in Triton's interpreter, in words.

    Args:
        methods: of its builder, each with its first arguments.
        names: of the module.
    """
    missing = []
    builder = getattr(interpreter, "InterpreterBuilder", None)
    for name, arguments in methods.items():
        method = getattr(builder, name, None)
        if method is None:
            missing.append(f"InterpreterBuilder.{name} is gone")
            continue
        found = list(inspect.signature(method).parameters)[1 : 1 + len(arguments)]
        if found != arguments:
            missing.append(f"InterpreterBuilder.{name} takes {found}, not {arguments}")
    for name in names:
        if not hasattr(interpreter, name):
            missing.append(f"triton.runtime.interpreter.{name} is gone")
    return missing


@cache
def requirements() -> list[str]:
    """What is missing in this Triton, in words; empty if all hooks fit."""
    want = {
        "create_masked_load": ["ptrs", "mask"],
        "create_masked_store": ["ptrs", "value", "mask"],
        "create_atomic_cas": ["ptr", "cmp", "val", "sem", "scope"],
        "create_atomic_rmw": ["rmwOp", "ptr", "val", "mask", "sem", "scope"],
        "create_barrier": [],
        "set_grid_idx": ["x", "y", "z"],
        "set_grid_dim": ["nx", "ny", "nz"],
    }
    names = "_patch_lang", "GridExecutor", "InterpretedFunction", "interpreter_builder"
    missing = moved_functions(want, names)
    executor = getattr(interpreter, "GridExecutor", None)
    source = inspect.getsource(executor.__call__) if executor else ""
    for text in ("_patch_lang(self.fn)", "self.fn(**args)", "set_grid_idx", "set_grid_dim"):
        if text not in source:
            missing.append(f"GridExecutor.__call__ does not contain {text!r} any more")
    for name in vars(getattr(interpreter, "InterpreterBuilder", object)):
        if "atomic" in name and name not in _ATOMICS:
            missing.append(f"InterpreterBuilder.{name} is an atomic that is not hooked")
    return missing


def live_addresses(ptrs: Any, mask: Any) -> Array:
    """Where a masked load or store goes, flat."""
    # Masks may be int32 in the interpreter: as an index, their 0 and 1 would be positions.
    live, addresses = np.asarray(getattr(mask, "data", mask), bool), ptrs.data
    if not live.all():
        addresses = addresses[np.broadcast_to(live, addresses.shape)]
    flat: Array = addresses.reshape(-1)
    return flat


class _Grid(threading.local):
    idx: tuple[int, int, int] | None = None
    dim: tuple[int, int, int] | None = None


class _NoPatch:
    def restore(self) -> None:
        """Nothing was patched."""


class _Collected:
    """Stands in for a kernel while its grid is walked, then passes on all programs at once."""

    def __init__(
        self, fn: Any, world: World, arguments: list[Any], shape: tuple[int, int], grid: _Grid
    ) -> None:
        self.__signature__ = inspect.signature(fn)
        self.__globals__, self.__name__ = fn.__globals__, fn.__name__
        self._fn, self._world, self._arguments, self._grid = fn, world, arguments, grid
        self._shape = shape  # warps and stages
        self._left: int | None = None

    def __call__(self, **args: Any) -> None:
        dim = self._grid.dim
        assert dim is not None
        if self._left is None:
            self._left = dim[0] * dim[1] * dim[2]
        self._left -= 1
        if self._left:
            return
        self._left = None

        def run(program: tuple[int, int, int]) -> None:
            self._grid.idx, self._grid.dim = program, dim
            self._fn(**args)

        programs = list(product(*map(range, dim)))
        name = self._fn.__name__
        self._world.launch(name, self._arguments, *self._shape, programs, run)  # type: ignore[arg-type]


def _name_or(value: Any, default: str) -> str:
    text = str(value).split(".")[-1].lower() if value is not None else default
    return {"acquire_release": "acq_rel", "system": "sys"}.get(text, text)


_lock = threading.Lock()


@contextmanager
def installed(world: World) -> Iterator[None]:
    """Tell `world` of every operation of kernels interpreted in this process, inside the block.

    Raises:
        RuntimeError: a simulation runs already, or this Triton does not fit.
    """
    if missing := requirements():
        raise RuntimeError(f"weft.sim does not know this Triton: {'; '.join(missing)}")
    if not _lock.acquire(blocking=False):
        raise RuntimeError("one simulation runs at a time in a process")
    try:
        with _patched(world):
            yield
    finally:
        _lock.release()


class _Hooks:
    """Replacements for the builder's methods that report to the world and do what those do."""

    def __init__(self, world: World, builder: Any) -> None:
        self._world = world
        self._load, self._store = builder.create_masked_load, builder.create_masked_store
        self._rmw, self._cas = builder.create_atomic_rmw, builder.create_atomic_cas
        self._barrier = builder.create_barrier
        self._poll = getattr(builder, "create_atomic_poll", None)

    def by_name(self) -> dict[str, Any]:
        """The hook of each method that this Triton has."""
        hooks: dict[str, Any] = {
            "create_masked_load": self.masked_load,
            "create_masked_store": self.masked_store,
            "create_atomic_cas": self.atomic_cas,
            "create_atomic_rmw": self.atomic_rmw,
            "create_barrier": self.barrier,
        }
        if self._poll is not None:  # Triton 3.9
            hooks["create_atomic_load"] = self.atomic_load
            hooks["create_atomic_store"] = self.atomic_store
            hooks["create_atomic_poll"] = self.atomic_poll
        return hooks

    def _note(self, ptrs: Any, mask: Any, what: str, value: Any = None) -> None:
        accessed = live_addresses(ptrs, mask)
        if accessed.size:
            one = value is not None and accessed.size == 1 and value.data.dtype.kind in "iu"
            stored = int(value.data.flat[0]) if one and value.data.size == 1 else None
            self._world.access(accessed, _itemsize(ptrs), what, stored)

    def masked_load(self, ptrs: Any, mask: Any, *rest: Any, **kwargs: Any) -> Any:
        if self._world.active():
            if generation := strand_here().flagged:
                self._world.take_flagged(live_addresses(ptrs, mask), generation)
            else:
                self._note(ptrs, mask, "reads")
        return self._load(ptrs, mask, *rest, **kwargs)

    def masked_store(self, ptrs: Any, value: Any, mask: Any, *rest: Any, **kwargs: Any) -> Any:
        if not self._world.active():
            return self._store(ptrs, value, mask, *rest, **kwargs)
        if generation := strand_here().flagged:
            accessed = live_addresses(ptrs, mask)
            if not accessed.size:
                return None
            return self._world.store_flagged(
                accessed, generation, lambda: self._store(ptrs, value, mask, *rest, **kwargs)
            )
        self._note(ptrs, mask, "writes", value)
        return self._store(ptrs, value, mask, *rest, **kwargs)

    def atomic_cas(self, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> Any:
        if not self._world.active():
            return self._cas(ptr, cmp, val, sem, scope)

        def run() -> tuple[Any, bool, Array]:
            out = self._cas(ptr, cmp, val, sem, scope)
            swapped = out.data == cmp.data
            return out, bool((swapped & (val.data != out.data)).any()), out.data

        order, reach, wanted = (
            _name_or(sem, "acq_rel"),
            _name_or(scope, "gpu"),
            int(cmp.data.flat[0]),
        )
        effect = "swap", wanted, int(val.data.flat[0])
        addresses = ptr.data.reshape(-1)
        return self._world.atomic(addresses, _itemsize(ptr), order, reach, run, wanted, effect)

    def atomic_rmw(self, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        if self._are_words(ptr):
            one = partial(self.atomic_rmw, op, sem=sem, scope=scope)
            return self._each(one, ptr, val, mask)

        def run() -> tuple[Any, bool, Array]:
            out = self._rmw(op, ptr, val, mask, sem, scope)
            # Adding 0 is how a load is spelled; all others are writers, whatever they write.
            vain = _name_or(op, "") in ("add", "fadd", "or") and not val.data.any()
            return out, not vain, out.data

        kind = {"add": "add", "xchg": "set"}.get(_name_or(op, ""))
        effect = (kind, int(val.data.flat[0])) if kind and val.data.dtype.kind in "iu" else None
        return self._atomic(ptr, mask, sem, scope, run, effect=effect)

    def atomic_load(
        self, ptr: Any, mask: Any, sem: Any, scope: Any, wanted: int | None = None
    ) -> Any:
        if self._are_words(ptr):
            one = partial(self.atomic_load, sem=sem, scope=scope, wanted=wanted)
            return self._each(one, ptr, mask)

        def run() -> tuple[Any, bool, Array]:
            out = self._load(ptr, mask, None, None, True)
            return out, False, out.data

        return self._atomic(ptr, mask, sem, scope, run, wanted, ("load",))

    def atomic_store(self, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        if self._are_words(ptr):
            return self._each(partial(self.atomic_store, sem=sem, scope=scope), ptr, val, mask)
        effect = ("set", int(val.data.flat[0])) if val.data.dtype.kind in "iu" else None

        def run() -> tuple[Any, bool, Array]:
            before = self._load(ptr, mask, None, None, True).data  # seen, as by an exchange
            return self._store(ptr, val, mask, None), True, before

        return self._atomic(ptr, mask, sem, scope, run, effect=effect)

    def _are_words(self, ptr: Any) -> bool:
        """Whether these are several signals: each is then an atomic of its own, as on a GPU."""
        words = ptr.data.size > 1 and ptr.get_element_ty().is_int()
        return bool(words and self._world.active())

    @staticmethod
    def _each(atomic: Callable[..., Any], ptr: Any, *operands: Any) -> Any:
        """`atomic` of one lane after another. The last operand is the mask."""
        shape, kind = ptr.data.shape, ptr.get_element_ty()
        operands = (ptr, *operands)
        data = [np.broadcast_to(operand.data, shape).reshape(-1) for operand in operands]
        found = np.zeros(ptr.data.size, interpreter._get_np_dtype(kind))
        for lane in np.flatnonzero(data[-1]):
            handles = [
                interpreter.TensorHandle(values[lane : lane + 1], operand.dtype)
                for values, operand in zip(data, operands, strict=True)
            ]
            out = atomic(*handles)
            if out is not None:  # as of a store
                found[lane] = out.data[0]
        return interpreter.TensorHandle(found.reshape(shape), kind)

    def _atomic(
        self,
        ptr: Any,
        mask: Any,
        sem: Any,
        scope: Any,
        run: Callable[[], tuple[Any, bool, Array]],
        wanted: int | None = None,
        effect: Effect | None = None,
    ) -> Any:
        live = np.broadcast_to(np.asarray(mask.data, bool), ptr.data.shape)
        if not self._world.active() or not live.any():
            return run()[0]
        order, reach = _name_or(sem, "acq_rel"), _name_or(scope, "gpu")
        addresses = ptr.data[live].reshape(-1)
        return self._world.atomic(addresses, _itemsize(ptr), order, reach, run, wanted, effect)

    def atomic_poll(self, ptr: Any, expected: Any, timeout_ns: Any, sem: Any, scope: Any) -> Any:
        if not self._world.active():
            assert self._poll is not None
            return self._poll(ptr, expected, timeout_ns, sem, scope)
        every = types.SimpleNamespace(data=np.ones(ptr.data.shape, bool))
        wanted = int(expected.data.flat[0])
        while True:
            matched = self.atomic_load(ptr, every, sem, scope, wanted).data == expected.data
            if matched.all():
                return interpreter.TensorHandle(matched, tl.int1)

    def barrier(self, *args: Any) -> Any:
        if self._world.active():
            self._world.barrier()
        return self._barrier(*args)


@contextmanager
def _patched(world: World) -> Iterator[None]:
    builder, kind = interpreter.interpreter_builder, interpreter.InterpreterBuilder
    execute = interpreter.GridExecutor.__call__
    grid = _Grid()

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        if world.active():
            shape = int(kwargs.get("num_warps", 4)), int(kwargs.get("num_stages", 3))
            given = dict(zip(self.arg_names, args, strict=False)) | kwargs
            world.launches(self.fn, self.grid, given)
            self.fn = _Collected(self.fn, world, [*args, *kwargs.values()], shape, grid)
            # Arguments are already on the CPU: copying them back would only take time.
            self._restore_args_dev = lambda *_: None
        execute(self, *args, **kwargs)

    everything = types.FunctionType((lambda: 0).__code__, {"tl": tl, "core": tl.core})
    scope = interpreter._patch_lang(everything)
    hooks = _Hooks(world, builder).by_name()
    places: dict[str, Any] = {f"grid_{name}": _per_thread(grid, name) for name in ("idx", "dim")}
    for name in places:
        vars(builder).pop(name, None)
    with ExitStack() as stack:
        stack.callback(scope.restore)
        stack.enter_context(patch.multiple(builder, **hooks))
        stack.enter_context(patch.multiple(kind, create=True, **places))
        stack.enter_context(patch.object(interpreter.GridExecutor, "__call__", call))
        stack.enter_context(patch.object(interpreter, "_patch_lang", lambda fn: _NoPatch()))
        yield


def _per_thread(grid: _Grid, name: str) -> property:
    return property(lambda _: getattr(grid, name), lambda _, value: setattr(grid, name, value))


def _itemsize(ptr: Any) -> int:
    bits: int = ptr.get_element_ty().primitive_bitwidth
    return max(1, bits // 8)
