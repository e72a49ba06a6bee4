"""`make gpu`: everything that needs a GPU, on however many there are: tests first, then figures.

    1. the tests that are marked gpu
    2. the plain matmul beside torch.mm, in one process
    3. every fused op by each engine, beside its unfused self and its bounds
    4. attention over sharded sequences and caches, beside torch's: of whole sequences, round its
       ring, and with the exchanges not overlapped

With one GPU the ranks, 2 and then 4, share it through torch's symmetric memory: protocols are real
there, overlap is not, as the ranks take turns. With more, a rank has a GPU of its own, from 2 ranks
to all.

Figures go to bench/results/<chip>.json, and as tables to docs/gpu.md, case by case: what was
measured is kept if the run is cut short, and a line tells of each. They are taken though a test may
fail, as each is of a result that was compared with the oracle's; the page says so, and so does the
exit status. `make gpu ARGS="--quick"` hands arguments on; where a command may take ten minutes,
"--no-figures --ranks 2", "--no-tests --ranks 2", and the same with 4, make four of it.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from weft.bench import attention_suite, matmul_suite, ops_suite, runner
from weft.bench.cli import failed
from weft.bench.environment import environment
from weft.bench.problem import Options, Suite
from weft.bench.rows import Case, Result
from weft.bench.tables import figure

ROOT = Path(__file__).resolve().parent.parent
NOTHING_TO_DO = (
    "make gpu: skipped, torch sees no GPU here. On a machine with one or more (CUDA or ROCm build "
    "of torch >= 2.11), the same command tests, measures, and writes bench/results and docs/gpu.md."
)

# Linears of a 70B Llama: a decoding step, short and long prompts. Where ranks share a GPU, their
# process group goes through the host's memory: the longest would take minutes.
_TOKENS = (16, 128, 2048, 8192)
_TOKENS_SHARED = (16, 2048)


def rank_counts(gpus: int) -> tuple[int, ...]:
    """The numbers of ranks to measure.

    Example:
        1 GPU: (2, 4), which share it; 6 GPUs: (2, 4, 6).
    """
    if gpus <= 1:
        return 2, 4
    return tuple(sorted({w for w in (2, 4, 8, 16) if w <= gpus} | {gpus}))


def slug(name: str) -> str:
    """A device's name as a file's: "NVIDIA H100 80GB HBM3" is nvidia-h100-80gb-hbm3."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def run_tests(counts: Sequence[int]) -> int:
    """The exit status of pytest on the tests that are marked gpu, with so many ranks."""
    # Each test is named as it begins.
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu"]
    command += ["tests/test_gpu.py", "tests/test_gpu_dtensor.py"]
    command.append("--durations=10")
    command.append("--maxfail=12")  # what fails here mostly fails everywhere, by its time limit
    # Kernels must be compiled, whatever the caller's shell says.
    variables = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    variables.setdefault("WEFT_TIMEOUT_S", "30")
    variables["GPU_RANKS"] = " ".join(map(str, counts[:2]))
    return subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode


def shapes_for(ranks: int, options: Options) -> tuple[tuple[int, int, int], ...]:
    """The linears (M, N, K) on which that many ranks run the fused ops; none for the suite's."""
    if options.quick:
        return ()
    shared = options.device == "cuda" and ranks > torch.cuda.device_count()
    tokens = _TOKENS_SHARED if shared else _TOKENS
    return tuple((M, N, K) for M in tokens for N, K in ((28672, 8192), (8192, 28672)))


def measure(
    options: Options,
    counts: Sequence[int],
    command: str,
    on_case: Callable[[Result], None] = lambda result: None,
) -> Result:
    """All cases of all suites, as one result; cases are named with their number of ranks.

    Args:
        on_case: called with what there is after every case, as a machine may be lent for so long.
    """
    where = environment(max(counts), options.device, options.threads)
    whole = Result("gpu", where, command=command)
    runs: list[tuple[Suite, int]] = [(matmul_suite, counts[0])]
    runs += [(suite, count) for count in counts for suite in (ops_suite, attention_suite)]
    for suite, count in runs:
        shapes = shapes_for(count, options) if suite is ops_suite else ()
        asked = replace(options, ranks=count, shapes=shapes)

        def add(case: Case, suite: Suite = suite) -> None:
            case.name += f", {case.params['ranks']} ranks" if suite.WORLD == "ranks" else ""
            whole.cases.append(case)
            on_case(whole)

        results = runner.run([suite], asked, command=command, on_case=add)
        if any(result.interrupted for result in results):
            whole.interrupted = True
            break
    return whole


def said(case: Case) -> str:
    """A case in a line: times in us, and what has none."""
    cells = [
        f"{name} {figure(timing.us) if timing.ok else f'- ({timing.failure})'}"
        for name, timing in case.variants.items()
    ]
    return f"{case.suite}: {case.name}: {case.failure or ', '.join(cells)}"


def page(result: Result) -> str:
    """docs/gpu.md: a table a suite."""
    where = result.environment
    name = where["gpus"][0]["name"] if where["gpus"] else where["cpu"]
    gpus = len(where["gpus"])
    shared = f"; {where['ranks']} ranks share {gpus}: they take turns, and nothing overlaps"
    lines = [
        "# Figures on a GPU",
        "",
        f"`{result.command}` wrote this page: {gpus} x {name}, torch {where['torch']}, triton "
        f"{where['triton']}, {where['date'][:10]}, commit {where['commit']}"
        + (shared if 0 < gpus < where["ranks"] else "")
        + ". Times are medians in us, of the slowest rank. bound: the larger of arithmetic, memory "
        "and link, each measured in the same rounds. Every time is of a result that was right. "
        f"Tests on this machine: {where['tests']}.",
    ]
    for suite in dict.fromkeys(case.suite for case in result.cases):
        lines += ["", *_table(suite, [case for case in result.cases if case.suite == suite])]
    return "\n".join(lines) + "\n"


def _table(suite: str, cases: Sequence[Case]) -> list[str]:
    names = list(dict.fromkeys(name for case in cases for name in case.variants))
    rates = any("flop" in case.params for case in cases)
    head = ["case", *names, "bound", "of bound", "peer / ours", *["TFLOP/s"] * rates]
    lines = [
        f"## {suite}",
        "",
        f"| {' | '.join(head)} |",
        f"| --- |{' ---: |' * (len(head) - 1)}",
    ]
    why: dict[str, list[str]] = {}
    for case in cases:
        timed, fraction = case.timed, None
        reasons = {name: timing.failure for name, timing in case.variants.items()}
        for name, reason in (reasons | {"all variants": case.failure}).items():
            if reason:
                why.setdefault(f"{name}: {reason}", []).append(case.name)
        if case.main in timed:
            fraction = case.fraction(case.main)
        cells = [figure(timed[name].us) if name in timed else "-" for name in names]
        bound = "" if case.bound_us is None else f"{figure(case.bound_us)} {case.bound_by}"
        cells += [bound, figure(fraction), str(case.gain or "")]
        if rates:
            ours = timed.get(case.main)
            cells.append(figure(case.params["flop"] / ours.us / 1e6) if ours else "")
        lines.append(f"| {case.name} | {' | '.join(cells)} |")
    if why:
        lines += ["", "Without a time:", ""]
        lines += [
            f"- {reason} ({names[0] if len(names) == 1 else f'{len(names)} cases'})"
            for reason, names in why.items()
        ]
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Tests, then figures. The exit status is 0 if all was right, or if there is no GPU."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="weft bench gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, nargs="+", help="(2 4 on one GPU, else 2 .. all)")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--no-tests", action="store_true", help="figures only")
    only.add_argument("--no-figures", action="store_true", help="tests only")
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds")
    parser.add_argument("--seconds", type=float, default=1.5, help="aimed at a case (1.5)")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results", metavar="DIR")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "gpu.md", metavar="FILE")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda",
        help="cpu: the same steps without tests, to see that they run; use with --quick",
    )  # fmt: skip
    args = parser.parse_args(given)
    on_gpu = args.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        print(NOTHING_TO_DO)
        return 0
    counts = tuple(args.ranks or rank_counts(torch.cuda.device_count() if on_gpu else 1))
    if min(counts) < 2:
        parser.error(f"--ranks must be at least 2, got {min(counts)}: one rank has no peers")
    tested = on_gpu and not args.no_tests
    status = run_tests(counts) if tested else 0
    if args.no_figures:
        return status
    if status:
        print("make gpu: a test failed; figures are taken of what is right", flush=True)
    options = Options(
        device=args.device,
        dtype=torch.bfloat16 if on_gpu else torch.float32,
        quick=args.quick,
        seconds=args.seconds,
    )
    command = shlex.join(["weft", "bench", "gpu", *given])
    chip = slug(torch.cuda.get_device_name()) if on_gpu else "cpu"
    path = args.results / f"{chip}.json"
    args.page.parent.mkdir(parents=True, exist_ok=True)

    begun = time.monotonic()
    print(f"figures into {path} and {args.page}, in us; {counts} ranks", flush=True)

    def keep(result: Result) -> None:
        result.environment["tests"] = "not run" if not tested else "failed" if status else "passed"
        result.write(path)
        args.page.write_text(page(result))
        print(f"{time.monotonic() - begun:4.0f} s {said(result.cases[-1])}", flush=True)

    result = measure(options, counts, command, keep)
    if result.interrupted:
        return 130
    bad = any(failed(case) or (on_gpu and _kernel_failed(case)) for case in result.cases)
    return status or int(bad)


def _kernel_failed(case: Case) -> bool:
    """Whether a fused kernel did not run or was wrong, also where auto takes another engine."""
    return "triton" in case.variants and not case.variants["triton"].ok


if __name__ == "__main__":
    sys.exit(main())
