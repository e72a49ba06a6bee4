"""A model as a list of nodes in the order of its forward, recorded once on tensors without data.

    input       a tensor that the model is called with
    param       a parameter that is used by itself, not as the weight of a linear or embedding
    constant    buffers, and all that follows from them alone: replicated
    linear, embedding    a module's, weight and bias included
    attention   scaled_dot_product_attention
    op          anything else
    output      what the model returns

Nodes refer to earlier ones by `Ref`. A `Segment` is a run of nodes between two points where few
tensors are alive: the layers of a model, whose signatures are equal where their structure is.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from weft.dtensor.dispatch.call import Meta

Kind = Literal["input", "param", "constant", "linear", "embedding", "attention", "op", "output"]
_aten = torch.ops.aten
# Longer segments are cut where more tensors are alive.
_LONGEST = 400


@dataclass(frozen=True)
class Ref:
    """The value of an earlier node."""

    index: int


@dataclass(eq=False)
class ModelNode:
    """One step of the forward.

    Attributes:
        target: what it calls; of a constant nothing.
        args, kwargs: with a `Ref` in place of each tensor that is no weight of a module.
        metas: of its results.
        several: whether it returns a list of them.
        module: the dotted name of the innermost module that it is in.
        exits: the module whose only result it is, "" if there is none: where a hook may place it.
        weights: of a linear or embedding, and of a `param` itself: names and tensors.
        needs_grad: whether a parameter that is trained has a part in it.
        base: the node whose memory it shows, itself if it has its own.
        last_use: the last node that reads it, and how many do.
    """

    index: int
    kind: Kind
    target: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    metas: tuple[Meta, ...] = ()
    several: bool = False
    module: str = ""
    exits: str = ""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    needs_grad: bool = False
    base: int = -1
    last_use: int = -1
    readers: int = 0

    @property
    def meta(self) -> Meta:
        return self.metas[0]

    @property
    def refs(self) -> list[int]:
        """The nodes that it reads, in order."""
        flat = pytree.tree_leaves([self.args, self.kwargs])
        return [leaf.index for leaf in flat if isinstance(leaf, Ref)]

    @property
    def name(self) -> str:
        return str(getattr(self.target, "_opname", getattr(self.target, "__name__", self.target)))


@dataclass(frozen=True)
class Segment:
    """Nodes [start, stop); `alive`: those before it that are read in it or after it.

    `signature` is the same for segments of the same structure.
    """

    start: int
    stop: int
    alive: tuple[int, ...]
    signature: tuple[Any, ...]


@dataclass(frozen=True)
class Graph:
    """The nodes of a model, cut into segments."""

    nodes: list[ModelNode]
    segments: list[Segment]


def nbytes(meta: Meta) -> int:
    """Of the whole tensor."""
    return math.prod(meta.shape) * meta.dtype.itemsize


def recorded(model: nn.Module, sample: Sequence[Any]) -> Graph:
    """Run `model(*sample)` on the meta device under torch.export, and list what it does.

    Raises:
        NotImplementedError: control flow or shapes depend on values; a module with a weight that is
            called twice.
    """
    ghost = _without_data(model)
    inputs = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().to("meta"), tuple(sample))
    returns_tensor: dict[str, int] = {}

    def note(path: str) -> Any:
        def hook(_: nn.Module, __: Any, result: Any) -> None:
            single = isinstance(result, torch.Tensor)
            returns_tensor[path] = returns_tensor.get(path, 0) + (1 if single else 2)

        return hook

    hooks = [module.register_forward_hook(note(path)) for path, module in ghost.named_modules()]
    try:
        program = torch.export.export(ghost, inputs, strict=False)
    except (torch._dynamo.exc.TorchRuntimeError, RuntimeError) as error:
        raise NotImplementedError(
            f"plan: torch.export cannot record {type(model).__name__} on these arguments: "
            f"{str(error).splitlines()[0].rstrip('.')}. Where shapes or branches depend on values, "
            f"give it a forward whose ops are the same for all (experts on all tokens, masked) "
            f"to plan with"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    once = {path for path, count in returns_tensor.items() if count == 1}
    nodes = _Recording(ghost, program, once).nodes
    return Graph(nodes, _segments(nodes))


def _without_data(model: nn.Module) -> nn.Module:
    """A copy of the model on the meta device; nothing of its size is allocated."""
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        ghost = torch.empty_like(tensor, device="meta", requires_grad=False)
        is_param = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(ghost, tensor.requires_grad) if is_param else ghost
    return copy.deepcopy(model, memo)


class _Recording:
    """Turns a program of torch.export into nodes."""

    def __init__(self, model: nn.Module, program: Any, single: set[str]) -> None:
        self.model, self.single = model, single
        self.params = dict(model.named_parameters(remove_duplicate=False))
        signature = program.graph_signature
        self.param_of = signature.inputs_to_parameters
        self.nodes: list[ModelNode] = []
        self.at: dict[fx.Node, int] = {}
        self.storage: dict[int, int] = {}
        self.called: Counter[str] = Counter()
        exits = _exits(program.graph, single)
        for node in program.graph.nodes:
            self._add(node, exits, set(signature.user_inputs))
        for node in self.nodes:
            for ref in node.refs:
                self.nodes[ref].last_use = node.index
                self.nodes[ref].readers += 1

    def _add(self, node: fx.Node, exits: dict[fx.Node, str], inputs: set[str]) -> None:
        value = node.meta.get("val")
        if node.op == "placeholder":
            if node.name not in self.param_of:  # parameters come where they are used
                kind: Kind = "input" if node.name in inputs else "constant"
                self._append(node, ModelNode(-1, kind, target=node.name), value)
        elif node.op == "output":
            args = self._mapped(node.args)
            self._append(node, ModelNode(-1, "output", args=args), None)
        elif node.op == "get_attr" or value is None or not _has_tensors(value):
            if isinstance(value, torch.Tensor):
                self._append(node, ModelNode(-1, "constant", target=node.name), value)
        else:
            self._append(node, self._made(node, exits), value)

    def _made(self, node: fx.Node, exits: dict[fx.Node, str]) -> ModelNode:
        module, target = _module_of(node), node.target
        owner: Any = self.model.get_submodule(module) if _is_path(self.model, module) else None
        made = ModelNode(-1, "op", target=target, module=module, exits=exits.get(node, ""))
        plain: dict[Any, tuple[Kind, Any, int]] = {
            _aten.linear.default: ("linear", nn.Linear, 1),
            _aten.embedding.default: ("embedding", nn.Embedding, 0),
        }
        if target in plain:
            kind, wanted, position = plain[target]
            weight = node.args[position]
            name = self.param_of.get(getattr(weight, "name", ""), "")
            is_own = isinstance(owner, wanted) and name == f"{module}.weight"
            if is_own and type(owner).forward is wanted.forward:
                self.called[module] += 1
                if self.called[module] > 1:
                    raise NotImplementedError(
                        f"plan: {module} is called twice in a forward, and a style places it once: "
                        f"call it on both inputs together, or give each call a module"
                    )
                made.kind = kind
                made.weights = dict(owner.named_parameters(module, recurse=False))
                made.args = self._mapped((node.args[1 - position],))
                made.exits = module
                return made
        if target is _aten.scaled_dot_product_attention.default:
            made.kind = "attention"
        made.args, made.kwargs = self._mapped(node.args), self._mapped(node.kwargs)
        if not any(self.nodes[ref].kind != "constant" for ref in made.refs):
            made.kind, made.args, made.kwargs = "constant", (), {}
        return made

    def _mapped(self, args: Any) -> Any:
        return pytree.tree_map(
            lambda leaf: self._ref(leaf) if isinstance(leaf, fx.Node) else leaf,
            args,
            is_leaf=lambda leaf: isinstance(leaf, fx.Node),
        )

    def _ref(self, node: fx.Node) -> Ref | None:
        if node not in self.at and node.name in self.param_of:
            name = self.param_of[node.name]
            made = ModelNode(-1, "param", target=name, weights={name: self.params[name]})
            self._append(node, made, node.meta["val"])
        if node not in self.at:
            return None  # a check, whose result nobody needs
        return Ref(self.at[node])

    def _append(self, node: fx.Node, made: ModelNode, value: Any) -> None:
        made.index = self.at[node] = len(self.nodes)
        made.several = isinstance(value, (list, tuple))
        tensors = [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
        for tensor in tensors:
            if any(isinstance(n, torch.SymInt) for n in tensor.shape):
                raise NotImplementedError(
                    f"plan: the shape of {node.name} depends on values: {tuple(tensor.shape)}"
                )
        made.metas = tuple(Meta(tuple(t.shape), t.stride(), t.dtype) for t in tensors)
        made.needs_grad = any(t.requires_grad for t in made.weights.values())
        made.needs_grad |= any(self.nodes[ref].needs_grad for ref in made.refs)
        made.base = made.index
        if tensors and made.kind != "param":
            storage = tensors[0].untyped_storage()._cdata
            made.base = self.storage.setdefault(storage, made.index)
        self.nodes.append(made)


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))


def _module_of(node: fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else ""


def _is_path(model: nn.Module, path: str) -> bool:
    try:
        model.get_submodule(path)
    except AttributeError:
        return False
    return True


def _exits(graph: fx.Graph, single: set[str]) -> dict[fx.Node, str]:
    """The innermost module below the model itself whose only result a node is."""
    inside = {
        node: [str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
        for node in graph.nodes
    }
    leaving: dict[str, set[fx.Node]] = {}
    for node, paths in inside.items():
        for user in node.users:
            for path in paths:
                if path not in inside[user]:
                    leaving.setdefault(path, set()).add(node)
    found: dict[fx.Node, str] = {}
    for path, nodes in leaving.items():
        if path and path in single and len(nodes) == 1:
            (node,) = nodes
            if len(path) > len(found.get(node, "")):
                found[node] = path
    return found


def _segments(nodes: list[ModelNode]) -> list[Segment]:
    """Cut where as few tensors as possible are alive, so that no segment is long."""
    alive = list(_alive(nodes))
    begin = next((n.index for n in nodes if n.kind not in ("input", "constant")), 0)
    for most in range(1, 9):
        starts = [0, *(i for i in range(begin + 1, len(nodes)) if len(alive[i]) <= most)]
        ends = [*starts[1:], len(nodes)]
        if max(b - a for a, b in zip(starts, ends, strict=True)) <= _LONGEST:
            break
    return [
        Segment(start, stop, alive[start], _signature(nodes, start, stop, alive[start]))
        for start, stop in zip(starts, ends, strict=True)
    ]


def _alive(nodes: list[ModelNode]) -> Iterator[tuple[int, ...]]:
    """Before each node: the earlier ones that are still read, without constants."""
    now: tuple[int, ...] = ()
    for node in nodes:
        yield now
        born = (*now, node.index) if node.kind not in ("constant", "output") else now
        now = tuple(i for i in born if nodes[i].last_use > node.index)


def _signature(
    nodes: list[ModelNode], start: int, stop: int, alive: tuple[int, ...]
) -> tuple[Any, ...]:
    def relative(leaf: Any) -> Any:
        if not isinstance(leaf, Ref):
            return repr(leaf)
        node = nodes[leaf.index]
        if node.kind == "constant":
            return "constant", node.metas
        at = leaf.index - start if leaf.index >= start else -1 - alive.index(leaf.index)
        return "node", at, node.needs_grad, node.readers, node.metas

    def of(node: ModelNode) -> tuple[Any, ...]:
        leaves = pytree.tree_leaves([node.args, node.kwargs])
        weights = [(tuple(w.shape), w.dtype, w.requires_grad) for w in node.weights.values()]
        ends = node.last_use < stop
        base = node.base - start if node.base >= start else -1
        return (
            node.kind,
            str(node.target) if node.kind in ("op", "input") else "",
            tuple(map(relative, leaves)),
            node.metas,
            bool(node.exits),
            tuple(weights),
            node.needs_grad,
            node.readers,
            ends,
            base,
        )

    return tuple(of(node) for node in nodes[start:stop])
