"""Arithmetic on a kernel's integers and pointers that bypasses Triton's type checks.

In Triton's interpreter `a + b` takes 30 us, of which numpy's addition is one, and small cases are
nearly all index arithmetic: sums, products, comparisons and the like of int32, int64, bool and
pointers are computed directly here, with Triton's promotion rules; all else goes the usual way.

    triton.language.tensor.__add__ and the other operators, tensor.to, where, minimum, maximum
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

_WIDTHS = {"int1": 1, "int32": 32, "int64": 64, "uint32": -32}  # unsigned: below zero
_TYPES = {1: tl.int1, 32: tl.int32, 64: tl.int64, -32: tl.uint32}
_NUMPY = {width: np.dtype(name) for name, width in _WIDTHS.items() if width != 1}
_NUMPY[1] = np.dtype(bool)
_INT32 = 1 << 31  # numbers of Python from minus this to below it are int32

_prototypes: dict[Any, dict[str, Any]] = {}


def tensor(data: Any, dtype: Any, block: bool) -> Any:
    """A tl.tensor on `data`."""
    key = (dtype.name, data.shape if block else None)
    prototype = _prototypes.get(key)
    if prototype is None:
        kind = tl.block_type(dtype, list(data.shape)) if block else dtype
        made = tl.tensor(TensorHandle(data, dtype), kind)
        prototype = _prototypes[key] = {**vars(made), "handle": None}
    handle = object.__new__(TensorHandle)
    handle.data, handle.dtype, handle.attr = data, dtype, {}
    made = object.__new__(tl.tensor)
    vars(made).update(prototype)
    made.handle = handle
    return made


def _operand(value: Any) -> tuple[Any, int, bool] | None:
    """(array or int, width, is a block) of an integer; width 0 if it takes on the other's type."""
    if type(value) is tl.tensor:
        width = _WIDTHS.get(value.dtype.name)
        return None if width is None else (value.handle.data, width, bool(value.shape))
    if isinstance(value, tl.constexpr):
        value = value.value
    if type(value) is bool:
        return np.array([value]), 1, False
    if type(value) is int and -_INT32 <= value < _INT32:
        return value, 0, False
    return None


def _common(a: int, b: int) -> int:
    """Width of the result of two; 0 where it is not for us."""
    if a == b:
        return a
    if 0 in (a, b):
        return 0 if 1 in (a, b) else a + b
    return 64 if {a, b} == {32, 64} else 0


def _negative(value: Any) -> bool:
    return type(value) is int and value < 0


def _either(one: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    def run(left: Any, right: Any) -> Any:
        out = one(left, right)
        return other(left, right) if out is None else out

    return run


def _integers(op: Callable[[Any, Any], Any], lowest: int, compares: bool) -> Callable[..., Any]:
    """`op` of two operands of at least `lowest` bits; None where it is not for us.

    Of two widths Triton takes the larger.
    """

    def run(left: Any, right: Any) -> Any:
        a, b = _operand(left), _operand(right)
        if a is None or b is None:
            return None
        width = _common(a[1], b[1])
        if abs(width) < lowest or (width < 0 and (_negative(a[0]) or _negative(b[0]))):
            return None
        out = op(a[0], b[0])
        if compares:
            return tensor(out, tl.int1, a[2] or b[2])
        if out.dtype != _NUMPY[width]:
            out = out.astype(_NUMPY[width])
        return tensor(out, _TYPES[width], a[2] or b[2])

    return run


def _quotient(a: Any, b: Any) -> Any:
    return (a - np.fmod(a, b)) // b  # towards zero


def _pointers(sign: int) -> Callable[..., Any]:
    def run(left: Any, right: Any) -> Any:
        b = _operand(right)
        if (
            b is None
            or b[1] not in (0, 32, 64)
            or type(left) is not tl.tensor
            or not left.dtype.is_ptr()
        ):
            return None
        size = sign * max(1, left.dtype.element_ty.primitive_bitwidth // 8)
        offset = b[0] * size if isinstance(b[0], int) else b[0].astype(np.int64) * size
        # Unsigned sums wrap, so that a negative offset does what it should.
        out = left.handle.data + np.asarray(offset, np.int64).astype(np.uint64)
        return tensor(out, left.dtype, b[2] or bool(left.shape))

    return run


def operators() -> dict[str, Callable[[Any, Any], Any]]:
    """For each operator of tl.tensor, what to try first: None where it does not apply."""
    add, subtract = _integers(np.add, 32, False), _integers(np.subtract, 32, False)
    moved, back = _pointers(1), _pointers(-1)
    table = {
        "__add__": _either(add, moved),
        "__radd__": _either(add, moved),
        "__sub__": _either(subtract, back),
    }
    both_ways: dict[str, Callable[[Any, Any], Any]] = {
        "mul": np.multiply,
        "floordiv": _quotient,
        "mod": np.fmod,
    }
    for name, op in both_ways.items():
        table[f"__{name}__"] = _integers(op, 32, False)
    table["__rmul__"] = table["__mul__"]
    table["__rshift__"] = _integers(np.right_shift, 32, False)
    bits: dict[str, Callable[[Any, Any], Any]] = {"and": np.bitwise_and, "or": np.bitwise_or}
    for name, op in bits.items():
        table[f"__{name}__"] = table[f"__r{name}__"] = _integers(op, 1, False)
    comparisons = ("lt", "less"), ("le", "less_equal"), ("gt", "greater"), ("ge", "greater_equal")
    for name, op_name in (*comparisons, ("eq", "equal"), ("ne", "not_equal")):
        table[f"__{name}__"] = _integers(getattr(np, op_name), 32, True)
    return table


def converted(value: Any, dtype: Any) -> Any:
    """`value.to(dtype)` between integers; None where it is not for us."""
    wanted = _WIDTHS.get(getattr(dtype, "name", ""))
    a = _operand(value)
    if a is None or wanted not in (32, 64) or a[1] not in (32, 64):
        return None
    return value if a[1] == wanted else tensor(a[0].astype(_NUMPY[wanted]), dtype, a[2])


def chosen(condition: Any, left: Any, right: Any) -> Any:
    """tl.where between integers; None where it is not for us."""
    if type(condition) is not tl.tensor or condition.dtype.name != "int1":
        return None
    a, b = _operand(left), _operand(right)
    width = 0 if a is None or b is None else _common(a[1], b[1])
    if a is None or b is None or width in (0, 1):
        return None
    out = np.where(condition.handle.data, a[0], b[0]).astype(_NUMPY[width], copy=False)
    return tensor(out, _TYPES[width], a[2] or b[2] or bool(condition.shape))


def install(place: Any, scope: Any) -> None:
    """Put these before the functions of `place`, if it is tl or tl.tensor, until `scope` is
    restored."""
    if place is tl:
        usual_where = tl.where
        smaller, larger = _integers(np.minimum, 32, False), _integers(np.maximum, 32, False)

        def where(condition: Any, x: Any, y: Any, **kwargs: Any) -> Any:
            out = chosen(condition, x, y)
            return usual_where(condition, x, y, **kwargs) if out is None else out

        scope.set_attr(tl, "where", where)
        for name, fast in (("minimum", smaller), ("maximum", larger)):
            scope.set_attr(tl, name, _fast_or_usual(fast, getattr(tl, name)))
    elif place is tl.tensor:
        for name, fast in operators().items():
            scope.set_attr(tl.tensor, name, _fast_or_usual(fast, getattr(tl.tensor, name)))
        usual_to = tl.tensor.to

        def to(self: Any, dtype: Any, *rest: Any, **kwargs: Any) -> Any:
            out = None if rest or kwargs.get("bitcast") else converted(self, dtype)
            return usual_to(self, dtype, *rest, **kwargs) if out is None else out

        scope.set_attr(tl.tensor, "to", to)


def _fast_or_usual(
    fast: Callable[[Any, Any], Any], usual: Callable[..., Any]
) -> Callable[..., Any]:
    def run(a: Any, b: Any, *rest: Any, **kwargs: Any) -> Any:
        out = fast(a, b)
        return usual(a, b, *rest, **kwargs) if out is None else out

    return run


def np_dtype_kept(np_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same, which keeps what it has found."""
    kept: dict[str, Any] = {}

    def of(dtype: Any) -> Any:
        name = getattr(dtype, "name", None)
        if name is None:
            return np_dtype(dtype)
        if name not in kept:
            kept[name] = np_dtype(dtype)
        return kept[name]

    return of
