"""Faults for copies of exchanges, collectives and the kernels of attention."""

from __future__ import annotations

import importlib

from sim_faults import (
    BACKWARD,
    BOUNDS,
    DEADLOCK,
    DECODING,
    EXCHANGES,
    PULLS,
    RACE,
    RINGS,
    SUMS,
    fault,
)

from weft.collectives import direct, kernel_collectives, movement, pull
from weft.kernels import flash_decoding, ring_flash_backward, ring_keys

# The package has a function of the same name.
exchange = importlib.import_module("weft.collectives.exchange")

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
        "signals.half_ptr(buffer_ptrs, peer, generation, half_bytes, dtype)\n        slot =",
        "signals.half_ptr(buffer_ptrs, peer, generation + 1, half_bytes, dtype)\n        slot =",
        (*EXCHANGES, *SUMS),
        (RACE, AssertionError),
    ),
    fault(
        "all pieces land in one slot",
        kernel_collectives,
        "tl.multiple_of(slots + rank * tl.cast(slot_size, tl.int64), 16)",
        "tl.multiple_of(slots, 16)",
        (*EXCHANGES, *SUMS),
    ),
    fault(
        "sums do not wait for their terms",
        kernel_collectives,
        "arrived = signals.wait_for_peers(\n        signal_ptrs, rank, WORLD_SIZE, 0",
        "arrived = generation > 0\n    signals.wait_for_peers(\n        signal_ptrs, rank, 1, 0",
        SUMS,
    ),
    fault(
        "finished sums do not wait",
        kernel_collectives,
        "signal_ptrs, rank, WORLD_SIZE, 1, peer, program",
        "signal_ptrs, rank, WORLD_SIZE, 0, peer, program",
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


HALF_OF_KEYS = "half = signals.half_ptr(buffer_ptrs, rank, generation, half_bytes, k_ptr."
WAIT_KEYS = "signal_ptrs, rank, WORLD_SIZE, 0, source, program, generation, max_polls"
GATHERED = "                out = gathered_ptr + shard_offset("
ANNOUNCE = """                signals.signal_local(
                    signals.slot_ptr(signal_ptrs, rank, WORLD_SIZE, 1, source, program), generation
                )
"""

IN_ATTENTION = [
    fault(
        "keys are published after the signal",
        ring_keys,
        HALF_OF_KEYS,
        "signals.signal_peers(signal_ptrs, rank, WORLD_SIZE, 0, tl.program_id(0), generation)\n    "
        + HALF_OF_KEYS,
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
        ring_flash_backward,
        "        if signals.wait_for_peers(",
        "        if rank < WORLD_SIZE or signals.wait_for_peers(",
        BACKWARD,
    ),
    fault(
        "gradients of keys go to one slot",
        ring_flash_backward,
        "slots_offset // 4 + rank * 2 * slot_stride",
        "slots_offset // 4 + 0 * 2 * slot_stride",
        BACKWARD,
    ),
    fault(
        "gradients of keys are not announced to the next rank",
        ring_flash_backward,
        "            if step > 0:\n                signals.signal(",
        "            if step > 1:\n                signals.signal(",
        BACKWARD,
        DEADLOCK,
        message="should have signalled",
    ),
    fault(
        "gradients of keys overlap the keys",
        ring_flash_backward,
        "slot += slots_offset // 4 + rank",
        "slot += rank",
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
