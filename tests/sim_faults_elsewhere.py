"""Faults for copies of exchanges, collectives and the kernels of attention."""

from __future__ import annotations

import importlib

from sim_cases import CUT, FLAGGED
from sim_faults import (
    BACKWARD,
    BOUNDS,
    DEADLOCK,
    DECODING,
    EXCHANGES,
    EXPERTS,
    FEW,
    HEADS,
    NORMS,
    PULLS,
    RACE,
    RINGS,
    SUMS,
    SWITCHED,
    SWITCHED_NORMS,
    WHOLE_NORMS,
    fault,
)

from weft.collectives import movement
from weft.collectives.device import flagged
from weft.collectives.kernels import flagged_reduce, kernel_collectives, multimem, pieces, pull
from weft.collectives.memory import direct
from weft.kernels.expert_kernels import (
    combine_kernel,
    dispatch_kernel,
    few_tokens,
    hand_over,
    pulled_rows,
    push_and_weigh_kernel,
    weigh_kernel,
)
from weft.kernels.flash import decode_kernel, ring_dkv, ring_keys
from weft.kernels.heads import head_dkv, heads_kernel
from weft.kernels.matmul import copy_engines
from weft.kernels.norm import flagged_norm_kernel, rms_norm_kernel, switched_rows, team_rows

# The package has a function of the same name.
exchange = importlib.import_module("weft.collectives.memory.exchange")

PUT = "ex.put(x, *_window_in(start, stop - start, x.numel()))"
SLOT = "*part(peer, window), peer * slot_bytes)"
POST = "self._waiter.post(peer, self.generation)"
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
        POST,
        POST.replace("self.generation", "self.generation - 1"),
        MOVED,
        DEADLOCK,
        message="movement.py",
    ),
    fault(
        "an exchange that ends early",
        exchange,
        "                self.wait_all()\n                failed = False",
        "                failed = False",
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
        "all-reduce takes its peers' sums before they come",
        movement,
        "                ex.wait(peer)\n                if before:\n",
        "                if before:\n",
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
        SLOT.replace("), peer", "), (peer + 1) % 3"),
        MOVED,
        (RACE, AssertionError),
    ),
]

IN_COLLECTIVES = [
    fault(
        "pieces land in the other half",
        pieces,
        "piece_slot(link, peers, rank, slot_size, generation,",
        "piece_slot(link, peers, rank, slot_size, generation + 1,",
        (*EXCHANGES, *SUMS),
        (RACE, AssertionError),
    ),
    fault(
        "all pieces land in one slot",
        pieces,
        "piece_slot(link, peers, rank, slot_size, generation,",
        "piece_slot(link, peers, 0, slot_size, generation,",
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
        pieces,
        "link.signal_ptrs, rank, WORLD_SIZE, PHASE, tl",
        "link.signal_ptrs, rank, WORLD_SIZE, 0, tl",
        SUMS[1:],
    ),
    fault(
        "the switch adds up before all terms are there",
        multimem,
        "arrived = signals.barrier(\n        link.signal_ptrs, rank, WORLD_SIZE, 0",
        "arrived = generation > 0\n    signals.barrier(\n        link.signal_ptrs, rank, 1, 0",
        SWITCHED,
        (RACE, AssertionError),
    ),
    fault(
        "the switch's sums land among the terms",
        multimem,
        "at + finished + vector * 16, sums",
        "at + vector * 16, sums",
        SWITCHED,
        (RACE, AssertionError),
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
WAIT_KEYS = "link.signal_ptrs, rank, WORLD_SIZE, 0, source, program, generation, link.timeout_ns"
FETCHED = "                fetch_shard(ring, source, SHAPE)"
ANNOUNCE = "                announce_source(ring, source, SHAPE)\n"

IN_ATTENTION = [
    fault(
        "keys are published after the signal",
        ring_keys,
        HALF_OF_KEYS,
        "signals.signal_peers(link.signal_ptrs, rank, SHAPE.world_size, 0, tl.program_id(0), "
        "generation)\n    " + HALF_OF_KEYS,
        (*RINGS, *HEADS),
    ),
    fault(
        "keys are published in the other half",
        ring_keys,
        HALF_OF_KEYS,
        HALF_OF_KEYS.replace("generation", "generation + 1"),
        (*RINGS, *HEADS),
    ),
    fault(
        "keys are fetched before they are there",
        ring_keys,
        WAIT_KEYS,
        WAIT_KEYS.replace("generation", "generation - 1"),
        (*RINGS, HEADS[0]),
    ),
    fault(
        "keys are announced before they are copied",
        ring_keys,
        FETCHED,
        ANNOUNCE + FETCHED,
        (*RINGS, HEADS[0]),
        programs="concurrent",
    ),
    fault(
        "queries do not wait for keys",
        ring_keys,
        "if (arrivals >> step & 1) == 0:",
        "if (arrivals >> step & 1) == 2:",
        (*RINGS, *HEADS),
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
        "    if await_results(ring, SHAPE):",
        "    if rank < SHAPE.world_size or await_results(ring, SHAPE):",
        BACKWARD,
    ),
    fault(
        "gradients of keys go to one slot",
        ring_dkv,
        "_slot_ptr(slots, ring, owner, rank, SHAPE)",
        "_slot_ptr(slots, ring, owner, 0, SHAPE)",
        BACKWARD,
    ),
    fault(
        "gradients of keys are not announced to the next rank",
        ring_dkv,
        "        if step > 0:\n            announce_results(",
        "        if step > 1:\n            announce_results(",
        BACKWARD,
        DEADLOCK,
        message="should have signalled",
    ),
    fault(
        "gradients of keys overlap the keys",
        ring_dkv,
        "area_ptr(ring, owner, slots.offset, ",
        "area_ptr(ring, owner, 0, ",
        BACKWARD,
        (RACE, AssertionError),
    ),
    fault(
        "results are collected before they are there",
        ring_keys,
        "    return signals.wait_for_peers(",
        "    return ring.rank < SHAPE.world_size or signals.wait_for_peers(",
        HEADS,
    ),
    fault(
        "results go to the wrong program",
        ring_keys,
        "SHAPE.world_size, 0, ring.rank, tl.program_id(0)\n",
        "SHAPE.world_size, 0, ring.rank, 1\n",
        HEADS,
        DEADLOCK,
    ),
    fault(
        "queries are published after the signal",
        heads_kernel,
        "    ring_keys.publish_keys(ring, SHAPE)\n",
        "    ring_keys.publish_keys(ring, SHAPE)\n"
        "        ring_keys.signal_published(ring, SHAPE)\n",
        HEADS[:1],
    ),
    fault(
        "parts of all ranks go to one slot",
        head_dkv,
        "slot = user - _first_user(kv_head, sharing, H, SHAPE)",
        "slot = 0 * user",
        HEADS[1:],
    ),
    fault(
        "parts are merged before they are there",
        decode_kernel,
        "complete = signals.wait_for_own(",
        "complete = rank < WORLD_SIZE or signals.wait_for_own(",
        DECODING,
    ),
    fault(
        "ranks are merged before they are there",
        decode_kernel,
        "        complete &= signals.wait_for_peers(",
        "        complete &= rank < WORLD_SIZE or signals.wait_for_peers(",
        DECODING,
    ),
    fault(
        "the result of a rank goes to the first slot",
        decode_kernel,
        "place = rank * slot_stride",
        "place = 0 * slot_stride",
        DECODING,
    ),
    fault(
        "parts share a place",
        decode_kernel,
        "tiles.store_block(parts + part * SIZE, acc)",
        "tiles.store_block(parts + 0 * SIZE, acc)",
        DECODING,
    ),
]

IN_NORMS = [
    fault(
        "rows are normalized when one part of them is there",
        rms_norm_kernel,
        "begin, begin + TEAM - 1, generation",
        "begin, begin, generation",
        NORMS,
    ),
    fault(
        "finished rows are copied before they are there",
        rms_norm_kernel,
        "                arrived = signals.wait_for_peers(",
        "                arrived = rank < W or signals.wait_for_peers(",
        NORMS[1:],
    ),
    fault(
        "finished rows or residuals overlap the slots",
        rms_norm_kernel,
        "rest = W * sent",
        "rest = sent",
        NORMS,
    ),
    fault(
        "rows are normalized before all ranks have shown them",
        rms_norm_kernel,
        "            ranks < W,\n",
        "            ranks < W - 1,\n",
        WHOLE_NORMS[1:],
    ),
    fault(
        "rows are normalized when one part of each rank is there",
        rms_norm_kernel,
        "words = signals.slot_ptr(link.signal_ptrs, rank, W, 1, ranks, team * TEAM + lanes % TEAM)",
        "words = signals.slot_ptr(link.signal_ptrs, rank, W, 1, ranks, team * TEAM + lanes * 0)",
        WHOLE_NORMS[1:],
    ),
    fault(
        "sums are shown to all but the rank itself",
        rms_norm_kernel,
        "signals.signal(words, generation, lanes < W)",
        "signals.signal(words, generation, lanes < W - 1)",
        WHOLE_NORMS[1:],
        DEADLOCK,
    ),
    fault(
        "what columns come to lies among the finished rows",
        team_rows,
        "return (half + partial_at).to(",
        "return (half + partial_at - 64).to(",
        WHOLE_NORMS[1:],
    ),
    fault(
        "the switch stores sums where the terms are",
        switched_rows,
        "shown_at = at + tl.cast(call.rest, tl.int64) * H * SIZE",
        "shown_at = at",
        SWITCHED_NORMS,
    ),
    fault(
        "terms for the switch lie where the sums come",
        switched_rows,
        "own = team_rows.row_ptr(call, call.rank, row, term.dtype)",
        "own = team_rows.row_ptr(call, call.rank, call.rest + row, term.dtype)",
        SWITCHED_NORMS,
    ),
    fault(
        "every program of a team stores the scale",
        team_rows,
        ", mask=tl.program_id(0) % TEAM == 0)",
        ")",
        WHOLE_NORMS,
    ),
]

BY_WORDS = tuple(FLAGGED)[1:2]  # the other norms share its parts
SUMS_BY_WORDS = tuple(FLAGGED)[3:5]

IN_FLAGGED = [
    fault(
        "words are taken before they have their flag",
        flagged,
        "        late = greatest_of(lates)\n",
        "        late = greatest_of(lates) * 0 - 1\n",
        BY_WORDS,
        AssertionError,
    ),
    fault(
        "the flag of every other call alone is looked at",
        flagged,
        "missing = ((even >> 32) != flags) | ((odd >> 32) != flags)",
        "missing = ((((even >> 32) ^ flags) | ((odd >> 32) ^ flags)) & 1) != 0",
        BY_WORDS,
        AssertionError,
    ),
    fault(
        "only half of the words are looked at",
        flagged,
        "missing = ((even >> 32) != flags) | ((odd >> 32) != flags)",
        "missing = (even >> 32) != flags",
        BY_WORDS,
        AssertionError,
    ),
    fault(
        "words have the flag of the call before",
        flagged,
        "words = tl.reshape(data.to(tl.int64) | (generation << 32), (R, PAIRS, 2, 2))",
        "words = tl.reshape(data.to(tl.int64) | ((generation - 1) << 32), (R, PAIRS, 2, 2))",
        BY_WORDS,
        DEADLOCK,
    ),
    fault(
        "words use one half in all calls",
        flagged_norm_kernel,
        "half = signals.half_ptr(link.buffer_ptrs, owner, call.generation, link.half_bytes, "
        "tl.int64)\n    part",
        "half = signals.half_ptr(link.buffer_ptrs, owner, 0, link.half_bytes, tl.int64)\n    part",
        BY_WORDS,
    ),
    fault(
        "data are stored plainly, and their flags apart",
        flagged,
        """        as_flagged(generation)
        ptrs = ptrs[:, :, None] + tl.arange(0, 2)[None, None, :]
        tl.store(ptrs, tl.join(first, second), mask""",
        """        as_flagged(0)
        ptrs = ptrs[:, :, None] + tl.arange(0, 2)[None, None, :]
        tl.store(ptrs, tl.join(first, second), mask""",
        BY_WORDS,
        (RACE, DEADLOCK),
    ),
    fault(
        "rows shown lie where terms do",
        flagged_norm_kernel,
        "rest = W * sent",
        "rest = sent",
        BY_WORDS,
        (RACE, AssertionError, DEADLOCK),
    ),
    fault(
        "rows are shown to all but the last rank",
        flagged_norm_kernel,
        "wanted = lanes < OWNERS",
        "wanted = lanes < OWNERS - 1",
        BY_WORDS,
        DEADLOCK,
    ),
    fault(
        "what columns come to lies among the rows shown",
        flagged_norm_kernel,
        "tl.cast(call.rest + call.T, tl.int64) * ROW",
        "tl.cast(call.rest + call.T - 1, tl.int64) * ROW",
        BY_WORDS,
        (RACE, AssertionError, DEADLOCK),
    ),
    fault(
        "sums of words use one half in all calls",
        flagged_reduce,
        "half = signals.half_ptr(link.buffer_ptrs, owner, generation, link.half_bytes, tl.int64)",
        "half = signals.half_ptr(link.buffer_ptrs, owner, 0, link.half_bytes, tl.int64)",
        SUMS_BY_WORDS,
        (RACE, DEADLOCK),
    ),
    fault(
        "sums shown lie where terms do",
        flagged_reduce,
        "shown = W * share",
        "shown = share",
        SUMS_BY_WORDS[1:],
        (RACE, AssertionError, DEADLOCK),
    ),
    fault(
        "a sum is shown to all but its own rank",
        flagged_reduce,
        "flagged.store_flagged(places, finals, generation, lanes < W)",
        "flagged.store_flagged(places, finals, generation, lanes < W - 1)",
        SUMS_BY_WORDS[1:],
        DEADLOCK,
    ),
    fault(
        "sums are waited for that no rank has",
        flagged_reduce,
        "there = tl.where(numbers < blocks, numbers, i)",
        "there = numbers",
        SUMS_BY_WORDS[1:],
        (BOUNDS, DEADLOCK),
    ),
    fault(
        "sums are taken before they have their flag",
        flagged,
        "        late = greatest_of(tl.where(missing,",
        "        late = -1 + 0 * greatest_of(tl.where(missing,",
        SUMS_BY_WORDS[1:],
        AssertionError,
    ),
]

DISPATCH, IN_FP8, COMBINE = EXPERTS[:1], EXPERTS[1:2], EXPERTS[2:]

IN_EXPERTS = [
    fault(
        "rows are pulled before their owners have shown them",
        pulled_rows,
        "came, first = wait_for_owners(pull, V), tl.program_id(0)",
        "came, first = True, tl.program_id(0)",
        DISPATCH,
    ),
    fault(
        "rows are pulled from the other half",
        pulled_rows,
        "(pull.generation & 1)",
        "((pull.generation + 1) & 1)",
        DISPATCH,
        (RACE, AssertionError),
    ),
    fault(
        "one row too many is pulled",
        pulled_rows,
        "inside = (rows < last)[:, None]",
        "inside = (rows <= last)[:, None]",
        DISPATCH,
        (BOUNDS, RACE),
    ),
    fault(
        "numbers of another token are pulled",
        pulled_rows,
        "tl.load(shown + slots,",
        "tl.load(shown + slots // 2,",
        DISPATCH,
        AssertionError,
    ),
    fault(
        "scales of another row are pulled",
        pulled_rows,
        "tl.load(pull.table.rows + rows, mask=inside, other=0), mask=inside)",
        "tl.load(pull.table.rows + rows, mask=inside, other=0) // 2, mask=inside)",
        IN_FP8,
        AssertionError,
    ),
    fault(
        "tiles of experts do not wait for their rows",
        dispatch_kernel,
        "came = wait_for_rows(pull, tile.first, until, V)",
        "came = True",
        DISPATCH,
    ),
    fault(
        "tiles of experts wait for a chunk too few",
        pulled_rows,
        "last // pull.chunk_rows",
        "last // pull.chunk_rows - 1",
        DISPATCH,
        programs="concurrent",
    ),
    fault(
        "the first program tells that all results are there",
        combine_kernel,
        "if signals.is_last_program(link.signal_ptrs, rank, programs):",
        "if tl.program_id(0) == 0:",
        COMBINE,
    ),
    fault(
        "results go to the next slot",
        combine_kernel,
        "(slots * parts + part) * pitch",
        "(slots * parts + part + 1) * pitch",
        COMBINE,
        (BOUNDS, RACE, AssertionError),
    ),
    fault(
        "results are weighed before they have come",
        weigh_kernel,
        "came = signals.wait_for_peers(",
        "came = rank < WORLD_SIZE or signals.wait_for_peers(",
        COMBINE,
    ),
    fault(
        "a result without an expert counts",
        weigh_kernel,
        "used = (ids >= 0) & (ids < experts)",
        "used = ids < experts",
        COMBINE,
        (RACE, AssertionError),
    ),
    fault(
        "the table of few tokens is made before all ids have come",
        few_tokens,
        "came = wait_for_all_ranks(link, rank, generation, W, SENDERS)",
        "came = True",
        FEW[:1],
        (RACE, AssertionError),
    ),
    fault(
        "tiles of few tokens do not wait for the table",
        few_tokens,
        "came = signals.wait_for_own(",
        "came = rank < W or signals.wait_for_own(",
        FEW[:1],
        (RACE, BOUNDS, AssertionError),
    ),
    fault(
        "few tokens are not sent to the first expert of a rank",
        few_tokens,
        "(ids >= first) & (ids < after)",
        "(ids > first) & (ids < after)",
        FEW[:1],
        (RACE, AssertionError),
    ),
    fault(
        "few tokens are read in the other half",
        pulled_rows,
        "link.buffer_ptrs, pull.rank, generation, link",
        "link.buffer_ptrs, pull.rank, generation + 1, link",
        FEW[:1],
        (RACE, AssertionError),
    ),
    fault(
        "slots of few tokens are numbered through all ranks",
        few_tokens,
        "numbers % (pull.most * ROLES.top_k)",
        "numbers",
        FEW[:1],
        AssertionError,
    ),
    fault(
        "scales of few tokens are read in the other half",
        pulled_rows,
        "scales_ptr(link, pull.rank, generation, pull",
        "scales_ptr(link, pull.rank, generation + 1, pull",
        FEW[1:2],
        (RACE, AssertionError),
    ),
    fault(
        "scales of few tokens lie where the ids of the last token do",
        few_tokens,
        "scales_at = ids_at + 4 * W * most * ROLES.top_k",
        "scales_at = ids_at + 4 * (W * most - 1) * ROLES.top_k",
        FEW[1:2],
        (RACE, AssertionError),
    ),
    fault(
        "all parts of an expert's results go to the first one's slots",
        combine_kernel,
        "(slots * parts + part) * pitch",
        "(slots * parts + part * 0) * pitch",
        tuple(CUT),
        (RACE, AssertionError),
    ),
    fault(
        "results of few tokens are weighed before all have come",
        push_and_weigh_kernel,
        "came = wait_for_all_ranks(link, rank, generation, W, PUSHERS)",
        "came = True",
        FEW[2:],
    ),
    fault(
        "readers wait for the first writer of each rank",
        hand_over,
        "lanes // WRITERS == ranks",
        "(lanes // WRITERS == ranks) & (lanes % WRITERS == 0)",
        FEW,
        (RACE, AssertionError),
    ),
    fault(
        "a writer does not tell its own rank",
        hand_over,
        "signals.signal(words, generation, lanes < WORLD_SIZE)",
        "signals.signal(words, generation, lanes < WORLD_SIZE - 1)",
        FEW,
        DEADLOCK,
    ),
]

ENGINES = ("gather of rows by copy engines",)

IN_COPY_ENGINES = [
    fault(
        "copy engines do not wait for the owner",
        copy_engines,
        "range(first, last + 1, stride)",
        "range(first, first, stride)",
        ENGINES,
    ),
    fault(
        "copy engines wait for the last call",
        copy_engines,
        "peer, 0, generation, link.timeout_ns",
        "peer, 0, generation - 1, link.timeout_ns",
        ENGINES,
    ),
    fault(
        "a copied chunk is not announced",
        copy_engines,
        "signals.signal_local(slot, copied_by_engine(generation))",
        "signals.signal_local(slot, copied_by_engine(generation) - 1)",
        ENGINES,
        DEADLOCK,
    ),
    fault(
        "a copied chunk is announced as the next one",
        copy_engines,
        "WORLD_SIZE, 1, peer, chunk)",
        "WORLD_SIZE, 1, peer, chunk + 1)",
        ENGINES,
        DEADLOCK,
    ),
    fault(
        "a copied chunk is announced as one of the last call",
        copy_engines,
        "copied_by_engine(generation))",
        "copied_by_engine(generation - 1))",
        ENGINES,
        DEADLOCK,
    ),
    fault(
        "a call by copy engines ends before all have copied",
        copy_engines,
        "WORLD_SIZE, 0, 1, generation, link.timeout_ns",
        "WORLD_SIZE, 0, 1, generation - 1, link.timeout_ns",
        ENGINES,
    ),
]

IN_DIRECT = [
    fault(
        "a tensor is written while others read it",
        direct,
        "        agree(self._group, self._op, 0, call=self._call)",
        "        pass",
        ("direct reads",),
    ),
    fault(
        "a tensor is read before it is there",
        direct,
        "self._addresses = agree(group, op, x.data_ptr(), call=call)",
        "self._addresses = [x.data_ptr()] * group.world_size",
        ("direct reads",),
        (RACE, AssertionError),
    ),
]
