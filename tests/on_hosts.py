"""What ranks on real hosts run, under `tests/hosts.sh`: one part, named by the first argument.

layer    a training step of two fused matmuls, beside the flat process group's
lost     all ranks of the last host are killed: the others must say so within the bound
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import weft
from weft.collectives import resolve


def step(engine: weft.settings.Engine) -> list[torch.Tensor]:
    """The result and gradients of a column- and a row-parallel matmul."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    shapes = (40, 64), (64, 48), (48, 64)
    x, w, v = (torch.randn(s, generator=generator).requires_grad_() for s in shapes)
    with weft.engine(engine):
        y = weft.matmul_reduce_scatter(weft.all_gather_matmul(x, w, activation="silu"), v)
        y.square().sum().backward()
    return [y.detach(), *(leaf.grad for leaf in (x, w, v) if leaf.grad is not None)]


def layer() -> None:
    for ours, flat in zip(step("auto"), step("generic"), strict=True):
        # fp32 sums of some hundred terms, in two orders.
        torch.testing.assert_close(ours, flat, rtol=0, atol=2e-6 * float(flat.abs().max()))
    for once, again in zip(step("auto"), step("auto"), strict=True):
        assert torch.equal(once, again)


def lost() -> None:
    step("auto")
    if dist.get_rank() in resolve(None).hosts[-1]:
        os.kill(os.getpid(), signal.SIGKILL)
    os.environ["WEFT_TIMEOUT_S"] = "5"
    start = time.monotonic()
    try:
        step("auto")
    except weft.PeerTimeout as error:
        print(f"PeerTimeout of {error.peer} in {time.monotonic() - start:.0f} s", flush=True)
        time.sleep(5)  # torchrun ends the other rank of the host when one fails
        os._exit(1)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    print(f"hosts: {resolve(None).hosts}", flush=True)
    {"layer": layer, "lost": lost}[sys.argv[1]]()
    dist.barrier()
    dist.destroy_process_group()
    print("all is well", flush=True)


if __name__ == "__main__":
    main()
