"""Faults for copies of our kernels: the text that each edits, where, and what is found.

Those of signals and of the kernels of matmuls; `sim_faults_elsewhere` has the others, and
`sim_planting` plants them.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import triton.language as tl
from sim_cases import COLLECTIVES, KERNELS

from weft import sim
from weft.collectives.device import addresses, signals, waits
from weft.kernels.device import (
    copies,
    gathered_rows,
    gathered_tiles,
    gathers,
    splits,
    tiles,
    turns,
)
from weft.kernels.matmul import (
    all_gather_kernel,
    contract_kernel,
    one_shot_kernel,
    reduce_scatter_kernel,
    two_shot_kernel,
)
from weft.sim.check.vector_clocks import BARRIER_BEFORE_ATOMICS

RACE, DEADLOCK, BOUNDS = sim.RaceError, sim.DeadlockError, sim.OutOfBoundsError
EVERY = tuple(name for name in KERNELS | COLLECTIVES if "copy engines" not in name)
ALL = tuple(KERNELS)[:5]  # the ways by which most goes
GATHERS = ALL[:2]
REDUCES = ALL[3:]
SCATTERS = ("reduce-scatter", "reduce-scatter in one loop")
PULLS, EXCHANGES, SUMS = list(COLLECTIVES)[:1], list(COLLECTIVES)[1:2], list(COLLECTIVES)[2:4]
SWITCHED = list(COLLECTIVES)[4:]
RINGS, DECODING = ("ring attention", "ring attention, backward"), ("decoding",)
NORMS = ("norm of sums, one shot", "norm of sums, two shots")
WHOLE_NORMS = ("norm of whole sums, one shot", "norm of whole sums, two shots")
SWITCHED_NORMS = ("norm of whole sums, by the switch",)
HEADS = ("attention by heads", "attention by heads, backward")
BACKWARD = RINGS[1:]
EXPERTS = ("dispatch to experts", "dispatch to experts in fp8", "combine of experts")
FEW = ("dispatch of few tokens", "dispatch of few tokens in fp8", "combine of few tokens")


def but(*cases: str) -> tuple[str, ...]:
    """All cases that are not among those that the fault cannot break."""
    return tuple(case for case in EVERY if case not in cases)


@dataclass(frozen=True)
class Fault:
    """Edits of the text of a module, the cases that they break, and what is found.

    `barrier`: one before an atomic is taken away. Triton 3.9 puts its own there: it is no fault.
    """

    name: str
    module: ModuleType
    edits: tuple[tuple[str, str], ...]
    cases: tuple[str, ...]
    found: type[Exception] | tuple[type[Exception], ...] = RACE
    message: str = ""
    programs: sim.Programs = "sequential"
    barrier: bool = False

    def is_what(self, found: Exception | None) -> bool:
        """Whether this is what has to be found."""
        if self.barrier and BARRIER_BEFORE_ATOMICS:
            return found is None
        return isinstance(found, self.found) and self.message in str(found)


def fault(name: str, module: ModuleType, old: str, new: str, cases: tuple[str, ...], *rest, **more):
    return Fault(name, module, ((old, new),), cases, *rest, **more)


# In the branch that this Triton runs: 3.9 has loads and stores that are atomic.
_WRITE, _READ = ("store", "load(ptr,") if hasattr(tl, "atomic_load") else ("xchg", "add(ptr, 0,")
SIGNAL = f'tl.atomic_{_WRITE}(ptr, value, mask=mask, sem="release", scope="sys")'
LOCAL_SIGNAL = f'tl.atomic_{_WRITE}(ptr, value, sem="release", scope="gpu")'
ACQUIRE = f'tl.atomic_{_READ} mask=mask, sem="acquire", scope=scope)'
SIGNAL_PEERS = "words = slot_ptr(signal_ptrs, peers, WORLD_SIZE, phase, rank, program)"
WAIT = "slot = slot_ptr(signal_ptrs, rank, world_size, phase, peer, program)"
WAIT_PEERS = "    words = slot_ptr(signal_ptrs, rank, WORLD_SIZE, phase, peers, program)"
BEFORE, AFTER = (f"    generation {change}= 1\n    " for change in "-+")

IN_SIGNALS = [
    fault(
        "a signal that releases nothing",
        signals,
        SIGNAL,
        SIGNAL.replace("release", "relaxed"),
        EVERY,
    ),
    fault(
        "a signal at the scope of one device", signals, SIGNAL, SIGNAL.replace("sys", "gpu"), EVERY
    ),
    fault(
        "no barrier before a signal",
        signals,
        'are then waited for once.\n    """\n    _threads_meet()',
        'are then waited for once.\n    """',
        # The turns of a reduce-scatter have a barrier of their own before its signals.
        but(*GATHERS, *PULLS, *EXPERTS, "gather of rows, direct", *SCATTERS),
        barrier=True,
    ),
    fault(
        "a wait that acquires nothing",
        waits,
        ACQUIRE,
        ACQUIRE.replace("acquire", "relaxed"),
        EVERY,
    ),
    fault(
        "a wait at the scope of one device",
        waits,
        ACQUIRE,
        ACQUIRE.replace("=scope", '="gpu"'),
        EVERY,
    ),
    Fault(
        "no wait for peers",
        waits,
        (
            ("arrived = wait(own_pad, slot, generation, timeout_ns)", "arrived = True"),
            ("missing = awaited\n", "missing = awaited & (value < 0)\n"),
        ),
        EVERY,
    ),
    Fault(
        "a wait for the generation before",
        waits,
        ((WAIT, f"generation -= 1\n    {WAIT}"), (WAIT_PEERS, BEFORE + WAIT_PEERS)),
        but(*FEW),
    ),
    Fault(
        "a wait for the generation after",
        waits,
        ((WAIT, f"generation += 1\n    {WAIT}"), (WAIT_PEERS, AFTER + WAIT_PEERS)),
        but(*FEW),
        DEADLOCK,
        message="should have signalled",
    ),
    fault(
        "one peer is not signalled",
        signals,
        f"{SIGNAL_PEERS}\n    signal(words, generation, lanes < WORLD_SIZE - 1)",
        f"{SIGNAL_PEERS}\n    signal(words, generation, lanes < WORLD_SIZE - 2)",
        but(*SCATTERS, *FEW),
        DEADLOCK,
    ),
    fault(
        "the wrong peer is signalled",
        signals,
        SIGNAL_PEERS,
        SIGNAL_PEERS.replace("peers", "(peers + 1) % WORLD_SIZE"),
        but(*SCATTERS, *FEW),
        DEADLOCK,
    ),
    fault(
        "one peer is not waited for",
        waits,
        "words, peers, lanes < WORLD_SIZE - 1, rank",
        "words, peers, lanes < WORLD_SIZE - 2, rank",
        but(*GATHERS, *FEW, "ring attention"),
    ),
    fault(
        "one half for all calls",
        addresses,
        "(generation & 1)",
        "(generation & 0)",
        but(*REDUCES[1:], *SUMS[1:], *BACKWARD, *HEADS, *NORMS[1:], *WHOLE_NORMS[1:]),
    ),
    fault(
        "the generation stays",
        signals,
        "_GENERATION, generation)",
        "_GENERATION, generation - 1)",
        EVERY,
    ),
    fault(
        "a ticket that acquires nothing",
        signals,
        '1, sem="acq_rel", scope="gpu"',
        '1, sem="relaxed", scope="gpu"',
        (ALL[0], *ALL[2:], *EXPERTS[2:]),
    ),
    fault(
        "no barrier before the ticket",
        signals,
        "    tl.debug_barrier()\n    last =",
        "    last =",
        (*GATHERS[:1], *EXPERTS[2:]),
        barrier=True,
    ),
    fault(
        "the ticket is not reset",
        signals,
        "        tl.store(ticket_ptr, 0)\n",
        "        pass\n",
        GATHERS,
        (RACE, DEADLOCK, AssertionError),
    ),
    fault(
        "a local signal that releases nothing",
        signals,
        LOCAL_SIGNAL,
        LOCAL_SIGNAL.replace("release", "relaxed"),
        (*GATHERS, *EXPERTS[:1]),
        message="programs of one launch",
    ),
    fault(
        "a local signal within one program",
        signals,
        LOCAL_SIGNAL,
        LOCAL_SIGNAL.replace("gpu", "cta"),
        GATHERS,
    ),
]

HALF = "    half = signals.half_ptr(link.buffer_ptrs, rank, generation, link.half_bytes, dtype)"

IN_KERNELS = [
    fault(
        "published after the signal",
        gathers,
        HALF,
        "    signals.signal_peers(link.signal_ptrs, rank, WORLD_SIZE, 0, 0, generation)\n" + HALF,
        GATHERS,
    ),
    fault(
        "shards are fetched before they are there",
        gathers,
        "if begins & (peer != rank):",
        "if begins & (peer < 0):",
        GATHERS,
    ),
    fault(
        "shards are fetched from the other half",
        gathers,
        "signals.half_ptr(link.buffer_ptrs, peer, generation, link.half_bytes, dtype)",
        "signals.half_ptr(link.buffer_ptrs, peer, generation + 1, link.half_bytes, dtype)",
        GATHERS,
    ),
    fault(
        "tiles do not wait for their rows",
        gathered_rows,
        "if (step > 0) & (low < high):",
        "if (step < 0) & (low < high):",
        GATHERS[:1],
    ),
    fault(
        "tiles wait for a chunk too few",
        gathers,
        "(high - 1) // chunk_rows",
        "(high - 1) // chunk_rows - 1",
        GATHERS[:1],
        programs="concurrent",
    ),
    fault(
        "tiles wait for the first part of their rows only",
        gathered_tiles,
        "wait_for_tile_rows(shards, rows, k_part, FETCH)",
        "wait_for_tile_rows(shards, rows, 0, FETCH)",
        GATHERS[:1],
        programs="concurrent",
    ),
    fault(
        "a contraction waits for nobody",
        contract_kernel,
        "if (tile == first) & (source != rank) & (length > 0):",
        "if (tile < first) & (source != rank) & (length > 0):",
        GATHERS[1:],
    ),
    fault(
        "one row too many is published",
        gathers,
        "count = tl.minimum(share, rows - first)",
        "count = tl.minimum(share, rows - first) + 1",
        GATHERS,
        (BOUNDS, RACE),
    ),
    fault(
        "one row too many is fetched",
        gathers,
        "count = tl.minimum(shards.chunk_rows, rows - first)",
        "count = tl.minimum(shards.chunk_rows, rows - first) + 1",
        GATHERS,
        (BOUNDS, RACE),
    ),
    fault(
        "a tile of an uneven shard has no mask",
        tiles,
        "inside = inside_m[:, None] & (offs_n[None, :] < N)",
        "inside = (rows >= 0)[:, None] & (offs_n[None, :] < N)",
        ALL[1:],
        (BOUNDS, RACE),
    ),
    fault(
        "a copy has no mask",
        copies,
        "inside = (tl.arange(0, BLOCK_M)[:, None] < left) & (",
        "inside = (tl.arange(0, BLOCK_M)[:, None] >= 0) & (",
        GATHERS,
        (BOUNDS, RACE),
    ),
    fault(
        "partial sums do not wait for peers",
        reduce_scatter_kernel,
        "arrived = signals.wait_for_peers(",
        "arrived = rank < WORLD_SIZE or signals.wait_for_peers(",
        SCATTERS,
    ),
    fault(
        "partial sums go to another rank's slot",
        turns,
        "(rank, owner) if V.by_switch else (owner, rank)",
        "(rank, owner) if V.by_switch else (owner, owner)",
        SCATTERS,
    ),
    fault(
        "partial sums are signalled to lower ranks only",
        turns,
        "lanes < WORLD_SIZE - 1)",
        "(lanes < WORLD_SIZE - 1) & (peers < rank))",
        SCATTERS,
        DEADLOCK,
    ),
    fault(
        "partial sums are signalled before the last one is sent",
        turns,
        "elif item == call.away - 1:",
        "elif item == call.away - 2:",
        SCATTERS,
        (DEADLOCK, RACE),  # programs with one tile for peers never signal
    ),
    fault(
        "a tile is sent as the one after it",
        turns,
        "    owner, tile = _numbered(call, item, V)\n    if V.senders",
        "    owner, tile = _numbered(call, item + 1, V)\n    if V.senders",
        SCATTERS,
        (RACE, BOUNDS, AssertionError),
    ),
    fault(
        "the signal is that of another program",
        turns,
        "WORLD_SIZE, 0, rank, firsts)",
        "WORLD_SIZE, 0, rank, 0)",
        SCATTERS,
        (DEADLOCK, RACE),
    ),
    fault(
        "a program waits for the first one of its peers",
        reduce_scatter_kernel,
        "WORLD_SIZE, 0, first, generation, link.timeout_ns",
        "WORLD_SIZE, 0, 0, generation, link.timeout_ns",
        SCATTERS,
    ),
    fault(
        "one-shot does not wait",
        one_shot_kernel,
        "complete &= signals.wait_for_peers(",
        "complete &= rank < WORLD_SIZE or signals.wait_for_peers(",
        ("one-shot all-reduce", "straddling reduce-scatter"),
    ),
    fault(
        "the own slot is everybody's",
        one_shot_kernel,
        "offs = rank * slot_stride + tl.cast",
        "offs = 0 * slot_stride + tl.cast",
        ("one-shot all-reduce",),
    ),
    fault(
        "finished tiles do not wait",
        two_shot_kernel,
        "signal_ptrs, rank, WORLD_SIZE, 1, program, generation, link.timeout_ns",
        "signal_ptrs, rank, WORLD_SIZE, 1, program, generation - 1, link.timeout_ns",
        ("two-shot all-reduce", "two-shot all-reduce in one loop"),
    ),
    fault(
        "finished tiles are signalled as partial ones",
        two_shot_kernel,
        "signals.signal_peers(link.signal_ptrs, rank, WORLD_SIZE, 1, program, generation)",
        "signals.signal_peers(link.signal_ptrs, rank, WORLD_SIZE, 0, program, generation)",
        ("two-shot all-reduce", "two-shot all-reduce in one loop"),
        DEADLOCK,
    ),
    fault(
        "finished tiles overlap the slots",
        two_shot_kernel,
        "finished_at = WORLD_SIZE * slot_stride * 4",
        "finished_at = slot_stride * 4",
        ("two-shot all-reduce", "two-shot all-reduce in one loop"),
    ),
    fault(
        "rows are read before their owners have shown them",
        all_gather_kernel,
        "came = signals.wait_for_peers(",
        "came = rank < W or signals.wait_for_peers(",
        ("gather of rows, direct",),
    ),
    fault(
        "the first row of a chunk goes to the owner of the last",
        one_shot_kernel,
        "offs_m >= offsets[owner]",
        "offs_m > offsets[owner]",
        ("straddling reduce-scatter",),
    ),
    fault(
        "a split tile is added up before its parts have come",
        splits,
        "whole = signals.wait_for_own(",
        "whole = rank < WORLD_SIZE or signals.wait_for_own(",
        ("gather of rows, direct", "one-shot all-reduce, split"),
        (RACE, AssertionError),
        programs="concurrent",
    ),
]
