"""nn.Linear cut over the ranks of a group: plain modules on plain tensors, without DTensor.

    nn.Linear(H, F) -> act -> nn.Linear(F, H)                         one process
    ColumnParallelLinear  ->  act  ->  RowParallelLinear              rank r of W

    sequence_dim=0     x (S/W, H) -gather-> (S, F/W) -> (S, F/W) -scatter-> (S/W, H)
    sequence_dim=None  x (S, H)   --------> (S, F/W) -> (S, F/W) -reduce--> (S, H)

Each arrow is one fused op (`all_gather_matmul`, `matmul_reduce_scatter`, `matmul_all_reduce`),
forward and backward. `state_dict()` returns the whole weights under the names of nn.Linear, so that
a one-process model can load it, and `load_state_dict` takes whole weights and keeps this rank's
part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from weft.collectives import all_reduce, resolve
from weft.collectives.memory.checks import check_shards
from weft.collectives.ranks.group import GroupLike
from weft.collectives.ranks.traced import check_untransformed, is_traced
from weft.kernels.engine.autocast import autocast, outside_autocast
from weft.kernels.engine.fp8 import magnitudes, quantized, scaled_products, scaling_of
from weft.kernels.engine.local_matmul import WeightGrad, as_rows, conjugated, matmul
from weft.kernels.layers.module import REQUIRED, ParallelModule, chosen_dim
from weft.kernels.layers.split import GatheredFeatures, Scattered, Shared, Split
from weft.kernels.matmul.all_gather import all_gather_matmul
from weft.kernels.matmul.all_reduce import matmul_all_reduce
from weft.kernels.matmul.reduce_scatter import matmul_reduce_scatter

if TYPE_CHECKING:
    from typing_extensions import Self


class _ParallelLinear(ParallelModule):
    """What the two linear layers share."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    weight_scale: nn.Parameter | None

    def _take(
        self,
        linear: nn.Linear,
        group: GroupLike,
        sequence_dim: int | None,
        merged_sizes: Sequence[int] | None,
        copies: Sequence[int] | None,
    ) -> None:
        """Keep this rank's part of a whole layer."""
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.group, self.sequence_dim = resolve(group), chosen_dim(self, sequence_dim)
        W = self.group.world_size
        cut_features = linear.weight.shape[self.cut["weight"]]
        sizes = (cut_features,) if merged_sizes is None else tuple(merged_sizes)
        if sum(sizes) != cut_features or min(sizes, default=0) < 0:
            raise ValueError(
                f"merged_sizes must add up to the {cut_features} features that "
                f"{type(self).__name__} cuts, got {sizes}"
            )
        shared = (1,) * len(sizes) if copies is None else tuple(copies)
        if len(shared) != len(sizes) or any(count < 1 or W % count for count in shared):
            raise ValueError(
                f"copies must hold, for each of {len(sizes)} merged layers, a divisor of the {W} "
                f"ranks, got {shared}"
            )
        self.split = Split(sizes, shared, W)
        self.take(linear, ("weight", "bias"))
        self.register_parameter("weight_scale", None)

    @classmethod
    def _of_linear(cls, linear: nn.Linear, group: GroupLike, **options: Any) -> Self:
        """The constructor's layer, with the parameters of `linear`."""
        _check_plain(linear)
        features, biased = (linear.in_features, linear.out_features), linear.bias is not None
        dtype = linear.weight.dtype
        layer = cls(*features, biased, "meta", dtype, group=group, **options)
        layer.take(linear, ("weight", "bias"))
        return layer

    def quantize(self) -> Self:
        """Turn the weight into fp8 (e4m3) with a scale for each output feature, for inference.

        From then on inputs are rounded to fp8 as well, with a scale for each row computed at run
        time, and the state holds `weight` in fp8 and `weight_scale` (out_features, 1) in fp32,
        whose product is the original weight. `load_state_dict` takes such a state of the whole
        layer, also with one scale for all of it or one for each merged layer. Every rank must call
        this; it returns the module.
        """
        if self.weight_scale is not None:
            raise RuntimeError(f"this {type(self).__name__} is already quantized")
        with torch.no_grad():
            largest = magnitudes(self.weight)
            if self.cut["weight"] == 1 and not largest.is_meta:  # ranks have parts of its rows
                largest = all_reduce(largest, self.group, reduce_op="max")
            weight, scale = quantized(self.weight, largest)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        return self

    def drawn(self) -> nn.Module:
        """An nn.Linear with new values."""
        weight, biased = self.weight, self.bias is not None
        return nn.Linear(self.in_features, self.out_features, biased, weight.device, weight.dtype)

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the nn.Linear."""
        out = self.out_features
        return {"weight": (out, self.in_features), "bias": (out,), "weight_scale": (out, 1)}

    def loaded(self, name: str, stored: torch.Tensor) -> torch.Tensor:
        """As in every module; a scale may also be one for all features, or one for each layer."""
        if name == "weight_scale":
            if self.weight_scale is None:
                raise ValueError(
                    "the stored weight is fp8 with a weight_scale: call quantize() first"
                )
            if stored.numel() == 1:
                stored = stored.reshape(1, 1).expand(self.out_features, 1)
            elif stored.numel() == self.out_features:
                stored = stored.reshape(-1, 1)
            elif self.cut["weight"] == 0 and stored.numel() == len(self.split.sizes):
                each = torch.tensor(self.split.sizes, device=stored.device)
                stored = stored.reshape(-1, 1).repeat_interleave(each, 0)
        return super().loaded(name, stored)

    def extra_repr(self) -> str:
        """As nn.Linear's, with what differs."""
        sizes, copies = self.split.sizes, self.split.copies
        merged = f"merged_sizes={sizes}, " if len(sizes) > 1 else ""
        merged += f"copies={copies}, " if max(copies) > 1 else ""
        merged += "" if self.weight_scale is None else "fp8, "
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, sequence_dim={self.sequence_dim}, {merged}"
            f"rank {self.group.rank} of {self.group.world_size}"
        )


def _check_plain(linear: nn.Linear) -> None:
    """Raise for a layer that is not an nn.Linear, or whose weight cannot be cut by rows."""
    weight: torch.Tensor | None = getattr(linear, "weight", None)
    if not isinstance(linear, nn.Linear) or weight is None:
        raise ValueError(
            f"from_linear takes an nn.Linear, got {type(linear).__name__}: make one of its weight "
            f"and bias first (that of transformers' Conv1D is transposed)"
        )
    shape = linear.out_features, linear.in_features
    if (
        tuple(weight.shape) != shape
        or not (weight.is_floating_point() or weight.is_complex())
        or hasattr(weight, "__tensor_flatten__")  # a subclass that wraps other tensors
    ):
        raise ValueError(
            f"from_linear takes a plain weight {shape} of floats, got {type(weight).__name__} "
            f"{tuple(weight.shape)} of {weight.dtype}: replace layers before they are quantized, "
            f"and shard layers of DTensors by weft.dtensor.parallel"
        )


class ColumnParallelLinear(_ParallelLinear):
    """nn.Linear with its output features cut over the ranks (by torch.chunk).

    Input: (*, in_features), a shard along `sequence_dim`, or whole with `sequence_dim=None`.
    Output: (*, this rank's part of out_features), whole along the sequence; with `gather_output`
    (*, out_features) on every rank. The ranks must then all do the same with it: their gradients
    are not added up, unlike those of `weft.collectives.all_gather`.

    With `keep_gathered` the gathered input, W times the shard, is kept for the gradient of the
    weight, as in torch; without, the shard is, and backward gathers it again: 3 collectives in all
    rather than 2. With `sequence_dim=None`, or a frozen weight, nothing is gathered for it.

    Example:
        >>> up = weft.ColumnParallelLinear.from_linear(mlp.up, sequence_dim=0)
        >>> down = weft.RowParallelLinear.from_linear(mlp.down, sequence_dim=0)
        >>> y_shard = down(F.gelu(up(x_shard)))
    """

    cut: ClassVar[dict[str, int]] = {"weight": 0, "bias": 0, "weight_scale": 0}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        group: GroupLike = None,
        sequence_dim: int | None = REQUIRED,
        merged_sizes: Sequence[int] | None = None,
        copies: Sequence[int] | None = None,
        gather_output: bool = False,
        keep_gathered: bool = True,
    ) -> None:
        """Draw the weights of an nn.Linear and keep this rank's part.

        Args:
            in_features, out_features, bias, device, dtype: of the whole nn.Linear. With the same
                seed on every rank, the weights are those that it would have drawn.
            group: ProcessGroup, 1-D DeviceMesh, or None for the world.
            sequence_dim: to be chosen. An int: the activations outside the pair are cut over the
                ranks along this dim (sequence parallelism). None: they are whole, and the same, on
                every rank. One in place of the other gives the right output and wrong gradients.
            merged_sizes: for a layer that merges several (Q, K and V; gate and up), how many of the
                features that are cut belong to each, so that every rank gets its part of each, side
                by side; None: a single layer.
            copies: for each merged layer, on how many consecutive ranks each of its parts is
                replicated: W // heads for K and V with fewer heads than there are ranks, so that
                each rank has a whole head. None: 1.
            gather_output: see the class.
            keep_gathered: see the class.

        Raises:
            TypeError: no sequence_dim.
            ValueError: merged_sizes that do not add up to the features, or copies that do not
                divide the ranks.
        """
        super().__init__()
        whole = nn.Linear(in_features, out_features, bias, device, dtype)
        self._take(whole, group, sequence_dim, merged_sizes, copies)
        self.gather_output, self.keep_gathered = gather_output, keep_gathered

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        group: GroupLike = None,
        *,
        sequence_dim: int | None = REQUIRED,
        merged_sizes: Sequence[int] | None = None,
        copies: Sequence[int] | None = None,
        gather_output: bool = False,
        keep_gathered: bool = True,
    ) -> Self:
        """This rank's part of `linear`, which must hold the same values on every rank.

        Raises:
            TypeError: no sequence_dim.
            ValueError: not an nn.Linear, or one whose weight is quantized or a DTensor; otherwise
                as the constructor.

        Example:
            Q, K and V of 4, 2 and 2 features, merged_sizes=(4, 2, 2), 2 ranks: rank 1 gets rows
            2, 3 (Q), 5 (K) and 7 (V) of the weight, and returns q, k, v of 2, 1 and 1 features.
        """
        cut = {"sequence_dim": sequence_dim, "merged_sizes": merged_sizes, "copies": copies}
        kept = {"gather_output": gather_output, "keep_gathered": keep_gathered}
        return cls._of_linear(linear, group, **cut, **kept)

    @property
    def output_sizes(self) -> list[int]:
        """How many features of each merged layer `forward` returns, side by side.

        Example: q, k, v = qkv(x).split(qkv.output_sizes, -1)
        """
        split = self.split
        return list(split.sizes) if self.gather_output else split.by_rank[self.group.rank]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The whole sequence's output, this rank's features or all."""
        _check_untransformed()
        weight, bias, split, group = self.weight, self.bias, self.split, self.group
        if max(split.copies) > 1 and torch.is_grad_enabled():
            weight = Shared.apply(weight, split, group)
            bias = None if bias is None else Shared.apply(bias, split, group)
        scales: dict[str, Any] = {}
        y: torch.Tensor
        dim = self.sequence_dim
        if self.weight_scale is not None:
            x, scales = _quantized_input(x, self.weight_scale)
        if dim is not None:
            if not is_traced(x):
                op = f"{type(self).__name__} with sequence_dim={dim}"
                check_shards(group, op, x, _SHARDS)
            y = all_gather_matmul(
                x,
                weight.t(),
                group,
                bias=bias,
                gather_dim=dim,
                keep_gathered=self.keep_gathered,
                **scales,
            )
        elif scales:
            y = _scaled_matmul(x, weight.t(), bias, **scales)
        else:
            y = _of_whole_input(x, weight, bias, group)
        if self.gather_output:
            y = GatheredFeatures.apply(y, split, group)
        return y


class RowParallelLinear(_ParallelLinear):
    """nn.Linear with its input features cut over the ranks (by torch.chunk).

    Input: (*, this rank's part of in_features), whole along the sequence; with
    `input_is_parallel=False` (*, in_features), the same on every rank, of which each takes its
    part: the gradient is the whole one on every rank.
    Output: (*, out_features), a shard along `sequence_dim`, or whole with `sequence_dim=None`. The
    bias is replicated and added once.

    Partial sums travel in `wire_dtype`, as of `weft.matmul_reduce_scatter`: in half precision they
    are two thirds of the bytes of the default, and each rank's is rounded.
    """

    cut: ClassVar[dict[str, int]] = {"weight": 1}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        group: GroupLike = None,
        sequence_dim: int | None = REQUIRED,
        merged_sizes: Sequence[int] | None = None,
        input_is_parallel: bool = True,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        """As ColumnParallelLinear's; `input_is_parallel` and `wire_dtype`: see the class."""
        super().__init__()
        whole = nn.Linear(in_features, out_features, bias, device, dtype)
        self._take(whole, group, sequence_dim, merged_sizes, None)
        self.input_is_parallel, self.wire_dtype = input_is_parallel, wire_dtype

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        group: GroupLike = None,
        *,
        sequence_dim: int | None = REQUIRED,
        merged_sizes: Sequence[int] | None = None,
        input_is_parallel: bool = True,
        wire_dtype: torch.dtype | None = None,
    ) -> Self:
        """As ColumnParallelLinear's: this rank's part of `linear`."""
        cut = {"sequence_dim": sequence_dim, "merged_sizes": merged_sizes}
        options = {"input_is_parallel": input_is_parallel, "wire_dtype": wire_dtype}
        return cls._of_linear(linear, group, **cut, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks' features: this rank's part of the sequence, or all of it.

        Raises:
            ValueError: the input does not have this rank's features, or all where it should.
        """
        _check_untransformed()
        wanted = self.weight.shape[1] if self.input_is_parallel else self.in_features
        if x.shape[-1] != wanted:
            given = "all" if not self.input_is_parallel else f"this rank's {wanted} of the"
            raise ValueError(
                f"RowParallelLinear with input_is_parallel={self.input_is_parallel} takes {given} "
                f"{self.in_features} features, as a ColumnParallelLinear with gather_output="
                f"{not self.input_is_parallel} returns them, got {tuple(x.shape)}"
            )
        if not self.input_is_parallel:
            x = Scattered.apply(x, self.split, self.group)
        options: dict[str, Any] = {"bias": self.bias, "wire_dtype": self.wire_dtype}
        if self.weight_scale is not None:
            x, scales = _quantized_input(x, self.weight_scale)
            options |= scales
        if self.sequence_dim is None:
            return matmul_all_reduce(x, self.weight.t(), self.group, **options)
        return matmul_reduce_scatter(
            x, self.weight.t(), self.group, scatter_dim=self.sequence_dim, **options
        )


_SHARDS = (
    "If x is the same whole activation on every rank, make the layers with sequence_dim=None; if "
    "not, pass each rank its own part, x.chunk(world_size, dim)[rank]"
)


def _check_untransformed() -> None:
    # A compiler knows no transforms; ours would only meet them in an autograd function.
    if not torch.compiler.is_compiling():
        check_untransformed()


def _quantized_input(
    x: torch.Tensor, weight_scale: torch.Tensor
) -> tuple[torch.Tensor, dict[str, Any]]:
    """x in fp8, and the scales of a call with it, whose result has x's dtype."""
    rounded, scale = quantized(x, magnitudes(x))
    return rounded, {"scale_a": scale, "scale_b": weight_scale.t(), "out_dtype": x.dtype}


def _scaled_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    op = "ColumnParallelLinear"
    scaling = scaling_of(op, x, [w], [bias], scale_a, scale_b, out_dtype)
    assert scaling is not None
    return scaled_products(x, [w], [bias], scaling)[0]


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
        x, weight = conjugated(*ctx.saved_tensors)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = matmul_all_reduce(dy, weight, ctx.group)
        if ctx.needs_input_grad[1]:
            rows = as_rows(dy), as_rows(x)
            # A compiler picks the library itself; second-order gradients need torch's own ops.
            if is_traced(dy) or torch.is_grad_enabled():
                return dx, rows[0].t() @ rows[1], None
            grad = WeightGrad(weight)
            grad.add(*rows)
            dw = grad.result()
        return dx, dw, None
