"""How the bytes of a collective move: no gradients, no checks of arguments.

CPU ranks exchange small data through symmetric memory, in windows small enough to stay in the cache
between the rank that writes them and the ranks that read them:

    for each window:   own window -> own half   signal   wait for a peer   its half -> result

Reductions do so at any size, as they read the peers' windows in place. Large data that is only
copied is read straight from the peers' memory where the system allows it (see `direct`). On GPUs it
is kernels or the process group, whichever is quicker; where symmetric memory does not reach, the
process group. Over several hosts, these inside each, and the process group between: see `hosts`.

Each function works along dim 0 and takes `given`, a tensor for the result, or None for a new one,
and what else is to be `told` to the other ranks: see `exchange`; `as_is`: see `process_groups`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist

from weft import settings
from weft.collectives import hosts, process_groups
from weft.collectives.device.launches import tell_written
from weft.collectives.memory import direct
from weft.collectives.memory.exchange import Exchange, agree, exchange
from weft.collectives.memory.workspace import Workspace, workspace
from weft.collectives.prices import between_hosts
from weft.collectives.prices.hardware import fabric_of
from weft.collectives.process_groups import (
    COMBINE,
    ReduceOp,
    by_group,
    sendable,
    summed_in_fp32,
)
from weft.collectives.profiled import profiled
from weft.collectives.protocols import Collective
from weft.collectives.ranks.chunks import chunk_sizes, offsets
from weft.collectives.ranks.flight import GENERIC, Call, call_of
from weft.collectives.ranks.group import Group
from weft.collectives.ranks.reports import check_all
from weft.errors import MismatchError

_WINDOW_BYTES = 1 << 20  # half of the smallest L2 cache in use; see `weft bench collectives`
_DIRECT_BYTES = 256 << 10  # from this size on, saving a copy is worth a second synchronization


@profiled("all_gather")
def gather(
    x: torch.Tensor,
    group: Group,
    sizes: list[int],
    given: torch.Tensor | None = None,
    *,
    dim: int = 0,
) -> torch.Tensor:
    shape, own = (sum(sizes), *x.shape[1:]), offsets(sizes)[group.rank]
    call = call_of(
        "all_gather",
        (x.dtype, x.shape[1:], ("sizes", tuple(sizes)), ("dim", dim)),
        settings.current_engine(),
    )
    return _moved(_gather_into, call, shape, x, group, given, own, sizes)


def _gather_into(
    out: torch.Tensor, x: torch.Tensor, group: Group, call: Call, sizes: list[int]
) -> None:
    row = math.prod(x.shape[1:])
    numels = [size * row for size in sizes]
    widest = max(numels)
    nbytes = widest * x.element_size()
    way = _way("all_gather", group, x, nbytes, call)
    if way == "generic":
        process_groups.gather(out.split(sizes), x, group)
        return
    if way == "hosts":
        hosts.gather(out, x, group, sizes, gather)
        return
    if way == "switch":
        _by_switch("all_gather", out, x, group, call, numels)
        return
    if way == "triton":
        for launch in _kernels("all_gather", group, call, x, nbytes):
            with launch as (kernels, ws, config, window):
                kernels.launch_all_gather(x, out, ws, numels, config, window)
        return
    starts = offsets(numels)
    first = starts[group.rank]
    if _read_directly(widest, group, x):
        shards = direct.Readable(group, "all_gather", call, x)
        out.view(-1)[first : first + x.numel()].copy_(x.view(-1))
        for peer in group.peers():
            shards.read(peer, 0, out.view(-1)[starts[peer] : starts[peer] + numels[peer]])
        shards.done()
        return
    for start, stop in _windows(widest, x.dtype):
        nbytes = (stop - start) * x.element_size()
        with exchange(group, nbytes, "all_gather", x.device, call=call) as ex:
            ex.put(x, *_window_in(start, stop - start, x.numel()))
            ex.signal_all()
            # This rank's own part is read back like the others', from the cache.
            for peer in (group.rank, *ex.peers()):
                ex.wait(peer)
                begin, end = _window_in(start, stop - start, numels[peer])
                ex.get(peer, out, starts[peer] + begin, starts[peer] + end)
            ex.result(out)


@profiled("reduce_scatter")
def scatter(
    x: torch.Tensor,
    group: Group,
    sizes: list[int],
    op: ReduceOp,
    given: torch.Tensor | None = None,
    *,
    dim: int = 0,
    told: tuple[Hashable, ...] = (),
    as_is: bool = False,
) -> torch.Tensor:
    shape, own = (sizes[group.rank], *x.shape[1:]), offsets(sizes)[group.rank]
    call = call_of(
        f"reduce_scatter({op})",
        (x.dtype, x.shape, ("sizes", tuple(sizes)), ("dim", dim), *told),
        settings.current_engine(),
    )
    return _moved(_scatter_into, call, shape, x, group, given, own, sizes, op, as_is)


def _scatter_into(
    out: torch.Tensor,
    x: torch.Tensor,
    group: Group,
    call: Call,
    sizes: list[int],
    op: ReduceOp,
    as_is: bool,
) -> None:
    row = math.prod(x.shape[1:])
    numels = [size * row for size in sizes]
    nbytes = max(numels) * x.element_size()
    way = _way("reduce_scatter", group, x, nbytes, call, op)
    if way == "generic":
        out.copy_(process_groups.scatter(x, group, sizes, op, as_is))
        return
    if way == "hosts":
        out.copy_(hosts.scatter(x, group, sizes, op, as_is, scatter))
        return
    if way == "switch":
        _by_switch("reduce_scatter", out, x, group, call, numels)
        return
    if way == "triton":
        own = numels[group.rank]
        for launch in _kernels("reduce_scatter", group, call, x, nbytes):
            with launch as (kernels, ws, config, window):
                part = out.view(-1)[min(window[0], own) : window[1]]
                kernels.launch_reduce(x, part, ws, numels, op, config, window)
        return
    _reduce_parts("reduce_scatter", out.view(-1), x, group, call, numels, op, passed_on=False)


def _reduce_parts(
    name: str,
    out: torch.Tensor,
    x: torch.Tensor,
    group: Group,
    call: Call,
    numels: list[int],
    op: ReduceOp,
    *,
    passed_on: bool,
) -> None:
    """Reduce this rank's part of every rank's x into `out`, or into its place there if the reduced
    parts are `passed_on` to every rank.

    The ranks' parts of x have `numels` elements and lie one after another. A reduced window is
    passed on together with the next window's terms: half as many waits, and still in the cache.
    """
    world_size, rank, starts = group.world_size, group.rank, offsets(numels)
    windows = _windows(max(numels), x.dtype, world_size)  # a rank writes one for each rank
    widest = max((stop - start for start, stop in windows), default=0)
    slot_bytes = -(-widest * x.element_size() // 64) * 64
    name, x = f"{name}({op})", x.view(-1)
    result = out[starts[rank] :][: numels[rank]] if passed_on else out

    def part(of: int, window: tuple[int, int]) -> tuple[int, int]:
        start, stop = window
        begin, end = _window_in(start, stop - start, numels[of])
        return starts[of] + begin, starts[of] + end

    steps = pairwise([None, *windows, None]) if passed_on else ((None, w) for w in windows)
    for before, window in steps:
        room = (world_size + passed_on) * slot_bytes
        with exchange(group, room, name, x.device, call=call) as ex:
            if before:
                ex.put(out, *part(rank, before), world_size * slot_bytes)
            for peer in ex.peers():
                if window:
                    ex.put(x, *part(peer, window), peer * slot_bytes)
                ex.signal(peer)
            for peer in ex.peers():
                ex.wait(peer)
                if before:
                    ex.get(peer, out, *part(peer, before), world_size * slot_bytes)
            if window:
                own, into = x[slice(*part(rank, window))], result[slice(*window)]
                if rank > 1 and own.data_ptr() == into.data_ptr():  # earlier terms go there first
                    own = own.clone()
                _reduce_into(into, _terms(ex, group, own, rank * slot_bytes), op)
            ex.result(out)


# With more ranks than this, each rank reduces one part of larger data and passes it on (two-shot);
# every rank reduces all of smaller data (one-shot).
_ONE_SHOT_RANKS = 2
_ONE_SHOT_BYTES = 32 << 10


@profiled("all_reduce")
def all_reduce(
    x: torch.Tensor,
    group: Group,
    op: ReduceOp,
    given: torch.Tensor | None = None,
    *,
    as_is: bool = False,
    told: tuple[Hashable, ...] = (),
) -> torch.Tensor:
    call = call_of(f"all_reduce({op})", (x.dtype, x.shape, *told), settings.current_engine())
    return _moved(_all_reduce_into, call, x.shape, x, group, given, 0, op, as_is)


def _all_reduce_into(
    out: torch.Tensor, x: torch.Tensor, group: Group, call: Call, op: ReduceOp, as_is: bool
) -> None:
    nbytes = x.numel() * x.element_size()
    way = _way("all_reduce", group, x, nbytes, call, op)
    if way == "generic":
        out.copy_(process_groups.all_reduce(x, group, op, as_is))
        return
    if way == "hosts":
        parts = chunk_sizes(x.numel(), group.world_size)
        part = hosts.scatter(x.view(-1), group, parts, op, as_is, scatter)
        hosts.gather(out.view(-1), part, group, parts, gather)
        return
    if way == "switch":
        from weft.collectives.kernels.collective_launch import switch_windows

        for start, stop in switch_windows(x.numel(), x.element_size()):
            given, made = (each.view(-1)[start:stop] for each in (x, out))
            _by_switch("all_reduce", made, given, group, call, _shares_by_switch(given, group))
        return
    if way == "triton":
        for launch in _kernels("all_reduce", group, call, x, nbytes, op):
            with launch as (kernels, ws, config, (start, stop)):
                given, made = (each.view(-1)[start:stop] for each in (x, out))
                kernels.launch_reduce(given, made, ws, None, op, config)
        return
    if nbytes > (_WINDOW_BYTES if group.world_size <= _ONE_SHOT_RANKS else _ONE_SHOT_BYTES):
        parts = chunk_sizes(x.numel(), group.world_size)
        _reduce_parts("all_reduce", out.view(-1), x, group, call, parts, op, passed_on=True)
    elif nbytes:
        with exchange(group, nbytes, f"all_reduce({op})", x.device, call=call) as ex:
            ex.put(x, 0, x.numel())
            ex.signal_all()
            # `out` may be `x`: read this rank's part where it is not overwritten.
            own = ex.local(tuple(x.shape), x.dtype)
            _reduce_into(out, _terms(ex, group, own, 0), op)
            ex.result(out)


def _terms(ex: Exchange, group: Group, own: torch.Tensor, offset: int) -> list[torch.Tensor]:
    """Every rank's contribution in rank order, the peers' in place, after waiting for them."""
    ex.wait_all()
    shape = tuple(own.shape)
    return [
        own if rank == group.rank else ex.peer(rank, shape, own.dtype, offset)
        for rank in range(group.world_size)
    ]


def _reduce_into(out: torch.Tensor, terms: list[torch.Tensor], op: ReduceOp) -> None:
    """out = terms[0] op terms[1] op ..., in this order, rounded once."""
    combine = COMBINE[op]
    if summed_in_fp32(out.dtype, op):
        acc = combine(terms[0].float(), terms[1])
    else:
        acc = combine(terms[0], terms[1], out=out)
    for term in terms[2:]:
        combine(acc, term, out=acc)
    if op == "avg":
        acc.div_(len(terms))
    if acc is not out:
        out.copy_(acc)


@profiled("all_to_all")
def all_to_all(
    x: torch.Tensor,
    group: Group,
    sends: list[int],
    receives: list[int],
    explicit: bool,
    given: torch.Tensor | None = None,
) -> torch.Tensor:
    shape, splits = (sum(receives), *x.shape[1:]), (sends, receives, explicit)
    shares = "split sizes given" if explicit else f"equal shares of {x.shape[0]}"
    call = call_of("all_to_all", (x.dtype, x.shape[1:], shares), settings.current_engine())
    return _moved(_all_to_all_into, call, shape, x, group, given, None, *splits)


def _all_to_all_into(
    out: torch.Tensor,
    x: torch.Tensor,
    group: Group,
    call: Call,
    sends: list[int],
    receives: list[int],
    explicit: bool,
) -> None:
    row = math.prod(x.shape[1:])
    # Equal shares are known to every rank; explicit ones must be exchanged. The host of a GPU does
    # not wait for that: shares that it does not know are left to the process group.
    engine, table = settings.current_engine(), [sends]
    unknown = explicit and (
        bool(group.unreached(x.device))
        or engine == "generic"
        or (group.on_gpus(x.device) and engine == "auto")
    )
    if explicit and not unknown:
        table = _split_table(group, call, sends, receives)
    widest = max(max(row_sizes) for row_sizes in table) * row
    nbytes = _UNKNOWN_BYTES if unknown else widest * x.element_size()
    way = _way("all_to_all", group, x, nbytes, call)
    if way == "generic":
        args = sendable(out), sendable(x), receives, sends
        by_group(dist.all_to_all_single, group, x.is_cuda, *args)
        return
    if way == "triton":
        sent, received = ([row * n for n in each] for each in (sends, receives))
        for launch in _kernels("all_to_all", group, call, x, nbytes):
            with launch as (kernels, ws, config, window):
                kernels.launch_exchange(
                    x, out, ws, offsets(sent), sent, received, widest, config, window
                )
        return
    leave, arrive = offsets([n * row for n in sends]), offsets([n * row for n in receives])
    own, first, into = sends[group.rank] * row, leave[group.rank], arrive[group.rank]
    out.view(-1)[into : into + own].copy_(x.view(-1)[first : first + own])
    if _read_directly(widest, group, x):
        inputs = direct.Readable(group, "all_to_all", call, x)
        for peer in group.peers():
            start = row * sum(table[peer if explicit else 0][: group.rank])
            inputs.read(peer, start, out.view(-1)[arrive[peer] :][: receives[peer] * row])
        inputs.done()
        return
    window = min(_window_elements(x.dtype) // (group.world_size - 1) + 1, max(widest, 1))
    slot_bytes = -(-window * x.element_size() // 64) * 64
    for start in range(0, widest, window):
        room = group.world_size * slot_bytes
        with exchange(group, room, "all_to_all", x.device, call=call) as ex:
            for peer in ex.peers():
                begin, end = _window_in(start, window, sends[peer] * row)
                ex.put(x, leave[peer] + begin, leave[peer] + end, peer * slot_bytes)
                ex.signal(peer)
            for peer in ex.peers():
                ex.wait(peer)
                begin, end = _window_in(start, window, receives[peer] * row)
                place = group.rank * slot_bytes
                ex.get(peer, out, arrive[peer] + begin, arrive[peer] + end, place)
            ex.result(out)


def _split_table(
    group: Group, call: Call, sends: list[int], receives: list[int]
) -> list[list[int]]:
    """What every rank sends to every rank, after checking that the receivers expect it."""
    shape = (2, group.world_size)
    with exchange(group, 16 * group.world_size, "all_to_all", call=call) as ex:
        ex.local(shape, torch.int64).copy_(torch.tensor([sends, receives], device="cpu"))
        ex.signal_all()
        ex.wait_all()
        tables = [ex.peer(r, shape, torch.int64).tolist() for r in range(group.world_size)]
    for source, (sent, _) in enumerate(tables):
        for target, (_, expected) in enumerate(tables):
            if sent[target] != expected[source]:
                raise MismatchError(
                    f"all_to_all: rank {source} sends {sent[target]} rows to rank {target}, which "
                    f"expects {expected[source]}"
                )
    return [sent for sent, _ in tables]


@profiled("broadcast")
def broadcast(
    x: torch.Tensor, group: Group, src: int, given: torch.Tensor | None = None
) -> torch.Tensor:
    call = call_of(f"broadcast from rank {src}", (x.dtype, x.shape), settings.current_engine())
    return _moved(_broadcast_into, call, x.shape, x, group, given, 0, src)


def _broadcast_into(out: torch.Tensor, x: torch.Tensor, group: Group, call: Call, src: int) -> None:
    way = _way("broadcast", group, x, x.numel() * x.element_size(), call)
    if way == "hosts":
        held = [x.numel() * (rank == src) for rank in range(group.world_size)]
        shard = x.view(-1)[: held[group.rank]]
        hosts.gather(out.view(-1), shard, group, held, gather)
        return
    if way == "generic":
        if group.rank == src:
            out.copy_(x)
        by_group(dist.broadcast, group, x.is_cuda, sendable(out), group.ranks[src])
        return
    name = f"broadcast from rank {src}"
    if _read_directly(x.numel(), group, x):
        whole = direct.Readable(group, name, call, x)
        if group.rank == src:
            out.copy_(x)
        else:
            whole.read(src, 0, out)
        whole.done()
        return
    for start, stop in _windows(x.numel(), x.dtype):
        nbytes = (stop - start) * x.element_size()
        with exchange(group, nbytes, name, x.device, call=call) as ex:
            if group.rank == src:
                ex.put(x, start, stop)
                ex.signal_all()
            else:
                ex.signal_all()
                ex.wait(src)
            ex.get(src, ex.result(out), start, stop)


def _plain(x: torch.Tensor) -> torch.Tensor:
    """x as values in contiguous memory, with pending conjugation or negation carried out."""
    x = x.contiguous()
    return x.resolve_conj().resolve_neg() if x.is_conj() or x.is_neg() else x


def _moved(
    move: Callable[..., None],
    call: Call,
    shape: Sequence[int],
    x: torch.Tensor,
    group: Group,
    given: torch.Tensor | None,
    own: int | None,
    *args: Any,
) -> torch.Tensor:
    """The result of `move(out, x, group, call, *args)` for a contiguous x, in `given` if there is
    one.

    That may share memory with x in one way: row `own` of the longer is the first of the other.
    Otherwise x is copied first, as it would be overwritten while it is read.
    """
    out = given if given is not None and _plain(given) is given else x.new_empty(shape)
    x = _plain(x)
    if out is given and _overlap(x, out):
        long, short = (x, out) if x.numel() > out.numel() else (out, x)
        skipped = None if own is None else own * math.prod(shape[1:])
        if skipped is None or long.view(-1)[skipped:].data_ptr() != short.data_ptr():
            x = x.clone()
    if group.world_size == 1:
        out.copy_(x)
    else:
        noted = group.calls.begin(call)
        try:
            move(out, x, group, call, *args)
        except BaseException:
            group.calls.end(noted, failed=True)
            raise
        group.calls.end(noted)
    if given is None:
        return out
    if given is out:
        tell_written(out)
        return out
    return given.copy_(out)


def _overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    (a, b), (c, d) = ((t.data_ptr(), t.data_ptr() + t.nbytes) for t in (x, y))
    return max(a, c) < min(b, d)


Moved = Collective | Literal["broadcast"]
Way = Literal["triton", "switch", "host", "generic", "hosts"]
_UNKNOWN_BYTES = 1 << 62  # of shares that a GPU's host does not wait for


def _way(
    op: Moved,
    group: Group,
    x: torch.Tensor,
    nbytes: int,
    call: Call,
    reduce_op: ReduceOp | None = None,
) -> Way:
    """How a collective runs: by kernels, of which some have the NVLink switch add up or copy, from
    the host through symmetric memory, by the process group, or in two levels over several hosts.
    `nbytes` is the size of its largest piece, the same on every rank, as the answer must be.

    Process groups neither compare calls nor keep to WEFT_TIMEOUT_S. Where CPU ranks share memory,
    they have met there before, for a tenth of the time that Gloo takes.
    """
    check_all()
    way: Way
    engine = call.where
    if hosts.offered(op, group):
        whole = nbytes * group.world_size if op in ("all_gather", "reduce_scatter") else nbytes
        way, why = between_hosts.choice(op, group, x.device, whole)
    elif unreached := group.unreached(x.device):
        way, why = "generic", unreached
    elif engine == "generic":
        way, why = "generic", "asked for"
    elif engine == "triton" or (group.on_gpus(x.device) and engine == "auto"):
        asked = engine == "triton"
        way, why = _kernel_or_not(op, group, x, nbytes, reduce_op, asked=asked)
    else:
        way, why = "host", "through symmetric memory"
    if settings.tracing():
        shapes = f"{'x'.join(map(str, x.shape))}, {group.world_size} ranks"
        settings.record(op, "triton" if way == "switch" else way, why, shapes)
    if way == "generic" and not (
        group.unreached(x.device) or group.virtual or group.on_gpus(x.device)
    ):
        agree(group, op, 0, call=call)
    if way == "generic" and group.on_gpus(x.device):
        group.calls.check()
    if way in ("generic", "hosts"):  # the others tell more: see `Exchange`, `Workspace.call`
        group.calls.runs(GENERIC)
    return way


def _kernel_or_not(
    op: Moved,
    group: Group,
    x: torch.Tensor,
    nbytes: int,
    reduce_op: ReduceOp | None,
    *,
    asked: bool,
) -> tuple[Way, str]:
    from weft.collectives.device import signals
    from weft.collectives.kernels import collective_launch as kernels

    on_gpus = group.on_gpus(x.device)
    instead: Way = "generic" if on_gpus else "host"
    reduces = op in ("all_reduce", "reduce_scatter")
    if op == "broadcast" or x.is_complex() or (reduces and x.dtype not in kernels.REDUCED):
        return instead, f"no kernel for a {op} of {x.dtype}"
    if not x.is_cuda:
        ready, why = signals.interpreter_ready()
        if not on_gpus or not ready:
            return "triton" if ready else instead, why
    switch = _switch_may(op, x, reduce_op)
    if asked:
        by_switch = reduces and switch and _switch_reaches(op, group, x, nbytes)
        return "switch" if by_switch else "triton", "asked for"
    if nbytes == _UNKNOWN_BYTES:
        return instead, "shares that only the other ranks know"
    config = _launch_config(op, group, x, nbytes, reduce_op)
    fabric = fabric_of(group, x.device)
    way, _, why = kernels.quickest_way(op, nbytes, fabric, config, switch=switch)
    if way == "switch" and not _switch_reaches(op, group, x, nbytes):
        way, _, why = kernels.quickest_way(op, nbytes, fabric, config, switch=False)
    return instead if way == "generic" else way, why


def _launch_config(
    op: Moved, group: Group, x: torch.Tensor, nbytes: int, reduce_op: ReduceOp | None
) -> Any:
    """How a kernel for `nbytes`, as `_way` has them, is launched: the same on all ranks."""
    from weft.collectives.kernels import collective_launch as kernels

    amd = torch.version.hip or (group.virtual and group.virtual.chip.startswith("gfx"))
    words = reduce_op in ("sum", "avg") and x.dtype in kernels.IN_WORDS and not amd
    on_gpus = group.on_gpus(x.device)
    links = fabric_of(group, x.device) if on_gpus and op == "all_reduce" else None
    return kernels.collective_config(
        op, nbytes, group.world_size, on_gpus, links=links, words=words
    )


def _kernels(
    op: Moved,
    group: Group,
    call: Call,
    x: torch.Tensor,
    nbytes: int,
    reduce_op: ReduceOp | None = None,
) -> Iterator[AbstractContextManager[tuple[Any, ...]]]:
    """The launches of a call of `op`, to be made in turn: the kernels, a workspace, a configuration
    and the window that one moves of each rank's piece.
    """
    from weft.collectives.kernels import collective_launch as kernels

    W = group.world_size
    config = _launch_config(op, group, x, nbytes, reduce_op)
    size = x.element_size()
    windows = kernels.windows(nbytes // size, size, W, config) or [(0, 0)]
    widest = max(stop - start for start, stop in windows) * size
    room = kernels.workspace_bytes(widest, W, config)
    if config.by_words and group.virtual is None:  # enough for any that a graph may capture later
        room = kernels.WORDS_ROOM
    ws = workspace(group, room, channel=config.channel, device=x.device)

    @contextmanager
    def launch(window: tuple[int, int]) -> Iterator[tuple[Any, ...]]:
        with ws.call(op, call=call):
            yield kernels, ws, config, window

    return map(launch, windows)


def _switch_may(op: Moved, x: torch.Tensor, reduce_op: ReduceOp | None) -> bool:
    """Whether a collective may go by the NVLink switch: sums, which it makes in an order of its
    own, only if WEFT_MULTIMEM asks for that.
    """
    from weft.collectives.kernels import multimem

    if not x.is_cuda or x.dtype not in multimem.DTYPES:
        return False
    return op == "all_gather" or (reduce_op == "sum" and settings.multimem())


def _switch_memory(op: Collective, group: Group, x: torch.Tensor, nbytes: int) -> Workspace:
    """For `nbytes` as `_way` has them; of an all_reduce for the largest of its parts."""
    from weft.collectives.kernels import multimem
    from weft.collectives.kernels.collective_launch import switch_windows

    piece, size = nbytes, x.element_size()
    if op == "all_reduce":
        most = max(
            (stop - start for start, stop in switch_windows(nbytes // size, size)), default=0
        )
        piece = -(-most * size // group.world_size) + 16
    room = multimem.workspace_bytes(op, piece, group.world_size)
    return workspace(group, room, channel="multimem", device=x.device)


def _switch_reaches(op: Collective, group: Group, x: torch.Tensor, nbytes: int) -> bool:
    """Whether symmetric memory has a multicast address; the same answer on every rank."""
    return bool(_switch_memory(op, group, x, nbytes).buffer.multicast_ptr)


def _by_switch(
    op: Collective,
    out: torch.Tensor,
    x: torch.Tensor,
    group: Group,
    call: Call,
    numels: list[int],
) -> None:
    """Have the switch copy, or add up, the ranks' pieces of `numels` elements."""
    from weft.collectives.kernels import multimem

    nbytes = (x.numel() if op == "all_reduce" else max(numels)) * x.element_size()
    ws = _switch_memory(op, group, x, nbytes)
    with ws.call(op, call=call):
        multimem.launch_switched(op, x, out, ws, numels)


def _shares_by_switch(x: torch.Tensor, group: Group) -> list[int]:
    from weft.collectives.kernels import multimem

    return multimem.vector_shares(x.numel(), x.element_size(), group.world_size)


def _read_directly(numel: int, group: Group, x: torch.Tensor) -> bool:
    """Whether a transfer of `numel` elements between two ranks bypasses symmetric memory."""
    large = numel * x.element_size() >= _DIRECT_BYTES
    return large and not group.on_gpus(x.device) and direct.reaches(group)


def _window_in(start: int, length: int, numel: int) -> tuple[int, int]:
    """The window of `length` elements from `start` on, cut to `numel`."""
    return min(start, numel), min(start + length, numel)


def _window_elements(dtype: torch.dtype) -> int:
    return _WINDOW_BYTES // dtype.itemsize


def _windows(numel: int, dtype: torch.dtype, share: int = 1) -> list[tuple[int, int]]:
    """Equal windows of at most _WINDOW_BYTES / `share`: a short last one would cost as much as a
    full one.
    """
    count = -(-numel * share // _window_elements(dtype))
    if count <= 1:
        return [(0, numel)] if numel else []
    edges = [numel * i // count for i in range(count + 1)]
    return list(pairwise(edges))
