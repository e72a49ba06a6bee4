"""The host engine of `ring_attention`: attention part by part, at the speed of torch's own kernel.

Softmax over keys that arrive in parts: each part gives an output and the log-sum-exp of its
scores, and two of them merge exactly:

    out = out_a * sigmoid(lse_a - lse_b) + out_b * sigmoid(lse_b - lse_a)
    lse = log(exp(lse_a) + exp(lse_b))

In backward, torch's kernel is given the output and log-sum-exp over *all* keys, so that its
probabilities are the final ones and the gradients of the parts simply add up. No matrix of scores
is kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from weft.collectives import Exchange, exchange
from weft.kernels.flash.geometry import Geometry, Rectangle, Visibility, rectangles_between

if TYPE_CHECKING:
    from weft.kernels.attention.plan import AttentionPlan
    from weft.kernels.attention.ring import Gradients, Saved


class Total:
    """A sum (B, H, S, D), in `memory`, of parts that each cover some rows.

    The memory is not zeroed if the first part covers all rows.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory, self._begun = memory, False

    def add(self, rows: slice, part: torch.Tensor) -> None:
        """Add `part` to these rows."""
        if self._begun:
            self._memory[:, :, rows].add_(part)
        elif part.shape == self._memory.shape:
            self._memory.copy_(part)
        else:
            self._memory.zero_()[:, :, rows].copy_(part)
        self._begun = True

    def result(self) -> torch.Tensor:
        return self._memory if self._begun else self._memory.zero_()


class PartialAttention:
    """Attention of queries (B, H, S, D) to the keys so far, in fp32 or wider."""

    def __init__(self, q: torch.Tensor, sees: Visibility, scale: float) -> None:
        self._q, self._sees, self._scale = contiguous_rows(q), sees, scale
        wide = torch.promote_types(q.dtype, torch.float32)
        self._out = torch.empty(q.shape, dtype=wide, device=q.device)
        self._lse = torch.empty(q.shape[:3], dtype=wide, device=q.device)
        self._begun = False

    def add(self, k: torch.Tensor, v: torch.Tensor, rectangles: Iterable[Rectangle]) -> None:
        """Attend to more keys, k and v (B, H_kv, S_k, D), in the given `rectangles`."""
        if not _any_work(self._q, k):
            return
        k, v = contiguous_rows(k), contiguous_rows(v)
        for rectangle in rectangles:
            rows, keys = slice(*rectangle.queries), slice(*rectangle.keys)
            mask = _mask(rectangle, self._sees, self._q)
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                self._q[:, :, rows],
                k[:, :, keys],
                v[:, :, keys],
                is_causal=rectangle.kind == "causal",
                attn_mask=mask,
                scale=self._scale,
            )
            if mask is not None:  # torch's kernel returns 0 for queries that see nothing
                lse = lse.masked_fill((mask < 0).all(-1), -torch.inf)
            self._merge(rows, out, lse)

    def _merge(self, rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        if not self._begun and lse.shape == self._lse.shape:
            self._begun = True
            self._out.copy_(out)
            self._lse.copy_(lse)
            return
        total, seen = (x[:, :, rows] for x in self.result())
        # If neither saw anything, -inf - -inf is NaN.
        weight = torch.sigmoid(lse - seen).nan_to_num_(0.0)
        total.lerp_(out.to(total.dtype), weight.unsqueeze(-1))
        torch.logaddexp(seen, lse, out=seen)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The output (B, H, S, D) and log-sum-exp (B, H, S): 0 and -inf where nothing was seen."""
        if not self._begun:
            self._begun = True
            self._out.zero_()
            self._lse.fill_(-torch.inf)
        return self._out, self._lse


class AttentionGrad:
    """Gradients of a finished attention, collected part by part.

    Attributes:
        dq: the sum over the rectangles so far, in fp32 or wider.
    """

    def __init__(self, saved: Saved, sees: Visibility, scale: float) -> None:
        q, _, _, out, lse, grad_out, grad_lse = saved
        self._sees, self._scale, self._width = sees, scale, q.shape[3]
        self._lse = lse.masked_fill(lse == -torch.inf, 0.0)  # exp(-inf - 0) is 0
        self.dq = Total(torch.empty(q.shape, dtype=lse.dtype, device=q.device))
        self._columns = 0
        if grad_lse is not None:
            # d(score) = p * (dp - sum(grad_out * out) + grad_lse). An extra column, in which q, k
            # and v are 0, brings the last term into the sum.
            self._columns = 1
            out = torch.cat([out, torch.ones_like(out[..., :1])], -1)
            grad_out = torch.cat([grad_out, -grad_lse.unsqueeze(-1).to(grad_out.dtype)], -1)
        self._q = self._widened(q)
        self._out, self._grad_out = out, contiguous_rows(grad_out)

    def add(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        rectangles: Iterable[Rectangle],
        dk: Total,
        dv: Total,
    ) -> None:
        """Add the gradients of the `rectangles` to `dq`, and to dk and dv (B, H_kv, S_k, D)."""
        if not _any_work(self._q, k):
            return
        k, v = self._widened(k), self._widened(v)
        for rectangle in rectangles:
            rows, keys = slice(*rectangle.queries), slice(*rectangle.keys)
            grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                self._grad_out[:, :, rows],
                self._q[:, :, rows],
                k[:, :, keys],
                v[:, :, keys],
                self._out[:, :, rows],
                self._lse[:, :, rows],
                0.0,
                rectangle.kind == "causal",
                attn_mask=_mask(rectangle, self._sees, self._q),
                scale=self._scale,
            )
            where = ((self.dq, rows), (dk, keys), (dv, keys))
            for (total, part), grad in zip(where, grads, strict=True):
                total.add(part, grad[..., : self._width])

    def _widened(self, x: torch.Tensor) -> torch.Tensor:
        return functional.pad(x, (0, self._columns)) if self._columns else contiguous_rows(x)


def contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    """x with contiguous rows, which torch's kernel assumes, and in no other dim neighbours.

    There the kernel would take its result, laid out like overlapping queries, for another layout.
    """
    return x if x.stride(-1) == 1 and 1 not in x.stride()[:-1] else x.contiguous()


def _any_work(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether no size is 0: torch's kernel divides by them."""
    return q.numel() > 0 and k.numel() > 0


def _mask(rectangle: Rectangle, sees: Visibility, q: torch.Tensor) -> torch.Tensor | None:
    """0 where a query sees a key and -inf where not, (rows, keys) of the rectangle."""
    if rectangle.kind != "band":
        return None
    rows = (
        torch.arange(*rectangle.queries, device=q.device) - rectangle.queries[0] + rectangle.shift
    )
    keys = torch.arange(*rectangle.keys, device=q.device) - rectangle.keys[0]
    distance = keys - rows.unsqueeze(1)
    hidden = (distance < -sees.before) | (distance > sees.after)
    return torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(
        hidden, -torch.inf
    )


def _publish_keys(ex: Exchange, k: torch.Tensor, v: torch.Tensor) -> None:
    """Publish this rank's k and v (B, H_kv, m, D) to all peers."""
    if ex.world_size == 1:
        return
    shown = ex.local((2, *k.shape), k.dtype)
    shown[0].copy_(k)
    shown[1].copy_(v)
    ex.signal_all()


def _peers_keys(
    ex: Exchange, peer: int, k: torch.Tensor, geometry: Geometry
) -> tuple[torch.Tensor, torch.Tensor]:
    """`peer`'s k and v, in place, once it has published them."""
    ex.wait(peer)
    shown = ex.peer(peer, _shape_of(k, peer, geometry), k.dtype)
    return shown[0], shown[1]


def _shape_of(k: torch.Tensor, rank: int, geometry: Geometry) -> tuple[int, ...]:
    """Shape of k and v of `rank` together, or of their gradients."""
    return (2, *k.shape[:2], geometry.k_sizes[rank], k.shape[3])


def _shown_bytes(k: torch.Tensor, geometry: Geometry, dtype: torch.dtype) -> int:
    if len(geometry.k_sizes) == 1:
        return 0
    return 2 * k.shape[0] * k.shape[1] * k.shape[3] * max(geometry.k_sizes) * dtype.itemsize


def host_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse: over the own keys, then over each peer's in place."""
    geometry, rank = call.geometry, call.group.rank
    partial = PartialAttention(q, geometry.sees, call.scale)
    nbytes = _shown_bytes(k, geometry, k.dtype)
    with exchange(call.group, nbytes, "ring_attention", q.device, channel="ring keys") as ex:
        _publish_keys(ex, k, v)
        partial.add(k, v, rectangles_between(geometry, rank, rank))
        for peer in ex.peers():
            if seen := rectangles_between(geometry, rank, peer):
                partial.add(*_peers_keys(ex, peer, k, geometry), seen)
        out, lse = partial.result()
        return ex.result(out.to(q.dtype)), ex.result(lse)


def host_backward(call: AttentionPlan, saved: Saved) -> Gradients:
    """dq, dk and dv: see the backward in `ring`."""
    group, geometry, (q, k, v, *_) = call.group, call.geometry, saved
    rank, W, op, wide = group.rank, group.world_size, "ring_attention backward", saved.lse.dtype
    grad = AttentionGrad(saved, geometry.sees, call.scale)
    dk, dv = (Total(torch.empty(k.shape, dtype=wide, device=k.device)) for _ in range(2))
    nbytes = _shown_bytes(k, geometry, k.dtype)
    with exchange(group, nbytes, op, q.device, channel="ring keys") as keys:
        _publish_keys(keys, k, v)
        grad.add(k, v, rectangles_between(geometry, rank, rank), dk, dv)
        nbytes = _shown_bytes(k, geometry, wide)
        for step in range(1, W):
            if not any(rectangles_between(geometry, r, (r + step) % W) for r in range(W)):
                continue
            owner, source = (rank + step) % W, (rank - step) % W
            with exchange(group, nbytes, op, q.device, channel="ring gradients") as ex:
                if seen := rectangles_between(geometry, rank, owner):
                    parts = [Total(x) for x in ex.local(_shape_of(k, owner, geometry), wide)]
                    grad.add(*_peers_keys(keys, owner, k, geometry), seen, *parts)
                    for part in parts:
                        part.result()  # in place, also where there was nothing to add
                ex.signal_all()
                if rectangles_between(geometry, source, rank):
                    ex.wait(source)
                    dk_part, dv_part = ex.peer(source, _shape_of(k, rank, geometry), wide)
                    for total, part in ((dk, dk_part), (dv, dv_part)):
                        total.add(slice(None), part)
                        ex.result(total.result())
        gradients = grad.dq.result().to(q.dtype), dk.result().to(k.dtype), dv.result().to(k.dtype)
        for gradient in gradients:
            keys.result(gradient)
    return gradients
