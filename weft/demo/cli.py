"""The options of `weft demo`, and its course: reference, ranks, report."""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from weft.cli import Parser, at_least, device_and_ranks, make_folder, several
from weft.settings import Engine

_DESCRIPTION = """\
Train a small byte-level Llama on the Python standard library's own sources, twice from the same
seed and the same batches: first in one process, as the reference, then with tensor and sequence
parallelism on several local ranks, through weft's fused ops. The two losses must agree:
the exit status is 1 if they do not.
"""

_EPILOG = """\
what it writes to the folder of --out:
  demo.png     loss curves, their difference, and where the time of each rank went
  report.json  every figure of it
  explain.txt  which engine ran each fused op of one training step, and why
  text.txt     what the trained model writes

examples:
  weft demo                                      two ranks on the CPU, or a rank a GPU
  weft demo --steps 20 --d-model 64 --layers 2   a look at it, in seconds
  weft demo --ranks 4 --device cpu               four ranks, on any machine
  weft demo --engine generic                     the same without fusion, to compare tokens/s
"""


def parser() -> argparse.ArgumentParser:
    """The options of `weft demo`."""
    p = Parser("weft demo", _DESCRIPTION, epilog=_EPILOG)

    def size(name: str, default: int, text: str) -> None:
        p.add_argument(
            name, type=at_least(1), default=default, metavar="N", help=f"{text} ({default})"
        )

    p.add_argument(
        "--ranks",
        type=several,
        metavar="N",
        help="processes that share the model (2 on the CPU, else one a GPU)",
    )
    size("--steps", 280, "training steps, in each of the two runs")
    size("--d-model", 256, "features of a byte between the layers")
    size("--layers", 4, "blocks of attention and feed-forward")
    size("--heads", 8, "query heads")
    size("--kv-heads", 4, "key and value heads, each shared by heads / kv-heads query heads")
    size("--ffn", 704, "features inside a feed-forward layer")
    size("--seq-len", 128, "bytes in a sequence")
    size("--batch", 8, "sequences in a step")
    p.add_argument(
        "--lr", type=float, default=1e-3, help="AdamW's highest learning rate (%(default)s)"
    )
    p.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="where the ranks compute (cuda where there is one)",
    )
    p.add_argument(
        "--engine",
        choices=get_args(Engine),
        default="auto",
        help="how fused ops run: the Triton kernel, chunk by chunk from the host, process-group "
        "collectives, or whichever is quickest (%(default)s); on the CPU triton is interpreted, "
        "for tiny sizes only",
    )
    p.add_argument("--seed", type=int, default=0, help="of weights and batches (%(default)s)")
    p.add_argument(
        "--out", type=Path, default=Path("out/demo"), help="folder for the results (%(default)s)"
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; the exit status is 0 if both runs ended with the same losses."""
    p = parser()
    args = p.parse_args(argv)
    for name in ("matplotlib", "rich"):
        if importlib.util.find_spec(name) is None:  # now, and not when the training is over
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    from weft.demo.model import LlamaShape
    from weft.demo.run import run_demo
    from weft.demo.train import Run
    from weft.launch import RankError

    device, ranks = device_and_ranks(p, args.device, args.ranks)
    shape = LlamaShape(args.d_model, args.layers, args.heads, args.kv_heads, args.ffn, args.seq_len)
    if not 0 < args.lr < math.inf:
        p.error(f"--lr must be above 0 and finite, got {args.lr:g}")
    try:
        shape.check(ranks)
        make_folder(args.out)
    except ValueError as error:
        p.error(str(error))
    interpreted = device == "cpu" and args.engine == "triton"  # a forward takes a second or more
    run = Run(
        shape,
        args.steps,
        args.batch,
        args.lr,
        args.seed,
        device,
        args.engine,
        text_bytes=16 if interpreted else 320,
    )
    try:
        comparison = run_demo(run, ranks, args.out)
    except RankError as failure:
        print(f"weft demo: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("weft demo: interrupted", file=sys.stderr)
        return 130
    return 0 if comparison.agrees else 1
