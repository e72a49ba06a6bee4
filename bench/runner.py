"""Runs suites on ranks: a row for each case, whatever happens to it.

    this process    picks the cases, shows progress, keeps each case as it is finished
    the ranks       prepare a case, check it, time it (`measure`); rank 0 sends it

A rank that dies or hangs fails the current case; new ranks go on with the next one.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from weft import settings
from weft.bench.environment import environment
from weft.bench.measure import TimedRanks, run_case, short
from weft.bench.problem import Options, Spec, Suite
from weft.bench.rows import Case, Result
from weft.launch import RankError, launch

if TYPE_CHECKING:
    from rich.console import Console


Around = Callable[[int], AbstractContextManager[Any]]


def run_suites(
    suites: Sequence[Suite],
    options: Options,
    *,
    command: str = "",
    console: Console | None = None,
    on_result: Callable[[Result], None] = lambda result: None,
    on_case: Callable[[Case], None] = lambda case: None,
    on_begin: Callable[[str], None] = lambda name: None,
    wanted: Callable[[Suite, Spec], bool] = lambda suite, spec: True,
    around: Around = nullcontext,
) -> list[Result]:
    """Run suites, those of one process last; Ctrl-C keeps what is finished.

    Args:
        command: the command line that made the results, kept in them.
        console: where progress is shown; stderr if None.
        on_result: called with the result of each suite that has ended.
        on_case: called with each case that has ended.
        on_begin: called with the name of each case that begins.
        wanted: which cases to run; all by default.
        around: what a rank does all its work in; can be pickled.
    """
    results: list[Result] = []
    with _progress(console) as progress:
        try:
            for world, ranks in (("ranks", options.ranks), ("one", 1)):
                some = [suite for suite in suites if world == suite.WORLD]
                todo = [
                    (suite, spec)
                    for suite in some
                    for spec in suite.cases(options)
                    if options.filter in spec.name and wanted(suite, spec)
                ]
                told = on_result, on_case, on_begin
                _Run(todo, ranks, options, command, progress, results, *told, around).until_done()
        except KeyboardInterrupt:
            if not results:  # before the first case
                raise
            results[-1].interrupted = True
            on_result(results[-1])
    return results


def _progress(console: Console | None) -> Any:
    """A bar that shows how far a run is, on stderr unless told; without rich, errors alone."""
    try:
        from rich import console as terminal
        from rich import progress as bars
    except ModuleNotFoundError:
        return nullcontext(_NoBar())
    return bars.Progress(
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TextColumn("{task.fields[case]}"),
        bars.TimeElapsedColumn(),
        bars.TextColumn("left"),
        bars.TimeRemainingColumn(),
        console=console or terminal.Console(stderr=True),
        transient=True,
    )


class _NoBar:
    """What a run needs of a bar."""

    console = SimpleNamespace(print=lambda text, **style: print(text, file=sys.stderr))

    def add_task(self, *args: Any, **kwargs: Any) -> None: ...

    def update(self, *args: Any, **kwargs: Any) -> None: ...

    def remove_task(self, *args: Any) -> None: ...


@dataclass
class _Run:
    """Cases that share one set of ranks, which is replaced when it breaks."""

    todo: Sequence[tuple[Suite, Spec]]
    ranks: int
    options: Options
    command: str
    progress: Any
    results: list[Result]
    on_result: Callable[[Result], None]
    on_case: Callable[[Case], None]
    on_begin: Callable[[str], None]
    around: Around
    done: int = 0

    def until_done(self) -> None:
        """Run all cases; raises nothing but KeyboardInterrupt."""
        if not self.todo:
            return
        self.task = self.progress.add_task("", total=len(self.todo), case="")
        self.current = self._begin(self.todo[0][0])
        os.environ.update(_KEEP_FREED_MEMORY)  # read by malloc when the ranks' processes start
        while self.done < len(self.todo):
            try:
                launch(
                    self.ranks,
                    _cases_on_rank,
                    [(_module_name(suite), spec) for suite, spec in self.todo[self.done :]],
                    self.options,
                    self.around,
                    device=self.options.device,
                    threads=self.options.threads if self.ranks > 1 else 1,
                    on_progress=self._hear,
                    # A single process has no peers to wait for, and its work may take long.
                    stall_s=settings.timeout_s() + 60 if self.ranks > 1 else 900,
                )
            except RankError as error:
                suite, spec = self.todo[self.done]
                params = spec.params | {"ranks": self.ranks}
                self.progress.console.print(str(error), markup=False, highlight=False)
                self._keep(Case(suite.NAME, spec.name, params, failure=short(str(error))))
        self.progress.remove_task(self.task)

    def _hear(self, event: tuple[str, Any]) -> None:
        kind, value = event
        if kind == "case":
            self.progress.update(self.task, case=value)
            self.on_begin(value)
        elif kind == "done":
            self._keep(Case.from_dict(value))

    def _begin(self, suite: Suite) -> Result:
        where = environment(self.ranks, self.options.device, self.options.threads)
        self.results.append(Result(suite.NAME, where, command=self.command))
        self.progress.update(self.task, description=suite.NAME)
        return self.results[-1]

    def _keep(self, case: Case) -> None:
        self.current.cases.append(case)
        self.on_case(case)
        self.done += 1
        self.progress.update(self.task, advance=1)
        following = self.todo[self.done][0] if self.done < len(self.todo) else None
        if following is None or self.current.suite != following.NAME:
            self.on_result(self.current)
            if following is not None:
                self.current = self._begin(following)


# By its heuristics glibc may return large freed blocks to the system. Getting them back costs up to
# a fifth of a step in page faults, so ranks keep them.
_KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
}


def _module_name(suite: Suite) -> str:
    name: str = suite.__name__  # type: ignore[attr-defined] # suites are modules
    return name


def _cases_on_rank(
    rank: int,
    progress: Callable[[Any], None],
    todo: Sequence[tuple[str, Spec]],
    options: Options,
    around: Around,
) -> None:
    # torch renames its own collectives: nothing that the user of a benchmark could change.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    torch.manual_seed(0)
    ranks = TimedRanks(options, progress)
    with around(rank):
        for module, spec in todo:
            suite: Any = importlib.import_module(module)
            progress(("case", spec.name))
            progress(("done", run_case(suite, spec, options, ranks).as_dict()))
