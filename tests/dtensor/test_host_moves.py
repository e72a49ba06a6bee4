"""Redistribution over several hosts: each byte crosses once, whatever the pair of layouts.

Ranks pretend to be on hosts, as in `test_hosts`. What they send to others is counted, and held
against the least that any program could send, worked out element by element.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from test_hosts import on_hosts
from torch.distributed.device_mesh import DeviceMesh

import weft
from weft.dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from weft.dtensor.move import host_moves

R, P = Replicate(), Partial()
S = Shard
Case = tuple[Sequence[Any], Sequence[Any]]

# What no single collective is, and what users do.
NAMED: list[Case] = [
    ([R, S(0)], [S(0), R]), ([S(0), R], [R, S(0)]), ([S(0), S(1)], [S(1), S(0)]),
    ([S(0), R], [R, R]), ([R, S(0)], [R, R]), ([S(0), S(0)], [R, R]), ([P, R], [R, R]),
    ([P, R], [S(0), R]), ([P, S(0)], [R, S(0)]), ([P, P], [R, S(1)]), ([P, P], [R, R]),
    ([P, S(1)], [S(1), R]), ([R, P], [S(0), S(0)]), ([P, S(0)], [P, R]), ([P, R], [P, S(1)]),
]  # fmt: skip


@contextmanager
def counted(layout: str) -> Iterator[list[int]]:
    """The bytes that this rank sends to ranks of other hosts, by the process group."""
    sent, real = [0], dist.all_to_all_single

    def counts(out: Any, x: Any, receives: Any, sends: Any, group: Any, async_op: bool) -> Any:
        ranks, me = dist.get_process_group_ranks(group), layout[dist.get_rank()]
        far = sum(n for n, rank in zip(sends, ranks, strict=True) if layout[rank] != me)
        sent[0] += far * (x[:1].nbytes if len(x) else 0)
        return real(out, x, receives, sends, group=group, async_op=async_op)

    others = {
        name: patch.object(dist, name, side_effect=AssertionError(name))
        for name in ("all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor", "broadcast")
    }
    with patch.object(dist, "all_to_all_single", counts):
        for each in others.values():
            each.start()
        try:
            yield sent
        finally:
            for each in others.values():
                each.stop()


def held(shape: Sequence[int], sizes: Sequence[int], at: Sequence[int], ends: Any) -> torch.Tensor:
    """The numbers of the elements that a rank has."""
    ids = torch.arange(math.prod(shape)).view(tuple(shape))
    for size, i, placement in zip(sizes, at, ends, strict=True):
        if isinstance(placement, Shard):
            parts = [*ids.chunk(size, placement.dim)]
            ids = parts[i] if i < len(parts) else ids.narrow(placement.dim, 0, 0)
    return ids


def weight(size: int, i: int) -> int:
    """Of a term: those of a mesh dim add up to one."""
    return i + 1 if i else 1 - sum(range(2, size + 1))


class Pair:
    """From one layout to another on a mesh of ranks on hosts."""

    def __init__(self, mesh: torch.Tensor, layout: str, shape: Sequence[int], case: Case) -> None:
        self.mesh, self.layout, self.shape, (self.source, self.target) = mesh, layout, shape, case
        self.at = {int(mesh[i]): i for i in itertools.product(*map(range, mesh.shape))}
        both = list(enumerate(zip(*case, strict=True)))
        self.kept = [dim for dim, (a, b) in both if a == b == P]
        self.summed = [dim for dim, (a, b) in both if a == P != b]

    def local(self, whole: torch.Tensor, rank: int, end: str) -> torch.Tensor:
        """What a rank has before, or after."""
        at = self.at[rank]
        terms = [*self.kept, *(self.summed if end == "source" else [])]
        ids = held(self.shape, self.mesh.shape, at, getattr(self, end))
        factor = math.prod(weight(self.mesh.shape[dim], at[dim]) for dim in terms)
        return whole.view(-1)[ids] * factor

    def least(self) -> int:
        """Elements that must cross."""
        hosts, needed = sorted(set(self.layout)), 0
        of: dict[Any, dict[Any, set[str]]] = {}  # element: term: on which hosts it is
        to: dict[Any, set[str]] = {}
        for rank, at in self.at.items():
            kept, term = (tuple(at[dim] for dim in dims) for dims in (self.kept, self.summed))
            host = self.layout[rank]
            for e in held(self.shape, self.mesh.shape, at, self.source).flatten().tolist():
                of.setdefault((kept, e), {}).setdefault(term, set()).add(host)
            for e in held(self.shape, self.mesh.shape, at, self.target).flatten().tolist():
                to.setdefault((kept, e), set()).add(host)
        known: dict[Any, int] = {}
        for element, wanting in to.items():
            terms = [frozenset(each) for each in of[element].values()]
            key = frozenset(terms), frozenset(wanting)
            if key not in known:
                lacking = {h for h in wanting if not all(h in each for each in terms)}
                known[key] = 0 if not lacking else min(
                    _least_senders(terms, root, hosts) + len(lacking - {root}) for root in hosts
                )  # fmt: skip
            needed += known[key]
        return needed


def _least_senders(terms: list[frozenset[str]], root: str, hosts: list[str]) -> int:
    """How few other hosts have, with the root, all terms."""
    left = [each for each in terms if root not in each]
    return next(
        count
        for count in range(len(hosts))
        for some in itertools.combinations(hosts, count)
        if all(each & {*some} for each in left)
    )


def walk_body(
    layout: str, grid: list[list[int]], shape: Sequence[int], count: int, later: bool
) -> list[tuple[str, int, int]]:
    """What each move of a walk has sent from this rank, and what all must."""
    rank, rng, told = dist.get_rank(), random.Random(7), []
    kinds = list(itertools.product((R, S(0), S(1), P), repeat=2))
    pairs = [
        case
        for case in itertools.product(kinds, repeat=2)
        if case[0] != case[1] and all(a == P or b != P for a, b in zip(*case, strict=True))
    ]
    some = rng.sample(pairs, count)
    whole = torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(1)).float()
    with on_hosts(layout):
        mesh = DeviceMesh("cpu", grid)
        for case in [*NAMED, *some]:
            pair = Pair(torch.tensor(grid), layout, shape, case)
            local = pair.local(whole, rank, "source")
            size = {"shape": torch.Size(shape), "stride": whole.stride()}
            x = DTensor.from_local(local, mesh, case[0], run_check=False, **size)
            x.redistribute(placements=case[1])  # groups and plans are made
            with counted(layout) as sent:
                once, again = (x.redistribute(placements=case[1], async_op=later) for _ in "12")
                local.fill_(0)  # which a deferred result does not see
                once, again = once.to_local(), again.to_local()
            expected = pair.local(whole, rank, "target")
            assert torch.equal(once, expected), f"{case}: {once}, expected {expected}"
            assert torch.equal(once, again)
            told.append((f"{case}", sent[0], 2 * 4 * pair.least()))
    return told


WALKS = [
    ("AABB", [[0, 1], [2, 3]], (7, 12)),
    ("ABBB", [[0, 1], [2, 3]], (8, 5)),
    ("BAAB", [[3, 0], [1, 2]], (6, 9)),
    ("ABCA", [[0, 1], [2, 3]], (9, 4)),
]
SIX = [
    ("AAABBB", [[0, 1, 2], [3, 4, 5]], (7, 12)),
    ("ABBACC", [[0, 5], [4, 1], [2, 3]], (10, 7)),
]


@pytest.mark.slow_where(layout=["ABBB", "BAAB", "ABCA"], later=True)
@pytest.mark.parametrize("later", [False, True], ids=["now", "later"])
@pytest.mark.parametrize(
    ("layout", "grid", "shape"), [*WALKS, *(pytest.param(*w, marks=pytest.mark.slow) for w in SIX)]
)
def test_each_byte_crosses_once(
    ranks: Any, layout: str, grid: Any, shape: Any, later: bool
) -> None:
    """A walk of pairs of layouts, on meshes in any order: right, and at the least of bytes."""
    told = ranks(len(layout), walk_body, layout, grid, shape, 20, later)
    for moves in zip(*told, strict=True):
        sent = sum(each for _, each, _ in moves)
        assert sent == moves[0][2], f"{moves[0][0]}: {sent} bytes sent, {moves[0][2]} at least"


def kinds_body(layout: str) -> None:
    """Any dtype, reduction, shape and mesh: as by the flat process group."""
    at = divmod(dist.get_rank(), 2)

    def values(shape: tuple[int, ...], dtype: torch.dtype, placements: Any) -> torch.Tensor:
        ids = held(shape, (2, 2), at, placements)
        alike = sum(i << d for d, (i, p) in enumerate(zip(at, placements, strict=True)) if p != R)
        generator = torch.Generator().manual_seed(alike)
        return torch.randint(0, 5, ids.shape, generator=generator).to(dtype)

    shape, empty = (4, 6), (0, 3)
    with on_hosts(layout):
        mesh = init_device_mesh("cpu", (2, 2))
        whole = torch.arange(20.0).view(4, 5) * (dist.get_rank() + 1)  # the first one's counts
        for placements in ([S(0), R], [S(1), S(0)], [R, R]):
            x = distribute_tensor(whole, mesh, placements)
            assert torch.equal(x.full_tensor(), torch.arange(20.0).view(4, 5))
        two, back = DeviceMesh("cpu", [1, 2]), DeviceMesh("cpu", [3, 2, 1, 0])
        some: list[tuple[tuple[int, ...], torch.dtype, Any, Any, Any]] = [
            (shape, torch.bfloat16, [P, R], [R, R], None),
            (shape, torch.float16, [P, P], [R, S(1)], None),
            (shape, torch.int64, [Partial("avg"), R], [S(1), R], None),
            (shape, torch.float32, [Partial("max"), Partial("max")], [R, R], None),
            (shape, torch.bool, [Partial("bor"), R], [R, R], None),
            (shape, torch.complex64, [S(0), S(1)], [R, R], None),
            (shape, torch.float8_e4m3fn, [S(1), R], [R, S(0)], None),
            ((), torch.float64, [P, P], [R, R], None),
            ((), torch.float32, [Partial("avg"), R], [R, R], None),
            (empty, torch.float32, [S(1), R], [R, R], None),
            (shape, torch.float32, [S(0), R], [R], two),
            (shape, torch.float32, [P, S(0)], [S(1)], back),
            (shape, torch.int32, [S(0), R], [S(0)], back),
        ]
        for number, (size, dtype, source, target, to) in enumerate(some):
            whole = DTensor.from_local(
                values(size, dtype, source), mesh, source, run_check=False, shape=torch.Size(size),
                stride=torch.empty(size).stride(),
            )  # fmt: skip
            made = []
            for engine in "auto", "generic", "auto":
                with weft.engine(engine):  # type: ignore[arg-type]
                    made.append(whole.redistribute(to or mesh, target).to_local())
            ours, flat, again = (each.view(torch.uint8) if each.ndim else each for each in made)
            assert torch.equal(ours, flat) and torch.equal(ours, again), (number, made)


def test_kinds_of_tensors(ranks: Any) -> None:
    ranks(4, kinds_body, "AABB")


def again_body() -> None:
    """A mesh that is made again has groups of its own. Nothing of one before may be met, on some
    ranks and not on others, until garbage is collected.
    """
    gc.disable()
    try:
        with on_hosts("AABB"):
            mesh = init_device_mesh("cpu", (2, 2))
            x = DTensor.from_local(torch.ones(2, 3), mesh, [S(0), R], run_check=False)
            told = weft.explain(x.redistribute, placements=[R, R])
            assert [each.engine for each in told] == ["hosts"]
            kept = weakref.ref(x._layout)
            del x, told
        assert kept() is None
    finally:
        gc.enable()


def test_nothing_of_a_mesh_is_left(ranks: Any) -> None:
    ranks(4, again_body)


def apart_body() -> None:
    """No rank waits for another to read an asynchronous result, nor to read in the same order."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    with on_hosts("AABB"):
        mesh = init_device_mesh("cpu", (2, 2))
        rows, terms = torch.arange(24.0).view(4, 6), torch.full((4, 6), rank + 1.0)
        x = DTensor.from_local(rows.chunk(2)[rank // 2], mesh, [S(0), R], run_check=False)
        y = DTensor.from_local(terms, mesh, [P, P], run_check=False)
        for number in range(6):  # more than are under way at a time
            told = weft.explain(lambda: x.redistribute(placements=[R, R], async_op=True))
            assert [each.engine for each in told] == ["hosts"]
            late = x.redistribute(placements=[R, R], async_op=True)
            total = y.redistribute(placements=[S(1), R], async_op=True)
            if rank == number % 4:
                while store.add(f"read {number}", 0) < 3:
                    time.sleep(0.01)
            reads = [
                lambda late=late: torch.equal(late.to_local(), rows),
                lambda total=total: torch.equal(total.to_local(), torch.full((4, 3), 10.0)),
            ]
            assert all(read() for read in (reads if rank % 2 else reversed(reads)))
            store.add(f"read {number}", 1)


def test_no_rank_waits_for_anothers_read(ranks: Any) -> None:
    ranks(4, apart_body)


def untold_body() -> None:
    """The thread that receives never tells the ranks of its host: an error, not what was there."""
    with on_hosts("AABB"):
        mesh = init_device_mesh("cpu", (2, 2))
        x = DTensor.from_local(torch.ones(2, 3), mesh, [S(0), R], run_check=False)
        bound = patch.object(host_moves, "settings", SimpleNamespace(timeout_s=lambda: 0.1))
        with patch.object(host_moves, "_arrived", lambda *_: None), bound:
            moved = x.redistribute(placements=[R, R], async_op=True)
            with pytest.raises(weft.WeftError, match="has not told"):
                moved.to_local()
        assert torch.equal(x.redistribute(placements=[R, R]).to_local(), torch.ones(4, 3))


def test_what_has_come_but_is_not_told(ranks: Any) -> None:
    ranks(4, untold_body)
