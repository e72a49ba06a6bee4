"""`context_parallel`: a plain model's attention over sequences that are sharded across a mesh.

    with context_parallel(mesh, buffers=[tokens, labels, turns], buffer_seq_dims=[1, 1, 0]):
        loss = ...          # the buffers hold this rank's tokens; attention reaches all ranks'

Within the block every buffer is cut along its sequence dim, in the zigzag order that balances
causal work (see `weft.kernels.flash.geometry`), and
`torch.nn.functional.scaled_dot_product_attention` on plain tensors is `weft.ring_attention`.
Tensors that depend on positions, such as RoPE's table, must be among the buffers: their rows then
stay with their tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from weft.collectives import Group, all_gather, resolve
from weft.kernels import from_zigzag, ring_attention, to_zigzag, zigzag_sizes


class _RingAttention(TorchFunctionMode):
    """Makes scaled_dot_product_attention of plain tensors ring attention over `group`."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group = group

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if attn_mask is not None or dropout_p > 0:
            raise NotImplementedError(
                f"attention within context_parallel takes no attn_mask and no dropout: its keys "
                f"lie on all ranks. Got attn_mask={None if attn_mask is None else 'a tensor'}, "
                f"{dropout_p=}; use is_causal, or weft.ring_attention with window= or cu_seqlens= "
                f"(transformers makes masks of positions that jump: see docs/frameworks.md)"
            )
        if query.ndim != 4 or (query.shape[1] != key.shape[1] and not enable_gqa):
            raise ValueError(
                f"attention within context_parallel takes (batch, heads, sequence, width), and "
                f"fewer key heads than query heads with enable_gqa=True only; got query "
                f"{tuple(query.shape)}, key {tuple(key.shape)}"
            )
        result: torch.Tensor = ring_attention(
            query, key, value, self._group, causal=is_causal, scale=scale, layout="zigzag"
        )
        return result


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: list[torch.Tensor] | None = None,
    buffer_seq_dims: list[int] | None = None,
    no_restore_buffers: set[torch.Tensor] | None = None,
) -> Iterator[None]:
    """Shard `buffers` along their sequence dims, and let attention reach the keys of all ranks.

    Args:
        mesh: 1-D.
        buffers: tensors that every rank holds whole: inputs, labels, tables of positions, but no
            parameters. They are changed in place, and are whole again after the block.
        buffer_seq_dims: the dim of each buffer along which tokens lie.
        no_restore_buffers: those of `buffers` that need not be whole again.

    Raises:
        ValueError: not one dim for each buffer; a buffer that requires a gradient or is a view;
            `no_restore_buffers` that are not among the buffers.

    Example:
        2 ranks, a buffer [0 1 2 3 4 5 6 7]: within the block it is [0 1 6 7] on rank 0 and
        [2 3 4 5] on rank 1.
    """
    buffers, dims = buffers or [], buffer_seq_dims or []
    kept = no_restore_buffers or set()
    group = resolve(mesh)
    _check_one_each(buffers, dims)
    ours = {id(buffer) for buffer in buffers}
    if any(id(buffer) not in ours for buffer in kept):
        raise ValueError("no_restore_buffers must be among buffers")
    for buffer, dim in zip(buffers, dims, strict=True):
        if buffer.requires_grad or buffer._is_view() or not -buffer.ndim <= dim < buffer.ndim:
            raise ValueError(
                f"a buffer must have the given sequence dim, need no gradient and not be a view: "
                f"got {tuple(buffer.shape)}, {dim=}, requires_grad={buffer.requires_grad}, "
                f"a view: {buffer._is_view()}"
            )
    wholes = [buffer.detach().clone() for buffer in buffers]
    try:
        for buffer, dim in zip(buffers, dims, strict=True):
            _replace(buffer, _own_part(buffer, dim, group))
        with _RingAttention(group):
            yield
    finally:
        for buffer, whole in zip(buffers, wholes, strict=True):
            if not any(buffer is other for other in kept):
                _replace(buffer, whole)


def _check_one_each(buffers: Sequence[torch.Tensor], dims: Sequence[int]) -> None:
    if len(buffers) != len(dims):
        raise ValueError(
            f"give the sequence dim of each buffer: got {len(dims)} dims for {len(buffers)} buffers"
        )


def _own_part(whole: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    sizes = zigzag_sizes(whole.shape[dim], group.world_size)
    part: torch.Tensor = to_zigzag(whole, group.world_size, dim).split(sizes, dim)[group.rank]
    return part


def _replace(buffer: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        buffer.set_(value.contiguous())  # type: ignore[call-overload]


def context_parallel_unshard(
    mesh: DeviceMesh, buffers: Sequence[torch.Tensor], seq_dims: Sequence[int]
) -> list[torch.Tensor]:
    """The whole tensors, in order, of which `context_parallel` left parts; differentiable.

    Args:
        mesh: that of the `context_parallel`.
        buffers: this rank's parts, such as the outputs of the model.
        seq_dims: the dim of each along which tokens lie.

    Raises:
        ValueError: not one dim for each buffer.
    """
    group = resolve(mesh)
    _check_one_each(buffers, seq_dims)
    return [
        from_zigzag(all_gather(part, group, dim=dim), group.world_size, dim)
        for part, dim in zip(buffers, seq_dims, strict=True)
    ]
