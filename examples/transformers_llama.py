"""A Llama of Hugging Face's transformers, tensor and sequence parallel, its code as it is.

    torchrun --nproc-per-node 2 examples/transformers_llama.py

Activations between the layers are a DTensor, sharded along the sequence. It tells the shape of the
whole, so that the model's own reshaping stays right; the projections gather and scatter.
"""

from __future__ import annotations

import copy
import os

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import weft
from weft.dtensor import Replicate, Shard, init_device_mesh
from weft.dtensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


def plan() -> dict[str, ParallelStyle]:
    into = ColwiseParallel(input_layouts=Shard(1))
    out_of = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    return {
        "model.embed_tokens": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
        ),
        "model.layers.*.*_layernorm": SequenceParallel(),
        "model.layers.*.self_attn.[qkv]_proj": into,
        "model.layers.*.self_attn.o_proj": out_of,
        "model.layers.*.mlp.gate_proj": into,
        "model.layers.*.mlp.up_proj": into,
        "model.layers.*.mlp.down_proj": out_of,
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def main() -> None:
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    torch.manual_seed(0)  # the same weights and data on every rank
    heads = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=256, **heads)
    plain = LlamaForCausalLM(config)
    model = copy.deepcopy(plain)
    parallelize_module(model, init_device_mesh("cpu", (world_size,)), plan())

    models = model, plain
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-4) for m in models]
    for step, batch in enumerate(torch.randint(256, (4, 3, 64))):
        losses = [m(input_ids=batch, labels=batch).loss for m in models]
        for loss, m, optimizer in zip(losses, models, optimizers, strict=True):
            loss.backward()
            torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        difference = abs(losses[0] - losses[1]).item()
        if dist.get_rank() == 0:
            print(
                f"step {step}: loss {losses[0]:.5f}, difference from one process: {difference:.1e}"
            )
    # Whole weights, for save_pretrained(path, state_dict=whole): the plan has all parameters.
    whole = {name: p.full_tensor() for name, p in model.state_dict().items()}
    torch.testing.assert_close(whole, plain.state_dict(), rtol=1e-3, atol=1e-4)
    weft.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
