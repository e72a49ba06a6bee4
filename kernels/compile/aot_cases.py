"""What every kernel is launched with, caught instead of launched: the cases of `weft aot`.

The launchers themselves run, on tensors without memory whose device is taken for the chip, so that
arguments, alignment and configuration are the real ones. Sizes are those of a 70B Llama on 8 ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock, patch

import torch
import triton

from weft.collectives import chunk_sizes
from weft.collectives.device import stream_signals
from weft.collectives.kernels import collective_launch, multimem, pull, pull_boxes
from weft.kernels.attention import merge_kernel
from weft.kernels.attention.cache import Cache
from weft.kernels.attention.decode import WIDEST_BYTES
from weft.kernels.attention.ring import Saved
from weft.kernels.device import gathers
from weft.kernels.engine import chips
from weft.kernels.engine.chips import Chip
from weft.kernels.engine.epilogues import Activation
from weft.kernels.engine.fp8 import Scaling
from weft.kernels.expert_kernels import (
    combine_launch,
    contract_grouped_kernel,
    dispatch_launch,
    few_tokens_launch,
)
from weft.kernels.expert_kernels.expert_tiles import RowTable
from weft.kernels.flash import (
    append_kernel,
    decode_kernel,
    grad_tiles,
    ring_grad_kernel,
    ring_kernel,
)
from weft.kernels.flash.geometry import (
    UNBOUNDED,
    Geometry,
    SequenceLayout,
    Visibility,
    zigzag_sizes,
)
from weft.kernels.heads import heads_grad_kernel, heads_kernel
from weft.kernels.matmul import (
    all_gather_launch,
    contract_kernel,
    copy_engines,
    one_shot_kernel,
    reduce_scatter_kernel,
    two_shot_kernel,
)
from weft.kernels.norm import rms_norm_launch
from weft.kernels.norm.rms_norm import WIDEST


@dataclass(frozen=True)
class Launch:
    """A launch that was caught instead of made."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]


class _Catcher:
    def __init__(self, kernel: Any, caught: list[Launch]) -> None:
        self._kernel, self._caught = kernel, caught

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            names = self._kernel.arg_names
            options = {k: v for k, v in kwargs.items() if k not in names}
            named = {k: v for k, v in kwargs.items() if k in names}
            arguments = dict(zip(names, args, strict=False)) | named
            if missing := set(names) - set(arguments):
                raise TypeError(f"{self._kernel.__name__} misses {sorted(missing)}")
            self._caught.append(Launch(self._kernel, grid, arguments, options))

        return launch


@contextmanager
def catching(*modules: ModuleType) -> Iterator[list[Launch]]:
    """Collect the launches of the kernels of `modules` instead of making them."""
    caught: list[Launch] = []
    with ExitStack() as stack:
        for module in modules:
            catchers: dict[str, Any] = {
                name: _Catcher(value, caught)
                for name, value in vars(module).items()
                if isinstance(value, triton.JITFunction) and name.endswith("_kernel")
            }
            if catchers:
                stack.enter_context(patch.multiple(module, **catchers))
        yield caught


class _Attributes(SimpleNamespace):
    """One that can be referred to weakly, as workspaces are."""


def _workspace() -> Any:
    table = torch.empty(_W, dtype=torch.int64, device="meta")
    return _Attributes(
        group=SimpleNamespace(on_gpus=lambda device: True, virtual=None),
        rank=0,
        world_size=_W,
        device=table.device,
        buffer_ptrs=table,
        signal_ptrs=table,
        half_bytes=1 << 36,
        timeout_ns=600 * 10**9,
        buffer=SimpleNamespace(multicast_ptr=1 << 40, pad_of=lambda rank: table),
        tensor=lambda rank, parity, shape, dtype, offset=0: torch.empty(
            shape, dtype=dtype, device="meta"
        ),
        repeat=lambda key, operands, make: make(),
        kept_launches=dict,
    )


# Widths of a 70B Llama on 8 ranks; `tokens` decides between the tiles for prefill and for decode.
_W, _HIDDEN, _FFN, _QKV = 8, 8192, 3584, (1024, 128, 128)


class _Gather(NamedTuple):
    """`gradient`: of a reduce-scatter, whose w is transposed and whose dw needs all of x."""

    case: str
    tokens: int
    widths: tuple[int, ...] = (_FFN,)
    activation: Activation | None = None
    keep_sums: bool = False
    gradient: bool = False


def _gather_cases(scaled: bool, wide: bool) -> list[_Gather]:
    kinds: list[tuple[str, int, Activation | None, bool]] = [
        ("plain", 1, None, False), ("gelu kept", 1, "gelu", not scaled),
        ("swiglu", 2, "swiglu", False), ("swiglu kept", 2, "swiglu", not scaled),
    ]  # fmt: skip
    pair = (_FFN, _FFN)
    cases = [
        _Gather("up", 1536),
        _Gather("up, gelu", 1536, activation="gelu"),
        _Gather("up, gelu, kept", 1536, activation="gelu", keep_sums=not scaled),
        _Gather("gate and up", 1536, pair, "swiglu"),
        _Gather("qkv", 1536, _QKV),
        _Gather("up, 1024 tokens", 1024),
        _Gather("up, by copy engines", 16384),
        _Gather("up, in halves", 4096),
        _Gather("up, gelu, by copy engines", 16384, activation="gelu", keep_sums=not scaled),
        _Gather("gate and up, by copy engines", 16384, pair, "swiglu"),
        _Gather("up, 256 tokens", 256),
        _Gather("up, 128 tokens", 128, activation="silu"),
        _Gather("up, 8 tokens", 8),
        _Gather("gate and up, 8 tokens", 8, (512, 512), "swiglu"),
    ]
    if not scaled:  # which has no gradients
        cases.append(_Gather("d(down)", 1536, gradient=True))
    if wide:
        # Tiles of other sizes do not differ, except in `group_m`.
        sizes = [(16, 500), (16, _FFN), (32, 500), (64, 500), (64, _FFN), (256, _FFN), (512, _FFN)]
        sizes += [(2048, 500), (2048, _FFN), (4096, 500)]
        cases += [
            _Gather(f"{width}, {kind}, {tokens} tokens", tokens, (width,) * count, activation, keep)
            for tokens, width in sizes
            for kind, count, activation, keep in kinds
        ]
        if not scaled:
            cases += [
                _Gather(f"d(down), {tokens} tokens", tokens, gradient=True)
                for tokens in (64, 16384)
            ]
    return cases


def _all_gather_launches(
    dtype: torch.dtype, empty: Callable[[int, int], torch.Tensor], wide: bool
) -> Iterator[tuple[str, Launch]]:
    op, scaled = all_gather_launch, dtype.itemsize == 1
    out_dtype = torch.bfloat16 if scaled else dtype
    for case, tokens, widths, activation, keep_sums, gradient in _gather_cases(scaled, wide):
        share = tokens // _W
        if gradient:
            weights = [empty(_HIDDEN, n) for n in widths]
        else:  # nn.Linear holds (N, K): its transpose is contiguous along K
            weights = [empty(n, _HIDDEN).T for n in widths]
        biases = None
        if activation == "gelu" or widths == _QKV:  # where models have them
            biases = [torch.empty(n, dtype=out_dtype, device="meta") for n in widths]
        by_engines = patch.object(copy_engines, "Fetching", MagicMock())
        with catching(op, gathers) as caught, by_engines:
            op.launch_all_gather_matmul(
                empty(share, _HIDDEN),
                weights,
                _workspace(),
                [share] * _W,
                biases=biases,
                activation=activation,
                keep_sums=keep_sums,
                with_own=gradient,
                scaling=_meta_scaling(dtype, share, widths),
            )
        # All use one publish kernel.
        yield from ((case, launch) for launch in (caught if case == "up" else caught[-1:]))


def _weight_gradient_launches(
    empty: Callable[[int, int], torch.Tensor], wide: bool
) -> Iterator[tuple[str, Launch]]:
    x, dy = empty(8192 // _W, _HIDDEN), empty(8192, _FFN)
    # Of a gathered x, with dw laid out like w and rows kept for another dw; of a scattered y.
    outs = [("weight gradient", empty(_FFN, _HIDDEN).T), ("weight gradient of down", None)]
    for case, out in outs if wide else outs[:1]:
        with catching(contract_kernel, gathers) as caught:
            contract_kernel.launch_all_gather_contract(
                x, dy, _workspace(), [1024] * _W, out=out, with_own=out is not None
            )
        yield case, caught[-1]


def _reduce_launches(
    dtype: torch.dtype, empty: Callable[[int, int], torch.Tensor], wide: bool
) -> Iterator[tuple[str, Launch]]:
    scaled = dtype.itemsize == 1
    out_dtype = torch.bfloat16 if scaled else dtype
    scatters = [
        ("down", 8192, (_FFN,)),
        ("down, 1024 tokens", 1024, (_FFN,)),
        ("d(up)", 8192, (_FFN,)),
        ("d(qkv)", 8192, _QKV),
        ("d(gate and up)", 8192, (_FFN, _FFN)),
        ("down, 128 tokens", 128, (_FFN,)),
        ("down, 8 tokens", 8, (_FFN,)),
        ("down, 16 bits sent", 8192, (_FFN,)),
        ("down, 8 tokens, 16 bits sent", 8, (_FFN,)),
    ]
    sums = [
        ("two shots", 8192, _HIDDEN),
        ("two shots, 128 tokens", 128, _HIDDEN),
        ("two shots, 16 tokens", 16, _HIDDEN),
        ("one shot", 4, _HIDDEN),
        ("one shot, narrow", 16, 1024),
        ("two shots, 16 bits sent", 8192, _HIDDEN),
    ]
    if wide:
        # 496 is not a whole number of steps. Depths that are not multiples of 16 bytes leave rows
        # unaligned, and large tiles of them spill: up to 490 bytes in bf16, 1,360 in fp8.
        for tokens in (32, 64, 256, 512, 2048):
            scatters += [(f"down, {tokens} tokens", tokens, (depth,)) for depth in (496, _FFN)]
            scatters.append((f"d(qkv), {tokens} tokens", tokens, _QKV))
            sums += [(f"sum of {n}, {tokens} tokens", tokens, n) for n in (1000, 4096, _HIDDEN)]

    def wire(case: str) -> torch.dtype | None:
        return torch.bfloat16 if "16 bits" in case else None

    def row(columns: int) -> torch.Tensor:
        return torch.empty(columns, dtype=out_dtype, device="meta")

    def rows(tokens: int, columns: int) -> torch.Tensor:
        return torch.empty(tokens, columns, dtype=out_dtype, device="meta")

    for case, tokens, depths in scatters:
        gradient = case.startswith("d(")  # of a gather: w lies the other way
        if scaled and gradient:
            continue
        sizes = [tokens // _W] * _W
        with catching(reduce_scatter_kernel, one_shot_kernel) as caught:
            reduce_scatter_kernel.launch_matmul_reduce_scatter(
                [empty(tokens, k) for k in depths],
                [empty(k, _HIDDEN) if gradient else empty(_HIDDEN, k).T for k in depths],
                _workspace(),
                sizes,
                bias=None if gradient else row(_HIDDEN),
                residual=None if gradient else rows(sizes[0], _HIDDEN),
                scaling=_meta_scaling(dtype, tokens, (_HIDDEN,)),
                wire_dtype=wire(case),
            )
        yield case, caught[0]
    for case, tokens, columns in sums:
        with catching(two_shot_kernel, one_shot_kernel) as caught:
            two_shot_kernel.launch_matmul_all_reduce(
                empty(tokens, _FFN),
                empty(columns, _FFN).T,
                _workspace(),
                bias=row(columns),
                residual=rows(tokens, columns),
                scaling=_meta_scaling(dtype, tokens, (columns,)),
                wire_dtype=wire(case),
            )
        yield case, caught[0]
    if dtype in multimem.DTYPES and chips.chip_of(empty(1, 1).device).descriptors:
        x, w = empty(8192, _FFN), empty(_HIDDEN, _FFN).T
        config = two_shot_kernel.two_shot_config(len(x), _HIDDEN, dtype, chips.chip_of(x.device))
        with catching(two_shot_kernel) as caught:
            two_shot_kernel.launch_matmul_all_reduce(
                x, w, _workspace(), residual=rows(len(x), _HIDDEN), wire_dtype=dtype,
                config=replace(config, by_switch=True),
            )  # fmt: skip
        yield "two shots by the switch", caught[0]


def _collective_launches(chip: Chip, dtype: torch.dtype) -> Iterator[tuple[str, Launch]]:
    op, ws = collective_launch, _workspace()
    with catching(stream_signals, copy_engines, gathers) as caught:
        stream_signals.begin(ws)
        stream_signals.wait_in_stream(ws, 1)
        stream_signals.end_in_stream(ws)
        stream_signals.end_in_stream(ws, [torch.empty(8, 8, dtype=dtype, device="meta")] * 2)
        sizes_of = [8, 8] + [0] * (_W - 2)
        fetching = copy_engines.Fetching(ws, sizes_of, 8, dtype, 8, None, eager=False)
        fetching.publish(torch.empty(8, 8, dtype=dtype, device="meta"), None, 8, 32, 32)
        fetching.start(torch.empty(16, 8, dtype=dtype, device="meta"), None, None)
        fetching.finish([torch.empty(8, 8, dtype=dtype, device="meta")] * 2)
    yield from (("signals of a stream", launch) for launch in caught)
    reduced = dtype in op.REDUCED
    for case, count in (("collective", 8 * 8192), ("odd sizes", 8 * 8191 + 1)):
        x = torch.empty(count, dtype=dtype, device="meta")
        sizes = [count // _W] * _W if case == "collective" else chunk_sizes(count, _W)
        nbytes = max(sizes) * dtype.itemsize
        with catching(op) as caught:
            part, whole = x[: sizes[0]], x
            config = op.collective_config("all_gather", nbytes, _W, on_gpus=True)
            op.launch_all_gather(part, whole, ws, sizes, config)
            if reduced:
                registers = not chip.is_amd
                config = op.collective_config("reduce_scatter", nbytes, _W, on_gpus=True)
                config = replace(config, all_registers=registers)
                op.launch_reduce(x, part, ws, sizes, "sum", config)
                config = op.collective_config("all_reduce", 1 << 20, _W, on_gpus=True)
                config = replace(config, all_registers=registers)
                op.launch_reduce(x, torch.empty_like(x), ws, None, "avg", config)
        yield from ((case, launch) for launch in caught)
    x, everyone = torch.empty(1024, 1024, dtype=dtype, device="meta"), tuple(range(_W))
    pulls = [("pull", (1,), None), *[("pull of sums", everyone, "sum")] * reduced]
    for case, holders, reduce_op in pulls:
        box = pull_boxes.Box(holders, (1024, 128), 0, (1024, 1), 0, (128, 1))
        table = pull_boxes.table_of([box], 0, dtype, x.device, op=reduce_op)
        with catching(pull) as caught:
            pull.launch_pull(x, torch.empty_like(x[:, :128]), ws, table, publish=True)
        yield from ((case, launch) for launch in caught)
    if chip.descriptors and dtype in multimem.DTYPES:  # of the same generation as multicast
        part, sizes = x[:128], [128 * 1024] * _W
        with catching(multimem) as caught:
            multimem.launch_switched("all_gather", part, x, ws, sizes)
            multimem.launch_switched("reduce_scatter", x, part, ws, sizes)
            multimem.launch_switched("all_reduce", x, x, ws, sizes)
        yield from (("by the switch", launch) for launch in caught)


def _norm_launches(dtype: torch.dtype, wide: bool) -> Iterator[tuple[str, Launch]]:
    norms = [("norm", 8, _HIDDEN), ("norm, two shots", 512, _HIDDEN)]
    norms += [(f"{case}, {how}", T, H) for case, T, H in norms for how in ("whole", "fp8")]
    if wide:
        widths = (1000, 2049, 4096, 5120, WIDEST)
        norms += [
            (f"norm of {H}, {tokens} tokens", tokens, H) for H in widths for tokens in (1, 512)
        ] + [(f"norm of {WIDEST}, 512 tokens, fp8", 512, WIDEST)]
    for case, tokens, H in norms:
        x, weight = (torch.empty(*size, dtype=dtype, device="meta") for size in ((tokens, H), (H,)))
        share, whole = -(-tokens // _W), case.endswith(("whole", "fp8"))
        with catching(rms_norm_launch) as caught:
            rms_norm_launch.launch_sum_rms_norm(
                x,
                _workspace(),
                share,
                weight=weight,
                residual=x if whole else x[:share],
                eps=1e-6,
                whole=whole,
                quantizes=case.endswith("fp8"),
            )
        yield case, caught[0]
    chip = chips.chip_of(torch.device("meta"))
    words = [("norm by words", 8, False, False), ("norm by words, one shot", 1, True, False)]
    for case, tokens, one_shot, fp8 in (*words, ("norm by words, fp8", 64, False, True)):
        x = torch.empty(tokens, _HIDDEN, dtype=dtype, device="meta")
        share = -(-tokens // _W)
        config = rms_norm_launch.by_words(tokens, share, _HIDDEN, dtype, one_shot, chip)
        with catching(rms_norm_launch) as caught:
            rms_norm_launch.launch_sum_rms_norm(
                x, _workspace(), share, weight=x[0], residual=x, eps=1e-6, whole=True,
                quantizes=fp8, config=config,
            )  # fmt: skip
        yield case, caught[0]
    if chip.descriptors and dtype in multimem.DTYPES:
        for tokens, fp8 in ((8, False), (64, True)):
            x = torch.empty(tokens, _HIDDEN, dtype=dtype, device="meta")
            share = tokens // _W
            config = rms_norm_launch.rms_norm_config(tokens, share, _HIDDEN, dtype, _W, chip)
            config = replace(config, one_shot=False, by_switch=True, teams=1)
            with catching(rms_norm_launch) as caught:
                rms_norm_launch.launch_sum_rms_norm(
                    x, _workspace(), share, weight=x[0], residual=x, eps=1e-6, whole=True,
                    quantizes=fp8, config=config,
                )  # fmt: skip
            yield f"norm by the switch, {tokens} tokens", caught[0]


_HEADS = 8, 1  # of queries and of keys, on each rank
_HEAD_WIDTHS = (16, 64, 80, 192, 256)


def _attention_launches(dtype: torch.dtype, wide: bool) -> Iterator[tuple[str, Launch]]:
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    # Rows of a rank, width of a head, how far back a query sees, and whether documents are packed
    # (on shards of odd lengths, with a gradient of the log-sum-exp). Tiles of gradients do not
    # depend on the rows, so small ones are for the forward alone.
    shards = [
        ("attention", 1024, 128, UNBOUNDED, False),
        ("attention, window", 1024, 64, 4096, False),
        ("attention, D 256", 1024, 256, UNBOUNDED, False),
        ("attention, 16 rows", 16, 128, UNBOUNDED, False),
        ("attention, packed", 1003, 128, UNBOUNDED, True),
    ]
    if wide:
        shards += [
            (f"attention, D {D}, {rows} rows", rows, D, UNBOUNDED, False)
            for D in _HEAD_WIDTHS
            for rows in (16, 64, 1024)
        ]
        shards += [(f"attention, D {D}, packed", 1003, D, UNBOUNDED, True) for D in (64, 80, 256)]

    ways: list[tuple[str, int, Callable[..., Any], Callable[..., Any]]] = [
        (
            "attention", 1,
            ring_kernel.launch_ring_attention, ring_grad_kernel.launch_ring_attention_backward,
        ),
        (
            "attention by heads", _W,
            heads_kernel.launch_head_attention, heads_grad_kernel.launch_head_attention_backward,
        ),
    ]  # fmt: skip
    modules = ring_kernel, ring_grad_kernel, heads_kernel, heads_grad_kernel
    for way, times, forward, backward in ways:
        for case, rows, D, before, packed in shards:
            plain, total = before == UNBOUNDED and not packed, rows * _W
            layout: SequenceLayout = "zigzag" if (packed if times > 1 else plain) else "contiguous"
            sizes = tuple((zigzag_sizes if layout == "zigzag" else chunk_sizes)(total, _W))
            documents = (0, total // 3, total) if packed else None
            geometry = Geometry(sizes, sizes, layout, Visibility(total, before, 0, documents))
            q, k = (empty(1, times * heads, sizes[0], D) for heads in _HEADS)
            with catching(*modules, grad_tiles) as got:
                out, lse = forward(q, k, k, _workspace(), geometry, 0.1)
                if rows > 64:
                    saved = Saved(q, k, k, out, lse, q, lse if packed else None)
                    backward(saved, _workspace(), geometry, 0.1)
            yield from ((case.replace("attention", way), launch) for launch in got)
    if dtype != torch.float32:  # which torch's kernels do not take on GPUs
        part = empty(1, _HEADS[0], 1024, 128)
        out, lse = part.float(), part[..., 0].float()
        with catching(merge_kernel) as got:
            merge_kernel.launch_merge(out, lse, part, lse)
        yield from (("attention, merge", launch) for launch in got)


def _decode_launches(dtype: torch.dtype, wide: bool) -> Iterator[tuple[str, Launch]]:
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    heads, kv_heads = _HEADS
    # Batch, tokens, width of a head, whether there are pages.
    decodes = [
        ("decode", 512, 1, 128, False),
        ("decode, pages", 4, 1, 128, True),
        ("decode, 4 tokens", 4, 4, 128, False),
    ]
    if wide:
        decodes += [
            (f"decode, {tokens} tokens, D {D}, {kind}", batch, tokens, D, kind == "pages")
            for D in (*_HEAD_WIDTHS, 128, 512, 1024)
            if D * dtype.itemsize <= WIDEST_BYTES
            for tokens in ((1, 4, 8) if D <= 256 else (8,))
            for kind, batch in (("split", 4), ("whole", 512), ("pages", 4))
        ]
    for case, batch, tokens, D, paged in decodes:
        page = 64
        table = torch.empty(batch, 64, dtype=torch.int32, device="meta") if paged else None
        keys = empty(batch * 64, kv_heads, page, D) if paged else empty(batch, kv_heads, 4096, D)
        q = empty(batch, heads, tokens, D)
        lengths = torch.empty(batch, dtype=torch.int64, device="meta")
        cache = Cache(keys, keys, table, page, 0, _W)
        with catching(decode_kernel) as caught:
            decode_kernel.launch_flash_decode(q, cache, lengths, 0.1, _workspace())
        yield from ((case, launch) for launch in caught)
        if case == "decode":
            with catching(decode_kernel) as caught:
                decode_kernel.launch_flash_decode(q, cache, lengths, 0.1, _workspace(), window=4095)
            yield "decode, window", caught[0]
            if chips.chip_of(q.device).fp8:
                narrow = cache.k.to(torch.float8_e4m3fn)
                narrow_cache = replace(cache, k=narrow, v=narrow)
                with catching(decode_kernel) as caught:
                    decode_kernel.launch_flash_decode(q, narrow_cache, lengths, 0.1, _workspace())
                yield "decode, fp8 keys", caught[0]
        if case == "decode, pages":
            new = empty(batch, kv_heads, tokens, D)
            with catching(append_kernel) as caught:
                append_kernel.launch_append(new, new, cache, lengths)
            yield "append, pages", caught[0]


# Of DeepSeek V3 on 8 ranks.
_EXPERTS, _TOP_K, _EXPERT_K, _EXPERT_N = 32, 8, 7168, 2048
_MADE: tuple[Activation, ...] = ("swiglu", "gelu")


def _expert_launches(dtype: torch.dtype, wide: bool) -> Iterator[tuple[str, Launch]]:
    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    # Tokens of a rank, whether weights lie as nn.Linear has them, activation, odd widths.
    sizes: list[tuple[str, int, bool, Activation, int]] = [
        ("experts", 4096, True, "swiglu", 0),
        ("experts, gelu", 4096, False, "gelu", 0),
        ("experts, decode", 16, True, "swiglu", 0),
    ]
    if wide:
        sizes += [
            (f"experts, {tokens} tokens, {activation}, {odd}", tokens, odd > 0, activation, odd)
            for tokens in (64, 256, 1024)
            for activation in _MADE
            for odd in (0, 1, 8)
        ]
    for case, tokens, transposed, activation, odd in sizes:
        R, K, N = _W * tokens * _TOP_K, _EXPERT_K + odd, _EXPERT_N + odd
        rows_each = tokens * _TOP_K // _EXPERTS
        ends, *rows = (empty(n, dtype=torch.int32) for n in (_EXPERTS, R, R, R))
        table = RowTable(ends, *rows)
        w = empty(_EXPERTS, N, K).transpose(1, 2) if transposed else empty(_EXPERTS, K, N)
        with catching(dispatch_launch, gathers) as caught:
            dispatch_launch.launch_dispatch(
                empty(tokens, K),
                [w] * (1 + (activation == "swiglu")),
                _workspace(),
                table,
                [tokens] * _W,
                activation=activation,
                keep_sums=activation == "gelu",
                numbers=empty(tokens, _TOP_K, dtype=torch.float32) if transposed else None,
                rows_each=rows_each,
            )
        yield case, caught[-1]
        ids = empty(tokens, _TOP_K, dtype=torch.int32)
        fp8 = chips.chip_of(w.device).fp8 and activation == "swiglu"
        for quantize in (False, True)[: (tokens <= combine_launch.FEW) * (1 + fp8)]:
            with catching(few_tokens_launch) as caught:
                few_tokens_launch.launch_few_tokens(
                    empty(tokens, K),
                    ids,
                    [w] * (1 + (activation == "swiglu")),
                    _workspace(),
                    [tokens] * _W,
                    [_EXPERTS] * _W,
                    activation=activation,
                    quantize=quantize,
                )
            yield f"{case}, fp8 rows" if quantize else case, caught[0]
        if activation == "gelu":
            continue
        h, down = empty(R, N), empty(_EXPERTS, K, N).transpose(1, 2)
        pushes = [(case, [h], [down])]
        if case == "experts":  # what a step of training launches besides
            yield from _expert_gather_launches(empty, tokens, w, down, table)
            # The gradients of weights, of x, and of the router's weights.
            with catching(contract_grouped_kernel) as caught:
                contract_grouped_kernel.launch_contract_grouped(empty(R, K), h, ends, out=w)
            yield "experts' weight gradient", caught[0]
            pushes += [
                ("d(gate and up of experts)", [h, h], [w.transpose(1, 2)] * 2),
                ("experts, rows alone", [empty(R, 1, dtype=torch.float32)], []),
            ]
        for name, hs, weights in pushes:
            by_slot = not weights
            with catching(combine_launch) as caught:
                combine_launch.launch_combine(
                    hs,
                    weights,
                    _workspace(),
                    table,
                    [tokens * _TOP_K if by_slot else tokens] * _W,
                    ids.view(-1, 1) if by_slot else ids,
                    _W * _EXPERTS,
                    topk_weights=None if by_slot else empty(tokens, _TOP_K, dtype=torch.float32),
                    rows_each=rows_each,
                )
            yield from ((name, launch) for launch in caught)


def _expert_gather_launches(
    empty: Callable[..., torch.Tensor],
    tokens: int,
    w: torch.Tensor,
    down: torch.Tensor,
    table: RowTable,
) -> Iterator[tuple[str, Launch]]:
    """Sums kept for the backward, the gradient of combine's h, rows alone, and rows in fp8."""
    gates = empty(tokens, _TOP_K, dtype=torch.float32)
    gathers_of: list[
        tuple[str, list[torch.Tensor], Activation | None, torch.Tensor | None, bool]
    ] = [
        ("experts, kept", [w, w], "swiglu", None, False),
        ("d(down of experts)", [down.transpose(1, 2)], None, gates, False),
        ("experts, rows fetched", [], None, None, False),
        ("experts, rows fetched", [], None, gates, False),
    ]
    if chips.chip_of(w.device).fp8:
        gathers_of += [
            ("experts, fp8 rows", [w, w], "swiglu", None, True),
            ("experts, fp8 rows fetched", [], None, None, True),
        ]
    for case, weights, activation, numbers, quantize in gathers_of:
        with catching(dispatch_launch, gathers) as caught:
            dispatch_launch.launch_dispatch(
                empty(tokens, w.shape[1]),
                weights,
                _workspace(),
                table,
                [tokens] * _W,
                activation=activation,
                keep_sums=activation is not None and not quantize,
                numbers=numbers,
                rows_each=tokens * _TOP_K // _EXPERTS,
                quantize=quantize,
            )
        yield from ((case, launch) for launch in caught[0 if quantize else -1 :])


def _meta_scaling(dtype: torch.dtype, rows: int, widths: Sequence[int]) -> Scaling | None:
    if dtype.itemsize > 1:
        return None
    like = torch.empty(0, dtype=torch.float32, device="meta")
    columns = [like.new_empty(1, width) for width in widths]
    return Scaling(like.new_empty(rows, 1), columns, torch.bfloat16)


def launches(chip: Chip, dtype: torch.dtype, *, wide: bool = False) -> list[tuple[str, Launch]]:
    """(case, launch) of every kernel, in the configurations that the heuristics choose.

    Args:
        wide: many more sizes, through the heuristics' whole range.
    """

    def empty(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=dtype, device="meta")

    with patch.object(chips, "_chip_behind", lambda device: chip):
        found = [
            *_all_gather_launches(dtype, empty, wide),
            *_reduce_launches(dtype, empty, wide),
            *_collective_launches(chip, dtype),
        ]
        if dtype.itemsize > 1:  # fp8 has no gradients and no attention
            found += _weight_gradient_launches(empty, wide)
            found += _norm_launches(dtype, wide)
            found += _attention_launches(dtype, wide)
            found += _decode_launches(dtype, wide)
            found += _expert_launches(dtype, wide)
        return found
