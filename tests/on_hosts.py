"""What ranks on real hosts run, under `tests/hosts.sh`: one part, named by the first argument.

layer    a training step of two fused matmuls, beside the flat process group's
bytes    what the collectives send between hosts, against the least that they could
train    FOLDER: a model by TP inside x FSDP2 across, and by TP over all, as in one process; saved
         there and loaded
lost     all ranks of the last host are killed: the others must say so within the bound
cut      the last host's link goes down: ranks on both sides must say so within the bound
experts  two layers of experts beside the flat process group's, and what a host sends in one
mlp      RUNS TOKENSxHIDDENxFFN ..: rows of docs/hosts.md's table: times of `auto` and of the flat
         process group, in turn, forward and backward of a ReLU MLP in fp32, and what a host sends
"""

from __future__ import annotations

import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

import weft
from weft.collectives import resolve
from weft.collectives.prices import between_hosts
from weft.dtensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    checkpoint,
    distribute_tensor,
    init_device_mesh,
)


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


def train() -> None:
    sys.path.append(str(Path(__file__).parent / "dtensor"))
    from test_fully_shard import trained, whole

    for shape in (2, 2), (1, 4):
        found = trained(shape)
        found.steps(2)
        found.check()
        state = {name: each.detach() for name, each in found.model.named_parameters()}
        before = {name: whole(each).clone() for name, each in state.items()}
        checkpoint.save(state, Path(sys.argv[2]))
        for each in state.values():
            each.zero_()
        checkpoint.load(state, Path(sys.argv[2]))
        assert all(torch.equal(whole(each), before[name]) for name, each in state.items())


def lost() -> None:
    step("auto")
    if dist.get_rank() in resolve(None).hosts[-1]:
        os.kill(os.getpid(), signal.SIGKILL)
    say_who_is_absent()


def cut() -> None:
    step("auto")
    if dist.get_rank() == resolve(None).hosts[-1][0]:
        subprocess.run(["ip", "link", "set", "net", "down"], check=True)
    say_who_is_absent()


def say_who_is_absent() -> None:
    os.environ["WEFT_TIMEOUT_S"] = "5"
    start = time.monotonic()
    try:
        step("auto")
    except weft.WeftError as error:
        absent = error.absent if isinstance(error, weft.PeerTimeout) else error
        rank, kind = dist.get_rank(), type(error).__name__
        print(f"{kind} of {absent} in {time.monotonic() - start:.0f} s on {rank}", flush=True)
        time.sleep(8)  # torchrun ends the other rank of the host when one fails
        os._exit(1)


def sent_mib() -> float:
    """What this host has sent so far."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (link,) = (line for line in lines if line.split(":")[0].strip() == "net")
    return int(link.split(":")[1].split()[8]) / 2**20


@patch.object(between_hosts, "flat_move_us", lambda *_: math.inf)  # whatever a busy machine is told
def bytes_sent() -> None:
    """Of 2 x 2 ranks: x is 4 MiB on each, or in all of them together where it is gathered."""
    x, quarter, q = torch.ones(4, 1 << 18), torch.ones(1, 1 << 18), torch.ones(1, 1, 1024, 64)
    mesh = init_device_mesh("cpu", (4,))
    sharded = distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None)
    terms = DTensor.from_local(x, mesh, [Partial()])
    grid, R = init_device_mesh("cpu", (2, 2)), Replicate()
    rows = distribute_tensor(x, grid, [Shard(0), R], src_data_rank=None)
    # What a host must send, in MiB: what the other lacks, and its sums of the other's part. The
    # first one's queries see none of the other's keys.
    calls: dict[str, tuple[float, Callable[[], object]]] = {
        "all_gather": (2, lambda: weft.collectives.all_gather(quarter, sizes=[1] * 4)),
        "reduce_scatter": (2, lambda: weft.collectives.reduce_scatter(x)),
        "all_reduce": (4, lambda: weft.collectives.all_reduce(x)),
        "all_to_all": (4, lambda: weft.collectives.all_to_all(x)),
        "broadcast": (4, lambda: weft.collectives.broadcast(x)),
        "causal attention": (
            1,
            lambda: weft.ring_attention(q, q, q, causal=True, sizes=[1024] * 4),
        ),
        "Shard -> Replicate": (2, lambda: sharded.redistribute(placements=[Replicate()])),
        "Partial -> Shard": (2, lambda: terms.redistribute(placements=[Shard(0)])),
        "Partial -> Replicate": (4, lambda: terms.redistribute(placements=[Replicate()])),
        "Shard, Replicate -> both": (2, lambda: rows.redistribute(placements=[R, R])),
        "and later": (2, lambda: rows.redistribute(placements=[R, R], async_op=True).to_local()),
    }
    for name, (least, call) in calls.items():
        sent = []
        for _ in range(4):
            dist.barrier()
            before = sent_mib()
            dist.barrier()  # or others would have begun
            call()
            dist.barrier()
            sent.append(sent_mib() - before)
        if dist.get_rank() == 0:  # where broadcast is from
            print(f"{name}: {min(sent):.2f} MiB, {least} at least", flush=True)
            # Frames have heads, those who receive answer, and now and then TCP sends again.
            assert min(sent) < 1.06 * least + 0.1, name


def experts() -> None:
    """Tokens of 16 KiB, each with 4 experts on the other host and 4 on its own."""
    rank, T, k, K = dist.get_rank(), 64, 8, 4096
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(T, K, generator=generator).requires_grad_()
    w, v = (torch.randn(4, *s, generator=generator).requires_grad_() for s in ((K, 8), (8, K)))
    ids = torch.arange(16).repeat(T, 1)[:, ::2]
    made: dict[str, list[list[torch.Tensor]]] = {"auto": [], "generic": []}
    for engine, results in made.items():
        sent = []
        for _ in range(3):
            with weft.engine(engine):  # type: ignore[arg-type]
                routing = weft.kernels.route(ids, 16)
                dist.barrier()
                before = sent_mib()
                dist.barrier()  # or others would have begun
                h, _ = weft.dispatch_grouped_matmul(x, routing, w, activation="silu")
                y = weft.grouped_matmul_combine(h, v, None, routing)
                dist.barrier()
                sent.append(sent_mib() - before)
                grads = torch.autograd.grad(y.square().sum(), (x, w, v))
            results.append([y.detach(), *grads])
        # A host's 2 x 64 tokens, there and back.
        least = 2 * 2 * T * K * 4 / 2**20 * (1 if engine == "auto" else k / 2)
        if rank == 0:
            print(f"{engine}: {min(sent):.2f} MiB, {least:g} at least", flush=True)
        assert min(sent) < 1.06 * least + 0.1
        assert all(map(torch.equal, results[-2], results[-1]))
    for ours, flat in zip(made["auto"][-1], made["generic"][-1], strict=True):
        torch.testing.assert_close(ours, flat, rtol=0, atol=1e-5 * float(flat.abs().max()))


def mlp() -> None:
    print_row("tokens x hidden x ffn", "auto", "flat", "flat / auto", "MiB sent", "flat", "engines")
    for shape in sys.argv[3:]:
        mlp_row(int(sys.argv[2]), *map(int, shape.split("x")))


def print_row(*cells: str) -> None:
    if dist.get_rank() == 0:
        print(f"| {' | '.join(cells)} |", flush=True)


def mlp_row(runs: int, tokens: int, hidden: int, ffn: int) -> None:
    W = dist.get_world_size()
    shapes = (tokens // W, hidden), (hidden, ffn // W), (ffn // W, hidden)
    x, w, v = (torch.randn(shape).requires_grad_() for shape in shapes)
    dy, times = torch.randn(tokens // W, hidden), dict[str, list[float]]()
    sent: dict[str, float] = {}

    def step(engine: weft.settings.Engine) -> None:
        with weft.engine(engine):
            h = weft.all_gather_matmul(x, w, activation="relu", sizes=[tokens // W] * W)
            weft.matmul_reduce_scatter(h, v).backward(dy)

    told = weft.explain(step, "auto")
    chosen = {each.op: each.engine for each in told if each.ranks == W and "matmul" in each.op}
    engines: list[weft.settings.Engine] = ["auto", "generic"]
    for run in range(runs + 1):  # the first one is not counted
        for engine in engines[:: -1 if run % 2 else 1]:
            dist.barrier()
            start, before = time.perf_counter(), sent_mib()
            step(engine)
            dist.barrier()
            if run:
                times.setdefault(engine, []).append(1e3 * (time.perf_counter() - start))
                sent[engine] = sent_mib() - before
    ours, flat = (statistics.median(times[engine]) for engine in engines)
    mib = [f"{sent[engine]:.1f}" for engine in engines]
    ways = ", ".join(dict.fromkeys(chosen.values()))
    print_row(
        f"{tokens}x{hidden}x{ffn}", f"{ours:.3g}", f"{flat:.3g}", f"{flat / ours:.2f}", *mib, ways
    )


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    print(f"hosts: {resolve(None).hosts}", flush=True)
    parts = {
        "layer": layer, "train": train, "lost": lost, "cut": cut, "mlp": mlp, "bytes": bytes_sent,
        "experts": experts,
    }  # fmt: skip
    always = patch.object(
        between_hosts, "_in_one_level", lambda *_: between_hosts.Line(math.inf, 0.0)
    )
    with nullcontext() if sys.argv[1] == "mlp" else always:
        parts[sys.argv[1]]()
    dist.barrier()
    dist.destroy_process_group()
    print("all is well", flush=True)


if __name__ == "__main__":
    main()
