"""`make gpu`: everything that needs a GPU, on however many there are: tests first, then figures.

    1. the tests that are marked gpu, with 2 and with 4 ranks at the same time
    2. the plain matmul beside torch.mm, in one process
    3. every fused op by each engine, beside its unfused self and its bounds
    4. attention over sharded sequences and caches, beside torch's: of whole sequences, round its
       ring, and with the exchanges not overlapped

With one GPU the ranks, 2 and then 4, share it through torch's symmetric memory: protocols are real
there, overlap is not, as the ranks take turns. Some tests also run them as threads of one process
(`sim.run_on_gpu`), whose kernels do run at the same time. With more, a rank has a GPU of its own,
from 2 ranks to all.

Outcomes of tests go to bench/results/<chip>.tests.jsonl, figures to bench/results/<chip>.json, and
as tables to docs/gpu.md. Each test and case is written and printed as it ends, so that a run cut
short keeps what it has. Figures are taken even if a test fails, as each is of a result that was
compared with the oracle; the page and the exit status tell of failed tests.

It ends within 24 minutes, of which the tests have 13 at most; `make gpu ARGS="--resume"` goes on:
what has passed and what was measured is kept. `ARGS="--minutes 9"` ends earlier.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch

from weft.bench import attention_suite, gpu_tests, matmul_suite, ops_suite, runner
from weft.bench.cli import failed
from weft.bench.environment import environment
from weft.bench.problem import Options, Spec, Suite
from weft.bench.rows import Case, Result
from weft.bench.tables import LEGEND, figure, markdown_lines, table_of
from weft.cli import several

ROOT = Path(__file__).resolve().parent.parent
NOTHING_TO_DO = (
    "make gpu: skipped, torch sees no GPU here. On a machine with one or more (CUDA or ROCm build "
    "of torch >= 2.11), the same command tests, measures, and writes bench/results and docs/gpu.md."
)

# Linears of a 70B Llama: a decoding step, short and long prompts. Where ranks share a GPU, their
# process group goes through the host's memory: the longest would take minutes.
_TOKENS = (16, 128, 2048, 8192)
_TOKENS_SHARED = (16, 2048)
# Nor do times of ranks that take turns get better by many rounds.
_ROUNDS_SHARED = 5


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


def asked_of(suite: Suite, ranks: int, options: Options) -> Options:
    """The options with which that many ranks run a suite."""
    asked = replace(options, ranks=ranks)
    if options.quick or suite.WORLD != "ranks":
        return asked
    shared = asked.gpus_shared
    shapes: tuple[tuple[int, int, int], ...] = ()
    if suite is ops_suite:
        tokens = _TOKENS_SHARED if shared else _TOKENS
        shapes = tuple((M, N, K) for M in tokens for N, K in ((28672, 8192), (8192, 28672)))
    return replace(asked, shapes=shapes, rounds=_ROUNDS_SHARED if shared else options.rounds)


# The largest share of --minutes for the tests, where figures are to follow; and how many seconds
# before the limit a run ends.
_TESTS_SHARE = 0.55
_MARGIN_S = 15.0


@contextmanager
def time_limit(until: float | None) -> Iterator[None]:
    """Raise KeyboardInterrupt in the block at `until`, of time.monotonic(): as Ctrl-C would."""
    if until is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, max(until - time.monotonic(), 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def measure(
    options: Options,
    counts: Sequence[int],
    command: str,
    on_case: Callable[[Result], None] = lambda result: None,
    earlier: Sequence[Case] = (),
    until: float | None = None,
) -> Result:
    """All cases of all suites, as one result; cases are named with their number of ranks.

    Args:
        on_case: called after every case with the result so far, as the run may be cut short.
        earlier: cases of a run before, which are kept and not measured again.
        until: of time.monotonic(): when to end.
    """
    where = environment(max(counts), options.device, options.threads)
    whole = Result("gpu", where, list(earlier), command=command)
    known = {(case.suite, case.name) for case in earlier}
    runs: list[tuple[Suite, int]] = [(matmul_suite, counts[0])]
    runs += [(suite, count) for count in counts for suite in (ops_suite, attention_suite)]
    try:
        with time_limit(until):
            for suite, count in runs:
                _add_cases(suite, asked_of(suite, count, options), whole, known, on_case)
    except KeyboardInterrupt:
        whole.interrupted = True
    return whole


def _add_cases(
    suite: Suite,
    options: Options,
    whole: Result,
    known: Collection[tuple[str, str]],
    on_case: Callable[[Result], None],
) -> None:
    """Run the cases of a suite that are not known by (suite, name), and add them to `whole`."""
    suffix = f", {options.ranks} ranks" if suite.WORLD == "ranks" else ""

    def wanted(suite: Suite, spec: Spec) -> bool:
        return (suite.NAME, spec.name + suffix) not in known

    def add(case: Case) -> None:
        case.name += suffix
        whole.cases.append(case)
        on_case(whole)

    results = runner.run([suite], options, command=whole.command, on_case=add, wanted=wanted)
    if any(result.interrupted for result in results):
        raise KeyboardInterrupt


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
        + f". {LEGEND} Every time is of a result that was right. "
        f"Tests on this machine: {where['tests']}.",
    ]
    for suite in dict.fromkeys(case.suite for case in result.cases):
        cases = [case for case in result.cases if case.suite == suite]
        table = table_of(Result(suite, where, cases))
        lines += ["", f"## {suite}", "", *markdown_lines(table.header, table.rows), ""]
        lines += [f"- {line}" for line in (*table.summary, *table.notes)]
    return "\n".join(lines) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="weft bench gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--ranks", type=several, nargs="+", metavar="W",
        help="numbers of ranks, one after another (2 4 on one GPU, else 2 4 8 16 and all)",
    )  # fmt: skip
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--no-tests", action="store_true", help="figures only")
    only.add_argument("--no-figures", action="store_true", help="tests only")
    parser.add_argument(
        "--minutes", type=float, default=24.0, metavar="N",
        help="end by then; --resume goes on (24; 0: no limit)",
    )  # fmt: skip
    parser.add_argument(
        "--resume", action="store_true",
        help="keep the tests that have passed and the cases that were measured in --results",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds")
    parser.add_argument("--seconds", type=float, default=1.5, help="aimed at a case (1.5)")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "bench" / "results", metavar="DIR",
        help="where figures and the outcomes of tests are kept (bench/results)",
    )  # fmt: skip
    parser.add_argument(
        "--page", type=Path, default=ROOT / "docs" / "gpu.md", metavar="FILE",
        help="where the tables are written (docs/gpu.md)",
    )  # fmt: skip
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda",
        help="cpu: the same steps without tests, to see that they run; use with --quick",
    )  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Tests, then figures. The exit status is 0 if all was right, or if there is no GPU."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    args = parser.parse_args(given)
    on_gpu = args.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        print(NOTHING_TO_DO)
        return 0
    counts = tuple(args.ranks or rank_counts(torch.cuda.device_count() if on_gpu else 1))
    begun = time.monotonic()
    until = begun + 60 * args.minutes - _MARGIN_S if args.minutes else None
    chip = slug(torch.cuda.get_device_name()) if on_gpu else "cpu"
    path, record = (args.results / f"{chip}{suffix}" for suffix in (".json", ".tests.jsonl"))
    args.page.parent.mkdir(parents=True, exist_ok=True)
    tests, earlier, commits = gpu_tests.Outcomes(counts[:2]), list[Case](), list[str]()
    if args.resume:
        tests = gpu_tests.read(record, counts[:2])
        if path.exists():
            before = Result.read(path)
            earlier = [case for case in before.cases if not bad(case, on_gpu)]
            commits = before.environment["commit"].split(", ")
    elif not args.no_tests:
        record.unlink(missing_ok=True)

    def say(text: str) -> None:
        print(f"{time.monotonic() - begun:4.0f} s {text}", flush=True)

    _stay_on_this_host()
    if on_gpu and not args.no_tests:
        say(f"tests, {counts[:2]} ranks, outcomes into {record}")
        share = until
        if until is not None and not args.no_figures:
            share = begun + _TESTS_SHARE * (until - begun)
        tests = gpu_tests.run(counts[:2], record, until=share, say=say)
        for text in tests.broken:
            say(text)
        say(f"tests: {tests}")
    if args.no_figures:
        return _status(tests)
    if tests.wrong:
        say("a test failed; figures are taken of what is right")
    if on_gpu:  # hung ranks are killed a minute after that
        os.environ.setdefault("WEFT_TIMEOUT_S", "20")
    options = Options(
        device=args.device,
        dtype=torch.bfloat16 if on_gpu else torch.float32,
        quick=args.quick,
        seconds=args.seconds,
    )
    command = shlex.join(["weft", "bench", "gpu", *given])
    say(f"figures, {counts} ranks, into {path} and {args.page}, in us; {len(earlier)} cases kept")

    def keep(result: Result) -> None:
        result.environment["tests"] = str(tests)
        made = dict.fromkeys([*commits, *result.environment["commit"].split(", ")])
        result.environment["commit"] = ", ".join(filter(None, made))
        result.write(path)
        args.page.write_text(page(result))

    def tell(result: Result) -> None:
        keep(result)
        say(said(result.cases[-1]))

    result = measure(options, counts, command, tell, earlier, until)
    wanted = on_gpu and not args.no_tests and not tests.finished and not tests.broken
    time_left = until is not None and until - time.monotonic() > _MARGIN_S
    if wanted and time_left and not result.interrupted:
        tests = gpu_tests.run(counts[:2], record, until=until, say=say)
        say(f"tests: {tests}")
    if result.cases:
        keep(result)
    if result.interrupted:
        say("not all cases were measured: --resume goes on")
        return 130
    return _status(tests) or int(any(bad(case, on_gpu) for case in result.cases))


def _stay_on_this_host() -> None:
    """Spare each rank's Gloo to look for the host's name in a network that there may not be."""
    started = time.monotonic()
    with suppress(OSError):
        socket.getaddrinfo(socket.gethostname(), None)
        if time.monotonic() - started < 1:
            return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _status(tests: gpu_tests.Outcomes) -> int:
    """0: all was right; 130: not all tests have run."""
    return int(tests.wrong) or (130 if tests.names and not tests.finished else 0)


def bad(case: Case, on_gpu: bool) -> bool:
    """Whether a variant of weft failed or was wrong; on a GPU, the kernel even if auto skips it."""
    kernel = case.variants.get("triton")
    return failed(case) or (on_gpu and kernel is not None and not kernel.ok)


if __name__ == "__main__":
    sys.exit(main())
