"""`weft plan`: how a model should be laid out on a mesh of chips, by predicted time and memory.

Nothing runs and nothing of the model's size is allocated: chips need not be there.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.cli import Parser, at_least, new_picture
from weft.demo.model import Llama, LlamaShape
from weft.dtensor import DeviceMesh, Plan, plan
from weft.dtensor.plans.planning import bytes_of
from weft.dtensor.plans.propagation import pretended_mesh

_EPILOG = """\
examples:
  weft plan --model llama --mesh 2x4 --hardware h100 --memory 80GB
  weft plan --model mixtral --mesh 8 --hardware mi300x --plot plan.svg
  weft plan --model train.py:example --mesh 4 --json

FILE.py:function names a function without arguments that returns a model (made on the meta device)
and the tensor, or tuple of arguments, that one step of all ranks together is called with.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan, beside those that people make by hand. 1: no layout fits."""
    parser = Parser("weft plan", __doc__, epilog=_EPILOG)
    parser.add_argument(
        "--model",
        default="llama",
        metavar="MODEL",
        help=f"{', '.join(MODELS)} (as large as their namesakes), or FILE.py:function (llama)",
    )
    parser.add_argument(
        "--mesh",
        type=_mesh_sizes,
        default=(8,),
        metavar="RxR",
        help="ranks along each mesh dim (8)",
    )
    parser.add_argument(
        "--hardware",
        metavar="CHIP",
        help="h100, mi300x, ..: as of weft sim (a typical CPU's rates)",
    )
    parser.add_argument("--memory", metavar="SIZE", help="of a rank, as 80GB (any)")
    parser.add_argument("--layers", type=at_least(1), metavar="N", help="of llama and mixtral")
    parser.add_argument(
        "--batch",
        type=at_least(1),
        metavar="N",
        help="sequences of all ranks together (a rank's 1)",
    )
    parser.add_argument(
        "--tokens", type=at_least(1), default=4096, metavar="N", help="of a sequence (4096)"
    )
    parser.add_argument(
        "--keep-logits-cut",
        action="store_true",
        help="the model may return DTensors, for loss_parallel, rather than whole tensors",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument(
        "--plot", type=new_picture, metavar="FILE", help="draw layouts along the model"
    )
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    try:
        model, sample = _model_and_sample(args)
        found = plan(
            model,
            _pretended(args.mesh, "cpu" if args.hardware is None else "cuda"),
            sample,
            memory=bytes_of(args.memory),
            hardware=args.hardware,
            gather_output=not args.keep_logits_cut,
        )
        if args.plot:
            from weft.bench.report.plan import draw_plan

            draw_plan(found, args.plot)
    except (ValueError, NotImplementedError, OSError) as error:
        print(f"weft plan: {error}", file=sys.stderr)
        return 1
    print(json.dumps(plan_json(found), indent=1) if args.json else found)
    return 0


def _mesh_sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(size) for size in text.lower().split("x"))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"must be ranks, as 8 or 2x4, got {text!r}")
    return sizes


def _pretended(sizes: tuple[int, ...], device_type: str) -> DeviceMesh:
    """A mesh of ranks that are not there."""
    grid = torch.arange(torch.Size(sizes).numel()).view(sizes)
    return pretended_mesh(device_type, grid)


def _model_and_sample(args: argparse.Namespace) -> tuple[nn.Module, Any]:
    if args.model not in MODELS:
        file, colon, name = args.model.rpartition(":")
        if not colon:
            raise ValueError(
                f"--model must be {', '.join(MODELS)} or FILE.py:function, got {args.model!r}"
            )
        if args.layers:
            raise ValueError("--layers is for llama and mixtral: a FILE makes its own model")
        return _model_in_file(Path(file), name)
    batch = args.batch or torch.Size(args.mesh).numel()
    with torch.device("meta"):
        model = MODELS[args.model](args.layers, args.tokens)
        return model, torch.zeros(batch, args.tokens, dtype=torch.long)


def _model_in_file(path: Path, name: str) -> tuple[nn.Module, Any]:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ValueError(f"--model {path}:{name}: no such Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise ValueError(f"--model {path}:{name}: the file has no {name}")
    with torch.device("meta"):
        made = getattr(module, name)()
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module):
        raise ValueError(f"--model {path}:{name}: must return (model, arguments), got {type(made)}")
    return made


def llama(layers: int | None, tokens: int) -> nn.Module:
    """Llama 3 8B, in bf16; its vocabulary is one of bytes, as the demo's."""
    model = Llama(LlamaShape(4096, layers or 32, heads=32, kv_heads=8, ffn=14336, seq_len=tokens))
    return _in_bf16(model)


def mixtral(layers: int | None, tokens: int) -> nn.Module:
    """Mixtral 8x7B, in bf16, with all experts on all tokens: as many layers, experts and features;
    routed, it would multiply a quarter of that.
    """
    shape = LlamaShape(4096, layers or 32, heads=32, kv_heads=8, ffn=14336, seq_len=tokens)
    model = Llama(shape)
    for block in model.blocks:
        block.ffn = StackedExperts(shape.d_model, shape.ffn, 8)
    return _in_bf16(model)


MODELS: dict[str, Callable[[int | None, int], nn.Module]] = {"llama": llama, "mixtral": mixtral}


class StackedExperts(nn.Module):
    """SwiGLU experts as stacks of weights, each token weighted by its two best."""

    def __init__(self, width: int, hidden: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.w1, self.w3 = (nn.Parameter(torch.empty(count, width, hidden)) for _ in range(2))
        self.w2 = nn.Parameter(torch.empty(count, hidden, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best, index = self.router(x).topk(2, dim=-1)
        weights = torch.zeros(*x.shape[:-1], len(self.w1), dtype=x.dtype, device=x.device)
        weights = weights.scatter(-1, index, best.softmax(-1)).movedim(-1, 0).unsqueeze(-1)
        each = x.flatten(0, -2).unsqueeze(0).expand(len(self.w1), -1, -1)
        y = (nn.functional.silu(each @ self.w1) * (each @ self.w3)) @ self.w2
        total: torch.Tensor = (weights * y.unflatten(1, x.shape[:-1])).sum(0)
        return total


def _in_bf16(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():  # rotations stay complex fp32
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


def plan_json(found: Plan) -> dict[str, Any]:
    """A plan as JSON has it."""
    told = {
        "mesh": list(found.mesh.shape),
        "model_dims": list(found.model_dims),
        "data_dims": list(found.data_dims),
        "fsdp": found.sharded,
        "step_us": found.step_us,
        "memory_bytes": found.memory_bytes,
        "hardware": found.hardware,
        "styles": {path: repr(style) for path, style in found.styles.items()},
        "placements": {name: str(placement) for name, placement in found.placements.items()},
    }
    rows = []
    for row in found.rows:
        fields = asdict(row)
        rows.append(fields | {"found": str(row.found), "placement": str(row.placement)})
    others = {
        name: each if isinstance(each, str) else {
            "step_us": each.step_us, "memory_bytes": each.memory_bytes,
        }
        for name, each in found.beside.items()
    }  # fmt: skip
    return told | {"rows": rows, "beside": others}
