"""Routings of tokens to experts, and each rank's table of rows, by loops over everything."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.collectives import chunk_sizes
from weft.kernels.expert_kernels.expert_tiles import RowTable


@dataclass
class Routed:
    """All ranks' ids (T, k), of `E` experts on the W // tp sets of ranks, which hold chunks."""

    ids: list[torch.Tensor]
    E: int
    tp: int = 1

    @property
    def tokens(self) -> list[int]:
        return [len(ids) for ids in self.ids]

    @property
    def k(self) -> int:
        return self.ids[0].shape[1]

    def own(self, rank: int) -> range:
        """The experts of a rank."""
        sizes = chunk_sizes(self.E, len(self.ids) // self.tp)
        first = sum(sizes[: rank // self.tp])
        return range(first, first + sizes[rank // self.tp])

    def table(self, rank: int, spare: int = 0) -> RowTable:
        """A rank's rows by a loop over everything, and `spare` ones that must not be read."""
        rows, ends = [], []
        for expert in self.own(rank):
            for source, ids in enumerate(self.ids):
                for slot in (ids.reshape(-1) == expert).nonzero().flatten().tolist():
                    rows.append((source, slot // self.k, slot))
            ends.append(len(rows))
        rows += [(1 << 30,) * 3] * spare
        columns = torch.tensor(rows, dtype=torch.int32).reshape(-1, 3).T.contiguous()
        return RowTable(torch.tensor(ends, dtype=torch.int32), *columns)
