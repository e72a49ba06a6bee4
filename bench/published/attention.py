"""Attention of one GPU, and over a sharded sequence."""

from __future__ import annotations

import re
from dataclasses import dataclass

from weft.bench.published.rows import InexpressibleError, Row
from weft.bench.published.times import Time, has, row_fabric
from weft.collectives import protocols
from weft.collectives.prices import library
from weft.collectives.prices.hardware import Hardware


@dataclass(frozen=True)
class _Shape:
    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool


def _attention_shape(row: Row) -> _Shape:
    heads = re.search(r"heads (\d+)(?:\s*/\s*(\d+))?(?:\s*x\s*(\d+))?", row.text)
    dim = re.search(r"(?:head[_ ]?dim|hdim|headdim|\bd)\s*[=:]?\s*(\d+)", row.text)
    batch = re.search(r"batch\s*[=:]?\s*(\d+)", row.text)
    width = int(heads[3]) if heads and heads[3] else int(dim[1]) if dim else row.size("K")
    if not 16 <= width <= 512:
        raise InexpressibleError(f"heads of {width} elements")
    if heads:
        count = int(heads[1])
    elif row.N:
        count = row.size("N")
    elif "flop" in row.unit.lower():
        count = 16  # a rate does not depend on it
    else:
        raise InexpressibleError("the number of heads is not stated")
    causal = "causal" in row.text and not re.search(r"non-?\s?causal|not causal", row.text)
    kv_heads = int(heads[2]) if heads and heads[2] else count
    batches = int(batch[1]) if batch else 1
    return _Shape(batches, row.size("M"), count, kv_heads, width, causal)


def _passes(row: Row) -> tuple[bool, ...]:
    """Forward, backward or both."""
    words = f"{row.op} {row.what}".lower()
    forward = bool(re.search(r"forward|fwd", words)) or not re.search(r"backward|bwd", words)
    return (False,) * forward + (True,) * bool(re.search(r"backward|bwd", words))


def _kernels_of(row: Row, default: library.Attention) -> library.Attention:
    if has(row, r"fa-?2|flash[-_ ]?attn[-_ ]?2|flashattention-?2|flash_attn\b"):
        return "FA2"
    if has(row, r"fa-?4|flash[-_ ]?att(n|ention)[-_ ]?4"):
        return "FA4"
    if "cudnn" in row.what.lower():
        return "cuDNN"
    return "FA3" if has(row, r"fa-?3|flash[-_ ]?att(n|ention)[-_ ]?3") else default


def attention_time(row: Row, hardware: Hardware) -> Time:
    """A library's kernels, or Triton's at the rate of FlashAttention-2."""
    shape, passes = _attention_shape(row), _passes(row)
    own = has(row, r"triton|weft")
    rows = row.ranks if row.world else 1
    best: library.Attention = "cuDNN" if hardware.chip in ("sm_90", "sm_100") else "FA2"
    kernels = _kernels_of(row, "FA2" if own else best)
    us = sum(_attention_us(hardware, kernels, shape, each, shape.tokens, True) for each in passes)
    flops = sum(
        library.attention_flops(
            shape.batch, shape.tokens, shape.tokens, shape.heads, shape.head_dim, shape.causal, each
        )
        for each in passes
    )
    return Time("fused" if own else "library", us / rows, f"{kernels}'s rate", flops / rows)


def _attention_us(
    hardware: Hardware, kernels: library.Attention, shape: _Shape, backward: bool, keys: int,
    diagonal: bool,
) -> float:  # fmt: skip
    return library.attention_us(
        hardware, kernels, batch=shape.batch, queries=keys, keys=keys, heads=shape.heads,
        head_dim=shape.head_dim, causal=shape.causal and diagonal, backward=backward,
    )  # fmt: skip


def ring_time(row: Row, hardware: Hardware) -> Time:
    """Attention over a sharded sequence, composed of a library's kernels and sends."""
    shape, W = _attention_shape(row), row.ranks
    if not shape.causal:
        raise InexpressibleError("a ring without a causal mask")
    kernels, own = _kernels_of(row, "FA2"), has(row, "weft|fused|triton")
    whole = sum(
        _attention_us(hardware, kernels, shape, each, shape.tokens, True) for each in _passes(row)
    )
    merge = library.moved_us(
        hardware,
        4.0 * library.MERGE_PASSES * shape.batch * shape.tokens // W * shape.heads * shape.head_dim,
    )
    merges = merge * W * len(_passes(row))
    part = shape.tokens // W
    chunk = 2 * shape.batch * part * shape.kv_heads * shape.head_dim * 2
    sent = protocols.nccl_us("all_gather", W * chunk, row_fabric(row, hardware))
    if has(row, "ideal"):
        return Time("library", whole / W, f"{kernels}'s rate on a part of the work")
    if own:
        return Time("fused", whole / W + sent / W, "attention, the first chunk's way exposed")
    if has(row, "zigzag"):
        return Time("library", whole / W + merges, f"even work, {W} merges by torch")
    if has(row, "strip"):
        steps = sum(
            W * _attention_us(hardware, kernels, shape, each, part, True) for each in _passes(row)
        )
        return Time("library", steps + merges, f"{W} diagonal blocks, {W} merges by torch")
    if has(row, "llama3|all-?gather"):
        return Time("library", whole / W + sent, "even work after an all-gather")
    last = sum(
        (W - 1) * _attention_us(hardware, kernels, shape, each, part, False)
        + _attention_us(hardware, kernels, shape, each, part, True)
        for each in _passes(row)
    )
    return Time("library", last + merges, "the last rank sees all keys")
