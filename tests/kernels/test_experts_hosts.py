"""Experts of a group over several hosts: the tests of one host, on ranks that pretend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from test_experts import CASES, Problem, compiled_layer, layer, rows_alone
from test_hosts import QUICK, on_hosts

import weft
from weft.kernels import route
from weft.kernels.experts import across

OPS = {"dispatch_grouped_matmul", "grouped_matmul_combine"}


def engines_of(case: dict[str, Any]) -> set[str]:
    """Those that a layer runs on, which is right in all it gives."""
    told = weft.explain(lambda: layer(case | {"engine": "auto"}))
    return {each.engine for each in told if each.op in OPS}


def layers_body(layout: str) -> None:
    with on_hosts(layout):
        for name, case in CASES.items():
            tokens = case["tokens"][: len(layout)]  # type: ignore[index]
            engines = engines_of(case | {"tokens": tokens})
            assert engines == {"hosts" if any(tokens) else "generic"}, (name, engines)


@pytest.mark.parametrize(
    "layout", ["AAB", *(pytest.param(each, marks=pytest.mark.slow) for each in ("BABA", "ABBB"))]
)
def test_a_layer_against_a_loop_over_tokens(ranks: Any, layout: str) -> None:
    """Uneven hosts in any order, every kind of route, every gradient, and again bit for bit."""
    ranks(len(layout), layers_body, layout)


def shared_body(layout: str, engine: str) -> None:
    with on_hosts(layout):
        case = {"tokens": (5, 0, 3, 4), "tp": 2, "kind": "padding", "k": 3}
        assert engines_of(case) == {engine}


@pytest.mark.parametrize("layout, engine", [("AABB", "hosts"), ("ABAB", "generic")])
def test_experts_that_several_ranks_share(ranks: Any, layout: str, engine: str) -> None:
    """In two levels where these are on one host."""
    ranks(4, shared_body, layout, engine)


def others_body(layout: str) -> None:
    with on_hosts(layout):
        rows_alone("auto")
        if len(layout) == 2:
            compiled_layer("auto")


@pytest.mark.parametrize("layout", [pytest.param("AB", marks=pytest.mark.slow), "ABB"])
def test_rows_alone_and_graphs(ranks: Any, layout: str) -> None:
    ranks(len(layout), others_body, layout)


def crossing_body(layout: str) -> None:
    """Of k experts on the other host, a token crosses once, and its sum comes back once."""
    with on_hosts(layout):
        rank, crossed, begun = dist.get_rank(), [], across.OnTheWay

        def counting(x: torch.Tensor, *rest: Any) -> Any:
            if x.is_floating_point():
                crossed.append((len(x), x.dtype))
            return begun(x, *rest)

        told = Problem({"tokens": (6, 3, 4, 5), "k": 8, "E": 4, "dtype": torch.bfloat16}, 4)
        experts, _ = told.own(rank)
        x, ids = told.xs[rank].requires_grad_(), told.ids[rank]
        routing = route(ids, told.E)
        with patch.object(across, "OnTheWay", counting):
            h, _ = weft.dispatch_grouped_matmul(x, routing, told.gate[experts])
            y = weft.grouped_matmul_combine(h, told.down[experts], None, routing)
            y.backward(told.dys[rank])
        hosts = [*dict.fromkeys(layout)]
        leave = sum(
            any(layout[e] == host for e in row)
            for host in hosts
            if host != layout[rank]
            for row in ids.tolist()
        )
        come = sum(
            any(layout[e] == layout[rank] for e in row)
            for source, theirs in enumerate(told.ids)
            if layout[source] != layout[rank]
            and [r for r in range(4) if layout[r] == layout[rank]].index(rank)
            == [r for r in range(4) if layout[r] == layout[source]].index(source)
            for row in theirs.tolist()
        )
        assert crossed == [(n, torch.bfloat16) for n in (leave, come, leave, come)]


def test_a_token_crosses_once_a_host(ranks: Any) -> None:
    ranks(4, crossing_body, "ABAB")


def chosen_body() -> None:
    """Where a token has one expert it crosses as often in one level, which waits less."""
    for k, engine in (1, "generic"), (6, "hosts"):
        with on_hosts("AABB", rates=replace(QUICK, between_us=150.0, wire_us=100.0)):
            x, w = torch.ones(400, 64), torch.ones(1, 64, 32)
            ids = torch.arange(400 * k).view(400, k) % 4
            told = weft.explain(weft.dispatch_grouped_matmul, x, ids, w)
            mine = [each for each in told if each.op in OPS]
            assert [each.engine for each in mine] == [engine], mine


def test_the_way_is_chosen_by_price(ranks: Any) -> None:
    ranks(4, chosen_body)
