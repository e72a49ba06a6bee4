"""Launches that are made again (`weft.collectives.device.launches`), on a driver that runs nothing.

    python tests/relaunching.py [all | CALL ..]

Calls of `weft bench host`, some, all or those named, are made with another rank's tensors, by kept
launches and anew: kernels must be given the same, but for the addresses of memory that is new in
both. Then follows what must not be kept; or, of calls named, how a CUDA graph could hold them.
Prints a JSON object: by name, what is wrong, or "".
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch
from weakref import ref

import torch
import triton
import triton.language as tl
from launching import HOOK, parameter_sizes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import weft
from weft.bench.host import driver, measure
from weft.bench.host.calls import CALLS
from weft.collectives.device.launches import LOOKS, Repeated, launching, layouts_of, temporary
from weft.collectives.memory import exchange, repeatable
from weft.collectives.memory.repeatable import Straight
from weft.collectives.memory.workspace import Workspace, workspaces
from weft.collectives.ranks.group import alone, resolve

OTHER = measure.RANK + 1  # whose tensors are taken the second time
_SEEN: list[list[bytes]] = []


def watch() -> Any:
    """From now on, note the parameters of all launches."""
    sizes: dict[int, list[int]] = {}
    init = triton.compiler.CompiledKernel._init_handles

    def told(compiled: Any) -> None:
        init(compiled)
        sizes[compiled.function] = parameter_sizes(compiled.asm["ptx"])

    def on_launch(function: int, parameters: Any) -> None:
        given = enumerate(sizes[function])
        _SEEN.append([ctypes.string_at(parameters[i], size) for i, size in given])

    triton.compiler.CompiledKernel._init_handles = told
    hook = HOOK(on_launch)
    driver.activate_stub().stub_on_launch(hook)
    return hook


@contextmanager
def prepared_launches() -> Iterator[list[str]]:
    """The kernels that Triton is asked for inside: none is where launches are made again."""
    found, run = list[str](), triton.JITFunction.run

    def counted(kernel: Any, *args: Any, **options: Any) -> Any:
        found.append(kernel.__name__)
        return run(kernel, *args, **options)

    with patch.object(triton.JITFunction, "run", counted):
        yield found


def launched(call: Callable[[], object]) -> list[list[bytes]]:
    """The parameters of its launches."""
    _SEEN.clear()
    call()
    return _SEEN.copy()


def held() -> list[tuple[int, int]]:
    """Where the memory of all tensors begins and ends."""
    storages = [x.untyped_storage() for x in gc.get_objects() if isinstance(x, torch.Tensor)]
    return [(each.data_ptr(), each.data_ptr() + each.nbytes()) for each in storages]


def forget() -> None:
    """Have the next calls made anew."""
    for each in gc.get_objects():
        if isinstance(each, Workspace):
            each.forget_launches()
    repeatable.straight.clear()


def difference(kept: list[list[bytes]], anew: list[list[bytes]], old: Any) -> str:
    """What kept launches were given that is neither what those made anew were, nor memory that is
    new in both."""
    if [*map(len, kept)] != [*map(len, anew)]:
        return f"{[*map(len, kept)]} parameters, not {[*map(len, anew)]}"
    pairs: dict[int, int] = {}
    for i, (of_kept, of_anew) in enumerate(zip(kept, anew, strict=True)):
        for j, (one, other) in enumerate(zip(of_kept, of_anew, strict=True)):
            if one == other:
                continue
            if len(one) not in (8, 128) or one[8:] != other[8:]:
                return f"parameter {j} of launch {i}: {one!r}, not {other!r}"
            mine, its = (int.from_bytes(each[:8], "little") for each in (one, other))
            if any(begin <= mine < end for begin, end in old) or pairs.setdefault(mine, its) != its:
                return f"parameter {j} of launch {i} is an address of before"
    return ""


def wrong_call(name: str) -> str:
    """What is wrong with a call of `weft bench host`, also that its memory waits for the collector
    of cycles. Frames of what the first call of a process imports may hold it so: once."""
    held = ""
    for _ in range(2):
        used: list[ref[Workspace]] = []
        gc.disable()
        try:
            if wrong := wrong_launches(name, used):
                return wrong
            held = ", ".join(ws.name for each in used if (ws := each()) is not None)
        finally:
            gc.enable()
        if not held:
            return ""
    return f"memory is held: {held}"


def wrong_launches(name: str, used: list[ref[Workspace]]) -> str:
    """What is wrong with them; `used`: where to put the memory that they use."""
    # A gradient runs in the group of its forward, which was that of the tensors' rank.
    other = measure.RANK if "gradient" in name else OTHER
    with measure.prepared(CALLS[name]) as run:
        run(other)  # their tensors are made
        forget()
        run(measure.RANK)
        old = held()
        with prepared_launches() as found:
            kept = launched(lambda: run(other))
            results = list[Any]()
            straight = launched(lambda: results.append(run(other)))  # the third call since
            made_straight = launched_straight()
        if found:
            return f"prepared: {found}"
        if not made_straight:
            return "not made straight"
        forget()
        anew = launched(lambda: results.append(run(other)))
        used += map(ref, workspaces())
        if layout(results[0]) != layout(results[1]):
            return f"results {layout(results[0])}, not {layout(results[1])}"
        return difference(kept, anew, old) or difference(straight, anew, old)


def launched_straight() -> bool:
    """Whether all functions have found out how their calls go straight to their launches."""
    known = [each for layouts in repeatable.straight.values() for each in layouts]
    return bool(known) and all(isinstance(each.how, Straight) for each in known)


def layout(results: Any) -> Any:
    """Of tensors, in tuples and lists."""
    if isinstance(results, torch.Tensor):
        return results.shape, results.stride(), results.storage_offset(), results.dtype
    return type(results), [*map(layout, results)]


class _Enqueued(TorchDispatchMode):
    """Notes the ops of torch inside that are more than looks."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.add(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


# Calls that a CUDA graph holds, and their launches.
GRAPHED = {
    "experts, 64 tokens": 2,  # there, and back
    "all_reduce_residual_rms_norm": 1,
    "reduce_scatter_rms_norm_all_gather": 1,
}


def uncapturable(name: str, launches: int) -> str:
    """Why a CUDA graph could not hold the call, or that it makes not so many launches."""
    with measure.prepared(CALLS[name]) as run, _Enqueued() as ops:
        made = launched(lambda: run(measure.RANK))
    if len(made) != launches:
        return f"{len(made)} launches"
    return ", ".join(sorted(ops.found - LOOKS))


@triton.jit
def _add_kernel(a, b, out, table, n, stride, BLOCK: tl.constexpr) -> None:
    offs = tl.arange(0, BLOCK)
    total = tl.load(a + offs * stride) + tl.load(b + offs) + tl.load(table)
    tl.store(out + offs, total, offs < n)


TABLE = torch.zeros(64)
_Make = Callable[..., Sequence[torch.Tensor]]


def add(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> list[torch.Tensor]:
    """What a launcher does."""
    out = torch.empty_like(b) if out is None else out
    launching(_add_kernel, 1)(a, b, out, TABLE, a.numel(), a.stride(0), BLOCK=64)
    return [out]


def through_temporary(a: torch.Tensor, b: torch.Tensor, told: bool = True) -> list[torch.Tensor]:
    between = torch.empty_like(a)
    (out,) = add(a, temporary(between) if told else between)
    return [out]


def outside(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    return add(a, ELSEWHERE)


ELSEWHERE = torch.zeros(64)


def vectors(count: int = 2, at: int = 0) -> list[torch.Tensor]:
    """New ones, at an offset."""
    return [torch.zeros(64 + at)[at:] for _ in range(count)]


# By what they show: what is called, with what first and what then, and whether that is kept.
MADE_AGAIN: dict[str, tuple[_Make, list[torch.Tensor], list[torch.Tensor], bool]] = {
    "other addresses": (add, vectors(), vectors(), True),
    "another layout": (add, vectors(), [torch.zeros(64, 2)[:, 0], *vectors(1)], False),
    "another dtype": (add, vectors(), [x.half() for x in vectors()], False),
    "a pending negation": (
        add, vectors(), [torch.zeros(64, dtype=torch.cfloat).conj().imag, *vectors(1)], False,
    ),
    "first the same twice": (add, vectors(1) * 2, vectors(), False),
    "then the same twice": (add, vectors(), vectors(1) * 2, False),
    "no multiple of 16 first": (add, vectors(at=1), vectors(), False),
    "no multiple of 16 then": (add, vectors(), vectors(at=1), False),
    "temporary memory": (through_temporary, vectors(), vectors(), True),
    "temporary memory, not told": (
        partial(through_temporary, told=False), vectors(), vectors(), False,
    ),
    "memory of somebody else": (outside, vectors(), vectors(), False),
    "a copy before": (lambda a, b: add(a.clone(), b), vectors(), vectors(), False),
    "a fill behind": (lambda a, b: [add(a, b)[0].fill_(1.0)], vectors(), vectors(), False),
    "into an operand": (lambda a, b, out: add(a, b, out) and (), vectors(3), vectors(3), True),
    "an operand as the result": (lambda a, b, out: add(a, b, out), vectors(3), vectors(3), False),
    "a part of what is made": (lambda a, b: [add(a, b)[0][32:]], vectors(), vectors(), True),
}  # fmt: skip


def wrong_case(make: _Make, first: Any, then: Any, keeps: bool) -> str:
    """What is wrong with one of `MADE_AGAIN`."""
    repeated = Repeated(torch.device("cpu"), [TABLE])

    def call(operands: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return repeated.call(layouts_of(operands), operands, lambda: make(*operands))

    call(first)
    with prepared_launches() as found:
        results: list[torch.Tensor] = []
        kept = launched(lambda: results.extend(call(then)))
    if bool(found) == keeps:
        return f"prepared: {found}"
    wanted = make(*then)
    if [(x.shape, x.stride()) for x in results] != [(x.shape, x.stride()) for x in wanted]:
        return f"results {[x.shape for x in results]}"
    for given, x in zip(kept[0][:2], then, strict=False):
        if make is add and int.from_bytes(given, "little") != x.data_ptr():
            return "an operand is another"
    if results and make is add and int.from_bytes(kept[0][2], "little") != results[0].data_ptr():
        return "the result is another"
    return ""


def straight_cases() -> Iterator[tuple[str, str]]:
    """By name, what is wrong with calls that a function must make itself, or learns from."""
    W, lengths, made, make = (
        measure.WORLD_SIZE,
        [8] * measure.WORLD_SIZE,
        list[str](),
        Straight.make,
    )

    def seen(self: Straight, *args: Any) -> Any:
        result = make(self, *args)
        told = {id(repeatable._OTHERWISE): "otherwise", id(repeatable._OUTGROWN): "outgrown"}
        made.append(told.get(id(result), "straight"))
        return result

    def way(call: Callable[[], object], wanted: str = "", times: int = 1) -> str:
        """ "" if so many calls are made in the ways that are wanted, else these."""
        made.clear()
        for _ in range(times):
            call()
        return "" if made == wanted.split() else f"made {made}"

    with (
        measure.prepared(CALLS["all_gather_matmul, 2048 tokens"]),
        patch.object(exchange, "_agreed", lambda *_: [*lengths]),
        patch.object(Straight, "make", seen),
    ):
        x, w, bias = (torch.zeros(8, n, dtype=torch.bfloat16) for n in (64, 64, 1))
        w, bias = w.t().contiguous(), bias[:, 0].contiguous()
        odd = torch.zeros(8 * 64 + 1, dtype=torch.bfloat16)[1:].view(8, 64)
        gather = partial(weft.all_gather_matmul, x, w)
        yield "the third call", way(gather, "straight straight", 4)
        yield "other numbers", way(partial(gather, gather_dim=-2))
        yield "another tensor", way(partial(gather, bias=bias))
        yield "its third call", way(partial(gather, bias=bias), "straight", 2)
        for told, other in {
            "another size": w[:, :4].contiguous(),
            "other strides": w.t().contiguous().t(),
            "a parameter": torch.nn.Parameter(w, requires_grad=False),
            "a pending negation": torch._neg_view(w),
        }.items():
            yield told, way(partial(weft.all_gather_matmul, x, other))
        yield "another dtype", way(partial(weft.all_gather_matmul, x.half(), w.half()))
        with torch.inference_mode():
            yield "tensors of inference", way(partial(weft.all_gather_matmul, x.clone(), w))
        yield "after all of these", way(gather, "straight")
        yield "lengths that are given", way(partial(gather, sizes=lengths), "straight", 3)
        of_one = partial(weft.all_gather_matmul, torch.zeros_like(x), w, alone(), sizes=[8])
        yield "one rank alone, with nothing to publish", way(of_one, "straight", 3)
        with patch.dict(os.environ, WEFT_TIMEOUT_S="77"):
            yield "another time-out", way(gather)
        yield "explained", way(lambda: weft.explain(gather))
        with torch.autograd.profiler.profile():
            yield "profiled", way(gather)
        with FlopCounterMode(display=False):
            yield "in a mode", way(gather)
        needy = partial(weft.all_gather_matmul, x, w.clone().requires_grad_())
        yield "a gradient", way(needy, times=4)
        yield "no multiple of 16", way(partial(weft.all_gather_matmul, odd, w), "otherwise")
        lengths[-1] = 16
        longer = gather()
        told = f"results {[*longer.shape]}" if longer.shape != (8 * W + 8, 8) else ""
        yield "more rows on another rank", told
        lengths[-1] = 8
        yield "those of before, again", way(gather, "straight")
        for ws in workspaces():
            ws.retired = True
        yield "memory that has grown", way(gather, "outgrown")
        for ws in workspaces():
            ws.retired = False
        yield "known again", way(gather, "straight")
        resolve().virtual.learning = True  # type: ignore[union-attr]  # memory for sums, too
        leaves = [each.clone().requires_grad_() for each in (x, w)]
        y = weft.all_gather_matmul(*leaves)
        gradients = partial(torch.autograd.grad, y, leaves, torch.zeros_like(y), retain_graph=True)
        yield "gradients of both, two calls", way(gradients, "straight", 3)
        old, made_of = held(), list[Any]()
        again = launched(lambda: made_of.append(gradients()))
        forget()
        anew = launched(lambda: made_of.append(gradients()))
        yield "what these return", "" if layout(made_of[0]) == layout(made_of[1]) else "differs"
        yield "what they are given", difference(again, anew, old)
    with measure.prepared(CALLS["all_reduce"]), patch.object(Straight, "make", seen):
        # As large as the call that is prepared, for which there is memory.
        x, y, both = (torch.zeros(n << 15, dtype=torch.bfloat16) for n in (1, 1, 2))
        into = partial(weft.collectives.all_reduce, x, out=y)
        yield "into a tensor", way(into, "straight straight", 4)
        before, told = y._version, way(into, "straight")
        yield "which autograd sees", told or ("" if y._version == before + 1 else "not written to")
        parts = both[: 1 << 15], both[64 : 64 + (1 << 15)]
        yield (
            "overlapping memory",
            way(partial(weft.collectives.all_reduce, parts[0], out=parts[1])),
        )
        with torch.inference_mode():
            x, y = x.clone(), y.clone()
            yield "of inference", way(partial(weft.collectives.all_reduce, x, out=y), "straight", 3)


FIRST = (
    "all_gather_matmul, 2048 tokens", "all_gather_matmul, 8192 tokens", "its gradient of w",
    "matmul_reduce_scatter, 2048 tokens", "... with bias and residual", "flash_decode",
    "all_reduce",
)  # fmt: skip


def main(*names: str) -> None:
    _hook = watch()
    told = {name: wrong_call(name) for name in (CALLS if "all" in names else names or FIRST)}
    if names in ((), ("all",)):
        told |= {name: wrong_case(*case) for name, case in MADE_AGAIN.items()}
        told |= dict(straight_cases())
    else:
        told |= {f"{name}, in a graph": uncapturable(name, GRAPHED[name]) for name in names}
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
