"""What figures depend on, stored with them: versions, chip, cores, commit, clocks, load."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from weft.collectives.cost import BUSY
from weft.launch import cores


def environment(ranks: int, device: str, threads: int) -> dict[str, Any]:
    """The block that every result carries."""
    import triton

    import weft

    load = os.getloadavg()[0]
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "weft": weft.__version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "os": f"{platform.system()} {platform.release()}",
        "cpu": cpu_name(),
        "cores": cores(),
        "cpu_mhz": _cpu_mhz(),
        "load": round(load, 2),
        "quiet": load <= BUSY * cores(),
        "device": device,
        "gpus": gpus(),
        "ranks": ranks,
        "threads a rank": threads,
    }


def cpu_name() -> str:
    """The processor, as it names itself."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpuinfo(key: str) -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    found = [line.partition(":")[2].strip() for line in lines if line.startswith(key)]
    return found[0] if found else ""


def _cpu_mhz() -> float | None:
    mhz = _cpuinfo("cpu MHz")
    return float(mhz) if mhz else None


def _commit() -> str:
    """The commit of this checkout, with a + if files differ from it.

    Outside of one, as in a copy without .git: what GIT_COMMIT says.
    """
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    head = _output([*git, "rev-parse", "--short", "HEAD"]) if shutil.which("git") else ""
    if not head:
        return os.environ.get("GIT_COMMIT", "")
    changed = head and _output([*git, "status", "--porcelain", "--untracked-files=no"])
    return head + ("+" if changed else "")


def gpus() -> list[dict[str, str]]:
    """Each GPU's name, memory, driver and clocks (now / highest), by nvidia-smi where it is."""
    if not torch.cuda.is_available():
        return []
    if torch.version.hip is None and shutil.which("nvidia-smi"):
        fields = "name,memory.total,driver_version,clocks.sm,clocks.max.sm,clocks.mem"
        lines = _output(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"])
        names = fields.split(",")
        return [
            dict(zip(names, line.split(", "), strict=False)) for line in lines.splitlines() if line
        ]
    return [{"name": torch.cuda.get_device_name(i)} for i in range(torch.cuda.device_count())]


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
