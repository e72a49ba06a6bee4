"""flash_decode on all engines against float64: lengths of all kinds, pages, both ways to shard."""

from __future__ import annotations

import itertools
import random
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from needs import needs_interpreter

import weft
from weft import sim
from weft.kernels.attention import decode_host
from weft.kernels.attention.cache import Cache
from weft.kernels.attention.decode import flash_decode_reference
from weft.kernels.flash import decode_kernel, decode_tiles

ENGINES = ["host", "generic", pytest.param("triton", marks=needs_interpreter)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def drawn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """The same values on every device."""
    values = torch.randn(*shape, generator=generator, device="cpu")
    return values.to(torch.get_default_device())


def cut(x: torch.Tensor, block: int, rank: int, world_size: int, capacity: int) -> torch.Tensor:
    """Blocks rank, rank + W, .. of a whole cache (B, H, S, D), nan where nothing belongs."""
    mine = [x[:, :, s : s + block] for s in range(rank * block, x.shape[2], block * world_size)]
    held = torch.cat([x[:, :, :0], *mine], 2)
    out = x.new_full((x.shape[0], x.shape[1], capacity, x.shape[3]), torch.nan)
    out[:, :, : held.shape[2]] = held
    return out


def paged(x: torch.Tensor, block: int, table: torch.Tensor) -> torch.Tensor:
    """A cache (B, H, S, D) as pages (pages, H, P, D), in the order of `table`."""
    pages = x.new_full((int(table.numel()) + 2, x.shape[1], block, x.shape[3]), torch.nan)
    for row in range(len(table)):
        for i, page in enumerate(table[row].tolist()):
            pages[page] = x[row, :, i * block : (i + 1) * block]
    return pages


def one(rng: random.Random, engine: str, rank: int, world_size: int) -> None:
    B, H_kv, G = rng.choice([1, 2, 3]), rng.choice([1, 2]), rng.choice([1, 2, 3])
    T, D, block = rng.choice([1, 1, 2, 5, 8]), rng.choice([8, 12, 16]), rng.choice([1, 4, 16])
    dtype, by_head, pages = rng.choice(DTYPES), rng.random() < 0.25, rng.random() < 0.4
    longest, window = rng.choice([1, 3, 40, 70]), rng.choice([None, None, 0, 5, 33])
    scale = rng.choice([None, 0.3, -0.3, 0.0]) if engine == "triton" else None
    lengths = torch.tensor([[rng.randint(0, longest), 1 << 20] for _ in range(B)])[:, 0]
    generator = torch.Generator("cpu").manual_seed(rng.randrange(1 << 30))
    if by_head:
        H_kv *= world_size
    H = H_kv * G
    q = drawn(generator, B, H, T, D).to(dtype)
    k, v = (drawn(generator, B, H_kv, longest, D).to(dtype) for _ in range(2))
    case = (B, H_kv, G, T, D, block, dtype, by_head, pages, lengths.tolist(), window, scale, engine)
    expected, expected_lse = flash_decode_reference(
        q.double(), k.double(), v.double(), lengths, scale=scale, window=window
    )

    capacity = -(-longest // (block * (1 if by_head else world_size))) * block
    if by_head:
        shards = [cut(x.chunk(world_size, 1)[rank], block, 0, 1, capacity) for x in (k, v)]
    else:
        shards = [cut(x, block, rank, world_size, capacity) for x in (k, v)]
    options: dict[str, Any] = {"shard": "head" if by_head else "sequence"}
    if pages:
        order = torch.randperm(B * (capacity // block), generator=generator, device="cpu")
        table = order.view(B, capacity // block).int().to(q.device)
        table = torch.stack([table, table + 1000], -1)[..., 0]  # strided, as lengths are
        shards = [paged(x, block, table) for x in shards]
        options["block_table"] = table
    else:
        options["block_size"] = block
    if rng.random() < 0.5:
        shards = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in shards]
    for _ in range(2):
        with weft.engine(engine):  # type: ignore[arg-type]
            out, lse = weft.flash_decode(
                q, *shards, lengths, scale=scale, window=window, return_lse=True, **options
            )
        # Weights and the result are rounded to the dtype: half an eps each of N(0, 1) values, of
        # which the largest are 3. Averages of many are small: a looser bound would hold for zeros.
        atol = 3 * torch.finfo(dtype).eps + 64 * torch.finfo(torch.float32).eps
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol, msg=str(case))
        torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-4, msg=str(case))

    # Caches that are filled by the ranks themselves, and by the new tokens once more.
    filled = [torch.full_like(x, torch.nan) for x in shards]
    for count in (longest, T):
        positions = lengths.unsqueeze(1) + torch.arange(-count, 0)
        index = positions.clamp(0, longest - 1).view(B, 1, count, 1).expand(B, H_kv, count, D)
        with weft.engine(engine):  # type: ignore[arg-type]
            weft.append_to_cache(
                k.gather(2, index), v.gather(2, index), *filled, lengths, **options
            )
    with weft.engine(engine):  # type: ignore[arg-type]
        again = weft.flash_decode(q, *filled, lengths, scale=scale, window=window, **options)
    assert torch.equal(again, out), case
    held = [
        sum(p // block % world_size == rank or by_head for p in range(length))
        for length in lengths.tolist()
    ]
    stored = ~filled[0][..., 0].isnan()
    assert int(stored.sum()) == sum(held) * shards[0].shape[1], case


def cases(engine: str, seed: int, count: int) -> bytes:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rng = random.Random(seed)
    for _ in range(count):
        one(rng, engine, rank, world_size)
    # Bitwise the same on every rank.
    generator = torch.Generator("cpu").manual_seed(1)
    q = drawn(generator, 2, 4, 1, 8)
    k, v = (drawn(generator, 2, 2, 33, 8) for _ in range(2))
    shards = [cut(x, 4, rank, world_size, 20) for x in (k, v)]
    lengths = torch.tensor([33, 9])
    with weft.engine(engine):  # type: ignore[arg-type]
        out = weft.flash_decode(q, *shards, lengths, block_size=4)
        q[1, 2, 0, 0] = torch.nan
        spoilt = weft.flash_decode(q, *shards, lengths, block_size=4).isnan().all(-1)
    assert spoilt.flatten().nonzero().tolist() == [[6]]
    return bytes(out.view(torch.uint8).flatten().tolist())


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("engine", ENGINES)
def test_random_cases(ranks, virtual_ranks, engine: str, world_size: int) -> None:
    run = virtual_ranks if (engine, world_size) == ("triton", 2) else ranks
    found = run(world_size, cases, engine, world_size, 5 if engine == "triton" else 12)
    assert len(set(found)) == 1


@pytest.mark.sweep
@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize("engine", ENGINES)
def test_many_random_cases(ranks, engine: str, world_size: int) -> None:
    count = 60 if engine == "triton" else 300
    found = ranks(world_size, cases, engine, 100 + world_size, count, timeout_s=1800)
    assert len(set(found)) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("engine", ENGINES)
def test_caches_of_fp8(engine: str) -> None:
    """Caches of fp8 count as what they hold, in q's dtype."""
    rank, W, block = dist.get_rank(), dist.get_world_size(), 4
    generator = torch.Generator("cpu").manual_seed(0)
    lengths = torch.tensor([37, 9])
    for dtype in DTYPES:
        q = drawn(generator, 2, 4, 2, 8).to(dtype)
        k, v = (drawn(generator, 2, 2, 40, 8).to(torch.float8_e4m3fn) for _ in range(2))
        whole = [x.double() for x in (q, k, v)]
        expected, _ = flash_decode_reference(*whole, lengths, 0.5, window=20)
        wide = [cut(x.float(), block, rank, W, 20) for x in (k, v)]
        table = torch.randperm(10, generator=generator, device="cpu").view(2, 5).int().to(q.device)
        pages = [paged(x, block, table).to(torch.float8_e4m3fn) for x in wide]
        options: list[tuple[Any, dict[str, Any]]] = [
            ([x.to(torch.float8_e4m3fn) for x in wide], {"block_size": block}),
            (pages, {"block_table": table}),
        ]
        for caches, where in options:
            with weft.engine(engine):  # type: ignore[arg-type]
                out = weft.flash_decode(q, *caches, lengths, scale=0.5, window=20, **where)
            assert out.dtype == dtype
            atol = 3 * torch.finfo(dtype).eps + 64 * torch.finfo(torch.float32).eps
            torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)
    with pytest.raises(ValueError, match=r"float8_e4m3fn in both caches\), got"):
        weft.flash_decode(q, caches[0], caches[1].to(torch.float8_e5m2), lengths)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("engine", ENGINES)
def test_pages_before_the_window_may_be_gone(engine: str) -> None:
    """Pages whose tokens no query sees are not read: a server has given them to others."""
    rank, W, block, window = dist.get_rank(), dist.get_world_size(), 4, 9
    generator = torch.Generator("cpu").manual_seed(0)
    lengths = torch.tensor([61, 30])
    q = drawn(generator, 2, 4, 2, 8)
    k, v = (drawn(generator, 2, 2, 64, 8) for _ in range(2))
    expected, _ = flash_decode_reference(q, k, v, lengths, window=window)
    blocks = 64 // (block * W)
    table = torch.arange(2 * blocks, dtype=torch.int32).view(2, blocks)
    caches = [paged(cut(x, block, rank, W, 64 // W), block, table) for x in (k, v)]
    for row, length in enumerate(lengths.tolist()):
        first = (length - 2 - window) // (block * W)
        for cache in caches:
            cache[table[row, :first].long()] = torch.nan
        table[row, :first] = -1
    new = k[:, :, -1:]
    with weft.engine(engine):  # type: ignore[arg-type]
        out = weft.flash_decode(q, *caches, lengths, block_table=table, window=window)
        weft.append_to_cache(new, new, *caches, lengths, block_table=table)
        with pytest.raises(ValueError, match=r"block_table must name pages"):
            weft.flash_decode(q, *caches, lengths, block_table=table, window=40)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("paged_cache", [False, True])
def test_what_a_graph_captures_of_the_other_engines(
    monkeypatch: pytest.MonkeyPatch, paged_cache: bool, window: int | None
) -> None:
    """It looks at all that there is room for; what lies behind the ends may be anything."""
    generator = torch.Generator().manual_seed(0)
    monkeypatch.setattr(decode_host, "_FEWEST_KEYS", 1 << 30)  # torch's kernel is for CPUs
    lengths = torch.tensor([37, 2, 0, 9], dtype=torch.int32)
    for T, rank in itertools.product((1, 3), (0, 1)):
        q = torch.randn(4, 4, T, 8, generator=generator)
        k, v = (cut(torch.randn(4, 2, 40, 8, generator=generator), 4, rank, 2, 24) for _ in "kv")
        table = None
        if paged_cache:
            table = torch.randperm(24, generator=generator).view(4, 6).int()
            k, v = (paged(x, 4, table) for x in (k, v))
            for row, length in enumerate(lengths.tolist()):
                table[row, -(-length // 8) :] = -1
        cache = Cache(k, v, table, 4, rank, 2)
        expected = decode_host.attend_locally(q, cache, lengths, 0.3, window)
        torch.testing.assert_close(
            decode_host._attend_captured(q, cache, lengths, 0.3, window), expected
        )


def decode_twice(rank: int, D: int = 8, H: int = 2, T: int = 1) -> list[torch.Tensor]:
    """Two calls on the same buffers; few items, so that each is split."""
    found = []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        q = torch.randn(1, H, T, D, generator=generator)
        k, v = (torch.randn(1, 1, 40, D, generator=generator) for _ in range(2))
        expected, _ = flash_decode_reference(q.double(), k.double(), v.double(), torch.tensor([37]))
        shards = [cut(x, 4, rank, 3, 16) for x in (k, v)]
        with weft.engine("triton"):
            out = weft.flash_decode(q, *shards, torch.tensor([37]), block_size=4)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
        found.append(out)
    return found


@needs_interpreter
@pytest.mark.parametrize(
    "programs", ["sequential", pytest.param("concurrent", marks=pytest.mark.slow)]
)
def test_schedules(programs: sim.Programs) -> None:
    sim.run(3, decode_twice, schedules=10, programs=programs)


@needs_interpreter
def test_large_sums_are_merged_some_columns_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_kernel, "_MERGED", 16 * 16)  # of 16 rows 40 wide: three times 16
    sim.run(3, lambda rank: decode_twice(rank, 40))


@needs_interpreter
def test_many_rows_on_a_key_head_are_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decode_tiles.tile_shape(64, 192, torch.bfloat16) == (32, 256, 2)
    monkeypatch.setattr(decode_tiles, "_TILE", 2 * 16 * 16)
    assert decode_tiles.tile_shape(39, 12, torch.float32) == (16, 16, 3)  # the last one of 7 rows
    sim.run(3, lambda rank: decode_twice(rank, 12, H=13, T=3))


@needs_interpreter
@pytest.mark.parametrize("lengths", [[3, 1], [13, 25], [0, 40]])
def test_float64_with_several_queries(lengths: list[int]) -> None:
    """Beside few keys and many, which other kernels attend to."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, tokens, 8, dtype=torch.float64, generator=generator)
        for heads, tokens in ((4, 5), (2, 40), (2, 40))
    )
    told = torch.tensor(lengths)
    out, lse = weft.flash_decode(q, k, v, told, shard=None, return_lse=True)
    right, right_lse = flash_decode_reference(q, k, v, told)
    torch.testing.assert_close(out, right)
    torch.testing.assert_close(lse, right_lse)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shard", ["sequence", "head"])
@pytest.mark.parametrize("engine", ["host", "generic"])
def test_float64_is_merged_in_float64(engine: Literal["host", "generic"], shard: Any) -> None:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 3, 8, dtype=torch.float64, generator=generator)
    k, v = (torch.randn(2, 2, 48, 8, dtype=torch.float64, generator=generator) for _ in range(2))
    lengths, dim = torch.tensor([21, 43]), 1 if shard == "head" else 2
    shards = [x.chunk(2, dim)[rank] for x in (k, v)]
    with weft.engine(engine):
        found = weft.flash_decode(q, *shards, lengths, shard=shard, return_lse=True)
    right = flash_decode_reference(q, k, v, lengths)
    torch.testing.assert_close(found, right, rtol=0, atol=1e-13)
    with weft.engine("triton"), pytest.raises(NotImplementedError, match="float64"):
        weft.flash_decode(q, *shards, lengths, shard=shard)


@needs_interpreter
@pytest.mark.ranks(2)
def test_more_keys_than_the_kernel_counts_are_refused_by_all_ranks() -> None:
    """Even if only one of them has room for so many."""
    room = (1 << 31) - 16 * dist.get_rank()
    k, q = (torch.zeros(1, 1, 1, 8).expand(1, 1, n, 8) for n in (room, 1))
    with weft.engine("triton"):
        assert not weft.flash_decode(q, k, k, torch.tensor([40]), block_size=16).any()
        with pytest.raises(NotImplementedError, match="32 bits, not 2147483648"):
            weft.flash_decode(q, k, k, torch.tensor([(1 << 32) - 16]), block_size=16)


def test_as_many_queries_as_there_are() -> None:
    """Tiles bound the width of a head alone: 16 heads of 8 tokens, 256 wide, on one key head."""
    sim.run(3, lambda rank: decode_twice(rank, 256, H=16, T=8))
    assert decode_tiles.tile_shape(256, 1024, torch.bfloat16) == (16, 1024, 16)


@pytest.mark.ranks(2)
def test_errors() -> None:
    q, k = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 8, 8)
    lengths = torch.tensor([3, 4])

    def table(*pages: int) -> torch.Tensor:
        return torch.tensor([[page] for page in pages], dtype=torch.int32)

    for change, text in [
        ({"shard": "heads"}, 'must be "sequence", "head" or None'),
        ({"block_size": 3}, "must divide the 8 tokens"),
        ({"window": -1}, "window must be a number of tokens >= 0"),
        ({"window": 2.5}, "window must be a number of tokens >= 0"),
        ({"block_table": torch.zeros(1, 2)}, r"block_table must be \(2, blocks\) int32"),
        ({"block_table": table(0, 2), "shard": "head"}, r"pages 0\.\.1 .* got \[0, 2\]"),
        ({"block_table": table(0, -1), "shard": "head"}, r"pages 0\.\.1"),
        ({"lengths": torch.tensor([3.0, 4.0])}, "int32 or int64"),
        ({"lengths": [3, 4]}, "lengths must be a tensor, got list"),
        ({"lengths": torch.tensor([3, 40])}, "has room for 8"),
        ({"lengths": torch.tensor([3, 17])}, "has room for 8|not so on rank 0"),  # rank 1 holds 8
        ({"lengths": torch.empty(2, dtype=torch.int32, device="meta")}, "must be on cpu, as q is"),
        ({"k_cache": k[:, :1].expand(2, 3, 8, 8)}, r"caches \(2, 3, 8, 8\) and \(2, 2, 8, 8\)"),
    ]:
        arguments: dict[str, Any] = {"q": q, "k_cache": k, "v_cache": k, "lengths": lengths}
        with pytest.raises(ValueError, match=text):
            weft.flash_decode(**(arguments | change))
    with pytest.raises(NotImplementedError, match="no gradient"):
        weft.flash_decode(q.clone().requires_grad_(), k, k, lengths)
    new = torch.randn(2, 2, 1, 8)
    for more, text in [
        ((new, new[:, :1]), "k and v must match"),
        ((q, q), "must hold the 2 key heads"),
        ((new.double(), new.double()), "k_cache must have k's dtype"),
    ]:
        with pytest.raises(ValueError, match=text):
            weft.append_to_cache(*more, k, k, lengths)
    with pytest.raises(ValueError, match=r"has room for 8|not so on rank 0"):
        weft.append_to_cache(new, new, k, k, torch.tensor([3, 17]))
    with pytest.raises(NotImplementedError, match="no gradient"):
        weft.append_to_cache(new.clone().requires_grad_(), new, k, k, lengths)


@pytest.mark.parametrize("engine", ["host", "triton"])
def test_autograd_sees_what_is_appended(engine: str) -> None:
    lengths = torch.tensor([2], dtype=torch.int32)
    new, cache = torch.ones(1, 1, 1, 16), torch.zeros(2, 1, 1, 4, 16)
    q = torch.ones(1, 1, 1, 16, requires_grad=True)
    saved = (q * cache[0]).sum()
    with weft.engine(engine):  # type: ignore[arg-type]
        weft.append_to_cache(new, new, *cache.unbind(), lengths, shard=None)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()
