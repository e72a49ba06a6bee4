"""Steps of torch's elementwise optimizers: one plain step on this rank's parts of the DTensors.

Where every gradient and every state lies as its parameter does, what a rank does to its part
depends on nothing that another rank has. So a hook of torch's brings the gradients into the layouts
of their parameters, once and not by each operation of the step, and then hands `step()` a stand-in
for the optimizer: its groups and its state hold the local tensors, in the same memory, in place of
the DTensors. Nothing is swapped in the optimizer itself, so an error within the step leaves it as
it was. A step that creates state, and any other that the stand-in could not do alike, goes by
operations on DTensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils

from weft.dtensor.layout import Layout
from weft.dtensor.tensor import DTensor, before_write, wrap

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
    """Put a stand-in in the place of `self`, where the step is the same on local tensors."""
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
        hook()
    torch._C._increment_version(stand_in.written)  # autograd does not see them written
    return (stand_in, *args[1:]), kwargs


def _can_have_one(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    closure_given = any(value is not None for value in (*args[1:], *kwargs.values()))
    # A hook that comes after this one may put other gradients in the place of those found here.
    others_follow = (
        optimizer._optimizer_step_pre_hooks
        or next(reversed(torch_optimizer._global_optimizer_pre_hooks)) != _hook.id
    )
    watched = torch._C._len_torch_dispatch_stack() > 0
    return type(optimizer) in _ELEMENTWISE and not (closure_given or others_follow or watched)


def _gradient(p: DTensor) -> torch.Tensor | None:
    """The gradient of `p`, from now on placed as `p`: then what is made of it is never Partial."""
    grad, layout = p.grad, p._layout
    if type(grad) is not DTensor or grad._layout is layout:
        return grad
    own = grad._layout
    if own.placements == layout.placements or own.mesh != layout.mesh or layout.has_partial:
        return grad
    p.grad = grad = grad.redistribute(placements=layout.placements)
    return grad


def _stand_in(optimizer: Any) -> Any:
    """The optimizer of the local tensors; `written` are the DTensors that its step writes.

    `given` has, for each parameter with state, that of the stand-in and what was in it at first.
    """
    stand_in = object.__new__(type(optimizer))
    stand_in.__dict__ = {
        **optimizer.__dict__, "param_groups": [], "state": defaultdict(dict),
        "written": [], "given": [],
    }  # fmt: skip
    for group in optimizer.param_groups:
        if group.get("differentiable") or group.get("capturable"):
            raise _NotAlikeError
        stateless = type(optimizer) is torch.optim.SGD and group["momentum"] == 0
        params = [_part(p, optimizer, stand_in, stateless) for p in group["params"]]
        stand_in.param_groups.append({**group, "params": params})
    return stand_in


def _part(p: torch.Tensor, optimizer: Any, stand_in: Any, stateless: bool) -> torch.Tensor:
    """This rank's part of a parameter, with its gradient; its state goes to the stand-in's."""
    if type(p) is not DTensor:
        if p.grad is not None:
            stand_in.state[p] = optimizer.state[p]
        return p
    grad = _gradient(p)
    layout = p._layout
    if layout.has_partial or layout.index is None:
        raise _NotAlikeError
    part = _local(p, layout).detach()
    if grad is None:
        return part
    part.grad = _local(grad, layout)
    stand_in.written.append(p)
    if stateless:
        return part
    if not (state := optimizer.state.get(p)):
        raise _NotAlikeError
    local_state = stand_in.state[part]
    for name, value in state.items():
        if type(value) is DTensor:
            local_state[name] = _local(value, layout)
            stand_in.written.append(value)
        elif value is None or (isinstance(value, torch.Tensor) and value.dim()):
            raise _NotAlikeError
        else:
            local_state[name] = value
    stand_in.given.append((p, local_state, tuple(local_state.values())))
    return part


def _local(tensor: Any, layout: Layout) -> torch.Tensor:
    """The part of a tensor that lies as `layout` does (in an order of memory of its own)."""
    if type(tensor) is not DTensor or tensor._local is None:
        raise _NotAlikeError
    own = tensor._layout
    if own is not layout and (
        own.placements != layout.placements or own.mesh != layout.mesh or own.shape != layout.shape
    ):
        raise _NotAlikeError
    return tensor._local


def _after_step(optimizer: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Keep what the step of a stand-in has put in its state in place of what was there."""
    if (stand_in := args[0]) is optimizer:
        return
    for p, local_state, given in stand_in.given:
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
# On a GPU, torch's optimizers and clip_grad_norm_ take whole lists of these types only.
torch_optimizer._foreach_supported_types.append(DTensor)
_foreach_utils._foreach_supported_types.append(DTensor)
