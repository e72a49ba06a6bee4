"""Saves on a disk that is full: a small file system in a namespace of its own."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

from trials import Skipped, script

_SAVES = 4
_CODE = f"""
import random, sys, torch
from pathlib import Path
from torch.distributed.checkpoint.api import CheckpointException
from weft.dtensor.checkpoint import load, save

folder, chance = Path(sys.argv[1]) / "checkpoint", random.Random(int(sys.argv[2]))

def a_state(low, high):
    torch.manual_seed(chance.randrange(1 << 30))
    sizes = [chance.randrange(low, high) for _ in range(chance.randrange(1, 4))]
    return {{f"w{{i}}": torch.randn(size) for i, size in enumerate(sizes)}}

kept = a_state(1, 100_000)  # at most 1.2 MB of 8
save(kept, folder)
for _ in range({_SAVES}):
    before = sorted(path.name for path in folder.iterdir())
    try:
        save(a_state(2_200_000, 3_000_000), folder)
    except CheckpointException as error:
        assert "bytes and more, and" in str(error), error
    else:
        raise AssertionError("8.8 MB on a disk of 8 MiB")
    assert sorted(path.name for path in folder.iterdir()) == before
    fresh = {{name: torch.zeros_like(value) for name, value in kept.items()}}
    load(fresh, folder)
    assert all(torch.equal(fresh[name], kept[name]) for name in kept)
    kept = a_state(1, 100_000)
    save(kept, folder)
print("held")
"""


def full_disks(chance: random.Random, folder: Path) -> Iterator[None]:
    mount = 'mount -t tmpfs -o size=8m tmpfs "$0" && exec "$@"'
    mounted = ("unshare", "-Urm", "sh", "-c", mount, str(folder))
    try:
        subprocess.run([*mounted, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        raise Skipped("no file system may be mounted here, not even in a namespace") from None
    script(_CODE, folder, chance.randrange(1 << 30), before=mounted)
    yield from [None] * _SAVES
