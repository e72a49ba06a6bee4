"""nn.Linear cut over the ranks of a group: plain modules on plain tensors, no DTensor in sight.

    nn.Linear(H, F) -> act -> nn.Linear(F, H)                         one process
    ColumnParallelLinear  ->  act  ->  RowParallelLinear              rank r of W

    sequence_dim=0     x (S/W, H) -gather-> (S, F/W) -> (S, F/W) -scatter-> (S/W, H)
    sequence_dim=None  x (S, H)   --------> (S, F/W) -> (S, F/W) -reduce--> (S, H)

Each arrow is one fused op (`all_gather_matmul`, `matmul_reduce_scatter`, `matmul_all_reduce`),
forward and backward. `state_dict()` gives the whole weights under nn.Linear's names, so that a
one-process model loads it, and `load_state_dict` takes whole weights and keeps this rank's part.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from weft.collectives import all_gather, resolve
from weft.collectives.group import GroupLike, is_traced
from weft.collectives.movement import chunk_sizes
from weft.kernels.autocast import autocast, outside_autocast
from weft.kernels.dense import WeightGrad, as_rows, matmul
from weft.kernels.gathered_matmul import all_gather_matmul
from weft.kernels.reduced_matmul import matmul_all_reduce
from weft.kernels.scattered_matmul import matmul_reduce_scatter


class _ParallelLinear(nn.Module):
    """What the two share: a weight cut along one dim, created, saved and loaded as a whole."""

    _cut: ClassVar[dict[str, int]]  # dim along which each parameter is cut; absent: replicated

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        group: GroupLike = None,
        sequence_dim: int | None = 0,
    ) -> None:
        """Draw the weights of an nn.Linear and keep this rank's part.

        Args:
            in_features, out_features, bias, device, dtype: of the whole nn.Linear. With the same
                seed on every rank the weights are those that it would have drawn.
            group: ProcessGroup, 1-D DeviceMesh, or None for the world.
            sequence_dim: dim along which the activations outside the pair are sharded; None: they
                are whole on every rank.
        """
        super().__init__()
        self._take(nn.Linear(in_features, out_features, bias, device, dtype), group, sequence_dim)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, group: GroupLike = None, *, sequence_dim: int | None = 0
    ) -> Any:
        """This rank's part of `linear`, which must hold the same values on every rank."""
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module._take(linear, group, sequence_dim)
        return module

    def _take(self, linear: nn.Linear, group: GroupLike, sequence_dim: int | None) -> None:
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.group, self.sequence_dim = resolve(group), sequence_dim
        for name, whole in (("weight", linear.weight), ("bias", linear.bias)):
            part = None if whole is None else self._part(name, whole.detach()).clone()
            self.register_parameter(
                name, None if part is None else nn.Parameter(part, whole.requires_grad)
            )

    def reset_parameters(self) -> None:
        """Draw the parameters anew, as the constructor does: with one seed on every rank."""
        like = self.weight
        whole = nn.Linear(
            self.in_features, self.out_features, self.bias is not None, like.device, like.dtype
        )
        with torch.no_grad():
            for name, value in whole.named_parameters():
                getattr(self, name).copy_(self._part(name, value))

    def _sizes(self, name: str) -> list[int]:
        length = (self.out_features, self.in_features)[self._cut[name]]
        return chunk_sizes(length, self.group.world_size)

    def _part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        if name not in self._cut:
            return whole
        parts: tuple[torch.Tensor, ...] = whole.split(self._sizes(name), self._cut[name])
        return parts[self.group.rank]

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        # Collective: state_dict() must be called on every rank.
        for name, part in self._parameters.items():
            if part is not None:
                value = part if keep_vars else part.detach()
                if name in self._cut:
                    value = all_gather(
                        value, self.group, dim=self._cut[name], sizes=self._sizes(name)
                    ).contiguous()
                destination[prefix + name] = value

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        state_dict = dict(state_dict)  # the caller's keeps the whole
        whole_shapes = {
            "weight": (self.out_features, self.in_features),
            "bias": (self.out_features,),
        }
        for name, shape in whole_shapes.items():
            value = state_dict.get(prefix + name)
            if value is not None and tuple(value.shape) == shape:
                state_dict[prefix + name] = self._part(name, value)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        """As nn.Linear's, with what is different."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, sequence_dim={self.sequence_dim}, "
            f"rank {self.group.rank} of {self.group.world_size}"
        )


class ColumnParallelLinear(_ParallelLinear):
    """nn.Linear with its output features cut over the ranks (by torch.chunk).

    Input: (*, in_features), a shard along `sequence_dim`, or whole with `sequence_dim=None`.
    Output: (*, this rank's part of out_features), whole along the sequence.

    Example:
        >>> up = weft.ColumnParallelLinear.from_linear(mlp.up)
        >>> down = weft.RowParallelLinear.from_linear(mlp.down)
        >>> y_shard = down(F.gelu(up(x_shard)))
    """

    _cut: ClassVar[dict[str, int]] = {"weight": 0, "bias": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The whole sequence's output, this rank's features."""
        if self.sequence_dim is None:
            return _of_whole_input(x, self.weight, self.bias, self.group)
        gathered: torch.Tensor = all_gather_matmul(
            x, self.weight.t(), self.group, bias=self.bias, gather_dim=self.sequence_dim
        )
        return gathered


class RowParallelLinear(_ParallelLinear):
    """nn.Linear with its input features cut over the ranks (by torch.chunk).

    Input: (*, this rank's part of in_features), whole along the sequence.
    Output: (*, out_features), a shard along `sequence_dim`, or whole with `sequence_dim=None`. The
    bias is replicated and added once.
    """

    _cut: ClassVar[dict[str, int]] = {"weight": 1}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks' features: this rank's part of the sequence, or all of it."""
        if self.sequence_dim is None:
            return matmul_all_reduce(x, self.weight.t(), self.group, bias=self.bias)
        return matmul_reduce_scatter(
            x, self.weight.t(), self.group, bias=self.bias, scatter_dim=self.sequence_dim
        )


@autocast
def _of_whole_input(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: Any
) -> torch.Tensor:
    y: torch.Tensor = _WholeInput.apply(x, weight, group)
    return y if bias is None else y + bias


class _WholeInput(torch.autograd.Function):
    """x (*, H) @ weight (F_r, H)^T for an x that is whole on every rank: dx is summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return matmul(x, weight.t())

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = matmul_all_reduce(dy, weight, ctx.group)
        if ctx.needs_input_grad[1]:
            rows = as_rows(dy), as_rows(x)
            # The compiler picks the library; a gradient of the gradient needs torch's own ops.
            if is_traced(dy) or torch.is_grad_enabled():
                return dx, rows[0].t() @ rows[1], None
            grad = WeightGrad(weight)
            grad.add(*rows)
            dw = grad.result()
        return dx, dw, None
