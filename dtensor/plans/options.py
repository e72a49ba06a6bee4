"""What a node may do on one mesh dim, given how its inputs are placed, and what that takes.

    linear      colwise      w Shard(0)    x R, or Shard(row) that is gathered  ->  Shard(-1), R
                rowwise      w Shard(1)    x Shard(-1), or R that is cut        ->  P, R, Shard(row)
                replicated   w R           x R or Shard(row)                    ->  as x
    embedding   likewise, by vocabulary (rowwise) or features (colwise)
    attention   by batch, by heads, or by sequence: ring or Ulysses, as weft decides
    op          what weft's DTensors make of it without moving anything
    module      its result is brought to another layout by a hook on its way out

A price has forward and backward. The gradient of a replicated tensor that a colwise linear reads is
a sum over ranks: it is reduced once, with the first reader, and scattered if the tensor was
gathered by a hook.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from weft.collectives.protocols import Collective
from weft.dtensor.dispatch.call import Meta
from weft.dtensor.layout.placements import is_shard, shard_dim
from weft.dtensor.plans.bills import Bill, DataParallel, Option, Value
from weft.dtensor.plans.graph import Graph, ModelNode, nbytes
from weft.dtensor.plans.prices import FusedOp, Prices
from weft.dtensor.plans.propagation import Propagation
from weft.dtensor.rules.attention import RING, ULYSSES

R, SUM = Replicate(), Partial("sum")
# Ops that keep none of their inputs for backward, and those that keep their result instead.
_KEEPS_NOTHING = {
    "add", "sub", "neg", "sum", "mean", "cat", "stack", "to", "_to_copy", "clone", "dropout",
    "where", "masked_fill", "index", "gather", "scatter", "pad", "constant_pad_nd",
}  # fmt: skip
_KEEPS_RESULT = {"softmax", "_softmax", "log_softmax", "exp", "sigmoid", "tanh", "relu", "rsqrt"}
_PRODUCTS = {"matmul", "mm", "bmm", "addmm", "baddbmm", "linear"}
_NO_OPS = {"input", "param", "constant", "output"}
_LARGE = 64 << 20  # bytes at which a collective's rate counts, not its latency


class NodeOptions:
    """The options of a graph's nodes along one mesh dim of `ranks` ranks.

    Args:
        gather_output: whether the model returns whole tensors, rather than what it comes to.
    """

    def __init__(
        self,
        graph: Graph,
        ranks: int,
        prices: Prices,
        device_type: str,
        data: DataParallel,
        *,
        gather_output: bool,
    ) -> None:
        self.graph, self.ranks, self.prices, self.data = graph, ranks, prices, data
        self.gather_output = gather_output
        self.propagation = Propagation(ranks, device_type)
        self.kept = set(_kept(graph))
        self.rate = lru_cache(maxsize=None)(self._rate)
        self._known: dict[Any, list[Option]] = {}

    def _rate(self, op: Collective, group: DataParallel) -> float:
        """us a byte, of large ones."""
        if group.ranks == 1:
            return 0.0
        price = self.prices.group_us if group == self.data else self.prices.collective_us
        us = (price(op, n * _LARGE, group.ranks, group.stride) for n in (2, 1))
        return (next(us) - next(us)) / _LARGE

    def of(self, node: ModelNode, values: Sequence[Value]) -> list[Option]:
        """What `node` may do with inputs placed like this (one a `Ref`; of a list its items)."""
        key = node.index, tuple(values)
        if key not in self._known:
            found = [self._dispatched(node, option) for option in self._find(node, values)]
            # One rank has nothing to cut: what replicates all comes first.
            self._known[key] = found[:1] if self.ranks == 1 else found
        return self._known[key]

    def _dispatched(self, node: ModelNode, option: Option) -> Option:
        """With what the host takes where tensors are DTensors: without a gradient, a third."""
        prices = self.prices
        if self.ranks == 1 or not (prices.op_us or prices.meet_us) or node.kind in _NO_OPS:
            return option
        meets = len(option.ops) - option.ops.count("|")
        own = prices.op_us * (1 if node.needs_grad else 1 / 3)
        return option._replace(us=option.us + own + meets * prices.meet_us)

    def _find(self, node: ModelNode, values: Sequence[Value]) -> Iterator[Option]:
        if node.kind == "linear":
            return self._linear(node, values[0])
        if node.kind == "embedding":
            return self._embedding(node, values[0])
        if node.kind == "attention":
            return self._attention(node, values)
        if node.kind == "op":
            return self._op(node, values)
        if node.kind == "output":
            return self._output(node, values)
        return self._source(node)

    # ---- sizes

    def part(self, meta: Meta, placement: Placement) -> tuple[int, ...]:
        """The shape of a rank's part, of the largest."""
        shape = list(meta.shape)
        if is_shard(placement):
            dim = shard_dim(placement)
            shape[dim] = -(-shape[dim] // self.ranks)
        return tuple(shape)

    def part_bytes(self, meta: Meta, placement: Placement) -> float:
        """Bytes of a rank's part."""
        return math.prod(self.part(meta, placement)) * meta.dtype.itemsize

    def rows(self, meta: Meta) -> list[Placement]:
        """The shards along all dims but the last that are even."""
        return [Shard(d) for d, n in enumerate(meta.shape[:-1]) if n and n % self.ranks == 0]

    def _save(self, bill: Bill, node: ModelNode, values: Sequence[Value]) -> None:
        """What a node's own result adds to what is kept for backward."""
        if node.index in self.kept:
            for meta, value in zip(node.metas, values, strict=True):
                if meta.dtype.is_floating_point or meta.dtype.is_complex:
                    bill.nbytes += self.part_bytes(meta, value.placement)

    # ---- nodes

    def _source(self, node: ModelNode) -> Iterator[Option]:
        if node.kind == "constant":
            yield Bill(self).option(*[Value(R)] * len(node.metas))
            return
        meta = node.meta
        if node.kind == "input":
            yield Bill(self).option(Value(R))
            shards = range(len(meta.shape) - (1 if meta.dtype.is_floating_point else 0))
            for dim in shards:
                if meta.shape[dim] % self.ranks == 0:
                    yield Bill(self).option(Value(Shard(dim)), found=Shard(dim))
            return
        weight = _weight(node)
        placements: list[Placement] = [R]
        if weight.ndim > 1:
            placements += [Shard(d) for d, n in enumerate(weight.shape) if n % self.ranks == 0]
        for placement in placements:
            bill = Bill(self)
            bill.weight(weight, placement, summed=False)  # its readers know
            yield bill.option(Value(placement), placed=(placement,), found=placement)

    def _linear(self, node: ModelNode, x: Value) -> Iterator[Option]:
        (ref,) = node.refs
        source, weight = self.graph.nodes[ref], _weight(node)
        (N, K), meta, W = weight.shape, source.metas[0], self.ranks
        M, dtype, last = math.prod(meta.shape[:-1]), meta.dtype, len(meta.shape) - 1
        need_x, need_w = source.needs_grad, weight.requires_grad
        at, size = x.placement, nbytes(meta)
        is_row = is_shard(at) and shard_dim(at) != last
        rows = M / W if is_row else M

        def placed(placement: Placement) -> tuple[Placement, ...]:
            """Of the weight, and of the bias, which has no dim 1."""
            bias = R if placement == Shard(1) else placement
            return tuple(placement if w.ndim > 1 else bias for w in node.weights.values())

        def bill(placement: Placement, *, summed: bool = False) -> Bill:
            made = Bill(self)
            for each, own in zip(node.weights.values(), placed(placement), strict=True):
                made.weight(each, own, summed=summed)
            return made

        def made(bill: Bill, value: Value, way: str, found: Placement, **rest: Any) -> Option:
            self._save(bill, node, [value])
            weights = {"colwise": Shard(0), "rowwise": Shard(1)}.get(way, R)
            return bill.option(value, way=way, placed=placed(weights), found=found, **rest)

        if at == R or is_row:
            whole = bill(R, summed=is_row)
            whole.matmul(rows, N, K, dtype)
            if need_w:
                whole.matmul(N, K, rows, dtype)
            if need_x:
                whole.matmul(rows, K, N, dtype)
            yield made(whole, Value(at), "replicated", at)
        if N % W == 0 and (at == R or is_row):
            columns, paid = bill(Shard(0)), tuple[tuple[int, Value], ...]()
            if need_w:
                columns.matmul(N / W, K, M, dtype)
            if is_row:
                columns.fused("all_gather_matmul", M, N / W, K, dtype, backward=False)
                if need_x:
                    columns.fused("matmul_reduce_scatter", M, K, N / W, dtype, backward=True)
            else:
                columns.matmul(M, N / W, K, dtype)
                if need_x:
                    paid = self._summed_gradient(columns, source, ref, x, (M, K, N / W))
            for keep in (True, False) if is_row and need_w else (True,):
                other = columns.copy()
                if is_row and keep:
                    other.nbytes += size
                elif is_row:
                    other.collective("all_gather", size, backward=True)
                cut, whole = other.copy(), other
                rest = {"paid": paid, "keep_gathered": keep}
                yield made(cut, Value(Shard(last)), "colwise", Shard(last), **rest)
                whole.collective("all_gather", nbytes(node.meta), backward=False)
                yield made(whole, Value(R, "gathered"), "colwise", Shard(last), **rest)
        if K % W == 0 and at in (R, Shard(last)):
            sums = bill(Shard(1))
            if need_w:
                sums.matmul(N, K / W, M, dtype)
            if at == R and need_x:
                sums.collective("all_gather", size, backward=True)
            for target in (SUM, R, *self.rows(node.meta)):
                if target == SUM and len(node.weights) > 1:
                    continue  # a bias is added once
                row = sums.copy()
                if target == SUM:
                    row.matmul(M, N, K / W, dtype)
                else:
                    op: FusedOp = "matmul_all_reduce" if target == R else "matmul_reduce_scatter"
                    row.fused(op, M, N, K / W, dtype, backward=False)
                if is_shard(target) and (need_x or need_w):
                    if need_x:
                        row.fused("all_gather_matmul", M, K / W, N, dtype, backward=True)
                    else:
                        row.collective("all_gather", nbytes(node.meta), backward=True)
                elif need_x:
                    row.matmul(M, K / W, N, dtype)
                yield made(row, Value(target), "rowwise", SUM)

    def _summed_gradient(
        self, bill: Bill, source: ModelNode, ref: int, x: Value, sizes: tuple[float, float, float]
    ) -> tuple[tuple[int, Value], ...]:
        """The gradient of a replicated x, a sum: the product, and its reduction once."""
        dtype, size = source.metas[0].dtype, nbytes(source.metas[0])
        if x.grad == "summed":
            bill.matmul(*sizes, dtype)
            return ()
        scattered = x.grad == "gathered"
        if source.readers == 1:
            op: FusedOp = "matmul_reduce_scatter" if scattered else "matmul_all_reduce"
            bill.fused(op, *sizes, dtype, backward=True)
        else:  # the readers' sums are added up first
            bill.matmul(*sizes, dtype)
            bill.collective("reduce_scatter" if scattered else "all_reduce", size, backward=True)
        return ((ref, Value(R, "summed")),)

    def _embedding(self, node: ModelNode, index: Value) -> Iterator[Option]:
        weight, out = _weight(node), node.meta
        size, W, last = nbytes(out), self.ranks, len(out.shape) - 1
        trained = weight.requires_grad

        def bill(placement: Placement, at: Placement) -> Bill:
            made = Bill(self)
            made.weight(weight, placement, summed=is_shard(at))
            part = math.prod(self.part(out, at)) * out.dtype.itemsize
            table = weight.numel() * out.dtype.itemsize / (W if is_shard(placement) else 1)
            made.memory(2 * part + (table + part if trained else 0))
            return made

        def option(bill: Bill, way: str, found: Placement, value: Value) -> Option:
            placement = {"colwise": Shard(1), "rowwise": Shard(0)}.get(way, R)
            self._save(bill, node, [value])
            return bill.option(value, way=way, placed=(placement,), found=found)

        at = index.placement
        yield option(bill(R, at), "replicated", at, Value(at))
        if at != R:
            return
        for target in self.rows(out):
            cut = bill(R, R)
            if trained:
                cut.collective("all_gather", size, backward=True)
            yield option(cut, "replicated", R, Value(target))
        for way, divided, found in (
            ("rowwise", weight.shape[0], SUM),
            ("colwise", weight.shape[1], Shard(last)),
        ):
            if divided % W:
                continue
            for target in (R, *self.rows(out)):
                moved = bill(Shard(0) if way == "rowwise" else Shard(1), R)
                if way == "rowwise":
                    op: Collective = "all_reduce" if target == R else "reduce_scatter"
                    moved.collective(op, size, backward=False)
                    if target != R and trained:
                        moved.collective("all_gather", size, backward=True)
                elif target == R:
                    moved.collective("all_gather", size, backward=False)
                else:
                    moved.collective("all_to_all", size / W, backward=False)
                    if trained:
                        moved.collective("all_to_all", size / W, backward=True)
                yield option(moved, way, found, Value(target))

    def _attention(self, node: ModelNode, values: Sequence[Value]) -> Iterator[Option]:
        metas = [self.graph.nodes[ref].metas[0] for ref in node.refs]
        given = [(m, v.placement) for m, v in zip(metas, values, strict=True)]
        bound = dict(zip(("mask", "dropout", "is_causal"), node.args[3:], strict=False))
        bound |= node.kwargs
        causal, gqa = bool(bound.get("is_causal")), bool(bound.get("enable_gqa"))
        mask = given[3] if len(given) > 3 else None
        chosen = self.propagation.attention(given[:3], mask, causal, gqa)
        if chosen is None or len(metas[0].shape) != 4:
            if all(value.placement == R for value in values):
                yield from self._op(node, values)
            return
        bill, out = Bill(self), chosen.outputs[0][0]
        batch, heads, queries, width = self.part(metas[0], out)
        keys = metas[1].shape[2]
        way = "" if chosen.way is None else chosen.way.name
        if way == ULYSSES:
            heads, queries = heads // self.ranks, queries * self.ranks
        sizes, dtype = (batch, heads, queries, keys, width), metas[0].dtype
        trains = node.needs_grad
        held = self.part_bytes(metas[0], out) + self.part_bytes(metas[1], out)
        gathered = float(nbytes(metas[1]) + nbytes(metas[2]))
        for backward in (False, True) if trains else (False,):
            us = self.prices.attention_us(sizes, dtype, causal=causal, backward=backward)
            names = bill.backward if backward else bill.forward
            if way == RING:  # keys and values travel while they are attended to; then gradients too
                op: Collective = "all_reduce" if backward else "all_gather"
                moved = self.prices.collective_us(op, gathered, self.ranks)
                if causal:  # the last rank has twice the average to do
                    us *= 2 - 1 / self.ranks
                bill.us += max(us, moved) if self.prices.overlaps else us + moved
                names.append(RING)
            elif way == ULYSSES:
                moved = self.prices.collective_us("all_to_all", 2 * held, self.ranks)
                bill.us += us + moved * (2 if backward else 1)
                names.append(ULYSSES)
            else:
                bill.us += us
        self._save(bill, node, [Value(out)])
        yield bill.option(Value(out), way=way, found=out)

    def _op(self, node: ModelNode, values: Sequence[Value]) -> Iterator[Option]:
        given: list[tuple[Meta, Placement]] = []
        each = iter(values)
        for ref in node.refs:
            source = self.graph.nodes[ref]
            given += [(meta, next(each).placement) for meta in source.metas]
        results = self.propagation.results(node, given)
        if results is None or len(results) != len(node.metas):
            return
        bill = Bill(self)
        if node.base == node.index:
            read = sum(self.part_bytes(meta, p) for meta, p in given)
            written = sum(self.part_bytes(m, p) for m, p in zip(node.metas, results, strict=True))
            bill.memory(read + written + (2 * read + written if node.needs_grad else 0))
        if node.name in _PRODUCTS and len(given) >= 2:
            self._product(bill, node, given, results[0])
        self._gradients(bill, node, given, results)
        if len(results) > 1 or node.several or not node.exits or not node.metas[0].shape:
            found = [Value(p) for p in results]
            self._save(bill, node, found)
            yield bill.option(*found, found=results[0])
            return
        yield from self._placed_by_hook(bill, node, results[0])

    def _product(
        self, bill: Bill, node: ModelNode, given: list[tuple[Meta, Placement]], out: Placement
    ) -> None:
        first = given[1 if node.name in ("addmm", "baddbmm") else 0]  # a summand comes before
        K = self.part(*first)[-1]
        sizes = self.part(node.metas[0], out)
        M, N = math.prod(sizes[:-1]), sizes[-1] if sizes else 1
        passes = [(M, N, K), (M, K, N), (N, K, M)] if node.needs_grad else [(M, N, K)]
        for each in passes:
            bill.matmul(*each, first[0].dtype)

    def _gradients(
        self,
        bill: Bill,
        node: ModelNode,
        given: list[tuple[Meta, Placement]],
        results: tuple[Placement, ...],
    ) -> None:
        """Of replicated inputs of which each rank has used a part: their gradients are sums."""
        if not results or results[0] == R or not node.needs_grad:
            return
        sources = [n for ref in node.refs for n in [self.graph.nodes[ref]] for _ in n.metas]
        for source, (meta, placement) in zip(sources, given, strict=True):
            if placement != R or not source.needs_grad:
                continue
            if source.kind == "param":
                bill.us += nbytes(meta) * self.rate("all_reduce", DataParallel(self.ranks))
                bill.backward.append("all_reduce")
            else:
                alike = meta.shape == node.metas[0].shape and is_shard(results[0])
                op: Collective = "all_gather" if alike else "all_reduce"
                bill.collective(op, nbytes(meta), backward=True)

    def _placed_by_hook(self, bill: Bill, node: ModelNode, found: Placement) -> Iterator[Option]:
        """The result of a module, as it comes and in each layout that a hook may bring it to."""
        meta, trains = node.metas[0], node.needs_grad
        size = nbytes(meta)

        def option(bill: Bill, value: Value) -> Option:
            self._save(bill, node, [value])
            return bill.option(value, found=found)

        yield option(bill.copy(), Value(found))
        if not meta.dtype.is_floating_point:
            return
        if found != R:
            whole = bill.copy()
            whole.collective(
                "all_gather" if is_shard(found) else "all_reduce", size, backward=False
            )
            yield option(whole, Value(R, "gathered" if is_shard(found) else ""))
        for target in self.rows(meta) if not is_shard(found) else ():
            cut = bill.copy()
            if found == SUM:
                cut.collective("reduce_scatter", size, backward=False)
            if trains:
                cut.collective("all_gather", size, backward=True)
            yield option(cut, Value(target))

    def _output(self, node: ModelNode, values: Sequence[Value]) -> Iterator[Option]:
        bill, each = Bill(self), iter(values)
        for ref in node.refs:
            for meta in self.graph.nodes[ref].metas:
                at = next(each).placement
                if is_shard(at) and self.gather_output:
                    bill.collective("all_gather", nbytes(meta), backward=False)
                elif isinstance(at, Partial):
                    bill.collective("all_reduce", nbytes(meta), backward=False)
        yield bill.option()


def _weight(node: ModelNode) -> torch.Tensor:
    return next(iter(node.weights.values()))  # a module's own comes before its bias


def _kept(graph: Graph) -> Iterator[int]:
    """The nodes whose results are kept for backward, by the memory that they are in."""
    nodes = graph.nodes
    for node in nodes:
        if not node.needs_grad:
            continue
        if node.kind in ("linear", "attention"):
            yield from (nodes[ref].base for ref in node.refs)
        if node.kind == "attention" or node.name in _KEEPS_RESULT:
            yield node.index
        elif node.kind == "op" and node.base == node.index and node.name not in _KEEPS_NOTHING:
            for ref in node.refs:
                others = [nodes[other].needs_grad for other in node.refs if other != ref]
                if node.name != "mul" or any(others):
                    yield nodes[ref].base
