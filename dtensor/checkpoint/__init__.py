"""Checkpoints: `save` and `load` of state dicts, in the format of `torch.distributed.checkpoint`.

A checkpoint is a folder. It may be loaded into other layouts, meshes and numbers of ranks, by our
DTensors, by PyTorch's and by plain tensors, and `weft checkpoint --help` works on it offline.

`torch.distributed.checkpoint.save` works on our state dicts as well, but writes over the files of
an older checkpoint in the same folder. Here a save

    1. writes its data to files whose names no checkpoint has yet,
    2. writes the metadata, which name these files, aside,
    3. renames them to .metadata, which replaces the old checkpoint by the new one;
    4. deletes the files that it does not name.

Whichever rank is killed at whatever moment, the folder holds one complete checkpoint. The next save
removes what an unfinished one left behind.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StoragePrefix,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from weft.collectives.ranks.reports import check_all
from weft.dtensor.checkpoint.files import METADATA, SUFFIX, Stored

__all__ = ["AtomicWriter", "load", "save"]


def save(state_dict: Mapping[str, Any], checkpoint_id: str | os.PathLike[str]) -> None:
    """Write a checkpoint, which replaces the one in the folder. Collective.

    Args:
        state_dict: nested DTensors, tensors (the first rank's are stored) and values that pickle
            takes.
        checkpoint_id: the folder (torch's name for it).

    Raises:
        CheckpointException: torch's, no `Exception`: a DTensor is Partial, or cannot be written.
    """
    state_dict_saver.save(dict(state_dict), storage_writer=AtomicWriter(checkpoint_id))


def load(state_dict: dict[str, Any], checkpoint_id: str | os.PathLike[str]) -> None:
    """Read a checkpoint into the tensors of `state_dict`, in place. Collective.

    Args:
        state_dict: the entries to read, each DTensor in any layout. Values that are not tensors are
            replaced. Entries that only the checkpoint has are not read.
        checkpoint_id: the folder.

    Raises:
        CheckpointError: a file is missing or too short; it names the file and the tensors.
        CheckpointException: torch's, no `Exception`: the checkpoint lacks an entry, or has a tensor
            of another shape; it names it for each rank.
    """
    stored = Stored(checkpoint_id)
    stored.check(read=False)
    state_dict_loader.load(state_dict, storage_reader=FileSystemReader(checkpoint_id))


class AtomicWriter(FileSystemWriter):
    """A writer for `torch.distributed.checkpoint.save` that never damages an older checkpoint.

    Takes the arguments of `FileSystemWriter`.
    """

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name the files of this save; runs on the coordinating rank."""
        token = uuid.uuid4().hex[:12]
        return [
            dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{token}_{rank}_"))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files, and look once more whether what is in them has been computed."""
        written = super().write_data(plan, planner)
        check_all()
        return written

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Make the new checkpoint the valid one, then delete the old; on the coordinating rank."""
        folder = Path(os.fspath(self.path))
        stored = {result.index: result.storage_data for each in results for result in each}
        metadata.storage_data = stored
        metadata.storage_meta = self.storage_meta()
        aside = folder / f"{METADATA}.tmp"
        with open(aside, "wb") as file:
            pickle.dump(metadata, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, folder / METADATA)
        _sync_folder(folder)
        named = {info.relative_path for info in stored.values()}
        for file_name in os.listdir(folder):
            if file_name.endswith(SUFFIX) and file_name not in named:
                os.unlink(folder / file_name)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
