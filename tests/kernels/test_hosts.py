"""Groups over several hosts: the topology, and the fused matmuls and attention in two levels.

Ranks of one machine pretend to be on several, as far as `Process.host` tells; `test_real_hosts`
has namespaces of their own.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from needs import needs_interpreter
from test_matmul_ops import random_cases, run_cases, tensor
from test_ring_attention import attention_case, plain_case
from test_ring_attention import random_cases as attention_cases
from test_ring_attention import run_cases as run_attention

import weft
from weft.bench.commands import across
from weft.collectives import cost, resolve
from weft.collectives import hosts as crossings
from weft.collectives.hosts import Crossing
from weft.collectives.prices import between_hosts
from weft.collectives.ranks import group as groups
from weft.collectives.ranks import peer_access
from weft.collectives.ranks.group import Process
from weft.kernels.engine import engines

# The host of each rank: two by two, uneven, not in order, one rank on each.
LAYOUTS = ["AABB", "ABBB", "ABAB", "BABA", "ABC"]


# By which the engines of one host pay, and two levels over several.
QUICK = cost.Machine(
    {"torch.float32": 1e5}, 1e4, 5.0, 1e2, 1e3, between=[[1e3] * 4] * 4, between_us=10.0
)


@contextmanager
def on_hosts(layout: str, rates: cost.Machine | None = QUICK, domain: str = "") -> Iterator[None]:
    """This rank is on host `layout[rank]`, inside the block; `rates` of None are measured."""
    here = Process.here()
    name = layout[dist.get_rank()]
    elsewhere = replace(here, host=name, node=f"host {name}", domain=domain)
    weft.close()
    measured = cost.machine
    with (
        patch.object(Process, "here", lambda on_gpus=False: elsewhere),
        patch.object(cost, "machine", lambda *of: rates or measured(*of)),
    ):
        yield
        weft.close()


def cases_body(
    kind: str, layout: str, part_bytes: int, like: str = "host", count: int = 18
) -> list[torch.Tensor]:
    with on_hosts(layout), patch.object(crossings, "_PART_BYTES", part_bytes):
        cases = [case | {"engine": "auto"} for case in random_cases(kind, len(layout), like, count)]
        return run_cases(kind, cases)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["gather", "scatter", "reduce"])
def test_against_float64(ranks: Any, kind: str, layout: str) -> None:
    """Every gradient; in many parts, as tensors of some KiB would have but one."""
    first, *others = ranks(len(layout), cases_body, kind, layout, 256)
    if kind == "reduce":
        assert all(torch.equal(a, b) for o in others for a, b in zip(first, o, strict=True))


def attention_body(layout: str, count: int) -> None:
    with on_hosts(layout):
        run_attention(attention_cases(len(layout), "auto", count))
        case = plain_case("auto", len(layout), causal=True, with_lse=True)
        once, again = attention_case(case), attention_case(case)
        assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
        x = torch.ones(1, 1, 4, 8)
        told = weft.explain(lambda: weft.ring_attention(x, x, x, causal=True))
        assert told[0].engine == "hosts", told


@pytest.mark.parametrize(
    "layout", ["ABC", *(pytest.param(each, marks=pytest.mark.slow) for each in ("ABBA", "AABB"))]
)
def test_attention_against_float64(ranks: Any, layout: str) -> None:
    """A ring of hosts around what each shares: every kind of call, and its gradients."""
    ranks(len(layout), attention_body, layout, 14)


def inside_body(kind: str, engine: str) -> list[torch.Tensor]:
    def chosen(problem: Any, group: Any, device: Any) -> tuple[str, str]:
        return cheapest(problem, group, device) if group.hosts else (engine, "for the test")

    cheapest = engines._cheapest
    with patch.object(engines, "_cheapest", chosen):
        return cases_body(kind, "ABB", 256, "triton", 2)


@needs_interpreter
@pytest.mark.parametrize("engine", ["triton", "generic"])
@pytest.mark.parametrize("kind", ["gather", "scatter", "reduce"])
def test_any_engine_inside_a_host(ranks: Any, kind: str, engine: str) -> None:
    ranks(3, inside_body, kind, engine)


def plan_body(layout: str) -> None:
    with on_hosts(layout):
        rank, group = dist.get_rank(), resolve(None)
        assert group.hosts == tuple(
            tuple(r for r, host in enumerate(layout) if host == each)
            for each in dict.fromkeys(layout)
        )
        rows = [5, 0, 3, 4][: len(layout)]
        x, w = torch.ones(rows[rank], 4), torch.ones(4, 3)
        told = weft.explain(lambda: weft.all_gather_matmul(x, w))
        ours, *inside = [(each.op, each.engine, each.ranks) for each in told]
        here = sum(host == layout[rank] for host in layout)
        assert ours == ("all_gather_matmul", "hosts", len(layout))
        assert set(inside) == {("all_gather_matmul", "host", here)}, inside
        assert "2 hosts, fused inside each" in told[0].why
        with weft.engine("generic"):
            flat = weft.explain(lambda: weft.all_gather_matmul(x, w))
        assert flat[0].engine == "generic"
        with pytest.raises(NotImplementedError, match="several hosts"), weft.engine("host"):
            weft.all_gather_matmul(x, w)


@pytest.mark.parametrize("layout", ["ABBB", "ABAB"])
def test_the_topology_and_both_levels_are_told(ranks: Any, layout: str) -> None:
    ranks(4, plan_body, layout)


def domain_body(layout: str, domains: str) -> None:
    """Machines of one NVLink domain are one host to a group of GPUs, and share no other memory."""
    rank, cpu, cuda = dist.get_rank(), torch.device("cpu"), torch.device("cuda")
    with on_hosts(layout, domain=domains[rank].strip("-")):
        flat = resolve(None).hosts
        weft.close()
        with patch.object(groups, "moves_gpu_tensors", lambda _: True):
            group = resolve(None)
            assert len(flat) == len(set(layout)) and group.apart == (len(set(domains)) == 1)
            if group.apart:
                assert not group.hosts and group.nodes == tuple(
                    f"host {each}" for each in dict.fromkeys(layout)
                )
            else:
                assert group.hosts == ((0, 1, 2), (3,))
                assert group.nodes == ("host A + host B", "host C")
            drawn = str(across._host_findings(group, cpu, [{"processor": "a chip"}] * 4))
            assert ("domain of host A, host B" if group.apart else "host A + host B") in drawn
            inside = crossings.inside_of(group) if group.hosts else group
            assert inside.world_size == 1 or (inside.unreached(cpu) and inside.apart)
            with patch.object(type(group), "on_gpus", lambda self, device: device.type == "cuda"):
                assert not inside.unreached(cuda)
            x = torch.full((2, 3), float(rank))
            whole = torch.arange(4.0).repeat_interleave(2)[:, None].expand(8, 3)
            assert torch.equal(weft.collectives.all_gather(x), whole)
            weft.collectives.barrier()
            y = weft.all_gather_matmul(x, torch.eye(3), sizes=[2] * 4)
            torch.testing.assert_close(y, whole.contiguous())
            if group.apart:
                with pytest.raises(NotImplementedError, match="whose GPUs alone share memory"):
                    weft.collectives.empty((4,), torch.float32, device=cpu)


@pytest.mark.parametrize(("layout", "domains"), [("AABC", "xxx-"), ("AABB", "xxxx")])
def test_an_nvlink_domain_is_one_host(ranks: Any, layout: str, domains: str) -> None:
    ranks(4, domain_body, layout, domains)


@pytest.mark.parametrize(
    ("state", "status", "cluster", "found"),
    [(3, 0, 7, f"{7:02x}" * 16 + ".5"), (2, 0, 7, ""), (3, 1, 7, ""), (3, 0, 0, ""), (0, 0, 7, "")],
)
def test_the_domain_that_a_driver_tells(state: int, status: int, cluster: int, found: str) -> None:
    """A GPU that is registered with its fabric manager has one."""

    def fill(handle: Any, info: Any) -> int:
        at = info._obj
        at.cluster[:], at.status, at.clique, at.state = [cluster] * 16, status, 5, state
        return 0

    driver: Any = SimpleNamespace(nvmlDeviceGetGpuFabricInfo=fill)
    assert peer_access._domain_of(driver, ctypes.c_void_p()) == found
    assert peer_access._domain_of(object(), ctypes.c_void_p()) == ""  # type: ignore[arg-type]


def test_the_domain_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, domain in {"rack 3": "rack 3", "0": "", "": ""}.items():
        monkeypatch.setenv("WEFT_NVLINK", given)
        assert Process.here(on_gpus=True).domain == domain
        assert Process.here().domain == ""
    built = {"12.4": True, "13.0": True, "12.1": False, None: False}
    assert all(peer_access._exchanges_fabric_handles(cuda) == it for cuda, it in built.items())


def gpus_body() -> None:
    """Of GPU tensors, as far as that is decided without one."""
    with on_hosts("AABB"):
        group, cuda = resolve(None), torch.device("cuda")
        with patch.object(type(group), "on_gpus", lambda self, device: device.type == "cuda"):
            for op in "all_gather", "reduce_scatter", "all_reduce", "broadcast":
                assert crossings.offered(op, group)
                assert between_hosts.choice(op, group, cuda, 1 << 20)[0] == "hosts", op
            problem = engines.Problem("all_gather_matmul", 4096, 64, 64, torch.bfloat16, 1 << 20)
            assert set(engines.predict(problem, group, cuda)) == {"hosts", "generic"}


def test_which_calls_of_gpus_run_in_two_levels(ranks: Any) -> None:
    """Fused matmuls do; collectives are NCCL's, which knows the hosts by itself."""
    ranks(4, gpus_body)


def crossing_body(layout: str, rows: Sequence[int]) -> None:
    """What a host takes from the others is each of their rows once, in the order of its blocks."""
    with on_hosts(layout), patch.object(crossings, "_PART_BYTES", 8):
        rank, group = dist.get_rank(), resolve(None)
        whole = torch.arange(sum(rows), dtype=torch.float64)[:, None]
        own = whole.split(list(rows))[rank]
        crossing = Crossing(group, rows, 8, "rows")
        seen, back = torch.zeros_like(whole), None
        for block, shard in crossing.fetched(own):
            block.put(block.of(seen) + 1, seen)
            mine = block.of(whole).split(block.sizes)[crossing.inside.rank]
            assert torch.equal(shard, mine)
            if block is crossing.own:
                back = shard * (layout[rank] == "A")
            else:
                crossing.give_back(block, shard * (layout[rank] == "A"))
        assert torch.equal(seen, torch.ones_like(whole))
        # Of the sums, only host A's count.
        assert back is not None and torch.equal(crossing.summed(back, torch.float64), own)


@pytest.mark.parametrize("rows", [(5, 3, 4, 4), (0, 7, 0, 2), (0, 0, 0, 0), (1, 40, 3, 3)])
@pytest.mark.parametrize("layout", ["AABB", "ABBB", "BAAB", "ABCA"])
def test_rows_cross_once(ranks: Any, layout: str, rows: tuple[int, ...]) -> None:
    ranks(4, crossing_body, layout, rows)


def repeated_body(layout: str) -> list[torch.Tensor]:
    with on_hosts(layout), patch.object(crossings, "_PART_BYTES", 256):
        rank, runs = dist.get_rank(), []
        for _ in range(2):
            x, w, v = (
                tensor(shape, torch.bfloat16, 10 * seed + rank, False).requires_grad_()
                for seed, shape in enumerate([(19, 24), (24, 21), (21, 24)])
            )
            b = torch.zeros(24, dtype=torch.bfloat16, requires_grad=True)
            h = weft.all_gather_matmul(x, w, activation="gelu")
            y = weft.matmul_reduce_scatter(h, v, bias=b, wire_dtype=torch.float16)
            y.backward(tensor((19, 24), torch.bfloat16, 90 + rank, False))
            runs.append([y.detach(), *(leaf.grad for leaf in (x, w, v, b))])
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
        return [runs[0][-1]]  # the gradient of the bias, which is the same on every rank


@pytest.mark.parametrize("layout", ["ABB", "ABA"])
def test_results_are_bitwise_the_same_again(ranks: Any, layout: str) -> None:
    (first,), *others = ranks(3, repeated_body, layout)
    assert all(torch.equal(first, other) for (other,) in others)


def lost_body(op: str) -> None:
    """A rank of another host stays away: the others say so within the bound."""
    with on_hosts("AABB"):
        x, w = torch.ones(4, 4), torch.ones(4, 4)
        calls: dict[str, Callable[[], object]] = {
            "all_gather_matmul": lambda: weft.all_gather_matmul(x, w, sizes=[4] * 4),
            "all_reduce": lambda: weft.collectives.all_reduce(x),
        }
        calls[op]()
        with patch.dict("os.environ", WEFT_TIMEOUT_S="1.5"):
            if dist.get_rank() != 3:  # 2 waits inside its host, the others for both
                with pytest.raises(weft.PeerTimeout) as caught:
                    calls[op]()
                assert caught.value.absent == (3,), caught.value
            store: Any = dist.distributed_c10d._get_default_store()
            store.add("lost", 1)  # none ends before the others have looked who is there
            while store.add("lost", 0) < 4:
                time.sleep(0.02)


@pytest.mark.parametrize(
    "op", [pytest.param("all_gather_matmul", marks=pytest.mark.slow), "all_reduce"]
)
def test_a_rank_that_stays_away_is_named(own_ranks: Any, op: str) -> None:
    own_ranks(4).run(lost_body, op, timeout_s=60)


@pytest.mark.parametrize(
    ("ranks_of", "named"), [((5, 7), (0, 2)), ((4, 5, 6, 7), (0, 1)), ((0, 5), (0, 1))]
)
def test_who_is_named(ranks_of: tuple[int, ...], named: tuple[int, ...]) -> None:
    """Numbers of the ranks of a host become those of the whole group; no other group's do, of which
    an earlier call on a GPU may have failed."""
    group = groups.Group(None, 0, 4, (5, 6, 7, 8), (), hosts=((0, 2), (1, 3)))
    said = patch.object(crossings.Presence, "now", return_value=Mock())
    with said, pytest.raises(weft.PeerTimeout) as caught, crossings.naming(group, "a call"):
        raise weft.PeerTimeout(0, 1, "a part", 3, 1.0, absent=(0, 1), ranks=ranks_of)
    assert caught.value.absent == named
    assert pickle.loads(pickle.dumps(caught.value)).ranks == caught.value.ranks


@pytest.mark.ranks(3)
def test_ranks_of_a_host_have_the_backend_of_their_group() -> None:
    with on_hosts("AAB"):
        own = resolve(dist.new_group(backend="cpu:gloo"))
        for group in own, resolve(None):
            inside = crossings.inside_of(group)
            assert dist.get_backend(inside.pg) == dist.get_backend(group.pg)
            assert crossings.inside_of(group) is inside


def on_real_hosts(
    part: str, *more: str, link: tuple[str, str] = ("-l", "1gbit")
) -> subprocess.CompletedProcess[str]:
    """What two hosts of two ranks say, each in namespaces of its own."""
    script = Path(__file__).parents[1] / "hosts.sh"
    variables = os.environ | {"PYTHON": sys.executable}
    command = [str(script), *link, "-t", "150", "--", str(script.with_name("on_hosts.py"))]
    run = subprocess.run([*command, part, *more], env=variables, capture_output=True, text=True)
    if run.returncode == 77:
        pytest.skip(run.stderr.strip())
    return run


@pytest.mark.slow
def test_a_layer_on_real_hosts() -> None:
    run = on_real_hosts("layer")
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("hosts: ((0, 1), (2, 3))") == run.stdout.count("all is well") == 4


@pytest.mark.slow
def test_experts_on_real_hosts() -> None:
    run = on_real_hosts("experts")
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("at least") == 2 and run.stdout.count("all is well") == 4


@pytest.mark.sweep  # half a minute
def test_a_host_that_is_cut_off_is_named_on_both_sides() -> None:
    run = on_real_hosts("cut")
    found = re.findall(r"PeerTimeout of (\(.*\)) in (\d+) s on (\d)", run.stdout)
    named = {int(rank): peers for peers, _, rank in found}
    assert named == {0: "(2, 3)", 1: "(2, 3)", 2: "(0, 1)", 3: "(0, 1)"}, run.stdout + run.stderr
    # The bound of 5 s, and those in which the absent are found, or the store does not answer.
    assert all(int(s) <= 17 for _, s, _ in found), found


@pytest.mark.slow
def test_a_slow_and_lossy_network() -> None:
    """A layer is right, however long its packets take."""
    run = on_real_hosts("layer", link=("-e", "200 1"))
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("all is well") == 4


@pytest.mark.slow
def test_each_byte_crosses_once() -> None:
    run = on_real_hosts("bytes")
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("at least") == 11


@pytest.mark.slow
def test_training_on_real_hosts(tmp_path: Path) -> None:
    run = on_real_hosts("train", str(tmp_path))
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("all is well") == 4


@pytest.mark.sweep  # half a minute
def test_a_host_that_is_lost_is_named() -> None:
    run = on_real_hosts("lost")
    found = re.findall(r"PeerTimeout of (\(.*\)) in (\d+) s on", run.stdout)
    assert len(found) == 2, run.stderr
    # The bound of 5 s, and the few seconds in which the absent are found.
    assert all(peers == "(2, 3)" and int(s) <= 15 for peers, s in found), found


def ways_body(layout: str) -> None:
    """Gradients are those of the flat process group, however they are asked for."""
    with on_hosts(layout), patch.object(crossings, "_PART_BYTES", 256):
        rank, W, group = dist.get_rank(), len(layout), resolve(None)
        sizes = [3, 5, 2, 6][:W]
        operands = (sizes[rank], 8), (8, 7), (7, 8)
        residual = tensor((4, 8), torch.float64, 60 + rank, False)

        def gradients(engine: weft.settings.Engine, way: str) -> list[torch.Tensor]:
            x, w, v = (
                tensor(shape, torch.float64, 10 * seed + rank, False).requires_grad_()
                for seed, shape in enumerate(operands)
            )
            with weft.engine(engine):
                if way == "compiled":
                    told = group.pg.group_name, 0, sizes, False, False
                    (h,) = torch.ops.weft.all_gather_matmul(x, [w], [], *told)
                    y = torch.ops.weft.matmul_reduce_scatter(h, v, None, group.pg.group_name)
                else:
                    kept = True if way == "kept" else None
                    h = weft.all_gather_matmul(x, w, keep_gathered=kept, sizes=sizes)
                    y = weft.matmul_reduce_scatter(h, v, residual=residual, reduce_op="avg")
                twice = way == "twice"
                made = torch.autograd.grad(y.square().sum(), (x, w, v), create_graph=twice)
                if twice:
                    made = torch.autograd.grad(sum(each.sum() for each in made), (x, w, v))
            return [y.detach(), *made]

        for way in ("kept", "compiled", "twice"):
            for ours, flat in zip(gradients("auto", way), gradients("generic", way), strict=True):
                torch.testing.assert_close(ours, flat, msg=lambda text, way=way: f"{way}: {text}")


@pytest.mark.parametrize("layout", ["AABB", "BABA"])
def test_gradients_however_asked_for(ranks: Any, layout: str) -> None:
    ranks(4, ways_body, layout)
