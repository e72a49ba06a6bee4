"""The pass: collectives beside matmuls become fused ops, all others stay as they are.

    all_gather -> [split, cat] -> [reshape] -> mm, addmm, ..       in `gathers`
    mm, + mm, .. -> [reshape] -> [split, cat] -> reduce_scatter    in `sums`
    mm -> [reshape] -> all_reduce -> [add -> norm]                 in `sums`, `norms`
    several of these sums that are only added up                   in `merging`
    all_gather -> SDPA, and its gradient -> reduce_scatter         in `attention`
    the three all_reduces of a cross-entropy                       in `losses`
    all_to_all -> .. -> grouped mm -> .. -> all_to_all             in `gathers`

It works on graphs of aten ops after autograd, forward and backward alike: the gradient of a matmul
whose result was scattered is a matmul of what is gathered, and stands in the graph as one. What the
forward keeps for the backward has been chosen before, and does not change.

The engine of a fused op is chosen when it runs, as in eager calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.fx import Graph, Node

from weft.errors import WeftError
from weft.kernels.graphs.attention import fuse_attention
from weft.kernels.graphs.chains import c10d, once
from weft.kernels.graphs.gathers import fuse_exchange, fuse_gather
from weft.kernels.graphs.losses import fuse_loss
from weft.kernels.graphs.merging import merge_sums
from weft.kernels.graphs.receipts import Receipt, Receipts, collective_of, receipt_of
from weft.kernels.graphs.sums import Outcome, fuse_scatter, reduce


class MissedFusionError(WeftError):
    """A collective beside a matmul was not fused, and `strict` was asked for."""


def rewrite(graph: Graph, *, strict: bool = False, joint: bool = False) -> Receipts:
    """Put fused ops in the place of collectives and matmuls, in place.

    Args:
        graph: of aten ops, whose nodes have fake tensors as `meta["val"]`.
        joint: whether it is a forward and its backward that are still to be cut: only what must be
            rewritten in both at once is, and told of.
        strict: whether a collective that stays, though a matmul makes or takes what it moves, is an
            error.

    Raises:
        MissedFusionError: `strict`, and there is one; all others have been rewritten.
    """
    missed: list[Receipt] = []
    found, beside_attention = fuse_attention(graph)
    if joint:
        return Receipts(found)
    found += fuse_loss(graph)
    gathered, summed = once(graph), merge_sums(graph)
    receipts = {n: receipt_of(n, "", "no op takes it") for n in graph.nodes if collective_of(n)}
    outcomes: dict[Node, Outcome] = {}
    for node, receipt in receipts.items():
        if not node._erased:
            handler = _HANDLERS.get(node.target)
            outcomes[node] = handler(graph, node) if handler else ("", receipt.why, False)
    for node, receipt in receipts.items():
        name, (fused, why, beside) = receipt.collective, outcomes.get(node, ("", "", True))
        if not fused and node._erased:
            if node.target is not c10d.all_gather_into_tensor.default:
                continue  # nothing used it
            fused, why = "all_gather_matmul", "the scales of its rows"
        if not fused and node in beside_attention:
            why, beside = beside_attention[node], True
        receipt = replace(receipt, fused=fused, why=why)
        found.append(receipt)
        size = receipt.shape
        for line in gathered.get(node, ()):
            instead = fused or "all_gather"
            found.append(Receipt(name, size, instead, "the same is gathered once", line))
        for line in summed.get(node, ()):
            found.append(Receipt(name, size, fused, "added up before, and moved once", line))
        if beside and not fused:
            missed.append(receipt)
    if any(each.fused for each in found):
        graph.lint()
    if strict and missed:
        raise MissedFusionError(
            "collectives beside matmuls were not fused, which strict=True asks for:\n"
            + "\n".join(map(str, missed))
        )
    return Receipts(found)


_HANDLERS: dict[Any, Callable[[Graph, Node], Outcome]] = {
    c10d.all_gather_into_tensor.default: fuse_gather,
    c10d.reduce_scatter_tensor.default: fuse_scatter,
    c10d.all_reduce.default: reduce,
    c10d.all_to_all_single.default: fuse_exchange,
}
