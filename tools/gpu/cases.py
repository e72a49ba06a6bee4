"""The calls that `make gpu` proves: every kernel at a small size, beside an oracle in float64.

A call has several sets of inputs. Ranks draw the same whole tensors, and cut their parts from them:

    whole tensors of set i --this rank's part--> inputs[i] --op--> results  <->  oracle(i)

They are made in several ways, for what goes wrong in one of them only:

    plain       a call for each set, waited for
    late        many calls in a row, nothing waited for, each rank late by its own random times,
                before calls and before each of their launches
    graph       captured once, replayed with each set, late as well
    streams     two calls on two streams by turns
    mixed       all calls in one random order, late
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import weft
from weft import collectives
from weft.bench.blocks.causal import causal_attention
from weft.bench.measure import deviation
from weft.bench.suites.ops import TOLERANCE
from weft.collectives.ranks.group import resolve
from weft.dtensor import DeviceMesh, DTensor, Partial, Shard
from weft.kernels import route, zigzag_sizes
from weft.kernels.engine.fp8 import Quantize, magnitudes, quantized
from weft.kernels.flash.geometry import to_zigzag
from weft.kernels.matmul import copy_engines
from weft.settings import Engine

SETS = 3
_QUEUES = 32  # CUDA_DEVICE_MAX_CONNECTIONS can be no more
_IN_A_ROW = 6
# Half of the time a rank is not late at all, else by up to 2 ms: many launches.
_LATEST_CYCLES = 3_500_000

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Place:
    """Where a call is made: one rank of a group.

    Attributes:
        small: sizes for the interpreter.
    """

    rank: int
    world_size: int
    device: torch.device
    small: bool = False

    def drawn(self, seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Normally distributed numbers, the same on every rank."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=self.device).to(dtype)

    def mine(self, whole: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """This rank's equal share of a tensor."""
        return whole.chunk(self.world_size, dim)[self.rank].contiguous()


@dataclass(frozen=True)
class RankCall:
    """A call on one rank, ready to be made; `tolerance` is relative to the largest value."""

    inputs: list[Tensors]
    op: Callable[..., Tensors]
    oracle: Callable[[int], Tensors]
    tolerance: float


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() @ b.double()


def _gather_call(
    place: Place, *, kind: str = "", rows: int = 128, K: int = 256, N: int = 320
) -> RankCall:
    """all_gather_matmul; `kind`: "swiglu", "backward", or nothing."""
    W, dtype = place.world_size, torch.float32 if kind == "fp32" else torch.bfloat16
    if place.small:
        rows, K, N = 8, 32, 24
    wholes = [place.drawn(i, W * rows, K, dtype=dtype) for i in range(SETS)]
    weights = [place.drawn(100 + r, K, N, dtype=dtype) * K**-0.5 for r in range(W)]
    grads = [place.drawn(200 + r, W * rows, N, dtype=dtype) for r in range(W)]
    w, dy = weights[place.rank], grads[place.rank]
    sizes = [rows] * W
    inputs = [[place.mine(whole), w] for whole in wholes]

    if kind == "swiglu":
        up = place.drawn(300 + place.rank, K, N) * K**-0.5

        def op(x: torch.Tensor, w: torch.Tensor) -> Tensors:
            return [weft.all_gather_matmul(x, [w, up], activation="swiglu", sizes=sizes)]

        def oracle(i: int) -> Tensors:
            return [torch.nn.functional.silu(_mm(wholes[i], w)) * _mm(wholes[i], up)]
    elif kind == "backward":

        def op(x: torch.Tensor, w: torch.Tensor) -> Tensors:
            leaves = x.detach().requires_grad_(), w.detach().requires_grad_()
            y = weft.all_gather_matmul(*leaves, sizes=sizes)
            return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

        def oracle(i: int) -> Tensors:
            dx = sum(_mm(g, v.t()) for g, v in zip(grads, weights, strict=True))
            assert isinstance(dx, torch.Tensor)
            return [_mm(wholes[i], w), place.mine(dx), _mm(wholes[i].t(), dy)]
    else:

        def op(x: torch.Tensor, w: torch.Tensor) -> Tensors:
            return [weft.all_gather_matmul(x, w, sizes=sizes)]

        def oracle(i: int) -> Tensors:
            return [_mm(wholes[i], w)]

    return RankCall(inputs, op, oracle, TOLERANCE[dtype])


def _gather_fp8_call(place: Place) -> RankCall:
    W, (rows, K, N) = place.world_size, (16, 32, 32) if place.small else (128, 256, 384)
    fp8 = torch.float8_e4m3fn
    wholes = [place.drawn(i, W * rows, K).to(fp8) for i in range(SETS)]
    # As torch._scaled_mm has it, the second operand has its columns in a row.
    w = place.drawn(100 + place.rank, N, K).to(fp8).t()
    scales = torch.tensor(0.5, device=place.device), torch.tensor(0.25, device=place.device)
    sizes = [rows] * W

    def op(x: torch.Tensor) -> Tensors:
        return [weft.all_gather_matmul(x, w, sizes=sizes, scale_a=scales[0], scale_b=scales[1])]

    def oracle(i: int) -> Tensors:
        return [_mm(wholes[i], w) * 0.125]

    inputs = [[wholes[i].view(torch.uint8).chunk(W)[place.rank].view(fp8)] for i in range(SETS)]
    return RankCall(inputs, op, oracle, TOLERANCE[torch.bfloat16])


def _sum_call(
    place: Place, *, name: str, rows: int = 128, N: int = 384, K: int = 192, backward: bool = False
) -> RankCall:
    """matmul_reduce_scatter and matmul_all_reduce, of `rows` a rank."""
    W, scatters = place.world_size, name == "matmul_reduce_scatter"
    if place.small:
        rows, N, K = {4: 4, 128: 72, 512: 160}[rows], 32, 24
    M = W * rows if scatters else rows
    lefts = [[place.drawn(50 * i + r, M, K) for r in range(W)] for i in range(SETS)]
    rights = [place.drawn(1000 + r, K, N) * (W * K) ** -0.5 for r in range(W)]
    dy, w = place.drawn(2000, M, N), rights[place.rank]
    call = getattr(weft, name)

    def cut(whole: torch.Tensor) -> torch.Tensor:
        return place.mine(whole) if scatters else whole

    def op(x: torch.Tensor, w: torch.Tensor) -> Tensors:
        if not backward:
            return [call(x, w)]
        leaves = [x.detach().requires_grad_(), w.detach().requires_grad_()]
        y = call(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, cut(dy))]

    def oracle(i: int) -> Tensors:
        total = torch.stack([_mm(x, v) for x, v in zip(lefts[i], rights, strict=True)]).sum(0)
        if not backward:
            return [cut(total)]
        return [cut(total), _mm(dy, w.t()), _mm(lefts[i][place.rank].t(), dy)]

    inputs = [[each[place.rank], w] for each in lefts]
    return RankCall(inputs, op, oracle, TOLERANCE[torch.bfloat16])


def _norm_call(place: Place, *, rows: int = 16, whole: bool = False) -> RankCall:
    """reduce_scatter_rms_norm_all_gather, or all_reduce_residual_rms_norm of `whole` residuals."""
    W, (rows, H) = place.world_size, (min(rows, 8), 32) if place.small else (rows, 2048)
    terms = [[place.drawn(50 * i + r, rows, H) for r in range(W)] for i in range(SETS)]
    weight, before = place.drawn(1000, H), place.drawn(1001, rows, H)

    def part(every: torch.Tensor) -> torch.Tensor:
        if whole:
            return every
        parts: Sequence[torch.Tensor] = every.split(collectives.chunk_sizes(rows, W))
        return parts[place.rank].contiguous()

    def op(x: torch.Tensor, residual: torch.Tensor) -> Tensors:
        if whole:
            return list(weft.all_reduce_residual_rms_norm(x, residual, weight, eps=1e-5))
        return list(weft.reduce_scatter_rms_norm_all_gather(x, weight, residual=residual, eps=1e-5))

    def oracle(i: int) -> Tensors:
        h = torch.stack(terms[i]).double().sum(0) + before
        y = torch.nn.functional.rms_norm(h, (H,), weight.double(), 1e-5)
        return [y, part(h)]

    inputs = [[each[place.rank], part(before)] for each in terms]
    return RankCall(inputs, op, oracle, TOLERANCE[torch.bfloat16])


def _attention_call(place: Place, *, name: str, engine: Engine = "triton") -> RankCall:
    """ring_attention in zigzag order and ulysses_attention, with their gradients."""
    if engine == "host" and torch.version.hip:
        raise ImpossibleError("on NVIDIA's chips only")
    W, zigzag = place.world_size, name == "ring_attention"
    H, H_kv, D, rows = (8, 2, 64, 96)
    if place.small:  # heads are exchanged for rows
        H, H_kv, D, rows = (2, 1, 16, 4) if zigzag else (W, W, 16, 4)
    S = W * rows
    sizes = zigzag_sizes(S, W) if zigzag else [rows] * W
    counts = (H, H_kv, H_kv, H)  # of queries, keys, values, and the output's gradient
    wholes = [
        [place.drawn(10 * i + j, 1, count, S, D) for j, count in enumerate(counts)]
        for i in range(SETS)
    ]

    def part(whole: torch.Tensor) -> torch.Tensor:
        whole = to_zigzag(whole, W, 2) if zigzag else whole
        parts: Sequence[torch.Tensor] = whole.split(sizes, 2)
        return parts[place.rank].contiguous()

    options: dict[str, Any] = {"layout": "zigzag"} if zigzag else {}
    attention = getattr(weft, name)

    def op(*given: torch.Tensor) -> Tensors:
        leaves = [x.detach().requires_grad_() for x in given[:3]]
        with weft.engine(engine):
            out = attention(*leaves, causal=True, sizes=sizes, **options)
            return [out.detach(), *torch.autograd.grad(out, leaves, given[3])]

    def oracle(i: int) -> Tensors:
        return [part(x) for x in causal_attention(*wholes[i])]

    inputs = [[part(x) for x in each] for each in wholes]
    return RankCall(inputs, op, oracle, 4e-2)


def _decode_call(place: Place, *, shard: str) -> RankCall:
    """append_to_cache of the last tokens, and flash_decode of them."""
    W = place.world_size
    B, H, H_kv, D, blocks, P = (2, 8, 8, 16, 1, 4) if place.small else (3, 16, 8, 64, 4, 16)
    T, S = 2, W * blocks * P
    wholes = [[place.drawn(10 * i + j, B, H_kv, S, D) for j in range(2)] for i in range(SETS)]
    queries = [place.drawn(10 * i + 5, B, H, T, D) for i in range(SETS)]
    lengths = torch.tensor([S, S // 2 + 1, 3][:B], dtype=torch.int32, device=place.device)
    by_head = shard == "head"
    where: dict[str, Any] = {"shard": shard} if by_head else {"block_size": P}
    last = lengths.long().view(B, 1, 1, 1) - T + torch.arange(T, device=place.device).view(T, 1)

    def cache(whole: torch.Tensor) -> torch.Tensor:
        """This rank's part, without the last tokens."""
        whole = whole.scatter(2, last.expand(B, H_kv, T, D), torch.nan)
        if by_head:
            return place.mine(whole, 1)
        mine: torch.Tensor = whole.unflatten(2, (blocks, W, P))[:, :, :, place.rank]
        return mine.flatten(2, 3).contiguous()

    def new(whole: torch.Tensor) -> torch.Tensor:
        return whole.gather(2, last.expand(B, H_kv, T, D))

    def op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *old: torch.Tensor) -> Tensors:
        keys, values = (x.clone() for x in old)
        weft.append_to_cache(k, v, keys, values, lengths, **where)
        return [weft.flash_decode(q, keys, values, lengths, **where)]

    def oracle(i: int) -> Tensors:
        found = []
        for b, length in enumerate(lengths.tolist()):
            k, v = (x[b : b + 1, :, :length] for x in wholes[i])
            before = queries[i].new_zeros(1, H, length - T, D)
            q = torch.cat([before, queries[i][b : b + 1]], 2)
            found.append(causal_attention(q, k, v)[0][:, :, -T:])
        return [torch.cat(found)]

    inputs = [
        [q, *map(new, both), *map(cache, both)] for q, both in zip(queries, wholes, strict=True)
    ]
    return RankCall(inputs, op, oracle, 4e-2)


def _experts_call(place: Place, *, quantize: Quantize | None = None, few: bool = False) -> RankCall:
    """A mixture of two experts a rank: dispatch with SwiGLU, combine, and their gradients."""
    W, T, K, N = place.world_size, 64 if few else 320, 256, 192
    if place.small:
        T, K, N = 5, 32, 24
    E, own = 2 * W, slice(2 * place.rank, 2 * place.rank + 2)
    ids = [place.drawn(700 + r, T, 2).abs().mul(8).long() % (E + 1) - 1 for r in range(W)]
    routing = ids[place.rank] if few else route(ids[place.rank], E)
    xs = [[place.drawn(10 * i + r, T, K) for r in range(W)] for i in range(SETS)]
    if quantize:  # rows that it leaves as they are
        for each in xs:
            made = [quantized(x, magnitudes(x)) for x in each]
            each[:] = [(rows.float() * scales).to(each[0].dtype) for rows, scales in made]
    gates = [place.drawn(800 + r, T, 2, dtype=torch.float32) for r in range(W)]
    gate, up = (place.drawn(900 + i, E, K, N) * K**-0.5 for i in (0, 1))
    down = place.drawn(902, E, N, K) * N**-0.5
    dys = [place.drawn(950 + r, T, K) for r in range(W)]

    def op(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> Tensors:
        leaves = [t.detach().requires_grad_() for t in (x, gates[place.rank], gate, up, down)]
        h, found = weft.dispatch_grouped_matmul(
            leaves[0], routing, leaves[2:4], activation="swiglu", quantize=quantize
        )
        y = weft.grouped_matmul_combine(h, leaves[4], leaves[1], found)
        return [y.detach(), *torch.autograd.grad(y, leaves, dys[place.rank])]

    def oracle(i: int) -> Tensors:
        leaves = [t.double().requires_grad_() for t in (*xs[i], *gates, gate, up, down)]
        *rest, wide_gate, wide_up, wide_down = leaves
        ys = []
        for x, weights, chosen in zip(rest[:W], rest[W:], ids, strict=True):
            h = torch.nn.functional.silu(x @ wide_gate) * (x @ wide_up)
            share = torch.nn.functional.one_hot(chosen + 1, E + 1)[:, :, 1:] * weights[:, :, None]
            ys.append(torch.einsum("ten,te->tn", (h @ wide_down).transpose(0, 1), share.sum(1)))
        grads = torch.autograd.grad(ys, leaves, [dy.double() for dy in dys])
        weights_own = [g[own] for g in grads[-3:]]
        mine = [ys[place.rank].detach(), grads[place.rank], grads[W + place.rank]]
        return [*mine, *weights_own]

    inputs = [[each[place.rank], gate[own], up[own], down[own]] for each in xs]
    return RankCall(inputs, op, oracle, 2 * TOLERANCE[torch.bfloat16])


def _collective_call(place: Place, *, name: str) -> RankCall:
    """Of small integers, whose sums are exact in any order."""
    W, each = place.world_size, 96 if place.small else 3000
    terms = [
        [(place.drawn(50 * i + r, W * each, 2) * 2).round() for r in range(W)] for i in range(SETS)
    ]

    # Else ranks would tell each other their lengths, and each captures a graph by itself.
    told: dict[str, Any] = {"sizes": [W * each] * W} if name == "all_gather" else {}

    def op(x: torch.Tensor) -> Tensors:
        return [getattr(collectives, name)(x, **told)]

    def oracle(i: int) -> Tensors:
        every = [x.double() for x in terms[i]]
        return {
            "all_reduce": lambda: [torch.stack(every).sum(0)],
            "reduce_scatter": lambda: [place.mine(torch.stack(every).sum(0))],
            "all_gather": lambda: [torch.cat(every)],
            "all_to_all": lambda: [torch.cat([place.mine(x) for x in every])],
        }[name]()

    return RankCall([[x[place.rank]] for x in terms], op, oracle, 0.0)


def _pull_call(place: Place) -> RankCall:
    """A sum of DTensors that is cut by columns: one pull from all peers."""
    W, rows = place.world_size, 16 if place.small else 256
    terms = [
        [(place.drawn(50 * i + r, rows, 16 * W) * 2).round() for r in range(W)] for i in range(SETS)
    ]
    mesh = DeviceMesh.from_group(resolve().pg, place.device.type)

    def op(x: torch.Tensor) -> Tensors:
        partial = DTensor.from_local(x, mesh, [Partial()], run_check=False)
        moved: Any = partial.redistribute(placements=[Shard(1)])
        return [moved.to_local()]

    def oracle(i: int) -> Tensors:
        return [place.mine(torch.stack(terms[i]).double().sum(0), 1)]

    return RankCall([[x[place.rank]] for x in terms], op, oracle, 0.0)


CALLS: dict[str, Callable[[Place], RankCall]] = {
    **{
        name: partial(_collective_call, name=name)
        for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    },
    "pull": _pull_call,
    "all_gather_matmul": _gather_call,
    "all_gather_matmul-few": partial(_gather_call, rows=4, K=512),
    "all_gather_matmul-swiglu": partial(_gather_call, kind="swiglu"),
    "all_gather_matmul-backward": partial(_gather_call, kind="backward"),
    "all_gather_matmul-fp32": partial(_gather_call, kind="fp32"),
    "all_gather_matmul-fp8": _gather_fp8_call,
    "matmul_reduce_scatter": partial(_sum_call, name="matmul_reduce_scatter"),
    "matmul_reduce_scatter-few": partial(_sum_call, name="matmul_reduce_scatter", rows=4),
    "matmul_reduce_scatter-backward": partial(
        _sum_call, name="matmul_reduce_scatter", backward=True
    ),
    "matmul_all_reduce": partial(_sum_call, name="matmul_all_reduce", rows=512),
    "matmul_all_reduce-few": partial(_sum_call, name="matmul_all_reduce", rows=4),
    "norm": _norm_call,
    "norm-signals": partial(_norm_call, rows=256),  # more than words that carry their flag are for
    "norm-whole": partial(_norm_call, rows=1, whole=True),
    "norm-whole-two-shots": partial(_norm_call, rows=64, whole=True),
    "experts": _experts_call,
    "experts-few": partial(_experts_call, few=True),
    "experts-few-fp8": partial(_experts_call, quantize="fp8", few=True),
    "experts-fp8": partial(_experts_call, quantize="fp8"),
    "ring_attention": partial(_attention_call, name="ring_attention"),
    "ring_attention-host": partial(_attention_call, name="ring_attention", engine="host"),
    "ulysses_attention": partial(_attention_call, name="ulysses_attention"),
    "decode": partial(_decode_call, shard="sequence"),
    "decode-by-head": partial(_decode_call, shard="head"),
    # Shards of 4 MiB, which the copy engines fetch on a GPU.
    "all_gather_matmul-engines": partial(_gather_call, rows=1024, K=2048, N=256),
}
WAYS = ("plain", "late", "graph", "streams", "mixed")
# What two streams run beside each other, and what is in no mixture: it takes much memory, or is not
# for every chip.
_BESIDE = {"all_gather_matmul": "all_reduce", "ring_attention": "matmul_reduce_scatter"}
_ALONE = ("all_gather_matmul-engines", "ring_attention-host")


def case_names(world_sizes: Sequence[int], ways: Sequence[str]) -> list[str]:
    """The names of the cases: ranks, way and call.

    Example:
        case_names([4], ["plain"]) begins with "W4/plain/all_reduce".
    """
    calls: dict[str, Sequence[str]] = {"streams": list(_BESIDE), "mixed": ["all"]}
    return [
        f"W{W}/{way}/{call}" for W in world_sizes for way in ways for call in calls.get(way, CALLS)
    ]


def parsed(name: str) -> tuple[int, str, str]:
    """The number of ranks, the way, and the call."""
    ranks, way, call = name.split("/")
    return int(ranks[1:]), way, call


def calls_of(name: str) -> list[str]:
    """The calls that a case is made of."""
    _, way, call = parsed(name)
    if way == "mixed":
        return [each for each in CALLS if each not in _ALONE]
    return [call, _BESIDE[call]] if way == "streams" else [call]


class WrongError(AssertionError):
    """A result is not what it must be."""


class ImpossibleError(Exception):
    """The case has no meaning on this device."""


def run_case_on_rank(name: str, place: Place) -> None:
    """Make the calls of a case on this rank, and compare their results.

    Raises:
        WrongError: a result is not what it must be.
        ImpossibleError: the case needs a GPU.
    """
    _, way, _ = parsed(name)
    if way in ("graph", "streams") and place.device.type == "cpu":
        raise ImpossibleError("of a GPU only")
    streams = place.world_size * (1 + copy_engines.STREAMS)
    if name.endswith("graph/all_gather_matmul-engines") and streams >= _QUEUES:
        raise ImpossibleError(
            f"{streams} streams of {place.world_size} ranks and one that captures need more than "
            f"the {_QUEUES} queues that a process has: a rank could wait behind another"
        )
    works = {call: CALLS[call](place) for call in calls_of(name)}
    # First: cuBLAS makes its handles, which may wait for all that runs.
    expected = {call: [work.oracle(i) for i in range(SETS)] for call, work in works.items()}
    _reserve(place)
    _meet(place)
    chance = random.Random(f"{name} {place.rank}")
    made: list[tuple[str, int, Tensors]] = []
    with weft.engine("triton"):
        for call, work in works.items():
            for i in range(1 if way != "plain" else 2 if place.small else SETS):
                made.append((call, i, work.op(*work.inputs[i])))
                _compare_and_forget(made, expected, works)
        _meet(place)
        run_way = {"late": _late, "mixed": _late, "graph": _graph, "streams": _streams}.get(way)
        if run_way is not None:
            made = run_way(name, works, place, chance)
            _meet(place)
            collectives.check_peers()  # a wait that failed says more than its results
            _compare_and_forget(made, expected, works)
    collectives.check_peers()


def _reserve(place: Place) -> None:
    """Have torch's allocator hold memory for this rank's stream: memory of the driver comes when
    nothing runs, and other ranks' kernels may run until this one has launched its own.
    """
    if place.device.type == "cuda":
        sizes = *(1 << 20 for _ in range(64)), 1 << 29  # small and large ones have pools apart
        _ = [torch.empty(size, dtype=torch.uint8, device=place.device) for size in sizes]


def make_once(name: str, place: Place) -> None:
    """Make the calls of a case, whatever comes of it: to have their kernels compiled."""
    with weft.engine("triton"):
        for call in calls_of(name):
            work = CALLS[call](place)
            work.op(*work.inputs[0])


def _late(
    name: str, works: dict[str, RankCall], place: Place, chance: random.Random
) -> list[tuple[str, int, Tensors]]:
    times = _IN_A_ROW // (3 if place.small else 1)
    order = [(call, i % SETS) for i in range(times) for call in works]
    random.Random(name).shuffle(order)  # the same on every rank
    made = []
    _here.late = lambda: _sleep_by_chance(place, chance)
    try:
        for call, i in order:
            _sleep_by_chance(place, chance)
            made.append((call, i, works[call].op(*works[call].inputs[i])))
    finally:
        del _here.late
    return made


_here = threading.local()


def be_late() -> None:
    """Before each launch of a rank: hold its stream for a random time, if it is to be late."""
    if late := getattr(_here, "late", None):
        late()


def _streams(
    name: str, works: dict[str, RankCall], place: Place, chance: random.Random
) -> list[tuple[str, int, Tensors]]:
    main = torch.cuda.current_stream()
    streams = {call: torch.cuda.Stream() for call in works}
    made = []
    for stream in streams.values():
        stream.wait_stream(main)
    for i in range(_IN_A_ROW):
        for call, stream in streams.items():
            with torch.cuda.stream(stream):
                _sleep_by_chance(place, chance)
                results = works[call].op(*works[call].inputs[i % SETS])
            for each in results:
                each.record_stream(main)
            made.append((call, i % SETS, results))
    for stream in streams.values():
        main.wait_stream(stream)
    return made


def _graph(
    name: str, works: dict[str, RankCall], place: Place, chance: random.Random
) -> list[tuple[str, int, Tensors]]:
    (call, work), *_ = works.items()
    given = [x.clone() for x in work.inputs[0]]
    graph, results = torch.cuda.CUDAGraph(), Tensors()
    for rank in range(place.world_size):
        # One after another: a capture refuses what other ranks may have to do meanwhile.
        if rank == place.rank:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                results = work.op(*given)
        _meet(place)
    # What is loaded at its first launch waits for all that runs: now, while nothing does.
    for x in (*given, *results):
        x.copy_(x.clone())
    torch.cuda._sleep(1)
    _meet(place)
    made = []
    for i in (*range(SETS), 0):
        for into, source in zip(given, work.inputs[i], strict=True):
            into.copy_(source)
        _sleep_by_chance(place, chance)
        graph.replay()
        made.append((call, i, [x.clone() for x in results]))
    return made


def _sleep_by_chance(place: Place, chance: random.Random) -> None:
    if place.device.type == "cuda" and chance.random() < 0.5:
        torch.cuda._sleep(chance.randrange(_LATEST_CYCLES))


def _meet(place: Place) -> None:
    """All ranks have come so far, and so have their streams."""
    if place.device.type == "cuda":
        torch.cuda.current_stream().synchronize()
    dist.barrier()


def _compare_and_forget(
    made: list[tuple[str, int, Tensors]],
    expected: dict[str, list[Tensors]],
    works: dict[str, RankCall],
) -> None:
    """Compare results and forget them."""
    for number, (call, i, got) in enumerate(made):
        off = deviation(got, expected[call][i])
        if not off <= works[call].tolerance:
            raise WrongError(
                f"{call}, call {number} (inputs {i}): {off:.3g} of the largest value away from "
                f"the oracle, where {works[call].tolerance:.1e} is allowed"
            )
    made.clear()
