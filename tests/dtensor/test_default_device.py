"""A default device that the caller has set, a GPU say, changes nothing: ops go by their operands.

Here it is "meta": a tensor made without saying where has no memory, and the op fails.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import weft
from weft import collectives
from weft.dtensor import DTensor, Partial, Shard, init_device_mesh


@pytest.mark.ranks(2)
def test_ops_make_their_tensors_where_their_operands_are() -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (W,))
    rows, keys = torch.randn(6, 8, requires_grad=True), torch.randn(1, 2, 4, 8, requires_grad=True)
    w, lengths, documents = torch.randn(8, 8), torch.tensor([7]), [0, 3, 4 * W]
    with torch.device("meta"):
        assert collectives.all_gather(rows[:rank]).device.type == "cpu"
        collectives.all_to_all(rows.repeat(W, 1), [6] * W, [6] * W)
        collectives.all_reduce(rows.new_ones(1 << 17))
        for engine in ("host", "generic"):
            with weft.engine(engine):
                x = weft.all_gather_matmul(rows, w)
                y = weft.matmul_all_reduce(weft.matmul_reduce_scatter(x, w), w)
                out = weft.ring_attention(keys, keys, keys, causal=True, cu_seqlens=documents)
                (y.sum() + out.sum() + weft.ulysses_attention(keys, keys, keys).sum()).backward()
        with weft.engine("triton"), torch.no_grad():
            weft.matmul_reduce_scatter(weft.all_gather_matmul(rows, w), w)
            weft.ring_attention(keys, keys, keys, causal=True, cu_seqlens=documents)
            weft.flash_decode(keys[:, :, :1], keys, keys, lengths)
        whole = DTensor.from_local(w, mesh, [Partial()], run_check=False)
        for engine in ("host", "triton"):
            with weft.engine(engine):
                whole.redistribute(placements=[Shard(1)])
