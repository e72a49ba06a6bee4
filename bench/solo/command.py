"""`weft bench solo`: one rank's true kernels of a group of W, on the whole of one chip.

The rank launches what it would launch on W chips. Its peers are memory on the same chip: their data
is filled in and their signals are posted ahead, so that it is everything but the link. Every result
is compared with an oracle (float64, plain torch), before the calls that are timed and after them.

Times are medians, in us, each call after the last one has ended:
  weft            from an L2 that other data has filled
  warm L2         right after the same call
  graph           replayed from a CUDA graph, L2 as for weft
  alone           weft's kernel for a group of one, same arithmetic
  cuBLAS, ...     what libraries take for the same arithmetic; of a collective, a copy of its bytes
  posting         of the peers' signals, which counts in none of the others
host_us, in the file, is what the host takes to enqueue a call; with --profile, kernels_us is what
each kernel takes. With --parts, compiled anew: `without waits`, where kernels take every signal for
granted, and `without status`, where they do not look for failed waits at their end either.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from weft.cli import Parser, several


def _ranks(text: str) -> list[int]:
    return [several(part) for part in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = Parser("weft bench solo", __doc__)
    parser.add_argument(
        "--out", type=Path, metavar="FILE.json", help="write figures there after every case"
    )
    parser.add_argument("--resume", action="store_true", help="keep the cases that --out has")
    parser.add_argument(
        "--minutes",
        type=float,
        default=0.0,
        metavar="M",
        help="end by then, with exit status 130 if cases are left (no limit)",
    )
    parser.add_argument("--filter", default="", metavar="S", help="only cases named like this")
    parser.add_argument(
        "--ranks",
        type=_ranks,
        metavar="W[,W]",
        help="numbers of ranks; all cases with the first (8,2,4; 2 with --quick)",
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, few rounds")
    parser.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        help="cpu: the same path, interpreted: its times mean nothing (cuda where there is one)",
    )
    parser.add_argument(
        "--parts", action="store_true", help="also time kernels without waits, and without status"
    )
    parser.add_argument(
        "--rates",
        type=Path,
        metavar="DIR",
        help="also write the kernels' rates that follow, beside the tuned launches in DIR, where "
        "the cost model finds them (kernels/tuned, or what WEFT_TUNED names)",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="also tell what each kernel of a call takes, by torch's profiler",
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--list", action="store_true", help="print the names of the cases")
    only.add_argument(
        "--precompile",
        action="store_true",
        help="compile the kernels of all cases in parallel processes, and nothing else",
    )
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)  # see `sim.unwaited`
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the cases. The exit status is 0 if all were right, 1 if one was not, 130 if the time
    was over before the last one."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    args = parser.parse_args(given)
    if args.resume and not args.out:
        parser.error("--resume needs --out, where the cases are that are kept")
    if args.device == "cpu":  # before Triton is imported
        os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("WEFT_TIMEOUT_S", "20")  # no peer runs: what has not come does not come
    if args.profile:
        # Without these, CUPTI may crash a process that also captures graphs.
        os.environ |= {"DISABLE_CUPTI_LAZY_REINIT": "1", "TEARDOWN_CUPTI": "0"}
    import torch

    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; --device cpu interprets the kernels")
    from weft.bench.solo import measure

    return measure.run_command(args, shlex.join(["weft", "bench", "solo", *given]), parser)


if __name__ == "__main__":
    sys.exit(main())
