"""torch.compile(model, backend="weft"): torch's Inductor, with the pass among its own.

pyproject.toml names `weft` as a backend of torch's, so that torch finds it by its name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType
from typing import Any, cast

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule

from weft.kernels.graphs.receipts import Receipts, keep_receipts
from weft.kernels.graphs.rewriting import rewrite

_HOOKS = {"joint_custom_pre_pass": True, "post_grad_custom_pre_pass": False}


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
    strict, code = bool(patches.pop("strict", False)), _code_being_compiled()

    def told(receipts: Receipts) -> None:
        keep_receipts(code, receipts)

    # A graph that Inductor finds in its cache has been rewritten before, and has no receipts.
    patches["fx_graph_cache"] = False
    for hook, is_joint in _HOOKS.items():
        others = patches.get(hook, getattr(torch._inductor.config, hook))
        first = others if isinstance(others, Sequence) else [others] if others is not None else []
        patches[hook] = CompilePass(strict, told, first, is_joint)
    return cast(Callable[..., Any], compile_fx(model, inputs, config_patches=patches))


def _code_being_compiled() -> CodeType | None:
    """Of the function whose frame torch compiles, or goes on with behind a graph break."""
    from torch._dynamo.resume_execution import ContinueExecutionCache
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        code: CodeType = InstructionTranslator.current_tx().f_code
    except (AttributeError, LookupError):
        return None
    rests = ContinueExecutionCache.generated_code_metadata
    while code in rests and rests[code].code is not None:
        code = rests[code].code
    return code
