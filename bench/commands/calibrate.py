"""`weft bench calibrate`: measure the rates that auto chooses by, and keep them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

_MEANING = {
    "copy": ("GB/s", 1e-3, "a rank reads from a peer's memory"),
    "sync_us": ("us", 1.0, "signals to all peers, and theirs back"),
    "wire": ("GB/s", 1e-3, "a rank receives in the process group's all-gather"),
    "wire_us": ("us", 1.0, "an all-gather of nothing in the process group"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, keep and print."""
    from weft.bench import cli
    from weft.bench.environment import environment
    from weft.launch import launch

    parser = argparse.ArgumentParser(prog="weft bench calibrate", description=__doc__)
    cli.add_machine_options(parser)
    options = cli.machine_options(parser.parse_args(argv), parser)
    where = environment(options.ranks, options.device, options.threads)
    if not where["quiet"]:
        print(
            f"warning: the load is {where['load']} on {where['cores']} cores. Rates measured "
            f"beside other work are too low; later processes that find it lower measure again."
        )
    path, before, after = launch(
        options.ranks, _body, options.device, device=options.device, threads=options.threads
    )[0]
    print(f"{options.ranks} ranks of {options.threads} threads on {options.device}")
    for name, rate in after["flops"].items():
        _print_rate(
            f"matmul {name.removeprefix('torch.')}",
            "GFLOP/s",
            1e-3,
            rate,
            (before or {}).get("flops", {}).get(name),
            "all ranks at once",
        )
    for name, (unit, scale, meaning) in _MEANING.items():
        _print_rate(name, unit, scale, after[name], (before or {}).get(name), meaning)
    print(f"kept in {path}")
    return 0


def _print_rate(
    name: str, unit: str, scale: float, value: float, before: float | None, meaning: str
) -> None:
    was = f"(was {before * scale:.3g})" if before is not None else ""
    print(f"  {name:<16}{value * scale:>8.3g} {unit:<8}{was:<14} {meaning}")


def _body(
    rank: int, progress: Callable[[Any], None], device: str
) -> tuple[str, dict[str, Any] | None, dict[str, Any]]:
    """On each rank: the file, the rates kept before, and those measured now."""
    import torch

    from weft.collectives import cost, resolve

    group, where = resolve(None), torch.device(device)
    known = _on_all(cost.file_of(group, where) is not None)
    before = asdict(cost.machine(group, where)) if known else None
    after = asdict(cost.calibrate(group, where))
    return str(cost.file_of(group, where) or "no file: none can be written"), before, after


def _on_all(value: bool) -> bool:
    """Rank 0's value, on every rank: rank 0 alone reads the file."""
    import torch.distributed as dist

    values = [value]
    dist.broadcast_object_list(values)
    return values[0]
