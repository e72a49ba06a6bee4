"""DTensor.redistribute between all pairs of layouts: bytes, steps and time, against torch's.

A shape is that of the whole tensor. On 4, 6, .. ranks the mesh is 2 x (ranks / 2), else one dim.
The bound is to read from the peers as many bytes as the busiest rank must receive.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.distributed.tensor as torch_tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Placement

from weft import dtensor as weft_tensor
from weft.bench import bounds
from weft.bench.problem import INPUTS, Options, Prepared, Spec, arrived
from weft.bench.shapes import sized
from weft.collectives import resolve
from weft.dtensor import redistribute_plan

NAME = "redistribute"
WORLD: Literal["ranks", "one"] = "ranks"
SIZES = ("rows", "columns")

_WEFT, _TORCH = "weft", "torch"
_SHAPES = ((256, 256), (2048, 2048))
_PLACEMENTS: dict[str, Placement] = {
    "R": Replicate(),
    "S0": Shard(0),
    "S1": Shard(1),
    "P": Partial(),
}


def cases(options: Options) -> list[Spec]:
    """Every pair of layouts at every size; none ends in Partial, which moves nothing."""
    shapes = [sized(entry, SIZES, NAME) for entry in options.shapes]
    shapes = shapes or ([(24, 16)] if options.quick else list(_SHAPES))
    dims = len(_mesh_shape(options.ranks))
    layouts = list(itertools.product(_PLACEMENTS, repeat=dims))
    pairs = [
        (source, target)
        for source in layouts
        for target in layouts
        if source != target and "P" not in target
    ]
    return [
        Spec(
            f"{','.join(source)} -> {','.join(target)} {'x'.join(map(str, shape))}",
            {"shape": list(shape), "source": source, "target": target, "dtype": options.dtype_name},
        )
        for shape in shapes
        for source, target in pairs
    ]


def _mesh_shape(ranks: int) -> tuple[int, ...]:
    return (2, ranks // 2) if ranks >= 4 and ranks % 2 == 0 else (ranks,)


@lru_cache(maxsize=1)
def _cached_mesh(device: str, shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh(device, shape)


def prepare(spec: Spec, options: Options) -> Prepared:
    """One pair of layouts, on this rank."""
    p, group = spec.params, resolve(None)
    mesh = _cached_mesh(options.device, _mesh_shape(options.ranks))
    source, target = ([_PLACEMENTS[name] for name in p[key]] for key in ("source", "target"))
    plan = redistribute_plan(mesh, p["shape"], options.dtype, source, target)
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(p["shape"], generator=generator).to(options.device, options.dtype)

    def tensors(api: Any) -> list[Any]:
        first = _distributed(api, whole, mesh, source)
        more = (torch.randn_like(first.to_local()) for _ in range(INPUTS - 1))
        return [first, *(_laid_out(api, local, whole, mesh, source) for local in more)]

    ours, theirs = tensors(weft_tensor), tensors(torch_tensor)
    with CommDebugMode() as counted:
        arrived(theirs[0].redistribute(mesh, target))
    p["bytes"], p["steps"] = max(plan.bytes_received), len(plan.steps)
    p["torch collectives"] = sum(counted.get_comm_counts().values())
    least = {}
    if p["bytes"] and not group.unreached(torch.device(options.device)):
        least["link"] = bounds.read_from_peers(p["bytes"], group, torch.device(options.device))
    return Prepared(
        {
            _WEFT: lambda i: arrived(ours[i].redistribute(mesh, target)),
            _TORCH: lambda i: arrived(theirs[i].redistribute(mesh, target)),
        },
        least,
        expected=lambda: _distributed(torch_tensor, whole, mesh, target).to_local(),
        tolerance={torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(options.dtype, 1e-6),
        main=_WEFT,
        peer=_TORCH,
    )


def _distributed(
    api: Any, whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> Any:
    """`whole` in a layout; where it is Partial, each rank has an equal part of every value."""
    shown = [Replicate() if isinstance(each, Partial) else each for each in placements]
    local = api.distribute_tensor(whole, mesh, shown, src_data_rank=None).to_local().clone()
    for dim, each in enumerate(placements):
        if isinstance(each, Partial):
            local /= mesh.size(dim)
    return _laid_out(api, local, whole, mesh, placements)


def _laid_out(api: Any, local: torch.Tensor, whole: torch.Tensor, mesh: Any, layout: Any) -> Any:
    sizes = {"shape": whole.shape, "stride": whole.stride()}
    return api.DTensor.from_local(local, mesh, layout, run_check=False, **sizes)
