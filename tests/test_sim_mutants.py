"""Faults planted in copies of our kernels and exchanges: each must be found, by its right name."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest
from sim_cases import COLLECTIVES, DIRECT, HOST, KERNELS, with_mutants

from weft import sim
from weft.collectives import direct, kernel_collectives, movement, pull, signals
from weft.kernels import (
    all_gather_contract,
    all_gather_gemm,
    flash_decoding,
    gathers,
    gemm_all_reduce,
    gemm_one_shot,
    gemm_reduce_scatter,
    partial_sums,
    ring_dkv,
    ring_flash,
    ring_flash_backward,
    ring_keys,
    splits,
    tiles,
)
from weft.sim.mutants import mutant

import triton.language as tl  # isort: skip - after weft, which has kernels interpreted

pytestmark = [
    pytest.mark.skipif(not signals.interpreter_ready()[0], reason=signals.interpreter_ready()[1]),
    pytest.mark.skipif(
        hasattr(tl, "atomic_load"), reason="faults are planted in what Triton before 3.9 runs"
    ),
]

# The package has a function of the same name.
exchange = importlib.import_module("weft.collectives.exchange")

RACE, DEADLOCK, BOUNDS = sim.RaceError, sim.DeadlockError, sim.OutOfBoundsError
SCHEDULES = 200
EVERY = tuple(name for name in KERNELS | COLLECTIVES if "copy engines" not in name)
ALL = tuple(KERNELS)[:5]  # the ways by which most goes
GATHERS = ALL[:2]
REDUCES = ALL[3:]
HOME = {
    "gather of rows": ("gather", all_gather_gemm),
    "gather of the contraction": ("contract", all_gather_contract),
    "reduce-scatter": ("scatter", gemm_reduce_scatter),
    "one-shot all-reduce": ("reduce", gemm_all_reduce),
    "two-shot all-reduce": ("reduce", gemm_all_reduce),
    "pulls of boxes": ("pull", pull),
    "collectives that exchange": ("collective", kernel_collectives),
    "collectives that reduce, one shot": ("collective", kernel_collectives),
    "collectives that reduce, two shots": ("collective", kernel_collectives),
    "gather of rows, direct": ("gather", all_gather_gemm),
    "one-shot all-reduce, split": ("reduce", gemm_all_reduce),
    "straddling reduce-scatter": ("scatter", gemm_reduce_scatter),
    "ring attention": ("ring", ring_flash),
    "ring attention, backward": ("ring_backward", ring_flash_backward),
    "decoding": ("decode", flash_decoding),
}
PULLS, EXCHANGES, SUMS = list(COLLECTIVES)[:1], list(COLLECTIVES)[1:2], list(COLLECTIVES)[2:4]
RINGS, DECODING = ("ring attention", "ring attention, backward"), ("decoding",)
BACKWARD = RINGS[1:]
# What the kernels are made of: each imports those before it only.
PARTS = (signals, tiles, splits, gathers, partial_sums, gemm_one_shot, ring_keys, ring_dkv)


def but(*cases: str) -> tuple[str, ...]:
    """All cases that are not among those that the fault cannot break."""
    return tuple(case for case in EVERY if case not in cases)


@dataclass(frozen=True)
class Fault:
    """Edits of the text of a module, the cases that they break, and what is found."""

    name: str
    module: ModuleType
    edits: tuple[tuple[str, str], ...]
    cases: tuple[str, ...]
    found: type[Exception] | tuple[type[Exception], ...] = RACE
    message: str = ""
    programs: str = field(default="sequential")


def fault(name: str, module: ModuleType, old: str, new: str, cases: tuple[str, ...], *rest, **more):
    return Fault(name, module, ((old, new),), cases, *rest, **more)


SIGNAL = 'tl.atomic_xchg(ptr, value, sem="release", scope="sys")'
LOCAL_SIGNAL = 'tl.atomic_xchg(ptr, value, sem="release", scope="gpu")'
PEERS = """        peer = (rank + step) % world_size
        signal("""
WAIT_PEERS = """    arrived = True
    for step in range(1, world_size):"""

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
        'One writer a slot."""\n    tl.debug_barrier()',
        'One writer a slot."""',
        but(*GATHERS, *PULLS, "gather of rows, direct"),
    ),
    fault(
        "a wait that acquires nothing",
        signals,
        'tl.atomic_add(ptr, 0, sem="acquire"',
        'tl.atomic_add(ptr, 0, sem="relaxed"',
        EVERY,
    ),
    fault(
        "a wait at the scope of one device",
        signals,
        '_wait(ptr, value, max_polls, "sys")',
        '_wait(ptr, value, max_polls, "gpu")',
        EVERY,
    ),
    fault(
        "no wait for peers",
        signals,
        "arrived = wait(slot, generation, patience(own_pad, max_polls))",
        "arrived = True",
        EVERY,
    ),
    fault(
        "a wait for the generation before",
        signals,
        "slot = slot_ptr(signal_ptrs, rank, world_size, phase, peer, program)",
        "generation -= 1\n    slot = slot_ptr(signal_ptrs, rank, world_size, phase, peer, program)",
        EVERY,
    ),
    fault(
        "a wait for the generation after",
        signals,
        "slot = slot_ptr(signal_ptrs, rank, world_size, phase, peer, program)",
        "generation += 1\n    slot = slot_ptr(signal_ptrs, rank, world_size, phase, peer, program)",
        EVERY,
        DEADLOCK,
        message="should have signalled",
    ),
    fault(
        "one peer is not signalled",
        signals,
        f"for step in range(1, world_size):\n{PEERS}",
        f"for step in range(1, world_size - 1):\n{PEERS}",
        but("reduce-scatter", *EXCHANGES, *SUMS[:1]),
        DEADLOCK,
    ),
    fault(
        "the wrong peer is signalled",
        signals,
        PEERS,
        PEERS.replace("(rank + step)", "(rank + step + 1)"),
        but("reduce-scatter", *EXCHANGES, *SUMS[:1]),
        DEADLOCK,
    ),
    fault(
        "one peer is not waited for",
        signals,
        WAIT_PEERS,
        WAIT_PEERS.replace("world_size", "world_size - 1"),
        but(*GATHERS, *EXCHANGES, "ring attention"),
    ),
    fault(
        "one half for all calls",
        signals,
        "(generation & 1)",
        "(generation & 0)",
        but(*REDUCES[1:], *SUMS[1:], *BACKWARD),
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
        (ALL[0], *ALL[2:]),
    ),
    fault(
        "no barrier before the ticket",
        signals,
        "    tl.debug_barrier()\n    last =",
        "    last =",
        GATHERS[:1],
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
        GATHERS,
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
        "if peer != rank:",
        "if peer < 0:",
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
        all_gather_gemm,
        "if (step > 0) & (low < high):",
        "if (step < 0) & (low < high):",
        GATHERS[:1],
    ),
    fault(
        "tiles wait for a chunk too few",
        all_gather_gemm,
        "(high - 1) // chunk_rows, generation",
        "(high - 1) // chunk_rows - 1, generation",
        GATHERS[:1],
        programs="concurrent",
    ),
    fault(
        "a contraction waits for nobody",
        all_gather_contract,
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
        "count = tl.minimum(chunk_rows, rows - first)",
        "count = tl.minimum(chunk_rows, rows - first) + 1",
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
        tiles,
        "inside = (offs_m[:, None] < rows) & (offs_n[None, :] < columns)",
        "inside = (offs_m[:, None] >= 0) & (offs_n[None, :] < columns)",
        GATHERS,
        (BOUNDS, RACE),
    ),
    fault(
        "partial sums do not wait for peers",
        gemm_reduce_scatter,
        "    if signals.wait_for_peers(",
        "    if rank < WORLD_SIZE or signals.wait_for_peers(",
        ("reduce-scatter",),
    ),
    fault(
        "partial sums go to another rank's slot",
        gemm_reduce_scatter,
        "slot += rank * slot_stride",
        "slot += owner * slot_stride",
        ("reduce-scatter",),
    ),
    fault(
        "partial sums are signalled to lower ranks only",
        gemm_reduce_scatter,
        "if owner != rank:",
        "if owner < rank:",
        ("reduce-scatter",),
        DEADLOCK,
    ),
    fault(
        "the signal is that of another program",
        gemm_reduce_scatter,
        "WORLD_SIZE, 0, rank, program), generation",
        "WORLD_SIZE, 0, rank, 0), generation",
        ("reduce-scatter",),
        (DEADLOCK, RACE),
    ),
    fault(
        "a program waits for the first one of its peers",
        gemm_reduce_scatter,
        "WORLD_SIZE, 0, program, generation, link.max_polls",
        "WORLD_SIZE, 0, 0, generation, link.max_polls",
        ("reduce-scatter",),
    ),
    fault(
        "one-shot does not wait",
        gemm_one_shot,
        "complete &= signals.wait_for_peers(",
        "complete &= rank < WORLD_SIZE or signals.wait_for_peers(",
        ("one-shot all-reduce", "straddling reduce-scatter"),
    ),
    fault(
        "the own slot is everybody's",
        gemm_one_shot,
        "offs = rank * slot_stride + tl.cast",
        "offs = 0 * slot_stride + tl.cast",
        ("one-shot all-reduce",),
    ),
    fault(
        "finished tiles do not wait",
        gemm_all_reduce,
        "signal_ptrs, rank, WORLD_SIZE, 1, program, generation, link.max_polls",
        "signal_ptrs, rank, WORLD_SIZE, 1, program, generation - 1, link.max_polls",
        ("two-shot all-reduce",),
    ),
    fault(
        "finished tiles are signalled as partial ones",
        gemm_all_reduce,
        "signals.signal_peers(link.signal_ptrs, rank, WORLD_SIZE, 1, program, generation)",
        "signals.signal_peers(link.signal_ptrs, rank, WORLD_SIZE, 0, program, generation)",
        ("two-shot all-reduce",),
        DEADLOCK,
    ),
    fault(
        "finished tiles overlap the slots",
        gemm_all_reduce,
        "finished_at = WORLD_SIZE * slot_stride * 4",
        "finished_at = slot_stride * 4",
        ("two-shot all-reduce",),
    ),
    fault(
        "rows are read before their owners have shown them",
        all_gather_gemm,
        "peers_came = signals.wait_for_peers(",
        "peers_came = rank < WORLD_SIZE or signals.wait_for_peers(",
        ("gather of rows, direct",),
    ),
    fault(
        "the first row of a chunk goes to the owner of the last",
        gemm_one_shot,
        "offs_m >= offsets[owner]",
        "offs_m > offsets[owner]",
        ("straddling reduce-scatter",),
    ),
    fault(
        "a split tile is added up before its parts have come",
        splits,
        "whole &= signals.wait_local(slot, generation, polls)",
        "whole &= rank >= 0",
        ("gather of rows, direct", "one-shot all-reduce, split"),
        (RACE, AssertionError),
        programs="concurrent",
    ),
]

PUT = "ex.put(x, *_cut(start, stop - start, x.numel()))"
SLOT = "starts[peer] + end, peer * slot_bytes)"
POST_ALL = """        for peer in self.peers():
            self._waiter.post(peer, self.generation)"""
MOVED = ("movement of bytes",)

IN_EXCHANGES = [
    fault(
        "one half for all exchanges",
        exchange,
        "self._parity = self.generation & 1",
        "self._parity = 0",
        MOVED,
    ),
    fault(
        "an exchange that does not wait",
        exchange,
        "self._waiter.wait(peer, self.generation, self.op)",
        "pass",
        MOVED,
    ),
    fault(
        "an exchange that waits for the last call",
        exchange,
        "self._waiter.wait(peer, self.generation, self.op)",
        "self._waiter.wait(peer, self.generation - 1, self.op)",
        MOVED,
    ),
    fault(
        "an exchange that announces the last call",
        exchange,
        POST_ALL,
        POST_ALL.replace("self.generation", "self.generation - 1"),
        MOVED,
        DEADLOCK,
        message="movement.py",
    ),
    fault(
        "an exchange that ends early",
        exchange,
        "        if kind is None:\n            self.wait_all()\n\n    def local",
        "        pass\n\n    def local",
        MOVED,
    ),
    fault(
        "all-gather signals before it writes",
        movement,
        f"            {PUT}\n            ex.signal_all()\n",
        f"            ex.signal_all()\n            {PUT}\n",
        MOVED,
    ),
    fault(
        "all-reduce does not wait",
        movement,
        "    ex.wait_all()\n    shape = tuple(own.shape)",
        "    shape = tuple(own.shape)",
        MOVED,
    ),
    fault(
        "broadcast does not wait for its source",
        movement,
        "                ex.wait(src)\n",
        "",
        MOVED,
    ),
    fault(
        "reduce-scatter writes to another peer's slot",
        movement,
        SLOT,
        SLOT.replace("end, peer", "end, (peer + 1) % 3"),
        MOVED,
        (RACE, AssertionError),
    ),
]

IN_COLLECTIVES = [
    fault(
        "pieces land in the other half",
        kernel_collectives,
        "_slot_ptr(link, peer, rank, slot_size, generation,",
        "_slot_ptr(link, peer, rank, slot_size, generation + 1,",
        (*EXCHANGES, *SUMS),
        (RACE, AssertionError),
    ),
    fault(
        "all pieces land in one slot",
        kernel_collectives,
        "_slot_ptr(link, peer, rank, slot_size, generation,",
        "_slot_ptr(link, peer, 0, slot_size, generation,",
        (*EXCHANGES, *SUMS),
    ),
    fault(
        "sums do not wait for their terms",
        kernel_collectives,
        "arrived = signals.wait_for_peers(\n        link.signal_ptrs, rank, WORLD_SIZE, 0",
        "arrived = generation > 0\n    signals.wait_for_peers("
        "\n        link.signal_ptrs, rank, 1, 0",
        SUMS,
    ),
    fault(
        "finished sums do not wait",
        kernel_collectives,
        "link.signal_ptrs, rank, WORLD_SIZE, PHASE, peer",
        "link.signal_ptrs, rank, WORLD_SIZE, 0, peer",
        SUMS[1:],
    ),
    fault(
        "boxes do not wait",
        pull,
        "if box == local_boxes:",
        "if box < 0:",
        PULLS,
    ),
]


HALF_OF_KEYS = "half = signals.half_ptr(link.buffer_ptrs, rank, generation, link.half_bytes, dtype)"
WAIT_KEYS = "link.signal_ptrs, rank, WORLD_SIZE, 0, source, program, generation, link.max_polls"
GATHERED = "                out = _shard_ptr(keys, ring, source, SHAPE)"
ANNOUNCE = "                announce(ring, source, SHAPE)\n"

IN_ATTENTION = [
    fault(
        "keys are published after the signal",
        ring_keys,
        HALF_OF_KEYS,
        "signals.signal_peers(link.signal_ptrs, rank, SHAPE.world_size, 0, tl.program_id(0), "
        "generation)\n    " + HALF_OF_KEYS,
        RINGS,
    ),
    fault(
        "keys are published in the other half",
        ring_keys,
        HALF_OF_KEYS,
        HALF_OF_KEYS.replace("generation", "generation + 1"),
        RINGS,
    ),
    fault(
        "keys are fetched before they are there",
        ring_keys,
        WAIT_KEYS,
        WAIT_KEYS.replace("generation", "generation - 1"),
        RINGS,
    ),
    fault(
        "keys are announced before they are copied",
        ring_keys,
        GATHERED,
        ANNOUNCE + GATHERED,
        RINGS,
        programs="concurrent",
    ),
    fault(
        "queries do not wait for keys",
        ring_keys,
        "if (come >> step & 1) == 0:",
        "if (come >> step & 1) == 2:",
        RINGS,
    ),
    fault(
        "one row of keys too many",
        ring_keys,
        "tl.minimum(COPY_M, rows - first),",
        "tl.minimum(COPY_M, rows - first) + 1,",
        RINGS,
        (BOUNDS, RACE),
    ),
    fault(
        "gradients of keys do not wait",
        ring_dkv,
        "    if signals.wait_for_peers(",
        "    if rank < SHAPE.world_size or signals.wait_for_peers(",
        BACKWARD,
    ),
    fault(
        "gradients of keys go to one slot",
        ring_dkv,
        "_slot_ptr(slots, keys, ring, owner, rank, SHAPE)",
        "_slot_ptr(slots, keys, ring, owner, 0, SHAPE)",
        BACKWARD,
    ),
    fault(
        "gradients of keys are not announced to the next rank",
        ring_dkv,
        "        if step > 0:\n            word =",
        "        if step > 1:\n            word =",
        BACKWARD,
        DEADLOCK,
        message="should have signalled",
    ),
    fault(
        "gradients of keys overlap the keys",
        ring_dkv,
        "half + slots.offset // 4 + source",
        "half + source",
        BACKWARD,
        (RACE, AssertionError),
    ),
    fault(
        "parts are merged before they are there",
        flash_decoding,
        "complete &= signals.wait_local(word, generation, polls)",
        "complete &= polls >= 0",
        DECODING,
    ),
    fault(
        "ranks are merged before they are there",
        flash_decoding,
        "        complete &= signals.wait_for_peers(",
        "        complete &= rank < WORLD_SIZE or signals.wait_for_peers(",
        DECODING,
    ),
    fault(
        "the result of a rank goes to the first slot",
        flash_decoding,
        "place = rank * slot_stride",
        "place = 0 * slot_stride",
        DECODING,
    ),
    fault(
        "parts share a place",
        flash_decoding,
        "mine = base + part * SIZE",
        "mine = base + 0 * SIZE",
        DECODING,
    ),
]

IN_DIRECT = [
    fault(
        "a tensor is written while others read it",
        direct,
        "        agree(self._group, self._op, 0)",
        "        pass",
        ("direct reads",),
    ),
    fault(
        "a tensor is read before it is there",
        direct,
        "self._addresses = agree(group, op, x.data_ptr())",
        "self._addresses = [x.data_ptr()] * group.world_size",
        ("direct reads",),
        (RACE, AssertionError),
    ),
]


def of_copies(module: ModuleType, copies: dict[ModuleType, ModuleType]) -> dict[str, object]:
    """What `module` has from the modules copied, as the copies have it."""
    by_name = {original.__name__: copy for original, copy in copies.items()}
    found: dict[str, object] = {}
    for name, value in vars(module).items():
        if isinstance(value, ModuleType):
            if value in copies:
                found[name] = copies[value]
        elif (home := getattr(getattr(value, "fn", None), "__module__", "")) in by_name:
            found[name] = getattr(by_name[home], name)
    return found


def broken(planted: Fault, case: str):
    """The case, on copies of the modules between it and the fault."""
    options = DIRECT if case == "direct reads" else {}
    if planted.module is movement:
        return with_mutants(HOST[case], {"movement": mutant(movement, *planted.edits, **options)})
    if planted.module is direct:
        copy = mutant(direct, *planted.edits)
        return with_mutants(HOST[case], {"movement": mutant(movement, direct=copy, **options)})
    if planted.module is exchange:
        copy = mutant(exchange, *planted.edits)
        return with_mutants(HOST[case], {"movement": mutant(movement, exchange=copy.exchange)})
    role, home = HOME[case]
    copies = {planted.module: mutant(planted.module, *planted.edits)}
    for module in (*PARTS, home):
        inside = of_copies(module, copies)
        if inside and module not in copies:
            copies[module] = mutant(module, **inside)
    roles = {role: copies[home]}
    if gemm_one_shot in copies:
        roles["one_shot"] = copies[gemm_one_shot]
    return with_mutants((KERNELS | COLLECTIVES)[case], roles)


FAULTS = (
    *IN_SIGNALS,
    *IN_KERNELS,
    *IN_EXCHANGES,
    *IN_COLLECTIVES,
    *IN_ATTENTION,
    *IN_DIRECT,
)
# One kernel a fault in `make test`, the others in `make test-all`.
TABLE = [
    pytest.param(
        planted,
        case,
        id=f"{planted.name}-{case}",
        marks=[pytest.mark.sweep] if number else [],
    )
    for planted in FAULTS
    for number, case in enumerate(planted.cases)
]


@pytest.mark.parametrize("planted, case", TABLE)
def test_planted_faults_are_found(planted: Fault, case: str) -> None:
    with pytest.raises(planted.found) as caught:
        sim.run(3, broken(planted, case), schedules=SCHEDULES, programs=planted.programs)
    assert planted.message in str(caught.value)
    schedule = getattr(caught.value, "schedule", None)
    if schedule is not None:  # and it is found again, alone
        again = broken(planted, case)
        with pytest.raises(type(caught.value)):
            sim.run(3, again, schedule=schedule, programs=planted.programs)


_FOUND = {
    RACE: "race",
    DEADLOCK: "deadlock",
    BOUNDS: "out of bounds",
    AssertionError: "wrong result",
}


def rows() -> list[str]:
    """The table of docs/sim.md, which `python tests/test_sim_mutants.py` prints."""
    lines = []
    for planted in FAULTS:
        kinds = planted.found if isinstance(planted.found, tuple) else (planted.found,)
        found = " or ".join(_FOUND[kind] for kind in kinds)
        module = planted.module.__name__.rpartition(".")[2]
        lines.append(f"| {planted.name} | {module} | {len(planted.cases)} | {found} |")
    return lines


def test_the_table_of_the_docs_is_this_one() -> None:
    text = (Path(__file__).resolve().parent.parent / "docs" / "sim.md").read_text().splitlines()
    assert text[text.index("| fault | planted in | kernels | found as |") + 2 :] == rows()


if __name__ == "__main__":
    print("\n".join(rows()))
