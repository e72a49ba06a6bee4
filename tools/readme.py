"""`python -m tools.readme`: write the README's table from the kept results."""

from __future__ import annotations

from pathlib import Path

from weft.bench.rows import Case, Result, geometric_mean
from weft.kernels.engine.tuning import OPS
from weft.markdown import between_marks, markdown_lines

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = ("torch alone", "weft", "weft DTensor", "torch DTensor")


def readme_figures(results: Path = ROOT / "bench" / "results") -> str:
    """The lines between the README's markers."""
    names = ("mlp", "collectives", "loss")
    mlp, collectives, loss = (Result.read(results / f"{name}.json") for name in names)
    where = mlp.environment
    lines = [
        "Forward + backward of a column/row-parallel ReLU MLP, fp32, sequence-sharded input and "
        "output,",
        f"{where['ranks']} ranks on {where['cores']} cores ({where['cpu']}, "
        f"torch {where['torch']}), in ms, by `make bench`. *arithmetic*: a rank's",
        "matmuls alone; *torch alone*: the same by nn.Linear; *torch DTensor*: on Gloo.",
        "",
        *markdown_lines(
            ("tokens x hidden x ffn", "arithmetic", *COLUMNS, "weft / arithmetic", "torch / weft"),
            [_mlp_row(case) for case in mlp.cases],
        ),
        "",
        f"{_collectives(collectives.cases)} {_loss(loss.cases)}",
        *_gpu_lines(results),
    ]
    return "\n".join(lines)


def _mlp_row(case: Case) -> list[str]:
    bound, fraction, gain = case.bound_us, case.fraction("weft"), case.gain
    if bound is None or fraction is None or gain is None:
        raise ValueError(f"the case {case.name} of bench/results/mlp.json is not complete")
    times = [bound, *(case.variants[name].us for name in COLUMNS)]
    cells = [f"{us / 1e3:.1f}" for us in times]
    return [case.name, *cells, f"{1 / fraction:.2f}", f"{gain.median:.2f}"]


def _collectives(cases: list[Case]) -> str:
    gains = _median_gains(cases)
    first, last = _size_label(cases[0]), _size_label(cases[-1])
    return (
        f"Collectives, {first} to {last} a rank: {geometric_mean(gains):.1f} "
        f"times as quick as Gloo (geometric mean, {min(gains):.1f} at worst)."
    )


def _loss(cases: list[Case]) -> str:
    mean = geometric_mean(_median_gains(cases))
    return f"Cross-entropy of sharded logits: {mean:.1f} times as quick as torch's DTensor."


def _gpu_lines(results: Path) -> list[str]:
    """A line for each chip that `make gpu` has measured: ours beside the quickest library."""
    lines = []
    for record in sorted(results.glob("*.outcomes.jsonl")):
        chip = record.name.partition(".")[0]
        files = [results / f"{chip}{kind}.json" for kind in ("", ".solo")]
        runs = [Result.read(file) for file in files if file.exists()]
        groups: dict[tuple[str, str], list[Case]] = {}
        for case in (case for run in runs for case in run.cases):
            if (what := _figure_kind(case)) and case.gain is not None:
                groups.setdefault((what, case.peer), []).append(case)
        told = [
            f"{what.format(rows=min(case.params.get('M', 0) for case in cases))} at "
            f"{_gain_range(_median_gains(cases))} of {_LIBRARY.get(peer, peer)}"
            for (what, peer), cases in groups.items()
        ]
        name = runs[0].environment["gpus"][0]["name"]
        lines.append(
            f"One rank on one {name}, bf16, speed relative to the quickest library: "
            f"{', '.join(told)} ([what ran, and what has not](docs/gpu.md))."
        )
    return lines


_LIBRARY = {"torch.mm": "cuBLAS"}


def _figure_kind(case: Case) -> str:
    """What a figure of one rank is of ({rows}: the fewest); empty if the README tells of none."""
    p = case.params
    if p.get("dtype") != "bfloat16" or p.get("epilogue"):
        return ""
    if case.suite == "matmul":
        return "matmuls from {rows} rows" if p["M"] >= 1024 else "matmuls of fewer rows"
    if case.suite == "local attention":
        return f"attention {p['step']}"
    if case.suite != "solo" or p["op"] not in OPS or p["M"] < 1024 or p["ranks"] != 8:
        return ""
    return "fused matmuls from {rows} rows, as one rank of 8,"


def _gain_range(gains: list[float]) -> str:
    low, high = f"{min(gains):.2f}", f"{max(gains):.2f}"
    return low if low == high else f"{low} to {high}"


def _median_gains(cases: list[Case]) -> list[float]:
    return [case.gain.median for case in cases if case.gain is not None]


def _size_label(case: Case) -> str:
    return case.name.partition(" ")[2]


def main() -> None:
    """Replace what is between the markers."""
    path = ROOT / "README.md"
    path.write_text(between_marks(path.read_text(), "bench", readme_figures()))
    print(f"wrote the table in {path.name}")


if __name__ == "__main__":
    main()
