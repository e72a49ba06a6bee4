"""`weft doctor` as a rank of a run, started by torchrun or whatever starts the ranks of a program:

    torchrun --nnodes 2 --nproc-per-node 8 --master-addr ... -m weft doctor

Every rank tells what it has, and the first prints on which hosts they are, what differs between
them, how fast the network is, and which engines run the ops.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

from weft import settings, versions
from weft.bench.commands.trial import Finding, tried
from weft.bench.environment import cpu_name
from weft.errors import WeftError
from weft.launch import cores

_GIVEN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_COMPARED = ("WEFT_", "NCCL_", "GLOO_", "TORCH_", "CUDA_", "OMP_")
# Each rank's own, as torchrun and others set them.
_OWN = ("CUDA_VISIBLE_DEVICES", "TORCHELASTIC_")


def in_a_run() -> bool:
    """Whether something has started this process as one of several ranks."""
    return all(name in os.environ for name in _GIVEN) and int(os.environ["WORLD_SIZE"]) > 1


def group_findings() -> tuple[int, list[tuple[str, list[Finding]]]]:
    """This rank's number, and what is found of all ranks, by topic. Collective."""
    import torch
    import torch.distributed as dist

    from weft.collectives import resolve

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    bound = timedelta(seconds=settings.timeout_s())
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=bound)
    rank, W = dist.get_rank(), dist.get_world_size()
    told: list[dict[str, str]] = [{}] * W
    dist.all_gather_object(told, _mine(kind))
    found = [("ranks", differences(told))]
    try:
        found.append(("hosts", _host_findings(resolve(None), torch.device(kind), told)))
        trial = tried(rank, kind)
        wrong: list[list[Finding]] = [[]] * W
        dist.all_gather_object(wrong, [finding for finding in trial if finding.mark == "!!"])
        for other, theirs in enumerate(wrong):
            trial += [Finding("!!", f"rank {other}", str(each)) for each in theirs if other != rank]
        found.append(("trial", trial))
        dist.destroy_process_group()
    except WeftError as error:
        found.append(("trial", [Finding("!!", "set-up", str(error))]))
    return rank, found


def _mine(kind: str) -> dict[str, str]:
    """What is compared, of this rank."""
    import torch

    from weft.collectives.ranks.peer_access import nvlink_domain

    chip = torch.cuda.get_device_name() if kind == "cuda" else cpu_name()
    domain = nvlink_domain()
    mine = {"NVLink domain": domain} if domain else {}
    mine |= {"python": platform.python_version(), "processor": f"{chip}, {cores()} cores"}
    mine |= {
        name: versions.installed_version(name) or "none" for name in ("weft", *versions.OLDEST)
    }
    named = [name for name in os.environ if name.startswith(_COMPARED)]
    return mine | {name: os.environ[name] for name in named if not name.startswith(_OWN)}


def differences(told: Sequence[Mapping[str, str]]) -> list[Finding]:
    """Of what the ranks have told, what is not the same on all: versions must be."""
    findings = []
    for name in dict.fromkeys(name for each in told for name in each):
        having: dict[str, list[int]] = {}
        for rank, each in enumerate(told):
            having.setdefault(each.get(name, "not set"), []).append(rank)
        if len(having) > 1:
            text = "; ".join(f"{value} on {rank_spans(ranks)}" for value, ranks in having.items())
            is_version = name == "weft" or name in versions.OLDEST
            cure = "install the same everywhere" if is_version else ""
            findings.append(Finding("!!" if is_version else "--", name, text, cure))
    alike = f"{len(told)}, with the same versions"
    worst = any(finding.mark == "!!" for finding in findings)
    return [*([] if worst else [Finding("ok", "ranks", alike)]), *findings]


def rank_spans(ranks: Sequence[int]) -> str:
    """As in "ranks 0-3 6"."""
    starts = [ranks[0], *(b for a, b in pairwise(ranks) if b > a + 1)]
    ends = [*(a for a, b in pairwise(ranks) if b > a + 1), ranks[-1]]
    spans = [f"{a}-{b}" if b > a else str(a) for a, b in zip(starts, ends, strict=True)]
    return f"rank{'s' if len(ranks) > 1 else ''} {' '.join(spans)}"


def _host_findings(group: Any, device: Any, told: Sequence[Mapping[str, str]]) -> list[Finding]:
    """Which ranks each host has, and what they receive from those of another."""
    from weft.collectives import cost

    if group.apart:
        spanned = f"one, an NVLink domain of {', '.join(group.nodes)}: {told[0]['processor']}"
        return [Finding("ok", "host", spanned)]
    if not group.hosts:
        return [Finding("ok", "host", f"one, {platform.node()}: {told[0]['processor']}")]
    rates = cost.machine(group, device)
    findings = []
    for number, (ranks, node) in enumerate(zip(group.hosts, group.nodes, strict=True)):
        theirs = f"{node}: {rank_spans(ranks)}, {told[ranks[0]]['processor']}"
        findings.append(Finding("ok", f"host {number}", theirs))
    for source, row in enumerate(rates.between):
        to = ", ".join(f"{rate:,.0f} to {host}" for host, rate in enumerate(row) if host != source)
        findings.append(Finding("ok", f"MB/s from host {source}", f"{to}, for each rank there"))
    flat = f"{rates.between_us:,.0f} us; by a flat all-gather {rates.wire_us:,.0f} us"
    return [*findings, Finding("ok", "latency", f"{flat}, {rates.wire:,.0f} MB/s")]
