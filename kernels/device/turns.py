"""Taking turns to send, so that programs which finish tiles together do not all wait for the link.

All programs of a launch finish their first tile at the same time. If each stored it to a peer at
once, all would stall until the link had taken every tile, and again after each further tile:
arithmetic and transfers would add up. So they stand in SENDERS lines of neighbours, and one of each
line sends at a time:

    program 0    tile ....... send | tile ....... send | tile ....... send |           first line
    program 1    tile ....... wait  send | tile ....... send | tile ....... send |
    program 2    tile ....... send | tile ....... send | tile ....... send |           second line
    program 3    tile ....... wait  send | tile ....... send | tile ....... send |

After the first tiles the programs of a line are staggered, and each finishes as the link becomes
free.

Neighbours, as programs that finish together may have tiles of several owners: of those after this
rank, each a stretch of the programs. Those that send at a time are then of all these owners evenly.
If the first programs of all sent first, they would be of one owner, and the same on many ranks.

The n-th send of a program waits for the n-th of the one before it in line, which announces it in
the word (1, rank, program - 1) of the rank's own pad: (generation << 32) + sends so far, and
(generation + 1) << 32 once it has no more. Turns order no data: the signals are relaxed, and a
program that has waited too long goes on.

`make_and_send` makes the tiles of a program: first those of the owners after this rank, last its
own, and between the two the signal that tells peers of theirs. In a mesh, where each owner has a
link of its own, lines begin at different tiles of their peers' (`spread`), as those that programs
make at a time are else of a few owners: of 304 tiles in 256 for each, of 2. In virtual time the way
down of an 8B layer takes 135 us and not 148 on 8 MI300X at M = 2048.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from weft.collectives.device import signals
from weft.kernels.device import flattened, partial_sums, summed_tiles, tiles


@triton.jit
def follows(program, programs, SENDERS: tl.constexpr):
    """Whether `program` sends after the one before it, not first in its line."""
    return program % ((programs + SENDERS - 1) // SENDERS) > 0


@triton.jit
def _wait_turn(
    link, rank, program, generation, sends, WORLD_SIZE: tl.constexpr, SENDERS: tl.constexpr
):
    """Wait for the turn of `program` before its send number `sends` (from 0)."""
    if follows(program, tl.num_programs(0), SENDERS):
        before = signals.slot_ptr(link.signal_ptrs, rank, WORLD_SIZE, 1, rank, program - 1)
        own_pad = signals.peer_ptr(link.signal_ptrs, rank, tl.int64)
        signals.wait_local(own_pad, before, (generation << 32) + sends + 1, link.timeout_ns)


@triton.jit
def _end_turn(link, rank, program, generation, sends, WORLD_SIZE: tl.constexpr):
    """Announce that `program` has sent `sends` times in this call."""
    word = signals.slot_ptr(link.signal_ptrs, rank, WORLD_SIZE, 1, rank, program)
    signals.mark_local(word, (generation << 32) + sends)


@triton.jit
def _end_all(link, rank, program, generation, WORLD_SIZE: tl.constexpr):
    """Announce that `program` sends no more in this call."""
    word = signals.slot_ptr(link.signal_ptrs, rank, WORLD_SIZE, 1, rank, program)
    signals.mark_local(word, (generation + 1) << 32)


class Sending(NamedTuple):
    """What tiles need to know of a call. Fields: Terms, and their descriptors; rows, columns; the
    call's `link`, `rank` and `generation`; `offsets` of the owners' chunks, or None: then tile t
    of all is the (t // W)-th of owner t % W; the program and how many there are; rows, columns and
    number of tiles of a chunk, or of all, and how many an owner has at most; `before_own`.
    """

    terms: Any
    x_descs: Any
    w_descs: Any
    M: Any
    N: Any
    link: Any
    offsets: Any
    rank: Any
    generation: Any
    program: Any
    programs: Any
    tiles_m: Any
    tiles_n: Any
    count: Any
    ahead: Any
    away: Any


@triton.jit
def before_own(rank, count, WORLD_SIZE: tl.constexpr):
    """How many of the program's tiles lie before those of rank 0, and how many are peers'."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    after = tiles.first_of((rank + 1) * count, program, programs)
    ahead = tiles.cdiv(tl.maximum((WORLD_SIZE - 1 - rank) * count - after, 0), programs)
    return ahead, ahead + tiles.cdiv(tl.maximum(rank * count - program, 0), programs)


@triton.jit
def _numbered(call, item, V: tl.constexpr):
    """Of the program's tile `item`: its owner, and its number among the owner's."""
    if V.spread and item < call.away:
        line = call.program // ((call.programs + V.senders - 1) // V.senders)
        item = (item + line) % call.away
    number = call.program + (item - call.ahead) * call.programs
    if item < call.ahead:
        sent = (call.rank + 1) * call.count
        first = tiles.first_of(sent, call.program, call.programs)
        number = sent + first + item * call.programs
    owner = number // call.count
    return owner, number - owner * call.count


@triton.jit
def _place_of_item(call, item, V: tl.constexpr):
    """Of the program's tile `item`: whether it is there, row and column of its first element in
    the chunk, the row of x where the chunk begins, and the chunk's rows.
    """
    WORLD_SIZE: tl.constexpr = V.world_size
    owner, tile = _numbered(call, item, V)
    if call.offsets is None:
        tile, last = tile * WORLD_SIZE + owner, call.tiles_m * call.tiles_n - 1
        there = tile <= last
        start_m, start_n = summed_tiles.tile_place(
            tl.minimum(tile, last), call.tiles_m, call.tiles_n, V
        )
        begin, rows = 0, call.M
    else:
        start_m, start_n = summed_tiles.tile_place(tile, call.tiles_m, call.tiles_n, V)
        begin = tiles.element(call.offsets, owner, WORLD_SIZE)
        rows = tiles.element(call.offsets, owner + 1, WORLD_SIZE + 1) - begin
        there = start_m < rows
    return there, start_m, start_n, begin, rows


@triton.jit
def _items_of(call, V: tl.constexpr):
    """How many tiles the program makes."""
    left = tiles.cdiv((call.rank + 1) * call.count - call.program, call.programs)
    return call.ahead + tl.maximum(left, 0)


@triton.jit
def _begin_tile(call, item, part, until, V: tl.constexpr):
    """BEGIN of `weft.kernels.device.flattened`."""
    _, start_m, start_n, begin, _ = _place_of_item(call, item, V)
    return call.x_descs[0], begin + start_m, start_n, True


@triton.jit
def _finish_tile(call, acc, second, item, ready, V: tl.constexpr):
    """FINISH of `weft.kernels.device.flattened`."""
    _, start_m, start_n, begin, rows = _place_of_item(call, item, V)
    acc = summed_tiles.scaled(call.terms, acc, begin, start_m, start_n, rows, call.N, V)
    _send_tile(call, acc, item, V)


@triton.jit
def _send_tile(call, acc, item, V: tl.constexpr):
    """Store a tile in its owner's slot, in turn, and signal after the last one of peers."""
    WORLD_SIZE: tl.constexpr = V.world_size
    SENDERS: tl.constexpr = V.senders
    link, rank, program, generation = call.link, call.rank, call.program, call.generation
    owner, tile = _numbered(call, item, V)
    if V.senders > 0 and item < call.away:
        _wait_turn(link, rank, program, generation, item, WORLD_SIZE, SENDERS)
    where, slot = (rank, owner) if V.by_switch else (owner, rank)
    number = tl.cast(slot, tl.int64) * call.count + tile
    half = summed_tiles.half_of(link, where, generation)
    partial_sums.send_tile(half + number * (V.tiles.block_m * V.row_words), acc, V)
    _end_tile(call, item, V)


@triton.jit
def _end_tile(call, item, V: tl.constexpr):
    """Let the next program send, and signal after the last tile of peers."""
    WORLD_SIZE: tl.constexpr = V.world_size
    if V.senders > 0 and item < call.away - 1:
        _end_turn(call.link, call.rank, call.program, call.generation, item + 1, WORLD_SIZE)
    elif item == call.away - 1:
        _announce(call, V)


@triton.jit
def _announce(call, V: tl.constexpr):
    """Tell all peers that their tiles are there."""
    WORLD_SIZE: tl.constexpr = V.world_size
    link, rank = call.link, call.rank
    if V.senders > 0:
        _end_all(link, rank, call.program, call.generation, WORLD_SIZE)
    lanes, peers = signals.peer_lanes(rank + 1, WORLD_SIZE)
    firsts = tiles.first_of(peers * call.count, call.program, call.programs)
    words = signals.slot_ptr(link.signal_ptrs, peers, WORLD_SIZE, 0, rank, firsts)
    signals.signal(words, call.generation, lanes < WORLD_SIZE - 1)


@triton.jit
def make_and_send(call, V: tl.constexpr):
    """Make and send the tiles of a program, and signal."""
    if call.away == 0:
        _announce(call, V)
    if V.flattened:
        flattened.multiply_tiles(
            call, call.x_descs[0], call.w_descs[0], None, call.terms.Ks[0], 0, 1, _items_of,
            _begin_tile, _finish_tile, V,
        )  # fmt: skip
    else:
        for item in range(_items_of(call, V)):
            there, start_m, start_n, begin, rows = _place_of_item(call, item, V)
            if there:
                acc = summed_tiles.tile_product(
                    call.terms, call.x_descs, call.w_descs, begin, start_m, start_n, rows, call.N,
                    0, V,
                )  # fmt: skip
                _send_tile(call, acc, item, V)
            else:
                _end_tile(call, item, V)
