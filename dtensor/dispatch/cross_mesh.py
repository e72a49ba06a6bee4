"""Operations whose tensors lie on different meshes of the same ranks, as in gradient clipping.

Numbers (one element) follow the other tensors to their mesh. Lists of tensors (`_foreach_*`,
`_fused_*`) are split into lists of one mesh each:

    _foreach_mul_([a, b, c], k)    a, c on mesh 1, b and k on mesh 2:
                                   _foreach_mul_([a, c], k on mesh 1), _foreach_mul_([b], k)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Replicate

from weft.dtensor.dispatch.call import Op, OpCall, leaves, map_tree
from weft.dtensor.layout.boxes import Layout, layout_of
from weft.dtensor.tensor import DTensor, local_as, wrap


def of_one_mesh(func: Op, call: OpCall) -> Callable[..., Any]:
    """A function that does what `call` asks, by calls of `func` on one mesh each.

    Raises:
        NotImplementedError: more than numbers would have to move.
    """
    lists = call.name.startswith(("_foreach_", "_fused_")) and isinstance(call.args[0], list)
    leads = [a for a in call.args[0] if isinstance(a, Layout)] if lists else [_lead(call)]
    for position, lead in enumerate(leads):
        met = _part([*call.args, *call.kwargs.values()], [position], len(leads))
        for layout in leaves(met if lists else call.inputs):
            if isinstance(layout, Layout) and layout.mesh != lead.mesh:
                _check_moves(call, layout, lead)
    if not lists:
        mesh = leads[0].mesh
        return lambda *args, **kwargs: func(*_on(mesh, args), **_on(mesh, kwargs))
    meshes = list(dict.fromkeys(lead.mesh for lead in leads))
    groups = [(m, [i for i, lead in enumerate(leads) if lead.mesh == m]) for m in meshes]

    def run(*args: Any, **kwargs: Any) -> Any:
        results: list[Any] = [None] * len(leads)
        returned = False
        for mesh, positions in groups:
            part = _part(args, positions, len(leads)), _part(kwargs, positions, len(leads))
            out = func(*_on(mesh, part[0]), **_on(mesh, part[1]))
            returned = out is not None
            for position, value in zip(positions, out or (), strict=False):
                results[position] = value
        return results if returned else None

    return run


def _lead(call: OpCall) -> Layout:
    """The tensor whose mesh is taken: the first that is more than a number."""
    return next((a for a in call.inputs if a.shape and a.shape != (1,)), call.inputs[0])


def _check_moves(call: OpCall, number: Layout, lead: Layout) -> None:
    same_ranks = set(number.place.ranks) == set(lead.place.ranks)
    if torch.Size(number.shape).numel() != 1 or not same_ranks:
        raise NotImplementedError(
            f"{call}: the tensors lie on different meshes. Bring them to one: "
            f"x.redistribute(mesh, placements). (Only numbers, one element on the same ranks, "
            f"follow by themselves.)"
        )


def _part(values: Any, positions: Sequence[int], length: int) -> Any:
    """`values`, with only the elements at `positions` of each list of this length among them."""
    if isinstance(values, dict):
        return {name: _part([value], positions, length)[0] for name, value in values.items()}
    return [
        [value[i] for i in positions]
        if isinstance(value, (list, tuple)) and len(value) == length
        else value
        for value in values
    ]


def _on(mesh: Any, values: Any) -> Any:
    """`values`, with the DTensors of other meshes (numbers) replicated on `mesh`."""

    def moved(value: Any) -> Any:
        if not isinstance(value, DTensor) or value._layout.mesh == mesh:
            return value
        layout = value._layout
        everywhere = (Replicate(),) * mesh.ndim
        target = layout_of(mesh, everywhere, layout.shape, layout.stride, layout.dtype)
        return wrap(local_as(value, target), target)

    return map_tree(values, moved)
