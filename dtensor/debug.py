"""`CommDebugMode` and `visualize_sharding`, as in `torch.distributed.tensor.debug`, and
`ExplicitRedistributionContext`, which torch keeps in `_utils`.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack
from typing import Any

import torch
from torch.distributed.tensor.debug import CommDebugMode as _TorchCommDebugMode
from torch.distributed.tensor.debug._comm_mode import _CommModeModuleTracker

from weft import settings
from weft.collectives.ranks.group import here
from weft.dtensor.layout.runs import Run
from weft.dtensor.move.explicit import ExplicitRedistributionContext
from weft.dtensor.tensor import DTensor

__all__ = ["CommDebugMode", "ExplicitRedistributionContext", "visualize_sharding"]

_counted = torch.ops.c10d_functional
_PACKETS = {
    "all_gather": _counted.all_gather_into_tensor,
    "all_reduce": _counted.all_reduce,
    "all_to_all": _counted.all_to_all_single,
    # Of `distribute_tensor`, for which torch calls the process group.
    "broadcast": torch.ops.c10d.broadcast_,
    "reduce_scatter": _counted.reduce_scatter_tensor,
    "scatter": torch.ops.c10d.scatter_,
}
# The collectives that a fused op does the work of.
_REPLACED = {
    "all_gather_matmul": ["all_gather"],
    "matmul_reduce_scatter": ["reduce_scatter"],
    "matmul_all_reduce": ["all_reduce"],
    "ring_attention": ["all_gather"],  # of keys and values together
    "ulysses_attention": ["all_to_all"] * 4,  # of q, k, v and of the result
}


class _ModuleTracker(_CommModeModuleTracker):
    """Torch's, whose hooks see the modules of all virtual ranks of a process: heeds its own's."""

    def __enter__(self) -> None:
        self._world = here.world
        super().__enter__()

    def _fw_pre_hook(self, module: Any, *args: Any) -> None:
        if here.world is self._world:
            # Torch's leaves the hook of the module's last pass in place, and then runs both.
            last = self.register_forward_hook_handles.pop(self._get_mod_name(module), None)
            if last is not None:
                last.remove()
            super()._fw_pre_hook(module, *args)

    def _fw_post_hook(self, *args: Any) -> None:
        if here.world is self._world:
            super()._fw_post_hook(*args)

    def _fw_set_module_hook(self, *args: Any) -> None:
        if here.world is self._world:
            super()._fw_set_module_hook(*args)

    def _bw_hook(self, *args: Any) -> None:
        if here.world is self._world:
            super()._bw_hook(*args)


class CommDebugMode(_TorchCommDebugMode):
    """Counts the communication inside the block, by collective, by module, forward and backward.

    What runs through symmetric memory is counted as the collective that it replaces: an
    `all_gather_matmul`, and a pull from Shard to Replicate, each as one `all_gather_into_tensor`.

    Example:
        >>> with CommDebugMode() as comm:
        ...     x.redistribute(placements=[Replicate()])          # x is placed [Shard(0)]
        >>> comm.get_comm_counts()[torch.ops.c10d_functional.all_gather_into_tensor]
        1
    """

    def __init__(self) -> None:
        super().__init__()
        self.advanced_module_tracker = _ModuleTracker()

    def __enter__(self) -> CommDebugMode:
        super().__enter__()
        self._listening = ExitStack()
        self._listening.enter_context(settings.listening(self._count))
        return self

    def __exit__(self, *args: Any) -> None:
        self._listening.close()
        super().__exit__(*args)

    def get_sharding_info(self) -> dict[str, Any]:
        """Placements of the parameters of the modules that ran, by "module.parameter"."""
        return {
            f"{module}.{name}": param.placements
            for module, params in self.get_parameter_info().items()
            for name, param in params.items()
            if isinstance(param, DTensor)
        }

    def _count(self, decision: settings.Decision) -> None:
        # "generic" hands on to the process group, whose collectives are counted as they pass.
        op = decision.collective or decision.op
        if decision.engine not in ("generic", "local") and decision.ranks != 1:
            for name in _REPLACED.get(op, [op]):
                if name in _PACKETS:
                    self._count_one(_PACKETS[name])

    def _count_one(self, packet: Any) -> None:
        self.comm_counts[packet] += 1
        tracker = self.advanced_module_tracker
        direction = "backward" if tracker.is_bw else "forward"
        for module in {tracker.name, *tracker.module_parents_dict.get(tracker.name, ())}:
            if module not in self.comm_module_counts:
                self.comm_module_counts[module] = {
                    "forward": defaultdict(int),
                    "backward": defaultdict(int),
                }
            self.comm_module_counts[module][direction][packet] += 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not any(issubclass(kind, DTensor) for kind in types):
            return super().__torch_dispatch__(func, types, args, kwargs)
        tracker = self.advanced_module_tracker
        tensors = [a for a in args if isinstance(a, DTensor)]
        counts = self.comm_module_operation_counts
        counts.setdefault(tracker.name, {"operations_list": []})["operations_list"].append(
            {
                "name": func,
                "input_shape": [t.shape for t in tensors],
                "input_sharding": [t.placements for t in tensors],
                "device_mesh": str(tensors[0].device_mesh) if tensors else "",
                "is_bw": tracker.is_bw,
                "is_activation_checkpointing": tracker.activation_checkpointing,
            }
        )
        # The DTensor goes first, this mode sees what it does.
        return NotImplemented


def visualize_sharding(dtensor: DTensor, header: str = "", use_rich: bool = False) -> None:
    """Print which ranks hold which part of a 1-D or 2-D DTensor. The mesh's first rank prints.

    Args:
        header: a line above the table.
        use_rich: draw it with `rich`, if that is installed.

    Raises:
        ValueError: more than two dims.

    Example:
        >>> visualize_sharding(x)        # 8 x 6 on a mesh of 2 x 2, [Shard(0), Shard(1)]
                   Col 0-2  Col 3-5
        Row 0-3    cpu:0    cpu:1
        Row 4-7    cpu:2    cpu:3
    """
    layout = dtensor._layout
    if layout.ndim > 2:
        raise ValueError(
            f"visualize_sharding draws 1-D and 2-D DTensors, got shape {layout.shape}: select or "
            f"flatten dims first"
        )
    if layout.index != 0 or 0 in layout.shape:
        return
    boxes = [(*box, ((0, 1),), ((0, 1),))[:2] for box in layout.boxes]
    rows, columns = (sorted({run for box in boxes for run in box[dim]}) for dim in (0, 1))
    holders = list(zip(layout.place.ranks, boxes, strict=True))

    def cell(row: Run, column: Run) -> str:
        ranks = [rank for rank, box in holders if row in box[0] and column in box[1]]
        return f"{layout.mesh.device_type}:{','.join(map(str, ranks))}" if ranks else ""

    table = [[cell(row, column) for column in columns] for row in rows]
    row_heads = [f"Row {start}-{start + size - 1}" for start, size in rows]
    column_heads = [f"Col {start}-{start + size - 1}" for start, size in columns]
    if header:
        print(header)
    if use_rich and _draw_rich(row_heads, column_heads, table):
        return
    lines = [["", *column_heads]]
    lines += [[head, *cells] for head, cells in zip(row_heads, table, strict=True)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        print("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip())


def _draw_rich(row_heads: list[str], column_heads: list[str], cells: list[list[str]]) -> bool:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return False
    table = Table("", *column_heads, show_lines=True)
    for head, line in zip(row_heads, cells, strict=True):
        table.add_row(head, *line)
    Console().print(table)
    return True
