"""torch.compile(model, backend="weft"): torch's Inductor, with the pass among its own.

The pass: collectives beside matmuls become fused ops, all others stay as they are.

    all_gather -> [split, cat] -> [reshape] -> mm, addmm, ..       in `gathers`
    mm, + mm, .. -> [reshape] -> [split, cat] -> reduce_scatter    in `sums`
    mm -> [reshape] -> all_reduce -> [add -> norm]                 in `sums`, `norms`
    several of these sums that are only added up                   in `merging`
    all_gather -> SDPA, and its gradient -> reduce_scatter         in `attention`
    the three all_reduces of a cross-entropy                       in `losses`
    all_to_all -> [order] -> grouped mm -> [order] -> all_to_all   in `experts`

It works on graphs of aten ops after autograd, forward and backward alike: the gradient of a matmul
whose result was scattered is a matmul of what is gathered, and stands in the graph as one. What the
forward keeps for the backward has been chosen before, and does not change. The engine of a fused op
is chosen when it runs, as in eager calls.

pyproject.toml names `weft` as a backend of torch's, so that torch finds it by its name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import CodeType
from typing import Any, cast

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule, Node

from weft.errors import WeftError
from weft.kernels.graphs.attention import fuse_attention
from weft.kernels.graphs.building import as_functional
from weft.kernels.graphs.chains import c10d, once
from weft.kernels.graphs.experts import fuse_exchange, fuse_experts
from weft.kernels.graphs.gathers import fuse_gather
from weft.kernels.graphs.losses import fuse_loss
from weft.kernels.graphs.merging import merge_sums
from weft.kernels.graphs.receipts import (
    Receipt,
    Receipts,
    collective_of,
    keep_receipts,
    receipt_of,
)
from weft.kernels.graphs.sums import Outcome, fuse_scatter, reduce

_HOOKS = {"joint_custom_pre_pass": True, "post_grad_custom_pre_pass": False}


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
    more, moved_alone = fuse_experts(graph)
    found += more
    if joint:
        return Receipts(found)
    of_vllm = as_functional(graph)
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
        if node in moved_alone:
            why = f"{why}: {moved_alone[node]}"
        receipt = replace(receipt, fused=fused, why=why)
        found.append(receipt)
        size = receipt.shape
        for line in gathered.get(node, ()):
            instead = fused or "all_gather"
            found.append(Receipt(name, size, instead, "the same is gathered once", line))
        for line in summed.get(node, ()):
            found.append(Receipt(name, size, fused, "added up before, and moved once", line))
        if node in moved_alone or (beside and not fused):
            missed.append(receipt)
    for call in of_vllm:
        call.restore()
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


class CompilePass(CustomGraphPass):
    """The pass as torch's compiler takes it, and as a plain function of a graph.

    Example:
        >>> torch._inductor.config.post_grad_custom_pre_pass = weft.compile_pass
        >>> torch._inductor.config.joint_custom_pre_pass = weft.compile_pass.joint
        >>> print(weft.compile_pass(graph_module))

    Attributes:
        joint: the same for graphs of a forward and its backward, which torch cuts afterwards.
    """

    def __init__(
        self,
        strict: bool = False,
        told: Callable[[Receipts], None] | None = None,
        first: Sequence[Callable[[Graph], Any]] = (),
        is_joint: bool = False,
    ) -> None:
        """Make a pass.

        Args:
            strict: as for `rewrite`.
            told: is given the receipts of each graph.
            first: passes that go before, on the same graph.
            is_joint: whether graphs are those of a forward and its backward.
        """
        self.strict, self._told, self._first = strict, told, tuple(first)
        self._is_joint = is_joint
        self.joint = self if is_joint else CompilePass(strict, told, is_joint=True)

    def __call__(self, graph: Graph | GraphModule) -> Receipts:  # type: ignore[override]
        """`rewrite` the graph, in place.

        Returns:
            What became of each of its collectives.
        """
        module, graph = (graph, graph.graph) if isinstance(graph, GraphModule) else (None, graph)
        for each in self._first:
            each(graph)
        receipts = rewrite(graph, strict=self.strict, joint=self._is_joint)
        if self._told is not None:
            self._told(receipts)
        if module is not None:
            module.recompile()
        return receipts

    def uuid(self) -> str:
        """Of what it does, for Inductor's cache of compiled graphs."""
        found = hashlib.sha256(repr((self.strict, self._first, self._is_joint)).encode())
        for path in sorted(Path(__file__).parent.glob("*.py")):
            found.update(path.read_bytes())
        return found.hexdigest()


compile_pass = CompilePass()


def compile_backend(
    model: GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile as Inductor does, with collectives beside matmuls fused; torch calls it.

    Args:
        model, inputs: what torch.compile has traced.
        mode: as for Inductor, such as "reduce-overhead".
        options: as for Inductor; also "strict": raise `MissedFusionError` where a collective beside
            a matmul cannot be fused.
    """
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = {**(list_mode_options(mode) if mode else {}), **(options or {})}
    strict, compiled = bool(patches.pop("strict", False)), _being_compiled()

    def told(receipts: Receipts) -> None:
        keep_receipts(compiled, receipts)

    # A graph that Inductor finds in its cache has been rewritten before, and has no receipts.
    patches["fx_graph_cache"] = False
    for hook, is_joint in _HOOKS.items():
        others = patches.get(hook, getattr(torch._inductor.config, hook))
        first = others if isinstance(others, Sequence) else [others] if others is not None else []
        patches[hook] = CompilePass(strict, told, first, is_joint)
    return cast(Callable[..., Any], compile_fx(model, inputs, config_patches=patches))


def _being_compiled() -> CodeType | torch.nn.Module | None:
    """The code of the function whose frame torch compiles, or goes on with behind a graph break.

    The forward of torch's own modules has no frame that it would compile: one function calls all of
    these, and is compiled for each. It is told by the module.
    """
    from torch._dynamo import external_utils
    from torch._dynamo.resume_execution import ContinueExecutionCache
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        frame = InstructionTranslator.current_tx()
        code: CodeType = frame.f_code
    except (AttributeError, LookupError):
        return None
    rests = ContinueExecutionCache.generated_code_metadata
    while code in rests and rests[code].code is not None:
        code = rests[code].code
    if code.co_filename == external_utils.__file__:
        called = frame.f_locals.get("fn")
        called = getattr(called, "__self__", called)
        is_module = isinstance(called, torch.nn.Module)
        return called if is_module else getattr(called, "__code__", None)
    return code
