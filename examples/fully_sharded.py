"""Fully sharded data parallelism beside tensor parallelism, on a mesh of two dims.

    torchrun --nproc-per-node 4 examples/fully_sharded.py

Every weight is cut over all ranks: by `tp` as tensor parallelism has it, and what is left once more
by `dp`, over which the batch is cut too. A layer needs its weight whole along `dp`: it is gathered
while it is multiplied, by all_gather_matmul, and its gradient is reduced and scattered by the
backward of that. Optimizer states are cut as the weights are. With w (out, in), x (batch, in):

    y.T  =  w @ x.T           the rows of w are gathered, as activations are in tensor parallelism

    layer     w on (dp, tp)            x on (dp, tp)            y on (dp, tp)
    up        rows by tp, then dp      [Shard(0), Replicate]    [Shard(0), Shard(1)]
    down      columns by tp, rows dp   [Shard(0), Shard(1)]     [Shard(0), Partial] -> Replicate
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import weft
from weft.dtensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from weft.dtensor.notation import placements_of_cuts

DP, TP = 0, 1
FEATURES, HIDDEN, BATCH, STEPS = 8, 32, 12, 10


class FullyShardedLinear(nn.Module):
    """`nn.Linear` without bias, its weight cut over both dims of a mesh."""

    def __init__(self, whole: nn.Linear, mesh: dist.DeviceMesh, *, columns: bool) -> None:
        super().__init__()
        # `tp` cuts first, so that what `dp` gathers is one block of rows.
        cuts = [[DP], [TP]] if columns else [[TP, DP], []]
        placements = placements_of_cuts(cuts, tuple(mesh.shape))
        weight = distribute_tensor(whole.weight.detach(), mesh, placements)
        self.weight = nn.Parameter(weight)
        self.mesh, self.columns = mesh, columns

    def forward(self, x: DTensor) -> DTensor:
        w: DTensor = self.weight  # type: ignore[assignment]
        # Each rank of `tp` has a term of the gradient of an x that all of them have.
        of_x = [Shard(0), Shard(1) if self.columns else Partial()]
        x_local = x.to_local(grad_placements=of_x)
        y_local = weft.all_gather_matmul(w.to_local(), x_local.t(), self.mesh["dp"]).t()
        of_y = [Shard(0), Partial() if self.columns else Shard(1)]
        shape = torch.Size((x.shape[0], w.shape[0]))
        return DTensor.from_local(y_local, self.mesh, of_y, shape=shape, stride=(shape[1], 1))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, FEATURES, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class FullyShardedMLP(nn.Module):
    def __init__(self, whole: MLP, mesh: dist.DeviceMesh) -> None:
        super().__init__()
        self.up = FullyShardedLinear(whole.up, mesh, columns=False)
        self.down = FullyShardedLinear(whole.down, mesh, columns=True)

    def forward(self, x: DTensor) -> DTensor:
        y: DTensor = self.down(nn.functional.gelu(self.up(x)))
        return y.redistribute(placements=[Shard(0), Replicate()])


def train(model: nn.Module, mesh: dist.DeviceMesh | None) -> list[float]:
    """Losses of `STEPS` steps, on a mesh or (None) on one process."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        x = torch.randn(BATCH, FEATURES, generator=torch.Generator().manual_seed(step))
        wanted = x.sin()
        if mesh is not None:
            layout = [Shard(0), Replicate()]
            x, wanted = (distribute_tensor(t, mesh, layout) for t in (x, wanted))
        loss = nn.functional.mse_loss(model(x), wanted)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def run(dp: int, tp: int) -> tuple[list[float], list[float], int]:
    """(losses on the mesh, losses on one process, weight elements that this rank holds)."""
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)  # the same weights on every rank
    whole = MLP()
    model = FullyShardedMLP(whole, mesh)
    held = sum(p.to_local().numel() for p in model.parameters())  # type: ignore[attr-defined]
    return train(model, mesh), train(whole, None), held


def main() -> None:
    dist.init_process_group("gloo")
    ours, alone, held = run(dist.get_world_size() // 2, 2)
    if dist.get_rank() == 0:
        print(f"each rank holds {held} of {2 * FEATURES * HIDDEN} weights")
        print(f"loss {ours[0]:.4f} -> {ours[-1]:.4f}")
        difference = max(abs(a - b) for a, b in zip(ours, alone, strict=True))
        print(f"largest difference from one process: {difference:.1e}")
    weft.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
