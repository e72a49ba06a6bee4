"""Fits the constants of libraries to one half of the published rows, as their modules say.

    python -m tools.published_fit       prints each constant as it is, and what fits best

Each constant in turn moves by a few per cent for as long as the mean |log(predicted / published)|
over the library rows of the half falls: `Row.is_fitted_on`. The other half is only looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, cast

from weft.bench.published import matmuls, sums
from weft.bench.published.predict import prediction_of
from weft.bench.published.rows import SHIPPED, Row, read_rows
from weft.collectives import protocols
from weft.collectives.prices import hardware, library


class FittedConstant(NamedTuple):
    """One number of the model, and how to change it."""

    name: str
    value: float
    put: Callable[[float], None]


def constants() -> Iterator[FittedConstant]:
    """All that are marked [fit]."""
    for module, name in (
        (protocols, "CALL_US"),
        (protocols, "_NVLS_CALL_US"),
        (protocols, "KERNEL_US"),
        (protocols, "HOST_US"),
        (protocols, "KERNEL_SHARE"),
        (protocols, "SECOND_SHOT_US"),
        (library, "UNDER_POWER"),
        (library, "_POWER_EXPONENT"),
        (library, "_WAVES_SAVED"),
        (library, "_HBM_SHARE"),
        (matmuls, "_EAGER_US"),
        (library, "_CHUNK_HOST_US"),
        (library, "_CHUNK_US"),
        (sums, "_NORM_US"),
    ):
        yield FittedConstant(name, getattr(module, name), _setter(module, name))
    for place, protocol in enumerate(protocols.PROTOCOLS[1:], 1):
        for field in ("hop_us", "share"):
            yield FittedConstant(f"{('LL', 'LL128', 'Simple')[place]}.{field}",
                           getattr(protocol, field), _field(place, field))  # fmt: skip
    for ops in (("all_gather", "reduce_scatter"), ("all_reduce",)):
        yield FittedConstant(f"SWITCH_SHARE {ops[0]}", protocols.SWITCH_SHARE[ops[0]], _shares(ops))
    for names in (("b200", "b300", "gb200-nvl72"), ("mi300x", "mi308x", "mi355x")):
        value = hardware.PRESETS[names[0]].link_reached
        yield FittedConstant(f"link_reached of {names[0]}", value, _reached(names))


def _setter(module: Any, name: str) -> Callable[[float], None]:
    return lambda value: setattr(module, name, value)


def _field(place: int, field: str) -> Callable[[float], None]:
    def put(value: float) -> None:
        made = list(protocols.PROTOCOLS)
        made[place] = replace(made[place], **cast(Any, {field: value}))
        protocols.PROTOCOLS = tuple(made)

    return put


def _shares(ops: tuple[str, ...]) -> Callable[[float], None]:
    return lambda value: protocols.SWITCH_SHARE.update(dict.fromkeys(ops, value))


def _reached(names: tuple[str, ...]) -> Callable[[float], None]:
    def put(value: float) -> None:
        for name in names:
            hardware.PRESETS[name] = replace(hardware.PRESETS[name], link_reached=value)

    return put


def loss(rows: list[Row]) -> float:
    """Mean |log error| of library rows."""
    made = [prediction_of(row) for row in rows]
    errors = [e.error for e in made if e.error is not None and e.kind == "library"]
    return sum(abs(math.log1p(error)) for error in errors) / len(errors)


def main() -> None:
    """Run the command line."""
    rows = read_rows(SHIPPED)
    halves = [[row for row in rows if row.is_fitted_on is fitted] for fitted in (True, False)]
    print(f"mean |log error|: {loss(halves[0]):.4f} fitted on, {loss(halves[1]):.4f} held out")
    values = {each.name: each for each in constants()}
    best = loss(halves[0])
    for step in (0.1, 0.05, 0.02):
        for _ in range(3):
            for name, each in values.items():
                for factor in (1 + step, 1 / (1 + step)):
                    tried = each.value * factor
                    each.put(tried)
                    if (now := loss(halves[0])) < best - 1e-6:
                        best, values[name] = now, each._replace(value=tried)
                        break
                    each.put(each.value)
    for name, found in values.items():
        print(f"{name:<28} {found.value:.4g}")
    print(f"mean |log error|: {best:.4f} fitted on, {loss(halves[1]):.4f} held out")


if __name__ == "__main__":
    main()
