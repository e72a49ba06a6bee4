"""The course of the demo: the reference, then the ranks, then the report."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from weft import settings
from weft.collectives import cost
from weft.demo import report
from weft.demo.model import Llama
from weft.demo.train import Run, TrainingLog, train
from weft.launch import cores, launch


def run_demo(run: Run, ranks: int, out: Path) -> report.Comparison:
    """Train both ways, one after the other so that each has the machine, and report.

    Raises:
        RankError: a rank raised, died or hung.
    """
    out.mkdir(parents=True, exist_ok=True)
    console = Console()
    load = cost.load_a_core()
    parameters = sum(p.numel() for p in Llama(run.shape).parameters())
    console.print(
        f"a Llama of {parameters / 1e6:.2g} M parameters, {run.steps} steps of "
        f"{run.tokens_per_step} bytes of the Python standard library, on {run.device}"
    )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=console) as progress:

        def trained(name: str, world_size: int) -> list[TrainingLog]:
            task = progress.add_task(f"{name:<22}", total=run.steps, loss="-")

            def advance(event: tuple[int, float]) -> None:
                progress.update(task, completed=event[0], loss=f"{event[1]:.3f}")

            return launch(
                world_size,
                train,
                run,
                device=run.device,
                threads=max(1, cores() // world_size),
                on_progress=advance,
                stall_s=settings.timeout_s() + 60,  # a rank that waits in vain says so before
            )

        (reference,) = trained("reference, one process", 1)
        results = trained(f"weft, {ranks} ranks", ranks)
    comparison = report.Comparison(run, parameters, reference, results, load)
    report.write_comparison(comparison, out)

    from weft.demo import picture  # matplotlib takes a second to import

    picture.draw_comparison(comparison, out / "demo.png")
    report.print_comparison(comparison, console)
    console.print(f"written to {out}: demo.png, report.json, explain.txt, text.txt")
    return comparison
