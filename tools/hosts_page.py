"""How layers scale over hosts of GPUs, without having any: `python -m tools.hosts_page`.

Writes the tables of docs/hosts_scaling.md, from closed forms (`weft.sim.time.levels`); with
--plans also the table of plans among 4,096 ranks, timed here in one process with torch's fake
process group.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch

from weft.bench import shapes
from weft.collectives.prices.hardware import H100
from weft.markdown import between_marks, markdown_lines
from weft.sim.time.levels import FusedOverHosts, LayerTimes, layer_times, over_hosts

PAGE = Path(__file__).resolve().parent.parent / "docs" / "hosts_scaling.md"
MODELS = {name: shapes.MODELS[name] for name in ("llama-3-70b", "llama-3-405b")}
HOSTS = (1, 2, 4, 8, 16, 32, 64)
GBITS = (100, 200, 400, 800)  # of a GPU's own card
STRONG_TOKENS, WEAK_TOKENS = 65536, 8192
_OP_HOSTS, _OP_TOKENS = (2, 4, 8, 16), (1024, 4096, 16384, 65536)


def times(model: str, tokens: int, hosts: int, gbits: int = 400) -> LayerTimes:
    """Of a layer of `model` on H100s."""
    m = MODELS[model]
    qkv, out = (m.heads + 2 * m.kv_heads) * m.head_dim, m.heads * m.head_dim
    hardware = replace(H100, rail_bandwidth=gbits / 8 * 1e9)
    return layer_times(tokens, m.hidden, m.ffn, qkv, out, hardware, hosts)


def _scaling(title: str, tokens_on: Any) -> list[str]:
    names = "model", "hosts", "tokens", "two levels ms", "flat ms", "FSDP across ms", "quickest"
    lines = []
    for model in MODELS:
        for hosts in HOSTS:
            found = times(model, tokens_on(hosts), hosts)
            ms = [f"{us / 1e3:.1f}" for us in found]
            lines.append([model, str(hosts), f"{tokens_on(hosts):,}", *ms, _quickest(found)])
    return [f"### {title}", "", *markdown_lines(names, lines), ""]


def _quickest(found: LayerTimes) -> str:
    named = zip(("two levels", "flat", "FSDP across"), found, strict=True)
    least = min(found)
    return ", ".join(name for name, us in named if us == least)


def host_scaling() -> str:
    """Strong and weak scaling, and from how many tokens a host on FSDP pays."""
    parts = [
        *_scaling("Strong scaling", lambda hosts: STRONG_TOKENS),
        *_scaling("Weak scaling", lambda hosts: WEAK_TOKENS * hosts),
        "### By network, on 8 hosts",
        "",
    ]
    names = "model", "Gbit/s a GPU", "FSDP hidden from tokens a host", "two levels / flat there"
    lines = []
    for model in MODELS:
        for gbits in GBITS:
            tokens, found = 256, times(model, 256 * 8, 8, gbits)
            while found.sharded > times(model, tokens, 1, gbits).sharded:
                tokens *= 2
                found = times(model, tokens * 8, 8, gbits)
            ratio = f"{found.flat / found.two_levels:.2f}"
            lines.append([model, str(gbits), f"{tokens:,}", ratio])
    return "\n".join([*parts, *markdown_lines(names, lines)])


def ops() -> str:
    """The feed-forward layer's two matmuls: where fusion across hosts pays."""
    names = "op", "model", "tokens", *(f"{hosts} hosts" for hosts in _OP_HOSTS)
    lines = []
    for op in get_args(FusedOverHosts):
        for model, m in MODELS.items():
            for tokens in _OP_TOKENS:
                cells = []
                for hosts in _OP_HOSTS:
                    part = m.ffn // (8 * hosts)
                    N, K = (part, m.hidden) if op == "all_gather_matmul" else (m.hidden, part)
                    made = over_hosts(op, tokens, N, K, H100, hosts, 8)
                    cells.append(f"{made.two_levels:,.0f} ({made.flat / made.two_levels:.2f})")
                lines.append([op, model, f"{tokens:,}", *cells])
    return "\n".join(markdown_lines(names, lines))


def plans(ranks: int = 4096) -> str:
    """Times and memory of plans of redistributions, cold, in this process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from weft.dtensor.move.collective_plans import collective_plan
    from weft.dtensor.move.redistribute import redistribute_plan
    from weft.dtensor.move.transfers import move_plan

    torch.distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
    side = int(ranks**0.5)
    mesh = init_device_mesh("cpu", (side, side))
    names = "from", "to", "steps", "cold ms", "KiB kept"
    lines = []
    for before, after in (
        ((S0, S1), (S1, S0)), ((S0, S0), (R, R)), ((S0, R), (S1, R)), ((P, R), (R, R)),
        ((P, S0), (S0, R)), ((P, P), (S0, S1)),
    ):  # fmt: skip
        found, kept = [], 0
        for again in range(6):
            for cache in (move_plan, collective_plan):
                cache.cache_clear()
            shape = 8192, 28672 + side * again  # another tensor: nothing is known of it
            tracemalloc.start()
            start = time.perf_counter()
            plan = redistribute_plan(mesh, shape, torch.bfloat16, before, after, by_groups=True)
            for step in plan.steps:  # what a rank asks of it before it moves anything
                assert not step.is_local and step.room
            found.append(1e3 * (time.perf_counter() - start))
            kept = tracemalloc.get_traced_memory()[0]
            tracemalloc.stop()
        words = (" ".join(map(str, each)) for each in (before, after))
        ms = f"{statistics.median(found):.1f}"
        lines.append([*words, str(len(plan.steps)), ms, f"{kept / 1024:.0f}"])
    torch.distributed.destroy_process_group()
    return "\n".join(markdown_lines(names, lines))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="tools.hosts_page", description=__doc__)
    parser.add_argument("--page", type=Path, default=PAGE, help="(default docs/hosts_scaling.md)")
    parser.add_argument("--plans", action="store_true", help="time plans, too")
    args = parser.parse_args(argv)
    page = args.page.read_text()
    made = {"layers": host_scaling(), "ops": ops()} | ({"plans": plans()} if args.plans else {})
    for mark, text in made.items():
        page = between_marks(page, mark, text)
    args.page.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
