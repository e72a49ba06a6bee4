"""What Triton's interpreter is helped with: its own functions, and time.

Triton decides whether it compiles or interprets a function when that is decorated: its own, as
`tl.zeros` and `tl.sum`, when it is imported. weft sets it to interpret where there is no GPU; if
that is too late for them, every kernel that calls one fails with "Cannot call @triton.jit'd outside
of the scope of a kernel". A kernel that was itself decorated before weft was imported is not
helped: Triton says that it has no driver.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from types import ModuleType
from typing import Any


def interpret_tritons_own() -> None:
    """Decorate Triton's own functions again, if they are compiled and kernels are interpreted."""
    import triton
    import triton.language as tl

    if not triton.knobs.runtime.interpret or not isinstance(tl.zeros, triton.JITFunction):
        return
    places: list[Any] = [tl.tensor]
    places += [m for name, m in sys.modules.items() if m and name.startswith("triton.language")]
    interpreted: dict[Any, Any] = {}
    for place in places:
        for name, value in list(vars(place).items()):
            if isinstance(value, triton.JITFunction):
                if value.fn not in interpreted:
                    interpreted[value.fn] = triton.jit(value.fn)
                again = interpreted[value.fn]
                setattr(place, name, _method(again) if place is tl.tensor else again)


def _method(function: Any) -> Any:
    """What Triton makes of a function that is a tensor's method, too."""

    def method(tensor: Any, *args: Any, **options: Any) -> Any:
        return function(tensor, *args, **options)

    method.__name__, method.__doc__ = function.__name__, function.fn.__doc__
    return method


def hasten() -> None:
    """Have Triton interpret kernels in a third of the time, with the same results.

    - The names of its builtins are kept: it looks for them anew, which takes 3 ms, in each call of
      a function by a kernel.
    - Integers and pointers take the short way of `fast_integers`.
    - Sums of int32 are made once: it makes them in int64 as well and compares, for an assertion
      that it leaves out (`debug` is false in its interpreter).
    - Its table of numpy's dtypes, which it makes at each look, is kept.
    """
    import triton
    import triton.language as tl

    if not triton.knobs.runtime.interpret:
        return
    from triton.runtime import interpreter

    from weft.collectives.interpreted import fast_integers

    usual: Any = interpreter._patch_builtin
    if usual.__module__ == __name__:
        return
    places = tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base
    kept = {
        place: [name for name, value in inspect.getmembers(place) if tl.core.is_builtin(value)]
        for place in places
    }

    def patch_builtin(place: Any, builder: Any, scope: Any) -> None:
        names = kept.get(place)
        if not names:
            usual(place, builder, scope)
        elif tl.core.is_builtin(getattr(place, names[0])):  # else the caller's have replaced all
            for name in names:
                interpreter._patch_attr(place, name, getattr(place, name), builder, scope)
            fast_integers.install(place, scope)

    interpreter._patch_builtin = patch_builtin
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = fast_integers.np_dtype_kept(interpreter._get_np_dtype)


def interpreter_ready() -> tuple[bool, str]:
    """Whether kernels can run on CPU in this process, and if not, why."""
    import numpy
    import triton
    import triton.language as tl

    if not triton.knobs.runtime.interpret:
        return False, (
            "kernels are compiled for a GPU in this process; set TRITON_INTERPRET=1 before Python "
            "runs"
        )
    if isinstance(tl.zeros, triton.JITFunction):
        return False, (
            "triton was imported before weft, so its own functions are compiled; import weft "
            "first, or set TRITON_INTERPRET=1 before Python runs"
        )
    if _release(triton) < (3, 7) and _release(numpy) >= (2, 4):
        return False, (
            f"the interpreter of triton {triton.__version__} converts arrays to numbers in a way "
            f"that numpy {numpy.__version__} rejects; install numpy < 2.4 or triton >= 3.7"
        )
    return True, "kernels are interpreted"


def _release(module: ModuleType) -> tuple[int, int]:
    major, minor = module.__version__.split(".")[:2]
    return int(major), int(minor)
