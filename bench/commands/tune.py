"""`weft tune`: search the launches of the fused matmuls on this machine's GPUs, and keep a table.

All ranks try the same launches in the same order, and the slowest rank's time counts. The table
then takes precedence over the heuristics, on every rank that reads it: see
`weft.kernels.engine.tuning`. On a CPU the kernels are interpreted: the protocol is the same, the
times mean nothing. With --hardware no rank runs: launches in bf16 are played in virtual time, into
a table of their own, which comes after the measured one.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weft import settings
from weft.bench import shapes
from weft.bench.cli import add_machine_options, machine_options
from weft.bench.commands import modelled_launches
from weft.bench.measure import TimedRanks
from weft.bench.problem import Options, Spec
from weft.bench.suites import ops
from weft.cli import Parser, at_least, make_folder
from weft.collectives.prices.hardware import named
from weft.kernels.engine import tuning
from weft.kernels.engine.chips import chip_of
from weft.launch import launch

_ROUNDS = 7


def main(argv: Sequence[str] | None = None) -> int:
    """Search, print what was found, write the table. The exit status is 0 unless a rank fails."""
    parser = Parser("weft tune", __doc__)
    add_machine_options(parser)
    parser.add_argument(
        "--shapes",
        type=shapes.parse_shapes,
        nargs="+",
        metavar="SHAPE",
        required=True,
        help="tokens, features out, features in of whole linears, or a model's name",
    )
    parser.add_argument(
        "--ops",
        nargs="+",
        choices=tuning.OPS,
        default=list(tuning.OPS),
        metavar="OP",
        help=f"of {', '.join(tuning.OPS)} (all)",
    )
    parser.add_argument(
        "--rounds",
        type=at_least(1),
        metavar="N",
        default=_ROUNDS,
        help=f"calls timed of a launch ({_ROUNDS})",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=tuning.folder(),
        metavar="DIR",
        help="folder of the table ($WEFT_TUNED, else weft's own)",
    )
    parser.add_argument(
        "--hardware", metavar="PRESETS", help="of one chip, as h100,h200: by virtual time instead"
    )
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    options = replace(
        machine_options(args, parser),
        shapes=tuple(entry for entries in args.shapes for entry in entries),
        engines=("triton",),
        rounds=args.rounds,
    )
    try:
        specs = [spec for spec in ops.cases(options) if spec.params["op"] in args.ops]
        machines = [named(name) for name in (args.hardware or "").split(",") if name]
        chip = modelled_launches.chip_of_all(machines).name if machines else ""
        make_folder(args.out)
    except ValueError as error:
        parser.error(str(error))
    if machines:
        path, kept = tuning.path_of(args.out, chip, modelled=True), 0
        for entry in modelled_launches.entries(specs, options.ranks, machines, print):
            tuning.write(path, chip, [entry])
            kept += 1
        print(f"{path}: {kept} entries more, of {len(specs)} problems")
        return 0
    found = launch(
        options.ranks,
        _search_on_rank,
        specs,
        options,
        device=options.device,
        threads=options.threads,
        on_progress=_print_line,
        stall_s=settings.timeout_s() + 300,
    )
    chip, entries = found[0]
    if any(other != found[0] for other in found):
        raise RuntimeError(f"ranks came to different tables: {found}")
    path = tuning.path_of(args.out, chip)
    tuning.write(path, chip, entries)
    print(f"wrote {path}: {len(entries)} entries")
    return 0


def _print_line(event: Any) -> None:
    kind, text = event
    if kind == "line":
        print(text, flush=True)


def _search_on_rank(
    rank: int, progress: Callable[[Any], None], specs: Sequence[Spec], options: Options
) -> tuple[str, list[dict[str, Any]]]:
    """This rank's part of the search; the chip and the entries, the same on every rank."""
    torch.manual_seed(0)
    ranks = TimedRanks(options, progress)
    chip, entries = chip_of(torch.device(options.device)), []
    for spec in specs:
        call = ops.prepare(spec, options).variants["triton"]
        key, choices = ops.launches_of(spec.params, options.dtype, options.ranks, chip)

        def measured(once: Callable[[], torch.Tensor]) -> float:
            rounds = options.rounds or _ROUNDS
            ranks.alive()
            times = [ranks.seconds(lambda _: once(), 0)[0] for _ in range(rounds)]
            return statistics.median(times) * 1e6

        best, trials = tuning.search(
            choices,
            partial(call, 0),
            measured,
            ranks.gather,
            ops.TOLERANCE[options.dtype],
        )
        entries.append(tuning.entry_of(key, best, trials[0]))
        failed = sum(bool(trial.failure) for trial in trials)
        progress(
            (
                "line",
                (
                    f"{spec.name}: {best.us:.0f} us, heuristic {trials[0].us:.0f} us, of "
                    f"{len(trials)} launches ({failed} failed): {best.choice}"
                ),
            )
        )
    return chip.name, entries
