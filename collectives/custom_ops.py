"""The collectives as custom ops: torch.ops.weft.all_gather and the others.

    weft.collectives.all_gather(x, group)
        plain tensors          the call itself, bypassing torch's dispatcher
        torch.compile, export, fake and other wrapped tensors
                               torch.ops.weft.all_gather(x, group_name)
                                   fake kernel     shapes and strides of the result
                                   run time        the call itself
                                   gradient        ops of torch.ops.weft again

A group is known by its name, as in torch's functional collectives. Ops are ordered effects: the
compiler keeps their number and order, which must be the same on every rank. For the same reason,
activation checkpointing in a graph keeps their results, and computes the rest again.

While a graph is traced, the peers cannot be asked for the lengths of their shards: `sizes=None` of
a gather then means that all shards are as long as this rank's, which is checked whenever the op
runs.

A new op: `define(schema, run, fake)`, and `differentiate(name, ...)` if it has a gradient. A new
argument of an op goes into its schema, its `run` and its fake kernel, with a default at the end.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.collectives import collective_ops
from weft.collectives.ranks.chunks import chunk_sizes
from weft.collectives.ranks.group import process_group
from weft.collectives.sizes import even_sizes

_library = torch.library.Library("weft", "FRAGMENT")
_ops: Any = torch.ops.weft


def define(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any], *, ordered: bool = True
) -> None:
    """Register an op that communicates.

    Args:
        schema: name, arguments and results, as torch.library writes them.
        run: computes it on plain tensors and returns new ones.
        fake: returns empty tensors with the shapes, dtypes and strides of `run`.
        ordered: whether it must keep its place among such ops; not if it writes to its arguments
            and exchanges no data.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=[torch.Tag.needs_fixed_stride_order])
    _library.impl(name, run, "CompositeExplicitAutograd")

    def traced(*args: Any, **kwargs: Any) -> Any:
        _never_recompute()
        return fake(*args, **kwargs)

    torch.library.register_fake(f"weft::{name}", traced, lib=_library)
    if ordered:
        torch.library._register_effectful_op(
            f"weft::{name}", torch._library.effects.EffectType.ORDERED, lib=_library
        )


def _never_recompute() -> None:
    """Make the compiler keep the results of ordered ops that it is asked to recompute.

    It looks for ordered ops that may not be recomputed, but takes activation checkpointing's wish
    to recompute one, and then fails on the token by which the op is ordered.
    """
    # Not imported before something is to be partitioned: the next op that is traced asks again.
    partitioners: Any = sys.modules.get("torch._functorch.partitioners")
    given = getattr(partitioners, "force_save_effectful_ops", _force_save)
    if given is not _force_save:
        _torch_force_save.append(given)
        partitioners.force_save_effectful_ops = _force_save


_torch_force_save: list[Callable[[torch.fx.GraphModule], None]] = []


def _force_save(joint: torch.fx.GraphModule) -> None:
    kept: set[torch.fx.Node] = set()
    for node in joint.graph.nodes:
        ordered = node.target is torch.ops.higher_order.with_effects
        if (ordered and node.args[1].namespace == "weft") or (
            node.target is operator.getitem and node.args[0] in kept
        ):
            node.meta.pop("recompute", None)
            kept.add(node)
    _torch_force_save[0](joint)


def differentiate(
    name: str, setup_context: Callable[..., None], backward: Callable[..., Any]
) -> None:
    """Register the gradient of an op: `backward(ctx, *grads)`, with what `setup_context` kept.

    `backward` returns one gradient for each argument.
    """

    def of_passed(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        # The dispatcher drops trailing arguments that equal their default.
        return tuple(backward(ctx, *grads)[: len(ctx.needs_input_grad)])

    torch.library.register_autograd(
        f"weft::{name}", of_passed, setup_context=setup_context, lib=_library
    )


def compose(schema: str, run: Callable[..., Any]) -> None:
    """Register an op that is made of other ops, so needs neither fake kernel nor gradient."""
    _library.define(schema)
    _library.impl(schema.partition("(")[0], run, "CompositeImplicitAutograd")


def world_of(group_name: str) -> tuple[int, int]:
    """Rank and world size of a group, without any communication."""
    pg = process_group(group_name)
    return pg.rank(), pg.size()


def gathered_sizes(length: Any, group_name: str, sizes: Sequence[Any] | None) -> list[Any]:
    """Lengths of all ranks' shards as a traced graph assumes them."""
    if sizes is not None:
        return list(sizes)
    return [length] * world_of(group_name)[1]


def planes(x: torch.Tensor, shape: Sequence[Any], dim: int) -> torch.Tensor:
    """Empty, with x's dtype and `shape`, its planes across `dim` one after another in memory."""
    rest = list(shape)
    return x.new_empty([rest.pop(dim), *rest]).movedim(0, dim)


def planes_of(x: torch.Tensor, dim: int) -> torch.Tensor:
    """x with the strides of `planes(x, x.shape, dim)`, which a fake kernel has promised."""
    return x.movedim(dim, 0).contiguous().movedim(0, dim)


def resized(x: torch.Tensor, dim: int, length: Any) -> list[Any]:
    """The shape of x, with `length` for `dim`."""
    shape = list(x.shape)
    shape[dim] = length
    return shape


def needed(
    grads: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor | None], needs: list[bool]
) -> list[torch.Tensor]:
    """The gradients that are needed, each in the memory layout that `needed_fake` promises."""
    needed = []
    for grad, of, need in zip(grads, like, needs, strict=True):
        if need and grad is not None and of is not None:
            laid_out = torch.empty_like(of)
            same = grad.stride() == laid_out.stride()
            needed.append(grad if same else laid_out.copy_(grad))
    return needed


def needed_fake(like: Sequence[torch.Tensor], needs: list[bool]) -> list[torch.Tensor]:
    return [torch.empty_like(of) for of, need in zip(like, needs, strict=True) if need]


def spread(computed: Sequence[torch.Tensor], needs: list[bool]) -> list[torch.Tensor | None]:
    """The gradients that `needed` returned, with None for the others."""
    left = iter(computed)
    return [next(left) if need else None for need in needs]


def _all_gather(
    x: torch.Tensor, group_name: str, dim: int = 0, sizes: list[int] | None = None
) -> torch.Tensor:
    return collective_ops.all_gather(
        x, group_name, dim=dim, sizes=even_sizes(x, group_name, dim, sizes)
    )


def _all_gather_fake(
    x: torch.Tensor, group_name: str, dim: int = 0, sizes: Any = None
) -> torch.Tensor:
    length = sum(gathered_sizes(x.shape[dim], group_name, sizes))
    return planes(x, resized(x, dim, length), dim)


def _all_gather_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, ctx.group_name, ctx.dim, sizes = inputs
    ctx.sizes = gathered_sizes(x.shape[ctx.dim], ctx.group_name, sizes)


def _all_gather_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    dx = _ops.reduce_scatter(grad, ctx.group_name, ctx.dim, "sum", ctx.sizes)
    return dx, None, None, None


def _reduce_scatter(
    x: torch.Tensor,
    group_name: str,
    dim: int = 0,
    reduce_op: Any = "sum",
    sizes: list[int] | None = None,
) -> torch.Tensor:
    return collective_ops.reduce_scatter(x, group_name, dim=dim, reduce_op=reduce_op, sizes=sizes)


def _scattered_sizes(x: torch.Tensor, group_name: str, dim: int, sizes: Any) -> list[Any]:
    return chunk_sizes(x.shape[dim], world_of(group_name)[1]) if sizes is None else list(sizes)


def _reduce_scatter_fake(
    x: torch.Tensor, group_name: str, dim: int = 0, reduce_op: str = "sum", sizes: Any = None
) -> torch.Tensor:
    length = _scattered_sizes(x, group_name, dim, sizes)[world_of(group_name)[0]]
    return planes(x, resized(x, dim, length), dim)


def _reduce_scatter_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, ctx.group_name, ctx.dim, ctx.op, sizes = inputs
    ctx.sizes = _scattered_sizes(x, ctx.group_name, ctx.dim, sizes)


def _reduce_scatter_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    collective_ops.check_differentiable("reduce_scatter", ctx.op)
    dx = _ops.all_gather(grad, ctx.group_name, ctx.dim, ctx.sizes)
    if ctx.op == "avg":
        dx = dx / len(ctx.sizes)
    return dx, None, None, None, None


def _all_reduce(x: torch.Tensor, group_name: str, reduce_op: Any = "sum") -> torch.Tensor:
    return collective_ops.all_reduce(x, group_name, reduce_op=reduce_op)


def _like(x: torch.Tensor, *args: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


def _all_reduce_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.group_name, ctx.op = inputs


def _all_reduce_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    collective_ops.check_differentiable("all_reduce", ctx.op)
    return _ops.all_reduce(grad, ctx.group_name, ctx.op), None, None


def _all_to_all_fake(x: torch.Tensor, receives: Any, sends: Any, group_name: str) -> torch.Tensor:
    rows = x.shape[0] if receives is None else sum(receives)
    return x.new_empty((rows, *x.shape[1:]))


def _all_to_all_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.receives, ctx.sends, ctx.group_name = inputs


def _all_to_all_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return _ops.all_to_all(grad, ctx.sends, ctx.receives, ctx.group_name), None, None, None


def _broadcast_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.src, ctx.group_name = inputs


def _broadcast_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    total = _ops.all_reduce(grad, ctx.group_name, "sum")
    is_source = world_of(ctx.group_name)[0] == ctx.src
    return total if is_source else torch.zeros_like(total), None, None


define(
    "all_gather(Tensor x, str group_name, int dim=0, SymInt[]? sizes=None) -> Tensor",
    _all_gather, _all_gather_fake,
)  # fmt: skip
define(
    "reduce_scatter(Tensor x, str group_name, int dim=0, str reduce_op='sum', "
    "SymInt[]? sizes=None) -> Tensor",
    _reduce_scatter, _reduce_scatter_fake,
)  # fmt: skip
define("all_reduce(Tensor x, str group_name, str reduce_op='sum') -> Tensor", _all_reduce, _like)
define(
    "all_to_all(Tensor x, SymInt[]? receives, SymInt[]? sends, str group_name) -> Tensor",
    collective_ops.all_to_all, _all_to_all_fake,
)  # fmt: skip
define("broadcast(Tensor x, int src, str group_name) -> Tensor", collective_ops.broadcast, _like)
define("barrier(str group_name) -> ()", collective_ops.barrier, lambda group_name: None)

differentiate("all_gather", _all_gather_setup, _all_gather_backward)
differentiate("reduce_scatter", _reduce_scatter_setup, _reduce_scatter_backward)
differentiate("all_reduce", _all_reduce_setup, _all_reduce_backward)
differentiate("all_to_all", _all_to_all_setup, _all_to_all_backward)
differentiate("broadcast", _broadcast_setup, _broadcast_backward)
