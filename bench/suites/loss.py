"""The loss of logits cut by vocabulary, and its gradient: a shape is tokens, vocabulary.

    logits (tokens, V/W) -> cross-entropy -> number, backward -> (tokens, V/W)

Variants:

    torch alone     F.cross_entropy of a rank's part, as if it were all
    weft            vocab_parallel_cross_entropy
    weft DTensor    F.cross_entropy of weft.dtensor, under loss_parallel
    torch DTensor   the same of torch.distributed.tensor

The bound, "memory", is to read the logits twice, and to write the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import weft
from weft.bench import bounds
from weft.bench.blocks.tensor_parallel import mesh_of_ranks
from weft.bench.problem import INPUTS, Options, Prepared, Spec, arrived
from weft.bench.shapes import sized
from weft.collectives.ranks.chunks import chunk_sizes

NAME = "loss"
WORLD: Literal["ranks", "one"] = "ranks"
SIZES = ("tokens", "vocabulary")

# Of Llama 2, Llama 3 and Qwen 2.
SHAPES = ((1024, 32000), (512, 128256), (512, 152064))


def cases(options: Options) -> list[Spec]:
    """One case a shape."""
    entries = options.shapes or (((24, 40),) if options.quick else SHAPES)
    return [Spec.of_sizes(SIZES, sized(entry, SIZES, NAME), options) for entry in entries]


def prepare(spec: Spec, options: Options) -> Prepared:
    """One shape, on this rank."""
    import torch.distributed.tensor.parallel as torch_parallel

    import weft.dtensor.parallel as weft_parallel

    tokens, vocabulary = (spec.params[name] for name in SIZES)
    rank, mesh = dist.get_rank(), mesh_of_ranks(options.device)
    sizes = chunk_sizes(vocabulary, options.ranks)
    generator = torch.Generator().manual_seed(0)

    def drawn() -> torch.Tensor:
        whole = torch.randn(tokens, vocabulary, generator=generator)
        part: torch.Tensor = whole.split(sizes, 1)[rank]
        return part.to(options.device, options.dtype, copy=True)

    parts = [drawn().requires_grad_() for _ in range(INPUTS)]
    targets = torch.randint(vocabulary, (tokens,), generator=generator).to(options.device)

    def step(loss_of: Callable[[torch.Tensor], Any]) -> Callable[[int], list[torch.Tensor]]:
        def run(i: int) -> list[torch.Tensor]:
            parts[i].grad = None
            loss = loss_of(parts[i])
            loss.backward()
            grad = parts[i].grad
            assert grad is not None
            return [arrived(loss.detach()), grad]

        return run

    def of_dtensors(kind: Any, package: Any) -> Callable[[int], list[torch.Tensor]]:
        def loss_of(part: torch.Tensor) -> Any:
            shape = (tokens, vocabulary)
            placements = [torch.distributed.tensor.Shard(1)]
            x = kind.from_local(part, mesh, placements, shape=shape, stride=(vocabulary, 1))
            return cross_entropy(x, targets)

        def run(i: int) -> list[torch.Tensor]:
            with package.loss_parallel():  # torch's backward must be within, too
                return step(loss_of)(i)

        return run

    def expected() -> list[torch.Tensor]:
        again = torch.Generator().manual_seed(0)
        whole = torch.randn(tokens, vocabulary, generator=again).to(options.dtype).double()
        loss = cross_entropy(whole.requires_grad_(), targets.cpu())
        (grad,) = torch.autograd.grad(loss, whole)
        return [loss.detach(), grad.split(sizes, 1)[rank]]

    variants = {
        "weft": step(lambda x: weft.vocab_parallel_cross_entropy(x, targets, sizes=sizes)),
        "weft DTensor": of_dtensors(weft.dtensor.DTensor, weft_parallel),
        "torch DTensor": of_dtensors(torch.distributed.tensor.DTensor, torch_parallel),
        "torch alone": step(lambda x: cross_entropy(x, targets % sizes[rank])),
    }
    touched = 3 * tokens * sizes[0] * options.dtype.itemsize
    return Prepared(
        variants,
        {"memory": bounds.touching(touched, torch.device(options.device))},
        expected=expected,
        unchecked=("torch alone",),
        tolerance={torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(options.dtype, 1e-5),
        main="weft",
        peer="torch DTensor",
    )
