"""The fused matmuls as custom ops, under our names and torch's own.

    torch.ops.weft.all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce
        the public functions, given the name of a group; traced calls of those come here
    torch.ops.weft.all_gather_matmul_backward, matmul_reduce_scatter_backward
        the gradients that communicate, computed by the engines' own backward
    torch.ops.weft.fused_all_gather_matmul, fused_matmul_reduce_scatter
        with the arguments and results of those of torch.ops.symm_mem

`weft.collectives.custom_ops` registers ops, fake kernels and gradients. An op chooses its engine
when it runs, by the rule of the public function that it calls.

To add an argument to a fused matmul: elementwise work on the result (activation, residual) is left
to plain torch where the public function asks `is_call_traced`, and the compiler fuses it, forward
and backward. Any other argument is added there, to the op's schema (at the end, with a default), to
its `run`, which passes it on to the public function, and to its fake kernel if the shape or dtype
of the result depends on it; if gradients do, also to `setup` and the backward op.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.collectives import all_gather, resolve
from weft.collectives.custom_ops import (
    compose,
    define,
    differentiate,
    gathered_sizes,
    needed,
    needed_fake,
    planes,
    planes_of,
    resized,
    spread,
    world_of,
)
from weft.collectives.ranks.chunks import chunk_sizes
from weft.collectives.sizes import even_sizes
from weft.kernels.engine.engines import choose
from weft.kernels.engine.local_matmul import as_rows, conjugated, matmul
from weft.kernels.matmul import all_gather as gather
from weft.kernels.matmul import all_reduce, reduce_scatter
from weft.kernels.matmul.gather_engines import (
    GatherGradient,
    gather_problem,
    generic_backward,
)

_ops: Any = torch.ops.weft


def _flat(x: torch.Tensor, dim: int) -> torch.Tensor:
    """x as a matrix whose rows run along `dim` first, as the engines take it."""
    return as_rows(x.movedim(dim, 0))


def _fp8_scales(scales: tuple[Any, ...]) -> dict[str, Any]:
    """Those of fp8 operands as the public functions take them."""
    return dict(zip(("scale_a", "scale_b", "out_dtype"), scales, strict=False))


def _rows_dim(x: torch.Tensor, gather_dim: int) -> int:
    """The dim of y along which its planes lie: that of the shards, unless y lacks it."""
    contracted = gather_dim in (-1, x.ndim - 1)
    return 0 if contracted else gather_dim


def _all_gather_matmul(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    group_name: str,
    gather_dim: int = 0,
    sizes: list[int] | None = None,
    return_gathered: bool = False,
    keep_gathered: bool = False,
    *scales: Any,
) -> list[torch.Tensor]:
    return_gathered |= keep_gathered
    result = gather.all_gather_matmul(
        x,
        weights,
        group_name,
        bias=[bias if len(bias) else None for bias in biases] or None,
        gather_dim=gather_dim,
        sizes=even_sizes(x, group_name, gather_dim, sizes),
        return_gathered=return_gathered,
        **_fp8_scales(scales),
    )
    results = [*result[1], result[0]] if return_gathered else result
    *ys, last = (planes_of(y, _rows_dim(x, gather_dim)) for y in results)
    return [*ys, planes_of(result[0], gather_dim) if return_gathered else last]


def _all_gather_matmul_fake(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    group_name: str,
    gather_dim: int = 0,
    sizes: Any = None,
    return_gathered: bool = False,
    keep_gathered: bool = False,
    *scales: Any,
) -> list[torch.Tensor]:
    length = sum(gathered_sizes(x.shape[gather_dim], group_name, sizes))
    gathered = planes(x, resized(x, gather_dim, length), gather_dim)
    rows = _rows_dim(x, gather_dim)
    like = _in_dtype_of_product(x, *scales)
    ys = [planes(like, [*gathered.shape[:-1], w.shape[1]], rows) for w in weights]
    return [*ys, gathered] if return_gathered or keep_gathered else ys


def _all_gather_matmul_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weights, biases, ctx.group_name, ctx.dim, sizes, ctx.returns, ctx.saves = inputs[:8]
    ctx.save_for_backward(output[-1] if ctx.saves else x, *weights)
    ctx.biased = [bias.numel() > 0 for bias in biases]
    ctx.sizes = gathered_sizes(x.shape[ctx.dim], ctx.group_name, sizes)


def _all_gather_matmul_grads(ctx: Any, grads: list[torch.Tensor]) -> tuple[Any, ...]:
    x, *weights = conjugated(*ctx.saved_tensors)
    dys, dgathered = (grads[:-1], grads[-1]) if ctx.returns or ctx.saves else (grads, None)
    needs_x, needs_w, needs_b, *_ = ctx.needs_input_grad
    gathered = None
    if ctx.saves:
        gathered, rank = x, world_of(ctx.group_name)[0]
        x = gathered.narrow(ctx.dim, sum(ctx.sizes[:rank]), ctx.sizes[rank])
        dgathered = dgathered if ctx.returns else None  # zeros otherwise
    needs = [needs_x, *(need and gathered is None for need in needs_w)]
    computed: list[torch.Tensor] = []
    if any(needs):
        computed = _ops.all_gather_matmul_backward(
            x, weights, dys, dgathered, ctx.group_name, ctx.dim, ctx.sizes, needs
        )
    dx, *dws = spread(computed, needs)
    if gathered is not None:
        dws = [
            matmul(as_rows(gathered).t(), as_rows(dy)) if need else None
            for dy, need in zip(dys, needs_w, strict=True)
        ]
    dbs = [
        dy.flatten(0, -2).sum(0) if biased and need else None
        for dy, biased, need in zip(dys, ctx.biased, needs_b, strict=False)
    ]
    return dx, dws, dbs, *[None] * 8


def _all_gather_matmul_backward(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    dys: list[torch.Tensor],
    dgathered: torch.Tensor | None,
    group_name: str,
    gather_dim: int,
    sizes: list[int],
    needs: list[bool],
) -> list[torch.Tensor]:
    group, (needs_x, *needs_w) = resolve(group_name), needs
    gather_dim %= x.ndim
    engine = choose(gather_problem(x, weights, gather_dim, sizes), group, x.device)
    if engine == "generic":
        given = GatherGradient(x, weights, dys, dgathered, group, sizes, needs_x, needs_w)
        dx, dws = generic_backward(given, gather_dim)
    else:
        front = x.movedim(gather_dim, 0)
        rows = [size * front.shape[1:-1].numel() for size in sizes]
        given = GatherGradient(
            _flat(x, gather_dim),
            weights,
            [_flat(dy, gather_dim).contiguous() for dy in dys],
            None if dgathered is None else _flat(dgathered, gather_dim),
            group,
            rows,
            needs_x,
            needs_w,
        )
        dx, dws = gather.OP.backward[engine](given)
        dx = None if dx is None else dx.view(front.shape).movedim(0, gather_dim)
    return needed([dx, *dws], [x, *weights], needs)


def _matmul_reduce_scatter(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    group_name: str,
    scatter_dim: int = 0,
    reduce_op: Any = "sum",
    wire_dtype: torch.dtype | None = None,
    *scales: Any,
) -> torch.Tensor:
    given = {"reduce_op": reduce_op, "wire_dtype": wire_dtype, **_fp8_scales(scales)}
    y = reduce_scatter.matmul_reduce_scatter(
        x, w, group_name, bias=bias, scatter_dim=scatter_dim, **given
    )
    return planes_of(y, scatter_dim)


def _matmul_reduce_scatter_fake(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    group_name: str,
    scatter_dim: int = 0,
    reduce_op: str = "sum",
    wire_dtype: torch.dtype | None = None,
    *scales: Any,
) -> torch.Tensor:
    rank, world_size = world_of(group_name)
    shape = [*x.shape[:-1], w.shape[1]]
    shape[scatter_dim] = chunk_sizes(shape[scatter_dim], world_size)[rank]
    return planes(_in_dtype_of_product(x, *scales), shape, scatter_dim)


def _matmul_reduce_scatter_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, w, _, *ctx.rest = inputs[:6]
    ctx.save_for_backward(x, w)


def _matmul_reduce_scatter_grads(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, w = conjugated(*ctx.saved_tensors)
    group_name, scatter_dim, reduce_op = ctx.rest
    needs = list(ctx.needs_input_grad[:3])
    computed = _ops.matmul_reduce_scatter_backward(
        x, w, dy, group_name, scatter_dim, reduce_op == "avg", needs
    )
    return *spread(computed, needs), *[None] * 7


def _matmul_reduce_scatter_backward(
    x: torch.Tensor,
    w: torch.Tensor,
    dy: torch.Tensor,
    group_name: str,
    scatter_dim: int,
    average: bool,
    needs: list[bool],
) -> list[torch.Tensor]:
    group = resolve(group_name)
    scatter_dim %= x.ndim
    length = w.shape[1] if scatter_dim == x.ndim - 1 else x.shape[scatter_dim]
    sizes = chunk_sizes(length, group.world_size)
    engine = choose(reduce_scatter.OP.problem(x, w, group, scatter_dim), group, x.device)
    if engine == "generic":
        whole: torch.Tensor = all_gather(dy, group, dim=scatter_dim, sizes=sizes)
        db = as_rows(whole).sum(0) if needs[2] else None
        whole = whole / group.world_size if average else whole
        dx = matmul(whole, w.t()) if needs[0] else None
        dw = matmul(as_rows(x).t(), as_rows(whole)) if needs[1] else None
    else:
        front = x.movedim(scatter_dim, 0)
        rows = [size * front.shape[1:-1].numel() for size in sizes]
        given = reduce_scatter.ScatterGradient(
            _flat(x, scatter_dim),
            w,
            _flat(dy, scatter_dim).contiguous(),
            group,
            rows,
            average,
            needs,
        )
        dx, dw, db = reduce_scatter.OP.backward[engine](given)
        dx = None if dx is None else dx.view(front.shape).movedim(0, scatter_dim)
    return needed([dx, dw, db], [x, w, w[0]], needs)


def _matmul_all_reduce(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    group_name: str,
    reduce_op: Any = "sum",
    wire_dtype: torch.dtype | None = None,
    *scales: Any,
) -> torch.Tensor:
    given = {"reduce_op": reduce_op, "wire_dtype": wire_dtype, **_fp8_scales(scales)}
    return all_reduce.matmul_all_reduce(x, w, group_name, bias=bias, **given)


def _matmul_all_reduce_fake(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    group_name: str,
    reduce_op: str = "sum",
    wire_dtype: torch.dtype | None = None,
    *scales: Any,
) -> torch.Tensor:
    return _in_dtype_of_product(x, *scales).new_empty([*x.shape[:-1], w.shape[1]])


def _in_dtype_of_product(
    x: torch.Tensor, scale_a: Any = None, scale_b: Any = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x; of scaled fp8, an empty tensor in the dtype of the result."""
    return x if scale_a is None else x.new_empty(0, dtype=out_dtype or torch.bfloat16)


def _matmul_all_reduce_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, w, _, group_name, reduce_op = inputs[:5]
    ctx.save_for_backward(x, w)
    ctx.scale = 1 / world_of(group_name)[1] if reduce_op == "avg" else None


def _matmul_all_reduce_grads(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, w = conjugated(*ctx.saved_tensors)
    needs_x, needs_w, needs_b, *_ = ctx.needs_input_grad
    scaled = dy if ctx.scale is None else dy * ctx.scale
    dx = matmul(scaled, w.t()) if needs_x else None
    dw = matmul(as_rows(x).t(), as_rows(scaled)) if needs_w else None
    db = as_rows(dy).sum(0) if needs_b else None
    return dx, dw, db, *[None] * 6


def _fused_all_gather_matmul(
    A: torch.Tensor,
    Bs: list[torch.Tensor],
    gather_dim: int,
    group_name: str,
    *,
    return_A: bool = True,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    results = _ops.all_gather_matmul(A, Bs, [], group_name, gather_dim, None, return_A)
    return (results[-1] if return_A else None), results[: len(Bs)]


def _fused_matmul_reduce_scatter(
    A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> torch.Tensor:
    y: torch.Tensor = _ops.matmul_reduce_scatter(A, B, None, group_name, scatter_dim, reduce_op)
    return y


define(
    "all_gather_matmul(Tensor x, Tensor[] weights, Tensor[] biases, str group_name, "
    "int gather_dim=0, SymInt[]? sizes=None, bool return_gathered=False, "
    "bool keep_gathered=False, Tensor? scale_a=None, Tensor[]? scale_b=None, "
    "ScalarType? out_dtype=None) -> Tensor[]",
    _all_gather_matmul,
    _all_gather_matmul_fake,
)
define(
    "all_gather_matmul_backward(Tensor x, Tensor[] weights, Tensor[] dys, Tensor? dgathered, "
    "str group_name, int gather_dim, SymInt[] sizes, bool[] needs) -> Tensor[]",
    _all_gather_matmul_backward,
    lambda x, weights, *rest: needed_fake([x, *weights], rest[-1]),
)
differentiate("all_gather_matmul", _all_gather_matmul_setup, _all_gather_matmul_grads)

define(
    "matmul_reduce_scatter(Tensor x, Tensor w, Tensor? bias, str group_name, "
    "int scatter_dim=0, str reduce_op='sum', ScalarType? wire_dtype=None, Tensor? scale_a=None, "
    "Tensor? scale_b=None, ScalarType? out_dtype=None) -> Tensor",
    _matmul_reduce_scatter,
    _matmul_reduce_scatter_fake,
)
define(
    "matmul_reduce_scatter_backward(Tensor x, Tensor w, Tensor dy, str group_name, "
    "int scatter_dim, bool average, bool[] needs) -> Tensor[]",
    _matmul_reduce_scatter_backward,
    lambda x, w, *rest: needed_fake([x, w, w[0]], rest[-1]),
)
differentiate("matmul_reduce_scatter", _matmul_reduce_scatter_setup, _matmul_reduce_scatter_grads)

define(
    "matmul_all_reduce(Tensor x, Tensor w, Tensor? bias, str group_name, "
    "str reduce_op='sum', ScalarType? wire_dtype=None, Tensor? scale_a=None, "
    "Tensor? scale_b=None, ScalarType? out_dtype=None) -> Tensor",
    _matmul_all_reduce,
    _matmul_all_reduce_fake,
)
differentiate("matmul_all_reduce", _matmul_all_reduce_setup, _matmul_all_reduce_grads)


compose(
    "fused_all_gather_matmul(Tensor A, Tensor[] Bs, int gather_dim, str group_name, *, "
    "bool return_A=True) -> (Tensor?, Tensor[])",
    _fused_all_gather_matmul,
)
compose(
    "fused_matmul_reduce_scatter(Tensor A, Tensor B, str reduce_op, int scatter_dim, "
    "str group_name) -> Tensor",
    _fused_matmul_reduce_scatter,
)
