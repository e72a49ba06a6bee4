"""The examples give what one process gives."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import runpy
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dtensors import world
from rank_pool import RankPool
from torch import nn
from torch.distributed.fsdp import fully_shard

import weft
from weft.dtensor import init_device_mesh
from weft.kernels import to_zigzag

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
FRAMEWORKS = re.findall(
    r"```python[^\n]*\n(.*?)```", (ROOT / "docs/frameworks.md").read_text(), re.DOTALL
)


def example(name: str) -> Any:
    path = EXAMPLES / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.mark.ranks(2, 4)
def test_data_parallel() -> None:
    module = example("data_parallel")
    mesh = world()
    ours, alone = module.train(module.make(), mesh), module.train(module.make(), None)
    torch.testing.assert_close(ours, alone, rtol=1e-5, atol=1e-6)
    assert ours[-1] < ours[0]


def fully_sharded(dp: int, tp: int) -> int:
    ours, alone, held = example("fully_sharded").run(dp, tp)
    torch.testing.assert_close(ours, alone, rtol=1e-5, atol=1e-6)
    assert ours[-1] < ours[0]
    return int(held)


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (2, 2), (4, 1)])
def test_fully_sharded(ranks: Any, dp: int, tp: int) -> None:
    held = ranks(dp * tp, fully_sharded, dp, tp)
    assert sum(held) == 2 * 8 * 32  # no weight is anywhere twice


@pytest.mark.ranks(2, 3)
def test_long_context() -> None:
    losses = example("long_context").train(seq_len=90, steps=3)
    for ours, one_process in losses:
        assert abs(ours - one_process) < 1e-4
    assert losses[-1][0] < losses[0][0]


def serve_llama(by_head: bool, kv_heads: int, draft: int) -> int:
    told: list[str] = []
    ours, alone = example("serve_llama").run(
        by_head, kv_heads, draft, [5, 14, 2], new=40, pages=18 if by_head else 9, tell=told.append
    )
    assert ours == alone and [len(text) for text in ours] == [45, 54, 42]
    assert "begins, 1 under way" in told[0] and told[-1].startswith("120 tokens in")
    return int(told[-1].split()[3])


@pytest.mark.parametrize(
    ("by_head", "kv_heads", "draft"),
    [
        (True, 2, 3),
        pytest.param(True, 1, 0, marks=pytest.mark.slow),
        pytest.param(False, 2, 0, marks=pytest.mark.slow),
        (False, 1, 3),
    ],
)
def test_serve_llama(ranks: Any, by_head: bool, kv_heads: int, draft: int) -> None:
    steps, other = ranks(2, serve_llama, by_head, kv_heads, draft)
    assert steps == other
    assert steps < 117 if draft else steps == 117  # of three requests, after their first tokens


@pytest.mark.ranks(2, 3)
def test_mixtral() -> None:
    ours, alone, apart = example("mixtral").run(steps=5)
    torch.testing.assert_close(ours, alone, rtol=1e-5, atol=1e-6)
    assert ours[-1] < ours[0] and apart < 1e-4


@pytest.mark.ranks(2)
def test_mixtral_with_a_part_of_each_expert() -> None:
    ours, alone, _ = example("mixtral").run(steps=3, tensor_parallel_size=2)
    torch.testing.assert_close(ours, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(2)
def test_own_kernel() -> None:
    example("own_kernel").check(dist.get_rank())


def scripts(ports: dict[str, int]) -> dict[str, str]:
    """What scripts print where torchrun has set the environment: the port of each is its own."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    told = {}
    for name, port in ports.items():
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        told[name] = printed.getvalue()
    return told


def test_scripts_for_torchrun(own_ranks: Callable[[int], RankPool]) -> None:
    ports = {}
    for name in ("tensor_parallel_mlp", "drop_in_linear"):
        with socket.create_server(("localhost", 0)) as free:
            ports[name] = free.getsockname()[1]
    first, second = own_ranks(2).run(scripts, ports, timeout_s=60)
    assert set(second.values()) == {""}
    for told in first.values():
        (difference,) = re.findall(r"difference from one process: (\S+)", told)
        assert float(difference) < 1e-5


class GatedLayer(nn.Module):
    """What the first snippet of docs/frameworks.md makes parallel."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate_up, self.down = nn.RMSNorm(32), nn.Linear(32, 140), nn.Linear(70, 32)

    def forward(self, x: torch.Tensor) -> Any:
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up)


@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "dp"), [(2, 1), (4, 2)])
def test_plain_layers_of_frameworks(world_size: int, dp: int) -> None:
    """On `dp` groups of ranks that share a block, each with its part of the batch."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dp, world_size // dp), mesh_dim_names=("dp", "tp"))
    tp = None if dp == 1 else mesh["tp"]
    names: dict[str, Any] = {}
    exec(FRAMEWORKS[0], names)
    whole, block = GatedLayer(), GatedLayer()
    block.load_state_dict(whole.state_dict())
    names["make_parallel"](block, tp)
    model = block
    if dp > 1:
        model = nn.parallel.DistributedDataParallel(block, process_group=mesh.get_group("dp"))
    x = torch.randn(12, 32)
    for _ in range(2):  # gradients add up
        (whole(x).square().sum() / dp).backward()
        model(x.chunk(world_size)[rank]).square().sum().backward()
    norm = names["clip_grad_norm_"](block, 1.0, tp)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(whole.parameters(), 1.0))
    torch.testing.assert_close(block.norm.weight.grad, whole.norm.weight.grad)


@pytest.mark.ranks(4)
def test_plain_layers_under_fully_shard() -> None:
    """As docs/frameworks.md says: hooks are lost, and sums of gradients come after backward."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    names: dict[str, Any] = {}
    exec(FRAMEWORKS[0], names)
    whole, block = GatedLayer(), GatedLayer()
    block.load_state_dict(whole.state_dict())
    names["make_parallel"](block, mesh["tp"])
    x = torch.randn(12, 32)
    expected = weft.RowParallelLinear.from_linear(whole.down, mesh["tp"], sequence_dim=0)
    fully_shard(block, mesh=mesh["dp"])
    for _ in range(2):
        (whole(x).square().sum() / 2).backward()
        block(x.chunk(4)[dist.get_rank()]).square().sum().backward()
    for parameter in block.norm.parameters():
        own = parameter.grad.to_local()
        own.copy_(weft.collectives.all_reduce(own, mesh["tp"]))
    torch.testing.assert_close(block.norm.weight.grad.full_tensor(), whole.norm.weight.grad)
    mine = expected.part("weight", whole.down.weight.grad)
    torch.testing.assert_close(block.down.weight.grad.full_tensor(), mine)


# The snippets on transformers, and what they must give.
_AROUND = """
import copy, os, sys, torch, torch.distributed as dist, weft
from transformers import LlamaConfig, LlamaForCausalLM

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
whole = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2))
ids, every = torch.randint(64, (2, 12)), torch.arange(12).unsqueeze(0)
expected = whole(input_ids=ids).logits
model = copy.deepcopy(whole)
{plan}
got = model(input_ids=ids).logits
torch.testing.assert_close(got, expected)
got.square().sum().backward()
expected.square().sum().backward()
for parameter, other in zip(model.parameters(), whole.parameters()):
    grad = getattr(parameter.grad, "full_tensor", lambda: parameter.grad)()
    torch.testing.assert_close(grad, other.grad, rtol=1e-3, atol=1e-4)
model = copy.deepcopy(whole)
tokens, positions = (x.chunk(world_size, 1)[rank] for x in (ids, every))
{attention}
torch.testing.assert_close(logits, expected.chunk(world_size, 1)[rank])
dist.destroy_process_group()
"""


# Models of transformers with the experts of docs/experts.md, each rank with its own sequences.
_EXPERTS = """
import copy, torch, torch.distributed as dist, weft
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, MixtralConfig, MixtralForCausalLM

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
heads = dict(num_attention_heads=4, num_key_value_heads=4, num_experts_per_tok=2)
groups = dict(n_routed_experts=8, n_group=2, topk_group=1, n_shared_experts=1)
latent = dict(q_lora_rank=16, kv_lora_rank=8, qk_rope_head_dim=8, v_head_dim=8, qk_nope_head_dim=8)
torch.manual_seed(0)
for whole in (
    MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=5)),
    DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **heads, **groups, **latent,
        moe_intermediate_size=24, first_k_dense_replace=1)),
):
    model = copy.deepcopy(whole)
    {replace}
    ids = torch.randint(64, (4, 12))
    own = ids.chunk(world_size)[rank]
    expected, got = whole(input_ids=ids, labels=ids), model(input_ids=own, labels=own)
    torch.testing.assert_close(got.logits, expected.logits.chunk(world_size)[rank])
    (got.loss / world_size).backward()
    expected.loss.backward()
    cut = {{getattr(m, name) for m in model.modules() for name in getattr(m, "cut", ())}}
    for parameter in model.parameters():
        if parameter not in cut:
            dist.all_reduce(parameter.grad)
    for each in (model, whole):
        torch.optim.SGD(each.parameters(), lr=1.0).step()
    torch.testing.assert_close(model.state_dict(), whole.state_dict(), rtol=1e-4, atol=1e-5)
dist.destroy_process_group()
"""


# The same models by their own plans.
_EXPERT_PLANS = """
import copy, torch, torch.distributed as dist
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, MixtralConfig, MixtralForCausalLM
from weft.dtensor import DTensor, Replicate, init_device_mesh
from weft.dtensor.parallel import ExpertParallel, parallelize_module

dist.init_process_group("gloo")
mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
heads = dict(num_attention_heads=4, num_key_value_heads=4, num_experts_per_tok=2)
groups = dict(n_routed_experts=8, n_group=2, topk_group=1, n_shared_experts=1)
latent = dict(q_lora_rank=16, kv_lora_rank=8, qk_rope_head_dim=8, v_head_dim=8, qk_nope_head_dim=8)


def check(whole, own_tokens):
    model = copy.deepcopy(whole)
    {plan}
    ids = torch.randint(64, (4, 12))
    own = ids.chunk(2)[rank] if own_tokens else ids
    expected, got = whole(input_ids=ids, labels=ids), model(input_ids=own, labels=own)
    wanted = expected.logits.chunk(2)[rank] if own_tokens else expected.logits
    torch.testing.assert_close(got.logits, wanted)
    (got.loss / 2 if own_tokens else got.loss).backward()
    expected.loss.backward()
    cut = 0
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        if isinstance(ours, DTensor):
            cut += 1
            grad = ours.grad.full_tensor()
        else:
            grad = ours.grad
            if own_tokens:
                dist.all_reduce(grad)
        wanted = torch.zeros_like(grad) if theirs.grad is None else theirs.grad
        torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-5)
    assert cut >= 2


for seed, own_tokens in enumerate((True, False)):
    torch.manual_seed(seed)
    check(MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=5)), own_tokens)
    config = DeepseekV3Config(
        **sizes, **heads, **groups, **latent, moe_intermediate_size=24, first_k_dense_replace=1
    )
    check(DeepseekV3ForCausalLM(config), own_tokens)
dist.destroy_process_group()
"""


def with_transformers(script: Path, tmp_path: Path) -> str:
    """What a script prints on two ranks."""
    pytest.importorskip("transformers", reason="needs transformers, which weft does not depend on")
    # transformers looks for a package `kernels`: the checkout must not be on the path.
    (tmp_path / "path").mkdir(exist_ok=True)
    if not (tmp_path / "path/weft").exists():
        (tmp_path / "path/weft").symlink_to(ROOT / "weft")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run = subprocess.run(
        [*command, "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "path"), "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_transformers(tmp_path: Path) -> None:
    script = tmp_path / "snippets.py"
    script.write_text(_AROUND.format(plan=FRAMEWORKS[1], attention=FRAMEWORKS[2]))
    with_transformers(script, tmp_path)
    told = with_transformers(EXAMPLES / "transformers_llama.py", tmp_path)
    differences = re.findall(r"difference from one process: (\S+)", told)
    assert len(differences) == 4 and max(map(float, differences)) < 1e-4


def test_experts_of_transformers(tmp_path: Path) -> None:
    (replace,) = re.findall(
        r"```python no-run: needs transformers[^\n]*\n(.*?)```",
        (ROOT / "docs/experts.md").read_text(),
        re.DOTALL,
    )
    script = tmp_path / "experts.py"
    script.write_text(_EXPERTS.format(replace=textwrap.indent(replace, " " * 4).strip()))
    with_transformers(script, tmp_path)


def test_expert_plans_of_transformers(tmp_path: Path) -> None:
    (plan,) = re.findall(
        r"```python no-run: of a model of transformers[^\n]*\n(.*?)```",
        (ROOT / "docs/experts.md").read_text(),
        re.DOTALL,
    )
    first = "plan = model.config.base_model_ep_plan"
    assert first in plan
    plan = plan.replace(first, f"{first} if own_tokens else model.config.base_model_tp_plan")
    script = tmp_path / "plans.py"
    script.write_text(_EXPERT_PLANS.format(plan=textwrap.indent(plan, " " * 4).strip()))
    with_transformers(script, tmp_path)


@pytest.mark.ranks(2)
def test_attention_of_torchtitan() -> None:
    mesh, module = world(), nn.Module()
    names: dict[str, Any] = {"weft": weft}
    exec(FRAMEWORKS[3], names)
    names["apply_cp_to_attention_module"]([module], mesh, "sdpa")
    q, k, v = (torch.randn(1, heads, 8, 4) for heads in (4, 2, 2))
    expected = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    parts = [
        to_zigzag(x, mesh.size(), 2).chunk(mesh.size(), 2)[dist.get_rank()]
        for x in (q, k, v, expected)
    ]
    torch.testing.assert_close(module(*parts[:3], enable_gqa=True), parts[3])
