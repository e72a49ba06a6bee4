"""Attention of a sequence sharded over the ranks: forward, or a training step, in several ways.

    q, k, v (1, heads, S/W, E)  ->  out (1, heads, S/W, E), and the gradients of all three

Variants:

    ring                 `ring_attention`; causal sequences in zigzag layout, for even work
    triton               the same by its kernel, on a GPU
    ulysses              `ulysses_attention`, contiguous
    torch ring           the ring of torch's context_parallel, zigzag too; as that does not support
                         CPUs, the ring is called directly, with torch's CPU kernel
    ring, in turn        the same, but every exchange ends before the next attention begins
    gather + attention   the process group gathers keys and values, contiguous; causal by a mask

The bound, "arithmetic", is torch's attention of whole sequences by a W-th of the heads: as many
multiplications, no communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring
from torch.nn import functional

import weft
from weft.bench.problem import INPUTS, Call, Options, Prepared
from weft.collectives import all_gather, chunk_sizes, resolve
from weft.kernels import from_zigzag, to_zigzag, zigzag_sizes

MAIN, PEER = "ring", "gather + attention"
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_aten: Any = torch.ops.aten


@dataclass(frozen=True)
class AttentionTask:
    """Attention of one whole sequence; with its gradients if `backward`."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    backward: bool


@dataclass(frozen=True)
class _Cut:
    """How a whole (1, heads, S, E) lies on the ranks."""

    zigzag: bool
    tokens: int
    rank: int
    world_size: int

    @property
    def sizes(self) -> list[int]:
        return (zigzag_sizes if self.zigzag else chunk_sizes)(self.tokens, self.world_size)

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        whole = to_zigzag(whole, self.world_size, 2) if self.zigzag else whole
        part: torch.Tensor = whole.split(self.sizes, 2)[self.rank].contiguous()
        return part

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        whole = all_gather(part, dim=2, sizes=self.sizes)
        return from_zigzag(whole, self.world_size, 2) if self.zigzag else whole


def prepare(problem: AttentionTask, options: Options) -> Prepared:
    """Each variant on this rank. Calls return the placement of their results, and the results."""
    group, device = resolve(None), torch.device(options.device)
    W, S, causal = group.world_size, problem.tokens, problem.causal
    even, plain = (_Cut(zigzag, S, group.rank, W) for zigzag in (causal, False))
    generator = torch.Generator(device).manual_seed(0)

    def drawn(heads: int) -> torch.Tensor:
        shape = (1, heads, S, problem.head_dim)
        return torch.randn(shape, generator=generator, device=device).to(options.dtype)

    counts = (problem.heads, problem.kv_heads, problem.kv_heads)
    wholes = [[drawn(count) for count in counts] for _ in range(INPUTS)]
    dout = drawn(problem.heads)

    def on_parts(attention: Attention, cut: _Cut) -> Call:
        inputs = [[cut.part(x).requires_grad_(problem.backward) for x in each] for each in wholes]
        grad = cut.part(dout) if problem.backward else None
        return lambda i: (cut, _outputs_and_gradients(attention, inputs[i], grad))

    def ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        layout: Any = "zigzag" if even.zigzag else "contiguous"
        y: torch.Tensor = weft.ring_attention(
            q, k, v, causal=causal, layout=layout, sizes=even.sizes
        )
        return y

    def ulysses(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = weft.ulysses_attention(q, k, v, causal=causal, sizes=plain.sizes)
        return y

    variants = {MAIN: on_parts(ring, even), "ulysses": on_parts(ulysses, plain)}
    absent: dict[str, str] = {}
    if device.type == "cuda":
        variants["triton"] = with_our_kernel(variants[MAIN])
    peers = ("torch ring", "ring, in turn", PEER)
    if S % (2 * W):
        absent = dict.fromkeys(peers, "the process group takes equal shards only")
    elif options.gpus_shared:
        # Nor does Gloo survive it: functional collectives hand it addresses that only GPUs have.
        absent = dict.fromkeys(peers, "ranks share a GPU, where nothing overlaps")
    else:
        for name, in_turn in zip(peers, (False, True), strict=False):
            variants[name] = on_parts(_torch_ring(causal, in_turn), even)
        variants[PEER] = on_parts(_attention_on_gathered(plain, causal, device), plain)

    def expected() -> list[torch.Tensor]:
        # On a GPU torch has attention without a matrix of all scores up to fp32 only.
        wide = torch.float32 if device.type == "cuda" else torch.float64
        whole = [x.to(wide).requires_grad_(problem.backward) for x in wholes[0]]
        attention = _ungrouped(causal) if device.type == "cuda" else _whole_attention(causal)
        return _outputs_and_gradients(attention, whole, dout.to(wide) if problem.backward else None)

    bounds = {}
    if problem.heads % W == 0:
        shares = [problem.heads // W, *[max(1, problem.kv_heads // W)] * 2]
        some = [
            [
                x[:, :share].clone().requires_grad_(problem.backward)
                for x, share in zip(each, shares, strict=True)
            ]
            for each in wholes
        ]
        grad = dout[:, : shares[0]] if problem.backward else None
        bounds["arithmetic"] = lambda i: _outputs_and_gradients(
            _whole_attention(causal), some[i], grad
        )
    return Prepared(
        variants,
        bounds,
        expected=expected,
        tolerance=TOLERANCE[options.dtype],
        observe=lambda value: [value[0].whole(x) for x in value[1]],
        main=MAIN,
        peer=PEER if PEER in variants else "",
        absent=absent,
    )


def _outputs_and_gradients(
    attention: Attention, operands: list[torch.Tensor], grad: torch.Tensor | None
) -> list[torch.Tensor]:
    """The output, and, given its gradient, those of the operands."""
    if grad is None:
        return [attention(*operands)]
    for x in operands:
        x.grad = None
    out = attention(*operands)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in operands if x.grad is not None)]


def with_our_kernel(call: Call) -> Call:
    """The call by our kernel, whatever `auto` would take."""

    def forced(i: int) -> Any:
        with weft.engine("triton"):
            return call(i)

    return forced


def _whole_attention(causal: bool) -> Attention:
    return lambda q, k, v: functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=True
    )


def _ungrouped(causal: bool) -> Attention:
    """The same with every key head repeated: not all of torch's kernels take groups."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return attention


def _attention_on_gathered(cut: _Cut, causal: bool, device: torch.device) -> Attention:
    """All keys and values by the process group's gather, whose gradient is its reduce-scatter."""
    mask = None
    if causal:
        positions = torch.arange(cut.tokens, device=device)
        mask = positions <= cut.part(positions.view(1, 1, -1, 1)).view(-1, 1)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (funcol.all_gather_tensor_autograd(x, 2, _world()) for x in (k, v))
        if device.type == "cuda":  # with a mask its quick kernels take no groups
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        return functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    return attention


def _torch_ring(causal: bool, in_turn: bool) -> Attention:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _TorchRing.apply(q, k, v, causal, in_turn)
        return y

    return attention


class _TorchRing(torch.autograd.Function):
    """torch's attention on a GPU under context_parallel, by the device's own kernel."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, in_turn: bool
    ) -> torch.Tensor:
        op = (
            _aten._scaled_dot_product_flash_attention
            if q.is_cuda
            else _aten._scaled_dot_product_flash_attention_for_cpu
        )
        with _exchanging(causal, in_turn):
            out, lse, *ctx.rest = torch_ring._templated_ring_attention(
                _world(), 2, op, q, k, v, is_causal=causal
            )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal, ctx.in_turn = causal, in_turn
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        options: dict[str, Any] = {"dropout_p": 0.0}
        op = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        if q.is_cuda:
            op = _aten._scaled_dot_product_flash_attention_backward
            names = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")
            options |= dict(zip(names, ctx.rest, strict=False))
        with _exchanging(ctx.causal, ctx.in_turn):
            dq, dk, dv, *_ = torch_ring._templated_ring_attention_backward(
                _world(), 2, op, grad, "grad_out", q, k, v, out, lse, ctx.causal, **options
            )
        return dq, dk, dv, None, None


def _world() -> Any:
    return dist.group.WORLD


@contextmanager
def _exchanging(causal: bool, in_turn: bool) -> Iterator[None]:
    """Set torch's ring up: zigzag if causal; exchanges beside the attention, or before it."""
    rotater = _in_turn if in_turn else torch_ring._create_rotater
    with (
        patch.object(torch_ring._cp_options, "enable_load_balance", causal),
        patch.object(torch_ring, "_create_rotater", rotater),
    ):
        yield


class _InTurn(torch_ring._AllToAllRotater):
    """Passes buffers on to the next rank, and waits until they are there."""

    def exchange_buffers(self, curr_buffer: torch.Tensor) -> None:
        super().exchange_buffers(curr_buffer)
        self._buffer = self.next_buffer()


def _in_turn(pg: Any, seq_dim: int, method: Any = None) -> _InTurn:
    return _InTurn(pg, seq_dim)
