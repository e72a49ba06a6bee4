"""Results of the two runs: the figures, and how the terminal and the files show them."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.collectives.cost import BUSY
from weft.demo.train import Run, TrainingLog

# How far fp32 rounding in another order of summation may drift over a run of this length.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Comparison:
    """The reference, and the ranks that trained the same model from the same seed."""

    run: Run
    parameters: int
    reference: TrainingLog
    ranks: list[TrainingLog]
    load: float = 0.0  # of the machine as it began, as a part of its cores

    @property
    def busy(self) -> str:
        """What others' work means for the times; empty if there was none."""
        if self.load <= BUSY:
            return ""
        return (
            f"the machine was not quiet: load {self.load:.1f} a core at the start. Others' work is "
            f"in these times, more in one run than in the other: do not compare them"
        )

    @property
    def differences(self) -> list[float]:
        """For every step, how far the two losses are apart."""
        pairs = zip(self.reference.losses, self.ranks[0].losses, strict=True)
        return [abs(ours - theirs) for ours, theirs in pairs]

    @property
    def largest_difference(self) -> float:
        """How far the losses are apart at most; NaN if a loss is."""
        return max(self.differences, key=lambda apart: (math.isnan(apart), apart))

    @property
    def agrees(self) -> bool:
        """Whether the losses are nowhere further apart than fp32 rounding explains."""
        return self.largest_difference < TOLERANCE

    def step_ms(self, result: TrainingLog) -> float:
        """The mean time of a step, the first left out (it plans, allocates and compiles)."""
        return _mean_ms(result.step_seconds)

    def wait_ms(self, result: TrainingLog) -> float:
        """The part of a step that the process spent waiting for its peers."""
        return _mean_ms(result.wait_seconds)

    def tokens_per_second(self, result: TrainingLog) -> float:
        return 1e3 * self.run.tokens_per_step / self.step_ms(result)

    def figures(self) -> dict[str, Any]:
        """Everything above in plain types."""

        def of(result: TrainingLog) -> dict[str, Any]:
            return {
                "losses": result.losses,
                "held_out_loss": result.held_out,
                "tokens_per_second": self.tokens_per_second(result),
                "step_ms": self.step_ms(result),
                "wait_ms": self.wait_ms(result),
            }

        return {
            "run": asdict(self.run),
            "parameters": self.parameters,
            "largest_difference": self.largest_difference,
            "tolerance": TOLERANCE,
            "agrees": self.agrees,
            "load": self.load,
            "reference": of(self.reference),
            "ranks": [of(result) for result in self.ranks],
            "engines": [
                {"calls": calls, **asdict(decision)}
                for decision, calls in self.ranks[0].decisions.items()
            ],
            "text": self.ranks[0].text,
        }


def _mean_ms(seconds: list[float]) -> float:
    steady = seconds[1:] or seconds
    return 1e3 * sum(steady) / len(steady)


def write_comparison(comparison: Comparison, out: Path) -> None:
    """Put report.json, explain.txt and text.txt into `out`."""
    sharded = comparison.ranks[0]
    decisions = "".join(f"{calls} x {what}\n" for what, calls in sharded.decisions.items())
    (out / "report.json").write_text(json.dumps(comparison.figures(), indent=1) + "\n")
    (out / "explain.txt").write_text(decisions or "no op of weft ran\n")
    (out / "text.txt").write_text(sharded.text + "\n")


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the comparison."""
    sharded = comparison.ranks[0]
    console.print(_losses(comparison))
    if comparison.busy:
        console.print(Text(f"note: {comparison.busy}\n", style="yellow"))
    largest = comparison.largest_difference
    verdict = (
        Text(f"below {TOLERANCE:g}: the same training", style="bold green")
        if comparison.agrees
        else Text(f"not below the {TOLERANCE:g} that fp32 rounding explains", style="bold red")
    )
    console.print(Text.assemble(f"largest difference of the losses {largest:.1e}, ", verdict, "\n"))
    console.print(_times(comparison))
    console.print(_engines(sharded))
    console.print(Text("what the trained model writes:", style="bold"))
    console.print(Text(sharded.text, style="cyan"), "\n")


def _rich_table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for column in columns:
        left = column in ("", "op", "engine", "shapes")
        table.add_column(
            column,
            justify="left" if left else "right",
            overflow="fold",
            no_wrap=column in ("", "op", "engine"),
        )
    return table


def _losses(comparison: Comparison) -> Table:
    table = _rich_table("loss", "", "first step", "last step", "held-out", "tokens/s", "ms a step")
    rows = {
        "reference, one process": comparison.reference,
        f"weft, {len(comparison.ranks)} ranks": comparison.ranks[0],
    }
    for name, result in rows.items():
        table.add_row(
            name,
            f"{result.losses[0]:.6f}",
            f"{result.losses[-1]:.6f}",
            f"{result.held_out:.6f}",
            f"{comparison.tokens_per_second(result):,.0f}",
            f"{comparison.step_ms(result):.1f}",
        )
    return table


def _times(comparison: Comparison) -> Table:
    table = _rich_table("time of a step", "", "arithmetic", "waiting for peers", "waiting")
    for rank, result in enumerate(comparison.ranks):
        step, waiting = comparison.step_ms(result), comparison.wait_ms(result)
        table.add_row(
            f"rank {rank}",
            f"{step - waiting:.1f} ms",
            f"{waiting:.1f} ms",
            f"{waiting / step:.1%}",
        )
    return table


def _engines(result: TrainingLog) -> Table:
    title = "engines of one training step (explain.txt tells why)"
    table = _rich_table(title, "calls", "op", "shapes", "engine")
    others: Counter[tuple[str, str]] = Counter()
    for decision, calls in result.decisions.items():
        if decision.engine == "shards":  # a choice of layouts, which runs no engine by itself
            continue
        if decision.shapes:
            table.add_row(str(calls), decision.op, decision.shapes, decision.engine)
        else:
            others[decision.op, decision.engine] += calls
    for (op, engine), calls in others.items():
        table.add_row(str(calls), op, "", engine)
    return table
