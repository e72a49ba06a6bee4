"""Checkpoints: into other layouts and back, offline files, and what is killed or damaged."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from weft.cli import main
from weft.dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from weft.dtensor.checkpoint import AtomicWriter, load, save
from weft.dtensor.checkpoint.files import CheckpointError, Stored

STRIDED: Any = _StridedShard(0, split_factor=2)
PLACEMENTS: list[Any] = [Replicate(), Shard(0), Shard(1), STRIDED]
WHOLE = torch.arange(7 * 5.0).view(7, 5)


def mesh_of(*sizes: int) -> Any:
    return init_device_mesh("cpu", sizes)


def a_state(mesh: Any, placements: Any, scale: float = 1.0) -> dict[str, Any]:
    """Tensors of odd shapes, a plain one, and values; nested."""
    small = [p if isinstance(p, Replicate) else Shard(0) for p in placements]
    return {
        "model": {
            "w": distribute_tensor(WHOLE * scale, mesh, placements),
            "half": distribute_tensor((WHOLE * scale).bfloat16(), mesh, placements),
            "one": distribute_tensor(torch.tensor([3 * scale]), mesh, small),
            "scalar": distribute_tensor(torch.tensor(5 * scale), mesh),
            "empty": distribute_tensor(torch.empty(0, 4), mesh, small),
            "plain": torch.arange(3) * int(scale),
        },
        "step": int(scale),
    }


def check_state(state: dict[str, Any], scale: float = 1.0) -> None:
    model = state["model"]
    assert torch.equal(model["w"].full_tensor(), WHOLE * scale)
    assert torch.equal(model["half"].full_tensor(), (WHOLE * scale).bfloat16())
    assert model["one"].full_tensor().tolist() == [3 * scale]
    assert model["scalar"].full_tensor().item() == 5 * scale
    assert model["empty"].shape == (0, 4)
    assert model["plain"].tolist() == [0, int(scale), 2 * int(scale)]
    assert state["step"] == int(scale)


def saving(path: str, sizes: tuple[int, ...], placements: Any) -> None:
    save(a_state(mesh_of(*sizes), placements), checkpoint_id=path)


def loading(path: str, sizes: tuple[int, ...], placements: Any) -> None:
    state = a_state(mesh_of(*sizes), placements, 0.0)
    load(state, checkpoint_id=path)
    check_state(state)


@pytest.mark.parametrize("number", range(4))
def test_into_other_layouts_and_numbers_of_ranks(ranks: Any, tmp_path: Path, number: int) -> None:
    path, old = str(tmp_path), PLACEMENTS[number]
    ranks(3, saving, path, (3,), [old])
    for new in PLACEMENTS:
        ranks(3, loading, path, (3,), [new])
    ranks(4, loading, path, (2, 2), [Shard(0), old])
    ranks(2, loading, path, (2,), [Shard(1)])
    ranks(4, saving, path, (2, 2), [old, Shard(0)])
    ranks(2, loading, path, (2,), [old])


@pytest.mark.ranks(4)
def test_exchange_with_torch(tmp_path: Path) -> None:
    """torch.distributed.checkpoint itself, and PyTorch's own DTensors, both ways."""
    mesh, square, path = mesh_of(4), mesh_of(2, 2), str(tmp_path)
    for old, new in itertools.product(PLACEMENTS[:3], repeat=2):
        theirs = {"w": torch_distribute_tensor(WHOLE, square, [old, Shard(0)])}
        dcp.save(theirs, checkpoint_id=path)
        ours = {"w": distribute_tensor(torch.zeros_like(WHOLE), mesh, [new])}
        dcp.load(ours, checkpoint_id=path)
        assert torch.equal(ours["w"].full_tensor(), WHOLE)
        dcp.save({"w": ours["w"] * 2}, checkpoint_id=path)
        back = {"w": torch_distribute_tensor(torch.zeros_like(WHOLE), square, [new, old])}
        dcp.load(back, checkpoint_id=path)
        assert type(back["w"]) is TorchDTensor
        assert torch.equal(back["w"].full_tensor(), 2 * WHOLE)
    with pytest.raises(dcp.api.CheckpointException, match="not reduced yet"):
        save({"w": distribute_tensor(WHOLE, mesh, [Partial()])}, path)
    buffer = io.BytesIO()
    kept = distribute_tensor(WHOLE, mesh, [Shard(0)])
    torch.save({"w": kept}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)["w"]
    assert isinstance(loaded, DTensor) and torch.equal(loaded.full_tensor(), WHOLE)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("moment", ["data", "metadata"])
def test_a_save_that_is_killed_harms_nothing(tmp_path: Path, moment: str) -> None:
    """The second save fails at a moment: data half written, or metadata written aside."""
    mesh, path = mesh_of(2), str(tmp_path)
    save(a_state(mesh, [Shard(0)]), path)
    if moment == "data":

        class Killed(AtomicWriter):
            def write_data(self, plan: Any, planner: Any) -> Any:
                super().write_data(plan, planner).wait()
                raise KeyboardInterrupt if dist.get_rank() == 1 else RuntimeError

    else:

        class Killed(AtomicWriter):
            def finish(self, metadata: Any, results: Any) -> None:
                (tmp_path / ".metadata.tmp").write_bytes(b"half")
                raise RuntimeError("killed")

    with pytest.raises(BaseException):  # noqa: B017 - torch wraps it in several ways
        dcp.save(a_state(mesh, [Shard(1)], 2.0), storage_writer=Killed(path))
    dist.barrier()
    state = a_state(mesh, [STRIDED], 0.0)
    load(state, path)
    check_state(state)
    # The next save is whole, and takes away what was left.
    save(a_state(mesh, [Shard(1)], 4.0), path)
    load(state, path)
    check_state(state, 4.0)
    named = {piece.file for entry in Stored(path).tensors.values() for piece in entry.pieces}
    assert {file for file in os.listdir(path) if file.endswith(".distcp")} == named


@pytest.fixture
def folder(ranks: Any, tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    ranks(3, saving, str(path), (3,), [STRIDED])
    return path


def test_info(folder: Path, capsys: Any) -> None:
    assert main(["checkpoint", "info", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "model.w" in out and "7x5" in out and "bfloat16" in out and "step" in out
    assert "every piece is there" in out
    assert main(["checkpoint", "info", str(folder), "--check"]) == 0
    assert "every piece is sound" in capsys.readouterr().out
    assert main(["checkpoint", "info", str(folder.parent)]) == 1
    assert "is not a checkpoint" in capsys.readouterr().err


def test_damage_is_named(folder: Path, tmp_path: Path, capsys: Any) -> None:
    stored = Stored(folder)
    piece = max(stored.tensors["model.w"].pieces, key=lambda p: p.place.length)
    file = folder / piece.file
    data = bytearray(file.read_bytes())
    # A flipped bit in the numbers: torch.load would not notice.
    middle = WHOLE[piece.offsets[0] : piece.offsets[0] + piece.sizes[0]].contiguous()
    at = data.find(middle.numpy().tobytes(), piece.place.offset)
    assert at > 0
    flipped = data.copy()
    flipped[at] ^= 1
    file.write_bytes(flipped)
    assert main(["checkpoint", "info", str(folder)]) == 0
    assert main(["checkpoint", "info", str(folder), "--check"]) == 1
    out = capsys.readouterr().out
    assert f"DAMAGED {piece}: damaged in {piece.file}" in out
    with pytest.raises(CheckpointError, match="damaged in"):
        Stored(folder).read(piece)
    assert main(["checkpoint", "merge", str(folder), str(tmp_path / "x.pt")]) == 1
    assert not (tmp_path / "x.pt").exists()
    file.write_bytes(data[: len(data) // 2])
    assert main(["checkpoint", "info", str(folder)]) == 1
    assert "is too short" in capsys.readouterr().out
    file.unlink()
    assert main(["checkpoint", "info", str(folder)]) == 1
    assert f"{piece}: {piece.file} is missing" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="is missing"):
        load({"model": {"w": torch.zeros(7, 5)}}, folder)
    for content in (b"nothing", b"garbage\n", b"", pickle.dumps([1])):
        (folder / ".metadata").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"\.metadata is damaged"):
            Stored(folder)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint"]


def test_damaged_values_are_named(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "checkpoint"
    save({"step": 3}, folder)
    (file,) = folder.glob("*.distcp")
    data = file.read_bytes()
    file.write_bytes(data.replace(b"K\x03.", b"K\x04."))
    assert main(["checkpoint", "info", str(folder)]) == 0
    assert main(["checkpoint", "info", str(folder), "--check"]) == 1
    assert f"DAMAGED step: damaged in {file.name} (check sum of" in capsys.readouterr().out
    assert main(["checkpoint", "merge", str(folder), str(tmp_path / "x.pt")]) == 1
    file.unlink()
    assert main(["checkpoint", "info", str(folder)]) == 1
    assert f"DAMAGED step: {file.name} is missing" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match=f"step: {file.name} is missing"):
        load({"step": 0}, folder)


def test_merge(folder: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "model.pt"
    assert main(["checkpoint", "merge", str(folder), str(out)]) == 0
    merged = torch.load(out, weights_only=True)
    assert merged["step"] == 1 and merged["model"]["plain"].tolist() == [0, 1, 2]
    assert torch.equal(merged["model"]["w"], WHOLE)
    assert merged["model"]["scalar"].shape == () and merged["model"]["empty"].shape == (0, 4)
    out = tmp_path / "model.safetensors"
    assert main(["checkpoint", "merge", str(folder), str(out)]) == 0
    assert "left out, no tensors: step" in capsys.readouterr().out
    tensors = load_file(out)
    assert torch.equal(tensors["model.w"], WHOLE)
    assert torch.equal(tensors["model.half"], WHOLE.bfloat16())
    assert tensors["model.plain"].tolist() == [0, 1, 2] and tensors["model.empty"].shape == (0, 4)
    assert main(["checkpoint", "merge", str(folder), str(tmp_path / "x.bin")]) == 1
    assert "the suffix tells the format" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "checkpoint", "model.pt", "model.safetensors",
    ]  # fmt: skip


def test_reshard(folder: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "parts"
    command = ["checkpoint", "reshard", str(folder), str(out), "--mesh", "2x2"]
    assert main([*command, "--layout", "*.w=[S0, S1]", "--layout", "*.half=[R, S(1)]"]) == 0
    files = sorted(out.iterdir())
    assert [f.name for f in files] == [f"rank-0000{r}-of-00004.safetensors" for r in range(4)]
    parts = [load_file(file) for file in files]
    quarters = itertools.product((slice(0, 4), slice(4, 7)), (slice(0, 3), slice(3, 5)))
    for rank, (rows, columns) in enumerate(quarters):
        assert torch.equal(parts[rank]["model.w"], WHOLE[rows, columns])
        assert torch.equal(parts[rank]["model.half"], WHOLE.bfloat16()[:, columns])
    assert parts[3]["model.plain"].tolist() == [2] and parts[2]["model.plain"].tolist() == [0, 1]
    assert main(command) == 1
    assert "exists: name a new folder" in capsys.readouterr().err
    assert main([*command[:3], str(tmp_path / "pt"), "--mesh", "2", "--format", "pt"]) == 0
    second = torch.load(tmp_path / "pt" / "rank-00001-of-00002.pt", weights_only=True)
    assert torch.equal(second["model.w"], WHOLE[4:])
    assert main([*command[:3], str(tmp_path / "y"), "--mesh", "2", "--layout", "*=[Q]"]) == 1
    assert not (tmp_path / "y").exists()
    capsys.readouterr()
    (tmp_path / "file").touch()
    for place, given, text in (
        ("y", ["2,2"], "--mesh must be sizes like 8 or 2x4, got '2,2'"),
        ("y", ["2", "--layout", "*.w=[_S(0, 0)]"], "split_factor must be at least 1"),
        ("file/y", ["2"], "Not a directory"),
    ):
        assert main([*command[:3], str(tmp_path / place), "--mesh", *given]) == 1
        assert text in capsys.readouterr().err


_LIMITED = """
import resource, sys
from weft.dtensor.checkpoint.cli import main

[taken] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmData")]
limit = (int(taken) << 10) + (48 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
for command in sys.argv[1:]:
    assert main(command.split()) == 0
"""


def test_files_are_written_in_memory_for_a_piece(tmp_path: Path) -> None:
    """128 MiB, by a process that may take 48 MiB more than it has."""
    state = {f"w{i}": torch.full((2 << 20,), float(i)) for i in range(16)}
    save(state, tmp_path / "checkpoint")
    commands = [
        "merge checkpoint x.safetensors",
        "merge checkpoint x.pt",
        "reshard checkpoint parts --mesh 2 --layout *=[S0]",
    ]
    path = f"{Path(__file__).resolve().parents[2]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    # Threads have stacks; and malloc, left to itself, may keep pieces that are freed.
    bare = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1048576"}
    subprocess.run(
        [sys.executable, "-c", _LIMITED, *commands],
        env={**os.environ, **bare, "PYTHONPATH": path},
        cwd=tmp_path,
        check=True,
    )
    halves = [load_file(file) for file in sorted((tmp_path / "parts").iterdir())]
    for name, whole in state.items():
        assert torch.equal(load_file(tmp_path / "x.safetensors")[name], whole)
        assert torch.equal(torch.load(tmp_path / "x.pt")[name], whole)
        assert torch.equal(torch.cat([half[name] for half in halves]), whole)


def test_help_teaches(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["checkpoint", "--help"])
    out = capsys.readouterr().out
    assert "examples:" in out and "reshard" in out and "[S0, R] is read as well" in out
