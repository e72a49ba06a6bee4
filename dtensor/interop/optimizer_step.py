"""Steps of torch's elementwise optimizers: one plain step on this rank's parts of the DTensors.

If every gradient and every state has the layout of its parameter, a rank can step its own part
without the others. So a pre-step hook redistributes the gradients to the layouts of their
parameters, once instead of in each operation of the step, and passes `step()` a stand-in for the
optimizer: its groups and its state hold the local tensors, in the same memory, in place of the
DTensors. The optimizer itself is left alone, so an error within the step leaves it as it was. A
step that creates state, or that the stand-in could not do in the same way, runs on the DTensors.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from operator import attrgetter, is_
from typing import Any, cast

import torch
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils

from weft.dtensor.layout.boxes import Layout
from weft.dtensor.tensor import DTensor, before_write, wrap
from weft.dtensor.tracing.grad_recording import no_function

_ELEMENTWISE = {
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam,
    torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.Adagrad,
    torch.optim.Adadelta, torch.optim.ASGD,
}  # fmt: skip

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class _NotAlikeError(Exception):
    """The stand-in could not do this step as the optimizer would."""


def _before_step(
    optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Arguments | None:
    """Pass a stand-in as `self` to `step()`, if the step is the same on local tensors."""
    if torch.compiler.is_compiling():
        return None
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(type(p) is DTensor for p in params):
        return None
    try:
        stand_in = _stand_in(optimizer) if _can_have_one(optimizer, args, kwargs) else None
    except _NotAlikeError:
        stand_in = None
    if stand_in is None:
        for p in params:
            if type(p) is DTensor:
                _gradient(p)
        return None
    for hook in before_write:
        hook(None)
    torch._C._increment_version(stand_in.parts.written)  # autograd does not see the writes
    return (stand_in, *args[1:]), kwargs


def _can_have_one(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    closure_given = any(value is not None for value in (*args[1:], *kwargs.values()))
    # A hook that runs after this one may replace the gradients.
    others_follow = (
        optimizer._optimizer_step_pre_hooks
        or next(reversed(torch_optimizer._global_optimizer_pre_hooks)) != _hook.id
    )
    watched = torch._C._len_torch_dispatch_stack() > 0
    return type(optimizer) in _ELEMENTWISE and not (closure_given or others_follow or watched)


def _gradient(p: DTensor) -> torch.Tensor | None:
    """The gradient of `p`, redistributed to the placements of `p`, so that it is not Partial."""
    grad, layout = p.grad, p._layout
    if type(grad) is not DTensor or grad._layout is layout:
        return grad
    own = grad._layout
    if own.placements == layout.placements or own.mesh != layout.mesh or layout.has_partial:
        return grad
    p.grad = grad = grad.redistribute(placements=layout.placements)
    return grad


def _stand_in(optimizer: Any) -> Any:
    """The optimizer of the local tensors, which are its `parts`."""
    for group in optimizer.param_groups:
        if group.get("differentiable") or group.get("capturable"):
            raise _NotAlikeError
    parts = _parts.get(optimizer)
    if parts is None or not parts.renew(optimizer):
        _parts.pop(optimizer, None)
        parts = _Parts(optimizer)
        if parts.can_renew:
            _parts[optimizer] = parts
    stand_in: Any = object.__new__(_stand_in_types[type(optimizer)])
    stand_in.__dict__ = {
        **optimizer.__dict__, "state": parts.state, "parts": parts, "param_groups": [
            {**group, "params": own}
            for group, own in zip(optimizer.param_groups, parts.groups, strict=True)
        ],
    }  # fmt: skip
    return stand_in


class _StandIn:
    """What a stand-in does otherwise than the optimizer: it knows its parts' lists."""

    parts: _Parts

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> Any:
        """Fill the lists of a step, of parameters, gradients and each kind of state."""
        own: Any = super()
        return self.parts.fill(own._init_group, group, lists)


_stand_in_types: dict[Any, Any] = {
    kind: type(kind.__name__, (_StandIn, kind), {}) for kind in _ELEMENTWISE
}


class _Parts:
    """This rank's parts of an optimizer's parameters, with their gradients, and of its state.

    Finding them takes 6 us per parameter, checking that they are still the same 1 us: all but the
    gradients are kept from one step to the next, and so are the lists that torch's step makes of
    them, in 2 us per parameter.

    Attributes:
        groups: the parts of each group's parameters.
        state: the state of each part.
        written: the DTensors that a step writes.
        given: for each parameter with state, the state of its part and the values it began with.
        can_renew: whether every parameter is a DTensor with a gradient.
    """

    def __init__(self, optimizer: Any) -> None:
        self.state: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        self.written: list[DTensor] = []
        self.given: list[tuple[DTensor, dict[str, Any], tuple[Any, ...]]] = []
        self.can_renew = True
        self.groups: list[list[torch.Tensor]] = []
        # Of each group, by its place: its options but lr, and what the optimizer made of it; a list
        # of gradients is None, as these change.
        self._filled: dict[int, tuple[dict[str, Any], list[list[Any] | None], Any]] = {}
        self._stateless = _stateless(optimizer)
        for group, stateless in zip(optimizer.param_groups, self._stateless, strict=True):
            own = [self._part(p, optimizer, stateless) for p in group["params"]]
            self.groups.append(own)
        self.can_renew &= all(isinstance(state, dict) for state in optimizer.state.values())
        if self.can_renew:
            self._note(optimizer)

    def _part(self, p: torch.Tensor, optimizer: Any, stateless: bool) -> torch.Tensor:
        """This rank's part of a parameter, with its gradient; its state goes to `state`."""
        if type(p) is not DTensor:
            self.can_renew = False
            if p.grad is not None:
                self.state[p] = optimizer.state[p]
            return p
        grad = _gradient(p)
        layout = p._layout
        if layout.has_partial or layout.index is None:
            raise _NotAlikeError
        part = _local(p, layout).detach()
        if grad is None:
            self.can_renew = False
            return part
        part.grad = _local(grad, layout)
        self.written.append(p)
        if stateless:
            return part
        if not (state := optimizer.state.get(p)):
            raise _NotAlikeError
        local_state = self.state[part]
        for name, value in state.items():
            if type(value) is DTensor:
                local_state[name] = _local(value, layout)
                self.written.append(value)
            elif value is None or (isinstance(value, torch.Tensor) and value.dim()):
                raise _NotAlikeError
            else:
                local_state[name] = value
        self.given.append((p, local_state, tuple(local_state.values())))
        return part

    def _note(self, optimizer: Any) -> None:
        """Note what must be unchanged for `renew` to reuse these parts."""
        params = [list(group["params"]) for group in optimizer.param_groups]
        self._params, self._flat = params, list(_chain(params))
        self._own = list(_chain(self.groups))
        self._grads = [[part.grad for part in own] for own in self.groups]
        self._layouts = [p._layout for p in self._flat]
        # Keys and values in their order, as a look-up of a tensor computes its hash in Python.
        self._stateful = list(optimizer.state)
        self._values = _values_of(optimizer.state.values())
        self._locals = list(map(_local_of, self.written))
        self._addresses = list(map(_address_of, self._own))
        self._own_states = [local_state for _, local_state, _ in self.given]
        self._own_values = _values_of(self._own_states)

    def renew(self, optimizer: Any) -> bool:
        """Take the gradients of another step; False if anything else has changed."""
        groups, flat = [group["params"] for group in optimizer.param_groups], self._flat
        with no_function():
            grads = list(map(_grad_of, flat))
        if not (
            len(groups) == len(self._params)
            and all(map(_same_objects, groups, self._params))
            and _same_objects(list(map(_layout_of, flat)), self._layouts)
            and set(map(type, grads)) == {DTensor}
            and _same_objects(list(map(_layout_of, grads)), self._layouts)
            and _same_objects(list(map(_local_of, self.written)), self._locals)
            and list(map(_address_of, map(_local_of, flat))) == self._addresses
            and _stateless(optimizer) == self._stateless
            and _same_objects(list(optimizer.state), self._stateful)
            and _same_objects(_values_of(optimizer.state.values()), self._values)
        ):
            return False
        own_grads = list(map(_local_of, grads))
        if _NoneType in map(type, own_grads):
            return False
        each = iter(own_grads)
        self._grads = [list(islice(each, len(own))) for own in self.groups]
        return True

    def fill(
        self, init_group: Callable[..., Any], group: dict[str, Any], lists: Sequence[list[Any]]
    ) -> Any:
        """Do what the optimizer's `init_group` does, from the lists that it filled before."""
        if not self.can_renew:
            return init_group(group, *lists)
        at = next(i for i, own in enumerate(self.groups) if own is group["params"])
        options = {name: group[name] for name in group if name not in ("params", "lr")}
        options["lr"] = type(group["lr"])
        own, grads = self.groups[at], self._grads[at]
        if at in self._filled and self._filled[at][0] == options:
            _, filled, result = self._filled[at]
            for given, values in zip(lists, filled, strict=True):
                given.extend(grads if values is None else values)
            return result
        for part, grad in zip(own, grads, strict=True):
            part.grad = grad
        result = init_group(group, *lists)
        filled = [None if _same_objects(given, grads) else list(given) for given in lists]
        self._filled[at] = options, filled, result
        for part in own:
            part.grad = None
        return result

    def unchanged(self) -> bool:
        """Whether a step has replaced nothing in the state of the parts.

        It also drops their gradients, so that they do not keep the user's alive.
        """
        if not self.can_renew:
            return False
        self._grads = []
        return _same_objects(_values_of(self._own_states), self._own_values)


# A state that has been replaced stays alive here until the next step.
_parts: weakref.WeakKeyDictionary[Any, _Parts] = weakref.WeakKeyDictionary()
_chain, _NoneType = chain.from_iterable, type(None)
_local_of, _layout_of = attrgetter("_local"), attrgetter("_layout")
_address_of = torch.Tensor.data_ptr
_grad_of: Any = cast(Any, torch._C.TensorBase.grad).__get__


def _stateless(optimizer: Any) -> list[bool]:
    """Of each group: whether its parameters have no state."""
    kind = type(optimizer)
    return [kind is torch.optim.SGD and g["momentum"] == 0 for g in optimizer.param_groups]


def _same_objects(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether these are the same objects."""
    return len(a) == len(b) and all(map(is_, a, b))


def _values_of(states: Iterable[dict[str, Any]]) -> list[Any]:
    return list(_chain(map(dict.values, states)))


def _local(tensor: Any, layout: Layout) -> torch.Tensor:
    """The local part of a tensor that is placed as `layout` (its strides may differ)."""
    if type(tensor) is not DTensor or tensor._local is None:
        raise _NotAlikeError
    own = tensor._layout
    if own is not layout and (
        own.placements != layout.placements or own.mesh != layout.mesh or own.shape != layout.shape
    ):
        raise _NotAlikeError
    return tensor._local


def _after_step(optimizer: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Copy what the step has replaced in the stand-in's state into the optimizer's."""
    if (stand_in := args[0]) is optimizer or stand_in.parts.unchanged():
        return
    for p, local_state, given in stand_in.parts.given:
        if len(local_state) == len(given) and all(map(is_, local_state.values(), given)):
            continue
        state = optimizer.state[p]
        for name, value in local_state.items():
            old = state.get(name)
            if type(old) is not DTensor:
                state[name] = value
            elif value is not old._local:
                state[name] = wrap(value, old._layout.with_dtype(value.dtype))


_hook = torch_optimizer.register_optimizer_step_pre_hook(_before_step)
torch_optimizer.register_optimizer_step_post_hook(_after_step)
# On a GPU, torch's optimizers and clip_grad_norm_ use foreach ops for these types only.
torch_optimizer._foreach_supported_types.append(DTensor)
_foreach_utils._foreach_supported_types.append(DTensor)
