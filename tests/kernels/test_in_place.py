"""Results that are written to, as `out += residual` does: what torch's own ops allow."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist

import weft
from weft import collectives
from weft.kernels import combine, dispatch, route

Results = torch.Tensor | tuple[torch.Tensor, ...]


def drawn(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, requires_grad=True)


def made_of(leaves: list[torch.Tensor], rows: int, W: int) -> dict[str, Callable[[], Results]]:
    """Every public op that has something to differentiate, on few rows, but for attention."""

    def leaf(*shape: int) -> torch.Tensor:
        leaves.append(drawn(*shape))
        return leaves[-1]

    flat, stack, w = leaf(rows, 12), leaf(rows, 2 * W, 12), leaf(12, 8)
    ids, chosen, experts = torch.arange(2 * rows).view(rows, 2) % 4, leaf(rows, 2), leaf(4, 12, 6)
    mine, own = experts.detach().chunk(W)[dist.get_rank()].requires_grad_(), leaf(12)
    leaves.append(mine)
    few = route(ids, 4)
    options = [(None, True), (0, False), (1, False)]
    ops: dict[str, Callable[[], Results]] = {}
    for bias in (True, False):
        for dim, gather in options:
            x = stack if dim == 1 else flat
            col = weft.ColumnParallelLinear(12, 8, bias, sequence_dim=dim, gather_output=gather)
            row = weft.RowParallelLinear(12, 8, bias, sequence_dim=dim, input_is_parallel=False)
            leaves += [*col.parameters(), *row.parameters()]
            ops[f"column, {bias=}, {dim=}"] = partial(col, x)
            ops[f"row, {bias=}, {dim=}"] = partial(row, x)
    layer = weft.ExpertParallelMLP(4, 12, 6)
    embedding = weft.VocabParallelEmbedding(9, 6, sequence_dim=None)
    leaves += [*layer.parameters(), *embedding.parameters()]
    ops |= {
        "experts": lambda: layer(flat, ids, chosen),
        "dispatch": lambda: dispatch(flat, few),
        "combine": lambda: combine(dispatch(flat, few), chosen, few),
        "combine alone": lambda: combine(dispatch(flat, few), None, few),
        "pairs": lambda: tuple(weft.dispatch_grouped_matmul(flat, few, [mine, mine])[0]),
        "gelu": lambda: weft.dispatch_grouped_matmul(flat, few, mine, activation="gelu")[0],
        "sum": lambda: weft.matmul_all_reduce(flat, w),
        "norm": lambda: weft.all_reduce_residual_rms_norm(flat, flat, own)[0],
        "embedding": partial(embedding, ids),
        "loss": lambda: weft.vocab_parallel_cross_entropy(flat, ids[:, 0], reduction="none"),
    }
    for dim in (0, 1):
        ops |= {
            f"gather, {dim=}": partial(weft.all_gather_matmul, stack, w, gather_dim=dim),
            f"gathered, {dim=}": lambda dim=dim: weft.all_gather_matmul(
                stack, [w, w], gather_dim=dim, return_gathered=True, keep_gathered=False
            )[0],
            f"scatter, {dim=}": partial(weft.matmul_reduce_scatter, stack, w, scatter_dim=dim),
            f"norms, {dim=}": lambda dim=dim: weft.reduce_scatter_rms_norm_all_gather(
                stack, own, dim=dim
            )[0],
            f"all_gather, {dim=}": partial(collectives.all_gather, stack, dim=dim),
            f"reduce_scatter, {dim=}": partial(collectives.reduce_scatter, stack, dim=dim),
        }
    return ops


@pytest.mark.ranks(2)
@pytest.mark.parametrize("engine", ["host", "generic", "triton"])
def test_results_can_be_written_to(engine: str) -> None:
    for rows in (1, 3) if engine == "generic" else (3,):
        leaves: list[torch.Tensor] = []
        torch.manual_seed(0)
        for name, op in made_of(leaves, rows, dist.get_world_size()).items():
            grads = []
            for in_place in (True, False):
                with weft.engine(engine):
                    y = op()
                    ys = [y] if isinstance(y, torch.Tensor) else [*y]
                    ys = [each.add_(1) if in_place else each + 1 for each in ys]
                    total = torch.stack([each.square().sum() for each in ys]).sum()
                    if total.requires_grad:
                        found = torch.autograd.grad(total, leaves, allow_unused=True)
                grads.append([total, *(g for g in found if g is not None)])
            torch.testing.assert_close(*grads, msg=lambda told, name=name: f"{name}: {told}")


@pytest.mark.ranks(2)
def test_results_that_gradients_need_are_not_changed_in_silence() -> None:
    """relu's results, and gathered inputs that are kept, as of torch's own functions."""
    x, w = drawn(3, 4, 12), drawn(2, 12, 6)
    few = route(torch.arange(6).view(3, 2) % 4, 4)
    for engine in ("host", "triton", "generic"):
        with weft.engine(engine):
            hidden = weft.dispatch_grouped_matmul(x[:, 0], few, w, activation="relu")[0]
            whole, _ = weft.all_gather_matmul(
                x, w[0], gather_dim=1, return_gathered=True, keep_gathered=True
            )
            for y, result in (hidden, hidden), (whole, _):
                y.add_(1)
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    result.sum().backward()
