"""Each fused op on every engine, beside torch's own and collective + matmul, over a grid of sizes.

A shape M, N, K is that of the whole linear layer: M tokens, K features in, N features out. W ranks
share it:

    all_gather_matmul        x (M/W, K)  w (K, N/W)  ->  (M, N/W)
    matmul_reduce_scatter    x (M, K/W)  w (K/W, N)  ->  (M/W, N)
    matmul_all_reduce        x (M, K/W)  w (K/W, N)  ->  (M, N)

Weights are laid out as nn.Linear's are, inputs normally distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

import weft
from weft.bench import bounds
from weft.bench.problem import INPUTS, Call, Options, Prepared, Spec
from weft.bench.rows import Case, Ratio
from weft.bench.shapes import Model, sized
from weft.collectives import chunk_sizes, resolve
from weft.collectives.ranks.group import Group
from weft.kernels.engine import engines, tuning
from weft.kernels.engine.chips import Chip, tiling_for
from weft.kernels.engine.local_matmul import mm
from weft.kernels.engine.tuning import OPS
from weft.kernels.matmul import all_gather_launch

NAME = "ops"
WORLD: Literal["ranks", "one"] = "ranks"
SIZES = ("M", "N", "K")

ENGINES = ("auto", "host", "generic", "triton")
PEERS = ("torch symm_mem", "collective + matmul")
# The speed-up map: every M with every N, at one K.
_GRIDS = {
    "quick": ((16, 1024), (64, 512), 256),
    "cpu": ((16, 64, 256, 1024, 4096), (256, 1024, 4096), 1024),
    "full": ((16, 128, 1024, 4096, 16384), (2048, 8192, 28672), 8192),
}


def cases(options: Options) -> list[Spec]:
    """Every op on every shape."""
    shapes: list[tuple[str, tuple[int, ...], Sequence[str]]] = []
    for entry in options.shapes or _default(options):
        if isinstance(entry, Model):
            shapes += _linears_of_model(entry, options)
        else:
            shapes.append(("", sized(entry, SIZES, NAME), OPS))
    return [
        Spec(
            f"{op} {M}x{N}x{K}" + (f" ({label})" if label else ""),
            {"op": op, "M": M, "N": N, "K": K, "dtype": options.dtype_name},
        )
        for op in OPS
        for label, (M, N, K), ops in shapes
        if op in ops
    ]


def _default(options: Options) -> list[tuple[int, int, int]]:
    large = options.device == "cuda" or options.full_size
    rows, columns, K = _GRIDS["quick" if options.quick else "full" if large else "cpu"]
    return [(M, N, K) for M in rows for N in columns]


def _linears_of_model(
    model: Model, options: Options
) -> list[tuple[str, tuple[int, ...], Sequence[str]]]:
    """The linears of a decoder layer, with the ops they become under tensor parallelism."""
    sizes, tokens = model.for_run(options)
    heads, ups = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim, 2 * sizes.ffn
    column, row = ("all_gather_matmul",), ("matmul_reduce_scatter", "matmul_all_reduce")
    return [
        (f"{model.name} qkv", (tokens, heads, sizes.hidden), column),
        (f"{model.name} out", (tokens, sizes.hidden, sizes.heads * sizes.head_dim), row),
        (f"{model.name} gate+up", (tokens, ups, sizes.hidden), column),
        (f"{model.name} down", (tokens, sizes.hidden, sizes.ffn), row),
    ]


TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}

Matmul = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Drawn = Callable[..., torch.Tensor]  # normally distributed, of the sizes that it is given


@dataclass
class _DrawnProblem:
    """What one rank has and must do.

    Attributes:
        x, w: this rank's; w (N, K), as nn.Linear's weight.
        local: all rows that the rank multiplies, as if they had been gathered.
        moved_bytes: what it must receive.
        plain: the op by the process group and torch; None where that takes equal shards only.
    """

    x: torch.Tensor
    w: torch.Tensor
    local: torch.Tensor
    expected: Callable[[], torch.Tensor]
    moved_bytes: int
    ours: Matmul
    symm_mem: Matmul
    plain: Matmul | None


def launches_of(
    params: Mapping[str, Any], dtype: torch.dtype, W: int, chip: Chip
) -> tuple[tuning.Key, list[tuning.Choice]]:
    """How tables know a case, and the launches that a search tries for it."""
    op, M, N, K = (params[name] for name in ("op", *SIZES))
    gathers = op == "all_gather_matmul"
    columns = chunk_sizes(N, W)[0] if gathers else N
    shape = M, columns, K if gathers else 0, dtype, W
    copies = gathers and all_gather_launch.all_gather_config(*shape, chip).copy_programs > 0
    start = tiling_for(chip, M, columns, dtype)
    return tuning.key_of(op, *shape), tuning.candidates(chip, dtype, start, copies=copies)


def prepare(spec: Spec, options: Options) -> Prepared:
    """One op on one shape, on this rank."""
    group, device = resolve(None), torch.device(options.device)
    build: Callable[..., _DrawnProblem] = {
        "all_gather_matmul": _all_gather_problem,
        "matmul_reduce_scatter": _reduce_scatter_problem,
        "matmul_all_reduce": _all_reduce_problem,
    }[spec.params["op"]]
    sizes = (spec.params[name] for name in SIZES)
    generator = torch.Generator(device).manual_seed(0)  # the same on every rank

    def drawn(*shape: int) -> torch.Tensor:
        values = torch.randn(*shape, generator=generator, device=device)
        return values.to(options.dtype)

    problem = build(group, *sizes, drawn)
    xs, ws = _rotated(problem.x), [w.t() for w in _rotated(problem.w)]

    def on(engine: Any) -> Call:
        def call(i: int) -> torch.Tensor:
            with weft.engine(engine):
                return problem.ours(xs[i], ws[i])

        return call

    absent = {}
    offered = [name for name in ENGINES if not options.engines or name in options.engines]
    if device.type == "cpu" and not options.engines:
        offered.remove("triton")
        absent["triton"] = "interpreted on a CPU, for tests; --engines triton times it"
    variants = {name: on(name) for name in offered}
    symm_mem, plain = problem.symm_mem, problem.plain
    if not options.engines or "peers" in options.engines:
        if options.gpus_shared:
            # Its waits know no time-out: a hang would cost the whole run.
            absent[PEERS[0]] = "ranks share a GPU, which torch's ops are not made for"
        else:
            variants[PEERS[0]] = lambda i: symm_mem(xs[i], ws[i])
        if plain is None:
            absent[PEERS[1]] = "the process group takes equal shards only"
        else:
            variants[PEERS[1]] = lambda i: plain(xs[i], ws[i])

    spec.params["prices"] = _prices(spec.params["op"], problem, group, device)
    touched = problem.local.numel() + problem.w.numel() + len(problem.local) * len(problem.w)
    least: dict[str, Call] = {
        "arithmetic": lambda i: mm(problem.local, ws[i]),
        "memory": bounds.touching(touched * options.dtype.itemsize, device),
    }
    if not group.unreached(device):
        least["link"] = bounds.read_from_peers(problem.moved_bytes, group, device)
    return Prepared(
        variants,
        least,
        expected=lambda: [problem.expected()],
        tolerance=TOLERANCE[options.dtype],
        main=next(iter(variants), ""),
        peer=PEERS[1] if PEERS[1] in variants else "",
        absent=absent,
    )


def _prices(op: str, problem: _DrawnProblem, group: Group, device: torch.device) -> dict[str, Any]:
    """What the cost model expects of each engine, as plain values."""
    (M, K), N, dtype = problem.local.shape, len(problem.w), problem.local.dtype
    call = engines.Problem(op, M, N, K, dtype, problem.moved_bytes)
    prices = engines.predict(call, group, device)
    return {str(name): asdict(price) for name, price in prices.items()}


def _rotated(first: torch.Tensor) -> list[torch.Tensor]:
    """`first`, and as many more of its shape as inputs are rotated."""
    return [first, *(torch.randn_like(first) for _ in range(INPUTS - 1))]


def _all_gather_problem(group: Group, M: int, N: int, K: int, drawn: Drawn) -> _DrawnProblem:
    import torch.distributed._symmetric_memory  # registers torch.ops.symm_mem

    rows, columns = chunk_sizes(M, group.world_size), chunk_sizes(N, group.world_size)
    x_whole, w_whole = drawn(M, K), drawn(N, K)  # as nn.Linear's weight
    x = x_whole.split(rows)[group.rank].clone()
    w = w_whole.split(columns)[group.rank].clone()
    gathered = torch.empty_like(x_whole)

    def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        dist.all_gather_into_tensor(gathered, x)
        return gathered @ w

    def symm_mem(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        op = torch.ops.symm_mem.fused_all_gather_matmul
        y: torch.Tensor = op(x, [w], 0, group.pg.group_name, return_A=False)[1][0]
        return y

    return _DrawnProblem(
        x,
        w,
        x_whole,
        lambda: x_whole.double() @ w.double().t(),
        (M - rows[group.rank]) * K * x.element_size(),
        lambda x, w: weft.all_gather_matmul(x, w, sizes=rows),
        symm_mem,
        plain if len(set(rows)) == 1 else None,
    )


def _cut_columns(
    group: Group, M: int, N: int, K: int, drawn: Drawn
) -> tuple[torch.Tensor, torch.Tensor, Callable[[], torch.Tensor]]:
    """This rank's columns of x, the weight's columns that go with them, and all of x @ w^T."""
    shares = chunk_sizes(K, group.world_size)
    x_whole, w_whole = drawn(M, K), drawn(N, K)
    x, w = (each.split(shares, 1)[group.rank].clone() for each in (x_whole, w_whole))
    return x, w, lambda: x_whole.double() @ w_whole.double().t()


def _reduce_scatter_problem(group: Group, M: int, N: int, K: int, drawn: Drawn) -> _DrawnProblem:
    import torch.distributed._symmetric_memory  # registers torch.ops.symm_mem

    x, w, whole = _cut_columns(group, M, N, K, drawn)
    rows = chunk_sizes(M, group.world_size)
    out = x.new_empty(rows[group.rank], N)

    def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        dist.reduce_scatter_tensor(out, x @ w)
        return out

    def symm_mem(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        op = torch.ops.symm_mem.fused_matmul_reduce_scatter
        y: torch.Tensor = op(x, w, "sum", 0, group.pg.group_name)
        return y

    return _DrawnProblem(
        x,
        w,
        x,
        lambda: whole().split(rows)[group.rank],
        (group.world_size - 1) * out.numel() * x.element_size(),
        weft.matmul_reduce_scatter,
        symm_mem,
        plain if len(set(rows)) == 1 else None,
    )


def _all_reduce_problem(group: Group, M: int, N: int, K: int, drawn: Drawn) -> _DrawnProblem:
    import torch.distributed._symmetric_memory as memory  # registers torch.ops.symm_mem

    x, w, whole = _cut_columns(group, M, N, K, drawn)
    shown = x.new_empty(0)

    def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        dist.all_reduce(y)
        return y

    def symm_mem(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        nonlocal shown
        if shown.numel() == 0:
            shown = memory.empty(M, N, dtype=x.dtype, device=x.device)
            memory.rendezvous(shown, group.pg.group_name)
        torch.mm(x, w, out=shown)
        op = torch.ops.symm_mem.two_shot_all_reduce_
        y: torch.Tensor = op(shown, "sum", group.pg.group_name)
        return y

    W = group.world_size
    return _DrawnProblem(
        x,
        w,
        x,
        whole,
        2 * (W - 1) * M * N // W * x.element_size(),
        weft.matmul_all_reduce,
        symm_mem,
        plain,
    )


# What the cost model's choice is held to: this close to the best engine, this often, never worse.
CLOSE, OFTEN, WORST = 1.05, 0.95, 1.15


@dataclass(frozen=True)
class Verdict:
    """How well `auto` chose. A case counts as behind where its rounds prove it (95 %)."""

    behind: list[tuple[str, Ratio]]  # each case's time by `auto` / by the best engine

    @property
    def close(self) -> int:
        return sum(ratio.low <= CLOSE for _, ratio in self.behind)

    @property
    def holds(self) -> bool:
        often = self.close >= OFTEN * len(self.behind)
        return often and all(ratio.low <= WORST for _, ratio in self.behind)

    def __str__(self) -> str:
        if not self.behind:
            return "auto: no case has two engines to choose from"
        count, said = len(self.behind), "holds" if self.holds else "DOES NOT HOLD"
        name, worst = max(self.behind, key=lambda pair: pair[1].low)
        text = (
            f"auto's choice: no more than 5 % behind the best engine in {self.close} of {count} "
            f"cases; wanted in 95 %, and never over 15 %: {said}."
        )
        bad = [name for name, ratio in self.behind if ratio.low > CLOSE]
        if bad:
            text += f" Behind, as the rounds prove: {', '.join(bad)}; furthest {name}, by "
            text += f"{worst.low - 1:.0%} at least."
        noisy = sum(ratio.low <= CLOSE < ratio.median for _, ratio in self.behind)
        if noisy:
            text += f" Noise hides the answer in {noisy}, which count as not behind."
        return text


def engines_verdict(cases: Sequence[Case]) -> Verdict:
    """`auto` against the best of the engines that were forced, over a suite's cases."""
    behind = []
    for case in cases:
        forced = {name: t for name, t in case.timed.items() if name in ENGINES[1:]}
        if len(forced) < 2 or "auto" not in case.timed:
            continue
        best = min(forced, key=lambda name: forced[name].us)
        ratio = case.ratio("auto", best)
        assert ratio is not None
        behind.append((case.name, ratio))
    return Verdict(behind)
