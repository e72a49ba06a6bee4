"""`.metadata`, the file that tells what a checkpoint holds: read without trust, written with sums.

It is a pickle, which could run whatever its writer likes. Here it may name the classes of torch's
format and nothing else, and what it says is looked at before anyone uses it. Ours also hold

    a check sum of each item         `weft_crc32` of its storage info, which torch keeps unread
    a check sum of the file itself   12 bytes behind the pickle, where torch stops reading
"""

from __future__ import annotations

import collections
import io
import math
import os
import pickle
import struct
import zlib
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

METADATA = ".metadata"
SUFFIX = ".distcp"
_TRAILER = struct.Struct("<8sI")
_MARK = b"weft-crc"
_BUFFER_BYTES = 1 << 20  # zlib runs at the speed of memory on what is in the cache
_MOST_BYTES = 1 << 62

_CLASSES: dict[tuple[str, str], Any] = {
    (found.__module__, found.__qualname__): found
    for found in (
        *(getattr(torch_metadata, name) for name in torch_metadata.__all__),
        torch_metadata._MEM_FORMAT_ENCODING,
        _StorageInfo,
        collections.OrderedDict,
        torch.serialization._get_layout,
    )
}
_CLASSES["torch", "Size"] = torch.Size


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read: a piece is missing or damaged, or it asks for code to be run."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        if module.split(".")[0] == "pathlib" and name.endswith("Path"):
            return PurePosixPath  # of the folder; where pathlib has its classes depends on Python
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which is not of torch's format; nothing of it was run"
        )


def read_metadata(folder: Path) -> Metadata:
    """What a checkpoint holds, without running code of the file.

    Raises:
        CheckpointError: there is no checkpoint, or its metadata are damaged, name other classes
            than those of torch's format, or name files outside of the folder.
    """
    file = folder / METADATA
    if not file.exists():
        raise CheckpointError(
            f"{folder} is not a checkpoint: it has no {METADATA}. A killed save leaves none "
            f"if it was the first in this folder"
        )
    data = file.read_bytes()
    if data[-_TRAILER.size :].startswith(_MARK):
        data, (_, crc) = data[: -_TRAILER.size], _TRAILER.unpack(data[-_TRAILER.size :])
        if zlib.crc32(data) != crc:
            raise CheckpointError(f"{file} is damaged: its check sum differs")
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
        _check_metadata(metadata, folder)
    except CheckpointError:
        raise
    except Exception as error:  # bytes that pickle has not written may raise any
        raise CheckpointError(f"{file} is damaged: {error or type(error).__name__}") from error
    checked: Metadata = metadata
    return checked


def pickled(metadata: Metadata) -> bytes:
    """The contents of `.metadata`: torch's, and a check sum behind it."""
    data = pickle.dumps(metadata)
    return data + _TRAILER.pack(_MARK, zlib.crc32(data))


def _check_metadata(metadata: Any, folder: Path) -> None:
    """Raise if fields are missing or hold what they cannot."""
    _want(isinstance(metadata, Metadata), "it holds no Metadata")
    nesting = metadata.planner_data or {}
    _want(isinstance(nesting, dict), "planner_data is no dict")
    for name, path in nesting.items():
        keys = isinstance(path, tuple) and all(isinstance(key, str | int) for key in path)
        _want(isinstance(name, str) and keys, "planner_data holds no paths")
    total = 0
    for name, stored in metadata.state_dict_metadata.items():
        _want(isinstance(name, str), "a name is no text")
        if isinstance(stored, torch_metadata.BytesStorageMetadata):
            continue
        _want(isinstance(stored, torch_metadata.TensorStorageMetadata), f"{name} is no tensor")
        _want(isinstance(stored.properties.dtype, torch.dtype), f"{name} has no dtype")
        shape = stored.size
        _want(_are_sizes(shape, len(shape)), f"{name} has no shape")
        total += math.prod(shape) * stored.properties.dtype.itemsize
        for chunk in stored.chunks:
            offsets, sizes = chunk.offsets, chunk.sizes
            are_sizes = _are_sizes(offsets, len(shape)) and _are_sizes(sizes, len(shape))
            _want(are_sizes, f"{name} has a piece of other dims")
            inside = all(a + n <= size for a, n, size in zip(offsets, sizes, shape, strict=True))
            _want(inside, f"{name}: {list(sizes)} at {list(offsets)} is outside of {list(shape)}")
    _want(total < _MOST_BYTES, f"its tensors would have {total} bytes")
    for index, place in metadata.storage_data.items():
        _want(isinstance(index, torch_metadata.MetadataIndex), "storage_data has other keys")
        offset = index.offset
        _want(offset is None or _are_sizes(offset, len(offset)), f"{index.fqn}: no offset")
        _want(isinstance(place, _StorageInfo), f"{index.fqn} has no place")
        _want(_are_sizes((place.offset, place.length), 2), f"{index.fqn} has no place")
        _want(isinstance(place.relative_path, str), f"{index.fqn} has no file")
        crc = stored_crc(place)
        _want(crc is None or type(crc) is int, f"{index.fqn}: no check sum")
    for name in sorted({place.relative_path for place in metadata.storage_data.values()}):
        root = os.path.realpath(folder)
        if not os.path.realpath(os.path.join(root, name)).startswith(os.path.join(root, "")):
            raise CheckpointError(
                f"{folder / METADATA} names {name!r}, which is outside of the checkpoint's folder: "
                f"it is not read. Copy files in place of links to them"
            )


def _want(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise ValueError(otherwise)


def _are_sizes(values: Any, count: int) -> bool:
    return (
        isinstance(values, tuple)
        and len(values) == count
        and all(type(value) is int and 0 <= value < _MOST_BYTES for value in values)
    )


def stored_crc(place: Any) -> int | None:
    """The check sum of an item, if the checkpoint has one: torch's own have none."""
    crc: int | None = getattr(place, "weft_crc32", None)
    return crc


def add_crc(folder: Path, place: Any) -> None:
    """Compute the check sum of an item that has just been written."""
    place.weft_crc32 = _file_crc(folder, place)


def verify(folder: Path, place: Any, what: object) -> None:
    """Compare an item with its check sum, if there is one, before anything reads it.

    Raises:
        CheckpointError: they differ.
    """
    if (wanted := stored_crc(place)) is not None and _file_crc(folder, place) != wanted:
        raise differs(what, place)


def differs(what: object, place: Any) -> CheckpointError:
    """The error of an item that is not what was written."""
    return CheckpointError(
        f"{what}: damaged in {place.relative_path} (check sum of {place.length} bytes at "
        f"{place.offset})"
    )


def _file_crc(folder: Path, place: Any) -> int:
    buffer = memoryview(bytearray(min(_BUFFER_BYTES, max(place.length, 1))))
    crc, left = 0, place.length
    with open(folder / place.relative_path, "rb", buffering=0) as stream:
        stream.seek(place.offset)
        while left and (count := stream.readinto(buffer[: min(left, len(buffer))])):
            crc, left = zlib.crc32(buffer[:count], crc), left - count
    return crc
