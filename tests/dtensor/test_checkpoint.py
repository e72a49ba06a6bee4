"""Checkpoints: into other layouts and back, offline files, and what is killed or damaged."""

from __future__ import annotations

import errno
import io
import itertools
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import weft.dtensor.checkpoint
from weft.cli import main
from weft.dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from weft.dtensor.checkpoint import AtomicWriter, async_save, load, save
from weft.dtensor.checkpoint.files import CheckpointError, Stored

STRIDED: Any = _StridedShard(0, split_factor=2)
PLACEMENTS: list[Any] = [Replicate(), Shard(0), Shard(1), STRIDED]
WHOLE = torch.arange(7 * 5.0).view(7, 5)
FLIPS, FUZZED = 60, 300


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


@pytest.mark.ranks(3)
def test_asynchronous_saves_one_after_another(tmp_path: Path) -> None:
    """What ranks tell each other is cut, as that of large models is; one of the saves fails."""
    mesh, path = mesh_of(3), str(tmp_path)
    with patch("weft.dtensor.checkpoint.steps._CHUNK_BYTES", 1000):
        state = a_state(mesh, [Shard(0)], 2.0)
        first, second = async_save(state, path), async_save({"v": 3}, tmp_path / "values")
        failing = async_save({"w": distribute_tensor(WHOLE, mesh, [Partial()])}, path)
        assert first.done() and second.done()
        with pytest.raises(dcp.api.CheckpointException, match="not reduced yet"):
            failing.result()
        state = a_state(mesh, [STRIDED], 0.0)
        load(state, path)
        check_state(state, 2.0)
        load(values := {"v": 0}, tmp_path / "values")
        assert values == {"v": 3}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("loader", ["ours", "torch's"])
def test_a_load_is_a_write(tmp_path: Path, loader: str) -> None:
    """Products of the old weights, copies of them, and gradients that need them."""

    def loads(state: dict[str, Any]) -> None:
        load(state, tmp_path) if loader == "ours" else dcp.load(state, checkpoint_id=tmp_path)

    mesh = mesh_of(2)
    save({"w": distribute_tensor(2 * WHOLE, mesh, [Shard(0)])}, tmp_path)
    w = torch.nn.Parameter(distribute_tensor(WHOLE, mesh, [Shard(0)]))
    x = distribute_tensor(torch.ones(3, 7), mesh, [Shard(1)])
    product, copied, squares = x @ w, w[:2], (w * w).sum()
    turned = torch.nn.functional.linear(x, w.t())
    assert torch.equal(copied.full_tensor(), WHOLE[:2])
    loads({"w": w.detach()})
    assert torch.equal(w.full_tensor(), 2 * WHOLE)
    assert torch.equal(copied.full_tensor(), 2 * WHOLE[:2])
    assert torch.equal(product.full_tensor(), torch.ones(3, 7) @ WHOLE)
    assert torch.equal(turned.full_tensor(), torch.ones(3, 7) @ WHOLE)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()
    with torch.inference_mode():
        made = distribute_tensor(WHOLE, mesh, [Shard(0)])
        copied = made[:2]
        assert torch.equal(copied.full_tensor(), WHOLE[:2])
        loads({"w": made})
        assert torch.equal(copied.full_tensor(), 2 * WHOLE[:2])
    whole = distribute_tensor(torch.cat([WHOLE, WHOLE]), mesh, [Shard(0)])
    with pytest.raises(dcp.api.CheckpointException, match="cannot be loaded: load its base"):
        loads({"w": whole[:7]})


@pytest.mark.ranks(2)
def test_shards_in_tuples_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    w = distribute_tensor(WHOLE, mesh_of(2), [Shard(0)])
    for held in ((w, 1), [(w,)], {"inner": {"at": (1, [w])}}):
        for call in (save, async_save, load):
            with pytest.raises(ValueError, match=r"x.* holds a DTensor: .* in lists and dicts"):
                call({"x": held}, tmp_path)
    assert not list(tmp_path.iterdir())
    save({"x": [[w], {"betas": (0.9, 0.95)}, (1, torch.ones(2))]}, tmp_path)


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
    assert main(["checkpoint", "info", str(folder.parent)]) == 2
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
    assert main(["checkpoint", "merge", str(folder), str(tmp_path / "x.pt")]) == 2
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
    assert main(["checkpoint", "merge", str(folder), str(tmp_path / "x.pt")]) == 2
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
    assert main(["checkpoint", "merge", str(folder), str(tmp_path / "x.bin")]) == 2
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
    assert main(command) == 2
    told = capsys.readouterr().err
    assert "exists: name a new folder" in told and "matches no tensor" not in told
    assert main([*command[:3], str(tmp_path / "z"), "--mesh", "2", "--layout", "w=[S0]"]) == 0
    assert "--layout 'w=[S0]' matches no tensor" in capsys.readouterr().err
    assert main([*command[:3], str(tmp_path / "pt"), "--mesh", "2", "--format", "pt"]) == 0
    second = torch.load(tmp_path / "pt" / "rank-00001-of-00002.pt", weights_only=True)
    assert torch.equal(second["model.w"], WHOLE[4:])
    assert main([*command[:3], str(tmp_path / "y"), "--mesh", "2", "--layout", "*=[Q]"]) == 2
    assert not (tmp_path / "y").exists()
    capsys.readouterr()
    (tmp_path / "file").touch()
    for place, given, text in (
        ("y", ["2,2"], "--mesh must be sizes like 8 or 2x4, got '2,2'"),
        ("y", ["2", "--layout", "*.w=[_S(0, 0)]"], "split_factor must be at least 1"),
        ("file/y", ["2"], "Not a directory"),
        ("y", ["99999999"], "--mesh 99999999: one file for each rank, 65536 at most"),
        ("y", ["9" * 5000], "65536 at most"),
        ("y", ["2", "--layout", f"*.w=[_S(0, {10**11})]"], "not to be cut into 100000000000 piec"),
    ):
        assert main([*command[:3], str(tmp_path / place), "--mesh", *given]) == 2
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


@pytest.mark.slow
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


def flipped(path: Path, chance: random.Random) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    at = chance.randrange(8 * len(data))
    data[at // 8] ^= 1 << at % 8
    path.write_bytes(data)


def test_no_flipped_bit_is_loaded(tmp_path: Path) -> None:
    """Wherever it is, the load is an error, or right."""
    whole: dict[str, Any] = {
        "w": torch.randn(60, 7),
        "half": torch.randn(100).bfloat16(),
        "step": [3, {"a": "b"}],
    }
    save(whole, tmp_path)
    kept = {path: path.read_bytes() for path in tmp_path.iterdir()}
    told = 0
    for seed in range(FLIPS):
        chance = random.Random(seed)
        for path, data in kept.items():
            path.write_bytes(data)
        flipped(chance.choice(sorted(kept)), chance)
        state: dict[str, Any] = {name: torch.zeros_like(whole[name]) for name in ("w", "half")}
        state["step"] = [0, {"a": 0}]
        try:
            load(state, tmp_path)
        except CheckpointError:
            told += 1
        else:
            assert all(torch.equal(state[n], whole[n]) for n in ("w", "half")), f"{seed=}"
            assert state["step"] == whole["step"], f"{seed=}"
    assert told >= 0.9 * FLIPS  # bits of the mark behind the metadata may be none of the rest


@pytest.mark.ranks(2)
def test_damage_is_an_error_on_every_rank(tmp_path: Path) -> None:
    mesh = mesh_of(2)
    save({"w": distribute_tensor(WHOLE, mesh, [Shard(0)])}, tmp_path)
    if dist.get_rank() == 0:  # the piece of rank 1, which it alone reads
        (file,) = tmp_path.glob("*_1_0.distcp")
        flipped(file, random.Random(0))
    dist.barrier()
    state = {"w": distribute_tensor(torch.zeros_like(WHOLE), mesh, [Shard(0)])}
    with pytest.raises(CheckpointError, match=r"w: damaged in __.*_1_0.distcp \(check sum of"):
        load(state, tmp_path)


def test_torchs_own_are_told_to_have_no_check_sums(tmp_path: Path, capsys: Any) -> None:
    dcp.save({"w": WHOLE, "step": 3}, checkpoint_id=tmp_path)
    state = {"w": torch.zeros_like(WHOLE), "step": 0}
    load(state, tmp_path)
    assert torch.equal(state["w"], WHOLE) and state["step"] == 3
    assert main(["checkpoint", "info", str(tmp_path), "--check"]) == 0
    assert "2 items have no check sum, as torch.distr" in capsys.readouterr().out


class Runs:
    """Runs a command where it is unpickled."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.made),)


def test_no_file_runs_code(tmp_path: Path, capsys: Any) -> None:
    folder, made = tmp_path / "checkpoint", tmp_path / "made"
    save({"w": WHOLE, "evil": Runs(made), "step": 3}, folder)
    with pytest.raises(CheckpointError, match=r"evil: not loaded.*posix\.mkdir.*add_safe_globals"):
        load({"evil": 0}, folder)
    assert main(["checkpoint", "merge", str(folder), str(tmp_path / "x.pt")]) == 2
    assert "evil: not loaded, as it is no plain data" in capsys.readouterr().err
    assert main(["checkpoint", "info", "--check", str(folder)]) == 0
    state = {"w": torch.zeros_like(WHOLE), "step": 0}
    load(state, folder)
    assert state["step"] == 3 and not made.exists()
    load({"evil": 0}, folder, weights_only=False)
    assert made.exists()
    made.rmdir()
    metadata = pickle.loads((folder / ".metadata").read_bytes())  # torch's reader ignores the sum
    metadata.planner_data = Runs(made)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"names posix\.mkdir, which is not of torch"):
        load({"w": torch.zeros_like(WHOLE)}, folder)
    assert main(["checkpoint", "info", str(folder)]) == 2
    assert not made.exists()


@pytest.mark.parametrize("way", ["../outside", "/etc/passwd", "link", "", "sub/../../outside"])
def test_files_outside_of_the_folder_are_refused(tmp_path: Path, way: str) -> None:
    folder = tmp_path / "checkpoint"
    save({"w": WHOLE}, folder)
    (file,) = folder.glob("*.distcp")
    (tmp_path / "outside").write_bytes(file.read_bytes())
    (folder / "link").symlink_to(tmp_path / "outside")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = way
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="is outside of the checkpoint's folder"):
        load({"w": torch.zeros_like(WHOLE)}, folder)


def test_names_do_not_command_the_terminal(tmp_path: Path, capsys: Any) -> None:
    save({"\x1b[2Jw": WHOLE, "\u202estep\n": 3}, tmp_path / "checkpoint")
    assert main(["checkpoint", "info", str(tmp_path / "checkpoint")]) == 0
    (file,) = (tmp_path / "checkpoint").glob("*.distcp")
    file.write_bytes(b"")
    assert main(["checkpoint", "info", str(tmp_path / "checkpoint")]) == 1
    assert main(["checkpoint", "merge", str(tmp_path / "checkpoint"), "x.pt"]) == 2
    said = "".join(capsys.readouterr())
    assert r"\x1b[2Jw" in said and r"\u202estep\n" in said
    assert "\x1b" not in said and "\u202e" not in said


def test_garbage_for_metadata_is_one_line_and_a_way_out(tmp_path: Path, capsys: Any) -> None:
    """Bytes cut, replaced and doubled, the check sum taken away: never a traceback."""
    save({"w": WHOLE, "step": 3}, tmp_path)
    whole = (tmp_path / ".metadata").read_bytes()[:-12]
    for seed in range(FUZZED):
        chance, data = random.Random(seed), bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(data))
            how = chance.randrange(3)
            if how == 0:
                data[at] = chance.randrange(256)
            elif how == 1:
                del data[at : at + chance.randint(1, 20)]
            else:
                data[at:at] = data[at : at + 9]
        (tmp_path / ".metadata").write_bytes(data)
        status = main(["checkpoint", "info", str(tmp_path)])
        said = capsys.readouterr()
        assert status in (0, 1, 2) and "Traceback" not in said.err, f"{seed=}"
        assert status != 2 or (said.err.count("\n") == 1 and str(tmp_path) in said.err), f"{seed=}"


_FULL_DISK = """
import sys, torch
from pathlib import Path
from torch.distributed.checkpoint.api import CheckpointException
from weft.dtensor.checkpoint import load, save

folder = Path(sys.argv[1])
save({"w": torch.ones(1 << 18)}, folder)
kept = sorted(folder.iterdir())
for _ in range(3):
    try:
        save({"w": torch.zeros(3 << 20)}, folder)
    except CheckpointException as error:
        assert "part takes 12582912 bytes" in str(error), error
        free = int(str(error).split("bytes and more, and ")[1].split()[0])
        assert 6 << 20 < free < 8 << 20, free
    else:
        raise AssertionError("12 MiB on a disk of 8")
    assert sorted(folder.iterdir()) == kept
state = {"w": torch.zeros(1 << 18)}
load(state, folder)
assert state["w"].all()
save({"w": torch.zeros(1 << 20)}, folder)  # 4 MiB beside 1
print("held")
"""
_MOUNTED = 'mount -t tmpfs -o size=8m tmpfs "$0" && exec "$@"'


def test_a_full_disk_is_given_back(tmp_path: Path) -> None:
    """On a disk of 8 MiB, made in a namespace."""
    mounted = ["unshare", "-Urm", "sh", "-c", _MOUNTED, str(tmp_path)]
    try:
        subprocess.run([*mounted, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no file system may be mounted here")
    path = f"{Path(__file__).resolve().parents[2]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    run = subprocess.run(
        [*mounted, sys.executable, "-W", "ignore", "-c", _FULL_DISK, str(tmp_path / "checkpoint")],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert run.stdout == "held\n", run.stderr


@pytest.mark.ranks(2)
def test_all_ranks_delete_what_a_failed_save_has_written(tmp_path: Path) -> None:
    mesh = mesh_of(2)
    save(a_state(mesh, [Shard(0)]), tmp_path)
    dist.barrier()
    kept = sorted(tmp_path.iterdir())
    dist.barrier()
    full = OSError(errno.ENOSPC, "No space left on device") if dist.get_rank() else None
    with (
        patch.object(weft.dtensor.checkpoint, "check_all", side_effect=full),
        pytest.raises(dcp.api.CheckpointException, match=r"takes \d+ bytes and more, and \d+ are"),
    ):
        save(a_state(mesh, [Shard(1)], 2.0), tmp_path)
    dist.barrier()
    assert sorted(tmp_path.iterdir()) == kept
    state = a_state(mesh, [STRIDED], 0.0)
    load(state, tmp_path)
    check_state(state)


def test_what_a_killed_save_has_left_is_deleted_before_the_next_writes(tmp_path: Path) -> None:
    save({"w": WHOLE}, tmp_path)
    ours, theirs = tmp_path / f"__{'0' * 12}_0_0.distcp", tmp_path / "__0_0.distcp"
    ours.touch()
    theirs.touch()

    class Looking(AtomicWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            assert not ours.exists() and theirs.exists()
            return super().write_data(plan, planner)

    dcp.save({"w": WHOLE * 2}, storage_writer=Looking(tmp_path))
    assert not theirs.exists()  # once there is a new checkpoint
