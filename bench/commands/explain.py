"""`weft bench explain OP M N K W`: what the cost model predicts for a shape, and what it takes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from weft.bench.report.tables import figure
from weft.bench.rows import Case
from weft.cli import at_least, several


def main(argv: Sequence[str] | None = None) -> int:
    """Time one shape on every engine, and print the reasoning beside it."""
    from weft.bench import cli, runner
    from weft.bench.suites import ops
    from weft.kernels.engine.tuning import OPS

    parser = argparse.ArgumentParser(prog="weft bench explain", description=__doc__)
    parser.add_argument("op", choices=OPS, metavar="OP", help=", ".join(OPS))
    for name, what in (("M", "tokens"), ("N", "features out"), ("K", "features in")):
        parser.add_argument(name, type=at_least(1), help=f"{what} of the whole layer")
    parser.add_argument("ranks", type=several, metavar="W", help="ranks")
    cli.add_machine_options(parser, ranks=False)
    args = parser.parse_args(argv)
    options = replace(
        cli.machine_options(args, parser), shapes=((args.M, args.N, args.K),), filter=f"{args.op} "
    )
    (result,) = runner.run_suites([ops], options, command="weft bench explain")
    if not result.cases:
        return 130
    print(explanation(result.cases[0]))
    return int(cli.has_failed(result.cases[0]))


def explanation(case: Case) -> str:
    """The predicted times with their reasons, the measured ones, and the choice of auto."""
    p = case.params
    lines = [f"{p['op']}, M={p['M']} N={p['N']} K={p['K']}, {p['dtype']}, {p['ranks']} ranks", ""]
    if case.failure:
        return "\n".join([*lines, case.failure])
    for name, price in p["prices"].items():
        lines.append(
            f"{name}: {figure(price['us'])} us predicted{_measured(case, name)}; {price['rule']}:"
        )
        lines += [f"    {what:<12}{figure(us):>8} us  {how}" for what, us, how in price["parts"]]
    for name in case.variants:
        if name not in p["prices"]:
            lines.append(f"{name}: {_measured(case, name).lstrip(', ')}")
    if case.bound_us is not None:
        parts = ", ".join(f"{name} {figure(us)}" for name, us in case.parts_us.items())
        lines.append(f"bound: {figure(case.bound_us)} us measured ({parts})")
    auto = case.variants.get("auto")
    if auto is not None and auto.ok:
        fraction = case.fraction("auto")
        reached = "" if fraction is None else f": {fraction:.2f} of the bound"
        lines.append(f"auto took {auto.engine}{reached}")
    return "\n".join(lines)


def _measured(case: Case, name: str) -> str:
    timing = case.variants.get(name)
    if timing is None:
        return ""
    if not timing.ok:
        return f", no time: {timing.failure}"
    return f", {figure(timing.us)} us measured (±{timing.spread * 50:.0f}%)"
