"""What `make gpu` shows of its outcomes: lines as cases end, a page, figures, and their copies."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.gpu.steps import STEPS
from weft.bench.environment import environment
from weft.bench.report.tables import LEGEND, figure, result_table, times_of
from weft.bench.rows import Case, Result
from weft.bench.solo import page as solo_page
from weft.kernels.engine import tuning
from weft.markdown import markdown_lines

_Found = Mapping[tuple[str, str], Mapping[str, Any]]
_ATTENTION = ("flash", "cuDNN")
_RAISED = re.compile(r"[\w.]*(Error|Exception|Timeout|Interrupt)\b")  # what a traceback ends with
_NEAR = 0.5  # a bound tells nothing of a problem of which the library reaches less than this


def where(device: str) -> dict[str, Any]:
    """What a slice runs on."""
    found = environment(1, device, 1)
    name = found["gpus"][0]["name"] if found["gpus"] and device == "cuda" else "cpu"
    return found | {"chip": re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")}


def status(code: int) -> str:
    """An exit status in words."""
    return signal.Signals(-code).name if code < 0 else f"status {code}"


def repeating(step: str, case: str, device: str, quick: bool) -> str:
    """The command that runs a case alone."""
    if step == "solo" and " without " not in case:
        W = case.split()[-2]
        more = [*(["--device", "cpu"] if device == "cpu" else []), *(["--quick"] if quick else [])]
        return shlex.join(
            ["python", "-m", "weft", "bench", "solo", *more, "--ranks", W, "--filter", case]
        )
    command = ["python", "-m", "tools.gpu", "--only", step, "--case", case]
    command += [*(["--device", "cpu"] if device == "cpu" else []), *(["--quick"] if quick else [])]
    return shlex.join([*command, "--out", "out/again"])


def outcome_lines(entry: Mapping[str, Any], device: str, quick: bool) -> str:
    """The lines that tell of the end of a case."""
    text = f"{entry['step']}: {entry['case']}: {entry['outcome']}, {entry['seconds']:.1f} s"
    if "row" in entry:
        text += f": {times_of(Case.from_dict(entry['row']))}"
    elif "tuned" in entry:
        text += f": {search_line(entry['tuned'])}"
    elif entry["outcome"] in ("skipped", "cut"):
        text += f": {entry['why']}"
    if entry["outcome"] != "failed":
        return text + "\n"
    lines = [text, *(f"    {line}" for line in entry["why"].splitlines()[-30:])]
    lines += [f"    launched last by {each}" for each in entry.get("launches", ())]
    lines.append(f"    again: {repeating(entry['step'], entry['case'], device, quick)}")
    return "\n".join(lines) + "\n"


def search_line(entry: Mapping[str, Any]) -> str:
    """What a search of launches has found."""
    failed = f", {len(entry['failed'])} of which failed" if entry["failed"] else ""
    choice = entry["choice"] or "the heuristic's"
    return (
        f"{entry['us']:.0f} us, heuristic {entry['heuristic_us']:.0f} us, of {entry['tried']} "
        f"launches{failed}: {choice}"
    )


def write_gpu_page(folder: Path, runs: Sequence[Mapping[str, Any]], found: _Found) -> None:
    """`figures.json`, `solo.json`, the kernels' rates and `page.md`, anew."""
    from weft.bench.solo import rates

    here = dict(runs[-1])
    # Figures of another chip are measured again.
    kept = {key: entry for key, entry in found.items() if _is_of(here, *key, entry)}
    rows = [_figure_case(entry) for entry in kept.values() if "row" in entry]
    cases = [case for case in rows if case.suite != "solo"]
    solo = _parts_merged([case for case in rows if case.suite == "solo"])
    here["ranks"] = max([case.params.get("ranks", 1) for case in cases], default=1)
    result = Result("gpu", here, cases, command="python -m tools.gpu")
    if cases:
        result.write(folder / "figures.json")
    if solo:
        Result("solo", here | {"ranks": 1}, solo, command=result.command).write(
            folder / "solo.json"
        )
        rates.write_rates(folder, solo)
    (folder / "page.md").write_text(gpu_page(folder, runs, kept, result))


def _figure_case(entry: Mapping[str, Any]) -> Case:
    """A figure, ours beside the quickest that a user has without weft."""
    case = Case.from_dict(dict(entry["row"]))
    case.beside_quickest([name for name in case.variants if name in _ATTENTION])
    peer = case.fraction(case.peer) if case.peer in case.timed else None
    if peer is not None and peer < _NEAR:
        case.bounds.clear()
    return case


def _is_of(run: Mapping[str, Any], step: str, case: str, entry: Mapping[str, Any]) -> bool:
    return not STEPS[step].figures or entry.get("chip") == run["chip"]


def _parts_merged(cases: Sequence[Any]) -> list[Any]:
    """One for each name, with what kernels without a part take beside the others."""
    made: dict[str, Any] = {}
    for case in cases:
        if case.name in made:
            made[case.name].variants |= case.variants
        else:
            made[case.name] = case
    return list(made.values())


def gpu_page(folder: Path, runs: Sequence[Mapping[str, Any]], found: _Found, result: Any) -> str:
    """All that is known, as Markdown."""
    here = runs[-1]
    gpu = here["gpus"][0] if here["gpus"] else {"name": here["cpu"]}
    told = [
        f"{max(1, len(here['gpus']))} x {gpu['name']}",
        *(f"{name} {gpu[key]}" for name, key in _OF_GPU.items() if key in gpu),
        *(f"{name} {here[name]}" for name in ("torch", "triton")),
        f"Python {here['python']}",
    ]
    lines = [
        "# What ran on a GPU",
        "",
        f"{', '.join(told)}. `make gpu` wrote this page: what its steps do, and how to run them, "
        "is in [bench.md](bench.md#on-a-gpu). Ranks that share a chip are proven there, against "
        "oracles in float64, and never timed; steps that have not run prove nothing.",
        "",
        *_step_lines(found),
        *_slices(runs),
        *_proven(runs, found),
        *_failures(found),
        *solo_page.solo_lines(folder / "solo.json"),
        *_tuned(found),
    ]
    for suite in dict.fromkeys(case.suite for case in result.cases):
        cases = [case for case in result.cases if case.suite == suite]
        table = result_table(Result(suite, result.environment, cases))
        lines += ["", f"## {suite}", "", *markdown_lines(table.header, table.rows), ""]
        lines += [f"- {line}" for line in (*table.summary, *table.notes)]
    if result.cases:
        lines += ["", f"{LEGEND} Every time is of a result that was right."]
    lines += _origins(runs, found)
    return "\n".join(lines) + "\n"


_OF_GPU = {"memory": "memory.total", "driver": "driver_version"}


def _step_lines(found: _Found) -> list[str]:
    rows = []
    for step in STEPS.values():
        ends = [entry for (of, _), entry in found.items() if of == step.name]
        kinds = [entry["outcome"] for entry in ends]
        counts = [str(kinds.count(kind) or "") for kind in ("passed", "failed", "skipped", "cut")]
        seconds = sum(entry["seconds"] for entry in ends)
        rows.append([step.name, step.about, *counts, figure(seconds) if ends else "not run"])
    header = ["step", "what", "passed", "failed", "skipped", "cut", "seconds"]
    return markdown_lines(header, rows, texts=2)


def _slices(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [
        [run["date"].replace("T", " ")[:16], run["commit"] or "-", run.get("sources", "-")]
        for run in runs
    ]
    return ["", *markdown_lines(["slice, UTC", "commit", "digest of the sources"], rows, texts=3)]


def _outcome_commit(runs: Sequence[Mapping[str, Any]], entry: Mapping[str, Any]) -> str:
    """The commit that an outcome is of."""
    of = entry.get("sources")
    return next((str(run["commit"]) for run in runs if of and run.get("sources") == of), "") or "-"


def _listed(names: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"- {of}: {', '.join(each)}" for of, each in names.items()]


def _proven(runs: Sequence[Mapping[str, Any]], found: _Found) -> list[str]:
    """What was right, by step, by how its calls were made, and by commit."""
    names: dict[str, list[str]] = {}
    for (step, case), entry in found.items():
        if entry["outcome"] == "passed" and step in ("proof", "threads", "processes"):
            way, _, call = case.rpartition("/")
            of = f"{' '.join(filter(None, (step, way)))}, commit {_outcome_commit(runs, entry)}"
            names.setdefault(of, []).append(call)
    return ["", "## What was right", "", *_listed(names)] if names else []


def _origins(runs: Sequence[Mapping[str, Any]], found: _Found) -> list[str]:
    """Which commit each figure is of."""
    names: dict[str, list[str]] = {}
    for (_, case), entry in found.items():
        if "row" in entry:
            names.setdefault(_outcome_commit(runs, entry), []).append(case)
    if not names:
        return []
    return ["", "Figures by commit; kernels may have changed since:", "", *_listed(names)]


def _tuned(found: _Found) -> list[str]:
    lines = [
        f"- {case}: {search_line(entry['tuned'])}"
        for (_, case), entry in found.items()
        if "tuned" in entry
    ]
    return ["", "## Tuned launches", "", *lines] if lines else []


def _failures(found: _Found) -> list[str]:
    lines: list[str] = []
    for (step, case), entry in found.items():
        if entry["outcome"] == "failed":
            why = entry["why"].strip().splitlines() or [""]
            last = [line for line in why if _RAISED.match(line)][-1:] or why[-1:]
            lines += [f"- **{step}, {case}**: {last[0]}"]
            lines += [f"  - launched last by {each}" for each in entry.get("launches", ())]
    skipped: dict[str, list[str]] = {}
    for (step, case), entry in found.items():
        if entry["outcome"] == "skipped":
            skipped.setdefault(entry["why"], []).append(f"{step} {case}")
    told = [f"- {', '.join(cases)}: {why}" for why, cases in skipped.items()]
    return [
        *(["", "## What failed", "", *lines] if lines else []),
        *(["", "## What was skipped", "", *told] if told else []),
    ]


def publish_results(folder: Path, root: Path) -> None:
    """Copy what a run has found to where the repository keeps it.

    Not the kernels' rates, by which `auto` chooses: of a few cases they would be no more than that.
    """
    lines = (folder / "outcomes.jsonl").read_text().splitlines()
    chip = next(json.loads(line)["run"]["chip"] for line in lines if line.startswith('{"run"'))
    results = root / "bench" / "results"
    for name, to in {
        "figures.json": results / f"{chip}.json",
        "solo.json": results / f"{chip}.solo.json",
        "outcomes.jsonl": results / f"{chip}.outcomes.jsonl",
        "page.md": root / "docs" / "gpu.md",
    }.items():
        if (folder / name).exists():
            shutil.copyfile(folder / name, to)
            print(f"wrote {to}")
    own = root / "kernels" / "tuned"
    for table in (*folder.glob("sm_*.json"), *folder.glob("gfx*.json")):
        if not table.name.endswith(".rates.json"):  # what is tuned for other problems stays
            own.mkdir(exist_ok=True)
            entries = json.loads(table.read_text())["entries"]
            tuning.write(own / table.name, table.name.removesuffix(".json"), entries)
            print(f"wrote {own / table.name}")
