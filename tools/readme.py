"""`python -m tools.readme`: write the README's table from the kept results."""

from __future__ import annotations

from pathlib import Path

from weft.bench.rows import Case, Result, geometric_mean
from weft.markdown import between_marks, markdown_lines

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = ("torch alone", "weft", "weft DTensor", "torch DTensor")


def table(results: Path = ROOT / "bench" / "results") -> str:
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
            [_row(case) for case in mlp.cases],
        ),
        "",
        f"{_collectives(collectives.cases)} {_loss(loss.cases)}",
    ]
    return "\n".join(lines)


def _row(case: Case) -> list[str]:
    bound, fraction, gain = case.bound_us, case.fraction("weft"), case.gain
    if bound is None or fraction is None or gain is None:
        raise ValueError(f"the case {case.name} of bench/results/mlp.json is not complete")
    times = [bound, *(case.variants[name].us for name in COLUMNS)]
    cells = [f"{us / 1e3:.1f}" for us in times]
    return [case.name, *cells, f"{1 / fraction:.2f}", f"{gain.median:.2f}"]


def _collectives(cases: list[Case]) -> str:
    gains = _gains(cases)
    return (
        f"Collectives, {_size(cases[0])} to {_size(cases[-1])} a rank: {geometric_mean(gains):.1f} "
        f"times as quick as Gloo (geometric mean, {min(gains):.1f} at worst)."
    )


def _loss(cases: list[Case]) -> str:
    mean = geometric_mean(_gains(cases))
    return f"Cross-entropy of sharded logits: {mean:.1f} times as quick as torch's DTensor."


def _gains(cases: list[Case]) -> list[float]:
    return [case.gain.median for case in cases if case.gain is not None]


def _size(case: Case) -> str:
    return case.name.partition(" ")[2]


def main() -> None:
    """Replace what is between the markers."""
    path = ROOT / "README.md"
    path.write_text(between_marks(path.read_text(), "bench", table()))
    print(f"wrote the table in {path.name}")


if __name__ == "__main__":
    main()
