"""Index arithmetic of interpreted kernels: the same as Triton's own, value by value."""

from __future__ import annotations

from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from needs import needs_interpreter
from triton.runtime import interpreter

from weft.collectives.interpreted import fast_integers

pytestmark = needs_interpreter


def values() -> list[Any]:
    def made(data: Any, dtype: Any, block: bool) -> Any:
        return fast_integers.tensor(data, dtype, block)

    return [
        made(np.array([7], np.int32), tl.int32, False),
        made(np.array([-5], np.int64), tl.int64, False),
        made(np.array([True]), tl.int1, False),
        made(np.arange(1, 9, dtype=np.int32), tl.int32, True),
        made(np.arange(1, 9, dtype=np.int64).reshape(8, 1) - 4, tl.int64, True),
        made(np.full((8, 8), 3, np.uint32), tl.uint32, True),
        made(np.array([True, False] * 4), tl.int1, True),
        made(np.array([4096], np.uint64), tl.pointer_type(tl.bfloat16), False),
        made(np.full((8, 8), 4096, np.uint64), tl.pointer_type(tl.float32), True),
        3,
        -2,
        True,
        tl.constexpr(4),
    ]


def outcome(call: Any) -> tuple[Any, ...] | None:
    out = call()
    if not isinstance(out, tl.tensor):
        return None
    data = np.broadcast_to(out.handle.data, [int(s) for s in out.shape] or out.handle.data.shape)
    return data.tolist(), str(out.type), out.handle.data.dtype


@pytest.mark.parametrize("name", sorted(fast_integers.operators()))
def test_operators_are_tritons(name: str) -> None:
    fast, compared = fast_integers.operators()[name], 0
    with patch.object(fast_integers, "install"):
        scope = interpreter._patch_lang(lambda: tl)
    try:
        for a, b in product(values(), values()):
            if not isinstance(a, tl.tensor):
                continue
            with np.errstate(all="ignore"):
                got = outcome(lambda a=a, b=b: fast(a, b))
                if got is None:
                    continue
                assert got == outcome(lambda a=a, b=b: getattr(a, name)(b)), (name, a, b)
                compared += 1
    finally:
        scope.restore()
    assert compared >= 4


def test_choices_and_conversions() -> None:
    number, block = values()[0], values()[3]
    with patch.object(fast_integers, "install"):
        scope = interpreter._patch_lang(lambda: tl)
    try:
        condition = block > 4
        assert outcome(lambda: fast_integers.chosen(condition, block, 0)) == outcome(
            lambda: tl.where(condition, block, 0)
        )
        assert outcome(lambda: fast_integers.converted(number, tl.int64)) == outcome(
            lambda: number.to(tl.int64)
        )
        assert fast_integers.converted(number, tl.float32) is None
    finally:
        scope.restore()


@triton.jit
def _index(out, n):
    rows = tl.arange(0, 4) + n * 4
    tl.store(out + rows, tl.where(rows < 6, rows, -1))


def test_kernels_go_by_them() -> None:
    out = torch.zeros(8, dtype=torch.int32)
    with patch.object(fast_integers, "tensor", wraps=fast_integers.tensor) as made:
        _index[1,](out, 1)
    assert out.tolist() == [0, 0, 0, 0, 4, 5, -1, -1] and made.call_count >= 5
