"""Files of measured rates and of tuned launches that are garbage."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path

from command_line import odd_file

from weft.collectives import cost
from weft.collectives import kept_files as files
from weft.kernels.engine import kernel_rates, tuning
from weft.kernels.engine.chips import Tiling

_EACH = 50
_TUNED = {
    "entries": [
        {
            "op": "all_gather_matmul", "M": 8192, "N": 4096, "K": 4096, "dtype": "bfloat16", "W": 8,
            "choice": {"tiling": {each.name: 64 for each in fields(Tiling)}},
        },
    ]
}  # fmt: skip
_RATES = {"entries": [{**dict.fromkeys(kernel_rates.Tile._fields, 64), "rate": 0.5}]}


def kept_files(chance: random.Random, folder: Path) -> Iterator[None]:
    rates = json.dumps(asdict(cost.typical("cpu"))).encode()
    tables = {
        kernel_rates.load: json.dumps(_RATES).encode(),
        tuning.load: json.dumps(_TUNED).encode(),
    }
    os.environ["WEFT_CACHE_DIR"] = str(folder)
    try:
        for i in range(_EACH):
            name, made = f"rates{i}.json", odd_file(chance, rates)
            (folder / name).write_bytes(made)
            kept = files.load(name, cost.Machine.__dataclass_fields__)
            if kept is not None:
                between = [rate for row in kept.pop("between", []) for rate in row]
                numbers = [*kept.pop("flops").values(), *between, *kept.values()]
                assert all(0 <= number < math.inf for number in numbers), kept
            for load, like in tables.items():
                suffix = ".rates.json" if load is kernel_rates.load else ".json"
                path = folder / f"chip{i}{suffix}"
                path.write_bytes(odd_file(chance, like))
                try:
                    for choice in load(str(folder), f"chip{i}").values():
                        numbers = [choice]
                        if isinstance(choice, tuning.Choice):
                            tiling = asdict(choice.tiling) if choice.tiling else {}
                            numbers = [*tiling.values(), choice.copy_programs or 0]
                        assert all(0 <= number < math.inf for number in numbers), numbers
                except ValueError as error:
                    assert str(path) in str(error) and "again with" in str(error), error
            yield
    finally:
        del os.environ["WEFT_CACHE_DIR"]
