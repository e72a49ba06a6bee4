"""The host engine of `ring_attention`: attention part by part, at the speed of torch's own kernels.

Softmax over keys that arrive in parts: each part gives an output and the log-sum-exp of its
scores, and two of them merge exactly:

    out = out_a * sigmoid(lse_a - lse_b) + out_b * sigmoid(lse_b - lse_a)
    lse = log(exp(lse_a) + exp(lse_b))

In backward, torch's kernel (`library`) is given the output and log-sum-exp over *all* keys, so that
its probabilities are the final ones and the gradients of the parts simply add up. No matrix of
scores is kept.

On a CPU a peer's keys are read in place. On a GPU the copy engines fetch them, in a stream beside
the one that attends:

    attends   publish | own keys ... | keys of r + 1 ... | keys of r + 2 ... | keys of r + 3 ...
    fetches           | r + 1 | r + 2               | r + 3              | r + 4

into two rooms by turns, so a rank holds two shards besides its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from weft.collectives import Exchange, exchange
from weft.kernels.attention.library import KeyPart, WholeResult, kernels_for
from weft.kernels.engine.local_matmul import sum_dtype
from weft.kernels.engine.shards import copy_stream
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
    """Attention of queries (B, H, S, D) to the keys so far.

    The first part's results are kept as they come, in q's dtype; others are merged into them in
    fp32 or wider.
    """

    def __init__(self, q: torch.Tensor, sees: Visibility, scale: float) -> None:
        self._kernels = kernels_for(q.device)
        self._q, self._sees, self._scale = self._kernels.operand(q), sees, scale
        self._wide = sum_dtype(q)
        self._out, self._lse = q.new_empty(0), q.new_empty(0)
        self._begun = False

    def add(self, k: torch.Tensor, v: torch.Tensor, rectangles: Iterable[Rectangle]) -> None:
        """Attend to more keys, k and v (B, H_kv, S_k, D), in the given `rectangles`."""
        if not _any_work(self._q, k):
            return
        k, v = self._kernels.operand(k), self._kernels.operand(v)
        for rectangle in _calls_for(rectangles, self._kernels.square):
            part = _part_of(rectangle, self._q, k, v, self._sees, self._scale)
            self._merge(slice(*rectangle.queries), *self._kernels.forward(part))

    def _merge(self, rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        if not self._begun and out.shape == self._q.shape:
            self._begun, self._out, self._lse = True, out, lse
            return
        self._begin()
        self._out = self._out.to(self._wide)
        self._kernels.merge(self._out[:, :, rows], self._lse[:, :, rows], out, lse)

    def _begin(self) -> None:
        if not self._begun:
            shape = self._q.shape
            self._out = self._q.new_zeros(shape, dtype=self._wide)
            self._lse = self._q.new_full(shape[:3], -torch.inf, dtype=self._wide)
            self._begun = True

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The output (B, H, S, D), in q's dtype, and log-sum-exp (B, H, S), in fp32 or wider, both
        contiguous: 0 and -inf where nothing was seen.
        """
        self._begin()
        return self._out.to(self._q.dtype).contiguous(), self._lse.contiguous()


class AttentionGrad:
    """Gradients of a finished attention, collected part by part.

    Attributes:
        dq: the sum over the rectangles so far, in fp32 or wider.
    """

    def __init__(self, saved: Saved, sees: Visibility, scale: float) -> None:
        q, _, _, out, lse, grad_out, grad_lse = saved
        self._kernels = kernels_for(q.device)
        self._sees, self._scale, self._width = sees, scale, q.shape[3]
        lse = lse.masked_fill(lse == -torch.inf, 0.0)  # exp(-inf - 0) is 0
        self.dq = Total(torch.empty(q.shape, dtype=lse.dtype, device=q.device))
        self._columns = 0
        self._of_lse: WholeResult | None = None
        # d(score) = p * (dp - sum(grad_out * out) + grad_lse).
        if grad_lse is not None and self._kernels.columns:
            # An extra column, in which q, k and v are 0, brings the last term into the sum.
            self._columns = self._kernels.columns
            out = torch.cat([out, torch.ones_like(out[..., :1])], -1)
            grad_out = torch.cat([grad_out, -grad_lse.unsqueeze(-1).to(grad_out.dtype)], -1)
        elif grad_lse is not None:
            # A second call brings it, in which v is 0, and so dp.
            one, of_one = torch.zeros_like(out), torch.zeros_like(out)
            one[..., 0], of_one[..., 0] = 1, -grad_lse
            self._of_lse = WholeResult(one, lse, of_one)
        self._q = self._widened(q)
        result = self._kernels.result
        self._whole = WholeResult(result(out), lse, result(grad_out))

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
        for rectangle in _calls_for(rectangles, self._kernels.square):
            rows, keys = slice(*rectangle.queries), slice(*rectangle.keys)
            part = _part_of(rectangle, self._q, k, v, self._sees, self._scale)
            grads = self._kernels.backward(part, self._whole.rows(rows))
            where = ((self.dq, rows), (dk, keys), (dv, keys))
            for (total, at), grad in zip(where, grads, strict=True):
                total.add(at, grad[..., : self._width])
            if self._of_lse is not None:
                part = part._replace(v=torch.zeros_like(part.v))
                grads = self._kernels.backward(part, self._of_lse.rows(rows))
                for (total, at), grad in zip(where[:2], grads[:2], strict=True):
                    total.add(at, grad)

    def _widened(self, x: torch.Tensor) -> torch.Tensor:
        return functional.pad(x, (0, self._columns)) if self._columns else self._kernels.operand(x)


def _any_work(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether no size is 0: torch's kernel divides by them."""
    return q.numel() > 0 and k.numel() > 0


def _calls_for(rectangles: Iterable[Rectangle], square: bool) -> Iterator[Rectangle]:
    """The calls to make: if `square`, queries beyond a causal rectangle's keys see all of them."""
    for rectangle in rectangles:
        (first, last), (begin, end) = rectangle.queries, rectangle.keys
        middle = first + end - begin
        if square and rectangle.kind == "causal" and middle < last:
            yield Rectangle((first, middle), rectangle.keys, "causal")
            yield Rectangle((middle, last), rectangle.keys, "full")
        else:
            yield rectangle


def _part_of(
    rectangle: Rectangle,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sees: Visibility,
    scale: float,
) -> KeyPart:
    rows, keys = slice(*rectangle.queries), slice(*rectangle.keys)
    mask = _mask(rectangle, sees, q)
    operands = q[:, :, rows], k[:, :, keys], v[:, :, keys]
    return KeyPart(*operands, scale, rectangle.kind == "causal", mask)


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


def _publish_by_host(ex: Exchange, k: torch.Tensor, v: torch.Tensor) -> None:
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


def _arriving(
    ex: Exchange, k: torch.Tensor, geometry: Geometry, peers: Sequence[int]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """k and v of each of `peers`, good until the next are asked for."""
    if k.is_cuda:
        return _fetched(ex, k, geometry, peers)
    return (_peers_keys(ex, peer, k, geometry) for peer in peers)


def _fetched(
    ex: Exchange, k: torch.Tensor, geometry: Geometry, peers: Sequence[int]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same, copied by the copy engines. The first two are under way when this returns."""
    main, side = torch.cuda.current_stream(k.device), copy_stream(k.device)
    shapes = [_shape_of(k, peer, geometry) for peer in peers]
    rooms = [k.new_empty(max(map(math.prod, shapes))) for _ in peers[:2]]
    for room in rooms:
        room.record_stream(side)  # should the call fail, its copies may outlast it

    def fetch(i: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        into = rooms[i % 2][: math.prod(shapes[i])].view(shapes[i])
        side.wait_stream(main)  # what was in this room has been read
        with torch.cuda.stream(side):
            ex.wait(peers[i])
            into.copy_(ex.peer(peers[i], shapes[i], k.dtype))
            arrived = torch.cuda.Event()
            arrived.record(side)
        return into, arrived

    under_way = [fetch(i) for i in range(len(rooms))]

    def each() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for i in range(len(peers)):
            here, arrived = under_way[i % 2]
            main.wait_event(arrived)
            yield here[0], here[1]
            if i + 2 < len(peers):
                under_way[i % 2] = fetch(i + 2)

    return each()


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
    """out and lse: over the own keys, then over each peer's."""
    geometry, rank = call.geometry, call.group.rank
    partial = PartialAttention(q, geometry.sees, call.scale)
    nbytes = _shown_bytes(k, geometry, k.dtype)
    with exchange(
        call.group, nbytes, "ring_attention", q.device, channel="ring keys", told=call.told
    ) as ex:  # fmt: skip
        _publish_by_host(ex, k, v)
        seen = {peer: rectangles_between(geometry, rank, peer) for peer in ex.peers()}
        wanted = [peer for peer in seen if seen[peer]]
        arriving = _arriving(ex, k, geometry, wanted)
        partial.add(k, v, rectangles_between(geometry, rank, rank))
        for peer, (keys, values) in zip(wanted, arriving, strict=True):
            partial.add(keys, values, seen[peer])
        out, lse = partial.result()
        return ex.result(out), ex.result(lse)


def host_backward(call: AttentionPlan, saved: Saved) -> Gradients:
    """dq, dk and dv: see the backward in `ring`."""
    group, geometry, (q, k, v, *_) = call.group, call.geometry, saved
    rank, W, op, wide = group.rank, group.world_size, "ring_attention backward", saved.lse.dtype
    grad = AttentionGrad(saved, geometry.sees, call.scale)
    dk, dv = (Total(torch.empty(k.shape, dtype=wide, device=k.device)) for _ in range(2))
    nbytes = _shown_bytes(k, geometry, k.dtype)
    told = call.told
    with exchange(group, nbytes, op, q.device, channel="ring keys", told=told) as keys:
        _publish_by_host(keys, k, v)
        peers = [(rank + step) % W for step in range(1, W)]
        wanted = [peer for peer in peers if rectangles_between(geometry, rank, peer)]
        arriving = _arriving(keys, k, geometry, wanted)
        grad.add(k, v, rectangles_between(geometry, rank, rank), dk, dv)
        nbytes = _shown_bytes(k, geometry, wide)
        for step in range(1, W):
            if not any(rectangles_between(geometry, r, (r + step) % W) for r in range(W)):
                continue
            owner, source = (rank + step) % W, (rank - step) % W
            with exchange(
                group, nbytes, op, q.device, channel="ring gradients", told=told
            ) as ex:  # fmt: skip
                if seen := rectangles_between(geometry, rank, owner):
                    parts = [Total(x) for x in ex.local(_shape_of(k, owner, geometry), wide)]
                    grad.add(*next(arriving), seen, *parts)
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
