"""A fused kernel of one's own, from its protocol to its benchmark, for docs/own_kernels.md.

Reduce-scatter, residual and RMSNorm in one launch. W ranks; x (M, D) are each rank's partial sums
of all rows, rank r has the M / W rows from r * M / W on of residual and y:

    rank s: rows of r in x --> slot s of r     r: residual += x + slots, in rank order
                                               r: y = residual / rms(residual) * weight

Protocol, in each program p of P; it has the blocks b of every rank's rows for which b % P == p.
  1. Store blocks of x in slot `rank` of each peer; signal that peer's word (0, rank, p).
  2. Wait for the words (0, r, p) of all peers; add up, normalize.
  3. The last program to end sets GENERATION.
Calls use the halves of the workspace in turn, so that none overwrites what a slow peer still reads:
rules 1 and 2 of `weft.collectives.signals` hold.

On real ranks, beside the oracle: torchrun --nproc-per-node 2 examples/own_kernel.py
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch.nn.functional import rms_norm

from weft import collectives, sim  # before triton: kernels are interpreted where no GPU is
from weft.bench import bounds
from weft.bench.problem import INPUTS, Options, Prepared, Spec
from weft.bench.shapes import sized
from weft.collectives import signals
from weft.kernels.engine.chips import chip_of

import triton  # isort: skip
import triton.language as tl  # isort: skip

EPS = 1e-6


@triton.jit(do_not_specialize=["rank"])
def _scatter_norm_kernel(
    y_ptr,  # (M / W, D)
    residual_ptr,  # (M / W, D), in and out
    x_ptr,  # (M, D)
    weight_ptr,  # (D,)
    buffer_ptrs,  # halves of W slots (M / W, D) fp32 on each rank
    signal_ptrs,
    half_bytes,
    timeout_ns,
    rank,
    rows,  # M / W
    eps,
    D: tl.constexpr,  # a power of two
    WORLD_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> None:
    """residual += sum of x over ranks; y = its RMSNorm. Grid: any, but the same on all ranks.

    Example: 2 ranks with x = [[3, 4]] * 2, residual 0: 6, 8 on both, and y = 0.85, 1.13.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    generation = signals.begin_call(signal_ptrs, rank)
    block, columns = tl.arange(0, BLOCK_M), tl.arange(0, D)
    size = tl.cast(rows, tl.int64) * D  # of a slot
    for step in range(1, WORLD_SIZE):
        peer = (rank + step) % WORLD_SIZE
        slot = signals.half_ptr(buffer_ptrs, peer, generation, half_bytes, tl.float32) + rank * size
        for first in range(program * BLOCK_M, rows, programs * BLOCK_M):
            offs = (first + block)[:, None] * D + columns[None, :]
            inside = (first + block < rows)[:, None]
            x = tl.load(x_ptr + peer * size + offs, mask=inside)
            tl.store(slot + offs, x.to(tl.float32), mask=inside)
        word = signals.slot_ptr(signal_ptrs, peer, WORLD_SIZE, 0, rank, program)
        signals.signal(word, generation)
    slots = signals.half_ptr(buffer_ptrs, rank, generation, half_bytes, tl.float32)
    weight = tl.load(weight_ptr + columns).to(tl.float32)
    if signals.wait_for_peers(signal_ptrs, rank, WORLD_SIZE, 0, program, generation, timeout_ns):
        for first in range(program * BLOCK_M, rows, programs * BLOCK_M):
            offs = (first + block)[:, None] * D + columns[None, :]
            inside = (first + block < rows)[:, None]
            total = tl.load(residual_ptr + offs, mask=inside, other=0.0).to(tl.float32)
            for source in range(WORLD_SIZE):
                if source == rank:
                    part = tl.load(x_ptr + rank * size + offs, mask=inside, other=0.0)
                    total += part.to(tl.float32)
                else:
                    total += tl.load(slots + source * size + offs, mask=inside, other=0.0)
            tl.store(residual_ptr + offs, total, mask=inside)
            scale = tl.rsqrt(tl.sum(total * total, axis=1) / D + eps)
            tl.store(y_ptr + offs, total * scale[:, None] * weight[None, :], mask=inside)
    if signals.end_call(signal_ptrs, rank, generation):  # a peer did not come
        signals.spoil(y_ptr, size)
        signals.spoil(residual_ptr, size)


def scatter_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    *,
    programs: int | None = None,
    block_m: int = 2,
) -> torch.Tensor:
    """RMSNorm of residual (M / W, D), to which this rank's rows of the sum of x (M, D) are added.

    Args:
        programs: grid, the same on all ranks, 256 at most; by default as many as the GPU, or this
            rank's share of it, runs at once.

    Raises:
        PeerTimeout: a peer did not make the same call in time.
    """
    rows, D = residual.shape
    world_size = collectives.resolve(None).world_size
    nbytes = world_size * rows * D * 4
    ws = collectives.workspace(nbytes=nbytes, channel="scatter norm", device=x.device)
    ws.check("scatter_norm")
    y = torch.empty_like(residual)
    _scatter_norm_kernel[(programs or chip_of(x.device).programs,)](
        y, residual, x, weight, ws.buffer_ptrs, ws.signal_ptrs, ws.half_bytes, ws.timeout_ns,
        ws.rank, rows, EPS, D=D, WORLD_SIZE=world_size, BLOCK_M=block_m,
    )  # fmt: skip
    ws.launched("scatter_norm")
    return y


def inputs(call: int, M: int, D: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """The x of every rank, the whole residual, and weight; the same on all ranks."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(call)
    parts = collectives.resolve(None).world_size
    xs = [torch.randn(M, D, generator=generator) for _ in range(parts)]
    return xs, torch.randn(M, D, generator=generator), torch.randn(D, generator=generator)


def reference(
    xs: list[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor, rank: int
) -> torch.Tensor:
    """y of `rank`, in fp64, of the whole residual."""
    total = torch.stack(xs).double().sum(0) + residual.double()
    y = rms_norm(total, weight.shape, weight.double(), EPS)
    return y.chunk(len(xs))[rank]


def check(rank: int) -> None:
    """Three calls in a row beside the oracle: the third uses the first one's half again."""
    for call in range(3):
        xs, residual, weight = inputs(call, M=6 * collectives.resolve(None).world_size, D=16)
        mine = residual.chunk(len(xs))[rank].clone()
        y = scatter_norm(xs[rank], mine, weight)
        torch.testing.assert_close(y, reference(xs, residual, weight, rank).float())


def layer(rank: int, M: int = 512, D: int = 8192) -> torch.Tensor:
    """The call of a 70B Llama's layer, for virtual time."""
    with sim.untimed():
        x = torch.empty(M, D, dtype=torch.bfloat16)
        residual = x[: M // collectives.resolve(None).world_size].clone()
        weight = x[0].clone()
    return scatter_norm(x, residual, weight, programs=132, block_m=1)


# From here on: `weft bench examples/own_kernel.py`.
NAME = "own_kernel"
WORLD: Literal["ranks", "one"] = "ranks"


def cases(options: Options) -> list[Spec]:
    """A case a shape M,D."""
    shapes = [sized(entry, ("M", "D"), NAME) for entry in options.shapes or ((16, 64), (64, 64))]
    return [Spec(f"scatter_norm {M}x{D}", {"M": M, "D": D}) for M, D in shapes]


def prepare(spec: Spec, options: Options) -> Prepared:
    """The kernel, beside a collective and torch, on three sets of inputs in turn."""
    group, device = collectives.resolve(None), torch.device(options.device)
    sets = [inputs(number, spec.params["M"], spec.params["D"]) for number in range(INPUTS)]
    xs = [x[group.rank].to(device) for x, _, _ in sets]
    residuals = [whole.chunk(group.world_size)[group.rank].to(device) for _, whole, _ in sets]
    weights = [weight.to(device) for _, _, weight in sets]

    def unfused(number: int) -> torch.Tensor:
        residual, part = residuals[number].clone(), torch.empty_like(residuals[number])
        dist.reduce_scatter_tensor(part, xs[number])
        weight = weights[number]
        return rms_norm(residual.add_(part), weight.shape, weight, EPS)

    def fused(number: int) -> torch.Tensor:
        return scatter_norm(xs[number], residuals[number].clone(), weights[number])

    rows_bytes = residuals[0].nbytes
    return Prepared(
        {"fused": fused, "reduce-scatter, norm": unfused},
        {
            "memory": bounds.touching(xs[0].nbytes + 3 * rows_bytes, device),
            "link": bounds.read_from_peers((group.world_size - 1) * rows_bytes, group, device),
        },
        expected=lambda: reference(*sets[0], group.rank).to(device),
        main="fused",
        peer="reduce-scatter, norm",
    )


def main() -> None:
    """On the ranks of torchrun."""
    dist.init_process_group("gloo")
    check(dist.get_rank())
    print(f"rank {dist.get_rank()}: right")
    collectives.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
