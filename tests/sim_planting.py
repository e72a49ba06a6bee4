"""Plants faults in copies of kernels and exchanges, and has virtual ranks look for them.

python tests/sim_planting.py --page docs/sim_faults.md        writes the table of that page
python tests/sim_planting.py --run REGEX        plants the faults whose line matches, and tells
"""

from __future__ import annotations

import argparse
import inspect
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from mutants import mutant
from sim_cases import COLLECTIVES, CUT, DIRECT, FLAGGED, HOST, KERNELS, OURS, Modules
from sim_faults import BOUNDS, DEADLOCK, EVERY, IN_KERNELS, IN_SIGNALS, RACE, Fault
from sim_faults_elsewhere import (
    IN_ATTENTION,
    IN_COLLECTIVES,
    IN_COPY_ENGINES,
    IN_DIRECT,
    IN_EXCHANGES,
    IN_EXPERTS,
    IN_FLAGGED,
    IN_NORMS,
    exchange,
)

from weft import sim
from weft.collectives import movement
from weft.collectives.device import addresses, failures, flagged, signals, waits
from weft.collectives.kernels import flagged_reduce, kernel_collectives, multimem, pieces
from weft.kernels.device import (
    copies,
    flattened,
    gathered_rows,
    gathered_tiles,
    gathers,
    outputs,
    partial_sums,
    splits,
    summed_tiles,
    tiles,
    turns,
)
from weft.kernels.expert_kernels import (
    combine_kernel,
    dispatch_kernel,
    expert_tiles,
    few_tokens,
    hand_over,
    pulled_rows,
    push_and_weigh_kernel,
    weigh_kernel,
)
from weft.kernels.flash import (
    grad_tiles,
    ring_call,
    ring_dkv,
    ring_grad_kernel,
    ring_kernel,
    ring_keys,
    ring_tables,
)
from weft.kernels.heads import head_dkv, head_queries, head_units
from weft.kernels.matmul import all_gather_kernel, one_shot_kernel
from weft.kernels.norm import flagged_norm_kernel, rms_norm_kernel, switched_rows, team_rows
from weft.markdown import between_marks

CASES = KERNELS | COLLECTIVES | HOST | CUT | FLAGGED
RANKS, SCHEDULES = 3, 200
PAGE = "docs/sim_faults.md"
# What the kernels are made of: each imports those before it only.
PARTS = (
    addresses,
    failures,
    waits,
    signals,
    flagged,
    flagged_reduce,
    pieces,
    kernel_collectives,
    multimem,
    copies,
    tiles,
    splits,
    gathers,
    gathered_rows,
    outputs,
    partial_sums,
    flattened,
    gathered_tiles,
    all_gather_kernel,
    expert_tiles,
    pulled_rows,
    dispatch_kernel,
    hand_over,
    combine_kernel,
    weigh_kernel,
    few_tokens,
    push_and_weigh_kernel,
    team_rows,
    switched_rows,
    rms_norm_kernel,
    flagged_norm_kernel,
    summed_tiles,
    turns,
    one_shot_kernel,
    ring_tables,
    ring_call,
    ring_keys,
    grad_tiles,
    ring_dkv,
    head_units,
    head_queries,
    head_dkv,
    ring_kernel,
    ring_grad_kernel,
)


def of_copies(module: ModuleType, copies: dict[ModuleType, ModuleType]) -> dict[str, object]:
    """What `module` has from the modules copied, as the copies have it."""
    by_name = {original.__name__: copy for original, copy in copies.items()}
    found: dict[str, object] = {}
    for name, value in vars(module).items():
        if isinstance(value, ModuleType):
            if value in copies:
                found[name] = copies[value]
        elif (home := getattr(getattr(value, "fn", None), "__module__", "")) in by_name:
            found[name] = getattr(by_name[home], name)
    return found


def broken(planted: Fault, case: str) -> Callable[[int], None]:
    """The case, on our modules with copies in the place of those that the fault reaches."""
    copies = {planted.module: mutant(planted.module, *planted.edits)}
    if planted.module is exchange:
        copies[movement] = mutant(movement, exchange=copies[exchange].exchange)
    for module in (*PARTS, *vars(OURS).values()):
        inside = of_copies(module, copies)
        if inside and module not in copies:
            copies[module] = mutant(module, **inside)
    if case == "direct reads":
        vars(copies[movement]).update(DIRECT)
    ours = Modules(**{role: copies.get(module, module) for role, module in vars(OURS).items()})
    return lambda rank: CASES[case](rank, ours)


FAULTS = (
    *IN_SIGNALS,
    *IN_KERNELS,
    *IN_EXCHANGES,
    *IN_COLLECTIVES,
    *IN_ATTENTION,
    *IN_NORMS,
    *IN_FLAGGED,
    *IN_EXPERTS,
    *IN_COPY_ENGINES,
    *IN_DIRECT,
)
_FOUND = {
    RACE: "race",
    DEADLOCK: "deadlock",
    BOUNDS: "out of bounds",
    AssertionError: "wrong result",
}


def table() -> str:
    """The table of the page."""
    lines = ["| fault | planted in | found as | in |", "| --- | --- | --- | --- |"]
    for planted in FAULTS:
        kinds = planted.found if isinstance(planted.found, tuple) else (planted.found,)
        found = " or ".join(_FOUND[kind] for kind in kinds)
        module = planted.module.__name__.rpartition(".")[2]
        missed = [case for case in EVERY if case not in planted.cases]
        cases = "; ".join(planted.cases)
        if len(missed) < len(planted.cases):
            cases = f"all but {'; '.join(missed)}" if missed else "all"
        lines.append(f"| {planted.name} | {module} | {found} | {cases} |")
    return "\n".join(lines)


def with_table(page: str) -> str:
    """The page with this table in the place of its own."""
    return between_marks(page, "faults", table())


def moved_texts() -> list[str]:
    """Faults whose text is not in its module any more, or more than once."""
    return [
        f"{planted.name}: {inspect.getsource(planted.module).count(old)} times in "
        f"{planted.module.__name__}: {old!r}"
        for planted in FAULTS
        for old, _ in planted.edits
        if inspect.getsource(planted.module).count(old) != 1
    ]


def found_in(
    planted: Fault, case: str, schedule: sim.runner.Schedule | None = None
) -> Exception | None:
    """What a simulation of the case with the fault says, if anything."""
    try:
        sim.run(
            RANKS,
            broken(planted, case),
            schedules=SCHEDULES,
            schedule=schedule,
            programs=planted.programs,
            replay=schedule is None,
            timeout=600,
        )
    except (sim.SimError, AssertionError) as found:
        return found
    return None


def plant(names: str) -> Iterator[str]:
    """Plant the faults whose name and case match, and tell of each what was found."""
    for planted in FAULTS:
        for case in planted.cases:
            line = f"{planted.name}, in {case}"
            if re.search(names, line):
                start, found = time.process_time(), found_in(planted, case)
                right = planted.is_what(found)
                what = "nothing" if found is None else _FOUND[type(found)]
                schedule = getattr(found, "schedule", "")
                seconds = time.process_time() - start
                yield (
                    f"{'ok' if right else 'MISSED'} | {line} | {what} | schedule {schedule} | "
                    f"{seconds:.1f} s"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--run", metavar="REGEX")
    args = parser.parse_args()
    if args.page:
        args.page.write_text(with_table(args.page.read_text()))
    if args.run is not None:
        for line in plant(args.run):
            print(line, flush=True)


if __name__ == "__main__":
    main()
