"""The cases of `weft bench solo`: what each rank does, the oracle, and what a library takes for it.

Sizes are those of whole layers, of which each of W ranks has its part, as in `ops_suite` and
`attention_suite`. Tensors are made when they are asked for: only `learn` needs those of all ranks.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch.nn import functional

import weft
from weft import collectives
from weft.bench.blocks.causal import causal_attention, torch_attentions
from weft.bench.problem import Spec
from weft.collectives.ranks.group import alone
from weft.kernels import to_zigzag
from weft.kernels.matmul.all_gather import all_gather_matmul_reference
from weft.kernels.norm.rms_norm import reduce_scatter_rms_norm_all_gather_reference
from weft.sim.run.solo import SoloWorld

FP8 = torch.float8_e4m3fn
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, FP8: 2e-2}
_SUMS = ("matmul_reduce_scatter", "matmul_all_reduce")

Tensors = list[torch.Tensor]


@dataclass
class Workload:
    """A case on this device.

    Attributes:
        run: what a rank does.
        expected: what that returns on a rank, by the oracle.
        depth: as `SoloWorld.learn` takes it.
        prepare: what is to be done before `run` can be learned.
        flop, nbytes: a rank's multiply-adds, twice, and the bytes that it must receive.
        libraries: the arithmetic of a rank, or a copy of as many bytes, by the best that others
            offer, on local tensors.
        alone: the arithmetic of a rank by weft's kernel for a group of one.
    """

    run: Callable[[int], Any]
    expected: Callable[[int], Tensors]
    depth: int = 1
    prepare: Callable[[SoloWorld], None] = lambda world: None
    flop: float = 0.0
    nbytes: float = 0.0
    libraries: dict[str, Callable[[], Any]] = field(default_factory=dict)
    alone: Callable[[], Any] | None = None
    tolerance: float = TOLERANCE[torch.bfloat16]


class _Randoms:
    """Random tensors by name, rank and shape: the same whenever they are asked for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._made: dict[tuple[str, int, tuple[int, ...]], torch.Tensor] = {}

    def __call__(
        self, name: str, rank: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        key = name, rank, shape
        if key not in self._made:
            seed = zlib.crc32(f"{name} {rank}".encode())
            generator = torch.Generator(self.device).manual_seed(seed)
            scale = shape[-1] ** -0.5 if name == "w" else 1.0
            values = torch.randn(shape, generator=generator, device=self.device)
            self._made[key] = (values * scale).to(dtype)
        return self._made[key]


def cases(quick: bool, ranks: Sequence[int]) -> list[Spec]:
    """All cases, those that tell most first.

    Args:
        quick: tiny sizes, which the interpreter can do.
        ranks: numbers of ranks; the first has all cases, the second some, the others few.
    """
    found = []
    for number, W in enumerate(ranks):
        for op, params in _quick_sizes(W) if quick else _sizes(number):
            sizes = "x".join(str(v) for k, v in params.items() if isinstance(v, int))
            words = [str(v) for v in params.values() if isinstance(v, str)]
            name = " ".join([op, sizes, *words, f"{W} ranks"])
            found.append(Spec(name, {"op": op, **params, "ranks": W}))
    return found


def _sized_matmul(
    op: str, M: int, N: int, K: int, dtype: str, **more: str
) -> tuple[str, dict[str, Any]]:
    return op, {"M": M, "N": N, "K": K, "dtype": dtype, **more}


_Sized = Iterator[tuple[str, dict[str, Any]]]


def _quick_sizes(W: int) -> _Sized:
    for dtype in ("bfloat16", "float8_e4m3fn"):
        yield _sized_matmul("all_gather_matmul", 16 * W, 32 * W, 64, dtype)
        yield _sized_matmul("matmul_reduce_scatter", 16 * W, 32, 32 * W, dtype)
        yield _sized_matmul("matmul_all_reduce", 16 * W, 32, 32 * W, dtype)
    yield _sized_matmul("matmul_all_reduce", 4, 32, 32 * W, "bfloat16", epilogue="bias + residual")
    yield _sized_matmul("all_gather_matmul", 16 * W, 32 * W, 64, "bfloat16", epilogue="swiglu")
    yield _sized_matmul("weight gradient", 16 * W, 32 * W, 64, "bfloat16")
    for op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
        yield op, {"nbytes": 512 * W, "dtype": "bfloat16"}
    yield "norm", {"tokens": 2 * W, "H": 64, "dtype": "bfloat16"}
    for op in ("ring_attention", "ulysses_attention"):
        for step in ("forward", "backward"):
            yield op, _attention_sizes(8 * W, W, W, 16, step)
    yield "flash_decode", _cache(2, 8 * W, 2, 2, 16)
    yield "experts", _mixture(6, 32, 16, 2 * W, 2)


def _attention_sizes(tokens: int, H: int, H_kv: int, D: int, step: str) -> dict[str, Any]:
    sizes = {"tokens": tokens, "H": H, "H_kv": H_kv, "D": D}
    return {**sizes, "dtype": "bfloat16", "step": step}


def _cache(batch: int, tokens: int, H: int, H_kv: int, D: int) -> dict[str, Any]:
    sizes = {"batch": batch, "tokens": tokens, "H": H, "H_kv": H_kv, "D": D}
    return {**sizes, "dtype": "bfloat16"}


def _mixture(tokens: int, H: int, F: int, experts: int, top_k: int) -> dict[str, Any]:
    """Tokens are those of a rank, experts those of all."""
    sizes = {"tokens": tokens, "H": H, "F": F, "experts": experts, "top_k": top_k}
    return {**sizes, "dtype": "bfloat16"}


# Linears of a 70B Llama, as (N, K).
_UP, _DOWN, _QKV, _OUT = (57344, 8192), (8192, 28672), (10240, 8192), (8192, 8192)


def _sizes(number: int) -> _Sized:
    """Of the `number`-th of several numbers of ranks."""
    dtypes = ("bfloat16", "float8_e4m3fn")
    for M, dtype in product((8192, 2048) if number == 0 else (8192,), dtypes[: max(1, 2 - number)]):
        yield _sized_matmul("all_gather_matmul", M, *_UP, dtype)
        yield _sized_matmul("matmul_reduce_scatter", M, *_DOWN, dtype)
        yield _sized_matmul("matmul_all_reduce", M, *_DOWN, dtype)
    if number > 1:
        return
    for op, step in product(("ring_attention", "ulysses_attention"), ("forward", "backward")):
        yield op, _attention_sizes(16384, 32, 8, 128, step)
    for tokens in (8, 128) if number == 0 else (8,):
        yield "norm", {"tokens": tokens, "H": 8192, "dtype": "bfloat16"}
        yield _sized_matmul("matmul_all_reduce", tokens, *_DOWN, "bfloat16")
    yield "flash_decode", _cache(16, 32768, 64, 8, 128)
    for tokens in (64, 1024) if number == 0 else (64,):  # DeepSeek V3's
        yield "experts", _mixture(tokens, 7168, 2048, 256, 8)
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        for nbytes in (16 << 10, 1 << 20, 16 << 20) if number == 0 else (1 << 20,):
            yield op, {"nbytes": nbytes, "dtype": "bfloat16"}
    if number > 0:
        return
    yield _sized_matmul("all_gather_matmul", 2048, *_UP, "bfloat16", epilogue="swiglu")
    yield _sized_matmul(
        "matmul_reduce_scatter", 2048, *_DOWN, "bfloat16", epilogue="bias + residual"
    )
    yield _sized_matmul("matmul_all_reduce", 8, *_DOWN, "bfloat16", epilogue="bias + residual")
    yield _sized_matmul("weight gradient", 8192, *_UP, "bfloat16")
    for M, dtype in product((8192, 128, 16), dtypes):
        yield _sized_matmul("all_gather_matmul", M, *_QKV, dtype)
        yield _sized_matmul("matmul_reduce_scatter", M, *_OUT, dtype)
        yield _sized_matmul("matmul_all_reduce", M, *_OUT, dtype)
    for M in (128, 16, 1):
        yield _sized_matmul("matmul_all_reduce", M, *_DOWN, "float8_e4m3fn")
    for op, step in product(("ring_attention", "ulysses_attention"), ("forward", "backward")):
        yield op, _attention_sizes(4096, 32, 8, 128, step)
    yield "flash_decode", _cache(1, 131072, 64, 8, 128)
    yield "flash_decode", _cache(128, 4096, 64, 8, 128)


_KINDS = (
    "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "norm", "ring_attention",
    "ulysses_attention", "flash_decode", "all_reduce",
)  # fmt: skip


def of_each_kind(specs: Sequence[Spec]) -> list[Spec]:
    """The first case of each kind of kernel."""
    first: dict[str, Spec] = {}
    for spec in specs:
        first.setdefault(spec.params["op"], spec)
    return [first[op] for op in _KINDS if op in first]


def workload_of(spec: Spec, rank: int, device: torch.device) -> Workload:
    """The case of `spec`, to be measured as `rank`."""
    params, randoms = spec.params, _Randoms(device)
    op, W = params["op"], params["ranks"]
    if op == "all_gather_matmul":
        return _gather_workload(params, W, rank, randoms)
    if op in _SUMS:
        return _sum_workload(params, W, rank, randoms)
    if op == "weight gradient":
        return _weight_gradient_workload(params, W, rank, randoms)
    if op == "norm":
        return _norm_workload(params, W, rank, randoms)
    if op in ("ring_attention", "ulysses_attention"):
        return _attention_workload(params, W, rank, randoms)
    if op == "flash_decode":
        return _decode_workload(params, W, rank, randoms)
    if op == "experts":
        return _experts_workload(params, W, randoms)
    return _collective_workload(params, W, rank, randoms)


def _case_dtype(params: dict[str, Any]) -> torch.dtype:
    found: torch.dtype = getattr(torch, params["dtype"])
    return found


def _library_matmuls(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> dict[str, Any]:
    """The library's x @ w, by name."""
    if x.dtype != FP8:
        out = x.new_empty(x.shape[0], w.shape[1])
        return {"cuBLAS": lambda: torch.mm(x, w, out=out)}
    # Rows of at least 16 bytes, and columns that are contiguous, as its kernels want them.
    scaled = partial(torch._scaled_mm, x, w, scale, scale, out_dtype=torch.bfloat16)
    return {"cuBLAS": scaled, "cuBLAS, fast sums": partial(scaled, use_fast_accum=True)}


def _scales(dtype: torch.dtype, scale: torch.Tensor) -> dict[str, Any]:
    return {"scale_a": scale, "scale_b": scale} if dtype == FP8 else {}


def _gather_workload(params: dict[str, Any], W: int, rank: int, randoms: _Randoms) -> Workload:
    M, N, K, dtype = params["M"], params["N"] // W, params["K"], _case_dtype(params)
    pair = params.get("epilogue") == "swiglu"
    scale = torch.full((), 0.5, device=randoms.device)
    scaled = _scales(dtype, scale)

    @cache
    def x(r: int) -> torch.Tensor:
        return randoms("x", r, (M // W, K), dtype)

    @cache
    def w(r: int) -> torch.Tensor:
        return randoms("w", r, (N, K), dtype).t()

    def op(x: torch.Tensor, w: torch.Tensor, **more: Any) -> Any:
        if pair:
            halves = [half.t() for half in w.t().chunk(2)]
            return weft.all_gather_matmul(x, halves, activation="swiglu", **more)
        return weft.all_gather_matmul(x, w, **scaled, **more)

    def expected(r: int) -> Tensors:
        factor = 0.25 if scaled else 1.0
        y = all_gather_matmul_reference([x(i).double() for i in range(W)], w(r).double()) * factor
        if pair:
            gate, up = y.chunk(2, 1)
            y = functional.silu(gate) * up
        return [y]

    whole = torch.cat([x(r) for r in range(W)])
    return Workload(
        lambda r: op(x(r), w(r)),
        expected,
        flop=2 * M * N * K,
        nbytes=(M - M // W) * K * dtype.itemsize,
        libraries=_library_matmuls(whole, w(rank), scale),
        alone=lambda: op(whole, w(rank), group=alone()),
        tolerance=TOLERANCE[dtype],
    )


def _sum_workload(params: dict[str, Any], W: int, rank: int, randoms: _Randoms) -> Workload:
    M, N, K, dtype = params["M"], params["N"], params["K"] // W, _case_dtype(params)
    scale = torch.full((), 0.5, device=randoms.device)
    scatters = params["op"] == "matmul_reduce_scatter"
    fused = getattr(weft, params["op"])
    rows = M // W if scatters else M
    scaled = _scales(dtype, scale)
    out_dtype = torch.bfloat16 if scaled else dtype

    @cache
    def x(r: int) -> torch.Tensor:
        return randoms("x", r, (M, K), dtype)

    @cache
    def w(r: int) -> torch.Tensor:
        return randoms("w", r, (N, K), dtype).t()

    @cache
    def more(r: int, rows: int) -> dict[str, Any]:
        if "epilogue" not in params:
            return {}
        which = r if scatters else 0
        return {
            "bias": randoms("bias", 0, (N,), out_dtype),
            "residual": randoms("residual", which, (rows, N), out_dtype),
        }

    def expected(r: int) -> Tensors:
        y = sum(x(i).double() @ w(i).double() for i in range(W)) * (0.25 if scaled else 1.0)
        assert isinstance(y, torch.Tensor)
        if scatters:
            y = y.chunk(W)[r]
        for term in more(r, rows).values():
            y = y + term
        return [y]

    sent = M * N * (W - 1) // W * 4
    return Workload(
        lambda r: fused(x(r), w(r), **scaled, **more(r, rows)),
        expected,
        depth=1 if scatters else 2,
        flop=2 * M * N * K,
        nbytes=sent if scatters else 2 * sent,
        libraries=_library_matmuls(x(rank), w(rank), scale),
        alone=lambda: fused(x(rank), w(rank), alone(), **scaled, **more(rank, M)),
        tolerance=TOLERANCE[dtype],
    )


def _weight_gradient_workload(
    params: dict[str, Any], W: int, rank: int, randoms: _Randoms
) -> Workload:
    """Of all_gather_matmul: gathered(x)^T @ dy, the gather behind the arithmetic."""
    M, N, K, dtype = params["M"], params["N"] // W, params["K"], _case_dtype(params)
    ys: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @cache
    def x(r: int) -> torch.Tensor:
        return randoms("x", r, (M // W, K), dtype)

    def dy(r: int) -> torch.Tensor:
        return randoms("dy", r, (M, N), dtype)

    def forward(r: int) -> None:
        w = randoms("w", r, (N, K), dtype).t().requires_grad_()
        ys[r] = weft.all_gather_matmul(x(r), w), w

    def run(r: int) -> torch.Tensor:
        y, w = ys[r]
        (dw,) = torch.autograd.grad(y, w, dy(r), retain_graph=True)
        return dw

    whole = torch.cat([x(r) for r in range(W)]).t()
    return Workload(
        run,
        lambda r: [whole.double() @ dy(r).double()],
        prepare=lambda world: world.learn(forward, depth=1),
        flop=2 * M * N * K,
        nbytes=(M - M // W) * K * dtype.itemsize,
        libraries={"cuBLAS": lambda: torch.mm(whole, dy(rank))},
    )


def _collective_workload(params: dict[str, Any], W: int, rank: int, randoms: _Randoms) -> Workload:
    """`nbytes`: of the gathered, or of the whole input."""
    op, dtype = params["op"], _case_dtype(params)
    count = params["nbytes"] // dtype.itemsize // W * W
    share = count // W

    @cache
    def x(r: int) -> torch.Tensor:
        return randoms("x", r, (share if op == "all_gather" else count,), dtype)

    def expected(r: int) -> Tensors:
        xs = [x(i).double() for i in range(W)]
        if op == "all_gather":
            return [torch.cat(xs)]
        if op == "all_to_all":
            return [torch.cat([each.chunk(W)[r] for each in xs])]
        total = torch.stack(xs).sum(0)
        return [total if op == "all_reduce" else total.chunk(W)[r]]

    source = randoms("source", 0, (count,), dtype)
    target = torch.empty_like(source)
    call = getattr(collectives, op)
    return Workload(
        lambda r: call(x(r)),
        expected,
        depth=2 if op == "all_reduce" else 1,
        nbytes=(W - 1) * share * dtype.itemsize * (2 if op == "all_reduce" else 1),
        libraries={"copy": lambda: target.copy_(source)},
    )


def _experts_workload(params: dict[str, Any], W: int, randoms: _Randoms) -> Workload:
    """Tokens to experts with SwiGLU, and results back."""
    T, H, F, E, k = (params[name] for name in ("tokens", "H", "F", "experts", "top_k"))
    dtype, own = _case_dtype(params), E // W

    def x(r: int) -> torch.Tensor:
        return randoms("x", r, (T, H), dtype)

    def ids(r: int) -> torch.Tensor:
        """Any k of all, each token's its own."""
        return randoms("scores", r, (T, E), torch.float32).topk(k)[1].int()

    @cache
    def weights(r: int) -> Tensors:
        """Gate, up (E / W, H, F) and down (E / W, F, H), as nn.Linear lays them out."""
        return [
            randoms("w", 3 * r + i, (own, *shape), dtype).transpose(1, 2)
            for i, shape in enumerate([(F, H), (F, H), (H, F)])
        ]

    shares = torch.full((T, k), 1 / k, device=randoms.device)
    chosen = [ids(r) for r in range(W)]

    def run(r: int) -> torch.Tensor:
        gate, up, down = weights(r)
        h, routing = weft.dispatch_grouped_matmul(
            x(r), chosen[r], (gate, up), activation="swiglu", sizes=[T] * W
        )
        return weft.grouped_matmul_combine(h, down, shares, routing)

    def expected(r: int) -> Tensors:
        y = x(r).new_zeros(T, H, dtype=torch.float64)
        for expert in range(E):
            gate, up, down = (w[expert % own].double() for w in weights(expert // own))
            tokens = (chosen[r] == expert).any(1).nonzero().flatten()
            rows = x(r)[tokens].double()
            y[tokens] += (functional.silu(rows @ gate) * (rows @ up)) @ down / k
        return [y]

    nbytes = T * k * (W - 1) // W * H * dtype.itemsize
    # Of counts, rows and results each follows from the one before.
    return Workload(run, expected, depth=3, flop=6 * T * k * H * F, nbytes=2 * nbytes)


def _norm_workload(params: dict[str, Any], W: int, rank: int, randoms: _Randoms) -> Workload:
    tokens, H, dtype = params["tokens"], params["H"], _case_dtype(params)
    weight = randoms("weight", 0, (H,), dtype)

    @cache
    def x(r: int) -> torch.Tensor:
        return randoms("x", r, (tokens, H), dtype)

    @cache
    def residual(r: int) -> torch.Tensor:
        return randoms("residual", r, (tokens // W, H), dtype)

    whole = torch.cat([residual(r) for r in range(W)])

    def run(r: int) -> Any:
        if params.get("which") == "whole":
            return weft.all_reduce_residual_rms_norm(x(r), whole, weight)
        op = weft.reduce_scatter_rms_norm_all_gather
        return op(x(r), weight, residual=residual(r), eps=1e-6)

    def expected(r: int) -> Tensors:
        y, hs = reduce_scatter_rms_norm_all_gather_reference(
            [x(i).double() for i in range(W)],
            weight.double(),
            [residual(i).double() for i in range(W)],
            1e-6,
        )
        return [y, torch.cat(hs) if params.get("which") == "whole" else hs[r]]

    return Workload(
        run,
        expected,
        depth=2,
        nbytes=2 * (W - 1) * tokens // W * H * dtype.itemsize,
        libraries={
            "torch": lambda: functional.rms_norm(x(rank) + whole, (H,), weight, 1e-6),
        },
    )


def _attention_workload(params: dict[str, Any], W: int, rank: int, randoms: _Randoms) -> Workload:
    """Causal; the ring's sequence is in zigzag order. A rank's work is that of H / W heads."""
    S, H, H_kv, D = (params[name] for name in ("tokens", "H", "H_kv", "D"))
    ring, backward = params["op"] == "ring_attention", params["step"] == "backward"
    dtype, forward_depth = _case_dtype(params), 1 if ring else 2
    outs: dict[int, tuple[torch.Tensor, ...]] = {}

    def whole(name: str) -> torch.Tensor:
        heads = H if name in ("q", "dout") else H_kv
        return randoms(name, 0, (1, heads, S, D), dtype)

    def shard(x: torch.Tensor, r: int) -> torch.Tensor:
        return (to_zigzag(x, W, 2) if ring else x).chunk(W, 2)[r].contiguous()

    @cache
    def operands(r: int) -> Tensors:
        return [shard(whole(name), r) for name in ("q", "k", "v", "dout")]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> torch.Tensor:
        out: torch.Tensor
        if ring:
            out = weft.ring_attention(q, k, v, causal=True, layout="zigzag", **more)
        else:
            out = weft.ulysses_attention(q, k, v, causal=True, **more)
        return out

    def kept(r: int) -> None:
        q, k, v = (x.detach().requires_grad_() for x in operands(r)[:3])
        outs[r] = attend(q, k, v), q, k, v

    def run(r: int) -> Any:
        if not backward:
            return attend(*operands(r)[:3])
        out, *inputs = outs[r]
        return torch.autograd.grad(out, inputs, operands(r)[3], retain_graph=True)

    def prepare(world: SoloWorld) -> None:
        if backward:
            world.learn(kept, forward_depth)

    def expected(r: int) -> Tensors:
        dout = whole("dout") if backward else None
        made = causal_attention(whole("q"), whole("k"), whole("v"), dout)
        return [shard(x, r) for x in made[1:] if backward] or [shard(made[0], r)]

    heads, kv_heads = H // W, max(1, H_kv // W)
    local = [
        x[:, :n].contiguous().requires_grad_(backward)
        for x, n in zip(map(whole, ("q", "k", "v")), (heads, kv_heads, kv_heads), strict=True)
    ]
    # Not all of the library's kernels take several query heads for one of keys.
    repeated = [local[0]] + [
        x.detach().repeat_interleave(heads // kv_heads, 1).requires_grad_(backward)
        for x in local[1:]
    ]
    dout = whole("dout")[:, :heads].contiguous()

    def step(forward: Callable[..., torch.Tensor], local: Tensors) -> Callable[[], Any]:
        if not backward:
            return lambda: forward(*local)
        made: Tensors = []

        def gradients() -> Any:
            if not made:
                made.append(forward(*local))
            return torch.autograd.grad(made[0], local, dout, retain_graph=True)

        return gradients

    flop = 4 * S * S / 2 * D * heads * (2.5 if backward else 1.0)
    moved = S - S // W
    one = partial(weft.ring_attention, group=alone(), causal=True)
    libraries = torch_attentions(randoms.device)
    return Workload(
        run,
        expected,
        depth=2 if backward else forward_depth,
        prepare=prepare,
        flop=flop,
        nbytes=2 * moved * D * dtype.itemsize * (H_kv if ring else (H + H_kv) // W),
        libraries={name: step(way, repeated) for name, way in libraries.items()},
        alone=step(one, local),
    )


def _decode_workload(params: dict[str, Any], W: int, rank: int, randoms: _Randoms) -> Workload:
    """A new token of each sequence to `tokens` before it, which lie on the ranks in blocks."""
    B, S, H, H_kv, D = (params[name] for name in ("batch", "tokens", "H", "H_kv", "D"))
    dtype = _case_dtype(params)
    lengths = torch.full((B,), S, device=randoms.device)
    q = randoms("q", 0, (B, H, 1, D), dtype)

    @cache
    def held(name: str, r: int) -> torch.Tensor:
        return randoms(name, r, (B, H_kv, S // W, D), dtype)

    def run(r: int) -> torch.Tensor:
        out: torch.Tensor = weft.flash_decode(q, held("k", r), held("v", r), lengths)
        return out

    def expected(r: int) -> Tensors:
        outs = []
        for b in range(B):  # all of them would not fit in float64
            k, v = (
                torch.cat([held(name, i)[b] for i in range(W)], 1).double() for name in ("k", "v")
            )
            queries = q[b].double().view(H_kv, H // H_kv, D)
            weights = (queries @ k.mT / math.sqrt(D)).softmax(-1)
            outs.append((weights @ v).view(H, 1, D))
        return [torch.stack(outs)]

    def library() -> torch.Tensor:
        call = functional.scaled_dot_product_attention
        return call(q, held("k", rank), held("v", rank), enable_gqa=True)

    return Workload(
        run,
        expected,
        flop=4 * B * H * S // W * D,
        nbytes=4 * B * H * (D + 1) * (W - 1),
        libraries={"SDPA": library},
    )
