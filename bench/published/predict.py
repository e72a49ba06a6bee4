"""What the model says a published figure should be.

    library   what a user has: `weft.collectives.prices.library` and `weft.collectives.protocols`
    fused     weft's own kernel, in the place of the one that was measured, by
              `weft.kernels.engine.fused_times`
              for matmuls, the protocols' one shot, two shots or switch for collectives

A family of ops has a function; the words of a row's `what` choose among implementations.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from weft.bench.published import experts
from weft.bench.published.attention import attention_time, ring_time
from weft.bench.published.matmuls import (
    feed_forward_time,
    fused_matmul_time,
    independent_time,
    matmul_time,
)
from weft.bench.published.rows import InexpressibleError, Row, op_words, row_hardware
from weft.bench.published.sums import collective_time, norm_time, sum_and_norm_time
from weft.bench.published.times import Kind, Time
from weft.collectives.prices.hardware import Hardware


@dataclass(frozen=True)
class Prediction:
    """Of a row: `predicted`, in its unit, and `error`; or `why` there is none.

    `how` is the formula in words, with the times (us) of its parts.
    """

    row: Row
    kind: Kind | None = None
    predicted: float | None = None
    how: str = ""
    why: str = ""

    @property
    def expressible(self) -> bool:
        """Whether the model says something."""
        return self.predicted is not None

    @property
    def error(self) -> float | None:
        """Relative; None where nothing is predicted."""
        return None if self.predicted is None else self.predicted / self.row.published - 1


def prediction_of(row: Row) -> Prediction:
    """The prediction; never raises."""
    try:
        row.published  # noqa: B018 - raises where it is no number
        for pattern, why in _BEYOND:
            if re.search(pattern, f"{row.op.lower()}; {row.text}"):
                raise InexpressibleError(why)
        op = op_words(row.op)
        family = next((call for pattern, call in _FAMILIES if re.fullmatch(pattern, op)), None)
        if family is None:
            raise InexpressibleError(f"no model of the op {row.op!r}")
        hardware = row_hardware(row)
        time = family(row, hardware)
        return Prediction(row, time.kind, _in_unit(row, time), time.how)
    except InexpressibleError as reason:
        return Prediction(row, why=str(reason))
    except (ValueError, ArithmeticError) as error:  # the model's own limits
        return Prediction(row, why=str(error))


# Implementations whose algorithm neither a library's model nor weft has.
_BEYOND = (
    (r"double tree", "weft has no double tree of its own"),
    (r"\bint[48]\b|\bfp4\b|quick-?reduce int", "sums that travel quantized to so few bits"),
    (r"^(?!.*\bmoe\b).*mega ?(kernel|triton)", "a kernel of a whole layer"),
    (r"varlen|packed", "the lengths of the documents are not stated"),
)


_UNITS = {"us": 1.0, "usec": 1.0, "ms": 1e-3, "msec": 1e-3, "s": 1e-6, "sec": 1e-6, "ns": 1e3}


def _in_unit(row: Row, time: Time) -> float:
    unit = row.unit.lower().replace(" ", "").replace("µ", "u").replace("μ", "u")
    scale = _UNITS.get(unit)
    if scale is not None:
        return time.us * scale
    per_us = {"tflop/s": 1e6, "tflops": 1e6, "tflops/s": 1e6, "gflop/s": 1e3, "pflop/s": 1e9}
    if unit in per_us and time.flops:
        return time.flops / time.us / per_us[unit]
    if unit in ("gb/s", "gbps") and time.bus_bytes:
        return time.bus_bytes / time.us / 1e3
    if re.fullmatch(r"x(of)?\(?(torch|cublas)\+nccl\)?|xtorch|x", unit) and time.library_us:
        return time.library_us / time.us
    raise InexpressibleError(f"no prediction in {row.unit or 'a unit that is not stated'!r}")


_FAMILIES: tuple[tuple[str, Callable[[Row, Hardware], Time]], ...] = (
    (r"all_gather", collective_time("all_gather")),
    (r"reduce_scatter", collective_time("reduce_scatter")),
    (r"all_reduce", collective_time("all_reduce")),
    (r"all_to_all", collective_time("all_to_all")),
    (r"matmul", matmul_time),
    (r"(fused[ _])?all_gather[ _+-]*matmul", fused_matmul_time("all_gather_matmul")),
    (r"(fused[ _])?matmul[ _+-]*reduce_scatter", fused_matmul_time("matmul_reduce_scatter")),
    (r"(fused[ _])?matmul[ _+-]*all_reduce", fused_matmul_time("matmul_all_reduce")),
    (r"independent matmul beside all_gather", independent_time),
    (
        r"mlp (= all_gather\+matmul, swiglu, matmul\+reduce_scatter|with all_reduce)",
        feed_forward_time,
    ),
    (r"moe (dispatch|combine|all_to_all)(, low latency)?", experts.exchange_time),
    (r"moe layer0: .*", experts.expert_matmul_time),
    (r"moe (dispatch[ _+-]*matmul.*combine|layer, decode)", experts.expert_layer_time),
    (r"rms_norm", norm_time),
    (r"reduce_scatter[ _+-]*rms_norm[ _+-]*all_gather", sum_and_norm_time),
    (r"all_reduce[ _+-]*(residual)?[ _+-]*rms_norm", sum_and_norm_time),
    (r"ring[ _-]attention.*", ring_time),
    (
        r"((flash|fused|scaled dot[- ]product|local)[ _-]?)?attention.*|sdpa.*|fa-?[23]\b.*",
        attention_time,
    ),
)
