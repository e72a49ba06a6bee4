"""`weft doctor`: what this machine has, how weft can use it, and what is missing.

The exit status is 0 if fused ops can run on two or more ranks of this machine, through symmetric
memory and with right results; 1 if they cannot. Started by torchrun, it looks at all ranks of that
run instead: their hosts, what differs between them, and the network. With --flight it tells what
the ranks of a run have called last; 2 if that cannot be read.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from weft import versions
from weft.cli import EXTRAS, INSTALL_EXTRAS, Parser, several
from weft.errors import printable

if TYPE_CHECKING:
    import torch

    from weft.collectives.cost import Machine
    from weft.collectives.ranks.group import Group

Mark = Literal["ok", "--", "!!"]

_DRAWN = "weft demo, bench"
_TORCH_FOR_GPUS = "a driver is installed: get torch for it, see https://pytorch.org/get-started"


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


def main(argv: Sequence[str] | None = None) -> int:
    """Look, try, and print."""
    parser = Parser("weft doctor", __doc__)
    parser.add_argument(
        "--ranks", type=several, default=2, metavar="W", help="ranks to try with (2)"
    )
    parser.add_argument(
        "--flight",
        type=Path,
        metavar="DIR",
        help="the last calls of all ranks side by side: DIR is their $WEFT_FLIGHT_DIR",
    )
    args = parser.parse_args(argv)
    if args.flight is not None:
        return _flight(args.flight)
    from weft.bench.commands import across

    rank, found = 0, list[tuple[str, list[Finding]]]()
    if across.in_a_run():
        rank, found = across.sections()
        found = [("versions", _versions()), ("settings", _settings()), *found]
    else:
        found = sections(args.ranks)
    bad, lacking = 0, False
    for title, findings in found if rank == 0 else []:
        print(title)
        for finding in findings:
            print(f"  {finding}")
            bad += finding.mark == "!!"
            lacking |= finding.what == _DRAWN and finding.mark == "--"
    if rank > 0:
        return 0
    print()
    if bad:
        print(f"{bad} in the way: weft's fused ops cannot be relied on here until then")
    elif lacking:
        print(f"all that weft's ops need is here; before `weft demo` or bench: {INSTALL_EXTRAS}")
    else:
        print("all that weft needs is here: try `weft demo`, or `weft bench ops --quick`")
    return int(bad > 0)


def _flight(folder: Path) -> int:
    from weft.bench.commands import flight

    try:
        for line in list(flight.lines(folder)):
            print(line)
    except ValueError as error:
        print(f"weft doctor: {printable(str(error))}", file=sys.stderr)
        return 2
    return 0


def sections(ranks: int) -> list[tuple[str, list[Finding]]]:
    """What is found, by topic, up to the first that is in the way."""
    found: list[tuple[str, list[Finding]]] = []
    topics: dict[str, Callable[[], list[Finding]]] = {
        "versions": _versions,
        "settings": _settings,
        "machine": _machine,
        "GPUs": _gpus,
        "trial": lambda: _trial(ranks),
        "commands": _extras,
    }
    for title, look in topics.items():
        found.append((title, look()))
        if any(finding.mark == "!!" for finding in found[-1][1]):
            break  # what follows would only fail
    return found


def _versions() -> list[Finding]:
    import weft

    findings = [Finding("ok", "weft", weft.__version__)]
    for name, oldest in versions.OLDEST.items():
        here, wanted = versions.installed(name), versions.told(oldest)
        if here is None:
            findings.append(Finding("!!", name, "is not installed", f"pip install {name}"))
        elif versions.release(here) < oldest:
            cure = f"weft needs {wanted} or later: pip install -U {name}"
            findings.append(Finding("!!", name, here, cure))
        elif versions.release(here) > versions.NEWEST[name]:
            newest = versions.told(versions.NEWEST[name])
            findings.append(Finding("--", name, here, f"weft is tested with {wanted} to {newest}"))
        else:
            findings.append(Finding("ok", name, here))
    return findings


def _settings() -> list[Finding]:
    from weft import settings

    findings = []
    for name in sorted(name for name in os.environ if name.startswith("WEFT_")):
        known = name in settings.VARIABLES
        cure = "" if known else f"weft does not read it, but {', '.join(settings.VARIABLES)}"
        findings.append(Finding("ok" if known else "--", name, os.environ[name], cure))
    for read in (settings.timeout_s, settings.current_engine):
        try:
            read()
        except ValueError as refusal:
            findings.append(Finding("!!", "value", str(refusal), "or unset the variable"))
    return findings or [Finding("ok", "environment", "no WEFT_ variable is set")]


def _machine() -> list[Finding]:
    from weft.bench.environment import cpu_name
    from weft.collectives.cost import BUSY
    from weft.launch import cores

    findings = [Finding("ok", "processor", f"{cpu_name()}, {cores()} cores for this process")]
    if platform.system() != "Linux":
        why = f"weft maps peers' memory through /proc, {platform.system()} has none"
        return [*findings, Finding("!!", "system", why, "run it on Linux, or in a Linux container")]
    load = os.getloadavg()[0]
    busy = load > BUSY * cores()
    findings.append(
        Finding(
            "--" if busy else "ok",
            "load",
            f"{load:.1f} on {cores()} cores",
            "others are at work: times taken now are too long" if busy else "",
        )
    )
    # weft's shared memory is in anonymous files, which this folder's limit does not concern.
    shm = Path("/dev/shm")
    writable = shm.is_dir() and os.access(shm, os.W_OK)
    free = shutil.disk_usage(shm).free if writable else 0
    tight = free < 256 << 20
    findings.append(
        Finding(
            "--" if tight else "ok",
            "/dev/shm",
            f"{free / 2**30:.2g} GiB free" if writable else "cannot be written",
            "weft needs none of it, NCCL and torch's data loaders do: in Docker, --shm-size=8g or "
            "--ipc=host"
            if tight
            else "",
        )
    )
    return findings


def _gpus() -> list[Finding]:
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = "torch sees none" if built else "this torch is built for the CPU alone"
        # A driver without a GPU is unlikely: torch was built without support for it.
        cure = _TORCH_FOR_GPUS if shutil.which("nvidia-smi") and not built else ""
        return [Finding("--", "GPU", f"{why}: ranks run on the CPU", cure)]
    from weft.bench.environment import gpus
    from weft.kernels.engine.chips import chip_of

    findings = []
    count = torch.cuda.device_count()
    for i, gpu in enumerate(gpus()):
        device = torch.device("cuda", i)
        rest = ", ".join(value for key, value in gpu.items() if key != "name")
        findings.append(
            Finding("ok", f"cuda:{i}", f"{gpu['name']} ({chip_of(device).name}) {rest}")
        )
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    reached = [pair for pair in pairs if torch.cuda.can_device_access_peer(*pair)]
    if count == 1:
        findings.append(Finding("--", "links", "one GPU: several ranks can share it, for tests"))
    elif len(reached) == len(pairs):
        findings.append(Finding("ok", "links", f"all {count} GPUs read each other's memory"))
    else:
        cure = "nvidia-smi topo -m shows the links; symmetric memory needs NVLink or peer access"
        some = f"{len(reached)} of {len(pairs)} pairs of GPUs read each other's memory"
        findings.append(Finding("!!", "links", some, cure))
    multicast = _multicast()
    findings.append(
        Finding(
            "ok" if multicast else "--",
            "multicast",
            "the switch adds and copies for all GPUs" if multicast else "none: one GPU at a time",
        )
    )
    return findings


def _multicast() -> bool:
    import torch
    from torch._C._distributed_c10d import _SymmetricMemory

    return bool(_SymmetricMemory.has_multicast_support(torch._C._autograd.DeviceType.CUDA, 0))


def _trial(ranks: int) -> list[Finding]:
    """Run each fused op on ranks, and report which engine ran it and whether it was right."""
    import torch

    from weft.bench.problem import Options
    from weft.launch import RankError, launch

    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    options = Options(ranks=ranks, device=device)
    try:
        findings: list[Finding] = launch(
            ranks, _try, device, device=device, threads=options.threads
        )[0]
    except RankError as error:
        text = str(error).strip().splitlines()
        return [Finding("!!", f"{ranks} ranks", text[-1], "the whole of it:\n" + "\n".join(text))]
    return findings


def _try(rank: int, progress: Callable[[Any], None], kind: str) -> list[Finding]:
    return tried(rank, kind)


def tried(rank: int, kind: str) -> list[Finding]:
    """On each rank: the symmetric memory, the rates, each engine of each op."""
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


def _extras() -> list[Finding]:
    missing = [name for name in EXTRAS if importlib.util.find_spec(name) is None]
    if missing:
        why = f"without {', '.join(missing)}"
        return [Finding("--", _DRAWN, why, INSTALL_EXTRAS)]
    return [Finding("ok", _DRAWN, "what they draw with is installed")]
