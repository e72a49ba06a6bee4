"""What a result means, in sentences: which engine to use, and how close it is to the limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from weft.bench.report.tables import result_table
from weft.bench.rows import Case, Ratio, Result, geometric_mean
from weft.bench.suites import ops, plan
from weft.kernels.engine.tuning import OPS

# What limits a case, as its reader can act on it.
_LIMITS = {
    "arithmetic": "the multiplications themselves",
    "memory": "reading and writing the operands",
    "link": "fetching what the peers hold",
    "signal": "telling the peers and hearing from them",
}


def advice(result: Result) -> list[str]:
    """Conclusions in sentences, for a reader with a decision to make."""
    lines = list(result_table(result).summary)
    if result.suite == "ops":
        for op in OPS:
            lines += _of_op(op, [c for c in result.cases if c.params.get("op") == op and c.timed])
        lines.append(str(ops.engines_verdict(result.cases)))
    if result.suite == "plan" and (told := plan.plan_verdict(result.cases)):
        lines.append(told)
    limits = Counter(case.bound_by for case in result.cases if case.bound_by)
    if limits:
        kinds = [f"{_LIMITS[name]} in {count}" for name, count in limits.most_common()]
        lines.append(f"What sets the limit, of {sum(limits.values())} cases: {', '.join(kinds)}.")
    return lines


def _of_op(op: str, cases: Sequence[Case]) -> list[str]:
    if not cases:
        return []
    chosen = Counter(best_engine(case) for case in cases)
    quickest = ", ".join(f"{name} in {count}" for name, count in chosen.most_common() if name)
    line = f"{op}: the quickest engine is {quickest} of {len(cases)} cases"
    if gains := [(case, gain) for case in cases if (gain := fusion_pays(case)) is not None]:
        pays = sum(gain.low > 1 for _, gain in gains)
        loses = [case for case, gain in gains if gain.high < 1]
        line += f"; against weft's generic engine fusion pays in {pays} of {len(gains)}"
        if loses:
            largest = max(case.params["M"] for case in loses)
            line += f", costs time in {len(loses)} (all at M <= {largest})"
        if unclear := len(gains) - pays - len(loses):
            line += f", and the noise is wider than the difference in {unclear}"
    fractions = [f for case in cases if (f := best_fraction(case)) is not None]
    if fractions:
        line += f". The quickest reaches {geometric_mean(fractions):.2f} of the bound"
    return [line + "."]


def best_engine(case: Case) -> str:
    """The fastest of weft's engines that was timed."""
    forced = [name for name in ops.ENGINES[1:] if name in case.timed]
    return min(forced, key=lambda name: case.timed[name].us, default="")


def best_fraction(case: Case) -> float | None:
    """The fraction of the bound that the fastest of weft's engines reaches."""
    name = best_engine(case)
    return case.fraction(name) if name else None


def fusion_pays(case: Case | None) -> Ratio | None:
    """Time of the engine without fusion / time of the fastest one with it."""
    if case is None or "generic" not in case.timed:
        return None
    fused = [name for name in ("host", "triton") if name in case.timed]
    if not fused:
        return None
    return case.ratio("generic", min(fused, key=lambda name: case.timed[name].us))
