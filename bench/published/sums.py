"""Collectives, norms, and sums with a norm behind them."""

from __future__ import annotations

import re
from collections.abc import Callable

from weft.bench.published.rows import (
    InexpressibleError,
    Row,
    op_words,
    row_bytes,
    row_hardware,
)
from weft.bench.published.times import Kind, Time, has, is_library, row_fabric
from weft.collectives import protocols
from weft.collectives.prices import library
from weft.collectives.prices.hardware import Hardware
from weft.collectives.protocols import HOST_US, Collective, Fabric
from weft.kernels.engine.engines import collective_config_on


def collective_time(op: Collective) -> Callable[[Row, Hardware], Time]:
    """One collective alone."""

    def time(row: Row, hardware: Hardware) -> Time:
        fabric, nbytes = row_fabric(row, hardware), row_bytes(row)
        kind, us, how = stated_collective(row, op, nbytes, fabric)
        wire = protocols.wire_bytes(op, nbytes, row.ranks)
        return Time(kind, us, how, bus_bytes=wire)

    return time


def is_in_graph(row: Row) -> bool:
    """Serving engines capture their own kernels, and time them so."""
    return re.search(r"graph|custom|stage|mscclpp|quick|trt|tensorrt", row.text) is not None


def stated_collective(
    row: Row, op: Collective, nbytes: float, fabric: Fabric
) -> tuple[Kind, float, str]:
    """The time of the collective that a row's words name, and how it runs."""
    in_graph, own = is_in_graph(row), has(row, r"triton|\bfused|mscclpp|quick|weft")
    kind: Kind = "fused" if own else "library"
    if has(row, r"multimem|nvls"):
        us = protocols.switch_us(op, nbytes, fabric, in_graph=in_graph)
        return kind, us, f"{op} by the switch"
    if fabric.hosts > 1 and not is_library(row):
        raise InexpressibleError("kernels' collectives span one host")
    if op == "all_reduce":
        one = protocols.one_shot_us(nbytes, fabric, in_graph=in_graph)
        two = protocols.two_shot_us(nbytes, fabric, in_graph=in_graph)
        if has(row, r"one[- ]?(shot|stage)|1[- ]?(shot|stage)"):
            return kind, one, "one shot"
        if has(row, r"two[- ]?(shot|stage)|2[- ]?(shot|stage)"):
            return kind, two, "two shots"
        if own:  # weft's, as `auto` launches it
            config = collective_config_on(row_hardware(row), op, round(nbytes), fabric.ranks)
            two_shot, by_words = config.two_shot, config.by_words
            us = protocols.kernel_us(op, nbytes, fabric, two_shot=two_shot, by_words=by_words)
            return kind, us + HOST_US * (not in_graph), protocols.shots_in_words(two_shot, by_words)
        if has(row, r"custom"):
            return kind, min(one, two), "the shorter of one and two shots"
    if is_library(row):
        return "library", protocols.nccl_us(op, nbytes, fabric), "the best of NCCL's protocols"
    rate = fabric.port * protocols.KERNEL_SHARE
    us = protocols.KERNEL_US + HOST_US * (not in_graph)
    us += protocols.wire_bytes(op, nbytes, fabric.ranks) / rate
    return "fused", us, "one kernel that stores in its peers' memory"


_NORM_US = 2.3  # of a kernel on a few rows. [fit]


def _norm_us(row: Row, hardware: Hardware, rows: int, width: int, passes: int) -> float:
    return _NORM_US + library.moved_us(hardware, passes * rows * width * row.itemsize)


def norm_time(row: Row, hardware: Hardware) -> Time:
    """One GPU's norm, of all rows or of a part."""
    rows, width = row.sizes("M", "N")
    part = re.search(r"1\s*/\s*(\d+) of (the )?rows", row.text)
    rows = -(-rows // int(part[1])) if part and int(part[1]) else rows
    passes = 4 if "residual" in row.text else 2
    us = HOST_US + _norm_us(row, hardware, rows, width, passes)
    return Time("library", us, f"{passes} passes over {rows} rows")


def sum_and_norm_time(row: Row, hardware: Hardware) -> Time:
    """all_reduce + residual + norm; or reduce-scatter, norm of a part, all-gather."""
    M, N = row.sizes("M", "N")
    fabric, nbytes = row_fabric(row, hardware), float(M * N * row.itemsize)
    floor = re.search(r"about (\d+) us floor", row.text)
    extra = float(floor[1]) if floor else 0.0
    in_graph = bool(floor) or is_in_graph(row)
    apart = op_words(row.op).startswith("reduce_scatter")
    part = _norm_us(row, hardware, -(-M // row.ranks) if apart else M, N, 4)
    if is_library(row):
        if apart:
            us = part + sum(
                protocols.switch_us(op, nbytes, fabric, in_graph=True)
                if has(row, r"multimem|nvls") else protocols.nccl_us(op, nbytes, fabric)
                for op in ("reduce_scatter", "all_gather")
            )  # fmt: skip
            return Time("library", us, "reduce-scatter, norm, all-gather one after another")
        _, us, how = stated_collective(row, "all_reduce", nbytes, fabric)
        return Time("library", us + part + extra, f"{how}, then a norm")
    kind, us, how = _fused_sum(row, nbytes, fabric, in_graph)
    return Time(kind, us + extra, f"{how}, the norm within")


def _fused_sum(row: Row, nbytes: float, fabric: Fabric, in_graph: bool) -> tuple[Kind, float, str]:
    if has(row, r"multimem|nvls"):
        us = protocols.switch_us("all_reduce", nbytes, fabric, in_graph=in_graph)
        return "fused", us, "all_reduce by the switch"
    one = protocols.one_shot_us(nbytes, fabric, in_graph=in_graph)
    two = protocols.two_shot_us(nbytes, fabric, in_graph=in_graph)
    if has(row, r"one[- ]?shot"):
        return "fused", one, "one shot"
    return "fused", two if has(row, r"two[- ]?shot") else min(one, two), "the shorter of the shots"
