"""Both ends of a language model whose vocabulary is cut over the ranks: plain modules.

A vocabulary of V; rank r has V_r of it (by torch.chunk), as rows of the embedding and the head:

    tokens (*)  -- own rows, else 0 ----------->   partial_r (*, H)  -- sum over ranks -->  (*, H)
    x (*, H)    -- ColumnParallelLinear ------->   logits_r (*, V_r) -- loss, largest ---->  (*)

For the loss of a row, each rank sends the log-sum-exp of its logits and the one of the target; for
the next token, its largest logit and where that is. The logits themselves stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from weft.collectives import Group, all_gather, reduce_scatter, resolve
from weft.collectives.ranks.group import GroupLike, process_group
from weft.collectives.ranks.traced import is_call_traced
from weft.collectives.sizes import known_sizes
from weft.kernels.engine.autocast import outside_autocast
from weft.kernels.engine.local_matmul import in_sum_dtype, on_cpu
from weft.kernels.engine.replicated import Spread, Summed
from weft.kernels.layers.module import REQUIRED, ParallelModule, chosen_dim
from weft.kernels.layers.split import Split


class VocabParallelEmbedding(ParallelModule):
    """nn.Embedding with its rows cut over the ranks (by torch.chunk).

    Input: tokens (*), the same on every rank. Output: (*, embedding_dim), a shard along
    `sequence_dim`, or whole on every rank with `sequence_dim=None`. State is saved and loaded
    whole, as that of ColumnParallelLinear.

    Example:
        4 rows on 2 ranks, tokens [1, 3]: rank 0 gives row 1 and 0, rank 1 gives 0 and row 3; the
        sum is rows 1 and 3.
    """

    cut: ClassVar[dict[str, int]] = {"weight": 0}
    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        group: GroupLike = None,
        sequence_dim: int | None = REQUIRED,
    ) -> None:
        """Draw the weights of an nn.Embedding and keep this rank's part.

        Args:
            num_embeddings, embedding_dim, padding_idx, device, dtype: of the whole nn.Embedding.
                With the same seed on every rank, the weights are those that it would have drawn.
            group: ProcessGroup, 1-D DeviceMesh, or None for the world.
            sequence_dim: to be chosen. An int: the result is cut over the ranks along this dim.
                None: it is whole on every rank.

        Raises:
            TypeError: no sequence_dim.
        """
        super().__init__()
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        whole = nn.Embedding(num_embeddings, embedding_dim, padding_idx, **like)
        self._cut_out(whole, group, sequence_dim)

    @classmethod
    def from_embedding(
        cls,
        embedding: nn.Embedding,
        group: GroupLike = None,
        *,
        sequence_dim: int | None = REQUIRED,
    ) -> VocabParallelEmbedding:
        """This rank's part of `embedding`, which must hold the same values on every rank.

        Raises:
            TypeError: no sequence_dim.
            ValueError: it is not an nn.Embedding, or has max_norm, scale_grad_by_freq or sparse.
        """
        plain = isinstance(embedding, nn.Embedding) and embedding.max_norm is None
        if not plain or embedding.scale_grad_by_freq or embedding.sparse:
            raise ValueError(
                f"from_embedding takes an nn.Embedding without max_norm, scale_grad_by_freq and "
                f"sparse, got {embedding}"
            )
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module._cut_out(embedding, group, sequence_dim)
        return module

    def _cut_out(self, whole: nn.Embedding, group: GroupLike, sequence_dim: int | None) -> None:
        self.num_embeddings, self.embedding_dim = whole.num_embeddings, whole.embedding_dim
        self.padding_idx = whole.padding_idx
        self.group, self.sequence_dim = resolve(group), chosen_dim(self, sequence_dim)
        self.split = Split((self.num_embeddings,), (1,), self.group.world_size)
        self.take(whole, ("weight",))

    def drawn(self) -> nn.Module:
        """An nn.Embedding with new values."""
        like: dict[str, Any] = {"device": self.weight.device, "dtype": self.weight.dtype}
        return nn.Embedding(self.num_embeddings, self.embedding_dim, self.padding_idx, **like)

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of the nn.Embedding."""
        return {"weight": (self.num_embeddings, self.embedding_dim)}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The rows of these tokens.

        Raises:
            ValueError: a token outside the vocabulary (checked on a CPU only: on a GPU the host
                would have to wait).
        """
        if tokens.device.type == "cpu" and not is_call_traced(tokens) and tokens.numel():
            low, high = (int(end) for end in tokens.aminmax())
            if low < 0 or high >= self.num_embeddings:
                raise ValueError(
                    f"tokens must be 0 .. {self.num_embeddings - 1}, got {low} .. {high}"
                )
        rows = len(self.weight)
        first = sum(self.split.parts[0][: self.group.rank])
        own = (tokens >= first) & (tokens < first + rows)
        padding = None if self.padding_idx is None else self.padding_idx - first
        if padding is not None and not 0 <= padding < rows:
            padding = None
        # A rank without rows must take part in backward, too.
        weight = self.weight if rows else functional.pad(self.weight, (0, 0, 0, 1))
        found = functional.embedding((tokens - first).masked_fill(~own, 0), weight, padding)
        found = found.masked_fill(~own.unsqueeze(-1), 0)
        if self.sequence_dim is not None:
            return reduce_scatter(found, self.group, dim=self.sequence_dim)
        total: torch.Tensor = Summed.apply(found, self.group, "sum")
        return total

    def extra_repr(self) -> str:
        """As nn.Embedding's, with what differs."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return (
            f"{self.num_embeddings}, {self.embedding_dim}{padding}, "
            f"sequence_dim={self.sequence_dim}, rank {self.group.rank} of {self.group.world_size}"
        )


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    group: GroupLike = None,
    *,
    ignore_index: int = -100,
    reduction: Literal["none", "mean", "sum"] = "mean",
    label_smoothing: float = 0.0,
    sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """F.cross_entropy of all ranks' logits, cat(logits, -1), with the classes in the last dim.

    Computed in fp32 (fp64 for fp64), whatever the dtype of the logits, and rounded once; under
    autocast the result is fp32, as torch's. The gradient needs no communication.

    Args:
        logits: (*, V_r), this rank's part, as a ColumnParallelLinear returns it. V_r may differ
            from rank to rank and be 0; the rest is the same on every rank.
        target: (*) int64, indices into all V classes, the same on every rank.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        ignore_index, reduction, label_smoothing: as of F.cross_entropy.
        sizes: V_r of every rank, if known; None: the ranks exchange them.

    Returns:
        A number, or (*) with reduction "none"; bitwise the same on every rank, as its gradient must
        be. That of the logits is this rank's own.

    Raises:
        ValueError: shapes, dtypes or options that do not fit.
        IndexError: a target that is no class (checked on a CPU only, as on a GPU the host would
            have to wait; there such a row has the loss log(sum(exp)), its gradient included).

    Example:
        [0., 0.] on both of 2 ranks and target 3 give log 4 on both, and the gradients
        [.25, .25] and [.25, -.75].
    """
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f'reduction must be "none", "mean" or "sum", got {reduction!r}')
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be between 0 and 1, got {label_smoothing}")
    if target.shape != logits.shape[:-1] or target.dtype != torch.int64 or not logits.ndim:
        raise ValueError(
            f"target must be int64 with the shape of logits but for the last dim: got "
            f"{target.dtype} {tuple(target.shape)} for logits {tuple(logits.shape)}"
        )
    if not logits.is_floating_point():
        raise ValueError(f"logits must be floating point, got {logits.dtype}")
    if is_call_traced(logits):
        sizes = None  # the graph itself learns them
    else:
        group = resolve(group)
        told = ("ignored", ignore_index), ("smoothing", label_smoothing), reduction
        sizes = known_sizes(logits, group, logits.ndim - 1, sizes, "cross entropy", *told)
        if target.device.type == "cpu":
            _check_targets(target, sum(sizes), ignore_index)
    loss, counted = row_losses(logits, target, group, ignore_index, label_smoothing, sizes)
    if reduction != "none":
        loss = loss.sum() if reduction == "sum" else loss.sum() / counted.sum()
    autocast = torch.is_autocast_enabled(logits.device.type)
    return loss if autocast else loss.to(logits.dtype)


def _check_targets(target: torch.Tensor, classes: int, ignore_index: int) -> None:
    beyond = target[(target != ignore_index) & ((target < 0) | (target >= classes))]
    if len(beyond):
        raise IndexError(
            f"target {int(beyond[0])} is out of bounds: classes are 0 .. {classes - 1}, "
            f"and {ignore_index=}"
        )


def row_losses(
    logits: torch.Tensor,
    target: torch.Tensor,
    group: GroupLike,
    ignore_index: int,
    label_smoothing: float,
    sizes: Sequence[int] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss of each row in fp32 or fp64, 0 where it is ignored; whether it is not), both (*).

    Args: as of `vocab_parallel_cross_entropy`, and checked; `sizes` is None in a graph only.
    """
    counted = target != ignore_index
    first: int | torch.Tensor
    classes: int | torch.Tensor
    if sizes is None:
        pg = group.pg if isinstance(group, Group) else process_group(group)
        rank, world_size = dist.get_rank(pg), dist.get_world_size(pg)
        width = torch.full((1,), logits.shape[-1], device=logits.device)
        widths = all_gather(width, group, sizes=[1] * world_size)
        first, classes = widths[:rank].sum(), widths.sum()
    else:
        group = resolve(group)
        world_size = group.world_size
        first, classes = sum(sizes[: group.rank]), sum(sizes)
    columns, own = logits.shape[-1], target - first
    here = counted & (own >= 0) & (own < columns)
    rows = _Rows(*(t.flatten() for t in (own.where(here, 0), here, counted)))
    call = _Loss(group, world_size, label_smoothing, classes)
    flat = logits.reshape(target.numel(), columns)
    loss: torch.Tensor = _CrossEntropy.apply(call, flat, *rows)
    return loss.view(target.shape), counted


class _Rows(NamedTuple):
    """What the gradient of some rows depends on: place, here and counted (R), bool but for place.

    The target of a row is the logit at `place`, if it is `here`.
    """

    place: torch.Tensor
    here: torch.Tensor
    counted: torch.Tensor


class _Loss(NamedTuple):
    """A cross entropy, except for its tensors."""

    group: GroupLike
    world_size: int
    smoothing: float
    classes: int | torch.Tensor

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """(W, *): every rank's x (*)."""
        return all_gather(x.unsqueeze(0), self.group, sizes=[1] * self.world_size)

    def gradient(
        self, x: torch.Tensor, lse: torch.Tensor, grad: torch.Tensor, rows: _Rows
    ) -> torch.Tensor:
        """dx (R, V_r) of x, given the log-sum-exp of whole rows and the gradient of the loss, (R).

        softmax(x) - (1 - s) [1 at the target] - s / V, with label smoothing s and V classes.
        """
        place, here, counted = rows
        dx = (in_sum_dtype(x) - lse.unsqueeze(-1)).exp()
        if self.smoothing:
            dx = dx - self.smoothing / self.classes
        if x.shape[-1]:
            right = here.to(dx.dtype) * (self.smoothing - 1)
            dx = dx.scatter_add(-1, place.unsqueeze(-1), right.unsqueeze(-1))
        return (dx * grad.masked_fill(~counted, 0.0).unsqueeze(-1)).to(x.dtype)


class _CrossEntropy(torch.autograd.Function):
    """logits (R, V_r) and the `_Rows` of their targets -> loss (R), 0 where it does not count.

    With the logits x of all ranks and smoothing s: loss = lse(x) - (1 - s) x[target] - s mean(x).
    """

    @staticmethod
    def forward(
        ctx: Any, call: _Loss, logits: torch.Tensor, *tensors: torch.Tensor
    ) -> torch.Tensor:
        place, here, counted = rows = _Rows(*tensors)
        smoothing = call.smoothing
        parts = logits.split(_rows_a_part(logits))
        told = [torch.cat([in_sum_dtype(part).logsumexp(-1) for part in parts])]
        if logits.shape[-1]:
            right = in_sum_dtype(logits.gather(-1, place.unsqueeze(-1)).squeeze(-1)).where(
                here, 0.0
            )
        else:
            right = torch.zeros_like(told[0])
        told.append(right)
        if smoothing:
            told.append(torch.cat([in_sum_dtype(part).sum(-1) for part in parts]))
        every = call.gather(torch.stack(told)).unbind(1)
        lse, right = every[0].logsumexp(0), every[1].sum(0)
        if smoothing:
            right = (1 - smoothing) * right + smoothing / call.classes * every[2].sum(0)
        ctx.call = call
        ctx.save_for_backward(logits, lse, *rows)
        return (lse - right).masked_fill(~counted, 0.0)

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _Loss = ctx.call
        logits, lse, *tensors = ctx.saved_tensors
        if torch.is_grad_enabled():  # by ops that are differentiable themselves
            lse = call.gather(in_sum_dtype(logits).logsumexp(-1)).logsumexp(0)
            grad = Spread.apply(grad, resolve(call.group))
            dx = call.gradient(logits, lse, grad, _Rows(*tensors))
        else:
            dx = torch.empty_like(logits)
            step = _rows_a_part(logits)
            parts = [t.split(step) for t in (dx, logits, lse, grad, *tensors)]
            for out, x, lse_of, grad_of, *rows in zip(*parts, strict=True):
                out.copy_(call.gradient(x, lse_of, grad_of, _Rows(*rows)))
        return None, dx, None, None, None


def _rows_a_part(logits: torch.Tensor) -> int:
    """How many rows to take at a time, for intermediates that stay in a core's cache.

    For 1,024 rows of 16,000 on one core log-sum-exp takes 32 ms instead of 85. On a GPU it bounds
    the memory for them, which have fp32. A graph is not to repeat itself.
    """
    if is_call_traced(logits):
        return max(len(logits), 1)
    nbytes = 512 << 10 if on_cpu(logits) else 256 << 20
    return max(nbytes // (4 * max(logits.shape[-1], 1)), 1)


@torch.no_grad()
def vocab_parallel_argmax(logits: torch.Tensor, group: GroupLike = None) -> torch.Tensor:
    """The index of the largest of all ranks' logits, as torch.argmax(cat(logits, -1), -1).

    To sample from softmax(logits / t) instead, pass logits / t + g, where each rank draws its own
    g = -torch.empty_like(logits).exponential_().log() (the Gumbel-max trick).

    Args:
        logits: (*, V_r), this rank's part, as a ColumnParallelLinear returns it. V_r may differ
            from rank to rank and be 0; the rest is the same on every rank.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.

    Returns:
        (*) int64, bitwise the same on every rank; the first of equal ones. The host does not wait.

    Example:
        [0., 2.] on rank 0 and [5., 1.] on rank 1 give 2 on both.
    """
    # While a graph is traced, all shards are taken to be as long as this one.
    sizes = None if is_call_traced(logits) else [1] * resolve(group).world_size
    if logits.shape[-1]:
        best, at = logits.max(-1)
    else:
        best = logits.new_full(logits.shape[:-1], -torch.inf)
        at = best.new_zeros(best.shape, dtype=torch.int64)
    width = torch.full_like(at, logits.shape[-1])
    # Exact in fp64: any logit, and any place below 2^53.
    told = torch.stack([each.double() for each in (best, at, width)]).unsqueeze(0)
    every = all_gather(told, group, sizes=sizes)  # (W, 3, *)
    bests, places, widths = every.unbind(1)
    places = places + widths.cumsum(0) - widths
    winner = bests.argmax(0, keepdim=True)
    return places.gather(0, winner).squeeze(0).long()
