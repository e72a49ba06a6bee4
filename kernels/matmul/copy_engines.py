"""Shards fetched by the chip's copy engines, in streams beside the kernel that multiplies them.

    consumer's stream   publish x | consumer: tiles, each waiting for its chunks ............. | end
    side stream 0       | wait for its peers | copy chunk 0 | announce it | copy chunk 3 | ...
    side stream 1       | wait for its peers | copy chunk 1 | announce it | copy chunk 4 | ...
    side stream 2       | ...

The chunks of all shards, the next rank's first, are dealt to the side streams in turn: they arrive
in the order in which tiles want them, and some streams copy while another announces. On AMD's
chips, which have a link to each peer, there is a stream for each, so that all links are busy. In a
graph a stream waits for each peer before its first chunk; the host that enqueues each call has it
wait for all of its peers at once, as each launch takes it longer than the link takes for a MiB.

All is enqueued before the consumer. If that came first, it would wait for what the host has yet to
enqueue: whatever holds up the host until the device is idle, such as a module that is loaded or
memory that another thread frees, would hold it up for good.

The kernel's cores all make tiles: no program copies. The words are those of
`weft.kernels.device.gathers`, (1, peer, chunk), in two parts: the publishing kernel of call g sets
the upper 32 bits to g and the lower ones to 0, which an announcement sets to 1. So the host can
announce by a memory operation of the stream, which needs no core, though the number of a call that
a graph replays is known to the device alone. Where there are none (other chips than NVIDIA's,
virtual ranks), and in graphs, whose replays cost no host, a kernel of one program announces.

Protocol
  1. publish (`gathers`): x into the own first half, the words of call g, then (0, rank, 0) of every
     peer's pad: release at system scope. It is always the first half, as the host passes it to the
     copy engines, and a graph may be replayed as a call of any number.
  2. `_hold_kernel`, in each side stream: wait for (0, peer, 0) of the peers that are copied next.
  3. the copies, each announced once it is done; the consumer waits for these words.
  4. `_finish_kernel`, after the side streams and the consumer: a barrier, by words (0, rank, 1).

Why it neither races nor deadlocks: side streams wait only for peers' publishing, which waits for
nobody; the consumer waits for the side streams, all of whose work is enqueued before it; and the
barrier keeps the half from being written while peers still copy from it. The small kernels need a
core of their own while the consumer runs, so its grid leaves one free. A chunk that was copied
after a wait in vain is announced as well: its readers see the status, which the wait has left, and
spoil what they have made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple
from weakref import proxy

import torch
import triton
import triton.language as tl

from weft.collectives.device import signals
from weft.collectives.device.launches import doing, launch_kept, launching
from weft.collectives.device.stream_signals import end_in_kernel, spoilable_bytes
from weft.collectives.memory.workspace import Workspace, check_room, link_of
from weft.collectives.ranks import pad
from weft.kernels.device import gathers
from weft.kernels.device.copies import copied_by_engine
from weft.kernels.device.operands import scales_of
from weft.kernels.engine.chips import Chip, chip_of
from weft.kernels.engine.shards import SideStreams

STREAMS = 3  # on a switch


def streams_for(chip: Chip, world_size: int) -> int:
    """In how many streams shards are fetched: on AMD's chips one for each peer."""
    return max(1, world_size - 1) if chip.is_amd else STREAMS


def stream_write(words: torch.Tensor, at: int, value: int) -> None:
    """words[at] = value (uint32), once the current stream has come to it."""
    torch._C._distributed_c10d._SymmetricMemory.stream_write_value32(words, at, value)


@triton.jit(do_not_specialize=["rank", "first", "last", "stride"])
def _hold_kernel(link, rank, first, last, stride, WORLD_SIZE: tl.constexpr) -> None:
    """Hold the stream until the ranks `first`, `first` + `stride`, .. to `last` after this one have
    published. Grid: 1.
    """
    generation = signals.last_generation(link.signal_ptrs, rank)
    for step in range(first, last + 1, stride):
        peer = (rank + step) % WORLD_SIZE
        signals.wait_for(
            link.signal_ptrs, rank, WORLD_SIZE, 0, peer, 0, generation, link.timeout_ns
        )


@triton.jit(do_not_specialize=["rank", "peer", "chunk"])
def _announce_kernel(link, rank, peer, chunk, WORLD_SIZE: tl.constexpr) -> None:
    """Tell the consumer that `chunk` of `peer`'s shard is here. Grid: 1."""
    generation = signals.last_generation(link.signal_ptrs, rank)
    slot = signals.slot_ptr(link.signal_ptrs, rank, WORLD_SIZE, 1, peer, chunk)
    signals.signal_local(slot, copied_by_engine(generation))


@triton.jit(do_not_specialize=["rank"])
def _finish_kernel(link, rank, results, WORLD_SIZE: tl.constexpr) -> None:
    """End the call, once all ranks have come so far; `results` as of `end_in_kernel`. Grid: 1."""
    generation = signals.last_generation(link.signal_ptrs, rank)
    signals.barrier(link.signal_ptrs, rank, WORLD_SIZE, 0, 1, generation, link.timeout_ns)
    end_in_kernel(signals.peer_ptr(link.signal_ptrs, rank, tl.int64), results)


class _Copy(NamedTuple):
    """A chunk of a peer's shard.

    Attributes:
        hold: for which ranks the stream waits before: the first and the last after this one, and
            the step from one to the next; None: for none.
        part: which of the parts of the gathered matrix it is.
        word: of the pad, in which it is announced.
        rows: of the shard: the first and last + 1.
    """

    hold: tuple[int, int, int] | None
    part: int
    peer: int
    chunk: int
    word: int
    rows: tuple[int, int]


def _copies(
    rank: int, sizes: Sequence[int], chunk_rows: int, at_once: bool, chip: Chip
) -> tuple[list[list[_Copy]], list[int], int]:
    """The copies of each stream, in order; the rows of each part of the gathered matrix; and which
    part are the rank's own rows.

    Args:
        at_once: whether a stream waits for all of its peers before its first copy.
        chip: whose streams they are.

    Example:
        rank 0 of 2, shards of 4 rows, 3 a chunk: parts of 4, 3 and 1 rows, of which the own one is
        the first; rows (0, 3) of rank 1 are part 1, in one stream, rows (3, 4) part 2, in another.
    """
    parts, firsts, W = list[int](), list[int](), len(sizes)
    for peer, size in enumerate(sizes):
        firsts.append(len(parts))
        rows = size if peer == rank else chunk_rows
        parts += [min(rows, size - row) for row in range(0, size, max(rows, 1))] or [0]
    chunks = [
        (step, chunk, row)
        for step in range(1, W)
        for chunk, row in enumerate(range(0, sizes[(rank + step) % W], chunk_rows))
    ]
    streams = []
    count = streams_for(chip, W)
    if chip.is_amd:
        deals = [[each for each in chunks if each[0] == number + 1] for number in range(count)]
    else:
        deals = [chunks[number::count] for number in range(count)]
    for dealt in deals:
        copies, steps = list[_Copy](), sorted({step for step, _, _ in dealt})
        stride = count if steps == [*range(steps[0] if steps else 0, W, count)] else 1
        for i, (step, chunk, row) in enumerate(dealt):
            hold = None
            if at_once:
                hold = (steps[0], steps[-1], stride) if i == 0 else None
            elif i == 0 or dealt[i - 1][0] != step:
                hold = step, step, 1
            peer = (rank + step) % W
            rows_of = row, min(row + chunk_rows, sizes[peer])
            word = pad.kernel_word(W, 1, peer, chunk)
            copies.append(_Copy(hold, firsts[peer] + chunk, peer, chunk, word, rows_of))
        streams.append(copies)
    return streams, parts, firsts[rank]


class Fetching:
    """The fetching of a call: made of shapes alone, and kept with its launches.

    Args:
        sizes: rows of every rank's shard, of K columns of `dtype`.
        chunk_rows: rows that are copied and announced together.
        scales_at: see `weft.kernels.device.gathers`; None: the rows have no scales.
        eager: whether the host enqueues each call anew.

    Attributes:
        streams: beside the consumer's, in which it copies.
    """

    def __init__(
        self,
        ws: Workspace,
        sizes: Sequence[int],
        K: int,
        dtype: torch.dtype,
        chunk_rows: int,
        scales_at: int | None,
        eager: bool,
    ) -> None:
        needed = gathers.workspace_bytes(max(sizes), K, dtype)
        check_room(ws, needed, "workspace_bytes of the largest shard")
        self._ws: Workspace = proxy(ws)  # which keeps us with its launches
        self._scales_at = scales_at
        self._kept: dict[Hashable, Callable[[], object]] | None = None
        pads = ws.buffer.pad_of(ws.rank)
        # Of 32 bits, the lower half of each word of the pad first; None: cannot be written so.
        self._words: torch.Tensor | None = None
        if eager and torch.version.hip is None:
            self._words = pads.view(torch.uint32)
        dealt = _copies(ws.rank, sizes, chunk_rows, eager, chip_of(pads.device))
        streams, self._parts, self._own = dealt
        self.streams = len(streams)
        chunks = -(-max(sizes) // chunk_rows)
        self._chunks = 1 << max(0, chunks - 1).bit_length()
        self._streams = [
            [(*copy, *self._shown(copy, sizes, K, dtype)) for copy in copies] for copies in streams
        ]

    def _shown(
        self, copy: _Copy, sizes: Sequence[int], K: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The rows that are copied, where the peer has published them, and their scales."""
        rows, part = sizes[copy.peer], slice(*copy.rows)
        shard = self._ws.tensor(copy.peer, 0, (rows, K), dtype)
        if self._scales_at is None:
            return shard[part], None
        scales = self._ws.tensor(copy.peer, 0, (rows,), torch.float32, self._scales_at)
        return shard[part], scales[part]

    def publish(
        self,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        programs: int,
        copy_m: int,
        copy_n: int,
    ) -> None:
        """Enqueue the start of the call; `programs`, ..: of `gathers.publish`."""
        gathers.publish(
            x, self._ws, x.shape[1], programs, copy_m, copy_n, scales_of(scales),
            self._scales_at or 0, chunks_by_engines=self._chunks,
        )  # fmt: skip

    def start(
        self, gathered: torch.Tensor, scales: torch.Tensor | None, own: torch.Tensor | None
    ) -> None:
        """Enqueue what the side streams do: fill `gathered` (M, K) and the scales (M,) of its rows.

        This rank's rows, `own`, are copied there only if given.
        """
        ws, device = self._ws, gathered.device
        kept, constants = ws.kept_launches(), {"WORLD_SIZE": ws.world_size}
        if kept is not self._kept:  # another time-out
            self._kept, self._link = kept, link_of(ws)
        link = self._link
        self._beside = beside = SideStreams(ws.group, device)
        parts = gathered.split(self._parts)
        parts_of_scales = () if scales is None else scales.split(self._parts)
        for number, copies in enumerate(self._streams):
            if not copies and (number > 0 or own is None):
                continue
            with beside.stream(number):
                for hold, part, peer, chunk, word, _, rows, shown in copies:
                    if hold is not None:
                        launch_kept(kept, _hold_kernel, (link, ws.rank, *hold), **constants)
                    if shown is not None:
                        parts_of_scales[part].copy_(shown)
                    parts[part].copy_(rows)
                    if not self._wrote(word):
                        args = link, ws.rank, peer, chunk
                        launch_kept(kept, _announce_kernel, args, **constants)
                if number == 0 and own is not None:
                    parts[self._own].copy_(own)

    def _wrote(self, word: int) -> bool:
        """Announce by the stream. False where the driver cannot write to such memory."""
        if self._words is None:
            return False
        try:
            stream_write(self._words, 2 * word, 1)
        except RuntimeError:
            self._words = None
            return False
        return True

    def finish(self, results: Sequence[torch.Tensor]) -> None:
        """Enqueue the end of the call, for which the current stream waits for the others.

        `results`: what these may have copied to after the consumer has spoilt it.
        """
        doing(self.rejoin)
        ws = self._ws
        pairs = tuple((x, x.numel()) for x in spoilable_bytes(results))
        launching(_finish_kernel, 1)(
            link_of(ws), ws.rank, pairs, WORLD_SIZE=ws.world_size, num_warps=4
        )

    def rejoin(self) -> None:
        """Have the current stream wait for the side streams."""
        self._beside.rejoin()
