"""Checkpoints: `save` and `load` of state dicts, in the format of `torch.distributed.checkpoint`.

A checkpoint is a folder. It may be loaded into other layouts, meshes and numbers of ranks, by our
DTensors, by PyTorch's and by plain tensors, and `weft checkpoint --help` works on it offline.

`torch.distributed.checkpoint.save` works on our state dicts as well, but writes over the files of
an older checkpoint in the same folder. Here a save

    1. deletes what a killed save has left, so that retries do not fill the disk,
    2. writes its data to files whose names no checkpoint has yet,
    3. writes the metadata, which name these files, aside,
    4. renames them to .metadata, which replaces the old checkpoint by the new one;
    5. deletes the files that it does not name.

Whichever rank is killed at whatever moment, the folder holds one complete checkpoint. A save that
fails, for lack of room on the disk say, deletes what it has written.

Each item has a check sum, which `load` compares before it reads. No file is trusted: loading runs
no code of a checkpoint's.
"""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StoragePrefix,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from weft.collectives.ranks.group import resolve
from weft.collectives.ranks.reports import check_all
from weft.dtensor.checkpoint.files import Stored, plain_value
from weft.dtensor.checkpoint.metadata import (
    METADATA,
    SUFFIX,
    CheckpointError,
    add_crc,
    pickled,
    read_metadata,
    verify,
)
from weft.dtensor.checkpoint.steps import Steps

__all__ = ["AtomicWriter", "CheckpointError", "async_save", "load", "save"]

# Files of data that an `AtomicWriter` has named; torch's are __0_0.distcp, without a token.
_OURS = re.compile(r"__[0-9a-f]{12}_\d+_\d+" + re.escape(SUFFIX))


def save(state_dict: Mapping[str, Any], checkpoint_id: str | os.PathLike[str]) -> None:
    """Write a checkpoint, which replaces the one in the folder. Collective.

    Args:
        state_dict: nested DTensors, tensors (the first rank's are stored) and values that pickle
            takes. DTensors in lists and dicts, not in tuples or other values.
        checkpoint_id: the folder (torch's name for it).

    Raises:
        ValueError: a DTensor is in a tuple or set, before anything is written.
        CheckpointException: torch's, no `Exception`: a DTensor is Partial, or cannot be written.
            For lack of room it tells how many bytes are wanted and free. What was written is
            deleted, and the checkpoint that was in the folder is as it was.
        PeerTimeout: ranks have died, or did not come to the save within WEFT_TIMEOUT_S, or to its
            end so long after this one. The checkpoint in the folder is the older or the new one,
            whole; what else was written is deleted by the next save.
    """
    _save(
        _plain_state(state_dict), AtomicWriter(checkpoint_id), _next_steps("save of a checkpoint")
    )


_saves: list[Future[None]] = []  # the asynchronous one that is under way


def async_save(
    state_dict: Mapping[str, Any], checkpoint_id: str | os.PathLike[str]
) -> Future[None]:
    """`save` in a thread of its own, of copies in the memory of the host. Collective.

    The next save or load waits until this one is over, and so does the end of the program.

    Returns:
        Its `result()` waits, and raises what `save` would have.
    """
    steps = _next_steps("save of a checkpoint")
    stager = DefaultStager(StagingOptions(False, False, False, False))
    copies: Any = stager.stage(_plain_state(state_dict))
    stager.close()
    thread = ThreadPoolExecutor(1, "weft save")
    _saves.append(thread.submit(_save, copies, AtomicWriter(checkpoint_id), steps))
    thread.shutdown(wait=False)
    return _saves[0]


def _plain_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict with those of what is `Stateful`.

    Raises:
        ValueError: a DTensor is where torch stores a value as a whole, as the first rank has it.
    """
    plain = {
        name: value.state_dict() if isinstance(value, Stateful) else value
        for name, value in state_dict.items()
    }
    for name, value in flatten_state_dict(plain)[0].items():
        if not isinstance(value, torch.Tensor) and _holds_shards(value):
            raise ValueError(
                f"{name} is a {type(value).__name__} that holds a DTensor: it would be stored as "
                f"one value, with the first rank's shard for all. Put DTensors in lists and dicts"
            )
    return plain


def _holds_shards(value: Any) -> bool:
    if isinstance(value, (tuple, list, set, frozenset)):
        return any(map(_holds_shards, value))
    if isinstance(value, Mapping):
        return any(map(_holds_shards, value.values()))
    return hasattr(value, "__create_write_items__")  # ours and torch's


def _next_steps(op: str) -> Steps:
    """The next ones, once those of an asynchronous save are over."""
    for done in _saves:
        done.exception()  # which its owner asks for
    _saves.clear()
    return Steps(resolve() if dist.is_initialized() else None, op)


def _save(state_dict: dict[str, Any], writer: AtomicWriter, steps: Steps) -> None:
    planner, first = DefaultSavePlanner(), steps.rank == 0
    metadata: list[Metadata] = []

    def planned() -> SavePlan:
        meta = writer.storage_meta()
        planner.set_up_planner(state_dict, storage_meta=meta, is_coordinator=first)
        writer.set_up_storage_writer(first)
        return writer.prepare_local_plan(planner.create_local_plan())

    def all_planned(plans: list[SavePlan]) -> list[SavePlan]:
        plans, whole = planner.create_global_plan(plans)
        metadata.append(whole)
        return writer.prepare_global_plan(plans)

    def finished(results: list[list[WriteResult]]) -> list[None]:
        writer.finish(metadata[0], results)
        return [None] * len(results)

    try:
        plan = steps.take("plan", planned, all_planned)
        write = planner.finish_plan
        steps.take("write", lambda: writer.write_data(write(plan), planner).wait(), finished)
    except CheckpointException:  # on all ranks, and none writes any more
        writer.discard()
        raise
    steps.end()


def load(
    state_dict: dict[str, Any], checkpoint_id: str | os.PathLike[str], *, weights_only: bool = True
) -> None:
    """Read a checkpoint into the tensors of `state_dict`, in place. Collective.

    Args:
        state_dict: the entries to read, each DTensor in any layout. Values that are not tensors are
            replaced. Entries that only the checkpoint has are not read.
        checkpoint_id: the folder.
        weights_only: as torch.load's: values that are not tensors must be plain data, or of classes
            that torch.serialization.add_safe_globals allows. False: they may be of any class, and
            run what code they like: for checkpoints whose writer is trusted.

    Raises:
        ValueError: a DTensor is in a tuple or set.
        CheckpointError: a file is missing, too short or not what was written, or names classes that
            could run code; on every rank, naming the file and the tensors.
        CheckpointException: torch's, no `Exception`: the checkpoint lacks an entry, or has a tensor
            of another shape; it names it for each rank.
        PeerTimeout: ranks have died, or did not come to the load within WEFT_TIMEOUT_S.
    """
    into, steps = _plain_state(state_dict), _next_steps("load of a checkpoint")
    Stored(checkpoint_id).check(read=False)
    planner = _PlainPlanner() if weights_only else DefaultLoadPlanner()
    reader, first = _CheckedReader(checkpoint_id), steps.rank == 0

    def planned() -> LoadPlan:
        metadata = reader.read_metadata()
        planner.set_up_planner(into, metadata, first)
        reader.set_up_storage_reader(metadata, first)
        return reader.prepare_local_plan(planner.create_local_plan())

    def all_planned(plans: list[LoadPlan]) -> list[LoadPlan]:
        return reader.prepare_global_plan(planner.create_global_plan(plans))

    try:
        plan = steps.take("plan", planned, all_planned)
        read = planner.finish_plan
        steps.take("read", lambda: reader.read_data(read(plan), planner).wait(), list)
    except CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, CheckpointError):
                raise cause from error
        raise
    steps.end()
    for name in sorted(into):
        if isinstance(value := state_dict[name], Stateful):
            value.load_state_dict(into[name])
        else:
            state_dict[name] = into[name]


class _CheckedReader(FileSystemReader):
    """Reads metadata without trust, and items only if they are what was written."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_metadata(Path(os.fspath(self.path)))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> TorchFuture[None]:
        wanted = {item.storage_index: None for item in plan.items}
        for index in sorted(wanted, key=lambda index: self._at(index)):
            verify(Path(os.fspath(self.path)), self.storage_data[index], index.fqn)
        return super().read_data(plan, planner)

    def _at(self, index: Any) -> tuple[str, int]:
        place = self.storage_data[index]
        return place.relative_path, place.offset


class _PlainPlanner(DefaultLoadPlanner):
    """Takes values that are not tensors as plain data, where torch's unpickles anything."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Give torch's, which unpickles it, what we have read and written."""
        safe = io.BytesIO()
        torch.save(plain_value(read_item.storage_index.fqn, value), safe)
        safe.seek(0)
        super().load_bytes(read_item, safe)


class AtomicWriter(FileSystemWriter):
    """A writer for `torch.distributed.checkpoint.save` that never damages an older checkpoint.

    Takes the arguments of `FileSystemWriter`.
    """

    _prefix = ""  # of this rank's files in this save

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Delete what killed saves have left, and name the files; on the coordinating rank."""
        folder = Path(os.fspath(self.path))
        for name in _unnamed(folder):
            if _OURS.fullmatch(name):
                (folder / name).unlink(missing_ok=True)
        token = uuid.uuid4().hex[:12]
        return [
            dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{token}_{rank}_"))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Write this rank's files and sum them, and look once more whether what is in them has been
        computed.
        """
        folder = Path(os.fspath(self.path))
        self._prefix = plan.storage_data.prefix
        try:
            written = super().write_data(plan, planner)
            for result in written.wait():
                add_crc(folder, result.storage_data)
            check_all()
        except BaseException as error:
            told = self._lack_of_room(plan, error)
            self.discard()  # no rank makes this save the valid one
            if told is None:
                raise
            raise told from error
        return written

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Make the new checkpoint the valid one, then delete the old; on the coordinating rank."""
        folder = Path(os.fspath(self.path))
        stored = {result.index: result.storage_data for each in results for result in each}
        metadata.storage_data = stored
        metadata.storage_meta = self.storage_meta()
        aside = folder / f"{METADATA}.tmp"
        try:
            with open(aside, "wb") as file:
                file.write(pickled(metadata))
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, folder / METADATA)
        finally:
            aside.unlink(missing_ok=True)
        _sync_folder(folder)
        for name in _unnamed(folder):
            os.unlink(folder / name)

    def discard(self) -> None:
        """Delete what this rank has written in a save that has failed, as all ranks know."""
        if self._prefix:
            folder = Path(os.fspath(self.path))
            for name in _unnamed(folder):
                if name.startswith(self._prefix):
                    (folder / name).unlink(missing_ok=True)

    def _lack_of_room(self, plan: SavePlan, error: BaseException) -> OSError | None:
        """The error that tells what is wanted and free, if a write has failed for lack of room."""
        folder = Path(os.fspath(self.path))
        wanted = sum(
            item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
            for item in plan.items
            if item.tensor_data is not None
        )
        written = [path.stat().st_blocks * 512 for path in folder.glob(f"{self._prefix}*")]
        free = shutil.disk_usage(folder).free + sum(written)
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not full and (free >= wanted or not isinstance(error, OSError | RuntimeError)):
            return None
        return OSError(
            errno.ENOSPC,
            f"no room for the checkpoint: this rank's part takes {wanted} bytes and more, and "
            f"{free} are free on the disk of {folder}, for all ranks that save there. What was "
            f"written is deleted, and an older checkpoint is as it was. Make room, or save to "
            f"another disk",
        )


def _unnamed(folder: Path) -> list[str]:
    """Files of data that the checkpoint in `folder` does not name; none if it cannot be read."""
    try:
        places = read_metadata(folder).storage_data.values()
    except CheckpointError:
        if (folder / METADATA).exists():
            return []
        places = ()
    named = {place.relative_path for place in places}
    with suppress(FileNotFoundError):
        return [name for name in os.listdir(folder) if name.endswith(SUFFIX) and name not in named]
    return []


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
