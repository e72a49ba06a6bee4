"""`weft bench memory`: peak memory of a rank for attention over growing sequences.

The peak includes everything that the call needs: this rank's q, k and v, its results, what it
publishes in symmetric memory, and temporary tensors. The operating system records it; a page of
symmetric memory that several ranks have mapped counts once, in equal parts.
"""

from __future__ import annotations

import csv
import ctypes
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

import weft
from weft import collectives
from weft.bench.report import terminal
from weft.bench.report.tables import TextTable, figure
from weft.cli import Parser, at_least, make_folder, several
from weft.collectives import resolve
from weft.kernels import zigzag_sizes
from weft.launch import launch

_MIB = 2**20
_M_MMAP_THRESHOLD = -3  # of malloc.h
_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class PeakMemory:
    """One length on so many ranks; MiB of the rank that needs most.

    Attributes:
        shard: q, k, v and out of a rank.
        forward, step: the peak of `ring_attention`, causal; step: with its gradients.
        gathered: the peak of the forward on the generic engine; None where it was not asked for.
    """

    ranks: int
    tokens: int
    shard: float
    forward: float
    step: float
    gathered: float | None


def peak_bytes(call: Callable[[], Any]) -> int:
    """What this process needs at its peak while `call` runs, above what it had before.

    Only after `free_at_once`: memory that the allocator keeps would hide what is needed, or be
    counted as needed.
    """
    _libc.malloc_trim(0)  # what lies free between small blocks in use
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = _memory()
    value = call()
    after = _memory()
    del value
    elsewhere = after["RssFile"] + after["RssShmem"]
    return after["VmHWM"] - elsewhere - before["RssAnon"] + after["Pss_Shmem"] - before["Pss_Shmem"]


def _memory() -> dict[str, int]:
    """Bytes of this process, by Linux's names; Pss divides shared pages by their users."""
    found = {}
    for source in ("status", "smaps_rollup"):
        for line in Path("/proc/self", source).read_text().splitlines():
            name, _, value = line.partition(":")
            if value.endswith(" kB"):
                found[name] = int(value.removesuffix(" kB")) * 1024
    return found


def free_at_once() -> None:
    """From now on, large blocks that this process frees go back to the system."""
    _libc.mallopt(_M_MMAP_THRESHOLD, 64 << 10)


def attention_peak(
    tokens: int, heads: int, head_dim: int, *, backward: bool = False, engine: Any = "auto"
) -> int:
    """Peak bytes of this rank in causal attention of a whole sequence of `tokens`, zigzag."""
    group = resolve(None)
    sizes = zigzag_sizes(tokens, group.world_size)
    shape = (1, heads, sizes[group.rank], head_dim)

    def call() -> Any:
        q, k, v = (torch.randn(shape).requires_grad_(backward) for _ in range(3))
        with weft.engine(engine):
            out = weft.ring_attention(q, k, v, causal=True, layout="zigzag", sizes=sizes)
        if backward:
            out.backward(out.detach())
        return q, k, v, out

    collectives.barrier()
    return peak_bytes(call)


def _peaks_on_rank(
    rank: int,
    progress: Callable[[Any], None],
    lengths: Sequence[int],
    heads: int,
    head_dim: int,
    gathered_up_to: int,
) -> list[dict[str, float]]:
    peaks = []
    free_at_once()
    attention_peak(lengths[0], heads, head_dim, backward=True)  # what only the first call needs
    for tokens in lengths:
        found: dict[str, float] = {}
        for name in ("forward", "step", "gathered"):
            if name == "gathered" and tokens > gathered_up_to:
                continue
            collectives.barrier()
            collectives.close()  # workspaces of the last length
            nbytes = attention_peak(
                tokens,
                heads,
                head_dim,
                backward=name == "step",
                engine="generic" if name == "gathered" else "auto",
            )
            found[name] = nbytes / _MIB
            progress(("alive", None))
        peaks.append(found)
    return peaks


def peaks_by_length(
    ranks: int, lengths: Sequence[int], heads: int, head_dim: int, gathered_up_to: int
) -> list[PeakMemory]:
    """A row for each length, on this machine's ranks."""
    found = launch(ranks, _peaks_on_rank, lengths, heads, head_dim, gathered_up_to, stall_s=900)
    rows = []
    for i, tokens in enumerate(lengths):
        most = {name: max(peaks[i][name] for peaks in found) for name in found[0][i]}
        shard = 4 * 4 * heads * head_dim * tokens / ranks / _MIB
        rows.append(
            PeakMemory(ranks, tokens, shard, most["forward"], most["step"], most.get("gathered"))
        )
    return rows


def peaks_table(rows: Sequence[PeakMemory], heads: int, head_dim: int) -> TextTable:
    """The rows, and what they grow with."""
    header = [
        "tokens", "ranks", "q, k, v, out of a rank, MiB", "forward, MiB", "/ 1k tokens of a rank",
        "step, MiB", "/ 1k tokens of a rank", "gather + attention, MiB",
    ]  # fmt: skip
    cells = []
    for row in rows:
        share = row.tokens / row.ranks / 1024
        cells.append(
            [
                str(row.tokens),
                str(row.ranks),
                figure(row.shard),
                figure(row.forward),
                figure(row.forward / share),
                figure(row.step),
                figure(row.step / share),
                figure(row.gathered),
            ]
        )
    title = f"weft bench memory: peak of a rank, causal, {heads} heads of {head_dim}, fp32"
    return TextTable(title, header, cells)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write memory.csv where --out says."""
    parser = Parser("weft bench memory", __doc__)
    parser.add_argument(
        "--ranks",
        type=several,
        nargs="+",
        default=[2, 4],
        metavar="W",
        help="numbers of ranks to measure on, one after another (2 4)",
    )
    parser.add_argument(
        "--tokens",
        type=at_least(1),
        nargs="+",
        default=[8192, 16384, 32768, 65536],
        metavar="N",
        help="lengths of the whole sequence (8192 to 65536)",
    )
    parser.add_argument(
        "--heads", type=at_least(1), default=2, metavar="N", help="of q, k and v alike (2)"
    )
    parser.add_argument(
        "--head-dim", type=at_least(1), default=64, metavar="N", help="features of a head (64)"
    )
    parser.add_argument(
        "--gathered-up-to",
        type=int,
        default=16384,
        metavar="TOKENS",
        help="the longest sequence also gathered: its masks take 5 bytes a pair of tokens (16384)",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write memory.csv")
    args = parser.parse_args(argv)
    if min(args.tokens) < 2 * max(args.ranks):
        parser.error(f"--tokens must be two a rank, got {args.tokens} for --ranks {args.ranks}")
    if args.out:
        try:
            make_folder(args.out)
        except ValueError as error:
            parser.error(str(error))
    lengths = sorted(args.tokens)
    rows = [
        row
        for ranks in args.ranks
        for row in peaks_by_length(ranks, lengths, args.heads, args.head_dim, args.gathered_up_to)
    ]
    shown = peaks_table(rows, args.heads, args.head_dim)
    terminal.print_table(shown)
    if args.out:
        with (args.out / "memory.csv").open("w", newline="") as file:
            out = csv.DictWriter(file, [field.name for field in fields(PeakMemory)])
            out.writeheader()
            out.writerows(asdict(row) for row in rows)
    return 0
