"""Attention over sharded sequences and caches as custom ops.

    torch.ops.weft.ring_attention               the public function, given the name of a group
    torch.ops.weft.ring_attention_backward      its gradients, by the engines' own backward
    torch.ops.weft.tokens_to_heads, heads_to_tokens
                                                the swaps of ulysses_attention: each is the other's
                                                gradient
    torch.ops.weft.head_attention               ulysses_attention without a ring group: on GPUs one
                                                launch
    torch.ops.weft.head_attention_backward      its gradients
    torch.ops.weft.ulysses_attention            made of these: see `_ulysses_attention`
    torch.ops.weft.flash_decode                 without a gradient, like the functions
    torch.ops.weft.append_to_cache

How ops are registered, and what traced calls assume: `weft.collectives.custom_ops`. Lengths of
shards are found when attention runs, as its results do not depend on them; the swaps take them for
equal if `sizes` is None, and check it. The group "" is this process by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.collectives import Group, resolve
from weft.collectives.custom_ops import compose, define, differentiate, gathered_sizes, world_of
from weft.collectives.ranks.group import alone
from weft.collectives.sizes import even_sizes
from weft.kernels.attention import swaps, ulysses
from weft.kernels.attention.decode import append_to_cache, flash_decode
from weft.kernels.attention.plan import AttentionOptions, AttentionPlan, plan_attention
from weft.kernels.attention.ring import ring_attention, ring_gradients, saved_with
from weft.kernels.engine.local_matmul import sum_dtype
from weft.settings import current_engine

_ops: Any = torch.ops.weft


def _group(name: str) -> Group:
    return resolve(name) if name else alone()


def _run(attention: Callable[..., Any]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """out and lse of a public function, given the name of a group."""

    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group_name: str, *args: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        options = AttentionOptions(*args, **named)._asdict()
        out, lse = attention(q, k, v, _group(group_name), return_lse=True, **options)
        return out, lse

    return run


_ring_attention = _run(ring_attention)
_head_attention = _run(ulysses.ulysses_attention)


def _attention_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=sum_dtype(q))


def _attention_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, *before, cu_seqlens, sizes, key_sizes = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)
    ctx.options = before, (sizes, key_sizes)
    ctx.set_materialize_grads(False)


def _attention_grads(op: str) -> Callable[..., tuple[Any, ...]]:
    def grads(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        *saved, cu_seqlens = ctx.saved_tensors
        before, after = ctx.options
        dq, dk, dv = getattr(_ops, op)(*saved, *grads, *before, cu_seqlens, *after)
        return dq, dk, dv, *[None] * 8

    return grads


def _forward_plan(
    op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group_name: str, *options: Any
) -> AttentionPlan:
    """The plan of the forward."""
    return plan_attention(q, k, v, _group(group_name), AttentionOptions(*options), op)


# Their first arguments are _KEPT: q, k, v, out, lse and the gradients of the last two.
def _ring_attention_backward(*args: Any) -> tuple[torch.Tensor, ...]:
    call = _forward_plan("ring_attention", *args[:3], *args[7:])
    grads = ring_gradients(call, saved_with(args[:5], args[5:7]))
    return tuple(grad.contiguous() for grad in grads)


def _head_attention_backward(*args: Any) -> tuple[torch.Tensor, ...]:
    qkv, grads, options = args[:3], args[5:7], args[7:]
    call = _forward_plan(swaps.OP, *qkv, *options)
    if ulysses.in_one_launch(call):
        made = ulysses.head_gradients(call, saved_with(args[:5], grads))
        return tuple(grad.contiguous() for grad in made)
    # The other engines differentiate what they exchanged, which was not kept: run them again.
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in qkv]
        pairs = zip(_head_attention(*inputs, *options), grads, strict=True)
        used = [(y, dy) for y, dy in pairs if dy is not None]
        torch.autograd.backward([y for y, _ in used], [dy for _, dy in used])
    return tuple(torch.zeros_like(x) if x.grad is None else x.grad.contiguous() for x in inputs)


def _heads(heads: int, kv_heads: int, of_keys: bool, world_size: int) -> swaps.HeadsByRank:
    return swaps.split_heads(heads, kv_heads, world_size)[of_keys]


def _tokens_to_heads(
    x: torch.Tensor, group_name: str, heads: int, kv_heads: int, of_keys: bool, sizes: Any = None
) -> torch.Tensor:
    group = resolve(group_name)
    rows = tuple(even_sizes(x, group, 2, sizes))
    return swaps.to_heads(x, group, _heads(heads, kv_heads, of_keys, group.world_size), rows)


def _tokens_to_heads_fake(
    x: torch.Tensor, group_name: str, heads: int, kv_heads: int, of_keys: bool, sizes: Any = None
) -> torch.Tensor:
    rank, W = world_of(group_name)
    mine = _heads(heads, kv_heads, of_keys, W)[rank]
    rows = gathered_sizes(x.shape[2], group_name, sizes)
    return x.new_empty(x.shape[0], len(mine), sum(rows), x.shape[3])


def _heads_to_tokens(
    x: torch.Tensor, group_name: str, heads: int, kv_heads: int, of_keys: bool, sizes: Any = None
) -> torch.Tensor:
    group = resolve(group_name)
    W = group.world_size
    rows = tuple([x.shape[2] // W] * W if sizes is None else sizes)
    given = _heads(heads, kv_heads, of_keys, W)
    return swaps.heads_to_tokens(x, group, given, rows, kv_heads if of_keys else heads)


def _heads_to_tokens_fake(
    x: torch.Tensor, group_name: str, heads: int, kv_heads: int, of_keys: bool, sizes: Any = None
) -> torch.Tensor:
    rank, W = world_of(group_name)
    rows = x.shape[2] // W if sizes is None else sizes[rank]
    return x.new_empty(x.shape[0], kv_heads if of_keys else heads, rows, x.shape[3])


def _swap_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.options = inputs[1:]


def _tokens_to_heads_grads(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return _ops.heads_to_tokens(grad, *ctx.options), *[None] * 5


def _heads_to_tokens_grads(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return _ops.tokens_to_heads(grad, *ctx.options), *[None] * 5


def _ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group_name: str,
    ring_group_name: str = "",
    causal: bool = False,
    scale: float | None = None,
    layout: str = "contiguous",
    window: list[int] | None = None,
    cu_seqlens: torch.Tensor | None = None,
    return_lse: bool = False,
    sizes: list[int] | None = None,
    key_sizes: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """On GPUs one op, elsewhere three, which keep what they exchanged for their gradients."""
    if not ring_group_name and (q.is_cuda or current_engine() == "triton"):
        out, lse = _ops.head_attention(
            q, k, v, group_name, causal, scale, layout, window, cu_seqlens, sizes, key_sizes
        )
        return out, lse if return_lse else None
    heads, key_sizes = (q.shape[1], k.shape[1]), sizes if key_sizes is None else key_sizes
    q = _ops.tokens_to_heads(q, group_name, *heads, False, sizes)
    k, v = (_ops.tokens_to_heads(x, group_name, *heads, True, key_sizes) for x in (k, v))
    if q.shape[1]:
        out, lse = _ops.ring_attention(
            q, k, v, ring_group_name, causal, scale, layout, window, cu_seqlens
        )
    else:
        out, lse = ulysses.no_heads(q, k, v)
    out = _ops.heads_to_tokens(out, group_name, *heads, False, sizes)
    if return_lse:
        lse = _ops.heads_to_tokens(lse.unsqueeze(-1), group_name, *heads, False, sizes)
    return out, lse.squeeze(-1) if return_lse else None


def _flash_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    group_name: str,
    scale: float | None = None,
    shard: Any = "sequence",
    block_size: int | None = None,
    block_table: torch.Tensor | None = None,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = flash_decode(
        q, k_cache, v_cache, lengths, _group(group_name), scale=scale, shard=shard,
        block_size=block_size, block_table=block_table, window=window, return_lse=True,
    )  # fmt: skip
    return out, lse


def _flash_decode_fake(
    q: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=sum_dtype(q))


def _append_to_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    group_name: str,
    shard: Any = "sequence",
    block_size: int | None = None,
    block_table: torch.Tensor | None = None,
) -> None:
    append_to_cache(
        k, v, k_cache, v_cache, lengths, _group(group_name), shard=shard, block_size=block_size,
        block_table=block_table,
    )  # fmt: skip


_OPTIONS = (
    "bool causal=False, float? scale=None, str layout='contiguous', int[]? window=None, "
    "Tensor? cu_seqlens=None"
)
_SIZES = "SymInt[]? sizes=None, SymInt[]? key_sizes=None"
_SWAP = "Tensor x, str group_name, int heads, int kv_heads, bool of_keys, SymInt[]? sizes=None"

_GIVEN = "Tensor q, Tensor k, Tensor v, str group_name"
_KEPT = "Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? grad_out, Tensor? grad_lse"

for _name, _forward, _backward in (
    ("ring_attention", _ring_attention, _ring_attention_backward),
    ("head_attention", _head_attention, _head_attention_backward),
):
    define(
        f"{_name}({_GIVEN}, {_OPTIONS}, {_SIZES}) -> (Tensor, Tensor)", _forward, _attention_fake
    )
    define(
        f"{_name}_backward({_KEPT}, str group_name, bool causal, float? scale, str layout, "
        "int[]? window, Tensor? cu_seqlens, SymInt[]? sizes, SymInt[]? key_sizes) "
        "-> (Tensor, Tensor, Tensor)",
        _backward,
        lambda q, k, v, *rest: tuple(x.new_empty(x.shape) for x in (q, k, v)),
    )
    differentiate(_name, _attention_setup, _attention_grads(f"{_name}_backward"))

define(f"tokens_to_heads({_SWAP}) -> Tensor", _tokens_to_heads, _tokens_to_heads_fake)
define(f"heads_to_tokens({_SWAP}) -> Tensor", _heads_to_tokens, _heads_to_tokens_fake)
differentiate("tokens_to_heads", _swap_setup, _tokens_to_heads_grads)
differentiate("heads_to_tokens", _swap_setup, _heads_to_tokens_grads)
compose(
    "ulysses_attention(Tensor q, Tensor k, Tensor v, str group_name, str ring_group_name='', "
    f"{_OPTIONS}, bool return_lse=False, {_SIZES}) -> (Tensor, Tensor?)",
    _ulysses_attention,
)

define(
    "flash_decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor lengths, str group_name, "
    "float? scale=None, str shard='sequence', int? block_size=None, Tensor? block_table=None, "
    "int? window=None) -> (Tensor, Tensor)",
    _flash_decode, _flash_decode_fake,
)  # fmt: skip
define(
    "append_to_cache(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor lengths, "
    "str group_name, str shard='sequence', int? block_size=None, Tensor? block_table=None) -> ()",
    _append_to_cache, lambda *args, **kwargs: None, ordered=False,
)  # fmt: skip
