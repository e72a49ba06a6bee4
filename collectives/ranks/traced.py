"""Whether a call is traced rather than run, and what transforms of torch no call can take."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_count_modes, _mode = torch._C._len_torch_dispatch_stack, torch._C._get_dispatch_mode
_TRACERS = (torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE)


def is_traced(x: torch.Tensor) -> bool:
    """Whether a call of `x` is traced rather than run, and so must go through torch.ops.weft.

    That is under torch.compile, export or make_fx, or if `x` stands for a tensor. What moves bytes
    by their address would be missing in a graph, and must not be given tensors without memory.

    Raises:
        ValueError: `x` is not a tensor.
    """
    if torch.compiler.is_compiling():
        return True
    if is_plain(x):
        return x.is_meta or (_count_modes() > 0 and any(map(_mode, _TRACERS)))
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"a tensor is wanted, got {type(x).__name__}: torch.as_tensor makes one")
    return type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def is_call_traced(x: torch.Tensor) -> bool:
    """`is_traced(x)` for a public function, after checking that it can run otherwise.

    Raises:
        ValueError: `x` is not a tensor, or not dense.
        NotImplementedError: under torch.func or forward-mode differentiation, which cannot
            differentiate what comes from peers.
    """
    traced = is_traced(x)
    if traced and torch.compiler.is_compiling():
        return True
    check_untransformed()
    if not traced and x.layout is not torch.strided:
        raise ValueError(f"a dense tensor is wanted, got layout {x.layout}: x.to_dense() is one")
    return traced


def is_plain(x: torch.Tensor) -> bool:
    """Whether `x` is a tensor of torch's own, which stands for no other."""
    return type(x) in _PLAIN


def check_untransformed() -> None:
    """Check that no transform of torch.func is at work, nor forward-mode differentiation.

    Raises:
        NotImplementedError: one is.
    """
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "weft is differentiable by torch.autograd only, not by torch.func (grad, vmap, jvp, "
            "..) or forward-mode differentiation: use torch.autograd.grad"
        )
