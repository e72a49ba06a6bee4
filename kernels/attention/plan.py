"""What a call of attention over a sharded sequence is: its arguments checked, its engine chosen.

`ring_attention` and `ulysses_attention` take the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from weft import settings
from weft.collectives import Group, resolve
from weft.collectives.device.launches import layouts_of
from weft.collectives.memory.checks import check_call
from weft.collectives.memory.exchange import agree
from weft.collectives.ranks.flight import call_of
from weft.collectives.ranks.group import GroupLike
from weft.collectives.sizes import check_sizes
from weft.kernels.attention.library import gpu_refusal
from weft.kernels.engine.chips import chip_of
from weft.kernels.engine.engines import Problem, RunnableEngine, choose, is_supported, too_wide
from weft.kernels.engine.fused_times import AttentionWork
from weft.kernels.engine.plans import Plans
from weft.kernels.flash.geometry import (
    UNBOUNDED,
    Geometry,
    SequenceLayout,
    Visibility,
)

# The kernels keep a bit for each rank, in an int64.
_MOST_RANKS = 64
_WIDEST = 256


class AttentionOptions(NamedTuple):
    """What `ring_attention` takes besides tensors and the group; see there."""

    causal: bool = False
    scale: float | None = None
    layout: SequenceLayout = "contiguous"
    window: int | Sequence[int] | None = None
    cu_seqlens: torch.Tensor | Sequence[int] | None = None
    sizes: Sequence[int] | None = None
    key_sizes: Sequence[int] | None = None

    def of_op(self) -> AttentionOptions:
        """The same, as the ops of torch.library take them."""
        window, cu_seqlens = self.window, self.cu_seqlens
        if window is not None:
            window = [window, -1] if isinstance(window, int) else list(window)
        if cu_seqlens is not None and not isinstance(cu_seqlens, torch.Tensor):
            cu_seqlens = torch.tensor(cu_seqlens)
        return self._replace(window=window, cu_seqlens=cu_seqlens)


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """What follows from the arguments of a call of `op`: the same on all ranks, but for `key`.

    It is kept, one for q, k and v of the same layouts. `of_gradients`: the engine that makes those
    of `ring_attention`.
    """

    op: str
    group: Group
    geometry: Geometry
    scale: float
    engine: RunnableEngine
    of_gradients: RunnableEngine
    told: tuple[Hashable, ...]

    def key(self, *more: torch.Tensor | None) -> Hashable:
        """All that launches go by which are given q, k, v and `more`: see `Workspace.repeat`."""
        return self, layouts_of(more)


@dataclass(frozen=True, eq=False)
class _Question:
    """What a call asks for, apart from the lengths of the shards."""

    visible: tuple[int, int, tuple[int, ...] | None]  # before, after, documents
    scale: float
    told: tuple[Hashable, ...]


_questions = Plans[_Question](f"{__name__}._questions")
_plans = Plans[AttentionPlan](f"{__name__}._plans")


def plan_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: GroupLike,
    options: AttentionOptions,
    op: str = "ring_attention",
) -> AttentionPlan:
    """Check the arguments of `ring_attention`, or of `op`, and plan the call.

    Raises:
        ValueError, MismatchError, PeerTimeout, NotImplementedError: as `ring_attention`.
    """
    group = resolve(group)
    causal, scale, layout, window, cu_seqlens, sizes, key_sizes = options
    visible = (*_reach(causal, window), _documents(cu_seqlens))
    scale = None if scale is None else float(scale)
    layouts, engine = layouts_of((q, k, v)), settings.current_engine()

    def asked() -> _Question:
        check_tensors(q, k, v, layout)
        B, H, _, D = q.shape
        of = 1 / math.sqrt(D) if scale is None else scale
        names = zip(("before", "after", "documents"), visible, strict=True)
        shapes = ("q", (B, H, "*", D)), ("k", (B, k.shape[1], "*", D))
        return _Question(visible, of, (q.dtype, *shapes, layout, ("scale", of), *names))

    question = _questions.of((op, group, visible, scale, layout, layouts, engine), asked)
    lengths = _sizes_of_ranks(q, k, group, op, question.told, sizes, key_sizes)
    return _plans.of(
        (question, group, lengths),
        lambda: _attention_plan(q, k, group, op, layout, question, *lengths),
    )


def _attention_plan(
    q: torch.Tensor,
    k: torch.Tensor,
    group: Group,
    op: str,
    layout: SequenceLayout,
    question: _Question,
    q_sizes: tuple[int, ...],
    k_sizes: tuple[int, ...],
) -> AttentionPlan:
    """The plan of a call whose shards have these lengths."""
    before, after, documents = question.visible
    told = *question.told, ("sizes", q_sizes), ("key_sizes", k_sizes)
    B, H, D, scale, total = q.shape[0], q.shape[1], q.shape[3], question.scale, sum(k_sizes)
    if documents is not None and not sum(q_sizes) == total == documents[-1]:
        raise ValueError(
            f"cu_seqlens must end with the number of tokens, as many queries as keys: got "
            f"{documents[-1]} for {sum(q_sizes)} queries and {total} keys"
        )
    geometry = Geometry(q_sizes, k_sizes, layout, Visibility(total, before, after, documents))
    _ = geometry.q_spans, geometry.k_spans  # ValueError if the sizes are not the layout's

    W = group.world_size
    share = -(-sum(q_sizes) // W)
    moved = 2 * B * k.shape[1] * D * (total - total // W)
    if op == "ulysses_attention":  # receives heads of q, k and v, sends out
        moved = 2 * B * (H + k.shape[1]) * D * max(share, total // W) * (W - 1) // W
    problem = Problem(
        op,
        M=B * H * share,
        N=max(1, min(total, before + after) // (2 if (before, after) == (UNBOUNDED, 0) else 1)),
        K=2 * D,
        dtype=q.dtype,
        moved_bytes=moved * k.element_size(),
        refusal="" if W <= _MOST_RANKS else f"a ring has at most {_MOST_RANKS} ranks, got {W}",
        host_refusal=_host_refusal(q, scale, geometry),
        kernel_refusal=too_wide(D, _WIDEST) if group.on_gpus(q.device) else "",
        attention=_attention_work(q, group, op, geometry),
    )
    engine = of_gradients = choose(problem, group, q.device)
    if engine == "host" and settings.current_engine() == "auto" and group.on_gpus(q.device):
        supported, _ = is_supported("triton", problem, group, q.device)
        row = 2 * B * k.shape[1] * D  # a token's keys and values
        held = _held_bytes(row, max(k_sizes), total, W, k.element_size())
        if supported and kernel_has_quicker_gradients(chip_of(q.device).name, D, held):
            of_gradients = "triton"
    return AttentionPlan(op, group, geometry, scale, engine, of_gradients, told)


def _held_bytes(row: int, longest: int, total: int, W: int, itemsize: int) -> int:
    """What gradients by the kernel hold: all ranks' keys, and a workspace of two halves, each of a
    shard and W shards of fp32 sums, rounded up to a power of two.
    """
    half = max(1, row * longest * (itemsize + 4 * W))
    return (row * total * itemsize if W > 1 else 0) + 2 * (1 << (half - 1).bit_length())


_MOST_HELD = 2 << 30  # of a GPU's memory, by gradients that are quicker for it


def kernel_has_quicker_gradients(chip: str, D: int, held_bytes: int) -> bool:
    """Whether the kernel's gradients are quicker than those of flash attention, torch's one way to
    make them in a fixed order: an H200 takes 0.71, 0.79 and, with heads of 64, 0.86 of its time.
    """
    return chip == "sm_90" and D <= 128 and held_bytes <= _MOST_HELD


def _host_refusal(q: torch.Tensor, scale: float, geometry: Geometry) -> str:
    if q.device.type == "cpu":
        return "" if scale > 0 else f"torch's CPU kernel needs scale > 0 for its mask, got {scale}"
    if not scale > 0:
        return f"torch's attention needs scale > 0, got {scale}"
    if geometry.sees.before < sum(geometry.q_sizes) - 1:
        return "torch's attention on GPUs has no window to the left"
    return gpu_refusal(q.device, q.dtype, q.shape[3])


def _attention_work(
    q: torch.Tensor, group: Group, op: str, geometry: Geometry
) -> AttentionWork | None:
    """What attention on GPUs is priced by."""
    if not group.on_gpus(q.device):
        return None
    W, sees, by_head = group.world_size, geometry.sees, op == "ulysses_attention"
    queries, keys = sum(geometry.q_sizes), sum(geometry.k_sizes)
    ends = sees.documents or (0, keys)
    alike = sum((end - start) ** 2 for start, end in pairwise(ends)) // max(keys, 1)
    return AttentionWork(
        batch=q.shape[0],
        heads=-(-q.shape[1] // W) if by_head else q.shape[1],
        head_dim=q.shape[3],
        queries=queries if by_head else -(-queries // W),
        keys=keys,
        seen=max(1, min(alike, sees.before + sees.after + 1)),
        parts=1 if by_head else W,
        documents=-(-(len(ends) - 1) // (1 if by_head else W)),
        causal=sees.after == 0 and sees.before >= queries - 1,
    )


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str) -> None:
    """Raise ValueError unless q can attend to k and v, and the layout is one of ours."""
    shapes = f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape:
        raise ValueError(f"q must be (B, H, n, D), k and v (B, H_kv, m, D), {shapes}")
    B, H, _, D = q.shape
    if k.shape[0] != B or k.shape[3] != D or D == 0 or not k.shape[1] or H % k.shape[1]:
        raise ValueError(f"k must have q's B and D, at least 1, and H_kv must divide H, {shapes}")
    for name, other in (("k", k), ("v", v)):
        if (other.dtype, other.device) != (q.dtype, q.device):
            raise ValueError(
                f"{name} must have q's dtype and device, {q.dtype} on {q.device}, got "
                f"{other.dtype} on {other.device}"
            )
    if not q.dtype.is_floating_point:
        raise ValueError(f"q, k and v must be of a floating-point dtype, got {q.dtype}")
    if layout not in ("contiguous", "zigzag"):
        raise ValueError(f'layout must be "contiguous" or "zigzag", got {layout!r}')


def _reach(causal: bool, window: int | Sequence[int] | None) -> tuple[int, int]:
    """How far a query sees to its left and right."""
    pair = (-1, -1) if window is None else (window, -1) if isinstance(window, int) else window
    fits = isinstance(pair, (tuple, list)) and len(pair) == 2 and min(pair) >= -1
    if not fits or (isinstance(window, int) and window < 0):
        raise ValueError(
            f"window must be a number of tokens >= 0, or (left, right) with -1 for no limit, got "
            f"{window}"
        )
    before, after = (UNBOUNDED if reach == -1 else min(reach, UNBOUNDED) for reach in pair)
    return before, 0 if causal else after


def _documents(cu_seqlens: torch.Tensor | Sequence[int] | None) -> tuple[int, ...] | None:
    if cu_seqlens is None:
        return None
    starts = cu_seqlens.tolist() if isinstance(cu_seqlens, torch.Tensor) else cu_seqlens
    documents = tuple(int(start) for start in starts)
    if not documents or documents[0] != 0 or list(documents) != sorted(documents):
        raise ValueError(
            f"cu_seqlens must begin with 0 and never decrease, got {documents[:8]}"
            f"{' ...' if len(documents) > 8 else ''}"
        )
    return documents


def _sizes_of_ranks(
    q: torch.Tensor,
    k: torch.Tensor,
    group: Group,
    op: str,
    told: tuple[Hashable, ...],
    sizes: Sequence[int] | None,
    key_sizes: Sequence[int] | None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows of q and of k of every rank: those given, after a check, or exchanged."""

    def call() -> str:
        given = () if sizes is None else (f"{sizes=}", f"{key_sizes=}")
        return call_of(op, (*told, *given)).text.decode()

    check_call(group, call)
    mine = (q.shape[2], k.shape[2])
    if sizes is None and key_sizes is None:
        pairs = [divmod(n, 1 << 31) for n in agree(group, op, (mine[0] << 31) + mine[1], told)]
        return tuple(n for n, _ in pairs), tuple(m for _, m in pairs)
    if sizes is None:
        raise ValueError(f"key_sizes needs sizes as well, got {key_sizes=}")
    lengths = [tuple(sizes), tuple(sizes if key_sizes is None else key_sizes)]
    for name, held, length in zip(("sizes", "key_sizes"), lengths, mine, strict=True):
        check_sizes(name, held, group, 2, length)
    return lengths[0], lengths[1]
