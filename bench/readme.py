"""`python -m weft.bench.readme`: write the README's table from the kept results."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = ("arithmetic", "torch alone", "weft", "weft DTensor", "torch DTensor")


def _read(suite: str) -> dict[str, Any]:
    path = ROOT / "bench" / "results" / f"{suite}.json"
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def table() -> str:
    """The lines between the README's markers."""
    mlp, collectives = _read("mlp"), _read("collectives")
    where = mlp["environment"]
    lines = [
        "Forward + backward of a column/row-parallel ReLU MLP, fp32, sequence-sharded input and "
        "output,",
        f"{where['ranks']} ranks on {where['cores']} cores ({where['cpu']}, "
        f"torch {where['torch']}), in ms, by `make bench`. *arithmetic*: a rank's",
        "matmuls alone; *torch alone*: the same by nn.Linear; *torch DTensor*: on Gloo.",
        "",
        f"| tokens x hidden x ffn | {' | '.join(COLUMNS)} | weft / arithmetic | torch / weft |",
        "| --- |" + " ---: |" * (len(COLUMNS) + 2),
    ]
    for case in mlp["cases"]:
        times = " | ".join(f"{case['us'][name] / 1e3:.1f}" for name in COLUMNS)
        bound, gain = case["ratios"]["weft/arithmetic"], case["ratios"]["torch DTensor/weft"]
        lines.append(f"| {case['name']} | {times} | {bound:.2f} | {gain:.2f} |")
    gains = [math.log(case["ratios"]["gloo/weft"]) for case in collectives["cases"]]
    worst = math.exp(min(gains))
    lines += [
        "",
        f"Collectives, 1 KiB to 64 MiB a rank: {math.exp(sum(gains) / len(gains)):.1f} times "
        f"faster than Gloo (geometric mean, {worst:.1f} at worst).",
    ]
    return "\n".join(lines)


def main() -> None:
    """Replace what is between the markers."""
    path = ROOT / "README.md"
    text = re.sub(
        r"(<!-- bench -->\n).*(<!-- /bench -->)",
        lambda found: f"{found[1]}{table()}\n{found[2]}",
        path.read_text(),
        flags=re.DOTALL,
    )
    path.write_text(text)
    print(f"wrote the table in {path.name}")


if __name__ == "__main__":
    main()
