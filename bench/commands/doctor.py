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
from pathlib import Path
from typing import Any, Literal

from weft import versions
from weft.bench.commands.trial import Finding, tried
from weft.cli import EXTRAS, INSTALL_EXTRAS, Parser, several
from weft.errors import printable

_DRAWN = "weft demo, bench"
_TORCH_FOR_GPUS = "a driver is installed: get torch for it, see https://pytorch.org/get-started"


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
        rank, found = across.group_findings()
        found = [("versions", _versions()), ("settings", _settings()), *found]
    else:
        found = machine_findings(args.ranks)
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
        for line in list(flight.ring_lines(folder)):
            print(line)
    except ValueError as error:
        print(f"weft doctor: {printable(str(error))}", file=sys.stderr)
        return 2
    return 0


def machine_findings(ranks: int) -> list[tuple[str, list[Finding]]]:
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
        here, wanted = versions.installed_version(name), versions.version_words(oldest)
        if here is None:
            findings.append(Finding("!!", name, "is not installed", f"pip install {name}"))
        elif versions.release(here) < oldest:
            cure = f"weft needs {wanted} or later: pip install -U {name}"
            findings.append(Finding("!!", name, here, cure))
        elif versions.release(here) > versions.NEWEST[name]:
            newest = versions.version_words(versions.NEWEST[name])
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


def _extras() -> list[Finding]:
    missing = [name for name in EXTRAS if importlib.util.find_spec(name) is None]
    if missing:
        why = f"without {', '.join(missing)}"
        return [Finding("--", _DRAWN, why, INSTALL_EXTRAS)]
    return [Finding("ok", _DRAWN, "what they draw with is installed")]
