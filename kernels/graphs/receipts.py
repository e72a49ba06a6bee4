"""What became of each collective of a graph that torch has compiled, and why."""

from __future__ import annotations

import logging
import re
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist

from weft import settings

_TORCH = str(Path(torch.__file__).parent)
_logger = logging.getLogger("weft.compile")


@dataclass(frozen=True)
class Receipt:
    """One collective of a compiled graph.

    Attributes:
        collective: "all_gather", "reduce_scatter", "all_reduce", or as torch names it.
        shape: of what it was given, symbols as they are named.
        fused: the op that has taken its place; empty if it stays.
        why: in a word, why it stays; what it was fused with if it does not.
        line: of the model that it came from; empty if torch does not know.
    """

    collective: str
    shape: tuple[str, ...]
    fused: str
    why: str
    line: str = ""

    def __str__(self) -> str:
        what = f"{self.collective}({' x '.join(self.shape)})"
        told = f"-> {self.fused}, {self.why}" if self.fused else f"stays: {self.why}"
        return f"{what} {told}" + (f"   # {self.line}" if self.line else "")


class Receipts(tuple[Receipt, ...]):
    """Those of one graph, in its order. Prints as a line each, and a count.

    Attributes:
        of_graphs: whether there was any graph that they could be of.
    """

    of_graphs = True

    @property
    def fused(self) -> int:
        """How many collectives have become parts of fused ops."""
        return sum(bool(each.fused) for each in self)

    def __str__(self) -> str:
        if not self.of_graphs:
            return settings.NOTHING_COMPILED
        count = f"{self.fused} of {len(self)} collectives fused"
        return "\n".join([*map(str, self), count])


def collective_of(node: torch.fx.Node) -> str:
    """Which one a node calls, of torch's functional ones; "" if none."""
    schema = getattr(node.target, "_schema", None)
    space, _, name = schema.name.partition("::") if schema is not None else ("", "", "")
    if space not in ("_c10d_functional", "_dtensor") or name == "wait_tensor":
        return ""
    short: str = name.removesuffix("_into_tensor").removesuffix("_tensor")
    return short


def line_of(node: torch.fx.Node) -> str:
    """The line of the model that a node stems from: "model.py:12, in forward".

    The innermost one in a file that has one of the modules that are running; of what is in none,
    the innermost one that is not torch's. So lines of wrappers around modules, and of functions
    for all collectives of a package, are passed over.
    """
    trace = node.meta.get("stack_trace") or ""
    places = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', trace)
    own = [place for place in places if not place[0].startswith(_TORCH)] or places
    files = _files_of_modules(node)
    own = [place for place in own if place[0] in files] or own
    return f"{own[-1][0]}:{own[-1][1]}, in {own[-1][2]}" if own else ""


def _files_of_modules(node: torch.fx.Node) -> set[str]:
    """The files of the modules' classes, in whose forward, or the gradient of it, a node is."""
    stacks = (node.meta.get(of) or {} for of in ("nn_module_stack", "fwd_nn_module_stack"))
    kinds = [kind for stack in stacks for _, kind in stack.values()]
    names = {getattr(kind, "__module__", str(kind).rpartition(".")[0]) for kind in kinds}
    files = {getattr(sys.modules.get(name), "__file__", None) for name in names}
    return {file for file in files if file and not file.startswith(_TORCH)}


def shape_of(node: torch.fx.Node) -> tuple[str, ...]:
    """The sizes of its value."""
    return tuple(map(str, node.meta["val"].shape))


def receipt_of(node: torch.fx.Node, fused: str, why: str) -> Receipt:
    """Of a collective."""
    size = shape_of(node.all_input_nodes[0])
    return Receipt(collective_of(node), size, fused, why, line_of(node))


# By the code that torch has compiled, or a module of torch's own: the receipts of its graphs,
# forward and backward.
_Compiled = CodeType | torch.nn.Module
_kept: weakref.WeakKeyDictionary[_Compiled, list[Receipts]] = weakref.WeakKeyDictionary()


def _print_by_itself() -> None:
    """Print what is asked for, as TORCH_LOGS does, to stderr if no one has set up logging."""
    if _logger.level == logging.NOTSET:
        _logger.setLevel(logging.INFO)
    if not _logger.hasHandlers():
        handler, is_rank = logging.StreamHandler(), dist.is_available() and dist.is_initialized()
        of = f"[rank{dist.get_rank()}] " if is_rank else ""
        handler.setFormatter(logging.Formatter(f"{of}%(name)s: %(message)s"))
        _logger.addHandler(handler)
        _logger.propagate = False


def keep_receipts(compiled: _Compiled | None, receipts: Receipts) -> None:
    """Keep them for `receipts_of`, log them, and tell listeners of `weft.explain`."""
    if compiled is not None:
        _kept.setdefault(compiled, []).append(receipts)
    if receipts:
        asked = "compile" in settings.logged()
        if asked:
            _print_by_itself()
        _logger.log(logging.INFO if asked else logging.DEBUG, "%s", receipts)
    for each in receipts:
        told = each.fused or "as it was"
        settings.record(f"compiled {each.collective}", told, each.why, " x ".join(each.shape))


def _names_of(compiled: Any) -> list[_Compiled]:
    """What receipts of a compiled module or function may be kept by: the most likely one last.

    That is the code of decorators, then its own, then the module itself.
    """
    original = getattr(compiled, "_torchdynamo_orig_callable", None)
    original = getattr(compiled, "_orig_mod", original) or compiled
    module = original if isinstance(original, torch.nn.Module) else None
    original = original if module is None else module.forward
    names: list[_Compiled | None] = []
    while original is not None:
        names.append(getattr(getattr(original, "__func__", original), "__code__", None))
        original = getattr(original, "__wrapped__", None)
    return [name for name in (*names, module) if name is not None]


def receipts_of(compiled: Any) -> Receipts:
    """What became of the collectives of all graphs that torch has made of `compiled` so far.

    Args:
        compiled: what torch.compile(.., backend="weft") has returned, or a module with parts that
            have been compiled in place, after it has run.
    """
    # torch compiles what is called first: a decorator of a forward, where there is one.
    parts = settings.compiled_parts(compiled) or [compiled]
    names = (next((n for n in reversed(_names_of(p)) if n in _kept), None) for p in parts)
    found = [kept for name in dict.fromkeys(names) if name is not None for kept in _kept[name]]
    made = Receipts(each for receipts in found for each in receipts)
    made.of_graphs = bool(found)
    return made


settings.receipts_of = receipts_of
