"""What virtual time hooks in Triton's interpreter, beside `interpreter_hooks` and underneath it.

    InterpreterBuilder.create_masked_load / _store, create_dot    noted on the program's lane
    InterpreterBuilder.binary_op, unary_op, ternary_op, ReduceOps.apply     how much is computed
    InterpretedFunction.rewrite     puts a `range` that counts before Python's in a kernel's module
    _patch_lang_core                and one in the place of tl.range

and, without numerics, what makes real sizes cheap: no floating-point number is loaded, stored or
computed, zeros that take no memory stand for all of them, and of a loop that only loads and
multiplies the first two turns and the last are run, the others being like the second.

    InterpreterBuilder.cast_impl, create_fp_to_fp, create_bitcast, binary_op, unary_op, ternary_op

Integers are loaded, stored and computed for real: tables of pointers, generations, indices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
from triton.runtime import interpreter

from weft.sim.hooks import interpreter_hooks
from weft.sim.schedule.scheduler import local
from weft.sim.time.trace import Lane, Tracer

Array = npt.NDArray[Any]

_SPECIAL = frozenset(
    (np.exp, np.exp2, np.log, np.log2, np.sin, np.cos, np.sqrt, np.divide)
)  # by the units of exponentials, or beginning there
_COMPARISONS = frozenset(
    (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal)
)
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


@cache
def requirements() -> list[str]:
    """What is missing in this Triton, in words; empty if all hooks fit."""
    want = {
        "create_masked_load": ["ptrs", "mask"],
        "create_masked_store": ["ptrs", "value", "mask"],
        "create_dot": ["a", "b", "d", "input_precision"],
        "cast_impl": ["src", "dst_type"],
        "create_fp_to_fp": ["src", "dst_type", "rounding_mode"],
        "create_bitcast": ["src", "dst_type"],
        "binary_op": ["lhs", "rhs", "op"],
        "unary_op": ["arg", "op"],
        "ternary_op": ["lhs", "rhs", "other", "op"],
    }
    missing = interpreter_hooks.moved_functions(want, ["_patch_lang_core"])
    if not hasattr(interpreter.InterpretedFunction, "rewrite"):
        missing.append("InterpretedFunction.rewrite is gone")
    if not hasattr(interpreter, "ReduceOps"):
        missing.append("ReduceOps is gone")
    return missing


@contextmanager
def installed(tracer: Tracer, numerics: bool) -> Iterator[None]:
    """Note what programs of virtual ranks load, store and multiply, inside the block.

    Enter it before `interpreter_hooks.installed`.
    """
    if missing := requirements():
        raise RuntimeError(f"weft.sim cannot time on this Triton: {'; '.join(missing)}")
    kind = interpreter.InterpreterBuilder
    hooks = _noting(kind, tracer, numerics)
    if not numerics:
        hooks |= _skipping(kind)
    hooks |= _counting(kind, hooks)
    with _counted_reductions(), patch.multiple(kind, **hooks), _counted_loops(sampled=not numerics):
        yield


def _noting(kind: Any, tracer: Tracer, numerics: bool) -> dict[str, Any]:
    load, store, dot = kind.create_masked_load, kind.create_masked_store, kind.create_dot

    def blocks(ptrs: Any, mask: Any, rank: int) -> list[tuple[int, int, int]]:
        flat = interpreter_hooks.live_addresses(ptrs, mask)
        return tracer.owners(flat, rank) if flat.size else []

    def masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any, **kwargs: Any) -> Any:
        element, strand = ptrs.get_element_ty(), local.strand
        number = None
        if strand is not None and strand.lane is not None and strand.missing is None:
            bits = element.primitive_bitwidth
            floating = element.is_floating()
            name = _DTYPES.get(element.name, "float8") if floating else ""
            for owner, first, count in blocks(ptrs, mask, strand.rank):
                nbytes = count * max(1, bits // 8)
                number = strand.lane.load(owner, first, nbytes, name, bits if floating else 0)
        if not numerics and element.is_floating() and strand is not None:
            values = _zeros(ptrs.data.shape, element)
        else:
            values = load(self, ptrs, mask, *rest, **kwargs)
        values.loaded_by = number  # an attribute of ours: a store of these very values finds it
        return values

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **kwargs: Any) -> Any:
        element, strand = ptrs.get_element_ty(), local.strand
        if strand is not None and strand.lane is not None:
            loaded, bits = getattr(value, "loaded_by", None), element.primitive_bitwidth
            width = bits if element.is_floating() else 0
            for part, (owner, _, count) in enumerate(blocks(ptrs, mask, strand.rank)):
                strand.lane.store(owner, count * max(1, bits // 8), width, loaded, part > 0)
        if not numerics and element.is_floating() and strand is not None:
            return None
        return store(self, ptrs, value, mask, *rest, **kwargs)

    def noted_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, *rest: Any) -> Any:
        strand = local.strand
        if strand is not None and strand.lane is not None:
            tf32 = str(precision).upper().endswith("TF32")
            strand.lane.dot(2 * a.data.size * b.data.shape[-1], tf32)
        if not numerics and strand is not None:
            return d
        return dot(self, a, b, d, precision, *rest)

    return {
        "create_masked_load": masked_load,
        "create_masked_store": masked_store,
        "create_dot": noted_dot,
    }


def _zeros(shape: tuple[int, ...], element: Any) -> Any:
    zero = np.zeros((), interpreter._get_np_dtype(element))
    return interpreter.TensorHandle(np.broadcast_to(zero, shape), element)


def _skips(handle: Any) -> bool:
    # A single number may decide where a program goes, and is computed.
    return local.strand is not None and handle.data.size > 1 and handle.dtype.scalar.is_floating()


def _skipping(kind: Any) -> dict[str, Any]:
    cast, fp_to_fp, binary = kind.cast_impl, kind.create_fp_to_fp, kind.binary_op
    unary, ternary, bitcast = kind.unary_op, kind.ternary_op, kind.create_bitcast

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if _skips(src) and dst_type.scalar.is_floating():
            return _zeros(src.data.shape, dst_type.scalar)
        return cast(self, src, dst_type)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if _skips(src):
            return _zeros(src.data.shape, dst_type.scalar)
        return fp_to_fp(self, src, dst_type, rounding_mode)

    def create_bitcast(self: Any, src: Any, dst_type: Any) -> Any:
        if src.data.size > 1 and not any(src.data.strides):
            return _zeros(src.data.shape, dst_type.scalar)
        return bitcast(self, src, dst_type)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if op not in _COMPARISONS and (_skips(lhs) or _skips(rhs)):
            shape = np.broadcast_shapes(lhs.data.shape, rhs.data.shape)
            return _zeros(shape, lhs.dtype.scalar)
        return binary(self, lhs, rhs, op)

    def unary_op(self: Any, arg: Any, op: Any) -> Any:
        return _zeros(arg.data.shape, arg.dtype.scalar) if _skips(arg) else unary(self, arg, op)

    def ternary_op(self: Any, lhs: Any, rhs: Any, other: Any, op: Any) -> Any:
        if _skips(rhs):
            shape = np.broadcast_shapes(lhs.data.shape, rhs.data.shape, other.data.shape)
            return _zeros(shape, rhs.dtype.scalar)
        return ternary(self, lhs, rhs, other, op)

    return {
        "cast_impl": cast_impl,
        "create_fp_to_fp": create_fp_to_fp,
        "create_bitcast": create_bitcast,
        "binary_op": binary_op,
        "unary_op": unary_op,
        "ternary_op": ternary_op,
    }


def _counting(kind: Any, hooks: dict[str, Any]) -> dict[str, Any]:
    """The arithmetic of `hooks`, or else of the builder; how much each op computes is noted."""

    def counted(name: str, floating: int) -> Any:
        compute = hooks.get(name, getattr(kind, name))

        def run(self: Any, *operands: Any) -> Any:
            out = compute(self, *operands)
            if operands[floating].dtype.scalar.is_floating():
                _compute(out.data.size, operands[-1] in _SPECIAL)
            return out

        return run

    return {
        "unary_op": counted("unary_op", 0),
        "binary_op": counted("binary_op", 0),
        "ternary_op": counted("ternary_op", 1),  # the first one may be a mask
    }


def _compute(results: int, special: bool) -> None:
    lane = local.strand.lane if local.strand is not None else None
    if lane is not None and results > 1:  # else of a single number
        lane.compute(results, special)


@contextmanager
def _counted_reductions() -> Iterator[None]:
    reduce = interpreter.ReduceOps.apply

    def counted(self: Any, values: Any) -> Any:
        if isinstance(values, tuple) and values[0].dtype.is_floating():  # else it calls itself
            _compute(values[0].handle.data.size, False)
        return reduce(self, values)

    with patch.object(interpreter.ReduceOps, "apply", counted):
        yield


def _range(bounds: tuple[Any, ...], sampled: bool) -> Any:
    """`range`, and in a program its turns are counted, or fewer of them run: see the module."""
    turns = range(*bounds)
    lane = local.strand.lane if local.strand is not None else None
    if lane is None:
        return turns
    lane.loops += 1
    return _sampled(lane, turns) if sampled and len(turns) >= 4 else _turns_counted(lane, turns)


def _turns_counted(lane: Lane, turns: range) -> Iterator[int]:
    for turn in turns:
        lane.step()
        yield turn


def _sampled(lane: Lane, turns: range) -> Iterator[int]:
    yield from _turns_counted(lane, turns[:1])
    loops, before = lane.loops, lane.state()
    yield from _turns_counted(lane, turns[1:2])
    # Of nested loops only the innermost is the same in each turn.
    same = lane.loops == loops and lane.repeat(before, len(turns) - 3)
    yield from _turns_counted(lane, turns[-1:] if same else turns[2:])


@contextmanager
def _counted_loops(sampled: bool) -> Iterator[None]:
    rewrite, patch_core = interpreter.InterpretedFunction.rewrite, interpreter._patch_lang_core
    patched: list[dict[str, Any]] = []

    def counted_range(*bounds: Any) -> Any:
        return _range(bounds, sampled)

    def counting_rewrite(self: Any) -> Any:
        fn = rewrite(self)
        names = self.fn.__globals__
        if "range" not in names:
            names["range"] = counted_range
            patched.append(names)
        return fn

    def counting_core(lang: Any, scope: Any) -> None:
        patch_core(lang, scope)

        def counted_tl_range(
            start: Any, end: Any = None, step: Any = None, **options: object
        ) -> Any:
            first, last = (0, start) if end is None else (start, end)
            return counted_range(first, last, 1 if step is None else step)

        scope.set_attr(lang, "range", counted_tl_range)

    try:
        with (
            patch.object(interpreter.InterpretedFunction, "rewrite", counting_rewrite),
            patch.object(interpreter, "_patch_lang_core", counting_core),
        ):
            yield
    finally:
        for names in patched:
            del names["range"]
