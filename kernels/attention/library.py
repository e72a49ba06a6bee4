"""Attention to some of the keys by the kernels that torch brings, none of which keeps the scores.

    CPUs    flash for CPUs: any dtype and width, masks
    GPUs    in half precision: cuDNN where torch itself prefers it, else flash, which may be
            FlashAttention-3 or -4 (`torch.nn.attention.activate_flash_attention_impl`); gradients
            by flash, which has a deterministic way, as torch's cuDNN has not

A part's output comes with the natural log-sum-exp (B, H, S) of its scores. Its gradients are asked
for with those over all keys, of whichever kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from weft.kernels.engine.chips import chip_of

_aten: Any = torch.ops.aten
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class KeyPart(NamedTuple):
    """Queries (B, H, S, D) and the keys and values (B, H_kv, S_k, D) that they attend to.

    Attributes:
        causal: query i sees keys 0 .. i.
        mask: added to the scores, (S, S_k).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    causal: bool
    mask: torch.Tensor | None = None


class WholeResult(NamedTuple):
    """Results over all keys, and the gradient of the output."""

    out: torch.Tensor
    lse: torch.Tensor
    grad_out: torch.Tensor

    def rows(self, rows: slice) -> WholeResult:
        """Of some of the queries."""
        return WholeResult(*(x[:, :, rows] for x in self))


class LocalKernels(NamedTuple):
    """torch's kernels for a kind of device.

    Attributes:
        forward: output and log-sum-exp.
        backward: gradients of q, k and v.
        operand: q, k or v as the kernels read it, a copy if need be.
        result: out or its gradient, likewise.
        merge: merges a part's output and log-sum-exp into those so far, in fp32 or wider, in place.
        square: `causal` needs as many queries as keys.
        columns: how many more of 0 they can read at no great cost; else 0.
    """

    forward: Callable[[KeyPart], tuple[torch.Tensor, torch.Tensor]]
    backward: Callable[[KeyPart, WholeResult], Gradients]
    operand: Callable[[torch.Tensor], torch.Tensor]
    result: Callable[[torch.Tensor], torch.Tensor]
    merge: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
    square: bool
    columns: int


def kernels_for(device: torch.device) -> LocalKernels:
    """Those that take tensors on `device`."""
    return CPU if device.type == "cpu" else GPU


def gpu_refusal(device: torch.device, dtype: torch.dtype, D: int) -> str:
    """Why torch's kernels cannot take heads of width D on this GPU; empty if they can."""
    chip = chip_of(device)
    if chip.is_amd or int(chip.name[3:]) < 80:
        return f"torch's attention is called on NVIDIA's chips from sm_80 on, this is {chip.name}"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this torch was built without flash attention"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"torch's attention takes bf16 and fp16 on GPUs, got {dtype}"
    widest = 256 if chip.name in _ROOMY else 192
    if D % 8 or widest < D:
        return f"torch's attention takes widths that 8 divides, up to {widest}, got {D}"
    return ""


def library_layout(x: torch.Tensor) -> torch.Tensor:
    """x with contiguous rows, which torch's CPU kernel assumes, and in no other dim neighbours.

    There the kernel would take its result, laid out like overlapping queries, for another layout.
    """
    return x if x.stride(-1) == 1 and 1 not in x.stride()[:-1] else x.contiguous()


def _cpu_forward(part: KeyPart) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        *part[:3], is_causal=part.causal, attn_mask=part.mask, scale=part.scale
    )
    if part.mask is not None:  # torch's kernel returns 0 for queries that see nothing
        lse = lse.masked_fill((part.mask < 0).all(-1), -torch.inf)
    return out, lse


def _cpu_merge(
    out: torch.Tensor, lse: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor
) -> None:
    # If neither saw anything, -inf - -inf is NaN.
    weight = torch.sigmoid(part_lse - lse).nan_to_num_(0.0)
    out.lerp_(part_out.to(out.dtype), weight.unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)


def _cpu_backward(part: KeyPart, whole: WholeResult) -> Gradients:
    out, lse, grad_out = whole
    made: Gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, *part[:3], out, lse, 0.0, part.causal, attn_mask=part.mask, scale=part.scale
    )
    return made


_ROOMY = ("sm_80", "sm_90", "sm_100", "sm_103")  # flash has gradients of heads wider than 192
# Where torch prefers cuDNN. For every new shape this makes a plan, a tenth of a second of the host:
# uneven shards and packed documents, which have many, are left to flash.
_CUDNN_CHIPS, _CUDNN_VERSION, _CUDNN_WIDEST = ("sm_90", "sm_100"), 91500, 128
_CUDNN_ROWS = 128  # what lengths must be multiples of


def _gpu_forward(part: KeyPart) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, scale, causal, _ = part
    if _by_cudnn(q, k):
        made = _aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, scale=scale
        )
    else:
        made = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    return made[0], made[1].reshape(q.shape[:3])  # of cuDNN (B, H, S, 1)


def _by_cudnn(q: torch.Tensor, k: torch.Tensor) -> bool:
    from torch.nn.attention import current_flash_attention_impl

    return (
        chip_of(q.device).name in _CUDNN_CHIPS
        and (torch.backends.cudnn.version() or 0) >= _CUDNN_VERSION
        and torch.backends.cuda.cudnn_sdp_enabled()
        and current_flash_attention_impl() is None
        and q.shape[3] <= _CUDNN_WIDEST
        and not (q.shape[2] % _CUDNN_ROWS or k.shape[2] % _CUDNN_ROWS)
    )


def _gpu_backward(part: KeyPart, whole: WholeResult) -> Gradients:
    (q, k, v, scale, causal, _), (out, lse, grad_out) = part, whole
    lengths = None, None, q.shape[2], k.shape[2]  # not packed
    random = q.new_empty(2, dtype=torch.uint64), q.new_empty((), dtype=torch.uint64)  # not read
    results = out, lse.contiguous()
    with _deterministic():
        made: Gradients = _aten._scaled_dot_product_flash_attention_backward(
            grad_out, q, k, v, *results, *lengths, 0.0, causal, *random, scale=scale
        )
    return made


def _gpu_merge(*outs_and_lses: torch.Tensor) -> None:
    from weft.kernels.attention.merge_kernel import launch_merge

    launch_merge(*outs_and_lses)


_one_at_a_time = threading.Lock()


@contextmanager
def _deterministic() -> Iterator[None]:
    """As under torch.use_deterministic_algorithms(True), but new memory is not filled.

    That is of the whole process, in which several ranks may be threads.
    """
    memory: Any = torch.utils.deterministic
    with _one_at_a_time:
        mode, filled = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
        torch.set_deterministic_debug_mode("error")
        memory.fill_uninitialized_memory = False
        try:
            yield
        finally:
            memory.fill_uninitialized_memory = filled
            torch.set_deterministic_debug_mode(mode)


def _aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """x with rows without gaps that begin at multiples of 16 bytes, as GPUs read them."""
    aligned = x.data_ptr() % 16 == 0 and all(n > 0 and n % 8 == 0 for n in x.stride()[:-1])
    if x.stride(-1) == 1 and aligned:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _tokens_first(x: torch.Tensor) -> torch.Tensor:
    """x (B, H, S, D), in memory (B, S, H, D): flash's backward would copy each part."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


_on_cpu = _cpu_forward, _cpu_backward, library_layout, library_layout, _cpu_merge
CPU = LocalKernels(*_on_cpu, square=False, columns=1)
_on_gpu = _gpu_forward, _gpu_backward, _aligned_rows, _tokens_first, _gpu_merge
GPU = LocalKernels(*_on_gpu, square=True, columns=0)
