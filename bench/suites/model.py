"""The demo's training step: a small Llama, tensor and sequence parallel, with AdamW.

Variants: the plan of `weft demo` with weft's DTensor, and the same plan with torch's. The bound,
"arithmetic", is the step of one process with a rank's share of the sequences: as many
multiplications, no communication.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist

from weft.bench.blocks.tensor_parallel import mesh_of_ranks
from weft.bench.problem import Call, Options, Prepared, Spec, arrived
from weft.demo.data import standard_library
from weft.demo.model import Llama, LlamaShape, parallelize

NAME = "model"
WORLD: Literal["ranks", "one"] = "ranks"

_MAIN, _PEER = "weft", "torch DTensor"


def cases(options: Options) -> list[Spec]:
    """One case: a shape of weft demo."""
    sizes, params = demo_sizes(NAME, options)
    return [Spec(f"Llama {sizes}", params)]


def demo_sizes(suite: str, options: Options) -> tuple[str, dict[str, Any]]:
    """The shape of weft demo's Llama and its batch for so many ranks, in words and as params.

    Raises:
        ValueError: shapes are given.
    """
    if options.shapes:
        raise ValueError(f"{suite} takes no --shapes: it is of weft demo's Llama, cut for --ranks")
    W = options.ranks
    kv_heads = W * max(1, 4 // W)  # each rank takes whole groups of heads
    heads = 2 * kv_heads
    if options.quick:
        shape, batch = LlamaShape(8 * heads, 1, heads, kv_heads, 8 * kv_heads, 8 * W), 2 * W
    else:
        shape, batch = LlamaShape(32 * heads, 4, heads, kv_heads, 176 * kv_heads, 64 * W), 4 * W
    shape.check(W)
    sizes = f"{shape.layers} layers of {shape.d_model}, {batch} x {shape.seq_len}"
    return sizes, {"shape": shape.__dict__, "batch": batch, "dtype": options.dtype_name}


def seeded_llama(shape: LlamaShape, dtype: torch.dtype, device: str) -> Llama:
    """The same on every rank; the rotations of RoPE stay complex fp32."""
    torch.manual_seed(0)
    made = Llama(shape)
    for parameter in made.parameters():
        parameter.data = parameter.data.to(dtype)
    return made.to(device)


def demo_tokens(spec: Spec, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch and what is to be predicted of it."""
    text = standard_library()
    made = text.batch(0, spec.params["batch"], spec.params["shape"]["seq_len"], seed=0)
    tokens, targets = (t.to(options.device) for t in made)
    return tokens, targets


def prepare(spec: Spec, options: Options) -> Prepared:
    """The step of each variant on this rank."""
    import torch.distributed.tensor as torch_tensor
    import torch.distributed.tensor.parallel as torch_parallel

    import weft.dtensor as weft_tensor
    import weft.dtensor.parallel as weft_parallel

    shape, mesh = LlamaShape(**spec.params["shape"]), mesh_of_ranks(options.device)
    tokens, targets = demo_tokens(spec, options)

    def model(dtype: torch.dtype) -> Llama:
        return seeded_llama(shape, dtype, options.device)

    def parallelized(api: Any, styles: Any) -> Call:
        made = model(options.dtype)
        parallelize(made, mesh, styles)
        whole = [api.Replicate()]
        inputs, wanted = (
            api.DTensor.from_local(t, mesh, whole, run_check=False) for t in (tokens, targets)
        )
        return _demo_stepper(made, inputs, wanted)

    share = spec.params["batch"] // dist.get_world_size()
    return Prepared(
        {
            _MAIN: parallelized(weft_tensor, weft_parallel),
            _PEER: parallelized(torch_tensor, torch_parallel),
        },
        {"arithmetic": _demo_stepper(model(options.dtype), tokens[:share], targets[:share])},
        expected=lambda: _demo_stepper(model(torch.float32), tokens, targets)(0),
        tolerance={torch.bfloat16: 5e-2, torch.float16: 1e-2}.get(options.dtype, 1e-4),
        inputs=1,
        main=_MAIN,
        peer=_PEER,
    )


def _demo_stepper(model: Llama, inputs: Any, targets: Any) -> Call:
    """A call that makes a training step; its value: the loss and the norm of all gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def step(_: int) -> list[torch.Tensor]:
        logits = model(inputs)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return [_arrived_whole(loss.detach()), _arrived_whole(norm)]

    return step


def _arrived_whole(value: Any) -> torch.Tensor:
    return arrived(value.full_tensor() if hasattr(value, "full_tensor") else value)
