"""Random numbers on a mesh: those that one device with the same seed would draw, bit for bit.

A generator produces numbers in the order of the whole tensor's memory and cannot skip any. So every
rank draws them all, keeps those of its box, and leaves its generator as a single device would:

    seed 7    whole  [ .3 .9 .1 .5 | .8 .2 .6 .4 ]      rank 0 keeps the left half, rank 1 the right

Each rank takes the time of the whole tensor, but memory only for a piece of it: large tensors are
drawn in pieces if that gives the same numbers. Ranks may have been seeded differently: the first
random call on a mesh gives all of them the first rank's state. A generator that is passed must have
the same seed on every rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from weft.collectives import Group, spanning_group
from weft.dtensor.layout.boxes import Layout
from weft.dtensor.layout.runs import Box
from weft.dtensor.move.transfers import cut_box

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_agreed: weakref.WeakKeyDictionary[Group, set[str]] = weakref.WeakKeyDictionary()

_PIECE_BYTES = 64 << 20
# A CPU draws these one by one or, for normal_, in blocks of 16, of which the last one differs.
_BLOCK = 16
_IN_PIECES = ("uniform_", "normal_", "random_")


def agree_on_state(mesh: DeviceMesh) -> None:
    """Give every rank of `mesh` the generator states of its first rank. Collective.

    Done once for the same ranks and kind of device, rather than once for each mesh, as garbage
    collection drops meshes at different times on different ranks.
    """
    group, kind = spanning_group(mesh), mesh.device_type
    agreed = _agreed.setdefault(group, set())
    if kind in agreed:
        return
    own = torch.get_rng_state(), torch.cuda.get_rng_state() if kind == "cuda" else None
    of_cpu, of_gpu = group.gather_objects(own, "the state of random generators")[0]
    torch.set_rng_state(of_cpu)
    if of_gpu is not None:
        torch.cuda.set_rng_state(of_gpu)
    agreed.add(kind)


def with_equal_state(op: Callable[..., Any], mesh: DeviceMesh) -> Callable[..., Any]:
    """`op`, after the ranks' generators have been made equal."""

    @wraps(op)
    def run(*args: Any, **kwargs: Any) -> Any:
        agree_on_state(mesh)
        return op(*args, **kwargs)

    return run


def drawn(
    fill: Callable[[torch.Tensor], Any], name: str, layout: Layout, local: torch.Tensor
) -> torch.Tensor:
    """Write this rank's part of the tensor that `fill` fills, and return it.

    Args:
        fill: fills the tensor that it is given with random numbers.
        name: its op, as "normal_".
        layout: of the whole; its strides decide which number goes where.
        local: this rank's part, to be written.
    """
    agree_on_state(layout.mesh)
    if layout.is_replicated and local.stride() == layout.stride:
        fill(local)
        return local
    assert layout.index is not None
    mine = layout.box_at(layout.index)
    rows = layout.shape[0] if layout.shape else 1
    step = _rows_at_once(name, layout, local.device)
    for start in range(0, max(rows, 1), max(step, 1)):
        # No fewer rows than a block may remain, as the last block is drawn differently.
        stop = rows if rows - start - step < _BLOCK else start + step
        piece = torch.empty_strided(
            (stop - start, *layout.shape[1:]) if layout.shape else (),
            layout.stride,
            dtype=layout.dtype,
            device=local.device,
        )
        fill(piece)
        for source, target, _ in cut_box(_rows_box(layout, start, stop), mine):
            local[target] = piece[source]
        if stop == rows:
            break
    return local


def _rows_at_once(name: str, layout: Layout, device: torch.device) -> int:
    rows = layout.shape[0] if layout.shape else 1
    in_order = layout.is_contiguous
    if device.type != "cpu" or name not in _IN_PIECES or not in_order or rows == 0:
        return rows
    row_bytes = max(1, layout.global_bytes // rows)
    return max(_BLOCK, _PIECE_BYTES // row_bytes // _BLOCK * _BLOCK)


def _rows_box(layout: Layout, start: int, stop: int) -> Box:
    whole = tuple(((0, size),) for size in layout.shape)
    return (((start, stop - start),), *whole[1:]) if whole else ()
