"""Checkpoint folders, read in one process: what is in them, and what is missing or damaged.

Tensors are read block by block, so that memory holds one block at a time: `merge` and `reshard`
fill tensors whose memory is a file.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import shutil
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from weft.dtensor.checkpoint.items import Block, blocks
from weft.dtensor.checkpoint.metadata import (
    CheckpointError,
    differs,
    read_metadata,
    stored_crc,
)
from weft.dtensor.layout.boxes import Layout
from weft.dtensor.layout.placements import Placements, normalize
from weft.dtensor.layout.places import StandInMesh
from weft.dtensor.layout.runs import contiguous_stride
from weft.errors import printable

Progress = Callable[[int], object]

_SAFETENSORS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Piece:
    """One stored block of a tensor: `sizes` at `offsets`.

    `place` is torch's: `length` bytes at `offset` of the file `relative_path`.
    """

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Any

    @property
    def file(self) -> str:
        """The file that it is stored in."""
        return str(self.place.relative_path)

    def __str__(self) -> str:
        return f"{printable(self.name)}{list(self.sizes)} at {list(self.offsets)}"


@dataclass(frozen=True)
class Entry:
    """A stored tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class Stored:
    """A checkpoint folder.

    Attributes:
        tensors: by name.
        values: names of the stored values that are not tensors.

    Raises:
        CheckpointError: there is no checkpoint, or its metadata cannot be read, or would run code.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        metadata: Any = read_metadata(self.path)
        self._places = metadata.storage_data
        self._nesting = metadata.planner_data or {}
        self.tensors: dict[str, Entry] = {}
        self.values: list[str] = []
        self._lost: list[str] = []
        for name, stored in metadata.state_dict_metadata.items():
            if not hasattr(stored, "chunks"):
                self.values.append(name)
                continue
            pieces = []
            for chunk in stored.chunks:
                piece = self._piece(name, tuple(chunk.offsets), tuple(chunk.sizes))
                if piece is None:
                    self._lost.append(f"{name}{list(chunk.sizes)} at {list(chunk.offsets)}")
                else:
                    pieces.append(piece)
            shape = tuple(stored.size)
            self.tensors[name] = Entry(name, shape, stored.properties.dtype, tuple(pieces))

    def _piece(self, name: str, offsets: Any, sizes: Any) -> Piece | None:
        for index, place in self._by_name.get(name, ()):
            if index.offset is None or tuple(index.offset) == offsets:
                return Piece(name, offsets, sizes, place)
        return None

    @cached_property
    def _by_name(self) -> dict[str, list[tuple[Any, Any]]]:
        named: dict[str, list[tuple[Any, Any]]] = {}
        for index, place in self._places.items():
            named.setdefault(index.fqn, []).append((index, place))
        return named

    @property
    def nbytes(self) -> int:
        """Size of all tensors."""
        return sum(entry.nbytes for entry in self.tensors.values())

    @property
    def unsummed(self) -> int:
        """How many items have no check sum, as torch.distributed.checkpoint has written them."""
        return sum(stored_crc(place) is None for place in self._places.values())

    def problems(self, *, read: bool, progress: Progress = lambda _: None) -> Iterator[str]:
        """What is missing or damaged, in words. `read`: read every piece, rather than its size."""
        for lost in self._lost:
            yield f"{lost}: the metadata name no file"
        sizes: dict[str, int | None] = {}
        for name in self.values:
            if not (places := self._by_name.get(name)):
                yield f"{name}: the metadata name no file"
            elif fault := self._fault(places[0][1], sizes):
                yield f"{name}: {fault}"
            elif read:  # its check sum only: a value of any class may be sound
                yield from _failure(self._bytes, name, places[0][1])
        for entry in self.tensors.values():
            covered = sum(math.prod(piece.sizes) for piece in entry.pieces)
            if covered < math.prod(entry.shape) and not any(
                lost.startswith(f"{entry.name}[") for lost in self._lost
            ):
                yield f"{entry.name}: {covered} of {math.prod(entry.shape)} elements are stored"
            for piece in entry.pieces:
                if fault := self._fault(piece.place, sizes):
                    yield f"{piece}: {fault}"
                elif read:
                    yield from _failure(self.read, piece)
                progress(math.prod(piece.sizes) * entry.dtype.itemsize)

    def _fault(self, place: Any, sizes: dict[str, int | None]) -> str:
        """What is wrong with the file of a place, if anything is; `sizes` of files are kept."""
        file, end = place.relative_path, place.offset + place.length
        if file not in sizes:
            path = self.path / file
            sizes[file] = path.stat().st_size if path.exists() else None
        size = sizes[file]
        if size is None:
            return f"{file} is missing"
        return f"{file} is too short, {size} bytes" if size < end else ""

    def check(self, *, read: bool) -> None:
        """Raise `CheckpointError` naming what is missing or damaged, if anything is."""
        found = list(itertools.islice(self.problems(read=read), 11))
        if found:
            shown = "\n  ".join(found[:10] + (["..."] if len(found) > 10 else []))
            raise CheckpointError(f"{self.path} is damaged:\n  {shown}")

    def read(self, piece: Piece) -> torch.Tensor:
        """One block.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        data = self._bytes(piece, piece.place)
        try:
            tensor = torch.load(data, map_location="cpu", weights_only=True)
        except Exception as error:  # as above
            raise CheckpointError(f"{piece}: damaged in {piece.file} ({error})") from error
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != piece.sizes:
            found = list(getattr(tensor, "shape", [])) or type(tensor).__name__
            raise CheckpointError(f"{piece}: {piece.file} has {found} at {piece.place.offset}")
        return tensor

    def value(self, name: str) -> Any:
        """A stored value that is not a tensor.

        Raises:
            CheckpointError: it is missing, damaged, or of a class that is no plain data.
        """
        return plain_value(name, self._bytes(name, self._by_name[name][0][1]))

    def _bytes(self, what: object, place: Any) -> io.BytesIO:
        """What is stored at a place, an archive of torch.save, its check sums compared."""
        file = place.relative_path
        try:
            with open(self.path / file, "rb") as stream:
                stream.seek(place.offset)
                data = io.BytesIO(stream.read(place.length))
            if (crc := stored_crc(place)) is not None:
                if zlib.crc32(data.getbuffer()) != crc:
                    raise differs(what, place)
                return data
            with zipfile.ZipFile(data) as archive:
                bad = archive.testzip()  # which torch.load does not do
        except FileNotFoundError as error:
            raise CheckpointError(f"{what}: {file} is missing") from error
        except CheckpointError:
            raise
        except Exception as error:  # bytes that torch has not written may raise any
            raise CheckpointError(f"{what}: damaged in {file} ({error})") from error
        if bad is not None:
            raise CheckpointError(f"{what}: damaged in {file} (check sum of {bad})")
        data.seek(0)
        return data

    def nested(self, flat: Mapping[str, Any]) -> dict[str, Any]:
        """The state dict as it was before it was flattened to names."""
        from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

        known = {name: path for name, path in self._nesting.items() if name in flat}
        if known.keys() != flat.keys():
            return dict(flat)
        return unflatten_state_dict(dict(flat), known)

    def fill(self, entry: Entry, wanted: Sequence[Block], out: torch.Tensor) -> None:
        """Read the blocks `wanted` of a tensor into `out`, the local tensor that they make up."""
        for piece in entry.pieces:
            cuts = [cut for block in wanted if (cut := _shared(piece, block)) is not None]
            if cuts:
                source = self.read(piece)
                for of_piece, of_out in cuts:
                    out[of_out].copy_(source[of_piece])


def plain_value(name: str, data: io.BytesIO) -> Any:
    """A value that torch.save has written, if it is plain data, which cannot run code.

    Raises:
        CheckpointError: it is of other classes, or damaged.
    """
    try:
        return torch.load(data, map_location="cpu", weights_only=True)
    except Exception as error:
        data.seek(0)
        try:
            classes = ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(data))
        except Exception:
            raise CheckpointError(f"{printable(name)}: damaged ({error})") from error
        raise CheckpointError(
            f"{printable(name)}: not loaded, as it is no plain data and could run code "
            f"({printable(classes)}). Where the checkpoint is trusted, "
            f"torch.serialization.add_safe_globals allows a class, and "
            f"weft.dtensor.checkpoint.load(.., weights_only=False) all"
        ) from error


def _failure(read: Callable[..., object], *args: Any) -> Iterator[str]:
    """The error that reading raises, if it does."""
    try:
        read(*args)
    except CheckpointError as error:
        yield str(error)


def _shared(piece: Piece, block: Block) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """(slices of the piece, slices of the local tensor) of what a block takes from a piece."""
    of_piece, of_local = [], []
    offsets, sizes, where = block
    for at, size, start, length, local in zip(
        piece.offsets, piece.sizes, offsets, sizes, where, strict=False
    ):
        first, last = max(at, start), min(at + size, start + length)
        if first >= last:
            return None
        of_piece.append(slice(first - at, last - at))
        of_local.append(slice(local.start + first - start, local.start + last - start))
    return tuple(of_piece), tuple(of_local)


@contextmanager
def _aside(path: Path) -> Iterator[Path]:
    """The path of a file to write, which is renamed to `path` if the block succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield aside
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def _mapped(file: Path, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose memory is part of `file`."""
    count = math.prod(shape) * dtype.itemsize
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    whole = torch.from_file(str(file), shared=True, size=start + count, dtype=torch.uint8)
    if start % dtype.itemsize:
        raise ValueError(f"{start=} is not aligned to {dtype}")
    return whole[start:].view(dtype).view(shape)


Fill = Callable[[Entry, torch.Tensor], None]


def write_safetensors(path: Path, entries: Sequence[Entry], fill: Fill) -> None:
    """Write a .safetensors file; `fill` writes each tensor into it, one after another."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts: list[int] = []
    at = 0
    # The widest first: each start is then a multiple of its own element's size.
    entries = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))
    for entry in entries:
        kind = _SAFETENSORS.get(entry.dtype)
        if kind is None:
            raise NotImplementedError(
                f"{entry.name}: safetensors has no {entry.dtype}. Write a .pt file instead"
            )
        header[entry.name] = {
            "dtype": kind,
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.nbytes],
        }
        starts.append(at)
        at += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with _aside(path) as file:
        with open(file, "wb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            stream.truncate(8 + len(text) + at)
        for entry, start in zip(entries, starts, strict=True):
            fill(entry, _mapped(file, 8 + len(text) + start, entry.shape, entry.dtype))


def write_torch(
    path: Path,
    entries: Sequence[Entry],
    fill: Fill,
    finish: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> None:
    """Write a file for `torch.load`. Until then each tensor is in a file beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        tensors: dict[str, Any] = {}
        for number, entry in enumerate(entries):
            file = Path(folder) / str(number)
            with open(file, "wb") as stream:
                stream.truncate(entry.nbytes)
            tensors[entry.name] = _mapped(file, 0, entry.shape, entry.dtype)
            fill(entry, tensors[entry.name])
        with _aside(path) as aside:
            torch.save(finish(tensors), aside)


def merge(stored: Stored, out: Path, progress: Progress = lambda _: None) -> list[str]:
    """Write whole tensors to one file, `.safetensors` or what torch.load reads (`.pt`, `.pth`).

    Returns:
        Names of the values that were left out, as the format holds tensors only.

    Raises:
        CheckpointError: a piece is missing or damaged; nothing is written.
        ValueError: another suffix.
    """
    stored.check(read=False)
    entries = list(stored.tensors.values())

    def fill(entry: Entry, into: torch.Tensor) -> None:
        whole = tuple(slice(0, size) for size in entry.shape)
        block = (torch.Size([0] * len(entry.shape)), torch.Size(entry.shape), whole)
        stored.fill(entry, [block], into)
        progress(entry.nbytes)

    if out.suffix == ".safetensors":
        write_safetensors(out, entries, fill)
        return stored.values
    if out.suffix not in (".pt", ".pth"):
        raise ValueError(f"{out}: the suffix tells the format, .safetensors, .pt or .pth")
    values = {name: stored.value(name) for name in stored.values}
    write_torch(out, entries, fill, lambda tensors: stored.nested({**tensors, **values}))
    return []


def reshard(
    stored: Stored,
    out: Path,
    sizes: tuple[int, ...],
    placements_of: Callable[[Entry], Placements],
    suffix: str,
    progress: Progress = lambda _: None,
) -> None:
    """Write one file for each rank of a mesh of `sizes`, with that rank's parts of all tensors.

    Args:
        placements_of: how a tensor is placed on the mesh.
        suffix: ".safetensors" or ".pt"; the files are rank-00000-of-00008.pt, and so on.

    Raises:
        CheckpointError: a piece is missing or damaged; `out` is not made.
        ValueError: `out` exists.
    """
    stored.check(read=False)
    if out.exists():
        raise ValueError(f"{out} exists: name a new folder")
    count = math.prod(sizes)
    mesh: Any = StandInMesh(torch.arange(count).view(sizes))
    layouts = {
        name: Layout(
            mesh,
            normalize(placements_of(entry), len(entry.shape), len(sizes)),
            entry.shape,
            contiguous_stride(entry.shape),
            entry.dtype,
        )
        for name, entry in stored.tensors.items()
    }
    aside = out.with_name(f".{out.name}.{os.getpid()}")
    aside.mkdir(parents=True)
    try:
        for rank in range(count):
            parts = [
                Entry(name, layout.shape_at(rank), layout.dtype, stored.tensors[name].pieces)
                for name, layout in layouts.items()
            ]

            def fill(entry: Entry, into: torch.Tensor, rank: int = rank) -> None:
                if into.numel():
                    stored.fill(entry, blocks(layouts[entry.name], rank), into)
                progress(entry.nbytes)

            file = aside / f"rank-{rank:05}-of-{count:05}{suffix}"
            (write_safetensors if suffix == ".safetensors" else write_torch)(file, parts, fill)
        os.replace(aside, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
