"""What a rank of `weft doctor` tries: the symmetric memory, the rates, each engine of each op."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

    from weft.collectives.cost import Machine
    from weft.collectives.ranks.group import Group

Mark = Literal["ok", "--", "!!"]


@dataclass(frozen=True)
class Finding:
    """One line: fine ("ok"), absent but not needed ("--"), or in the way ("!!").

    Attributes:
        cure: how to get what is missing.
    """

    mark: Mark
    what: str
    value: str
    cure: str = ""

    def __str__(self) -> str:
        cure = f"\n{'':21}{self.cure}" if self.cure else ""
        return f"{self.mark} {self.what:<17} {self.value}{cure}"


def tried(rank: int, kind: str) -> list[Finding]:
    """What this rank finds. Collective."""
    import torch

    import weft
    from weft.collectives import resolve
    from weft.kernels.engine import engines

    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device(kind, torch.cuda.current_device())
    group = resolve(None)
    findings: list[Finding] = []
    if group.hosts:
        findings.append(Finding("ok", "symmetric memory", "inside each host"))
    elif group.why:
        cure = "fused engines need it; ranks fall back to the process group"
        findings.append(Finding("!!", "symmetric memory", group.why, cure))
    else:
        held = f"{group.backend}, {group.world_size} ranks"
        findings.append(Finding("ok", "symmetric memory", held))
    # Ranks that take turns on a GPU would measure, and keep, what is true of no machine.
    shared = kind == "cuda" and group.world_size > torch.cuda.device_count()
    findings.append(
        Finding("--", "rates kept", "none are measured by ranks that share a GPU")
        if shared
        else _rates(group, device)
    )
    torch.manual_seed(0)
    rows = max(8, group.world_size)
    x, w = torch.randn(rows, 16, device=device), torch.randn(16, 8, device=device)
    y = x @ w
    expected: dict[Any, torch.Tensor] = {
        weft.all_gather_matmul: torch.cat([y] * group.world_size),
        weft.matmul_reduce_scatter: (y * group.world_size).chunk(group.world_size)[rank],
        weft.matmul_all_reduce: y * group.world_size,
    }
    for op, whole in expected.items():
        with weft.engine("triton") if shared and not group.why else nullcontext():
            told = weft.explain(op, x, w)
        right = torch.allclose(told.result, whole, rtol=1e-3, atol=1e-3)
        text = f"{told[0].engine}: {told[0].why}"
        cure = "" if right else "wrong results"
        findings.append(Finding("ok" if right else "!!", op.__name__, text, cure))
    problem = engines.Problem("matmul_all_reduce", 8, 8, 16, x.dtype, 0)
    for engine in ("triton", "host", "generic"):
        fits, why = engines.is_supported(engine, problem, group, device)
        interpreted = engine == "triton" and kind == "cpu"
        value = "interpreted, for tests" if fits and interpreted else "runs" if fits else why
        findings.append(Finding("ok" if fits else "--", f"engine {engine}", value))
    return findings


def _rates(group: Group, device: torch.device) -> Finding:
    """What the choice of engines is made from."""
    import torch
    import torch.distributed as dist

    from weft.collectives import cost

    rates = cost.machine(group, torch.device(device.type))
    fp32 = rates.flops_of(torch.float32) / 1e3
    doubt = doubt_of(rates, cost.matmul_rate(torch.float32, device))
    return Finding(
        "--" if doubt else "ok",
        "rates kept",
        f"matmul {fp32:.3g} GFLOP/s a rank, copy {rates.copy / 1e3:.3g} GB/s, signal "
        f"{rates.sync_us:.3g} us, {dist.get_backend()} {rates.wire / 1e3:.3g} GB/s after "
        f"{rates.wire_us:.3g} us",
        f"{doubt or 'as kept for this machine'}; `weft bench calibrate` measures again",
    )


def doubt_of(rates: Machine, matmul: float) -> str:
    """Why `rates` cannot be those of the quiet machine, which multiplies at `matmul` flop a us now;
    empty if they may be.
    """
    from weft.collectives.cost import BUSY

    if rates.flops["torch.float32"] * 1.5 < matmul:
        return f"too low: a rank multiplies at {matmul / 1e3:.3g} GFLOP/s now"
    if 0 < rates.copy < rates.wire:
        return "the process group cannot be quicker than the memory that it goes through"
    if rates.load > BUSY:
        return f"taken beside other work, at a load of {rates.load:.1f} a core"
    return ""
